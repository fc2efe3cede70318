"""Distillation by ``--objective dino --teacher``."""

import pytest

from tests.references import plain_dino
from tests.support.cli import TINY_RUN, tiny, train_tiny, train_tiny_gpu
from tests.support.dino import DINO, SMALL, assert_same, weights_of
from tests.support.resolved import on_xla
from tests.support.usage_error import told_in_one_line

SMALLER = "--embed_dim 16 --num_heads 2 --num_blocks 1 --dino_head_hidden 8".split()


@pytest.fixture(scope="module")
def teacher(tmp_path_factory):
    """The folder of a finished run of dino, its average in plain PyTorch, and the flags of it."""
    folder = tmp_path_factory.mktemp("teacher")
    train_tiny_gpu(folder, *DINO)
    plain = plain_dino.plain_of(on_xla([*tiny(folder / "none"), *DINO]))
    plain.load_state_dict(weights_of(folder, "ema"))
    return folder, plain, ["--teacher", "vit_10b", "--teacher_weights", str(folder)]


@pytest.mark.long
@pytest.mark.parametrize(
    ("run", "how"),
    [(train_tiny_gpu, {"processes": 2}), (train_tiny_gpu, {}), (train_tiny, {"devices": 2})],
)
def test_taught_by_a_larger_model(run, how, teacher, tmp_path):
    folder, plain, flags = teacher
    result = run(tmp_path, *DINO, *SMALLER, *flags, **how)
    assert_same(result, plain_dino.train([*SMALL, *SMALLER], taught_by=plain))
    assert f"of {folder}/step_6, preprocessing" in result.stdout


FLAGS = [*"--data_dir datasets/digits --hflip 0 --image_size 16 --patch_size 4".split(), *TINY_RUN]
SMALL_DINO = ["--objective", "dino", *SMALL]


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        ("{teacher} --dino_prototypes 40", "--teacher vit_10b has 48: use the same"),
        ("{teacher} --ibot_prototypes 40", "--teacher vit_10b has 32: use the same"),
        ("{teacher} --patch_size 8", "--teacher vit_10b has 4 x 4 patches, the student 2 x 2"),
        ("{teacher} --image_size 24", "--teacher vit_10b takes images of 3 x 16 x 16"),
        ("{teacher} --distillation_alpha 0.3", "requires --objective classify, not dino"),
        ("{teacher} --objective mae", "--teacher vit_10b requires --objective classify or --obj"),
    ],
)
def test_mistakes(flags, told, teacher, capsys, tmp_path):
    given = flags.format(teacher=" ".join(teacher[2])).split()
    words = [*FLAGS, "--backend", "cuda", "--ckpt_dir", str(tmp_path / "run"), *SMALL_DINO]
    assert told in told_in_one_line(capsys, *words, *given)
    assert not (tmp_path / "run").exists()
