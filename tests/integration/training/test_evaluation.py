"""Evaluation in detail: top-5, accuracy and confusion by class, against scikit-learn and timm."""

import csv
import json

import numpy as np
import pytest
import torch
from PIL import Image
from sklearn.metrics import confusion_matrix, top_k_accuracy_score

import run_vit_training
from tests.references.plain_checkpoint import convert, tiny_timm_model
from tests.support.cli import DIGITS, VAL_IMAGES, need_xla, run_program, train_tiny_gpu
from tests.support.usage_error import told_in_one_line
from training.evaluation.report import write_report
from training.objectives.classify import classes_before

STEPS = 110


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("trained")
    return train_tiny_gpu(folder, *f"--num_epochs 5 --max_steps {STEPS} --batch_size 64".split())


@pytest.fixture(scope="module")
def expected(trained, tmp_path_factory):
    """Labels and logits of all of val/, by timm's model and torchvision alone."""
    from torchvision.transforms import v2

    model = tiny_timm_model().eval()
    path = tmp_path_factory.mktemp("plain") / "plain.pt"
    model.load_state_dict(convert(trained.ckpt_dir / f"step_{STEPS}", path)["model"])
    transform = v2.Compose(
        [
            v2.Resize(18, v2.InterpolationMode.BICUBIC),
            v2.CenterCrop(16),
            v2.ToImage(),
            v2.ToDtype(torch.float32, scale=True),
            v2.Normalize((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)),
        ]
    )
    paths = sorted((DIGITS / "val").glob("*/*.png"))
    images = torch.stack([transform(Image.open(path).convert("RGB")) for path in paths])
    with torch.no_grad():
        return [int(path.parent.name) for path in paths], model(images)


def test_place_of_a_label_among_the_logits():
    generator = torch.Generator().manual_seed(0)
    for classes in (2, 4, 5, 10, 1000):
        logits = torch.randn(64, classes, generator=generator)
        labels = torch.randint(classes, (64,), generator=generator)
        before = classes_before(logits, labels)
        assert ((before == 0) == (logits.argmax(-1) == labels)).all()
        among = (logits.topk(min(5, classes)).indices == labels[:, None]).any(-1)
        assert ((before < 5) == among).all()
    # All alike: the first class counts as the likeliest. What is no number is never right.
    assert classes_before(torch.zeros(3, 10), torch.tensor([0, 4, 9])).tolist() == [0, 4, 9]
    logits = torch.tensor([[1.0, float("nan"), 0.0], [float("inf"), 0.0, -float("inf")]])
    assert classes_before(logits, torch.tensor([1, 2])).tolist() == [3, 2]
    assert classes_before(logits, torch.tensor([0, 0])).tolist() == [1, 0]
    assert classes_before(logits, torch.tensor([-1, -1])).shape == (2,)  # padding


def test_top5_in_every_report(trained, expected):
    labels, logits = expected
    (record,) = trained.evaluations
    top5 = 100 * top_k_accuracy_score(labels, logits.numpy(), k=5)
    assert record["val_top5"] == pytest.approx(top5, abs=0.3)  # an image
    assert 20 < record["val_top1"] < record["val_top5"] < 100
    assert f"% of {VAL_IMAGES} images, top-5: {record['val_top5']:.2f} %" in trained.stdout
    event = next((trained.ckpt_dir / "tensorboard").iterdir()).read_bytes()
    assert b"val/top5" in event


def test_some_batches_alone(trained, expected, capsys):
    """--eval_batches: the first images of val/."""
    flags = "--eval_only --json --backend cuda --batch_size 32 --eval_batches 2 --num_workers 0"
    words = [*flags.split(), "--data_dir", DIGITS, "--resume", trained.ckpt_dir]
    assert run_vit_training.main(list(map(str, words))) == 0
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    labels, logits = expected
    right = logits[:64].argmax(-1) == torch.tensor(labels[:64])
    assert result["val_images"] == 64
    assert result["val_top1"] == pytest.approx(
        100 * right.float().mean().item(), abs=1.6
    )  # an image


