"""A start in a folder with a damaged or hostile file: it trains on, or ends with one line.

The damages are those of ``tests/support/hostile.py``, by a fixed seed. The real program starts in
this process.
"""

import json
import os
import shutil
import stat
from pathlib import Path

import pytest

import run_vit_training
from tests.support.cli import run_program, tiny
from tests.support.hostile import damaged
from training.checkpoints.inventory import complete_checkpoints

FLAGS = "--backend cuda --test_epoch_interval 99 --keep_checkpoints 2 --ckpt_best".split()
FILES = {
    "metrics": "run/metrics.jsonl",
    "events": "run/events.jsonl",
    "settings": "run/run.json",
    "bad_images": "run/bad_images.txt",
    "manifest": "run/step_5/manifest.json",
    "metadata": "run/step_5/.metadata",
    "tensors": "run/step_5/__0_0.distcp",
    "run_word": "run/run_id",
    "lock": "run/.lock",
    "part": "disks/host_0/part_0/step_6/part.json",
    "part_manifest": "disks/host_0/part_0/step_6/manifest.json",
    "part_metadata": "disks/host_0/part_0/step_6/.metadata",
    "folder_word": "disks/host_0/.folder",
}


@pytest.fixture(scope="module")
def killed(tmp_path_factory):
    """A run, killed before step 7: steps 4 and 6 are on the host's disk, step 5 in --ckpt_dir."""
    folder = tmp_path_factory.mktemp("killed")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("KILLED", "0 7")
        interval = "--ckpt_step_interval 5 --local_ckpt_step_interval 2 --test_step_interval 3"
        words = [*tiny(folder / "run"), *FLAGS, *interval.split(), "--max_steps", "9"]
        done = run_program("-m", "tests.fakes.hosts_with_disks", *words)
        assert done.returncode, done.stdout
    (folder / "run" / "bad_images.txt").write_text("train/3/9.png\tit is cut off\ttrain\n" * 3)
    return folder


def start(folder, *flags):
    """Start the run again until step 6, which is there."""
    local = f"--local_ckpt_dir {folder}/disks/host_0 --local_ckpt_step_interval 2".split()
    words = [*tiny(folder / "run"), *FLAGS, *local, "--max_steps", "6", *flags]
    try:
        return run_vit_training.main(words)
    except SystemExit as end:
        return end.code


def start_damaged(killed, folder, capsys, *flags, **damages):
    """Start in a copy of the folder with other content in some files; return code and output."""
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(killed, folder)
    for file, content in damages.items():
        (folder / FILES[file]).write_bytes(content)
    code = start(folder, *flags)
    out, err = capsys.readouterr()
    assert code in (0, 2), (damages, code, out + err)
    lines = [line for line in err.splitlines() if line.startswith("run_vit_training.py: error")]
    assert len(lines) == (code == 2), (damages, err)
    assert "Traceback" not in out + err
    return code, out + err


LEFT_OUT = "note: metrics.jsonl: 1 damaged line left out"
ON_STEP_6 = "step_6 at step 6"
CASES = {
    "a step that is none": ("metrics", b'{"step": "x"}\n', LEFT_OUT),
    "a loss of letters": ("metrics", b'{"step": 3, "val_loss": "x", "val_images": 9}\n', LEFT_OUT),
    "a number within a list": ("metrics", b'{"step": 3, "loss": [NaN]}\n', LEFT_OUT),
    "nested settings": ("settings", b"[" * 30_000, ON_STEP_6),
    "nested files": ("manifest", b"[" * 30_000, ON_STEP_6),
    "a file of that many bytes": ("manifest", b'{"files": {"a": [1e400, "0"]}}', ON_STEP_6),
    "a file of such a name": ("manifest", b'{"files": {"a\\u0000": [1, "%032x"]}}' % 0, ON_STEP_6),
    "a part of lists": ("part", b"[" * 30_000, "step_5 at step 5"),
    "a run's word in bytes": ("run_word", b"\xff\xfe", "contains a checkpoint of another run"),
    "a folder's word in bytes": ("folder_word", b"\xff\xfe", ON_STEP_6),
}


@pytest.mark.parametrize("case", CASES)
def test_a_start_in_a_damaged_folder(case, killed, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("RUN_JOB_ID", "job")  # so that run.json is read
    file, content, said = CASES[case]
    if file == "metrics":
        content = (killed / FILES[file]).read_bytes() + content
    code, output = start_damaged(killed, tmp_path / "again", capsys, **{file: content})
    assert said in output
    assert code == (2 if "another run" in said else 0)
    if file == "metrics":
        records = [json.loads(line) for line in (tmp_path / "again" / FILES[file]).open()]
        assert [record["step"] for record in records if "loss" in record] == [1, 2, 3, 4, 5, 6]


def copy_of_step(folder):
    shutil.copytree(folder / "disks/host_0/part_0/step_6", folder / "disks/host_0/part_0/step_99")
    shutil.copytree(folder / "run/step_5", folder / "run/step_99")


def copy_of_part(folder):
    shutil.copytree(folder / "disks/host_0/part_0", folder / "disks/host_0/part_1")
    shutil.copytree(folder / "disks/host_0/part_0", folder / "disks/host_0/part_007")


def files_for_folders(folder):
    (folder / "disks/host_0/part_0/step_7").write_text("mine")
    (folder / "disks/host_0/part_0/step_3").symlink_to("nowhere")
    (folder / "disks/host_0/part_1").write_text("mine")
    (folder / "run/step_6").write_text("mine")


def folders_for_files(folder):
    for file in ("manifest.json", "part.json"):
        (folder / "disks/host_0/part_0/step_6" / file).unlink()
        (folder / "disks/host_0/part_0/step_6" / file).mkdir()
    shutil.rmtree(folder / "disks/host_0/part_0/step_4")


@pytest.mark.parametrize(
    ("spoil", "resumed", "said"),
    [
        (copy_of_step, 6, ["step_99: it contains step ", "moved step_99 to "]),
        (copy_of_part, 6, []),
        (files_for_folders, 6, []),
        (folders_for_files, 5, []),
    ],
)
def test_a_start_among_copies_and_files(spoil, resumed, said, killed, tmp_path, capsys):
    folder = shutil.copytree(killed, tmp_path / "again")
    spoil(folder)
    there, before = set(folder.rglob("*")), os.umask(0)
    try:
        code = start(folder, "--max_steps", "7", "--ckpt_step_interval", "6")
    finally:
        os.umask(before)
    out, err = capsys.readouterr()
    assert code == 0, out + err
    assert f"step_{resumed} at step {resumed}, " in out
    assert all(words in out for words in said), out
    assert complete_checkpoints(folder / "run")[-1].name == "step_7"
    kept = {path: path.read_text() for path in folder.rglob("step_?.set_aside")}
    if spoil is files_for_folders:
        places = folder / "run/step_6", folder / "disks/host_0/part_0/step_7"
        assert kept == {Path(f"{path}.set_aside"): "mine" for path in places}
    # The umask allows others to write; the program does not.
    new = set(folder.rglob("*")) - there
    assert folder / "run/step_7/.metadata" in new
    assert not [path for path in new if path.stat().st_mode & stat.S_IWOTH]


@pytest.mark.long
@pytest.mark.parametrize("file", FILES)
def test_a_start_in_a_folder_damaged_at_random(file, killed, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("RUN_JOB_ID", "job")
    folder, content = tmp_path / "again", (killed / FILES[file]).read_bytes()
    for changed in damaged(content, 0, 25):
        start_damaged(killed, folder, capsys, **{file: changed})
