"""The words of other programs: each is answered by what to type here, and stands on its page."""

import re
import shlex

import pytest
import torch

from models.config import PRESETS
from models.registry import open_model
from run_vit_training import read_flags
from tests.support.cli import ROOT, tiny
from tests.support.documented_commands import known_flags
from tests.support.resolved import on_gpus
from training.foreign_flags import TABLES, meanings

pytestmark = pytest.mark.fast

WORDS = {word: meaning for table in TABLES for word, meaning in table.items()}
PAGE = "".join(
    (ROOT / "docs" / name).read_text() for name in ("coming_from.md", "coming_from_timm.md")
)
VALUES = ("2", "1", "0.5", "0.1 0.5", "bf16", "jax", "avg", "lion", "cosine", "folder")
"""One of them is a value of each flag."""


def _flags(meaning):
    return " ".join([meaning.flags, *meaning.by_value.values()]).strip()


def refusal(capsys, words):
    with pytest.raises(SystemExit, match="2"):
        read_flags(words)
    (line,) = capsys.readouterr().err.splitlines()
    return line


@pytest.mark.parametrize(
    ("typed", "told"),
    [
        # The recipe's command.
        (
            "--config-name vit_base_patch16_224 distributed.dp_shard=2 "
            "training.checkpoint.path=./ckpts/vit",
            [
                "--config-name: use @recipes/bionemo_vit_base.args",
                "distributed.dp_shard: use --dp_shard 2",
                "training.checkpoint.path: use --ckpt_dir ./ckpts/vit",
            ],
        ),
        ("--config-name=vit_base_patch16_224", ["use @recipes/bionemo_vit_base.args"]),
        ("++training.steps=5 +random.seed=1", ["use --max_steps 5", "use --seed 1"]),
        ("optimizer.betas=[0.9,0.98]", ["use --betas 0.9 0.98"]),
        ("optimizer.betas=[0.9, 0.98]", ["use --betas 0.9 0.98"]),
        ("model.vit.qk_norm=true", ["use --qk_norm"]),
        ("model.vit.qk_norm=False", ["use --no-qk_norm"]),
        ("model.vit.init_values=null", ["model.vit.init_values: leave it out"]),
        ("fsdp.preserve_fp32_weights=true", ["leave it out"]),
        ("fsdp.preserve_fp32_weights=false", ["use --no_preserve_fp32_weights"]),
        ("training.checkpoint.resume_from_metric=-", ["use --resume lowest_loss"]),
        ("training.checkpoint.resume_from_metric=+", ["use --resume best"]),
        ("training.checkpoint.resume_from_metric=null", ["leave it out"]),
        ("model.vit.weight_init=timm", ["leave it out (timm is the default)"]),
        ("model.vit.weight_init=moco", ["use --weight_init moco"]),
        # The ShardTensor example's.
        (
            "--domain_size 4 --ddp_size 2 --use_mixed_precision",
            ["use --mesh_domain 4; ", "use --dp_outer 2 (", "use --precision bf16"],
        ),
        ("--ddp_size -1 --domain_size=8", ["--ddp_size: leave it out", "use --mesh_domain 8"]),
        ("--domain-size 4", ["use --mesh_domain 4"]),
        ("--domain_size", ["use --mesh_domain VALUE"]),
        # The FSDP tutorial's.
        (
            "--epochs 3 --gamma 0.7 --no-cuda --track_memory --lr 1",
            [
                "use --num_epochs 3;",
                "use --lr_schedule step --decay_epochs 1 --decay_rate 0.7;",
                "--no-cuda: leave it out (CUDA_VISIBLE_DEVICES=",
                "--track_memory: leave it out (log lines",
            ],
        ),
        ("--gamma --epochs 3", ["--decay_rate VALUE", "use --num_epochs 3"]),
        ("--sharding_strategy SHARD_GRAD_OP", ["use --zero_dp_strategy 2"]),
        ("--sharding_strategy=ShardingStrategy.NO_SHARD", ["use --zero_dp_strategy 0"]),
        ("--sharding_strategy FULL_SHARD", ["use --zero_dp_strategy 3"]),
        ("--fsdp_activation_checkpointing --dry-run", ["--grad_ckpt full", "--max_steps 1"]),
        # timm's, open_clip's, DINOv3's and MAE's.
        (
            "--opt adamw --amp --sched cosine --wd 0.05 --experiment x --blr 1e-3",
            [
                "--opt: use --optimizer adamw (",
                "--amp: use --precision bf16 (",
                "--sched: use --lr_schedule cosine (",
                "--wd: use --weight_decay 0.05 (",
                "--experiment: use --ckpt_dir x (",
                "--blr: use --lr 1e-3 (not scaled by the batch",
            ],
        ),
        ("-b 64 -j 8", ["-b: use --batch_size 64 (times the devices", "-j: use --num_workers 8"]),
        ("--amp-dtype float16", ["use --precision fp16"]),
        ("--eval-metric loss", ["use --ckpt_best lowest_loss"]),
        (
            "train.batch_size_per_gpu=64 student.arch=vit_large optim.base_lr=0.004",
            ["use --batch_size 64 (", "use --model vit_large", "use --lr 0.004 (not scaled"],
        ),
        ("crops.global_crops_scale=[0.32,1.0]", ["use --global_crops_scale 0.32 1.0"]),
        # All unknown flags at once, whosever they are.
        (
            "--opt lion --batch_sze 3 --nonsense_of_mine",
            [
                "use --optimizer lion",
                "unknown flag --batch_sze: did you mean --batch_size?",
                "unknown flag --nonsense_of_mine",
            ],
        ),
        # Beside a value that is invalid here.
        (
            "--train-data x.tar --precision amp --workers 4 --lr -3",
            ["use --data_dir x.tar", "use --num_workers 4", "invalid choice: 'amp'"],
        ),
        # Nobody's: what is no flag of ours stays a mistake of spelling.
        ("lr=1e-4", ["unrecognized argument: lr=1e-4: settings are flags, as in --lr 1e-4"]),
        ("gamma=0.7", ["--decay_rate 0.7"]),
        ("gamma", ["unrecognized argument: gamma ("]),
        ("--batch_sze 3", ["unknown flag --batch_sze: did you mean --batch_size?"]),
    ],
)
def test_answers(typed, told, capsys):
    words = [typed] if "[" in typed else typed.split()
    line = refusal(capsys, words)
    for part in told:
        assert part in line
    assert (
        line.count(": use ") + line.count(": leave it out") == len(told)
        or "un" in line
        or "invalid" in line
    )


