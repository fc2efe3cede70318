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

from data.config import ALWAYS_ALIKE, NOT_AUGMENTED, OF_FILES, DataConfig, Preprocessing
from models.config import DEFAULT_MODEL, ModelConfig, ModelError
from models.registry import open_model
from training.config import RunConfig, ShardingConfig, flags_of_model
from training.errors import UsageError
from training.feature_table import flag_classes
from training.files import folder_at, log_folder
from training.flags import (
    by_field,
    check_range,
    flag_fields,
    flat,
    typed_if_set,
    values_without_secrets,
    with_values,
)
from training.mesh import Mesh, make_mesh
from training.objectives.config import ObjectiveConfig
from training.rules import check_features

if TYPE_CHECKING:
    from torch import Tensor
    from torch.nn import Module

    from models.spec import ModelSizes, ModelSpec

BackendConfig = TypeVar("BackendConfig")
Plan = TypeVar("Plan")


@dataclass(frozen=True)
class Run(Generic[BackendConfig, Plan]):
    """A fully resolved run, which everything below the entrypoint receives.

    One that no backend computes has no ``backend_config`` and no ``plan``.
    """

    config: RunConfig
    backend_config: BackendConfig
    """The backend's own configuration, a frozen dataclass of flags.

    Each one has ``keeps_fp32_weights`` (True if weights are stored in fp32 at any precision),
    ``product_multiple`` (sizes of matrix products must be multiples of it) and ``shrunk()`` (the
    same configuration for a model of a few blocks)."""
    model: ModelSpec
    mesh: Mesh
    plan: Plan
    """How the backend's ``parallelize`` makes the plain model a parallel one: a frozen dataclass of
    choices that hold on any number of devices."""
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
    def model_line(self) -> str:
        """What a log says of the model: its name, size, and the flags that were set for it."""
        flags, model = by_field(*flags_of_model()), self.model
        typed = " ".join(flags[name].typed(value) for name, value in model.overrides.items())
        return f"{model.name}, {model.parameter_count:,} parameters{typed and f' ({typed})'}"

    @property
    def global_batch_line(self) -> str:
        """What is said of the global batch: its images and, if there are several, its shards."""
        images, shards = self.config.data.batch_size, self.mesh.batch_shards
        each = f" = {shards} x {images // shards:,}" if shards > 1 else ""
        return f"global batch {images:,}{each}"

    @property
    def ckpt_dir(self) -> Path:
        return folder_at(self.config.checkpoints.ckpt_dir)

    @property
    def log_dir(self) -> Path:
        """The local folder for logs: ``ckpt_dir``, unless that is a URL."""
        return log_folder(self.ckpt_dir)

    @property
    def train_flops_per_image(self) -> float:
        """FLOPs of one image as counted for MFU; those of ``teacher`` are not counted."""
        return self._train_flops_of(self.model)

    @property
    def train_flops_by_size(self) -> dict[tuple[int, int], float]:
        """The same by height and width, if images may have several sizes; {} if all have the
        model's own size."""
        sizes = {}
        for size in self.config.data.image_sizes:
            resized = replace(self.config, model=replace(self.config.model, img_size=size))
            sizes[size] = self._train_flops_of(trained_model(resized))
        return sizes

    def _train_flops_of(self, model: ModelSpec) -> float:
        flops = model.train_flops_per_image
        for feature in self.config.active_features:
            flops = feature.train_flops(self, model, flops)
        return flops

    def build_model(self, constant: Callable[[Tensor], Tensor]) -> Module:
        """Return the model on the meta device, for images of all sizes and crops.

        ``constant`` puts a tensor on the devices, as ``Backend.constant``.
        """
        model = self.model.build()
        if found := [*grids(self.config.data, self.model), *self.model.other_grids]:
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
    """Make all choices that depend neither on the backend nor on the model. Raises UsageError."""
    source = config.data.data_source
    defaults = {
        "betas": _BETAS.get(config.optimizer.optimizer, _BETAS["adamw"]),
        "eval_batches": config.max_steps or 0 if source == "fake" else 0,
        **asdict(Preprocessing.of_new_weights(source)),
    }
    config = with_defaults(config, defaults)
    _check_images(config)
    _check_schedules(config)
    if config.log.wandb and importlib.util.find_spec("wandb") is None:
        raise UsageError("--wandb requires the package wandb: python3 -m pip install wandb")
    for feature in config.active_features:
        config = feature.resolve_flags(config)
    return config


