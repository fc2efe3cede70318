"""The two towers: equal to transformers' and timm's; sizes; what is frozen and counted."""

import pickle
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from timm.models.vision_transformer import VisionTransformer
from transformers import SiglipTextConfig, SiglipTextModel

from features.image_text.config import DEFAULTS, TEXT_MODELS, ImageTextConfig
from features.image_text.model import add_to
from models.config import ModelError
from models.registry import open_model
from tests.fakes.filled import filled
from tests.references.text_towers import text_tower
from training.config import RunConfig
from training.step_sizes import state_bytes, step_sizes

SMALL = {"img_size": 16, "patch_size": 8, "embed_dim": 24, "depth": 2, "num_heads": 2}
TEXT = {"text_depth": 3, "text_width": 20, "text_heads": 2, "text_length": 7}


def flags(objective, **changes):
    """Those of a small text tower."""
    defaults = DEFAULTS[objective]
    published = TEXT_MODELS[defaults["text_model"]]
    chosen = defaults | published | TEXT | {"text_vocab_size": 50} | changes
    return ImageTextConfig(**chosen)


def small(objective, model="timm/vit_base_patch16_siglip_224", **changes):
    spec = open_model(model, SMALL)
    return add_to(spec, flags(objective, **changes), objective)


def random_model(spec):
    """With weights of which all matter."""
    model = filled(spec).eval()
    torch.manual_seed(1)
    for parameter in model.parameters():
        parameter.data.add_(0.1 * torch.randn(parameter.shape))
    return model


