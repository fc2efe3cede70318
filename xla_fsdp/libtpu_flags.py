"""``LIBTPU_INIT_ARGS``, which libtpu reads when it starts: the user's, torch_xla's, and our own."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from training.errors import UsageError
from xla_fsdp import torch_xla_private

VARIABLE = "LIBTPU_INIT_ARGS"

_OURS = {
    # Without it v4 and v5p gather weights by all-reduces of zero-padded whole ones. (torch_xla 2.9
    # sets it, too.)
    "xla_tpu_prefer_async_allgather_to_allreduce": "true",
    # Never a product in as many pieces as devices exchange: each reads its other side from HBM
    # anew, with --mesh_tensor as much as all the rest of the step.
    "xla_jf_spmd_threshold_for_windowed_einsum_mib": "1000000",
}
_NOT_ON_V4 = {
    # Vector memory that a fusion may take, twice libtpu's own limit: products then have larger
    # tiles (docs/tpu_speed.md). It is half of what a v5p has, a quarter of v5e's and v6e's.
    "xla_tpu_scoped_vmem_limit_kib": "32768",
    # Whole gradients are reduced while the next ones are computed, not in between. For v4 the
    # compiler takes many times as long with these (libtpu 0.0.21).
    "xla_enable_async_all_reduce": "true",
    "xla_tpu_enable_async_collective_fusion_fuse_all_reduce": "true",
}
_START = Path(__file__).with_name("libtpu_start.py")
_START_SECONDS = 60


def with_ours(given: str, generation: int) -> str:
    """Return the flags that the user and torch_xla give libtpu, and our own where they do not."""
    ours = _OURS | ({} if generation == 4 else _NOT_ON_V4)
    named = {flag.lstrip("-").partition("=")[0] for flag in given.split()}
    return " ".join(
        [
            *given.split(),
            *(f"--{name}={value}" for name, value in ours.items() if name not in named),
        ]
    )


def set_for_this_tpu() -> None:
    """Add our own flags: after torch_xla was imported, which adds its own, before libtpu starts."""
    _set(torch_xla_private.tpu_generation())


def _set(generation: int) -> None:
    os.environ[VARIABLE] = with_ours(os.environ.get(VARIABLE, ""), generation)


def as_on_a_tpu(generation: int, given: str) -> dict[str, str]:
    """Return the variables of the environment that a run on such a TPU sets for libtpu.

    They are those of torch_xla's own function, made to believe that there is one, then ours.
    ``given`` is the value that the user has set.
    """
    import torch_xla  # noqa: F401 - sets its own when it is imported, too

    with _put_back():
        before = dict(os.environ)
        os.environ[VARIABLE] = given
        torch_xla_private.set_libtpu_defaults(generation)
        _set(generation)
        return {key: value for key, value in os.environ.items() if before.get(key) != value}


@contextmanager
def _put_back() -> Iterator[None]:
    variables = dict(os.environ)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(variables)


def check() -> None:
    """Raise UsageError for flags that libtpu would end the process for in which it starts.

    So it is started in another process first, which takes no chip.
    """
    skip = {"TPU_SKIP_MDS_QUERY": "1", "ALLOW_MULTIPLE_LIBTPU_LOAD": "1"}
    try:
        done = subprocess.run(
            [sys.executable, "-P", str(_START)],
            env={**os.environ, **skip},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_START_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return  # the run itself will show what is wrong
    if done.returncode:
        raise_if_refused(done.stderr)


def raise_if_refused(complaints: str) -> None:
    """Raise UsageError if it was the variable that libtpu ended a process for."""
    refused = re.findall(
        r"^ERROR: ((?:Unknown command line flag|Illegal value|Missing value).*)", complaints, re.M
    )
    if refused:
        reasons = "; ".join(line.strip().rstrip(".;") for line in refused)
        raise UsageError(f"libtpu refuses {VARIABLE} ({reasons}): correct or unset it")
