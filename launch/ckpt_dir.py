"""Refuse to delete a slice with the checkpoints of the command that runs on it.

    python3 -m launch.ckpt_dir FLAG [NETWORK_DISK ...] -- COMMAND ...

does so for shell scripts: it prints the reason, and exits with code 2. FLAG deletes the slice.
"""

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path, PurePosixPath

from config_fields import Word, expand_flag_files, not_empty
from launch import UsageError

_ROOT = Path(__file__).resolve().parents[1]
_PROGRAMS = ("run_vit_training.py", "run_vit_training", "torchrun.sh")
_WITHOUT_CHECKPOINTS = (
    *("-h", "--help", "--list_models", "--compile_only", "--plan", "--self_check"),
    *("--eval_only", "--predict", "--features"),
)
"""Flags with which the program writes no checkpoints."""
_ON_THE_MACHINE = ("file", "local", "memory")
"""Protocols of URLs that name no other machine."""


def add_network_disk(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--network_disk",
        metavar="FOLDER",
        action="append",
        default=[],
        type=not_empty,
        help="folder on the hosts that is a network disk or a mounted bucket, so that a --ckpt_dir "
        "in it outlives the slice; may be repeated (default: none)",
    )


def lost_checkpoints(command: Sequence[str], disks: Sequence[str]) -> str | None:
    """Return what names the folder on the machine itself in which ``command`` writes checkpoints;
    None if there is none. ``disks``: the machine's folders that are on other machines."""
    names = [PurePosixPath(word).name for word in command]
    start = next((index for index, name in enumerate(names) if name in _PROGRAMS), None)
    if start is None:
        return None
    words: list[str] = []
    for word in command[start + 1 :]:
        try:
            words += [each.text for each in expand_flag_files([Word(word)], str(_ROOT))]
        except argparse.ArgumentTypeError:  # on the workers it may be there
            words.append(word)
    folder, said = "", "the default --ckpt_dir"  # the last one counts
    for word, following in zip(words, [*words, ""][1:], strict=True):
        name, equals, value = word.partition("=")
        if name in _WITHOUT_CHECKPOINTS:
            return None
        if name == "--ckpt_dir":
            folder = value if equals else following
            said = f"--ckpt_dir {folder}"
        elif word.startswith("@"):
            folder, said = "", f"a --ckpt_dir that may be in {word}, which is not readable here"
    protocol, is_url, _ = folder.partition("://")
    if "$(" in folder:  # Kubernetes replaces it by a variable
        return None
    if is_url:
        return said if protocol in _ON_THE_MACHINE else None
    path = PurePosixPath(os.path.normpath(folder))
    return None if any(path.is_relative_to(os.path.normpath(disk)) for disk in disks) else said


def check_ckpt_dir(command: Sequence[str], flag: str, disks: Sequence[str]) -> None:
    """Raise UsageError if ``flag`` deletes a slice with the checkpoints of ``command``."""
    if lost := lost_checkpoints(command, disks):
        raise UsageError(
            f"{flag} would delete the slice's disks with the checkpoints in {lost}: use --ckpt_dir "
            "gs://bucket/folder, or name the network disk that it is on with --network_disk FOLDER"
        )


def main(argv: Sequence[str]) -> int:
    at = argv.index("--")
    flag, *disks = argv[:at]
    try:
        check_ckpt_dir(argv[at + 1 :], flag, disks)
    except UsageError as error:
        print(error)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
