"""The command line: every flag there ever was, files of flags, help, and what is wrong in it."""

import importlib
import os
import re
import subprocess
import sys

import pytest

from config_fields import flag_of
from run_vit_training import CONFIGS, read_flags
from tests import flags_page
from tests.cli import ROOT
from training.errors import UsageError
from training.flags import build_parser, by_field, check_rules, flat

pytestmark = pytest.mark.fast

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
    ("--compile_only", "compile_only", False, ""),
    ("--explain", "explain", False, ""),
    ("--hlo_dir", "hlo_dir", None, "x"),
    ("--tpu_topology", "tpu_topology", None, "x"),
    ("--tpu_compiler", "tpu_compiler", "auto", "0.0.52"),
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
OTHER_VALUES = {
    ("model", None): "vit_10b",
    ("data_source", "folder"): False,
    # The temporary folder is everybody's: who makes one of this name there first would own the run.
    ("ckpt_dir", "runs/vit_fsdp"): "/tmp/vit_fsdp",
    ("compile", None): False,  # as before where nothing is compiled unless asked for
}


@pytest.fixture(autouse=True)
def plain_environment(monkeypatch):
    monkeypatch.delenv("CPU_NUM_DEVICES", raising=False)
    monkeypatch.delenv("STEP_TIMEOUT_S", raising=False)


def refusal(capsys, *words):
    """What the program says of a command line that it does not read."""
    with pytest.raises(SystemExit, match="2"):
        read_flags(words)
    return capsys.readouterr().err


def values(*words):
    asked = read_flags(words)
    return flat(asked.run, *asked.backend_configs)


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
        ("--seed 1\n@{path}", "includes itself"),
        (b"--seed 1\n\xff\xfe", "not UTF-8 text"),
    ],
)
def test_a_bad_file_of_flags(content, words, tmp_path, capsys):
    path = tmp_path / "bad.args"
    if isinstance(content, bytes):
        path.write_bytes(content)
    elif content:
        path.write_text(content.format(path=path))
    (line,) = refusal(capsys, "--lr", "1", f"@{path}").splitlines()
    assert words in line
    assert f"@{path}" in line


def test_a_file_of_flags_that_is_no_file(tmp_path, capsys):
    assert f"@{tmp_path}: Is a directory" in refusal(capsys, f"@{tmp_path}")
    (tmp_path / "empty.args").touch()
    assert values(f"@{tmp_path}/empty.args") == values()


def test_files_that_include_each_other(tmp_path, capsys):
    (tmp_path / "b.args").write_text(f"\n@{tmp_path}/a.args")
    (tmp_path / "a.args").write_text(f"@{tmp_path}/b.args")
    assert "a.args includes itself" in refusal(capsys, f"@{tmp_path}/a.args")


@pytest.mark.parametrize("end", ["\n", " \\\n", "\\ \t\n", " \\\r\n", " # a comment \\\n"])
def test_a_pasted_command_in_a_file_of_flags(end, tmp_path):
    path = tmp_path / "pasted.args"
    path.write_bytes(f"--lr 0.5{end}  --scale 0.1 0.9{end}  --seed 3{end}".encode())
    found = values(f"@{path}")
    assert (found["lr"], found["scale"], found["seed"]) == (0.5, (0.1, 0.9), 3)


def test_values_in_a_file(tmp_path):
    """A file may hold the values of the flag before it, such as a list of images."""
    (tmp_path / "list").write_text("a.jpg\n'b c.jpg'\n")
    assert values("--predict", f"@{tmp_path}/list")["predict"] == ["a.jpg", "b c.jpg"]


# -- what was given ---------------------------------------------------------------------


def given(*words):
    return read_flags(words).run.given


def test_which_flags_were_given(tmp_path, monkeypatch):
    """Whatever their values; by any of their names, or in a file; not by the environment."""
    monkeypatch.setenv("CPU_NUM_DEVICES", "4")
    assert given() == set()
    (tmp_path / "a.args").write_text("--grad_ckpt full --no_reshard_after_forward")
    words = ["--warmup_steps=10000", "--dp_outer", "1", "--fake_data", f"@{tmp_path}/a.args"]
    fields = {"warmup_steps", "mesh_dcn", "data_source", "grad_ckpt", "reshard_after_forward"}
    assert given(*words) == fields


def test_every_flag_at_its_default():
    """It changes nothing that they are typed, those whose default can be."""
    typed = {
        name: option.words(option.field.default)
        for name, option in by_field(*CONFIGS.values()).items()
        if option.field.default is not None and (option.has_negation or not option.is_switch)
    }
    words = [word for each in typed.values() for word in each]
    assert values(*words) == values()
    assert given(*words) == typed.keys()


def test_a_file_is_turned_off_by_a_default(tmp_path):
    """So a flag may be given at its default though what it requires is not so."""
    (tmp_path / "a.args").write_text("--mixup 0.8 --mixup_prob 0.5 --mesh_tensor 2")
    words = [f"@{tmp_path}/a.args", "--objective", "mae"]
    with pytest.raises(UsageError, match=r"--mixup 0\.8 requires --objective classify"):
        check_rules(read_flags(words).run)
    check_rules(read_flags([*words, *"--mixup 0 --mixup_prob 1 --mesh_tensor 1".split()]).run)


