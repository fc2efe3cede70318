"""Segmentation from patch features: its parts against plain PyTorch, NumPy and scikit-learn."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import accuracy_score, confusion_matrix, jaccard_score

from tests.support.masked_images import split_of
from training.evaluation import knn_and_probe, segment
from training.evaluation.knn_and_probe import (
    RATES,
    Labelled,
    batches_of,
    random_order,
    shares,
    train_probes,
)
from training.evaluation.segment import Areas, chosen_patches, patches_of, predict_pixels, quota

pytestmark = pytest.mark.fast


def made(count, classes=5, pixels=6, width=8, seed=0):
    """Features, and labels of pixels that depend on them; some count for nothing."""
    random = np.random.default_rng(seed)
    features = random.normal(size=(count, width)).astype(np.float32) * 3 + 1
    logits = features @ random.normal(size=(width, classes)) * 0.3
    noise = random.gumbel(size=(count, pixels, classes))
    labels = (logits[:, None] + noise).argmax(axis=-1)
    labels[random.random(labels.shape) < 0.2] = -1
    labels[: count // 10] = -1
    labels[count // 10 : count // 5, 1:] = -1
    return torch.from_numpy(features), torch.from_numpy(labels.astype(np.int16))


def labelled(features, labels):
    return Labelled(torch.arange(len(labels)), features, labels, len(labels))


def standardized(features):
    return (features - features.mean(dim=0)) / features.std(dim=0, correction=0)


def test_probes_minimize_the_cross_entropy_of_pixels(monkeypatch):
    """nn.Linear, torch.optim.SGD and F.cross_entropy with a row for each pixel."""
    monkeypatch.setattr(knn_and_probe, "BATCH_SIZE", 64)
    monkeypatch.setattr(knn_and_probe, "LEAST_STEPS", 50)
    features, labels = made(230)
    found = train_probes(labelled(features, labels), 5, 3, lambda: None)
    x, y = standardized(features), labels.long()
    size, steps = batches_of(len(x))
    order = torch.cat([random_order(3, epoch, len(x)) for epoch in range(steps)])
    starts = [len(x) * epoch + n for epoch in range(steps) for n in range(0, len(x), size)]
    for number, rate in enumerate(RATES):
        linear = torch.nn.Linear(x.shape[1], 5)
        torch.nn.init.zeros_(linear.weight), torch.nn.init.zeros_(linear.bias)
        optimizer = torch.optim.SGD(linear.parameters(), rate, momentum=0.9)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
        for start in starts[:steps]:
            places = order[start : start + size]
            if start % len(x) + size > len(x):  # the rest of an epoch
                places = places[: len(x) - start % len(x)]
            logits = linear(x[places])[:, None].expand(-1, y.shape[1], -1)
            optimizer.zero_grad()
            F.cross_entropy(logits.flatten(0, 1), y[places].flatten(), ignore_index=-1).backward()
            optimizer.step(), schedule.step()
        torch.testing.assert_close(found.logits(features)[number], linear(x), atol=1e-4, rtol=1e-4)


def test_converged_probe_is_logistic_regression(monkeypatch):
    monkeypatch.setattr(knn_and_probe, "LEAST_STEPS", 3000)
    features, labels = made(300, pixels=20)
    found = train_probes(labelled(features, labels), 5, 0, lambda: None)
    x = standardized(features).double().numpy().repeat(labels.shape[1], axis=0)
    y = labels.flatten().numpy()
    reference = LogisticRegression(C=np.inf, tol=1e-10, max_iter=10_000).fit(x[y >= 0], y[y >= 0])
    expected = reference.predict_proba(standardized(features).double().numpy())
    best = found.logits(features)[RATES.index(1.0)].softmax(dim=-1).numpy()
    assert np.abs(best - expected).max() < 1e-4
    assert np.median(expected.max(axis=1)) < 0.9


def test_shares():
    labels = torch.tensor([[0, 2, 2, -1], [-1, -1, -1, -1], [1, 1, 1, 1]], dtype=torch.int16)
    assert shares(labels, 3).tolist() == [[0.25, 0, 0.5], [0, 0, 0], [0, 1, 0]]
    assert shares(torch.tensor([1, 0]), 2).tolist() == [[0, 1], [1, 0]]
    for shape in ((0,), (0, 16)):  # of a process that has none of a batch
        assert shares(torch.zeros(shape, dtype=torch.int16), 3).shape == (0, 3)


def test_areas_are_those_of_scikit_learn():
    random = np.random.default_rng(0)
    labels = random.choice([-1, 0, 2, 3, 9], size=(50, 40))
    predicted = np.where(random.random(labels.shape) < 0.5, labels, random.choice([0, 2, 5], 40))
    predicted[labels < 0] = random.choice([7, 8])  # counts for nothing
    areas = Areas()
    for part in (slice(0, 20), slice(20, 50)):
        areas.add(torch.from_numpy(labels[part]), torch.from_numpy(predicted[part]))
    truth, named = labels[labels >= 0], predicted[labels >= 0]
    present = np.union1d(truth, named)
    assert np.flatnonzero(~np.isnan(areas.iou)).tolist() == present.tolist() == [0, 2, 3, 5, 9]
    expected = jaccard_score(truth, named, labels=present, average=None)
    assert areas.iou[present] == pytest.approx(expected)
    matrix = confusion_matrix(truth, named, labels=present)
    assert areas.pixels[:, present].tolist() == [
        np.diag(matrix).tolist(),
        matrix.sum(axis=1).tolist(),
        matrix.sum(axis=0).tolist(),
    ]
    assert areas.miou == pytest.approx(100 * expected.mean())
    assert areas.accuracy == pytest.approx(100 * accuracy_score(truth, named))


@pytest.mark.parametrize(
    ("image", "size", "grid"),
    [
        ((16, 16), (16, 16), (4, 4)),
        ((40, 97), (16, 16), (4, 4)),
        ((90, 31), (16, 16), (8, 8)),
        ((9, 7), (16, 24), (4, 3)),
        ((300, 301), (16, 16), (2, 2)),
    ],
)
@pytest.mark.parametrize("mode", ["bilinear", "nearest"])
def test_windows_are_averaged_as_by_a_plain_loop(image, size, grid, mode, monkeypatch):
    split = split_of([(5, 5), image], size=size)
    windows, classes = len(split.windows_of(1)), 6
    values = torch.randn(windows, grid[0] * grid[1], classes, dtype=torch.float64)
    height, width = split.scaled[1].tolist()
    canvas = torch.zeros(classes, height, width, dtype=torch.float64)
    count = torch.zeros(height, width)
    tops, lefts = split.starts(1)
    for number, (top, left) in enumerate((top, left) for top in tops for left in lefts):
        by_patch = values[number].T.unflatten(1, grid)
        place = slice(top, top + size[0]), slice(left, left + size[1])
        canvas[:, *place] += F.interpolate(by_patch[None], size=size, mode=mode)[0]
        count[place] += 1
    logits = F.interpolate((canvas / count)[None], size=image, mode=mode)[0]
    least, second = logits.topk(2, dim=0).values
    is_clear = least - second > 1e-4
    plain = logits.argmax(dim=0)
    assert is_clear.float().mean() > 0.9  # a tie of one patch is one of many pixels
    assert len(plain.unique()) > 1
    for strip in (2**24, 1):
        monkeypatch.setattr(segment, "_STRIP", strip)
        how = "linear" if mode == "bilinear" else mode
        found = predict_pixels(values.float(), split, 1, grid, how)
        assert found.shape == image
        assert found[is_clear].equal(plain[is_clear])


def test_patches_of_a_window():
    window = np.arange(6 * 8).reshape(6, 8)
    patches = patches_of(window, (3, 2))
    assert patches.shape == (6, 8)
    assert patches[0].tolist() == [0, 1, 2, 3, 8, 9, 10, 11]
    assert patches[3].tolist() == [20, 21, 22, 23, 28, 29, 30, 31]


@pytest.mark.parametrize(("images", "patches"), [(1, 16), (7, 16), (13, 4), (1000, 3), (30, 1)])
def test_memory_is_bounded_and_images_are_alike(images, patches, monkeypatch):
    monkeypatch.setattr(segment, "PATCHES_TRAINED", 100)
    quotas = [quota(image, images, patches) for image in range(images)]
    assert [place for places in quotas for place in places] == [*range(min(images * patches, 100))]
    lengths = [*map(len, quotas)]
    assert max(lengths) - min(lengths) <= 1
    assert max(lengths) <= patches


def test_chosen_patches_have_labels():
    labels = torch.full((16, 4), -1)
    labels[::2, 3] = 1
    chosen = chosen_patches(labels, 5, 0, 3)
    assert len({*chosen.tolist()}) == 5
    assert all(number % 2 == 0 for number in chosen)
    assert chosen.equal(chosen_patches(labels, 16, 0, 3)[:5])
    assert len(chosen_patches(labels, 16, 0, 3)) == 8
    others = [chosen_patches(labels, 8, seed, image) for seed, image in ((0, 4), (1, 3))]
    assert not any(other.equal(chosen_patches(labels, 8, 0, 3)) for other in others)


def test_picture_shows_masks_and_predictions(tmp_path):
    random = np.random.default_rng(0)
    rows = [
        (random.random((*size, 3)), random.integers(-1, 25, size), random.integers(0, 25, size))
        for size in ((20, 30), (40, 10))
    ]
    names = ["sky", "a $ in\na name " * 9]
    segment._draw(rows, names, tmp_path / "both.png")
    without = [(image, np.full_like(mask, -1), named) for image, mask, named in rows]
    segment._draw(without, names, tmp_path / "without.png")
    both, without = (np.asarray(Image.open(tmp_path / f"{n}.png")) for n in ("both", "without"))
    assert both.std() > 20
    assert both.shape == without.shape
    differs = (both != without).any(axis=(0, 2))
    first, second = (len(differs) * percent // 100 for percent in (24, 48))  # of three columns
    assert not differs[:first].any()
    assert differs[first:second].mean() > 0.5
    assert not differs[second:].any()
