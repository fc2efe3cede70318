"""Hosts of SLICES rehearsed TPU slices, each with a disk of its own, and who starts and ends them.

As launch.xla_dist does: if a host fails, the others are ended; the exit
code is then 1, else 0.
"""

import os
import sys
import tempfile
import time
from pathlib import Path

from tests.fakes.rehearsal.slice_ import Slice
from tests.support.rehearsed import Rehearsal

_GRACE_S = 1.0
"""For the others, to say why they end."""


def main(argv: list[str]) -> int:
    with tempfile.TemporaryDirectory() as folder:
        slices = int(os.environ["SLICES"])
        what = Slice("v5litepod-2", chips=(2, 1, 1), host=(1, 1, 1), slices=slices)
        pod = Rehearsal(what, Path(folder))
        program = ("-m", "tests.fakes.hosts_with_disks")
        hosts = pod.start(*argv, program=program, warm=False, output=None)
        try:
            while any(host.poll() is None for host in hosts):
                if any(host.poll() for host in hosts):
                    time.sleep(_GRACE_S)
                    return 1
                time.sleep(0.05)
            return int(any(host.returncode for host in hosts))
        finally:
            for host in hosts:
                host.kill()
                host.wait()
            pod.close()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
