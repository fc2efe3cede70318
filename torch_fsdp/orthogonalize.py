"""Orthogonalization for Muon of matrices that are sharded over processes.

A Newton-Schulz iteration is products of a whole matrix with itself, and each process has a part of
each. So processes exchange parts of matrices for whole ones, orthogonalize these, and exchange the
results back: as little as possible, or, where all must run the same program, equally.
"""

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import pad

from torch_fsdp.domain import all_to_all
from training.checkpoints.state import ShardedTensor
from training.optimizers import orthogonalized

Orthogonalize = Callable[[Sequence[Tensor]], Sequence[Tensor]]
"""A collective function of this process's part of each matrix, in the dtype to compute in: returns
the same part of each orthogonalized matrix, in the same shape."""
Matrix = tuple[int, int]
"""Rows and columns of a whole matrix."""

_c10d = torch.ops._c10d_functional


class UnequalExchange:
    """Each process computes other matrices, assigned by their work, and receives no more."""

    def __init__(
        self,
        matrices: Sequence[Matrix],
        views: Sequence[Tensor],
        group: dist.ProcessGroup | None,
        eps: float,
    ) -> None:
        """``views``: this process's part of each matrix, as one of the global tensor. ``group``:
        the processes that shard them; None where each has them whole. A collective call."""
        self._matrices, self._group, self._eps = matrices, group, eps
        ranges = []
        for view in views:
            # Of the flattened matrix; they are adjacent.
            first, count = 0, view.numel()
            if isinstance(view, ShardedTensor):
                count = sum(chunk.data.numel() for chunk in view.chunks)
                offsets = view.chunks[0].offsets if view.chunks else (0,) * view.dim()
                for offset, size in zip(offsets, view.shape, strict=True):
                    first = first * size + offset
            ranges.append(range(first, first + count))
        processes, self._rank = (1, 0) if group is None else (group.size(), group.rank())
        self._ranges = [ranges] * processes
        """The part of each matrix that each process has."""
        if processes > 1:
            dist.all_gather_object(self._ranges, ranges, group=group)
        self._owned: list[list[int]] = [[] for _ in range(processes)]
        """The matrices that each process computes: the next largest goes to the one with least
        work, which grows with the elements times the shorter side."""
        work = [math.prod(matrix) * min(matrix) for matrix in self._matrices]
        load = [0] * processes
        for i in sorted(range(len(work)), key=lambda i: -work[i]):
            least = load.index(min(load))
            self._owned[least].append(i)
            load[least] += work[i]

    def __call__(self, parts: Sequence[Tensor]) -> list[Tensor]:
        found = self._orthogonalized([part.flatten() for part in parts])
        return [found[i].view(part.shape) for i, part in enumerate(parts)]

    def _orthogonalized(self, parts: Sequence[Tensor]) -> dict[int, Tensor]:
        """Return this process's part of each matrix, orthogonalized; all are flat, as ``parts``."""

        def orthogonalize(i: int, elements: Tensor) -> Tensor:
            return orthogonalized(elements.view(self._matrices[i]), self._eps).flatten()

        if self._group is None or len(self._owned) == 1:
            return {i: orthogonalize(i, part) for i, part in enumerate(parts)}
        owned_here, empty = self._owned[self._rank], parts[0].new_empty(0)

        # Parts of each process's matrices to it.
        sent = [torch.cat([empty, *(parts[i] for i in owned)]) for owned in self._owned]
        lengths = [[len(ranges[i]) for i in owned_here] for ranges in self._ranges]
        received = all_to_all(sent, [(sum(sizes),) for sizes in lengths], self._group)
        matrices = {i: empty.new_empty(math.prod(self._matrices[i])) for i in owned_here}
        for ranges, sizes, part in zip(self._ranges, lengths, received, strict=True):
            for i, piece in zip(owned_here, part.split(sizes), strict=True):
                matrices[i][ranges[i].start : ranges[i].stop] = piece

        results = {i: orthogonalize(i, elements) for i, elements in matrices.items()}

        # And back.
        sent = [
            torch.cat([empty, *(results[i][ranges[i].start : ranges[i].stop] for i in owned_here)])
            for ranges in self._ranges
        ]
        lengths = [[parts[i].numel() for i in owned] for owned in self._owned]
        received = all_to_all(sent, [(sum(sizes),) for sizes in lengths], self._group)
        return {
            i: piece
            for owned, sizes, part in zip(self._owned, lengths, received, strict=True)
            for i, piece in zip(owned, part.split(sizes), strict=True)
        }


# -- The same program in all processes -------------------------------------------------------------


class EqualExchange:
    """Each process computes as many matrices of the same size as any other, in batches.

    Each has ceil(rows / processes) rows of a matrix, the last ones padded with zeros. Matrices are
    padded with zeros to the size of their batch: that adds zeros to each sum.
    """

    def __init__(
        self,
        matrices: Sequence[Matrix],
        group: dist.ProcessGroup,
        eps: float,
        device: torch.device,
    ) -> None:
        """``group``: the processes that shard the matrices; ``device``: of the parts."""
        self._batches = [
            _Batch(slots, group, eps, device) for slots in assigned(matrices, group.size())
        ]

    def __call__(self, parts: Sequence[Tensor]) -> list[Tensor]:
        results: dict[int, Tensor] = {}
        for batch in self._batches:
            members = batch.slots.members
            found = batch([parts[i].flatten(1) for i in members])
            results |= zip(members, found, strict=True)
        return [results[i].view(part.shape) for i, part in enumerate(parts)]


