"""The flags about data: sources of images, batches, preprocessing and augmentation.

Imports nothing heavy, so that ``--help`` and error messages stay fast.
"""

from __future__ import annotations

import argparse
import re
from dataclasses import dataclass, fields
from typing import ClassVar, Literal, get_args

from config_fields import (
    bounded,
    count_or_percent,
    flag,
    fraction,
    height_by_width,
    local_name,
    number,
    path_or_url,
    positive,
    side_and_share,
)

OPENED_BY = {
    "folder": "data.image_folder:open_folder",
    "webdataset": "data.webdataset:open_shards",
    "fake": "data.fake:open_fake",
    "digits": "data.digits:open_digits",
    "mnist": "data.digits:open_digits",
    "volumes": "data.volumes:open_volumes",
    "mosaics": "data.digits:open_mosaics",
    "parquet": "data.tables:open_parquet",
    "huggingface": "data.tables:open_huggingface",
}
"""The sources by the names that ``--data_source`` takes: module and function of each.

A new source is a file beside this one, with a function from ``DatasetRequest`` to ``DataSource``
(``data/source.py``), and a line here. It is imported when it is chosen: some sources need packages
of their own."""

GIVE_FLOATS = ("volumes", "mosaics")
"""Sources that give normalised fp32 values, not bytes."""
NOT_AUGMENTED = (*GIVE_FLOATS, "fake")
"""Sources whose images get none of timm's augmentations of one image: those are for photographs."""
ALWAYS_ALIKE = ("mosaics", "fake")
"""Sources that give the same image in each epoch, so that repeating it in a batch is of no use."""

Interpolation = Literal["nearest", "bilinear", "bicubic", "box", "hamming", "lanczos"]
CropMode = Literal["center", "squash", "border"]
INTERPOLATIONS, CROP_MODES = get_args(Interpolation), get_args(CropMode)


@dataclass(frozen=True)
class Preprocessing:
    """How images are resized and normalised, under timm's names; by default as for ImageNet."""

    mean: tuple[float, ...] = (0.485, 0.456, 0.406)
    std: tuple[float, ...] = (0.229, 0.224, 0.225)
    crop_pct: float = 0.875
    """Side of the centre crop, as a fraction of the size that ``crop_mode`` resizes to."""
    interpolation: str = "bicubic"
    test_interpolation: str | None = None
    """The interpolation in validation and prediction; None: as in training."""
    crop_mode: str = "center"
    """What is resized in validation and prediction: the shorter side (center), each side by itself
    (squash), or the longer side, with a border of the mean colour (border)."""

    @property
    def interpolation_of_val(self) -> str:
        """Return the interpolation of images that are not trained on."""
        return self.test_interpolation or self.interpolation

    def of_channels(self, channels: int) -> tuple[list[float], list[float]]:
        """Return mean and std of each channel; unless there are three, each has their average."""
        if channels == len(self.mean):
            return list(self.mean), list(self.std)
        mean, std = (sum(values) / len(values) for values in (self.mean, self.std))
        return [mean] * channels, [std] * channels

    @classmethod
    def of_new_weights(cls, data_source: str) -> Preprocessing:
        """Return the preprocessing for new weights: values of volumes stay unchanged."""
        if data_source == "volumes":
            return cls(mean=(0.0, 0.0, 0.0), std=(1.0, 1.0, 1.0))
        return cls()

    def __str__(self) -> str:
        mean, std = (" ".join(f"{value:g}" for value in values) for values in (self.mean, self.std))
        crop = f"crop {self.crop_pct:g}"
        if self.crop_mode != "center":
            crop += f" {self.crop_mode}"
        return f"mean {mean}, std {std}, {crop}, {self.interpolation_of_val}"


_WHOLE, _NUMBER = r"\d{1,4}", r"\d{1,4}(\.\d{1,9})?"
_POLICY = re.compile(
    rf"""
    (original|originalr|v0|v0r|3a) (-mstd{_NUMBER})*
    | rand (-(m|n|mmax|inc){_WHOLE} | -(p|mstd){_NUMBER} | -t(weights|3a|3aw))*
    | augmix (-(m|w|d|b){_WHOLE} | -(a|mstd){_NUMBER})*
    """,
    re.VERBOSE,
)


def policy(text: str) -> str:
    """Read a policy of ``timm.data.auto_augment``, as an argparse type.

    timm itself ignores what it cannot read: "rand-magnitude9" would mean "rand".
    """
    if not _POLICY.fullmatch(text):
        raise argparse.ArgumentTypeError(
            f"{text[:40]!r} is no policy of timm's: give one such as 3a, original, v0, "
            "rand-m9-mstd0.5-inc1 or augmix-m3-w3"
        )
    return text


