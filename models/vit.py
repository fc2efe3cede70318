"""The Vision Transformer: timm's, built without memory and initialised piece by piece.

A model of this project is timm's ``VisionTransformer``, so its names, options and
state dicts are timm's. Two things are added: it can be built on the meta device
and filled one unit at a time (a 120B model never stands whole in one host's
memory), and its weights depend only on the seed and each module's name, never on
the order, the backend or the number of devices.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator
from dataclasses import asdict

import torch
from timm.layers import trunc_normal_
from timm.models.vision_transformer import VisionTransformer, get_init_weights_vit
from torch import nn

from models.config import VitConfig


def build_vit(config: VitConfig, device: str = "meta") -> VisionTransformer:
    """timm's ViT for ``config``; on the default meta device it holds no weights yet.

    Maps images (batch, in_chans, img_size, img_size) to logits (batch, num_classes).
    """
    options = asdict(config)
    # "skip": the weights come from initialize_module, and on meta there are none.
    mode = options.pop("weight_init")
    model = VisionTransformer(**options, weight_init="skip", device=device)
    model.weight_init_mode = mode
    return model


def fsdp_units(model: VisionTransformer) -> Iterator[tuple[str, nn.Module]]:
    """The pieces to shard one after the other: each block, then the model around them."""
    for index, block in enumerate(model.blocks):
        yield f"blocks.{index}", block
    yield "", model


def initialize_module(
    module: nn.Module, name: str, *, seed: int, num_classes: int, weight_init: str = ""
) -> None:
    """Allocate on CPU and initialise every parameter below ``module`` that is on meta.

    ``name`` is the module's name in the model. Each submodule draws from a generator
    seeded by ``seed`` and its own name. ``weight_init`` is timm's: '' (truncated
    normal, std 0.02), 'jax', 'jax_nlhb', 'moco' or 'reset'.
    """
    head_bias = -math.log(num_classes) if "nlhb" in weight_init else 0.0
    timm_init = get_init_weights_vit(weight_init, head_bias, needs_reset=True)
    for full_name, part in module.named_modules(prefix=name):
        own = list(part.parameters(recurse=False))
        if not any(p.is_meta for p in own):
            continue
        part.to_empty(device="cpu", recurse=False)
        digest = hashlib.sha256(f"{seed}/{full_name}".encode()).digest()
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(int.from_bytes(digest[:8], "little") >> 1)
            if isinstance(part, VisionTransformer):
                _initialize_embeddings(part)
            elif hasattr(part, "init_weights"):  # timm's "reset" mode would leave it empty
                part.init_weights()
            else:
                timm_init(part, full_name)


@torch.no_grad()
def _initialize_embeddings(model: VisionTransformer) -> None:
    """The root's own parameters, as in timm's ``VisionTransformer.init_weights``."""
    if model.pos_embed is not None:
        trunc_normal_(model.pos_embed, std=0.02)
    if model.cls_token is not None:
        nn.init.normal_(model.cls_token, std=1e-6)
    if model.reg_token is not None:
        nn.init.normal_(model.reg_token, std=1e-6)


def parameter_count(config: VitConfig) -> int:
    """The exact number of parameters, counted on a model without memory."""
    return sum(p.numel() for p in build_vit(config).parameters())


def train_flops_per_image(config: VitConfig) -> float:
    """Floating-point operations of forward and backward for one image.

    Matrix products only, two operations a multiply-add, backward counted as twice
    the forward (once for the patch embedding, whose input needs no gradient),
    recomputation under gradient checkpointing not counted: the convention of MFU
    in PaLM (Chowdhery et al. 2022, appendix B).
    """
    width, tokens = config.embed_dim, config.train_tokens
    hidden = int(width * config.mlp_ratio)
    block_macs = tokens * (4 * width * width + 2 * width * hidden) + 2 * tokens**2 * width
    patch_macs = config.num_patches * width * config.in_chans * config.patch_size**2
    head_macs = width * config.num_classes
    if config.global_pool == "map":  # one latent query: k/v of all tokens, then an MLP
        head_macs += tokens * 2 * width**2 + 2 * tokens * width
        head_macs += 2 * width**2 + 2 * width * hidden
    return 6.0 * (config.depth * block_macs + head_macs) + 4.0 * patch_macs
