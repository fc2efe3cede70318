"""Names and layouts of tensors in transformers' and open_clip's two-tower models, and here.

One table of each serves both directions: an ``Entry`` says which tensors here are made of which
tensors there.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from features.image_text.model import IMAGE_BLOCKS, TEXT_BLOCKS

Tensors = list[torch.Tensor]


@dataclass(frozen=True)
class Entry:
    """Tensors here and there with the same values."""

    ours: Sequence[str]
    theirs: Sequence[str]
    read: Callable[[Tensors], Tensors] = list
    """From those there to those here."""
    write: Callable[[Tensors], Tensors] = list
    """From those here to those there."""


# -- Kinds of entries ------------------------------------------------------------------------------


def _same(ours: str, theirs: str) -> Iterator[Entry]:
    """Yield entries for a weight and a bias."""
    for kind in ("weight", "bias"):
        yield Entry([f"{ours}.{kind}"], [f"{theirs}.{kind}"])


def _joined(ours: str, *theirs: str) -> Iterator[Entry]:
    """Yield entries for a layer that is several layers there, one after the other."""
    for kind in ("weight", "bias"):
        yield Entry(
            [f"{ours}.{kind}"],
            [f"{name}.{kind}" for name in theirs],
            lambda parts: [torch.cat(parts)],
            lambda whole: list(whole[0].chunk(len(theirs))),
        )


def _lifted(ours: str, theirs: str, dimensions: int) -> Entry:
    """Return the entry of a tensor with more ``dimensions`` of size 1 in front here."""

    def read(found: Tensors) -> Tensors:
        return [found[0].reshape(*[1] * dimensions, *found[0].shape)]

    def write(found: Tensors) -> Tensors:
        return [found[0].reshape(found[0].shape[dimensions:])]

    return Entry([ours], [theirs], read, write)


def _scalar(name: str, *, has_dimension: bool) -> Entry:
    """Return the entry of a number, which has one dimension here, and there or not."""
    shape = [1] if has_dimension else []
    return Entry([name], [name], lambda x: [x[0].reshape(1)], lambda x: [x[0].reshape(shape)])


def _transposed(ours: str, theirs: str) -> Entry:
    """Return the entry of a matrix that is multiplied from the other side there."""
    return Entry([ours], [theirs], lambda x: [x[0].T], lambda x: [x[0].T.contiguous()])


def _pooling(theirs: str) -> Iterator[Entry]:
    """Yield entries for the queries, keys and values of timm's attention pooling, which are one
    tensor there."""
    for kind, name in (("weight", f"{theirs}.in_proj_weight"), ("bias", f"{theirs}.in_proj_bias")):
        yield Entry(
            [f"attn_pool.q.{kind}", f"attn_pool.kv.{kind}"],
            [name],
            lambda x: list(x[0].split([len(x[0]) // 3, len(x[0]) - len(x[0]) // 3])),
            lambda parts: [torch.cat(parts)],
        )


# -- transformers ----------------------------------------------------------------------------------


def _blocks_of_transformers(ours: str, theirs: str, depth: int) -> Iterator[Entry]:
    for index in range(depth):
        here, there = f"{ours}.{index}", f"{theirs}.encoder.layers.{index}"
        yield from _same(f"{here}.norm1", f"{there}.layer_norm1")
        yield from _same(f"{here}.norm2", f"{there}.layer_norm2")
        projections = [f"{there}.self_attn.{which}_proj" for which in "qkv"]
        yield from _joined(f"{here}.attn.qkv", *projections)
        yield from _same(f"{here}.attn.proj", f"{there}.self_attn.out_proj")
        yield from _same(f"{here}.mlp.fc1", f"{there}.mlp.fc1")
        yield from _same(f"{here}.mlp.fc2", f"{there}.mlp.fc2")


def _patches(found: Tensors) -> Tensors:
    """Return the projection of patches as a convolution; SigLIP 2's of native resolution is a
    matrix, (width, rows x columns x 3)."""
    (weight,) = found
    if weight.dim() != 2:
        return [weight]
    side = round((weight.shape[1] // 3) ** 0.5)
    return [weight.reshape(len(weight), side, side, -1).permute(0, 3, 1, 2)]


def of_transformers(
    image_depth: int, text_depth: int, *, clip: bool = False, native: bool = False
) -> Iterator[Entry]:
    """Yield the entries of ``SiglipModel``, ``Siglip2Model`` and, with ``clip``, ``CLIPModel``:
    https://github.com/huggingface/transformers, models/siglip, siglip2 and clip. ``native``: with
    the names of a model of native resolution here, for writing; it reads those of others."""
    image, text = "vision_model", "text_model"
    patches = f"{image}.embeddings.patch_embedding"
    positions = f"{image}.embeddings.position_embedding.weight"
    if native:
        yield from _same("embeds.proj", patches)
        yield Entry(["embeds.pos_embed"], [positions], write=lambda x: [x[0].flatten(0, 2)])
    yield Entry(["patch_embed.proj.weight"], [f"{patches}.weight"], _patches)
    yield Entry(["patch_embed.proj.bias"], [f"{patches}.bias"])
    yield _lifted("pos_embed", positions, 1)
    yield _lifted("cls_token", f"{image}.embeddings.class_embedding", 2)
    yield from _same("norm_pre", f"{image}.pre_layrnorm")
    yield from _blocks_of_transformers(IMAGE_BLOCKS, image, image_depth)
    yield from _same("norm", f"{image}.post_layernorm")
    yield Entry(["attn_pool.latent"], [f"{image}.head.probe"])
    yield from _pooling(f"{image}.head.attention")
    yield from _same("attn_pool.proj", f"{image}.head.attention.out_proj")
    yield from _same("attn_pool.norm", f"{image}.head.layernorm")
    yield from _same("attn_pool.mlp.fc1", f"{image}.head.mlp.fc1")
    yield from _same("attn_pool.mlp.fc2", f"{image}.head.mlp.fc2")

    yield Entry(["text_embed.weight"], [f"{text}.embeddings.token_embedding.weight"])
    yield _lifted("text_pos_embed", f"{text}.embeddings.position_embedding.weight", 1)
    yield from _blocks_of_transformers(TEXT_BLOCKS, text, text_depth)
    yield from _same("text_norm", f"{text}.final_layer_norm")
    if clip:
        yield Entry(["text_projection.weight"], ["text_projection.weight"])
        yield Entry(["image_projection.weight"], ["visual_projection.weight"])
    else:
        yield from _same("text_projection", f"{text}.head")
    yield _scalar("logit_scale", has_dimension=not clip)
    yield _scalar("logit_bias", has_dimension=True)


# -- open_clip -------------------------------------------------------------------------------------


def _blocks_of_open_clip(ours: str, theirs: str, depth: int) -> Iterator[Entry]:
    for index in range(depth):
        here, there = f"{ours}.{index}", f"{theirs}transformer.resblocks.{index}"
        yield from _same(f"{here}.norm1", f"{there}.ln_1")
        yield from _same(f"{here}.norm2", f"{there}.ln_2")
        for kind in ("weight", "bias"):
            yield Entry([f"{here}.attn.qkv.{kind}"], [f"{there}.attn.in_proj_{kind}"])
        yield from _same(f"{here}.attn.proj", f"{there}.attn.out_proj")
        yield from _same(f"{here}.mlp.fc1", f"{there}.mlp.c_fc")
        yield from _same(f"{here}.mlp.fc2", f"{there}.mlp.c_proj")


def of_open_clip(
    image_depth: int,
    text_depth: int,
    *,
    trunk: Collection[str] = (),
    custom_text: bool = False,
    biased: bool = False,
) -> Iterator[Entry]:
    """Yield the entries of open_clip's ``CLIP`` or, with ``custom_text``, ``CustomTextCLIP``:
    https://github.com/mlfoundations/open_clip, model.py, transformer.py and timm_model.py.

    ``trunk``: the names of the image tower's tensors, if it is timm's. ``biased``: whether the
    projection of texts has a bias.
    """
    if trunk:
        for name in trunk:
            yield Entry([name], [f"visual.trunk.{name}"])
        yield Entry(["image_projection.weight"], ["visual.head.proj.weight"])
    else:
        yield Entry(["patch_embed.proj.weight"], ["visual.conv1.weight"])
        yield _lifted("pos_embed", "visual.positional_embedding", 1)
        yield _lifted("cls_token", "visual.class_embedding", 2)
        yield from _same("norm_pre", "visual.ln_pre")
        yield from _blocks_of_open_clip(IMAGE_BLOCKS, "visual.", image_depth)
        yield from _same("norm", "visual.ln_post")
        yield _transposed("image_projection.weight", "visual.proj")

    text = "text." if custom_text else ""
    yield Entry(["text_embed.weight"], [f"{text}token_embedding.weight"])
    yield _lifted("text_pos_embed", f"{text}positional_embedding", 1)
    yield from _blocks_of_open_clip(TEXT_BLOCKS, text, text_depth)
    yield from _same("text_norm", f"{text}ln_final")
    if biased:
        yield from _same("text_projection", f"{text}text_projection")
    else:
        yield _transposed("text_projection.weight", f"{text}text_projection")
    yield _scalar("logit_scale", has_dimension=False)
    yield _scalar("logit_bias", has_dimension=False)


# -- Both directions -------------------------------------------------------------------------------

_COUNTS = re.compile(
    r"(?:.*\.)?position_ids|(?:text\.)?attn_mask|input_resolution|context_length|vocab_size"
)
"""Names there of what is no weight."""


def read(entries: Iterator[Entry], tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return tensors by the names here. Those that no entry knows keep their names."""
    left = {name: each for name, each in tensors.items() if not _COUNTS.fullmatch(name)}
    found: dict[str, torch.Tensor] = {}
    for entry in entries:
        if all(name in left for name in entry.theirs):
            values = entry.read([left.pop(name) for name in entry.theirs])
            found |= zip(entry.ours, values, strict=True)
    return found | left


def write(
    entries: Iterator[Entry], tensors: Mapping[str, torch.Tensor]
) -> tuple[dict[str, torch.Tensor], list[str]]:
    """Return tensors by the names there, and the names here of those that have none there."""
    left, found = dict(tensors), dict[str, torch.Tensor]()
    for entry in entries:
        if all(name in left for name in entry.ours):
            values = entry.write([left.pop(name) for name in entry.ours])
            found |= zip(entry.theirs, values, strict=True)
    return found, [*left]


def depth_of(names: Collection[str], prefix: str) -> int:
    """Return the number of blocks whose names start with ``prefix``."""
    pattern = re.compile(rf"{re.escape(prefix)}(\d+)\.")
    found = [int(match[1]) for name in names if (match := pattern.match(name))]
    return max(found, default=-1) + 1
