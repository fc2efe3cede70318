"""Steps of the GPU backend in which PyTorch raises if the host waits for the GPU.

Takes flags of run_vit_training.py; prints the losses as a JSON line. PyTorch notices copies
to the host, ``item`` and waiting for a stream, but not torch.cuda.synchronize.
"""

import json
import sys

import torch

from benchmarks.gpu_peers import objective_batches
from benchmarks.gpu_step_child import own_step
from tests.support.cli import TINY_MODEL, TINY_RUN
from tests.support.resolved import on_gpus
from torch_fsdp.launch_torch import launch
from torch_fsdp.parallel_plan import TorchRun
from training.backend import Backend


def steps(run: TorchRun, backend: Backend) -> None:
    step = own_step(run, backend, objective_batches(run, backend))
    for number in range(3):  # the first ones allocate and compile
        step(number)
    backend.wait()

    def no_synchronize(*args: object) -> None:
        raise RuntimeError("torch.cuda.synchronize in a step")

    synchronize, torch.cuda.synchronize = torch.cuda.synchronize, no_synchronize
    torch.cuda.set_sync_debug_mode("error")
    try:
        torch.ones((), device="cuda").item()
    except RuntimeError:
        pass
    else:
        sys.exit("PyTorch did not notice that the host waited")
    losses = [step(number) for number in range(3, 8)]
    torch.cuda.set_sync_debug_mode("default")
    torch.cuda.synchronize = synchronize
    print(json.dumps([loss.item() for loss in losses]))


if __name__ == "__main__":
    launch(steps, on_gpus([*TINY_MODEL, *TINY_RUN, "--backend", "cuda", *sys.argv[1:]]))
