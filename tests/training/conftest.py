"""What tests of features share: images of each split, and the weights of a backbone."""

import shutil

import pytest
from safetensors.torch import save_file

from tests.support.features import TRAIN, VAL, backbone


@pytest.fixture(scope="module")
def images(digits, tmp_path_factory):
    """A few digits of each split, in an order that is not their number's, and a broken one."""
    root = tmp_path_factory.mktemp("images")
    for split, count in (("train", TRAIN), ("val", VAL)):
        paths = sorted((digits / split).glob("*/*.png"))
        for number, path in enumerate(paths[:: len(paths) // count][:count]):
            target = root / split / path.parent.name / f"{99 - number:02}.png"
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(path, target)
    (root / "train" / "3" / "broken.png").write_bytes(b"no image")
    return root


@pytest.fixture(scope="module")
def weights(tmp_path_factory):
    path = tmp_path_factory.mktemp("weights") / "backbone.safetensors"
    save_file({name: each.contiguous() for name, each in backbone().state_dict().items()}, path)
    return path
