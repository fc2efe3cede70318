"""``memory_on_spmd.py FOLDER TIMES``: what is told of device memory, as a JSON line.

As on a TPU under SPMD: the devices are virtual ones of the CPU, whose SPMD raises what a TPU's
does; libtpu's metrics are those of the package ``libtpu`` in FOLDER. Asks so many times at most.
"""

import json
import os
import sys
import time
from pathlib import Path
from types import SimpleNamespace

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch_xla
import torch_xla.core.xla_model as xm
import torch_xla.runtime as xr

from xla_fsdp import xla_backend

xr.use_spmd()
device = torch_xla.device()
try:
    raised = str(xm.get_memory_info(device))
except RuntimeError as error:
    raised = str(error)
os.environ["PYTHONPATH"] = sys.argv[1]  # torch_xla needs the real one
xla_backend.xr = SimpleNamespace(device_type=lambda: "TPU")
meter = xla_backend.DeviceMemory(device)
told = []
for _ in range(int(sys.argv[2])):
    told.append(meter.read())
    if told[-1]:
        break
    time.sleep(0.1)

xm.get_memory_info = lambda _: {"bytes_used": 5, "bytes_limit": 9, "peak_bytes_used": 7}
by_torch_xla = xla_backend.DeviceMemory(device).read()
print(json.dumps({"raised": raised, "told": told, "by_torch_xla": by_torch_xla}))
