"""Small pictures of images, of any source and view."""

import numpy as np
import pytest
from PIL import Image

from data.batch import SampleIndex
from data.config import DataConfig
from data.files import BrokenImageError
from data.open import open_data
from data.source import DatasetRequest, Split, View
from features.image_sizes.buckets import BucketView
from features.native_resolution.packing import PackRequest
from features.native_resolution.sequences import SequenceView
from tests.support.own_view import DetailAndOverview

pytestmark = pytest.mark.fast


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A wide image, red on the left and blue on the right, and one that is cut off."""
    root = tmp_path_factory.mktemp("thumbnails")
    pixels = np.zeros((64, 256, 3), np.uint8)
    pixels[:, :128, 0] = pixels[:, 128:, 2] = 255
    for number, name in enumerate(("0.jpg", "1.png", "2.png")):
        path = root / "val" / f"class{number % 2}" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels).save(path, quality=95)
    path.write_bytes(path.read_bytes()[:60])
    return root


def val(view=None, size=(32, 32), channels=3, **flags):
    config = DataConfig(**{"batch_size": 2, "num_workers": 0} | flags)
    how = {"with_train": False, "augment": False, "view": view or View()}
    return open_data(DatasetRequest(config, channels, size, 10, 0, **how)).splits["val"]


PACKED = SequenceView(PackRequest((4, 4), 1, 64, 4, 64, False, (1.0, 1.0), 0.0))


@pytest.mark.parametrize("view", [View(), DetailAndOverview(), PACKED])
def test_of_the_whole_stored_image(view, folder):
    """Neither cropped nor normalized, whatever a view reads of it."""
    split = val(view, data_dir=str(folder))
    for number in range(3):
        if split.name_of(number).endswith("2.png"):
            with pytest.raises(BrokenImageError):
                split.thumbnail(number, 48)
            continue
        picture = split.thumbnail(number, 48)
        assert (picture.mode, picture.size) == ("RGB", (48, 12))
        left, right = (np.array(picture.getpixel((x, 6))) for x in (4, 43))
        assert np.abs(left - [255, 0, 0]).max() < 8
        assert np.abs(right - [0, 0, 255]).max() < 8


def test_no_larger_than_the_image(folder):
    assert val(data_dir=str(folder)).thumbnail(0, 1000).size == (256, 64)


def test_in_buckets(folder):
    split = val(view=BucketView(), data_dir=str(folder), buckets=["32x32", "16x64"])
    number = next(n for n in range(3) if split.name_of(n).endswith("0.jpg"))
    assert split.name_of(number).startswith(str(folder))
    assert split.thumbnail(number, 48).size == (48, 12)


def test_of_normalized_images():
    """Mosaics are gray, and normalized on reading."""
    split = val(data_source="mosaics", size=(32, 32))
    picture = np.array(split.thumbnail(3, 64))
    assert picture.shape == (32, 32, 3)
    assert (picture.min(), picture.max()) == (0, 255)
    sample = split[SampleIndex(0, 3)].fields["image"]
    mean, std = split.request.config.preprocessing.of_channels(3)
    pixels = sample.permute(1, 2, 0).numpy() * std + mean
    assert np.abs(picture - 255 * pixels).max() <= 0.51


def test_of_a_volume_its_middle_slice(tmp_path):
    array = np.zeros((8, 16, 16), np.float32)
    array[4, :, 8:] = 1.0
    for name in ("class0", "class1"):
        (tmp_path / "val" / name).mkdir(parents=True)
        np.save(tmp_path / "val" / name / "a.npy", array)
    split = val(data_dir=str(tmp_path), data_source="volumes", size=(8, 16, 16), channels=1)
    picture = np.array(split.thumbnail(0, 64))
    assert picture.shape == (16, 16, 3)
    assert (picture[:, :8] == 0).all()
    assert (picture[:, 8:] == 255).all()


def test_of_samples_that_are_no_images():
    class Sounds(Split):
        def load_sample(self, number, epoch, index):
            return {}

    request = DatasetRequest(DataConfig(), 3, (32, 32), 10, 0)
    with pytest.raises(BrokenImageError, match="not an image"):
        Sounds(request, "val", [0]).thumbnail(0, 64)
