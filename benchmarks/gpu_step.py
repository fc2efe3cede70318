"""Time one training step of the GPU backend, compared with timm's plain training loop.

    python benchmarks/gpu_step.py --json gpu.json --plot gpu.png

`timm` is what a timm user runs: timm's model, autocast, fused AdamW, gradient clipping, no
sharding, no activation checkpointing. `timm+compile` adds timm's --torchcompile, and
`timm+max-autotune` that mode of torch.compile. All other variants run the step of training/loop.py;
`tuned` lets Inductor autotune its kernels. Each measurement runs in a new process (under torchrun
with --nproc-per-node), and the variants of a model take turns --repeats times. The table shows
medians:

- s/step: wall clock per step, from device idle to device idle, averaged over --steps
- ratio: images/s relative to timm's loop with the same model and batch in the same run
- MFU: images/s x models.spec.train_flops_per_image (matrix products of the forward and backward
  pass, without recomputation) over the dense peak in torch_fsdp/devices.py for the precision; with
  FP8, over the FP8 peak
- peak GiB: torch.cuda.max_memory_allocated of a timed step

A variant that does not fit shows OOM; one that cannot run here shows the reason. You can add any
flag of run_vit_training.py; the defaults are --precision bf16, --grad_ckpt none and a small --lr.
"""

import argparse
import json
import os
import platform
import re
import statistics
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tqdm import tqdm

from benchmarks.common import commit, failure_of, last_json, run_python
from config_fields import local_path
from models.config import PRESETS
from run_vit_training import read_flags
from training.logs.figures import pyplot

PRESET_FLAGS = "--precision bf16 --grad_ckpt none --lr 1e-5".split()
VARIANTS = {
    "timm": "--fsdp fsdp2",  # for the process group; its loop shards nothing
    "timm+compile": "--fsdp fsdp2",
    "timm+max-autotune": "--fsdp fsdp2",
    "fsdp2": "--fsdp fsdp2",
    "megatron": "--fsdp megatron",
    "fsdp2+compile": "--fsdp fsdp2 --compile",
    "fsdp2+compile+tuned": "--fsdp fsdp2 --compile",
    "megatron+compile": "--fsdp megatron --compile",
    "fsdp2+compile+fp8": "--fsdp fsdp2 --compile --fp8 current",
    "fsdp2+compile+fp8-rowwise": "--fsdp fsdp2 --compile --fp8 rowwise",
    "megatron+compile+fp8": "--fsdp megatron --compile --fp8 current",
    "te": "--fsdp fsdp2 --block te",
    "megatron+te": "--fsdp megatron --block te",
    "te+fp8": "--fsdp fsdp2 --block te --fp8 delayed",
    "te+fp8-current": "--fsdp fsdp2 --block te --fp8 current",
}
ENVIRONMENT = {
    "fsdp2+compile+tuned": {
        "TORCHINDUCTOR_COORDINATE_DESCENT_TUNING": "1",
        "TORCHINDUCTOR_MAX_AUTOTUNE": "1",
    }
}
# Images a GPU that leave room in 141 GB without checkpointing; multiples of 32 suit FP8.
BATCH_SIZES = {
    "vit_tiny_patch16_224": 1024,
    "vit_small_patch16_224": 1024,
    "vit_base_patch16_224": 512,
    "vit_large_patch16_224": 256,
    "vit_huge_patch14_224": 128,
    "vit_giant_patch14_224": 64,
    "vit_gigantic_patch14_224": 32,
}
DEFAULT_MODELS = [name for name in BATCH_SIZES if re.search("base|large|huge|giant_", name)]
PACKAGES = ("torch", "timm", "megatron-fsdp", "transformer-engine", "torchao")
COLUMNS = ("model", "variant", "batch per GPU", "s/step", "images/s", "ratio", "MFU", "peak GiB")


