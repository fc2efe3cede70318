"""Training on images of more than 8 bits, on DICOM and on TIFF files of several bands: equal to
training on PNGs of 8 bits that a formula has made of them."""

import json

import numpy as np
import pytest
from PIL import Image
from sklearn.datasets import load_digits

from data.config import DataConfig
from tests.support.cli import run_program, tiny, train_tiny, train_tiny_gpu
from tests.support.deep_files import dicom, png_of_16_bits, tiff
from tests.support.usage_error import told_in_one_line
from training.checkpoints.format import read_saved_run
from training.config import RunConfig
from training.resolve import take_over
from training.weights.describe import settings_of

CLASSES, IMAGES = 4, {"train": 12, "val": 3}
LOW, HIGH = 20, 1017
"""997 apart, an odd number, so that no value is half way between two bytes."""


def digits():
    """Path without an extension, and the values of 12 bits, of each image."""
    found = load_digits()
    for label in range(CLASSES):
        images = found.images[found.target == label]
        for split, count in IMAGES.items():
            first = 0 if split == "train" else IMAGES["train"]
            for number in range(count):
                values = np.kron(images[first + number], np.ones((3, 3)))
                yield f"{split}/{label}/{number:02}", (values * 55 + number).astype(np.uint16)


def write(root, suffix, encoded):
    for number, (name, values) in enumerate(digits()):
        path = root / f"{name}{suffix(number)}"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(encoded(number, values))
    return root


KINDS = ((".png", png_of_16_bits), (".dcm", lambda values: dicom(values, 12)), (".tif", tiff))


@pytest.fixture(scope="module")
def deep(tmp_path_factory):
    """The same values in files of three kinds."""
    return write(
        tmp_path_factory.mktemp("deep"),
        lambda number: KINDS[number % 3][0],
        lambda number, values: KINDS[number % 3][1](values),
    )


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """Those images as 8 bits, by the formula."""
    root = write(tmp_path_factory.mktemp("plain"), lambda _: ".png", lambda _, values: b"")
    for name, values in digits():
        share = ((values.astype(np.float64) - LOW) / (HIGH - LOW)).clip(0, 1)
        Image.fromarray(np.rint(255 * share).astype(np.uint8)).save(root / f"{name}.png")
    return root


@pytest.fixture(scope="module")
def of_plain(plain, tmp_path_factory):
    return train_tiny(tmp_path_factory.mktemp("run"), "--data_dir", str(plain), devices=2)


@pytest.fixture(scope="module")
def ranged(deep, tmp_path_factory):
    words = ["--data_dir", str(deep), "--intensity", str(LOW), str(HIGH)]
    return train_tiny(tmp_path_factory.mktemp("run"), *words, devices=2)


def test_losses_are_those_of_8_bits(of_plain, ranged):
    assert ranged.column("loss") == of_plain.column("loss")
    assert ranged.evaluations[-1]["val_loss"] == of_plain.evaluations[-1]["val_loss"]
    assert ranged.run_file["arguments"]["intensity"] == [str(LOW), str(HIGH)]


def test_what_a_run_has_is_used_in_evaluation_and_prediction(deep, plain, of_plain, ranged):
    def values(run, root, *flags):
        flags = ("--resume", str(run.ckpt_dir), "--data_dir", str(root), "--json", *flags)
        done = run_program("run_vit_training.py", *flags)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    evaluated = "--eval_only --cpu_devices 1 --batch_size 6 --num_workers 0".split()
    ours, theirs = values(ranged, deep, *evaluated), values(of_plain, plain, *evaluated)
    assert len(ours.pop("errors")) == len(theirs.pop("errors"))  # they have the files' names
    assert ours == theirs
    top = [
        [each["top5"] for each in values(run, root, "--predict", str(root / "val"))]
        for run, root in ((ranged, deep), (of_plain, plain))
    ]
    assert len(top[0]) == CLASSES * IMAGES["val"]
    assert top[0] == top[1]


