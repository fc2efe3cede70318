"""launch/setup_pod.sh and queued_resource.sh over the stand-in for gcloud; launch/gke.yaml."""

import ast
import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from launch.xla_dist import STEP_TIMEOUT_SECONDS
from run_vit_training import read_flags
from tests.fakes.pod import REMOTE, StandIn, read_until
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
    (fresh_pod.folder / "states_to_come").write_text("ERROR\nACCEPTED\nERROR\nACTIVE")
    words = [*SLICE, "--delete", "--log_dir", fresh_pod.logs, "--", "true"]
    code, _, stderr = run_script(fresh_pod, QUEUED, *words)
    assert code == 0, stderr
    assert not (fresh_pod.folder / "states").exists()


def test_a_slice_that_may_be_there_is_neither_asked_for_nor_deleted(fresh_pod):
    (fresh_pod.folder / "states").write_text("ERROR")
    code, stdout, stderr = run_script(fresh_pod, QUEUED, *SLICE, "--delete", "--", "true")
    assert (code, stdout) == (1, "")
    assert stderr.startswith("queued_resource.sh: gcloud cannot tell whether pod is there: ERROR")
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


def test_queued_resource_that_cannot_be_had(fresh_pod):
    (fresh_pod.folder / "states_to_come").write_text("ACCEPTED\nFAILED")
    code, _, stderr = run_script(fresh_pod, QUEUED, *SLICE, "--", "true")
    assert code == 1
    assert stderr == "queued_resource.sh: pod is FAILED: delete it, and ask again\n"


@pytest.mark.parametrize(
    ("path", "words", "told"),
    [
        (SETUP, "", "setup_pod.sh: error: --tpu=NAME is missing"),
        (SETUP, "--tpu=pod --bogus", "setup_pod.sh: error: unknown argument --bogus"),
        (SETUP, "--tpu=pod --dir=..", "setup_pod.sh: error: --dir=.. is not the plain name"),
        (QUEUED, "--tpu=pod", "queued_resource.sh: error: no command: give it after --"),
        (QUEUED, "--tpu=pod --dry_run -- true", "queued_resource.sh: error: --dry_run is not for"),
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
    assert f"POLL_SECONDS={poll} is not a number of seconds above 0" in line
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
