"""Estimates memory and time of a training step on a TPU slice by arithmetic, without compiling it.

``--grad_ckpt auto`` chooses a policy with it, and ``--plan`` ranks thousands of candidates, so that
only a few are compiled. The model follows what the TPU compiler does: blocks run one after the
other, a matrix product reaches a fraction of the chip's peak with its sizes padded to the matrix
unit, everything else runs at HBM bandwidth, and collectives overlap with computation as far as
there is enough of it. The constants were fitted to the compiler's results
(docs/evidence/planning.md).
"""

from __future__ import annotations

import functools
import math
from dataclasses import astuple, dataclass, replace

import torch

from models.spec import ModelSpec
from tpu_attention.choice import KERNELS
from tpu_attention.kernels import LANES, SUBLANES, FlashSizes, padded_width, round_up
from training.config import RunConfig
from training.mesh import Mesh
from training.step_sizes import StepSizes, state_bytes, step_sizes, summed
from xla_fsdp.config import XlaConfig
from xla_fsdp.tpu import Chip

_FP32 = 4
_VMEM = 128 * 2**20
"""Bytes of a core's vector memory: of v5e and v6e, assumed for all."""
_USABLE = 0.8
"""Share of HBM that the arithmetic may fill: it is off by up to a quarter (test_plan.py)."""

# Products.
_PRODUCTS, _PRODUCTS_WITH_KERNELS = 0.75, 0.88
"""Share of peak FLOP/s that a product of padded sizes reaches, with PyTorch's attention; and with
kernels of attention, around which nothing is transposed."""
_FLASH_SPEED = 0.73
"""Of flash attention's kernels relative to other products (docs/evidence/tpu_speed.md)."""

# Traffic between HBM and the chip. "Passes": how often values go to or from HBM in one forward
# pass of a block.
_WIDTH_PASSES, _HIDDEN_PASSES, _SCORE_PASSES = 50, 14, 5
"""Of values of a token's width; of the MLP's width; of scores."""
_EXPOSED, _EXPOSED_IN_VMEM, _EXPOSED_BEYOND = 0.45, 0.7, 1.2
"""Share of the traffic's seconds that no product hides: with whole tiles of tokens; where an
image's tokens leave tiles partly empty, for layers of a block that stay in vector memory, and for
larger ones."""
_BESIDE_PRODUCTS, _BESIDE_FAST_PRODUCTS = 0.55, {"v6e": 0.65, "tpu7x": 0.75}
"""With kernels: share of the traffic's seconds that adds to those of products, as the sides of a
right angle do: little where products take much longer, nearly all where they do not. More on chips
whose matrix units are the fastest beside their HBM."""

# Collectives, and saved activations.
_LARGEST_MATRIX = 1 / 3
"""Share of a block's weights."""
_HOST_WAITED_FOR = 0.25
"""Share of the seconds, to and from the host's memory, that nothing hides."""
_SAVED_PASSES, _SAVED_PASSES_WITH_KERNELS = 20, 12
"""How often what is saved beside a block's input goes to or from HBM, at full bandwidth: the
compiler copies it between layouts."""


@dataclass(frozen=True)
class RematCost:
    """What one value of ``--grad_ckpt`` saves of a block for the backward pass, and recomputes."""

    widths: float
    """Values saved for each token beside the block's input, in multiples of the model's width."""
    hiddens: float
    """The same in multiples of the width inside the MLP."""
    saves_scores: bool
    """Whether attention's scores are saved, where they are written at all."""
    products: float
    """Share of a block's products, forward, that run once more; but for the last one, whose result
    is not needed."""
    recomputed: float
    """The same of all that goes to and from HBM."""
    on_host: bool = False
    """Whether the block's input is saved in the host's memory."""
    saves_flash: bool = False
    """Whether what flash attention computes is saved."""


POLICIES = {
    "full": RematCost(0, 0, False, 1, 1),
    "selective": RematCost(4, 1, False, 0.12, 0.5),
    "offload": RematCost(0, 0, False, 1, 1, on_host=True),
    "none": RematCost(6, 1, True, 0, 0.5, saves_flash=True),
}
"""The values of ``--grad_ckpt`` among which ``--plan`` and auto choose."""
_FORWARD_ALONE = RematCost(0, 0, False, 0, 0)
"""Without a backward pass."""


