"""Images packed into sequences, against timm's NaFlexVit on each image alone."""

import pytest
import timm
import torch
from timm.models.naflexvit import NaFlexVit, batch_patchify, checkpoint_filter_fn

from models.config import ModelError
from models.registry import open_model
from run_vit_training import read_flags
from training.resolve import model_of

pytestmark = pytest.mark.fast

GRIDS = [(3, 5), (16, 1), (1, 7), (14, 2), (4, 4), (1, 1)]
TOKENS, PLACES = 160, 8
SMALL = {"embed_dim": 64, "depth": 2, "num_heads": 2, "num_classes": 7}
NATIVE = {"native_resolution": True}


def open_small(name, **overrides):
    sequences = {"token_budget": TOKENS, "max_images_per_sequence": PLACES}
    return open_model(name, SMALL | sequences | overrides)


def filled(spec):
    """The model with random weights, none of them as it is initialized."""
    model = spec.build()
    for name, unit in spec.units(model):
        spec.initialize(unit, name, seed=0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * (0.3 if parameter.dim() < 3 else 1))
    return model.eval()


def places_of(grid):
    rows, columns = grid
    row, column = torch.meshgrid(torch.arange(rows), torch.arange(columns), indexing="ij")
    return torch.stack([row.flatten(), column.flatten()], 1)


def patches_of(image, spec):
    return batch_patchify(image[None], spec.shape.patch)[0][0]


def packed(images, grids, spec):
    """One sequence of these images; where there is no patch, noise."""
    prefix = spec.shape.prefix
    patches = torch.randn(1, TOKENS, spec.shape.values_of_patch(3))
    places = torch.zeros(1, TOKENS, 4, dtype=torch.int32)
    segments = torch.zeros(1, TOKENS, dtype=torch.int32)
    end = 0
    for number, (image, grid) in enumerate(zip(images, grids, strict=True), 1):
        start, end = end + prefix, end + prefix + grid[0] * grid[1]
        places[0, start - prefix : start, 0] = torch.arange(prefix)
        places[0, start:end, :2] = places_of(grid)
        places[0, start:end, 2:] = torch.tensor(grid)
        patches[0, start:end] = patches_of(image, spec)
        segments[0, start - prefix : end] = number
    return {"patches": patches, "patch_coord": places, "segment_ids": segments}


def images_of(grids, spec):
    high, wide = spec.shape.patch
    return [torch.randn(3, rows * high, columns * wide) for rows, columns in grids]


@pytest.mark.parametrize(
    ("name", "overrides"),
    [
        ("timm/naflexvit_base_patch16_gap", {}),
        ("timm/naflexvit_base_patch16_par_gap", {}),
        ("timm/naflexvit_base_patch16_parfac_gap", {}),
        ("timm/naflexvit_base_patch16_map", {}),
        ("timm/naflexvit_base_patch16_siglip", {}),
        ("vit_tiny_patch16_224", NATIVE),
        ("vit_tiny_patch16_224", NATIVE | {"global_pool": "max", "class_token": False}),
        (
            "vit_tiny_patch16_224",
            NATIVE | {"global_pool": "avgmax", "reg_tokens": 2, "pool_include_prefix": True},
        ),
        ("timm/deit_tiny_patch16_224", NATIVE),
        ("timm/vit_small_patch16_dinov3", NATIVE),
        ("timm/eva02_tiny_patch14_224", NATIVE),
        ("timm/vit_small_patch16_rope_224", NATIVE),
    ],
)
def test_outputs_and_gradients_are_those_of_each_image_alone(name, overrides):
    spec = open_small(name, **overrides)
    ours = filled(spec)
    theirs = NaFlexVit(**spec.arguments | {"weight_init": ""}).eval()
    theirs.load_state_dict(ours.state_dict())
    images = images_of(GRIDS, spec)
    logits = ours(packed(images, GRIDS, spec))
    assert logits.shape == (PLACES, 7)
    expected = torch.cat(
        [
            theirs(
                patches_of(image, spec)[None],
                places_of(grid)[None],
                torch.ones(1, grid[0] * grid[1], dtype=torch.bool),
            )
            for image, grid in zip(images, GRIDS, strict=True)
        ]
    )
    scale = expected.abs().max().item()
    torch.testing.assert_close(logits[: len(GRIDS)], expected, rtol=1e-5, atol=1e-5 * scale)
    weights = torch.randn_like(expected)
    for of in ((ours, logits[: len(GRIDS)]), (theirs, expected)):
        (of[1] * weights).sum().backward()
    for key, parameter in theirs.named_parameters():
        gradient, largest = ours.get_parameter(key).grad, parameter.grad.abs().max().item()
        torch.testing.assert_close(gradient, parameter.grad, rtol=1e-4, atol=2e-5 * largest + 1e-7)


