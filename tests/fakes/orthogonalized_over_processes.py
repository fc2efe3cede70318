"""Orthogonalizes matrices of which each process has rows, and compares with whole ones."""

import sys

import torch
import torch.distributed as dist

from torch_fsdp.orthogonalize import EqualExchange
from training.optimizers import orthogonalized

MATRICES = [(12, 8), (6, 15), (8, 8), (12, 8), (5, 7), (12, 8), (7, 16), (8, 12)]
EPS = 1e-8


def main() -> None:
    dist.init_process_group("gloo")
    group = dist.group.WORLD
    assert group is not None
    torch.manual_seed(0)
    whole = [torch.randn(matrix) for matrix in MATRICES]
    parts, expected = (
        [_rows(matrix, group.size(), group.rank()) for matrix in matrices]
        for matrices in (whole, [orthogonalized(matrix, EPS) for matrix in whole])
    )
    found = EqualExchange(MATRICES, group, EPS, torch.device("cpu"))(parts)
    for part, result in zip(found, expected, strict=True):
        torch.testing.assert_close(part, result, rtol=1e-5, atol=1e-6)
    print(f"process {group.rank()} of {group.size()}: {len(found)} matrices")


def _rows(matrix: torch.Tensor, shards: int, index: int) -> torch.Tensor:
    """A process's rows, the last ones padded with zeros."""
    chunk = -(-len(matrix) // shards)
    padded = torch.cat([matrix, matrix.new_zeros(chunk * shards - len(matrix), matrix.shape[1])])
    return padded[chunk * index :][:chunk].clone()


if __name__ == "__main__":
    sys.exit(main())
