"""``--native_resolution``: images of any size and shape, several in a sequence, against timm's
NaFlexVit on each image alone."""

import json

import numpy as np
import pytest
import timm
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file

from data.batch import PADDING, BatchShard
from data.open import open_data
from tests.fakes.filled import filled
from tests.references.plain_steps import train_by, warm_cosine
from tests.support.cli import (
    HAS_XLA,
    run_program,
    train_tiny,
    train_tiny_gpu,
    train_tiny_megatron,
)
from tests.support.marks import long
from tests.support.native_images import (
    CLASSES,
    TRAIN,
    VAL,
    flags,
    images_in,
    logits_of,
    timms,
    write_images,
)
from tests.support.resolved import on_gpus
from tests.support.usage_error import told_in_one_line
from training.data import dataset_request
from training.weights.find import find


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    return write_images(tmp_path_factory.mktemp("native"))


def train_timm(run, steps):
    """The losses, norms and numbers of images of a loop over images, one at a time, and the loss
    and accuracy of the validation images after it."""
    how, model = run.config.optimizer, timms(run.model)
    model.load_state_dict(filled(run.model, run.config.seed).state_dict())
    optimizer = torch.optim.AdamW(model.parameters(), lr=how.lr, weight_decay=how.weight_decay)
    counts = []

    def losses_of(step, batch):
        images, labels = images_in(batch), batch["target"][batch["target"] != PADDING]
        counts.append(len(images))
        logits = torch.cat([logits_of(model, *image, run) for image in images])
        yield F.cross_entropy(logits, labels)

    losses, norms = train_by(losses_of, optimizer, run, steps, warm_cosine(how))
    model.eval()
    total = right = count = 0
    data = open_data(dataset_request(run))
    for batch in data.val_loader(run.config.data.batch_size, BatchShard()).epoch(0):
        images, labels = images_in(batch), batch["target"][batch["target"] != PADDING]
        if images:
            with torch.no_grad():
                logits = torch.cat([logits_of(model, *image, run) for image in images])
            total += F.cross_entropy(logits, labels, reduction="sum").item()
            right += (logits.argmax(1) == labels).sum().item()
            count += len(labels)
    assert count == VAL
    return losses, norms, counts, total / count, 100 * right / count


@pytest.fixture(scope="session")
def by_timm(folder, tmp_path_factory):
    run = on_gpus([*flags(folder), "--ckpt_dir", str(tmp_path_factory.mktemp("none"))])
    return train_timm(run, 3)


def on_fsdp2(processes):
    return lambda *given: train_tiny_gpu(*given, processes=processes)


def on_xla(devices):
    return lambda *given: train_tiny(*given, devices=devices)


@pytest.mark.parametrize(
    ("train", "how"),
    [
        (on_fsdp2(1), ""),
        (on_xla(2), ""),
        *(
            long(*case)
            for case in [
                (on_fsdp2(2), "--grad_accum_steps 2"),
                (on_fsdp2(2), "--zero_dp_strategy 2 --grad_ckpt none"),
                (on_xla(1), ""),
                (on_xla(4), ""),
                (on_xla(2), "--grad_accum_steps 2 --no-scan_blocks"),
                (on_xla(4), "--mesh_tensor 2"),
                (on_xla(1), "--xla_fsdp nested"),
                (train_tiny_megatron, ""),
            ]
        ),
    ],
)
def test_training_is_a_loop_over_images(train, how, by_timm, folder, tmp_path):
    losses, norms, counts, val_loss, val_top1 = by_timm
    result = train(tmp_path, *flags(folder), *how.split())
    assert result.column("loss") == pytest.approx(losses, rel=1e-5)
    assert result.column("grad_norm") == pytest.approx(norms, rel=1e-4)
    assert result.column("images") == counts
    (evaluation,) = result.evaluations
    assert evaluation["val_images"] == VAL
    assert evaluation["val_loss"] == pytest.approx(val_loss, rel=1e-4)
    assert evaluation["val_top1"] == pytest.approx(val_top1)
    assert (
        f"{TRAIN} training, {VAL} validation images; packed into sequences of 80 tokens"
        in result.stdout
    )
    last = result.steps[3]
    assert last["images_per_s"] == pytest.approx(last["images"] / last["sec_per_iter"])
    assert last["tokens_per_s"] == pytest.approx(last["tokens"] / last["sec_per_iter"])


