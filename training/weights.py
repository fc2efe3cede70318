"""Trained weights: find them, read them, and return the preprocessing that they were trained with.

They are in a checkpoint folder, or in a torch.save or .safetensors file of any program, local or on
the Hub (``training/hub.py``).
"""

import argparse
import functools
import itertools
import json
import pickle
import re
import zipfile
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import timm
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from timm.data import ImageNetInfo, resolve_data_config
from torch import nn
from torch.distributed.checkpoint import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.tensor import DTensor

from config_fields import is_of
from data.config import Preprocessing
from data.files import SizeLimit, parse_object, printable
from models.initialize import allocate, allocate_uninitialized
from models.spec import ModelSpec
from training.checkpoints import foreign
from training.checkpoints import format as checkpoint
from training.checkpoints.choose import Candidates, candidates_in, choose
from training.checkpoints.compatible import (
    PREPROCESSING,
    preprocessing_of,
    with_saved_preprocessing,
)
from training.checkpoints.config import CheckpointConfig
from training.checkpoints.format import SavedRun
from training.checkpoints.inventory import inventory, retry_while_error_changes
from training.checkpoints.state import damage_for_all
from training.config import RunConfig
from training.described import KINDS, class_names
from training.errors import UsageError
from training.files import folder_at, is_url, open_regular, read_object
from training.hub import (
    CONFIG_FILE,
    INDEX,
    ONE_FILE,
    PREPROCESSOR_FILE,
    download,
    is_on_hub,
)
from training.logs.records import BEST
from training.processor import processing_of
from training.resolve import model_of, with_preprocessing
from training.schedule import Position
from training.sidecar import Sidecar, read_sidecar
from training.weight_names import listed, timm_names

_REMEDY = "use the model flags that it was trained with"


