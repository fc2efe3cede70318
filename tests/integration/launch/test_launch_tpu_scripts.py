"""launch/setup_pod.sh and queued_resource.sh over the stand-in for gcloud; launch/gke.yaml."""

import argparse
import ast
import json
import math
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import yaml

from launch.ckpt_dir import lost_checkpoints
from launch.compute_engine import LAST_ERROR
from launch.slices import GROUP, gcloud_command
from launch.xla_dist import STEP_TIMEOUT_SECONDS
from run_vit_training import read_flags
from tests.fakes.pod import REMOTE, StandIn, gcloud_accepts, read_until, wait_until
from tests.support.cli import ROOT
from tests.support.launching import finish, refused, script
from training.errors import BAD_IMAGES, NOT_FINITE, NOT_SAVED

SETUP, QUEUED = ROOT / "launch" / "setup_pod.sh", ROOT / "launch" / "queued_resource.sh"
SLICE = "--tpu=pod --type=v5litepod-16 --version=v2-alpha-tpuv5-lite --zone=us-central1-a".split()


@pytest.fixture
def fresh_pod(pod):
    """Its workers have a Python 3.11 whose venv notes what pip is asked for."""
    pip = """printf '#!/bin/sh\\necho "$0 $*" >> "$HOME/pip"\\n' > "$3/bin/python\""""
    script(
        pod.folder / "bin" / "python3.11",
        '[ "$1 $2" = "-m venv" ] || exit 3',
        f'mkdir -p "$3/bin"; {pip}; chmod +x "$3/bin/python"',
    )
    (pod.folder / "states_to_come").write_text("ACCEPTED\nPROVISIONING\nPROVISIONING\nACTIVE")
    pod.variables["POLL_SECONDS"] = "0.1"
    return pod


def run_script(pod: StandIn, path: Path, *words: object) -> tuple[int, str, str]:
    return finish(start_script(pod, path, *words))


def start_script(
    pod: StandIn, path: Path, *words: object, start_new_session: bool = False
) -> subprocess.Popen[str]:
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    how = {"cwd": pod.cwd, "env": pod.variables, "text": True, **pipes}
    command = ["bash", str(path), *map(str, words)]
    return subprocess.Popen(command, start_new_session=start_new_session, **how)


def test_setup_copies_and_installs(fresh_pod):
    """Twice, as after a change: the copy holds the program, and packages are asked for again.

    Those of TorchTPU go to a place of their own.
    """
    for flags in ((), (), ("--torchtpu",)):
        code, stdout, stderr = run_script(fresh_pod, SETUP, "--tpu", "pod", "--internal-ip", *flags)
        assert code == 0, stderr
        assert "copying to 4 worker(s) of pod" in stdout
        assert stdout.count("installed in") == 4
    for index in range(4):
        home = fresh_pod.folder / f"worker_{index}"
        assert (home / "pip").read_text().splitlines() == [
            ".venv/bin/python -m pip install --quiet -r requirements-tpu.txt",
            ".venv/bin/python -m pip install --quiet -r requirements-tpu.txt",
            ".venv-torchtpu/bin/python -m pip install --quiet -r requirements-torchtpu.txt",
        ]
        copy = home / "vit-fsdp"
        for name in ("run_vit_training.py", "training/loop.py", "launch/pod_worker.py"):
            assert (copy / name).read_bytes() == (ROOT / name).read_bytes()
        assert not (copy / "datasets").exists()
        assert not (home / "vit-fsdp.tar.gz").exists()
    assert not list(fresh_pod.cwd.iterdir())


def test_queued_resource_from_request_to_deletion(fresh_pod):
    flags = [*SLICE, "--spot", "--delete", "--env", "A=b c", "--log_dir", fresh_pod.logs]
    flags += ["--torchtpu"]
    command = ["--", "sh", "-c", 'echo "$A"; pwd; exit $((RANK * 3))']
    code, stdout, stderr = run_script(fresh_pod, QUEUED, *flags, "--grace", "0", *command)
    assert code in (3, 6, 9), stderr  # the first that fails
    assert "pod is ACCEPTED, waiting" in stdout
    assert stdout.count("pod is PROVISIONING, waiting") == 1
    assert f"] {fresh_pod.folder}/worker_" in stdout
    assert "] b c\n" in stdout
    assert "installed in" in stdout
    assert (fresh_pod.folder / "worker_0" / "vit-fsdp" / ".venv-torchtpu").is_dir()
    calls = [json.loads(line) for line in (fresh_pod.folder / "calls").read_text().splitlines()]
    made = [call[3:] for call in calls if call[2] == "queued-resources" and call[3] != "describe"]
    where = ["pod", "--zone=us-central1-a", "--quiet"]
    kind = "--accelerator-type=v5litepod-16 --runtime-version=v2-alpha-tpuv5-lite".split()
    assert made == [
        ["create", *where, "--node-id=pod", *kind, "--spot"],
        ["delete", *where, "--force", "--async"],
    ]


