"""``--objective dino``: against one in plain PyTorch, on several forms; its teacher."""

import pytest
import timm
import torch
from safetensors.torch import save_file

from features.dino.config import DinoConfig
from features.dino.feature import Dino
from features.dino.model import slots_of
from features.dino.objective import koleo_loss, sinkhorn, taken
from tests.fakes.filled import filled
from tests.references import plain_dino
from tests.references.plain_checkpoint import convert
from tests.support.cli import (
    TINY_SIZES,
    need_xla,
    tiny,
    train_tiny,
    train_tiny_gpu,
    train_tiny_megatron,
)
from tests.support.dino import (
    DINO,
    SMALL,
    WITHOUT_CLASS_TOKEN,
    assert_same,
    of_backbone,
    weights_of,
)
from tests.support.marks import long
from tests.support.resolved import on_gpus, on_xla
from tests.support.resuming import EPOCHS_OF_5, assert_resumes_at_step_7
from tests.support.steady import READ_PER_LOG, STEADY, assert_steady_state
from tests.support.usage_error import told_in_one_line
from tools.convert import main as to_other_form
from training.schedule import Ramp


@pytest.fixture(scope="module")
def expected():
    return plain_dino.train(SMALL)


@pytest.fixture(scope="module")
def on_gpu(tmp_path_factory):
    """A finished run in two processes."""
    flags = "--ckpt_step_interval 3 --knn_every 6".split()
    return train_tiny_gpu(tmp_path_factory.mktemp("dino"), *DINO, *flags, processes=2)


def assert_same_weights(result, expected):
    _, *models = expected
    for kind, model in zip(("model", "ema"), models, strict=True):
        found = weights_of(result.ckpt_dir, kind)
        assert found.keys() == model.state_dict().keys()
        for name, values in model.state_dict().items():
            torch.testing.assert_close(found[name], values, rtol=1e-4, atol=2e-5, msg=name)


# -- losses, gradients and the teacher ---------------------------------------------------


def test_two_processes(on_gpu, expected):
    assert_same(on_gpu, expected)


@pytest.mark.parametrize(
    ("devices", "flags"),
    [
        (4, ""),
        long(1, ""),
        long(4, "--mesh_dcn 2 --mesh_fsdp 2 --grad_ckpt none"),
        long(2, "--no-scan_blocks"),
        long(1, "--xla_fsdp nested"),
    ],
)
def test_on_xla(devices, flags, expected, tmp_path):
    assert_same(train_tiny(tmp_path, *DINO, *flags.split(), devices=devices), expected)


@pytest.mark.parametrize(
    ("flags", "group"),
    [
        ("--batch_size 16", 8),
        ("--batch_size 48", 12),
        ("--batch_size 34", 17),  # a prime number: all of them
        ("--batch_size 96 --grad_accum_steps 4", 12),
        ("--batch_size 96 --micro_batch_size 9", 8),
        ("--batch_size 32 --koleo_group 2", 2),
    ],
)
def test_koleo_groups_of_two_devices(flags, group, monkeypatch):
    words = f"--fake_data --model vit_tiny_patch16_224 --objective dino {flags}"
    run = on_xla(f"{words} --cpu_devices 2")
    assert run.config.of(DinoConfig).koleo_group == group
    assert on_xla(f"{words} --cpu_devices 1").on(2).config.of(DinoConfig).koleo_group == group
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert on_gpus(f"{words} --backend cuda").config.of(DinoConfig).koleo_group == group


def test_student_and_teacher_are_the_plain_ones(on_gpu, expected):
    assert_same_weights(on_gpu, expected)


@pytest.mark.long
@pytest.mark.parametrize("train", [train_tiny, train_tiny_gpu])
def test_other_weights_temperatures_and_momenta(train, tmp_path):
    """Each of them differs from its default, and so from what the other tests have."""
    flags = [*SMALL, *"--ibot_weight 0.4 --koleo_weight 0.3 --student_temp 0.15".split()]
    flags += "--warmup_teacher_temp 0.06 --teacher_temp 0.12 --teacher_momentum_end 0.95".split()
    flags += "--local_crops_scale 0.4 0.6 --global_crops_scale 0.5 0.9".split()
    assert_same(train(tmp_path, "--objective", "dino", *flags), plain_dino.train(flags))


