"""Weights of a trained model: in a checkpoint folder, or in files of any training program."""

from __future__ import annotations

import pickle
import re
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from torch import nn
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from models.meta import allocate, fill_buffers
from models.spec import ModelSpec
from training.checkpoints.choose import BEST, find_resume, first_readable, of_path
from training.checkpoints.content import EMA, WEIGHTS, SavedRun, saved_run, training_entry
from training.checkpoints.manifest import damage
from training.checkpoints.reader import SafeReader, quiet_dcp, read_metadata, readable
from training.checkpoints.storage import METADATA
from training.errors import UsageError
from training.trained_weights.safetensors_files import metadata_of, run_of, safetensors_files
from training.url_path import folder_at, is_url


@dataclass(frozen=True)
class Weights:
    """Found and understood, but not read: neither a folder's nor a file's values."""

    path: Path
    run: SavedRun | None
    """What the checkpoint says of the run that made it; None for a bare state dict."""
    tensors: Mapping[str, torch.Tensor] | None
    """By timm's names, mapped from the files; None for a checkpoint folder, which DCP reads."""
    note: str = ""
    """What the user is to know of how they are used, in one line."""
    kind: str = WEIGHTS
    """Whether they are the weights themselves, or the EMA of a folder."""

    def check_fits(self, model: ModelSpec) -> None:
        """Raises UsageError naming the first tensor that is not one of the model's."""
        found = self.shapes()
        for name, tensor in model.meta.state_dict().items():
            if name not in found:
                raise UsageError(f"{self.path} has no {name}, which the model has: {_REMEDY}")
            there, here = tuple(found.pop(name)), tuple(tensor.shape)
            if there != here:
                raise UsageError(
                    f"{name} is {there} in {self.path}, {here} in the model: {_REMEDY}"
                )
        for name in found:
            raise UsageError(f"{self.path} has {name}, which the model has not: {_REMEDY}")

    def check_undamaged(self) -> None:
        """Raises UsageError if a checkpoint's files are not those that were written."""
        with readable(self.path):
            problem = None if self.tensors is not None else damage(self.path)
        if problem:
            raise UsageError(
                f"{self.path} is damaged ({problem}): name another one, or take it as it is "
                "with --no_verify_checkpoint"
            )

    def shapes(self) -> dict[str, torch.Size]:
        """Return the shape of each tensor by its name. Raises UsageError for a damaged folder."""
        if self.tensors is not None:
            return {name: tensor.shape for name, tensor in self.tensors.items()}
        with readable(self.path):
            entries = SafeReader(self.path).read_metadata().state_dict_metadata
            found = {
                name.removeprefix(f"{self.kind}."): entry.size
                for name, entry in entries.items()
                if name.startswith(f"{self.kind}.") and isinstance(entry, TensorStorageMetadata)
            }
        if not found and self.kind == EMA:
            raise no_ema(self.path)
        return found

    def initialize(self, module: nn.Module, name: str) -> None:
        """Allocate on CPU what is on meta below ``module``, with the file's values.

        A folder's values come after it, by ``Backend.load``. ``name`` is the module's name
        in the model; an ``InitializeModule``.
        """
        if self.tensors is not None:
            return self.fill(module, name)
        for _ in allocate(module, name):
            pass

    @torch.no_grad()
    def fill(self, module: nn.Module, name: str) -> None:
        """Do as ``initialize``, but with a folder's values, too: no more of them is in memory than
        the module takes."""
        own = {
            key: parameter
            for full_name, part in allocate(module, name)
            for key, parameter in part.named_parameters(prefix=full_name, recurse=False)
        }
        for key, values in self.read(list(own)).items():
            own[key].copy_(values)

    def read(self, names: Sequence[str]) -> dict[str, torch.Tensor]:
        """Return these tensors, whole on the CPU, by name.

        A file's are mapped, and not to be changed; a folder's are read, in fp32.
        """
        if self.tensors is not None:
            return {name: self.tensors[name] for name in names}
        shapes = self.shapes()
        values = {name: torch.empty(shapes[name]) for name in names}
        if values:
            with readable(self.path), quiet_dcp():
                reader = SafeReader(self.path)
                dcp.load({self.kind: values}, storage_reader=reader, no_dist=True)
        return values

    def plain_model(self, spec: ModelSpec, device: torch.device) -> nn.Module:
        """Return timm's model with these weights, in fp32 and whole on ``device``, to be used."""
        model = spec.build().to_empty(device=device)
        fill_buffers(model, lambda values: values.to(device))
        if self.tensors is not None:
            model.load_state_dict(self.tensors)
        else:
            state = {self.kind: model.state_dict()}
            with readable(self.path), quiet_dcp():
                dcp.load(state, storage_reader=SafeReader(self.path), no_dist=True)
        return model.eval()


_REMEDY = "give the model flags it was trained with"


