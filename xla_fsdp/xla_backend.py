"""What both forms of FSDP on XLA share: steps, transfers, counters, checkpoints."""

from __future__ import annotations

import abc
import functools
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
import torch_xla
import torch_xla.core.xla_model as xm
import torch_xla.debug.metrics as met
import torch_xla.runtime as xr
from torch import nn
from torch_xla.distributed.fsdp import checkpoint_module
from tqdm import tqdm

from data.loader import BatchLoader, Share
from models.initialize import fill_buffers
from training.backend import InitializeModule, State, pass_seed
from training.checkpoints.state import Chunk, ShardedTensor
from training.optimizers import (
    UPDATES,
    Update,
    Updates,
    count_skipped,
    key_of,
    lr_factor,
    no_counts,
    not_finite,
    ns_dtype,
    orthogonalized,
)
from training.processes.stopping import largest_of_all
from xla_fsdp import tpu
from xla_fsdp.around_blocks import break_graph_every, compute_in_bf16
from xla_fsdp.memory import DeviceMemory
from xla_fsdp.optimizer import (
    Momenta,
    Momentum,
    Orthogonalize,
    WeightAverage,
    build_optimizer,
    parameter_groups,
    set_lr,
    step_unless,
)
from xla_fsdp.resolve_xla import XlaRun

# ------------------------------------------------------------------------------------------------
# From tensors as they lie on the devices to those of the plain model and back, for checkpoints.
#
# On the devices blocks may be stacked, (depth, ...), and parameters packed, (parts, rows, ...).


_STACKED = "blocks.block."


def is_stacked(name: str) -> bool:
    return name.startswith(_STACKED)


def name_in_block(name: str) -> str | None:
    """Return the name that a parameter has in its block; None if it is in none."""
    blocks, _, rest = name.partition(".")
    return rest.partition(".")[2] if blocks == "blocks" else None


def plain_names(name: str, depth: int) -> list[str]:
    """Return the names in the plain model of what has this name here: of ``depth`` stacked blocks
    each one's."""
    if not is_stacked(name):
        return [name]
    return [f"blocks.{i}.{name.removeprefix(_STACKED)}" for i in range(depth)]


def plain_values(name: str, value: torch.Tensor, *, packed: bool) -> dict[str, torch.Tensor]:
    """Return a tensor by its name in the plain model; of stacked blocks, each one's part.

    ``value`` is plain or, if it is sharded (as all that is packed), a ShardedTensor; the same comes
    out, with views of the same data.
    """
    if packed:
        assert isinstance(value, ShardedTensor)
        value = _unpacked(value, dim=int(is_stacked(name)))
    if not is_stacked(name):
        return {name: value}
    names = plain_names(name, len(value))
    if not isinstance(value, ShardedTensor):
        return dict(zip(names, value, strict=True))
    return {
        plain: ShardedTensor(
            value.shape[1:], value.dtype, [Chunk(c.offsets[1:], c.data[i]) for c in value.chunks]
        )
        for i, plain in enumerate(names)
    }


def _unpacked(value: ShardedTensor, dim: int) -> ShardedTensor:
    """Return (..., parts, rows, ...) as (..., parts * rows, ...): a chunk becomes one a part."""
    before, (count, rows, *after) = value.shape[:dim], value.shape[dim:]
    chunks = [
        Chunk(
            (
                *c.offsets[:dim],
                (c.offsets[dim] + i) * rows + c.offsets[dim + 1],
                *c.offsets[dim + 2 :],
            ),
            part,
        )
        for c in value.chunks
        for i, part in enumerate(c.data.unbind(dim))
    ]
    return ShardedTensor((*before, count * rows, *after), value.dtype, chunks)


def device_part(
    saved: list[ShardedTensor], indices: tuple[slice, ...], *, stacked: bool, packed: int
) -> torch.Tensor:
    """Put together what lies at ``indices`` on the devices from what ``plain_values`` gave.

    ``packed``: how many parts the parameter is packed of, 0 if it is not.
    """
    indices = indices[1:] if stacked else indices
    offsets = tuple(index.start for index in indices)
    blocks = []
    for value in saved:
        data = {chunk.offsets: chunk.data for chunk in value.chunks}
        if packed:
            rows = value.shape[0] // packed
            here = range(indices[0].start, indices[0].stop)
            parts = [data[i * rows + offsets[1], *offsets[2:]] for i in here]
            blocks.append(torch.stack(parts))
        else:
            blocks.append(data[offsets])
    return torch.stack(blocks) if stacked else blocks[0]


