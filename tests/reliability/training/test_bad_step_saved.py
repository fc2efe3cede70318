"""--save_bad_step and tools.replay_step: the step that was not finite, found again on the CPU."""

import json
import re

import numpy as np
import pytest
import torch

from tests.references.plain_checkpoint import convert, tiny_timm_model
from tests.support.cli import need_xla, run_program, tiny
from tests.support.dino import DINO
from tests.support.mae import MAE
from tests.support.marks import long
from tools import replay_step

SIZES = "--image_size_schedule 8:0.4 12:0.6 --aa rand-m9 --aa_min_magnitude 3".split()
GPU, XLA = "--backend cuda", "--backend xla --cpu_devices 2"
FAKES = {GPU: "tests.fakes.bad_step_gpu", XLA: "tests.fakes.bad_step"}
SAVING = "--save_bad_step --eval_batches 1 --warmup_steps 0".split()


def train(folder, *flags, code=0, program=(), **how):
    """The output of a run that saves its bad step, and must end with this exit code."""
    if "xla" in flags:
        need_xla()
    start = ["-m", *program] if program else ["run_vit_training.py"]
    done = run_program(*start, *tiny(folder), *SAVING, *map(str, flags), **how)
    codes = {done.returncode, *map(int, re.findall(r"exitcode  : (\d)", done.stderr))}
    assert code in codes, done.stdout + done.stderr
    return done.stdout


def replay(folder, *flags):
    done = run_program("-m", "tools.replay_step", str(folder), *map(str, flags))
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def description(folder):
    return json.loads((folder / "bad_step.json").read_text())


@pytest.fixture(scope="module")
def spoiled(tmp_path_factory):
    """Weights of which one is NaN."""
    weights = tiny_timm_model().state_dict()
    weights["blocks.1.mlp.fc1.weight"][3, 4] = float("nan")
    torch.save(weights, path := tmp_path_factory.mktemp("weights") / "spoiled.pt")
    return path


@pytest.mark.parametrize(("flags", "processes"), [(GPU, 2), long(XLA, 1)])
def test_a_weight_that_is_nan(flags, processes, spoiled, tmp_path):
    """The run ends by --max_bad_steps as without the folder, and a second start writes no other."""
    run = [tmp_path, *flags.split(), "--init_from", spoiled, "--max_bad_steps", 2]
    output = train(*run, code=3, processes=processes)
    (folder,) = tmp_path.glob("bad_step_*")
    assert f"to find the module, run python3 -m tools.replay_step {folder}" in output
    assert description(folder)["logged"]["loss"] == "nan"
    said = replay(folder)
    assert said.startswith("step 1: batch 1 of epoch 1, global batch 16; logged at step 1: ")
    assert (
        "first tensor that is not finite: weight blocks.1.mlp.fc1.weight: 1 NaN and 0 infinite"
        in said
    )
    assert "a run saves only" not in output
    assert f"{folder} exists: a run saves only its first bad step" in train(*run, code=3)


@pytest.mark.parametrize(
    ("backend", "processes", "flags"),
    [
        (GPU, 2, [*DINO, *"--grad_accum_steps 2 --koleo_group 2 --local_crops 1".split()]),
        (GPU, 1, ["--mixup", "0.8", "--grad_accum_steps", "2", *SIZES]),
        (XLA, 1, MAE),
        long(XLA, 1, [*DINO, "--precision", "bf16"]),
        long(GPU, 2, [*MAE, "--grad_accum_steps", "2", "--model_ema"]),
        long(XLA, 1, "--mixup 0.8 --cutmix 1 --smoothing 0.1 --bce_loss".split()),
    ],
)
def test_the_same_step_is_computed(backend, processes, flags, tmp_path):
    """The spoiled step's gradients alone are not finite: its loss is in the log, and is the
    replay's, which has other code for the model, the images, their passes and the teacher."""
    how = {
        "program": [FAKES[backend]],
        "processes": processes,
        "variables": {"BAD_STEPS": "3:norm"},
    }
    train(tmp_path, *backend.split(), *flags, **how)
    folder = tmp_path / "bad_step_3"
    logged = description(folder)["logged"]
    assert logged["step"] == 3
    assert logged["grad_norm"] == "inf"
    said = replay(folder)
    assert "weights: exactly those before step 3\n" in said
    loss, norm = re.search(
        r"in fp32 all values are finite: loss (\S+), gradient norm (\S+)", said
    ).groups()
    assert float(loss) == pytest.approx(logged["loss"], rel=2e-2 if "bf16" in flags else 1e-5)
    assert float(norm) > 0
    assert ("in bf16 all values are finite" in said) == ("bf16" in flags)
    table = re.findall(r"^ +([\d.]+)  (.+)$", said, re.MULTILINE)
    largest = [float(value) for value, _ in table[:5]]
    assert largest == sorted(largest, reverse=True)


