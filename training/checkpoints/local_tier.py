"""Checkpoints on each host's own disk, with copies at peers: ``--local_ckpt_dir``.

A save is divided into parts: what one process holds of the state. Each process writes its part,
and what is replicated, into a folder of its host, as a checkpoint that can be read by itself:

    part_<number>/step_<n>/   as in training/checkpoints/format.py
    part_<number>/step_<n>/part.json   the run, the start of it, and how the state was sharded
    .folder                   a random word by which hosts find out if they see the same folder

With several replicas of the parameters a part has the same number in each of them, so it is in
several folders. If it is in one alone, its process sends a copy to its peer, a process with another
folder, which keeps it in the same place. A step is whole if each part of it is in some folder. Only
parts of one start belong together.

Copies go over TCP connections between the hosts. Both ends prove by a challenge that they know a
key, which the first process has made up and sent through the run's process group. What arrives is
written to files whose checksums are compared; nothing in it is run.
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
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from dataclasses import asdict, dataclass, replace
from multiprocessing import AuthenticationError
from multiprocessing.connection import (
    Client,
    Connection,
    Listener,
    answer_challenge,
    deliver_challenge,
)
from pathlib import Path
from typing import Any

import xxhash

from data.files import parse_object
from training.checkpoints import format as checkpoint
from training.checkpoints.choose import clear, folder_of, remove, step_folders, step_of
from training.checkpoints.format import SavedRun
from training.checkpoints.state import bytes_of, not_finite, write_state
from training.errors import UsageError
from training.files import check_own, in_background, read_object, replace_file
from training.processes import exchange
from training.resolve import Run

RUN_ID_FILE = "run_id"
"""In --ckpt_dir: a random word, by which a run knows its parts, and since it has gone back to an
older checkpoint another one: parts from before do not count, on a host that comes back later."""
PART_FILE, _FOLDER_FILE = "part.json", ".folder"
_STAY = 2
"""How many whole steps stay, the newest ones."""
_ENDS_WITHIN_S = 30.0
"""The longest that the end of a run waits for parts that are still being written."""
_SOMEWHERE = "192.0.2.1"
"""An address that nobody has (RFC 5737): on the way there is a host's first network."""
_CHUNK = 1 << 24
_LONGEST_HEADER = 1 << 20
_PART_NAME = re.compile(r"part_(\d+)")

Save = tuple[int, str]
"""A step, and the start of the run that has saved it."""


@dataclass(frozen=True)
class Part:
    """A part of a save, in this process's folder."""

    part: int
    save: Save
    layout: str
    """A checksum of how the state was sharded."""
    run: str
    ckpt_dir: str
    history: str
    """The second word in RUN_ID_FILE."""


@dataclass(frozen=True)
class Done:
    """What a process has done for its newest save."""

    step: int
    bytes: int = 0
    """Of its part."""
    write_s: float = 0.0
    copy_s: float = 0.0
    problem: str | None = None


