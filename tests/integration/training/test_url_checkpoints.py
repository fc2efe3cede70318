"""Runs whose --ckpt_dir is a URL: the same checkpoints, logs and resumed losses as in a folder."""

import fsspec
import pytest

from tests.fakes import bucket
from tests.reliability.faults.program import other_records_differ, running
from tests.support.checkpoints import OneWeight, candidates, save_state
from tests.support.cli import Result, command_of, run_program, tiny
from tests.support.short_runs import program
from tests.support.usage_error import told_in_one_line
from training.checkpoints.format import (
    Unreachable,
    damage,
    entries,
    quick_problem,
    training_tensors,
    write_manifest,
)
from training.checkpoints.inventory import (
    complete_checkpoints,
    read_or_problem,
    step_folders,
)
from training.checkpoints.removal import clear, prune, set_aside
from training.checkpoints.state import load_state
from training.errors import UsageError
from training.files import LogUploads, fetch_logs, folder_at, log_folder
from training.schedule import Position

ON_A_BUCKET = "tests.fakes.bucket"


@pytest.fixture
def storage(tmp_path, monkeypatch):
    """An empty bucket, and this machine's cache."""
    folder = tmp_path / "storage"
    folder.mkdir()
    monkeypatch.setenv("BUCKET_ROOT", str(folder))
    monkeypatch.setenv("BUCKET_DOWN", str(tmp_path / "down"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "first_machine"))
    return folder


@pytest.fixture(params=["memory", "bucket"])
def url(request, storage):
    """A run's folder on a URL; both kinds are known to this process."""
    assert bucket.Bucket.protocol == "bucket"
    memory = fsspec.filesystem("memory")  # one for all tests of this process
    memory.store.clear()
    memory.pseudo_dirs[:] = [""]
    return folder_at(f"{request.param}://shelf/a run/")


def names(url):
    return [path.name for path in url.iterdir()]


def write_whole(folder, value):
    clear(folder)
    save_state(
        OneWeight(value, ["scale"]), folder, training_tensors(Position(int(value)), {}, None)
    )
    write_manifest(folder, entries(folder, [p.name for p in folder.iterdir()]))
    return folder


# -- the folder -----------------------------------------------------------------------


def test_checkpoints_on_a_url(url):
    assert str(url).endswith("://shelf/a run")
    assert complete_checkpoints(url) == []
    for step in (2, 4, 10):
        write_whole(url / f"step_{step}", float(step))
    write_whole(url / "step_11", 1.0)
    (url / "step_11" / "manifest.json").unlink()
    assert [path.name for path in step_folders(url)] == ["step_2", "step_4", "step_10", "step_11"]
    newest = candidates(url).paths[0]
    assert newest == url / "step_10"
    assert newest.parent == url
    backend = OneWeight(0.0, ["scale"])
    load_state(backend, newest)
    assert (backend.taken.model["a.w"] == 10).all()
    assert quick_problem(newest) is damage(newest) is None
    prune(url, 1, [url / "step_2"])
    assert names(url) == ["step_10", "step_11", "step_2"]
    (url / "metrics.jsonl").write_text('{"step": 12}\n')
    aside = set_aside(url, [newest])
    assert names(url) == ["metrics.jsonl", "set_aside_1", "step_11", "step_2"]
    assert (aside / "metrics.jsonl").read_text() == '{"step": 12}\n'
    assert damage(aside / "step_10") is None
    file = aside / "step_10" / "__0_0.distcp"
    file.write_bytes(file.read_bytes()[:-1])
    assert "bytes, not" in quick_problem(aside / "step_10")


def test_what_a_storage_raises_is_an_oserror(storage):
    (storage.parent / "down").touch()
    for action in ("exists", "is_dir", "iterdir", "read_bytes", "mkdir"):
        with pytest.raises(OSError, match="503 try again later"):
            getattr(folder_at("bucket://shelf/run"), action)()
    with pytest.raises(UsageError, match="cannot read --ckpt_dir bucket://shelf/run: 503"):
        candidates(folder_at("bucket://shelf/run"))


def test_what_is_damaged_is_passed_over_what_cannot_be_reached_is_not(storage):
    url = folder_at("bucket://shelf/run")
    for step in (2, 4):
        write_whole(url / f"step_{step}", float(step))
    file = url / "step_4" / "__0_0.distcp"
    file.write_bytes(bytes(len(file.read_bytes())))  # of the same size
    found = candidates(url)
    assert found.saved.path == url / "step_2"
    assert "cannot read the checkpoint bucket://shelf/run/step_4" in found.passed_over[0]
    (storage.parent / "down").touch()
    with pytest.raises(Unreachable, match=r"/step_4: 503 try again"):
        read_or_problem(url / "step_4")
    for look in (damage, quick_problem):
        with pytest.raises(OSError, match="503 try again later"):
            look(url / "step_4")


