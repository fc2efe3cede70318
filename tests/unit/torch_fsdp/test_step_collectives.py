"""The collectives of a traced step, against arithmetic: kinds, groups and elements of each."""

from collections import Counter

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from tests.support.cli import TINY_MODEL, TINY_RUN
from tests.support.resolved import on_gpus
from torch_fsdp.devices import Cpu
from torch_fsdp.simple_fsdp import SimpleFsdpBackend
from training.objectives.registry import open_objective
from training.schedule import StepRates
from training.step import shard_and_optimize, train_step

PROCESSES, BLOCKS = 3, 2
FLAGS = [*TINY_MODEL, *TINY_RUN, "--batch_size", "24", "--fake_data", "--fsdp", "simple"]


@pytest.fixture
def fake_processes(monkeypatch):
    """A group of processes that are not there: their collectives return at once."""
    monkeypatch.setenv("WORLD_SIZE", str(PROCESSES))
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=PROCESSES)
    yield
    dist.destroy_process_group()


def traced(*flags):
    """The graph of a step of the first process, and the shapes of the whole parameters."""
    run = on_gpus([*FLAGS, "--compile", *flags])
    backend = SimpleFsdpBackend(run, Cpu())
    model = shard_and_optimize(run, backend)
    objective = open_objective(run, backend, lambda text: None)
    model.train()
    batches = [
        {
            "image": torch.zeros(8 // count, 3, 16, 16, dtype=torch.uint8),
            "target": torch.zeros(8 // count, dtype=torch.int64),
        }
        for count in [run.config.data.grad_accum_steps]
        for _ in range(count)
    ]
    train_step(model, objective, backend, 0, batches, rates=StepRates(1e-3), max_norm=1.0)
    backend.close()
    (graph,) = backend._graphs._graphs.values()
    shapes = {name: p.shape for name, p in run.model.meta.named_parameters()}
    return graph.traced, shapes


def nodes_that_run(graph):
    """Each node of a graph, and how often it runs: in a loop, once for each block."""
    for node in graph.graph.nodes:
        if node.target is torch.ops.higher_order.scan:
            for inner, times in nodes_that_run(getattr(graph, node.args[0].target)):
                yield inner, BLOCKS * times
        else:
            yield node, 1


def padded(shape):
    """The elements of all shards of a parameter, along dimension 0 or that of the positions."""
    dim = 1 if shape[0] == 1 and shape[1] % PROCESSES == 0 else 0
    return shape.numel() // shape[dim] * -(-shape[dim] // PROCESSES) * PROCESSES


@pytest.mark.parametrize(
    ("flags", "passes", "recomputes", "is_loop"),
    [
        ("", 1, 1, True),
        ("--grad_accum_steps 2", 2, 1, True),
        ("--no_grad_ckpt", 1, 0, False),
        ("--grad_accum_steps 2 --grad_ckpt selective", 2, 1, False),
        ("--zero_dp_strategy 2", 1, 0, False),
    ],
)
def test_collectives_of_a_step(fake_processes, flags, passes, recomputes, is_loop):
    graph, shapes = traced(*flags.split())
    found, elements = Counter(), Counter()
    for node, times in nodes_that_run(graph):
        kind = getattr(node.target, "__name__", "").partition(".")[0]
        if kind in ("all_gather_into_tensor", "reduce_scatter_tensor", "all_reduce"):
            found[kind] += times
            whole = node if kind == "all_gather_into_tensor" else node.args[0]
            elements[kind] += times * whole.meta["val"].numel()
            group = dist.distributed_c10d._resolve_process_group(node.args[-1])
            assert dist.get_process_group_ranks(group) == [*range(PROCESSES)]
            if kind != "all_reduce":
                assert node.args[-2] == PROCESSES
    in_blocks = {name for name in shapes if name.startswith("blocks.")}
    assert len(in_blocks) == BLOCKS * 12
    # A loop gathers norms and biases of all blocks together, once.
    together = {name for name in in_blocks if is_loop and len(shapes[name]) == 1}
    fewer = len(together) - len(together) // BLOCKS
    times = {name: 1 + recomputes * (name in in_blocks - together) for name in shapes}
    assert found == {
        "all_gather_into_tensor": passes * (sum(times.values()) - fewer),
        "reduce_scatter_tensor": passes * (len(shapes) - fewer),
        "all_reduce": 2,  # of the loss and of the gradient's norm
    }
    assert elements == {
        "all_gather_into_tensor": passes
        * sum(times[name] * padded(shape) for name, shape in shapes.items()),
        "reduce_scatter_tensor": passes * sum(map(padded, shapes.values())),
        "all_reduce": 2,
    }


@pytest.mark.parametrize(
    "flags", ["", "--matmul int8", "--matmul fp8 --grad_ckpt none", "--gather_dtype fp8"]
)
def test_bytes_of_gathered_matrices(fake_processes, flags):
    """A byte a number, and a factor of four for each row, in place of two bytes a number; gradients
    are reduced as without the flag."""
    graph, shapes = traced("--precision", "bf16", *flags.split())
    found, is_flag_set = Counter(), bool(flags)
    for node, times in nodes_that_run(graph):
        kind = getattr(node.target, "__name__", "").partition(".")[0]
        if kind == "all_gather_into_tensor":
            found[kind] += times * node.meta["val"].nbytes
        elif kind == "reduce_scatter_tensor":
            assert node.args[0].meta["val"].dtype == torch.float32
            found[kind] += times * node.args[0].meta["val"].numel()
    expected = 0
    for name, shape in shapes.items():
        in_block, rows = name.startswith("blocks."), padded(torch.Size((shape[0], 1)))
        recomputed = in_block and len(shape) > 1 and "none" not in flags
        is_rounded = in_block and len(shape) > 1 and is_flag_set
        size = padded(shape) + 4 * rows if is_rounded else 2 * padded(shape)
        expected += size * (2 if recomputed else 1)
    assert found["all_gather_into_tensor"] == expected
    assert found["reduce_scatter_tensor"] == sum(map(padded, shapes.values()))
