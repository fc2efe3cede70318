"""A 3-D HybridViT on volumes in files: the same training on any number of devices; it learns."""

import numpy as np
import pytest
import torch

from data.batch import SampleIndex
from data.config import DataConfig
from data.digits import MosaicsSplit
from data.source import DatasetRequest
from tests.support.cli import train_tiny, train_tiny_gpu
from tests.support.marks import long

SIZE = (16, 24, 32)
MODEL = (
    "--model hybrid_vit --dimension 3 --in_chans 1 --patch_size 8 --embed_dim 48 --num_heads 4 "
    "--num_blocks 2 --image_size 16 24 32"
).split()


@pytest.fixture(scope="module")
def volumes(tmp_path_factory):
    """Mosaics of digits as files, in class folders; a slice more than the model takes."""
    root = tmp_path_factory.mktemp("volumes")
    plain = DataConfig(mean=(0.0, 0.0, 0.0), std=(1.0, 1.0, 1.0))
    for split, count in (("train", 80), ("val", 30)):
        mosaics = MosaicsSplit(DatasetRequest(plain, 1, SIZE, 10, 0), split)
        for index in range(count):
            sample = mosaics[SampleIndex(0, index)].fields
            volume, label = sample["image"], int(sample["target"])
            larger = torch.nn.functional.pad(volume[0], (0, 0, 0, 0, 0, 1)).numpy()
            folder = root / split / str(label)
            folder.mkdir(parents=True, exist_ok=True)
            if index % 2:
                np.save(folder / f"{index}.npy", (larger * 255).astype(np.uint8))
            else:
                np.savez_compressed(folder / f"{index}.npz", larger)
    return root


def flags(volumes, *more):
    source = ["--data_source", "volumes", "--data_dir", str(volumes), "--num_workers", "1"]
    return [*source, *MODEL, "--max_steps", "4", *more]


@pytest.mark.parametrize("train", [long(train_tiny), train_tiny_gpu])
def test_fake_volumes(train, tmp_path):
    """The loss of zeros is that of label 0 with the same weights, whatever the data says."""
    run = train(tmp_path / "run", "--fake_data", *MODEL, "--max_steps", "1")
    (loss,), (evaluation,) = run.column("loss"), run.evaluations
    assert evaluation["val_loss"] == pytest.approx(loss, rel=1e-5)  # the first step has lr 0
    assert "validation images; all have label 0, so their losses and accuracies" in run.stdout


@pytest.mark.parametrize(
    ("train", "form", "how"),
    [
        long(train_tiny, (), {"devices": 2}),
        (train_tiny_gpu, (), {"processes": 2}),
        long(train_tiny_gpu, ("--fsdp", "simple", "--compile"), {"processes": 2}),
    ],
)
def test_the_same_training_on_parts_of_volumes(train, form, how, volumes, tmp_path):
    """In one process, and on two devices or processes that have other slices each."""
    one = train_tiny_gpu(tmp_path / "one", *flags(volumes))
    ring = flags(volumes, "--mesh_domain", "2", "--domain_attention", "ring")
    two = train(tmp_path / "two", *ring, *form, **how)
    assert two.column("loss") == pytest.approx(one.column("loss"), rel=1e-5)
    assert two.column("grad_norm") == pytest.approx(one.column("grad_norm"), rel=1e-4)
    (found,), (expected,) = two.evaluations, one.evaluations
    assert found["val_images"] == expected["val_images"] == 30
    assert found["val_loss"] == pytest.approx(expected["val_loss"], rel=1e-5)
