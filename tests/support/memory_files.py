"""Data sets on fsspec's memory:// file system."""

import itertools
import os
import uuid

import fsspec

HOURS = itertools.count(1_000_000_000, 3600)


def settle(root):
    """As if its folders had been changed long ago, and after those of earlier calls."""
    hour = next(HOURS)
    for folder, *_ in os.walk(root):
        os.utime(folder, (hour, hour))


def in_memory(folder):
    """The same files at a URL."""
    url = f"memory://{uuid.uuid4().hex}"
    fsspec.filesystem("memory").put(f"{folder}/", url, recursive=True)
    return url
