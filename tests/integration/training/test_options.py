"""Model options in every form, precision and way of recomputing, against plain PyTorch.

`make test-long` runs cases in which every pair of values meets (``tests/support/option_cases.py``).
"""

from dataclasses import fields

import pytest
import torch
from timm.models.vision_transformer import VisionTransformer

from models.config import VitConfig
from tests.fakes.filled import filled
from tests.references import plain_steps
from tests.support.cli import (
    DIGITS,
    TINY_MODEL,
    TINY_RUN,
    train_tiny,
    train_tiny_gpu,
)
from tests.support.marks import long
from tests.support.option_cases import DROPOUT, FORMS, HOW, MODEL, ON_GPU, allowed, pairwise
from tests.support.resolved import on_xla

STEPS = 2
RUN = [*f"--max_steps {STEPS} --warmup_steps 0 --lr 1e-3 --scale 0.8 1".split()]
LOSS_REL = {"fp32": 2e-5, "bf16": 0.02}
NORM_REL = {"fp32": 1e-3, "bf16": 0.1}
NORMS = {"fp32": STEPS, "bf16": 1}
"""Steps whose norms are compared: AdamW's first update is the gradients' signs, in bf16 noise."""


def train(folder, case):
    options = [flags for name, flags in case.items() if name != "form"]
    flags = [*RUN, *" ".join([FORMS[case["form"]], *options]).split()]
    if case["form"] in ON_GPU:
        return train_tiny_gpu(folder, *flags, processes=2)
    return train_tiny(folder, *flags)


def plain(case):
    """Losses and gradient norms of timm's model and PyTorch's AdamW, under autocast for bf16."""
    options = [flag for name, flags in case.items() if name in MODEL for flag in flags.split()]
    source = ["--data_dir", str(DIGITS), "--hflip", "0"]
    run = on_xla([*source, *TINY_MODEL, *TINY_RUN, *RUN, *options])
    how = run.config.optimizer
    arguments = {each.name: run.model.settings[each.name] for each in fields(VitConfig)}
    model = VisionTransformer(**arguments | {"weight_init": "skip"})
    model.load_state_dict(filled(run.model, run.config.seed).state_dict())
    optimizer = torch.optim.AdamW(model.parameters(), lr=how.lr, weight_decay=how.weight_decay)
    return plain_steps.train(model, optimizer, run, STEPS, bf16="bf16" in case["precision"])


def assert_like_plain_pytorch(folder, case):
    result = train(folder, case)
    losses, norms = plain(case)
    precision = case["precision"].split()[1]
    assert result.column("loss") == pytest.approx(losses, rel=LOSS_REL[precision])
    compared = slice(NORMS[precision])
    rel = NORM_REL[precision]
    if precision == "bf16" and case.get("qk_norm") and "--reg_tokens" in case.get("prefix", ""):
        # Registers begin at 1e-6: two norms, which divide by their eps, make their gradients, and
        # the rounding in them, a million times as large.
        rel = 0.5
    found = result.column("grad_norm")[compared]
    assert found == pytest.approx(norms[compared], rel=rel)


def name_of(case):
    return " ".join(filter(None, case.values()))


BF16 = {"precision": "--precision bf16", "recompute": "--grad_ckpt full", "qk_norm": "--qk_norm"}
SCALE, NORM = "--init_values 1", "--scale_attn_norm"


@pytest.mark.parametrize(
    "case",
    [
        *map(
            long,
            [
                {"form": "scanned", **BF16, "pool": "--global_pool map", "layer_scale": SCALE},
                {"form": "unrolled", **BF16, "positions": "--pos_embed none"},
                {"form": "nested", **BF16, "mlp": "--scale_mlp_norm", "attention": NORM},
            ],
        ),
        {"form": "tensor scanned", **BF16, "prefix": "--class_token --reg_tokens 3"},
    ],
    ids=name_of,
)
def test_norms_of_queries_and_keys_in_bf16(case, tmp_path):
    """Autocast on XLA left queries and keys in fp32, values in bf16."""
    assert_like_plain_pytorch(tmp_path, case)


@pytest.mark.long
@pytest.mark.parametrize("case", pairwise({**HOW, **MODEL}, allowed), ids=name_of)
def test_pairs(case, tmp_path):
    assert_like_plain_pytorch(tmp_path, case)


@pytest.mark.long
@pytest.mark.parametrize("case", pairwise({**HOW, **DROPOUT}, allowed), ids=name_of)
def test_pairs_with_dropout(case, tmp_path):
    first, again = (train(tmp_path / name, case) for name in ("first", "again"))
    assert all(torch.tensor(first.column("loss") + first.column("grad_norm")).isfinite())
    assert again.column("loss") == first.column("loss")
    assert again.column("grad_norm") == first.column("grad_norm")
