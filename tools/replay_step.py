"""Finds the origin of NaN or infinity in a step: ``python3 -m tools.replay_step RUN/bad_step_7``.

The folder is written by ``--save_bad_step``. The step is recomputed in plain PyTorch, in one CPU
process, from the images of its batch and its weights. The values of every module are checked, up to
the first NaN or infinity. If all are finite in fp32, the step is recomputed in the run's precision.
"""

import contextlib
import functools
import heapq
import math
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

if __name__ == "__main__":  # by its path from any folder, or by another Python
    sys.path[0] = str(Path(__file__).resolve().parent.parent)
    import check_python

    check_python.check("tools.replay_step")

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from config_fields import local_path, positive
from data.batch import Batch, BatchShard, micro_batches
from data.config import DataConfig
from data.files import printable
from data.open import open_data
from data.source import DataSource
from data.utf8 import use_utf8
from torch_fsdp.config import Fsdp2Config
from torch_fsdp.parallel_plan import DTYPES
from training.backend import Backend, micro_batch_seed
from training.bad_step import BadStep, read_bad_step
from training.checkpoints.compatible import other_order
from training.checkpoints.config import CheckpointConfig
from training.checkpoints.format import EMA, SavedRun, read_saved_run
from training.command_line import OneLineParser
from training.config import EmaConfig, LogConfig, RunConfig, ShardingConfig, UseConfig
from training.data import dataset_request
from training.errors import UsageError, data_errors_as_usage_errors
from training.flags import from_values
from training.mesh import Mesh
from training.objectives.base import Objective
from training.objectives.registry import open_objective
from training.optimizers import updates_of
from training.processes.output import exit_quietly_on_broken_pipe
from training.resolve import Run, check_batch, resolve_common, resolve_model
from training.step import begin_step
from training.teachers import with_teacher
from training.weights.adapt import adapt
from training.weights.source import Source, check_files

PROGRAM = "tools.replay_step"
_SHOWN = 5
"""Modules in the table of the largest values."""
_LARGE_PIXEL = 1e3
"""Normalized images have values of a few units; larger ones are named."""

# -- the run, in one process -----------------------------------------------------------------------


class OneProcess:
    """What an objective asks of a backend, of the CPU alone."""

    is_main, batch_shard, batch_shards = True, 0, 1

    def __init__(self, run: Run, teacher: nn.Module | None) -> None:
        self.teacher = teacher
        self.image_rows = range(run.model.sizes.input_shape[1])

    def constant(self, values: torch.Tensor) -> torch.Tensor:
        return values

    mean = sum = constant

    def shard_frozen(self, run: Run, model: nn.Module, initialize: Any) -> nn.Module:
        initialize(model, "")
        return model.eval()


def plain_run(saved: SavedRun, bad_step: BadStep, data_dir: str | None) -> Run:
    """Return the run that wrote the folder, as far as it decides the step's numbers. Raises
    UsageError."""
    arguments = dict(saved.arguments)
    if data_dir is not None:
        arguments |= {"data_dir": data_dir, "index_dir": DataConfig.index_dir}
    config: RunConfig = from_values(RunConfig, arguments)
    config = replace(
        config,
        backend="cuda",
        data=replace(config.data, num_workers=0),
        ema=EmaConfig(),
        checkpoints=CheckpointConfig(),
        log=LogConfig(),
        use=UseConfig(),
        sharding=ShardingConfig(),
    )
    mesh = Mesh(**bad_step.mesh)

    def resolved(config: RunConfig) -> Run:
        config, model = resolve_model(resolve_common(config))
        return Run(config, Fsdp2Config(), model, mesh, None)

    return with_teacher(resolved(config), resolved)


@dataclass
class Replayed:
    """A step's models and its objective, on the CPU in fp32."""

    run: Run
    bad_step: BadStep
    models: dict[str, nn.Module]
    """The trained model as "", and "teacher"."""
    backend: Backend
    objective: Objective


