"""Runs on a real S3 server, by s3fs: its rights, its errors, a network that fails.

In one process of the GPU backend (FSDP2) where it does not matter which: it starts at once.
"""

import json
import time

import pytest

from tests.fakes.s3_server import BUCKET, S3Server
from tests.support.checkpoints import assert_same_bits
from tests.support.cli import DIGITS, Result, run_program, tiny, train_tiny
from tests.support.short_runs import mistake, program, start
from tests.support.usage_error import told_in_one_line

URL = f"s3://{BUCKET}/run"
EVERY_TWO = ["--ckpt_step_interval", "2"]


@pytest.fixture(scope="module")
def server():
    made = S3Server()
    yield made
    made.stop()


@pytest.fixture
def s3(server, tmp_path, monkeypatch):
    """The server with an empty bucket, which programs find by their environment."""
    for name, value in server.variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    yield server
    server.reset()


def download(s3, prefix, folder):
    """What is below a prefix, by boto3, which knows nothing of this program."""
    folder.mkdir()
    for name in s3.names(prefix):
        target = folder / name
        target.parent.mkdir(parents=True, exist_ok=True)
        s3.client.download_file(BUCKET, prefix + name, str(target))
    return folder


def on_xla(*flags):
    """The program on two devices of XLA (SPMD); it may fail."""
    xla = ["--cpu_devices", "2"]
    return run_program("run_vit_training.py", *tiny(URL), *xla, *map(str, flags))


# -- write, resume, prune -------------------------------------------------------------


@pytest.mark.long
def test_a_run_on_xla_is_that_of_a_folder(s3, tmp_path):
    flags = [*EVERY_TWO, "--keep_checkpoints", "1"]
    here = train_tiny(tmp_path / "here", *EVERY_TWO, devices=2)
    first = on_xla(*flags, "--max_steps", 4)
    assert first.returncode == 0, first.stderr
    assert s3.folders("run/") == ["step_4", "tensorboard"]
    assert s3.names("run/step_4/") == [".metadata", "__0_0.distcp", "manifest.json"]
    made = [each for each in s3.requests if "step_" in each and each[:4] in ("PUT ", "GET ")]
    of = [f"/{BUCKET}/run/step_{step}/" for step in (2, 4)]
    names = ["__0_0.distcp", ".metadata", "manifest.json"]
    assert [each for each in made if each.startswith("PUT")] == [
        f"PUT {folder}{name}" for folder in of for name in names
    ]
    assert not [each for each in made if each.startswith("GET") and "distcp" in each]
    step_4 = download(s3, "run/step_4/", tmp_path / "step_4")
    assert_same_bits(step_4, here.ckpt_dir / "step_4")

    second = on_xla(*flags, "--max_steps", 6)
    assert second.returncode == 0, second.stderr
    assert f"resuming {URL}/step_4 at step 4" in second.stdout
    there = Result(download(s3, "run/", tmp_path / "there"))
    assert there.column("loss") == here.column("loss")


@pytest.mark.long
def test_killed_in_the_middle_of_an_upload(s3):
    s3.stuck = [r"PUT /shelf/run/step_4/__0_0\.distcp"]
    killed = start(URL, *EVERY_TWO, "--max_steps", "20")
    try:
        s3.wait_until_stuck()
    finally:
        killed.kill()
        killed.communicate()
    s3.stuck = []
    assert "manifest.json" in s3.names("run/step_2/")
    assert s3.names("run/step_4/") == []
    done = program(URL, *EVERY_TWO, "--max_steps", 6)
    assert done.returncode == 0, done.stderr
    assert f"resuming {URL}/step_2 at step 2" in done.stdout
    assert s3.folders("run/") == ["step_2", "step_4", "step_6", "tensorboard"]


@pytest.mark.long
def test_a_server_that_goes_away_and_comes_back(s3):
    run = start(URL, *EVERY_TWO, "--max_steps", "11", "--max_failed_saves", "3")
    try:
        # Its own checkpoint is asked for: a late request of the test before may be in the list.
        while "manifest.json" not in s3.names("run/step_2/"):
            assert run.poll() is None
            time.sleep(0.05)
        s3.stop()
        time.sleep(12)
        s3.start()
        said, wrong = run.communicate(timeout=200)
    finally:
        run.kill()
    assert run.returncode == 0, wrong
    assert f"checkpoint {URL}/step_11" in said
    assert "Traceback" not in wrong
    assert "manifest.json" in s3.names("run/step_11/")
    records = s3.client.get_object(Bucket=BUCKET, Key="run/metrics.jsonl")["Body"].read()
    assert [json.loads(line)["step"] for line in records.splitlines()][-1] == 11


def warnings_of(done):
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    return [line for line in done.stdout.splitlines() if line.startswith("warning: an old")]


# -- rights ---------------------------------------------------------------------------


