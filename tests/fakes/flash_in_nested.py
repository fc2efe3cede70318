"""Prints how many kernels a step of nested FSDP calls: its graph is recorded, never run."""

import functools

import torch
import torch_xla

from run_vit_training import read_flags
from xla_fsdp.nested import NestedBackend
from xla_fsdp.parallel_plan import XlaRun
from xla_fsdp.resolve_xla import resolve_for_slice
from xla_fsdp.tpu import parse_topology

FLAGS = (
    "--model vit_tiny_patch16_224 --image_size 32 --embed_dim 64 --num_heads 2 --num_blocks 2 "
    "--xla_fsdp nested --precision bf16 --attention flash"
).split()


def main(index: int, run: XlaRun) -> None:
    plain = run.model.build()
    initialize = functools.partial(run.model.initialize, seed=0)
    model = NestedBackend(run).shard(plain, list(run.model.units(plain)), initialize)
    loss = model(torch.zeros(2, 3, 32, 32).to("xla")).float().mean()
    loss.backward()
    grads = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    graph = torch_xla._XLAC._get_xla_tensors_hlo([loss, *grads])
    print(graph.count('custom_call_target="tpu_custom_call"'))
    for parameter in model.parameters():  # else they would be computed at the end
        parameter.grad = None


if __name__ == "__main__":
    asked = read_flags(FLAGS)
    run = resolve_for_slice(asked.run, asked.xla, parse_topology("v5e:1x1"))
    torch_xla.launch(main, args=(run,), debug_single_process=True)
