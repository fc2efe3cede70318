"""Prints how far apart copies of a part of a parameter are after updates, on the GPU backend.

Takes flags. Of weights and moments, the largest difference between processes that hold the same.
"""

import sys

import torch
import torch.distributed as dist
import torch.nn.functional as F

from tests.fakes.megatron_on_cpu import without_cuda
from tests.support.resolved import on_gpus
from training.schedule import StepRates
from training.step import shard_and_optimize


def parts_of(state):
    """By name, entry and offsets, all values that this process holds."""
    tensors = {(name, "weight"): tensor for name, tensor in state.model.items()}
    for name, entries in state.optimizer.items():
        tensors |= {(name, entry): tensor for entry, tensor in entries.items()}
    found = {}
    for key, tensor in tensors.items():
        for chunk in getattr(tensor, "chunks", None) or [None]:
            offsets = chunk.offsets if chunk else ()
            values = chunk.data if chunk else tensor
            if not hasattr(values, "chunks"):  # a process may hold nothing
                found[*key, tuple(offsets)] = values.detach().float().clone()
    return found


def compare(run, backend):
    model = shard_and_optimize(run, backend)
    draw = torch.Generator().manual_seed(backend.batch_shard)
    for number in range(5):
        backend.begin_micro_batch(number)
        images = torch.randn(4, 3, 16, 16, generator=draw)
        labels = torch.randint(10, (4,), generator=draw)
        loss = F.cross_entropy(model(images), labels)
        backend.backward(loss, is_last=True)
        backend.optimizer_step(StepRates(1e-2), 1.0, loss.detach())
    everyone = [{} for _ in range(dist.get_world_size())]
    dist.all_gather_object(everyone, parts_of(backend.state()))
    apart, copies = 0.0, 0
    for number, mine in enumerate(everyone):
        for theirs in everyone[:number]:
            for key in mine.keys() & theirs.keys():
                apart = max(apart, (mine[key] - theirs[key]).abs().max().item())
                copies += key[1] == "exp_avg"
    if backend.is_main:
        print(f"{copies} copies, {apart} apart")


if __name__ == "__main__":
    from torch_fsdp.launch_torch import launch

    flags = sys.argv[1:]
    if "megatron" in flags:
        without_cuda()
    launch(compare, on_gpus(flags))
