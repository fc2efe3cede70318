"""--matmul and --gather_dtype with --fsdp simple: losses beside PyTorch/XLA's, forms, a resume."""

import shutil

import pytest

from tests.support.cli import train_tiny, train_tiny_gpu
from tests.support.marks import long
from tests.support.resuming import DROPOUT

BF16 = ["--precision", "bf16"]
SIMPLE = ["--fsdp", "simple", *BF16]
TRACED = [*SIMPLE, "--compile"]


@pytest.mark.parametrize(
    ("flag", "told"),
    [
        ("--matmul int8", "linear layers in int8"),
        ("--gather_dtype fp8", "weights gathered in fp8"),
    ],
)
def test_losses_of_pytorch_xla(flag, told, tmp_path):
    """Both stacks round alike, but PyTorch/XLA adds residuals in fp32: losses differ by bf16's
    rounding, as without the flag, and less than the flag changes them."""
    flags = flag.split()
    on_xla = train_tiny(tmp_path / "xla", *BF16, *flags, devices=2)
    found = train_tiny_gpu(tmp_path / "simple", *TRACED, *flags, processes=2)
    plain = train_tiny_gpu(tmp_path / "plain", *TRACED, processes=2)
    print(found.column("loss"), on_xla.column("loss"), plain.column("loss"))
    print(found.column("grad_norm"), on_xla.column("grad_norm"), plain.column("grad_norm"))
    for result in (on_xla, found):
        assert told in result.run_file["backend"]
    assert found.column("loss") == pytest.approx(on_xla.column("loss"), rel=5e-3)
    assert found.column("loss") != plain.column("loss")


@pytest.mark.parametrize("flag", ["--matmul int8", long("--matmul fp8"), "--gather_dtype fp8"])
def test_forms(flag, tmp_path):
    """One loop or unrolled, one or several processes, recomputed or not: rows are rounded alike."""
    flags = [*flag.split(), "--grad_accum_steps", "2"]
    found = {}
    for name, processes, form in [
        ("one process", 1, SIMPLE),
        ("a loop", 2, TRACED),
        ("padded", 3, [*TRACED, "--batch_size", "48"]),
        ("not recomputed", 2, [*TRACED, "--no_grad_ckpt"]),
        ("kept", 2, [*TRACED, "--zero_dp_strategy", "2", "--grad_ckpt", "selective"]),
    ]:
        result = train_tiny_gpu(tmp_path / name, *form, *flags, processes=processes)
        found[name] = result.column("loss")
        print(name, found[name], result.column("grad_norm"))
    for name, losses in found.items():
        if name != "padded":
            assert losses == pytest.approx(found["one process"], rel=2e-3), name


@pytest.mark.long
@pytest.mark.parametrize("flag", ["--matmul int8", "--matmul fp8", "--gather_dtype fp8"])
def test_resume_is_exact(flag, tmp_path):
    flags = [*TRACED, *flag.split(), *DROPOUT, "--grad_accum_steps", "2", "--max_steps", "6"]
    whole = train_tiny_gpu(tmp_path / "whole", *flags, "--ckpt_step_interval", "3", processes=2)
    run = tmp_path / "run"
    shutil.copytree(whole.ckpt_dir / "step_3", run / "step_3")
    resumed = train_tiny_gpu(run, *flags, processes=2)
    for name in ("loss", "grad_norm"):
        assert resumed.column(name) == whole.column(name)[3:]
    assert resumed.evaluations == whole.evaluations
