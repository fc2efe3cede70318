"""Self-distillation (DINO, iBOT and DINOv2: arXiv 2104.14294, 2111.07832, 2304.07193): a timm ViT,
and two heads that compare what student and teacher make of crops of an image.

The trunk sees all global crops of the images, then all local ones: two sizes. Parameters of the
trunk have timm's names.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from timm.layers import PatchEmbed
from timm.models.eva import Eva
from timm.models.vision_transformer import VisionTransformer
from torch import nn

from features.dino.config import HEAD_SETTINGS, DinoConfig
from models.config import ModelError
from models.positions import Constant, Grid
from models.select import select
from models.spec import ModelSizes, ModelSpec, StackRun, train_flops_of
from models.timm_models import BUILT_WITH, TimmSpec

_STD = 0.02
_GLOBALS = 2
"""Global crops of an image."""


def add_to(trunk: ModelSpec, config: DinoConfig) -> ModelSpec:
    """Return ``trunk`` with what DINO adds. Raises ModelError for a model or sizes that cannot be
    trained so."""
    if not isinstance(trunk, TimmSpec) or trunk.kind is not trunk.base:
        raise ModelError(
            "<objective> dino requires a VisionTransformer or Eva model of timm, and "
            f"{trunk.name} is neither"
        )
    if not trunk.has_class_token:
        raise ModelError(
            "<objective> dino requires <class_token>, because its loss compares class tokens"
        )
    height, width = trunk.sizes.input_shape[1:]
    patch = (height // trunk.sizes.grid[0], width // trunk.sizes.grid[1])
    side, pairs = config.local_crop_size, config.crop_pairs
    factor = config.gram_crop_factor

    def check_patches(flag: str, size: tuple[int, int], factor: float = 1.0) -> None:
        counts = [factor * side / patch_side for side, patch_side in zip(size, patch, strict=True)]
        if not all(math.isclose(count, round(count)) for count in counts):
            crop, patches = (" x ".join(map(str, sides)) for sides in (dict.fromkeys(size), patch))
            raise ModelError(f"{flag} {crop} is not a multiple of the patch size {patches}")

    check_patches("<local_crop_size>", (side, side))
    check_patches("<img_size>", (height, width))
    for crop_side in itertools.chain(*pairs):
        check_patches("<crop_sizes>", (crop_side, crop_side))
    if side > min(height, width):
        raise ModelError(
            f"<local_crop_size> {side} is larger than the global crops, <img_size> {height} x "
            f"{width}: use a smaller one"
        )
    for global_side, local_side in pairs:
        if global_side < local_side:
            raise ModelError(
                f"<crop_sizes> {global_side}x{local_side}: the local crop must not be larger than "
                "the global crop"
            )
    if pairs and (height != width or (height, side) not in pairs):
        raise ModelError(
            f"<crop_sizes> must include {height}x{side} (<img_size> x <local_crop_size>), and "
            "global crops must be square"
        )
    for size in ((height, width), *((side, side) for side, _ in pairs)):
        check_patches(f"<gram_crop_factor> {factor:g} times", size, factor)
    spec = DinoSpec(trunk, config)
    if any(grid != trunk.sizes.grid for grid in spec.other_grids):
        if trunk.kind is VisionTransformer:
            if reason := trunk.why_one_grid():
                raise ModelError(f"<objective> dino cannot use {trunk.name}: {reason}")
        elif trunk.meta.pos_embed is not None or trunk.settings["rope_type"] == "mixed":
            raise ModelError(
                f"<objective> dino cannot use {trunk.name}: its learned position embedding "
                "supports only one image size"
            )
    return spec


class DinoSpec(TimmSpec):
    """The spec of a student, and so of its teacher: the trunk's, and the sizes of its heads."""

    last_layers = ("dino_head.prototypes.weight", "ibot_head.prototypes.weight")

    def __init__(self, trunk: TimmSpec, config: DinoConfig) -> None:
        self.trunk = trunk
        self._most_masked = int(trunk.sizes.num_patches * config.ibot_mask_ratio[1])
        self.local_crops, side = config.local_crops, config.local_crop_size
        """The number of local crops of an image."""
        self._channels, height, width = trunk.sizes.input_shape
        self._local_size = (side, side)
        pairs = config.crop_pairs
        global_sizes = [(height, width), *((side, side) for side, _ in pairs)]
        local_sizes = [self._local_size, *((side, side) for _, side in pairs)]
        factor = config.gram_crop_factor
        gram_sizes = [(round(tall * factor), round(wide * factor)) for tall, wide in global_sizes]
        kinds = dict.fromkeys(gram_sizes, 0)  # never rescaled: the Gram teacher is not trained
        kinds |= dict.fromkeys(local_sizes, 1)
        kinds |= dict.fromkeys(global_sizes, 0)
        self._other_sizes = {size: kind for size, kind in kinds.items() if size != (height, width)}
        """Heights and widths of crops other than the model's own; 0: global crops, 1: local."""
        rows, columns = trunk.sizes.grid

        def grid_of(size: tuple[int, int]) -> Grid:
            return size[0] * rows // height, size[1] * columns // width

        self.other_grids = [grid_of(size) for size in self._other_sizes]
        patches = math.prod(grid_of(self._local_size))
        self._local_tokens = trunk.sizes.num_tokens - rows * columns + patches
        self._heads = {name: getattr(config, name) for name in HEAD_SETTINGS}
        given = (trunk.name, trunk.overrides, trunk.kind, trunk.arguments)
        super().__init__(*given, trunk.preprocessing)
        self.settings |= self._heads

    def build(self) -> nn.Module:
        kind = DinoEva if self.kind is Eva else DinoVisionTransformer
        arguments = self.arguments | BUILT_WITH[self.kind] | {"num_classes": 0}
        model: Any = kind(**arguments)
        model.add(self._heads)
        if self.kind is Eva:
            model.other_ropes = nn.ModuleDict()
            for size, index in self._other_sizes.items():
                # The angles of crops, from a model of their size.
                other: Any = self.kind(**arguments | {"img_size": size})
                model.other_ropes[str(other.patch_embed.num_patches)] = other.rope
                self.rescale_positions(other, index)
        self.rescale_positions(model)
        return model

    def initialize(self, module: nn.Module, name: str, *, seed: int) -> None:
        super().initialize(module, name, seed=seed)
        if isinstance(module, DinoVisionTransformer | DinoEva):
            nn.init.zeros_(module.mask_token)

    @functools.cached_property
    def sizes(self) -> ModelSizes:
        return self.trunk.sizes

    @property
    def runs(self) -> Sequence[StackRun]:
        """Of the student, of whose crops all FLOPs count to the global ones, and of the teacher."""
        class_logits, patch_logits = self._heads["dino_prototypes"], self._heads["ibot_prototypes"]
        teacher_flops = self.teacher_flops_per_image
        student = StackRun(
            "blocks",
            self.sizes.num_tokens,
            pixels=math.prod(self.sizes.input_shape),
            outputs=_GLOBALS * class_logits + self._most_masked * patch_logits,
            train_flops=self.train_flops_per_image - teacher_flops,
            sequences=_GLOBALS,
        )
        local = StackRun(
            "blocks",
            self._local_tokens,
            pixels=self._channels * math.prod(self._local_size),
            outputs=self.local_crops * class_logits,
            train_flops=0.0,
            sequences=self.local_crops,
        )
        teacher = replace(student, train_flops=teacher_flops, learns=False)
        return [student, local, teacher] if self.local_crops else [student, teacher]

    def why_one_grid(self) -> str | None:
        return "its crops already come in several sizes"

    def why_no_token_part(self) -> str | None:
        return "its masks cover whole images"

    def compute_on_grids(self, model: nn.Module, grids: Sequence[Grid], constant: Constant) -> None:
        if self.kind is VisionTransformer:  # the other has no learned positions
            super().compute_on_grids(model, grids, constant)

    def example(self) -> tuple[Any, ...]:
        """Return the crops of one image."""
        local_shape = (1, self.local_crops, self._channels, *self._local_size)
        with torch.device("meta"):
            crops = Crops(
                torch.empty(1, _GLOBALS, *self.sizes.input_shape),
                torch.empty(local_shape) if self.local_crops else None,
                torch.zeros(1, self.sizes.num_patches, dtype=torch.bool),
                self._most_masked,
                hides=True,
            )
        return (crops,)

    @functools.cached_property
    def train_flops_per_image(self) -> float:
        """Those of the student, and of the teacher's forward pass (``teacher_flops_per_image``)."""
        return train_flops_of(self._on_meta(), self.example()) + self.teacher_flops_per_image

    @functools.cached_property
    def teacher_flops_per_image(self) -> float:
        """Floating-point operations of the teacher for one image: a forward pass of its global
        crops."""
        crops = self.example()[0]._replace(local_crops=None, hides=False)
        return train_flops_of(self._on_meta().requires_grad_(False), (crops,))

    def _on_meta(self) -> nn.Module:
        model = self.build()
        self.compute_on_grids(model, self.other_grids, lambda values: values.to("meta"))
        return model


