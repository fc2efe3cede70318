"""The flags of distillation from a trained teacher."""

from dataclasses import dataclass
from typing import ClassVar, Literal

from config_fields import flag, fraction, path_or_url, positive_number
from training.objectives.config import CLASSIFIES


@dataclass(frozen=True)
class DistillationConfig:
    """The trained teacher whose predictions are an additional target."""

    group: ClassVar[str] = "optimization"
    after: ClassVar[str] = "bce_target_thresh"

    teacher: str | None = flag(
        None,
        "distillation: --model name of a trained teacher, whose predictions are an additional "
        "target (with --objective dino, they replace those of the EMA teacher); must have the "
        "student's image size and number of classes (dino: number of patches)",
        metavar="NAME",
        requires=("teacher_weights", "objective=classify|objective=dino"),
    )
    teacher_weights: str | None = flag(
        None,
        "weights of --teacher: a checkpoint (of --objective dino: its EMA teacher is used), a "
        "run's --ckpt_dir, or a torch.save or .safetensors file with timm's parameter names; "
        "loaded at each start",
        kind=path_or_url,
        metavar="PATH",
        requires=("teacher",),
    )
    distillation_type: Literal["hard", "soft"] = flag(
        "hard",
        "distillation target; hard: the teacher's most probable class, as a second label; soft: "
        "the teacher's probabilities",
        requires=("teacher", *CLASSIFIES),
        requires_at_default=True,
    )
    distillation_alpha: float = flag(
        0.5,
        "weight of the distillation loss; the loss of the labels has weight 1 - X",
        kind=fraction,
        requires=("teacher", *CLASSIFIES),
        requires_at_default=True,
    )
    distillation_tau: float = flag(
        1.0,
        "temperature of soft distillation, which divides the logits of teacher and student",
        kind=positive_number,
        requires=("distillation_type=soft",),
    )
