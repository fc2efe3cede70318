"""The program's step beside the same one written in JAX, both by the TPU compiler.

    python benchmarks/tpu_peer.py        # or make tpu-peer, half an hour on 2 cores

Model, slice, batch, dtype of the residual stream and recomputation are the same; the peer is
benchmarks/tpu_peer_step.py, once with attention's softmax in fp32 and once in bf16, of which the
faster counts. Figures are kept in runs/tpu-peer, of either side by its own commit: started again,
it goes on where it was. The table goes between the markers in docs/benchmarks.md, row by row: what
is not asked for stays there, with the commit that it was compiled at. The picture goes to
docs/tpu_peer.png.
"""

import argparse
import itertools
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tqdm import tqdm

from benchmarks.common import (
    ROOT,
    commit,
    failure_of,
    last_json,
    markdown,
    rows_between,
    write_between,
)
from benchmarks.compiled import CODE_THAT_IS_COMPILED, add_choices, add_document, kept_report
from training.logs.figures import pyplot, save_figure

BATCH = "1024"
ROWS = {
    "10B, v5p:4x4x8": ("vit_10b", "v5p:4x4x8"),
    "10B, v5e:8x8": ("vit_10b", "v5e:8x8"),
    "10B, v6e:16x16": ("vit_10b", "v6e:16x16"),
    "ViT-L/16, v5e:2x4": ("vit_large_patch16_224", "v5e:2x4"),
    "ViT-L/16, v6e:2x4": ("vit_large_patch16_224", "v6e:2x4"),
}
DTYPES = ("fp32", "bf16")
PEER, LIBTPU_FLAGS = "benchmarks/tpu_peer_step.py", "xla_fsdp/tpu.py"
GOAL = 0.8
"""The program's expected step, over the peer's."""
BEGIN, END = "<!-- begin: make tpu-peer -->", "<!-- end: make tpu-peer -->"
_SET_FOR_LIBTPU = """
import json, os, sys
from xla_fsdp.tpu import as_on_a_tpu, parse_topology
print(json.dumps(as_on_a_tpu(parse_topology(sys.argv[1]), os.environ.get("LIBTPU_INIT_ARGS", ""))))
"""


class Kept(NamedTuple):
    """Folders of what the compiler has said."""

    ours: Path
    peer: Path


Cells = list[str]
"""A row of the table."""
HEAD = [
    "model, slice",
    "residual",
    "expected ms: program",
    "JAX (its softmax in)",
    "ratio",
    "peak HBM, GiB: program",
    "JAX",
    "ratio",
    "compiled at, libtpu",
]
TIME, MEMORY = 4, 7
"""Where the ratios are in a row."""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_choices(parser, "--rows", list(ROWS), between="; ")
    add_document(parser, "benchmarks.md")
    args = parser.parse_args()
    folder = ROOT / "runs" / "tpu-peer"
    kept = Kept(
        folder / commit(*CODE_THAT_IS_COMPILED), folder / commit(PEER, "models", LIBTPU_FLAGS)
    )
    for each in (kept.ours, kept.peer):
        each.mkdir(parents=True, exist_ok=True)
    known = {(row[0], row[1]): row for row in rows_between(args.document, BEGIN, END)}
    both = [(row, residual) for row in args.rows for residual in DTYPES]
    for row, residual in tqdm(both, desc="compile", unit="pair"):
        known[row, residual] = compare(row, residual, kept)
        rows = [known[key] for key in itertools.product(ROWS, DTYPES) if key in known]
        write_between(args.document, BEGIN, END, table(rows))
    plot(rows, args.document.with_name("tpu_peer.png"))


def compare(row: str, residual: str, kept: Kept) -> Cells:
    """Compile both, and return the table's row; the benchmark ends if the program does not fit."""
    model, topology = ROWS[row]
    where = ["--model", model, "--tpu_topology", topology, "--batch_size", BATCH]
    where += ["--residual_dtype", residual]
    name = f"{model}_{topology}_{residual}"
    ours = kept_report(kept.ours / f"{name}.json", *where, "--precision", "bf16")
    if ours is None or not ours["fits"]:
        sys.exit(f"{row}: the program's step does not fit")
    peers = {
        scores: peer(kept.peer / f"{name}_scores_{scores}.json", where, scores) for scores in DTYPES
    }
    scores = min(peers, key=lambda scores: peers[scores]["expected_step_s"])
    steps = [1e3 * side["expected_step_s"] for side in (ours, peers[scores])]
    peaks = [side["peak_hbm_bytes"] / 2**30 for side in (ours, peers[scores])]
    return [
        *(row, residual, f"{steps[0]:,.0f}", f"{steps[1]:,.0f} ({scores})"),
        f"{steps[0] / steps[1]:.2f}",
        *(f"{peak:.2f}" for peak in peaks),
        f"{peaks[0] / peaks[1]:.2f}",
        f"{kept.ours.name}, {ours['versions']['libtpu']}",
    ]


def peer(path: Path, where: list[str], scores: str) -> dict[str, Any]:
    """Compile the peer with the flags for libtpu that the program sets; keep its figures."""
    if not path.exists():
        topology = where[where.index("--tpu_topology") + 1]
        flags = [sys.executable, "-c", _SET_FOR_LIBTPU, topology]
        set_ = subprocess.run(flags, cwd=ROOT, capture_output=True, text=True, check=True)
        done = subprocess.run(
            [sys.executable, str(ROOT / PEER), *where, "--scores_dtype", scores],
            env={**os.environ, **last_json(set_.stdout)},
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            sys.exit(f"{path.stem}: {failure_of(done)}")
        path.write_text(json.dumps(last_json(done.stdout)))
    return json.loads(path.read_text())


def table(rows: list[Cells]) -> list[str]:
    """Return the lines of the table, and below it in how many rows the goals are reached."""
    reached = sum(float(row[TIME]) <= GOAL for row in rows)
    less = sum(float(row[MEMORY]) <= 1 for row in rows)
    return [
        *markdown([HEAD, *rows]),
        "",
        f"At most {GOAL} of the peer's time in {reached} of {len(rows)} rows, at most its memory "
        f"in {less}. Global batch {BATCH}, everything recomputed, bf16 products.",
    ]


def plot(rows: list[Cells], path: Path) -> None:
    """Draw both ratios of each row, below 1 where the program is better."""
    plt = pyplot()
    figure, axis = plt.subplots(figsize=(8, 0.5 * len(rows) + 1.5), layout="constrained")
    for number, row in enumerate(rows):
        for place, at, colour in ((-0.2, TIME, "tab:blue"), (0.2, MEMORY, "tab:orange")):
            ratio, where = float(row[at]), number + place
            axis.barh(where, ratio, 0.38, color=colour)
            axis.text(ratio, where, f" {ratio:.2f}", va="center", fontsize=8)
    axis.set_yticks(range(len(rows)), [f"{row[0]}, {row[1]}" for row in rows])
    axis.invert_yaxis()
    axis.axvline(1.0, color="black", linewidth=1)
    axis.axvline(GOAL, color="black", linewidth=1, linestyle=":")
    handles = [plt.Rectangle((0, 0), 1, 1, color=c) for c in ("tab:blue", "tab:orange")]
    figure.legend(handles, ["expected step", "peak HBM"], loc="outside lower center", ncols=2)
    axis.set_xlim(0, 1.1 * max(float(row[at]) for row in rows for at in (TIME, MEMORY)))
    axis.set_xlabel("the program, over the same step in JAX")
    axis.set_title("By the TPU compiler (dotted: the goal for time)")
    save_figure(figure, path)


if __name__ == "__main__":
    main()
