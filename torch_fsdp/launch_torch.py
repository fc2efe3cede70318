"""Connects the processes that torchrun started, and runs a function with a backend in each."""

import contextlib
import gc
import os
import pkgutil
import socket
import sys
import time
from collections.abc import Callable
from datetime import timedelta

import torch.distributed as dist
from torch.distributed import FileStore, PrefixStore, Store, TCPStore
from torch.distributed.device_mesh import DeviceMesh

from data.files import is_private, temporary_folder
from models import timm_private
from torch_fsdp import devices
from torch_fsdp.devices import Device
from torch_fsdp.parallel_plan import TorchRun
from training import errors
from training.backend import Backend
from training.errors import UsageError, is_first_of_torchrun
from training.processes.exchange import silence_gloo
from training.processes.store import listen_at


def launch(body: Callable[[TorchRun, Backend], None], run: TorchRun) -> None:
    """Call ``body(run, backend)`` in this process, either started by torchrun or the only one.

    Raises UsageError.
    """
    names = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    variables = {name: os.environ.get(name, "") for name in names}
    rank, world_size, address, port = variables.values()
    if not (rank or world_size):
        rank, world_size = "0", "1"
    elif not (
        all(number.isdecimal() for number in (rank, world_size, port))
        and address
        and int(rank) < int(world_size)
    ):
        values = ", ".join(f"{name}={value}" for name, value in variables.items())
        raise UsageError(
            f"invalid {values}: start with torchrun, which sets all four, or unset RANK and "
            "WORLD_SIZE to run one process"
        )
    if run.plan.compile != "none":
        choose_compile_cache()
    device = devices.choose(run.config.backend)
    device.start(tf32=run.backend_config.tf32)
    if is_first_of_torchrun():
        own = run.plan.implementation.written_for
        errors.warn_of_others(timm_private.WRITTEN_FOR, own, device.written_for)
    with silence_gloo():
        store: Store = dist.HashStore()
        if variables["RANK"] or world_size != "1":
            store = join(int(rank), int(world_size), device)
        dist.init_process_group(
            device.collectives,
            store=store,
            rank=int(rank),
            world_size=int(world_size),
            device_id=device.where if device.where.index is not None else None,
        )
        backend = pkgutil.resolve_name(run.plan.implementation.backend)(run, device)
    try:
        body(run, backend)
        dist.barrier()  # no process leaves while another still talks to it
    finally:
        # A gloo thread that frees the tensors of a finished collective during Python's shutdown
        # aborts the process. End these threads here, by freeing all users of their groups.
        backend.close()
        del backend
        gc.collect()
        # In PyTorch 2.14, DTensor caches hold meshes, and each mesh holds its groups.
        for thing in gc.get_objects():
            if type(thing) is DeviceMesh:
                getattr(thing, "_pg_registry", {}).clear()
        dist.destroy_process_group()


# ------------------------------------------------------------------------------------------------
# Waits for the other processes in Python: prints which are missing, handles signals, times out.
#
# ``init_process_group`` would wait silently in compiled code for 30 minutes and ignore Ctrl-C.

SAY_SECONDS = 10.0
_LIMIT_SECONDS = 600
_NAMES_SHOWN = 8
_STORE_TIMEOUT = timedelta(minutes=30)  # PyTorch's default, for later use by the process group


def choose_compile_cache() -> None:
    """Keep compiled code in this user's own folder, unless TORCHINDUCTOR_CACHE_DIR is set: by
    default PyTorch runs what it finds in a temporary folder that any user may have created. Raises
    UsageError."""
    if os.environ.get("TORCHINDUCTOR_CACHE_DIR"):
        return
    own = temporary_folder()
    with contextlib.suppress(OSError):
        own.mkdir(mode=0o700)
    if not os.path.lexists(own):
        return  # nothing can be written there, as PyTorch will report
    if not is_private(own):
        raise UsageError(
            f"{own} belongs to another user or can be written by any: remove it, or set "
            "TORCHINDUCTOR_CACHE_DIR to a folder of your own"
        )
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(own / "torchinductor")


