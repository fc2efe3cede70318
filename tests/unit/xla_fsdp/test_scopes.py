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
        return self.last(self.first(x).sin()).sum()


def test_a_recomputation_that_ends_early_closes_its_scopes():
    """PyTorch ends one by an exception, once it has all that the backward pass needs."""
    are_open: list[str] = []
    seen: list[str] = []

    class Scope:
        def __init__(self, name):
            self.name = name
            are_open.append(name)
            seen.append(name)

        def __del__(self):
            are_open.remove(self.name)

    model = nn.Sequential(Block())
    names = Names(Scope)
    names.watch(model)
    block, forward = model[0], model[0].forward
    block.forward = lambda x: checkpoint(forward, x, use_reentrant=False)
    with names.inside(OPTIMIZER, "update"):
        loss = model(torch.ones(1, 2))
        loss.backward()
        assert are_open == ["[optimizer_update]"]
    assert not are_open
    first = [scope for scope in seen if scope.startswith("[first")]
    assert first[:2] == ["[first_forward]", "[first_recompute]"]
    assert "[first_backward]" in first
    assert block.first.weight.grad is not None
