"""The flags of checkpoints: which are saved, removed and resumed."""

from dataclasses import dataclass
from typing import ClassVar, Literal

from config_fields import bounded, count, flag, path_or_url, positive


@dataclass(frozen=True)
class CheckpointConfig:
    """Which checkpoints are saved, removed and resumed."""

    group: ClassVar[str] = "checkpoints"

    ckpt_dir: str = flag(
        "runs/vit_fsdp",
        "folder for checkpoints and logs, shared by all hosts (or see --ckpt_dir_per_host)",
        kind=path_or_url,
        metavar="FOLDER",
        common=True,
    )
    ckpt_dir_per_host: bool = flag(
        False,
        "--ckpt_dir is a folder of its own on each host's disk: each host saves the parts of its "
        "own processes there, and reads other parts from other hosts; logs are on the first host",
        incompatible_with=("predict", "eval_only", "features", "self_check"),
    )
    allow_other_owners: bool = flag(
        False,
        "allow a --ckpt_dir that is owned by another user or contains files of other users, such "
        "as a group's shared folder; these users can then change what is trained (default: refuse)",
        names=("--allow_other_owners", "--shared_ckpt_dir"),
    )
    resume: str = flag(
        "auto",
        "checkpoint to resume; auto: the newest complete one in --ckpt_dir, if any; none: start a "
        "new run; best, lowest_loss, balanced_accuracy, worst_recall: the best evaluated one, as "
        "with --ckpt_best; PATH: a checkpoint, or another run's --ckpt_dir; model flags are "
        "taken from the checkpoint",
        kind=path_or_url,
        metavar="auto|none|best|lowest_loss|PATH",
        common=True,
    )
    resume_epoch: int = flag(
        0,
        "resume from the checkpoint saved after epoch N; 0: follow --resume",
        kind=count,
        replaces=("resume",),
    )
    restart_epoch: bool = flag(
        False,
        "when resuming from the middle of an epoch whose image order has changed since (by "
        "--seed, --aug_repeats, --buckets, the number of training images, ...), restart that "
        "epoch; no effect otherwise (default: refuse to resume)",
    )
    init_from: str | None = flag(
        None,
        "initialize a new run with these weights: a checkpoint, a run's --ckpt_dir, a torch.save "
        "or .safetensors file with timm's parameter names, or hf-hub:OWNER/NAME[@REVISION] on the "
        "Hugging Face Hub; adapted to a different image size, patch size, number of channels or "
        "number of classes; ignored if --ckpt_dir has a checkpoint to resume",
        kind=path_or_url,
        metavar="PATH",
        incompatible_with=("predict",),
    )
    pretrained: bool = flag(
        False,
        "use timm's pretrained weights of --model from the Hugging Face Hub: as --init_from when "
        "training, else as --resume",
        requires=("model",),
        incompatible_with=("init_from", "resume_epoch", "use_ema"),
    )
    ckpt_epoch_interval: int = flag(
        10, "save a checkpoint every N epochs and at the end", kind=positive, common=True
    )
    ckpt_step_interval: int = flag(
        0, "also save a checkpoint every N steps; 0: off", kind=count, common=True
    )
    ckpt_minutes_interval: float = flag(
        0.0,
        "also save a checkpoint M minutes after the last one, by the clock of the first process; "
        "0: off",
        kind=bounded(float, 0, 1e6),
        metavar="M",
    )
    local_ckpt_dir: str | None = flag(
        None,
        "also save checkpoints to this folder on a RAM disk or local SSD of each host, with a "
        "copy on a peer host; training resumes from there if the hosts have a newer step than "
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
        "end the run with exit code 4 after N consecutive checkpoints that could not be saved",
        kind=positive,
    )
    verify_checkpoint: bool = flag(
        True,
        "skip the comparison of file checksums with the manifest when resuming (default: compare)",
        names=("--no_verify_checkpoint",),
    )
    async_checkpoint: bool = flag(
        True,
        "save checkpoints synchronously: training waits until each one is complete (default: "
        "asynchronously, from a copy in host memory)",
        names=("--no_async_checkpoint",),
    )
    ckpt_best: Literal["best", "lowest_loss", "balanced_accuracy", "worst_recall"] | None = flag(
        None,
        "also save a checkpoint after each evaluation that is the best so far, and keep that "
        "checkpoint; best, or no word: by top-1 (without labels: by loss); lowest_loss: by "
        "validation loss; balanced_accuracy, worst_recall: by the mean or the lowest recall of the "
        "classes (classify only) (default: off)",
        bare="best",
    )
