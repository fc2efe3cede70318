"""Models and flags that are trained on sharded and on whole images."""

MOSAICS = "--data_source mosaics"
HYBRID = f"--model hybrid_vit {MOSAICS} --image_size 32 48 --num_heads 4"
VOLUMES = f"--model hybrid_vit {MOSAICS} --dimension 3 --image_size 16 16 16 --num_heads 4"
TOKENS = "--class_token --reg_tokens 2 --global_pool"
ROPE = f"--model timm/vit_small_patch16_rope_mixed_224 {MOSAICS} --image_size 32"
DINO = f"--model timm/vit_small_patch16_dinov3 {MOSAICS} --image_size 32"
EPOCHS_OF_2 = "--batch_size 480 --num_epochs 3 --max_steps 6 --eval_batches 1"
MODELS = {
    "hybrid, 2-D": HYBRID,
    "hybrid, 3-D": VOLUMES,
    "class token": f"--class_token --global_pool token --num_heads 4 {MOSAICS} --image_size 32 16",
    "registers, map": f"{TOKENS} map --num_heads 4",
    "registers, avgmax": f"{TOKENS} avgmax --pool_include_prefix --num_heads 4",
    "registers, max": f"{TOKENS} max --no_embed_class --num_heads 4",
    "no positions": "--pos_embed none --num_heads 4",
    "DINOv3": f"{DINO} --num_heads 4",
    "RoPE, mixed": f"{ROPE} --num_heads 4",
}
