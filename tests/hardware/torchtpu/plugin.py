"""XLA's plugin for the host's processor, so that torch_tpu takes it for that of a TPU.

``python -m tests.hardware.torchtpu.plugin ARGUMENTS``: run Python with these arguments there.
"""

import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

SHIM = Path(__file__).parent / "pjrt_shim.c"
PACKAGE = "lammps_jax_pjrt_cpu"


def why_not() -> str | None:
    """Return the reason why this environment cannot have it, or None."""
    if any(importlib.util.find_spec(name) is None for name in (PACKAGE, "torch_tpu")):
        return "`make test-torchtpu` has torch_tpu and a plugin for the processor"
    if shutil.which("cc") is None:
        return "no C compiler (cc) here, which makes the plugin one that torch_tpu takes"
    return None


def variables(folder: Path) -> dict[str, str]:
    """Compile the shim into ``folder``; return the variables of programs that use it."""
    shim = folder / "pjrt_shim.so"
    subprocess.run(["cc", "-shared", "-fPIC", "-O1", "-Wall", "-o", shim, SHIM, "-ldl"], check=True)
    found = importlib.util.find_spec(PACKAGE)
    assert found is not None
    assert found.submodule_search_locations is not None
    (package,) = found.submodule_search_locations
    return {
        "TPU_LIBRARY_PATH": str(shim),
        "PJRT_CPU_PLUGIN": os.path.join(package, "pjrt_c_api_cpu_plugin.so"),
        "TORCH_DEVICE_BACKEND_AUTOLOAD": "0",  # tests/fakes/torchtpu_on_cpu.py comes first
    }


if __name__ == "__main__":
    if reason := why_not():
        sys.exit(reason)
    with tempfile.TemporaryDirectory() as folder:
        environment = os.environ | variables(Path(folder))
        sys.exit(subprocess.call([sys.executable, *sys.argv[1:]], env=environment))
