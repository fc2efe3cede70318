"""Every command of README.md, docs/ and ``make help``, typed word for word on a new machine.

RUN has those that a CPU can run, with what they must show. All others are typed, too: CHECKS tells
by their first words what is in the place of hardware or a service, and sees that they are valid.
"""

import dataclasses
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.fakes.new_machine import Machine
from tests.support.cli import ROOT, train_tiny_gpu
from tests.support.documented_commands import (
    Command,
    commands_of,
    documented_commands,
    known_flags,
)
from tests.support.documented_output import quoted_after, quoted_lines, quotes, same_form
from tests.support.stopping import ALONE, stop
from tests.support.trained_models import put_trained
from tests.support.typed_with_fakes import (
    benchmark_takes,
    compiles,
    consolidates,
    docker_builds,
    docker_runs,
    draws_from_a_table,
    draws_xrays,
    explains_profile,
    fine_tunes_beans,
    gcloud_sets_it,
    gcloud_takes,
    gcloud_takes_there,
    installs_transformer_engine,
    make_knows,
    names_packages,
    on_a_pod,
    on_gke,
    packs_archives,
    plans,
    prepares_photographs,
    pushes,
    replays,
    starts_from_pairs,
    trains,
    trains_in_background,
    trains_on_a_table,
    uses_captions,
    writes_towers,
)


@dataclass
class Run:
    """Ends with 0. ``shows``: patterns of its output; ``leaves``: files, below home or project."""

    shows: tuple[str, ...] = ()
    leaves: tuple[str, ...] = ()
    removes: tuple[str, ...] = ()
    trained: bool = False
    """Needs trained models at ~/vit_10b/step_1000 and ~/vit_large/step_12510, and images."""
    long: bool = False
    quoted: bool = False
    """The block after it in its document is what it prints."""
    shorter: str = ""
    """What is typed after it, where many repeats and blocks make its figures accurate."""


# -- every command, by its beginning --------------------------------------------------

ROW = r"^\| %s \| %s \| [\d.| ]+ \| 1 \| 0 \|$"  # one execution a step, no compilation
ONE_STEP = "--steps 1 --repeats 1 --num_blocks 2"  # of benchmarks/xla_step.py
START_ROW = r"^\| \w+(-dirty)? \| 1\.00 \| 1\.00 \| in all [\d.]+, cores [\d.]+, imports [\d.]+, "

