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
        long("--gather_dtype fp8", "weights gathered in fp8"),
    ],
)
def test_losses_of_pytorch_xla(flag, told, tmp_path):
    """Both stacks round alike, but PyTorch/XLA adds residuals in fp32: losses differ by 2e-4 after
    five updates. How products are rounded is held against numpy by
    tests/unit/torch_fsdp/test_products.py."""
    flags = flag.split()
    on_xla = train_tiny(tmp_path / "xla", *BF16, *flags, devices=2)
    found = train_tiny_gpu(tmp_path / "simple", *TRACED, *flags, processes=2)
    plain = train_tiny_gpu(tmp_path / "plain", *TRACED, "--max_steps", "1", processes=2)
    for result in (on_xla, found):
        assert told in result.run_file["backend"]
    assert found.column("loss") == pytest.approx(on_xla.column("loss"), rel=5e-4)
    assert found.column("grad_norm") == pytest.approx(on_xla.column("grad_norm"), rel=5e-3)
    assert found.column("loss")[0] != plain.column("loss")[0]


FORMS = [
    ("--matmul int8", 3, TRACED),  # padded shards
    long("--matmul fp8", 2, [*TRACED, "--no_grad_ckpt"]),
    long("--matmul int8", 2, [*TRACED, "--zero_dp_strategy", "2", "--grad_ckpt", "selective"]),
    long("--matmul fp8", 2, [*TRACED, "--run_without_fsdp"]),
    long("--matmul int8", 4, [*TRACED, "--mesh_tensor", "2"]),  # parts of rows are rounded
    long("--matmul fp8", 2, [*TRACED, "--mesh_tensor", "2"]),
    long("--gather_dtype fp8", 4, [*TRACED, "--dp_outer", "2", "--reduce_dtype", "bf16"]),
    long("--gather_dtype fp8", 2, [*TRACED, "--zero_dp_strategy", "2"]),
]


@pytest.mark.parametrize(("flag", "processes", "form"), FORMS)
def test_forms(flag, processes, form, tmp_path):
    """Each row is rounded by itself, so its shards, the loop and recomputation change nothing."""
    flags = [*flag.split(), "--grad_accum_steps", "2", "--batch_size", "24"]
    plain = train_tiny_gpu(tmp_path / "plain", *SIMPLE, *flags)
    found = train_tiny_gpu(tmp_path / "form", *form, *flags, processes=processes)
    # Sums of gradients over processes and their bf16 differ.
    assert found.column("loss") == pytest.approx(plain.column("loss"), rel=2e-4)
    assert found.column("grad_norm") == pytest.approx(plain.column("grad_norm"), rel=5e-3)


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
