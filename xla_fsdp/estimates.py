"""Which ``--grad_ckpt`` auto takes, by the planner's arithmetic: nothing is compiled for it."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from training.config import RunConfig
from training.mesh import Mesh
from training.step_sizes import StepSizes, state_bytes, step_sizes
from xla_fsdp.attention.sizes import LANES, SUBLANES, padded_tokens, padded_width
from xla_fsdp.config import XlaConfig
from xla_fsdp.tpu import Chip

if TYPE_CHECKING:
    from models.spec import ModelSpec


# ------------------------------------------------------------------------------------------------
# Bytes and seconds of a training step on a TPU slice by arithmetic, without the compiler.
#
# It ranks thousands of candidates so that the compiler is asked about a few. What it counts is
# what the TPU compiler does with this program's step: blocks run one after the other, a matrix
# product at a share of the chip's peak and with its sizes padded to the matrix unit, everything
# else at the bandwidth of HBM, and collectives beside it as far as there is work to hide them.
# The shares were fitted on the compiler's figures (docs/planning.md);
# ``tools.plan.tpu_search`` corrects what is left by the figures of the steps that were
# compiled for the same plan.


_FP32 = 4
_FLASH_PACE = 0.6
"""Of flash attention's kernels beside other products: by their instructions (docs/tpu_speed.md)."""
_VMEM = 128 * 2**20
"""Bytes of a core's vector memory: of v5e and v6e, taken for all."""


@dataclass(frozen=True)
class Policy:
    """What of a block's activations one value of ``--grad_ckpt`` keeps for the backward pass."""

    widths: float
    """Values kept for each token, in multiples of the model's width, beside the block's input."""
    hiddens: float
    """The same in multiples of the width inside the MLP."""
    keeps_scores: bool
    """Whether attention's scores are kept, where they are written at all."""
    products: float
    """Share of a block's products, forward, that run once more; but for the last one, whose result
    is not needed."""
    recomputed: float
    """The same of all that goes to and from HBM."""
    on_host: bool = False
    """Whether the block's input is kept in the host's memory."""
    keeps_flash: bool = False
    """Whether what flash attention computes is kept."""


POLICIES = {
    "full": Policy(0, 0, False, 1, 1),
    "selective": Policy(4, 1, False, 0.12, 0.5),
    "offload": Policy(0, 0, False, 1, 1, on_host=True),
    "none": Policy(6, 1, True, 0, 0.5, keeps_flash=True),
}
"""The values of ``--grad_ckpt`` among which a plan and auto choose."""


@dataclass(frozen=True)
class Layout:
    """How a step is divided: over devices, into passes, and by which policy and attention."""

    mesh: Mesh
    batch_size: int
    passes: int
    policy: str
    attention: str
    """The value of ``--attention``."""
    value_bytes: int
    """Of a number that is computed with: 2 in bf16."""
    state_bytes: int
    """Of a parameter and its optimizer state."""

    @property
    def kernels(self) -> bool:
        """Tell whether attention is computed by kernels that write no scores."""
        return self.attention != "sdpa"


@dataclass(frozen=True)
class Estimate:
    """Bytes of a device at the step's peak, and its seconds by what it does."""

    peak_bytes: float
    products_s: float
    traffic_s: float
    waiting_s: float
    """For collectives that nothing hides."""
    dcn_s: float
    keeping_s: float
    """To store what is kept beside the blocks' inputs, and to fetch it; for the host's memory."""

    @property
    def step_s(self) -> float:
        moving = self.traffic_s + self.waiting_s + self.dcn_s + self.keeping_s
        return self.products_s + moving


