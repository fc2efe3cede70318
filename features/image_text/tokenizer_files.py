"""Where the tokenizer of a run is: in a file, on the Hub, or copied beside the checkpoints.

A run's folder has a copy of the tokenizer, so that a checkpoint can be used where the file that
``--tokenizer`` named is not.
"""

from __future__ import annotations

import contextlib
import functools
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from data.files import parse_object
from features.image_text import clip_vocabulary
from features.image_text.config import ImageTextConfig
from features.image_text.tokenizer import BYTES, ByteTokenizer, FileTokenizer, Tokenizer
from training.config import RunConfig
from training.errors import UsageError
from training.files import folder_at, is_on_hub, read_whole, replace_file
from training.logs.records import BEST
from training.weights.hub import download_files

TOKENIZER_FILE, SETTINGS_FILE = "tokenizer.json", "tokenizer_config.json"
"""The files of transformers: the tokenizer, and which of its tokens is the padding."""
_SENTENCEPIECE = (".model", ".spm")
"""The ends of names of SentencePiece's files, such as spiece.model."""


class Content(NamedTuple):
    """What is read of a tokenizer."""

    tokenizer: bytes
    """The file ``tokenizer.json``, or what it would be."""
    pad_token: str | None
    """The padding token that ``tokenizer_config.json`` names."""


# -- the tokenizer of a run --------------------------------------------------------------


def with_tokenizer(config: RunConfig) -> RunConfig:
    """Return the configuration with the checksum of its tokenizer, and with the commit of one on
    the Hub. Raises UsageError for a tokenizer that cannot be read, does not fit the text tower, or
    is not the one with the checksum of the checkpoint that a run continues."""
    flags = config.of(ImageTextConfig)
    if flags.tokenizer is None:
        return config
    if is_on_hub(flags.tokenizer):
        flags = replace(flags, tokenizer=_locate(config)[0])
    name, tokenizer = flags.tokenizer, open_tokenizer(config.with_flags(flags))
    assert tokenizer is not None
    expected, vocabulary = flags.tokenizer_checksum, flags.text.vocab_size
    if expected not in (None, tokenizer.checksum):
        raise UsageError(
            f"--tokenizer {name} has the checksum {tokenizer.checksum}, not {expected}, with which "
            "the run was started: use the same tokenizer, or another --ckpt_dir"
        )
    if tokenizer.vocab_size > vocabulary:
        raise UsageError(
            f"--tokenizer {name} has {tokenizer.vocab_size:,} tokens, but --text_vocab_size is "
            f"{vocabulary:,}: use --text_vocab_size {tokenizer.vocab_size}"
        )
    if flags.text.pool == "argmax" and tokenizer.end != tokenizer.vocab_size - 1:
        raise UsageError(
            f"--tokenizer {name} does not end texts with its largest token, which --text_pool "
            "argmax selects: use --text_pool last"
        )
    return config.with_flags(replace(flags, tokenizer_checksum=tokenizer.checksum))


def open_tokenizer(config: RunConfig) -> Tokenizer | None:
    """Return the tokenizer of a run, None without ``--tokenizer``. Raises UsageError."""
    flags = config.of(ImageTextConfig)
    if flags.tokenizer is None:
        return None
    length, canonical = flags.text.length, bool(flags.canonical_text)
    if flags.tokenizer == BYTES:
        return ByteTokenizer(length, canonical=canonical)
    name, path = _locate(config)
    return _opened(_read(path, name), name, length, canonical)


@functools.lru_cache(4)
def _opened(content: Content, name: str, length: int, canonical: bool) -> FileTokenizer:
    return FileTokenizer(*content, length, canonical=canonical, name=name)


def save_copy(config: RunConfig, folder: Path) -> None:
    """Write the tokenizer to the run's folder, unless it is built in. Raises OSError, and
    UsageError if it can no longer be read."""
    if config.of(ImageTextConfig).tokenizer in (None, BYTES):
        return
    name, path = _locate(config)
    content = _read(path, name)
    replace_file(folder / TOKENIZER_FILE, content.tokenizer)
    replace_file(folder / SETTINGS_FILE, json.dumps({"pad_token": content.pad_token}))


