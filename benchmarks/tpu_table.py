"""Which slice for which model: compile the training step for each, and write docs/tpu.md's table.

    python benchmarks/tpu_table.py        # or make tpu-table, an hour on 2 cores

Each cell is `run_vit_training.py --compile_only --json` in a process of its own, kept in
runs/tpu-table/COMMIT, of the code alone: started again, it goes on where it was. Any flag of the
program can be added; --precision bf16 and --batch_size 1024 are preset. The table goes between the
markers in docs/tpu.md, the picture to docs/tpu_table.png.
"""

import argparse
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from tqdm import tqdm

from benchmarks.common import ROOT, commit, write_between
from benchmarks.compiled import CODE_THAT_IS_COMPILED, add_choices, add_document, kept_report

PRESET_FLAGS = "--precision bf16 --batch_size 1024".split()
MODELS = ("vit_10b", "vit_60b", "vit_120b")
# Google's name of the slice (of v4 and v5p it counts cores, two a chip), and libtpu's.
SLICES = {
    "v4-128": "v4:4x4x4",
    "v5e-64": "v5e:8x8",
    "v5e-256": "v5e:16x16",
    "v5p-64": "v5p:2x4x4",
    "v5p-128": "v5p:4x4x4",
    "v5p-256": "v5p:4x4x8",
    "v5p-512": "v5p:4x8x8",
    "v6e-64": "v6e:8x8",
    "v6e-256": "v6e:16x16",
}
Reports = dict[tuple[str, str], dict[str, Any] | None]
"""The reports of ``--compile_only`` by slice and model; None where libtpu crashes."""
GIB = 2**30
BEGIN, END = "<!-- begin: make tpu-table -->", "<!-- end: make tpu-table -->"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_choices(parser, "--models", MODELS)
    add_choices(parser, "--slices", list(SLICES))
    add_document(parser, "tpu.md")
    args, flags = parser.parse_known_args()
    kept = ROOT / "runs" / "tpu-table" / commit(*CODE_THAT_IS_COMPILED)
    kept.mkdir(parents=True, exist_ok=True)
    cells = [(name, model) for model in args.models for name in args.slices]
    reports: Reports = {}
    for name, model in tqdm(cells, desc="compile", unit="step"):
        reports[name, model] = compile_one(name, model, flags, kept)
    write_table(args.document, reports, list(args.slices), list(args.models), flags)
    plot(reports, args.document.with_name("tpu_table.png"))


def compile_one(name: str, model: str, flags: list[str], kept: Path) -> dict[str, Any] | None:
    """Compile one step; return its figures, None if libtpu crashes."""
    path = kept / f"{'_'.join([name, model, *flags]).replace('/', '-')}.json"
    return kept_report(
        path, "--tpu_topology", SLICES[name], "--model", model, *PRESET_FLAGS, *flags
    )


def cell(report: dict[str, Any] | None) -> str:
    if report is None:
        return "libtpu crashes"
    peak, capacity = report["peak_hbm_bytes"], report["hbm_capacity_bytes"]
    if not report["fits"]:
        return f"no, {(peak - capacity) / GIB:.1f} GiB short or more"
    return f"{peak / GIB:.1f} GiB, {100 * report['expected_mfu']:.0f} %"


def write_table(
    document: Path, reports: Reports, slices: list[str], models: list[str], flags: list[str]
) -> None:
    found = {key: report for key, report in reports.items() if report}
    sizes = {model: report["parameters"] / 1e9 for (_, model), report in found.items()}
    of_slice = {name: report for (name, _), report in found.items()}
    head = [
        "slice",
        "`--tpu_topology`",
        "chips",
        "HBM a chip",
        *(f"{m} ({sizes[m]:.1f}B)" for m in models),
    ]
    rows = [head, ["---"] * len(head)]
    for name in slices:
        capacity = f"{of_slice[name]['hbm_capacity_bytes'] / GIB:.2f} GiB"
        rows.append(
            [
                name,
                f"`{SLICES[name]}`",
                str(of_slice[name]["chips"]),
                capacity,
                *(cell(reports[name, m]) for m in models),
            ]
        )
    seconds = [report["trace_s"] + report["compile_s"] for report in found.values()]
    versions = ", ".join(f"{k} {v}" for k, v in of_slice[name]["versions"].items())
    made_by = f"Commit {commit(*CODE_THAT_IS_COMPILED)}, {versions}"
    lines = ["| " + " | ".join(row) + " |" for row in rows]
    lines += [
        "",
        "Peak HBM of a chip and the expected MFU, "
        f"with `{' '.join([*PRESET_FLAGS, *flags])}`. {made_by}; "
        f"{min(seconds):.0f} to {max(seconds):.0f} s a step to trace and compile.",
    ]
    write_between(document, BEGIN, END, lines)


def plot(reports: Reports, path: Path) -> None:
    """Draw peak HBM as a share of what there is; a bar of what does not fit ends at twice that."""
    figure, axis = plt.subplots(figsize=(9, 0.32 * len(reports) + 1.2), layout="constrained")
    for row, report in enumerate(reports.values()):
        if report is None:
            axis.text(0, row, " libtpu crashes", va="center", fontsize=8)
            continue
        share = report["peak_hbm_bytes"] / report["hbm_capacity_bytes"]
        colour = "tab:green" if report["fits"] else "tab:red"
        axis.barh(row, min(share, 2.0), color=colour)
        text = f" {100 * share:.0f} %" if report["fits"] else f" {100 * share:.0f} % or more"
        axis.text(min(share, 2.0), row, text, va="center", fontsize=8)
    axis.set_yticks(range(len(reports)), [f"{model} on {name}" for name, model in reports])
    axis.invert_yaxis()
    axis.axvline(1.0, color="black", linewidth=1)
    axis.set_xlim(0, 2.4)
    axis.set_xlabel("peak HBM / HBM of a chip")
    axis.set_title("Does the training step fit? By the TPU compiler")
    figure.savefig(path, dpi=110)
    plt.close(figure)


if __name__ == "__main__":
    main()
