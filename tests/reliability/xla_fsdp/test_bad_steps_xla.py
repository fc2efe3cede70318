"""A step that is not finite changes nothing, on XLA: weights, moments, counter, graphs."""

import pytest

from tests.support.bad_steps import assert_bad_steps_change_nothing
from tests.support.cli import train_tiny
from tests.support.marks import long


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
    found = assert_bad_steps_change_nothing(train_tiny, tmp_path, monkeypatch, flags, devices)
    assert found.column("skipped_steps") == [0, 1, 1, 2, 3, 3]
    assert len(set(found.column("compilations"))) == 1
