"""Published weights by the names of their authors: a model that loads them computes what timm's own
model computes, which loads the same file as timm does."""

import json
import pickle
import re

import pytest
import timm
import torch
import torch.distributed.checkpoint as dcp
import torchvision
from PIL import Image
from safetensors.torch import save_file
from torch import nn

import run_vit_training
from features.dino import model as dino_model
from features.dino.config import DinoConfig
from models.registry import open_model
from tests.support.cli import DIGITS
from tools.convert import main as convert
from training.checkpoints.format import quiet_dcp
from training.errors import UsageError
from training.weights import timm_formats
from training.weights.adapt import adapt
from training.weights.find import find

GIVEN = {"img_size": 32, "patch_size": 8, "embed_dim": 32, "depth": 2, "num_heads": 2}
GIVEN |= {"num_classes": 24}


# -- names as the published files have them --------------------------------------------------------


def renamed(state, *rules):
    """The tensors by names that ``rules``, patterns and replacements in order, make of timm's."""
    found = {}
    for name, tensor in state.items():
        for pattern, theirs in rules:
            name = re.sub(pattern, theirs, name)
        found[name] = tensor
    assert len(found) == len(state)
    return found


def text_tower(prefix=""):
    """Some of the text encoder, which a vision model has no use for."""
    return {
        f"{prefix}transformer.resblocks.0.ln_1.weight": torch.ones(24),
        f"{prefix}token_embedding.weight": torch.ones(50, 24),
        "logit_scale": torch.tensor(4.6),
    }


RESBLOCKS = (
    (r"^patch_embed\.proj", "conv1"),
    (r"^blocks", "transformer.resblocks"),
    (r"attn\.qkv\.", "attn.in_proj_"),
    (r"attn\.proj", "attn.out_proj"),
    (r"mlp\.fc1", "mlp.c_fc"),
    (r"mlp\.fc2", "mlp.c_proj"),
    (r"^norm_pre", "ln_pre"),
    (r"^norm\.", "ln_post."),
    (r"\.norm([12])", r".ln_\1"),
    (r"^pos_embed", "positional_embedding"),
    (r"^cls_token", "class_embedding"),
)
"""Names in CLIP, OpenCLIP and Perception Encoder."""


def clip(state):
    """https://github.com/openai/CLIP, clip/model.py; https://github.com/mlfoundations/open_clip"""
    theirs = renamed(state, *RESBLOCKS)
    theirs["class_embedding"] = theirs["class_embedding"][0, 0]
    theirs["positional_embedding"] = theirs["positional_embedding"][0]
    del theirs["head.bias"]  # always zero
    theirs["proj"] = theirs.pop("head.weight").T.contiguous()
    return {f"visual.{name}": each for name, each in theirs.items()} | text_tower()


def perception_encoder(state):
    """https://github.com/facebookresearch/perception_models, core/vision_encoder/pe.py"""
    del state["head.bias"]
    for kind in ("weight", "bias"):
        parts = [state.pop(f"attn_pool.{name}.{kind}") for name in ("q", "kv")]
        state[f"attn_pool.qkv.{kind}"] = torch.cat(parts)
    theirs = renamed(
        state,
        (r"^attn_pool\.qkv\.", "attn_pool.attn.in_proj_"),
        (r"^attn_pool\.proj\.", "attn_pool.attn.out_proj."),
        (r"^attn_pool\.norm", "attn_pool.layernorm"),
        (r"^attn_pool\.latent", "attn_pool.probe"),
        (r"^attn_pool\.mlp\.fc1", "attn_pool.mlp.c_fc"),
        (r"^attn_pool\.mlp\.fc2", "attn_pool.mlp.c_proj"),
        (r"gamma_([12])", r"ls_\1.gamma"),
        *RESBLOCKS,
    )
    theirs["class_embedding"] = theirs["class_embedding"][0, 0]
    theirs["positional_embedding"] = theirs["positional_embedding"][0]
    theirs["proj"] = theirs.pop("head.weight").T.contiguous()
    return {f"visual.{name}": each for name, each in theirs.items()} | text_tower()


def open_clip_of_timm(state, prefix=""):
    """OpenCLIP around a model of timm's: open_clip/timm_model.py"""
    del state["head.bias"]
    head = {f"{prefix}visual.head.proj.weight": state.pop("head.weight")}
    trunk = {f"{prefix}visual.trunk.{name}": each for name, each in state.items()}
    return head | trunk | text_tower(f"{prefix}text.")