_NEW = Preprocessing()
"""The preprocessing that new weights are trained with."""


@dataclass(frozen=True)
class DataConfig:
    """Which images are read, in which batches, and how they are augmented and preprocessed."""

    group: ClassVar[str] = "data"

    data_dir: str = flag(
        "/datasets/imagenet-1k",
        "folder with train/<class>/* and val/<class>/* images, or its URL",
        kind=path_or_url,
        metavar="FOLDER",
        common=True,
    )
    data_source: str = flag(
        "folder",
        "kind of data; folder: images of --data_dir; webdataset: tar shards; parquet, huggingface: "
        "tables (docs/tables.md); volumes: arrays (docs/data.md); fake: zeros; digits; mnist; "
        "mosaics",
        metavar="SOURCE",
        shorthands={"--fake_data": "fake"},
        choices=tuple(OPENED_BY),
        common=True,
    )
    labels: str | None = flag(
        None,
        "CSV file with the columns path (relative to --data_dir), label and split (train or val) "
        "(default: the class folders --data_dir/train/<class>/* and val/<class>/*)",
        kind=path_or_url,
        metavar="FILE",
        requires=("data_source=volumes",),
    )
    class_order: Literal["sorted", "natural"] | None = flag(
        None,
        "order in which class folders are numbered; sorted: by name, as torchvision (10 before 2); "
        "natural: by the numbers in names and without regard to case, as timm (2 before 10) "
        "(default: that of the checkpoint; new weights: sorted)",
        requires=("data_source=folder|data_source=volumes",),
        incompatible_with=("labels",),
    )
    class_map: str | None = flag(
        None,
        "text file with the name of a class folder on each line, in the order of their labels, as "
        "timm's --class-map; some may have no folder (default: --class_order)",
        kind=local_name,
        metavar="FILE",
        requires=("data_source=folder|data_source=volumes",),
        replaces=("class_order",),
        incompatible_with=("labels",),
    )
    train_shards: str | None = flag(
        None,
        "training shards in --data_dir: a pattern such as '*-train-*.tar', or a range of numbers "
        "such as 'train-{0000..1023}.tar' (default: train/*.tar, or else *train*.tar)",
        metavar="PATTERN",
        requires=("data_source=webdataset",),
    )
    val_shards: str | None = flag(
        None,
        "validation shards in --data_dir, in the same form (default: val/*.tar, or else *val*.tar)",
        metavar="PATTERN",
        requires=("data_source=webdataset",),
    )
    index_dir: str | None = flag(
        None,
        "folder for the index of the images, which saves listing them at each start (default: "
        "beside the images, or else, and for URLs, ~/.cache/vit_fsdp)",
        kind=path_or_url,
        metavar="FOLDER",
        requires=("data_source=folder|data_source=volumes|data_source=webdataset",),
        incompatible_with=("labels",),
    )
    rebuild_index: bool = flag(
        False,
        "list all images again and replace the index",
        requires=("data_source=folder|data_source=volumes|data_source=webdataset",),
        incompatible_with=("labels",),
    )
    columns: tuple[str, str] | None = flag(
        None,
        "the table's columns of images and of labels (default: detected, if there is one of each)",
        metavar=("IMAGE", "LABEL"),
        requires=("data_source=parquet|data_source=huggingface",),
    )
    images_per_read: int | None = flag(
        None,
        "number of images of one row group that follow each other in the random order of training, "
        "as a row group can only be read whole; 1: fully random (default: an eighth of a row "
        "group)",
        kind=positive,
        metavar="N",
        requires=("data_source=parquet",),
    )
    buckets: list[str] | None = flag(
        None,
        "image sizes, height x width in pixels, the model's own among them: each image is resized "
        "to the one of the nearest aspect ratio, and a batch has images of one size (docs/data.md) "
        "(default: the model's own size for all images)",
        kind=height_by_width,
        metavar="HxW",
        requires=("data_source=folder|data_source=webdataset", "objective=classify"),
        incompatible_with=(
            *("mesh_domain", "block", "compile_only", "expect"),
            *("aug_repeats", "cutmix", "cutmix_minmax", "teacher"),
        ),
    )
    max_tokens_per_image: int | None = flag(
        None,
        "largest number of tokens of an image with native resolution; larger ones are scaled down "
        "to it (default: those of an image of --image_size, and at most --token_budget)",
        kind=positive,
        metavar="N",
    )
    resize_to_budget: bool = flag(
        False,
        "with native resolution, scale each image, up or down, to about --max_tokens_per_image",
    )
    side_scale: tuple[float, float] = flag(
        (1.0, 1.0),
        "with native resolution, smallest and largest factor of the sides of a training image, "
        "drawn evenly for each (NaViT)",
        kind=bounded(float, 0.1, 10),
        metavar=("MIN", "MAX"),
    )
    image_size_schedule: list[str] | None = flag(
        None,
        "sides of square training images in pixels, each with its share of the steps up to the end "
        "of --num_epochs or --max_steps, one after the other: 128:0.4 192:0.4 224:0.2; without "
        "shares each batch has one of them, drawn at random; evaluation stays at --image_size "
        "(docs/augmentation.md) (default: the model's own size)",
        kind=side_and_share,
        metavar="SIDE:SHARE",
        requires=(
            "data_source=folder|data_source=webdataset|data_source=parquet|"
            "data_source=huggingface|data_source=digits|data_source=mnist",
            "objective=classify",
        ),
        incompatible_with=(
            *("buckets", "mesh_domain", "block", "compile_only", "expect", "self_check", "plan"),
        ),
    )
    segment_dir: str | None = flag(
        None,
        "folder or URL of images with masks for --segment_probe and --segment_probe_every: as "
        "ADE20K or VOC, train/ and val/ of name.jpg beside name.png, or parquet files "
        "(docs/segmentation.md) (default: with --data_source mosaics their own masks)",
        kind=path_or_url,
        metavar="FOLDER",
        requires=("segment_probe_every|segment_probe",),
    )
    segment_ignore: int | tuple[int, ...] = flag(
        255,
        "labels in the masks of --segment_dir whose pixels count for nothing",
        kind=bounded(int, 0, 65535),
        several=True,
        metavar="LABEL",
        requires=("segment_dir",),
    )
    num_workers: int | None = flag(
        None,
        "number of loader processes per training process; 0: load in the training process "
        "(default: by the cores, 1 to 32)",
        kind=bounded(int, 0, 1024),
        common=True,
    )
    batch_size: int = flag(
        1024,
        "number of images per optimizer step, over all devices",
        kind=positive,
        common=True,
    )
    grad_accum_steps: int = flag(
        1,
        "number of micro-batches per optimizer step, into which --batch_size is divided (gradient "
        "accumulation)",
        kind=positive,
    )
    micro_batch_size: int | None = flag(
        None,
        "largest number of images of a device in a micro-batch: --grad_accum_steps becomes the "
        "least number of equal ones, on any number of devices (default: --grad_accum_steps says "
        "it)",
        kind=positive,
        replaces=("grad_accum_steps",),
    )
    scale: tuple[float, float] = flag(
        (0.08, 1.0),
        "smallest and largest area of the random resized crop, as a share of the image",
        kind=fraction,
        metavar=("MIN", "MAX"),
    )
    ratio: tuple[float, float] = flag(
        (3 / 4, 4 / 3),
        "smallest and largest aspect ratio of the random resized crop",
        kind=bounded(float, 0.1, 10),
        metavar=("MIN", "MAX"),
    )
    hflip: float = flag(0.5, "probability of a horizontal flip", kind=fraction)
    vflip: float = flag(0.0, "probability of a vertical flip", kind=fraction)
    train_interpolation: Literal[Interpolation, "random"] | None = flag(
        None,
        "interpolation of training crops; random: bilinear or bicubic (default: that of "
        "--interpolation)",
        metavar="METHOD",
    )
    aa: str | None = flag(
        None,
        "augmentation policy of timm: AutoAugment (original, originalr, v0, v0r), 3-Augment (3a), "
        "RandAugment (rand-m9-mstd0.5-inc1) or AugMix (augmix-m3-w3); docs/augmentation.md "
        "(default: none)",
        kind=policy,
        metavar="POLICY",
    )
    aa_min_magnitude: int | None = flag(
        None,
        "magnitude of RandAugment for the smallest size of --image_size_schedule; it rises in "
        "proportion to the side, to that of --aa for the largest one, as in EfficientNetV2 "
        "(default: that of --aa for all)",
        kind=bounded(int, 0, 100),
        metavar="M",
        requires=("image_size_schedule",),
    )
    color_jitter: float | tuple[float, ...] = flag(
        0.0,
        "largest relative change of brightness, contrast and saturation: one number for all, three "
        "for each, or four with the hue, up to 0.5",
        kind=bounded(float, 0, 10),
        several=True,
    )
    reprob: float = flag(0.0, "probability of random erasing of rectangles", kind=fraction)
    remode: Literal["const", "rand", "pixel"] = flag(
        "pixel",
        "fill of erased rectangles; const: the mean color; rand: a random color; pixel: noise",
        requires=("reprob",),
    )
    recount: int = flag(
        1,
        "largest number of erased rectangles, which share the erased area",
        kind=bounded(int, 1, 100),
        requires=("reprob",),
    )
    aug_repeats: int = flag(
        1,
        "repeated augmentation: number of times an image is in a batch, augmented each time; an "
        "epoch keeps its number of steps and has that many times fewer images",
        kind=bounded(int, 1, 100),
        names=("--aug_repeats", "--repeated_aug"),
    )
    max_bad_images: int | str = flag(
        "1%",
        "largest number of unreadable images; N: in all; P%: a percentage of the training and of "
        "the validation images, each rounded up; 0: none. In training another image replaces each, "
        "in validation they are skipped; --ckpt_dir/bad_images.txt lists them. One more ends "
        "training, with a checkpoint and exit code 5, or an evaluation, with exit code 2",
        kind=count_or_percent,
        metavar="N|P%",
    )
    mean: tuple[float, float, float] | None = flag(
        None,
        "mean of each color channel, 0 to 1, that is subtracted; images of other channels use the "
        f"average of the three (default: the weights' own; new weights: ImageNet's, "
        f"{' '.join(map(str, _NEW.mean))}; volumes: 0)",
        kind=number,
        metavar=("R", "G", "B"),
    )
    std: tuple[float, float, float] | None = flag(
        None,
        "standard deviation of each color channel, by which values are divided; images of other "
        "channels use the average of the three (default: the weights' own; new weights: "
        f"ImageNet's, {' '.join(map(str, _NEW.std))}; volumes: 1)",
        kind=bounded(float, 1e-6, 1e9),
        metavar=("R", "G", "B"),
    )
    crop_pct: float | None = flag(
        None,
        "side of validation's center crop, as a share of what --crop_mode resizes (default: the "
        f"weights' own; new weights: {_NEW.crop_pct})",
        kind=bounded(float, 0.1, 1),
        metavar="SHARE",
    )
    crop_mode: CropMode | None = flag(
        None,
        "what is resized in validation before the center crop; center: the shorter side; squash: "
        "each side, which changes the proportions; border: the longer side, with a border of the "
        f"mean color (default: the weights' own; new weights: {_NEW.crop_mode})",
    )
    interpolation: Interpolation | None = flag(
        None,
        "interpolation of resized images; nearest, bilinear, bicubic, box, hamming or lanczos "
        f"(default: the weights' own; new weights: {_NEW.interpolation})",
        metavar="METHOD",
    )
    test_interpolation: Interpolation | None = flag(
        None,
        "interpolation of resized images in validation and prediction, if it differs (default: the "
        "weights' own; new weights: that of --interpolation)",
        metavar="METHOD",
    )

    @property
    def jitter_of_each(self) -> tuple[float, ...]:
        """Return ``color_jitter`` by property: brightness, contrast, saturation, perhaps hue."""
        given = self.color_jitter
        return given if isinstance(given, tuple) else (given,) * 3

    @property
    def ignored_labels(self) -> tuple[int, ...]:
        """Return ``segment_ignore`` as a tuple."""
        given = self.segment_ignore
        return given if isinstance(given, tuple) else (given,)

    @property
    def bucket_sizes(self) -> list[tuple[int, int]]:
        """Return the height and width of each of ``buckets``; none without the flag."""
        sizes = (bucket.split("x") for bucket in self.buckets or ())
        return [(int(height), int(width)) for height, width in sizes]

    @property
    def size_schedule(self) -> list[tuple[int, float | None]]:
        """Return the side and the share of each item of ``image_size_schedule``; none without the
        flag."""
        items = (item.partition(":") for item in self.image_size_schedule or ())
        return [(int(side), float(share) if share else None) for side, _, share in items]

    @property
    def image_sizes(self) -> list[tuple[int, int]]:
        """Return the height and width of images that are trained on in several sizes; none where
        all have the model's own."""
        return self.bucket_sizes or [(side, side) for side, _ in self.size_schedule]

    @property
    def pass_size(self) -> int:
        """Return how many images one forward pass takes, over all devices."""
        return self.batch_size // self.grad_accum_steps

    def image_dtype(self, dimensions: int) -> str:
        """Return what images with so many spatial dimensions are made of, by PyTorch's name."""
        return "uint8" if dimensions == 2 and self.data_source not in GIVE_FLOATS else "float32"

    @property
    def preprocessing(self) -> Preprocessing:
        """Return how images are resized and normalised; what is not given is as for new weights."""
        given = {field.name: getattr(self, field.name) for field in fields(Preprocessing)}
        return Preprocessing(**{name: value for name, value in given.items() if value is not None})
