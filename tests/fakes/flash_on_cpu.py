"""Prints, as JSON, how far flash attention is from PyTorch's: the kernels run by an interpreter.

What is tested is tpu_attention.flash itself, on CPU tensors: only the call of a lowered
kernel is replaced by the JAX function that was lowered.
"""

import functools
import json

import jax
import jax.experimental.pallas as pl
import jax.numpy as jnp
import torch
import torch.nn.functional as F

from tpu_attention import flash, kernels, pallas
from tpu_attention.kernels import Calls, FlashSizes

# tokens, heads, width of a head, dtype: one block of keys or several, of queries in one span or in
# several; heads that share a register, that have one or two, and that are padded to that.
CASES = [
    (197, 2, 80, "float32"),
    (256, 2, 64, "bfloat16"),
    (700, 2, 160, "float32"),
    (700, 4, 32, "float32"),
    (1100, 2, 64, "bfloat16"),
    (1200, 1, 64, "float32"),
]
_IN_SPANS = 1200
"""Tokens of the case whose queries are divided into spans."""


class Interpreted(Calls):
    """Calls what stands in the place of a lowered kernel."""

    def call(self, kernel, sizes, parts, *, backward):
        return kernel(sizes, backward=backward)(parts)


@functools.cache
def interpreted(s: FlashSizes, *, backward: bool):
    name = "flash_backward" if backward else "flash_forward"
    function = jax.jit(getattr(pallas, name)(s))

    def call(arguments: list[torch.Tensor]) -> list[torch.Tensor]:
        given = (
            jnp.asarray(x.detach().float().numpy()).astype(str(x.dtype).removeprefix("torch."))
            for x in arguments
        )
        results = (jnp.asarray(x, jnp.float32).__array__().copy() for x in function(*given))
        dtypes = [s.dtype] * 3 if backward else [s.dtype, torch.float32]
        return [torch.from_numpy(x).to(kind) for x, kind in zip(results, dtypes, strict=True)]

    return call


def gradients(product, inputs: list[torch.Tensor], weights: torch.Tensor) -> list[torch.Tensor]:
    inputs = [x.clone().requires_grad_() for x in inputs]
    output = product(*inputs)
    return [output, *torch.autograd.grad((output.float() * weights).sum(), inputs)]


def compare(tokens: int, heads: int, width: int, dtype: torch.dtype) -> dict[str, object]:
    torch.manual_seed(tokens)
    inputs = [2 * torch.randn(1, heads, tokens, width) for _ in range(3)]
    weights = torch.randn(1, heads, tokens, width)
    used: list[FlashSizes] = []

    def kernel(s: FlashSizes, *, backward: bool):
        used.append(s)
        return interpreted(s, backward=backward)

    flash.kernel = kernel
    kernels._QUERY_GRADIENT_BYTES = 4 * 128 * (640 if tokens == _IN_SPANS else 2**13)
    expected = gradients(F.scaled_dot_product_attention, inputs, weights)
    by_kernels = functools.partial(flash.attention, calls=Interpreted())
    found = gradients(by_kernels, [x.to(dtype) for x in inputs], weights)
    return {
        "errors": [
            ((a.float() - b).norm() / b.norm()).item() for a, b in zip(found, expected, strict=True)
        ],
        "blocks": used[0].key_blocks,
        "spans": used[0].spans,
        "masked": used[0].masked,
        "dtype": str(dtype),
    }


def main() -> None:
    pl.pallas_call = functools.partial(pl.pallas_call, interpret=True)
    print(json.dumps([compare(*case, getattr(torch, dtype)) for *case, dtype in CASES]))


if __name__ == "__main__":
    main()
