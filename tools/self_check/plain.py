"""Training in plain PyTorch on one device: what every reference computes in the same way.

The self-check, tests/references and the peers of benchmarks share it. They judge the program, so
nothing that the program computes by is imported here.
"""

from collections.abc import Iterable

from torch import Tensor, float32, nn, uint8
from torch.optim import Optimizer
from torchvision.transforms.v2 import functional

from data.config import Preprocessing


def normalized(images: Tensor, preprocessing: Preprocessing) -> Tensor:
    """Return uint8 images, (images, channels, ...), as a model sees them; others as they are."""
    if images.dtype != uint8:
        return images
    mean, std = preprocessing.of_channels(images.shape[1])
    return functional.normalize(functional.to_dtype(images, float32, scale=True), mean, std)


def backward(losses: Iterable[Tensor]) -> list[Tensor]:
    """Add the gradients of losses, parts of one mean, one at a time, for the memory; return the
    parts."""
    parts = []
    for loss in losses:
        loss.backward()
        parts.append(loss.detach())
    return parts


def clip_and_step(optimizer: Optimizer, max_norm: float) -> Tensor | None:
    """Update the optimizer's parameters by their gradients, clipped at ``max_norm``, and drop the
    gradients; return their norm before. 0: neither clip nor measure it."""
    norm = None
    if max_norm > 0:
        parameters = [each for group in optimizer.param_groups for each in group["params"]]
        norm = nn.utils.clip_grad_norm_(parameters, max_norm)
    optimizer.step()
    optimizer.zero_grad()
    return norm
