"""From flags to a ``Run``: make every choice and every check before a device starts.

A backend's ``resolve`` (``xla_fsdp/resolve_xla.py``, ``torch_fsdp/resolve_torch.py``) makes a
``Run`` from these functions and its own choices. Nothing below the entrypoint has to interpret
"auto".
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, Literal, Self, TypeVar

from data.config import ALWAYS_ALIKE, NOT_AUGMENTED, DataConfig, Preprocessing
from data.size_schedule import MAGNITUDE
from models.config import DEFAULT_MODEL, ModelConfig, ModelError
from models.registry import open_model, with_additions
from training.config import RunConfig
from training.errors import UsageError
from training.files import folder_at, log_folder
from training.flags import by_field, flat, values_without_secrets, with_values
from training.mesh import Mesh, make_mesh
from training.objectives.config import ObjectiveConfig

if TYPE_CHECKING:
    from torch import Tensor
    from torch.nn import Module

    from models.spec import ModelSizes, ModelSpec

MODEL_FLAG = {
    name: option.names[0] for name, option in by_field(ModelConfig, ObjectiveConfig).items()
}
"""The flag of each model argument, by timm's name, and of what an objective adds."""


BackendConfig = TypeVar("BackendConfig")


@dataclass(frozen=True)
class Run(Generic[BackendConfig]):
    """A fully resolved run, which everything below the entrypoint receives."""

    config: RunConfig
    backend_config: BackendConfig
    """The backend's own configuration, a frozen dataclass of flags.

    Each one has ``keeps_fp32_weights`` (True if weights are stored in fp32 at any precision),
    ``product_multiple`` (sizes of matrix products must be multiples of it) and ``shrunk()`` (the
    same configuration for a model of a few blocks)."""
    model: ModelSpec
    mesh: Mesh
    why: Mapping[str, str] = field(default_factory=dict)
    """By field, why "auto" was resolved as it was; shown in the line that describes the run."""
    teacher: Self | None = None
    """The run of ``--teacher`` on the same devices; only its model and preprocessing are used. None
    without a teacher, or if nothing is trained."""

    @property
    def values(self) -> dict[str, Any]:
        """The final values of all flags by field name, for checkpoints, records and messages: URLs
        are without passwords and signatures, which may differ between starts and processes."""
        return values_without_secrets(flat(self.config, self.backend_config))

    @property
    def ckpt_dir(self) -> Path:
        return folder_at(self.config.checkpoints.ckpt_dir)

    @property
    def log_dir(self) -> Path:
        """The local folder for logs: ``ckpt_dir``, unless that is a URL."""
        return log_folder(self.ckpt_dir)

    @property
    def train_flops_per_image(self) -> float:
        """FLOPs of one image as counted for MFU. A linear probe has (almost) no backward pass; the
        FLOPs of ``teacher`` are not counted."""
        return self._train_flops_of(self.model)

    @property
    def train_flops_by_size(self) -> dict[tuple[int, int], float]:
        """The same by height and width, if images may have several sizes; {} if all have the
        model's own size."""
        sizes = {}
        for size in self.config.data.image_sizes:
            model = model_of(replace(self.config.model, img_size=size), self.config.objective)
            sizes[size] = self._train_flops_of(model)
        return sizes

    def _train_flops_of(self, model: ModelSpec) -> float:
        forward_and_back = model.train_flops_per_image
        if self.teacher:  # which replaces the model's average as the teacher, if there is one
            forward_and_back -= sum(each.train_flops for each in model.runs if not each.learns)
        return forward_and_back / 3 if self.config.optimizer.linear_probe else forward_and_back

    def build_model(self, constant: Callable[[Tensor], Tensor]) -> Module:
        """Return the model on the meta device, for images of all sizes and crops.

        ``constant`` puts a tensor on the devices, as ``Backend.constant``.
        """
        model = self.model.build()
        if found := [*grids(self.config, self.model), *self.model.other_grids]:
            self.model.compute_on_grids(model, found, constant)
        return model

    def with_data(self, **changes: Any) -> Self:
        """Return the same run with these values changed in ``config.data``."""
        return replace(self, config=replace(self.config, data=replace(self.config.data, **changes)))

    def on(self, devices: int) -> Self:
        """Return the same run on these devices. Raises UsageError if the flags do not fit them."""
        if devices == self.mesh.devices:
            return self
        teacher = self.teacher and self.teacher.on(devices)
        mesh = make_mesh(self.config.sharding, devices)
        config = with_micro_batches(self.config, mesh)
        run = replace(self, config=config, mesh=mesh, teacher=teacher)
        check_batch(run)
        return run


