"""Initial weights, unit by unit: they depend on the seed and on modules' names, on nothing else."""

import hashlib
import math
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from timm.layers import trunc_normal_
from timm.models.eva import Eva
from timm.models.naflexvit import NaFlexVit
from timm.models.vision_transformer import VisionTransformer
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from models.timm_private import (
    SELF_INITIALIZED,
    RotaryEmbeddingMixed,
    computed_buffers,
    get_init_weights_vit,
    init_random_2d_freqs,
)

# ------------------------------------------------------------------------------------------------
# Between the meta device, where models are built, and memory.


def allocate(module: nn.Module, name: str) -> Iterator[tuple[str, nn.Module]]:
    """Allocate on the CPU what is on meta below ``module``, named ``name`` in the model; yield each
    module that was on meta with its name. The caller fills its own parameters; buffers have their
    values."""
    for full_name, part in on_meta(module, name):
        allocate_own(part)
        yield full_name, part


def allocate_uninitialized(module: nn.Module, name: str) -> None:
    """Allocate, as ``allocate``, parameters whose values come later, from a checkpoint: zeros until
    then, because all hosts must give the devices the same."""
    for _, part in allocate(module, name):
        for parameter in part.parameters(recurse=False):
            nn.init.zeros_(parameter)


def on_meta(module: nn.Module, name: str) -> Iterator[tuple[str, nn.Module]]:
    """Yield each module below ``module`` with something of its own on meta, as ``allocate``."""
    for full_name, part in module.named_modules(prefix=name):
        tensors = [*part.parameters(recurse=False), *part.buffers(recurse=False)]
        if any(tensor.is_meta for tensor in tensors):
            yield full_name, part


def allocate_own(part: nn.Module) -> None:
    """Do the same as ``allocate`` for one module, without the modules below it."""
    part.to_empty(device="cpu", recurse=False)
    fill_buffers(part, recurse=False)


def fill_buffers(
    module: nn.Module,
    send: Callable[[torch.Tensor], torch.Tensor] = lambda values: values,
    *,
    recurse: bool = True,
) -> None:
    """Compute the buffers of ``module``, and of those below it, on the CPU, whatever they hold.
    ``send`` moves one to where it is used."""
    for part in module.modules() if recurse else [module]:
        if next(part.buffers(recurse=False), None) is not None:
            for key, values in computed_buffers(part).items():
                part._buffers[key] = send(values)


def cast_buffers(block: nn.Module, dtype: torch.dtype) -> None:
    """Cast the floating-point buffers of a block (Eva's key bias) to the dtype that it computes
    in. Not for the model around the blocks: its tables of angles must stay in fp32."""
    for part in block.modules():
        for key, buffer in part.named_buffers(recurse=False):
            if buffer.is_floating_point():
                part._buffers[key] = buffer.to(dtype)


# ------------------------------------------------------------------------------------------------
# Initial values.


Scheme = Callable[[nn.Module, str], None]
"""A function (module, its name in the model) that fills the module's own parameters; it may change
what the modules below it were given before."""

_STD = 0.02
_ENDS_OF_BRANCHES = re.compile(r"blocks\.(\d+)\.(attn\.proj|mlp\.fc2)")


def initialize(module: nn.Module, name: str, *, seed: int, scheme: Scheme) -> None:
    """Allocate on the CPU, and fill by ``scheme``, every parameter on meta below ``module``, named
    ``name`` in the model. Each module draws from a generator seeded by ``seed`` and its name."""
    fresh = {full_name for full_name, _ in allocate(module, name)}
    # PyTorch draws on one core: modules with nothing to fill below them are filled side by side.
    lowest: list[tuple[nn.Module, str]] = []
    others: list[tuple[nn.Module, str]] = []

    def find(part: nn.Module, name: str) -> bool:
        """Find what is to be filled, each after what is below it; True if there is anything."""
        children = part.named_children()
        below = [find(child, f"{name}.{key}" if name else key) for key, child in children]
        is_filled = name in fresh or any(below)
        if is_filled:
            (others if any(below) else lowest).append((part, name))
        return is_filled

    def fill(named_part: tuple[nn.Module, str]) -> None:
        part, name = named_part
        digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
        with _DrawFrom(int.from_bytes(digest[:8], "little") >> 1), torch.no_grad():
            scheme(part, name)

    find(module, name)
    # Entering a mode sets a flag of the whole process, and leaving it restores what was found: in
    # several threads at once that may be another thread's, and torch.compile, which reads the flag,
    # would compile nothing from then on. Inside of a mode of this thread they all find it set.
    with _DrawFrom(seed), ThreadPoolExecutor(_AT_ONCE) as threads:
        list(threads.map(fill, lowest))
    for named_part in others:
        fill(named_part)


