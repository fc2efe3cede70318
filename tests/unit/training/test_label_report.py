"""The report on several labels an image: figures against scikit-learn, tables and the page."""

import csv
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image
from scipy.special import expit
from sklearn.calibration import calibration_curve
from sklearn.metrics import (
    average_precision_score,
    precision_recall_fscore_support,
    roc_auc_score,
)

from data.batch import PADDING
from tests.support.measures import add_batch
from training.evaluation.label_report import gather_label_report
from training.evaluation.report import write_report
from training.objectives.multi_label import LabelRanking

pytestmark = pytest.mark.fast

NAMES = ["edema", "=mass", "<b>never", "always"]
MAIN = SimpleNamespace(batch_shard=0, is_main=True)


class Host:
    """What the measure uses of a backend."""

    sum = staticmethod(torch.Tensor.contiguous)


class Split:
    def name_of(self, number):
        return f"https://me:pass123@host/{number}.png"

    def thumbnail(self, number, side):
        return Image.new("RGB", (side, side // 2))


def drawn(images=60):
    """Logits and labels, of which the third has no image, and the last all; two padded images."""
    random = np.random.default_rng(1)
    has = random.random((images, 4)) < [0.3, 0.1, 0, 1]
    logits = random.standard_normal((images, 4)) * 2 + has
    logits[:3, 0] = 0  # a probability of 1/2
    return torch.tensor(logits, dtype=torch.float32), torch.tensor(has).long()


def reported(logits, target, backend=MAIN):
    measure = LabelRanking(lambda batch: batch["image"], Host())
    order = torch.randperm(len(logits), generator=torch.Generator().manual_seed(0))
    for rows in order.split(16):
        batch = {
            "image": torch.cat([logits[rows], torch.full((2, 4), 9.0)]),
            "target": torch.cat([target[rows], torch.full((2, 4), PADDING)]),
            "index": torch.cat([rows, torch.full((2,), PADDING)]),
        }
        add_batch(measure, lambda images: images, batch)
    result = measure.result()
    return gather_label_report(measure, result, backend, Split(), NAMES), result


def test_figures_are_those_of_scikit_learn():
    logits, target = drawn()
    has, probability = target.numpy(), expit(logits.numpy().astype(np.float64))
    predicted = probability >= 0.5
    report, _ = reported(logits, target)
    values = report.values
    known = precision_recall_fscore_support(has, predicted, average=None, zero_division=np.nan)
    for label, row in enumerate(values["by_class"]):
        figures = [row["precision"], row["recall"], row["f1"]]
        shown = [np.nan if each is None else each / 100 for each in figures]
        assert shown == pytest.approx([each[label] for each in known[:3]], nan_ok=True)
        assert row["label"] == NAMES[label]
        assert (row["images"], row["predicted"]) == (known[3][label], predicted[:, label].sum())
        truth, score = has[:, label], logits[:, label]
        if 0 < truth.sum() < len(truth):
            assert row["average_precision"] == pytest.approx(
                average_precision_score(truth, score), abs=1e-6
            )
            assert row["roc_auc"] == pytest.approx(roc_auc_score(truth, score), abs=1e-6)
        assert row["ece"] == pytest.approx(100 * calibration_error(truth, probability[:, label]))
    for average in ("micro", "macro"):
        figures = precision_recall_fscore_support(has, predicted, average=average, zero_division=0)
        shown = [values[average][name] / 100 for name in ("precision", "recall", "f1")]
        assert shown == pytest.approx(figures[:3])
    pooled = calibration_error(has.ravel(), probability.ravel())
    assert values["calibration"]["ece"] == pytest.approx(100 * pooled)
    assert sum(each["images"] for each in values["calibration"]["bins"]) == has.size

    wrong = [(int(n), NAMES[label]) for n, label in zip(*np.nonzero(predicted != has), strict=True)]
    found = [(number_of(error), error["label"]) for error in values["errors"]]
    assert sorted(found) == sorted(wrong)
    distances = [abs(error["truth"] - error["probability"]) for error in values["errors"]]
    assert distances == sorted(distances, reverse=True)
    for error, (number, name) in zip(values["errors"], found, strict=True):
        assert error["truth"] == has[number, NAMES.index(name)]
        assert error["probability"] == pytest.approx(probability[number, NAMES.index(name)])


def number_of(error):
    assert error["path"].startswith("https://host/")
    return int(error["path"].removeprefix("https://host/").removesuffix(".png"))


def calibration_error(truth, probability):
    """By the bins of scikit-learn."""
    share, mean = calibration_curve(truth, probability, n_bins=15)
    counts = np.bincount(np.searchsorted(np.linspace(0, 1, 16)[1:-1], probability), minlength=15)
    return (counts[counts > 0] * np.abs(share - mean)).sum() / counts.sum()


def test_processes_with_the_same_images_count_them_once(monkeypatch):
    logits, target = drawn()
    monkeypatch.setattr("training.processes.exchange.all_gather_object", lambda value: [value] * 2)
    monkeypatch.setattr("training.processes.exchange.rank", lambda: 1)
    measure = LabelRanking(lambda batch: batch["image"], Host())
    index = torch.arange(len(logits))
    add_batch(measure, lambda x: x, {"image": logits, "target": target, "index": index})
    report = gather_label_report(measure, None, MAIN, Split(), NAMES)
    assert report.scores.images.tolist() == [0] * 4
    assert len(report.errors) == report.bins["images"].sum() == 0


def read_table(path):
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def test_files(tmp_path):
    report, result = reported(*drawn())
    write_report(report, result, "a model & data", tmp_path, pytest.fail)
    files = {path.name for path in tmp_path.iterdir()}
    assert files == {"evaluation.html", "per_label.csv", "errors.csv", "reliability.png"}
    values, table = report.values, read_table(tmp_path / "per_label.csv")
    assert [row["label"] for row in table] == ["edema", "'=mass", "<b>never", "always"]
    for row, figures in zip(table, values["by_class"], strict=True):
        for name in ("precision", "recall", "f1", "ece"):
            assert row[name] == ("" if figures[name] is None else f"{figures[name]:.2f}")
        for name in ("average_precision", "roc_auc"):
            assert row[name] == ("" if figures[name] is None else f"{figures[name]:.4f}")
        assert (int(row["support"]), int(row["predicted"])) == (
            figures["images"],
            figures["predicted"],
        )
    errors = read_table(tmp_path / "errors.csv")
    assert len(errors) == len(values["errors"])
    for row, error in zip(errors, values["errors"], strict=True):
        assert row["path"] == error["path"]
        assert row["truth"] == str(error["truth"])
        assert row["probability"] == f"{error['probability']:.6f}"
    page = (tmp_path / "evaluation.html").read_text()
    assert page.count("<figure>") == min(48, len(errors))
    assert f"{len(errors)} labels were predicted wrongly" in page
    assert f"<td>{result.values['val_map']:.4f}</td>" in page
    assert "<b>never" not in page
    assert "pass123" not in page
    first = values["errors"][0]
    has = "present" if first["truth"] else "absent"
    assert f"</b> is {has}, predicted with <b>{100 * first['probability']:.2f} %</b>" in page


def test_a_probability_that_is_not_a_number_is_the_worst_mistake(tmp_path):
    logits, target = drawn()
    logits[7, 1], logits[9, 3] = np.nan, np.inf
    report, result = reported(logits, target)
    first = report.values["errors"][0]
    assert (number_of(first), first["label"], first["probability"]) == (7, "=mass", None)
    assert report.bins["images"].sum(axis=1).tolist() == [60, 59, 60, 60]
    write_report(report, result, "", tmp_path, pytest.fail)
    assert "predicted with <b>? %</b>" in (tmp_path / "evaluation.html").read_text()
