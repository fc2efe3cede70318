"""The interface between models of any family and the rest of the program: ``ModelSpec``."""

import abc
import functools
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from timm.models import group_parameters
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from models import blocks
from models.positions import Constant, Grid, PartOfPositions, TokenPart

_TRAINING_SETTINGS = ("weight_init", "fix_init", "head_init_scale", "rope_rescale_coords")
"""Settings, besides dropout rates, that do not change the output of a trained model."""


def is_of_training(setting: str) -> bool:
    """Return True for a setting that does not change the output of a trained model."""
    return setting.endswith("_rate") or setting in _TRAINING_SETTINGS


@dataclass(frozen=True)
class ModelSizes:
    """Sizes of a model, in the units of timm's arguments."""

    input_shape: tuple[int, ...]
    """Channels, then height and width of an image in pixels; for volumes, slices come before
    height."""
    num_classes: int
    grid: tuple[int, ...]
    """Number of patches along each spatial dimension; patches are numbered in row-major order."""
    num_tokens: int
    """Sequence length in the blocks: patches, class token, registers."""
    train_tokens: int
    """Sequence length in training, where ``patch_drop_rate`` drops patches."""
    depth: int
    """Number of blocks."""
    embed_dim: int
    num_heads: int
    head_dim: int
    """Width of a head's queries and keys."""
    value_dim: int
    """Width of a head's values, which differs in differential attention."""
    hidden: int
    """Width inside the MLP."""
    attn_drop_rate: float

    @property
    def num_patches(self) -> int:
        return math.prod(self.grid)


@dataclass(frozen=True)
class StackRun:
    """The computation of a training step on one stack of blocks, with sequences of one length."""

    stack: str
    tokens: int
    """Tokens per sequence."""
    pixels: int
    """Input values of the image or crop of a sequence."""
    outputs: int
    """Values that the model returns for an image's sequences."""
    train_flops: float
    """FLOPs per image as counted for MFU; the sum over all runs is the model's."""
    sequences: int = 1
    """Sequences per image."""
    learns: bool = True
    """Whether a backward pass follows; False for a stack whose parameters are all ``frozen``, and
    for a teacher's run, a forward pass with other weights of a stack that ran before."""
    runs_ahead: bool = False
    """Whether a step of several micro-batches computes a forward pass of all of them first, as the
    loss of each needs the others (``Objective.before_micro_batches``)."""


class TimmModel(NamedTuple):
    """How timm makes a model: what its ``create_model`` is called with."""

    architecture: str
    """timm's name of a model of the same class."""
    arguments: Mapping[str, Any]
    """The values that differ from that model's own, or all."""
    patch_projection: str
    """Name of the layer that embeds patches."""
    fixed_size: bool = True
    """Whether all images have the model's own size."""


Units = list[tuple[str, nn.Module]]
"""The parts of a model to shard one after the other, by name: see ``ModelSpec.units``."""


