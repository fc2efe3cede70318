"""Map the tensor names of other programs to timm's.

Wrappers of PyTorch, a model inside another one, Hugging Face's ViT, and the HybridViT of
PhysicsNeMo's tutorial change names, not values.
"""

import re
from collections.abc import Iterable

from data.files import printable

_WRAPPERS = re.compile(
    r"(?:^|(?<=\.))(?:_orig_mod|_fsdp_wrapped_module|_fpw_module|_checkpoint_wrapped_module)\."
)
"""Modules that torch.compile, FSDP and activation checkpointing put around others."""
_IN_MODEL = re.compile(r"(|.*?\.)blocks\.0\.")
"""A name in the first block, which all models have; before it the path of the model."""

_IN_POS_EMBED = re.compile(r"(^|\.)pos_embed\.(pos_embed|cls_token|reg_token)$")
"""Parameters that NVIDIA's ViT recipe, otherwise with timm's names, has in a module of their own:
https://github.com/NVIDIA/bionemo-framework, recipes/vit."""

_HUGGING_FACE_PATCHES = "embeddings.patch_embeddings.projection."
_HUGGING_FACE_QKV = re.compile(r"\.attention\.(?:attention\.)?(query|key|value|[qkv]_proj)\.")
_HUGGING_FACE = [
    (re.compile(pattern), name)
    for pattern, name in (
        (r"(^|\.)embeddings\.cls_token$", r"\1cls_token"),
        (r"(^|\.)embeddings\.position_embeddings$", r"\1pos_embed"),
        (r"(^|\.)embeddings\.patch_embeddings\.projection\.", r"\1patch_embed.proj."),
        (_HUGGING_FACE_QKV.pattern, ".attn.qkv."),
        (r"\.attention\.(?:output\.dense|o_proj)\.", ".attn.proj."),
        (r"\.layer_scale([12])\.lambda1$", r".ls\1.gamma"),
        (r"\.layernorm_before\.", ".norm1."),
        (r"\.layernorm_after\.", ".norm2."),
        (r"\.intermediate\.dense\.", ".mlp.fc1."),
        (r"(\d)\.output\.dense\.", r"\1.mlp.fc2."),
        (r"(^|\.)(?:encoder\.layer|layers)\.(\d+)\.", r"\1blocks.\2."),
        (r"(^|\.)layernorm\.", r"\1norm."),
        (r"^classifier\.", "head."),
    )
]
"""ViT and DINOv2 of transformers, by the names of files (``encoder.layer.0``) and of modules since
version 5 (``layers.0``): https://github.com/huggingface/transformers, models/vit and dinov2."""

_PHYSICSNEMO = {"patch_embed.conv.": "patch_embed.proj.", "stages.": "blocks."}
"""Where the names of PhysicsNeMo's HybridViT differ, for images and for volumes:
https://github.com/NVIDIA/physicsnemo, docs/test_scripts/domain_parallelism/st_and_fsdp/model."""
_HYBRID_VIT = re.compile(
    r"pos_embed|(?:patch_embed\.(?:proj|norm)|head"
    r"|blocks\.\d+\.(?:norm[12]|attn\.(?:qkv|proj)|mlp\.fc[12]))\.(?:weight|bias)"
)
"""Our names of a HybridViT's tensors."""

NAMED = 3
"""The number of names that a message lists."""


