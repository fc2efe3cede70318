"""What a run is asked of its learning rate beside ``--lr`` and ``--warmup_steps``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from config_fields import flag, non_negative, positive


@dataclass(frozen=True)
class ScheduleConfig:
    """Says how the learning rate goes up to ``--lr`` and down again."""

    group: ClassVar[str] = "optimization"

    warmup_epochs: float | None = flag(
        None,
        "the length of the warmup in epochs, in place of --warmup_steps (default: none)",
        kind=non_negative,
        metavar="N",
        instead_of=("warmup_steps",),
    )
    warmup_lr: float = flag(0.0, "learning rate that the warmup begins at", kind=non_negative)
    lr_schedule: Literal["cosine", "linear", "constant", "wsd"] = flag(
        "cosine",
        "learning rate after the warmup; cosine, linear: down to --min_lr at the last step of "
        "--num_epochs; constant: --lr; wsd: --lr, and down to --min_lr in the last --decay_steps",
    )
    min_lr: float = flag(
        0.0,
        "learning rate that the schedule ends at",
        kind=non_negative,
        needs=("lr_schedule=cosine|lr_schedule=linear|lr_schedule=wsd",),
    )
    decay_steps: int | None = flag(
        None,
        "last steps, of --num_epochs or --max_steps, in which the learning rate goes down "
        "(default: none)",
        kind=positive,
        metavar="N",
        needs=("lr_schedule=wsd",),
    )
    decay_shape: Literal["sqrt", "linear", "cosine"] = flag(
        "sqrt", "how it goes down there; sqrt: by 1 - sqrt(x)", needs=("lr_schedule=wsd",)
    )
