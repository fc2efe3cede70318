"""``--crop_sizes``: batches of several sizes of crops, and trainings with them."""

import itertools
from collections import Counter
from dataclasses import replace

import pytest

from data.batch import BatchShard, joined
from data.open import open_data
from tests.references import plain_dino
from tests.support.cli import tiny, train_tiny
from tests.support.crop_sizes import FORMS, PAIRS
from tests.support.dino import DINO, SMALL, assert_same
from tests.support.resolved import on_gpus
from tests.support.usage_error import told_in_one_line
from training.data import dataset_request

SIZES = [*SMALL, *PAIRS]


def request_of(*flags, folder="none"):
    words = [*tiny(folder), *DINO, "--batch_size", "8", *flags]
    return dataset_request(on_gpus(words))


def batches(request, count, share=None, first=0):
    loader = open_data(request).train_loader(request.config.batch_size, share or BatchShard())
    return list(itertools.islice(loader.epoch(0, first), count))


def shapes_of(batch):
    return tuple(tensor.shape for tensor in batch.values())


def equal(one, other):
    return one.keys() == other.keys() and all(one[name].equal(other[name]) for name in one)


# -- data ------------------------------------------------------------------------------------


def assert_of_one_pair_each(request, count):
    """Each batch has what a run of its pair alone would have."""
    each_alone = [batches(each, count) for each in request.view.requests(request)]
    alone = {shapes_of(of_one[0]): of_one for of_one in each_alone}
    found = batches(request, count)
    for number, batch in enumerate(found):
        assert equal(batch, alone[shapes_of(batch)][number])
    assert {shapes_of(batch) for batch in found} == alone.keys()
    return alone


def test_each_batch_has_the_crops_of_one_pair():
    alone = assert_of_one_pair_each(request_of(*PAIRS), 12)
    assert len(alone) == 3
    own = batches(request_of(), 12)
    assert all(map(equal, alone[shapes_of(own[0])], own))


def test_a_pair_that_is_given_twice_is_drawn_twice_as_often():
    loader, counts = open_data(request_of(*PAIRS)).train_loader(2, BatchShard()), Counter[int]()
    for epoch in range(8):
        loader._sampler.set_position(epoch)
        counts.update(indices[0].size for indices in loader._sampler)
    expected = 8 * len(loader) / 4
    assert [counts[pair] for pair in range(4)] == pytest.approx([expected] * 4, rel=0.1)


def test_processes_have_parts_of_the_same_batches():
    request = request_of(*PAIRS)
    whole = batches(request, 9)
    parts = [batches(request, 6, BatchShard(rank, 2), first=3) for rank in range(2)]
    assert all(map(equal, map(joined, map(list, zip(*parts, strict=True))), whole[3:]))
    other = batches(replace(request, seed=5), 9)
    assert list(map(shapes_of, whole)) != list(map(shapes_of, other))


def test_pairs_of_as_many_pixels():
    """Each batch says by its shapes which pair it is of."""
    flags = "--patch_size 1 --image_size 17 --local_crop_size 13 --local_crops 7".split()
    seen = {}
    for side, local in itertools.product(range(1, 100), repeat=2):
        seen.setdefault(6 * side**2 + 21 * local**2 + side**2, []).append((side, local))
    one, other = next(of for of in seen.values() if len(of) > 1 and all(s >= n for s, n in of))[:2]
    pairs = [f"{side}x{local}" for side, local in (one, other)]
    flags += ["--image_size", str(one[0]), "--local_crop_size", str(one[1]), "--crop_sizes", *pairs]
    assert len(assert_of_one_pair_each(request_of(*flags), 6)) == 2


# -- trainings -------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def expected():
    return plain_dino.train(SIZES)


@pytest.mark.parametrize(("train", "flags", "how"), FORMS)
def test_losses_are_the_plain_ones(train, flags, how, expected, tmp_path):
    result = train(tmp_path, "--objective", "dino", *SIZES, *flags.split(), **how)
    assert_same(result, expected)
    assert ", 3 pairs of sizes" in result.stdout


@pytest.mark.long
def test_one_compilation_a_pair(tmp_path):
    steady = "--max_steps 36 --warmup_steps 8 --log_step_interval 1 --num_workers 1".split()
    result = train_tiny(tmp_path, *DINO, *PAIRS, *steady, devices=2)
    found = batches(request_of(*PAIRS, "--batch_size", "16"), 36)
    shapes = list(map(shapes_of, found))
    compiled, executed = result.column("compilations"), result.column("executions")
    new = [shape not in shapes[:step] for step, shape in enumerate(shapes)]
    grown = [after > before for before, after in itertools.pairwise(compiled)]
    assert grown == new[1:]
    assert sum(new) == 3
    assert {after - before for before, after in itertools.pairwise(executed)} == {1}


@pytest.mark.parametrize(
    ("flags", "line"),
    [
        ("--crop_sizes 16", "'16' is not GxL, the sides of global and local crops in pixels"),
        ("--crop_sizes 24x8", "--crop_sizes must include 16x8 (--image_size x"),
        ("--crop_sizes 16x8 18x8", "--crop_sizes 18 is not a multiple of the patch size 4 x 4"),
        ("--crop_sizes 16x8 24x28", "--crop_sizes 24x28: the local crop must not be larger"),
        ("--crop_sizes 16x8 --image_size 16 24", "global crops must be square"),
        ("--crop_sizes 16x8 --fake_data", "--crop_sizes has no effect with --data_source fake"),
    ],
)
def test_mistakes(flags, line, capsys, tmp_path):
    words = [*tiny(tmp_path / "run"), *DINO, "--backend", "cuda", *flags.split()]
    assert line in told_in_one_line(capsys, *words)
    assert not (tmp_path / "run").exists()
