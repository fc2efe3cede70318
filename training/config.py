"""The flags that every backend has, as typed, frozen values; one dataclass a group of ``--help``.

A field is a flag (``config_fields.flag``). None means that the program decides:
``training/resolve.py`` then replaces it, so a resolved configuration has no None that a run uses.
"""

import functools
from dataclasses import dataclass, field
from typing import ClassVar, Literal

from config_fields import (
    bounded,
    count,
    flag,
    fraction,
    global_by_local,
    local_name,
    non_negative,
    number,
    path_or_url,
    positive,
    positive_number,
    positive_or_slices,
    rate,
    seconds,
    seed,
    step_range,
)
from data.config import DataConfig
from models.config import ModelConfig

_CLASSIFIES = ("objective=classify",)
# Of a part of an objective or of --plan, whose default is no "off".
_mae_flag = functools.partial(flag, requires=("objective=mae",), requires_at_default=True)
_dino_flag = functools.partial(flag, requires=("objective=dino",), requires_at_default=True)
_plan_flag = functools.partial(flag, requires=("plan",), requires_at_default=True)


@dataclass(frozen=True)
class ObjectiveConfig:
    """What a model is trained for, and what that adds to it."""

    group: ClassVar[str] = "objective"

    objective: Literal["classify", "mae", "dino"] = flag(
        "classify",
        "what to train for: labels, or without them masked autoencoding (mae) or self-distillation "
        "(dino), see docs/pretraining.md",
        common=True,
    )
    mask_ratio: float = _mae_flag(
        0.75,
        "share of an image's patches that are masked: hidden from the encoder, and reconstructed",
        kind=rate,
    )
    norm_pix_loss: bool = _mae_flag(
        True,
        "reconstruct pixels that are normalized by the mean and deviation of their patch, instead "
        "of the image's own",
    )
    decoder_depth: int = _mae_flag(8, "number of blocks of the decoder", kind=bounded(int, 1, 1000))
    decoder_embed_dim: int = _mae_flag(512, "width of the decoder", kind=bounded(int, 1, 2**20))
    decoder_num_heads: int = _mae_flag(
        16, "number of attention heads of the decoder", kind=positive
    )
    local_crops: int = _dino_flag(
        8,
        "number of local crops of an image, beside two global ones of --image_size",
        kind=bounded(int, 0, 64),
    )
    local_crop_size: int = _dino_flag(
        96,
        "side of a local crop in pixels, a multiple of --patch_size",
        kind=bounded(int, 1, 16384),
    )
    crop_sizes: list[str] | None = flag(
        None,
        "sides of global and local crops in pixels, of which each step has one pair, drawn at "
        "random; one that is given twice is drawn twice as often; the pair of --image_size and "
        "--local_crop_size must be among them (default: that one alone)",
        kind=global_by_local,
        metavar="GxL",
        requires=("objective=dino",),
        incompatible_with=("compile_only", "expect"),
    )
    global_crops_scale: tuple[float, float] = _dino_flag(
        (0.32, 1.0),
        "smallest and largest share of an image's area in a global crop",
        kind=fraction,
        metavar=("MIN", "MAX"),
    )
    local_crops_scale: tuple[float, float] = _dino_flag(
        (0.05, 0.32),
        "smallest and largest share of an image's area in a local crop",
        kind=fraction,
        metavar=("MIN", "MAX"),
    )
    ibot_mask_ratio: tuple[float, float] = _dino_flag(
        (0.1, 0.5),
        "smallest and largest share of the patches that are masked in one of an image's global "
        "crops, drawn for each image",
        kind=fraction,
        metavar=("MIN", "MAX"),
    )
    dino_prototypes: int = _dino_flag(
        65536,
        "number of prototypes that class tokens are compared with",
        kind=bounded(int, 2, 2**24),
    )
    ibot_prototypes: int = _dino_flag(
        65536,
        "number of prototypes that masked patches are compared with",
        kind=bounded(int, 2, 2**24),
    )
    dino_head_hidden: int = _dino_flag(2048, "width inside both heads", kind=bounded(int, 1, 2**20))
    dino_head_bottleneck: int = _dino_flag(
        256, "width of both heads before the prototypes", kind=bounded(int, 1, 2**20)
    )
    student_temp: float = _dino_flag(
        0.1,
        "temperature of the student's probabilities, by which logits are divided",
        kind=positive_number,
    )
    teacher_temp: float = _dino_flag(
        0.07,
        "temperature of the teacher's probabilities after --warmup_teacher_temp_epochs",
        kind=bounded(float, 0.005, 10),
    )
    warmup_teacher_temp: float = _dino_flag(
        0.04,
        "temperature of the teacher's probabilities at the start; it rises linearly",
        kind=bounded(float, 0.005, 10),
    )
    warmup_teacher_temp_epochs: float = _dino_flag(
        30.0,
        "number of epochs from --warmup_teacher_temp to --teacher_temp; 0: the latter from the "
        "start",
        kind=non_negative,
    )
    teacher_momentum: float = _dino_flag(
        0.992,
        "share of itself that the teacher, an average of the student's weights, keeps in a step, "
        "at the start",
        kind=fraction,
    )
    teacher_momentum_end: float = _dino_flag(
        1.0,
        "the same at the last step of --num_epochs, reached along half a cosine; the value of "
        "--teacher_momentum keeps it constant",
        kind=fraction,
    )
    freeze_last_layer_epochs: float = _dino_flag(
        1.0,
        "number of epochs at the start in which the learning rate of the prototypes is 0",
        kind=non_negative,
    )
    ibot_weight: float = _dino_flag(1.0, "weight of the loss of masked patches", kind=non_negative)
    koleo_weight: float = _dino_flag(
        0.1,
        "weight of the KoLeo loss, which spreads the class tokens of different images",
        kind=non_negative,
    )
    koleo_group: int = _dino_flag(
        16,
        "number of consecutive images of a batch among which the KoLeo loss finds nearest "
        "neighbors; must divide the images of a device and pass (default: 16, as DINOv3, or else "
        "the largest smaller number that does)",
        kind=bounded(int, 2, 2**20),
    )
    gram_weights: str | None = flag(
        None,
        "weights of a Gram teacher: a checkpoint of --objective dino (its teacher), a run's "
        "--ckpt_dir, or a file of torch.save or .safetensors with timm's names; the similarities "
        "between the student's patches are then to be those between its patches (default: none)",
        kind=path_or_url,
        metavar="PATH",
        requires=("objective=dino",),
        incompatible_with=("eval_only", "features", "compile_only"),
    )
    gram_weight: float = flag(
        2.0,
        "weight of the loss of --gram_weights",
        kind=non_negative,
        requires=("gram_weights",),
        requires_at_default=True,
    )
    gram_crop_factor: float = flag(
        1.0,
        "height and width of the Gram teacher's crops, which show the same as the global crops, as "
        "a multiple of those; its patch features are resampled to the student's grid; 2: as "
        "DINOv3; 1: it sees the global crops themselves",
        kind=bounded(float, 1, 16),
        requires=("gram_weights",),
    )

    @property
    def uses_labels(self) -> bool:
        """Whether images need labels."""
        return self.objective == "classify"

    @property
    def has_teacher(self) -> bool:
        """Whether a second model is trained as the moving average of the first."""
        return self.objective == "dino"


