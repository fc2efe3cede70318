"""Compare ways to train on classes of different sizes: accuracy, and recall of rare classes.

    python benchmarks/unbalanced_classes.py --json unbalanced.json

The data set consists of scikit-learn's digits, thinned out: of each digit from 0 to 9 fewer
training images than of the one before, from 140 to 4 in equal ratios. The validation images are all
there, about as many of each digit. Every way has the same model, steps and seeds; each run is the
program's own command line on one core. The table has percentages on val/, the mean and, in
parentheses, the minimum and maximum of the seeds; the rarest classes are the three smallest.
"""

import csv
import multiprocessing
import os
import platform
import statistics
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
os.environ |= {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}  # before PyTorch is imported


import run_vit_training
import training.train  # noqa: F401 - once, for all runs
from benchmarks.common import commit, markdown, mean_and_range, measure_runs, options_of_runs
from data.digits import CLASSES, write_digits

WAYS = {
    "neither": "",
    "class weights": "--class_weights auto",
    "logit adjustment": "--logit_adjustment 1",
    "balanced sampling": "--balanced_sampling",
    "balanced sampling 0.5": "--balanced_sampling 0.5",
}
SIZES = [round(140 * (4 / 140) ** (digit / 9)) for digit in range(len(CLASSES))]
RARE = 3
MODEL = (
    "--backend cuda --num_classes 10 --model vit_tiny_patch16_224 --image_size 16 --patch_size 4 "
    "--embed_dim 64 --num_heads 2 --num_blocks 3 --no-class_token --global_pool avg "
    "--scale 0.7 1 --ratio 0.9 1.1 --hflip 0 --crop_pct 1 --optimizer muon --batch_size 64 "
    "--warmup_steps 30 --lr 4e-3 --no_grad_ckpt --num_workers 0"
).split()


@dataclass
class Figures:
    """What one run reached on val/, in percent."""

    way: str
    seed: int
    top1: float
    balanced: float
    rare: float
    """The mean recall of the rarest classes."""
    rarest: float
    """The recall of the rarest class."""


def thin_out(folder: Path) -> None:
    """Write the digits, and remove training images until each has its number of ``SIZES``."""
    write_digits(folder)
    for digit, size in enumerate(SIZES):
        for image in sorted((folder / "train" / str(digit)).iterdir())[size:]:
            image.unlink()


def run_program(*words: str) -> None:
    """Run the program in a process that is forked from this one, which has imported PyTorch."""

    def run() -> None:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
        sys.exit(run_vit_training.main(words))

    with tempfile.TemporaryFile("w+", encoding="utf-8") as log:
        process = multiprocessing.get_context("fork").Process(target=run)
        process.start()
        process.join()
        if process.exitcode:
            log.seek(0)
            sys.exit(f"run_vit_training.py {' '.join(words)}\n{log.read()}")


def measure(data: Path, way: str, seed: int, epochs: int) -> Figures:
    """Train and evaluate once."""
    with tempfile.TemporaryDirectory() as folder:
        run, report = f"{folder}/run", Path(folder) / "report"
        words = [*MODEL, "--data_dir", str(data), "--ckpt_dir", run]
        length = ["--num_epochs", str(epochs), "--test_epoch_interval", str(epochs)]
        run_program(*words, *length, "--seed", str(seed), *WAYS[way].split())
        run_program(*words, "--eval_only", "--eval_report", str(report))
        with open(report / "confusion.csv", newline="", encoding="utf-8") as file:
            rows = [(r["class"], r["predicted"], int(r["images"])) for r in csv.DictReader(file)]
    recalls = []
    for name in CLASSES:
        of_class = [(predicted, images) for label, predicted, images in rows if label == name]
        right = sum(images for predicted, images in of_class if predicted == name)
        recalls.append(100 * right / sum(images for _, images in of_class))
    right, total = (
        sum(images for label, predicted, images in rows if every or label == predicted)
        for every in (False, True)
    )
    balanced, rare = statistics.mean(recalls), statistics.mean(recalls[-RARE:])
    return Figures(way, seed, 100 * right / total, balanced, rare, recalls[-1])


def table(runs: list[Figures]) -> list[str]:
    rows = [["way", "top-1", "balanced accuracy", f"recall of the {RARE} rarest", "of the rarest"]]
    for way in dict.fromkeys(run.way for run in runs):
        row = [way]
        for name in ("top1", "balanced", "rare", "rarest"):
            values = [getattr(run, name) for run in runs if run.way == way]
            row.append(mean_and_range(values))
        rows.append(row)
    return markdown(rows)


def main() -> None:
    options, name = options_of_runs(__doc__, epochs=40), commit()
    print(f"commit {name}, {platform.machine()}, one core, {sum(SIZES)} training images: {SIZES}")
    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder) / "digits"
        thin_out(data)
        runs = measure_runs(
            lambda way, seed: measure(data, way, seed, options.epochs),
            WAYS,
            options,
            {"commit": name, "sizes": SIZES},
        )
    print("\n".join(table(runs)))


if __name__ == "__main__":
    main()
