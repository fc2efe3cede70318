"""``--buckets``: images of any proportions, each batch of one of a few sizes."""

import json
import math
from collections import Counter
from itertools import pairwise

import numpy as np
import pytest
import torch
from PIL import Image
from timm.models.vision_transformer import VisionTransformer

from data.batch import PADDING, BatchShard
from data.config import DataConfig
from data.open import open_data
from data.pack import pack
from data.source import DatasetRequest
from features.image_sizes.buckets import BucketView, nearest_bucket
from models.positions import Resampling
from models.registry import open_model
from models.timm_private import compute_on_grids
from tests.support.cli import train_tiny, train_tiny_gpu
from tests.support.loading import check_same_epochs, concatenated
from tests.support.usage_error import told_in_one_line

BUCKETS = ["16x16", "12x20", "20x12"]
SIZES = [(16, 16), (12, 20), (20, 12)]
PIXELS = [(22, 20), (18, 33), (40, 21), (13, 26), (31, 31)]
"""Height and width of images, those of the numbers 0, 5, 10, ..., and so on."""
OF_PIXELS = [0, 1, 2, 1, 0]
"""The bucket of each."""
TRAIN, VAL = 100, 23


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    """Images of five proportions and two classes: their number in red, slopes in green and blue."""
    root = tmp_path_factory.mktemp("buckets")
    for split, count in (("train", TRAIN), ("val", VAL)):
        for number in range(count):
            path = root / split / f"class{number % 2}" / f"{number:03d}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            pixels = np.full((*PIXELS[number % 5], 3), 2 * number, np.uint8)
            height, width = PIXELS[number % 5]
            pixels[..., 1] = np.linspace(0, 255, height)[:, None]
            pixels[..., 2] = np.linspace(0, 255, width)
            Image.fromarray(pixels).save(path)
    return root


def numbers(count):
    """The images' numbers in the order of the index: class by class."""
    return [n for label in (0, 1) for n in range(count) if n % 2 == label]


def source(folder, **how):
    how = {"data_dir": str(folder), "batch_size": 8, "num_workers": 0, "buckets": BUCKETS} | how
    request = DatasetRequest(DataConfig(**how), 3, (16, 16), 2, seed=5, view=BucketView())
    return open_data(request)


# -- the model ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    "arguments",
    [
        {"class_token": True, "reg_tokens": 2, "global_pool": "token"},
        {"class_token": True, "no_embed_class": True, "global_pool": "map"},
        {"class_token": False, "global_pool": "avg", "img_size": (16, 24), "pre_norm": True},
    ],
)
def test_the_model_is_timms_with_dynamic_sizes(arguments):
    arguments = {"img_size": 16, "global_pool": "avg"} | arguments
    arguments |= {"patch_size": 4, "embed_dim": 32, "depth": 2, "num_heads": 2, "num_classes": 5}
    torch.manual_seed(0)
    theirs = VisionTransformer(**arguments, dynamic_img_size=True)
    torch.nn.init.normal_(theirs.pos_embed)
    ours = VisionTransformer(**arguments)
    ours.load_state_dict(theirs.state_dict())
    changed = {name: value for name, value in arguments.items() if name != "img_size"}
    assert open_model("vit_10b", changed | {"img_size": 16}).why_one_grid() is None
    own = tuple(ours.patch_embed.grid_size)
    prefix = 0 if ours.no_embed_class else ours.num_prefix_tokens
    grids = [(3, 5), (5, 3), (4, 7)]
    how = {"prefix": prefix, "antialias": True}
    resampled = {each: Resampling(own, each, lambda x: x, **how) for each in grids}
    compute_on_grids(ours, resampled)
    for rows, columns in [*grids, own, (5, 3)]:
        images = torch.randn(2, 3, 4 * rows, 4 * columns)
        results = []
        for model in (ours, theirs):
            model.zero_grad()
            logits = model(images)
            logits.square().sum().backward()
            results.append([logits, *(each.grad for each in model.parameters())])
        for here, there in zip(*results, strict=True):
            assert torch.dist(here, there) <= 1e-5 * there.norm()
    assert [name for name, _ in ours.named_parameters()] == [
        n for n, _ in theirs.named_parameters()
    ]


# -- the data ----------------------------------------------------------------------------


def test_nearest_by_the_logarithm_of_the_ratio():
    heights_and_widths = np.array([(*p,) for p in PIXELS] + [(0, 0), (16, 20), (100, 1)])
    found = nearest_bucket(heights_and_widths, SIZES).tolist()
    assert found[:5] == OF_PIXELS
    for (height, width), bucket in zip(heights_and_widths[6:], found[6:], strict=True):
        apart = [abs(math.log(width / height) - math.log(w / h)) for h, w in SIZES]
        assert bucket == apart.index(min(apart))
    assert found[5] == 0


