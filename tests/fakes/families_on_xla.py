"""Prints, as JSON, how far models on XLA are from the same on the CPU, by family and form.

Forms: blocks scanned, or one after the other and recomputed in the backward pass.
"""

import copy
import json
import sys
from statistics import fmean

import torch
import torch_xla
import torch_xla.core.xla_model as xm
from torch import nn
from torch_xla.distributed.fsdp import checkpoint_module

from models.initialize import fill_buffers
from models.registry import open_model
from models.spec import ModelSpec
from tests.fakes.filled import SMALL
from tests.fakes.scan_on_xla import scanned
from tools.self_check.small_run import first_weights
from tpu_attention import flash
from xla_fsdp.around_blocks import compute_in_bf16
from xla_fsdp.attention.kernel_calls import ONE_DEVICE

NAMES = {
    "plain": "vit_base_patch16_224",
    "AIMv2": "aimv2_large_patch14_224",
    "parallel MLP": "vit_base_patch16_xp_224",
    "EVA02": "eva02_base_patch14_224",
    "Perception Encoder": "vit_pe_core_base_patch16_224",
    "RoPE, mixed": "vit_small_patch16_rope_mixed_224",
    "DINOv3": "vit_7b_patch16_dinov3",
}
Tensors = dict[str, torch.Tensor]


def filled(spec: ModelSpec) -> nn.Module:
    """On the CPU, with values of which all matter."""
    model = spec.build()
    first_weights(0, model, "")
    fill_buffers(model)
    return model


def on_xla(spec: ModelSpec, plain: nn.Module, form: str, bf16: bool) -> nn.Module:
    model = copy.deepcopy(plain)
    if form == "scanned":
        spec.put_blocks(model, "blocks", scanned(model.blocks, bf16))
    elif form == "checkpointed":
        for block in model.blocks:
            checkpoint_module(block)
    model.to("xla")
    if bf16:
        compute_in_bf16(model)
    return model


def run(model: nn.Module, images: torch.Tensor, device: str) -> Tensors:
    """Logits, and the gradient of each parameter by its name in the plain model."""
    xm.set_rng_state(1)
    model.zero_grad()
    logits = model(images.to(device))
    logits.float().square().mean().backward()
    found = {"logits": logits.detach()}
    for name, parameter in model.named_parameters():
        grad = parameter.grad
        if name.startswith("blocks.block."):
            own = name.removeprefix("blocks.block.")
            found |= {f"blocks.{i}.{own}": part for i, part in enumerate(grad)}
        else:
            found[name] = grad
    torch_xla.sync()
    return {name: tensor.cpu().float() for name, tensor in found.items()}


def distances(found: Tensors, expected: Tensors) -> list[float]:
    """The largest error in each tensor, relative to the largest value in it."""
    assert found.keys() == expected.keys()
    return [
        ((found[name] - each).abs().max() / (each.abs().max() + 1e-6)).item()
        for name, each in expected.items()
    ]


def compare(name: str) -> dict[str, float]:
    spec = open_model(f"timm/{name}", SMALL)
    plain = filled(spec)
    torch.manual_seed(0)
    images = torch.randn(2, *spec.sizes.input_shape)
    expected = run(plain, images, "cpu")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        expected_bf16 = run(plain, images, "cpu")
    found = {"bf16 on the CPU": fmean(distances(expected_bf16, expected))}
    for form in ("scanned", "checkpointed"):
        result = run(on_xla(spec, plain, form, False), images, "xla")
        found[form] = max(distances(result, expected))
    result = run(on_xla(spec, plain, "scanned", True), images, "xla")
    found["scanned, bf16"] = fmean(distances(result, expected))
    return found


def dropped_patches(name: str) -> dict[str, float]:
    """Scanned blocks beside others: the same patches are dropped, as the mask is drawn first."""
    spec = open_model(f"timm/{name}", SMALL | {"patch_drop_rate": 0.4})
    plain = filled(spec)
    images = torch.randn(2, *spec.sizes.input_shape)
    found = [run(on_xla(spec, plain, form, False), images, "xla") for form in ("scanned", "")]
    return {"dropped patches": max(distances(*found))}


def calls_of_flash(name: str) -> int:
    """How often a block's forward pass asks for flash attention, computed here by PyTorch."""
    spec = open_model(f"timm/{name}", SMALL)
    model = filled(spec)
    images = torch.randn(2, *spec.sizes.input_shape)
    model.eval()
    expected, shapes = model(images), []

    def attention(q, k, v, calls):
        shapes.append(q.shape)
        return torch.softmax(q @ k.mT * q.shape[-1] ** -0.5, -1) @ v

    flash.attention = attention
    for block in model.blocks:
        flash.use_flash(block, ONE_DEVICE)
    torch.testing.assert_close(model(images), expected, rtol=1e-4, atol=1e-5)
    assert set(shapes) == {(2, 2, spec.sizes.num_tokens, spec.sizes.head_dim)}
    return len(shapes)


def main() -> None:
    torch_xla.device()
    found = {}
    for family in sys.argv[1:]:
        name = NAMES[family]
        found[family] = compare(name) | {"flash": calls_of_flash(name)}
        if family in ("DINOv3", "RoPE, mixed"):  # whose tables of angles lose rows with them
            found[family] |= dropped_patches(name)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
