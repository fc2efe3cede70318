"""transformers' text towers, with the weights of a model of the program's."""

import torch
from torch import nn
from transformers import CLIPTextConfig, CLIPTextModel, SiglipTextConfig, SiglipTextModel


class Pooled(nn.Module):
    """What a text model of transformers makes of tokens."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, tokens):
        return self.model(input_ids=tokens).pooler_output


def text_tower(text, weights):
    """Return transformers' model, from tokens to what represents a text, and the projection behind
    it. ``text``: a ``TextTower``, SigLIP's or CLIP's; ``weights``: all parameters by name."""
    sizes = {
        "vocab_size": text.vocab_size,
        "hidden_size": text.width,
        "intermediate_size": int(text.width * text.mlp_ratio),
        "num_hidden_layers": text.depth,
        "num_attention_heads": text.heads,
        "max_position_embeddings": text.length,
        "hidden_act": {"gelu_tanh": "gelu_pytorch_tanh"}.get(text.act, text.act),
        "layer_norm_eps": text.norm_eps,
        "attn_implementation": "eager",
    }
    if text.causal:
        # With this number of the end of a text, it is found as the largest number.
        model = CLIPTextModel(CLIPTextConfig(**sizes, eos_token_id=2))
    else:
        width = len(weights["text_projection.weight"])
        model = SiglipTextModel(SiglipTextConfig(**sizes, projection_size=width))
    names = dict(model.named_parameters())
    prefix = "text_model." if any(name.startswith("text_model.") for name in names) else ""

    @torch.no_grad()
    def put(name, values):
        assert names[prefix + name].shape == values.shape, name
        names.pop(prefix + name).copy_(values)

    put("embeddings.token_embedding.weight", weights["text_embed.weight"])
    put("embeddings.position_embedding.weight", weights["text_pos_embed"][0])
    for kind in ("weight", "bias"):
        put(f"final_layer_norm.{kind}", weights[f"text_norm.{kind}"])
        for block in range(text.depth):
            ours, theirs = f"text_blocks.{block}", f"encoder.layers.{block}"
            put(f"{theirs}.layer_norm1.{kind}", weights[f"{ours}.norm1.{kind}"])
            put(f"{theirs}.layer_norm2.{kind}", weights[f"{ours}.norm2.{kind}"])
            parts = weights[f"{ours}.attn.qkv.{kind}"].chunk(3)
            for which, part in zip("qkv", parts, strict=True):
                put(f"{theirs}.self_attn.{which}_proj.{kind}", part)
            put(f"{theirs}.self_attn.out_proj.{kind}", weights[f"{ours}.attn.proj.{kind}"])
            put(f"{theirs}.mlp.fc1.{kind}", weights[f"{ours}.mlp.fc1.{kind}"])
            put(f"{theirs}.mlp.fc2.{kind}", weights[f"{ours}.mlp.fc2.{kind}"])
    weight, bias = weights["text_projection.weight"], weights.get("text_projection.bias")
    projection = nn.Linear(*weight.shape[::-1], bias=bias is not None)
    with torch.no_grad():
        projection.weight.copy_(weight)
        if bias is not None:
            projection.bias.copy_(bias)
    if not text.causal:  # SigLIP's is the model's head
        for kind, values in (("weight", weight), ("bias", bias)):
            put(f"head.{kind}", values)
        projection = nn.Identity()
    assert not names, names
    return Pooled(model), projection
