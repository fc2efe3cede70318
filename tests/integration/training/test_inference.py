"""A trained model in use: --predict and --eval_only, from folders and files, against plain timm."""

import argparse
import json
import os
import shutil
import sys

import pytest
import torch
import torch.distributed.checkpoint as dcp
import torchvision.transforms as T
from PIL import Image
from safetensors.torch import save_file
from timm.models.vision_transformer import VisionTransformer

import run_vit_training
from tests.references.plain_checkpoint import convert
from tests.support.cli import ALL_DIGITS, DIGITS, TINY_MODEL, VAL_IMAGES, run_program, train_tiny
from tests.support.usage_error import told_in_one_line
from training.checkpoints.format import quiet_dcp

WORDS = "zero one two three four five six seven eight nine".split()
CLASSES = sorted(WORDS)  # their order is not that of the digits
NUMBERS = [f"class {label}" for label in range(10)]
STEPS = 40


@pytest.fixture(scope="module")
def words(tmp_path_factory):
    """The digits with spelt-out class names."""
    root = tmp_path_factory.mktemp("words")
    for split in ("train", "val"):
        (root / split).mkdir()
        for digit, word in enumerate(WORDS):
            (root / split / word).symlink_to(DIGITS / split / str(digit))
    return root


@pytest.fixture(scope="module")
def trained(words, tmp_path_factory):
    folder = tmp_path_factory.mktemp("trained")
    return train_tiny(folder, "--data_dir", str(words), "--max_steps", str(STEPS))


@pytest.fixture(scope="module")
def files(trained, tmp_path_factory):
    """The trained weights in every kind of file, and as a checkpoint of an earlier version."""
    root = tmp_path_factory.mktemp("files")
    content = convert(trained.ckpt_dir / f"step_{STEPS}", root / "plain.pt")
    state = content["model"]
    torch.save(state, root / "bare.pt")
    torch.save(state, root / "old_format.pth", _use_new_zipfile_serialization=False)
    torch.save({"model": state, "epoch": 3}, root / "model_key.pt")
    wrapped = {f"module.{name}": tensor for name, tensor in state.items()}
    torch.save({"state_dict": wrapped}, root / "wrapped.pt")
    save_file({name: tensor.contiguous() for name, tensor in state.items()},
              root / "bare.safetensors")  # fmt: skip
    del content["training"]["classes"], content["training"]["format"]
    with quiet_dcp():
        writer = dcp.FileSystemWriter(root / "step_earlier")
        dcp.save(content, storage_writer=writer, no_dist=True)
    return root


