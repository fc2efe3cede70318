"""The parts that both forms of FSDP on XLA share: steps, transfers, counters, checkpoints."""

import functools
import itertools
import json
import os
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch_xla
import torch_xla.core.xla_model as xm
import torch_xla.debug.metrics as met
import torch_xla.runtime as xr
from torch import nn

from data.batch import BatchShard
from data.loader import BatchLoader
from training import optimizers
from training.backend import (
    Backend,
    InitializeModule,
    Profiler,
    State,
    StepInputs,
    evaluation_seed,
    micro_batch_seed,
    scan_eagerly,
)
from training.optimizers import COUNTS, UPDATES, Updates, WeightAverage
from training.processes.stopping import all_reduce_max
from training.schedule import StepRates
from xla_fsdp import tpu
from xla_fsdp.optimizer import XlaWeightAverage, build_optimizer, set_lr, step_unless
from xla_fsdp.parallel_plan import XlaRun
from xla_fsdp.profiler import XlaProfiler
from xla_fsdp.scopes import LOSS, OPTIMIZER, Names


@dataclass(frozen=True)
class HostState(State):
    """A state copied to the host, with references to the tensors that it was copied from."""

    is_copy = True
    origins: list[tuple[str, torch.Tensor, list[torch.Tensor]]] = field(default_factory=list)
    """For each tensor on the devices: the name of its parameter, the tensor, and its copies on the
    host, one for each plain tensor in it."""


