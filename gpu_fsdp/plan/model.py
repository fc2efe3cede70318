"""Bytes and seconds of a training step on NVIDIA GPUs by arithmetic: memory, and a roofline.

Nothing of it is compiled or measured. A step takes the longest of what its products, its memory
traffic and its exchanges take, at the shares below of what the data sheets promise; they are
assumptions of what PyTorch reaches with bf16, not fitted on anything.
"""

from __future__ import annotations

from dataclasses import dataclass

from gpu_fsdp.nvidia_gpus import peak_of
from training.mesh import Mesh
from training.plan.shape import Shape

_GIB = 2**30
NODE = 8
"""GPUs that NVLink joins."""


@dataclass(frozen=True)
class Gpu:
    """One kind of GPU, SXM; bandwidths in bytes/s, one direction, as NVIDIA's data sheets say."""

    name: str
    memory_bytes: float
    bandwidth: float
    nvlink: float
    network: float
    """Of the adapter that a GPU has to itself: 200 Gbit/s beside A100, 400 beside the others."""

    def peak_flops(self, precision: str) -> float:
        """Return the FLOP/s at a ``--precision``; fp32 without TF32."""
        peak = peak_of(self.name, precision)
        assert peak is not None
        return peak


GPUS = (
    Gpu("A100", 80 * _GIB, 2.04e12, 300e9, 25e9),
    Gpu("H100", 80 * _GIB, 3.35e12, 450e9, 50e9),
    Gpu("H200", 141e9, 4.8e12, 450e9, 50e9),
    Gpu("B200", 180e9, 7.7e12, 900e9, 50e9),
)
USABLE = 0.9
"""Of a GPU's memory: CUDA, NCCL and gaps between tensors have the rest."""
_PRODUCTS, _TRAFFIC, _LINKS, _HIDDEN = 0.6, 0.8, 0.7, 0.9
"""Shares of peak FLOP/s, of memory bandwidth and of the links' bandwidth that are reached, and of
the exchanges that go on beside computation."""
_FP32 = 4


@dataclass(frozen=True)
class Policy:
    """What of a block's activations one value of ``--grad_ckpt`` keeps, in values for each token
    by the model's width and by the MLP's, and the share of the forward pass that runs again."""

    widths: float
    hiddens: float
    recomputed: float


POLICIES = {
    "full": Policy(1, 0, 1),
    "selective": Policy(5, 1, 0.5),
    "none": Policy(10, 3, 0),
}


@dataclass(frozen=True)
class Estimate:
    """Bytes of a GPU at the step's peak, and the seconds of a step."""

    peak_bytes: float
    step_s: float


def estimate(
    shape: Shape,
    gpu: Gpu,
    mesh: Mesh,
    batch_size: int,
    passes: int,
    policy: str,
    precision: str,
    of_parameter: int,
) -> Estimate:
    """Return what a step with ZeRO-3 is expected to need; ``of_parameter``: bytes of a parameter's
    state (``training.plan.shape.state_bytes``)."""
    size = 4 if precision == "fp32" else 2
    kept = POLICIES[policy]
    images = batch_size / mesh.batch_parts / passes
    rows = images * shape.tokens / mesh.domain
    over = mesh.fsdp * mesh.domain
    state = shape.parameters / over * (of_parameter + _FP32)
    of_token = (kept.widths * shape.width + kept.hiddens * shape.hidden) * size
    at_once = rows * (10 * shape.width + 3 * shape.hidden) * size
    gathered = 2 * shape.block_parameters * (size + _FP32)
    rest = 3 * images * (shape.classes + shape.pixels / mesh.domain) * _FP32
    peak = state + shape.depth * rows * of_token + at_once + gathered + rest

    flops = passes * images / mesh.domain * shape.train_flops * (1 + kept.recomputed / 3)
    products_s = flops / (_PRODUCTS * gpu.peak_flops(precision))
    values = (20 * shape.width + 6 * shape.hidden) * rows * (3 + kept.recomputed) * size
    moved = passes * shape.depth * (values + 4 * shape.block_parameters * size)
    traffic_s = (moved + shape.parameters / over * 2 * of_parameter) / (_TRAFFIC * gpu.bandwidth)
    computed_s = products_s + traffic_s
    exchanged_s = _exchanged_s(shape, gpu, mesh, passes, size) / _LINKS
    step_s = max(computed_s, exchanged_s) + (1 - _HIDDEN) * min(computed_s, exchanged_s)
    return Estimate(peak, step_s)


def _exchanged_s(shape: Shape, gpu: Gpu, mesh: Mesh, passes: int, size: int) -> float:
    """Return the seconds of gathering weights twice and reducing gradients, in every pass."""
    over = mesh.fsdp * mesh.domain
    received = shape.parameters * (over - 1) / over * (2 * size + _FP32)
    within = passes * received / (gpu.nvlink if over <= NODE else gpu.network)
    copies = 2 * (mesh.dcn - 1) / mesh.dcn * _FP32 * shape.parameters / over
    return within + copies / (gpu.nvlink if mesh.devices <= NODE else gpu.network)
