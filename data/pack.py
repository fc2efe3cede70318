"""Writes images as tar files, the shards of WebDataset, for ``--data_source webdataset``.

    python3 -m data.pack /datasets/imagenet-1k gs://bucket/imagenet-1k-shards --workers 8

The source is an image folder, perhaps with a table of its images and their captions (``--labels``,
``--captions``), or a folder with ImageNet's archives as they are downloaded, which are read in
place. The target is a new folder, or
a URL. Files are copied as they are: broken ones stay broken, and images stay in their order, so
that a run trains on the same as from the folder. The same images give the same shards, byte by
byte.
"""

import argparse
import contextlib
import io
import itertools
import json
import os
import re
import shutil
import sys
import tarfile
import tempfile
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, NamedTuple

if __name__ == "__main__":  # by its path from any folder, or by another Python
    sys.path[0] = str(Path(__file__).resolve().parent.parent)
    import check_python

    check_python.check("data.pack")

import xxhash
from tqdm import tqdm

from config_fields import flag_of, not_empty, path_or_url, positive
from data import files
from data.config import RANDOM_SPLIT, DataConfig
from data.decode import SUFFIXES
from data.files import (
    DataFolderError,
    MissingSplitError,
    is_url,
    printable,
    reason_of,
    regular,
)
from data.image_table import read_table
from data.index import SPLITS, FolderIndex, check_folder, folder_of_images, index_split
from data.source import NO_VALUES, Value
from data.utf8 import encodable, use_utf8
from data.webdataset import PACK_FILE, MemberInfo, regular_members

# -- the images of a source ------------------------------------------------------------


class _Image(NamedTuple):
    """Where an image is: so many bytes of a file, which may be an archive."""

    name: str
    file: str
    start: int
    size: int
    label: int
    captions: tuple[str, ...] = ()

    def contents(self, *, labels: bool) -> dict[str, bytes]:
        """Return what is written beside the image, by extension: captions in a text file or, if
        there are several, as a list in JSON."""
        contents = {".cls": str(self.label).encode()} if labels else {}
        if len(self.captions) == 1:
            contents[".txt"] = self.captions[0].encode(errors="surrogateescape")
        elif self.captions:
            contents[".json"] = json.dumps({CAPTION: self.captions}).encode()
        return contents


CAPTION = "caption"
"""The field of JSON that has captions, as in img2dataset's."""
Splits = dict[str, list[_Image]]
"""The images of each split, in their order."""


def _table_images(
    config: DataConfig, captions: str | None, *, labels: bool
) -> tuple[Splits, list[str] | None]:
    """Return the images that a table lists, with those in its column of ``captions`` that are not
    empty, and the names of the classes by label."""
    values = {CAPTION: Value((captions,), "--captions")} if captions else NO_VALUES
    indices = read_table(config, labels=labels, values=values)
    splits = {name: _images(index) for name, index in indices.items()}
    return splits, next(iter(indices.values())).classes


def _images(index: FolderIndex) -> list[_Image]:
    captions = index.values.get(CAPTION) or itertools.repeat(())
    return [
        _Image(path, path, 0, os.path.getsize(path), label, tuple(filter(None, texts)))
        for path, label, texts in zip(index.paths, index.labels.tolist(), captions, strict=False)
    ]


def _folder_images(source: str, *, labels: bool) -> tuple[Splits, list[str] | None]:
    """Return the images of an image folder, and the names of the classes by label."""
    folders = {split: os.path.join(source, split) for split in SPLITS}
    if labels:
        check_folder(source, num_classes=2**31)
    else:
        folders = {"train": folder_of_images(source, "train")}
        with contextlib.suppress(MissingSplitError):
            folders["val"] = folder_of_images(source, "val")
    splits: Splits = {}
    for split, folder in folders.items():
        index = index_split(folder, labels=labels)
        splits[split] = _images(index)
    return splits, index.classes


TRAIN_ARCHIVE = "ILSVRC2012_img_train.tar"
"""A tar of a tar for each class, named as it is in WordNet: n01440764.tar."""
_VAL_ARCHIVE = "ILSVRC2012_img_val.tar"
_DEVKIT = "ILSVRC2012_devkit_t12.tar.gz"
"""Has the labels of the images in ``_VAL_ARCHIVE``, by number."""
_GROUND_TRUTH = "ILSVRC2012_devkit_t12/data/ILSVRC2012_validation_ground_truth.txt"
_SYNSETS = "ILSVRC2012_devkit_t12/data/meta.mat"


