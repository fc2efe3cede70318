"""Changes what modules compute, from outside: bf16, graph breaks, modules around the blocks."""

from collections.abc import Callable, Collection
from typing import Any

import torch
from timm.layers import PatchDropout, PatchDropoutWithIndices
from torch import nn
from torch.overrides import TorchFunctionMode

from xla_fsdp.layout import Mark, mark_both

# -- attention under autocast ----------------------------------------------------------
#
# On other devices autocast lowers ``scaled_dot_product_attention`` as any product. For XLA it does
# not (torch_xla 2.9), so queries and keys that a norm has made fp32 would meet values in bf16,
# which is an error.


_libraries: list[torch.library.Library] = []
"""The override of attention, which lasts as long as its library."""


def compute_in_bf16(model: nn.Module) -> None:
    """Compute matrix products of the forward pass, and so of the backward pass, in bf16."""
    attention = torch.ops.aten.scaled_dot_product_attention.default

    def lowered(keys: torch._C.DispatchKeySet, *args, **kwargs) -> torch.Tensor:
        """Cast fp32 arguments as for other products; the operations inside stay under autocast."""
        dtype = torch.get_autocast_dtype("xla")
        lower = [
            x.to(dtype) if isinstance(x, torch.Tensor) and x.dtype == torch.float32 else x
            for x in args
        ]
        return attention.redispatch(keys.remove("AutocastXLA"), *lower, **kwargs)

    if not _libraries:
        library = torch.library.Library("aten", "IMPL")
        library.impl("scaled_dot_product_attention", lowered, "AutocastXLA", with_keyset=True)
        _libraries.append(library)
    model.forward = torch.autocast("xla", dtype=torch.bfloat16)(model.forward)


# -- around ``forward`` ----------------------------------------------------------------


def before_forward(module: nn.Module, apply: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Pass the module's first input through ``apply``."""
    module.register_forward_pre_hook(lambda _, args: (apply(args[0]), *args[1:]))


def after_forward(module: nn.Module, apply: Callable[[Any], Any]) -> None:
    """Pass the module's output through ``apply``."""
    module.register_forward_hook(lambda _, __, output: apply(output))


def break_graph_every(n: int, blocks: list[nn.Module], break_graph: Callable[[], None]) -> None:
    """End the graph after every ``n`` blocks, forward and backward, where it is too large to
    compile."""

    def break_both_ways(x: torch.Tensor) -> torch.Tensor:
        if x.requires_grad:  # no autograd.Function: its result is one tensor more
            x.register_hook(lambda _: break_graph())
        break_graph()
        return x

    for block in blocks[n - 1 : -1 : n]:
        after_forward(block, break_both_ways)


# -- embedding and other parts around the blocks, with sharded images and parameters -----


def drop_patches_of_whole_images(model: nn.Module, mark_images: Mark) -> None:
    """Let patches be dropped from whole images, though blocks shard their tokens: where devices
    have unequal parts of them, XLA ends the process."""
    drop = getattr(model, "patch_drop", None)
    if not isinstance(drop, PatchDropout | PatchDropoutWithIndices):
        return

    def mark(patches: torch.Tensor | tuple) -> torch.Tensor | tuple:
        if isinstance(patches, torch.Tensor):
            return mark_both(patches, mark_images)
        kept, indices = patches
        return mark_both(kept, mark_images), indices

    drop.register_forward_pre_hook(lambda _, args: mark(args[0]))
    after_forward(drop, mark)


class _LargestByPlace(TorchFunctionMode):
    """Replaces ``amax`` as far as timm's pooling uses it."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is torch.Tensor.amax:
            return torch.Tensor.max(*args, **(kwargs or {})).values
        return func(*args, **(kwargs or {}))


def find_largest_by_place(model: Any) -> None:
    """Let timm's pooling by "max" and "avgmax" pass its gradient to the place of a largest value.

    ``amax`` passes it to the values that are equal to the largest one. XLA may compute the values
    once for either side of that comparison, rounded differently, so that none is: 0 / 0.
    """
    pool = getattr(model, "pool", None)
    if pool is not None and getattr(model, "global_pool", None) in ("max", "avgmax"):

        def pool_by_place(*args, **kwargs) -> torch.Tensor:
            with _LargestByPlace():
                return pool(*args, **kwargs)

        model.pool = pool_by_place


def small_parameters(module: nn.Module) -> set[str]:
    """Return the names of all parameters but the weights of layers."""
    layers = (nn.Linear, nn.Conv2d, nn.Conv3d)
    large = {f"{name}.weight" for name, part in module.named_modules() if isinstance(part, layers)}
    return {name for name, _ in module.named_parameters()} - large


def gather_parameters(
    module: nn.Module, names: Collection[str], gather: Callable[[str, torch.Tensor], torch.Tensor]
) -> None:
    """Let a block, or the model around its blocks, ``gather`` these parameters before use.

    At rest they are sharded. Left to itself, the partitioner may shard the features of activations
    likewise, by way of the whole tensor ("Involuntary full rematerialization").
    """
    inside = nn.Module()  # computes without the hooks of ``module``
    inside.module, inside.forward = module, module.forward

    def forward(*args: torch.Tensor, **kwargs: torch.Tensor) -> torch.Tensor:
        gathered = {
            f"module.{name}": gather(name, parameter)
            for name, parameter in module.named_parameters()
            if name in names
        }
        return torch.func.functional_call(inside, gathered, args, kwargs)

    module.forward = forward
