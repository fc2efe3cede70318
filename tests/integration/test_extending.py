"""``--extension``: the examples of the docs, typed, on both backends."""

import json
import re
import sys

import numpy as np
import pytest
import torch
from PIL import Image

from tests.support.cli import HAS_XLA, ROOT, run_program, tiny, train_tiny, train_tiny_gpu
from tests.support.usage_error import told_in_one_line
from training.extensions import use_extensions


def examples(page):
    text = (ROOT / "docs" / page).read_text(encoding="utf-8")
    return re.findall(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL)


(EXAMPLE,) = examples("extending.md")
PAIRS, NORMED, NESTEROV = examples("extending_data_and_models.md")
ADAMW = """
from training.optimizer_rules import Elementwise
from training.feature import Feature


class Copied(Elementwise):
    moments = ("mean", "square")
    counts_steps = True

    def update(self, parameter, gradient, state, *, lr, weight_decay, betas, eps):
        (first, second), step = betas, state["step"]
        mean = state["mean"].mul_(first).add_(gradient * (1 - first))
        square = state["square"].mul_(second).add_(gradient * gradient * (1 - second))
        scale = (square / (1 - second**step)).sqrt() + eps
        parameter.mul_(1 - lr * weight_decay)
        parameter.sub_(mean / (1 - first**step) / scale * lr)


class Added(Feature):
    choices = {"optimizer": {"copied": "AdamW"}}
    optimizers = {"copied": f"{__name__}:Copied"}
"""
"""AdamW once more."""
DEPTH = """
import torch.nn.functional as F
from models.with_head import with_head
from training.data import input_of
from training.objectives.base import MeanLoss, Objective


class Depth(Feature):
    turned_on_by = ("--objective depth",)
    choices = {"objective": {"depth": "the mean depth of the rows of patches"}}
    objective = f"{__name__}:DepthObjective"

    def extend_model(self, spec, config):
        return with_head(with_head(spec, "head_row", 4), "head_mean", 1)

    def view(self, run, *, augment):
        return PairView()


class DepthObjective(Objective):
    def __init__(self, run, backend, say):
        self._input, self._backend = input_of(run, backend.constant), backend

    def losses(self, model, batch):
        _, rows, mean = model(self._input(batch))
        depth = batch["depth"].mean(-1).unflatten(1, (4, 4)).mean(-1)
        by_row = (rows.float() - depth).square().mean(1)
        return {"loss": by_row + (mean.float()[:, 0] - depth.mean(1)).square(), "by_row": by_row}

    def loss(self, model, batch, micro_batch_index):
        return self.losses(model, batch)["loss"].mean()

    def measure(self, images=0):
        return MeanLoss(self.losses, self._backend)
"""
"""An objective with two heads on the documented source."""


@pytest.fixture(autouse=True)
def forgotten():
    """Other tests have the program's own features alone."""
    yield
    use_extensions([])


@pytest.fixture
def rotation(tmp_path):
    """The example in a file; its module is forgotten afterwards."""
    (tmp_path / "rotation.py").write_text(EXAMPLE)
    yield ["--extension", str(tmp_path / "rotation.py")]
    sys.modules.pop("rotation", None)


def extension(folder, name, content):
    """Write an extension; return the words that load it."""
    folder.mkdir(exist_ok=True)
    (folder / f"{name}.py").write_text(content)
    return ["--extension", str(folder / f"{name}.py")]


