r"""Measure latency and memory with images split across devices (--mesh_domain), by image size.

    python benchmarks/domain_parallel.py --image_size_start 1024 --image_size_stop 4096 \
        --image_size_step 1024 --domain_sizes 1 2 4 8 --batch_size 1 2 4 8 --csv domain.csv \
        --plot domain.png
    python benchmarks/domain_parallel.py --image_size_start 1024 --domain_sizes 1 2 4 8 \
        --use_mixed_precision --tpu_topology v5e:1x1 v5e:1x2 v5e:2x2 v5e:2x4

The first command runs the program's own step (training/step.py) on CUDA, or on the CPU without a
GPU; with --backend xla, on TPUs or virtual CPU devices. The forward pass and the training step of
each configuration run in separate processes, so a configuration that does not fit becomes a row
with OOM.

With --tpu_topology nothing runs: the TPU compiler provides memory and expected step time on these
slices (run_vit_training.py --compile_only). See tools/compile_only/expected.py for its limits.

- s: wall clock per iteration, from devices idle to devices idle, averaged over --num_iterations; on
  a TPU slice, the expected step time
- GB (10^9 bytes), the largest of all processes: on CUDA, torch.cuda.max_memory_allocated of a fresh
  process; on CPUs, the growth of the process's peak memory (VmHWM) divided by its virtual devices,
  including compilation
- saved %: how much less memory a device needs than one device that has these images alone (the row
  of --domain_sizes 1)

Tables of images/s and of the memory saved, by devices and batch, follow the rows.
"""

import argparse
import itertools
import json
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
from tqdm import tqdm

from benchmarks.common import commit, failure_of, last_json, run_python
from benchmarks.domain_parallel_rows import (
    COLUMNS,
    FORWARD,
    OOM,
    TRAIN,
    Row,
    compare_with_one_device,
    devices_of,
    plot,
    tables,
    write_csv,
)
from config_fields import local_path
from run_vit_training import read_flags
from tools.compile_only.command import DOES_NOT_FIT
from training.errors import UsageError
from xla_fsdp.tpu import parse_topology

HYBRID = "hybrid_vit"


def flags_of(row: Row, options: argparse.Namespace) -> list[str]:
    """Return the program's flags for a row, whatever the backend."""
    flags = ["--model", options.model, "--image_size", str(row.size), "--batch_size"]
    flags += [str(row.batch), "--precision", _precision(options)]
    if options.model == HYBRID:
        flags += ["--dimension", str(row.dimension)]
    if row.domain > 1:
        flags += ["--mesh_domain", str(row.domain), "--domain_attention", options.domain_attention]
    if not options.fsdp:
        flags.append("--run_without_fsdp")
    for setting in options.set:
        name, is_given, value = setting.partition("=")
        flags += [f"--{name}", value] if is_given else [f"--{name}"]
    return flags


def _precision(options: argparse.Namespace) -> str:
    """Return the precision: of mixed precision that of ``torch.autocast`` on GPUs, fp16."""
    if not options.use_mixed_precision:
        return "fp32"
    is_gpu = options.backend == "cuda" and not options.tpu_topology and torch.cuda.is_available()
    return "fp16" if is_gpu else "bf16"


def measure(row: Row, what: str, options: argparse.Namespace) -> None:
    """Run one half of a row, "forward" or "train", in new processes; note what came out."""
    processes = row.ddp * row.domain
    flags = flags_of(row, options)
    torchrun: list[str] = []
    if options.backend == "xla":
        flags += ["--backend", "xla", "--cpu_devices", str(processes)]
    else:
        flags += ["--backend", "cuda", "--fsdp", "fsdp2"]
        flags += ["--compile"] if options.compile else []
        if processes > 1:
            words = f"-m torch.distributed.run --standalone --nproc-per-node {processes}"
            torchrun = words.split()
    own = {
        "what": what,
        "num_warmup": options.num_warmup,
        "num_iterations": options.num_iterations,
        "memory_limit_gb": options.memory_limit_gb,
    }
    given = [word for name, value in own.items() for word in (f"--{name}", str(value))]
    done = run_python(*torchrun, "-m", "benchmarks.domain_parallel_child", *given, *flags)
    if done.returncode:
        failure = failure_of(done)
        if failure == OOM:
            row.out_of_memory.add(what)
        else:
            row.note = failure
            tqdm.write(done.stdout + done.stderr, file=sys.stderr)
        return
    found = last_json(done.stdout)
    if "reason" in found:
        row.note = found["reason"]
        return
    row.device, row.parameters = found["device"], found["parameters"]
    row.seconds[what] = found["seconds"]
    row.memory_gb[what] = found["peak_bytes"] / 1e9


