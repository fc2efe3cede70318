"""Tables of what the TPU compiler expects of training steps, for docs/tpu.md and docs/tpu_speed.md.

    python benchmarks/tpu_table.py slices       # or make tpu-table, an hour on 2 idle cores
    python benchmarks/tpu_table.py tpu7x        # or make tpu-table ARGS=tpu7x

slices: which slice for which model. tpu7x: the same for tpu7x, with the expected step. compilers:
steps by the compiler that torch_xla requires, and by the newer one. Each cell is
`run_vit_training.py --compile_only --json` in a process of its own, kept in
runs/tpu-table/COMMIT, of the code alone: started again, it goes on where it was. Any flag of the
program can be added; --precision bf16 and --batch_size 1024 are preset. A table goes between the
markers in its document, of tpu7x and compilers after each step, with what is compiled so far; the
picture of slices goes to docs/tpu_table.png.
"""

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tqdm import tqdm

from benchmarks.common import ROOT, commit, markdown, write_between
from benchmarks.compiled import CODE_THAT_IS_COMPILED, add_choices, kept_report
from config_fields import local_path
from training.logs.figures import pyplot, save_figure
from xla_fsdp.tpu import NEWER_LIBTPU

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
VIT_L, VIT_10B, VIT_7B = "vit_large_patch16_224", "vit_10b", "timm/vit_7b_patch16_dinov3"
NAMES = {VIT_L: "ViT-L/16", VIT_10B: "10B", VIT_7B: "7B DINOv3"}
ON_TPU7X = [
    f"--tpu_topology tpu7x:{sides} --model {model}"
    for model in NAMES
    for sides in ("2x2x2", "4x4x4", "4x8x8")
]
BY_TWO_COMPILERS = [
    f"--tpu_topology v5e:2x4 --model {VIT_L}",
    f"--tpu_topology v6e:2x4 --model {VIT_L}",
    f"--tpu_topology v5p:4x4x8 --model {VIT_10B}",
    f"--tpu_topology v5p:4x4x8 --model {VIT_10B} --grad_ckpt selective",
    f"--tpu_topology v5e:8x8 --model {VIT_10B}",
    f"--tpu_topology v5e:8x8 --model {VIT_10B} --matmul int8",
    f"--tpu_topology v6e:16x16 --model {VIT_10B}",
    f"--tpu_topology v6e:16x16 --model {VIT_10B} --mesh_tensor 4",
]
"""The rows of docs/tpu_speed.md."""
COMPILERS = ("installed", NEWER_LIBTPU)
Report = dict[str, Any] | None
"""Of ``--compile_only``; None where libtpu crashes."""
Reports = dict[tuple[str, str], Report]
"""By slice and model."""
GIB = 2**30
BEGIN, END = "<!-- begin: make tpu-table -->", "<!-- end: make tpu-table -->"
DOCUMENTS = {"slices": "tpu.md", "tpu7x": "tpu.md", "compilers": "tpu_speed.md"}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("table", nargs="?", choices=list(DOCUMENTS), default="slices")
    add_choices(parser, "--models", MODELS)
    add_choices(parser, "--slices", list(SLICES))
    parser.add_argument(
        "--document", type=local_path, help="file with the markers; default: in docs/"
    )
    args, flags = parser.parse_known_args()
    document = args.document or ROOT / "docs" / DOCUMENTS[args.table]
    kept = ROOT / "runs" / "tpu-table" / commit(*CODE_THAT_IS_COMPILED)
    kept.mkdir(parents=True, exist_ok=True)
    if args.table == "tpu7x":
        steps = [f"{row} {' '.join(flags)}".strip() for row in ON_TPU7X]
        compile_rows(document, args.table, tpu7x_table, steps, kept)
        return
    if args.table == "compilers":
        rows = [f"{row} {' '.join(flags)}".strip() for row in BY_TWO_COMPILERS]
        steps = [f"{row} --tpu_compiler {name}" for row in rows for name in COMPILERS]
        compile_rows(document, args.table, compilers_table, steps, kept)
        return
    cells = [(name, model) for model in args.models for name in args.slices]
    reports: Reports = {}
    for name, model in tqdm(cells, desc="compile", unit="step"):
        where = f"--tpu_topology {SLICES[name]} --model {model} {' '.join(flags)}"
        reports[name, model] = compile_one(where.strip(), kept)
    write_table(document, reports, list(args.slices), list(args.models), flags)
    plot(reports, document.with_name("tpu_table.png"))


def kept_at(step: str, kept: Path) -> Path:
    """Return where the report of a step is kept; ``step``: its flags."""
    return kept / f"{step.replace('--', '').replace(' ', '_').replace('/', '-')}.json"


def compile_one(step: str, kept: Path) -> Report:
    """Compile one step; return its figures, None if libtpu crashes."""
    return kept_report(kept_at(step, kept), *step.split(), *PRESET_FLAGS)


