"""All uses of torch_tpu's undocumented interface.

Before using another version of torch_tpu, compare these functions with its source. It is imported
only if TorchTPU is selected, because importing torch_tpu loads the TPU runtime.
"""

import contextlib
import functools
import hashlib
import importlib.util
import itertools
import re
import runpy
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

WRITTEN_FOR = {"torch_tpu": "0.2.0"}

_KINDS = {
    "TPU v4": "v4",
    "TPU v5p": "v5p",
    "TPU v5e": "v5litepod",
    "TPU v6e": "v6e",
    "TPU v7": "tpu7x",
}
"""Accelerator types, by torch_tpu's names of the chips that it finds on the PCI bus."""


def tpus_of_host() -> int | None:
    """Return the number of TPU devices on this host's PCI bus; None without the package.

    It starts none: it reads one file of torch_tpu, which needs nothing of the package. Once that is
    imported, PyTorch starts its runtime at the first backward pass, TPU or not.
    """
    hardware = _hardware()
    return hardware["get_tpu_device_count"]() if hardware else None


def kind_of_host() -> str:
    """Return the accelerator type of this host's chips, "v5litepod" say; "" where there is none."""
    hardware = _hardware()
    return _KINDS.get(hardware["get_tpu_device_name"](), "") if hardware else ""


def _hardware() -> dict[str, Any] | None:
    package = importlib.util.find_spec("torch_tpu")
    if package is None or package.origin is None:
        return None
    file = Path(package.origin).parent / "_internal" / "utils" / "hardware.py"
    return runpy.run_path(str(file))


def register() -> None:
    """Register the device "tpu" in PyTorch, unless importing PyTorch has done so already.

    It has not with TORCH_DEVICE_BACKEND_AUTOLOAD=0.
    """
    from torch_tpu import _loader

    _loader.load()


def register_without_tpu() -> None:
    """Register the device "tpu" on a host that has none: TPU_LIBRARY_PATH is a PJRT plugin."""
    from torch_tpu import _loader

    _loader._init_device("tpu")


def compile_text(module: str) -> None:
    """Compile a StableHLO module that is written so for this process's device."""
    from torch_tpu._internal.compile import tpu_torch_compile

    tpu_torch_compile.compile_mlir(tpu_torch_compile.parse_mlir_text(module))


def device_attributes() -> dict[str, Any]:
    """Return what the runtime knows of this process's device; starts it.

    "device_kind" is a name as "TPU v5 lite", or "cpu" with a plugin for the host's processor;
    "coords", its place in the slice, is there if the runtime knows it.
    """
    from torch_tpu._internal.device import _device_ops_backend

    return _device_ops_backend._get_local_device_attributes()


def peak_bf16_flops() -> float | None:
    """Return the peak FLOP/s of one device in bf16 by Google's pages; None if it is unknown."""
    from torch_tpu._internal.utils import hardware

    return hardware.get_bf16_flops_per_device()


def issue(tensors: Sequence[torch.Tensor]) -> None:
    """Hand to the device what computes ``tensors``, without waiting for it.

    Operations outside of torch.compile may wait until their results are needed.
    """
    from torch_tpu._internal import sync

    sync.synchronize(list(tensors), wait=False)


def counts() -> dict[str, int]:
    """Return how many graphs this process has compiled since its start, and executed."""
    from torch_tpu._internal.device import _device_ops_backend

    stats: Any = _device_ops_backend._get_cache_stats()
    return {"compilations": stats.num_compilations, "executions": stats.num_cache_reqs}


def compile_graph(
    graph: torch.fx.GraphModule, inputs: Sequence[torch.Tensor], written: Sequence[int]
) -> Callable[..., Sequence[torch.Tensor]]:
    """Compile a graph with its collectives as one program; see ``Device.compile_graph``.

    torch.compile's backend "tpu" compiles by the same class, but divides a graph at collectives,
    and donates no input.
    """
    from torch_tpu._internal.compile.compiler import StaticCompiler

    (output,) = graph.graph.find_nodes(op="output")
    placeholders = graph.graph.find_nodes(op="placeholder")
    results = list(output.args[0])
    output.args = ([*results, *(placeholders[i] for i in written)],)
    graph.recompile()
    like = [values.detach() for values in inputs]
    with _bodies_not_compiled_alone():
        program = StaticCompiler()(graph, like, donated_inputs=list(written), module_name="step")

    def run(*given: torch.Tensor) -> Sequence[torch.Tensor]:
        found = program(*given)
        for i, values in zip(written, found[len(results) :], strict=True):
            given[i].data = values  # the memory of the old ones, which were donated
        return found[: len(results)]

    return run


