"""A loop with recomputation against the same functions one after the other."""

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from torch_fsdp.devices import Cpu
from torch_fsdp.scan import ScanWithRecomputation

FUNCTIONS = 4


def function(x, row):
    weight, bias, scale = row
    return torch.tanh(x @ weight + bias) * scale


def in_a_loop(x, *columns):
    dtypes = [torch.bfloat16, torch.float64, torch.float64]
    flat = [values for row in zip(*columns, strict=True) for values in row]
    return ScanWithRecomputation.apply(function, dtypes, Cpu(), False, x, *flat)


def one_by_one(x, *columns):
    for weight, *row in zip(*columns, strict=True):
        rounded = weight + (weight.bfloat16().double() - weight).detach()
        x = function(x, [rounded, *row])
    return x


@pytest.fixture
def arguments():
    generator = torch.Generator().manual_seed(1)
    shapes = [(3, 5), (FUNCTIONS, 5, 5), (FUNCTIONS, 5), (FUNCTIONS,)]
    return [torch.randn(s, dtype=torch.float64, generator=generator) for s in shapes]


def with_gradients(run, trained):
    """The graph of a function's results and gradients for those of its arguments that train."""

    def step(*tensors):
        tensors = [x.detach().requires_grad_(i in trained) for i, x in enumerate(tensors)]
        y = run(tensors[0], *(x.unbind() for x in tensors[1:]))
        return [y, *torch.autograd.grad(y.square().sum(), [tensors[i] for i in trained])]

    return step


@pytest.mark.parametrize("trained", [(0, 1, 2, 3), (1, 3), (0,)])
def test_same_as_one_by_one(trained, arguments):
    graph = make_fx(with_gradients(in_a_loop, trained), tracing_mode="fake")(*arguments)
    expected = with_gradients(one_by_one, trained)(*arguments)
    for found, wanted in zip(graph(*arguments), expected, strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)


def bodies(graph):
    scans = [n for n in graph.graph.nodes if n.target is torch.ops.higher_order.scan]
    return [getattr(graph, scan.args[0].target).graph for scan in scans]


def test_each_loop_has_the_function_once(arguments):
    graph = make_fx(with_gradients(in_a_loop, (0, 1)), tracing_mode="fake")(*arguments)
    tanh = {"op": "call_function", "target": torch.ops.aten.tanh.default}
    assert [len(body.find_nodes(**tanh)) for body in bodies(graph)] == [1, 1]
    assert not graph.graph.find_nodes(**tanh)


def test_nothing_is_saved_without_gradients(arguments):
    def run(x, *columns):
        return in_a_loop(x, *(column.unbind() for column in columns))

    (body,) = bodies(make_fx(run, tracing_mode="fake")(*arguments))
    (output,) = body.find_nodes(op="output")
    assert len(output.args[0]) == 1