@dataclass(frozen=True)
class FsdpCost:
    """What the program of a step holds and moves, where that depends on the implementation of FSDP
    and on the version of libtpu that compiles it. Bytes are of a value."""

    residual_bytes: int | None = _FP32
    """Of a block's input, which is saved; None: as ``--precision``."""
    reduce_bytes: int = _FP32
    """Of gradients, while they are reduced over devices."""
    has_shards_of_rows: bool = False
    """Whether the rows of each parameter are divided, the last ones padded; else as ``Mesh`` does.
    The loop over blocks then has copies of its own, as ``--precision``."""
    keeps_gathered: bool = False
    """Whether weights are not gathered again for the backward pass if nothing is recomputed."""
    reduces_whole_gradients: bool = False
    """Whether gradients of a block are whole on each device before they are reduced."""
    waited_for: float = 0.25
    """Share of the seconds of gathering and reducing that nothing hides."""
    hides: float = 1.0
    """Share of the other seconds that can hide these."""
    waits_on: tuple[str, ...] = ()
    """Kinds of chips on which nothing hides them: their collectives are not asynchronous. Over 16
    chips or more, and with shards that are no whole number of tiles, gradients are reduced by
    all-reduces there."""
    copies_operands: bool = True
    """Whether kernels of attention have copies of their operands."""
    exchanges_heads: bool = False
    """Whether devices that share an image exchange tokens for heads (Ulysses attention), if they
    divide the heads and ``--domain_attention`` is not "ring"; else keys go round."""


SPMD = FsdpCost()
SIMPLE_FSDP = FsdpCost(
    residual_bytes=None,
    has_shards_of_rows=True,
    keeps_gathered=True,
    reduces_whole_gradients=True,
    waited_for=0.2,
    hides=0.7,
    waits_on=("v6e",),
    copies_operands=False,
    exchanges_heads=True,
)
"""By libtpu 0.0.52."""


@dataclass(frozen=True)
class Estimate:
    """Bytes of a device, and its seconds by what it does."""

    held_bytes: float
    """From a forward pass to the backward pass, and state: in memory at the peak."""
    block_bytes: float
    """Of one block at work."""
    output_bytes: float
    """Of what the model returns, while its loss is computed."""
    products_s: float
    traffic_s: float
    waiting_s: float
    """For collectives that nothing hides."""
    dcn_s: float
    saving_s: float
    """To store what is saved beside the blocks' inputs, and to load it; for the host's memory."""

    @property
    def peak_bytes(self) -> float:
        return self.held_bytes + max(self.block_bytes, self.output_bytes)

    @property
    def step_s(self) -> float:
        moving_s = self.traffic_s + self.waiting_s + self.dcn_s + self.saving_s
        return self.products_s + moving_s

    def __add__(self, other: Estimate) -> Estimate:
        """Return the estimate of two runs of blocks: one computes after the other, and what both
        hold is in memory at the peak."""
        total = Estimate(*(a + b for a, b in zip(astuple(self), astuple(other), strict=True)))
        return replace(total, block_bytes=max(self.block_bytes, other.block_bytes))