class ModelSpec(abc.ABC):
    """One model: builds it, initializes it unit by unit, and provides facts about it, measured on
    the model on the meta device.

    The blocks are ``model.blocks``, and in some models also those of other ``stacks``; everything
    around them is one more unit, the root.
    """

    head_method = "forward_head"
    """Name of the model's method that takes the tokens, (images, tokens, width), after all blocks
    and the norm, i.e. the result of timm's ``forward_features``."""
    preprocessing: dict[str, Any] | None = None
    """Mean, std, crop and interpolation for the trained weights, if known."""
    head_prefixes = ("head.", "head_")
    """Prefixes of the names of heads' parameters. A backbone lacks these, and those of features
    (``training.feature_table.added_parameters``)."""
    frozen: Collection[str] = ()
    """Names of parameters that are never trained."""
    last_layers: Collection[str] = ()
    """Names of parameters that are frozen at first (``--freeze_last_layer_epochs``)."""
    rope_rescale = 1.0
    """The value of ``--rope_rescale_coords``; 1: rotary positions are not rescaled."""
    other_grids: Sequence[Grid] = ()
    """Patch grids of images, in addition to the model's own, that it is always trained with."""
    segments: int | None = None
    """The largest number of images in a sequence, if the model takes sequences of several: it is
    then given ``segment_ids``, int32 (sequences, tokens), the number of each token's image from 1
    on, 0 for padding, and tokens attend to those of their own image. Its attribute ``mask_of``, a
    function of ``segment_ids`` that a backend may replace, returns the mask of attention."""
    training_settings: Collection[str] = ()
    """Settings of the family that do not change the output of a trained model, besides those of
    ``is_of_training``."""
    converted: Mapping[str, str] = {}
    """Parameters that ``convert`` can compute from weights of another model class: their names
    here, and their names there."""

    def __init__(
        self, name: str, overrides: Mapping[str, Any], settings: Mapping[str, Any]
    ) -> None:
        """``open_model`` returns the same spec for ``name`` and ``overrides``; ``settings`` are all
        arguments of the model, plain JSON values by timm's names."""
        self.name = name
        self.overrides = dict(overrides)
        self.settings = dict(settings)

    # What each family defines.

    @abc.abstractmethod
    def build(self) -> nn.Module:
        """Return a new model on the meta device that maps images (batch, *sizes.input_shape) to
        logits (batch, classes)."""

    @abc.abstractmethod
    def initialize(self, module: nn.Module, name: str, *, seed: int) -> None:
        """Allocate on the CPU and initialize everything on meta below ``module``, named ``name`` in
        the model. The values depend only on the seed and on module names."""

    @property
    @abc.abstractmethod
    def sizes(self) -> ModelSizes:
        """The model's sizes, measured on ``meta``."""

    @abc.abstractmethod
    def why_no_token_part(self) -> str | None:
        """Return why the model cannot compute on a subset of its tokens; None if it can."""

    @abc.abstractmethod
    def compute_on_part(self, model: nn.Module, part: TokenPart) -> dict[str, PartOfPositions]:
        """Let ``model`` compute whole logits from the rows of each image in ``part``, provided that
        the caller makes attention see the tokens of all parts.

        Its learned positions, which must already be initialized, are reduced to those of the part;
        they are returned by their plain names.
        """

    @property
    @abc.abstractmethod
    def token_parameters(self) -> dict[str, int]:
        """Names of the parameters with one entry per token, (1, tokens, width), each with the
        number of entries before those of the patches."""

    @property
    def stacks(self) -> Mapping[str, ModelSizes]:
        """Sizes of the model's stacks of blocks, by name, in the order in which they run."""
        return {"blocks": self.sizes}

    @property
    def runs(self) -> Sequence[StackRun]:
        """The computations of a training step, in order. Everything around the blocks belongs to
        the first run, and to a teacher's."""
        (stack, sizes), *others = self.stacks.items()
        assert not others
        pixels, flops = math.prod(sizes.input_shape), self.train_flops_per_image
        return [StackRun(stack, sizes.train_tokens, pixels, sizes.num_classes, flops)]

    def example(self) -> tuple[Any, ...]:
        """Return the model's arguments for one image, on the meta device."""
        return (torch.empty(1, *self.sizes.input_shape, device="meta"),)

    def put_blocks(self, model: nn.Module, stack: str, blocks: nn.Module) -> None:
        """Replace all blocks of a stack by one module, ``blocks(x, shared=..., stacked=...)``. x:
        (batch, tokens, width); the others: keyword arguments of each block, the same for all or one
        per block along dimension 0."""
        setattr(model, stack, blocks)

    def why_one_grid(self) -> str | None:
        """Return why the model supports only images of its own size; None if it supports others."""
        return "it supports only images of its own size"

    def compute_on_grids(self, model: nn.Module, grids: Sequence[Grid], constant: Constant) -> None:
        """Let ``model`` also process images with these patch grids."""
        raise NotImplementedError

    def as_timm(self) -> TimmModel | None:
        """Return how timm makes the same model; None if it cannot."""
        return None

    def image_features(
        self, tokens: torch.Tensor, given: Any
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """Return the first token of each image and the mean of its patches, both (images, width),
        and its patches, (images, patches, width), or None if images differ in their number.
        ``tokens``: what ``head_method`` takes; ``given``: the model's input."""
        patches = tokens[:, getattr(self.meta, "num_prefix_tokens", 0) :]
        return tokens[:, 0], patches.mean(dim=1), patches

    def convert(
        self, name: str, values: torch.Tensor, read: Callable[[str], torch.Tensor | None]
    ) -> torch.Tensor:
        """Return the values of the parameter ``name``, one of ``converted``, computed from those in
        trained weights. ``read`` returns other tensors of these weights, or None for a missing
        name. Raises ModelError if they do not fit."""
        raise NotImplementedError

    # The same for all families.

    @property
    def block(self) -> nn.Module:
        """The first block on the meta device, for the checks in ``models/blocks.py``."""
        return self.meta.blocks[0]  # type: ignore[index,return-value]

    def __getstate__(self) -> dict[str, Any]:
        """Exclude cached facts from pickling: another process builds its own model."""
        return {
            name: value
            for name, value in vars(self).items()
            if not isinstance(getattr(type(self), name, None), functools.cached_property)
        }

    def units(self, model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
        """Yield the parts to shard one after the other: each block, then the model around them."""
        for stack in self.stacks:
            for index, block in enumerate(getattr(model, stack)):
                yield f"{stack}.{index}", block
        yield "", model

    @functools.cached_property
    def meta(self) -> nn.Module:
        """The model on the meta device, for reading facts: do not change or initialize it."""
        return self.build()

    @property
    def has_class_token(self) -> bool:
        """Return True if the first token is a class token."""
        return getattr(self.meta, "cls_token", None) is not None

    @functools.cached_property
    def parameter_count(self) -> int:
        return sum(parameter.numel() for parameter in self.meta.parameters())

    @functools.cached_property
    def train_flops_per_image(self) -> float:
        """FLOPs of the matrix products of forward and backward for one image, without
        recomputation: the convention of MFU in PaLM (Chowdhery et al. 2022, appendix B)."""
        return train_flops_of(self.build(), self.example())

    @functools.cached_property
    def layers(self) -> dict[str, int]:
        """The layer number of each parameter, by parameter name: 0 before the blocks, the last
        number for the head, as timm counts them for layer-wise learning rates."""
        return group_parameters(self.meta, self.meta.group_matcher(), reverse=True)  # type: ignore[operator]

    @property
    def no_weight_decay(self) -> set[str]:
        """Name patterns of embeddings, to which timm applies no weight decay."""
        return set(self.meta.no_weight_decay())  # type: ignore[operator]

    def why_blocks_differ(self) -> str | None:
        """Return how blocks differ, other than in their drop path rate; None if one loop can run
        all."""
        for stack in self.stacks:
            if difference := blocks.blocks_differ(list(getattr(self.meta, stack))):
                return difference
        return None

    def differences(self, before: Mapping[str, Any]) -> list[str]:
        """Return the settings that differ from ``before``, the settings of another spec, except for
        those that do not change the meaning of trained weights."""
        return [
            name
            for name, value in self.settings.items()
            if not (is_of_training(name) or name in self.training_settings)
            and name in before
            and before[name] != value
        ]


# -- how much work a training step is ------------------------------------------------------------

_aten = torch.ops.aten
_FACTORS = {
    _aten.mm: (0, 1),
    _aten.bmm: (0, 1),
    _aten.addmm: (1, 2),
    _aten.baddbmm: (1, 2),
    _aten.convolution: (0, 1),
}
"""Which arguments of a matrix product are its two factors."""


def train_flops_of(model: Any, arguments: Sequence[Any]) -> float:
    """Return the FLOPs of forward and backward of a new ``model`` on the meta device, called with
    ``arguments``. All blocks but the first must have the same cost. Removes all but two blocks from
    ``model``."""
    model.train()  # dropped patches cost nothing
    every, counts, depth = model.blocks, [], len(model.blocks)
    for count in range(1, min(depth, 2) + 1):
        model.blocks = every[:count]
        with _TrainStepFlops() as counter:
            model(*arguments)
        counts.append(counter.total)
    return float(counts[0] + (depth - 1) * (counts[-1] - counts[0]))


class _TrainStepFlops(TorchDispatchMode):
    """Counts the FLOPs of a training step while running only its forward pass.

    The gradient of each factor of a product is a product of the same size. A backward pass must not
    run before XLA starts, because autograd's engine knows only the devices that exist when it first
    runs.
    """

    def __init__(self) -> None:
        super().__init__()
        self.total = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        operation = func.overloadpacket
        if operation in flop_registry:
            forward = flop_registry[operation](*args, **(kwargs or {}), out_val=result)
            backward = sum(args[factor].requires_grad for factor in _FACTORS[operation])
            self.total += forward * (1 + backward)
        return result
