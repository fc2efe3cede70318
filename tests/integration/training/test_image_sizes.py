"""``--image_size_schedule``: trainings on images of several sizes, one after the other or mixed."""

import itertools
from collections import Counter

import pytest
import timm
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from timm.models.vision_transformer import VisionTransformer

from data.batch import BatchShard, joined, micro_batches
from data.config import DataConfig
from data.open import open_data
from features.image_sizes.schedule import SizeSchedule
from tests.fakes.filled import filled
from tests.support.cli import tiny, train_tiny, train_tiny_gpu, train_tiny_megatron
from tests.support.marks import long
from tests.support.mixing import by_timm, loss_flags
from tests.support.resolved import on_gpus
from tests.support.resuming import EPOCHS_OF_5, assert_resumes_at_step_7
from tests.support.usage_error import told_in_one_line
from tools.self_check.plain import backward, clip_and_step, normalized
from training.data import dataset_request

SCHEDULE = "--image_size_schedule 8:0.3 12:0.3 16:0.4".split()
SIDES = [8] * 3 + [12] * 3 + [16] * 4
"""What that means for ten steps."""
ROTARY = "eva02_tiny_patch14_224"
STEPS = ["--max_steps", "10", "--warmup_steps", "20", "--hflip", "0.5"]
CUT = "--cutmix 1 --mixup 0.5 --grad_accum_steps 2".split()


# -- which size a step has -------------------------------------------------------------------


def sizes_of(*items, steps, **others):
    return SizeSchedule.of(DataConfig(image_size_schedule=list(items), **others), 3, steps)


@pytest.mark.parametrize(
    ("items", "steps", "counts"),
    [
        (["128:0.4", "192:0.4", "224:0.2"], 10, {128: 4, 192: 4, 224: 2}),
        (["128:0.4", "192:0.4", "224:0.2"], 1, {192: 1}),
        (["96:0.333", "128:0.333", "160:0.333"], 1000, {96: 333, 128: 333, 160: 334}),
        (["128:0.001", "224:0.999"], 100, {224: 100}),
        (["160:1"], 7, {160: 7}),
        (["64:0.5", "32:0.25", "64:0.25"], 8, {64: 6, 32: 2}),
    ],
)
def test_shares_of_the_steps(items, steps, counts):
    sizes = sizes_of(*items, steps=steps)
    sides = [sizes.side(step) for step in range(steps)]
    assert Counter(sides) == counts
    assert [sizes.number(step) for step in range(steps)] == sorted(map(sizes.number, range(steps)))
    assert sizes.side(10 * steps) == sizes.sides[-1]


def test_drawn_sizes():
    sizes = sizes_of("8", "12", "16", "16", steps=10)
    drawn = [sizes.side(step) for step in range(8000)]
    counts = Counter(drawn)
    assert [counts[side] for side in (8, 12, 16)] == pytest.approx([2000, 2000, 4000], rel=0.1)
    assert drawn == [sizes_of("8", "12", "16", "16", steps=99).side(n) for n in range(8000)]
    assert Counter(itertools.pairwise(drawn))[8, 12] == pytest.approx(500, rel=0.2)


def test_magnitudes_of_rand_augment_rise_with_the_side():
    def policies(aa, least):
        sizes = sizes_of("300", "128", "214", steps=1)
        config = DataConfig(aa=aa, aa_min_magnitude=least)
        return [sizes.config_of(config, side).aa for side in sizes.sides]

    # EfficientNetV2-S's sizes and magnitudes, the largest and the smallest: arXiv 2104.00298.
    assert policies("rand-m15-mstd0.5-inc1", 5) == [f"rand-m{m}-mstd0.5-inc1" for m in (15, 5, 10)]
    assert policies("rand-mstd0.5-m9-mmax20", 9) == ["rand-mstd0.5-m9-mmax20"] * 3
    assert policies("rand-m9", None) == ["rand-m9"] * 3


# -- the images ------------------------------------------------------------------------------


