"""``--class_weights``, ``--logit_adjustment``, ``--balanced_sampling``, and recalls: real runs."""

import csv
import itertools
import json
import re

import pytest
import torch
import torch.nn.functional as F
from sklearn.metrics import balanced_accuracy_score, recall_score

from data.batch import BatchShard
from data.open import open_data
from tests.fakes.filled import filled
from tests.support.cli import TINY_MODEL, TINY_RUN, run_program, train_tiny, train_tiny_gpu
from tests.support.marks import long
from tests.support.resolved import on_gpus
from tests.support.resuming import DROPOUT, assert_resumes_at_step_7
from tests.support.tensorboard_files import scalars_of
from tests.support.thinned import SIZES, thin_out
from tests.support.usage_error import told_in_one_line
from tools.self_check.plain import normalized
from training.data import dataset_request

IMAGES = sum(SIZES)
assert IMAGES // 16 == 14  # steps of an epoch
QUICK = "--patch_size 8 --eval_batches 1".split()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return thin_out(tmp_path_factory.mktemp("thinned") / "digits")


@pytest.fixture
def source(folder):
    return ["--data_dir", str(folder)]


# -- balanced sampling -------------------------------------------------------------------

SAMPLED = [*QUICK, *"--balanced_sampling --max_steps 10 --num_workers 1 --hflip 0.5".split()]


@pytest.mark.parametrize(
    ("train", "how"), [(train_tiny, {"devices": 4}), (train_tiny_gpu, {"processes": 2})]
)
def test_resumes_in_mid_epoch_with_the_same_images(train, how, source, tmp_path):
    flags = [*source, *SAMPLED, *DROPOUT, "--aug_repeats", "2"]
    assert_resumes_at_step_7(train, tmp_path, *flags, **how)


def test_backends_and_devices_train_on_the_same_images(source, tmp_path):
    flags = [*source, *SAMPLED, "--ckpt_step_interval", "7", "--reprob", "0.5"]
    one = train_tiny(tmp_path / "one", *flags)
    four = train_tiny_gpu(tmp_path / "four", *flags, processes=4)
    for name in ("loss", "grad_norm"):
        assert four.column(name) == pytest.approx(one.column(name), rel=1e-4)
    moved = ["--resume", str(tmp_path / "four" / "step_7")]
    resumed = train_tiny(tmp_path / "moved", *flags, *moved, devices=2)
    assert resumed.column("loss") == pytest.approx(one.column("loss")[7:], rel=1e-4)
    assert "training images by class (10 classes): 0: 96 (40.51 %), 1: 48 (" in one.stdout


def test_the_sampling_must_not_change_within_an_epoch(source, tmp_path):
    flags = [*source, *QUICK, "--max_steps", "2"]
    train_tiny_gpu(tmp_path, *flags)
    words = [*source, *TINY_MODEL, *TINY_RUN, *QUICK, "--ckpt_dir", str(tmp_path)]
    done = run_program("run_vit_training.py", "--backend", "cuda", *words, "--balanced_sampling")
    assert done.returncode == 2
    assert "--balanced_sampling changed from none to 1.0): some would be" in done.stderr
    assert "restart that epoch with --restart_epoch" in done.stderr


# -- class weights -----------------------------------------------------------------------


def by_hand(weights, *flags, terms=0.0):
    """Loss and gradient norm of the first two steps, whose weights are the initial ones."""
    run = on_gpus([*TINY_MODEL, *TINY_RUN, "--hflip", "0", *flags])
    model = filled(run.model, run.config.seed)
    loader = open_data(dataset_request(run)).train_loader(16, BatchShard())
    how = {"weight": weights, "label_smoothing": run.config.loss.smoothing, "reduction": "sum"}
    expected = []
    for batch in itertools.islice(loader.epoch(0), 2):
        model.zero_grad()
        logits = model(normalized(batch["image"], run.config.data.preprocessing))
        loss = F.cross_entropy(logits + terms, batch["target"], **how) / 16
        loss.backward()
        norm = torch.nn.utils.get_total_norm([each.grad for each in model.parameters()]).item()
        expected += [loss.item(), norm]
    return expected


