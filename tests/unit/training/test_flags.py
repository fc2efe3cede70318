"""The command line: every flag there ever was, files of flags, help, and what is wrong in it."""

import importlib
import re
import subprocess
import sys

import pytest

from config_fields import flag_of
from run_vit_training import CONFIGS, read_flags
from tests.support import flags_page
from tests.support.cli import ROOT
from training.errors import UsageError
from training.flags import by_field, flat, from_values
from training.rules import check_rules

pytestmark = pytest.mark.fast

NAMES = """
backend seed num_epochs max_steps data_dir fake_data num_workers batch_size grad_accum_steps
scale ratio hflip model image_size img_size patch_size in_chans num_classes embed_dim num_blocks
depth num_heads mlp_ratio global_pool class_token no-class_token reg_tokens pos_embed
no_embed_class no-no_embed_class pool_include_prefix no-pool_include_prefix qkv_bias no-qkv_bias
qk_norm no-qk_norm proj_bias no-proj_bias scale_attn_norm no-scale_attn_norm scale_mlp_norm
no-scale_mlp_norm init_values pre_norm no-pre_norm final_norm no-final_norm fc_norm no-fc_norm
drop_rate pos_dropout pos_drop_rate patch_drop_rate mlp_dropout proj_drop_rate att_dropout
attn_drop_rate drop_path_rate weight_init lr weight_decay betas eps clip_grad_norm warmup_steps
ckpt_dir resume resume_epoch ckpt_epoch_interval ckpt_step_interval keep_checkpoints ckpt_best
log_step_interval test_epoch_interval test_step_interval wandb predict eval_only json precision
param_dtype grad_ckpt no_grad_ckpt run_without_fsdp no_reshard_after_forward cpu_devices
xla_fsdp flatten_parameters shard_on_cpu mesh_dcn mesh_fsdp mesh_tensor scan_blocks
no-scan_blocks attention mark_step_after_forward mark_step_every_n_blocks compile_only explain
hlo_dir expect tpu_topology tpu_compiler fsdp zero_dp_strategy dp_outer dp_shard
outer_dp_sharding_strategy meta_init no-meta_init reduce_dtype grad_reduce_in_fp32
no_preserve_fp32_weights overlap_grad_reduce no-overlap_grad_reduce overlap_param_gather
no-overlap_param_gather forward_prefetch backward_prefetch cpu_offload block fp8 compile
channels_last tf32 profile
""".split()
"""Flags that users' commands may have: none of them goes or is renamed."""


@pytest.fixture(autouse=True)
def plain_environment(monkeypatch):
    monkeypatch.delenv("STEP_TIMEOUT_S", raising=False)


def refusal(capsys, *words):
    """What the program says of a command line that it does not read."""
    with pytest.raises(SystemExit, match="2"):
        read_flags(words)
    return capsys.readouterr().err


def values(*words):
    asked = read_flags(words)
    return flat(asked.run, *asked.backend_configs)


def test_no_flag_is_renamed():
    known = {
        name for o in by_field(*CONFIGS.values()).values() for name in (*o.names, *o.bare_names)
    }
    assert {f"--{name}" for name in NAMES} <= known


def test_shorthands():
    assert values("--no_grad_ckpt") == values("--grad_ckpt", "none")
    assert values("--grad_reduce_in_fp32") == values("--reduce_dtype", "fp32")
    assert values("--fake_data") == values("--data_source", "fake")
    assert values("--no_reshard_after_forward")["reshard_after_forward"] is False


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
        (b"--seed 1\n\xff\xfe", "line 2: not UTF-8 text"),
        ("--seed 1\n--lr x", "line 2: argument --lr: 'x' is not a number"),
        ("\nlr 3", "line 2: unrecognized argument: lr"),
        ("\n--batch_sze 3", "line 2: unknown flag --batch_sze: did you mean --batch_size?"),
        ("--grad_ckpt full\n--no_grad_ckpt", "line 2: --grad_ckpt full contradicts --no_grad_ckpt"),
        ("# " + 2**20 * "x", "is larger than 1,048,576 bytes"),
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


@pytest.mark.parametrize(
    "end",
    [
        "\n",
        " \\\n",
        "\\ \t\n",
        " \\\r\n",
    ],
)
def test_a_pasted_command_in_a_file_of_flags(end, tmp_path):
    path = tmp_path / "pasted.args"
    path.write_bytes(f"--lr 0.5{end}  --scale 0.1 0.9{end}  --seed 3{end}".encode())
    found = values(f"@{path}")
    assert (found["lr"], found["scale"], found["seed"]) == (0.5, (0.1, 0.9), 3)


