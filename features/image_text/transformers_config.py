"""``config.json`` of transformers' SigLIP, SigLIP 2 and CLIP, as of 5.24, read and written."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

from features.image_text.config import TextTower
from models.spec import ModelSpec
from training.weights.config_json import (
    ACTIVATIONS,
    NAME_IT,
    DescribedModel,
    ModelType,
    Setting,
    mlp_ratio,
    settings_of_transformers,
)
from training.weights.sidecar import Sidecar

_SIZES = {
    **{"hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12},
    **{"num_attention_heads": 12, "num_channels": 3, "qkv_bias": True},
}
_SIGLIP = {
    **_SIZES,
    **{"patch_size": 16, "hidden_act": "gelu_pytorch_tanh", "layer_norm_eps": 1e-6},
}
_CLIP = {**_SIZES, "patch_size": 32, "hidden_act": "quick_gelu", "layer_norm_eps": 1e-5}
_IMAGE_TOWERS: dict[str, dict[str, Any]] = {
    "siglip": {**_SIGLIP, "image_size": 224},
    "siglip2": {**_SIGLIP, "num_patches": 256},
    "clip": {**_CLIP, "image_size": 224},
}
_TEXT_SIGLIP = {
    **{"vocab_size": 32_000, "hidden_size": 768, "intermediate_size": 3072},
    **{"num_hidden_layers": 12, "num_attention_heads": 12, "max_position_embeddings": 64},
    **{"hidden_act": "gelu_pytorch_tanh", "layer_norm_eps": 1e-6},
}
_TEXT_CLIP = {
    **{"vocab_size": 49_408, "hidden_size": 512, "intermediate_size": 2048},
    **{"num_hidden_layers": 12, "num_attention_heads": 8, "max_position_embeddings": 77},
    **{"hidden_act": "quick_gelu", "layer_norm_eps": 1e-5, "eos_token_id": 49_407},
}
_TEXT_TOWERS = {"siglip": _TEXT_SIGLIP, "siglip2": _TEXT_SIGLIP, "clip": _TEXT_CLIP}
"""transformers' values of keys that files leave out."""
_PROCESSORS = {"siglip": "Siglip", "siglip2": "Siglip", "clip": "CLIP"}
_MODELS = {
    "siglip": {
        "gelu_tanh": "timm/vit_base_patch32_siglip_256",
        "gelu": "timm/vit_base_patch16_siglip_224",
    },
    "clip": {
        "quick_gelu": "timm/vit_base_patch32_clip_quickgelu_224",
        "gelu": "timm/vit_base_patch32_clip_224",
    },
}
"""timm's models of the same architecture, of any size, by activation."""
_ONLY: dict[str, tuple[Any, ...]] = {
    "vision_use_head": (None, True),
    "quantization_config": (None,),
    "auto_map": (None,),  # code of its own
}
"""Keys that change the model, with the values that leave it as it is."""
_LARGEST = 2
"""The value of ``eos_token_id`` with which CLIP's text model takes the largest number of a text,
whatever it is."""


def kind_of(about: Sidecar, *, is_named: bool) -> str | None:
    """Return "siglip", "siglip2" or "clip"; None without a model. Raises UsageError for another
    one, unless a flag names a model (``is_named``)."""
    kind = about.content.get("model_type")
    if kind is None or (is_named and kind not in _IMAGE_TOWERS):
        return None
    if kind not in _IMAGE_TOWERS:
        known = ", ".join(_IMAGE_TOWERS)
        raise about.refusal(
            "model_type", kind, f", but of two towers only {known} are known: {NAME_IT}"
        )
    return str(kind)


def processor_of(kind: str) -> str:
    """Return the usual image processor, by its name in ``training/weights/processor.py``."""
    return _PROCESSORS[kind]


def image_tower(about: Sidecar, processor: Sidecar, *, is_named: bool) -> DescribedModel | None:
    """Return the image tower; None if the file describes no model. Raises UsageError for what is
    not supported."""
    kind = kind_of(about, is_named=is_named)
    if kind is None:
        return None
    given, defaults = _part(about, "vision_config"), _IMAGE_TOWERS[kind]
    for key, allowed in _ONLY.items():
        for part in (given, about):
            if (value := part.content.get(key)) not in allowed:
                raise part.refusal(key, value, ", which is not supported")
    content = {**defaults, **given.content}
    act = ACTIVATIONS.get(str(content["hidden_act"]), content["hidden_act"])
    models = _MODELS["clip" if kind == "clip" else "siglip"]
    if act not in models:
        known = ", ".join(models)
        raise given.refusal("hidden_act", act, f", but only {known} are supported")
    if kind == "siglip2":
        content["image_size"] = _size_of_patches(given, content)
        processor = Sidecar(processor.file, {})  # it makes images of any size
    tower = Sidecar(about.file, content)
    named = ModelType(models[act], _PROCESSORS[kind], defaults, resizes_positions=False)
    settings = [
        _of_whole_patches(each, content["patch_size"])
        for each in settings_of_transformers(tower, processor, named)
    ]
    return DescribedModel(about, named.model, settings)


def _part(about: Sidecar, key: str) -> Sidecar:
    """Return an object of the file, without keys that have no value."""
    content = {name: each for name, each in about.mapping(key).items() if each is not None}
    return Sidecar(about.file, content)


