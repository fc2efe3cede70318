"""Compare SigLIP on captions with SigLIP on bags of words: how much of the result is word order?

    python benchmarks/image_text.py --json image_text.json

The model and its training are those of recipes/digits_siglip.args (make train-siglip): mosaics of
digits and captions, of which 88 combinations are held out. One way trains on the captions, the
other on the same captions with their words in alphabetical order, so that "a four above a seven"
and "a seven above a four" are one text. Both have the same images, steps and seeds; each run is the
program's own command line on one core.

Held-out images are compared with the 88 held-out captions, and with the captions of all 670
combinations. 70 of the 88 have a twin with the same words, held out, too: 44 say where two digits
are, 26 how many there are of each. Among texts with the same words, a model of bags of words can
only guess, so it finds the right one with probability 1 / their number. The best recall of any such
model follows from the captions alone.

The table has percentages: the mean and, in parentheses, the minimum and maximum of the seeds.
"""

import csv
import multiprocessing
import os
import platform
import re
import statistics
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
os.environ |= {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}  # before PyTorch is imported

import numpy as np
from PIL import Image
from safetensors.numpy import load_file

import run_vit_training
import training.train  # noqa: F401 - once, for all runs
from benchmarks.common import (
    ROOT,
    commit,
    last_json,
    markdown,
    mean_and_range,
    measure_runs,
    options_of_runs,
)
from data.config import DataConfig
from data.source import DatasetRequest
from features.image_text.captioned_mosaics import CaptionedSplit, Scene, scenes_of

WAYS = ("captions", "bags of words")
RANKS = (1, 5, 10)
IMAGES_OF_CLASS = 10
MODEL = (
    f"@{ROOT}/recipes/digits_siglip.args --backend cuda --num_workers 0 --data_source folder "
    f"--ckpt_epoch_interval 1000 --tokenizer {ROOT}/recipes/digits_words.json"
).split()


# -- the data set ------------------------------------------------------------------------


def write_pairs(folder: Path) -> None:
    """Write the images of the recipe, and a table of captions for each of ``WAYS``; in ``scenes``,
    one image of every combination, and in ``classes`` ten images of each held-out one, both with
    digits by the hands of validation."""
    held_out, others = scenes_of("val"), scenes_of("train")
    _write_split(folder, "train", "train", others)
    _write_split(folder, "val", "val", held_out)
    _write_split(folder / "scenes", "train", "val", others, captions=1)
    _write_split(folder / "scenes", "val", "val", held_out, captions=1)
    images = opened("val", held_out * IMAGES_OF_CLASS)
    for number in range(len(images)):
        save(images, number, folder / f"classes/val/{number % len(held_out):03}/{number:05}.png")
    for way in WAYS:
        names = "".join(f"{text(way, scene.captions[0])}\n" for scene in held_out)
        (folder / "classes" / f"{file_name(way)}.txt").write_text(names, encoding="utf-8")
    (folder / "classes" / "prompts.txt").write_text("{}\n", encoding="utf-8")


def _write_split(
    folder: Path, name: str, digits_of: str, scenes: Sequence[Scene], captions: int | None = None
) -> None:
    """``digits_of``: the split whose digits are in the images; ``captions``: how many captions of
    an image to write, if not all."""
    split = opened(digits_of, scenes)
    for way in WAYS:
        table = folder / f"{file_name(way)}.csv"
        rows = [
            [f"{name}/{number:05}.png", name, text(way, caption)]
            for number in range(len(split))
            for caption in split.value(number, "caption")[:captions]
        ]
        folder.mkdir(parents=True, exist_ok=True)
        head = [] if table.exists() else [["path", "split", "caption"]]
        with open(table, "a", newline="", encoding="utf-8") as file:
            csv.writer(file).writerows(head + rows)
    for number in range(len(split)):
        save(split, number, folder / name / f"{number:05}.png")


def opened(split: str, scenes: Sequence[Scene]) -> CaptionedSplit:
    """Return the mosaics of the recipe, with digits of this split."""
    request = DatasetRequest(DataConfig(), channels=3, size=(24, 24), num_classes=0, seed=0)
    return CaptionedSplit(request, split, lambda image: {}, scenes)