def test_the_last_flag_of_a_setting_counts(tmp_path):
    """Whatever its name, and whether it is in a file."""
    assert values("--no_grad_ckpt", "--grad_ckpt", "full")["grad_ckpt"] == "full"
    assert values("--grad_ckpt", "full", "--no_grad_ckpt")["grad_ckpt"] == "none"
    assert values("--grad_ckpt", "none", "--grad_ckpt", "full")["grad_ckpt"] == "full"
    (tmp_path / "a.args").write_text("--no_grad_ckpt --mesh_dcn 2")
    assert values(f"@{tmp_path}/a.args", "--grad_ckpt", "full")["grad_ckpt"] == "full"
    assert values("--dp_outer", "4", f"@{tmp_path}/a.args")["mesh_dcn"] == 2


@pytest.mark.parametrize(
    ("typed", "words"),
    [
        ("--batch_sze 3", "unknown flag --batch_sze: did you mean --batch_size?"),
        ("--no-scan_block", "did you mean --no-scan_blocks?"),
        ("--xyzzy", "unknown flag --xyzzy (see"),
        (
            "--help xyzzy",
            "--help xyzzy: no flag has this word; there are the groups all, run, data",
        ),
        ("--precision fp8", "invalid choice: 'fp8'"),
    ],
)
def test_mistyped(typed, words, capsys):
    with pytest.raises(SystemExit, match="2"):
        read_flags(typed.split())
    assert words in capsys.readouterr().err


EMPTY_IS_A_VALUE = {"weight_init"}  # timm's own name of its first scheme


def test_an_empty_word_is_no_value_of_any_flag(capsys):
    """As a shell gives one for a variable that is not set: Path("") would be the current folder."""
    for option in by_field(*CONFIGS.values()).values():
        if option.is_switch or option.field.name in EMPTY_IS_A_VALUE:
            continue
        several = len(option.flag.metavar) if isinstance(option.flag.metavar, tuple) else 1
        for word in ("", " "):
            with pytest.raises(SystemExit, match="2"):
                read_flags([option.names[0], *[word] * several])
            (line,) = capsys.readouterr().err.splitlines()
            assert option.names[0] in line
    assert values("--weight_init", "")["weight_init"] == ""


@pytest.mark.parametrize(
    ("program", "words"),
    [
        ("tools.convert", ["", "out.pt"]),
        ("tools.convert", ["in.pt", ""]),
        ("tools.goodput", [""]),
        ("tools.report", [""]),
        ("data.pack", ["", "out"]),
        ("data.pack", ["in", ""]),
    ],
)
def test_an_empty_word_names_no_place_for_other_programs(program, words, capsys, monkeypatch):
    monkeypatch.setattr("sys.argv", [program, *words])
    with pytest.raises(SystemExit, match="2"):
        importlib.import_module(program).main()
    assert "must not be empty" in capsys.readouterr().err.splitlines()[-1]


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
    monkeypatch.setenv("COLUMNS", "80")
    short, one, everything = shown(capsys), shown(capsys, "xla"), shown(capsys, "all")
    assert len(short.splitlines()) <= 120
    assert "--batch_size" in short
    assert "--flatten_parameters" not in short
    assert "--flatten_parameters" in one
    assert "--batch_size" not in one
    known = by_field(*CONFIGS.values())
    for option in known.values():
        for name in (*option.names, *option.flag.shorthands):
            assert re.search(rf"(?m)^  (.*, )?{name}\b", everything), name


def test_help_finds_flags_by_a_word(capsys):
    """In a name, or at the beginning of a word of a help text or of a value."""

    def found(word):
        return set(re.findall(r"(?m)^  (--\w+)", shown(capsys, word)))

    assert found("ema") == {"--use_ema", "--model_ema", "--model_ema_decay", "--model_ema_warmup"}
    assert found("EMA") == found("ema")
    assert found("wandb") == {"--wandb"}
    assert found("mxfp8") == {"--fp8"}  # one of its values
    assert {"--model", "--qk_norm"} <= found("model")  # a group, as before
    assert "--teacher" not in found("model")


@pytest.mark.parametrize("flags", ["--help all", "--list_models *"])
def test_whose_reader_ends_early_ends_without_a_word(flags):
    """As before ``| head -1``, which leaves what is longer than the pipe holds unread."""
    command = [sys.executable, "-u", "run_vit_training.py", *flags.split()]
    pipe = {"stdout": -1, "stderr": -1, "pipesize": 4096}
    with subprocess.Popen(command, cwd=ROOT, text=True, **pipe) as program:
        program.stdout.readline()
        program.stdout.close()
        assert program.stderr.read() == ""
    assert program.returncode == 128 + 13


def test_every_flag_has_help_with_its_default(monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    for option in by_field(*CONFIGS.values()).values():
        text = build_parser([option]).format_help().partition(f"{option.group}:")[2]
        assert "default" in text, option.names
        assert option.flag.help[:20] in re.sub(r"\s+", " ", text)


def test_the_page_of_flags_is_that_of_the_fields():
    assert flags_page.PAGE.read_text() == flags_page.page(), "write it: python -m tests.flags_page"


def test_conditions_name_fields():
    """What a flag needs or excludes is a field, of every backend's or of one of them."""
    known = by_field(*CONFIGS.values())
    for option in known.values():
        told = flag_of(option.field)
        for condition in [each for need in told.requires for each in need.split("|")]:
            name, _, value = condition.partition("=")
            assert name in known, condition
            choices = getattr(known[name].type, "__args__", ())
            assert not value or not choices or value in choices, condition
        assert {*told.incompatible_with, *told.replaces} <= set(known)


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
