"""Run the tests of this folder on two machines' worth of Slurm; ``make test-slurm`` calls it.

Everything happens in namespaces of its own: processes, network, host names and mounts. So the
daemons use any port and any name, two "machines" of this one have each their own address, and
nothing is left when the tests end, however they end.
"""

import os
import shutil
import sys

PACKAGES = {
    "slurmctld": "slurmctld",
    "slurmd": "slurmd",
    "sbatch": "slurm-client",
    "munged": "munge",
    "ip": "iproute2",
    "unshare": "util-linux",
    "nsenter": "util-linux",
}
NAMESPACES = "--mount --net --uts --pid --fork --kill-child --mount-proc".split()


def missing() -> str:
    """Why the tests cannot be run here, in a line; else ""."""
    lacking = [program for program in PACKAGES if not shutil.which(program)]
    if lacking:
        return (
            f"{', '.join(lacking)} not found: "
            f"apt install {' '.join(sorted({PACKAGES[program] for program in lacking}))}"
        )
    if os.geteuid() != 0:
        return "slurmd and the namespaces need root: sudo make test-slurm"
    return ""


def main() -> int:
    os.environ["PATH"] += ":/usr/sbin:/sbin"  # where the daemons are; not in every user's PATH
    if why := missing():
        print(f"test-slurm: {why}", file=sys.stderr)
        return 2
    tests = [sys.executable, "-m", "pytest", "-m", "slurm", "tests/hardware/slurm", *sys.argv[1:]]
    # The shell is process 1 there and reaps what Slurm's daemons leave behind.
    init = ["bash", "-c", '"$@"; exit $?', "init", *tests]
    os.execvp("unshare", ["unshare", *NAMESPACES, *init])


if __name__ == "__main__":
    sys.exit(main())
