"""What files next to public weights say of them, as timm and transformers write it: the model, its
classes and its preprocessing.

A setting that changes the output is applied by the flag of the same meaning, or compared with the
model that is built, which refuses weights that were trained with another one.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import timm
from timm.layers import get_act_layer, get_norm_layer
from torch import nn

from models.config import NAFLEX_FAMILY, ModelConfig
from models.spec import ModelSpec, is_of_training
from models.timm_models import EVA_NAMES
from training.config import RunConfig
from training.errors import UsageError
from training.flags import FlagField, by_field
from training.resolve import model_of
from training.weights.processor import processing_of
from training.weights.sidecar import Sidecar

# -- Classes ---------------------------------------------------------------------------------------

_MOST_CLASSES = 10**7


def class_names(about: Sidecar) -> list[str] | None:
    """Return the names of the classes by label; None if the file has none. Raises UsageError for
    names that are not text, or not of all labels."""
    key, names = _class_names(about)
    if names is None:
        return None
    if isinstance(names, Mapping):
        names = [names.get(str(label)) for label in range(len(names))]
    if not isinstance(names, list):
        raise about.refusal(key, names, ", which is not a list of class names")
    for label, name in enumerate(names):
        if not isinstance(name, str):
            raise about.refusal(key, name, f" for class {label}, which is not a name")
    return names


def _class_names(about: Sidecar) -> tuple[str, Any]:
    if "ForImageClassification" in str(about.content.get("architectures")):
        return "id2label", about.mapping("id2label") or None
    for key, content in (
        ("label_names", about.content),
        ("pretrained_cfg.label_names", about.mapping("pretrained_cfg")),
    ):
        if content.get("label_names") is not None:
            return key, content["label_names"]
    return "label_names", None


def class_count(about: Sidecar) -> int | None:
    """Return the number of classes of the head; None if the file does not say, or if there is no
    head. Raises UsageError for anything but a number."""
    for place in ("model_args", None, "pretrained_cfg"):
        count = (about.mapping(place) if place else about.content).get("num_classes")
        if count is None:
            continue
        if type(count) is not int or not 0 <= count <= _MOST_CLASSES:
            key = f"{place}.num_classes" if place else "num_classes"
            raise about.refusal(key, count, ", which is not a number of classes")
        return count or None
    key, names = _class_names(about)
    return len(class_names(about) or []) or None if key == "id2label" and names else None


# -- The model -------------------------------------------------------------------------------------


class Setting(NamedTuple):
    """A value in a file that describes the model."""

    about: Sidecar
    key: str
    value: Any
    argument: str
    """The argument that it sets, by the name that ``ModelSpec.settings`` has, or of ``_BUILT``."""

    @property
    def field(self) -> str:
        """The field of ``ModelConfig`` with this meaning, if there is one."""
        return _FIELDS.get(self.argument, self.argument)


_FIELDS = {theirs: ours for ours, theirs in EVA_NAMES.items()}
_FIELDS |= {"scale_attn_inner_norm": "scale_attn_norm"}  # NaFlexVit's
"""Names of arguments in timm's other classes, and the flags' names."""

_NOT_DESCRIBED = ("model", "num_classes", "dimension")
_FLAGS = {
    name: option
    for name, option in by_field(ModelConfig).items()
    if name not in _NOT_DESCRIBED and not is_of_training(name)
}
"""The flags that a file may set."""
_NOT_IN_SHAPES = ("num_heads", "global_pool", "pool_include_prefix")
"""Flags whose effect does not show in the names and shapes of the weights."""
_POOLING = ("global_pool", "pool_include_prefix")
"""Flags that belong to the head, which fine-tuning may change."""

_IGNORED = frozenset(
    {
        *("num_classes", "rope_shift_coords", "rope_jitter_coords"),
        *("dynamic_img_size", "dynamic_img_pad", "strict_img_size"),
        *("scriptable", "exportable", "no_jit", "cache_dir"),
    }
)
"""Arguments in timm's files that do not change the output for images of the model's size, or that
are read elsewhere."""


class ModelType(NamedTuple):
    """A model type of transformers."""

    model: str
    """The model of the same architecture, of any size."""
    processor: str
    """The image processor for it, by its name in ``training/weights/processor.py``."""
    defaults: Mapping[str, Any]
    """transformers' values of keys that the file leaves out."""
    resizes_positions: bool
    """Whether its positions are resampled for images of another size."""


