"""``open_clip_config.json`` of open_clip, as of 3.3, read and written."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import timm

from data.config import Preprocessing
from features.image_text.config import TextTower
from models.spec import ModelSpec
from training.weights.config_json import DescribedModel, Setting
from training.weights.sidecar import Sidecar

_NATIVE = {
    "quick_gelu": "timm/vit_base_patch32_clip_quickgelu_224",
    "gelu": "timm/vit_base_patch32_clip_224",
}
"""timm's models of the architecture of open_clip's own ``VisionTransformer``, by activation."""
_VISION = {
    **{"layers": 12, "width": 768, "head_width": 64, "mlp_ratio": 4.0, "patch_size": 16},
    "image_size": 224,
}
_TEXT = {
    **{"context_length": 77, "vocab_size": 49_408, "width": 512, "heads": 8, "layers": 12},
    **{"mlp_ratio": 4.0, "no_causal_mask": False, "pool_type": "argmax"},
}
"""open_clip's values of keys that files leave out."""
_NORM_EPS = 1e-5

_OFF = (None, False)
_CUSTOM_BLOCKS = dict.fromkeys(
    ("qk_norm", "scaled_cosine_attn", "scale_heads", "scale_attn_inner", "scale_attn", "scale_fc"),
    _OFF,
)
_ONLY_VISION: dict[str, tuple[Any, ...]] = {
    **_CUSTOM_BLOCKS,
    **{"block_type": (None, "default"), "ls_init_value": (None,), "attentional_pool": _OFF},
    **{"no_ln_pre": _OFF, "final_ln_after_pool": _OFF, "pool_type": (None, "tok")},
    "pos_embed_type": (None, "learnable"),
}
_ONLY_TIMM: dict[str, tuple[Any, ...]] = {
    "timm_proj": (None, "linear", "none", ""),
    "timm_proj_bias": _OFF,
}
_ONLY_TEXT: dict[str, tuple[Any, ...]] = {
    **_CUSTOM_BLOCKS,
    **{"block_type": (None, "default"), "ls_init_value": (None,), "embed_cls": _OFF},
    **{"hf_model_name": (None,), "proj_type": (None, "linear"), "final_ln_after_pool": _OFF},
    "pool_type": (None, "first", "last", "argmax"),
}
"""Keys that change the model, with the values that have a meaning here."""


def _part(about: Sidecar, name: str, only: Mapping[str, tuple[Any, ...]]) -> Mapping[str, Any]:
    """Return an object of the model's configuration. Raises UsageError for what is not
    supported."""
    part = Sidecar(about.file, about.mapping("model_cfg")).mapping(name)
    for key, allowed in only.items():
        if part.get(key) not in allowed:
            raise about.refusal(f"{name}.{key}", part[key], ", which is not supported")
    return {key: value for key, value in part.items() if value is not None}


def _act(about: Sidecar, name: str, part: Mapping[str, Any]) -> str:
    """Return timm's name of the activation of a tower."""
    is_quick = about.mapping("model_cfg").get("quick_gelu")
    more = part.get("act_kwargs") or {}
    if more not in ({}, {"approximate": "tanh"}) or (more and is_quick):
        raise about.refusal(f"{name}.act_kwargs", more, ", which is not supported")
    return "quick_gelu" if is_quick else "gelu_tanh" if more else "gelu"


def _eps(about: Sidecar, name: str, part: Mapping[str, Any]) -> Any:
    """Return the epsilon of the norms of a tower."""
    more = part.get("norm_kwargs") or {}
    if not isinstance(more, Mapping) or more.keys() - {"eps"}:
        raise about.refusal(f"{name}.norm_kwargs", more, ", which is not supported")
    return more.get("eps", _NORM_EPS)


