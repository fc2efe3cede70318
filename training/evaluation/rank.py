"""The effective rank of a backbone's features: how many directions they use. Needs no labels.

RankMe (arXiv 2210.02885, equation 1): the exponential of the entropy of the features' singular
values, normalized by their sum. It is 1 if all features lie along one line, and the smaller of
their number and their width if they use all directions equally. The paper computes it on 25,600
training images.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F

from training.processes import exchange

MOST_IMAGES = 25_600
_EPS = 1e-7
"""Added to each normalized singular value, as in the paper."""
_PART = 2**14
"""The number of images whose features are in fp64 at a time."""


@dataclass(frozen=True)
class FeatureRank:
    """The effective rank of features, and how widely they are spread."""

    rankme: float | None
    """RankMe; None without images, or if a feature is not finite."""
    std: float
    """The standard deviation of normalized features, averaged over entries, times the square root
    of the width: 1 if they are spread evenly over the unit sphere, 0 if all are equal."""
    images: int
    """The number of training images."""
    width: int

    @property
    def values(self) -> dict[str, float]:
        """The figures by their names in records."""
        if self.rankme is None:
            return {}
        return {"train_rankme": self.rankme, "train_feature_std": self.std}

    def __str__(self) -> str:
        if self.rankme is None:
            return f"features of {self.images:,} images of train are not finite: no effective rank"
        return (
            f"effective rank of features: {self.rankme:.1f} of {self.width} (RankMe), standard "
            f"deviation {self.std:.2f}, of {self.images:,} images of train"
        )


def rank(features: torch.Tensor) -> FeatureRank:
    """Return the effective rank of the features of all processes, each (images, width) fp32 for its
    own images. All processes must call it.

    No features are exchanged: singular values are the square roots of the eigenvalues of the Gram
    matrix (width, width), which is summed over the processes in fp64.
    """
    width = features.shape[1]
    gram = torch.zeros(width, width, dtype=torch.float64)
    sums = torch.zeros(2 * width + 1, dtype=torch.float64)
    sums[-1] = len(features)
    for part in features.split(_PART):
        rows = part.double()
        units = F.normalize(rows, dim=1)
        gram += rows.T @ rows
        sums[:-1] += torch.cat([units.sum(0), units.square().sum(0)])
    if exchange.count() > 1:
        dist.all_reduce(gram)
        dist.all_reduce(sums)
    images = int(sums[-1])
    if not images or not gram.isfinite().all():
        return FeatureRank(None, 0.0, images, width)
    mean, of_squares = (sums[:-1] / images).chunk(2)
    std = (of_squares - mean.square()).clamp(min=0).sqrt().mean() * width**0.5
    eigenvalues = torch.linalg.eigvalsh(gram)[-min(images, width) :]  # in ascending order
    singular = eigenvalues.clamp(min=0).sqrt()
    shares = singular / singular.sum().clamp(min=1e-300) + _EPS
    return FeatureRank(float((-(shares * shares.log()).sum()).exp()), float(std), images, width)
