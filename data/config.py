"""Data flags: image sources, batches, preprocessing and augmentation.

Imports nothing heavy, so that ``--help`` and error messages are fast.
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
    seed,
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
"""The values of ``--data_source``, with the module and function that open each source.

To add a source, add a file next to this one with a function from ``DatasetRequest`` to
``DataSource`` (``data/source.py``), and a line here. The module is imported only when its source is
chosen, because some sources need additional packages.
"""

GIVE_FLOATS = ("volumes", "mosaics")
"""Sources that return normalized fp32 values instead of bytes."""
NOT_AUGMENTED = (*GIVE_FLOATS, "fake")
"""Sources without timm's single-image augmentations, which are meant for photographs."""
OF_FILES = ("folder", "webdataset", "parquet", "huggingface")
"""Sources of encoded images, of any depth and, with ``--in_chans``, of any number of bands."""
ALWAYS_ALIKE = ("mosaics", "fake")
"""Sources that return the same image in every epoch, so repeating it in a batch is useless."""

RANDOM_SPLIT = ("split_by", "val_fraction", "split_seed")
"""The flags that decide which images of ``--labels`` are for validation."""

Interpolation = Literal["nearest", "bilinear", "bicubic", "box", "hamming", "lanczos"]
CropMode = Literal["center", "squash", "border"]
INTERPOLATIONS, CROP_MODES = get_args(Interpolation), get_args(CropMode)


@dataclass(frozen=True)
class Preprocessing:
    """How images are resized and normalized, with timm's names; defaults to ImageNet's values."""

    mean: tuple[float, ...] = (0.485, 0.456, 0.406)
    std: tuple[float, ...] = (0.229, 0.224, 0.225)
    crop_pct: float = 0.875
    """Side of the center crop, as a fraction of the size that ``crop_mode`` resizes to."""
    interpolation: str = "bicubic"
    test_interpolation: str | None = None
    """Interpolation in validation and prediction; None: as in training."""
    intensity: str | tuple[str, ...] = "auto"
    """How images of more than 8 bits become bytes (``data/intensity.py``); auto with the range that
    a run has chosen."""
    crop_mode: str = "center"
    """What is resized in validation and prediction: the shorter side (center), each side separately
    (squash), or the longer side, padded with the mean color (border)."""

    @property
    def interpolation_of_val(self) -> str:
        """Return the interpolation for validation and prediction."""
        return self.test_interpolation or self.interpolation

    def of_channels(self, channels: int) -> tuple[list[float], list[float]]:
        """Return mean and std per channel; unless there are three, each channel uses their
        average."""
        if channels == len(self.mean):
            return list(self.mean), list(self.std)
        mean, std = (sum(values) / len(values) for values in (self.mean, self.std))
        return [mean] * channels, [std] * channels

    @classmethod
    def of_new_weights(cls, data_source: str) -> Preprocessing:
        """Return the preprocessing for new weights; values of volumes are not changed."""
        if data_source == "volumes":
            return cls(mean=(0.0, 0.0, 0.0), std=(1.0, 1.0, 1.0))
        return cls()

    def __str__(self) -> str:
        mean, std = (" ".join(f"{value:g}" for value in values) for values in (self.mean, self.std))
        crop = f"crop {self.crop_pct:g}"
        if self.crop_mode != "center":
            crop += f" {self.crop_mode}"
        text = f"mean {mean}, std {std}, {crop}, {self.interpolation_of_val}"
        if self.intensity != "auto":
            words = [self.intensity] if isinstance(self.intensity, str) else self.intensity
            text += f", intensity {' '.join(words)}"
        return text


_WHOLE, _NUMBER = r"\d{1,4}", r"\d{1,4}(\.\d{1,9})?"
_POLICY = re.compile(
    rf"""
    (original|originalr|v0|v0r|3a) (-mstd{_NUMBER})*
    | rand (-(m|n|mmax|inc){_WHOLE} | -(p|mstd){_NUMBER} | -t(weights|3a|3aw))*
    | augmix (-(m|w|d|b){_WHOLE} | -(a|mstd){_NUMBER})*
    """,
    re.VERBOSE,
)


