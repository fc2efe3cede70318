"""Adapt trained weights to a model: find the source of each tensor, resample positions and patches,
keep or drop the head, and fill the model module by module.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import torch
from timm.layers import resample_abs_pos_embed, resample_patch_embed
from timm.models import adapt_input_conv
from torch import nn

from models.config import ModelError
from models.initialize import allocate_own, on_meta
from models.spec import ModelSpec
from training.checkpoints.format import EMA
from training.errors import UsageError
from training.feature_table import added_parameters
from training.resolve import model_of
from training.weights import timm_formats
from training.weights.describe import describe
from training.weights.find import find
from training.weights.formats import format_of
from training.weights.names import NAMED, listed
from training.weights.source import Source, check_files

_PATCHES = "patch_embed.proj.weight"
_HEAD = "head."
_MAY_BE_NEW = (
    *(*ModelSpec.head_prefixes, "cls_token", "reg_token", "attn_pool.", "fc_norm."),
    *("embeds.cls_token", "embeds.reg_token"),
)
"""Prefixes of tensors that only the model may have, besides those that features add; they are
initialized as new."""
_MAY_BE_DROPPED = (*_MAY_BE_NEW, "norm.")
"""Prefixes of tensors that only the weights may have, besides those that features add."""
_NORMS = ("norm.", "fc_norm.")
"""The last norm, before or after pooling. A model has one, and may get the other's weights."""
_MODEL_FLAGS = "use the --model and model flags that it was trained with"
"""Advice for tensors that do not fit."""


@dataclass(frozen=True)
class _Layout:
    """Which tokens a position embedding has entries for."""

    prefix: int
    """The number of class and register tokens, which come first."""
    grid: tuple[int, ...]

    def __str__(self) -> str:
        return " x ".join(map(str, self.grid))


def adapt(
    source: Source,
    spec: ModelSpec,
    *,
    unchanged: bool = False,
    classes: list[str] | None = None,
    seed: int = 0,
    without: tuple[str, ...] = (),
) -> Adapter:
    """Return how weights are adapted to a model.

    ``unchanged``: all tensors are used as they are. Otherwise positions and patches are resampled,
    and the head is used if its classes are ``classes``, those of the data by label, as far as both
    are known; tensors that the weights lack are initialized from ``seed``. So are those whose names
    start with ``without``, of which the weights are not used. Raises UsageError naming tensors that
    do not fit.
    """
    there, conversion = _layouts_for(source, spec)
    shapes = {name: tensor.shape for name, tensor in there.items()}
    here = {name: tensor.shape for name, tensor in spec.meta.state_dict().items()}
    for each in (shapes, here):
        for name in [name for name in each if name.startswith(without)]:
            del each[name]
    naming = source.naming
    if conversion is not None:
        naming = _how(source, conversion, spec)
    note = "; ".join(filter(None, [naming, source.note]))
    hints = describe(source)
    layouts: dict[str, _Layout] = {}
    if unchanged:
        _check_equal(source, shapes, here)
        sources = {name: name for name in here}
    else:
        keeps_head = _has_head_for(hints.classes_among(classes), classes, shapes, here)
        sources = _sources(spec, shapes, here, keeps_head=keeps_head)
        layouts, changes = _changes(source, spec, shapes, here, sources)
        note = f"initial weights of {source.title}: " + "; ".join(filter(None, [changes, note]))
    adapter = Adapter(
        source.path,
        source.title,
        use_ema=source.kind == EMA,
        loads_sharded=unchanged and conversion is None and source.loads_sharded,
        conversion=conversion,
        spec=spec,
        seed=seed,
        sources=sources,
        layouts=layouts,
        antialiases_positions=hints.antialiases_positions,
        note=note,
    )
    vars(adapter)["source"] = source  # other processes find it themselves
    return adapter


@dataclass(frozen=True)
class PartWeights:
    """Weights of a part of a model, from elsewhere than those of the rest."""

    source: Source
    prefixes: tuple[str, ...]
    """Of the names of the part's parameters."""
    where_fitting: tuple[str, ...] = ()
    """Of the names of more parameters, which are used only if all of their shapes fit."""


