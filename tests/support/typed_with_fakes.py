"""What a command that takes more than a CPU is called with in the end, and whether that is valid.

The command is typed all the same, with a stand-in for what is not here; see
tests/integration/test_documented_commands.py.
"""

import csv
import json
import re
import shlex
import shutil
import subprocess
import sys
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import timm
import torch
from packaging.requirements import Requirement
from PIL import Image
from safetensors.torch import save, save_file
from torch.distributed.run import get_args_parser

from launch import torchrun
from run_vit_training import read_flags
from tests.fakes.hub_server import TOKEN, HubServer, Repository
from tests.fakes.new_machine import Machine
from tests.fakes.pod import gcloud_accepts, workers_here
from tests.support.archives import write_imagenet_archives
from tests.support.checkpoints import write_shards_of_xla_fsdp
from tests.support.cli import ROOT, run_program, tiny, train_tiny
from tests.support.documented_commands import Command, commands_of
from tests.support.documented_output import quotes, same_form
from tests.support.launching import script
from tests.support.table_files import write_beans
from tests.support.two_towers import write_run
from tools.compile_only import torchtpu
from tools.plan.stacks import PyTorchXla, stack_of
from tools.plan.tpu_search import candidates
from tools.show_augmentations import read_run
from training.flags import check_foreign
from training.mesh import make_mesh
from training.resolve import Run, check_batch, resolve_common, resolve_model
from training.rules import check_rules
from training.weights.hub import ONE_FILE
from xla_fsdp.resolve_xla import resolve_for_slice
from xla_fsdp.tpu import parse_topology


def trains(machine: Machine, command: Command, tmp_path: Path) -> None:
    """run_vit_training.py, by itself or under torchrun, would take these flags."""
    slurm_stand_ins(machine)
    if "torchtpu" in command.text:
        machine.variables["NPROC_PER_NODE"] = "8"  # this machine has no TPU devices to count
    words = machine.noted(command, "python3")
    if words[0].endswith("launch/torchrun.py"):
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("RDZV_ID", "a secret")  # launch/torchrun.sh sets it
            args = torchrun.parse(words[1:])
        get_args_parser().parse_args(
            [*torchrun.torchrun_words(args, True, "folder"), *args.torchrun]
        )
    at = next(i for i, word in enumerate(words) if word.endswith("run_vit_training.py"))
    assert (machine.project / words[at]).is_file()
    torch_backend = "torchtpu" if "torchtpu" in command.text else "cuda"
    program_takes(words[at + 1 :], torch_backend if at else "xla")


def trains_in_background(machine: Machine, command: Command, tmp_path: Path) -> None:
    """The same in the foreground, so that it has ended."""
    trains(machine, replace(command, typed=command.typed.removesuffix(" &")), tmp_path)


def plans(machine: Machine, command: Command, tmp_path: Path) -> None:
    """run_vit_training.py would plan with these flags."""
    words = machine.noted(command, "python3")
    asked = read_flags(words[1:])
    stack = stack_of(asked.run, asked.xla, asked.torch)
    backend = "xla" if isinstance(stack, PyTorchXla) else "torchtpu"
    check_foreign(asked.backend_configs, backend, asked.run.explicitly_set)
    config, _ = resolve_model(resolve_common(asked.run))
    assert config.plan
    assert next(candidates(config, stack, asked.plan.chips_at_most))


def compiles(machine: Machine, command: Command, tmp_path: Path) -> None:
    """run_vit_training.py would compile this step for this slice."""
    asked = read_flags(machine.noted(command, "python3")[1:])
    assert asked.xla.compile_only
    topology = parse_topology(asked.xla.tpu_topology)
    if asked.run.backend == "torchtpu":
        torchtpu.resolve_for_slice(asked.run, asked.torch, topology)
    else:
        resolve_for_slice(asked.run, asked.xla, topology)


