"""Time the input pipeline: images per second and core, compared with torchvision's ImageFolder.

    python benchmarks/data.py --repeats 5
    python benchmarks/data.py --crops          # DINO's crops: 2 of 224 and 8 of 96 pixels

The images are JPEGs of 500 x 375 pixels, made from scikit-learn's two photographs by cropping,
mirroring and changing the brightness. Both loaders run in worker processes, shuffle, and apply the
classic transforms: random resized crop to 224 pixels (bicubic) and horizontal flip. torchvision's
also converts to fp32 and normalizes, which the program does on the devices. The loaders take turns.
"images/s per core" divides by the CPU time of the workers and of the process that takes the
batches, so that other load on the machine has little effect. The table shows medians of the
repeats, and the minimum and maximum of the ratio.

With --crops, both make DINO's crops instead; torchvision's with its v2 transforms on Pillow images,
in the order and with the probabilities of DINOv2 (dinov2/data/augmentations.py).
"""

import argparse
import json
import os
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, ImageEnhance
from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.common import commit
from config_fields import local_path

SIZE = 224
LOCAL_SIZE, LOCALS = 96, 8
GLOBAL_SCALE, LOCAL_SCALE = (0.32, 1.0), (0.05, 0.32)
"""Of DINOv2's crops: the shares of an image's area."""
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
CLASSES = 8


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--images", type=int, default=512, help="number of images (default: 512)")
    parser.add_argument("--batch_size", type=int, default=64, help="images per batch (default: 64)")
    parser.add_argument(
        "--workers", type=int, default=1, help="number of loader processes (default: 1)"
    )
    parser.add_argument("--repeats", type=int, default=5, help="number of repeats (default: 5)")
    parser.add_argument(
        "--seconds", type=float, default=6, help="duration of a measurement (default: 6)"
    )
    parser.add_argument("--crops", action="store_true", help="make DINO's crops")
    parser.add_argument("--json", type=local_path, help="write the figures to this file")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        size = make_images(Path(folder), args.images)
        print(
            f"commit {commit()}, Python {platform.python_version()}, {os.cpu_count()} cores; "
            f"{args.images} JPEGs of {size / 1e3:.0f} KB, batches of {args.batch_size}, "
            f"{args.workers} loader process(es)"
        )
        kind = "crops" if args.crops else "loaders"
        figures = {kind: time_loaders(Path(folder), args, CROPS if args.crops else WHOLE)}
    if args.json:
        args.json.write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")


def make_images(root: Path, count: int) -> float:
    """Write an image folder; return the mean size of a file in bytes."""
    from sklearn.datasets import load_sample_images

    photographs = [Image.fromarray(pixels) for pixels in load_sample_images().images]
    random, sizes = np.random.default_rng(0), []
    for index in range(count):
        photograph = photographs[index % len(photographs)]
        height = int(random.integers(300, photograph.height + 1))
        width = height * 4 // 3
        left, top = (
            int(random.integers(0, most + 1))
            for most in (photograph.width - width, photograph.height - height)
        )
        part = photograph.resize(
            (500, 375), Image.Resampling.BICUBIC, (left, top, left + width, top + height)
        )
        part = ImageEnhance.Brightness(part).enhance(random.uniform(0.7, 1.3))
        if random.random() < 0.5:
            part = part.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
        for split in ("train", "val") if index < CLASSES else ("train",):
            path = root / split / str(index % CLASSES) / f"{index:05}.jpg"
            path.parent.mkdir(parents=True, exist_ok=True)
            part.save(path, quality=95)
        sizes.append(path.stat().st_size)
    return statistics.mean(sizes)


# -- loaders ---------------------------------------------------------------------------


Loader = Callable[[Path, int, int], Iterator[int]]
"""From a folder, a batch size and a number of processes to the lengths of batches, without end."""


def time_loaders(
    root: Path, args: argparse.Namespace, opened: Mapping[str, Loader]
) -> dict[str, dict[str, float]]:
    """Print and return the pace of each loader, and how far the program's is ahead."""
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in opened}
    for _ in tqdm(range(args.repeats), unit="repeat", leave=False):
        for name, open_loader in opened.items():
            loader = open_loader(root, args.batch_size, args.workers)
            found[name].append(pace_of(loader, args.seconds))
    table: dict[str, dict[str, float]] = {}
    for name, paces in found.items():
        cpu, wall = (statistics.median(each) for each in zip(*paces, strict=True))
        table[name] = {"images_per_cpu_s": cpu, "images_per_s": wall}
        print(f"  {name:<12} {cpu:6.0f} images/s per core, {wall:6.0f} images/s in total")
    pairs = zip(found["program"], found["torchvision"], strict=True)
    ratios = [ours[0] / theirs[0] for ours, theirs in pairs]
    ratio = statistics.median(ratios)
    print(f"  ratio per core {ratio:.2f} ({min(ratios):.2f} to {max(ratios):.2f})")
    table["ratio"] = {"median": ratio, "lowest": min(ratios), "highest": max(ratios)}
    return table


