"""Prints, as JSON, how far attention over processes is from PyTorch's on the whole sequence.

Run by torchrun on the CPU. Tokens in front of the patches are the same in all processes, as class
and register tokens are: of their gradients those of all processes count.
"""

import itertools
import json

import torch
import torch.distributed as dist
import torch.nn.functional as F

from torch_fsdp.domain import DomainGroup, ring_attention, ulysses_attention

BATCH, HEADS, WIDTH, VALUE_WIDTH = 2, 6, 8, 16
EVEN, UNEVEN = 5, (7, 1, 4, 2)
PREFIXES, OWN_QUERIES = (0, 3), (0, 2)


def gradients(found: torch.Tensor, weights: torch.Tensor, inputs: list[torch.Tensor]):
    return torch.autograd.grad((found * weights).sum(), inputs)


def total(x: torch.Tensor) -> torch.Tensor:
    """The sum over all processes."""
    x = x.clone()
    dist.all_reduce(x)
    return x


def compare(form: str, patches: tuple[int, ...], prefix: int, own: int, value_width: int) -> dict:
    """One case; ``own`` queries, if any, ask in the place of the tokens."""
    torch.manual_seed(sum(patches) + prefix)
    count, rank = sum(patches), dist.get_rank()
    group = DomainGroup(dist.group.WORLD, rank, patches, tuple(range(len(patches))))
    tokens = prefix + count
    q, k, v, weights = (
        torch.randn(BATCH, HEADS, number, width)
        for number, width in (
            (own or tokens, WIDTH),
            (tokens, WIDTH),
            (tokens, value_width),
            (own or tokens, value_width),
        )
    )
    start = sum(patches[:rank])
    first = own or prefix  # of the queries, and so of the output
    scale = WIDTH**-0.5

    def here(x: torch.Tensor, before: int) -> torch.Tensor:
        """What is in every process, and the patches of this one."""
        patch = x[:, :, before:][:, :, start : start + patches[rank]]
        return torch.cat([x[:, :, :before], patch], dim=2)

    whole = [x.requires_grad_() for x in (q, k, v)]
    expected = F.scaled_dot_product_attention(*whole)
    # Each process has a loss, of what is there: what comes first counts once for each process.
    times = torch.ones(own or tokens, 1)
    times[:first] = len(patches)
    expected_grads = gradients(expected, weights * times, whole)

    befores = (first, prefix, prefix)
    parts = [
        here(x.detach(), n).clone().requires_grad_() for x, n in zip(whole, befores, strict=True)
    ]
    if form == "ring":
        found = ring_attention(*parts, prefix, scale, group)
    else:
        found = ulysses_attention(*parts, (first, prefix), group, F.scaled_dot_product_attention)
    grads = gradients(found, here(weights, first), parts)
    errors = [off(found, here(expected, first))]
    for grad, wanted, before in zip(grads, expected_grads, befores, strict=True):
        grad = torch.cat([total(grad[:, :, :before]), grad[:, :, before:]], dim=2)
        errors.append(off(grad, here(wanted, before)))
    worst = torch.tensor(errors)
    dist.all_reduce(worst, op=dist.ReduceOp.MAX)
    return {"case": [form, patches, prefix, own, value_width], "errors": worst.tolist()}


def off(found: torch.Tensor, expected: torch.Tensor) -> float:
    return ((found - expected).norm() / expected.norm()).item()


def main() -> None:
    dist.init_process_group("gloo")
    size = dist.get_world_size()
    ulysses = ("ulysses",) if HEADS % size == 0 else ()
    divisions = ((EVEN,) * size, UNEVEN[:size])
    forms, widths = ("ring", *ulysses), (WIDTH, VALUE_WIDTH)
    cases = itertools.product(forms, divisions, PREFIXES, OWN_QUERIES, widths)
    found = [compare(*case) for case in cases]
    if dist.get_rank() == 0:
        print(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
