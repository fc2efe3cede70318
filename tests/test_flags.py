"""The command line: every flag there ever was, files of flags, help, and what is wrong in it."""

import os
import re
import subprocess
import sys

import pytest

from config_fields import flag_of
from run_vit_training import OWN, read_flags
from tests.cli import ROOT
from training.options.config import RunConfig
from training.options.flag_rules import by_field, flat
from training.options.flags import build_parser

# Every flag of commit 40b0636, the field it sets, its default there, and a value to give it.
FLAGS_OF_40B0636 = [
    ("--backend", "backend", "auto", "xla"),
    ("--seed", "seed", 0, "7"),
    ("--num_epochs", "num_epochs", 300, "7"),
    ("--max_steps", "max_steps", None, "7"),
    ("--data_dir", "data_dir", "/datasets/imagenet-1k", "x"),
    ("--fake_data", "fake_data", False, ""),
    ("--num_workers", "num_workers", None, "7"),
    ("--batch_size", "batch_size", 1024, "7"),
    ("--grad_accum_steps", "grad_accum_steps", 1, "7"),
    ("--scale", "scale", (0.08, 1.0), "0.25 0.5"),
    ("--ratio", "ratio", (0.75, 1.3333333333333333), "0.25 0.5"),
    ("--hflip", "hflip", 0.5, "1"),
    ("--model", "model", "vit_10b", "vit_120b"),
    ("--image_size --img_size", "img_size", None, "7"),
    ("--patch_size", "patch_size", None, "7"),
    ("--in_chans", "in_chans", None, "1"),
    ("--num_classes", "num_classes", None, "7"),
    ("--embed_dim", "embed_dim", None, "7"),
    ("--num_blocks --depth", "depth", None, "7"),
    ("--num_heads", "num_heads", None, "7"),
    ("--mlp_ratio", "mlp_ratio", None, "7"),
    ("--global_pool", "global_pool", None, "token"),
    ("--class_token --no-class_token", "class_token", None, ""),
    ("--reg_tokens", "reg_tokens", None, "7"),
    ("--pos_embed", "pos_embed", None, "learn"),
    ("--no_embed_class --no-no_embed_class", "no_embed_class", None, ""),
    ("--pool_include_prefix --no-pool_include_prefix", "pool_include_prefix", None, ""),
    ("--qkv_bias --no-qkv_bias", "qkv_bias", None, ""),
    ("--qk_norm --no-qk_norm", "qk_norm", None, ""),
    ("--proj_bias --no-proj_bias", "proj_bias", None, ""),
    ("--scale_attn_norm --no-scale_attn_norm", "scale_attn_norm", None, ""),
    ("--scale_mlp_norm --no-scale_mlp_norm", "scale_mlp_norm", None, ""),
    ("--init_values", "init_values", None, "7"),
    ("--pre_norm --no-pre_norm", "pre_norm", None, ""),
    ("--final_norm --no-final_norm", "final_norm", None, ""),
    ("--fc_norm --no-fc_norm", "fc_norm", None, ""),
    ("--drop_rate", "drop_rate", None, "0.5"),
    ("--pos_dropout --pos_drop_rate", "pos_drop_rate", None, "0.5"),
    ("--patch_drop_rate", "patch_drop_rate", None, "0.5"),
    ("--mlp_dropout --proj_drop_rate", "proj_drop_rate", None, "0.5"),
    ("--att_dropout --attn_drop_rate", "attn_drop_rate", None, "0.5"),
    ("--drop_path_rate", "drop_path_rate", None, "0.5"),
    ("--weight_init", "weight_init", None, "jax"),
    ("--lr", "lr", 0.001, "7"),
    ("--weight_decay", "weight_decay", 0.1, "7"),
    ("--betas", "betas", None, "0.25 0.5"),
    ("--eps", "eps", 1e-08, "7"),
    ("--clip_grad_norm", "clip_grad_norm", 1.0, "7"),
    ("--warmup_steps", "warmup_steps", 10000, "7"),
    ("--ckpt_dir", "ckpt_dir", "/tmp/vit_fsdp", "x"),
    ("--resume", "resume", "auto", "x"),
    ("--resume_epoch", "resume_epoch", 0, "7"),
    ("--ckpt_epoch_interval", "ckpt_epoch_interval", 10, "7"),
    ("--ckpt_step_interval", "ckpt_step_interval", 0, "7"),
    ("--keep_checkpoints", "keep_checkpoints", 0, "7"),
    ("--ckpt_best", "ckpt_best", False, ""),
    ("--log_step_interval", "log_step_interval", 20, "7"),
    ("--test_epoch_interval", "test_epoch_interval", 10, "7"),
    ("--test_step_interval", "test_step_interval", 0, "7"),
    ("--wandb", "wandb", None, "x"),
    ("--predict", "predict", None, "A B"),
    ("--eval_only", "eval_only", False, ""),
    ("--json", "json", False, ""),
    ("--precision --param_dtype", "precision", "fp32", "bf16"),
    ("--grad_ckpt", "grad_ckpt", "full", "selective"),
    ("--no_grad_ckpt", "grad_ckpt", "full", ""),
    ("--run_without_fsdp", "run_without_fsdp", False, ""),
    ("--no_reshard_after_forward", "reshard_after_forward", True, ""),
    ("--cpu_devices", "cpu_devices", 1, "7"),
    ("--xla_fsdp", "xla_fsdp", "auto", "spmd"),
    ("--flatten_parameters", "flatten_parameters", False, ""),
    ("--shard_on_cpu", "shard_on_cpu", False, ""),
    ("--mesh_dcn", "mesh_dcn", 1, "7"),
    ("--mesh_fsdp", "mesh_fsdp", None, "7"),
    ("--mesh_tensor", "mesh_tensor", 1, "7"),
    ("--scan_blocks --no-scan_blocks", "scan_blocks", None, ""),
    ("--attention", "attention", "auto", "sdpa"),
    ("--mark_step_after_forward", "mark_step_after_forward", False, ""),
    ("--mark_step_every_n_blocks", "mark_step_every_n_blocks", 0, "7"),
    ("--compile_cache_dir", "compile_cache_dir", None, "x"),
    ("--compile_only", "compile_only", False, ""),
    ("--explain", "explain", False, ""),
    ("--hlo_dir", "hlo_dir", None, "x"),
    ("--expect", "expect", None, "x"),
    ("--tpu_topology", "tpu_topology", None, "x"),
    ("--fsdp", "fsdp", "auto", "megatron"),
    ("--zero_dp_strategy", "zero_dp_strategy", None, "1"),
    ("--dp_outer", "dp_outer", 1, "7"),
    ("--dp_shard", "dp_shard", None, "7"),
    ("--outer_dp_sharding_strategy", "outer_dp_sharding_strategy", 0, "1"),
    ("--meta_init --no-meta_init", "meta_init", None, ""),
    ("--reduce_dtype", "reduce_dtype", "fp32", "bf16"),
    ("--grad_reduce_in_fp32", "reduce_dtype", "fp32", ""),
    ("--no_preserve_fp32_weights", "preserve_fp32_weights", True, ""),
    ("--overlap_grad_reduce --no-overlap_grad_reduce", "overlap_grad_reduce", True, ""),
    ("--overlap_param_gather --no-overlap_param_gather", "overlap_param_gather", True, ""),
    ("--forward_prefetch", "forward_prefetch", 1, "7"),
    ("--backward_prefetch", "backward_prefetch", 1, "7"),
    ("--cpu_offload", "cpu_offload", False, ""),
    ("--block", "block", "timm", "te"),
    ("--fp8", "fp8", "none", "delayed"),
    ("--compile", "compile", False, ""),
    ("--channels_last", "channels_last", False, ""),
    ("--tf32", "tf32", False, ""),
    ("--profile", "profile", None, "2:4"),
]
OTHER_NAMES = {"dp_outer": "mesh_dcn", "dp_shard": "mesh_fsdp", "fake_data": "data_source"}
OTHER_VALUES = {("model", None): "vit_10b", ("data_source", "folder"): False}


