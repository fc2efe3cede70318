"""Compare native resolution with square images: accuracy on small data sets, and step time.

    python benchmarks/native_resolution.py --json native.json --plot native.png

The data sets consist of scikit-learn's digits, as images of many sizes and shapes:

- stretched: one digit, sides of 10 to 45 pixels, aspect ratio 1:2 to 2:1. The label is the digit;
  the aspect ratio carries no information, and a square keeps all detail.
- strips: a row or a column of 2 to 6 cells with sides of 8 to 12 pixels. One cell has a digit, the
  label; the others are empty. Resized to a square, a cell becomes as narrow as its share.

The ways to train on them use the same model and the same number of images, per step and in total.
Squares are the smallest with at least as many patches as the images have on average:

- native: each image in its own size (--native_resolution)
- squash: the whole image resized to a square (--crop_mode squash)
- crop: as timm, a random crop resized to a square; for evaluation, the center of the image

Each run is the program's own command line on one core; seeds take turns. The table shows top-1
accuracy on val/ in percent (mean, and minimum to maximum of the seeds), tokens per image, the
fraction of the batch's tokens that are padding, and the median CPU time of a run in seconds.

--steps also times this many steps of the same model without data (--fake_data), with the same
number of whole images and tokens and no padding: native relative to square, by tokens per sequence.
"""

import argparse
import json
import math
import os
import platform
import statistics
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import numpy as np
from PIL import Image
from tqdm import tqdm

from benchmarks.common import ROOT, commit, markdown
from config_fields import local_path
from data.digits import CLASSES, read_digits
from features.native_resolution.packing import PackRequest, grids
from training.logs.figures import pyplot, save_figure
from training.logs.records import read_metrics

# -- the images ---------------------------------------------------------------------------

SHORTEST, LONGEST = 10, 45


def resized(pixels: np.ndarray, height: int, width: int) -> np.ndarray:
    picture = Image.fromarray(pixels).resize((width, height), Image.Resampling.BICUBIC)
    return np.asarray(picture)


def stretched(drawn: np.random.Generator, pixels: np.ndarray) -> np.ndarray:
    """Return a digit of any size and a shape that can be told from a square."""
    side, stretch = np.exp(drawn.uniform(np.log([12, 1.2]), np.log([32, 2])))
    sides = side * np.sqrt(stretch), side / np.sqrt(stretch)
    height, width = np.clip(np.rint(sides), SHORTEST, LONGEST).astype(int)
    return resized(pixels, *((height, width) if drawn.random() < 0.5 else (width, height)))


def strip(drawn: np.random.Generator, pixels: np.ndarray) -> np.ndarray:
    """Return a row or a column of empty cells, with a digit in one."""
    side, cells, axis = (int(drawn.integers(*span)) for span in ((8, 13), (2, 7), (0, 2)))
    row = [np.zeros((side, side), np.uint8)] * cells
    row[int(drawn.integers(cells))] = resized(pixels, side, side)
    return np.concatenate(row, axis)


def write_images(root: Path, kind: str, copies: int, limit: int | None) -> None:
    """Write an image folder, each digit in ``copies`` drawn images. ``limit``: the most digits of a
    split."""
    draw = strip if kind == "strips" else stretched
    for seed, split in enumerate(("train", "val")):
        drawn = np.random.default_rng(seed)
        digits = [digit for digit in read_digits() if digit[0] == split]
        # Those of a digit are next to each other: the first of a shuffle are of all digits.
        for place in drawn.permutation(len(digits))[:limit]:
            _, digit, index, pixels = digits[place]
            for copy in range(copies):
                image = draw(drawn, pixels)
                path = root / split / CLASSES[digit] / f"{index:04d}_{copy}.png"
                path.parent.mkdir(parents=True, exist_ok=True)
                Image.fromarray(image).save(path)


# -- the runs -----------------------------------------------------------------------------

