"""Time one training step of the GPU backend, compared with a plain PyTorch loop.

    python benchmarks/gpu_step.py --json gpu.json --plot gpu.png

A variant is a loop and changes to it, joined by "+". The loop `timm` is what a timm user runs:
timm's model, autocast, fused AdamW, gradient clipping, no sharding, no activation checkpointing
(with --objective dino or mae, the same for these objectives). `open_clip` is the step of open_clip,
which must be installed, with --objective siglip or clip: DDP, recomputing as --grad_ckpt says.
`fsdp2` and `megatron` run the step of training/loop.py. Changes:

- compile: torch.compile, of the whole model in timm's and open_clip's loops, else of each block;
  max-autotune, reduce-overhead: that mode of it (timm, open_clip)
- te, fp8, fp8-rowwise, fp8-delayed, reduce-bf16, unsharded: --block te, --fp8, --reduce_dtype bf16,
  --zero_dp_strategy 0
- tuned, gemm: Inductor autotunes the configurations of its kernels; matrix products, too
- cudagraph: the step is one CUDA graph, with constant random numbers and learning rates
- flash, cudnn: that implementation of attention, in place of PyTorch's choice
- bias, gelu, norm: candidates of benchmarks/gpu_candidates.py

Each measurement runs in a new process (under torchrun with --nproc-per-node), and the variants of a
model take turns --repeats times. The table shows medians:

- s/step: wall clock per step, from device idle to device idle, averaged over --steps
- spread: the difference between the longest and the shortest s/step of the repeats, over the median
- ratio: images/s relative to the first variant with the same model and batch in the same run
- MFU: images/s x models.spec.train_flops_per_image (matrix products of the forward and backward
  pass, without recomputation) over the dense peak in torch_fsdp/devices.py for the precision; with
  FP8, over the FP8 peak
- peak GiB: torch.cuda.max_memory_allocated of a timed step; on the CPU, how far the peak memory of
  the first process grows while it builds the model and runs its steps

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
LOOPS = {
    "timm": "--loop plain --fsdp fsdp2",  # for the process group; it shards nothing
    "fsdp2": "--loop own --fsdp fsdp2",
    "megatron": "--loop own --fsdp megatron",
    "open_clip": "--loop plain --fsdp fsdp2",
}
PLAIN_LOOPS = ("timm", "open_clip")
PLAIN_CHANGES = {
    "compile": "--compile_mode default",
    "max-autotune": "--compile_mode max-autotune",
    "reduce-overhead": "--compile_mode reduce-overhead",
    "flash": "--attention flash",
    "cudnn": "--attention cudnn",
}
CHANGES = {
    "compile": "--compile",
    "te": "--block te",
    "fp8": "--fp8 current",
    "fp8-rowwise": "--fp8 rowwise",
    "fp8-delayed": "--fp8 delayed",
    "reduce-bf16": "--reduce_dtype bf16",
    "unsharded": "--zero_dp_strategy 0",
    "cudagraph": "--cudagraph",
    "tuned": "",
    "gemm": "",
    "flash": "--attention flash",
    "cudnn": "--attention cudnn",
    "bias": "--change bias",
    "gelu": "--change gelu",
    "norm": "--change norm",
}
ENVIRONMENT = {
    "tuned": {"TORCHINDUCTOR_COORDINATE_DESCENT_TUNING": "1"},
    "gemm": {"TORCHINDUCTOR_MAX_AUTOTUNE_GEMM": "1", "ENABLE_PERSISTENT_TMA_MATMUL": "1"},
}
DEFAULT_VARIANTS = (
    "timm+compile timm fsdp2 megatron fsdp2+compile megatron+compile fsdp2+compile+fp8 "
    "fsdp2+compile+fp8-rowwise megatron+compile+fp8 fsdp2+te fsdp2+te+fp8"
).split()
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
COLUMNS = (
    "model",
    "variant",
    "batch per GPU",
    "s/step",
    "spread",
    "images/s",
    "ratio",
    "MFU",
    "peak GiB",
)


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

    @property
    def flags(self) -> list[str]:
        """The flags of gpu_step_child.py for the variant."""
        loop, *changes = self.variant.split("+")
        known = PLAIN_CHANGES if loop in PLAIN_LOOPS else CHANGES
        words = " ".join([LOOPS[loop], *(known[change] for change in changes)]).split()
        if loop not in PLAIN_LOOPS and "compile" not in changes:
            words.append("--no-compile")
        return words

    @property
    def environment(self) -> dict[str, str]:
        changes = self.variant.split("+")[1:]
        return {k: v for change in changes for k, v in ENVIRONMENT.get(change, {}).items()}

    def line(self) -> str:
        start = f"| {self.model} | {self.variant} | {self.batch_size} |"
        if self.failure:
            return f"{start} {self.failure} |" + " |" * (len(COLUMNS) - 4)
        seconds, throughput = self.median("s_per_step"), self.median("images_per_s")
        memory, measured = self.median("peak_memory"), [r["s_per_step"] for r in self.results]
        spread = None
        if seconds and len(measured) > 1:
            spread = (max(measured) - min(measured)) / seconds
        cells = (
            formatted(seconds, ".4f"),
            formatted(spread, ".1%"),
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
        *row.flags,
        environment=row.environment,
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
    for repeat in range(options.repeats):
        for row in rows:
            bar.set_description(f"{row.model} {row.variant}, {repeat + 1} of {options.repeats}")
            if not row.failure:
                measure_once(row, options, flags)
            bar.update()
            if repeat == options.repeats - 1:
                throughput, of_first = row.median("images_per_s"), rows[0].median("images_per_s")
                if throughput and of_first and not (row.failure or rows[0].failure):
                    row.ratio = throughput / of_first
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
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def plot(path: Path, rows: list[Row], about: dict[str, Any]) -> None:
    """Draw bars of the ratio to the first variant, a group per model; what did not run says so."""
    plt = pyplot()
    models = list(dict.fromkeys(row.model for row in rows))
    variants = list(dict.fromkeys(row.variant for row in rows))
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
    axes.set_ylabel(f"images/s relative to {variants[0]}")
    device = next((row.results[0]["device"] for row in rows if row.results), "nothing ran")
    axes.set_title(f"One training step, {about['processes']} x {device}, {about['commit']}")
    axes.legend(fontsize=8, loc="upper left", bbox_to_anchor=(1, 1))
    figure.savefig(path, dpi=150, bbox_inches="tight")


def _batch(rows: list[Row], model: str) -> int:
    return next(row.batch_size for row in rows if row.model == model)


def model(text: str) -> str:
    """Parse the name of a model: a preset, or timm's."""
    if text not in PRESETS and not text.startswith("timm/"):
        raise argparse.ArgumentTypeError(
            f"{text!r} is neither timm/NAME nor one of {', '.join(PRESETS)}"
        )
    return text