MORE = "--side_scale 0.5 1.2 --patch_drop_rate 0.3 --hflip 0.5 --color_jitter 0.2 --max_steps 12"


@pytest.mark.parametrize("devices", [2, pytest.param(4, marks=pytest.mark.long)])
def test_one_graph_and_a_resume_in_mid_epoch(devices, folder, tmp_path):
    """Random sizes, dropped patches, dropout and an average: bit-identical, and nothing compiles
    after the first step."""
    more = [*MORE.split(), *"--num_epochs 9 --model_ema --pos_dropout 0.1 --smoothing 0.1".split()]
    more += "--eval_batches 0 --test_epoch_interval 100".split()
    whole = train_tiny(tmp_path / "whole", *flags(folder, *more), devices=devices)
    assert len({step["compilations"] for number, step in whole.steps.items() if number > 1}) == 1
    assert whole.steps[12]["epoch"] > 1
    train_tiny(tmp_path / "parts", *flags(folder, *more, "--max_steps", "5"), devices=devices)
    parts = train_tiny(tmp_path / "parts", *flags(folder, *more), devices=devices)
    assert parts.column("loss") == whole.column("loss")
    assert parts.column("tokens") == whole.column("tokens")


def test_uses_of_a_trained_model(folder, tmp_path):
    """Evaluation, prediction and features on both backends are timm's, of each image alone."""
    train_tiny_gpu(tmp_path / "run", *flags(folder, "--max_steps", "2"))
    trained = tmp_path / "run" / "step_2"
    data = ["--data_dir", str(folder), "--batch_size", "4"]
    run = on_gpus([*flags(folder), "--ckpt_dir", str(tmp_path / "none")])
    model = timms(run.model)
    weights = find(trained, "--resume")
    model.load_state_dict(weights.read([*model.state_dict()]))
    model.eval()
    tokens: list[torch.Tensor] = []
    model.norm.register_forward_hook(lambda _, __, output: tokens.append(output))
    request = dataset_request(run, augment=False)
    images = open_data(request).splits["val"]
    expected, features, numbers = [], [], []
    for batch in images.batches(4, BatchShard()).epoch(0):
        numbers += batch["index"][batch["index"] != PADDING].tolist()
        for patches, places in images_in(batch):
            with torch.no_grad():
                expected.append(logits_of(model, patches, places, run)[0])
            features.append((tokens[-1][0, 0], tokens[-1][0, 1:].mean(0)))
    assert sorted(numbers) == [*range(VAL)]
    labels = images.labels[numbers]

    told = ["--predict", str(folder / "val"), "--json", "--resume", str(trained)]
    done = run_program("run_vit_training.py", *told)
    assert done.returncode == 0, done.stderr
    answers = {each["image"]: each["top5"] for each in json.loads(done.stdout)}
    for number, logits in zip(numbers, expected, strict=True):
        top = answers[images.name_of(number)]
        probabilities = {each["index"]: each["probability"] for each in top}
        for label, probability in enumerate(logits.softmax(0).tolist()):
            assert probabilities[label] == pytest.approx(probability, rel=1e-4)

    loss = F.cross_entropy(torch.stack(expected), torch.tensor(labels).long()).item()
    on_xla = [["--backend", "xla", "--cpu_devices", "2"]] if HAS_XLA else []
    for backend in (["--backend", "cuda"], *on_xla):
        told = ["--eval_only", "--json", "--eval_report", str(tmp_path / f"report{backend[1]}")]
        done = run_program("run_vit_training.py", *told, "--resume", str(trained), *data, *backend)
        assert done.returncode == 0, done.stderr
        figures = json.loads(done.stdout.splitlines()[-1])
        assert figures["val_images"] == VAL
        assert figures["val_loss"] == pytest.approx(loss, rel=1e-4)
        rows = (tmp_path / f"report{backend[1]}" / "per_class.csv").read_text().splitlines()
        assert [int(row.split(",")[2]) for row in rows[1:]] == np.bincount(labels).tolist()

        out = tmp_path / f"features{backend[1]}"
        told = ["--features", str(out), "--init_from", str(trained)]
        done = run_program("run_vit_training.py", *told, *data, *backend)
        assert done.returncode == 0, done.stdout + done.stderr
        values = load_file(out / "val-00000-00000.safetensors")
        assert sorted(values["number"].tolist()) == sorted(numbers)
        order = [values["number"].tolist().index(number) for number in numbers]
        for place, kind in enumerate(("class", "mean")):
            theirs = torch.stack([both[place] for both in features])
            torch.testing.assert_close(values[kind][order], theirs, rtol=1e-4, atol=1e-4)