def with_parts(
    adapter: Adapter | None, spec: ModelSpec, parts: Sequence[PartWeights], *, seed: int = 0
) -> Adapter | None:
    """Return an adapter that also fills these parts; all else is that of ``adapter`` or, without
    one, initialized from ``seed``. Raises UsageError naming tensors that do not fit."""
    for part in parts:
        more = _adapt_part(part, spec, seed)
        if adapter is None:
            adapter = more
            continue
        whole, adapter = adapter, replace(adapter, others=(*adapter.others, more))
        vars(adapter)["source"] = whole.source
    return adapter


def _adapt_part(part: PartWeights, spec: ModelSpec, seed: int) -> Adapter:
    source = part.source
    there, conversion = _layouts_for(source, spec)
    here = {name: tensor.shape for name, tensor in spec.meta.state_dict().items()}
    names = [name for name in here if name.startswith(part.prefixes)]
    for name in names:
        if name not in there:
            advice = "use weights that have this part"
            raise UsageError(f"{source.title} has no {name}, which the model has: {advice}")
        was, now = tuple(there[name].shape), tuple(here[name])
        if was != now:
            raise UsageError(
                f"{name} has shape {was} in {source.title}, {now} in the model: {_MODEL_FLAGS}"
            )
    more = [name for name in here if name.startswith(part.where_fitting)]
    if part.where_fitting and all(n in there and there[n].shape == here[n] for n in more):
        names, more = names + more, []
    note = f"weights of {source.title}: {len(names)} tensors unchanged"
    if part.where_fitting and more:
        note += f"; new: {listed(more, 2 * NAMED)}"
    naming = source.naming if conversion is None else _how(source, conversion, spec)
    adapter = Adapter(
        source.path,
        source.title,
        use_ema=source.kind == EMA,
        loads_sharded=False,
        conversion=conversion,
        spec=spec,
        seed=seed,
        sources={name: name for name in names},
        layouts={},
        antialiases_positions=False,
        note="; ".join(filter(None, [note, naming, source.note])),
    )
    vars(adapter)["source"] = source
    return adapter


# -- Names -----------------------------------------------------------------------------------------

Shapes = Mapping[str, torch.Size]
"""Of tensors by their names."""


def _layouts_for(source: Source, spec: ModelSpec) -> tuple[dict[str, torch.Tensor], Conversion]:
    """Return the tensors of weights on meta, by the names that fit the model best, and how timm
    converts them to these, if it does. Raises UsageError for a damaged folder."""
    found, conversion = source.layouts, None
    wanted = {name: tensor.dim() for name, tensor in spec.meta.state_dict().items()}

    def fitting(layouts: Mapping[str, torch.Tensor]) -> tuple[int, int]:
        """Return the number of tensors that the model has, and the negative number of others."""
        moved = {*spec.converted.values()}
        known = sum(
            name in moved or wanted.get(name) == each.dim() for name, each in layouts.items()
        )
        return known, known - len(layouts)

    if source.run or fitting(found) == (len(wanted), 0):
        return found, None
    ways: tuple[Conversion, ...] = ("named", "stored", "added")
    for way in ways:
        with contextlib.suppress(timm_formats.Unconverted):
            other = _converted(_seen(source, way).layouts, way, spec)
            if fitting(other) > fitting(found):
                found, conversion = other, way
    if conversion in ("stored", "added"):
        source.check_whole()
    return found, conversion


Conversion = Literal["named", "stored", "added"] | None
"""What is converted: by timm, the tensors by the names that they have here without a model, or by
those in the file; or the latter by a format that a feature adds."""


def _seen(source: Source, conversion: Conversion) -> Source:
    return source if conversion == "named" else source.as_stored


