"""How the images of a model are resized and normalised, under timm's names, with the defaults.

Imports nothing heavy, so that ``--help`` and the argument checks stay fast.
"""

from __future__ import annotations

from dataclasses import dataclass

INTERPOLATIONS = ("nearest", "bilinear", "bicubic", "box", "hamming", "lanczos")
CROP_MODES = ("center", "squash", "border")


@dataclass(frozen=True)
class Preprocessing:
    """Says how images are resized and normalised; by default as is usual for ImageNet."""

    mean: tuple[float, ...] = (0.485, 0.456, 0.406)
    std: tuple[float, ...] = (0.229, 0.224, 0.225)
    crop_pct: float = 0.875
    """The side of the centre crop as a share of what ``crop_mode`` resizes the image to."""
    interpolation: str = "bicubic"
    test_interpolation: str | None = None
    """Of validation and use; None: as in training."""
    crop_mode: str = "center"
    """What is resized in validation and use: the shorter side (center), each side by itself
    (squash), or the longer side, with a border of the mean colour (border)."""

    @property
    def interpolation_of_val(self) -> str:
        """Return the interpolation of images that are not trained on."""
        return self.test_interpolation or self.interpolation

    def of_channels(self, channels: int) -> tuple[list[float], list[float]]:
        """Return mean and std by channel; other channels than three colours have their means."""
        if channels == len(self.mean):
            return list(self.mean), list(self.std)
        mean, std = (sum(values) / len(values) for values in (self.mean, self.std))
        return [mean] * channels, [std] * channels

    @classmethod
    def of_new_weights(cls, data_source: str) -> Preprocessing:
        """Return what new weights are trained with: values of volumes stay as they are."""
        if data_source == "volumes":
            return cls(mean=(0.0, 0.0, 0.0), std=(1.0, 1.0, 1.0))
        return cls()

    def __str__(self) -> str:
        mean, std = (" ".join(f"{value:g}" for value in values) for values in (self.mean, self.std))
        crop = f"crop {self.crop_pct:g}"
        if self.crop_mode != "center":
            crop += f" {self.crop_mode}"
        return f"mean {mean}, std {std}, {crop}, {self.interpolation_of_val}"
