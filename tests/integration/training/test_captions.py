"""Training on captions: the tokenizer travels with a run, which continues in the middle of an epoch
on another number of devices; pairs that are left out."""

import csv
import re

import pytest
from transformers import CLIPTokenizer

from tests.fakes.hub_server import HubServer, Repository
from tests.support.cli import (
    DIGITS,
    TINY_MODEL,
    TINY_RUN,
    Result,
    run_program,
    tiny,
    train_tiny,
    train_tiny_gpu,
)
from tests.support.pairs import SOURCE
from tests.support.tokenizer_files import save_clip_tokenizer
from tests.support.usage_error import told_in_one_line

TOWER = "--text_depth 1 --text_width 16 --text_heads 2 --text_length 16".split()
PAIRS = ["--objective", "siglip", *TOWER, "--scale", "1", "1"]
WORDS = "zero one two three four five six seven eight nine".split()


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A folder with a table of digits, their captions, and a tokenizer."""
    folder = tmp_path_factory.mktemp("captions")
    save_clip_tokenizer(folder / "tokenizer")
    rows = [("path", "split", "caption")]
    for path in sorted(DIGITS.glob("*/*/*.png")):
        split, digit, name = path.relative_to(DIGITS).parts
        word = WORDS[int(digit)]
        for caption in (f"a {word}", f"The digit {word}!", f"{word}, written by a hand"):
            rows.append((f"{split}/{digit}/{name}", split, caption))
    rows[6] = (*rows[6][:2], "")  # of three captions one is empty
    first_val = next(number for number, row in enumerate(rows) if row[1] == "val")
    for number in range(first_val, first_val + 3):
        rows[number] = (*rows[number][:2], " ")
    with open(folder / "pairs.csv", "w", newline="") as file:
        csv.writer(file).writerows(rows)
    return folder


def flags_of(made):
    return [*PAIRS, "--labels", str(made / "pairs.csv"), "--tokenizer", str(made / "tokenizer")]


@pytest.fixture(scope="module")
def run(made, tmp_path_factory):
    """A run in two processes, with a checkpoint on the way."""
    flags = [*flags_of(made), *"--ckpt_step_interval 3 --text_vocab_size 600".split()]
    return train_tiny_gpu(tmp_path_factory.mktemp("run"), *flags, processes=2)


def test_a_run_records_its_tokenizer(made, run):
    values = run.run_file["arguments"]
    assert values["tokenizer"] == str(made / "tokenizer")
    assert values["canonical_text"] is True
    assert values["tokenizer_checksum"]
    written = (made / "tokenizer" / "tokenizer.json").read_bytes()
    assert (run.ckpt_dir / "tokenizer.json").read_bytes() == written
    # Of the first 256 training images; of one caption an image has none.
    with open(made / "pairs.csv", newline="") as file:
        of_train = [caption for _, split, caption in csv.reader(file) if split == "train"]
    theirs = CLIPTokenizer.from_pretrained(made / "tokenizer")
    texts = [text.lower().replace(",", "").replace("!", "") for text in of_train[: 3 * 256] if text]
    truncated = sum(len(theirs(text).input_ids) > 16 for text in texts)
    assert 0 < truncated < len(texts) == 767
    line = f"{truncated} of the first 767 captions are truncated to --text_length 16"
    assert f"tokens ({made / 'tokenizer'}, canonical); {line}" in run.stdout
    # The pair of three blank captions.
    assert run.evaluations[-1]["val_images"] == 89
    assert "its caption is empty" in (run.ckpt_dir / "bad_images.txt").read_text()


def test_it_continues_with_the_copy_on_another_number_of_devices(made, run, tmp_path):
    flags = [
        flag for flag in flags_of(made) if flag not in ("--tokenizer", str(made / "tokenizer"))
    ]
    moved = (made / "tokenizer").rename(made / "moved")
    try:
        resumed = train_tiny_gpu(tmp_path, *flags, "--resume", str(run.ckpt_dir / "step_3"))
    finally:
        moved.rename(made / "tokenizer")
    assert resumed.column("loss") == pytest.approx(run.column("loss")[3:], rel=2e-5)
    assert (tmp_path / "tokenizer.json").exists()


@pytest.mark.long
def test_killed_in_the_middle_of_an_epoch(tmp_path, monkeypatch):
    """The recipe of make train-siglip, with a smaller model: bit for bit as if it had not been
    killed, on both backends; FSDP2 continues the checkpoint of XLA."""
    recipe = ["@recipes/digits_siglip.args", *TINY_MODEL, "--image_size", "24", *TOWER]
    recipe += "--batch_size 16 --text_length 36 --max_steps 10 --ckpt_step_interval 3".split()
    monkeypatch.setenv("SIGNAL_AT", "0 8 SIGKILL")
    wholes = {}
    for train, devices in (
        (train_tiny, ["--cpu_devices", "2"]),
        (train_tiny_gpu, ["--backend", "cuda"]),
    ):
        folder = tmp_path / train.__name__
        whole = wholes[train] = train(folder / "whole", *recipe, *devices)
        killed = ["-m", "tests.fakes.signal_at_step", *tiny(folder / "killed"), *recipe, *devices]
        assert run_program(*killed).returncode != 0
        assert max(Result(folder / "killed").steps) < 8
        resumed = train(folder / "killed", *recipe, *devices)
        # The checkpoint of step 3 is complete as soon as that of step 6 is begun.
        assert re.search(r"resuming \S+/step_([36]) at step \1, ", resumed.stdout)
        for name in ("loss", "grad_norm", "logit_scale", "logit_bias"):
            assert resumed.column(name) == whole.column(name)
        assert len(resumed.column("loss")) == 10
    checkpoint = str(wholes[train_tiny].ckpt_dir / "step_3")
    other = train_tiny_gpu(tmp_path / "other", *recipe, "--resume", checkpoint)
    assert other.column("loss") == pytest.approx(wholes[train_tiny].column("loss")[3:], rel=2e-5)


def test_another_tokenizer_is_one_line(made, run, tmp_path, capsys):
    shared = ["--backend", "cuda", "--data_dir", DIGITS, *TINY_MODEL, *TINY_RUN, *PAIRS]
    shared += ["--labels", made / "pairs.csv", "--ckpt_dir", run.ckpt_dir]
    for other in (tmp_path, "bytes"):
        save_clip_tokenizer(tmp_path, more=["cats"])
        line = told_in_one_line(capsys, *shared, "--tokenizer", other)
        assert f"--tokenizer {other} has the checksum " in line
        assert "with which the run was started: use the same tokenizer, or another" in line
    line = told_in_one_line(capsys, *shared, "--no_canonical_text")
    assert "was trained with --canonical_text, not --no-canonical_text" in line


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ([*SOURCE, *PAIRS, "--tokenizer", "bytes"], "--data_source colors has no caption of an"),
        (["--data_source", "captioned_mosaics"], "has captions, and no classes: use --objective"),
        (["--data_source", "captioned_mosaics", *PAIRS], "texts require a tokenizer: use --token"),
        (["--data_source", "digits", *PAIRS], "which --data_source digits does not have: use web"),
    ],
)
def test_data_without_texts_is_one_line(flags, message, tmp_path, capsys):
    shared = ["--backend", "cuda", "--ckpt_dir", tmp_path / "run", *TINY_MODEL, *TINY_RUN]
    assert message in told_in_one_line(capsys, *shared, *flags)
    assert not (tmp_path / "run").exists()


def test_a_tokenizer_on_the_hub(made, tmp_path):
    folder = made / "tokenizer"
    files = {path.name: path.read_bytes() for path in folder.iterdir()}
    command = [
        *("run_vit_training.py", "--backend", "cuda", "--print_config", "--fake_data"),
        *(*TINY_MODEL, *TINY_RUN, *PAIRS, "--text_vocab_size", "600", "--tokenizer"),
    ]
    with HubServer() as server:
        server.repositories["us/clip"] = Repository()
        commit = server.repositories["us/clip"].commit(files | {"model.safetensors": b"no"})
        server.repositories["us/vit"] = Repository()
        server.repositories["us/vit"].commit({"config.json": b"{}"})
        variables = server.variables(tmp_path / "cache")
        done = run_program(*command, "hf-hub:us/clip", variables=variables)
        assert done.returncode == 0, done.stderr
        assert f"hf-hub:us/clip@{commit}" in done.stdout
        refused = run_program(*command, "hf-hub:us/vit", variables=variables)
        assert refused.returncode == 2
        assert "this repository has no tokenizer.json: use one that has" in refused.stderr
    assert not list((tmp_path / "cache").rglob("*.safetensors"))
    offline = run_program(*command, f"hf-hub:us/clip@{commit}", variables=variables)
    assert offline.stdout == done.stdout