@dataclass(frozen=True)
class Weights:
    """Weights that were found: names and shapes are known, values are not read yet."""

    path: Path
    run: SavedRun | None
    """The run that made them, as the checkpoint describes it; None for a bare state dict."""
    tensors: Mapping[str, torch.Tensor] | None
    """By timm's names, memory-mapped from the files; None for a folder, which DCP reads."""
    entries: Mapping[str, Sequence[str]] | None = None
    """For a folder with names of another program: by timm's names, the entries that form each
    tensor, concatenated along the first dimension. None: ``<kind>.<name>``."""
    note: str = ""
    """One line for the user about how they are used."""
    kind: str = checkpoint.WEIGHTS
    """WEIGHTS, or EMA for the EMA in a folder."""
    preprocessing: Mapping[str, Any] = field(default_factory=dict)
    """The preprocessing recorded in a checkpoint of timm's training script, by timm's names."""
    name: str = ""
    """The name that the flag gave; for weights on the Hub, with the commit."""

    @property
    def classes(self) -> list[str] | None:
        """The names of the classes that they were trained on, by label; None: unknown."""
        return self.run.classes if self.run else None

    @functools.cached_property
    def described(self) -> Sidecar:
        """``config.json`` next to files of another program, as timm and transformers write it;
        empty without one. Raises UsageError if it cannot be read."""
        return Sidecar(self.beside(CONFIG_FILE), {}) if self.run else self._read(CONFIG_FILE)

    @functools.cached_property
    def processor(self) -> Sidecar:
        """``preprocessor_config.json`` of transformers; see ``described``."""
        return self._read(PREPROCESSOR_FILE)

    def _read(self, name: str) -> Sidecar:
        return read_sidecar(self.beside(name))

    def beside(self, name: str) -> Path:
        """Return the path of a file in the folder of the weights."""
        return self.path / name if self.path.is_dir() else self.path.with_name(name)

    @property
    def class_names(self) -> list[str] | None:
        """Display names of the classes, by label: ``classes``, else the names in ``described``,
        which may not be names of folders; None: unknown."""
        if self.run:
            return self.run.classes
        names, trained = class_names(self.described), self.described.mapping("pretrained_cfg")
        if names is None and "in1k" in str(trained.get("tag")):
            return ImageNetInfo("imagenet-1k").label_descriptions()
        return names

    def classes_among(self, folders: list[str] | None) -> list[str] | None:
        """Return the names of the classes by label, if they can be compared with ``folders``:
        ``classes``, or names that another program gave to the same folders."""
        names = None if self.run else self.class_names
        if names and folders and sorted(names) == sorted(folders):
            return names
        return self.classes

    @property
    def loads_sharded(self) -> bool:
        """Whether each process loads only its shards of the values, by ``load_state``."""
        return self.tensors is None and self.entries is None

    def remedy(self, model: Collection[str], otherwise: str) -> str:
        """Return advice for names that are not the model's; ``otherwise`` if most of them are."""
        there = self.shapes()
        others = [name for name in there if name not in model]
        if 2 * (len(there) - len(others)) >= min(len(model), len(there)):
            return otherwise
        advice = (
            "load the file with timm.create_model(NAME, checkpoint_path=FILE), and save the "
            "model's state_dict()"
        )
        if self.tensors is None:
            advice = "save its weights under the names of timm.create_model(NAME).state_dict()"
        return f"its parameter names are not timm's (such as {others[0]}): {advice}"

    def check_fits(self, model: ModelSpec) -> None:
        """Raise UsageError naming the first tensor that does not match the model."""
        found = self.shapes()
        wanted = model.meta.state_dict()
        advice = self.remedy(wanted, _REMEDY)
        for name, tensor in wanted.items():
            if name not in found:
                raise UsageError(f"{self.path} has no {name}, which the model has: {advice}")
            there, here = tuple(found.pop(name)), tuple(tensor.shape)
            if there != here:
                raise UsageError(
                    f"{name} has shape {there} in {self.path}, {here} in the model: {_REMEDY}"
                )
        for name in found:
            raise UsageError(f"{self.path} has {name}, which the model does not have: {advice}")

    def shapes(self) -> dict[str, torch.Size]:
        """Return the shape of each tensor by its name. Raises UsageError for a damaged folder."""
        if self.tensors is not None:
            return {name: tensor.shape for name, tensor in self.tensors.items()}
        shapes = {}
        for name, parts in self.stored.items():
            first, *others = (entry.size for entry in parts.values())
            rows = [sum((size[0] for size in others), first[0])] if others else first[:1]
            shapes[name] = torch.Size((*rows, *first[1:]))
        return shapes

    @functools.cached_property
    def stored(self) -> dict[str, dict[str, TensorStorageMetadata]]:
        """The entries of a folder that form each tensor, by their names. Raises UsageError for a
        damaged folder."""
        with checkpoint.readable(self.path):
            there = checkpoint.entries_of(self.path)
            if self.entries is not None:
                return {
                    name: {part: there[part] for part in parts}
                    for name, parts in self.entries.items()
                }
        prefix = f"{self.kind}."
        found = {
            name.removeprefix(prefix): {name: entry}
            for name, entry in there.items()
            if name.startswith(prefix)
        }
        if not found and self.kind == checkpoint.EMA:
            raise no_ema(self.path)
        return found

    def initialize(self, module: nn.Module, name: str) -> None:
        """Allocate on the CPU what is on meta below ``module``, with the values of the file.

        With ``loads_sharded``, values come later. ``name`` is the module's name in the model; an
        ``InitializeModule``.
        """
        if self.loads_sharded:
            return allocate_uninitialized(module, name)
        self.fill(module, name)

    @torch.no_grad()
    def fill(self, module: nn.Module, name: str) -> None:
        """Like ``initialize``, but also with a folder's values; only the module's are in memory."""
        own = {
            key: parameter
            for full_name, part in allocate(module, name)
            for key, parameter in part.named_parameters(prefix=full_name, recurse=False)
        }
        for key, values in self.read(list(own)).items():
            own[key].copy_(values)

    def read(self, names: Sequence[str]) -> dict[str, torch.Tensor]:
        """Return these tensors, whole on the CPU, by name.

        Tensors of a file are mapped and must not be changed; those of a folder are read in fp32.
        """
        if self.tensors is not None:
            return {name: self.tensors[name] for name in names}
        shapes = self.shapes()
        values = {name: torch.empty(shapes[name]) for name in names}
        if values:
            self.read_into(values)
        return values

    def read_into(
        self, values: Mapping[str, torch.Tensor], planner: DefaultLoadPlanner | None = None
    ) -> None:
        """Read tensors of a folder, cast to the dtypes of ``values``. Raises UsageError."""
        content: dict[str, torch.Tensor] = {}
        for name, tensor in values.items():
            parts = self.stored[name]
            pieces: Sequence[torch.Tensor] = [tensor]
            if len(parts) > 1:
                pieces = tensor.split([entry.size[0] for entry in parts.values()])
            content |= zip(parts, pieces, strict=True)
        with checkpoint.readable(self.path):
            checkpoint.load_into(content, self.path, planner=planner)


