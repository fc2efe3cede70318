"""launch/gke.py, over the stand-in for kubectl: fewer slices, and more; mistakes; its end."""

import json
import os
import shlex
import signal
import subprocess
import sys

import pytest
import yaml

from launch import gke
from tests.fakes.pod import wait_until
from tests.support.cli import ROOT

STAND_IN = ROOT / "tests" / "fakes" / "kubectl.py"
MACHINES = 2


@pytest.fixture
def cluster(tmp_path, monkeypatch):
    """Two node pools that are ready; launch/gke.yaml on two slices of two machines."""
    folder = tmp_path / "cluster"
    (folder / "bin").mkdir(parents=True)
    stand_in = folder / "bin" / "kubectl"
    stand_in.write_text(f'#!/bin/sh\nexec {sys.executable} {STAND_IN} "$@"\n')
    stand_in.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder / 'bin'}:{os.environ['PATH']}")
    monkeypatch.setenv("CLUSTER", str(folder))
    have(folder, a=[True, True], b=[True, True])
    write_job_set(folder)
    return folder


def have(cluster, **pools):
    """Let the cluster have these node pools, at once."""
    new = cluster / "new"
    new.write_text(json.dumps(pools))
    new.rename(cluster / "nodes.json")


def write_job_set(cluster, replicas=2, topology="2x4"):
    content = yaml.safe_load((ROOT / "launch" / "gke.yaml").read_text())
    (job,) = content["spec"]["replicatedJobs"]
    job["replicas"], job["template"]["spec"]["parallelism"] = replicas, MACHINES
    pod = job["template"]["spec"]["template"]["spec"]
    pod["nodeSelector"]["cloud.google.com/gke-tpu-topology"] = topology
    pod["terminationGracePeriodSeconds"] = 0
    (cluster / "job.yaml").write_text(yaml.safe_dump(content))


@pytest.fixture
def started(cluster):
    """Starts launch.gke; it has ended with the test."""
    made = []

    def start(*flags):
        command = [sys.executable, "-m", "launch.gke", "--elastic", "1", "--elastic_poll", "1"]
        process = subprocess.Popen(
            [*command, *flags, str(cluster / "job.yaml")],
            cwd=ROOT,
            stderr=subprocess.PIPE,
            text=True,
        )
        made.append(process)
        return process

    yield start
    for process in made:
        process.kill()
        process.wait()


def replicas(cluster):
    """The slices of each JobSet that was applied, in their order."""
    path = cluster / "applied"
    job_sets = map(json.loads, path.read_text().splitlines()) if path.exists() else ()
    return [each["spec"]["replicatedJobs"][0]["replicas"] for each in job_sets]


def finish(cluster, how):
    path = cluster / "job_set.json"
    content = json.loads(path.read_text())
    content["status"] = {"conditions": [{"type": how, "status": "True"}]}
    path.write_text(json.dumps(content))


@pytest.mark.parametrize(
    ("said", "told"),
    [
        ("error: You must be logged in to the server (Unauthorized)", "You must be logged in to"),
        ('Error from server (Forbidden): nodes is forbidden: User "a" cannot list', "is forbidden"),
        ('error: the server doesn\'t have a resource type "jobsets"', "have a resource type"),
        ("[]", "kubectl's description of it is not in the expected JSON format"),
        ('{"items": null}', "kubectl's description of it is not in the expected JSON format"),
        ('{"items": [{}]}', "kubectl's description of it is not in the expected JSON format"),
    ],
)
def test_what_a_person_must_put_right(cluster, started, said, told):
    """Of a cluster whose JobSet is not running: it is not asked again."""
    kubectl = cluster / "bin" / "kubectl"
    end = "" if said.startswith(("[", "{")) else ">&2; exit 1"
    lines = kubectl.read_text().splitlines()
    lines.insert(1, f"if [ $1 = get ]; then printf '%s\\n' {shlex.quote(said)} {end}; exit; fi")
    kubectl.write_text("\n".join(lines))
    run = started()
    assert run.wait(60) == 2
    (line,) = run.stderr.read().splitlines()
    assert line.startswith("gke: error: ")
    assert told in line


def test_pods_are_not_deleted_with_their_checkpoints(cluster, started):
    """A folder in no volume, or in one that is the pod's, is deleted with the pod."""
    path = cluster / "job.yaml"
    content = path.read_text()
    for folder in ("/tmp/vit_10b", "/dev/shm/vit_10b"):
        path.write_text(content.replace("=/checkpoints/vit_10b", f"={folder}"))
        run = started()
        assert run.wait(60) == 2
        assert f"deleted with the checkpoints in --ckpt_dir {folder}: use" in run.stderr.read()


