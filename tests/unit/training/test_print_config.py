"""``--print_config``: what it prints parses back to the same run, and nothing is written."""

import json
import shlex
import shutil
from pathlib import Path

import pytest
import timm
from safetensors.torch import save_file

import run_vit_training
from gpu_fsdp.config import TorchConfig
from tests.support.cli import (
    DIGITS,
    ROOT,
    TINY_RUN,
    TINY_SIZES,
    Result,
    need_xla,
    run_program,
    tiny,
    train_tiny_gpu,
)
from tests.support.every_flag import items
from tests.support.resolved import on_gpus, on_xla
from tests.support.usage_error import told_in_one_line
from training.errors import UsageError
from training.print_config import print_run
from xla_fsdp.config import XlaConfig

ON_XLA = "--backend xla --cpu_devices 4"
DINO = "--class_token --objective dino --batch_size 24 --dino_prototypes 64 --local_crop_size 8"
TINY = "--image_size 16 --patch_size 4 --embed_dim 32 --num_heads 2 --num_blocks 2"


def printed(capsys, *words):
    assert run_vit_training.main([*map(str, words), "--print_config"]) == 0
    return capsys.readouterr().out


@pytest.mark.fast
@pytest.mark.parametrize(
    ("words", "lines"),
    [
        # Quoted words, several values, numbers and a folder that look like flags and files of them.
        (
            "--data_source volumes --data_dir 'my images' --model hybrid_vit --dimension 3 "
            "--in_chans 1 --image_size 8 16 16 --mean -0.00001 0 1 --clip_grad_norm=-1e30 "
            "--ckpt_dir=@runs",
            [
                *("--data_dir 'my images'", "--image_size 8 16 16", "--mean -0.00001 0.0 1.0"),
                *(f"--clip_grad_norm -1{'0' * 30}", "--ckpt_dir=@runs"),
            ],
        ),
        # Set to its default, turned off, and decided by another flag: --grad_accum_steps.
        (
            f"{TINY} --seed 0 --no-class_token --global_pool avg --micro_batch_size 4 "
            "--warmup_epochs 1 --profile 2:3 --image_size_schedule 8:0.5 16:0.5",
            [
                *("--seed 0", "--no-class_token", "--micro_batch_size 4", "--warmup_epochs 1.0"),
                *("--profile 2:3", "--image_size_schedule 8:0.5 16:0.5"),
            ],
        ),
        (f"@recipes/vit_10b.args {ON_XLA}", ["--model vit_10b", "--scan_blocks"]),
        (f"@recipes/mnist.args {ON_XLA}", ["--data_source mnist", "--intensity auto"]),
        (f"{TINY} {DINO}", ["--objective dino", "--koleo_group 12"]),
        (
            f"{TINY} --native_resolution --token_budget 64 {ON_XLA}",
            ["--native_resolution", "--token_budget 64"],
        ),
        (
            f"{TINY} --extension tests/stranger/gratings.py --data_source gratings "
            "--objective angle --angle_weight 2",
            ["--objective angle", "--angle_weight 2.0"],
        ),
    ],
    ids=["volumes", "switches", "recipe", "mnist", "dino", "native", "extension"],
)
def test_parses_back(words, lines, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(ROOT)
    if ON_XLA in words:
        need_xla()
    else:
        words += " --backend cuda"
    words = shlex.split(words)
    text = printed(capsys, *words)
    assert set(lines) <= {*text.splitlines()}
    file = tmp_path / "printed.args"
    file.write_text(text)
    assert printed(capsys, f"@{file}") == text
    assert printed(capsys, f"@{file}", "--json") == printed(capsys, *words, "--json")


@pytest.mark.long
@pytest.mark.parametrize(("resolve", "own"), [(on_xla, XlaConfig), (on_gpus, TorchConfig)])
def test_every_value_parses_back(resolve, own, tmp_path, monkeypatch, capsys):
    """Each value of each flag, where the program takes it, keeps the run as it is resolved."""
    monkeypatch.setenv("CPU_NUM_DEVICES", "4")
    file, count = tmp_path / "printed.args", 0
    for item in items(own, tmp_path):
        words = [*TINY.split(), "--num_classes", "10", "--batch_size", "16", *item.typed.split()]
        try:
            run = resolve(words)
        except (UsageError, SystemExit):
            continue
        if run.config.print_config:
            continue
        count += 1
        print_run(run)
        file.write_text(text := capsys.readouterr().out)
        again = resolve([f"@{file}"])
        assert again.values == run.values, item.name
        assert (again.plan, again.mesh) == (run.plan, run.mesh), item.name
        print_run(again)
        assert capsys.readouterr().out == text
    assert count > 300


@pytest.mark.long
def test_the_same_run(tmp_path):
    """What is printed trains as the words that it was printed for, and resumes a folder."""

    def config_of(*words):
        done = run_program("run_vit_training.py", *map(str, words), "--print_config")
        assert done.returncode == 0, done.stderr
        file = tmp_path / "printed.args"
        file.write_text(done.stdout)
        return f"@{file}"

    folder = tmp_path / "my run"
    words = [*tiny(folder), "--backend", "cuda", "--color_jitter", "0.4", "0.3", "0.2"]
    words += ["--mixup", "0.8", "--max_steps", "2"]
    printed = config_of(*words)
    first = train_tiny_gpu(folder, *words)
    again = train_tiny_gpu(tmp_path / "again", printed, "--ckpt_dir", str(tmp_path / "again"))
    assert again.column("loss") == first.column("loss")
    elsewhere = {"ckpt_dir": str(tmp_path / "again")}
    assert again.run_file["arguments"] == first.run_file["arguments"] | elsewhere

    # The model is the checkpoint's.
    words = [f"--data_dir={DIGITS}", "--backend", "cuda", *TINY_RUN, "--max_steps", "3"]
    printed = config_of(*words, "--ckpt_dir", folder)
    assert "--num_blocks 2" in Path(printed[1:]).read_text()
    shutil.copytree(folder, tmp_path / "copy")
    resumed = run_program("run_vit_training.py", *words, "--ckpt_dir", str(folder))
    assert resumed.returncode == 0, resumed.stderr
    arguments = Result(folder).run_file["arguments"]
    copied = run_program("run_vit_training.py", printed, "--ckpt_dir", str(tmp_path / "copy"))
    assert copied.returncode == 0, copied.stderr
    assert "at step 2" in copied.stdout
    copy = Result(tmp_path / "copy")
    assert copy.run_file["arguments"] == arguments | {"ckpt_dir": str(tmp_path / "copy")}
    assert copy.steps[3]["loss"] == Result(folder).steps[3]["loss"]


@pytest.mark.fast
def test_what_weights_decide(tmp_path, capsys):
    """Model and preprocessing are those that timm wrote next to the weights."""
    folder = tmp_path / "my weights"
    folder.mkdir()
    model = timm.create_model("vit_tiny_patch16_224", num_classes=3, **TINY_SIZES)
    save_file(model.state_dict(), folder / "model.safetensors")
    how = {"mean": [0.4] * 3, "std": [0.3] * 3, "crop_pct": 1.0, "interpolation": "bilinear"}
    described = {"architecture": "vit_tiny_patch16_224", "model_args": TINY_SIZES}
    (folder / "config.json").write_text(json.dumps(described | {"pretrained_cfg": how}))
    run = tmp_path / "run"
    words = ["--backend", "cuda", "--init_from", folder, "--num_classes", "5", "--ckpt_dir", run]
    text = printed(capsys, *words)
    decided = {"--model timm/vit_tiny_patch16_224", "--image_size 16", "--num_blocks 2"}
    decided |= {"--mean 0.4 0.4 0.4", "--crop_pct 1.0", "--interpolation bilinear"}
    assert decided <= {*text.splitlines()}
    values = json.loads(printed(capsys, *words, "--json"))
    assert values["data"]["std"] == how["std"]
    file = tmp_path / "printed.args"
    file.write_text(text)
    assert printed(capsys, f"@{file}") == text
    assert not run.exists()


@pytest.mark.fast
def test_values_by_group(capsys):
    words = [*TINY.split(), "--backend", "cuda", "--zero_dp_strategy", "2"]
    groups = json.loads(printed(capsys, *words, "--json"))
    flat = {name: value for values in groups.values() for name, value in values.items()}
    resolved = json.loads(json.dumps(on_gpus(words).values))
    assert flat == {n: value for n, value in resolved.items() if n not in ("print_config", "json")}
    assert groups["sharding and memory"]["precision"] == "fp32"


@pytest.mark.fast
def test_passwords_are_not_printed(capsys):
    words = ["--backend", "cuda", "--data_dir", "http://bob:S3cret@example.com/images"]
    text = printed(capsys, *words)
    assert "S3cret" not in text + printed(capsys, *words, "--json")
    assert "# --data_dir is printed without passwords and signatures: add them" in text


@pytest.mark.fast
@pytest.mark.parametrize(
    ("flags", "told"),
    [
        ("--batch_size 7 --mesh_fsdp 3", "x --mesh_fsdp 3"),
        ("--model vit_none", "unknown model vit_none"),
        ("--num_heads 7", "--num_heads"),
        ("--eval_only", "--print_config is incompatible with --eval_only: drop one of the two"),
        ("--resume none_such", "none_such"),
    ],
)
def test_mistakes(flags, told, capsys, tmp_path):
    words = ["--backend", "cuda", "--ckpt_dir", tmp_path / "run", *flags.split()]
    assert told in told_in_one_line(capsys, *words, "--print_config")
    assert not (tmp_path / "run").exists()


@pytest.mark.fast
def test_a_line_break_is_refused(capsys):
    words = ["--backend", "cuda", "--data_dir", "two\nlines"]
    told = told_in_one_line(capsys, *words, "--print_config")
    assert told == "--data_dir has a line break, which a file of flags cannot hold: use --json"