# ------------------------------------------------------------------------------------------------
# Choices that need neither a model nor devices.

_BETAS = {"adamw": (0.9, 0.999), "lion": (0.9, 0.99), "muon": (0.9, 0.95)}
"""Default betas by optimizer; Lion's and Muon's are timm's."""
_MAX_HUE = 0.5


def resolve_common(config: RunConfig) -> RunConfig:
    """Make all choices that do not depend on the backend. Raises UsageError."""
    # Crops, normalization and augmentations, which must fit each other and the data source.
    data, dino, is_dino = config.data, config.objective, config.objective.objective == "dino"
    source, flags = data.data_source, by_field(DataConfig, ObjectiveConfig)
    crops = ("global_crops_scale", "local_crops_scale", "ibot_mask_ratio") if is_dino else ()
    ranges = {flags[name].names[0]: getattr(dino, name) for name in crops}
    for name, (low, high) in ({"--scale": data.scale, "--ratio": data.ratio} | ranges).items():
        if low > high:
            raise UsageError(f"{name} {low} {high}: the minimum must not exceed the maximum")
        if not high and name in ranges:
            raise UsageError(f"{name} 0 0: the maximum must be above 0")
    for name, values in (("--mean", data.mean), ("--std", data.std)):
        wrong = next((each for each in values or () if not 0 <= each <= 1), None)
        if wrong is not None and source != "volumes":
            raise UsageError(f"{name}: {wrong:g} must be at least 0 and at most 1")
    unused = [("aug_repeats", f"--data_source {source}")] if source in ALWAYS_ALIKE else []
    if source in NOT_AUGMENTED:
        names = ["vflip", "train_interpolation", "aa", "color_jitter", "reprob"]
        unused += [(name, f"--data_source {source}") for name in names]
    if is_dino:  # its crops have their own distortions
        names = ["vflip", "aa", "color_jitter", "reprob"]
        unused += [(name, "--objective dino") for name in names]
    ineffective = [flags[name] for name, _ in unused]
    ineffective = [
        flag for flag in ineffective if getattr(data, flag.field.name) != flag.field.default
    ]
    if ineffective:
        typed = ", ".join(flag.typed(getattr(data, flag.field.name)) for flag in ineffective)
        # After a recipe they cannot be dropped. No recipe has --train_interpolation.
        resets = [
            flag.typed(flag.field.default).lower() for flag in ineffective if not flag.choices
        ]
        append = f", or append {' '.join(resets)}" if resets else ""
        has, it = ("has", "it") if len(ineffective) == 1 else ("have", "them")
        by = dict(unused)[ineffective[0].field.name]
        raise UsageError(f"{typed} {has} no effect with {by}: drop {it}{append}")
    if data.aug_repeats > data.batch_size:
        raise UsageError(
            f"--aug_repeats {data.aug_repeats} exceeds --batch_size {data.batch_size}: each image "
            "appears that many times in a batch"
        )
    jitter = data.jitter_of_each
    if len(jitter) not in (3, 4):
        raise UsageError(
            "--color_jitter takes 1 number, 3 (brightness, contrast, saturation) or 4 (and hue), "
            f"not {len(jitter)}"
        )
    if any(hue > _MAX_HUE for hue in jitter[3:]):
        raise UsageError(f"--color_jitter: hue {jitter[3]:g} must be at most {_MAX_HUE}")
    if data.aa and data.color_jitter and "3a" not in data.aa:
        raise UsageError(
            f"--color_jitter is incompatible with --aa {data.aa}, which changes colors itself "
            "(timm ignores --color_jitter then): drop one of the two"
        )
    if data.scale[1] == 0:
        raise UsageError("--scale 0 0: the maximum must be above 0")
    if data.size_schedule:
        shares = [share for _, share in data.size_schedule if share is not None]
        if 0 < len(shares) < len(data.size_schedule):
            raise UsageError("--image_size_schedule: give a share for every size, or for none")
        if shares and round(sum(shares), 2) != 1:
            raise UsageError(
                f"--image_size_schedule: the shares add up to {sum(shares):.4g}, not 1"
            )
    policy = data.aa or ""
    is_rand_augment = policy.startswith("rand") and MAGNITUDE.search(policy)
    if data.aa_min_magnitude is not None and not is_rand_augment:
        raise UsageError(
            "--aa_min_magnitude requires RandAugment with a magnitude, such as --aa "
            "rand-m9-mstd0.5-inc1"
        )

    # Schedules.
    schedule, peak = config.schedule, config.optimizer.lr
    for name, rate in (("--min_lr", schedule.min_lr), ("--warmup_lr", schedule.warmup_lr)):
        if rate > peak:
            raise UsageError(f"{name} {rate:g} is above --lr {peak:g}")
    epochs = schedule.warmup_epochs
    if schedule.warmup_lr and not (config.optimizer.warmup_steps if epochs is None else epochs):
        raise UsageError("--warmup_lr requires a warmup: --warmup_steps or --warmup_epochs above 0")
    if schedule.lr_schedule == "wsd" and schedule.decay_steps is None:
        raise UsageError("--lr_schedule wsd requires --decay_steps")
    if schedule.weight_decay_end is not None and not config.optimizer.weight_decay:
        raise UsageError("--weight_decay_end requires --weight_decay above 0, its start value")

    # What --objective dino does not support, and evaluations that need images.
    use, log, saves = config.use, config.log, config.checkpoints
    if is_dino:
        if "scale" in config.explicitly_set:
            raise UsageError(
                "--objective dino uses --global_crops_scale instead of --scale: drop --scale"
            )
        if dino.crop_sizes and source == "fake":
            raise UsageError("--crop_sizes has no effect with --data_source fake: drop it")
        if config.sharding.grad_ckpt == "auto":
            raise UsageError(
                "--objective dino is incompatible with --grad_ckpt auto: choose another value"
            )
        if use.eval_only and not use.judges_features:
            raise UsageError(
                "--eval_only with --objective dino requires --knn, --probe, --rank or "
                "--segment_probe"
            )
        if saves.ckpt_best or saves.resume in ("best", "lowest_loss"):
            given = "--ckpt_best" if saves.ckpt_best else f"--resume {saves.resume}"
            raise UsageError(
                f"{given} requires a validation loss, which --objective dino does not have: drop it"
            )
    of_features = {
        "--features": use.features,
        "--knn": use.knn,
        "--probe": use.probe,
        "--rank": use.rank,
        "--knn_every": log.knn_every,
        "--probe_every": log.probe_every,
        "--rank_every": log.rank_every,
    }
    for name, is_given in of_features.items():
        if is_given and source == "fake":
            raise UsageError(f"{name} requires images: --fake_data has none")

    if log.wandb and importlib.util.find_spec("wandb") is None:
        raise UsageError("--wandb requires the package wandb: python3 -m pip install wandb")
    if config.optimizer.betas is None:
        betas = _BETAS[config.optimizer.optimizer]
        config = replace(config, optimizer=replace(config.optimizer, betas=betas))
    if log.eval_batches is None:
        batches = config.max_steps or 0 if source == "fake" else 0
        config = replace(config, log=replace(log, eval_batches=batches))
    return with_defaults(config, asdict(Preprocessing.of_new_weights(source)))