@dataclass(frozen=True)
class LossConfig:
    """Mixed images, label smoothing, the classifier's loss and distillation, in timm's terms.

    The loss of an evaluation of a classifier is always the cross-entropy.
    """

    group: ClassVar[str] = "optimization"

    smoothing: float = flag(
        0.0,
        "label smoothing: share of each label that is spread over all classes",
        kind=rate,
        requires=_CLASSIFIES,
    )
    mixup: float = flag(
        0.0,
        "mixup's alpha: the weights of two mixed images are drawn from Beta(alpha, alpha) for each "
        "batch; 0: off",
        kind=non_negative,
        requires=_CLASSIFIES,
    )
    cutmix: float = flag(
        0.0,
        "CutMix's alpha: the area of the box pasted from another image is drawn from Beta(alpha, "
        "alpha); 0: off",
        kind=non_negative,
        requires=_CLASSIFIES,
    )
    cutmix_minmax: tuple[float, float] | None = flag(
        None,
        "smallest and largest side of CutMix's box, as shares of the image's side; replaces "
        "--cutmix (default: none)",
        kind=fraction,
        metavar=("MIN", "MAX"),
        requires=_CLASSIFIES,
        replaces=("cutmix",),
    )
    mixup_prob: float = flag(
        1.0,
        "probability that a batch is mixed at all",
        kind=fraction,
        requires=("mixup|cutmix|cutmix_minmax",),
    )
    mixup_switch_prob: float = flag(
        0.5,
        "probability of CutMix rather than mixup, where both are on",
        kind=fraction,
        requires=("mixup", "cutmix|cutmix_minmax"),
    )
    bce_loss: bool = flag(
        False,
        "train with binary cross-entropy, for each class, instead of cross-entropy",
        requires=_CLASSIFIES,
    )
    bce_sum: bool = flag(
        False,
        "sum the binary cross-entropy over the classes (default: mean)",
        requires=("bce_loss",),
    )
    bce_target_thresh: float | None = flag(
        None,
        "threshold of binary targets: smoothed and mixed labels above it become 1, others 0 "
        "(default: none, labels stay as they are)",
        kind=bounded(float, 0, 1, open_high=True),
        requires=("bce_loss",),
    )
    teacher: str | None = flag(
        None,
        "distillation: the --model of a trained teacher, whose predictions the student learns too "
        "(--objective dino: instead of those of its own average); it must have the student's image "
        "size and classes, or patches (default: none)",
        metavar="NAME",
        requires=("teacher_weights", "objective=classify|objective=dino"),
        incompatible_with=("plan", "compile_only"),
    )
    teacher_weights: str | None = flag(
        None,
        "weights of --teacher: a checkpoint (of --objective dino its average), a run's --ckpt_dir, "
        "or a file of torch.save or .safetensors with timm's names; loaded at each start "
        "(default: none)",
        kind=path_or_url,
        metavar="PATH",
        requires=("teacher",),
    )
    distillation_type: Literal["hard", "soft"] = flag(
        "hard",
        "target of distillation; hard: the teacher's most probable class, as a second label; soft: "
        "all its probabilities",
        requires=("teacher", *_CLASSIFIES),
        requires_at_default=True,
    )
    distillation_alpha: float = flag(
        0.5,
        "share of the distillation loss in the loss; the labels' loss has the rest",
        kind=fraction,
        requires=("teacher", *_CLASSIFIES),
        requires_at_default=True,
    )
    distillation_tau: float = flag(
        1.0,
        "temperature of soft distillation, by which the logits of both are divided",
        kind=positive_number,
        requires=("distillation_type=soft",),
    )

    @property
    def mixes(self) -> bool:
        """Whether images are mixed with each other."""
        return self.mixup > 0 or self.cuts

    @property
    def cuts(self) -> bool:
        """Whether boxes of images are replaced by those of others."""
        return self.cutmix > 0 or self.cutmix_minmax is not None


