"""Weights that other programs saved: timm's trainer, compiled and wrapped models, Hugging Face."""

import argparse
import importlib.util
import json
import pathlib
import runpy
from pathlib import Path

import numpy as np
import pytest
import timm
import torch
import torchvision
import transformers
from PIL import Image, ImageOps
from safetensors.torch import load_file
from timm.data import create_dataset, create_loader
from timm.data.readers.reader_image_folder import find_images_and_targets
from timm.utils import CheckpointSaver, ModelEmaV3
from torch import distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torchvision.datasets import ImageFolder

import run_vit_training
from data.config import DataConfig
from data.index import cached_split
from models.registry import open_model
from tests.references.plain_hybrid_vit import random_hybrid_vit
from tests.support.checkpoints import write_shards_of_xla_fsdp
from tests.support.cli import DIGITS, HAS_XLA, TINY_SIZES, train_tiny_gpu
from tests.support.usage_error import told_in_one_line
from tools.convert import main as convert
from training.weights.find import find

FLAGS = [
    *"--model vit_tiny_patch16_224 --image_size 16 --patch_size 4 --embed_dim 32".split(),
    *"--num_heads 2 --num_blocks 2 --batch_size 8 --num_workers 0 --no_grad_ckpt".split(),
]


def timms_batches(dataset):
    """Batches of a dataset of timm's, prepared as timm does it for this model."""
    return create_loader(
        dataset,
        (3, 16, 16),
        8,
        device=torch.device("cpu"),
        use_prefetcher=False,
        num_workers=0,
        mean=(0.5, 0.5, 0.5),
        std=(0.5, 0.5, 0.5),
        crop_pct=0.9,
        interpolation="bicubic",
    )


def val_of(root, **how):
    return create_dataset("", root=str(root), split="val", **how)


def timms_accuracy(model, dataset):
    model.eval()
    with torch.no_grad():
        right = [(model(x).argmax(1) == y).sum().item() for x, y in timms_batches(dataset)]
    return 100 * sum(right) / len(dataset)


@pytest.fixture(scope="module")
def twelve(tmp_path_factory):
    """Digits in the class folders 0 to 11: timm counts them, as text 10 comes before 2."""
    root = tmp_path_factory.mktemp("twelve")
    for split, count in (("train", 16), ("val", 6)):
        for label in range(12):
            (root / split / str(label)).mkdir(parents=True)
            for path in sorted((DIGITS / split / str(label % 10)).glob("*.png"))[:count]:
                image = Image.open(path).convert("L")
                image = image if label < 10 else ImageOps.invert(image)
                image.save(root / split / str(label) / path.name)
    return root


@pytest.fixture(scope="module")
def trained(twelve, tmp_path_factory):
    """What timm's own trainer leaves, of a model that timm trained on them: the folder of its
    checkpoints, the model, and its moving average."""
    torch.manual_seed(0)
    model = timm.create_model("vit_tiny_patch16_224", num_classes=12, **TINY_SIZES)
    average = ModelEmaV3(model, decay=0.9)
    optimizer = torch.optim.AdamW(model.parameters(), 3e-3)
    batches = timms_batches(create_dataset("", root=str(twelve), split="train"))
    images, labels = map(torch.cat, zip(*batches, strict=True))
    for step in range(250):
        some = torch.randperm(len(images))[:32]
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(images[some]), labels[some]).backward()
        optimizer.step()
        average.update(model, step)
    folder = tmp_path_factory.mktemp("timm")
    args = argparse.Namespace(model="vit_tiny_patch16_224", lr=3e-3, out=pathlib.Path("output"))
    saver = CheckpointSaver(model, optimizer, args, average, checkpoint_dir=str(folder))
    saver.save_checkpoint(3, metric=np.float64(41.5))
    return folder, model, average.module


def evaluated(capsys, *flags):
    """What --eval_only --json prints; FSDP2 on the CPU, in this process."""
    flags = ["--eval_only", "--json", "--backend", "cuda", *FLAGS, "--num_classes", "12", *flags]
    assert run_vit_training.main(list(map(str, flags))) == 0
    output = capsys.readouterr()
    return json.loads(output.out), output.err


