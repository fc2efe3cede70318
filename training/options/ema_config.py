"""What a run is asked of the moving average of its weights."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from config_fields import flag, rate


@dataclass(frozen=True)
class EmaConfig:
    """Says which average of the weights is kept beside them; flags and formula are timm's."""

    group: ClassVar[str] = "optimization"

    model_ema: bool = flag(
        False,
        "keep a moving average of the weights (EMA), in fp32 and sharded as they are: 4 bytes a "
        "parameter more; evaluated and saved beside them, and --ckpt_best goes by it",
        conflicts=("preserve_fp32_weights",),
    )
    model_ema_decay: float = flag(
        0.9998, "what of the average stays in a step", kind=rate, needs=("model_ema",)
    )
    model_ema_warmup: bool = flag(
        False,
        "let less of the average stay at first: 1 - n^(-2/3) in update n, up to --model_ema_decay",
        needs=("model_ema",),
    )
