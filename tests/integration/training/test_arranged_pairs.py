"""``--objective siglip`` and ``clip`` with images of any size in sequences, in buckets and in sizes
of a schedule: against plain PyTorch, each image alone, with all pairs at once."""

import json

import pytest

from tests.support.cli import run_program, train_tiny, train_tiny_gpu, train_tiny_megatron
from tests.support.marks import long
from tests.support.native_images import TRAIN, VAL, write_captions, write_images

TOWERS = (
    "--model vit_tiny_patch16_224 --patch_size 4 --embed_dim 32 --num_heads 2 --num_blocks 2 "
    "--tokenizer bytes --text_depth 2 --text_width 32 --text_heads 2 --text_length 12 "
    "--num_epochs 1 --max_steps 3 --warmup_steps 1 --lr 1e-2 --hflip 0"
)
SEQUENCES = (
    "--native_resolution --image_size 24 --token_budget 80 --max_images_per_sequence 8 "
    "--batch_size 4"
)
FORMS = {
    # As SigLIP's models pool, by attention; and by a class token.
    "sequences": f"--objective siglip {SEQUENCES} --global_pool map --no-class_token",
    "clip": f"--objective clip {SEQUENCES} --text_vocab_size 257",
    "buckets": (
        "--objective siglip --image_size 16 --batch_size 8 --buckets 16x16 12x20 20x12 "
        "--global_pool map --no-class_token"
    ),
    "schedule": "--objective siglip --image_size 16 --batch_size 8 --image_size_schedule 8 16",
}


@pytest.fixture(scope="session")
def pairs(tmp_path_factory):
    """The flags of a run on images of many shapes with captions."""
    folder = write_images(tmp_path_factory.mktemp("native_pairs"))
    return ["--data_dir", str(folder), "--labels", str(write_captions(folder)), *TOWERS.split()]


@pytest.fixture(scope="session")
def plain(pairs, tmp_path_factory):
    """What plain PyTorch computes of a form."""
    known = {}

    def computed(form):
        if form not in known:
            flags = [*pairs, *FORMS[form].split(), "--ckpt_dir", str(tmp_path_factory.mktemp("no"))]
            done = run_program("-m", "tests.references.plain_image_text", *flags)
            assert done.returncode == 0, done.stderr
            known[form] = json.loads(done.stdout.splitlines()[-1])
        return known[form]

    return computed


def on_fsdp2(processes):
    return lambda *given: train_tiny_gpu(*given, processes=processes)


def on_xla(devices):
    return lambda *given: train_tiny(*given, devices=devices)


@pytest.mark.parametrize(
    ("form", "train", "more"),
    [
        ("sequences", on_fsdp2(2), "--grad_accum_steps 2"),
        ("sequences", on_xla(2), ""),
        ("buckets", on_fsdp2(2), "--grad_accum_steps 2"),
        long("sequences", on_fsdp2(1), ""),
        long("sequences", on_xla(2), "--grad_accum_steps 2 --no-scan_blocks"),
        long("sequences", on_xla(4), "--mesh_tensor 2"),
        long("clip", on_fsdp2(2), "--grad_accum_steps 2"),
        long("clip", on_xla(2), ""),
        long("buckets", on_xla(2), ""),
        long("sequences", train_tiny_megatron, "--grad_accum_steps 2"),
        long("sequences", on_xla(1), "--xla_fsdp nested"),
        long("clip", train_tiny_megatron, ""),
        long("buckets", train_tiny_megatron, "--grad_accum_steps 2"),
        long("buckets", on_xla(1), "--xla_fsdp nested --grad_accum_steps 2"),
        long("schedule", on_fsdp2(1), ""),
        long("schedule", on_xla(2), ""),
    ],
)
def test_training_is_a_loop_over_images(form, train, more, pairs, plain, tmp_path):
    expected = plain(form)
    result = train(tmp_path, *pairs, *FORMS[form].split(), *more.split())
    assert result.column("loss") == pytest.approx(expected["loss"], rel=2e-5)
    assert result.column("grad_norm") == pytest.approx(expected["grad_norm"], rel=1e-4)
    (evaluation,) = result.evaluations
    assert evaluation["val_images"] == VAL
    assert evaluation["val_loss"] == pytest.approx(expected["val_loss"], rel=1e-4)
    assert f"{TRAIN} training, {VAL} validation images" in result.stdout
    if "native_resolution" in FORMS[form]:
        assert len({*expected["images"]}) > 1  # the number of pairs is another in each step
        assert result.column("images") == expected["images"]
    elif form == "schedule":
        assert "image size of each step drawn at random from 8 x 8, 16 x 16" in result.stdout


@pytest.mark.long
def test_one_graph_and_a_resume_in_mid_epoch(pairs, tmp_path):
    """Sequences with other numbers of images in each step: bit-identical, and nothing compiles
    after the first step."""
    more = "--max_steps 8 --num_epochs 9 --side_scale 0.5 1.2 --patch_drop_rate 0.3".split()
    more += "--eval_batches 0 --test_epoch_interval 100".split()
    flags = [*pairs, *FORMS["sequences"].split(), *more]
    whole = train_tiny(tmp_path / "whole", *flags, devices=2)
    assert len({step["compilations"] for number, step in whole.steps.items() if number > 1}) == 1
    assert len({*whole.column("images")}) > 1
    train_tiny(tmp_path / "parts", *flags, "--max_steps", "4", devices=2)
    parts = train_tiny(tmp_path / "parts", *flags, devices=2)
    for name in ("loss", "grad_norm", "logit_scale", "images"):
        assert parts.column(name) == whole.column(name)
