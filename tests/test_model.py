"""The model against timm: sizes, names, logits, initial weights, FLOPs."""

from dataclasses import replace

import pytest
import timm
import torch
from torch.utils.flop_counter import FlopCounterMode

from models.config import PRESETS
from models.vit import (
    build_vit,
    fsdp_units,
    initialize_module,
    parameter_count,
    train_flops_per_image,
)

TIMM_NAMES = [name for name in PRESETS if name.endswith("_224")]
SMALL = replace(PRESETS["vit_10b"], img_size=28, embed_dim=32, depth=2, num_heads=2, num_classes=7)


def initialize(model, seed=0, **options):
    for name, unit in fsdp_units(model):
        initialize_module(unit, name, seed=seed, num_classes=model.num_classes, **options)
    return model


def test_ten_billion_has_exactly_the_parameters_of_system_a():
    assert parameter_count(PRESETS["vit_10b"]) == 10_077_917_160


@pytest.mark.parametrize(("name", "billions"), [("vit_60b", 60), ("vit_120b", 120)])
def test_large_presets_are_what_they_say(name, billions):
    assert parameter_count(PRESETS[name]) == pytest.approx(billions * 1e9, rel=0.02)


@pytest.mark.parametrize("name", TIMM_NAMES)
def test_names_and_shapes_are_timms(name):
    with torch.device("meta"):
        reference = timm.create_model(name, num_classes=1000).state_dict()
    state = build_vit(PRESETS[name]).state_dict()
    assert {k: v.shape for k, v in state.items()} == {k: v.shape for k, v in reference.items()}


@pytest.mark.parametrize("name", ["vit_tiny_patch16_224", "vit_base_patch16_224"])
def test_timms_state_dict_gives_timms_logits(name):
    torch.manual_seed(0)
    reference = timm.create_model(name).eval()
    model = build_vit(PRESETS[name], device="cpu").eval()
    model.load_state_dict(reference.state_dict(), strict=True)
    images = torch.randn(2, 3, 224, 224)
    with torch.no_grad():
        torch.testing.assert_close(model(images), reference(images), rtol=1e-5, atol=1e-5)


OPTIONS = [
    {"class_token": True, "global_pool": "token"},
    {"global_pool": "map"},
    {"global_pool": "map", "weight_init": "reset"},
    {"global_pool": "max", "reg_tokens": 4, "class_token": True, "no_embed_class": True},
    {"global_pool": "avgmax", "reg_tokens": 2, "pool_include_prefix": True},
    {"qk_norm": True, "init_values": 1e-5, "scale_attn_norm": True, "scale_mlp_norm": True},
    {"qkv_bias": False, "proj_bias": False, "pre_norm": True, "final_norm": False},
    {"fc_norm": True, "pos_embed": "none", "in_chans": 1, "mlp_ratio": 2.5},
    {"drop_rate": 0.1, "pos_drop_rate": 0.1, "patch_drop_rate": 0.25, "proj_drop_rate": 0.1},
    {"attn_drop_rate": 0.1, "drop_path_rate": 0.1, "weight_init": "jax"},
    {"weight_init": "jax_nlhb"},
    {"weight_init": "moco"},
]


@pytest.fixture
def uninitialized_memory_is_nan():
    """Whatever initialisation leaves out shows up as NaN."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("options", OPTIONS, ids=lambda o: ",".join(o))
def test_every_option_builds_fills_and_trains(options, uninitialized_memory_is_nan):
    config = replace(SMALL, **options)
    model = build_vit(config)
    initialize(model, weight_init=config.weight_init)
    for name, parameter in model.named_parameters():
        assert parameter.device.type == "cpu", name
        assert parameter.isfinite().all(), name
    logits = model(torch.randn(2, config.in_chans, 28, 28))
    assert logits.shape == (2, 7)
    logits.sum().backward()
    assert all(p.grad is not None for p in model.parameters())


def test_initial_weights_have_timms_statistics():
    torch.manual_seed(0)
    name = "vit_tiny_patch16_224"
    reference = dict(timm.create_model(name).named_parameters())
    for key, value in initialize(build_vit(PRESETS[name])).named_parameters():
        expected = reference[key]
        assert value.mean().item() == pytest.approx(expected.mean().item(), abs=5e-3), key
        if expected.numel() > 1 and expected.std() > 1e-8:
            assert value.std().item() == pytest.approx(expected.std().item(), rel=0.15), key


def test_weights_depend_on_seed_and_name_alone():
    torch.manual_seed(1)
    before = torch.get_rng_state()
    first = initialize(build_vit(SMALL)).state_dict()
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(2)
    units = list(fsdp_units(second := build_vit(SMALL)))
    for name, unit in units[1::-1] + units[2:]:  # another order of blocks
        initialize_module(unit, name, seed=0, num_classes=7)
    for key, value in second.state_dict().items():
        assert torch.equal(value, first[key]), key
    other = initialize(build_vit(SMALL), seed=1).state_dict()
    assert not torch.equal(other["head.weight"], first["head.weight"])
    assert not torch.equal(first["blocks.0.attn.qkv.weight"], first["blocks.1.attn.qkv.weight"])


@pytest.mark.parametrize(
    "config",
    [
        PRESETS["vit_tiny_patch16_224"],
        SMALL,
        replace(SMALL, global_pool="map"),
        replace(SMALL, reg_tokens=3, class_token=True, mlp_ratio=2.5),
        replace(SMALL, img_size=70, patch_drop_rate=0.3, class_token=True),
        replace(SMALL, img_size=70, patch_drop_rate=0.95, global_pool="map"),
        replace(PRESETS["vit_10b"], depth=2),
    ],
)
def test_flops_are_what_pytorch_counts(config):
    model = build_vit(config)
    images = torch.empty(1, config.in_chans, config.img_size, config.img_size, device="meta")
    with FlopCounterMode(display=False) as counter:
        model(images).sum().backward()
    assert train_flops_per_image(config) == pytest.approx(counter.get_total_flops(), rel=1e-3)