# -- Finding and loading them ---------------------------------------------------------------------


def find_weights(checkpoints: CheckpointConfig, *, use_ema: bool = False) -> Weights:
    """Return the weights that ``--resume`` (a folder or a file) and ``--resume_epoch`` name, or
    their EMA. Raises UsageError if they do not exist or cannot be read."""
    resume = checkpoints.resume
    if resume == "none":
        raise UsageError("--resume none: a trained model is required, use --resume PATH")
    if resume != "auto" and resume not in BEST and not checkpoints.resume_epoch:
        return weights_named(resume, "--resume", use_ema=use_ema)
    found = _first_of(lambda: choose(inventory(checkpoints), checkpoints), use_ema)
    if not found:
        folder = folder_at(checkpoints.ckpt_dir)
        raise UsageError(f"--ckpt_dir {folder} has no checkpoint: use --resume PATH")
    return found


def _first_of(find: Callable[[], Candidates], use_ema: bool) -> Weights | None:
    found = retry_while_error_changes(find)
    if not found.saved:
        return None
    kind = checkpoint.EMA if use_ema else checkpoint.WEIGHTS
    note = "; ".join(found.passed_over)
    return Weights(found.saved.path, found.saved, None, note=note, kind=kind)


def weights_named(name: str, flag: str, *, use_ema: bool = False) -> Weights:
    """Return the weights that ``flag`` names, on the Hub or found by ``weights_in``. Raises
    UsageError."""
    path = folder_at(name)
    if is_on_hub(name):
        name, path = download(name, flag)
    return replace(weights_in(path, flag, use_ema=use_ema), name=name)


def weights_in(path: Path, flag: str, *, use_ema: bool = False) -> Weights:
    """Return the weights in a checkpoint, in the newest one of a run's folder, or in files.

    ``use_ema``: their EMA. Raises UsageError, naming ``flag``, if they do not exist or cannot be
    read.
    """
    with checkpoint.readable(path):
        if path.is_file():
            if is_url(path):
                raise UsageError(
                    f"{flag} {path}: a single file cannot be read from a URL: copy it to this "
                    "machine, and pass its path"
                )
            return load_file_of_weights(path, use_ema=use_ema)
        if not path.is_dir():
            raise UsageError(f"{flag} {path}: no such checkpoint, folder or file")
        if files := safetensors_files(path):
            return _load_safetensors(path, files, use_ema)
        if (path / checkpoint.METADATA).is_file():
            metadata, others = checkpoint.tensors_and_others(path)
            if not checkpoint.describes_run(metadata):
                return _load_dcp(path, metadata, len(others), use_ema)
            if not checkpoint.is_complete(path):
                foreign.check_whole(path, metadata, metadata.state_dict_metadata)
                note = f"{path} has no {checkpoint.MANIFEST}: its files are not verified"
                kind = checkpoint.EMA if use_ema else checkpoint.WEIGHTS
                return Weights(path, checkpoint.read_saved_run(path), None, note=note, kind=kind)
        found = _first_of(lambda: candidates_in(path), use_ema)
        assert found  # or there would be no candidates
        return found


def no_ema(path: Path) -> UsageError:
    """Return the error for weights without an EMA."""
    return UsageError(
        f"{path} has no EMA of the weights: use a checkpoint of a run with --model_ema, or drop "
        "--use_ema"
    )


def load_file_of_weights(path: Path, *, use_ema: bool = False) -> Weights:
    """Return the weights in a file, or their EMA, mapped from it. Raises UsageError if the file
    cannot be read or does not contain them."""
    with checkpoint.readable(path):
        if path.suffix == ".safetensors":
            return _load_safetensors(path, [path], use_ema)
        content = load_tensors(path)
        if not isinstance(content, Mapping):
            raise ValueError(f"it contains no state dict: {_SAVE}")
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
        found = _of_tensors(path, run, state_dict_of(content))
        return replace(found, preprocessing=trained_with)


