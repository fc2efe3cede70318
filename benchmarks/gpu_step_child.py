"""The measuring process of gpu_step.py: one variant of the step; prints one JSON line.

    python -m benchmarks.gpu_step_child --loop own --warmup 5 --steps 20 FLAGS

FLAGS are those of run_vit_training.py. Under torchrun, each process takes its share of the
batch. A variant that cannot run here ends with the line {"reason": ...}.
"""

import argparse
import functools
import json
import time
from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any

import torch
import torch.nn.functional as F
from timm.models.vision_transformer import VisionTransformer
from torch import nn
from torch.amp.grad_scaler import GradScaler
from torch.nn.parallel import DistributedDataParallel

from benchmarks.common import own_memory
from benchmarks.gpu_candidates import CHANGES, KERNELS, ChangedBlocks, attention_by
from benchmarks.gpu_peers import (
    Step,
    autocast,
    objective_batches,
    plain_dino_step,
    plain_mae_step,
    step_rates,
)
from data.batch import Batch
from features.image_text.config import OBJECTIVES
from gpu_fsdp import resolve_gpu
from models.config import VitConfig
from run_vit_training import read_flags
from torch_fsdp.launch_torch import launch
from torch_fsdp.parallel_plan import TorchRun
from torch_fsdp.torch_backend import TorchBackend
from training.backend import Backend
from training.errors import UsageError
from training.objectives.registry import open_objective
from training.step import shard_and_optimize, train_step

BuildStep = Callable[[TorchRun, Backend, list[Batch]], Step]


def own_step(run: TorchRun, backend: Backend, batches: list[Batch]) -> Step:
    """Return the program's own step on the backend of ``run``."""
    sharded = shard_and_optimize(run, backend)
    optimizer, objective = run.config.optimizer, open_objective(run, backend)
    sharded.train()

    def step(number: int) -> torch.Tensor:
        return train_step(
            sharded,
            objective,
            backend,
            number,
            batches,
            rates=step_rates(run),
            max_norm=optimizer.clip_grad_norm,
        )["loss"]

    return step


def timm_step(
    run: TorchRun, backend: Backend, batches: list[Batch], *, compile_mode: str | None = None
) -> Step:
    """Return timm's training loop: autocast, fused AdamW, clipping; DDP on several GPUs.

    ``compile_mode``: that of torch.compile, which timm's --torchcompile calls on the whole model.
    """
    device, count = batches[0]["image"].device, len(batches)
    config, precision = run.config.optimizer, run.config.sharding.precision
    assert config.betas is not None  # resolved
    # As timm.create_model makes it.
    arguments = {each.name: run.model.settings[each.name] for each in fields(VitConfig)}
    model: Any = VisionTransformer(**arguments).to(device)
    if run.backend_config.channels_last:
        model = model.to(memory_format=torch.channels_last)
    if backend.batch_shards > 1:
        model = DistributedDataParallel(model)
    if compile_mode:
        model = torch.compile(model, mode=compile_mode)
    optimizer = torch.optim.AdamW(
        model.parameters(),
        lr=config.lr,
        betas=config.betas,
        eps=config.eps,
        weight_decay=config.weight_decay,
        fused=True,
    )
    scaler = GradScaler(device.type, enabled=precision == "fp16")
    lower = autocast(run, device)
    model.train()

    def step(number: int) -> torch.Tensor:
        losses = []
        for index, batch in enumerate(batches):
            # DDP's switch (no_sync sets it): reduce gradients after the last micro-batch only.
            model.require_backward_grad_sync = index == count - 1
            with lower():
                loss = F.cross_entropy(model(batch["image"]), batch["target"]) / count
            losses.append(loss.detach())
            scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        if config.clip_grad_norm > 0:
            nn.utils.clip_grad_norm_(model.parameters(), config.clip_grad_norm)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        return torch.stack(losses).sum()

    return step


