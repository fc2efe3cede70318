"""Carries the state of a backend to the files of a checkpoint and back, by PyTorch's DCP."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from training.backend import Backend
from training.checkpoints.content import EMA, RNG, WEIGHTS, training_entry, tree
from training.checkpoints.reader import SafeReader, quiet_dcp


def save_state(backend: Backend, folder: Path, training: dict[str, torch.Tensor]) -> None:
    """Write the backend's state, ``training`` and the CPU's random state; all processes call it.

    The manifest that completes a checkpoint is the caller's. Raises OSError, RuntimeError or DCP's
    CheckpointException if it cannot be written.
    """
    state = backend.state()
    content = tree(state, {**training, **state.step, RNG: torch.get_rng_state()})
    with quiet_dcp():
        dcp.save(
            content,
            storage_writer=dcp.FileSystemWriter(folder),
            no_dist=not dist.is_initialized(),
        )


def load_state(
    backend: Backend, folder: Path, *, with_optimizer: bool = True, use_ema: bool = False
) -> bool:
    """Put a checkpoint's values on the devices; all processes call it.

    Restores the weights and, ``with_optimizer``, also AdamW's state, the EMA and what else the next
    step depends on, as far as the checkpoint has it, and the CPU's random state. With ``use_ema``
    the weights become the checkpoint's EMA. Returns whether the checkpoint has one. Raises anything
    if the checkpoint is damaged.
    """
    reader = SafeReader(folder)
    saved = reader.read_metadata().state_dict_metadata
    has_ema = any(name.startswith(f"{EMA}.") for name in saved)
    state = backend.state(with_optimizer=with_optimizer)
    training: dict[str, torch.Tensor] = {}
    if with_optimizer:
        there = {name: each for name, each in state.step.items() if training_entry(name) in saved}
        state = replace(state, step=there, ema=state.ema if has_ema else None)
        training = {**there, RNG: torch.get_rng_state()}
    wanted = tree(state, training)
    if use_ema:
        wanted[EMA] = wanted.pop(WEIGHTS)
    with quiet_dcp():
        dcp.load(wanted, storage_reader=reader, no_dist=not dist.is_initialized())
    if with_optimizer:
        torch.set_rng_state(training[RNG])
    backend.take(state)
    return has_ema
