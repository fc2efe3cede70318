"""Start the real command line on the hosts of a TPU slice that tests/fakes/rehearsal emulates."""

import itertools
import json
import subprocess
import sys
from pathlib import Path

import torch.distributed as dist

from tests.fakes.pod import wait_until
from tests.fakes.rehearsal.slice_ import MetadataServer, Slice, describe
from tests.support.cli import ROOT, WARM_PYTHON, Result, environment, tiny, warm_python
from tests.support.launching import free_port
from tests.support.running import running_with

LIMIT = 240
_starts = itertools.count()

NO_KERNELS = ("--attention", "sdpa")


class Rehearsal:
    """A slice, its metadata servers, and what its hosts exchange."""

    def __init__(self, what: Slice, folder: Path) -> None:
        self.slice = what
        self._servers = [MetadataServer(what.metadata(worker)) for worker in range(what.hosts)]
        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        ports = [server.port for server in self._servers]
        self.description = describe(what, folder, ports, self._store.port)

    def close(self) -> None:
        for server in self._servers:
            server.close()

    def variables(self) -> dict[str, str]:
        """The same for all hosts of one start."""
        self.started = f"{next(_starts)}"
        return {
            "PYTHONPATH": str(ROOT / "tests" / "fakes" / "rehearsal"),
            "REHEARSAL": str(self.description),
            "REHEARSAL_START": self.started,
            "MASTER_PORT": str(free_port()),
        }

    def programs(self) -> list[dict[str, int]]:
        """How many programs each host of the last start has run, and compiled."""
        notes = self.description.parent / f"programs_{self.started}"
        return [json.loads(line) for line in notes.read_text().splitlines()]

    def left_running(self) -> list[str]:
        """Commands of processes that came from this slice's hosts, wherever they are now."""
        return [" ".join(each.words) for each in running_with(f"REHEARSAL={self.description}")]

    def start(
        self,
        *words: object,
        program: tuple[str, ...] = ("run_vit_training.py",),
        warm: bool = True,
        own: dict[int, list[str]] | None = None,
        output: int | None = subprocess.PIPE,
        **more: str,
    ) -> list[subprocess.Popen[str]]:
        """The program with these words on every host, by worker number; ``own``: further ones of a
        worker. Attention is PyTorch's: what has no TPU cannot run a TPU's kernels."""
        words = (*words, *NO_KERNELS)
        variables, python = environment() | self.variables() | more, []
        del variables["PJRT_DEVICE"]  # the program finds the chips
        # As the program has XLA compile for a CPU: it takes this one for a TPU.
        variables["XLA_FLAGS"] += " --xla_cpu_use_fusion_emitters=false"
        if warm:
            python, variables["WARM_PYTHON"] = [WARM_PYTHON], warm_python()
        return [
            subprocess.Popen(
                [sys.executable, *python, *program, *map(str, words), *(own or {}).get(worker, [])],
                cwd=ROOT,
                env=variables | {"REHEARSAL_WORKER": str(worker)},
                text=True,
                stdout=output,
                stderr=output,
            )
            for worker in range(self.slice.hosts)
        ]

    def train(self, ckpt_dir: Path, *flags: str, warm: bool = True) -> Result:
        """As ``tests.support.cli.train_tiny``, on all hosts. Returns process 0's output."""
        said = all_ended(self.start(*tiny(ckpt_dir), *flags, warm=warm))
        wait_until(lambda: not self.left_running())
        programs = self.programs()
        assert len(programs) == self.slice.hosts
        assert all(each == programs[0] for each in programs)
        return Result(ckpt_dir, *said[0])


def all_ended(hosts: list[subprocess.Popen[str]], code: int = 0) -> list[tuple[str, str]]:
    """What they printed, process 0's first; each must have ended with the code."""
    try:
        said = [host.communicate(timeout=LIMIT) for host in hosts]
    finally:
        for host in hosts:
            host.kill()
    told = "\n".join(f"worker {n}:\n{out}\n{err}" for n, (out, err) in enumerate(said))
    assert [host.returncode for host in hosts] == [code] * len(hosts), told
    return said[::-1]