def policy(text: str) -> str | None:
    """Parse the name of a ``timm.data.auto_augment`` policy, or none; an argparse type.

    timm itself ignores parts that it cannot parse: "rand-magnitude9" would mean "rand".
    """
    if text == "none":  # to leave out that of a recipe
        return None
    if not _POLICY.fullmatch(text):
        raise argparse.ArgumentTypeError(
            f"{text[:40]!r} is not an augmentation policy of timm: use for example 3a, "
            "original, v0, rand-m9-mstd0.5-inc1 or augmix-m3-w3, or none"
        )
    return text


def intensity_word(text: str) -> str:
    """Parse a word of ``--intensity``: auto, full, a number or a percentile; an argparse type."""
    if text in ("auto", "full"):
        return text
    try:
        if text.endswith("%"):
            return f"{bounded(float, 0, 100)(text[:-1]):.10g}%"
        return f"{number(text):.10g}"
    except argparse.ArgumentTypeError as error:
        raise argparse.ArgumentTypeError(
            f"{error} (or auto, full, or a percentile such as 0.5%)"
        ) from None


_NEW = Preprocessing()
"""The preprocessing for new weights."""


@dataclass(frozen=True)
class DataConfig:
    """Which images are read, how they are batched, augmented and preprocessed."""

    group: ClassVar[str] = "data"

    data_dir: str = flag(
        "/datasets/imagenet-1k",
        "folder or URL with train/<class>/* and val/<class>/* images; huggingface: also "
        "OWNER/NAME[@REVISION]",
        kind=path_or_url,
        metavar="FOLDER",
        common=True,
    )
    data_source: str = flag(
        "folder",
        "image source; folder: files in --data_dir; webdataset: tar shards; parquet, "
        "huggingface: tables (docs/tables.md); volumes: array files (docs/volumes.md); fake: "
        "zeros; digits; mnist; mosaics: grids of digits",
        metavar="SOURCE",
        shorthands={"--fake_data": "fake"},
        choices=tuple(OPENED_BY),
        common=True,
    )
    labels: str | None = flag(
        None,
        "CSV or parquet file that lists the images, with the columns path (in --data_dir), label "
        "and, if present, split (train or val) (docs/tables.md) (default: labels from the class "
        "folders in --data_dir)",
        kind=path_or_url,
        metavar="FILE",
        requires=("data_source=folder|data_source=volumes",),
    )
    split_by: str | None = flag(
        None,
        "column of --labels with a group, such as a patient: all images of a group are in the same "
        "split; a column split is checked for it (default: split image by image)",
        metavar="COLUMN",
        requires=("labels",),
    )
    val_fraction: float | None = flag(
        None,
        "fraction of each class of --labels that is for validation, if the table has no column "
        "split; 1: all images, for --eval_only (default: 0.2)",
        kind=bounded(float, 0.001, 1),
        metavar="SHARE",
        requires=("labels",),
    )
    split_seed: int = flag(
        0,
        "seed of the random split of --labels into training and validation images",
        kind=seed,
        requires=("labels",),
    )
    class_order: Literal["sorted", "natural"] | None = flag(
        None,
        "order in which class folders are numbered; sorted: by name, as in torchvision (10 "
        "before 2); natural: by the numbers in names, ignoring case, as in timm (2 before "
        "10) (default: the checkpoint's order; sorted for new weights)",
        requires=("data_source=folder|data_source=volumes",),
        incompatible_with=("labels",),
    )
    class_map: str | None = flag(
        None,
        "text file with one class name per line, in label order, as in timm's --class-map; names "
        "without images are allowed (default: --class_order)",
        kind=local_name,
        metavar="FILE",
        requires=("data_source=folder|data_source=volumes",),
        replaces=("class_order",),
    )
    train_shards: str | None = flag(
        None,
        "training shards in --data_dir: a pattern such as '*-train-*.tar', or a numbered "
        "range such as 'train-{0000..1023}.tar' (default: train/*.tar, or else *train*.tar)",
        metavar="PATTERN",
        requires=("data_source=webdataset",),
    )
    val_shards: str | None = flag(
        None,
        "validation shards in --data_dir, in the same format (default: val/*.tar, or else "
        "*val*.tar)",
        metavar="PATTERN",
        requires=("data_source=webdataset",),
    )
    index_dir: str | None = flag(
        None,
        "folder for the image index, which avoids listing all images at each start "
        "(default: next to the images; ~/.cache/vit_fsdp if that is read-only)",
        kind=local_name,
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
    columns: list[str] | None = flag(
        None,
        "names of the table's columns of images (with --labels, of paths) and labels; with "
        "--multi_label, one column of 0 and 1 for each label (default: path and label with "
        "--labels, otherwise detected if there is one of each)",
        metavar="COLUMN",
        requires=("data_source=parquet|data_source=huggingface|labels",),
    )
    train_split: str | None = flag(
        None,
        "name of the table's split to train on (default: train)",
        metavar="NAME",
        requires=("data_source=parquet|data_source=huggingface|labels",),
    )
    val_split: str | None = flag(
        None,
        "name of the table's split to validate on, such as test (default: the first that exists "
        "of validation, val, valid and test)",
        metavar="NAME",
        requires=("data_source=parquet|data_source=huggingface|labels",),
    )
    dataset_config_name: str | None = flag(
        None,
        "configuration of a data set on the Hugging Face Hub (default: the data set's own default)",
        metavar="NAME",
        requires=("data_source=huggingface",),
    )
    images_per_read: int | None = flag(
        None,
        "number of consecutive images from one row group in the random training order, "
        "because a row group can only be read whole; 1: fully random (default: an eighth of "
        "a row group)",
        kind=positive,
        metavar="N",
        requires=("data_source=parquet",),
    )
    buckets: list[str] | None = flag(
        None,
        "image sizes, height x width in pixels, including the model's own; each image is "
        "resized to the size with the nearest aspect ratio, and all images of a batch have "
        "the same size (docs/data.md) (default: the model's own size for all images)",
        kind=height_by_width,
        metavar="HxW",
        requires=("data_source=folder|data_source=webdataset",),
    )
    image_size_schedule: list[str] | None = flag(
        None,
        "side lengths of square training images in pixels, in order, each with its share of "
        "the steps until --num_epochs or --max_steps: 128:0.4 192:0.4 224:0.2; without "
        "shares, a random one for each batch; evaluation stays at --image_size "
        "(docs/augmentation.md) (default: the model's own size)",
        kind=side_and_share,
        metavar="SIDE:SHARE",
    )
    segment_dir: str | None = flag(
        None,
        "folder or URL of images with masks for --segment_probe and --segment_probe_every: "
        "the layout of ADE20K or VOC, train/ and val/ with name.jpg next to name.png, or "
        "parquet files (docs/segmentation.md) (default: with --data_source mosaics, the "
        "mosaics' own masks)",
        kind=path_or_url,
        metavar="FOLDER",
        requires=("segment_probe_every|segment_probe",),
    )
    segment_ignore: int | tuple[int, ...] = flag(
        255,
        "mask labels in --segment_dir whose pixels are ignored",
        kind=bounded(int, 0, 65535),
        several=True,
        metavar="LABEL",
        requires=("segment_dir",),
    )
    num_workers: int | None = flag(
        None,
        "loader processes per training process; 0: load in the training process (default: by CPU "
        "cores, 1 to 32)",
        kind=bounded(int, 0, 1024),
        common=True,
    )
    batch_size: int = flag(
        1024,
        "global batch size: images per optimizer step",
        kind=positive,
        common=True,
    )
    grad_accum_steps: int = flag(
        1,
        "number of micro-batches that --batch_size is divided into (gradient accumulation)",
        kind=positive,
    )
    micro_batch_size: int | None = flag(
        None,
        "maximum number of images per device in a micro-batch; sets --grad_accum_steps to "
        "the smallest number of equal micro-batches, whatever the number of devices "
        "(default: use --grad_accum_steps)",
        kind=positive,
        replaces=("grad_accum_steps",),
    )
    scale: tuple[float, float] = flag(
        (0.08, 1.0),
        "minimum and maximum area of the random resized crop, as a fraction of the image",
        kind=fraction,
        metavar=("MIN", "MAX"),
    )
    ratio: tuple[float, float] = flag(
        (3 / 4, 4 / 3),
        "minimum and maximum aspect ratio of the random resized crop",
        kind=bounded(float, 0.1, 10),
        metavar=("MIN", "MAX"),
    )
    hflip: float = flag(0.5, "probability of a horizontal flip", kind=fraction)
    vflip: float = flag(0.0, "probability of a vertical flip", kind=fraction)
    train_interpolation: Literal[Interpolation, "random"] | None = flag(
        None,
        "interpolation of training crops; random: bilinear or bicubic (default: --interpolation)",
        metavar="METHOD",
    )
    aa: str | None = flag(
        None,
        "timm's augmentation policy: AutoAugment (original, originalr, v0, v0r), 3-Augment "
        "(3a), RandAugment (rand-m9-mstd0.5-inc1), AugMix (augmix-m3-w3) or none; see "
        "docs/augmentation.md (default: none)",
        kind=policy,
        metavar="POLICY",
    )
    aa_min_magnitude: int | None = flag(
        None,
        "RandAugment magnitude for the smallest size of --image_size_schedule; increases "
        "linearly with the side length to the magnitude of --aa at the largest size, as in "
        "EfficientNetV2 (default: the magnitude of --aa for all sizes)",
        kind=bounded(int, 0, 100),
        metavar="M",
        requires=("image_size_schedule",),
    )
    color_jitter: float | tuple[float, ...] = flag(
        0.0,
        "maximum relative change of brightness, contrast and saturation: one value for all, "
        "three values, or four including hue, at most 0.5",
        kind=bounded(float, 0, 10),
        several=True,
    )
    reprob: float = flag(0.0, "probability of random erasing", kind=fraction)
    remode: Literal["const", "rand", "pixel"] = flag(
        "pixel",
        "fill of erased rectangles; const: the mean color; rand: a random color; pixel: noise",
        requires=("reprob",),
    )
    recount: int = flag(
        1,
        "maximum number of erased rectangles per image; they share the erased area",
        kind=bounded(int, 1, 100),
        requires=("reprob",),
    )
    aug_repeats: int = flag(
        1,
        "repeated augmentation: number of copies of each image in a batch, each augmented "
        "differently; the number of steps per epoch stays the same, so an epoch uses that "
        "many times fewer images",
        kind=bounded(int, 1, 100),
        names=("--aug_repeats", "--repeated_aug"),
    )
    max_bad_images: int | str = flag(
        "1%",
        "maximum number of unreadable images; N: in total; P%: as a percentage of the "
        "training and of the validation images, each rounded up; 0: none. Unreadable images "
        "are replaced by others in training, skipped in validation, and listed in "
        "--ckpt_dir/bad_images.txt. Above the limit, training saves a checkpoint and ends "
        "with exit code 5, and an evaluation ends with exit code 2",
        kind=count_or_percent,
        metavar="N|P%",
    )
    mean: tuple[float, float, float] | None = flag(
        None,
        "mean to subtract from each color channel, 0 to 1; images without three channels "
        "use the average of the three (default: the weights' own; new weights: ImageNet's, "
        f"{' '.join(map(str, _NEW.mean))}; volumes: 0)",
        kind=number,
        metavar=("R", "G", "B"),
    )
    std: tuple[float, float, float] | None = flag(
        None,
        "standard deviation to divide each color channel by; images without three channels "
        "use the average of the three (default: the weights' own; new weights: ImageNet's, "
        f"{' '.join(map(str, _NEW.std))}; volumes: 1)",
        kind=bounded(float, 1e-6, 1e9),
        metavar=("R", "G", "B"),
    )
    intensity: str | tuple[str, ...] | None = flag(
        None,
        "values that become 0 and 255 in images of more than 8 bits per value; others between "
        "them in proportion, beyond them clipped; images of 8 bits stay as they are. auto: the "
        "window that a DICOM file has, else the 0.5 and 99.5 percentiles of the values of up to "
        "256 training images, chosen by --seed once per run and saved with it; full: the "
        "smallest and largest value that the file could hold (16 bits: 0 and 65535); LOW HIGH: "
        "these values, in the file's unit (DICOM: after rescale, such as Hounsfield units); "
        "P% P%: these percentiles of each image, such as 0.5% 99.5%. Unless --in_chans is 1 or "
        "3, of each band; LOW HIGH may be repeated for each (docs/intensity.md) (default: the "
        "weights' own; new weights: auto)",
        kind=intensity_word,
        several=True,
        metavar="LOW HIGH",
    )
    crop_pct: float | None = flag(
        None,
        "side of the validation center crop, as a fraction of the size that --crop_mode "
        f"resizes to (default: the weights' own; new weights: {_NEW.crop_pct})",
        kind=bounded(float, 0.1, 1),
        metavar="SHARE",
    )
    crop_mode: CropMode | None = flag(
        None,
        "how validation images are resized before the center crop; center: by the shorter "
        "side; squash: each side separately, which changes the aspect ratio; border: by the "
        "longer side, padded with the mean color (default: the weights' own; new weights: "
        f"{_NEW.crop_mode})",
    )
    interpolation: Interpolation | None = flag(
        None,
        "interpolation for resizing; nearest, bilinear, bicubic, box, hamming or lanczos "
        f"(default: the weights' own; new weights: {_NEW.interpolation})",
        metavar="METHOD",
    )
    test_interpolation: Interpolation | None = flag(
        None,
        "interpolation for resizing in validation and prediction, if different (default: "
        "the weights' own; new weights: --interpolation)",
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
        """Return height and width of each of ``buckets``; empty without the flag."""
        sizes = (bucket.split("x") for bucket in self.buckets or ())
        return [(int(height), int(width)) for height, width in sizes]

    @property
    def size_schedule(self) -> list[tuple[int, float | None]]:
        """Return side and share of each item of ``image_size_schedule``; empty without the flag."""
        items = (item.partition(":") for item in self.image_size_schedule or ())
        return [(int(side), float(share) if share else None) for side, _, share in items]

    @property
    def image_sizes(self) -> list[tuple[int, int]]:
        """Return the sizes, height and width, of training images if there are several; else
        empty."""
        return self.bucket_sizes or [(side, side) for side, _ in self.size_schedule]

    @property
    def global_micro_batch_size(self) -> int:
        """Return the number of images per forward pass, across all devices."""
        return self.batch_size // self.grad_accum_steps

    def image_dtype(self, dimensions: int) -> str:
        """Return the dtype of images with this many spatial dimensions, by PyTorch's name."""
        return "uint8" if dimensions == 2 and self.data_source not in GIVE_FLOATS else "float32"

    @property
    def preprocessing(self) -> Preprocessing:
        """Return how images are resized and normalized; unset values are those for new weights."""
        given = {field.name: getattr(self, field.name) for field in fields(Preprocessing)}
        return Preprocessing(**{name: value for name, value in given.items() if value is not None})