PATCH, TOKENS, MOST_IMAGES, IMAGES_A_STEP = 4, 192, 24, 32
SEQUENCES_TIMED = (144, 576)
"""Tokens of a sequence in timed steps: 4 and 16 images of 6 x 6 patches."""
MODEL = (
    f"--model vit_tiny_patch16_224 --patch_size {PATCH} --embed_dim 64 --num_heads 2 "
    "--num_blocks 2 --no-class_token --global_pool avg --no_grad_ckpt"
).split()
RECIPE = (
    "--optimizer muon --lr 4e-3 --warmup_steps 30 --hflip 0 --smoothing 0.1 --num_workers 1 "
    "--test_epoch_interval 99999 --log_step_interval 5"
).split()
SEQUENCES = f"--native_resolution --token_budget {TOKENS} --max_images_per_sequence {MOST_IMAGES}"
WHOLE = "--scale 1 1"
WAYS = {
    "native": f"{SEQUENCES} {WHOLE} --ratio 1 1 --max_tokens_per_image {TOKENS}",
    # Of ten crops of the whole area in another shape none fits: it is the whole image.
    "squash": f"{WHOLE} --ratio 0.1 10 --crop_mode squash --crop_pct 1",
    "crop": "--scale 0.5 1 --crop_mode center --crop_pct 1",
}
BACKENDS = {"fsdp2": "--backend cuda", "xla": "--backend xla --cpu_devices 1"}


@dataclass
class Run:
    """What a training came to."""

    images: str
    way: str
    seed: int
    top1: float
    tokens_an_image: float
    padding: float
    """A share of the tokens of all batches."""
    cores: float
    """Seconds of a core, from the start of the program to its end."""


def train(folder: Path, *flags: str) -> tuple[list[dict[str, Any]], float]:
    """Run the program into ``folder``; return its records and seconds of a core."""
    command = [sys.executable, "run_vit_training.py", *flags, "--ckpt_dir", str(folder)]
    with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as output:
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            env={**os.environ, "OMP_NUM_THREADS": "1", "PJRT_DEVICE": "CPU"},
            stdout=output,
            stderr=output,
        )
        _, status, used = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        if process.returncode:
            output.seek(0)
            sys.exit(f"{' '.join(command)}\n{output.read()}")
    return read_metrics(folder), used.ru_utime + used.ru_stime


def mean_patches(folder: Path) -> float:
    """Return how many patches the images of a folder have on average, in their own sizes."""
    sizes = [Image.open(path).size[::-1] for path in folder.rglob("*.png")]
    request = PackRequest((PATCH, PATCH), 0, TOKENS, MOST_IMAGES, TOKENS, resize=False)
    return grids(np.array(sizes), request).prod(axis=1).mean()


def square_side(patches: float) -> int:
    """Return the side of the smallest square of so many patches or more."""
    return PATCH * math.ceil(math.sqrt(patches))


def measure(folder: Path, way: str, seed: int, epochs: int) -> Run:
    """Train in one way on one set of images."""
    patches = mean_patches(folder / "train")
    side = square_side(patches)
    sequences = round(IMAGES_A_STEP * patches / TOKENS)
    batch_size = sequences if way == "native" else IMAGES_A_STEP
    told = [
        *("--backend", "cuda", "--data_dir", str(folder), "--num_classes", str(len(CLASSES))),
        *(*MODEL, "--image_size", str(side), *WAYS[way].split(), *RECIPE),
        *("--batch_size", str(batch_size), "--seed", str(seed), "--num_epochs", str(epochs)),
    ]
    with tempfile.TemporaryDirectory() as run_folder:
        records, cores = train(Path(run_folder), *told)
    top1 = [record["val_top1"] for record in records if "val_top1" in record][-1]
    tokens, padding = (side / PATCH) ** 2, 0.0
    if way == "native":
        steps = [record for record in records if "tokens" in record]
        total = sum(record["tokens"] for record in steps)
        tokens = total / sum(record["images"] for record in steps)
        padding = 1 - total / (len(steps) * sequences * TOKENS)
    return Run(folder.name, way, seed, top1, tokens, padding, cores)


