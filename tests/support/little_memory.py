"""A limit to the memory of this process, so that a test that takes too much fails at once."""

import contextlib
import re
import resource
from pathlib import Path


@contextlib.contextmanager
def little_memory(more=2**30):
    """Let this process take only so many bytes more."""
    before = resource.getrlimit(resource.RLIMIT_AS)
    used = int(re.search(r"VmSize:\s+(\d+)", Path("/proc/self/status").read_text())[1]) * 1024
    resource.setrlimit(resource.RLIMIT_AS, (used + more, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


def sparse(path, content=b"", size=2**33):
    """Write a file of this size that holds a content and then zeros, and takes no space."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as file:
        file.write(content)
        file.truncate(size)
    return path
