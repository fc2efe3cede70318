"""The batch of a traced step: shapes without images."""

import torch

from data.batch import Batch, BatchShard, Field, Fields
from training.backend import Backend
from training.data import dataset_request
from training.objectives.base import Objective
from training.resolve import Run


def placeholder_batch(
    run: Run, backend: Backend, objective: Objective, device: str
) -> tuple[Batch, Fields]:
    """Return a process's uninitialized shard of a training batch on a device, and its fields."""
    data = run.config.data
    rows = backend.image_rows if run.mesh.domain > 1 else None
    shard = BatchShard(backend.batch_shard, backend.batch_shards, rows)
    request = dataset_request(run, labels=run.config.objective.uses_labels)
    dtype = getattr(torch, data.image_dtype(len(request.size)))
    fields = request.view.fields(request, dtype, is_train=True)
    if objective.takes_positions:
        fields["position"] = Field((), torch.int64)
    batch = {
        name: torch.empty(shard.shape_of(data.batch_size, field), dtype=field.dtype, device=device)
        for name, field in fields.items()
    }
    return batch, fields
