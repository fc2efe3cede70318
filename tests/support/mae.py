"""Flags of small masked autoencoders."""

DECODER = "--decoder_depth 2 --decoder_embed_dim 16 --decoder_num_heads 2".split()
SMALL = ["--class_token", *DECODER]
MAE = ["--objective", "mae", *SMALL]