REPORT = Run(
    (r"^report: \S+/vit_10b/report.html$",),
    leaves=("../vit_10b/report.html",),
    trained=True,
    long=True,
)
RUN: dict[str, Run] = {
    "make train": Run(
        (
            r"^training completed: step 550, val top-1 (9[7-9]|100)\.\d+ %, checkpoint "
            r"runs/digits-\S+/step_550, log \S+/metrics\.jsonl, plot \S+/curves\.png\n\Z",
        ),
        leaves=(
            "datasets/digits/train/9",
            "runs/digits-*/step_550",
            "runs/digits-*/metrics.jsonl",
            "runs/digits-*/curves.png",
            "runs/digits-*/tensorboard",
            "runs/digits-*/run.json",
        ),
        long=True,
    ),
    "make train-domain": Run(
        (
            r"^XLA: 4 CPU device\(s\), .*mesh domain 4",
            r"^training completed: step 896, val top-1 ([6-9]\d|100)\.\d+ %, checkpoint "
            r"runs/mosaics-\S+/step_896, log \S+/metrics\.jsonl, plot \S+/curves\.png\n\Z",
        ),
        leaves=("runs/mosaics-*/step_896", "runs/mosaics-*/curves.png"),
        long=True,
    ),
    "source .venv/bin/activate": Run(),
    "python3 -m pip install -r requirements-tpu.txt": Run(
        (r"^Requirement already satisfied: torch_xla==",)
    ),
    "python3 run_vit_training.py @recipes/digits.args --data_dir datasets/digits --backend cuda "
    "--print_config": Run((r"^--model vit_tiny_patch16_224$",), quoted=True),
    "python3 run_vit_training.py --help": Run((r"^  --fake_data ",)),
    "python3 run_vit_training.py --help all": Run((r"^  --flatten_parameters ",)),
    "python3 run_vit_training.py --help xla": Run((r"^  --flatten_parameters ",)),
    "python3 run_vit_training.py --help ema": Run((r"^  --model_ema ", r"^  --use_ema ")),
    "python3 run_vit_training.py --fake_data --model vit_tiny_patch16_224": Run(
        (
            r"^data: fake data \(zeros\)",
            r"^epoch 1 step 10, lr: ",
            r"^epoch 1 step 10, val loss: [\d.]+, accuracy on val: .* of 80 images, top-5: .*$",
            r"^training completed: step 10, .*, checkpoint runs/vit_fsdp/step_10, log ",
        ),
        leaves=("runs/vit_fsdp/step_10", "runs/vit_fsdp/metrics.jsonl"),
        long=True,
    ),
    "python3 -m torch.distributed.checkpoint.format_utils": Run(
        leaves=("vit_10b.pt",), trained=True
    ),
    "python3 run_vit_training.py --predict": Run(
        (r"^cat\.jpg\n( +\d+\.\d+%  \d\n){5}", r"^holiday/beach/1\.png\n( +\d+\.\d+%  \d\n){5}"),
        trained=True,
        long=True,
    ),
    "python3 run_vit_training.py --eval_only": Run(
        (r"^val loss: [\d.]+, accuracy on val: [\d.]+ % of 359 images, top-5: [\d.]+ %$",),
        trained=True,
        long=True,
    ),
    ".venv/bin/python -m pytest": Run((r"^\d+ passed(, \d+ deselected)? in ",), long=True),
    "python3 run_vit_training.py --eval_only --eval_report": Run(
        (r"^report on 10 classes: report$",),
        leaves=tuple(
            f"report/{name}"
            for name in (
                *("evaluation.html", "per_class.csv", "confusion.csv", "confusion.png"),
                *("reliability.png", "errors.csv"),
            )
        ),
        trained=True,
        long=True,
        quoted=True,
    ),
    "python3 run_vit_training.py --eval_only --json": Run(
        leaves=("evaluation.json",), trained=True, long=True
    ),
    "python3 run_vit_training.py --eval_only --knn": Run(
        (
            r"^k-NN on val: [\d.]+ % \(k 10\), .* of 359 images, compared with 1,438 of train$",
            r"^linear probe on val: [\d.]+ % of 359 images, trained on 1,438 of train, best with ",
        ),
        trained=True,
        long=True,
    ),
    "python3 run_vit_training.py --eval_only --segment_probe": Run(
        (r"^segmentation on val: mIoU [\d.]+ %, .* of 512 images by a linear probe, trained on ",),
        leaves=("report/segment.csv", "report/segment.png"),
        trained=True,
        long=True,
        quoted=True,
    ),
    "python3 run_vit_training.py --features features": Run(
        (r"^features \((class, )?mean\) of 1,797 images: features$",),
        leaves=(
            "features/features.json",
            "features/pca.png",
            "features/val-00000-00000.safetensors",
        ),
        trained=True,
        long=True,
    ),
    "make train-mae": Run(
        (r"^training completed: step 1100, val loss 0\.\d+, checkpoint runs/digits-mae-",),
        leaves=("runs/digits-mae-*/step_1100", "runs/digits-mae-*/reconstructions.png"),
        long=True,
        quoted=True,
    ),
    "make train-dino": Run(
        (
            r"^epoch 40 step 440, k-NN on val: [\d.]+ % \(k 10\)",
            r"^training completed: step 440, checkpoint runs/digits-dino-",
        ),
        leaves=("runs/digits-dino-*/step_440",),
        long=True,
        quoted=True,
    ),
    "make train-siglip": Run(
        (
            r"^training completed: step \d+, val recall@1 \d+\.\d+ %, checkpoint runs/"
            r"digits-siglip-",
        ),
        leaves=("runs/digits-siglip-*/curves.png",),
        long=True,
        quoted=True,
    ),
    "python3 run_vit_training.py --plan @recipes/dinov3_7b.args": Run(
        (
            r"^v6e:16x16 +256 .* arithmetic$",
            r"^fastest: .*, estimated by arithmetic, not compiled$",
        ),
        leaves=("runs/plan/tpu.png",),
        long=True,
    ),
    "python benchmarks/xla_step.py --devices 1 2 4": Run(
        (ROW % ("spmd", 4), ROW % ("wrapper", 4), ROW % ("nested", 1)), long=True, shorter=ONE_STEP
    ),
    "python benchmarks/xla_step.py --devices 1 2 --forms spmd": Run(
        (ROW % ("spmd", 2), ROW % ("unrolled", 2)), long=True, shorter=ONE_STEP
    ),
    "python benchmarks/xla_step.py --devices 1 2 --forms plain": Run(
        (
            ROW % ("spmd", 2),
            r"^\| plain \| 1 \| [\d.]+ \| 1\.00 \|",
            r"^\| fsdp2 \| 1 \| [\d.]+ \|",
        ),
        long=True,
        shorter=ONE_STEP,
    ),
    "python benchmarks/gpu_step.py --models": Run(
        (
            *(
                rf"^\| vit_tiny_patch16_224 \| {variant} \| 4( \| [\d.]+%?){{4}} \|"
                for variant in ("timm", "fsdp2", r"fsdp2\+compile")
            ),
            r"\| megatron \| 4 \| --fsdp megatron requires CUDA: on the CPU use --fsdp fsdp2 \|",
            r"\| fsdp2\+te \| 4 \| --block te: TransformerEngine is not installed",
            r"\| fsdp2\+te\+fp8 \| 4 \| --fp8 current requires --precision bf16, not fp32",
        ),
        leaves=("cpu.json", "cpu.png"),
        long=True,
    ),
    "python3 -m benchmarks.gpu_queue": Run(
        (r"^# ViT-L/16 beside timm's compiled, up to 5 min$",), shorter="--dry_run"
    ),
    "python benchmarks/data.py --repeats": Run(
        (r"^  ratio per core \d\.\d\d",), long=True, shorter="--repeats 1 --seconds 1"
    ),
    "python benchmarks/data.py --crops": Run(
        (r"^  ratio per core \d\.\d\d",), long=True, shorter="--repeats 1 --seconds 1"
    ),
    "python benchmarks/checkpoint.py": Run(
        (r"\| fsdp2 \| 5 MB/s \|",), long=True, shorter="--repeats 1"
    ),
    "python benchmarks/domain_parallel.py --image_size_start 128": Run(
        tuple(rf"^\| cuda \| 1 \| {n} \| 256x256 \| 1 \| [\d,]+ \| [\d.]+ \| " for n in (1, 2)),
        leaves=("cpu.csv", "cpu.png"),
        long=True,
        shorter="--num_warmup 2 --num_iterations 5",
    ),
    "python benchmarks/native_resolution.py": Run(
        (
            r"^\| strips \| native \| [\d.]+ \|",
            r"^\| stretched \| crop \| [\d.]+ \|",
            r"^\| xla \| 576 \| [\d.]+ \| [\d.]+ \| [\d.]+ \|$",
        ),
        leaves=("native.json", "native.png"),
        long=True,
        shorter="--seeds 1 --epochs 1 --digits 160 --steps 1 --repeats 1",
    ),
    "python benchmarks/image_text.py": Run(
        (r"^\| image to 88 texts, recall@1/5/10 \| [\d.]+ ", r"^\| right one of two twins, place "),
        leaves=("image_text.json",),
        long=True,
        shorter="--seeds 1 --epochs 1",
    ),
    "python3 run_vit_training.py --use_ema": Run((r"top-5: [\d.]+ %$",), trained=True, long=True),
    "python3 run_vit_training.py --self_check --fake_data": Run(
        (r"^pass  checkpoint read ", r"^self check passed: 13 checks, "), long=True
    ),
    "python3 -m venv .venv-gpu && source": Run(leaves=(".venv-gpu/bin/activate",)),
    "python3.11 -m venv .venv-torchtpu": Run(leaves=(".venv-torchtpu/bin/activate",)),
    "python3 -m launch.xla_dist --help": Run((r"^  --restart-tpuvm-pod-server",)),
    "python3 run_vit_training.py --compile_only --tpu_topology v5p:4x4x8": Run(
        (
            r"^slice +v5p:4x4x8, 128 chips$",
            r"^model +10,077,917,160 parameters, global batch 1024$",
            r"^verdict +fits, ",
            r"^peak HBM per chip +3\.\d\d GiB of 95\.74 GiB$",
            r"^highest MFU +8\d\.\d %$",
            r"^expected images/s +\d{4}$",
        ),
        long=True,
        quoted=True,
    ),
    "python3 run_vit_training.py --explain": Run(
        (
            r"^expected MFU +\d\d\.\d % \(within 3\.4 points for half of 16 published runs: .*\)$",
            r"^ms +share +runs +module .* of ideal +bound by +instruction$",
            r" 32 +blocks\.mlp\.fc1 +recompute +product +\d+ % +products ",
        ),
        long=True,
    ),
    "python3 -m data.pack /datasets/imagenet-1k": Run(
        (r"^2 shards: /\S+/datasets/imagenet-1k-shards$",), trained=True
    ),
    "python3 -m tools.show_augmentations --data_source": Run(leaves=("augmented.png",), long=True),
    "python3 -m tools.goodput --chips 64": Run(
        (r"^  save every 37 min 18 s of training \(Daly\): expected goodput 90\.96%, ",),
        quoted=True,
    ),
    "python3 -m tools.goodput --chips 4096": Run(
        (r"^  save every 37 min 52 s of training \(Daly\): expected goodput 91\.51%, ",),
        quoted=True,
    ),
    "python3 -m tools.goodput ~/vit_10b --chips": Run(
        (r"^forecast: 4,096 chips, 0\.173 failures per chip and year: ",), trained=True
    ),
    "python3 -m tools.convert ~/vit_10b/step_1000": Run(
        (r"^converted /\S+/vit_10b/step_1000: 31 tensors, 111,528 bytes, to vit_10b.safetensors$",),
        leaves=("vit_10b.safetensors",),
        trained=True,
        long=True,
    ),
    "python3 -m tools.convert ~/vit_10b vit_10b_hf": Run(
        leaves=("vit_10b_hf/model.safetensors", "vit_10b_hf/config.json"), trained=True, long=True
    ),
    "python3 -m tools.convert ~/vit_large/step_12510": Run(
        leaves=("vit_large_bf16.pt",), trained=True, long=True
    ),
    "python3 -m tools.convert ~/downloads/vit_recipe": Run(
        (r"^converted \S+/step_500_loss_1.234: 20 tensors, ",),
        leaves=("vit_recipe.safetensors",),
        trained=True,
        long=True,
    ),
    "python3 -m tools.convert ~/downloads/vit_large": Run(
        leaves=("vit_large_dcp/manifest.json", "vit_large_dcp/.metadata"), trained=True, long=True
    ),
    "python3 -m tools.goodput ~/vit_10b": Run(
        (r"^/\S+/vit_10b: \d", r"^  useful steps  ", r"^  suggestion: save every ", r"^picture: "),
        trained=True,
        quoted=True,
    ),
    "python3 -m tools.report ~/vit_10b ~/vit_large": REPORT,
    "python3 -m tools.report ~/vit_10b": REPORT,
    "python3 -m tools.report ~/vit_s16": Run(
        (r"^report: /\S+/vit_s16/report.html$",), leaves=("../vit_s16/report.html",), trained=True
    ),
    "python3 -m tools.goodput ~/vit_s16": Run((r"^  useful steps  ",), trained=True),
    "mkdir -p ~/vit_10b": Run(leaves=("../vit_10b",)),
    "mkdir -p ~/vit_s16": Run(leaves=("../vit_s16",)),
    "make format": Run((r"^All checks passed!$", r"^\d+ files left unchanged$")),
    "make bench": Run(
        (ROW % ("spmd", 1), ROW % ("nested", 1)), long=True, shorter=f"ARGS='{ONE_STEP}'"
    ),
    "make bench-start": Run(
        (START_ROW,), leaves=("runs/start.png",), long=True, shorter="ARGS='--repeats 1'"
    ),
    "make bench-checkpoint": Run(
        (r"\| xla \| disk \|", r"\| fsdp2 \| 50 MB/s \|"), long=True, shorter="ARGS='--repeats 1'"
    ),
    "make clean": Run(removes=(".venv", "datasets", "runs")),
}

