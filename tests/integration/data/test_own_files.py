"""What is written goes through no link, and what another user has made is not trusted."""

import fcntl
import os
import shutil
import stat
import subprocess
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from data.files import DataFolderError, cache_folder
from data.index_file import _one_process_at_a_time as one_process_at_a_time
from run_vit_training import read_flags
from tests.support.cli import DIGITS, TINY_MODEL, run_program, tiny, train_tiny_gpu
from tests.support.usage_error import told_in_one_line
from torch_fsdp.launch_torch import choose_compile_cache
from training.checkpoints.inventory import check_folders, checkpoint_around
from training.checkpoints.removal import remove
from training.errors import UsageError
from training.files import FolderLock

OTHER = 54321
"""The number of a user who is not this one, and whom no machine knows by name."""
only_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can act as another user")


def refusal(capsys, ckpt_dir: Path, *flags: str) -> str:
    source = ["--data_dir", DIGITS, *TINY_MODEL, "--batch_size", "16", "--ckpt_dir", ckpt_dir]
    return told_in_one_line(capsys, *source, *flags)


def as_other(action: Callable[[], object]) -> str:
    """Do something as the other user, in a process of its own; return the error, "" if none."""
    reader, writer = os.pipe()
    if (child := os.fork()) == 0:
        said = ""
        try:
            os.setgroups([])
            os.setgid(OTHER)
            os.setuid(OTHER)
            action()
        except Exception as error:  # noqa: BLE001 - it is told
            said = f"{type(error).__name__}: {error}"
        os.write(writer, said.encode())
        os._exit(0)
    os.waitpid(child, 0)
    os.close(writer)
    with os.fdopen(reader) as told:
        return told.read()


@pytest.fixture
def everybodys():
    """A folder as the temporary one is: anybody may make files there. Not in pytest's, which each
    start of pytest closes to other users."""
    with tempfile.TemporaryDirectory(dir="/tmp") as top:
        folder = Path(top, "everybodys")
        folder.mkdir()
        folder.chmod(0o1777)
        Path(top).chmod(0o755)
        yield folder


# -- links ----------------------------------------------------------------------------


@pytest.mark.parametrize("name", [".lock", "metrics.jsonl.tmp", "run.json"])
@pytest.mark.parametrize("dangling", [False, True])
def test_a_link_in_the_place_of_a_file_is_refused(name, dangling, tmp_path, capsys):
    precious, run = tmp_path / "precious", tmp_path / "run"
    if not dangling:
        precious.write_text("precious")
    run.mkdir()
    (run / name).symlink_to(precious)
    line = refusal(capsys, run)
    assert line.startswith(f"cannot write to --ckpt_dir {run}: it is a symbolic link")
    assert line.endswith(f"{run}/{name}")
    assert not precious.exists() if dangling else precious.read_text() == "precious"


def test_a_run_writes_through_no_link(tmp_path):
    """Those that are there when it begins, and those that come while it runs."""
    data, outside, run = tmp_path / "data", tmp_path / "outside", tmp_path / "run"
    shutil.copytree(DIGITS, data)
    next((data / "val" / "0").iterdir()).write_bytes(b"no image")
    outside.mkdir()
    run.mkdir()
    for name in ("bad_images.txt", "curves.png"):
        (outside / name).write_text("precious")
        (run / name).symlink_to(outside / name)
    (outside / "folder").mkdir()
    (run / "tensorboard").symlink_to(outside / "folder")
    done = train_tiny_gpu(run, "--data_dir", str(data), "--max_steps", "2")
    assert not list((outside / "folder").iterdir())
    assert "TensorBoard's file cannot be written (" in done.stdout
    assert "bad_images.txt cannot be written (it is a symbolic link" in done.stdout
    for name in ("bad_images.txt", "curves.png"):
        assert (outside / name).read_text() == "precious"
    assert not (run / "curves.png").is_symlink()  # it is replaced, as a whole


def test_of_a_link_to_a_checkpoint_only_the_link_is_removed(run, tmp_path):
    before = sorted(path.name for path in (run / "step_5").iterdir())
    link = tmp_path / "step_5"
    link.symlink_to(run / "step_5")
    remove(link)
    assert not link.is_symlink()
    assert sorted(path.name for path in (run / "step_5").iterdir()) == before


# -- another user's -------------------------------------------------------------------