@pytest.fixture
def pairs(tmp_path):
    """Images of noise with depth maps, and the words that train on them."""
    noise = np.random.default_rng(0)
    for split, count in (("train", 32), ("val", 7)):
        (tmp_path / "data" / split).mkdir(parents=True)
        for number in range(count):
            path = tmp_path / "data" / split / f"{number}"
            pixels = noise.integers(256, size=(16, 16, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(f"{path}.png")
            np.save(f"{path}.npy", pixels.mean(2, dtype=np.float32) / 255)
    words = extension(tmp_path, "pairs_of_a_test", PAIRS + DEPTH)
    source = ["--data_source", "pairs", "--data_dir", str(tmp_path / "data")]
    yield [*words, *source, "--objective", "depth"]
    sys.modules.pop("pairs_of_a_test", None)


def objective(rotation):
    return [*rotation, "--objective", "rotation"]


def test_the_example_is_short():
    assert len(EXAMPLE.splitlines()) <= 80


def check_losses(losses, flags, folder):
    """They are the same if stopped after three steps and continued by two processes, and on XLA."""
    train_tiny_gpu(folder / "parts", *flags, "--max_steps", "3")
    parts = train_tiny_gpu(folder / "parts", *flags, processes=2)
    assert parts.column("loss") == pytest.approx(losses, rel=1e-5)
    if HAS_XLA:
        on_xla = train_tiny(folder / "xla", *flags, devices=2)
        assert on_xla.column("loss") == pytest.approx(losses, rel=1e-5)


def test_losses_are_equal_on_both_backends_and_after_a_resume(rotation, tmp_path):
    """Stopped after three steps, and continued on another number of processes."""
    flags = [*objective(rotation), "--num_workers", "1"]
    whole = train_tiny_gpu(tmp_path / "whole", *flags)
    losses = whole.column("loss")
    assert len(set(losses)) > 3
    recorded = json.loads((tmp_path / "whole" / "run.json").read_text())
    (name,) = recorded["arguments"]["extension"]
    assert re.search(r"rotation\.py@sha256:[0-9a-f]{16}$", name)
    assert f"extension: {name}\n" in whole.stdout
    check_losses(losses, flags, tmp_path)


def test_features_of_a_model_with_another_head(rotation, tmp_path):
    flags = [*objective(rotation), "--rank_every", "1", "--max_steps", "1"]
    assert "effective rank of features: " in train_tiny_gpu(tmp_path, *flags).stdout


def test_fake_data(rotation, tmp_path):
    train_tiny_gpu(tmp_path, *objective(rotation), "--fake_data", "--max_steps", "1")


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (["--objective", "rotation", "--vflip", "0.5"], "--vflip 0.5 (two flips are a rotation)"),
        (["--objective", "mae", "--turns", "3"], "--turns 3 requires --objective rotation"),
        (["--objective", "rotation", "--turns", "5"], "5 must be at least 2 and at most 4"),
    ],
)
def test_its_flags_are_checked(flags, told, rotation, tmp_path, capsys):
    given = [*tiny(tmp_path), *rotation, *flags, "--ckpt_dir", str(tmp_path / "run")]
    assert told in told_in_one_line(capsys, *given)


@pytest.mark.parametrize(
    ("name", "content", "told"),
    [
        ("absent.py", None, "no such file"),
        ("a-b.py", "", "must be an identifier"),
        ("json.py", "", "a module json exists already: rename the file"),
        ("empty.py", "", "defines no subclass of training.feature.Feature"),
        ("no.such.module", None, "no such module"),
    ],
)
def test_what_is_no_extension(name, content, told, tmp_path, capsys):
    path = tmp_path / name if name.endswith(".py") else name
    if content is not None:
        path.write_text(content)
    assert told in told_in_one_line(capsys, "--fake_data", "--extension", str(path))


def test_another_content_than_the_checksums(rotation, capsys):
    name, path = rotation
    line = told_in_one_line(capsys, "--fake_data", name, f"{path}@sha256:0123456789abcdef")
    assert "its checksum is sha256:" in line


def test_a_checkpoint_loads_no_extension(rotation, tmp_path, capsys):
    train_tiny_gpu(tmp_path / "run", *objective(rotation), "--max_steps", "2")
    (tmp_path / "rotation.py").write_text("raise SystemExit('loaded')")
    resumed = ["--resume", str(tmp_path / "run" / "step_2"), "--ckpt_dir", str(tmp_path / "new")]
    assert "pass the --extension that adds it" in told_in_one_line(
        capsys, "--backend", "cuda", *resumed, "--data_dir", str(tmp_path)
    )