# -- with Megatron-FSDP, on the CPU ------------------------------------------------------------


@pytest.mark.parametrize(
    ("processes", "flags", "told"),
    [
        long(2, "", "Megatron-FSDP ZeRO-3, one unit per block, fp32 weights, mesh fsdp 2"),
        long(1, "--zero_dp_strategy 2 --grad_ckpt none", "ZeRO-2"),
        long(2, "--zero_dp_strategy 2 --grad_ckpt selective", "ZeRO-2"),
        long(2, "--zero_dp_strategy 0 --no-overlap_grad_reduce", "no sharding"),
        long(4, "--mesh_dcn 2", "mesh dcn 2 x fsdp 2"),
        long(4, "--mesh_dcn 2 --outer_dp_sharding_strategy 1", "optimizer state also sharded"),
    ],
)
def test_megatron(processes, flags, told, expected, tmp_path):
    result = train_tiny_megatron(tmp_path, *DINO, *flags.split(), processes=processes)
    assert told in result.run_file["backend"]
    assert_same(result, expected)
    assert_same_weights(result, expected)
    sizes = result.run_file["state_bytes_per_device"]
    assert sizes["teacher"] == sizes["parameters"]


ACCUMULATED = "--grad_accum_steps 2 --koleo_group 2"
FOLLOWS = "--teacher_momentum 0.1 --teacher_momentum_end 0.1 --lr 1e-2 --precision bf16"
"""A teacher that stood still would have other losses."""


@pytest.mark.long
@pytest.mark.parametrize(
    ("processes", "flags", "own"),
    [
        (2, ACCUMULATED, ""),
        (2, ACCUMULATED, "--zero_dp_strategy 0"),
        (4, ACCUMULATED, "--mesh_dcn 2"),
        (2, FOLLOWS, ""),
        (2, FOLLOWS, "--zero_dp_strategy 1"),
    ],
)
def test_megatron_is_as_fsdp2(processes, flags, own, tmp_path):
    words = [*DINO, *flags.split()]
    reference = train_tiny_gpu(tmp_path / "fsdp2", *words, processes=processes)
    found = train_tiny_megatron(tmp_path / "run", *words, *own.split(), processes=processes)
    for name in ("loss", "grad_norm", "loss_dino", "loss_ibot", "loss_koleo"):
        rounding = 2e-5 if name == "grad_norm" else 1e-5
        if "bf16" in flags:  # the last bit of a weight, by another order of sums, turns a rounding
            rounding = 2**-9
        assert found.column(name) == pytest.approx(reference.column(name), rel=rounding), name


@pytest.mark.long
def test_moves_from_fsdp2_to_megatron_and_back(expected, tmp_path):
    train_tiny_gpu(tmp_path, *DINO, "--max_steps", "2", processes=2)
    train_tiny_megatron(tmp_path, *DINO, "--max_steps", "4", "--zero_dp_strategy", "2")
    train_tiny_gpu(tmp_path, *DINO, "--max_steps", "5")
    moved = train_tiny_megatron(tmp_path, *DINO)
    assert list(moved.steps) == [1, 2, 3, 4, 5, 6]
    assert_same(moved, expected)
    assert_same_weights(moved, expected)


# -- parts ---------------------------------------------------------------------------------


def test_sinkhorn_over_shards_is_that_of_the_whole():
    torch.manual_seed(0)
    logits, present = torch.rand(30, 12) * 2 - 1, torch.rand(30) < 0.7
    temperature = torch.tensor([0.05])
    whole = sinkhorn(logits, temperature, lambda x: x, present)
    torch.testing.assert_close(whole[present], plain_dino.sinkhorn(logits[present], 0.05))
    assert not whole[~present].any()
    # The sums that replicas add up, round after round, are those of the whole.
    sums: list[torch.Tensor] = []
    sinkhorn(logits, temperature, lambda x: sums.append(x) or x, present)
    parts = []
    for rows in torch.arange(30).split(10):
        rounds = iter(sums)
        parts.append(
            sinkhorn(logits[rows], temperature, lambda _, r=rounds: next(r), present[rows])
        )
    torch.testing.assert_close(torch.cat(parts), whole)


