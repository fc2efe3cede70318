"""Connects the processes that torchrun started, and runs a function with a backend in each."""

import gc
import os
import pkgutil
import socket
import sys
from collections.abc import Callable
from datetime import timedelta

import torch.distributed as dist
from torch.distributed import FileStore, PrefixStore, Store
from torch.distributed.device_mesh import DeviceMesh

from data.files import DataFolderError, temporary_folder
from models import timm_private
from torch_fsdp import devices
from torch_fsdp.devices import Device
from torch_fsdp.parallel_plan import TorchRun
from training import errors
from training.backend import Backend
from training.errors import UsageError, is_first_of_torchrun
from training.processes import rendezvous
from training.processes.exchange import silence_gloo


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
    device.start(tf32=run.backend_config.tf32, products=run.plan.products)
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
# Waits for the other processes in Python: ``init_process_group`` would wait silently in compiled
# code for 30 minutes and ignore Ctrl-C.

_LIMIT_SECONDS = 600
_STORE_TIMEOUT = timedelta(minutes=30)  # PyTorch's default, for later use by the process group


def choose_compile_cache() -> None:
    """Keep compiled code in this user's own folder, unless TORCHINDUCTOR_CACHE_DIR is set: by
    default PyTorch runs what it finds in a temporary folder that any user may have created. Raises
    UsageError."""
    if os.environ.get("TORCHINDUCTOR_CACHE_DIR"):
        return
    remedy = "remove it, or set TORCHINDUCTOR_CACHE_DIR to a folder of your own"
    try:
        own = temporary_folder(remedy=remedy)
    except DataFolderError as error:
        raise UsageError(str(error)) from None
    if own.exists():  # else nothing can be written there, as PyTorch will report
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(own / "torchinductor")


def join(rank: int, world_size: int, device: Device) -> Store:
    """Wait for all processes at MASTER_ADDR:MASTER_PORT, or on a single node in the file that
    launch/torchrun.sh keeps for them; return the store of this start.

    Exits with code 1 after JOIN_TIMEOUT seconds (default: 600; 0: never), so that launchers try
    again. Raises UsageError in all processes if only some have an accelerator: collectives would
    hang, and ``--fsdp auto`` might choose different forms.
    """
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    limit = int(os.environ.get("JOIN_TIMEOUT") or _LIMIT_SECONDS)
    store: Store | None = None
    reason = ""

    def say(text: str) -> None:
        if os.environ.get("LOCAL_RANK", "0") == "0":
            print(f"run_vit_training.py: rank {rank}: {text}", file=sys.stderr, flush=True)

    def missing() -> str:
        if store is None:
            return f"rank 0 at {address}:{port} ({reason})"
        return rendezvous.missing_members(store, "rank", world_size)

    wait = rendezvous.Wait(limit, say, missing)
    while True:
        if store is None:
            try:
                store, later = open_store(rank, address, port)
                register(store, rank, device)
            except OSError as error:
                reason = error.strerror or str(error)
        if store and store.add("count", 0) >= world_size:
            break
        if store and later.check(["count"]):
            say("other nodes have restarted their processes: exiting, to be restarted with them")
            sys.exit(1)
        try:
            wait.pause()
        except rendezvous.TimedOut as late:
            say(f"{late} did not join within {limit} s (JOIN_TIMEOUT): see the log of that node")
            sys.exit(1)

    if 0 < store.add("with", 0) < world_size:
        noun, command = store.get("accelerator").decode().split("/")
        host = store.get("host without").decode()
        raise UsageError(
            f"PyTorch finds no {noun} on {host}, unlike on other nodes: check {command} there, or "
            "start without that node",
            agreed=True,
        )
    return store


def open_store(rank: int, address: str, port: int) -> tuple[Store, Store]:
    """Return the stores of this start and of the next one. Raises OSError."""
    file = os.environ.get("RUN_STORE_FILE")
    by_agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    store: Store
    if file:
        store = FileStore(file)
        store.set_timeout(_STORE_TIMEOUT)
    else:
        is_server = rank == 0 and not by_agent
        listening = rendezvous.listen(address, port) if is_server else None
        store = rendezvous.connect(address, port, listening, _STORE_TIMEOUT)
    # torchrun keeps its store when it restarts processes (pytorch #135712), and the new processes
    # would read the addresses of the old ones, so each start has its own prefix. Without the
    # agent's store (TORCH_DISABLE_SHARE_RDZV_TCP_STORE), rank 0 serves a new store at each start,
    # and the nodes' restart counts may differ.
    is_kept = by_agent or file
    start = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) if is_kept else 0
    return PrefixStore(f"start_{start}", store), PrefixStore(f"start_{start + 1}", store)


def register(store: Store, rank: int, device: Device) -> None:
    """Enter this process in the store, and whether it has an accelerator."""
    if device.is_host:
        store.set("host without", socket.gethostname())
    else:
        store.add("with", 1)
        store.set("accelerator", f"{device.noun}/{device.status_command}")
    store.set(f"rank/{rank}", "")
    store.add("count", 1)
