"""How the model is parallelized: the plan that ``resolve_torch`` makes, and its steps for a block.

Recomputation and torch.compile replace ``block.forward`` and keep the module. So parameters keep
the names of the plain model, and FSDP's hooks stay outside the compiled code.
"""

from __future__ import annotations

import functools
import inspect
import sys
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

import torch
from torch import nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from torch_fsdp.attention import use_attention
from torch_fsdp.config import Fsdp2Config
from torch_fsdp.devices import Device
from training.config import RunConfig
from training.errors import UsageError
from training.mesh import Mesh
from training.resolve import Run

OUTER, SHARD = "dcn", "fsdp"
"""The mesh axes: replicas, and the shards of a replica."""
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}

_aten: Any = torch.ops.aten
_ATTENTION = {
    _aten._scaled_dot_product_flash_attention.default,
    _aten._scaled_dot_product_flash_attention_for_cpu.default,
    _aten._scaled_dot_product_efficient_attention.default,
    _aten._scaled_dot_product_cudnn_attention.default,
    torch.ops.vit.attention_kernel.default,
}
_MATRIX_PRODUCTS = {_aten.mm.default, _aten.addmm.default, _aten._scaled_mm.default}


@dataclass(frozen=True)
class TimmBlocks:
    """timm's own blocks. Subclasses replace them with others that hold the same weights."""

    name: ClassVar[str] = "timm"
    """Their name in ``--block``."""
    fp8: str = "none"
    """The recipe of their FP8 products, as in ``--fp8``."""

    def __str__(self) -> str:
        products = f" in FP8 ({self.fp8})" if self.fp8 != "none" else ""
        return f"{self.name} blocks{products}"

    def check(self, run: TorchRun) -> None:
        """Raise UsageError if such blocks cannot run here, or not with this model and batch."""

    def replace(self, block: nn.Module, device: str) -> nn.Module:
        """Return the block that replaces timm's ``block``."""
        return block

    def recompute(self, block: nn.Module, mode: str) -> None:
        """Recompute activations of the block in the backward pass: "full" or "selective"."""
        options: dict[str, Any] = {}
        if mode == "selective":
            options["context_fn"] = selective_contexts
        forward = block.forward
        if inspect.ismethod(forward):
            # Lets identical blocks share a graph; a bound method belongs to one block.
            forward = functools.partial(forward.__func__, block)
        block.forward = functools.partial(checkpoint, forward, use_reentrant=False, **options)

    def wrap_model(self, model: nn.Module) -> None:
        """Change how the whole sharded model computes."""

    def timm_name(self, name: str) -> str:
        """Return a parameter's name in timm's model, given its name in one with these blocks."""
        return name


@dataclass(frozen=True)
class FsdpImplementation:
    """FSDP2, or a library that replaces it."""

    backend: str
    """Its subclass of ``TorchBackend``, as "module:class": imported when devices start."""
    check: Callable[[RunConfig, Fsdp2Config, Mesh, Device], None]
    """Raise UsageError for flags that it does not support."""
    written_for: Mapping[str, str] = field(default_factory=dict)
    """The versions of packages whose private names it uses."""
    compiles: Literal["block", "step"] = "block"
    """What is compiled as one graph."""


@dataclass(frozen=True)
class TorchPlan:
    """How the plain model becomes a parallel one (see ``parallelize_block`` for the order).

    Options of only one implementation of FSDP are in ``TorchRun.backend_config``.
    """

    implementation: FsdpImplementation
    """What shards the model."""
    zero: int
    """What is sharded: 0 nothing, 1 optimizer state, 2 also gradients, 3 also weights."""
    domain_attention: str | None
    """How attention sees the tokens of all processes that share an image: "ring" or "ulysses"; None
    if no processes share one."""
    varlen: bool
    """Whether attention over sequences of several images uses variable-length kernels
    (``torch_fsdp/varlen.py``), which compute only scores within an image."""
    attention: str
    """What computes attention in the blocks, as ``--attention`` names it."""
    blocks: TimmBlocks
    """timm's blocks, or their replacement."""
    grad_ckpt: str
    """Which activations of a block are recomputed: "none", "selective" or "full"."""
    compile: Literal["none", "block", "around attention", "step"]
    """What is compiled as one graph. torch.compile cannot compile communication; a whole step is
    traced by ``step_graph.py``."""
    compile_required: bool
    """Whether the run ends if torch.compile fails, instead of computing the blocks without it."""
    compiler: str
    """The backend of torch.compile."""
    dtype: torch.dtype
    """The dtype of weights and activations in products."""
    reduce_dtype: torch.dtype
    """The dtype in which gradients are reduced."""
    matmul: torch.dtype | None
    """Int8 or fp8, in which the blocks' linear layers multiply in the forward pass; None: in
    ``dtype``."""
    gather_dtype: torch.dtype | None
    """Fp8, in which the blocks' matrices are gathered; None: in ``dtype``, or ``matmul``."""
    products: str
    """What the blocks' matrix products compute in, as ``Device.peak_flops`` names it."""


