"""Models of images and texts in use: retrieval, zero-shot classification, --predict, --features and
reports, against plain PyTorch and NumPy."""

import csv
import json
import random

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file

from tests.fakes.filled import filled
from tests.references.plain_retrieval import (
    PlainTowers,
    captions_of,
    classes_of,
    recalls,
    siglip_loss,
)
from tests.support.checkpoints import tensors_of
from tests.support.cli import (
    DIGITS,
    VAL_IMAGES,
    need_xla,
    run_program,
    tiny,
    train_tiny_gpu,
)
from tests.support.pairs import PAIR_FLAGS
from tests.support.resolved import on_gpus
from tests.support.usage_error import told_in_one_line
from training.errors import UsageError

WORDS = "zero one two three four five six seven eight nine".split()
FORMS = ["a photo of a {}", "{} by hand", "bad \x1b[31m {}", "Ünï <b>{}</b>", "$x^2$ = {}"]
PROMPTS = ["a photo of a {}", "the digit {}, large", "{}"]
STEPS = 4
TEXT = (
    "--objective siglip --tokenizer bytes --no-canonical_text --text_depth 1 --text_width 16 "
    "--text_heads 2 --text_length 24"
).split()


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """A table of digits with one to three captions each, names of classes and prompts."""
    root, draw = tmp_path_factory.mktemp("files"), random.Random(0)
    with open(root / "pairs.csv", "w", newline="", encoding="utf-8") as file:
        table = csv.writer(file)
        table.writerow(["path", "split", "caption"])
        for path in sorted(DIGITS.glob("*/*/*.png")):
            word = WORDS[int(path.parent.name)]
            for form in draw.sample(FORMS, draw.randint(1, 3)):
                table.writerow([path.relative_to(DIGITS), path.parts[-3], form.format(word)])
    (root / "names.txt").write_text("\n".join(WORDS) + "\n")
    (root / "prompts.txt").write_text("\n".join(PROMPTS))
    return root


@pytest.fixture(scope="module")
def flags(files):
    """Of pairs and of classes."""
    pairs = [*TEXT, "--labels", str(files / "pairs.csv"), "--val_captions", "3"]
    names = ["--class_names", str(files / "names.txt"), "--prompts", str(files / "prompts.txt")]
    return pairs, ["--zero_shot", str(DIGITS), *names]


@pytest.fixture(scope="module")
def trained(flags, tmp_path_factory):
    """A run in two processes from random weights that tell images and texts apart; the last batch
    of validation is in one of the two alone."""
    folder = tmp_path_factory.mktemp("trained")
    model = filled(on_gpus([*tiny(folder), *flags[0]]).model)
    torch.manual_seed(0)
    for name, values in model.named_parameters():
        if not name.startswith("logit_"):
            values.data.add_(0.2 * torch.randn(values.shape))
    save_file(model.state_dict(), folder / "random.safetensors")
    more = f"--max_steps {STEPS} --batch_size 64 --test_step_interval 2 --lr 1e-4".split()
    pairs, zero_shot = flags
    more += ["--init_from", str(folder / "random.safetensors")]
    every = ["--zero_shot_every", "3", "--ckpt_best"]
    return train_tiny_gpu(folder / "run", *pairs, *zero_shot, *more, *every, processes=2)


@pytest.fixture(scope="module")
def towers(trained, flags):
    state = tensors_of(trained.ckpt_dir / f"step_{STEPS}")
    weights = {n.removeprefix("model."): v for n, v in state.items() if n.startswith("model.")}
    return PlainTowers(on_gpus([*tiny(trained.ckpt_dir), *flags[0]]), weights)


@pytest.fixture(scope="module")
def plain(towers, files):
    """The figures of the validation images."""
    captions = captions_of(files / "pairs.csv", DIGITS)
    images = towers.images(captions)
    every = sorted({text for own in captions.values() for text in own})
    embedded = dict(zip(every, towers.texts(every), strict=True))
    figures = recalls(images, list(captions.values()), embedded)
    first = np.stack([embedded[own[0]] for own in captions.values()])
    figures["val_loss"] = siglip_loss(images, first, towers.scale, towers.bias)
    return figures | {"val_images": len(images)}


def use(trained, *flags):
    weights = ["--resume", str(trained.ckpt_dir / f"step_{STEPS}"), "--num_workers", "0"]
    done = run_program("run_vit_training.py", "--data_dir", str(DIGITS), *weights, *flags)
    assert done.returncode == 0, done.stdout + done.stderr
    return done


def same(found, plain):
    for name, value in plain.items():
        assert found[name] == pytest.approx(value, rel=1e-4), name