@pytest.mark.parametrize("creation", ["fails", "hangs"])
def test_a_slice_is_given_back_whatever_comes_after_it_was_asked_for(fresh_pod, creation):
    """A call that failed, or that Ctrl-C ended, may have made the slice, which then costs."""
    (fresh_pod.folder / "creation").write_text(creation)
    words = [*SLICE, "--delete", "--log_dir", fresh_pod.logs, "--", "true"]
    run = start_script(fresh_pod, QUEUED, *words, start_new_session=True)
    if creation == "hangs":
        read_until(run, "hanging", 1)
        os.killpg(run.pid, signal.SIGINT)
    code, stdout, _ = finish(run)
    assert code != 0
    assert "deleting pod" in stdout
    assert not (fresh_pod.folder / "states").exists()


def test_a_call_that_fails_once_ends_no_waiting(fresh_pod):
    (fresh_pod.folder / "states_to_come").write_text("ERROR\nACCEPTED\nERROR\nERROR\nACTIVE")
    words = [*SLICE, "--delete", "--log_dir", fresh_pod.logs, "--", "true"]
    code, stdout, stderr = run_script(fresh_pod, QUEUED, *words)
    assert code == 0, stderr
    assert "pod is UNKNOWN (ERROR: (gcloud) the server is unavailable), waiting" in stdout
    assert not (fresh_pod.folder / "states").exists()


def test_a_slice_that_may_be_there_is_neither_asked_for_nor_deleted(fresh_pod):
    (fresh_pod.folder / "states").write_text("ERROR")
    code, stdout, stderr = run_script(fresh_pod, QUEUED, *SLICE, "--delete", "--", "true")
    assert (code, stdout) == (1, "")
    assert stderr.startswith("queued_resource.sh: gcloud cannot tell whether pod exists: ERROR")
    assert (fresh_pod.folder / "states").exists()


def test_queued_resource_passes_signals_on_and_is_used_again(fresh_pod):
    (fresh_pod.folder / "states").write_text("ACTIVE")
    flags = ["--tpu=pod", "--log_dir", fresh_pod.logs]
    for sent, code in ((signal.SIGINT, 130), (signal.SIGTERM, 143)):
        run = start_script(fresh_pod, QUEUED, *flags, "--", sys.executable, REMOTE, "wait")
        read_until(run, "ready", 4)
        run.send_signal(sent)
        assert finish(run)[0] == code
        assert fresh_pod.received() == dict.fromkeys(range(4), f"{sent.name}\n")
        for index in range(4):
            (fresh_pod.folder / f"worker_{index}" / "vit-fsdp" / "received").unlink(missing_ok=True)
            (fresh_pod.folder / f"worker_{index}" / "received").unlink(missing_ok=True)
    assert (fresh_pod.folder / "states").exists()


@pytest.mark.parametrize("launcher", [QUEUED, "launch.compute_engine"])
def test_the_same_launcher_twice(fresh_pod, launcher):
    """The second one would start a second program on the slice, and delete it at its end."""
    (fresh_pod.folder / "states").write_text("ACTIVE")
    compute = launcher != QUEUED
    if compute:
        (fresh_pod.folder / "compute").touch()
    words = [*(EIGHT if compute else SLICE), "--delete", "--log_dir", fresh_pod.logs, "--"]
    words += [sys.executable, REMOTE, "wait"]

    def start():
        if compute:
            return fresh_pod.start(*words, program=launcher)
        return start_script(fresh_pod, launcher, *words)

    first = start()
    read_until(first, "ready", 4)
    told = refused(start())
    assert re.search(r"error: another (queued_resource\.sh|compute_engine) uses pod \(/", told)
    first.send_signal(signal.SIGINT)
    assert finish(first)[0] == 130
    assert sum("delete" in line for line in (fresh_pod.folder / "calls").open()) == 1 + 2 * compute


PREEMPT = r"""
lines() { cat "$1" 2> /dev/null | wc -l; }
if [ "$RANK" != 0 ]; then
    echo one >> "$1/others"
    while [ $(lines "$1/starts") -lt 3 ]; do sleep 0.1; done
    exit
fi
echo one >> "$1/starts"
starts=$(lines "$1/starts")
[ $starts -lt 3 ] || exit 0
while [ $(lines "$1/others") -lt $((3 * starts)) ]; do sleep 0.1; done
echo "$2" > "$1/state"
[ ! -e "$1/states" ] || printf 'ACTIVE\nSUSPENDING\nSUSPENDING\nSUSPENDED\n' > "$1/states"
exit 143  # as a VM's shutdown ends programs
"""
"""What each worker's shell runs: the slice is preempted in the first two starts, once all four
workers run, as ssh refuses a connection that comes later. $1: the stand-in's folder, $2: the state
of a preempted node or VM."""


@pytest.mark.parametrize(("allowed", "ended"), [(2, 0), (1, 143)])
def test_preempted_slices_are_requested_again(fresh_pod, allowed, ended):
    """As often as allowed; the slice is deleted at the end."""
    flags = [*SLICE, "--spot", "--delete", f"--max_preemptions={allowed}", "--grace", "0"]
    flags += ["--log_dir", fresh_pod.logs]
    command = ["--", "sh", "-c", PREEMPT, "sh", fresh_pod.folder, "PREEMPTED"]
    code, stdout, stderr = run_script(fresh_pod, QUEUED, *flags, *command)
    assert code == ended, stdout + stderr
    assert stdout.count("pod was preempted: replacing it") == allowed, stdout + stderr
    assert stdout.count("pod is SUSPENDING, waiting") == allowed
    assert stdout.count("installed in") == 4 * (1 + allowed)
    assert not (fresh_pod.folder / "states").exists()
    calls = [json.loads(line) for line in (fresh_pod.folder / "calls").read_text().splitlines()]
    assert sum("create" in call for call in calls) == 1 + allowed
    assert sum("--async" in call for call in calls) == 1  # at the end; a replacement is waited for