class LocalTier:
    """Saves and finds parts of checkpoints on the hosts' own disks, in all processes of a run.

    After the start it cannot end training: what goes wrong is reported, and the next save tried.
    """

    def __init__(self, run: Run, shards: tuple[int, ...]) -> None:
        """Open the folder of this process, and agree with the others on peers and on a key.

        ``shards``: those that the process holds, as ``Backend`` has them. All processes must call
        this, with ``--ckpt_dir`` locked. Raises UsageError in all of them if a folder cannot be
        used.
        """
        config = run.config.checkpoints
        assert config.local_ckpt_dir is not None
        self.folder = Path(config.local_ckpt_dir)
        self._rank, self._count = exchange.rank(), exchange.count()
        # Processes that hold the same shards have the same part.
        held = [tuple(each) for each in exchange.gather(shards)]
        parts = sorted(set(held))
        self._part, self._parts = parts.index(shards), len(parts)
        # All that decides what a part holds. The number of replicas does not.
        layout = [
            parts,
            asdict(replace(run.mesh, dcn=1)),
            type(run.backend_config).__name__,
            asdict(run.backend_config),
            asdict(replace(run.config.sharding, mesh_dcn=1)),
        ]
        as_text = json.dumps(layout, sort_keys=True, default=str)
        self._layout = xxhash.xxh3_128(as_text.encode()).hexdigest()
        self._ckpt_dir = str(run.ckpt_dir)
        self._lock = threading.Lock()
        self._have: set[tuple[int, Save]] = set()
        """The parts, each with its save, that this process knows to be complete in its folder."""
        self._writing: Future[Done] | None = None

        with exchange.failing_together():
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            check_own(self.folder, flag="--local_ckpt_dir")
        with exchange.failing_together():
            # The run's random word: the first start makes it.
            self._id_file = run.ckpt_dir / RUN_ID_FILE
            if self._rank == 0 and not self._id_file.exists():
                replace_file(self._id_file, secrets.token_hex(8))
            # The folder's. Under its own name at once: another process of this host may read it.
            folder_file = self.folder / _FOLDER_FILE
            with contextlib.suppress(FileExistsError):
                own = self.folder / f"{_FOLDER_FILE}_{secrets.token_hex(8)}"
                own.write_text(secrets.token_hex(8))
                try:
                    os.link(own, folder_file)
                finally:
                    own.unlink()
            run_id = self._id_file.read_text(errors="replace") if self._rank == 0 else ""
            self._folder = folder_file.read_text(errors="replace")
        run_id, _, history = run_id.partition(" ")
        words = [run_id, history, secrets.token_hex(8), secrets.token_hex(32)]
        # As the first process has them.
        self._run, self._history, self._start, key = exchange.gather(words)[0]
        self._key = bytes.fromhex(key)
        with exchange.failing_together():
            for each in self._found():
                if each.run != self._run:
                    raise UsageError(
                        f"--local_ckpt_dir {self.folder} holds a checkpoint of another run, of "
                        f"--ckpt_dir {each.ckpt_dir}: remove it, or give another folder"
                    )

        # Who writes which part, and where a copy of it goes.
        found = exchange.gather([self._folder, socket.gethostname()])
        folders, self._hosts = [each for each, _ in found], [host for _, host in found]
        self._held = [parts.index(each) for each in held]
        self._keepers: dict[tuple[str, int], int] = {}
        """By folder and part that its processes hold: the first of these, who writes and reads it.
        Of other parts there that is the folder's first process."""
        for process, (folder, part) in enumerate(zip(folders, self._held, strict=True)):
            self._keepers.setdefault((folder, part), process)
        self._first = folders.index(self._folder)  # of the processes that see this folder
        self._copies = sum(part == self._part for _, part in self._keepers)
        """In how many folders the part is by itself."""
        is_sent = self._copies == 1
        self._peer = _peer_of(self._rank, folders, run.mesh.dcn) if is_sent else None

        # Accept copies in a thread, at addresses that all processes know.
        if self._count == 1:
            return
        hosts = exchange.gather(_own_address(os.environ.get("MASTER_ADDR", _SOMEWHERE)))
        mine = hosts[self._rank]
        elsewhere = [each for each in hosts if not each.startswith("127.")]
        if mine.startswith("127.") and elsewhere:  # the host that MASTER_ADDR names
            mine = _own_address(elsewhere[0])
        with exchange.failing_together():
            self._listener = Listener((mine, 0), backlog=64)
        threading.Thread(target=self._accept, name="local checkpoints", daemon=True).start()
        found = exchange.gather([mine, self._listener.address[1]])
        self._addresses = [(host, port) for host, port in found]

    @property
    def description(self) -> str:
        """A line for the log."""
        text = f"local checkpoints: in {self.folder}"
        if self._copies > 1:
            return f"{text}, each part on {self._copies} hosts, which hold the same"
        if self._peer is None:
            alone = "all processes see the same folder" if self._count > 1 else "one process"
            return f"{text}, without copies ({alone})"
        return f"{text}, a copy of each part at a peer (of process 0: {self._name(self._peer)})"

    def _name(self, process: int) -> str:
        return exchange.name(process, self._hosts[process])

    # -- the folder --------------------------------------------------------------------------------

    def _path(self, part: int, step: int) -> Path:
        return folder_of(self.folder / f"part_{part}", step)

    def _keeps(self, part: int) -> bool:
        """Return True if this process writes and reads the part in its folder."""
        return self._keepers.get((self._folder, part), self._first) == self._rank

    def _found(self) -> list[Part]:
        """Return the complete parts in the folder, by names and sizes of their files alone."""
        found = []
        for each in sorted(self.folder.iterdir()):
            if not (name := _PART_NAME.fullmatch(each.name)):
                continue
            for path in step_folders(each):
                with contextlib.suppress(OSError, ValueError, KeyError):
                    if checkpoint.read_manifest(path) is None or checkpoint.quick_problem(path):
                        continue
                    content = read_object(path / PART_FILE)
                    start, *others = (
                        str(content[key])
                        for key in ("start", "layout", "run", "ckpt_dir", "history")
                    )
                    found.append(Part(int(name[1]), (step_of(path), start), *others))
        return found

    def _remove(self, stays: Callable[[int], bool]) -> None:
        """Remove what is in the folder of the steps that are not to stay, complete or not; of
        the processes of a folder one does it. Raises OSError."""
        if self._first != self._rank:
            return
        for each in sorted(self.folder.iterdir()):
            if _PART_NAME.fullmatch(each.name):
                for path in step_folders(each):
                    if not stays(step_of(path)):
                        remove(path)

    # -- at the start ------------------------------------------------------------------------------

    def resume(self, newer_than: int, *, verify: bool) -> tuple[SavedRun | None, list[str]]:
        """Find the newest whole step after ``newer_than``; bring each process its part.

        Returns what this process's part says of the run, in a folder that this process alone reads,
        or None if no step is whole; and lines for the log. ``verify``: compare checksums. All
        processes must call this.
        """
        notes: list[str] = []
        rejected: set[tuple[int, Save]] = set()
        while True:
            found = exchange.gather(
                [
                    [each.part, *each.save, each.layout]
                    for each in self._usable()
                    if self._keeps(each.part) and (each.part, each.save) not in rejected
                ]
            )
            holders: dict[Save, dict[int, list[int]]] = {}
            others = False
            for process, parts in enumerate(found):
                for part, step, start, layout in parts:
                    if layout == self._layout:
                        of_save = holders.setdefault((step, start), {})
                        of_save.setdefault(part, []).append(process)
                    else:
                        others = True
            newer = sorted(save for save in holders if save[0] > newer_than)
            whole = [save for save in newer if len(holders[save]) == self._parts]
            if not whole:
                if newer:
                    lost = set(range(self._parts)) - holders[newer[-1]].keys()
                    names = ", ".join(self._name(self._held.index(part)) for part in sorted(lost))
                    notes.append(
                        f"warning: step {newer[-1][0]} of --local_ckpt_dir is not whole: the parts "
                        f"of {names} are lost, with their copies"
                    )
                elif others:
                    notes.append(
                        "note: --local_ckpt_dir has parts of another number of processes a "
                        "replica, mesh or form of sharding, which are not used"
                    )
                elif not any(found) and newer_than >= 0:
                    notes.append("note: no host has a part of a step in --local_ckpt_dir")
                return None, notes
            save = whole[-1]
            problems = self._bring(save, holders[save], rejected, verify=verify)
            if not problems:
                break
            notes += [f"warning: {problem}" for problem in problems]
        with exchange.failing_together():
            saved = checkpoint.read_saved_run(self._path(self._part, save[0]))
        at = holders[save]
        if brought := [to for (_, part), to in self._keepers.items() if to not in at[part]]:
            names = ", ".join(map(self._name, sorted(brought)))
            notes.append(f"note: step {save[0]} was copied from peers to {names}")
        return replace(saved, is_part=True), notes

    def _usable(self) -> list[Part]:
        """Return the complete parts in the folder that may be resumed; [] if it cannot be read."""
        try:
            return [each for each in self._found() if each.history == self._history]
        except OSError:
            return []

    def _bring(
        self,
        save: Save,
        holders: dict[int, list[int]],
        rejected: set[tuple[int, Save]],
        *,
        verify: bool,
    ) -> list[str]:
        """Give each folder the parts of a whole save that its processes hold; return the problems
        of all processes. ``holders``: by part, the processes that keep it.

        A part of this process's folder that is damaged, or cannot be sent, goes into ``rejected``.
        """
        step = save[0]
        mine: dict[int, list[int]] = {}
        """By part that is used of this process's folder: the processes to which it is sent."""
        for (_, part), keeper in self._keepers.items():
            is_there = keeper in holders[part]
            if (keeper if is_there else holders[part][0]) == self._rank:
                mine.setdefault(part, []).extend([] if is_there else [keeper])
        problems: list[str] = []
        for part, others in mine.items():
            path = self._path(part, step)
            try:
                if verify and (problem := checkpoint.damage(path)):
                    raise ValueError(problem)
                for other in others:
                    self._send(path, part, save, other)
            except (OSError, EOFError, ValueError, AuthenticationError) as error:
                problems.append(
                    f"part {part} of step {step} in --local_ckpt_dir of {self._name(self._rank)} "
                    f"is not used: {checkpoint.reason_of(error)}"
                )
                rejected.add((part, save))
        return [each for found in exchange.gather(problems) for each in found]

    def forget(self, step: int | None, *, goes_back: bool) -> None:
        """Remove all parts but those of ``step``, which this start continues; None: all.

        ``goes_back``: nor are those of hosts that are away to be resumed when they come back. All
        processes must call this before the first save.
        """
        if goes_back:
            self._history = exchange.gather(secrets.token_hex(4))[0]
        with exchange.failing_together():
            if goes_back and self._rank == 0:
                replace_file(self._id_file, f"{self._run} {self._history}")
            self._remove(lambda each: each == step)
        with self._lock:
            self._have = {(each.part, each.save) for each in self._usable()}

    # -- while training ----------------------------------------------------------------------------

    def save(
        self, step: int, content: Callable[[], dict[str, Any]], say: Callable[[str], None]
    ) -> dict[str, float]:
        """Start to write this process's part of ``content()``, a copy of the state, and to send it.

        All processes must call this. If one still writes the part before, none writes this one.
        Returns of the save before ``bytes`` of all parts, and the seconds of the slowest process:
        ``write_s`` on its disk, ``copy_s`` to its peer; {} if there is none.
        """
        done = None
        is_busy = self._writing is not None and not self._writing.done()
        if self._writing is not None and not is_busy:
            done, self._writing = asdict(self._writing.result()), None
        with self._lock:
            here = sorted(self._have)
        found = exchange.gather([is_busy, done, here])
        finished = []
        for process, (_, each, _) in enumerate(found):
            if not each:
                continue
            finished.append(report := Done(**each))
            if report.problem:
                say(
                    f"warning: local checkpoint of step {report.step}, {self._name(process)}: "
                    f"{report.problem}; training continues"
                )
        figures = {}
        if finished:
            figures = {
                "bytes": sum(each.bytes for each in finished),
                "write_s": max(each.write_s for each in finished),
                "copy_s": max(each.copy_s for each in finished),
            }
            copied = f", copied to peers in {figures['copy_s']:.2f} s" if figures["copy_s"] else ""
            if not any(each.problem for each in finished):
                say(
                    f"local checkpoint of step {finished[0].step}: "
                    f"{figures['bytes'] / 2**20:,.2f} MiB, written in {figures['write_s']:.2f} s"
                    f"{copied}"
                )
        # Nothing before the oldest whole step that stays.
        parts: dict[Save, set[int]] = {}
        for *_, has in found:
            for part, (saved, start) in has:
                parts.setdefault((saved, start), set()).add(part)
        whole = sorted(saved for (saved, _), of in parts.items() if len(of) == self._parts)
        oldest = whole[-_STAY] if len(whole) >= _STAY else 0
        with self._lock:
            self._have = {each for each in self._have if each[1][0] >= oldest}
        if busy := [process for process, (each, *_) in enumerate(found) if each]:
            say(
                f"warning: no local checkpoint of step {step}: {self._name(busy[0])} still writes "
                "the one before"
            )
            return figures
        if not self._keeps(self._part):  # another process of this host has the same part
            return figures
        try:
            copy = content()
        except Exception as error:  # noqa: BLE001 - out of memory, say: the next one is tried
            failed: Future[Done] = Future()
            failed.set_result(
                Done(step, problem=f"it could not be copied ({checkpoint.reason_of(error)})")
            )
            self._writing = failed
        else:
            self._writing = in_background(lambda: self._write(step, copy, oldest))
        return figures

    def _write(self, step: int, content: dict[str, Any], oldest: int) -> Done:
        """Write this process's part and send it; in a thread."""
        path, save = self._path(self._part, step), (step, self._start)
        size, began, written = bytes_of(content), time.perf_counter(), None
        try:
            self._remove(lambda each: each >= oldest)
            with self._lock:
                self._have.discard((self._part, save))
            if name := not_finite(content):
                raise ValueError(f"{name} is not finite")
            clear(path)
            files = write_state(content, path, alone=True)
            about = {
                "run": self._run,
                "ckpt_dir": self._ckpt_dir,
                "start": self._start,
                "layout": self._layout,
                "history": self._history,
            }
            replace_file(path / PART_FILE, json.dumps(about))
            checkpoint.write_manifest(path, files | checkpoint.entries(path, [PART_FILE]))
            with self._lock:
                self._have.add((self._part, save))
            written = time.perf_counter()
            if self._peer is None:
                return Done(step, size, written - began)
            self._send(path, self._part, save, self._peer)
        except BaseException as error:  # noqa: BLE001 - as in saver.py: it may be DCP's own
            if written is None:
                with contextlib.suppress(OSError):
                    remove(path)  # the next one may need its room
                problem = (
                    f"it could not be written to {self.folder} ({checkpoint.reason_of(error)})"
                )
                return Done(step, problem=problem)
            problem = f"no copy at {self._name(self._peer or 0)} ({checkpoint.reason_of(error)})"
            return Done(step, size, written - began, problem=problem)
        return Done(step, size, written - began, time.perf_counter() - written)

    def complete(self) -> None:
        """Remove all parts: the run has its last checkpoint in --ckpt_dir.

        All processes must call this. If one still writes, they stay.
        """
        if self._writing is not None:
            wait([self._writing], timeout=_ENDS_WITHIN_S)
        if all(exchange.gather(self._writing is None or self._writing.done())):
            with contextlib.suppress(OSError):
                self._remove(lambda each: False)

    # -- copies ------------------------------------------------------------------------------------

    def _accept(self) -> None:
        while True:
            try:
                connection = self._listener.accept()
            except OSError:  # too many open files, say: its sender reports it
                time.sleep(1)
                continue
            threading.Thread(target=self._receive, args=[connection], daemon=True).start()

    def _send(self, path: Path, part: int, save: Save, to: int) -> None:
        """Send the files of a part to a process; return when it has compared and written them.

        Raises OSError or EOFError if it has not, ValueError if the part is damaged, and
        AuthenticationError if who answers there does not know the key.
        """
        files = checkpoint.read_manifest(path) or {}
        header = {"to": to, "part": part, "step": save[0], "start": save[1], "files": files}
        with Client(self._addresses[to], authkey=self._key) as connection:
            connection.send_bytes(json.dumps(header).encode())
            for name in files:
                with open(path / name, "rb") as file:
                    while chunk := file.read(_CHUNK):
                        connection.send_bytes(chunk)
            if answer := connection.recv_bytes(_LONGEST_HEADER).decode(errors="replace"):
                raise OSError(answer)

    def _receive(self, connection: Connection) -> None:
        """Write a part that another process sends, and answer with what went wrong, if anything."""
        with contextlib.suppress(Exception), connection:  # its sender reports what fails here
            deliver_challenge(connection, self._key)
            answer_challenge(connection, self._key)
            header = parse_object(connection.recv_bytes(_LONGEST_HEADER))
            part, save = int(header["part"]), (int(header["step"]), str(header["start"]))
            files = checkpoint.manifest_entries(header["files"])
            if header["to"] != self._rank or part not in range(self._parts):
                return  # of another host behind the same address, say
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
    """Write files that arrive one after the other; return what went wrong with them, if anything.

    All that was sent is read, so that the sender reads the answer. Raises EOFError or OSError if
    the connection ends before.
    """
    problem = None
    try:
        clear(path)
    except OSError as error:
        problem = checkpoint.reason_of(error)
    for name, (size, sum_) in files.items():
        digest, arrived = xxhash.xxh3_128(), 0
        with contextlib.ExitStack() as opened:
            file = None
            try:
                file = opened.enter_context(open(path / name, "xb")) if problem is None else None
            except OSError as error:
                problem = checkpoint.reason_of(error)
            while arrived < size:
                chunk = connection.recv_bytes(_CHUNK)
                arrived += len(chunk)
                digest.update(chunk)
                try:
                    if file and problem is None:
                        file.write(chunk)
                        if arrived >= size:
                            file.flush()
                            os.fsync(file.fileno())
                except OSError as error:
                    problem = checkpoint.reason_of(error)
        if problem is None and (arrived, digest.hexdigest()) != (size, sum_):
            problem = f"the checksum of {name} differs"
    return problem


def _own_address(other: str) -> str:
    """Return the address of this host under which ``other`` sees it."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((other, 9))  # nothing is sent
            return probe.getsockname()[0]
        except OSError:
            return "127.0.0.1"


def _peer_of(rank: int, folders: Sequence[str], replicas: int) -> int | None:
    """Return the process that gets a copy of ``rank``'s part, None without another folder.

    ``folders``: by process, a word for its folder. With several replicas of the parameters the peer
    is in the next one, where its folder is not in the same rack or slice; else in the next folder.
    """
    hosts: dict[str, list[int]] = {}
    for process, word in enumerate(folders):
        hosts.setdefault(word, []).append(process)
    words = list(hosts)
    mine = hosts[folders[rank]]
    if len(words) == 1:
        return None
    away = max(1, len(words) // replicas) if replicas > 1 else 1
    there = hosts[words[(words.index(folders[rank]) + away) % len(words)]]
    return there[min(mine.index(rank), len(there) - 1)]
