"""Models of timm's by name, small, against timm itself: state dicts, logits, first weights."""

import functools
import pickle

import pytest
import timm
import torch

from models import blocks
from models.initialize import cast_buffers, fill_buffers
from models.registry import ModelError, list_models, open_model
from tests.fakes.filled import SMALL, filled
from training.mesh import tensor_dims

pytestmark = pytest.mark.fast

FAMILIES = {
    "plain": "vit_base_patch16_224",
    "layer scale": "deit3_base_patch16_224",
    "SigLIP": "vit_base_patch16_siglip_224",
    "registers": "vit_base_patch14_reg4_dinov2",
    "CLIP": "vit_base_patch16_clip_quickgelu_224",
    "AIMv2": "aimv2_large_patch14_224",
    "packed SwiGLU": "vit_giant_patch14_dinov2",
    "post-norm": "vit_base_patch16_rpn_224",
    "any image size": "vit_base_patch16_radio_v3",
    "parallel branches": "vit_small_patch16_18x2_224",
    "parallel MLP": "vit_base_patch16_xp_224",
    "differential": "vit_dlittle_patch16_reg1_gap_256",
    "differential, parallel MLP": "vit_dpwee_patch16_reg1_gap_256",
    "EVA": "eva_giant_patch14_224",
    "EVA, post-norm": "eva02_enormous_patch14_clip_224",
    "EVA02, packed SwiGLU": "eva02_small_patch14_224",
    "EVA02, normed SwiGLU": "eva02_base_patch14_224",
    "RoPE": "vit_small_patch16_rope_ape_224",
    "RoPE, mixed": "vit_small_patch16_rope_mixed_224",
    "RoPE, registers": "vit_mediumd_patch16_rope_reg1_gap_256",
    "Perception Encoder": "vit_pe_core_base_patch16_224",
    "DINOv3": "vit_small_patch16_dinov3",
    "DINOv3, key bias": "vit_small_patch16_dinov3_qkvb",
    "DINOv3, SwiGLU": "vit_7b_patch16_dinov3",
}
DIFFERENT_BLOCKS = {"differential", "differential, parallel MLP"}


@functools.cache
def small(family, **changes):
    return open_model(f"timm/{FAMILIES[family]}", SMALL | changes)


def timms(family, **changes):
    """As timm itself makes it, with values that make every parameter matter."""
    torch.manual_seed(0)
    model = timm.create_model(FAMILIES[family], **SMALL | changes)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn_like(parameter)
            if parameter.dim() > 1 and not name.startswith(("pos_embed", "cls", "reg", "rope")):
                noise *= parameter[0].numel() ** -0.5
            elif parameter.dim() < 2:
                noise = 0.1 * noise + (1.0 if name.endswith("norm.weight") else 0.0)
            parameter.copy_(noise)
    return model


@pytest.mark.parametrize("family", FAMILIES)
def test_timms_weights_give_timms_logits(family):
    reference, model = timms(family).eval(), filled(small(family)).eval()
    assert [*model.state_dict()] == [*reference.state_dict()]
    model.load_state_dict(reference.state_dict(), strict=True)
    images = torch.randn(2, 3, 32, 32)
    with torch.no_grad():
        expected = reference(images)
        assert expected.std() > 0.1  # in logits that are all alike nothing would show
        torch.testing.assert_close(model(images), expected, rtol=1e-5, atol=1e-5)
    reference.load_state_dict(model.state_dict(), strict=True)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_parameter_has_a_value_and_a_gradient(family, uninitialized_memory_is_nan):
    spec = small(family)
    model = filled(spec)
    for name, parameter in [*model.named_parameters(), *model.named_buffers()]:
        assert parameter.device.type == "cpu", name
        assert parameter.isfinite().all(), name
    logits = model(torch.randn(2, *spec.sizes.input_shape))
    assert logits.shape == (2, 7)
    logits.square().sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())


