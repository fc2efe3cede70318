"""The program's own training step as a graph, with nothing allocated at the model's size.

The SPMD backend runs as it does in training, except that what would be data on the devices is a
placeholder, and that a graph is handed out where it would be run.
"""

from __future__ import annotations

import argparse
import os
from dataclasses import dataclass

import torch
from torch import nn

from training.loop import forward_backward
from training.run import shard_and_optimize
from xla_fsdp.mesh import MeshShape, Spec


@dataclass(frozen=True)
class StepGraph:
    """A training step as HLO, and how its arguments and results lie on the devices."""

    hlo: bytes
    arguments: dict[int, Spec]
    """By the number of the argument; those not here are small and replicated."""
    results: list[Spec]
    donated: dict[int, int]
    """Argument to the result that takes its place."""
    mesh: MeshShape
    state_bytes: int
    """Parameters and optimizer state on one device, by their specs."""
    description: str


def start_xla(devices: int) -> None:
    """XLA on the CPU, made to believe that it has this many devices."""
    os.environ["PJRT_DEVICE"] = "CPU"
    # A few virtual ones stand for all: many crash autograd (128 do), and one is never sharded.
    os.environ["CPU_NUM_DEVICES"] = str(min(devices, 4))
    import torch_xla.runtime as xr

    xr.use_spmd()
    xr.global_runtime_device_count = lambda: devices  # asked by Mesh and by the backend


def trace_step(args: argparse.Namespace, model: nn.Module, config) -> StepGraph:
    """Shard and step once on ``args``, as in training. Call ``start_xla`` before."""
    from xla_fsdp.compile_only.tracing_backend import TracingBackend

    backend = TracingBackend(args)
    sharded = shard_and_optimize(model, args, config, backend)
    sharded.train()
    images = torch.empty(
        args.batch_size, config.in_chans, config.img_size, config.img_size, device="meta"
    )
    labels = torch.empty(args.batch_size, dtype=torch.int64, device="meta")
    loss = forward_backward(sharded, backend, 0, [backend.put((images, labels))])
    norm = backend.optimizer_step(args.lr, args.clip_grad_norm)
    return backend.graph([loss.detach(), norm])