@dataclass
class Step:
    """Seconds of a step: of whole images in sequences, and of the same as a batch of images."""

    backend: str
    tokens: int
    native: list[float] = field(default_factory=list)
    square: list[float] = field(default_factory=list)

    @property
    def ratio(self) -> float:
        return statistics.median(self.native) / statistics.median(self.square)


def time_steps(step: Step, count: int) -> None:
    """Time both forms of a step of 32 images of 6 x 6 patches; add the medians."""
    side = 6 * PATCH
    fake = ["--fake_data", "--max_steps", str(count + 3), "--log_step_interval", "1"]
    fake += ["--eval_batches", "1", "--lr", "1e-5", "--num_workers", "0", "--num_classes", "10"]
    images = step.tokens // 36
    sequences = (
        f"--native_resolution --token_budget {step.tokens} --max_images_per_sequence {images}"
    )
    forms = {
        "native": [*sequences.split(), "--batch_size", str(IMAGES_A_STEP * 36 // step.tokens)],
        "square": ["--batch_size", str(IMAGES_A_STEP)],
    }
    for name, form in forms.items():
        with tempfile.TemporaryDirectory() as folder:
            told = [*MODEL, "--image_size", str(side), *fake, *BACKENDS[step.backend].split()]
            records, _ = train(Path(folder), *told, *form)
        seconds = [r["sec_per_iter"] for r in records if "loss" in r and r["step"] > 3]
        getattr(step, name).append(statistics.median(seconds))


# -- what is printed and drawn ------------------------------------------------------------


def table(runs: list[Run]) -> list[str]:
    rows = [["images", "way", "top-1", "min to max", "tokens/image", "padding", "CPU s"]]
    for images, way in dict.fromkeys((run.images, run.way) for run in runs):
        same = [run for run in runs if (run.images, run.way) == (images, way)]
        tops = [run.top1 for run in same]
        rows.append(
            [
                images,
                way,
                f"{statistics.mean(tops):.1f}",
                f"{min(tops):.1f} to {max(tops):.1f}",
                f"{statistics.mean(run.tokens_an_image for run in same):.1f}",
                f"{statistics.mean(run.padding for run in same):.1%}",
                f"{statistics.median(run.cores for run in same):.0f}",
            ]
        )
    return markdown(rows)


def table_of_steps(steps: list[Step]) -> list[str]:
    rows = [["backend", "tokens per sequence", "native s", "square s", "ratio"]]
    for step in steps:
        seconds = [f"{statistics.median(form):.3f}" for form in (step.native, step.square)]
        rows.append([step.backend, str(step.tokens), *seconds, f"{step.ratio:.2f}"])
    return markdown(rows)


def seen(image: Image.Image, way: str, side: int) -> Image.Image:
    """Return an image as a way shows it to the model."""
    width, height = image.size
    if way == "native":
        return image.resize([max(1, round(length / PATCH)) * PATCH for length in image.size])
    least = min(width, height)
    left, top = (width - least) // 2, (height - least) // 2
    box = (left, top, left + least, top + least) if way == "crop" else None
    return image.resize((side, side), Image.Resampling.BICUBIC, box)


def plot(root: Path, runs: list[Run], path: Path) -> None:
    """Draw, for each set, three images as each way shows them, and the accuracies."""
    plt = pyplot()
    sets, ways = (
        list(dict.fromkeys(getattr(run, name) for run in runs)) for name in ("images", "way")
    )
    figure = plt.figure(figsize=(10, 2.9 * len(sets)), layout="constrained")
    for part, images in zip(
        figure.subfigures(len(sets), 1, squeeze=False)[:, 0], sets, strict=True
    ):
        left, right = part.subfigures(1, 2, width_ratios=(3, 2))
        axes = left.subplots(len(ways), 1, squeeze=False)[:, 0]
        folder, side = root / images / "val", square_side(mean_patches(root / images / "train"))
        paths = sorted(folder.rglob("*.png"))
        shown = [Image.open(paths[number * len(paths) // 6]) for number in range(6)]
        for axis, way in zip(axes, ways, strict=True):
            row = [seen(image, way, side) for image in shown]
            canvas = np.full((max(i.height for i in row), sum(i.width + 8 for i in row)), np.nan)
            place = 0
            for image in row:
                canvas[: image.height, place : place + image.width] = np.asarray(image)
                place += image.width + 8
            axis.imshow(canvas, cmap="gray", vmin=0, vmax=255, interpolation="nearest")
            axis.set_ylabel(way, rotation=0, ha="right", va="center")
            axis.set(xticks=[], yticks=[], frame_on=False)
        axis = right.subplots()
        for place, way in enumerate(ways):
            tops = [run.top1 for run in runs if (run.images, run.way) == (images, way)]
            mean = statistics.mean(tops)
            axis.barh(place, mean, color=f"C{place}", alpha=0.6)
            axis.plot(tops, [place] * len(tops), "k.", markersize=4)
            axis.text(mean / 2, place, f"{mean:.1f}", ha="center", va="center")
        axis.set_yticks(range(len(ways)), ways)
        axis.set(xlim=(0, 100), xlabel="top-1 accuracy, %", title=images)
        axis.invert_yaxis()
    save_figure(figure, path)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    sets = ["strips", "stretched"]
    parser.add_argument("--images", nargs="+", choices=sets, default=sets)
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    parser.add_argument("--seeds", type=int, default=3, help="number of seeds (default: 3)")
    parser.add_argument("--epochs", type=int, default=5, help="epochs of each run (default: 5)")
    parser.add_argument("--copies", type=int, default=2, help="images per digit (default: 2)")
    parser.add_argument("--digits", type=int, help="maximum digits in a split (default: all)")
    parser.add_argument(
        "--steps", type=int, default=20, help="number of timed steps; 0: none (default: 20)"
    )
    parser.add_argument("--repeats", type=int, default=3, help="repeats of the timing (default: 3)")
    parser.add_argument("--backends", nargs="+", choices=BACKENDS, default=list(BACKENDS))
    parser.add_argument(
        "--json", type=local_path, metavar="FILE", help="write all measurements to this JSON file"
    )
    parser.add_argument(
        "--plot", type=local_path, metavar="FILE", help="plot the accuracies to this PNG file"
    )
    options = parser.parse_args()
    if (
        min(options.epochs, options.copies, options.repeats) < 1
        or min(options.seeds, options.steps) < 0
    ):
        parser.error(
            "--epochs, --copies and --repeats must be 1 or more, --seeds and --steps 0 or more"
        )
    return options


def main() -> None:
    options, name = parse(), commit()
    runs: list[Run] = []
    steps = [Step(backend, tokens) for backend in options.backends for tokens in SEQUENCES_TIMED]
    print(f"commit {name}, {platform.machine()}, one core")

    def write() -> None:
        if options.json:
            figures = {"runs": [*map(asdict, runs)], "steps": [*map(asdict, steps)]}
            options.json.write_text(
                json.dumps({"commit": name, **figures}, indent=1) + "\n", encoding="utf-8"
            )

    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        plan = [
            (seed, images, way)
            for seed in range(options.seeds)
            for images in options.images
            for way in options.ways
        ]
        for images in options.images:
            write_images(root / images, images, options.copies, options.digits)
        bar = tqdm(plan, dynamic_ncols=True)
        for seed, images, way in bar:
            bar.set_description(f"{images}, {way}, seed {seed}")
            runs.append(measure(root / images, way, seed, options.epochs))
            write()
        print("\n".join(table(sorted(runs, key=lambda run: options.images.index(run.images)))))
        if options.plot and runs:
            plot(root, runs, options.plot)
    if options.steps:
        repeats = [step for _ in range(options.repeats) for step in steps]
        for step in tqdm(repeats, dynamic_ncols=True):
            time_steps(step, options.steps)
            write()
        print("\n" + "\n".join(table_of_steps(steps)))


if __name__ == "__main__":
    main()