def test_logs_are_copied_as_they_grow_and_no_failure_ends_a_run(storage, tmp_path):
    url, said = folder_at("bucket://shelf/run"), []
    folder = log_folder(url)
    assert folder.parent.parent == tmp_path / "first_machine" / "vit_fsdp"
    assert log_folder(tmp_path) == tmp_path
    (folder / "tensorboard").mkdir(parents=True)
    (folder / "metrics.jsonl").write_text("1\n")
    (folder / "tensorboard" / "events").write_bytes(b"\x00\xff")
    (folder / ".lock").write_text("")
    uploads = LogUploads(folder, url, said.append)
    uploads.begin()
    uploads.copy()
    assert names(url) == ["metrics.jsonl", "tensorboard"]
    assert (url / "tensorboard" / "events").read_bytes() == b"\x00\xff"
    (storage.parent / "down").touch()
    (folder / "metrics.jsonl").write_text("1\n2\n")
    uploads.copy()
    uploads.copy()
    assert len(said) == 1
    assert "cannot be copied to bucket://shelf/run (503 try again later)" in said[0]
    (storage.parent / "down").unlink()
    uploads.copy()
    assert "again" in said[1]
    assert (url / "metrics.jsonl").read_text() == "1\n2\n"
    (folder / "metrics.jsonl").write_text("1\n2\n3\n")
    assert uploads.copy() is None
    assert (url / "metrics.jsonl").read_text() == "1\n2\n3\n"
    fetch_logs(folder, url, ("metrics.jsonl", "bad_images.txt"))
    assert sorted(p.name for p in folder.rglob("*")) == [".lock", "metrics.jsonl", "tensorboard"]


@pytest.mark.parametrize(
    ("here", "there", "kept"),
    [
        ("1\n2\n3\n", "1\n2\n", "1\n2\n3\n"),  # killed before it was copied
        ("1\n2\n", "1\n2\n", "1\n2\n"),
        ("1\n2\n", "1\n2\n3\n", "1\n2\n3\n"),  # continued on another machine
        ("1\n2\n3\n", "1\n2\n4\n", "1\n2\n4\n"),
        ("1\n2\n", None, None),  # of a run whose folder was removed
    ],
)
def test_what_a_killed_start_had_not_copied(here, there, kept, url, storage):
    folder = log_folder(url)
    for name in ("metrics.jsonl", "tensorboard/events"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(here)
    if there is not None:
        (url / "metrics.jsonl").write_text(there)
        (url / "tensorboard").mkdir()
        (url / "tensorboard" / "events").write_text(there)
    fetch_logs(folder, url, ("metrics.jsonl",))
    if kept is None:
        assert list(folder.rglob("*")) == [folder / "tensorboard"]
    else:
        assert (folder / "metrics.jsonl").read_text() == kept
        assert (url / "metrics.jsonl").read_text() == kept
        assert (url / "tensorboard" / "events").read_text() == kept


# -- real runs ------------------------------------------------------------------------


@pytest.mark.long
def test_killed_as_a_checkpoint_is_complete(storage, tmp_path, monkeypatch):
    run = folder_at("bucket://shelf/run")
    flags = "--backend cuda --ckpt_step_interval 5 --max_steps 12 --test_step_interval 3".split()
    words = ["-m", ON_A_BUCKET, *tiny(run), *flags]
    command, _ = command_of(*words, warm=False)
    with running(command, tmp_path / "log") as started:
        assert started.wait_until((run / "step_5" / "manifest.json").exists, 0.0005)
        started.root.kill()
        started.root.wait()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "second_machine"))
    done = run_program(*words)
    assert done.returncode == 0, done.stderr
    assert "resuming bucket://shelf/run/step_5 at step 5" in done.stdout
    assert other_records_differ(run) is None
    steps = [record["step"] for record in Result(run).records if "loss" in record]
    assert steps == list(range(1, 13))


def test_a_storage_that_fails_in_the_middle(storage, tmp_path, monkeypatch):
    url = "bucket://shelf/run"
    monkeypatch.setenv("PROGRAM", ON_A_BUCKET)
    monkeypatch.setenv("SAVES", "full 4 -1 0")
    flags = "--ckpt_step_interval 2 --max_steps 20 --max_failed_saves 2".split()
    failed = program(url, *flags, module="tests.fakes.disturbed_saves")
    assert failed.returncode == 4, failed.stderr
    assert f"the newest checkpoint is {url}/step_2" in failed.stderr
    assert [path.name for path in complete_checkpoints(folder_at(url))] == ["step_2"]
    assert not (folder_at(url) / "step_4").exists()


@pytest.mark.parametrize(
    ("url", "told"),
    [
        ("abfs://bucket/run", "requires the package adlfs: python3 -m pip install adlfs"),
        ("nosuch://bucket/run", "fsspec does not support nosuch:// URLs"),
        ("bucket://", "names no folder: use a URL such as bucket://bucket/run"),
        ("bucket://missing/run", "cannot write to --ckpt_dir bucket://missing/run: there is no "),
    ],
)
def test_urls_that_cannot_be(url, told, storage, capsys):
    assert bucket.Bucket.protocol == "bucket"  # it is known to this process
    assert told in told_in_one_line(capsys, "--backend", "cuda", *tiny(url))
    assert list(storage.iterdir()) == []


def test_a_file_url_is_a_folder(tmp_path):
    assert folder_at(f"file://{tmp_path}/run") == tmp_path / "run"