def _archived_images(source: str, *, labels: bool) -> tuple[Splits, list[str] | None]:
    """Return the images of ImageNet's archives in ``source``, as ``_folder_images`` those of the
    folder that they are commonly unpacked to."""
    archive = os.path.join(source, TRAIN_ARCHIVE)
    by_class: dict[str, list[_Image]] = {}
    with _readable(archive) as tar:
        members = [m for m in regular_members(tar) if not files.is_hidden(m.name)]
        members.sort(key=lambda member: member.name)
        for label, member in enumerate(tqdm(members, f"reading {archive}", delay=5, disable=None)):
            start, name = member.offset_data, Path(member.name).stem
            with _readable(archive, tar.extractfile(member)) as inner:
                by_class[name] = [
                    image._replace(start=start + image.start, label=label * labels)
                    for image in _members(archive, inner)
                ]
    classes = [*by_class]
    splits = {"train": [image for images in by_class.values() for image in images]}

    archive = os.path.join(source, _VAL_ARCHIVE)
    if labels or os.path.exists(archive):
        with _readable(archive) as tar:
            images = [*_members(archive, tar)]
        if labels:
            wordnet_names = _wordnet_names_of_val(os.path.join(source, _DEVKIT))
            if len(wordnet_names) != len(images) or {*wordnet_names} != {*classes}:
                raise DataFolderError(
                    f"{archive} has {len(images):,} images and {TRAIN_ARCHIVE} {len(classes):,} "
                    f"classes, but {_DEVKIT} has labels for {len(wordnet_names):,} images in "
                    f"{len({*wordnet_names}):,} classes: an archive is incomplete, or of another "
                    "release: compare the sizes with image-net.org's"
                )
            label_of = {name: label for label, name in enumerate(classes)}
            images = [
                image._replace(label=label_of[name])
                for image, name in zip(images, wordnet_names, strict=True)
            ]
            images.sort(key=lambda image: (image.label, image.name))
        splits["val"] = images
    return splits, classes


@contextlib.contextmanager
def _readable(archive: str, part: Any = None) -> Iterator[tarfile.TarFile]:
    """Open an archive, or the one that is the member ``part`` of it. Raises DataFolderError for
    whatever goes wrong inside, too."""
    mode: Any = "r:gz" if archive.endswith("gz") else "r:"
    with (
        files.reporting(archive, "read"),
        open(archive, "rb", opener=regular) as file,
        tarfile.open(archive, mode, part or file, tarinfo=MemberInfo) as tar,
    ):
        yield tar


def _members(archive: str, tar: tarfile.TarFile) -> list[_Image]:
    """Return the images of an archive by name, without labels. Raises ValueError if there are none,
    and TarError if the archive was not downloaded to its end."""
    images = [
        _Image(os.path.basename(member.name), archive, member.offset_data, member.size, 0)
        for member in regular_members(tar)
        if not files.is_hidden(member.name)
    ]
    images = [image for image in images if image.name.lower().endswith(SUFFIXES)]
    if not images:
        raise ValueError("it contains no images")
    return sorted(images)


def _wordnet_names_of_val(devkit: str) -> list[str]:
    """Return the class of each validation image, by the image's number."""
    try:
        from scipy.io import loadmat  # comes with scikit-learn
    except ImportError:
        raise DataFolderError(
            f"{devkit} requires the package scipy: python3 -m pip install scipy"
        ) from None
    contents = []
    with _readable(devkit) as tar:
        for name in (_SYNSETS, _GROUND_TRUTH):
            member = tar.extractfile(name)
            assert member
            files.TEXT.check(tar.getmember(name).size, name)
            contents.append(member.read())
        synsets = loadmat(io.BytesIO(contents[0]), squeeze_me=True)["synsets"]
        names = {int(synset["ILSVRC2012_ID"]): str(synset["WNID"]) for synset in synsets}
        return [names[int(number)] for number in contents[1].split()]


# -- writing them ----------------------------------------------------------------------


