"""The factor that fp16 multiplies the loss with, so that small gradients do not become zero."""

from __future__ import annotations

import torch

_INITIAL = 2.0**16
_GROWTH_STEPS = 2000
"""Steps without an overflow before the scale is doubled. All figures are PyTorch's GradScaler's."""
_LEAST, _MOST = 1.0, 2.0**24


class LossScale:
    """A scale that is halved when gradients overflow, and doubled when they have not for long.

    It lives on the device and is never read. PyTorch's GradScaler is the model, but where gradients
    are on the host (``--cpu_offload``) it copies its scalars there without waiting for them; it
    takes a loss that is not a number for an overflow; and it can shrink to zero.
    """

    def __init__(self, device: torch.device) -> None:
        self.value = torch.full((), _INITIAL, device=device)
        self._good_steps = torch.zeros((), device=device)  # since the last change or overflow

    def unscale(self, gradients: list[torch.Tensor]) -> None:
        """Divide the gradients, which are all on one device, by the scale: in place and exactly."""
        inverse = self.value.reciprocal().to(gradients[0].device)
        torch._foreach_mul_(gradients, inverse)

    def is_least(self) -> torch.Tensor:
        """Return 1.0 if the scale cannot shrink, so is not to blame for an overflow, else 0.0."""
        return (self.value <= _LEAST).float()

    def update(self, overflowed: torch.Tensor, counts: torch.Tensor) -> None:
        """Adapt to whether a step ``overflowed``, if it ``counts``; both are 1.0 or 0.0."""
        good = (self._good_steps + 1) * (1 - overflowed)
        grows = (good >= _GROWTH_STEPS).float()
        value = self.value * (1 + grows - 0.5 * overflowed)
        # A weight of 0 or 1 gives exactly the one or the other.
        self.value = torch.lerp(self.value, value.clamp(_LEAST, _MOST), counts)
        self._good_steps = torch.lerp(self._good_steps, good * (1 - grows), counts)

    def state(self) -> dict[str, torch.Tensor]:
        """Return copies on the CPU of what a checkpoint keeps."""
        steps = self._good_steps.long()
        return {"loss_scale": self.value.cpu(), "loss_scale_good_steps": steps.cpu()}

    def restore(self, state: dict[str, torch.Tensor]) -> None:
        """Take back what ``state`` gave."""
        self.value = state["loss_scale"].to(self.value)
        self._good_steps = state["loss_scale_good_steps"].to(self._good_steps)
