"""Images with masks, in each layout that ``--segment_dir`` takes."""

import io
from dataclasses import replace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from PIL import Image

from data.config import DataConfig
from data.source import DatasetRequest
from data.windows import WindowSplit

COLORS = np.array([(250, 10, 10), (10, 240, 10), (10, 10, 250), (240, 240, 10)])
"""Of the pixels of each class, before noise."""
IGNORED = 255
LAYOUTS = ("ade20k", "voc", "pairs", "parquet")


def masked_image(seed, size):
    """An image of noisy colors, and its mask: columns of some classes, an ignored row."""
    random = np.random.default_rng(seed)
    height, width = size
    ends = np.sort(random.integers(0, width + 1, 2))
    classes = random.permutation(len(COLORS))
    columns = classes[np.searchsorted(ends, np.arange(width), side="right")]
    mask = np.broadcast_to(columns, size).astype(np.uint8).copy()
    noise = random.normal(0, 60, (height, width, 3))
    pixels = np.clip(COLORS[mask] + noise, 0, 255).astype(np.uint8)
    mask[height // 2] = IGNORED
    return pixels, mask


def encoded(pixels, format="png", palette=False):
    content, image = io.BytesIO(), Image.fromarray(pixels)
    if palette:
        image.putpalette([value for color in range(256) for value in (color, 255 - color, 7)])
    image.save(content, format)
    return content.getvalue()


def write_masked(root, layout, train, val):
    """Write images of these sizes, each (height, width); return the images and masks by split."""
    images = {
        split: [masked_image((number, first), size) for number, size in enumerate(sizes)]
        for first, (split, sizes) in enumerate({"train": train, "val": val}.items())
    }
    for split, pairs in images.items():
        long = {"train": "training", "val": "validation"}[split]
        if layout == "parquet":
            columns = {
                "image": [{"bytes": encoded(pixels)} for pixels, _ in pairs],
                "mask": [{"bytes": encoded(mask)} for _, mask in pairs],
                "id": [*range(len(pairs))],
            }
            root.mkdir(parents=True, exist_ok=True)
            pq.write_table(pa.table(columns), root / f"{split}-0.parquet", row_group_size=3)
            continue
        for number, (pixels, mask) in enumerate(pairs):
            stem = f"{split}_{number}"
            of_image, of_mask = {
                "ade20k": (f"images/{long}/{stem}.bmp", f"annotations/{long}/{stem}.png"),
                "voc": (f"JPEGImages/{stem}.jpg", f"SegmentationClass/{stem}.png"),
                "pairs": (f"{split}/some/{stem}.bmp", f"{split}/some/{stem}.png"),
            }[layout]
            for path in (of_image, of_mask):
                (root / path).parent.mkdir(parents=True, exist_ok=True)
            # What is in VOC's .jpg is lossless here, so that all layouts hold the same pixels.
            (root / of_image).write_bytes(encoded(pixels, "bmp"))
            (root / of_mask).write_bytes(encoded(mask, palette=layout == "voc"))
    if layout == "voc":
        lists = root / "ImageSets" / "Segmentation"
        lists.mkdir(parents=True)
        for split, pairs in images.items():
            names = [f"{split}_{number}\n" for number in range(len(pairs))]
            (lists / f"{split}.txt").write_text("".join(names))
    return images


def request_of(root, size=(16, 16), channels=3, **changes):
    config = DataConfig(segment_dir=None if root is None else str(root), num_workers=0, **changes)
    return DatasetRequest(config, channels, size, 10, seed=0)


def split_of(sizes, name="val", size=(16, 16)):
    """A split whose images are numbers that say which pixel is where."""

    class Numbered(WindowSplit):
        def picture(self, image):
            height, width = self.scaled[image].tolist()
            return (
                (torch.arange(height * width) % 251).byte().view(1, height, width).expand(3, -1, -1)
            )

    request = replace(request_of(None, size), labels=False, augment=False)
    return Numbered(request, name, np.array(sizes))
