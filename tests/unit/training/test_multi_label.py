"""Average precision and ROC AUC: scikit-learn's, from any division over processes."""

import dataclasses
import json

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from sklearn.metrics import average_precision_score, roc_auc_score
from timm.loss import BinaryCrossEntropy

from data.batch import PADDING, class_counts
from tests.support.measures import add_batch
from training.logs.records import Evaluation, score
from training.objectives.classify import smoothed
from training.objectives.multi_label import (
    LabelEvaluation,
    LabelRanking,
    average_precision_and_auc,
)

pytestmark = pytest.mark.fast


def drawn(seed, images, ties=True):
    generator = np.random.default_rng(seed)
    scores = generator.standard_normal(images).astype(np.float32)
    has_label = (generator.random(images) < 0.3).astype(np.uint8)
    return (scores.round(1) if ties else scores) + has_label * np.float32(0.5), has_label


@pytest.mark.parametrize("images", [2, 3, 10, 1000])
@pytest.mark.parametrize("ties", [False, True])
def test_figures_are_those_of_scikit_learn(images, ties):
    tried = 0
    for seed in range(20):
        scores, has_label = drawn(seed, images, ties)
        if not 0 < has_label.sum() < images:
            continue
        tried += 1
        expected = average_precision_score(has_label, scores), roc_auc_score(has_label, scores)
        assert average_precision_and_auc(scores, has_label) == pytest.approx(expected, rel=1e-12)
    assert tried > 5


@pytest.mark.parametrize(
    ("scores", "has_label", "expected"),
    [
        ([1, 1, 1, 1], [1, 0, 0, 1], (0.5, 0.5)),
        ([np.inf, np.inf, -np.inf], [1, 0, 0], (0.5, 0.75)),
        ([0.0, -0.0], [1, 0], (0.5, 0.5)),
        ([1, 2], [1, 1], (1, np.nan)),
        ([1, 2], [0, 0], (np.nan, np.nan)),
        ([1, np.nan], [0, 1], (np.nan, np.nan)),
        ([], [], (np.nan, np.nan)),
    ],
)
def test_at_the_edges(scores, has_label, expected):
    found = average_precision_and_auc(np.array(scores, np.float32), np.array(has_label, np.uint8))
    assert found == pytest.approx(expected, nan_ok=True)


# -- over processes -----------------------------------------------------------------------

LABELS, IMAGES = 3, 37


def whole():
    generator = np.random.default_rng(5)
    logits = torch.from_numpy(generator.standard_normal((IMAGES, LABELS)).astype(np.float32))
    target = torch.from_numpy((generator.random((IMAGES, LABELS)) < 0.4).astype(np.int64))
    target[:, 2] = 0
    return logits, target


class Host:
    """What the measure uses of a backend, for the part of one process."""

    def sum(self, value):
        value = value.clone()
        if dist.is_initialized():
            dist.all_reduce(value)
        return value


def measured(rank, processes):
    """In batches of 8, of which each process has a part; the last one is padded."""
    logits, target = whole()
    measure, size = LabelRanking(lambda batch: batch["image"], Host()), 8 // processes
    for first in range(0, 40, 8):
        index = torch.arange(first + rank * size, first + (rank + 1) * size)
        present = index < IMAGES
        batch = {
            "image": torch.where(present[:, None], logits[index.clamp(max=IMAGES - 1)], 9.0),
            "target": torch.where(present[:, None], target[index.clamp(max=IMAGES - 1)], PADDING),
            "index": torch.where(present, index, PADDING),
        }
        add_batch(measure, lambda images: images, batch)
    return measure.result()


def process(rank, processes, folder):
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=processes
    )
    result = dataclasses.asdict(measured(rank, processes))
    (folder / f"{rank}.json").write_text(json.dumps(result | {"pictures": None}))
    dist.destroy_process_group()


@pytest.mark.parametrize("processes", [2, 4])
def test_processes_share_the_labels(processes, tmp_path):
    mp.start_processes(process, (processes, tmp_path), processes, start_method="fork")
    alone = measured(0, 1)
    for rank in range(processes):
        found = json.loads((tmp_path / f"{rank}.json").read_text())
        assert found["average_precision"] == pytest.approx(alone.average_precision, nan_ok=True)
        assert found["roc_auc"] == pytest.approx(alone.roc_auc, nan_ok=True)
        assert found["positives"] == [*alone.positives]
        assert (found["images"], found["loss"]) == (IMAGES, pytest.approx(alone.loss))


def test_one_process_is_scikit_learn():
    logits, target = whole()
    result = measured(0, 1)
    loss = torch.nn.functional.binary_cross_entropy_with_logits(logits, target.float())
    assert result.loss == pytest.approx(loss.item(), rel=1e-6)
    used = [0, 1]
    expected = average_precision_score(target[:, used], logits[:, used])
    assert result.values["val_map"] == pytest.approx(expected, rel=1e-12)
    expected = roc_auc_score(target[:, used], logits[:, used])
    assert result.values["val_roc_auc"] == pytest.approx(expected, rel=1e-12)
    assert "of 2 labels, 1 without images" in str(result)
    assert result.figures_by_label("abc")[2] == {
        "label": "c", "images": 0, "average_precision": None, "roc_auc": None
    }  # fmt: skip


def test_the_best_has_the_highest_mean_average_precision():
    better, worse = (
        LabelEvaluation(loss, images=9, average_precision=(value,), roc_auc=(0.5,), positives=(1,))
        for loss, value in ((2.0, 0.9), (1.0, 0.8))
    )
    assert score(better.values) > score(worse.values)
    nothing = LabelEvaluation(1.0, images=9, average_precision=(np.nan,), roc_auc=(np.nan,))
    assert nothing.values == Evaluation(1.0, images=9).values


# -- the labels ---------------------------------------------------------------------------


def test_smoothing_is_that_of_timm():
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(6, 5, generator=generator)
    labels = (torch.rand(6, 5, generator=generator) < 0.4).long()
    timm_loss = BinaryCrossEntropy(smoothing=0.2, smooth_dense=True)(logits, labels.float())
    ours = BinaryCrossEntropy()(logits, smoothed(labels, 5, 0.2))
    assert ours.item() == pytest.approx(timm_loss.item(), rel=1e-6)


def test_counts_of_classes():
    labels = np.array([0, 2, 2])
    assert class_counts(labels, 4).tolist() == [1, 0, 2, 0]
    assert class_counts(labels[:0], 4).tolist() == [0] * 4
    assert class_counts(np.array([[1, 0], [1, 1]], np.uint8)).tolist() == [2, 1]