def test_batches_of_any_share_and_from_any_position(folder):
    data = source(folder)
    whole = list(data.train_loader(8, BatchShard()).epoch(3))
    assert (
        len(whole) == sum(n // 8 for n in (40, 40, 20)) == len(data.train_loader(8, BatchShard()))
    )
    kinds = Counter(tuple(batch["image"].shape) for batch in whole)
    assert kinds == {(8, 3, *size): n for size, n in zip(SIZES, (5, 5, 2), strict=True)}
    sampler = data.splits["train"].sampler(8, shuffle=True, seed=5)
    orders = []
    for epoch in (3, 4):
        sampler.set_position(epoch)
        order = [at for batch in sampler for at in batch]
        assert len({at.index for at in order}) == len(order) == 96
        assert {at.epoch for at in order} == {epoch}
        by_index = numbers(TRAIN)
        assert all(at.size == OF_PIXELS[by_index[at.index] % 5] for at in order)
        orders.append([(at.index, at.size) for at in order])
    assert orders[0] != orders[1]
    buckets = [bucket for _, bucket in orders[0][::8]]
    assert buckets != sorted(buckets)  # mixed
    loader = data.splits["train"].with_index().batches(8, BatchShard())
    with_numbers = list(loader.epoch(3))
    assert [number for batch in with_numbers for number in batch.pop("index").tolist()] == [
        number for number, _ in orders[0]
    ]
    check_same_epochs(with_numbers, whole)
    workers = source(folder, num_workers=2)
    for first in (0, 5):
        shares = [workers.train_loader(8, BatchShard(r, 2)).epoch(3, first) for r in range(2)]
        check_same_epochs(map(concatenated, zip(*shares, strict=True)), whole[first:])


@pytest.mark.parametrize(("batch", "parts"), [(8, 1), (8, 4), (64, 2)])
def test_validation_counts_each_image_once(batch, parts, folder):
    data = source(folder)
    shares = [data.val_loader(batch, BatchShard(rank, parts)).epoch(0) for rank in range(parts)]
    found = []
    for both in zip(*shares, strict=True):
        joined = concatenated(both)
        images, labels = joined["image"], joined["target"]
        assert len(images) == batch
        assert torch.equal(joined["index"] == PADDING, labels == PADDING)
        found += [*zip(images, labels.tolist(), joined["index"].tolist(), strict=True)]
        assert not images[labels == PADDING].any()
    assert sorted(index for *_, index in found if index != PADDING) == list(range(VAL))
    by_index = numbers(VAL)
    assert all(
        int(image[0, -1, 0]) == 2 * by_index[index] for image, _, index in found if index != PADDING
    )
    present = [(image, label) for image, label, _ in found if label != PADDING]
    assert Counter(label for _, label in present) == {0: 12, 1: 11}
    got = sorted((tuple(image.shape), int(image[0, -1, 0])) for image, _ in present)
    wanted = [((3, *SIZES[OF_PIXELS[n % 5]]), 2 * n) for n in range(VAL)]
    assert got == sorted(wanted)
    image = Image.open(folder / "val" / "class1" / "001.png")  # 33 wide, 18 high
    cover = image.resize((round(13 * 33 / 18), 13), Image.BICUBIC)  # 20 x 12 / 0.875 is 22 x 13
    middle = np.asarray(cover.crop((2, 0, 22, 12))).astype(int)
    ours = next(image for image, _ in present if int(image[0, 0, 0]) == 2)
    assert abs(ours.permute(1, 2, 0).numpy().astype(int) - middle).max() <= 1


def test_shards_and_a_kept_index_give_the_same(folder, tmp_path):
    pack(str(folder), str(tmp_path / "shards"), 60_000, 1)
    kept = {"index_dir": str(tmp_path / "index")}
    files = source(folder)
    again = [source(folder, **kept) for _ in range(2)][1]
    shards = source(tmp_path / "shards", data_source="webdataset", **kept)
    names = {path.name.rpartition("-")[0] for path in (tmp_path / "index").iterdir()}
    assert len(list((tmp_path / "shards").rglob("*.tar"))) > 2
    assert {"train-sizes-of-folder", "val-sizes-of-webdataset"} <= names
    for other in (again, shards):
        check_same_epochs(*(each.train_loader(8, BatchShard()).epoch(1) for each in (other, files)))
    assert again.fingerprint() == files.fingerprint()
    assert "in buckets 16x16: 40 + 9, 12x20: 40 + 9, 20x12: 20 + 5" in str(files)


# -- runs --------------------------------------------------------------------------------


def flags(folder, *more):
    given = "--buckets 16x16 12x20 20x12 --batch_size 8 --num_classes 2 --log_step_interval 1"
    return [*f"--data_dir {folder} {given} --drop_path_rate 0.1".split(), *more]


@pytest.mark.long
@pytest.mark.parametrize(
    ("how", "devices", "executions"),
    [
        ("--precision bf16 --optimizer_dtype bf16 --mixup 0.4", 2, 1),
        ("--no-scan_blocks --mesh_tensor 2", 4, 1),
        ("--xla_fsdp nested --grad_accum_steps 2", 1, 3),
    ],
)
def test_a_compilation_for_each_bucket_then_none(how, devices, executions, folder, tmp_path):
    much = "--max_steps 16 --num_epochs 2 --test_epoch_interval 1".split()
    result = train_tiny(tmp_path, *flags(folder, *much, *how.split()), devices=devices)
    steps = [result.steps[n] for n in range(1, 17)]
    new = [after["compilations"] - before["compilations"] for before, after in pairwise(steps)]
    assert sum(new[:11]) == 2  # the first epoch has all buckets; the first step is one
    assert set(new[:11]) == {0, 1}
    assert new[11] == 3  # the evaluation after the epoch
    assert set(new[12:]) == {0}
    ran = [after["executions"] - before["executions"] for before, after in pairwise(steps)]
    assert ran[:11] == [executions] * 11
    assert ran[12:] == [executions] * 3
    assert [each["val_images"] for each in result.evaluations] == [VAL, VAL]
    assert result.stdout.count("compiling the training step") == 3
    assert sum("sec_per_iter" not in step for step in steps) == 3  # a compiler's time is no pace


@pytest.mark.long
def test_a_resume_in_mid_epoch_on_another_backend(folder, tmp_path):
    plain = flags(folder, "--max_steps", "8", "--drop_path_rate", "0")
    whole = train_tiny(tmp_path / "whole", *plain, devices=2)
    train_tiny(tmp_path / "parts", *plain, "--max_steps", "3", devices=2)
    parts = train_tiny_gpu(tmp_path / "parts", *plain, "--grad_accum_steps", "2", processes=2)
    assert parts.column("loss")[:3] == whole.column("loss")[:3]
    assert parts.column("loss") == pytest.approx(whole.column("loss"), rel=1e-4)
    ends = [each.evaluations[-1] for each in (whole, parts)]
    assert [each["val_images"] for each in ends] == [VAL, VAL]
    assert ends[1]["val_loss"] == pytest.approx(ends[0]["val_loss"], rel=1e-3)
    at = f"--eval_only --json --precision bf16 --resume {tmp_path / 'whole'}".split()
    done = train_tiny_gpu(tmp_path / "none", *flags(folder, *at), processes=2)
    result = json.loads(done.stdout.splitlines()[-1])
    assert result["val_images"] == VAL
    assert result["val_loss"] == pytest.approx(ends[0]["val_loss"], rel=2e-2)


# -- what is refused ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        ("--buckets 16", "'16' is not HxW"),
        ("--buckets 16x0", "'16x0' is not HxW"),
        ("--buckets 12x20 20x12", "--buckets must include the model's own size, 16x16"),
        ("--buckets 16x16 12x20 12x20", "--buckets lists 12x20 twice"),
        ("--buckets 16x16 10x24", "10x24 is not a multiple of the patch size, 4x4"),
        ("--buckets 16x16 24x24", "24x24 has 36 patches, the model's own size 16"),
        ("--buckets 16x16 --pos_embed none", "it has no learned position embedding"),
        ("--buckets 16x16 --grad_ckpt auto", "is incompatible with --grad_ckpt auto"),
        ("--buckets 16x16 --expect x.json", "is incompatible with --expect x.json"),
        ("--buckets 16x16 12x20 20x12 --batch_size 64", "use --batch_size 40 or less"),
    ],
)
def test_refused_in_one_line(wrong, told, folder, tmp_path, capsys):
    model = "--image_size 16 --patch_size 4 --embed_dim 32 --num_heads 2 --num_blocks 2".split()
    words = f"--data_dir {folder} --ckpt_dir {tmp_path / 'none'} --num_classes 2 {wrong}".split()
    assert told in told_in_one_line(capsys, *model, *words)
    assert not (tmp_path / "none").exists()
