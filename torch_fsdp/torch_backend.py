"""What every form of FSDP shares: steps, transfers, reports, checkpoints."""

from __future__ import annotations

import abc
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from data.loader import Batch, BatchLoader, Share
from torch_fsdp import optimizers
from torch_fsdp.devices import Device
from torch_fsdp.domain import image_rows, open_loader
from torch_fsdp.optimizers import Muon, PartsAverage
from torch_fsdp.recipe import DTYPES, TorchRun
from training.backend import InitializeModule, State, pass_seed
from training.optimizers import Updates, count_skipped, key_of, no_counts, not_finite, ns_dtype
from training.processes.stopping import largest_of_all
from training.resolve import Run


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
        self.compiles = run.own.compile
        self._zero = run.recipe.zero
        self._reader = ThreadPoolExecutor(max_workers=1, thread_name_prefix="read")
        self._rounds_moments = run.config.optimizer.optimizer_dtype == "bf16"
        self._locals: dict[str, nn.Parameter] = {}
        """This process's part of each parameter, by names in the plain model."""
        self._ema: PartsAverage | None = None
        self._frozen: TorchBackend | None = None
        self._skipped = no_counts().to(device.where)

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
    def _drop_gradients(self) -> None:
        """Free or zero the gradients that ``_collect_gradients`` read."""

    @abc.abstractmethod
    def _squares(self) -> Iterator[torch.Tensor]:
        """Yield sums of squares, scalars, which add up to that of all gradients; see _square."""

    @abc.abstractmethod
    def _global_view(self, name: str, values: torch.Tensor) -> torch.Tensor:
        """Return ``values``, laid out as a local parameter, as a part of the global tensor."""

    @abc.abstractmethod
    def _shard_groups(self) -> list[dist.ProcessGroup]:
        """Return the group of the processes that a parameter is sharded over, if it is."""

    @abc.abstractmethod
    def _describe_form(self) -> str: ...

    def _step_state(self) -> dict[str, torch.Tensor]:
        """Return what else the next step depends on, to be saved with the optimizer's state."""
        return {}

    def _after_load(self) -> None:  # noqa: B027
        """Update what the model computes with: ``_locals`` have new values."""

    def _restore_step_state(self, state: dict[str, torch.Tensor]) -> None:  # noqa: B027
        """Restore what ``_step_state`` returned, as far as a checkpoint has it."""

    # -- model and optimizer ----------------------------------------------------------

    def shard(
        self, model: nn.Module, units: list[tuple[str, nn.Module]], initialize: InitializeModule
    ) -> nn.Module:
        sharded = self._parallelize(model, units, initialize)
        self._locals = {
            name: nn.Parameter(parameter.to_local().detach())
            for name, parameter in self._parameters.items()
        }
        return sharded

    def shard_frozen(
        self, run: Run[Any], model: nn.Module, initialize: InitializeModule
    ) -> nn.Module:
        assert isinstance(run, TorchRun)
        self._frozen = type(self)(run, self._device)
        return self._frozen.shard(model, list(run.model.units(model)), initialize)

    def build_optimizer(self, updates: Updates, *, betas: tuple[float, float], eps: float) -> None:
        self._optimizer = optimizers.build_optimizer(
            self._locals,
            updates,
            betas=betas,
            eps=eps,
            fused=self._device.fused_adamw and not self._rounds_moments,
            dtype=torch.bfloat16 if self._rounds_moments else None,
        )
        self._rounding_keys = self._make_rounding_keys() if self._rounds_moments else None
        rules = {update.rule for update in updates.values()}
        self._is_lion = "lion" in rules
        self._muon: Muon | None = None
        if "muon" in rules:
            self._muon = Muon(
                self._optimizer,
                self._locals,
                lambda name: self._global_view(name, self._locals[name].detach()),
                updates,
                next(iter(self._shard_groups()), None),
                ns_dtype(self._sharding.precision),
                eps,
            )
        if self._run.config.ema.model_ema:
            self._ema = PartsAverage(self._locals, self._run.config.ema)

    def _make_rounding_keys(self) -> dict[torch.Tensor, torch.Tensor]:
        """Return the key of the random bits that round each part's moments: the same for the same
        part of a parameter in all replicas, which would diverge otherwise."""
        keys: dict[torch.Tensor, torch.Tensor] = {}
        for name, part in self._locals.items():
            view = self._global_view(name, part.detach())
            offsets = [chunk.offsets for chunk in getattr(view, "chunks", ())]
            key = key_of(self._run.config.seed, name, *offsets)
            keys[part] = torch.tensor(key, dtype=torch.int32, device=part.device)
        return keys

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
        self, lr: float, max_norm: float, loss: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        optimizers.set_lr(self._optimizer, lr)
        self._collect_gradients()
        norm = self._clip_grad_norm(max_norm)
        skipped = not_finite(loss, norm)
        mesh = self._run.mesh
        if self._zero == 0 or mesh.dcn > 1 or mesh.domain > 1:
            # Several processes hold the same part of a parameter, or compute the loss of the same
            # images: each has computed a norm of its own, and they must decide alike.
            dist.all_reduce(skipped, op=dist.ReduceOp.MAX)
        self._skipped = count_skipped(self._skipped, self._count_as_bad(loss, skipped))
        self._update(skipped)
        if self._ema is not None:
            self._ema.update(skipped)
        for part in self._locals.values():
            part.grad = None
        self._drop_gradients()
        return norm, self._skipped

    def _update(self, skipped: torch.Tensor) -> None:
        """Take the optimizer's step, unless ``skipped`` is 1.0."""
        if self._is_lion:
            optimizers.step_lion_unless(self._optimizer, skipped)
            return
        if self._muon is not None:
            self._muon.step_unless(skipped)
        if self._rounding_keys is not None or not self._device.fused_adamw:
            optimizers.step_unless(self._optimizer, skipped, self._rounding_keys)
            return
        optimizer: Any = self._optimizer
        # Fused AdamW looks at it where its parameters are. With --cpu_offload that is the host:
        # it must be there now, AdamW's own copying would not wait.
        part = next(iter(self._locals.values()))
        optimizer.found_inf = skipped.to(part.device)
        optimizer.step()

    def _count_as_bad(self, loss: torch.Tensor, skipped: torch.Tensor) -> torch.Tensor:
        """Return 1.0 if the step counts as a bad one, else 0.0; called before the update."""
        return skipped

    def _clip_grad_norm(self, max_norm: float) -> torch.Tensor:
        """Scale gradients down to ``max_norm``, if above 0; returns their norm before, a scalar.

        PyTorch's own clips by each DTensor's norm; uneven parts need one sum of squares.
        """
        parts = list(self._locals.values())
        first, *others = self._squares()
        norm = sum(others, start=first).sqrt()
        if max_norm > 0:
            nn.utils.clip_grads_with_norm_(parts, max_norm, norm, foreach=True)
        return norm

    def _square(self, names: Collection[str], groups: Iterable[dist.ProcessGroup]) -> torch.Tensor:
        """Return the sum of squares of these parameters' gradients, which ``groups`` shard."""
        parts = (self._locals[name].grad for name in self._locals if name in names)
        gradients = [grad for grad in parts if grad is not None]
        square = nn.utils.get_total_norm(gradients, foreach=True).to(self._device.where).square()
        for group in groups:
            dist.all_reduce(square, group=group)
        return square

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

    def close(self) -> None:
        """Free what Python's garbage collector cannot find; nothing works afterwards."""
        self._reader.shutdown()

    def barrier(self) -> None:
        dist.barrier()

    def largest_of_all(self, value: int) -> Callable[[], int]:
        return largest_of_all(value)

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
            "channels last": own.channels_last,
            "CPU offload": own.cpu_offload,
        }
        return "GPU: " + ", ".join(parts + [name for name, on in flags.items() if on])

    def counters(self) -> dict[str, int]:
        if not self._own.compile:
            return {}
        return {"compilations": torch._dynamo.utils.counters["stats"]["unique_graphs"]}

    def memory(self) -> dict[str, int]:
        return self._device.memory()

    def state_bytes(self) -> dict[str, int]:
        state = [t for entry in self._optimizer.state.values() for t in entry.values()]
        sizes = {
            "parameters": self._parameter_bytes(),
            "optimizer": sum(tensor.nbytes for tensor in state),
        }
        if self._ema is not None:
            sizes["ema"] = sum(average.nbytes for average in self._ema.values.values())
        if self._frozen is not None:
            sizes["teacher"] = self._frozen._parameter_bytes()
        return sizes

    def _parameter_bytes(self) -> int:
        return sum(part.nbytes for part in self._locals.values())

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
        state = State(model, optimizer, self._step_state())
        return state if self._ema is None else self._ema.added_to(state, self._global_view)

    def load_state(self, state: State) -> None:
        self._restore_step_state(state.step)
        if self._ema is not None:
            self._ema.restore(state)
        self._after_load()