def eva_clip(state):
    """https://github.com/baaivision/EVA, EVA-CLIP/rei/eva_clip"""
    theirs = renamed(
        state,
        (r"mlp\.fc1_g", "mlp.w1"),
        (r"mlp\.fc1_x", "mlp.w2"),
        (r"mlp\.fc2", "mlp.w3"),
        (r"mlp\.norm", "mlp.ffn_ln"),
        (r"attn\.norm", "attn.inner_attn_ln"),
    )
    theirs["rope.freqs_cos"] = torch.ones(16, 16)
    return {f"visual.{name}": each for name, each in theirs.items()} | text_tower("text.")


def i_jepa(state):
    """https://github.com/facebookresearch/ijepa, src/train.py"""
    encoder = {
        f"module.{name}": each for name, each in state.items() if not name.startswith("head")
    }
    target = {name: each + 1 for name, each in encoder.items()}
    predictor = {"module.predictor_blocks.0.norm1.weight": torch.ones(24)}
    of_training = {"opt": {"state": {0: {"step": torch.ones(())}}}, "epoch": 300, "lr": 1e-3}
    return {"encoder": encoder, "predictor": predictor, "target_encoder": target} | of_training


def aimv2(state):
    """https://github.com/apple/ml-aim, aim-v2/python/aim/v2/torch/models.py"""
    return renamed(
        {name: each for name, each in state.items() if not name.startswith("head")},
        (r"^patch_embed", "preprocessor.patchifier"),
        (r"^pos_embed", "preprocessor.pos_embed"),
        (r"^blocks", "trunk.blocks"),
        (r"\.norm([12])", r".norm_\1"),
        (r"^norm", "trunk.post_trunk_norm"),
        (r"mlp\.fc1_x", "mlp.fc3"),
        (r"mlp\.fc1_g", "mlp.fc1"),
    )


def beit3(state):
    """https://github.com/microsoft/unilm, beit3 and torchscale: A for images, B for text"""
    theirs = {}
    for name, tensor in state.items():
        if name.startswith("head"):
            continue
        if name == "pos_embed":  # the first two entries are of text alone
            rows = torch.cat([torch.ones(2, tensor.shape[2]), tensor[0]])
            theirs["encoder.embed_positions.A.weight"] = rows
        elif ".attn.qkv." in name:
            for part, rows in zip("qkv", tensor.chunk(3), strict=True):
                theirs[name.replace("qkv", f"{part}_proj")] = rows.clone()
        else:
            theirs[name] = tensor
    theirs = renamed(
        theirs,
        (r"^cls_token", "vision_embed.cls_token"),
        (r"^patch_embed\.", "vision_embed."),
        (r"^blocks\.(\d+)\.", r"encoder.layers.\1."),
        (r"\.attn\.norm\.", ".self_attn.inner_attn_ln.A."),
        (r"\.attn\.proj\.", ".self_attn.out_proj.A."),
        (r"\.attn\.([qkv]_proj)\.", r".self_attn.\1.A."),
        (r"\.norm1\.", ".self_attn_layer_norm.A."),
        (r"\.norm2\.", ".final_layer_norm.A."),
        (r"\.mlp\.norm\.", ".ffn.A.ffn_layernorm."),
        (r"\.mlp\.(fc[12])\.", r".ffn.A.\1."),
        (r"^norm\.", "encoder.layer_norm.A."),
    )
    theirs["text_embed.weight"] = torch.ones(50, 32)
    theirs["vision_embed.mask_token"] = torch.ones(1, 1, 32)
    text = {name.replace(".A.", ".B."): each + 1 for name, each in theirs.items() if ".A." in name}
    return {"model": {f"beit3.{name}": each for name, each in (theirs | text).items()}}


def radio(state):
    """https://huggingface.co/nvidia/C-RADIOv3-B: positions of a grid of 128 x 128, no bias"""
    theirs = {
        f"blocks.{name.removeprefix('blocks.')}".replace("ls1.gamma", "ls1.grandma"): each
        for name, each in state.items()
        if name.startswith("blocks.")
    }
    theirs["patch_generator.embedder.weight"] = state["patch_embed.proj.weight"].flatten(1)
    torch.manual_seed(3)
    theirs["patch_generator.pos_embed"] = torch.randn(1, 128 * 128, 32) * 0.3
    tokens = torch.cat([state["cls_token"][0], state["reg_token"][0]])
    theirs["patch_generator.cls_token.token"] = tokens
    found = {f"radio_model.model.{name}": each for name, each in theirs.items()}
    return found | {"radio_model.input_conditioner.norm_mean": torch.ones(3, 1, 1)}