def test_auto_is_decided_once_and_stored(deep, tmp_path):
    """By FSDP2 in two processes; the sample is all images."""
    found = train_tiny_gpu(tmp_path, "--data_dir", str(deep), processes=2)
    values = np.stack([values for name, values in digits() if name.startswith("train")])
    low, high = np.percentile(values, (0.5, 99.5))
    words = ["auto", str(int(np.floor(low))), str(int(np.ceil(high)))]
    assert found.run_file["arguments"]["intensity"] == words
    assert f"--intensity auto: {low:,.0f} to {np.ceil(high):,.0f} become 0 to 255" in found.stdout
    explicit = train_tiny_gpu(
        tmp_path / "explicit", "--data_dir", str(deep), "--intensity", *words[1:]
    )
    assert found.column("loss") == pytest.approx(explicit.column("loss"), rel=1e-5)
    assert explicit.run_file["arguments"]["intensity"] == words[1:]

    # A run that goes on has the range that it has chosen, even if auto is typed again.
    saved = read_saved_run(tmp_path / "step_6")
    for explicitly_set in (frozenset(), frozenset({"intensity"})):
        data = DataConfig(intensity="auto" if explicitly_set else None)
        config = RunConfig(data=data, explicitly_set=explicitly_set)
        taken = take_over(config, settings_of(saved, config.data), tmp_path)
        assert list(taken.data.intensity) == words
    older = {name: value for name, value in saved.arguments.items() if name != "intensity"}
    object.__setattr__(saved, "arguments", older)
    assert settings_of(saved, DataConfig())["intensity"] == "full"


def test_bands(tmp_path):
    """On both backends, from TIFF files of five bands in a page each."""

    def bands(_, values):
        return tiff(np.stack([values >> n for n in range(5)]), imagej=True)

    root = write(tmp_path / "images", lambda _: ".tif", bands)
    flags = ["--data_dir", str(root), "--in_chans", "5"]
    on_xla = train_tiny(tmp_path / "xla", *flags)
    on_fsdp2 = train_tiny_gpu(tmp_path / "fsdp2", *flags, processes=2)
    assert on_fsdp2.column("loss") == pytest.approx(on_xla.column("loss"), rel=1e-4)
    assert len(on_xla.run_file["arguments"]["intensity"]) == 1 + 2 * 5
    assert on_xla.run_file["arguments"]["intensity"] == on_fsdp2.run_file["arguments"]["intensity"]


# -- bad input -------------------------------------------------------------------------


def refused(capsys, root, *flags):
    run = root.parent / "run"
    line = told_in_one_line(capsys, *tiny(run), "--data_dir", root, "--cpu_devices", "1", *flags)
    assert not run.exists()
    return line


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        ("--intensity 9 5", "--intensity 9 5: the first number, 9, must be below the second, 5"),
        ("--intensity 0.5", "--intensity 0.5: it takes auto, full, LOW HIGH"),
        ("--intensity 1% 101%", "argument --intensity: 101 must be at least 0 and at most 100"),
        ("--intensity nan 5", "argument --intensity: 'nan' is not a finite number"),
        ("--intensity dark", "argument --intensity: 'dark' is not a number (or auto, full"),
        ("--intensity 0 5 1 6", "--intensity: it has 2 ranges, but --in_chans is 3"),
        (
            "--intensity 0 5 --data_source digits",
            "--intensity 0 5 has no effect with --data_source",
        ),
        (
            "--in_chans 5 --aa 3a",
            "--in_chans 5 is incompatible with --aa 3a (it is defined for gray",
        ),
        ("--in_chans 5 --objective dino", "--in_chans 5 is incompatible with --objective dino"),
        ("--in_chans 5 --data_source digits", "--in_chans 5: images have 3 channels (RGB) or 1"),
    ],
)
def test_flags_that_do_not_fit(flags, told, deep, capsys):
    assert told in refused(capsys, deep, *flags.split())


@pytest.mark.parametrize(
    ("encoded", "told"),
    [
        (tiff(np.full((8, 8), 300, np.uint16)), "have the single value 300: export them again"),
        (dicom(np.zeros((8, 8), np.uint16)), "have the single value 0: export them again"),
    ],
)
def test_images_of_one_value(encoded, told, tmp_path, capsys):
    root = write(tmp_path / "images", lambda _: ".png", lambda number, values: encoded)
    assert told in refused(capsys, root)
