"""HybridViT: its size, its logits by a model written again, its first weights, its facts."""

import pickle

import pytest
import torch

from models.config import ModelError
from models.registry import list_models, open_model
from tests.fakes.filled import filled
from tests.references.plain_hybrid_vit import PlainHybridViT, random_hybrid_vit
from training.weights.names import physicsnemo_names, timm_names

pytestmark = pytest.mark.fast

NAME = "hybrid_vit"
IMAGES = {"img_size": (32, 48), "patch_size": 8, "in_chans": 3}
VOLUMES = {"dimension": 3, "img_size": (8, 16, 12), "patch_size": 4, "in_chans": 1}
SMALL = {"embed_dim": 48, "num_heads": 4, "depth": 3, "num_classes": 7, "mlp_ratio": 2.5}
WIDTH, DEPTH, HEADS, HIDDEN, CLASSES = 48, 3, 4, 120, 7


def small(sizes):
    return open_model(NAME, SMALL | sizes)


def test_as_published():
    spec = open_model(NAME, {})
    assert spec.parameter_count == 126_907_624
    assert spec.sizes.input_shape == (3, 1024, 1024)
    assert (spec.sizes.depth, spec.sizes.embed_dim, spec.sizes.num_heads) == (16, 768, 6)
    assert [each.parameters for each in list_models(NAME)] == [126_907_624]


def plain_sizes(sizes):
    given = (sizes[name] for name in ("img_size", "patch_size", "in_chans"))
    return (*given, WIDTH, DEPTH, HEADS, HIDDEN, CLASSES)


@pytest.mark.parametrize("sizes", [IMAGES, VOLUMES])
def test_logits_and_gradients(sizes):
    plain, model = random_hybrid_vit(*plain_sizes(sizes)), filled(small(sizes))
    ours, _ = timm_names(plain.state_dict())
    values = {name: plain.state_dict()[theirs] for name, (theirs,) in ours.items()}
    model.load_state_dict(values)
    assert physicsnemo_names(values) == {name: theirs for name, (theirs,) in ours.items()}
    images = torch.randn(2, sizes["in_chans"], *sizes["img_size"])
    expected, found = plain(images), model(images)
    assert expected.std() > 0.05
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    assert sum(p.numel() for p in plain.parameters()) == small(sizes).parameter_count
    wanted, got = (
        torch.autograd.grad(logits.square().sum(), each.pos_embed)[0]
        for logits, each in ((expected, plain), (found, model))
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
def test_first_weights_of_the_tutorial(sizes, uninitialized_memory_is_nan):
    """Positions are zero; of the others each has the spread of PyTorch's own first weights."""
    torch.manual_seed(0)
    plain = PlainHybridViT(*plain_sizes(sizes)).state_dict()
    found = filled(open_model(NAME, SMALL | sizes | {"weight_init": "reset"})).state_dict()
    assert not found["pos_embed"].any()
    for name, theirs in physicsnemo_names(found).items():
        expected = plain[theirs]
        assert found[name].isfinite().all(), name
        if expected.numel() > 1000 and name != "pos_embed":
            for of in (torch.std, lambda values: values.abs().max()):
                assert of(found[name]).item() == pytest.approx(of(expected).item(), rel=0.1), name
    with pytest.raises(ModelError, match="hybrid_vit accepts weight_init '' and reset"):
        open_model(NAME, {"weight_init": "jax"})


@pytest.mark.parametrize(
    "names",
    [
        ["pos_embed", "cls_token"],
        ["patch_embed.proj.weight", "pos_embed", "blocks.0.norm1.weight", "head.weight"],
        ["patch_embed.norm.weight", "blocks.0.ls1.gamma"],
    ],
)
def test_names_of_another_model(names):
    with pytest.raises(ValueError, match="a HybridViT has"):
        physicsnemo_names(names)


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