@pytest.mark.parametrize("average", [(), ("--use_ema",)])
def test_timms_checkpoint_has_timms_accuracy(average, twelve, trained, capsys):
    folder, model, ema = trained
    expected = timms_accuracy(ema if average else model, val_of(twelve))
    assert 20 < expected < 100  # 8 by chance; how far it comes depends on the processor
    for name in ("last.pth.tar", "model_best.pth.tar"):
        flags = ("--data_dir", twelve, "--resume", folder / name, "--class_order", "natural")
        found, _ = evaluated(capsys, *flags, *average)
        assert found["val_top1"] == pytest.approx(expected)


def predicted(capsys, image, *flags):
    """The probabilities of the classes of an image by --predict, by label, and the log."""
    words = ["--predict", image, "--json", *FLAGS, *flags]
    assert run_vit_training.main(list(map(str, words))) == 0
    output = capsys.readouterr()
    (result,) = json.loads(output.out)
    return {each["index"]: each["probability"] for each in result["top5"]}, output.err


# -- the order of the classes ---------------------------------------------------------------------

IMAGE = sorted((DIGITS / "val" / "7").glob("*.png"))[0]
REFUSED = (
    "is ambiguous: class 2 is 10 in torchvision's order, 2 in timm's: use --class_order sorted"
)


@pytest.mark.parametrize(
    "use",
    [
        ("--eval_only", "--backend", "cuda", "--resume"),
        ("--backend", "cuda", "--max_steps", 1, "--init_from"),
    ],
)
def test_an_uncertain_order_is_refused(use, twelve, trained, capsys, tmp_path):
    flags = ["--num_classes", 12, "--data_dir", twelve, "--ckpt_dir", tmp_path / "run"]
    line = told_in_one_line(capsys, *use, trained[0] / "last.pth.tar", *FLAGS, *flags)
    assert REFUSED in line
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("use", [("--eval_only", "--backend", "cuda"), ("--predict", IMAGE)])
def test_fewer_folders_than_classes_are_refused(use, trained, capsys):
    flags = [*FLAGS, "--num_classes", 12, "--data_dir", DIGITS]
    line = told_in_one_line(capsys, *use, *flags, "--resume", trained[0] / "last.pth.tar")
    told = "last.pth.tar has 12 classes without names, but {} has 10 class folders: use"
    assert told.format(DIGITS) in line
    words = [*use, *flags, "--resume", trained[0] / "last.pth.tar", "--class_order", "sorted"]
    assert run_vit_training.main(list(map(str, words))) == 0


def test_a_map_may_have_classes_without_a_folder(twelve, trained, capsys, tmp_path):
    folder, model, _ = trained
    for split in ("train", "val"):
        (tmp_path / split).mkdir()
        for label in range(1, 12):
            (tmp_path / split / str(label)).symlink_to(twelve / split / str(label))
    names = tmp_path / "names.txt"
    names.write_text("".join(f"{label}\r\n" for label in range(12)))
    source = ("--data_dir", tmp_path, "--resume", folder / "last.pth.tar")
    found, _ = evaluated(capsys, *source, "--class_map", names)
    dataset = val_of(twelve, class_map=str(names))
    assert dataset.reader.class_to_idx["1"] == 1
    dataset.reader.samples = [each for each in dataset.reader.samples if each[1] != 0]
    assert found["val_top1"] == pytest.approx(timms_accuracy(model, dataset))


@pytest.mark.parametrize(
    ("content", "told"),
    [
        ("0\n1\n", "lacks classes of the images: 10, 11, 2, 3, 4, ...; add a line"),
        ("0\n1\n1\n", "contains 1 2 times"),
        ("0\n\n\n1\n", "contains an empty line 2 times"),
        (None, "No such file or directory"),
        (b"\xff\xfe0", "invalid start byte"),
    ],
)
def test_maps_that_cannot_be_used(content, told, twelve, trained, capsys, tmp_path):
    names = tmp_path / "names.txt"
    if content is not None:
        names.write_bytes(content if isinstance(content, bytes) else content.encode())
    flags = ["--eval_only", "--backend", "cuda", *FLAGS, "--num_classes", 12, "--class_map", names]
    source = ["--data_dir", twelve, "--resume", trained[0] / "last.pth.tar"]
    assert told in told_in_one_line(capsys, *flags, *source)
    line = told_in_one_line(capsys, *flags, *source, "--class_order", "natural")
    assert "--class_map" in line
    assert "--class_order" in line


