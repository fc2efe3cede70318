"""Distillation by ``--objective dino --teacher``, of one student or of several in one run."""

import shutil

import pytest
import timm
import torch

from tests.cli import TINY_RUN, Result, need_xla, run_program, tiny, train_tiny, train_tiny_gpu
from tests.references import plain_dino
from tests.resolved import on_xla
from tests.training.test_dino import DINO, SMALL, assert_same, weights_of
from tests.training.test_mixing import assert_steady
from tests.usage_error import told_in_one_line

SMALLER = "--embed_dim 16 --num_heads 2 --num_blocks 1 --dino_head_hidden 8".split()


@pytest.fixture(scope="module")
def teacher(tmp_path_factory):
    """The folder of a finished run of dino, its average in plain PyTorch, and the flags of it."""
    folder = tmp_path_factory.mktemp("teacher")
    train_tiny_gpu(folder, *DINO)
    plain = plain_dino.plain_of(on_xla([*tiny(folder / "none"), *DINO]))
    plain.load_state_dict(weights_of(folder, "ema"))
    return folder, plain, ["--teacher", "vit_10b", "--teacher_weights", str(folder)]


@pytest.mark.long
@pytest.mark.parametrize(
    ("run", "how"),
    [
        (train_tiny_gpu, {"processes": 2}),
        (train_tiny_gpu, {}),
        (train_tiny, {"devices": 2}),
    ],
)
def test_taught_by_a_larger_model(run, how, teacher, tmp_path):
    folder, plain, flags = teacher
    result = run(tmp_path, *DINO, *SMALLER, *flags, **how)
    assert_same(result, plain_dino.train([*SMALL, *SMALLER], taught_by=plain))
    assert f"of {folder}/step_6, preprocessing" in result.stdout


# -- several students --------------------------------------------------------------------------

A, B = "timm/test_vit", "timm/test_vit2"
"""Of other widths and depths."""
FLAGS = [*"--data_dir datasets/digits --hflip 0 --image_size 16 --patch_size 4".split(), *TINY_RUN]
DINO_OF_TWO = ["--objective", "dino", *SMALL, "--ckpt_step_interval", "3"]
ON_XLA = ["--backend", "xla", "--cpu_devices", "2"]


def train(folder, *flags, fails=False, processes=1, program=("run_vit_training.py",)):
    if "xla" in flags:
        need_xla()
    done = run_program(*program, *FLAGS, "--ckpt_dir", str(folder), *flags, processes=processes)
    assert bool(done.returncode) == fails, done.stdout + done.stderr
    return Result(folder, done.stdout, done.stderr)


def of_student(result, name):
    return Result(result.ckpt_dir / name.removeprefix("timm/"), result.stdout, result.stderr)


def assert_alike(one, other, names=("loss", "grad_norm"), steps=range(1, 7)):
    assert [*one.steps] == [*other.steps] == [*steps]
    for name in names:
        assert one.column(name) == other.column(name), name
    for kind in ("model", "ema"):
        ours, theirs = (weights_of(each.ckpt_dir, kind) for each in (one, other))
        assert ours.keys() == theirs.keys()
        assert all(torch.equal(values, theirs[name]) for name, values in ours.items())


@pytest.fixture(scope="module")
def two(teacher, tmp_path_factory):
    """Both in one run, in two processes, and the flags of it. The storage is slow: step 3 is still
    being written when step 6 is done."""
    flags = ["--backend", "cuda", *DINO_OF_TWO, *teacher[2], "--drop_path_rate", "0.2"]
    flags += "--knn_every 6 --keep_checkpoints 1".split()
    folder = tmp_path_factory.mktemp("two")
    program = ("-m", "tests.stand_ins.disturbed_saves")
    with pytest.MonkeyPatch.context() as slow:
        slow.setenv("SAVES", "slow 3 -1 5")
        return train(folder, *flags, "--student", A, B, processes=2, program=program), flags


