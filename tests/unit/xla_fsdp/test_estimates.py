"""What the arithmetic says of sizes that the chips do not divide."""

from dataclasses import replace

import pytest
import torch

from tests.support.resolved import on_xla
from torch_fsdp.devices import Cpu
from torch_fsdp.shards import Layout
from training.mesh import Mesh
from training.step_sizes import step_sizes
from xla_fsdp.estimates import SIMPLE_FSDP, SPMD, estimate
from xla_fsdp.tpu import CHIPS

pytestmark = pytest.mark.fast


def parameters_held(flags, mesh, fsdp=SPMD):
    """Those of a device, as the bytes say that moments in bf16 save: 2 for each of two moments."""
    run = on_xla(f"--fake_data --batch_size 512 --grad_ckpt full --cpu_devices 1 {flags}")
    (shape,) = step_sizes(run.model)
    held = []
    for dtype in ("fp32", "bf16"):
        optimizer = replace(run.config.optimizer, optimizer_dtype=dtype)
        config = replace(run.config, optimizer=optimizer)
        held.append(estimate(shape, CHIPS["v6e"], mesh, config, "whole", fsdp).held_bytes)
    return (held[0] - held[1]) / 4, shape


@pytest.mark.parametrize(
    ("mesh", "shards"),
    [
        (Mesh(fsdp=8), 8),
        (Mesh(dcn=2, fsdp=8), 8),
        (Mesh(fsdp=4, tensor=2), 8),
        (Mesh(fsdp=4, domain=2), 8),
        (Mesh(fsdp=256), 256),
    ],
    ids=str,
)
def test_state_of_sizes_that_divide(mesh, shards):
    for fsdp in (SPMD, SIMPLE_FSDP):
        held, shape = parameters_held("--model timm/vit_large_patch16_224", mesh, fsdp)
        assert held == pytest.approx(shape.parameters / shards)


WIDTH_1112 = "--model timm/vit_large_patch16_224 --embed_dim 1112 --num_heads 8 --mlp_ratio 3"


def test_state_of_sizes_that_do_not_divide():
    """1,112 is 8 x 139: matrices have 8 of 256 shards, and vectors are whole."""
    held, shape = parameters_held(WIDTH_1112, Mesh(fsdp=256))
    width = 1112
    matrices, vectors = (4 + 2 * 3) * width**2, (3 + 1 + 3 + 1 + 4) * width
    share = (matrices / 8 + vectors) / (matrices + vectors)
    assert held == pytest.approx(shape.parameters * share)


def test_state_of_shards_of_rows():
    """The last shards are padded."""
    held, shape = parameters_held(WIDTH_1112, Mesh(fsdp=256), SIMPLE_FSDP)
    layouts = [
        Layout(torch.Size(sides), 0, 256, "group", torch.float32, torch.float32, 256, Cpu())
        for sides in shape.block_shapes
    ]
    padded = sum(layout.chunk * layout.shape.numel() / layout.shape[0] for layout in layouts)
    assert padded > 1.05 * shape.block_parameters / 256
    assert held == pytest.approx(shape.parameters * padded / shape.block_parameters)
