"""Compare SigLIP on captions with SigLIP on bags of words: how much of the result is word order?

    python benchmarks/image_text.py --json image_text.json

The model and its training are those of recipes/digits_siglip.args (make train-siglip): mosaics of
digits and captions, of which 134 combinations are held out. One way trains on the captions, the
other on the same captions with their words in alphabetical order, so that "a four above a seven"
and "a seven above a four" are one text. Both have the same images, steps and seeds; each run is the
program's own command line on one core.

Held-out images are compared with the 134 held-out captions, and with the captions of all 670
combinations, of which 54 of the 134 have a twin with the same words. Among texts with the same
words, a model of bags of words can only guess, so it finds the right one with probability 1 / their
number. The best recall of any such model follows from the captions alone.

The tables have percentages, the mean and, in parentheses, the minimum and maximum of the seeds.
"""

import argparse
import csv
import json
import multiprocessing
import os
import platform
import re
import statistics
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
os.environ |= {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}  # before PyTorch is imported

import numpy as np
from PIL import Image
from safetensors.numpy import load_file
from tqdm import tqdm

import run_vit_training
import training.train  # noqa: F401 - once, for all runs
from benchmarks.common import ROOT, commit, markdown
from config_fields import local_path
from data.config import DataConfig
from data.source import DatasetRequest
from features.image_text.captioned_mosaics import CaptionedSplit, Scene, scenes_of

WAYS = ("captions", "bags of words")
RANKS = (1, 5, 10)
MODEL = (
    f"@{ROOT}/recipes/digits_siglip.args --backend cuda --num_workers 0 --data_source folder "
    "--ckpt_epoch_interval 1000"
).split()


# -- the data set ------------------------------------------------------------------------


def bag_of_words(text: str) -> str:
    """Return the words of a text in alphabetical order."""
    return " ".join(sorted(re.findall(r"\w+", text)))


def write_pairs(folder: Path) -> None:
    """Write the images of the recipe, and a table of captions for each of ``WAYS``; in ``scenes``,
    one image of every combination, by the hands of validation."""
    held_out, others = scenes_of("val"), scenes_of("train")
    _write_split(folder, "train", "train", others)
    _write_split(folder, "val", "val", held_out)
    _write_split(folder / "scenes", "train", "val", others, captions=1)
    _write_split(folder / "scenes", "val", "val", held_out, captions=1)


def _write_split(
    folder: Path, name: str, digits_of: str, scenes: Sequence[Scene], captions: int | None = None
) -> None:
    """``digits_of``: the split whose digits are in the images; ``captions``: how many captions of
    an image to write, if not all."""
    request = DatasetRequest(DataConfig(), channels=3, size=(24, 24), num_classes=0, seed=0)
    split = CaptionedSplit(request, digits_of, lambda image: {}, scenes)
    (folder / name).mkdir(parents=True)
    for way in WAYS:
        table = folder / f"{way.replace(' ', '_')}.csv"
        is_new = not table.exists()
        with open(table, "a", newline="", encoding="utf-8") as file:
            writer = csv.writer(file)
            if is_new:
                writer.writerow(["path", "split", "caption"])
            for number in range(len(split)):
                for text in split.value(number, "caption")[:captions]:
                    words = text if way == WAYS[0] else bag_of_words(text)
                    writer.writerow([f"{name}/{number:05}.png", name, words])
    for number in range(len(split)):
        pixels = split.open(number).pixels()
        Image.fromarray(pixels).save(folder / name / f"{number:05}.png", compress_level=1)


def table_of(data: Path, way: str) -> list[str]:
    """Return the flags that read the images and captions of a way."""
    return ["--data_dir", str(data), "--labels", str(data / f"{way.replace(' ', '_')}.csv")]


# -- one run -----------------------------------------------------------------------------


@dataclass
class Figures:
    """What one run reached on held-out combinations, in percent."""

    way: str
    seed: int
    epochs: int
    image_to_text: list[float]
    """Recall at ``RANKS`` among the held-out captions."""
    text_to_image: list[float]
    """Recall at ``RANKS`` of the held-out captions among the held-out images."""
    image_to_any_text: list[float]
    """Recall at ``RANKS`` among the captions of all combinations."""
    twins: float
    """How often an image is nearer to its caption than to the one with the same words."""


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
    """Train, and compare the embeddings of all combinations."""
    with tempfile.TemporaryDirectory() as folder:
        run, features = f"{folder}/run", Path(folder) / "features"
        length = ["--num_epochs", str(epochs), "--test_epoch_interval", "1000"]
        run_program(
            *MODEL, *table_of(data, way), *length, "--seed", str(seed), "--ckpt_dir", run
        )
        kinds = ["--without_labels", "--features_of", "image_embedding", "text_embedding"]
        run_program(
            *MODEL, *table_of(data / "scenes", way), "--resume", run, "--features", str(features),
            *kinds,
        )  # fmt: skip
        images, texts = embeddings(features)
    bags = bags_of_scenes(way)
    held_out = len(scenes_of("val"))
    few, all_texts = slice(held_out), slice(None)
    ranks_of_texts = [ranked(images[few] @ texts[each].T, bags[each]) for each in (few, all_texts)]
    # The images of texts with the same words are different, so none are equally similar.
    alone = np.arange(held_out)
    ranks_of_images = ranked(texts[few] @ images[few].T, alone)
    twin = twins()
    return Figures(
        way, seed, epochs,
        recalls(*ranks_of_texts[0]), recalls(*ranks_of_images), recalls(*ranks_of_texts[1]),
        preferred(images, texts, bags, twin),
    )  # fmt: skip