def with_defaults(config: RunConfig, values: Mapping[str, Any]) -> RunConfig:
    """Return the configuration with ``values``, by field name, where no flag is set: on the command
    line or, if its default is None, by an earlier choice."""
    now, default = flat(config), flat(RunConfig())
    chosen = {name for name in values if default[name] is None and now[name] is not None}
    unset = values.keys() - chosen - config.explicitly_set
    return with_values(config, {name: values[name] for name in unset})


def take_over(config: RunConfig, values: Mapping[str, Any], path: Path) -> RunConfig:
    """Return the configuration with the settings of a checkpoint or weights in ``path``, where no
    flag is set.

    ``values``: settings by field name. Those of a model are ignored if a flag names another one.
    Raises UsageError if a flag sets another objective.
    """
    here, there = config.objective.objective, values.get("objective")
    if "objective" in config.explicitly_set and there not in (None, here):
        raise UsageError(
            f"{path} was trained with --objective {there}, not {here}: use the same objective, or "
            "start a new run from its weights with --init_from and another --ckpt_dir"
        )
    if config.model.model not in (None, values.get("model")):
        values = {name: each for name, each in values.items() if name not in flat(config.model)}
    return with_defaults(config, values)


# ------------------------------------------------------------------------------------------------
# The model, and the images that it trains on.

