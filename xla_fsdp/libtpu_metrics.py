"""A program of its own: for each line that it is given, what libtpu tells of its host's memory."""

import json
import sys

from libtpu.sdk import tpumonitoring

for _ in sys.stdin:
    asked = [tpumonitoring.get_metric(f"hbm_capacity_{what}") for what in ("usage", "total")]
    print(json.dumps([list(metric.data()) for metric in asked]), flush=True)
