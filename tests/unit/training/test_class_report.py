"""The report by class: figures against scikit-learn, tables, pictures and the page."""

import csv
from types import SimpleNamespace

import numpy as np
import pytest
from PIL import Image
from sklearn.calibration import calibration_curve
from sklearn.metrics import (
    balanced_accuracy_score,
    confusion_matrix,
    precision_recall_fscore_support,
)

from data.files import BrokenImageError
from training.evaluation.class_figures import (
    MOST_CLASSES,
    draw_confusion,
    draw_reliability,
    most_confused,
)
from training.evaluation.class_report import ClassReport, gather_class_report, worst_first
from training.evaluation.class_scores import (
    BINS,
    calibration_error,
    count_bins,
    count_pairs,
    counts_by_class,
    top5_by_class,
)
from training.evaluation.report import write_report
from training.logs.figures import plot_curves
from training.logs.records import Evaluation
from training.objectives.classify import PREDICTION

pytestmark = pytest.mark.fast


def predictions(labels, predicted, probability=None, before=None):
    rows = np.zeros(len(labels), PREDICTION)
    rows["index"], rows["label"], rows["predicted"] = range(len(labels)), labels, predicted
    rows["probability"] = 0.5 if probability is None else probability
    rows["label_probability"] = 0.25
    rows["before"] = np.not_equal(labels, predicted) if before is None else before
    return rows


def drawn(seed, classes, images, used=None):
    """Random predictions, of which about two thirds are right."""
    random = np.random.default_rng(seed)
    labels = random.integers(used or classes, size=images)
    predicted = np.where(
        random.random(images) < 0.66, labels, random.integers(classes, size=images)
    )
    return predictions(labels, predicted, random.random(images, np.float32))


@pytest.mark.parametrize(
    ("classes", "images", "used"),
    [(2, 50, 2), (10, 300, 10), (10, 40, 6), (300, 200, 300), (3, 1, 3)],
)
def test_figures_are_those_of_scikit_learn(classes, images, used):
    """Also of classes without images, and of those that are never predicted."""
    rows = drawn(classes, classes, images, used)
    rows["before"] *= np.random.default_rng(0).integers(1, 9, images)  # about half are below 5
    labels, predicted = rows["label"], rows["predicted"]
    scores = counts_by_class(count_pairs(rows), range(classes))
    known = precision_recall_fscore_support(
        labels, predicted, labels=range(classes), zero_division=np.nan
    )
    found = (scores.precision, scores.recall, scores.f1, scores.images)
    for ours, theirs in zip(found, known, strict=True):
        np.testing.assert_allclose(ours, theirs)
    macro = precision_recall_fscore_support(labels, predicted, average="macro", zero_division=0)
    np.testing.assert_allclose(scores.macro, macro[:3])
    present = np.isin(predicted, labels)  # scikit-learn warns of others, and ignores them
    if present.all():
        np.testing.assert_allclose(
            scores.balanced_accuracy, balanced_accuracy_score(labels, predicted)
        )
    for label, share in enumerate(top5_by_class(count_pairs(rows), classes)):
        of_class = rows["before"][labels == label] < 5
        assert share == pytest.approx(of_class.mean() if len(of_class) else np.nan, nan_ok=True)
    assert scores.largest_share == np.bincount(labels).max() / images


@pytest.mark.parametrize("probability", [None, 0.0, 1.0, 1 / BINS, 14 / BINS])
def test_calibration_is_that_of_scikit_learn(probability):
    rows = drawn(1, 4, 500)
    if probability is not None:
        rows["probability"] = probability
    right, values = rows["label"] == rows["predicted"], rows["probability"].astype(np.float64)
    bins = count_bins(rows["probability"], right)
    used = bins["images"] > 0
    accuracy, mean = calibration_curve(right, values, n_bins=BINS)
    np.testing.assert_allclose(bins["correct"][used] / bins["images"][used], accuracy)
    np.testing.assert_allclose(bins["probability"][used] / bins["images"][used], mean)
    expected = (bins["images"][used] * np.abs(accuracy - mean)).sum() / 500
    assert calibration_error(bins) == pytest.approx(expected)


def test_counts_of_processes_add_up():
    rows = drawn(2, 7, 400)
    parts = np.concatenate([count_pairs(part) for part in np.array_split(rows, 5)])
    assert (count_pairs(parts) == count_pairs(rows)).all()
    assert count_pairs(rows[:0]).shape == (0,)
    assert np.isnan(calibration_error(count_bins(np.zeros(0), np.zeros(0, bool))))


