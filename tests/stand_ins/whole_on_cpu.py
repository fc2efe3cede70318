"""Prints, as JSON, how far attention by whole sequences is from timm's: an interpreter runs it.

What is tested is xla_fsdp.attention.whole itself, on CPU tensors: only the call of a lowered kernel
is replaced by the JAX function that was lowered.
"""

import copy
import functools
import json

import jax.experimental.pallas as pl
import jax.numpy as jnp
import torch
from timm.layers import Attention

from xla_fsdp.attention import whole, whole_kernels
from xla_fsdp.attention.sizes import WholeSizes

# tokens, heads, width of a head, dtype, timm's options: heads that share registers and that have
# their own, columns that fill whole registers or not, one block of queries or several.
CASES = [
    (49, 3, 64, "float32", {}),
    (197, 4, 64, "float32", {"qkv_bias": True}),
    (197, 2, 64, "bfloat16", {"qkv_bias": True}),
    (257, 2, 88, "float32", {"qk_norm": True, "norm_layer": torch.nn.LayerNorm}),
    (256, 4, 160, "float32", {"gated": True}),
    (60, 1, 256, "float32", {}),
    (700, 2, 64, "float32", {"scale_norm": True, "norm_layer": torch.nn.LayerNorm}),
    (1024, 2, 80, "float32", {}),
]


def interpreted(sizes: WholeSizes, *, backward: bool):
    name = "backward_function" if backward else "forward_function"

    def call(arguments: list[torch.Tensor]) -> list[torch.Tensor]:
        given = (jnp.asarray(x.detach().float().numpy()) for x in arguments)
        dtype = str(sizes.dtype).removeprefix("torch.")
        result = getattr(whole_kernels, name)(sizes)(*(x.astype(dtype) for x in given))
        values = torch.from_numpy(jnp.asarray(result, jnp.float32).__array__().copy())
        return [values.to(sizes.dtype)]

    return call


def gradients(module: torch.nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    x = x.clone().requires_grad_()
    output = module(x)
    weights = torch.linspace(-1, 1, output.numel()).view_as(output)
    loss = (output.float() * weights).sum()
    return [output, *torch.autograd.grad(loss, [x, *module.parameters()])]


def compare(tokens: int, heads: int, width: int, dtype: str, options: dict) -> dict[str, object]:
    torch.manual_seed(tokens)
    attention = Attention(heads * width, heads, **options)
    x = torch.randn(2, tokens, heads * width)
    expected = gradients(attention, x)
    by_kernels = copy.deepcopy(attention)
    whole.use_whole(by_kernels)
    kind = getattr(torch, dtype)
    found = gradients(by_kernels.to(kind), x.to(kind))
    plain = (torch.randn(2, heads, tokens, width) for _ in range(3))
    q, k, v = (each.to(kind) for each in plain)
    product = torch.nn.functional.scaled_dot_product_attention(*(x.float() for x in (q, k, v)))
    sizes = WholeSizes(2, tokens, heads, width, kind)
    pairs = [*zip(found, expected, strict=True), (whole.attention(q, k, v), product)]
    return {
        # Of the bias of keys' norm the gradient is 0.
        "errors": [((a.float() - b).norm() / (b.norm() + 1)).item() for a, b in pairs],
        "dtype": dtype,
        "packed": sizes.can_be_packed,
        "blocks": sizes.query_blocks,
    }


def main() -> None:
    pl.pallas_call = functools.partial(pl.pallas_call, interpret=True)
    whole.kernel = interpreted
    print(json.dumps([compare(*case) for case in CASES]))


if __name__ == "__main__":
    main()