def test_a_source_of_two_tensors_with_two_heads(pairs, tmp_path):
    """Losses, also of the evaluation, whose last batch has padding, in one process and two."""
    one = train_tiny_gpu(tmp_path / "one", *pairs)
    two = train_tiny_gpu(tmp_path / "two", *pairs, "--num_workers", "1", processes=2)
    assert two.column("loss") == pytest.approx(one.column("loss"), rel=1e-5)
    (ours, *_), (theirs, *_) = one.evaluations, two.evaluations
    assert ours["val_images"] == theirs["val_images"] == 7
    for name in ("val_loss", "val_by_row"):
        assert 0 < ours[name] == pytest.approx(theirs[name], rel=1e-5)
    assert ours["val_by_row"] < ours["val_loss"]
    if HAS_XLA:
        on_xla = train_tiny(tmp_path / "xla", *pairs, devices=2)
        assert on_xla.column("loss") == pytest.approx(one.column("loss"), rel=1e-5)


FLAGGED = """
from dataclasses import dataclass
from typing import ClassVar

from config_fields import flag, positive
from data.files import DataFolderError
from training.feature import Feature


@dataclass(frozen=True)
class NoiseConfig:
    group: ClassVar[str] = "data"
    noise_level: int = flag(3, "amount of noise", kind=positive, requires=("data_source=noise",))


def open_noise(request):
    raise DataFolderError(f"level {request.flags.noise_level}")


class Noise(Feature):
    flags = NoiseConfig
    choices = {"data_source": {"noise": "noise"}}
    sources = {"noise": open_noise}
"""
"""A source that has a flag."""


@pytest.mark.parametrize(("given", "level"), [([], 3), (["--noise_level", "5"], 5)])
def test_a_source_is_given_its_flags(given, level, tmp_path, capsys):
    words = [*extension(tmp_path, "noise_of_a_test", FLAGGED), "--data_source", "noise", *given]
    line = told_in_one_line(capsys, "--backend", "cuda", *tiny(tmp_path / "run"), *words)
    assert line.rstrip().endswith(f"level {level}")
    sys.modules.pop("noise_of_a_test", None)


def test_the_plan_counts_images_of_an_added_source(pairs, tmp_path):
    if not HAS_XLA:
        pytest.skip("no libtpu")
    words = [*tiny(tmp_path), *pairs, "--plan", "--batch_size", "33"]
    done = run_program("run_vit_training.py", *words)
    assert done.returncode == 2
    assert "pairs has 32 training images, fewer than one batch" in done.stderr


@pytest.mark.parametrize(
    ("given", "instead", "told"),
    [
        ('"depth": torch.from_numpy(depth)}', "}", "does not read the field depth, which PairView"),
        (
            "from_numpy(depth)}",
            "from_numpy(depth)[None]}",
            "is float32 (1, 16, 16) and not float32",
        ),
        (
            "from_numpy(depth)}",
            "from_numpy(depth).double()}",
            "is float64 (16, 16) and not float32",
        ),
        ("torch.from_numpy(depth)}", "depth}", "0.png: its field depth is a ndarray and not a"),
    ],
)
def test_samples_that_are_not_as_declared(given, instead, told, pairs, tmp_path):
    assert given in PAIRS
    (tmp_path / "pairs_of_a_test.py").write_text(PAIRS.replace(given, instead) + DEPTH)
    words = ["--backend", "cuda", *tiny(tmp_path / "run"), *pairs]
    done = run_program("run_vit_training.py", *words)
    assert done.returncode == 2
    assert told in done.stderr.splitlines()[-1]
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("given", "instead", "told"),
    [
        ("import glob", "import absent", ["No module named 'absent'"]),
        ("def load_sample(", "def load_samples(", ["Pairs must define load_sample()"]),
        ("def loss(", "def los(", ["abstract class DepthObjective", "abstract method loss"]),
        (
            "        image = torch.from_numpy",
            "        assert not number, 'unlucky'\n        image = torch.from_numpy",
            ["unlucky", "This is an error in reading ", "/data/train/"],
        ),
    ],
)
def test_errors_of_an_extension_say_so(given, instead, told, pairs, tmp_path):
    """One in a loader process, too."""
    path, content = tmp_path / "pairs_of_a_test.py", PAIRS + DEPTH
    assert given in content
    path.write_text(content.replace(given, instead))
    words = ["--backend", "cuda", *tiny(tmp_path / "run"), *pairs, "--num_workers", "1"]
    done = run_program("run_vit_training.py", *words)
    assert done.returncode == 1
    assert f"This is an error in {path} (--extension {path})." in done.stderr
    for words in told:
        assert words in done.stderr


