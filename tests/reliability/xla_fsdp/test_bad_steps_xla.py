"""A step that is not finite changes nothing, on XLA: weights, moments, counter, graphs."""

import pytest

from tests.references.plain_checkpoint import convert
from tests.support.bad_steps import BAD, COUNTS, assert_equal
from tests.support.cli import train_tiny
from tests.support.marks import long


def train(folder, monkeypatch, flags, devices, **variables):
    for name, value in {"BAD_STEPS": BAD, **variables}.items():
        monkeypatch.setenv(name, value)
    result = train_tiny(folder, *flags.split(), devices=devices, program="tests.fakes.bad_step")
    return result, convert(folder / "step_6", folder / "plain.pt")


@pytest.mark.parametrize(
    ("flags", "devices"),
    [
        ("", 2),
        long("--xla_fsdp nested --precision bf16 --optimizer_dtype bf16", 1),
        long("--optimizer muon --layer_decay 0.5 --no_decay norms biases", 2),
        *(
            long(flags, devices)
            for flags, devices in [
                ("--mesh_tensor 2 --grad_accum_steps 2 --precision bf16 --optimizer_dtype bf16", 4),
                ("--mesh_tensor 2 --grad_accum_steps 2 --optimizer lion --layer_decay 0.5", 4),
                ("--linear_probe --no-scan_blocks", 2),
                ("--mesh_dcn 2 --clip_grad_norm 0", 4),
                ("--mark_step_every_n_blocks 1 --num_blocks 3 --grad_accum_steps 2", 2),
                ("--flatten_parameters --clip_grad_norm 0 --optimizer_dtype bf16", 1),
            ]
        ),
    ],
)
def test_bad_steps_change_nothing(flags, devices, tmp_path, monkeypatch):
    """Against a run whose optimizer was never called in these steps."""
    found, state = train(tmp_path / "spoiled", monkeypatch, flags, devices)
    _, expected = train(
        tmp_path / "left_out", monkeypatch, flags, devices, BAD_STEPS_ARE="left_out"
    )
    lines = [line for line in found.stdout.splitlines() if line.startswith("step ")]
    assert lines == [f"step {n} skipped {counts}" for n, counts in enumerate(COUNTS, 1)]
    assert found.column("skipped_steps") == [0, 1, 1, 2, 3, 3]
    assert len(set(found.column("compilations"))) == 1
    assert_equal(state["model"], expected["model"])
    assert state["optimizer"]["state"].keys() == expected["optimizer"]["state"].keys()
    for name, entries in state["optimizer"]["state"].items():
        assert entries.get("step", 3) == 3  # Lion has no counter, nor has Muon
        assert_equal(entries, expected["optimizer"]["state"][name])
