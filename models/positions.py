"""Positions and pooling where a model computes with some rows of an image, or with another grid."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

# ------------------------------------------------------------------------------------------------
# A part of an image's tokens; the rest is on other devices.


Reduce = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class TokenPart:
    """Which patches of each image are here, numbered row by row, consecutive ones; class and
    register tokens are in every part. ``sum`` and ``largest`` return the sum and the maximum over
    all parts of a tensor that each of them has, and pass gradients back to all of them."""

    first: int | torch.Tensor
    """The number of the first patch that is here. In a tensor, int64 (1,), where the parts run one
    program: then each of them has as many patches, and all learned positions."""
    patches: int
    """How many patches are here."""
    of: int
    """How many patches an image has."""
    sum: Reduce
    largest: Reduce

    def own(self, x: torch.Tensor, dim: int) -> torch.Tensor:
        """Return the entries of the patches here of ``x``, which has one for each patch along a
        dimension."""
        if isinstance(self.first, int):
            return x.narrow(dim, self.first, self.patches)
        parts = x.unflatten(dim, (-1, self.patches))
        return parts.index_select(dim, self.first // self.patches).squeeze(dim)


class PartOfPositions(nn.Module):
    """The entries of a learned position embedding for a part of the tokens. The part with the first
    patch has those of class and register tokens, which come first, and sends them to the others in
    each forward pass. Where ``TokenPart.first`` is a tensor, this has the entries of all tokens."""

    def __init__(self, whole: torch.Tensor, prefix: int, part: TokenPart) -> None:
        """Copy the entries for ``part`` from ``whole``, (1, prefix + patches, width)."""
        super().__init__()
        self._prefix, self._part = prefix, part
        self.first, end = 0, whole.shape[1]
        """The number of the first entry that is here."""
        if isinstance(part.first, int):
            self.first = prefix + part.first if part.first else 0
            end = prefix + part.first + part.patches
        values = whole.detach()[:, self.first : end].clone()
        self.values = nn.Parameter(values, requires_grad=whole.requires_grad)

    def forward(self) -> torch.Tensor:
        """Return the entries of all tokens that are here, (1, prefix + patches, width): a copy, as
        FSDP frees a module's parameters when its forward pass is over."""
        if not isinstance(self._part.first, int):
            prefix, patches = self.values.tensor_split([self._prefix], 1)
            return torch.cat([prefix, self._part.own(patches, 1)], dim=1)
        if not self._prefix:
            return self.values.clone()
        held = self._prefix if self.first == 0 else 0
        prefix = self.values[:, :held]
        if not held:  # zeros, and yet of this parameter: all parts record the same operations
            prefix = nn.functional.pad(prefix, (0, 0, 0, self._prefix))
        return torch.cat([self._part.sum(prefix), self.values[:, held:]], dim=1)


def replace_positions(model: nn.Module, name: str, prefix: int, part: TokenPart) -> PartOfPositions:
    """Replace the model's parameter ``name`` by its entries for ``part``; see PartOfPositions."""
    positions = PartOfPositions(getattr(model, name), prefix, part)
    delattr(model, name)
    model.add_module(f"part_of_{name}", positions)
    return positions


def pool_over_parts(
    x: torch.Tensor, part: TokenPart, kind: str, prefix: int = 0, with_prefix: bool = False
) -> torch.Tensor:
    """Pool tokens, (batch, prefix + patches here, width), over all parts, as timm does: "token",
    "avg", "max" or "avgmax"; the first ``prefix`` tokens count only ``with_prefix``."""
    if kind == "token":
        return x[:, 0]
    patches, before = x[:, prefix:], x[:, : prefix if with_prefix else 0]
    pooled = []
    if "max" in kind:
        largest = part.largest(patches.amax(1))
        pooled.append(torch.maximum(largest, before.amax(1)) if before.shape[1] else largest)
    if "avg" in kind:
        total = part.sum(patches.sum(1, dtype=torch.float32))
        total = total + before.sum(1, dtype=torch.float32)
        pooled.append((total / (part.of + before.shape[1])).to(x.dtype))
    return pooled[0] if len(pooled) == 1 else 0.5 * (pooled[0] + pooled[1])


# ------------------------------------------------------------------------------------------------
# Rotary positions whose coordinates are rescaled in training.


def set_rope_factors(model: nn.Module, factors: torch.Tensor) -> None:
    """Multiply the coordinates of rotary positions in the training passes that follow, where
    ``ModelSpec.rope_rescale`` is above 1. ``factors``, (2,), on the devices: of images or global
    crops, and of local crops; one tensor, as a part of it would be a result of each step on XLA."""
    for module in model.modules():
        if "coord_factors" in vars(module):
            module.coord_factors = factors


# ------------------------------------------------------------------------------------------------
# Learned position embeddings for images of other grids than a model's own, and features of them.
#
# ``F.interpolate`` with mode bicubic has no lowering in torch_xla 2.9: it would bring each step to
# the CPU. What it computes is linear, and along one dimension after the other: two small matrices.


Grid = tuple[int, int]
"""How many rows and columns of patches an image has."""
Constant = Callable[[torch.Tensor], torch.Tensor]
"""A function that puts a small tensor whole on every device."""


class Resampling:
    """Resamples what patches have, such as features, for another grid: bicubic, as
    ``F.interpolate`` does; positions with antialiasing, as timm's ``resample_abs_pos_embed``."""

    def __init__(
        self,
        grid: Grid,
        new_grid: Grid,
        constant: Constant,
        *,
        prefix: int = 0,
        antialias: bool,
    ) -> None:
        """``prefix``: how many entries come before those of the patches."""
        self._grid, self._prefix = grid, prefix
        self._rows, self._columns = (  # each (new size, size), fp32: how ones are resampled
            constant(
                nn.functional.interpolate(
                    torch.eye(size)[None, None],
                    (new_size, size),
                    mode="bicubic",
                    antialias=antialias,
                )[0, 0]
            )
            for size, new_size in zip(grid, new_grid, strict=True)
        )

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Map (..., prefix + patches of ``grid``, width) to (..., prefix + patches of ``new_grid``,
        width), fp32; the first entries stay as they are."""
        first, patches = x.float().tensor_split([self._prefix], -2)
        kind = "cpu" if x.is_meta else x.device.type  # meta has no autocast
        with torch.autocast(kind, enabled=False):
            by_row = patches.unflatten(-2, self._grid)
            rows = torch.matmul(self._rows, by_row.flatten(-2)).unflatten(-1, by_row.shape[-2:])
            resampled = torch.matmul(self._columns, rows).flatten(-3, -2)
        return torch.cat([first, resampled], -2)
