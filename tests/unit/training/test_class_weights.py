"""The loss with ``--class_weights`` against PyTorch's, with ``--logit_adjustment`` against the
paper's, and recalls against scikit-learn's."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from sklearn.metrics import balanced_accuracy_score, recall_score

from data.batch import PADDING
from tests.support.cli import TINY_MODEL
from tests.support.measures import add_batch
from tests.support.resolved import on_gpus
from training.logs.by_class import ByClass
from training.logs.records import BEST, Evaluation
from training.objectives.classify import Accuracy
from training.objectives.registry import open_objective

pytestmark = pytest.mark.fast

WEIGHTS = torch.tensor([0.0, 0.1, 0.5, 1.0, 1.0, 1.5, 2.0, 3.0, 10.0, 0.7])


class Host:
    """What the objective and its measure ask of a backend."""

    image_rows, batch_shard, batch_shards = range(16), 0, 1
    constant = staticmethod(torch.Tensor.contiguous)
    sum = staticmethod(torch.Tensor.contiguous)


def objective_of(*flags, weights=WEIGHTS):
    run = on_gpus([*TINY_MODEL, "--batch_size", "24", "--class_weights", "auto", *flags])
    objective = open_objective(run, Host())
    if weights is not None:
        objective.weigh_classes(weights)
    return objective


def losses_of(objective, logits, labels, parts=1):
    """The mean of the losses of equal parts of a batch, as devices and micro-batches have them."""
    images = torch.zeros(len(labels), 3, 16, 16, dtype=torch.uint8)
    losses = []
    for part in torch.arange(len(labels)).chunk(parts):
        batch = {"image": images[part], "target": labels[part]}
        _, targets, _ = objective.example(batch, 0)
        losses.append(objective.loss_of(logits[part], targets, None))
    return torch.stack(losses).mean()


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_the_loss_is_pytorchs_over_the_number_of_images(smoothing):
    torch.manual_seed(1)
    logits, labels = torch.randn(24, 10, requires_grad=True), torch.randint(10, (24,))
    objective = objective_of("--smoothing", str(smoothing))
    how = {"weight": WEIGHTS, "label_smoothing": smoothing}
    expected = F.cross_entropy(logits, labels, reduction="sum", **how) / 24
    found = losses_of(objective, logits, labels)
    torch.testing.assert_close(found, expected)
    # PyTorch's mean divides by the weights in the batch, of which ours are 1 on average.
    own = F.cross_entropy(logits, labels, **how) * WEIGHTS[labels].sum() / 24
    torch.testing.assert_close(found, own)
    (grad,), (theirs,) = (torch.autograd.grad(each, logits) for each in (found, expected))
    torch.testing.assert_close(grad, theirs)


def test_the_loss_does_not_depend_on_how_the_batch_is_divided():
    torch.manual_seed(2)
    logits, labels = torch.randn(24, 10), torch.arange(24) % 10
    objective = objective_of()
    whole = losses_of(objective, logits, labels)
    for parts in (2, 3, 8):
        torch.testing.assert_close(losses_of(objective, logits, labels, parts), whole)
    # PyTorch's own mean does.
    halves = [
        F.cross_entropy(logits[p], labels[p], weight=WEIGHTS) for p in torch.arange(24).chunk(2)
    ]
    assert abs(sum(halves) / 2 - F.cross_entropy(logits, labels, weight=WEIGHTS)) > 1e-3


def test_mixed_labels_have_the_weights_of_both():
    torch.manual_seed(3)
    logits, labels = torch.randn(24, 10), torch.randint(10, (24,))
    objective = objective_of("--mixup", "0.8")
    images = torch.zeros(24, 3, 16, 16, dtype=torch.uint8)
    _, targets, _ = objective.example({"image": images, "target": labels}, 5)
    share = targets[0, labels[0]].item() if labels[0] != labels[-1] else 1.0
    partners = labels.flip(0)
    each = share * WEIGHTS[labels] * F.cross_entropy(logits, labels, reduction="none")
    other = (1 - share) * WEIGHTS[partners] * F.cross_entropy(logits, partners, reduction="none")
    torch.testing.assert_close(objective.loss_of(logits, targets, None), (each + other).mean())


def test_without_data_each_class_weighs_1():
    logits, labels = torch.randn(24, 10), torch.randint(10, (24,))
    found = losses_of(objective_of(weights=None), logits, labels)
    torch.testing.assert_close(found, F.cross_entropy(logits, labels))


def adjusted(*flags, tau=1.5):
    run = on_gpus([*TINY_MODEL, "--batch_size", "24", "--logit_adjustment", str(tau), *flags])
    objective = open_objective(run, Host())
    priors = torch.tensor([0.4, 0.2, 0.1, 0.1, 0.05, 0.05, 0.04, 0.03, 0.02, 0.01])
    objective.adjust_logits(tau * priors.log())
    return objective, priors.double().numpy()


@pytest.mark.parametrize("flags", [[], ["--smoothing", "0.1"], ["--mixup", "0.8"]])
def test_the_adjusted_loss_is_that_of_the_paper(flags):
    """Equation (10) of arXiv 2007.07314, for each of the labels that an image has a share of."""
    torch.manual_seed(5)
    objective, priors = adjusted(*flags)
    logits, labels = torch.randn(24, 10, requires_grad=True), torch.randint(10, (24,))
    images = torch.zeros(24, 3, 16, 16, dtype=torch.uint8)
    _, targets, _ = objective.example({"image": images, "target": labels}, 5)
    if not flags:
        assert torch.equal(targets, F.one_hot(labels, 10).float())
    f = logits.detach().double().numpy()
    raised = priors**1.5 * np.exp(f)
    of_label = -np.log(raised / raised.sum(axis=1, keepdims=True))
    expected = (targets.double().numpy() * of_label).sum(axis=1).mean()
    loss = objective.loss_of(logits, targets, None)
    assert loss.item() == pytest.approx(expected, rel=1e-6)
    (grad,) = torch.autograd.grad(loss, logits)
    by_hand = (raised / raised.sum(axis=1, keepdims=True) - targets.double().numpy()) / 24
    assert grad.numpy() == pytest.approx(by_hand, abs=1e-7)


def test_without_data_no_logit_is_adjusted():
    run = on_gpus([*TINY_MODEL, "--batch_size", "24", "--logit_adjustment", "1"])
    logits, labels = torch.randn(24, 10), torch.randint(10, (24,))
    found = losses_of(open_objective(run, Host()), logits, labels)
    torch.testing.assert_close(found, F.cross_entropy(logits, labels))


# -- recalls ---------------------------------------------------------------------------------------


def evaluated(logits, labels, batch=8):
    measure = Accuracy(lambda batch: batch["image"], Host())
    for rows in torch.arange(len(labels)).split(batch):
        add_batch(measure, lambda x: x, {"image": logits[rows], "target": labels[rows]})
    return measure.result()


@pytest.mark.filterwarnings("ignore:y_pred contains classes not in y_true")
@pytest.mark.parametrize("classes", [[0, 1, 2, 3], [1, 3], [2]])
def test_recalls_are_those_of_scikit_learn(classes):
    torch.manual_seed(4)
    labels = torch.tensor(classes)[torch.randint(len(classes), (50,)) ** 2 % len(classes)]
    logits = torch.randn(50, 5)
    logits[torch.arange(50), labels] += 1.0
    padded = torch.cat([labels, torch.full((6,), PADDING)])
    result = evaluated(torch.cat([logits, torch.randn(6, 5)]), padded)
    predicted = logits.argmax(1)
    values = result.values
    assert values["val_images"] == 50
    assert values["val_balanced_accuracy"] == pytest.approx(
        100 * balanced_accuracy_score(labels, predicted)
    )
    present = sorted(set(labels.tolist()))
    recalls = recall_score(labels, predicted, average=None, labels=present)
    assert values["val_worst_recall"] == pytest.approx(100 * recalls.min())
    assert result.by_class.recall[present] == pytest.approx(recalls)
    assert values["val_largest_class"] == pytest.approx(2 * max(labels.bincount().tolist()))
    assert result.by_class.predicted.tolist() == predicted.bincount(minlength=5).tolist()


def test_without_images_there_are_no_figures():
    result = evaluated(torch.randn(8, 5), torch.full((8,), PADDING))
    assert "val_balanced_accuracy" not in result.values
    assert list(result.by_class.lines()) == []


def by_class(images, right, predicted, names=()):
    return ByClass(*map(np.array, (images, right, predicted)), names)


def test_an_evaluation_that_predicts_one_class_is_a_warning():
    one = by_class([6, 2, 0], [6, 0, 0], [8, 0, 0], ["cat", "d\no"])
    line, warning = one.lines()
    assert line == (
        "balanced accuracy: 50.00 %, worst recall: 0.00 % (class d\\no), always class cat: 75.00 %"
    )
    assert warning.startswith("warning: all 8 images of val are predicted as class cat: the model ")
    (line,) = by_class([6, 2, 0], [5, 0, 0], [7, 0, 1]).lines("EMA: ")
    assert line.startswith("EMA: balanced accuracy: 41.67 %, worst recall: 0.00 % (class 1), alw")
    (line,) = by_class([0, 8, 0], [0, 8, 0], [0, 8, 0]).lines()  # there is only one class


def test_what_the_best_goes_by():
    of = by_class([2, 2], [2, 1], [3, 1])
    record = Evaluation(1.0, 75.0, 100.0, 4, by_class=of).values
    assert BEST["balanced_accuracy"](record) == 75.0
    assert BEST["worst_recall"](record) == 50.0
    assert BEST["worst_recall"](record | {"ema_val_worst_recall": 10.0}) == 10.0
    older = {"val_loss": 1.0, "val_top1": 50.0}
    assert BEST["worst_recall"](older) == -np.inf
