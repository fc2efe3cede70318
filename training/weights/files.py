"""Files of weights: what torch.save and safetensors wrote, mapped from disk, running none of it."""

from __future__ import annotations

import argparse
import json
import logging
import pickle
import re
import zipfile
from collections.abc import Mapping
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from config_fields import is_of
from data.files import SizeLimit, parse_object
from training.checkpoints.format import SavedRun
from training.files import open_regular, read_object
from training.schedule import Position
from training.weights.hub import INDEX, ONE_FILE, OTHER_FILES
from training.weights.names import listed
from training.weights.state_dict import SAVE


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

    def __new__(cls, *args: Any) -> _Ignored:
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
                if entry.filename.endswith("/constants.pkl"):
                    raise ValueError(_TORCHSCRIPT)
                if "/data/" not in entry.filename:  # tensors are mapped, all else is read whole
                    _DESCRIPTION.check(entry.file_size, entry.filename)
    # PyTorch 2.14 warns of the mesh of parts of tensors, which are refused afterwards.
    logging.getLogger("torch.distributed.device_mesh").setLevel(logging.ERROR)
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
                    f"only tensors are loaded, but it contains {name}: {SAVE}"
                ) from None
            else:
                raise ValueError("it was not written by torch.save") from None


_MOST_IGNORED = 100
_TORCHSCRIPT = (
    "it is a TorchScript archive, which contains code: save only the weights, with "
    "torch.save(torch.jit.load(FILE).state_dict(), NEW_FILE), or use a .safetensors file of the "
    "model, such as hf-hub:openai/clip-vit-base-patch32 for OpenAI's ViT-B-32.pt"
)
_DESCRIPTION = SizeLimit("what a torch.save file has besides tensors", 2**26)


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
    whole = [path / name for name in (ONE_FILE, *OTHER_FILES) if (path / name).is_file()][:1]
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
