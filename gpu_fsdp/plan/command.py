"""``--plan --backend cuda``: numbers of GPUs, meshes and flags, by arithmetic."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from gpu_fsdp.config import GpuConfig
from gpu_fsdp.plan.model import GPUS, NODE, POLICIES, USABLE, Estimate, Gpu, estimate
from models.spec import ModelSpec
from training.errors import UsageError
from training.mesh import Mesh, make_mesh
from training.options.config import RunConfig
from training.options.resolve import Run, check_batch, check_rows, resolve_common, resolve_model
from training.plan.choices import check_prices, combinations
from training.plan.command_lines import ALWAYS, typed, words_of
from training.plan.config import PlanConfig
from training.plan.outcome import Outcome, tell
from training.plan.plans import Plan
from training.plan.prices import Price, read_prices
from training.plan.shape import shape_of, state_bytes
from training.plan.work import Work, find_work

CHOICES: dict[str, tuple[Any, ...]] = {
    "grad_ckpt": tuple(POLICIES),
    "grad_accum_steps": (1, 2, 4, 8, 16),
    "mesh_dcn": (1, 2, 4, 8, 16, 32),
}
"""The values of each flag that are tried, by its field."""
_NOT_COMPILED = (
    "by a model of memory and a roofline: nothing was compiled or measured, and what reaches the "
    "links and the GPUs is assumed (gpu_fsdp/plan/model.py)"
)


def plan_gpus(config: RunConfig, own: GpuConfig) -> int:
    """Print the plans for GPUs, or with ``--json`` their figures, and return the exit code.

    Raises UsageError.
    """
    asked = config.planning
    prices = read_prices(asked.price)
    check_prices(prices, tuple(gpu.name for gpu in GPUS), asked)
    if config.sharding.mesh_tensor > 1:
        raise UsageError(
            f"--mesh_tensor {config.sharding.mesh_tensor} needs --backend xla, this is cuda"
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


def _candidates(config: RunConfig, own: GpuConfig) -> Iterator[tuple[Gpu, int, dict[str, Any]]]:
    most = config.planning.chips_at_most
    numbers = [2**power for power in range(most.bit_length())]
    for gpu in GPUS:
        for number in numbers:
            for chosen in combinations(CHOICES, config, own):
                if number % chosen["mesh_dcn"] == 0:
                    yield gpu, number, chosen


def _plan(
    config: RunConfig,
    own: GpuConfig,
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
        shape_of(model),
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
    axes = " x ".join(f"{axis} {size}" for axis, size in mesh.live.items())
    passes = chosen["grad_accum_steps"]
    return f"{axes}, {chosen['grad_ckpt']}" + (f", {passes} passes" if passes > 1 else "")


def _command(number: int, config: RunConfig, own: GpuConfig) -> str:
    """Return the line that starts the training, to be typed on each node."""
    nodes = math.ceil(number / NODE)
    start = f"NPROC_PER_NODE={min(number, NODE)}"
    if nodes > 1:  # each node has a number of its own
        start += f" NNODES={nodes} NODE_RANK=0 MASTER_ADDR=node1"
    words = words_of(config, own, without=("backend", "json"), always=ALWAYS)
    return f"{start} launch/torchrun.sh {typed(words)}"
