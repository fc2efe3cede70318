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
"""The branches of each kernel that was lowered here, by its code: who counts the cycles of a
compiled program meets its kernels as code alone."""


Kernel = Callable[[list[torch.Tensor]], list[torch.Tensor]]
"""Puts the call of a lowered kernel into the graph; returns its results."""


def lower(
    function: Callable,
    arguments: list[tuple[tuple[int, ...], torch.dtype]],
    results: list[tuple[tuple[int, ...], torch.dtype]],
    *,
    flops: int,
    transcendentals: int,
    bytes_accessed: int,
    branches: int = 1,
) -> Kernel:
    """Lower a JAX function of one Pallas kernel, for arrays of these shapes and dtypes.

    A program of it takes one of so many ``branches``, each as often as the others.
    """
    import jax

    jax.config.update("jax_platforms", "cpu")  # it only lowers: a TPU, if any, is torch_xla's
    names = {torch.bfloat16: "bfloat16", torch.float32: "float32", torch.int32: "int32"}
    arrays = [jax.ShapeDtypeStruct(shape, names[dtype]) for shape, dtype in arguments]
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
    return lambda given: torch_xla_private.call_tpu_kernel(given, text, shapes, dtypes)


MeshAxes = str | tuple[str, ...] | None


@dataclass(frozen=True)
class Shards:
    """How images and heads are sharded in an SPMD program: each device calls a kernel on its part.

    ``images``, ``heads``: the mesh axis, or axes, that they are sharded along. Images are dimension
    0 of a tensor; each call names the dimension of heads, if there is one.
    """

    mesh: xs.Mesh
    images: MeshAxes
    heads: MeshAxes = None

    def part(self, x: torch.Tensor, heads: int | None = None) -> torch.Tensor:
        """Return a device's part of the whole tensor."""
        import torch_xla.distributed.spmd as xs

        return xs.enable_manual_sharding(x * 1, self._spec(x, heads), mesh=self.mesh).global_tensor

    def everywhere(self, x: torch.Tensor) -> torch.Tensor:
        """Return a tensor that each device has all of, for its call."""
        import torch_xla.distributed.spmd as xs

        spec = (None,) * x.dim()
        return xs.enable_manual_sharding(x * 1, spec, mesh=self.mesh).global_tensor

    def whole(self, part: torch.Tensor, heads: int | None = None) -> torch.Tensor:
        """Return the whole tensor of which each device has a part."""
        import torch_xla.distributed.spmd as xs

        spec = self._spec(part, heads)
        whole = (n * self.parts(axes) for n, axes in zip(part.shape, spec, strict=True))
        shape = torch.Size(whole)
        return xs.disable_manual_sharding(part, spec, shape, mesh=self.mesh).global_tensor

    def _spec(self, x: torch.Tensor, heads: int | None) -> tuple[MeshAxes, ...]:
        spec: list[MeshAxes] = [self.images, *[None] * (x.dim() - 1)]
        if heads is not None:
            spec[heads] = self.heads
        return tuple(spec)

    def parts(self, axes: MeshAxes) -> int:
        """Return into how many parts these axes shard."""
        names = (axes,) if isinstance(axes, str) else axes or ()
        return math.prod(self.mesh.shape()[name] for name in names)


def autocast_dtype(v: torch.Tensor) -> torch.dtype:
    """Return the dtype that attention to the values ``v`` computes in."""
    return torch.get_autocast_dtype("xla") if torch.is_autocast_enabled("xla") else v.dtype
