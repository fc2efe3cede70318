"""``--extension``: features of a user's own, from Python files or modules.

Only the command line loads code: a checkpoint, ``run.json`` or recipe records the names of
extensions, with checksums, and never imports one. A file is imported as a top-level module of its
own name, from a folder at the end of ``sys.path``, so that loader processes find it, too.
"""

from __future__ import annotations

import difflib
import hashlib
import importlib
import importlib.util
import itertools
import os
import re
import sys
import traceback
from collections.abc import Sequence
from types import ModuleType

from models.registry import set_added_families
from training.errors import UsageError
from training.feature import Feature
from training.feature_table import set_added_features

_PIN = "@sha256:"
_DIGITS = 16
"""Hexadecimal digits of a checksum in a name."""
_loaded: dict[str, ModuleType] = {}
"""The modules in use, by the name that the flag gives, without a checksum."""
_folders: list[str] = []
"""The folders of their files, at the end of ``sys.path``."""


def named_in(words: Sequence[str]) -> list[str]:
    """Return the values of ``--extension`` in a command line; of several, those of the last."""
    names: list[str] = []
    for index, word in enumerate(words):
        flag, is_joined, value = word.partition("=")
        if flag == "--extension":
            following = itertools.takewhile(
                lambda each: not each.startswith("--"), words[index + 1 :]
            )
            names = [value] if is_joined else list(following)
    return names


def use_extensions(names: Sequence[str]) -> None:
    """Add the features of these files (PATH.py) and modules (package.module) to the table, in place
    of those of earlier calls; a name may end with a checksum, as ``pinned`` returns it.

    Raises UsageError for a name that does not exist, defines no feature or has another checksum.
    Errors in the code itself are raised as they are.
    """
    while _folders:
        sys.path.remove(_folders.pop())
    for path, module in _loaded.items():
        if path.endswith(".py"):
            sys.modules.pop(module.__name__, None)
    _loaded.clear()
    added: list[type[Feature]] = []
    for name in names:
        path, _, checksum = name.partition(_PIN)
        module = _import_file(path) if path.endswith(".py") else _import_module(path)
        _loaded[path] = module
        if checksum and checksum != _checksum(module):
            raise UsageError(
                f"--extension {name}: its checksum is {_PIN[1:]}{_checksum(module)}: use the file "
                f"as it was, or pass --extension {path}"
            )
        found = [each for each in _classes_of(module) if issubclass(each, Feature)]
        if not found:
            raise UsageError(
                f"--extension {path} defines no subclass of training.feature.Feature "
                "(docs/extending.md)"
            )
        for feature in found:
            _check_names(feature, path)
        added += found
    set_added_features(added)
    set_added_families({prefix: where for each in added for prefix, where in each.families.items()})


def pinned(name: str) -> str:
    """Return the name of a loaded extension with the checksum of its file, as runs record it."""
    path = name.partition(_PIN)[0]
    return f"{path}{_PIN}{_checksum(_loaded[path])}"


def _check_names(feature: type[Feature], path: str) -> None:
    """Raise UsageError for a misspelled method or attribute: nobody would call it."""
    known = [name for name in dir(Feature) if not name.startswith("_")]
    for name in vars(feature):
        if name.startswith("_") or name in known:
            continue
        if near := difflib.get_close_matches(name, known, n=1, cutoff=0.8):
            raise UsageError(
                f"--extension {path}: features have no {name} ({feature.__name__}): did you mean "
                f"{near[0]}? For something of your own, use another name"
            )


def explain(error: BaseException) -> None:
    """If an extension raised the error, or is to blame, add a note that says so to its
    traceback."""
    frames = {frame.filename for frame in traceback.extract_tb(error.__traceback__)}
    words = set(re.findall(r"\w+", str(error)))
    for name, module in _loaded.items():
        file = str(module.__file__)
        lacks_method = isinstance(error, TypeError | NotImplementedError) and any(
            each.__name__ in words for each in _classes_of(module)
        )
        if file in frames or file in str(error) or lacks_method:  # the second: a loader process
            error.add_note(_whose(file, name))


def _whose(file: str, name: str) -> str:
    return f"This is an error in {file} (--extension {name})."


def _classes_of(module: ModuleType) -> list[type]:
    """Return the classes that the module defines."""
    return [
        each
        for each in vars(module).values()
        if isinstance(each, type) and each.__module__ == module.__name__
    ]


def _import_file(path: str) -> ModuleType:
    folder, file = os.path.split(os.path.realpath(os.path.expanduser(path)))
    name, full = file.removesuffix(".py"), os.path.join(folder, file)
    if not os.path.isfile(full):
        raise UsageError(f"--extension {path}: no such file")
    if not name.isidentifier():
        raise UsageError(f"--extension {path}: the name must be an identifier, such as my_task.py")
    sys.path.append(folder)
    _folders.append(folder)
    importlib.invalidate_caches()
    found = importlib.util.find_spec(name)
    if found is None or found.origin != full:
        raise UsageError(f"--extension {path}: a module {name} exists already: rename the file")
    try:
        return importlib.import_module(name)
    except Exception as error:
        error.add_note(_whose(full, path))
        raise


def _import_module(name: str) -> ModuleType:
    try:
        found = importlib.util.find_spec(name)
    except (ImportError, ValueError):
        found = None
    if found is None or not found.origin:
        raise UsageError(
            f"--extension {name}: no such module; a file is given by its path, FILE.py"
        )
    return importlib.import_module(name)


def _checksum(module: ModuleType) -> str:
    with open(str(module.__file__), "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()[:_DIGITS]
