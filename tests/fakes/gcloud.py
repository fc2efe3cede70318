"""In place of gcloud: workers are folders of this machine, their commands local processes.

As over ssh, a worker's command is one string for a shell, is in a session of its own, and is told
nothing when the client dies: only its pipes break. STAND_IN is the folder with ``workers``, the
number of them; each call is noted in ``calls``, each worker has its home in ``worker_<i>``.

Slices are of the Cloud TPU API or, where there is a file ``compute``, of Compute Engine: there a
slice is an instance group, whose VMs' names are in another order than their workers' numbers. What
``create`` makes there is in ``made``. With a file ``spot`` they are spot capacity.
"""

import json
import os
import sys
import time
from pathlib import Path

# It is called thousands of times: what only ssh and scp need, a quarter of its time, they import.

FOLDER = Path(os.environ["STAND_IN"])


def main(argv: list[str]) -> int:
    with (FOLDER / "calls").open("a") as calls:
        calls.write(json.dumps(argv) + "\n")
    words = [word for word in argv if not word.startswith("--")]
    flags = dict(word[2:].partition("=")[::2] for word in argv if word.startswith("--"))
    if words == ["config", "get-value", "compute/zone"]:
        print("us-central1-a")
        return 0
    assert words.pop(0) == "compute"
    match words:
        case ["tpus", "queued-resources", verb, *_]:
            return queued_resource(verb)
        case ["tpus", "tpu-vm", "describe", name]:
            return describe(name)
        case ["tpus", "tpu-vm", "ssh", name]:
            return ssh(name, int(flags["worker"]), flags["command"])
        case ["tpus", "tpu-vm", "scp", file, target]:
            return scp(file, target.rstrip(":"), int(flags["worker"]))
        case ["ssh", target]:
            return ssh(*worker_of(target), flags["command"])
        case ["scp", file, target]:
            return scp(file, *worker_of(target.rstrip(":")))
        case ["instance-groups", "managed", "list-instances", name]:
            return list_instances(name)
        case ["instances", "list"]:
            names = flags["filter"].removeprefix("name=(").rstrip(")").split()
            print(json.dumps([vm(*worker_of(name)) for name in names]))
            return 0
        case [*kind, "describe", name]:
            return describe_resource(kind[0], name)
        case [*kind, "create" | "workload-policy", name]:
            return create(kind[0], name, flags)
        case [*kind, "delete", name]:
            return delete(kind[0], name)
    raise AssertionError(argv)


def queued_resource(verb: str) -> int:
    """``states``: what describe says from the first time on, a line each, the last one for ever.

    Where that is ERROR, the call fails. ``creation``: what becomes of create after it was heard: it
    "fails", or it "hangs" until it is killed.
    """
    states = FOLDER / "states"
    if verb == "create":
        states.write_text((FOLDER / "states_to_come").read_text())
        (FOLDER / "state").unlink(missing_ok=True)  # of a slice of this name that was deleted
        creation = (FOLDER / "creation").read_text() if (FOLDER / "creation").exists() else ""
        if creation == "hangs":
            print("hanging", flush=True)
            time.sleep(600)
        return int(creation == "fails")
    if verb == "delete":
        states.unlink()
    elif not states.exists():
        print("ERROR: (gcloud.compute.tpus.queued-resources.describe) NOT_FOUND", file=sys.stderr)
        return 1
    else:
        now, *later = states.read_text().splitlines()
        states.write_text("\n".join(later or [now]))
        if now == "ERROR":
            print("ERROR: (gcloud) the server is unavailable", file=sys.stderr)
            return 1
        print(now)
    return 0


def home_of(name: str, worker: int) -> Path:
    home = FOLDER / f"worker_{first_worker(name) + worker}"
    home.mkdir(exist_ok=True)
    return home


def about(name: str, what: str, default: str) -> str:
    """The content of a file about a slice, or about the only one."""
    path = FOLDER / (what if name == "pod" else f"{what}_{name}")
    return path.read_text() if path.exists() else default


def first_worker(name: str) -> int:
    """The number of a slice's first worker."""
    return int(name.partition("-")[2] or 0) * int((FOLDER / "workers").read_text())


def exists(name: str) -> bool:
    return name == "pod" or name.startswith("pod-")


