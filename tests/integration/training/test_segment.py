"""Segmentation from patch features, alone and in training, against plain PyTorch and timm."""

import csv
import json
import shutil

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image
from sklearn.metrics import jaccard_score

import run_vit_training
from tests.support.cli import DIGITS, tiny, train_tiny, train_tiny_gpu
from tests.support.features import FLAGS, LOADER, MEAN, STD, backbone, run_form
from tests.support.masked_images import IGNORED, encoded, write_masked
from tests.support.usage_error import told_in_one_line
from training.evaluation.knn_and_probe import LEAST_STEPS, RATES

TRAIN = [(16, 16)] * 30
VAL = [(16, 16), (20, 45), (40, 16), (12, 12), (33, 60), (16, 17)]
BROKEN = 4


@pytest.fixture(scope="module")
def masked(tmp_path_factory):
    """A folder whose mask number ``BROKEN`` for training has another size; its images by split."""
    root = tmp_path_factory.mktemp("masked")
    images = write_masked(root, "ade20k", TRAIN, VAL)
    path = root / f"annotations/training/train_{BROKEN}.png"
    path.write_bytes(encoded(np.zeros((8, 8), np.uint8)))
    return root, images


def patches_of(pixels):
    """The patch tokens of an image of 16 x 16 pixels, (16, 32), by timm."""
    mean, std = (torch.tensor(values).view(3, 1, 1) for values in (MEAN, STD))
    image = (torch.from_numpy(pixels.copy()).permute(2, 0, 1) / 255 - mean) / std
    with torch.no_grad():
        return backbone().forward_features(image[None])[0, 3:]


def blocks(mask):
    """The pixels of each of 4 x 4 patches, (16, 16), -1 where they are ignored."""
    labels = torch.from_numpy(np.where(mask == IGNORED, -1, mask.astype(int)))
    return torch.stack([p.flatten() for row in labels.split(4) for p in row.split(4, dim=1)])


def plain_probes(x, y):
    """Layers trained on all pixels at once by SGD, one for each rate."""
    layers = []
    for rate in RATES:
        linear = torch.nn.Linear(x.shape[1], 4)
        torch.nn.init.zeros_(linear.weight), torch.nn.init.zeros_(linear.bias)
        optimizer = torch.optim.SGD(linear.parameters(), rate, momentum=0.9)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, LEAST_STEPS)
        for _ in range(LEAST_STEPS):
            logits = linear(x)[:, None].expand(-1, y.shape[1], -1)
            optimizer.zero_grad()
            F.cross_entropy(logits.flatten(0, 1), y.flatten(), ignore_index=-1).backward()
            optimizer.step(), schedule.step()
        layers.append(linear.requires_grad_(False))
    return layers


def starts(length):
    """Where windows of 16 pixels begin, two thirds of that apart, the last one at the end."""
    places, place = [], 0
    while place + 16 < length:
        places.append(place)
        place += 10
    return [*places, length - 16]


def plain_logits(pixels, classify, size, mode):
    """An image's logits, (classes, height, width): windows, averaged, resized to its own size."""
    by = min(pixels.shape[0], pixels.shape[1]) / 16
    height, width = (max(16, round(side / by)) for side in pixels.shape[:2])
    whole = np.asarray(Image.fromarray(pixels).resize((width, height), Image.Resampling.BICUBIC))
    canvas, count = torch.zeros(1, 4, height, width), torch.zeros(height, width)
    for top in starts(height):
        for left in starts(width):
            place = slice(top, top + 16), slice(left, left + 16)
            values = classify(patches_of(whole[place])).T.reshape(1, 4, 4, 4)
            canvas[..., *place] += F.interpolate(values, size=(16, 16), mode=mode)
            count[place] += 1
    return F.interpolate(canvas / count, size=size, mode=mode)[0]


@pytest.fixture(scope="module")
def expected(masked):
    """The figures of the whole protocol; by rate, the mean IoU."""
    _, images = masked
    pairs = [pair for number, pair in enumerate(images["train"]) if number != BROKEN]
    x = torch.cat([patches_of(pixels) for pixels, _ in pairs])
    y = torch.cat([blocks(mask) for _, mask in pairs])
    mean, deviation = x.mean(dim=0), x.std(dim=0, correction=0)
    layers = plain_probes((x - mean) / deviation, y)
    majority = torch.stack([(y == label).sum(dim=1) for label in range(4)]).argmax(dim=0)
    bank = F.normalize(x, dim=1)

    def votes(patches):
        similarities, places = (F.normalize(patches, dim=1) @ bank.T).topk(20)
        weights = (similarities / 0.07).exp()[..., None] * F.one_hot(majority[places], 4)
        return F.normalize(weights.sum(dim=1), p=1.0, dim=1)

    def figures(classify, mode):
        truth, named = [], []
        for pixels, mask in images["val"]:
            predicted = plain_logits(pixels, classify, mask.shape, mode).argmax(dim=0).numpy()
            truth.append(mask[mask != IGNORED])
            named.append(predicted[mask != IGNORED])
        truth, named = np.concatenate(truth), np.concatenate(named)
        ious = jaccard_score(truth, named, labels=np.union1d(truth, named), average=None)
        return 100 * ious.mean(), 100 * (truth == named).mean(), ious

    by_rate = [
        figures(lambda patches, layer=layer: layer((patches - mean) / deviation), "bilinear")
        for layer in layers
    ]
    best = max(range(len(RATES)), key=lambda number: by_rate[number][0])
    assert 40 < by_rate[best][0] < 98
    values = {
        "val_segment_miou": by_rate[best][0],
        "val_segment_accuracy": by_rate[best][1],
        "val_segment_knn_miou": figures(votes, "nearest")[0],
    }
    return values, by_rate[best][2]