def test_the_order_is_timms_own(tmp_path):
    names = ["b2", "b10", "B3", "a", "A1", "c", "10", "9", "x1y20", "x1y3"]
    for name in names:
        (tmp_path / "val" / name).mkdir(parents=True)
        (tmp_path / "val" / name / "1.png").symlink_to(IMAGE)
    config = DataConfig(data_dir=str(tmp_path), class_order="natural")
    split = cached_split(config, "val")
    samples, class_to_idx = find_images_and_targets(str(tmp_path / "val"))
    assert {name: label for label, name in enumerate(split.classes)} == class_to_idx
    ours = dict(zip(split.paths, split.labels.tolist(), strict=True))
    assert ours == dict(samples)
    split = cached_split(DataConfig(data_dir=str(tmp_path)), "val")
    assert split.classes == ImageFolder(str(tmp_path / "val")).classes


def test_a_run_keeps_its_order(twelve, trained, capsys, tmp_path):
    flags = ["--backend", "cuda", *FLAGS, "--num_classes", 12, "--data_dir", twelve]
    flags += ["--lr", 0, "--weight_decay", 0, "--warmup_steps", 0, "--hflip", 0]

    def train(ckpt_dir, *more):
        assert run_vit_training.main([*map(str, [*flags, "--ckpt_dir", ckpt_dir, *more])]) == 0
        return capsys.readouterr().out

    first = tmp_path / "first"
    source = ("--init_from", trained[0] / "last.pth.tar", "--class_order", "natural")
    out = train(first, *source, "--max_steps", 1)
    assert "tensors unchanged" in out
    assert "dropped" not in out
    expected = timms_accuracy(trained[1], val_of(twelve))
    again = train(first, "--max_steps", 2)
    assert "resuming" in again
    assert f"{expected:.2f} %" in again
    found, _ = evaluated(capsys, "--data_dir", twelve, "--resume", first)
    assert found["val_top1"] == pytest.approx(expected)
    out = train(tmp_path / "second", "--init_from", first, "--max_steps", 1)
    assert "dropped" not in out
    assert f"{expected:.2f} %" in out
    words = [*flags, "--ckpt_dir", first, "--max_steps", 3, "--class_order", "sorted"]
    line = told_in_one_line(capsys, *words)
    assert line.endswith(
        "class 2 is 2 in the checkpoint, 10 in the data; "
        "use the --class_order or --class_map of the training"
    )


# -- names of tensors -----------------------------------------------------------------------------


def _wrapped(prefix):
    return lambda state: {f"{prefix}{name}": each for name, each in state.items()}


FORMS = {
    "compiled": _wrapped("_orig_mod."),
    "compiled around DDP": _wrapped("_orig_mod.module."),
    "DDP around compiled": _wrapped("module._orig_mod."),
    "Lightning": lambda state: {"state_dict": _wrapped("model.")(state) | {"loss.weight": ONES}},
    "backbone": lambda state: {
        name if name.startswith("head.") else f"backbone.{name}": each
        for name, each in state.items()
    },
    "student and teacher": lambda state: {
        "model": _wrapped("teacher.backbone.")(state) | _wrapped("student.backbone.")(state)
    },
    "DeiT": lambda state: {"model": state, "args": argparse.Namespace(device=torch.device("cpu"))},
    "a number of NumPy": lambda state: {"state_dict": state, "metric": np.float32(4.5)},
}
ONES = torch.ones(2)
CHANGED = {
    "compiled": "_orig_mod. removed from names",
    "compiled around DDP": "_orig_mod. removed from names; module. removed from names",
    "Lightning": "model. removed from names; left out: loss.weight",
    "backbone": "backbone. removed from names",
    "student and teacher": "teacher.backbone. removed from names; left out: student.backbone.",
}


