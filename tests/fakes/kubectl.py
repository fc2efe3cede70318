"""In place of kubectl: a cluster that is a file, for launch/gke.py.

CLUSTER is a folder. ``nodes.json``, which a test writes, has the node pools: the machines of each,
and whether they are ready. As Kubernetes does, a JobSet has pods on as many whole pools as it has
replicas, or waits for them, and pods that are deleted end, unless their machine is gone. Where
there is a file ``completes``, what is applied has completed.
"""

import json
import os
import sys
from pathlib import Path

import yaml

FOLDER = Path(os.environ["CLUSTER"])
JOB_SET, PODS, NODES = (FOLDER / f"{name}.json" for name in ("job_set", "pods", "nodes"))
LABEL = "jobset.sigs.k8s.io/jobset-name"


def read(path: Path, default=None):
    return json.loads(path.read_text()) if path.exists() else default


def main(argv: list[str]) -> int:
    if (FOLDER / "away").exists():
        print("Unable to connect to the server: dial tcp: i/o timeout", file=sys.stderr)
        return 1
    words = [word for word in argv if not word.startswith("--")]
    flags = dict(word[2:].partition("=")[::2] for word in argv if word.startswith("--"))
    if words[0] == "create":
        try:
            print(json.dumps(yaml.safe_load(Path(flags["filename"]).read_text())))
        except OSError:
            print(f'error: the path "{flags["filename"]}" does not exist', file=sys.stderr)
            return 1
    elif words[0] == "apply":
        job_set = json.load(sys.stdin)
        if (FOLDER / "completes").exists():
            job_set["status"] = {"conditions": [{"type": "Completed", "status": "True"}]}
        JOB_SET.write_text(json.dumps(job_set))
        PODS.write_text(json.dumps(read(PODS, []) + pods_of(job_set)))
        with (FOLDER / "applied").open("a") as applied:
            applied.write(JOB_SET.read_text() + "\n")
    elif words[0] == "delete":
        delete(words[1:], flags)
    else:
        print(json.dumps({"kind": "List", "items": listed(words[1], flags)}))
    return 0


def delete(words: list[str], flags: dict[str, str]) -> None:
    ready, gone = {node for node, is_ready in machines() if is_ready}, set(words[1:])
    if words[0] == "pods":
        assert flags["grace-period"] == "0"
        assert "force" in flags
        left = [pod for pod in read(PODS, []) if pod["metadata"]["name"] not in gone]
    else:  # the JobSet: its pods end
        assert flags["wait"] == "false"
        assert flags["cascade"] == "foreground"
        JOB_SET.unlink(missing_ok=True)
        left = [pod for pod in read(PODS, []) if is_other(pod) or node_of(pod) not in ready]
    PODS.write_text(json.dumps(left))


def listed(kind: str, flags: dict[str, str]) -> list[dict]:
    job_set = read(JOB_SET)
    if kind == "jobsets.jobset.x-k8s.io":
        return [job_set] if job_set else []
    if kind == "nodes":
        assert "cloud.google.com/gke-tpu-topology=" in flags["selector"]
        return [
            {
                "metadata": {
                    "name": node,
                    "labels": {"cloud.google.com/gke-nodepool": node.rpartition("-")[0]},
                },
                "spec": {},
                "status": {"conditions": [{"type": "Ready", "status": str(is_ready)}]},
            }
            for node, is_ready in machines()
        ]
    return [pod for pod in read(PODS, []) if "selector" not in flags or not is_other(pod)]


def machines() -> list[tuple[str, bool]]:
    return [
        (f"{pool}-{number}", is_ready)
        for pool, ready in read(NODES).items()
        for number, is_ready in enumerate(ready)
    ]


def pods_of(job_set: dict) -> list[dict]:
    (job,) = job_set["spec"]["replicatedJobs"]
    taken = {node_of(pod).rpartition("-")[0] for pod in read(PODS, [])}
    pools = [pool for pool, ready in read(NODES).items() if all(ready) and pool not in taken]
    name = job_set["metadata"]["name"]
    return [
        {
            "metadata": {"name": f"{name}-{pool}-{number}", "labels": {LABEL: name}},
            "spec": {
                "nodeName": f"{pool}-{number}",
                "containers": [{"resources": {"limits": {"google.com/tpu": 4}}}],
            },
            "status": {"phase": "Running"},
        }
        for pool in pools[: job["replicas"]]
        for number in range(job["template"]["spec"]["parallelism"])
    ]


def is_other(pod: dict) -> bool:
    return LABEL not in pod["metadata"]["labels"]


def node_of(pod: dict) -> str:
    return pod["spec"]["nodeName"]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
