"""Checkpoints on the local disks of the hosts, with copies on peers: ``--local_ckpt_dir``.

A save is divided into parts, one for each process's share of the state. Each process writes its
part, including replicated state, into a folder of its host, as a self-contained checkpoint:

    part_<number>/step_<n>/   as in training/checkpoints/format.py
    part_<number>/step_<n>/part.json   the run, its start, and how the state was sharded
    .folder                   a random word that shows whether hosts see the same folder

With several replicas of the parameters, a part has the same number in each of them, so several
folders contain it. If only one folder contains it, its process sends a copy to its peer, a process
with another folder, which stores it under the same path. A step is whole if each of its parts is in
some folder. Only parts from the same start belong together.

    part      one process's share of the state; processes that hold the same shards have the same
    keeper    of a part in a folder: the one process that writes and reads it there
    holder    of a part of a save: a process whose folder has it, complete
    peer      of a process: the one with another folder that it sends a copy of its part to

Copies are sent over TCP connections between the hosts (training/processes/peers.py). Both ends know
a key, which the first process distributes through the run's process group. Received data is never
executed.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, wait
from dataclasses import asdict, dataclass, replace
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any

import xxhash

from data.files import parse_object, without_secrets
from training.checkpoints import format as checkpoint
from training.checkpoints.format import SavedRun
from training.checkpoints.inventory import folder_of, step_folders, step_of
from training.checkpoints.removal import clear, remove
from training.checkpoints.state import bytes_of, not_finite, write_state
from training.errors import UsageError
from training.files import check_own, in_background, random_word, read_object, replace_file
from training.processes import exchange, peers
from training.processes.ports import open_ports

if TYPE_CHECKING:
    from training.checkpoints.per_host import HostFolders
    from training.resolve import Run

RUN_ID_FILE = "run_id"
"""In --ckpt_dir: a random word that identifies the parts of the run, and a second word that changes
when the run goes back to an older checkpoint, so that earlier parts, on a host that comes back
later, are ignored."""
PART_FILE, _FOLDER_FILE = "part.json", ".folder"
_STAY = 2
"""The number of newest whole steps to keep."""
_ENDS_WITHIN_S = 30.0
"""How long the end of a run waits for parts that are still being written."""
_CHUNK = 1 << 24
_LONGEST_HEADER = 1 << 20
_PART_NAME = re.compile(r"part_(0|[1-9][0-9]*)")

_NOTHING_DONE: dict[str, Any] = {"bytes": 0, "write_s": 0.0, "copy_s": 0.0, "problem": None}
"""What a process has done for a save, in addition to its step."""

Save = tuple[int, str]
"""A step, and the random word of the start that saved it."""


@dataclass(frozen=True)
class Part:
    """A complete part of a save, in this process's folder."""

    part: int
    save: Save
    layout: str
    """A checksum of how the state was sharded."""
    run_id: str
    ckpt_dir: str
    lineage: str
    """The second word in RUN_ID_FILE, which changes when the run goes back."""