class Crops(NamedTuple):
    """What a student or teacher is shown of images."""

    global_crops: torch.Tensor
    """(images, 2, channels, height, width), normalized."""
    local_crops: torch.Tensor | None
    """(images, number, channels, height, width) of another size; None: none."""
    mask: torch.Tensor
    """Which patches of each first global crop are masked: (images, patches), boolean."""
    slots: int
    """The most masked patches of an image: so many are compared, and slots without one count for
    nothing."""
    hides: bool
    """Masked patches are hidden, as from a student; else they are seen."""


class Compared(NamedTuple):
    """What is compared of images: logits are products with the prototypes, cosines of angles."""

    classes: torch.Tensor
    """Logits of the class tokens, (images, crops, prototypes): of global crops, then local ones."""
    patches: torch.Tensor
    """Logits of the masked patches of the first global crop: (images, slots, prototypes)."""
    tokens: torch.Tensor
    """The class tokens of the global crops, before the head: (images, 2, width)."""
    patch_tokens: torch.Tensor
    """The patch tokens of the global crops: (images, 2, patches, width)."""


# -- The heads -------------------------------------------------------------------------------------


class Prototypes(nn.Module):
    """A linear layer whose weight is normalized: each row is a unit vector (weight normalization
    of gain 1, as DINO's ``norm_last_layer``)."""

    def __init__(self, width: int, count: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(count, width, device="meta"))

    def reset_parameters(self) -> None:
        nn.init.trunc_normal_(self.weight, std=_STD)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight = self.weight.float()
        # As F.normalize does; but torch_xla 2.9 gives the norm of a parameter another hash in the
        # first step than in later ones, and would compile the step twice.
        length = weight.square().sum(-1, keepdim=True).clamp(min=1e-24).sqrt()
        weight = (weight / length).to(self.weight.dtype)
        return F.linear(x.to(weight.dtype), weight)


