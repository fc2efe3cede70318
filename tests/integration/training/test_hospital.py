"""From a table of X-rays to a report, by the commands of docs/tutorials/xrays.md as they are there.

The images are those of tests/support/hospital.py; the model is small, and not pretrained.
"""

import csv
import json
import shlex
import shutil

import numpy as np
import pytest
from pydicom.uid import RLELossless
from sklearn.metrics import (
    balanced_accuracy_score,
    confusion_matrix,
    precision_recall_fscore_support,
)

from tests.support.cli import ROOT, TINY_MODEL, Result, need_xla, run_program
from tests.support.deep_files import data_set, written
from tests.support.documented_commands import commands_of
from tests.support.hospital import FINDINGS, SITES, open_hospital
from tests.support.marks import long
from tests.support.usage_error import told_in_one_line

EVALUATION = "python3 run_vit_training.py --resume balanced_accuracy --ckpt_dir ~/runs/xrays --eval"
PAGE = ROOT / "docs" / "tutorials" / "xrays.md"
SMALL = [*TINY_MODEL, "--model", "vit_tiny_patch16_224", "--num_classes", "5", "--batch_size", "16"]
QUICK = "--lr 4e-3 --optimizer muon --layer_decay 1 --num_epochs 12 --num_workers 0".split()
ON = {
    "fsdp2": (["--backend", "cuda"], 2),
    "xla": (["--cpu_devices", "2"], 1),
}
"""The flags and the number of processes of each."""


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    return tmp_path_factory.mktemp("home")


@pytest.fixture(scope="module")
def table(home):
    return open_hospital(home / "xrays")


def typed(beginning, home, backend=()):
    """The words of the page's command, with its backend replaced, without public weights."""
    (command,) = [each.text for each in commands_of(PAGE) if each.text.startswith(beginning)]
    text = command.replace("~", str(home)).replace("--pretrained --model timm/", "--model ")
    words = shlex.split(text.replace("--backend cuda", shlex.join(backend)))
    return words[1:]


def read_table(path):
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


@pytest.mark.parametrize("backend", ["fsdp2", long("xla")])
def test_from_a_table_to_a_report(backend, home, table, tmp_path):
    flags, processes = ON[backend]
    if backend == "xla":
        need_xla()
    words = [*typed("python3 run_vit_training.py --pretrained", home, flags), *SMALL, *QUICK]
    done = run_program(*words, "--ckpt_dir", str(tmp_path / "run"), processes=processes)
    assert done.returncode == 0, done.stderr
    run = Result(tmp_path / "run", done.stdout, done.stderr)
    sizes = [f"{name}: " for name in FINDINGS]
    (line,) = [each for each in run.stdout.splitlines() if "training images by class" in each]
    assert [line.index(name) for name in sizes] == sorted(line.index(name) for name in sizes)
    assert "--intensity auto: " in run.stdout

    # No patient is in both splits; each finding and each kind of file is in both.
    row_of = {row["image_id"]: row for row in table}
    split = {}
    for row in read_table(run.ckpt_dir / "split.csv"):
        of_table = row_of[row["path"].rpartition(".")[0]]
        assert row["label"] == of_table["finding"]
        split.setdefault(row["split"], []).append(of_table)
    assert {*split} == {"train", "val"}
    assert len(split["train"]) + len(split["val"]) == len(table)
    patients = [{row["patient_id"] for row in rows} for rows in split.values()]
    assert not patients[0] & patients[1]
    for rows in split.values():
        assert {row["finding"] for row in rows} == {*FINDINGS}
        assert {row["site"] for row in rows} == {*SITES}
    assert 0.15 < len(split["val"]) / len(table) < 0.25

    # It has learned more than the largest class.
    best = max(run.evaluations, key=lambda record: record["val_balanced_accuracy"])
    assert best["val_top1"] > best["val_largest_class"] + 20
    assert best["val_balanced_accuracy"] > 60

    evaluated = typed(EVALUATION, home, flags)
    evaluated += ["--ckpt_dir", str(run.ckpt_dir), "--num_workers", "0"]
    evaluated += ["--eval_report", str(tmp_path / "report"), "--json"]
    done = run_program(*evaluated, processes=processes)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["val_balanced_accuracy"] == pytest.approx(best["val_balanced_accuracy"])
    check_report(found, tmp_path / "report", predictions(run, home, split["val"]))


def predictions(run, home, rows):
    """The label and what --predict says of each of these images, by its path."""
    paths = {str(next((home / "xrays" / "images").glob(f"{r['image_id']}.*"))): r for r in rows}
    words = ["--resume", "balanced_accuracy", "--ckpt_dir", str(run.ckpt_dir), "--json"]
    done = run_program("run_vit_training.py", *words, "--predict", *paths)
    assert done.returncode == 0, done.stderr
    return {
        each["image"]: (paths[each["image"]]["finding"], each["top5"][0]["class"])
        for each in json.loads(done.stdout)
    }


