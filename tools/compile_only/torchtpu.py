"""``--compile_only --backend torchtpu``: what a step of TorchTPU runs, compiled for a slice.

With FSDP2, TorchTPU hands the devices many programs a step: a graph for each block's passes, and
one for each operation and collective around them; with ``--fsdp simple`` it is one. Which ones,
only running a step tells. So the real backend trains a few steps, in a process of its own, on a
slice that is not there (placeholder_tpu.c): it is rank 0, libtpu compiles each program for the
slice as in a run, and nothing is computed. The last step is one of those that all later ones equal.

The expected step is the sum over its programs: a device runs one after the other, and a program
starts and ends with nothing in flight. The memory is replayed: what lives on the device when a
program starts, its results and its temporaries.

Not in it: the host's time to launch the programs, and the pauses between them that this causes. It
is measured on this machine, and told beside the expected step.
"""

import contextlib
import importlib.util
import json
import os
import re
import shutil
import subprocess
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.fx import traceback

from gpu_fsdp import resolve_gpu
from gpu_fsdp.config import TorchConfig
from models import timm_private
from tools.compile_only import compiler
from tools.compile_only.command import (
    DOES_NOT_FIT,
    CompiledGraph,
    add_explanation,
    cores,
    log,
    make_hlo_dir,
    make_report,
    print_report,
    reporting,
    slice_name,
    write_modules,
)
from tools.compile_only.compiler import Compiled
from tools.compile_only.expected import Links, expect
from tools.compile_only.hlo import count_flops, measure
from torch_fsdp import devices, torch_tpu_private
from torch_fsdp.parallel_plan import TorchRun
from tpu_attention import jax_private as kernels_private
from tpu_attention.kernels import COUNTED, Counted, counted_here
from tpu_machines import LIBTPU_VARIABLE, libtpu_flags
from training.backend import Backend
from training.config import RunConfig
from training.errors import UsageError, warn_of_others
from training.mesh import replicas
from training.rules import check_features
from training.schedule import StepRates
from xla_fsdp.config import XlaConfig
from xla_fsdp.scopes import LOSS, OPTIMIZER, Names, scope_in
from xla_fsdp.tpu import Topology, parse_topology

PLUGIN = Path(__file__).with_name("placeholder_tpu.c")
STEPS = 3
"""The first compiles, the second may still compile something; the last one is what a step runs."""


def compile_step(config: RunConfig, backend_config: TorchConfig, asked: XlaConfig) -> int:
    """Print the table, or with ``--json`` the figures, and return the exit code: 0 if it fits.
    Raises UsageError."""
    name = slice_name(asked)
    check_installed("--compile_only")
    used = (torch_tpu_private, kernels_private, timm_private)
    warn_of_others(*(module.WRITTEN_FOR for module in used))
    check_features(config, asked)
    topology = parse_topology(name, replicas(config.sharding))
    check_compiler(topology)
    run = resolve_for_slice(config, backend_config, topology)
    if run.mesh.dcn != topology.slices:
        raise UsageError(
            "--compile_only with --backend torchtpu compiles FSDP over all devices of a slice "
            f"only, not {run.mesh}: drop --run_without_fsdp"
        )
    if run.mesh.domain > 1 and run.plan.compile != "step":
        raise UsageError(
            f"--compile_only with --backend torchtpu and --mesh_domain {run.mesh.domain} requires "
            "--fsdp simple, without --no-compile"
        )
    if asked.explain and run.plan.compile != "step":
        raise UsageError(
            "--explain with --backend torchtpu requires --fsdp simple, without --no-compile"
        )
    links = _links(run, topology)
    hlo_dir = make_hlo_dir(asked.hlo_dir)

    start, load = time.perf_counter(), os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        variables = _plugin_variables(topology, folder)
        what = f"{run.model_line}, for {topology.name} with libtpu {version('libtpu')}"
        with reporting(f"running {STEPS} steps and compiling their programs: {what}"):
            recorded = _record(config, backend_config, asked, topology, folder, variables)
        seconds = time.perf_counter() - start
        if isinstance(recorded, str):
            needed = compiler.hbm_needed(recorded, 0)
            if needed is None:
                raise UsageError(f"the step cannot be traced or compiled: {recorded}")
            log(f"does not fit: one program alone needs {needed / 2**30:.2f} GiB")
            if config.use.json:
                figures = {"topology": topology.name, "fits": False, "peak_hbm_bytes": needed}
                print(json.dumps(figures | {"expected_step_s": None}))
            return DOES_NOT_FIT
        COUNTED.update(recorded.kernels)
        step = ProgramLog((folder / "log").read_text(encoding="utf-8"), recorded.last_step, folder)
        with reporting("adding up the programs of a step"):
            kernels = folder / "kernels"
            kernels.mkdir()
            variables["PLACEHOLDER_FOLDER"] = str(kernels)
            graphs = [_graph(step, number, links, variables) for number in step.runs]
    compile_s = sum(graph.compiled.seconds for graph in graphs if graph.compiled)
    report = make_report(
        topology=topology,
        graphs=graphs,
        model_flops=run.model.train_flops_per_image * config.data.batch_size,
        parameters=run.model.parameter_count,
        batch_size=config.data.batch_size,
        input_shape=run.model.sizes.input_shape,
        precision=run.config.sharding.precision,
        mesh=asdict(run.mesh),
        sharding=recorded.description,
        state_bytes=recorded.state_bytes,
        host_s=recorded.host_s,
        trace_s=seconds - compile_s,
        load_average=load,
        cores=cores(),
        versions={package: version(package) for package in ("torch_tpu", "libtpu")},
    )
    # A slice that a loop takes of an array in a fusion counts as the whole array there.
    report |= dict.fromkeys(("hbm_bytes", "hbm_s", "roofline_step_s", "roofline_mfu"))
    report["programs"] = programs = _programs(graphs)
    if hlo_dir:
        write_modules(hlo_dir, graphs)
    if asked.explain:
        add_explanation(report, graphs, links, hlo_dir)
    code = print_report(config, report)
    if len(programs) > 1 and not config.use.json:
        print(f"\n{_table(programs)}")
    return code