@pytest.mark.parametrize("objective", ["siglip", "clip"])
def test_text_tower_is_transformers(objective):
    spec = small(objective)
    model = random_model(spec)
    theirs, projection = text_tower(spec.config.text, model.state_dict())
    tokens = torch.randint(50, (5, 7))
    with torch.no_grad():
        expected = F.normalize(projection(theirs(tokens)), dim=-1)
        found = model((torch.zeros(5, 3, 16, 16), tokens.int())).texts
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("objective", "name"),
    [("siglip", "timm/vit_base_patch16_siglip_224"), ("clip", "timm/vit_base_patch32_clip_224")],
)
def test_image_tower_is_timms(objective, name):
    spec = small(objective, name, projection_dim=24 if objective == "siglip" else 12)
    model = random_model(spec)
    plain = VisionTransformer(**spec.arguments | {"num_classes": 0}).eval()
    names = plain.state_dict().keys()
    plain.load_state_dict({n: v for n, v in model.state_dict().items() if n in names})
    images = torch.randn(3, 3, 16, 16)
    with torch.no_grad():
        pooled = plain(images)
        if objective == "clip":
            pooled = pooled @ model.image_projection.weight.T
        found = model((images, torch.zeros(3, 7, dtype=torch.int32)))
        torch.testing.assert_close(found.images, F.normalize(pooled, dim=-1), rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(model(images), plain(images))  # features of images alone


@pytest.mark.parametrize("native", [False, True])
def test_another_process_gets_the_same_spec(native):
    sequences = {"native_resolution": True, "token_budget": 12} if native else {}
    image = open_model("timm/vit_base_patch16_siglip_224", SMALL | sequences)
    spec = add_to(image, flags("siglip"), "siglip")
    there = pickle.loads(pickle.dumps(spec))
    assert there.settings == spec.settings
    assert there.parameter_count == spec.parameter_count
    assert there.runs == spec.runs


def test_texts_of_sequences_are_counted():
    """For an image of the model's size as much as with images alone, and a text for each place."""
    name = "timm/vit_base_patch16_siglip_224"
    more = {"native_resolution": True, "token_budget": 12, "max_images_per_sequence": 5}
    sizes = SMALL | {"num_classes": 1}  # the head of images alone costs next to nothing
    one, spec = (
        add_to(open_model(name, sizes | each), flags("siglip"), "siglip") for each in ({}, more)
    )
    image, text = spec.runs
    of_text = one.train_flops_per_image - one.image.train_flops_per_image
    expected = spec.image.train_flops_per_image + of_text * 12 / spec.sizes.num_patches
    assert spec.train_flops_per_image == pytest.approx(expected, rel=1e-3)
    assert (image.sequences, text.sequences, text.tokens) == (1, 5, 7)


def test_pooling():
    tokens = torch.tensor([[3, 49, 4, 49, 1, 1, 1], [1, 2, 3, 4, 5, 6, 7]], dtype=torch.int32)
    models = {pool: random_model(small("siglip", text_pool=pool)) for pool in ("argmax", "last")}
    x = torch.randn(2, 7, 20)
    for model in models.values():
        model.text_embed.forward = lambda _: x
        model.text_blocks, model.text_norm = torch.nn.Identity(), torch.nn.Identity()
        model.text_pos_embed.data.zero_()
    assert torch.equal(models["argmax"].pooled_text(tokens), torch.stack([x[0, 1], x[1, 6]]))
    assert torch.equal(models["last"].pooled_text(tokens), x[:, -1])
    for pool, expected in (("first", x[:, 0]), ("mean", x.mean(1))):
        models["last"].text_pool = pool
        assert torch.equal(models["last"].pooled_text(tokens), expected)


def test_scale_is_limited_and_can_shrink_again():
    model = random_model(small("clip", logit_scale_init=200.0))
    model.logit_scale.data.fill_(5.3)
    found = model((torch.zeros(2, 3, 16, 16), torch.zeros(2, 7, dtype=torch.int32)))
    assert found.scale.tolist() == pytest.approx([100.0, 100.0])
    (gradient,) = torch.autograd.grad(found.scale.sum(), model.logit_scale)
    assert gradient.item() > 0


def test_sizes_of_published_towers():
    """CLIP's text towers have 63.4 and 123.7 million parameters, with their projections; the
    defaults of transformers' SiglipTextConfig are those of B/16."""

    def text_parameters(name, objective):
        config = ImageTextConfig(**DEFAULTS[objective] | TEXT_MODELS[name])
        spec = add_to(open_model("timm/vit_base_patch16_siglip_224", {}), config, objective)
        named = spec.meta.named_parameters()
        return sum(p.numel() for n, p in named if n.startswith("text_"))

    assert text_parameters("clip_base", "clip") == 63_428_096
    assert text_parameters("clip_large", "clip") == 123_650_304
    with torch.device("meta"):
        theirs = SiglipTextModel(SiglipTextConfig())
    expected = sum(parameter.numel() for parameter in theirs.parameters())
    assert text_parameters("siglip_base", "siglip") == expected
    vocabulary = (256_000 - 32_000) * 768
    assert text_parameters("siglip2_base", "siglip") == expected + vocabulary
    # Of H/14 and bigG/14, in millions: open_clip's docs/model_profile.csv.
    assert round(text_parameters("openclip_huge", "clip") / 1e6, 2) == 354.03
    assert round(text_parameters("openclip_gigantic", "clip") / 1e6, 2) == 694.66


def test_both_towers_are_counted():
    spec = small("siglip")
    image, text = spec.runs
    assert (image.stack, text.stack) == ("blocks", "text_blocks")
    assert text.tokens == 7
    alone = open_model(spec.name, SMALL)
    # A block's products, forward and twice backward, of texts of 7 tokens.
    block = 3 * 2 * 7 * (20 * 60 + 20 * 20 + 2 * 20 * 80 + 2 * 7 * 20)
    head = 3 * 2 * 20 * 24
    of_head = 3 * 2 * 24 * alone.sizes.num_classes  # of the classifier, which pairs have not
    more = spec.train_flops_per_image - alone.train_flops_per_image
    assert more == 3 * block + head - of_head


def test_locked_towers():
    of_image = {
        n for n, _ in open_model("timm/vit_base_patch16_siglip_224", SMALL).meta.named_parameters()
    }
    of_image -= {"head.weight", "head.bias"}
    spec = small("siglip")
    assert not spec.frozen
    locked = small("siglip", lock_image=True)
    assert set(locked.frozen) == of_image
    assert locked.train_flops_per_image < spec.train_flops_per_image
    other = small("clip", lock_text=True)
    assert {name.split(".")[0] for name in other.frozen} == {
        *("text_embed", "text_pos_embed", "text_blocks", "text_norm")
    }


@pytest.mark.parametrize("locked", [None, "lock_image", "lock_text"])
@pytest.mark.parametrize("objective", ["siglip", "clip"])
def test_estimates_count_what_is_trained(locked, objective):
    """The parameters with gradients and moments; of a locked tower only its weights."""
    spec = small(objective, **{locked: True} if locked else {})
    count = {name: p.numel() for name, p in spec.meta.named_parameters()}
    frozen = sum(count[name] for name in spec.frozen)
    assert (frozen > 0) == (locked is not None)
    sizes = step_sizes(spec)
    trained = [each for each in sizes if each.learns]
    assert sum(each.state_parameters for each in trained) == sum(count.values()) - frozen
    assert sum(each.state_parameters for each in sizes) == sum(count.values())
    assert sum(each.train_flops for each in trained) == spec.train_flops_per_image
    config, model_only = RunConfig(), 4
    assert state_bytes(config) == model_only + 2 * 4
    assert state_bytes(config, trains=False) == model_only


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"text_heads": 3}, "text_width 20 is not a multiple of text_heads 3"),
        ({"text_mlp_ratio": 0.01}, "gives an MLP of width 0"),
    ],
)
def test_impossible_sizes(changes, text):
    with pytest.raises(ModelError, match=text):
        small("siglip", **changes)


def test_other_models_are_refused():
    for name in ("timm/eva02_small_patch14_224", "hybrid_vit"):
        with pytest.raises(ModelError, match="requires a VisionTransformer model of timm"):
            add_to(open_model(name, {}), flags("siglip"), "siglip")


def test_texts_of_the_settings():
    """What a checkpoint's weights mean differs with these; not with what training alone needs."""
    spec, other = small("siglip"), small("siglip", text_pool="first", logit_scale_init=3.0)
    assert other.differences(spec.settings) == ["text_pool"]
    assert replace(spec.config, lock_image=True).text == spec.config.text
