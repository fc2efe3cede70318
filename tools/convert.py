"""Converts weights between DCP, torch.save and safetensors: ``python3 -m tools.convert SRC DST``.

See docs/files.md, also for a DST on the Hugging Face Hub. Weights are memory-mapped from files:
those of SRC, or a scratch file for DCP's reads and for casts. The kernel can evict pages that are
not in use, so a model larger than the host's memory can be converted.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

if __name__ == "__main__":  # by its path from any folder, or by another Python
    sys.path[0] = str(Path(__file__).resolve().parent.parent)
    import check_python

    check_python.check("tools.convert")

import torch
import torch.distributed.checkpoint as dcp
from huggingface_hub import split_torch_state_dict_into_shards
from safetensors.torch import save_file
from torch.distributed.checkpoint.planner import ReadItem
from tqdm import tqdm

from config_fields import local_path
from data.files import without_secrets
from data.hub import HubUnreachable, refusals
from data.utf8 import use_utf8
from training.checkpoints import format as checkpoint
from training.command_line import OneLineParser
from training.config import RunConfig
from training.errors import UsageError
from training.files import HUB_PREFIX, is_on_hub
from training.flags import by_field
from training.processes.output import exit_quietly_on_broken_pipe
from training.resolve import model_of
from training.weights import hub
from training.weights.describe import describe, preprocessing_of
from training.weights.files import run_as_metadata
from training.weights.find import find
from training.weights.formats import Exported, formats
from training.weights.names import physicsnemo_names
from training.weights.source import Source, check_files

PROGRAM = "tools.convert"
SUFFIXES = {".safetensors": "safetensors", ".pt": "torch", ".pth": "torch", ".bin": "torch"}
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
SHARD_SIZE = "5GB"
TIMM, PHYSICSNEMO = "timm", "physicsnemo"
"""Whose names of tensors are written."""
_ALIGNMENT = 64
"""Bytes."""
_WHOLE = 10**6
"""Gigabytes that no file of weights has: for a program that reads one file."""

# -- Progress --------------------------------------------------------------------------------------


def progress_bar(action: str, size: int) -> tqdm:
    """Return a bar that counts bytes, shown on a terminal if there are any."""
    hide = None if size else True  # None: but on a terminal
    return tqdm(
        desc=action, total=size, unit="B", unit_scale=True, dynamic_ncols=True, disable=hide
    )


class ShownReading(dcp.DefaultLoadPlanner):
    """Counts what DCP has read."""

    def __init__(self, bar: tqdm) -> None:
        super().__init__()
        self._bar = bar

    def commit_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> None:
        self._bar.update(tensor.nbytes)


@contextlib.contextmanager
def shown_writing(folder: Path, size: int) -> Iterator[None]:
    """Show how many of ``size`` bytes are on the disk, of files that are written inside."""
    ended = threading.Event()

    def watch() -> None:
        while not ended.wait(0.5):
            with contextlib.suppress(OSError):  # a file that is renamed
                # In blocks: safetensors gives a file its size before it writes.
                written = sum(512 * path.stat().st_blocks for path in folder.rglob("*"))
                bar.update(min(written, size) - bar.n)

    with progress_bar("write", size) as bar:
        thread = threading.Thread(target=watch)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()
        bar.update(size - bar.n)


@contextlib.contextmanager
def gathered(folders: Sequence[Path]) -> Iterator[Path]:
    """Yield a folder of links to the files of one checkpoint that several hosts have written, each
    into a folder of its own. Raises UsageError if the folders are not of one checkpoint."""
    with tempfile.TemporaryDirectory() as scratch:
        whole = Path(scratch) / folders[0].name
        whole.mkdir()
        manifests = set()
        for folder in folders:
            with checkpoint.readable(folder):
                files = checkpoint.read_manifest(folder)
                if files is None:
                    raise UsageError(
                        f"{folder} has no {checkpoint.MANIFEST}: several SRC must be the folders "
                        "step_N of the hosts of one run"
                    )
                manifests.add(checkpoint.checksum(folder / checkpoint.MANIFEST))
                for name in (checkpoint.MANIFEST, *files):
                    if (folder / name).is_file() and not (whole / name).exists():
                        (whole / name).symlink_to((folder / name).absolute())
        if len(manifests) > 1:
            raise UsageError(f"{folders[0]} and {folders[-1]} are not of the same checkpoint")
        yield whole


# -- Reading ---------------------------------------------------------------------------------------


def mapped_like(layouts: Mapping[str, torch.Tensor], folder: Path) -> dict[str, torch.Tensor]:
    """Return tensors of these shapes and dtypes, mapped from a scratch file in ``folder``.

    The file has no name any more, so it goes with the tensors. Raises OSError if the disk is full.
    """
    begins, end = {}, 0
    for name, layout in layouts.items():
        begins[name] = end
        end += -(-layout.nbytes // _ALIGNMENT) * _ALIGNMENT
    with tempfile.NamedTemporaryFile(dir=folder) as scratch:
        os.posix_fallocate(scratch.fileno(), 0, max(end, 1))  # a full disk would be a bus error
        memory = torch.UntypedStorage.from_file(scratch.name, shared=True, nbytes=max(end, 1))
    return {
        name: torch.empty(0, dtype=layout.dtype).set_(
            memory[begins[name] : begins[name] + layout.nbytes], 0, layout.shape, layout.stride()
        )
        for name, layout in layouts.items()
    }


def read_checkpoint(
    source: Source, dtype: torch.dtype | None, scratch: Path
) -> dict[str, torch.Tensor]:
    """Return the weights, or their EMA, of a folder of DCP by timm's names, floats as ``dtype``."""
    layouts = {
        name: layout.to(dtype) if dtype and layout.is_floating_point() else layout
        for name, layout in source.layouts.items()
    }
    tensors = mapped_like(layouts, scratch)
    with progress_bar("read", sum(tensor.nbytes for tensor in tensors.values())) as bar:
        source.read_into(tensors, ShownReading(bar))
    return tensors