@dataclass(frozen=True)
class Shares:
    """What was fitted on the compiler's figures."""

    products: float = 0.75
    """Of peak FLOP/s that a product of padded sizes reaches, with PyTorch's attention."""
    products_beside_kernels: float = 0.88
    """The same with kernels of attention, around which nothing is transposed."""
    width_passes: float = 50
    """How often values of a token's width go to or from HBM in one pass forward through a block."""
    hidden_passes: float = 14
    """The same of values of the MLP's width."""
    score_passes: float = 5
    exposed: float = 0.45
    """Share of the traffic's seconds that no product hides, with whole tiles of tokens."""
    exposed_in_vmem: float = 0.7
    """The same where an image's tokens leave tiles partly empty, and layers of a block are small
    enough to stay in vector memory."""
    exposed_beyond: float = 1.2
    """The same for larger ones."""
    beside_products: float = 0.55
    """Share of the traffic's seconds that adds to those of products, with kernels, as the sides of
    a right angle do: little where products take much longer, nearly all where they do not."""
    waited_for: float = 0.25
    """Share of the seconds of gathering weights that nothing hides, beside what is longer than all
    else."""
    kept_passes: float = 20
    """How often what is kept beside a block's input goes to or from HBM, at full bandwidth: the
    compiler copies it between layouts."""
    kept_passes_beside_kernels: float = 12
    host_waited_for: float = 0.25
    """Share of the seconds to and from the host's memory that nothing hides."""


SHARES = Shares()


def estimate(shape: StepSizes, layout: Layout, chip: Chip, shares: Shares = SHARES) -> Estimate:
    """Return what a step is expected to need on each device."""
    part = _Part(shape, layout, chip)
    policy = POLICIES[layout.policy]
    mesh, times = layout.mesh, layout.passes * shape.depth
    over = mesh.fsdp * mesh.domain * mesh.tensor

    forward = part.forward_flops()
    again = policy.products * (forward - part.last_flops())
    if layout.attention == "flash" and not policy.keeps_flash:
        again += (1 - policy.products) * part.score_flops()
    around = 3 * 2 * part.images * part.tokens * shape.pixels / shape.tokens * shape.width
    flops = times * (3 * forward + again) + layout.passes * around
    products_s = flops / (part.products_share(shares) * chip.peak_flops)

    moved = part.forward_bytes(shares) * (3 + policy.recomputed)
    weights = shape.block_parameters / mesh.tensor * layout.value_bytes
    gradients = _FP32 * shape.block_parameters / mesh.tensor
    moved += (3 + policy.recomputed) * weights + 2 * gradients
    state = shape.parameters / over
    whole = times * moved + state * (2 * layout.state_bytes + 2 * _FP32)
    traffic_s = part.exposed_s(whole / chip.hbm_bandwidth, products_s, shares)
    gathering_s, joining_s = (times * each for each in part.collectives_s(policy))
    longer_s = max(0.0, gathering_s - products_s - traffic_s)
    between = 2 * (mesh.dcn - 1) / mesh.dcn * _FP32 * state
    return Estimate(
        peak_bytes=state * (layout.state_bytes + _FP32) + part.peak_beside_state(policy),
        products_s=products_s,
        traffic_s=traffic_s,
        waiting_s=shares.waited_for * gathering_s + longer_s + joining_s,
        dcn_s=max(0.0, between / chip.dcn_bandwidth - products_s - traffic_s),
        keeping_s=times * part.keeping_s(policy, shares),
    )