@dataclass(frozen=True)
class OptimizerConfig:
    """How weights are updated."""

    group: ClassVar[str] = "optimization"

    optimizer: Literal["adamw", "lion", "muon"] = flag(
        "adamw",
        "optimizer, each as timm defines it; muon: orthogonalized updates of matrices, AdamW for "
        "all other parameters (docs/optimizers.md)",
        incompatible_with=("preserve_fp32_weights",),
    )
    lr: float = flag(1e-3, "peak learning rate", kind=non_negative, common=True)
    weight_decay: float = flag(
        0.1,
        "weight decay: a step multiplies weights by 1 - X * the lr",
        kind=non_negative,
        common=True,
    )
    betas: tuple[float, float] | None = flag(
        None,
        "decay rates of the moving averages of the gradient and of its square; of Lion its two "
        "betas (default: adamw 0.9 0.999; lion 0.9 0.99; muon 0.9 0.95, for AdamW's part)",
        kind=rate,
        metavar=("BETA1", "BETA2"),
    )
    eps: float = flag(
        1e-8,
        "epsilon added to the root of AdamW's second moment; of Muon also the smallest norm",
        kind=positive_number,
    )
    optimizer_dtype: Literal["fp32", "bf16"] = flag(
        "fp32",
        "dtype of AdamW's two stored moments; bf16: 4 bytes a parameter instead of 8, rounded "
        "stochastically, so that small updates are not lost; updates are computed in fp32; "
        "checkpoints can change between the two",
        requires=("optimizer=adamw",),
        incompatible_with=("preserve_fp32_weights",),
    )
    layer_decay: float = flag(
        1.0,
        "layer-wise learning rate decay, as timm's: a layer's learning rate is multiplied by this "
        "once for each layer between it and the head; 1: the same for all layers",
        kind=bounded(float, 0.01, 1),
        incompatible_with=("linear_probe", "flatten_parameters"),
    )
    no_decay: list[str] | None = flag(
        None,
        "kinds of parameters without weight decay; all three together are timm's rule (default: "
        "none)",
        choices=("norms", "biases", "embeddings"),
        incompatible_with=("flatten_parameters",),
    )
    linear_probe: bool = flag(
        False,
        "train only the classifier's head; all other weights are frozen, without gradients and "
        "optimizer state",
        requires=_CLASSIFIES,
        incompatible_with=("flatten_parameters", "block"),
    )
    clip_grad_norm: float = flag(
        1.0, "largest global gradient norm, over all shards; 0 or less: no clipping", kind=number
    )
    warmup_steps: int = flag(
        10000, "number of steps of linear warmup from --warmup_lr to --lr", kind=count, common=True
    )


