"""Measure what a checkpoint costs training: blocking, and asynchronous (the default).

    python benchmarks/checkpoint.py --json checkpoint.json --plot checkpoint.png

One process does this --repeats times: a blocking save, then an asynchronous one with steps until it
is complete, then as many steps without a save. The table shows medians:

- s/step: seconds per step while nothing is written
- steps: number of steps while a checkpoint is written
- waiting: seconds for which a blocking save stops training
- copy: seconds for which an asynchronous save stops training, to copy the state
- write: seconds from then until that checkpoint is complete
- slower: extra seconds of the steps during the write, compared with as many steps after it
- share: slower / write, with the minimum and maximum of the repeats. 0: the write costs training
  nothing; 1: it costs as much time as it takes

--rates sets the write speed of the storage, in MB/s. 0 is the disk itself. Other rates put the disk
behind an fsspec file system that sleeps during writes, like network storage, and needs no CPU time.
On a CPU, training and writing share the cores, so a write to the disk itself can hardly be hidden.
You can add any flag of run_vit_training.py.
"""

import argparse
import json
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.common import commit, failure_of, last_json, run_python
from config_fields import local_path
from training.logs.figures import pyplot, save_figure

FORMS = {
    "xla": "--backend xla --cpu_devices 1",
    "fsdp2": "--backend cuda --fsdp fsdp2",
}
PRESET = "--model vit_small_patch16_224 --batch_size 4 --fake_data --lr 1e-5".split()
COLUMNS = (
    "backend",
    "storage",
    "checkpoint",
    "s/step",
    "steps",
    "waiting",
    "copy",
    "write",
    "slower",
    "share",
)


def rows_of(form: str, told: dict[str, Any]) -> list[dict[str, Any]]:
    """Return a row for each storage that the measuring process tells of; seconds and bytes."""
    rows = []
    for result in told["results"]:
        each = result["rows"]
        for row in each:
            row["slower"] = row["during"] - row["steps"] * row["idle"]
        shares = sorted(row["slower"] / row["write"] for row in each)
        medians = {name: statistics.median(row[name] for row in each) for name in each[0]}
        rows.append(
            {
                "backend": form,
                "rate": result["rate"],
                "bytes": result["bytes"],
                **medians,
                "share": statistics.median(shares),
                "least": shares[0],
                "most": shares[-1],
            }
        )
    return rows


def storage(row: dict[str, Any]) -> str:
    """Return the name of the storage that a row is of."""
    return f"{row['rate']:g} MB/s" if row["rate"] else "disk"


def line(row: dict[str, Any]) -> str:
    """Return a row of the table."""
    cells = (
        row["backend"],
        storage(row),
        f"{row['bytes'] / 1e6:,.0f} MB",
        f"{row['idle']:.3f}",
        f"{row['steps']:.0f}",
        *(f"{row[name]:.2f}" for name in ("waiting", "copy", "write", "slower")),
        f"{row['share']:.1%} ({row['least']:.1%} to {row['most']:.1%})",
    )
    return f"| {' | '.join(cells)} |"


def plot(rows: list[dict[str, Any]], path: Path) -> None:
    """Draw, for each row, the seconds that a checkpoint costs training in either form."""
    plt = pyplot()
    figure, axis = plt.subplots(figsize=(8, 4.5), layout="constrained")
    places = range(len(rows))
    axis.bar([at - 0.2 for at in places], [r["waiting"] for r in rows], 0.4, label="blocking")
    copies = [r["copy"] for r in rows]
    axis.bar([at + 0.2 for at in places], copies, 0.4, label="asynchronous: copy")
    slower = [max(0.0, r["slower"]) for r in rows]
    axis.bar(
        [at + 0.2 for at in places], slower, 0.4, bottom=copies, label="asynchronous: slower steps"
    )
    names = [f"{r['backend']}\n{storage(r)}" for r in rows]
    axis.set_xticks(list(places), names)
    axis.set_ylabel("seconds of training lost per checkpoint")
    axis.grid(axis="y", alpha=0.3)
    axis.legend()
    save_figure(figure, path)


def read_arguments(argv: list[str] | None) -> tuple[argparse.Namespace, list[str]]:
    """Read the command line; return what is left of it for the program."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--backends", nargs="+", choices=FORMS, default=list(FORMS))
    parser.add_argument("--rates", nargs="+", type=float, default=[0.0, 50.0], metavar="MB/S")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument(
        "--folder", type=local_path, help="write checkpoints here (default: a temporary folder)"
    )
    parser.add_argument("--json", type=local_path, help="write the rows to this file")
    parser.add_argument("--plot", type=local_path, help="plot the rows to this PNG file")
    return parser.parse_known_args(argv)


def main(argv: list[str] | None = None) -> int:
    """Measure, print the table, write the files; return the exit code."""
    arguments, flags = read_arguments(argv)
    rows: list[dict[str, Any]] = []
    print(f"commit {commit()}\n\n| {' | '.join(COLUMNS)} |\n|{'---|' * len(COLUMNS)}")
    for form in arguments.backends:
        with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
            rates = [f"{rate:g}" for rate in arguments.rates]
            own = [*FORMS[form].split(), *PRESET, *flags, "--ckpt_dir", folder]
            measure = ["-m", "benchmarks.checkpoint_child", f"{folder}/saves"]
            done = run_python(*measure, str(arguments.repeats), *rates, "--", *own)
        if done.returncode:
            print(f"| {form} | {failure_of(done)} |", flush=True)
            continue
        found = rows_of(form, last_json(done.stdout))
        print("\n".join(map(line, found)), flush=True)
        rows += found
    if arguments.json:
        arguments.json.write_text(
            json.dumps({"commit": commit(), "rows": rows}, indent=1) + "\n", encoding="utf-8"
        )
    if arguments.plot and rows:
        plot(rows, arguments.plot)
    return 0 if rows else 1


if __name__ == "__main__":
    sys.exit(main())
