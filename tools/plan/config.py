"""The flags of ``--plan``: which hardware to search, and the limits of a plan."""

import functools
from dataclasses import dataclass
from typing import ClassVar

from config_fields import bounded, count, flag, path_or_url, positive

# Parts of a plan: their defaults do not turn it off.
_plan_flag = functools.partial(flag, requires=("plan",), requires_at_default=True)


@dataclass(frozen=True)
class PlanConfig:
    """Which hardware ``--plan`` searches, and the limits of a plan."""

    group: ClassVar[str] = "plan (--plan)"

    chips_at_most: int = _plan_flag(256, "maximum number of chips in a plan", kind=positive)
    hours: float | None = flag(
        None,
        "maximum training time of a plan, in hours (default: no limit)",
        kind=bounded(float, 1e-6, 1e6),
        metavar="H",
        requires=("plan",),
    )
    price: str | None = flag(
        None,
        "TOML or JSON file with prices per chip-hour in dollars, in the format of "
        "tools/plan/prices.toml (default: that file)",
        kind=path_or_url,
        metavar="FILE",
        requires=("plan",),
    )
    train_images: int | None = flag(
        None,
        "number of training images per epoch (default: those in --data_dir if it exists, else "
        "ImageNet's 1281167)",
        kind=bounded(int, 1, 10**12),
        requires=("plan",),
    )
    plan_compilations: int = _plan_flag(
        15,
        "maximum number of steps to compile with the TPU compiler, a minute or two each, without "
        "those whose results are in --plan_dir; 0: none",
        kind=count,
    )
    plan_dir: str = _plan_flag(
        "runs/plan",
        "folder for the plot and for the compiler's results, which later plans reuse",
        kind=path_or_url,
        metavar="FOLDER",
    )
