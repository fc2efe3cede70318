"""``python docs/overview.py FOLDER``: draw overview.png, the picture of README.md.

FOLDER has a folder of a run for each form of sharding, by the names below, all with
``@recipes/digits.args --log_step_interval 1 --max_steps 220``. The throughput is that of the table
in docs/evidence/benchmarks.md.
"""

import json
import re
import sys
from pathlib import Path

import matplotlib.pyplot as plt

DOCS = Path(__file__).resolve().parent
FORMS = {
    "one_process": "PyTorch, one process",
    "fsdp2": "FSDP2, 2 processes",
    "spmd": "PyTorch/XLA SPMD, 4 devices",
    "torchtpu": "TorchTPU's CPU plugin",
}
"""The folders of the runs, with their labels; the first is what the others are compared with."""
VARIANTS = {
    "fsdp2": "FSDP2",
    "fsdp2+compile": "FSDP2\ncompiled",
    "megatron+compile": "Megatron\ncompiled",
    "te+fp8-current": "Transformer-\nEngine FP8",
}


def losses(folder: Path) -> dict[int, float]:
    """Return the training loss of each step of a run."""
    lines = map(json.loads, (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines())
    return {line["step"]: line["loss"] for line in lines if "grad_norm" in line}


def main(folder: Path) -> None:
    figure, axes = plt.subplot_mosaic(
        [["loss", "speed"], ["difference", "speed"]],
        figsize=(10, 4),
        width_ratios=(3, 2),
        height_ratios=(3, 1),
        layout="constrained",
    )
    loss, difference, speed = (axes[name] for name in ("loss", "difference", "speed"))
    reference = losses(folder / next(iter(FORMS)))
    for number, (name, label) in enumerate(FORMS.items()):
        run = losses(folder / name)
        loss.plot(run.keys(), run.values(), label=label, lw=6 - 1.2 * number, alpha=0.8)
        distances = [abs(value - reference[step]) for step, value in run.items()]
        difference.plot(run.keys(), distances, lw=1)
    loss.set(ylabel="training loss", title="The same run on every backend")
    loss.tick_params(labelbottom=False)
    loss.legend(frameon=False)
    difference.set(xlabel="step", ylabel="difference", yscale="log")

    table = (DOCS / "evidence" / "benchmarks.md").read_text(encoding="utf-8")
    for offset, model in ((-0.2, "ViT-L/16"), (0.2, "6 blocks of 10B")):
        row = rf"^\| {model} \| (\S+) \| \d+ \| [\d.]+ \| [\d,]+ \| ([\d.]+) \|"
        ratios = dict(re.findall(row, table, re.M))
        places = [place for place, name in enumerate(VARIANTS) if name in ratios]
        heights = [float(ratios[name]) for name in VARIANTS if name in ratios]
        bars = speed.bar([place + offset for place in places], heights, 0.4, label=model)
        speed.bar_label(bars, fmt="%.2f")
    speed.axhline(1, color="black", lw=1)
    speed.set_xticks(range(len(VARIANTS)), list(VARIANTS.values()), fontsize=8)
    speed.set(ylabel="images/s, timm's loop = 1", title="One H200", ylim=(0, 1.9))
    speed.legend(frameon=False, loc="upper left")
    figure.savefig(DOCS / "overview.png", dpi=130)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
