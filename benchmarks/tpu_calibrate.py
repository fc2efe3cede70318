"""How far the expected step is from measured ones: published rows of MaxText, for docs/tpu.md.

    python benchmarks/tpu_calibrate.py        # or make tpu-calibrate, hours on 2 cores

Each row is a ViT of the published model's shape, compiled by `run_vit_training.py --compile_only`
for the same slice, and kept with its scheduled module in runs/tpu-calibrate: started again, it goes
on where it was, and works out again what the kept modules are expected to take. --again NAME
compiles a row once more. Rows go between the markers in docs/tpu.md, where others stay as they are;
the picture of all of them goes to docs/tpu_calibrate.png.
"""

import argparse
import json
import statistics
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from scipy.stats import spearmanr
from tqdm import tqdm

from benchmarks.common import ROOT, commit, markdown, rows_between, write_between
from benchmarks.compiled import add_document, report_of
from config_fields import local_path
from tools.compile_only.expected import Links, expect
from training.logs.figures import pyplot, save_figure
from training.mesh import Mesh
from xla_fsdp.tpu import parse_topology

BEGIN, END = "<!-- begin: make tpu-calibrate -->", "<!-- end: make tpu-calibrate -->"
IMAGES = {2048: "448 896", 8192: "896 1792"}
"""Height and width of images that have so many patches of 14 x 14."""


@dataclass(frozen=True)
class Row:
    """One row that MaxText publishes, and the ViT that stands for it."""

    slice: str
    topology: str
    model: str
    mfu: float
    """As published, in percent."""
    width: int
    depth: int
    hidden: int
    """Of the MLP, as wide as makes its two products those of the published model's."""
    batch: int
    """Sequences a chip."""
    recomputed: str
    tensor: int = 1
    tokens: int = 2048
    heads: int | None = None
    """Where they are not 128 wide."""
    batch_here: int | None = None
    """Where saved activations leave no room for as many."""
    residual: str = "fp32"
    """The value of ``--residual_dtype``: bf16 where there is no room for fp32."""
    weights: float | None = None
    """Parameters, 1e9, where the published MFU counts causal attention in full."""

    @property
    def name(self) -> str:
        return f"{self.slice}-{self.model}"

    @property
    def flags(self) -> list[str]:
        chips = parse_topology(self.topology).chips
        sizes = {
            "embed_dim": self.width,
            "num_blocks": self.depth,
            "num_heads": self.heads or self.width // 128,
            "mlp_ratio": self.hidden / self.width,
            "image_size": IMAGES[self.tokens],
            "batch_size": chips * (self.batch_here or self.batch),
            "mesh_tensor": self.tensor,
            "grad_ckpt": self.policy,
            "residual_dtype": self.residual,
            "tpu_topology": self.topology,
        }
        given = " ".join(f"--{name} {value}" for name, value in sizes.items())
        model = "--model vit_10b --no-qkv_bias --no-proj_bias"
        return f"--precision bf16 {model} {given}".split()

    @property
    def policy(self) -> str:
        """Return the value of ``--grad_ckpt`` that recomputes most nearly what they do."""
        return "selective" if self.recomputed == "attention" else "full"

    @property
    def products(self) -> float:
        """Return the products here over those of the published run.

        In forward passes: one, two for the gradients, and the share that is computed again. Nobody
        computes the MLP's second product again, whose result is not needed.
        """
        qkv, out = 3 * self.width**2, self.width**2
        attention = 2 * self.attended * self.tokens * self.width
        fc1 = self.width * self.hidden
        again = {
            "all": qkv + attention + out + fc1,
            "all but qkv": attention + out + fc1,
            "attention, MLP": attention + fc1,
            "out, MLP": out + fc1,
            "attention": attention,
        }
        here = {"full": again["all"], "selective": out}[self.policy]
        forward = again["all"] + fc1
        return (3 * forward + here) / (3 * forward + again[self.recomputed])

    @property
    def attended(self) -> float:
        """Return the share of attention that the published run computes: half, where its MFU counts
        causal attention in full."""
        return 1.0 if self.weights is None else 0.5

    @property
    def causal_share(self) -> float:
        """Return a step's FLOPs with causal attention by half, over those with all of it; 1 for a
        row whose published MFU does not count it in full."""
        if self.weights is None:
            return 1.0
        learned = 6e9 * self.weights
        attention = 12 * self.depth * self.tokens * self.width
        return (learned + self.attended * attention) / (learned + attention)

    @property
    def comparable(self) -> float:
        """Return the published MFU with causal attention counted as it is computed: by half."""
        return self.mfu * self.causal_share


