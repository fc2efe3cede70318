"""Distillation by ``--objective dino --teacher``, of one student or of several in one run."""

import pytest

from tests.cli import tiny, train_tiny, train_tiny_gpu
from tests.marks import long
from tests.references import plain_dino
from tests.resolved import on_xla
from tests.training.test_dino import DINO, SMALL, assert_same, weights_of

SMALLER = "--embed_dim 16 --num_heads 2 --num_blocks 1 --dino_head_hidden 8".split()


@pytest.fixture(scope="module")
def teacher(tmp_path_factory):
    """The folder of a finished run of dino, its average in plain PyTorch, and the flags of it."""
    folder = tmp_path_factory.mktemp("teacher")
    train_tiny_gpu(folder, *DINO)
    plain = plain_dino.plain_of(on_xla([*tiny(folder / "none"), *DINO]))
    plain.load_state_dict(weights_of(folder, "ema"))
    return folder, plain, ["--teacher", "vit_10b", "--teacher_weights", str(folder)]


@pytest.mark.parametrize(
    ("train", "how"),
    [
        (train_tiny_gpu, {"processes": 2}),
        long(train_tiny_gpu, {}),
        long(train_tiny, {"devices": 2}),
    ],
)
def test_taught_by_a_larger_model(train, how, teacher, tmp_path):
    folder, plain, flags = teacher
    result = train(tmp_path, *DINO, *SMALLER, *flags, **how)
    assert_same(result, plain_dino.train([*SMALL, *SMALLER], taught_by=plain))
    assert f"of {folder}/step_6, preprocessing" in result.stdout