def ask_compiler(row: Row, options: argparse.Namespace) -> None:
    """Let the TPU compiler tell what a row's training step needs on its slice."""
    words = f"run_vit_training.py --compile_only --json --tpu_topology {row.on}".split()
    done = run_python(*words, *flags_of(row, options))
    if done.returncode not in (0, DOES_NOT_FIT):
        row.note = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        return
    report = json.loads(done.stdout)
    row.parameters = report["parameters"]
    row.memory_gb[TRAIN] = report["peak_hbm_bytes"] / 1e9
    if not report["fits"]:
        row.out_of_memory.add(TRAIN)
        row.note = f"does not fit in {report['hbm_capacity_bytes'] / 1e9:.1f} GB"
        return
    row.seconds[TRAIN] = report["expected_step_s"]
    row.note = (
        f"expected MFU {report['expected_mfu']:.0%}; kernels {report['expected_kernels_s']:.4g} s, "
        f"waiting {report['expected_waiting_s']:.4g} s; shortest step (roofline) "
        f"{report['roofline_step_s']:.4g} s"
    )


def rows_of(options: argparse.Namespace) -> list[Row]:
    """Return all configurations, nothing measured yet.

    Of several slices, domain sizes or batches, the combinations that are none are left out. Raises
    UsageError.
    """
    first, step = options.image_size_start, options.image_size_step
    stop = options.image_size_stop or first
    sizes = range(first, stop + 1, step)
    if not sizes:
        raise UsageError(f"--image_size_stop {stop} is below --image_size_start {first}")
    places = [(name, parse_topology(name).devices) for name in options.tpu_topology or ()]
    ways = [
        (on, devices, domain)
        for on, devices in places or [(options.backend, options.processes)]
        for domain in options.domain_sizes or [1]
    ]
    rows = []
    for on, devices, domain in ways:
        ddp = _ddp_size(options.ddp_size, domain, devices)
        for size, batch in itertools.product(sizes, options.batch_size):
            wrong = None
            if devices not in (None, ddp * domain):
                wrong = f"the number of devices, {devices}, is not {ddp} (ddp) x {domain} (domain)"
            elif batch % ddp:
                wrong = f"--batch_size {batch} is not a multiple of {ddp} (ddp)"
            if wrong and len(ways) == len(options.batch_size) == 1:
                raise UsageError(wrong)
            if not wrong:
                rows.append(Row(on, ddp, domain, options.dimension, size, batch))
    if not rows:
        raise UsageError(
            "no configuration: ddp x domain must be the number of devices, and ddp must divide "
            "--batch_size"
        )
    compare_with_one_device(rows)
    return rows