def embeddings(folder: Path) -> list[np.ndarray]:
    """Return the embeddings of the images and texts of all combinations, those held out first."""
    splits = []
    for split in ("val", "train"):
        (file,) = folder.glob(f"{split}-*")
        found = load_file(file)
        order = found["number"].argsort()
        splits.append([found[f"{kind}_embedding"][order] for kind in ("image", "text")])
    return [np.concatenate(parts) for parts in zip(*splits, strict=True)]


# -- retrieval ---------------------------------------------------------------------------


def bags_of_scenes(way: str) -> np.ndarray:
    """Return a number for the text of every combination, those held out first: of bags of words,
    the same for texts with the same words."""
    texts = [scene.captions[0] for scene in scenes_of("val") + scenes_of("train")]
    words = texts if way == WAYS[0] else [*map(bag_of_words, texts)]
    return np.unique(words, return_inverse=True)[1]


def twins() -> dict[int, int]:
    """Return the numbers of held-out combinations for which another has the same words, and that
    other's."""
    bags = bags_of_scenes(WAYS[1])
    found = {}
    for number in range(len(scenes_of("val"))):
        for other in np.flatnonzero(bags == bags[number]):
            if other != number:
                found[number] = int(other)
    return found


def ranked(similarities: np.ndarray, same: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return, for query i, how many candidates are more similar than candidate i, and how many are
    equal to it. ``similarities``: (queries, candidates); ``same``: (candidates,), equal numbers for
    equal candidates, whose embeddings may differ by rounding."""
    number = np.arange(len(similarities))
    right = similarities[number, number][:, None]
    equal = same[None] == same[number][:, None]
    return ((similarities > right) & ~equal).sum(1), equal.sum(1)


def recalls(better: np.ndarray, equal: np.ndarray) -> list[float]:
    """Return the recall in percent at each of ``RANKS``, if equal candidates are in any order with
    the same probability."""
    return [float(100 * np.clip((rank - better) / equal, 0, 1).mean()) for rank in RANKS]


def preferred(
    images: np.ndarray, texts: np.ndarray, same: np.ndarray, twin: dict[int, int]
) -> float:
    """Return how often an image is nearer to its caption than to its twin's, in percent."""
    found = [
        0.5
        if same[number] == same[other]
        else float(images[number] @ texts[number] > images[number] @ texts[other])
        for number, other in twin.items()
    ]
    return 100 * statistics.mean(found)


def ceiling() -> list[list[float]]:
    """Return the best recalls of any model of bags of words: every wrong bag is less similar than
    the right one, but texts with the same words are equal."""
    bags = bags_of_scenes(WAYS[1])
    held_out = len(scenes_of("val"))
    found = []
    for candidates in (bags[:held_out], bags):
        equal = (candidates[None] == bags[:held_out, None]).sum(1)
        found.append(recalls(np.zeros(held_out), equal))
    return [found[0], found[0], found[1], [50.0]]


# -- the table ---------------------------------------------------------------------------


def tables(runs: list[Figures]) -> list[str]:
    held_out, every = len(scenes_of("val")), len(bags_of_scenes(WAYS[0]))
    chance = [
        [100 * rank / candidates for rank in RANKS] for candidates in (held_out, held_out, every)
    ]
    columns = ["image_to_text", "text_to_image", "image_to_any_text", "twins"]
    head = [f"image to {held_out} texts", f"text to {held_out} images", f"image to {every} texts"]
    rows = [["way", *head, f"right one of two twins ({len(twins())})"]]
    for way in dict.fromkeys(run.way for run in runs):
        row = [way]
        for name in columns:
            values = [getattr(run, name) for run in runs if run.way == way]
            if name == "twins":
                row.append(spread(values))
            else:
                row.append(" / ".join(spread(each) for each in zip(*values, strict=True)))
        rows.append(row)
    for name, figures in (
        ("any bag of words, at best", ceiling()),
        ("chance", [*chance, [50.0]]),
    ):
        rows.append([name, *(" / ".join(f"{each:.1f}" for each in cell) for cell in figures)])
    return markdown(rows)


def spread(values: Sequence[float]) -> str:
    return f"{statistics.mean(values):.1f} ({min(values):.1f} to {max(values):.1f})"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--seeds", type=int, default=3, help="number of seeds (default: 3)")
    parser.add_argument("--epochs", type=int, default=8, help="epochs of each run (default: 8)")
    parser.add_argument(
        "--json", type=local_path, metavar="FILE", help="write all figures to this JSON file"
    )
    options = parser.parse_args()
    if min(options.seeds, options.epochs) < 1:
        parser.error("--seeds and --epochs must be 1 or more")
    name, runs = commit(), list[Figures]()
    print(f"commit {name}, {platform.machine()}, one core, {options.epochs} epochs of 128 steps")
    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder) / "pairs"
        write_pairs(data)
        plan = [(way, seed) for seed in range(options.seeds) for way in WAYS]
        for way, seed in tqdm(plan, dynamic_ncols=True):
            runs.append(measure(data, way, seed, options.epochs))
            if options.json:
                figures = {"commit": name, "runs": [*map(asdict, runs)]}
                options.json.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")
    print("\n".join(tables(runs)))


if __name__ == "__main__":
    main()