@pytest.mark.parametrize("form", FORMS)
def test_names_with_a_prefix(form, trained, capsys, tmp_path):
    state = trained[1].state_dict()
    torch.save(state, tmp_path / "plain.pt")
    torch.save(FORMS[form](state), tmp_path / "wrapped.pt")
    source = ("--num_classes", 12, "--data_dir", tmp_path, "--resume")
    plain, _ = predicted(capsys, IMAGE, *source, tmp_path / "plain.pt")
    found, log = predicted(capsys, IMAGE, *source, tmp_path / "wrapped.pt")
    assert found == plain
    assert CHANGED.get(form, "") in log
    converted = tmp_path / "converted.safetensors"
    assert convert([str(tmp_path / "wrapped.pt"), str(converted)]) == 0
    theirs = load_file(converted)
    assert theirs.keys() == state.keys()
    assert all(torch.equal(theirs[name], state[name]) for name in state)


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (
            lambda state: _wrapped("a.")(state) | _wrapped("b.")(state),
            "it contains several models, a",
        ),
        (lambda state: state | _wrapped("_orig_mod.")(state), "cls_token and _orig_mod.cls_token"),
        (
            lambda state: torchvision.models.VisionTransformer(
                16, 4, 2, 2, 32, 128, num_classes=12
            ).state_dict(),
            "has no cls_token, which the model has: its parameter names are not timm's (such as "
            "class_token): load the file with timm.create_model(",
        ),
        (
            lambda state: {name: each for name, each in state.items() if "head" not in name},
            "has no head.weight, which the model has: use the model flags that it was ",
        ),
        (lambda state: Code(), "only tensors are loaded, but it contains exec: save only the"),
        (
            lambda state: timm.create_model("vit_tiny_patch16_224", **TINY_SIZES),
            "it contains no state dict of tensors: save only the weights, with torch.save(",
        ),
    ],
)
def test_files_that_are_refused(content, told, trained, capsys, tmp_path):
    path = tmp_path / "weights.pt"
    torch.save(content(trained[1].state_dict()), path)
    line = told_in_one_line(
        capsys, "--predict", IMAGE, *FLAGS, "--num_classes", 12, "--resume", path
    )
    assert told in line
    assert "--model" not in line


class Code:
    """Runs code in whoever unpickles it."""

    def __reduce__(self):
        return exec, ("raise SystemExit",)


