"""What is read of a pair: an image, and the tokens of its text."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Self

import torch

from data.batch import Batch, Field
from data.config import OPENED_BY
from data.files import BrokenImageError, DataFolderError
from data.images import ImageSplit, ImageView
from data.source import NO_VALUES, DatasetRequest, Split, Value
from features.image_text.captions import NAMES, captions_of, read_captions
from features.image_text.config import ImageTextConfig, TextEvaluationConfig
from features.image_text.tokenizer import Tokenizer
from features.image_text.tokenizer_files import open_tokenizer

if TYPE_CHECKING:
    from training.resolve import Run

_WITH_CAPTIONS = ("webdataset", "parquet", "huggingface", "folder", "captioned_mosaics")
_TRIED = 16
"""Number of first pairs of a split, of which one must have a caption."""


@dataclass(frozen=True)
class ImageTextView(ImageView):
    """The fields ``image``, as of every view, and ``text``: the numbers of tokens, int32
    (length,). With ``val_captions`` of 2 or more, in validation also ``other_texts``, int32
    (val_captions - 1, length), and ``others``, how many of these an image has, int64."""

    length: int
    vocab_size: int
    tokenizer: Tokenizer | None
    """What makes tokens of captions; None: the source does."""
    keys: tuple[str, ...]
    """Where captions are (``--caption_key``); (): in one of the usual places."""
    val_captions: int = 1
    """How many captions of an image are read in validation."""

    @classmethod
    def of(cls, run: Run) -> Self:
        """Return what a run reads of pairs. Raises UsageError for an unusable tokenizer."""
        config = run.config
        flags, evaluation = config.of(ImageTextConfig), config.of(TextEvaluationConfig)
        text, keys = flags.text, tuple(flags.caption_key or ())
        tokenizer, captions = open_tokenizer(config), evaluation.val_captions
        return cls(text.length, text.vocab_size, tokenizer, keys, captions)

    @property
    def values(self) -> Mapping[str, Value]:
        if self.tokenizer is None:
            return NO_VALUES
        if not self.keys:
            return {"caption": Value(NAMES, "--caption_key")}
        return {key: Value((key,), "--caption_key") for key in self.keys}

    def check(self, request: DatasetRequest) -> None:
        kind = request.config.data_source
        if kind == "fake" or kind not in (*OPENED_BY, *_WITH_CAPTIONS):
            return
        if kind not in _WITH_CAPTIONS:
            raise DataFolderError(
                f"--objective siglip and clip require images with texts, which --data_source "
                f"{kind} does not have: use {', '.join(_WITH_CAPTIONS)} or --fake_data"
            )
        if kind == "folder" and request.config.labels is None:
            raise DataFolderError(
                "--objective siglip and clip require images with texts: use --labels FILE, a table "
                "with the columns path and caption, or another --data_source"
            )
        if self.tokenizer is None:
            raise DataFolderError(
                "texts require a tokenizer: use --tokenizer bytes, which is built in, or "
                "--tokenizer FILE"
            )

    def fields(
        self, request: DatasetRequest, image_dtype: torch.dtype, *, is_train: bool
    ) -> dict[str, Field]:
        text = Field((self.length,), torch.int32, below=self.vocab_size)
        fields = {**super().fields(request, image_dtype, is_train=is_train), "text": text}
        if is_train or not self._others:
            return fields
        others = replace(text, shape=(self._others, self.length))
        return fields | {"other_texts": others, "others": Field((), torch.int64)}

    @property
    def _others(self) -> int:
        """How many captions besides the first are read in validation."""
        return self.val_captions - 1 if self.tokenizer else 0

    def fields_of(self, values: Mapping[str, Any], draw: Callable[[int], int]) -> Batch:
        assert self.tokenizer is not None
        captions = captions_of(values)
        tokens = torch.from_numpy(self.tokenizer([captions[draw(len(captions))]]))
        if not self._others:
            return {"text": tokens[0]}
        # Also in training, which drops them: it takes little time beside decoding an image.
        found = torch.from_numpy(self.tokenizer(captions[1 : self.val_captions]))
        others = torch.zeros(self._others, self.length, dtype=torch.int32)
        others[: len(found)] = found
        count = torch.tensor(len(found))
        return {"text": tokens[0], "other_texts": others, "others": count}

    def check_splits(self, splits: Mapping[str, ImageSplit]) -> None:
        for split in splits.values() if self.values else ():
            reason = ""
            for number in range(min(_TRIED, len(split))):
                try:
                    read_captions(split, number)
                    break
                except BrokenImageError as error:
                    reason = reason or str(error)
            else:
                raise DataFolderError(
                    f"{split.name_of(0)} and the next images have no caption ({reason}): set "
                    "--caption_key"
                )


_COUNTED = 256
"""Number of first images of which a log says how many captions are truncated."""


def describe_texts(split: Split, view: ImageTextView, name: str) -> str:
    """Return what a log says of the texts of a split, as ``view`` reads them: the tokenizer with
    this ``name``, and how many of the first captions are truncated."""
    assert view.tokenizer is not None
    tokenizer = view.tokenizer

    def truncated_of(number: int) -> list[bool]:
        try:
            return [tokenizer.is_truncated(text) for text in read_captions(split, number)]
        except BrokenImageError:  # training and evaluation report it when they read it
            return []

    with ThreadPoolExecutor(split.reading_threads) as pool:
        found = pool.map(truncated_of, range(min(_COUNTED, len(split))))
        truncated = [*itertools.chain.from_iterable(found)]
    form = ", canonical" if tokenizer.canonical else ""
    return (
        f"texts: {tokenizer.vocab_size:,} tokens ({name}{form}); {sum(truncated)} of the first "
        f"{len(truncated)} captions are truncated to --text_length {view.length}"
    )
