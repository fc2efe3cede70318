"""Tar files, and ImageNet's archives as they are downloaded, with digits in them."""

import gzip
import io
import tarfile
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from scipy.io import savemat

from tests.support.cli import ALL_DIGITS


def write_tar(path: Path, files: Mapping[str, bytes], fmt: int = tarfile.PAX_FORMAT) -> None:
    """A tar file of these names and contents."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w", format=fmt) as tar:
        for name, content in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))


def write_imagenet_archives(folder: Path) -> None:
    """Three classes; the devkit has a synset of others, too."""
    names = ["n03", "n01", "n02"]
    train = {}
    for name in names:
        digits = sorted((ALL_DIGITS / "train" / name[-1]).iterdir())[:4]
        images = {f"{name}_{number}.JPEG": path.read_bytes() for number, path in enumerate(digits)}
        write_tar(folder / "class.tar", images)
        train[f"{name}.tar"] = (folder / "class.tar").read_bytes()
    write_tar(folder / "ILSVRC2012_img_train.tar", train)
    digits = [*(ALL_DIGITS / "val").glob("*/*.png")][:8]
    images = {f"ILSVRC2012_val_{n:08}.JPEG": path.read_bytes() for n, path in enumerate(digits, 1)}
    write_tar(folder / "ILSVRC2012_img_val.tar", images)
    numbers = {"n03": 2, "n01": 3, "n02": 1, "n00": 1001}
    columns = ("ILSVRC2012_ID", "WNID", "words", "gloss", "num_children")
    rows = [(number, name, name, name, 2 * (number > 1000)) for name, number in numbers.items()]
    meta = io.BytesIO()
    savemat(meta, {"synsets": np.array(rows, [(column, object) for column in columns])})
    labels = "".join(f"{1 + n % 3}\n" for n in range(len(digits)))
    content = {
        "ILSVRC2012_validation_ground_truth.txt": labels.encode(),
        "meta.mat": meta.getvalue(),
    }
    devkit = {f"ILSVRC2012_devkit_t12/data/{name}": data for name, data in content.items()}
    write_tar(folder / "devkit.tar", devkit)
    with gzip.open(folder / "ILSVRC2012_devkit_t12.tar.gz", "wb") as file:
        file.write((folder / "devkit.tar").read_bytes())
