"""Measures what a folder of as many images as ImageNet's costs at each start, in time and memory.

    python benchmarks/image_index.py --folder ~/made_tree

makes the folder, of links to one small image a class, and starts loading from it twice: as if for
the first time, and with the index that is there then. Memory is the proportional set size (PSS) of
the process and its loader processes, less that of the same with a few images.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from config_fields import local_path

FEW, BATCH, BATCHES = 2_000, 64, 30


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument(
        "--folder", type=local_path, required=True, help="where the images are made"
    )
    parser.add_argument("--images", type=int, default=1_281_167, help="for training")
    parser.add_argument("--classes", type=int, default=1000)
    parser.add_argument("--num_workers", type=int, default=4, help="loader processes")
    parser.add_argument("--child", action="store_true", help="load from the folder, and measure")
    return parser.parse_args()


def make(folder: Path, images: int, classes: int) -> None:
    """Write the tree unless it is there. Each class has a file of its own: 65,000 links to one are
    the most."""
    from PIL import Image

    if folder.exists():
        return
    partial = folder.with_name(f"{folder.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    for split, count in (("train", images), ("val", classes)):
        for label in range(classes):
            where = partial / split / f"n{label:08}"
            where.mkdir(parents=True)
            first = where / f"n{label:08}_0.JPEG"
            Image.new("RGB", (8, 8), (label % 256,) * 3).save(first)
            for number in range(1, len(range(label, count, classes))):
                os.link(first, where / f"n{label:08}_{number}.JPEG")
    partial.rename(folder)


def load(args: argparse.Namespace) -> None:
    """Print what opening the folder took in seconds, and the PSS in bytes while it is read."""
    from data.config import DataConfig
    from data.image_folder import open_folder
    from data.loader import Share
    from data.source import DatasetRequest

    began = time.perf_counter()
    config = DataConfig(data_dir=str(args.folder), batch_size=BATCH, num_workers=args.num_workers)
    source = open_folder(DatasetRequest(config, 3, (8, 8), args.classes, 0))
    source.fingerprint()
    opened = time.perf_counter() - began
    batches = source.train_loader(BATCH, Share()).epoch(0)
    for _ in range(BATCHES):
        next(batches)
    children = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
    pss = sum(pss_of(process) for process in ("self", *children))
    print(json.dumps({"seconds": opened, "bytes": pss}))


def pss_of(process: str) -> int:
    """Return the proportional set size of a process in bytes."""
    lines = Path(f"/proc/{process}/smaps_rollup").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:"))


def measured(args: argparse.Namespace, folder: Path) -> dict[str, float]:
    numbers = f"--classes {args.classes} --num_workers {args.num_workers}".split()
    command = [sys.executable, __file__, "--child", "--folder", str(folder), *numbers]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    return json.loads(done.stdout)


def main() -> None:
    args = parse()
    if args.child:
        return load(args)
    few = args.folder.with_name(f"{args.folder.name}.few")
    make(few, FEW, args.classes)
    make(args.folder, args.images, args.classes)
    base = measured(args, few)["bytes"]
    print(f"| start of {args.images:,} images, {args.num_workers} workers | s | MB more |")
    print("|---|---|---|")
    for name in ("first", "second"):
        found = measured(args, args.folder)
        print(f"| {name} | {found['seconds']:.2f} | {(found['bytes'] - base) / 1e6:.0f} |")


if __name__ == "__main__":
    main()