def estimate(
    shape: StepSizes,
    chip: Chip,
    mesh: Mesh,
    config: RunConfig,
    attention: str,
    fsdp: FsdpCost = SPMD,
) -> Estimate:
    """Return what a run of blocks in a step is expected to need on each device.

    ``config`` gives the batch, ``--grad_accum_steps``, ``--grad_ckpt`` (one of ``POLICIES``), the
    precision and the optimizer; ``attention`` is the value of ``--attention``.
    """
    policy = POLICIES[config.sharding.grad_ckpt] if shape.learns else _FORWARD_ALONE
    passes, tensor = config.data.grad_accum_steps, mesh.tensor
    ahead = 1 if shape.runs_ahead and passes > 1 else 0
    rounds = ahead + (3 if shape.learns else 1)  # the backward pass counts as two forward ones
    value_bytes = 4 if config.sharding.precision == "fp32" else 2
    parameter_bytes = state_bytes(config, trains=shape.learns)
    has_kernels = attention in KERNELS  # which write no scores
    block_runs = passes * shape.depth
    over = mesh.fsdp * mesh.domain  # these devices share parameters
    if fsdp.has_shards_of_rows:
        rows_held = sum(math.ceil(s[0] / over) * math.prod(s[1:]) for s in shape.block_shapes)
        held = rows_held / sum(map(math.prod, shape.block_shapes))
    else:
        held = _share_held(mesh, shape.block_shapes)
    state = shape.state_parameters * held / tensor

    # Sizes of one block in one pass on one device.
    unit = 256 if chip.kind in ("v6e", "tpu7x") else 128  # the side of the matrix unit
    images = config.data.batch_size / mesh.batch_shards / passes
    sequences, tokens = images * shape.sequences, shape.tokens / mesh.domain
    rows = sequences * round_up(
        tokens, SUBLANES
    )  # of products: each sequence padded to whole tiles
    heads, hidden = shape.heads / tensor, shape.hidden / tensor
    weights = shape.block_parameters / tensor
    input_bytes = rows * shape.width / tensor * (fsdp.residual_bytes or value_bytes)

    # Attention: the sizes of its two products, bytes of the scores, bytes of the kernels' operands.
    queries, keys = round_up(tokens, SUBLANES), round_up(shape.tokens, unit)
    speed, score_bytes, kernel_bytes = 1.0, 0.0, 0.0
    if not has_kernels:
        score_bytes = sequences * heads * queries * round_up(shape.tokens, LANES) * value_bytes
    elif attention == "flash":
        dtype = torch.bfloat16 if value_bytes == 2 else torch.float32
        width = padded_width(int(heads), shape.head_dim)
        sizes = FlashSizes(1, int(heads), math.ceil(tokens), shape.tokens, width, dtype)
        queries, keys = sizes.blocks * sizes.block, sizes.key_blocks * sizes.key_block
        speed = _FLASH_SPEED
        kernel_bytes = 4 * sequences * heads * (tokens + shape.tokens) * width * value_bytes
    else:
        operand_rows = tokens + shape.tokens
        kernel_bytes = 4 * sequences * heads * operand_rows * shape.head_dim * value_bytes

    # FLOPs: forward once, backward twice, what is computed ahead, and what is recomputed.
    last_flops = (
        2 * rows * round_up(hidden, unit) * round_up(shape.width, unit)
    )  # the MLP's second product
    score_flops = (
        2 * 2 * sequences * heads * queries * keys * round_up(shape.head_dim, unit) / speed
    )
    all_heads = round_up(shape.heads * shape.head_dim / tensor, unit)
    projection_flops = 2 * rows * round_up(shape.width, unit) * (3 + 1) * all_heads
    forward_flops = projection_flops + score_flops + 2 * last_flops
    recomputed_flops = policy.products * (forward_flops - last_flops)
    if attention == "flash" and not policy.saves_flash:
        recomputed_flops += (1 - policy.products) * score_flops
    patch_flops = rounds * 2 * sequences * shape.pixels / mesh.domain * shape.width
    flops = block_runs * (rounds * forward_flops + recomputed_flops) + passes * patch_flops
    products_share = _PRODUCTS_WITH_KERNELS if has_kernels else _PRODUCTS
    products_s = flops / (products_share * chip.peak_flops)

    # HBM traffic: activations, weights, gradients, the optimizer's state.
    touched_width = (0.4 + 0.6 / tensor) * shape.width  # "tensor" shards some of the activations
    values = _WIDTH_PASSES * touched_width + _HIDDEN_PASSES * hidden
    activations = rows * values * value_bytes + _SCORE_PASSES * score_bytes
    moved = (rounds + policy.recomputed) * (activations + weights * value_bytes)
    moved += 2 * (_FP32 * weights) if shape.learns else 0
    moved *= block_runs
    moved += state * (2 * parameter_bytes + 2 * _FP32) if shape.learns else 0
    accumulates = shape.learns and passes > 1
    if accumulates:  # each pass reads and writes the sum, which the update sets to zero
        moved += (2 * passes + 1) * _FP32 * state
    moving_s = moved / chip.hbm_bandwidth
    if has_kernels:
        beside = _BESIDE_FAST_PRODUCTS.get(chip.kind, _BESIDE_PRODUCTS)
        traffic_s = math.hypot(products_s, beside * moving_s) - products_s
    elif tokens % LANES == 0:
        traffic_s = _EXPOSED * moving_s
    elif rows * shape.hidden / tensor * value_bytes <= _VMEM / 2:
        traffic_s = _EXPOSED_IN_VMEM * moving_s
    else:
        traffic_s = _EXPOSED_BEYOND * moving_s

    # Collectives. Devices along "tensor" are neighbours; weights and keys are gathered over the
    # other devices by the links that are left, which the devices of a chip share.
    received = (over - 1) / over
    waits = chip.kind in fsdp.waits_on
    stays = fsdp.keeps_gathered and shape.learns and config.sharding.grad_ckpt == "none"
    layer_bytes = rows * shape.width * value_bytes
    gathered = (ahead + 1) * weights * value_bytes * received
    reduced = 0.0
    if shape.learns:
        if not stays:  # gathered again for the backward pass
            gathered += weights * value_bytes * received
        reduced = weights * fsdp.reduce_bytes * received
        matrices = [sides for sides in shape.block_shapes if len(sides) > 1]
        in_tiles = all(math.ceil(sides[0] / over) % SUBLANES == 0 for sides in matrices)
        if waits and (over >= 16 or not in_tiles):
            reduced *= 2
    rotated_keys = exchanged = 0.0
    takes_heads = fsdp.exchanges_heads and config.sharding.domain_attention != "ring"
    if takes_heads and shape.heads % mesh.domain == 0:
        exchanges = ahead + (2 if shape.learns else 1) + policy.recomputed
        exchanged = exchanges * 4 * layer_bytes * (mesh.domain - 1) / mesh.domain
    else:
        rotated_keys = (rounds + policy.recomputed) * 2 * layer_bytes * (mesh.domain - 1)
    on_a_chip = min(tensor, chip.devices)
    tensor_links = _links_between(tensor, chip)
    gathering_links = (chip.links - tensor_links) / on_a_chip
    gathering_s = (gathered + reduced + rotated_keys) / gathering_links / chip.link_bandwidth
    gathering_s = block_runs * gathering_s
    joined = (rounds + policy.recomputed) * 2 * layer_bytes * (tensor - 1) / tensor
    # Of activations, which nothing hides.
    tokens_s = 0.0
    for moved_tokens, neighbours in ((joined, tensor), (exchanged, mesh.domain)):
        if moved_tokens:
            bandwidth = _links_between(neighbours, chip) * chip.link_bandwidth
            tokens_s += block_runs * moved_tokens / (bandwidth or chip.between_devices)
    longer_s = max(0.0, gathering_s - fsdp.hides * (products_s + traffic_s))
    waiting_s = gathering_s if waits else fsdp.waited_for * gathering_s + longer_s
    between_slices = 0.0
    if shape.learns:
        between_slices = passes * 2 * (mesh.dcn - 1) / mesh.dcn * _FP32 * state

    # Saved activations.
    saved_values = (policy.widths * shape.width + policy.hiddens * shape.hidden) / tensor
    saved_bytes = rows * saved_values * value_bytes + (score_bytes if policy.saves_scores else 0)
    saved_passes = _SAVED_PASSES_WITH_KERNELS if has_kernels else _SAVED_PASSES
    saving_s = saved_passes * saved_bytes / chip.hbm_bandwidth
    if policy.on_host:
        saving_s += _HOST_WAITED_FOR * (2 * input_bytes / chip.host_bandwidth)

    # Memory: state, gradients of all passes and of one, what is saved of all blocks, one block at
    # work, what is returned.
    gradient_bytes = (_FP32 if accumulates else 0) + fsdp.reduce_bytes if shape.learns else 0
    inputs = 2 if policy.on_host else shape.depth  # on the host: one on its way, one at work
    inputs = inputs if shape.learns else 1
    saved = inputs * input_bytes + shape.depth * saved_bytes
    if stays:
        saved += shape.depth * weights * value_bytes
    at_work = rows * ((2 + 6 / tensor) * shape.width + 3 * hidden) * value_bytes
    at_work += 3 * score_bytes
    at_work += kernel_bytes if fsdp.copies_operands else 0
    unsharded = 1.3 * weights * value_bytes
    if fsdp.reduces_whole_gradients and shape.learns:
        unsharded += weights * fsdp.reduce_bytes * (_LARGEST_MATRIX if waits else 1)
    copies = value_bytes if fsdp.has_shards_of_rows else 0
    image_bytes = sequences * passes * shape.pixels / mesh.domain * _FP32
    return Estimate(
        held_bytes=state * (parameter_bytes + gradient_bytes + copies)
        + (saved + image_bytes if shape.learns else 0),
        block_bytes=at_work + unsharded + (0 if shape.learns else saved),
        output_bytes=images * shape.outputs * (value_bytes if shape.learns else _FP32),
        products_s=products_s,
        traffic_s=traffic_s,
        waiting_s=waiting_s + tokens_s,
        dcn_s=max(0.0, between_slices / chip.dcn_bandwidth - products_s - traffic_s),
        saving_s=block_runs * saving_s,
    )


