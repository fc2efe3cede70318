"""From tensors as they lie on the devices to those of the plain model and back, for checkpoints.

On the devices blocks may be stacked, (depth, ...), and parameters packed, (parts, rows, ...).
"""

from __future__ import annotations

import torch

from training.checkpoints.shards import Chunk, ShardedTensor

_STACKED = "blocks.block."


def is_stacked(name: str) -> bool:
    return name.startswith(_STACKED)


def name_in_block(name: str) -> str | None:
    """Return the name that a parameter has in its block; None if it is in none."""
    blocks, _, rest = name.partition(".")
    return rest.partition(".")[2] if blocks == "blocks" else None


def plain_names(name: str, depth: int) -> list[str]:
    """Return the names in the plain model of what has this name here: of ``depth`` stacked blocks
    each one's."""
    if not is_stacked(name):
        return [name]
    return [f"blocks.{i}.{name.removeprefix(_STACKED)}" for i in range(depth)]


def plain_values(name: str, value: torch.Tensor, *, packed: bool) -> dict[str, torch.Tensor]:
    """Return a tensor by its name in the plain model; of stacked blocks, each one's part.

    ``value`` is plain or, if it is sharded (as all that is packed), a ShardedTensor; the same comes
    out, with views of the same data.
    """
    if packed:
        assert isinstance(value, ShardedTensor)
        value = _unpacked(value, dim=int(is_stacked(name)))
    if not is_stacked(name):
        return {name: value}
    names = plain_names(name, len(value))
    if not isinstance(value, ShardedTensor):
        return dict(zip(names, value, strict=True))
    return {
        plain: ShardedTensor(
            value.shape[1:], value.dtype, [Chunk(c.offsets[1:], c.data[i]) for c in value.chunks]
        )
        for i, plain in enumerate(names)
    }


def _unpacked(value: ShardedTensor, dim: int) -> ShardedTensor:
    """Return (..., parts, rows, ...) as (..., parts * rows, ...): a chunk becomes one a part."""
    before, (count, rows, *after) = value.shape[:dim], value.shape[dim:]
    chunks = [
        Chunk(
            (
                *c.offsets[:dim],
                (c.offsets[dim] + i) * rows + c.offsets[dim + 1],
                *c.offsets[dim + 2 :],
            ),
            part,
        )
        for c in value.chunks
        for i, part in enumerate(c.data.unbind(dim))
    ]
    return ShardedTensor((*before, count * rows, *after), value.dtype, chunks)


def device_part(
    saved: list[ShardedTensor], indices: tuple[slice, ...], *, stacked: bool, packed: int
) -> torch.Tensor:
    """Put together what lies at ``indices`` on the devices from what ``plain_values`` gave.

    ``packed``: how many parts the parameter is packed of, 0 if it is not.
    """
    indices = indices[1:] if stacked else indices
    offsets = tuple(index.start for index in indices)
    blocks = []
    for value in saved:
        data = {chunk.offsets: chunk.data for chunk in value.chunks}
        if packed:
            rows = value.shape[0] // packed
            here = range(indices[0].start, indices[0].stop)
            parts = [data[i * rows + offsets[1], *offsets[2:]] for i in here]
            blocks.append(torch.stack(parts))
        else:
            blocks.append(data[offsets])
    return torch.stack(blocks) if stacked else blocks[0]