@dataclass(frozen=True)
class ScheduleConfig:
    """How the learning rate rises to ``--lr`` and falls again."""

    group: ClassVar[str] = "optimization"

    warmup_epochs: float | None = flag(
        None,
        "length of the warmup in epochs; replaces --warmup_steps (default: none)",
        kind=non_negative,
        metavar="N",
        replaces=("warmup_steps",),
    )
    warmup_lr: float = flag(0.0, "learning rate at the start of the warmup", kind=non_negative)
    lr_schedule: Literal["cosine", "linear", "constant", "wsd"] = flag(
        "cosine",
        "learning rate schedule after the warmup; cosine, linear: from --lr to --min_lr at the "
        "last step of --num_epochs; constant: --lr; wsd: --lr, then to --min_lr in the last "
        "--decay_steps",
    )
    min_lr: float = flag(
        0.0,
        "learning rate at the end of the schedule",
        kind=non_negative,
        requires=("lr_schedule=cosine|lr_schedule=linear|lr_schedule=wsd",),
    )
    weight_decay_end: float | None = flag(
        None,
        "weight decay at the last step of --num_epochs, reached from --weight_decay along half a "
        "cosine (default: constant)",
        kind=non_negative,
        metavar="X",
    )
    decay_steps: int | None = flag(
        None,
        "number of steps of wsd's decay, the last of --num_epochs or --max_steps (default: none)",
        kind=positive,
        requires=("lr_schedule=wsd",),
    )
    decay_shape: Literal["sqrt", "linear", "cosine"] = flag(
        "sqrt",
        "shape of wsd's decay; sqrt: proportional to 1 - sqrt(x), x from 0 to 1",
        requires=("lr_schedule=wsd",),
    )


@dataclass(frozen=True)
class EmaConfig:
    """The exponential moving average (EMA) of the weights; flags and formula are timm's."""

    group: ClassVar[str] = "optimization"

    model_ema: bool = flag(
        False,
        "maintain an exponential moving average (EMA) of the weights, in fp32 and sharded like "
        "them: 4 bytes more a parameter; it is evaluated and saved beside the weights, and "
        "--ckpt_best uses its accuracy or loss",
        requires=("objective=classify|objective=mae",),
        incompatible_with=("preserve_fp32_weights",),
    )
    model_ema_decay: float = flag(
        0.9998,
        "decay of the moving average: share of the average that a step keeps",
        kind=rate,
        requires=("model_ema",),
        requires_at_default=True,
    )
    model_ema_warmup: bool = flag(
        False,
        "start with a smaller decay of the moving average: 1 - n^(-2/3) in update n, up to "
        "--model_ema_decay",
        requires=("model_ema",),
    )


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
        "of torch.save or .safetensors with timm's names; adapted to another image size, patch "
        "size, number of channels or classes; a checkpoint in --ckpt_dir is resumed instead "
        "(default: none)",
        kind=path_or_url,
        metavar="PATH",
        incompatible_with=("predict",),
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
        "--ckpt_dir (default: none)",
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


