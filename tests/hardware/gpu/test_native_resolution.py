"""Native resolution on one GPU: attention by PyTorch's kernels of variable length, against products
with a mask in fp32."""

import pytest

from tests.hardware.gpu.helpers import need_form
from tests.support.cli import train_tiny_gpu
from tests.support.native_images import VAL, flags, write_images
from torch_fsdp import varlen

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_images(tmp_path_factory.mktemp("native"))


@pytest.fixture(scope="module")
def fp32(folder, tmp_path_factory):
    result = train_tiny_gpu(tmp_path_factory.mktemp("fp32"), *flags(folder, "--fsdp", "fsdp2"))
    assert "variable-length attention" not in result.stdout
    return result


@pytest.mark.parametrize("form", ["fsdp2", "megatron"])
@pytest.mark.parametrize("how", ["", "--compile", "--grad_ckpt selective"])
def test_in_bf16_by_variable_length(form, how, fp32, folder, tmp_path):
    need_form(form)
    if not varlen.is_available():
        pytest.skip("this PyTorch has no attention of variable length")
    more = ["--fsdp", form, "--precision", "bf16", *how.split()]
    result = train_tiny_gpu(tmp_path, *flags(folder, *more))
    assert "variable-length attention" in result.stdout
    assert result.column("loss") == pytest.approx(fp32.column("loss"), rel=3e-2)
    assert result.column("images") == fp32.column("images")
    (evaluation,) = result.evaluations
    assert evaluation["val_images"] == VAL
