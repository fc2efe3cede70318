"""After warm-up nothing compiles, each step is one execution, nothing is read between logs."""

import pytest

from tests.support.cli import run_program, train_tiny
from tests.support.marks import long
from tests.support.steady import STEADY, assert_steady_state


@pytest.mark.parametrize(
    ("flags", "devices", "graphs"),
    [
        ("", 2, 1),
        long(
            "--drop_path_rate 0.2 --mlp_dropout 0.1 --precision bf16 --optimizer_dtype bf16 "
            "--gather_dtype fp8",
            2,
            1,
        ),
        # The rate, 0.01 in step 9, comes to be a number that smoothed labels have.
        long("--xla_fsdp nested --optimizer_dtype bf16 --mixup 1 --smoothing 0.1", 1, 1),
        long("--optimizer muon --layer_decay 0.9 --no_decay norms biases embeddings", 2, 1),
        long("--linear_probe", 2, 1),
        long("--mark_step_after_forward", 2, 2),
        long("--grad_accum_steps 4", 2, 5),
        # 3 forward, 2 back and update
        long("--mark_step_every_n_blocks 1 --num_blocks 3", 2, 5),
    ],
)
def test_counters(flags, devices, graphs, tmp_path):
    result = train_tiny(tmp_path, *STEADY, *flags.split(), devices=devices)
    assert_steady_state(result, graphs)
    assert "new compilation" not in result.stdout


@pytest.mark.long
@pytest.mark.parametrize("flags", ["--model_ema", "--optimizer muon --layer_decay 0.5"])
def test_the_first_step_is_like_all_others(flags, tmp_path):
    """Parameters are updated group after group, not in the model's order; nothing compiles anew."""
    flags += " --xla_fsdp nested --no_decay norms --grad_accum_steps 2 --max_steps 3"
    assert len(set(train_tiny(tmp_path, *flags.split()).column("compilations"))) == 1


def test_evaluation_does_not_disturb_training(tmp_path):
    """Two evaluations between epochs: the training step stays compiled, so does the second."""
    flags = "--batch_size 256 --max_steps 15 --num_epochs 3 --test_epoch_interval 1".split()
    result = train_tiny(tmp_path, *flags, devices=2)
    assert len(result.evaluations) == 3
    compilations = result.column("compilations")
    assert len(set(compilations[:5])) == 1
    assert len(set(compilations[5:])) == 1  # epochs 2 and 3, one evaluation between them


@pytest.mark.long
def test_fake_data_moves_no_images(tmp_path):
    """Zeros are on the device once: losses fall to nothing, no wait for data."""
    flags = "--fake_data --image_size 8 --batch_size 500 --max_steps 6 --lr 0.1 --eval_batches 0"
    result = train_tiny(tmp_path, *flags.split(), devices=2)
    assert result.column("loss")[-1] < 0.1 * result.column("loss")[0]
    (evaluation,) = result.evaluations
    assert evaluation["val_images"] == 50_000
    assert evaluation["val_top1"] == 100.0


@pytest.mark.long
def test_no_start_imports_what_it_does_not_use():
    """torch_xla's export to StableHLO, and with it PyTorch's Inductor, Weights & Biases, Matplotlib
    would take a quarter of a start's imports."""
    names = ["torch_xla", "torch_xla._dynamo.dynamo_bridge", "torch._inductor.lowering"]
    names += ["timm", "wandb", "matplotlib", "jax"]
    code = (
        "import sys; from xla_fsdp import torch_xla_private; torch_xla_private.prepare_import(); "
    )
    code += "import training.prepare, xla_fsdp.xla_backend; "
    code += f"print(*[n for n in {names} if n in sys.modules])"
    done = run_program("-c", code, warm=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["torch_xla", "timm"]
