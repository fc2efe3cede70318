"""JPEG files of a given content, and what Pillow decodes from them."""

import io

import numpy as np
from PIL import Image

GUARD = 2.0  # of 255, mean absolute difference


def jpeg(pixels, **options):
    file = io.BytesIO()
    Image.fromarray(pixels).convert(options.pop("mode", "RGB")).save(file, "JPEG", **options)
    return file.getvalue()


def as_pillow(encoded):
    return np.asarray(Image.open(io.BytesIO(encoded)).convert("RGB"))
