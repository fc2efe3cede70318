"""What narrower numbers cost in accuracy: the digits of `make train`, by format and seed.

    python benchmarks/number_formats.py --epochs 20 --seeds 0 1 2

Trains recipes/digits.args by AdamW in bf16 on two virtual devices of the CPU, with scanned blocks,
by the real command line; the rows are the flags added to it. Prints top-1 on val/, in percent, of
each seed. Formats are computed as on a TPU, at the pace of a CPU: times say nothing.
"""

import argparse
import json
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tqdm import tqdm

from benchmarks.common import ROOT, commit, markdown, run_python

FORMATS = (
    "",
    "--optimizer_dtype bf16",
    "--residual_dtype bf16",
    "--gather_dtype fp8",
    "--matmul int8",
    "--optimizer_dtype bf16 --residual_dtype bf16 --gather_dtype fp8",
)
HOW = "--optimizer adamw --precision bf16 --grad_ckpt full --cpu_devices 2 --num_workers 2".split()
SELDOM = 1000
"""Epochs between evaluations, and between checkpoints: only the last of each is wanted."""


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--epochs", type=int, default=60, help="default: 60")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2], help="default: 0 1 2")
    parser.add_argument(
        "--formats", nargs="+", default=list(FORMATS), help="flags of a row, each one word"
    )
    return parser.parse_args()


def main() -> None:
    asked = parse()
    found: dict[str, list[dict]] = {flags: [] for flags in asked.formats}
    # By seed first: what is ended early has compared all formats.
    tries = [(flags, seed) for seed in asked.seeds for flags in asked.formats]
    for flags, seed in tqdm(tries, unit="run"):
        found[flags].append(train(asked.epochs, seed, flags))
        tqdm.write(f"seed {seed} {flags}: {found[flags][-1]}", file=sys.stderr)
    print("\n".join(table(found, asked.seeds)))
    print(f"\n{asked.epochs} epochs, commit {commit()}")


def train(epochs: int, seed: int, flags: str) -> dict:
    """Return the last evaluation of a run."""
    data = ROOT / "datasets" / "digits"
    with tempfile.TemporaryDirectory() as folder:
        done = run_python(
            *("run_vit_training.py", "@recipes/digits.args", "--data_dir", str(data), *HOW),
            *("--num_epochs", str(epochs), "--seed", str(seed), "--ckpt_dir", folder),
            *("--ckpt_epoch_interval", str(SELDOM), "--test_epoch_interval", str(SELDOM)),
            *flags.split(),
        )
        if done.returncode:
            sys.exit(done.stdout + done.stderr)
        lines = (Path(folder) / "metrics.jsonl").read_text().splitlines()
    return [record for record in map(json.loads, lines) if "val_loss" in record][-1]


def table(found: dict[str, list[dict]], seeds: list[int]) -> list[str]:
    """Return the rows of a Markdown table."""
    heads = ["flags", *(f"seed {seed}" for seed in seeds), "mean", "spread", "val loss, mean"]
    rows = [heads]
    for flags, evaluations in found.items():
        right = [each["val_top1"] for each in evaluations]
        loss = sum(each["val_loss"] for each in evaluations) / len(evaluations)
        figures = [*right, sum(right) / len(right), max(right) - min(right)]
        cells = [f"`{flags}`" if flags else "none", *(f"{each:.2f}" for each in figures)]
        rows.append([*cells, f"{loss:.3f}"])
    return markdown(rows)


if __name__ == "__main__":
    main()
