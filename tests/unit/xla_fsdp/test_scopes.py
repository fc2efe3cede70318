"""Names of modules: which scopes are open while each operation is recorded."""

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from xla_fsdp.scopes import OPTIMIZER, Names

pytestmark = pytest.mark.fast


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(2, 2), nn.Linear(2, 2)

    def forward(self, x):
        return self.last(self.first(x).sin()).exp().sum()


class Open:
    """A scope, in a list while it is open."""

    scopes: list[str] = []
    seen: list[str] = []

    def __init__(self, name):
        self.scopes.append(name)
        self.seen.append(name)
        self.name = name

    def __del__(self):
        assert self.scopes.pop() == self.name


def test_a_recomputation_that_ends_early_closes_its_scopes():
    """PyTorch ends one by an exception, once it has all that the backward pass needs."""
    model = nn.Sequential(Block())
    names = Names(Open)
    names.watch(model)
    block, forward = model[0], model[0].forward
    block.forward = lambda x: checkpoint(forward, x, use_reentrant=False)
    with names.inside(OPTIMIZER, "update"):
        loss = model(torch.ones(1, 2))
        loss.backward()
        assert Open.scopes == ["[optimizer_update]"]
    assert not Open.scopes
    first = [scope for scope in Open.seen if scope.startswith("[first")]
    assert [first[0], first[1]] == ["[first_forward]", "[first_recompute]"]
    assert "[first_backward]" in first
    assert block.first.weight.grad is not None