def save(split: CaptionedSplit, number: int, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(split.open(number).pixels()).save(path, compress_level=1)


def file_name(way: str) -> str:
    return way.replace(" ", "_")


def text(way: str, caption: str) -> str:
    """Return what a way reads of a caption: all of it, or its words in alphabetical order."""
    return caption if way == WAYS[0] else " ".join(sorted(re.findall(r"\w+", caption)))


def table_of(data: Path, way: str) -> list[str]:
    """Return the flags that read the images and captions of a way."""
    return ["--data_dir", str(data), "--labels", str(data / f"{file_name(way)}.csv")]


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
    zero_shot: float
    """Accuracy of the zero-shot classification of new images of the held-out combinations."""
    twins_of_place: float
    """How often an image is nearer to its caption than to the one with the same words, of captions
    that say where two digits are."""
    twins_of_count: float
    """The same of captions that say how many there are of each."""


def run_program(*words: str) -> str:
    """Run the program in a process that is forked from this one, which has imported PyTorch; return
    its output."""

    def run() -> None:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
        sys.exit(run_vit_training.main(words))

    with tempfile.TemporaryFile("w+", encoding="utf-8") as log:
        process = multiprocessing.get_context("fork").Process(target=run)
        process.start()
        process.join()
        log.seek(0)
        output = log.read()
    if process.exitcode:
        sys.exit(f"run_vit_training.py {' '.join(words)}\n{output}")
    return output


def measure(data: Path, way: str, seed: int, epochs: int) -> Figures:
    """Train, and compare the embeddings of all combinations."""
    with tempfile.TemporaryDirectory() as folder:
        run, features = f"{folder}/run", Path(folder) / "features"
        length = ["--num_epochs", str(epochs), "--test_epoch_interval", "1000"]
        run_program(*MODEL, *table_of(data, way), *length, "--seed", str(seed), "--ckpt_dir", run)
        trained = [*MODEL, *table_of(data / "scenes", way), "--resume", run]
        kinds = ["--without_labels", "--features_of", "image_embedding", "text_embedding"]
        run_program(*trained, "--features", str(features), *kinds)
        images, texts = embeddings(features)
        classes = data / "classes"
        names = ["--class_names", str(classes / f"{file_name(way)}.txt")]
        names += ["--prompts", str(classes / "prompts.txt")]
        evaluated = run_program(
            *trained, "--eval_only", "--json", "--zero_shot", str(classes), *names
        )
    bags, held_out = bags_of_scenes(way), len(scenes_of("val"))
    queries = images[:held_out]
    # Images of texts with the same words are different, so none are equally similar.
    alone = np.arange(held_out)
    return Figures(
        way=way,
        seed=seed,
        epochs=epochs,
        image_to_text=recalls(*ranked(queries @ texts[:held_out].T, bags[:held_out])),
        text_to_image=recalls(*ranked(texts[:held_out] @ queries.T, alone)),
        image_to_any_text=recalls(*ranked(queries @ texts.T, bags)),
        zero_shot=last_json(evaluated)["val_top1"],
        twins_of_place=preferred(images, texts, bags, twins(of_counts=False)),
        twins_of_count=preferred(images, texts, bags, twins(of_counts=True)),
    )


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
    return np.unique([text(way, each) for each in texts], return_inverse=True)[1]


def twins(*, of_counts: bool) -> dict[int, int]:
    """Return the numbers of held-out combinations for which another has the same words, and that
    other's: of those that say how many there are of two digits, or where they are."""
    bags = bags_of_scenes(WAYS[1])
    found = {}
    for number, scene in enumerate(scenes_of("val")):
        if (" and " in scene.captions[0]) == of_counts:
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
    """Return the best figures of any model of bags of words, in the order of the table: every wrong
    bag is less similar than the right one, but texts with the same words are equal."""
    bags = bags_of_scenes(WAYS[1])
    held_out = len(scenes_of("val"))
    few, every = (
        recalls(np.zeros(held_out), (candidates[None] == bags[:held_out, None]).sum(1))
        for candidates in (bags[:held_out], bags)
    )
    return [few, few, every, few[:1], [50.0], [50.0]]


def chance() -> list[list[float]]:
    """Return the figures of guessing, in the order of the table."""
    few, every = len(scenes_of("val")), len(bags_of_scenes(WAYS[0]))
    recall = [[100 * rank / count for rank in RANKS] for count in (few, few, every)]
    return [*recall, [100 / few], [50.0], [50.0]]


# -- the table ---------------------------------------------------------------------------


def table(runs: list[Figures]) -> list[str]:
    held_out, every = len(scenes_of("val")), len(bags_of_scenes(WAYS[0]))
    rows = [["", *dict.fromkeys(run.way for run in runs), "any bag of words, at best", "chance"]]
    at = "/".join(map(str, RANKS))
    figures = {
        f"image to {held_out} texts, recall@{at}": "image_to_text",
        f"text to {held_out} images, recall@{at}": "text_to_image",
        f"image to {every} texts, recall@{at}": "image_to_any_text",
        f"zero-shot, {held_out} classes, top-1": "zero_shot",
        f"right one of two twins, place ({len(twins(of_counts=False))} images)": "twins_of_place",
        f"right one of two twins, count ({len(twins(of_counts=True))} images)": "twins_of_count",
    }
    for (title, name), best, guessed in zip(figures.items(), ceiling(), chance(), strict=True):
        row = [title]
        for way in rows[0][1:-2]:
            values = [np.atleast_1d(getattr(run, name)) for run in runs if run.way == way]
            row.append(", ".join(mean_and_range(each) for each in zip(*values, strict=True)))
        row += [", ".join(f"{value:.1f}" for value in cell) for cell in (best, guessed)]
        rows.append(row)
    return markdown(rows)


def main() -> None:
    options, name = options_of_runs(__doc__, epochs=8), commit()
    print(f"commit {name}, {platform.machine()}, one core, {options.epochs} epochs of 256 steps")
    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder) / "pairs"
        write_pairs(data)
        runs = measure_runs(
            lambda way, seed: measure(data, way, seed, options.epochs),
            WAYS,
            options,
            {"commit": name},
        )
    print("\n".join(table(runs)))


if __name__ == "__main__":
    main()