AUTO = torch.tensor([IMAGES / (10 * n) for n in SIZES])


@pytest.mark.parametrize(
    ("train", "flags", "how"),
    [
        (train_tiny, "--grad_accum_steps 2 --smoothing 0.1", {"devices": 4}),
        (train_tiny_gpu, "--smoothing 0.1", {"processes": 4}),
        (train_tiny_gpu, "--fsdp megatron --grad_accum_steps 4", {"processes": 2}),
        long(train_tiny, "--xla_fsdp nested", {}),
        long(train_tiny, "--mesh_tensor 2 --no-scan_blocks", {"devices": 4}),
        long(train_tiny, "--mesh_domain 2 --data_source folder", {"devices": 4}),
        long(train_tiny_gpu, "--mesh_domain 2", {"processes": 4}),
    ],
)
def test_first_steps_are_pytorchs(train, flags, how, source, tmp_path):
    given = [*source, "--class_weights", "auto", *flags.split()]
    result = train(tmp_path, *given, *QUICK, "--max_steps", "3", **how)
    smoothing = ["--smoothing", "0.1"] if "--smoothing" in flags else []
    expected = by_hand(AUTO, *source, *smoothing, "--patch_size", "8")
    found = [result.steps[step][name] for step in (1, 2) for name in ("loss", "grad_norm")]
    assert found == pytest.approx(expected, rel=1e-4)
    assert "class weights: 0.2469 to 7.9, mean over the training images 1" in result.stdout
    if "compilations" in result.steps[3]:
        assert result.steps[3]["compilations"] == result.steps[2]["compilations"]


@pytest.mark.parametrize(
    ("train", "flags", "how"),
    [
        (train_tiny, "--grad_accum_steps 2 --smoothing 0.1", {"devices": 4}),
        (train_tiny_gpu, "--smoothing 0.1", {"processes": 2}),
        long(train_tiny, "--xla_fsdp nested --smoothing 0.1", {}),
        long(train_tiny, "--mesh_tensor 2 --no-scan_blocks --smoothing 0.1", {"devices": 4}),
    ],
)
def test_first_steps_with_adjusted_logits(train, flags, how, source, tmp_path):
    given = [*source, "--logit_adjustment", "0.7", *flags.split()]
    result = train(tmp_path, *given, *QUICK, "--max_steps", "3", **how)
    terms = 0.7 * torch.tensor(SIZES).div(IMAGES).log()
    expected = by_hand(None, *source, "--smoothing", "0.1", "--patch_size", "8", terms=terms)
    found = [result.steps[step][name] for step in (1, 2) for name in ("loss", "grad_norm")]
    assert found == pytest.approx(expected, rel=1e-4)
    assert "logit adjustment in the loss: -3.059 to -0.6326" in result.stdout
    if "compilations" in result.steps[3]:
        assert result.steps[3]["compilations"] == result.steps[2]["compilations"]


def test_weights_of_a_file(source, tmp_path):
    file = tmp_path / "weights.csv"
    file.write_text("class,weight\n" + "".join(f"{n},{n + 1}\n" for n in range(10)))
    given = [*source, *QUICK, "--class_weights", str(file)]
    result = train_tiny_gpu(tmp_path / "run", *given, "--max_steps", "3", processes=2)
    weights = torch.arange(1.0, 11)
    weights /= (weights * torch.tensor(SIZES)).sum() / IMAGES
    expected = by_hand(weights, *source, "--patch_size", "8")
    found = [result.steps[step][name] for step in (1, 2) for name in ("loss", "grad_norm")]
    assert found == pytest.approx(expected, rel=1e-4)


# Two images of 4 patches: the default of 1,024 tokens takes two seconds a step.
PAIRS = "--native_resolution --token_budget 16 --max_images_per_sequence 2 --batch_size 8"