def build(run: Run, bad_step: BadStep, weights: Source) -> Replayed:
    """Return the models with their weights. Raises UsageError."""
    models = {"": run.build_model(torch.Tensor.contiguous)}
    adapt(weights, run.model, unchanged=True).initialize(models[""], "")
    updates = updates_of(run.config.optimizer, run.model)
    for name, parameter in models[""].named_parameters():
        parameter.requires_grad_(name in updates)
    if run.config.objective.has_teacher:
        teacher = run.build_model(torch.Tensor.contiguous).requires_grad_(False).eval()
        ema = replace(weights, kind=EMA)
        adapt(ema, run.model, unchanged=True).initialize(teacher, "")
        models["teacher"] = teacher
    backend = cast(Backend, OneProcess(run, models.get("teacher")))
    objective = open_objective(run, backend)
    models |= objective.frozen_models()
    return Replayed(run, bad_step, models, backend, objective)


# -- the batch -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Images:
    """The images of the step's batch, in its order."""

    batch: Batch
    names: list[str]
    """Where each is found; empty if they are not in files."""
    total: int
    """How many the whole batch has."""

    def describe(self) -> str:
        """Return one line about their values."""
        images = self.batch.get("image", next(iter(self.batch.values())))
        shape = " x ".join(map(str, images.shape[1:]))
        text = f"images: {len(images)} of the batch's {self.total}, {shape}, {images.dtype}"
        if not images.is_floating_point():
            return text.replace("torch.", "")
        largest = images.flatten(1).abs().nan_to_num(torch.inf, torch.inf).amax(1)
        place = int(largest.argmax())
        name = f" in {self.names[place]}" if self.names else f" in image {place}"
        text += f", largest |value| {largest[place]:.3g}{name}"
        if largest[place] > _LARGE_PIXEL:
            text += f" (above {_LARGE_PIXEL:g} is unusual: check this image first)"
        return text.replace("torch.", "")


def read_images(run: Run, bad_step: BadStep, data: DataSource) -> Images:
    """Return the images of the step's batch. Raises DataFolderError."""
    batch_size, train = run.config.data.batch_size, data.splits["train"]
    loader = train.with_index().batches(batch_size, BatchShard(), bad_step.steps)
    first = bad_step.images_in_epoch // batch_size
    if first >= len(loader):
        raise UsageError(
            f"the step used batch {first + 1} of its epoch, but {data.name} has {len(loader)} "
            "batches: set --data_dir to the run's images"
        )
    batch = next(iter(loader.epoch(bad_step.epoch, first)))
    names = [printable(train.name_of(number)) for number in batch.pop("index").tolist()]
    return Images(batch, names, len(names))


def first_images(run: Run, images: Images, count: int) -> tuple[Run, Images]:
    """Return the run of a batch of the first ``count`` images, in one pass. Raises UsageError."""
    few = replace(run, mesh=Mesh()).with_data(
        batch_size=count, grad_accum_steps=1, micro_batch_size=None
    )
    try:
        check_batch(few)
    except UsageError as error:
        raise UsageError(f"--images {count}: {error}") from None
    batch = {name: values[:count] for name, values in images.batch.items()}
    return few, Images(batch, images.names[:count], images.total)


# -- looking at values -----------------------------------------------------------------------------


class NotFinite(Exception):
    """Raised at the first value that is NaN or infinite; the text says where."""


