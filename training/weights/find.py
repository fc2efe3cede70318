"""Find trained weights: in a checkpoint, in a run's folder, in files or DCP folders of any program,
and on the Hugging Face Hub.

Names on the Hub, and of timm's pretrained weights, become names with commits, which runs record.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import timm
import torch
from safetensors.torch import load_file
from timm.data import resolve_data_config
from torch.distributed.checkpoint.metadata import Metadata

from data import hub as data_hub
from data.config import DataConfig
from data.files import printable
from training.checkpoints import format as checkpoint
from training.checkpoints.choose import Candidates, candidates_in, choose
from training.checkpoints.config import CheckpointConfig
from training.checkpoints.format import SavedRun
from training.checkpoints.inventory import inventory, retry_while_error_changes
from training.config import RunConfig
from training.errors import UsageError, data_errors_as_usage_errors
from training.files import HUB_PREFIX, folder_at, is_on_hub, is_url
from training.flags import by_field, flat
from training.logs.records import BEST
from training.resolve import model_of
from training.weights import dcp_folder
from training.weights.files import (
    check_is_content,
    load_tensors,
    metadata_of,
    run_in_metadata,
    safetensors_files,
)
from training.weights.hub import download
from training.weights.names import timm_names
from training.weights.source import Source, no_ema
from training.weights.state_dict import SAVE, ema_of, state_dict_of

# -- By what flags name ----------------------------------------------------------------------------


def find(name: str | Path, flag: str, *, use_ema: bool = False) -> Source:
    """Return the weights that ``flag`` names: on the Hub, in a checkpoint, in the newest one of a
    run's folder, or in files.

    ``use_ema``: their EMA. Raises UsageError, naming ``flag``, if they do not exist or cannot be
    read.
    """
    path = name if isinstance(name, Path) else folder_at(name)
    if is_on_hub(str(name)):
        name, path = download(str(name), flag)
    return replace(_find_in(path, flag, use_ema=use_ema), name=str(name))


def find_resumed(checkpoints: CheckpointConfig, *, use_ema: bool = False) -> Source:
    """Return the weights that ``--resume`` (a folder or a file) and ``--resume_epoch`` name, or
    their EMA. Raises UsageError if they do not exist or cannot be read."""
    resume = checkpoints.resume
    if resume == "none":
        raise UsageError("--resume none: a trained model is required, use --resume PATH")
    if resume != "auto" and resume not in BEST and not checkpoints.resume_epoch:
        return find(resume, "--resume", use_ema=use_ema)
    found = _first_of(lambda: choose(inventory(checkpoints), checkpoints), use_ema)
    if not found:
        folder = folder_at(checkpoints.ckpt_dir)
        raise UsageError(f"--ckpt_dir {folder} has no checkpoint: use --resume PATH")
    return found


def pretrained(config: RunConfig) -> dict[str, Any]:
    """Return the flags, by field name, in place of ``--pretrained``: its weights on the Hub as
    ``--init_from`` or, where weights are used unchanged, as ``--resume``. Raises UsageError if timm
    has none for the model."""
    use, name = config.use, config.model.model
    if not config.checkpoints.pretrained:
        return {}
    assert name is not None  # --pretrained requires it
    if "resume" in config.explicitly_set and (use.predict or use.eval_only or use.features):
        raise UsageError("--pretrained and --resume both name weights: drop one of the two")
    model_of(config)  # raises if there is no such model
    try:
        trained = timm.get_pretrained_cfg(name.removeprefix("timm/"))
    except RuntimeError:  # no such tag
        trained = None
    if trained is None or not trained.hf_hub_id:
        raise UsageError(
            f"--pretrained: timm has no pretrained weights for --model {name} on the Hub "
            "(timm.list_pretrained() lists those that exist)"
        )
    unchanged = use.predict or (use.eval_only and not use.judges_features)
    field = "resume" if unchanged else "init_from"
    return {"pretrained": False, field: f"{HUB_PREFIX}{trained.hf_hub_id}"}


def commits(config: RunConfig, saved: SavedRun | None) -> dict[str, Any]:
    """Return the names, by field name, of the data sets and of the teachers' weights on the Hub,
    which each start loads again, with commits: those of the resumed checkpoint, unless flags name
    others. Raises UsageError if they are not available."""
    found, known = {}, by_field(RunConfig)
    for field in ("teacher_weights", "gram_weights"):
        name = known[field].value_in(config)
        if name is not None and is_on_hub(name):
            before = str(saved.arguments.get(field)) if saved else ""
            is_known = before.startswith(f"{name}@")
            found[field] = before if is_known else download(name, f"--{field}")[0]
    return found | commits_of_data(config.data, saved)


def commits_of_data(data: DataConfig, saved: SavedRun | None) -> dict[str, Any]:
    """Return what ``commits`` does, for data sets alone."""
    with data_errors_as_usage_errors():
        return flat(data_hub.with_commits(data, saved.arguments if saved else {}))


# -- By what a path has ----------------------------------------------------------------------------


def _find_in(path: Path, flag: str, *, use_ema: bool) -> Source:
    with checkpoint.readable(path):
        if path.is_file():
            if is_url(path):
                raise UsageError(
                    f"{flag} {path}: a single file cannot be read from a URL: copy it to this "
                    "machine, and pass its path"
                )
            if path.suffix == ".safetensors":
                return _in_safetensors(path, [path], use_ema=use_ema)
            return _in_file(path, use_ema=use_ema)
        if not path.is_dir():
            raise UsageError(f"{flag} {path}: no such checkpoint, folder or file")
        if files := safetensors_files(path):
            return _in_safetensors(path, files, use_ema=use_ema)
        if (path / checkpoint.METADATA).is_file():
            metadata, others = checkpoint.tensors_and_others(path)
            if not checkpoint.describes_run(metadata):
                return _in_dcp(path, metadata, len(others), use_ema=use_ema)
            if not checkpoint.is_complete(path):
                dcp_folder.check_whole(path, metadata, metadata.state_dict_metadata)
                note = f"{path} has no {checkpoint.MANIFEST}: its files are not verified"
                run = checkpoint.read_saved_run(path)
                return Source(path, run, note=note, kind=_kind(use_ema))
        found = _first_of(lambda: candidates_in(path), use_ema)
        assert found  # or there would be no candidates
        return found


def _kind(use_ema: bool) -> str:
    return checkpoint.EMA if use_ema else checkpoint.WEIGHTS


def _first_of(find: Callable[[], Candidates], use_ema: bool) -> Source | None:
    found = retry_while_error_changes(find)
    if not found.saved:
        return None
    note = "; ".join(found.passed_over)
    return Source(found.saved.path, found.saved, note=note, kind=_kind(use_ema))


def _in_file(path: Path, *, use_ema: bool) -> Source:
    """Return the weights in a file of torch.save. Raises any exception if it is damaged."""
    content = load_tensors(path)
    if not isinstance(content, Mapping):
        raise ValueError(f"it contains no state dict: {SAVE}")
    training, run = content.get("training"), None
    if isinstance(training, Mapping) and "arguments" in training:
        run = checkpoint.saved_run(path, training)
    trained_with: Mapping[str, Any] = {}
    args, name = content.get("args"), content.get("arch")
    if isinstance(args, argparse.Namespace) and isinstance(name, str) and timm.is_model(name):
        own = timm.get_pretrained_cfg(name)
        trained_with = resolve_data_config(vars(args), own.to_dict() if own else None)
    if use_ema:
        content = ema_of(path, content)
    return _of_tensors(path, run, state_dict_of(content), trained_with)


def _in_safetensors(path: Path, files: list[Path], *, use_ema: bool) -> Source:
    if use_ema:
        raise no_ema(path)
    for file in files:
        check_is_content(file)
    content = {name: tensor for file in files for name, tensor in load_file(file).items()}
    run = run_in_metadata(path, metadata_of(files[0]))
    return _of_tensors(path, run, state_dict_of(content), {})


def _of_tensors(
    path: Path,
    run: SavedRun | None,
    tensors: Mapping[str, torch.Tensor],
    trained_with: Mapping[str, Any],
) -> Source:
    parts, naming = timm_names(tensors)
    return Source(
        path, run, tensors, parts=parts, naming=printable(naming), trained_with=trained_with
    )


def _in_dcp(path: Path, metadata: Metadata, not_tensors: int, *, use_ema: bool) -> Source:
    """Return the weights in a DCP folder of another program. Raises ValueError."""
    content = dcp_folder.saved_content(metadata)
    tensors = state_dict_of(ema_of(path, content) if use_ema else content)
    parts, naming = timm_names(tensors)
    entries = {name: tensor.entry for name, tensor in tensors.items()}
    used = itertools.chain.from_iterable(parts.values())
    dcp_folder.check_whole(path, metadata, [entries[name] for name in used])
    note = printable(dcp_folder.left_out(content, tensors.values(), not_tensors))
    kind, naming = _kind(use_ema), printable(naming)
    if all(
        [entries[part] for part in each] == [f"{kind}.{name}"] for name, each in parts.items()
    ):  # as this program's own
        return Source(path, naming=naming, note=note, kind=kind)
    return Source(path, entries=entries, parts=parts, naming=naming, note=note, kind=kind)