FEWEST_FOR_A_FIT = 6
GATED = 3 / 2
"""The width of an MLP without a gate that has the weights of one with it."""
ROWS = [
    Row(
        *("v5e-256", "v5e:16x16", "32B", 66.86, 8192, 32, int(GATED * 28672), 4, "all"),
        residual="bf16",
    ),
    Row("v5p-128", "v5p:4x4x4", "32B", 71.47, 8192, 32, int(GATED * 28672), 6, "attention", 4),
    Row("v5e-256", "v5e:16x16", "16B", 61.10, 4096, 32, int(GATED * 28672), 6, "all"),
    Row(
        *("v4-384", "v4:4x4x12", "52B", 56.0, 12288, 32, 49152, 7, "all"),
        heads=48,
        batch_here=4,
    ),
    Row("v5p-128", "v5p:4x4x4", "64B", 70.31, 8192, 64, int(GATED * 28672), 3, "attention", 4),
    Row(
        *("v5e-256", "v5e:16x16", "64B", 59.90, 8192, 64, int(GATED * 28672), 2, "all"),
        residual="bf16",
    ),
    Row(
        *("v6e-256", "v6e:16x16", "Llama-3.1-8B", 45.46, 4096, 32, int(GATED * 14336), 4),
        *("attention, MLP", 1, 8192),
        weights=7.5,
    ),
    Row("v4-128", "v4:4x4x4", "22B", 56.7, 6144, 48, 24576, 13, "all", heads=24, batch_here=8),
    Row("v5e-256", "v5e:16x16", "128B", 56.06, 8192, 64, int(GATED * 57344), 1, "all but qkv", 16),
    Row("v5p-256", "v5p:4x4x8", "128B", 68.68, 8192, 64, int(GATED * 57344), 1, "attention", 8),
    Row(
        *("v6e-256", "v6e:16x16", "Llama-3.1-70B", 50.33, 8192, 80, int(GATED * 28672), 4),
        *("all but qkv", 1, 8192),
        batch_here=1,
        weights=69.5,
    ),
    Row(
        *("tpu7x-128", "tpu7x:4x4x4", "Llama-3.1-70B", 52.32, 8192, 80, int(GATED * 28672), 4),
        *("out, MLP", 1, 8192),
    ),
    Row("v5p-1024", "v5p:8x8x8", "256B", 67.09, 16384, 64, int(GATED * 57344), 1, "attention", 8),
    Row("v5p-1024", "v5p:8x8x8", "512B", 63.99, 16384, 128, int(GATED * 57344), 2, "all", 8),
    Row("v5p-2048", "v5p:8x8x16", "1024B", 55.35, 16384, 128, int(GATED * 114688), 2, "all", 16),
    Row("v5p-4096", "v5p:8x16x16", "1024B", 64.80, 16384, 128, int(GATED * 114688), 2, "all", 16),
]


@dataclass(frozen=True)
class Outcome:
    """What the compiler expects of a row; shares of peak FLOP/s in percent."""

    row: Row
    commit: str
    """That it was compiled at."""
    report: dict[str, Any]
    mfu: float
    """Of the ViT as it was compiled."""
    comparable: float
    """The same as if it computed again what the published run does, and causal attention by half
    where that does."""
    waiting: float
    """Percent of the step."""

    @property
    def error(self) -> float:
        """Return by how many points the expected MFU is above the published one."""
        return self.comparable - self.row.comparable


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names: list[str] = [row.name for row in ROWS]
    for flag, default, text in (
        ("--rows", names, f"of {', '.join(names)}; default: all"),
        ("--again", [], "rows to compile although they are kept; default: none"),
    ):
        parser.add_argument(
            flag, nargs="+", choices=names, default=default, metavar="NAME", help=text
        )
    parser.add_argument(
        "--kept",
        type=local_path,
        default=ROOT / "runs" / "tpu-calibrate",
        help="folder of reports and modules; default: runs/tpu-calibrate",
    )
    add_document(parser, "tpu.md")
    args = parser.parse_args()
    found: list[tuple[Row, Outcome | str]] = []
    for row in tqdm([row for row in ROWS if row.name in args.rows], desc="compile", unit="row"):
        found.append((row, measure(row, args.kept / row.name, row.name in args.again)))
    before = {f"{row[0]}-{row[1]}": row for row in rows_between(args.document, BEGIN, END)}
    rows = before | {row.name: cells(row, outcome) for row, outcome in found}
    write_between(args.document, BEGIN, END, table(rows))
    plot(compared(rows), args.document.with_name("tpu_calibrate.png"))


