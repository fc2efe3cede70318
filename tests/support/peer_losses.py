"""For test_gpu_peers: the losses of the first steps, of the program's own step and the plain one.

Takes a mode and a backend of torch.compile for the plain step, and the flags of the run. A mode
"none" compiles nothing. Prints one JSON line.
"""

import functools
import json
import sys

import torch

from benchmarks import gpu_peers
from benchmarks.gpu_step_child import own_step
from tests.support.resolved import on_gpus
from torch_fsdp.launch_torch import launch

STEPS = 3


def measure(run, backend, *, mode):
    batches = gpu_peers.objective_batches(run, backend)
    name = run.config.objective.objective
    plain_step = getattr(gpu_peers, f"plain_{name}_step")
    steps = {
        "own": own_step(run, backend, batches),
        "plain": plain_step(run, backend, batches, compile_mode=None if mode == "none" else mode),
    }
    losses = {
        name: [step(number).item() for number in range(STEPS)] for name, step in steps.items()
    }
    print(json.dumps(losses))


if __name__ == "__main__":
    mode, compiler, *flags = sys.argv[1:]
    torch.compile = functools.partial(torch.compile, backend=compiler)
    launch(functools.partial(measure, mode=mode), on_gpus(flags))
