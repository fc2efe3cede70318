"""Checkpoints of the small run, in a folder of their own inside ``--ckpt_dir``, and the disk."""

from __future__ import annotations

import contextlib
import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp

from tools.self_check.reference import MOMENTS, Table, Tensors, size_of
from training.backend import Backend
from training.backend import State as BackendState
from training.checkpoints.choose import complete_checkpoints, folder_of
from training.checkpoints.format import Position, SafeReader, damage, quiet_dcp, reason_of, tree
from training.checkpoints.saver import CheckpointSaver
from training.checkpoints.state import load_state
from training.errors import RunFailed, UsageError
from training.files import FolderLock, is_url, remove_tree
from training.processes import exchange
from training.processes.start import enter_folder
from training.resolve import Run

State = dict[str, Tensors]


@contextlib.contextmanager
def own_folder(run: Run, backend: Backend, table: Table) -> Iterator[Path | None]:
    """Make a folder in ``--ckpt_dir``, which is locked meanwhile, and remove it afterwards.

    None where no run could write there.
    """
    ckpt_dir = run.ckpt_dir
    shared = run.config.checkpoints.shared_ckpt_dir
    lock = FolderLock(ckpt_dir, inside=run.log_dir, shared=shared)
    folder = ckpt_dir / exchange.gather(f"self_check_{secrets.token_hex(4)}")[0]
    try:
        try:
            enter_folder(ckpt_dir, lock, is_main=backend.is_main)
            with exchange.failing_together():
                _make(folder, backend)
        except UsageError as error:
            table.line(False, "checkpoint folder", str(error))
            yield None
            return
        table.line(
            True, "checkpoint folder", f"{ckpt_dir} can be written to, and is no other job's"
        )
        yield folder
    finally:
        if backend.is_main:
            with contextlib.suppress(OSError):
                remove_tree(folder)
        lock.release()


def _make(folder: Path, backend: Backend) -> None:
    if backend.is_main:
        try:
            folder.mkdir()
        except OSError as error:
            raise UsageError(
                f"cannot write to --ckpt_dir {folder.parent}: {error.strerror}"
            ) from None


class Checkpoints:
    """Writes checkpoints as training does, and reads them whole, in the first process."""

    def __init__(self, folder: Path | None, run: Run, backend: Backend, table: Table) -> None:
        self._folder, self._run, self._backend, self._table = folder, run, backend, table
        self.states: dict[int, State] = {}
        """By number; in the first process."""
        self.usable = folder is not None

    def save(self, number: int) -> None:
        """Write a checkpoint and read it; a line says what is wrong, then no more are written."""
        if self._folder is None or not self.usable:
            return
        saver = CheckpointSaver(
            self._folder, self._backend, lambda text: None, self._run.values, None, 0, 1
        )
        try:
            with saver:
                saver.save(Position(number), must=True)
            with exchange.failing_together():
                if self._backend.is_main:
                    self.states[number] = self._read(folder_of(self._folder, number))
        except (RunFailed, UsageError) as error:
            self.usable = False
            self._table.line(False, "checkpoint written", str(error))

    def _read(self, path: Path) -> State:
        """Model and moments under their plain names. Raises UsageError if that is not possible."""
        names = {n: p.shape for n, p in self._run.model.meta.named_parameters()}
        # Not a number: what the checkpoint does not hold is seen to be missing.
        empty = {
            n: {kind: torch.full(shape, torch.nan) for kind in ("weights", *MOMENTS)}
            for n, shape in names.items()
        }
        model = {n: each["weights"] for n, each in empty.items()}
        state = {n: {kind: each[kind] for kind in MOMENTS} for n, each in empty.items()}
        try:
            if problem := damage(path):
                raise UsageError(f"the checkpoint that was written is damaged: {problem}")
            with quiet_dcp():
                wanted = tree(BackendState(model, state, {}), {})
                dcp.load(wanted, storage_reader=SafeReader(path), no_dist=True)
        except (OSError, ValueError, RuntimeError, dcp.CheckpointException) as error:
            raise UsageError(f"{path} cannot be read: {reason_of(error)}") from None
        return {"weights": model} | {
            kind: {n: each[kind] for n, each in state.items()} for kind in MOMENTS
        }

    def check_written(self, number: int) -> None:
        """Say of the checkpoint of this number how large it is."""
        if not self.usable or self._folder is None:
            return
        text = ""
        if self._backend.is_main:
            files = [p for p in folder_of(self._folder, number).iterdir() if p.is_file()]
            size = sum(p.stat().st_size for p in files)
            text = f"{len(files)} files, {size_of(size)}, checksums as in the manifest"
        self._table.line(True, "checkpoint written", text)

    def load(self, number: int) -> None:
        assert self._folder is not None
        load_state(self._backend, folder_of(self._folder, number))

    def check_equal(self, first: int, second: int) -> None:
        """Check, in the first process, that two checkpoints hold the same, to the last bit."""
        if not self._backend.is_main:
            return
        one, other = self.states[first], self.states[second]
        tensors = [(kind, name) for kind, of in one.items() for name in of]
        unlike = [(k, n) for k, n in tensors if not torch.equal(one[k][n], other[k][n])]
        text = f"{len(tensors)} tensors loaded over those of another update: the same bits"
        if unlike:
            kind, name = unlike[0]
            text = (
                f"{len(unlike)} of {len(tensors)} tensors are other ones once loaded and "
                f"written again; the first: {kind} of {name}"
            )
        self._table.line(not unlike, "checkpoint read", text)


# -- the real model's size ------------------------------------------------------------


def checkpoint_bytes(run: Run) -> int:
    """Return the size of a checkpoint of the whole model: weights, AdamW's moments and the EMA."""
    each = 4 if run.own.keeps_fp32_weights else 2
    copies = 4 if run.config.ema.model_ema else 3
    return copies * each * run.model.parameter_count


def check_disk(run: Run, table: Table) -> None:
    """Check the room for the checkpoints that the run will keep, and for the one that is written
    before the oldest is removed; with ``--keep_checkpoints 0``, all, for one."""
    ckpt_dir, keep = run.ckpt_dir, run.config.checkpoints.keep_checkpoints
    if is_url(ckpt_dir):
        text = f"a checkpoint of the whole model takes {size_of(checkpoint_bytes(run))}"
        table.line(True, "disk", f"{text} on {ckpt_dir}")
        return
    folder = ckpt_dir
    while not folder.exists():
        folder = folder.parent
    try:
        free = shutil.disk_usage(folder).free
    except OSError as error:
        table.line(False, "disk", f"{folder}: {error.strerror}")
        return
    size = checkpoint_bytes(run)
    there = len(complete_checkpoints(ckpt_dir))
    wanted = max(1, keep + 1 - there) if keep else 1
    text = f"{size_of(free)} free, a checkpoint of the whole model takes {size_of(size)}: "
    if keep:
        text += f"--keep_checkpoints {keep} and one more, {there} there"
    else:
        text += f"room for {free // size:,} (--keep_checkpoints 0: none is removed)"
    table.line(free >= wanted * size, "disk", text)
