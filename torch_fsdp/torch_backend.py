"""The parts that both forms of FSDP share: steps, transfers, reports, checkpoints."""

import abc
import functools
import itertools
import math
import os
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from data.batch import Batch, BatchShard, Fields
from data.loader import BatchLoader
from models.spec import Units
from torch_fsdp.devices import Device, Mark
from torch_fsdp.domain import SharedImages, image_rows
from torch_fsdp.optimizers import LossScale, PartsOptimizer
from torch_fsdp.orthogonalize import Matrix, Orthogonalize, UnequalExchange
from torch_fsdp.parallel_plan import TorchRun
from training.backend import (
    InitializeModule,
    Profiler,
    State,
    StepInputs,
    evaluation_seed,
    micro_batch_seed,
    scan_eagerly,
)
from training.optimizers import (
    COUNTS,
    UPDATES,
    Updates,
    WeightAverage,
    add_loss,
    count_skipped,
    not_finite,
)
from training.processes.exchange import silence_gloo
from training.processes.stopping import all_reduce_max
from training.schedule import StepRates

_REDUCTIONS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX}


class TorchBackend(abc.ABC):
    """The parts of ``training.backend.Backend`` that do not depend on the form of FSDP.

    The optimizer works on plain tensors, this process's part of each parameter: DTensors would add
    dispatch overhead on the host at every step.
    """

    _sharded_alike: list[tuple[Collection[str], list[dist.ProcessGroup]]]
    """The names of all parameters in groups, each with the processes that shard it."""
    shards: tuple[int, ...]
    replicas_here = 1
    scan = staticmethod(scan_eagerly)
    _form: str
    """The form of FSDP, for the line that describes a run."""

    def __init__(self, run: TorchRun, device: Device) -> None:
        self._run, self._device, self._plan = run, device, run.plan
        self._backend_config, self._sharding = run.backend_config, run.config.sharding
        rank, mesh = dist.get_rank(), run.mesh
        self.batch_shard, self.batch_shards = mesh.batch_shard(rank), mesh.batch_shards
        self.image_rows = image_rows(run, rank)
        self.device_count, self.is_main = mesh.devices, rank == 0
        self.compiles = bool(run.backend_config.compile) or device.compiles_all
        self.wait, self.memory = device.synchronize, device.memory
        self._zero = run.plan.zero
        self._reader = ThreadPoolExecutor(max_workers=1, thread_name_prefix="read")
        self._rounds_moments = run.config.optimizer.optimizer_dtype == "bf16"
        self._blocks: list[str] = []
        self._parameters: dict[str, DTensor] = {}
        """The sharded parameters, by names in the plain model."""
        self._locals: dict[str, nn.Parameter] = {}
        """This process's part of each parameter, by names in the plain model."""
        self._clock: BlockClock | None = None
        self._ema: WeightAverage | None = None
        self._frozen: list[TorchBackend] = []
        """The backends of the models passed to ``shard_frozen``."""
        self._follower: TorchBackend | None = None
        self.teacher: nn.Module | None = None
        self._skipped = torch.zeros(len(COUNTS)).to(device.where)
        self.begin_epoch()
        is_fp16 = self._sharding.precision == "fp16"
        self._loss_scale = LossScale(device.where) if is_fp16 else None

    # -- the form of FSDP -------------------------------------------------------------

    @abc.abstractmethod
    def parallelize(
        self, model: nn.Module, units: Units, initialize: InitializeModule
    ) -> nn.Module:
        """Initialize, modify and shard the model, in the order of application; set
        ``_parameters``, ``_sharded_alike`` and ``_form``."""

    @abc.abstractmethod
    def _collect_gradients(self) -> None:
        """Set the gradient of each of ``_locals`` to its part of the complete gradient."""

    @abc.abstractmethod
    def _global_view(self, name: str, values: torch.Tensor) -> torch.Tensor:
        """Return ``values``, laid out like a local parameter, as a part of the global tensor."""

    @abc.abstractmethod
    def _after_load(self) -> None:
        """Update the weights that the model computes with after ``_locals`` got new values."""

    @abc.abstractmethod
    def backward(self, loss: torch.Tensor, *, is_last: bool) -> None: ...

    def _after_update(self) -> None:
        """Free the gradients that ``_collect_gradients`` read, and apply the new weights."""
        for parameter in self._parameters.values():
            parameter.grad = None

    def _orthogonalizer(self, matrices: Mapping[str, Matrix], *, eps: float) -> Orthogonalize:
        """Return what orthogonalizes Muon's ``matrices``, by names in the plain model."""
        views = [self._global_view(name, self._locals[name].detach()) for name in matrices]
        group = next(iter(self._sharded_alike[0][1]), None)
        return UnequalExchange([*matrices.values()], views, group, eps)

    # -- model and optimizer ----------------------------------------------------------

    def shard(self, model: nn.Module, units: Units, initialize: InitializeModule) -> nn.Module:
        self._blocks = [name for name, _ in units[:-1]]
        sharded = self.parallelize(model, units, initialize)
        if dist.get_world_size() > 1:
            self._clock = BlockClock(map(model.get_submodule, self._blocks), self._device)
        self._locals = {
            name: nn.Parameter(parameter.to_local().detach())
            for name, parameter in self._parameters.items()
        }
        return sharded

    def shard_frozen(
        self,
        run: TorchRun,
        model: nn.Module,
        initialize: InitializeModule,
        *,
        follows_teacher: bool = False,
    ) -> nn.Module:
        with silence_gloo():
            frozen = type(self)(run, self._device)
        sharded = frozen.shard(model, list(run.model.units(model)), initialize).eval()
        self._frozen.append(frozen)
        if follows_teacher:
            self._follower = frozen
        if self.teacher is None:
            self.teacher = sharded
        return sharded

    @torch.no_grad()
    def copy_teacher(self) -> None:
        assert self._follower is not None
        for name, part in self._follower._locals.items():
            part.copy_(self._frozen[0]._locals[name])
        self._follower._after_load()

    def build_optimizer(self, updates: Updates, *, betas: tuple[float, float], eps: float) -> None:
        is_traced = self._plan.compile == "step"  # whole, in plain operations
        compiles = self._backend_config.compile and self._device.compiles_all and not is_traced
        self._optimizer = PartsOptimizer(
            self._locals,
            lambda name: self._global_view(name, self._locals[name].detach()),
            updates,
            self._run.config,
            eps=eps,
            betas=betas,
            fused=self._device.fused_adamw and not is_traced,
            orthogonalizer=functools.partial(self._orthogonalizer, eps=eps),
            units=self._blocks,
            compiler=self._plan.compiler if compiles else None,
        )
        if self._run.config.averages:
            updates_seen = torch.zeros((), device=next(iter(self._locals.values())).device)
            values: Mapping[str, torch.Tensor]
            if self._run.config.objective.has_teacher:
                values = self._frozen[0]._locals
            else:
                values = {name: torch.zeros_like(part) for name, part in self._locals.items()}
            self._ema = WeightAverage(self._locals, values, self._run.config.ema, updates_seen)

    # -- a step -----------------------------------------------------------------------

    def loader(
        self, open_shard: Callable[[BatchShard], BatchLoader], images: int, *, reads_rows: bool
    ) -> BatchLoader:
        mesh, host_processes = self._run.mesh, int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        sharing = mesh.devices_a_part
        if sharing == 1 or reads_rows:
            rows = None if mesh.domain == 1 else self.image_rows
            return open_shard(
                BatchShard(self.batch_shard, self.batch_shards, rows, of_host=host_processes)
            )
        # Processes that share images load some of them each, and send each other the rows.
        shared_images = images // self.batch_shards
        sources, index = math.gcd(sharing, shared_images), dist.get_rank() % sharing
        share = BatchShard(
            self.batch_shard * sources + min(index, sources - 1),
            self.batch_shards * sources,
            loads=index < sources,
            of_host=host_processes,
        )
        rows_by_process = [image_rows(self._run, place) for place in range(sharing)]
        # A separate group for CPU tensors.
        ranks = torch.arange(mesh.devices).view(-1, sharing).tolist()
        with silence_gloo():
            group, _ = dist.new_subgroups_by_enumeration(ranks, backend="gloo")
        return SharedImages(
            open_shard(share), group, rows_by_process, sources, shared_images // sources
        )

    def put(self, batch: Batch, fields: Fields) -> Batch:
        if self._backend_config.channels_last:
            formats = {4: torch.channels_last, 5: torch.channels_last_3d}
            batch = {
                name: x.contiguous(memory_format=formats[x.dim()]) if name == "image" else x
                for name, x in batch.items()
            }
        return dict(zip(batch, self._device.put([*batch.values()]), strict=True))

    def constant(self, values: torch.Tensor) -> torch.Tensor:
        return values.to(self._device.where, non_blocking=True)  # do not wait for the device

    def run_step(
        self, compute: Callable[[StepInputs], dict[str, torch.Tensor]], inputs: StepInputs
    ) -> dict[str, torch.Tensor]:
        return compute(inputs)

    def run_evaluation(self, compute: Callable[[Any], Any], inputs: Any, batch_index: int) -> Any:
        self._seed(evaluation_seed(self._run.config.seed, batch_index, self.batch_shard))
        return compute(inputs)

    def begin_epoch(self) -> None:
        self.epoch_loss = torch.zeros(2).to(self._device.where)

    def begin_micro_batch(self, micro_batch_index: int) -> None:
        self._seed(micro_batch_seed(self._run.config.seed, micro_batch_index, self.batch_shard))

    def _seed(self, seed: int) -> None:
        torch.default_generator.manual_seed(seed)
        self._device.seed(seed)

    @torch.no_grad()
    def optimizer_step(
        self, rates: StepRates, max_norm: float, loss: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        self._collect_gradients()
        if self._loss_scale is not None:
            parts = self._locals.values()
            self._loss_scale.unscale([part.grad for part in parts if part.grad is not None])
        norm = self._clip_grad_norm(max_norm)
        skipped = not_finite(loss, norm)
        mesh = self._run.mesh
        if self._zero == 0 or mesh.dcn > 1 or mesh.devices_a_part > 1:
            # Several processes hold the same part of a parameter, or compute the loss of the same
            # images. Each has computed its own norm, but all must make the same decision.
            skipped = self._all_reduce(skipped, "max")
        bad = skipped
        if self._loss_scale is not None:
            # An overflow of gradients is not a bad step as long as the scale can still shrink.
            bad_loss = not_finite(loss, loss)
            bad = torch.maximum(bad_loss, skipped * self._loss_scale.is_least())
            self._loss_scale.update(overflowed=skipped, counts=1 - bad_loss)
        self._skipped = count_skipped(self._skipped, bad)
        self.epoch_loss = add_loss(self.epoch_loss, loss, bad)
        self._optimizer.step_unless(rates, skipped)
        if self._ema is not None:
            self._ema.update(skipped, rates.newest)
        if self._run.config.objective.has_teacher:
            self._frozen[0]._after_load()
        for part in self._locals.values():
            part.grad = None
        self._after_update()
        if self._clock is not None:
            self._clock.end_step()
        return norm, self._skipped

    def _clip_grad_norm(self, max_norm: float) -> torch.Tensor:
        """Clip gradients to ``max_norm``, if above 0; return their norm before clipping, a scalar.

        PyTorch's own function uses each DTensor's norm; uneven parts need one sum of squares.
        """
        squares = []
        for names, groups in self._sharded_alike:
            parts = (self._locals[name].grad for name in self._locals if name in names)
            gradients = [grad for grad in parts if grad is not None]
            square = nn.utils.get_total_norm(gradients, foreach=True).to(self._device.where)
            squares.append(square.square())
            for group in groups:
                squares[-1] = self._all_reduce(squares[-1], group=group)
        norm = sum(squares[1:], start=squares[0]).sqrt()
        if max_norm > 0:
            nn.utils.clip_grads_with_norm_(self._locals.values(), max_norm, norm, foreach=True)
        return norm

    def ema_weights(self) -> AbstractContextManager[None]:
        assert self._ema is not None
        return self._ema.in_place_of_weights(self._after_load)

    def mean(self, value: torch.Tensor) -> torch.Tensor:
        return self.sum(value) / self.batch_shards

    def sum(self, value: torch.Tensor) -> torch.Tensor:
        # Devices of a part have added the same value.
        return self._all_reduce(value.clone()) / self._run.mesh.devices_a_part

    def _all_reduce(
        self,
        values: torch.Tensor,
        op: Literal["sum", "max"] = "sum",
        group: dist.ProcessGroup | None = None,
    ) -> torch.Tensor:
        """Return the reduction of ``values``, which may be overwritten, over the processes of
        ``group``, by default all."""
        dist.all_reduce(values, _REDUCTIONS[op], group=group)
        return values

    @functools.cached_property
    def _replicas(self) -> dist.ProcessGroup | None:
        """One process of each replica, this one among them; None: all processes."""
        mesh = self._run.mesh
        if mesh.devices_a_part == 1:
            return None
        ranks = torch.arange(mesh.devices).view(-1, mesh.devices_a_part).T.tolist()
        with silence_gloo():
            group, _ = dist.new_subgroups_by_enumeration(ranks)
        return group

    def all_gather(self, values: torch.Tensor) -> torch.Tensor:
        gathered = values.new_empty(self.batch_shards, *values.shape[1:])
        dist.all_gather_into_tensor(gathered, values.detach().contiguous(), self._replicas)
        return gathered

    def end_step(self) -> None:  # noqa: B027
        """Do nothing: eager devices run each operation when it is called."""

    def read(self, values: Mapping[str, torch.Tensor]) -> Future[dict[str, list[float]]]:
        names, host = list(values), self._device.read([v.detach() for v in values.values()])
        return self._reader.submit(
            lambda: {n: v.flatten().tolist() for n, v in zip(names, host(), strict=True)}
        )

    def read_images(self, values: Mapping[str, torch.Tensor]) -> Future[dict[str, torch.Tensor]]:
        names, host = list(values), self._device.read([v.detach() for v in values.values()])
        return self._reader.submit(lambda: dict(zip(names, host(), strict=True)))

    def close(self) -> None:
        """Free what Python's garbage collector cannot; the backend is unusable afterwards."""
        self._reader.shutdown()
        for backend in self._frozen:
            backend.close()

    barrier = staticmethod(dist.barrier)
    all_reduce_max = staticmethod(all_reduce_max)

    # -- reports ----------------------------------------------------------------------

    def describe(self) -> str:
        config, sharding, mesh = self._backend_config, self._sharding, self._run.mesh
        parts = [
            f"{self.device_count} {self._device.name} device(s), {self._device.collectives_name}",
            self._form + self._run.why.get("fsdp", ""),
            str(mesh),
            sharding.precision + (" with TF32" if config.tf32 else ""),
            f"gradients reduced in {config.reduce_dtype}",
            f"activation checkpointing {sharding.grad_ckpt}",
            str(self._plan.blocks),
        ]
        flags = {
            f"{self._plan.attention} attention": self._plan.attention != "sdpa",
            "moments in bf16": self._rounds_moments,
            "torch.compile": config.compile,
            "channels last": config.channels_last,
            "CPU offload": config.cpu_offload,
        }
        used = [name for name, on in flags.items() if on]
        return f"{self._device.noun}: {', '.join(parts + used)}"

    def profiler(self, folder: Path) -> Profiler:
        return self._device.profiler(folder, dist.get_rank())

    def counters(self) -> dict[str, int]:
        return self._device.counters() if self.compiles else {}

    def compile_seconds(self) -> float:
        return 0.0  # unknown for TorchTPU, which compiles as part of running

    def local_compute_seconds(self) -> list[float]:
        return [] if self._clock is None else self._clock.take()

    def state_bytes(self) -> dict[str, int]:
        state = [t for entry in self._optimizer.state.values() for t in entry.values()]
        tensors: dict[str, Iterable[torch.Tensor]] = {
            "parameters": self._locals.values(),
            "optimizer": state,
        }
        if self._ema is not None and not self._run.config.objective.has_teacher:
            tensors["ema"] = self._ema.values.values()
        if self._frozen:
            parameters = [frozen._locals.values() for frozen in self._frozen]
            tensors["teacher"] = itertools.chain(*parameters)
        return {name: sum(tensor.nbytes for tensor in kind) for name, kind in tensors.items()}

    def local_parameters(self) -> Iterable[tuple[Sequence[str], int]]:
        return [([name], part.numel()) for name, part in self._locals.items()]

    def unit_roundoff(self) -> float:
        distances = [
            torch.finfo(self._plan.dtype).eps,
            torch.finfo(self._plan.reduce_dtype).eps,
        ]
        if self._backend_config.tf32:
            distances.append(torch.finfo(torch.float16).eps)  # TF32 has as many mantissa bits
        if self._rounds_moments:  # stochastic rounding is off by up to a whole unit
            distances.append(2 * torch.finfo(torch.bfloat16).eps)
        in_bytes = (self._plan.matmul, self._plan.gather_dtype)
        if self._plan.blocks.fp8 != "none" or torch.float8_e4m3fn in in_bytes:
            distances.append(torch.finfo(torch.float8_e4m3fn).eps)
        return max(distances) / 2

    def peak_flops(self) -> float | None:
        return self._device.peak_flops(self._plan.products)

    # -- checkpoints ------------------------------------------------------------------

    def state(self, *, with_optimizer: bool = True) -> State:
        """Return the tensors that steps use (not copies), by names in the plain model."""
        model, optimizer = {}, {}
        for name, part in self._locals.items():
            model[name] = self._global_view(name, part.detach())
            if with_optimizer and part in self._optimizer.state:
                optimizer[name] = {
                    entry: value if entry == "step" else self._global_view(name, value)
                    for entry, value in self._optimizer.state[part].items()
                }
        if not with_optimizer:
            return State(model, None, {})
        step = {} if self._loss_scale is None else self._loss_scale.state()
        ema = None
        if self._ema is not None:
            step[UPDATES] = self._ema.updates.cpu()
            ema = {name: self._global_view(name, t) for name, t in self._ema.values.items()}
        gram = None
        if self._follower is not None:
            parts = self._follower._locals.items()
            gram = {name: self._global_view(name, part.detach()) for name, part in parts}
        return State(model, optimizer, step, ema, gram)

    def load_state(self, state: State) -> None:
        if self._loss_scale is not None and "loss_scale" in state.step:
            self._loss_scale.restore(state.step)
        if self._ema is not None and state.ema is None:
            self._ema.start()
        elif self._ema is not None:
            self._ema.updates.copy_(state.step[UPDATES])
        for model in (self, *self._frozen):
            model._after_load()


class BlockClock:
    """Measures, for each step, the seconds in which this process computes without waiting for
    others: the forward and backward passes of the model's blocks, which are most of a step.

    FSDP gathers a block's weights before its pass and reduces gradients after it, so within a pass
    no process waits for another (except for those that share an image, ``--mesh_domain``). These
    hooks are registered after FSDP's, so they run inside them.
    """

    def __init__(self, blocks: Iterable[nn.Module], device: Device) -> None:
        self._device = device
        self._spans: list[tuple[Mark, Mark]] = []
        """The start and end of each pass of a block, in the current step."""
        self._steps: deque[list[tuple[Mark, Mark]]] = deque(maxlen=64)
        """The passes of previous steps; bounded, since ``take`` may be called late or never."""
        self._before: tuple[Mark, torch.Tensor] | None = None
        for block in blocks:
            block.register_forward_pre_hook(self._starts)
            block.register_forward_hook(self._ended)

    def _starts(self, block: nn.Module, inputs: tuple[Any, ...]) -> None:
        self._before = (self._device.mark(), inputs[0]) if block.training else None

    def _ended(self, block: nn.Module, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
        if self._before is None:
            return
        (started, x), self._before = self._before, None
        self._spans.append((started, self._device.mark()))
        if not (x.requires_grad and output.requires_grad):
            return  # no backward pass, or the first block after a frozen part
        backward: list[Mark] = []
        output.register_hook(lambda _: backward.append(self._device.mark()))
        x.register_hook(lambda _: self._spans.append((backward[-1], self._device.mark())))

    def end_step(self) -> None:
        """End the current step."""
        self._steps.append(self._spans)
        self._spans = []

    def take(self) -> list[float]:
        """Return the seconds of the finished steps, in order, that were not returned before."""
        finished = []
        while self._steps:
            seconds = self._device.seconds_of(self._steps[0])
            if seconds is None:
                break
            self._steps.popleft()
            finished.append(seconds)
        return finished