def describe(name: str) -> int:
    if (hiccups := FOLDER / "hiccups").exists():  # that many calls fail
        left = int(hiccups.read_text()) - 1
        hiccups.write_text(str(left)) if left else hiccups.unlink()
        print("ERROR: (gcloud) UNAVAILABLE: try again", file=sys.stderr)
        return 1
    if not exists(name) or ((FOLDER / "compute").exists() and not (FOLDER / "both").exists()):
        print(f"ERROR: (gcloud.compute.tpus.tpu-vm.describe) NOT_FOUND: no {name}", file=sys.stderr)
        print("- '@type': type.googleapis.com/google.rpc.ResourceInfo", file=sys.stderr)
        return 1
    count, first = int((FOLDER / "workers").read_text()), first_worker(name) + 1
    config = {"type": about(name, "type", "V5LITE_POD"), "topology": f"2x{count}"}  # 2 chips each
    node = {
        "name": name,
        "state": about(name, "state", "READY"),
        "acceleratorConfig": config,
        "networkEndpoints": [{"ipAddress": f"127.0.0.{first + index}"} for index in range(count)],
        "schedulingConfig": {"spot": (FOLDER / "spot").exists()},
    }
    print(json.dumps(node))
    return 0


def scp(file: str, name: str, number: int) -> int:
    import shutil

    shutil.copy(file, home_of(name, number))
    return 0


def ssh(name: str, number: int, command: str) -> int:
    import subprocess
    import threading

    if (state := about(name, "state", "READY")) != "READY":
        print(f"ERROR: (gcloud.compute.ssh) {name} is {state}", file=sys.stderr)
        return 1
    home = home_of(name, number)
    worker = home.name.removeprefix("worker_")
    (home / "client").write_text(str(os.getpid()))
    variables = os.environ | {
        "HOME": str(home),
        "TMPDIR": str(home),
        "RANK": worker,
        "WORLD_SIZE": (FOLDER / "workers").read_text(),
        "REHEARSAL_WORKER": worker,
    }
    pipe = subprocess.PIPE
    remote = subprocess.Popen(
        ["/bin/sh", "-c", command],
        cwd=home,
        env=variables,
        start_new_session=True,
        stdin=pipe,
        stdout=pipe,
        stderr=pipe,
    )
    threads = [
        threading.Thread(target=copy, args=arguments, daemon=True)
        for arguments in ((0, remote.stdin), (remote.stdout, 1), (remote.stderr, 2))
    ]
    for thread in threads:
        thread.start()
    for thread in threads[1:]:
        thread.join()
    return remote.wait()


# -- Compute Engine --------------------------------------------------------------------

VMS = "zyxwvutsrqponmlk"
"""By a worker's number, the end of its VM's name."""
PLACE = "https://www.googleapis.com/compute/v1/projects/none/zones/here/instances"


def worker_of(vm: str) -> tuple[str, int]:
    """The slice of a VM, and the worker's number."""
    if is_single(vm):
        return vm, 0
    name, _, end = vm.rpartition("-vm")
    return name, VMS.index(end)


def vm(name: str, worker: int) -> dict:
    count, number = int((FOLDER / "workers").read_text()), first_worker(name) + worker
    number += int(about(name, "first_address", "1"))
    tpu_env = {
        "TPU_ACCELERATOR_TYPE": about(name, "type", "V5LITE_POD"),
        "TOPOLOGY": about(name, "topology", f"2x{count}"),
        "TPU_WORKER_ID": str(worker),
    }
    metadata = {
        "tpu-env": "".join(f"{key}: '{value}'\n" for key, value in tpu_env.items()),
        "agent-worker-number": str(worker),
    }
    if (instead := FOLDER / "metadata").exists():
        metadata = json.loads(instead.read_text())
    vm_name = name if is_single(name) else f"{name}-vm{VMS[worker]}"
    return {
        "name": vm_name,
        "selfLink": f"{PLACE}/{vm_name}",
        "status": "RUNNING",
        "networkInterfaces": [{"networkIP": f"127.0.0.{number}"}],
        "scheduling": {"provisioningModel": "SPOT" if (FOLDER / "spot").exists() else "STANDARD"},
        "metadata": {"items": [{"key": key, "value": value} for key, value in metadata.items()]},
    }


def is_group() -> bool:
    """Whether slices are instance groups: with a file ``vm`` they are VMs of this name."""
    return (FOLDER / "compute").exists() and not (FOLDER / "vm").exists()