def join(rank: int, world_size: int, device: Device) -> Store:
    """Wait for all processes at MASTER_ADDR:MASTER_PORT, or on a single node in the file that
    launch/torchrun.sh keeps for them; return the store of this start.

    Exits with code 1 after JOIN_TIMEOUT seconds (default: 600; 0: never), so that launchers try
    again. Raises UsageError in all processes if only some have an accelerator: collectives would
    hang, and ``--fsdp auto`` might choose different forms.
    """
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    file = os.environ.get("RUN_STORE_FILE")
    by_agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    limit = int(os.environ.get("JOIN_TIMEOUT") or _LIMIT_SECONDS)
    started = last_said = time.monotonic()
    pause = 0.01
    store: Store | None = None

    def say(text: str) -> None:
        if os.environ.get("LOCAL_RANK", "0") == "0":
            print(f"run_vit_training.py: rank {rank}: {text}", file=sys.stderr, flush=True)

    while True:
        reason = ""
        try:
            if store is None:
                if file:
                    store = FileStore(file)
                    store.set_timeout(_STORE_TIMEOUT)
                else:
                    is_server = rank == 0 and not by_agent
                    if not is_server:  # TCPStore would ignore signals while it waits for the server
                        socket.create_connection((address, port), timeout=5).close()
                    store = TCPStore(
                        address,
                        port,
                        world_size,
                        is_master=is_server,
                        timeout=_STORE_TIMEOUT,
                        wait_for_workers=False,
                        multi_tenant=True,
                        master_listen_fd=listen_at(address, port) if is_server else None,
                    )
                # torchrun keeps its store when it restarts processes (pytorch #135712), and the new
                # processes would read the addresses of the old ones, so each start has its own
                # prefix. Without the agent's store (TORCH_DISABLE_SHARE_RDZV_TCP_STORE), rank 0
                # serves a new store at each start, and the nodes' restart counts may differ.
                is_kept = by_agent or file
                start = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) if is_kept else 0
                later = PrefixStore(f"start_{start + 1}", store)
                store = PrefixStore(f"start_{start}", store)
                if device.is_host:
                    store.set("host without", socket.gethostname())
                else:
                    store.add("with", 1)
                    store.set("accelerator", f"{device.noun}/{device.status_command}")
                store.set(f"rank_{rank}", "")
                store.add("count", 1)
        except OSError as error:
            reason = error.strerror or str(error)
        if store and store.add("count", 0) >= world_size:
            break
        if store and later.check(["count"]):
            say("other nodes have restarted their processes: exiting, to be restarted with them")
            sys.exit(1)

        seconds = time.monotonic() - started
        is_late = 0 < limit <= seconds
        if is_late or time.monotonic() - last_said >= SAY_SECONDS:
            last_said = time.monotonic()
            missing = f"rank 0 at {address}:{port} ({reason})"
            if store:
                ranks = [str(n) for n in range(world_size) if not store.check([f"rank_{n}"])]
                names, more = ", ".join(ranks[:_NAMES_SHOWN]), len(ranks) - _NAMES_SHOWN
                names += f" and {more} more" if more > 0 else ""
                missing = f"rank{'s' * (len(ranks) > 1)} {names} of {world_size}"
            if is_late:
                say(
                    f"{missing} did not join within {limit} s (JOIN_TIMEOUT): see the log of that "
                    "node"
                )
                sys.exit(1)
            say(f"waiting for {missing}, {seconds:.0f} s so far")
        time.sleep(pause)
        pause = min(2 * pause, 0.5)

    if 0 < store.add("with", 0) < world_size:
        noun, command = store.get("accelerator").decode().split("/")
        host = store.get("host without").decode()
        raise UsageError(
            f"PyTorch finds no {noun} on {host}, unlike on other nodes: check {command} there, or "
            "start without that node",
            agreed=True,
        )
    return store
