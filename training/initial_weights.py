"""New training that begins with trained weights (``--init_from``), fitted to its own model."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from timm.layers import resample_abs_pos_embed, resample_patch_embed
from timm.models import adapt_input_conv
from torch import nn

from data.source import DataSource
from models.config import ModelConfig
from models.initialize import allocate_own, on_meta
from models.spec import ModelSpec
from training.backend import InitializeModule
from training.checkpoints.format import SavedRun
from training.config import RunConfig
from training.errors import UsageError
from training.files import folder_at
from training.flags import from_values
from training.processes.start import check_weights
from training.resolve import Run, model_of
from training.validation import with_saved_model
from training.weights import Weights, weights_in

_PATCHES = "patch_embed.proj.weight"
_HEAD = "head."
_MAY_BE_NEW = (_HEAD, "cls_token", "reg_token", "attn_pool.", "fc_norm.")
"""What names begin with that a model may have and the weights not: they begin as new ones do."""
_MAY_BE_DROPPED = (*_MAY_BE_NEW, "norm.", "mask_token")
_NORMS = ("norm.", "fc_norm.")
"""The last norm, before and after pooling: a model has one of the two, and the other's values."""
_TOLD = 3
_REMEDY = "give --model, and its flags, as it was trained"


@dataclass(frozen=True)
class _Layout:
    """Says which tokens a position embedding has entries for."""

    prefix: int
    """How many class and register tokens come first."""
    grid: tuple[int, ...]

    def __str__(self) -> str:
        return " x ".join(map(str, self.grid))


@dataclass(frozen=True)
class InitialWeights:
    """Says how trained weights become those of another model; holds none of them."""

    path: Path
    spec: ModelSpec
    seed: int
    sources: Mapping[str, str]
    """By the model's name of each tensor that is taken, its name among the weights."""
    layouts: Mapping[str, _Layout]
    """By name, those of position embeddings that are to be resampled, as they are there."""
    note: str
    """What was taken, resampled, dropped and is new, in one line."""
    opened: list[Weights] = field(default_factory=list, compare=False, repr=False)

    def __getstate__(self) -> dict:
        return vars(self) | {"opened": []}  # each process maps the file itself

    def begin(
        self, run: Run, resume: SavedRun | None, say: Callable[[str], None]
    ) -> InitializeModule | None:
        """Say what becomes of the weights; return what fills the model with them, if anything.

        A checkpoint's files are compared with its manifest, each process its share of them:
        raises UsageError in all processes if one is not as it was written.
        """
        if resume:
            say(f"note: --init_from {self.path} is passed over: this run has begun already")
            return None
        check_weights(self._weights, verify=run.config.checkpoints.verify_checkpoint)
        say(self.note)
        return self.initialize

    @torch.no_grad()
    def initialize(self, module: nn.Module, name: str) -> None:
        """Allocate on the CPU, and fill, all that is on meta below ``module``.

        What the weights do not have begins as in a new model. An ``InitializeModule``: of the
        weights no more is in memory than what a unit takes.
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
        taken = [key for key in own if key in self.sources]
        values = self._weights.read([self.sources[key] for key in taken])
        here = dict(module.named_parameters(prefix=name))
        for key in taken:
            found = values.pop(self.sources[key])
            here[key].copy_(self._fitted(key, found, here[key].shape))

    def _fitted(self, name: str, found: torch.Tensor, shape: torch.Size) -> torch.Tensor:
        """Return a tensor of the weights in the shape that it has in the model."""
        if name in self.layouts:
            wanted = _Layout(self.spec.token_parameters[name], self.spec.sizes.grid)
            return _resampled(found.float(), self.layouts[name], wanted)
        if found.shape[2:] != shape[2:]:
            found = resample_patch_embed(found.float(), list(shape[2:]))
        if name == _PATCHES and found.shape[1] != shape[1]:
            found = adapt_input_conv(shape[1], found.float(), base_chans=found.shape[1])
        return found

    @property
    def _weights(self) -> Weights:
        if not self.opened:
            self.opened.append(weights_in(self.path, "--init_from"))
        return self.opened[0]


def _resampled(found: torch.Tensor, there: _Layout, wanted: _Layout) -> torch.Tensor:
    """Return a position embedding, (1, tokens, width), for another grid or other first tokens.

    Tokens that had none before begin with zeros, which is the same as to have none.
    """
    first, patches = found[:, : there.prefix], found[:, there.prefix :]
    if there.grid != wanted.grid:
        patches = resample_abs_pos_embed(
            patches, list(wanted.grid), list(there.grid), num_prefix_tokens=0
        )
    if there.prefix != wanted.prefix:
        first = found.new_zeros(1, wanted.prefix, found.shape[-1])
    return torch.cat([first, patches], dim=1)


# -- before any device starts -----------------------------------------------------------


def with_model_of_weights(config: RunConfig) -> RunConfig:
    """Return the configuration with the model that a checkpoint of ``--init_from`` is of.

    Flags that were given change it; a file without arguments leaves all as it is. Raises
    UsageError if there are no such weights.
    """
    assert config.checkpoints.init_from is not None
    saved = weights_in(folder_at(config.checkpoints.init_from), "--init_from").run
    if saved is None:
        return config
    return replace(config, model=with_saved_model(saved, config.model))


def find_source(config: RunConfig) -> Weights | None:
    """Return what ``--init_from`` names, unread; None if it was not given. Raises UsageError."""
    path = config.checkpoints.init_from
    return None if path is None else weights_in(folder_at(path), "--init_from")


def fit(weights: Weights, run: Run, data: DataSource) -> InitialWeights:
    """Return how the weights become those of the run's model, of ``data``'s classes.

    Raises UsageError naming what the model has and the weights have not, or the other way round.
    """
    spec, there = run.model, weights.shapes()
    wanted = {name: tensor.shape for name, tensor in spec.meta.state_dict().items()}
    sources = _same_names(wanted, there)
    if not _same_head(weights, wanted, there, data):
        sources = {name: at for name, at in sources.items() if not name.startswith(_HEAD)}
    missing = wanted.keys() - sources.keys()
    _refuse(weights.path, missing, _MAY_BE_NEW, "has no", "which the model has")
    dropped = there.keys() - set(sources.values())
    _refuse(weights.path, dropped, _MAY_BE_DROPPED, "has", "which the model has not")

    layouts, told = {}, []
    for name, source in sources.items():
        before, now = tuple(there[source]), tuple(wanted[name])
        if name in spec.token_parameters:
            layout = _layout(weights, there, name, spec)
            here = _Layout(spec.token_parameters[name], spec.sizes.grid)
            if before[2:] == now[2:] and layout != here:
                layouts[name] = layout
                told.append(f"{name} ({layout} to {here} patches)")
                continue
        elif name == _PATCHES and len(before) == len(now) == 4 and before[0] == now[0]:
            if before != now:
                told.append(f"{name} ({_shape(before)} to {_shape(now)})")
            continue
        if before != now:
            raise UsageError(
                f"{source} is {before} in {weights.path}, {now} in the model: {_REMEDY}"
            )
    note = _note(weights.path, sources, told, dropped, missing)
    if weights.note:
        note += f"; {weights.note}"
    return InitialWeights(weights.path, spec, run.config.seed, sources, layouts, note)


def _same_names(wanted: Iterable[str], there: Mapping[str, object]) -> dict[str, str]:
    sources = {name: name for name in wanted if name in there}
    for here, other in (_NORMS, _NORMS[::-1]):
        for name in wanted:
            if name.startswith(here) and name not in there:
                source = other + name.removeprefix(here)
                if source in there and source not in sources:
                    sources[name] = source
    return sources


def _same_head(
    weights: Weights,
    wanted: Mapping[str, torch.Size],
    there: Mapping[str, torch.Size],
    data: DataSource,
) -> bool:
    """Tell whether the weights' head is for the very classes of the data, as far as is known."""
    heads = [
        {name: shape for name, shape in each.items() if name.startswith(_HEAD)}
        for each in (wanted, there)
    ]
    before = weights.run.classes if weights.run else None
    return heads[0] == heads[1] and (before is None or data.classes in (None, before))