def _check_images(config: RunConfig) -> None:
    """Raise UsageError if crops, normalization and augmentations do not fit each other and the data
    source."""
    data, source = config.data, config.data.data_source
    check_range("--scale", *data.scale)
    check_range("--ratio", *data.ratio)
    if data.scale[1] == 0:
        raise UsageError("--scale 0 0: the maximum must be above 0")
    for name, values in (("--mean", data.mean), ("--std", data.std)):
        wrong = next((each for each in values or () if not 0 <= each <= 1), None)
        if wrong is not None and source != "volumes":
            raise UsageError(f"{name}: {wrong:g} must be at least 0 and at most 1")
    _check_effects(config)
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


def _check_effects(config: RunConfig) -> None:
    """Raise UsageError for augmentations that have no effect with the data source, or with a
    feature."""
    source, known = config.data.data_source, {o.names[0]: o for o in flag_fields(DataConfig)}
    of_photographs = ("--vflip", "--train_interpolation", "--aa", "--color_jitter", "--reprob")
    ignored = ["--aug_repeats"] if source in ALWAYS_ALIKE else []
    ignored += of_photographs if source in NOT_AUGMENTED else ()
    unused = [(name, f"--data_source {source}") for name in ignored]
    for feature in config.active_features:
        unused += [(name, feature.shown(config)) for name in feature.ignores]
    typed = {name: text for name, _ in unused if (text := typed_if_set(name, config))}
    if not typed:
        return
    flags = [known[name] for name in typed]
    # After a recipe they cannot be dropped. No recipe has --train_interpolation.
    resets = [flag.typed(flag.field.default).lower() for flag in flags if not flag.choices]
    append = f", or append {' '.join(resets)}" if resets else ""
    has, it = ("has", "it") if len(flags) == 1 else ("have", "them")
    by = dict(unused)[flags[0].names[0]]
    raise UsageError(f"{', '.join(typed.values())} {has} no effect with {by}: drop {it}{append}")


def _check_schedules(config: RunConfig) -> None:
    """Raise UsageError if rates and lengths of the schedules do not fit each other."""
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


def with_defaults(config: RunConfig, values: Mapping[str, Any]) -> RunConfig:
    """Return the configuration with ``values``, by field name, where no flag is set: on the command
    line to a word other than "auto" or, if its default is None, by an earlier choice."""
    now, default = flat(config), flat(RunConfig())
    chosen = {name for name in values if default[name] is None and now[name] not in (None, "auto")}
    unset = values.keys() - chosen - {n for n in config.explicitly_set if now.get(n) != "auto"}
    return with_values(config, {name: values[name] for name in unset}) if unset else config


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
        of_model = by_field(*flags_of_model())
        values = {name: each for name, each in values.items() if name not in of_model}
    return with_defaults(config, values)


# ------------------------------------------------------------------------------------------------
# The model, and the images that it trains on.

_ANY_CHANNELS = ("volumes", "fake", *OF_FILES)
"""Sources whose images can have any number of channels; others have 3 or 1."""


def model_flags() -> dict[str, str]:
    """Return the flag of each argument of a model, by timm's name, and of what features add."""
    known = by_field(ModelConfig, ObjectiveConfig, *flag_classes())
    return {name: option.names[0] for name, option in known.items()}


def model_of(config: RunConfig) -> ModelSpec:
    """Return the model that the flags name. Raises UsageError for an unknown or impossible one."""
    try:
        return open_model(config.model.model or DEFAULT_MODEL, config.model_arguments())
    except ModelError as error:
        raise UsageError(error.with_flag_names(model_flags())) from None


