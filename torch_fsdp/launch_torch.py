"""Connect the processes that torchrun started, and run a function on a backend in each."""

import gc
import os
import socket
import sys
import time
from collections.abc import Callable
from datetime import timedelta

import torch.distributed as dist
from torch.distributed import PrefixStore, Store, TCPStore
from torch.distributed.device_mesh import DeviceMesh

from models import timm_private
from torch_fsdp import devices
from torch_fsdp.parallel_plan import TorchRun
from training import errors
from training.backend import Backend
from training.errors import UsageError, is_first_of_torchrun
from training.processes.exchange import silence_gloo


def launch(body: Callable[[TorchRun, Backend], None], run: TorchRun) -> None:
    """Call ``body(run, backend)`` in this process, one of those that torchrun started, or alone.

    Raises UsageError in all processes if some have an accelerator and some not. Collectives would
    wait for all, and ``--fsdp auto`` might even choose different forms.
    """
    rank, world_size = _started_as()
    device = devices.choose(run.config.backend)
    device.start(tf32=run.backend_config.tf32)
    if is_first_of_torchrun():
        errors.warn_of_others(timm_private.WRITTEN_FOR, run.form.written_for, device.written_for)
    with silence_gloo():
        store: Store = dist.HashStore()
        if world_size > 1 or os.environ.get("RANK"):
            store = join(rank, world_size)
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
                keys = ("without", "accelerator", "status_command")
                host, wanted, command = (store.get(key).decode() for key in keys)
                raise UsageError(
                    f"PyTorch finds no {wanted} on {host}, but on other nodes: see what {command} "
                    "says there, or start without that node",
                    agreed=True,
                )
        dist.init_process_group(
            device.collectives,
            store=store,
            rank=rank,
            world_size=world_size,
            device_id=device.bound_to,
        )
        backend = run.form.open_backend(run, device)
    try:
        body(run, backend)
        dist.barrier()  # no process leaves while another still talks to it
    finally:
        # A gloo thread that frees a finished collective's tensors while Python shuts down aborts
        # the process. With all users of its groups gone, its threads end here.
        backend.close()
        del backend
        gc.collect()
        # PyTorch 2.14 has caches of DTensor that hold meshes, and each mesh holds its groups.
        for each in gc.get_objects():
            if type(each) is DeviceMesh:
                getattr(each, "_pg_registry", {}).clear()
        dist.destroy_process_group()


def _started_as() -> tuple[int, int]:
    """Return the rank of this process and the number of processes, as torchrun has set them.

    Raises UsageError if something else has set a part of that.
    """
    needed = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    given = {name: os.environ.get(name, "") for name in needed}
    rank, world_size, address, port = given.values()
    if not (rank or world_size):
        return 0, 1
    numbers = all(each.isdecimal() for each in (rank, world_size, port))
    if not (numbers and address and int(rank) < int(world_size)):
        found = ", ".join(f"{name}={value}" for name, value in given.items())
        raise UsageError(
            f"{found}: torchrun sets all four; for one process unset RANK and WORLD_SIZE"
        )
    return int(rank), int(world_size)


# ------------------------------------------------------------------------------------------------
# Waiting for the other processes in Python: prints who is missing, obeys signals, and ends in time.
#
# ``init_process_group`` waits in compiled code: silent, deaf to Ctrl-C, for half an hour.

SAY_SECONDS = 10.0
_LIMIT_SECONDS = 600
_NAMES_SHOWN = 8
_STORE_TIMEOUT = timedelta(minutes=30)  # PyTorch's own for what the process group does with it


def join(rank: int, world_size: int) -> Store:
    """Wait for all processes at MASTER_ADDR:MASTER_PORT; return the store of this start.

    Ends the process with code 1 after JOIN_TIMEOUT seconds (600; 0: never). torchrun keeps its
    store when it restarts processes (pytorch #135712), and the new ones would read the addresses of
    the old ones there: so each start has a prefix of its own.
    """
    began = time.monotonic()
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    by_agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    serves, why_not = rank == 0 and not by_agent, ""

    def answers() -> bool:
        nonlocal why_not
        try:
            socket.create_connection((address, port), timeout=5).close()
        except OSError as error:
            why_not = error.strerror or str(error)
            return False
        return True

    if not serves:  # TCPStore would wait for its server deaf to signals
        _wait_until(answers, lambda: f"rank 0 at {address}:{port} ({why_not})", rank, began)
    store = TCPStore(
        address,
        port,
        world_size,
        is_master=serves,
        timeout=_STORE_TIMEOUT,
        wait_for_workers=False,
        multi_tenant=True,
    )
    # Without the agent's store (TORCH_DISABLE_SHARE_RDZV_TCP_STORE) rank 0 serves a new one at each
    # start, and the nodes' restart counts may differ.
    start = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) if by_agent else 0
    here, later = (PrefixStore(f"start_{number}", store) for number in (start, start + 1))
    here.set(f"rank_{rank}", socket.gethostname())
    here.add("count", 1)

    def all_are_here() -> bool:
        if here.add("count", 0) >= world_size:
            return True
        if later.check(["count"]):
            _say(rank, "other nodes have started their processes once more since: ending this")
            sys.exit(1)
        return False

    def missing() -> str:
        first = rank - int(os.environ.get("LOCAL_RANK", "0"))
        if any(here.check([f"rank_{other}"]) for other in range(first, rank)):
            return ""  # another process of this node says it
        ranks = [str(other) for other in range(world_size) if not here.check([f"rank_{other}"])]
        names, more = ", ".join(ranks[:_NAMES_SHOWN]), len(ranks) - _NAMES_SHOWN
        names += f" and {more} more" if more > 0 else ""
        return f"rank{'s' * (len(ranks) > 1)} {names} of {world_size}"

    _wait_until(all_are_here, missing, rank, began)
    return here


def _wait_until(
    arrived: Callable[[], bool], missing: Callable[[], str], rank: int, began: float
) -> None:
    """Print now and then who is ``missing``, until all have ``arrived``.

    Ends the process at the limit, counted from ``began``: by a failure, not as for a wrong flag, so
    launchers try again.
    """
    limit, pause = int(os.environ.get("JOIN_TIMEOUT") or _LIMIT_SECONDS), 0.01
    said = time.monotonic() - began
    while not arrived():
        seconds = time.monotonic() - began
        if limit and seconds >= limit:
            if who := missing():
                _say(
                    rank,
                    f"{who} did not come within {limit} s (JOIN_TIMEOUT): the log of their node "
                    "says why",
                )
            sys.exit(1)
        if seconds - said >= SAY_SECONDS:
            said = seconds
            if who := missing():
                _say(rank, f"waiting for {who}, {seconds:.0f} s so far")
        time.sleep(pause)
        pause = min(2 * pause, 0.5)


def _say(rank: int, text: str) -> None:
    print(f"run_vit_training.py: rank {rank}: {text}", file=sys.stderr, flush=True)
