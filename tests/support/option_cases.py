"""Model options, precision, form and recomputation, combined so that every pair meets once."""

import random
from collections.abc import Callable, Iterator
from itertools import combinations

Case = dict[str, str]

FORMS = {
    "scanned": "--cpu_devices 2",
    "unrolled": "--cpu_devices 2 --no-scan_blocks",
    "nested": "--xla_fsdp nested",
    "tensor scanned": "--cpu_devices 4 --mesh_tensor 2",
    "fsdp2": "--backend cuda --fsdp fsdp2",
    "megatron": "--backend cuda --fsdp megatron",
}
ON_GPU = ("fsdp2", "megatron")

HOW = {
    "form": list(FORMS),
    "precision": ["--precision fp32", "--precision bf16"],
    "recompute": ["--grad_ckpt full", "--grad_ckpt none", "--grad_ckpt selective"],
    "moments": ["", "--optimizer_dtype bf16"],
    "gather": ["", "--gather_dtype fp8"],
}
MODEL = {
    "qk_norm": ["", "--qk_norm"],
    "attention": ["", "--scale_attn_norm"],
    "mlp": ["", "--scale_mlp_norm", "--mlp_ratio 2.5"],
    "bias": ["", "--no-qkv_bias", "--no-proj_bias"],
    "layer_scale": ["", "--init_values 0.1"],
    "prefix": [
        "",
        "--class_token",
        "--class_token --reg_tokens 3 --no_embed_class",
        "--reg_tokens 2 --pool_include_prefix",
    ],
    "pool": [
        "--global_pool avg",
        "--global_pool token",
        "--global_pool map",
        "--global_pool avgmax",
    ],
    "norms": ["", "--pre_norm", "--fc_norm", "--no-final_norm"],
    "positions": ["", "--pos_embed none"],
    "channels": ["", "--in_chans 1"],
    "init": ["", "--weight_init jax_nlhb"],
}
DROPOUT = {
    "dropout": [
        "--drop_path_rate 0.2",
        "--patch_drop_rate 0.5",
        "--mlp_dropout 0.1 --pos_dropout 0.1 --drop_rate 0.1",
        "--att_dropout 0.2",
    ],
}


def allowed(case: Case) -> bool:
    """Whether the program takes it, as far as it is filled in."""
    form, recompute = case.get("form"), case.get("recompute", "")
    scanned = bool(form) and "scanned" in form
    if form and "selective" in recompute and not scanned and form not in ON_GPU:
        return False
    # With fp32 it is taken, too, but rounds more than the comparison allows.
    refused = (form and not scanned) or "fp32" in case.get("precision", "")
    if case.get("gather") and refused:
        return False
    pools_token = "token" in case.get("pool", "")
    return not (pools_token and "--class_token" not in case.get("prefix", "--class_token"))


def pairs(case: Case) -> Iterator[frozenset]:
    yield from (frozenset(pair) for pair in combinations(case.items(), 2))


def pairwise(
    factors: dict[str, list[str]], allowed: Callable[[Case], bool], seed: int = 0, tries: int = 20
) -> list[Case]:
    """Cases in which every pair of values that is allowed is together at least once.

    Greedy: of some cases that begin with an uncovered pair, and are filled up, factor by factor in
    random order, with the value that covers most, the one that covers most.
    """
    draw = random.Random(seed)
    open_pairs = {
        frozenset(((a, x), (b, y)))
        for a, b in combinations(factors, 2)
        for x in factors[a]
        for y in factors[b]
        if allowed({a: x, b: y})
    }
    found = []
    while open_pairs:
        begin = sorted(open_pairs, key=sorted)
        candidates = [
            _fill(factors, allowed, dict(sorted(draw.choice(begin))), open_pairs, draw)
            for _ in range(tries)
        ]
        best = max(candidates, key=lambda case: len(open_pairs.intersection(pairs(case))))
        found.append({name: best[name] for name in factors})
        open_pairs.difference_update(pairs(best))
    return found


def _fill(factors, allowed, case: Case, open_pairs: set[frozenset], draw: random.Random) -> Case:
    names = [name for name in factors if name not in case]
    draw.shuffle(names)
    for name in names:
        values = [value for value in factors[name] if allowed({**case, name: value})]
        draw.shuffle(values)
        case[name] = max(
            values,
            key=lambda value: sum(
                frozenset(((name, value), item)) in open_pairs for item in case.items()
            ),
        )
    return case
