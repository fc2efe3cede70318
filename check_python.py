"""Refuse a Python that cannot run a program of this project, in one line.

A program calls ``check`` before its other imports, which would end in a traceback. So this module
must run on every Python from 3.7 on, without packages, and imports nothing of the project.
"""

import importlib.util
import os
import sys
import time

PACKAGES = tuple("torch torchvision timm numpy PIL fsspec safetensors xxhash tqdm".split())
"""What every program but the launchers imports."""
_ROOT = os.path.dirname(os.path.abspath(__file__))


def check(program, oldest=(3, 11), packages=PACKAGES):
    """Exit with code 2 and one line if this Python is older than ``oldest`` or lacks packages."""
    is_old = sys.version_info[:2] < oldest
    missing = [name for name in packages if importlib.util.find_spec(name) is None]
    if not is_old and not missing:
        return
    if os.environ.get("LOCAL_RANK", "0") != "0":  # torchrun would end the process that prints
        time.sleep(2)
        sys.exit(2)
    here = f"{sys.executable} (Python {'.'.join(map(str, sys.version_info[:3]))})"
    wrong = f"{here} is too old" if is_old else f"{here} has no {', '.join(missing)}"
    if not packages:
        remedy = f"use Python {'.'.join(map(str, oldest))} or newer"
    else:
        environment = os.path.join(_ROOT, ".venv", "bin", "python")
        if os.path.exists(environment) and environment != sys.executable:
            remedy = f"use {environment}"
        else:
            files = os.path.join(_ROOT, "requirements-tpu.txt")
            remedy = (
                f"use Python 3.11 or 3.12 and install {files} (for TPUs and CPUs; "
                "requirements-gpu.txt for NVIDIA GPUs, requirements-torchtpu.txt for TorchTPU)"
            )
    print(f"{program}: error: {wrong}: {remedy}", file=sys.stderr)
    sys.exit(2)
