"""The reference for test_optimizers: timm's model, optimizers and parameter groups, whole."""

import functools
from typing import Any

import timm.optim.muon
import torch
import torch.nn.functional as F
from timm.optim import Lion, Muon, param_groups_layer_decay
from torch import nn

from data.loader import Share
from data.source import open_data
from tests.cli import DIGITS, TINY_MODEL, TINY_RUN
from tests.references.normalized import normalized
from tests.resolved import on_xla
from tests.stand_ins.filled import filled
from training.backend import dataset_request
from training.config import OptimizerConfig
from training.schedule import Schedule


def groups(model: nn.Module, how: OptimizerConfig) -> list[dict[str, Any]]:
    """timm's own; with --no_decay all three of its kinds must be given, or none."""
    decays_all = how.no_decay is None
    return param_groups_layer_decay(
        model,
        how.weight_decay,
        no_weight_decay_list=() if decays_all else model.no_weight_decay(),
        weight_decay_exclude_1d=not decays_all,
        layer_decay=how.layer_decay,
    )


def optimizer_of(model: nn.Module, how: OptimizerConfig) -> Any:
    if how.linear_probe:
        model.requires_grad_(False)
        model.get_classifier().requires_grad_(True)
    of_model, betas = groups(model, how), {"betas": how.betas}
    if how.optimizer == "lion":
        return Lion(of_model, **betas)
    if how.optimizer == "muon":
        return Muon(of_model, eps=how.eps, **betas)
    return torch.optim.AdamW(of_model, eps=how.eps, **betas)


def train(*flags: str, steps: int = 6) -> tuple[dict[str, list[float]], nn.Module, Any]:
    """The losses and gradient norms, the trained model and its optimizer.

    As in tests/cli.py on the digits; in bf16 under autocast.
    """
    run = on_xla([*f"--data_dir {DIGITS} --hflip 0".split(), *TINY_MODEL, *TINY_RUN, *flags])
    how, bf16 = run.config.optimizer, run.config.sharding.precision == "bf16"
    model = filled(run.model, run.config.seed)
    optimizer = optimizer_of(model, how)
    newton_schulz = timm.optim.muon.zeropower_via_newtonschulz
    if not bf16:
        timm.optim.muon.zeropower_via_newtonschulz = functools.partial(
            newton_schulz, dtype=torch.float32
        )
    loader = open_data(dataset_request(run)).train_loader(run.config.data.batch_size, Share())
    schedule = Schedule(how.lr, how.warmup_steps, len(loader) * run.config.num_epochs)
    found: dict[str, list[float]] = {"loss": [], "grad_norm": []}
    try:
        for step, (images, labels) in zip(range(steps), loader.epoch(0), strict=False):
            for group in optimizer.param_groups:
                group["lr"] = schedule.lr(step) * group["lr_scale"]
            with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
                logits = model(normalized(images, run))
            loss = F.cross_entropy(logits.float(), labels)
            loss.backward()
            norm = nn.utils.clip_grad_norm_(model.parameters(), how.clip_grad_norm)
            found["loss"].append(loss.item())
            found["grad_norm"].append(norm.item())
            optimizer.step()
            optimizer.zero_grad()
    finally:
        timm.optim.muon.zeropower_via_newtonschulz = newton_schulz
    return found, model, optimizer
