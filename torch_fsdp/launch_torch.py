"""Join the processes that torchrun started, and run a function on a backend in each."""

from __future__ import annotations

import gc
import os
import socket
import sys
import time
from collections.abc import Callable
from datetime import timedelta

import torch.distributed as dist
from torch.distributed import PrefixStore, Store, TCPStore

from models import timm_private
from torch_fsdp import devices
from torch_fsdp.devices import Device
from torch_fsdp.resolve_torch import TorchRun
from training import errors
from training.backend import Backend
from training.errors import UsageError, is_first_of_torchrun
from training.processes.exchange import without_greetings

# ------------------------------------------------------------------------------------------------
# Waits for a run's other processes in Python: says who is missing, heeds signals, ends in time.
#
# ``init_process_group`` waits in compiled code: silent, deaf to Ctrl-C, for half an hour.


SAY_SECONDS = 10.0
_LIMIT_SECONDS = 600
_NAMES_SHOWN = 8
_STORE_TIMEOUT = timedelta(minutes=30)  # PyTorch's own for what the process group does with it


def join(rank: int, world_size: int) -> Store:
    """Meet all processes at MASTER_ADDR:MASTER_PORT; return the store of this start.

    Ends the process with code 1 after JOIN_TIMEOUT seconds (600; 0: never). torchrun keeps its
    store when it starts processes again (pytorch #135712), and what the ones before have left
    there would be taken for the new ones' addresses: each start has a part of its own.
    """
    start = _start()
    patience = _Patience(rank)
    store = _open_store(rank, world_size, patience)
    here = PrefixStore(f"start_{start}", store)
    later = PrefixStore(f"start_{start + 1}", store)
    here.set(f"rank_{rank}", socket.gethostname())
    here.add("count", 1)
    pause = 0.01
    while here.add("count", 0) < world_size:
        if later.check(["count"]):
            patience.end("other nodes have started their processes once more since: ending this")
        patience.wait(lambda: _missing(here, rank, world_size))
        time.sleep(pause)
        pause = min(2 * pause, 0.5)
    return here


def _start() -> int:
    """Return which start of the processes this is, by torchrun's own count.

    It is a node's count: where nodes start again together, as with launch/meet.py and --rdzv-id,
    they number their starts in common.
    """
    count = os.environ.get("RENDEZVOUS_ROUND") or os.environ.get("TORCHELASTIC_RESTART_COUNT")
    return int(count or 0)


def _open_store(rank: int, world_size: int, patience: _Patience) -> Store:
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    by_agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    serves = rank == 0 and not by_agent
    while not serves:  # TCPStore would wait for its server deaf to signals
        try:
            socket.create_connection((address, port), timeout=5).close()
            break
        except OSError as error:
            who = f"rank 0 at {address}:{port} ({error.strerror or error})"
            patience.wait(lambda who=who: who)  # type: ignore[misc]
            time.sleep(0.5)
    return TCPStore(
        address,
        port,
        world_size,
        is_master=serves,
        timeout=_STORE_TIMEOUT,
        wait_for_workers=False,
        multi_tenant=True,
    )


def _missing(store: Store, rank: int, world_size: int) -> str:
    """Return who has not come; "" where another process of this node is the one to tell."""
    first = rank - int(os.environ.get("LOCAL_RANK", "0"))
    if any(store.check([f"rank_{other}"]) for other in range(first, rank)):
        return ""
    ranks = [other for other in range(world_size) if not store.check([f"rank_{other}"])]
    more = len(ranks) - _NAMES_SHOWN
    names = ", ".join(map(str, ranks[:_NAMES_SHOWN])) + (f" and {more} more" if more > 0 else "")
    return f"rank{'s' * (len(ranks) > 1)} {names} of {world_size}"


class _Patience:
    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._limit = int(os.environ.get("JOIN_TIMEOUT") or _LIMIT_SECONDS)
        self._begin = self._said = time.monotonic()

    def wait(self, missing: Callable[[], str]) -> None:
        """Say now and then who is ``missing``, and end at the limit; call it repeatedly."""
        now = time.monotonic()
        if now - self._said >= SAY_SECONDS:
            self._said = now
            if who := missing():
                self._say(f"waiting for {who}, {now - self._begin:.0f} s so far")
        if self._limit and now - self._begin >= self._limit:
            who = missing()
            self.end(
                f"{who} did not come within {self._limit} s (JOIN_TIMEOUT): the log of "
                "their node says why"
                if who
                else ""
            )

    def end(self, reason: str) -> None:
        """End the process with code 1: a failure, not a mistake, so launchers try again."""
        if reason:
            self._say(reason)
        sys.exit(1)

    def _say(self, text: str) -> None:
        print(f"run_vit_training.py: rank {self._rank}: {text}", file=sys.stderr, flush=True)


# ------------------------------------------------------------------------------------------------


Body = Callable[[TorchRun, Backend], None]


def launch(body: Body, run: TorchRun) -> None:
    """Call ``body(run, backend)`` in this process, one of a process group's."""
    device = devices.choose()
    device.start()
    if is_first_of_torchrun():
        errors.warn_of_others(timm_private.WRITTEN_FOR, run.form.written_for)
    device.set_tf32(run.own.tf32)
    with without_greetings():
        _join(device)
        backend = run.form.open_backend(run, device)
    try:
        body(run, backend)
        dist.barrier()  # no process leaves while another still talks to it
    finally:
        # A gloo thread that lets go of a finished collective's tensors while Python shuts down
        # aborts the process. With all that uses its groups gone, its threads end here.
        backend.close()
        del backend
        gc.collect()
        dist.destroy_process_group()


def _join(device: Device) -> None:
    """Make the process group: torchrun tells rank and meeting point, a lone process needs none."""
    if "RANK" in os.environ:
        rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        store: dist.Store = join(rank, world_size)
        _check_devices_alike(store, world_size, device)
    else:
        rank, world_size, store = 0, 1, dist.HashStore()
    dist.init_process_group(
        device.collectives,
        store=store,
        rank=rank,
        world_size=world_size,
        device_id=device.bound_to,
    )


def _check_devices_alike(store: dist.Store, world_size: int, device: Device) -> None:
    """Compare the processes' kinds of device.

    Raises UsageError in all of them if some have an accelerator and some not: its collectives would
    wait for all, and without ``--fsdp`` they might even choose different forms of it.
    """
    if device.is_host:
        store.set("without", socket.gethostname())
    else:
        store.add("with", 1)
        store.set("accelerator", device.noun)
        store.set("status_command", device.status_command)
    if store.add("told_device", 1) == world_size:
        store.set("all_told_device", "")
    store.wait(["all_told_device"])
    if 0 < store.add("with", 0) < world_size:
        host, wanted, command = (
            store.get(key).decode() for key in ("without", "accelerator", "status_command")
        )
        raise UsageError(
            f"PyTorch finds no {wanted} on {host}, but on other nodes: see what {command} says "
            "there, or start without that node",
            agreed=True,
        )
