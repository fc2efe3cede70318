"""Sources and loaders as a run makes them."""

from collections.abc import Iterable, Sequence

import torch

from data.batch import Batch, BatchShard
from data.config import DataConfig
from data.open import open_data
from data.source import DatasetRequest
from models.config import VitConfig

CONFIG = VitConfig(img_size=16, patch_size=4, num_classes=10)
EVERYTHING = BatchShard()


def arguments(data_dir, **changes):
    values = {
        "data_dir": str(data_dir),
        "batch_size": 100,
        "num_workers": 0,
        "scale": (0.3, 1.0),
        "ratio": (0.75, 1.33),
        "hflip": 0.5,
    }
    return DataConfig(**values | changes)


def wanted(config, model=CONFIG, seed=3):
    size = (model.img_size, model.img_size)
    return DatasetRequest(config, model.in_chans, size, model.num_classes, seed)


def loaders(config, share=EVERYTHING, model=CONFIG, seed=3):
    source = open_data(wanted(config, model, seed))
    return (
        source.train_loader(config.batch_size, share),
        source.val_loader(config.global_micro_batch_size, share),
    )


# -- batches ---------------------------------------------------------------------------


def check_same(found: Batch, expected: Batch) -> None:
    """Both have the same fields, and each the same dtype, shape and values."""
    assert found.keys() == expected.keys()
    for name, values in expected.items():
        assert found[name].dtype == values.dtype, name
        assert torch.equal(found[name], values), name  # their shapes, too


def check_same_epochs(found: Iterable[Batch], expected: Iterable[Batch]) -> None:
    """Both have the same batches, and as many."""
    for ours, theirs in zip(found, expected, strict=True):
        check_same(ours, theirs)


def concatenated(parts: Sequence[Batch]) -> Batch:
    """One batch of what several processes have loaded, or of consecutive batches."""
    assert all(part.keys() == parts[0].keys() for part in parts)
    return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
