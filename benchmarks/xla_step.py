r"""Time one training step of the XLA backend (trace, compile, run), compared with plain PyTorch.

    python benchmarks/xla_step.py --devices 1 2 4 --forms plain spmd wrapper nested fsdp2 \
        --model vit_tiny_patch16_224 --batch_size 16

You can add any flag of run_vit_training.py. Each configuration runs in a new process on
one batch; the configurations take turns ``--repeats`` times, and the table shows
medians. Columns: seconds per step (wall clock, device idle to device idle), the ratio to
the first row, seconds to trace the graph on the host, seconds to compile the step
(once), and executions and compilations per step after the first. ``unrolled`` is spmd
without the scan over blocks; ``wrapper`` is torch_xla's SpmdFullyShardedDataParallel
instead of this program's sharding marks. Without XLA, in one process on all cores:
``plain``, timm's model in a plain loop with fused AdamW and gradient clipping, and
``fsdp2``, the FSDP2 backend; both require a model of timm's class VisionTransformer.
"""

import argparse
import functools
import json
import os
import platform
import statistics
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.common import commit, last_json, markdown, run_python

FORMS = {
    "spmd": "--xla_fsdp spmd",
    "unrolled": "--xla_fsdp spmd --no-scan_blocks",
    "wrapper": "--xla_fsdp spmd",
    "nested": "--xla_fsdp nested",
}
WITHOUT_XLA = {"plain": "plain", "fsdp2": "own"}
"""Form -> the loop of benchmarks/gpu_step_child.py."""
COLUMNS = ("s_per_step", "trace_s", "compile_s", "executions", "compilations")


def measure(run, backend, *, steps: int, wrapper: bool) -> None:
    """Measure one form in this process, and print one JSON line."""
    import torch
    import torch.nn.functional as F
    import torch_xla.debug.metrics as met

    from training.optimizers import all_by_adamw
    from training.schedule import StepRates

    spec, optimizer = run.model, run.config.optimizer
    model = spec.build()
    initialize = functools.partial(spec.initialize, seed=run.config.seed)
    if wrapper:
        use_torch_xlas_wrapper(backend)
    sharded = backend.shard(model, list(spec.units(model)), initialize)
    updates = all_by_adamw(spec, optimizer.weight_decay)
    backend.build_optimizer(updates, betas=(0.9, 0.999), eps=1e-8)
    shape = (run.config.data.batch_size, *spec.sizes.input_shape)
    batch = {"image": torch.zeros(shape), "target": torch.zeros(shape[0], dtype=torch.int64)}
    images, labels = backend.put(batch, {}).values()

    # Where the graph is complete and about to be handed to the compiler or the device.
    end_step, handed_over = backend.end_step, [0.0]

    def timed_end_step() -> None:
        handed_over[0] = time.perf_counter()
        end_step()

    backend.end_step = timed_end_step

    def step() -> tuple[float, float]:
        start = time.perf_counter()
        loss = F.cross_entropy(sharded(images).float(), labels)
        backend.backward(loss, is_last=True)
        backend.optimizer_step(StepRates(optimizer.lr), optimizer.clip_grad_norm, loss)
        backend.wait()
        return time.perf_counter() - start, handed_over[0] - start

    def compile_seconds() -> float:
        return met.metric_data("CompileTime")[1] / 1e9

    before = compile_seconds()
    step()
    compiled = compile_seconds() - before
    step()
    counted = backend.counters()
    times = [step() for _ in range(steps)]
    after = backend.counters()
    seconds, trace = (statistics.median(column) for column in zip(*times, strict=True))
    print(
        json.dumps(
            {
                "s_per_step": seconds,
                "trace_s": trace,
                "compile_s": compiled,
                "executions": (after["executions"] - counted["executions"]) / steps,
                "compilations": (after["compilations"] - counted["compilations"]) / steps,
            }
        )
    )


def use_torch_xlas_wrapper(backend) -> None:
    """Let torch_xla's SPMD wrapper place the blocks and the root instead of our marks."""
    from torch_xla.distributed.fsdp import checkpoint_module
    from torch_xla.experimental.spmd_fully_sharded_data_parallel import SpmdFullyShardedDataParallel

    from models.initialize import fill_buffers
    from xla_fsdp.around_blocks import compute_in_bf16

    plan, layout = backend._plan, backend._layout

    def zeros_like(parameter, dtype):  # as the wrapper shards parameters
        spec = (("fsdp",), *[()] * (parameter.dim() - 1))
        return layout.zeros(parameter.shape, spec, dtype)

    def shard(model, units, initialize):
        """Wrap the blocks one by one, which then compute one by one, and the model."""
        for name, unit in units:
            initialize(unit, name)
            fill_buffers(unit, backend.constant)
            if unit is not model and plan.remat == "full":
                checkpoint_module(unit)
            wrapped = SpmdFullyShardedDataParallel(unit, mesh=layout.xla_mesh)
            if unit is not model:
                model.set_submodule(name, wrapped)
            backend._break_graph(wait=True)
        if plan.bf16:
            compute_in_bf16(wrapped)
        backend._model = wrapped
        return wrapped

    backend.shard = shard
    backend._zeros_like = zeros_like
    backend._plain_names = lambda name: [name.replace("_orig_module.", "")]


