"""``--model``: presets and model families, and how a name becomes a spec.

To add a family, add a file to this folder with ``names`` and ``open_model``, like ``hybrid_vit``,
and a line to ``FAMILIES``. Imports nothing heavy, so that ``--help`` is fast.
"""

from __future__ import annotations

import difflib
import fnmatch
import importlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

from models.config import (
    NAFLEX_FAMILY,
    PRESETS,
    ModelError,
    VitConfig,
    check_arguments,
    check_patches,
    check_taken,
)

if TYPE_CHECKING:
    from models.spec import ModelSpec

FAMILIES = {
    "hybrid_": "models.hybrid_vit",
    NAFLEX_FAMILY: "features.native_resolution.model",
    "timm/": "models.timm_models",
}
"""Module of each family, by the prefix of its model names; presets have names without prefix."""
REBUILT_BY = {"native_resolution": FAMILIES[NAFLEX_FAMILY]}
"""Arguments with which a preset or a model of timm's is built as one of another family: the module,
whose ``rebuild`` does it."""
_added: dict[str, str] = {}
"""The same of families from outside of this program."""

_FINE_TUNED = ("img_size", "in_chans", "num_classes", "weight_init")
"""Settings that fine-tuning may change without changing the preprocessing of timm's weights."""
_COUNTED = 30
"""Maximum number of models to build for a list, which takes seconds; longer lists have names
only."""
_SUGGESTED = 3


@dataclass(frozen=True)
class ListedModel:
    """One line in a list of models."""

    name: str
    parameters: int | None = None
    """Number of parameters; None if not counted."""
    refused: str | None = None
    """Why ``open_model`` refuses the model, if tried."""
    no_tensor_parallel: str | None = None
    """Why its blocks do not support tensor parallelism; None if they do, or if it was not
    opened."""


def set_added_families(families: Mapping[str, str]) -> None:
    """Add families, module by prefix, in place of those added before."""
    _added.clear()
    _added.update(families)


def open_model(name: str, overrides: Mapping[str, Any]) -> ModelSpec:
    """Return the model ``name`` with ``overrides``, by timm's names, applied to its own settings.
    Raises ModelError for an unknown name, an unsupported model, and invalid arguments."""
    for argument, module in REBUILT_BY.items():
        if overrides.get(argument) and (name in PRESETS or name.startswith("timm/")):
            rebuilt: ModelSpec = importlib.import_module(module).rebuild(name, overrides)
            return rebuilt
    if name in PRESETS:  # of timm's VisionTransformer
        check_taken(name, overrides, VitConfig)
        config = replace(PRESETS[name], **overrides)
        check_patches(config.img_size, config.patch_size)
        check_arguments(asdict(config))
        # Imported late: timm takes seconds, and a wrong size is reported before.
        family = importlib.import_module(FAMILIES["timm/"])
        fine_tuned = all(key in _FINE_TUNED or key.endswith("_rate") for key in overrides)
        trained = family.preprocessing_of(name) if fine_tuned else None
        kind = family.VisionTransformer
        preset: ModelSpec = family.TimmSpec(name, overrides, kind, asdict(config), trained)
        return preset
    for prefix, module in (FAMILIES | _added).items():
        if name.startswith(prefix):
            family = importlib.import_module(module)
            spec: ModelSpec | None = family.open_model(name.removeprefix(prefix), overrides)
            if spec is not None:
                return spec

    near = _similar(name, _names())
    hint = f"; did you mean {' or '.join(near)}?" if near else ""
    raise ModelError(f"unknown model {name}{hint} (--list_models lists all, also of --extension)")


_TIMM_WORDS = {
    **{"t": "tiny", "ti": "tiny", "s": "small", "b": "base", "l": "large", "h": "huge"},
    **{"g": "giant", "bigg": "gigantic", "reg": "reg4"},
}
"""Timm's words for those of papers and other programs."""


def _similar(name: str, known: Sequence[str]) -> list[str]:
    """Return the models that an unknown name may mean: the one that shares most words with it, as
    timm writes them, else the most similar ones."""
    words = _timm_words(name)
    plain = "_".join(words)

    def distance(model: str) -> tuple[float, ...]:
        own = model.removeprefix("timm/").split("_")
        shared = len({*own} & {*words})
        likeness = difflib.SequenceMatcher(None, plain, model).ratio()
        return -shared, len(own) - shared, "224" not in own, -likeness

    nearest = min(known, key=distance)
    if distance(nearest)[0] <= -2:
        return [nearest]
    return difflib.get_close_matches(plain, known, _SUGGESTED, 0.5)


def _timm_words(name: str) -> list[str]:
    """Return the words of a model's name as in timm's names: vit, large and patch14 of "ViT-L/14",
    "vit_l_14" and "dinov2_vitl14", which has dinov2, too."""
    text = re.sub(r".*[/:](?=.*[A-Za-z])", "", name).partition(".")[0]  # without an owner and a tag
    text = re.sub(r"(?<![A-Za-z])G(?![A-Za-z])", "bigG", text)  # ViT-g is smaller than ViT-G
    words: list[str] = []
    for word in re.findall("[a-z0-9]+", text.lower()):
        joined = re.fullmatch(r"(vit)(so400m|\d+b|ti|[tsblhg])(\d*)(plus)?", word)
        words += filter(None, joined.groups()) if joined else [word]
    words = [_TIMM_WORDS.get(word, word) for word in words]
    return [f"patch{word}" if re.fullmatch(r"\d{1,2}", word) else word for word in words]


def list_models(pattern: str | None = None) -> list[ListedModel]:
    """List the models whose names match ``pattern``, ignoring case: a substring, or the whole name
    with * and ?. A short list includes parameter counts, or why a model cannot be opened."""
    pattern = (pattern or "*").lower()
    if not any(sign in pattern for sign in "*?["):
        pattern = f"*{pattern}*"
    names = [name for name in _names() if fnmatch.fnmatch(name.lower(), pattern)]
    if len(names) > _COUNTED:
        return [ListedModel(name) for name in names]
    from models.blocks import why_no_tensor_parallel  # with PyTorch, as the models

    listed = []
    for name in names:
        try:
            spec = open_model(name, {})
        except ModelError as error:
            listed.append(ListedModel(name, refused=str(error)))
            continue
        no_tensor_parallel = why_no_tensor_parallel(spec.block)
        listed.append(ListedModel(name, spec.parameter_count, None, no_tensor_parallel))
    return listed


def _names() -> list[str]:
    names = [*PRESETS]
    for prefix, module in (FAMILIES | _added).items():
        names += [prefix + name for name in importlib.import_module(module).names()]
    return names