@pytest.mark.parametrize("temperature", [0.07, 0.02, 0.01, 0.006])
def test_sinkhorn_of_low_temperatures(temperature):
    """Exponentials that fp32 has no room for, on devices without numbers below 1e-38, as TPUs."""
    torch.manual_seed(0)
    logits = torch.randn(40, 16).mul(0.12).clamp(-1, 1)
    logits[0] -= 0.3  # the largest of a row differ, too
    logits[1] += 0.3
    assert torch.set_flush_denormal(True)
    try:
        found = sinkhorn(logits, torch.tensor([temperature]), lambda x: x)
    finally:
        torch.set_flush_denormal(False)
    expected = plain_dino.sinkhorn(logits, temperature)
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-6)


def test_koleo_of_groups_is_the_mean_of_theirs():
    torch.manual_seed(0)
    tokens = torch.randn(12, 5)
    parts = [koleo_loss(part, 4) for part in tokens.split(4)]
    assert koleo_loss(tokens, 4) == pytest.approx(sum(parts).item() / 3)


def test_slots_hold_the_masked_patches_in_order():
    mask = torch.tensor([[0, 1, 0, 1, 1], [0, 0, 0, 0, 1]]).bool()
    slots = slots_of(mask, 4)
    assert slots[0].nonzero().tolist() == [[0, 1], [1, 3], [2, 4]]
    assert slots[1].nonzero().tolist() == [[0, 4]]
    assert taken(mask, 4).tolist() == [[True, True, True, False], [True, False, False, False]]


def test_ramps():
    cosine = Ramp(0.992, 1.0, 100, "cosine")
    assert [cosine.at(0), cosine.at(50), cosine.at(100), cosine.at(200)] == pytest.approx(
        [0.992, 0.996, 1.0, 1.0]
    )
    assert Ramp(0.04, 0.07, 30).at(10) == pytest.approx(0.05)
    assert Ramp(0.04, 0.07, 0).at(0) == 0.07


# -- Gram anchoring ----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def anchor(tmp_path_factory):
    """A file with a backbone that differs from the student's, and no heads."""
    folder = tmp_path_factory.mktemp("anchor")
    weights = filled(on_xla([*tiny(folder), *DINO]).model, seed=7).state_dict()
    torch.save(of_backbone(weights), folder / "anchor.pt")
    return folder / "anchor.pt"


@pytest.mark.long
@pytest.mark.parametrize(
    ("train", "how"),
    [
        (train_tiny, {"devices": 2}),
        (train_tiny_gpu, {"processes": 2}),
        (train_tiny_megatron, {"processes": 2}),
    ],
)
def test_gram_teacher(train, how, anchor, tmp_path):
    flags = [*SMALL, "--gram_weights", str(anchor), "--gram_weight", "1.5"]
    result = train(tmp_path, "--objective", "dino", *flags, **how)
    assert_same(result, plain_dino.train(flags))
    assert "Gram teacher: initial weights of" in result.stdout
    assert min(result.column("loss_gram")) > 1e-3
    assert Dino.metrics.keys() <= result.steps[1].keys()


@pytest.mark.parametrize(
    ("train", "how"),
    [
        (train_tiny_gpu, {"processes": 2}),
        long(train_tiny, {"devices": 2}),
        long(train_tiny_megatron, {"processes": 2}),
    ],
)
def test_gram_teacher_that_follows(train, how, anchor, tmp_path):
    """It is replaced after steps 2 and 4, and resumed after step 3 as it was then."""
    flags = [*SMALL, "--gram_weights", str(anchor), "--gram_weight", "1.5"]
    flags += ["--gram_update_steps", "2"]
    train(tmp_path, "--objective", "dino", *flags, "--max_steps", "3", **how)
    result = train(tmp_path, "--objective", "dino", *flags, **how)
    assert "resuming" in result.stdout
    # Similarities of a student and its own average hardly differ: rounding is 1.1e-5 of the loss.
    assert_same(result, plain_dino.train(flags), rounding=3e-5)


def test_gram_teacher_of_another_model(anchor, capsys, tmp_path):
    words = [*tiny(tmp_path / "run"), *DINO, "--backend", "cuda", "--gram_weights", str(anchor)]
    line = told_in_one_line(capsys, *words, "--embed_dim", "48")
    assert line.startswith("--gram_weights: ")
    assert "(1, 1, 32) in " in line
    assert not (tmp_path / "run").exists()


