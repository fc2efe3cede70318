"""run_vit_training.py on virtual CPU devices, with plain products in the place of TPU kernels.

What is tested is all around the kernels: which part of which tensor each device gives them, and
what becomes of the results. Each stand-in checks the sizes that a kernel is made for.
"""

import sys

import torch

import run_vit_training
from xla_fsdp import resolve_xla
from xla_fsdp.attention import flash, whole


def of_whole(sizes, parts):
    """Queries, keys and values, (images, heads, tokens, width), of what the kernels are given."""
    assert [tuple(part.shape) for part in parts[:3]] == [sizes.given] * 3
    q, k, v = parts[0].chunk(3, -1) if sizes.packed else parts[:3]
    if sizes.apart:
        q, k = (rotated(sizes, each.float(), parts[-1]) for each in (q, k))
    return [apart(sizes, each) for each in (q, k, v)]


def rotated(sizes, x, angles, *, back=False):
    """Group by group of heads, as a kernel shifts them; a gradient by the opposite angles."""
    assert tuple(angles.shape) == sizes.angles
    x = x.unflatten(-1, (sizes.groups, sizes.lanes))
    cosines, *sines = angles[:, : sizes.tokens, None]
    turned = x * cosines
    for shift, each in zip(sizes.shifts, sines, strict=True):
        turned = turned + ((x * each).roll(-shift, -1) if back else x.roll(shift, -1) * each)
    return turned.flatten(2)


def apart(sizes, x):
    return x.unflatten(-1, (sizes.heads, -1)).transpose(1, 2).float()


def together(x, dtype):
    return x.transpose(1, 2).flatten(2).to(dtype)


def scaled(q, width):
    """Without a constant: XLA for CPUs moves those out of loops, and then fails."""
    assert q.shape[-1] == width
    return q * (q - q).exp().sum(-1, keepdim=True).rsqrt()


def whole_forward(sizes):
    def call(parts):
        q, k, v = of_whole(sizes, parts)
        weights = (scaled(q, sizes.width) @ k.mT).softmax(-1)
        return [together(weights @ v, sizes.dtype)]

    return call


def whole_backward(sizes):
    def call(parts):
        q, k, v = of_whole(sizes, parts)
        assert tuple(parts[3].shape) == sizes.shape
        grad, q = apart(sizes, parts[3]), scaled(q, sizes.width)
        weights = (q @ k.mT).softmax(-1)
        inner = ((weights @ v) * grad).sum(-1, keepdim=True)
        of_scores = weights * (grad @ v.mT - inner)
        grads = (of_scores @ scaled(k, sizes.width), of_scores.mT @ q, weights.mT @ grad)
        found = [together(each, torch.float32) for each in grads]
        if sizes.apart:
            found[:2] = [rotated(sizes, each, parts[-1], back=True) for each in found[:2]]
        found = [each.to(sizes.dtype) for each in found]
        return [torch.cat(found, -1) if sizes.packed else torch.stack(found)]

    return call


def flash_weights(shape, scale, parts):
    """exp(score - the row's largest), these, and what is left of the parts behind the ids."""
    q, k = (x.float() for x in parts[:2])
    assert tuple(q.shape) == shape.query_shape
    scores, rest = scaled(q, round(scale**-2)) @ k.mT, parts[3:]
    largest = scores.amax(-1, keepdim=True)
    weights = scores - largest
    if shape.masked:
        (queries, keys), rest = rest[:2], rest[2:]
        weights = weights.exp() * (queries[:, None, :, :1] == keys[:, None, :1, :]).float()
        return weights, largest, rest
    return weights.exp(), largest, rest


def flash_kernel(computes, shape, scale):
    def forward(parts):
        weights, largest, _ = flash_weights(shape, scale, parts)
        sums = weights.sum(-1, keepdim=True)
        output = (weights / sums @ parts[2].float()).to(shape.dtype)
        rows = [x.expand(shape.statistic_shape).contiguous() for x in (sums, largest)]
        return [output] if computes == "output" else [output, *rows]

    def backward(parts):
        weights, largest, (sums, given, grad, inner) = flash_weights(shape, scale, parts)
        assert tuple(sums.shape) == tuple(given.shape) == shape.statistic_shape
        weights = weights * (largest - given[..., :1]).exp() / sums[..., :1]
        of_scores = weights * (grad.float() @ parts[2].float().mT - inner[..., :1])
        q, k = (scaled(x.float(), round(scale**-2)) for x in parts[:2])
        if computes == "query gradient":
            return [(of_scores @ k).to(shape.dtype)]
        return [(x.mT @ y).to(shape.dtype) for x, y in ((of_scores, q), (weights, grad.float()))]

    return forward if computes.startswith("output") else backward


if __name__ == "__main__":
    hinders = resolve_xla._hinders_kernels
    resolve_xla._hinders_kernels = lambda config, sizes, generation: hinders(config, sizes, 5)
    whole.kernel = lambda s, backward: (whole_backward if backward else whole_forward)(s)
    flash.kernel = flash_kernel
    sys.exit(run_vit_training.main(sys.argv[1:]))