def _load_safetensors(path: Path, files: list[Path], use_ema: bool) -> Weights:
    if use_ema:
        raise no_ema(path)
    for file in files:
        check_is_content(file)
    content = {name: tensor for file in files for name, tensor in load_file(file).items()}
    run = run_in_metadata(path, metadata_of(files[0]))
    return _of_tensors(path, run, state_dict_of(content))


def _of_tensors(path: Path, run: SavedRun | None, tensors: Mapping[str, torch.Tensor]) -> Weights:
    names, note = timm_names(tensors)
    named = {
        name: tensors[parts[0]] if len(parts) == 1 else torch.cat([tensors[part] for part in parts])
        for name, parts in names.items()
    }
    return Weights(path, run, named, note=printable(note))


def _load_dcp(path: Path, metadata: Metadata, not_tensors: int, use_ema: bool) -> Weights:
    """Return the weights in a DCP folder of another program, or their EMA. Raises ValueError."""
    content = foreign.saved_content(metadata)
    tensors = state_dict_of(ema_of(path, content) if use_ema else content)
    names, note = timm_names(tensors)
    entries = {name: [tensors[part].entry for part in parts] for name, parts in names.items()}
    foreign.check_whole(path, metadata, itertools.chain.from_iterable(entries.values()))
    kind = checkpoint.EMA if use_ema else checkpoint.WEIGHTS
    own = {name: [f"{kind}.{name}"] for name in entries}
    notes = [note, foreign.left_out(content, tensors.values(), not_tensors)]
    note = printable("; ".join(filter(None, notes)))
    renamed = None if entries == own else entries
    return Weights(path, None, None, entries=renamed, note=note, kind=kind)


def check_is_content(path: Path) -> None:
    """Raise ValueError for a Git LFS pointer, which stands for a large file. Raises OSError, also
    for a pipe or device, which libraries would wait for."""
    with open_regular(path) as file:
        if file.read(len(_LFS_POINTER)) == _LFS_POINTER:
            raise ValueError(
                "it is a Git LFS pointer: download the file itself with `git lfs pull`"
            )


_LFS_POINTER = b"version https://git-lfs.github.com/spec/"


class _Ignored(dict):
    """Stands for an object that is not a tensor, and for the function that would create it."""

    def __new__(cls, *args: Any) -> "_Ignored":
        return super().__new__(cls)

    def __init__(self, *args: Any) -> None:
        pass

    def __setstate__(self, state: Any) -> None:
        pass


def load_tensors(path: Path) -> Any:
    """Return what torch.save wrote, mapped from the file.

    Loads only tensors, types that PyTorch trusts and ``argparse.Namespace``. Other objects, such as
    NumPy scalars, are left empty, and none of their code runs. Raises ValueError for other files.
    """
    check_is_content(path)
    mapped = zipfile.is_zipfile(path)  # files from before PyTorch 1.6 cannot be mapped
    if mapped:
        with zipfile.ZipFile(path) as archive:
            for entry in archive.infolist():
                if "/data/" not in entry.filename:  # tensors are mapped, all else is read whole
                    _DESCRIPTION.check(entry.file_size, entry.filename)
    ignored: list[Any] = []
    while True:
        try:
            with torch.serialization.safe_globals([argparse.Namespace, *ignored]):
                return torch.load(path, map_location="cpu", weights_only=True, mmap=mapped)
        except pickle.UnpicklingError as error:  # its text recommends loading the file unsafely
            foreign = re.search(r"GLOBAL (\S+)", str(error))
            known = [name for _, name in ignored]
            name = foreign[1] if foreign else ""
            if name == "getattr":  # early releases of Python 3.11 pickle members of an Enum by it
                name = "builtins.getattr"
            if foreign and name not in known and len(known) < _MOST_IGNORED:
                ignored.append((type("Ignored", (_Ignored,), {}), name))
            elif foreign:
                raise ValueError(
                    f"only tensors are loaded, but it contains {name}: {_SAVE}"
                ) from None
            else:
                raise ValueError("it was not written by torch.save") from None


_MOST_IGNORED = 100
_DESCRIPTION = SizeLimit("what a torch.save file has besides tensors", 2**26)
_SAVE = "save only the weights, with torch.save(model.state_dict(), FILE)"
_SAVE_WHOLE = (
    "save whole ones, those of torch.distributed.checkpoint.state_dict.get_model_state_dict(model, "
    "options=StateDictOptions(full_state_dict=True))"
)


