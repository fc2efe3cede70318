"""What a model has to know to compute with a part of an image's tokens; the rest is elsewhere."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

Reduce = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class TokenPart:
    """Holds which patches of each image are here, and how all parts of an image come together.

    Patches are numbered row by row; a part has consecutive ones. Class and register tokens are in
    every part, with the same values. ``sum`` and ``largest`` return the sum and the maximum over
    all parts of a tensor that each of them has, and pass gradients back to all of them.
    """

    first: int
    """The number of the first patch that is here."""
    patches: int
    """How many patches are here."""
    of: int
    """How many patches an image has."""
    sum: Reduce
    largest: Reduce

    @property
    def last(self) -> int:
        """Return the number after that of the last patch that is here."""
        return self.first + self.patches


class PartOfPositions(nn.Module):
    """The part of a learned position embedding that lies with a part of the tokens.

    Entries for class and register tokens, if there are any, come before those of the patches; the
    part with the first patch keeps them, and gives them to the others in each forward pass.
    """

    def __init__(self, whole: torch.Tensor, prefix: int, part: TokenPart) -> None:
        """Take the part of ``whole``, (1, prefix + patches, width), that goes with ``part``."""
        super().__init__()
        self._prefix, self._part = prefix, part
        self.first = prefix + part.first if part.first else 0
        """The number of the first entry that is kept here."""
        values = whole.detach()[:, self.first : prefix + part.last].clone()
        self.values = nn.Parameter(values, requires_grad=whole.requires_grad)

    def forward(self) -> torch.Tensor:
        """Return the entries of all tokens that are here: (1, prefix + patches, width).

        They are a copy: FSDP lets go of a module's parameters when its forward pass is over.
        """
        if not self._prefix:
            return self.values.clone()
        kept = self._prefix if self.first == 0 else 0
        given = self.values[:, :kept]
        if not kept:  # zeros, and yet of this parameter: all parts record the same operations
            given = nn.functional.pad(given, (0, 0, 0, self._prefix))
        return torch.cat([self._part.sum(given), self.values[:, kept:]], dim=1)


def keep_part(model: nn.Module, name: str, prefix: int, part: TokenPart) -> PartOfPositions:
    """Replace the model's parameter ``name`` by what goes with ``part``; see PartOfPositions."""
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

    def mean() -> torch.Tensor:
        total = part.sum(patches.sum(1, dtype=torch.float32))
        total = total + before.sum(1, dtype=torch.float32)
        return (total / (part.of + before.shape[1])).to(x.dtype)

    def largest() -> torch.Tensor:
        found = part.largest(patches.amax(1))
        return torch.maximum(found, before.amax(1)) if before.shape[1] else found

    if kind == "avg":
        return mean()
    return largest() if kind == "max" else 0.5 * (largest() + mean())
