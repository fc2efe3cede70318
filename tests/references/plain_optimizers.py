"""The reference for test_optimizers: timm's model, optimizers and parameter groups, whole."""

import functools
from collections.abc import Sequence
from typing import Any

import timm.optim.muon
import torch
from timm.optim import Lion, Muon, param_groups_layer_decay
from torch import nn

from tests.fakes.filled import filled
from tests.references import plain_steps
from tests.support.cli import DIGITS, TINY_MODEL, TINY_RUN
from tests.support.resolved import on_xla
from training.config import OptimizerConfig


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


def train(
    *flags: str, steps: int = 6, heads_first: Sequence[float] | None = None
) -> tuple[dict[str, list[float]], nn.Module, Any]:
    """The losses and gradient norms, the trained model and its optimizer.

    As in tests/support/cli.py on the digits; in bf16 under autocast. ``heads_first``: by step, the
    factor of the learning rate of all but the classifier.
    """
    run = on_xla([*f"--data_dir {DIGITS} --hflip 0".split(), *TINY_MODEL, *TINY_RUN, *flags])
    how, bf16 = run.config.optimizer, run.config.sharding.precision == "bf16"
    model = filled(run.model, run.config.seed)
    optimizer = optimizer_of(model, how)
    if heads_first is not None:
        classifier = {id(parameter) for parameter in model.get_classifier().parameters()}
        for group in list(optimizer.param_groups):
            head = [p for p in group["params"] if id(p) in classifier]
            rest = [p for p in group["params"] if id(p) not in classifier]
            group |= {"params": rest, "scale": group.get("lr_scale", 1), "head": False}
            optimizer.param_groups.append({**group, "params": head, "head": True})
    newton_schulz = timm.optim.muon.zeropower_via_newtonschulz
    if not bf16:
        timm.optim.muon.zeropower_via_newtonschulz = functools.partial(
            newton_schulz, dtype=torch.float32
        )

    def rate(step: int, total: int) -> float:
        if heads_first is not None:
            for group in optimizer.param_groups:
                group["lr_scale"] = group["scale"] * (1 if group["head"] else heads_first[step])
        return plain_steps.warm_cosine(how)(step, total)

    try:
        losses, norms = plain_steps.train(model, optimizer, run, steps, rate, bf16)
    finally:
        timm.optim.muon.zeropower_via_newtonschulz = newton_schulz
    return {"loss": losses, "grad_norm": norms}, model, optimizer
