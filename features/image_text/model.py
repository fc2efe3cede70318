"""Two towers: a timm ViT for images, and a transformer of the same blocks for texts. The image
tower may take sequences of several images (``ModelSpec.segments``).

Image parameters have timm's names, text parameters begin with ``text_``. Embeddings are what the
two towers make of a pair, each of length 1, in fp32; ``loss.py`` compares them.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from timm.layers import Attention, LayerNorm, get_act_layer
from timm.models.vision_transformer import Block
from torch import nn

from features.image_text.config import ImageTextConfig
from models.config import ModelError
from models.select import select
from models.spec import ModelSizes, ModelSpec, StackRun
from models.timm_models import sizes_of_stack, vision_transformer

IMAGE_BLOCKS, TEXT_BLOCKS = "blocks", "text_blocks"
"""The names of the two stacks of blocks."""
MAX_LOGIT_SCALE = 100.0
"""CLIP's limit (arXiv 2103.00020, section 2.5)."""
_EMBEDDING_STD, _POSITION_STD = 0.02, 0.01
"""Standard deviations of initial token and position embeddings, as in CLIP's code."""
TEXT_TOWER = ("text_embed.", "text_pos_embed", "text_blocks.", "text_norm.")
TEXT_PROJECTION = "text_projection."
_SHARED = (TEXT_PROJECTION, "image_projection.", "logit_")
"""Prefixes of the names of parameters that belong to the text tower, and to neither tower."""


def add_to(image: ModelSpec, config: ImageTextConfig, objective: str) -> ModelSpec:
    """Return ``image`` with a text tower. ``config``: with all sizes resolved. Raises ModelError
    for an unsuitable image tower or unsuitable sizes."""
    if image.segments is None:
        vision_transformer(image, f"<objective> {objective}")
    text = config.text
    if text.width % text.heads:
        raise ModelError(
            f"<text_width> {text.width} is not a multiple of <text_heads> {text.heads}"
        )
    if text.width * text.mlp_ratio < 1:
        raise ModelError(
            f"<text_mlp_ratio> {text.mlp_ratio:g} gives an MLP of width 0: use a larger ratio"
        )
    return _with_texts(type(image))(image, config, objective)


@functools.cache
def _with_texts(kind: type[ModelSpec]) -> Callable[..., ModelSpec]:
    """Return the class of specs of both towers, given that of the image tower's."""
    return type(f"ImageText{kind.__name__}", (ImageTextSpec, kind), {})


@functools.cache  # so that all models of a spec are of one class
def _model_with_texts(kind: type[nn.Module]) -> type[nn.Module]:
    """Return the class of models of both towers, given that of the image tower."""
    return type(f"{kind.__name__}WithTexts", (ImageTextModel, kind), {})