TUTORIALS: dict[str, dict[str, Run]] = {
    "docs/tutorials/finetune_small_folder.md": {
        "python3 -m data.digits": Run((r"^digits: datasets/digits$",)),
        "for class in datasets/digits/train/*;": Run(leaves=("../digit_photos/digit_9/*.png",)),
        "photos=~/digit_photos; to=~/small;": Run(
            leaves=("../small/train/digit_9/*", "../small/val/digit_9/*")
        ),
        "python3 run_vit_training.py @recipes/mnist.args --backend": Run(
            (r"^training completed: step 310, val top-1 (8\d|9\d)\.\d+ %, ",)
        ),
        "python3 run_vit_training.py --eval_only --knn": Run(
            (
                r"^k-NN on val: [5-7]\d\.\d+ % \(k 10\), .* of 120 images, compared with 480 of ",
                r"^linear probe on val: [78]\d\.\d+ % of 120 images, ",
            )
        ),
        "python3 run_vit_training.py --init_from ~/runs/mnist": Run(
            (
                r"^initial weights of .*mnist: 53 tensors unchanged; dropped: head.*; new: head",
                r"^epoch 1 step 1, lr: 0, loss: 2\.[34]\d+, ",
                r"^training completed: step 300, val top-1 (9[2-9]|100)\.\d+ %, ",
            ),
            leaves=("../runs/small/curves.png",),
        ),
        "python3 run_vit_training.py @recipes/mnist.args --data_source folder --data_dir ~/small "
        "--backend": Run((r"^training completed: step 300, val top-1 (8\d|9[01])\.\d+ %, ",)),
        "python3 run_vit_training.py --resume ~/runs/small --predict "
        "datasets/digits/val/7/0017": Run(
            (r"^datasets/digits/val/7/0017\.png\n +\d+\.\d+%  digit_7$",)
        ),
        "python3 run_vit_training.py --resume ~/runs/small --predict datasets/digits/val/7 ": Run(
            leaves=("predicted.json",)
        ),
        "python3 -c 'import csv": Run(leaves=("predicted.csv",)),
        "python3 run_vit_training.py --resume ~/runs/small --predict ~/small/val ": Run(),
        "python3 -c 'import json, os": Run((r"^/\S+/small/val/digit_\d/\S+ is no digit_\d$",)),
        "python3 run_vit_training.py --eval_only --eval_report ~/report": Run(
            (r"^report on 10 classes: \S+/report$",), leaves=("../report/per_class.csv",)
        ),
        "python3 -m tools.convert": Run((r"^converted \S+/small/step_300: 55 tensors, ",)),
        "python3 -c 'import os, timm": Run((r"^\['digit_0', 'digit_1', ",)),
    },
    "docs/tutorials/mae_then_knn.md": {
        "python3 -m data.digits": Run((r"^digits: datasets/digits$",)),
        "python3 run_vit_training.py @recipes/digits_mae.args --num_epochs": Run(
            (r"^training completed: step 440, val loss 0\.[12]\d+, ",),
            leaves=("../runs/mae/reconstructions.png",),
        ),
        "python3 run_vit_training.py --eval_only --knn --probe --resume ~/runs/mae": Run(
            (r"^k-NN on val: (8\d|9\d)\.\d+ % \(k 10\)", r"^linear probe on val: 9[2-9]\.\d+ % ")
        ),
        "python3 run_vit_training.py @recipes/digits_mae.args --max_steps": Run(
            (r"^training completed: step 1, ",)
        ),
        "python3 run_vit_training.py --eval_only --knn --probe --resume ~/runs/untrained": Run(
            (r"^k-NN on val: 7\d\.\d+ % \(k 10\)", r"^linear probe on val: 9\d\.\d+ % ")
        ),
        "python3 run_vit_training.py --features ~/features --pca": Run(
            (r"^features .* of 1,797 images: ",), leaves=("../features/pca.png",)
        ),
        "python3 run_vit_training.py --init_from ~/runs/mae": Run(
            (r"^training completed: step 88, val top-1 9\d\.\d+ %, ",)
        ),
        "python3 run_vit_training.py --init_from ~/runs/untrained": Run(
            (r"^training completed: step 88, val top-1 [5-8]\d\.\d+ %, ",)
        ),
    },
}
"""Pages whose commands are typed one after the other on one machine, each by its beginning."""

