"""DCP folders that other training scripts and PyTorch's own tools have written, by command line."""

import json

import pytest
import timm
import torch
from PIL import Image
from safetensors.torch import load_file
from timm.data import create_transform
from timm.models.vision_transformer import VisionTransformer
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torchvision.datasets import ImageFolder

import run_vit_training
from tests.references.recipe_checkpoint import RECIPES_MODEL, RecipesViT
from tests.support.cli import DIGITS, run_program, tiny, train_tiny_gpu
from tests.support.usage_error import told_in_one_line
from tools.convert import main as convert

FLAGS = [
    *"--model vit_tiny_patch16_224 --image_size 16 --patch_size 4 --embed_dim 32".split(),
    *"--num_heads 2 --num_blocks 2 --num_classes 10 --global_pool map --qk_norm".split(),
    *"--scale_attn_norm --scale_mlp_norm --reg_tokens 8 --pre_norm --fc_norm".split(),
]
"""RECIPES_MODEL, by our flags."""
IMAGE = sorted((DIGITS / "val" / "7").glob("*.png"))[0]
TRANSFORM = create_transform(16, crop_pct=0.875, interpolation="bicubic")
FORMAT_UTILS = ("-m", "torch.distributed.checkpoint.format_utils")


@pytest.fixture(scope="module", params=["megatron", "fsdp2"])
def recipe(request, tmp_path_factory):
    """A folder that two processes have written, and timm's model with what PyTorch reads there."""
    folder = tmp_path_factory.mktemp(request.param) / "step_1_loss_2.303"
    script = ("-m", "tests.references.recipe_checkpoint", request.param, str(folder))
    done = run_program(*script, processes=2)
    assert done.returncode == 0, done.stderr
    plain = folder.parent / "plain.pt"
    dcp_to_torch_save(folder, plain)
    content = torch.load(plain, weights_only=False)
    if request.param == "megatron":
        model = RecipesViT(**RECIPES_MODEL)
        model.load_state_dict({n.removeprefix("module."): t for n, t in content["model"].items()})
    else:
        model = VisionTransformer(**RECIPES_MODEL)
        model.load_state_dict(content["app"]["model"])
    return folder, model.eval()


def weights_of(model):
    """Its state dict by timm's names."""
    if not isinstance(model, RecipesViT):
        return model.state_dict()
    return {name.replace("pos_embed.", ""): each for name, each in model.state_dict().items()}


def log_of(capsys, *words):
    """The log and the JSON of the program, which must succeed, in this process."""
    assert run_vit_training.main(list(map(str, words))) == 0
    output = capsys.readouterr()
    return output.err, json.loads(output.out)


def assert_noted(log):
    assert "(tensors: 189), entries that are no tensors: 1" in log


@torch.no_grad()
def test_predict(recipe, capsys):
    folder, model = recipe
    log, (found,) = log_of(capsys, "--predict", IMAGE, "--json", *FLAGS, "--resume", folder)
    image = TRANSFORM(Image.open(IMAGE).convert("RGB"))
    expected = model(image[None]).softmax(-1)[0]
    for each in found["top5"]:
        assert each["probability"] == pytest.approx(expected[each["index"]].item(), abs=1e-5)
    assert_noted(log)


@torch.no_grad()
def test_evaluate(recipe, capsys):
    folder, model = recipe
    use = ["--eval_only", "--json", "--backend", "cuda", "--data_dir", DIGITS, "--num_workers", 0]
    log, found = log_of(capsys, *use, *FLAGS, "--resume", folder)
    data = ImageFolder(DIGITS / "val", TRANSFORM)
    images, labels = zip(*data, strict=True)
    logits = model(torch.stack(images))
    loss = torch.nn.functional.cross_entropy(logits, torch.tensor(labels)).item()
    assert found["val_loss"] == pytest.approx(loss, rel=1e-4)
    assert_noted(log)


def test_initial_weights(recipe, tmp_path):
    """The first step of the warmup has a learning rate of 0, so it keeps them."""
    folder, model = recipe
    flags = (*FLAGS, "--init_from", str(folder), "--max_steps", "1")
    processes = 2 if isinstance(model, RecipesViT) else 1
    done = train_tiny_gpu(tmp_path, *flags, processes=processes)
    count = len(model.state_dict())
    assert f"initial weights of {folder}: {count} tensors unchanged; " in done.stdout
    assert_noted(done.stdout)
    dcp_to_torch_save(tmp_path / "step_1", tmp_path / "plain.pt")
    found = torch.load(tmp_path / "plain.pt", weights_only=True)["model"]
    assert_same(found, weights_of(model))