def _converted(
    tensors: Mapping[str, torch.Tensor], conversion: Conversion, spec: ModelSpec
) -> dict[str, torch.Tensor]:
    """Return tensors by the model's names. Raises Unconverted."""
    if conversion != "added":
        return timm_formats.convert(tensors, spec)
    added = format_of(tensors)
    if added is None:
        raise timm_formats.Unconverted("no feature knows the names")
    return added.convert(tensors)


def _how(source: Source, conversion: Conversion, spec: ModelSpec) -> str:
    """Return how the weights are converted, for the log."""
    seen = _seen(source, conversion)
    added = format_of(seen.layouts) if conversion == "added" else None
    by = f"names of {added.name} replaced" if added else timm_formats.how(seen, spec)
    if source.tensors is None:
        by += "; read whole by each process: convert them once with tools.convert to a file"
    return by


def _advice(there: Shapes, here: Shapes, otherwise: str, *, in_files: bool) -> str:
    """Return advice for names that are not the model's; ``otherwise`` if most of them are."""
    others = [name for name in there if name not in here]
    if 2 * (len(there) - len(others)) >= min(len(here), len(there)):
        return otherwise
    advice = (
        "load the file with timm.create_model(NAME, checkpoint_path=FILE), and save the "
        "model's state_dict()"
    )
    if not in_files:
        advice = "save its weights under the names of timm.create_model(NAME).state_dict()"
    return f"its parameter names are not timm's (such as {others[0]}): {advice}"


def _has_head_for(
    trained: list[str] | None, classes: list[str] | None, there: Shapes, here: Shapes
) -> bool:
    """Whether the head of weights, ``trained`` on some classes, predicts those of the data, as far
    as is known."""
    if None not in (trained, classes) and trained != classes:
        return False
    heads = [{n: s for n, s in each.items() if n.startswith(_HEAD)} for each in (here, there)]
    return heads[0] == heads[1]


def _sources(spec: ModelSpec, there: Shapes, here: Shapes, *, keeps_head: bool) -> dict[str, str]:
    """Return the source of each tensor of the model: the same name or, for the last norm, the other
    one."""
    sources = {name: name for name in here if name in there}
    for name, other in spec.converted.items():
        if name not in there and other in there:
            sources[name] = other
    for norm, other in (_NORMS, _NORMS[::-1]):
        for name in here:
            if name.startswith(norm) and name not in there:
                source = other + name.removeprefix(norm)
                if source in there and source not in sources:
                    sources[name] = source
    return {name: at for name, at in sources.items() if keeps_head or not name.startswith(_HEAD)}


# -- Shapes ----------------------------------------------------------------------------------------


def _check_equal(source: Source, there: Shapes, here: Shapes) -> None:
    """Raise UsageError naming the first tensor that does not match the model."""
    path, found = source.path, dict(there)
    remedy = "use the model flags that it was trained with"
    advice = _advice(there, here, remedy, in_files=source.tensors is not None)
    for name, shape in here.items():
        if name not in found:
            raise UsageError(f"{path} has no {name}, which the model has: {advice}")
        was, now = tuple(found.pop(name)), tuple(shape)
        if was != now:
            raise UsageError(f"{name} has shape {was} in {path}, {now} in the model: {remedy}")
    for name in found:
        raise UsageError(f"{path} has {name}, which the model does not have: {advice}")


