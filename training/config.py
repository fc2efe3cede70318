"""The flags common to all backends, as typed, frozen values; one dataclass per ``--help`` group.

Each field is a flag (``config_fields.flag``). None means that the program decides:
``training/resolve.py`` replaces it, so a run never sees None for a value that it uses.
"""

import functools
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Literal, Self

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
from training.feature_table import FeatureFlags, Flags, features
from training.objectives.config import CLASSIFIES, LossConfig, ObjectiveConfig


@dataclass(frozen=True)
class OptimizerConfig:
    """How the weights are updated."""

    group: ClassVar[str] = "optimization"

    optimizer: Literal["adamw", "lion", "muon"] = flag(
        "adamw",
        "optimizer, as implemented in timm; muon: orthogonalized updates for matrices, AdamW for "
        "all other parameters (docs/optimizers.md)",
        incompatible_with=("preserve_fp32_weights",),
    )
    lr: float = flag(1e-3, "peak learning rate", kind=non_negative, common=True)
    weight_decay: float = flag(
        0.1,
        "decoupled weight decay: each step multiplies the weights by 1 - lr * X",
        kind=non_negative,
        common=True,
    )
    betas: tuple[float, float] | None = flag(
        None,
        "decay rates of the moving averages of the gradient and of its square; for lion, its two "
        "betas (default: adamw 0.9 0.999; lion 0.9 0.99; muon 0.9 0.95, for the parameters that "
        "use AdamW)",
        kind=rate,
        metavar=("BETA1", "BETA2"),
    )
    eps: float = flag(
        1e-8,
        "epsilon added to the square root of AdamW's second moment; for muon, also the lower "
        "bound of the norm it divides by",
        kind=positive_number,
    )
    optimizer_dtype: Literal["fp32", "bf16"] = flag(
        "fp32",
        "dtype in which AdamW's two moments are stored; bf16: 4 bytes per parameter instead of 8, "
        "with stochastic rounding so that small updates are not lost; updates are computed in "
        "fp32; a checkpoint can be resumed with either",
        requires=("optimizer=adamw",),
        incompatible_with=("preserve_fp32_weights",),
    )
    layer_decay: float = flag(
        1.0,
        "layer-wise learning rate decay, as in timm: a layer's learning rate is multiplied by X "
        "once for each layer between it and the head; 1: off",
        kind=bounded(float, 0.01, 1),
        incompatible_with=("flatten_parameters",),
    )
    no_decay: list[str] | None = flag(
        None,
        "kinds of parameters to exclude from weight decay; timm excludes all three",
        choices=("norms", "biases", "embeddings"),
        incompatible_with=("flatten_parameters",),
    )
    linear_probe: bool = flag(
        False,
        "train only the classifier head; all other weights are frozen and have no gradients or "
        "optimizer state",
        requires=CLASSIFIES,
    )
    clip_grad_norm: float = flag(
        1.0,
        "clip gradients to this global norm, computed over all shards; 0 or less: no clipping",
        kind=number,
    )
    warmup_steps: int = flag(
        10000, "number of linear warmup steps, from --warmup_lr to --lr", kind=count, common=True
    )


