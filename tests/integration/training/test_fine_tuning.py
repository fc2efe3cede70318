"""--init_from: weights of another training, fitted by timm's own functions, on every form."""

import math

import pytest
import timm.models.eva
import timm.models.vision_transformer
import torch
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from safetensors.torch import save_file
from timm.layers import resample_abs_pos_embed
from timm.models import adapt_input_conv
from timm.models.eva import Eva

from models.registry import open_model
from tests.support.cli import DIGITS, TINY_MODEL, TINY_SIZES, train_tiny, train_tiny_gpu
from tests.support.marks import long
from tests.support.usage_error import told_in_one_line
from training.checkpoints.format import quiet_dcp
from training.errors import UsageError
from training.weights.adapt import adapt
from training.weights.find import find

SMALL = {"depth": 2, "img_size": 64, "num_classes": 10}


def filled(spec, seed):
    """The model whole on the CPU with first weights, in the order of its units."""
    model = spec.build()
    for name, unit in spec.units(model):
        spec.initialize(unit, name, seed=seed)
    return model


def weights_file(spec, path):
    """A file of weights of which none is as at first, as timm names them; and the weights."""
    torch.manual_seed(0)
    state = {name: torch.randn_like(each) for name, each in filled(spec, 1).state_dict().items()}
    save_file(state, path)
    return state


def begun(spec, path, classes=None):
    """A model that begins with the weights in a file, and what is said of them."""
    initial = adapt(find(path, "--init_from"), spec, classes=classes, seed=3)
    model = spec.build()
    for name, unit in spec.units(model):
        initial.initialize(unit, name)
    assert not any(each.is_meta for each in [*model.parameters(), *model.buffers()])
    return model, initial.note


@pytest.mark.parametrize(
    ("name", "before", "after"),
    [
        ("vit_tiny_patch16_224", {}, {"img_size": 96, "patch_size": 8, "in_chans": 1}),
        ("vit_small_patch14_reg4_dinov2", {"img_size": 56}, {"img_size": (84, 56), "in_chans": 5}),
        ("eva02_tiny_patch14_224", {"img_size": 56}, {"img_size": (56, 112), "patch_size": 7}),
        ("vit_small_patch16_dinov3", {}, {"img_size": 96}),
        ("vit_base_patch16_siglip_224", {}, {"img_size": 96}),
        ("vit_base_patch32_clip_224", {"in_chans": 1}, {"in_chans": 3}),
    ],
)
def test_fitted_as_timm_does(name, before, after, tmp_path):
    source = open_model(f"timm/{name}", SMALL | before)
    target = open_model(f"timm/{name}", SMALL | before | {"num_classes": 7} | after)
    state = weights_file(source, tmp_path / "weights.safetensors")
    model, note = begun(target, tmp_path / "weights.safetensors")

    reference = filled(target, 3)
    module = timm.models.eva if isinstance(model, Eva) else timm.models.vision_transformer
    theirs = module.checkpoint_filter_fn(dict(state), reference)
    theirs = {key: each for key, each in theirs.items() if not key.startswith("head.")}
    kernel, channels = "patch_embed.proj.weight", target.sizes.input_shape[0]
    there = source.sizes.input_shape[0]
    if channels != there:
        theirs[kernel] = adapt_input_conv(channels, theirs[kernel], base_chans=there)
    missing, unexpected = reference.load_state_dict(theirs, strict=False)
    assert set(missing) == {"head.weight", "head.bias"}
    assert not unexpected
    for key, each in reference.state_dict().items():
        torch.testing.assert_close(model.state_dict()[key], each, msg=key)
    for key, each in reference.named_buffers():
        torch.testing.assert_close(model.get_buffer(key), each)
    assert note.endswith("dropped: head.bias, head.weight; new: head.bias, head.weight")


