"""The family of timm's Vision Transformers by their names: ``--model timm/NAME``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import timm
from timm.layers import PatchEmbed
from timm.models.eva import Eva
from timm.models.vision_transformer import VisionTransformer
from torch import nn

from models.arguments import check_patches
from models.blocks import parameters_differ
from models.errors import ModelError
from models.meta import check_buffers
from models.spec import ModelSpec
from models.timm_private import arguments_given_to, taken_arguments
from models.timm_spec import TimmSpec

KINDS = (VisionTransformer, Eva)
_MODULES = ("vision_transformer", "eva", "deit")
"""Files of timm that build models of these kinds, and hardly any others."""
EVA_NAMES = {
    "reg_tokens": "num_reg_tokens",
    "fc_norm": "use_fc_norm",
    "pre_norm": "use_pre_transformer_norm",
    "scale_attn_norm": "scale_attn_inner",
    "scale_mlp_norm": "scale_mlp",
}
"""Eva's names of what is an argument of VisionTransformer, too."""
_FIXED = {"dynamic_img_size": False, "dynamic_img_pad": False}
"""All images of a run have one size: for another one, XLA would compile another program."""
_CLASSES = 1000
"""Of a model that timm has as an encoder, without a head: those of ImageNet, as the presets'."""
_PREPROCESSING = ("mean", "std", "crop_pct", "interpolation", "crop_mode")


def names() -> list[str]:
    """Return timm's names of such models, without "timm/"; a few of them cannot be opened."""
    return sorted(
        name
        for module in _MODULES
        for name in timm.list_models(module=module)
        if "distilled" not in name
    )


def knows(name: str) -> bool:
    """Tell whether timm has a model ``name``, of whatever kind; after a dot it may name weights."""
    return timm.is_model(name)


def has_weights(name: str) -> bool:
    """Tell whether timm has the trained weights that a name with a tag names."""
    return timm.is_model_pretrained(name)


def open_model(name: str, overrides: Mapping[str, Any]) -> ModelSpec:
    """Return timm's model ``name`` with ``overrides`` over its own arguments.

    Raises ModelError if it is not a Vision Transformer made of blocks that are alike, does not
    take an argument, or if sizes do not fit.
    """
    full_name = f"timm/{name}"
    model, arguments = _as_timm_has_it(name)
    kind = type(model)
    taken = taken_arguments(kind)
    given = {
        EVA_NAMES.get(key, key) if kind is Eva else key: value for key, value in overrides.items()
    }
    for argument in given:
        if argument not in taken:
            raise ModelError(f"{full_name} does not take <{argument}> ({_is_a(model)})")
    _check_key_heads(full_name, arguments, given)
    if model.num_classes == 0:
        given.setdefault("num_classes", _CLASSES)
    arguments |= _FIXED | given
    if {"img_size", "patch_size"} & given.keys():  # timm has models that leave out a rest itself
        check_patches(*((taken | arguments)[key] for key in ("img_size", "patch_size")))
    trained = preprocessing_of(timm.get_pretrained_cfg(name))
    return TimmSpec(full_name, overrides, kind, arguments, trained)


def _check_key_heads(
    full_name: str, arguments: Mapping[str, Any], given: Mapping[str, Any]
) -> None:
    """Raise ModelError for sizes that timm's own number of key heads, a block each, does not fit.

    ``arguments`` are those of timm for the name. Models whose blocks differ are refused before.
    """
    if not isinstance(arguments.get("num_kv_heads"), tuple):
        return
    depth, heads = len(arguments["num_kv_heads"]), arguments["num_kv_heads"][0]
    remedy = "leave <{}> out, or choose another model"
    if given.get("depth", depth) != depth:
        raise ModelError(
            f"<depth> {given['depth']} does not go with {full_name}: timm gives each of its "
            f"{depth} blocks a number of key heads (num_kv_heads); {remedy.format('depth')}"
        )
    if given.get("num_heads", heads) % heads:
        raise ModelError(
            f"<num_heads> {given['num_heads']} does not go with {full_name}: timm gives it {heads} "
            f"key heads (num_kv_heads), which must divide it; {remedy.format('num_heads')}"
        )


def preprocessing_of(pretrained: Any) -> dict[str, Any] | None:
    """Return what one of timm's ``PretrainedCfg`` says of preprocessing; None without one."""
    if pretrained is None:
        return None
    return {key: getattr(pretrained, key) for key in _PREPROCESSING}


def _as_timm_has_it(name: str) -> tuple[nn.Module, dict[str, Any]]:
    """Return timm's model on meta, and the arguments that it was made with.

    Raises ModelError if it is not one that can be sharded block by block.
    """
    try:
        with arguments_given_to(*KINDS) as arguments:
            model = timm.create_model(name, device="meta")
    except (NotImplementedError, RuntimeError, TypeError) as error:
        raise ModelError(f"timm cannot build {name}: {error}") from None
    if type(model) not in KINDS:
        raise ModelError(f"timm/{name} is no Vision Transformer that is known here: {_is_a(model)}")
    embed = type(model.patch_embed)
    if embed is not PatchEmbed:
        raise ModelError(f"timm/{name} has a patch embedding that is not known: {embed.__name__}")
    difference = parameters_differ(list(model.blocks))
    if difference:
        raise ModelError(f"timm/{name} has blocks that differ: {difference}")
    try:
        check_buffers(model)
    except ModelError as error:
        raise ModelError(f"timm/{name}: {error}") from None
    del arguments["device"]
    return model, arguments


def _is_a(model: nn.Module) -> str:
    return f"it is timm's {type(model).__name__}"
