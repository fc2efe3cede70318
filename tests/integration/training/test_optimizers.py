"""Optimizers and parameter groups, in every form of sharding, against timm's own on one model."""

import functools
import itertools
import math

import pytest
import timm
import torch
from timm.optim import Lion, Muon, param_groups_layer_decay

from models.registry import open_model
from tests.fakes.filled import SMALL, filled
from tests.references import plain_optimizers
from tests.references.plain_checkpoint import convert
from tests.support.cli import run_program, tiny, train_tiny, train_tiny_gpu
from tests.support.marks import long, spread
from tests.support.resolved import on_gpus, on_xla
from tests.support.usage_error import told_in_one_line
from training.config import OptimizerConfig
from training.optimizers import undecayed, updates_of

TIMMS = "--no_decay norms biases embeddings"
MODELS = [
    "vit_base_patch16_siglip_224",
    "vit_base_patch14_reg4_dinov2",
    "eva02_tiny_patch14_224",
    "vit_small_patch16_rope_mixed_224",
    "vit_small_patch16_dinov3",
]


@pytest.mark.parametrize("name", MODELS)
def test_groups_are_timms(name):
    """Of timm's real models: layer by layer, and what is not decayed."""
    with torch.device("meta"):
        model = timm.create_model(name, num_classes=1000)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    groups = param_groups_layer_decay(
        model, 0.05, model.no_weight_decay(), layer_decay=0.65, no_opt_scale=None
    )
    expected = {
        names[id(parameter)]: (group["lr_scale"], group["weight_decay"])
        for group in groups
        for parameter in group["params"]
    }
    config = OptimizerConfig(
        weight_decay=0.05, layer_decay=0.65, no_decay=["norms", "biases", "embeddings"]
    )
    found = updates_of(config, open_model(f"timm/{name}", {}))
    assert {n: (u.lr_scale, u.weight_decay) for n, u in found.items()} == expected
    assert len(set(expected.values())) > 20


def test_groups_of_the_own_model():
    """HybridViT has no norm behind its blocks: they lie between what makes tokens and the head."""
    spec = open_model("hybrid_vit", {"depth": 2, "img_size": 64})
    found = updates_of(OptimizerConfig(layer_decay=0.5, no_decay=["embeddings"]), spec)
    scales = {"pos_embed": 0.125, "patch_embed": 0.125, "blocks.0": 0.25, "blocks.1": 0.5}
    for name, update in found.items():
        scale = next((s for part, s in scales.items() if name.startswith(part)), 1.0)
        assert update.lr_scale == scale, name
        assert update.weight_decay == (0.0 if name == "pos_embed" else 0.1)


def test_kinds_that_do_not_decay():
    shapes = {"norm.weight": 1, "norm.bias": 1, "fc.weight": 2, "fc.bias": 1, "pos_embed": 3}
    sizes = {name: torch.Size([4] * dim) for name, dim in shapes.items()}
    found = functools.partial(undecayed, sizes, embeddings={"pos_*"})
    assert found(kinds=["norms"]) == {"norm.weight"}
    assert found(kinds=["biases"]) == {"norm.bias", "fc.bias"}
    assert found(kinds=["embeddings", "biases"]) == {"norm.bias", "fc.bias", "pos_embed"}
    assert found(kinds=()) == set()


def test_what_muon_leaves_to_adamw():
    spec = open_model("timm/vit_base_patch14_reg4_dinov2", SMALL)
    model = filled(spec)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer = Muon(model.parameters())
    optimizer.step()
    expected = {n: optimizer.state[p]["use_muon"] for n, p in model.named_parameters()}
    found = updates_of(OptimizerConfig(optimizer="muon"), spec)
    assert {name: update.rule == "muon" for name, update in found.items()} == expected
    assert expected["blocks.0.attn.qkv.weight"]
    assert expected["patch_embed.proj.weight"]
    assert not expected["pos_embed"]
    assert found["patch_embed.proj.weight"].matrix == (48, 3 * 8 * 8)


# -- training -------------------------------------------------------------------------

