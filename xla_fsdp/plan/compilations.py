"""What the TPU compiler says of a step: ``--compile_only`` in a process of its own, and kept.

A file of a folder holds one answer. Its name follows from all that the answer depends on: the
flags, what libtpu is told by the environment, the packages' versions, and the program's sources.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import signal
import subprocess
import sys
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, NoReturn

from data.config import DataConfig
from data.own_files import make_folder, replace_file
from training.errors import UsageError
from training.options.config import OptimizerConfig, RunConfig
from training.options.ema_config import EmaConfig
from training.plan.command_lines import ALWAYS, words_of
from xla_fsdp.compile_only.command import DOES_NOT_FIT
from xla_fsdp.config import XlaConfig
from xla_fsdp.plan.space import Candidate

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = ROOT / "run_vit_training.py"
_SOURCES = ("run_vit_training.py", "config_fields.py", "training", "models", "data", "xla_fsdp")
_PACKAGES = ("torch", "torch_xla", "libtpu", "jax", "jaxlib", "timm")
_VARIABLES = ("LIBTPU_INIT_ARGS", "XLA_FLAGS")
_USAGE = 2
"""The exit code of what the program, or the compiler, refuses."""


def compile_words(config: RunConfig, own: XlaConfig, candidate: Candidate) -> list[str]:
    """Return the flags of ``--compile_only`` for a candidate.

    Only those that the step depends on are there, so that other data, epochs or folders are
    answered from what is kept.
    """
    config, own = candidate.flags(config, own)
    data = DataConfig(
        batch_size=config.data.batch_size, grad_accum_steps=config.data.grad_accum_steps
    )
    given = config.optimizer
    optimizer = replace(
        OptimizerConfig(),
        optimizer=given.optimizer,
        clip_grad_norm=given.clip_grad_norm,
        optimizer_dtype=given.optimizer_dtype,
    )
    step = replace(
        RunConfig(),
        data=data,
        model=config.model,
        optimizer=optimizer,
        ema=replace(EmaConfig(), model_ema=config.ema.model_ema),
        sharding=config.sharding,
    )
    own = replace(own, compile_only=True, tpu_topology=candidate.topology.name)
    return words_of(step, own, without=("cpu_devices", "compile_cache_dir"), always=ALWAYS)


class Compilations:
    """The answers of the compiler, those of earlier runs among them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.asked = 0
        """How many steps were compiled, and not found in the folder."""

    def known(self, words: list[str]) -> dict[str, Any] | None:
        """Return the answer to these flags if it is kept."""
        path = self._path(words)
        try:
            return json.loads(path.read_text())["answer"]
        except (OSError, ValueError, KeyError, TypeError):  # none, or not written to its end
            return None

    def ask(self, words: list[str]) -> dict[str, Any]:
        """Return the report of ``--compile_only`` as a dictionary, or {"refused": why}.

        Raises UsageError if the program ends otherwise.
        """
        found = self.known(words)
        if found is not None:
            return found
        self.asked += 1
        code, printed, said = _run(words)
        if code in (0, DOES_NOT_FIT):
            answer = json.loads(printed.splitlines()[-1])
        elif code == _USAGE:
            answer = {"refused": said.strip().splitlines()[-1].partition("error: ")[2]}
        else:
            last = (said.strip().splitlines() or ["no word"])[-1]
            raise UsageError(
                f"--plan: a compilation ended with code {code} ({last[:200]}): {' '.join(words)}"
            )
        self._keep(words, answer)
        return answer

    def _keep(self, words: list[str], answer: dict[str, Any]) -> None:
        path = self._path(words)
        make_folder(path.parent)
        content = json.dumps({"flags": words, **_circumstances(), "answer": answer})
        replace_file(path, content.encode(), unfinished=str(os.getpid()))

    def _path(self, words: list[str]) -> Path:
        told = json.dumps([words, _circumstances()])
        return self.folder / f"{hashlib.sha256(told.encode()).hexdigest()[:24]}.json"


def _run(words: list[str]) -> tuple[int, str, str]:
    """Run ``--compile_only``; return its exit code and what it printed. It ends with this process.

    Compiling goes on in a child of the child, which takes gigabytes: whatever ends the waiting,
    such as Ctrl-C or SIGTERM, ends both.
    """
    signal.signal(signal.SIGTERM, _end)
    with subprocess.Popen(
        [sys.executable, str(PROGRAM), *words, "--json"],
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
    ) as started:
        try:
            printed, said = started.communicate()
        except BaseException:
            os.killpg(started.pid, signal.SIGKILL)
            raise
    return started.returncode, printed, said


def _end(number: int, _: object) -> NoReturn:
    raise SystemExit(128 + number)


def _circumstances() -> dict[str, Any]:
    variables = {name: os.environ.get(name, "") for name in _VARIABLES}
    return {"versions": _versions(), "sources": _hash_of_sources(), "environment": variables}


@functools.cache
def _versions() -> dict[str, str]:
    found = {}
    for name in _PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "none"
    return found


@functools.cache
def _hash_of_sources() -> str:
    """Return a hash of what traces and compiles a step; what plans has no part in that."""
    files = sorted(
        path
        for name in _SOURCES
        for path in ([ROOT / name] if name.endswith(".py") else (ROOT / name).rglob("*.py"))
        if path.parent.name != "plan"
    )
    total = hashlib.sha256()
    for path in files:
        total.update(f"{path.relative_to(ROOT)}\0".encode())
        total.update(path.read_bytes())
    return total.hexdigest()[:16]
