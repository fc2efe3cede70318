"""Runs on real servers of S3, by s3fs, and of Google's storage, by gcsfs: their rights, their
errors, a network that fails.

In one process of the GPU backend (FSDP2) where it does not matter which: it starts at once.
"""

import json
import time

import fsspec.config
import pytest

from tests.fakes.gcs_server import GCSServer
from tests.fakes.s3_server import S3Server
from tests.support.checkpoints import assert_same_bits
from tests.support.cli import DIGITS, Result, run_program, tiny, train_tiny
from tests.support.marks import long
from tests.support.short_runs import mistake, program, start
from tests.support.usage_error import told_in_one_line

EVERY_TWO = ["--ckpt_step_interval", "2"]
S3, GS = S3Server, GCSServer
DENIED = {"s3": "Access Denied", "gs": "Forbidden: Anonymous caller does not have the right to "}
"""How an answer of 403 is told; s3fs has another word where there is no text with it."""

on_both = pytest.mark.parametrize("server", [S3, GS], indirect=True)
on_gs = pytest.mark.parametrize("server", [GS], indirect=True)
more_often_on_s3 = pytest.mark.parametrize("server", [S3, long(GS)], indirect=True)


@pytest.fixture(scope="module")
def server(request):
    made = request.param()
    yield made
    made.close()


@pytest.fixture
def cloud(server, tmp_path, monkeypatch):
    """The server with an empty bucket, which programs find by their environment."""
    for name, value in server.variables.items():
        monkeypatch.setenv(name, value)
    # What fsspec reads from the environment when it is imported, as it was in this process.
    monkeypatch.setitem(fsspec.config.conf, "gs", {"token": "anon"})
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    yield server
    server.reset()


def download(cloud, prefix, folder):
    """What is below a prefix, without the client of this program."""
    folder.mkdir()
    for name in cloud.names(prefix):
        target = folder / name
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(cloud.read(prefix + name))
    return folder


def on_xla(url, *flags):
    """The program on two devices of XLA (SPMD); it may fail."""
    xla = ["--cpu_devices", "2"]
    return run_program("run_vit_training.py", *tiny(url), *xla, *map(str, flags))


# -- write, resume, prune -------------------------------------------------------------


@pytest.mark.long
@on_both
def test_a_run_on_xla_is_that_of_a_folder(cloud, tmp_path):
    url, flags = cloud.url("run"), [*EVERY_TWO, "--keep_checkpoints", "1"]
    here = train_tiny(tmp_path / "here", *EVERY_TWO, devices=2)
    first = on_xla(url, *flags, "--max_steps", 4)
    assert first.returncode == 0, first.stderr
    assert cloud.folders("run/") == ["step_4", "tensorboard"]
    assert cloud.names("run/step_4/") == [".metadata", "__0_0.distcp", "manifest.json"]
    made = [each for each in cloud.requests if "/step_" in each]
    of = [f"shelf/run/step_{step}/" for step in (2, 4)]
    names = ["__0_0.distcp", ".metadata", "manifest.json"]
    assert [each for each in made if each.startswith("PUT")] == [
        f"PUT {folder}{name}" for folder in of for name in names
    ]
    assert not [each for each in made if each.startswith("GET") and "distcp" in each]
    step_4 = download(cloud, "run/step_4/", tmp_path / "step_4")
    assert_same_bits(step_4, here.ckpt_dir / "step_4")

    second = on_xla(url, *flags, "--max_steps", 6)
    assert second.returncode == 0, second.stderr
    assert f"resuming {url}/step_4 at step 4" in second.stdout
    there = Result(download(cloud, "run/", tmp_path / "there"))
    assert there.column("loss") == here.column("loss")


@pytest.mark.long
@on_both
def test_killed_in_the_middle_of_an_upload(cloud):
    url = cloud.url("run")
    cloud.stuck = [r"PUT shelf/run/step_4/__0_0\.distcp"]
    killed = start(url, *EVERY_TWO, "--max_steps", "20")
    try:
        cloud.wait_until_stuck()
    finally:
        killed.kill()
        killed.communicate()
    cloud.stuck = []
    assert "manifest.json" in cloud.names("run/step_2/")
    assert cloud.names("run/step_4/") == []
    done = program(url, *EVERY_TWO, "--max_steps", 6)
    assert done.returncode == 0, done.stderr
    assert f"resuming {url}/step_2 at step 2" in done.stdout
    assert cloud.folders("run/") == ["step_2", "step_4", "step_6", "tensorboard"]


