"""Run what is to be measured next on one GPU, in order of priority, until the time is over.

    python3 -m benchmarks.gpu_queue --minutes 14 --folder gpu_queue

Needs one GPU of 80 GB and PyTorch 2.11 or newer; the rows with FP8 also torchao, those with
Megatron-FSDP also megatron-fsdp. Each row is a command with a limit of time. It writes its output
to ROW.txt, and most also their figures to ROW.json, at once after each measurement; the first one
draws ROW.png. A row that fails does not end the others. The table at the end, also in queue.txt,
names the rows that failed, ran out of time, or were not started. --rows runs only some; --dry_run
prints the commands.

--tiny is a rehearsal: small models and few steps, on the CPU too.
"""

import argparse
import os
import shlex
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.common import ROOT, commit, markdown
from config_fields import local_path, positive_number

LEAST_S = 30
"""Seconds that must be left to start a row."""


@dataclass(frozen=True)
class Row:
    """A command of Python, and what it answers."""

    question: str
    minutes: float
    command: str
    """With {size} for one of the following, and {json}, {png} and {folder} for what it writes."""
    size: str = ""
    """Its flags on a GPU."""
    tiny: str = ""
    """Its flags with --tiny."""


STEP = "-m benchmarks.gpu_step --json {json} {size}"
LARGE = "--models vit_large_patch16_224 --batch_sizes 256 --steps 20"
TINY_MODEL = "--image_size 32 --num_blocks 2"
TINY = (
    f"--models vit_tiny_patch16_224 --batch_sizes 4 {TINY_MODEL} --warmup 1 --steps 2 --repeats 1"
)

ROWS = {
    "large": Row(
        "ViT-L/16 beside timm's compiled",
        5,
        f"{STEP} --plot {{png}} --variants timm+compile fsdp2+compile megatron+compile",
        f"{LARGE} --repeats 3",
        TINY,
    ),
    "candidates": Row(
        "ViT-L/16: which candidates pay",
        6,
        f"{STEP} --variants fsdp2+compile fsdp2+compile+bias fsdp2+compile+gelu fsdp2+compile+norm "
        "fsdp2+compile+bias+gelu+norm fsdp2+compile+bias+gelu+norm+tuned",
        f"{LARGE} --repeats 2",
        TINY,
    ),
    "wide": Row(
        "6 blocks of the 10B model",
        5,
        f"{STEP} --variants timm+compile fsdp2+compile fsdp2+compile+bias+gelu+norm "
        "fsdp2+compile+fp8 megatron+compile+fp8",
        "--models vit_10b --batch_sizes 64 --num_blocks 6 --steps 15 --repeats 2",
        "--models vit_10b --batch_sizes 4 --image_size 28 --num_blocks 1 --embed_dim 64 "
        "--num_heads 4 --warmup 1 --steps 2 --repeats 1",
    ),
    "others": Row(
        "ViT-L/16: the other candidates",
        6,
        f"{STEP} --variants fsdp2+compile fsdp2+compile+cudagraph fsdp2+compile+gemm "
        "fsdp2+compile+flash fsdp2+compile+reduce-bf16 fsdp2+compile+unsharded "
        "timm+reduce-overhead timm+max-autotune",
        f"{LARGE} --repeats 2",
        TINY,
    ),
    "dino": Row(
        "DINOv2's step, 2 + 8 crops, ViT-L/16",
        5,
        f"{STEP} --objective dino --variants timm+compile timm fsdp2+compile",
        "--models vit_large_patch16_224 --batch_sizes 64 --steps 10 --repeats 2",
        f"{TINY} --local_crop_size 16 --koleo_group 2 --dino_prototypes 64 --ibot_prototypes 64",
    ),
    "profile": Row(
        "where the time of ViT-L/16 goes",
        2,
        "run_vit_training.py --backend cuda --fake_data {size} --grad_ckpt none --profile 8:10 "
        "--max_steps 12 --ckpt_dir {folder}/profile",
        "--model vit_large_patch16_224 --batch_size 256 --precision bf16",
        f"--model vit_tiny_patch16_224 --batch_size 4 {TINY_MODEL}",
    ),
    "tests": Row(
        "the tests for one GPU",
        6,
        "-m pytest -q -m gpu {size} tests/hardware/gpu",
        tiny="--collect-only",
    ),
    "models": Row(
        "ViT-B/16 and ViT-H/14",
        6,
        f"{STEP} --variants timm+compile timm fsdp2+compile megatron+compile",
        "--models vit_base_patch16_224 vit_huge_patch14_224 --batch_sizes 512 128 --steps 15 "
        "--repeats 3",
        TINY,
    ),
    "mae": Row(
        "MAE's step, ViT-L/16",
        4,
        f"{STEP} --objective mae --variants timm+compile fsdp2+compile",
        f"{LARGE} --repeats 2",
        TINY,
    ),
    "siglip": Row(
        "SigLIP's step, B/16, beside open_clip's compiled",
        5,
        f"{STEP} --objective siglip --variants open_clip+compile fsdp2+compile",
        "--models timm/vit_base_patch16_siglip_224 --batch_sizes 1024 --grad_ckpt full --steps 10 "
        "--repeats 2",
        f"{TINY} --models timm/vit_base_patch16_siglip_224 --embed_dim 48 --num_heads 2 "
        "--text_depth 2 --text_width 48 --text_heads 2 --text_length 8 --text_vocab_size 64",
    ),
    "input": Row(
        "images/s of decoding on all cores",
        2,
        "benchmarks/data.py {size}",
        "--workers 16 --repeats 3",
        "--images 32 --batch_size 8 --repeats 1",
    ),
}
"""In order of priority."""


