r"""Time startup: from the command to the end of the first step, with the parts that runs record.

    python benchmarks/start.py --checkouts . ../before --repeats 3 --plot start.png \
        --fake_data --model vit_large_patch16_224 --batch_size 2 --cpu_devices 2

You can add any flag of run_vit_training.py. Each start is a process that is killed after its first
step; the checkouts take turns ``--repeats`` times, and the table shows medians. The parts are those
in events.jsonl (docs/files.md); a checkout older than these records has only the total. "cores" is
the total CPU time in seconds: compare it on a busy machine.
"""

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.common import ROOT, commit
from config_fields import local_path
from training.logs.figures import pyplot, save_figure
from training.logs.records import EVENTS_FILE, read_events

TOTAL, CORES = "in all", "cores"


def time_start(checkout: Path, flags: list[str]) -> dict[str, float]:
    """Return the seconds of a start's parts, its wall time and the seconds of a core."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        command = [sys.executable, "run_vit_training.py", *flags, "--ckpt_dir", folder]
        with open(f"{folder}/output", "w+", encoding="utf-8", errors="replace") as output:
            process = subprocess.Popen(command, cwd=checkout, stdout=output, stderr=output)
            try:
                events: dict[str, dict] = {}
                while "first_step" not in events:
                    # It is left as it is, for ``wait4``.
                    ended = os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
                    there = (Path(folder) / EVENTS_FILE).exists()
                    events = {e["event"]: e for e in read_events(Path(folder))} if there else {}
                    if ended and "first_step" not in events:
                        output.seek(0)
                        sys.exit(f"{' '.join(command)}\n{output.read()}")
                    time.sleep(0.1)
            finally:
                process.kill()
                _, _, used = os.wait4(process.pid, 0)
    first = events["first_step"]
    total = first["time"] - events["start"]["process_started"]
    return {TOTAL: total, CORES: used.ru_utime + used.ru_stime, **first.get("parts", {})}


def plot(names: list[str], medians: list[dict[str, float]], path: Path) -> None:
    """Draw a bar for each checkout, divided into the parts that it has recorded."""
    plt = pyplot()
    figure, axis = plt.subplots(figsize=(9, 1.4 + 0.6 * len(names)), layout="constrained")
    every = dict.fromkeys(part for each in medians for part in each)
    parts = [part for part in every if part not in (TOTAL, CORES)]
    lefts = [0.0] * len(names)
    for number, part in enumerate(parts):
        widths = [each.get(part, 0.0) for each in medians]
        colour = plt.get_cmap("tab20")(number)
        axis.barh(names, widths, left=lefts, label=part, color=colour)
        lefts = [left + width for left, width in zip(lefts, widths, strict=True)]
    rest = [max(0.0, each[TOTAL] - left) for each, left in zip(medians, lefts, strict=True)]
    axis.barh(names, rest, left=lefts, label="not recorded", color="lightgray")
    axis.invert_yaxis()
    axis.set_xlabel("seconds from the command to the end of the first step")
    figure.legend(ncols=6, fontsize=8, loc="outside lower center")
    save_figure(figure, path)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument(
        "--checkouts",
        type=local_path,
        nargs="+",
        default=[ROOT],
        help="folders of the versions to compare (default: this one)",
    )
    parser.add_argument(
        "--repeats", type=int, default=3, help="number of timed starts (default: 3)"
    )
    parser.add_argument("--plot", type=local_path, help="plot the parts to this PNG file")
    options, flags = parser.parse_known_args()

    found: list[list[dict[str, float]]] = [[] for _ in options.checkouts]
    for repeat in range(options.repeats):
        for checkout, starts in zip(options.checkouts, found, strict=True):
            print(f"start {repeat + 1} of {checkout}", file=sys.stderr, flush=True)
            starts.append(time_start(checkout, flags))
    medians = [
        {part: statistics.median(start[part] for start in starts) for part in starts[0]}
        for starts in found
    ]
    names = [commit(at=checkout) for checkout in options.checkouts]
    print(f"{' '.join(flags)}, {options.repeats} starts")
    for name, each in zip(names, medians, strict=True):
        ratios = (f"{each[key] / medians[0][key]:.2f}" for key in (TOTAL, CORES))
        values = ", ".join(f"{key} {value:.2f}" for key, value in each.items())
        print(f"| {name} | {' | '.join(ratios)} | {values} |")
    if options.plot:
        plot(names, medians, options.plot)


if __name__ == "__main__":
    main()