def assert_same(found, expected):
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name


def test_convert(recipe, tmp_path, capsys):
    folder, model = recipe
    for name in ("one.safetensors", "one.pt"):
        assert convert([str(folder), str(tmp_path / name)]) == 0
        assert_noted(capsys.readouterr().err)
    assert_same(load_file(tmp_path / "one.safetensors"), weights_of(model))
    settings = {key: value for key, value in RECIPES_MODEL.items() if key != "img_size"}
    timms = timm.create_model(
        "vit_tiny_patch16_224", checkpoint_path=tmp_path / "one.pt", img_size=16, **settings
    )
    assert_same(timms.state_dict(), weights_of(model))


def test_training_does_not_continue_it(recipe, tmp_path, capsys):
    folder, _ = recipe
    flags = [*tiny(tmp_path / "run"), *FLAGS, "--backend", "cuda"]
    line = told_in_one_line(capsys, *flags, "--resume", folder)
    assert line.endswith(f"for its weights, use --init_from {folder}")
    assert f"{folder} is a DCP folder of another program" in line
    for flag in ("--resume", "--init_from"):
        line = told_in_one_line(capsys, *flags, flag, folder.parent)
        assert line.endswith(f"name one of its DCP folders, such as {folder}")
    assert not (tmp_path / "run").exists()


# -- torch_to_dcp ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def around(tmp_path_factory):
    """A checkpoint of ours, and what PyTorch's tools make of it: a file, and a folder again."""
    root = tmp_path_factory.mktemp("around")
    ours = train_tiny_gpu(root / "run", "--max_steps", "1").ckpt_dir / "step_1"
    for words in (
        ("dcp_to_torch", ours, root / "plain.pt"),
        ("torch_to_dcp", root / "plain.pt", root / "again"),
    ):
        done = run_program(*FORMAT_UTILS, *map(str, words))
        assert done.returncode == 0, done.stderr
    assert not (root / "again" / "manifest.json").exists()
    return ours, root / "again"


def test_a_run_around_pytorchs_tools(around, tmp_path, capsys):
    """It still describes its run, whose model and classes need no flags."""
    ours, again = around
    use = ("--predict", IMAGE, "--json", "--resume")
    expected = log_of(capsys, *use, ours)[1]
    log, found = log_of(capsys, *use, again)
    assert found == expected
    assert f"{again} has no manifest.json: its files are not verified" in log
    assert convert([str(again), str(tmp_path / "again.safetensors")]) == 0
    assert convert([str(ours), str(tmp_path / "ours.safetensors")]) == 0
    files = [load_file(tmp_path / f"{name}.safetensors") for name in ("again", "ours")]
    assert_same(*files)
    capsys.readouterr()
    flags = [*tiny(tmp_path / "run"), "--backend", "cuda"]
    line = told_in_one_line(capsys, *flags, "--resume", again)
    assert f"{again} has no manifest.json: its save was interrupted, or another program" in line
    assert line.endswith(f"use --init_from {again}")
    done = train_tiny_gpu(tmp_path / "run", "--max_steps", "1", "--init_from", str(again))
    assert f"initial weights of {again}: " in done.stdout


def test_a_bare_state_dict(around, tmp_path, capsys):
    """Of a model, as the FSDP tutorial gathers and saves it."""
    ours, _ = around
    plain = ours.parent.parent / "plain.pt"
    state = torch.load(plain, weights_only=True)["model"]
    torch.save(state, tmp_path / "full.pt")
    done = run_program(
        *FORMAT_UTILS, "torch_to_dcp", str(tmp_path / "full.pt"), str(tmp_path / "full")
    )
    assert done.returncode == 0, done.stderr
    flags = tiny(tmp_path / "run")
    use = ("--predict", IMAGE, "--json", *flags, "--resume")
    assert log_of(capsys, *use, tmp_path / "full")[1] == log_of(capsys, *use, plain)[1]
