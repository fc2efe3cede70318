"""``--profile`` with XLA's profiler, for XProf and TensorBoard's plugin."""

import shutil
import socket
import tempfile
from contextlib import AbstractContextManager
from pathlib import Path

import torch_xla.core.xla_model as xm
import torch_xla.debug.profiler as xp

from data.files import make_folder
from training.backend import Profiler
from xla_fsdp.scopes import STEP
from xla_fsdp.torch_xla_private import trace_span


class XlaProfiler(Profiler):
    """Writes ``plugins/profile/step_<first>/<host>_<rank>.xplane.pb``, where XProf looks, and the
    same as ``.trace.json.gz`` for Perfetto."""

    def __init__(self, folder: Path, rank: int) -> None:
        self.folder, self._rank, self._first = folder, rank, 0

    def start(self) -> None:
        make_folder(self.folder)
        # torch_xla names a trace by host and second: processes of a host would write one file.
        self._own_folder = Path(tempfile.mkdtemp(dir=self.folder, prefix=f".{self._rank}_"))
        self._first = 0
        xp.start_trace(self._own_folder)

    def step(self, number: int) -> AbstractContextManager:
        self._first = self._first or number
        return trace_span(STEP, step_num=number, _r=1)  # by these, XProf recognizes steps

    def span(self, name: str) -> AbstractContextManager:
        return trace_span(name)

    def stop(self) -> None:
        xm.wait_device_ops()
        xp.stop_trace()
        run = self.folder / "plugins" / "profile" / f"step_{self._first}"
        run.mkdir(parents=True, exist_ok=True)
        for path in self._own_folder.glob("plugins/profile/*/*"):
            _, kind = path.name.split(".", 1)
            path.replace(run / f"{socket.gethostname()}_{self._rank}.{kind}")
        shutil.rmtree(self._own_folder)