def variant(text: str) -> str:
    """Parse the name of a variant."""
    loop, *changes = text.split("+")
    known = PLAIN_CHANGES if loop in PLAIN_LOOPS else CHANGES
    if loop not in LOOPS:
        raise argparse.ArgumentTypeError(f"{text!r} must start with {', '.join(LOOPS)}")
    for change in changes:
        if change not in known:
            raise argparse.ArgumentTypeError(
                f"{text!r}: {change!r} is not one of {', '.join(known)}"
            )
    replaced = [change for change in changes if change == "te" or change.startswith("fp8")]
    changed = [change for change in changes if known[change].startswith("--change")]
    if replaced and changed:
        raise argparse.ArgumentTypeError(
            f"{text!r}: {changed[0]} changes the blocks that {replaced[0]} replaces: drop one"
        )
    return text


def parse() -> tuple[argparse.Namespace, list[str]]:
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--models", type=model, nargs="+", metavar="NAME", default=DEFAULT_MODELS)
    parser.add_argument(
        "--batch_sizes",
        type=int,
        nargs="+",
        help="images per GPU, one number per model (default: "
        + ", ".join(f"{model} {size}" for model, size in BATCH_SIZES.items())
        + ")",
    )
    parser.add_argument(
        "--variants",
        type=variant,
        nargs="+",
        metavar="LOOP[+CHANGE...]",
        default=DEFAULT_VARIANTS,
        help="variants, the first of which others are compared with (default: "
        + " ".join(DEFAULT_VARIANTS)
        + ")",
    )
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
    variants = list(dict.fromkeys(options.variants))
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
