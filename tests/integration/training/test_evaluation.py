"""Evaluation in detail: top-5, and the report by class, against scikit-learn and timm."""

import csv
import json

import numpy as np
import pytest
import torch
from PIL import Image
from sklearn.calibration import calibration_curve
from sklearn.metrics import (
    accuracy_score,
    confusion_matrix,
    precision_recall_fscore_support,
    recall_score,
    top_k_accuracy_score,
)

import run_vit_training
from tests.references.plain_checkpoint import convert, tiny_timm_model
from tests.support.cli import DIGITS, VAL_IMAGES, need_xla, run_program, train_tiny_gpu
from tests.support.usage_error import told_in_one_line
from training.objectives.classify import classes_before

STEPS = 110


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("trained")
    return train_tiny_gpu(folder, *f"--num_epochs 5 --max_steps {STEPS} --batch_size 64".split())


@pytest.fixture(scope="module")
def expected(trained, tmp_path_factory):
    """Labels and logits of all of val/, by timm's model and torchvision alone."""
    from torchvision.transforms import v2

    model = tiny_timm_model().eval()
    path = tmp_path_factory.mktemp("plain") / "plain.pt"
    model.load_state_dict(convert(trained.ckpt_dir / f"step_{STEPS}", path)["model"])
    transform = v2.Compose(
        [
            v2.Resize(18, v2.InterpolationMode.BICUBIC),
            v2.CenterCrop(16),
            v2.ToImage(),
            v2.ToDtype(torch.float32, scale=True),
            v2.Normalize((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)),
        ]
    )
    paths = sorted((DIGITS / "val").glob("*/*.png"))
    images = torch.stack([transform(Image.open(path).convert("RGB")) for path in paths])
    with torch.no_grad():
        return [int(path.parent.name) for path in paths], model(images)


def test_place_of_a_label_among_the_logits():
    generator = torch.Generator().manual_seed(0)
    for classes in (2, 4, 5, 10, 1000):
        logits = torch.randn(64, classes, generator=generator)
        labels = torch.randint(classes, (64,), generator=generator)
        before = classes_before(logits, labels)
        assert ((before == 0) == (logits.argmax(-1) == labels)).all()
        among = (logits.topk(min(5, classes)).indices == labels[:, None]).any(-1)
        assert ((before < 5) == among).all()
    # All alike: the first class counts as the likeliest. What is no number is never right.
    assert classes_before(torch.zeros(3, 10), torch.tensor([0, 4, 9])).tolist() == [0, 4, 9]
    logits = torch.tensor([[1.0, float("nan"), 0.0], [float("inf"), 0.0, -float("inf")]])
    assert classes_before(logits, torch.tensor([1, 2])).tolist() == [3, 2]
    assert classes_before(logits, torch.tensor([0, 0])).tolist() == [1, 0]
    assert classes_before(logits, torch.tensor([-1, -1])).shape == (2,)  # padding


def test_top5_in_every_report(trained, expected):
    labels, logits = expected
    (record,) = trained.evaluations
    top5 = 100 * top_k_accuracy_score(labels, logits.numpy(), k=5)
    assert record["val_top5"] == pytest.approx(top5, abs=0.3)  # an image
    assert 20 < record["val_top1"] < record["val_top5"] < 100
    assert f"% of {VAL_IMAGES} images, top-5: {record['val_top5']:.2f} %" in trained.stdout
    event = next((trained.ckpt_dir / "tensorboard").iterdir()).read_bytes()
    assert b"val/top5" in event


def test_some_batches_alone(trained, expected, capsys):
    """--eval_batches: the first images of val/."""
    flags = "--eval_only --json --backend cuda --batch_size 32 --eval_batches 2 --num_workers 0"
    words = [*flags.split(), "--data_dir", DIGITS, "--resume", trained.ckpt_dir]
    assert run_vit_training.main(list(map(str, words))) == 0
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    labels, logits = expected
    right = logits[:64].argmax(-1) == torch.tensor(labels[:64])
    assert result["val_images"] == 64
    assert result["val_top1"] == pytest.approx(
        100 * right.float().mean().item(), abs=1.6
    )  # an image