def dinov2(state):
    """https://github.com/facebookresearch/dinov2, dinov2/models/vision_transformer.py"""
    theirs = {name: each for name, each in state.items() if not name.startswith("head")}
    if "reg_token" in theirs:  # positions are of the class token, too
        theirs["register_tokens"] = theirs.pop("reg_token")
        first = torch.full((1, 1, 32), 0.25)
        theirs["cls_token"] = theirs["cls_token"] - first
        theirs["pos_embed"] = torch.cat([first, theirs["pos_embed"]], dim=1)
    return theirs | {"mask_token": torch.ones(1, 32)}


def dinov2_swiglu(state):
    return renamed(dinov2(state), (r"mlp\.fc1", "mlp.w12"), (r"mlp\.fc2", "mlp.w3"))


def dinov2_training(state):
    teacher = {f"backbone.{name}": each for name, each in dinov2_swiglu(state).items()}
    return {"teacher": teacher | {"dino_head.mlp.0.weight": torch.ones(8, 32)}}


def dinov3(state):
    """https://github.com/facebookresearch/dinov3, dinov3/models/vision_transformer.py"""
    theirs = renamed(
        {name: each for name, each in state.items() if not name.startswith("head")},
        (r"gamma_([12])", r"ls\1.gamma"),
        (r"^reg_token", "storage_tokens"),
    )
    theirs["rope_embed.periods"] = torch.ones(4)
    theirs["mask_token"] = torch.ones(1, 32)
    for block in range(2):
        theirs[f"blocks.{block}.attn.qkv.bias"] = torch.zeros(96)
        theirs[f"blocks.{block}.attn.qkv.bias_mask"] = torch.ones(96)
    return theirs


def deit3(state):
    """https://github.com/facebookresearch/deit, models_v2.py"""
    return {"model": renamed(state, (r"ls([12])\.gamma", r"gamma_\1"))}


FORMATS = {
    "CLIP": ("vit_base_patch32_clip_quickgelu_224", {}, clip),
    "OpenCLIP": ("vit_base_patch16_clip_224", {}, clip),
    "OpenCLIP at another size": ("vit_base_patch16_clip_224", {"img_size": 48}, clip),
    "OpenCLIP of timm": ("vit_base_patch16_siglip_gap_224", {}, open_clip_of_timm),
    "EVA-CLIP": ("eva02_base_patch16_clip_224", {}, eva_clip),
    "Perception Encoder": ("vit_pe_core_base_patch16_224", {}, perception_encoder),
    "I-JEPA": ("vit_huge_patch14_gap_224", {}, i_jepa),
    "AIMv2": ("aimv2_large_patch14_224", {}, aimv2),
    "BEiT-3": ("beit3_base_patch16_224", {}, beit3),
    "RADIO": ("vit_base_patch16_radio_v3", {}, radio),
    "RADIO of no square": ("vit_base_patch16_radio_v3", {"img_size": (32, 48)}, radio),
    "DINOv2": ("vit_base_patch14_dinov2", {}, dinov2),
    "DINOv2 with registers": ("vit_base_patch14_reg4_dinov2", {}, dinov2),
    "DINOv2 of SwiGLU": ("vit_giant_patch14_reg4_dinov2", {}, dinov2_swiglu),
    "DINOv3": ("vit_small_patch16_dinov3", {}, dinov3),
    "DeiT III": ("deit3_small_patch16_224", {}, deit3),
}
"""timm's model, the size of its images in this run, and the names of its weights."""


# -- what models compute ---------------------------------------------------------------------------


def trained(name, **more):
    """timm's model with weights that matter, and its weights."""
    model = timm.create_model(name, **GIVEN | more).eval()
    torch.manual_seed(0)
    for key, parameter in model.named_parameters():
        nn.init.normal_(parameter, mean="norm" in key, std=0.3)
    nn.init.zeros_(model.head.bias)  # a projection of embeddings has none
    return model, {key: each.clone() for key, each in model.state_dict().items()}


def loaded(spec, path, **how):
    """The model with the weights in a file, and what is said of them."""
    adapter = pickle.loads(pickle.dumps(adapt(find(path, "--init_from"), spec, **how)))
    model = spec.build()
    for name, unit in spec.units(model):
        adapter.initialize(unit, name)
    return model.eval(), adapter.note


