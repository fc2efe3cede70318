"""Prints, as JSON, how far flash attention is from PyTorch's: the kernels run by an interpreter.

What is tested is xla_fsdp.attention.flash itself, on CPU tensors: only the call of a lowered
kernel is replaced by the JAX function that was lowered.
"""

import functools
import json

import jax.numpy as jnp
import torch
import torch.nn.functional as F
from jax.experimental.pallas.ops.tpu import flash_attention as pallas

from xla_fsdp import jax_private
from xla_fsdp.attention import flash
from xla_fsdp.attention.sizes import LANES, FlashSizes, padded_tokens, padded_width

# (tokens, width of a head, dtype): one block or several, with and without padding.
CASES = [(197, 80, "float32"), (256, 64, "bfloat16"), (700, 160, "float32"), (1100, 64, "bfloat16")]


def to_jax(x: torch.Tensor, sizes: FlashSizes):
    """As the JAX functions have it: a row's figure once, where a kernel has it in every lane."""
    if x.dtype == torch.int32:
        x = x[:, 0] if x.shape[-1] == sizes.tokens else x[..., 0]
    elif x.dtype == torch.float32 and x.shape == sizes.statistic_shape and sizes.width != LANES:
        assert (x == x[..., :1]).all()
        x = x[..., 0]
    return jnp.asarray(x.detach().float().numpy()).astype(str(x.dtype).removeprefix("torch."))


def to_torch(x, dtype: torch.dtype) -> torch.Tensor:
    values = torch.from_numpy(jnp.asarray(x, jnp.float32).copy().__array__().copy())
    if values.dim() == 3:
        values = values.unsqueeze(-1).expand(*values.shape, LANES)
    return values.to(dtype)


def interpreted(computes: str, sizes: FlashSizes, scale: float):
    blocks = {"block": sizes.block, "key_block": sizes.key_block}
    function = jax_private.flash_function(computes, scale=scale, **blocks)

    def call(arguments: list[torch.Tensor]) -> list[torch.Tensor]:
        results = function(*(to_jax(x, sizes) for x in arguments))
        results = results if isinstance(results, tuple) else [results]
        return [to_torch(x, torch.float32 if x.ndim == 3 else sizes.dtype) for x in results]

    return call


def gradients(product, inputs: list[torch.Tensor], weights: torch.Tensor) -> list[torch.Tensor]:
    inputs = [x.clone().requires_grad_() for x in inputs]
    output = product(*inputs)
    return [output, *torch.autograd.grad((output.float() * weights).sum(), inputs)]


def compare(tokens: int, width: int, dtype: torch.dtype) -> dict[str, object]:
    torch.manual_seed(tokens)
    inputs = [2 * torch.randn(1, 2, tokens, width) for _ in range(3)]
    weights = torch.randn(1, 2, tokens, width)
    expected = gradients(F.scaled_dot_product_attention, inputs, weights)
    found = gradients(flash.attention, [x.to(dtype) for x in inputs], weights)
    with torch.no_grad():
        without = flash.attention(*(x.to(dtype) for x in inputs))
    columns = padded_width(width)
    padded = padded_tokens(tokens, columns, dtype)
    sizes = FlashSizes(1, 2, padded, padded, columns, dtype)
    return {
        "errors": [
            ((a.float() - b).norm() / b.norm()).item() for a, b in zip(found, expected, strict=True)
        ],
        "without_gradient": torch.equal(without, found[0]),
        "blocks": padded // sizes.block,
        "masked": padded > tokens,
        "dtype": str(dtype),
    }


def main() -> None:
    pallas.pl.pallas_call = functools.partial(pallas.pl.pallas_call, interpret=True)
    flash.kernel = interpreted
    print(json.dumps([compare(n, width, getattr(torch, dtype)) for n, width, dtype in CASES]))


if __name__ == "__main__":
    main()
