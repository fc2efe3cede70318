"""Texts without images, such as prompts, as a data source; files of texts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
import xxhash

from data.batch import PADDING, Batch, Field
from data.files import TEXT, DataFolderError, printable, read_bytes, reporting
from data.source import DatasetRequest, DataSource, Split, View
from features.image_text.tokenizer import canonical_text
from features.image_text.tokenizer_files import open_tokenizer
from training.config import RunConfig
from training.errors import UsageError


class TextView(View):
    """The fields ``text``, the numbers of tokens, int32 (length,), and ``index``."""

    def __init__(self, length: int, vocab_size: int) -> None:
        self._text = Field((length,), torch.int32, below=vocab_size)

    def fields(
        self, request: DatasetRequest, image_dtype: torch.dtype, *, is_train: bool
    ) -> dict[str, Field]:
        return {"text": self._text, "index": Field((), torch.int64, padding=PADDING)}


class Texts(Split):
    """Texts by their tokens, (texts, length), int32."""

    def __init__(self, request: DatasetRequest, tokens: np.ndarray) -> None:
        super().__init__(request, "val", np.zeros(len(tokens), np.int64))
        self._tokens = tokens

    def load_sample(self, number: int, epoch: int, index: int) -> Batch:
        return {"text": torch.from_numpy(self._tokens[number])}

    def digest(self) -> str:
        return xxhash.xxh3_64_hexdigest(self._tokens.tobytes())


def source_of_texts(request: DatasetRequest, tokens: np.ndarray, vocab_size: int) -> DataSource:
    """Return the source of these texts, (texts, length), int32, to be read in order."""
    view = TextView(tokens.shape[1], vocab_size)
    request = replace(request, with_train=False, labels=False, augment=False, view=view)
    request = request.with_data(num_workers=0)  # there is nothing to read
    return DataSource("texts", {"val": Texts(request, tokens)})


def tokens_of(flag: str, texts: Sequence[str], config: RunConfig) -> np.ndarray:
    """Return the tokens of texts that a user has written, (texts, length), int32. Raises
    UsageError, naming ``flag``, if the run has no tokenizer, or a text is empty or not Unicode."""
    tokenizer = open_tokenizer(config)
    if tokenizer is None:
        raise UsageError(f"{flag} requires --tokenizer, which makes tokens of texts")
    for text in texts:
        if any("\ud800" <= char <= "\udfff" for char in text):  # bytes that are not UTF-8
            raise UsageError(f"{flag} has a text that is not UTF-8: {printable(text)}")
        if not (canonical_text(text) if tokenizer.canonical else text.strip()):
            left = " once --canonical_text has removed punctuation" if text.strip() else ""
            raise UsageError(f"{flag} has an empty text{left}: {printable(text)!r}")
    return tokenizer(texts)


def lines_of(flag: str, file: str) -> list[str]:
    """Return the lines of a file of text, without spaces around them and empty lines at the end.
    Raises DataFolderError, naming ``flag``, for a file that cannot be read, has no text, or has an
    empty line."""
    with reporting(f"{flag} {file}", "read"):
        text = read_bytes(file, limit=TEXT).decode("utf-8-sig")
    lines = [line.strip() for line in text.rstrip().splitlines()]
    if not any(lines):
        raise DataFolderError(f"{flag} {file} is empty: it needs a line for each text")
    if "" in lines:
        raise DataFolderError(
            f"{flag} {file}: line {lines.index('') + 1} is empty: each line is a text"
        )
    return lines
