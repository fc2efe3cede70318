"""Images whose rows several devices share, on XLA's SPMD backend: as on whole images."""

import functools

import pytest

from tests.references.whole_images import SMALL, assert_like_whole, train_whole
from tests.support.cli import train_tiny, train_tiny_gpu
from tests.support.domain_models import EPOCHS_OF_2, HYBRID, MODELS, TOKENS, VOLUMES
from tests.support.marks import long, spread
from tests.support.steady import STEADY, assert_steady_state

RING = "--domain_attention ring"
SMALL_BATCH = "--batch_size 2 --num_heads 4"
ONE_IMAGE = f"--class_token --global_pool token {SMALL_BATCH}"
# (devices, what both do, how images are sharded): each combines several things.
CASES = [
    long(3, f"{HYBRID} --grad_accum_steps 2", f"--mesh_domain 3 {RING}"),
    # One image a replica, whose tokens are uneven.
    (4, ONE_IMAGE, f"--mesh_domain 2 {RING}"),
    long(4, ONE_IMAGE, f"--mesh_domain 2 --no-scan_blocks --no_grad_ckpt {RING}"),
    long(6, f"{TOKENS} map {SMALL_BATCH}", f"--mesh_domain 3 {RING}"),
    (4, ONE_IMAGE, "--mesh_tensor 2"),
    long(4, f"{TOKENS} map --qk_norm {SMALL_BATCH}", "--mesh_tensor 2 --no-scan_blocks"),
    long(4, VOLUMES, f"--mesh_domain 4 --no-scan_blocks {RING}"),
    long(
        8, f"{TOKENS} map", "--mesh_dcn 2 --mesh_fsdp 2 --mesh_domain 2 --domain_attention gather"
    ),
    long(4, MODELS["DINOv3"], f"--mesh_domain 2 --no_grad_ckpt {RING}"),
    long(2, MODELS["RoPE, mixed"], "--mesh_domain 2 --domain_attention gather"),
]
SHARDED = {
    "ring of 2": (2, f"--mesh_domain 2 {RING}"),
    "ring of 4": (4, f"--mesh_domain 4 {RING}"),
    "ring of 4, unrolled": (4, f"--mesh_domain 4 --no-scan_blocks {RING}"),
    "ring of 4, kept": (4, f"--mesh_domain 4 --no_grad_ckpt {RING}"),
    "uneven ring": (3, f"--mesh_domain 3 {RING}"),
    "uneven ring, unrolled": (3, f"--mesh_domain 3 --no-scan_blocks {RING}"),
    "gather of 4": (4, "--mesh_domain 4 --domain_attention gather"),
    "uneven gather": (3, "--mesh_domain 3 --domain_attention gather"),
    "fsdp x domain": (4, f"--mesh_domain 2 {RING}"),
    "dcn x fsdp x domain": (8, f"--mesh_dcn 2 --mesh_domain 2 {RING}"),
    "domain x tensor": (4, "--mesh_domain 2 --mesh_tensor 2 --domain_attention gather"),
    "no sharding": (2, "--mesh_domain 2 --run_without_fsdp"),
    "broken graph": (2, f"--mesh_domain 2 --mark_step_every_n_blocks 1 {RING}"),
}


@functools.cache
def whole(flags):
    return train_whole("--image_size", "16", *flags.split())


def train(folder, devices, flags, how, exchanges=0):
    """``exchanges``: of so many tensors at most XLA warns that it replicates them to reshard."""
    given = [*SMALL, "--image_size", "16", *flags.split(), *how.split()]
    result = train_tiny(folder, *given, devices=devices)
    assert result.stderr.count("Involuntary full rematerialization") <= exchanges
    return result


@pytest.mark.parametrize(("devices", "flags", "how"), CASES)
def test_as_on_whole_images(devices, flags, how, tmp_path):
    result = train(tmp_path, devices, flags, how)
    assert_like_whole(result, whole(flags))
    assert len(set(result.column("compilations"))) == 1


@pytest.mark.long
@pytest.mark.parametrize(("model", "sharded"), spread(MODELS, SHARDED, every=8))
def test_models_on_meshes(model, sharded, tmp_path):
    devices, how = SHARDED[sharded]
    flags = f"{MODELS[model]} --grad_accum_steps 2"
    # Its MLP's columns, recomputed for a weight's gradient, once a pass; libtpu exchanges none.
    exchanges = 2 if (model, sharded) == ("hybrid, 2-D", "fsdp x domain") else 0
    assert_like_whole(train(tmp_path, devices, flags, how, exchanges), whole(flags))


@pytest.mark.long
@pytest.mark.parametrize(("model", "form"), spread(MODELS, ["ring", "gather"], every=2))
def test_bf16_is_near_fp32(model, form, tmp_path):
    flags = MODELS[model]
    how = f"--mesh_domain 2 --domain_attention {form} --precision bf16"
    result = train(tmp_path, 2, flags, how)
    assert result.column("loss") != pytest.approx(whole(flags).losses, rel=1e-6)
    assert result.column("loss") == pytest.approx(whole(flags).losses, rel=0.02)
    assert result.column("grad_norm") == pytest.approx(whole(flags).norms, rel=0.1)


@pytest.mark.long
def test_resumed_on_other_meshes_and_on_the_other_backend(tmp_path):
    """By 4, 1 and 2 devices that share an image, then by 2 processes, in the middle of epochs."""
    flags = f"{TOKENS} avg --pool_include_prefix {EPOCHS_OF_2}"
    for domain, steps in ((4, 1), (1, 3), (2, 5)):
        train(tmp_path, domain, flags, f"--mesh_domain {domain} --max_steps {steps}")
    given = [*SMALL, "--image_size", "16", *flags.split(), "--mesh_domain", "2"]
    result = train_tiny_gpu(tmp_path, *given, processes=2)
    assert list(result.steps) == list(range(1, 7))
    assert "step_5 at step 5, epoch 3" in result.stdout
    assert_like_whole(result, whole(flags))


@pytest.mark.long
def test_steady_state(tmp_path):
    flags = f"{HYBRID} {' '.join(STEADY)}"
    result = train(tmp_path, 4, flags, f"--mesh_domain 4 {RING}")
    assert_steady_state(result, graphs=1)