def test_hyphens_are_underscores():
    flags = read_flags(
        "--batch-size 64 --no_scan-blocks --weight-decay=0.2 --grad_ckpt none".split()
    )
    assert (flags.run.data.batch_size, flags.run.optimizer.weight_decay) == (64, 0.2)
    assert flags.xla.scan_blocks is False


def test_the_line_of_a_file_is_named(tmp_path, capsys):
    (tmp_path / "a.args").write_text("--lr 1\n--gamma 0.7\n")
    assert f"@{tmp_path}/a.args, line 2: --gamma: use --lr_" in refusal(
        capsys, [f"@{tmp_path}/a.args"]
    )


@pytest.mark.parametrize("word", WORDS)
def test_what_to_type_is_valid(word):
    """Each answer's flags are read as a command line, with a value of their kind."""
    meaning = WORDS[word]
    for flags in filter(None, (meaning.flags, *meaning.by_value.values())):
        if "{}" not in flags:
            flags = flags.replace("@FILE", "@recipes/digits.args")
            read_flags([w.replace("@", f"@{ROOT}/") for w in shlex.split(flags)])
            continue
        for value in VALUES:
            try:
                read_flags(shlex.split(flags.replace("{}", value)))
            except SystemExit:
                continue
            break
        else:
            pytest.fail(f"no value fits {flags}")
    named = re.findall(r"--\w[\w-]+", f"{_flags(meaning)} {meaning.note}")
    assert not {*named} - known_flags() - {"--fsdp"}
    assert _flags(meaning) or meaning.note
    assert word not in known_flags()


def test_every_word_stands_on_the_page_beside_its_flags():
    rows = [row.split(" | ") for row in PAGE.splitlines() if row.startswith("| ")]
    for word, meaning in WORDS.items():
        told = [
            " ".join(row[1:])
            for row in rows
            if re.search(rf"`[^`]*(?<!\w){re.escape(word)}(?!\w)", row[0])
        ]
        assert told, f"{word} is not on docs/coming_from.md"
        for flag in re.findall(r"(?:--|@)\w[\w/.-]+", _flags(meaning)):
            assert any(flag in text for text in told), (word, flag)


@pytest.mark.parametrize("name", [*PRESETS, "hybrid_vit"])
def test_models_have_no_buffers_to_cast(name):
    """Which ``buffer_dtype`` of FSDP would cast."""
    with torch.device("meta"):
        assert not list(open_model(name, {}).build().buffers())


def test_reduction_alone_in_bf16(tmp_path):
    """``MixedPrecision(reduce_dtype=torch.bfloat16)``: parameters stay fp32."""
    flags = ["--backend", "cuda", "--fsdp", "fsdp2", "--reduce_dtype", "bf16"]
    run = on_gpus([*tiny(tmp_path), *flags])
    assert run.config.sharding.precision == "fp32"
    assert run.backend_config.reduce_dtype == "bf16"


def test_no_word_has_two_meanings():
    plain = [word.lstrip("-").replace("-", "_") for table in TABLES for word in table]
    assert len(plain) == len(set(plain))
    for word in WORDS:
        assert meanings([word if word.startswith("-") else f"{word}=1"]), word


def test_tests_that_the_evidence_names_are_there():
    evidence = (ROOT / "docs" / "evidence" / "peers.md").read_text()
    named = re.findall(r"`([\w/]+\.py)::(\w+)`", evidence)
    assert len(named) > 100
    for path, name in named:
        assert f"\ndef {name}(" in (ROOT / "tests" / path).read_text(), (path, name)