@pytest.fixture(autouse=True)
def plain_environment(monkeypatch):
    monkeypatch.delenv("CPU_NUM_DEVICES", raising=False)
    monkeypatch.delenv("STEP_TIMEOUT_S", raising=False)


def values(*words):
    asked = read_flags(words)
    return flat(asked.run, *asked.own.values())


@pytest.mark.parametrize(("names", "field", "default", "example"), FLAGS_OF_40B0636)
def test_every_flag_that_there_was(names, field, default, example):
    field = OTHER_NAMES.get(field, field)
    before = values()[field]
    assert OTHER_VALUES.get((field, before), before) == default
    for name in names.split():
        given = values(name, *example.split())[field]
        if name in ("--no_grad_ckpt", "--grad_reduce_in_fp32"):
            assert given == {"--no_grad_ckpt": "none", "--grad_reduce_in_fp32": "fp32"}[name]
        elif name == "--overlap_grad_reduce" or name == "--overlap_param_gather":
            assert given is True
        else:
            assert given != before


def test_a_data_source_by_name(capsys):
    assert values("--data_source", "digits")["data_source"] == "digits"
    assert values("--data_source", "fake") == values("--fake_data")
    with pytest.raises(SystemExit) as ended:
        values("--data_source", "none")
    assert ended.value.code == 2
    assert "argument --data_source: " in capsys.readouterr().err


