"""References for mixed batches: timm's Mixup and losses."""

import itertools
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch
from timm.data import Mixup
from timm.loss import BinaryCrossEntropy, LabelSmoothingCrossEntropy, SoftTargetCrossEntropy

from tests.support.cli import tiny
from tests.support.resolved import on_xla
from training.backend import micro_batch_seed
from training.flags import flat
from training.objectives.mixup_config import MixupConfig

BOTH = "--mixup 0.8 --cutmix 1.0 --mixup_prob 0.8 --smoothing 0.1"
"""Of ten passes some are mixed, some cut, some left as they are."""


HOST = (
    "--aa rand-m9-mstd0.5-inc1 --reprob 0.25 --recount 2 --aug_repeats 2 --vflip 0.2 "
    "--train_interpolation random"
).split()
"""What is changed of images before they are sent."""


def loss_flags(run):
    """The flags of a run's loss and of what it mixes."""
    return SimpleNamespace(**flat(run.config), mixes=run.config.of(MixupConfig).mixes)


def timms_mixup(config, classes):
    return Mixup(
        mixup_alpha=config.mixup,
        cutmix_alpha=config.cutmix,
        cutmix_minmax=config.cutmix_minmax,
        prob=config.mixup_prob,
        switch_prob=config.mixup_switch_prob,
        label_smoothing=config.smoothing,
        num_classes=classes,
    )


def timms_loss(config):
    """As timm's train.py chooses it."""
    bce = {"target_threshold": config.bce_target_thresh, "sum_classes": config.bce_sum}
    if config.mixes:
        return BinaryCrossEntropy(**bce) if config.bce_loss else SoftTargetCrossEntropy()
    if config.bce_loss:
        return BinaryCrossEntropy(smoothing=config.smoothing, **bce)
    return LabelSmoothingCrossEntropy(config.smoothing)


def by_timm(config, parts, images, labels, seed, micro_batch_index):
    """Normalised images and soft labels: each device's part for itself, as processes of timm's."""
    found = []
    for part in zip(images.chunk(parts), labels.chunk(parts), strict=True):
        np.random.seed(micro_batch_seed(seed, micro_batch_index, -1) % 2**32)
        found.append(timms_mixup(config, 10)(part[0].clone(), part[1]))
    return [torch.cat(each) for each in zip(*found, strict=True)]


def tiny_run(*flags, devices=1):
    return on_xla([*tiny(Path("unused")), *flags, "--cpu_devices", str(devices)])


def assert_steady(result, executions=1):
    counts = result.column("executions")
    assert {after - before for before, after in itertools.pairwise(counts)} == {executions}
    assert len(set(result.column("compilations"))) == 1