@only_root
def test_a_folder_of_another_user_is_refused(tmp_path, capsys):
    theirs, mine = tmp_path / "theirs", tmp_path / "mine"
    theirs.mkdir()
    os.chown(theirs, OTHER, OTHER)
    (mine / "step_4").mkdir(parents=True)
    os.chown(mine / "step_4", OTHER, OTHER)
    (tmp_path / "link").symlink_to(tmp_path / "own")
    (tmp_path / "own").mkdir()
    os.chown(tmp_path / "link", OTHER, OTHER, follow_symlinks=False)
    what = f"is owned by user {OTHER}: use a folder of your own, or allow this one with "
    for folder, path in ((theirs, theirs), (mine, mine / "step_4"), (tmp_path / "link",) * 2):
        line = refusal(capsys, folder)
        assert line == f"--ckpt_dir {folder}: {path} {what}--allow_other_owners"
        assert not (folder / ".lock").exists()


@only_root
def test_a_local_folder_of_another_user_is_refused(tmp_path, capsys):
    theirs, mine = tmp_path / "theirs", tmp_path / "mine"
    theirs.mkdir()
    os.chown(theirs, OTHER, OTHER)
    (mine / "part_0").mkdir(parents=True)
    os.chown(mine / "part_0", OTHER, OTHER)
    for folder, path in ((theirs, theirs), (mine, mine / "part_0")):
        line = refusal(capsys, tmp_path / "run", "--local_ckpt_dir", folder)
        whose = f"{path} is owned by user {OTHER}: use a folder of your own"
        assert line == f"--local_ckpt_dir {folder}: {whose}"
        assert not (folder / ".folder").exists()
    assert not (tmp_path / "run").exists()


@only_root
def test_what_another_user_has_planted_is_neither_resumed_nor_written_to(
    trained, everybodys, capsys
):
    """A folder that is made before its owner comes, with a checkpoint and then a link in it."""
    planted, precious = everybodys / "run", everybodys.parent / "precious"
    precious.write_text("precious")
    source = shutil.copytree(trained.ckpt_dir, everybodys.parent / "source")
    source.chmod(0o755)
    assert as_other(lambda: shutil.copytree(source, planted)) == ""
    assert f"{planted} is owned by user {OTHER}" in refusal(capsys, planted)
    (planted / ".lock").unlink()
    assert as_other(lambda: (planted / ".lock").symlink_to(precious)) == ""
    assert "it is a symbolic link" in refusal(capsys, planted)
    assert "it is a symbolic link" in refusal(capsys, planted, "--allow_other_owners")
    assert precious.read_text() == "precious"


@only_root
def test_a_group_shares_a_folder_if_it_says_so(tmp_path):
    shared = tmp_path / "shared"
    shared.mkdir()
    os.chown(shared, OTHER, OTHER)
    flags = [*tiny(shared), "--shared_ckpt_dir"]  # its name before
    check_folders(read_flags(flags).run.checkpoints)
    FolderLock(shared, shared=True).acquire(is_restart=False)
    assert stat.S_IMODE((shared / ".lock").stat().st_mode) == 0o666 & ~_umask()


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


@only_root
def test_what_root_has_made_is_nobody_elses(everybodys):
    """A container's volume is root's; whoever is root can do everything anyway."""
    mount = everybodys / "mount"
    mount.mkdir()
    mount.chmod(0o777)
    assert as_other(lambda: FolderLock(mount).acquire(is_restart=False)) == ""
    assert (mount / ".lock").stat().st_uid == OTHER
    os.chown(mount, OTHER + 1, OTHER)
    refused = as_other(lambda: FolderLock(mount).acquire(is_restart=False))
    assert refused.startswith(
        f"UsageError: --ckpt_dir {mount}: {mount} is owned by user {OTHER + 1}: use"
    )


# -- a user without a home --------------------------------------------------------------