def torchvisions(root: Path, batch_size: int, workers: int) -> Iterator[int]:
    """Load with torchvision's classic transforms."""
    from torchvision import transforms

    classic = transforms.Compose(
        [
            transforms.RandomResizedCrop(SIZE, interpolation=transforms.InterpolationMode.BICUBIC),
            transforms.RandomHorizontalFlip(),
            transforms.ToTensor(),
            transforms.Normalize(MEAN, STD),
        ]
    )
    yield from _image_folders(root, batch_size, workers, classic)


def torchvisions_crops(root: Path, batch_size: int, workers: int) -> Iterator[int]:
    """Load with torchvision's v2 transforms, composed as DINOv2 does."""
    import torch
    from torchvision.transforms import v2

    def cropped(size: int, scale: tuple[float, float]) -> v2.Compose:
        bicubic = v2.InterpolationMode.BICUBIC
        crop = v2.RandomResizedCrop(size, scale, interpolation=bicubic)
        return v2.Compose([crop, v2.RandomHorizontalFlip()])

    def distorted(blurred: float, *then: v2.Transform) -> v2.Compose:
        return v2.Compose(
            [
                v2.RandomApply([v2.ColorJitter(0.4, 0.4, 0.2, 0.1)], 0.8),
                v2.RandomGrayscale(0.2),
                v2.RandomApply([v2.GaussianBlur(9, (0.1, 2.0))], blurred),
                *then,
                v2.ToImage(),
                v2.ToDtype(torch.float32, scale=True),
                v2.Normalize(MEAN, STD),
            ]
        )

    of_globals, of_locals = cropped(SIZE, GLOBAL_SCALE), cropped(LOCAL_SIZE, LOCAL_SCALE)
    first, second = distorted(1.0), distorted(0.1, v2.RandomSolarize(128, 0.2))
    local = distorted(0.5)

    def crops(image: Image.Image) -> list[torch.Tensor]:
        locals_ = [local(of_locals(image)) for _ in range(LOCALS)]
        return [first(of_globals(image)), second(of_globals(image)), *locals_]

    yield from _image_folders(root, batch_size, workers, crops)


def _image_folders(
    root: Path, batch_size: int, workers: int, transform: Callable[[Image.Image], Any]
) -> Iterator[int]:
    """Yield the lengths of the batches of torchvision's image folder."""
    from torch.utils.data import DataLoader
    from torchvision.datasets import ImageFolder

    loader = DataLoader(
        ImageFolder(str(root / "train"), transform),
        batch_size,
        shuffle=True,
        num_workers=workers,
        drop_last=True,
        persistent_workers=True,
    )
    while True:
        for _, labels in loader:
            yield len(labels)


def programs(root: Path, batch_size: int, workers: int) -> Iterator[int]:
    """Load with the program's transforms."""
    yield from _programs(root, batch_size, workers)


def programs_crops(root: Path, batch_size: int, workers: int) -> Iterator[int]:
    """Load DINO's crops as the program makes them, with masks."""
    from features.dino.crops import CropView

    size, patches, ratio = (LOCAL_SIZE, LOCAL_SIZE), (SIZE // 16, SIZE // 16), (0.1, 0.5)
    view = CropView(size, LOCALS, GLOBAL_SCALE, LOCAL_SCALE, patches, ratio)
    yield from _programs(root, batch_size, workers, labels=False, view=view)


def _programs(root: Path, batch_size: int, workers: int, **request: Any) -> Iterator[int]:
    """Yield the lengths of the program's batches."""
    from data.batch import BatchShard
    from data.config import DataConfig
    from data.open import open_data
    from data.source import DatasetRequest

    config = DataConfig(data_dir=str(root), batch_size=batch_size, num_workers=workers)
    source = open_data(DatasetRequest(config, 3, (SIZE, SIZE), CLASSES, seed=0, **request))
    loader = source.train_loader(batch_size, BatchShard())
    epoch = 0
    while True:
        for batch in loader.epoch(epoch):
            yield len(next(iter(batch.values())))
        epoch += 1


WHOLE: Mapping[str, Loader] = {"torchvision": torchvisions, "program": programs}
CROPS: Mapping[str, Loader] = {"torchvision": torchvisions_crops, "program": programs_crops}


def pace_of(lengths: Iterator[int], seconds: float) -> tuple[float, float]:
    """Return images a second of CPU time, and images a second; the first batches do not count."""
    for _ in range(4):
        next(lengths)
    images, cpu, began = 0, cpu_seconds(), time.perf_counter()
    while time.perf_counter() < began + seconds:
        images += next(lengths)
    spent = cpu_seconds() - cpu
    return images / spent, images / (time.perf_counter() - began)


def cpu_seconds() -> float:
    """Return the CPU time of this process and of its children that live."""
    me = os.getpid()
    total = time.process_time()
    for child in Path(f"/proc/{me}/task/{me}/children").read_text(encoding="utf-8").split():
        fields = Path(f"/proc/{child}/stat").read_bytes().rpartition(b")")[2].split()
        total += (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return total


if __name__ == "__main__":
    main()
