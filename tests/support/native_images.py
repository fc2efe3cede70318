"""A folder of images of many sizes and shapes, and the flags of a tiny run on it."""

import csv
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from timm.models.naflexvit import NaFlexVit

TRAIN, VAL, CLASSES = 96, 25, 3
MODEL = (
    "--native_resolution --model vit_tiny_patch16_224 --image_size 24 --patch_size 4 "
    f"--embed_dim 32 --num_heads 2 --num_blocks 2 --num_classes {CLASSES} --token_budget 80 "
    "--max_images_per_sequence 8"
)
RUN = "--batch_size 4 --num_epochs 1 --max_steps 3 --warmup_steps 1 --lr 1e-2 --hflip 0"


def write_images(root: Path) -> Path:
    """Of 4 to 60 pixels a side, from squares to a line of pixels; slopes in red and blue."""
    drawn = np.random.default_rng(0)
    for split, count in (("train", TRAIN), ("val", VAL)):
        for number in range(count):
            height, width = (int(side) for side in np.exp(drawn.uniform(np.log(4), np.log(60), 2)))
            if number == 7:
                height, width = 1, 60
            pixels = np.full((height, width, 3), number * 255 // count, np.uint8)
            pixels[..., 0] = np.linspace(0, 255, height)[:, None]
            pixels[..., 2] = np.linspace(255 * (number % CLASSES) / CLASSES, 255, width)
            path = root / split / f"class{number % CLASSES}" / f"{number:03d}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(pixels).save(path)
    return root


def write_captions(folder: Path) -> Path:
    """Of images of ``write_images``: a table of what is in each, one caption or two."""
    rows = [("path", "split", "caption")]
    for path in sorted(folder.rglob("*.png")):
        height, width = Image.open(path).size[::-1]
        name, split = str(path.relative_to(folder)), path.relative_to(folder).parts[0]
        rows.append((name, split, f"{height} by {width}"))
        if height > width:
            rows.append((name, split, f"number {path.stem}, high"))
    with open(folder / "captions.csv", "w", newline="") as file:
        csv.writer(file).writerows(rows)
    return folder / "captions.csv"


def flags(folder: Path, *more: str) -> list[str]:
    return [*f"--data_dir {folder} {MODEL} {RUN}".split(), *more]


def timms(spec) -> NaFlexVit:
    """timm's model of the spec."""
    return NaFlexVit(**spec.arguments | {"weight_init": "", "patch_drop_rate": 0.0})


def images_in(batch) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """The patches (1, patches, values) uint8 and places (1, patches, 2) of each image of packed
    sequences, in their order."""
    images = []
    fields = (batch[name] for name in ("patches", "patch_coord", "segment_ids"))
    for patches, places, segments in zip(*fields, strict=True):
        for number in range(1, int(segments.max()) + 1):
            chosen = (segments == number) & (places[:, 2] > 0)
            images.append((patches[chosen][None], places[chosen][None, :, :2].long()))
    return images


def logits_of(model, patches, places, run):
    """What timm's model says of one image."""
    mean, std = (
        torch.tensor(x).repeat(patches.shape[-1] // 3)
        for x in run.config.data.preprocessing.of_channels(3)
    )
    valid = torch.ones(places.shape[:2], dtype=torch.bool)
    return model((patches / 255 - mean) / std, places, valid)
