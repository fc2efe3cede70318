"""Cycles of Pallas kernels, as libtpu has scheduled their instructions.

The compiler writes an estimate of cycles into the configuration of each fusion, and none into that
of a kernel. But it tells, when asked to write down what it makes, how many bundles of instructions
a kernel's loop has; a core begins one a cycle. So each kernel is compiled once more by itself, and
the cycles of all its programs are written into its call, where those of a fusion are.

Not in it: what the matrix units still have to do when products are given to them faster than they
take them, and waiting for operands. So a kernel takes at least what its FLOPs and bytes do.
"""

from __future__ import annotations

import json
import os
import re
import tempfile
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path

import numpy as np

from xla_fsdp import jax_private
from xla_fsdp.attention.kernels import BRANCHES
from xla_fsdp.compile_only.devices import devices_of, prepare_jax
from xla_fsdp.compile_only.hlo import types_of
from xla_fsdp.compile_only.processes import libtpu_process
from xla_fsdp.compile_only.topologies import Topology
from xla_fsdp.libtpu_flags import VARIABLE

_CALL = re.compile(r"^.*custom_call_target=\"tpu_custom_call\".*$", re.M)
_OPERANDS = re.compile(r"operand_layout_constraints=\{(.*?\})\}, ")
_BUNDLES = re.compile(r"total scheduled bundles: +(\d+)\n(?:.*\n)*?.*custom-call")
_ROUNDS = re.compile(r", (\d+) /\* loop exit test")
_FILL = 2
"""Rounds of a kernel's loop in which operands only arrive, or results only leave."""
_TYPES = {"s32": "i32", "u32": "ui32", "pred": "i1"}


def write_kernel_cycles(hlo: str, topology: Topology, variables: dict[str, str]) -> str:
    """Return the module with the cycles of its kernels written into their calls.

    Of a kernel that does not compile alone nothing is written.
    """
    calls: dict[str, str] = {}
    for call in _CALL.findall(hlo):
        calls.setdefault(_config(call)["body"], call)
    cycles = _count(calls, topology, variables) if calls else {}

    def with_cycles(call: re.Match) -> str:
        found = cycles.get(_config(call[0])["body"])
        written = f'"estimated_cycles":"{found}","custom_call_config":'
        return call[0].replace('"custom_call_config":', written, 1) if found else call[0]

    return _CALL.sub(with_cycles, hlo)


def _config(call: str) -> dict:
    text = call[call.index("backend_config=") + len("backend_config=") :]
    return json.JSONDecoder().raw_decode(text)[0]["custom_call_config"]


def _count(calls: dict[str, str], topology: Topology, variables: dict[str, str]) -> dict[str, int]:
    """Return the cycles of each kernel by its code, compiling all in a process of their own."""
    cycles = {}
    with tempfile.TemporaryDirectory() as folder:
        written = f"--xla_jf_dump_to={folder} --xla_jf_dump_llo_text=true"
        flags = f"{variables.get(VARIABLE, '')} {written}"
        variables = {**variables, VARIABLE: flags}
        with libtpu_process(variables, os.devnull) as process:
            for body, call in calls.items():
                try:
                    process.submit(_compile, call, topology).result()
                except BrokenProcessPool:
                    break
                found = _read(Path(folder), BRANCHES.get(body, 1))
                if found:
                    cycles[body] = found
    return cycles


def _compile(call: str, topology: Topology) -> None:
    prepare_jax()
    result, _, rest = call.partition(" custom-call(")
    operands = _OPERANDS.search(rest)
    assert operands, call[:300]
    types = [
        [(_TYPES.get(kind, kind), sizes) for kind, sizes in types_of(text)]
        for text in (operands[1], result.partition(" = ")[2])
    ]
    config = json.dumps({"custom_call_config": _config(call)})
    module = jax_private.module_of_kernel(config, *types)
    device = devices_of(topology)[0]
    try:
        jax_private.compile_for([device], np.array([[device.id]]), module, [True] * len(types[1]))
    except Exception:  # noqa: BLE001 - jaxlib's own type, of no public name
        return  # no cycles are found then


def _read(folder: Path, branches: int) -> int | None:
    """Return the cycles that a compilation has left in the folder, which it empties."""
    bundles = rounds = None
    for file in sorted(folder.iterdir()):
        if file.name.endswith("final_bundles.txt"):
            text = file.read_text(errors="replace")
            count = _BUNDLES.search(text)
            if count and int(count[1]) > (bundles or 0):
                bundles = int(count[1])
            found = [int(each) for each in _ROUNDS.findall(text)]
            rounds = max([*found, rounds or 0]) or None
        file.unlink()
    if bundles is None:
        return None
    return round(bundles * max(1, (rounds or 1 + _FILL) - _FILL) / branches)