CHECKS: dict[str, Callable[[Machine, Command, Path], None]] = {
    r"(PIP_EXTRA_INDEX_URL=\S+ )?make ": make_knows,
    r"gcloud config set project": gcloud_sets_it,
    r"gcloud (compute|config|storage)": gcloud_takes,
    r"docker build": docker_builds,
    r"docker run": docker_runs,
    r"python3 -m pip install": names_packages,
    r"python benchmarks/": benchmark_takes,
    r"python3 run_vit_training.py --plan": plans,
    r"python3 run_vit_training.py --compile_only": compiles,
    r"python3 .*~/photos/captions.csv": uses_captions,
    r"python3 -m data.pack ~": packs_archives,
    r"\(cd ~ && for image|photos=~/upright": prepares_photographs,
    r"python3 -m tools.convert \S+ hf-hub:": pushes,
    r"python3 -m tools.convert ~/runs/pairs": writes_towers,
    r"python3 run_vit_training.py --objective siglip --init_from": starts_from_pairs,
    r"python3 -m tools.replay_step": replays,
    r"python3 -m tools.show_augmentations .*--labels": draws_from_a_table,
    r"python3 -m tools.show_augmentations .*/xrays": draws_xrays,
    r"python3 -m tools.explain_profile": explains_profile,
    r"python3 run_vit_training.py --pretrained .*AI-Lab-Makerere/beans": fine_tunes_beans,
    r"python3 run_vit_training.py (--pretrained|--resume balanced_accuracy) .*/xrays": trains,
    r"python3 run_vit_training.py .*/xrays/": trains_on_a_table,
    r"python3 -m launch.xla_dist \S+ -- gcloud": gcloud_takes_there,
    r"(timeout .* )?launch/(setup_pod|queued_resource)": on_a_pod,
    r"(cd ~ && )?python3 (-m launch\.|vit-fsdp/launch/)(xla_dist|compute_engine)": on_a_pod,
    r"python3 -m torch_xla\S+consolidate_sharded_ckpts": consolidates,
    r"launch/install_transformer_engine.sh": installs_transformer_engine,
    r"python3 -m launch.gke": on_gke,
    r"python3 run_vit_training.py|(\S+=\S+ )*(launch/torchrun.sh|sbatch)": trains,
    r"nohup python3 run_vit_training.py .* &$": trains_in_background,
}
"""By a pattern of a command's beginning, what it is typed with, and how it is seen to be valid."""
NEEDS_A_PERSON = ("gcloud auth login", "gcloud auth application-default login")
DOCUMENTED = [command for command in documented_commands() if command.text not in NEEDS_A_PERSON]