def test_a_slice_that_an_earlier_command_has_left_suspended(fresh_pod):
    states = fresh_pod.folder / "states"
    states.write_text("SUSPENDED")
    code, _, stderr = run_script(fresh_pod, QUEUED, *SLICE, "--", "true")
    assert (code, stderr) == (1, "queued_resource.sh: pod is SUSPENDED: delete it and try again\n")
    assert states.exists()
    code, _, stderr = run_script(fresh_pod, QUEUED, *SLICE, "--delete", "--", "true")
    assert code == 1
    assert stderr == "queued_resource.sh: pod is SUSPENDED: it is deleted now; try again\n"
    assert not states.exists()
    states.write_text("DELETING\nDELETING\nSUSPENDED")  # while the one before is deleted
    words = [*SLICE, "--max_preemptions=1", "--log_dir", fresh_pod.logs, "--", "true"]
    code, stdout, stderr = run_script(fresh_pod, QUEUED, *words)
    assert code == 0, stdout + stderr
    assert "pod is DELETING, waiting" in stdout


def test_only_deleting(fresh_pod):
    (fresh_pod.folder / "states").write_text("ACTIVE")
    code, stdout, stderr = run_script(fresh_pod, QUEUED, *SLICE, "--delete")
    assert (code, stderr) == (0, "")
    assert stdout.startswith("queued_resource.sh: deleting pod; it incurs costs as long as ")
    assert not (fresh_pod.folder / "states").exists()
    assert run_script(fresh_pod, QUEUED, *SLICE, "--delete")[0] == 1  # there is none any more


def test_queued_resource_shows_its_commands(fresh_pod):
    command = ["--", "python3", "-u", "run_vit_training.py", "--ckpt_dir", "gs://a b/c"]
    flags = ["--delete", "--max_preemptions=3", "--create_flag=--service-account=a@b", "--dry_run"]
    code, stdout, stderr = run_script(fresh_pod, QUEUED, *SLICE, *flags, *command)
    assert code == 0, stderr
    assert "\n# after a preemption, up to 3 times: delete, then all of the above\n" in stdout
    create, setup, train, _, delete = map(shlex.split, stdout.splitlines())
    assert create[-1] == "--service-account=a@b"
    where = ["pod", "--zone=us-central1-a", "--quiet"]
    queued = ["gcloud", "compute", "tpus", "queued-resources"]
    assert create[:8] == [*queued, "create", *where]
    assert delete == [*queued, "delete", *where, "--force", "--async"]
    assert setup == ["bash", "launch/setup_pod.sh", "--tpu=pod", "--zone=us-central1-a"]
    assert train[-6:] == command
    assert not (fresh_pod.folder / "calls").exists()


@pytest.mark.long
def test_gcloud_accepts_what_it_is_asked(fresh_pod, tmp_path):
    """Its own parser. What version 528 had not released yet is in its tracks for that."""
    place = ["--zone=us-central1-c", "--project=p", "--tunnel-through-iap"]
    commands = []
    for how in ("--spot", "--flex_start=7d", "--reservation=r", "--vm_flag=--subnet=s"):
        words = ["--tpu=a", "--topology=tpu7x:4x4x4", how, *place, "--delete"]
        code, stdout, stderr = run_compute(fresh_pod, *words, "--dry_run", "--", "true")
        assert code == 0, stderr
        commands += [line for line in stdout.splitlines() if line.startswith("gcloud ")]
    code, stdout, stderr = run_compute(
        fresh_pod,
        "--tpu=a",
        "--topology=v6e:2x2",
        *place,
        "--dry_run",
        "--",
        "true",
    )
    commands += [line for line in stdout.splitlines() if line.startswith("gcloud ")]
    code, stdout, stderr = fresh_pod.run(
        "true", flags=("--dry_run", "--tpu_api=compute", *place), tpu="a"
    )
    commands += [line for line in stdout.splitlines() if line.startswith("gcloud ")]
    asked = argparse.Namespace(zone="us-central1-c", project="p")
    for in_zone, *question in (
        (True, *GROUP, "list-instances", "a", "--format=json"),
        (True, "instances", "describe", "a", "--format=json"),
        (False, "instances", "list", "--filter=name=(a b)", "--format=json"),
        (False, "operations", "list", *LAST_ERROR, "--filter=targetLink~/a$ AND error:*"),
        (True, "scp", "file", "a:", "--tunnel-through-iap"),
    ):
        commands.append(shlex.join(gcloud_command(asked, *question, in_zone=in_zone)))
    assert len({*commands}) > 15

    def accepts(command: str) -> None:
        words = shlex.split(command)
        if any(word.startswith("--target-size-policy-mode") for word in words):
            words.insert(1, "alpha")
        elif "--provisioning-model=FLEX_START" in words:
            words.insert(1, "beta")
        gcloud_accepts(words, tmp_path / "config")

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(accepts, sorted({*commands})))