_EMA_KEYS = (checkpoint.EMA, "state_dict_ema", "model_ema")
"""The name of the EMA in files made by ``dcp_to_torch`` and by timm."""


def ema_of(path: Path, content: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the EMA of the weights in a file's content. Raises UsageError if there is none."""
    content = _unwrapped(content)
    found = next((content[key] for key in _EMA_KEYS if key in content), None)
    if not isinstance(found, Mapping):
        raise no_ema(path)
    return found


_MODEL_KEYS = ("model", "state_dict")


def _unwrapped(content: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the dictionary with the model and its optimizer: the content or, as in
    ``{"app": {"model": ..., "optim": ...}}``, the only one inside it that has a model."""
    if any(isinstance(content.get(key), Mapping) for key in _MODEL_KEYS):
        return content
    inside = [
        each
        for each in content.values()
        if isinstance(each, Mapping)
        and any(isinstance(each.get(key), Mapping) for key in _MODEL_KEYS)
    ]
    return inside[0] if len(inside) == 1 else content


def state_dict_of(content: Mapping[str, Any]) -> dict[str, Any]:
    """Return the model's part of the content of a file, or of a DCP folder, under the names there.

    Names from several state dicts, e.g. of a student and a teacher, start with the dict's key.
    """
    if content.get("shard_metadata") is not None:
        raise ValueError(_OF_ONE_CHIP)
    content = _unwrapped(content)
    if any(map(_is_tensor, content.values())):  # the model's, next to its optimizer
        content = {
            key: each
            for key, each in content.items()
            if not (isinstance(each, Mapping) and str(key).startswith("optim"))
        }
    inside = [content.get(key) for key in _MODEL_KEYS]
    dicts = {
        key: each
        for key, each in content.items()
        if isinstance(each, Mapping) and each and all(map(_is_tensor, each.values()))
    }
    if chosen := next((each for each in inside if isinstance(each, Mapping)), None):
        content = chosen
    elif dicts and not any(map(_is_tensor, content.values())):
        content = {
            f"{key}.{name}": value for key, each in dicts.items() for name, value in each.items()
        }
    tensors = {name: value for name, value in content.items() if _is_tensor(value)}
    if not tensors or len(tensors) < len(content):
        raise ValueError(f"it contains no state dict of tensors: {_SAVE}")
    if any(isinstance(value, DTensor) for value in tensors.values()):
        raise ValueError(f"it contains one process's parts of tensors: {_SAVE_WHOLE}")
    return tensors


_OF_ONE_CHIP = (
    "it has one chip's shards of the weights (PyTorch/XLA FSDP): join the files of all chips with "
    "python3 -m torch_xla.distributed.fsdp.consolidate_sharded_ckpts (docs/coming_from.md)"
)


def _is_tensor(value: Any) -> bool:
    return isinstance(value, torch.Tensor | foreign.StoredTensor)


# -- .safetensors files, and the run in their metadata --------------------------------------------
#
# A folder of them is in Hugging Face's layout: ``model.safetensors``, or shards that
# ``model.safetensors.index.json`` lists.

_RUN = "training"
"""The metadata entry with what our checkpoints store as ``training.*``, as JSON."""


def safetensors_files(path: Path) -> list[Path]:
    """Return the .safetensors files that ``path`` names; [] if it is not such a file or folder.
    Raises ValueError for an index that does not list files in its folder."""
    if path.is_file():
        return [path] if path.suffix == ".safetensors" else []
    whole = [path / ONE_FILE] if (path / ONE_FILE).is_file() else []
    if not (path / INDEX).is_file():
        return whole
    named = read_object(path / INDEX).get("weight_map")
    if not isinstance(named, Mapping) or not named:
        raise ValueError(f"{INDEX} has no weight_map")
    for name in named.values():
        if not isinstance(name, str) or Path(name).name != name:
            raise ValueError(f"{INDEX} lists {name!r}, which is not a file in its folder")
    shards = [path / name for name in sorted(set(named.values()))]
    if missing := [shard.name for shard in shards if not shard.exists()]:
        if whole:
            return whole
        raise ValueError(f"{INDEX} lists {listed(missing)}, which the folder does not have")
    return shards


def metadata_of(file: Path) -> dict[str, str]:
    """Return the metadata strings of a file. Raises any exception if it is damaged."""
    with safe_open(file, framework="pt") as opened:
        return opened.metadata() or {}


def run_as_metadata(run: SavedRun) -> dict[str, str]:
    """Return a run as metadata of a .safetensors file."""
    content = {**asdict(run.position), "arguments": run.arguments, "classes": run.classes}
    return {_RUN: json.dumps(content)}


def run_in_metadata(path: Path, metadata: Mapping[str, str]) -> SavedRun | None:
    """Return the run that ``run_as_metadata`` wrote; None if another program wrote the file. Raises
    any exception if it is damaged."""
    if _RUN not in metadata:
        return None
    try:
        content = parse_object(metadata[_RUN])
    except ValueError:  # another program's entry
        return None
    if "arguments" not in content:
        return None
    numbers: list[Any] = [content.get(field.name) for field in fields(Position)]
    if not is_of(numbers, list[int]):
        raise ValueError(f"{_RUN} in its metadata has no position of whole numbers")
    return SavedRun(path, Position(*numbers), content["arguments"], content.get("classes"))


def check_weights(weights: Weights, *, verify: bool) -> None:
    """Compare a checkpoint's files with its manifest; each process checks its share of them.

    Without ``verify``, only check that all processes see the same one. Raises UsageError in all.
    """
    path, problem = weights.path, None
    if weights.tensors is not None:
        return
    if weights.run:
        problem = damage_for_all(path, verify=verify)
    elif verify:  # weights alone, which DCP wrote
        with checkpoint.readable(path):
            problem = checkpoint.damage(path)
    if problem:
        raise UsageError(
            f"{path} is damaged ({problem}): use another one, or use it unverified with "
            "--no_verify_checkpoint",
            agreed=weights.run is not None,
        )


# -- The preprocessing that weights were trained with ---------------------------------------------


def with_preprocessing_of(weights: Weights, config: RunConfig) -> tuple[Weights, RunConfig]:
    """Return the configuration with the preprocessing of these weights, except where flags are set,
    and the weights with a note about it.

    For weights of another program, it is what their file says, else what timm has for the model,
    else that of new weights. Raises UsageError for invalid values.
    """
    if weights.run:
        return weights, with_saved_preprocessing(config, weights.run)
    path, source = weights.path, weights.name or str(weights.path)
    trained_with: Mapping[str, Any] | None = weights.preprocessing
    for file, content in _preprocessing_beside(weights):
        if any(content.get(name) is not None for name in PREPROCESSING):
            trained_with, source = content, f"{source} and its {file}"
            break
    if not trained_with:
        model = model_of(config.model)
        trained_with, source = model.preprocessing, f"timm's {model.name}"
    if trained_with is None:
        return weights, with_preprocessing(
            config, Preprocessing.of_new_weights(config.data.data_source)
        )
    wanted = {name: value for name, value in trained_with.items() if name in PREPROCESSING}
    unset = {name: each for name, each in wanted.items() if getattr(config.data, name) is None}
    config = with_preprocessing(config, preprocessing_of(unset, path))
    note = f"preprocessing: {config.data.preprocessing} (from {source})"
    return replace(weights, note="; ".join(filter(None, [weights.note, note]))), config


def _preprocessing_beside(weights: Weights) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield what may describe the preprocessing, by timm's names, and the file that says it: timm's
    ``pretrained_cfg`` in the metadata of .safetensors files or next to them, then what transformers
    saved next to them. Raises UsageError for what cannot be read."""
    if files := safetensors_files(weights.path):
        try:
            yield CONFIG_FILE, parse_object(metadata_of(files[0]).get("pretrained_cfg", "{}"))
        except ValueError as error:
            raise UsageError(
                f"{files[0]}: pretrained_cfg in its metadata cannot be read ({error}): save the "
                "file again without it"
            ) from None
    about = weights.described
    yield CONFIG_FILE, about.mapping("pretrained_cfg") or about.content
    kind = KINDS.get(str(about.content.get("model_type")), KINDS["vit"])
    if processing := processing_of(weights.processor, kind.processor):
        yield PREPROCESSOR_FILE, processing.values