@pytest.mark.parametrize(
    ("processes", "flags"),
    [
        # Four batches of 100, the last one with 41 times padding.
        (1, "--cpu_devices 2 --grad_accum_steps 2 --batch_size 200"),
        (1, "--cpu_devices 4 --mesh_domain 2 --batch_size 100 --no-scan_blocks"),
        (1, "--xla_fsdp nested --cpu_devices 1 --batch_size 100"),
        (2, "--backend cuda --batch_size 100"),
    ],
)
def test_report(processes, flags, trained, expected, tmp_path):
    if "cuda" not in flags:
        need_xla()
    folder = tmp_path / "new" / "report"
    words = ["--eval_only", "--json", "--eval_report", folder, "--data_dir", DIGITS, *flags.split()]
    words += ["--num_workers", "0", "--resume", trained.ckpt_dir]
    done = run_program("run_vit_training.py", *map(str, words), processes=processes)
    assert done.returncode == 0, done.stderr
    assert f"report on 10 classes: {folder}" in done.stderr
    labels, logits = expected
    found = torch.zeros(10, 10, dtype=torch.int64)
    for row in read_table(folder / "confusion.csv"):
        found[int(row["class"]), int(row["predicted"])] = int(row["images"])
    matrix = torch.tensor(confusion_matrix(labels, logits.argmax(-1)))
    assert (found - matrix).abs().sum() <= 2  # an image at the edge of two
    assert found.sum(1).tolist() == matrix.sum(1).tolist()

    rows = read_table(folder / "per_class.csv")
    assert [row["class"] for row in rows] == list("0123456789")
    in_top5 = (logits.topk(5).indices == torch.tensor(labels)[:, None]).any(-1)
    for row, line in zip(rows, found, strict=True):
        label = int(row["label"])
        assert row["top1"] == f"{100 * int(line[label]) / int(line.sum()):.2f}"
        wanted = 100 * in_top5[torch.tensor(labels) == label].float().mean()
        assert float(row["top5"]) == pytest.approx(wanted, abs=3)
        wrong = line.clone()
        wrong[label] = 0
        assert int(row["times"]) == wrong.max()
        assert int(row["predicted"]) == found[:, label].sum()
    result = json.loads(done.stdout.splitlines()[-1])  # after what gloo says
    assert result["val_top1"] == pytest.approx(100 * found.diag().sum() / VAL_IMAGES)
    with Image.open(folder / "confusion.png") as picture:
        assert min(picture.size) > 300


def test_many_classes_and_odd_names(tmp_path):
    names = ["cut_$x^{", "new\nline", "caf\udce9", *(f"class {label}" for label in range(3, 60))]
    labels = torch.tensor([0, 0, 1, 2, 2, 2, 59])
    found = torch.stack([labels, torch.tensor([0, 1, 1, 0, 0, 2, 2]), (labels == 59) * 7])
    for count in (60, 0):
        write_report(found[:, :count].numpy(), names, tmp_path, pytest.fail)
        rows = read_table(tmp_path / "per_class.csv")
        assert len(rows) == 60
        assert rows[5]["top1"] == ""
        assert not (tmp_path / "confusion.png").exists()
        if count:
            confusion = read_table(tmp_path / "confusion.csv")
            wrong = [row for row in confusion if row["class"] != row["predicted"]]
            most = max(wrong, key=lambda row: int(row["images"]))
            assert list(most.values()) == [names[2], names[0], "2"]
            assert (rows[2]["mostly_mistaken_for"], rows[2]["times"]) == (names[0], "2")
            assert (rows[59]["top1"], rows[59]["top5"]) == ("0.00", "0.00")


def test_odd_names_in_the_picture(tmp_path):
    """Of names that are no text, and mathematics to matplotlib."""
    names = ["cut_$x^{", "new\nline", "caf\udce9"]
    write_report(np.array([[0, 1, 2], [0, 1, 1], [0, 0, 1]]), names, tmp_path, pytest.fail)
    assert (tmp_path / "confusion.png").stat().st_size > 10_000


def test_names_are_no_formulas_of_spreadsheets(tmp_path):
    names = ["=cmd|x", "@sum", "+", "-1", " =x", "\uff1dx", "\t=x", "\x1b]0;x\x07", "a=b", "'"]
    shown = [
        "'=cmd|x",
        "'@sum",
        "'+",
        "'-1",
        "' =x",
        "'\uff1dx",
        "\\t=x",
        "\\x1b]0;x\\x07",
        "a=b",
        "'",
    ]
    write_report(np.array([range(10), [*range(1, 10), 0], [1] * 10]), names, tmp_path, pytest.fail)
    rows = read_table(tmp_path / "per_class.csv")
    assert [row["class"] for row in rows] == shown
    assert [row["mostly_mistaken_for"] for row in rows] == [*shown[1:], shown[0]]
    assert {row["predicted"] for row in read_table(tmp_path / "confusion.csv")} == {*shown}


def read_table(path):
    with path.open(newline="", encoding="utf-8", errors="surrogateescape") as file:
        return list(csv.DictReader(file))


def test_mistakes(trained, capsys, tmp_path):
    def said(*flags):
        return told_in_one_line(capsys, *flags, "--data_dir", DIGITS)

    assert "requires --eval_only" in said("--eval_report", tmp_path)
    evaluate = ("--eval_only", "--backend", "cuda", "--resume", trained.ckpt_dir)
    (tmp_path / "file").touch()
    told = said(*evaluate, "--eval_report", tmp_path / "file")
    assert told == f"--eval_report {tmp_path / 'file'} is a file, not a folder"
    told = said(*evaluate, "--eval_report", "memory://report")
    assert told == "--eval_report memory://report: use a folder of this machine"