@dataclass(frozen=True)
class LogConfig:
    """How often a run logs and evaluates, and what ends it as failed."""

    group: ClassVar[str] = "logging and evaluation"

    log_step_interval: int = flag(
        20, "log every N steps, and the first one", kind=positive, common=True
    )
    test_epoch_interval: int = flag(
        10, "evaluate on val/ every N epochs, and after the last one", kind=positive
    )
    test_step_interval: int = flag(0, "also evaluate every N steps; 0: off", kind=count)
    knn_every: int = flag(
        0,
        "also evaluate by k-NN on features every N steps, and at the end: validation images are "
        "named by the nearest training images; with the moving average of the weights, if there is "
        "one; 0: off",
        kind=count,
        incompatible_with=("buckets", "mesh_domain", "mesh_tensor"),
    )
    probe_every: int = flag(
        0,
        "also evaluate by linear probes on features every N steps, and at the end: linear layers, "
        "one a learning rate, are trained on the hosts, and the best one on val/ counts; 0: off",
        kind=count,
        incompatible_with=("buckets", "mesh_domain", "mesh_tensor"),
    )
    eval_batches: int | None = flag(
        None,
        "number of batches of an evaluation; 0: all of val/ (default: 0; with --fake_data as many "
        "as --max_steps)",
        kind=count,
    )
    max_bad_steps: int = flag(
        10,
        "end the run with exit code 3 after N steps in a row whose loss or gradient norm is NaN or "
        "infinite; such steps are skipped; 0: not before the last step, which must be finite",
        kind=count,
    )
    step_timeout_s: float = flag(
        0.0,
        "seconds without a finished step, evaluated batch or checkpoint after which a process "
        "prints the stacks of its threads and ends with exit code 1; at least 600 for the first "
        "batch; compilation does not count; 0: off (default: STEP_TIMEOUT_S of the environment, "
        "or 0)",
        kind=seconds,
        metavar="SECONDS",
        env="STEP_TIMEOUT_S",
    )
    expect: str | None = flag(
        None,
        "file that --compile_only --json printed for the same flags: the first log lines show the "
        "expected beside the measured seconds a step, run.json has both (default: none)",
        kind=path_or_url,
        metavar="FILE",
    )
    wandb: str | None = flag(
        None,
        "Weights & Biases project to log to; requires the package wandb (default: none)",
        metavar="PROJECT",
    )
    profile: tuple[int, int] | None = flag(
        None,
        "steps to profile, counted from 1: writes a trace of PyTorch's profiler to "
        "--ckpt_dir/profile, and on CUDA a memory snapshot (default: none)",
        kind=step_range,
        metavar="FIRST:LAST",
        requires=("backend=cuda",),
    )


