"""Prints, as JSON, how AdamW on XLA rounds its moments to bf16, and where they end up.

rounding     of several values: their mean over many draws, and what they were rounded to
exact        whether what bf16 has, and what is not finite, stayed as it is
bits         whether random bits are those of plain PyTorch
adamw        weights after updates, beside plain PyTorch's with fp32 moments
constant     exp_avg_sq of a constant gradient, beside fp32's and what is rounded to nearest
skipped      whether a skipped step left all as it was
"""

import json

import torch
import torch_xla

from training.optimizers import Update, key_of, random_bits, to_bf16, upper
from xla_fsdp.optimizer import build_optimizer, same_bits, set_lr, step_unless

DRAWS = 1 << 18
VALUES = [1.001, -3.3333e-5, 1e-3, 3.14159, 1e-30, 3.38e38]
LARGEST = torch.finfo(torch.bfloat16).max
KEPT = [0.0, -0.0, 1.0, -2.5, 2.0**-126, LARGEST, float("inf"), -float("inf"), float("nan")]
CUT = {3.4e38: LARGEST, -3.4e38: -LARGEST}
"""What is larger than bf16's largest number."""
HOW = {"betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.1}
GRADIENT, STEPS = 1e-3, 3000


def draw(x, step):
    key = torch.tensor(key_of(0, "a name"), dtype=torch.int32).to(x.device)
    return random_bits(x.shape, x.device, key, torch.tensor(float(step)).to(x.device))


def rounding(device):
    found = []
    for number, value in enumerate(VALUES):
        x = torch.full((DRAWS // 1024, 1024), value)
        bits = draw(x.to(device), number)
        for half in (bits, upper(bits)):
            rounded = to_bf16(x.to(device), half, same_bits).cpu().double()
            nearest = x[0, 0].bfloat16()
            found.append(
                {
                    "value": x[0, 0].item(),
                    "mean": rounded.mean().item(),
                    "to": rounded.unique().tolist(),
                    "ulp": abs((nearest.view(torch.int16) + 1).view(torch.bfloat16) - nearest)
                    .double()
                    .item(),
                }
            )
    return found


def exact(device):
    x = torch.tensor([*KEPT, *CUT]).repeat(1000, 1)
    # Not a number, by the bits that bf16 cuts off.
    strange = torch.tensor([0x7F800001, 0x7FFFFFFF, -1], dtype=torch.int32).view(torch.float32)
    rounded = to_bf16(x.to(device), draw(x.to(device), 1), same_bits).cpu()
    expected = torch.tensor([*KEPT, *CUT.values()]).bfloat16().expand_as(rounded)
    numbers = ~expected.isnan()
    same = torch.equal(rounded[numbers].view(torch.int16), expected[numbers].view(torch.int16))
    still = to_bf16(strange.to(device), draw(strange.to(device), 1), same_bits).cpu()
    return same and bool(rounded[~numbers].isnan().all()) and bool(still.isnan().all())


def optimizers(values, device, dtype):
    """AdamW on the device with moments of a dtype, and PyTorch's own of the same weights."""
    on_device = [torch.nn.Parameter(each.to(device)) for each in values]
    update = Update("adamw", HOW["weight_decay"])
    ours = build_optimizer(
        {each: [update] for each in on_device},
        lambda p: torch.zeros(p.shape, dtype=dtype, device=device),
        lambda value: value.to(device),
        betas=HOW["betas"],
        eps=HOW["eps"],
    )
    plain = [torch.nn.Parameter(each.clone()) for each in values]
    return on_device, ours, plain, torch.optim.AdamW(plain, **HOW)


def update(parameters, optimizer, gradients, keys, skip=False):
    device = parameters[0].device
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient.to(device)
    step_unless(optimizer, torch.tensor(skip).to(device), keys)
    optimizer.zero_grad(set_to_none=True)
    torch_xla.sync()


def adamw(device):
    """Weights that are pulled to 0 by noisy gradients; how far from fp32's, by what they moved."""
    draw_from = torch.Generator().manual_seed(0)
    values = [torch.randn(shape, generator=draw_from) for shape in [(64, 48), (7, 5000), (33,)]]
    mine, ours, plain, theirs = optimizers(values, device, torch.bfloat16)
    keys = torch.tensor([key_of(0, n) for n in range(3)], dtype=torch.int32).to(device)
    for step in range(200):
        lr = 1e-2 * (1 - step / 200)
        gradients = [p.detach() + torch.randn(p.shape, generator=draw_from) for p in plain]
        for parameter, gradient in zip(plain, gradients, strict=True):
            parameter.grad = gradient.clone()
        for group in theirs.param_groups:
            group["lr"] = lr
        theirs.step()
        set_lr(ours, lr, lambda value: value.to(device), {})
        update(mine, ours, gradients, keys)
    off = [(a.detach().cpu() - b).norm() for a, b in zip(mine, plain, strict=True)]
    moved = [(a - b).norm() for a, b in zip(plain, values, strict=True)]
    dtypes = {str(t.dtype) for state in ours.state.values() for t in state.values()}
    before = on_host(ours)
    update(mine, ours, [g * float("nan") for g in gradients], keys, skip=True)
    skipped = all(torch.equal(a, b) for a, b in zip(before, on_host(ours), strict=True))
    far = [(o / m).item() for o, m in zip(off, moved, strict=True)]
    return {"off": far, "dtypes": sorted(dtypes), "skipped": skipped}


def on_host(optimizer):
    """Weights and state."""
    both = ([p.detach(), *state.values()] for p, state in optimizer.state.items())
    return [tensor.cpu() for each in both for tensor in each]


def constant(device):
    values = [torch.zeros(4096)]
    mine, ours, _, _ = optimizers(values, device, torch.bfloat16)
    keys = torch.tensor([key_of(0, "constant")], dtype=torch.int32).to(device)
    gradient = torch.full((4096,), GRADIENT).to(device)
    nearest, exactly = torch.zeros((), dtype=torch.bfloat16), 0.0
    for _ in range(STEPS):
        update(mine, ours, [gradient], keys)
        square = 0.001 * GRADIENT**2
        nearest = (0.999 * nearest.float() + square).bfloat16()
        exactly = 0.999 * exactly + square
    second = ours.state[mine[0]]["exp_avg_sq"].cpu().double()
    return {
        "mean": second.mean().item(),
        "spread": second.std().item(),
        "exactly": exactly,
        "nearest": nearest.item(),
    }


def main():
    device = torch_xla.device()
    x = torch.zeros(5, 70_000)
    found = {
        "rounding": rounding(device),
        "exact": exact(device),
        "bits": torch.equal(draw(x.to(device), 3).cpu(), draw(x, 3)),
        "adamw": adamw(device),
        "constant": constant(device),
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main()