def test_parts_of_tensors_are_refused(tmp_path, capsys):
    """The state dict of a sharded model, as each process saves its own."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))
        torch.save({"head.weight": distribute_tensor(ONES, mesh, [Shard(0)])}, tmp_path / "a.pt")
    finally:
        dist.destroy_process_group()
    line = told_in_one_line(capsys, "--predict", IMAGE, *FLAGS, "--resume", tmp_path / "a.pt")
    assert "it contains one process's parts of tensors: save whole ones, those of torch." in line


@pytest.mark.parametrize("name", ["model.safetensors", "model.pt"])
def test_a_pointer_of_git_lfs(name, capsys, tmp_path):
    path = tmp_path / name
    path.write_text(f"version https://git-lfs.github.com/spec/v1\noid sha256:{64 * 'a'}\nsize 9\n")
    line = told_in_one_line(capsys, "--predict", IMAGE, *FLAGS, "--resume", path)
    told = f"cannot read the checkpoint {path}: it is a Git LFS pointer: download the file"
    assert line.startswith(told)
    assert convert([str(path), str(tmp_path / "x.pt")]) == 2
    assert "it is a Git LFS pointer" in capsys.readouterr().err


@pytest.mark.parametrize("form", ["folder", "file of torch.save", "without a head"])
def test_hugging_faces_names(form, capsys, tmp_path):
    """The logits are those of transformers itself, with the same weights."""
    torch.manual_seed(1)
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    sizes |= {"intermediate_size": 128, "image_size": 16, "patch_size": 4, "num_labels": 5}
    model = transformers.ViTForImageClassification(transformers.ViTConfig(**sizes)).eval()
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.3)
    pixels = torch.randn(3, 3, 16, 16)
    with torch.no_grad():
        expected = model(pixels).logits
        hidden = model.vit(pixels).last_hidden_state
    source = tmp_path / "theirs"
    if form == "folder":
        model.save_pretrained(source)
    elif form == "without a head":
        model.vit.save_pretrained(source)
    else:
        source = tmp_path / "theirs.pt"
        torch.save(model.state_dict(), source)
    converted = tmp_path / "ours.safetensors"
    assert convert([str(source), str(converted)]) == 0
    assert "names of Hugging Face's ViT replaced by timm's" in capsys.readouterr().err
    has_head = form != "without a head"
    ours = timm.create_model("vit_tiny_patch16_224", num_classes=5 * has_head, **TINY_SIZES).eval()
    ours.load_state_dict(load_file(converted))
    with torch.no_grad():
        torch.testing.assert_close(ours.forward_features(pixels), hidden, atol=1e-4, rtol=1e-4)
        if has_head:
            torch.testing.assert_close(ours(pixels), expected, atol=1e-4, rtol=1e-4)
    state = ours.state_dict()
    read = find(source, "--init_from").read([*state])
    assert all(torch.equal(read[name], each) for name, each in state.items())


# -- PhysicsNeMo's HybridViT ----------------------------------------------------------------------

HYBRID = {2: ((16, 24), 4, 3), 3: ((8, 16, 12), 4, 1)}
"""Size, patches and channels of a small one for images and for volumes; all else is in SHAPE."""
SHAPE = (48, 2, 4, 96, 5)
OF_SHAPE = "--model hybrid_vit --embed_dim 48 --num_blocks 2 --num_heads 4 --mlp_ratio 2".split()


def hybrid_flags(dimension):
    size, patch, channels = HYBRID[dimension]
    words = ["--dimension", dimension, "--patch_size", patch, "--in_chans", channels]
    return [*OF_SHAPE, *map(str, [*words, "--num_classes", SHAPE[-1], "--image_size", *size])]


def arrays(root, dimension):
    """Files of arrays, which no preprocessing changes: 10 to train on, 5 in val/, two a class."""
    torch.manual_seed(2)
    size, _, channels = HYBRID[dimension]
    found = {}
    for split, count in (("train", 10), ("val", 5)):
        images = torch.rand(count, channels, *size)
        for index, image in enumerate(images):
            path = root / split / str(index % 5) / f"{index}.npy"
            path.parent.mkdir(parents=True, exist_ok=True)
            np.save(path, image.movedim(0, -1).numpy())
        found[split] = images, torch.arange(count) % 5
    return found


def plain_loss(model, images_and_labels):
    images, labels = images_and_labels
    with torch.no_grad():
        return pytest.approx(nn.functional.cross_entropy(model(images), labels).item(), rel=1e-5)


@pytest.mark.parametrize("dimension", [2, 3])
def test_physicsnemos_hybrid_vit_both_ways(dimension, capsys, tmp_path):
    """Its file has its losses here; a file made of a run here has the run's losses there."""
    theirs = random_hybrid_vit(*HYBRID[dimension], *SHAPE)
    data = arrays(tmp_path, dimension)

    torch.save(_wrapped("module.")(theirs.state_dict()), tmp_path / "theirs.pt")
    source = ["--backend", "cuda", "--data_source", "volumes", "--data_dir", str(tmp_path)]
    source += ["--batch_size", "10", "--num_workers", "0", *hybrid_flags(dimension)]

    def evaluated(*flags):
        assert run_vit_training.main(["--eval_only", "--json", *source, *map(str, flags)]) == 0
        return json.loads(capsys.readouterr().out)["val_loss"]

    expected = plain_loss(theirs, data["val"])
    assert evaluated("--resume", tmp_path / "theirs.pt") == expected
    ours = tmp_path / "ours.safetensors"
    assert convert([str(tmp_path / "theirs.pt"), str(ours)]) == 0
    assert "names of PhysicsNeMo's HybridViT replaced by timm's" in capsys.readouterr().err
    assert evaluated("--resume", ours) == expected

    words = ["--predict", tmp_path / "val", "--json", *source, "--resume", ours]
    assert run_vit_training.main(list(map(str, words))) == 0
    found = {
        int(pathlib.Path(each["image"]).stem): {
            top["index"]: top["probability"] for top in each["top5"]
        }
        for each in json.loads(capsys.readouterr().out)
    }
    for index, probabilities in enumerate(theirs(data["val"][0]).softmax(1).tolist()):
        assert found[index] == pytest.approx(dict(enumerate(probabilities)), abs=1e-6)

    tuned = train_tiny_gpu(
        tmp_path / "tuned", *source, "--init_from", str(tmp_path / "theirs.pt"), "--max_steps", "2"
    )
    assert tuned.column("loss")[0] == plain_loss(theirs, data["train"])
    back = tmp_path / "back.pt"
    assert convert([str(tuned.ckpt_dir), str(back), "--names", "physicsnemo"]) == 0
    assert convert([str(ours), str(tmp_path / "same.pt"), "--names", "physicsnemo"]) == 0
    same = torch.load(tmp_path / "same.pt")
    assert all(torch.equal(same[name], each) for name, each in theirs.state_dict().items())
    theirs.load_state_dict(torch.load(back))
    (evaluation,) = tuned.evaluations
    assert evaluation["val_loss"] == plain_loss(theirs, data["val"])
    assert evaluation["val_loss"] != expected


