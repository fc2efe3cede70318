"""run_vit_training.py on the GPU backend, counting what a step must not do, and what is left.

On a GPU or a TPU each `.item()`, each branch on a tensor, and most copies to the host, stop the
host until the device is done. Threads of gloo that live on when Python ends can abort the process.
Writes the reads of all steps, and the threads left, as JSON to --ckpt_dir/counts_<rank>.json.
"""

import json
import os
import sys
import threading
import traceback
from pathlib import Path

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.fakes.megatron_on_cpu import without_cuda


class CountReads(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.reads = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten._local_scalar_dense.default:
            # Places in a mesh are on the host, on a GPU too; PyTorch 2.14 reads them.
            files = {Path(frame.filename).name for frame in traceback.extract_stack()}
            self.reads += "device_mesh.py" not in files
        result = func(*args, **(kwargs or {}))
        if func is torch.ops.aten._to_copy.default:
            self.reads += result.device.type == "cpu" != args[0].device.type
        return result


def threads_of_gloo() -> int:
    """How many threads there are beside Python's, and autograd's, which PyTorch 2.14 names."""
    names = [path.read_text() for path in Path("/proc/self/task").glob("*/comm")]
    return sum("pt_autograd" not in name for name in names) - threading.active_count()


def main(argv: list[str]) -> int:
    if "megatron" in argv:
        without_cuda()
    import run_vit_training
    from torch_fsdp.torch_backend import TorchBackend
    from training import step

    counts = []

    def counted(function):
        def call(*args, **kwargs):
            with CountReads() as mode:
                result = function(*args, **kwargs)
            counts.append(mode.reads)
            return result

        return call

    step.forward_backward = counted(step.forward_backward)
    TorchBackend.optimizer_step = counted(TorchBackend.optimizer_step)
    code = run_vit_training.main(argv)
    folder = Path(argv[argv.index("--ckpt_dir") + 1])
    found = {"reads": counts, "threads": threads_of_gloo()}
    (folder / f"counts_{os.environ.get('RANK', '0')}.json").write_text(json.dumps(found))
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