_DEFAULTS = {
    **{"image_size": 224, "num_channels": 3, "hidden_size": 768, "num_hidden_layers": 12},
    **{"num_attention_heads": 12, "qkv_bias": True, "hidden_act": "gelu"},
}
_VIT = {**_DEFAULTS, "patch_size": 16, "intermediate_size": 3072, "layer_norm_eps": 1e-12}
_DINOV2 = {**_DEFAULTS, "patch_size": 14, "mlp_ratio": 4, "layer_norm_eps": 1e-6}
KINDS = {
    "vit": ModelType("vit_base_patch16_224", "ViT", _VIT, resizes_positions=False),
    "dinov2": ModelType("timm/vit_base_patch14_dinov2", "Bit", _DINOV2, resizes_positions=True),
}
"""The model types of transformers, as of 5.24, that are known here."""
_ARGUMENTS = {
    "image_size": "img_size",
    "patch_size": "patch_size",
    "num_channels": "in_chans",
    "hidden_size": "embed_dim",
    "num_hidden_layers": "depth",
    "num_attention_heads": "num_heads",
    "head_dim": "head_dim",
    "mlp_ratio": "mlp_ratio",
    "qkv_bias": "qkv_bias",
    "hidden_act": "act_layer",
    "layer_norm_eps": "eps",
}
"""The arguments of transformers' keys."""
ACTIVATIONS = {"gelu_python": "gelu"} | dict.fromkeys(
    ("gelu_new", "gelu_fast", "gelu_pytorch_tanh", "gelu_accurate"), "gelu_tanh"
)
"""timm's names of transformers' activations, where they differ."""
_ONLY: dict[str, tuple[Any, ...]] = {
    "use_swiglu_ffn": (None, False),
    "problem_type": (None, "single_label_classification"),  # else no softmax follows
    "quantization_config": (None,),
    "auto_map": (None,),  # code of its own
}
"""Keys of transformers that change the model, with the values that leave it as it is."""


def _layer_name(find: Callable[[Any], Any], name: Any) -> Any:
    try:
        return find(name).__name__
    except (AssertionError, AttributeError, KeyError, TypeError):
        return name


def _same_layer(find: Callable[[Any], Any], default: str) -> Callable[[Any, Any], bool]:
    """Return a function that compares a layer's name with the built one; None is the default."""
    return lambda value, built: _layer_name(find, value) == _layer_name(find, built or default)


_SAME: dict[str, Callable[[Any, Any], bool]] = {
    "act_layer": _same_layer(get_act_layer, "GELU"),
    "norm_layer": _same_layer(get_norm_layer, "LayerNorm"),
    # Added to variances: below timm's, the difference is lost in rounding.
    "eps": lambda value, built: type(value) in (int, float) and 0 <= value <= built,
}
"""How values are compared with those of the built model, where not by equality."""
_BUILT: dict[str, Callable[[ModelSpec], Any]] = {
    "eps": lambda spec: next(
        (part.eps for part in spec.block.modules() if isinstance(part, nn.LayerNorm)), None
    ),
    "head_dim": lambda spec: spec.sizes.head_dim,
}
"""What the built model has, where its settings do not say."""