def pushes(machine: Machine, command: Command, tmp_path: Path) -> None:
    """tools.convert would upload these weights, which exist there."""
    words = machine.noted(command, "python3")
    weights = tmp_path / "weights.safetensors"
    save_file({"norm.weight": torch.zeros(4)}, weights)
    with HubServer() as server:
        variables = server.variables(tmp_path / "cache", TOKEN)
        pushed = run_program(*words[:2], str(weights), *words[3:], variables=variables)
        assert pushed.returncode == 0, pushed.stderr
        (repository,) = server.repositories.values()
    assert repository.private


def starts_from_pairs(machine: Machine, command: Command, tmp_path: Path) -> None:
    """run_vit_training.py would train from these weights of both towers."""
    asked = read_flags(machine.noted(command, "python3")[1:])
    assert asked.run.checkpoints.init_from
    assert resolve_common(asked.run).objective.objective == "siglip"


def writes_towers(machine: Machine, command: Command, tmp_path: Path) -> None:
    """tools.convert would write a folder of a run of image-text pre-training."""
    words = machine.noted(command, "python3")
    model = ["--model", "timm/vit_tiny_patch16_224"]
    if "open_clip" not in command.text:
        model = "--model timm/vit_base_patch32_siglip_256 --embed_dim 36 --num_heads 2".split()
    text = "--text_depth 1 --text_width 24 --text_heads 2 --text_vocab_size 90".split()
    run = write_run(tmp_path / "run.safetensors", "--objective", "siglip", *model, *text)
    done = run_program(*words[:2], str(run), str(tmp_path / words[3]), *words[4:])
    assert done.returncode == 0, done.stderr
    assert (tmp_path / words[3]).is_dir()


def fine_tunes_beans(machine: Machine, command: Command, tmp_path: Path) -> None:
    """One step of run_vit_training.py, on data like Beans and weights like timm's."""
    words = machine.noted(command, "python3")
    model = timm.create_model("vit_tiny_patch16_224")
    weights = save(model.state_dict(), {"format": "pt"})
    shorter = (
        "--max_steps 1 --batch_size 4 --num_workers 0 --backend cuda --warmup_epochs 0".split()
    )
    with HubServer() as server:
        for name, files in (
            ("datasets/AI-Lab-Makerere/beans", write_beans()[1]),
            (timm.get_pretrained_cfg("vit_tiny_patch16_224").hf_hub_id, {ONE_FILE: weights}),
        ):
            server.repositories[name] = Repository()
            server.repositories[name].commit(files)
        variables = server.variables(tmp_path / "cache")
        flags = [*words, *shorter, "--ckpt_dir", str(tmp_path / "run")]
        done = run_program(*flags, variables=variables)
    assert done.returncode == 0, done.stderr
    assert "initial weights of hf-hub:timm/vit_tiny_patch16_224.augreg" in done.stdout
    assert re.search(r"data: AI-Lab-Makerere/beans@\w{40}: 30 training, 12 val", done.stdout)


FINDINGS = ("edema", "effusion", "mass")


def draws_xrays(machine: Machine, command: Command, tmp_path: Path) -> None:
    """tools.show_augmentations, of images of 12 bits and five classes."""
    for split in ("train", "val"):
        for number in range(10):
            folder = machine.folder / "datasets" / "xrays" / split / f"finding_{number % 5}"
            folder.mkdir(parents=True, exist_ok=True)
            values = np.random.default_rng(number).integers(0, 4096, (30, 20), np.uint16)
            Image.fromarray(values).save(folder / f"{number}.png")
    *words, _ = machine.noted(command, "python3")
    words = [machine.with_its_folders(f" {word}").strip() for word in words]
    picture = tmp_path / "augmented.png"
    drawn = run_program(*words, str(picture))
    assert drawn.returncode == 0, drawn.stderr
    assert picture.read_bytes().startswith(b"\x89PNG")


def draws_from_a_table(machine: Machine, command: Command, tmp_path: Path) -> None:
    """tools.show_augmentations would take these flags; test_hospital.py draws the images."""
    assert read_run(machine.noted(command, "python3")[2:-1]).config.data.labels


