"""Features of images, computed on the backend by a trained model without its head: ``--features``.

A model's features are what it computes before its head, timm's ``forward_features``. The devices
compute those of a batch of images, and each process reads those of its own share.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import shutil
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from safetensors.torch import save
from torch import nn

from data.loader import PADDING, Batch, BatchLoader, prefetch
from data.source import DataSource, open_data
from models.spec import ModelSpec
from training import pca
from training.backend import Backend, bad_data_is_the_users, dataset_request
from training.config import RunConfig
from training.errors import UsageError
from training.files import check_folder_writable, folder_at, replace_file
from training.initial_weights import InitialWeights, fit
from training.logs.bad_images import TRAIN, VAL, BadImages
from training.logs.records import save_picture, spread
from training.objectives import normalizer
from training.predict import find_trained, place_trained, printer
from training.processes import exchange
from training.processes.exchange import check_alike
from training.resolve import Run, resolve_model
from training.weights import Weights, weights_in, with_preprocessing_of

CLASS, MEAN, PATCHES = "class", "mean", "patches"
_AHEAD = 2
"""How many batches of features may be on their way to the host."""

# -- computing them --------------------------------------------------------------------------------


@contextlib.contextmanager
def _tokens_of(model: nn.Module, spec: ModelSpec) -> Iterator[Callable[[torch.Tensor], Any]]:
    """Yield a function from normalized images to what the head gets: (images, tokens, width).

    The model runs as it always does, so that every form of sharding gathers its weights; the
    tokens are taken on the way, where ``spec.head_method`` is called.
    """
    inner = next(part for part in model.modules() if isinstance(part, type(spec.meta)))
    name, seen = spec.head_method, list[torch.Tensor]()
    own, head = vars(inner).get(name), getattr(inner, name)

    def see(tokens: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        seen.append(tokens)
        return head(tokens, *args, **kwargs)

    def compute(images: torch.Tensor) -> torch.Tensor:
        model(images)
        return seen.pop()

    setattr(inner, name, see)
    try:
        yield compute
    finally:
        delattr(inner, name)
        if own is not None:
            setattr(inner, name, own)


class Labelled(NamedTuple):
    """Images of a split, those of this process: features and labels on the host."""

    numbers: torch.Tensor
    """The place of each in the split, int64."""
    features: torch.Tensor
    """(images, width), fp32."""
    labels: torch.Tensor
    """int64."""
    images: int
    """How many the split has, over all processes, with those that cannot be read."""


def counts_of(bank: Labelled, queries: Labelled) -> tuple[list[tuple[int, int]], int]:
    """Return how many images of both each process has, and how many classes those of ``bank`` are
    of: one more than their largest label. All processes must call it."""
    most = int(bank.labels.max()) if len(bank.labels) else -1
    found = exchange.gather([len(bank.labels), len(queries.labels), most])
    return [(here, asked) for here, asked, _ in found], 1 + max(most for *_, most in found)


class Features:
    """Computes features of the images of a source, in each process those of its own share."""

    def __init__(
        self, model: nn.Module, run: Run, backend: Backend, data: DataSource, kinds: Sequence[str]
    ) -> None:
        """``data``: training images are not augmented. ``kinds``: CLASS, MEAN, PATCHES.

        Must be made before the first step is recorded.
        """
        self._model, self._run, self._backend = model, run, backend
        self.data, self._kinds = data, kinds
        self._prefix = run.model.prefix_tokens
        self._normalize = normalizer(run, backend.constant)

    def loader(self, split: str, only: Sequence[int] | None = None) -> BatchLoader:
        """Open a loader of a split's images, each with its number in place of its label.

        ``only``: the numbers of a few; None: all.
        """
        size, images = self._run.config.data.pass_size, self.data.splits[split].numbered()
        open_share = functools.partial(images.batches, size)
        if only is not None:
            open_share = functools.partial(images.batches_of, only, size)
        return self._backend.loader(open_share, size, reads_rows=self.data.reads_rows)

    def of(
        self, loader: BatchLoader, batch_done: Callable[[], bool | None] = lambda: None
    ) -> Iterator[tuple[np.ndarray, dict[str, torch.Tensor]]]:
        """Yield, batch by batch, the numbers of the images of this process, (images,), and their
        features by kind, fp32 on the host: (images, width), or (images, patches, width).

        It ends early if ``batch_done``, called after each batch, returns True. All processes must
        call it, and consume all of it.
        """
        backend, spec = self._backend, self._run.model
        numbers: deque[np.ndarray] = deque()  # on the host, of the batches that are on their way

        def source() -> Iterator[Batch]:
            for images, which in loader.epoch(0):
                numbers.append(which.numpy())
                yield images, which

        def arrived() -> tuple[np.ndarray, dict[str, torch.Tensor]]:
            values, which = pending.popleft().result(), numbers.popleft()
            there = which != PADDING
            if there.all():
                return which, values
            kept = torch.from_numpy(there)
            return which[there], {kind: value[kept] for kind, value in values.items()}

        pending: deque[Future[dict[str, torch.Tensor]]] = deque()
        was_training = self._model.training
        self._model.eval()
        try:
            with (
                _tokens_of(self._model, spec) as compute,
                contextlib.closing(prefetch(source(), backend.put, loader.prefetch_depth)) as ready,
            ):
                for images, _ in ready:
                    with torch.no_grad():
                        values = self._of_tokens(compute(self._normalize(images)))
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

    def of_some(self, split: str, numbers: Sequence[int]) -> torch.Tensor:
        """Return PATCHES, the only kind computed, of the images with these numbers: (images,
        patches, width), fp32 on the host of every process; zeros for one that cannot be read.

        All processes must call it.
        """
        places = {number: place for place, number in enumerate(numbers)}
        sizes = self._run.model.sizes
        found = torch.zeros(len(numbers), sizes.num_patches, sizes.embed_dim)
        for which, values in self.of(self.loader(split, only=numbers)):
            found[[places[number] for number in which.tolist()]] = values[PATCHES]
        if exchange.count() > 1:
            dist.all_reduce(found)
        return found

    def labelled(
        self,
        split: str,
        loader: BatchLoader,
        kind: str,
        batch_done: Callable[[], bool | None] = lambda: None,
    ) -> Labelled | None:
        """Return features of this ``kind``, CLASS or MEAN, of all images of ``loader``, a split's;
        None if ``batch_done``, called after each batch, returned True.

        All processes must call it.
        """
        stopped = False

        def done() -> bool:
            nonlocal stopped
            stopped = bool(batch_done())
            return stopped

        numbers = [torch.zeros(0, dtype=torch.int64)]
        found = [torch.zeros(0, self._run.model.sizes.embed_dim)]
        for which, values in self.of(loader, done):
            numbers.append(torch.from_numpy(which))
            found.append(values[kind])
        if stopped:
            return None
        of_split, all_numbers = self.data.splits[split], torch.cat(numbers)
        labels = np.asarray(of_split.labels)[all_numbers.numpy()].astype(np.int64)
        return Labelled(all_numbers, torch.cat(found), torch.from_numpy(labels), len(of_split))

    def _of_tokens(self, tokens: torch.Tensor) -> dict[str, torch.Tensor]:
        patches = tokens[:, self._prefix :].float()
        found = {MEAN: patches.mean(dim=1), PATCHES: patches}
        if CLASS in self._kinds:
            found[CLASS] = tokens[:, 0].float()
        return {kind: found[kind] for kind in self._kinds}


def default_kind(spec: ModelSpec) -> str:
    """Return the kind of features that stands for an image: the class token, if there is one."""
    return CLASS if spec.has_class_token else MEAN


# -- the backbone, and the images ------------------------------------------------------------------


def find_backbone(config: RunConfig) -> tuple[RunConfig, Weights]:
    """Find the weights of ``--init_from``, whose head may be missing, or else those that
    ``--eval_only`` uses.

    Raises UsageError, see ``find_trained``.
    """
    path = config.checkpoints.init_from
    if path is None:
        return find_trained(config)
    if config.use.use_ema:
        raise UsageError("--use_ema requires --resume, and --init_from is given: use --resume PATH")
    if "resume" in config.given:
        raise UsageError("--init_from and --resume name weights both: drop one of the two")
    config, _ = resolve_model(config)
    return config, weights_in(folder_at(path), "--init_from")


@bad_data_is_the_users()
def open_plainly(run: Run, *, labels: bool = True) -> DataSource:
    """Open the images of ``run`` without augmentation, of any number of classes.

    Raises UsageError if there are none.
    """
    return open_data(dataset_request(run, labels=labels, augment=False))


def fit_backbone(weights: Weights, run: Run, data: DataSource) -> InitialWeights | None:
    """Return how weights of ``--init_from`` become the model's; None for others, which are its own
    already. Raises UsageError, see ``fit``."""
    return fit(weights, run, data.classes) if run.config.checkpoints.init_from else None


# -- --features ------------------------------------------------------------------------------------

_PARQUET = ".parquet"
_FILE_BYTES = 2**28
"""The most bytes of features in a file, unless one batch has more; a process holds three such."""
DESCRIPTION, PICTURE = "features.json", "pca.png"


def prepare_features(weights: Weights, run: Run) -> tuple[Run, Callable[[Run, Backend], None]]:
    """Return the run with its data, and the body of every process. Raises UsageError."""
    use, out = run.config.use, _out(run)
    if os.path.lexists(out):
        raise UsageError(f"--features {out} is there already: give another name")
    check_folder_writable(out, "--features")
    if out.resolve().is_relative_to(Path(run.config.data.data_dir).resolve()):
        raise UsageError(
            f"--features {out} is inside of --data_dir {run.config.data.data_dir}, where images "
            "are looked for: give another place"
        )
    _check_left(_partial(out))
    if out.suffix == _PARQUET:
        try:
            import pyarrow  # noqa: F401
        except ImportError:
            raise UsageError(
                f"--features {out} requires the package pyarrow: python3 -m pip install pyarrow"
            ) from None
    kinds = use.features_of
    if kinds is None:
        kinds = [CLASS, MEAN] if run.model.has_class_token else [MEAN]
    if CLASS in kinds and not run.model.has_class_token:
        raise UsageError(f"--features_of class: {run.model.name} has no class token here")
    if use.pca and run.config.data.data_source == "volumes":
        raise UsageError("--pca draws images, --data_source volumes has none: drop one of the two")
    weights, run = with_preprocessing_of(weights, run)
    data = open_plainly(run, labels=not use.without_labels)
    initial = fit_backbone(weights, run, data)
    return run, functools.partial(_write_features, weights, initial, data, [*dict.fromkeys(kinds)])


def _out(run: Run) -> Path:
    assert run.config.use.features is not None
    return Path(run.config.use.features)


def _partial(out: Path) -> Path:
    """Return the folder that is written, and renamed when it is complete."""
    return out.with_name(f"{out.name}.partial")


def _check_left(partial: Path) -> None:
    """Raise UsageError if ``partial`` is there and no folder that a start of this kind has left."""
    if not os.path.lexists(partial):
        return
    try:
        is_left = not partial.is_symlink() and all(
            each.name.startswith((f"{TRAIN}-", f"{VAL}-", DESCRIPTION, PICTURE))
            for each in partial.iterdir()
        )
    except OSError:
        is_left = False
    if not is_left:
        raise UsageError(
            f"{partial}, the folder for what is incomplete, is there already and has something "
            "else: remove it, or give --features another name"
        )


@contextlib.contextmanager
def _writing(out: Path) -> Iterator[None]:
    """Raise in all processes a UsageError if one of them cannot write inside.

    It must not contain a collective call.
    """
    with exchange.failing_together():
        try:
            yield
        except OSError as error:
            where = f": {error.filename}" if error.filename else ""
            reason = error.strerror or error
            raise UsageError(f"cannot write --features {out}: {reason}{where}") from None


@bad_data_is_the_users()
def _write_features(
    weights: Weights,
    initial: InitialWeights | None,
    data: DataSource,
    kinds: list[str],
    run: Run,
    backend: Backend,
) -> None:
    use, out, say = run.config.use, _out(run), printer(backend)
    partial = _partial(out)
    check_alike(run, data)
    with _writing(out):
        if backend.is_main:
            if partial.exists():
                shutil.rmtree(partial)
            partial.mkdir(parents=True)
    with exchange.failing_together():
        if not partial.is_dir():
            raise UsageError(f"--features {out}: give a folder that all hosts share")
    say(f"data: {data}")
    model = place_trained(weights, run, backend, say, initial)
    features = Features(model, run, backend, data, kinds)
    of_patches = Features(model, run, backend, data, [PATCHES])
    say(backend.describe())
    bad_images = BadImages(run.config.data.max_bad_images, data, is_main=backend.is_main)
    counts = {}
    for split, images in data.splits.items():
        say(f"computing features of {len(images):,} images of {split} ...")
        loader = features.loader(split)
        labels = None if use.without_labels else np.asarray(images.labels)
        writer = _Writer(partial, split, out.suffix, images.name_of, labels)
        for numbers, values in features.of(loader):
            writer.add(numbers, values)
        with _writing(out):
            writer.finish()
        bad_images.collect(split, loader, say)
        counts[split] = sum(exchange.gather(writer.written))
    if bad_images.excess:
        raise UsageError(bad_images.excess, agreed=True)
    split = VAL if VAL in data.splits else TRAIN
    shown = spread(pca.IMAGES, len(data.splits[split])) if use.pca else []
    patches = of_patches.of_some(split, shown) if shown else torch.zeros(0)
    with _writing(out):
        if backend.is_main:
            picture = pca.draw(data.splits[split], shown, patches, run.model.sizes.grid)
            if picture is not None:
                save_picture(picture, partial / PICTURE)
            content = {
                "model": run.config.model.model,
                "weights": str(weights.path),
                "preprocessing": str(run.config.data.preprocessing),
                "features": kinds,
                "width": run.model.sizes.embed_dim,
                "grid": run.model.sizes.grid,
                "images": counts,
                "classes": data.classes,
            }
            replace_file(partial / DESCRIPTION, json.dumps(content, indent=2) + "\n")
            partial.rename(out)
    say(f"features ({', '.join(kinds)}) of {sum(counts.values()):,} images: {out}")


class _Writer:
    """Writes the features of a split that this process has, in files of a limited size."""

    def __init__(
        self,
        folder: Path,
        split: str,
        suffix: str,
        name_of: Callable[[int], str],
        labels: np.ndarray | None,
    ) -> None:
        """``name_of``: an image's path by its number. ``labels``: of all images, if they have
        any."""
        self._head, self._name_of, self._labels = f"{split}-{exchange.rank():05}", name_of, labels
        self._folder, self._is_parquet = folder, suffix == _PARQUET
        self._rows: list[tuple[np.ndarray, dict[str, torch.Tensor]]] = []
        self._bytes = self._files = 0
        self._failed: OSError | None = None
        self.written = 0
        """The number of images so far."""

    def add(self, numbers: np.ndarray, values: dict[str, torch.Tensor]) -> None:
        """Add images, by their numbers, and their features.

        A disk that fails is reported at the end: the other processes wait for this one's features.
        """
        size = sum(value.nbytes for value in values.values())
        try:
            if self._rows and self._bytes + size > _FILE_BYTES:
                self._write()
        except OSError as error:
            self._failed = error
        if len(numbers) and self._failed is None:
            self._rows.append((numbers, values))
            self._bytes += size

    def finish(self) -> None:
        """Write what is left. Raises OSError."""
        if self._failed is not None:
            raise self._failed
        if self._rows:
            self._write()

    def _write(self) -> None:
        numbers = np.concatenate([each for each, _ in self._rows])
        values = {
            kind: torch.cat([each[kind] for _, each in self._rows]) for kind in self._rows[0][1]
        }
        self._rows, self._bytes = [], 0
        paths = [self._name_of(int(number)) for number in numbers]
        labels = None if self._labels is None else self._labels[numbers].astype(np.int64)
        name = f"{self._head}-{self._files:05}"
        if self._is_parquet:
            _write_parquet(self._folder / f"{name}{_PARQUET}", numbers, paths, labels, values)
        else:
            tensors = values | {"number": torch.from_numpy(numbers)}
            if labels is not None:
                tensors["label"] = torch.from_numpy(labels)
            content = save(tensors, {"paths": json.dumps(paths)})
            (self._folder / f"{name}.safetensors").write_bytes(content)
        self._files += 1
        self.written += len(numbers)


def _write_parquet(
    path: Path,
    numbers: np.ndarray,
    paths: list[str],
    labels: np.ndarray | None,
    values: dict[str, torch.Tensor],
) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    # Names of files may hold bytes that are not text.
    names = [each.encode(errors="surrogateescape").decode(errors="replace") for each in paths]
    columns: dict[str, Any] = {"path": names, "number": numbers}
    if labels is not None:
        columns["label"] = labels
    for kind, value in values.items():
        flat = value.reshape(len(value), -1)
        columns[kind] = pa.FixedSizeListArray.from_arrays(
            pa.array(flat.reshape(-1).numpy()), flat.shape[1]
        )
    pq.write_table(pa.table(columns), path)
