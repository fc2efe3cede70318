"""A table of images, by the real command line: training, resume, several labels an image."""

import csv
import json
import shutil

import numpy as np
import pytest
import torch
import torchvision.transforms as T
from PIL import Image
from sklearn.metrics import average_precision_score, roc_auc_score

from data.batch import BatchShard
from data.open import open_data
from tests.references.plain_checkpoint import convert, tiny_timm_model
from tests.support.cli import DIGITS, TINY_MODEL, run_program, train_tiny, train_tiny_gpu
from tests.support.loading import CONFIG, arguments, check_same_epochs, wanted
from tests.support.usage_error import told_in_one_line

HAVE = {
    "even": {0, 2, 4, 6, 8},
    "prime": {2, 3, 5, 7},
    "large": {7, 8, 9},
    "round": {0, 6, 8, 9},
    "never": set(),
}
"""Labels, and which digits have them; the last one is that of no image."""
PROPERTIES = [*HAVE]


@pytest.fixture(scope="module")
def tables(tmp_path_factory):
    """The digits of the tests, each by one of 97 writers: with one label, or with several."""
    folder = tmp_path_factory.mktemp("tables")
    for kind, labels in (("one", ["label"]), ("several", PROPERTIES)):
        with open(folder / f"{kind}.csv", "w", newline="") as file:
            table = csv.writer(file, delimiter=";")
            table.writerow(["path", "writer", *labels])
            for path, writer in WRITER_OF.items():
                digit = int(path.split("/")[1])
                have = [int(digit in HAVE[name]) for name in PROPERTIES]
                table.writerow([path, writer, *([digit] if kind == "one" else have)])
    return folder


WRITER_OF = {
    str(path.relative_to(DIGITS)): f"writer {number % 97}"
    for number, path in enumerate(sorted(DIGITS.glob("*/*/*.png")))
}


def by_writer(tables, kind="one"):
    flags = ["--labels", f"{tables}/{kind}.csv", "--split_by", "writer", "--split_seed", "3"]
    return [*flags, "--val_fraction", "0.1"]


def stored(run):
    with open(run / "split.csv", newline="") as file:
        return list(csv.reader(file))


# -- the split, resume ---------------------------------------------------------------------


def test_a_resume_continues_the_epoch_with_the_same_split(tables, tmp_path):
    flags = [*by_writer(tables), "--patch_size", "8", "--batch_size", "256"]
    whole = train_tiny(tmp_path / "whole", *flags, "--ckpt_step_interval", "4", devices=4)
    resumed = tmp_path / "resumed"
    shutil.copytree(whole.ckpt_dir / "step_4", resumed / "step_4")
    # The flags of the split are those of the checkpoint.
    again = train_tiny(resumed, "--labels", f"{tables}/one.csv", *flags[8:], devices=4)
    assert "at step 4, epoch 1" in again.stdout
    for name in ("loss", "grad_norm"):
        assert again.column(name) == whole.column(name)[4:]
    assert again.evaluations[-1] == whole.evaluations[-1]

    # The split is the same on any number of devices and processes, and stored with the run.
    split = stored(whole.ckpt_dir)
    sides = {}
    for path, label, side in split[1:]:
        assert label == path.split("/")[1]
        assert sides.setdefault(WRITER_OF[path], side) == side
    assert {*sides.values()} == {"train", "val"}
    assert len(split) - 1 == len(WRITER_OF)
    alone = train_tiny(tmp_path / "alone", *flags, "--max_steps", "2")
    processes = train_tiny_gpu(tmp_path / "gpu", *flags, "--max_steps", "2", processes=2)
    for other in (alone, processes, again):
        assert stored(other.ckpt_dir) == split
    assert alone.column("loss") == pytest.approx(whole.column("loss")[:2], rel=1e-4)
    assert processes.column("loss") == pytest.approx(whole.column("loss")[:2], rel=1e-4)

    # The stored table gives the same training; another split is refused in the middle of an epoch.
    from_stored = ["--labels", f"{whole.ckpt_dir}/split.csv", *flags[8:], "--max_steps", "2"]
    last = train_tiny(tmp_path / "stored", *from_stored)
    assert sorted(stored(last.ckpt_dir)) == sorted(split)
    refused = tmp_path / "refused"
    shutil.copytree(whole.ckpt_dir / "step_4", refused / "step_4")
    program = [
        "run_vit_training.py",
        "--data_dir",
        DIGITS,
        *TINY_MODEL,
        *flags,
        "--cpu_devices",
        "4",
    ]
    done = run_program(*map(str, program), "--split_seed", "4", "--ckpt_dir", str(refused))
    assert done.returncode == 2
    assert "the order of its images has changed since" in done.stderr


