"""Prints, as JSON, how far attention on TorchTPU is from PyTorch's, in each way that a graph is
made: JAX's interpreter runs the kernels, where a TPU would.

What is tested is torch_fsdp.attention itself, on CPU tensors: the operation, what is known of its
results, and its gradient.
"""

import copy
import functools
import json

import jax
import jax.experimental.pallas as pl
import jax.numpy as jnp
import torch
from timm.models.eva import EvaBlock
from timm.models.vision_transformer import Block
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.checkpoint import checkpoint

from features.native_resolution.model import same_image
from tests.fakes.segments_on_cpu import segments_of
from torch_fsdp import torch_tpu_private
from torch_fsdp.attention import use_attention
from torch_fsdp.parallel_plan import selective_contexts
from tpu_attention import flash, whole
from tpu_attention.kernels import Array, Kernel

calls: list[object] = []
"""The kernels that were called."""


def interpreted(function, arguments: list[Array], results: list[Array], **_) -> Kernel:
    """Stands in the place of ``kernels.lower``: the function itself, not its module."""
    jitted = jax.jit(function)

    def call(inputs: list[torch.Tensor]) -> list[torch.Tensor]:
        assert [(tuple(x.shape), x.dtype) for x in inputs] == arguments
        given = (
            jnp.asarray(x.detach().float().numpy()).astype(str(x.dtype).removeprefix("torch."))
            for x in inputs
        )
        found = jax.tree.leaves(jitted(*given))
        return [
            torch.from_numpy(jnp.asarray(x, jnp.float32).__array__().copy()).to(dtype)
            for x, (_, dtype) in zip(found, results, strict=True)
        ]

    return Kernel("", call, tuple(results))


def call_kernel(module, inputs, results):
    calls.append(module)
    return module(inputs)


def gradients(forward, x: torch.Tensor, parameters: list[torch.Tensor]) -> list[torch.Tensor]:
    x = x.clone().requires_grad_()
    y = forward(x)
    weights = torch.linspace(-1, 2, y.numel()).view_as(y)
    return [y.detach(), *torch.autograd.grad((y.float() * weights).sum(), [x, *parameters])]


def traced(forward, x: torch.Tensor, parameters: list[torch.Tensor]) -> list[torch.Tensor]:
    """The same by a graph of the whole pass, as ``step_graph.py`` makes it."""
    graph = make_fx(
        lambda x: gradients(forward, x, parameters),
        tracing_mode="fake",
        _allow_non_fake_inputs=True,
    )(x)
    assert not calls  # while it was traced
    return graph(x)


def ways(forward):
    """The ways in which a block's pass becomes a graph, by name; each computes gradients."""
    selective = functools.partial(
        checkpoint, forward, use_reentrant=False, context_fn=selective_contexts
    )
    full = functools.partial(checkpoint, forward, use_reentrant=False)
    compiled = torch.compile(full, backend="aot_eager", fullgraph=True)
    return {
        "eager": functools.partial(gradients, forward),
        "recomputed": functools.partial(gradients, full),
        "selective": functools.partial(gradients, selective),
        "traced": functools.partial(traced, forward),
        "compiled": functools.partial(gradients, compiled),
    }


def compare(form: str, block: torch.nn.Module, x: torch.Tensor, **given) -> dict[str, object]:
    by_kernels = copy.deepcopy(block)
    use_attention(by_kernels, form)
    by_pytorch = dict(given)
    if "attn_mask" in given:
        by_pytorch["attn_mask"] = same_image(given["attn_mask"])
    expected = gradients(functools.partial(block, **by_pytorch), x, [*block.parameters()])
    found = {}
    for name, way in ways(functools.partial(by_kernels, **given)).items():
        calls.clear()
        results = way(x, [*by_kernels.parameters()])
        found[name] = {
            "error": max(
                ((a - b).norm() / (b.norm() + 1)).item()
                for a, b in zip(results, expected, strict=True)
            ),
            "calls": len(calls),
        }
    return found


def main() -> None:
    pl.pallas_call = functools.partial(pl.pallas_call, interpret=True)
    whole.lower = flash.lower = interpreted
    torch_tpu_private.call_kernel = call_kernel
    torch.manual_seed(0)
    plain = Block(128, 2, qkv_bias=True)
    rotary = EvaBlock(128, 2, qkv_bias=True, qkv_fused=True, num_prefix_tokens=1)
    x = torch.randn(2, 50, 128)
    angles = torch.randn(49, 32).repeat_interleave(2, 1)
    rope = torch.cat([angles.sin(), angles.cos()], -1)
    segments = segments_of(50, [[20, 7, 15], [50]])
    found = {
        "plain": compare("plain", plain, x),
        "whole": compare("whole", plain, x),
        "flash": compare("flash", plain, x),
        "whole, rotary": compare("whole", rotary, x, rope=rope),
        "whole, segments": compare("whole", plain, x, attn_mask=segments),
        "flash, segments": compare("flash", plain, x, attn_mask=segments),
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main()
