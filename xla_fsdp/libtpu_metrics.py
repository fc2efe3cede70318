"""``libtpu_metrics.py PARENT``, a program of its own: for each line that it is given, what libtpu
reports of its host's memory. It ends with its parent, also while libtpu waits for an answer."""

import json
import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parent.parent))

from training.processes.parent import end_with

end_with(int(sys.argv[1]))

from libtpu.sdk import tpumonitoring  # noqa: E402

for _ in sys.stdin:
    asked = [tpumonitoring.get_metric(f"hbm_capacity_{what}") for what in ("usage", "total")]
    print(json.dumps([list(metric.data()) for metric in asked]), flush=True)