class ImageTextSpec(ModelSpec):
    """Spec of both towers: the image tower's spec, and the flags of the text tower. A subclass of
    the image tower's class, too, which answers what the text tower does not change."""

    def __init__(self, image: ModelSpec, config: ImageTextConfig, objective: str) -> None:
        vars(self).update(image.__getstate__())  # all that its class needs, and nothing cached
        self.image, self.config, self.objective = image, config, objective
        flags = {name: value for name, value in vars(config).items() if name not in _OF_TRAINING}
        self.settings = image.settings | flags

    def __reduce__(self) -> tuple[Any, ...]:
        return add_to, (self.image, self.config, self.objective)  # its class has no name to find

    def build(self) -> nn.Module:
        model: Any = self.image.build()
        model.reset_classifier(0)
        kind: Any = type(model)
        model.__class__ = _model_with_texts(kind)
        model.add_texts(self.config, self.objective)
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(not self._is_locked(name))
        return model

    def initialize(self, module: nn.Module, name: str, *, seed: int) -> None:
        self.image.initialize(module, name, seed=seed)
        if isinstance(module, ImageTextModel):
            with torch.no_grad():
                module.initialize_text(torch.Generator().manual_seed(seed))

    @functools.cached_property
    def sizes(self) -> ModelSizes:
        return self.image.sizes

    @functools.cached_property
    def stacks(self) -> Mapping[str, ModelSizes]:
        length = self.config.text.length
        text = sizes_of_stack(
            self.sizes,
            self.meta.text_blocks,
            input_shape=(length,),
            grid=(length,),
            num_tokens=length,
            train_tokens=length,
        )
        return {IMAGE_BLOCKS: self.sizes, TEXT_BLOCKS: text}

    @property
    def runs(self) -> Sequence[StackRun]:
        """The image tower's run, to which all FLOPs are attributed unless it is locked, and the
        text tower's."""
        (image,), text = self.image.runs, self.stacks[TEXT_BLOCKS]
        texts = self.segments or 1  # of a sequence or an image
        flops, locks_image = self.train_flops_per_image, self.config.lock_image
        return [
            replace(
                image,
                outputs=texts * self.embedding_width,
                train_flops=0.0 if locks_image else flops,
                learns=not locks_image,
                runs_ahead=True,
            ),
            StackRun(
                TEXT_BLOCKS,
                text.train_tokens,
                text.num_tokens,
                texts * self.embedding_width,
                flops if locks_image else 0.0,
                sequences=texts,
                learns=not self.config.lock_text,
                runs_ahead=True,
            ),
        ]

    @property
    def embedding_width(self) -> int:
        """The width of the embeddings."""
        model: Any = self.meta
        return model.text_projection.out_features

    @functools.cached_property
    def frozen(self) -> frozenset[str]:  # type: ignore[override]
        """The parameters of the locked tower."""
        names = (name for name, _ in self.meta.named_parameters())
        return frozenset(filter(self._is_locked, names))

    def _is_locked(self, name: str) -> bool:
        """Return True for a parameter of the locked tower. ``build`` turns its gradient off, so
        that ``train_flops_per_image`` counts no backward pass of the tower's blocks."""
        if self.config.lock_text:
            return name.startswith(TEXT_TOWER)
        return self.config.lock_image and not name.startswith((*TEXT_TOWER, *_SHARED))

    def why_no_token_part(self) -> str | None:
        return "devices cannot share the tokens of a text"

    def example(self) -> tuple[Any, ...]:
        text = torch.empty(1, self.stacks[TEXT_BLOCKS].num_tokens, dtype=torch.int32, device="meta")
        return ((*super().example(), text),)


_OF_TRAINING = (
    *("lock_image", "lock_text", "logit_scale_init", "logit_bias_init", "text_model"),
    *("tokenizer", "caption_key"),  # a tokenizer's checksum says which one it is
    "init_text_from",
)
"""Flags that do not change the output of a trained model."""


class Embedded(NamedTuple):
    """What the model returns for pairs; of sequences of several images those of all their places,
    one sequence after the other. Scale and bias are the same for all: one of each an image,
    so that they are divided over devices as images are."""

    images: Any
    """(pairs, width), fp32, of length 1; None if no images were given."""
    texts: Any
    """(pairs, width), fp32, of length 1; None if no texts were given."""
    scale: torch.Tensor
    """(pairs,), fp32: the factor of similarities."""
    bias: torch.Tensor
    """(pairs,), fp32: what is added to them."""