# -- the backbone: where it comes from, and where it goes ------------------------------------------

FIRST_STEP = "--max_steps 1 --warmup_steps 4".split()  # its learning rate is 0, or 1e-30 on XLA


@pytest.mark.parametrize("train", [train_tiny_gpu, long(train_tiny)])
def test_begins_with_timms_weights(train, tmp_path):
    torch.manual_seed(0)
    model = timm.create_model("vit_base_patch16_224", **TINY_SIZES, num_classes=7)
    given = {name: torch.randn_like(values) for name, values in model.state_dict().items()}
    save_file(given, tmp_path / "timm.safetensors")
    flags = ["--init_from", str(tmp_path / "timm.safetensors"), *DINO, *FIRST_STEP]
    result = train(tmp_path / "run", *flags)
    assert "dropped: head.bias, head.weight" in result.stdout
    student, teacher = (weights_of(result.ckpt_dir, kind, 1) for kind in ("model", "ema"))
    fresh = filled(on_xla([*tiny(tmp_path / "none"), *DINO]).model).state_dict()
    assert of_backbone(student).keys() == given.keys() - {"head.weight", "head.bias"}
    for name, values in student.items():
        for found in (values, teacher[name]):
            expected = given.get(name, fresh[name])
            torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-20, msg=name)


@pytest.mark.parametrize("kind", ["model", "ema"])
def test_backbone_is_timms(kind, on_gpu, tmp_path):
    target = tmp_path / "backbone.safetensors"
    words = [str(on_gpu.ckpt_dir), str(target), *(["--use_ema"] if kind == "ema" else [])]
    assert to_other_form(words) == 0
    how = {"global_pool": "avg", "fc_norm": False, "num_classes": 0}
    model = timm.create_model(
        "vit_base_patch16_224", **TINY_SIZES, **how, checkpoint_path=str(target)
    )
    trained, state = of_backbone(weights_of(on_gpu.ckpt_dir, kind)), model.state_dict()
    assert state.keys() == trained.keys()
    assert all(torch.equal(values, trained[name]) for name, values in state.items())


# -- a run as a whole --------------------------------------------------------------------------


@pytest.mark.long
@pytest.mark.parametrize(
    ("train", "flags"),
    [
        (train_tiny_gpu, ""),
        (train_tiny, ""),
        (train_tiny_megatron, "--precision bf16 --zero_dp_strategy 1"),
    ],
)
def test_resumed_in_mid_epoch_bit_for_bit(train, flags, tmp_path):
    flags = [*DINO, *EPOCHS_OF_5, "--drop_path_rate", "0.1", "--max_steps", "9", *flags.split()]
    flags += ["--batch_size", "288", "--koleo_group", "16"]
    whole, resumed = assert_resumes_at_step_7(train, tmp_path, *flags)
    for kind in ("model", "ema"):
        found = weights_of(resumed.ckpt_dir, kind, 9)
        for name, values in weights_of(whole.ckpt_dir, kind, 9).items():
            assert torch.equal(found[name], values), name


@pytest.mark.long
def test_accumulated_on_both_backends(tmp_path):
    """Sinkhorn sees a micro-batch, so it is another training, but the same one on both. (In two
    processes it would be of other images: half of those of each.)"""
    flags = [*DINO, "--grad_accum_steps", "2"]
    xla = train_tiny(tmp_path / "xla", *flags, devices=2)
    gpu = train_tiny_gpu(tmp_path / "gpu", *flags)
    assert xla.column("loss") == pytest.approx(gpu.column("loss"), rel=1e-4)


@pytest.mark.long
def test_dinov3s_class(tmp_path):
    """Rotary positions, of two sizes of crops. (KoLeo would magnify how its tokens are rounded:
    with its small layer scale they are nearly the same for all images.)"""
    flags = [*WITHOUT_CLASS_TOKEN, "--model", "timm/vit_small_patch16_dinov3"]
    flags += "--koleo_weight 0 --max_steps 3".split()
    xla = train_tiny(tmp_path / "xla", *flags, devices=2)
    gpu = train_tiny_gpu(tmp_path / "gpu", *flags)
    megatron = train_tiny_megatron(tmp_path / "megatron", *flags)
    for other in (xla, megatron):
        assert other.column("loss") == pytest.approx(gpu.column("loss"), rel=1e-5)