def test_no_number_is_octal(fresh_pod):
    words = [*SLICE, "--max_preemptions=08", "--dry_run", "--", "true"]
    code, stdout, stderr = run_script(fresh_pod, QUEUED, *words)
    assert (code, stderr) == (0, "")
    assert "\n# after a preemption, up to 8 times: delete" in stdout


def test_dry_runs_of_launchers_name_variables_alone(fresh_pod):
    flags = ["--env", "A=s3cret", "--env=B=s3cret=1", "--env=C", "--dry_run", "--", "echo", "A=b"]
    fresh_pod.variables["C"] = "s3cret"
    for code, stdout, stderr in (
        run_script(fresh_pod, QUEUED, *SLICE, *flags),
        run_compute(fresh_pod, *EIGHT, *flags),
    ):
        assert (code, stderr) == (0, "")
        assert " --env A --env=B --env=C -- echo A=b" in stdout
        assert "s3cret" not in stdout


@pytest.mark.parametrize(
    ("said", "code"),
    [
        ("ERROR: (gcloud) The required property [project] is not currently set.", 2),
        ("ERROR: (gcloud) There was a problem refreshing tokens: ('invalid_grant: Bad', {})", 2),
        ("ERROR: (gcloud) PERMISSION_DENIED: Permission 'tpu.nodes.get' denied on resource", 2),
        ("ERROR: (gcloud) UNAVAILABLE: try again", 1),
    ],
)
def test_what_gcloud_says_of_a_queued_resource(fresh_pod, said, code):
    script(
        fresh_pod.folder / "bin" / "gcloud",
        f"printf '%s\\nPlease run:\\n' {shlex.quote(said)} >&2; exit 1",
    )
    ended, stdout, stderr = run_script(fresh_pod, QUEUED, *SLICE, "--", "true")
    assert (ended, stdout) == (code, "")
    assert len(stderr.splitlines()) == 1
    assert said in stderr


@pytest.mark.parametrize("printed", ["", "[]", "null", "WARNING: update", "\\377\\376"])
def test_gcloud_prints_no_state(fresh_pod, printed):
    script(fresh_pod.folder / "bin" / "gcloud", f"printf '{printed}'")
    code, stdout, stderr = run_script(fresh_pod, QUEUED, *SLICE, "--", "true")
    assert (code, stdout) == (1, "")
    assert "gcloud cannot tell whether pod exists: it printed no state but " in stderr


# -- checkpoints on the disks of a slice ------------------------------------------------

TRAIN = [".venv/bin/python", "-u", "run_vit_training.py"]


@pytest.mark.parametrize(
    ("command", "disks", "lost"),
    [
        (TRAIN, [], "the default --ckpt_dir"),
        (["launch/torchrun.sh", "--log-dir", "logs", "--"], [], "the default --ckpt_dir"),
        ([*TRAIN, "@recipes/vit_10b.args"], [], "the default --ckpt_dir"),
        ([*TRAIN, "--ckpt_dir", "~/runs/a"], [], "--ckpt_dir ~/runs/a"),
        ([*TRAIN, "--ckpt_dir=/mnt/a"], [], "--ckpt_dir /mnt/a"),
        ([*TRAIN, "--ckpt_dir=/mnt/a"], ["/mnt"], None),
        ([*TRAIN, "--ckpt_dir=/mnt/a"], ["/mnt/b", "/mnt/a/"], None),
        ([*TRAIN, "--ckpt_dir=/mnt/ab"], ["/mnt/a"], "--ckpt_dir /mnt/ab"),
        ([*TRAIN, "--ckpt_dir=/mnt/a/../../tmp"], ["/mnt"], "--ckpt_dir /mnt/a/../../tmp"),
        ([*TRAIN, "--ckpt_dir", "gs://b/a"], [], None),
        ([*TRAIN, "--ckpt_dir", "file:///mnt/a"], [], "--ckpt_dir file:///mnt/a"),
        ([*TRAIN, "--ckpt_dir", "gs://b/a", "--ckpt_dir=/a"], [], "--ckpt_dir /a"),
        ([*TRAIN, "--ckpt_dir=/a", "--ckpt_dir", "gs://b/a"], [], None),
        (
            [*TRAIN, "--ckpt_dir=gs://b/a", "@/no/such"],
            [],
            "a --ckpt_dir that may be in @/no/such, w",
        ),
        ([*TRAIN, "@/no/such", "--ckpt_dir=gs://b/a"], [], None),
        (
            [*TRAIN, "--resume", "gs://b/a", "--local_ckpt_dir", "gs://b"],
            [],
            "the default --ckpt_dir",
        ),
        ([*TRAIN, "--ckpt_dir=$(FOLDER)/a"], [], None),
        ([*TRAIN, "--self_check"], [], None),
        ([*TRAIN, "--eval_only", "--resume", "gs://b/a"], [], None),
        ([*TRAIN, "--compile_only"], [], None),
        ([*TRAIN, "--predict=a.jpg"], [], None),
        (["env", "A=b", "python3", "/x/run_vit_training.py"], [], "the default --ckpt_dir"),
        (["python3", "benchmarks/xla_step.py", "--ckpt_dir", "/a"], [], None),
        (["true"], [], None),
        ([], [], None),
    ],
)
def test_which_checkpoints_are_lost(command, disks, lost):
    found = lost_checkpoints(command, disks)
    assert (found or "").startswith(lost or "")
    assert (found is None) == (lost is None)


