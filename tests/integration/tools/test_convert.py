"""``python -m tools.convert`` with the real program, PyTorch, safetensors and timm around it."""

import json
import re
import shutil
import sys

import pytest
import timm
import torch
import torch.distributed.checkpoint as dcp
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import run_vit_training
from tests.references.plain_checkpoint import convert as dcp_to_torch
from tests.support.cli import DIGITS, TINY_MODEL, run_program, tiny, train_tiny_gpu
from tests.support.usage_error import told_in_one_line
from tools import convert
from tools.convert import main

IMAGES = sorted(map(str, (DIGITS / "val" / "7").glob("*.png")))[:8]


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Two steps of FSDP2 in two processes: tensors in two parts each."""
    folder = tmp_path_factory.mktemp("trained")
    return train_tiny_gpu(folder, "--max_steps", "2", "--ckpt_step_interval", "1", processes=2)


@pytest.fixture(scope="module")
def weights(trained, tmp_path_factory):
    """The weights as PyTorch's own tool has them."""
    plain = tmp_path_factory.mktemp("plain") / "plain.pt"
    return dcp_to_torch(trained.ckpt_dir / "step_2", plain)["model"]


def converted(source, target, *flags):
    assert main([str(source), str(target), *flags]) == 0
    assert not list(target.parent.glob(".*.partial"))
    return target


def assert_same(found, expected):
    assert sorted(found) == sorted(expected)
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name], tensor), name


def predicted(capsys, resume, *flags):
    capsys.readouterr()
    words = ["--predict", *IMAGES, "--json", "--resume", str(resume), *flags]
    assert run_vit_training.main(words) == 0
    return json.loads(capsys.readouterr().out)


def read_dcp(folder, expected):
    state = {"model": {name: torch.empty_like(tensor) for name, tensor in expected.items()}}
    dcp.load(state, checkpoint_id=folder, no_dist=True)
    return state["model"]


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")
def test_around_all_forms(trained, weights, tmp_path, capsys):
    """Each form is read by its own library, and by the program, with the same numbers."""
    one = converted(trained.ckpt_dir, tmp_path / "one.safetensors")
    with safe_open(one, framework="pt") as file:
        assert_same({name: file.get_tensor(name) for name in file.keys()}, weights)  # noqa: SIM118
    plain = converted(one, tmp_path / "plain.pt")
    for mapped in (True, False):
        content = torch.load(plain, weights_only=True, mmap=mapped)
        assert_same(content["model"], weights)
    back = converted(plain, tmp_path / "back", "--to", "dcp")
    assert_same(read_dcp(back, weights), weights)
    shards = converted(back, tmp_path / "shards", "--to", "safetensors", "--max_shard_size", "20KB")
    index = json.loads((shards / "model.safetensors.index.json").read_text())
    files = sorted(shards.glob("*.safetensors"))
    assert {path.name for path in files} == set(index["weight_map"].values())
    assert len(files) > 3
    assert max(path.stat().st_size for path in files) < 30_000  # with headers
    assert_same({k: v for path in files for k, v in load_file(path).items()}, weights)
    folder = converted(shards, tmp_path / "folder", "--to", "safetensors")
    assert_same(load_file(folder / "model.safetensors"), weights)
    new = tmp_path / "new.txt"
    new.touch()  # with the user's umask
    assert {path.stat().st_mode for path in (one, plain, *files)} == {new.stat().st_mode}

    first = predicted(capsys, trained.ckpt_dir / "step_2")
    for path in (one, plain, back, shards, folder):
        assert predicted(capsys, path) == first, path  # with the model's flags and class names
    evaluate = ["--eval_only", "--data_dir", str(DIGITS), "--backend", "cuda", "--resume"]
    lines = []
    for path in (trained.ckpt_dir / "step_2", back, shards):
        assert run_vit_training.main([*evaluate, str(path)]) == 0
        out = capsys.readouterr().out
        lines.append(re.search(r"val loss: \d.*", out)[0])
    assert lines[0] == lines[1] == lines[2]

    for made in (  # by timm, as its users do
        timm.create_model(f"local-dir:{folder}", pretrained=True),
        timm.create_model(f"local-dir:{folder}", checkpoint_path=str(plain)),
    ):
        assert_same(made.state_dict(), weights)
        assert made.pretrained_cfg["mean"] == [0.485, 0.456, 0.406]
    assert json.loads((folder / "config.json").read_text())["label_names"] == list("0123456789")

    # A folder without AdamW's state trains no further, and says so.
    flags = [*tiny(tmp_path / "new"), "--backend", "cuda", "--resume", back]
    assert "contains only weights" in told_in_one_line(capsys, *flags)
    assert not (tmp_path / "new").exists()


