"""``as_on_a_tpu.py TYPE``: what happens on a TPU VM before a chip is taken.

torch_xla is imported on a host that has chips of this accelerator type (v5p-8, say). Prints as JSON
what is in the environment when libtpu starts, in a run and for --compile_only.
"""

import glob
import json
import os
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

SLICES = {"v4-8": "v4:2x2x1", "v5litepod-8": "v5e:2x4", "v5p-8": "v5p:2x2x1", "v6e-8": "v6e:2x4"}

chip = Path(tempfile.mkdtemp()) / "chip"
chip.mkdir()
(chip / "vendor").write_text("0x1ae0\n")
(chip / "device").write_text("0x0063\n")
real_glob = glob.glob
glob.glob = lambda pattern, *args, **kwargs: (
    [str(chip / "vendor")] if "/pci/" in pattern else real_glob(pattern, *args, **kwargs)
)
kind = sys.argv[1]
given = os.environ.get("LIBTPU_INIT_ARGS", "")
os.environ.update(PJRT_DEVICE="TPU", TPU_SKIP_MDS_QUERY="1", TPU_ACCELERATOR_TYPE=kind)
assert "torch_xla" not in sys.modules

import torch_xla  # noqa: E402, F401 - as a run does, for what it sets

from tpu_machines import LIBTPU_VARIABLE  # noqa: E402
from xla_fsdp import tpu  # noqa: E402

tpu.set_libtpu_flags()
run = dict(os.environ)
compile_only = run | tpu.libtpu_environment(tpu.parse_topology(SLICES[kind]), given, newer=False)
names = (LIBTPU_VARIABLE, "TPU_MEGACORE")
told = [{name: each.get(name) for name in names} for each in (run, compile_only)]
print(json.dumps(told))