@contextlib.contextmanager
def _bodies_not_compiled_alone() -> Iterator[None]:
    """Lower the body of a scan inside, which torch_tpu 0.2.0 would also compile as a program of its
    own, and then not run."""
    from torch_tpu._internal.compile import scan

    def lower(body: torch.fx.GraphModule, args: list[Any]) -> SimpleNamespace:
        return SimpleNamespace(module=_with_ranks(scan._build_body_mlir(body, args), body))

    with mock.patch.object(scan.export, "fx_to_mlir", lower):
        yield


def _with_ranks(module: Any, body: torch.fx.GraphModule) -> Any:
    """Return the module of a scan's body with ranks in its groups of processes.

    torch_tpu 0.2.0 numbers the devices of each module it makes along the groups of the module's
    first collective. But a body becomes a part of a program whose first one may have other groups:
    here that is over all processes of a replica, which follow one another.
    """
    from torch_tpu._internal.compile import tpu_torch_compile

    used = set(body.graph.find_nodes(op="output"))
    for node in reversed(body.graph.nodes):
        used.update(node.all_input_nodes if node in used else ())
    names = [
        node.args[-1]
        for node in body.graph.nodes
        if node in used  # the module has no others
        and getattr(node.target, "namespace", "") == "_c10d_functional"
        and isinstance(node.args[-1], str)
    ]
    if len(set(names)) < 2:
        return module
    text = tpu_torch_compile.serialize_mlir_text(module, enable_debug_info=True)
    written = [_parse_groups(match[1], match[2]) for match in _GROUPS.finditer(text)]
    meant = [_groups_of(name) for name in names]
    ranks = list(itertools.chain(*meant[0]))
    found = [[[ranks[i] for i in group] for group in groups] for groups in written]
    if [sorted(groups) for groups in found] != [sorted(groups) for groups in meant]:
        raise RuntimeError("torch_tpu has numbered the devices of a loop in an unknown order")

    def rewrite(match: re.Match[str]) -> str:
        groups = _parse_groups(match[1], match[2])
        return f"dense<{[[ranks[i] for i in group] for group in groups]}> : tensor<{match[2]}xi64>"

    return tpu_torch_compile.parse_mlir_text(_GROUPS.sub(rewrite, text))


_GROUPS = re.compile(r"(?<=replica_groups = )dense<([^>]*)> : tensor<(\d+x\d+)xi64>")


def _parse_groups(values: str, shape: str) -> list[list[int]]:
    """Return groups as StableHLO's text writes them: lists, or bytes of many numbers."""
    count, size = map(int, shape.split("x"))
    if values.startswith('"0x'):
        numbers = list(struct.unpack(f"<{count * size}q", bytes.fromhex(values[3:-1])))
    else:
        numbers = [int(number) for number in re.findall(r"\d+", values)]
    return [numbers[i * size : (i + 1) * size] for i in range(count)]


@functools.cache
def _groups_of(name: str) -> list[list[int]]:
    """Return the ranks of the group of this name, and of those that are along the same axis."""
    from torch_tpu._internal.compile import scan, tpu_torch_compile

    def sums(x: torch.Tensor) -> list[torch.Tensor]:
        for group in (dist.distributed_c10d._get_default_group().group_name, name):
            summed = torch.ops._c10d_functional.all_reduce(x, "sum", group)
            x = torch.ops._c10d_functional.wait_tensor(summed)
        return [x]

    x = scan._to_placeholder(torch.empty(1))
    text = tpu_torch_compile.serialize_mlir_text(scan._build_body_mlir(sums, [x]))
    *_, last = _GROUPS.finditer(text)
    return _parse_groups(last[1], last[2])


@contextlib.contextmanager
def named_loops(file_of: Callable[[Sequence[str]], str | None]) -> Iterator[None]:
    """Let the operations in loops of graphs that are compiled inside come from a file each.
    ``file_of``: takes the files of an operation's stack, the innermost first.

    torch_tpu 0.2.0 prints the body of a loop and parses it again, so that an operation comes from a
    line of this text. Here the loop is a kernel, a text with other places.
    """
    from torch_tpu._internal.compile import tpu_torch_compile

    create = tpu_torch_compile.create_scan_op

    def create_named(inits: Any, inputs: Any, body_module: Any, **how: Any) -> list[torch.Tensor]:
        text = tpu_torch_compile.serialize_mlir_text(body_module, enable_debug_info=True)
        definitions = dict(re.findall(r"^(#loc\d+) = loc\((.*)\)$", text, re.M))
        lines = [line for line in text.splitlines() if not line.startswith("#loc")]
        stacks = [_stack(line.rpartition(" loc(")[2], definitions) for line in lines]

        def place(found: re.Match[str]) -> str:
            operation, *files = stacks[int(found[1]) - 1] or [""]
            file = file_of(files)
            return f'loc("{operation}"("{file}":1:0))' if file else found[0]

        given = [tpu_torch_compile.placeholder_like(x) for x in (*inits, *inputs)]
        like = create(given[: len(inits)], given[len(inits) :], body_module, **how)
        module = tpu_torch_compile.build_mlir(like, given)
        text = tpu_torch_compile.serialize_mlir_text(module, enable_debug_info=True)
        text = re.sub(r'loc\("-":(\d+):\d+\)', place, text)
        return call_kernel(text, [*inits, *inputs], [(x.shape, x.dtype) for x in like])

    with mock.patch.object(tpu_torch_compile, "create_scan_op", create_named):
        yield