FORMS = {
    "scanned": (1, "--cpu_devices 4"),
    "unrolled": (1, "--cpu_devices 4 --no-scan_blocks --grad_accum_steps 2"),
    "tensor": (1, "--cpu_devices 4 --mesh_tensor 2 --num_blocks 3"),
    "nested": (1, "--xla_fsdp nested"),
    "fsdp2": (2, "--backend cuda --grad_accum_steps 2"),
    "hsdp": (4, "--backend cuda --dp_outer 2"),
    "traced": (3, "--backend cuda --fsdp simple --compile --batch_size 24"),
    "copies": (2, "--backend cuda --run_without_fsdp"),
    "megatron": (3, "--backend cuda --fsdp megatron --batch_size 24"),
    "outer": (4, "--backend cuda --fsdp megatron --dp_outer 2 --outer_dp_sharding_strategy 1"),
}
ASKED = {
    "muon": f"--optimizer muon --layer_decay 0.5 {TIMMS}",
    "lion": f"--optimizer lion --layer_decay 0.7 --lr 1e-3 {TIMMS}",
    "adamw": f"--layer_decay 0.5 {TIMMS} --clip_grad_norm 0.1",
    "probe": "--linear_probe --weight_decay 0.3",
    # Of 89 steps an epoch has here: 3 with the heads alone, then 2 of warmup.
    "heads": f"--freeze_backbone_epochs 0.034 --backbone_warmup_epochs 0.0225 {TIMMS}",
}
HEADS_FIRST = [0, 0, 0, 0, 0.5, 1]
"""The factor of the backbone's learning rate in each step of "heads"."""
QUICK = [("muon", "tensor"), ("muon", "traced"), ("heads", "scanned"), ("heads", "fsdp2")]


def train(folder, *flags, form):
    processes, of_form = FORMS[form]
    flags = [*" ".join(flags).split(), *of_form.split()]
    if "cuda" not in flags:
        return train_tiny(folder, *flags)
    return train_tiny_gpu(folder, *flags, processes=processes)


@functools.cache
def plain(flags, form, steps=6):
    """Of the form's flags, those that change what is computed."""
    words = FORMS[form][1].split()
    kept = [
        word
        for flag, value in itertools.pairwise(words)
        if flag in ("--num_blocks", "--batch_size")
        for word in (flag, value)
    ]
    heads_first = HEADS_FIRST if flags == ASKED["heads"] else None
    return plain_optimizers.train(*flags.split(), *kept, steps=steps, heads_first=heads_first)


@pytest.mark.parametrize(
    ("asked", "form"),
    [
        (asked, form) if (asked, form) in QUICK else long(asked, form)
        for asked, form in dict.fromkeys([*QUICK, *spread(ASKED, FORMS, every=3)])
        if not (asked == "probe" and form in ("megatron", "outer"))
        if (asked, form) != ("muon", "nested")
    ],
)
def test_like_timm(asked, form, tmp_path):
    result = train(tmp_path, ASKED[asked], form=form)
    expected, model, optimizer = plain(ASKED[asked], form)
    assert result.column("loss") == pytest.approx(expected["loss"], rel=1e-5)
    assert result.column("grad_norm") == pytest.approx(expected["grad_norm"], rel=1e-4)
    saved = convert(tmp_path / "step_6", tmp_path / "plain.pt")
    assert_same_state(saved, model, optimizer)
    # XLA's warning where it replicates a tensor to shard it otherwise.
    assert "Involuntary full rematerialization" not in result.stderr


def assert_same_state(saved, model, optimizer):
    """Weights, and the state of those that train, by timm's names for both."""
    asks_sign = isinstance(optimizer, Lion)
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    assert saved["optimizer"]["state"].keys() == trained.keys()
    for name, parameter in model.named_parameters():
        if name not in trained:
            assert torch.equal(saved["model"][name], parameter), name
            continue
        if asks_sign and name.endswith("qkv.bias"):
            continue  # of keys: its gradient is zero but for rounding, of which Lion takes the sign
        off = (saved["model"][name] - parameter.detach()).norm()
        assert off <= 1e-4 * parameter.norm(), name
        state = {n: t for n, t in optimizer.state[parameter].items() if n != "use_muon"}
        found = saved["optimizer"]["state"][name]
        assert found.keys() == state.keys()
        for entry, value in state.items():
            assert (found[entry] - value).norm() <= 1e-3 * value.norm() + 1e-6, (name, entry)