def test_a_file_of_flags(tmp_path):
    (tmp_path / "a.args").write_text("# comment\n--lr 0.5  # and more\n\n--scale 0.1 0.9\n")
    (tmp_path / "b.args").write_text(f"@{tmp_path}/a.args --ckpt_dir 'with blank'\n")
    found = values("--lr", "0.1", f"@{tmp_path}/b.args", "--hflip", "0")
    assert (found["lr"], found["scale"], found["hflip"]) == (0.5, (0.1, 0.9), 0)
    assert found["ckpt_dir"] == "with blank"
    assert values(f"@{tmp_path}/b.args", "--lr", "0.1")["lr"] == 0.1  # the last one counts


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, "No such file or directory"),
        ("--ckpt_dir 'open", "No closing quotation"),
        ("@{path}", "a file of flags cannot be read (RecursionError)"),
        (b"\xff\xfe", "a file of flags cannot be read (UnicodeDecodeError)"),
        ("--lr x", "'x' is not a number"),
        ("lr 3", "unrecognized argument: lr"),
    ],
)
def test_a_bad_file_of_flags(content, words, tmp_path, capsys):
    path = tmp_path / "bad.args"
    if isinstance(content, bytes):
        path.write_bytes(content)
    elif content:
        path.write_text(content.format(path=path))
    with pytest.raises(SystemExit, match="2"):
        read_flags([f"@{path}"])
    said = capsys.readouterr().err
    assert words in said
    assert len(said.splitlines()) == 1


@pytest.mark.parametrize(
    ("typed", "words"),
    [
        ("--batch_sze 3", "unknown flag --batch_sze: did you mean --batch_size?"),
        ("--no-scan_block", "did you mean --no-scan_blocks?"),
        ("--xyzzy", "unknown flag --xyzzy (see"),
        ("--help nothing", "--help nothing: there is no such group; there are all, run, data"),
        ("--precision fp8", "invalid choice: 'fp8'"),
    ],
)
def test_mistyped(typed, words, capsys):
    with pytest.raises(SystemExit, match="2"):
        read_flags(typed.split())
    assert words in capsys.readouterr().err


def test_the_environment_gives_defaults(monkeypatch, capsys):
    monkeypatch.setenv("CPU_NUM_DEVICES", "4")
    assert values()["cpu_devices"] == 4
    assert values("--cpu_devices", "2")["cpu_devices"] == 2
    monkeypatch.setenv("CPU_NUM_DEVICES", "many")
    with pytest.raises(SystemExit, match="2"):
        values()
    assert "CPU_NUM_DEVICES of the environment: 'many' is not" in capsys.readouterr().err


# -- help -----------------------------------------------------------------------------


def shown(capsys, *words):
    with pytest.raises(SystemExit, match="0"):
        read_flags(["--help", *words])
    return capsys.readouterr().out


def test_help_in_three_sizes(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    short, one, everything = shown(capsys), shown(capsys, "xla"), shown(capsys, "all")
    assert len(short.splitlines()) <= 2 * 60
    assert "--batch_size" in short
    assert "--flatten_parameters" not in short
    assert "--flatten_parameters" in one
    assert "--batch_size" not in one
    known = by_field(RunConfig, *OWN.values())
    for option in known.values():
        for name in (*option.names, *option.flag.shorthands):
            assert re.search(rf"(?m)^  (.*, )?{name}\b", everything), name


def test_every_flag_has_help_with_its_default(monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    for option in by_field(RunConfig, *OWN.values()).values():
        text = build_parser([option]).format_help().partition(f"{option.group}:")[2]
        assert "default" in text, option.names
        assert option.flag.help[:20] in re.sub(r"\s+", " ", text)


def test_conditions_name_fields():
    """What a flag needs or excludes is a field, of every backend's or of one of them."""
    known = by_field(RunConfig, *OWN.values())
    for option in known.values():
        told = flag_of(option.field)
        for condition in [each for need in told.needs for each in need.split("|")]:
            name, _, value = condition.partition("=")
            assert name in known, condition
            choices = getattr(known[name].type, "__args__", ())
            assert not value or not choices or value in choices, condition
        assert set(told.conflicts) <= set(known)


def test_help_and_refusals_start_nothing():
    """Neither torch nor timm is imported to show help, or to refuse a flag."""
    program = "import sys, run_vit_training\ntry: run_vit_training.main(sys.argv[1:])\n"
    program += "finally: print(sorted({'torch', 'timm', 'jax'} & set(sys.modules)))"
    for flags in (["--help"], ["--help", "all"], ["--lr", "x"], ["--batch", "2"]):
        done = subprocess.run(
            [sys.executable, "-c", program, *flags],
            cwd=ROOT,
            env=os.environ,
            check=False,
            capture_output=True,
            text=True,
        )
        assert done.stdout.splitlines()[-1] == "[]", flags
