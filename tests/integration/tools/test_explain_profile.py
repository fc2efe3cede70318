"""--profile on XLA and tools.explain_profile: of a real run, and of a TPU's trace made by hand."""

import json

import pytest

from tests.support.cli import train_tiny
from tests.support.curves import assert_same_curves
from tests.support.marks import long
from tools.compile_only.hlo import parse_module
from tools.explain_profile import main, measure
from tools.xspace import Space, _messages
from xla_fsdp import jax_private
from xla_fsdp.scopes import scope_in

PRODUCTS = {"blocks.attn.qkv", "blocks.attn.proj", "blocks.mlp.fc1", "blocks.mlp.fc2"}


def traces(run):
    return sorted((run.ckpt_dir / "profile").glob("plugins/profile/step_2/*_0.xplane.pb"))


def explained(capsys, *words):
    """Exit code, stdout and stderr of tools.explain_profile in this process.

    tests/integration/test_documented_commands.py types its command.
    """
    code = main(list(map(str, words)))
    return code, *capsys.readouterr()


@pytest.fixture(scope="module")
def profiled(tmp_path_factory):
    flags = "--profile 2:3 --max_steps 4 --test_step_interval 2 --eval_batches 1".split()
    return train_tiny(tmp_path_factory.mktemp("profiled"), *flags, devices=2)


def test_steps_hooks_and_products_are_in_the_trace(profiled):
    assert f"profile of steps 2 to 3: {profiled.ckpt_dir}/profile" in profiled.stdout
    assert "new compilation" not in profiled.stdout
    space = Space(*traces(profiled))
    events = [event for line in space.lines() for event in line.events]
    assert [e.stats["step_num"] for e in events if e.name == "train"] == [2, 3]
    hooks = {event.name for event in events if event.name.startswith("hook ")}
    expected = ("StepLog", "EpochLog", "StopCheck", "Saves", "Evaluations")
    assert hooks == {f"hook {name}" for name in expected}
    # The products that ran in these steps are those of the model's layers.
    ran = {event.stats["hlo_op"].decode() for event in events if "hlo_op" in event.stats}
    computations, _ = parse_module(jax_private.text_of(max(space.programs(), key=len)))
    modules = {
        scope_in(instruction.text).module
        for computation in computations.values()
        for instruction in computation
        if instruction.name in ran and instruction.opcode == "dot"
    }
    assert modules >= PRODUCTS
    assert not list((profiled.ckpt_dir / "profile").glob(".*"))  # nothing temporary is left


@pytest.mark.parametrize(
    "flags",
    [
        long("--xla_fsdp nested --mark_step_every_n_blocks 1"),
        long("--mark_step_after_forward --grad_accum_steps 2 --model_ema"),
    ],
)
def test_the_profile_changes_no_loss(flags, tmp_path):
    plain = train_tiny(tmp_path / "plain", *flags.split())
    profiled = train_tiny(tmp_path / "profiled", *flags.split(), "--profile", "2:3")
    assert_same_curves(profiled, plain, rel=0)
    assert measure(traces(profiled)).by_module.keys() >= PRODUCTS


def test_measured_beside_expected(profiled, tmp_path, capsys):
    expected = {
        "expected_step_s": 0.25,
        "topology": "v5e:2x2",
        "batch_size": 16,
        "explained": {
            "seconds_by_module": {"blocks.mlp.fc1": 0.2, "elsewhere": 0.05},
            "seconds_by_kind": {"product": 0.25},
        },
    }
    file = tmp_path / "expected.json"
    file.write_text(json.dumps(expected))
    code, stdout, stderr = explained(capsys, profiled.ckpt_dir, "--expect", file)
    assert code == 0, stderr
    lines = stdout.splitlines()
    assert lines[0].endswith("ms a step on each device; 2 step(s), 2 device(s)")
    assert lines[1] == "expected: 250 ms a step, v5e:2x2"
    assert lines[2].startswith("note: measured on a CPU")
    rows = {line.split()[0]: line.split() for line in lines if line.strip()}
    found = measure(traces(profiled))
    measured_ms = 1e3 * found.by_module["blocks.mlp.fc1"] / 4  # two steps on two devices
    _, measured, share, _, there, there_share, _, ratio = rows["blocks.mlp.fc1"]
    assert (measured, there, there_share) == (f"{measured_ms:.3f}", "200.000", "80.0")
    assert float(ratio) == pytest.approx(measured_ms / 200, abs=0.01)
    assert float(share) == pytest.approx(
        100 * found.by_module["blocks.mlp.fc1"] / sum(found.by_module.values()), abs=0.06
    )
    assert rows["elsewhere"][1:3] == ["0.000", "0.0"]
    assert "StepLog" in rows
    file.write_text(json.dumps(expected | {"batch_size": 32}))
    code, _, stderr = explained(capsys, profiled.ckpt_dir, "--expect", file)
    assert code == 2
    assert "is for another run: batch_size is 32 there, 16 here\n" in stderr


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["{run}/tensorboard"], "tensorboard/profile has no trace of XLA's profiler"),
        (["{run}", "--expect", "{run}/run.json"], "is not the output of --compile_only --explain"),
        (["{run}", "--expect", "{run}/none.json"], "none.json cannot be read: No such file"),
    ],
)
def test_a_mistake_is_one_line(profiled, words, message, capsys):
    code, stdout, stderr = explained(capsys, *(w.format(run=profiled.ckpt_dir) for w in words))
    assert (code, stdout) == (2, "")
    (line,) = stderr.splitlines()
    assert message in line