def made_by(found: list[dict[str, Any]]) -> str:
    """Return commit, versions and time of these reports, in words."""
    seconds = [report["trace_s"] + report["compile_s"] for report in found]
    names = ("torch_xla", "libtpu", "jaxlib")
    used = {name: sorted({report["versions"][name] for report in found}) for name in names}
    versions = ", ".join(f"{name} {' and '.join(used[name])}" for name in names)
    return (
        f"Commit {commit(*CODE_THAT_IS_COMPILED)}, {versions}; {min(seconds):.0f} to "
        f"{max(seconds):.0f} s a step to trace and compile."
    )


# -- which slice for which model -----------------------------------------------------------------


def cell(report: Report) -> str:
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
    head = ["slice", "`--tpu_topology`", "chips", "HBM a chip"]
    rows = [[*head, *(f"{m} ({sizes[m]:.1f}B)" for m in models)]]
    for name in slices:
        capacity = f"{of_slice[name]['hbm_capacity_bytes'] / GIB:.2f} GiB"
        chips = str(of_slice[name]["chips"])
        cells = (cell(reports[name, model]) for model in models)
        rows.append([name, f"`{SLICES[name]}`", chips, capacity, *cells])
    lines = [
        *markdown(rows),
        "",
        "Peak HBM of a chip and the expected MFU, "
        f"with `{' '.join([*PRESET_FLAGS, *flags])}`. {made_by(list(found.values()))}",
    ]
    write_between(document, BEGIN, END, lines)


def plot(reports: Reports, path: Path) -> None:
    """Draw peak HBM as a share of what there is; a bar of what does not fit ends at twice that."""
    figure, axis = pyplot().subplots(figsize=(9, 0.32 * len(reports) + 1.2), layout="constrained")
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
    save_figure(figure, path)


# -- tpu7x, and two compilers --------------------------------------------------------------------


def compile_rows(
    document: Path,
    table: str,
    made_of: Callable[[dict[str, Report]], list[str]],
    steps: list[str],
    kept: Path,
) -> None:
    """Compile steps one after the other, and write the table of those that are compiled."""
    begin, end = (each.replace("tpu-table", f"tpu-table ARGS={table}") for each in (BEGIN, END))
    for step in tqdm(steps, desc="compile", unit="step"):
        compile_one(step, kept)
        found = {each: compile_one(each, kept) for each in steps if kept_at(each, kept).exists()}
        write_between(document, begin, end, made_of(found))


def described(step: str) -> tuple[str, str]:
    """Return slice and model of a step in words, the model with all flags that are not usual."""
    words = step.split()
    known = {"--tpu_topology", "--model", "--tpu_compiler"}
    pairs = dict(zip(words[::2], words[1::2], strict=True))
    others = "".join(f", `{name} {value}`" for name, value in pairs.items() if name not in known)
    return pairs["--tpu_topology"], NAMES[pairs["--model"]] + others


def tpu7x_table(reports: dict[str, Report]) -> list[str]:
    head = "model|`--tpu_topology`|chips|peak HBM, GiB a device|expected ms|of it waiting|MFU|"
    rows = [f"{head}images/s".split("|")]
    for step, report in reports.items():
        where, model = described(step)
        if report is None or not report["fits"]:
            rows.append([model, f"`{where}`", "", cell(report), "", "", "", ""])
            continue
        rows.append(
            [
                *(model, f"`{where}`", str(report["chips"])),
                f"{report['peak_hbm_bytes'] / GIB:.2f}",
                f"{report['expected_step_s'] * 1e3:.1f}",
                f"{waiting_s(report) * 1e3:.1f}",
                f"{100 * report['expected_mfu']:.1f} %",
                f"{report['expected_images_per_s']:,.0f}",
            ]
        )
    return [*markdown(rows), "", f"{made_by([report for report in reports.values() if report])}"]


def compilers_table(reports: dict[str, Report]) -> list[str]:
    """Return the table of steps compiled by both; ``reports``: by flags, --tpu_compiler last."""
    rows, found = [], []
    for step in dict.fromkeys(step.rpartition(" --tpu_compiler ")[0] for step in reports):
        pair = [reports.get(f"{step} --tpu_compiler {name}") for name in COMPILERS]
        both = [report for report in pair if report and report["fits"]]
        if len(both) < len(COMPILERS):
            continue
        found += both
        where, model = described(step)
        seconds = [report["expected_step_s"] for report in both]
        rows.append(
            [
                f"{model}, {where}",
                *(f"{each * 1e3:,.1f}" for each in seconds),
                f"{100 * (seconds[1] / seconds[0] - 1):+.1f} %",
                *(f"{waiting_s(report) * 1e3:.1f}" for report in both),
                *(f"{report['peak_hbm_bytes'] / GIB:.2f}" for report in both),
            ]
        )
    if not found:
        return ["No step is compiled by both yet."]
    ms, waiting, gib = (
        [f"{what}, {report['versions']['libtpu']}" for report in found[:2]]
        for what in ("ms", "waiting", "GiB")
    )
    head = ["model, slice", *ms, "difference", *waiting, *gib]
    return [*markdown([head, *rows]), "", made_by(found)]


def waiting_s(report: dict[str, Any]) -> float:
    """Return the seconds of a step in which nothing is computed."""
    waits = ("waiting", "dma", "host", "dcn")
    return sum(report[f"expected_{name}_s"] for name in waits)


if __name__ == "__main__":
    main()
