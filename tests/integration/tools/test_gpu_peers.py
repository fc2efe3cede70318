"""The plain PyTorch steps that benchmarks/gpu_step.py compares with do the work of the program's
own step: on the CPU, their losses are equal."""

import json
from types import SimpleNamespace

import pytest
import torch

from benchmarks.gpu_peers import objective_batches, supported_model
from tests.support import dino, mae
from tests.support.cli import TINY_MODEL, run_program
from tests.support.marks import long
from tests.support.resolved import on_gpus
from training.errors import UsageError

FLAGS = {"dino": dino.DINO, "mae": mae.MAE}
TINY = [*TINY_MODEL]
TINY += (
    "--backend cuda --fake_data --batch_size 16 --grad_accum_steps 2 --precision fp32 --lr 1e-2"
).split()


@pytest.mark.parametrize("objective", FLAGS)
@pytest.mark.parametrize(
    ("mode", "compiler"), [("none", "eager"), ("default", "eager"), long("default", "inductor")]
)
def test_losses(objective, mode, compiler):
    program = ["-m", "tests.support.peer_losses", mode, compiler]
    done = run_program(*program, *TINY, *FLAGS[objective])
    assert done.returncode == 0, done.stdout + done.stderr
    losses = json.loads(done.stdout.splitlines()[-1])
    assert losses["plain"] == pytest.approx(losses["own"], rel=1e-4)
    assert len({round(loss, 3) for loss in losses["own"]}) == 3  # it trains


SECOND_OF_TWO = SimpleNamespace(batch_shard=1, batch_shards=2, device_count=2, put=lambda b, _: b)
"""What a backend says of itself in the second of two processes."""


def test_masks_of_random_crops():
    """Of each micro-batch as many patches, of each image as many as --ibot_mask_ratio allows."""
    run = on_gpus([*TINY, *dino.DINO])
    batches = objective_batches(run, SECOND_OF_TWO)
    masks = [batch["mask"] for batch in batches]
    assert [mask.shape for mask in masks] == [(4, 16)] * 2
    assert [mask.sum().item() for mask in masks] == [masks[0].sum().item()] * 2
    assert all(1 <= count <= 8 for count in torch.cat(masks).sum(1))
    assert all(batch["global_crops"].unique().numel() > 200 for batch in batches)


def test_labels_of_random_images():
    """Masked autoencoding needs positions in the global batch, classification classes."""
    of_mae = objective_batches(on_gpus([*TINY, *mae.MAE]), SECOND_OF_TWO)
    assert torch.cat([batch["position"] for batch in of_mae]).tolist() == [*range(8, 16)]
    batches = objective_batches(on_gpus(TINY), SECOND_OF_TWO)
    assert [batch["image"].shape for batch in batches] == [(4, 3, 16, 16)] * 2
    labels = torch.cat([batch["target"] for batch in batches])
    assert 0 <= labels.min() <= labels.max() < 10


def test_several_gpus_are_refused():
    with pytest.raises(UsageError, match="requires one GPU"):
        supported_model(on_gpus([*TINY, *mae.MAE]), SECOND_OF_TWO)
