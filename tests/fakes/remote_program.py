"""A program for the workers of a pod: says that it is ready, and notes signals in its home.

``save ARGUMENTS``: writes what arrived. ``wait``: until a signal comes. ``fail N``: the worker N
exits with 7. ``deaf N``: the worker N goes on after a signal.
"""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

HOME, RANK = Path(os.environ["HOME"]), os.environ["RANK"]
words = sys.argv[1:]


def note(number, frame):
    with (HOME / "received").open("a") as file:
        file.write(signal.Signals(number).name + "\n")
    if ["deaf", RANK] not in pairs:
        child.wait()  # which the signal reaches, too
        print("checkpoint written", flush=True)
        sys.exit(128 + number)


pairs = [words[i : i + 2] for i in range(len(words))]
if words[0] == "save":
    arrived = {"argv": words[1:], "env": dict(os.environ), "cwd": os.getcwd()}
    (HOME / "arrived").write_text(json.dumps(arrived))
    sys.exit(0)
child = subprocess.Popen(["sleep", "600"])
signal.signal(signal.SIGTERM, note)
signal.signal(signal.SIGINT, note)
print("ready", flush=True)
if ["fail", RANK] in pairs:
    others = [HOME.parent / f"worker_{i}" / "ready" for i in range(4) if str(i) != RANK]
    while not all(path.exists() for path in others):
        time.sleep(0.05)
    sys.exit(7)
(HOME / "ready").touch()
while True:
    time.sleep(1)
