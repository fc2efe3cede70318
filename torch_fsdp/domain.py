"""Domain parallelism over processes: each has some rows of an image and their tokens.

Attention must see the tokens of all processes that share the image (ring or Ulysses attention).
Each process loads only its own rows, or whole images whose rows it sends to the others.

A whole step can be traced (``step_graph.py``): its collectives are functional, and what differs
between processes is no constant of the graph.
"""

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from timm.layers import AttentionPoolLatent
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.fx.experimental.proxy_tensor import get_proxy_mode

from data.batch import BadImage, Batch, Fields
from data.loader import BatchLoader
from models.blocks import Product, attentions, combine_parts, use_product
from models.positions import TokenPart
from torch_fsdp import torch_tpu_private
from torch_fsdp.attention import TpuCalls, product_of
from torch_fsdp.devices import Device
from torch_fsdp.parallel_plan import OUTER, SHARD, TorchPlan, TorchRun
from tpu_attention.flash import FlashProducts
from tpu_attention.kernels import Calls
from training.resolve import Run

DOMAIN = "domain"
"""The mesh axis that shards the rows of an image."""
_c10d = torch.ops._c10d_functional

# ------------------------------------------------------------------------------------------------
# The processes that share an image, and their collectives, which pass gradients back.


@dataclass(frozen=True)
class DomainGroup:
    """The processes that hold the rows of the same images, of which this is number ``index``.

    Each of them computes a loss of the same value, and gradients are those of the sum of these
    losses: what a collective passes forward to all is summed over all on the way back.
    """

    group: dist.ProcessGroup
    index: int
    patches: tuple[int, ...]
    """How many patches of each image each of them has."""
    rings: tuple[int, ...]
    """The ranks of all such groups, one after the other."""

    @classmethod
    def of(cls, mesh: DeviceMesh, run: TorchRun) -> "DomainGroup":
        """Return this process's group along the axis DOMAIN, the last one of ``mesh``."""
        rows, *other_sides = run.model.sizes.grid
        counts = (len(run.mesh.rows_of(rows, place)) for place in range(run.mesh.domain))
        return cls(
            mesh.get_group(DOMAIN),
            index=mesh.get_local_rank(DOMAIN),
            patches=tuple(count * math.prod(other_sides) for count in counts),
            rings=tuple(mesh.mesh.flatten().tolist()),
        )

    @property
    def size(self) -> int:
        return len(self.patches)

    @property
    def first(self) -> int:
        """The number of the first patch that this process has."""
        return sum(self.patches[: self.index])

    def rotate(self, x: Tensor, step: int) -> Callable[[], Tensor]:
        """Start to send ``x``, (batch, heads, patches, width), to the next process.

        Returns a function that waits for what the process before sends: what belongs, in a ring's
        ``step``, to the one ``step`` places before this one. It has no gradient.
        """
        if get_proxy_mode() is not None:
            received = torch.ops.vit.rotate(x.contiguous(), self.rings, self.size)
            return lambda: received
        batch, heads, _, width = x.shape
        patches = self.patches[(self.index - step) % self.size]
        sent, received = x.contiguous(), x.new_empty(batch, heads, patches, width)
        after = dist.get_global_rank(self.group, (self.index + 1) % self.size)
        before = dist.get_global_rank(self.group, (self.index - 1) % self.size)
        send = dist.P2POp(dist.isend, sent, after, self.group)
        receive = dist.P2POp(dist.irecv, received, before, self.group)
        works = dist.batch_isend_irecv([send, receive])

        def wait(_sent: Tensor = sent) -> Tensor:  # which must live until then
            for work in works:
                work.wait()
            return received

        return wait


