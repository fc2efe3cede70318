"""A step that is not finite changes nothing, on a GPU, also where AdamW is on the host."""

import pytest

from tests.hardware.gpu.helpers import need_form
from tests.support.bad_steps import assert_same_state, train
from tests.support.cli import train_tiny_gpu

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize(
    "flags",
    [
        "--fsdp fsdp2",
        "--fsdp fsdp2 --cpu_offload",
        "--fsdp fsdp2 --precision fp16",
        "--fsdp fsdp2 --precision fp16 --cpu_offload",
        "--fsdp megatron --precision bf16",
    ],
)
def test_bad_steps_change_nothing(flags, tmp_path, monkeypatch):
    """Against a run whose optimizer was never called in these steps.

    A flag that comes too late would be that of the step before.
    """
    need_form(flags.split()[1])
    bad = {"BAD_STEPS": "2:loss 3:loss 5:loss"}
    left_out = {"BAD_STEPS_ARE": "left_out", **bad}
    found, state = train(train_tiny_gpu, tmp_path / "spoiled", monkeypatch, flags, 1, **bad)
    _, expected = train(train_tiny_gpu, tmp_path / "left_out", monkeypatch, flags, 1, **left_out)
    assert found.column("skipped_steps") == [0, 1, 2, 2, 3, 3]
    assert_same_state(state, expected, steps=3)
