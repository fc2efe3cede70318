"""Device memory in use, where it is known; reading it never ends a run or delays it."""

import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import torch
import torch_xla.core.xla_model as xm
import torch_xla.runtime as xr

_READ_LIBTPU = """
import json, sys
sys.path.append(sys.argv[1])
from training.processes.parent import end_with
end_with(int(sys.argv[2]))  # also while libtpu waits for an answer
from libtpu.sdk import tpumonitoring
for _ in sys.stdin:
    metrics = [tpumonitoring.get_metric(f"hbm_capacity_{kind}") for kind in ("usage", "total")]
    print(json.dumps([list(metric.data()) for metric in metrics]), flush=True)
"""
"""A program (project's folder, parent): for each line of its input it prints, of all devices, the
bytes in use and the bytes that there are."""


class DeviceMemory:
    """Reads figures of torch_xla, or of libtpu where torch_xla has none: 2.9 under SPMD
    (pytorch/xla issue #9022).

    libtpu's metrics are read in a process of their own, because libtpu ends the process that has
    loaded it if one of its checks fails. An answer is logged a log step later.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._is_known = xr.device_type() != "CPU"
        self._libtpu: subprocess.Popen[str] | None = None
        self._newest: dict[str, int] = {}
        self._waits = False

    def read(self) -> dict[str, int]:
        """Return the bytes in use as ``training.backend.Backend.memory`` does."""
        if not self._is_known:
            return {}
        if self._libtpu is None:
            try:
                info = xm.get_memory_info(self._device)
                names = {"used": "bytes_used", "peak": "peak_bytes_used", "limit": "bytes_limit"}
                return {name: info[key] for name, key in names.items() if key in info}
            except Exception:  # noqa: BLE001 - torch_xla does not say what it raises
                arguments = [str(Path(__file__).resolve().parents[1]), str(os.getpid())]
                self._libtpu = subprocess.Popen(
                    [sys.executable, "-P", "-c", _READ_LIBTPU, *arguments],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.DEVNULL,
                    text=True,
                    start_new_session=True,  # signals to the run's group are not for it
                )
        if self._waits:  # the last answer is overdue
            return {}
        self._waits, newest = True, self._newest
        threading.Thread(target=self._ask, args=[self._libtpu], daemon=True).start()
        return newest

    def _ask(self, libtpu: subprocess.Popen[str]) -> None:
        assert libtpu.stdin
        assert libtpu.stdout
        try:  # the fullest device: libtpu has a text for each
            libtpu.stdin.write("\n")
            libtpu.stdin.flush()
            answer = json.loads(libtpu.stdout.readline())
            used, total = ([int(float(text)) for text in texts] for texts in answer)
            most, limit = max(zip(used, total, strict=True), default=(0, 0))
            self._newest = {"used": most, "limit": limit} if limit else {}
        except (OSError, TypeError, ValueError):  # also where the process has ended
            self._newest = {}
        self._waits = False
