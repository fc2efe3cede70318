"""What ``--compile_only --json`` expects of a run's steps, to be put beside what they take."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from training.errors import UsageError
from training.options.resolve import Run
from training.url_path import replace_file


def read_expectation(run: Run) -> float | None:
    """Return the seconds that ``--expect``'s file expects of a step; None without the flag.

    Raises UsageError if it is no such file, or of another run.
    """
    name = run.config.log.expect
    if name is None:
        return None
    try:
        told = json.loads(Path(name).read_text())
        seconds = told["expected_step_s"]
    except OSError as error:
        raise UsageError(f"--expect {name} cannot be read: {error.strerror}") from None
    except (ValueError, KeyError, TypeError):
        raise UsageError(f"--expect {name} is not what --compile_only --json prints") from None
    if seconds is None:
        raise UsageError(f"--expect {name} is of a step that does not fit")
    for what, (here, there) in _compared(run, told).items():
        if here != there:
            raise UsageError(f"--expect {name} is of another run: {what} {there}, here {here}")
    return float(seconds)


def _compared(run: Run, told: dict[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Return what has to be the same, here and there."""
    here = {
        "batch_size": run.config.data.batch_size,
        "precision": run.config.sharding.precision,
        "mesh": asdict(run.mesh),
        "parameters": run.model.parameter_count,
        "input_shape": list(run.model.sizes.input_shape),
    }
    return {name: (value, told.get(name)) for name, value in here.items()}


def keep_measured(run_file: Path, expected: float, measured: float) -> None:
    """Put both into the file of the run, which is there already. Raises OSError, ValueError."""
    content = json.loads(run_file.read_text())
    content["step_s"] = {"expected": expected, "measured": measured}
    replace_file(run_file, json.dumps(content, indent=2) + "\n")