def check_installed(mode: str) -> None:
    """Raise UsageError if something is missing that the flag ``mode`` needs to compile."""
    for package in ("torch_tpu", "libtpu"):
        if importlib.util.find_spec(package) is None:
            raise UsageError(
                f"{mode} with --backend torchtpu requires the package {package}: python3 -m pip "
                "install -r requirements-torchtpu.txt"
            )
    if shutil.which("cc") is None:
        raise UsageError(f"{mode} with --backend torchtpu requires a C compiler, cc")


def check_compiler(topology: Topology) -> None:
    """Raise UsageError if libtpu here compiles for no such slice."""
    if topology.generation == 4:
        raise UsageError(f"--backend torchtpu does not support --tpu_topology {topology.name}")


def _links(run: TorchRun, topology: Topology) -> Links:
    """Return the links of a slice whose processes are numbered as a run's."""
    return Links(topology, by_host=run.mesh.tensor > 1)


# -- the run, as rank 0 of a slice ----------------------------------------------------------------


class PlaceholderTpu(devices.Tpu):
    """The device of placeholder_tpu.c, one of a slice of as many processes."""

    collectives = "tpu:tpu_dist"
    register = staticmethod(torch_tpu_private.register_without_tpu)

    store: torch_tpu_private.AbsentRanks
    """By which the other processes of the slice seem to be there."""

    def slices(self) -> int | None:
        return 1  # not those of this machine's job

    def count(self) -> int | None:
        return None

    def mesh(self, ranks: torch.Tensor, names: tuple[str, ...]) -> DeviceMesh:
        self.store.add_mesh(ranks)
        return super().mesh(ranks, names)


