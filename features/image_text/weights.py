"""What files next to weights say of a text tower, as values of flags; its weights alone."""

from __future__ import annotations

import argparse
from typing import Any

from features.image_text.config import TEXT_MODELS, ImageTextConfig, TextTower
from features.image_text.formats import TwoTowers, same_value
from features.image_text.model import TEXT_PROJECTION, TEXT_TOWER
from training.config import RunConfig
from training.errors import UsageError
from training.flags import by_field, with_values
from training.resolve import with_defaults
from training.weights.adapt import PartWeights
from training.weights.config_json import Setting, parsed_value
from training.weights.describe import describe
from training.weights.find import find
from training.weights.sidecar import Sidecar
from training.weights.source import Source

_FLAG = "--init_text_from"


def with_text_tower(config: RunConfig, weights: Source, *, alone: bool = False) -> RunConfig:
    """Return the configuration with the text tower that is known of weights, and the width of
    embeddings unless it is used ``alone``. Raises UsageError for flags that say otherwise, and for
    weights that ``--objective`` cannot use."""
    values = {}
    for setting in _text_tower_of(weights):
        if not (alone and setting.argument == "projection_dim"):
            values[setting.argument] = value = _parsed(setting)
            if contradicting := _contradicting(config, setting.argument, value):
                raise setting.about.refusal(setting.key, setting.value, f": drop {contradicting}")
    if not alone:
        _check_shared(config, weights)
    return with_defaults(config, values)


def _text_tower_of(weights: Source) -> list[Setting]:
    """Return the flags' values that a run or files next to weights say; [] if none does."""
    if weights.run:
        about, flags = Sidecar(weights.path, {}), weights.run.config.of(ImageTextConfig)
        if None in flags.text:
            return []
        names = [*(f"text_{name}" for name in TextTower._fields), "projection_dim"]
        known = by_field(ImageTextConfig)
        found = {name: getattr(flags, name) for name in names}
        return [
            Setting(about, known[name].names[0], value, name)
            for name, value in found.items()
            if value is not None
        ]
    hints = describe(weights)
    if not isinstance(hints.format, TwoTowers):
        return []
    return [*hints.format.text_tower(hints.config)]


def _parsed(setting: Setting) -> Any:
    """Return a value as its flag parses it. Raises UsageError for one that it does not accept."""
    option = by_field(ImageTextConfig)[setting.argument]
    if option.choices and setting.value not in option.choices:
        known = ", ".join(map(str, option.choices))
        why = f", which {option.names[0]} does not have ({known})"
        raise setting.about.refusal(setting.key, setting.value, why)
    try:
        return parsed_value(option, setting.value)
    except argparse.ArgumentTypeError as error:
        why = f", which {option.names[0]} does not accept ({error})"
        raise setting.about.refusal(setting.key, setting.value, why) from None


def _contradicting(config: RunConfig, name: str, value: Any) -> str:
    """Return the flag that was set to another value of a field, as it is typed; "" if none was."""
    flags, option = config.of(ImageTextConfig), by_field(ImageTextConfig)[name]
    given = config.explicitly_set
    if name in given:
        typed = getattr(flags, name)
        return "" if same_value(typed, value) else option.typed(typed)
    model = flags.text_model if "text_model" in given else None
    if model and not same_value(TEXT_MODELS[model].get(name), value):
        return f"--text_model {model}"
    return ""


def _check_shared(config: RunConfig, weights: Source) -> None:
    """Raise UsageError if both towers' outputs would be projected or compared otherwise than in the
    weights."""
    there = weights.layouts
    if not weights.run and (found := describe(weights).format):
        there = found.convert(weights.as_stored.layouts)
    if "text_embed.weight" not in there or "patch_embed.proj.weight" not in there:
        return
    name, title = config.objective.objective, weights.title
    projection = there.get("image_projection.weight")
    if name == "clip" and (projection is None or "text_projection.bias" in there):
        raise UsageError(
            f"{title} has SigLIP's projection, of texts alone and with a bias: use --objective "
            "siglip"
        )
    if name == "siglip" and projection is not None and len({*projection.shape}) == 1:
        raise UsageError(
            f"{title} projects images to embeddings of their own width, which --objective siglip "
            "does not: use --objective clip"
        )
    for parameter in ("logit_scale", "logit_bias"):
        if parameter in there and f"{parameter}_init" in config.explicitly_set:
            raise UsageError(f"{title} has a learned {parameter}: drop --{parameter}_init")


def with_described_text_tower(config: RunConfig) -> RunConfig:
    """Return the configuration with the text tower of ``--init_text_from``, by its name with a
    commit, unless all of it is known, as of a run that is resumed. Raises UsageError like
    ``with_text_tower``."""
    flags = config.of(ImageTextConfig)
    assert flags.init_text_from is not None
    if None not in flags.text:
        return config
    found = find(flags.init_text_from, _FLAG)
    if found.run and None in found.run.config.of(ImageTextConfig).text:
        raise UsageError(f"{_FLAG} {found.title}: it was trained without texts")
    config = with_text_tower(config, found, alone=True)
    return with_values(config, {"init_text_from": found.name})


def text_tower_weights(path: str) -> PartWeights:
    """Return the weights of ``--init_text_from``. Raises UsageError if they cannot be read."""
    return PartWeights(find(path, _FLAG), TEXT_TOWER, (TEXT_PROJECTION,))