def check_report(found, folder, predicted):
    """The report's figures are scikit-learn's of what was predicted."""
    names = sorted(FINDINGS)
    assert [row["class"] for row in found["classes"]] == names
    labels, classes = zip(*predicted.values(), strict=True)
    assert found["balanced_accuracy"] == pytest.approx(
        100 * balanced_accuracy_score(labels, classes)
    )
    known = precision_recall_fscore_support(labels, classes, labels=names, zero_division=0)
    for name, values in zip(("precision", "recall", "f1"), known, strict=False):
        assert [row[name] or 0 for row in found["classes"]] == pytest.approx(100 * values)
        assert found["macro"][name] == pytest.approx(100 * values.mean())
    matrix = confusion_matrix(labels, classes, labels=names)
    for row in read_table(folder / "confusion.csv"):
        place = names.index(row["class"]), names.index(row["predicted"])
        assert int(row["images"]) == matrix[place]
        matrix[place] = 0
    assert not matrix.any()
    errors = {row["path"]: (row["label"], row["prediction"]) for row in found["errors"]}
    assert errors == {path: pair for path, pair in predicted.items() if pair[0] != pair[1]}
    assert (folder / "evaluation.html").read_text().count("data:image/jpeg") == len(errors)


def test_look_at_the_images(home, table, tmp_path):
    *words, _ = typed("python3 -m tools.show_augmentations", home)
    words += [*TINY_MODEL, "--num_classes", "5"]
    done = run_program(*words, str(tmp_path / "augmented.png"))
    assert done.returncode == 0, done.stderr
    assert "5 images, augmented 6 times" in done.stdout


# -- mistakes in the table and the files -------------------------------------------------


def changed(rows, place=0, **to):
    """The rows, with other cells in one of them."""
    return [row | to if number == place else row for number, row in enumerate(rows)]


def in_both_splits(rows):
    """With a column of splits, by image instead of patient."""
    return [row | {"split": "val" if n % 5 == 0 else "train"} for n, row in enumerate(rows)]


def only_in_val(rows):
    return [row | {"split": "val" if row["finding"] == "mass" else "train"} for row in rows]


MISTAKES = [
    (
        lambda rows: changed(rows, 3, image_id="p999_a"),
        "images/p999_a, which does not exist: paths must be relative to --data_dir, or absolute",
    ),
    (
        lambda rows: [*rows, rows[0]],
        "was already listed, in line 2; remove one of the two lines",
    ),
    (
        lambda rows: changed(rows, 3, image_id="../labels.csv"),
        "../labels.csv is outside of --data_dir",
    ),
    (in_both_splits, "is in both splits, in"),
    (
        lambda rows: [row | {"patient_id": n} for n, row in enumerate(only_in_val(rows))],
        "only val has mass, which cannot be learned without training images: move some",
    ),
    (
        lambda rows: changed(rows, 3, finding="Normal"),
        "but --num_classes is 5: set --num_classes 6 (classes: Normal, effusion, mass, nodule, no",
    ),
]


def write_table(path, rows):
    with path.open("w", newline="") as file:
        table = csv.DictWriter(file, rows[-1])
        table.writeheader()
        table.writerows(rows)


def told(capsys, home, tmp_path, *flags):
    typed_words = typed("python3 run_vit_training.py --pretrained", home, ON["fsdp2"][0])
    words = [*typed_words[1:], *SMALL, *flags, "--ckpt_dir", tmp_path / "run"]
    line = told_in_one_line(capsys, *words)
    assert not (tmp_path / "run").exists()
    return line


@pytest.mark.parametrize(("change", "message"), MISTAKES)
def test_a_mistake_in_the_table(change, message, home, table, tmp_path, capsys):
    write_table(tmp_path / "labels.csv", change(table))
    assert message in told(capsys, home, tmp_path, "--labels", tmp_path / "labels.csv")


def test_a_weight_of_an_unknown_finding(home, table, tmp_path, capsys):
    weights = tmp_path / "weights.csv"
    weights.write_text("class;weight\nnormal;1\nNodule;3\n")
    line = told(capsys, home, tmp_path, "--class_weights", weights)
    assert (
        "weights.csv: there is no class 'Nodule': write a class (effusion, mass, nodule, " in line
    )


def test_a_codec_that_is_not_installed(home, table, tmp_path, capsys, monkeypatch):
    folder = tmp_path / "images"
    shutil.copytree(home / "xrays" / "images", folder)
    made = data_set(np.arange(1024, dtype=np.uint16).reshape(32, 32), 12)
    made.compress(RLELossless)
    for path in folder.glob("*.dcm"):
        path.write_bytes(written(made))
    monkeypatch.setattr("pydicom.pixels.decoders.base.Decoder.is_available", False)
    line = told(capsys, home, tmp_path, "--data_dir", folder)
    assert "DICOM files compressed as RLE Lossless require: python3 -m pip install -r req" in line


def test_files_that_are_no_images_are_left_out_and_counted(home, table, tmp_path):
    folder = tmp_path / "images"
    shutil.copytree(home / "xrays" / "images", folder)
    empty, frames = (data_set(np.zeros((64, 32), np.uint16), 12) for _ in range(2))
    del empty.PixelData
    frames.Rows, frames.NumberOfFrames = 32, 2
    places = [folder / f"{row['image_id']}.dcm" for row in table if row["site"] == "south"]
    for path, made in zip(places, (empty, frames), strict=False):
        path.write_bytes(written(made))
    words = [*typed("python3 run_vit_training.py --pretrained", home, ON["fsdp2"][0]), *SMALL]
    words += ["--data_dir", str(folder), "--num_epochs", "1", "--max_bad_images", "2"]
    words += ["--num_workers", "0", "--ckpt_dir", str(tmp_path / "run")]
    done = run_program(*words)
    assert done.returncode == 0, done.stderr
    for path, reason in zip(places, ("no pixels (Secondary", "2 frames: save each"), strict=False):
        assert f"warning: {path} cannot be read (it has {reason}" in done.stdout
