"""How trained weights (``--init_from``) become the first weights of another model."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from timm.layers import resample_abs_pos_embed, resample_patch_embed
from timm.models import adapt_input_conv
from torch import nn

from models.initialize import allocate_own, on_meta
from models.spec import ModelSpec
from training.checkpoints.format import EMA
from training.errors import UsageError
from training.resolve import Run, model_of
from training.weights import Weights, weights_in

_PATCHES = "patch_embed.proj.weight"
_HEAD = "head."
_OF_OBJECTIVES = ("mask_token", "decoder_", "dino_head.", "ibot_head.")
_MAY_BE_NEW = (_HEAD, "cls_token", "reg_token", "attn_pool.", "fc_norm.", *_OF_OBJECTIVES)
"""Prefixes of tensors that only the model may have: they start as new ones do."""
_MAY_BE_DROPPED = (*_MAY_BE_NEW, "norm.")
"""Prefixes of tensors that only the weights may have."""
_NORMS = ("norm.", "fc_norm.")
"""The last norm, before and after pooling: a model has one of the two, and gets the other's."""
_NAMED = 3
_REMEDY = "give --model, and its flags, as it was trained"


@dataclass(frozen=True)
class _Layout:
    """Which tokens a position embedding has entries for."""

    prefix: int
    """How many class and register tokens come first."""
    grid: tuple[int, ...]

    def __str__(self) -> str:
        return " x ".join(map(str, self.grid))


def fit(weights: Weights, run: Run, data_classes: list[str] | None) -> InitialWeights:
    """Return how the weights become those of the run's model, for data of these classes.

    Raises UsageError naming what the model has and the weights have not, or the other way round.
    """
    spec, there = run.model, weights.shapes()
    here = {name: tensor.shape for name, tensor in spec.meta.state_dict().items()}

    # Which tensor each one of the model comes from: the same name or, of the last norm, the other.
    sources = {name: name for name in here if name in there}
    for norm, other in (_NORMS, _NORMS[::-1]):
        for name in here:
            if name.startswith(norm) and name not in there:
                source = other + name.removeprefix(norm)
                if source in there and source not in sources:
                    sources[name] = source
    # A head is used if it is for the very classes of the data, as far as is known.
    heads = [{n: s for n, s in each.items() if n.startswith(_HEAD)} for each in (here, there)]
    classes = weights.run.classes if weights.run else None
    if heads[0] != heads[1] or not (classes is None or data_classes in (None, classes)):
        sources = {name: at for name, at in sources.items() if not name.startswith(_HEAD)}
    missing, dropped = here.keys() - sources.keys(), there.keys() - set(sources.values())
    for differing, allowed, has, which in (
        (missing, _MAY_BE_NEW, "has no", "which the model has"),
        (dropped, _MAY_BE_DROPPED, "has", "which the model has not"),
    ):
        if wrong := [name for name in differing if not name.startswith(allowed)]:
            raise UsageError(f"{weights.path} {has} {_listed(wrong, _NAMED)}, {which}: {_REMEDY}")

    # Which ones change their shape: position embeddings and the patch embedding may.
    layouts, resampled = {}, []
    for name, source in sources.items():
        before, now = tuple(there[source]), tuple(here[name])
        if name in spec.token_parameters:
            layout = _layout(weights, there, name, spec)
            wanted = _Layout(spec.token_parameters[name], spec.sizes.grid)
            if before[2:] == now[2:] and layout != wanted:
                layouts[name] = layout
                resampled.append(f"{name} ({layout} to {wanted} patches)")
                continue
        elif name == _PATCHES and len(before) == len(now) == 4 and before[0] == now[0]:
            if before != now:
                old, new = (
                    f"{channels} channels of {' x '.join(map(str, patch))}"
                    for _, channels, *patch in (before, now)
                )
                resampled.append(f"{name} ({old} to {new})")
            continue
        if before != now:
            raise UsageError(
                f"{source} is {before} in {weights.path}, {now} in the model: {_REMEDY}"
            )

    moved = [f"{name} from {at}" for name, at in sources.items() if name != at]
    note = f"initial weights of {weights.path}: "
    note += f"{len(sources) - len(resampled) - len(moved)} tensors as they are"
    for what, names in (
        ("resampled", resampled),
        ("moved", moved),
        ("dropped", dropped),
        ("new", missing),
    ):
        if names:
            note += f"; {what}: {_listed(names, 2 * _NAMED)}"
    if weights.note:
        note += f"; {weights.note}"
    use_ema = weights.kind == EMA
    return InitialWeights(weights.path, use_ema, spec, run.config.seed, sources, layouts, note)


