"""From what was asked to what is done: every choice made, and checked, before a device starts.

A backend's ``resolve`` (``xla_fsdp/resolve_xla.py``, ``gpu_fsdp/resolve_gpu.py``) makes a ``Run``
by these functions and its own choices. Nothing below asks again.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, Protocol, Self, TypeVar

from models.config import DEFAULT_MODEL, ModelConfig
from models.errors import ModelError
from models.registry import open_model
from training.errors import UsageError, is_first_of_torchrun
from training.logs.log_folder import log_folder
from training.mesh import Mesh, make_mesh
from training.options.augmentation_rules import check_augmentations
from training.options.buckets import check_buckets, grids
from training.options.config import OptimizerConfig, RunConfig
from training.options.flag_rules import by_field, flat
from training.options.loss_config import check_mixing
from training.url_path import folder_at

if TYPE_CHECKING:  # torch and timm take seconds: a wrong flag is told before
    from torch import Tensor
    from torch.nn import Module

    from models.spec import ModelSpec


class BackendConfig(Protocol):
    """What is asked of a backend's own configuration, a frozen dataclass of flags."""

    @property
    def keeps_fp32_weights(self) -> bool:
        """Weights are stored in fp32, whatever is computed with."""

    @property
    def product_multiple(self) -> int:
        """Sizes of matrix products must be multiples of this."""

    def shrunk(self) -> Self:
        """Return the same for a model of a few blocks."""


Own = TypeVar("Own", bound=BackendConfig)


@dataclass(frozen=True)
class Run(Generic[Own]):
    """A run with every choice made: what all below the entrypoint is given."""

    config: RunConfig
    own: Own
    """The backend's."""
    model: ModelSpec
    mesh: Mesh
    why: Mapping[str, str] = field(default_factory=dict)
    """By field, for the line that describes the run: what has decided an "auto"."""
    teacher: Self | None = None
    """The run of ``--teacher`` on the same devices, of which the model and the preprocessing are
    used; None without, and where nothing is trained."""

    @property
    def values(self) -> dict[str, Any]:
        """All flags' final values by their fields' names, for checkpoints, records and messages."""
        return flat(self.config, self.own)

    @property
    def images_a_pass(self) -> int:
        """Return how many images one pass forward and back has, on all devices together."""
        return self.config.data.batch_size // self.config.data.grad_accum_steps

    @property
    def ckpt_dir(self) -> Path:
        return folder_at(self.config.checkpoints.ckpt_dir)

    @property
    def log_dir(self) -> Path:
        """The local folder that logs are written to: ``ckpt_dir``, if that is no URL."""
        return log_folder(self.ckpt_dir)

    @property
    def train_flops_per_image(self) -> float:
        """Return the FLOPs of one image as MFU counts them, without a backward pass where there is
        (almost) none."""
        forward_and_back = self.model.train_flops_per_image
        return forward_and_back / 3 if self.config.optimizer.linear_probe else forward_and_back

    def build_model(self, constant: Callable[[Tensor], Tensor]) -> Module:
        """Return the model on the meta device, ready to be sharded; it takes images of all buckets.

        ``constant`` puts a tensor on a device, as ``Backend.constant``.
        """
        model = self.model.build()
        if found := grids(self.config, self.model):
            self.model.compute_on_grids(model, found, constant)
        return model

    def with_data(self, **changes: Any) -> Self:
        """Return the same with other values in ``config.data``."""
        return replace(self, config=replace(self.config, data=replace(self.config.data, **changes)))

    def on(self, devices: int) -> Self:
        """Return the same on as many devices as were found.

        Raises UsageError if the flags do not go with them.
        """
        if devices == self.mesh.devices:
            return self
        teacher = self.teacher and self.teacher.on(devices)
        run = replace(self, mesh=make_mesh(self.config.sharding, devices), teacher=teacher)
        check_batch(run)
        return run


MODEL_FLAG = {name: option.names[0] for name, option in by_field(ModelConfig).items()}
"""The flag that a person types, by timm's name."""


_ANY_CHANNELS = ("volumes", "fake")
"""Sources whose images can have any number of channels; those of others are colour or grey."""


def resolve_model(config: RunConfig) -> tuple[RunConfig, ModelSpec]:
    """Return the configuration with a model named, and that model. Raises UsageError."""
    named = replace(config.model, model=config.model.model or DEFAULT_MODEL)
    model, source = model_of(named), config.data.data_source
    if config.optimizer.linear_probe:
        _check_linear_probe(model)
    channels = model.sizes.input_shape[0]
    if source not in _ANY_CHANNELS and channels not in (1, 3):
        raise UsageError(f"--in_chans {channels} is neither 3 (RGB) nor 1 (grey)")
    check_buckets(config, model)
    return replace(config, model=named), model


def _check_linear_probe(model: ModelSpec) -> None:
    """Raises UsageError for dropout where nothing trains: that part computes as for use."""
    for name, rate in model.settings.items():
        if name.endswith("_rate") and name != "drop_rate" and rate:
            flag = MODEL_FLAG[name]
            raise UsageError(f"--linear_probe does not go with {flag} {rate:g}: give {flag} 0")


