"""How near --plan comes to an exhaustive grid: compile every point, then let the search find it.

    python benchmarks/plan_check.py        # or make plan-check; hours on 2 cores

Each problem is a model, a batch, slices, and a grid of flags small enough that all of it can be
compiled. The search may ask about half of the grid. What the compiler says is kept in
runs/plan-check, so that a check that was ended goes on where it was. A row of each goes between the
markers in docs/planning.md, where those of other problems stay; the exit code is 1 if a plan is
more than 2 % behind the grid's best.
"""

import argparse
import math
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tqdm import tqdm

from benchmarks.common import ROOT, commit, markdown, rows_between, write_between
from config_fields import local_path
from run_vit_training import read_flags
from tools.plan.plans import read_request
from tools.plan.tpu import (
    Compilations,
    ask_compiler,
    compile_words,
    computed_candidates,
    found_in,
    refusal,
)
from tools.plan.tpu_search import GOALS, ComputedCandidate, Found, Search
from xla_fsdp.tpu import CHIPS

AT_MOST = 1.02
"""What the search finds, over the best of the grid."""
KEPT = ROOT / "runs" / "plan-check" / "compiled"
BEGIN, END = "<!-- begin: make plan-check -->", "<!-- end: make plan-check -->"


@dataclass(frozen=True)
class Problem:
    """One plan to look for."""

    flags: str
    grid: dict[str, tuple[Any, ...]]
    """The values of each flag that are tried, in the place of tools.plan.tpu_search.CHOICES."""


def grid(
    grad_ckpt: tuple[str, ...] = ("full",),
    passes: tuple[int, ...] = (1,),
    attention: tuple[str, ...] = ("sdpa",),
    domain: tuple[int, ...] = (1,),
    tensor: tuple[int, ...] = (1,),
) -> dict[str, tuple[Any, ...]]:
    """Return the values to try of each flag."""
    return {
        "grad_ckpt": grad_ckpt,
        "grad_accum_steps": passes,
        "attention": attention,
        "mesh_domain": domain,
        "mesh_tensor": tensor,
    }


SHORT = ("sdpa", "whole")
POLICIES = ("full", "selective", "none")
PROBLEMS = {
    "small": Problem(
        "--embed_dim 256 --num_blocks 4 --num_heads 4 --image_size 64 --patch_size 16 "
        "--batch_size 256 --tpu_topology v5e:2x2",
        grid(passes=(1, 4), attention=SHORT, tensor=(1, 2)),
    ),
    "base": Problem(
        "--model vit_base_patch16_224 --batch_size 256 --tpu_topology v5e:2x2,v5e:2x4",
        grid(passes=(1, 4), attention=SHORT),
    ),
    "large": Problem(
        "--model vit_large_patch16_224 --batch_size 1024 --tpu_topology v5e:2x4",
        grid(POLICIES, attention=SHORT),
    ),
    "1024 pixels": Problem(
        "--model vit_large_patch16_224 --image_size 1024 --batch_size 64 --tpu_topology v5e:4x4",
        grid(("full", "selective"), attention=("flash",), domain=(1, 2, 4)),
    ),
    "10B": Problem(
        "--model vit_10b --batch_size 1024 --tpu_topology v6e:16x16",
        grid(("full", "selective"), attention=("whole",), tensor=(1, 2, 4)),
    ),
    "10B, two slices": Problem(
        "--model vit_10b --batch_size 1024 --mesh_dcn 2 --tpu_topology v5e:8x8",
        grid(("full", "selective"), attention=("whole",), tensor=(1, 4)),
    ),
    # On the steps of these the arithmetic was not fitted.
    "huge": Problem(
        "--model vit_huge_patch14_224 --batch_size 512 --tpu_topology v5e:4x4",
        grid(POLICIES, passes=(1, 4), attention=("whole",)),
    ),
    "large, v6e": Problem(
        "--model vit_large_patch16_224 --batch_size 512 --tpu_topology v6e:2x2,v6e:2x4",
        grid(POLICIES, attention=("whole",)),
    ),
    "giant, v5p": Problem(
        "--model timm/vit_giant_patch14_dinov2 --image_size 224 --batch_size 512 "
        "--tpu_topology v5p:2x2x4",
        grid(POLICIES, attention=("whole",), tensor=(1, 4)),
    ),
    "512 pixels": Problem(
        "--model vit_base_patch16_224 --image_size 512 --batch_size 128 --tpu_topology v5e:2x2",
        grid(("full", "selective"), attention=("sdpa", "flash"), domain=(1, 2)),
    ),
    "384 pixels": Problem(
        "--model vit_large_patch16_224 --image_size 384 --batch_size 256 "
        "--tpu_topology v5e:2x4,v5e:4x4",
        grid(POLICIES, attention=("whole",)),
    ),
    "base, v5p": Problem(
        "--model vit_base_patch16_224 --batch_size 1024 --tpu_topology v5p:2x2x1,v5p:2x2x2",
        grid(POLICIES, attention=("whole",)),
    ),
    "DINOv3's 7B": Problem(
        "--model timm/vit_7b_patch16_dinov3 --image_size 256 --batch_size 256 "
        "--tpu_topology v5p:4x4x4",
        grid(("full", "selective"), attention=("whole",), tensor=(1, 4)),
    ),
}


