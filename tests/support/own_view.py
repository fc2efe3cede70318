"""A view as a user writes one: two fields a sample, neither of which is an image's own."""

from dataclasses import dataclass, replace

import torch

from data.batch import PADDING, Batch, Field
from data.decode import OpenImage
from data.files import DataFolderError
from data.images import ImageView, SampleTransform
from data.source import BatchSizes, DatasetRequest
from data.transforms import Transform

LEVELS = (64, 128, 192)
NO_DETAIL = -7
"""The value of ``detail`` in a sample that is padding."""


@dataclass(frozen=True)
class DetailAndOverview(ImageView):
    """``detail``: the image from 0 to 1, (height, width, channels), fp32; ``overview``: whether
    each channel's mean is above each of LEVELS, (channels, 3), bool."""

    refused: str = ""
    """What ``check`` says, if anything."""

    def check(self, request: DatasetRequest) -> None:
        if self.refused:
            raise DataFolderError(self.refused)

    def fields(
        self, request: DatasetRequest, image_dtype: torch.dtype, *, is_train: bool
    ) -> dict[str, Field]:
        height, width = request.size
        return {
            "detail": Field((height, width, request.channels), torch.float32, 0, NO_DETAIL),
            "overview": Field((request.channels, len(LEVELS)), torch.bool, padding=1),
            **self.number_fields(request, is_train=is_train),
        }

    def transforms(self, request: DatasetRequest) -> dict[str, SampleTransform]:
        return {name: OfImage(each) for name, each in self.image_transforms(request).items()}


@dataclass(frozen=True)
class OfImage:
    """The transform to ``detail`` and ``overview``."""

    transform: Transform

    def __call__(self, image: OpenImage) -> Batch:
        (sample,) = zip(*fields_of(self.transform(image)[None]).values(), strict=True)
        return dict(zip(("detail", "overview"), sample, strict=True))


def fields_of(images: torch.Tensor) -> Batch:
    """The two fields of images (number, channels, height, width), uint8."""
    means = images.float().mean((2, 3))
    return {
        "detail": images.permute(0, 2, 3, 1) / 255,
        "overview": means[..., None] > torch.tensor(LEVELS),
    }


def of_plain(batch: Batch) -> Batch:
    """What the view makes of a batch of whole images."""
    others = {name: values for name, values in batch.items() if name != "image"}
    made = fields_of(batch["image"])
    if "index" in batch:
        is_padding = batch["index"] == PADDING
        made["detail"][is_padding], made["overview"][is_padding] = NO_DETAIL, True
    return made | others


@dataclass(frozen=True)
class HalvedLater(DetailAndOverview):
    """The same, at half of the size in the second half of a training."""

    def sizes(self, request: DatasetRequest, steps: int) -> BatchSizes:
        height, width = request.size
        whole = replace(request, view=DetailAndOverview())

        def number(epoch: int, batch: int, batches_per_epoch: int) -> int:
            return int(2 * (epoch * batches_per_epoch + batch) >= steps)

        return BatchSizes([whole, replace(whole, size=(height // 2, width // 2))], number)