def make_meshes(run: TorchRun, device: Device) -> tuple[DeviceMesh, DeviceMesh, DomainGroup | None]:
    """Return the mesh (OUTER, SHARD) of parameters, that of images, and this process's group; a
    collective call.

    Processes that share an image also shard parameters: the axis SHARD has them, and those of
    tensor parallelism. The mesh of images has an axis DOMAIN for them, if there are any, else it is
    the same. Parts of the batch may be assigned to processes in any order, but those that share
    images have consecutive ranks.
    """
    mesh = run.mesh
    shape = (mesh.dcn, mesh.devices // mesh.dcn) if run.plan.zero else (mesh.devices, 1)
    in_order = torch.arange(mesh.devices).view(shape)
    ranks = device.arrange(shape) if mesh.fsdp * mesh.dcn == mesh.devices else in_order
    of_parameters = device.mesh(ranks, (OUTER, SHARD))
    if mesh.domain == 1:
        return of_parameters, of_parameters, None
    by_image = in_order.view(mesh.dcn, mesh.fsdp, mesh.domain)
    of_images = device.mesh(by_image, (OUTER, SHARD, DOMAIN))
    return of_parameters, of_images, DomainGroup.of(of_images, run)


@torch.library.custom_op("vit::rotate", mutates_args=())
def rotate(x: Tensor, rings: Sequence[int], size: int) -> Tensor:
    """Send ``x`` to the next process of a ring of ``size``, and return what the one before sends;
    ``rings`` are the ranks of all of them, one after the other. So it is the same call in all
    processes, which the send and the receive are not."""
    pairs = [(rank, rings[i - i % size + (i + 1) % size]) for i, rank in enumerate(rings)]
    if x.device.type == "tpu":
        return torch_tpu_private.collective_permute(x, pairs)
    rank, received = dist.get_rank(), torch.empty_like(x)
    ((_, after),), ((before, _),) = (
        [pair for pair in pairs if pair[end] == rank] for end in (0, 1)
    )
    send, receive = dist.P2POp(dist.isend, x, after), dist.P2POp(dist.irecv, received, before)
    for work in dist.batch_isend_irecv([send, receive]):
        work.wait()
    return received


@rotate.register_fake
def _(x: Tensor, rings: Sequence[int], size: int) -> Tensor:
    return torch.empty_like(x)


# PyTorch's own collectives with gradients, torch.distributed.nn.functional, are deprecated in 2.14,
# for names that are private.


def _reduced(x: Tensor, group: dist.ProcessGroup, op: str = "sum") -> Tensor:
    return _c10d.wait_tensor(_c10d.all_reduce(x.contiguous(), op, group.group_name))


class SumOver(torch.autograd.Function):
    """The sum of a tensor over the processes of a group."""

    @staticmethod
    def forward(ctx, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return _reduced(x, group)

    @staticmethod
    def backward(ctx, grad: Tensor):
        return _reduced(grad, ctx.group), None


class LargestOver(torch.autograd.Function):
    """The element-wise maximum of a tensor over the processes of a group."""

    @staticmethod
    def forward(ctx, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        largest = _reduced(x, group, "max")
        ctx.group = group
        ctx.save_for_backward(x == largest)
        return largest

    @staticmethod
    def backward(ctx, grad: Tensor):
        is_largest = ctx.saved_tensors[0].to(grad.dtype)
        equal = _reduced(is_largest, ctx.group)  # divided among equals, as amax does
        return _reduced(grad, ctx.group) * is_largest / equal, None


class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx, sent: Tensor, sizes: list[int], received_sizes: list[int], group: dist.ProcessGroup
    ) -> Tensor:
        ctx.sizes, ctx.received_sizes, ctx.group = sizes, received_sizes, group
        name = group.group_name
        return _c10d.wait_tensor(_c10d.all_to_all_single(sent, received_sizes, sizes, name))

    @staticmethod
    def backward(ctx, grad: Tensor):
        back = _AllToAll.apply(grad.contiguous(), ctx.received_sizes, ctx.sizes, ctx.group)
        return back, None, None, None


def all_to_all(
    parts: Tensor | Sequence[Tensor], shapes: Sequence[Sequence[int]], group: dist.ProcessGroup
) -> list[Tensor]:
    """Send one of ``parts``, which may be one tensor, to each process of ``group``; return what
    each sends, of ``shapes``."""
    given = [parts.shape[1:]] if isinstance(parts, Tensor) else [part.shape for part in parts]
    if len({tuple(shape) for shape in (*shapes, *given)}) == 1:
        ones = [1] * len(parts)  # as they are: a TPU would lay them out anew to flatten them
        stacked = parts if isinstance(parts, Tensor) else torch.stack(list(parts))
        return list(_AllToAll.apply(stacked, ones, ones, group).unbind())
    sent = torch.cat([part.reshape(-1) for part in parts])
    sizes = [math.prod(shape) for shape in shapes]
    received = _AllToAll.apply(sent, [part.numel() for part in parts], sizes, group)
    split = received.split(sizes)
    return [part.view(tuple(shape)) for part, shape in zip(split, shapes, strict=True)]


# ------------------------------------------------------------------------------------------------
# Attention to a part of the keys, and the statistics by which such parts are combined.
#
# ``attend`` returns each query's output over these keys alone, and the logarithm of its sum of
# exponentials. ``attend_backward`` is given that of all keys, and returns these keys' share of the
# gradients (Dao, FlashAttention-2, arXiv 2307.08691, section 3.1). Both use PyTorch's own flash
# kernels where the device has them, else plain products of some queries at a time; ``PartProducts``
# are these two, or the same by the kernels of ``tpu_attention``.

_aten: Any = torch.ops.aten
_WIDEST_HEAD = 256
"""Largest head width of PyTorch's flash kernels on CUDA, which must be a multiple of 8."""
_WIDTH_MULTIPLE = 8
_QUERIES = 1024
"""How many queries' scores the plain products hold at a time."""


def attend(q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Return softmax(scale q k') v and, in fp32, log(sum(exp(scale q k'))).

    Queries, keys and values are (batch, heads, tokens, width), statistics (batch, heads, tokens).
    """
    kernels = _kernels(q, v)
    if kernels == "cpu":
        return _aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, scale=scale)
    if kernels == "cuda":
        output, statistics, *_ = _aten._scaled_dot_product_flash_attention(q, k, v, scale=scale)
        return output, statistics
    outputs, statistics = [], []
    for part in q.split(_QUERIES, dim=2):
        scores = (part @ k.mT).float() * scale
        total = scores.logsumexp(-1)
        outputs.append((scores - total[..., None]).exp_().to(v.dtype) @ v)
        statistics.append(total)
    return torch.cat(outputs, dim=2), torch.cat(statistics, dim=2)


def attend_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, output: Tensor, statistics: Tensor, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Return these keys' share of the gradient of q, and the gradients of k and v.

    ``output`` and ``statistics`` are over all keys, ``grad`` is the gradient of ``output``.
    """
    kernels = _kernels(q, v)
    if kernels == "cpu":
        return _aten._scaled_dot_product_flash_attention_for_cpu_backward(
            grad, q, k, v, output, statistics, 0.0, False, scale=scale
        )
    if kernels == "cuda":
        none = torch.empty((), dtype=torch.int64, device=q.device)  # nothing is drawn at random
        return _aten._scaled_dot_product_flash_attention_backward(
            *(grad, q, k, v, output, statistics, None, None, q.shape[2], k.shape[2]),
            *(0.0, False, none, none),
            scale=scale,
        )
    grad_k, grad_v, grads_q = torch.zeros_like(k), torch.zeros_like(v), []
    parts = (tensor.split(_QUERIES, dim=2) for tensor in (grad, q, output, statistics))
    for grad_part, q_part, output_part, total in zip(*parts, strict=True):
        weights = ((q_part @ k.mT).float() * scale - total[..., None]).exp_()
        grad_v += weights.to(v.dtype).mT @ grad_part
        inner = (grad_part.float() * output_part.float()).sum(-1, keepdim=True)
        grad_scores = weights * ((grad_part @ v.mT).float() - inner) * scale
        grad_scores = grad_scores.to(q.dtype)
        grads_q.append(grad_scores @ k)
        grad_k += grad_scores.mT @ q_part
    return torch.cat(grads_q, dim=2), grad_k, grad_v


@dataclass(frozen=True)
class PartProducts:
    """What computes attention to a part of the keys, and its gradients, as the functions here."""

    attend: Callable[..., tuple[Tensor, Tensor]] = attend
    backward: Callable[..., Sequence[Tensor]] = attend_backward

    @classmethod
    def by_flash(cls, calls: Calls) -> "PartProducts":
        """Return those by the kernels of ``--attention flash``."""
        flash = FlashProducts(calls)

        def attend(q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor]:
            return flash.forward(q, k, v, None, scale)

        def backward(grad, q, k, v, output, statistics, scale: float) -> Sequence[Tensor]:
            inner = (output.float() * grad.float()).sum(-1)
            return flash.backward(q, k, v, statistics, grad, inner, None, scale)

        return cls(attend, backward)


def _kernels(q: Tensor, v: Tensor) -> str | None:
    """Return which of PyTorch's flash kernels can be used, "cpu" or "cuda"; None: none."""
    if q.shape[-1] != v.shape[-1]:
        return None
    if q.is_cuda:
        halves = q.dtype in (torch.bfloat16, torch.float16)
        return "cuda" if halves and q.shape[-1] <= _WIDEST_HEAD else None
    return "cpu" if q.device.type == "cpu" else None


# ------------------------------------------------------------------------------------------------
# Ring attention: keys and values go from process to process while each one's queries stay.
#
# A process holds its own keys and values and those of one other, whatever the size of the image
# (Liu, Zaharia, Abbeel, arXiv 2310.01889). The next ones are received while attention to those that
# are here is computed.


def ring_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    prefix: int,
    scale: float,
    group: DomainGroup,
    products: PartProducts | None = None,
) -> Tensor:
    """Compute attention of this process's queries to the keys of all processes of ``group``.

    Each tensor is (batch, heads, tokens, width); the first ``prefix`` keys are those of class and
    register tokens, the same in all processes: each uses its own. ``products``: by default those
    of PyTorch.
    """
    width = v.shape[-1]
    if v.is_cuda and q.shape[-1] == width:  # PyTorch's kernels there are for some widths only
        missing = -width % _WIDTH_MULTIPLE
        q, k, v = (F.pad(x, (0, missing)) if missing else x for x in (q, k, v))
    return _Ring.apply(q, k, v, prefix, scale, group, products or PartProducts())[..., :width]