def cast(
    tensors: Mapping[str, torch.Tensor], dtype: torch.dtype, scratch: Path
) -> dict[str, torch.Tensor]:
    """Return the tensors with floats as ``dtype``."""
    narrow = mapped_like(
        {
            name: torch.empty(tensor.shape, dtype=dtype, device="meta")
            for name, tensor in tensors.items()
            if tensor.is_floating_point() and tensor.dtype != dtype
        },
        scratch,
    )
    with progress_bar("cast", sum(tensor.nbytes for tensor in narrow.values())) as bar:
        for name, tensor in narrow.items():
            tensor.copy_(tensors[name])
            bar.update(tensor.nbytes)
    return {**tensors, **narrow}


def publishable(run: checkpoint.SavedRun) -> checkpoint.SavedRun:
    """Return a run without the names of files and folders on the machine where it trained, and
    without the flags of its backend."""
    flags = by_field(RunConfig)
    arguments = {
        name: value
        for name, value in run.arguments.items()
        if name in flags and not flags[name].names_files
    }
    return replace(run, arguments=arguments)


def of_physicsnemo(tensors: Mapping[str, torch.Tensor], path: Path) -> dict[str, torch.Tensor]:
    """Return the tensors of a HybridViT by PhysicsNeMo's names. Raises UsageError for another
    model."""
    try:
        names = physicsnemo_names(tensors)
    except ValueError as error:
        raise UsageError(
            f"--names {PHYSICSNEMO} requires weights of hybrid_vit, not {path}: {error}"
        ) from None
    return {names[name]: tensor for name, tensor in tensors.items()}


# -- Writing ---------------------------------------------------------------------------------------


