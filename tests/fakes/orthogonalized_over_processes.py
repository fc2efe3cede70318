"""Prints, as JSON, how far matrices that processes orthogonalize together are from those that one
does alone. Run by torchrun on the CPU; each process has rows of each matrix."""

import json

import torch
import torch.distributed as dist

from torch_fsdp.orthogonalize import EqualExchange
from training.optimizers import orthogonalized

MATRICES = [(12, 8), (6, 15), (8, 8), (12, 8), (5, 7), (12, 8), (7, 16), (8, 12)]
EPS = 1e-8


def rows_of(matrix: torch.Tensor, shards: int, index: int) -> torch.Tensor:
    """A process's rows, the last ones padded with zeros."""
    chunk = -(-len(matrix) // shards)
    padding = matrix.new_zeros(chunk * shards - len(matrix), matrix.shape[1])
    return torch.cat([matrix, padding])[chunk * index :][:chunk].clone()


def main() -> None:
    dist.init_process_group("gloo")
    size, rank = dist.get_world_size(), dist.get_rank()
    torch.manual_seed(0)
    whole = [torch.randn(matrix) for matrix in MATRICES]
    parts = [rows_of(matrix, size, rank) for matrix in whole]
    expected = [rows_of(orthogonalized(matrix, EPS), size, rank) for matrix in whole]
    found = EqualExchange(MATRICES, dist.group.WORLD, EPS, torch.device("cpu"))(parts)
    errors = torch.stack(
        [(part - other).abs().max() for part, other in zip(found, expected, strict=True)]
    )
    dist.all_reduce(errors, op=dist.ReduceOp.MAX)
    if rank == 0:
        print(json.dumps(errors.tolist()))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