def batches(run, count, share=None, first=0, schedule=None):
    """Batches of the first epoch, in sizes of a training of so many steps as ``schedule``."""
    loader = open_data(dataset_request(run)).train_loader(16, share or BatchShard(), schedule or 0)
    return list(itertools.islice(loader.epoch(0, first), count))


@pytest.fixture(scope="module")
def alone():
    """The first ten batches as runs of one size have them, by side."""
    how = [*tiny("none"), *STEPS]
    return {n: batches(on_gpus([*how, "--image_size", str(n)]), 10) for n in (8, 12, 16)}


@pytest.mark.parametrize("workers", [0, 2])
def test_images_are_those_of_runs_of_one_size(workers, alone):
    run = on_gpus([*tiny("none"), *STEPS, *SCHEDULE, "--num_workers", str(workers)])
    whole = batches(run, 10, schedule=10)
    for step, (batch, side) in enumerate(zip(whole, SIDES, strict=True)):
        assert all(batch[name].equal(alone[side][step][name]) for name in ("image", "target"))
    parts = [batches(run, 6, BatchShard(rank, 2), first=2, schedule=10) for rank in range(2)]
    for step, both in enumerate(zip(*parts, strict=True), 2):
        assert joined(both)["image"].equal(whole[step]["image"])


# -- trainings -------------------------------------------------------------------------------


def plain_losses(run, alone, sides, processes=1, devices=1, teacher=None):
    """Losses of steps in the warmup, by timm's model with dynamic sizes in plain PyTorch. With a
    teacher, the divergence from its classes alone."""
    model = VisionTransformer(**run.model.arguments | {"dynamic_img_size": True})
    model.load_state_dict(filled(run.model, run.config.seed).state_dict())
    how, data, loss_config = run.config.optimizer, run.config.data, loss_flags(run)
    optimizer = torch.optim.AdamW(model.parameters(), weight_decay=how.weight_decay)

    def losses_of(step, batch):
        passes = data.grad_accum_steps
        for index, part in enumerate(micro_batches(batch, processes, passes)):
            shown, labels = normalized(part["image"], data.preprocessing), part["target"]
            if loss_config.mixes:
                mixing = labels, run.config.seed, passes * step + index
                shown, labels = by_timm(loss_config, processes * devices, shown, *mixing)
            loss = F.cross_entropy(logits := model(shown), labels) / passes
            if teacher:
                with torch.no_grad():
                    taught = teacher(shown).softmax(1)
                loss = F.kl_div(logits.log_softmax(1), taught, reduction="batchmean") / passes
            yield loss

    losses = []
    for step, side in enumerate(sides):
        optimizer.param_groups[0]["lr"] = how.lr * step / how.warmup_steps
        parts = backward(losses_of(step, alone[side][step]))
        losses.append(sum(part.item() for part in parts))
        clip_and_step(optimizer, how.clip_grad_norm)
    return losses


@pytest.mark.parametrize(
    ("train", "flags", "how"),
    [
        (train_tiny_gpu, SCHEDULE, {"processes": 2}),
        (train_tiny, [*SCHEDULE, *CUT], {"devices": 2}),
        long(train_tiny, [*SCHEDULE, "--xla_fsdp", "nested"], {}),
        long(train_tiny_gpu, [*SCHEDULE, *CUT, "--compile"], {}),
        long(train_tiny_gpu, [*SCHEDULE, *CUT, "--fsdp", "simple", "--compile"], {"processes": 2}),
        long(train_tiny_megatron, [*SCHEDULE, *CUT, "--model_ema"], {"processes": 2}),
        long(train_tiny, "--image_size_schedule 8 12 16 --no-scan_blocks".split(), {}),
    ],
)
def test_losses_are_plain_timms(train, flags, how, alone, tmp_path):
    result = train(tmp_path, *STEPS, *flags, **how)
    run = on_gpus([*tiny(tmp_path), *STEPS, *flags])
    sizes, sides = SizeSchedule.of(run.config.data, 0, 10), SIDES
    if not sizes.shares:
        sides = [sizes.side(step) for step in range(10)]
        assert (
            "image size of each step drawn at random from 8 x 8, 12 x 12, 16 x 16" in result.stdout
        )
    else:
        for side, step in ((8, 1), (12, 4), (16, 7)):
            assert f"image size {side} x {side} from step {step}\n" in result.stdout
    expected = plain_losses(run, alone, sides, **how)
    assert len({*expected}) == 10
    assert result.column("loss") == pytest.approx(expected, rel=1e-5)


