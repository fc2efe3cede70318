"""Which images, and which rows of them, each process loads: alone, or for those it shares with."""

from __future__ import annotations

import functools
import math
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from data.loader import BadImage, Batch, BatchLoader, Share
from models.blocks import attentions, use_product
from models.timm_private import has_own_queries
from training.mesh import Mesh
from training.resolve import Run

# ------------------------------------------------------------------------------------------------
# The processes that share an image, and what they tell each other: with gradients.


@dataclass(frozen=True)
class DomainGroup:
    """The processes that hold the rows of the same images, of which this is number ``index``.

    In each of them a loss of the same value is computed, and gradients are those of the sum of
    these losses: what is passed forward to all is added up from all on the way back.
    """

    group: dist.ProcessGroup
    index: int
    patches: tuple[int, ...]
    """How many patches of each image each of them has."""

    @property
    def size(self) -> int:
        return len(self.patches)

    def patches_after(self, steps: int) -> int:
        """Return how many patches the process has that is ``steps`` places before this one."""
        return self.patches[(self.index - steps) % self.size]

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        """Return the sum over all of them."""
        return _Sum.apply(x, self.group)

    def largest(self, x: torch.Tensor) -> torch.Tensor:
        """Return the maximum over all of them, of each number."""
        return _Largest.apply(x, self.group)

    def exchange(
        self, parts: Sequence[torch.Tensor], shapes: Sequence[Sequence[int]]
    ) -> list[torch.Tensor]:
        """Give each of them one of ``parts``; return what each gives, of these shapes."""
        return list(_Exchange.apply(self.group, [tuple(shape) for shape in shapes], *parts))

    def pass_on(self, x: torch.Tensor, shape: Sequence[int]) -> Callable[[], torch.Tensor]:
        """Begin to give ``x`` to the next one; return what waits for what the one before gives.

        That has the shape ``shape``. It has no gradient.
        """
        given, taken = x.contiguous(), x.new_empty(tuple(shape))
        after = dist.get_global_rank(self.group, (self.index + 1) % self.size)
        before = dist.get_global_rank(self.group, (self.index - 1) % self.size)
        works = dist.batch_isend_irecv(
            [
                dist.P2POp(dist.isend, given, after, self.group),
                dist.P2POp(dist.irecv, taken, before, self.group),
            ]
        )
        return functools.partial(_arrived, works, taken, given)


def _arrived(works: list[dist.Work], taken: torch.Tensor, _given: torch.Tensor) -> torch.Tensor:
    """Wait for what is taken; what is given is held until it is sent."""
    for work in works:
        work.wait()
    return taken


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        return _all_reduced(x, group)

    @staticmethod
    def backward(ctx, grad: torch.Tensor):
        return _all_reduced(grad, ctx.group), None


class _Largest(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        largest = _all_reduced(x, group, dist.ReduceOp.MAX)
        ctx.group = group
        ctx.save_for_backward(x == largest)
        return largest

    @staticmethod
    def backward(ctx, grad: torch.Tensor):
        (here,) = ctx.saved_tensors
        here = here.to(grad.dtype)
        equal = _all_reduced(here, ctx.group)  # divided among equals, as amax does
        return _all_reduced(grad, ctx.group) * here / equal, None


def _all_reduced(
    x: torch.Tensor, group: dist.ProcessGroup, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM
) -> torch.Tensor:
    total = x.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total, op=op, group=group)
    return total


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx, group: dist.ProcessGroup, shapes: list[tuple[int, ...]], *parts):
        ctx.group, ctx.given = group, [tuple(part.shape) for part in parts]
        return exchanged(parts, shapes, group)

    @staticmethod
    def backward(ctx, *grads: torch.Tensor):
        return None, None, *exchanged(grads, ctx.given, ctx.group)


def exchanged(
    parts: Sequence[torch.Tensor], shapes: Sequence[tuple[int, ...]], group: dist.ProcessGroup
) -> tuple[torch.Tensor, ...]:
    """Give each process of ``group`` one of ``parts``; return what each gives, of these shapes."""
    given = torch.cat([part.reshape(-1) for part in parts])
    sizes = [math.prod(shape) for shape in shapes]
    taken = given.new_empty(sum(sizes))
    dist.all_to_all_single(taken, given, sizes, [part.numel() for part in parts], group=group)
    return tuple(part.view(shape) for part, shape in zip(taken.split(sizes), shapes, strict=True))