@pytest.mark.parametrize(
    "family", [name for name in FAMILIES if name.startswith(("EVA", "R", "D"))]
)
def test_buffers_are_timms(family):
    expected = dict(timms(family, dynamic_img_size=False).named_buffers())
    spec = small(family)
    elsewhere = spec.build().to(torch.bfloat16).to_empty(device="cpu")
    fill_buffers(elsewhere)
    for found in (filled(spec), elsewhere):
        buffers = dict(found.named_buffers())
        assert buffers.keys() == expected.keys()
        for name, values in buffers.items():
            torch.testing.assert_close(values, expected[name], rtol=0, atol=0)
    assert elsewhere.blocks[0].attn.proj.weight.dtype == torch.bfloat16
    sent = []
    fill_buffers(elsewhere, lambda values: sent.append(values) or values)
    assert len(sent) == len(expected)
    cast_buffers(elsewhere.blocks[0], torch.bfloat16)
    assert {b.dtype for b in elsewhere.blocks[0].buffers()} <= {torch.bfloat16}


@pytest.mark.parametrize("family", FAMILIES)
def test_a_spec_can_be_sent_to_a_process(family):
    """Nested FSDP starts a process for each device."""
    spec = small(family)
    there = pickle.loads(pickle.dumps(spec))
    assert (there.name, there.sizes, there.settings) == (spec.name, spec.sizes, spec.settings)
    assert there.parameter_count == spec.parameter_count


@pytest.mark.parametrize("family", FAMILIES)
def test_first_weights_are_drawn_as_timms(family):
    torch.manual_seed(0)
    wide = SMALL | {"embed_dim": 192}
    reference = dict(timm.create_model(FAMILIES[family], **wide).named_parameters())
    for name, value in filled(small(family, embed_dim=192)).named_parameters():
        expected = reference[name]
        if name == "rope.freqs":  # turned by a random angle each
            value, expected = (each.square().sum(0) for each in (value, expected))
            torch.testing.assert_close(value, expected)
            continue
        scale = expected.std().item() if expected.numel() > 1 else 0.0
        few = max(1.0, 200 / expected.numel()) ** 0.5
        assert value.mean().item() == pytest.approx(
            expected.mean().item(), abs=1e-6 + 0.25 * few * scale
        ), name
        if expected.numel() > 100:
            assert value.std().item() == pytest.approx(scale, rel=0.15 * few, abs=1e-12), name


@pytest.mark.parametrize("family", FAMILIES)
def test_facts(family):
    spec = small(family)
    sizes, model = spec.sizes, timms(family)
    assert (spec.why_blocks_differ() is None) == (family not in DIFFERENT_BLOCKS)
    assert spec.parameter_count == sum(p.numel() for p in model.parameters())
    assert (sizes.input_shape, sizes.num_classes, sizes.depth) == ((3, 32, 32), 7, 3)
    assert (sizes.num_patches, sizes.embed_dim, sizes.num_heads) == (16, 48, 2)
    assert sizes.value_dim == 24
    seen = []
    model.blocks[0].register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0].shape[1]))
    model(torch.zeros(1, 3, 32, 32))
    assert seen == [sizes.num_tokens]


@pytest.mark.parametrize("family", ["RoPE, mixed", "RoPE", "SigLIP", "DINOv3"])
def test_dropped_patches_are_counted(family):
    spec = small(family, patch_drop_rate=0.4)
    seen = []
    model = filled(spec)
    model.blocks[0].register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0].shape[1]))
    model(torch.zeros(1, 3, 32, 32))
    assert seen == [spec.sizes.train_tokens]
    assert spec.train_flops_per_image < 0.8 * small(family).train_flops_per_image


def test_the_largest_of_timms_are_what_they_say():
    spec = open_model("timm/vit_7b_patch16_dinov3", {})
    assert spec.parameter_count == 6_716_030_976 + 4097 * 1000  # timm's has no head
    assert spec.sizes.input_shape == (3, 256, 256)
    assert spec.sizes.num_tokens == 261
    assert spec.why_blocks_differ() is None
    assert spec.preprocessing["mean"] == (0.485, 0.456, 0.406)
    assert spec.settings["swiglu_mlp"] is True
    assert spec.settings["norm_layer"] == "LayerNorm(eps=1e-05)"


