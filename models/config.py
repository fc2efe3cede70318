"""What a Vision Transformer is made of: timm's argument names, and the presets.

Imports nothing heavy, so that ``--help`` and the argument checks stay fast.
"""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True)
class VitConfig:
    """The arguments of ``timm.models.vision_transformer.VisionTransformer``.

    The defaults are those of the 10-billion-parameter ViT: no class token, mean
    over the normalised tokens, learned position embedding.
    """

    img_size: int = 224
    patch_size: int = 14
    in_chans: int = 3
    num_classes: int = 1000
    global_pool: str = "avg"
    embed_dim: int = 5120
    depth: int = 32
    num_heads: int = 32
    mlp_ratio: float = 4.0
    qkv_bias: bool = True
    qk_norm: bool = False
    scale_attn_norm: bool = False
    scale_mlp_norm: bool = False
    proj_bias: bool = True
    init_values: float | None = None
    class_token: bool = False
    pos_embed: str = "learn"
    no_embed_class: bool = False
    reg_tokens: int = 0
    pre_norm: bool = False
    final_norm: bool = True
    fc_norm: bool | None = False
    pool_include_prefix: bool = False
    drop_rate: float = 0.0
    pos_drop_rate: float = 0.0
    patch_drop_rate: float = 0.0
    proj_drop_rate: float = 0.0
    attn_drop_rate: float = 0.0
    drop_path_rate: float = 0.0
    weight_init: str = ""

    @property
    def num_patches(self) -> int:
        return (self.img_size // self.patch_size) ** 2

    @property
    def num_tokens(self) -> int:
        """Length of the sequence the blocks see: patches, class token, registers."""
        return self.num_patches + int(self.class_token) + self.reg_tokens

    @property
    def train_tokens(self) -> int:
        """The same in training, where ``patch_drop_rate`` leaves a share of the patches only."""
        dropped = self.num_patches - max(1, int(self.num_patches * (1.0 - self.patch_drop_rate)))
        return self.num_tokens - dropped


_VIT_10B = VitConfig()
# Heads of 128: the width of a TPU's matrix unit. 12 * depth * embed_dim^2 parameters.
_VIT_60B = replace(_VIT_10B, embed_dim=10240, depth=48, num_heads=80)
_VIT_120B = replace(_VIT_10B, embed_dim=14336, depth=48, num_heads=112)

# timm's names and sizes: class token, token pooling, final norm before the pool.
_TIMM = VitConfig(class_token=True, global_pool="token", fc_norm=None, patch_size=16)

PRESETS: dict[str, VitConfig] = {
    "vit_tiny_patch16_224": replace(_TIMM, embed_dim=192, depth=12, num_heads=3),
    "vit_small_patch16_224": replace(_TIMM, embed_dim=384, depth=12, num_heads=6),
    "vit_base_patch16_224": replace(_TIMM, embed_dim=768, depth=12, num_heads=12),
    "vit_large_patch16_224": replace(_TIMM, embed_dim=1024, depth=24, num_heads=16),
    "vit_huge_patch14_224": replace(_TIMM, patch_size=14, embed_dim=1280, depth=32, num_heads=16),
    "vit_giant_patch14_224": replace(
        _TIMM, patch_size=14, embed_dim=1408, depth=40, num_heads=16, mlp_ratio=48 / 11
    ),
    "vit_gigantic_patch14_224": replace(
        _TIMM, patch_size=14, embed_dim=1664, depth=48, num_heads=16, mlp_ratio=64 / 13
    ),
    "vit_10b": _VIT_10B,
    "vit_60b": _VIT_60B,
    "vit_120b": _VIT_120B,
}