def beginning(command: Command, entries: dict[str, Run] = RUN) -> str | None:
    """The entry that it has: the longest that it begins with, word for word."""
    fitting = [
        start
        for start in entries
        if f"{command.text} ".startswith(start)
        and (start == command.text or not start.startswith("make "))
    ]
    return max(fitting, key=len, default=None)


def in_a_tutorial(command: Command) -> bool:
    return beginning(command, TUTORIALS.get(command.document, {})) is not None


def check_of(command: Command) -> Callable[[Machine, Command, Path], None] | None:
    return next((check for start, check in CHECKS.items() if re.match(start, command.text)), None)


COMMANDS = [command for command in DOCUMENTED if not in_a_tutorial(command)]
TO_RUN = [
    pytest.param(command, RUN[start], id=start, marks=[pytest.mark.long] * RUN[start].long)
    for command in COMMANDS
    if (start := beginning(command))
]
TO_CHECK = [
    pytest.param(command, id=command.text[:100]) for command in COMMANDS if not beginning(command)
]


def test_every_command_is_typed():
    """So whoever writes another kind of command into a document has to type it, here."""
    strangers = [c.text for c in COMMANDS if not beginning(c) and not check_of(c)]
    assert not strangers, "documented, but neither in RUN nor in CHECKS"
    entries = [start for command in COMMANDS if (start := beginning(command))]
    assert sorted(entries) == sorted(RUN), "each entry of RUN is for one documented command"
    for page, steps in TUTORIALS.items():
        entries = [start for c in commands_of(ROOT / page) if (start := beginning(c, steps))]
        assert sorted(entries) == sorted(steps), f"each entry is for one command of {page}"