def listed(names: Iterable[str], most: int = NAMED) -> str:
    """Return the first names as text, and how many more there are."""
    names = sorted(map(printable, names))
    more = f" and {len(names) - most:,} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def timm_names(names: Iterable[str]) -> tuple[dict[str, list[str]], str]:
    """Return timm's names of the model's tensors in a file, and a note for the log on what changed.

    Each name maps to the names in the file whose tensors, concatenated along the first dimension,
    form it: query, key and value are one tensor in timm. Names that are already timm's stay. If the
    model's names have a prefix (``backbone.``), tensors without it are left out, except for a head
    next to it. Raises ValueError if the file has two models, or two tensors for one name.
    """
    names, notes, left_out = list(names), [], []
    is_hugging_face = any(_HUGGING_FACE_PATCHES in name for name in names)
    is_physicsnemo = all(any(part in name for name in names) for part in _PHYSICSNEMO)
    is_recipes = any(map(_IN_POS_EMBED.search, names))
    found: dict[str, list[str]] = {}
    wrappers: dict[str, None] = {}  # a set in order
    for name in names:
        wrappers |= dict.fromkeys(_WRAPPERS.findall(name))
        plain = _IN_POS_EMBED.sub(r"\1\2", _WRAPPERS.sub("", name))
        if is_hugging_face:
            before = plain
            for pattern, ours in _HUGGING_FACE:
                plain = pattern.sub(ours, plain)
            if plain == before:
                left_out.append(name)
                continue
        if is_physicsnemo:
            for theirs, ours in _PHYSICSNEMO.items():
                plain = re.sub(rf"(^|\.){re.escape(theirs)}", rf"\g<1>{ours}", plain)
        found.setdefault(plain, []).append(name)
    for plain, parts in found.items():
        if is_hugging_face and plain.rpartition(".")[0].endswith(".attn.qkv"):
            parts.sort(key=_place_in_qkv)
        elif len(parts) > 1:
            raise ValueError(f"{parts[0]} and {parts[1]} both map to {plain}")
    if wrappers:
        notes.append(f"{', '.join(wrappers)} removed from names")
    if is_recipes:
        notes.append("pos_embed. of NVIDIA's ViT, whose norms have eps 1e-5, removed from names")
    if is_hugging_face:
        notes.append("names of Hugging Face's ViT replaced by timm's")
    if is_physicsnemo:
        notes.append("names of PhysicsNeMo's HybridViT replaced by timm's")

    prefix = _prefix_of({match[1] for name in found if (match := _IN_MODEL.match(name))})
    if prefix:
        notes.append(f"{prefix} removed from names")
        outer, dot, _ = prefix[:-1].rpartition(".")
        heads = {f"{outer}{dot}{name}": name for name in ("head.weight", "head.bias")}
        inside: dict[str, list[str]] = {}
        for name, parts in found.items():
            if name.startswith(prefix):
                inside[name.removeprefix(prefix)] = parts
            elif name in heads and f"{prefix}{heads[name]}" not in found:
                inside[heads[name]] = parts
            else:
                left_out += parts
        found = inside
    if left_out:
        notes.append(f"left out: {listed(left_out)}")
    return found, "; ".join(notes)


def unwrapped(name: str) -> str:
    """Return a name in a file without the modules that PyTorch puts around a whole model."""
    return _WRAPPERS.sub("", name).removeprefix("module.")


def physicsnemo_names(names: Iterable[str]) -> dict[str, str]:
    """Return the name in PhysicsNeMo's HybridViT of each tensor of ours. Raises ValueError if they
    are not a HybridViT's."""
    found = {}
    for name in names:
        if not _HYBRID_VIT.fullmatch(name):
            raise ValueError(f"a HybridViT has no {name}")
        changed = (
            theirs + name.removeprefix(ours)
            for theirs, ours in _PHYSICSNEMO.items()
            if name.startswith(ours)
        )
        found[name] = next(changed, name)
    if "patch_embed.norm.weight" not in found:
        raise ValueError("a HybridViT has patch_embed.norm.weight")
    return found


def _place_in_qkv(name: str) -> int:
    match = _HUGGING_FACE_QKV.search(name)
    assert match
    return "qkv".index(match[1][0])


def _prefix_of(prefixes: set[str]) -> str:
    """Return the prefix of the model, from those found in a file.

    Given a student and its teacher, it is the teacher's, which is the one to evaluate. Raises
    ValueError if the choice is ambiguous.
    """
    if len(prefixes) > 1 and "" not in prefixes:
        teachers = {prefix for prefix in prefixes if "teacher" in prefix.split(".")}
        if len(teachers) != 1:
            raise ValueError(
                f"it contains several models, {', '.join(sorted(prefixes))}: save the state dict "
                "of the one that you want to a separate file"
            )
        prefixes = teachers
    return "" if "" in prefixes else next(iter(prefixes), "")