@dataclass(frozen=True)
class DescribedModel:
    """The model that a file describes."""

    about: Sidecar
    name: str
    settings: list[Setting]

    def flags(self) -> ModelConfig:
        """Return the flags for it, of all settings that have one. Raises UsageError for a value
        that a flag does not accept."""
        given = {}
        for setting in self.settings:
            option = _FLAGS.get(setting.field)
            if option and option.choices and setting.value not in option.choices:
                continue  # ``check`` compares it with the model's own
            if option:
                try:
                    given[setting.field] = parsed_value(option, setting.value)
                except argparse.ArgumentTypeError as error:
                    why = f", which {option.names[0]} does not accept ({error})"
                    raise setting.about.refusal(setting.key, setting.value, why) from None
        return ModelConfig(model=self.name, **given)

    def built(self, config: RunConfig) -> ModelSpec:
        """Return the model of these flags. Raises UsageError, naming the file."""
        try:
            return model_of(config)
        except UsageError as error:
            raise UsageError(f"{self.about.file}: {error}") from None

    def check_named(self, spec: ModelSpec, given: Collection[str], *, keeps_head: bool) -> None:
        """Raise UsageError for a setting that a model, which a flag names, is built without,
        although the shapes of the weights do not show it. ``given``: the fields that flags set.
        ``keeps_head``: whether the head of the weights is used."""
        passed_over = {*given, *(_FLAGS.keys() - {*_NOT_IN_SHAPES})}
        if not keeps_head:
            passed_over |= {*_POOLING}
        try:
            there = model_of(RunConfig(model=self.flags()))
        except UsageError:  # it is not supported, which need not be asked for
            self.check(spec, passed_over)
            return
        if there.sizes.embed_dim != spec.sizes.embed_dim:  # no shape fits
            return
        self.check(spec, passed_over)
        names = spec.differences(there.settings)
        if spec.settings.keys() != there.settings.keys():  # other classes of timm
            names = [name for name in names if name in (*_NOT_IN_SHAPES, *_SAME)]
        own = [
            Setting(self.about, f"{there.name}, whose {name} is", there.settings[name], name)
            for name in names
        ]
        replace(self, settings=own).check(spec, passed_over)

    def check(self, spec: ModelSpec, passed_over: Collection[str]) -> None:
        """Raise UsageError for a setting that the model is built without, except for those of the
        flags in ``passed_over``."""
        for setting in self.settings:
            name, value = setting.argument, setting.value
            if {name, setting.field} & {*passed_over, *_IGNORED} or is_of_training(name):
                continue
            option = _FLAGS.get(setting.field)
            remedy = f"set {option.names[0]}" if option else "use --model with a model that has it"
            known = [each for each in (name, setting.field) if each in spec.settings]
            if name not in _BUILT and not known:
                why = f", which {spec.name} does not have: {remedy}"
                raise setting.about.refusal(setting.key, value, why)
            built = _BUILT[name](spec) if name in _BUILT else spec.settings[known[0]]
            if not _SAME.get(name, _equal)(value, built):
                shown = "timm's default" if built is None else repr(built)
                why = f", but {spec.name} is built with {shown}: {remedy}"
                raise setting.about.refusal(setting.key, value, why)


def _equal(value: Any, built: Any) -> bool:
    """Compare JSON values; one number stands for a size of equal sides."""
    first, second = (
        each[0] if isinstance(each, list) and len({*map(str, each)}) == 1 else each
        for each in (value, built)
    )
    return first == second and isinstance(first, bool) == isinstance(second, bool)


def parsed_value(option: FlagField, value: Any) -> Any:
    """Return a JSON value as the flag parses it. Raises ArgumentTypeError."""
    if option.choices:
        return value
    if option.is_switch:
        if isinstance(value, bool):
            return value
        raise argparse.ArgumentTypeError("it is neither true nor false")
    several = value if isinstance(value, list) else [value]
    if any(type(each) not in (int, float) for each in several):
        raise argparse.ArgumentTypeError("it is not a number")
    assert option.flag.kind
    numbers = tuple(option.flag.kind(str(each)) for each in several)
    if len({*numbers}) == 1:  # a size of equal sides
        return numbers[0]
    if not numbers or not option.flag.several:
        raise argparse.ArgumentTypeError("it is not one number")
    return numbers