def test_bare_weights_and_narrower_numbers(weights, tmp_path, capsys):
    """Of another program: views, whole numbers, no run; from bf16 back to fp32."""
    transposed = {"t": torch.arange(6.0).view(2, 3).t(), "part": torch.arange(9)[2:5]}
    torch.save(transposed, tmp_path / "views.pt")
    converted(tmp_path / "views.pt", tmp_path / "views.safetensors", "--dtype", "fp16")
    found = load_file(tmp_path / "views.safetensors")
    assert_same(found, {"t": transposed["t"].half(), "part": transposed["part"]})

    torch.save(
        {"state_dict": {f"module.{k}": v for k, v in weights.items()}}, tmp_path / "bare.bin"
    )
    half = converted(tmp_path / "bare.bin", tmp_path / "half.pth", "--dtype", "bf16")
    narrow = {name: tensor.bfloat16() for name, tensor in weights.items()}
    assert_same(torch.load(half, weights_only=True), narrow)
    bare = converted(half, tmp_path / "bare", "--to", "dcp", "--dtype", "fp32")
    widened = {name: tensor.float() for name, tensor in narrow.items()}
    assert_same(read_dcp(bare, weights), widened)
    expected = predicted(capsys, half, *TINY_MODEL)
    assert predicted(capsys, bare, *TINY_MODEL) == expected
    evaluate = ["--eval_only", "--data_dir", str(DIGITS), "--backend", "cuda", *TINY_MODEL]
    assert run_vit_training.main([*evaluate, "--resume", str(bare)]) == 0
    dcp.save(weights, checkpoint_id=tmp_path / "plain_dcp", no_dist=True)  # without "model."
    assert_same(load_file(converted(tmp_path / "plain_dcp", tmp_path / "p.safetensors")), weights)


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize(
    ("name", "channels"), [("vit_tiny_patch16_224", 3), ("eva02_tiny_patch14_224", 1)]
)
def test_timms_own_models(name, channels, tmp_path):
    """A model by timm's name keeps it: the folder is made again with its own arguments."""
    words = f"--model timm/{name} --num_blocks 1 --image_size 28 --patch_size 14 --num_classes 3"
    words += " --crop_mode squash --crop_pct 0.8 --test_interpolation box"
    flags = [*words.split(), "--in_chans", str(channels), "--fake_data", "--max_steps", "1"]
    train_tiny_gpu(tmp_path / "run", "--log_step_interval", "1", *own_model(flags))
    folder = converted(tmp_path / "run", tmp_path / "folder", "--to", "safetensors")
    made = timm.create_model(f"local-dir:{folder}", pretrained=True)
    assert made.default_cfg["architecture"] == name
    images = timm.data.resolve_data_config(model=made)
    found = [images[key] for key in ("crop_mode", "crop_pct", "interpolation")]
    assert found == ["squash", 0.8, "box"]
    assert_same(made.state_dict(), load_file(folder / "model.safetensors"))


def own_model(flags):
    """The flags over those of the tiny model."""
    return [*flags, "--embed_dim", "32", "--num_heads", "2", "--batch_size", "4"]


PEAK = """
import json, sys, threading, time
from tools.convert import main
def anonymous():  # without pages of files, which the kernel can drop
    return next(int(line.split()[1]) for line in open("/proc/self/status") if "RssAnon" in line)
peak = anonymous()
def watch():
    global peak
    while True:
        peak = max(peak, anonymous())
        time.sleep(0.002)
threading.Thread(target=watch, daemon=True).start()
sizes = []
for words in [["none", "none.pt"], *json.loads(sys.argv[1])]:
    main(words)
    sizes.append(peak * 1024)
print(json.dumps(sizes))
"""