def _refuse(path: Path, names: Iterable[str], but: tuple[str, ...], has: str, which: str) -> None:
    wrong = sorted(name for name in names if not name.startswith(but))
    if wrong:
        more = f" and {len(wrong) - _TOLD:,} more" if len(wrong) > _TOLD else ""
        raise UsageError(f"{path} {has} {', '.join(wrong[:_TOLD])}{more}, {which}: {_REMEDY}")


def _layout(
    weights: Weights, there: Mapping[str, torch.Size], name: str, spec: ModelSpec
) -> _Layout:
    """Return which tokens a position embedding is for; without a checkpoint's word a square grid.

    Raises UsageError if none is found.
    """
    if weights.run:
        before = model_of(from_values(ModelConfig, weights.run.arguments))
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


def _note(
    path: Path, sources: Mapping[str, str], resampled: list[str], *others: Collection[str]
) -> str:
    moved = [f"{name} from {at}" for name, at in sources.items() if name != at]
    parts = [f"{len(sources) - len(resampled) - len(moved)} tensors as they are"]
    told = ("resampled", resampled), ("moved", moved), *zip(("dropped", "new"), others, strict=True)
    parts += [f"{what}: {_few(names)}" for what, names in told if names]
    return f"initial weights of {path}: {'; '.join(parts)}"


def _few(names: Iterable[str]) -> str:
    listed = sorted(names)
    more = f" and {len(listed) - 2 * _TOLD:,} more" if len(listed) > 2 * _TOLD else ""
    return ", ".join(listed[: 2 * _TOLD]) + more


def _shape(shape: tuple[int, ...]) -> str:
    channels, *patch = shape[1:]
    return f"{channels} channels of {' x '.join(map(str, patch))}"
