"""HybridViT: its size, its logits by a model written again, its first weights, its facts."""

import pickle

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from models.registry import list_models, open_model
from tests.fakes.filled import filled

pytestmark = pytest.mark.fast

NAME = "hybrid_vit"
IMAGES = {"img_size": (32, 48), "patch_size": 8, "in_chans": 3}
VOLUMES = {"dimension": 3, "img_size": (8, 16, 12), "patch_size": 4, "in_chans": 1}
SMALL = {"embed_dim": 48, "num_heads": 4, "depth": 3, "num_classes": 7, "mlp_ratio": 2.5}
WIDTH, DEPTH, HIDDEN, CLASSES = 48, 3, 120, 7


class Plain(nn.Module):
    """The same again, of PyTorch's own parts: attention is nn.MultiheadAttention."""

    def __init__(self, values):
        super().__init__()
        weight = values["patch_embed.proj.weight"]
        convolution = {4: nn.Conv2d, 5: nn.Conv3d}[weight.dim()]
        side = weight.shape[-1]
        self.stem = convolution(weight.shape[1], WIDTH, side, stride=side)
        self.stem_norm = nn.LayerNorm(WIDTH)
        self.positions = nn.Parameter(values["pos_embed"])
        self.head = nn.Linear(WIDTH, CLASSES)
        parts = {"stem": "patch_embed.proj", "stem_norm": "patch_embed.norm", "head": "head"}
        for index in range(DEPTH):
            names = {"norm1": "norm1", "norm2": "norm2", "up": "mlp.fc1", "down": "mlp.fc2"}
            made = (nn.LayerNorm(WIDTH, eps=1e-5), nn.LayerNorm(WIDTH, eps=1e-5))
            made += (nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH))
            for (own, its), module in zip(names.items(), made, strict=True):
                self.add_module(f"{own}_{index}", module)
                parts[f"{own}_{index}"] = f"blocks.{index}.{its}"
            attention = nn.MultiheadAttention(WIDTH, 4, batch_first=True)
            attention.load_state_dict(
                {
                    "in_proj_weight": values[f"blocks.{index}.attn.qkv.weight"],
                    "in_proj_bias": values[f"blocks.{index}.attn.qkv.bias"],
                    "out_proj.weight": values[f"blocks.{index}.attn.proj.weight"],
                    "out_proj.bias": values[f"blocks.{index}.attn.proj.bias"],
                }
            )
            self.add_module(f"attention_{index}", attention)
        for own, its in parts.items():
            module = self.get_submodule(own)
            module.load_state_dict({key: values[f"{its}.{key}"] for key in ("weight", "bias")})

    def forward(self, images):
        tokens = self.stem(images).flatten(2).mT
        tokens = F.relu(self.stem_norm(tokens)) + self.positions
        for index in range(DEPTH):
            attention, norm1, norm2, up, down = (
                self.get_submodule(f"{name}_{index}")
                for name in ("attention", "norm1", "norm2", "up", "down")
            )
            normed = norm1(tokens)
            tokens = tokens + attention(normed, normed, normed, need_weights=False)[0]
            tokens = tokens + down(F.gelu(up(norm2(tokens))))
        return self.head(tokens.mean(dim=1))


def small(sizes):
    return open_model(NAME, SMALL | sizes)


def test_as_published():
    spec = open_model(NAME, {})
    assert spec.parameter_count == 126_907_624
    assert spec.sizes.input_shape == (3, 1024, 1024)
    assert (spec.sizes.depth, spec.sizes.embed_dim, spec.sizes.num_heads) == (16, 768, 6)
    assert [each.parameters for each in list_models(NAME)] == [126_907_624]


@pytest.mark.parametrize("sizes", [IMAGES, VOLUMES])
def test_logits_and_gradients(sizes):
    model = filled(small(sizes))
    with torch.no_grad():
        for parameter in model.parameters():  # so that every one of them matters
            parameter.add_(0.1 * torch.randn_like(parameter))
    values = {name: value.detach().clone() for name, value in model.state_dict().items()}
    plain = Plain(values)
    images = torch.randn(2, sizes["in_chans"], *sizes["img_size"])
    expected, found = plain(images), model(images)
    assert expected.std() > 0.05
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    assert sum(p.numel() for p in plain.parameters()) == small(sizes).parameter_count
    wanted, got = (
        torch.autograd.grad(logits.square().sum(), positions)[0]
        for logits, positions in ((expected, plain.positions), (found, model.pos_embed))
    )
    torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("sizes", [IMAGES, VOLUMES])
def test_first_weights(sizes, uninitialized_memory_is_nan):
    spec = small(sizes)
    first, second = filled(spec).state_dict(), spec.build()
    for name, unit in reversed(list(spec.units(second))):
        spec.initialize(unit, name, seed=0)
    other = filled(spec, seed=1).state_dict()
    for name, value in second.state_dict().items():
        assert value.isfinite().all(), name
        assert torch.equal(value, first[name]), name
        if value.dim() > 1:
            assert not torch.equal(value, other[name]), name
    assert first["pos_embed"].std().item() == pytest.approx(0.02, rel=0.15)
    same = [first[f"blocks.{index}.mlp.fc1.weight"] for index in range(2)]
    assert not torch.equal(*same)


@pytest.mark.parametrize("sizes", [IMAGES, VOLUMES])
def test_facts(sizes):
    spec = small(sizes)
    there = pickle.loads(pickle.dumps(spec))
    assert (there.name, there.sizes, there.settings) == (spec.name, spec.sizes, spec.settings)
    patch, channels, size = sizes["patch_size"], sizes["in_chans"], sizes["img_size"]
    grid = tuple(side // patch for side in size)
    assert spec.sizes.grid == grid
    tokens = spec.sizes.num_tokens
    assert tokens == spec.sizes.train_tokens == torch.Size(grid).numel()
    assert spec.sizes.hidden == HIDDEN
    assert spec.why_blocks_differ() is None
    # Two operations a multiply-add, backward twice the forward; the images want no gradient.
    stem = tokens * channels * patch ** len(size) * WIDTH
    block = tokens * (4 * WIDTH**2 + 2 * WIDTH * HIDDEN) + 2 * tokens**2 * WIDTH
    head = WIDTH * CLASSES
    expected = 2 * (2 * stem + 3 * DEPTH * block + 3 * head)
    assert spec.train_flops_per_image == expected
