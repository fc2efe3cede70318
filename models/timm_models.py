"""The family of timm's Vision Transformers: ``--model timm/NAME``."""

import functools
import types
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from typing import Any

import timm
from timm.layers import AttentionPoolLatent, PatchEmbed
from timm.models.eva import Eva
from timm.models.vision_transformer import VisionTransformer
from torch import nn

from models import timm_private
from models.blocks import blocks_differ
from models.config import ModelError, VitConfig, check_arguments, check_patches
from models.initialize import eva_scheme, initialize, vision_transformer_scheme
from models.positions import Constant, Grid, PartOfPositions, Resampling, TokenPart
from models.spec import ModelSizes, ModelSpec, TimmModel

# ------------------------------------------------------------------------------------------------
# The spec of timm's two Vision Transformers, VisionTransformer and Eva, with given arguments.


BUILT_WITH: dict[type[nn.Module], dict[str, Any]] = {
    VisionTransformer: {"device": "meta", "weight_init": "skip"},  # there is nothing to fill
    Eva: {"device": "meta", "rope_rescale_coords": None},  # ``rescale_positions`` does it
}
"""Arguments that both classes are built with here, whatever a model's own values are."""


class TimmSpec(ModelSpec):
    """timm's class ``kind``, or a subclass of it, with ``arguments``; ``preprocessing`` is timm's
    for its trained weights."""

    def __init__(
        self,
        name: str,
        overrides: Mapping[str, Any],
        kind: type[nn.Module],
        arguments: Mapping[str, Any],
        preprocessing: Mapping[str, Any] | None = None,
    ) -> None:
        """Raises ModelError if the arguments are incompatible, or not accepted by timm."""
        self.kind, self.arguments = kind, dict(arguments)
        self.base = next(known for known in BUILT_WITH if issubclass(kind, known))
        """timm's class."""
        complete = timm_private.taken_arguments(self.base) | self.arguments
        super().__init__(name, overrides, {key: as_json(v) for key, v in complete.items()})
        self.preprocessing = None if preprocessing is None else dict(preprocessing)
        self.rope_rescale = self.settings.get("rope_rescale_coords") or 1.0
        check_arguments(complete)
        self.sizes  # noqa: B018 - builds the model, which shows whether it can be built

    def build(self) -> nn.Module:
        try:
            model = self.kind(**self.arguments | BUILT_WITH[self.base])
        except (AssertionError, RuntimeError, TypeError, ValueError) as error:
            reason = " ".join(str(error).split()) or type(error).__name__
            raise ModelError(f"timm cannot build {self.name}: {reason}") from None
        self.rescale_positions(model)
        return model

    def rescale_positions(self, model: nn.Module, index: int = 0) -> None:
        """Let ``set_rope_factors`` rescale the model's rotary positions by the factor with this
        ``index``, if rescaling is on."""
        if self.rope_rescale > 1:
            timm_private.rescale_coords(model.rope, index)

    def initialize(self, module: nn.Module, name: str, *, seed: int) -> None:
        settings = self.settings
        if self.base is Eva:
            scheme = eva_scheme(head_init_scale=settings["head_init_scale"])
        else:
            scheme = vision_transformer_scheme(
                weight_init=settings["weight_init"],
                num_classes=settings["num_classes"],
                fix_init=settings["fix_init"],
            )
        initialize(module, name, seed=seed, scheme=scheme)

    def put_blocks(self, model: nn.Module, stack: str, blocks: nn.Module) -> None:
        timm_private.put_blocks(model, stack, blocks)

    def why_no_token_part(self) -> str | None:
        pool, drop = self.meta.attn_pool, self.meta.patch_drop
        if pool is not None and type(pool) is not AttentionPoolLatent:
            return f"its pooling is timm's {type(pool).__name__}"
        if getattr(pool, "pos_embed", None) is not None:
            return "its pooling has positions of its own"
        return None if drop is None or isinstance(drop, nn.Identity) else "it has <patch_drop_rate>"

    def compute_on_part(self, model: nn.Module, part: TokenPart) -> dict[str, PartOfPositions]:
        return timm_private.compute_on_part(model, part, self.token_parameters)

    @property
    def token_parameters(self) -> dict[str, int]:
        model: Any = self.meta
        if model.pos_embed is None:
            return {}
        return {"pos_embed": 0 if model.no_embed_class else model.num_prefix_tokens}

    def why_one_grid(self) -> str | None:
        if self.kind is not VisionTransformer:
            return f"it is timm's {self.kind.__name__}, not VisionTransformer"
        if self.meta.pos_embed is None:
            return "it has no learned position embedding"
        if getattr(self.meta.attn_pool, "pos_embed", None) is not None:
            return "its pooling has positions of its own"
        return None

    def compute_on_grids(self, model: nn.Module, grids: Sequence[Grid], constant: Constant) -> None:
        rows, columns = self.sizes.grid
        prefix = self.token_parameters["pos_embed"]
        positions = {
            grid: Resampling((rows, columns), grid, constant, prefix=prefix, antialias=True)
            for grid in grids
            if grid != (rows, columns)
        }
        timm_private.compute_on_grids(model, positions)

    def as_timm(self) -> TimmModel:
        if self.name.startswith("timm/"):
            architecture = self.name.removeprefix("timm/").partition(".")[0]
            names = [name if name in self.settings else EVA_NAMES[name] for name in self.overrides]
        else:  # a preset of ours: all arguments are given
            architecture = self.name if timm.is_model(self.name) else "vit_base_patch16_224"
            names = [field.name for field in fields(VitConfig) if field.name != "weight_init"]
        given = {name: self.settings[name] for name in names}
        given = {name: value for name, value in given.items() if value is not None}
        return TimmModel(architecture, given, "patch_embed.proj")

    @functools.cached_property
    def sizes(self) -> ModelSizes:
        model = self.meta
        assert isinstance(model, VisionTransformer | Eva)
        height, width = model.patch_embed.img_size
        patches, drop_rate = model.patch_embed.num_patches, self.settings["patch_drop_rate"]
        in_training = patches
        if drop_rate:  # as timm's PatchDropout counts
            in_training = max(1, int(patches * (1.0 - drop_rate)))
        block = model.blocks[0]
        attention = next(part for part in block.modules() if hasattr(part, "num_heads"))
        differential = hasattr(attention, "lambda_init")  # two heads of queries share their values
        last = [part for name, part in block.named_modules() if name.endswith("fc2")]
        return ModelSizes(
            input_shape=(model.in_chans, height, width),
            num_classes=model.num_classes,
            grid=tuple(model.patch_embed.grid_size),
            num_tokens=patches + model.num_prefix_tokens,
            train_tokens=in_training + model.num_prefix_tokens,
            depth=len(model.blocks),
            embed_dim=model.embed_dim,
            num_heads=attention.num_heads,
            head_dim=attention.head_dim,
            value_dim=attention.head_dim * (2 if differential else 1),
            # The inputs of the MLP's last product: behind a gate, half of what there was.
            hidden=last[0].in_features if last else block.in_split[0],  # of a parallel block
            attn_drop_rate=self.settings["attn_drop_rate"],
        )


