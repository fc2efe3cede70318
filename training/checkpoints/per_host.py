"""A ``--ckpt_dir`` that is a folder of its own on each host's disk: ``--ckpt_dir_per_host``.

A checkpoint is one ordinary DCP checkpoint whose files are spread over the hosts: each process
writes its file into the ``step_<n>`` of its host. Every host also has

    .metadata, manifest.json   of all files; the manifest is written last
    __training_0.distcp        the ``training.*`` entries, so that each process can plan its start

so the files of all hosts in one folder are an ordinary checkpoint. At the start the hosts exchange
which files they have. A checkpoint can be resumed if some host has each of its files, and a process
reads from other hosts what its own does not have (``training/checkpoints/remote_files.py``), so the
number and the order of the hosts may change. Logs are on the host of the first process.
"""

import functools
import secrets
import socket
import stat
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

import xxhash

from training.checkpoints import format as checkpoint
from training.checkpoints.inventory import Spread, step_folders
from training.checkpoints.remote_files import Offered, open_remote
from training.checkpoints.removal import set_aside
from training.files import check_own, random_word, replace_file
from training.logs.records import EVENTS_FILE, TENSORBOARD_DIR
from training.processes import exchange, peers
from training.processes.ports import open_ports

_WORD_FILE = ".host"
_SHOWN = 3
"""The number of missing files that a message names."""

Sizes = Mapping[str, int]
"""The regular files of a folder, with their sizes in bytes."""


def sizes_in(folder: Path) -> dict[str, int]:
    """Return the regular files of a folder, with their sizes; {} if it is none. Raises OSError."""
    if not folder.is_dir():
        return {}
    found = {path.name: path.lstat() for path in folder.iterdir()}
    return {name: it.st_size for name, it in found.items() if stat.S_ISREG(it.st_mode)}


def holders_of(
    files: Mapping[str, checkpoint.Entry], by_process: Sequence[Sizes]
) -> dict[str, list[int]]:
    """Return which processes have each file of a manifest, by the sizes of their hosts' files."""
    return {
        name: [process for process, sizes in enumerate(by_process) if sizes.get(name) == size]
        for name, (size, _) in files.items()
    }


def usable(
    manifests: Mapping[str, Mapping[str, checkpoint.Entry]],
    seen: Sequence[tuple[str | None, Sizes]],
) -> str | None:
    """Return the manifest of a step whose files are all on some host; None if there is none.

    ``manifests``: by checksum; several if the run went back while a host was away. ``seen``: by
    host, the checksum of its manifest, and its files. A host that was interrupted has none.
    """
    for digest, files in manifests.items():
        sizes = [sizes for other, sizes in seen if other in (digest, None)]
        if all(holders_of(files, sizes).values()):
            return digest
    return None