class _Ring(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx, q, k, v, prefix: int, scale: float, group: DomainGroup, products: PartProducts
    ):
        # Keys and values of the patches are sent in one tensor.
        sent = torch.cat([k[:, :, prefix:], v[:, :, prefix:]], dim=-1)
        keys, values = k, v  # in the first step with the prefix
        output: Any = None
        statistics: Any = None
        for step in range(1, group.size + 1):
            receive = group.rotate(sent, step) if step < group.size else None
            part, total = products.attend(q, keys, values, scale)
            if output is None:
                output, statistics = part.float(), total
            else:
                output, statistics = combine_parts(output, statistics, part.float(), total)
            if receive is not None:
                sent = receive()
                keys, values = _split(sent, k.shape[-1])
        output = output.to(v.dtype)
        ctx.save_for_backward(q, k, v, output, statistics)
        ctx.prefix, ctx.scale, ctx.group, ctx.products = prefix, scale, group, products
        return output

    @staticmethod
    def backward(ctx, grad):
        q, k, v, output, statistics = ctx.saved_tensors
        group, prefix, width = ctx.group, ctx.prefix, k.shape[-1]
        grad = grad.contiguous()
        sent = torch.cat([k[:, :, prefix:], v[:, :, prefix:]], dim=-1)
        keys, values, before = k, v, prefix  # in the first step with the prefix
        grad_q, receive_grads = torch.zeros_like(q, dtype=torch.float32), None
        prefix_grads: list[Tensor] = []
        for step in range(1, group.size + 1):
            receive = group.rotate(sent, step) if step < group.size else None
            part_q, part_k, part_v = ctx.products.backward(
                grad, q, keys, values, output, statistics, ctx.scale
            )
            grad_q += part_q
            if step == 1:
                prefix_grads = [part_k[:, :, :prefix], part_v[:, :, :prefix]]
            grads = torch.cat([part_k[:, :, before:], part_v[:, :, before:]], dim=-1).float()
            if receive_grads is not None:  # what the processes before have computed for these keys
                grads += receive_grads()
            # One step behind the keys that it is for: with the last, it comes home.
            receive_grads = group.rotate(grads, step)
            if receive is not None:
                sent = receive()
                (keys, values), before = _split(sent, width), 0
        assert receive_grads is not None
        grad_k, grad_v = (
            torch.cat([of_prefix, of_patches.to(k.dtype)], dim=2)
            for of_prefix, of_patches in zip(
                prefix_grads, _split(receive_grads(), width), strict=True
            )
        )
        return grad_q.to(q.dtype), grad_k, grad_v, None, None, None, None


