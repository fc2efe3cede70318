"""What a run has reported in its folder before this start."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from training.checkpoints import format as checkpoint
from training.checkpoints.inventory import complete_checkpoints, step_of
from training.errors import UsageError
from training.files import fetch_logs, is_url
from training.logs import records
from training.logs.bad_images import FILE as BAD_IMAGES_FILE
from training.processes import exchange

if TYPE_CHECKING:
    from training.checkpoints.per_host import HostFolders
    from training.resolve import Run

_FILES = (records.METRICS_FILE, records.EVENTS_FILE, BAD_IMAGES_FILE)


def fetch_history(run: Run, *, is_main: bool) -> list[str]:
    """If ``--ckpt_dir`` is a URL, copy its logs to the local log folder; return log lines about
    that. Raises UsageError in all processes if they cannot be read."""
    if not is_url(run.ckpt_dir):
        return []
    with exchange.raise_on_all_ranks():
        if is_main:
            try:
                fetch_logs(run.log_dir, run.ckpt_dir, _FILES)
            except OSError as error:
                raise UsageError(
                    f"cannot read the logs of {run.ckpt_dir}: {error.strerror}"
                ) from None
    return [
        f"note: {run.ckpt_dir} cannot be locked: a second job on another host is not detected; "
        f"logs are copied there from {run.log_dir}"
    ]


def fetch_from_hosts(hosts: HostFolders) -> list[str]:
    """If the first process runs on another host than before, copy the logs there; return log lines
    about that. All processes must call this."""
    return hosts.fetch_logs((*_FILES, records.RUN_FILE))


@dataclass(frozen=True)
class History:
    """What the run has reported in its folder before this start."""

    continues: bool
    """Whether the folder's records belong to this run."""
    evaluated: dict[int, str | None]
    """By step, the summary of each finite evaluation; None for one without images."""
    frozen: Mapping[str, Collection[int]]
    """By each of ``records.FROZEN``, the steps with such an evaluation."""
    best: Path | None = None
    """The complete checkpoint with the best evaluation, the first of equally good ones."""
    best_score: float = -math.inf
    """The score of that evaluation."""
    left_out: str = ""
    """The number of damaged lines in the folder's metrics, as text."""


def read_history(
    ckpt_dir: Path, step: int, *, continues: bool, best_by: str | None = None
) -> History:
    """Return what the folder's metrics record up to ``step``; later records are dropped.

    ``continues``: the folder's run continues. Otherwise its metrics belong to another run.
    ``best_by``: ``--ckpt_best``.
    """
    if not continues:  # a checkpoint resumed from elsewhere is not evaluated again
        frozen = {kind: {step} for kind in records.FROZEN}
        return History(False, {step: None} if step else {}, frozen)
    metrics = records.read_metrics(ckpt_dir)
    lines = [r for r in metrics if r["step"] <= step]
    finite = records.evaluations(lines)
    with checkpoint.readable(ckpt_dir, "--ckpt_dir"):
        saved = complete_checkpoints(ckpt_dir)
    # Not the best evaluation: its checkpoint may be missing after a kill.
    score = records.BEST[best_by or "best"]
    best = max(
        (path for path in saved if step_of(path) in finite),
        key=lambda path: score(finite[step_of(path)]),
        default=None,
    )
    best_score = score(finite[step_of(best)]) if best else -math.inf
    evaluated: dict[int, str | None] = {r["step"]: None for r in lines if r.get("val_images") == 0}
    evaluated |= {at: records.summary(record) for at, record in finite.items()}
    left_out = records.damaged_lines(metrics.left_out)
    return History(True, evaluated, records.frozen_steps(lines), best, best_score, left_out)


def history_of_first(history: History) -> History:
    """Return the history that the first process has read, where each host has a folder of its own;
    all processes must call this."""
    frozen = {kind: [*steps] for kind, steps in history.frozen.items()}
    first = exchange.broadcast_object(
        [
            [*history.evaluated.items()],
            frozen,
            str(history.best) if history.best else None,
            history.best_score,
            history.left_out,
        ]
    )
    evaluated, frozen, name, best_score, left_out = first
    return replace(
        history,
        evaluated=dict(evaluated),
        frozen={kind: set(steps) for kind, steps in frozen.items()},
        best=Path(name) if name else None,
        best_score=best_score,
        left_out=left_out,
    )