TorchRun = Run[Fsdp2Config, TorchPlan]


def sharded_dim(shape: Sequence[int], shards: int) -> int:
    """Return the dimension of a parameter that is divided into ``shards``.

    It is the first one; of a parameter with an entry per token, (1, tokens, width), or per grid
    position, (1, rows, columns, width), one that is divisible by ``shards``, if there is one.
    """
    if len(shape) < 3 or shape[0] != 1:
        return 0
    return next((d for d in range(1, len(shape)) if shape[d] % shards == 0), 0)


def parallelize_block(
    model: nn.Module, name: str, block: nn.Module, plan: TorchPlan, device: torch.device
) -> nn.Module:
    """Apply the plan to timm's ``block``, ``name`` in ``model``; return the block to shard."""
    if not plan.domain_attention:
        use_attention(block, plan.attention)
    if plan.compile == "around attention":
        # Inside the recomputation, as checkpointed code with graph breaks would not be compiled.
        block.forward = compiled(block.forward, plan)
    block = plan.blocks.replace(block, str(device))
    model.set_submodule(name, block)
    if plan.grad_ckpt != "none":
        plan.blocks.recompute(block, plan.grad_ckpt)
    if plan.compile == "block":
        block.forward = compiled(block.forward, plan, fullgraph=True)
    return block


def compiled(
    forward: Callable[..., Any], plan: TorchPlan, *, fullgraph: bool = False
) -> Callable[..., Any]:
    """Return ``forward`` compiled, with a graph for each size of its inputs."""
    # To PyTorch all blocks are one function, of which it compiles at most 8 graphs by default. Here
    # each image size, each drop path rate, and training and evaluation need separate graphs.
    limits = torch._dynamo.config
    limits.recompile_limit = limits.accumulated_recompile_limit = 4096  # more than any run needs

    def compile_() -> Callable[..., Any]:
        return torch.compile(forward, backend=plan.compiler, fullgraph=fullgraph, dynamic=False)

    if plan.compiler != Device.compiler:  # a TPU's compiler explains its errors, at length
        return compile_()
    call = _compiled_or_usage_error if plan.compile_required else _compiled_or_plain
    return functools.partial(call, functools.cache(compile_), forward)


_compilation_failed = False
"""Whether torch.compile has failed in this process. It would fail again for each block."""


def _compiled_or_plain(
    compiled: Callable[[], Callable[..., Any]],
    plain: Callable[..., Any],
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Call what ``compiled`` returns; once its compilation has failed, always call ``plain``, which
    raises what is wrong with the model itself."""
    global _compilation_failed
    if not _compilation_failed:
        try:
            return compiled()(*args, **kwargs)
        except (torch._dynamo.exc.TorchDynamoException, OSError) as error:
            _compilation_failed = True
            print(
                f"warning: torch.compile failed ({_reason(error)}): training continues without it, "
                "more slowly; --no-compile silences this",
                file=sys.stderr,
            )
    return plain(*args, **kwargs)


def _compiled_or_usage_error(
    compiled: Callable[[], Callable[..., Any]], _: Callable[..., Any], *args: Any, **kwargs: Any
) -> Any:
    """Call what ``compiled`` returns. Raises UsageError if Inductor cannot work on this machine:
    without a C++ compiler, Triton, or a folder from which libraries can be loaded."""
    try:
        return compiled()(*args, **kwargs)
    except (torch._dynamo.exc.ShortenTraceback, OSError) as error:  # not errors of the model
        raise UsageError(
            f"torch.compile failed ({_reason(error)}): mend that, or train with --no-compile"
        ) from error


def _reason(error: Exception) -> str:
    """Return the first and the last line of an error, which may quote a compiler's."""
    error = getattr(error, "inner_exception", error)  # Inductor's, which Dynamo has wrapped
    text = str(error).partition("\n\nSet TORCHDYNAMO_VERBOSE")[0].strip()
    lines = text.splitlines() or [type(error).__name__]
    return textwrap.shorten(" ... ".join(dict.fromkeys([lines[0], lines[-1]])), 300)


def selective_contexts() -> Any:
    """Save the results of attention and of every second matrix product, as torchtitan does: they
    save the most time for their memory."""
    products = {True: 0, False: 0}  # counts, in the recomputation and in the forward pass

    def policy(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        if op in _ATTENTION:
            return CheckpointPolicy.MUST_SAVE
        if op in _MATRIX_PRODUCTS:
            products[context.is_recompute] += 1
            if products[context.is_recompute] % 2:
                return CheckpointPolicy.MUST_SAVE
        return CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)