def find_weights(
    ckpt_dir: Path, resume: str, resume_epoch: int, *, use_ema: bool = False
) -> Weights:
    """Return what ``--resume`` (a folder or a file) and ``--resume_epoch`` name.

    With ``use_ema`` it is the moving average of the weights. Raises UsageError if there is no such
    thing, or if it cannot be read.
    """
    if resume == "none":
        raise UsageError("--resume none: a trained model is needed, give --resume PATH")
    if resume != "auto" and resume not in BEST and not resume_epoch:
        return weights_in(folder_at(resume), "--resume", use_ema=use_ema)
    saved, candidates = first_readable(find_resume(ckpt_dir, resume, resume_epoch))
    if saved is None:
        raise UsageError(f"--ckpt_dir {ckpt_dir} holds no checkpoint: give one, --resume PATH")
    kind = EMA if use_ema else WEIGHTS
    return Weights(saved.path, saved, None, "; ".join(candidates.passed_over), kind)


def weights_in(path: Path, flag: str, *, use_ema: bool = False) -> Weights:
    """Return the weights in a checkpoint, in the newest one of a run's folder, or in files.

    Raises UsageError, naming ``flag``, if there is no such thing, or if it cannot be read.
    """
    with readable(path):
        if path.is_file():
            if is_url(path):
                raise UsageError(f"{flag} {path}: copy that file to this machine, and name it here")
            return load_file_of_weights(path, use_ema=use_ema)
        if not path.is_dir():
            raise UsageError(f"{flag} {path}: there is no such checkpoint, folder or file")
        if files := safetensors_files(path):
            return _load_safetensors(path, files, use_ema)
        if _is_bare_checkpoint(path):
            if use_ema:
                raise no_ema(path)
            return Weights(path, None, None)
        saved, candidates = first_readable(of_path(path))
    assert saved is not None  # of_path found one
    kind = EMA if use_ema else WEIGHTS
    return Weights(saved.path, saved, None, "; ".join(candidates.passed_over), kind)


def no_ema(path: Path) -> UsageError:
    """Return what is said of weights that have no EMA beside them."""
    return UsageError(
        f"{path} has no EMA of the weights: give one of a run with --model_ema, or drop --use_ema"
    )


def load_file_of_weights(path: Path, *, use_ema: bool = False) -> Weights:
    """Return what one file holds, mapped from it; ``use_ema``: its EMA of the weights.

    Raises UsageError if it cannot be read, or has none.
    """
    with readable(path):
        if path.suffix == ".safetensors":
            return _load_safetensors(path, [path], use_ema)
        content = _load_tensors(path)
        if not isinstance(content, Mapping):
            raise ValueError("it holds no state dict")
        training = content.get("training")
        run = None
        if isinstance(training, Mapping) and "arguments" in training:
            run = saved_run(path, training)
        if use_ema:
            content = ema_of(path, content)
        return Weights(path, run, state_dict_of(content))


def _load_safetensors(path: Path, files: list[Path], use_ema: bool) -> Weights:
    if use_ema:
        raise no_ema(path)
    content = {name: tensor for file in files for name, tensor in load_file(file).items()}
    return Weights(path, run_of(path, metadata_of(files[0])), state_dict_of(content))


def _is_bare_checkpoint(path: Path) -> bool:
    """Tell whether DCP wrote weights alone there, which say nothing of a run."""
    if not (path / METADATA).is_file():
        return False
    names = read_metadata(path).state_dict_metadata
    return not any(name.startswith(training_entry("")) for name in names)


def _load_tensors(path: Path) -> Any:
    """Read what torch.save wrote, without running any of it; values stay there until used."""
    mappable = zipfile.is_zipfile(path)  # files from before PyTorch 1.6 are not
    try:
        return torch.load(path, map_location="cpu", weights_only=True, mmap=mappable)
    except pickle.UnpicklingError as error:  # with advice to load it unsafely
        foreign = re.search(r"GLOBAL (\S+)", str(error))
        if foreign:
            raise ValueError(f"only tensors are loaded, it holds {foreign[1]}") from None
        raise ValueError("it is no file of torch.save") from None


_EMA_KEYS = (EMA, "state_dict_ema", "model_ema")
"""What the EMA is called in a file that ``dcp_to_torch`` made of a checkpoint, and in timm's."""


def ema_of(path: Path, content: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the EMA of the weights in a file's content. Raises UsageError if there is none."""
    found = next((content[key] for key in _EMA_KEYS if key in content), None)
    if not isinstance(found, Mapping):
        raise no_ema(path)
    return found


def state_dict_of(content: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Return the model's part of a file's content, under timm's names."""
    for key in ("model", "state_dict"):
        if isinstance(content.get(key), Mapping):
            content = content[key]
            break
    tensors = {name: value for name, value in content.items() if isinstance(value, torch.Tensor)}
    if not tensors or len(tensors) < len(content):
        raise ValueError("it holds no state dict of tensors")
    while all(name.startswith("module.") for name in tensors):  # put there by FSDP or DDP
        tensors = {name.removeprefix("module."): value for name, value in tensors.items()}
    return tensors