def _split(joined: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """Return keys, of this width, and values."""
    return joined[..., :width].contiguous(), joined[..., width:].contiguous()


# ------------------------------------------------------------------------------------------------
# Ulysses attention: an exchange of tokens for heads, so that each process has some heads of all.
#
# Two exchanges a call in the place of a ring's many, and PyTorch's attention on whole sequences
# (DeepSpeed Ulysses, arXiv 2309.14509). The processes must divide the heads.


def ulysses_attention(
    q: Tensor, k: Tensor, v: Tensor, prefix: tuple[int, int], group: DomainGroup, product: Product
) -> Tensor:
    """Compute attention of this process's queries to the keys of all processes of ``group``.

    Each tensor is (batch, heads, tokens, width). ``prefix``: how many of the queries, and of the
    keys, come first that are the same in all processes. ``product`` computes attention of some
    heads of all tokens.
    """
    first, before = prefix
    if first < q.shape[2]:
        queries, keys, values = _some_heads([q, k, v], before, group)
    else:  # learned queries only
        (queries,) = _some_heads([q], first, group)
        keys, values = _some_heads([k, v], before, group)
    attended = product(queries, keys, values).transpose(1, 2)
    here, parts = attended[:, :first], [attended[:, first:]]
    if first < q.shape[2]:
        parts = list(parts[0].split(group.patches, dim=1))
    sent = [torch.cat([here, part], dim=1).flatten(2) for part in parts]
    sent *= group.size // len(sent)
    received = all_to_all(sent, [sent[group.index].shape] * group.size, group.group)
    return torch.cat(received, dim=2).unflatten(2, (q.shape[1], -1)).transpose(1, 2)


def _some_heads(tensors: Sequence[Tensor], prefix: int, group: DomainGroup) -> list[Tensor]:
    """Return this process's heads of all tokens, (batch, heads, tokens, width), of tensors with all
    heads of the tokens here, of which the first ``prefix`` are the same in all processes.

    Those are taken from the first process: then the graph does not depend on which process it is.
    """
    batch, _, tokens, _ = tensors[0].shape
    # (processes, batch, tokens, heads x width), side by side
    columns = [x.unflatten(1, (group.size, -1)).permute(1, 0, 3, 2, 4).flatten(3) for x in tensors]
    widths = [x.shape[-1] for x in columns]
    counts = [count if tokens > prefix else 0 for count in group.patches]
    shapes = [(batch, prefix + count, sum(widths)) for count in counts]
    received = all_to_all(torch.cat(columns, dim=-1), shapes, group.group)
    whole = torch.cat([received[0], *(part[:, prefix:] for part in received[1:])], dim=1)
    return [
        part.unflatten(2, (x.shape[1] // group.size, -1)).transpose(1, 2)
        for part, x in zip(whole.split(widths, dim=-1), tensors, strict=True)
    ]


def attend_over_processes(model: nn.Module, plan: TorchPlan, group: DomainGroup) -> None:
    """Let every attention in ``model``, which is given a part of the tokens, see all of them."""
    ring = plan.domain_attention == "ring"

    def product(own_queries: bool, q, k, v) -> Tensor:
        scale, before = q.shape[-1] ** -0.5, k.shape[2] - group.patches[group.index]
        q, k = q.to(v.dtype), k.to(v.dtype)
        # Kernels are for as many queries as keys.
        form = "sdpa" if own_queries else plan.attention
        if ring:
            parts = PartProducts.by_flash(TpuCalls()) if form == "flash" else None
            return ring_attention(q, k, v, before, scale, group, parts)
        first = q.shape[2] if own_queries else before
        return ulysses_attention(q, k, v, (first, before), group, product_of(form))

    for attention in attentions(model):
        own_queries = isinstance(attention, AttentionPoolLatent)  # instead of the tokens'
        use_product(attention, functools.partial(product, own_queries))
        # torch.compile supports neither the exchange between processes nor the mode around it.
        attention.forward = torch.compiler.disable(attention.forward)


def token_part(group: DomainGroup, first: int | Tensor) -> TokenPart:
    """Return which tokens this process has, for the model; ``first`` as of ``TokenPart``."""
    return TokenPart(
        first=first,
        patches=group.patches[group.index],
        of=sum(group.patches),
        sum=lambda x: SumOver.apply(x, group.group),
        largest=lambda x: LargestOver.apply(x, group.group),
    )


# ------------------------------------------------------------------------------------------------
# Loading: which images, and which rows of them, each process reads and decodes.


def image_rows(run: Run, place: int) -> range:
    """Return which rows of each image the process at this place of the mesh has."""
    sizes = run.model.sizes
    patch = sizes.input_shape[1] // sizes.grid[0]
    rows = run.mesh.rows_of(sizes.grid[0], place)
    return range(rows.start * patch, rows.stop * patch)


@dataclass
class SharedImages:
    """Loads whole images together with the other processes of a group, and yields rows of them.

    The first ``sources`` processes load ``images`` images of a batch, the others none: each image
    is decoded once.
    """

    loader: BatchLoader
    group: dist.ProcessGroup
    rows: Sequence[range]
    """The rows of each process."""
    sources: int
    images: int
    prefetch_depth: int = 0
    """None: threads ahead of the step would end at different batches, and wait for each other for
    ever. Workers decode ahead all the same."""

    @property
    def fields(self) -> Fields:
        return self.loader.fields

    @property
    def workers(self) -> int:
        return self.loader.workers

    def __len__(self) -> int:
        return len(self.loader)

    def bad_images(self) -> list[BadImage]:
        return self.loader.bad_images()

    def epoch(self, epoch: int, first_batch: int = 0) -> Iterator[Batch]:
        own_rows = len(self.rows[dist.get_rank(self.group)])
        for batch in self.loader.epoch(epoch, first_batch):
            exchanged = {}
            for name, tensor in batch.items():
                shape, parts = list(tensor.shape[1:]), [tensor] * len(self.rows)
                if (dimension := self.fields[name].rows) is not None:
                    parts = [
                        tensor.narrow(1 + dimension, rows.start, len(rows)).contiguous()
                        for rows in self.rows
                    ]
                    shape[dimension] = own_rows
                exchanged[name] = self._exchange(parts, shape)
            yield exchanged

    def _exchange(self, parts: Sequence[Tensor], shape: Sequence[int]) -> Tensor:
        """Send each process its part; return those of all sources, of ``shape`` each image."""
        others = len(self.rows) - self.sources
        shapes = [(self.images, *shape)] * self.sources + [(0, *shape)] * others
        return torch.cat(all_to_all(parts, shapes, self.group)[: self.sources])
