"""The sizes of classes, their weights, and the order of ``--balanced_sampling``."""

from collections import Counter
from itertools import chain
from types import SimpleNamespace

import numpy as np
import pytest
from sklearn.utils.class_weight import compute_class_weight

from data.classes import (
    BalancedSampler,
    class_sizes,
    classes_without_validation,
    draws_of_classes,
    inverse_frequencies,
    log_priors,
    read_class_weights,
)
from data.files import DataFolderError
from features.unbalanced_classes import ClassSizes, sizes_line

pytestmark = pytest.mark.fast

SIZES = np.array([50, 0, 23, 7, 1])
LABELS = np.repeat(np.arange(5), SIZES)


@pytest.mark.parametrize("power", [0.0, 0.3, 0.5, 1.0])
@pytest.mark.parametrize("sizes", [SIZES, [1, 1], [10**6, 1], [7] * 100, [0, 5, 3]])
def test_an_epoch_is_shared_out_by_the_sizes(sizes, power):
    sizes = np.array(sizes)
    draws = draws_of_classes(sizes, power)
    assert draws.sum() == sizes.sum()
    assert ((draws > 0) == (sizes > 0)).all()
    wanted = np.array([float(n) ** (1 - power) if n else 0.0 for n in sizes])
    assert np.abs(draws - sizes.sum() * wanted / wanted.sum()).max() < 1
    if power == 0:
        assert (draws == sizes).all()
    if power == 1:
        assert np.ptp(draws[sizes > 0]) <= 1


def sampled(epoch=0, first=0, shards=1, repeats=1, power=1.0, seed=3, batch=9):
    """The batches of an epoch, each put together from those of all shards."""
    parts = []
    for shard in range(shards):
        how = {"shuffle": True, "seed": seed, "shard": shard, "shards": shards, "repeats": repeats}
        sampler = BalancedSampler(LABELS, batch, power=power, **how)
        sampler.set_position(epoch, first)
        parts.append(list(sampler))
        assert len(parts[-1]) == len(LABELS) // batch - first
    return [[*chain(*of_all)] for of_all in zip(*parts, strict=True)]


def test_an_epoch_has_as_many_of_each_class_and_each_image_in_turn():
    orders = set()
    for epoch in range(4):
        samples = [*chain(*sampled(epoch, batch=1))]
        assert len(samples) == len(LABELS)
        times = Counter(sample.index for sample in samples)
        by_class = Counter(LABELS[index] for index in times.elements())
        draws = draws_of_classes(SIZES, 1.0)
        assert by_class == {label: n for label, n in enumerate(draws) if n}
        for label, size in enumerate(SIZES):
            of_class = [times[n] for n in np.flatnonzero(label == LABELS)]
            assert not size or max(of_class) - min(of_class) <= 1
        orders.add(tuple(times))
    assert len(orders) == 4


def test_each_draw_of_an_image_is_augmented_differently():
    drawn = Counter()
    for epoch in range(5):
        drawn += Counter((s.index, s.epoch) for b in sampled(epoch, batch=1) for s in b)
    assert set(drawn.values()) == {1}
    assert Counter(index for index, _ in drawn)[80] == 5 * draws_of_classes(SIZES, 1.0)[4]


@pytest.mark.parametrize("repeats", [1, 3])
@pytest.mark.parametrize("shards", [1, 3, 9])
def test_the_order_depends_on_seed_and_position_alone(shards, repeats):
    whole = sampled(2, repeats=repeats)
    assert sampled(2, shards=shards, repeats=repeats) == whole
    assert sampled(2, first=4, shards=shards, repeats=repeats) == whole[4:]
    assert sampled(2, repeats=repeats, seed=4) != whole
    assert len({(s.index, s.epoch) for batch in whole for s in batch}) == 81


def test_power_0_is_a_permutation():
    assert sorted(s.index for batch in sampled(1, batch=1, power=0.0) for s in batch) == [
        *range(len(LABELS))
    ]


# -- weights -----------------------------------------------------------------------------


def test_inverse_frequencies_are_those_of_scikit_learn():
    present = np.flatnonzero(SIZES)
    expected = compute_class_weight("balanced", classes=present, y=LABELS)
    found = inverse_frequencies(SIZES)
    assert found[present] == pytest.approx(expected)
    assert found[1] == 1
    assert found[LABELS].mean() == pytest.approx(1)


def test_a_class_without_images_has_the_prior_of_one():
    found = np.exp(log_priors(SIZES, 7))
    assert found == pytest.approx(np.array([50, 1, 23, 7, 1, 1, 1]) / 81)


NAMES = ["cat", "dog", "1", "a, b"]


def written(tmp_path, *rows, header="class,weight"):
    path = tmp_path / "weights.csv"
    path.write_text("\n".join([header, *rows]) + "\n")
    return str(path)


