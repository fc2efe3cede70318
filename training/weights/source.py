"""Weights that were found: names, shapes and dtypes of their tensors; values are read on demand."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Self

import torch
from torch.distributed.checkpoint import DefaultLoadPlanner

from training.checkpoints import format as checkpoint
from training.checkpoints.format import SavedRun
from training.checkpoints.state import damage_for_all
from training.errors import UsageError
from training.weights.dcp_folder import check_whole
from training.weights.names import unwrapped


@dataclass(frozen=True)
class Source:
    """Weights in files or in a folder of DCP, whose values are not read yet."""

    path: Path
    run: SavedRun | None = None
    """The run that made them, as the checkpoint describes it; None for a bare state dict."""
    tensors: Mapping[str, torch.Tensor] | None = None
    """The tensors of files by their names there, memory-mapped; None for a folder, which DCP
    reads."""
    entries: Mapping[str, str] | None = None
    """The entry of each tensor in a folder of another program; None: ``<kind>.<name>``."""
    parts: Mapping[str, Sequence[str]] | None = None
    """By timm's name of each tensor, the names of those that form it, concatenated along the first
    dimension; None: the names are timm's already."""
    naming: str = ""
    """How names were changed to timm's, for the log."""
    note: str = ""
    """One line for the user about how the weights are used, without ``naming``."""
    kind: str = checkpoint.WEIGHTS
    """WEIGHTS, or EMA for the EMA in a folder."""
    trained_with: Mapping[str, Any] = field(default_factory=dict)
    """The preprocessing recorded in a checkpoint of timm's training script, by timm's names."""
    name: str = ""
    """The name that the flag gave; for weights on the Hub, with the commit."""

    @property
    def title(self) -> str:
        """What messages call them."""
        return self.name or str(self.path)

    @property
    def notes(self) -> str:
        """``note`` and ``naming`` in one line."""
        return "; ".join(filter(None, [self.naming, self.note]))

    def with_note(self, note: str) -> Self:
        """Return the same weights with one more note."""
        return replace(self, note="; ".join(filter(None, [self.note, note])))

    def beside(self, name: str) -> Path:
        """Return the path of a file in the folder of the weights."""
        return self.path / name if self.path.is_dir() else self.path.with_name(name)

    @property
    def as_stored(self) -> Self:
        """The same weights by the names in the file or folder, but for those of wrappers."""
        if self.tensors is None and self.entries is None:
            return self
        stored = self.tensors or self.entries or {}
        return replace(self, parts={unwrapped(name): [name] for name in stored}, naming="")

    @property
    def loads_sharded(self) -> bool:
        """Whether each process can load only its shards of the values, by ``load_state``."""
        return self.tensors is None and self.entries is None

    @functools.cached_property
    def layouts(self) -> dict[str, torch.Tensor]:
        """The shape and dtype of each tensor by its name, on meta. Raises UsageError for a damaged
        folder."""
        stored = {name: tensor.to("meta") for name, tensor in self._stored.items()}
        if self.parts is None:
            return stored
        return {
            name: torch.cat([stored[part] for part in parts])
            if len(parts) > 1
            else stored[parts[0]]
            for name, parts in self.parts.items()
        }

    @functools.cached_property
    def _stored(self) -> Mapping[str, torch.Tensor]:
        """The tensors by their names in the file; those of a folder on meta."""
        if self.tensors is not None:
            return self.tensors
        with checkpoint.readable(self.path):
            there = checkpoint.entries_of(self.path)
            return {
                name: torch.empty(
                    there[entry].size, dtype=there[entry].properties.dtype, device="meta"
                )
                for name, entry in self._entries(there).items()
            }

    def _entries(self, there: Mapping[str, Any]) -> Mapping[str, str]:
        if self.entries is not None:
            return self.entries
        prefix = f"{self.kind}."
        found = {name.removeprefix(prefix): name for name in there if name.startswith(prefix)}
        if not found and self.kind == checkpoint.EMA:
            raise no_ema(self.path)
        return found

    def read(self, names: Sequence[str]) -> dict[str, torch.Tensor]:
        """Return these tensors, whole on the CPU, by name.

        Those of a file may be mapped and must not be changed; those of a folder are read in fp32.
        """
        if self.tensors is None:
            values = {name: torch.empty(self.layouts[name].shape) for name in names}
            if values:
                self.read_into(values)
            return values
        found = {}
        for name in names:
            first, *others = [self.tensors[part] for part in self._parts_of(name)]
            found[name] = torch.cat([first, *others]) if others else first
        return found

    def read_into(
        self, values: Mapping[str, torch.Tensor], planner: DefaultLoadPlanner | None = None
    ) -> None:
        """Read tensors of a folder, cast to the dtypes of ``values``. Raises UsageError."""
        content: dict[str, torch.Tensor] = {}
        for name, tensor in values.items():
            parts, pieces = self._parts_of(name), [tensor]
            if len(parts) > 1:
                pieces = [*tensor.split([len(self._stored[part]) for part in parts])]
            for part, piece in zip(parts, pieces, strict=True):
                content[self.entries[part] if self.entries else f"{self.kind}.{part}"] = piece
        with checkpoint.readable(self.path):
            checkpoint.load_into(content, self.path, planner=planner)

    def check_whole(self) -> None:
        """Raise UsageError unless a folder of another program has all values of its tensors, of
        which ``find`` checks those that have timm's names."""
        if self.entries is None:
            return
        with checkpoint.readable(self.path):
            metadata = checkpoint.read_metadata(self.path)
            check_whole(self.path, metadata, self.entries.values())

    def _parts_of(self, name: str) -> Sequence[str]:
        return [name] if self.parts is None else self.parts[name]


def no_ema(path: Path) -> UsageError:
    """Return the error for weights without an EMA."""
    return UsageError(
        f"{path} has no EMA of the weights: use a checkpoint of a run with --model_ema, or drop "
        "--use_ema"
    )


def check_files(source: Source, *, verify: bool) -> None:
    """Compare a checkpoint's files with its manifest; each process checks its share of them.

    Without ``verify``, only check that all processes see the same one. Raises UsageError in all.
    """
    path, problem = source.path, None
    if source.tensors is not None:
        return
    if source.run:
        problem = damage_for_all(path, verify=verify)
    elif verify:  # weights alone, which DCP wrote
        with checkpoint.readable(path):
            problem = checkpoint.damage(path)
    if problem:
        raise UsageError(
            f"{path} is damaged ({problem}): use another one, or use it unverified with "
            "--no_verify_checkpoint",
            agreed=source.run is not None,
        )