# -- several labels ------------------------------------------------------------------------

COLUMNS = ["--columns", "path", *PROPERTIES]
SEVERAL = [*COLUMNS, "--multi_label", "--bce_loss", "--num_classes", "5", "--max_steps", "12"]


def figures_of_scikit_learn(step, tables, tmp_path):
    """Average precision and ROC AUC by label of timm's model on the validation images."""
    model = tiny_timm_model()
    model.reset_classifier(5)
    model.load_state_dict(convert(step, tmp_path / "plain.pt")["model"])
    transform = T.Compose([
        T.Resize(16 * 256 // 224, interpolation=T.InterpolationMode.BICUBIC), T.CenterCrop(16),
        T.ToTensor(), T.Normalize((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)),
    ])  # fmt: skip
    paths = [path for path, _, split in stored(step.parent) if split == "val"]
    images = torch.stack([transform(Image.open(DIGITS / path).convert("RGB")) for path in paths])
    digits = [int(path.split("/")[1]) for path in paths]
    with torch.no_grad():
        scores = model.eval()(images)
    truth = np.array([[digit in HAVE[name] for name in PROPERTIES] for digit in digits])
    loss = torch.nn.functional.binary_cross_entropy_with_logits(scores, torch.tensor(truth).float())
    by_label = {}
    for name, column, has in zip(PROPERTIES, scores.T, truth.T, strict=True):
        figures = (
            (average_precision_score(has, column), roc_auc_score(has, column))
            if has.any()
            else (None, None)
        )
        by_label[name] = (int(has.sum()), *figures)
    return loss.item(), len(paths), by_label


def check_figures(found, expected):
    loss, images, by_label = expected
    assert found["val_images"] == images
    assert found["val_loss"] == pytest.approx(loss, rel=1e-3)
    for place, figure in ((1, "val_map"), (2, "val_roc_auc")):
        values = [figures[place] for figures in by_label.values() if figures[place] is not None]
        assert len(values) == 4
        assert found[figure] == pytest.approx(np.mean(values), abs=2e-3)


def test_several_labels(tables, tmp_path):
    flags = [*by_writer(tables, "several"), *SEVERAL, "--smoothing", "0.1"]
    one = train_tiny(tmp_path / "one", *flags, "--ckpt_best", "best", "--model_ema")
    expected = figures_of_scikit_learn(one.ckpt_dir / "step_12", tables, tmp_path)
    check_figures(one.evaluations[-1], expected)
    assert "EMA: val loss" in one.stdout
    assert "mean average precision 0." in one.stdout
    assert "of 4 labels, 1 without images" in one.stdout

    # The same on several devices, and by FSDP2 in several processes.
    four = train_tiny(tmp_path / "four", *flags, devices=4)
    nested = train_tiny(tmp_path / "nested", *flags, "--xla_fsdp", "nested", "--max_steps", "3")
    gpu = train_tiny_gpu(
        tmp_path / "gpu",
        *flags,
        processes=2,
    )
    assert nested.column("loss") == pytest.approx(one.column("loss")[:3], rel=1e-4)
    for other in (four, gpu):
        assert other.column("loss") == pytest.approx(one.column("loss"), rel=2e-3)
        check_figures(other.evaluations[-1], expected)

    # The checkpoint knows what it was trained for, and on which split.
    program = ["run_vit_training.py", "--resume", f"{one.ckpt_dir}/step_12", "--json"]
    table = ["--data_dir", f"{DIGITS}", "--labels", f"{tables}/several.csv", *COLUMNS]
    report = ["--eval_only", *table, "--num_workers", "0", "--eval_report"]
    done = run_program(*program, *report, f"{tmp_path}/report", "--cpu_devices", "2")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    check_figures(found, expected)
    assert f"report on 5 labels: {tmp_path}/report" in done.stderr

    # The same report from several processes, but for probabilities at the edge.
    processes = ["--backend", "cuda", "--batch_size", "64"]
    again = run_program(*program, *report, f"{tmp_path}/by_two", *processes, processes=2)
    assert again.returncode == 0, again.stderr
    other = json.loads(again.stdout.splitlines()[-1])
    assert other["micro"] == pytest.approx(found["micro"], abs=0.2)
    assert other["calibration"]["ece"] == pytest.approx(found["calibration"]["ece"], abs=0.2)
    errors = {(error["path"], error["label"]) for error in found["errors"]}
    assert len(errors ^ {(error["path"], error["label"]) for error in other["errors"]}) < 5
    assert 5 < len(errors) == len(found["errors"])
    for error in found["errors"]:
        digit = int(error["path"].rpartition("/")[0].rpartition("/")[2])
        assert error["truth"] == (digit in HAVE[error["label"]])
        assert (error["probability"] >= 0.5) != error["truth"]
    for row in found["by_class"]:
        images, *figures = expected[2][row["label"]]
        assert row["images"] == images
        for ours, theirs in zip((row["average_precision"], row["roc_auc"]), figures, strict=True):
            assert ours == (theirs if theirs is None else pytest.approx(theirs, abs=5e-3))
    image = next((DIGITS / "val" / "8").glob("*.png"))
    done = run_program(*program, "--predict", str(image))
    assert done.returncode == 0, done.stderr
    probabilities = {
        each["class"]: each["probability"] for each in json.loads(done.stdout)[0]["top5"]
    }
    assert {*probabilities} == {*PROPERTIES}
    assert sum(probabilities.values()) != pytest.approx(1, abs=1e-3)
    assert probabilities["never"] < min(probabilities[name] for name in PROPERTIES[:3])


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        ("--multi_label", "--multi_label requires --labels, a table with the labels"),
        ("--labels {tables}/one.csv --multi_label", "requires --bce_loss, a loss for each label"),
        ("--split_by writer", "--split_by writer requires --labels"),
        (
            "--labels {tables}/one.csv --bce_loss --multi_label",
            "has 10 labels, but --num_classes is 4: set --num_classes 10",
        ),
        (
            "--labels {tables}/one.csv --data_source webdataset",
            "one.csv requires --data_source folder or --data_source volumes",
        ),
        (
            "--labels {tables}/one.csv --class_order natural",
            "--class_order natural is incompatible with --labels",
        ),
        ("--labels {tables}/none.csv", "none.csv cannot be read: No such file"),
        ("--labels {tables}/one.csv --val_fraction 1", "one.csv lists no files with split train"),
        ("--labels {tables}/one.csv --val_fraction 0", "must be at least 0.001"),
        ("--labels {tables}/one.csv", "one.csv has 10 classes, but --num_classes is 4"),
        (
            "--labels {tables}/several.csv --multi_label --bce_loss --knn_every 1 --columns path "
            + " ".join(PROPERTIES[:4]),
            "--multi_label is incompatible with --knn_every 1 (it needs one label",
        ),
    ],
)
def test_wrong_flags(tables, tmp_path, capsys, flags, told):
    words = flags.format(tables=tables).split()
    source = ["--data_dir", DIGITS, *TINY_MODEL, "--num_classes", "4", "--batch_size", "16"]
    line = told_in_one_line(capsys, *source, "--ckpt_dir", tmp_path / "run", *words)
    assert told in line
    assert not (tmp_path / "run").exists()


