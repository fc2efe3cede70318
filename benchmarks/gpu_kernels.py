"""List the kernels that torch.compile makes of a block for an H200, and the bytes that each must
move, without a GPU.

    python benchmarks/gpu_kernels.py --model vit_large_patch16_224 --batch_size 256
    python benchmarks/gpu_kernels.py --model vit_large_patch16_224 --batch_size 256 --change bias

A block of timm's in bf16, forward and backward. Inductor lowers, fuses and schedules its operations
as on the GPU; nothing is run. "MB" counts what a kernel reads and writes, each tensor once;
"ms/model" is how long that takes in all blocks at the memory's measured bandwidth (4.3 TB/s), a
lower bound. Products and attention are libraries' kernels, without a bound here.

Requires PyTorch 2.14, whose private names it uses.
"""

import argparse
import contextlib
import copy
import json
import sys
import types
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from unittest import mock

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
import triton
from torch import Tensor, nn
from torch._dynamo.device_interface import CudaInterface
from torch._functorch.aot_autograd import aot_function, make_boxed_func
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._guards import TracingContext, tracing
from torch._inductor.compile_fx import compile_fx_inner
from torch._inductor.decomposition import select_decomp_table
from torch._inductor.graph import GraphLowering
from torch._inductor.virtualized import V
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from triton.backends.compiler import GPUTarget

from benchmarks.common import markdown
from benchmarks.gpu_candidates import CHANGES
from config_fields import local_path
from models.config import PRESETS
from models.registry import open_model

WRITTEN_FOR = "2.14"
BANDWIDTH = 4.3e12
"""Bytes per second of a copy between the memory of one H200, read and written."""
_H200 = types.SimpleNamespace(
    name="NVIDIA H200",
    type="cuda",
    index=0,
    major=9,
    minor=0,
    multi_processor_count=132,
    total_memory=141 * 10**9,
    max_threads_per_multi_processor=2048,
    max_threads_per_block=1024,
    regs_per_multiprocessor=65536,
    warp_size=32,
    shared_memory_per_block_optin=232448,
    L2_cache_size=60 * 2**20,
)


@dataclass(frozen=True)
class Kernel:
    operations: tuple[str, ...]
    """The operations that are fused in it, or the name of a library's function."""
    moved: int
    """The bytes that it reads and writes."""
    is_library: bool
    is_backward: bool


# -- A CUDA device that is not there ---------------------------------------------------------------


class _Driver:
    """What Triton asks its driver for, before it compiles."""

    @staticmethod
    def get_current_target() -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    @staticmethod
    def get_active_torch_device() -> torch.device:
        return torch.device("cuda", 0)


@contextlib.contextmanager
def pretended_h200() -> Iterator[None]:
    """Let Inductor find one H200."""
    torch._C._ensureCUDADeviceGuardSet()  # type: ignore[attr-defined]
    answers: dict[str, Callable[..., Any]] = {
        "is_available": lambda: True,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "get_device_properties": lambda *_: _H200,
        "get_device_capability": lambda *_: (9, 0),
        "_lazy_init": lambda: None,
        "get_rng_state": lambda *_: torch.zeros(16, dtype=torch.uint8),
        "set_rng_state": lambda *_: None,
        "_exchange_device": lambda _: 0,
        "_maybe_exchange_device": lambda _: 0,
    }
    with contextlib.ExitStack() as stack:
        for name, answer in answers.items():
            stack.enter_context(mock.patch.object(torch.cuda, name, answer))
        for owner in (CudaInterface, CudaInterface.Worker):
            stack.enter_context(
                mock.patch.object(
                    owner, "get_device_properties", staticmethod(lambda _=None: _H200)
                )
            )
        stack.enter_context(
            mock.patch.object(
                CudaInterface, "get_compute_capability", staticmethod(lambda _=None: 90)
            )
        )
        # It initializes patterns on the device, for attention written with products.
        stack.enter_context(
            mock.patch("torch._inductor.fx_passes.joint_graph.lazy_init", return_value=None)
        )
        stack.enter_context(mock.patch.object(triton.runtime.driver, "_active", _Driver()))
        stack.enter_context(torch._inductor.config.patch(force_disable_caches=True))
        yield


# -- Attention as an unknown function, with the layouts of cuDNN's ---------------------------------