def test_the_same_model_is_taken_whole(tmp_path):
    spec = open_model("timm/vit_tiny_patch16_224", SMALL)
    state = weights_file(spec, tmp_path / "weights.safetensors")
    model, note = begun(spec, tmp_path / "weights.safetensors", classes=["a", "b"])
    for name, each in model.state_dict().items():
        assert torch.equal(each, state[name])
    assert note.endswith(f"{len(state)} tensors unchanged")


def test_other_tokens_and_pooling(tmp_path):
    path = tmp_path / "weights.safetensors"
    token = open_model("vit_tiny_patch16_224", SMALL)
    state = weights_file(token, path)
    kept = state["pos_embed"][:, 1:]

    changes = {"global_pool": "avg", "class_token": False, "img_size": 96, "fc_norm": True}
    model, note = begun(open_model("vit_tiny_patch16_224", SMALL | changes), path)
    resampled = resample_abs_pos_embed(kept, [6, 6], [4, 4], num_prefix_tokens=0)
    torch.testing.assert_close(model.pos_embed, resampled)
    assert torch.equal(model.fc_norm.weight, state["norm.weight"])
    assert "moved: fc_norm.bias from norm.bias, fc_norm.weight from norm.weight" in note
    assert note.endswith("dropped: cls_token")

    changes = {"reg_tokens": 2, "no_embed_class": True}
    model, note = begun(open_model("vit_tiny_patch16_224", SMALL | changes), path)
    assert torch.equal(model.pos_embed, kept)
    assert torch.equal(model.cls_token, state["cls_token"])
    assert note.endswith("new: reg_token")

    changes = {"reg_tokens": 2, "global_pool": "map", "fc_norm": False}
    spec = open_model("vit_tiny_patch16_224", SMALL | changes)
    model, note = begun(spec, path)
    assert torch.equal(model.pos_embed[:, 3:], kept)
    assert not model.pos_embed[:, :3].any()
    latent = filled(spec, 3).attn_pool.latent
    assert torch.equal(model.attn_pool.latent, latent)
    assert "new: attn_pool." in note


def bicubic(before, after):
    """The matrix by which timm resamples one dimension."""
    return F.interpolate(
        torch.eye(before)[None, None], (after, before), mode="bicubic", antialias=True
    )[0, 0]


def test_positions_of_volumes(tmp_path):
    """Each dimension is resampled as one of an image; a file that does not say so was a cube."""
    path, shape = tmp_path / "weights.safetensors", {"dimension": 3, "patch_size": 4, "in_chans": 1}
    shape |= {"depth": 1, "embed_dim": 24, "num_heads": 2, "num_classes": 3}
    state = weights_file(open_model("hybrid_vit", shape | {"img_size": 16}), path)
    other = open_model("hybrid_vit", shape | {"img_size": (8, 24, 20)})
    model, note = begun(other, path)
    by_axis = [bicubic(4, sides) for sides in (2, 6, 5)]
    positions = state["pos_embed"].view(4, 4, 4, 24)
    expected = torch.einsum("abcw,da,eb,fc->defw", positions, *by_axis).reshape(1, 60, 24)
    torch.testing.assert_close(model.pos_embed, expected)
    assert "resampled: pos_embed (4 x 4 x 4 to 2 x 6 x 5 patches)" in note
    weights_file(other, path)
    with pytest.raises(UsageError, match="60 tokens, which do not form a cubic grid"):
        begun(open_model("hybrid_vit", shape | {"img_size": 16}), path)


# -- real runs ------------------------------------------------------------------------


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    folder = tmp_path_factory.mktemp("source")
    flags = "--interpolation bilinear --global_pool token --class_token --qk_norm"
    return train_tiny_gpu(folder, *flags.split())


def read(ckpt_dir, step):
    """The weights of a checkpoint, by PyTorch's own reader."""
    found = dcp.FileSystemReader(ckpt_dir / f"step_{step}").read_metadata().state_dict_metadata
    state = {
        name: torch.empty(each.size) for name, each in found.items() if name.startswith("model.")
    }
    with quiet_dcp():
        dcp.load(state, checkpoint_id=ckpt_dir / f"step_{step}", no_dist=True)
    return {name.removeprefix("model."): each for name, each in state.items()}


