"""Signs of a collapse: warned of once where they last, never in a sound run."""

import numpy as np
import pytest
import torch

from features.dino.objective import entropy, token_moments, token_std
from tests.support.cli import train_tiny_gpu
from training.logs.collapse import CollapseWatch

QUICK = (
    "--objective dino --class_token --patch_size 8 --batch_size 128 --num_epochs 3 --local_crops 1 "
    "--local_crop_size 8 --dino_prototypes 48 --ibot_prototypes 32 --dino_head_hidden 24 "
    "--dino_head_bottleneck 16 --max_steps 16 --rank_every 16"
).split()
"""Eleven steps an epoch."""
COLLAPSES = (
    "--teacher_temp 0.1 --warmup_teacher_temp 0.1 --koleo_weight 0 --teacher_momentum 0.5"
).split()
SOUND = "--teacher_temp 0.02 --warmup_teacher_temp 0.02 --lr 1e-3".split()


def test_a_run_that_collapses(tmp_path):
    """A teacher that is no sharper than its student, and nothing that spreads class tokens."""
    result = train_tiny_gpu(tmp_path, *QUICK, *COLLAPSES)
    assert result.steps[16]["teacher_entropy"] > 0.99
    assert result.stdout.count("warning: collapse: the teacher gives all prototypes nearly") == 1
    warned = result.stdout.index("warning: collapse: the teacher")
    assert result.stdout.index("epoch 2 step 13,") < warned  # from the second epoch on
    assert warned < result.stdout.index("epoch 2 step 15,")


def test_a_sound_run(tmp_path):
    result = train_tiny_gpu(tmp_path, *QUICK, *SOUND)
    assert max(result.column("teacher_entropy")) < 0.9
    assert min(result.column("token_std")) > 0.2
    assert "collapse" not in result.stdout
    rank = [record["train_rankme"] for record in result.records if "train_rankme" in record]
    assert 1 < rank[0] <= 32


def warnings(name, values, epoch=2):
    """The places of the values that are warned of, of one figure."""
    watch = CollapseWatch(width=100)
    records = ({"step": place, "epoch": epoch, name: v} for place, v in enumerate(values))
    return [place for place, record in enumerate(records) if list(watch.warnings(record))]


@pytest.mark.parametrize(
    ("name", "good", "bad", "in_a_row"),
    [("teacher_entropy", 0.9, 0.999, 3), ("token_std", 0.5, 0.05, 3), ("train_rankme", 9, 2.9, 2)],
)
def test_once_until_it_recovers(name, good, bad, in_a_row):
    falls = [bad] * in_a_row
    assert warnings(name, [good, bad, good] * 9) == []
    assert warnings(name, [good] * 5 + falls * 4) == [4 + in_a_row]
    assert warnings(name, falls * 4) == [in_a_row - 1]
    assert warnings(name, falls * 4, epoch=1) == []  # features differ little at first
    assert warnings(name, [good] * 5 + falls, epoch=1) == [4 + in_a_row]
    again = falls + [good] * in_a_row + falls
    assert warnings(name, again) == [in_a_row - 1, 3 * in_a_row - 1]
    assert warnings(name, [float("nan")] * 9) == []


def test_a_low_rank_that_rises_is_that_of_an_untrained_model():
    assert warnings("train_rankme", [1.5, 1.6, 2.0, 2.5, 2.9]) == []
    assert warnings("train_rankme", [2.5, 2.6, 2.4, 2.3]) == [3]


def test_entropy_at_its_ends():
    assert entropy(torch.full((4, 2, 16), 1 / 16)) == pytest.approx(1)
    assert entropy(torch.eye(16)[:6].view(3, 2, 16)) == 0
    assert torch.isfinite(entropy(torch.zeros(3, 2, 16)))


def test_std_is_the_plain_one_and_its_ends():
    random = np.random.default_rng(0)
    tokens = random.normal(size=(60, 2, 24)) + random.normal(size=24)
    units = tokens / np.linalg.norm(tokens, axis=-1, keepdims=True)
    expected = units.std(axis=0).mean() * 24**0.5
    parts = [token_moments(part) for part in torch.from_numpy(tokens).float().chunk(3)]
    assert token_std(sum(parts) / 3) == pytest.approx(expected, rel=1e-5)
    same = torch.ones(60, 2, 24) * torch.arange(1, 61)[:, None, None]
    assert token_std(token_moments(same)) == pytest.approx(0, abs=1e-3)
    evenly = torch.eye(24).repeat(2, 1)[:, None] * torch.tensor([1.0, -1.0])[:, None]
    evenly = torch.cat([evenly, -evenly])
    assert token_std(token_moments(evenly)) == pytest.approx(1)