def captured(step: Step, backend: Backend) -> Step:
    """Return the own step as one CUDA graph: the same work on the same batch, without the host.

    Only for measuring: random numbers, learning rates and the number of the step are constants.
    """
    if not torch.cuda.is_available():
        raise UsageError("cudagraph requires CUDA", agreed=True)
    assert isinstance(backend, TorchBackend)
    for group in backend._optimizer._optimizer.param_groups:
        group["capturable"] = True
    backend.begin_micro_batch = lambda micro_batch_index: None  # type: ignore[method-assign]
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for number in range(3):  # compiles, and lets libraries allocate what they need
            step(number)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        loss = step(3)

    def replay(number: int) -> torch.Tensor:
        graph.replay()
        return loss

    return replay


def measure(
    run: TorchRun,
    backend: Backend,
    *,
    build: BuildStep,
    warmup: int,
    steps: int,
    in_graph: bool = False,
) -> None:
    """Time ``steps`` steps, from device idle to device idle; nothing is read in between."""
    before = own_memory("VmHWM")
    step = build(run, backend, objective_batches(run, backend))
    if in_graph:
        step = captured(step, backend)
    for number in range(warmup):
        step(number)
    backend.barrier()
    backend.wait()
    on_gpu = torch.cuda.is_available()
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    start = time.perf_counter()
    for number in range(warmup, warmup + steps):
        loss = step(number)
    backend.wait()
    seconds = (time.perf_counter() - start) / steps
    throughput, flops = run.config.data.batch_size / seconds, run.model.train_flops_per_image
    peak = backend.peak_flops()
    peak_memory = backend.memory().get("peak")  # torch.cuda.max_memory_allocated
    if peak_memory is None:
        peak_memory = own_memory("VmHWM") - before
    result = {
        "s_per_step": seconds,
        "images_per_s": throughput,
        "peak_memory": peak_memory,
        "mfu": throughput * flops / (peak * backend.device_count) if peak else None,
        "train_flops_per_image": flops,
        "peak_flops_per_gpu": peak,
        "loss": loss.item(),
        "device": torch.cuda.get_device_name() if on_gpu else "CPU",
        "backend": backend.describe() if build is own_step else "plain PyTorch",
    }
    if backend.is_main:
        print(json.dumps(result), flush=True)


def plain_step_of(objective: str) -> Callable[..., Step]:
    """Return what builds the plain step of an objective. Raises UsageError."""
    plain = {"classify": timm_step, "dino": plain_dino_step, "mae": plain_mae_step}
    if objective not in OBJECTIVES:
        return plain[objective]
    try:
        from benchmarks.image_text_peers import open_clip_step
    except ImportError as error:
        raise UsageError(f"open_clip's step requires open_clip_torch: {error}") from None
    return open_clip_step


def main() -> None:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--loop", choices=("own", "plain"), required=True)
    parser.add_argument("--compile_mode", help="of torch.compile, for the plain loop")
    parser.add_argument("--change", action="append", choices=CHANGES, default=[])
    parser.add_argument("--attention", choices=KERNELS)
    parser.add_argument("--cudagraph", action="store_true")
    parser.add_argument("--warmup", type=int, required=True)
    parser.add_argument("--steps", type=int, required=True)
    chosen, flags = parser.parse_known_args()
    asked = read_flags(flags)
    build: BuildStep = own_step
    try:
        if chosen.loop == "plain":
            plain_step = plain_step_of(asked.run.objective.objective)
            build = functools.partial(plain_step, compile_mode=chosen.compile_mode)
        run = resolve_gpu.resolve(asked.run, asked.torch)
        if chosen.change:
            blocks = ChangedBlocks(changes=tuple(chosen.change))
            run = replace(run, plan=replace(run.plan, blocks=blocks))
        body = functools.partial(
            measure,
            build=build,
            warmup=chosen.warmup,
            steps=chosen.steps,
            in_graph=chosen.cudagraph,
        )
        with attention_by(chosen.attention):
            launch(body, run)
    except UsageError as error:
        print(json.dumps({"reason": str(error)}), flush=True)


if __name__ == "__main__":
    main()