def trained_model(config: RunConfig) -> ModelSpec:
    """Return the model that the flags name, with what features add to it. Raises UsageError."""
    spec = model_of(config)
    try:
        return extended(spec, config)
    except ModelError as error:
        raise UsageError(error.with_flag_names(model_flags())) from None


def extended(spec: ModelSpec, config: RunConfig) -> ModelSpec:
    """Return the model with what features add to it. Raises ModelError if that is impossible."""
    for feature in config.active_features:
        spec = feature.extend_model(spec, config)
    return spec


def resolve_model(config: RunConfig) -> tuple[RunConfig, ModelSpec]:
    """Return the configuration with its model named, and that model. Raises UsageError."""
    if config.model.model is None:
        config = replace(config, model=replace(config.model, model=DEFAULT_MODEL))
    check_features(config)  # where no backend resolves the run, too
    model = trained_model(config)
    if config.data.data_source not in _ANY_CHANNELS:
        check_channels(model)
    for feature in config.active_features:
        config = feature.resolve_model(config, model)
    return config, model


def check_channels(model: ModelSpec) -> None:
    """Raise UsageError if images of files cannot have the model's number of channels."""
    channels = model.sizes.input_shape[0]
    if channels not in (1, 3):
        raise UsageError(f"--in_chans {channels}: images have 3 channels (RGB) or 1 (gray)")


def grids(data: DataConfig, model: ModelSpec) -> list[tuple[int, int]]:
    """Return the grid of patches of each size that images may have; [] if all have the model's
    own."""
    if not data.image_sizes:  # volumes, with three sides, have none
        return []
    image, (rows, columns) = model.sizes.input_shape[1:], model.sizes.grid
    return [(h * rows // image[0], w * columns // image[1]) for h, w in data.image_sizes]


def sizes_of_largest(data: DataConfig, model: ModelSpec) -> ModelSizes:
    """Return the model's sizes, with the number of tokens of the largest images or crops."""
    sizes = model.sizes
    found = [*grids(data, model), *model.other_grids]
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


def check_heads_and_columns(mesh: Mesh, model: ModelSpec) -> None:
    """Raise UsageError if ``--mesh_tensor`` cannot shard the heads and MLP columns of blocks."""
    from models.blocks import why_no_tensor_parallel  # with PyTorch

    if mesh.tensor == 1:
        return
    sizes, tensor = model.sizes, f"--mesh_tensor {mesh.tensor}"
    if reason := why_no_tensor_parallel(model.block):
        raise UsageError(f"{tensor} is incompatible with --model {model.name}: {reason}")
    if sizes.num_heads % mesh.tensor:
        raise UsageError(f"{tensor} does not divide --num_heads {sizes.num_heads}")
    if sizes.hidden % mesh.tensor:
        raise UsageError(f"{tensor} does not divide the MLP width {sizes.hidden}")


def resolve_domain(
    sharding: ShardingConfig,
    refused: Mapping[str, str | None],
    auto: Literal["ring", "ulysses", "gather"],
) -> ShardingConfig:
    """Return the flags with ``--domain_attention`` resolved, for devices that share images.

    ``refused``: why a form cannot be used here; ``auto``: the form that auto resolves to. Raises
    UsageError.
    """
    form = sharding.domain_attention
    if reason := refused.get(form):
        raise UsageError(f"--domain_attention {form} {reason}")
    return replace(sharding, domain_attention=auto if form == "auto" else form)


def with_micro_batches(config: RunConfig, mesh: Mesh) -> RunConfig:
    """Return the configuration with the number of passes per step that ``--micro_batch_size``
    needs, and what features choose for these devices."""
    images, most = config.data.batch_size // mesh.batch_shards, config.data.micro_batch_size
    if most is not None:
        passes = next(
            (n for n in range(-(-images // most), images) if images % n == 0), max(images, 1)
        )
        config = replace(config, data=replace(config.data, grad_accum_steps=passes))
    for feature in config.active_features:
        config = feature.resolve_mesh(config, mesh)
    return config


def check_batch(run: Run) -> None:
    """Raise UsageError if the batch cannot be divided over devices and passes, or if a feature
    cannot be used with the model on these devices."""
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
    for feature in run.config.active_features:
        feature.check(run)