def test_later_steps_were_good(tmp_path):
    """The folder says so, and how to get the exact weights, which are those of a plain run."""
    flags, bad = [*GPU.split(), "--ckpt_step_interval", 2], {"BAD_STEPS": "4:loss"}
    how = {"program": [FAKES[GPU]], "variables": bad}
    train(tmp_path / "run", *flags, "--log_step_interval", 5, **how)
    folder = tmp_path / "run" / "bad_step_4"
    assert description(folder)["good_steps_since"] == 1
    said = replay(folder, "--images", 3)
    assert "weights: those after step 5, not exactly those of step 4" in said
    assert "--resume RUN/step_2 --log_step_interval 1 --save_bad_step" in said
    assert "images: 3 of the batch's 16" in said
    again = [*flags, "--resume", tmp_path / "run" / "step_2", "--log_step_interval", 1]
    train(tmp_path / "again", *again, **how)
    exact = convert(tmp_path / "again" / "bad_step_4", tmp_path / "exact.pt")["model"]
    plain = train(tmp_path / "plain", *flags, "--max_steps", 3, "--num_epochs", 2)
    assert "bad step" not in plain
    assert not list((tmp_path / "plain").glob("bad_step_*"))
    expected = convert(tmp_path / "plain" / "step_3", tmp_path / "plain.pt")["model"]
    for name, values in expected.items():
        assert torch.equal(exact[name], values), name


def test_an_image_with_huge_values(tmp_path):
    data, generator = tmp_path / "data", np.random.default_rng(0)
    for number in range(16):
        folder = data / "train" / str(number % 2)
        folder.mkdir(parents=True, exist_ok=True)
        values = generator.random((8, 16, 16), dtype=np.float32)
        np.save(folder / f"{number}.npy", values * (1e30 if number == 5 else 1.0))
    (data / "val").symlink_to(data / "train")
    flags = "--model hybrid_vit --dimension 3 --in_chans 1 --patch_size 4 --image_size 8 16 16"
    source = ["--data_source", "volumes", "--data_dir", data, "--num_classes", 2, "--hflip", 0]
    train(tmp_path / "run", *GPU.split(), *flags.split(), *source, "--max_bad_steps", 1, code=3)
    said = replay(tmp_path / "run" / "bad_step_1")
    assert re.search(
        r"largest \|value\| \d(\.\d+)?e\+3\d in \S+/1/5.npy \(above 1000 is unusual", said
    )
    assert "in fp32 the first tensor that is not finite: " in said


def test_a_folder_that_cannot_be_written(spoiled, tmp_path):
    (tmp_path / "bad_step_1").write_text("mine")
    flags = [*GPU.split(), "--init_from", spoiled, "--max_bad_steps", 3]
    output = train(tmp_path, *flags, code=3)
    assert output.count(f"warning: {tmp_path}/bad_step_1 cannot be written (") == 1
    assert "epoch 1 step 3, " in output
    assert (tmp_path / "bad_step_1").read_text() == "mine"


_GOOD = {
    "step": 1,
    "epoch": 0,
    "images_in_epoch": 0,
    "passes": [0],
    "rates": {"lr": 1e-3, "rope_factors": [1.0, 1.0]},
    "batch_shards": 1,
    "mesh": {"fsdp": 1},
    "saved_after": 1,
    "good_steps_since": 0,
    "checkpoint_before": None,
    "logged": {},
}
_LIES = [
    *({"rates": {"lr": "x"}}, {"rates": {"lr": 1.0, "rope_factors": [1]}}, {"rates": [1]}),
    *({"mesh": {"fsdp": "1"}}, {"mesh": [1]}, {"logged": [1]}, {"logged": "x"}, {"passes": 3}),
    *({"checkpoint_before": 3}, {"saved_after": "x"}, {"good_steps_since": None}),
]


@pytest.mark.parametrize(
    "text",
    [
        *(None, "", "[]", "{}", '{"step": 1e999}', "damaged", '{"step":' * 200_000),
        *(json.dumps(_GOOD | lie) for lie in _LIES),
    ],
)
def test_a_damaged_description(text, tmp_path, capsys):
    (tmp_path / "bad_step.json").write_text(json.dumps(_GOOD))
    assert replay_step.read_bad_step(tmp_path).step == 1
    (tmp_path / "bad_step.json").unlink()
    if text is not None:
        (tmp_path / "bad_step.json").write_text(text)
    assert replay_step.main([str(tmp_path)]) == 2
    problem = r"is damaged" if text is not None else r"cannot be read \(No such file or directory\)"
    said = rf"tools.replay_step: error: \S+bad_step.json {problem}: pass a folder bad_step_N .*\n"
    assert re.fullmatch(said, capsys.readouterr().err)