class LocalTier:
    """Saves and finds parts of checkpoints on the hosts' local disks, in all processes of a run.

    After the start it never ends training: failures are reported, and the next save is tried.
    """

    def __init__(
        self,
        run: Run,
        shards: tuple[int, ...],
        *,
        resumes: bool,
        hosts: HostFolders | None = None,
    ) -> None:
        """Open the folder of this process, and agree with the others on peers and a key. All
        processes must call this, with ``--ckpt_dir`` locked. ``shards``: the shards that this
        process holds. ``resumes``: the newest step of the run is to be resumed, which may be a
        local one. ``hosts``: if each has a ``--ckpt_dir`` of its own. Raises UsageError in all
        processes if a folder cannot be used."""
        assert run.config.checkpoints.local_ckpt_dir is not None
        self.folder = Path(run.config.checkpoints.local_ckpt_dir)
        self._resumes = resumes
        self._rank, self._count = exchange.rank(), exchange.count()
        # Processes that hold the same shards have the same part.
        shards_held = [tuple(held) for held in exchange.all_gather_object(shards)]
        parts = sorted(set(shards_held))
        self._held = [parts.index(held) for held in shards_held]
        """The part of each process."""
        self._part, self._parts = self._held[self._rank], len(parts)
        # Everything that determines what a part holds; the number of replicas does not.
        layout = [
            parts,
            asdict(replace(run.mesh, dcn=1)),
            type(run.backend_config).__name__,
            asdict(run.backend_config),
            asdict(replace(run.config.sharding, mesh_dcn=1)),
        ]
        as_text = json.dumps(layout, sort_keys=True, default=str)
        self._layout = xxhash.xxh3_128(as_text.encode()).hexdigest()
        self._ckpt_dir = without_secrets(str(run.ckpt_dir))
        self._lock = threading.Lock()
        self._have: set[tuple[int, Save]] = set()
        """The parts that this process knows to be complete in its folder, each with its save."""
        self._writing: Future[dict[str, Any]] | None = None

        # The random words of the run and of the folder; the first start creates them.
        self._id_file = run.ckpt_dir / RUN_ID_FILE
        self._keeps_id = hosts.is_first if hosts else self._rank == 0
        run_words = ""
        with exchange.raise_on_all_ranks():
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            check_own(self.folder, flag="--local_ckpt_dir")
            if self._keeps_id and self._id_file.exists():
                run_words = self._id_file.read_text(encoding="utf-8", errors="replace")
            self._folder = random_word(self.folder / _FOLDER_FILE)
        known = next(
            filter(None, exchange.all_gather_object(run_words)), ""
        )  # the first host may be new
        run_id, _, lineage = (known or exchange.broadcast_object(secrets.token_hex(8))).partition(
            " "
        )
        self._run_id, self._lineage = run_id, lineage
        with exchange.raise_on_all_ranks():
            if self._keeps_id and (not known or run_words != known):
                self._write_id()
        words = [secrets.token_hex(8), secrets.token_hex(32)]
        self._start_id, key = exchange.broadcast_object(words)
        self._key = bytes.fromhex(key)
        with exchange.raise_on_all_ranks():
            for part in self._complete_parts():
                if part.run_id != self._run_id:
                    raise UsageError(
                        f"--local_ckpt_dir {self.folder} contains a checkpoint of another run, of "
                        f"--ckpt_dir {part.ckpt_dir}: remove it, or use another folder"
                    )

        # Which process writes which part, and where its copy goes.
        places = exchange.all_gather_object([self._folder, socket.gethostname()])
        folders, self._hosts = [folder for folder, _ in places], [host for _, host in places]
        self._keepers: dict[tuple[str, int], int] = {}
        """By folder and part held by its processes: the first of these processes, which writes and
        reads it. For other parts in the folder, the folder's first process does that."""
        for process, (folder, number) in enumerate(zip(folders, self._held, strict=True)):
            self._keepers.setdefault((folder, number), process)
        self._first = folders.index(self._folder)  # of the processes that see this folder
        in_folders = sum(number == self._part for _, number in self._keepers)
        self._peer = _peer_of(self._rank, folders, run.mesh.dcn) if in_folders == 1 else None
        self.description = f"local checkpoints: in {self.folder}"
        """A line for the log."""
        if in_folders > 1:
            self.description += f", each part on {in_folders} hosts"
        elif self._peer is None:
            alone = "all processes see the same folder" if self._count > 1 else "one process"
            self.description += f", without copies ({alone})"
        else:
            peer = self._name(self._peer)
            self.description += f", with a copy of each part on a peer (for process 0: {peer})"

        # Accept copies in a thread, at addresses that all processes know.
        if self._count == 1:
            return
        listening, self._addresses = open_ports()
        peers.serve(listening, self._key, self._receive)

    def _name(self, process: int) -> str:
        return exchange.name(process, self._hosts[process])

    def _write_id(self) -> None:
        replace_file(self._id_file, f"{self._run_id} {self._lineage}".strip())

    # -- the folder --------------------------------------------------------------------------------

    def _path(self, part: int, step: int) -> Path:
        return folder_of(self.folder / f"part_{part}", step)

    def _steps(self) -> Iterator[tuple[int, Path]]:
        """Yield each part's number and the folder of each of its steps, complete or not."""
        for folder in sorted(self.folder.iterdir()):
            if name := _PART_NAME.fullmatch(folder.name):
                for path in step_folders(folder):
                    yield int(name[1]), path

    def _complete_parts(self) -> list[Part]:
        """Return the complete parts in the folder, judging by file names and sizes."""
        parts = []
        for number, path in self._steps():
            with contextlib.suppress(OSError, ValueError, KeyError):
                if checkpoint.read_manifest(path) is None or checkpoint.quick_problem(path):
                    continue
                content = read_object(path / PART_FILE)
                if content.get("part", number) != number:
                    continue  # a copy in another part's folder
                start_id, *others = (
                    str(content[key]) for key in ("start", "layout", "run", "ckpt_dir", "history")
                )
                parts.append(Part(number, (step_of(path), start_id), *others))
        return parts

    def _usable(self) -> list[Part]:
        """Return the complete parts in the folder that may be resumed; [] if it cannot be read."""
        try:
            return [part for part in self._complete_parts() if part.lineage == self._lineage]
        except OSError:
            return []

    def _remove(self, stays: Callable[[int], bool]) -> None:
        """Remove the steps in the folder for which ``stays`` is False; only the folder's first
        process does it. Raises OSError."""
        if self._first == self._rank:
            for _, path in self._steps():
                if not stays(step_of(path)):
                    remove(path)

    # -- at the start ------------------------------------------------------------------------------

    def resume(self, newer_than: int, *, verify: bool) -> tuple[SavedRun | None, list[str]]:
        """Find the newest whole step after ``newer_than``, and copy each process's part to it.

        Returns the run as recorded in this process's part, or None if no step is whole or may be
        resumed; and lines for the log. ``verify``: compare checksums. All processes must call this.
        """
        notes: list[str] = []
        rejected: set[tuple[int, Save]] = set()
        if not self._resumes:
            return None, notes
        while True:
            by_process = exchange.all_gather_object(
                [
                    [part.part, *part.save, part.layout]
                    for part in self._usable()
                    if self._keepers.get((self._folder, part.part), self._first) == self._rank
                    and (part.part, part.save) not in rejected
                ]
            )
            holders: dict[Save, dict[int, list[int]]] = {}
            has_other_layouts = False
            for process, parts in enumerate(by_process):
                for number, step, start_id, layout in parts:
                    if layout == self._layout:
                        save_holders = holders.setdefault((step, start_id), {})
                        save_holders.setdefault(number, []).append(process)
                    else:
                        has_other_layouts = True
            newer = sorted(save for save in holders if save[0] > newer_than)
            whole = [save for save in newer if holders[save].keys() >= set(range(self._parts))]
            if not whole:
                if newer:
                    lost = set(range(self._parts)) - holders[newer[-1]].keys()
                    names = ", ".join(self._name(self._held.index(part)) for part in sorted(lost))
                    notes.append(
                        f"warning: step {newer[-1][0]} in --local_ckpt_dir is incomplete: the "
                        f"parts of {names} and their copies are lost"
                    )
                elif has_other_layouts:
                    notes.append(
                        "note: ignoring parts in --local_ckpt_dir that were saved with another "
                        "mesh, sharding or number of processes per replica"
                    )
                elif not any(by_process) and newer_than >= 0:
                    notes.append("note: no host has any part of a checkpoint in --local_ckpt_dir")
                return None, notes
            save = whole[-1]
            problems = self._bring(save, holders[save], rejected, verify=verify)
            if not problems:
                break
            notes += [f"warning: {problem}" for problem in problems]
        with exchange.raise_on_all_ranks():
            saved = checkpoint.read_saved_run(self._path(self._part, save[0]))
        receivers = [
            keeper
            for (_, part), keeper in self._keepers.items()
            if keeper not in holders[save][part]
        ]
        if receivers:
            names = ", ".join(map(self._name, sorted(receivers)))
            notes.append(f"note: step {save[0]} was copied from peers to {names}")
        return replace(saved, is_part=True), notes

    def _bring(
        self,
        save: Save,
        holders: dict[int, list[int]],
        rejected: set[tuple[int, Save]],
        *,
        verify: bool,
    ) -> list[str]:
        """Copy to each folder the parts of a whole save that its processes hold; return the
        problems of all processes. Adds parts of this process that cannot be used to ``rejected``.
        ``holders``: by part, the processes that have it."""
        step = save[0]
        receivers: dict[int, list[int]] = {}
        """By part used from this process's folder: the processes that it is sent to."""
        for (_, part), keeper in self._keepers.items():
            is_there = keeper in holders[part]
            if (keeper if is_there else holders[part][0]) == self._rank:
                receivers.setdefault(part, []).extend([] if is_there else [keeper])
        problems: list[str] = []
        for part, processes in receivers.items():
            path = self._path(part, step)
            try:
                if verify and (problem := checkpoint.damage(path)):
                    raise ValueError(problem)
                checkpoint.read_saved_run(path)  # it may be a copy of another step
                for process in processes:
                    self._send(path, part, save, process)
            except (OSError, EOFError, ValueError, AuthenticationError, UsageError) as error:
                problems.append(
                    f"ignoring part {part} of step {step} in --local_ckpt_dir of "
                    f"{self._name(self._rank)}: {checkpoint.reason_of(error)}"
                )
                rejected.add((part, save))
        return [
            problem for reported in exchange.all_gather_object(problems) for problem in reported
        ]

    def forget(self, step: int | None) -> None:
        """Remove all parts except those of ``step``, which this start continues; None: all. If no
        step could be resumed, parts on absent hosts become invalid, too. All processes must call
        this before the first save."""
        if not self._resumes:
            self._lineage = exchange.broadcast_object(secrets.token_hex(4))
        with exchange.raise_on_all_ranks():
            if not self._resumes and self._keeps_id:
                self._write_id()
            self._remove(lambda number: number == step)
        with self._lock:
            self._have = {(part.part, part.save) for part in self._usable()}

    # -- while training ----------------------------------------------------------------------------

    def save(
        self, step: int, content: Callable[[], dict[str, Any]], say: Callable[[str], None]
    ) -> dict[str, float]:
        """Start writing this process's part of ``content()``, a copy of the state, and sending it.

        All processes must call this. If one is still writing the previous part, none writes this
        one. Returns, for the previous save, ``bytes`` of all parts and the seconds of the slowest
        process: ``write_s`` to its disk, ``copy_s`` to its peer; {} if there was none.
        """
        result = None
        is_busy = self._writing is not None and not self._writing.done()
        if self._writing is not None and not is_busy:
            result, self._writing = self._writing.result(), None
        with self._lock:
            have = sorted(self._have)
        by_process = exchange.all_gather_object([is_busy, result, have])

        # The outcome of the previous save.
        figures: dict[str, float] = {}
        results = [(process, done) for process, (_, done, _) in enumerate(by_process) if done]
        problems = [(process, done) for process, done in results if done["problem"]]
        for process, done in problems:
            say(
                f"warning: local checkpoint of step {done['step']} on {self._name(process)}: "
                f"{done['problem']}; training continues"
            )
        if results:
            figures["bytes"] = sum(done["bytes"] for _, done in results)
            for name in ("write_s", "copy_s"):
                figures[name] = max(done[name] for _, done in results)
        if results and not problems:
            copied = f", copied to peers in {figures['copy_s']:.2f} s" if figures["copy_s"] else ""
            say(
                f"local checkpoint of step {results[0][1]['step']}: "
                f"{figures['bytes'] / 2**20:,.2f} MiB, written in {figures['write_s']:.2f} s"
                f"{copied}"
            )

        # Forget everything before the oldest whole step to keep.
        parts: dict[Save, set[int]] = {}
        for *_, process_has in by_process:
            for part, (saved_step, start_id) in process_has:
                parts.setdefault((saved_step, start_id), set()).add(part)
        every_part = set(range(self._parts))
        whole = sorted(save[0] for save, numbers in parts.items() if numbers >= every_part)
        oldest = whole[-_STAY] if len(whole) >= _STAY else 0
        with self._lock:
            self._have = {(part, save) for part, save in self._have if save[0] >= oldest}

        if busy := [process for process, (is_busy, *_) in enumerate(by_process) if is_busy]:
            say(
                f"warning: no local checkpoint of step {step}: {self._name(busy[0])} is still "
                "writing the previous one"
            )
        elif self._keepers[self._folder, self._part] == self._rank:
            try:
                copy = content()
            except Exception as error:  # noqa: BLE001 - e.g. out of memory: the next save is tried
                self._writing = Future()
                problem = f"the state could not be copied ({checkpoint.reason_of(error)})"
                self._writing.set_result(_NOTHING_DONE | {"step": step, "problem": problem})
            else:
                self._writing = in_background(lambda: self._write(step, copy, oldest))
        return figures

    def _write(self, step: int, content: dict[str, Any], oldest: int) -> dict[str, Any]:
        """Write this process's part and send it, in a thread. Returns what ``save`` reports."""
        path, save, is_written = self._path(self._part, step), (step, self._start_id), False
        result = _NOTHING_DONE | {"step": step}
        try:
            began = time.perf_counter()
            self._remove(lambda number: number >= oldest)
            with self._lock:
                self._have.discard((self._part, save))
            if name := not_finite(content):
                raise ValueError(f"{name} is not finite")
            clear(path)
            files = write_state(content, path, no_dist=True)
            about = {
                "run": self._run_id,
                "ckpt_dir": self._ckpt_dir,
                "start": self._start_id,
                "layout": self._layout,
                "history": self._lineage,
                "part": self._part,
            }
            replace_file(path / PART_FILE, json.dumps(about))
            checkpoint.write_manifest(path, files | checkpoint.entries(path, [PART_FILE]))
            with self._lock:
                self._have.add((self._part, save))
            is_written, written = True, time.perf_counter()
            result |= {"bytes": bytes_of(content), "write_s": written - began}
            if self._peer is not None:
                self._send(path, self._part, save, self._peer)
                result["copy_s"] = time.perf_counter() - written
        except BaseException as error:  # noqa: BLE001 - as in saver.py: it may be DCP's own
            reason = checkpoint.reason_of(error)
            result["problem"] = f"no copy on {self._name(self._peer or 0)} ({reason})"
            if not is_written:
                result["problem"] = f"it could not be written to {self.folder} ({reason})"
                with contextlib.suppress(OSError):
                    remove(path)  # the next one may need the space
        return result

    def remove_all(self) -> None:
        """Remove all parts, unless one is still being written: the run's last checkpoint is in
        --ckpt_dir. All processes must call this."""
        if self._writing is not None:
            wait([self._writing], timeout=_ENDS_WITHIN_S)
        if all(exchange.all_gather_object(self._writing is None or self._writing.done())):
            with contextlib.suppress(OSError):
                self._remove(lambda number: False)

    # -- copies ------------------------------------------------------------------------------------

    def _send(self, path: Path, part: int, save: Save, to: int) -> None:
        """Send the files of a part to a process; return when it has verified and written them.
        Raises OSError, EOFError, ValueError (damaged) or AuthenticationError on failure."""
        files = checkpoint.read_manifest(path) or {}
        header = {"to": to, "part": part, "step": save[0], "start": save[1], "files": files}
        with peers.connect(self._addresses[to], self._key) as connection:
            connection.send_bytes(json.dumps(header).encode())
            for name in files:
                with open(path / name, "rb") as file:
                    while chunk := file.read(_CHUNK):
                        connection.send_bytes(chunk)
            if answer := connection.recv_bytes(_LONGEST_HEADER).decode(errors="replace"):
                raise OSError(answer)

    def _receive(self, connection: Connection) -> None:
        """Write a part that another process sends, and answer with the problem, if any."""
        with contextlib.suppress(Exception), connection:  # its sender reports what fails here
            header = parse_object(connection.recv_bytes(_LONGEST_HEADER))
            part, save = int(header["part"]), (int(header["step"]), str(header["start"]))
            files = checkpoint.manifest_entries(header["files"])
            if header["to"] != self._rank or part not in range(self._parts):
                return  # e.g. for another host behind the same address
            path, problem = self._path(part, save[0]), None
            with self._lock:
                self._have.discard((part, save))
            try:
                problem = _receive_files(connection, path, files)
                if problem is None:
                    checkpoint.write_manifest(path, files)
            except Exception as error:
                problem = checkpoint.reason_of(error)
                raise
            finally:
                if problem is None:
                    with self._lock:
                        self._have.add((part, save))
                else:
                    with contextlib.suppress(OSError):
                        remove(path)
            connection.send_bytes((problem or "").encode())


