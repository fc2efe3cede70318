"""Prints, as JSON, how far the logits of benchmarks/tpu_peer_step.py are from timm's."""

import json
import os

os.environ["JAX_PLATFORMS"] = "cpu"

import jax
import jax.numpy as jnp
import numpy as np
import torch

from benchmarks.tpu_peer_step import AXIS, Step
from models.registry import open_model
from tests.stand_ins.filled import filled


def weights_of(state, depth, class_token):
    """Return timm's weights under the peer's names; products there are x @ weight."""

    def stacked(name, make):
        return np.stack([make(f"blocks.{i}.{name}") for i in range(depth)])

    def norm(name):
        return np.stack([state[f"{name}.weight"], state[f"{name}.bias"]])

    found = {"norm": norm("norm"), "head": state["head.weight"].T, "head_bias": state["head.bias"]}
    kernel = state["patch_embed.proj.weight"]
    found |= {
        "patch": kernel.reshape(len(kernel), -1).T,
        "patch_bias": state["patch_embed.proj.bias"],
    }
    found["positions"] = state["pos_embed"][0]
    if class_token:
        found["class_token"] = state["cls_token"][0]
    for own, name in (
        ("qkv", "attn.qkv"),
        ("proj", "attn.proj"),
        ("fc1", "mlp.fc1"),
        ("fc2", "mlp.fc2"),
    ):
        found[f"blocks.{own}"] = stacked(f"{name}.weight", lambda key: state[key].T)
        found[f"blocks.{own}_bias"] = stacked(f"{name}.bias", lambda key: state[key])
    for name in ("norm1", "norm2"):
        found[f"blocks.{name}"] = stacked(name, norm)
    return {key: jnp.asarray(value) for key, value in found.items()}


def error(name):
    sizes = {
        "img_size": 32,
        "depth": 2,
        "embed_dim": 64,
        "num_heads": 2,
        "num_classes": 10,
        "patch_size": 8,
    }
    spec = open_model(name, sizes)
    model = filled(spec).eval()
    images = torch.randn(3, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    mesh = jax.sharding.Mesh(np.array(jax.devices("cpu")[:1]), (AXIS,))
    step = Step(spec, mesh, 3, jnp.float32, jnp.float32)
    state = {key: value.numpy() for key, value in model.state_dict().items()}
    weights = weights_of(state, 2, "cls_token" in state)
    assert {key: value.shape for key, value in weights.items()} == step.shapes()
    found = np.asarray(jax.jit(step.logits)(weights, images.numpy()), np.float32)
    with torch.no_grad():
        wanted = model(images).numpy()
    return float(np.abs(found - wanted).max() / np.abs(wanted).max())


if __name__ == "__main__":
    print(json.dumps([error(name) for name in ("vit_tiny_patch16_224", "vit_10b")]))