@dataclass(frozen=True)
class _Part:
    """What one device computes of one block in one pass."""

    shape: StepSizes
    layout: Layout
    chip: Chip

    @property
    def images(self) -> float:
        return self.layout.batch_size / self.layout.mesh.batch_parts / self.layout.passes

    @property
    def tokens(self) -> float:
        return self.shape.tokens / self.layout.mesh.domain

    @property
    def rows(self) -> float:
        """Return how many rows products have, each image's padded to whole tiles."""
        return self.images * _up(self.tokens, SUBLANES)

    @property
    def heads(self) -> float:
        return self.shape.heads / self.layout.mesh.tensor

    @property
    def unit(self) -> int:
        """Return the side of the chip's matrix unit."""
        return 256 if self.chip.kind == "v6e" else 128

    def last_flops(self) -> float:
        """Return the operations of the MLP's second product."""
        hidden = self.shape.hidden / self.layout.mesh.tensor
        return 2 * self.rows * _up(hidden, self.unit) * _up(self.shape.width, self.unit)

    def forward_flops(self) -> float:
        """Return the operations of one pass forward, with what the padding adds."""
        shape, tensor = self.shape, self.layout.mesh.tensor
        width = _up(shape.width, self.unit)
        all_heads = _up(shape.heads * shape.head_dim / tensor, self.unit)
        projections = 2 * self.rows * width * (3 + 1) * all_heads
        return projections + self.score_flops() + 2 * self.last_flops()

    def score_flops(self) -> float:
        """Return the operations of attention's two products.

        Those of flash attention are as many more as its kernels are slower.
        """
        head = _up(self.shape.head_dim, self.unit)
        queries, keys = _up(self.tokens, SUBLANES), _up(self.shape.tokens, self.unit)
        pace = 1.0
        if self.layout.attention == "flash":
            dtype = torch.bfloat16 if self.layout.value_bytes == 2 else torch.float32
            width = padded_width(self.shape.head_dim)
            queries, keys = (
                padded_tokens(math.ceil(tokens), width, dtype)
                for tokens in (self.tokens, self.shape.tokens)
            )
            pace = _FLASH_PACE
        return 2 * 2 * self.images * self.heads * queries * keys * head / pace

    def products_share(self, shares: Shares) -> float:
        return shares.products_beside_kernels if self.layout.kernels else shares.products

    def exposed_s(self, moving_s: float, products_s: float, shares: Shares) -> float:
        """Return the seconds that traffic, which takes ``moving_s``, adds to those of products."""
        if self.layout.kernels:
            return math.hypot(products_s, shares.beside_products * moving_s) - products_s
        if self.tokens % LANES == 0:
            return shares.exposed * moving_s
        layer = self.rows * self.shape.hidden / self.layout.mesh.tensor * self.layout.value_bytes
        in_vmem = layer <= _VMEM / 2
        return (shares.exposed_in_vmem if in_vmem else shares.exposed_beyond) * moving_s

    def score_bytes(self) -> float:
        """Return the bytes of all scores of a block; none where kernels compute them."""
        if self.layout.kernels:
            return 0.0
        rows, columns = _up(self.tokens, SUBLANES), _up(self.shape.tokens, LANES)
        return self.images * self.heads * rows * columns * self.layout.value_bytes

    def kernel_bytes(self) -> float:
        """Return the bytes of what the kernels of attention are given and return.

        Flash attention has it in tiles, each head by itself.
        """
        if not self.layout.kernels:
            return 0.0
        rows: float = self.tokens + self.shape.tokens
        head: float = self.shape.head_dim
        if self.layout.attention == "flash":
            rows = _up(self.tokens, LANES) + _up(self.shape.tokens, LANES)
            head = _up(head, LANES)
        return 4 * self.images * self.heads * rows * head * self.layout.value_bytes

    def forward_bytes(self, shares: Shares) -> float:
        """Return the bytes of activations that go to and from HBM in one pass forward."""
        shape, size = self.shape, self.layout.value_bytes
        hidden = shape.hidden / self.layout.mesh.tensor
        width = (0.4 + 0.6 / self.layout.mesh.tensor) * shape.width  # "tensor" shards some of them
        values = shares.width_passes * width + shares.hidden_passes * hidden
        return self.rows * values * size + shares.score_passes * self.score_bytes()

    def collectives_s(self, policy: Policy) -> tuple[float, float]:
        """Return the seconds of one block's collectives: of weights and keys, and of activations
        over "tensor", which nothing hides.

        Devices along "tensor" are neighbours, with a link for each doubling of their number; what
        is gathered over the others goes by the links that are left (compile_only/links.py).
        """
        shape, mesh, size = self.shape, self.layout.mesh, self.layout.value_bytes
        gathered_over = mesh.fsdp * mesh.domain
        weights = shape.block_parameters / mesh.tensor
        share = (gathered_over - 1) / gathered_over
        gathers = 2 * weights * size * share  # forward, and again for the backward pass
        reduced = weights * _FP32 * share
        rounds = 3 + policy.recomputed
        activations = self.rows * shape.width * size
        keys = rounds * 2 * activations * (mesh.domain - 1)
        links, link = self.chip.links, self.chip.link_bandwidth
        near = min(math.log2(mesh.tensor), links - 1)
        joined = rounds * 2 * activations * (mesh.tensor - 1) / mesh.tensor
        gathering_s = (gathers + reduced + keys) / (links - near) / link
        return gathering_s, joined / near / link if near else 0.0

    def input_bytes(self) -> float:
        """Return the bytes of a block's input."""
        return self.rows * self.shape.width / self.layout.mesh.tensor * _FP32

    def kept_beside(self, policy: Policy) -> float:
        """Return the bytes that are kept of a block beside its input."""
        shape, tensor = self.shape, self.layout.mesh.tensor
        token = (policy.widths * shape.width + policy.hiddens * shape.hidden) / tensor
        scores = self.score_bytes() if policy.keeps_scores else 0
        return self.rows * token * self.layout.value_bytes + scores

    def keeping_s(self, policy: Policy, shares: Shares) -> float:
        """Return the seconds that storing and fetching of a block's activations takes."""
        kernels = self.layout.kernels
        often = shares.kept_passes_beside_kernels if kernels else shares.kept_passes
        passes = often * self.kept_beside(policy) / self.chip.hbm_bandwidth
        if not policy.on_host:
            return passes
        there_and_back = 2 * self.input_bytes() / self.chip.host_bandwidth
        return passes + shares.host_waited_for * there_and_back

    def peak_beside_state(self, policy: Policy) -> float:
        """Return the bytes that are there at once beside state and gradients."""
        shape, mesh, size = self.shape, self.layout.mesh, self.layout.value_bytes
        hidden = shape.hidden / mesh.tensor
        inputs = 2 if policy.on_host else shape.depth  # one on its way, one at work
        kept = inputs * self.input_bytes() + shape.depth * self.kept_beside(policy)
        widths = (2 + 6 / mesh.tensor) * shape.width
        one = self.rows * (widths + 3 * hidden) * size + 3 * self.score_bytes()
        one += self.kernel_bytes()
        gathered = 1.3 * shape.block_parameters / mesh.tensor * size
        logits = 3 * self.images * shape.classes * _FP32
        images = self.images * self.layout.passes * shape.pixels / mesh.domain * _FP32
        return kept + one + gathered + logits + images


