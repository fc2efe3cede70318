"""The program's own training step as graphs, with nothing allocated at the model's size.

The backend runs as it does in training, except that what would be data on the devices is a
placeholder, and that a graph is saved where it would be run (``recorder``).
"""

import contextlib
import functools
import os

import torch

from tools.compile_only.graphs import Step
from training.backend import dataset_request
from training.objectives import open_objective
from training.schedule import StepRates, rope_factors
from training.step import begin_step, forward_backward, put_micro_batches, shard_and_optimize
from xla_fsdp.resolve_xla import XlaRun


def start_xla(devices: int, form: str) -> None:
    """Start XLA on the CPU, made to believe that it has this many devices, for this form of
    FSDP."""
    os.environ["PJRT_DEVICE"] = "CPU"
    # A few virtual ones stand for all: many crash autograd (128 do), and one is never sharded.
    os.environ["CPU_NUM_DEVICES"] = "1" if form == "nested" else str(min(devices, 4))
    import torch_xla.runtime as xr

    xr.global_runtime_device_count = lambda: devices  # asked by Mesh and by the backend
    if form == "spmd":
        xr.use_spmd()
    else:
        xr.world_size = lambda: devices
        xr.global_ordinal = lambda: 0


def trace_step(run: XlaRun, named: bool = False) -> Step:
    """Trace one step of ``run``, sharded as in training. Call ``start_xla`` before.

    ``named``: write into the graphs from which module of the model each operation comes.
    """
    from tools.compile_only import recorder
    from tools.compile_only.names import LOSS, OPTIMIZER, Names

    nested = run.own.xla_fsdp != "spmd"
    backend = (recorder.TracingNestedBackend if nested else recorder.TracingSpmdBackend)(run)
    sharded = shard_and_optimize(run, backend)
    sharded.train()
    in_loss: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
    in_optimizer: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
    if named:
        names = Names()
        names.watch(sharded)
        backend.before_backward = functools.partial(names.name_backward, module=LOSS)
        in_loss, in_optimizer = names.inside(LOSS, "forward"), names.inside(OPTIMIZER, "update")

    data, optimizer = run.config.data, run.config.optimizer
    share = data.batch_size // backend.world_size
    request = dataset_request(run)
    packed = request.layout and (request.layout.length,)
    shape = (share, *(packed or request.shape))
    dtype = getattr(torch, data.image_dtype(len(request.size)))
    images = torch.empty(shape, dtype=dtype, device="meta")
    batch = images, torch.empty(share, dtype=torch.int64, device="meta")
    objective = open_objective(run, backend)

    backend.start_recording()
    micro_batches = put_micro_batches(backend, batch, data.grad_accum_steps)
    rates = StepRates(optimizer.lr, rope_factors=rope_factors(run).at(0))
    begin_step(sharded, objective, backend, rates)

    def as_it_is(tensor: torch.Tensor) -> torch.Tensor:
        return tensor

    # What autograd saves for the backward pass passes through Python: held by C++ alone, the
    # recorder would not find it where the graph breaks.
    with torch.autograd.graph.saved_tensors_hooks(as_it_is, as_it_is), in_loss:
        loss = forward_backward(sharded, objective, backend, 0, micro_batches)
    with in_optimizer:
        outcome = backend.optimizer_step(rates, optimizer.clip_grad_norm, loss)
    del loss, outcome  # until here they live, and so are results
    return Step(
        graphs=backend.recorder.graphs,
        replicas=backend.world_size,
        state_bytes=backend.local_state_bytes(),
        description=backend.describe(),
    )
