"""The measuring process of domain_parallel.py: one configuration; prints one JSON line.

    python -m benchmarks.domain_parallel_child --what train --num_warmup 2 --num_iterations 5 FLAGS

FLAGS are those of run_vit_training.py, with --backend. On GPUs torchrun starts one process per
device; on XLA this process has all devices. A configuration that cannot run here ends with the line
{"reason": ...}.
"""

import argparse
import functools
import json
import resource
import sys
import time
from collections.abc import Callable

import torch

from benchmarks.common import own_memory
from data.batch import Batch, Field
from gpu_fsdp import resolve_gpu
from run_vit_training import read_flags
from torch_fsdp.launch_torch import launch as launch_gpu
from training.backend import Backend
from training.errors import UsageError
from training.objectives.registry import open_objective
from training.resolve import Run
from training.schedule import StepRates
from training.step import shard_and_optimize, train_step
from xla_fsdp import resolve_xla
from xla_fsdp.launch_xla import launch as launch_xla

FIELDS = {"image": Field((), torch.float32, rows=1)}
"""Which fields the devices of an image share by rows."""
Pass = Callable[[int], torch.Tensor]
"""A function that computes the pass of this number and returns a result of it on the device."""


def train(run: Run, backend: Backend, batch: Batch) -> Pass:
    """Return the program's own training step."""
    sharded, optimizer = shard_and_optimize(run, backend), run.config.optimizer
    batches, objective = [backend.put(batch, FIELDS)], open_objective(run, backend)
    sharded.train()

    def step(number: int) -> torch.Tensor:
        rates, max_norm = StepRates(optimizer.lr), optimizer.clip_grad_norm
        return train_step(
            sharded, objective, backend, number, batches, rates=rates, max_norm=max_norm
        )["loss"]

    return step


def forward(run: Run, backend: Backend, batch: Batch) -> Pass:
    """Return a forward pass as evaluation computes it; no optimizer is made."""
    model = run.model.build()
    initialize = functools.partial(run.model.initialize, seed=run.config.seed)
    sharded = backend.shard(model, list(run.model.units(model)), initialize)
    images = backend.put(batch, FIELDS)["image"]
    sharded.eval()

    @torch.no_grad()
    def only_forward(number: int) -> torch.Tensor:
        logits = sharded(images)
        backend.end_step()
        return logits

    return only_forward


def random_share(run: Run, backend: Backend) -> Batch:
    """Return this process's share of one batch: of its images the rows that it computes, no more.

    The values are random, not zeros: a GPU that multiplies zeros draws less power and clocks
    higher.
    """
    generator = torch.Generator().manual_seed(backend.batch_shard)
    sizes = run.model.sizes
    share = run.config.data.batch_size // backend.batch_shards
    channels, _, *others = sizes.input_shape
    shape = (share, channels, len(backend.image_rows), *others)
    labels = torch.randint(sizes.num_classes, (share,), generator=generator)
    return {"image": torch.randn(shape, generator=generator), "target": labels}


def measure(
    run: Run, backend: Backend, *, what: str, warmup: int, iterations: int, limit: float
) -> None:
    """Time the passes, from device idle to device idle; nothing is read in between."""
    if not torch.cuda.is_available():
        torch.set_num_threads(1)  # a device is one core, however many processes there are
    before = own_memory("VmHWM")
    if limit:
        most = own_memory("VmData") + int(limit * 1e9)
        resource.setrlimit(resource.RLIMIT_DATA, (most, resource.RLIM_INFINITY))
    build = {"train": train, "forward": forward}[what]
    compute = build(run, backend, random_share(run, backend))
    for number in range(warmup):
        compute(number)
    backend.barrier()
    backend.wait()
    start = time.perf_counter()
    for number in range(warmup, warmup + iterations):
        result = compute(number)
    backend.wait()
    seconds = (time.perf_counter() - start) / iterations
    del result
    peak = backend.memory().get("peak")
    if peak is None:  # of a process with several virtual devices each one's part
        in_process = backend.device_count if run.config.backend == "xla" else 1
        peak = (own_memory("VmHWM") - before) // in_process
    largest = backend.all_reduce_max(peak)()
    if backend.is_main:
        found = {
            "seconds": seconds,
            "peak_bytes": largest,
            "parameters": run.model.parameter_count,
            "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU",
            "backend": backend.describe(),
        }
        print(json.dumps(found), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--what", choices=("train", "forward"), required=True)
    parser.add_argument("--num_warmup", type=int, required=True)
    parser.add_argument("--num_iterations", type=int, required=True)
    parser.add_argument("--memory_limit_gb", type=float, default=0.0)
    chosen, flags = parser.parse_known_args()
    asked = read_flags(flags)
    body = functools.partial(
        measure,
        what=chosen.what,
        warmup=chosen.num_warmup,
        iterations=chosen.num_iterations,
        limit=chosen.memory_limit_gb,
    )
    try:
        if asked.run.backend == "xla":
            launch_xla(body, resolve_xla.resolve(asked.run, asked.xla))
        else:
            launch_gpu(body, resolve_gpu.resolve(asked.run, asked.torch))
    except UsageError as error:
        print(json.dumps({"reason": str(error)}), flush=True)
        sys.exit()


if __name__ == "__main__":
    main()