@pytest.mark.long
@on_both
def test_a_server_that_goes_away_and_comes_back(cloud):
    url = cloud.url("run")
    run = start(url, *EVERY_TWO, "--max_steps", "11", "--max_failed_saves", "3")
    try:
        # Its own checkpoint is asked for: a late request of the test before may be in the list.
        while "manifest.json" not in cloud.names("run/step_2/"):
            assert run.poll() is None
            time.sleep(0.05)
        cloud.stop()
        time.sleep(12)
        cloud.start()
        said, wrong = run.communicate(timeout=200)
    finally:
        run.kill()
    assert run.returncode == 0, wrong
    assert f"checkpoint {url}/step_11" in said
    assert "Traceback" not in wrong
    assert "manifest.json" in cloud.names("run/step_11/")
    records = cloud.read("run/metrics.jsonl").splitlines()
    assert [json.loads(line)["step"] for line in records][-1] == 11


# -- rights ---------------------------------------------------------------------------


def warnings_of(done):
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    return [line for line in done.stdout.splitlines() if line.startswith("warning: an old")]


@pytest.mark.long
@pytest.mark.parametrize(
    ("server", "rule"), [(S3, "DELETE .*"), (GS, "DELETE .*/step_.*")], indirect=["server"]
)
def test_without_the_right_to_remove(rule, cloud):

    def run(*flags):
        flags = [*EVERY_TWO, "--keep_checkpoints", "1", "--max_steps", *flags]
        return warnings_of(program(cloud.url("run"), *flags, processes=2))

    cloud.forbidden = [rule]
    assert len(run(6)) == 2
    if cloud.scheme == "s3":  # Google's storage replaces nothing that may not be removed
        cloud.forbidden = []
        cloud.remove("run/step_6/manifest.json")
        cloud.forbidden = [rule]
        assert len(run(6)) == 1  # what is left of step 6 cannot be removed
        assert "manifest.json" in cloud.names("run/step_6/")
    assert len(run(6)) == 1  # nothing is left to train
    cloud.forbidden = []
    assert run(6) == []
    assert cloud.folders("run/") == ["step_6", "tensorboard"]


@pytest.mark.long
@on_gs
def test_one_of_several_files_that_cannot_be_removed(cloud):
    """gcsfs passes on the answer about it, which is JSON of several lines."""
    cloud.forbidden = ["DELETE .*distcp"]
    keep = ["--keep_checkpoints", "1", "--max_steps", 4]
    (told,) = warnings_of(program(cloud.url("run"), *EVERY_TWO, *keep))
    file = "shelf/run/step_2/__0_0.distcp"
    assert f"(Anonymous caller does not have the right to DELETE {file}.: " in told
    assert cloud.names("run/step_2/") == ["__0_0.distcp"]


@pytest.mark.long
@on_gs
def test_without_the_right_to_replace(cloud):
    """Told by the first start, as no second one could go on."""
    cloud.forbidden = ["DELETE .*"]
    told = mistake(program(cloud.url("run"), "--max_steps", 4))
    assert told.startswith(f"cannot write to --ckpt_dir {cloud.url('run')}: {DENIED['gs']}PUT")
    assert cloud.names() == ["run/.write_test"]


@pytest.mark.long
@on_gs
def test_without_the_right_to_ask_for_the_bucket(cloud):
    """Which a role for what is in buckets does not give; the bucket is empty."""
    cloud.forbidden = ["HEAD shelf/"]
    done = program(cloud.url("run"), "--max_steps", 2)
    assert done.returncode == 0, done.stderr
    assert "HEAD shelf/" in cloud.requests
    missing = cloud.url("run").replace("shelf", "nowhere")
    told = mistake(program(missing, "--max_steps", 2))
    assert told == f"cannot write to --ckpt_dir {missing}: there is no bucket nowhere"


@on_both
def test_what_can_be_neither_completed_nor_removed(cloud):
    url = cloud.url("run")
    cloud.forbidden = ["(PUT|HEAD|DELETE) .*step_2/manifest.json"]
    done = program(url, *EVERY_TWO, "--max_steps", 4, "--max_failed_saves", 3)
    assert done.returncode == 0, done.stderr
    told = f"checkpoint step_2 could not be written to {url} ({DENIED[cloud.scheme]}"
    assert told in done.stdout
    assert "manifest.json" in cloud.names("run/step_4/")