def timms(name, path, **more):
    """timm's model with the weights in a file, all but the head, loaded as those that timm loads of
    the same authors."""
    overlay = {"state_dict": torch.load(path), "num_classes": GIVEN["num_classes"]}
    how = {"pretrained": True, "pretrained_cfg_overlay": overlay, "pretrained_strict": False}
    return timm.create_model(name, **how, **GIVEN | more).eval()


def assert_same_features(ours, theirs, images):
    with torch.inference_mode():
        expected = theirs.forward_features(images)
        assert expected.std() > 0.1
        torch.testing.assert_close(ours.forward_features(images), expected)


@pytest.mark.parametrize("form", FORMATS)
def test_features_are_timms(form, tmp_path):
    name, size, names = FORMATS[form]
    model, state = trained(name)
    torch.save(names(state), tmp_path / "theirs.pt")
    spec = open_model(f"timm/{name}", GIVEN | size)
    ours, note = loaded(spec, tmp_path / "theirs.pt")
    images = torch.randn(2, *spec.sizes.input_shape)
    assert_same_features(ours, timms(name, tmp_path / "theirs.pt", **size), images)
    if not size and form != "RADIO":  # no positions were resampled
        assert_same_features(ours, model, images)
    if "RADIO" in form:
        assert "pos_embed resampled by timm to 4 x" in note
    elif form == "OpenCLIP at another size":
        assert "resampled: pos_embed (4 x 4 to 6 x 6 patches)" in note
    else:
        assert "resampled" not in note
    if form != "I-JEPA":  # whose names are timm's, in a state dict of its encoder
        assert "names converted by timm" in note


@pytest.mark.parametrize("form", ["CLIP", "OpenCLIP of timm", "Perception Encoder"])
def test_embeddings_of_images_are_timms(form, tmp_path):
    """Used unchanged, the projection of embeddings is the head."""
    name, _, names = FORMATS[form]
    model, state = trained(name)
    save_file(names(state), tmp_path / "theirs.safetensors")
    spec = open_model(f"timm/{name}", GIVEN)
    ours, _ = loaded(spec, tmp_path / "theirs.safetensors", unchanged=True)
    images = torch.randn(2, 3, 32, 32)
    with torch.inference_mode():
        torch.testing.assert_close(ours(images), model(images))
    spec = open_model(spec.name, GIVEN | {"num_classes": 5})
    with pytest.raises(UsageError, match=r"head\.weight has shape"):
        loaded(spec, tmp_path / "theirs.safetensors", unchanged=True)


WRAPPED = {
    "OpenCLIP in DDP": (
        "vit_base_patch16_224",
        lambda state: {"state_dict": open_clip_of_timm(state, "module."), "epoch": 3},
    ),
    "CLIP, compiled": (
        "vit_base_patch32_clip_quickgelu_224",
        lambda state: {f"_orig_mod.{name}": each for name, each in clip(state).items()},
    ),
    "DINOv2's training": ("vit_giant_patch14_reg4_dinov2", dinov2_training),
}
"""timm's model, and what a training saves."""


@pytest.mark.parametrize("form", WRAPPED)
def test_inside_wrappers(form, tmp_path):
    name, names = WRAPPED[form]
    model, state = trained(name)
    torch.save(names(state), tmp_path / "theirs.pt")
    ours, _ = loaded(open_model(f"timm/{name}", GIVEN), tmp_path / "theirs.pt")
    assert_same_features(ours, model, torch.randn(2, 3, 32, 32))


@pytest.mark.parametrize("form", ["CLIP", "BEiT-3", "DINOv2 with registers"])
def test_in_a_folder_of_dcp(form, tmp_path):
    name, _, names = FORMATS[form]
    model, state = trained(name)
    with quiet_dcp():
        writer = dcp.FileSystemWriter(tmp_path / "theirs")
        dcp.save(names(state), storage_writer=writer, no_dist=True)
    ours, note = loaded(open_model(f"timm/{name}", GIVEN), tmp_path / "theirs")
    assert_same_features(ours, model, torch.randn(2, 3, 32, 32))
    assert "read whole by each process: convert them once with tools.convert to a file" in note
    file = tmp_path / "theirs.safetensors"
    assert convert([str(tmp_path / "theirs"), str(file)]) == 0
    ours, note = loaded(open_model(f"timm/{name}", GIVEN), file)
    assert_same_features(ours, model, torch.randn(2, 3, 32, 32))
    assert "read whole" not in note


