"""``--self_check``: sound programs pass, and seeded faults fail on the line that is theirs."""

import os
import re

import pytest

import run_vit_training
from tests.support.cli import DIGITS, TINY_MODEL, run_program
from tests.support.marks import long, spread
from training.files import FolderLock

RUN = ["--self_check", "--data_dir", str(DIGITS), *TINY_MODEL, "--batch_size", "16"]
RUN += ["--num_workers", "0"]
BACKENDS = {
    "spmd": (1, ["--cpu_devices", "2"]),
    "nested": (1, ["--xla_fsdp", "nested"]),
    "fsdp2": (2, ["--backend", "cuda"]),
    "megatron": (2, ["--backend", "cuda", "--fsdp", "megatron"]),
    "spmd, bf16": (1, ["--cpu_devices", "2", "--precision", "bf16"]),
    "fsdp2, bf16": (2, ["--backend", "cuda", "--precision", "bf16"]),
}
OBJECTIVES = {
    "mae": "--objective mae --decoder_embed_dim 32 --decoder_num_heads 2",
    "dino": "--objective dino --class_token --local_crop_size 8 --koleo_group 4",
}
BACKENDS |= {
    f"{objective}, {name}": (BACKENDS[name][0], [*BACKENDS[name][1], *flags.split()])
    for objective, flags in OBJECTIVES.items()
    for name in ("spmd", "fsdp2")
}
FAULTS = {
    "scaled gradient": "gradient norm",
    "dropped all-reduce": "gradients",
    "other data": "rows, sum",
    "stale weight": "moments",
    "clipping per shard": "gradients",
    "wrong row": "rows, sum",
    "lost optimizer shard": "checkpoint read",
}
OF_TEACHERS = {"teacher stands still": "teacher"}
HYBRID = "--model hybrid_vit --data_source mosaics --num_heads 4"
VOLUME = "--dimension 3 --image_size 48 16 24 --patch_size 8"
# Flags that go together, for 1 or more processes of a program.
SOUND = {
    "run_vit_training.py": [
        (1, "--cpu_devices 2"),
        (1, "--cpu_devices 4 --mesh_tensor 2 --precision bf16"),
        (1, "--cpu_devices 4 --mesh_dcn 2 --grad_accum_steps 2"),
        (1, "--cpu_devices 2 --mark_step_every_n_blocks 2 --num_blocks 6 --grad_accum_steps 4"),
        (1, "--cpu_devices 2 --global_pool map --qk_norm --precision bf16 --drop_path_rate 0.2"),
        (1, "--xla_fsdp nested --precision bf16 --grad_accum_steps 4"),
        (4, "--backend cuda --dp_outer 2 --grad_accum_steps 2 --precision bf16"),
        (2, "--backend cuda --zero_dp_strategy 2 --grad_ckpt selective --batch_size 2"),
        (3, "--backend cuda --batch_size 24 --channels_last --image_size 28 --patch_size 7"),
        (2, "--backend cuda --compile --precision bf16"),
        *(
            (processes, f"{HYBRID} {flags}")
            for processes, flags in (
                (4, "--backend cuda --mesh_domain 2 --image_size 32 --precision bf16"),
                (4, f"--backend cuda --mesh_domain 4 {VOLUME}"),
                (1, "--cpu_devices 2 --mesh_domain 2 --image_size 32"),
            )
        ),
        *(
            (processes, f"{OBJECTIVES[objective]} {flags}")
            for objective, processes, flags in (
                ("mae", 1, "--cpu_devices 4 --grad_accum_steps 2 --precision bf16"),
                ("mae", 1, "--xla_fsdp nested --no-norm_pix_loss --mask_ratio 0.9"),
                ("mae", 4, "--backend cuda --dp_outer 2 --class_token --reg_tokens 2"),
                ("dino", 1, "--cpu_devices 2 --precision bf16 --no-scan_blocks"),
                ("dino", 1, "--xla_fsdp nested --koleo_weight 0 --local_crops 0"),
                ("dino", 2, "--backend cuda --grad_accum_steps 2 --koleo_group 2"),
                ("dino", 2, "--backend cuda --precision bf16 --zero_dp_strategy 2"),
                ("dino", 1, "--cpu_devices 2 --model timm/vit_small_patch16_dinov3"),
            )
        ),
        *(
            (processes, f"--backend cuda --fsdp megatron {flags}")
            for processes, flags in (
                (2, "--precision bf16 --zero_dp_strategy 1 --grad_accum_steps 2"),
                (4, "--dp_outer 2 --outer_dp_sharding_strategy 1 --class_token"),
                (2, "--zero_dp_strategy 2 --precision bf16 --qk_norm --global_pool max"),
                (2, f"{OBJECTIVES['mae']} --precision bf16"),
                (2, f"{OBJECTIVES['dino']} --precision bf16 --zero_dp_strategy 1"),
            )
        ),
    ],
    "tests.fakes.fp16_on_cpu": [
        (2, "--backend cuda --precision fp16 --reduce_dtype fp16 --grad_accum_steps 2")
    ],
}
QUICK = [("fsdp2", "dropped all-reduce")]
WITH_TEACHERS = [
    (backend, fault) for backend in ("dino, fsdp2", "dino, spmd") for fault in OF_TEACHERS
]
ON_GPUS_ALONE = {"scaled gradient", "dropped all-reduce", "stale weight", "clipping per shard"}
ON_XLA = [name for name in BACKENDS if "spmd" in name or name == "nested"]
PAIRS = [
    *QUICK,
    *spread([name for name in BACKENDS if name not in ON_XLA], FAULTS, every=2),
    *spread(ON_XLA, [name for name in FAULTS if name not in ON_GPUS_ALONE], every=2),
    *WITH_TEACHERS,
]