def test_flags_in_files_count(tmp_path):
    """As the program reads them: the last one, also of a file in a file."""
    (tmp_path / "inner").write_text("--ckpt_dir \\\n  '/mnt/a b'  # here\n")
    (tmp_path / "outer").write_text(f"--ckpt_dir gs://b/a @{tmp_path}/inner")
    words = [f"@{tmp_path}/outer"]
    assert read_flags(words).run.checkpoints.ckpt_dir == "/mnt/a b"
    assert lost_checkpoints([*TRAIN, *words], []) == "--ckpt_dir /mnt/a b"
    (tmp_path / "check").write_text("--self_check")
    assert lost_checkpoints([*TRAIN, *words, f"@{tmp_path}/check"], []) is None


@pytest.mark.parametrize("flag", ["--delete", "--max_preemptions=1"])
@pytest.mark.parametrize("launcher", [QUEUED, "launch.compute_engine"])
def test_no_slice_is_deleted_with_its_checkpoints(fresh_pod, launcher, flag):
    def start(*words):
        if launcher == QUEUED:
            return start_script(fresh_pod, QUEUED, *SLICE, *words)
        return start_compute(fresh_pod, *EIGHT, *words)

    train = ["python3", "run_vit_training.py", "--fake_data", "--ckpt_dir", "/mnt/it's/a"]
    line = refused(start(flag, "--", *train))
    told = (
        f"error: {flag.partition('=')[0]} would delete the slice's disks with the checkpoints in "
    )
    assert f"{told}--ckpt_dir /mnt/it's/a: use --ckpt_dir gs://bucket/folder, or" in line
    assert line.endswith(" with --network_disk FOLDER")
    assert not (fresh_pod.folder / "calls").exists()
    for words in (
        [flag, "--network_disk", "/mnt/it's", "--dry_run", "--", *train],
        [flag, "--dry_run", "--", *train, "--ckpt_dir=gs://b/a"],
        ["--dry_run", "--", *train],
    ):
        code, stdout, stderr = finish(start(*words))
        assert (code, stderr) == (0, "")
        assert "run_vit_training.py --fake_data --ckpt_dir" in stdout


def test_queued_resource_that_cannot_be_had(fresh_pod):
    (fresh_pod.folder / "states_to_come").write_text("ACCEPTED\nFAILED")
    code, _, stderr = run_script(fresh_pod, QUEUED, *SLICE, "--", "true")
    assert code == 1
    assert stderr == "queued_resource.sh: pod is FAILED: delete it and try again\n"


# -- Compute Engine -------------------------------------------------------------------

EIGHT = ["--tpu=pod", "--topology=v6e:4x4", "--zone=us-east5-b", "--poll=0.1"]


def start_compute(pod: StandIn, *words: object) -> subprocess.Popen[str]:
    return pod.start(*words, program="launch.compute_engine")


def run_compute(pod: StandIn, *words: object) -> tuple[int, str, str]:
    return finish(start_compute(pod, *words))


def made(pod: StandIn) -> set[str]:
    folder = pod.folder / "made"
    return {path.name for path in folder.iterdir()} if folder.exists() else set()


def test_compute_engine_from_creation_to_deletion(fresh_pod):
    """The second time what is there is used."""
    logs = ["--log_dir", fresh_pod.logs]
    code, stdout, stderr = run_compute(
        fresh_pod, *EIGHT, "--flex_start=7d", "--torchtpu", *logs, "--", "sh", "-c", "pwd; exit 3"
    )
    assert code == 3, stderr
    assert stdout.count("installed in") == 4
    assert re.search(rf"\] {fresh_pod.folder}/worker_\d/vit-fsdp\n", stdout)  # of the first
    resources = ("resource-policies", "instance-templates", "instance-groups")
    assert made(fresh_pod) == {f"{kind}_pod" for kind in resources}
    flags = {
        kind: json.loads((fresh_pod.folder / "made" / f"{kind}_pod").read_text())["flags"]
        for kind in resources
    }
    assert flags["resource-policies"]["accelerator-topology"] == "4x4"
    template = flags["instance-templates"]
    assert template["machine-type"] == "ct6e-standard-4t"
    assert (template["provisioning-model"], template["max-run-duration"]) == ("FLEX_START", "7d")
    assert flags["instance-groups"] == {
        "size": "4",
        "target-size-policy-mode": "bulk",
        "default-action-on-vm-failure": "do-nothing",
        "template": "https://instance-templates/pod",
        "workload-policy": "https://resource-policies/pod",
        "quiet": "",
        "zone": "us-east5-b",
    }
    code, stdout, stderr = run_compute(fresh_pod, *EIGHT, "--delete", *logs, "--", "true")
    assert code == 0, stderr
    assert "creating" not in stderr
    deleted = [line for line in stderr.splitlines() if "deleting" in line]
    assert deleted == [f"compute_engine: deleting {kind} pod" for kind in reversed(resources)]
    assert not made(fresh_pod)


