"""Compute features of images on the backend, with a trained model without its head: ``--features``.

Features are what a model computes before its head, timm's ``forward_features``. The devices compute
the features of a batch, and each process reads those of its share. ``--pca`` draws patch features.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import json
import os
import shutil
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from safetensors.torch import save
from torch import nn
from torch.nn import functional as F

from data.batch import PADDING, Batch, SampleIndex
from data.files import without_secrets
from data.loader import BatchLoader, prefetch
from data.open import open_data
from data.source import DataSource, Split
from training.backend import Backend
from training.data import dataset_request, input_of
from training.errors import UsageError, data_errors_as_usage_errors
from training.evaluation.trained import adapt_trained, open_trained
from training.files import check_folder_writable, replace_file
from training.logs.bad_images import TRAIN, VAL
from training.logs.figures import save_picture, side_by_side, spread
from training.processes import exchange
from training.resolve import Run
from training.weights.adapt import Adapter
from training.weights.source import Source

CLASS, MEAN, PATCHES = "class", "mean", "patches"
_AHEAD = 2
"""How many batches of features may be in transfer to the host."""

FeatureBatch = tuple[np.ndarray, dict[str, torch.Tensor]]
"""The indices of images, (images,), and their features by kind (CLASS, MEAN, PATCHES), fp32 on the
host: (images, width), or (images, patches, width). Features of the program may add kinds."""

# -- computing them --------------------------------------------------------------------------------


class Features:
    """Computes features of the images of a data source; each process gets those of its share."""

    def __init__(self, model: nn.Module, run: Run, backend: Backend, data: DataSource) -> None:
        """Must be created before the first step is recorded. ``data``: without augmentation."""
        self.run, self.data = run, data
        self._model, self._backend = model, backend
        self._input = input_of(run, backend.constant)

    def loader(self, split: str, only: Sequence[int] | None = None) -> BatchLoader:
        """Open a loader of the images of a split, each with its index.
        ``only``: the indices of the images to load; None: all."""
        size, images = self.run.config.data.global_micro_batch_size, self.data.splits[split]
        open_shard = functools.partial(images.batches, size)
        if only is not None:
            open_shard = functools.partial(images.batches_of, only, size)
        return self._backend.loader(open_shard, size, reads_rows=self.data.reads_rows)

    @contextlib.contextmanager
    def _tokens_before_head(self) -> Iterator[list[torch.Tensor]]:
        """Collect the tokens, (images, tokens, width), that each forward pass feeds to the head.
        The model runs unchanged, so every form of sharding gathers its weights as usual."""
        spec = self.run.model
        inner = next(part for part in self._model.modules() if isinstance(part, type(spec.meta)))
        name, collected = spec.head_method, list[torch.Tensor]()
        instance_head, head = vars(inner).get(name), getattr(inner, name)

        def collect(tokens: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            collected.append(tokens)
            return head(tokens, *args, **kwargs)

        setattr(inner, name, collect)
        try:
            yield collected
        finally:
            delattr(inner, name)
            if instance_head is not None:
                setattr(inner, name, instance_head)

    def compute(
        self,
        loader: BatchLoader,
        kinds: Sequence[str],
        batch_done: Callable[[], bool | None] = lambda: None,
    ) -> Iterator[FeatureBatch]:
        """Yield the features of this process's images, batch by batch. All processes must exhaust
        the iterator. It ends early if ``batch_done``, called after each batch, returns True."""
        backend = self._backend
        numbers: deque[np.ndarray] = deque()  # on the host, of the batches in transfer
        pending: deque[Future[dict[str, torch.Tensor]]] = deque()

        def source() -> Iterator[Batch]:
            for batch in loader.epoch(0):
                numbers.append(batch["index"].flatten().numpy())
                yield batch

        def arrived() -> FeatureBatch:
            values, batch_numbers = pending.popleft().result(), numbers.popleft()
            present = batch_numbers != PADDING
            if present.all():
                return batch_numbers, values
            rows = torch.from_numpy(present)
            return batch_numbers[present], {kind: value[rows] for kind, value in values.items()}

        def compute(batch: Batch) -> dict[str, torch.Tensor]:
            given = self._input(batch)
            output = self._model(given)
            found = self.run.model.image_features(collected.pop().float(), given)
            by_kind: dict[str, torch.Tensor | None] = dict(
                zip((CLASS, MEAN, PATCHES), found, strict=True)
            )
            for feature in self.run.config.active_features:
                by_kind |= feature.output_features(output)
            return {  # no others are computed
                kind: value
                for kind, value in by_kind.items()
                if kind in kinds and value is not None
            }

        put = functools.partial(backend.put, fields=loader.fields)
        was_training = self._model.training
        self._model.eval()
        try:
            with (
                self._tokens_before_head() as collected,
                contextlib.closing(prefetch(source(), put, loader.prefetch_depth)) as ready,
            ):
                for index, batch in enumerate(ready):
                    with torch.no_grad():
                        values = backend.run_evaluation(compute, batch, index)
                    pending.append(backend.read_images(values))
                    del values
                    if len(pending) > _AHEAD:
                        yield arrived()
                    if batch_done():
                        break
            while pending:
                yield arrived()
        finally:
            self._model.train(was_training)

    def patches_of(self, split: str, numbers: Sequence[int]) -> torch.Tensor:
        """Return the patch features of these images of a split, on every host: (images, patches,
        width), zeros for an unreadable image. All processes must call it."""
        sizes = self.run.model.sizes
        patches = torch.zeros(len(numbers), sizes.num_patches, sizes.embed_dim)
        if not len(numbers):
            return patches
        for computed, values in self.compute(self.loader(split, numbers), [PATCHES]):
            patches[[numbers.index(number) for number in computed]] = values[PATCHES]
        if exchange.count() > 1:
            dist.all_reduce(patches)
        return patches


@data_errors_as_usage_errors()
def open_plainly(run: Run, *, labels: bool = True) -> DataSource:
    """Open the images of ``run`` without augmentation, with any number of classes. Raises
    UsageError if there are none."""
    return open_data(dataset_request(run, labels=labels, augment=False))


# -- --features ------------------------------------------------------------------------------------

_FILE_BYTES = 2**28
"""Largest size of the features in a file, unless one batch has more; a process holds three of
them."""
_DESCRIPTION, _PICTURE = "features.json", "pca.png"
_PARQUET = ".parquet"
_DRAWN = 8
"""Images of ``--pca``."""


def prepare_features(source: Source, run: Run) -> tuple[Run, Callable[[Run, Backend], None]]:
    """Return the run with its data, and the body of every process. Raises UsageError."""
    use = run.config.use
    assert use.features is not None
    out = Path(use.features)
    partial = out.with_name(f"{out.name}.partial")
    if os.path.lexists(out):
        raise UsageError(f"--features {out} already exists: choose another name")
    check_folder_writable(out, "--features")
    if out.resolve().is_relative_to(Path(run.config.data.data_dir).resolve()):
        raise UsageError(
            f"--features {out} is inside --data_dir {run.config.data.data_dir}, which is searched "
            "for images: choose another place"
        )
    if os.path.lexists(partial) and (
        partial.is_symlink()
        or not partial.is_dir()
        or any(
            not path.name.startswith((f"{TRAIN}-", f"{VAL}-", _DESCRIPTION, _PICTURE))
            for path in partial.iterdir()
        )
    ):
        raise UsageError(
            f"{partial}, the folder for incomplete output, already exists and contains other "
            "files: remove it, or choose another name for --features"
        )
    if out.suffix == _PARQUET and not importlib.util.find_spec("pyarrow"):
        raise UsageError(
            f"--features {out} requires the package pyarrow: python3 -m pip install pyarrow"
        )
    if use.pca and run.config.data.data_source == "volumes":
        raise UsageError(
            "--pca requires images and is incompatible with --data_source volumes: drop one of "
            "the two"
        )
    kinds = use.features_of
    if kinds is None:
        kinds = [CLASS, MEAN] if run.model.has_class_token else [MEAN]
    if CLASS in kinds and not run.model.has_class_token:
        raise UsageError(f"--features_of class: {run.model.name} has no class token")
    data = open_plainly(run, labels=not use.without_labels)
    adapter = adapt_trained(source, run, data.classes)
    body = functools.partial(_write_features, adapter, data, [*dict.fromkeys(kinds)], out, partial)
    return run, body


@contextlib.contextmanager
def _writing(out: Path) -> Iterator[None]:
    """Raise UsageError in all processes if one of them cannot write inside. The body must not
    contain a collective call."""
    with exchange.raise_on_all_ranks():
        try:
            yield
        except OSError as error:
            where = f": {error.filename}" if error.filename else ""
            reason = error.strerror or error
            raise UsageError(f"cannot write --features {out}: {reason}{where}") from None


@data_errors_as_usage_errors()
def _write_features(
    adapter: Adapter,
    data: DataSource,
    kinds: list[str],
    out: Path,
    partial: Path,
    run: Run,
    backend: Backend,
) -> None:
    """Write the features into ``partial``, and rename it when it is complete."""
    with _writing(out):
        if backend.is_main:
            if partial.exists():
                shutil.rmtree(partial)
            partial.mkdir(parents=True)
    with exchange.raise_on_all_ranks():
        if not partial.is_dir():
            raise UsageError(f"--features {out}: use a folder that all hosts share")
    model, bad_images, say = open_trained(adapter, data, run, backend)
    features = Features(model, run, backend, data)
    use, sizes, counts = run.config.use, run.model.sizes, {}
    suffix = _PARQUET if out.suffix == _PARQUET else ".safetensors"
    for split, images in data.splits.items():
        say(f"computing features of {len(images):,} images of {split} ...")
        loader, written = features.loader(split), 0
        failed: OSError | None = None
        for index, batches in enumerate(_batches_of_files(features.compute(loader, kinds))):
            if failed is not None:
                continue  # the other processes wait for this one's features
            path = partial / f"{split}-{exchange.rank():05}-{index:05}{suffix}"
            try:
                written += _write_file(path, batches, images, with_labels=not use.without_labels)
            except OSError as error:
                failed = error
        with _writing(out):
            if failed is not None:
                raise failed
        bad_images.collect(split, loader, say)
        counts[split] = sum(exchange.all_gather_object(written))
    bad_images.check()

    split = VAL if VAL in data.splits else TRAIN
    drawn = spread(_DRAWN, len(data.splits[split])) if use.pca else []
    patches = features.patches_of(split, drawn)

    with _writing(out):
        if backend.is_main:
            if patches.any():
                picture = _draw(data.splits[split], drawn, patches, sizes.grid)
                save_picture(picture, partial / _PICTURE)
            description = {
                "model": run.config.model.model,
                "weights": without_secrets(str(adapter.path)),
                "preprocessing": str(run.config.data.preprocessing),
                "features": kinds,
                "width": sizes.embed_dim,
                "grid": sizes.grid,
                "images": counts,
                "classes": data.classes,
            }
            replace_file(partial / _DESCRIPTION, json.dumps(description, indent=2) + "\n")
            partial.rename(out)
    say(f"features ({', '.join(kinds)}) of {sum(counts.values()):,} images: {out}")


def _batches_of_files(batches: Iterable[FeatureBatch]) -> Iterator[list[FeatureBatch]]:
    """Yield the batches of one file after the other."""
    in_file: list[FeatureBatch] = []
    size = 0
    for numbers, values in batches:
        more = sum(value.nbytes for value in values.values())
        if in_file and size + more > _FILE_BYTES:
            yield in_file
            in_file, size = [], 0
        if len(numbers):
            in_file.append((numbers, values))
            size += more
    if in_file:
        yield in_file


def _write_file(
    path: Path, batches: list[FeatureBatch], images: Split, *, with_labels: bool
) -> int:
    """Write the batches, and clear them, in the format of the path's suffix; return the number of
    images. Raises OSError."""
    numbers = np.concatenate([batch_numbers for batch_numbers, _ in batches])
    tensors = {kind: torch.cat([values[kind] for _, values in batches]) for kind in batches[0][1]}
    batches.clear()  # the memory is needed
    tensors["number"] = torch.from_numpy(numbers)
    if with_labels:
        tensors["label"] = torch.from_numpy(np.asarray(images.labels)[numbers].astype(np.int64))
    paths = [without_secrets(images.name_of(int(number))) for number in numbers]
    if path.suffix != _PARQUET:
        path.write_bytes(save(tensors, {"paths": json.dumps(paths)}))
        return len(numbers)
    import pyarrow as pa
    import pyarrow.parquet as pq

    # Names of files may hold bytes that are not text.
    names = [name.encode(errors="surrogateescape").decode(errors="replace") for name in paths]
    columns: dict[str, Any] = {"path": names}
    for name, values in tensors.items():
        columns[name] = pa.array(values.flatten().numpy())
        if values.ndim > 1:
            columns[name] = pa.FixedSizeListArray.from_arrays(columns[name], values[0].numel())
    pq.write_table(pa.table(columns), path)
    return len(numbers)


# -- --pca: the first three principal components of patches as red, green and blue -----------------
#
# Like figure 1 of DINOv2 (arXiv 2304.07193), but without removing the background: patches with
# similar features have similar colors, across all images of the picture.


def _draw(
    images: Split, numbers: list[int], patches: torch.Tensor, grid: tuple[int, ...]
) -> np.ndarray:
    """Return a picture of images and their patch features, (images, patches, width), as (height,
    width, 3), uint8: a row per readable image, with the image and the colors of its patches.
    ``grid``: rows and columns of patches."""
    loaded = [images[SampleIndex(0, number)].fields for number in numbers]
    readable = [i for i, sample in enumerate(loaded) if sample["index"] != PADDING]
    pixels = torch.stack([loaded[i]["image"].expand(3, -1, -1) for i in readable]) / 255
    colors = components(patches[readable]).unflatten(1, grid).permute(0, 3, 1, 2)
    return side_by_side([pixels.numpy(), F.interpolate(colors, pixels.shape[2:]).numpy()])


def components(features: torch.Tensor) -> torch.Tensor:
    """Return the first three principal components of features, (images, patches, width), over all
    patches of all images, each scaled to 0 to 1: (images, patches, 3), fp32. The largest weight of
    each component is positive. A constant component is 0."""
    rows = features.flatten(0, 1).double()
    rows = rows - rows.mean(dim=0)
    _, directions = torch.linalg.eigh(rows.T @ rows)  # in ascending order
    directions = directions[:, -3:].flip(1)
    largest = directions.gather(0, directions.abs().argmax(dim=0, keepdim=True))
    values = rows @ (directions * largest.sign())
    low, high = values.amin(dim=0), values.amax(dim=0)
    extent = high - low
    extent = extent.clamp(min=max(1e-6 * extent.max().item(), 1e-30))  # less is rounding
    values = (values - low) / extent
    return F.pad(values, (0, 3 - values.shape[1])).float().view(*features.shape[:2], 3)