@pytest.mark.long
@pytest.mark.parametrize(
    ("flags", "devices", "executions"),
    [
        ("--precision bf16 --mixup 0.4 --patch_drop_rate 0.25 --model_ema", 2, 1),
        ("--xla_fsdp nested --grad_accum_steps 2", 1, 3),
    ],
)
def test_a_compilation_for_each_size_then_none(flags, devices, executions, tmp_path):
    mixed = "--image_size_schedule 8 12 16 --max_steps 16 --eval_batches 1".split()
    result = train_tiny(tmp_path, *mixed, *flags.split(), devices=devices)
    sizes = sizes_of("8", "12", "16", steps=16)
    sides = [SizeSchedule(sizes.sides, (), 0, 16).side(step) for step in range(16)]
    assert {*sides[:8]} == {8, 12, 16}
    is_new = [side not in sides[:step] for step, side in enumerate(sides)]
    compiled, executed = result.column("compilations"), result.column("executions")
    assert [after > before for before, after in itertools.pairwise(compiled)] == is_new[1:]
    assert {b - a for a, b in itertools.pairwise(executed)} == {executions}
    assert result.stdout.count("compiling the training step") == 3
    steps = result.steps.values()
    assert ["sec_per_iter" not in step for step in steps] == is_new  # a compiler's time is no pace


@pytest.mark.parametrize(
    ("train", "how"),
    [
        (train_tiny_gpu, {"processes": 2}),
        long(train_tiny, {"devices": 2}),
        long(train_tiny_megatron, {}),
    ],
)
def test_a_resume_before_a_change_of_size_is_exact(train, how, tmp_path):
    flags = [*EPOCHS_OF_5, "--max_steps", "12", "--image_size_schedule", "8:0.7", "16:0.3"]
    flags += "--mixup 0.2 --cutmix 1 --drop_path_rate 0.2 --eval_batches 1".split()
    whole, resumed = assert_resumes_at_step_7(train, tmp_path, *flags, **how)
    assert "image size 16 x 16 from step 9" in whole.stdout
    for line in ("image size 8 x 8 from step 8", "image size 16 x 16 from step 9"):
        assert line in resumed.stdout


@pytest.fixture(scope="module")
def teachers(tmp_path_factory):
    """By name, models of timm's with answers that differ, and the flags of them as teachers."""
    folder, models = tmp_path_factory.mktemp("teachers"), {}
    others = {"img_size": 28, "depth": 12, "embed_dim": 32, "num_heads": 2}
    for name, how in (("test_vit", {"img_size": 32, "dynamic_img_size": True}), (ROTARY, others)):
        torch.manual_seed(1)
        model = timm.create_model(name, num_classes=10, **how).eval()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter += 0.1 * torch.randn_like(parameter)
        save_file(model.state_dict(), path := folder / f"{name}.safetensors")
        models[name] = model, f"--teacher timm/{name} --teacher_weights {path}".split()
    return models


def test_a_teacher_sees_the_same_images(teachers, alone, tmp_path):
    model, flags = teachers["test_vit"]
    flags = [*STEPS, *flags, *"--image_size 32 --patch_size 8 --max_steps 4".split()]
    flags += "--distillation_type soft --distillation_alpha 1".split()
    flags += "--image_size_schedule 16:0.5 32:0.5 --mean 0.5 0.5 0.5 --std 0.5 0.5 0.5".split()
    whole = on_gpus([*tiny("none"), *STEPS, "--image_size", "32"])
    images = {16: alone[16], 32: batches(whole, 4)}
    result = train_tiny_gpu(tmp_path, *flags, processes=2)
    run = on_gpus([*tiny("none"), *flags])
    expected = plain_losses(run, images, [16, 16, 32, 32], processes=2, teacher=model)
    assert result.column("loss") == pytest.approx(expected, rel=1e-5)


