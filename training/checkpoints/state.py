"""Carries the state of a backend to the files of a checkpoint and back, by PyTorch's DCP."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from training.backend import Backend
from training.checkpoints.content import RNG, training_entry, tree
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


def load_state(backend: Backend, folder: Path, *, with_optimizer: bool = True) -> None:
    """Put a checkpoint's values on the devices; all processes call it.

    Restores the weights and, ``with_optimizer``, also AdamW's state, what else the next step
    depends on, as far as the checkpoint has it, and the CPU's random state. Raises anything if the
    checkpoint is damaged.
    """
    reader = SafeReader(folder)
    state = backend.state(with_optimizer=with_optimizer)
    training: dict[str, torch.Tensor] = {}
    if with_optimizer:
        saved = reader.read_metadata().state_dict_metadata
        there = {name: each for name, each in state.step.items() if training_entry(name) in saved}
        state = replace(state, step=there)
        training = {**there, RNG: torch.get_rng_state()}
    with quiet_dcp():
        dcp.load(tree(state, training), storage_reader=reader, no_dist=not dist.is_initialized())
    if with_optimizer:
        torch.set_rng_state(training[RNG])
    backend.take(state)