@pytest.mark.parametrize(("allowed", "ended"), [(2, 0), (1, 143)])
def test_preempted_vms_are_created_again(fresh_pod, allowed, ended):
    """Their group alone: policy and template stay."""
    flags = [*EIGHT, "--spot", "--delete", "--max_preemptions", str(allowed), "--grace", "0"]
    flags += ["--log_dir", fresh_pod.logs]
    command = ["--", "sh", "-c", PREEMPT, "sh", fresh_pod.folder, "TERMINATED"]
    code, stdout, stderr = run_compute(fresh_pod, *flags, *command)
    assert code == ended, stdout + stderr
    assert stderr.count("replacing pod") == allowed, stderr
    assert stderr.count("creating instance-groups") == 1 + allowed, stderr
    assert stderr.count("creating instance-templates") == 1
    assert stdout.count("installed in") == 4 * (1 + allowed)
    assert not made(fresh_pod)


def test_only_deleting_on_compute_engine(fresh_pod):
    code, _, stderr = run_compute(fresh_pod, *EIGHT, "--log_dir", fresh_pod.logs, "--", "true")
    assert code == 0, stderr
    assert made(fresh_pod)
    code, stdout, stderr = run_compute(fresh_pod, *EIGHT, "--delete", "--dry_run")
    assert code == 0, stderr
    assert [" delete pod " in line for line in stdout.splitlines()] == 3 * [True]
    code, _, stderr = run_compute(fresh_pod, *EIGHT, "--delete")
    assert code == 0
    assert stderr.count("deleting") == 3
    assert not made(fresh_pod)


def test_vms_that_an_earlier_command_has_left_ended(fresh_pod):
    code, _, stderr = run_compute(fresh_pod, *EIGHT, "--log_dir", fresh_pod.logs, "--", "true")
    assert code == 0, stderr
    (fresh_pod.folder / "state").write_text("TERMINATED")
    words = [*EIGHT, "--log_dir", fresh_pod.logs, "--max_preemptions=1", "--", "true"]
    code, _, stderr = run_compute(fresh_pod, *words)
    assert code == 0, stderr
    assert "pod has 0 of 4 VMs running (TERMINATED)" in stderr
    assert "replacing pod; 0 replacement(s) left" in stderr


def test_two_slices_of_compute_engine(fresh_pod):
    """One policy and one template make both groups."""
    (fresh_pod.folder / "workers").write_text("2")
    two = ["--tpu=pod", "--slices=2", "--topology=tpu7x:2x2x2", "--zone=us-central1-c"]
    words = [*two, "--poll=0.1", "--spot", "--log_dir", fresh_pod.logs, "--delete"]
    shown = ["--", "sh", "-c", "echo $MEGASCALE_SLICE_ID of $MEGASCALE_NUM_SLICES"]
    code, stdout, stderr = run_compute(fresh_pod, *words, *shown)
    assert code == 0, stderr
    assert sorted(line for line in stdout.splitlines() if " of 2" in line) == [
        f"[worker {worker}] {worker // 2} of 2" for worker in range(4)
    ]
    assert stderr.count("deleting") == 4
    assert not made(fresh_pod)


def test_one_host_is_a_vm(fresh_pod):
    (fresh_pod.folder / "workers").write_text("1")
    words = ["--tpu=pod", "--topology=v6e:2x4", "--poll=0.1", "--log_dir", fresh_pod.logs]
    code, stdout, stderr = run_compute(fresh_pod, *words, "--delete", "--", "hostname")
    assert code == 0, stderr
    assert "pod is STAGING, not RUNNING" in stderr
    assert "installed in" in stdout
    assert not made(fresh_pod)
    calls = [json.loads(line) for line in (fresh_pod.folder / "calls").read_text().splitlines()]
    (create,) = [call for call in calls if "create" in call]
    assert {"--machine-type=ct6e-standard-8t", "--zone=us-central1-a", "--async"} < {*create}


@pytest.mark.parametrize("creation", ["fails", "hangs"])
def test_what_was_created_is_deleted_whatever_comes_then(fresh_pod, creation):
    """A call that failed, or that Ctrl-C ended, may have made the group, which then costs."""
    (fresh_pod.folder / "creation").write_text(creation)
    run = start_compute(fresh_pod, *EIGHT, "--delete", "--", "true")
    if creation == "hangs":
        wait_until(lambda: "instance-groups_pod" in made(fresh_pod))
        run.send_signal(signal.SIGINT)
    code, _, stderr = finish(run)
    assert code == {"fails": 1, "hangs": 130}[creation], stderr
    assert not made(fresh_pod)


def test_a_refused_group_leaves_nothing(fresh_pod):
    """Also without --delete. A refusal of the server, and one while the VMs are waited for."""
    quota = "Quota 'TPUS_PER_TPU_FAMILY' exceeded.  Limit: 0.0 in region us-east5."
    (fresh_pod.folder / "refused_instance-groups").write_text(
        f"ERROR: (gcloud.compute) Could not fetch resource:\n - {quota}"
    )
    code, _, stderr = run_compute(fresh_pod, *EIGHT, "--", "true")
    assert code == 1
    assert f"instance-groups pod: Could not fetch resource: {' '.join(quota.split())}" in stderr
    assert not made(fresh_pod)
    (fresh_pod.folder / "refused_instance-groups").write_text(
        "ERROR: (gcloud.compute) unrecognized arguments:\n  \n --target-size-policy-mode flag is "
        "available in one or more alternate release tracks. Try:\n\n  gcloud alpha compute"
    )
    code, _, stderr = run_compute(fresh_pod, *EIGHT, "--", "true")
    (line,) = (line for line in stderr.splitlines() if "error" in line)
    assert "gcloud 562 or newer is required (gcloud components update): unrecognized" in line
    assert "--target-size-policy-mode flag is available" in line
    assert not made(fresh_pod)
    (fresh_pod.folder / "refused_instance-groups").unlink()
    (fresh_pod.folder / "state_to_come").write_text("TERMINATED")
    code, _, stderr = run_compute(fresh_pod, *EIGHT, "--", "true")
    assert code == 1
    assert "error: pod has 0 of 4 VMs running (TERMINATED): delete it and try again" in stderr
    assert not made(fresh_pod)