@dataclass(frozen=True)
class ScheduleConfig:
    """How the learning rate rises to ``--lr`` and falls again."""

    group: ClassVar[str] = "optimization"

    warmup_epochs: float | None = flag(
        None,
        "length of the warmup in epochs, instead of --warmup_steps",
        kind=non_negative,
        metavar="N",
        replaces=("warmup_steps",),
    )
    warmup_lr: float = flag(0.0, "learning rate at the start of the warmup", kind=non_negative)
    lr_schedule: Literal["cosine", "linear", "constant", "step", "wsd"] = flag(
        "cosine",
        "learning rate schedule after the warmup; cosine, linear: decay from --lr to --min_lr at "
        "the last step of --num_epochs; constant: stay at --lr; step: multiply by --decay_rate "
        "every --decay_epochs; wsd (warmup-stable-decay): stay at --lr, then decay to --min_lr "
        "over the last --decay_steps",
    )
    min_lr: float = flag(
        0.0,
        "learning rate at the end of the schedule",
        kind=non_negative,
        requires=("lr_schedule=cosine|lr_schedule=linear|lr_schedule=wsd",),
    )
    weight_decay_end: float | None = flag(
        None,
        "weight decay at the last step of --num_epochs; follows a cosine from --weight_decay "
        "(default: constant)",
        kind=non_negative,
        metavar="X",
    )
    freeze_backbone_epochs: float = flag(
        0.0,
        "train only the heads for the first X epochs (with --objective dino or mae: everything "
        "that the objective adds to the model), so that the gradients of new heads do not degrade "
        "a pretrained backbone; 0: off",
        kind=non_negative,
        incompatible_with=("flatten_parameters",),
    )
    backbone_warmup_epochs: float | None = flag(
        None,
        "number of epochs, after --freeze_backbone_epochs, over which the backbone's learning "
        "rate rises linearly from 0 to that of the heads (default: same as "
        "--freeze_backbone_epochs)",
        kind=non_negative,
        requires=("freeze_backbone_epochs",),
    )
    decay_epochs: float = flag(
        90.0,
        "number of epochs between the decays of --lr_schedule step, counted from the end of the "
        "warmup",
        kind=positive_number,
        requires=("lr_schedule=step",),
    )
    decay_rate: float = flag(
        0.1,
        "factor of the learning rate at each decay of --lr_schedule step",
        kind=bounded(float, 1e-12, 1),
        requires=("lr_schedule=step",),
    )
    decay_steps: int | None = flag(
        None,
        "length of the decay phase of wsd, in steps; the phase ends at --num_epochs or --max_steps",
        kind=positive,
        requires=("lr_schedule=wsd",),
    )
    decay_shape: Literal["sqrt", "linear", "cosine"] = flag(
        "sqrt",
        "shape of the decay phase of wsd; sqrt: proportional to 1 - sqrt(x), with x from 0 to 1",
        requires=("lr_schedule=wsd",),
    )


@dataclass(frozen=True)
class EmaConfig:
    """The exponential moving average (EMA) of the weights; flags and formula are timm's."""

    group: ClassVar[str] = "optimization"

    model_ema: bool = flag(
        False,
        "maintain an exponential moving average (EMA) of the weights, in fp32 and sharded like "
        "them (4 more bytes per parameter); the EMA is evaluated and saved along with the "
        "weights, and --ckpt_best uses its accuracy or loss",
        incompatible_with=("preserve_fp32_weights",),
    )
    model_ema_decay: float = flag(
        0.9998,
        "decay of the EMA: the fraction of the average that is kept at each step",
        kind=rate,
        requires=("model_ema",),
        requires_at_default=True,
    )
    model_ema_warmup: bool = flag(
        False,
        "increase the decay of the EMA gradually: 1 - n^(-2/3) at update n, up to "
        "--model_ema_decay",
        requires=("model_ema",),
    )