@dataclass(frozen=True)
class UseConfig:
    """What is done with a trained model instead of training."""

    group: ClassVar[str] = "use a trained model instead of training"

    predict: list[str] | None = flag(
        None,
        "print the most probable classes of these images, with the weights of --resume (a "
        "checkpoint or a file of torch.save or .safetensors), on one GPU or the CPU; skips "
        "unreadable images, exit code 2 if one was named itself (default: none)",
        kind=path_or_url,
        metavar="IMAGE_OR_FOLDER",
        requires=_CLASSIFIES,
        incompatible_with=("eval_only",),
        common=True,
    )
    eval_only: bool = flag(
        False,
        "print loss and accuracy on val/ with the weights of --resume, computed on the backend; "
        "writes nothing",
        common=True,
    )
    features: str | None = flag(
        None,
        "write features of images in train/ and val/, computed on the backend by the weights of "
        "--resume or --init_from without their head; a new folder of .safetensors files, or of "
        ".parquet files if its name ends in .parquet (default: none)",
        kind=local_name,
        metavar="FOLDER",
        incompatible_with=(
            *("predict", "eval_only", "self_check", "plan", "compile_only"),
            *("buckets", "mesh_domain", "mesh_tensor"),
        ),
    )
    features_of: list[str] | None = flag(
        None,
        "tokens that --features writes; class: the class token; mean: the mean of the patch "
        "tokens; patches: all patch tokens (default: mean, and class if the model has one)",
        choices=("class", "mean", "patches"),
        requires=("features",),
    )
    without_labels: bool = flag(
        False,
        "let --features read images without labels, which need no class folders and no val/ "
        "(docs/data.md)",
        requires=("features",),
    )
    pca: bool = flag(
        False,
        "let --features also draw pca.png: eight images of val/, or without one of train/, beside "
        "the first three principal components of their patch features as red, green and blue",
        requires=("features",),
    )
    knn: bool = flag(
        False,
        "let --eval_only measure features instead of predictions, by k-NN: validation images are "
        "named by the nearest training images; the weights may be those of --init_from",
        requires=("eval_only",),
        incompatible_with=("eval_report", "buckets", "mesh_domain", "mesh_tensor"),
    )
    probe: bool = flag(
        False,
        "let --eval_only measure features instead of predictions, by linear probes: linear layers, "
        "one a learning rate, are trained on the hosts, and the best one on val/ counts; the "
        "weights may be those of --init_from",
        requires=("eval_only",),
        incompatible_with=("eval_report", "buckets", "mesh_domain", "mesh_tensor"),
    )
    use_ema: bool = flag(
        False,
        "use the moving average of the weights (EMA) in the checkpoint instead of the weights",
        requires=("predict|eval_only|features",),
    )
    eval_report: str | None = flag(
        None,
        "folder for a report of --eval_only: per_class.csv, confusion.csv and confusion.png, with "
        "the accuracy of each class and the classes it was mistaken for (default: none)",
        kind=path_or_url,
        metavar="FOLDER",
        requires=("eval_only", *_CLASSIFIES),
    )
    json: bool = flag(
        False,
        "print the result as JSON, and nothing else to stdout",
        requires=("predict|eval_only|compile_only|plan",),
    )


@dataclass(frozen=True)
class ShardingConfig:
    """How a run is sharded over its devices, on every backend."""

    group: ClassVar[str] = "sharding and memory"

    precision: Literal["fp32", "bf16", "fp16"] = flag(
        "fp32",
        "dtype of computation, and on GPUs of unsharded weights; stored weights and optimizer "
        "state stay fp32; fp16: GPUs with --fsdp fsdp2",
        names=("--precision", "--param_dtype"),
        common=True,
    )
    grad_ckpt: Literal["full", "selective", "offload", "none", "auto"] = flag(
        "full",
        "what of a block is recomputed in the backward pass; selective: all but attention and wide "
        "products; offload: all, from inputs in host memory (TPU); auto: on TPU the fastest that "
        "fits, else full",
        shorthands={"--no_grad_ckpt": "none"},
        common=True,
    )
    run_without_fsdp: bool = flag(
        False,
        "replicate the parameters instead of sharding them (plain data parallel); on GPUs the same "
        "as --zero_dp_strategy 0",
    )
    reshard_after_forward: bool = flag(
        True,
        "keep weights unsharded from forward to backward (ZeRO-2) (default: ZeRO-3); on GPUs the "
        "same as --zero_dp_strategy 2; on XLA it requires nested FSDP",
        names=("--no_reshard_after_forward",),
        incompatible_with=("run_without_fsdp",),
    )
    mesh_dcn: int | str = flag(
        1,
        "number of replicas of the parameters; slices: one a TPU slice, where there are several "
        "(XLA); on GPUs HSDP's groups",
        kind=positive_or_slices,
        metavar="N|slices",
        names=("--mesh_dcn", "--dp_outer"),
        incompatible_with=("run_without_fsdp",),
    )
    mesh_fsdp: int | None = flag(
        None,
        "number of devices that shard each replica (FSDP) (default: the rest)",
        kind=positive,
        names=("--mesh_fsdp", "--dp_shard"),
        common=True,
        incompatible_with=("run_without_fsdp",),
    )
    mesh_domain: int = flag(
        1,
        "devices that shard the rows of each image (domain parallel)",
        kind=positive,
        requires=_CLASSIFIES,
    )
    domain_attention: Literal["auto", "ring", "ulysses", "gather"] = flag(
        "auto",
        "attention over devices with --mesh_domain; ring: keys and values move from device to "
        "device, which holds one part at a time; ulysses: each device computes some heads of all "
        "tokens (GPU); gather: each device gathers all keys and values (XLA); auto: on GPUs "
        "ulysses where --mesh_domain divides the heads, else ring; on XLA gather up to 16,384 "
        "tokens, else ring",
        requires=("mesh_domain",),
    )
    mesh_tensor: int = flag(
        1,
        "devices that shard heads and MLP columns of a block (tensor parallel); must divide "
        "both; XLA with SPMD; not all models (--list_models)",
        kind=positive,
        requires=_CLASSIFIES,
        incompatible_with=("run_without_fsdp",),
    )


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


