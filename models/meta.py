"""Between the meta device, where models are built, and memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import nn

from models.errors import ModelError
from models.timm_private import computed_buffers, has_computed_buffers


def allocate(module: nn.Module, name: str) -> Iterator[tuple[str, nn.Module]]:
    """Give what is on meta below ``module`` memory on the CPU, module by module.

    Yields each module that was on meta with its name in the model, of which ``name`` is that of
    ``module``. Its own parameters are for the caller to fill; buffers have their values.
    """
    for full_name, part in on_meta(module, name):
        allocate_own(part)
        yield full_name, part


def on_meta(module: nn.Module, name: str) -> Iterator[tuple[str, nn.Module]]:
    """Yield each module below ``module`` with something of its own on meta, as ``allocate``."""
    for full_name, part in module.named_modules(prefix=name):
        own = [*part.parameters(recurse=False), *part.buffers(recurse=False)]
        if any(each.is_meta for each in own):
            yield full_name, part


def allocate_own(part: nn.Module) -> None:
    """Do as ``allocate`` for one module, without the modules below it."""
    part.to_empty(device="cpu", recurse=False)
    fill_own_buffers(part)


def fill_buffers(
    module: nn.Module, send: Callable[[torch.Tensor], torch.Tensor] = lambda values: values
) -> None:
    """Give the buffers below ``module`` their values, computed on the CPU, whatever they hold.

    ``send`` moves one to where it is used. Parameters are left alone, wherever they are.
    """
    for part in module.modules():
        fill_own_buffers(part, send)


def cast_buffers(block: nn.Module, dtype: torch.dtype) -> None:
    """Give the floating-point buffers of a block the dtype that it computes in.

    A block adds its buffers (the key bias of Eva) to parameters in that dtype. Not for the model
    around the blocks: its tables of angles are to stay in fp32.
    """
    for part in block.modules():
        for key, buffer in part.named_buffers(recurse=False):
            if buffer.is_floating_point():
                part._buffers[key] = buffer.to(dtype)


def check_buffers(model: nn.Module) -> None:
    """Raises ModelError for a model with a buffer that cannot be computed from its settings."""
    kept = model.state_dict().keys() - dict(model.named_parameters()).keys()
    if kept:
        raise ModelError(
            f"it keeps {min(kept)} from step to step (a buffer in its state dict), which is not "
            "sharded or saved here"
        )
    for name, part in model.named_modules():
        if next(part.buffers(recurse=False), None) is not None and not has_computed_buffers(part):
            raise ModelError(f"{name} has buffers and no function that computes them")


def fill_own_buffers(
    part: nn.Module, send: Callable[[torch.Tensor], torch.Tensor] = lambda values: values
) -> None:
    """Do as ``fill_buffers`` for one module, without the modules below it."""
    if next(part.buffers(recurse=False), None) is not None:
        for key, values in computed_buffers(part).items():
            part._buffers[key] = send(values)
