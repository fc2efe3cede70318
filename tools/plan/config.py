"""The flags of ``--plan``: which hardware is searched, and what a plan may cost."""

import functools
from dataclasses import dataclass
from typing import ClassVar

from config_fields import bounded, count, flag, path_or_url, positive

# Parts of a plan: their defaults do not turn it off.
_plan_flag = functools.partial(flag, requires=("plan",), requires_at_default=True)


@dataclass(frozen=True)
class PlanConfig:
    """Which hardware ``--plan`` searches, and what a plan may cost."""

    group: ClassVar[str] = "plan (--plan)"

    chips_at_most: int = _plan_flag(256, "largest number of chips of a plan", kind=positive)
    hours: float | None = flag(
        None,
        "longest training, in hours, of a plan (default: no limit)",
        kind=bounded(float, 1e-6, 1e6),
        metavar="H",
        requires=("plan",),
    )
    price: str | None = flag(
        None,
        "TOML or JSON file with the prices of a chip an hour, in the format of "
        "tools/plan/prices.toml (default: that file)",
        kind=path_or_url,
        metavar="FILE",
        requires=("plan",),
    )
    train_images: int | None = flag(
        None,
        "number of training images of an epoch (default: those of --data_dir if it exists, else "
        "ImageNet's, 1281167)",
        kind=bounded(int, 1, 10**12),
        requires=("plan",),
    )
    plan_compilations: int = _plan_flag(
        15,
        "largest number of steps that the TPU compiler compiles for a plan, a minute or two each; "
        "those in --plan_dir do not count; 0: none",
        kind=count,
    )
    plan_dir: str = _plan_flag(
        "runs/plan",
        "folder for the picture and for the compiler's results, which later plans reuse",
        kind=path_or_url,
        metavar="FOLDER",
    )