@dataclass(frozen=True)
class LogConfig:
    """How often a run logs and evaluates, and when it ends as failed."""

    group: ClassVar[str] = "logging and evaluation"

    log_step_interval: int = flag(
        20, "log the first step and every N steps", kind=positive, common=True
    )
    test_epoch_interval: int = flag(
        10, "evaluate on val/ every N epochs, and after the last epoch", kind=positive
    )
    test_step_interval: int = flag(0, "also evaluate every N steps; 0: off", kind=count)
    knn_every: int = flag(
        0,
        "also run a k-NN evaluation of the features every N steps and at the end: each validation "
        "image gets the label of its nearest training images; uses the EMA of the weights if "
        "there is one; 0: off",
        kind=count,
    )
    probe_every: int = flag(
        0,
        "also train linear probes on the features every N steps and at the end: one linear layer "
        "per learning rate, trained on the hosts' CPUs; reports the one that is best on val/; 0: "
        "off",
        kind=count,
    )
    rank_every: int = flag(
        0,
        "also measure the effective rank of the features of training images every N steps and at "
        "the end; needs no labels; drops when features collapse; uses the EMA of the weights if "
        "there is one; 0: off",
        kind=count,
    )
    segment_probe_every: int = flag(
        0,
        "also evaluate segmentation from patch features every N steps and at the end: a linear "
        "layer and k-NN predict the class of each patch of the images with masks in "
        "--segment_dir; 0: off",
        kind=count,
        requires=("segment_dir|data_source=mosaics",),
    )
    eval_batches: int | None = flag(
        None,
        "number of batches per evaluation; 0: all of val/ (default: 0; with --fake_data, same as "
        "--max_steps)",
        kind=count,
    )
    max_bad_steps: int = flag(
        10,
        "end the run with exit code 3 after N consecutive steps whose loss or gradient norm is "
        "NaN or infinite; such steps do not update the weights; 0: check only the last step",
        kind=count,
    )
    save_bad_step: bool = flag(
        False,
        "save the weights and the data position of the first step whose loss or gradient norm is "
        "NaN or infinite to --ckpt_dir/bad_step_N, so that tools.replay_step can find the module "
        "that caused it; once per run; makes each log step wait for the device",
    )
    step_timeout_s: float = flag(
        0.0,
        "hang detection: a process that completes no step, evaluation batch or checkpoint for "
        "this many seconds prints the stack traces of its threads and ends with exit code 1; at "
        "least 600 s for the first batch and 10800 s for what compiles; 0: off (default: the "
        "environment variable STEP_TIMEOUT_S, or 0)",
        kind=seconds,
        metavar="SECONDS",
        env="STEP_TIMEOUT_S",
    )
    expect: str | None = flag(
        None,
        "output of --compile_only --json for the same flags: the first log lines compare the "
        "measured seconds per step with the expected ones, and run.json records both",
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
        "steps to profile, counted from 1; writes a trace to --ckpt_dir/profile: with XLA and "
        "TorchTPU for XProf, on GPUs that of PyTorch's profiler and a memory snapshot",
        kind=step_range,
        metavar="FIRST:LAST",
    )


