"""What ``--plan`` is asked beside the flags of the training that it plans."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from config_fields import bounded, count, flag, positive


@dataclass(frozen=True)
class PlanConfig:
    """Says among which hardware ``--plan`` searches, and what a plan may take."""

    group: ClassVar[str] = "plan (--plan)"

    chips_at_most: int = flag(
        256, "chips, or GPUs, of the largest plan", kind=positive, metavar="N", needs=("plan",)
    )
    hours: float | None = flag(
        None,
        "keep plans that train in so many hours (default: any)",
        kind=bounded(float, 1e-6, 1e6),
        metavar="H",
        needs=("plan",),
    )
    price: str | None = flag(
        None,
        "TOML or JSON file with the price of a chip for an hour, as training/plan/prices.toml, "
        "which is the default",
        metavar="FILE",
        needs=("plan",),
    )
    train_images: int | None = flag(
        None,
        "training images of an epoch (default: those of --data_dir if it is there, else "
        "ImageNet's, 1281167)",
        kind=positive,
        metavar="N",
        needs=("plan",),
    )
    plan_compilations: int = flag(
        15,
        "on TPUs, steps that the compiler is asked about at most, a minute or two each; those of "
        "--plan_dir do not count; 0: none",
        kind=count,
        metavar="N",
        needs=("plan",),
    )
    plan_dir: str = flag(
        "runs/plan",
        "folder for the picture, and for what the compiler said, which is not asked again",
        metavar="FOLDER",
        needs=("plan",),
    )