def image_tower(about: Sidecar, *, is_named: bool) -> DescribedModel | None:
    """Return the image tower; None if the file describes no model. Raises UsageError for what is
    not supported."""
    vision = Sidecar(about.file, about.mapping("model_cfg")).mapping("vision_cfg")
    if not vision:
        return None
    if name := vision.get("timm_model_name"):
        if not isinstance(name, str) or not timm.is_model(name):
            if is_named:
                return None
            raise about.refusal("vision_cfg.timm_model_name", name, ", which timm does not have")
        vision = _part(about, "vision_cfg", _ONLY_TIMM)
        settings = [
            Setting(about, f"vision_cfg.{key}", vision.get(key), name)
            for key, name in (("image_size", "img_size"), ("timm_pool", "global_pool"))
        ]
        return DescribedModel(about, f"timm/{name}", [each for each in settings if each.value])
    vision = {**_VISION, **_part(about, "vision_cfg", _ONLY_VISION)}
    for key in ("layers", "width", "head_width"):
        if type(vision[key]) is not int or vision[key] < 1:
            raise about.refusal(f"vision_cfg.{key}", vision[key], ", which is not supported")
    act = _act(about, "vision_cfg", vision)
    if act not in _NATIVE:
        raise about.refusal("vision_cfg.act_kwargs", vision["act_kwargs"], ", which no ViT has")
    values = {
        "image_size": ("img_size", vision["image_size"]),
        "patch_size": ("patch_size", vision["patch_size"]),
        "width": ("embed_dim", vision["width"]),
        "layers": ("depth", vision["layers"]),
        "head_width": ("num_heads", vision["width"] // vision["head_width"]),
        "mlp_ratio": ("mlp_ratio", vision["mlp_ratio"]),
        "norm_kwargs": ("eps", _eps(about, "vision_cfg", vision)),
    }
    settings = [Setting(about, f"vision_cfg.{key}", v, name) for key, (name, v) in values.items()]
    return DescribedModel(about, _NATIVE[act], settings)


def text_tower(about: Sidecar) -> Iterator[Setting]:
    """Yield the values of the flags of the text tower, and of the width of embeddings. Raises
    UsageError for what is not supported."""
    model = about.mapping("model_cfg")
    if not model:
        return
    text = {**_TEXT, **_part(about, "text_cfg", _ONLY_TEXT)}
    values = {
        "layers": ("text_depth", text["layers"]),
        "width": ("text_width", text["width"]),
        "heads": ("text_heads", text["heads"]),
        "mlp_ratio": ("text_mlp_ratio", text["mlp_ratio"]),
        "context_length": ("text_length", text["context_length"]),
        "vocab_size": ("text_vocab_size", text["vocab_size"]),
        "act_kwargs": ("text_act", _act(about, "text_cfg", text)),
        "norm_kwargs": ("text_norm_eps", _eps(about, "text_cfg", text)),
        "pool_type": ("text_pool", text["pool_type"]),
        "no_causal_mask": ("text_causal", not text["no_causal_mask"]),
    }
    for key, (field, value) in values.items():
        yield Setting(about, f"text_cfg.{key}", value, field)
    yield Setting(about, "embed_dim", model.get("embed_dim"), "projection_dim")


_CROP_MODES = {"squash": "squash", "shortest": "center", "longest": "border"}
"""timm's names of open_clip's ``resize_mode``."""


def preprocessing(about: Sidecar) -> dict[str, Any]:
    """Return the preprocessing by timm's names; {} if the file has none. Raises UsageError for an
    unknown one."""
    given = about.mapping("preprocess_cfg")
    if not given:
        return {}
    mode = given.get("resize_mode") or "shortest"
    if mode not in _CROP_MODES:
        raise about.refusal("preprocess_cfg.resize_mode", mode, ", which is not supported")
    found = {name: given.get(name) for name in ("mean", "std")}
    return found | {
        "interpolation": given.get("interpolation") or "bicubic",
        "crop_mode": _CROP_MODES[mode],
        "crop_pct": 1.0,
    }


# -- Writing ---------------------------------------------------------------------------------------


def preprocessing_config(given: Preprocessing, channels: int) -> dict[str, Any]:
    """Return ``preprocess_cfg``."""
    mean, std = given.of_channels(channels)
    modes = {ours: theirs for theirs, ours in _CROP_MODES.items()}
    return {
        "mean": list(mean),
        "std": list(std),
        "interpolation": str(given.interpolation_of_val),
        "resize_mode": modes[str(given.crop_mode)],
    }


def config_of(
    image: ModelSpec,
    text: TextTower,
    embedding: int,
    *,
    timm_name: str | None,
    act: str,
    eps: float,
    projects_images: bool,
    biased: bool,
) -> dict[str, Any]:
    """Return ``model_cfg``. ``timm_name``: timm's model with the image tower's sizes; None for
    open_clip's own ``VisionTransformer``. ``embedding``: the width of embeddings; ``act``, ``eps``:
    the image tower's; ``biased``: whether the projection of texts, and the loss, have a bias."""
    sizes = image.sizes
    rows, columns = sizes.input_shape[1:]
    size = rows if rows == columns else [rows, columns]
    if timm_name:
        vision = {
            "image_size": size,
            "timm_model_name": timm_name,
            "timm_model_pretrained": False,
            "timm_pool": image.settings["global_pool"],
            "timm_proj": "linear" if projects_images else "none",
        }
    else:
        vision = {
            "image_size": size,
            "patch_size": image.settings["patch_size"],
            "layers": sizes.depth,
            "width": sizes.embed_dim,
            "head_width": sizes.head_dim,
            "mlp_ratio": sizes.hidden / sizes.embed_dim,
            "norm_kwargs": {"eps": eps},
        }
    texts: dict[str, Any] = {
        "context_length": text.length,
        "vocab_size": text.vocab_size,
        "width": text.width,
        "heads": text.heads,
        "layers": text.depth,
        "mlp_ratio": text.mlp_ratio,
        "no_causal_mask": not text.causal,
        "pool_type": text.pool,
        "norm_kwargs": {"eps": text.norm_eps},
    }
    if text.act == "gelu_tanh":
        texts["act_kwargs"] = {"approximate": "tanh"}
    model = {"embed_dim": embedding, "custom_text": True, "vision_cfg": vision, "text_cfg": texts}
    if "quick_gelu" in (text.act, None if timm_name else act):
        model["quick_gelu"] = True
    if biased:
        texts["proj_bias"] = True
        model["init_logit_bias"] = -10
    return model