# ------------------------------------------------------------------------------------------------
# Attention to a part of the keys, with what is needed to put such parts together.
#
# ``forward`` gives each query's output over these keys alone, and the logarithm of its sum of
# exponentials; ``backward`` is given that of all keys, and then gives these keys' share of the
# gradients (Dao, FlashAttention-2, arXiv 2307.08691, section 3.1). Both take PyTorch's own flash
# kernels where there are any for the device, else plain products of a few queries at a time.


_aten: Any = torch.ops.aten
_WIDEST_HEAD = 256
"""PyTorch's flash kernels on CUDA take heads up to this width, multiples of 8."""
_WIDTH_MULTIPLE = 8
_QUERIES = 1024
"""How many queries' scores the plain products hold at a time."""

Tensors3 = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return softmax(scale q k') v and, in fp32, log(sum(exp(scale q k'))).

    Queries, keys and values are (batch, heads, tokens, width), statistics (batch, heads, tokens).
    """
    if _on_cpu(q, v):
        return _aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, scale=scale)
    if _on_cuda(q, v):
        output, statistics, *_ = _aten._scaled_dot_product_flash_attention(q, k, v, scale=scale)
        return output, statistics
    outputs, statistics = [], []
    for part in q.split(_QUERIES, dim=2):
        scores = _scores(part, k, scale)
        total = scores.logsumexp(-1)
        outputs.append((scores - total[..., None]).exp_().to(v.dtype) @ v)
        statistics.append(total)
    return torch.cat(outputs, dim=2), torch.cat(statistics, dim=2)


def backward(
    grad: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    output: torch.Tensor,
    statistics: torch.Tensor,
    scale: float,
) -> Tensors3:
    """Return what these keys contribute to the gradients of q, k and v.

    ``output`` and ``statistics`` are over all keys, ``grad`` is the gradient of ``output``.
    """
    if _on_cpu(q, v):
        return _aten._scaled_dot_product_flash_attention_for_cpu_backward(
            grad, q, k, v, output, statistics, 0.0, False, scale=scale
        )
    if _on_cuda(q, v):
        none = torch.empty((), dtype=torch.int64, device=q.device)  # nothing is drawn at random
        return _aten._scaled_dot_product_flash_attention_backward(
            *(grad, q, k, v, output, statistics, None, None, q.shape[2], k.shape[2]),
            *(0.0, False, none, none),
            scale=scale,
        )
    grad_k, grad_v, grads_q = torch.zeros_like(k), torch.zeros_like(v), []
    whole = (each.split(_QUERIES, dim=2) for each in (grad, q, output, statistics))
    for grad_part, part, output_part, total in zip(*whole, strict=True):
        weights = (_scores(part, k, scale) - total[..., None]).exp_()
        grad_v += weights.to(v.dtype).mT @ grad_part
        inner = (grad_part.float() * output_part.float()).sum(-1, keepdim=True)
        grad_scores = weights * ((grad_part @ v.mT).float() - inner) * scale
        grad_scores = grad_scores.to(q.dtype)
        grads_q.append(grad_scores @ k)
        grad_k += grad_scores.mT @ part
    return torch.cat(grads_q, dim=2), grad_k, grad_v


def padded(width: int, where: torch.Tensor) -> int:
    """Return the width that heads must be padded to, with zeros, for the kernels of ``where``."""
    return -(-width // _WIDTH_MULTIPLE) * _WIDTH_MULTIPLE if where.is_cuda else width


def _scores(q: torch.Tensor, k: torch.Tensor, scale: float) -> torch.Tensor:
    return (q @ k.mT).float() * scale


def _on_cpu(q: torch.Tensor, v: torch.Tensor) -> bool:
    return q.device.type == "cpu" and q.shape[-1] == v.shape[-1]


def _on_cuda(q: torch.Tensor, v: torch.Tensor) -> bool:
    halves = q.dtype in (torch.bfloat16, torch.float16)
    return q.is_cuda and halves and q.shape[-1] == v.shape[-1] <= _WIDEST_HEAD


# ------------------------------------------------------------------------------------------------
# Ring attention: keys and values go from process to process while each one's queries stay.
#
# A process holds its own keys and values and those of one other, whatever the size of the image
# (Liu, Zaharia, Abbeel, arXiv 2310.01889). What comes next is on its way while attention to what is
# here is computed.


def ring_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, prefix: int, scale: float, group: DomainGroup
) -> torch.Tensor:
    """Compute attention of the queries that are here to the keys of all processes of ``group``.

    Each tensor is (batch, heads, tokens, width); the first ``prefix`` keys are those of class and
    register tokens, the same in all processes: each uses its own.
    """
    width = v.shape[-1]
    pad = padded(max(q.shape[-1], width), v)
    if pad > q.shape[-1] == width:
        q, k, v = (torch.nn.functional.pad(x, (0, pad - x.shape[-1])) for x in (q, k, v))
    return _Ring.apply(q, k, v, prefix, scale, group)[..., :width]


class _Ring(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, prefix: int, scale: float, group: DomainGroup):
        here, output, statistics = _joined(k, v, prefix), None, None
        for step in range(group.size):
            coming = _pass_on(here, step, group)
            keys, values = (k, v) if step == 0 else _apart(here, k)
            found, total = forward(q, keys, values, scale)
            found = found.float()
            if output is None or statistics is None:
                output, statistics = found, total
            else:
                together = torch.logaddexp(statistics, total)
                output = output * (statistics - together).exp()[..., None]
                output += found * (total - together).exp()[..., None]
                statistics = together
            if coming is not None:
                here = coming()
        assert output is not None
        output = output.to(v.dtype)
        ctx.save_for_backward(q, k, v, output, statistics)
        ctx.prefix, ctx.scale, ctx.group = prefix, scale, group
        return output

    @staticmethod
    def backward(ctx, grad):
        q, k, v, output, statistics = ctx.saved_tensors
        group, prefix = ctx.group, ctx.prefix
        grad, here = grad.contiguous(), _joined(k, v, prefix)
        grad_q, so_far = torch.zeros_like(q, dtype=torch.float32), None
        of_prefix: tuple[torch.Tensor, torch.Tensor] = (k[:, :, :0], v[:, :, :0])
        for step in range(group.size):
            coming = _pass_on(here, step, group)
            keys, values = (k, v) if step == 0 else _apart(here, k)
            own_q, own_k, own_v = backward(grad, q, keys, values, output, statistics, ctx.scale)
            grad_q += own_q
            if step == 0:
                of_prefix = own_k[:, :, :prefix], own_v[:, :, :prefix]
            own = _joined(own_k, own_v, prefix if step == 0 else 0).float()
            if so_far is not None:  # what the processes before have found for these keys
                own += so_far()
            # One step behind the keys that it is for: with the last, it comes home.
            so_far = group.pass_on(own, _shape_after(own, step + 1, group))
            if coming is not None:
                here = coming()
        assert so_far is not None
        grad_k, grad_v = _apart(so_far(), k)
        grad_k = torch.cat([of_prefix[0], grad_k.to(k.dtype)], dim=2)
        grad_v = torch.cat([of_prefix[1], grad_v.to(v.dtype)], dim=2)
        return grad_q.to(q.dtype), grad_k, grad_v, None, None, None


def _joined(k: torch.Tensor, v: torch.Tensor, prefix: int) -> torch.Tensor:
    """Return keys and values of the patches in one tensor, to be passed on together."""
    return torch.cat([k[:, :, prefix:], v[:, :, prefix:]], dim=-1)


def _apart(joined: torch.Tensor, k: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    width = k.shape[-1]
    return joined[..., :width].contiguous(), joined[..., width:].contiguous()


def _pass_on(here: torch.Tensor, step: int, group: DomainGroup):
    """Begin to pass keys and values on, if this is not the last step."""
    if step + 1 == group.size:
        return None
    return group.pass_on(here, _shape_after(here, step + 1, group))


def _shape_after(x: torch.Tensor, steps: int, group: DomainGroup) -> tuple[int, ...]:
    """Return the shape of what comes in the place of ``x`` from that many processes before."""
    batch, heads, _, width = x.shape
    return batch, heads, group.patches_after(steps), width


# ------------------------------------------------------------------------------------------------
# Attention by exchanging tokens for heads: each process takes some heads of all tokens.
#
# Two exchanges a call in the place of a ring's many, and PyTorch's attention as it is on whole
# sequences (DeepSpeed Ulysses, arXiv 2309.14509). The processes must divide the heads.


def ulysses_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    prefix: tuple[int, int],
    scale: float,
    group: DomainGroup,
) -> torch.Tensor:
    """Compute attention of the queries that are here to the keys of all processes of ``group``.

    Each tensor is (batch, heads, tokens, width). ``prefix``: how many of the queries, and of the
    keys, come first that are the same in all processes.
    """
    first, before = prefix
    each = k.shape[1] // group.size
    mine = slice(group.index * each, (group.index + 1) * each)
    widths = [q.shape[-1], k.shape[-1], v.shape[-1]]
    patches = [k[:, :, before:], v[:, :, before:]]
    if first < q.shape[2]:
        patches.insert(0, q[:, :, first:])
    else:
        del widths[0]  # there are learned queries only
    whole = _heads_of_all(torch.cat(patches, dim=-1), each, group).split(widths, dim=-1)
    *queries, keys, values = whole
    keys = torch.cat([k[:, mine, :before], keys], dim=2)
    values = torch.cat([v[:, mine, :before], values], dim=2)
    asked = torch.cat([q[:, mine, :first], *queries], dim=2)
    found = F.scaled_dot_product_attention(asked, keys, values, scale=scale)
    output = []
    if first:
        part = found[:, :, :first]
        parts = group.exchange([part] * group.size, [part.shape] * group.size)
        output.append(torch.cat(parts, dim=1))
    if queries:
        output.append(_tokens_of_this(found[:, :, first:], group))
    return torch.cat(output, dim=2)


def _heads_of_all(x: torch.Tensor, each: int, group: DomainGroup) -> torch.Tensor:
    """Make of all heads of the tokens here, (batch, heads, tokens, width), some of all tokens."""
    batch, _, _, width = x.shape
    shapes = [(batch, each, count, width) for count in group.patches]
    return torch.cat(group.exchange(x.split(each, dim=1), shapes), dim=2)


def _tokens_of_this(x: torch.Tensor, group: DomainGroup) -> torch.Tensor:
    """Do the inverse of ``_heads_of_all``."""
    batch, each, _, width = x.shape
    shape = (batch, each, group.patches[group.index], width)
    parts = group.exchange(x.split(group.patches, dim=2), [shape] * group.size)
    return torch.cat(parts, dim=1)


# ------------------------------------------------------------------------------------------------
# Lets the attention of a model see the tokens of all processes that share an image.


def attend_over_processes(model: nn.Module, form: str, group: DomainGroup) -> None:
    """Let every attention in ``model``, which is given a part of the tokens, see all of them.

    ``form`` is "ring" or "ulysses".
    """
    for part in attentions(model):
        use_product(part, functools.partial(_over_processes, form, group, has_own_queries(part)))
        # torch.compile knows neither the exchange between processes nor the mode around it.
        part.forward = torch.compiler.disable(part.forward)


def _over_processes(form: str, group: DomainGroup, own_queries: bool, q, k, v) -> torch.Tensor:
    scale, before = q.shape[-1] ** -0.5, k.shape[2] - group.patches[group.index]
    first = q.shape[2] if own_queries else before
    q, k = q.to(v.dtype), k.to(v.dtype)
    if form == "ring":
        return ring_attention(q, k, v, before, scale, group)
    return ulysses_attention(q, k, v, (first, before), scale, group)


# ------------------------------------------------------------------------------------------------
# Images that are decoded by one process of those that share them, and given to each in rows.


@dataclass
class SharedImages:
    """Gives the rows of this process, of whole images that the processes of a group load together.

    The first ``sources`` of them load ``each`` images, the others none: each image is decoded
    once. What they tell each other goes through ``group``, by tensors on the CPU.
    """

    loader: BatchLoader
    group: dist.ProcessGroup
    rows: Sequence[range]
    """The rows of each process."""
    sources: int
    each: int
    """How many images of each batch a source loads."""
    prefetch_depth: int = 0
    """None: threads that are ahead of the step would end at different batches, and wait for ever.
    Workers decode ahead all the same."""

    @property
    def workers(self) -> int:
        return self.loader.workers

    def __len__(self) -> int:
        return len(self.loader)

    def bad_images(self) -> list[BadImage]:
        return self.loader.bad_images()

    def epoch(self, epoch: int, first_batch: int = 0) -> Iterator[Batch]:
        for images, labels in self.loader.epoch(epoch, first_batch):
            yield self._rows_of(images), self._all_of(labels)

    def _rows_of(self, images: torch.Tensor) -> torch.Tensor:
        given = [images[:, :, rows.start : rows.stop] for rows in self.rows]
        mine = len(self.rows[dist.get_rank(self.group)])
        return self._exchanged(given, (images.shape[1], mine, *images.shape[3:]))

    def _all_of(self, labels: torch.Tensor) -> torch.Tensor:
        return self._exchanged([labels] * len(self.rows), ())

    def _exchanged(self, given: Sequence[torch.Tensor], shape: Sequence[int]) -> torch.Tensor:
        """Give each process its part; return those of all that load, of ``shape`` each image."""
        others = len(self.rows) - self.sources
        shapes = [(self.each, *shape)] * self.sources + [(0, *shape)] * others
        return torch.cat(exchanged(given, shapes, self.group)[: self.sources])


def domain_group(run: Run[Any], group: dist.ProcessGroup) -> DomainGroup:
    """Return ``group``, which is that of the processes that share an image with this one."""
    mesh, sizes = run.mesh, run.model.sizes
    places, index = places_of_part(mesh, dist.get_rank())
    patches = (len(mesh.rows_of(sizes.grid[0], p)) * sizes.row_patches for p in places)
    return DomainGroup(group, index, tuple(patches))


def image_rows(run: Run[Any], place: int) -> range:
    """Return which rows of each image the process at this place of the mesh has."""
    sizes = run.model.sizes
    patch = sizes.input_shape[1] // sizes.grid[0]
    rows = run.mesh.rows_of(sizes.grid[0], place)
    return range(rows.start * patch, rows.stop * patch)


def places_of_part(mesh: Mesh, here: int) -> tuple[range, int]:
    """Return the places in the mesh of those that share images with the one at ``here``, and which
    of them that is."""
    part = mesh.batch_part(here)
    places = range(part * mesh.domain, (part + 1) * mesh.domain)
    return places, here - places.start


def open_loader(
    run: Run[Any], open_share: Callable[[Share], BatchLoader], images: int, *, reads_rows: bool
) -> BatchLoader:
    """Open this process's loader, as ``training.backend.Backend.loader`` says."""
    mesh, here = run.mesh, dist.get_rank()
    part, of_host = mesh.batch_part(here), int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    if mesh.domain == 1:
        return open_share(Share(part, mesh.batch_parts, of_host=of_host))
    if reads_rows:
        return open_share(Share(part, mesh.batch_parts, image_rows(run, here), of_host=of_host))
    of_part = images // mesh.batch_parts
    sources = math.gcd(mesh.domain, of_part)
    places, index = places_of_part(mesh, here)
    share = Share(
        part * sources + min(index, sources - 1),
        mesh.batch_parts * sources,
        loads=index < sources,
        of_host=of_host,
    )
    rows = [image_rows(run, place) for place in places]
    group, each = _group_of_hosts(mesh), of_part // sources
    return SharedImages(open_share(share), group, rows, sources, each)


def _group_of_hosts(mesh: Mesh) -> dist.ProcessGroup:
    """Make a new group of those that share images, for tensors on the CPU."""
    ranks = torch.arange(mesh.devices).view(-1, mesh.domain).tolist()
    group, _ = dist.new_subgroups_by_enumeration(ranks, backend="gloo")
    return group