@pytest.mark.long
def test_memory_is_the_largest_tensors(tmp_path):
    """In a process of its own; the first command converts nothing, after the imports."""
    largest, count, small = 100 << 20, 10, 32 << 20
    state = {"large": torch.rand(largest // 4)}
    state |= {f"{i}": torch.rand(small // 4).bfloat16().repeat(2) for i in range(count)}
    save_file(state, tmp_path / "a.safetensors")
    steps = (
        "a.safetensors b.pt",
        "b.pt c --to dcp",
        "c d --to safetensors --max_shard_size 70MB",
        "d e.pt --dtype fp16",
    )
    words = [step.split() for step in steps]
    words = [[*(str(tmp_path / name) for name in word[:2]), *word[2:]] for word in words]
    done = run_program("-c", PEAK, json.dumps(words), warm=False)
    assert done.returncode == 0, done.stderr
    before, *after = json.loads(done.stdout.splitlines()[-1])
    for peak in after:
        assert peak - before < largest + (64 << 20), [p - before for p in after]
    assert largest + (64 << 20) < sum(t.nbytes for t in state.values()) / 2
    end = torch.load(tmp_path / "e.pt", weights_only=True, mmap=True)
    assert_same(end, {name: tensor.half() for name, tensor in state.items()})


def test_progress_is_shown_on_a_terminal(trained, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    narrow = converted(trained.ckpt_dir, tmp_path / "narrow.pt", "--dtype", "bf16")
    converted(narrow, tmp_path / "wide.safetensors", "--dtype", "fp32")
    bars = re.findall(r"(\w+): 100%", capsys.readouterr().err)
    assert list(dict.fromkeys(bars)) == ["read", "write", "cast"]


def test_a_run_that_is_being_trained(trained, weights, tmp_path, capsys, monkeypatch):
    """It removes its checkpoint, whole or in part, when it has been found, and writes a newer."""
    run, steps = tmp_path / "run", trained.ckpt_dir
    check = convert.check_files
    for number, moment in enumerate(("before the check", "after the check")):
        shutil.rmtree(run, ignore_errors=True)
        shutil.copytree(steps / "step_1", run / "step_1")

        def checked(source, moment=moment, **how):
            if moment == "after the check":
                check(source, **how)
            if source.path.name == "step_1":
                source.path.joinpath("manifest.json").unlink()
                next(source.path.glob("*.distcp")).unlink()
                shutil.copytree(steps / "step_2", run / "step_2")
            if moment == "before the check":
                check(source, **how)

        monkeypatch.setattr(convert, "check_files", checked)
        target = converted(run, tmp_path / f"{number}.safetensors")
        assert_same(load_file(target), weights)
        assert f"converted {run}/step_2: " in capsys.readouterr().out


def test_mistakes(trained, weights, tmp_path, capsys):
    def said(*words):
        assert main(list(map(str, words))) == 2
        (line,) = capsys.readouterr().err.splitlines()
        return line.removeprefix("tools.convert: error: ")

    for words in (["gs://bucket/run", tmp_path / "x.pt"], [trained.ckpt_dir, "file:///x.pt"]):
        with pytest.raises(SystemExit, match="2"):
            main(list(map(str, words)))
        assert "is a URL: give a local path" in capsys.readouterr().err
    (tmp_path / "there.pt").write_text("mine")
    source = trained.ckpt_dir / "step_2"
    assert said(source, tmp_path / "there.pt").endswith(
        "there.pt already exists: use another name, or remove it"
    )
    assert (tmp_path / "there.pt").read_text() == "mine"
    assert "or --to dcp or --to safetensors" in said(source, tmp_path / "x")
    another = said(source, tmp_path / "step_3", "--to", "dcp")
    assert another.endswith("step_2 is of step 2: use another name")
    assert "--to dcp is incompatible with" in said(source, tmp_path / "x.pt", "--to", "dcp")
    assert "create it first" in said(source, tmp_path / "none" / "x.pt")
    assert "no such checkpoint, folder or file" in said(tmp_path / "none", tmp_path / "x.pt")
    names = ("--names", "physicsnemo")
    assert "--names physicsnemo requires" in said(source, tmp_path / "x", "--to", "dcp", *names)
    assert "requires weights of hybrid_vit, not" in said(source, tmp_path / "x.pt", *names)
    size = ("--max_shard_size", "1GB")
    assert "--max_shard_size requires a folder" in said(source, tmp_path / "x.pt", *size)
    assert "is neither a checkpoint nor a run's folder" in said(tmp_path, tmp_path / "x.pt")
    assert "cannot read the checkpoint" in said(tmp_path / "there.pt", tmp_path / "x.safetensors")
    torch.save({"a": torch.ones(2), "b": print}, tmp_path / "code.pt")
    assert "only tensors are loaded" in said(tmp_path / "code.pt", tmp_path / "x.safetensors")
    spoiled = shutil.copytree(source, tmp_path / "spoiled")
    file = next(spoiled.glob("*.distcp"))
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    assert "is damaged" in said(spoiled, tmp_path / "x.pt")
    assert main([str(spoiled), str(tmp_path / "y.pt"), "--no_verify_checkpoint"]) == 0
    save_file(weights, tmp_path / "short.safetensors")
    with (tmp_path / "short.safetensors").open("r+b") as cut:
        cut.truncate(50_000)
    assert "cannot read" in said(tmp_path / "short.safetensors", tmp_path / "x.pt")
    assert not list(tmp_path.glob("*x.*"))
    with pytest.raises(SystemExit, match="2"):
        main(["a", "b", "--dtype", "int8"])