def test_a_part_is_missing_in_a_folder_of_dcp(tmp_path):
    """Of a tensor that only timm has a name for."""
    name, _, names = FORMATS["AIMv2"]
    with quiet_dcp():
        dcp.save(names(trained(name)[1]), checkpoint_id=tmp_path / "theirs", no_dist=True)
    metadata = dcp.FileSystemReader(tmp_path / "theirs").read_metadata()
    missing = next(i for i in metadata.storage_data if i.fqn == "preprocessor.pos_embed")
    del metadata.storage_data[missing]
    (tmp_path / "theirs" / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(UsageError, match=r"the part of preprocessor\.pos_embed at .* is missing"):
        loaded(open_model(f"timm/{name}", GIVEN), tmp_path / "theirs")


def test_values_stay_in_the_file(tmp_path):
    """They are views of what is mapped, but for a bias of zeros that the file lacks."""
    name, _, names = FORMATS["CLIP"]
    torch.save(names(trained(name)[1]), tmp_path / "theirs.pt")
    found = find(tmp_path / "theirs.pt", "--init_from")
    mapped = {each.untyped_storage().data_ptr() for each in found.tensors.values()}
    stored = found.as_stored.read([*found.as_stored.layouts])
    tensors = timm_formats.convert(stored, open_model(f"timm/{name}", GIVEN))
    copies = {
        key for key, each in tensors.items() if each.untyped_storage().data_ptr() not in mapped
    }
    assert copies == {"head.bias"}


def test_objectives_and_native_resolution_start_from_them(tmp_path):
    """The student of DINO, whose mask token has another shape, and a NaFlexVit."""
    name, _, names = FORMATS["DINOv2 with registers"]
    state = trained(name)[1]
    torch.save(state, tmp_path / "timms.pt")
    torch.save(names(dict(state)), tmp_path / "theirs.pt")
    flags = DinoConfig(local_crop_size=16, dino_prototypes=8, ibot_prototypes=8)
    for spec in (
        dino_model.add_to(open_model(f"timm/{name}", GIVEN), flags),
        open_model(f"timm/{name}", GIVEN | {"native_resolution": True}),
    ):
        ours = loaded(spec, tmp_path / "theirs.pt")[0].state_dict()
        expected = loaded(spec, tmp_path / "timms.pt")[0].state_dict()
        for key, tensor in expected.items():
            if not key.startswith("head"):
                torch.testing.assert_close(ours[key], tensor, msg=key)


def test_by_the_command_line(tmp_path, capsys):
    name, _, names = FORMATS["CLIP"]
    model, state = trained(name)
    torch.save(names(state), tmp_path / "theirs.pt")
    image = next((DIGITS / "val" / "7").glob("*.png"))
    flags = [f"--{key}={value}" for key, value in GIVEN.items()]
    words = ["--predict", image, "--json", "--resume", tmp_path / "theirs.pt"]
    words += ["--model", f"timm/{name}", *flags, "--data_dir", tmp_path]
    assert run_vit_training.main(list(map(str, words))) == 0
    output = capsys.readouterr()
    assert "names converted by timm" in output.err
    config = timm.data.resolve_data_config({"input_size": (3, 32, 32)}, model=model)
    transform = timm.data.create_transform(**config)
    with torch.inference_mode():
        expected = model(transform(Image.open(image).convert("RGB"))[None]).softmax(-1)[0]
    for top in json.loads(output.out)[0]["top5"]:
        assert top["probability"] == pytest.approx(expected[top["index"]].item(), rel=1e-3)


def test_torchscript_is_refused(tmp_path):
    """OpenAI's own files of CLIP."""
    torch.jit.script(nn.Linear(3, 3)).save(tmp_path / "ViT-B-32.pt")
    with pytest.raises(UsageError, match="it is a TorchScript archive, which contains code: save"):
        find(tmp_path / "ViT-B-32.pt", "--init_from")


def test_names_that_timm_does_not_have_either(tmp_path):
    model = torchvision.models.VisionTransformer(32, 8, 2, 2, 32, 128, num_classes=24)
    torch.save(model.state_dict(), tmp_path / "theirs.pt")
    found = find(tmp_path / "theirs.pt", "--init_from")
    with pytest.raises(UsageError, match=r"names are not timm's \(such as class_token\)"):
        adapt(found, open_model("timm/vit_base_patch16_clip_224", GIVEN))