@pytest.mark.parametrize("global_pool", ["token", "avg", "avgmax", "map"])
def test_neighbours_and_padding_change_nothing(global_pool):
    spec = open_small("vit_tiny_patch16_224", global_pool=global_pool, **NATIVE)
    model, images = filled(spec), images_of(GRIDS, spec)
    first = packed(images, GRIDS, spec)
    others = [
        image if number == 2 else torch.randn_like(image) for number, image in enumerate(images)
    ]
    second = packed(others, GRIDS, spec)
    with torch.no_grad():
        assert model(first)[2].equal(model(second)[2])
        assert not model(first)[0].equal(model(second)[0])


def test_a_sequence_of_padding_gives_no_nan():
    for global_pool in ("token", "avg", "max", "map"):
        spec = open_small("vit_tiny_patch16_224", global_pool=global_pool, **NATIVE)
        model = filled(spec)
        logits = model(packed([], [], spec))
        logits.sum().backward()
        assert logits.isfinite().all()
        assert all(p.grad is None or p.grad.isfinite().all() for p in model.parameters())


@pytest.mark.parametrize(
    "name",
    ["vit_tiny_patch16_224", "timm/vit_base_patch14_reg4_dinov2", "timm/eva02_tiny_patch14_224"],
)
def test_weights_of_plain_models_become_those_of_timms_conversion(name):
    there = timm.create_model(name.removeprefix("timm/"), num_classes=7, device="meta")
    values = {key: torch.randn(x.shape) for key, x in there.state_dict().items()}
    spec = open_model(name, NATIVE | {"num_classes": 7})
    theirs = NaFlexVit(**spec.arguments | {"weight_init": "", "device": "meta"})
    expected = checkpoint_filter_fn({key: x.clone() for key, x in values.items()}, theirs)
    for key in spec.meta.state_dict():
        ours = values.get(key)
        if ours is None:
            ours = spec.convert(key, values[spec.converted[key]], values.get)
        # timm leaves out what the positions of registers are for.
        if key != "embeds.reg_token":
            torch.testing.assert_close(ours, expected[key], rtol=0, atol=0)


def test_flops_are_those_of_images_of_the_models_own_size():
    plain = open_model("vit_tiny_patch16_224", {"global_pool": "avg", "class_token": False})
    native = open_model(
        "vit_tiny_patch16_224",
        {"global_pool": "avg", "class_token": False, "token_budget": 980} | NATIVE,
    )
    # Beside five such images only the positions' products.
    assert native.train_flops_per_image == pytest.approx(5 * plain.train_flops_per_image, rel=0.02)


def test_the_flag_may_be_off():
    for words, segments in (("--no-native_resolution", None), ("--native_resolution", 16)):
        config = read_flags(f"--model vit_tiny_patch16_224 {words}".split()).run
        assert model_of(config).segments == segments


@pytest.mark.parametrize(
    ("name", "overrides", "reason"),
    [
        ("timm/vit_small_patch16_rope_mixed_224", NATIVE, "RotaryEmbeddingMixed"),
        ("timm/naflexvit_base_patch16_radio_v3", {}, "128 x 128 positions"),
        ("timm/naflexvit_base_patch16_gap", {"token_budget": 4}, "leave no room for a patch"),
        ("timm/naflexvit_base_patch16_gap", {"qkv_biases": True}, "does not accept"),
        ("timm/naflexvit_base_patch16_gap", {"native_resolution": False}, "resolution only"),
        ("vit_tiny_patch16_224", {"token_budget": 256}, "does not accept"),
        ("vit_tiny_patch16_224", NATIVE | {"img_size": 100}, "no multiple|not a multiple"),
        ("hybrid_vit", NATIVE, "does not accept"),
        ("timm/resnet50", NATIVE, "not a supported Vision Transformer"),
    ],
)
def test_refused_in_one_line(name, overrides, reason):
    with pytest.raises(ModelError, match=reason) as error:
        open_model(name, overrides)
    assert "\n" not in str(error.value)
