"""The records of a run in ``metrics.jsonl``, and which of its evaluations was the best."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

METRICS_FILE = "metrics.jsonl"


def read_metrics(ckpt_dir: Path) -> list[dict[str, Any]]:
    """The records of metrics.jsonl; a line cut short by a crash is left out."""
    path = ckpt_dir / METRICS_FILE
    records = []
    for line in path.read_text().splitlines() if path.exists() else []:
        with contextlib.suppress(json.JSONDecodeError):
            records.append(json.loads(line))
    return records


def evaluations(ckpt_dir: Path, last_step: float = float("inf")) -> dict[int, dict[str, Any]]:
    """The evaluations up to ``last_step``, by step."""
    return {r["step"]: r for r in read_metrics(ckpt_dir)
            if "val_top1" in r and r["step"] <= last_step}  # fmt: skip