@pytest.mark.long
def test_each_student_trains_as_alone(two, tmp_path):
    """Bit for bit, with checkpoints that a run of it alone continues, measures and converts."""
    result, flags = two
    parts = ("loss", "grad_norm", "loss_dino", "loss_ibot", "loss_koleo")
    found = {name: of_student(result, name) for name in (A, B)}
    alone = train(tmp_path / "b", *flags, "--model", B, processes=2)
    assert_alike(alone, found[B], parts)
    assert found[A].column("loss") != found[B].column("loss")
    knn = [[r for r in each.records if "val_knn_10" in r] for each in (alone, found[B])]
    assert knn[0] == knn[1] != []

    # The last checkpoint that all have stays until all have a newer one.
    for name, each in found.items():
        assert {path.name for path in each.ckpt_dir.glob("step_*")} == {"step_3", "step_6"}
        assert each.run_file["arguments"]["model"] == name
        assert f"{name}: epoch 1 step 6, lr" in result.stdout
        assert f"checkpoint {each.ckpt_dir}/step_6" in result.stdout

    measured = run_program(
        *"run_vit_training.py --eval_only --knn --use_ema --json --backend cuda".split(),
        *("--data_dir", "datasets/digits", "--batch_size", "48", "--resume", found[A].ckpt_dir),
    )
    assert measured.returncode == 0, measured.stderr
    (record,) = [r for r in found[A].records if "val_knn_10" in r]
    assert f'"val_knn_10": {record["val_knn_10"]}' in measured.stdout
    target = str(tmp_path / "backbone.safetensors")
    convert = ["-m", "tools.convert", str(found[A].ckpt_dir), target, "--use_ema"]
    assert run_program(*convert).returncode == 0
    how = {"img_size": 16, "patch_size": 4, "num_classes": 0, "fc_norm": False}
    timm.create_model("test_vit", class_token=True, **how, checkpoint_path=target)


@pytest.mark.long
def test_all_resume_the_last_step_that_all_have(two, tmp_path):
    """As after a start that was killed while the second student was saving its step 6."""
    before, flags = two
    shutil.copytree(before.ckpt_dir, tmp_path / "run")
    (tmp_path / "run" / "test_vit2" / "step_6" / "manifest.json").unlink()
    after = train(tmp_path / "run", *flags, "--student", A, B, processes=2)
    assert "test_vit: note: this run goes back: step_6 set aside in" in after.stdout
    for name in (A, B):
        assert f"{name}: resuming {tmp_path}/run/{name[5:]}/step_3 at step 3" in after.stdout
        assert_alike(of_student(before, name), of_student(after, name))


@pytest.mark.long
def test_students_that_cannot_continue_together(two, capsys, tmp_path):
    before, flags = two
    words = [*FLAGS, *flags, "--ckpt_dir", str(tmp_path / "run"), "--student", A]
    shutil.copytree(before.ckpt_dir / "test_vit", tmp_path / "run" / "test_vit")
    line = told_in_one_line(capsys, *words, B)
    assert line.startswith(
        f"{tmp_path}/run/test_vit/step_6 is of a run without the student test_vi"
    )

    shutil.copytree(before.ckpt_dir / "test_vit2", tmp_path / "run" / "test_vit2")
    shutil.rmtree(tmp_path / "run" / "test_vit" / "step_3")
    shutil.rmtree(tmp_path / "run" / "test_vit2" / "step_6")
    line = told_in_one_line(capsys, *words, B)
    assert line.startswith(f"the students in {tmp_path}/run have no checkpoint of the same step")

    # All begin again if one has none yet: what the others have is moved, not removed.
    shutil.rmtree(tmp_path / "run" / "test_vit2" / "step_3")
    again = train(tmp_path / "run", *flags, "--student", A, B, "--max_steps", "1")
    assert "test_vit: note: this run goes back: step_6 set aside in" in again.stdout


@pytest.mark.long
def test_damaged_after_the_choice(two, tmp_path):
    """Of the second student alone: the first one does not continue without it."""
    before, flags = two
    shutil.copytree(before.ckpt_dir, tmp_path / "run")
    (part, *_) = sorted((tmp_path / "run" / "test_vit2" / "step_6").glob("*.distcp"))
    content = bytearray(part.read_bytes())
    content[-1] ^= 1
    part.write_bytes(content)
    done = train(tmp_path / "run", *flags, "--student", A, B, fails=True)
    assert "timm/test_vit continues" in done.stderr
    assert "remove the step_* folders that not all students have undamaged" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.long
