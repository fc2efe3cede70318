"""Muon's matrices, whole for as long as they are orthogonalized, shared out between the devices.

Parameters are sharded; a Newton-Schulz iteration is products of a whole matrix with itself. So all
matrices of one shape, of stacked blocks a stack already, are one batch, which is sharded along its
first dimension: each device orthogonalizes some of them, none is anywhere else for it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch_xla.core.xla_model as xm
from torch import nn

from training.mesh import Axes, Spec

Orthogonalize = Callable[[torch.Tensor], torch.Tensor]
"""Returns what becomes of whole matrices, (matrices, rows, columns)."""


@dataclass(frozen=True)
class Momentum:
    """One of Muon's parameters, which may hold the matrices of several blocks."""

    parameter: nn.Parameter
    values: torch.Tensor
    """In the dtype that matrices are orthogonalized in, laid out like the parameter."""
    matrix: tuple[int, int]
    """Rows and columns of each matrix, all devices together."""


Momenta = Sequence[Momentum]


def distributed(
    momenta: Momenta,
    orthogonalize: Orthogonalize,
    specs: dict[torch.Tensor, Spec],
    axes: Axes,
    devices: int,
    mark: Callable[[torch.Tensor, Spec], torch.Tensor],
) -> list[torch.Tensor]:
    """Return the orthogonalized momenta, which the SPMD partitioner sees whole.

    ``specs``: how each parameter, and so its momentum, is sharded; matrices are shared out along
    ``axes``, all of the mesh's with its ``devices``.
    """

    def as_batch(each: Momentum) -> torch.Tensor:
        """A matrix may have more than two dimensions here: three of queries, keys and values."""
        shard = mark(each.values * 1, specs[each.parameter])
        return shard if _count(each) > 1 else shard.unsqueeze(0)

    def lying(each: Momentum) -> tuple[torch.Size, Spec]:
        stacked = _count(each) > 1
        return each.values.shape[stacked:], specs[each.parameter][stacked:]

    found: dict[nn.Parameter, torch.Tensor] = {}
    for alike in _by_shape(momenta, lying):
        batches = [as_batch(each) for each in alike]
        batch = torch.cat(batches) if len(batches) > 1 else batches[0]
        count, first = len(batch), axes if len(batch) > 1 else ()
        if first:  # unequal parts would come back by way of the whole, too
            batch = torch.cat([batch, batch.new_zeros(-count % devices, *batch.shape[1:])])
        way = _to_first_dimension(((), *lying(alike[0])[1]), first)
        for spec in way:
            batch = mark(batch * 1, spec)
        whole = mark(batch * 1, (first, *((),) * (batch.dim() - 1)))
        matrices = mark(whole.reshape(len(batch), *alike[0].matrix) * 1, (first, (), ()))
        results = mark(orthogonalize(matrices) * 1, (first, (), ())).reshape(batch.shape)
        results = mark(results * 1, (first, *((),) * (batch.dim() - 1)))
        for spec in reversed(way):
            results = mark(results * 1, spec)
        parts = results[:count].split([len(b) for b in batches])
        for each, part in zip(alike, parts, strict=True):
            own = part.reshape(each.values.shape) * 1
            found[each.parameter] = mark(own, specs[each.parameter])
    return [found[each.parameter] for each in momenta]


def _to_first_dimension(spec: Spec, axes: Axes) -> list[Spec]:
    """Return how what lies as ``spec`` lies on its way to dimension 0 sharded along ``axes``.

    One axis after the other: all at once, the partitioner would make it whole on each device.
    """
    return [
        (axes[:count], *(tuple(a for a in each if a not in axes[:count]) for each in spec[1:]))
        for count in range(len(axes))
    ]


def exchanged(momenta: Momenta, orthogonalize: Orthogonalize, devices: int) -> list[torch.Tensor]:
    """Return the orthogonalized momenta, of which each process has a part.

    A part is one of ``devices`` ranges, all as long, of a flattened matrix, padded at its end; two
    exchanges between all processes make whole matrices of parts, and parts of whole ones.
    """

    def exchange(x: torch.Tensor, along: int, into: int) -> torch.Tensor:
        if devices == 1:
            return x
        return xm.all_to_all(x, along, into, devices, pin_layout=False)

    found: dict[nn.Parameter, torch.Tensor] = {}
    for alike in _by_shape(momenta, lambda each: each.values.shape):
        rows, columns = alike[0].matrix
        parts = torch.stack([each.values.flatten() for each in alike])
        missing = -len(alike) % devices
        padded = torch.nn.functional.pad(parts, (0, 0, 0, missing))
        whole = exchange(padded, 0, 1)
        matrices = whole[:, : rows * columns].reshape(-1, rows, columns)
        results = orthogonalize(matrices).flatten(1)
        results = torch.nn.functional.pad(results, (0, whole.shape[1] - rows * columns))
        for each, own in zip(alike, exchange(results, 1, 0), strict=False):
            found[each.parameter] = own.reshape(each.values.shape)
    return [found[each.parameter] for each in momenta]


def _count(each: Momentum) -> int:
    rows, columns = each.matrix
    return each.values.numel() // (rows * columns)


def _by_shape(momenta: Momenta, shape: Callable[[Momentum], object]) -> list[list[Momentum]]:
    alike: dict[tuple, list[Momentum]] = {}
    for each in momenta:
        alike.setdefault((each.matrix, shape(each)), []).append(each)
    return list(alike.values())