# -- data.pack ----------------------------------------------------------------------------


def test_pack_takes_the_same_table(tmp_path):
    paths = sorted(DIGITS.glob("train/[0-4]/*.png"))[::5]
    lines = [f"{path.relative_to(DIGITS)},class {path.parent.name}" for path in paths]
    file, shards = tmp_path / "labels.csv", tmp_path / "shards"
    file.write_text("\n".join(["image,kind", *lines]))
    flags = ["--columns", "image", "kind", "--split_seed", "4", "--val_fraction", "0.3"]
    packed = run_program("-m", "data.pack", str(DIGITS), str(shards), "--labels", str(file), *flags)
    assert packed.returncode == 0, packed.stderr
    in_shards = open_data(wanted(arguments(shards, data_source="webdataset", batch_size=20)))
    table = {"labels": str(file), "columns": ["image", "kind"]}
    table |= {"split_seed": 4, "val_fraction": 0.3, "batch_size": 20}
    in_table = open_data(wanted(arguments(DIGITS, **table), CONFIG))
    assert in_shards.classes == in_table.classes == [f"class {number}" for number in range(5)]
    for name in ("train", "val"):
        ours, theirs = (
            source.splits[name].batches(20, BatchShard()).epoch(1)
            for source in (in_shards, in_table)
        )
        check_same_epochs(ours, theirs)
    without = run_program("-m", "data.pack", str(DIGITS), str(tmp_path / "x"), *flags)
    assert (without.returncode, (tmp_path / "x").exists()) == (2, False)
    assert "the flags of a table require --labels" in without.stderr
