"""run_vit_training.py on virtual CPU devices, with plain products in the place of TPU kernels.

What is tested is all around the kernels: which part of which tensor each device gives them, and
what becomes of the results. Each stand-in checks the sizes that a kernel is made for.
"""

import sys

import torch

import run_vit_training
from tpu_attention import flash, whole
from tpu_attention.choice import resolve_attention
from tpu_attention.kernels import DEFAULT_VECTOR_MEMORY
from xla_fsdp import resolve_xla
from xla_fsdp.attention.kernel_calls import Shards


def of_whole(sizes, parts):
    """Queries, keys and values, (images, heads, tokens, width), of what the kernels are given, and
    the angles of their rotation, and which keys a query attends to, or None."""
    assert [tuple(part.shape) for part in parts[:3]] == [sizes.input_shape] * 3
    q, k, v = parts[0].chunk(3, -1) if sizes.packed else parts[:3]
    parts, angles, seen = list(parts), None, None
    windows = parts.pop() if sizes.windows else None
    if sizes.segmented:
        seen = same_segment(*parts[-2:], sizes.segments)[..., : sizes.tokens, : sizes.tokens]
        del parts[-2:]
    if windows is not None:
        seen = seen & in_windows(sizes, windows, parts[0])
    if sizes.apart:
        angles = parts[-1]
        q, k = (rotated(sizes, each.float(), angles) for each in (q, k))
    return *(apart(sizes, each) for each in (q, k, v)), angles, seen


def same_segment(queries, keys, shape):
    """Which keys a query attends to, (images, 1, queries, keys), by their segments."""
    assert tuple(queries.shape) == tuple(keys.shape) == shape
    assert queries.dtype == keys.dtype == torch.int32
    return queries[..., None] == keys[:, :, None, :]


def in_windows(sizes, windows, q):
    """Which keys are in the windows of queries, (images, 1, queries, keys). Without a constant, see
    ``scaled``."""
    assert tuple(windows.shape) == sizes.window_shape
    assert windows.dtype == torch.int32
    ones = (q - q)[..., 0].exp()
    places = (ones.cumsum(1) - ones)[:, None]
    keys, start = windows.unflatten(1, (-1, 2))[..., None].unbind(2)
    inside = (places >= start) & (places < start + keys)
    return inside.repeat_interleave(sizes.queries, 1)[:, None, : sizes.tokens]


def softmax(scores, seen):
    """Without a constant, see ``scaled``."""
    if seen is None:
        return scores.softmax(-1)
    weights = (scores - scores.amax(-1, keepdim=True)).exp() * seen.to(scores.dtype)
    return weights / weights.sum(-1, keepdim=True)


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


def scaled(q, width, unpadded=None):
    """Without a constant: XLA for CPUs moves those out of loops, and then fails."""
    assert q.shape[-1] == width
    return q * (q - q)[..., :unpadded].exp().sum(-1, keepdim=True).rsqrt()


def whole_forward(sizes):
    def call(parts):
        q, k, v, _, seen = of_whole(sizes, parts)
        weights = softmax(scaled(q, sizes.width) @ k.mT, seen)
        return [together(weights @ v, sizes.dtype)]

    return call


def whole_backward(sizes):
    def call(parts):
        q, k, v, angles, seen = of_whole(sizes, parts)
        assert tuple(parts[3].shape) == sizes.shape
        grad, q = apart(sizes, parts[3]), scaled(q, sizes.width)
        weights = softmax(q @ k.mT, seen)
        inner = ((weights @ v) * grad).sum(-1, keepdim=True)
        of_scores = weights * (grad @ v.mT - inner)
        grads = (of_scores @ scaled(k, sizes.width), of_scores.mT @ q, weights.mT @ grad)
        found = [together(each, torch.float32) for each in grads]
        if sizes.apart:
            found[:2] = [rotated(sizes, each, angles, back=True) for each in found[:2]]
        found = [each.to(sizes.dtype) for each in found]
        return [torch.cat(found, -1) if sizes.packed else torch.stack(found)]

    return call


def of_flash(sizes, parts):
    """Queries, keys and values, (images, heads, tokens, width), and 1 for keys that a query attends
    to."""
    shapes = [sizes.shape, sizes.key_shape, sizes.key_shape]
    assert [tuple(part.shape) for part in parts[:3]] == shapes
    seen = (parts[0][:, None, :1, :1] * 0 + 1).float()
    if sizes.segmented:
        both = same_segment(parts[4], parts[3], sizes.mask_shape)
        seen = both[:, :, : sizes.tokens, : sizes.keys].float()
    elif sizes.masked:
        assert tuple(parts[3].shape) == sizes.mask_shape
        seen = (parts[3][:, None, :, : sizes.keys] > 0).float()
    return *(apart(sizes, part) for part in parts[:3]), seen


def flash_forward(sizes):
    def call(parts):
        q, k, v, seen = of_flash(sizes, parts)
        scores = scaled(q, sizes.width, round(sizes.scale**-2)) @ k.mT
        largest = scores.amax(-1, keepdim=True)
        weights = (scores - largest).exp() * seen
        sums = weights.sum(-1, keepdim=True)
        statistics = (largest + sums.log())[..., 0]
        output = together(weights / sums @ v, sizes.dtype)
        return [output, statistics.reshape(sizes.statistic_shape)]

    return call


def flash_backward(sizes):
    def call(parts):
        q, k, v, seen = of_flash(sizes, parts)
        *rows, grad = parts[3 + sizes.masked + sizes.segmented :]
        assert [tuple(row.shape) for row in rows] == [sizes.statistic_shape] * 2
        statistics, inner = (row.flatten(1, 2)[..., None] for row in rows)
        grad, width = apart(sizes, grad), round(sizes.scale**-2)
        q = scaled(q, sizes.width, width)
        weights = (q @ k.mT - statistics).exp() * seen
        of_scores = weights * (grad @ v.mT - inner)
        of_keys = (of_scores.mT @ q, weights.mT @ grad)
        found = [of_scores @ scaled(k, sizes.width, width), *of_keys]
        of_queries, *of_keys = (together(each, sizes.dtype) for each in found)
        assert sizes.spans == 1
        return [of_queries, *(each.unsqueeze(1) for each in of_keys)]

    return call


def called(shards, kernel, sizes, parts, *, backward):
    return kernel(sizes, backward=backward)(parts)


def install():
    whole.kernel = lambda s, backward: (whole_backward if backward else whole_forward)(s)
    flash.kernel = lambda s, backward: (flash_backward if backward else flash_forward)(s)
    Shards.call = called
    resolve_xla.resolve_attention = lambda sharding, model, largest, _: resolve_attention(
        sharding, model, largest, DEFAULT_VECTOR_MEMORY
    )


if __name__ == "__main__":
    install()
    sys.exit(run_vit_training.main(sys.argv[1:]))
