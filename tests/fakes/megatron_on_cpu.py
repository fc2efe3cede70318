"""run_vit_training.py with the real megatron_fsdp on the CPU and gloo, CUDA streams left out.

Shows the package's arithmetic and our use of it. Streams, overlap and NCCL need a GPU.
"""

import contextlib
import sys

import torch
from torch.distributed import distributed_c10d


class OneThreadGloo(distributed_c10d.ProcessGroupGloo):
    """gloo with one thread a group, not two, so that they cannot corrupt the heap.

    After each collective, its thread assigns the collective's name to a string of the group,
    without a lock (PyTorch 2.9, ``ProcessGroupGloo::runLoop``). Two at once free the same memory
    twice, where a name is too long to be held in the string itself: "ALLGATHER_COALESCED". Only
    Megatron-FSDP asks for that, and outside of tests of NCCL.
    """

    def __init__(self, store, rank, size, timeout, enable_reconfigure=False):
        assert not enable_reconfigure  # PyTorch 2.14 passes it; options without it mean the same
        options = self._Options()
        options._devices = [self.create_default_device()]
        options._threads = 1
        options._timeout = timeout
        super().__init__(store, rank, size, options)


class Nothing:
    """Stands for a CUDA stream or event: every call does nothing."""

    def __init__(self, *args, **kwargs): ...

    def __getattr__(self, name):
        return lambda *args, **kwargs: Nothing()


def without_cuda() -> None:
    """Replace what megatron_fsdp calls of torch.cuda, before it is imported, and allow it here."""
    distributed_c10d.ProcessGroupGloo = OneThreadGloo
    torch.cuda.Stream = torch.cuda.Event = Nothing
    torch.cuda.stream = lambda stream: contextlib.nullcontext()
    torch.cuda.current_stream = lambda *args: Nothing()
    torch.cuda.current_device = lambda: 0
    torch.cuda.synchronize = torch.cuda.empty_cache = lambda *args: None
    torch.Tensor.cuda = lambda self, *args, **kwargs: self
    torch.Tensor.record_stream = lambda self, stream: None
    from gpu_fsdp import resolve_gpu

    resolve_gpu.check_megatron_runs_here = lambda: None


if __name__ == "__main__":
    without_cuda()
    import run_vit_training

    sys.exit(run_vit_training.main([*sys.argv[1:], "--fsdp", "megatron"]))
