"""run_vit_training.py with the real torch_tpu on the host's processor; what it lacks is made here.

- A plugin lets XLA compute there (tests/hardware/torchtpu/conftest.py).
- torch_tpu looks for TPUs on the PCI bus: it finds as many as this host has processes.
- Kernels for attention, TorchTPU's and this program's, are the TPU's, and so is its account of
  memory.
- Several processes have no ICI: their tensors go over the host, by gloo. One process has
  torch_tpu's own collectives.
"""

import ctypes
import importlib
import os
import sys
import types

import torch
import torch.distributed as dist
import torch.nn.functional as F
from timm.layers import set_fused_attn
from torch._C._distributed_c10d import _create_work_from_future
from torch.distributed.distributed_c10d import _resolve_process_group
from torch_tpu._internal.distributed import tpu_distributed
from torch_tpu._internal.utils import hardware

from torch_fsdp import devices, domain, torch_tpu_private


class OverTheHost(dist.ProcessGroup):
    """The collectives of gloo, also of tensors on "tpu": each is done when its call returns."""

    def __init__(self, store, rank, size, timeout):
        super().__init__(rank, size)
        self._gloo = dist.ProcessGroupGloo(store, rank, size, timeout)
        for device in ("cpu", "tpu"):  # which is asked for what it supports
            self._register_backend(
                torch.device(device), dist.ProcessGroup.BackendType.GLOO, self._gloo
            )

    def getBackendName(self):
        return "over the host"

    @property
    def group_name(self):
        return self._name

    def _set_group_name(self, name):
        self._name = name
        super()._set_group_name(name)

    def _staged(self, call, outputs, inputs, *args):
        """``call`` of copies on the CPU, which for ``outputs`` are copied back."""
        copies = [[tensor.cpu() for tensor in each] for each in (outputs, inputs)]
        call(*copies, *args).wait()
        for tensor, copy in zip(outputs, copies[0], strict=True):
            tensor.copy_(copy)
        return _done(outputs)

    def allreduce(self, tensors, opts=None):
        opts = opts or dist.AllreduceOptions()
        return self._staged(lambda t, _: self._gloo.allreduce(t, opts), tensors, [])

    def broadcast(self, tensors, opts=None):
        opts = opts or dist.BroadcastOptions()
        return self._staged(lambda t, _: self._gloo.broadcast(t, opts), tensors, [])

    def allgather(self, outputs, inputs, opts=None):
        opts = opts or dist.AllgatherOptions()
        return self._staged(
            lambda o, i: self._gloo.allgather([o], i, opts), [*outputs[0]], [*inputs]
        )

    def all_gather_single(self, output, input, opts=None):
        opts = opts or dist.AllgatherOptions()
        return self._staged(
            lambda o, i: self._gloo._allgather_base(o[0], i[0], opts), [output], [input]
        )

    def reduce_scatter_single(self, output, input, opts=None):
        opts = opts or dist.ReduceScatterOptions()
        return self._staged(
            lambda o, i: self._gloo._reduce_scatter_base(o[0], i[0], opts), [output], [input]
        )

    def all_to_all_single(self, output, input, output_sizes, input_sizes, opts=None):
        opts = opts or dist.AllToAllOptions()
        return self._staged(
            lambda o, i: self._gloo.alltoall_base(o[0], i[0], output_sizes, input_sizes, opts),
            [output],
            [input],
        )

    def send(self, tensors, rank, tag=0):
        self._sent = [tensor.cpu() for tensor in tensors]
        return self._gloo.send(self._sent, rank, tag)

    def recv(self, tensors, rank, tag=0):
        return self._staged(lambda t, _: self._gloo.recv(t, rank, tag), tensors, [])

    # Of tensors on the CPU alone, by which checkpoints are planned. PyTorch's own would reach gloo,
    # too, with Python's lock held, which a thread of gloo may wait for while it holds gloo's.
    def gather(self, outputs, inputs, opts):
        return self._gloo.gather(outputs, inputs, opts)

    def scatter(self, outputs, inputs, opts):
        return self._gloo.scatter(outputs, inputs, opts)

    def barrier(self, opts=None):
        return self._gloo.barrier(opts or dist.BarrierOptions())


# Collectives as functions, which would reach gloo with Python's lock held, too.


def all_reduce(x, op, name):
    y = x.clone()
    dist.all_reduce(y, getattr(dist.ReduceOp, op.upper()), _resolve_process_group(name))
    return y


def all_gather_into_tensor(x, size, name):
    y = x.new_empty(size * x.shape[0], *x.shape[1:])
    dist.all_gather_into_tensor(y, x.contiguous(), _resolve_process_group(name))
    return y


