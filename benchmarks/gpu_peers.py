"""Batches and steps for gpu_step.py: random batches of each objective, and DINO and MAE as plain
PyTorch programs that the program's own step is compared with.

The plain steps are what a careful user would write for one GPU: fp32 weights under autocast, fused
AdamW, gradient clipping, and optionally the whole loss as one compiled graph. Initial weights,
masks and updates are those of the run, so the losses equal those of the program's own step.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from timm.models.vision_transformer import VisionTransformer
from torch import nn
from torch.optim.swa_utils import get_ema_multi_avg_fn

from benchmarks.plain_objectives import Autocast, CropBatch, DinoLoss, DinoVit, MaeLoss
from data.batch import Batch
from features.dino.config import DinoConfig
from features.dino.crops import CropView, block_mask
from features.mae.config import MaeConfig
from models.timm_models import TimmSpec
from tools.self_check.plain import backward, clip_and_step
from torch_fsdp.parallel_plan import DTYPES, TorchRun
from training.backend import Backend
from training.data import dataset_request, normalizer
from training.errors import UsageError
from training.optimizers import key_of, updates_of
from training.schedule import StepRates
from training.step import put_micro_batches

Step = Callable[[int], torch.Tensor]
"""A function that runs the step of this number and returns its loss on the device."""
Loss = Callable[[int], torch.Tensor]
"""A function that returns the loss of a micro-batch in the step of this number."""


def step_rates(run: TorchRun) -> StepRates:
    """Return the rates of every step: those of ``run`` after all warmups."""
    lr, dino = run.config.optimizer.lr, run.config.of(DinoConfig)
    if not run.config.objective.has_teacher:
        return StepRates(lr)
    newest = 1 - dino.teacher_momentum
    return StepRates(lr, newest=newest, teacher_temp=dino.teacher_temp)


# -- Batches ---------------------------------------------------------------------------------------


def objective_batches(run: TorchRun, backend: Backend) -> list[Batch]:
    """Return this process's share of one batch, in micro-batches, on its device.

    Its values are random, not zeros: a GPU that multiplies zeros draws less power and clocks
    higher.
    """
    generator = torch.Generator().manual_seed(backend.batch_shard)
    data, sizes, objective = run.config.data, run.model.sizes, run.config.objective.objective
    shard, count = data.batch_size // backend.batch_shards, data.grad_accum_steps
    if objective == "classify":
        images = torch.randn((shard, *sizes.input_shape), generator=generator)
        labels = torch.randint(sizes.num_classes, (shard,), generator=generator)
        return put_micro_batches(backend, {"image": images, "target": labels}, {}, count)
    request = dataset_request(run, labels=False)
    fields = request.view.fields(request, torch.uint8, is_train=True)
    batch = {}
    for name, each in fields.items():
        below = 256 if each.dtype == torch.uint8 else each.below
        shape = (shard, *each.shape)
        batch[name] = torch.randint(below, shape, generator=generator, dtype=each.dtype)
    if isinstance(request.view, CropView):
        masks = random_masks(request.view, shard, shard // count, seed=backend.batch_shard)
        batch["mask"] = torch.stack(masks)
    else:
        batch["position"] = backend.batch_shard * shard + torch.arange(shard)
    return put_micro_batches(backend, batch, fields, count)


def random_masks(view: CropView, images: int, micro_batch: int, *, seed: int) -> list[torch.Tensor]:
    """Return the mask of each image. As in DINOv2, the masked fractions of a micro-batch are evenly
    spaced, so that all micro-batches have the same number of masked patches."""
    low, high = view.mask_ratio
    places = [(image % micro_batch + 0.5) / micro_batch for image in range(images)]
    ratios = [low + (high - low) * place for place in places]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return [block_mask(view.grid, (ratio, ratio)) for ratio in ratios]


def collate(batch: Batch, grid: tuple[int, int], prefix: int) -> CropBatch:
    """Return crops as DINOv2's code takes them. ``grid``: rows and columns of patches in a global
    crop; ``prefix``: the number of tokens before the patches of a crop."""
    mask = batch["mask"]
    # By crop, then by image.
    global_crops = batch["global_crops"].transpose(0, 1).flatten(0, 1)
    local_crops = batch.get("local_crops")
    image, patch = mask.nonzero(as_tuple=True)
    return CropBatch(
        global_crops,
        None if local_crops is None else local_crops.transpose(0, 1).flatten(0, 1),
        torch.cat([mask, torch.zeros_like(mask)]).unflatten(1, grid),
        image * (prefix + mask.shape[1]) + prefix + patch,
        1 / (2 * len(mask) * mask.sum(1)[image].float()),
    )


# -- Steps -----------------------------------------------------------------------------------------


def plain_dino_step(
    run: TorchRun, backend: Backend, batches: list[Batch], *, compile_mode: str | None = None
) -> Step:
    """Return the step of DINOv2's self-distillation, with the mode of torch.compile, if any.
    Raises UsageError."""
    spec, config = supported_model(run, backend), run.config.of(DinoConfig)
    device, view = batches[0]["mask"].device, dataset_request(run).view
    assert isinstance(view, CropView)
    with device:
        student = DinoVit(spec.arguments, config)
    load_initial_weights(run, student)
    model = DinoLoss(student, config, normalizer(run, backend.constant), autocast(run, device))
    loss_of, prefix = compiled(model, compile_mode), student.num_prefix_tokens
    crops = [collate(batch, view.grid, prefix) for batch in batches]
    average = get_ema_multi_avg_fn(config.teacher_momentum)
    weights = [list(part.parameters()) for part in (model.teacher, student)]

    def loss(number: int, batch: CropBatch) -> torch.Tensor:
        return loss_of(batch)

    return build_step(
        run,
        student,
        [functools.partial(loss, batch=batch) for batch in crops],
        after_update=lambda: average(*weights, 0),
    )


def plain_mae_step(
    run: TorchRun, backend: Backend, batches: list[Batch], *, compile_mode: str | None = None
) -> Step:
    """Return the step of masked autoencoding, with the mode of torch.compile, if any. Raises
    UsageError."""
    spec, config = supported_model(run, backend), run.config.of(MaeConfig)
    device = batches[0]["image"].device
    with device:
        model = MaeLoss(
            spec.arguments, config, normalizer(run, backend.constant), autocast(run, device)
        )
    load_initial_weights(run, model)
    loss_of = compiled(model, compile_mode)

    def loss(number: int, images: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
        key = key_of(run.config.seed, "mask", "step", number)
        return loss_of(images, numbers, backend.constant(torch.tensor([key], dtype=torch.int32)))

    parts = [
        functools.partial(loss, images=batch["image"], numbers=batch["position"])
        for batch in batches
    ]
    return build_step(run, model, parts)


def build_step(
    run: TorchRun,
    trained: nn.Module,
    losses: Sequence[Loss],
    after_update: Callable[[], None] = lambda: None,
) -> Step:
    """Return the step that trains ``trained`` on the mean of ``losses``."""
    config, updates = run.config.optimizer, updates_of(run.config.optimizer, run.model)
    assert config.betas is not None  # resolved
    groups: dict[tuple[float, float], dict[str, Any]] = {}
    for name, parameter in trained.named_parameters():
        parameter.requires_grad_(name in updates)
        if name in updates:
            lr, decay = config.lr * updates[name].lr_scale, updates[name].weight_decay
            group = groups.setdefault((lr, decay), {"params": [], "lr": lr, "weight_decay": decay})
            group["params"].append(parameter)
    optimizer = torch.optim.AdamW(
        list(groups.values()), betas=config.betas, eps=config.eps, fused=True
    )

    def step(number: int) -> torch.Tensor:
        parts = backward(loss_of(number) / len(losses) for loss_of in losses)
        clip_and_step(optimizer, config.clip_grad_norm)
        after_update()
        return torch.stack(parts).sum()

    return step


def supported_model(run: TorchRun, backend: Backend) -> TimmSpec:
    """Return the model of ``run``. Raises UsageError if a plain step would compute something
    else."""
    config, spec = run.config, run.model
    requirements = {
        "one GPU": backend.device_count == 1,
        "--precision fp32 or bf16": config.sharding.precision != "fp16",
        "--optimizer adamw": config.optimizer.optimizer == "adamw",
        "timm's VisionTransformer": isinstance(spec, TimmSpec) and spec.kind is VisionTransformer,
        "a run without --teacher": run.teacher is None,
        "a run without --gram_weights": config.of(DinoConfig).gram_weights is None,
    }
    for requirement, is_met in requirements.items():
        if not is_met:
            raise UsageError(f"the plain PyTorch step requires {requirement}", agreed=True)
    assert isinstance(spec, TimmSpec)
    return spec


def load_initial_weights(run: TorchRun, model: nn.Module) -> None:
    """Copy the initial weights of ``run`` to ``model``, whose parameters have the same names."""
    model.load_state_dict(initial_weights(run))


def initial_weights(run: TorchRun) -> dict[str, torch.Tensor]:
    """Return the initial weights of ``run``, whole, by name."""
    filled = run.model.build()
    for name, unit in run.model.units(filled):
        run.model.initialize(unit, name, seed=run.config.seed)
    return filled.state_dict()


def autocast(run: TorchRun, device: torch.device) -> Autocast:
    """Return a function that returns an autocast context in the precision of ``run``."""
    precision = run.config.sharding.precision
    dtype, enabled = DTYPES[precision], precision != "fp32"
    return lambda: torch.autocast(device.type, dtype=dtype, enabled=enabled)


def compiled(model: nn.Module, mode: str | None) -> Callable[..., torch.Tensor]:
    """Return ``model``, whose output is a loss, compiled as one graph if there is a ``mode``."""
    if mode is None:
        return model
    return torch.compile(model, mode=mode, dynamic=False, fullgraph=True)