def test_every_evaluation_has_the_recall_of_all_pairs(trained, plain):
    first, last = trained.evaluations
    assert (first["step"], last["step"]) == (2, STEPS)
    same(last, plain)
    assert last["val_loss"] < first["val_loss"]
    mean = (last["val_image_to_text_r1"] + last["val_text_to_image_r1"]) / 2
    assert last["val_recall_at_1"] == pytest.approx(mean)
    assert f"val recall@1 {mean:.2f} %" in trained.stdout
    best = max(trained.evaluations, key=lambda record: record["val_recall_at_1"])
    assert (trained.ckpt_dir / f"step_{best['step']}").is_dir()
    assert 0 < plain["val_image_to_text_r10"] < 100
    for name in ("similarity", "nearest_texts"):
        assert min(Image.open(trained.ckpt_dir / f"{name}.png").size) > 300
    events = b"".join(p.read_bytes() for p in (trained.ckpt_dir / "tensorboard").iterdir())
    assert b"nearest_texts" in events
    assert b"val/image_to_text_r1" in events


@pytest.mark.long
def test_a_start_after_the_end_evaluates_nothing_again(trained, flags):
    before = trained.records
    again = f"--max_steps {STEPS} --batch_size 64 --test_step_interval 2 --lr 1e-4".split()
    pairs, zero_shot = flags
    train_tiny_gpu(trained.ckpt_dir, *pairs, *zero_shot, *again, processes=2)
    assert trained.records == before


def test_alone_on_xla_with_a_report(trained, plain, flags, tmp_path):
    need_xla()
    report = ["--eval_only", "--json", "--cpu_devices", "2", "--eval_report", str(tmp_path / "r")]
    done = use(trained, *flags[0], *report, "--batch_size", "64")
    found = json.loads(done.stdout)
    same(found, plain)
    wrong = found["errors"]
    right = VAL_IMAGES - len(wrong)
    assert 100 * right / VAL_IMAGES == pytest.approx(found["val_image_to_text_r1"])
    assert all(row["rank"] > 1 and row["nearest"][0]["text"] not in row["texts"] for row in wrong)
    with open(tmp_path / "r" / "retrieval.csv", newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == VAL_IMAGES
    assert sum(row["rank"] == "1" for row in rows) == right
    page = (tmp_path / "r" / "evaluation.html").read_text(encoding="utf-8")
    assert "\x1b" not in page
    assert "\\x1b[31m" in page
    assert "&lt;b&gt;" in page
    assert {p.name for p in (tmp_path / "r").iterdir()} == {
        *("retrieval.csv", "similarity.png", "nearest_texts.png", "evaluation.html")
    }


@pytest.fixture(scope="module")
def zero_shot(towers):
    """The probabilities of the classes of all validation images, and their labels."""
    paths = sorted(DIGITS.glob("val/*/*.png"))
    logits = towers.scale * towers.images(paths) @ classes_of(towers, WORDS, PROMPTS).T
    return logits, np.array([int(path.parent.name) for path in paths])


def test_zero_shot_in_training(trained, zero_shot):
    logits, labels = zero_shot
    records = [r for r in trained.records if "val_zero_shot_top1" in r]
    assert [record["step"] for record in records] == [3, STEPS]
    accuracy = 100 * np.mean(logits.argmax(1) == labels)
    assert logits.std(axis=1).min() > 0.05  # else equal figures would mean little
    in_top5 = 100 * np.mean((-logits).argsort(1)[:, :5] == labels[:, None]) * 5
    assert records[-1]["val_zero_shot_top1"] == pytest.approx(accuracy)
    assert records[-1]["val_zero_shot_top5"] == pytest.approx(in_top5)
    assert f"accuracy {accuracy:.2f} % of {VAL_IMAGES} images" in trained.stdout


@pytest.mark.parametrize("how", ["--cpu_devices 2", "--backend cuda --fsdp simple --compile"])
def test_zero_shot_alone(how, trained, zero_shot, flags):
    """On XLA, and with a graph for each batch of prompts and of images."""
    if "cpu_devices" in how:
        need_xla()
    done = use(trained, *TEXT, *flags[1], "--eval_only", "--json", *how.split())
    found = json.loads(done.stdout)
    logits, labels = zero_shot
    assert found["val_top1"] == pytest.approx(100 * np.mean(logits.argmax(1) == labels))
    losses = np.logaddexp.reduce(logits, axis=1) - logits[np.arange(len(labels)), labels]
    assert found["val_loss"] == pytest.approx(losses.mean(), rel=1e-4)
    assert [row["class"] for row in found["classes"]] == WORDS


def test_predict(trained, towers):
    path, texts = DIGITS / "val" / "3" / "0060.png", ["a photo of a three", "three", "a\tcat"]
    done = use(trained, "--predict", str(path), "--texts", *texts, "--json")
    ((found,), (image,)) = json.loads(done.stdout), towers.images([path])
    logits = towers.scale * towers.texts(texts) @ image + towers.bias
    expected = dict(zip(texts, 1 / (1 + np.exp(-logits)), strict=True))
    assert {row["text"]: row["probability"] for row in found["top5"]} == pytest.approx(
        expected, rel=1e-4
    )
    shown = use(trained, "--predict", str(path), "--texts", *texts).stdout
    assert "a\\tcat" in shown


@pytest.mark.parametrize("how", ["", "--fsdp simple --compile"])
def test_features(how, trained, towers, files, flags, tmp_path):
    kinds = ["--features_of", "image_embedding", "text_embedding", "--without_labels"]
    more = ["--backend", "cuda", "--batch_size", "64", *how.split()]
    use(trained, *flags[0], *more, "--features", str(tmp_path / "f"), *kinds)
    (path,) = (tmp_path / "f").glob("val-*")
    found = load_file(path)
    captions = captions_of(files / "pairs.csv", DIGITS)
    order = found["number"].argsort()
    for kind, expected in (
        ("image_embedding", towers.images(captions)),
        ("text_embedding", towers.texts([own[0] for own in captions.values()])),
    ):
        np.testing.assert_allclose(found[kind][order], expected, atol=1e-5)


# -- mistakes ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("more", "text"),
    [
        ("--zero_shot nowhere", "nowhere/val does not exist: --zero_shot requires val/<class>"),
        ("--class_names few.txt --zero_shot DIGITS", "has 2 lines, but there are 10 classes"),
        ("--class_names gap.txt --zero_shot DIGITS", "gap.txt: line 2 is empty"),
        ("--class_names none.txt --zero_shot DIGITS", "none.txt cannot be read: No such file"),
        ("--prompts gap.txt --zero_shot DIGITS", "gap.txt: line 2 is empty"),
        ("--prompts few.txt --zero_shot DIGITS", "few.txt: line 1 has no {}"),
        ("--prompts few.txt", "--prompts few.txt requires --zero_shot"),
        ("--zero_shot_every 3", "--zero_shot_every 3 requires --zero_shot"),
        ("--zero_shot DIGITS --objective classify", "requires --objective siglip or"),
        ("--val_captions 2 --objective classify", "requires --objective siglip or"),
        ("--texts cat", "--texts cat requires --predict"),
    ],
)
def test_mistakes(more, text, flags, capsys, tmp_path):
    for name, content in (("few", "one\ntwo\n"), ("gap", "one {}\n\nthree {}")):
        (tmp_path / f"{name}.txt").write_text(content)
    words = [str(DIGITS) if word == "DIGITS" else word for word in more.split()]
    words = [str(tmp_path / word) if word.endswith(".txt") else word for word in words]
    pairs = [] if "classify" in words else flags[0]
    line = told_in_one_line(capsys, *tiny(tmp_path / "run"), *pairs, *words)
    assert text in line.replace(f"{tmp_path}/", "")
    assert not (tmp_path / "run").exists()