def test_weights_of_a_file_are_scaled_to_mean_1(tmp_path):
    # A name that is a number is a name.
    file = written(tmp_path, "dog,2", "1,4", '"a, b",0', "cat,1", "4,7")
    found = read_class_weights(file, NAMES, np.array([10, 0, 5]), 6)
    assert found == pytest.approx(np.array([1, 2, 4, 0, 7, 1]) * 15 / (10 * 1 + 5 * 4))
    numbers = read_class_weights(written(tmp_path, "0,3", "1,1"), None, np.array([1, 3]), 2)
    assert numbers == pytest.approx([2.0, 2 / 3])


@pytest.mark.parametrize(
    ("rows", "told"),
    [
        (["cat,1", "bird,2"], "line 3 of {file}: there is no class 'bird': "),
        (
            ["cat,1", "7,2"],
            "class '7': write a class (cat, dog, 1, a, b), or a number from 0 to 3",
        ),
        (["cat,1", "dog,1", "1,1"], "has no weight for class a, b: add a line"),
        ([], "has no weight for class cat, dog, 1, a, b: add a line"),
        (["cat,1", "cat,2"], "line 3 of {file}: class cat was already listed"),
        (["cat,1", "0,2"], "line 3 of {file}: class 0 was already listed"),
        (["cat,-1"], "line 2 of {file}: the weight '-1' is not a number from 0 to 1e+06"),
        (["cat,nan"], "the weight 'nan' is not a number"),
        (["cat,inf"], "the weight 'inf' is not a number"),
        (["cat,1e300"], "the weight '1e300' is not a number from 0 to 1e+06"),
        (["cat,"], "line 2 of {file}: the weight '' is not a number"),
        (["cat"], "line 2 of {file}: the weight '' is not a number"),
        (['cat,"1\n2"'], r"the weight '1\n2' is not a number"),
        ([",1"], "there is no class ''"),
        (["cat,0", "dog,5", "1,0", '"a, b",1'], "the weights of all training images add up to 0"),
    ],
)
def test_a_wrong_file_of_weights(rows, told, tmp_path):
    file = written(tmp_path, *rows)
    with pytest.raises(DataFolderError) as error:
        read_class_weights(file, NAMES, np.array([10, 0, 5]), 4)
    assert told.format(file=file) in str(error.value)
    assert "\n" not in str(error.value)


def test_files_that_are_no_table_of_weights(tmp_path):
    for file, told in (
        (written(tmp_path, header="name,weight"), "has no column class"),
        (str(tmp_path / "missing.csv"), "cannot be read"),
        (str(tmp_path), "cannot be read"),
    ):
        with pytest.raises(DataFolderError, match=told):
            read_class_weights(file, NAMES, np.array([1]), 4)
    spreadsheet = tmp_path / "weights_of_a_spreadsheet.csv"
    spreadsheet.write_text("\ufeffweight;class\r\n3;1\r\n1;0\r\n", encoding="utf-8")
    found = read_class_weights(str(spreadsheet), None, np.array([1, 1]), 2)
    assert found.tolist() == [0.5, 1.5]
    binary = tmp_path / "weights.bin"
    binary.write_bytes(b"class,weight\n\xff\xfe,1\n")
    with pytest.raises(DataFolderError):
        read_class_weights(str(binary), NAMES, np.array([1]), 4)


# -- what sources know -------------------------------------------------------------------


@pytest.mark.parametrize("labels", [None, np.zeros((4, 3)), [], [-1, 2]])
def test_a_source_that_knows_no_labels(labels):
    train = SimpleNamespace(labels=labels) if labels is not None else SimpleNamespace()
    source = SimpleNamespace(name="a stream", splits={"train": train})
    with pytest.raises(DataFolderError, match="--flag requires a source that knows one label of"):
        class_sizes(source, "--flag")


@pytest.mark.parametrize(
    ("val", "lost"), [([0, 2, 2], [3, 4]), ([0, 2, 3, 4], []), ([], []), (None, [])]
)
def test_classes_that_validation_lacks(val, lost):
    source = SimpleNamespace(splits={"val": SimpleNamespace(labels=val)} if val else {})
    assert classes_without_validation(source, SIZES) == lost


def test_a_class_that_is_never_measured_is_a_warning(monkeypatch):
    monkeypatch.setattr("data.classes.class_sizes", lambda source, flag: SIZES)
    said = []
    data = SimpleNamespace(classes=list("abcde"), splits={"val": SimpleNamespace(labels=[0, 2, 4])})
    run = SimpleNamespace(config=SimpleNamespace(data=SimpleNamespace(data_source="folder")))
    session = SimpleNamespace(reports=SimpleNamespace(say=said.append))
    assert ClassSizes().hooks(SimpleNamespace(run=run, data=data, session=session)) == ()
    assert said == [
        sizes_line(SIZES, data.classes),
        "warning: val has no image of class d, so its recall is never measured",
    ]


def test_the_line_of_sizes():
    assert sizes_line(np.array([2, 0, 6]), ["a", "b", "c"]) == (
        "training images by class (2 classes): c: 6 (75.00 %), a: 2 (25.00 %)"
    )
    assert sizes_line(np.arange(1, 12), None) == (
        "training images by class (11 classes): 10: 11 (16.67 %) to 0: 1 (1.52 %)"
    )