@dataclass(frozen=True)
class UseConfig:
    """What to do with a trained model instead of training."""

    group: ClassVar[str] = "use a trained model instead of training"

    predict: list[str] | None = flag(
        None,
        "print the most probable classes of these images, using the weights of --resume (a "
        "checkpoint, a torch.save or .safetensors file, or hf-hub:OWNER/NAME) on one GPU or the "
        "CPU; skips unreadable images; exit code 2 if one was named itself",
        kind=path_or_url,
        metavar="IMAGE_OR_FOLDER",
        requires=("objective=classify|texts",),
        incompatible_with=("eval_only",),
        common=True,
    )
    eval_only: bool = flag(
        False,
        "print loss and accuracy of the weights of --resume on val/, computed on the backend; "
        "writes no files",
        common=True,
    )
    features: str | None = flag(
        None,
        "compute the features of all images in train/ and val/ with the weights of --resume or "
        "--init_from, without the head, and write them to this new folder as .safetensors files, "
        "or as .parquet files if its name ends in .parquet",
        kind=local_name,
        metavar="FOLDER",
        incompatible_with=("predict", "eval_only", "self_check", "plan", "compile_only"),
    )
    features_of: list[str] | None = flag(
        None,
        "features that --features writes; class: the class token; mean: the mean of the patch "
        "tokens; patches: all patch tokens (default: mean, and class if the model has a class "
        "token)",
        choices=("class", "mean", "patches"),
        requires=("features",),
    )
    without_labels: bool = flag(
        False,
        "let --features read unlabeled images, which need no class folders and no val/ "
        "(docs/data.md)",
        requires=("features",),
    )
    pca: bool = flag(
        False,
        "let --features also draw pca.png: eight images from val/ (or train/ if there is no "
        "val/), and the first three principal components of their patch features as red, green "
        "and blue",
        requires=("features",),
    )
    knn: bool = flag(
        False,
        "let --eval_only evaluate the features instead of the predictions, by k-NN: each "
        "validation image gets the label of its nearest training images; also accepts weights "
        "from --init_from",
        requires=("eval_only",),
        incompatible_with=("eval_report",),
    )
    probe: bool = flag(
        False,
        "let --eval_only evaluate the features instead of the predictions, by linear probes: one "
        "linear layer per learning rate, trained on the hosts' CPUs; reports the one that is best "
        "on val/; also accepts weights from --init_from",
        requires=("eval_only",),
        incompatible_with=("eval_report",),
    )
    rank: bool = flag(
        False,
        "let --eval_only measure the effective rank of the features instead of the accuracy of "
        "predictions; needs no labels and no val/; also accepts weights from --init_from",
        requires=("eval_only",),
        incompatible_with=("eval_report",),
    )
    segment_probe: bool = flag(
        False,
        "let --eval_only evaluate segmentation from patch features: a linear layer and k-NN "
        "predict the class of each patch of the images with masks in --segment_dir; also accepts "
        "weights from --init_from",
        requires=("eval_only", "segment_dir|data_source=mosaics"),
    )
    use_ema: bool = flag(
        False,
        "use the EMA of the weights in the checkpoint instead of the weights",
        requires=("predict|eval_only|features",),
    )
    eval_report: str | None = flag(
        None,
        "write a report of --eval_only to this folder: a page with precision, recall, F1 and "
        "calibration, and the worst mistakes (evaluation.html), the same as tables (per_class.csv, "
        "confusion.csv, errors.csv) and as pictures (confusion.png, reliability.png); with "
        "--multi_label: per_label.csv in place of the first two, no confusion.png; with "
        "--segment_probe: segment.csv and segment.png; of images and texts: retrieval.csv, "
        "similarity.png and nearest_texts.png",
        kind=path_or_url,
        metavar="FOLDER",
        requires=("eval_only", "segment_probe|objective=classify|objective=siglip|objective=clip"),
    )
    json: bool = flag(
        False,
        "print the result as JSON, with nothing else on stdout; of --eval_only: everything that "
        "--eval_report writes",
        requires=("predict|eval_only|compile_only|plan|print_config",),
    )

    @property
    def judges_features(self) -> bool:
        """Whether frozen features are evaluated instead of predictions."""
        return self.knn or self.probe or self.rank or self.segment_probe