@pytest.mark.long
def test_without_the_right_to_remove(s3):

    def run(*flags):
        flags = [*EVERY_TWO, "--keep_checkpoints", "1", "--max_steps", *flags]
        return warnings_of(program(URL, *flags, processes=2))

    s3.forbidden = ["DELETE .*"]
    assert len(run(6)) == 2
    s3.forbidden = []
    s3.client.delete_object(Bucket=BUCKET, Key="run/step_6/manifest.json")
    s3.forbidden = ["DELETE .*"]
    assert len(run(6)) == 1  # what is left of step 6 cannot be removed
    assert "manifest.json" in s3.names("run/step_6/")
    assert len(run(6)) == 1  # nothing is left to train
    s3.forbidden = []
    assert run(6) == []
    assert s3.folders("run/") == ["step_6", "tensorboard"]


def test_what_can_be_neither_completed_nor_removed(s3):
    s3.forbidden = ["(PUT|HEAD|DELETE) .*step_2/manifest.json"]
    done = program(URL, *EVERY_TWO, "--max_steps", 4, "--max_failed_saves", 3)
    assert done.returncode == 0, done.stderr
    assert f"checkpoint step_2 could not be written to {URL} (Access Denied" in done.stdout
    assert "manifest.json" in s3.names("run/step_4/")


@pytest.mark.long
def test_without_the_right_to_read(s3, tmp_path, capsys):
    assert program(URL, *EVERY_TWO, "--max_steps", 4).returncode == 0
    before = s3.names()
    here, image = tmp_path / "here", next((DIGITS / "val").rglob("*.png"))
    s3.forbidden = ["(GET|HEAD) /shelf/run/.*"]
    for flags in (
        ["--resume", URL],
        ["--init_from", URL],
        ["--resume", URL, "--eval_only"],
        ["--resume", URL, "--predict", image],
        ["--teacher", "vit_10b", "--teacher_weights", URL],
    ):
        told = told_in_one_line(capsys, *tiny(here), "--cpu_devices", "2", *flags)
        assert "cannot read the checkpoint s3://shelf/run: Forbidden" in told
    told = mistake(program(URL, "--max_steps", 6))
    assert told == f"cannot read --ckpt_dir {URL}: Forbidden"
    s3.forbidden = ["GET /shelf/run/.*"]
    told = mistake(program(URL, "--max_steps", 6))
    assert told.startswith(f"cannot read --ckpt_dir {URL}: Access Denied: {URL}/step_4/manifest")
    s3.forbidden = ["GET .*__0_0.distcp"]
    told = mistake(on_xla("--max_steps", 6))
    assert told.startswith(f"cannot read the checkpoint {URL}/step_4: Access Denied: {URL}/step_4")
    s3.forbidden = ["(GET|HEAD) .*"]
    assert "Forbidden" in mistake(program(URL, "--max_steps", 6))
    s3.forbidden = []
    assert [name for name in s3.names() if "write_test" not in name] == before
    assert not here.exists()


# -- images ---------------------------------------------------------------------------


@pytest.fixture(scope="module")
def images(server):
    """A few of the digits, in a bucket of their own."""
    server.client.create_bucket(Bucket="images")
    for split, count in (("train", 8), ("val", 2)):
        for folder in sorted((DIGITS / split).iterdir()):
            for path in sorted(folder.iterdir())[:count]:
                key = f"digits/{split}/{folder.name}/{path.name}"
                server.client.put_object(Bucket="images", Key=key, Body=path.read_bytes())
    return "s3://images/digits"


def test_images_of_a_bucket(s3, images, tmp_path):
    done = program(
        tmp_path / "run",
        *["--data_dir", images, "--batch_size", 16, "--num_workers", 2, "--max_steps", 3],
    )
    assert done.returncode == 0, done.stderr
    assert "80 training, 20 validation images" in done.stdout


@pytest.mark.parametrize(
    ("data_dir", "told"),
    [
        ("s3://nowhere/digits", "s3://nowhere/digits/train: there is no bucket nowhere"),
        ("s3://images/nothing", "s3://images/nothing/train does not exist: --data_dir requires"),
    ],
)
def test_images_that_are_not_there(data_dir, told, s3, images, tmp_path, capsys):
    flags = [*tiny(tmp_path / "run"), "--backend", "cuda", "--data_dir", data_dir]
    assert told in told_in_one_line(capsys, *flags)
    line = told_in_one_line(capsys, *flags, "--data_source", "webdataset")
    assert "there is no bucket nowhere" in line or f"{data_dir} has no shards" in line


@pytest.mark.parametrize(
    ("rule", "told"),
    [
        ("(GET|HEAD) /images.*", "digits/train cannot be listed: Access Denied"),
        ("(GET|HEAD) /images/digits/.*", "is not a readable image (Access Denied), nor are 10 "),
    ],
)
def test_images_without_the_right_to_read(rule, told, s3, images, tmp_path):
    s3.forbidden = [rule]
    flags = ["--data_dir", images, "--batch_size", "16", "--num_workers", "0", "--max_steps", "3"]
    assert told in mistake(program(tmp_path / "run", *flags))