def measure(row: Row, kept: Path, again: bool) -> Outcome | str:
    """Return what the compiler expects of a row, or why it is not known."""
    path = kept / "report.json"
    if again or not path.exists():
        report = report_of(row.name, *row.flags, "--hlo_dir", str(kept))
        path.write_text(json.dumps({"commit": commit(), "report": report}))
    kept_report = json.loads(path.read_text())
    report = kept_report["report"]
    if report is None:
        return "libtpu crashes"
    if not report["fits"]:
        short = (report["peak_hbm_bytes"] - report["hbm_capacity_bytes"]) / 2**30
        return f"does not fit by {short:.1f} GiB or more"
    topology = parse_topology(row.topology)
    links = Links(topology, Mesh(**report["mesh"]).counts_by_host)
    expected = expect((kept / "graph_1.hlo").read_text(), links)
    at_peak = report["model_flops"] / topology.devices / topology.chip.peak_flops
    mfu = 100 * at_peak / expected.seconds
    waiting = 100 * (expected.seconds - expected.cycles_s - expected.kernels_s) / expected.seconds
    as_they_do = expected.seconds - (1 - row.attended) * expected.kernels_s
    comparable = 100 * at_peak * row.causal_share / as_they_do * row.products
    return Outcome(row, kept_report["commit"], report, mfu, comparable, waiting)


Cells = list[str]
"""A row of the table."""


def compared(rows: dict[str, Cells]) -> list[tuple[Row, float]]:
    """Return the rows that compile, each with its expected MFU, recomputing as they do."""
    at = HEAD.index("expected, recomputing as they do")
    given = [(row, rows[row.name]) for row in ROWS if row.name in rows]
    return [(row, float(told[at])) for row, told in given if told[at]]


def judge(found: list[tuple[Row, float]]) -> list[str]:
    """Return lines that say how good the expectation is, as it is and with one factor fitted."""
    errors = [abs(expected - row.comparable) for row, expected in found]
    pairs = [(row.comparable, expected) for row, expected in found]
    correlation = spearmanr(pairs).statistic
    lines = [
        f"Over {len(found)} rows: median error {statistics.median(errors):.1f} points, largest "
        f"{max(errors):.1f}, rank correlation {correlation:.2f}."
    ]
    if len(found) < FEWEST_FOR_A_FIT:
        return lines
    factor = statistics.median(row.comparable / expected for row, expected in found[::2])
    after = [abs(factor * expected - row.comparable) for row, expected in found[1::2]]
    return [
        *lines,
        f"One factor for all MFUs, fitted on every second row, is {factor:.3f}; on the other rows "
        f"the median error is then {statistics.median(after):.1f} points, without it "
        f"{statistics.median(errors[1::2]):.1f}.",
    ]


HEAD = [
    "slice",
    "model",
    "images a chip",
    "`--mesh_tensor`",
    "they recompute",
    "`--grad_ckpt`",
    "published MFU",
    "expected MFU",
    "expected, recomputing as they do",
    "error, points",
    "waiting, % of the step",
    "compiled at, libtpu",
]


def cells(row: Row, outcome: Outcome | str) -> Cells:
    """Return the table's row of what the compiler expects, or of why it is not known."""
    published = f"{row.mfu:.1f}"
    if row.weights is not None:
        published += f" ({row.comparable:.1f})"
    batch = str(row.batch) if row.batch_here is None else f"{row.batch_here} of {row.batch}"
    told = [row.slice, row.model, batch, str(row.tensor), row.recomputed, row.policy, published]
    if isinstance(outcome, str):
        return [*told, outcome, "", "", "", ""]
    figures = (
        f"{outcome.mfu:.1f} {outcome.comparable:.1f} {outcome.error:+.1f} {outcome.waiting:.1f}"
    )
    return [*told, *figures.split(), f"{outcome.commit}, {outcome.report['versions']['libtpu']}"]


def table(rows: dict[str, Cells]) -> list[str]:
    """Return the lines of the table, and below it how good the expectation is."""
    given = [rows[row.name] for row in ROWS if row.name in rows]
    lines = markdown([HEAD, *given])
    found = compared(rows)
    return [*lines, "", *judge(found)] if len(found) > 2 else lines


def plot(found: list[tuple[Row, float]], path: Path) -> None:
    """Draw expected against published MFU, a colour for each generation."""
    figure, axis = pyplot().subplots(figsize=(7, 6), layout="constrained")
    axis.plot([20, 80], [20, 80], color="black", linewidth=1)
    axis.fill_between([20, 80], [14, 74], [26, 86], color="black", alpha=0.08, label="6 points")
    for kind in dict.fromkeys(row.topology.partition(":")[0] for row, _ in found):
        of_kind = [(row, mfu) for row, mfu in found if row.topology.startswith(kind + ":")]
        axis.scatter(
            *zip(*((row.comparable, mfu) for row, mfu in of_kind), strict=True), label=kind
        )
        for row, mfu in of_kind:
            axis.annotate(
                row.model, (row.comparable, mfu), (5, 4), textcoords="offset points", fontsize=8
            )
    axis.set_xlabel("MFU that MaxText publishes, %")
    axis.set_ylabel("MFU expected by the compiler's cycles, %")
    axis.set_aspect("equal")
    axis.set_title("Expected against measured")
    axis.legend()
    save_figure(figure, path)


if __name__ == "__main__":
    main()