def vision_transformer(spec: ModelSpec, who: str) -> TimmSpec:
    """Return ``spec`` if its model is a plain VisionTransformer of timm. Raises ModelError, which
    says that ``who`` requires it."""
    if not isinstance(spec, TimmSpec) or spec.kind is not VisionTransformer:
        kind = spec.kind.__name__ if isinstance(spec, TimmSpec) else "another class"
        raise ModelError(
            f"{who} requires a VisionTransformer model of timm, and {spec.name} is of {kind}"
        )
    return spec


def sizes_of_stack(sizes: ModelSizes, blocks: Any, **others: Any) -> ModelSizes:
    """Return the sizes of another stack of timm's ``blocks`` in the model of these ``sizes``;
    ``others``: what also differs."""
    block = blocks[0]
    return replace(
        sizes,
        depth=len(blocks),
        embed_dim=block.attn.proj.out_features,
        num_heads=block.attn.num_heads,
        head_dim=block.attn.head_dim,
        value_dim=block.attn.head_dim,
        hidden=block.mlp.fc2.in_features,
        attn_drop_rate=0.0,
        **others,
    )


def as_json(value: Any) -> Any:
    """Return a plain JSON value for an argument; the name of a class or function."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, list | tuple):
        return [as_json(item) for item in value]
    if isinstance(value, functools.partial):
        keywords = ", ".join(f"{key}={as_json(item)}" for key, item in value.keywords.items())
        return f"{as_json(value.func)}({keywords})"
    assert isinstance(value, type | types.FunctionType), value
    return value.__name__


# ------------------------------------------------------------------------------------------------
# The family.


KINDS = (VisionTransformer, Eva)
_MODULES = ("vision_transformer", "eva", "deit")
"""Modules of timm that build mainly models of these classes."""
EVA_NAMES = {
    "reg_tokens": "num_reg_tokens",
    "fc_norm": "use_fc_norm",
    "pre_norm": "use_pre_transformer_norm",
    "scale_attn_norm": "scale_attn_inner",
    "scale_mlp_norm": "scale_mlp",
}
"""Eva's names for arguments of VisionTransformer."""
_FIXED = {"dynamic_img_size": False, "dynamic_img_pad": False}
"""All images of a run have one size, because XLA would compile another program for another size."""
_CLASSES = 1000
"""Number of classes for models that timm defines without a head: ImageNet's, as in the presets."""
_PREPROCESSING = ("mean", "std", "crop_pct", "interpolation", "crop_mode")