def test_fewer_slices_and_more(cluster, started):
    run = started("--elastic_wait", "2")
    wait_until(lambda: replicas(cluster) == [2])
    have(cluster, a=[True, True], b=[True, False])
    wait_until(lambda: replicas(cluster) == [2, 1])
    applied = json.loads((cluster / "applied").read_text().splitlines()[-1])
    pod = applied["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]
    assert {"name": "ELASTIC_SLICES", "value": "1:2"} in pod["containers"][0]["env"]
    have(cluster, a=[True, True], b=[True, True])
    wait_until(lambda: replicas(cluster) == [2, 1, 2])
    finish(cluster, "Completed")
    assert run.wait(30) == 0
    said = run.stderr.read()
    assert "started vit-10b on 2 of 2 slices" in said
    assert "from 2 to 1 of 2 slices: ending the JobSet" in said
    assert "from 1 to 2 of 2 slices" in said
    # The pod on the machine that was gone would never have ended.
    assert "force-deleting pods on lost nodes: vit-10b-b-1" in said
    assert "JobSet vit-10b has completed" in said


def test_fewer_than_the_least_wait(cluster, started):
    have(cluster, a=[True, False], b=[False, True])
    run = started("--elastic_wait", "0")
    wait_until(lambda: "--elastic requires 1: waiting" in run.stderr.readline())
    (cluster / "away").touch()  # the cluster does not answer: asked again
    wait_until(lambda: "does not respond, retrying: Unable to connect" in run.stderr.readline())
    (cluster / "away").unlink()
    assert not replicas(cluster)
    have(cluster, a=[True, False], b=[True, True])
    wait_until(lambda: replicas(cluster) == [1])


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_ends_the_run(number, code, cluster, started):
    run = started()
    wait_until(lambda: replicas(cluster) == [2])
    run.send_signal(number)
    assert run.wait(30) == code
    assert not (cluster / "job_set.json").exists()
    assert json.loads((cluster / "pods.json").read_text()) == []


def test_nohup_keeps_it_running(cluster, started):
    """Its SIGHUP would delete the JobSet."""
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # inherited
    try:
        run = started()
    finally:
        signal.signal(signal.SIGHUP, signal.SIG_DFL)
    wait_until(lambda: replicas(cluster) == [2])
    run.send_signal(signal.SIGHUP)
    finish(cluster, "Completed")
    assert run.wait(30) == 0


def test_a_run_is_followed_by_another_launcher(cluster, started):
    first = started()
    wait_until(lambda: replicas(cluster) == [2])
    first.kill()
    second = started()
    wait_until(lambda: "is already running, monitoring it" in second.stderr.readline())
    finish(cluster, "Failed")
    assert second.wait(30) == 1
    assert replicas(cluster) == [2]
    assert "has failed; before starting it again: kubectl delete" in second.stderr.read()


def test_a_job_set_that_is_deleted_by_others(cluster, started):
    run = started()
    wait_until(lambda: replicas(cluster) == [2])
    (cluster / "job_set.json").unlink()
    assert run.wait(30) == 1
    assert "error: JobSet vit-10b was deleted" in run.stderr.read()


# -- which slices can be used ----------------------------------------------------------


def node(name, pool, *, ready="True", cordoned=False):
    return {
        "metadata": {"name": name, "labels": {gke.POOL_LABEL: pool}},
        "spec": {"unschedulable": cordoned},
        "status": {"conditions": [{"type": "Ready", "status": ready}]},
    }


def test_what_runs_on_a_machine_that_is_only_cordoned_is_not_forgotten():
    assert gke.is_ready(node("a0", "a", cordoned=True))
    assert not gke.is_ready(node("a0", "a", ready="Unknown"))


def pod(node, job, *, phase="Running", tpus=True):
    limits = {gke.TPU: 4} if tpus else {"cpu": 1}
    return {
        "metadata": {"name": "p", "labels": {gke.JOB_SET_LABEL: job}},
        "spec": {"nodeName": node, "containers": [{"resources": {"limits": limits}}]},
        "status": {"phase": phase},
    }


@pytest.mark.parametrize(
    ("nodes", "pods", "usable"),
    [
        ([], [], 0),
        ([("a0", "a"), ("a1", "a"), ("b0", "b")], [], 1),
        ([("a0", "a"), ("a1", "a"), ("b0", "b"), ("b1", "b")], [], 2),
        ([("a0", "a"), ("a1", "a")], [pod("a0", "vit-10b")], 1),
        ([("a0", "a"), ("a1", "a")], [pod("a0", "another")], 0),
        ([("a0", "a"), ("a1", "a")], [pod("a0", "another", phase="Succeeded")], 1),
        ([("a0", "a"), ("a1", "a")], [pod("a0", "a-logger", tpus=False)], 1),
    ],
)
def test_usable_slices(nodes, pods, usable):
    job = gke.JobSet({}, "vit-10b", 2, 2, "", 0.0)
    assert gke.usable_slices(job, [node(*each) for each in nodes], pods) == usable
    for worse in ({"ready": "Unknown"}, {"cordoned": True}):
        changed = [node(*each, **worse) for each in nodes]
        assert gke.usable_slices(job, changed, pods) == 0


# -- mistakes --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("flags", "how", "words"),
    [
        ("--elastic 3", {}, "--elastic 3 must be between 1 and 2, the replicas in"),
        ("--elastic 1", {"replicas": 1}, "--elastic requires several slices; set replicas to 2"),
        ("--elastic 1 --elastic_poll 0", {}, "argument --elastic_poll: 0 must be at least 1"),
        ("", {}, "the following arguments are required: --elastic"),
    ],
)
def test_mistakes(flags, how, words, cluster, capsys):
    write_job_set(cluster, **how)
    assert gke.main([*flags.split(" "), str(cluster / "job.yaml")] if flags else ["f"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("gke: error: ")
    assert words in line
    assert not replicas(cluster)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("kind: Pod", "contains a Pod, not exactly one JobSet"),
        ("kind: JobSet", "is not like launch/gke.yaml: it must have one"),
        (None, "does not exist"),
    ],
)
def test_other_files(content, words, cluster, capsys):
    (cluster / "job.yaml").unlink()
    if content:
        (cluster / "job.yaml").write_text(content)
    assert gke.main(["--elastic", "1", str(cluster / "job.yaml")]) == 2
    assert words in capsys.readouterr().err
