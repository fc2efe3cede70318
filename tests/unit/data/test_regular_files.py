"""Only regular files are data: a link to a pipe waits for ever, one to /dev/zero has no end."""

import os
import shutil

import numpy as np
import pytest

from data.batch import BatchShard
from data.config import DataConfig
from data.files import BrokenImageError, DataFolderError
from data.image_table import read_table
from data.open import open_data
from data.pack import pack
from data.source import DatasetRequest
from data.volumes import open_array
from tests.support.archives import write_imagenet_archives
from tests.support.cli import DIGITS
from tests.support.little_memory import sparse

pytestmark = pytest.mark.fast


def opened(data_dir, source):
    config = DataConfig(data_dir=str(data_dir), data_source=source, batch_size=20, num_workers=0)
    return open_data(DatasetRequest(config, 3, (16, 16), 10, seed=0))


@pytest.fixture
def few_digits(tmp_path):
    """Two images a class of each split."""
    for split in ("train", "val"):
        for folder in (DIGITS / split).iterdir():
            to = tmp_path / "few" / split / folder.name
            to.mkdir(parents=True)
            for image in sorted(folder.iterdir())[:2]:
                shutil.copy(image, to)
    return tmp_path / "few"


def test_images_in_folders(few_digits, endless):
    links = [few_digits / "train" / "3" / "0.png", few_digits / "val" / "0" / "0.png"]
    for link in links:
        link.symlink_to(endless)
    data = opened(few_digits, "folder")
    loaders = (
        data.train_loader(7, BatchShard()),
        data.val_loader(7, BatchShard()),
    )  # 21 images of each
    for link, loader in zip(links, loaders, strict=True):
        assert [len(batch["target"]) for batch in loader.epoch(0)] == [7, 7, 7]
        ((path, reason, *_),) = loader.bad_images()
        assert (path, reason) == (str(link), "it is not a regular file")


def test_images_to_be_packed(few_digits, endless, tmp_path):
    (few_digits / "val" / "0" / "0.png").symlink_to(endless)
    with pytest.raises(OSError, match="it is not a regular file"):
        pack(str(few_digits), str(tmp_path / "packed"), 10**6, 1)


@pytest.mark.parametrize(
    ("source", "name"), [("webdataset", "{}.tar"), ("parquet", "{}-00000.parquet")]
)
def test_shards_and_tables(source, name, endless, tmp_path):
    folder = tmp_path / "data"
    (folder / "train").mkdir(parents=True)
    (folder / "val").mkdir(parents=True)
    for split in ("train", "val"):
        (folder / split / name.format(split)).symlink_to(endless)
    with pytest.raises(DataFolderError, match="cannot be read: it is not a regular file"):
        opened(folder, source)


@pytest.mark.parametrize("suffix", [".npy", ".npz", ".nii.gz", ".tif"])
def test_arrays(suffix, endless, tmp_path):
    path = tmp_path / f"array{suffix}"
    path.symlink_to(endless)
    with pytest.raises(BrokenImageError, match="it is not a regular file"), open_array(str(path)):
        pass
    np.save(tmp_path / "real.npy", np.zeros((2, 2)))
    (tmp_path / "link.npy").symlink_to(tmp_path / "real.npy")
    with open_array(str(tmp_path / "link.npy")) as array:
        assert array.shape == (2, 2)


def test_archives_to_be_packed(endless, tmp_path):
    write_imagenet_archives(tmp_path / "archives")
    for name in ("ILSVRC2012_img_val.tar", "ILSVRC2012_devkit_t12.tar.gz"):
        (tmp_path / "archives" / name).unlink()
        (tmp_path / "archives" / name).symlink_to(endless)
        with pytest.raises(
            DataFolderError, match=f"{name} cannot be read: it is not a regular file"
        ):
            pack(str(tmp_path / "archives"), str(tmp_path / "packed"), 10**6, 1)
        (tmp_path / "archives" / name).unlink()
        write_imagenet_archives(tmp_path / "archives")


@pytest.mark.parametrize("name", ["dataset_dict.json", "train/state.json", "train/data.arrow"])
def test_saved_data_sets(name, endless, tmp_path):
    (tmp_path / "saved" / "train").mkdir(parents=True)
    (tmp_path / "saved" / name).symlink_to(endless)
    with pytest.raises(DataFolderError, match=f"{name} cannot be read: it is not a regular file"):
        opened(tmp_path / "saved", "huggingface")
    if name.endswith("json"):
        (tmp_path / "saved" / name).unlink()
        sparse(tmp_path / "saved" / name)
        with pytest.raises(
            DataFolderError, match=f"{name} cannot be read: .* a file of text or JSON"
        ):
            opened(tmp_path / "saved", "huggingface")


def test_labels(endless, tmp_path):
    config = DataConfig(data_dir=str(tmp_path), labels=str(endless))
    with pytest.raises(DataFolderError, match="cannot be read: it is not a regular file"):
        read_table(config)


def test_index_files(few_digits, endless, tmp_path, capsys):
    """They are caches: one that is a link to something else is built again."""
    config = DataConfig(
        str(few_digits), batch_size=20, num_workers=0, index_dir=str(tmp_path / "index")
    )
    for folder in few_digits.rglob("*"):  # the index of a folder that has just changed is not saved
        os.utime(folder, (1e9, 1e9))
    open_data(DatasetRequest(config, 3, (16, 16), 10, seed=0))
    paths = sorted((tmp_path / "index").iterdir())
    assert len(paths) == 2
    for path in paths:
        path.unlink()
        path.symlink_to(endless)
    capsys.readouterr()
    assert open_data(DatasetRequest(config, 3, (16, 16), 10, seed=0)).train_length == 20
    assert capsys.readouterr().err.count("is being rebuilt: it is not a regular file") == 2
    assert not any(path.is_symlink() for path in paths)