BackendChoice = Literal["auto", "xla", "cuda", "torchtpu"]


@dataclass(frozen=True)
class RunConfig:
    """All flags that every backend has: its own, and those of the groups nested in it."""

    group: ClassVar[str] = "run"

    backend: BackendChoice = flag(
        "auto",
        "backend; xla: PyTorch/XLA on TPUs, or the CPU; cuda: NVIDIA GPUs, or gloo on the CPU; "
        "torchtpu: TorchTPU on TPUs; auto: a TPU's that is installed, xla first, else CUDA, else "
        "XLA on the CPU",
        common=True,
    )
    seed: int = flag(0, "random seed of weights, shuffling and dropout", kind=seed)
    num_epochs: int = flag(300, "number of passes over train/", kind=positive, common=True)
    max_steps: int | None = flag(
        None,
        "stop after N optimizer steps, over all resumed parts (default: no limit)",
        kind=positive,
        common=True,
    )
    self_check: bool = flag(
        False,
        "check flags, devices and checkpoints with a small model, instead of training "
        "(docs/self_check.md); exit code 1 if a check fails",
        common=True,
        incompatible_with=("predict", "eval_only", "compile_only", "buckets"),
    )
    plan: bool = flag(
        False,
        "search the fastest, cheapest and smallest hardware and flags to train --model, instead of "
        "training (docs/planning.md)",
        common=True,
        incompatible_with=(
            "predict",
            "eval_only",
            "self_check",
            "compile_only",
            "buckets",
            "micro_batch_size",
            "linear_probe",
            "crop_sizes",
            "gram_weights",
        ),
    )
    list_models: str | None = flag(
        None,
        "list models by a part of their name, or * and ?, and exit (default: off)",
        metavar="PATTERN",
        bare="*",
        common=True,
    )
    data: DataConfig = field(default_factory=DataConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    objective: ObjectiveConfig = field(default_factory=ObjectiveConfig)
    loss: LossConfig = field(default_factory=LossConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    ema: EmaConfig = field(default_factory=EmaConfig)
    checkpoints: CheckpointConfig = field(default_factory=CheckpointConfig)
    log: LogConfig = field(default_factory=LogConfig)
    use: UseConfig = field(default_factory=UseConfig)
    sharding: ShardingConfig = field(default_factory=ShardingConfig)
    planning: PlanConfig = field(default_factory=PlanConfig)
    given: frozenset[str] = field(default=frozenset(), compare=False)
    """The fields, of this and of all backends' configurations, whose flags are on the command line,
    whatever their values; the environment does not count."""

    @property
    def averages(self) -> bool:
        """Whether there is a moving average (EMA) of the weights."""
        return self.ema.model_ema or self.objective.has_teacher