class HostFolders:
    """The folders of all hosts of a run, in each of its processes."""

    def __init__(self, ckpt_dir: Path, *, shared: bool) -> None:
        """Find out which processes see the same folder; all processes must call this. ``shared``:
        it may be another user's. Raises UsageError in all processes if a folder cannot be used."""
        self._ckpt_dir, self._offered = ckpt_dir, Offered()
        start, key = exchange.broadcast_object([secrets.token_hex(8), secrets.token_hex(32)])
        word, word_file = "", ckpt_dir / f"{_WORD_FILE}_{start}"
        with exchange.raise_on_all_ranks():
            ckpt_dir.mkdir(parents=True, exist_ok=True)
            check_own(ckpt_dir, shared=shared)
            word = random_word(word_file)
        places = exchange.all_gather_object([word, socket.gethostname()])
        words = [word for word, _ in places]
        self.names = [exchange.name(rank, host) for rank, (_, host) in enumerate(places)]
        """The names of all processes, for messages."""
        self.first = words.index(word)
        """The first of the processes that see this folder."""
        self.is_first = self.first == exchange.rank()
        self._firsts = [words.index(word) for word in dict.fromkeys(words)]
        same = [rank for rank, other in enumerate(words) if other == word]
        self.share = same.index(exchange.rank()), len(same)
        """This process's number among those of its host, and their number."""
        self._key, self._addresses = bytes.fromhex(key), list[tuple[str, int]]()
        if self.is_first:
            word_file.unlink()
        if len(self._firsts) > 1:
            listening, self._addresses = open_ports()
            peers.serve(listening, self._key, self._offered.answer)

    def close(self) -> None:
        """Let no process read files any more."""
        self._offered.withdraw()

    def find(self, path: Path) -> Spread:
        """Return where the files of a checkpoint are; all processes must call this."""
        digest, files, sizes = None, dict[str, checkpoint.Entry](), dict[str, int]()
        with exchange.raise_on_all_ranks():
            digest, files = _manifest_in(path)
            if self.is_first:
                sizes = sizes_in(path)
                self._offered.offer(str(path), path, files)
        by_process = exchange.all_gather_object([digest, sizes])
        for process, (other, _) in enumerate(by_process):
            if other is None or other != by_process[0][0]:
                which = "no such checkpoint" if other is None else "another one of this name"
                what = f"{self.names[process]} has {which}: copy {path} there from another host"
                return Spread(problem=what)
        holders = holders_of(files, [sizes for _, sizes in by_process])
        if missing := [name for name, processes in holders.items() if not processes]:
            return Spread(problem=_missing(missing, path))
        here = frozenset(name for name, processes in holders.items() if self.first in processes)
        rank = exchange.rank()
        elsewhere = {
            name: self._opener(processes[rank % len(processes)], str(path), name, files[name][0])
            for name, processes in holders.items()
            if name not in here
        }
        return Spread(here, elsewhere)

    def _opener(self, process: int, label: str, name: str, size: int) -> functools.partial:
        return functools.partial(
            open_remote, self._addresses[process], self._key, label, name, size
        )

    def _fetch(self, process: int, label: str, name: str, size: int) -> bytes:
        with self._opener(process, label, name, size)() as stream:
            return stream.read(size)

    def complete(self) -> list[str]:
        """Give each host the small files of checkpoints that other hosts have, so that all know the
        same ones; return log lines. A host may be new, or was interrupted, or was away while the
        run went back: then it has another checkpoint of the same step, which is set aside. All
        processes must call this, with the folders locked."""
        own: dict[str, tuple[str | None, dict[str, int]]] = {}
        manifests: dict[str, dict[str, checkpoint.Entry]] = {}
        with exchange.raise_on_all_ranks():
            for path in step_folders(self._ckpt_dir) if self.is_first else ():
                digest, manifests[path.name] = _manifest_in(path)
                sizes = sizes_in(path)
                own[path.name] = digest, sizes
                small = (checkpoint.MANIFEST, checkpoint.METADATA, checkpoint.TRAINING_FILE)
                self._offered.offer(path.name, path, [name for name in small if name in sizes])
        by_process = exchange.all_gather_object(own)
        steps = {name: None for process in self._firsts for name in by_process[process]}
        notes: list[str] = []
        for step in steps:
            seen = [by_process[process].get(step, (None, {})) for process in self._firsts]
            digests = list(dict.fromkeys(digest for digest, _ in seen if digest))
            if not digests or (len(digests) == 1 and all(digest for digest, _ in seen)):
                continue
            owners = {
                digest: self._firsts[[other for other, _ in seen].index(digest)]
                for digest in digests
            }
            is_owner = exchange.rank() in owners.values()
            known = exchange.all_gather_object(manifests[step] if is_owner else None)
            of_digest = {digest: known[owner] for digest, owner in owners.items()}
            chosen = usable(of_digest, seen)
            digest = chosen or digests[0]
            lacking = [
                process
                for process, (other, _) in zip(self._firsts, seen, strict=True)
                if other is None or (chosen and other != chosen)
            ]
            with exchange.raise_on_all_ranks():
                if exchange.rank() in lacking:
                    path = self._ckpt_dir / step
                    if step in own and own[step][0]:
                        set_aside(self._ckpt_dir, [path])
                    owner = owners[digest]
                    self._bring(path, owner, of_digest[digest], by_process[owner][step][1])
            names = ", ".join(self.names[process] for process in lacking)
            notes.append(f"note: {step} was made known to {names}")
        return notes

    def _bring(
        self, path: Path, owner: int, files: Mapping[str, checkpoint.Entry], sizes: Sizes
    ) -> None:
        """Copy the small files of a checkpoint from another host, its manifest last. Raises
        OSError."""
        path.mkdir(exist_ok=True)
        for name in (checkpoint.METADATA, checkpoint.TRAINING_FILE, checkpoint.MANIFEST):
            if name in sizes:
                content = self._fetch(owner, path.name, name, sizes[name])
                entry = len(content), xxhash.xxh3_128(content).hexdigest()
                if name in files and tuple(files[name]) != entry:
                    raise OSError(f"{name} of {path} is damaged on {self.names[owner]}")
                replace_file(path / name, content)

    def fetch_logs(self, names: Collection[str]) -> list[str]:
        """Copy the run's logs to the first process's host, if another one has newer ones; return
        log lines. All processes must call this."""
        own: dict[str, dict[str, int]] = {}
        with exchange.raise_on_all_ranks():
            if self.is_first:
                logs = {name: n for name, n in sizes_in(self._ckpt_dir).items() if name in names}
                own = {"": logs, TENSORBOARD_DIR: sizes_in(self._ckpt_dir / TENSORBOARD_DIR)}
                for folder, sizes in own.items():
                    self._offered.offer(folder, self._ckpt_dir / folder, sizes)
        by_process = exchange.all_gather_object(own)
        # Events are never removed from their file: the longest one is the newest.
        newest = max(
            self._firsts,
            key=lambda process: (by_process[process][""].get(EVENTS_FILE, 0), -process),
        )
        if not by_process[newest][""].get(EVENTS_FILE) and step_folders(self._ckpt_dir):
            return ["note: no host of this run has its earlier logs"]
        if newest == 0:
            return []
        with exchange.raise_on_all_ranks():
            if exchange.rank() == 0:
                for folder, sizes in by_process[newest].items():
                    (self._ckpt_dir / folder).mkdir(exist_ok=True)
                    for name, size in sizes.items():
                        content = self._fetch(newest, folder, name, size)
                        replace_file(self._ckpt_dir / folder / name, content)
        return [f"note: the logs of this run were copied from {self.names[newest]}"]


def _manifest_in(path: Path) -> tuple[str | None, dict[str, checkpoint.Entry]]:
    """Return the checksum of a checkpoint's manifest and its entries; None and {} if there is none
    or it is damaged. Raises OSError if it cannot be reached."""
    try:
        files = checkpoint.read_manifest(path)
    except ValueError:
        files = None
    if files is None:
        return None, {}
    return checkpoint.checksum(path / checkpoint.MANIFEST), files


def _missing(names: Sequence[str], path: Path) -> str:
    """Describe files of a checkpoint that no host has."""
    writers = checkpoint.writers_in(path)
    shown = ", ".join(names[:_SHOWN]) + (", ..." if len(names) > _SHOWN else "")
    by = ", ".join(dict.fromkeys(writers[name] for name in names if name in writers))
    return (
        f"the files of {by or 'other hosts'} are missing ({shown}): start on these hosts, too, or "
        f"copy their {path.name} to a host of this run"
    )