def names() -> list[str]:
    """Return timm's names of these models, without "timm/"; ``open_model`` refuses a few of
    them."""
    return sorted(
        name
        for module in _MODULES
        for name in timm.list_models(module=module)
        if "distilled" not in name
    )


def open_model(name: str, overrides: Mapping[str, Any]) -> ModelSpec | None:
    """Return timm's model ``name`` with ``overrides`` applied to its own arguments; None if timm
    has no such model. The name may include a tag of weights after a dot. Raises ModelError unless
    it is a Vision Transformer with uniform blocks and valid arguments."""
    if not timm.is_model(name):
        return None
    full_name = f"timm/{name}"
    try:
        with timm_private.arguments_given_to(*KINDS) as arguments:
            model = timm.create_model(name, device="meta")
    except (NotImplementedError, RuntimeError, TypeError) as error:
        raise ModelError(f"timm cannot build {name}: {error}") from None
    kind, embed = type(model), type(getattr(model, "patch_embed", None))
    if kind not in KINDS:
        raise ModelError(
            f"{full_name} is not a supported Vision Transformer: it is timm's {kind.__name__}"
        )
    if embed is not PatchEmbed:
        raise ModelError(f"{full_name} has an unsupported patch embedding, {embed.__name__}")
    if difference := blocks_differ(list(model.blocks), settings=False):
        raise ModelError(f"the blocks of {full_name} differ: {difference}")
    if reason := timm_private.why_buffers_unknown(model):
        raise ModelError(f"{full_name}: {reason}")

    # Its own arguments, and the given ones.
    del arguments["device"]
    taken = timm_private.taken_arguments(kind)
    given = {
        EVA_NAMES.get(key, key) if kind is Eva else key: value for key, value in overrides.items()
    }
    for argument in given:
        if argument not in taken:
            raise ModelError(
                f"{full_name} does not accept <{argument}> (it is timm's {kind.__name__})"
            )
    if model.num_classes == 0:
        given.setdefault("num_classes", _CLASSES)
    arguments |= _FIXED | given
    if {"img_size", "patch_size"} & given.keys():  # some of timm's own models leave out a rest
        check_patches(*((taken | arguments)[key] for key in ("img_size", "patch_size")))
    return TimmSpec(full_name, overrides, kind, arguments, preprocessing_of(name))


def preprocessing_of(name: str) -> dict[str, Any] | None:
    """Return the preprocessing of timm's trained weights of ``name``; None if there are no
    weights."""
    config = timm.get_pretrained_cfg(name)
    return None if config is None else {key: getattr(config, key) for key in _PREPROCESSING}