def test_worst_first():
    rows = predictions([0] * 5, [1] * 5, [0.5, 0.9, np.nan, 0.9, 0.9])
    rows["label_probability"] = [0.1, 0.1, np.nan, 0.05, 0.1]
    assert worst_first(rows)["index"].tolist() == [2, 3, 1, 4, 0]


def test_most_confused_classes():
    assert most_confused(count_pairs(predictions([0], [0])), MOST_CLASSES) == [*range(MOST_CLASSES)]
    labels = [50, 50, 50, 7, 7, *range(60, 100)]
    predicted = [3, 3, 3, 50, 50, *range(61, 101)]
    found = most_confused(count_pairs(predictions(labels, predicted)), 101)
    assert {3, 50, 7} <= {*found}
    assert len(found) in (MOST_CLASSES - 1, MOST_CLASSES)
    assert most_confused(count_pairs(predictions(range(99), range(99))), 99) == []


@pytest.fixture
def drawn_figure(monkeypatch):
    """Returns what a function draws."""
    figures = []
    monkeypatch.setattr(
        "training.evaluation.class_figures.save_figure", lambda figure, path: figures.append(figure)
    )

    def of(draw, *what, **how):
        draw(*what, None, **how)
        return figures.pop()

    return of


def test_the_picture_of_confusions(drawn_figure):
    rows = predictions([0, 0, 0, 1, 1, 2], [0, 1, 1, 1, 0, 0])
    figure = drawn_figure(draw_confusion, count_pairs(rows), ["a", "b", "c"])
    axis = figure.axes[0]
    known = confusion_matrix(rows["label"], rows["predicted"])
    shown = np.zeros_like(known)
    for text in axis.texts:
        column, row = text.get_position()
        shown[row, column] = int(text.get_text())
    assert (shown == known).all()
    share = 100 * known / known.sum(axis=1, keepdims=True)
    np.testing.assert_allclose(axis.images[0].get_array(), share)
    assert [text.get_text() for text in axis.get_yticklabels()] == ["a (3)", "b (2)", "c (1)"]
    assert axis.get_title() == "6 images, 33.33 % correct"


@pytest.mark.parametrize("of_labels", [False, True])
def test_the_picture_of_the_calibration(of_labels, drawn_figure):
    rows = drawn(5, 4, 300)
    right = rows["label"] == rows["predicted"]
    bins = count_bins(rows["probability"], right)
    figure = drawn_figure(draw_reliability, bins, of_labels=of_labels)
    above, below = figure.axes
    accuracy, mean = calibration_curve(right, rows["probability"], n_bins=BINS)
    np.testing.assert_allclose([bar.get_height() for bar in above.patches], 100 * accuracy)
    np.testing.assert_allclose(above.lines[0].get_xdata(), 100 * mean)
    np.testing.assert_allclose(above.lines[0].get_ydata(), 100 * accuracy)
    assert sum(bar.get_height() for bar in below.patches) == 300
    assert ("label" in above.get_ylabel()) == of_labels


# -- its files -------------------------------------------------------------------------------------


