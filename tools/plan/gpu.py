"""``--plan --backend cuda``: numbers of GPUs, meshes and flags, by arithmetic.

Nothing of it is compiled or measured. A step takes the longest of what its products, its memory
traffic and its exchanges take, at the shares below of what the data sheets promise; they are
assumptions of what PyTorch reaches with bf16, not fitted on anything.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from gpu_fsdp.config import TorchConfig
from tools.plan import plans
from tools.plan.plans import Candidate, HardwarePlan, Request
from torch_fsdp.devices import peak_of
from training.config import RunConfig
from training.errors import UsageError
from training.mesh import Mesh, make_mesh
from training.resolve import Run, check_batch, check_rows, with_passes
from training.step_sizes import StepSizes, state_bytes, step_sizes, summed

# -- GPUs ----------------------------------------------------------------------------------

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

# -- bytes and seconds of a step: a model of memory, and a roofline --------------------------

_PRODUCTS, _TRAFFIC, _LINKS, _HIDDEN = 0.6, 0.8, 0.7, 0.9
"""Shares of peak FLOP/s, of memory bandwidth and of the links' bandwidth that are reached, and of
the exchanges that run beside computation."""
_FP32 = 4


@dataclass(frozen=True)
class GpuRematCost:
    """What one value of ``--grad_ckpt`` saves of a block's activations, in values for each token
    by the model's width and by the MLP's, and the share of the forward pass that runs again."""

    widths: float
    hiddens: float
    recomputed: float


POLICIES = {
    "full": GpuRematCost(1, 0, 1),
    "selective": GpuRematCost(5, 1, 0.5),
    "none": GpuRematCost(10, 3, 0),
}
_FORWARD_ALONE = GpuRematCost(0, 0, 0)
"""Of a teacher, without a backward pass."""


@dataclass(frozen=True)
class GpuEstimate:
    """Bytes of a GPU, and the seconds of a step."""

    held_bytes: float
    """From a forward pass to the backward pass, and state: in memory at the peak."""
    block_bytes: float
    """Of one block at work."""
    output_bytes: float
    """Of what the model returns, while its loss is computed."""
    step_s: float

    @property
    def peak_bytes(self) -> float:
        return self.held_bytes + max(self.block_bytes, self.output_bytes)

    def __add__(self, other: GpuEstimate) -> GpuEstimate:
        """Return the estimate of two runs of blocks, of which one computes after the other."""
        return GpuEstimate(
            self.held_bytes + other.held_bytes,
            max(self.block_bytes, other.block_bytes),
            self.output_bytes + other.output_bytes,
            self.step_s + other.step_s,
        )


def estimate(shape: StepSizes, gpu: Gpu, mesh: Mesh, config: RunConfig) -> GpuEstimate:
    """Return what a run of blocks in a step with ZeRO-3 is expected to need.

    ``config`` gives the batch, ``--grad_accum_steps``, ``--grad_ckpt`` (one of ``POLICIES``), the
    precision and the optimizer.
    """
    policy = POLICIES[config.sharding.grad_ckpt] if shape.learns else _FORWARD_ALONE
    rounds = 3 if shape.learns else 1  # the backward pass counts as two forward ones
    passes = config.data.grad_accum_steps
    value_bytes = 4 if config.sharding.precision == "fp32" else 2
    parameter_bytes = state_bytes(config)
    images = config.data.batch_size / mesh.batch_parts / passes
    sequences = images * shape.sequences
    rows = sequences * shape.tokens / mesh.domain
    over = mesh.fsdp * mesh.domain

    # Memory.
    state = shape.state_parameters / over * (parameter_bytes + _FP32)
    of_token = (policy.widths * shape.width + policy.hiddens * shape.hidden) * value_bytes
    at_once = rows * (10 * shape.width + 3 * shape.hidden) * value_bytes
    unsharded = 2 * shape.block_parameters * (value_bytes + _FP32)
    saved = shape.depth * rows * of_token + 3 * sequences * shape.pixels / mesh.domain * _FP32
    # Beside what a student returns: its logarithms and gradients. Of a teacher: targets alone.
    outputs = rounds * images * shape.outputs * _FP32

    # Products and memory traffic.
    flops = passes * images / mesh.domain * shape.train_flops * (1 + policy.recomputed / rounds)
    products_s = flops / (_PRODUCTS * gpu.peak_flops(config.sharding.precision))
    values = (20 * shape.width + 6 * shape.hidden) * rows * value_bytes
    values *= rounds + policy.recomputed
    weights = (rounds + 1) * shape.block_parameters * value_bytes
    moved = passes * shape.depth * (values + weights)
    moved += shape.state_parameters / over * 2 * parameter_bytes
    computed_s = products_s + moved / (_TRAFFIC * gpu.bandwidth)

    # Exchanges: weights are gathered twice and gradients reduced, in every pass; then gradients
    # are summed over the replicas.
    exchanged = 2 * value_bytes + _FP32 if shape.learns else value_bytes
    received = shape.parameters * (over - 1) / over * exchanged
    within_s = passes * received / (gpu.nvlink if over <= NODE else gpu.network)
    summed = 2 * (mesh.dcn - 1) / mesh.dcn * _FP32 * shape.state_parameters / over
    replicas_s = summed / (gpu.nvlink if mesh.devices <= NODE else gpu.network)
    exchanged_s = (within_s + replicas_s) / _LINKS

    longer, shorter = max(computed_s, exchanged_s), min(computed_s, exchanged_s)
    return GpuEstimate(
        held_bytes=state + (saved if shape.learns else 0),
        block_bytes=at_once + unsharded + (0 if shape.learns else saved),
        output_bytes=outputs,
        step_s=longer + (1 - _HIDDEN) * shorter,
    )


# -- plans -------------------------------------------------------------------------------------

CHOICES: dict[str, tuple[Any, ...]] = {
    "grad_ckpt": tuple(POLICIES),
    "grad_accum_steps": (1, 2, 4, 8, 16),
    "mesh_dcn": (1, 2, 4, 8, 16, 32),
}
"""The values of each flag that are tried, by its field."""
_NOT_COMPILED = (
    "by a model of memory and a roofline: nothing was compiled or measured, and what reaches the "
    "links and the GPUs is assumed (tools/plan/gpu.py)"
)


def plan_gpus(config: RunConfig, own: TorchConfig) -> int:
    """Print the plans for GPUs, or with ``--json`` their figures, and return the exit code.
    Raises UsageError."""
    if config.sharding.mesh_tensor > 1:
        raise UsageError(
            f"--mesh_tensor {config.sharding.mesh_tensor} requires --backend xla, this is cuda"
        )
    request = plans.read_request(config, own, [gpu.name for gpu in GPUS])
    best: dict[str, HardwarePlan] = {}
    refusals: list[UsageError] = []
    tried = list(candidates(request.config, own))
    for gpu, number, chosen in tried:
        try:
            plan = _plan(request, gpu, number, chosen)
        except UsageError as refused:
            refusals.append(refused)
            continue
        if plan.peak_bytes <= plan.capacity_bytes and plan.hours <= request.most_hours:
            known = best.get(plan.hardware, plan)
            best[plan.hardware] = min(known, plan, key=lambda each: each.step_s)
    if refusals and len(refusals) == len(tried):
        raise refusals[-1]
    model = request.model
    what = f"{model.name}, {model.parameter_count:,} parameters, on GPUs (NOT COMPILED)"
    picture = Path(config.planning.plan_dir) / "gpu.png"
    return plans.print_plans(request, what, list(best.values()), [_NOT_COMPILED], picture)


def candidates(config: RunConfig, own: TorchConfig) -> Iterator[tuple[Gpu, int, dict[str, Any]]]:
    """Yield all that the flags leave open: the GPU, how many, and the value of each flag."""
    most = config.planning.chips_at_most
    for gpu in GPUS:
        for power in range(most.bit_length()):
            for chosen in plans.combinations(CHOICES, config, own):
                if 2**power % chosen["mesh_dcn"] == 0:
                    yield gpu, 2**power, chosen


def _plan(request: Request, gpu: Gpu, number: int, chosen: dict[str, Any]) -> HardwarePlan:
    """Return one plan, whether it fits or not. Raises UsageError where the program refuses it."""
    config, model = request.config, request.model
    mesh = make_mesh(replace(config.sharding, mesh_dcn=chosen["mesh_dcn"]), number)
    candidate = Candidate(mesh, chosen["grad_ckpt"], chosen["grad_accum_steps"], attention=None)
    config = with_passes(replace(candidate.run_config(config), backend="cuda"), mesh)
    check_rows(mesh, model)
    check_batch(Run(config, request.own, model, mesh))
    found = summed(lambda shape: estimate(shape, gpu, mesh, config), step_sizes(model))

    # The line that starts the training, to be typed on each node.
    nodes = math.ceil(number / NODE)
    command = [f"NPROC_PER_NODE={min(number, NODE)}"]
    if nodes > 1:  # each node has a number of its own
        command += [f"NNODES={nodes}", "NODE_RANK=0", "MASTER_ADDR=node1"]
    command.append("launch/torchrun.sh")
    command += plans.words_of(config, request.own, without=("backend",), always=plans.ALWAYS)
    return HardwarePlan(
        request=request,
        hardware=f"{number} x {gpu.name}",
        kind=gpu.name,
        chips=number,
        capacity_bytes=USABLE * gpu.memory_bytes,
        chip_flops=gpu.peak_flops(config.sharding.precision),
        settings=candidate.settings,
        peak_bytes=found.peak_bytes,
        step_s=found.step_s,
        compiled=False,
        commands={"train": command},
    )
