"""``~`` in a path is the home folder wherever it is typed: after =, in an @FILE, for a tool."""

import re

import pytest

from launch import gke, xla_dist
from run_vit_training import CONFIGS, read_flags
from tests.support.usage_error import told_in_one_line
from training.flags import by_field, flat

PATHS = {
    name: option
    for name, option in by_field(*CONFIGS.values()).items()
    if re.search(r"FILE|FOLDER|PATH", str(option.flag.metavar)) and name != "extension"
}


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    """A home folder, and a current folder that has one called ~."""
    folder = tmp_path / "home"
    (tmp_path / "here" / "~").mkdir(parents=True)
    monkeypatch.setenv("HOME", str(folder))
    monkeypatch.chdir(tmp_path / "here")
    return folder


def values(*words):
    flags = read_flags(words)
    return flat(flags.run, *flags.backend_configs, flags.plan)


def test_every_flag_of_a_path(home):
    for typed, expected in {
        "~": str(home),
        "~/a b/~": f"{home}/a b/~",
        "~root/x": "/root/x",
        "x~": "x~",
    }.items():
        found = values(*(f"{option.names[0]}={typed}" for option in PATHS.values()))
        assert {field: found[field] for field in PATHS} == dict.fromkeys(PATHS, expected) | {
            "predict": [expected]
        }
    assert values("--data_dir=gs://~x/y")["data_dir"] == "gs://~x/y"
    assert values("--resume", "auto")["resume"] == "auto"
    assert values("--train_shards=~*.tar")["train_shards"] == "~*.tar"  # a pattern in --data_dir


def test_a_list_and_files_of_flags(home):
    home.mkdir()
    (home / "a.args").write_text("--predict ~/a.jpg b.jpg ~/c\n@~/more.args")
    (home / "more.args").write_text("--ckpt_dir=~/run")
    found = values("@~/a.args")
    assert found["predict"] == [f"{home}/a.jpg", "b.jpg", f"{home}/c"]
    assert found["ckpt_dir"] == f"{home}/run"


def test_a_mistake(home, capsys):
    told = told_in_one_line(capsys, "--resume=~/none", "--eval_only", "--fake_data")
    assert f"{home}/none" in told
    told = told_in_one_line(capsys, "--ckpt_dir=~nobody_here/x")
    assert "no user nobody_here; for a folder with this name, use ./~nobody_here/x" in told
    told = told_in_one_line(capsys, "@~/none.args")
    assert told.startswith("@~/none.args: No such file")


def test_launchers(home):
    job = ["--elastic", "2", "~/job.yaml"]
    assert gke.parse(job).file == f"{home}/job.yaml"
    # The program's own flags, and its folder, are of the workers.
    args = xla_dist.parse(["--tpu=pod", "--log_dir=~/logs", "--", "true", "--ckpt_dir=~/x"])
    assert args.log_dir == home / "logs"
    assert (args.workdir, args.command) == ("~", ["true", "--ckpt_dir=~/x"])
