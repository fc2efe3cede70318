"""Writes and checks a checkpoint's manifest: each file's size and checksum. It is written last.

So a checkpoint is complete when it has one, also on storage where a folder cannot be renamed at
once (buckets). A size is compared whenever a checkpoint is looked for, a checksum (XXH3, 128 bits:
faster than any disk) before it is resumed.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

import xxhash

from training.checkpoints.content import FORMAT, training_entry
from training.checkpoints.reader import named_files, read_metadata
from training.checkpoints.storage import METADATA, Entry
from training.url_path import is_unreachable, replace_file, sync_folder

MANIFEST = "manifest.json"
_CHUNK = 1 << 24


def checksum(path: Path) -> str:
    """Return XXH3 of a file's content, 128 bits in hexadecimal digits."""
    digest = xxhash.xxh3_128()
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
    return digest.hexdigest()


def entries(folder: Path, names: Iterable[str]) -> dict[str, Entry]:
    """Return what a manifest says of these files of a folder."""
    return {name: ((folder / name).stat().st_size, checksum(folder / name)) for name in names}


def write_manifest(folder: Path, files: dict[str, Entry]) -> None:
    """Make a written checkpoint a complete one, on the disk for good.

    Raises OSError if it cannot be written, or if a file that the metadata names is in no process's
    part: then it was written to another disk.
    """
    missing = named_files(folder) - files.keys()
    missing |= {name for name in files if not (folder / name).is_file()}
    if missing:
        raise FileNotFoundError(
            f"{sorted(missing)[0]} is not in the folder: do all processes see the same one?"
        )
    content = {"format": FORMAT, "files": {name: list(files[name]) for name in sorted(files)}}
    replace_file(folder / MANIFEST, json.dumps(content, indent=1) + "\n")
    sync_folder(folder.parent)


def read_manifest(folder: Path) -> dict[str, Entry] | None:
    """Return sizes and checksums by file; None if there is no manifest.

    Raises ValueError for a damaged one, OSError if it cannot be reached.
    """
    try:
        content = json.loads((folder / MANIFEST).read_text())
        return {
            str(name): (int(size), str(sum_)) for name, (size, sum_) in content["files"].items()
        }
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        if is_unreachable(error):
            raise
        raise ValueError(f"{MANIFEST} is damaged ({type(error).__name__})") from None


def is_complete(folder: Path) -> bool:
    """Tell whether a checkpoint was written to its end; it may have been damaged since.

    Versions of this program before manifests wrote DCP's metadata last. Raises OSError if it
    cannot be reached.
    """
    if (folder / MANIFEST).exists():
        return True
    if not (folder / METADATA).is_file():
        return False
    try:
        return training_entry("format") not in read_metadata(folder).state_dict_metadata
    except Exception as error:  # a damaged file can fail in any way
        if is_unreachable(error):
            raise
        return True  # of an earlier version, most likely: reading it will tell


def quick_problem(folder: Path) -> str | None:
    """Return what is wrong with a complete checkpoint by its files' names and sizes alone.

    Raises OSError if it cannot be reached: then it may be whole.
    """
    try:
        files = read_manifest(folder)
        if files is None:  # of an earlier version
            files = dict.fromkeys(named_files(folder), (-1, ""))
    except Exception as error:  # a damaged file can fail in any way
        if is_unreachable(error):
            raise
        return str(error).splitlines()[0] if str(error) else type(error).__name__
    for name, (size, _) in files.items():
        try:
            found = (folder / name).stat().st_size
        except OSError as error:
            if is_unreachable(error):
                raise
            return f"{name} is missing"
        if size not in (found, -1):
            return f"{name} has {found:,} bytes, not {size:,}"
    return None


def damage(folder: Path, part: int = 0, parts: int = 1) -> str | None:
    """Return what is wrong with the content of every ``parts``-th file, from number ``part`` on.

    None if nothing is, or if an earlier version wrote the checkpoint, without checksums. Raises
    OSError if it cannot be reached, ValueError for a damaged manifest.
    """
    for name, (_, expected) in sorted((read_manifest(folder) or {}).items())[part::parts]:
        try:
            found = checksum(folder / name)
        except OSError as error:
            if is_unreachable(error):
                raise
            return f"{name} cannot be read ({error.strerror})"
        if found != expected:
            return f"{name} has changed since it was written (its checksum differs)"
    return None