# -- typed ----------------------------------------------------------------------------


@pytest.fixture
def machine(tmp_path):
    (tmp_path / "machine").mkdir()
    return Machine(tmp_path / "machine")


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    return train_tiny_gpu(tmp_path_factory.mktemp("trained"), "--model_ema").ckpt_dir


@pytest.mark.parametrize(("command", "how"), TO_RUN)
def test_command(command, how, machine, request):
    if how.trained:
        put_trained(machine, request.getfixturevalue("trained"))
        if "--data_dir /datasets/imagenet-1k-shards" in command.typed:
            images = f"{machine.datasets}/imagenet-1k"
            pack = f"python3 -m data.pack {images} {images}-shards"
            assert machine.run(Command(pack, pack, command.document)).returncode == 0
    if how.shorter:
        command = dataclasses.replace(command, typed=f"{command.text} {how.shorter}")
    type_it(machine, command, how)


@pytest.mark.long
@pytest.mark.parametrize("page", TUTORIALS)
def test_tutorial(page, machine):
    steps, printed = TUTORIALS[page], ""
    for command in commands_of(ROOT / page):
        if start := beginning(command, steps):
            printed += type_it(machine, command, steps[start])
    for line in quoted_lines((ROOT / page).read_text()):
        assert same_form(line, printed), (line, printed)