@pytest.mark.parametrize(
    "flags",
    [
        PAIRS,
        f"{PAIRS} --logit_adjustment 1",
        "--mixup 0.8 --cutmix 1 --aug_repeats 2",
        "--teacher vit_10b --teacher_weights {teacher}",
    ],
)
def test_weights_go_with(flags, source, tmp_path):
    """On both backends alike; in place of weights, the logits may be adjusted."""
    if "--teacher" in flags:
        train_tiny_gpu(tmp_path / "teacher", *source, *QUICK, "--max_steps", "2")
    words = flags.format(teacher=tmp_path / "teacher").split()
    without = [*source, *QUICK, *words, "--max_steps", "3"]
    given = [*without, "--class_weights", "auto"]
    if "--logit_adjustment" in flags:
        given, without = without, without[: without.index("--logit_adjustment")] + without[-2:]
    plain = train_tiny_gpu(tmp_path / "plain", *without, "--max_steps", "1")
    gpu = train_tiny_gpu(tmp_path / "gpu", *given, processes=2)
    xla = train_tiny(tmp_path / "xla", *given, devices=2)
    assert gpu.column("loss") == pytest.approx(xla.column("loss"), rel=1e-4)
    assert abs(gpu.column("loss")[0] - plain.column("loss")[0]) > 1e-3


# -- what is said of the classes ---------------------------------------------------------


def test_recalls_are_recorded_and_the_best_is_kept(source, folder, tmp_path):
    flags = [*source, "--patch_size", "8", "--max_steps", "12", "--test_step_interval", "3"]
    best = ["--ckpt_best", "worst_recall", "--keep_checkpoints", "1", "--model_ema"]
    run = train_tiny(tmp_path / "run", *flags, *best, "--model_ema_decay", "0.5", devices=2)
    names = ("val_balanced_accuracy", "val_worst_recall", "val_largest_class")
    for name in names:
        recorded = [(r["step"], pytest.approx(r[name])) for r in run.evaluations]
        tag = name.replace("val_", "val/")
        assert scalars_of(run.ckpt_dir / "tensorboard", tag) == recorded
    assert {record["val_largest_class"] for record in run.evaluations} == {10.0}
    assert "ema_val_largest_class" not in run.evaluations[0]
    scores = {r["step"]: r["ema_val_worst_recall"] for r in run.evaluations}
    first_best = max(scores, key=scores.get)
    kept = {int(path.name[5:]) for path in run.ckpt_dir.glob("step_*")}
    assert kept == {first_best, 12}

    last = run.evaluations[-1]
    top1 = f"val top-1 {last['val_top1']:.2f} % (weights), {last['ema_val_top1']:.2f} % (EMA)"
    assert f"training completed: step 12, {top1}, checkpoint " in run.stdout
    for weights, start in (("weights", ""), ("EMA", "ema_")):
        values = [last[f"{start}{name}"] for name in names[:2]] + [last[names[2]]]
        line = re.search(
            rf"step 12, {weights}: balanced accuracy: (.*) %, worst recall: (.*) % "
            r"\(class \d\), always class 0: (.*) %",
            run.stdout,
        )
        assert [float(each) for each in line.groups()] == pytest.approx(values, abs=0.006)

    report = tmp_path / "report"
    words = [*TINY_MODEL, *flags, "--ckpt_dir", str(run.ckpt_dir), "--eval_report", str(report)]
    words += "--eval_only --json --num_workers 0 --batch_size 16 --resume worst_recall".split()
    done = run_program("run_vit_training.py", "--backend", "cuda", *words)
    assert done.returncode == 0, done.stderr
    values = json.loads(done.stdout)
    pairs = []
    with open(report / "confusion.csv", newline="") as file:
        for row in csv.DictReader(file):
            pairs += [(row["class"], row["predicted"])] * int(row["images"])
    labels, predicted = zip(*pairs, strict=True)
    assert len(labels) == 90
    assert values["val_balanced_accuracy"] == pytest.approx(
        100 * balanced_accuracy_score(labels, predicted)
    )
    recalls = recall_score(labels, predicted, average=None)
    assert values["val_worst_recall"] == pytest.approx(100 * recalls.min())
    assert f"worst recall: {100 * recalls.min():.2f} % (class " in done.stderr