@dataclass
class Row:
    """Holds, for one variant of one model, what was measured, or why nothing was."""

    model: str
    batch_size: int
    variant: str
    results: list[dict[str, Any]] = field(default_factory=list)
    failure: str = ""
    ratio: float | None = None

    def median(self, name: str) -> float | None:
        values = [result[name] for result in self.results if result[name] is not None]
        return statistics.median(values) if values else None

    def line(self) -> str:
        start = f"| {self.model} | {self.variant} | {self.batch_size} |"
        if self.failure:
            return f"{start} {self.failure} |" + " |" * (len(COLUMNS) - 4)
        seconds, throughput = self.median("s_per_step"), self.median("images_per_s")
        memory = self.median("peak_memory")
        cells = (
            formatted(seconds, ".4f"),
            formatted(throughput, ".1f"),
            formatted(self.ratio, ".2f"),
            formatted(self.median("mfu"), ".1%"),
            formatted(memory and memory / 2**30, ".1f"),
        )
        return f"{start} {' | '.join(cells)} |"


def formatted(value: float | None, spec: str) -> str:
    return "" if value is None else format(value, spec)


def measure_once(row: Row, options: argparse.Namespace, flags: list[str]) -> None:
    """Run ``row``'s variant in a new process; add what it measured, or note its failure."""
    processes = options.nproc_per_node
    torchrun = f"-m torch.distributed.run --standalone --nproc-per-node {processes}".split()
    done = run_python(
        *(torchrun if processes > 1 else ()),
        "-m",
        "benchmarks.gpu_step_child",
        "--loop",
        row.variant if row.variant.startswith("timm") else "own",
        "--warmup",
        str(options.warmup),
        "--steps",
        str(options.steps),
        *PRESET_FLAGS,
        *flags,
        "--backend",
        "cuda",
        "--model",
        row.model,
        "--batch_size",
        str(row.batch_size * processes),
        *VARIANTS[row.variant].split(),
        environment=ENVIRONMENT.get(row.variant, {}),
    )
    if done.returncode == 0:
        result = last_json(done.stdout)
        if "reason" in result:
            row.failure = result["reason"]
        else:
            row.results.append(result)
    else:
        row.failure = failure_of(done)
        if row.failure != "OOM":
            tqdm.write(done.stdout + done.stderr, file=sys.stderr)


def measure_model(
    rows: list[Row], options: argparse.Namespace, flags: list[str], bar: tqdm
) -> Iterator[Row]:
    """Measure all variants of a model in turn, several times; yield each when it is complete."""
    timm_throughput = None
    for repeat in range(options.repeats):
        for row in rows:
            bar.set_description(f"{row.model} {row.variant}, {repeat + 1} of {options.repeats}")
            if not row.failure:
                measure_once(row, options, flags)
            bar.update()
            if repeat == options.repeats - 1:
                throughput = row.median("images_per_s")
                if row.variant == "timm":
                    timm_throughput = throughput
                if throughput and timm_throughput and not row.failure:
                    row.ratio = throughput / timm_throughput
                yield row


def describe_run(options: argparse.Namespace, flags: list[str]) -> dict[str, Any]:
    versions = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            versions[package] = "none"
    return {
        "commit": commit(),
        "machine": f"{platform.platform()}, {os.cpu_count()} cores",
        "versions": versions,
        "flags": [*PRESET_FLAGS, *flags],
        "processes": options.nproc_per_node,
        "warmup": options.warmup,
        "steps": options.steps,
        "repeats": options.repeats,
    }


def write_json(path: Path, about: dict[str, Any], rows: list[Row]) -> None:
    content = {**about, "rows": [asdict(row) for row in rows]}
    path.write_text(json.dumps(content, indent=2) + "\n")


def plot(path: Path, rows: list[Row], about: dict[str, Any]) -> None:
    """Draw bars of the ratio to timm's loop, a group a model; what did not run says so."""
    plt = pyplot()
    models = list(dict.fromkeys(row.model for row in rows))
    variants = [name for name in VARIANTS if any(row.variant == name for row in rows)]
    figure, axes = plt.subplots(figsize=(2 + 0.6 * len(models) * (len(variants) + 1), 5))
    width = 1 / (len(variants) + 1)
    for index, variant in enumerate(variants):
        own = {row.model: row for row in rows if row.variant == variant}
        places = [place + (index - (len(variants) - 1) / 2) * width for place in range(len(models))]
        bars = axes.bar(
            places,
            [own[m].ratio or 0 for m in models],
            width,
            label=variant,
            color=plt.colormaps["tab20"](index),
        )
        texts = [
            f"{own[m].ratio:.2f}"
            if own[m].ratio
            else "OOM"
            if own[m].failure == "OOM"
            else "not run"
            for m in models
        ]
        ground = {"facecolor": "white", "edgecolor": "none", "pad": 1}  # over the line at 1
        axes.bar_label(bars, texts, rotation=90, padding=3, fontsize=8, bbox=ground)
    axes.axhline(1, color="black", linewidth=0.8)
    axes.margins(y=0.2)
    axes.set_xticks(range(len(models)), [f"{m}, batch {_batch(rows, m)}" for m in models])
    axes.set_ylabel("images/s relative to timm's loop")
    device = next((row.results[0]["device"] for row in rows if row.results), "nothing ran")
    axes.set_title(f"One training step, {about['processes']} x {device}, {about['commit']}")
    axes.legend(fontsize=8, loc="upper left", bbox_to_anchor=(1, 1))
    figure.savefig(path, dpi=150, bbox_inches="tight")