def write(
    form: str,
    path: Path,
    tensors: dict[str, torch.Tensor],
    run: checkpoint.SavedRun | None,
    config: Mapping[str, Any] | None,
    max_shard_size: str | None,
    exported: Exported | None = None,
) -> None:
    """Write ``path``: one file, or with ``max_shard_size`` Hugging Face's folder of safetensors.

    ``config``: the content of its ``config.json``; ``exported``: the folder of another program, in
    place of that. Raises OSError, or an error of the library.
    """
    about = checkpoint.training_tensors(run.position, run.arguments, run.classes) if run else {}
    if form == "dcp":
        content = {"model": tensors} | ({"training": about} if about else {})
        writer = checkpoint.FolderWriter(path, from_cuda=False)
        with checkpoint.quiet_dcp():
            dcp.save(content, storage_writer=writer, no_dist=True)
        checkpoint.write_manifest(path, writer.sums)
        return
    if form == "torch":  # with a known run as PyTorch's dcp_to_torch, else a plain state dict
        torch.save({"model": tensors, "training": about} if about else tensors, path)
        return
    metadata = {"format": "pt"} | (run_as_metadata(run) if run else {})
    if config and "pretrained_cfg" in config:
        metadata["pretrained_cfg"] = json.dumps(config["pretrained_cfg"])
    if max_shard_size is None:
        write_safetensors(tensors, path, metadata)
        return
    path.mkdir()
    name = exported.weights_name if exported else "model"
    split = split_torch_state_dict_into_shards(
        tensors, max_shard_size=max_shard_size, filename_pattern=f"{name}{{suffix}}.safetensors"
    )
    for file, names in split.filename_to_tensors.items():
        write_safetensors({name: tensors[name] for name in names}, path / file, metadata)
    if split.is_sharded:
        index = {"metadata": split.metadata, "weight_map": split.tensor_to_filename}
        (path / hub.INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
    files: Mapping[str, Any] = {hub.CONFIG_FILE: config} if config else {}
    if exported:
        files = exported.files
    for file, content in files.items():
        (path / file).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def write_safetensors(
    tensors: dict[str, torch.Tensor], path: Path, metadata: dict[str, str]
) -> None:
    """Write a file that has the permissions of any new file; safetensors 0.8 lets only its owner
    read it."""
    path.touch()
    permissions = path.stat().st_mode
    save_file(tensors, path, metadata)
    path.chmod(permissions)


def is_classifier(run: checkpoint.SavedRun) -> bool:
    """Return whether the model was trained on labels, so that it has a head."""
    return run.config.objective.objective == "classify"


def timm_config(run: checkpoint.SavedRun) -> dict[str, Any] | None:
    """Return the ``config.json`` from which ``timm.create_model("local-dir:...")`` makes the model.

    As timm writes it for Hugging Face; None for a model that is not timm's. Raises UsageError.
    """
    spec = model_of(run.config)
    model = spec.as_timm()
    if model is None:
        return None
    sizes, preprocessing = spec.sizes, preprocessing_of(run.arguments, run.path)
    classes = sizes.num_classes if is_classifier(run) else 0  # without a head
    mean, std = preprocessing.of_channels(sizes.input_shape[0])
    config: dict[str, Any] = {
        "architecture": model.architecture,
        "num_classes": classes,
        "num_features": sizes.embed_dim,
        "model_args": {**model.arguments, "num_classes": classes},
        "pretrained_cfg": {
            "input_size": list(sizes.input_shape),
            "fixed_input_size": model.fixed_size,
            "num_classes": classes,
            "mean": mean,
            "std": std,
            "crop_pct": preprocessing.crop_pct,
            "crop_mode": preprocessing.crop_mode,
            "interpolation": preprocessing.interpolation_of_val,
            "custom_load": False,
            "classifier": "head",
        },
    }
    if sizes.input_shape[0] == 3:  # else timm would sum its weights over the channels
        config["pretrained_cfg"]["first_conv"] = model.patch_projection
    if preprocessing.intensity != "auto":  # timm refuses unknown names in pretrained_cfg
        config["intensity"] = preprocessing.intensity
    return config | ({"label_names": run.classes} if run.classes else {})


# -- The Hugging Face Hub --------------------------------------------------------------------------


def check_repository(name: str, *, public: bool) -> None:
    """Raise UsageError if this user cannot write the repository, or if all may read one that is not
    to be ``public``."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import RepositoryNotFoundError

    api, repository = HfApi(), name.removeprefix(HUB_PREFIX)
    with _pushing(name):
        api.whoami()
        try:
            is_public = not api.model_info(repository).private
        except RepositoryNotFoundError:
            return
    if is_public and not public:
        raise UsageError(f"{name} already exists and is public: add --public, or use another name")


def push(folder: Path, name: str, *, public: bool) -> str:
    """Upload the files of a folder to a repository, which is created if there is none; return its
    name with the commit. Raises UsageError."""
    from huggingface_hub import HfApi

    api, repository = HfApi(), name.removeprefix(HUB_PREFIX)
    with _pushing(name):
        api.create_repo(repository, private=not public, exist_ok=True)
        done = api.upload_folder(
            repo_id=repository, folder_path=folder, commit_message="Weights of a Vision Transformer"
        )
    return f"{name}@{done.oid}"


@contextlib.contextmanager
def _pushing(name: str) -> Iterator[None]:
    try:
        with refusals(name, UsageError):
            yield
    except HubUnreachable as error:
        raise UsageError(f"{name} cannot be written: {error}") from None


# -- The command line ------------------------------------------------------------------------------


def convert(options: Any, form: str, max_shard_size: str | None) -> str:
    """Convert as the command line says; return what was done, in one line.

    Raises UsageError if SRC cannot be read or DST not be written, and then leaves nothing there.
    """
    while True:
        source = find(str(options.src), "SRC", use_ema=options.use_ema)
        try:
            check_files(source, verify=not options.no_verify_checkpoint)
            return _converted(source, options, form, max_shard_size)
        except UsageError:
            is_of_run = source.tensors is None and source.path != Path(options.src)
            if not is_of_run or checkpoint.is_complete(source.path):
                raise  # otherwise the run, which is being trained, has removed its checkpoint


def _converted(source: Source, options: Any, form: str, max_shard_size: str | None) -> str:
    """Write DST, under a temporary name beside it. Raises like ``convert``."""
    dst = options.dst
    path, dtype = source.path, DTYPES.get(options.dtype)
    run = source.run and publishable(source.run)
    named = checkpoint.NAME.fullmatch(dst.name) if form == "dcp" else None
    if run and named and int(named[1]) != run.position.step:
        raise UsageError(f"{dst}: {path} is of step {run.position.step}: use another name")
    if notes := source.notes:
        print(without_secrets(f"{PROGRAM}: {path}: {notes}"), file=sys.stderr)
    of_format = next((each for each in formats() if each.name == options.names), None)
    partial = dst.with_name(f".{dst.name}.partial")

    def remove() -> None:
        shutil.rmtree(partial, ignore_errors=True)
        partial.unlink(missing_ok=True)

    remove()
    try:
        partial.mkdir()
        if of_format:
            if run is None:
                raise UsageError(f"--names {options.names} requires a checkpoint of a run")
            config = None
        elif run:
            config = timm_config(run)
        else:
            about = describe(source).config.content
            config = dict(about) if "architecture" in about else None
        if source.tensors is None:
            tensors = read_checkpoint(source, dtype, dst.parent)
        else:
            tensors = source.read([*source.layouts])
        exported = None
        if of_format:
            assert run is not None
            exported = of_format.export(run, tensors)
            tensors, run = exported.tensors, None
            print(f"{PROGRAM}: {dst}: {exported.note}", file=sys.stderr)
            if not exported.sharded and options.max_shard_size:
                raise UsageError(f"--names {options.names} writes one file: drop --max_shard_size")
            if not exported.sharded:
                max_shard_size = f"{_WHOLE}GB"
        elif run and not is_classifier(run):  # without what the objective added to the model
            of_model = model_of(run.config).meta.state_dict()
            tensors = {name: tensor for name, tensor in tensors.items() if name in of_model}
        for name, tensor in tensors.items():
            if not tensor.is_contiguous() or tensor.untyped_storage().nbytes() > tensor.nbytes:
                tensors[name] = tensor.clone(memory_format=torch.contiguous_format)  # a view
        if dtype:
            tensors = cast(tensors, dtype, dst.parent)
        if options.names == PHYSICSNEMO:
            tensors = of_physicsnemo(tensors, path)
            run = run if form == "safetensors" else None  # a state dict, which it loads as it is
        size = sum(tensor.nbytes for tensor in tensors.values())
        with shown_writing(partial, size):
            write(form, partial / dst.name, tensors, run, config, max_shard_size, exported)
        (partial / dst.name).rename(dst)
    except UsageError:
        raise
    # A full disk shows as OSError, as an error of the zip writer, or wrapped by DCP.
    except (Exception, dcp.CheckpointException) as error:  # noqa: BLE001
        reason = checkpoint.reason_of(error)
        raise UsageError(f"{path} cannot be converted to {dst}: {reason}") from None
    finally:
        remove()
    return f"converted {path}: {len(tensors)} tensors, {size:,} bytes, to {dst}"


def output_format(options: Any) -> tuple[str, str | None]:
    """Return the format of DST and, of a folder of .safetensors files, the largest file. Raises
    UsageError for a DST that cannot be written."""
    dst: Path = options.dst
    by_suffix = SUFFIXES.get(dst.suffix)
    if by_suffix and options.to and options.to != by_suffix:
        raise UsageError(
            f"--to {options.to} is incompatible with {dst}: a {dst.suffix} file is {by_suffix}"
        )
    form = options.to or by_suffix
    if form is None:
        raise UsageError(
            f"{dst}: use the suffix .safetensors, .pt, .pth or .bin for a file, or --to dcp or "
            "--to safetensors for a folder"
        )
    max_shard_size: str | None = options.max_shard_size
    if form == "safetensors" and not by_suffix:
        max_shard_size = max_shard_size or SHARD_SIZE
    elif max_shard_size:
        raise UsageError(
            "--max_shard_size requires a folder of .safetensors files: use --to safetensors and a "
            "DST without a suffix"
        )
    if form == "dcp" and options.names != TIMM:
        raise UsageError(
            f"--names {options.names} requires a file: --resume reads a DCP folder by timm's names"
        )
    if options.names not in (TIMM, PHYSICSNEMO) and max_shard_size is None:
        raise UsageError(
            f"--names {options.names} requires a folder: use --to safetensors and a DST without a "
            "suffix"
        )
    if dst.exists() or dst.is_symlink():
        raise UsageError(f"{dst} already exists: use another name, or remove it")
    if not dst.parent.is_dir():
        raise UsageError(f"{dst.parent} is not a folder: create it first")
    return form, max_shard_size


def main(argv: Sequence[str] | None = None) -> int:
    """Convert as the command line says; return the exit code."""
    parser = OneLineParser(
        PROGRAM, "Convert a model's weights to another file format, one tensor at a time."
    )
    parser.add_argument(
        "src",
        type=local_path,
        nargs="+",
        help="a checkpoint step_N, a run's --ckpt_dir (its newest checkpoint), any other DCP "
        "folder, a torch.save file, a .safetensors file, a folder of them in Hugging Face's "
        "layout, or hf-hub:OWNER/NAME[@REVISION] on the Hugging Face Hub; after "
        "--ckpt_dir_per_host the folders step_N of all hosts, one after the other",
    )
    parser.add_argument(
        "dst",
        type=local_path,
        help="a file .safetensors, .pt, .pth or .bin, or a folder, which must not exist yet; with "
        "--push hf-hub:OWNER/NAME",
    )
    parser.add_argument(
        "--push",
        action="store_true",
        help="upload the weights to the repository DST on the Hugging Face Hub, which is created "
        "as private if it does not exist; requires HF_TOKEN or `hf auth login`, and space for a "
        "copy in TMPDIR",
    )
    parser.add_argument(
        "--public",
        action="store_true",
        help="create the repository of --push as public, or push to a public one (default: private "
        "only)",
    )
    parser.add_argument(
        "--to",
        choices=("dcp", "torch", "safetensors"),
        help="format of a DST without such a suffix; dcp: a checkpoint folder; safetensors: a "
        "folder in Hugging Face's layout (default: by DST's suffix)",
    )
    parser.add_argument(
        "--dtype",
        choices=tuple(DTYPES),
        help="convert floating-point values to this dtype (default: unchanged)",
    )
    parser.add_argument(
        "--names",
        choices=(TIMM, PHYSICSNEMO, *(each.name for each in formats())),
        default=TIMM,
        help="names of the tensors in DST; physicsnemo: those of the HybridViT in PhysicsNeMo's "
        "tutorial, for hybrid_vit, in a .pt file a plain state dict; transformers, open_clip: a "
        "folder with both towers of --objective siglip or clip, which that program loads (default: "
        "timm)",
    )
    parser.add_argument(
        "--max_shard_size",
        metavar="SIZE",
        help="maximum size of each file in a safetensors folder, for example 500MB (default: "
        f"{SHARD_SIZE})",
    )
    parser.add_argument(
        "--use_ema",
        action="store_true",
        help="convert the moving average of the weights (EMA) in SRC instead of the weights",
    )
    parser.add_argument(
        "--no_verify_checkpoint",
        action="store_true",
        help="skip the verification of a checkpoint's checksums (default: verify)",
    )
    options = parser.parse_args(argv)
    name = str(options.dst)
    sources, parts = options.src, contextlib.ExitStack()
    options.src = sources[0]
    try:
        if len(sources) > 1:
            options.src = parts.enter_context(gathered(sources))
        if options.public and not options.push:
            raise UsageError("--public requires --push")
        if is_on_hub(name) != options.push:
            if options.push:
                raise UsageError(f"--push requires a DST hf-hub:OWNER/NAME, not {name}")
            raise UsageError(f"{name} requires --push")
        if not options.push:
            done = convert(options, *output_format(options))
            print(without_secrets(done.replace(f"{options.src}", f"{sources[0]}")))
            return 0
        hub.check_name(name, "DST")
        if "@" in name or options.to not in (None, "safetensors"):
            raise UsageError(
                f"{name}: --push always writes .safetensors files, as a new revision: drop --to "
                "and @REVISION"
            )
        check_repository(name, public=options.public)
        with tempfile.TemporaryDirectory() as folder:
            options.dst = Path(folder) / "weights"
            convert(options, "safetensors", options.max_shard_size or SHARD_SIZE)
            print(f"converted {sources[0]} to {push(options.dst, name, public=options.public)}")
    except UsageError as error:
        text = str(error).replace(f"{options.src}", f"{sources[0]}")
        print(f"{PROGRAM}: error: {text}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"{PROGRAM}: interrupted", file=sys.stderr)
        return 130
    finally:
        parts.close()
    return 0


if __name__ == "__main__":
    use_utf8()
    with exit_quietly_on_broken_pipe(PROGRAM):
        sys.exit(main())
