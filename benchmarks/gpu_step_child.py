"""The measuring process of gpu_step.py: one variant of the step; prints one JSON line.

    python -m benchmarks.gpu_step_child --loop own --warmup 5 --steps 20 FLAGS

FLAGS are those of run_vit_training.py. Under torchrun each process takes its share of the
batch. What cannot run here ends with the line {"reason": ...}.
"""

from __future__ import annotations

import argparse
import functools
import json
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import torch
import torch.nn.functional as F
from timm.models.vision_transformer import VisionTransformer
from torch import nn
from torch.amp.grad_scaler import GradScaler
from torch.nn.parallel import DistributedDataParallel

from data.loader import Batch
from gpu_fsdp import options
from gpu_fsdp.launch import launch
from models.config import VitConfig
from models.vit import build_vit, train_flops_per_image
from training.arguments import model_config, parse_arguments
from training.backend import Backend
from training.errors import UsageError
from training.loop import forward_backward
from training.run import shard_and_optimize
from training.validation import check_model, check_run

Step = Callable[[int], torch.Tensor]
"""Runs the step of this number, returns its loss on the device."""
BuildStep = Callable[[argparse.Namespace, VitConfig, Backend, list[Batch]], Step]


def own_step(
    args: argparse.Namespace, config: VitConfig, backend: Backend, batches: list[Batch]
) -> Step:
    """The step of training/loop.py on the backend that ``args`` chose."""
    sharded = shard_and_optimize(build_vit(config), args, config, backend)
    sharded.train()

    def step(number: int) -> torch.Tensor:
        loss = forward_backward(sharded, backend, number, batches)
        backend.optimizer_step(args.lr, args.clip_grad_norm, loss)
        return loss

    return step


def timm_step(
    args: argparse.Namespace, config: VitConfig, backend: Backend, batches: list[Batch]
) -> Step:
    """timm's training loop: autocast, fused AdamW, clipping; DDP if there are several GPUs."""
    device, count = batches[0][0].device, len(batches)
    model: Any = VisionTransformer(**asdict(config)).to(device)  # as timm.create_model's
    if args.channels_last:
        model = model.to(memory_format=torch.channels_last)
    if backend.world_size > 1:
        model = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=args.lr, betas=(args.betas[0], args.betas[1]), eps=args.eps,
        weight_decay=args.weight_decay, fused=True,
    )  # fmt: skip
    scaler = GradScaler(device.type, enabled=args.precision == "fp16")
    dtype = options.DTYPES[args.precision]
    lower = torch.autocast(device.type, dtype=dtype, enabled=args.precision != "fp32")
    model.train()

    def step(number: int) -> torch.Tensor:
        losses = []
        for index, (images, labels) in enumerate(batches):
            # DDP's switch (no_sync sets it): reduce gradients after the last micro-batch only.
            model.require_backward_grad_sync = index == count - 1
            with lower:
                loss = F.cross_entropy(model(images), labels) / count
            losses.append(loss.detach())
            scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        if args.clip_grad_norm > 0:
            nn.utils.clip_grad_norm_(model.parameters(), args.clip_grad_norm)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        return torch.stack(losses).sum()

    return step


def random_batches(args: argparse.Namespace, config: VitConfig, backend: Backend) -> list[Batch]:
    """This process's share of one batch, in micro-batches, on its device.

    Random, not zeros: a GPU that multiplies zeros draws less power and clocks higher.
    """
    generator = torch.Generator().manual_seed(backend.rank)
    share = args.batch_size // backend.world_size
    shape = (share, config.in_chans, config.img_size, config.img_size)
    images = torch.randn(shape, generator=generator)
    labels = torch.randint(config.num_classes, (share,), generator=generator)
    parts = (part.chunk(args.grad_accum_steps) for part in (images, labels))
    return [backend.put((some, theirs)) for some, theirs in zip(*parts, strict=True)]


def measure(
    args: argparse.Namespace, backend: Backend, *, build: BuildStep, warmup: int, steps: int
) -> None:
    """Time ``steps`` steps, from device idle to device idle; nothing is read in between."""
    config = model_config(args)
    step = build(args, config, backend, random_batches(args, config, backend))
    for number in range(warmup):
        step(number)
    backend.barrier()
    backend.wait()
    on_gpu = options.device_type() == "cuda"
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    start = time.perf_counter()
    for number in range(warmup, warmup + steps):
        loss = step(number)
    backend.wait()
    seconds = (time.perf_counter() - start) / steps
    pace, flops = args.batch_size / seconds, train_flops_per_image(config)
    peak = backend.peak_flops()
    result = {
        "s_per_step": seconds,
        "images_per_s": pace,
        "peak_memory": backend.memory().get("peak"),  # torch.cuda.max_memory_allocated
        "mfu": pace * flops / (peak * backend.device_count) if peak else None,
        "train_flops_per_image": flops,
        "peak_flops_per_gpu": peak,
        "loss": loss.item(),
        "device": torch.cuda.get_device_name() if on_gpu else "CPU",
        "backend": backend.describe() if build is own_step else "timm's loop",
    }
    if backend.is_main:
        print(json.dumps(result), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--loop", choices=("own", "timm"), required=True)
    parser.add_argument("--warmup", type=int, required=True)
    parser.add_argument("--steps", type=int, required=True)
    chosen, flags = parser.parse_known_args()
    args = parse_arguments(flags)
    config = model_config(args)
    try:
        check_model(config)
        check_run(args, options.world_size())
        options.check(args, config)
    except UsageError as error:
        print(json.dumps({"reason": str(error)}), flush=True)
        sys.exit()
    build = {"own": own_step, "timm": timm_step}[chosen.loop]
    launch(functools.partial(measure, build=build, warmup=chosen.warmup, steps=chosen.steps), args)


if __name__ == "__main__":
    main()