@pytest.mark.long
@on_both
def test_without_the_right_to_read(cloud, tmp_path, capsys):
    url, denied = cloud.url("run"), DENIED[cloud.scheme]
    assert program(url, *EVERY_TWO, "--max_steps", 4).returncode == 0
    before = cloud.names()
    here, image = tmp_path / "here", next((DIGITS / "val").rglob("*.png"))
    cloud.forbidden = ["(GET|HEAD|LIST) shelf/run.*"]
    for flags in (
        ["--resume", url],
        ["--init_from", url],
        ["--resume", url, "--eval_only"],
        ["--resume", url, "--predict", image],
        ["--teacher", "vit_10b", "--teacher_weights", url],
    ):
        told = told_in_one_line(capsys, *tiny(here), "--cpu_devices", "2", *flags)
        assert f"cannot read the checkpoint {url}: " in told
        assert "Forbidden" in told or denied in told
    told = mistake(program(url, "--max_steps", 6))
    assert told.startswith(f"cannot read --ckpt_dir {url}: ")
    assert "Forbidden" in told or denied in told
    cloud.forbidden = ["GET shelf/run/.*"]
    told = mistake(program(url, "--max_steps", 6))
    assert told.startswith(f"cannot read --ckpt_dir {url}: {denied}")
    assert f": {url}/step_4/manifest" in told
    cloud.forbidden = ["GET .*__0_0.distcp"]
    told = mistake(on_xla(url, "--max_steps", 6))
    assert told.startswith(f"cannot read the checkpoint {url}/step_4: {denied}")
    cloud.forbidden = ["(GET|HEAD|LIST) .*"]
    assert "Forbidden" in mistake(program(url, "--max_steps", 6))
    cloud.forbidden = []
    assert [name for name in cloud.names() if "write_test" not in name] == before
    assert not here.exists()


# -- images ---------------------------------------------------------------------------


IMAGES = ["--batch_size", "16", "--max_steps", "3"]


@pytest.fixture(scope="module")
def few_digits(tmp_path_factory):
    """A few of the digits in a folder."""
    folder = tmp_path_factory.mktemp("digits")
    for split, count in (("train", 8), ("val", 2)):
        for of_class in sorted((DIGITS / split).iterdir()):
            target = folder / split / of_class.name
            target.mkdir(parents=True)
            for path in sorted(of_class.iterdir())[:count]:
                (target / path.name).write_bytes(path.read_bytes())
    return folder


@pytest.fixture(scope="module")
def images(server, few_digits):
    """The same in a bucket of their own."""
    server.make_bucket("images")
    for path in few_digits.rglob("*.png"):
        name = f"digits/{path.relative_to(few_digits)}"
        server.write(name, path.read_bytes(), bucket="images")
    return f"{server.scheme}://images/digits"


def losses(folder, *flags):
    done = program(folder, *IMAGES, *flags)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "80 training, 20 validation images" in done.stdout
    return Result(folder).column("loss")


@on_both
def test_images_of_a_bucket(cloud, images, tmp_path):
    assert len(losses(tmp_path / "run", "--data_dir", images, "--num_workers", 2)) == 3


@pytest.mark.long
@on_both
def test_images_packed_to_a_bucket(cloud, few_digits, tmp_path):
    """By processes of their own, in several shards: the same training as from the folder."""
    url = cloud.url("shards")
    packed = run_program(
        *["-m", "data.pack", str(few_digits), url, "--shard_size", "50KB", "--workers", "2"]
    )
    assert packed.returncode == 0, packed.stderr
    assert len([name for name in cloud.names("shards/train/") if name.endswith(".tar")]) > 2
    again = run_program("-m", "data.pack", str(few_digits), url)
    assert again.returncode == 2
    assert again.stderr == (
        f"data.pack: error: {url} already exists and is not an interrupted run of the same "
        "command: choose another target\n"
    )
    shards = ["--data_source", "webdataset", "--data_dir", url]
    found = losses(tmp_path / "shards", *shards, "--num_workers", 2)
    assert found == losses(tmp_path / "folder", "--data_dir", few_digits)


@more_often_on_s3
@pytest.mark.parametrize(
    ("data_dir", "told"),
    [
        ("nowhere/digits", "nowhere/digits/train: the bucket nowhere does not exist"),
        ("images/nothing", "images/nothing/train does not exist: --data_dir requires"),
    ],
)
def test_images_that_are_not_there(data_dir, told, cloud, images, tmp_path, capsys):
    data_dir = f"{cloud.scheme}://{data_dir}"
    flags = [*tiny(tmp_path / "run"), "--backend", "cuda", "--data_dir", data_dir]
    assert f"{cloud.scheme}://{told}" in told_in_one_line(capsys, *flags)
    line = told_in_one_line(capsys, *flags, "--data_source", "webdataset")
    assert "the bucket nowhere does not exist" in line or f"{data_dir} has no shards" in line


@more_often_on_s3
@pytest.mark.parametrize(
    ("rule", "told"),
    [
        ("(LIST|HEAD) images.*", "digits/train cannot be listed: {}"),
        ("GET images/digits/.*", " cannot be read ({}"),
    ],
)
def test_images_without_the_right_to_read(rule, told, cloud, images, tmp_path):
    cloud.forbidden = [rule]
    line = mistake(program(tmp_path / "run", *IMAGES, "--data_dir", images))
    assert told.format(DENIED[cloud.scheme]) in line
    assert "images/" not in rule or "neither can 10 images" in line
    # Without retries: 32 images are looked at for --intensity.
    assert len([each for each in cloud.requests if each.startswith("GET")]) < 20 + 32
