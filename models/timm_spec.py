"""The spec of timm's two Vision Transformers, VisionTransformer and Eva, with given arguments."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from timm.models.eva import Eva
from timm.models.vision_transformer import VisionTransformer
from torch import nn

from models.arguments import check_arguments
from models.buckets import Grid, Resampling
from models.errors import ModelError
from models.initialize import Scheme, eva_scheme, initialize, vision_transformer_scheme
from models.spec import ModelSizes, ModelSpec
from models.timm_private import (
    compute_on_grids,
    compute_on_part,
    put_blocks,
    taken_arguments,
    token_parameters,
    why_no_token_part,
    why_one_grid,
)
from models.token_part import PartOfPositions, TokenPart

_WITHOUT_MEMORY: dict[type[nn.Module], dict[str, Any]] = {
    VisionTransformer: {"device": "meta", "weight_init": "skip"},  # there is nothing to fill
    Eva: {"device": "meta"},
}


class TimmSpec(ModelSpec):
    """timm's ``kind`` made with ``arguments``; ``preprocessing`` is timm's for trained weights."""

    def __init__(
        self,
        name: str,
        overrides: Mapping[str, Any],
        kind: type[nn.Module],
        arguments: Mapping[str, Any],
        preprocessing: Mapping[str, Any] | None = None,
    ) -> None:
        """Raises ModelError if the arguments do not go together, or timm does not take them."""
        self._kind, self._arguments = kind, dict(arguments)
        complete = taken_arguments(kind) | self._arguments
        super().__init__(name, overrides, {key: _as_json(v) for key, v in complete.items()})
        self._preprocessing = None if preprocessing is None else dict(preprocessing)
        check_arguments(complete)
        self.sizes  # noqa: B018 - read off the model, which shows whether it can be built

    @property
    def preprocessing(self) -> dict[str, Any] | None:
        return self._preprocessing

    def build(self) -> nn.Module:
        try:
            return self._kind(**self._arguments | _WITHOUT_MEMORY[self._kind])
        except (AssertionError, RuntimeError, TypeError, ValueError) as error:
            raise ModelError(f"timm cannot build {self.name}: {_one_line(error)}") from None

    def initialize(self, module: nn.Module, name: str, *, seed: int) -> None:
        initialize(module, name, seed=seed, scheme=self._scheme)

    @functools.cached_property
    def _scheme(self) -> Scheme:
        settings = self.settings
        if self._kind is Eva:
            return eva_scheme(head_init_scale=settings["head_init_scale"])
        return vision_transformer_scheme(
            weight_init=settings["weight_init"],
            num_classes=settings["num_classes"],
            fix_init=settings["fix_init"],
        )

    def put_blocks(self, model: nn.Module, blocks: nn.Module) -> None:
        put_blocks(model, blocks)

    def why_no_token_part(self) -> str | None:
        return why_no_token_part(self.meta)

    def compute_on_part(self, model: nn.Module, part: TokenPart) -> dict[str, PartOfPositions]:
        return compute_on_part(model, part)

    @property
    def token_parameters(self) -> dict[str, int]:
        return token_parameters(self.meta)

    def why_one_grid(self) -> str | None:
        return why_one_grid(self.meta)

    def compute_on_grids(
        self,
        model: nn.Module,
        grids: Sequence[Grid],
        constant: Callable[[torch.Tensor], torch.Tensor],
    ) -> None:
        rows, columns = self.sizes.grid
        prefix = self.token_parameters["pos_embed"]
        positions = {
            grid: Resampling((rows, columns), grid, prefix, constant)
            for grid in grids
            if grid != (rows, columns)
        }
        compute_on_grids(model, positions)

    # -- facts ------------------------------------------------------------------------

    def _sizes(self, model: nn.Module) -> ModelSizes:
        assert isinstance(model, VisionTransformer | Eva)
        patches, drop = model.patch_embed.num_patches, self.settings["patch_drop_rate"]
        height, width = model.patch_embed.img_size
        attention = next(part for part in model.blocks[0].modules() if hasattr(part, "num_heads"))
        differential = hasattr(attention, "lambda_init")  # two heads of queries share their values
        return ModelSizes(
            input_shape=(model.in_chans, height, width),
            num_classes=model.num_classes,
            grid=tuple(model.patch_embed.grid_size),
            num_tokens=patches + model.num_prefix_tokens,
            train_tokens=_kept(patches, drop) + model.num_prefix_tokens,
            depth=len(model.blocks),
            embed_dim=model.embed_dim,
            num_heads=attention.num_heads,
            head_dim=attention.head_dim,
            value_dim=attention.head_dim * (2 if differential else 1),
            hidden=_hidden(model.blocks[0]),
            attn_drop_rate=self.settings["attn_drop_rate"],
        )


def _kept(patches: int, drop_rate: float) -> int:
    """Return how many patches are kept, as timm's PatchDropout counts."""
    return max(1, int(patches * (1.0 - drop_rate))) if drop_rate else patches


def _hidden(block: nn.Module) -> int:
    """Return the width that the MLP's last product takes: behind a gate, half of what there was."""
    for name, part in block.named_modules():
        if name.endswith("fc2"):
            return part.in_features
    return block.in_split[0]  # type: ignore[index,return-value] # of a parallel block


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split()) or type(error).__name__


def _as_json(value: Any) -> Any:
    """Return a plain JSON value that tells the same: of a class its name."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, list | tuple):
        return [_as_json(each) for each in value]
    if isinstance(value, functools.partial):
        given = ", ".join(f"{key}={_as_json(each)}" for key, each in value.keywords.items())
        return f"{_as_json(value.func)}({given})"
    assert isinstance(value, type | types.FunctionType), value
    return value.__name__