def _receive_files(
    connection: Connection, path: Path, files: dict[str, checkpoint.Entry]
) -> str | None:
    """Write files that arrive one after the other; return the problem, if any, after reading all of
    them. Raises EOFError or OSError if the connection ends early."""
    problem = None
    try:
        clear(path)
    except OSError as error:
        problem = checkpoint.reason_of(error)
    for name, (size, checksum) in files.items():
        digest, arrived = xxhash.xxh3_128(), 0
        while True:
            chunk = connection.recv_bytes(_CHUNK) if size else b""
            arrived += len(chunk)
            digest.update(chunk)
            try:
                if problem is None:
                    with open(path / name, "ab") as file:
                        file.write(chunk)
                        if arrived >= size:
                            file.flush()
                            os.fsync(file.fileno())
            except OSError as error:
                problem = checkpoint.reason_of(error)
            if arrived >= size:
                break
        if problem is None and (arrived, digest.hexdigest()) != (size, checksum):
            problem = f"the checksum of {name} differs"
    return problem


def _peer_of(rank: int, folders: Sequence[str], replicas: int) -> int | None:
    """Return the process that gets a copy of ``rank``'s part; None if there is no other folder.

    ``folders``: by process, a word that identifies its folder. With several replicas of the
    parameters, the peer is in the next replica, which is on another rack or slice; otherwise in the
    next folder.
    """
    hosts: dict[str, list[int]] = {}
    for process, word in enumerate(folders):
        hosts.setdefault(word, []).append(process)
    words = list(hosts)
    if len(words) == 1:
        return None
    distance = max(1, len(words) // replicas) if replicas > 1 else 1
    peers = hosts[words[(words.index(folders[rank]) + distance) % len(words)]]
    return peers[min(hosts[folders[rank]].index(rank), len(peers) - 1)]