# -- figures and mistakes --------------------------------------------------------------------


def test_flops_are_those_of_models_of_each_size():
    """Of buckets, too; a linear probe's are a third."""
    for flags in (SCHEDULE, "--buckets 16x16 12x20".split(), [*SCHEDULE, "--linear_probe"]):
        run = on_gpus([*tiny("none"), *flags])
        assert len(run.train_flops_by_size) == len(run.config.data.image_sizes)
        for size, flops in run.train_flops_by_size.items():
            size_flags = ["--image_size", *map(str, size), *flags[len(SCHEDULE) :]]
            assert flops == on_gpus([*tiny("none"), *size_flags]).train_flops_per_image
    assert on_gpus(tiny("none")).train_flops_by_size == {}


GIVEN = "--image_size_schedule"


@pytest.mark.parametrize(
    ("flags", "line"),
    [
        (f"{GIVEN} 8:x", "'8:x' is not SIDE:SHARE, a side in pixels and a fraction"),
        (f"{GIVEN} 0:1", "'0:1' is not SIDE:SHARE"),
        (f"{GIVEN} 8:0", "'8:0' is not SIDE:SHARE"),
        (f"{GIVEN} 8 16:0.5", f"{GIVEN}: give a share for every size, or for none"),
        (f"{GIVEN} 8:0.4 16:0.5", f"{GIVEN}: the shares add up to 0.9, not 1"),
        (f"{GIVEN} 10:0.4 16:0.6", f"{GIVEN}: 10x10 is not a multiple of the patch size, 4x4"),
        (f"{GIVEN} 16 --image_size 16 24", f"{GIVEN} requires square images, not the model's"),
        (f"{GIVEN} 8 --pos_embed none", "it has no learned position embedding"),
        (f"{GIVEN} 8 --model timm/eva02_tiny_patch14_224", "it is timm's Eva, not VisionTr"),
        (f"{GIVEN} 8 --model hybrid_vit", "it supports only images of its own size"),
        (f"{GIVEN} 8 --fake_data", "can be resized, which --data_source fake does not have"),
        (f"{GIVEN} 8 --data_source mosaics", "resized, which --data_source mosaics does not have"),
        (f"{GIVEN} 8 --buckets 16x16", f"{GIVEN} 8 is incompatible with --buckets 16x16"),
        (f"{GIVEN} 8 --objective mae", "requires --objective classify, siglip or clip, not mae"),
        (f"{GIVEN} 8 --mesh_domain 2", f"{GIVEN} 8 is incompatible with --mesh_domain 2"),
        (f"{GIVEN} 8 --expect x.json", f"{GIVEN} 8 is incompatible with --expect x.json"),
        (f"{GIVEN} 8 --grad_ckpt auto --backend xla", "is incompatible with --grad_ckpt auto"),
        (
            f"{GIVEN} 8 --cutmix_minmax 0.5 0.6",
            "contains no whole number of pixels for images of 8",
        ),
        ("--aa_min_magnitude 3 --aa rand-m9", f"--aa_min_magnitude 3 requires {GIVEN}"),
        (f"{GIVEN} 8 --aa_min_magnitude 3 --aa 3a", "requires RandAugment with a magnitude"),
    ],
)
def test_mistakes(flags, line, capsys, tmp_path):
    backend = [] if "--backend" in flags else ["--backend", "cuda"]
    words = [*tiny(tmp_path / "run"), *backend, *flags.split()]
    assert line in told_in_one_line(capsys, *words)
    assert not (tmp_path / "run").exists()


def test_a_teacher_of_one_size_is_refused(teachers, capsys, tmp_path):
    given = [*teachers[ROTARY][1], *"--image_size 28 --image_size_schedule 28".split()]
    words = [*tiny(tmp_path / "run"), "--backend", "cuda", *given]
    line = told_in_one_line(capsys, *words)
    assert line.startswith(f"--teacher timm/{ROTARY}: --image_size_schedule is incompatible with")
    assert line.endswith("it is timm's Eva, not VisionTransformer")