_ANY_CHANNELS = ("volumes", "fake")
"""Sources whose images can have any number of channels; others have 3 or 1."""
_MAX_TOKENS_APART = 0.25
"""Largest relative difference between a bucket's tokens and the model's own."""


def model_of(config: ModelConfig, objective: ObjectiveConfig | None = None) -> ModelSpec:
    """Return the model that the flags name, with what the objective adds to it, if one is given.
    Raises UsageError for an unknown or impossible model."""
    try:
        spec = open_model(config.model or DEFAULT_MODEL, config.overrides())
        if spec.packing and objective and objective.objective != "classify":
            raise ModelError(
                f"--objective {objective.objective} is incompatible with native resolution "
                f"({spec.name}): its crops have a fixed size"
            )
        return with_additions(spec, objective.objective, flat(objective)) if objective else spec
    except ModelError as error:
        raise UsageError(error.with_flag_names(MODEL_FLAG)) from None


def model_line(spec: ModelSpec) -> str:
    """Return what a log says of a model: its name, size, and the flags that were set for it."""
    flags = by_field(ModelConfig)
    typed = " ".join(flags[name].typed(value) for name, value in spec.overrides.items())
    return f"{spec.name}, {spec.parameter_count:,} parameters{typed and f' ({typed})'}"


def resolve_model(config: RunConfig) -> tuple[RunConfig, ModelSpec]:
    """Return the configuration with its model named, and that model. Raises UsageError."""
    named = replace(config.model, model=config.model.model or DEFAULT_MODEL)
    model, source = model_of(named, config.objective), config.data.data_source
    if config.optimizer.linear_probe:  # frozen blocks compute as in evaluation
        for name, rate in model.settings.items():
            if name.endswith("_rate") and name != "drop_rate" and rate:
                flag = MODEL_FLAG[name]
                raise UsageError(
                    f"--linear_probe is incompatible with {flag} {rate:g}: set {flag} 0"
                )
    config = _resolve_packing(config, model)
    channels, *spatial = model.sizes.input_shape
    segments = config.use.segment_probe or config.log.segment_probe_every
    if segments and len(spatial) > 2:
        given = "--segment_probe" if config.use.segment_probe else "--segment_probe_every"
        raise UsageError(f"{given} requires a model of images, not of volumes")
    if (segments or source not in _ANY_CHANNELS) and channels not in (1, 3):
        raise UsageError(f"--in_chans {channels}: images have 3 channels (RGB) or 1 (gray)")
    if config.data.image_sizes:
        _check_sizes(config, model)
    return replace(config, model=named), model


_NEEDS_PACKING = {"max_tokens_per_image": None, "resize_to_budget": False, "side_scale": (1.0, 1.0)}
"""Flags that only apply to native resolution, with their defaults."""