_AT_ONCE = 4
"""The modules that are filled side by side: as many as a block has large matrices."""


class _DrawFrom(TorchDispatchMode):
    """Random numbers of this thread come from a generator of its own."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self._generator = torch.Generator().manual_seed(seed)

    def __torch_dispatch__(
        self,
        func: Any,
        types: Collection[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = dict(kwargs or {})
        if torch.Tag.nondeterministic_seeded in func.tags:
            if "generator" not in {argument.name for argument in func._schema.arguments}:
                func = func.overloadpacket.generator
            kwargs["generator"] = self._generator
        return func(*args, **kwargs)


def vision_transformer_scheme(
    *, weight_init: str, num_classes: int, fix_init: bool = False
) -> Scheme:
    """Return timm's scheme for VisionTransformer. ``weight_init`` is its argument: '' (truncated
    normal, std 0.02), 'jax', 'jax_nlhb', 'moco' or 'reset'; ``fix_init`` divides the end of each
    branch by the square root of twice its block's number."""
    head_bias = -math.log(num_classes) if "nlhb" in weight_init else 0.0
    fill = get_init_weights_vit(weight_init, head_bias, needs_reset=True)

    def scheme(part: nn.Module, name: str) -> None:
        if isinstance(part, VisionTransformer):
            if part.pos_embed is not None:
                trunc_normal_(part.pos_embed, std=_STD)
            for token in (part.cls_token, part.reg_token):
                if token is not None:
                    nn.init.normal_(token, std=1e-6)
        elif isinstance(part, SELF_INITIALIZED):
            part.init_weights()
        elif not isinstance(part, NaFlexVit):  # whose parts have all that is to be filled
            fill(part, name)
            if fix_init:
                _scale_by_depth(part, name)

    return scheme


def eva_scheme(*, head_init_scale: float) -> Scheme:
    """Return timm's scheme for Eva: truncated normal, std 0.02, the end of each branch divided by
    the square root of twice its block's number, the head multiplied by ``head_init_scale``."""

    def scheme(part: nn.Module, name: str) -> None:
        if isinstance(part, Eva):
            for embedding in (part.pos_embed, part.cls_token, part.reg_token):
                if embedding is not None:
                    trunc_normal_(embedding, std=_STD)
        elif isinstance(part, SELF_INITIALIZED):
            part.init_weights()
        elif isinstance(part, nn.Linear):
            trunc_normal_(part.weight, std=_STD)
            if part.bias is not None:
                nn.init.zeros_(part.bias)
            _scale_by_depth(part, name)
            if name == "head" and head_init_scale:  # 0 means unchanged
                part.weight.mul_(head_init_scale)
        elif isinstance(part, RotaryEmbeddingMixed):
            heads, depth = part.num_heads, part.depth  # timm draws them in the constructor alone
            width = part.dim // heads
            part.freqs.copy_(
                init_random_2d_freqs(width, depth, heads, temperature=part.temperature)
            )
        elif hasattr(part, "reset_parameters"):
            part.reset_parameters()  # type: ignore[operator]

    return scheme


def _scale_by_depth(part: nn.Module, name: str) -> None:
    match = _ENDS_OF_BRANCHES.fullmatch(name)
    if match and isinstance(part, nn.Linear):
        part.weight.div_(math.sqrt(2.0 * (int(match[1]) + 1)))