def _links_between(neighbours: int, chip: Chip) -> float:
    """Return the links over which so many neighbours exchange activations: one for each doubling of
    their number, but for those of one chip."""
    return min(math.log2(neighbours / min(neighbours, chip.devices)), chip.links - 1)


@functools.cache
def _share_held(mesh: Mesh, shapes: tuple[tuple[int, ...], ...]) -> float:
    """Return the share of parameters of these shapes that a device holds, of those that "tensor"
    leaves it. It is more than an even share where the mesh does not divide a shape."""
    gathered_over = replace(mesh, tensor=1)
    shards = [gathered_over.shard_count(gathered_over.parameter_spec(shape)) for shape in shapes]
    held = sum(math.prod(shape) / count for shape, count in zip(shapes, shards, strict=True))
    return held / sum(map(math.prod, shapes))


def resolve_policy(
    config: RunConfig,
    xla: XlaConfig,
    model: ModelSpec,
    mesh: Mesh,
    device: str,
    chip: Chip | None,
) -> tuple[RunConfig, str]:
    """Return the configuration with ``--grad_ckpt`` decided, and the reason that a run logs.

    ``device`` is "TPU" or "CPU"; ``chip`` is None where the kind of TPU is unknown.
    """
    policy: str = config.sharding.grad_ckpt
    why = ""
    configs = {
        name: replace(config, sharding=replace(config.sharding, grad_ckpt=name))  # type: ignore[arg-type]
        for name in POLICIES
    }
    if policy == "offload" and device == "CPU":
        policy, why = "full", "--grad_ckpt offload: nothing to offload to on the CPU"
    elif policy == "auto" and not xla.scan_blocks:
        policy, why = "full", "--grad_ckpt auto: blocks are not scanned"
    elif policy == "auto" and chip is None:
        policy, why = "full", "--grad_ckpt auto: memory is estimated for TPUs only"
    elif policy == "auto":
        assert chip is not None
        usable, estimates = _USABLE * chip.hbm_bytes, dict[str, Estimate]()
        for name, candidate in configs.items():
            of_blocks = functools.partial(
                estimate,
                chip=chip,
                mesh=mesh,
                config=candidate,
                attention=config.sharding.attention,
            )
            estimates[name] = summed(of_blocks, step_sizes(model))
        figures = ", ".join(
            f"{name} {need.step_s * 1e3:,.0f} ms and {need.peak_bytes / 2**30:.1f} GiB"
            for name, need in estimates.items()
        )
        fitting = [name for name, need in estimates.items() if need.peak_bytes <= usable]
        if fitting:
            policy = min(fitting, key=lambda name: estimates[name].step_s)
            why = f"--grad_ckpt auto: the fastest that fits by estimate: {figures}"
        else:
            policy = min(estimates, key=lambda name: estimates[name].peak_bytes)
            why = f"--grad_ckpt auto: nothing fits by estimate, this needs the least: {figures}"
    return (configs[policy], f" ({why})") if why else (config, "")
