"""run_vit_training.py with the real megatron_fsdp on the CPU and gloo, CUDA streams left out.

Shows the package's arithmetic and our use of it. Streams, overlap and NCCL need a GPU.
"""

import contextlib
import sys

import torch


class Nothing:
    """Stands for a CUDA stream or event: every call does nothing."""

    def __init__(self, *args, **kwargs): ...

    def __getattr__(self, name):
        return lambda *args, **kwargs: Nothing()


def without_cuda() -> None:
    """Replace what megatron_fsdp calls of torch.cuda; before it is imported."""
    torch.cuda.Stream = torch.cuda.Event = Nothing
    torch.cuda.stream = lambda stream: contextlib.nullcontext()
    torch.cuda.current_stream = lambda *args: Nothing()
    torch.cuda.current_device = lambda: 0
    torch.cuda.synchronize = torch.cuda.empty_cache = lambda *args: None
    torch.Tensor.cuda = lambda self, *args, **kwargs: self
    torch.Tensor.record_stream = lambda self, stream: None


if __name__ == "__main__":
    without_cuda()
    import run_vit_training
    from gpu_fsdp import options

    options.check_megatron_runs_here = lambda: None
    sys.exit(run_vit_training.main([*sys.argv[1:], "--fsdp", "megatron"]))
