"""The model against timm: sizes, names, logits, initial weights, FLOPs."""

import hashlib

import pytest
import timm
import torch
from timm.layers import trunc_normal_
from torch.utils.flop_counter import FlopCounterMode

from models.config import PRESETS
from models.initialize import allocate_uninitialized
from models.registry import open_model
from tests.fakes.filled import SMALL as SMALL_OF_TIMM
from tests.fakes.filled import filled
from tests.support.marks import long
from xla_fsdp.launch_xla import forbid_autograd

TIMM_NAMES = [name for name in PRESETS if name.endswith("_224")]
SMALL = {"img_size": 28, "embed_dim": 32, "depth": 2, "num_heads": 2, "num_classes": 7}


def small(**options):
    return open_model("vit_10b", SMALL | options)


def test_ten_billion_has_exactly_the_parameters_of_pytorch_xlas_example():
    assert open_model("vit_10b", {}).parameter_count == 10_077_917_160


@pytest.mark.parametrize("name", TIMM_NAMES)
def test_names_and_shapes_are_timms(name):
    with torch.device("meta"):
        reference = timm.create_model(name, num_classes=1000).state_dict()
    state = open_model(name, {}).build().state_dict()
    assert {k: v.shape for k, v in state.items()} == {k: v.shape for k, v in reference.items()}


@pytest.mark.parametrize("name", ["vit_tiny_patch16_224", long("vit_base_patch16_224")])
def test_timms_state_dict_gives_timms_logits(name):
    torch.manual_seed(0)
    reference = timm.create_model(name).eval()
    model = open_model(name, {}).build().to_empty(device="cpu").eval()
    model.load_state_dict(reference.state_dict(), strict=True)
    images = torch.randn(2, 3, 224, 224)
    with torch.no_grad():
        torch.testing.assert_close(model(images), reference(images), rtol=1e-5, atol=1e-5)


OPTIONS = [
    {"class_token": True, "global_pool": "token"},
    {"global_pool": "map"},
    {"global_pool": "max", "reg_tokens": 4, "class_token": True, "no_embed_class": True},
    {"global_pool": "avgmax", "reg_tokens": 2, "pool_include_prefix": True},
    {"qk_norm": True, "init_values": 1e-5, "scale_attn_norm": True, "scale_mlp_norm": True},
    {"qkv_bias": False, "proj_bias": False, "pre_norm": True, "final_norm": False},
    {"fc_norm": True, "pos_embed": "none", "in_chans": 1, "mlp_ratio": 2.5},
    {"drop_rate": 0.1, "pos_drop_rate": 0.1, "patch_drop_rate": 0.25, "proj_drop_rate": 0.1},
    {"attn_drop_rate": 0.1, "drop_path_rate": 0.1, "weight_init": "jax"},
    {"weight_init": "jax_nlhb"},
]


@pytest.mark.parametrize("options", OPTIONS, ids=lambda o: ",".join(o))
def test_every_option_builds_fills_and_trains(options, uninitialized_memory_is_nan):
    spec = small(**options)
    model = filled(spec)
    for name, parameter in model.named_parameters():
        assert parameter.device.type == "cpu", name
        assert parameter.isfinite().all(), name
    logits = model(torch.randn(2, *spec.sizes.input_shape))
    assert logits.shape == (2, 7)
    logits.sum().backward()
    assert all(p.grad is not None for p in model.parameters())


def test_initial_weights_have_timms_statistics():
    torch.manual_seed(0)
    name = "vit_tiny_patch16_224"
    reference = dict(timm.create_model(name).named_parameters())
    for key, value in filled(open_model(name, {})).named_parameters():
        expected = reference[key]
        assert value.mean().item() == pytest.approx(expected.mean().item(), abs=5e-3), key
        if expected.numel() > 1 and expected.std() > 1e-8:
            assert value.std().item() == pytest.approx(expected.std().item(), rel=0.15), key


def test_weights_depend_on_seed_and_name_alone():
    torch.manual_seed(1)
    before = torch.get_rng_state()
    first = filled(small()).state_dict()
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(2)
    units = list(small().units(second := small().build()))
    for name, unit in units[1::-1] + units[2:]:  # another order of blocks
        small().initialize(unit, name, seed=0)
    for key, value in second.state_dict().items():
        assert torch.equal(value, first[key]), key
    other = filled(small(), seed=1).state_dict()
    assert not torch.equal(other["head.weight"], first["head.weight"])
    assert not torch.equal(first["blocks.0.attn.qkv.weight"], first["blocks.1.attn.qkv.weight"])