@dataclass(frozen=True)
class ShardingConfig:
    """How a run is sharded over its devices, on every backend."""

    group: ClassVar[str] = "sharding and memory"

    precision: Literal["fp32", "bf16", "fp16"] = flag(
        "fp32",
        "dtype of computation and, on GPUs, of unsharded weights; stored weights and optimizer "
        "state stay fp32; fp16: GPUs with --fsdp fsdp2 only",
        names=("--precision", "--param_dtype"),
        common=True,
    )
    grad_ckpt: Literal["full", "selective", "offload", "none", "auto"] = flag(
        "full",
        "activation checkpointing; full: recompute all; selective: all but attention and wide "
        "products; offload: all, from inputs in host memory (TPU); auto: fastest that fits (TPU), "
        "else full",
        shorthands={"--no_grad_ckpt": "none"},
        common=True,
    )
    run_without_fsdp: bool = flag(
        False,
        "replicate the parameters instead of sharding them (plain data parallelism); on GPUs, "
        "same as --zero_dp_strategy 0",
    )
    reshard_after_forward: bool = flag(
        True,
        "keep weights unsharded between forward and backward (ZeRO-2; default: ZeRO-3); on GPUs, "
        "same as --zero_dp_strategy 2; on XLA, requires nested FSDP",
        names=("--no_reshard_after_forward",),
        incompatible_with=("run_without_fsdp",),
    )
    mesh_dcn: int | str = flag(
        1,
        "number of replicas of the parameters; slices: one per TPU slice; on GPUs, the number of "
        "HSDP groups",
        kind=positive_or_slices,
        metavar="N|slices",
        names=("--mesh_dcn", "--dp_outer"),
        incompatible_with=("run_without_fsdp",),
    )
    mesh_fsdp: int | None = flag(
        None,
        "number of devices that shard each replica (FSDP) (default: all devices, divided by the "
        "other axes)",
        kind=positive,
        names=("--mesh_fsdp", "--dp_shard"),
        common=True,
        incompatible_with=("run_without_fsdp",),
    )
    mesh_domain: int = flag(
        1,
        "number of devices that the rows of each image are sharded over (domain parallelism)",
        kind=positive,
        requires=CLASSIFIES,
    )
    domain_attention: Literal["auto", "ring", "ulysses", "gather"] = flag(
        "auto",
        "attention across the devices of --mesh_domain; ring: keys and values are passed from "
        "device to device, one part at a time; ulysses: each device computes some of the heads "
        "for all tokens (GPU, TorchTPU); gather: each device gathers all keys and values (XLA); "
        "auto: on XLA, gather for up to 16,384 tokens, else ring; elsewhere ulysses if "
        "--mesh_domain divides the number of heads, else ring",
        requires=("mesh_domain",),
    )
    attention: Literal["auto", "sdpa", "plain", "flash", "whole"] = flag(
        "auto",
        "attention implementation on TPUs; sdpa: PyTorch's; plain: products and a softmax "
        "(TorchTPU; XLA makes the same of sdpa); flash: Pallas kernels that hold a few scores at a "
        "time; whole: Pallas kernels that hold all scores of an image, up to 1024 tokens; auto: "
        "whole, or flash above 1024 tokens, where the kernels support the model, such as without "
        "--att_dropout, else plain, or sdpa on XLA (flash and whole are experimental: not yet run "
        "on a TPU)",
        requires=("backend=xla|backend=torchtpu",),
    )
    matmul: Literal["precision", "int8", "fp8"] = flag(
        "precision",
        "dtype of the forward matrix products of the blocks' linear layers on TPUs, for which "
        "weights are gathered in it; precision: same as --precision; int8: one scale per row of "
        "weights and activations, twice the matrix throughput of bf16 on v5e and v6e; fp8: the "
        "same in e4m3 on TPU7x (TorchTPU); gradients are not rounded; with TorchTPU: requires "
        "--fsdp simple (int8 and fp8 are experimental: not yet run on a TPU)",
        requires=("precision=bf16", "xla_fsdp=spmd|fsdp=simple"),
    )
    gather_dtype: Literal["auto", "fp8"] = flag(
        "auto",
        "dtype in which the matrices of blocks are gathered on TPUs; auto: same as --precision; "
        "fp8: e4m3 with one scale per row, half the bytes of bf16; gradients are not in fp8; with "
        "TorchTPU: requires --fsdp simple (fp8 is experimental: not yet run on a TPU)",
        requires=("xla_fsdp=spmd|fsdp=simple",),
        incompatible_with=("run_without_fsdp", "matmul"),
    )
    mesh_tensor: int = flag(
        1,
        "number of devices that the attention heads and MLP columns of each block are sharded "
        "over (tensor parallelism); must divide both; XLA with SPMD, or --fsdp simple; not "
        "supported by all models (see --list_models)",
        kind=positive,
        incompatible_with=("run_without_fsdp",),
    )


BackendChoice = Literal["auto", "xla", "cuda", "torchtpu"]


