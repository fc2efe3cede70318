"""Weights of public image-text models: the same logits as transformers, read and written; what files
say of the model wins, or contradicting flags are refused."""

import json
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModel,
    CLIPConfig,
    CLIPModel,
    Siglip2Config,
    Siglip2Model,
    SiglipConfig,
    SiglipModel,
)

from tests.support.two_towers import configured, drawn, loaded, logits, randomize
from training.errors import UsageError

NARROW = 8
"""Towers are as much narrower than the published ones."""


def siglip(width, depth, heads, hidden, patch, size, length=64, text=None, **more):
    """The configuration of a public model, with two blocks and few tokens."""
    del depth

    def tower(width, heads, hidden):
        return {
            "hidden_size": width // NARROW,
            "intermediate_size": hidden // NARROW,
            "num_hidden_layers": 2,
            "num_attention_heads": heads // 2,
        }

    image = tower(width, heads, hidden) | {"patch_size": patch, "image_size": size} | more
    texts = tower(*(text or (width, heads, hidden)))
    texts |= {"vocab_size": 90, "max_position_embeddings": length}
    texts["projection_size"] = width // NARROW
    return SiglipConfig(vision_config=image, text_config=texts)


def clip(width, heads, patch, size, text_width, text_heads, act="quick_gelu"):
    image = {"hidden_size": width // NARROW, "intermediate_size": width // 2, "hidden_act": act}
    image |= {"num_hidden_layers": 2, "num_attention_heads": heads // 4}
    image |= {"patch_size": patch, "image_size": size}
    text = {"hidden_size": text_width // NARROW, "intermediate_size": text_width // 2}
    text |= {"num_hidden_layers": 2, "num_attention_heads": text_heads // 4, "hidden_act": act}
    text |= {"vocab_size": 90, "eos_token_id": 2}
    return CLIPConfig(vision_config=image, text_config=text, projection_dim=text_width // NARROW)


ARCHITECTURES = {
    "siglip B/16": siglip(768, 12, 12, 3072, 16, 64),
    "siglip L/16": siglip(1024, 24, 16, 4096, 16, 64),
    "siglip So400m/14": siglip(1152, 27, 16, 4304, 14, 64, length=16),  # a rest of 8 pixels
    "siglip2 So400m/16": siglip(1152, 27, 16, 4304, 16, 64),
    "siglip2 giant/16": siglip(1536, 40, 16, 6144, 16, 64, text=(1152, 16, 4304)),
    "clip B/32": clip(768, 12, 32, 64, 512, 8),
    "clip B/16": clip(768, 12, 16, 64, 512, 8),
    "clip L/14": clip(1024, 16, 14, 56, 768, 12),
    "openclip H/14": clip(1280, 16, 14, 56, 1024, 16, act="gelu"),
}


def of_transformers(config):
    kind = CLIPModel if isinstance(config, CLIPConfig) else SiglipModel
    config._attn_implementation = "eager"
    return randomize(kind(config))


def objective(config):
    return ["--objective", "clip" if isinstance(config, CLIPConfig) else "siglip"]


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_logits_are_transformers(name, tmp_path):
    config = ARCHITECTURES[name]
    theirs = of_transformers(config)
    theirs.save_pretrained(tmp_path)
    spec, model, adapter = loaded(tmp_path, *objective(config))
    images, tokens = drawn(spec)
    with torch.no_grad():
        expected = theirs(input_ids=tokens, pixel_values=padded(images, config)).logits_per_image
    torch.testing.assert_close(logits(model, images, tokens), expected, rtol=1e-5, atol=1e-5)
    assert expected.std() > 0.05
    assert "new" not in adapter.note
    assert "dropped" not in adapter.note


def padded(images, config):
    """Images with the pixels at their ends that are no whole patch."""
    more = config.vision_config.image_size - images.shape[-1]
    return torch.nn.functional.pad(images, (0, more, 0, more), value=7.0)
