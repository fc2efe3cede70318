"""How the devices of a PyTorch/XLA program call the kernels of ``tpu_attention``."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from tpu_attention.kernels import Calls, Kernel
from xla_fsdp import torch_xla_private

if TYPE_CHECKING:
    import torch_xla.distributed.spmd as xs

MeshAxes = str | tuple[str, ...] | None


@dataclass(frozen=True)
class Shards(Calls):
    """How images and heads are sharded in an SPMD program: along these mesh axes. Each device calls
    a kernel on its part; without a mesh there is one device, and tensors stay as they are.
    """

    mesh: xs.Mesh | None = None
    images: MeshAxes = None
    heads: MeshAxes = None

    @property
    def image_shards(self) -> int:  # type: ignore[override]
        return self._count(self.images)

    @property
    def head_shards(self) -> int:  # type: ignore[override]
        return self._count(self.heads)

    def part(self, x: torch.Tensor, heads: int | None = None) -> torch.Tensor:
        return self._manual(x, self._spec(x, heads))

    def replicated(self, x: torch.Tensor) -> torch.Tensor:
        return self._manual(x, (None,) * x.dim())

    def _manual(self, x: torch.Tensor, spec: tuple[MeshAxes, ...]) -> torch.Tensor:
        """Return what a device has of a tensor of this spec, for its call."""
        if self.mesh is None:
            return x
        import torch_xla.distributed.spmd as xs

        return xs.enable_manual_sharding(x * 1, spec, mesh=self.mesh).global_tensor

    def whole(self, part: torch.Tensor, heads: int | None = None) -> torch.Tensor:
        if self.mesh is None:
            return part
        import torch_xla.distributed.spmd as xs

        spec = self._spec(part, heads)
        shape = (size * self._count(axes) for size, axes in zip(part.shape, spec, strict=True))
        whole = torch.Size(shape)
        return xs.disable_manual_sharding(part, spec, whole, mesh=self.mesh).global_tensor

    def _spec(self, x: torch.Tensor, heads: int | None) -> tuple[MeshAxes, ...]:
        spec: list[MeshAxes] = [self.images, *[None] * (x.dim() - 1)]
        if heads is not None:
            spec[heads] = self.heads
        return tuple(spec)

    def _count(self, axes: MeshAxes) -> int:
        """Return the number of shards along these axes."""
        names = (axes,) if isinstance(axes, str) else axes or ()
        return math.prod(self.mesh.shape()[name] for name in names) if self.mesh else 1

    def dtype(self, v: torch.Tensor) -> torch.dtype:
        return torch.get_autocast_dtype("xla") if torch.is_autocast_enabled("xla") else v.dtype

    def call(
        self,
        kernel: Callable[..., Kernel],
        sizes: Any,
        parts: list[torch.Tensor],
        *,
        backward: bool,
    ) -> list[torch.Tensor]:
        lowered = kernel(sizes, backward=backward)
        shapes = [list(shape) for shape, _ in lowered.results]
        dtypes = [dtype for _, dtype in lowered.results]
        return torch_xla_private.call_tpu_kernel(parts, lowered.config, shapes, dtypes)


ONE_DEVICE = Shards()
