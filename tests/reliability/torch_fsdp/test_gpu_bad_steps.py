"""A step that is not finite changes nothing, on the GPU backend: weights, moments, counter."""

import pytest
import torch

from tests.support.bad_steps import assert_bad_steps_change_nothing, assert_same_state, train
from tests.support.cli import train_tiny_gpu
from torch_fsdp.optimizers import LossScale


@pytest.mark.long
@pytest.mark.parametrize(
    ("flags", "processes"),
    [
        ("--dp_outer 2 --grad_accum_steps 2 --precision bf16 --optimizer_dtype bf16", 4),
        ("--fsdp megatron --grad_accum_steps 2", 2),
        ("--optimizer muon --layer_decay 0.5 --no_decay norms biases", 2),
        ("--zero_dp_strategy 2 --grad_accum_steps 2 --clip_grad_norm 0", 2),
        ("--run_without_fsdp --optimizer muon", 2),
        ("--dp_outer 2 --optimizer lion --layer_decay 0.5", 4),
        ("--fsdp megatron --optimizer muon --precision bf16", 2),
        ("--linear_probe", 2),
        ("--fsdp megatron --precision bf16 --reduce_dtype bf16 --no_preserve_fp32_weights", 2),
        ("--fsdp megatron --zero_dp_strategy 0", 2),
        ("--fsdp megatron --dp_outer 2 --outer_dp_sharding_strategy 1", 4),
    ],
)
def test_bad_steps_change_nothing(flags, processes, tmp_path, monkeypatch):
    assert_bad_steps_change_nothing(train_tiny_gpu, tmp_path, monkeypatch, flags, processes)


def test_fp16(tmp_path, monkeypatch):
    """Against fp32's: an overflow is no bad step; a loss that is not finite does not change the
    scale, else other gradients would be rounded to zero."""

    def fp16(name, **variables):
        folder = tmp_path / name
        return train(train_tiny_gpu, folder, monkeypatch, "--precision fp16", 1, **variables)

    bad = {"BAD_STEPS": "2:loss 3:loss"}
    found, state = fp16("spoiled", **bad)
    _, expected = fp16("left_out", BAD_STEPS_ARE="left_out", **bad)
    assert found.column("skipped_steps") == [0, 1, 2, 2, 2, 2]
    assert_same_state(state, expected, steps=4)
    assert state["training"]["loss_scale"] == 2.0**16
    assert state["training"]["loss_scale_good_steps"] == 4
    monkeypatch.delenv("BAD_STEPS_ARE")
    overflown, state = fp16("norm", BAD_STEPS="3:norm")
    assert overflown.column("skipped_steps") == [0] * 6
    assert state["training"]["loss_scale"] == 2.0**15
    assert {entry["step"].item() for entry in state["optimizer"]["state"].values()} == {5}


def test_loss_scale(monkeypatch):
    """Against PyTorch's GradScaler over overflows and growth; then where the two shall differ."""
    monkeypatch.setattr("torch_fsdp.optimizers._GROWTH_STEPS", 3)
    ours = LossScale(torch.device("cpu"))
    theirs = torch.amp.GradScaler("cpu", growth_interval=3)
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))])
    (parameter,) = optimizer.param_groups[0]["params"]
    one = torch.ones(())
    for overflowed in map(float, "0001001000000110"):
        parameter.grad = torch.full((1,), float("inf") if overflowed else 2.0)
        theirs.scale(one)
        theirs.unscale_(optimizer)
        gradient = torch.full((1,), 2.0)
        ours.unscale([gradient])
        assert overflowed or torch.equal(gradient, parameter.grad)
        theirs.step(optimizer)
        theirs.update()
        ours.update(one * overflowed, one)
        assert ours.value == theirs.get_scale()
    before = ours.state()
    ours.update(one, counts=0 * one)
    assert ours.state() == before
    for _ in range(40):
        assert not (ours.is_least() and ours.value != 1)
        ours.update(one, one)
    assert ours.is_least() == ours.value == 1