@dataclass(frozen=True)
class RunConfig:
    """All flags common to all backends: its own, those of the nested groups and of features."""

    group: ClassVar[str] = "run"

    backend: BackendChoice = flag(
        "auto",
        "backend; xla: PyTorch/XLA on TPUs or the CPU; cuda: NVIDIA GPUs, or the CPU with gloo; "
        "torchtpu: TorchTPU on TPUs; auto: xla or torchtpu on TPUs, cuda on GPUs, else the CPU",
        common=True,
    )
    seed: int = flag(0, "random seed for weight initialization, shuffling and dropout", kind=seed)
    num_epochs: int = flag(300, "number of passes over train/", kind=positive, common=True)
    max_steps: int | None = flag(
        None,
        "stop after N steps in total, including those before a resume (default: no limit)",
        kind=positive,
        common=True,
    )
    self_check: bool = flag(
        False,
        "instead of training, check flags, devices and checkpoints with a small model "
        "(docs/self_check.md); exit code 1 on failure",
        common=True,
        incompatible_with=("predict", "eval_only", "compile_only"),
    )
    plan: bool = flag(
        False,
        "instead of training, search for the fastest, cheapest and smallest TPU slice and flags to "
        "train --model (docs/planning.md)",
        common=True,
        incompatible_with=(
            *("predict", "eval_only", "self_check", "compile_only", "micro_batch_size"),
        ),
    )
    print_config: bool = flag(
        False,
        "instead of training, print the configuration with everything that the program decides, "
        "as a file of flags that repeats the run (@FILE) or, with --json, as JSON; reads no images "
        "and starts no device (docs/options.md)",
        incompatible_with=(
            *("predict", "eval_only", "features", "self_check", "compile_only", "plan"),
        ),
    )
    extension: list[str] | None = flag(
        None,
        "Python files or modules (package.module) with features of your own: objectives, data "
        "sources, models; their flags are in --help; a name may end with @sha256: and a checksum "
        "(docs/extending.md) (default: none)",
        metavar="FILE.py",
    )
    list_models: str | None = flag(
        None,
        "list models whose names contain PATTERN (or match it, with * and ?), and exit (default: "
        "off)",
        metavar="PATTERN",
        bare="*",
        common=True,
    )
    data: DataConfig = field(default_factory=DataConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    objective: ObjectiveConfig = field(default_factory=ObjectiveConfig)
    feature_flags: FeatureFlags = field(default_factory=FeatureFlags.defaults)
    loss: LossConfig = field(default_factory=LossConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    ema: EmaConfig = field(default_factory=EmaConfig)
    checkpoints: CheckpointConfig = field(default_factory=CheckpointConfig)
    log: LogConfig = field(default_factory=LogConfig)
    use: UseConfig = field(default_factory=UseConfig)
    sharding: ShardingConfig = field(default_factory=ShardingConfig)
    explicitly_set: frozenset[str] = field(default=frozenset(), compare=False)
    """The fields of this and all backends' configurations that are set on the command line, even to
    their defaults. Values from the environment do not count."""

    def of(self, flags: type[Flags]) -> Flags:
        """Return the flags of a feature, by their dataclass."""
        return self.feature_flags.of(flags)

    def with_flags(self, *changed: Any) -> Self:
        """Return the configuration with these instances of features' dataclasses."""
        new = {type(flags): flags for flags in changed}
        flags = FeatureFlags(new.get(type(each), each) for each in self.feature_flags)
        return replace(self, feature_flags=flags)

    @functools.cached_property
    def active_features(self) -> tuple[Any, ...]:
        """The features (``training/feature.py``) that these flags turn on."""
        return tuple(feature for feature in features() if feature.is_on(self))

    def __getstate__(self) -> dict[str, Any]:
        """Leave out what another process finds again, with its own features."""
        return {name: value for name, value in vars(self).items() if name != "active_features"}

    def model_arguments(self) -> dict[str, Any]:
        """Return the arguments that flags set for the model, by name; see ``open_model``."""
        return self.model.overrides() | self.added_arguments()

    def added_arguments(self) -> dict[str, Any]:
        """Return those of ``model_arguments`` that are flags of features."""
        parts = [self.of(each.model_flags) for each in self.active_features if each.model_flags]
        values = {name: value for part in parts for name, value in vars(part).items()}
        return {name: value for name, value in values.items() if value is not None}

    @property
    def averages(self) -> bool:
        """Whether there is a moving average (EMA) of the weights."""
        return self.ema.model_ema or self.objective.has_teacher


def flags_of_model() -> tuple[type, ...]:
    """Return the dataclasses of flags that are arguments of the model: its own, and those of
    features (``Feature.model_flags``)."""
    return (ModelConfig, *(each.model_flags for each in features() if each.model_flags))
