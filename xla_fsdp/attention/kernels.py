"""Pallas kernels in a PyTorch/XLA program: how one is lowered, and how each device calls it.

JAX lowers them on any machine (torch_xla's own way needs a TPU attached). What each of them costs
is noted in its call, where ``--compile_only`` reads it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from xla_fsdp import jax_private, torch_xla_private

if TYPE_CHECKING:
    import torch_xla.distributed.spmd as xs

BRANCHES: dict[str, int] = {}
"""The branches of each kernel that was lowered here, by its code: a compiled program, whose cycles
``--compile_only`` counts, has its kernels as code alone."""


Array = tuple[tuple[int, ...], torch.dtype]
Kernel = Callable[[list[torch.Tensor]], list[torch.Tensor]]
"""Puts the call of a lowered kernel into the graph; returns its results."""


def lower(
    function: Callable,
    arguments: list[Array],
    results: list[Array],
    *,
    flops: int,
    transcendentals: int,
    bytes_accessed: int,
    branches: int = 1,
) -> Kernel:
    """Lower a JAX function of one Pallas kernel for arrays of these shapes and dtypes;
    ``branches``: how many branches a program of it has, each taken equally often."""
    import jax

    jax.config.update("jax_platforms", "cpu")  # it only lowers: a TPU, if any, is torch_xla's
    arrays = [
        jax.ShapeDtypeStruct(shape, str(dtype).removeprefix("torch.")) for shape, dtype in arguments
    ]
    text = torch_xla_private.kernel_config(jax_private.lower_for_tpu(function, arrays))
    assert text is not None
    config = json.loads(text)
    config["custom_call_config"]["cost_estimate"] = {
        "flops": flops,
        "transcendentals": transcendentals,
        "bytes_accessed": bytes_accessed,
    }
    BRANCHES[config["custom_call_config"]["body"]] = branches
    shapes, dtypes = [list(shape) for shape, _ in results], [dtype for _, dtype in results]
    text = json.dumps(config)
    return lambda inputs: torch_xla_private.call_tpu_kernel(inputs, text, shapes, dtypes)


MeshAxes = str | tuple[str, ...] | None


@dataclass(frozen=True)
class Shards:
    """How images and heads are sharded in an SPMD program: along these mesh axes. Each device calls
    a kernel on its part; without a mesh there is one device, and tensors stay as they are.

    Images are dimension 0 of a tensor; each call names the dimension of heads, if there is one.
    """

    mesh: xs.Mesh | None = None
    images: MeshAxes = None
    heads: MeshAxes = None

    def part(self, x: torch.Tensor, heads: int | None = None) -> torch.Tensor:
        """Return a device's part of the whole tensor."""
        return self.manual(x, self._spec(x, heads))

    def manual(self, x: torch.Tensor, spec: tuple[MeshAxes, ...]) -> torch.Tensor:
        """Return what a device has of a tensor of this spec, for its call."""
        if self.mesh is None:
            return x
        import torch_xla.distributed.spmd as xs

        return xs.enable_manual_sharding(x * 1, spec, mesh=self.mesh).global_tensor

    def whole(self, part: torch.Tensor, heads: int | None = None) -> torch.Tensor:
        """Return the whole tensor of which each device has a part."""
        if self.mesh is None:
            return part
        import torch_xla.distributed.spmd as xs

        spec = self._spec(part, heads)
        shape = (size * self.count(axes) for size, axes in zip(part.shape, spec, strict=True))
        whole = torch.Size(shape)
        return xs.disable_manual_sharding(part, spec, whole, mesh=self.mesh).global_tensor

    def _spec(self, x: torch.Tensor, heads: int | None) -> tuple[MeshAxes, ...]:
        spec: list[MeshAxes] = [self.images, *[None] * (x.dim() - 1)]
        if heads is not None:
            spec[heads] = self.heads
        return tuple(spec)

    def count(self, axes: MeshAxes) -> int:
        """Return the number of shards along these axes."""
        names = (axes,) if isinstance(axes, str) else axes or ()
        return math.prod(self.mesh.shape()[name] for name in names) if self.mesh else 1


ONE_DEVICE = Shards()


def autocast_dtype(v: torch.Tensor) -> torch.dtype:
    """Return the dtype that attention to the values ``v`` computes in."""
    return torch.get_autocast_dtype("xla") if torch.is_autocast_enabled("xla") else v.dtype