def _resolve_packing(config: RunConfig, model: ModelSpec) -> RunConfig:
    """Return the configuration with the largest number of tokens per image, if the model takes
    sequences of several images. Raises UsageError for what such a run does not support."""
    data, packing, flags = config.data, model.packing, by_field(DataConfig)
    if packing is None:
        for name, default in _NEEDS_PACKING.items():
            if getattr(data, name) != default:
                raise UsageError(f"{flags[name].names[0]} requires --native_resolution")
        return config
    loss, use, log = config.loss, config.use, config.log
    refused = {
        f"--mesh_domain {config.sharding.mesh_domain}": config.sharding.mesh_domain > 1,
        "--buckets": data.buckets,
        "--image_size_schedule": data.image_size_schedule,
        "--aug_repeats": data.aug_repeats > 1,
        "--mixup" if loss.mixup else "--cutmix": loss.mixes,
        "--bce_loss": loss.bce_loss,
        "--teacher": loss.teacher,
        "--segment_probe": use.segment_probe or log.segment_probe_every,
        "--pca": use.pca,
        "--features_of patches": "patches" in (use.features_of or ()),
        "--save_bad_step": log.save_bad_step,
    }
    for given, is_given in refused.items():
        if is_given:
            raise UsageError(f"{given} is incompatible with native resolution ({model.name})")
    low, high = data.side_scale
    if low > high:
        raise UsageError(f"--side_scale {low:g} {high:g}: the minimum must not exceed the maximum")
    most = data.max_tokens_per_image
    if most is None:
        most = min(model.sizes.num_patches + packing.prefix, packing.tokens)
    elif most > packing.tokens:
        raise UsageError(
            f"--max_tokens_per_image {most} exceeds --token_budget {packing.tokens}: an image is "
            "never split over sequences"
        )
    if most <= packing.prefix:
        raise UsageError(
            f"--max_tokens_per_image {most} leaves no room for patches after the {packing.prefix} "
            f"class and register tokens of {model.name}"
        )
    return replace(config, data=replace(data, max_tokens_per_image=most))