def reduce_scatter_tensor(x, op, size, name):
    y = x.new_empty(x.shape[0] // size, *x.shape[1:])
    op = dist.ReduceOp.SUM if op == "sum" else dist.ReduceOp.AVG
    dist.reduce_scatter_tensor(y, x.contiguous(), op, _resolve_process_group(name))
    return y


def all_to_all_single(x, received, sent, name):
    y = x.new_empty(sum(received), *x.shape[1:])
    dist.all_to_all_single(y, x.contiguous(), received, sent, _resolve_process_group(name))
    return y


def wait_tensor(x):
    return x


FUNCTIONS = {
    each.__name__: each
    for each in (
        *(all_reduce, all_gather_into_tensor, reduce_scatter_tensor, all_to_all_single),
        wait_tensor,
    )
}


def compile_graph_of_the_host(self, graph, inputs, written):
    """In the place of ``devices.Tpu.compile_graph``: XLA's program would have no collectives
    between processes. PyTorch computes the graph on the host, where gloo is."""
    for part in graph.modules():
        if isinstance(part, torch.fx.GraphModule):
            for node in part.graph.nodes:
                if "device" in node.kwargs:
                    node.update_kwarg("device", torch.device("cpu"))
                if str(node.target).startswith("_c10d_functional."):
                    node.target = FUNCTIONS[node.target._opname]
            part.recompile()

    def run(*given):
        copies = [x.cpu() for x in given]
        found = [x.to(self.where) for x in graph(*copies)]
        for index in written:
            given[index].copy_(copies[index])
        return found

    return run


def linear_backward(x, grad, weight, needed):
    """An operation of graphs of "tpu" that the CPU does not have."""
    rows, grad_rows = x.flatten(0, -2), grad.flatten(0, -2)
    results = (lambda: grad @ weight, lambda: grad_rows.mT @ rows, lambda: grad_rows.sum(0))
    return tuple(result() if asked else None for asked, result in zip(needed, results, strict=True))


_functional = torch.library.Library("_c10d_functional", "IMPL")
_aten = torch.library.Library("aten", "IMPL")


def functional_over_the_host(name: str) -> None:
    """Let a functional collective of tensors on "tpu" be that of copies on the CPU."""
    operation = getattr(torch.ops._c10d_functional, name).default

    def staged(x, *args):
        return torch.ops._c10d_functional.wait_tensor(operation(x.cpu(), *args)).to(x.device)

    _functional.impl(name, staged, "PrivateUse1", allow_override=True)


def _done(result):
    future = torch.futures.Future()
    future.set_result(result)
    return _create_work_from_future(future)


def by_plain_products(q, k, v, *, scale):
    return (scale * q @ k.mT).softmax(dim=-1) @ v


def on_the_host() -> None:
    """Let torch_tpu find what it lacks here; before it registers its device."""
    hardware.get_tpu_device_count = lambda: int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    torch_tpu_private.tpus_of_host = hardware.get_tpu_device_count
    set_fused_attn(False)
    domain.F = types.SimpleNamespace(pad=F.pad, scaled_dot_product_attention=by_plain_products)
    devices.Tpu.memory = lambda self: {}
    devices.Tpu.kernel_memory = None
    if os.environ.get("WORLD_SIZE", "1") != "1":
        tpu_distributed.create_process_group = OverTheHost
        devices.Tpu.compile_graph = compile_graph_of_the_host
        for name in ("barrier", "scan"):
            setattr(devices.Tpu, name, getattr(devices.Device, name))
        for name, function in FUNCTIONS.items():  # where no graph is, as in evaluations
            _functional.impl(name, function, "PrivateUse1", allow_override=True)
        _aten.impl("linear_backward", linear_backward, "CPU")
        # The runtime would look for the devices of all processes: it reads C's environment, where
        # this is removed. The program, which reads Python's, asks whether a launcher set these.
        ctypes.CDLL(None).unsetenv(b"WORLD_SIZE")
        os.environ.update(TORCH_TPU_SLICEBUILDER_ADDRESSES="none", TORCH_TPU_TOPOLOGY="none")


def in_slices(indices: list[int]) -> None:
    """Let the device of each rank be in the slice of this index, those of the first ranks at its
    far end; prints how they are arranged."""
    device = {"core_on_chip": 0, "device_kind": "TPU v5e"}
    found = [
        types.SimpleNamespace(
            **device,
            coords=[indices[rank + 1 :].count(index), 0, 0],
            id=rank,
            process_index=rank,
            slice_index=index,
        )
        for rank, index in enumerate(indices)
    ]
    tpu_distributed.global_device_attributes = lambda: found
    attributes = torch_tpu_private.device_attributes
    torch_tpu_private.device_attributes = lambda: attributes() | {"coords": [0, 0, 0]}
    arrange = devices.Tpu.arrange

    def arrange_and_tell(self, shape):
        ranks = arrange(self, shape)
        # At once, or what another process prints may come in between.
        print(f"ranks {ranks.tolist()}\n", end="", file=sys.stderr)
        return ranks

    devices.Tpu.arrange = arrange_and_tell


if __name__ == "__main__":
    on_the_host()
    if indices := os.environ.get("SLICES"):
        in_slices([int(index) for index in indices.split()])
    elif slices := int(os.environ.get("MEGASCALE_NUM_SLICES") or 0):
        world = int(os.environ["WORLD_SIZE"])
        in_slices([rank * slices // world for rank in range(world)])
    # PROGRAM: another module to run so, such as tests.fakes.signal_at_step.
    program = importlib.import_module(os.environ.get("PROGRAM", "run_vit_training"))
    sys.exit(program.main(["--backend", "torchtpu", *sys.argv[1:]]))
