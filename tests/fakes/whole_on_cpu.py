"""Prints, as JSON, how far attention by whole sequences is from timm's: an interpreter runs it.

What is tested is tpu_attention.whole itself, on CPU tensors: only the call of a lowered kernel
is replaced by the JAX function that was lowered.
"""

import copy
import functools
import json
import sys

import jax
import jax.experimental.pallas as pl
import jax.numpy as jnp
import torch
from timm.layers import Attention, AttentionRope
from timm.models.eva import EvaAttention

from tests.fakes.flash_on_cpu import Interpreted
from tpu_attention import pallas, whole
from tpu_attention.kernels import WholeSizes

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
NORM = {"qk_norm": True, "norm_layer": torch.nn.LayerNorm}
EVA = {"scale_norm": False, "num_prefix_tokens": 5, "rotate_half": True}
# tokens, heads, width of a head, dtype, timm's class, its options: pairs that are neighbors and
# pairs of the two halves of a head, which fills registers or not; heads that do not fill registers
# together; queries, keys and values in one array or apart; blocks of queries.
ROTARY = [
    (69, 3, 128, "float32", EvaAttention, EVA),
    (69, 2, 128, "bfloat16", EvaAttention, EVA),
    (69, 4, 64, "float32", EvaAttention, EVA | {"qkv_bias": False}),
    (69, 4, 64, "bfloat16", EvaAttention, EVA | {"qkv_bias_separate": True}),
    (69, 3, 64, "float32", EvaAttention, EVA),
    (50, 2, 64, "float32", EvaAttention, {"scale_norm": True, "norm_layer": torch.nn.LayerNorm}),
    (50, 2, 64, "float32", EvaAttention, {"scale_norm": False, "qkv_fused": False}),
    (50, 4, 32, "float32", EvaAttention, NORM | {"gated": True, "rotate_half": True}),
    (50, 4, 96, "float32", AttentionRope, {}),
    (50, 2, 128, "float32", AttentionRope, NORM | {"qkv_fused": False}),
    (50, 4, 64, "float32", AttentionRope, {"num_kv_heads": 2, "qkv_fused": False}),
    (581, 2, 64, "float32", EvaAttention, EVA),
    (581, 1, 128, "float32", AttentionRope, {"num_prefix_tokens": 5}),
]


@functools.cache
def interpreted(sizes: WholeSizes, *, backward: bool):
    function = jax.jit((pallas.whole_backward if backward else pallas.whole_forward)(sizes))

    def call(arguments: list[torch.Tensor]) -> list[torch.Tensor]:
        given = (
            jnp.asarray(x.detach().float().numpy()).astype(str(x.dtype).removeprefix("torch."))
            for x in arguments
        )
        result = function(*given)
        values = torch.from_numpy(jnp.asarray(result, jnp.float32).__array__().copy())
        return [values.to(sizes.dtype)]

    return call


def gradients(
    module: torch.nn.Module, x: torch.Tensor, rope: torch.Tensor | None = None
) -> list[torch.Tensor]:
    x = x.clone().requires_grad_()
    output = module(x) if rope is None else module(x, rope=rope)
    weights = torch.linspace(-1, 2, output.numel()).view_as(output)
    loss = (output.float() * weights).sum()
    return [output, *torch.autograd.grad(loss, [x, *module.parameters()])]


def compare(tokens: int, heads: int, width: int, dtype: str, options: dict) -> dict[str, object]:
    torch.manual_seed(tokens)
    attention = Attention(heads * width, heads, **options)
    x = torch.randn(2, tokens, heads * width)
    expected = gradients(attention, x)
    by_kernels = copy.deepcopy(attention)
    whole.use_whole(by_kernels, Interpreted())
    kind = getattr(torch, dtype)
    found = gradients(by_kernels.to(kind), x.to(kind))
    plain = (torch.randn(2, heads, tokens, width) for _ in range(3))
    q, k, v = (each.to(kind) for each in plain)
    product = torch.nn.functional.scaled_dot_product_attention(*(x.float() for x in (q, k, v)))
    sizes = WholeSizes(2, tokens, heads, width, kind)
    pairs = [*zip(found, expected, strict=True), (whole.attention(q, k, v, Interpreted()), product)]
    return {
        # Of the bias of keys' norm the gradient is 0.
        "errors": [((a.float() - b).norm() / (b.norm() + 1)).item() for a, b in pairs],
        "dtype": dtype,
        "packed": sizes.fills_registers,
        "blocks": sizes.query_blocks,
    }


def compare_rotary(
    tokens: int, heads: int, width: int, dtype: str, kind: type, options: dict
) -> dict[str, object]:
    torch.manual_seed(tokens)
    attention = kind(heads * width, heads, **options)
    for name, parameter in attention.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(parameter, std=0.5)
    angles = 2 * torch.randn(tokens - attention.num_prefix_tokens, width // 2)
    both = angles.repeat(1, 2) if attention.rotate_half else angles.repeat_interleave(2, 1)
    rope = torch.cat([both.sin(), both.cos()], -1)
    x = torch.randn(2, tokens, heads * width)
    expected = gradients(attention, x, rope)
    by_kernels = copy.deepcopy(attention)
    whole.use_whole(by_kernels, Interpreted())
    given = getattr(torch, dtype)
    rotated: list[bool] = []
    whole.kernel = lambda sizes, backward: (
        rotated.append(sizes.apart > 0) or interpreted(sizes, backward=backward)
    )
    found = gradients(by_kernels.to(given), x.to(given), rope)
    pairs = zip(found, expected, strict=True)
    return {
        "errors": [((a.float() - b).norm() / (b.norm() + 1)).item() for a, b in pairs],
        "dtype": dtype,
        "calls": len(rotated),
        "rotated": all(rotated),
    }


def main() -> None:
    pl.pallas_call = functools.partial(pl.pallas_call, interpret=True)
    whole.kernel = interpreted
    rotary = "rotary" in sys.argv[1:]
    found = [compare_rotary(*case) for case in ROTARY] if rotary else [compare(*c) for c in CASES]
    print(json.dumps(found))


if __name__ == "__main__":
    main()