@pytest.mark.parametrize(
    ("name", "overrides", "reason"),
    [
        ("vit_11b", {}, "unknown model vit_11b; did you mean vit_1"),
        ("timm/vit_base_patch16_sapiens2", {"depth": 2}, "num_kv_heads sequence must have one "),
        ("timm/vit_base_patch16_sapiens2", {"num_heads": 8}, "timm cannot build timm/vit_base"),
        ("timm/resnet50", {}, "is not a supported Vision Transformer: it is timm's ResNet"),
        ("timm/vit_base_resnet50d_224", {}, "an unsupported patch embedding, HybridEmbed"),
        ("timm/vit_large_patch16_sapiens2", {}, "differ: attn.k_proj.weight is"),
        ("timm/vit_base_patch16_224.none", {}, "Invalid pretrained tag"),
        ("timm/vit_small_patch16_dinov3", {"img_size": 250}, "img_size 250 is not a multiple of"),
        (
            "timm/vit_small_patch16_dinov3",
            {"embed_dim": 36},
            "width that is a multiple of 4: embed_dim",
        ),
        (
            "vit_10b",
            {"swiglu_mlp": True},
            "vit_10b does not accept swiglu_mlp; it accepts img_size",
        ),
        ("vit_10b", {"num_heads": 31}, "embed_dim 5120 is not a multiple of num_heads 31"),
        ("vit_10b", {"mlp_ratio": 1e-4}, "mlp_ratio 0.0001 gives an MLP of width 0"),
        ("vit_10b", {"global_pool": "token"}, "global_pool token requires class_token"),
        ("vit_10b", {"patch_drop_rate": 0.999}, "patch_drop_rate 0.999 drops every patch"),
    ],
)
def test_what_cannot_be_is_told(name, overrides, reason):
    with pytest.raises(ModelError) as raised:
        open_model(name, overrides)
    assert reason in str(raised.value)
    assert "\n" not in str(raised.value)


# What the model of each name is, by the page of the program that has it.
OTHER_NAMES = """
vit_l_16 vit_large_patch16_224, vit_b_32 timm/vit_base_patch32_224,
vit_g_14 vit_giant_patch14_224, vit-giant-14 vit_giant_patch14_224, vit_huge vit_huge_patch14_224,
ViT-L/14 timm/vit_large_patch14_224, ViT-G/14 vit_gigantic_patch14_224,
ViT-bigG-14 vit_gigantic_patch14_224, ViT-SO400M-14-SigLIP timm/vit_so400m_patch14_siglip_224,
dinov2_vitl14 timm/vit_large_patch14_dinov2, dinov2_vitg14_reg timm/vit_giant_patch14_reg4_dinov2,
dinov3_vits16plus timm/vit_small_plus_patch16_dinov3,
facebook/dinov3-vitl16-pretrain-lvd1689m timm/vit_large_patch16_dinov3,
facebook/dinov2-base timm/vit_base_patch14_dinov2, timm/vit_l_16 vit_large_patch16_224,
google/vit-large-patch16-224 vit_large_patch16_224, vit10b vit_10b,
google/siglip-base-patch16-224 timm/vit_base_patch16_siglip_224,
openai/clip-vit-large-patch14 timm/vit_large_patch14_clip_224,
mae_vit_large_patch16 vit_large_patch16_224, vit_larg_patch16_224 vit_large_patch16_224
"""


@pytest.mark.parametrize(("name", "ours"), [pair.split() for pair in OTHER_NAMES.split(",")])
def test_names_of_other_programs(name, ours):
    with pytest.raises(ModelError) as raised:
        open_model(name, {})
    told = f"unknown model {name}; did you mean {ours}? (--list_models lists all, also of"
    assert str(raised.value).startswith(told)
    open_model(ours, {})


