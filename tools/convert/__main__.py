"""Converts a model's weights between DCP, torch.save and safetensors; docs/files.md says how."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import timm
import torch
import torch.distributed.checkpoint as dcp
from tqdm import tqdm

from config_fields import local_path
from models.config import ModelConfig, VitConfig
from models.timm_models import EVA_NAMES, TimmSpec
from tools.convert.destinations import (
    Job,
    write_dcp,
    write_safetensors,
    write_safetensors_folder,
    write_torch,
)
from tools.convert.sources import Source, open_source
from training.checkpoints.format import SavedRun, reason_of
from training.errors import UsageError
from training.flags import OneLineParser, from_values
from training.resolve import model_of
from training.weights import preprocessing_of

# ------------------------------------------------------------------------------------------------
# What timm and Hugging Face want to know beside weights: the content of ``config.json``.


_ANY_VIT = "vit_base_patch16_224"
"""The name that timm is given for a preset of ours: all its arguments stand beside it."""


def timm_config(run: SavedRun) -> dict[str, Any] | None:
    """Return what ``timm.create_model("local-dir:...")`` makes the run's model of, as timm writes
    it for Hugging Face; None for a model that is not timm's. Raises UsageError."""
    spec = model_of(from_values(ModelConfig, run.arguments))
    if not isinstance(spec, TimmSpec):
        return None
    if spec.name.startswith("timm/"):
        architecture = spec.name.removeprefix("timm/").partition(".")[0]
        names = [name if name in spec.settings else EVA_NAMES[name] for name in spec.overrides]
    else:
        architecture = spec.name if timm.is_model(spec.name) else _ANY_VIT
        names = [field.name for field in fields(VitConfig) if field.name != "weight_init"]
    arguments = {name: spec.settings[name] for name in names if spec.settings[name] is not None}
    sizes, how = spec.sizes, preprocessing_of(run)
    mean, std = how.of_channels(sizes.input_shape[0])
    config: dict[str, Any] = {
        "architecture": architecture,
        "num_classes": sizes.num_classes,
        "num_features": sizes.embed_dim,
        "model_args": arguments | {"num_classes": sizes.num_classes},
        "pretrained_cfg": {
            "input_size": list(sizes.input_shape),
            "fixed_input_size": True,
            "num_classes": sizes.num_classes,
            "mean": mean,
            "std": std,
            "crop_pct": how.crop_pct,
            "crop_mode": how.crop_mode,
            "interpolation": how.interpolation_of_val,
            "custom_load": False,
            "classifier": "head",
        },
    }
    if sizes.input_shape[0] == 3:  # else timm would sum its weights over the channels
        config["pretrained_cfg"]["first_conv"] = "patch_embed.proj"
    return config | ({"label_names": run.classes} if run.classes else {})


# ------------------------------------------------------------------------------------------------


_PROGRAM = "tools.convert"
_SUFFIXES = {".safetensors": "safetensors", ".pt": "torch", ".pth": "torch", ".bin": "torch"}
_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_SHARD_SIZE = "5GB"


def _parser() -> OneLineParser:
    parser = OneLineParser(
        _PROGRAM,
        "Convert a model's weights to another form of file, one tensor at a time.",
    )
    parser.add_argument(
        "src",
        type=local_path,
        help="a checkpoint step_N, a run's --ckpt_dir (its newest), another folder of DCP, a file "
        "of torch.save, a .safetensors file, or a folder of them in Hugging Face's layout",
    )
    parser.add_argument(
        "dst",
        type=local_path,
        help="what is not there yet: a file .safetensors, .pt, .pth or .bin, or a folder",
    )
    parser.add_argument(
        "--to",
        choices=("dcp", "torch", "safetensors"),
        help="form of a DST without such a suffix; dcp: a checkpoint's folder; safetensors: a "
        "folder in Hugging Face's layout (default: as DST's suffix says)",
    )
    parser.add_argument(
        "--dtype",
        choices=tuple(_DTYPES),
        help="numbers that floating-point values become (default: as they are)",
    )
    parser.add_argument(
        "--max_shard_size",
        metavar="SIZE",
        help=f"largest file of a safetensors folder, 500MB say (default: {_SHARD_SIZE})",
    )
    parser.add_argument(
        "--use_ema",
        action="store_true",
        help="take the moving average of the weights (EMA) that SRC holds, not the weights",
    )
    parser.add_argument(
        "--no_verify_checkpoint",
        action="store_true",
        help="do not compare a checkpoint's files with their checksums first (default: compared)",
    )
    return parser


Write = Callable[[Job, Path], None]


def _writer(dst: Path, to: str | None, max_shard_size: str | None) -> Write:
    """Return what writes the wanted form. Raises UsageError if it is not clear, or cannot be."""
    told = _SUFFIXES.get(dst.suffix)
    if told and to and told != to:
        raise UsageError(f"--to {to} is incompatible with {dst}: a {dst.suffix} file is {told}")
    form = to or told
    if form is None:
        raise UsageError(
            f"{dst}: name a file .safetensors, .pt, .pth or .bin, or give --to dcp or --to "
            "safetensors for a folder"
        )
    if max_shard_size and (form != "safetensors" or told):
        raise UsageError("--max_shard_size is for a folder: --to safetensors and a name for it")
    if form == "safetensors" and not told:
        size = max_shard_size or _SHARD_SIZE
        return lambda job, path: write_safetensors_folder(job, path, size)
    return {"dcp": write_dcp, "torch": write_torch, "safetensors": write_safetensors}[form]


def _check_free(dst: Path) -> None:
    if dst.exists() or dst.is_symlink():
        raise UsageError(f"{dst} is there already: name another, or remove it")
    if not dst.parent.is_dir():
        raise UsageError(f"{dst.parent} is no folder: make it first")


def convert(source: Source, dst: Path, write: Write, dtype: torch.dtype | None) -> int:
    """Write the weights to ``dst``, by a temporary name beside it; return how many bytes they have.

    Raises UsageError if they cannot be read or written, and then leaves nothing there.
    """
    config = timm_config(source.run) if source.run else source.config
    temporary = dst.with_name(f".{dst.name}.partial")
    job = Job(source, dtype, config, lambda size: None)
    total = sum(map(job.size_of, source.tensors.values()))
    bar = tqdm(total=total, unit="B", unit_scale=True, dynamic_ncols=True, disable=None)
    _remove(temporary)
    try:
        with bar:
            write(Job(source, dtype, config, bar.update), temporary)
        temporary.rename(dst)
    # A full disk shows as OSError, as an error of the zip writer, or wrapped by DCP.
    except (Exception, dcp.CheckpointException) as error:  # noqa: BLE001
        raise UsageError(
            f"{source.path} cannot be converted to {dst}: {reason_of(error)}"
        ) from None
    finally:
        _remove(temporary)
    return total


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def main(argv: Sequence[str] | None = None) -> int:
    """Convert as the command line says; return the exit code."""
    given = _parser().parse_args(argv)
    try:
        write = _writer(given.dst, given.to, given.max_shard_size)
        _check_free(given.dst)
        source = open_source(
            given.src, verify=not given.no_verify_checkpoint, use_ema=given.use_ema
        )
        size = convert(source, given.dst, write, _DTYPES.get(given.dtype))
    except UsageError as error:
        print(f"{_PROGRAM}: error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"{_PROGRAM}: interrupted", file=sys.stderr)
        return 130
    count = len(source.tensors)
    print(f"converted {source.path}: {count} tensors, {size:,} bytes, to {given.dst}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