def test_what_cannot_be_deleted_is_named(fresh_pod):
    (fresh_pod.folder / "stays_instance-groups").touch()
    words = [*EIGHT, "--delete", "--log_dir", fresh_pod.logs, "--", "true"]
    code, _, stderr = run_compute(fresh_pod, *words)
    assert code == 0
    assert (
        "compute_engine: error: instance-groups pod may still exist and incur costs; "
        "delete it with: gcloud compute instance-groups managed delete pod --quiet "
        "--zone=us-east5-b\n"
    ) in stderr
    assert made(fresh_pod) == {"instance-groups_pod"}


def test_waiting_for_vms_can_be_stopped(fresh_pod):
    """Without --delete what is asked for stays, and is waited for again."""
    (fresh_pod.folder / "state_to_come").write_text("STAGING")
    run = start_compute(fresh_pod, *EIGHT, "--log_dir", fresh_pod.logs, "--", "true")
    assert run.stderr
    while "has 0 of 4 VMs running (STAGING); waiting" not in (line := run.stderr.readline()):
        assert line
    run.send_signal(signal.SIGTERM)
    code, _, stderr = finish(run)
    assert code == 143
    assert "pod is still running and incurs costs" in stderr
    assert "instance-groups_pod" in made(fresh_pod)
    other = [*EIGHT[:1], "--topology=v6e:4x8", *EIGHT[2:], "--delete", "--", "true"]
    code, _, stderr = run_compute(fresh_pod, *other)
    assert code == 2
    told = "resource-policies pod already exists with 4x4, but --topology v6e:4x8 requires 4x8"
    assert told in stderr
    assert "instance-groups_pod" in made(fresh_pod)


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("--topology=v5e:8x8", "available on Compute Engine are v6e, v5p, tpu7x; for v4"),
        ("--topology=v6e:4x4x4", "--topology v6e:4x4x4 is not a valid slice shape: give 2 sides"),
        ("--topology=v5p:4x2x2", "--topology v5p:4x2x2 is not a valid slice shape: give 3 sides"),
        ("--topology=v6e:4x4 --spot --flex_start=7d", "argument --flex_start: not allowed with"),
        ("--topology=v6e:4x4 --flex_start=forever", "--flex_start forever is not a duration"),
        ("--topology=v6e:4x4 --tpu=Vit", "--tpu Vit: names on Compute Engine consist"),
        ("--topology=v6e:4x4 --elastic=2", "--elastic requires several slices"),
        ("--topology=v6e:4x4 --tpu_api tpu", "--tpu_api cannot be used here"),
        ("--topology=v6e:4x4 --slices=0", "argument --slices: 0 must be at least 1"),
    ],
)
def test_mistakes_on_compute_engine(fresh_pod, words, told):
    code, _, stderr = run_compute(
        fresh_pod, "--tpu=pod", "--zone=z-a", *words.split(), "--", "true"
    )
    assert (code, len(stderr.splitlines())) == (2, 1), stderr
    assert told in stderr
    assert not made(fresh_pod)


@pytest.mark.parametrize(
    ("path", "words", "told"),
    [
        (SETUP, "", "setup_pod.sh: error: --tpu=NAME is missing"),
        (SETUP, "--tpu=pod --bogus", "setup_pod.sh: error: unknown argument --bogus"),
        (SETUP, "--tpu=pod --dir=..", "setup_pod.sh: error: --dir=.. must be a plain"),
        (QUEUED, "--tpu=pod", "queued_resource.sh: error: no command: pass it after --"),
        (QUEUED, "--tpu=pod --max_preemptions=a -- true", "queued_resource.sh: error: --max_pree"),
        (
            QUEUED,
            "--tpu=pod --max_preemptions=1 -- true",
            "queued_resource.sh: error: --max_preemptions requires --type and --version",
        ),
        (QUEUED, "--tpu=a,b -- true", "queued_resource.sh: error: --tpu=a,b: this script requests"),
        (QUEUED, "--tpu=pod --bogus -- true", "xla_dist: error: unrecognized arguments: --bogus"),
        (QUEUED, "--tpu=pod -- true", "queued_resource.sh: error: no queued resource pod yet"),
    ],
)
def test_mistakes_in_the_scripts(pod, path, words, told):
    assert refused(start_script(pod, path, *words.split())).startswith(told)


