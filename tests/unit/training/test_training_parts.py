"""Parts of training/ that stand alone: shards, prefetch, safe loading, reports, plots, flags."""

import math
import re
import threading
from concurrent.futures import Future
from dataclasses import asdict
from itertools import product
from types import SimpleNamespace

import pytest
import torch
import torch.distributed.checkpoint as dcp

from data.config import DataConfig
from data.loader import prefetch
from models.config import VitConfig
from models.registry import open_model
from run_vit_training import read_flags
from tests.support.resolved import on_xla
from training.checkpoints.format import SafeReader, quiet_dcp
from training.checkpoints.state import Chunk, ShardedTensor, flat_range_boxes
from training.config import RunConfig
from training.flags import flat
from training.logs.records import Evaluation, read_metrics
from training.logs.reports import Reports
from training.step import StepTimer
from xla_fsdp.tpu import peak_of

pytestmark = pytest.mark.fast

# -- the model's line -----------------------------------------------------------------


def test_the_flags_that_change_a_model_are_named():
    """A preset's name says little about a model of a thousandth of its parameters."""
    small = "--embed_dim 48 --num_blocks 2 --num_heads 4 --image_size 16 --no-qkv_bias"
    line = on_xla(["--fake_data", "--patch_size", "4", *small.split()]).model_line
    name, _, typed = line.removesuffix(")").partition(" parameters (")
    assert name == "vit_10b, 108,472"
    assert sorted(f" {typed}".split(" --")) == sorted(f" {small} --patch_size 4".split(" --"))
    assert on_xla(["--fake_data"]).model_line == "vit_10b, 10,077,917,160 parameters"


# -- shards ---------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(), (1,), (7,), (4, 5), (3, 1, 4), (2, 3, 2, 2)])
def test_boxes_cover_every_flat_range(shape):
    whole = torch.arange(math.prod(shape)).view(shape)
    count = whole.numel()
    for start, end in product(range(count + 1), repeat=2):
        boxes = list(flat_range_boxes(shape, start, end))
        parts = [
            whole[tuple(slice(o, o + s) for o, s in zip(offsets, sizes, strict=True))].flatten()
            for offsets, sizes, _ in boxes
        ]
        values = torch.cat(parts).tolist() if parts else []
        assert values == list(range(start, end))
        assert [flat for _, _, flat in boxes] == [int(part[0]) for part in parts]
        assert len(boxes) <= max(1, 2 * len(shape) - 1)


