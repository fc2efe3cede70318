"""Describes what a run is asked to be: the flags that every backend takes, as typed, frozen values.

A field is a flag (``config_fields.flag``). A value None means that the program decides;
``training/resolve.py`` does, and then nothing is None that a run needs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Literal

from config_fields import (
    bounded,
    count,
    flag,
    fraction,
    non_negative,
    number,
    positive,
    positive_number,
    rate,
    seconds,
    seed,
    step_range,
)
from data.config import DataConfig
from models.config import ModelConfig
from training.errors import UsageError

# ------------------------------------------------------------------------------------------------
# What a run is asked of its learning rate beside ``--lr`` and ``--warmup_steps``.


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


# ------------------------------------------------------------------------------------------------
# What a run is asked of the moving average of its weights.


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


# ------------------------------------------------------------------------------------------------
# Says how images and labels of a batch are mixed, and which loss is made less.


_MIXES = "mixup|cutmix|cutmix_minmax"


@dataclass(frozen=True)
class LossConfig:
    """Says what a training step is shown of a batch and what it makes less, in timm's terms.

    The loss of an evaluation is the cross-entropy, whatever is set here.
    """

    group: ClassVar[str] = "optimization"

    smoothing: float = flag(
        0.0, "label smoothing: this share of each label is spread over all classes", kind=rate
    )
    mixup: float = flag(
        0.0,
        "alpha of mixup: shares of two images are drawn from Beta(alpha, alpha), anew for each "
        "batch; 0: off",
        kind=non_negative,
    )
    cutmix: float = flag(
        0.0,
        "alpha of cutmix: the area of the box that is taken from another image, drawn so; 0: off",
        kind=non_negative,
    )
    cutmix_minmax: tuple[float, float] | None = flag(
        None,
        "smallest and largest side of that box, as shares of the image's; in the place of --cutmix "
        "(default: none)",
        kind=fraction,
        metavar=("MIN", "MAX"),
        instead_of=("cutmix",),
    )
    mixup_prob: float = flag(
        1.0, "probability that a batch is mixed at all", kind=fraction, needs=(_MIXES,)
    )
    mixup_switch_prob: float = flag(
        0.5,
        "probability of cutmix where both are on",
        kind=fraction,
        needs=("mixup", "cutmix|cutmix_minmax"),
    )
    bce_loss: bool = flag(
        False, "binary cross-entropy, each class for itself, in the place of cross-entropy"
    )
    bce_sum: bool = flag(
        False, "sum it over the classes (default: their mean)", needs=("bce_loss",)
    )
    bce_target_thresh: float | None = flag(
        None,
        "labels above it, smoothed and mixed, are 1, others 0 (default: they stay)",
        kind=bounded(float, 0, 1, open_high=True),
        metavar="X",
        needs=("bce_loss",),
    )
    teacher: str | None = flag(
        None,
        "distillation: a trained --model, made for the student's images and classes, whose answers "
        "to the same images the student is to give, too (default: none)",
        metavar="NAME",
        needs=("teacher_weights",),
        conflicts=("plan", "compile_only"),
    )
    teacher_weights: str | None = flag(
        None,
        "the teacher's: a checkpoint, a run's --ckpt_dir, or a file of torch.save or .safetensors "
        "with timm's names; read again at each start (default: none)",
        metavar="PATH",
        needs=("teacher",),
    )
    distillation_type: Literal["hard", "soft"] = flag(
        "hard",
        "hard: the teacher's likeliest class is a second label; soft: all its probabilities",
        needs=("teacher",),
    )
    distillation_alpha: float = flag(
        0.5,
        "share of the teacher's part in the loss; the labels' has the rest",
        kind=fraction,
        needs=("teacher",),
    )
    distillation_tau: float = flag(
        1.0,
        "temperature: logits of both are divided by it",
        kind=positive_number,
        needs=("distillation_type=soft",),
    )

    @property
    def mixes(self) -> bool:
        """Whether images are mixed with each other."""
        return self.mixup > 0 or self.cuts

    @property
    def cuts(self) -> bool:
        """Whether boxes of images are cut out for others."""
        return self.cutmix > 0 or self.cutmix_minmax is not None


def check_mixing(config: LossConfig, images: int, shape: Sequence[int]) -> None:
    """Raise UsageError if ``images`` images of one pass and device cannot be mixed.

    ``shape``: (channels, *spatial) of one.
    """
    if not config.mixes:
        return
    named = "--mixup" if config.mixup else "--cutmix" if config.cutmix else "--cutmix_minmax"
    if images % 2:
        raise UsageError(
            f"{named} mixes the images of a device two by two, and there are {images} in a pass: "
            "choose --batch_size and --grad_accum_steps so that the number is even"
        )
    if config.cuts and len(shape) != 3:
        raise UsageError("cutmix is for images: of volumes use --mixup")
    if config.cutmix_minmax is not None:
        low, high = config.cutmix_minmax
        if any(int(side * low) >= int(side * high) for side in shape[1:]):
            raise UsageError(
                f"--cutmix_minmax {low:g} {high:g} leaves no side of a box to be drawn in images "
                f"of {shape[1]} x {shape[2]}: the second must be larger"
            )


# ------------------------------------------------------------------------------------------------
# What ``--plan`` is asked beside the flags of the training that it plans.


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
        "TOML or JSON file with the price of a chip for an hour, as tools/plan/prices.toml, "
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


# ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class OptimizerConfig:
    """Says how weights are updated."""

    group: ClassVar[str] = "optimization"

    optimizer: Literal["adamw", "lion", "muon"] = flag(
        "adamw",
        "rule by which weights are updated, each as timm has it; muon: matrices orthogonalized, "
        "all else by AdamW (docs/optimizers.md)",
        conflicts=("preserve_fp32_weights",),
    )
    lr: float = flag(1e-3, "peak learning rate", kind=non_negative, common=True)
    weight_decay: float = flag(
        0.1, "per step this times the learning rate", kind=non_negative, common=True
    )
    betas: tuple[float, float] | None = flag(
        None,
        "of the moving averages of gradients and of their squares; of lion its two (default: "
        "0.9 0.999; lion 0.9 0.99; muon 0.9 0.95, for AdamW's part)",
        kind=rate,
        metavar=("BETA1", "BETA2"),
    )
    eps: float = flag(
        1e-8,
        "added to the root of AdamW's second moment; with muon also the least norm",
        kind=positive_number,
    )
    optimizer_dtype: Literal["fp32", "bf16"] = flag(
        "fp32",
        "numbers that AdamW's two moments are kept in; bf16: 4 bytes a parameter in place of 8, "
        "rounded up or down at random, so that small changes count; computed in fp32; checkpoints "
        "move between the two",
        needs=("optimizer=adamw",),
        conflicts=("preserve_fp32_weights",),
    )
    layer_decay: float = flag(
        1.0,
        "multiply the learning rate of each layer by this once for each layer between it and the "
        "head, timm's layer-wise decay; 1: all alike",
        kind=bounded(float, 0.01, 1),
        conflicts=("linear_probe", "flatten_parameters"),
    )
    no_decay: list[str] | None = flag(
        None,
        "kinds of parameters without weight decay; all three are timm's rule (default: none)",
        choices=("norms", "biases", "embeddings"),
        conflicts=("flatten_parameters",),
    )
    linear_probe: bool = flag(
        False,
        "train the classifier's head alone: all else keeps its values, without gradients and "
        "optimizer state",
        conflicts=("flatten_parameters", "block", "plan"),
    )
    clip_grad_norm: float = flag(
        1.0, "largest global gradient norm, over all shards; 0 or less: no clipping", kind=number
    )
    warmup_steps: int = flag(
        10000,
        "steps of linear warmup from --warmup_lr to --lr",
        kind=count,
        common=True,
    )


@dataclass(frozen=True)
class CheckpointConfig:
    """Says which checkpoints are written, kept and resumed."""

    group: ClassVar[str] = "checkpoints"

    ckpt_dir: str = flag(
        "runs/vit_fsdp",
        "folder of checkpoints and logs; hosts share it",
        common=True,
    )
    shared_ckpt_dir: bool = flag(
        False,
        "take a --ckpt_dir that is another user's, or has files of others in it, as where a group "
        "shares it: they can change what is trained; without this it is refused",
    )
    resume: str = flag(
        "auto",
        "auto: newest complete checkpoint of --ckpt_dir, if any; none: start anew; best or "
        "lowest_loss: the evaluated one with the highest top-1 or lowest val loss; PATH: a "
        "checkpoint, or another run's --ckpt_dir; the model is the checkpoint's",
        metavar="auto|none|best|lowest_loss|PATH",
        common=True,
    )
    resume_epoch: int = flag(
        0,
        "resume from the checkpoint written after this epoch; 0: as --resume says",
        kind=count,
        instead_of=("resume",),
    )
    restart_epoch: bool = flag(
        False,
        "if a checkpoint was written in mid-epoch and the order of the images is another now "
        "(--seed, --aug_repeats, --buckets, the number of training images, ...), begin that epoch "
        "anew; from then on it resumes as ever (default: such a checkpoint is refused)",
    )
    init_from: str | None = flag(
        None,
        "begin new training with these weights: a checkpoint, a run's --ckpt_dir, or a file of "
        "torch.save or .safetensors with timm's names; fitted to another image size, patch size, "
        "number of channels or classes; a checkpoint of --ckpt_dir goes before (default: none)",
        metavar="PATH",
        conflicts=("predict", "eval_only"),
    )
    ckpt_epoch_interval: int = flag(10, "epochs", kind=positive, common=True)
    ckpt_step_interval: int = flag(0, "steps; 0: only after epochs", kind=count, common=True)
    ckpt_minutes_interval: float = flag(
        0.0,
        "minutes since the last checkpoint, by the first process's clock; 0: none by the clock",
        kind=bounded(float, 0, 1e6),
        metavar="M",
    )
    keep_checkpoints: int = flag(0, "newest ones to keep; 0: all", kind=count, common=True)
    max_failed_saves: int = flag(
        2,
        "checkpoints in a row that may fail to be written before the run ends, with code 4",
        kind=positive,
    )
    verify_checkpoint: bool = flag(
        True,
        "resume without comparing the files' checksums with the manifest (default: compared)",
        names=("--no_verify_checkpoint",),
    )
    async_checkpoint: bool = flag(
        True,
        "write checkpoints at once, while training waits (default: beside training, from a copy "
        "in host memory)",
        names=("--no_async_checkpoint",),
    )
    ckpt_best: bool = flag(
        False,
        "also write one after each evaluation with the highest top-1 so far, and keep it",
    )


@dataclass(frozen=True)
class LogConfig:
    """Says how often a run reports and evaluates, and what it takes as a failure."""

    group: ClassVar[str] = "logging and evaluation"

    log_step_interval: int = flag(
        20, "steps; the first is always logged", kind=positive, common=True
    )
    test_epoch_interval: int = flag(
        10,
        "epochs between evaluations on val/; the last is always evaluated",
        kind=positive,
    )
    test_step_interval: int = flag(0, "steps; 0: only after epochs", kind=count)
    eval_batches: int | None = flag(
        None,
        "batches of an evaluation; 0: all of val/ (default: 0; with --fake_data as many as "
        "--max_steps)",
        kind=count,
        metavar="N",
    )
    max_bad_steps: int = flag(
        10,
        "steps in a row whose loss or gradient norm is not finite, and which are skipped, before "
        "the run ends, with code 3; 0: never",
        kind=count,
    )
    step_timeout_s: float = flag(
        0.0,
        "seconds without the end of a step, a batch evaluated or a checkpoint after which the "
        "process prints its threads' stacks and ends with code 1; for the first batch at least "
        "600, to compile as long as it takes; 0: never (default: STEP_TIMEOUT_S of the "
        "environment, or 0)",
        kind=seconds,
        env="STEP_TIMEOUT_S",
    )
    expect: str | None = flag(
        None,
        "file with what --compile_only --json printed for the same flags: the first log lines put "
        "the expected seconds a step beside the measured ones, run.json keeps both (default: none)",
        metavar="FILE",
    )
    wandb: str | None = flag(
        None,
        "log to this Weights & Biases project too; requires the package wandb (default: none)",
        metavar="PROJECT",
    )
    profile: tuple[int, int] | None = flag(
        None,
        "on GPUs: write a torch profiler trace of these steps to --ckpt_dir/profile, and on CUDA "
        "a memory snapshot (default: none)",
        kind=step_range,
        metavar="FIRST:LAST",
        needs=("backend=cuda",),
    )


@dataclass(frozen=True)
class UseConfig:
    """Says what is done with a trained model in the place of training."""

    group: ClassVar[str] = "use a trained model instead of training"

    predict: list[str] | None = flag(
        None,
        "print the likeliest classes of these images, in plain PyTorch on one GPU or the CPU; "
        "--resume names the weights: a checkpoint, a file of torch.save, or .safetensors; "
        "unreadable images are left out, the exit code is 2 if one was named itself (default: "
        "none)",
        metavar="IMAGE_OR_FOLDER",
        conflicts=("eval_only",),
        common=True,
    )
    eval_only: bool = flag(
        False,
        "print loss and accuracy on val/ with the weights of --resume, computed on the backend; "
        "write nothing",
        common=True,
    )
    use_ema: bool = flag(
        False,
        "take the moving average of the weights (EMA) that the checkpoint holds, not the weights",
        needs=("predict|eval_only",),
    )
    eval_report: str | None = flag(
        None,
        "write what --eval_only found out to this folder: per_class.csv and confusion.csv, how "
        "many of each class's images are right and what the others were taken for, and "
        "confusion.png (default: none)",
        metavar="FOLDER",
        needs=("eval_only",),
    )
    json: bool = flag(
        False,
        "print the result as JSON, and nothing else on stdout",
        needs=("predict|eval_only|compile_only|plan",),
    )


@dataclass(frozen=True)
class ShardingConfig:
    """Says how a run lies on its devices, on every backend."""

    group: ClassVar[str] = "sharding and memory"

    precision: Literal["fp32", "bf16", "fp16"] = flag(
        "fp32",
        "of computation, and on GPUs of gathered weights; stored weights and optimizer state stay "
        "fp32; fp16: GPUs with --fsdp fsdp2, with loss scaling",
        names=("--precision", "--param_dtype"),
        common=True,
    )
    grad_ckpt: Literal["full", "selective", "offload", "none", "auto"] = flag(
        "full",
        "what of a block is recomputed in the backward pass; selective: not attention and wide "
        "products; offload: all, inputs wait in host memory (TPU); auto: on TPU the fastest "
        "that fits, else full",
        shorthands={"--no_grad_ckpt": "none"},
        common=True,
    )
    run_without_fsdp: bool = flag(
        False,
        "plain data parallel, for comparison; on GPUs the same as --zero_dp_strategy 0",
    )
    reshard_after_forward: bool = flag(
        True,
        "keep gathered weights from forward to backward (ZeRO-2) (default: ZeRO-3); on XLA with "
        "nested FSDP",
        names=("--no_reshard_after_forward",),
        conflicts=("run_without_fsdp",),
    )
    mesh_dcn: int = flag(
        1,
        "copies of the parameters: a TPU slice each where there are several, HSDP's groups of "
        "GPUs; gradients are summed over them",
        kind=positive,
        names=("--mesh_dcn", "--dp_outer"),
        metavar="N",
        common=True,
        conflicts=("run_without_fsdp",),
    )
    mesh_fsdp: int | None = flag(
        None,
        "devices that a copy is sharded over (default: all / the other --mesh_*)",
        kind=positive,
        names=("--mesh_fsdp", "--dp_shard"),
        metavar="N",
        common=True,
        conflicts=("run_without_fsdp",),
    )
    mesh_domain: int = flag(
        1,
        "devices that each image's rows are sharded over (domain)",
        kind=positive,
        metavar="N",
        common=True,
    )
    domain_attention: Literal["auto", "ring", "ulysses", "gather"] = flag(
        "auto",
        "with --mesh_domain, how each token sees those of other devices; ring: keys and values go "
        "from device to device, one part at a time is held; ulysses: each device takes some heads "
        "of all tokens (GPU); gather: each device takes all keys and values (XLA); auto: on GPUs "
        "ulysses where --mesh_domain divides the heads, on XLA gather up to 16,384 tokens, else "
        "ring",
        needs=("mesh_domain",),
    )
    mesh_tensor: int = flag(
        1,
        "devices that attention heads and MLP columns of each block are sharded over, for the "
        "same images (tensor parallel); on XLA with SPMD; must divide the heads and the MLP's "
        "width; not for parallel blocks and differential attention (--list_models)",
        kind=positive,
        metavar="N",
        common=True,
        conflicts=("run_without_fsdp",),
    )


@dataclass(frozen=True)
class RunConfig:
    """Holds all flags that every backend takes, those of the groups nested in it."""

    group: ClassVar[str] = "run"

    backend: Literal["auto", "xla", "cuda"] = flag(
        "auto",
        "cuda: NVIDIA GPUs, or gloo on the CPU where there are none; auto: TPU if there is one, "
        "else CUDA, else XLA on the CPU",
        common=True,
    )
    seed: int = flag(0, "of weights, shuffling, dropout", kind=seed, common=True)
    num_epochs: int = flag(300, "passes over train/", kind=positive, common=True)
    max_steps: int | None = flag(
        None,
        "end after so many optimizer steps, counted over all resumed parts (default: no limit)",
        kind=positive,
        common=True,
    )
    self_check: bool = flag(
        False,
        "train nothing: prove these flags on these devices with a small model, its updates against "
        "plain PyTorch, disk and speed of the data; prints a table (docs/self_check.md), the exit "
        "code is 1 if a line fails",
        common=True,
        conflicts=("predict", "eval_only", "compile_only", "buckets"),
    )
    plan: bool = flag(
        False,
        "train nothing: find the fastest, cheapest and smallest hardware and flags to train "
        "--model with --batch_size (docs/planning.md)",
        common=True,
        conflicts=("predict", "eval_only", "self_check", "compile_only", "buckets"),
    )
    list_models: str | None = flag(
        None,
        "list models like it, timm's VisionTransformer and Eva too (default: none)",
        metavar="PATTERN",
        bare="*",
        common=True,
    )
    data: DataConfig = field(default_factory=DataConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
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
    whatever their values; not what the environment gives."""
