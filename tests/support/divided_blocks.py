"""Models of timm's other blocks than the plain one, small, for ``--mesh_tensor``."""

# A small eps would let AdamW make steps of rounding where a gradient is nothing else.
SIZES = "--embed_dim 48 --mlp_ratio 4 --eps 1e-4".split()
MODELS = {
    "biases apart, packed SwiGLU, RoPE": "eva02_small_patch14_224",
    "split projections, inner norms, SwiGLU": "eva02_large_patch14_clip_224",
    "RoPE of each block": "vit_small_patch16_rope_mixed_224 --patch_drop_rate 0.4",
    "register tokens, layer scale": "vit_7b_patch16_dinov3 --init_values 0.5",
    "pooled by attention": "vit_pe_core_base_patch16_224",
    "post-norm": "eva02_enormous_patch14_clip_224",
    "plain block, packed SwiGLU": "vit_giant_patch14_dinov2 --init_values 0.5",
    "plain block, SwiGLU, inner norms": "aimv2_large_patch14_224 --scale_mlp_norm",
    "plain block, post-norm": "vit_base_patch16_rpn_224",
    "packed SwiGLU, normalised heads": "vit_base_patch16_dinov3 --qk_norm --init_values 0.5",
}
PACKED = "biases apart, packed SwiGLU, RoPE"
SPLIT = "split projections, inner norms, SwiGLU"
DROPOUT = "--mlp_dropout 0.1 --att_dropout 0.1 --drop_path_rate 0.2".split()


def flags_of(model):
    return [*SIZES, *f"--model timm/{MODELS[model]}".split()]