def type_it(machine: Machine, command: Command, how: Run) -> str:
    """Return what it prints."""
    quoted = quoted_after(command) if how.quoted else []
    command = dataclasses.replace(command, typed=machine.with_its_folders(command.typed))
    long = how.long or command.document in TUTORIALS
    done = machine.run(command, timeout=3 * 3600 if long else 900)
    assert done.returncode == 0, done.stdout + done.stderr
    for pattern in how.shows:
        assert re.search(pattern, done.stdout, re.MULTILINE), done.stdout
    for path in how.leaves:
        assert list(machine.project.glob(path)), path
    for path in how.removes:
        assert not (machine.project / path).exists(), path
    for line in quoted:
        assert same_form(line, done.stdout), (line, done.stdout)
    assert "Traceback" not in done.stderr
    return done.stdout


@pytest.mark.parametrize("command", TO_CHECK)
def test_command_that_takes_more(command, machine, tmp_path):
    check_of(command)(machine, command, tmp_path)


def test_message_of_a_stop(tmp_path, monkeypatch):
    promised = [line for _, line in quotes() if line.startswith("training stopped by SIGINT")]
    assert promised
    done = stop(monkeypatch, tmp_path / "run", "0 2 SIGINT", *ALONE)
    for line in promised:
        assert same_form(re.sub(r"\S+/step_", ".../step_", line), done.stdout), line


def test_help_lists_every_flag(machine):
    (command,) = [c for c in DOCUMENTED if c.text == "python3 run_vit_training.py --help all"]
    shown = machine.run(command).stdout
    for flag in known_flags():
        assert re.search(rf"(?m)^  (.*, )?{flag}\b", shown), flag