@dataclass
class _Shard:
    """One shard to write."""

    path: str
    """Below the target, such as train/train-000000.tar."""
    first: int
    """The number of its first image in the split."""
    images: list[_Image] = field(default_factory=list)
    size: int = 0
    """The size in bytes of what is in it."""

    @property
    def file_size(self) -> int:
        """With the two empty blocks of its end, in whole records."""
        return -(-(self.size + 2 * tarfile.BLOCKSIZE) // tarfile.RECORDSIZE) * tarfile.RECORDSIZE


def pack(
    source: str,
    target: str,
    shard_size: int,
    workers: int,
    *,
    labels: bool = True,
    table: DataConfig | None = None,
    captions: str | None = None,
) -> list[str]:
    """Write the images of ``source`` as shards of at most ``shard_size`` bytes; return their paths.

    A folder appears when it is complete. At a URL each shard does, and until all have, a file there
    says that the target is incomplete; the same call goes on where an interrupted one stopped.
    Without ``labels`` images need no class folders, and there need be no val/. ``table``: the
    flags of the table that lists the images; ``captions``: its column of captions. Raises
    DataFolderError.
    """
    if is_url(source):
        raise DataFolderError(f"{source} is a URL: pack a folder on a local disk")
    if not is_url(target) and os.path.exists(target):
        raise DataFolderError(f"{target} already exists: choose another target")
    has_archives = os.path.isfile(os.path.join(source, TRAIN_ARCHIVE))
    if table:
        config = replace(table, data_dir=source)
        splits, classes = _table_images(config, captions, labels=labels)
    elif has_archives and not os.path.exists(os.path.join(source, "train")):
        splits, classes = _archived_images(source, labels=labels)
    else:
        splits, classes = _folder_images(source, labels=labels)

    # Which images are in which shard.
    shards: list[_Shard] = []
    block, digest = tarfile.BLOCKSIZE, xxhash.xxh3_128(f"{shard_size} {labels}".encode())
    for split, images in splits.items():
        of_split: list[_Shard] = []
        with files.reporting(source, "packed"):
            for image in images:
                files.ENCODED.check(image.size, image.name)
        for number, image in enumerate(images):
            # Each file is a header, and its content in as many blocks as it fills.
            beside = image.contents(labels=labels)
            lengths = [image.size, *map(len, beside.values())]
            size = sum((1 - (-length // block)) * block for length in lengths)
            if not of_split or of_split[-1].size + size > shard_size - tarfile.RECORDSIZE:
                of_split.append(_Shard(f"{split}/{split}-{len(of_split):06}.tar", number))
            of_split[-1].images.append(image)
            of_split[-1].size += size
            name = os.path.basename(image.name).encode(errors="surrogateescape")
            digest.update(b"%b %d %d\n" % (name, image.size, image.label))
            digest.update(b"".join(beside[each] for each in (".txt", ".json") if each in beside))
        shards += of_split

    # To a URL only the shards that are not there yet are written.
    to_write, written_to = shards, target
    if is_url(target):
        sizes = _begin(target, digest.hexdigest())
        to_write = [shard for shard in shards if sizes.get(shard.path) != shard.file_size]
    else:
        written_to = f"{target}.partial"
        shutil.rmtree(written_to, ignore_errors=True)
        for split in splits:
            os.makedirs(os.path.join(written_to, split))
    bar = tqdm(total=sum(shard.size for shard in shards), unit="B", unit_scale=True, disable=None)
    with bar, ProcessPoolExecutor(workers) as pool:
        bar.update(bar.total - sum(shard.size for shard in to_write))
        writing = [pool.submit(_write, shard, written_to, labels=labels) for shard in to_write]
        try:
            for shard, future in zip(to_write, writing, strict=True):
                future.result()
                bar.update(shard.size)
        except BaseException:
            pool.shutdown(cancel_futures=True)  # what has begun ends; nothing else begins
            raise
    names = json.dumps(classes).encode()
    if is_url(target):
        if labels:
            files.put(names, f"{target}/classes.json")
        files.put(_state(digest.hexdigest(), complete=True), f"{target}/{PACK_FILE}")
    else:
        if labels:
            Path(written_to, "classes.json").write_bytes(names)
        os.rename(written_to, target)
    return [f"{target}/{shard.path}" for shard in shards]


def _state(digest: str, *, complete: bool) -> bytes:
    return json.dumps({"of": digest, "complete": complete}).encode()


def _begin(target: str, digest: str) -> dict[str, int]:
    """Mark a URL as incomplete; return the sizes of the files that an interrupted call left there.
    Raises DataFolderError if they are not of the same images, or complete."""
    there = files.find_files(target)
    if there:
        state = {}
        with contextlib.suppress(files.BrokenImageError, ValueError):
            state = files.parse_object(files.read_bytes(f"{target}/{PACK_FILE}", limit=files.TEXT))
        if state.get("complete") is not False or state.get("of") != digest:
            raise DataFolderError(
                f"{target} already exists and is not an interrupted run of the same command: "
                "choose another target"
            )
    system, path = files.open_system(target)
    with files.reporting(target, "written"):
        for split in SPLITS:
            system.makedirs(f"{path}/{split}", exist_ok=True)  # where the storage has folders
    files.put(_state(digest, complete=False), f"{target}/{PACK_FILE}")
    return {name: info["size"] for name, info in there.items()}


def _write(shard: _Shard, target: str, *, labels: bool) -> None:
    """Write a shard, without owner and time. Raises DataFolderError, and OSError."""
    with contextlib.ExitStack() as stack:
        path = f"{target}/{shard.path}"
        if is_url(target):
            path = f"{stack.enter_context(tempfile.TemporaryDirectory())}/shard.tar"
        with tarfile.open(path, "w", format=tarfile.USTAR_FORMAT) as tar:
            for number, image in enumerate(shard.images, shard.first):
                with open(image.file, "rb", opener=regular) as file:
                    file.seek(image.start)
                    contents = {os.path.splitext(image.name)[1].lower(): file.read(image.size)}
                contents |= image.contents(labels=labels)
                for ending, content in contents.items():
                    member = tarfile.TarInfo(f"{number:08}{ending}")
                    member.size = len(content)
                    tar.addfile(member, io.BytesIO(content))
        if is_url(target):
            files.put(path, f"{target}/{shard.path}")


# -- the command line ------------------------------------------------------------------


def _size(text: str) -> int:
    """Read a number of bytes such as 256MB, as an argparse type."""
    units = {"KB": 10**3, "MB": 10**6, "GB": 10**9}
    match = re.fullmatch(r"(\d+)(KB|MB|GB)", text, re.IGNORECASE | re.ASCII)
    if not match or not int(match[1]):
        raise argparse.ArgumentTypeError(f"{text!r} is not a size such as 256MB or 1GB")
    return int(match[1]) * units[match[2].upper()]


_TABLE_FLAGS = ("labels", "columns", "train_split", "val_split", "class_map", *RANDOM_SPLIT)
"""The flags of a training that say what a table means."""


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="data.pack", description="Write images as WebDataset tar shards."
    )
    parser.add_argument(
        "source",
        type=path_or_url,
        help="folder with train/<class>/* and val/<class>/*, or with ImageNet's archives "
        f"{TRAIN_ARCHIVE}, {_VAL_ARCHIVE} and {_DEVKIT}, which are read without unpacking",
    )
    parser.add_argument(
        "target",
        type=path_or_url,
        help="folder to create, or a URL such as gs://bucket/shards; with a URL, the same "
        "command resumes after an interruption",
    )
    parser.add_argument(
        "--shard_size", type=_size, default="256MB", help="maximum size of a shard (default: 256MB)"
    )
    parser.add_argument(
        "--workers", type=positive, default=4, help="number of writer processes (default: 4)"
    )
    parser.add_argument(
        "--without_labels",
        action="store_true",
        help="pack images without labels, from anywhere below train/ and val/, or below source",
    )
    parser.add_argument(
        "--captions",
        type=not_empty,
        metavar="COLUMN",
        help="column of --labels with captions, to be packed as .txt, or as .json if an image has "
        "several (default: pack no captions)",
    )
    for each in fields(DataConfig):
        option = flag_of(each)
        if option and each.name in _TABLE_FLAGS:
            parser.add_argument(
                f"--{each.name}",
                type=option.kind or not_empty,
                metavar=option.metavar,
                default=each.default,
                nargs="+" if each.name == "columns" else None,
                help=option.help.replace("--data_dir", "source"),
            )
    args = parser.parse_args()
    given = {name: getattr(args, name) for name in _TABLE_FLAGS}
    table = DataConfig(**given)
    if table.labels is None and (table != DataConfig() or args.captions):
        parser.error("the flags of a table require --labels")
    try:
        target, labels = args.target.rstrip("/"), not args.without_labels
        shards = pack(
            args.source,
            target,
            args.shard_size,
            args.workers,
            labels=labels,
            table=table if table.labels else None,
            captions=args.captions,
        )
    except (DataFolderError, OSError) as error:
        message = str(error)
        if isinstance(error, OSError):
            message = f"{error.filename}: {reason_of(error)}"
        parser.exit(2, f"{parser.prog}: error: {printable(message)}\n")
    print(encodable(f"{len(shards)} shards: {printable(target)}"))


if __name__ == "__main__":
    use_utf8()
    main()