def test_values_in_a_file(tmp_path):
    (tmp_path / "list").write_text("a.jpg\n'b c.jpg'\n")
    assert values("--predict", f"@{tmp_path}/list")["predict"] == ["a.jpg", "b c.jpg"]


# -- what was given ---------------------------------------------------------------------


def given(*words):
    return read_flags(words).run.explicitly_set


def test_which_flags_were_given(tmp_path, monkeypatch):
    monkeypatch.setenv("CPU_NUM_DEVICES", "4")
    assert given() == set()
    (tmp_path / "a.args").write_text("--grad_ckpt full --no_reshard_after_forward")
    words = ["--warmup_steps=10000", "--dp_outer", "1", "--fake_data", f"@{tmp_path}/a.args"]
    fields = {"warmup_steps", "mesh_dcn", "data_source", "grad_ckpt", "reshard_after_forward"}
    assert given(*words) == fields


def test_every_flag_at_its_default():
    typed = {
        name: option.words(option.field.default)
        for name, option in by_field(*CONFIGS.values()).items()
        if option.field.default is not None and (option.has_negation or not option.is_switch)
    }
    words = [word for each in typed.values() for word in each]
    assert values(*words) == values()
    assert given(*words) == typed.keys()


# -- rules: what a flag requires, excludes and replaces -------------------------------

EVERY = by_field(*CONFIGS.values())


def rule_broken(only=None, given=(), **changed):
    """The first rule that these values break, the flags ``given`` being on the command line."""
    values = {"explicitly_set": frozenset(given)} | changed
    try:
        check_rules(*(from_values(each, values) for each in CONFIGS.values()), only=only)
    except UsageError as error:
        return str(error)
    return None


def another(name):
    """A value that is not the flag's default; rules compare it and print it, no more."""
    option = EVERY[name]
    if option.is_switch:
        return not option.field.default
    return next((each for each in option.choices if each != option.field.default), 7)


def with_requirements(name):
    """A flag's value, and the first of the alternatives of each of its requirements."""
    wanted = [each.split("|")[0].partition("=") for each in EVERY[name].flag.requires]
    return {name: another(name)} | {n: value or another(n) for n, _, value in wanted}


@pytest.mark.parametrize("name", [n for n, option in EVERY.items() if option.flag.requires])
def test_what_a_flag_requires(name):
    option, values = EVERY[name], with_requirements(name)
    for requirement in option.flag.requires:
        alternatives = [each.partition("=")[::2] for each in requirement.split("|")]
        unmet = {other: EVERY[other].field.default for other, _ in alternatives}
        unmet |= {o: "no such value" for o, wanted in alternatives if wanted == str(unmet[o])}
        told = rule_broken(only=[name], **values | unmet)
        assert told.startswith(f"{option.typed(values[name])} requires ")
        assert all(f"{EVERY[o].names[0]} {wanted}".strip() in told for o, wanted in alternatives)
    if option.flag.requires_at_default:
        assert " requires " in rule_broken(only=[name], given=[name])
    assert rule_broken(only=[name], **values) is None


@pytest.mark.parametrize(
    ("name", "other"),
    [(name, o) for name, option in EVERY.items() for o in option.flag.incompatible_with],
)
def test_what_a_flag_excludes(name, other):
    values = with_requirements(name) | {other: another(other)}
    typed, excluded = EVERY[name].typed(values[name]), EVERY[other].typed(values[other])
    told = rule_broken(only=[name], **values)
    assert told == f"{typed} is incompatible with {excluded}: drop one of the two"


@pytest.mark.parametrize(
    ("name", "other"), [(name, o) for name, option in EVERY.items() for o in option.flag.replaces]
)
def test_what_a_flag_replaces(name, other):
    told = rule_broken(only=[name], given=[name, other], **with_requirements(name))
    typed = EVERY[name].typed(another(name))
    assert told.startswith(f"{typed} replaces {EVERY[other].names[0]}")


def test_words_of_rules():
    assert rule_broken(mixup=0.8, objective="mae") == (
        "--mixup 0.8 requires --objective classify, not mae"
    )
    assert rule_broken(segment_probe_every=5) == (
        "--segment_probe_every 5 requires --segment_dir or --data_source mosaics"
    )
    assert rule_broken(shard_on_cpu=True, run_without_fsdp=True, xla_fsdp="nested") == (
        "--shard_on_cpu is incompatible with --run_without_fsdp: drop one of the two"
    )
    assert rule_broken(cutmix_minmax=(0.1, 0.2), cutmix=1.0, given=["cutmix"]) == (
        "--cutmix_minmax 0.1 0.2 replaces --cutmix 1.0: drop one of the two"
    )
    assert rule_broken(mixup=0.0, objective="mae") is None  # so a recipe's flag can be turned off