@pytest.mark.long
@pytest.mark.parametrize("optimizer", ["lion", "muon"])
def test_optimizers(optimizer, tmp_path):
    flags = [*DINO, "--optimizer", optimizer, "--layer_decay", "0.8", "--lr", "1e-3"]
    flags += "--no_decay norms biases embeddings".split()
    xla = train_tiny(tmp_path / "xla", *flags, devices=2)
    gpu = train_tiny_gpu(tmp_path / "gpu", *flags)
    assert xla.column("loss") == pytest.approx(gpu.column("loss"), rel=1e-3)


@pytest.mark.long
@pytest.mark.parametrize(("flags", "graphs"), [("", 1), ("--grad_accum_steps 2", 3)])
def test_steady_state(flags, graphs, tmp_path):
    result = train_tiny(tmp_path, *DINO, *STEADY, *flags.split(), devices=2)
    # Three parts of the loss and two signs of a collapse, too.
    assert_steady_state(result, graphs, READ_PER_LOG + 5)
    assert result.steps[6]["compilations"] == result.steps[1]["compilations"]


@pytest.mark.long
def test_a_head_without_a_loss_is_not_updated_in_passes(tmp_path):
    """Its gradients, zeros that no pass adds to, are none to the optimizer: it counts no step."""
    flags = "--ibot_weight 0 --grad_accum_steps 2 --max_steps 2".split()
    train_tiny(tmp_path, *DINO, *flags, devices=2)
    state = convert(tmp_path / "step_2", tmp_path / "plain.pt")["optimizer"]["state"]
    counts = {name: entries["step"].item() for name, entries in state.items()}
    of_head = {name for name in counts if name.startswith("ibot_head.")}
    assert {counts.pop(name) for name in of_head} == {0}
    assert set(counts.values()) == {2}


# -- mistakes ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("flags", "line"),
    [
        ("--local_crop_size 20", "--local_crop_size 20 is larger than the global crops"),
        ("--pos_embed none", "it has no learned position embedding"),
        ("--koleo_group 3", "--koleo_group 3 does not divide the 8 images per device and pass"),
        ("--grad_accum_steps 8", "the KoLeo loss compares images, but a device has only one per"),
        ("--grad_ckpt auto", "--objective dino is incompatible with --grad_ckpt auto"),
        ("--model_ema", "--objective dino is incompatible with --model_ema (its teacher is an EMA"),
        ("--color_jitter 0.4", "--color_jitter 0.4 has no effect with --objective dino"),
        ("--scale 0.5 1", "--objective dino uses --global_crops_scale instead of --scale"),
        ("--ckpt_best", "--ckpt_best requires a validation loss"),
        ("--gram_weights none", "--gram_weights none: no such checkpoint, folder or file"),
        ("--weight_decay 0", "--weight_decay_end requires --weight_decay above 0"),
    ],
)
def test_mistakes(flags, line, capsys, tmp_path):
    need_xla()
    words = [*tiny(tmp_path / "run"), *DINO, "--cpu_devices", "2", *flags.split()]
    assert line in told_in_one_line(capsys, *words)
    assert not (tmp_path / "run").exists()


def test_a_class_token_is_required(capsys, tmp_path):
    words = [*tiny(tmp_path / "run"), *WITHOUT_CLASS_TOKEN, "--backend", "cuda"]
    assert "--objective dino requires --class_token" in told_in_one_line(capsys, *words)


def test_frequencies_that_are_learned_are_of_one_size(capsys, tmp_path):
    words = [*tiny(tmp_path / "run"), *WITHOUT_CLASS_TOKEN, "--backend", "cuda"]
    words += ["--model", "timm/vit_small_patch16_rope_mixed_224"]
    assert "its learned position embedding supports only one image size" in told_in_one_line(
        capsys, *words
    )


def test_there_is_no_loss_to_evaluate(on_gpu, capsys):
    words = ["--eval_only", "--resume", str(on_gpu.ckpt_dir), "--backend", "cuda"]
    line = told_in_one_line(capsys, *words)
    asked = "requires --knn, --probe, --rank or --segment_probe"
    assert f"--eval_only with --objective dino {asked}" in line