@pytest.mark.parametrize(
    ("given", "instead", "told"),
    [
        ("def extend_model(", "def extend_modell(", "did you mean extend_model?"),
        ('("--objective rotation",)', '("--objective rotatoin",)', "Rotation.turned_on_by has"),
        ('{"--vflip"', '{"--vflop"', "Rotation.excludes has --vflop, but there is no such flag"),
        ('{"objective"', '{"objectiv"', "Rotation.choices has objectiv, but no flag"),
        ('("objective=', '("objectiv=', "--turns requires objectiv, but no flag"),
        ("    turns: int = flag", "    lr: int = flag", "the flag --lr is declared twice"),
        ('{"rotation": "pred', '{"mae": "pred', "--objective has two choices mae"),
        (
            "    objective = f",
            "    sources = {'x': 1}\n    objective = f",
            "add it to Rotation.choices",
        ),
    ],
)
def test_misspelled_names(given, instead, told, tmp_path, capsys):
    assert given in EXAMPLE
    words = extension(tmp_path, "misspelled", EXAMPLE.replace(given, instead))
    assert told in told_in_one_line(capsys, "--fake_data", *words)
    sys.modules.pop("misspelled", None)


def test_a_model_family(tmp_path, capsys):
    """Its losses are those of timm's model if the added norms change nothing."""
    words = extension(tmp_path, "normed", NORMED)
    model = [*words, "--model", "normed/tiny"]
    one = train_tiny_gpu(tmp_path / "one", *model)
    two = train_tiny_gpu(tmp_path / "two", *model, processes=2)
    assert two.column("loss") == pytest.approx(one.column("loss"), rel=1e-5)
    timms = train_tiny_gpu(tmp_path / "timms", "--model", "timm/vit_tiny_patch16_224")
    assert one.column("loss") != pytest.approx(timms.column("loss"), rel=1e-3)
    identity = NORMED.replace('nn.LayerNorm(dim, device=named.get("device"))', "nn.Identity()")
    words = extension(tmp_path, "normed", identity)
    same = train_tiny_gpu(tmp_path / "same", *words, "--model", "normed/tiny")
    assert same.column("loss") == pytest.approx(timms.column("loss"), rel=1e-5)
    assert "unknown model normed/tiny" in told_in_one_line(
        capsys, "--backend", "cuda", *tiny(tmp_path / "new"), "--model", "normed/tiny"
    )


def test_an_optimizer(tmp_path):
    """AdamW by the interface of extensions is the program's AdamW, also resumed on another number
    of devices, with groups of parameters."""
    flags = ["--layer_decay", "0.7", "--no_decay", "norms", "--num_workers", "1"]
    words = [*extension(tmp_path, "copied", ADAMW), "--optimizer", "copied", *flags]
    theirs = train_tiny_gpu(tmp_path / "theirs", *flags).column("loss")
    assert len(set(theirs)) > 3
    check_losses(theirs, words, tmp_path)


def test_the_documented_optimizer(tmp_path):
    """Its updates are those of PyTorch's SGD."""
    namespace = {}
    exec(NESTEROV, namespace)
    rule = namespace["Sgd"]()
    settings = {"lr": 0.1, "weight_decay": 0.0, "betas": (0.9, 0.999), "eps": 0.0}
    ours, theirs = torch.ones(3), torch.ones(3, requires_grad=True)
    state = {name: torch.zeros(3) for name in rule.moments}
    sgd = torch.optim.SGD([theirs], lr=0.1, momentum=0.9, nesterov=True)
    for step in range(4):
        theirs.grad = theirs.detach() * torch.tensor([1.0, -2.0, step])
        rule.update(ours, theirs.grad, state, **settings)
        sgd.step()
    torch.testing.assert_close(ours, theirs.detach())