@contextlib.contextmanager
def _as_rank_0(ranks: int) -> Iterator[None]:
    """Have the run resolved as in the first of so many processes, on a host with this device."""
    before = dict(os.environ)
    places = {"RANK": "0", "WORLD_SIZE": str(ranks), "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    told = dict.fromkeys(("TORCH_TPU_SLICEBUILDER_ADDRESSES", "TORCH_TPU_TOPOLOGY"), "none")
    kinds = devices.KINDS["torchtpu"]
    try:
        os.environ.update(places | told)
        devices.KINDS["torchtpu"] = [PlaceholderTpu]
        yield
    finally:
        devices.KINDS["torchtpu"] = kinds
        os.environ.clear()
        os.environ.update(before)


def resolve_for_slice(
    config: RunConfig, backend_config: TorchConfig, topology: Topology
) -> TorchRun:
    """Return the run on a slice that need not exist here. Raises UsageError."""
    # --json requires --compile_only, which is no flag of this backend's runs.
    plain = replace(config, backend="torchtpu", use=replace(config.use, json=False))
    with _as_rank_0(topology.devices):
        return resolve_gpu.resolve(plain, backend_config)


@dataclass(frozen=True)
class Recorded:
    """What a process with the backend tells of its steps."""

    last_step: tuple[int, int]
    """Where the log of the last step starts and ends."""
    state_bytes: int
    """Parameters and optimizer state on one device."""
    host_s: float
    """The host's time for the last step, in which no device computed."""
    description: str
    kernels: dict[str, Counted]
    """How to count the cycles of its kernels."""


def _plugin_variables(topology: Topology, folder: Path) -> dict[str, str]:
    """Build the plugin into the folder, where it writes; return the environment of its processes.
    Raises UsageError."""
    plugin = folder / "placeholder_tpu.so"
    words = ["cc", "-shared", "-fPIC", "-O1", "-o", str(plugin), str(PLUGIN), "-ldl", "-lpthread"]
    built = subprocess.run(
        words, capture_output=True, text=True, encoding="utf-8", errors="replace", check=False
    )
    if built.returncode:
        raise UsageError(f"cc cannot compile {PLUGIN}: {built.stderr.strip()[:300]}")
    package = importlib.util.find_spec("libtpu")
    assert package is not None
    assert package.submodule_search_locations
    variables = {
        **compiler.JAX_WITHOUT_TPU,
        "TPU_LIBRARY_PATH": str(plugin),
        "PLACEHOLDER_LIBTPU": os.path.join(*package.submodule_search_locations, "libtpu.so"),
        "PLACEHOLDER_TOPOLOGY": topology.name,
        "PLACEHOLDER_SLICES": str(topology.slices),
        "PLACEHOLDER_FOLDER": str(folder),
        LIBTPU_VARIABLE: libtpu_flags(os.environ.get(LIBTPU_VARIABLE, ""), topology.chip.kind),
        "TORCHINDUCTOR_CACHE_DIR": str(folder / "cache"),
    }
    if topology.slice_chips < 4:  # else it has hosts of 2 x 2 chips
        variables["PLACEHOLDER_CHIPS_PER_HOST"] = f"1,{topology.slice_chips},1"
    return variables


def _record(
    config: RunConfig,
    backend_config: TorchConfig,
    asked: XlaConfig,
    topology: Topology,
    folder: Path,
    variables: Mapping[str, str],
) -> Recorded | str:
    """Run the steps in a process of their own, which leaves its log and its programs in the folder.
    Returns the error where the compiler refuses a program. Raises UsageError."""
    with (
        tempfile.NamedTemporaryFile(mode="r", encoding="utf-8", errors="replace") as stderr,
        compiler.libtpu_process(variables, stderr.name) as process,
    ):
        try:
            steps = process.submit(
                _run_steps, config, backend_config, topology, folder, named=asked.explain
            )
            return steps.result()
        except BrokenProcessPool:
            text = stderr.read()
            check = re.search(r"Check failed: .*|placeholder_tpu: .*", text)
            why = check[0] if check else text[-300:]
            raise UsageError(f"libtpu crashed on this step ({why})") from None


def _compile_kernel(call: str, config: dict[str, Any], topology: Topology) -> None:
    """Compile a kernel alone, in a process whose environment names the plugin."""
    del topology  # in the environment
    if not hasattr(torch, "tpu"):
        torch_tpu_private.register_without_tpu()
    with contextlib.suppress(RuntimeError):  # no cycles then
        torch_tpu_private.compile_text(compiler.module_of_kernel(call, config)[0])


def _run_steps(
    config: RunConfig,
    backend_config: TorchConfig,
    topology: Topology,
    folder: Path,
    *,
    named: bool,
) -> Recorded | str:
    """Train the steps in this process, whose environment names the plugin. ``named``: write into
    the programs from which module of the model each operation comes."""
    import pkgutil

    import torch._functorch.config
    import torch.distributed as dist
    from torch._C._distributed_c10d import FakeProcessGroup

    from tools.compile_only.placeholders import placeholder_batch
    from training.objectives.registry import open_objective
    from training.schedule import rope_factors
    from training.step import put_micro_batches, shard_and_optimize, train_step

    torch._functorch.config.enable_autograd_cache = False  # else compiled programs may be read
    run = resolve_for_slice(config, backend_config, topology)
    device = PlaceholderTpu()
    device.start(tf32=False, products=run.plan.products)
    places, cores = _links(run, topology).places, topology.chip.devices
    numbers = {place: number for number, place in enumerate(Links(topology).places[::cores])}

    def place(rank: int) -> tuple[int, int, int, int, int]:
        x, y, z = (*(of_chip := places[rank % len(places)]), 0)[:3]
        return numbers[of_chip] * cores + rank % cores, x, y, z, rank % cores

    device.store = torch_tpu_private.AbsentRanks(topology.devices, place, topology.slices)
    dist.init_process_group(
        device.collectives, store=device.store, rank=0, world_size=topology.devices
    )
    # What the hosts compare returns at once: no other process is there.
    world = dist.distributed_c10d._get_default_group()
    name, gloo = world.group_name, dist.ProcessGroup.BackendType.GLOO
    absent = FakeProcessGroup._create_internal(0, topology.devices)  # type: ignore[attr-defined]
    world._register_backend(torch.device("cpu"), gloo, absent)
    world._set_group_name(name)  # to the backend as well
    backend = pkgutil.resolve_name(run.plan.implementation.backend)(run, device)
    try:
        model = shard_and_optimize(run, backend, _uninitialized)
        model.train()
        objective = open_objective(run, backend)
        batch, fields = placeholder_batch(run, backend, objective, "cpu")
        optimizer = run.config.optimizer
        rates = StepRates(optimizer.lr, rope_factors=rope_factors(run).at(0))
        ends = []
        for step in range(STEPS):
            start = time.perf_counter()
            micro_batches = put_micro_batches(
                backend, batch, fields, run.config.data.grad_accum_steps
            )
            with _naming(model, backend) if named and not step else contextlib.nullcontext():
                train_step(
                    model,
                    objective,
                    backend,
                    step,
                    micro_batches,
                    rates=rates,
                    max_norm=optimizer.clip_grad_norm,
                )
            device.synchronize()
            host_s = time.perf_counter() - start
            ends.append((folder / "log").stat().st_size)
    except RuntimeError as error:  # the compiler's among them
        return str(error)
    return Recorded(
        last_step=(ends[-2], ends[-1]),
        state_bytes=sum(backend.state_bytes().values()),
        host_s=host_s,
        description=backend.describe(),
        kernels=counted_here(),
    )


class _Frame:
    """A scope of ``Names`` that is open until this is freed: what is traced meanwhile has a stack
    of one frame, in a file of its name. Of each operation torch_tpu writes the file into the
    module that it compiles."""

    def __init__(self, name: str) -> None:
        self._around = traceback.current_meta.get("stack_trace")
        traceback.set_stack_trace([f'File "{name}", line 1, in step\n  {name}\n'])

    def __del__(self) -> None:
        traceback.set_stack_trace([self._around] if self._around else [])


@contextlib.contextmanager
def _naming(model: nn.Module, backend: Backend) -> Iterator[None]:
    """Have a step that is traced inside name the modules of the model."""
    names = Names(_Frame)
    names.watch(model)
    update = backend.optimizer_step

    def named_update(
        rates: StepRates, max_norm: float, loss: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        with names.inside(OPTIMIZER, "update"):
            return update(rates, max_norm, loss)

    backend.optimizer_step = named_update  # type: ignore[method-assign]
    with (
        traceback.preserve_node_meta(),
        torch_tpu_private.named_loops(_file_in_loop),
        names.inside(LOSS, "forward"),
    ):
        yield
    backend.optimizer_step = update  # type: ignore[method-assign]


def _file_in_loop(files: Sequence[str]) -> str | None:
    """Return the file of the innermost scope. A loop of the backward pass computes blocks again."""
    scopes = [scope for file in files if (scope := scope_in(file))]
    if not scopes:
        return None
    module, phase = scopes[0]
    if phase == "forward" and scopes[-1].phase == "backward":
        phase = "recompute"
    return f"[{module}_{phase}]"


def _uninitialized(module: nn.Module, name: str) -> None:
    """Allocate the module's tensors that are on meta; their values are never computed with."""
    for part in module.modules():
        tensors = [*part.parameters(recurse=False), *part.buffers(recurse=False)]
        if any(tensor.is_meta for tensor in tensors):
            part.to_empty(device="cpu", recurse=False)


# -- the log of placeholder_tpu.c -----------------------------------------------------------------


@dataclass
class ProgramLog:
    """The programs of the last step, and how much memory is used when each runs."""

    text: str
    last_step: tuple[int, int]
    folder: Path
    runs: Counter[int] = field(init=False)
    """How often each program runs in the step, by its number, in the order of their first runs."""
    _donations: dict[int, list[int]] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        # As a step ends, a thread may be writing that it has freed a buffer: up to whole lines.
        first, last = (self.text.rfind("\n", 0, end) + 1 for end in self.last_step)
        self.last_step = first, last
        lines = self.text[first:last].splitlines()
        self.runs = Counter(int(line.split()[1]) for line in lines if line.startswith("executed"))

    @cached_property
    def compiled(self) -> Mapping[int, list[int]]:
        """By number: nanoseconds; bytes of arguments, results, aliases, temporaries, peak."""
        lines = (line.split() for line in self.text.splitlines())
        return {
            int(words[1]): [int(word) for word in words[2:]]
            for words in lines
            if words[0] == "compiled"
        }

    def module(self, number: int, stage: str) -> str:
        """Return a program as text, at a stage of its compilation."""
        (path,) = (self.folder / str(number)).glob(f"*.{stage}.txt")
        return path.read_text(encoding="utf-8")

    @cached_property
    def peaks(self) -> Mapping[int, int]:
        """The most bytes of HBM in use while a program of the step runs, by its number."""
        sizes: dict[int, int] = {}
        peaks: dict[int, int] = {}
        in_use, read = 0, 0
        for line in self.text[: self.last_step[1]].splitlines(keepends=True):
            read += len(line)
            kind, number, *words = line.split()
            if kind == "buffer":
                sizes[int(number)] = int(words[0])
                in_use += int(words[0])
            elif kind == "freed":
                in_use -= sizes.pop(int(number), 0)
            elif kind == "executed":
                given, kept, _ = (part.split() for part in " ".join(words).split("->"))
                for place in self._donated(int(number)):  # a result is in its memory
                    if str(place) not in kept:
                        in_use -= sizes.pop(int(given[place]), 0)
                if read > self.last_step[0]:
                    used = in_use + self.compiled[int(number)][4]
                    peaks[int(number)] = max(peaks.get(int(number), 0), used)
        return peaks

    def _donated(self, number: int) -> list[int]:
        """Return the places of the arguments whose memory results take."""
        if number not in self._donations:
            head = self.module(number, "after_codegen").partition("\n")[0]
            aliases = re.search(r"input_output_alias=\{(.*?)\}, entry", head)
            found = re.findall(r"\((\d+), \{\}, \w+-alias\)", aliases[1]) if aliases else []
            self._donations[number] = [int(place) for place in found]
        return self._donations[number]


def _graph(step: ProgramLog, number: int, links: Links, variables: dict[str, str]) -> CompiledGraph:
    """Return what is known of a program of the step. ``variables``: of processes that compile its
    kernels alone."""
    topology = links.topology
    hlo = compiler.write_kernel_cycles(
        step.module(number, "after_codegen"), topology, variables, _compile_kernel
    )
    nanoseconds, arguments, outputs, _, temporaries, peak = step.compiled[number]
    compiled = Compiled(
        fits=True,
        argument_bytes=arguments,
        output_bytes=outputs,
        temporary_bytes=temporaries,
        peak_bytes=peak,
        capacity_bytes=topology.chip.hbm_bytes,
        result_shardings=[],
        hlo=hlo,
        seconds=nanoseconds / 1e9,
    )
    traced = step.module(number, "before_optimizations")
    return CompiledGraph(
        runs=step.runs[number],
        compiled=compiled,
        traffic=measure(hlo, topology.devices, topology.slices),
        expected=expect(hlo, links),
        flops=topology.devices * count_flops(traced),
        resident_bytes=max(0, step.peaks[number] - peak),
    )


def _programs(graphs: list[CompiledGraph]) -> list[dict[str, Any]]:
    """Return the programs of a step, those that take longest first; seconds are of all runs."""
    programs = []
    for number, graph in enumerate(graphs, 1):
        assert graph.compiled
        assert graph.expected
        name = re.match(r"HloModule (?:tt_jit_)?([\w.\-]+)", graph.compiled.hlo)
        programs.append(
            {
                "graph": number,
                "name": name[1] if name else "",
                "runs": graph.runs,
                "seconds": graph.runs * graph.expected.seconds,
                "waiting_s": graph.runs * graph.expected.waiting_s,
                "flops": graph.runs * graph.flops,
                "compile_s": graph.compiled.seconds,
            }
        )
    return sorted(programs, key=lambda program: -program["seconds"])


_SHOWN = 20
"""Programs in the table; the rest is one row."""


def _table(programs: list[dict[str, Any]]) -> str:
    """Return the programs that take longest as a table to read."""
    lines = ["     ms  waiting ms   runs  program"]
    rest = programs[_SHOWN:]
    shown = programs[:_SHOWN]
    if rest:
        sums = {
            key: sum(program[key] for program in rest) for key in ("seconds", "waiting_s", "runs")
        }
        shown = [*shown, {**sums, "name": f"the other {len(rest)}"}]
    for row in shown:
        seconds, waiting = 1e3 * row["seconds"], 1e3 * row["waiting_s"]
        lines.append(f"{seconds:7.2f}  {waiting:10.2f}  {row['runs']:5}  {row['name'][:60]}")
    return "\n".join(lines)