def _changes(
    source: Source, spec: ModelSpec, there: Shapes, here: Shapes, sources: Mapping[str, str]
) -> tuple[dict[str, _Layout], str]:
    """Return the old layouts of position embeddings that change, and what is used, resampled,
    dropped and new, in one line. Raises UsageError naming tensors that do not fit: only positions
    and the patch embedding may change their shapes."""
    missing, dropped = here.keys() - sources.keys(), there.keys() - set(sources.values())
    advice = _advice(there, here, _MODEL_FLAGS, in_files=source.tensors is not None)
    for differing, allowed, has, which in (
        (missing, _MAY_BE_NEW, "has no", "which the model has"),
        (dropped, _MAY_BE_DROPPED, "has", "which the model does not have"),
    ):
        allowed = (*allowed, *added_parameters())
        if wrong := [name for name in differing if not name.startswith(allowed)]:
            raise UsageError(f"{source.path} {has} {listed(wrong)}, {which}: {advice}")

    layouts: dict[str, _Layout] = {}
    resampled = []

    def read(name: str) -> torch.Tensor | None:
        return torch.empty(there[name], device="meta") if name in there else None

    for name, at in sources.items():
        before, now = tuple(there[at]), tuple(here[name])
        if name in spec.converted and (name != at or before != now):
            try:
                spec.convert(name, torch.empty(before, device="meta"), read)
            except ModelError as error:
                raise UsageError(f"{source.path}: {error}: {_MODEL_FLAGS}") from None
            continue
        if name in spec.token_parameters:
            layout = _layout(source, there, name, spec)
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
                f"{at} has shape {before} in {source.path}, {now} in the model: {_MODEL_FLAGS}"
            )
    moved = [f"{name} from {at}" for name, at in sources.items() if name != at]
    text = f"{len(sources) - len(resampled) - len(moved)} tensors unchanged"
    for what, names in (
        ("resampled", resampled),
        ("moved", moved),
        ("dropped", dropped),
        ("new", missing),
    ):
        if names:
            text += f"; {what}: {listed(names, 2 * NAMED)}"
    return layouts, text


def _layout(source: Source, there: Shapes, name: str, spec: ModelSpec) -> _Layout:
    """Return which tokens a position embedding is for: as the checkpoint says, else a grid of equal
    sides.

    Raises UsageError if none is found.
    """
    if source.run:
        before = model_of(source.run.config)
        return _Layout(before.token_parameters[name], before.sizes.grid)
    here, tokens = _Layout(spec.token_parameters[name], spec.sizes.grid), there[name][1]
    if tokens == here.prefix + math.prod(here.grid):
        return here
    special = sum(there[key][1] for key in ("cls_token", "reg_token") if key in there)
    for prefix in sorted({0, special}, key=lambda each: each != here.prefix):
        side = round(max(tokens - prefix, 0) ** (1 / len(here.grid)))
        if side and side ** len(here.grid) == tokens - prefix:
            return _Layout(prefix, (side,) * len(here.grid))
    shape = "square" if len(here.grid) == 2 else "cubic"
    raise UsageError(
        f"{name} of {source.path} has {tokens} tokens, which do not form a {shape} grid of "
        "patches: use --init_from with a checkpoint, which records its grid"
    )


def _resample(
    positions: torch.Tensor, new: tuple[int, ...], old: tuple[int, ...], *, antialias: bool
) -> torch.Tensor:
    """Return positions, (1, patches, width), of another grid, as timm does for images; of a volume
    along the slices first, which is the same filter, as it has no terms across dimensions."""
    if len(old) == 3:
        slices, area = new[0], math.prod(old[1:])
        positions = resample_abs_pos_embed(
            positions, [slices, area], [old[0], area], num_prefix_tokens=0, antialias=antialias
        )
        # Each slice's positions are some of the width of an image.
        positions = positions.unflatten(1, (slices, area)).transpose(1, 2).flatten(2)
        positions = _resample(positions, new[1:], old[1:], antialias=antialias)
        return positions.unflatten(2, (slices, -1)).transpose(1, 2).flatten(1, 2)
    return resample_abs_pos_embed(
        positions, list(new), list(old), num_prefix_tokens=0, antialias=antialias
    )