class DinoHead(nn.Module):
    """Three linear layers, normalization to length 1, and prototypes."""

    def __init__(self, width: int, hidden: int, bottleneck: int, prototypes: int) -> None:
        super().__init__()
        layer = functools.partial(nn.Linear, device="meta")
        self.mlp = nn.Sequential(
            layer(width, hidden),
            nn.GELU(),
            layer(hidden, hidden),
            nn.GELU(),
            layer(hidden, bottleneck),
        )
        self.prototypes = Prototypes(bottleneck, prototypes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.prototypes(F.normalize(self.mlp(x).float(), dim=-1))


# -- The model -------------------------------------------------------------------------------------


class _WithDinoHeads(nn.Module):
    """What DINO adds to one of timm's two Vision Transformers."""

    embed_dim: int
    num_prefix_tokens: int
    patch_embed: PatchEmbed
    fc_norm: nn.Module
    forward_features: Callable[[torch.Tensor], torch.Tensor]

    def add(self, heads: Mapping[str, int]) -> None:
        """Add the mask token and the heads, of these sizes by their flags, on the meta device."""
        self.attn_pool = None
        self.patch_embed.strict_img_size = False  # local crops are smaller
        self.mask_token = nn.Parameter(torch.empty(1, 1, self.embed_dim, device="meta"))
        sizes = (self.embed_dim, heads["dino_head_hidden"], heads["dino_head_bottleneck"])
        self.dino_head = DinoHead(*sizes, heads["dino_prototypes"])
        self.ibot_head = DinoHead(*sizes, heads["ibot_prototypes"])
        self._hidden: torch.Tensor | None = None
        """The patches of the current images that the mask token replaces, boolean."""

    def no_weight_decay(self) -> set[str]:
        return {*super().no_weight_decay(), "mask_token"}  # type: ignore[misc]

    def group_matcher(self, coarse: bool = False) -> dict[str, Any]:
        groups: dict[str, Any] = super().group_matcher(coarse)  # type: ignore[misc]
        return {**groups, "stem": rf"{groups['stem']}|^mask_token"}

    def forward(self, images: torch.Tensor | Crops) -> torch.Tensor | Compared:
        """Return what is compared of crops; of images, (batch, channels, height, width), what
        timm's model without a head returns."""
        if isinstance(images, torch.Tensor):
            return super().forward(images)
        crops, hidden = images, None
        if crops.hides:
            hidden = torch.stack([crops.mask, torch.zeros_like(crops.mask)], dim=1).flatten(0, 1)
        tokens = self._tokens(crops.global_crops, hidden)
        class_tokens, patches = tokens[:, :, 0], tokens[:, :, self.num_prefix_tokens :]
        compared = class_tokens
        if crops.local_crops is not None:
            local_class_tokens = self._tokens(crops.local_crops)[:, :, 0]
            compared = torch.cat([class_tokens, local_class_tokens], dim=1)
        masked = select(slots_of(crops.mask, crops.slots), patches[:, 0])
        return Compared(self.dino_head(compared), self.ibot_head(masked), class_tokens, patches)

    def _tokens(self, crops: torch.Tensor, hidden: torch.Tensor | None = None) -> torch.Tensor:
        """Return the normalized tokens of crops, (images, crops, tokens, width)."""
        self._hidden = hidden
        try:
            x = self.forward_features(crops.flatten(0, 1))
        finally:
            self._hidden = None
        return self.fc_norm(x).unflatten(0, crops.shape[:2])  # it or the norm before is none

    def _pos_embed(self, x: torch.Tensor) -> Any:
        if self._hidden is not None:
            x = torch.where(self._hidden[..., None], self.mask_token.to(x.dtype), x)
        return super()._pos_embed(x)  # type: ignore[misc]


class DinoVisionTransformer(_WithDinoHeads, VisionTransformer):
    """timm's VisionTransformer with DINO's heads."""


class DinoEva(_WithDinoHeads, Eva):
    """timm's Eva (DINOv3's class) with DINO's heads."""

    other_ropes: nn.ModuleDict
    """Rotary positions of crops of other sizes than the model's own, by number of patches."""

    def _pos_embed(self, x: torch.Tensor) -> Any:
        patches = str(x.shape[1])
        x, rope = super()._pos_embed(x)
        if patches in self.other_ropes:
            rope = self.other_ropes[patches].get_embed()  # type: ignore[operator]
        return x, rope


def slots_of(mask: torch.Tensor, slots: int) -> torch.Tensor:
    """Return which patch each slot is for, (images, slots, patches), of a mask (images, patches):
    the n-th masked patch is in slot n, and slots that are left have none."""
    places = torch.arange(max(slots, mask.shape[1]), dtype=torch.int32, device=mask.device)
    # How many masked patches come before each. (A cumulative sum ends XLA's plugin for the host's
    # processor, which TorchTPU is tested with.)
    patches = places[: mask.shape[1]]
    before = (mask[:, None, :] & (patches < patches[:, None])).sum(2, dtype=torch.int32)
    return mask[:, None, :] & (before[:, None, :] == places[:slots, None])