def _listed(names: Iterable[str], most: int) -> str:
    listed = sorted(names)
    more = f" and {len(listed) - most:,} more" if len(listed) > most else ""
    return ", ".join(listed[:most]) + more


def _layout(
    weights: Weights, there: Mapping[str, torch.Size], name: str, spec: ModelSpec
) -> _Layout:
    """Return which tokens a position embedding is for: as the checkpoint says, else a square grid.

    Raises UsageError if none is found.
    """
    if weights.run:
        before = model_of(weights.run.model)
        return _Layout(before.token_parameters[name], before.sizes.grid)
    here, tokens = _Layout(spec.token_parameters[name], spec.sizes.grid), there[name][1]
    if tokens == here.prefix + math.prod(here.grid):
        return here
    special = sum(there[key][1] for key in ("cls_token", "reg_token") if key in there)
    for prefix in sorted({0, special}, key=lambda each: each != here.prefix):
        side = math.isqrt(max(tokens - prefix, 0))
        if side and side * side == tokens - prefix:
            return _Layout(prefix, (side, side))
    raise UsageError(
        f"{name} of {weights.path} has {tokens} tokens, which are no square of patches: "
        "--init_from a checkpoint, which knows its grid"
    )


@dataclass(frozen=True)
class InitialWeights:
    """How trained weights become those of another model; holds none of them, so it can be sent to
    other processes."""

    path: Path
    use_ema: bool
    """They are the moving average of the weights there."""
    spec: ModelSpec
    seed: int
    sources: Mapping[str, str]
    """By the model's name of each tensor that is used, its name among the weights."""
    layouts: Mapping[str, _Layout]
    """By name, the old layouts of position embeddings that are resampled."""
    note: str
    """What is used, resampled, dropped and new, in one line."""

    @functools.cached_property
    def weights(self) -> Weights:
        """The weights, which each process maps itself."""
        return weights_in(self.path, "--init_from", use_ema=self.use_ema)

    def __getstate__(self) -> dict:
        return {name: value for name, value in vars(self).items() if name != "weights"}

    @torch.no_grad()
    def initialize(self, module: nn.Module, name: str) -> None:
        """Allocate on the CPU, and fill, all that is on meta below ``module``.

        What the weights do not have starts as in a new model. An ``InitializeModule``: no more of
        the weights is in memory than what a unit takes.
        """
        fresh = list(on_meta(module, name))
        own = {
            f"{full_name}.{key}" if full_name else key: parameter
            for full_name, part in fresh
            for key, parameter in part.named_parameters(recurse=False)
        }
        for full_name, part in fresh:
            keys = (key for key, _ in part.named_parameters(prefix=full_name, recurse=False))
            if all(key in self.sources for key in keys):
                allocate_own(part)  # and not filled at random in vain
        self.spec.initialize(module, name, seed=self.seed)
        used = [key for key in own if key in self.sources]
        values = self.weights.read([self.sources[key] for key in used])
        here = dict(module.named_parameters(prefix=name))
        for key in used:
            found = values.pop(self.sources[key])
            here[key].copy_(self._fitted(key, found, here[key].shape))

    def _fitted(self, name: str, found: torch.Tensor, shape: torch.Size) -> torch.Tensor:
        """Return a tensor of the weights in the shape that it has in the model."""
        if name in self.layouts:  # a position embedding, (1, tokens, width)
            there = self.layouts[name]
            prefix, grid = self.spec.token_parameters[name], self.spec.sizes.grid
            first, patches = found.float().tensor_split([there.prefix], dim=1)
            if there.grid != grid:
                patches = resample_abs_pos_embed(
                    patches, list(grid), list(there.grid), num_prefix_tokens=0
                )
            if there.prefix != prefix:  # zeros are the same as to have none
                first = first.new_zeros(1, prefix, first.shape[-1])
            return torch.cat([first, patches], dim=1)
        if found.shape[2:] != shape[2:]:
            found = resample_patch_embed(found.float(), list(shape[2:]))
        if name == _PATCHES and found.shape[1] != shape[1]:
            found = adapt_input_conv(shape[1], found.float(), base_chans=found.shape[1])
        return found