def test_texts_of_no_tokenizer(capsys, tmp_path):
    flags = [*PAIR_FLAGS, "--zero_shot", str(DIGITS)]
    line = told_in_one_line(capsys, *tiny(tmp_path / "run"), *flags)
    assert "--zero_shot requires --tokenizer" in line


@pytest.mark.parametrize(
    ("more", "text"),
    [
        (["--predict", str(DIGITS)], "requires --texts, which images are compared with"),
        (["--predict", str(DIGITS), "--texts", "a\udcff"], "a text that is not UTF-8"),
        (["--eval_only", "--labels", "NONE"], "NONE cannot be read"),
        (["--eval_only", "--labels", "TRAIN"], "lists no files with split val"),
    ],
)
def test_mistakes_with_a_trained_model(more, text, trained, files, capsys, tmp_path):
    rows = (files / "pairs.csv").read_text(encoding="utf-8").splitlines(keepends=True)
    (tmp_path / "TRAIN").write_text(
        "".join(row for row in rows if ",val," not in row), encoding="utf-8"
    )
    more = [str(tmp_path / word) if word == "TRAIN" else word for word in more]
    weights = ["--resume", str(trained.ckpt_dir / f"step_{STEPS}"), "--data_dir", str(DIGITS)]
    assert text in told_in_one_line(capsys, *weights, *more)


def test_other_models_have_no_texts(tmp_path):
    flags = ["--features", str(tmp_path / "f"), "--features_of", "text_embedding"]
    with pytest.raises(UsageError, match="--features_of text_embedding requires a model of"):
        on_gpus([*flags, "--data_dir", str(DIGITS)])