class Watch:
    """Looks at the inputs, parameters and outputs of all modules, and at their gradients, as they
    are computed. Raises NotFinite."""

    def __init__(self) -> None:
        self.largest: dict[str, float] = {}
        """The largest absolute value of each module's outputs, by its name."""
        self._newest: torch.Tensor | None = None

    @contextlib.contextmanager
    def over(self, models: Mapping[str, nn.Module]) -> Iterator[None]:
        """Look at these models inside; their names come before those of their modules."""
        with contextlib.ExitStack() as hooks:
            for prefix, model in models.items():
                for name, module in model.named_modules():
                    full = ".".join(filter(None, [prefix, name])) or "the model"
                    own = {
                        ".".join(filter(None, [prefix, name, key])): parameter
                        for key, parameter in module.named_parameters(recurse=False)
                    }
                    before = functools.partial(self._before, full, own)
                    after = functools.partial(self._after, full)
                    hooks.callback(module.register_forward_pre_hook(before).remove)
                    hooks.callback(module.register_forward_hook(after).remove)
                    for key, parameter in own.items():
                        if parameter.requires_grad:
                            hook = self._on_gradient(f"gradient of the weight {key}")
                            hooks.callback(parameter.register_hook(hook).remove)
            yield

    def _before(
        self, name: str, own: Mapping[str, nn.Parameter], module: nn.Module, inputs: Any
    ) -> None:
        for tensor in _floats(inputs):
            self.check(f"input of {name}", tensor)
        for key, parameter in own.items():
            self.check(f"weight {key}", parameter)

    def _after(self, name: str, module: nn.Module, inputs: Any, outputs: Any) -> None:
        for tensor in _floats(outputs):
            if tensor is self._newest:  # handed on: by an Identity, or as a block's last layer's
                continue
            self._newest = tensor
            largest = self.check(f"output of {name}", tensor)
            self.largest[name] = max(largest, self.largest.get(name, 0.0))
            if tensor.requires_grad:
                tensor.register_hook(self._on_gradient(f"gradient of the output of {name}"))

    def _on_gradient(self, what: str) -> Callable[[torch.Tensor], None]:
        def look(gradient: torch.Tensor) -> None:
            self.check(what, gradient)

        return look

    @torch.no_grad()
    def check(self, what: str, tensor: torch.Tensor) -> float:
        """Return the largest absolute value. Raises NotFinite, with ``what`` it is."""
        if not tensor.numel():
            return 0.0
        low, high = (end.item() for end in tensor.detach().float().aminmax())
        if math.isfinite(low) and math.isfinite(high):
            return max(-low, high)
        nan, infinite = int(tensor.isnan().sum()), int(tensor.isinf().sum())
        others = tensor.detach().float()[tensor.isfinite()].abs()
        largest = f", largest finite |value| {others.max():.3g}" if others.numel() else ""
        raise NotFinite(
            f"{what}: {nan:,} NaN and {infinite:,} infinite of {tensor.numel():,} values{largest}"
        )


def _floats(values: Any) -> list[torch.Tensor]:
    """Return the floating-point tensors in nested tuples, lists and dictionaries."""
    leaves = tree_leaves(values)
    return [x for x in leaves if isinstance(x, torch.Tensor) and x.is_floating_point()]


def compute(step: Replayed, images: Images, precision: str, watch: Watch) -> tuple[float, float]:
    """Return the loss and the gradient norm of the step. Raises NotFinite."""
    run, model, count = step.run, step.models[""], step.run.config.data.grad_accum_steps
    parts = step.bad_step.batch_shards if count > 1 else 1
    batch = images.batch
    if step.objective.takes_positions:
        batch = batch | {"position": torch.arange(len(next(iter(batch.values()))))}
    model.train()
    model.zero_grad()
    begin_step(model, step.objective, step.backend, step.bad_step.step_rates)
    total = 0.0
    with _in_precision(step.models.values(), precision), watch.over(step.models):
        for index, part in enumerate(micro_batches(batch, parts, count)):
            number = step.bad_step.passes[index]
            torch.manual_seed(micro_batch_seed(run.config.seed, number, 0))
            loss = step.objective.loss(model, part, number) / count
            watch.check("loss", loss)
            loss.backward()
            total += loss.item()
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    watch.check("gradient norm", nn.utils.get_total_norm(gradients))
    return total, nn.utils.get_total_norm(gradients).item()


@contextlib.contextmanager
def _in_precision(models: Iterable[nn.Module], precision: str) -> Iterator[None]:
    """Let the models compute in a precision inside; losses stay in fp32."""
    with contextlib.ExitStack() as stack:
        if precision != "fp32":
            for model in models:
                lower = torch.autocast("cpu", DTYPES[precision])
                model.forward = lower(model.forward)
                stack.callback(delattr, model, "forward")
        yield