# -- its files ---------------------------------------------------------------------------


def _locate(config: RunConfig) -> tuple[str, Path]:
    """Return the name of the tokenizer, of one on the Hub with the commit, and the path of its file
    ``tokenizer.json``. Raises UsageError."""
    name = config.of(ImageTextConfig).tokenizer
    assert name is not None
    copy = _copy(config)
    if is_on_hub(name):
        try:
            name, folder = download_files(name, "--tokenizer", functools.partial(_wanted, name))
        except UsageError:
            if copy is None:
                raise
            return name, copy
        return name, folder / TOKENIZER_FILE
    path = folder_at(name)
    path = path / TOKENIZER_FILE if _exists(path / TOKENIZER_FILE) else path
    return name, path if copy is None or _exists(path) else copy


def _copy(config: RunConfig) -> Path | None:
    """Return the copy beside the checkpoint that is resumed or used, None if there is none."""
    if config.of(ImageTextConfig).tokenizer_checksum is None:  # nothing is
        return None
    resume, folders = config.checkpoints.resume, [folder_at(config.checkpoints.ckpt_dir)]
    if resume not in ("auto", "none", *BEST) and not is_on_hub(resume):
        folders = [folder_at(resume), folder_at(resume).parent]
    copies = (folder / TOKENIZER_FILE for folder in folders)
    return next((path for path in copies if _exists(path)), None)


def _exists(path: Path) -> bool:
    try:
        return path.is_file()
    except OSError:  # a storage that does not answer; reading the file says so
        return False


def _wanted(name: str, files: Sequence[str]) -> list[str]:
    """Return those files of a repository that are needed. Raises UsageError."""
    if TOKENIZER_FILE not in files:
        _refuse_sentencepiece(name, files)
        raise UsageError(
            f"--tokenizer {name}: this repository has no {TOKENIZER_FILE}: use one that has, or "
            "--tokenizer FILE"
        )
    return [file for file in (TOKENIZER_FILE, SETTINGS_FILE) if file in files]


def _read(path: Path, name: str) -> Content:
    """Read the file ``tokenizer.json``, and the file with its settings if there is one; or CLIP's
    vocabulary."""
    _refuse_sentencepiece(name, [path.name])
    try:
        content = read_whole(path)
        if content.startswith(clip_vocabulary.GZIP):
            return Content(clip_vocabulary.tokenizer_of(content), clip_vocabulary.END)
        settings: dict[str, Any] = {}
        if _exists(path.parent / SETTINGS_FILE):
            settings = parse_object(read_whole(path.parent / SETTINGS_FILE))
    except (OSError, ValueError) as error:
        with contextlib.suppress(OSError):  # unless it is a folder
            _refuse_sentencepiece(name, [each.name for each in path.iterdir()])
        reason = getattr(error, "strerror", None) or str(error)
        raise UsageError(f"--tokenizer {name} cannot be read: {reason}") from None
    token = settings.get("pad_token")
    if isinstance(token, dict):  # transformers' AddedToken
        token = token.get("content")
    return Content(content, token if isinstance(token, str) else None)


def _refuse_sentencepiece(name: str, files: Sequence[str]) -> None:
    """Raise UsageError if SentencePiece's file is among those with which a tokenizer comes: the
    package ``tokenizers`` does not read it."""
    if file := next((file for file in files if file.endswith(_SENTENCEPIECE)), None):
        raise UsageError(
            f"--tokenizer {name}: {file} is a file of SentencePiece: convert its folder once, "
            "where the packages transformers and sentencepiece are installed, by "
            "AutoTokenizer.from_pretrained(FOLDER).save_pretrained(NEW), and use --tokenizer NEW"
        )