@torch.library.custom_op("gpu_kernels::attention", mutates_args=())
def _attention(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    raise NotImplementedError


@torch.library.custom_op("gpu_kernels::attention_backward", mutates_args=())
def _attention_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, output: Tensor, statistics: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    raise NotImplementedError


def _like(q: Tensor) -> Tensor:
    return q.new_empty(q.transpose(1, 2).shape).transpose(1, 2)  # heads behind tokens in memory


@_attention.register_fake
def _(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    return _like(q), q.new_empty((*q.shape[:3], 1), dtype=torch.float32)


@_attention_backward.register_fake
def _(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, output: Tensor, statistics: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    return _like(q), _like(k), _like(v)


_attention.register_autograd(
    lambda ctx, grad, _: _attention_backward(grad, *ctx.saved_tensors),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs, *output),
)


# -- The kernels -----------------------------------------------------------------------------------


class _Lowered(Exception):
    """Ends a compilation when its kernels are known."""


def kernels_of(block: nn.Module, x: Tensor) -> list[Kernel]:
    """Return the kernels of the forward and backward pass of a block with input ``x``. Both are on
    the CPU in a FakeTensorMode."""
    found: list[Kernel] = []

    def lowered(graph: GraphLowering) -> None:
        graph.codegen()
        for node in graph.scheduler.nodes:
            library = getattr(node.node, "python_kernel_name", None)
            names = {
                str(origin.target).split(".")[1]
                for part in node.get_nodes()
                for origin in getattr(part.node, "origins", ())
                if "." in str(origin.target)
            }
            found.append(
                Kernel(
                    operations=(library,) if library else tuple(sorted(names)),
                    moved=node.get_read_write_buffers_sizes(),
                    is_library="Extern" in type(node).__name__,
                    is_backward=graph.is_backward,
                )
            )
        raise _Lowered

    def lower(
        traced: torch.fx.GraphModule, inputs: Sequence[Any], *, is_backward: bool
    ) -> Callable[..., Any]:
        mode = FakeTensorMode(allow_non_fake_inputs=True)
        with pretended_h200(), mode, V.set_fake_mode(mode), tracing(TracingContext(mode)):
            on_gpu = [
                torch.empty_strided(i.shape, i.stride(), dtype=i.dtype, device="cuda")
                for i in inputs
            ]
            graph = copy.deepcopy(traced)
            for node in graph.graph.nodes:  # constants
                if "device" in node.kwargs:
                    node.update_kwarg("device", torch.device("cuda"))
            graph.recompile()
            try:
                compile_fx_inner(make_fx(graph)(*on_gpu), on_gpu, is_backward=is_backward)
            except Exception as error:
                if "_Lowered" not in f"{type(error).__name__} {error}":
                    raise
        return make_boxed_func(traced.forward)

    def attend(q: Tensor, k: Tensor, v: Tensor, **_: Any) -> Tensor:
        output: Tensor = _attention(q, k, v)[0]
        return output

    def call(parameters: dict[str, Tensor], x: Tensor) -> Tensor:
        output: Tensor = torch.func.functional_call(block, parameters, (x,))
        return output

    compiled = aot_function(
        call,
        fw_compiler=lambda graph, inputs: lower(graph, inputs, is_backward=False),
        bw_compiler=lambda graph, inputs: lower(graph, inputs, is_backward=True),
        partition_fn=lambda joint, inputs, **options: min_cut_rematerialization_partition(
            joint, inputs, **{**options, "compiler": "inductor"}
        ),
        decompositions=select_decomp_table(),
    )
    with (
        mock.patch("torch.nn.functional.scaled_dot_product_attention", attend),
        mock.patch.object(GraphLowering, "_compile_to_module", lowered),
    ):
        compiled(dict(block.named_parameters()), x).sum().backward()
    return found


def kernels_of_model(
    model: str, batch_size: int, changes: Sequence[str] = ()
) -> tuple[list[Kernel], int]:
    """Return the kernels of a block of ``model``, with these changes of ``gpu_candidates``, and the
    number of blocks."""
    spec = open_model(model, {})
    with FakeTensorMode(allow_non_fake_inputs=True):
        block = copy.deepcopy(spec.block)
        for change in changes:
            CHANGES[change](block)
        for name, parameter in list(block.named_parameters()):
            owner, _, key = name.rpartition(".")
            values = nn.Parameter(torch.empty(parameter.shape, dtype=torch.bfloat16))
            setattr(block.get_submodule(owner), key, values)
        shape = (batch_size, spec.sizes.num_tokens, spec.sizes.embed_dim)
        x = torch.empty(shape, dtype=torch.bfloat16, requires_grad=True)
        return kernels_of(block, x), spec.sizes.depth


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", choices=PRESETS, default="vit_large_patch16_224")
    parser.add_argument("--batch_size", type=int, default=256, help="images (default: 256)")
    parser.add_argument("--change", action="append", choices=CHANGES, default=[])
    parser.add_argument(
        "--json", type=local_path, metavar="FILE", help="write all kernels to this JSON file"
    )
    return parser.parse_args()


def main() -> None:
    options = parse()
    if not torch.__version__.startswith(WRITTEN_FOR):
        sys.exit(f"gpu_kernels.py requires PyTorch {WRITTEN_FOR}, not {torch.__version__}")
    kernels, depth = kernels_of_model(options.model, options.batch_size, options.change)
    if options.json:
        options.json.write_text(
            json.dumps([asdict(kernel) for kernel in kernels], indent=2) + "\n", encoding="utf-8"
        )
    rows = [["pass", "operations", "MB", "ms/model"]]
    total = 0
    for kernel in kernels:
        if kernel.moved < 1e6:
            continue
        seconds = "" if kernel.is_library else f"{kernel.moved / BANDWIDTH * depth * 1e3:.1f}"
        total += 0 if kernel.is_library else kernel.moved
        where = "backward" if kernel.is_backward else "forward"
        rows.append([where, ", ".join(kernel.operations), f"{kernel.moved / 1e6:.0f}", seconds])
    rows.append(
        [
            "both",
            "all but libraries'",
            f"{total / 1e6:.0f}",
            f"{total / BANDWIDTH * depth * 1e3:.1f}",
        ]
    )
    print("\n".join(markdown(rows)))


if __name__ == "__main__":
    main()
