"""``--plan --backend cuda``: numbers of GPUs, meshes and flags, by arithmetic."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from models.spec import ModelSpec
from tools.plan.plans import (
    ALWAYS,
    Outcome,
    Plan,
    Price,
    Work,
    check_prices,
    combinations,
    find_work,
    read_prices,
    tell,
    typed,
    words_of,
)
from torch_fsdp.config import TorchConfig
from torch_fsdp.devices import peak_of
from training.config import PlanConfig, RunConfig
from training.errors import UsageError
from training.mesh import Mesh, make_mesh
from training.resolve import Run, check_batch, check_rows, resolve_common, resolve_model
from training.step_sizes import StepSizes, state_bytes, step_sizes

# ------------------------------------------------------------------------------------------------
# Bytes and seconds of a training step on NVIDIA GPUs by arithmetic: memory, and a roofline.
#
# Nothing of it is compiled or measured. A step takes the longest of what its products, its memory
# traffic and its exchanges take, at the shares below of what the data sheets promise; they are
# assumptions of what PyTorch reaches with bf16, not fitted on anything.


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
    shape: StepSizes,
    gpu: Gpu,
    mesh: Mesh,
    batch_size: int,
    passes: int,
    policy: str,
    precision: str,
    of_parameter: int,
) -> Estimate:
    """Return what a step with ZeRO-3 is expected to need.

    ``of_parameter``: the bytes of a parameter and of what is kept beside it.
    """
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


def _exchanged_s(shape: StepSizes, gpu: Gpu, mesh: Mesh, passes: int, size: int) -> float:
    """Return the seconds of gathering weights twice and reducing gradients, in every pass."""
    over = mesh.fsdp * mesh.domain
    received = shape.parameters * (over - 1) / over * (2 * size + _FP32)
    within = passes * received / (gpu.nvlink if over <= NODE else gpu.network)
    copies = 2 * (mesh.dcn - 1) / mesh.dcn * _FP32 * shape.parameters / over
    return within + copies / (gpu.nvlink if mesh.devices <= NODE else gpu.network)


# ------------------------------------------------------------------------------------------------


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

    Raises UsageError.
    """
    asked = config.planning
    prices = read_prices(asked.price)
    check_prices(prices, tuple(gpu.name for gpu in GPUS), asked)
    if config.sharding.mesh_tensor > 1:
        raise UsageError(
            f"--mesh_tensor {config.sharding.mesh_tensor} requires --backend xla, this is cuda"
        )
    resolve_common(config)  # for its checks
    config, model = resolve_model(config)
    work = find_work(config, model)
    plans: dict[tuple[str, int], Plan] = {}
    refusals = []
    for gpu, number, chosen in _candidates(config, own):
        try:
            plan = _plan(config, own, model, gpu, number, chosen, work, prices)
        except UsageError as refused:
            refusals.append(refused)
            continue
        fits = plan.peak_bytes <= plan.capacity_bytes
        in_time = plan.hours <= (asked.hours or math.inf)
        best = plans.get((gpu.name, number))
        if fits and in_time and (best is None or plan.step_s < best.step_s):
            plans[gpu.name, number] = plan
    if refusals and len(refusals) == len(list(_candidates(config, own))):
        raise refusals[-1]
    outcome = Outcome(
        config=config,
        what=f"{model.name}, {model.parameter_count:,} parameters, on GPUs (NOT COMPILED)",
        work=work,
        prices=prices,
        plans=list(plans.values()),
        notes=[_NOT_COMPILED],
        picture=Path(asked.plan_dir) / "gpu.png",
    )
    return tell(outcome)


def _candidates(config: RunConfig, own: TorchConfig) -> Iterator[tuple[Gpu, int, dict[str, Any]]]:
    most = config.planning.chips_at_most
    numbers = [2**power for power in range(most.bit_length())]
    for gpu in GPUS:
        for number in numbers:
            for chosen in combinations(CHOICES, config, own):
                if number % chosen["mesh_dcn"] == 0:
                    yield gpu, number, chosen


def _plan(
    config: RunConfig,
    own: TorchConfig,
    model: ModelSpec,
    gpu: Gpu,
    number: int,
    chosen: dict[str, Any],
    work: Work,
    prices: dict[str, Price],
) -> Plan:
    """Return one plan, whether it fits or not. Raises UsageError where the program refuses it."""
    precision = config.sharding.precision
    sharding = replace(config.sharding, grad_ckpt=chosen["grad_ckpt"], mesh_dcn=chosen["mesh_dcn"])
    data = replace(config.data, grad_accum_steps=chosen["grad_accum_steps"])
    run_config = replace(
        config, backend="cuda", sharding=sharding, data=data, planning=PlanConfig(), plan=False
    )
    mesh = make_mesh(sharding, number)
    check_rows(mesh, model)
    check_batch(Run(run_config, own, model, mesh))
    found: Estimate = estimate(
        step_sizes(model),
        gpu,
        mesh,
        work.batch_size,
        chosen["grad_accum_steps"],
        chosen["grad_ckpt"],
        precision,
        state_bytes(config),
    )
    at_peak_s = model.train_flops_per_image * work.batch_size / number
    return Plan(
        hardware=f"{number} x {gpu.name}",
        kind=gpu.name,
        chips=number,
        settings=_settings(mesh, chosen),
        peak_bytes=found.peak_bytes,
        capacity_bytes=USABLE * gpu.memory_bytes,
        step_s=found.step_s,
        mfu=at_peak_s / gpu.peak_flops(precision) / found.step_s,
        compiled=False,
        commands={"train": _command(number, run_config, own)},
        work=work,
        price=prices.get(gpu.name),
    )


def _settings(mesh: Mesh, chosen: dict[str, Any]) -> str:
    axes = " x ".join(f"{axis} {size}" for axis, size in mesh.axis_sizes.items())
    passes = chosen["grad_accum_steps"]
    return f"{axes}, {chosen['grad_ckpt']}" + (f", {passes} passes" if passes > 1 else "")


def _command(number: int, config: RunConfig, own: TorchConfig) -> str:
    """Return the line that starts the training, to be typed on each node."""
    nodes = math.ceil(number / NODE)
    start = f"NPROC_PER_NODE={min(number, NODE)}"
    if nodes > 1:  # each node has a number of its own
        start += f" NNODES={nodes} NODE_RANK=0 MASTER_ADDR=node1"
    words = words_of(config, own, without=("backend", "json"), always=ALWAYS)
    return f"{start} launch/torchrun.sh {typed(words)}"