def check(ckpt_dir, *flags, processes=1, program="run_vit_training.py"):
    """Lines of the table as (verdict, name, text), and the exit code; see that it is a table."""
    start = [program] if program.endswith(".py") else ["-m", program]
    done = run_program(*start, *RUN, "--ckpt_dir", str(ckpt_dir), *flags, processes=processes)
    lines = done.stdout.splitlines()
    assert lines, done.stderr
    rows = [re.fullmatch(r"(pass|FAIL|skip)  (.{20}) (.+)", line) for line in lines[3:-1]]
    assert all(rows), done.stdout + done.stderr
    failed = [row[2].strip() for row in rows if row[1] == "FAIL"]
    end = rf"self check FAILED: {len(failed)} of" if failed else "self check passed:"
    assert re.match(rf"{end} \d+ checks", lines[-1])
    assert done.returncode == bool(failed), done.stderr
    return failed, [row.groups() for row in rows], done


@pytest.mark.parametrize(
    ("backend", "fault"),
    [
        (backend, fault) if (backend, fault) in QUICK else long(backend, fault)
        for backend, fault in dict.fromkeys(PAIRS)
    ],
)
def test_fault_is_found(backend, fault, tmp_path, monkeypatch):
    monkeypatch.setenv("FAULT", fault)
    processes, flags = BACKENDS[backend]
    program = "tests.fakes.self_check_fault"
    failed, _, done = check(tmp_path, *flags, processes=processes, program=program)
    print(done.stdout)
    assert (FAULTS | OF_TEACHERS)[fault] in failed
    assert [path.name for path in tmp_path.iterdir()] == [".lock"]


@pytest.mark.long
@pytest.mark.parametrize(
    ("program", "processes", "flags"),
    [(program, *entry) for program, entries in SOUND.items() for entry in entries],
)
def test_sound_flags_pass(program, processes, flags, tmp_path):
    failed, rows, done = check(tmp_path, *flags.split(), processes=processes, program=program)
    print(done.stdout)
    assert not failed
    assert {verdict for verdict, _, _ in rows} == {"pass"}
    assert "Traceback" not in done.stderr


def test_folder_that_cannot_be_written():
    failed, rows, done = check("/sys/vit", "--backend", "cuda", "--fake_data")
    assert failed == ["checkpoint folder"]
    told = {name.strip(): text for _, name, text in rows}
    assert "cannot write to --ckpt_dir /sys/vit" in told["checkpoint folder"]
    assert float(told["loss"].split()[0]) < 1e-5
    assert done.stderr == ""


@pytest.mark.long
def test_folder_of_a_run_stays_as_it_is_and_another_job_is_noticed(tmp_path):
    (tmp_path / "step_5").mkdir()
    (tmp_path / "step_5" / "manifest.json").write_text("{}")
    before = sorted(tmp_path.rglob("*"))
    failed, rows, _ = check(tmp_path, "--backend", "cuda", "--precision", "bf16")
    assert not failed
    assert sorted(tmp_path.rglob("*")) == sorted([*before, tmp_path / ".lock"])
    lock = FolderLock(tmp_path)
    lock.acquire(is_restart=False)
    failed, rows, _ = check(tmp_path, "--backend", "cuda", "--fake_data")
    lock.release()
    assert failed == ["checkpoint folder"]
    assert any(f"is in use by process {os.getpid()}" in text for _, _, text in rows)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("--predict x.png", "--self_check is incompatible with --predict x.png: drop"),
        ("--data_dir /nowhere", "/nowhere"),
        (
            "--model timm/vit_base_patch16_sapiens2 --image_size 64 --patch_size 16 "
            "--embed_dim 768 --num_heads 12 --num_blocks 12",
            "--self_check cannot shrink --model timm/vit_base_patch16_sapiens2: timm cannot",
        ),
        ("--batch_size 15 --cpu_devices 2", "not a multiple of the 2 devices"),
    ],
)
def test_mistakes(flags, words, tmp_path, capsys):
    assert run_vit_training.main([*RUN, "--ckpt_dir", str(tmp_path), *flags.split()]) == 2
    said = capsys.readouterr()
    assert words in said.err
    assert (said.out, len(said.err.splitlines())) == ("", 1)
