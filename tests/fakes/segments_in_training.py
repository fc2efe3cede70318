"""run_vit_training.py, where attention is within segments of an image's tokens, which the image
decides: timm's models compute as one of packed sequences does.

What is tested is how segments reach every block's attention. On CPU devices plain products
take the place of TPU kernels.
"""

import sys

import torch
from timm.models.eva import Eva
from timm.models.vision_transformer import VisionTransformer

import run_vit_training
from tests.fakes import kernels_on_cpu
from xla_fsdp.scan import ScannedBlocks


def segments_of(images: torch.Tensor, tokens: int) -> torch.Tensor:
    """Of five tokens each, in some images one more in the first; the last two are padding, 0."""
    token = torch.arange(tokens, device=images.device)
    later = (images[:, 0, images.shape[2] // 2, images.shape[3] // 2] > 0).int()
    numbers = (token + 4 - later[:, None]) // 5 + 1
    return torch.where(token < tokens - 2, numbers, 0).to(torch.int32)


def features(self, images: torch.Tensor, attn_mask: None = None, is_causal: bool = False):
    assert not is_causal
    assert attn_mask is None
    x, given = self._pos_embed(self.patch_embed(images)), {}
    if isinstance(self, Eva):
        x, rope = x
        given["rope"] = rope.expand(len(x), 1, *rope.shape)
    segments = segments_of(images, x.shape[1])
    if self.mask_is_segments:
        given["attn_mask"] = segments
    else:
        given["attn_mask"] = segments[:, None, :, None] == segments[:, None, None, :]
    x = self.norm_pre(x)
    if isinstance(self.blocks, ScannedBlocks):
        x = self.blocks(x, shared=given)
    else:
        for block in self.blocks:
            x = block(x, **given)
    return self.norm(x)


def install():
    for kind in (VisionTransformer, Eva):
        kind.mask_is_segments, kind.forward_features = False, features


if __name__ == "__main__":
    install()
    if "--compile_only" not in sys.argv:
        kernels_on_cpu.install()
    sys.exit(run_vit_training.main(sys.argv[1:]))