# The first step's learning rate is 0. The model is the checkpoint's, but for what is given.
FIRST_STEP = "--batch_size 16 --max_steps 1 --eval_batches 1 --warmup_steps 4 --num_workers 0"
FORMS = [
    (train_tiny, "--cpu_devices 2 --precision bf16 --grad_accum_steps 2", {}),
    long(train_tiny_gpu, "--mesh_domain 2 --dp_outer 2", {"processes": 4}),
    (train_tiny_gpu, "--fsdp megatron --precision bf16", {"processes": 2}),
]


@pytest.mark.parametrize(("train", "flags", "how"), FORMS)
def test_begins_with_the_weights(train, flags, how, source, tmp_path):
    given = f"--init_from {source.ckpt_dir} --image_size 24 --num_classes 12 {FIRST_STEP} {flags}"
    model = "--model vit_10b --global_pool token --class_token --qk_norm"  # tiny's are the rest
    result = train(tmp_path, *given.split(), *model.split(), **how)
    before, now = read(source.ckpt_dir, 6), read(tmp_path, 1)
    assert before.keys() == now.keys()
    for name, values in now.items():
        expected = before[name]
        if name == "pos_embed":
            expected = resample_abs_pos_embed(expected, [6, 6], [4, 4], num_prefix_tokens=1)
        if name.startswith("head."):
            assert values.shape[0] == 12
            assert not torch.equal(values[:10], expected)
        else:
            torch.testing.assert_close(values, expected, msg=name)
    assert result.column("loss")[0] == pytest.approx(math.log(12), abs=1.5)
    assert result.run_file["arguments"]["interpolation"] == "bilinear"
    assert result.run_file["arguments"]["init_from"] == str(source.ckpt_dir)
    assert "resampled: pos_embed (4 x 4 to 6 x 6 patches)" in result.stdout


def test_other_classes_get_another_head(source):
    head = {"num_classes": 10, "global_pool": "token", "class_token": True, "qk_norm": True}
    spec = open_model("vit_10b", TINY_SIZES | head)
    _, same = begun(spec, source.ckpt_dir, [str(digit) for digit in range(10)])
    _, other = begun(spec, source.ckpt_dir, [f"cat {number}" for number in range(10)])
    assert "new" not in same
    assert other.endswith("new: head.bias, head.weight")


def test_mistakes(source, capsys, tmp_path):
    def said(*flags):
        common = ("--data_dir", DIGITS, "--backend", "cuda", "--ckpt_dir", tmp_path / "x")
        return told_in_one_line(capsys, *common, "--batch_size", "16", *flags)

    path = tmp_path / "weights.safetensors"
    tiny = [*TINY_MODEL, "--global_pool", "token", "--class_token"]
    save_file(read(source.ckpt_dir, 6), path)
    assert (
        "has blocks.0.attn.k_norm.bias, blocks.0.attn.k_norm.weight, blocks.0.attn.q_norm.bias"
        " and 5 more, which the model does not have: use the" in said("--init_from", path, *tiny)
    )
    wider = said("--init_from", path, *tiny, "--qk_norm", "--embed_dim", "48")
    assert "cls_token has shape (1, 1, 32) in " in wider
    assert said("--init_from", tmp_path / "none").endswith(
        f"--init_from {tmp_path / 'none'}: no such checkpoint, folder or file"
    )
    neither = f"{DIGITS} is neither a checkpoint nor a run's folder with a checkpoint"
    assert said("--init_from", DIGITS).endswith(neither)
    told = said("--init_from", path, "--eval_only")
    assert told.endswith("is incompatible with --eval_only: drop one of the two")
    assert not (tmp_path / "x").exists()