# ------------------------------------------------------------------------------------------------
# Copies the state on the devices to the host, and knows the way back.


ToHost = Callable[[str, torch.Tensor], dict[str, torch.Tensor]]
"""A function that copies a tensor laid out as the parameter of this name, by plain names."""


@dataclass(frozen=True)
class Origin:
    """A tensor on the devices, and what was copied of it to the host."""

    name: str
    """The name on the devices of the parameter that it is, or that it is the state or EMA of."""
    tensor: torch.Tensor
    values: list[torch.Tensor]


@dataclass(frozen=True)
class HostState(State):
    """A state as it was copied to the host, which knows the way back."""

    is_copy = True
    origins: list[Origin] = field(default_factory=list)


def copy_to_host(
    parameters: Mapping[str, nn.Parameter],
    optimizer: torch.optim.Optimizer | None,
    average: WeightAverage | None,
    to_host: ToHost,
) -> HostState:
    """Copy parameters by their names, what ``optimizer`` keeps of them, and their average."""
    found: dict[str, torch.Tensor] = {}
    entries: dict[str, dict[str, torch.Tensor]] = {}
    origins: list[Origin] = []

    def copied(key: str, tensor: torch.Tensor) -> dict[str, torch.Tensor]:
        views = to_host(key, tensor)
        origins.append(Origin(key, tensor, list(views.values())))
        return views

    for key, parameter in parameters.items():
        views = copied(key, parameter.detach())
        found.update(views)
        kept = optimizer.state.get(parameter, {}) if optimizer else {}
        for entry, tensor in kept.items():
            if entry == "step":
                step = tensor.cpu()
                origins.append(Origin(key, tensor, [step] * len(views)))
                of_entry: dict[str, torch.Tensor] = dict.fromkeys(views, step)
            else:
                of_entry = copied(key, tensor)
            for name, view in of_entry.items():
                entries.setdefault(name, {})[entry] = view
    if optimizer is None:
        return HostState(found, None, {}, None, origins)
    if average is None:
        return HostState(found, entries, {}, None, origins)
    ema: dict[str, torch.Tensor] = {}
    for key, value in average.values.items():
        ema.update(copied(key, value))
    updates = average.updates.cpu()
    origins.append(Origin(UPDATES, average.updates, [updates]))
    return HostState(found, entries, {UPDATES: updates}, ema, origins)


# ------------------------------------------------------------------------------------------------