@pytest.mark.parametrize("poll", ["0", "1e3"])
def test_how_often_to_ask(pod, poll):
    pod.variables["POLL_SECONDS"] = poll
    line = refused(start_script(pod, QUEUED, "--tpu=pod", "--", "true"))
    assert f"POLL_SECONDS={poll} must be a number of seconds above 0" in line
    assert not (pod.folder / "calls").exists()


def test_scripts_are_well_formed():
    scripts = sorted((ROOT / "launch").glob("*.sh"))
    assert {SETUP, QUEUED} < set(scripts)
    for path in scripts:
        assert os.access(path, os.X_OK)
        subprocess.run(["bash", "-n", path], check=True)
    if not shutil.which("shellcheck"):
        pytest.skip("no shellcheck is installed here; bash -n found nothing")
    subprocess.run(["shellcheck", "--severity=warning", *scripts], check=True)


# -- GKE ------------------------------------------------------------------------------


def test_gke_file():
    """Its parts fit together, and the program takes its command line."""
    job_set = yaml.safe_load((ROOT / "launch" / "gke.yaml").read_text())
    assert (job_set["apiVersion"], job_set["kind"]) == ("jobset.x-k8s.io/v1alpha2", "JobSet")
    (replicated,) = job_set["spec"]["replicatedJobs"]
    job = replicated["template"]["spec"]
    pod_spec = job["template"]["spec"]
    (container,) = pod_spec["containers"]
    mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
    assert set(mounts) == {volume["name"] for volume in pod_spec["volumes"]}
    chips = container["resources"]["limits"]["google.com/tpu"]
    assert container["resources"]["requests"] == container["resources"]["limits"]
    topology = pod_spec["nodeSelector"]["cloud.google.com/gke-tpu-topology"]
    machines = math.prod(map(int, topology.split("x"))) // chips
    assert job["parallelism"] == job["completions"] == machines
    assert container["command"] == ["python3", "-u", "run_vit_training.py"]
    asked = read_flags(container["args"]).run
    assert asked.data.data_dir.startswith(mounts["datasets"] + "/")
    assert asked.checkpoints.ckpt_dir.startswith(mounts["checkpoints"] + "/")
    assert asked.checkpoints.resume == "auto"
    variables = {variable["name"]: variable for variable in container["env"]}
    assert variables["STEP_TIMEOUT_S"]["value"] == str(STEP_TIMEOUT_SECONDS)
    assert variables["RUN_JOB_ID"]["value"] == "$(JOBSET_NAME)-$(JOBSET_UID)"
    labels = {
        "JOBSET_NAME": "jobset-name",
        "JOBSET_UID": "jobset-uid",
        "RUN_ATTEMPT": "restart-attempt",
    }
    for name, label in labels.items():
        path = variables[name]["valueFrom"]["fieldRef"]["fieldPath"]
        assert path == f"metadata.labels['jobset.sigs.k8s.io/{label}']"
    assert asked.data.batch_size % (machines * chips) == 0
    # What the program says by its code that it is in vain.
    (rule,) = job["podFailurePolicy"]["rules"]
    assert rule["onExitCodes"] == {
        "containerName": container["name"],
        "operator": "In",
        "values": [2, NOT_FINITE, NOT_SAVED, BAD_IMAGES],
    }
    assert pod_spec["restartPolicy"] == "Never"  # which such rules need
    (after,) = job_set["spec"]["failurePolicy"]["rules"]
    assert after == {"action": "FailJobSet", "onJobFailureReasons": ["PodFailurePolicy"]}


# -- what is shipped ------------------------------------------------------------------


def shipped():
    """By the file that says so, what goes to other machines."""
    found = {}
    for name in ("Dockerfile.tpu", "Dockerfile.gpu"):
        text = (ROOT / "launch" / name).read_text()
        lines = re.findall(r"^COPY (.*) \S+$", text, re.M)
        found[name] = {word for line in lines for word in line.split()}
        let_in = (ROOT / "launch" / f"{name}.dockerignore").read_text()
        assert set(re.findall(r"^!(.*)$", let_in, re.M)) == found[name]
    (files,) = re.findall(r"^files=\((.*)\)$", SETUP.read_text(), re.M)
    return found | {"setup_pod.sh": set(files.split())}


@pytest.mark.parametrize("where", ["Dockerfile.tpu", "Dockerfile.gpu", "setup_pod.sh"])
def test_what_is_shipped_imports_nothing_that_is_not(where):
    names = shipped()[where]
    assert {"run_vit_training.py", "recipes", "tools"} <= names
    sources = [path for name in names for path in [ROOT / name, *(ROOT / name).rglob("*.py")]]
    for path in (path for path in sources if path.suffix == ".py"):
        for node in ast.walk(ast.parse(path.read_text())):
            imported = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom):
                imported = [node.module]
            for name in (module.split(".")[0] for module in imported):
                ours = (ROOT / name).is_dir() or (ROOT / f"{name}.py").is_file()
                assert not ours or {name, f"{name}.py"} & names, (path, name)


@pytest.mark.parametrize("where", ["Dockerfile.tpu", "Dockerfile.gpu", "setup_pod.sh"])
def test_requirements_are_shipped_with_the_files_that_they_include(where):
    names = shipped()[where]
    requirements = {name for name in names if name.startswith("requirements-")}
    assert requirements
    for name in requirements:
        assert set(re.findall(r"^-r (\S+)$", (ROOT / name).read_text(), re.M)) <= names
