"""Compare what two runs logged."""

import pytest

from tests.support.cli import VAL_IMAGES


def assert_same_curves(result, reference, rel):
    for name in ("loss", "grad_norm"):
        assert result.column(name) == pytest.approx(reference.column(name), rel=rel)


def assert_same_evaluations(result, reference, rel):
    for mine, other in zip(result.evaluations, reference.evaluations, strict=True):
        for name in {"val_loss", "ema_val_loss"} & other.keys():
            assert mine[name] == pytest.approx(other[name], rel=rel)


def assert_same_training(result, reference, rel=1e-5):
    assert len(reference.steps) == 6
    assert_same_curves(result, reference, rel)
    (got,), (expected,) = result.evaluations, reference.evaluations
    assert got["val_loss"] == pytest.approx(expected["val_loss"], rel=rel)
    assert got["val_images"] == expected["val_images"] == VAL_IMAGES