class ImageTextModel(nn.Module):
    """A model of timm's without a head, a subclass of whose class it is, with a text tower beside
    it."""

    def add_texts(self: Any, config: ImageTextConfig, objective: str) -> None:
        """Add the text tower, and what compares both towers' outputs, on the meta device."""
        place: Any = {"device": "meta"}
        is_clip = objective == "clip"
        text = config.text
        width, self.text_pool = text.width, text.pool
        norm = functools.partial(LayerNorm, eps=text.norm_eps)
        block = functools.partial(
            Block,
            width,
            text.heads,
            text.mlp_ratio,
            qkv_bias=True,
            act_layer=get_act_layer(text.act),
            norm_layer=norm,
            attn_layer=CausalAttention if text.causal else Attention,
            **place,
        )
        self.text_embed = nn.Embedding(text.vocab_size, width, **place)
        self.text_pos_embed = nn.Parameter(torch.empty(1, text.length, width, **place))
        self.text_blocks = nn.Sequential(*(block() for _ in range(text.depth)))
        self.text_norm = norm(width, **place)

        default = width if is_clip else self.embed_dim
        embedding = config.projection_dim or default
        self.text_projection = nn.Linear(width, embedding, bias=not is_clip, **place)
        self.image_projection: nn.Module = nn.Identity()
        if is_clip or embedding != self.embed_dim:
            self.image_projection = nn.Linear(self.embed_dim, embedding, bias=False, **place)

        # Vectors of one entry: FSDP2 shards no scalars.
        self.logit_scale = nn.Parameter(torch.empty(1, **place))
        self.logit_bias: nn.Parameter | None = None
        if not is_clip:
            self.logit_bias = nn.Parameter(torch.empty(1, **place))
        self.max_scale = MAX_LOGIT_SCALE if is_clip else math.inf
        self._initial = (config.logit_scale_init, config.logit_bias_init)

    def initialize_text(self, generator: torch.Generator) -> None:
        """Fill the embeddings of texts, the projections, scale and bias."""
        scale, bias = self._initial
        assert scale is not None
        self.text_embed.weight.normal_(std=_EMBEDDING_STD, generator=generator)
        self.text_pos_embed.normal_(std=_POSITION_STD, generator=generator)
        for projection in (self.text_projection, self.image_projection):
            if isinstance(projection, nn.Linear):
                std = projection.in_features**-0.5
                projection.weight.normal_(std=std, generator=generator)
        self.logit_scale.fill_(math.log(scale))
        if self.logit_bias is not None:
            assert bias is not None
            self.logit_bias.fill_(bias)

    def no_weight_decay(self) -> set[str]:
        added = {"text_embed.weight", "text_pos_embed", "logit_scale", "logit_bias"}
        return super().no_weight_decay() | added  # type: ignore[misc]

    def forward(self, pairs: Any) -> Any:
        """Return the ``Embedded`` of images, as the image tower takes them, such as (pairs,
        channels, height, width), and of their texts (pairs, length), integers; one of the two may
        be None. Of images that are in no tuple, return what timm's model without a head returns."""
        if not isinstance(pairs, tuple):
            return super().forward(pairs)
        images, texts = pairs
        of_images = None if images is None else self.image_embeddings(images)
        of_texts = None if texts is None else self.text_embeddings(texts)
        count = len(next(each for each in (of_images, of_texts) if each is not None))
        # Above the limit the gradient passes, too: the scale can become smaller again.
        scale = self.logit_scale.float().exp()
        scale = scale + (scale.clamp(max=self.max_scale) - scale).detach()
        bias = torch.zeros_like(scale) if self.logit_bias is None else self.logit_bias.float()
        return Embedded(
            of_images,
            of_texts,
            scale.expand(count),
            bias.expand(count),
        )

    def image_embeddings(self, images: Any) -> torch.Tensor:
        """Return the embeddings of images, (images, width), fp32, of length 1; of a place of a
        sequence without an image, finite values."""
        pooled = super().forward(images)
        return F.normalize(self.image_projection(pooled).float(), dim=-1)

    def text_embeddings(self, texts: torch.Tensor) -> torch.Tensor:
        """Return the embeddings of texts, (texts, width), fp32, of length 1, given their tokens,
        (texts, length)."""
        return F.normalize(self.text_projection(self.pooled_text(texts)).float(), dim=-1)

    def pooled_text(self, texts: torch.Tensor) -> torch.Tensor:
        """Return what represents each text, (texts, width), of its tokens, (texts, length)."""
        x = self.text_embed(texts)
        x = x + self.text_pos_embed.to(x.dtype)
        x = self.text_norm(self.text_blocks(x))
        if self.text_pool == "last":
            return x[:, -1]
        if self.text_pool == "first":
            return x[:, 0]
        if self.text_pool == "mean":
            return x.mean(1)
        places = torch.arange(texts.shape[1], dtype=torch.int32, device=texts.device)
        is_largest = texts == texts.amax(1, keepdim=True)
        first = places.where(is_largest, texts.shape[1]).amin(1, keepdim=True)
        return select((places == first)[:, None], x)[:, 0]


class CausalAttention(Attention):
    """timm's attention in which a token attends to itself and to earlier ones.

    Computed without ``scaled_dot_product_attention``, in whose place TPUs have kernels that know no
    such mask; texts are short.
    """

    def forward(
        self,
        x: torch.Tensor,
        attn_mask: torch.Tensor | None = None,
        is_causal: bool = False,
    ) -> torch.Tensor:
        q, k, v = self.qkv(x).unflatten(2, (3, self.num_heads, -1)).permute(2, 0, 3, 1, 4)
        scores = (q * self.scale) @ k.transpose(-2, -1)
        places = torch.arange(x.shape[1], device=x.device)
        scores = scores.masked_fill(places[:, None] < places, -math.inf)
        y = scores.softmax(dim=-1).to(v.dtype) @ v
        return self.proj(y.transpose(1, 2).flatten(2))