@dataclass
class Slots:
    """Room for matrices of at most this size, ``each`` of it in each process."""

    long: int
    short: int
    each: int
    members: list[int]
    """The matrices in them, by their numbers: the first process has the first ones."""
    tall: list[bool]
    """Of each member: whether rows, which are sharded, are its longer side."""


def assigned(matrices: Sequence[Matrix], processes: int) -> list[Slots]:
    """Return slots for all matrices, with one size for those that are computed together.

    Each size takes a slot in each process, so those that a size does not fill are filled with
    smaller matrices. (10B on 128 devices: its 32 matrices of each of 4 sizes are a slot each.)
    """
    tall = [rows >= columns for rows, columns in matrices]
    sides = [(max(matrix), min(matrix)) for matrix in matrices]
    rounds: list[list[int]] = []
    for i in sorted(range(len(matrices)), key=lambda i: (*sides[i], tall[i]), reverse=True):
        for members in rounds:
            long, short = sides[members[0]]
            if len(members) < processes and sides[i][0] <= long and sides[i][1] <= short:
                members.append(i)
                break
        else:
            rounds.append([i])
    alike: dict[tuple[int, int, bool, bool], list[list[int]]] = {}
    for members in rounds:
        long, short = sides[members[0]]
        has_tall, has_wide = (any(tall[i] is kind for i in members) for kind in (True, False))
        # What is sharded is padded to the processes' shards.
        long = -(-long // processes) * processes if has_tall else long
        short = -(-short // processes) * processes if has_wide else short
        alike.setdefault((long, short, has_tall, has_wide), []).append(members)
    return [
        Slots(long, short, len(same), members, [tall[i] for i in members])
        for (long, short, *_), same in alike.items()
        for members in [[*itertools.chain(*same)]]
    ]


class _Batch:
    """Matrices that are exchanged together, and orthogonalized as a batch."""

    def __init__(
        self, slots: Slots, group: dist.ProcessGroup, eps: float, device: torch.device
    ) -> None:
        self.slots, self._eps = slots, eps
        self._group, self._processes = group.group_name, group.size()
        self._sent = self._piece(slots.tall[0])
        """The shape in which a process's rows of a slot are sent."""
        first = group.rank() * slots.each
        # Only in mixed batches: a tensor, so that the programs of all processes are the same.
        here = [*slots.tall, *[True] * slots.each * self._processes][first : first + slots.each]
        self._tall_here = torch.tensor(here).view(-1, 1, 1).to(device)

    def __call__(self, parts: Sequence[Tensor]) -> list[Tensor]:
        """Return the process's rows of each orthogonalized matrix; ``parts``: those of each matrix.
        All are (rows, columns)."""
        slots = self.slots

        # Rows of matrices that are alike in one stack, and empty slots at the end.
        kinds = [(*part.shape, tall) for part, tall in zip(parts, slots.tall, strict=True)]
        stacks = [[*run] for _, run in itertools.groupby(range(len(parts)), kinds.__getitem__)]
        sent = []
        for stack in stacks:
            rows, columns, tall = kinds[stack[0]]
            most_rows, most_columns = self._piece(tall)
            values = torch.stack([parts[i] for i in stack])
            values = pad(values, (0, most_columns - columns, 0, most_rows - rows))
            sent.append(values.reshape(len(stack), *self._sent))
        if empty := slots.each * self._processes - len(parts):
            sent.append(sent[0].new_zeros(empty, *self._sent))

        pieces = self._all_to_all(torch.cat(sent))
        whole = self._chosen(lambda tall: self._put_together(pieces, tall))
        results = orthogonalized(whole, self._eps)
        back = self._chosen(lambda tall: self._divided(results, tall))
        received = self._all_to_all(back.flatten(0, 1).contiguous())

        found: list[Tensor] = []
        split = received[: len(parts)].split([len(stack) for stack in stacks])
        for stack, values in zip(stacks, split, strict=True):
            rows, columns, tall = kinds[stack[0]]
            values = values.reshape(len(stack), *self._piece(tall))
            found += values[:, :rows, :columns].unbind()
        return found

    def _piece(self, tall: bool) -> tuple[int, int]:
        """Return the rows and columns that a process has of a slot with such a matrix."""
        long, short = self.slots.long, self.slots.short
        return (long // self._processes, short) if tall else (short // self._processes, long)

    def _put_together(self, pieces: Tensor, tall: bool) -> Tensor:
        """Return the matrices, (each, short, long), of which each process has sent some rows."""
        pieces = pieces.reshape(self._processes, self.slots.each, *self._piece(tall))
        whole = pieces.transpose(0, 1).flatten(1, 2)
        return whole.mT if tall else whole

    def _divided(self, whole: Tensor, tall: bool) -> Tensor:
        """Return the pieces of each process, (processes, each, rows, columns)."""
        rows = whole.mT if tall else whole
        pieces = rows.unflatten(1, (self._processes, -1)).transpose(0, 1)
        return pieces.reshape(self._processes, self.slots.each, *self._sent)

    def _chosen(self, form: Callable[[bool], Tensor]) -> Tensor:
        """Return ``form`` of whether a matrix is tall, (..., each, rows, columns)."""
        if len({*self.slots.tall}) == 1:
            return form(self.slots.tall[0])
        return torch.where(self._tall_here, form(True), form(False))

    def _all_to_all(self, pieces: Tensor) -> Tensor:
        if self._processes == 1:
            return pieces
        sizes = [self.slots.each] * self._processes
        return _c10d.wait_tensor(_c10d.all_to_all_single(pieces, sizes, sizes, self._group))