def _batch(rows: list[Row], model: str) -> int:
    return next(row.batch_size for row in rows if row.model == model)


def parse() -> tuple[argparse.Namespace, list[str]]:
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--models", nargs="+", choices=PRESETS, default=DEFAULT_MODELS)
    parser.add_argument(
        "--batch_sizes",
        type=int,
        nargs="+",
        help="images per GPU, one number per model (default: "
        + ", ".join(f"{model} {size}" for model, size in BATCH_SIZES.items())
        + ")",
    )
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=list(VARIANTS))
    parser.add_argument("--nproc-per-node", type=int, default=1, help="number of GPUs (default: 1)")
    parser.add_argument(
        "--warmup", type=int, default=5, help="number of untimed steps (default: 5)"
    )
    parser.add_argument("--steps", type=int, default=20, help="number of timed steps (default: 20)")
    parser.add_argument(
        "--repeats", type=int, default=3, help="number of processes per row (default: 3)"
    )
    parser.add_argument(
        "--json", type=local_path, metavar="FILE", help="write all measurements to this JSON file"
    )
    parser.add_argument(
        "--plot", type=local_path, metavar="FILE", help="plot the ratios to this PNG file"
    )
    options, flags = parser.parse_known_args()
    for flag in ("--model", "--batch_size", "--fsdp", "--backend"):
        if any(given.split("=")[0] == flag for given in flags):
            parser.error(f"{flag} is set by --models, --batch_sizes and --variants: drop it")
    if min(options.steps, options.repeats) < 1 or options.warmup < 0:
        parser.error("--steps and --repeats must be 1 or more, --warmup 0 or more")
    if options.plot and "timm" not in options.variants:
        parser.error("--plot shows ratios to timm's loop: add timm to --variants")
    read_flags(flags)  # a wrong flag ends the program here, not in every row
    if options.batch_sizes is None:
        unknown = [model for model in options.models if model not in BATCH_SIZES]
        if unknown:
            parser.error(f"no default batch size for {unknown[0]}: set --batch_sizes")
        options.batch_sizes = [BATCH_SIZES[model] for model in options.models]
    if len(options.batch_sizes) != len(options.models):
        parser.error("--batch_sizes requires one number per model")
    return options, flags


def main() -> None:
    options, flags = parse()
    variants = [name for name in VARIANTS if name in options.variants]  # timm's loop first
    rows: list[Row] = []
    about = describe_run(options, flags)
    print(
        f"commit {about['commit']}, {' '.join(about['flags'])}, {options.nproc_per_node} "
        f"process(es), {options.repeats} x {options.steps} steps"
    )
    print(f"| {' | '.join(COLUMNS)} |", "|---" * len(COLUMNS) + "|", sep="\n", flush=True)
    total = len(options.models) * len(variants) * options.repeats
    with tqdm(total=total, dynamic_ncols=True) as bar:
        for model, batch_size in zip(options.models, options.batch_sizes, strict=True):
            of_model = [Row(model, batch_size, variant) for variant in variants]
            rows += of_model
            for row in measure_model(of_model, options, flags, bar):
                tqdm.write(row.line(), file=sys.stdout)
                sys.stdout.flush()
                if options.json:
                    write_json(options.json, about, rows)
    if options.plot:
        plot(options.plot, rows, about)


if __name__ == "__main__":
    main()