# -- Values ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Adapter:
    """How trained weights are adapted to a model. Contains none of them, so it can be sent to other
    processes."""

    path: Path
    title: str
    """What messages call the weights."""
    use_ema: bool
    """Whether they are the EMA of the weights."""
    loads_sharded: bool
    """Whether each process can load only its shards of unchanged weights, by ``load_state``."""
    conversion: Conversion
    spec: ModelSpec
    seed: int
    sources: Mapping[str, str]
    """The source of each tensor that is used: its name among the weights, by its name in the
    model."""
    note: str
    """One line for the log, "" if there is nothing to say: what is used, resampled, dropped and
    new."""
    layouts: Mapping[str, _Layout]
    """The old layouts of position embeddings that are resampled, by name."""
    antialiases_positions: bool
    """Whether position embeddings are resampled with antialiasing, as in timm."""
    others: tuple[Adapter, ...] = ()
    """Those of parts of the model, which fill these afterwards."""

    @property
    def notes(self) -> list[str]:
        """Lines for the log: ``note``, and those of ``others``."""
        return [each.note for each in (self, *self.others)]

    @property
    def keeps_head(self) -> bool:
        """Whether the head of the weights is used, as its classes are those of the data."""
        return any(name.startswith(_HEAD) for name in self.sources)

    @functools.cached_property
    def source(self) -> Source:
        """The weights as they were found; each process maps them itself."""
        return find(self.path, "--init_from", use_ema=self.use_ema)

    @functools.cached_property
    def _by_names(self) -> Source:
        """The weights by the names in ``sources``."""
        if self.conversion is None:
            return self.source
        seen = _seen(self.source, self.conversion)
        # Whole in memory where they are not mapped from files.
        tensors = _converted(seen.read([*seen.layouts]), self.conversion, self.spec)
        return Source(seen.path, tensors=tensors, name=seen.name)

    def check_files(self, *, verify: bool) -> None:
        """Check the files of the weights (``training.weights.source.check_files``)."""
        for each in (self, *self.others):
            check_files(each.source, verify=verify)

    def __getstate__(self) -> dict:
        found = ("source", "_by_names")
        return {name: value for name, value in vars(self).items() if name not in found}

    def _read_one(self, name: str) -> torch.Tensor | None:
        known = name in self._by_names.layouts
        return self._by_names.read([name])[name] if known else None

    @torch.no_grad()
    def initialize(self, module: nn.Module, name: str) -> None:
        """Allocate on the CPU and fill everything that is on meta below ``module``.

        Tensors that the weights do not have are initialized as in a new model. An
        ``InitializeModule``: only the weights of one unit are in memory at a time.
        """
        used: list[str] = []
        for full_name, part in list(on_meta(module, name)):
            own = [key for key, _ in part.named_parameters(prefix=full_name, recurse=False)]
            known = [key for key in own if key in self.sources]
            if known == own:
                allocate_own(part)  # no random values that are overwritten
            used += known
        self.spec.initialize(module, name, seed=self.seed)
        self._fill(module, name, used)
        for other in self.others:
            keys = [key for key, _ in module.named_parameters(prefix=name) if key in other.sources]
            other._fill(module, name, keys)

    def _fill(self, module: nn.Module, name: str, used: Sequence[str]) -> None:
        """Copy the weights to these parameters below ``module``."""
        values = self._by_names.read([self.sources[key] for key in used])
        here = dict(module.named_parameters(prefix=name))
        for key in used:
            found, shape = values.pop(self.sources[key]), here[key].shape
            if key in self.spec.converted and (key != self.sources[key] or found.shape != shape):
                found = self.spec.convert(key, found, self._read_one)
            elif key in self.layouts:  # a position embedding, (1, tokens, width)
                there = self.layouts[key]
                prefix, grid = self.spec.token_parameters[key], self.spec.sizes.grid
                first, patches = found.float().tensor_split([there.prefix], dim=1)
                if there.grid != grid:
                    patches = _resample(
                        patches, grid, there.grid, antialias=self.antialiases_positions
                    )
                if there.prefix != prefix:  # zeros have the effect of no embedding
                    first = first.new_zeros(1, prefix, first.shape[-1])
                found = torch.cat([first, patches], dim=1)
            else:
                if found.shape[2:] != shape[2:]:
                    found = resample_patch_embed(found.float(), list(shape[2:]))
                if key == _PATCHES and found.shape[1] != shape[1]:
                    found = adapt_input_conv(shape[1], found.float(), base_chans=found.shape[1])
            here[key].copy_(found)
