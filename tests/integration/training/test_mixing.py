"""Mixup, cutmix and the losses: against timm's own, with the same numbers, and in real runs."""

import itertools
import re
from types import SimpleNamespace

import pytest
import torch

from data.batch import BatchShard, micro_batches
from data.open import open_data
from tests.fakes.filled import filled
from tests.support import cli
from tests.support.cli import TINY_MODEL, train_tiny, train_tiny_gpu
from tests.support.curves import assert_same_curves
from tests.support.marks import long
from tests.support.mixing import (
    BOTH,
    HOST,
    assert_steady,
    by_timm,
    loss_flags,
    timms_loss,
    tiny_run,
)
from tests.support.resuming import EPOCHS_OF_5
from tests.support.usage_error import told_in_one_line
from tools.self_check.plain import normalized
from training.data import dataset_request, normalizer
from training.objectives.classify import Mixing
from training.objectives.registry import open_objective

ON_HOST = SimpleNamespace(constant=torch.Tensor.contiguous, image_rows=range(16))
"""What the objective asks of a backend."""


@pytest.mark.parametrize("devices", [1, 2])
@pytest.mark.parametrize(
    "flags",
    [
        BOTH,
        "--mixup 0.2",
        "--cutmix 1.0 --bce_loss --bce_sum",
        "--cutmix_minmax 0.2 0.9 --mixup 1 --bce_loss --bce_target_thresh 0.2 --smoothing 0.3",
        "--smoothing 0.1",
        "--bce_loss --smoothing 0.1",
        "--bce_loss --bce_sum --bce_target_thresh 0",
    ],
)
def test_images_labels_and_losses_are_timms(flags, devices):
    run = tiny_run(*flags.split(), devices=devices)
    config, seed = loss_flags(run), run.config.seed
    objective, loss, kinds = open_objective(run, ON_HOST), timms_loss(config), set()
    normalize = normalizer(run, ON_HOST.constant)
    for micro_batch_index in range(30):
        images = torch.randint(0, 256, (16, 3, 16, 16), dtype=torch.uint8)
        labels, logits = torch.randint(10, (16,)), torch.randn(16, 10)
        plain = normalize(images)
        expected = plain, labels
        if config.mixes:
            expected = by_timm(config, devices, plain, labels, seed, micro_batch_index)
        shown, *targets = objective.example({"image": images, "target": labels}, micro_batch_index)
        torch.testing.assert_close(shown, expected[0], rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(objective.loss_of(logits, *targets), loss(logits, expected[1]))
        same = shown == plain
        kinds.add(
            "as it is" if same.all() else "cut" if same.flatten(0, 1).all(0).any() else "mixed"
        )
    if flags == BOTH:
        assert len(kinds) == 3


def test_rows_of_images_are_cut_where_those_of_the_whole_are():
    run = tiny_run("--cutmix", "1")
    images = torch.randn(16, 3, 16, 16)
    whole = Mixing(run, range(16))
    for micro_batch_index in range(10):
        mix, parts = whole.draw(micro_batch_index, images.shape), []
        for rows in (range(5), range(5, 6), range(6, 16)):
            part = Mixing(run, rows)
            some_rows = images[:, :, rows.start : rows.stop]
            of_part = part.draw(micro_batch_index, some_rows.shape)
            shift = torch.tensor([0, 0, rows.start, rows.start, 0, 0])
            assert (of_part + shift).equal(mix)
            parts.append(part.images(some_rows, of_part))
        assert torch.cat(parts, dim=2).equal(whole.images(images, mix))


# -- real runs ------------------------------------------------------------------------

ALL = [*EPOCHS_OF_5, *HOST, *BOTH.split(), "--max_steps", "4"]


@pytest.fixture(scope="module")
def everything(tmp_path_factory):
    """All augmentation on, in fp32 on two devices, scanned."""
    return train_tiny(tmp_path_factory.mktemp("everything"), *ALL, devices=2)


@pytest.mark.long
@pytest.mark.parametrize("form", ["fsdp2", "megatron"])
def test_other_forms_train_alike(form, everything, tmp_path):
    flags = [*ALL, "--fsdp", form]
    if form == "fsdp2":
        flags.append("--channels_last")
    result = train_tiny_gpu(tmp_path, *flags, processes=2)
    for name in ("loss", "grad_norm"):
        assert result.column(name) == pytest.approx(everything.column(name), rel=1e-4)


@pytest.mark.parametrize(
    ("devices", "form", "flags"),
    [
        (2, "", "--bce_loss --mixup 0.8 --cutmix 1"),
        long(1, "--xla_fsdp nested", "--cutmix_minmax 0.2 0.9 --smoothing 0.2"),
        long(2, "--no-scan_blocks", "--smoothing 0.2"),
    ],
)
def test_first_steps_are_timms(devices, form, flags, tmp_path):
    given = [*flags.split(), "--grad_accum_steps", "2"]
    flags = [*given, "--precision", "bf16", "--max_steps", "4", "--eval_batches", "1"]
    result = train_tiny(tmp_path, *flags, *form.split(), devices=devices)
    assert_steady(result, executions=3)
    run = tiny_run(*given, devices=devices)
    config, how = loss_flags(run), run.config.data.preprocessing
    model, loss = filled(run.model, run.config.seed), timms_loss(loss_flags(run))
    loader = open_data(dataset_request(run)).train_loader(16, BatchShard())
    expected = []
    for step, batch in enumerate(itertools.islice(loader.epoch(0), 2)):
        model.zero_grad()  # the learning rate of the first step is 0, so both have first weights
        total = 0.0
        for index, part in enumerate(micro_batches(batch, 1, 2)):
            x, y = normalized(part["image"], how), part["target"]
            if config.mixes:
                x, y = by_timm(config, devices, x, y, run.config.seed, 2 * step + index)
            half = loss(model(x), y) / 2
            half.backward()
            total += half.item()
        norm = torch.nn.utils.get_total_norm([each.grad for each in model.parameters()]).item()
        expected += [total, norm]
    found = [result.steps[step][name] for step in (1, 2) for name in ("loss", "grad_norm")]
    assert found == pytest.approx(expected, rel=0.02)


DOMAIN = [
    *"--data_source mosaics --max_steps 3 --eval_batches 1 --cutmix 1 --mixup 0.5".split(),
    *"--mixup_switch_prob 0.7 --batch_size 6".split(),
]


@pytest.mark.long
def test_images_whose_rows_several_devices_share(tmp_path):
    """Each device cuts its rows of the box: as whole images on one device; of fp32 images."""
    whole = train_tiny(tmp_path / "whole", *DOMAIN)
    assert len(set(whole.column("loss"))) == 3
    over = ["--mesh_domain", "2"]
    gather = ["--domain_attention", "gather"]
    xla = train_tiny(tmp_path / "xla", *DOMAIN, *over, *gather, devices=2)
    assert_steady(xla)
    gpu = train_tiny_gpu(tmp_path / "gpu", *DOMAIN, *over, processes=2)
    for result in (xla, gpu):
        assert_same_curves(result, whole, rel=1e-4)


@pytest.mark.long
def test_mixed_images_stay_on_their_devices(monkeypatch, tmp_path):
    """No collective in the compiled step has images, over two axes that divide the batch."""
    variables = cli.environment()
    variables["XLA_FLAGS"] += f" --xla_dump_to={tmp_path}/hlo --xla_dump_hlo_as_text"
    monkeypatch.setattr(cli, "environment", lambda: variables)
    flags = ["--max_steps", "1", "--mesh_dcn", "2", *BOTH.split(), "--eval_batches", "1"]
    train_tiny(tmp_path / "run", *flags, devices=4, warm=False)
    texts = [path.read_text() for path in tmp_path.glob("hlo/*after_optimizations.txt")]
    step = max(texts, key=len)
    kinds = "all-reduce|all-gather|all-to-all|collective-permute|reduce-scatter"
    sent = re.findall(rf"\[([\d,]+)\]\S* (?:{kinds})(?:-start)?\(", step)
    assert len(sent) > 20
    sizes = [sorted(map(int, each.split(","))) for each in sent]
    assert not [each for each in sizes if 3 in each and each.count(16) > 1]
    assert re.search(r"u8\[4,3,16,16\]", step)  # as a device has them


# -- what is refused ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (
            "--mixup 0.8 --cpu_devices 2 --batch_size 30 --grad_accum_steps 3",
            "--mixup mixes pairs of images on a device, but there are 5 images per device and",
        ),
        ("--cutmix_minmax 0.5 0.5", "--cutmix_minmax 0.5 0.5 contains no whole number"),
        (
            "--cutmix 1 --dimension 3 --image_size 8 16 16 --model hybrid_vit --num_heads 2",
            "CutMix supports 2-D images only: use --mixup for volumes",
        ),
    ],
)
def test_refused(flags, told, capsys, tmp_path):
    given = [*TINY_MODEL, "--fake_data", "--batch_size", "8", "--ckpt_dir", tmp_path]
    line = told_in_one_line(capsys, "--backend", "xla", *given, *flags.split())
    assert line.startswith(told)
    assert not any(tmp_path.iterdir())
