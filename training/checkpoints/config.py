"""The flags of checkpoints: which are saved, removed and resumed."""

from dataclasses import dataclass
from typing import ClassVar

from config_fields import bounded, count, flag, path_or_url, positive


@dataclass(frozen=True)
class CheckpointConfig:
    """Which checkpoints are saved, removed and resumed."""

    group: ClassVar[str] = "checkpoints"

    ckpt_dir: str = flag(
        "runs/vit_fsdp",
        "folder of checkpoints and logs; hosts share it",
        kind=path_or_url,
        metavar="FOLDER",
        common=True,
    )
    shared_ckpt_dir: bool = flag(
        False,
        "allow a --ckpt_dir that another user owns, or that holds files of other users, as in a "
        "group's shared folder: they can change what is trained (default: refused)",
    )
    resume: str = flag(
        "auto",
        "checkpoint to resume; auto: the newest complete one of --ckpt_dir, if any; none: start "
        "new; best, lowest_loss: the evaluated one with the highest top-1 (mae: the lowest loss) "
        "or lowest loss; PATH: a checkpoint, or another run's --ckpt_dir; the model is the "
        "checkpoint's",
        kind=path_or_url,
        metavar="auto|none|best|lowest_loss|PATH",
        common=True,
    )
    resume_epoch: int = flag(
        0,
        "resume from the checkpoint saved after epoch N; 0: as --resume says",
        kind=count,
        replaces=("resume",),
    )
    restart_epoch: bool = flag(
        False,
        "restart the epoch of a checkpoint saved within an epoch, if the order of the images has "
        "changed since (--seed, --aug_repeats, --buckets, number of training images, ...); it has "
        "no effect on other checkpoints (default: such a checkpoint is refused)",
    )
    init_from: str | None = flag(
        None,
        "initialize a new training with these weights: a checkpoint, a run's --ckpt_dir, or a file "
        "of torch.save or .safetensors with timm's names, or hf-hub:OWNER/NAME[@REVISION] on the "
        "Hugging Face Hub; adapted to another image size, patch size, number of channels or "
        "classes; a checkpoint in --ckpt_dir is resumed instead",
        kind=path_or_url,
        metavar="PATH",
        incompatible_with=("predict",),
    )
    pretrained: bool = flag(
        False,
        "use the weights that timm has of --model on the Hugging Face Hub: for training as "
        "--init_from names them, else as --resume",
        requires=("model",),
        incompatible_with=("init_from", "resume_epoch", "use_ema"),
    )
    ckpt_epoch_interval: int = flag(
        10, "save a checkpoint every N epochs, and at the end", kind=positive, common=True
    )
    ckpt_step_interval: int = flag(
        0, "also save a checkpoint every N steps; 0: off", kind=count, common=True
    )
    ckpt_minutes_interval: float = flag(
        0.0,
        "also save a checkpoint M minutes after the last one, by the first process's clock; 0: off",
        kind=bounded(float, 0, 1e6),
        metavar="M",
    )
    local_ckpt_dir: str | None = flag(
        None,
        "also save checkpoints to this folder of each host, on a RAM disk or SSD of its own, with "
        "a copy at another host; a start resumes from there if hosts have a newer step than "
        "--ckpt_dir",
        kind=path_or_url,
        metavar="FOLDER",
        incompatible_with=("predict",),
    )
    local_ckpt_step_interval: int = flag(
        50, "save to --local_ckpt_dir every N steps", kind=positive, requires=("local_ckpt_dir",)
    )
    keep_checkpoints: int = flag(
        0, "keep the N newest checkpoints; 0: keep all", kind=count, common=True
    )
    max_failed_saves: int = flag(
        2,
        "end the run with exit code 4 after N checkpoints in a row that could not be saved",
        kind=positive,
    )
    verify_checkpoint: bool = flag(
        True,
        "resume without comparing the files' checksums with the manifest (default: compare)",
        names=("--no_verify_checkpoint",),
    )
    async_checkpoint: bool = flag(
        True,
        "save synchronously: training waits until a checkpoint is complete (default: asynchronous "
        "checkpoints, from a copy in host memory)",
        names=("--no_async_checkpoint",),
    )
    ckpt_best: bool = flag(
        False,
        "also save a checkpoint after each evaluation with the highest top-1 so far (without "
        "labels: the lowest loss), and keep it",
    )