def run_child(form: str, devices: int, steps: int, flags: list[str]) -> dict[str, float]:
    if loop := WITHOUT_XLA.get(form):
        words = f"-m benchmarks.gpu_step_child --loop {loop} --warmup 2 --steps {steps}"
        command = [*words.split(), *flags, "--backend", "cuda"]
    else:
        words = f"--child {form} --devices {devices} --steps {steps}"
        command = [__file__, *words.split(), *flags]
    done = run_python(*command)
    if done.returncode:
        sys.exit(f"{' '.join(command)}\n{done.stdout}{done.stderr}")
    return last_json(done.stdout)


def table(rows: list[tuple[str, int, list[dict[str, float]]]]) -> str:
    cells = [["form", "devices", "s/step", "ratio", "trace s", "compile s", *COLUMNS[3:]]]
    first: float | None = None
    for form, devices, results in rows:
        medians = {
            name: statistics.median(r[name] for r in results)
            for name in COLUMNS
            if name in results[0]
        }
        first = first or medians["s_per_step"]
        seconds = [f"{medians['s_per_step']:.3f}", f"{medians['s_per_step'] / first:.2f}"]
        counted = [""] * 4
        if "trace_s" in medians:
            counted = [f"{medians['trace_s']:.3f}", f"{medians['compile_s']:.1f}"]
            counted += [f"{medians[name]:g}" for name in COLUMNS[3:]]
        cells.append([form, str(devices), *seconds, *counted])
    return "\n".join(markdown(cells))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument(
        "--devices",
        type=int,
        nargs="+",
        default=[1, 2, 4],
        help="numbers of devices (default: 1 2 4)",
    )
    parser.add_argument(
        "--forms",
        nargs="+",
        choices=[*FORMS, *WITHOUT_XLA],
        default=["plain", "spmd", "unrolled", "nested", "fsdp2"],
        help="configurations to time; nested only on 1 CPU device, plain and fsdp2 only on the CPU "
        "(default: plain spmd unrolled nested fsdp2)",
    )
    parser.add_argument("--steps", type=int, default=10, help="number of timed steps (default: 10)")
    parser.add_argument(
        "--repeats", type=int, default=3, help="number of processes per row (default: 3)"
    )
    parser.add_argument("--child", choices=FORMS, help=argparse.SUPPRESS)
    options, flags = parser.parse_known_args()
    if not any(flag.split("=")[0] == "--model" for flag in flags):
        flags = ["--model", "vit_tiny_patch16_224", "--batch_size", "16", *flags]

    if options.child:
        from run_vit_training import read_flags
        from xla_fsdp.launch_xla import launch
        from xla_fsdp.resolve_xla import resolve

        count = str(options.devices[0])
        sharding = FORMS[options.child].split()
        asked = read_flags([*flags, *sharding, "--cpu_devices", count])
        body = functools.partial(measure, steps=options.steps, wrapper=options.child == "wrapper")
        launch(body, resolve(asked.run, asked.xla))
        return

    on_cpu = os.environ.setdefault("PJRT_DEVICE", "CPU") == "CPU"
    rows: list[tuple[str, int, list[dict[str, float]]]] = [
        (form, 1 if form in WITHOUT_XLA else devices, [])
        for form in options.forms
        for devices in options.devices
        if not (form == "nested" and on_cpu and devices > 1)
        and not (form in WITHOUT_XLA and (not on_cpu or devices != options.devices[0]))
    ]
    for repeat in range(options.repeats):
        for form, devices, results in rows:
            print(f"repeat {repeat + 1}: {form}, {devices} device(s)", file=sys.stderr, flush=True)
            results.append(run_child(form, devices, options.steps, flags))
    print(
        f"commit {commit()}, {' '.join(flags)}, {options.repeats} x {options.steps} steps, "
        f"{os.cpu_count()} cores, {platform.machine()}"
    )
    print(table(rows))


if __name__ == "__main__":
    main()