def _stack(location: str, definitions: Mapping[str, str]) -> list[str]:
    """Return the names in a location of MLIR: its operation, then functions and files of its stack,
    the innermost first."""
    names: list[str] = []
    for name, other in re.findall(r'"([^"]*)"|(#loc\d+)', location):
        names += [name] if name else _stack(definitions.get(other, ""), definitions)
    return names


@contextlib.contextmanager
def reverse_scans() -> Iterator[None]:
    """Trace scans inside as loops from last to first. (Flips, as in PyTorch, would be copies.)"""
    from torch_tpu._internal.compile import scan

    traceback: Any = importlib.import_module("torch.fx.traceback")  # names of newer PyTorch
    with traceback.preserve_node_meta(), traceback.annotate({scan.SCAN_REVERSE_ANNOTATION: True}):
        yield


def barrier(tensors: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
    """Return the tensors through XLA's optimization barrier."""
    return torch.ops.tpu._optimization_barrier(list(tensors))


def call_kernel(
    module: str,
    inputs: Sequence[torch.Tensor],
    results: Sequence[tuple[Sequence[int], torch.dtype]],
) -> list[torch.Tensor]:
    """Return the results, of these shapes and dtypes, of a StableHLO module, such as that of one
    TPU kernel; a graph takes it in.

    ``torch.tpu.pallas.jax_op`` does the same of a JAX function, which it lowers itself.
    """
    from torch_tpu._internal.compile import tpu_torch_compile
    from torch_tpu._internal.pallas import tpu_torch_pallas

    name, key = "vit", hashlib.blake2b(module.encode(), digest_size=16).hexdigest()
    if not tpu_torch_pallas.lookup_custom_kernel(name, key):
        parsed = tpu_torch_compile.parse_mlir_text(module)
        artifact = tpu_torch_compile.serialize_mlir_portable_artifact(parsed)
        tpu_torch_pallas.register_custom_kernel(name, key, serialized_mlir_module=artifact)
    shapes = [torch.empty(shape, dtype=dtype, device="meta") for shape, dtype in results]
    return tpu_torch_pallas.call_custom_kernel(name, key, inputs=inputs, output_shapes=shapes)


def collective_permute(x: torch.Tensor, pairs: Sequence[tuple[int, int]]) -> torch.Tensor:
    """Send ``x`` from the first to the second rank of each pair; for graphs that have other
    collectives too. torch_tpu 0.2.0 knows no such operation, and compiles a graph without any that
    it knows for one device."""
    array = tensor_type(x.shape, x.dtype)
    listed = ", ".join(map(str, map(list, pairs)))
    module = f"""module {{
  func.func public @main(%x: {array}) -> {array} {{
    %y = "stablehlo.collective_permute"(%x) {{
      channel_handle = #stablehlo.channel_handle<handle = 1, type = 1>,
      source_target_pairs = dense<[{listed}]> : tensor<{len(pairs)}x2xi64>
    }} : ({array}) -> {array}
    return %y : {array}
  }}
}}"""
    (received,) = call_kernel(module, [x], [(x.shape, x.dtype)])
    return received


_MLIR_TYPES = {
    torch.float32: "f32",
    torch.bfloat16: "bf16",
    torch.float8_e4m3fn: "f8E4M3FN",
    torch.int32: "i32",
    torch.int8: "i8",
}


def tensor_type(shape: Sequence[int], dtype: torch.dtype) -> str:
    """Return what StableHLO calls tensors of this shape and dtype."""
    return f"tensor<{'x'.join([*map(str, shape), _MLIR_TYPES[dtype]])}>"


@torch.library.custom_op("vit::moved_to", mutates_args=())
def moved_to(memory: str, x: torch.Tensor) -> torch.Tensor:
    """Return ``x`` in the memory "pinned_host" or "device", in a graph."""
    tensor = tensor_type(x.shape, x.dtype)
    # Without a side effect: torch_tpu 0.2.0 gives it no sharding, which libtpu would then require.
    module = f"""
        func.func @main(%x: {tensor}) -> {tensor} {{
          %y = stablehlo.custom_call @annotate_device_placement(%x) {{
            mhlo.frontend_attributes = {{_xla_buffer_placement = "{memory}"}}
          }} : ({tensor}) -> {tensor}
          return %y : {tensor}
        }}
    """
    return call_kernel(module, [x], [(x.shape, x.dtype)])[0]


@moved_to.register_fake
def _(memory: str, x: torch.Tensor) -> torch.Tensor:
    return x.new_empty(x.shape)


@torch.library.custom_op("vit::row_major", mutates_args=())
def row_major(x: torch.Tensor) -> torch.Tensor:
    """Return ``x`` laid out row by row, in a graph. XLA may choose another layout for a tensor
    inside of a program, and for what is computed from it."""
    tensor, order = tensor_type(x.shape, x.dtype), [*reversed(range(x.dim()))]
    layouts = f"[dense<{order}> : tensor<{x.dim()}xindex>]"
    module = f"""
        func.func @main(%x: {tensor}) -> {tensor} {{
          %y = stablehlo.custom_call @LayoutConstraint(%x) {{
            operand_layouts = {layouts}, result_layouts = {layouts}
          }} : ({tensor}) -> {tensor}
          return %y : {tensor}
        }}
    """
    return call_kernel(module, [x], [(x.shape, x.dtype)])[0]


@row_major.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return x.new_empty(x.shape)


class AbsentRanks(dist.Store):
    """A store by which rank 0 starts process groups "tpu_dist" alone, as if all ranks were there.

    Each rank enters its device there, "world_topo:RANK" and its attributes, and for each axis of a
    mesh, all meshes' counted together, the group that it is in, "pg_sub:NUMBER:RANK": strings that
    follow their lengths. It reads those of all others. Groups of all ranks, or of one, are not
    entered.
    """

    def __init__(self, ranks: int, place: Callable[[int], Sequence[int]], slices: int = 1) -> None:
        """``place``: of a rank's device its number in the slice, x, y, z and its core on the chip.
        The ranks of a slice follow one another."""
        super().__init__()
        self._ranks, self._place, self._slices = ranks, place, slices
        self._values: dict[str, Any] = {}
        self._groups: list[torch.Tensor] = []
        """By number: the groups along an axis, one in each row."""

    def add_mesh(self, mesh: torch.Tensor) -> None:
        """Add the mesh whose groups are made next."""
        axes = (axis for axis, size in enumerate(mesh.shape) if 1 < size < mesh.numel())
        self._groups += [mesh.movedim(axis, -1).flatten(end_dim=-2) for axis in axes]

    def set(self, key: str, value: Any) -> None:
        self._values[key] = value

    def get(self, key: str) -> Any:
        if key in self._values:
            return self._values[key]
        node, _, rank = key.rpartition(":")
        own = self._values[f"{node}:0"].decode().partition(":")[2]
        length, _, rest = own.partition(":")
        entered, told = rest[: int(length)], rest[int(length) :]
        kind, *number = entered.split(":")[:-1]
        if kind == "pg_sub":
            told = self._group(int(rank), int(number[0]), told)
        else:
            told = self._device(int(rank), told)
        entered = f"{entered.rpartition(':')[0]}:{rank}"
        told = f"{len(entered)}:{entered}{told}"
        return f"{len(told)}:{told}".encode()

    def _device(self, rank: int, first: str) -> str:
        """Return a rank's id, process, x, y, z, core, slice and kind, as rank 0 says its own."""
        device = first.split(",")
        slice_, (number, *coordinates) = rank * self._slices // self._ranks, self._place(rank)
        # Each slice has ids of its own in libtpu, from a multiple of 100,000 on.
        device[0] = str(int(device[0]) + 100_000 * slice_ + number)
        device[1:6] = map(str, (rank, *coordinates))
        device[6] = str(int(device[6]) + slice_)  # -1: there is but one
        return ",".join(device)

    def _group(self, rank: int, number: int, first: str) -> str:
        """Return a rank's place in its group along an axis, the rank, and what names the group, as
        rank 0 says it of its own."""
        groups = self._groups[number].tolist()
        (group,) = (sorted(each) for each in groups if rank in each)
        name = first.partition(":")[2] + (str(group[0]) if group[0] else "")
        return f"{group.index(rank)},{rank}:{name}"

    def add(self, key: str, amount: int) -> int:
        if amount == 0:  # how many have come
            return self._ranks
        self._values[key] = self._values.get(key, 0) + amount
        return self._values[key]

    def wait(self, keys: Sequence[str], *timeout: Any) -> None:
        """Return at once: what has to come is there."""

    def check(self, keys: Sequence[str]) -> bool:
        return True

    def set_timeout(self, timeout: Any) -> None:
        """Ignore the timeout."""

    def clone(self) -> dist.Store:
        return self