def sharded(tensor, world_size, flat):
    """A tensor sharded by rows, or as FSDP's flat shards, all ranks' chunks in one."""
    chunks = []
    if flat:
        share = -(-tensor.numel() // world_size)
        for rank in range(world_size):
            end = min((rank + 1) * share, tensor.numel())
            for offsets, sizes, at in flat_range_boxes(tensor.shape, rank * share, end):
                data = tensor.flatten()[at : at + math.prod(sizes)].view(sizes)
                chunks.append(Chunk(offsets, data))
    else:
        for row in range(0, len(tensor), len(tensor) // world_size):
            rows = tensor[row : row + len(tensor) // world_size]
            chunks.append(Chunk((row, *(0,) * (tensor.dim() - 1)), rows))
    return ShardedTensor(tensor.shape, tensor.dtype, chunks)


@pytest.mark.parametrize(
    ("before", "after"), [((4, True), (2, False)), ((2, False), (3, True)), ((5, True), (3, True))]
)
def test_checkpoint_is_read_under_another_cutting(before, after, tmp_path):
    values = torch.randn(4, 3, 5)
    target = torch.zeros(4, 3, 5)
    with quiet_dcp():
        dcp.save(
            {"a": {"b": sharded(values, *before)}},
            storage_writer=dcp.FileSystemWriter(tmp_path),
            no_dist=True,
        )
        dcp.load(
            {"a": {"b": sharded(target, *after)}}, storage_reader=SafeReader(tmp_path), no_dist=True
        )
    assert torch.equal(target, values)


# -- prefetch -------------------------------------------------------------------------


def batches(count):
    return [{"image": torch.full((1,), i), "target": torch.full((1,), i)} for i in range(count)]


@pytest.mark.parametrize("depth", [0, 1, 3])
def test_prefetch_keeps_order_and_puts_repeated_batches_once(depth):
    first, second, third = batches(3)
    put = []

    def record(batch):
        put.append(int(batch["image"]))
        return put[-1]

    source = iter([first, first, second, second, third, first])
    assert list(prefetch(source, record, depth)) == [0, 0, 1, 1, 2, 0]
    assert put == [0, 1, 2, 0]


@pytest.mark.parametrize("depth", [0, 2])
def test_prefetch_raises_the_sources_error_in_its_place(depth):
    def source():
        yield from batches(2)
        raise OSError("disk gone")

    got = prefetch(source(), lambda batch: int(batch["image"]), depth)
    assert [next(got), next(got)] == [0, 1]
    with pytest.raises(OSError, match="disk gone"):
        next(got)


def test_prefetch_ends_its_thread_when_the_consumer_stops():
    got = prefetch(iter(batches(100)), lambda batch: batch, 2)
    next(got)
    got.close()
    assert not [t for t in threading.enumerate() if t.name == "prefetch"]


# -- reports --------------------------------------------------------------------------


class SilentBackend:
    """Stands for a chip that nobody has here: what the reports ask of it."""

    is_main, device_count = True, 4

    def peak_flops(self):
        return 100e12

    def counters(self):
        return {"compilations": 1}

    def memory(self):
        return {"used": 3 * 2**30, "peak": 41 * 2**30, "limit": 80 * 2**30}


def value(skipped=0.0, **numbers):
    future: Future = Future()
    counts = {"skipped": [skipped, 0.0, skipped, 0.0]}
    future.set_result({name: [number] for name, number in numbers.items()} | counts)
    return future


def run_in(folder, *, batch_size, flops_per_image):
    """What the reports ask of a run."""
    config = RunConfig(data=DataConfig(batch_size=batch_size))
    folders = {"log_dir": folder, "ckpt_dir": folder}
    model = SimpleNamespace(sizes=SimpleNamespace(embed_dim=32, num_classes=10))
    flops = {
        "train_flops_per_image": flops_per_image,
        "train_flops_by_size": {(8, 8): flops_per_image / 4},
    }
    return SimpleNamespace(config=config, model=model, **flops, **folders)


def test_flops_are_counted_only_for_mfu(tmp_path, monkeypatch):
    run = run_in(tmp_path, batch_size=1000, flops_per_image=1e9)

    def of_a_step():
        reports = Reports(run, SilentBackend(), first_step=0, last_step=1)
        return reports.step_flops({"image": (500, 3, 16, 16)})

    assert of_a_step() == 1e12
    monkeypatch.setattr(SilentBackend, "peak_flops", lambda self: None)
    del run.train_flops_per_image
    assert of_a_step() == 0


def test_reports_write_every_form(tmp_path, capsys, monkeypatch):
    def reports(first_step):
        run = run_in(tmp_path, batch_size=1000, flops_per_image=1e9)
        return Reports(run, SilentBackend(), first_step=first_step, last_step=40)

    run = reports(0)
    waiting: Future = Future()
    run.log(1, 1, 0.0, None, waiting, {})
    run.step_done()
    assert read_metrics(tmp_path) == []  # not arrived: nothing waits for it
    waiting.set_result({"loss": [2.0], "grad_norm": [1.0], "skipped": [0.0, 0.0, 0.0, 1.0]})
    run.step_done()
    timer = StepTimer(steps=20)
    monkeypatch.setattr(timer, "seconds", lambda: 10.0)
    timer.waited = 1.0
    shapes = 10 * [(500, 3, 16, 16)] + 10 * [(500, 3, 8, 8)]
    timer.flops = sum(run.step_flops({"image": shape}) for shape in shapes)
    run.log(20, 1, 1e-3, timer, value(loss=1.0, grad_norm=0.5), {})
    run.evaluation(20, 1, Evaluation(0.9, 75.0, 90.0, 50))
    run.close()
    curves = run.plot
    first, second, evaluation = read_metrics(tmp_path)
    assert "images_per_s" not in first
    assert second["images_per_s"] == pytest.approx(2000)
    assert second["data_wait"] == pytest.approx(0.1)
    assert second["mfu"] == pytest.approx(2000 * (1e9 + 0.25e9) / 2 / (4 * 100e12), rel=1e-3)
    assert evaluation == {
        "step": 20,
        "epoch": 1,
        "val_loss": 0.9,
        "val_top1": 75.0,
        "val_top5": 90.0,
        "val_images": 50,
    }
    line = capsys.readouterr().out.splitlines()[1]
    assert re.search(r"loss: 1\.0000 \(mean of 2: 1\.5000\), .*sec/iter: 0\.5000", line)
    assert re.search(
        r"images/s: 2000\.0.*MFU: 0\.3%, device memory: 41\.00 of 80\.00 GiB \(peak\)$", line
    )
    assert curves.read_bytes().startswith(b"\x89PNG")
    assert list((tmp_path / "tensorboard").iterdir())

    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 30, "lo')  # a crash in the middle of a line
    resumed = reports(first_step=1)
    resumed.close()
    assert [record["step"] for record in read_metrics(tmp_path)] == [1]


def test_peak_flops_by_kind_of_tpu():
    """A v3-8 has 4 chips and 8 devices: 4 * 123 TFLOP/s, as Google's page has it."""
    assert 8 * peak_of("v3") == pytest.approx(4 * 123e12)
    assert 128 * peak_of("v4") == pytest.approx(128 * 275e12)
    assert peak_of("v99") is None


# -- arguments ------------------------------------------------------------------------


def test_flags_and_defaults_of_pytorch_xlas_example():
    """But for --ckpt_dir, which another user could make first, and the number of workers."""
    defaults = (
        "--data_dir /datasets/imagenet-1k --resume_epoch 0 --ckpt_epoch_interval 10 --lr 1e-3 "
        "--test_epoch_interval 10 --log_step_interval 20 --batch_size 1024 --num_epochs 300 "
        "--weight_decay 0.1 --clip_grad_norm 1 --warmup_steps 10000 --grad_ckpt full"
    )
    asked, same = read_flags([]), read_flags(defaults.split())
    assert flat(asked.run, asked.xla) == flat(same.run, same.xla)
    model = on_xla().model
    assert (model.name, model.overrides) == ("vit_10b", {})
    assert model.settings.items() >= asdict(VitConfig()).items()
    command = (
        "--data_dir D --fake_data --num_workers 1 --ckpt_dir C --resume_epoch 2 "
        "--ckpt_epoch_interval 3 --test_epoch_interval 4 --log_step_interval 5 --image_size 224 "
        "--patch_size 14 --embed_dim 5120 --mlp_ratio 4.0 --num_heads 32 --num_blocks 32 "
        "--pos_dropout 0.1 --att_dropout 0.2 --mlp_dropout 0.3 --num_classes 1000 "
        "--batch_size 1024 --num_epochs 300 --lr 1e-3 --weight_decay 0.1 --clip_grad_norm -1 "
        "--warmup_steps 10000 --no_grad_ckpt --no_reshard_after_forward --flatten_parameters "
        "--run_without_fsdp --shard_on_cpu --mark_step_after_forward"
    )
    found = open_model("vit_10b", read_flags(command.split()).run.model.overrides()).settings
    expected = VitConfig(pos_drop_rate=0.1, attn_drop_rate=0.2, proj_drop_rate=0.3)
    assert found.items() >= asdict(expected).items()


def test_a_flag_overrides_its_preset():
    found = on_xla("--model vit_base_patch16_224 --depth 3").model.settings
    assert (found["depth"], found["embed_dim"], found["class_token"]) == (3, 768, True)
    flags = "--model vit_base_patch16_224 --no-class_token --global_pool avg"
    assert not on_xla(flags).model.settings["class_token"]