@pytest.mark.parametrize(
    ("processes", "flags"),
    [
        # Four batches of 100, the last one with 41 times padding.
        (1, "--cpu_devices 1 --batch_size 100"),
        (1, "--cpu_devices 4 --grad_accum_steps 2 --batch_size 200"),
        (1, "--cpu_devices 4 --mesh_domain 2 --batch_size 100 --no-scan_blocks"),
        (1, "--xla_fsdp nested --cpu_devices 1 --batch_size 100"),
        (2, "--backend cuda --batch_size 100"),
        (2, "--backend cuda --mesh_domain 2 --batch_size 100"),  # both have the same images
    ],
)
def test_report(processes, flags, trained, expected, tmp_path):
    """Every figure against scikit-learn, of the logits of timm's model."""
    if "cuda" not in flags:
        need_xla()
    folder = tmp_path / "new" / "report"
    words = ["--eval_only", "--json", "--eval_report", folder, "--data_dir", DIGITS, *flags.split()]
    words += ["--num_workers", "0", "--resume", trained.ckpt_dir]
    done = run_program("run_vit_training.py", *map(str, words), processes=processes)
    assert done.returncode == 0, done.stderr
    assert f"report on 10 classes: {folder}" in done.stderr
    result = json.loads(done.stdout.splitlines()[-1])  # after what gloo says

    # The mistakes are those of timm's model, but for images at the edge of two classes.
    labels, logits = expected
    labels, probabilities = np.array(labels), logits.softmax(-1).numpy()
    paths = [str(path) for path in sorted((DIGITS / "val").glob("*/*.png"))]
    predicted = probabilities.argmax(-1)
    for error in result["errors"]:
        number = paths.index(error["path"])
        assert error["label"] == str(labels[number])
        of_label, most = probabilities[number, labels[number]], probabilities[number].max()
        assert error["probability"] == pytest.approx(most, abs=2e-4)
        assert error["label_probability"] == pytest.approx(of_label, abs=2e-4)
        if error["prediction"] != str(predicted[number]):
            assert most - probabilities[number, int(error["prediction"])] < 4e-4
            predicted[number] = int(error["prediction"])
    wrong = {error["path"] for error in result["errors"]}
    for number in np.flatnonzero(predicted != labels):
        if paths[number] not in wrong:
            assert probabilities[number].max() - probabilities[number, labels[number]] < 4e-4
            predicted[number] = labels[number]
    assert len(result["errors"]) == (predicted != labels).sum()
    likeliest = [error["probability"] for error in result["errors"]]
    assert likeliest == sorted(likeliest, reverse=True)

    # With these predictions, all figures are scikit-learn's.
    check_figures(result, labels, predicted)
    assert result["val_top1"] == pytest.approx(100 * accuracy_score(labels, predicted))
    top5 = 100 * top_k_accuracy_score(labels, logits.numpy(), k=5)
    assert result["val_top5"] == pytest.approx(top5, abs=0.3)  # an image
    ece = expected_calibration_error(labels, predicted, probabilities.max(-1))
    assert result["calibration"]["ece"] == pytest.approx(100 * ece, abs=0.05)

    check_tables(folder, result)
    for name in ("confusion.png", "reliability.png"):
        with Image.open(folder / name) as picture:
            assert min(picture.size) > 300
    page = (folder / "evaluation.html").read_text()
    assert page.count("<figure>") == 48
    assert page.count("data:image/jpeg") == 48
    assert all(error["path"] in page for error in result["errors"][:48])


def check_figures(result, labels, predicted):
    """The figures of the classes, and their averages, against scikit-learn's defaults."""
    names = [row["class"] for row in result["classes"]]
    matrix = confusion_matrix(labels, predicted, labels=range(len(names)))
    found = np.zeros_like(matrix)
    for row in result["confusion"]:
        found[names.index(row["class"]), names.index(row["predicted"])] = row["images"]
    assert (found == matrix).all()
    known = precision_recall_fscore_support(
        labels, predicted, labels=range(len(names)), zero_division=np.nan
    )
    for name, values in zip(("precision", "recall", "f1", "support"), known, strict=True):
        scale = 1 if name == "support" else 100
        shown = [np.nan if row[name] is None else row[name] for row in result["classes"]]
        assert shown == pytest.approx(scale * values, nan_ok=True)
    macro = precision_recall_fscore_support(labels, predicted, average="macro", zero_division=0)
    shown = [result["macro"][name] for name in ("precision", "recall", "f1")]
    assert shown == pytest.approx([100 * value for value in macro[:3]])
    balanced = 100 * recall_score(labels, predicted, labels=np.unique(labels), average="macro")
    assert result["balanced_accuracy"] == pytest.approx(balanced)


def expected_calibration_error(labels, predicted, probability):
    """By the accuracy and the mean probability of each bin of scikit-learn."""
    accuracy, mean = calibration_curve(labels == predicted, probability, n_bins=15)
    which = np.searchsorted(np.linspace(0, 1, 16)[1:-1], probability)
    counts = np.bincount(which, minlength=15)
    return (counts[counts > 0] * np.abs(accuracy - mean)).sum() / counts.sum()


def check_tables(folder, result):
    """The tables have the numbers of the JSON, rounded."""

    def shown(value):
        return "" if value is None else f"{value:.2f}" if isinstance(value, float) else str(value)

    mostly = {}
    wrong = [row for row in result["confusion"] if row["class"] != row["predicted"]]
    for row in sorted(wrong, key=lambda row: -row["images"]):
        mostly.setdefault(row["class"], (row["predicted"], str(row["images"])))
    for row, figures in zip(read_table(folder / "per_class.csv"), result["classes"], strict=True):
        most = mostly.get(figures["class"], ("", "0"))
        assert (row.pop("mostly_mistaken_for"), row.pop("times")) == most
        assert row == {name: shown(value) for name, value in figures.items()}
    rows = [{**row, "images": str(row["images"])} for row in result["confusion"]]
    assert read_table(folder / "confusion.csv") == rows
    for row, error in zip(read_table(folder / "errors.csv"), result["errors"], strict=True):
        for name, value in error.items():
            assert row[name] == (value if isinstance(value, str) else f"{value:.6f}")


def read_table(path):
    with path.open(newline="", encoding="utf-8", errors="surrogateescape") as file:
        return list(csv.DictReader(file))


def test_mistakes(trained, capsys, tmp_path):
    def said(*flags):
        return told_in_one_line(capsys, *flags, "--data_dir", DIGITS)

    assert "requires --eval_only" in said("--eval_report", tmp_path)
    evaluate = ("--eval_only", "--backend", "cuda", "--resume", trained.ckpt_dir)
    (tmp_path / "file").touch()
    told = said(*evaluate, "--eval_report", tmp_path / "file")
    assert told == f"--eval_report {tmp_path / 'file'} is a file, not a folder"
    told = said(*evaluate, "--eval_report", "memory://report")
    assert told == "--eval_report memory://report: use a folder of this machine"