def check(done, expected, folder):
    found = json.loads(done.stdout)
    assert found.pop("val_segment_lr") in RATES
    values, ious = expected
    assert found == pytest.approx(values, abs=0.25)  # a pixel is 0.02 points, its class a hair's
    with (folder / "segment.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [float(row["iou"]) for row in rows] == pytest.approx(100 * ious, abs=0.3)
    assert [row["class"] for row in rows] == ["class 0", "class 1", "class 2", "class 3"]
    assert Image.open(folder / "segment.png").width > 500


@pytest.mark.parametrize(
    "form",
    [
        "FSDP2, two processes",
        pytest.param("SPMD, four devices", marks=pytest.mark.long),
        pytest.param("SPMD, one device", marks=pytest.mark.long),
    ],
)
def test_alone(form, masked, expected, weights, tmp_path):
    root, _ = masked
    asked = ("--eval_only", "--segment_probe", "--json", "--eval_report", tmp_path / "report")
    done = run_form(form, *asked, "--init_from", weights, *FLAGS, "--segment_dir", root)
    assert (
        f"train_{BROKEN}.png: it is 8 x 8 pixels, but its image is 16 x 16): skipped" in done.stderr
    )
    check(done, expected, tmp_path / "report")


def test_names_of_ade20k_start_at_label_1(masked, weights, tmp_path, capsys):
    """A list without the ignored label 0: the figures are those of the classes named."""
    root = shutil.copytree(masked[0], tmp_path / "masked")
    asked = ["--backend", "cuda", "--eval_only", "--segment_probe", "--init_from", weights, *LOADER]
    asked += [*FLAGS, "--segment_dir", root, "--eval_report", tmp_path / "report"]
    for ignored, listed, expected in (
        ("0 255", "one two three", "one two three"),
        ("255", "zero one two", "zero one two class+3"),
    ):
        (root / "classes.txt").write_text("\n".join(listed.split()) + "\n")
        words = [*asked, "--segment_ignore", *ignored.split()]
        assert run_vit_training.main(list(map(str, words))) == 0
        said = capsys.readouterr().out
        warning = "warning: classes.txt has 3 names, but the labels range from 0 to 3: the first"
        assert (warning in said) == ("zero" in listed)
        with (tmp_path / "report/segment.csv").open() as file:
            rows = list(csv.DictReader(file))
        names = [name.replace("+", " ") for name in expected.split()]
        assert [row["class"] for row in rows] == names
        pixels = np.bincount(np.concatenate([mask.ravel() for _, mask in masked[1]["val"]]))
        assert [int(row["pixels"]) for row in rows] == pixels[4 - len(names) : 4].tolist()
    for path in root.glob("annotations/validation/*"):  # without labels
        path.write_bytes(encoded(np.full_like(np.asarray(Image.open(path)), IGNORED)))
    assert run_vit_training.main(list(map(str, asked))) == 2
    assert "no usable image for training, or none for validation" in capsys.readouterr().err


@pytest.mark.parametrize(
    "when", ["--eval_only --segment_probe", "--segment_probe_every 2 --max_steps 1"]
)
def test_masks_of_0_and_255_are_one_label(when, weights, tmp_path, capsys):
    write_masked(tmp_path / "masked", "pairs", TRAIN[:6], VAL)
    for number, path in enumerate(sorted((tmp_path / "masked").rglob("*.png"))):
        mask = np.zeros(np.asarray(Image.open(path)).shape, np.uint8)
        mask[:, number % 2 :: 4] = 255
        path.write_bytes(encoded(mask))
    how = ["--init_from", weights] if "--eval_only" in when else ["--ckpt_dir", tmp_path / "run"]
    where = ["--segment_dir", tmp_path / "masked", "--data_dir", DIGITS]
    line = told_in_one_line(
        capsys, *LOADER, *FLAGS, *where, *how, "--backend", "cuda", *when.split()
    )
    assert line == (
        f"{tmp_path / 'masked'}: the masks in train have a single label, 0, because 25.0 % of "
        "their pixels are ignored (--segment_ignore 255); if an ignored label is a class, set "
        "--segment_ignore 4095, which no mask has: segmentation requires at least two labels"
    )
    assert not (tmp_path / "run").exists()


@pytest.mark.long
def test_beside_knn_and_probes_of_other_images(masked, expected, weights, images):
    asked = "--eval_only --knn --probe --segment_probe --json --max_bad_images 1".split()
    where = ["--init_from", weights, "--data_dir", images, "--segment_dir", masked[0]]
    done = run_form("FSDP2, two processes", *FLAGS, *where, *asked)
    found = json.loads(done.stdout)
    assert {"val_knn_10", "val_probe", "val_probe_lr", "val_segment_lr"} < found.keys()
    of_patches = {name: found[name] for name in expected[0]}
    assert of_patches == pytest.approx(expected[0], abs=0.25)
    assert done.stderr.count("): skipped") == 2  # a digit, an image whose mask is broken


FLAGS_IN_TRAINING = "--segment_probe_every 2 --max_steps 5 --max_bad_images 1".split()


@pytest.mark.long
def test_while_it_trains_on_xla(masked, tmp_path, capsys):
    """The EMA's figures, in all records; no step is compiled again; the last is --eval_only's."""
    root = str(masked[0])
    flags = [*FLAGS_IN_TRAINING, "--segment_dir", root, "--model_ema", "--test_epoch_interval", "9"]
    result = train_tiny(tmp_path / "run", *flags, devices=4)
    compilations = result.column("compilations")
    assert compilations[1] + 1 == compilations[2] == compilations[4]
    found = [record for record in result.records if "val_segment_miou" in record]
    assert [record["step"] for record in found] == [2, 4, 5]
    events = next((result.ckpt_dir / "tensorboard").iterdir()).read_bytes()
    for name in ("segment_miou", "segment_accuracy", "segment_knn_miou"):
        assert events.count(f"val/{name}\x15".encode()) == 3
    assert (result.ckpt_dir / "segment.png").exists()
    how = ["--backend", "cuda", "--resume", str(result.ckpt_dir / "step_5"), "--use_ema"]
    how += ["--max_bad_images", "1", "--num_workers", "0", "--batch_size", "16"]
    asked = ["--eval_only", "--segment_probe", "--segment_dir", root, "--json"]
    assert run_vit_training.main([*how, *asked]) == 0
    again = json.loads(capsys.readouterr().out)
    expected = {name: found[-1][name] for name in again if name != "val_segment_lr"}
    assert {name: again[name] for name in expected} == pytest.approx(expected, abs=1.0)


def test_too_few_masks_end_no_training_and_a_resumed_run_makes_it_up(masked, tmp_path):
    flags = ["--segment_dir", masked[0], *"--segment_probe_every 1 --max_steps 1".split()]
    first = train_tiny_gpu(tmp_path / "run", *map(str, flags), "--max_bad_images", "0")
    assert "warning: no segmentation results: 1 images cannot be read, more th" in first.stdout
    without = first.records
    assert not any("val_segment_miou" in record for record in without)
    again = train_tiny_gpu(tmp_path / "run", *map(str, flags), "--max_bad_images", "1")
    assert [r["step"] for r in again.records if "val_segment_miou" in r] == [1]
    assert again.records[:-1] == without


SEGMENT_PROBE = "--eval_only --segment_probe --resume nowhere"


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (SEGMENT_PROBE, "--segment_probe requires --segment_dir or --data_source mosaics"),
        ("--segment_probe", "--segment_probe requires --eval_only"),
        ("--segment_dir .", "requires --segment_probe_every or --segment_probe"),
        ("--segment_ignore 0", "--segment_ignore 0 requires --segment_dir"),
        ("--segment_probe_every 2", "--segment_probe_every 2 requires --segment_dir or --data_s"),
        ("--segment_probe_every 2 --segment_dir nowhere", "--segment_dir nowhere is not a folder"),
        ("--segment_probe_every 2 --segment_dir . --mesh_domain 2", "is incompatible with --mesh"),
        (
            "--segment_probe_every 2 --data_source mosaics --model hybrid_vit --dimension 3 "
            "--image_size 8 16 16",
            "--segment_probe_every requires a model of images, not of volumes",
        ),
        (f"{SEGMENT_PROBE} --segment_dir . --knn --eval_report x", "--knn is incompatible with"),
    ],
)
def test_mistakes_are_one_line(flags, message, tmp_path, capsys):
    words = [*tiny(tmp_path / "run"), "--backend", "cuda", *flags.split()]
    assert run_vit_training.main(words) == 2
    said = capsys.readouterr().err
    assert message in said
    assert said.count("\n") == 1
    assert not (tmp_path / "run").exists()
