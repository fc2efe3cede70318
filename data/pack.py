"""Writes an image folder as tar files, the shards of WebDataset, for ``--data_source webdataset``.

    python3 -m data.pack /datasets/imagenet-1k /datasets/imagenet-1k-shards --workers 8

Files are copied as they are: broken ones stay broken, and images stay in their order, so that a
run trains on the same as from the folder. The same folder gives the same shards, byte by byte.
"""

import argparse
import contextlib
import io
import json
import os
import re
import shutil
import tarfile
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from tqdm import tqdm

from config_fields import local_path, path_or_url, positive
from data.files import DataFolderError, MissingSplitError, is_url, printable, reason_of, regular
from data.index import SPLITS, check_folder, folder_of_images, index_split


@dataclass
class _Job:
    """One shard to write."""

    path: Path
    first: int
    """The number of its first image in the split."""
    files: list[tuple[str, int]]
    """The path and the label of each image."""
    size: int
    """The expected size in bytes."""
    labels: bool
    """Whether the labels are written."""


def pack(
    source: str, target: Path, shard_size: int, workers: int, *, labels: bool = True
) -> list[Path]:
    """Write the image folder ``source`` as shards of at most ``shard_size`` bytes, atomically;
    return them. Without ``labels`` its images need no class folders, and it needs no val/. Raises
    DataFolderError."""
    if is_url(source):
        raise DataFolderError(f"{source} is a URL: pack a folder on a disk of this host")
    if target.exists():
        raise DataFolderError(f"{target} is there already: give another name")
    folders = {split: os.path.join(source, split) for split in SPLITS}
    if labels:
        check_folder(source, num_classes=2**31)
    else:
        folders = {"train": folder_of_images(source, "train")}
        with contextlib.suppress(MissingSplitError):
            folders["val"] = folder_of_images(source, "val")
    partial = target.with_name(f"{target.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    jobs: list[_Job] = []
    block = tarfile.BLOCKSIZE
    for split, folder in folders.items():
        index = index_split(folder, labels=labels)
        (partial / split).mkdir(parents=True)
        shards: list[_Job] = []  # a split's images, in their order
        images = zip(index.paths, index.labels.tolist(), strict=True)
        for number, (path, label) in enumerate(images):
            # A header, and the image in as many blocks as it fills; the label has one of each.
            size = ((3 if labels else 1) - (-os.path.getsize(path) // block)) * block
            if not shards or shards[-1].size + size > shard_size - tarfile.RECORDSIZE:
                tar = partial / split / f"{split}-{len(shards):06}.tar"
                shards.append(_Job(tar, number, [], 0, labels))
            shards[-1].files.append((path, label))
            shards[-1].size += size
        jobs += shards
    if labels:
        (partial / "classes.json").write_text(json.dumps(index.classes))
    bar = tqdm(total=sum(job.size for job in jobs), unit="B", unit_scale=True, disable=None)
    with bar, ProcessPoolExecutor(workers) as pool:
        for size in pool.map(_write, jobs):
            bar.update(size)
    partial.rename(target)
    return [target / job.path.relative_to(partial) for job in jobs]


def _write(job: _Job) -> int:
    """Write a shard, without owner and time; return its expected size in bytes."""
    with tarfile.open(job.path, "w", format=tarfile.USTAR_FORMAT) as tar:
        for number, (path, label) in enumerate(job.files, job.first):
            suffix = os.path.splitext(path)[1].lower()
            with open(path, "rb", opener=regular) as image:
                contents = {suffix: image.read()}
            if job.labels:
                contents[".cls"] = str(label).encode()
            for ending, content in contents.items():
                member = tarfile.TarInfo(f"{number:08}{ending}")
                member.size = len(content)
                tar.addfile(member, io.BytesIO(content))
    return job.size


def _size(text: str) -> int:
    """Read a number of bytes such as 256MB, as an argparse type."""
    units = {"KB": 10**3, "MB": 10**6, "GB": 10**9}
    match = re.fullmatch(r"(\d+)(KB|MB|GB)", text, re.IGNORECASE | re.ASCII)
    if not match or not int(match[1]):
        raise argparse.ArgumentTypeError(f"{text!r} is not a size such as 256MB or 1GB")
    return int(match[1]) * units[match[2].upper()]


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="data.pack", description="Write an image folder as the tar shards of WebDataset."
    )
    parser.add_argument(
        "source", type=path_or_url, help="folder with train/<class>/* and val/<class>/*"
    )
    parser.add_argument("target", type=local_path, help="folder to create")
    parser.add_argument(
        "--shard_size", type=_size, default="256MB", help="largest size of a shard (default: 256MB)"
    )
    parser.add_argument(
        "--workers", type=positive, default=4, help="number of processes that write (default: 4)"
    )
    parser.add_argument(
        "--without_labels",
        action="store_true",
        help="pack images without class folders, anywhere below train/ and val/, or below source",
    )
    args = parser.parse_args()
    try:
        labels = not args.without_labels
        shards = pack(args.source, args.target, args.shard_size, args.workers, labels=labels)
    except (DataFolderError, OSError) as error:
        message = str(error)
        if isinstance(error, OSError):
            message = f"{error.filename}: {reason_of(error)}"
        parser.exit(2, f"{parser.prog}: error: {printable(message)}\n")
    print(f"{len(shards)} shards: {printable(str(args.target))}")


if __name__ == "__main__":
    main()
