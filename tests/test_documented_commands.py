"""Every command of README.md, docs/ and ``make help``, typed word for word on a new machine.

COMMANDS says for each whether it is run, and what it must show, or why that takes more than a CPU.
Those are typed, too, with a stand-in at the end that notes what it is called with.
"""

import dataclasses
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.cli import train_tiny_gpu
from tests.documented_commands import Command, documented_commands, known_flags, one_line
from tests.stand_ins.new_machine import Machine, own_mounts
from tests.support.stopping import ALONE, stop
from tests.trained_models import put_trained
from tests.typed_with_stand_ins import (
    benchmark_takes,
    compiles,
    docker_builds,
    docker_runs,
    gcloud_sets_it,
    gcloud_takes,
    make_knows,
    names_packages,
    on_a_pod,
    on_gke,
    only_gclouds_words,
    plans,
    trains,
)


@dataclass
class Run:
    """Ends with 0. ``shows``: patterns of its output; ``leaves``: files, below home or project."""

    shows: tuple[str, ...] = ()
    leaves: tuple[str, ...] = ()
    removes: tuple[str, ...] = ()
    trained: bool = False
    """Needs trained models at ~/vit_10b/step_1000 and ~/vit_large/step_1250, and images."""
    private: bool = False
    """Names absolute paths."""
    long: bool = False
    shorter: str = ""
    """What is typed after it, where many repeats and blocks make its figures accurate."""


@dataclass
class Elsewhere:
    """Not run as it is, for this reason; but valid, as ``check`` tells."""

    reason: str
    check: Callable[[Machine, Command, Path], None]


class Printed:
    """No command, but what one prints."""


# -- every command, by its beginning --------------------------------------------------

ROW = r"^\| %s \| %s \| [\d.| ]+ \| 1 \| 0 \|$"  # one execution a step, no compilation
ONE_STEP = "--steps 1 --repeats 1 --num_blocks 2"  # of benchmarks/xla_step.py
START_ROW = r"^\| \w+(-dirty)? \| 1\.00 \| 1\.00 \| in all [\d.]+, cores [\d.]+, imports [\d.]+, "