class XlaBackend(abc.ABC):
    """The parts of ``training.backend.Backend`` that do not depend on the form of FSDP."""

    rank: int
    world_size: int
    image_rows: range
    compiles = True
    _scans = False  # blocks run as one loop, which recomputes them by itself

    def __init__(self, run: XlaRun) -> None:
        self._run, self._own, self._sharding = run, run.own, run.config.sharding
        self._rounds_moments = run.config.optimizer.optimizer_dtype == "bf16"
        self._device = torch_xla.device()
        self._memory = DeviceMemory(self._device)
        self._ema: WeightAverage | None = None
        self._frozen: XlaBackend | None = None
        self._reader = ThreadPoolExecutor(max_workers=1, thread_name_prefix="read")
        self.is_main = xr.process_index() == 0
        self.device_count = xr.global_runtime_device_count()

    # -- the form of FSDP -------------------------------------------------------------

    @property
    @abc.abstractmethod
    def _rng_stream(self) -> int:
        """The number of the stream of random numbers that this process draws dropout from."""

    @property
    def _part(self) -> int:
        """The number of this process among those that hold different parts of a parameter, which is
        one tensor to each of them."""
        return 0

    @abc.abstractmethod
    def _shard_block(self, model: nn.Module, name: str, block: nn.Module) -> nn.Module: ...

    @abc.abstractmethod
    def _shard_root(self, model: nn.Module) -> nn.Module: ...

    @abc.abstractmethod
    def _zeros_like(self, parameter: torch.Tensor, dtype: torch.dtype) -> torch.Tensor: ...

    @abc.abstractmethod
    def constant(self, values: torch.Tensor) -> torch.Tensor:
        """Put a small tensor whole on every device."""

    @abc.abstractmethod
    def _mark_replicated(self, x: torch.Tensor) -> torch.Tensor:
        """Mark a small result as whole on every device."""

    @abc.abstractmethod
    def _clip_grad_norm(self, max_norm: float) -> torch.Tensor: ...

    @abc.abstractmethod
    def _orthogonal(self, momenta: Momenta, how: Orthogonalize) -> list[torch.Tensor]:
        """Return momenta, laid out like their parameters, after ``how`` had each matrix whole."""

    @abc.abstractmethod
    def _named_parameters(self) -> dict[str, nn.Parameter]: ...

    @abc.abstractmethod
    def _local_bytes(self, tensor: torch.Tensor) -> int: ...

    @abc.abstractmethod
    def _to_host(self, name: str, tensor: torch.Tensor) -> dict[str, torch.Tensor]:
        """Copy to the CPU, plain or as a ShardedTensor, by the names in the plain model."""

    @abc.abstractmethod
    def _to_device(self, name: str, tensor: torch.Tensor, saved: list[torch.Tensor]) -> None:
        """Put back what ``_to_host`` gave, after new values were read into it."""

    def _scalar(self, value: float) -> torch.Tensor:
        return self.constant(torch.tensor(value))

    # -- model and optimizer ----------------------------------------------------------

    def shard(
        self, model: nn.Module, units: list[tuple[str, nn.Module]], initialize: InitializeModule
    ) -> nn.Module:
        blocks: list[nn.Module] = []
        for name, unit in units:
            initialize(unit, name)
            if unit is model or not self._scans:
                fill_buffers(unit, self.constant)
            if unit is model:
                self._model = self._shard_root(model)
                if self._sharding.precision == "bf16":
                    compute_in_bf16(self._model)
                continue
            trains = any(parameter.requires_grad for parameter in unit.parameters())
            if self._sharding.grad_ckpt == "full" and not self._scans and trains:
                checkpoint_module(unit)
            blocks.append(self._shard_block(model, name, unit))
            self._break_graph()  # the device takes this unit before the next one is made
        if self._own.mark_step_every_n_blocks:
            break_graph_every(self._own.mark_step_every_n_blocks, blocks, self._break_graph)
        self._break_graph(wait=True)
        return self._model

    def shard_frozen(
        self, run: XlaRun, model: nn.Module, initialize: InitializeModule
    ) -> nn.Module:
        self._frozen = type(self)(run)
        return self._frozen.shard(model, list(run.model.units(model)), initialize)

    def build_optimizer(self, updates: Updates, *, betas: tuple[float, float], eps: float) -> None:
        dtype = torch.bfloat16 if self._rounds_moments else torch.float32
        held = {
            parameter: [updates[plain] for plain in self._plain_names(name) if plain in updates]
            for name, parameter in self._named_parameters().items()
        }
        self._optimizer = build_optimizer(
            parameter_groups(held.items(), self.constant),
            functools.partial(self._zeros_like, dtype=dtype),
            self._scalar,
            functools.partial(self._directions, held, eps),
            betas=betas,
            eps=eps,
        )
        self._rounding_keys = self.constant(self._keys()) if self._rounds_moments else None
        self._skipped = self.constant(no_counts())
        # Views of a tensor that was never written to are stored apart where the graph breaks:
        # without this, the first step's graph would differ from all later ones. So it would where
        # those that train were not written last, group after group, as each step does: a graph's
        # results are in the order in which their tensors were written.
        groups = self._optimizer.param_groups
        trained = [parameter for group in groups for parameter in group["params"]]
        with torch.no_grad():
            for parameter in (*self._named_parameters().values(), *trained):
                parameter.mul_(1.0)
        if self._run.config.ema.model_ema:
            zeros_like = functools.partial(self._zeros_like, dtype=torch.float32)
            parameters, config = self._named_parameters(), self._run.config.ema
            self._ema = WeightAverage(parameters, zeros_like, self._scalar, config)
        self._break_graph(wait=True)

    def _plain_names(self, name: str) -> list[str]:
        """Return the names in the plain model of what a parameter on the devices holds."""
        return plain_names(name, self._run.model.sizes.depth)

    def _directions(
        self,
        held: Mapping[nn.Parameter, Sequence[Update]],
        eps: float,
        parameters: Sequence[nn.Parameter],
        momenta: Sequence[torch.Tensor],
    ) -> list[torch.Tensor]:
        """Return, of Muon's parameters and their momenta, what learning rates are multiplied by."""
        dtype, matrices = ns_dtype(self._sharding.precision), []
        for parameter in parameters:
            matrix = held[parameter][0].matrix
            assert matrix is not None
            matrices.append(matrix)
        given = zip(parameters, momenta, matrices, strict=True)
        whole = [Momentum(parameter, m.to(dtype), matrix) for parameter, m, matrix in given]
        found = self._orthogonal(whole, functools.partial(orthogonalized, eps=eps))
        return [x.float() * lr_factor(matrix) for x, matrix in zip(found, matrices, strict=True)]

    def _keys(self) -> torch.Tensor:
        """Return what bits for rounding follow from: an int32 number for each parameter that
        trains."""
        names = {parameter: name for name, parameter in self._named_parameters().items()}
        trained = [names[p] for group in self._optimizer.param_groups for p in group["params"]]
        keys = [key_of(self._run.config.seed, name, self._part) for name in trained]
        return torch.tensor(keys, dtype=torch.int32)

    # -- a step -----------------------------------------------------------------------

    def loader(
        self, open_share: Callable[[Share], BatchLoader], images: int, *, reads_rows: bool
    ) -> BatchLoader:
        rows = self.image_rows
        is_whole = len(rows) == self._run.model.sizes.input_shape[1]
        of_host = xr.local_process_count()
        return open_share(
            Share(self.rank, self.world_size, None if is_whole else rows, of_host=of_host)
        )

    def begin_step(self, pass_index: int) -> None:
        # torch_xla moves its random state on at each execution, and moves it otherwise with
        # checkpointing than without: set anew, masks depend on seed and step alone.
        xm.set_rng_state(pass_seed(self._run.config.seed, pass_index, self._rng_stream))

    def backward(self, loss: torch.Tensor, *, is_last: bool) -> None:
        if self._own.mark_step_after_forward:
            self._break_graph()
        loss.backward()
        if not is_last:  # a graph a micro-batch: one for all would hold all activations
            self._break_graph()

    def optimizer_step(
        self, lr: float, max_norm: float, loss: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        set_lr(self._optimizer, lr, self._scalar)
        norm = self._clip_grad_norm(max_norm if max_norm > 0 else float("inf"))
        skipped = not_finite(loss, norm)
        step_unless(self._optimizer, skipped > 0, self._rounding_keys)
        if self._ema is not None:
            self._ema.update(skipped)
        # A new tensor: the last step's may still wait to be read.
        self._skipped = self._mark_replicated(count_skipped(self._skipped, skipped))
        self._optimizer.zero_grad(set_to_none=True)
        del skipped  # or it would be a result of the step
        self.end_step()
        return norm, self._skipped

    def ema_weights(self) -> AbstractContextManager[None]:
        assert self._ema is not None
        return self._ema.in_place_of_weights(self._let_go_of_gathered)

    def _let_go_of_gathered(self) -> None:  # noqa: B027
        """Let no unit compute on with weights that it has gathered: they are other ones now."""

    def end_step(self) -> None:
        # XLA's virtual CPU devices share a few threads: those of one program on the way, held up
        # in a collective, can starve the next one's, and both wait for ever.
        self._break_graph(wait=xr.device_type() == "CPU" and self.device_count > 1)

    def _break_graph(self, wait: bool = False) -> None:
        """End the graph here: compile and start what was recorded so far."""
        torch_xla.sync(wait=wait)

    def wait(self) -> None:
        xm.wait_device_ops()
        if self._own.compile_cache_dir and self.is_main:
            counts = self.counters()
            tqdm.write(
                f"compile cache: {counts['cache_hits']} program(s) so far came from "
                f"{self._own.compile_cache_dir}, {counts['compilations']} were compiled, of which "
                f"it had {counts['cache_unreadable']} that torch_xla cannot read"
            )

    def read(self, values: Mapping[str, torch.Tensor]) -> Future[dict[str, list[float]]]:
        tensors = dict(values)
        # In a thread: .cpu() waits for the step that makes the value, and only for it.
        return self._reader.submit(
            lambda: {name: t.cpu().flatten().tolist() for name, t in tensors.items()}
        )

    def barrier(self) -> None:
        if dist.is_initialized():  # by launch, where there are several processes
            dist.barrier()

    def largest_of_all(self, value: int) -> Callable[[], int]:
        return largest_of_all(value)

    # -- reports ----------------------------------------------------------------------

    def counters(self) -> dict[str, int]:
        def counter(name: str) -> int:
            return met.counter_value(name) or 0

        transfers = met.metric_data("TransferFromDeviceTime")
        cached, compiled = counter("CachedCompile"), counter("UncachedCompile")
        counts = {
            "compilations": compiled,
            "executions": cached + compiled,  # each execution looks up its graph
            "device_to_host": transfers[0] if transfers else 0,
        }
        if self._own.compile_cache_dir:
            counts["cache_hits"] = counter("PersistentCacheHit")
            counts["cache_unreadable"] = counter("PersistentCacheDeserializeFailure")
        return counts

    def memory(self) -> dict[str, int]:
        return self._memory.read()

    def state_bytes(self) -> dict[str, int]:
        state = [t for entry in self._optimizer.state.values() for t in entry.values()]
        sizes = {
            "parameters": self._parameter_bytes(),
            "optimizer": sum(map(self._local_bytes, state)),
        }
        if self._ema is not None:
            sizes["ema"] = sum(map(self._local_bytes, self._ema.values.values()))
        if self._frozen is not None:
            sizes["teacher"] = self._frozen._parameter_bytes()
        return sizes

    def _parameter_bytes(self) -> int:
        return sum(map(self._local_bytes, self._named_parameters().values()))

    def unit_roundoff(self) -> float:
        # A TPU takes fp32 products as bf16, too.
        lower = self._sharding.precision == "bf16" or xr.device_type() == "TPU"
        used = [torch.finfo(torch.bfloat16 if lower else torch.float32).eps]
        used += [torch.finfo(torch.float8_e4m3fn).eps] if self._own.gather_dtype == "fp8" else []
        # Up or down, so by a whole distance.
        used += [2 * torch.finfo(torch.bfloat16).eps] if self._rounds_moments else []
        return max(used) / 2

    def peak_flops(self) -> float | None:
        return tpu.peak_flops()

    def _describe_common(self) -> str:
        breaks = []
        if self._own.mark_step_after_forward:
            breaks.append("after the forward pass")
        if self._own.mark_step_every_n_blocks:
            breaks.append(f"every {self._own.mark_step_every_n_blocks} blocks")
        policy = self._sharding.grad_ckpt
        checkpointing = {"full": "on", "none": "off"}.get(policy, policy)
        return (
            f"{self._devices()}, {self._sharding.precision}, "
            f"gradient checkpointing {checkpointing}"
            + (", moments in bf16" if self._rounds_moments else "")
            + self._run.why.get("grad_ckpt", "")
            + self._run.why.get("attention", "")
            + (f", graph broken {' and '.join(breaks)}" if breaks else "")
            + (self._describe_cache() if self._own.compile_cache_dir else "")
        )

    def _devices(self) -> str:
        return f"{self.device_count} {xr.device_type()} device(s)"

    def _describe_cache(self) -> str:
        return (
            f", compiled programs kept in {self._own.compile_cache_dir} (torch_xla 2.9 writes but "
            "cannot read them: each run compiles anew)"
        )

    # -- checkpoints ------------------------------------------------------------------

    def state(self, *, with_optimizer: bool = True) -> State:
        """Copy the state to the host, each device tensor as its parts in the plain model."""
        xm.wait_device_ops()
        optimizer = self._optimizer if with_optimizer else None
        return copy_to_host(self._named_parameters(), optimizer, self._ema, self._to_host)

    def load_state(self, state: State) -> None:
        assert isinstance(state, HostState)
        for origin in state.origins:
            self._to_device(origin.name, origin.tensor, origin.values)
        if self._ema is not None and state.ema is None:
            self._ema.start()
        torch_xla.sync(wait=True)