@dataclass(frozen=True)
class Row:
    """What came out of one problem."""

    name: str
    points: int
    asked: int
    behind: dict[str, float]
    """The search's best over the grid's, by goal."""


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--problems",
        nargs="+",
        choices=PROBLEMS,
        default=list(PROBLEMS),
        metavar="NAME",
        help=f"of {', '.join(PROBLEMS)}; default: all",
    )
    parser.add_argument(
        "--document",
        type=local_path,
        default=ROOT / "docs" / "planning.md",
        help="file with the markers; default: docs/planning.md",
    )
    args = parser.parse_args()
    rows = [check(name, PROBLEMS[name]) for name in args.problems]
    write_table(args.document, rows)
    return 0 if all(each <= AT_MOST for row in rows for each in row.behind.values()) else 1


def check(name: str, problem: Problem) -> Row:
    """Compile the whole grid of a problem, and compare what the search finds with its best."""
    flags = read_flags(["--plan", "--precision", "bf16", *problem.flags.split()])
    request = read_request(flags.run, flags.xla, tuple(CHIPS))
    options = [
        option
        for option in computed_candidates(request, problem.grid)
        if not refusal(request, option.candidate)
    ]
    compilations = Compilations(KEPT)
    truth: dict[ComputedCandidate, Found] = {}
    for option in tqdm(options, desc=name, unit="step"):
        answer = compilations.ask(compile_words(request.config, flags.xla, option.candidate))
        truth[option] = found_in(answer) or Found(False, 0.0, math.inf)
    search = Search(options)
    asked = math.ceil(len(options) / 2)
    ask_compiler(request, search, compilations, asked=asked)
    behind = {}
    for goal in GOALS:
        best = min(figure(goal, option, found.step_s) for option, found in truth.items())
        reached = min(
            figure(goal, option, search.found[option.candidate].step_s)
            for option in search.useful()
        )
        behind[goal] = reached / best
    return Row(name, len(options), len(search.found), behind)


def figure(goal: str, option: ComputedCandidate, step_s: float) -> float:
    """Return what a goal wants as little as possible of, as a number; infinite for no fit."""
    value = GOALS[goal](option, step_s)
    if not isinstance(value, tuple):
        return value
    chips, cost = value
    return chips * 1e9 + cost if step_s < math.inf else math.inf


def write_table(document: Path, rows: list[Row]) -> None:
    """Put rows between the markers of a document, in the place of those of the same problems."""
    table = {cells[0]: cells for cells in rows_between(document, BEGIN, END)}
    for row in rows:
        shares = (f"+{100 * (row.behind[goal] - 1):.1f} %" for goal in GOALS)
        table[row.name] = [row.name, str(row.points), str(row.asked), *shares, commit()]
    head = ["problem", "points of the grid", "compiled by the search", *GOALS, "commit"]
    found = [table[name] for name in PROBLEMS if name in table]
    write_between(document, BEGIN, END, markdown([head, *found]))


if __name__ == "__main__":
    sys.exit(main())
