"""The flags of masked autoencoding (MAE)."""

import functools
from dataclasses import dataclass
from typing import ClassVar

from config_fields import bounded, flag, positive, rate

# Parts of an objective: their defaults do not turn it off.
_flag = functools.partial(flag, requires=("objective=mae",), requires_at_default=True)


@dataclass(frozen=True)
class MaeConfig:
    """What masked autoencoding hides, and the decoder that it adds to the model."""

    group: ClassVar[str] = "objective"

    mask_ratio: float = _flag(
        0.75,
        "fraction of the patches of an image that are hidden from the encoder and reconstructed",
        kind=rate,
    )
    norm_pix_loss: bool = _flag(
        True,
        "reconstruct pixels normalized by the mean and standard deviation of their patch, instead "
        "of the image's pixels",
    )
    decoder_depth: int = _flag(8, "number of blocks of the decoder", kind=bounded(int, 1, 1000))
    decoder_embed_dim: int = _flag(512, "width of the decoder", kind=bounded(int, 1, 2**20))
    decoder_num_heads: int = _flag(16, "number of attention heads of the decoder", kind=positive)