def test_weights_of_a_plain_model(folder, tmp_path):
    plain = timm.create_model(
        "vit_tiny_patch16_224", img_size=24, patch_size=4, embed_dim=32, depth=2, num_heads=2,
        num_classes=CLASSES,
    )  # fmt: skip
    save_file(plain.state_dict(), tmp_path / "plain.safetensors")
    more = ["--init_from", str(tmp_path / "plain.safetensors"), "--max_steps", "1", "--lr", "0"]
    result = train_tiny_gpu(tmp_path / "run", *flags(folder, *more))
    assert "moved: embeds.cls_token from cls_token" in result.stdout
    saved = find(tmp_path / "run" / "step_1", "--resume")
    values = saved.read(["embeds.pos_embed", "embeds.proj.weight", "embeds.cls_token"])
    positions = plain.pos_embed.detach()
    assert values["embeds.pos_embed"].flatten(1, 2).equal(positions[:, 1:])
    weight = plain.patch_embed.proj.weight.detach().permute(0, 2, 3, 1).flatten(1)
    assert values["embeds.proj.weight"].equal(weight)
    assert values["embeds.cls_token"].equal((plain.cls_token + positions[:, :1]).detach())


@pytest.mark.parametrize("train", [on_fsdp2(1), long(on_xla(2))])
def test_fake_data_and_self_check(train, folder, tmp_path):
    fake = [*flags(folder, "--fake_data", "--eval_batches", "1")]
    result = train(tmp_path / "run", *fake)
    # Two images of 6 x 6 patches and a class token are in a sequence of 80.
    assert result.column("images") == [8, 8, 8]
    assert result.column("tokens") == [8 * 37] * 3
    words = ["--backend", "cuda"] if train is not on_xla else []
    done = run_program("run_vit_training.py", "--self_check", *flags(folder), *words, "--ckpt_dir",
                       str(tmp_path / "run2"))  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert "self check passed" in done.stdout


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        ("--objective mae", "--objective mae is incompatible with native resolution"),
        ("--objective dino", "--objective dino is incompatible with native resolution"),
        ("--mesh_domain 2 --cpu_devices 2", "--mesh_domain 2 is incompatible with native"),
        ("--buckets 24x24", "--buckets is incompatible with native resolution"),
        ("--image_size_schedule 24 16", "--image_size_schedule is incompatible with native"),
        ("--mixup 0.2", "--mixup is incompatible with native resolution"),
        ("--aug_repeats 2", "--aug_repeats is incompatible with native resolution"),
        ("--bce_loss", "--bce_loss is incompatible with native resolution"),
        ("--token_budget 1", "is too small: the 1 class and register tokens"),
        ("--max_tokens_per_image 81", "81 exceeds --token_budget 80"),
        ("--max_tokens_per_image 1", "leaves no room for patches after the 1 class and register"),
        ("--side_scale 2 1", "the minimum must not exceed the maximum"),
        ("--batch_size 400", "fewer than one batch"),
        ("--model hybrid_vit", "hybrid_vit does not accept --native_resolution"),
        ("--model timm/vit_small_patch16_rope_mixed_224", "timm's RotaryEmbeddingMixed"),
        ("--data_source volumes", "--data_source volumes provides arrays"),
        ("--backend cuda --block te", "--block te is incompatible with native resolution"),
        ("--backend cuda --channels_last", "--channels_last is incompatible with native"),
    ],
)
def test_refused_in_one_line(wrong, told, folder, tmp_path, capsys):
    words = flags(folder, "--ckpt_dir", str(tmp_path / "none"), *wrong.split())
    assert told in told_in_one_line(capsys, *words)
    assert not (tmp_path / "none").exists()


def test_what_only_sequences_have_is_refused_elsewhere(folder, tmp_path, capsys):
    plain = "--image_size 24 --patch_size 4 --embed_dim 32 --num_heads 2 --num_blocks 2".split()
    for flag in (
        *("--token_budget 80", "--max_images_per_sequence 2", "--max_tokens_per_image 9"),
        *("--resize_to_budget", "--side_scale 0.5 1"),
    ):
        words = [*plain, "--data_dir", folder, "--ckpt_dir", tmp_path / "none", *flag.split()]
        assert "requires --native_resolution" in told_in_one_line(capsys, *words)