def timm_top5(files, paths):
    """(labels, probabilities) of the five likeliest classes of each image, with timm alone."""
    model = VisionTransformer(
        img_size=16, patch_size=4, embed_dim=32, depth=2, num_heads=2, num_classes=10,
        class_token=False, global_pool="avg", fc_norm=False,
    )  # fmt: skip
    model.load_state_dict(torch.load(files / "plain.pt", weights_only=True)["model"])
    transform = T.Compose([
        T.Resize(16 * 256 // 224, interpolation=T.InterpolationMode.BICUBIC), T.CenterCrop(16),
        T.ToTensor(), T.Normalize((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)),
    ])  # fmt: skip
    images = torch.stack([transform(Image.open(path).convert("RGB")) for path in paths])
    with torch.no_grad():
        values, labels = model.eval()(images).softmax(-1).topk(5)
    return labels.tolist(), values.tolist()


def assert_is_timms(results, files, paths, names, rel=1e-4):
    assert [result["image"] for result in results] == [str(path) for path in paths]
    for result, labels, values in zip(results, *timm_top5(files, paths), strict=True):
        assert [entry["index"] for entry in result["top5"]] == labels
        assert [entry["class"] for entry in result["top5"]] == [names[label] for label in labels]
        assert [e["probability"] for e in result["top5"]] == pytest.approx(values, rel=rel)


def predict(capsys, *flags):
    """What --predict prints in this process."""
    assert run_vit_training.main(["--predict", *map(str, flags)]) == 0
    assert "torch_xla" not in sys.modules
    return capsys.readouterr().out


IMAGE = sorted((DIGITS / "val" / "7").glob("*.png"))[0]


# -- predict --------------------------------------------------------------------------


def test_folder_of_images_from_a_run(trained, files, tmp_path):
    images = tmp_path / "images"
    shutil.copytree(ALL_DIGITS / "val" / "3", images / "b")
    shutil.copy(IMAGE, images / "A.PNG")
    Image.open(IMAGE).save(images / "still.gif")
    (images / "notes.txt").touch()
    (images / "cut.png").write_bytes(IMAGE.read_bytes()[:-40])
    (images / "up").symlink_to("..")
    os.mkfifo(images / "pipe.png")
    done = run_program(
        "run_vit_training.py", "--predict", str(images), str(IMAGE), "--json",
        "--resume", str(trained.ckpt_dir),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stderr.splitlines() == [
        "skipped 3 other files in the folders: linked folder 1, .txt 1, not a file 1",
        f"{images}/cut.png is not a readable image: image file is truncated",
    ]
    paths = [images / "A.PNG", *sorted((images / "b").iterdir()), images / "still.gif", IMAGE]
    assert len(paths) > 32
    assert_is_timms(json.loads(done.stdout), files, paths, CLASSES)


@pytest.mark.parametrize(
    ("name", "flags", "names"),
    [
        ("plain.pt", (), CLASSES),
        ("bare.pt", TINY_MODEL, CLASSES),
        ("wrapped.pt", TINY_MODEL, CLASSES),
        ("bare.safetensors", TINY_MODEL, CLASSES),
        ("bare.safetensors", (*TINY_MODEL, "--data_dir", "/none"), NUMBERS),
        ("step_earlier", ("--data_dir", "/none"), NUMBERS),
        ("plain.pt", ("--data_dir", "/none", "--embed_dim", "32", "--model", "vit_10b"), CLASSES),
    ],
)
def test_every_kind_of_weights(name, flags, names, files, words, capsys):
    out = predict(capsys, IMAGE, "--resume", files / name, "--json", "--data_dir", words, *flags)
    assert_is_timms(json.loads(out), files, [IMAGE], names)


def test_table_from_the_newest_of_ckpt_dir(trained, files, capsys):
    lines = predict(capsys, IMAGE, IMAGE, "--ckpt_dir", trained.ckpt_dir).splitlines()
    (labels, _), (values, _) = timm_top5(files, [IMAGE, IMAGE])
    assert lines[:6] == lines[6:]
    assert lines[0] == str(IMAGE)
    for line, label, value in zip(lines[1:6], labels, values, strict=True):
        percent, name = line.split()
        assert float(percent.rstrip("%")) == pytest.approx(100 * value, abs=0.006)
        assert name == CLASSES[label]


def test_bf16_computes_in_bf16(files, capsys):
    flags = (IMAGE, "--resume", files / "plain.pt", "--json", "--precision")
    lower, higher = (json.loads(predict(capsys, *flags, p))[0]["top5"] for p in ("bf16", "fp32"))
    low, high = ({e["index"]: e["probability"] for e in top} for top in (lower, higher))
    assert low != high
    assert low[higher[0]["index"]] == pytest.approx(higher[0]["probability"], rel=0.1)


def test_grey_images_and_fewer_than_five_classes(capsys, tmp_path):
    model = VisionTransformer(
        img_size=16, patch_size=4, in_chans=1, embed_dim=32, depth=2, num_heads=2, num_classes=3,
        class_token=False, global_pool="avg", fc_norm=False,
    )  # fmt: skip
    save_file(model.state_dict(), tmp_path / "three.safetensors")
    flags = [*TINY_MODEL, "--in_chans", 1, "--num_classes", 3, "--data_dir", DIGITS, "--json"]
    out = predict(capsys, IMAGE, "--resume", tmp_path / "three.safetensors", *flags)
    (result,) = json.loads(out)
    assert sorted(entry["index"] for entry in result["top5"]) == [0, 1, 2]
    # Ten folders cannot be the names of three classes.
    assert all(entry["class"] == f"class {entry['index']}" for entry in result["top5"])
    assert sum(entry["probability"] for entry in result["top5"]) == pytest.approx(1, abs=1e-5)


# -- evaluate -------------------------------------------------------------------------


def contents(folder):
    return {p: (p.stat().st_mtime_ns, p.read_bytes()) for p in folder.rglob("*") if p.is_file()}


@pytest.mark.parametrize(
    ("name", "flags", "processes"),
    [
        ("", "--cpu_devices 2", 1),
        ("bare.safetensors", "--xla_fsdp nested --flatten_parameters", 1),
        ("", "--backend cuda", 2),
    ],
)
def test_eval_only_repeats_the_runs_own(name, flags, processes, trained, files, words, tmp_path):
    (tmp_path / "val").symlink_to(words / "val")
    before = contents(trained.ckpt_dir)
    model = ["--resume", str(files / name), *TINY_MODEL] if name else []
    done = run_program(
        "run_vit_training.py", "--eval_only", "--json", "--ckpt_dir", str(trained.ckpt_dir),
        "--data_dir", str(tmp_path), "--batch_size", "100", "--num_workers", "0",
        *model, *flags.split(), processes=processes,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    result, expected = json.loads(done.stdout), trained.evaluations[-1]
    keys = "val_loss val_top1 val_top5 val_images bad_images lost_classes"
    keys += " val_balanced_accuracy val_worst_recall val_largest_class"
    of_report = "balanced_accuracy macro largest_class calibration classes confusion errors"
    assert {*result} == {*keys.split(), *of_report.split()}
    assert result["bad_images"] == 0
    assert result["val_loss"] == pytest.approx(expected["val_loss"], rel=1e-5)
    assert result["val_top1"] == pytest.approx(expected["val_top1"], abs=0.3)  # an image
    assert result["val_images"] == VAL_IMAGES
    assert contents(trained.ckpt_dir) == before
    assert "val loss: " in done.stderr


# -- mistakes -------------------------------------------------------------------------


def test_no_such_weights(capsys, tmp_path):
    class Code:
        def __reduce__(self):
            return exec, ("raise SystemExit",)

    torch.save(argparse.Namespace(a=1), tmp_path / "namespace.pt")
    torch.save({"model": Code()}, tmp_path / "code.pt")
    torch.save([1, 2], tmp_path / "list.pt")
    torch.save({"step": 1}, tmp_path / "numbers.pt")
    for name in ("text.pt", "text.safetensors"):
        (tmp_path / name).write_text("hello")
    (tmp_path / "empty.pt").touch()

    def said(resume):
        flags = ["--ckpt_dir", tmp_path / "x", "--resume", resume]
        return told_in_one_line(capsys, "--predict", IMAGE, *flags)

    assert "x has no checkpoint: use --resume PATH" in said("auto")
    assert "--resume none: a trained model is required" in said("none")
    assert "no such checkpoint, folder or file" in said(tmp_path / "missing.pt")
    neither = f"{tmp_path} is neither a checkpoint nor a run's folder with a checkpoint"
    assert said(tmp_path) == neither
    (tmp_path / "step_3").mkdir()
    assert f"checkpoint {tmp_path} is incomplete" in said(tmp_path)
    assert "only tensors are loaded, but it contains exec" in said(tmp_path / "code.pt")
    for name in ("list.pt", "numbers.pt", "namespace.pt"):
        assert "it contains no state dict" in said(tmp_path / name)
    for name in ("text.pt", "text.safetensors", "empty.pt"):
        assert "cannot read the checkpoint" in said(tmp_path / name)
    assert not (tmp_path / "x").exists()


@pytest.mark.parametrize(
    ("name", "flags", "told"),
    [
        ("step_earlier", "--model vit_tiny_patch16_224", "was trained with --model vit_10b, not"),
        ("bare.pt", "", "pos_embed has shape (1, 16, 32) in "),
        ("bare.pt", "--model vit_tiny_patch16_224", "has no cls_token, which the model has"),
        ("bare.pt", "{tiny} --num_blocks 3", "has no blocks.2.norm1.weight, which the model has:"),
        ("bare.pt", "{tiny} --num_blocks 1", "has blocks.1.norm1.weight, which the model does not"),
    ],
)
def test_weights_of_another_model(name, flags, told, files, capsys):
    flags = flags.format(tiny=" ".join(TINY_MODEL)).split()
    assert told in told_in_one_line(capsys, "--predict", IMAGE, "--resume", files / name, *flags)


def test_bad_images(files, capsys, tmp_path):
    def said(*images):
        return told_in_one_line(capsys, "--predict", *images, "--resume", files / "plain.pt")

    (tmp_path / "folder").mkdir()
    (tmp_path / "text.png").write_text("hello")
    assert "missing.png: no such file or folder" in said(IMAGE, tmp_path / "missing.png")
    assert "argument --predict: must not be empty" in said("")
    assert "folder contains no images (.jpg" in said(tmp_path / "folder")
    assert said(tmp_path / "text.png").endswith(
        "text.png is not a readable image: no image of a known format"
    )


def test_of_a_folder_the_images_that_can_be_read_are_answered(files, capsys, tmp_path):
    folder = tmp_path / "folder"
    folder.mkdir()
    shutil.copy(IMAGE, folder / "good.png")
    os.mkfifo(tmp_path / "pipe")
    (folder / "lost.png").symlink_to("nowhere")
    (folder / "circle.png").symlink_to("circle.png")
    (folder / "pipe.png").symlink_to("../pipe")
    flags = ["--predict", folder, "--resume", files / "plain.pt", "--json"]
    assert run_vit_training.main(list(map(str, flags))) == 0
    out, err = capsys.readouterr()
    assert_is_timms(json.loads(out), files, [folder / "good.png"], CLASSES)
    assert sorted(err.splitlines()) == [
        f"{folder}/circle.png is not a readable image: Too many levels of symbolic links",
        f"{folder}/lost.png is not a readable image: No such file or directory",
        f"{folder}/pipe.png is not a readable image: it is not a regular file",
    ]


def test_named_image_cannot_be_read(files, capsys, tmp_path):
    cut = tmp_path / "cut.png"
    cut.write_bytes(IMAGE.read_bytes()[:-40])
    flags = ["--predict", cut, IMAGE, "--resume", files / "plain.pt", "--json"]
    assert run_vit_training.main(list(map(str, flags))) == 2
    out, err = capsys.readouterr()
    assert_is_timms(json.loads(out), files, [IMAGE], CLASSES)
    assert err == (
        f"run_vit_training.py: error: {cut} is not a readable image: image file is truncated\n"
    )


def test_eval_only_leaves_out_what_it_cannot_read(trained, words, tmp_path):
    """As if the broken files were not there."""
    shutil.copytree(words / "val", tmp_path / "val")
    broken = [min((tmp_path / "val" / name).iterdir()) for name in ("eight", "zero")]
    for path in broken:
        path.write_text("hello")

    def evaluated():
        flags = "--eval_only --json --backend cuda --batch_size 100 --num_workers 1".split()
        flags += ["--ckpt_dir", str(trained.ckpt_dir), "--data_dir", str(tmp_path)]
        flags += ["--max_bad_images", "2"]
        done = run_program("run_vit_training.py", *flags, processes=2)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout.splitlines()[-1]), done.stderr

    found, said = evaluated()
    for path in broken:
        assert f"{path} cannot be read (no image of a known format)" in said
        path.unlink()
    expected, _ = evaluated()
    assert found.pop("lost_classes") == expected.pop("lost_classes") == []
    assert found["confusion"] == expected["confusion"]
    paths, wanted = ({error["path"] for error in each["errors"]} for each in (found, expected))
    assert paths == wanted
    figures = {name: value for name, value in expected.items() if isinstance(value, (int, float))}
    of_found = {name: found[name] for name in figures}
    assert of_found == pytest.approx(figures | {"bad_images": 2}, rel=1e-5)


def test_eval_only_of_a_checkpoint_that_its_run_removes(trained, words, tmp_path, capsys):
    """After it was found, and before its weights are read."""
    folder = shutil.copytree(trained.ckpt_dir / f"step_{STEPS}", tmp_path / f"step_{STEPS}")
    flags = "--backend cuda --batch_size 100 --num_workers 0".split()

    def removed(source, *, verify):
        shutil.rmtree(source.path)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("training.weights.adapt.check_files", removed)
        flags += ["--eval_only", "--resume", str(folder), "--data_dir", str(words)]
        assert run_vit_training.main(flags) == 2
    (line,) = [line for line in capsys.readouterr().err.splitlines() if "error" in line]
    assert f"cannot read the checkpoint {folder}: No such file or directory" in line


def test_eval_only_tells_what_classes_have_no_image_left(trained, words, tmp_path, capsys):
    for name in ("eight", "five", "zero"):
        (tmp_path / "val" / name).mkdir(parents=True)
    for name in CLASSES:
        folder = tmp_path / "val" / name
        folder.mkdir(exist_ok=True)
        for path in sorted((words / "val" / name).iterdir())[:2]:
            shutil.copy(path, folder)

    def evaluated(*flags):
        words = ["--eval_only", "--ckpt_dir", trained.ckpt_dir, "--data_dir", tmp_path, *flags]
        words += ["--backend", "cuda", "--batch_size", 5, "--num_workers", 0, "--json"]
        code = run_vit_training.main(list(map(str, words)))
        return code, *capsys.readouterr()

    for path in (tmp_path / "val" / "five").iterdir():
        path.write_text("hello")
    code, _, err = evaluated()
    assert code == 2
    assert "2 validation images cannot be read, more than --max_bad_images 1% (1 of 20)" in err
    code, out, err = evaluated("--max_bad_images", "10%")
    assert code == 0
    assert " % of 18 of 20 images, none readable of class five, top-5: " in err
    found = json.loads(out)
    assert (found["val_images"], found["bad_images"]) == (18, 2)
    assert found["lost_classes"] == ["five"]
    for name in ("one", "two"):
        first, _ = (tmp_path / "val" / name).iterdir()
        first.write_text("hello")
    for name in ("four", "nine"):
        for path in (tmp_path / "val" / name).iterdir():
            path.write_text("hello")
    *_, err = evaluated("--max_bad_images", "100%")
    assert " 12 of 20 images, none readable of 3 classes (five, four, nine)" in err