def described_model(about: Sidecar, processor: Sidecar, *, is_named: bool) -> DescribedModel | None:
    """Return the model that ``config.json`` describes; None if it describes none. ``processor``:
    ``preprocessor_config.json``. Raises UsageError for a model that is not known, unless a flag has
    named one (``is_named``)."""
    architecture, kind = about.content.get("architecture"), about.content.get("model_type")
    if architecture is not None:
        if not isinstance(architecture, str) or not timm.is_model(architecture):
            if is_named:
                return None
            raise about.refusal(
                "architecture", architecture, f", which timm does not have: {NAME_IT}"
            )
        return DescribedModel(about, f"timm/{architecture}", [*_of_timm(about, architecture)])
    if kind is None:
        return None
    if not isinstance(kind, str) or kind not in KINDS:
        if is_named:
            return None
        known = " and ".join(KINDS)
        raise about.refusal("model_type", kind, f", but only {known} are known: {NAME_IT}")
    for key, allowed in _ONLY.items():
        if not is_named and (value := about.content.get(key)) not in allowed:
            raise about.refusal(key, value, f", which is not supported: {NAME_IT}")
    settings = [*settings_of_transformers(about, processor, KINDS[kind])]
    return DescribedModel(about, KINDS[kind].model, settings)


NAME_IT = "name the model with --model and its flags"


def _of_timm(about: Sidecar, architecture: str) -> Iterator[Setting]:
    arguments = about.mapping("model_args")
    for name, value in arguments.items():
        if value is not None and name not in _IGNORED:  # timm leaves None out
            yield Setting(about, f"model_args.{name}", value, name)
    trained = about.mapping("pretrained_cfg") or about.content
    size = trained.get("input_size")
    if size is None or f"timm/{architecture}".startswith(NAFLEX_FAMILY):
        return
    if not isinstance(size, list) or len(size) != 3:
        raise about.refusal("input_size", size, ", which is not channels, height and width")
    for name, value in (("in_chans", size[0]), ("img_size", size[1:])):
        if arguments.get(name) is None:
            yield Setting(about, "input_size", value, name)


def settings_of_transformers(
    about: Sidecar, processor: Sidecar, kind: ModelType
) -> Iterator[Setting]:
    """Yield what transformers' configuration of a ViT says, and the image size of its
    processor."""
    content = {**kind.defaults, **{k: v for k, v in about.content.items() if v is not None}}
    if processing := processing_of(processor, kind.processor):
        made = [*processing.size]
        if kind.resizes_positions:
            content["image_size"] = made
        else:  # the model's own is the same
            yield Setting(processor, "an image size of", made, "img_size")
    for key, argument in _ARGUMENTS.items():
        value = content.get(key)
        if value is None or (key == "mlp_ratio" and "intermediate_size" in kind.defaults):
            continue
        if key == "hidden_act" and isinstance(value, str):
            value = ACTIVATIONS.get(value, value)
        yield Setting(about, key, value, argument)
    if "intermediate_size" in kind.defaults:
        yield Setting(about, "intermediate_size", mlp_ratio(about, content), "mlp_ratio")


def mlp_ratio(about: Sidecar, content: Mapping[str, Any]) -> float:
    """Return the ratio from which timm computes the width inside the MLP."""
    inner, width = content["intermediate_size"], content["hidden_size"]
    for key, value in (("intermediate_size", inner), ("hidden_size", width)):
        if type(value) is not int or value < 1:
            raise about.refusal(key, value, ", which is not a width")
    ratio = inner / width
    return ratio if int(width * ratio) == inner else math.nextafter(ratio, math.inf)
