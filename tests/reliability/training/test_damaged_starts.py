"""A start in a folder with a damaged or hostile file: it trains on, or ends with one line.

The damages are those of ``tests/support/hostile.py``, by a fixed seed. The real program starts in
this process.
"""

import json
import shutil

import pytest

import run_vit_training
from tests.support.cli import run_program, tiny
from tests.support.hostile import damaged

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


@pytest.mark.long
@pytest.mark.parametrize("file", FILES)
def test_a_start_in_a_folder_damaged_at_random(file, killed, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("RUN_JOB_ID", "job")
    folder, content = tmp_path / "again", (killed / FILES[file]).read_bytes()
    for changed in damaged(content, 0, 25):
        start_damaged(killed, folder, capsys, **{file: changed})