def trains_on_a_table(machine: Machine, command: Command, tmp_path: Path) -> None:
    """One step of run_vit_training.py, on X-rays that a table lists, or its evaluation."""
    xrays = machine.home / "xrays"
    (xrays / "images").mkdir(parents=True)
    diagnoses = [["image_id", "finding", "patient_id"]]
    findings = [["image_id", *FINDINGS, "patient_id"]]
    for number in range(60):
        Image.new("L", (20, 30), number).save(xrays / "images" / f"{number}.png")
        diagnoses.append([number, f"finding {number % 5}", number // 2])
        findings.append([number, number % 2, int(number < 20), int(number % 7 == 0), number // 2])
    for name, rows in (("labels.csv", diagnoses), ("findings.csv", findings)):
        with (xrays / name).open("w", newline="") as file:
            csv.writer(file).writerows(rows)

    def run(typed: Command, *flags: str) -> str:
        (machine.folder / "noted").unlink(missing_ok=True)
        words = machine.noted(typed, "python3")
        at = ["--num_workers", "0", "--backend", "cuda", "--max_steps", "1", *flags]
        done = run_program(*words, *at, variables=machine.variables)
        assert done.returncode == 0, done.stderr
        return done.stdout

    small = ["--image_size", "16", "--batch_size", "4"]
    if "--eval_only" not in command.text:
        table = "findings.csv" if "findings.csv" in command.text else "labels.csv"
        assert f"{table}: " in run(command, *small)
        assert list((machine.home / "runs").glob("*/split.csv"))
        return
    page = ROOT / "docs/tables.md"
    training = next(each for each in commands_of(page) if "--multi_label" in each.text)
    run(training, *small)
    found = run(command, "--batch_size", "4")
    assert (machine.home / "report" / "per_label.csv").exists()
    (quoted,) = (each for each in quotes() if each.line.startswith("val loss: 0.4012"))
    assert same_form(quoted.line, found)
    for name in FINDINGS:
        assert re.search(rf"label: {name}, images: \d+, average_precision: ", found)


def program_takes(flags: list[str], backend: str) -> None:
    asked = read_flags(flags)
    check_foreign(asked.backend_configs, backend, asked.run.explicitly_set)
    config, model = resolve_model(resolve_common(asked.run))
    if config.sharding.mesh_dcn == "slices":  # two are named where it is documented
        config = replace(config, sharding=replace(config.sharding, mesh_dcn=2))
    backend_config: Any = replace(asked.torch, fsdp="fsdp2")
    if backend == "xla":
        backend_config = (
            replace(asked.xla, xla_fsdp="nested") if asked.xla.shard_on_cpu else asked.xla
        )
    check_rules(replace(config, backend=backend), backend_config)
    check_batch(Run(config, backend_config, model, make_mesh(config.sharding, 64), None))


def slurm_stand_ins(machine: Machine) -> None:
    """The batch script on the first of its nodes."""
    variables = "SLURM_JOB_ID=1 SLURM_NNODES=$nodes SLURM_JOB_NODELIST=node[1-2] SLURM_NODEID=0"
    machine.stand_in(
        "sbatch",
        "nodes=2",
        "while [[ $1 == --* ]]; do [[ $1 != --nodes=* ]] || nodes=${1#*=}; shift; done",
        f'SLURM_SUBMIT_DIR=$PWD {variables} exec bash "$@"',
    )
    machine.stand_in("scontrol", 'printf "node1\\nnode2\\n"')
    machine.stand_in("srun", "while [[ $1 == --* ]]; do shift; done", 'exec "$@"')


def docker_builds(machine: Machine, command: Command, tmp_path: Path) -> None:
    words = machine.noted(command, "docker")
    assert (words[0], words[-1]) == ("build", ".")
    lines = (machine.project / words[words.index("-f") + 1]).read_text().splitlines()
    copied = [line.split()[1:-1] for line in lines if line.startswith("COPY ")]
    assert copied
    assert all((machine.project / path).exists() for paths in copied for path in paths)


def docker_runs(machine: Machine, command: Command, tmp_path: Path) -> None:
    """The image's entry point is launch/torchrun.sh."""
    words = machine.noted(command, "docker")
    assert words[0] == "run"
    program_takes(words[words.index("vit-fsdp") + 1 :], "cuda")


def names_packages(machine: Machine, command: Command, tmp_path: Path) -> None:
    words = machine.noted(command, "python3")
    assert words[:-1] == "-m pip install -r".split()
    files = [words[-1]]
    for name in files:
        text = (machine.project / name).read_text()
        lines = [line.split("#")[0].strip() for line in text.splitlines()]
        files += [line.removeprefix("-r ") for line in lines if line.startswith("-r ")]
        packages = [line for line in lines if line and not line.startswith("-r ")]
        assert all(Requirement(line).specifier for line in packages)


def consolidates(machine: Machine, command: Command, tmp_path: Path) -> None:
    """torch_xla's own tool finds the files of two chips."""
    (machine.home / "old").mkdir()
    state = {"head.bias": torch.arange(5.0)}
    write_shards_of_xla_fsdp(f"{machine.home}/old/epoch_10_rank_{{}}.ckpt", state, 2)
    done = machine.run(command)
    assert done.returncode == 0, done.stdout + done.stderr
    joined = torch.load(machine.home / "old" / "epoch_10.pth")["model"]
    assert torch.equal(joined["head.bias"], state["head.bias"])


def installs_transformer_engine(machine: Machine, command: Command, tmp_path: Path) -> None:
    machine.stand_in("nvcc", "exit")
    machine.variables["CUDA_HOME"] = str(machine.folder)
    machine.stand_in("python3", "[[ $1 != -c ]] || echo 13.0; echo $* >> $HOME/asked")
    done = machine.run(command)
    assert done.returncode == 0, done.stdout + done.stderr
    *_, asked = (machine.home / "asked").read_text().splitlines()
    pinned = (
        f"-c {machine.project}/requirements-gpu.txt transformer_engine[pytorch,core_cu13]==2.20.2"
    )
    assert asked == f"-m pip install --no-build-isolation {pinned}"


def benchmark_takes(machine: Machine, command: Command, tmp_path: Path) -> None:
    script_path, *flags = machine.noted(command, "python")
    # Here, since gpu_kernels.py imports a compiler, which each of pytest's workers would.
    benchmark = import_module(script_path.removesuffix(".py").replace("/", "."))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", [script_path, *flags])
        benchmark.parse()


def make_knows(machine: Machine, command: Command, tmp_path: Path) -> None:
    """All programs in what it would run are there, or what it would make them of."""
    typed = command.typed.replace("make", "make --dry-run --always-make", 1)
    done = machine.run(Command(typed, typed, command.document))
    assert done.returncode == 0, done.stderr
    started = re.findall(r"^\.venv/bin/\S+", done.stdout, re.MULTILINE)
    requirements = re.findall(r" -r (\S+)", done.stdout)
    assert started or requirements
    assert all((machine.project / path).exists() for path in [*started, *requirements])


def on_gke(machine: Machine, command: Command, tmp_path: Path) -> None:
    """A cluster with the slices of launch/gke.yaml, once that asks for two."""
    path = machine.project / "launch" / "gke.yaml"
    path.write_text(path.read_text().replace("replicas: 1", "replicas: 2"))
    (tmp_path / "nodes.json").write_text(json.dumps({pool: [True] * 16 for pool in "ab"}))
    (tmp_path / "completes").touch()
    stand_in = ROOT / "tests" / "fakes" / "kubectl.py"
    machine.stand_in("kubectl", f'exec {sys.executable} {stand_in} "$@"')
    machine.variables["CLUSTER"] = str(tmp_path)
    typed = replace(command, typed=command.typed.replace(" 1 ", " 1 --elastic_poll 1 "))
    done = machine.run(typed)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "started vit-10b on 2 of 2 slices" in done.stderr
    assert "has completed" in done.stderr


def on_a_pod(machine: Machine, command: Command, tmp_path: Path) -> None:
    """Workers of this machine, two a slice, behind gcloud.py; their Python notes its
    words."""
    pod, workers = tmp_path / "pod", 4 if "$NAME-1" in command.text else 2
    ends_all = "--restart-tpuvm-pod-server" in command.text
    if ends_all:
        workers = 1  # on one machine, the last to start would end the others
    # Of a large slice on Compute Engine one of two hosts.
    smaller = {"tpu7x:4x4x4": "tpu7x:2x2x2", "v6e:8x8": "v5p:2x2x2"}
    for large, small in smaller.items():
        command = replace(command, typed=command.typed.replace(large, small))
    for index in range(workers):
        project = pod / f"worker_{index}" / "vit-fsdp"
        shutil.copytree(ROOT / "launch", project / "launch")
        for venv in (".venv", ".venv-torchtpu"):
            (project / venv / "bin").mkdir(parents=True)
            script(project / venv / "bin" / "python", 'echo "$*" >> "$HOME/asked"')
    (pod / "workers").write_text(str(min(workers, 2)))
    (pod / "states_to_come").write_text("ACTIVE")
    # The stand-in's slices are called pod, or pod-0 and so on.
    machine.stand_in(
        "gcloud",
        "name=${NAME:-vit}; for word; do",
        '[[ $word == "$name" || $word == "$name"-[01] ]] && word=pod${word#"$name"}',
        'words+=("$word"); done',
        f'exec {sys.executable} {ROOT}/tests/fakes/gcloud.py "${{words[@]}}"',
    )
    machine.variables["STAND_IN"] = str(pod)
    machine.variables["NPROC_PER_NODE"] = "2"  # the workers have no devices to count
    with workers_here(alone=ends_all):
        done = machine.run(command)
    assert done.returncode == 0, done.stdout + done.stderr
    for index in range(workers):
        *_, asked = (pod / f"worker_{index}" / "asked").read_text().splitlines()
        if "run_vit_training.py" in command.text:
            unbuffered, program, *flags = asked.split()
            assert unbuffered == "-u"
            assert program in ("run_vit_training.py", "vit-fsdp/run_vit_training.py")
            program_takes(flags, "xla")
        elif "launch/torchrun.sh" in command.text:
            started, _, flags = asked.partition("/run_vit_training.py ")
            assert "--torchtpu 2 -- --nproc-per-node 2" in started
            program_takes(flags.split(), "torchtpu")
        else:
            which = "torchtpu" if "--torchtpu" in command.text else "tpu"
            assert asked == f"-m pip install --quiet -r requirements-{which}.txt"


def gcloud_takes_there(machine: Machine, command: Command, tmp_path: Path) -> None:
    """What gcloud is asked on the workers of a slice."""
    _, _, there = command.text.partition(" -- ")
    gcloud_accepts(shlex.split(there), tmp_path / "config")


def uses_captions(machine: Machine, command: Command, tmp_path: Path) -> None:
    """One step of run_vit_training.py, or data.pack, on photographs with captions in a table."""
    photos, rows = machine.home / "photos", [["path", "caption"]]
    photos.mkdir()
    for number in range(20):
        Image.new("RGB", (20, 30), (number, 0, 0)).save(photos / f"{number}.jpg")
        rows.append([f"{number}.jpg", f"photograph {number}"])
    with (photos / "captions.csv").open("w", newline="") as file:
        csv.writer(file).writerows(rows)
    words = machine.noted(command, "python3")
    if "run_vit_training.py" in command.text:
        words += "--num_workers 0 --backend cuda --max_steps 1 --image_size 16".split()
        words += "--batch_size 4 --embed_dim 16 --num_heads 2 --num_blocks 1".split()
        words += "--text_width 16 --text_heads 2 --text_depth 1".split()
    done = run_program(*words, variables=machine.variables)
    assert done.returncode == 0, done.stderr
    if "run_vit_training.py" in command.text:
        assert "texts: 257 tokens (bytes, canonical)" in done.stdout
    else:
        assert sorted(path.name for path in (machine.home / "photos-shards").iterdir()) == [
            *("train", "val"),
        ]


def packs_archives(machine: Machine, command: Command, tmp_path: Path) -> None:
    """Into a folder, or into one by its URL, in place of a bucket."""
    write_imagenet_archives(machine.home / "Downloads")
    typed = command.typed.replace("gs://bucket", f"file://{tmp_path}")
    done = machine.run(replace(command, typed=machine.with_its_folders(typed)))
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.startswith("2 shards: file:///" if "gs:" in command.text else "2 shards: /")


def prepares_photographs(machine: Machine, command: Command, tmp_path: Path) -> None:
    """Photographs of a phone in two classes; copied where ImageMagick is missing."""
    told = subprocess.run("convert -version", shell=True, capture_output=True, check=False).stdout
    if not told.startswith(b"Version: ImageMagick"):
        machine.stand_in("convert", '[[ -s ${1%?0?} ]] && cp "${1%?0?}" "${@: -1}"')

    def write(*paths: str) -> None:
        for path in (machine.home / each for each in paths):
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.new("RGB", (8, 4)).save(path, "jpeg")

    def made(*folders: str) -> dict[str, int]:
        files = {name: [*(machine.home / name).rglob("*.jpg")] for name in folders}
        return {name: len(found) for name, found in files.items()}

    write("phone/an oak/1.HEIC", "phone/an oak/2.jpg", "phone/b/1", "new_photos/1 (2).jpg")
    (machine.home / "phone" / "b" / "Thumbs.db").touch()
    write(*(f"upright/phone/{name}/{n:02}.jpg" for name in ("an oak", "b") for n in range(60)))
    done = machine.run(command)
    assert done.returncode == 0, done.stderr
    if "convert" in command.text:
        assert made("upright/phone", "upright/new_photos") == {
            "upright/phone": 123,
            "upright/new_photos": 1,
        }
        assert (machine.home / "upright/phone/an oak/1.HEIC.jpg").is_file()
    else:
        split = {"my_split/train": 90, "my_split/val": 20, "my_split/test/val": 10}
        assert made(*split) == split
        assert machine.run(command).returncode  # into no old folder
        assert made(*split) == split


def replays(machine: Machine, command: Command, tmp_path: Path) -> None:
    """A bad step of a small run, in place of the one that is named."""
    flags = [*tiny(tmp_path), "--backend", "cuda", "--save_bad_step"]
    variables = {"BAD_STEPS": "3:loss"}
    trained = run_program("-m", "tests.fakes.bad_step_gpu", *flags, variables=variables)
    assert trained.returncode == 0, trained.stderr
    shutil.copytree(tmp_path / "bad_step_3", machine.home / "vit_10b" / "bad_step_1207")
    done = machine.run(command)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "in fp32 all values are finite: loss " in done.stdout


def explains_profile(machine: Machine, command: Command, tmp_path: Path) -> None:
    """The profile of a small run on the CPU, beside what nothing was compiled for."""
    folder = machine.home / "vit_10b"
    train_tiny(folder, *"--profile 2:2 --max_steps 2 --eval_batches 1".split())
    modules = {"blocks.mlp.fc1": 0.001}
    explained = {"seconds_by_module": modules, "seconds_by_kind": {"product": 0.001}}
    expected = {"expected_step_s": 0.001, "topology": "v5p:4x4x8", "batch_size": 16}
    expected["explained"] = explained
    (machine.project / "expected.json").write_text(json.dumps(expected))
    done = machine.run(command)
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"^blocks\.mlp\.fc1 +[\d.]+ +[\d.]+ % +1\.000 +100\.0 %", done.stdout, re.M)


def gcloud_takes(machine: Machine, command: Command, tmp_path: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CLOUDSDK_COMPUTE_ZONE", "us-central1-a")
        gcloud_accepts(["bash", "-c", command.script], tmp_path / "config")


def gcloud_sets_it(machine: Machine, command: Command, tmp_path: Path) -> None:
    if not shutil.which("gcloud", path=machine.variables["PATH"]):
        pytest.skip("no gcloud is installed here")
    done = machine.run(command)
    assert done.returncode == 0, done.stderr
    assert "Updated property" in done.stderr