def _ddp_size(asked: int, domain: int, devices: int | None) -> int:
    if asked != -1:
        return asked
    return max(devices // domain, 1) if devices else 1


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--model", default=HYBRID, help=f"model; all but {HYBRID} are 2-D (default: {HYBRID})")
    add("--dimension", type=int, choices=(2, 3), default=2, help="image dimensions (default: 2)")
    add(
        "--image_size_start",
        type=_positive,
        default=1024,
        help="smallest image side, in pixels (default: 1024)",
    )
    add("--image_size_stop", type=_positive, help="largest image side (default: the smallest)")
    add(
        "--image_size_step",
        type=_positive,
        default=128,
        help="difference between image sides (default: 128)",
    )
    add(
        "--batch_size",
        nargs="+",
        type=_positive,
        default=[1],
        help="images on all devices, one or several values (default: 1)",
    )
    add(
        "--ddp_size",
        type=int,
        default=-1,
        help="number of image groups; -1: devices / domain size (default: -1)",
    )
    domain = parser.add_mutually_exclusive_group()
    domain.add_argument(
        "--domain_size", type=_positive, help="devices that share an image (default: 1)"
    )
    domain.add_argument(
        "--domain_sizes", nargs="+", type=_positive, help="several values of --domain_size"
    )
    add("--backend", choices=("xla", "cuda"), default="cuda", help="backend (default: cuda)")
    add("--processes", type=_positive, help="total number of devices (default: ddp x domain)")
    add(
        "--domain_attention",
        default="auto",
        metavar="FORM",
        help="same as in run_vit_training.py (default: auto)",
    )
    add(
        "--use_mixed_precision",
        action="store_true",
        help="use fp16 on GPUs, bf16 on TPUs and CPUs (default: fp32)",
    )
    add("--fsdp", action="store_true", help="shard parameters (default: plain data parallel)")
    add("--compile", action="store_true", help="compile the blocks with torch.compile")
    add("--inference_only", action="store_true", help="measure only the forward pass")
    add("--num_warmup", type=int, default=5, help="number of untimed passes (default: 5)")
    add("--num_iterations", type=_positive, default=10, help="number of timed passes (default: 10)")
    add(
        "--memory_limit_gb",
        type=float,
        default=0.0,
        help="memory limit of each process on CPUs, in GB beyond its use before the model is "
        "built; 0: no limit (default: 0)",
    )
    add(
        "--set",
        nargs="+",
        default=[],
        metavar="NAME=VALUE",
        help="more flags of run_vit_training.py, without dashes",
    )
    add("--tpu_topology", nargs="+", metavar="T", help="compile for these slices, run nothing")
    add("--csv", type=local_path, metavar="FILE", help="write the rows to this CSV file")
    add("--plot", type=local_path, metavar="FILE", help="plot the rows to this PNG file")
    options = parser.parse_args()
    if options.domain_size:
        options.domain_sizes = [options.domain_size]
    if options.compile and (options.backend == "xla" or options.tpu_topology):
        parser.error("--compile requires --backend cuda; XLA always compiles")
    if options.inference_only and options.tpu_topology:
        parser.error("--tpu_topology compiles the training step: drop --inference_only")
    if options.num_warmup < 0 or (options.ddp_size < 1 and options.ddp_size != -1):
        parser.error("--num_warmup must be 0 or more, --ddp_size must be -1, or 1 or more")
    return options


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be 1 or more, not {text}")
    return value


def run(options: argparse.Namespace, rows: list[Row]) -> None:
    """Fill the rows one after the other; print each, and keep what there is so far."""
    print(f"| {' | '.join(COLUMNS)} |", "|---" * len(COLUMNS) + "|", sep="\n", flush=True)
    halves = (FORWARD,) if options.inference_only else (FORWARD, TRAIN)
    for number, row in enumerate(tqdm(rows, dynamic_ncols=True), 1):
        if options.tpu_topology:
            ask_compiler(row, options)
        else:
            for what in halves:
                if not row.note:
                    measure(row, what, options)
        tqdm.write(row.line(), file=sys.stdout)
        sys.stdout.flush()
        if options.csv:
            write_csv(options.csv, rows[:number])


def main() -> int:
    options = parse()
    try:
        rows = rows_of(options)
    except UsageError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    # A wrong flag ends the program here, not in every row.
    asked = read_flags(flags_of(rows[0], options)).run
    precision = asked.sharding.precision
    about = f"{options.model}, {options.dimension}-D, {precision}, commit {commit()}"
    print(f"{about}, {' '.join(sys.argv[1:])}, {os.cpu_count()} cores")
    run(options, rows)
    print("", *tables(rows), sep="\n")
    if options.plot:
        plot(options.plot, rows, ", ".join([about, *devices_of(rows)]))
    nothing = [row for row in rows if not row.seconds and not row.out_of_memory]
    return 1 if nothing else 0


if __name__ == "__main__":
    sys.exit(main())
