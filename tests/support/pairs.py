"""A source of images with texts that belong together, for runs that learn from pairs: a color, and
the numbers of tokens that name it."""

import colorsys
from typing import ClassVar

import numpy as np
import torch

from data.source import DataSource, Split
from training.feature import Feature

PAIRS = {"train": 64, "val": 20}
LENGTH, VOCABULARY = 6, 40
TEXT = (
    f"--text_depth 2 --text_width 16 --text_heads 2 --text_length {LENGTH} "
    f"--text_vocab_size {VOCABULARY}"
).split()
SOURCE = ["--extension", __file__, "--data_source", "colors"]
PAIR_FLAGS = [*SOURCE, "--objective", "siglip", *TEXT]


class Colors(Split):
    """Images of one noisy color, each determined by the seed and its number."""

    def __init__(self, request, name):
        super().__init__(request, name, np.zeros(PAIRS[name], np.int64))

    def digest(self):
        return f"colors {self.seed} {len(self)}"

    def load_sample(self, number, epoch, index):
        drawn = np.random.default_rng((self.seed, self.name == "train", number))
        hue = int(drawn.integers(VOCABULARY - 2))
        color = 255 * np.array(colorsys.hsv_to_rgb(hue / VOCABULARY, 1.0, 0.8))
        noise = drawn.normal(0, 20, self.request.shape)
        image = (color[:, None, None] + noise).clip(0, 255).astype(np.uint8)
        # Words at random, the color, an end, which has the largest number, and padding.
        tokens = drawn.integers(VOCABULARY - 2, size=LENGTH)
        end = int(drawn.integers(1, LENGTH))
        tokens[end - 1], tokens[end], tokens[end + 1 :] = hue, VOCABULARY - 1, VOCABULARY - 2
        return {"image": torch.from_numpy(image), "text": torch.from_numpy(tokens).int()}


def open_colors(request):
    """Return the source."""
    return DataSource("colors", {name: Colors(request, name) for name in request.splits})


class ColorSource(Feature):
    """``--data_source colors``."""

    choices: ClassVar = {"data_source": {"colors": "colors and their names"}}
    sources: ClassVar = {"colors": open_colors}
