"""In place of gcloud: workers are folders of this machine, their commands local processes.

As over ssh, a worker's command is one string for a shell, is in a session of its own, and is told
nothing when the client dies: only its pipes break. STAND_IN is the folder with ``workers``, the
number of them; each call is noted in ``calls``, each worker has its home in ``worker_<i>``.
"""

import json
import os
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path

FOLDER = Path(os.environ["STAND_IN"])


def main(argv: list[str]) -> int:
    with (FOLDER / "calls").open("a") as calls:
        calls.write(json.dumps(argv) + "\n")
    words = [word for word in argv if not word.startswith("--")]
    flags = dict(word[2:].partition("=")[::2] for word in argv if word.startswith("--"))
    assert words[:2] == ["compute", "tpus"]
    if words[2] == "queued-resources":
        return queued_resource(words[3])
    if words[3] == "scp":
        shutil.copy(words[4], home_of(flags["worker"]))
        return 0
    return describe(words[4]) if words[3] == "describe" else ssh(words[4], flags)


def queued_resource(verb: str) -> int:
    """``states``: what describe says from the first time on, a line each, the last one for ever.

    Where that is ERROR, the call fails. ``creation``: what becomes of create after it was heard: it
    "fails", or it "hangs" until it is killed.
    """
    states = FOLDER / "states"
    if verb == "create":
        states.write_text((FOLDER / "states_to_come").read_text())
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


def home_of(worker: str) -> Path:
    home = FOLDER / f"worker_{worker}"
    home.mkdir(exist_ok=True)
    return home


def about(name: str, what: str, default: str) -> str:
    """The content of a file about a slice, or about the only one."""
    path = FOLDER / (what if name == "pod" else f"{what}_{name}")
    return path.read_text() if path.exists() else default


def first_worker(name: str) -> int:
    """The number of a slice's first worker."""
    return int(name.partition("-")[2] or 0) * int((FOLDER / "workers").read_text())


def describe(name: str) -> int:
    if name != "pod" and not name.startswith("pod-"):
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
    }
    print(json.dumps(node))
    return 0


def ssh(name: str, flags: dict[str, str]) -> int:
    if (state := about(name, "state", "READY")) != "READY":
        print(f"ERROR: (gcloud.compute.tpus.tpu-vm.ssh) {name} is {state}", file=sys.stderr)
        return 1
    worker = str(first_worker(name) + int(flags["worker"]))
    home = home_of(worker)
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
        ["/bin/sh", "-c", flags["command"]],
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
