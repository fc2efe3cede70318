"""What is read of a pair: an image, and the tokens of its text."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from data.batch import Field
from data.config import OPENED_BY
from data.files import DataFolderError
from data.source import DatasetRequest, View


@dataclass(frozen=True)
class ImageTextView(View):
    """The fields ``image``, as of every view, and ``text``: the numbers of tokens, int32
    (length,)."""

    length: int
    vocab_size: int

    def check(self, request: DatasetRequest) -> None:
        kind = request.config.data_source
        if kind in OPENED_BY and kind != "fake":
            raise DataFolderError(
                f"--objective siglip and clip require images with texts, which --data_source "
                f"{kind} does not read: use --fake_data, or a data source of an --extension"
            )

    def fields(
        self, request: DatasetRequest, image_dtype: torch.dtype, *, is_train: bool
    ) -> dict[str, Field]:
        text = Field((self.length,), torch.int32, below=self.vocab_size)
        return {**super().fields(request, image_dtype, is_train=is_train), "text": text}