def model_of(config: ModelConfig) -> ModelSpec:
    """Return the model that was asked for. Raises UsageError if there is none, or it cannot be."""
    try:
        return open_model(config.model or DEFAULT_MODEL, config.overrides())
    except ModelError as error:
        raise UsageError(error.told(MODEL_FLAG)) from None


def resolve_common(config: RunConfig) -> RunConfig:
    """Return the configuration with what no backend decides. Raises UsageError."""
    _check_common(config)
    config = replace(config, optimizer=_with_betas(config.optimizer))
    if config.log.eval_batches is not None:
        return config
    most = config.max_steps or 0 if config.data.data_source == "fake" else 0
    return replace(config, log=replace(config.log, eval_batches=most))


_BETAS = {"adamw": (0.9, 0.999), "lion": (0.9, 0.99), "muon": (0.9, 0.95)}
"""By optimizer; of the last two timm's defaults."""


def _with_betas(optimizer: OptimizerConfig) -> OptimizerConfig:
    if optimizer.betas is not None:
        return optimizer
    return replace(optimizer, betas=_BETAS[optimizer.optimizer])


def _check_common(config: RunConfig) -> None:
    data = config.data
    for name, (low, high) in (("--scale", data.scale), ("--ratio", data.ratio)):
        if low > high:
            raise UsageError(f"{name} {low} {high}: the first must not be above the second")
    if data.data_source != "volumes":
        for name, values in (("--mean", data.mean), ("--std", data.std)):
            wrong = next((each for each in values or () if not 0 <= each <= 1), None)
            if wrong is not None:
                raise UsageError(f"{name}: {wrong:g} must be at least 0 and at most 1")
    check_augmentations(data)
    if data.scale[1] == 0:
        raise UsageError("--scale 0 0 leaves no image to crop")
    _check_schedule(config)
    if config.log.wandb:
        _check_wandb()


def _check_schedule(config: RunConfig) -> None:
    schedule, peak = config.schedule, config.optimizer.lr
    for name, rate in (("--min_lr", schedule.min_lr), ("--warmup_lr", schedule.warmup_lr)):
        if rate > peak:
            raise UsageError(f"{name} {rate:g} is above --lr {peak:g}")
    epochs = schedule.warmup_epochs
    if schedule.warmup_lr and not (config.optimizer.warmup_steps if epochs is None else epochs):
        raise UsageError("--warmup_lr needs a warmup: --warmup_steps or --warmup_epochs above 0")
    if schedule.lr_schedule == "wsd" and schedule.decay_steps is None:
        raise UsageError("--lr_schedule wsd needs --decay_steps")


def check_batch(run: Run) -> None:
    """Raises UsageError if the batch cannot be divided over the devices and the passes, or what a
    device then has of it cannot be mixed."""
    data, mesh = run.config.data, run.mesh
    if data.batch_size % (mesh.batch_parts * data.grad_accum_steps):
        together = "".join(
            f" / --mesh_{axis} {size}"
            for axis, size in (("domain", mesh.domain), ("tensor", mesh.tensor))
            if size > 1
        )
        passes = (
            f" x --grad_accum_steps {data.grad_accum_steps}" if data.grad_accum_steps > 1 else ""
        )
        raise UsageError(
            f"--batch_size {data.batch_size} (global) is no multiple of the {mesh.devices} devices"
            f"{together}{passes}"
        )
    images = run.images_a_pass // mesh.batch_parts
    check_mixing(run.config.loss, images, run.model.sizes.input_shape)


def check_rows(mesh: Mesh, model: ModelSpec) -> None:
    """Raises UsageError if there are not as many rows of patches as devices to shard them over."""
    rows = model.sizes.grid[0]
    if mesh.domain > rows:
        raise UsageError(
            f"--mesh_domain {mesh.domain} is more than the {rows} rows of patches of an image"
        )


def _check_wandb() -> None:
    """Raises UsageError without wandb, or a login for it; asks no server."""
    if importlib.util.find_spec("wandb") is None:
        raise UsageError("--wandb needs the package wandb: python3 -m pip install wandb")
    if not is_first_of_torchrun():  # the others do not log
        return
    from wandb.sdk import wandb_setup

    try:
        from wandb.sdk.lib.wbauth import authenticate_session
    except ImportError:  # another version: wandb itself will say so, later
        return
    try:
        settings = wandb_setup.singleton().settings
        logged_in = settings.mode in ("offline", "disabled", "dryrun") or authenticate_session(
            host=settings.base_url, source="--wandb", prompt=False, update_session=False
        )
    except TypeError:  # another version's function
        return
    except Exception as error:  # noqa: BLE001 - of a key or variable that cannot be
        raise UsageError("--wandb: " + ", ".join(str(error).splitlines()[:3])) from None
    if not logged_in:
        raise UsageError(
            "--wandb needs a login on this host: wandb login, or WANDB_API_KEY; WANDB_MODE=offline "
            "goes without"
        )