def words_of(name: str, folder: Path, *, tiny: bool) -> list[str]:
    row = ROWS[name]
    command = row.command.replace("{size}", row.tiny if tiny else row.size)
    places = {"json": folder / f"{name}.json", "png": folder / f"{name}.png", "folder": folder}
    return [sys.executable, *(word.format(**places) for word in shlex.split(command))]


def run(words: list[str], output: Path, seconds: float) -> str:
    """Run a command in a process group of its own; return how it ended."""
    started = time.monotonic()
    with output.open("w", encoding="utf-8") as file:
        process = subprocess.Popen(
            words,
            cwd=ROOT,
            env={**os.environ, "TQDM_DISABLE": "1"},  # bars are for terminals
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            code = process.wait(timeout=seconds)
        except subprocess.TimeoutExpired:
            return f"stopped after {seconds:.0f} s"
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
    took = time.monotonic() - started
    return f"{took:.0f} s" if code == 0 else f"exit code {code} after {took:.0f} s"


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--minutes", type=positive_number, default=14, help="for all rows (default: 14)"
    )
    parser.add_argument(
        "--folder", type=local_path, default=Path("gpu_queue"), help="default: gpu_queue"
    )
    parser.add_argument("--rows", nargs="+", choices=ROWS, default=list(ROWS))
    parser.add_argument("--tiny", action="store_true", help="rehearse with small models")
    parser.add_argument("--dry_run", action="store_true", help="print the commands")
    options = parser.parse_args()
    options.folder = options.folder.resolve()  # the commands run in the project's folder
    return options


def main() -> None:
    options = parse()
    if options.dry_run:
        for name in options.rows:
            words = words_of(name, options.folder, tiny=options.tiny)
            print(f"# {ROWS[name].question}, up to {ROWS[name].minutes} min")
            print(shlex.join(["python3", *words[1:]]))
        return
    options.folder.mkdir(parents=True, exist_ok=True)
    end = time.monotonic() + 60 * options.minutes
    rows = [["row", "question", "result"]]
    for name in options.rows:
        left = end - time.monotonic()
        result = "not started: no time left"
        if left > LEAST_S:
            print(f"{name}: {ROWS[name].question}", flush=True)
            seconds = min(60 * ROWS[name].minutes, left)
            words = words_of(name, options.folder, tiny=options.tiny)
            output = options.folder / f"{name}.txt"
            result = run(words, output, seconds)
            print(output.read_text(encoding="utf-8", errors="replace"), flush=True)
        rows.append([name, ROWS[name].question, result])
        table = "\n".join([f"commit {commit()}", "", *markdown(rows)]) + "\n"
        (options.folder / "queue.txt").write_text(table, encoding="utf-8")
    print(table)


if __name__ == "__main__":
    main()
