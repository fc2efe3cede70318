"""Sources and loaders as a run makes them."""

from data.batch import BatchShard
from data.config import DataConfig
from data.source import DatasetRequest, open_data
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