def test_one_class_is_a_warning(source, tmp_path):
    """Only one class counts in the loss, so nothing else is learned."""
    file = tmp_path / "weights.csv"
    file.write_text("class,weight\n" + "".join(f"{n},{int(n == 3)}\n" for n in range(10)))
    flags = [*source, "--patch_size", "8", "--lr", "0.1", "--class_weights", str(file)]
    run = train_tiny_gpu(tmp_path / "run", *flags, "--max_steps", "10")
    (warning,) = [line for line in run.stdout.splitlines() if "warning: all 90 images" in line]
    assert "step 10, warning: all 90 images of val are predicted as class 3: the mod" in warning
    assert "balanced accuracy: 10.00 %, worst recall: 0.00 % (class 0), always" in run.stdout


# -- mistakes ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        ("--class_weights missing.csv", "--class_weights missing.csv cannot be read"),
        ("--class_weights gs://b/w.csv", "is a URL: give a local path"),
        ("--class_weights auto --bce_loss", "--class_weights auto is incompatible with --bce_loss"),
        ("--class_weights auto --save_bad_step", "incompatible with --save_bad_step (tools.replay"),
        ("--class_weights auto --objective mae", "requires --objective classify, not mae"),
        ("--class_weights auto --fake_data", "at least two classes, and all 1,281,167 of "),
        ("--class_weights auto --balanced_sampling", "--balanced_sampling 1.0 is incompatible wi"),
        ("--class_weights auto --logit_adjustment 1", "1.0 is incompatible with --class_weights a"),
        (
            "--logit_adjustment 1 --balanced_sampling",
            "is incompatible with --balanced_sampling 1.0",
        ),
        ("--logit_adjustment 1 --bce_loss", "--bce_loss (it is defined for the softmax): drop one"),
        ("--logit_adjustment 1 --save_bad_step", "incompatible with --save_bad_step (tools.replay"),
        ("--logit_adjustment 1 --objective mae", "requires --objective classify, not mae"),
        ("--logit_adjustment 1 --fake_data", "at least two classes, and all 1,281,167 of "),
        ("--logit_adjustment 0", "--logit_adjustment: 0 must be at least 1e-12"),
        ("--logit_adjustment nan", "'nan' is not a finite number"),
        ("--balanced_sampling -1", "-1 must be at least 0 and at most 1"),
        ("--balanced_sampling nan", "'nan' is not a finite number"),
        ("--balanced_sampling 1.5", "1.5 must be at least 0 and at most 1"),
        ("--balanced_sampling --buckets 16x16 12x20", "each batch has images of one aspect ratio"),
        ("--balanced_sampling --native_resolution", "is incompatible with native resolution"),
        ("--balanced_sampling --data_source parquet", "it reads groups of images together"),
        ("--balanced_sampling --fake_data", "its images have no classes"),
        ("--balanced_sampling --objective mae", "requires --objective classify, not mae"),
        ("--ckpt_best worst_recall --objective mae", "requires --objective classify, not mae"),
        ("--ckpt_best balanced", "invalid choice: 'balanced' (choose from 'best', 'lo"),
    ],
)
def test_mistakes(flags, told, source, tmp_path, capsys):
    words = [*source, *TINY_MODEL, *TINY_RUN, "--backend", "cuda", "--ckpt_dir", tmp_path / "run"]
    assert told in told_in_one_line(capsys, *words, *flags.split())
    assert not (tmp_path / "run").exists()


def test_all_images_of_one_class(tmp_path, capsys):
    folder = thin_out(tmp_path / "digits", sizes=(16,), val=1)
    words = [*TINY_MODEL, *TINY_RUN, "--backend", "cuda", "--ckpt_dir", tmp_path / "run"]
    for flags in (["--class_weights", "auto"], ["--balanced_sampling"]):
        line = told_in_one_line(capsys, "--data_dir", folder, *words, *flags)
        assert "all 16 training images have the same label, 0" in line