class Split:
    """Images with names, and pictures of one color; the first cannot be read any more."""

    def __init__(self, name):
        self._name = name

    def name_of(self, number):
        return self._name.format(number)

    def thumbnail(self, number, side):
        if number == 0:
            raise BrokenImageError("it is <gone>")
        return Image.new("RGB", (side, side // 2), (number % 256, 0, 0))


def written(folder, rows, names, path="val/{}.png", say=pytest.fail):
    backend = SimpleNamespace(batch_shard=0, is_main=True)
    report = gather_class_report(rows, backend, Split(path), names)
    assert isinstance(report, ClassReport)
    right = rows["label"] == rows["predicted"]
    result = Evaluation(1.0, 100 * right.mean(), 100.0, len(rows))
    write_report(report, result, "a model & data", folder, say)
    return report, (folder / "evaluation.html").read_text()


def read_table(path):
    with path.open(newline="", encoding="utf-8", errors="surrogateescape") as file:
        return list(csv.DictReader(file))


@pytest.mark.parametrize("classes", [1, 2, 5, 10, 100, 1000])
def test_any_number_of_classes(classes, tmp_path):
    rows = drawn(classes, classes, 3 * classes + 5)
    names = [f"class {label}" for label in range(classes)]
    report, page = written(tmp_path, rows, names)
    assert len(read_table(tmp_path / "per_class.csv")) == classes
    errors = read_table(tmp_path / "errors.csv")
    assert len(errors) == (rows["label"] != rows["predicted"]).sum() == len(report.errors)
    with Image.open(tmp_path / "confusion.png") as picture:
        assert 250 < min(picture.size) < max(picture.size) < 1800
    assert page.count("<figure>") == min(48, len(errors))
    assert ("top-5</td>" in page) == (classes > 5)
    assert page.count("<td>class ") >= min(classes, 100)


def test_no_mistakes_and_not_a_number(tmp_path):
    names = [f"class {label}" for label in range(40)]
    _, page = written(tmp_path / "all_right", predictions(range(40), range(40)), names)
    assert "0 images were classified wrongly." in page
    assert read_table(tmp_path / "all_right" / "errors.csv") == []

    rows = predictions([0, 1, 1], [0, 1, 0], [0.5, np.nan, 0.7])
    report, _ = written(tmp_path / "nan", rows, ["a", "b"])
    first, second = read_table(tmp_path / "nan" / "errors.csv")
    assert (first["path"], first["prediction"]) == ("val/1.png", "not a number")
    assert (second["path"], second["prediction"]) == ("val/2.png", "a")
    assert report.values["errors"][0]["probability"] is None
    recalls = [row["recall"] for row in report.values["classes"]]
    assert recalls == [100, 0]


def test_odd_names_survive(tmp_path):
    """Formulas of spreadsheets, commas, quotes, line ends, HTML, bytes that are no text."""
    names = ["=cmd|x", "@sum", "+", "-1", " =x", "\uff1dx", "\t=x", "\x1b]0;x\x07", "a=b", "'"]
    names += ['a,"b"', "new\nline", "caf\udce9", "cut_$x^{", "<script>x</script>", "猫"]
    shown = ["'=cmd|x", "'@sum", "'+", "'-1", "' =x", "'\uff1dx", "\\t=x", "\\x1b]0;x\\x07", "a=b"]
    shown += ["'", 'a,"b"', "new\\nline", "caf\udce9", "cut_$x^{", "<script>x</script>", "猫"]
    labels = np.arange(len(names))
    rows = predictions(labels, np.roll(labels, 1))
    _, page = written(tmp_path, rows, names, '=val,"\n\udce9<b>{}.png?sig=x')
    table = read_table(tmp_path / "per_class.csv")
    assert [row["class"] for row in table] == shown
    assert [row["mostly_mistaken_for"] for row in table] == [shown[-1], *shown[:-1]]
    assert {row["predicted"] for row in read_table(tmp_path / "confusion.csv")} == {*shown}
    errors = read_table(tmp_path / "errors.csv")
    assert [row["label"] for row in errors] == shown
    assert [row["prediction"] for row in errors] == [shown[-1], *shown[:-1]]
    assert errors[3]["path"] == "'=val,\"\\n\udce9<b>3.png?sig=x"
    assert "<script>" not in page
    assert "<b>3.png" not in page
    assert "it is &lt;gone&gt;" in page
    assert "a model &amp; data" in page
    assert "猫" in page


def test_secrets_of_urls_are_left_out(tmp_path):
    rows = predictions([0, 1], [1, 1])
    _, page = written(tmp_path, rows, ["a", "b"], "https://me:pass123@host/{}.png?token=abc123")
    errors = (tmp_path / "errors.csv").read_text()
    for text in (page, errors):
        assert "https://host/0.png" in text
        assert "pass123" not in text
        assert "token" not in text


def test_nothing_is_written_through_links(tmp_path):
    kept = tmp_path / "kept"
    kept.write_text("kept")
    folder = tmp_path / "report"
    folder.mkdir()
    files = ["evaluation.html", "errors.csv", "per_class.csv", "confusion.csv"]
    files += ["confusion.png", "reliability.png"]
    for name in files:
        (folder / name).symlink_to(kept)
        (folder / f"{name}.tmp").symlink_to(kept)
    written(folder, drawn(0, 3, 20), ["a", "b", "c"])
    assert kept.read_text() == "kept"
    assert sorted(path.name for path in folder.iterdir()) == sorted(files)
    assert not any(path.is_symlink() for path in folder.iterdir())


@pytest.mark.parametrize(("classes", "curves"), [(5, 1), (6, 2), (None, 2)])
def test_no_curve_of_top5_for_few_classes(classes, curves, tmp_path, monkeypatch):
    figures = []
    monkeypatch.setattr(
        "training.logs.figures.save_figure", lambda figure, path: figures.append(figure)
    )
    records = [{"step": step, "loss": 1.0, "val_top1": 50.0, "val_top5": 100.0} for step in (1, 2)]
    plot_curves(records, tmp_path / "curves.png", classes=classes)
    (panel,) = [axis for axis in figures[0].axes if axis.get_title() == "Validation accuracy"]
    assert len(panel.lines) == curves