def _up(size: float, multiple: int) -> float:
    return -(-size // multiple) * multiple


# ------------------------------------------------------------------------------------------------


_USABLE = 0.8
"""Share of HBM that the arithmetic may fill: it is off by up to a quarter (tests/test_plan.py)."""


def resolve_policy(
    config: RunConfig,
    own: XlaConfig,
    model: ModelSpec,
    mesh: Mesh,
    device: str,
    chip: Chip | None,
) -> tuple[RunConfig, str]:
    """Return the configuration with ``--grad_ckpt`` decided, and how a run's line tells of it.

    ``device`` is "TPU" or "CPU"; ``chip`` is None where the kind of TPU is unknown.
    """
    asked = config.sharding.grad_ckpt
    if asked == "offload" and device == "CPU":
        return _with(config, "full"), " (--grad_ckpt offload: the CPU is the host, nothing moves)"
    if asked != "auto":
        return config, ""
    if not own.scan_blocks:
        return _with(config, "full"), " (--grad_ckpt auto: blocks are not scanned)"
    if chip is None:
        return _with(config, "full"), " (--grad_ckpt auto: what fits is known for TPUs alone)"
    layout = Layout(
        mesh=mesh,
        batch_size=config.data.batch_size,
        passes=config.data.grad_accum_steps,
        policy="full",
        attention=own.attention,
        value_bytes=4 if config.sharding.precision == "fp32" else 2,
        state_bytes=state_bytes(config),
    )
    found = {
        name: estimate(step_sizes(model), replace(layout, policy=name), chip) for name in POLICIES
    }
    fitting = {
        name: each for name, each in found.items() if each.peak_bytes <= _USABLE * chip.hbm_bytes
    }
    if fitting:
        chosen = min(fitting, key=lambda name: fitting[name].step_s)
        why = "by arithmetic the fastest that fits"
    else:
        chosen = min(found, key=lambda name: found[name].peak_bytes)
        why = "by arithmetic nothing fits, this needs least"
    return _with(config, chosen), f" (--grad_ckpt auto: {why}, {_told(found)})"


def _told(found: dict[str, Estimate]) -> str:
    return ", ".join(
        f"{name} {each.step_s * 1e3:,.0f} ms and {each.peak_bytes / 2**30:.1f} GiB"
        for name, each in found.items()
    )


def _with(config: RunConfig, policy: str) -> RunConfig:
    sharding = replace(config.sharding, grad_ckpt=policy)  # type: ignore[arg-type]
    return replace(config, sharding=sharding)