@pytest.mark.parametrize(
    ("typed", "words"),
    [
        ("--no_grad_ckpt --grad_ckpt full", "--no_grad_ckpt contradicts --grad_ckpt full: drop"),
        ("--grad_ckpt=offload --no_grad_ckpt", "--grad_ckpt offload contradicts --no_grad_ckpt"),
        ("--mesh_dcn 2 --dp_outer 4", "--mesh_dcn 2 contradicts --dp_outer 4"),
        ("--image_size 32 --img_size 32 64", "--image_size 32 contradicts --img_size 32 64"),
    ],
)
def test_two_flags_of_one_setting_contradict_each_other(typed, words, capsys):
    assert words in refusal(capsys, *typed.split())


def test_two_flags_of_one_setting_agree(tmp_path):
    assert values("--no_grad_ckpt", "--grad_ckpt", "none")["grad_ckpt"] == "none"
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
        ("--help xyzzy", "--help xyzzy: no flag matches; the groups are all, run,"),
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
        for word in ("", " ")[: 1 + (option.field.name == "data_dir")]:
            with pytest.raises(SystemExit, match="2"):
                read_flags([option.names[0], *[word] * several])
            (line,) = capsys.readouterr().err.splitlines()
            assert option.names[0] in line
    assert values("--weight_init", "")["weight_init"] == ""


@pytest.mark.parametrize(
    ("program", "words"),
    [
        ("tools.convert", ["", "out.pt"]),
        ("tools.goodput", [""]),
        ("tools.report", [""]),
        ("data.pack", ["", "out"]),
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
    assert "environment variable CPU_NUM_DEVICES: 'many' is not" in capsys.readouterr().err


# -- help -----------------------------------------------------------------------------


def shown(capsys, *words):
    with pytest.raises(SystemExit, match="0"):
        read_flags(["--help", *words])
    return capsys.readouterr().out


def test_help_in_three_sizes(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    short, one, everything = shown(capsys), shown(capsys, "xla"), shown(capsys, "all")
    assert len(short.splitlines()) <= 125
    assert "--batch_size" in short
    assert "--flatten_parameters" not in short
    assert "--flatten_parameters" in one
    assert "--batch_size" not in one
    known = by_field(*CONFIGS.values())
    for option in known.values():
        for name in (*option.names, *option.flag.shorthands):
            assert re.search(rf"(?m)^  (.*, )?{name}\b", everything), name


def test_help_finds_flags_by_a_word(capsys):

    def found(word):
        return set(re.findall(r"(?m)^  (--\w+)", shown(capsys, word)))

    of_ema = {"--use_ema", "--model_ema", "--model_ema_decay", "--model_ema_warmup"}
    of_ema |= {"--teacher", "--teacher_weights", "--teacher_momentum", "--teacher_momentum_end"}
    assert found("ema") == of_ema | {"--knn_every", "--rank_every", "--gram_update_steps"}
    assert found("EMA") == found("ema")
    assert found("wandb") == {"--wandb"}
    assert found("mxfp8") == {"--fp8"}  # one of its values
    assert {"--model", "--qk_norm"} <= found("model")  # a group, as before
    assert "--teacher" not in found("model")


def test_a_reader_that_ends_early_ends_the_program_quietly():
    """As before ``| head -1``, which leaves what is longer than the pipe holds unread."""
    command = [sys.executable, "-u", "run_vit_training.py", "--help", "all"]
    pipe = {"stdout": -1, "stderr": -1, "pipesize": 4096}
    with subprocess.Popen(command, cwd=ROOT, text=True, **pipe) as program:
        program.stdout.readline()
        program.stdout.close()
        assert program.stderr.read() == ""
    assert program.returncode == 128 + 13


def test_the_page_of_flags_is_that_of_the_fields():
    assert flags_page.PAGE.read_text() == flags_page.page(), (
        "write it: python -m tests.support.flags_page"
    )


def test_conditions_name_fields():
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
    for flags in (["--help", "all"], ["--lr", "x"]):
        command = [sys.executable, "-c", program, *flags]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        assert done.stdout.splitlines()[-1] == "[]", flags
