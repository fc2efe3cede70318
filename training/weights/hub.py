"""Download weights, or other files, from the Hugging Face Hub: ``hf-hub:OWNER/NAME[@REVISION]``.

``huggingface_hub`` downloads them to its usual cache; its lock lets one process per host download
while the others wait. A name with a commit, which runs record, needs no network once the files are
cached.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from data.hub import COMMIT, HubUnreachable, note_cached, refusals, shows_progress
from training.errors import UsageError
from training.files import HUB_PREFIX
from training.weights.names import listed

_SHARD = re.compile(r"model-\d{5}-of-(\d{5})\.safetensors")
ONE_FILE, INDEX = "model.safetensors", "model.safetensors.index.json"
"""Weights in Hugging Face's layout: one file, or shards that the index lists."""
CONFIG_FILE, PREPROCESSOR_FILE = "config.json", "preprocessor_config.json"
"""Files next to the weights that describe them, as written by timm and transformers."""
OTHER_FILES = ("open_clip_model.safetensors",)
"""Names of one file that other programs use."""
OTHER_CONFIG_FILES = ("open_clip_config.json",)
"""Files next to such weights that describe them."""
_PICKLES = (".bin", ".pt", ".pth")


def weight_files(names: Iterable[str]) -> list[str]:
    """Return the weight files of a repository: those of Hugging Face's layout, else the only
    .safetensors file, else PyTorch's; [] if ambiguous or if one is missing."""
    names = [name for name in names if "/" not in name]
    shards = {name: int(match[1]) for name in names if (match := _SHARD.fullmatch(name))}
    if shards and not missing_shards(names):
        return [INDEX, *shards]
    names = [name for name in names if name not in shards]
    for suffixes, usual in (((".safetensors",), ONE_FILE), (_PICKLES, "pytorch_model.bin")):
        files = [name for name in names if name.endswith(suffixes)]
        if usual in files:
            return [usual]
        if len(files) == 1:
            return files
    return []


def missing_shards(names: Iterable[str]) -> list[str]:
    """Return the shards and the index that a repository of shards does not have, by their usual
    names."""
    names = {*names}
    counts = {int(match[1]) for name in names if (match := _SHARD.fullmatch(name))}
    wanted = {
        f"model-{n + 1:05}-of-{count:05}.safetensors" for count in counts for n in range(count)
    }
    return sorted((wanted | {INDEX} if wanted else set()) - names)


def download(name: str, flag: str) -> tuple[str, Path]:
    """Return the weights that ``flag`` names on the Hub, cached or downloaded: the name with the
    commit, and the file or the folder of files. Raises UsageError."""

    def wanted(files: Sequence[str]) -> list[str]:
        if weights := weight_files(files):
            beside = (CONFIG_FILE, PREPROCESSOR_FILE, *OTHER_CONFIG_FILES)
            return [*weights, *(each for each in beside if each in files)]
        if missing := missing_shards(files):
            raise UsageError(
                f"{flag} {name}: this repository has shards, but no {listed(missing)}: use a "
                "complete revision, with @REVISION"
            )
        raise UsageError(
            f"{flag} {name}: this repository has neither {ONE_FILE} nor exactly one other file of "
            "weights: download the file that you want, and pass its path"
        )

    pinned, folder = download_files(name, flag, wanted)
    weights = weight_files(path.name for path in folder.iterdir())
    in_layout = weights[0] in (INDEX, ONE_FILE)
    return pinned, folder if in_layout else folder / weights[0]


def download_files(
    name: str, flag: str, wanted: Callable[[Sequence[str]], Sequence[str]]
) -> tuple[str, Path]:
    """Return the name with the commit, and the folder with the ``wanted`` files of the repository
    that ``flag`` names on the Hub, cached or downloaded.

    ``wanted`` returns which of a repository's files are needed; it raises UsageError if the
    repository, or the cache, lacks one. Raises UsageError.
    """
    repository, _, revision = name.removeprefix(HUB_PREFIX).partition("@")
    check_name(name, flag)
    # Imported late: with its dependencies, the package takes 0.2 s.
    from huggingface_hub import HfApi, constants, snapshot_download
    from huggingface_hub.utils import disable_progress_bars

    if not shows_progress():
        disable_progress_bars()

    def cached(revision: str | None) -> Path | None:
        # Without patterns it would require files of the repository that are not needed here.
        options: dict[str, Any] = {"local_files_only": True, "allow_patterns": []}
        try:
            folder = Path(snapshot_download(repository, revision=revision, **options))
            wanted([path.name for path in folder.iterdir()])
        except (OSError, ValueError, UsageError):  # not there, or not readable
            return None
        return folder

    folder, api = cached(revision) if COMMIT.fullmatch(revision) else None, HfApi()
    if folder is None:
        try:
            with refusals(f"{flag} {name}", UsageError):
                commit = api.resolve_revision(repository, revision=revision or None).resolved
                files = [*wanted(api.list_repo_files(repository, revision=commit))]
                folder = Path(snapshot_download(repository, revision=commit, allow_patterns=files))
        except HubUnreachable as error:
            folder = cached(revision or None)
            if folder is None:
                instead = f"use {flag} FILE"
                if flag in ("--init_from", "--resume"):
                    instead += " (in place of --pretrained, if that is set)"
                raise UsageError(
                    f"{flag} {name} cannot be downloaded ({error}), and is not complete in the "
                    f"cache {constants.HF_HUB_CACHE}: check the network, or download it elsewhere "
                    f"and {instead}"
                ) from None
            note_cached(f"{flag} {name}", constants.HF_HUB_CACHE, folder.name, error)
    return f"{HUB_PREFIX}{repository}@{folder.name}", folder


def check_name(name: str, flag: str) -> None:
    """Raise UsageError unless ``name`` names a repository, with or without a revision."""
    if not re.fullmatch(rf"{HUB_PREFIX}[\w.-]+/[\w.-]+(@[^@\s]+)?", name):
        raise UsageError(
            f"{flag} {name}: use {HUB_PREFIX}OWNER/NAME or {HUB_PREFIX}OWNER/NAME@REVISION"
        )
