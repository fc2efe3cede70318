"""The sizes of a split's images in pixels, and the file that saves reading them again."""

import os
from concurrent.futures import ThreadPoolExecutor

import numpy as np
from tqdm import tqdm

from data.decode import image_size
from data.files import HEAD, BrokenImageError, printable
from data.images import ImageSplit
from data.index_file import Table, load_or_build


def image_sizes(split: ImageSplit) -> np.ndarray:
    """Return the height and width of each image of a split in pixels, (n, 2), int32; 0 x 0 for an
    image that cannot be read. An index file has them as long as the images have the same names."""
    if (known := split.known_sizes()) is not None:
        return known
    config, digest = split.request.config, split.digest()
    part = 256  # images that a thread reads at a time

    def sizes_of(first: int) -> list[tuple[int, int]]:
        sizes = []
        for number in range(first, min(first + part, len(split))):
            size = 0, 0
            for most in (HEAD, None):  # mostly the first bytes are enough
                try:
                    size = image_size(split.read(number, most))
                    break
                except BrokenImageError:  # training and evaluation report it when they read it
                    continue
            sizes.append(size)
        return sizes

    def build() -> Table:
        sizes: list[tuple[int, int]] = []
        title = printable(f"reading image sizes of {os.path.join(config.data_dir, split.name)}")
        with (
            ThreadPoolExecutor(split.reading_threads) as pool,  # they wait for images far away
            tqdm(total=len(split), desc=title, unit=" images", delay=5, disable=None) as bar,
        ):
            for some_sizes in pool.map(sizes_of, range(0, len(split), part)):
                sizes += some_sizes
                bar.update(len(some_sizes))
        return Table({"sizes": np.array(sizes, np.int32).reshape(-1, 2)}, {"digest": digest})

    table = load_or_build(
        config,
        f"{split.name}-sizes",
        config.data_dir,
        build,
        lambda table: None if table.info["digest"] == digest else "the images have changed",
        counted="sizes",
    )
    return table.arrays["sizes"]