def test_each_module_draws_what_timm_draws_from_the_modules_own_seed():
    found = filled(small(), seed=5).state_dict()
    for name in ("blocks.0.attn.qkv", "blocks.0.mlp.fc1", "blocks.1.mlp.fc2"):
        seed = int.from_bytes(hashlib.sha256(f"5/{name}".encode()).digest()[:8], "little") >> 1
        torch.manual_seed(seed)
        expected = trunc_normal_(torch.empty_like(found[f"{name}.weight"]), std=0.02)
        assert torch.equal(found[f"{name}.weight"], expected), name


def test_room_for_a_checkpoints_values_is_left_without_drawing_any(uninitialized_memory_is_nan):
    torch.manual_seed(1)
    before = torch.get_rng_state()
    spec = open_model("timm/vit_small_patch16_dinov3", SMALL_OF_TIMM)
    room, reference = spec.build(), filled(spec)
    for name, unit in spec.units(room):
        allocate_uninitialized(unit, name)
    assert torch.equal(torch.get_rng_state(), before)
    assert [p.shape for p in room.parameters()] == [p.shape for p in reference.parameters()]
    # The same in every process: hosts must give the devices the same.
    assert all(p.device.type == "cpu" and not p.any() for p in room.parameters())
    buffers = dict(room.named_buffers())
    assert buffers
    for name, values in reference.named_buffers():
        assert torch.equal(buffers[name], values), name


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("vit_tiny_patch16_224", {}),
        ("vit_10b", SMALL),
        ("vit_10b", SMALL | {"global_pool": "map"}),
        ("vit_10b", SMALL | {"reg_tokens": 3, "class_token": True, "mlp_ratio": 2.5}),
        ("vit_10b", SMALL | {"img_size": 70, "patch_drop_rate": 0.95, "global_pool": "map"}),
        ("vit_10b", {}),
    ],
)
def test_flops_are_those_of_the_formula(name, options):
    spec = open_model(name, options)
    assert spec.train_flops_per_image == pytest.approx(flops_by_hand(spec), rel=1e-3)


@pytest.mark.parametrize(
    "name",
    [
        "vit_tiny_patch16_224",
        "hybrid_vit",
        "timm/vit_base_patch16_siglip_224",
        "timm/eva02_base_patch14_224",
        "timm/vit_small_patch16_dinov3",
    ],
)
def test_flops_are_those_of_a_backward_pass_that_ran(name):
    """The program counts without one: what it does before XLA starts must leave autograd alone."""
    spec = open_model(name, {})
    model = spec.build().train()
    with FlopCounterMode(display=False) as counter:
        model(torch.empty(1, *spec.sizes.input_shape, device="meta")).sum().backward()
    with forbid_autograd():
        assert spec.train_flops_per_image == counter.get_total_flops()


def test_a_backward_pass_before_xla_starts_is_refused():
    loss = torch.ones(2, requires_grad=True).sum()
    with forbid_autograd(), pytest.raises(RuntimeError, match="before XLA has started"):
        loss.backward()
    with forbid_autograd(), pytest.raises(RuntimeError, match="before XLA has started"):
        torch.autograd.grad(loss, loss)
    loss.backward()


def flops_by_hand(spec):
    """6 FLOPs a multiply-add of every matrix product, 4 for the first: its input has no gradient
    (PaLM, Chowdhery et al. 2022, appendix B)."""
    sizes, settings = spec.sizes, spec.settings
    patch, pixels = settings["patch_size"], settings["img_size"]
    patches = (pixels // patch) ** 2
    prefix = int(settings["class_token"]) + settings["reg_tokens"]
    width, hidden = settings["embed_dim"], int(settings["embed_dim"] * settings["mlp_ratio"])
    tokens = max(1, int(patches * (1 - settings["patch_drop_rate"]))) + prefix
    block = tokens * (4 * width**2 + 2 * width * hidden) + 2 * tokens**2 * width
    head = width * settings["num_classes"]
    if settings["global_pool"] == "map":  # one latent query: k and v of all tokens, then an MLP
        head += tokens * 2 * width**2 + 2 * tokens * width + 2 * width**2 + 2 * width * hidden
    return 6 * (sizes.depth * block + head) + 4 * patches * width * 3 * patch**2
