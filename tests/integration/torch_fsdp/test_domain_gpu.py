"""Images whose rows several processes share, on the GPU backend with gloo, with FSDP2 and in a
traced step: as on whole images."""

import functools
import shutil

import pytest

from tests.references.whole_images import SMALL, assert_like_whole, train_whole
from tests.support.cli import train_tiny_gpu
from tests.support.curves import assert_same_curves
from tests.support.domain_models import DINO, EPOCHS_OF_2, HYBRID, MODELS, TOKENS, VOLUMES
from tests.support.marks import long, spread

TRACED = "--fsdp simple --compile"
# (processes, what both do, how images are sharded): each combines several things.
CASES = [
    (3, f"{HYBRID} --grad_accum_steps 2", "--mesh_domain 3 --grad_ckpt selective"),
    long(4, VOLUMES, "--mesh_domain 4 --grad_ckpt none"),
    long(8, f"{TOKENS} map", "--mesh_dcn 2 --mesh_fsdp 2 --mesh_domain 2 --domain_attention ring"),
    long(4, DINO, "--mesh_domain 2"),
    long(2, f"{TOKENS} avgmax --pool_include_prefix", "--mesh_domain 2 --run_without_fsdp"),
    (2, f"{TOKENS} avgmax --pool_include_prefix", f"--mesh_domain 2 {TRACED}"),
    long(4, HYBRID, f"--mesh_domain 4 --domain_attention ring --no_grad_ckpt {TRACED}"),
    long(4, f"{TOKENS} map --num_heads 4 --grad_accum_steps 2", f"--mesh_domain 2 {TRACED}"),
    long(8, DINO, f"--mesh_dcn 2 --mesh_domain 2 --domain_attention ring {TRACED}"),
    long(4, f"{TOKENS} token", f"--mesh_domain 2 --run_without_fsdp {TRACED}"),
]

SHARDED = {
    "ring of 2": (2, "--mesh_domain 2 --domain_attention ring"),
    "ring of 4": (4, "--mesh_domain 4 --domain_attention ring --grad_ckpt none"),
    "uneven ring": (3, "--mesh_domain 3 --domain_attention ring --grad_ckpt selective"),
    "ulysses of 2": (2, "--mesh_domain 2 --domain_attention ulysses --zero_dp_strategy 2"),
    "ulysses of 4": (4, "--mesh_domain 4 --domain_attention ulysses"),
    "fsdp x domain": (4, "--mesh_domain 2 --domain_attention ring"),
    "dcn x fsdp x domain": (8, "--mesh_dcn 2 --mesh_domain 2"),
    "dcn x domain": (4, "--mesh_dcn 2 --mesh_domain 2"),
    "no sharding": (4, "--mesh_domain 2 --run_without_fsdp"),
    "channels last": (2, "--mesh_domain 2 --channels_last"),
    "traced ulysses": (4, f"--mesh_domain 2 {TRACED} --grad_ckpt selective"),
    "traced ring": (2, f"--mesh_domain 2 --domain_attention ring {TRACED}"),
    "simple": (2, "--mesh_domain 2 --fsdp simple --domain_attention ring"),
    "one": (1, ""),
}


@functools.cache
def whole(flags):
    return train_whole("--image_size", "16", *flags.split())


def train(folder, processes, flags, how):
    given = [*SMALL, "--image_size", "16", *flags.split(), *how.split()]
    return train_tiny_gpu(folder, *given, processes=processes)


@pytest.mark.parametrize(("processes", "flags", "how"), CASES)
def test_as_on_whole_images(processes, flags, how, tmp_path):
    result = train(tmp_path, processes, flags, how)
    assert_like_whole(result, whole(flags))
    assert "UserWarning" not in result.stderr


@pytest.mark.long
@pytest.mark.parametrize(("model", "sharded"), spread(MODELS, SHARDED, every=8))
def test_models_on_meshes(model, sharded, tmp_path):
    processes, how = SHARDED[sharded]
    flags = f"{MODELS[model]} --grad_accum_steps 2"
    assert_like_whole(train(tmp_path, processes, flags, how), whole(flags))


@pytest.mark.parametrize(
    "how",
    [
        long("--domain_attention ring"),
        long("--domain_attention ulysses"),
        long("--domain_attention ring --grad_ckpt none"),
    ],
)
def test_compiled_beside_attention(how, tmp_path):
    """All is compiled in the first step: before and after attention, recomputed or not."""
    result = train(tmp_path, 2, HYBRID, f"--mesh_domain 2 --compile {how}")
    assert_like_whole(result, whole(HYBRID))
    counts = set(result.column("compilations"))
    assert len(counts) == 1
    assert min(counts) > 0


@pytest.mark.long
@pytest.mark.parametrize(("model", "form"), spread(MODELS, ["ring", "ulysses"], every=2))
def test_bf16_is_near_fp32(model, form, tmp_path):
    flags = MODELS[model]
    how = f"--mesh_domain 2 --domain_attention {form} --precision bf16 --reduce_dtype bf16"
    result = train(tmp_path, 2, flags, how)
    expected = pytest.approx(whole(flags).losses, rel=1e-6)
    assert result.column("loss") != expected
    assert result.column("loss") == pytest.approx(whole(flags).losses, rel=0.02)
    assert result.column("grad_norm") == pytest.approx(whole(flags).norms, rel=0.1)


@pytest.mark.long
@pytest.mark.parametrize("forms", [("", "", ""), (TRACED, "", TRACED), ("", TRACED, "")])
def test_resumed_on_other_meshes(forms, tmp_path):
    """By 4, 1 and 2 that share an image, each going on in the middle of an epoch of two steps."""
    flags = f"{TOKENS} avg --pool_include_prefix {EPOCHS_OF_2}"
    for form, (processes, domain, steps) in zip(
        forms, ((4, 4, 1), (1, 1, 3), (2, 2, 6)), strict=True
    ):
        how = f"--mesh_domain {domain} --max_steps {steps} {form}"
        result = train(tmp_path, processes, flags, how)
    assert list(result.steps) == list(range(1, 7))
    assert "step_3 at step 3, epoch 2" in result.stdout
    assert_like_whole(result, whole(flags))


@pytest.mark.long
def test_mixed_images(tmp_path):
    """The box of CutMix is in the rows of some processes, and where it is enters as a tensor."""
    flags = f"{TOKENS} avg --mixup 0.8 --cutmix 1"
    alone = train(tmp_path / "alone", 1, flags, "")
    shared = train(tmp_path / "shared", 4, flags, f"--mesh_domain 4 {TRACED}")
    assert_same_curves(shared, alone, rel=1e-5)


@pytest.mark.parametrize("form", ["ulysses", long("ring")])
def test_traced_resumes_exactly(form, tmp_path):
    flags = (
        f"{TOKENS} avgmax --drop_path_rate 0.2 --drop_rate 0.1 --grad_accum_steps 2 --max_steps 6"
    )
    how = f"--mesh_domain 2 --domain_attention {form} {TRACED}"
    whole = train(tmp_path / "whole", 4, flags, f"{how} --ckpt_step_interval 3")
    assert f"{form} attention over domain, one graph per step" in whole.run_file["backend"]
    run = tmp_path / "run"
    shutil.copytree(whole.ckpt_dir / "step_3", run / "step_3")
    resumed = train(run, 4, flags, how)
    for name in ("loss", "grad_norm", "lr"):
        assert resumed.column(name) == whole.column(name)[3:]
    assert resumed.evaluations == whole.evaluations