@pytest.mark.long
@pytest.mark.parametrize("backend", ["cuda", "xla"])
def test_a_user_without_a_home_or_a_name_trains(backend, tmp_path, monkeypatch):
    """As ``docker run --user 54321`` makes one."""
    unshare = ["unshare", "--user", f"--map-user={OTHER}"]
    tried = subprocess.run([*unshare, "true"], capture_output=True, text=True, check=False)
    if tried.returncode:
        pytest.skip(f"no user namespace can be had here: {tried.stderr.strip()}")
    for name in ("HOME", "XDG_CACHE_HOME", "USER", "LOGNAME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    words = ["run_vit_training.py", *tiny(tmp_path / "run"), "--backend", backend]
    done = run_program(*words, warm=False, by=unshare)
    assert done.returncode == 0, done.stderr
    assert "training completed: step 6" in done.stdout


@only_root
def test_the_cache_of_a_user_without_a_home(everybodys, monkeypatch):
    for name in ("HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("tempfile.tempdir", str(everybodys))
    place = everybodys / f"vit_fsdp-{OTHER}"
    assert as_other(cache_folder) == ""
    assert place.stat().st_uid == OTHER
    os.chown(place, 0, 0)
    assert as_other(cache_folder).startswith(
        f"DataFolderError: {place}, the cache folder used because HOME"
    )


@pytest.fixture
def temporary(tmp_path, monkeypatch):
    """The temporary folder, and in it the path of this user's."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    for name in ("HOME", "XDG_CACHE_HOME", "TORCHINDUCTOR_CACHE_DIR"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path / f"vit_fsdp-{os.geteuid()}"


@pytest.mark.parametrize("how", ["link", "dangling", "file", "open", "other"])
def test_a_temporary_folder_of_others_is_not_used(how, temporary, monkeypatch):
    """Anybody can guess its name: neither the index nor compiled code is read from it."""
    elsewhere = temporary.parent / "elsewhere"
    if how in ("link", "dangling"):
        temporary.symlink_to(elsewhere)
        if how == "link":
            elsewhere.mkdir()
    elif how == "file":
        temporary.touch()
    else:
        temporary.mkdir()
        temporary.chmod(0o777 if how == "open" else 0o755)
    if how == "other":
        if os.geteuid():
            pytest.skip("only root can give a folder away")
        os.chown(temporary, OTHER, OTHER)

    def no_home(path):
        raise RuntimeError

    monkeypatch.setattr("pathlib.Path.expanduser", no_home)
    with pytest.raises(DataFolderError, match="belongs to another user or can be written by any"):
        cache_folder()
    with pytest.raises(UsageError, match="or set TORCHINDUCTOR_CACHE_DIR to a folder of your own"):
        choose_compile_cache()
    assert "TORCHINDUCTOR_CACHE_DIR" not in os.environ
    assert not elsewhere.exists() or not [*elsewhere.iterdir()]


def test_compiled_code_is_kept_in_an_own_folder(temporary, monkeypatch):
    choose_compile_cache()
    assert os.environ.pop("TORCHINDUCTOR_CACHE_DIR") == str(temporary / "torchinductor")
    assert stat.S_IMODE(temporary.stat().st_mode) == 0o700
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "/mine")
    choose_compile_cache()
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == "/mine"


def test_a_lock_on_the_temporary_folder_stops_nobody(temporary):
    """Any user can hold it; the index of a bucket, which has no lock, does not wait for it."""

    def read_index():
        with one_process_at_a_time("gs://bucket/images"):
            done.set()

    done, held = threading.Event(), os.open(temporary.parent, os.O_RDONLY)
    try:
        fcntl.flock(held, fcntl.LOCK_EX)
        threading.Thread(target=read_index, daemon=True).start()
        assert done.wait(20)
    finally:
        os.close(held)


# -- a checkpoint is no run's folder ----------------------------------------------------


@pytest.mark.parametrize("inside", ["step_10", "set_aside_1/step_5"])
def test_no_run_is_kept_inside_of_a_checkpoint(inside, run, capsys):
    """There --keep_checkpoints of the outer run would remove it."""
    shutil.copytree(run / "step_5", run / "set_aside_1" / "step_5")
    before = sorted(run.rglob("*"))
    line = refusal(capsys, run / inside)
    outer = (run / inside).parent
    assert f"is inside the checkpoint step_{inside.split('step_')[1].split('/')[0]}" in line
    assert f"use the run's folder, {outer}, or" in line
    assert sorted(run.rglob("*")) == before


def test_a_folder_may_be_called_as_a_checkpoint_is(tmp_path):
    (tmp_path / "step_1" / "run").mkdir(parents=True)
    assert checkpoint_around(tmp_path / "step_1" / "run") is None