# -- PyTorch/XLA's ViT-10B example ----------------------------------------------------------------


class ExampleModel(nn.Module):
    """The example's, with its names: timm's blocks, whose norms have an epsilon of 1e-5."""

    def __init__(self):
        super().__init__()
        self.patch_embed = timm.layers.PatchEmbed(16, 4, 3, 32)
        self.pos_embed = nn.Parameter(torch.randn(1, 16, 32))
        self.blocks = nn.Sequential(
            *(timm.models.vision_transformer.Block(32, 2, qkv_bias=True) for _ in range(2))
        )
        self.norm = nn.LayerNorm(32, eps=1e-6)
        self.head = nn.Linear(32, 12)

    def forward(self, images):
        tokens = self.patch_embed(images) + self.pos_embed
        return self.head(self.norm(self.blocks(tokens)).mean(1))


@pytest.mark.skipif(not HAS_XLA, reason="no torch_xla for this PyTorch")
def test_a_consolidated_checkpoint_of_pytorch_xlas_example(capsys, tmp_path):
    """Shards of three chips, joined by torch_xla's own tool; a single one is refused."""
    torch.manual_seed(0)
    example = ExampleModel().eval()
    write_shards_of_xla_fsdp(f"{tmp_path}/epoch_10_rank_{{}}.ckpt", example.state_dict(), 3)
    folder = Path(importlib.util.find_spec("torch_xla").origin).parent
    tool = runpy.run_path(str(folder / "distributed" / "fsdp" / "state_dict_utils.py"))
    joined = str(tmp_path / "epoch_10.pth")
    tool["consolidate_sharded_model_checkpoints"](f"{tmp_path}/epoch_10_rank_", "*.ckpt", joined)
    capsys.readouterr()
    converted = tmp_path / "converted.safetensors"
    assert convert([joined, str(converted)]) == 0
    state = load_file(converted)
    theirs = example.state_dict()
    assert state.keys() == theirs.keys()
    assert all(torch.equal(state[name], theirs[name]) for name in theirs)
    spec = open_model("vit_10b", TINY_SIZES | {"num_classes": 12})
    model = spec.build().to_empty(device="cpu").eval()
    model.load_state_dict(state)
    images = torch.randn(4, 3, 16, 16)
    with torch.no_grad():
        torch.testing.assert_close(model(images), example(images), rtol=1e-3, atol=1e-3)
    capsys.readouterr()
    assert convert([f"{tmp_path}/epoch_10_rank_0.ckpt", str(tmp_path / "new.pt")]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "it has one chip's shards of the weights (PyTorch/XLA FSDP): join the files of" in line