def test_of_an_autoencoder_the_decoder_comes_first(tmp_path):
    flags = "--objective mae --decoder_depth 1 --decoder_embed_dim 16 --decoder_num_heads 2"
    flags += " --freeze_backbone_epochs 1 --max_steps 3 --ckpt_step_interval 1"
    train_tiny_gpu(tmp_path, *flags.split())
    first, last = (convert(tmp_path / f"step_{n}", tmp_path / f"{n}.pt")["model"] for n in (1, 3))
    changed = {name for name in first if not torch.equal(first[name], last[name])}
    decoder = {name for name in first if name.startswith(("decoder_", "mask_token"))}
    assert changed == decoder


@pytest.mark.long
@pytest.mark.parametrize(
    ("asked", "form"),
    [
        ("muon", "scanned"),
        ("muon", "megatron"),
        ("lion", "fsdp2"),
    ],
)
def test_bf16_is_near_timms(asked, form, tmp_path):
    result = train(tmp_path, ASKED[asked], "--precision bf16", form=form)
    expected, *_ = plain(f"{ASKED[asked]} --precision bf16", form)
    exactly, *_ = plain(ASKED[asked], form)
    assert result.column("loss") == pytest.approx(expected["loss"], rel=0.03)
    assert result.column("loss") != pytest.approx(exactly["loss"], rel=1e-6)


@pytest.mark.long
def test_muon_resumes_elsewhere_and_no_other_optimizer_does(tmp_path):
    flags = [*ASKED["muon"].split(), "--max_steps"]
    expected, *_ = plain(ASKED["muon"], "scanned")
    train_tiny(tmp_path, *flags, "2", devices=4)
    train_tiny_gpu(tmp_path, *flags, "3", processes=2)
    train_tiny_gpu(tmp_path, *flags, "4", "--fsdp", "simple", "--compile", processes=4)
    last = train_tiny(tmp_path, *flags, "6", "--no-scan_blocks")
    assert last.column("loss") == pytest.approx(expected["loss"], rel=1e-5)
    for given, told in {
        "--optimizer adamw": "was trained with --optimizer muon, not adamw: use the same",
        "--linear_probe --layer_decay 1": "was trained without --linear_probe, but this run has --",
    }.items():
        done = run_program("run_vit_training.py", *tiny(tmp_path), *flags, "8", *given.split())
        assert done.returncode == 2
        assert told in done.stderr
        assert len(done.stderr.splitlines()) == 1


def test_betas_and_flops_follow():
    seconds = {"lion": 0.99, "muon": 0.95, "adamw": 0.999}
    for optimizer, second in seconds.items():
        for on in (on_xla, on_gpus):
            assert on(f"--optimizer {optimizer}").config.optimizer.betas == (0.9, second)
    assert on_xla("--optimizer lion --betas 0.5 0.6").config.optimizer.betas == (0.5, 0.6)
    probe, whole = on_xla("--linear_probe"), on_xla("")
    assert math.isclose(probe.train_flops_per_image, whole.train_flops_per_image / 3)


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        ("--optimizer muon --flatten_parameters", "--optimizer muon requires --xla_fsdp spmd"),
        ("--linear_probe --drop_path_rate 0.1", "incompatible with --drop_path_rate 0.1: set"),
        ("--backend cuda --fsdp megatron --linear_probe", "requires --fsdp fsdp2, not megatron"),
        ("--backend cuda --optimizer muon --cpu_offload", "is incompatible with --cpu_offload"),
    ],
)
def test_refused(flags, told, capsys, tmp_path):
    folder = tmp_path / "run"
    assert told in told_in_one_line(capsys, "--fake_data", *flags.split(), "--ckpt_dir", folder)
    assert not folder.exists()