def test_a_signal_saves_all(teacher, monkeypatch, tmp_path):
    monkeypatch.setenv("SIGNAL_AT", "0 5 SIGTERM")
    flags = ["--backend", "cuda", *DINO_OF_TWO, *teacher[2], "--student", A, B]
    program = ("-m", "tests.stand_ins.signal_at_step")
    stopped = train(tmp_path, *flags, fails=True, program=program)
    assert "training stopped by SIGTERM: step 5," in stopped.stdout
    for name in ("test_vit", "test_vit2"):
        assert {path.name for path in (tmp_path / name).glob("step_*")} == {"step_3", "step_5"}


@pytest.mark.long
@pytest.mark.parametrize("flags", ["", "--grad_accum_steps 2 --no-scan_blocks"])
def test_on_xla(flags, teacher, tmp_path):
    """One execution a student, or one a pass and one for its update, none compiled again; the same
    losses as alone."""
    flags = [*ON_XLA, *DINO_OF_TWO, *teacher[2], *flags.split()]
    result = train(tmp_path / "two", *flags, "--student", A, B)
    graphs = 3 if "--grad_accum_steps" in flags else 1
    for name in (A, B):
        assert_steady(of_student(result, name), executions=2 * graphs)
    assert_alike(train(tmp_path / "b", *flags, "--model", B), of_student(result, B))


@pytest.mark.long
@pytest.mark.parametrize("backend", [["--backend", "cuda"], ON_XLA])
def test_classifiers(backend, tmp_path):
    """By a teacher of labels, with images that are mixed, and evaluations of each."""
    given = [*backend, "--mixup", "0.8", "--num_classes", "10", "--test_step_interval", "3"]
    train(tmp_path / "teacher", *given, "--model", A)
    flags = [*given, "--teacher", A, "--teacher_weights", str(tmp_path / "teacher")]
    result = train(tmp_path / "two", *flags, "--student", A, B)
    alone = train(tmp_path / "b", *flags, "--model", B)
    assert alone.column("loss") == of_student(result, B).column("loss")
    assert alone.evaluations == of_student(result, B).evaluations != []


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (
            "{teacher} --dino_prototypes 40",
            "--teacher vit_10b compares with 48",
        ),
        (
            "{teacher} --ibot_prototypes 40",
            "--teacher vit_10b compares with 32",
        ),
        ("{teacher} --patch_size 8", "--teacher vit_10b has 4 x 4 patches, the student 2 x 2"),
        ("{teacher} --image_size 24", "--teacher vit_10b is for images of 3 x 16 x 16"),
        ("{teacher} --distillation_alpha 0.3", "requires --objective classify, this is dino"),
        ("{teacher} --objective mae", "--teacher vit_10b requires --objective classify or --obj"),
        ("--student vit_10b", "--student vit_10b requires --teacher"),
        ("{teacher} --student vit_10b --model vit_60b", "replaces --model vit_60b: drop one"),
        ("{teacher} --student vit_10b timm/vit_10b", "two of them have the folder "),
        ("{teacher} --student vit_10b vit_10b", "two of them have the folder "),
        ("{teacher} --student timm/nothing", "there is no model timm/nothing"),
        ("{teacher} --student ..", "there is no model .."),
        ("{teacher} --student", "expected at least one argument"),
        ("{teacher} --student vit_10b --resume best", "--student requires --resume auto or none"),
        ("{teacher} --student vit_10b --init_from x", "is incompatible with --init_from x"),
        ("{teacher} --student vit_10b --local_ckpt_dir x", "incompatible with --local_ckpt_dir x"),
        ("{teacher} --student vit_10b --gram_weights x", "incompatible with --gram_weights x"),
        ("{teacher} --student vit_10b --eval_only --knn", "is incompatible with --eval_only"),
        ("{teacher} --student vit_10b --self_check", "is incompatible with --self_check"),
    ],
)
def test_mistakes(flags, told, teacher, capsys, tmp_path):
    given = flags.format(teacher=" ".join(teacher[2])).split()
    words = [*FLAGS, "--backend", "cuda", "--ckpt_dir", str(tmp_path / "run"), *DINO_OF_TWO]
    assert told in told_in_one_line(capsys, *words, *given)
    assert not (tmp_path / "run").exists()
