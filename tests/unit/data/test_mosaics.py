"""Mosaics of digits: what they are made of, counted again, and who composes which rows of them."""

import itertools

import numpy as np
import pytest
import torch
from sklearn.datasets import load_digits

from data.batch import BatchShard
from data.digits import INTENSITIES, LENGTHS, read_digits
from data.files import DataFolderError
from data.open import open_data
from data.source import DatasetRequest
from tests.support.loading import arguments, check_same, check_same_epochs, concatenated

SIZES = [(64, 64), (64, 96), (32, 32), (16, 16), (8, 40), (16, 32, 32), (32, 16, 24)]
MEAN, STD = (0.5, 0.4, 0.3), (0.2, 0.3, 0.4)


def opened(size, channels=1, seed=3, classes=10, **changes):
    values = {"data_source": "mosaics", "mean": (0.0,) * 3, "std": (1.0,) * 3, "batch_size": 64}
    return open_data(
        DatasetRequest(arguments("", **values | changes), channels, size, classes, seed)
    )


def first_batches(source, share=BatchShard(), count=2, batch_size=64):  # noqa: B008 - frozen
    """Of training and of validation, with the last one's padding left out."""
    loaders = source.train_loader(batch_size, share), source.val_loader(batch_size, share)
    return [batch for each in loaders for batch in itertools.islice(each.epoch(1), count)]


@pytest.fixture(scope="module")
def digit_of():
    """What scikit-learn says that an image's pixels are, and the split that it is in."""
    told = load_digits()
    split = {number: split for split, _, number, _ in read_digits()}
    rounded = np.round(told.images * 255 / 16).astype(np.uint8)
    known = zip(rounded, told.target, range(len(rounded)), strict=True)
    return {pixels.tobytes(): (int(digit), split[i]) for pixels, digit, i in known}


def digits_in(image, digit_of):
    """The digits of a mosaic's cells in an array, and the splits they are of."""
    pixels = image[0].numpy()
    if pixels.ndim == 3:  # one slice of each cell
        pixels = pixels[3::8].reshape(-1, pixels.shape[2]) / INTENSITIES[3]
    cells = [
        np.split(row, row.shape[1] // 8, axis=1)
        for row in np.split(pixels, pixels.shape[0] // 8, axis=0)
    ]
    found = [
        [digit_of[np.rint(cell * 255).astype(np.uint8).tobytes()] for cell in row] for row in cells
    ]
    return np.array([[digit for digit, _ in row] for row in found]), {
        split for row in found for _, split in row
    }


@pytest.mark.parametrize("size", SIZES)
def test_the_label_is_the_most_frequent_digit(size, digit_of):
    source = opened(size)
    assert (source.train_length, source.val_length) == (LENGTHS["train"], LENGTHS["val"])
    loaders = {
        "train": source.train_loader(64, BatchShard()),
        "val": source.val_loader(64, BatchShard()),
    }
    for split, loader in loaders.items():
        batch = next(loader.epoch(0))
        assert batch["image"].shape == (64, 1, *size)
        assert set(batch["target"].tolist()) == set(range(10))
        for image, label in zip(batch["image"], batch["target"], strict=True):
            digits, splits = digits_in(image, digit_of)
            counts = np.bincount(digits.ravel(), minlength=10)
            assert counts.argmax() == label
            assert (counts == counts.max()).sum() == 1
            assert splits == {split}


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("size", [(64, 24), (32, 16, 24)])
def test_rows_are_parts_of_the_same_mosaic(size, channels):
    source = opened(size, channels)
    assert source.reads_rows
    whole = first_batches(source)
    cuts = [range(0, 3), range(3, 16), range(16, size[0])]
    shares = [[BatchShard(rank, 2, rows) for rows in cuts] for rank in range(2)]
    found = [[first_batches(opened(size, channels), share) for share in row] for row in shares]
    for number, expected in enumerate(whole):
        of_ranks = []
        for row in found:
            images = torch.cat([each[number]["image"] for each in row], dim=2)
            joined = [each[number] | {"image": images} for each in row]
            check_same_epochs(joined[1:], joined[:-1])  # the other fields have no rows
            of_ranks.append(joined[0])
        check_same(concatenated(of_ranks), expected)
    workers = first_batches(opened(size, channels, num_workers=2), shares[1][1], count=1)
    check_same_epochs(workers, found[1][1][::2])


def test_other_seeds_splits_and_numbers_give_other_mosaics():
    train, _, val, _ = first_batches(opened((32, 32)))
    other, *_ = first_batches(opened((32, 32), seed=4))
    flat = torch.cat([batch["image"] for batch in (train, val, other)]).flatten(1)
    assert len(flat.unique(dim=0)) == 3 * 64
    again = opened((32, 32)).fingerprint()
    assert again == opened((32, 32)).fingerprint() != opened((32, 32), seed=4).fingerprint()


@pytest.mark.parametrize(
    ("size", "classes", "told"),
    [
        ((64, 60), 10, "the model's image size is 64 x 60: use an --image_size"),
        ((64, 64), 9, "10 classes, but --num_classes is 9"),
    ],
)
def test_refused(size, classes, told):
    with pytest.raises(DataFolderError, match=told):
        opened(size, classes=classes)