COMMANDS: dict[str, Run | Elsewhere | Printed] = {
    # docs/domain_parallelism.md
    "python3 run_vit_training.py --fake_data --model hybrid_vit": Elsewhere(
        "images of 2048 x 2048: it takes hours on a CPU", trains
    ),
    "launch/torchrun.sh --model hybrid_vit": Elsewhere("needs 8 GPUs", trains),
    # README.md
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
    "make test": Elsewhere("it runs this test", make_knows),
    "make train BACKEND=torchtpu": Elsewhere("an environment of its own", make_knows),
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
    "python3 run_vit_training.py --help": Run((r"^  --fake_data ",)),
    "python3 run_vit_training.py --help all": Run((r"^  --flatten_parameters ",)),
    "python3 run_vit_training.py --help xla": Run((r"^  --flatten_parameters ",)),
    "python3 run_vit_training.py --help ema": Run((r"^  --model_ema ", r"^  --use_ema ")),
    "python3 run_vit_training.py --fake_data": Run(
        (
            r"^data: fake data \(zeros\)",
            r"^epoch 1 step 10, lr: ",
            r"^epoch 1 step 10, val loss: [\d.]+, accuracy on val: .* of 80 images, top-5: .*$",
            r"^training completed: step 10, .*, checkpoint runs/vit_fsdp/step_10, log ",
        ),
        leaves=("runs/vit_fsdp/step_10", "runs/vit_fsdp/metrics.jsonl"),
        long=True,
    ),
    "python3 run_vit_training.py --data_dir /datasets/imagenet-1k --model vit_large": Elsewhere(
        "300 epochs of ImageNet", trains
    ),
    "python3 run_vit_training.py --data_dir /datasets/imagenet-1k --ckpt_dir": Elsewhere(
        "10 billion parameters", trains
    ),
    "python3 run_vit_training.py --local_ckpt_dir": Elsewhere("10 billion parameters", trains),
    "python3 run_vit_training.py --optimizer muon": Elsewhere("300 epochs of ImageNet", trains),
    "python3 -m pip install -r requirements-gpu.txt": Elsewhere(
        "gigabytes of CUDA, which make did not install", names_packages
    ),
    "launch/torchrun.sh --fake_data": Elsewhere("needs GPUs", trains),
    "launch/torchrun.sh --data_dir": Elsewhere("needs GPUs", trains),
    "NNODES=2 NODE_RANK=0": Elsewhere("needs 16 GPUs", trains),
    "NNODES=3:4 RDZV_ID=job-1": Elsewhere("needs 32 GPUs", trains),
    "sbatch launch/slurm.sbatch": Elsewhere("needs Slurm and 16 GPUs", trains),
    "ELASTIC=3 sbatch": Elsewhere("needs Slurm and 32 GPUs", trains),
    "launch/torchrun.sh --block te": Elsewhere("needs GPUs", trains),
    "launch/torchrun.sh --compile --fp8": Elsewhere("needs GPUs", trains),
    "launch/torchrun.sh --fsdp fsdp2": Elsewhere("needs GPUs", trains),
    "docker build": Elsewhere("needs Docker's daemon and NVIDIA's image", docker_builds),
    "docker run": Elsewhere("needs Docker's daemon and GPUs", docker_runs),
    "python3 -m torch.distributed.checkpoint.format_utils": Run(
        leaves=("vit_10b.pt",), trained=True
    ),
    "python3 run_vit_training.py --predict": Run(
        (
            r"^cat\.jpg\n( +\d+\.\d+%  \d\n){5}",
            r"^holiday/beach/1\.png\n( +\d+\.\d+%  \d\n){5}",
        ),
        trained=True,
        long=True,
    ),
    "python3 run_vit_training.py --eval_only": Run(
        (r"^val loss: [\d.]+, accuracy on val: [\d.]+ % of 359 images, top-5: [\d.]+ %$",),
        trained=True,
        private=True,
        long=True,
    ),
    "make test-fast": Elsewhere("minutes of tests of their own", make_knows),
    "make test-gpu-path": Elsewhere("an environment of its own", make_knows),
    "make test-torchtpu": Elsewhere("an environment of its own", make_knows),
    "make test-long": Elsewhere("it runs this test", make_knows),
    # docs/contributing.md
    ".venv/bin/python -m pytest": Run((r"^\d+ passed(, \d+ deselected)? in ",), long=True),
    # docs/slurm.md
    "make rehearse": Elsewhere("minutes of tests of their own", make_knows),
    "make coverage": Elsewhere("hours of all tests", make_knows),
    "make test-slurm": Elsewhere("needs root, and Slurm installed", make_knows),
    # docs/evaluation_and_finetuning.md, docs/recipes.md
    "python3 run_vit_training.py --eval_only --eval_report": Run(
        (r"^report on 10 classes: report$",),
        leaves=("report/per_class.csv", "report/confusion.csv", "report/confusion.png"),
        trained=True,
        private=True,
        long=True,
    ),
    "python3 run_vit_training.py --eval_only --knn": Run(
        (
            r"^k-NN on val: [\d.]+ % \(k 10\), .* of 359 images, by 1,438 of train$",
            r"^linear probe on val: [\d.]+ % of 359 images, trained on 1,438 of train, best with ",
        ),
        trained=True,
        private=True,
        long=True,
    ),
    "python3 run_vit_training.py --features features": Run(
        (r"^features \((class, )?mean\) of 1,797 images: features$",),
        leaves=(
            "features/features.json",
            "features/val-00000-00000.safetensors",
        ),
        trained=True,
        private=True,
        long=True,
    ),
    "python3 run_vit_training.py --features photos": Elsewhere(
        "needs a download of weights", trains
    ),
    "python3 run_vit_training.py --init_from ~/vit_large": Elsewhere("hours of training", trains),
    "python3 run_vit_training.py --init_from vit_base": Elsewhere("hours of training", trains),
    "python3 run_vit_training.py @recipes/vit_10b.args": Elsewhere("10 billion parameters", trains),
    "python3 run_vit_training.py @recipes/mnist.args": Elsewhere("minutes of training", trains),
    # docs/pretraining.md
    "make train-mae": Run(
        (r"^training completed: step 1100, val loss 0\.\d+, checkpoint runs/digits-mae-",),
        leaves=("runs/digits-mae-*/step_1100",),
        long=True,
    ),
    "make train-dino": Run(
        (
            r"^epoch 40 step 440, k-NN on val: [\d.]+ % \(k 10\)",
            r"^training completed: step 440, checkpoint runs/digits-dino-",
        ),
        leaves=("runs/digits-dino-*/step_440",),
        long=True,
    ),
    "python3 run_vit_training.py --objective mae": Elsewhere("weeks of training", trains),
    "python3 run_vit_training.py --objective dino --teacher": Elsewhere(
        "weeks of training", trains
    ),
    "python3 run_vit_training.py @recipes/mae_vit_l16.args": Elsewhere("weeks of training", trains),
    "python3 run_vit_training.py @recipes/mae_vit_l16_finetune.args": Elsewhere(
        "days of training", trains
    ),
    "python3 run_vit_training.py --plan @recipes/dinov3_7b.args": Run(
        (r"^v6e:16x16 +256 .* arithmetic$", r"^fastest: .*, by arithmetic, not compiled$"),
        leaves=("runs/plan/tpu.png",),
        long=True,
    ),
    # docs/benchmarks.md
    "python benchmarks/xla_step.py --devices 1 2 4": Run(
        (ROW % ("spmd", 4), ROW % ("wrapper", 4), ROW % ("nested", 1)),
        long=True,
        shorter=ONE_STEP,
    ),
    "python benchmarks/xla_step.py --devices 1 2 --forms spmd": Run(
        (ROW % ("spmd", 2), ROW % ("unrolled", 2)),
        long=True,
        shorter=ONE_STEP,
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
    "python benchmarks/gpu_step.py --json": Elsewhere("needs a GPU", benchmark_takes),
    "python benchmarks/gpu_step.py --steps": Elsewhere("needs a GPU", benchmark_takes),
    "python benchmarks/gpu_step.py --models": Run(
        (
            *(
                rf"^\| vit_tiny_patch16_224 \| {variant} \| 4 \| \d+\.\d+ \| [\d.]+ \| [\d.]+ \|"
                for variant in ("timm", "fsdp2", r"fsdp2\+compile")
            ),
            r"\| megatron \| 4 \| --fsdp megatron requires CUDA: on the CPU use --fsdp fsdp2 \|",
            r"\| te \| 4 \| --block te: TransformerEngine is not installed",
            r"\| te\+fp8 \| 4 \| --fp8 delayed requires --precision bf16, this is fp32",
        ),
        leaves=("cpu.json", "cpu.png"),
        long=True,
    ),
    "python benchmarks/data.py --repeats": Run(
        (r"^  ratio a core \d\.\d\d",), long=True, shorter="--repeats 1 --seconds 1"
    ),
    "python benchmarks/data.py --crops": Run(
        (r"^  ratio a core \d\.\d\d",), long=True, shorter="--repeats 1 --seconds 1"
    ),
    "python benchmarks/checkpoint.py": Run(
        (r"\| fsdp2 \| 5 MB/s \|",), long=True, shorter="--repeats 1"
    ),
    "python benchmarks/domain_parallel.py --image_size_start 128": Run(
        tuple(rf"^\| cuda \| 1 \| {n} \| 256x256 \| 1 \| [\d,]+ \| [\d.]+ \| " for n in (1, 2)),
        leaves=("cpu.csv", "cpu.png"),
        long=True,
    ),
    "python benchmarks/domain_parallel.py --image_size_start 1024": Elsewhere(
        "half an hour of TPU compilation", benchmark_takes
    ),
    # docs/ema_and_schedules.md
    "python3 run_vit_training.py --model_ema": Elsewhere("300 epochs of ImageNet", trains),
    "python3 run_vit_training.py --use_ema": Run(
        (r"top-5: [\d.]+ %$",),
        trained=True,
        private=True,
        long=True,
    ),
    "python3 run_vit_training.py --lr_schedule constant": Elsewhere("weeks of ImageNet", trains),
    "python3 run_vit_training.py --lr_schedule wsd": Elsewhere("days of ImageNet", trains),
    # docs/self_check.md
    "python3 run_vit_training.py --self_check --data_dir": Elsewhere(
        "needs room for a checkpoint of 10 billion parameters", trains
    ),
    "python3 run_vit_training.py --self_check --fake_data": Run(
        (r"^pass  checkpoint read ", r"^self check passed: 13 checks, "),
        private=True,
        long=True,
    ),
    # docs/tpu.md
    "gcloud auth login": Elsewhere("a browser, and a person with an account", only_gclouds_words),
    "gcloud config set project": Elsewhere("needs gcloud", gcloud_sets_it),
    "gcloud config set compute/zone": Elsewhere("needs an account", gcloud_takes),
    "launch/queued_resource.sh": Elsewhere("needs TPUs", on_a_pod),
    "gcloud compute tpus queued-resources create": Elsewhere("needs an account", gcloud_takes),
    "gcloud compute tpus queued-resources describe": Elsewhere("needs an account", gcloud_takes),
    "gcloud compute tpus accelerator-types list": Elsewhere("needs an account", gcloud_takes),
    "launch/setup_pod.sh": Elsewhere("needs TPUs", on_a_pod),
    "python3 -m launch.xla_dist --tpu=$NAME": Elsewhere("needs TPUs", on_a_pod),
    "python3 -m launch.xla_dist --tpu=$NAME-0,$NAME-1": Elsewhere("needs TPUs", on_a_pod),
    "python3 -m launch.gke --elastic 1": Elsewhere("needs TPUs", on_gke),
    "launch/setup_pod.sh --tpu=$NAME --torchtpu": Elsewhere("needs TPUs", on_a_pod),
    "python3 -m launch.xla_dist --tpu=$NAME --workdir vit-fsdp --max_restarts 3 --env PYTHON=.venv-"
    "torchtpu/bin/python": Elsewhere("needs TPUs", on_a_pod),
    "launch/torchrun.sh --backend torchtpu": Elsewhere("needs a TPU", trains),
    # docs/platforms.md
    "python3.11 -m venv .venv-torchtpu": Run(leaves=(".venv-torchtpu/bin/activate",)),
    "python3 -m pip install -r requirements-torchtpu.txt": Elsewhere(
        "gigabytes, which make did not install", names_packages
    ),
    "python3 -m launch.xla_dist --help": Run((r"^  --restart-tpuvm-pod-server",)),
    "training stopped by SIGINT": Printed(),
    "python3 run_vit_training.py --compile_only": Run(
        (
            r"^slice +v5p:4x4x8, 128 chips$",
            r"^model +10,077,917,160 parameters, global batch 1024$",
            r"^verdict +fits, ",
            r"^HBM a chip, peak +3\.\d\d GiB of 95\.74 GiB$",
            r"^highest MFU +8\d\.\d %$",
            r"^expected images/s +\d{4}$",
        ),
        long=True,
    ),
    "python3 run_vit_training.py --compile_only @recipes/dinov2_vit_l16.args": Elsewhere(
        "many minutes of compilation", compiles
    ),
    "python3 run_vit_training.py --explain": Run(
        (
            r"^expected MFU +\d\d\.\d % \(within 3 points for half of 15 published runs: .*\)$",
            r"^ms +share +runs +module .* of ideal +bound by +instruction$",
            r" 32 +blocks\.mlp\.fc1 +recompute +product +\d+ % +products ",
        ),
        long=True,
    ),
    "python3 run_vit_training.py --compile_only --tpu_topology tpu7x:4x4x4": Elsewhere(
        "minutes of a compiler of 480 MB", compiles
    ),
    "make tpu-compiler": Elsewhere("fetches 480 MB", make_knows),
    # docs/data.md
    "python3 run_vit_training.py --data_dir gs:": Elsewhere("needs a bucket", trains),
    "python3 run_vit_training.py --data_source webdataset": Elsewhere("needs a bucket", trains),
    "python3 run_vit_training.py --buckets": Elsewhere("ImageNet by a large model", trains),
    "python3 -m data.pack": Run((r"^2 shards: /datasets/\S+$",), trained=True, private=True),
    # docs/augmentation.md
    "python3 -m tools.show_augmentations": Run(leaves=("augmented.png",), long=True),
    # docs/planning.md
    "python3 run_vit_training.py --plan --model vit_10b": Elsewhere(
        "half an hour of TPU compilation", plans
    ),
    # docs/reliability.md
    "make faults": Elsewhere("hours, and it writes docs/reliability.md", make_knows),
    'make faults ARGS="--tries 2 --backends fsdp2 --faults sigkill hang --seed 1"': Elsewhere(
        "it writes docs/reliability.md", make_knows
    ),
    "python3 -m tools.goodput --chips": Run(
        (r"^  save every 37 min 52 s of training \(Daly\): expected goodput 91\.51%, ",),
    ),
    "python3 -m tools.goodput ~/vit_10b --chips": Run(
        (r"^forecast: 4,096 chips, 0\.173 failures per chip and year: ",), trained=True
    ),
    # docs/files.md
    "python3 -m tools.convert ~/vit_10b/step_1000": Run(
        (r"^converted /\S+/vit_10b/step_1000: 31 tensors, 111,528 bytes, to vit_10b.safetensors$",),
        leaves=("vit_10b.safetensors",),
        trained=True,
        long=True,
    ),
    "python3 -m tools.convert ~/vit_10b vit_10b_hf": Run(
        leaves=("vit_10b_hf/model.safetensors", "vit_10b_hf/config.json"), trained=True, long=True
    ),
    "python3 -m tools.convert ~/vit_large": Run(
        leaves=("vit_large_bf16.pt",), trained=True, long=True
    ),
    "python3 -m tools.convert ~/downloads/vit_large": Run(
        leaves=("vit_large_dcp/manifest.json", "vit_large_dcp/.metadata"), trained=True, long=True
    ),
    "python3 -m tools.goodput ~/vit_10b": Run(
        (r"^/\S+/vit_10b: \d", r"^  useful steps  ", r"^  save every ", r"^picture: "), trained=True
    ),
    "python3 -m tools.report": Run(
        (r"^report: \S+/vit_10b/report.html$",),
        leaves=("../vit_10b/report.html",),
        trained=True,
        long=True,
    ),
    # make help
    "make lint": Elsewhere("CI runs it before the tests", make_knows),
    "make format": Run((r"^All checks passed!$", r"^\d+ files left unchanged$")),
    "make bench": Run(
        (ROW % ("spmd", 1), ROW % ("nested", 1)),
        long=True,
        shorter=f"ARGS='{ONE_STEP}'",
    ),
    "make bench-start": Run(
        (START_ROW,), leaves=("runs/start.png",), long=True, shorter="ARGS='--repeats 1'"
    ),
    "make bench-checkpoint": Run(
        (r"\| xla \| disk \|", r"\| fsdp2 \| 50 MB/s \|"), long=True, shorter="ARGS='--repeats 1'"
    ),
    "make bench-gpu": Elsewhere("needs a GPU", make_knows),
    "make bench-domain": Elsewhere("needs 8 GPUs", make_knows),
    "make clean": Run(removes=(".venv", "datasets", "runs")),
}

DOCUMENTED = documented_commands()


def beginning(command: Command) -> str | None:
    """The entry that it has in COMMANDS: the longest that it begins with, word for word."""
    fitting = [
        start
        for start in COMMANDS
        if f"{command.text} ".startswith(start)
        and (start == command.text or not start.startswith("make "))
    ]
    return max(fitting, key=len, default=None)


def all_that_are(kind: type) -> list:
    found = [(command, COMMANDS.get(beginning(command) or "")) for command in DOCUMENTED]
    return [
        pytest.param(
            command,
            entry,
            id=beginning(command),
            marks=[pytest.mark.long] if getattr(entry, "long", False) else [],
        )
        for command, entry in found
        if isinstance(entry, kind)
    ]


def test_every_command_is_here_once():
    """So whoever writes one into a document has to type it, here."""
    entries = [beginning(command) for command in DOCUMENTED]
    strangers = [c.text for c, entry in zip(DOCUMENTED, entries, strict=True) if not entry]
    assert not strangers, "documented, but not in COMMANDS"
    assert not set(COMMANDS) - set(entries), "in COMMANDS, but not documented"
    twice = {entry for entry in entries if entries.count(entry) > 1}
    assert not twice, "an entry of COMMANDS for more than one command"


# -- typed ----------------------------------------------------------------------------


@pytest.fixture
def machine(tmp_path):
    (tmp_path / "machine").mkdir()
    return Machine(tmp_path / "machine")


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    return train_tiny_gpu(tmp_path_factory.mktemp("trained"), "--model_ema").ckpt_dir


@pytest.mark.parametrize(("command", "how"), all_that_are(Run))
def test_command(command, how, machine, request):
    if how.private and (problem := own_mounts()[1]):
        pytest.skip(problem)
    if how.trained:
        put_trained(machine, request.getfixturevalue("trained"))
    if how.shorter:
        command = dataclasses.replace(command, typed=f"{command.text} {how.shorter}")
    done = machine.run(command, private=how.private, timeout=3 * 3600 if how.long else 900)
    assert done.returncode == 0, done.stdout + done.stderr
    for pattern in how.shows:
        assert re.search(pattern, done.stdout, re.MULTILINE), done.stdout
    for path in how.leaves:
        assert list(machine.project.glob(path)), path
    for path in how.removes:
        assert not (machine.project / path).exists(), path
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(("command", "why"), all_that_are(Elsewhere))
def test_command_that_takes_more(command, why, machine, tmp_path):
    why.check(machine, command, tmp_path)


@pytest.mark.parametrize(("printed", "_"), all_that_are(Printed))
def test_message_of_a_stop(printed, _, tmp_path, monkeypatch):
    done = stop(monkeypatch, tmp_path / "run", "0 2 SIGINT", *ALONE)
    promised = printed.text.replace("/mnt/runs/vit_10b", str(tmp_path / "run"))
    assert promised.replace("1207", "2") in done.stdout.splitlines()


def test_help_lists_every_flag(machine):
    (command,) = [c for c in DOCUMENTED if c.text == "python3 run_vit_training.py --help all"]
    shown = machine.run(command).stdout
    for flag in known_flags():
        assert re.search(rf"(?m)^  (.*, )?{flag}\b", shown), flag


# -- what is named --------------------------------------------------------------------


def test_commands_are_found():
    """As this file rests on it: continued lines, comments, quotes."""
    typed = "A=1 run 'a  # b' \\\n    --flag \"x # y\"   # not this\n# nor this"
    assert one_line(typed) == "A=1 run 'a  # b' --flag \"x # y\""
    assert len({command.document for command in DOCUMENTED}) >= 4
