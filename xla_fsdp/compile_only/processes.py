"""Processes that libtpu compiles in: it ends its process where a check of its own fails."""

from __future__ import annotations

import os
from collections.abc import Mapping
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

from training.hosts.parent import end_with


def libtpu_process(variables: Mapping[str, str], complaints: str) -> ProcessPoolExecutor:
    """Return one process whose environment has ``variables``; stderr goes to the file named.

    There libtpu complains that there is no TPU. The process ends with this one, however that ends:
    it would compile on for minutes, in gigabytes.
    """
    arguments = (complaints, dict(variables), os.getpid())
    return ProcessPoolExecutor(1, get_context("spawn"), initializer=_begin, initargs=arguments)


def _begin(complaints: str, variables: dict[str, str], parent: int) -> None:
    end_with(parent)
    os.dup2(os.open(complaints, os.O_WRONLY), 2)
    os.environ.update(variables)