def replay(step: Replayed, images: Images, precision: str) -> bool:
    """Compute the step in a precision and print what is not finite, or that all is finite, and
    which values are the largest. Return True if all is finite."""
    watch, is_finite = Watch(), True
    try:
        loss, norm = compute(step, images, precision, watch)
        print(f"in {precision} all values are finite: loss {loss:.6g}, gradient norm {norm:.4g}")
    except NotFinite as error:
        is_finite = False
        print(f"in {precision} the first tensor that is not finite: {error}")
    if watch.largest:
        print("largest |value| in module outputs computed so far:")
        for name in heapq.nlargest(_SHOWN, watch.largest, watch.largest.__getitem__):
            print(f"  {watch.largest[name]:10.4g}  {name}")
    return is_finite


# -- the command line ------------------------------------------------------------------------------


def describe(bad_step: BadStep, run: Run) -> Iterator[str]:
    """Yield lines about the step, and about how far the folder is enough to compute it."""
    logged = bad_step.logged
    batch = bad_step.images_in_epoch // run.config.data.batch_size
    values = ", ".join(
        f"{name} {value:.6g}" if isinstance(value, float) else f"{name} {value}"
        for name, value in logged.items()
        if name in ("loss", "grad_norm") or name.startswith("loss_")
    )
    yield (
        f"step {bad_step.step}: batch {batch + 1} of epoch {bad_step.epoch + 1}, global batch "
        f"{run.config.data.batch_size}; logged at step {logged.get('step')}: {values}"
    )
    if bad_step.is_exact:
        yield f"weights: exactly those before step {bad_step.step}"
        return
    before = bad_step.checkpoint_before
    yield (
        f"weights: those after step {bad_step.saved_after}, not exactly those of step "
        f"{bad_step.step}, as {bad_step.good_steps_since} finite step(s) followed it; for the "
        f"exact ones, train again from {before or 'the start'} in another --ckpt_dir with the "
        "run's flags and "
        + (f"--resume RUN/{before} " if before else "")
        + "--log_step_interval 1 --save_bad_step"
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Compute the step again as the command line says; return the exit code."""
    parser = OneLineParser(
        PROGRAM,
        "Recompute a step whose loss or gradient norm was not finite, in plain PyTorch on the CPU, "
        "and name the first module with a NaN or infinite value.",
    )
    parser.add_argument(
        "folder", type=local_path, help="bad_step_N in a run's --ckpt_dir, from --save_bad_step"
    )
    parser.add_argument(
        "--data_dir",
        metavar="FOLDER",
        help="the run's images, if they have moved (default: where the run read them)",
    )
    parser.add_argument(
        "--images",
        type=positive,
        metavar="N",
        help="compute only the first N images of the batch, to save memory and time (default: all)",
    )
    parser.add_argument(
        "--precision",
        choices=tuple(DTYPES),
        help="compute only in this precision (default: fp32, then the run's if all values are "
        "finite)",
    )
    parser.add_argument(
        "--no_verify_checkpoint",
        action="store_true",
        help="skip the verification of the weights' checksums (default: verify)",
    )
    options = parser.parse_args(argv)
    try:
        with data_errors_as_usage_errors():
            _replay(options)
    except UsageError as error:
        print(f"{PROGRAM}: error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"{PROGRAM}: interrupted", file=sys.stderr)
        return 130
    return 0


def _replay(options: Any) -> None:
    """Do what the command line says. Raises UsageError or DataFolderError."""
    folder: Path = options.folder
    bad_step, saved = read_bad_step(folder), read_saved_run(folder)
    weights = Source(folder, saved)
    check_files(weights, verify=not options.no_verify_checkpoint)
    run = plain_run(saved, bad_step, options.data_dir)
    for line in describe(bad_step, run):
        print(line)
    data = open_data(dataset_request(run, labels=run.config.objective.uses_labels))
    if difference := other_order(saved, run, data):
        print(f"note: these are not the run's images: {difference}")
    images = read_images(run, bad_step, data)
    if options.images and options.images < images.total:
        run, images = first_images(run, images, options.images)
    print(images.describe(), flush=True)
    step = build(run, bad_step, weights)
    precision = options.precision or "fp32"
    all_finite = replay(step, images, precision)
    of_run = saved.arguments.get("precision", "fp32")
    if all_finite and not options.precision and of_run in DTYPES and of_run != "fp32":
        replay(step, images, of_run)


if __name__ == "__main__":
    use_utf8()
    with exit_quietly_on_broken_pipe(PROGRAM):
        sys.exit(main())
