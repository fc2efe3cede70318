"""What every form of FSDP shares: steps, transfers, reports, checkpoints."""

import abc
import itertools
from collections.abc import Callable, Collection, Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from data.loader import Batch, BatchLoader, Share
from torch_fsdp.block_clock import BlockClock
from torch_fsdp.devices import Device
from torch_fsdp.domain import image_rows, open_loader
from torch_fsdp.optimizers import LossScale, PartsOptimizer
from torch_fsdp.recipe import DTYPES, TorchRun
from training.backend import InitializeModule, State, pass_seed
from training.optimizers import COUNTS, UPDATES, Updates, WeightAverage, count_skipped, not_finite
from training.processes.exchange import without_greetings
from training.processes.stopping import largest_of_all
from training.resolve import Run
from training.schedule import StepRates


class TorchBackend(abc.ABC):
    """The parts of ``training.backend.Backend`` that do not depend on the form of FSDP.

    The optimizer works on plain tensors, each process's own part of each parameter: DTensors would
    cost the host their dispatch at every step.
    """

    _parameters: dict[str, DTensor]
    """What the form shards, by names in the plain model."""

    def __init__(self, run: TorchRun, device: Device) -> None:
        self._run, self._device, self._recipe = run, device, run.recipe
        self._own, self._sharding = run.own, run.config.sharding
        rank, mesh = dist.get_rank(), run.mesh
        self.rank, self.world_size = mesh.batch_part(rank), mesh.batch_parts
        self.image_rows = image_rows(run, rank)
        self.device_count, self.is_main = mesh.devices, rank == 0
        self.compiles = bool(run.own.compile) or device.compiles_all
        self._compiles_updates = bool(run.own.compile) and device.compiles_all
        self._zero = run.recipe.zero
        self._reader = ThreadPoolExecutor(max_workers=1, thread_name_prefix="read")
        self._rounds_moments = run.config.optimizer.optimizer_dtype == "bf16"
        self._locals: dict[str, nn.Parameter] = {}
        """This process's part of each parameter, by names in the plain model."""
        self._clock: BlockClock | None = None
        self._ema: WeightAverage | None = None
        self._frozen: list[TorchBackend] = []
        self.teacher: nn.Module | None = None
        self._skipped = torch.zeros(len(COUNTS)).to(device.where)
        is_fp16 = run.config.sharding.precision == "fp16"
        self._loss_scale = LossScale(device.where) if is_fp16 else None

    # -- the form of FSDP -------------------------------------------------------------

    @abc.abstractmethod
    def _parallelize(
        self, model: nn.Module, units: list[tuple[str, nn.Module]], initialize: InitializeModule
    ) -> nn.Module:
        """Fill, change and shard the model; set ``_parameters``."""

    @abc.abstractmethod
    def _collect_gradients(self) -> None:
        """Give each of ``_locals`` its part of the complete gradient."""

    @abc.abstractmethod
    def _global_view(self, name: str, values: torch.Tensor) -> torch.Tensor:
        """Return ``values``, laid out as a local parameter, as a part of the global tensor."""

    @abc.abstractmethod
    def _shard_groups(self) -> list[dist.ProcessGroup]:
        """Return the group of the processes that a parameter is sharded over, if it is."""

    @abc.abstractmethod
    def _describe_form(self) -> str: ...

    @abc.abstractmethod
    def _after_load(self) -> None:
        """Update what the model computes with: ``_locals`` have new values."""

    def _drop_gradients(self) -> None:
        """Free the gradients that ``_collect_gradients`` read."""
        for parameter in self._parameters.values():
            parameter.grad = None

    def _sharded_alike(self) -> list[tuple[Collection[str], list[dist.ProcessGroup]]]:
        """Return all parameters' names, in groups, with the processes that shard each group."""
        return [(self._locals.keys(), self._shard_groups())]

    # -- model and optimizer ----------------------------------------------------------

    def shard(
        self, model: nn.Module, units: list[tuple[str, nn.Module]], initialize: InitializeModule
    ) -> nn.Module:
        self._blocks = [name for name, _ in units[:-1]]
        sharded = self._parallelize(model, units, initialize)
        if dist.get_world_size() > 1:
            self._clock = BlockClock(map(model.get_submodule, self._blocks), self._device)
        self._locals = {
            name: nn.Parameter(parameter.to_local().detach())
            for name, parameter in self._parameters.items()
        }
        return sharded

    def shard_frozen(
        self, run: Run[Any], model: nn.Module, initialize: InitializeModule
    ) -> nn.Module:
        assert isinstance(run, TorchRun)
        with without_greetings():
            frozen = type(self)(run, self._device)
        sharded = frozen.shard(model, list(run.model.units(model)), initialize).eval()
        self._frozen.append(frozen)
        if self.teacher is None:
            self.teacher = sharded
        return sharded

    def build_optimizer(self, updates: Updates, *, betas: tuple[float, float], eps: float) -> None:
        self._optimizer = PartsOptimizer(
            self._locals,
            lambda name: self._global_view(name, self._locals[name].detach()),
            updates,
            self._run.config,
            eps=eps,
            betas=betas,
            fused=self._device.fused_adamw,
            group=next(iter(self._shard_groups()), None),
            units=self._blocks,
            compiler=self._recipe.compiler if self._compiles_updates else None,
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
        self, open_share: Callable[[Share], BatchLoader], images: int, *, reads_rows: bool
    ) -> BatchLoader:
        return open_loader(self._run, open_share, images, reads_rows=reads_rows)

    def put(self, batch: Batch) -> Batch:
        images, labels = batch
        if self._own.channels_last:
            last = torch.channels_last if images.dim() == 4 else torch.channels_last_3d
            images = images.contiguous(memory_format=last)
        images, labels = self._device.put([images, labels])
        return images, labels

    def constant(self, values: torch.Tensor) -> torch.Tensor:
        return values.to(self._device.where, non_blocking=True)  # or it would wait for the device

    def begin_step(self, pass_index: int) -> None:
        seed = pass_seed(self._run.config.seed, pass_index, self.rank)
        torch.default_generator.manual_seed(seed)
        self._device.seed(seed)

    @abc.abstractmethod
    def backward(self, loss: torch.Tensor, *, is_last: bool) -> None: ...

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
        if self._zero == 0 or mesh.dcn > 1 or mesh.domain > 1:
            # Several processes hold the same part of a parameter, or compute the loss of the same
            # images: each has computed a norm of its own, and they must decide alike.
            dist.all_reduce(skipped, op=dist.ReduceOp.MAX)
        bad = skipped
        if self._loss_scale is not None:
            # No overflow of gradients is a bad step while the scale can still shrink.
            bad_loss = not_finite(loss, loss)
            bad = torch.maximum(bad_loss, skipped * self._loss_scale.is_least())
            self._loss_scale.update(overflowed=skipped, counts=1 - bad_loss)
        self._skipped = count_skipped(self._skipped, bad)
        self._update(rates, skipped)
        if self._ema is not None:
            self._ema.update(skipped, rates.newest)
        if self._run.config.objective.has_teacher:
            self._frozen[0]._after_load()
        for part in self._locals.values():
            part.grad = None
        self._drop_gradients()
        if self._clock is not None:
            self._clock.end_step()
        return norm, self._skipped

    def _update(self, rates: StepRates, skipped: torch.Tensor) -> None:
        """Take the optimizer's step, unless ``skipped`` is 1.0."""
        self._optimizer.step_unless(rates, skipped)

    def _clip_grad_norm(self, max_norm: float) -> torch.Tensor:
        """Scale gradients down to ``max_norm``, if above 0; returns their norm before, a scalar.

        PyTorch's own clips by each DTensor's norm; uneven parts need one sum of squares.
        """
        squares = []
        for names, groups in self._sharded_alike():
            parts = (self._locals[name].grad for name in self._locals if name in names)
            gradients = [grad for grad in parts if grad is not None]
            square = nn.utils.get_total_norm(gradients, foreach=True).to(self._device.where)
            squares.append(square.square())
            for group in groups:
                dist.all_reduce(squares[-1], group=group)
        norm = sum(squares[1:], start=squares[0]).sqrt()
        if max_norm > 0:
            nn.utils.clip_grads_with_norm_(self._locals.values(), max_norm, norm, foreach=True)
        return norm

    def ema_weights(self) -> AbstractContextManager[None]:
        assert self._ema is not None
        return self._ema.in_place_of_weights(self._after_load)

    def mean(self, value: torch.Tensor) -> torch.Tensor:
        return self.sum(value) / self.world_size

    def sum(self, value: torch.Tensor) -> torch.Tensor:
        total = value.clone()
        dist.all_reduce(total)
        return total / self._run.mesh.devices_a_part  # which have all added the same

    def end_step(self) -> None:  # noqa: B027
        """Do nothing: an eager device runs each operation as it is called."""

    def wait(self) -> None:
        self._device.synchronize()

    def read(self, values: Mapping[str, torch.Tensor]) -> Future[dict[str, list[float]]]:
        names = list(values)
        host = self._device.read([value.detach() for value in values.values()])

        def arrived() -> dict[str, list[float]]:
            found = zip(names, host(), strict=True)
            return {name: value.flatten().tolist() for name, value in found}

        return self._reader.submit(arrived)

    def read_images(self, values: Mapping[str, torch.Tensor]) -> Future[dict[str, torch.Tensor]]:
        names, host = list(values), self._device.read([v.detach() for v in values.values()])
        return self._reader.submit(lambda: dict(zip(names, host(), strict=True)))

    def close(self) -> None:
        """Free what Python's garbage collector cannot find; nothing works afterwards."""
        self._reader.shutdown()

    def barrier(self) -> None:
        dist.barrier()

    largest_of_all = staticmethod(largest_of_all)

    # -- reports ----------------------------------------------------------------------

    def describe(self) -> str:
        own, sharding, mesh = self._own, self._sharding, self._run.mesh
        parts = [
            f"{self.device_count} {self._device.name} device(s), {self._device.collectives_name}",
            self._describe_form(),
            str(mesh),
            sharding.precision + (" with TF32" if own.tf32 else ""),
            f"gradients reduced in {own.reduce_dtype}",
            f"activation checkpointing {sharding.grad_ckpt}",
            f"{own.block} blocks" + (f" in FP8 ({own.fp8})" if own.fp8 != "none" else ""),
        ]
        flags = {
            "moments in bf16": self._rounds_moments,
            "torch.compile": own.compile,
            "attention by plain products": not self._device.fused_attention,
            "channels last": own.channels_last,
            "CPU offload": own.cpu_offload,
        }
        used = [name for name, on in flags.items() if on]
        return f"{self._device.noun}: {', '.join(parts + used)}"

    def counters(self) -> dict[str, int]:
        return self._device.counters() if self.compiles else {}

    def compile_seconds(self) -> float:
        return 0.0  # of TorchTPU's, which compiles where it also runs, not known

    def own_seconds(self) -> list[float]:
        return [] if self._clock is None else self._clock.take()

    def memory(self) -> dict[str, int]:
        return self._device.memory()

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
        return {name: sum(tensor.nbytes for tensor in each) for name, each in tensors.items()}

    def unit_roundoff(self) -> float:
        own, precision = self._own, self._sharding.precision
        used = [torch.finfo(DTYPES[each]).eps for each in (precision, own.reduce_dtype)]
        used += [torch.finfo(torch.float16).eps] if own.tf32 else []  # as many bits as TF32
        # Rounded up or down, so by a whole distance.
        used += [2 * torch.finfo(torch.bfloat16).eps] if self._rounds_moments else []
        used += [torch.finfo(torch.float8_e4m3fn).eps] if own.fp8 != "none" else []
        return max(used) / 2

    def peak_flops(self) -> float | None:
        own = self._own
        kind: str = "fp8" if own.fp8 != "none" else self._sharding.precision
        if kind == "fp32" and own.tf32:
            kind = "tf32"
        return self._device.peak_flops(kind)

    # -- checkpoints ------------------------------------------------------------------

    def state(self, *, with_optimizer: bool = True) -> State:
        """Return the very tensors that steps compute with, by names in the plain model."""
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
        return State(model, optimizer, step, ema)

    def load_state(self, state: State) -> None:
        if self._loss_scale is not None and "loss_scale" in state.step:
            self._loss_scale.restore(state.step)
        if self._ema is not None and state.ema is None:
            self._ema.start()
        elif self._ema is not None:
            self._ema.updates.copy_(state.step[UPDATES])
        self._after_load()