def test_a_name_like_no_model():
    for name in ("resnet50", "/", "9" * 5000):
        with pytest.raises(ModelError, match=r"^unknown model \S+ \(--list_models lists all"):
            open_model(name, {})


def test_arguments_by_either_name():
    spec = open_model("timm/vit_small_patch16_dinov3", SMALL | {"reg_tokens": 2, "fc_norm": True})
    assert spec.sizes.num_tokens == 16 + 1 + 2
    assert spec.settings["use_fc_norm"] is True
    again = open_model(spec.name, spec.overrides)
    assert again.differences(spec.settings) == []


def test_settings_that_differ():
    spec = small("DINOv3")
    free = small("DINOv3", drop_path_rate=0.1, head_init_scale=1.0)
    assert free.differences(spec.settings) == []
    assert small("DINOv3", num_classes=8, depth=1).differences(spec.settings) == [
        "num_classes",
        "depth",
    ]
    assert spec.differences({}) == []  # written by a program that kept less


def test_what_transformer_engine_may_compute():
    plain = open_model("vit_10b", SMALL | {"qk_norm": True, "init_values": 0.1})
    assert blocks.why_no_transformer_engine(plain.block) == "it uses layer scale (<init_values>)"
    for family, reason in {
        "SigLIP": None,
        "CLIP": "its activation is not GELU",
        "AIMv2": "its MLP is timm's SwiGLU, not Mlp",
        "differential": "its attention is timm's DiffAttention, not Attention",
        "DINOv3": "its blocks are of timm's EvaBlock, not Block",
    }.items():
        assert blocks.why_no_transformer_engine(small(family).block) == reason


@pytest.mark.parametrize("family", FAMILIES)
def test_dimensions_of_a_block(family):
    """What "tensor" shards is each parameter whose size follows the heads, or the MLP's width."""
    more = {"qk_norm": True, "scale_attn_norm": True, "init_values": 0.1}
    spec = small(family, **more if family == "plain" else {})
    dimensions = blocks.logical_axes(spec.block)
    refused = {
        "parallel branches": "its blocks are of timm's ParallelThingsBlock",
        "parallel MLP": "its blocks are of timm's ParallelScalingBlock",
        "differential": "its attention is timm's DiffAttention",
        "differential, parallel MLP": "its blocks are of timm's DiffParallelScalingBlock",
    }
    assert blocks.why_no_tensor_parallel(spec.block) == refused.get(family)
    if family in refused:
        assert dimensions == {}
        return
    block, dims, parts = (
        spec.meta.blocks[0],
        tensor_dims(dimensions),
        blocks.packed_parts(dimensions),
    )
    shapes = {name: tuple(parameter.shape) for name, parameter in block.named_parameters()}
    assert dimensions.keys() == shapes.keys()
    for name, shape in shapes.items():
        sizes = (parts[name], shape[0] // parts[name], *shape[1:]) if name in parts else shape
        wide = {"heads": SMALL["embed_dim"], "hidden": spec.sizes.hidden}
        assert len(dimensions[name]) == len(sizes)
        for kind, size in zip(dimensions[name], sizes, strict=True):
            assert size == wide.get(kind, size)
        of_width = name in ("attn.proj.bias", "mlp.fc2.bias")
        of_width |= not name.startswith(("attn.", "mlp."))
        of_head = name.startswith(("attn.q_norm", "attn.k_norm"))
        assert (name in dims) != (of_width or of_head)


def test_list():
    assert [each.name for each in list_models("vit_??b")] == ["vit_10b", "vit_60b"]
    found = {each.name: each for each in list_models("sapiens2")}
    assert found["timm/vit_base_patch16_sapiens2"].parameters == 114_762_472
    assert "differ: " in found["timm/vit_5b_patch16_sapiens2"].refused
    everything = list_models()
    assert len(everything) > 240
    assert {each.parameters for each in everything} == {None}
    assert list_models("no such") == []
    assert list_models("VIT_??B") == list_models("vit_??b")
