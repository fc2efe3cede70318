"""DCP folders of other programs: what was saved in them, and whether all of it is there.

Training scripts save dictionaries of their own, such as ``{"model": ..., "optimizer": ...}``, with
``torch.distributed.checkpoint.save``; PyTorch's ``torch_to_dcp`` writes what a file contains. These
folders have no manifest. Only their tensors are read: other entries are pickles.
"""

import math
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex

from config_fields import is_of
from training.checkpoints.format import tensors_in


@dataclass(frozen=True)
class StoredTensor:
    """A tensor in a DCP folder that is not read yet."""

    entry: str
    """The name of its entry in the folder."""
    keys: tuple[str, ...]
    """The keys of the nested dictionaries that lead to it."""


def saved_content(metadata: Metadata) -> dict[str, Any]:
    """Return the nested dictionaries that were saved, of their tensors only. Raises ValueError if
    the metadata contradicts itself."""
    paths = metadata.planner_data
    if not is_of(paths, dict[str, tuple]):
        paths = {}  # saved without nested dictionaries
    content: dict[str, Any] = {}
    for entry in metadata.state_dict_metadata:
        keys = tuple(map(str, paths.get(entry) or (entry,)))
        tensor, inside = StoredTensor(entry, keys), content
        for key in keys[:-1]:
            inside = inside.setdefault(key, {})
            if not isinstance(inside, dict):
                raise ValueError(f"{entry} is inside another tensor")
        if inside.setdefault(keys[-1], tensor) is not tensor:
            raise ValueError(f"{entry} was saved twice")
    return content


def left_out(content: Mapping[str, Any], used: Collection[StoredTensor], not_tensors: int) -> str:
    """Return what else was saved, in a few words; "" if nothing.

    ``used``: the model's tensors in ``content``. ``not_tensors``: the number of entries that are
    not tensors.
    """
    depth = max(len(next(iter(used)).keys) - 1, 1)  # of the dictionaries next to the model's
    of_model = {tensor.entry for tensor in used}
    rest = [tensor for tensor in _tensors(content) if tensor.entry not in of_model]
    groups = Counter(".".join(tensor.keys[:depth]) for tensor in rest)
    words = [f"{name} (tensors: {count:,})" for name, count in sorted(groups.items())]
    if not_tensors:
        words.append(f"entries that are no tensors: {not_tensors:,}")
    return f"not used: {', '.join(words)}" if words else ""


def _tensors(content: Mapping[str, Any]) -> Iterator[StoredTensor]:
    for value in content.values():
        if isinstance(value, StoredTensor):
            yield value
        else:
            yield from _tensors(value)


def check_whole(path: Path, metadata: Metadata, entries: Iterable[str]) -> None:
    """Raise ValueError unless the folder has all values of these tensors: DCP would leave missing
    ones uninitialized. Raises OSError if it cannot be reached."""
    ends: dict[str, int] = {}  # of what is read of each file, in bytes
    for entry in entries:
        about = tensors_in(metadata)[entry]
        chunks = {(tuple(chunk.offsets), tuple(chunk.sizes)) for chunk in about.chunks}
        for offsets, sizes in chunks:
            sides = zip(offsets, sizes, about.size, strict=True)
            if any(not 0 <= offset <= offset + size <= whole for offset, size, whole in sides):
                raise ValueError(f"a part of {entry} is outside its shape")
            if math.prod(sizes):
                info = metadata.storage_data.get(MetadataIndex(entry, offsets))
                if info is None:
                    raise ValueError(f"the part of {entry} at {offsets} is missing")
                end = info.offset + info.length
                ends[info.relative_path] = max(end, ends.get(info.relative_path, 0))
        there, whole = sum(math.prod(sizes) for _, sizes in chunks), about.size.numel()
        if there != whole:
            raise ValueError(f"it has {there:,} of the {whole:,} values of {entry}")
    for name, end in sorted(ends.items()):
        file = path / name
        if not file.exists():
            raise ValueError(f"{name} is missing")
        if file.is_file() and (size := file.stat().st_size) < end:  # others are refused when read
            raise ValueError(f"{name} has {size:,} bytes, not {end:,}")