def _size_of_patches(about: Sidecar, content: Mapping[str, Any]) -> int:
    """Return the side of the square image with as many patches as there are positions."""
    patches, side = content["num_patches"], content["patch_size"]
    if type(patches) is not int or patches < 1 or math.isqrt(patches) ** 2 != patches:
        raise about.refusal("num_patches", patches, ", which is no square")
    if type(side) is not int or side < 1:
        raise about.refusal("patch_size", side, ", which is not a number of pixels")
    return math.isqrt(patches) * side


def _of_whole_patches(setting: Setting, patch: Any) -> Setting:
    """Return an image size without the rest that is not a whole patch, which the model does not
    see; other settings as they are."""
    size = setting.value
    if setting.argument != "img_size" or type(patch) is not int or patch < 1:
        return setting
    sides = size if isinstance(size, list | tuple) else [size]
    if any(type(side) is not int for side in sides):
        return setting
    whole = [side // patch * patch for side in sides]
    return setting._replace(value=whole if isinstance(size, list | tuple) else whole[0])


def text_tower(about: Sidecar) -> Iterator[Setting]:
    """Yield the values of the flags of the text tower, and of the width of embeddings. Raises
    UsageError for what is not supported."""
    kind = kind_of(about, is_named=True)
    if kind is None:
        return
    given = _part(about, "text_config")
    content = {**_TEXT_TOWERS[kind], **given.content}
    width, act = content["hidden_size"], content["hidden_act"]
    values: dict[str, Any] = {
        "text_depth": ("num_hidden_layers", content["num_hidden_layers"]),
        "text_width": ("hidden_size", width),
        "text_heads": ("num_attention_heads", content["num_attention_heads"]),
        "text_mlp_ratio": ("intermediate_size", mlp_ratio(given, content)),
        "text_length": ("max_position_embeddings", content["max_position_embeddings"]),
        "text_vocab_size": ("vocab_size", content["vocab_size"]),
        "text_act": ("hidden_act", ACTIVATIONS.get(str(act), act)),
        "text_norm_eps": ("layer_norm_eps", content["layer_norm_eps"]),
        "text_pool": ("model_type", "argmax" if kind == "clip" else "last"),
        "text_causal": ("model_type", kind == "clip"),
    }
    if kind == "clip":
        end, vocabulary = content["eos_token_id"], content["vocab_size"]
        if end != _LARGEST and (type(vocabulary) is not int or end != vocabulary - 1):
            why = f", but the end of a text must be the largest number of {vocabulary} tokens"
            raise given.refusal("text_config.eos_token_id", end, why)
        values["projection_dim"] = ("projection_dim", about.content.get("projection_dim", 512))
    for field, (key, value) in values.items():
        shown = key if key in ("model_type", "projection_dim") else f"text_config.{key}"
        yield Setting(about, shown, value, field)


# -- Writing ---------------------------------------------------------------------------------------

_TO_TRANSFORMERS = {"gelu_tanh": "gelu_pytorch_tanh"}


def config_of(image: ModelSpec, text: TextTower, embedding: int, act: str, eps: float) -> dict:
    """Return ``config.json``: of a ``Siglip2Model`` for a tower of native resolution, of a
    ``SiglipModel`` for another that pools by attention, otherwise of a ``CLIPModel``.
    ``embedding``: the width of embeddings; ``act``, ``eps``: the image tower's."""
    sizes, is_native = image.sizes, image.segments is not None
    is_clip = image.settings["global_pool"] != "map" and not is_native
    patch = image.settings["patch_size"]
    rows, columns = sizes.input_shape[1:]
    vision: dict[str, Any] = {
        "hidden_size": sizes.embed_dim,
        "intermediate_size": sizes.hidden,
        "num_hidden_layers": sizes.depth,
        "num_attention_heads": sizes.num_heads,
        "num_channels": sizes.input_shape[0],
        "patch_size": patch,
        "hidden_act": _TO_TRANSFORMERS.get(act, act),
        "layer_norm_eps": eps,
    }
    if is_native:
        vision["num_patches"] = sizes.num_patches
    else:
        vision["image_size"] = rows if rows == columns else [rows, columns]
    texts: dict[str, Any] = {
        "vocab_size": text.vocab_size,
        "hidden_size": text.width,
        "intermediate_size": int(text.width * text.mlp_ratio),
        "num_hidden_layers": text.depth,
        "num_attention_heads": text.heads,
        "max_position_embeddings": text.length,
        "hidden_act": _TO_TRANSFORMERS.get(text.act, text.act),
        "layer_norm_eps": text.norm_eps,
    }
    if is_clip:
        ids = {"pad_token_id": 1, "bos_token_id": 0, "eos_token_id": _LARGEST}
        own, kind = {"projection_dim": embedding}, "clip"
        texts |= ids | own
        vision |= own
    else:
        own, kind = {}, "siglip2" if is_native else "siglip"
        texts["projection_size"] = embedding
    model = {"clip": "CLIPModel", "siglip": "SiglipModel", "siglip2": "Siglip2Model"}[kind]
    return {
        "architectures": [model],
        "model_type": kind,
        **own,
        "vision_config": {"model_type": f"{kind}_vision_model", **vision},
        "text_config": {"model_type": f"{kind}_text_model", **texts},
    }