def _check_sizes(config: RunConfig, model: ModelSpec) -> None:
    """Raise UsageError if the model cannot be trained with ``--buckets`` or
    ``--image_size_schedule``."""
    sizes, buckets = config.data.image_sizes, config.data.bucket_sizes
    given = "--buckets" if buckets else "--image_size_schedule"
    if reason := model.why_one_grid():
        raise UsageError(f"{given} is incompatible with --model {model.name}: {reason}")
    if config.sharding.grad_ckpt == "auto":
        raise UsageError(f"{given} is incompatible with --grad_ckpt auto: choose another value")
    (height, width), (rows, columns) = model.sizes.input_shape[1:], model.sizes.grid
    if buckets and (height, width) not in buckets:
        raise UsageError(f"--buckets must include the model's own size, {height}x{width}")
    if not buckets and height != width:
        raise UsageError(
            f"--image_size_schedule requires square images, not the model's {height} x {width}: "
            "use --buckets, or a square --image_size"
        )
    high, wide = height // rows, width // columns
    for h, w in sizes:
        if buckets.count((h, w)) > 1:
            raise UsageError(f"--buckets lists {h}x{w} twice")
        if h % high or w % wide:
            raise UsageError(f"{given}: {h}x{w} is not a multiple of the patch size, {high}x{wide}")
    for h, w in buckets:
        patches = (h // high) * (w // wide)
        if abs(patches / model.sizes.num_patches - 1) > _MAX_TOKENS_APART:
            raise UsageError(
                f"--buckets: {h}x{w} has {patches} patches, the model's own size "
                f"{model.sizes.num_patches}: they may differ by at most {_MAX_TOKENS_APART:.0%}"
            )


def grids(config: RunConfig, model: ModelSpec) -> list[tuple[int, int]]:
    """Return the grid of patches of each size that images may have; [] if all have the model's
    own."""
    if not config.data.image_sizes:  # volumes, with three sides, have none
        return []
    image, (rows, columns) = model.sizes.input_shape[1:], model.sizes.grid
    return [(h * rows // image[0], w * columns // image[1]) for h, w in config.data.image_sizes]


def sizes_of_largest(config: RunConfig, model: ModelSpec) -> ModelSizes:
    """Return the model's sizes, with the number of tokens of the largest images or crops."""
    sizes = model.sizes
    found = [*grids(config, model), *model.other_grids]
    most = max([sizes.num_patches, *(rows * columns for rows, columns in found)])
    return replace(sizes, num_tokens=sizes.num_tokens + most - sizes.num_patches)


# ------------------------------------------------------------------------------------------------
# Choices that depend on the devices.


def check_rows(mesh: Mesh, model: ModelSpec) -> None:
    """Raise UsageError if an image has fewer rows of patches than devices that shard them."""
    rows = model.sizes.grid[0]
    if mesh.domain > rows:
        raise UsageError(
            f"--mesh_domain {mesh.domain} exceeds the {rows} rows of patches of an image"
        )


def resolve_domain(
    config: RunConfig,
    mesh: Mesh,
    refused: Mapping[str, str | None],
    auto: Literal["ring", "ulysses", "gather"],
) -> RunConfig:
    """Return the configuration with ``--domain_attention`` resolved, if devices share images.

    ``refused``: why a form cannot be used here; ``auto``: the form that auto resolves to. Raises
    UsageError.
    """
    form = config.sharding.domain_attention
    if mesh.domain == 1:
        return config
    if reason := refused.get(form):
        raise UsageError(f"--domain_attention {form} {reason}")
    sharding = replace(config.sharding, domain_attention=auto if form == "auto" else form)
    return replace(config, sharding=sharding)


def with_micro_batches(config: RunConfig, mesh: Mesh) -> RunConfig:
    """Return the configuration with the number of passes per step that ``--micro_batch_size``
    needs, and a ``--koleo_group`` that fits such a pass, unless it is set."""
    images, most = config.data.batch_size // mesh.batch_shards, config.data.micro_batch_size
    if most is not None:
        passes = next(
            (n for n in range(-(-images // most), images) if images % n == 0), max(images, 1)
        )
        config = replace(config, data=replace(config.data, grad_accum_steps=passes))
    images = config.data.global_micro_batch_size // mesh.batch_shards
    objective = config.objective
    if objective.objective == "dino" and images > 1 and "koleo_group" not in config.explicitly_set:
        sizes = range(2, ObjectiveConfig.koleo_group + 1)
        group = max((n for n in sizes if images % n == 0), default=images)
        config = replace(config, objective=replace(objective, koleo_group=group))
    return config


def check_batch(run: Run) -> None:
    """Raise UsageError if the batch cannot be divided over devices and passes, or if a device's
    part cannot be mixed (mixup, CutMix)."""
    data, mesh = run.config.data, run.mesh
    parts = mesh.batch_shards * data.grad_accum_steps
    if data.batch_size % parts:
        together = "".join(
            f" / --mesh_{axis} {size}"
            for axis, size in (("domain", mesh.domain), ("tensor", mesh.tensor))
            if size > 1
        )
        passes = (
            f" x --grad_accum_steps {data.grad_accum_steps}"
            if data.grad_accum_steps > 1 and data.micro_batch_size is None
            else ""
        )
        below = data.batch_size // parts * parts
        fitting = f"{below} or {below + parts}" if below else f"{parts}"
        raise UsageError(
            f"--batch_size {data.batch_size} (global) is not a multiple of the {mesh.devices} "
            f"devices{together}{passes}: use {fitting}"
        )
    objective = run.config.objective
    images = data.global_micro_batch_size // mesh.batch_shards
    if objective.objective == "dino" and objective.koleo_weight and images % objective.koleo_group:
        if images == 1:
            raise UsageError(
                "the KoLeo loss compares images, but a device has only one per pass: use a larger "
                "--batch_size, fewer --grad_accum_steps or --koleo_weight 0"
            )
        raise UsageError(
            f"--koleo_group {objective.koleo_group} does not divide the {images} images per "
            "device and pass: change it, --batch_size or --grad_accum_steps"
        )
    loss, shape = run.config.loss, run.model.sizes.input_shape
    if not loss.mixes:
        return
    if images % 2:
        named = "--mixup" if loss.mixup else "--cutmix" if loss.cutmix else "--cutmix_minmax"
        raise UsageError(
            f"{named} mixes pairs of images on a device, but there are {images} images per device "
            "and pass: choose --batch_size and --grad_accum_steps so that this number is even"
        )
    if loss.cuts and len(shape) != 3:
        raise UsageError("CutMix supports 2-D images only: use --mixup for volumes")
    if loss.cutmix_minmax is not None:
        low, high = loss.cutmix_minmax
        for height, width in run.config.data.image_sizes or [(shape[1], shape[2])]:
            if any(int(side * low) >= int(side * high) for side in (height, width)):
                raise UsageError(
                    f"--cutmix_minmax {low:g} {high:g} contains no whole number of pixels for "
                    f"images of {height} x {width}: use a larger maximum"
                )