class XlaBackend(Backend):
    """Everything that does not depend on the form of FSDP. Methods that do have defaults for
    tensors that belong to one device."""

    compiles = True
    scan = staticmethod(scan_eagerly)
    _model: nn.Module
    _rng_stream = 0
    """The random stream from which this process draws dropout masks. Under SPMD, every host traces
    the same program."""
    _part = 0
    """The index of this process among those that hold different parts of a parameter as separate
    tensors."""

    def __init__(self, run: XlaRun) -> None:
        self._run, self._plan = run, run.plan
        self._xla, self._sharding = run.backend_config, run.config.sharding
        self._rounds_moments = run.config.optimizer.optimizer_dtype == "bf16"
        self._device, self._device_type = torch_xla.device(), xr.device_type()
        self._memory = DeviceMemory(self._device)
        self._ema: WeightAverage | None = None
        self._gradients: list[tuple[nn.Parameter, torch.Tensor]] = []
        """If gradients outlive a graph: the tensors, laid out like their parameters, in which the
        backward passes accumulate them. Otherwise empty; gradients are internal to the graph."""
        self._cleared: list[int] = []
        """The version of each of them (PyTorch's in-place modification counter) before a step."""
        self._frozen: list[XlaBackend] = []
        self._follower: XlaBackend | None = None
        self.teacher: nn.Module | None = None
        self._has_teacher = run.config.objective.has_teacher
        self._decay_changes = run.config.schedule.weight_decay_end is not None
        self._reader = ThreadPoolExecutor(max_workers=1, thread_name_prefix="read")
        self._synced_s = self._passes_s = self._pass_began_s = 0.0
        """Seconds in ``torch_xla.sync`` in total; seconds in the passes of the current step; when
        the current pass began, in seconds without those."""
        self._own_seconds: deque[float] = deque(maxlen=64)  # bounded: it may never be read
        self._names: Names | None = None
        """What names the operations of a step by modules, if something reads the names."""
        self._in_loss = ExitStack()
        self.is_main = xr.process_index() == 0
        self.device_count = xr.global_runtime_device_count()

    # -- the form of FSDP -------------------------------------------------------------

    def _describe_form(self) -> str:
        """Return the form of FSDP, for the log."""
        raise NotImplementedError

    def _muon_directions(
        self, parameters: Sequence[nn.Parameter], momenta: Sequence[torch.Tensor]
    ) -> list[torch.Tensor]:
        """Return Muon's updates before the learning rate: orthogonalized momenta (SPMD only)."""
        raise NotImplementedError

    def _plain_names(self, name: str) -> list[str]:
        """Return the plain model's names of the parameters that this one on the devices holds."""
        raise NotImplementedError

    def _to_host(self, name: str, tensor: torch.Tensor) -> dict[str, torch.Tensor]:
        """Copy a parameter, or a tensor laid out like it, to the CPU.

        Returns, by names in the plain model, plain tensors, or ShardedTensors of the local shards.
        """
        raise NotImplementedError

    def _to_device(self, name: str, tensor: torch.Tensor, saved: list[torch.Tensor]) -> None:
        """Copy back the tensors that ``_to_host`` returned, after loading new values into them."""
        raise NotImplementedError

    def _zeros_like(self, parameter: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        return torch.zeros_like(parameter, dtype=dtype, requires_grad=False)

    def _mark_replicated(self, x: torch.Tensor) -> torch.Tensor:
        """Mark a small result as replicated."""
        return x

    def _clip_grad_norm(self, max_norm: float) -> torch.Tensor:
        return nn.utils.clip_grad_norm_(self._model.parameters(), max_norm, foreach=False)

    def _named_parameters(self) -> dict[str, nn.Parameter]:
        return dict(self._model.named_parameters())

    def _local_bytes(self, tensor: torch.Tensor) -> int:
        return tensor.nbytes

    def _reshard(self) -> None:
        """Free stale unsharded parameters."""

    def _after_backward(self) -> None:
        """Drop what would keep unsharded parameters."""

    # -- model and optimizer ----------------------------------------------------------

    def shard_frozen(
        self,
        run: XlaRun,
        model: nn.Module,
        initialize: InitializeModule,
        *,
        follows_teacher: bool = False,
    ) -> nn.Module:
        frozen = type(self)(run)
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
        teacher = self._frozen[0]._named_parameters()
        for name, parameter in self._follower._named_parameters().items():
            parameter.copy_(teacher[name] * 1.0)  # without * 1.0, XLA would share the buffer
        self._follower._reshard()
        self.end_step()

    def build_optimizer(self, updates: Updates, *, betas: tuple[float, float], eps: float) -> None:
        dtype = torch.bfloat16 if self._rounds_moments else torch.float32
        self._eps = eps
        self._updates = {
            parameter: [updates[plain] for plain in self._plain_names(name) if plain in updates]
            for name, parameter in self._named_parameters().items()
        }
        self._optimizer = build_optimizer(
            self._updates,
            functools.partial(self._zeros_like, dtype=dtype),
            self.constant,
            betas=betas,
            eps=eps,
            decays=not self._decay_changes,
        )
        trained = [p for group in self._optimizer.param_groups for p in group["params"]]
        self._rounding_keys: torch.Tensor | None = None
        if self._rounds_moments:  # an int32 key per parameter determines the random bits
            names = {parameter: name for name, parameter in self._named_parameters().items()}
            keys = [optimizers.key_of(self._run.config.seed, names[p], self._part) for p in trained]
            self._rounding_keys = self.constant(torch.tensor(keys, dtype=torch.int32))
        self._skipped = self.constant(torch.zeros(len(COUNTS)))
        self._no_loss = self.constant(torch.zeros(2))
        self.begin_epoch()
        passes = self._run.config.data.grad_accum_steps
        if passes > 1 or self._xla.mark_step_every_n_blocks:  # several graphs pass gradients on
            zeros = (self._zeros_like(parameter, torch.float32) for parameter in trained)
            self._gradients = list(zip(trained, zeros, strict=True))
        self._clear_gradients()
        # The first step's graph must equal that of all later steps, or it would be compiled twice.
        # Graph breaks store views of a never-written tensor separately, so write to all tensors. A
        # graph's results are ordered by when their tensors were written, so write the trained ones
        # last, group by group, as in a step.
        with torch.no_grad():
            for parameter in (*self._named_parameters().values(), *trained):
                parameter.mul_(1.0)
        if self._run.config.averages:
            parameters, config = self._named_parameters(), self._run.config.ema
            values: Mapping[str, torch.Tensor]
            if self._has_teacher:
                values = self._frozen[0]._named_parameters()
            else:
                zeros_like = functools.partial(self._zeros_like, dtype=torch.float32)
                values = {name: zeros_like(parameter) for name, parameter in parameters.items()}
            self._ema = XlaWeightAverage(
                parameters, values, config, self.constant(torch.tensor(0.0))
            )
        self._break_graph(wait=True)

    # -- a step -----------------------------------------------------------------------

    def loader(
        self, open_shard: Callable[[BatchShard], BatchLoader], images: int, *, reads_rows: bool
    ) -> BatchLoader:
        is_whole = len(self.image_rows) == self._run.model.sizes.input_shape[1]
        rows, host_processes = None if is_whole else self.image_rows, xr.local_process_count()
        return open_shard(
            BatchShard(self.batch_shard, self.batch_shards, rows, of_host=host_processes)
        )

    def begin_epoch(self) -> None:
        self.epoch_loss = self._no_loss  # data on the device: a step's graph does not depend on it

    def run_step(
        self, compute: Callable[[StepInputs], dict[str, torch.Tensor]], inputs: StepInputs
    ) -> dict[str, torch.Tensor]:
        return compute(inputs)  # every step is recorded anew

    def run_evaluation(self, compute: Callable[[Any], Any], inputs: Any, batch_index: int) -> Any:
        xm.set_rng_state(evaluation_seed(self._run.config.seed, batch_index, self._rng_stream))
        return compute(inputs)

    def begin_micro_batch(self, micro_batch_index: int) -> None:
        # torch_xla advances its random state at each execution, differently with and without
        # checkpointing. Setting it here makes masks depend only on seed and step.
        xm.set_rng_state(
            micro_batch_seed(self._run.config.seed, micro_batch_index, self._rng_stream)
        )
        self._pass_began_s = time.perf_counter() - self._synced_s
        self._in_loss.close()  # of a pass without a backward pass
        if self._names:
            self._in_loss.enter_context(self._names.inside(LOSS, "forward"))

    def backward(self, loss: torch.Tensor, *, is_last: bool) -> None:
        if self._xla.mark_step_after_forward:
            self._break_graph()
        if self._names:
            self._names.name_backward(loss, LOSS)
        loss.backward()
        self._after_backward()
        self._in_loss.close()
        self._passes_s += time.perf_counter() - self._synced_s - self._pass_began_s
        # One graph for all passes would hold the activations of all passes. All passes use the same
        # graph: the first one also adds to gradients, and the update is in another graph.
        if self._run.config.data.grad_accum_steps > 1:
            self._break_graph()

    def optimizer_step(
        self, rates: StepRates, max_norm: float, loss: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        with self._names.inside(OPTIMIZER, "update") if self._names else nullcontext():
            return self._update(rates, max_norm, loss)

    def _update(
        self, rates: StepRates, max_norm: float, loss: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        factors: dict[str, torch.Tensor] = {}
        decay = newest = None
        heads_first = self._run.config.schedule.freeze_backbone_epochs > 0
        if self._has_teacher or self._decay_changes or heads_first:  # one tensor, one transfer
            numbers = [rates.weight_decay, rates.newest or 0.0, rates.last_layer, rates.backbone]
            decay, newest, last, backbone = self.constant(torch.tensor(numbers)).unbind()
            factors = {"last_layer": last, "backbone": backbone}
            del last, backbone
        set_lr(self._optimizer, rates.lr, self.constant, factors)
        for (parameter, gradient), version in zip(self._gradients, self._cleared, strict=True):
            if gradient._version == version:  # unused parameter: no update, no weight decay
                parameter.grad = None
        norm = self._clip_grad_norm(max_norm if max_norm > 0 else float("inf"))
        skipped = optimizers.not_finite(loss, norm)
        step_unless(
            self._optimizer,
            skipped > 0,
            self._rounding_keys,
            self._muon_directions,
            decay if self._decay_changes else None,
        )
        if self._ema is not None:
            self._ema.update(skipped, newest if self._has_teacher else None)
        # A new tensor, as the previous one may not have been read yet.
        self._skipped = self._mark_replicated(optimizers.count_skipped(self._skipped, skipped))
        summed = optimizers.add_loss(self.epoch_loss, loss, skipped)
        self.epoch_loss = self._mark_replicated(summed)
        self._clear_gradients()
        # Otherwise they would be outputs of the step's graph.
        del skipped, summed, factors, decay, newest
        self.end_step()
        self._own_seconds.append(self._passes_s)
        self._passes_s = 0.0
        return norm, self._skipped

    def _clear_gradients(self) -> None:
        self._optimizer.zero_grad(set_to_none=True)
        for parameter, gradient in self._gradients:
            parameter.grad = gradient.zero_()
        self._cleared = [gradient._version for _, gradient in self._gradients]

    def ema_weights(self) -> AbstractContextManager[None]:
        assert self._ema is not None
        return self._ema.in_place_of_weights(self._reshard)

    def end_step(self) -> None:
        # XLA's virtual CPU devices share a few threads. Threads of one program that wait in a
        # collective can starve those of the next program: a deadlock.
        self._break_graph(wait=self._device_type == "CPU" and self.device_count > 1)

    def _break_graph(self, wait: bool = False) -> None:
        """End the graph: compile and start the operations recorded so far."""
        started = time.perf_counter()
        with self._names.interrupted() if self._names else nullcontext():
            torch_xla.sync(wait=wait)
        self._synced_s += time.perf_counter() - started

    wait = staticmethod(xm.wait_device_ops)
    all_reduce_max = staticmethod(all_reduce_max)

    def read(self, values: Mapping[str, torch.Tensor]) -> Future[dict[str, list[float]]]:
        # In a thread, as .cpu() waits for the step that computes the value (and only for that one).
        return self._reader.submit(
            lambda tensors: {name: t.cpu().flatten().tolist() for name, t in tensors.items()},
            dict(values),
        )

    def read_images(self, values: Mapping[str, torch.Tensor]) -> Future[dict[str, torch.Tensor]]:
        self.end_step()
        return self._reader.submit(lambda: {name: value.cpu() for name, value in values.items()})

    def barrier(self) -> None:
        if dist.is_initialized():  # by launch, if there are several processes
            dist.barrier()

    # -- reports ----------------------------------------------------------------------

    def name_operations(self) -> None:
        """Write into the graphs of steps from which module of the model each operation comes."""
        self._names = Names()
        self._names.watch(self._model)

    def profiler(self, folder: Path) -> Profiler:
        self.name_operations()
        return XlaProfiler(folder, xr.process_index())

    def counters(self) -> dict[str, int]:
        transfers = met.metric_data("TransferFromDeviceTime")
        cached = met.counter_value("CachedCompile") or 0
        compiled = met.counter_value("UncachedCompile") or 0
        return {
            "compilations": compiled,
            "executions": cached + compiled,  # each execution looks up its graph
            "device_to_host": transfers[0] if transfers else 0,
        }

    def compile_seconds(self) -> float:
        compiled = met.metric_data("CompileTime")  # count, total nanoseconds, samples
        return compiled[1] / 1e9 if compiled else 0.0

    def local_compute_seconds(self) -> list[float]:
        # The host cannot see how devices spend time within a program. This is the host's time for
        # the passes, until they are dispatched.
        seconds = list(self._own_seconds)
        self._own_seconds.clear()
        return seconds

    def memory(self) -> dict[str, int]:
        return self._memory.read()

    def state_bytes(self) -> dict[str, int]:
        state = [t for entry in self._optimizer.state.values() for t in entry.values()]
        tensors: dict[str, Iterable[torch.Tensor]] = {
            "parameters": self._named_parameters().values(),
            "optimizer": state,
        }
        if self._ema is not None and not self._has_teacher:
            tensors["ema"] = self._ema.values.values()
        if self._frozen:
            parameters = [frozen._named_parameters().values() for frozen in self._frozen]
            tensors["teacher"] = itertools.chain(*parameters)
        return {name: sum(map(self._local_bytes, held)) for name, held in tensors.items()}

    def local_parameters(self) -> Iterable[tuple[Sequence[str], int]]:
        for name, parameter in self._named_parameters().items():
            size = self._local_bytes(parameter) // parameter.element_size()
            yield self._plain_names(name), size

    def unit_roundoff(self) -> float:
        # A TPU computes fp32 products in bf16, too.
        lower = self._sharding.precision == "bf16" or self._device_type == "TPU"
        used = [torch.finfo(torch.bfloat16 if lower else torch.float32).eps]
        if self._sharding.gather_dtype == "fp8":
            used.append(torch.finfo(torch.float8_e4m3fn).eps)
        # Stochastic rounding is off by up to a whole unit.
        used += [2 * torch.finfo(torch.bfloat16).eps] if self._rounds_moments else []
        return max(used) / 2

    def peak_flops(self) -> float | None:
        # fp32 products run as bf16 passes on the same unit, so both precisions have one peak.
        return tpu.peak_of(tpu.kind_here()) if self._device_type == "TPU" else None

    def describe(self) -> str:
        policy = self._sharding.grad_ckpt
        checkpointing = {"full": "on", "none": "off"}.get(policy, policy)
        parts = [
            f"XLA: {self.device_count} {self._device_type} device(s)",
            self._sharding.precision,
            f"gradient checkpointing {checkpointing}{self._run.why.get('grad_ckpt', '')}",
        ]
        if self._rounds_moments:
            parts.append("moments in bf16")
        if self._plan.attention != "sdpa":
            parts.append(f"{self._plan.attention} attention")
        if self._xla.mark_step_after_forward:
            parts.append("graph broken after the forward pass")
        if blocks := self._xla.mark_step_every_n_blocks:
            parts.append(f"graph broken every {blocks} blocks")
        return ", ".join([*parts, self._describe_form()]) + self._run.why.get("xla_fsdp", "")

    # -- checkpoints ------------------------------------------------------------------

    def state(self, *, with_optimizer: bool = True) -> State:
        """Copy the state to the host, under the names of the plain model."""
        xm.wait_device_ops()
        model: dict[str, torch.Tensor] = {}
        optimizer: dict[str, dict[str, torch.Tensor]] = {}
        origins: list[tuple[str, torch.Tensor, list[torch.Tensor]]] = []

        def copy(name: str, tensor: torch.Tensor) -> dict[str, torch.Tensor]:
            values = self._to_host(name, tensor)
            origins.append((name, tensor, list(values.values())))
            return values

        for name, parameter in self._named_parameters().items():
            values = copy(name, parameter.detach())
            model |= values
            state = self._optimizer.state.get(parameter, {}) if with_optimizer else {}
            for entry, tensor in state.items():
                if entry == "step":  # one number for all plain parameters
                    step = tensor.cpu()
                    origins.append((name, tensor, [step] * len(values)))
                    copies: dict[str, torch.Tensor] = dict.fromkeys(values, step)
                else:
                    copies = copy(name, tensor)
                for plain, value in copies.items():
                    optimizer.setdefault(plain, {})[entry] = value
        updates: dict[str, torch.Tensor] = {}
        ema: dict[str, torch.Tensor] | None = None
        if with_optimizer and self._ema is not None:
            ema = {}
            for name, average in self._ema.values.items():
                ema |= copy(name, average)
            updates = {UPDATES: self._ema.updates.cpu()}
            origins.append((UPDATES, self._ema.updates, [updates[UPDATES]]))
        gram: dict[str, torch.Tensor] | None = None
        if with_optimizer and self._follower is not None:
            gram = {}
            for name, parameter in self._follower._named_parameters().items():
                gram |= copy(name, parameter.detach())
        saved = optimizer if with_optimizer else None
        return HostState(model, saved, updates, ema, gram, origins)

    def load_state(self, state: State) -> None:
        assert isinstance(state, HostState)
        for name, tensor, values in state.origins:
            self._to_device(name, tensor, values)
        if self._ema is not None and state.ema is None:
            self._ema.start()
        torch_xla.sync(wait=True)


# -- device memory in use: reading it never fails or delays a run --------------------------


_READ_LIBTPU = """
import json, sys
sys.path.append(sys.argv[1])
from training.processes.parent import end_with
end_with(int(sys.argv[2]))  # also while libtpu waits for an answer
from libtpu.sdk import tpumonitoring
for _ in sys.stdin:
    metrics = [tpumonitoring.get_metric(f"hbm_capacity_{kind}") for kind in ("usage", "total")]
    print(json.dumps([list(metric.data()) for metric in metrics]), flush=True)
"""
"""A program (arguments: project folder, parent pid) that prints, for each line on its stdin, the
bytes in use and the total bytes of all devices."""


class DeviceMemory:
    """Reads device memory from torch_xla, or from libtpu if torch_xla does not provide it, as 2.9
    under SPMD (pytorch/xla issue #9022).

    libtpu's metrics are read in a separate process, because libtpu aborts the process that has
    loaded it if one of its checks fails. Its values are logged one log step later.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._is_known = xr.device_type() != "CPU"
        self._libtpu: subprocess.Popen[str] | None = None
        self._newest: dict[str, int] = {}
        self._waits = False

    def read(self) -> dict[str, int]:
        """Return the bytes in use, as ``training.backend.Backend.memory``."""
        if not self._is_known:
            return {}
        if self._libtpu is None:
            try:
                info = xm.get_memory_info(self._device)
                names = {"used": "bytes_used", "peak": "peak_bytes_used", "limit": "bytes_limit"}
                return {name: info[key] for name, key in names.items() if key in info}
            except Exception:  # noqa: BLE001 - torch_xla does not document what it raises
                arguments = [str(Path(__file__).resolve().parents[1]), str(os.getpid())]
                self._libtpu = subprocess.Popen(
                    [sys.executable, "-P", "-c", _READ_LIBTPU, *arguments],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.DEVNULL,
                    encoding="utf-8",
                    start_new_session=True,  # do not receive signals to the run's process group
                )
        if self._waits:  # the last answer is overdue
            return {}
        self._waits, newest = True, self._newest
        threading.Thread(target=self._ask, args=[self._libtpu], daemon=True).start()
        return newest

    def _ask(self, libtpu: subprocess.Popen[str]) -> None:
        assert libtpu.stdin
        assert libtpu.stdout
        try:  # take the fullest device; libtpu returns a string for each
            libtpu.stdin.write("\n")
            libtpu.stdin.flush()
            answer = json.loads(libtpu.stdout.readline())
            used, total = ([int(float(text)) for text in texts] for texts in answer)
            most, limit = max(zip(used, total, strict=True), default=(0, 0))
            self._newest = {"used": most, "limit": limit} if limit else {}
        except (OSError, TypeError, ValueError):  # including an exited process
            self._newest = {}
        self._waits = False