def test_a_file_that_is_no_trace(tmp_path):
    path = tmp_path / "a.xplane.pb"
    path.write_bytes(b"\xff" * 100)
    with pytest.raises(ValueError, match="is not a trace of XLA's profiler"):
        Space(path)


FC1 = "[blocks_forward].1/[blocks.mlp.fc1_forward].2/aten__mm"
HOW = "lhs_contracting_dims={1}, rhs_contracting_dims={0}"
HLO = f"""HloModule step, is_scheduled=true

%body (p: f32[8,8]) -> f32[8,8] {{
  %p = f32[8,8] parameter(0)
  ROOT %dot.1 = f32[8,8] dot(%p, %p), {HOW}, metadata={{op_name="{FC1}"}}
}}

ENTRY %main (a: f32[8,8]) -> f32[8,8] {{
  %a = f32[8,8] parameter(0)
  %call.1 = f32[8,8] call(%a), to_apply=%body
  %ag = (f32[8,8], f32[8,8]) all-gather-start(%call.1), dimensions={{0}}, replica_groups={{{{0}}}}
  %ag.done = f32[8,8] all-gather-done(%ag)
  ROOT %add.1 = f32[8,8] add(%ag.done, %a), metadata={{op_name="[optimizer_update].1/aten__add"}}
}}
"""


def tpu_trace(path, devices):
    """A trace as a TPU's, with its plane for each device: made by the format's description, as
    there is no TPU here."""
    from jax._src.lib import xla_client

    messages = _messages()
    module = xla_client._xla.hlo_module_from_text(HLO).as_serialized_hlo_module_proto()
    space = messages["Space"]()
    programs = space.planes.add(name=b"/host:metadata")
    programs.stat_metadata.add(key=1).value.name = b"Hlo Proto"
    entry = programs.event_metadata.add(key=7)
    proto = messages["HloProto"](hlo_module=module).SerializeToString()
    entry.value.name = b"step(7)"
    entry.value.stats.add(metadata_id=1, bytes=proto)

    host = space.planes.add(name=b"/host:CPU")
    host.stat_metadata.add(key=1).value.name = b"step_num"
    host.event_metadata.add(key=1).value.name = b"train"
    thread = host.lines.add(name=b"python")
    for step in (5, 6):
        thread.events.add(metadata_id=1).stats.add(metadata_id=1, int64=step)

    seconds_of = {"%call.1 = f32[8,8] call(": 3.0, "%dot.1 = f32[8,8] dot(": 3.0}
    seconds_of |= {"%ag.done = f32[8,8] all-gather-done(": 0.5, "add.1": 0.25}
    for device in range(devices):
        plane = space.planes.add(name=f"/device:TPU:{device}".encode())
        other, line = plane.lines.add(name=b"XLA Modules"), plane.lines.add(name=b"XLA Ops")
        for number, (name, duration) in enumerate(seconds_of.items(), 1):
            plane.event_metadata.add(key=number).value.name = name.encode()
            for _ in range(2):
                line.events.add(metadata_id=number, duration_ps=int(duration * 1e12))
        other.events.add(metadata_id=1, duration_ps=10**13)
    path.write_bytes(space.SerializeToString())


def test_a_trace_of_a_tpu(tmp_path):
    """Each device's instructions, without those that stand for others, and no other line."""
    tpu_trace(tmp_path / "a_0.xplane.pb", 4)
    tpu_trace(tmp_path / "b_1.xplane.pb", 4)
    found = measure([tmp_path / "a_0.xplane.pb", tmp_path / "b_1.xplane.pb"])
    assert (found.steps, found.devices, found.is_tpu) == (2, 8, True)
    per_step = {name: seconds / 16 for name, seconds in found.by_kind.items()}
    assert per_step == {"product": 3.0, "collective waited for": 0.5, "optimizer": 0.25}
    assert found.by_module["blocks.mlp.fc1"] / 16 == 3.0