def is_single(vm: str) -> bool:
    return (FOLDER / "vm").exists() or made("instances", vm).exists()


def not_found(what: str) -> int:
    print("ERROR: (gcloud.compute.describe) Could not fetch resource:", file=sys.stderr)
    print(f" - The resource '{what}' was not found", file=sys.stderr)
    return 1


def made(kind: str, name: str) -> Path:
    return FOLDER / "made" / f"{kind}_{name}"


def describe_resource(kind: str, name: str) -> int:
    path = made(kind, name)
    if path.exists():
        content = json.loads(path.read_text())
        if kind == "instances":  # it runs from the third time on
            next_status = {"PENDING": "STAGING"}.get(content["status"], "RUNNING")
            path.write_text(json.dumps(content | {"status": next_status}))
    elif kind == "instances" and (FOLDER / "vm").exists():
        content = vm(name, 0)
    elif kind == "instance-groups" and exists(name) and is_group():
        content = json.loads(about(name, "group", "{}")) or {
            "targetSize": int((FOLDER / "workers").read_text()),
            "selfLink": f"https://{kind}/{name}",
            "resourcePolicies": {"workloadPolicy": "https://policies/one"},
        }
    else:
        return not_found(f"{kind}/{name}")
    print(json.dumps(content))
    return 0


def list_instances(name: str) -> int:
    state = about(name, "state", "READY")
    status = {"READY": "RUNNING"}.get(state, state)
    members = [
        {
            "instance": f"{PLACE}/{name}-vm{VMS[worker]}",
            "instanceStatus": status,
            "currentAction": "NONE" if status == "RUNNING" else "CREATING",
        }
        for worker in reversed(range(int((FOLDER / "workers").read_text())))
    ]
    print(json.dumps(members))
    return 0


def create(kind: str, name: str, flags: dict[str, str]) -> int:
    """``creation``: what becomes of the group after it was asked for: it "fails", or it "hangs"
    until it is killed; ``refused_KIND``: what create of such a resource says in place of that;
    ``state_to_come``: the state of the VMs at first."""
    if (refusal := FOLDER / f"refused_{kind}").exists():
        print(refusal.read_text(), file=sys.stderr)
        return 1
    content: dict = {"name": name, "selfLink": f"https://{kind}/{name}", "flags": flags}
    if kind == "resource-policies":
        content["workloadPolicy"] = {"acceleratorTopology": flags["accelerator-topology"]}
    elif kind == "instance-groups":
        policy = {"workloadPolicy": flags["workload-policy"]} if "workload-policy" in flags else {}
        content |= {"targetSize": int(flags["size"]), "resourcePolicies": policy}
        what = "state" if name == "pod" else f"state_{name}"
        (FOLDER / what).unlink(missing_ok=True)
        if (FOLDER / "state_to_come").exists():
            (FOLDER / what).write_text((FOLDER / "state_to_come").read_text())
    made(kind, name).parent.mkdir(exist_ok=True)
    made(kind, name).touch()
    if kind == "instances":
        content |= vm(name, 0) | {"machineType": f"https://{flags['machine-type']}"}
        content["status"] = "PENDING"
    made(kind, name).write_text(json.dumps(content))
    creation = (FOLDER / "creation").read_text() if (FOLDER / "creation").exists() else ""
    if kind == "instance-groups" and creation == "hangs":
        print("hanging", flush=True)
        time.sleep(600)
    return int(kind == "instance-groups" and creation == "fails")


def delete(kind: str, name: str) -> int:
    if not made(kind, name).exists():
        return not_found(f"{kind}/{name}")
    if (FOLDER / f"stays_{kind}").exists():
        print("ERROR: (gcloud.compute.delete) Some requests did not succeed:", file=sys.stderr)
        print(" - The service is unavailable", file=sys.stderr)
        return 1
    made(kind, name).unlink()
    return 0


def copy(source, target) -> None:
    numbers = [end if isinstance(end, int) else end.fileno() for end in (source, target)]
    while data := os.read(numbers[0], 65536):
        os.write(numbers[1], data)
    if not isinstance(target, int):
        target.close()


if __name__ == "__main__":
    code = main(sys.argv[1:])
    sys.stdout.flush()
    os._exit(code)
