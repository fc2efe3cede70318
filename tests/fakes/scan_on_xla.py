"""Prints, as JSON, what the loop over blocks computes beside the blocks one after the other."""

import json

import torch
import torch_xla
import torch_xla.core.xla_model as xm
from timm.layers import DropPath
from torch import nn

from xla_fsdp.layout import gather
from xla_fsdp.remat import SAVED_BY
from xla_fsdp.scan import ScannedBlocks

DEPTH, WIDTH = 4, 64


class Scale(nn.Module):
    """x * weight, some of it dropped: its gradient is the mask times the weight."""

    def __init__(self, rate: float, drop_path: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(1 + torch.rand(WIDTH))
        self.dropout = nn.Dropout(rate)
        self.drop_path = DropPath(drop_path) if drop_path else nn.Identity()

    def forward(self, x):
        return self.drop_path(self.dropout(x * self.weight))


class Gate(Scale):
    """Scale, where a truth value that comes from the input says by how much."""

    def forward(self, x):
        y = super().forward(x)
        return torch.where(y > 0.5, y, 2 * y)


def same(x):
    return x


class OneDevice:
    """What a ``MeshLayout`` does, without marks."""

    mark_tokens, mark_saved = staticmethod(same), staticmethod(same)

    def stacked_zeros(self, name, parameter, depth):
        return nn.Parameter(torch.zeros((depth, *parameter.shape), device="xla"))

    def constant(self, values):
        return values.to("xla")

    def parameter_spec(self, name, shape): ...

    def send(self, values, spec):
        return values.to("xla")


def scanned(
    blocks: nn.Sequential | nn.ModuleList, bf16: bool = False, policy: str = "full"
) -> ScannedBlocks:
    stack = ScannedBlocks(
        blocks,
        OneDevice(),
        SAVED_BY[policy](),
        adapt=lambda block: None,
        gather=lambda _, w: gather(w, same, same),
        bf16=bf16,
    )
    for index, block in enumerate(blocks):
        stack.fill(index, block)
    return stack


def run(stack: ScannedBlocks, x: torch.Tensor, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Output, and the gradient of its sum with respect to the input."""
    xm.set_rng_state(seed)
    x = x.to("xla").requires_grad_()
    y = stack(x)
    (grad,) = torch.autograd.grad(y.sum(), [x])
    torch_xla.sync()
    return y.cpu(), grad.cpu()


def measure(policy: str) -> dict[str, object]:
    """Return what the loop computes with this value of --grad_ckpt."""
    torch.manual_seed(0)
    plain = nn.Sequential(*[Gate(0.0, 0.0) for _ in range(DEPTH)])
    x = torch.rand(256, WIDTH, requires_grad=True)
    expected = plain(x)
    (expected_grad,) = torch.autograd.grad(expected.sum(), [x])
    x = x.detach()
    y, grad = run(scanned(plain, policy=policy).train(), x, 1)
    found: dict[str, object] = {
        "value": (y - expected).abs().max().item(),
        "gradient": (grad - expected_grad).abs().max().item(),
    }
    for name, rates, paths in (("dropout", 0.2, [0.0] * 4), ("drop_path", 0.0, [0, 0.1, 0.2, 0.4])):
        blocks = nn.Sequential(*[Scale(rates, path) for path in paths])
        stack = scanned(blocks, policy=policy).train()
        weights = stack.block.weight.detach().cpu().prod(dim=0)
        y, grad = run(stack, x, 1)
        again, _ = run(stack, x, 1)
        other, _ = run(stack, x, 2)
        found[name] = {
            "kept": (y != 0).float().mean().item(),
            "masks_differ_back": ((grad * x - y).abs() > 1e-4).float().mean().item(),
            "repeated": torch.equal(y, again),
            "other_seed_same": torch.equal(y, other),
            "scale": (y / (x * weights)).max().item(),
        }
        stack.eval()
        with torch.no_grad():
            found[name]["eval_kept"] = (stack(x.to("xla")).cpu() != 0).float().mean().item()
    return found


def main() -> None:
    torch_xla.device()
    print(json.dumps({policy: measure(policy) for policy in ("full", "none")}))


if __name__ == "__main__":
    main()
