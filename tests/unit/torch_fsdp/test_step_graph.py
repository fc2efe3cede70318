"""A step as a graph: what it captures, what it writes, and its random numbers."""

import pytest
import torch
import torch.nn.functional as F
from timm.layers import DropPath
from torch import nn
from torch.utils.checkpoint import checkpoint

from torch_fsdp.devices import Cpu
from torch_fsdp.step_graph import StatelessRandom, StepGraphs, written_inputs


def seed(number):
    return torch.tensor(number, dtype=torch.int32)


def test_state_is_an_input_and_written_in_place():
    """SGD with momentum, against torch.optim: a view, a list and a tensor itself are written."""
    torch.manual_seed(0)
    layer, reference = nn.Linear(4, 3), nn.Linear(4, 3)
    reference.load_state_dict(layer.state_dict())
    moments = [torch.zeros_like(p) for p in layer.parameters()]
    graphs, optimizer = StepGraphs(Cpu()), torch.optim.SGD(reference.parameters(), 1, momentum=0.9)

    def step(inputs):
        loss = layer(inputs["x"]).square().mean()
        parameters = list(layer.parameters())
        gradients = torch.autograd.grad(loss, parameters)
        with torch.no_grad():
            torch._foreach_mul_(moments, 0.9)
            for p, g, m in zip(parameters, gradients, moments, strict=True):
                m.add_(g)
                p.detach().view(-1).sub_(m.view(-1) * inputs["lr"])
        return {"loss": loss}

    for number in range(3):
        x, lr = torch.randn(5, 4), 0.1 * (number + 1)
        found = graphs.run(step, {"x": x, "lr": torch.tensor(lr)})
        expected = reference(x).square().mean()
        optimizer.param_groups[0]["lr"] = lr
        optimizer.zero_grad()
        expected.backward()
        optimizer.step()
        assert found["loss"].item() == pytest.approx(expected.item(), rel=1e-6)
        for mine, other in zip(layer.parameters(), reference.parameters(), strict=True):
            torch.testing.assert_close(mine, other)
    (graph,) = graphs._graphs.values()  # traced once, whatever the learning rate
    names = {id(x) for x in [*layer.parameters(), *moments]}
    written = [[None, None, *graph.state][i] for i in written_inputs(graph.traced)]
    assert {id(x) for x in written} == names


def test_another_shape_is_another_graph():
    graphs = StepGraphs(Cpu())
    for size in (2, 3, 2):
        assert graphs.run(lambda x: x * len(x), torch.ones(size)).tolist() == [size] * size
    assert len(graphs._graphs) == 2


@pytest.mark.parametrize(("holds", "programs"), [(False, 2), (True, 3)])
def test_what_is_traced_anew_is_compiled_once(holds, programs):
    """With other tensors, unless the graph holds these; another computation is another program."""
    compiled = []

    class Counting(Cpu):
        where = torch.device("meta" if holds else "cpu")  # of inputs; the graph holds all others

        def compile_graph(self, graph, inputs, written):
            compiled.append(graph)
            return super().compile_graph(graph, inputs, written)

    graphs = StepGraphs(Counting())
    for value in (2.0, 3.0, 2.0):
        other = torch.tensor([value])
        graphs.forget()
        assert graphs.run(lambda x, other=other: x * other, torch.ones(1)).item() == value
    graphs.forget()
    assert graphs.run(lambda x: x + other, torch.ones(1)).item() == 3
    assert len(compiled) == programs


def drops(module, graphs, number, x):
    """The entries that a module drops with this seed."""

    def step(inputs):
        StatelessRandom.of_trace.begin(inputs["seed"])
        return module(inputs["x"])

    return graphs.run(step, {"x": x, "seed": seed(number)}, key=id(module)) == 0


@pytest.mark.parametrize("module", [nn.Dropout(0.25), DropPath(0.25)], ids=["dropout", "path"])
def test_dropout_follows_the_seed(module):
    graphs, x = StepGraphs(Cpu()), torch.ones(4000, 3)
    first, again, other = (drops(module, graphs, number, x) for number in (1, 1, 2))
    assert first.equal(again)
    assert not first.equal(other)
    for dropped in (first, other):
        assert dropped.float().mean().item() == pytest.approx(0.25, abs=0.03)
    both = (first & other).float().mean().item()  # independent of each other
    assert both == pytest.approx(0.0625, abs=0.02)
    assert len(graphs._graphs) == 1


def test_recomputation_drops_the_same():
    """The gradient is that of the mask that the output shows."""
    graphs = StepGraphs(Cpu())

    def step(inputs):
        StatelessRandom.of_trace.begin(inputs["seed"])
        x = inputs["x"].detach().requires_grad_()

        def block(x):
            with StatelessRandom.of_trace.at((1, 1)):
                return F.dropout(x.sin(), 0.5)

        y = checkpoint(block, x, use_reentrant=False, preserve_rng_state=False)
        (gradient,) = torch.autograd.grad(y.sum(), x)
        return y, gradient

    x = torch.randn(50, 8)
    y, gradient = graphs.run(step, {"x": x, "seed": seed(3)})
    assert 0 < (y == 0).sum() < y.numel()
    torch.testing.assert_close(gradient, torch.where(y == 0, 0.0, 2 * x.cos()))


def test_units_passes_and_draws_differ():
    with StatelessRandom() as random:
        random.begin(seed(5))
        rows = [torch.rand(1000), torch.rand(1000)]
        for place in [random.next_pass(unit) for unit in (1, 1, 2)]:
            with random.at(place):
                rows += [torch.rand(1000), torch.rand(1000)]
            with random.at(place):
                assert torch.rand(1000).equal(rows[-2])
    correlations = torch.corrcoef(torch.stack(rows)) - torch.eye(len(rows))
    assert correlations.abs().max() < 0.15


def test_normal_and_uniform_numbers():
    with StatelessRandom() as random:
        random.begin(seed(7))
        uniform, normal = torch.rand(20000), torch.randn(20000)
    for drawn, mean, deviation in ((uniform, 0.5, 12**-0.5), (normal, 0.0, 1.0)):
        assert drawn.mean().item() == pytest.approx(mean, abs=0.03)
        assert drawn.std().item() == pytest.approx(deviation, rel=0.03)
    assert uniform.min() >= 0
    assert uniform.max() < 1
    # As many within a standard deviation as the normal distribution has.
    assert (normal.abs() < 1).float().mean().item() == pytest.approx(0.6827, abs=0.02)


def test_numbers_like_a_tensor_and_whole_numbers():
    x = torch.zeros(50, 80, dtype=torch.bfloat16)
    with StatelessRandom() as random:
        random.begin(seed(8))
        uniform, normal = torch.rand_like(x), torch.randn_like(x)
        whole = [torch.randint(5, (4000,)), torch.randint(-2, 3, (4000,)) + 2]
    assert uniform.dtype == normal.dtype == torch.bfloat16
    assert uniform.shape == normal.shape == x.shape
    assert uniform.float().mean().item() == pytest.approx(0.5, abs=0.03)
    assert normal.float().std().item() == pytest.approx(1, rel=0.05)
    assert not whole[0].equal(whole[1])
    for drawn in whole:
        assert (drawn.bincount(minlength=5) / 4000).tolist() == pytest.approx([0.2] * 5, abs=0.03)


def test_another_random_operation_is_refused():
    with StatelessRandom(), pytest.raises(NotImplementedError, match="randperm"):
        torch.randperm(3)
