"""The flags that every backend has, as typed, frozen values; one dataclass a group of ``--help``.

A field is a flag (``config_fields.flag``). None means that the program decides:
``training/resolve.py`` then replaces it, so a resolved configuration has no None that a run uses.
"""

from dataclasses import dataclass, field
from typing import ClassVar, Literal

from config_fields import (
    bounded,
    count,
    flag,
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
from training.checkpoints.config import CheckpointConfig
from training.objectives.config import CLASSIFIES, LossConfig, ObjectiveConfig


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
        "kinds of parameters without weight decay; all three together are timm's rule",
        choices=("norms", "biases", "embeddings"),
        incompatible_with=("flatten_parameters",),
    )
    linear_probe: bool = flag(
        False,
        "train only the classifier's head; all other weights are frozen, without gradients and "
        "optimizer state",
        requires=CLASSIFIES,
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
        "length of the warmup in epochs; replaces --warmup_steps",
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
    freeze_backbone_epochs: float = flag(
        0.0,
        "number of epochs at the start in which only the heads are trained (of --objective dino "
        "and mae: all that the objective adds to the model), so that new heads do not spoil a "
        "trained backbone; 0: off",
        kind=non_negative,
        incompatible_with=("linear_probe", "flatten_parameters"),
    )
    backbone_warmup_epochs: float | None = flag(
        None,
        "number of epochs after these in which the backbone's learning rate rises linearly from 0 "
        "to that of the heads (default: as many as --freeze_backbone_epochs)",
        kind=non_negative,
        requires=("freeze_backbone_epochs",),
    )
    decay_steps: int | None = flag(
        None,
        "number of steps of wsd's decay, the last of --num_epochs or --max_steps",
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
    rank_every: int = flag(
        0,
        "also measure the effective rank of features of training images every N steps, and at the "
        "end: it needs no labels, and is low after a collapse; with the moving average of the "
        "weights, if there is one; 0: off",
        kind=count,
        incompatible_with=("buckets", "mesh_domain", "mesh_tensor"),
    )
    segment_probe_every: int = flag(
        0,
        "also evaluate by segmentation from patch features every N steps, and at the end: a linear "
        "layer and k-NN name the class of each patch of images with masks, those of --segment_dir; "
        "0: off",
        kind=count,
        requires=("segment_dir|data_source=mosaics",),
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
    save_bad_step: bool = flag(
        False,
        "write what the first step whose loss or gradient norm is NaN or infinite was computed "
        "from, its weights and its place in the data, to --ckpt_dir/bad_step_N, once in a run; "
        "tools.replay_step finds the module; log steps then wait for the device",
    )
    step_timeout_s: float = flag(
        0.0,
        "seconds without a finished step, evaluated batch or checkpoint after which a process "
        "prints the stacks of its threads and ends with exit code 1; at least 600 for the first "
        "batch; compilation does not count; 0: off (default: STEP_TIMEOUT_S of the environment, or "
        "0)",
        kind=seconds,
        metavar="SECONDS",
        env="STEP_TIMEOUT_S",
    )
    expect: str | None = flag(
        None,
        "file that --compile_only --json printed for the same flags: the first log lines show the "
        "expected beside the measured seconds a step, run.json has both",
        kind=path_or_url,
        metavar="FILE",
    )
    wandb: str | None = flag(
        None,
        "Weights & Biases project to log to; requires the package wandb",
        metavar="PROJECT",
    )
    profile: tuple[int, int] | None = flag(
        None,
        "steps to profile, counted from 1: writes a trace of PyTorch's profiler to "
        "--ckpt_dir/profile, and on CUDA a memory snapshot",
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
        "checkpoint, a file of torch.save or .safetensors, or hf-hub:OWNER/NAME), on one GPU or "
        "the CPU; skips unreadable images, exit code 2 if one was named itself",
        kind=path_or_url,
        metavar="IMAGE_OR_FOLDER",
        requires=CLASSIFIES,
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
        ".parquet files if its name ends in .parquet",
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
    rank: bool = flag(
        False,
        "let --eval_only measure features instead of predictions, by their effective rank, which "
        "needs no labels and no val/; the weights may be those of --init_from",
        requires=("eval_only",),
        incompatible_with=("eval_report", "buckets", "mesh_domain", "mesh_tensor"),
    )
    segment_probe: bool = flag(
        False,
        "let --eval_only measure segmentation from patch features: a linear layer and k-NN name "
        "the class of each patch of images with masks, those of --segment_dir; the weights may be "
        "those of --init_from",
        requires=("eval_only", "segment_dir|data_source=mosaics"),
        incompatible_with=("buckets", "mesh_domain", "mesh_tensor"),
    )
    use_ema: bool = flag(
        False,
        "use the moving average of the weights (EMA) in the checkpoint instead of the weights",
        requires=("predict|eval_only|features",),
    )
    eval_report: str | None = flag(
        None,
        "folder for a report of --eval_only: per_class.csv, confusion.csv and confusion.png, with "
        "the accuracy of each class and the classes it was mistaken for; of --segment_probe "
        "segment.csv and segment.png",
        kind=path_or_url,
        metavar="FOLDER",
        requires=("eval_only", "segment_probe|objective=classify"),
    )
    json: bool = flag(
        False,
        "print the result as JSON, and nothing else to stdout",
        requires=("predict|eval_only|compile_only|plan",),
    )

    @property
    def judges_features(self) -> bool:
        """Whether frozen features are measured instead of predictions."""
        return self.knn or self.probe or self.rank or self.segment_probe


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
        requires=CLASSIFIES,
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
        "devices that shard heads and MLP columns of a block (tensor parallel); must divide both; "
        "XLA with SPMD; not all models (--list_models)",
        kind=positive,
        requires=CLASSIFIES,
        incompatible_with=("run_without_fsdp",),
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
    given: frozenset[str] = field(default=frozenset(), compare=False)
    """The fields, of this and of all backends' configurations, whose flags are on the command line,
    whatever their values; the environment does not count."""

    @property
    def averages(self) -> bool:
        """Whether there is a moving average (EMA) of the weights."""
        return self.ema.model_ema or self.objective.has_teacher
