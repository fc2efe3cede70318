"""What a block is made of: its attention's product, whether blocks are alike, the logical axes of
its parameters, and whether TransformerEngine's layer or FP8 products may take their place."""

import inspect
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from timm.layers import (
    Attention,
    AttentionRope,
    DropPath,
    GluMlp,
    Mlp,
    SwiGLU,
    apply_rot_embed_cat,
)
from timm.models.eva import EvaAttention, EvaBlock, EvaBlockPostNorm
from timm.models.vision_transformer import Block, ResPostBlock
from torch import nn
from torch.overrides import TorchFunctionMode

# ------------------------------------------------------------------------------------------------
# The product of attention: another function instead of PyTorch's, put in from outside of a
# model.


Product = Callable[..., torch.Tensor]
"""A function of queries, keys and values that computes what attention does with them. One that can
keep several images of a sequence apart also takes ``segments``, the number of each token's image:
int32 (batch, tokens), or None."""


def attentions(module: nn.Module) -> Iterator[nn.Module]:
    """Yield the modules of timm's in ``module``, it among them, that compute attention."""
    return (part for part in module.modules() if hasattr(part, "fused_attn"))


def use_product(attention: nn.Module, product: Product) -> None:
    """Let one module of timm's attention compute its product by ``product``. Call it on the module
    that will run: a copy of it would run the original."""
    # timm's own products, by TIMM_FUSED_ATTN=0, would not be seen.
    attention.fused_attn = True  # type: ignore[assignment]
    forward, mode = attention.forward, _ByProduct(product)

    def forward_with_mode(*args, **kwargs):
        with mode:
            return forward(*args, **kwargs)

    attention.forward = forward_with_mode


class _ByProduct(TorchFunctionMode):
    """Replaces ``scaled_dot_product_attention`` as far as a ViT uses it."""

    def __init__(self, product: Product) -> None:
        super().__init__()
        self._product = product
        self._takes_segments = "segments" in inspect.signature(product).parameters

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is F.scaled_dot_product_attention:
            return self._attention(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))

    def _attention(self, q, k, v, attn_mask=None, dropout_p: float = 0.0, is_causal: bool = False):
        if dropout_p or is_causal:
            raise NotImplementedError("attention dropout and causal attention are not supported")
        if attn_mask is None:
            return self._product(q, k, v)
        if not (is_segments(attn_mask) and self._takes_segments):
            raise NotImplementedError("this attention mask is not supported")
        return self._product(q, k, v, segments=attn_mask)


def is_segments(attn_mask: torch.Tensor) -> bool:
    """Return whether a mask is the number of each token's image, int32 (batch, tokens)."""
    return attn_mask.dtype == torch.int32 and attn_mask.dim() == 2


Qkv = torch.Tensor | Sequence[torch.Tensor]
"""Queries, keys and values, (batch, tokens, heads x width): in one tensor, or each in its own."""
Attend = Callable[[Any, Qkv, torch.Tensor | None, torch.Tensor | None], torch.Tensor]
"""A function of a module of timm's attention, what its layers make of tokens, rotary positions and
the mask, both None if there are none: what the layers after it are given, (batch, tokens, heads x
width)."""


def use_attend(attention: nn.Module, attend: Attend) -> bool:
    """Let one module of timm's attention compute all between its layers by ``attend``, without
    heads in front of tokens, if its layers are known here; return whether they are."""
    as_many_keys = getattr(attention, "num_kv_groups", 1) == 1
    if type(attention) not in (Attention, AttentionRope, EvaAttention) or not as_many_keys:
        return False

    def forward(
        attn: Any,
        x: torch.Tensor,
        rope: torch.Tensor | None = None,
        attn_mask: torch.Tensor | None = None,
        is_causal: bool = False,
    ) -> torch.Tensor:
        if is_causal:
            raise NotImplementedError("causal attention is not supported")
        gate = attn.gate(x).sigmoid() if attn.gate is not None else None
        qkv: Qkv
        if attn.qkv is None:
            qkv = [layer(x) for layer in (attn.q_proj, attn.k_proj, attn.v_proj)]
        elif getattr(attn, "q_bias", None) is None:
            qkv = attn.qkv(x)
        else:
            bias = torch.cat([attn.q_bias, attn.k_bias, attn.v_bias])  # Eva has it beside the layer
            if attn.qkv_bias_separate:
                qkv = attn.qkv(x) + bias
            else:
                qkv = F.linear(x, attn.qkv.weight, bias)
        y = attn.norm(attend(attn, qkv, rope, attn_mask))
        return attn.proj_drop(attn.proj(y if gate is None else y * gate))

    attention.forward = types.MethodType(forward, attention)
    return True


def queries_keys_values(
    attn: Any, qkv: Qkv, rope: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return queries, keys and values, (batch, tokens, heads, width), normalized and rotated.

    ``qkv`` are the three, (batch, tokens, heads x width), or all in one, side by side or as
    (batch, tokens, 3, heads x width). ``rope`` is (patches, 2 x width), and before these may have
    heads, and images before heads; class and register tokens are not rotated.
    """
    if isinstance(qkv, torch.Tensor):
        qkv = qkv.chunk(3, -1) if qkv.dim() == 3 else qkv.unbind(2)
    q, k, v = (part.unflatten(2, (attn.num_heads, -1)) for part in qkv)
    q, k = attn.q_norm(q), attn.k_norm(k)
    if rope is None:
        return q, k, v
    rope = rope.unsqueeze(1) if rope.dim() == 2 else rope.transpose(-2, -3)

    def rotate(x: torch.Tensor) -> torch.Tensor:
        prefix, patches = x.tensor_split([attn.num_prefix_tokens], 1)
        patches = apply_rot_embed_cat(patches, rope, half=attn.rotate_half)
        return torch.cat([prefix, patches], 1).type_as(v)

    return rotate(q), rotate(k), v


def combine_parts(
    output: torch.Tensor,
    statistics: torch.Tensor,
    part_output: torch.Tensor,
    part_statistics: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return attention to the keys of two parts together, of attention to each: online softmax
    (Milakov, Gimelshein, arXiv 1805.02867). Outputs are fp32 (..., queries, width), statistics
    log(sum(exp(scores))) of each query, fp32 (..., queries)."""
    # torch.logaddexp, which neither torch_xla 2.9 nor torch_tpu 0.2.0 has.
    largest = torch.maximum(statistics, part_statistics)
    sums = (statistics - largest).exp() + (part_statistics - largest).exp()
    together = largest + sums.log()
    output = output * (statistics - together).exp()[..., None]
    output += part_output * (part_statistics - together).exp()[..., None]
    return output, together


# ------------------------------------------------------------------------------------------------
# Whether blocks are alike.


def blocks_differ(blocks: Sequence[nn.Module], *, settings: bool = True) -> str | None:
    """Return a line that names the first block that differs from block 0, and how; None if none: in
    its class and the shapes of parameters; with ``settings`` also in its modules and their plain
    values. Probabilities of drop path may differ."""
    first: dict[str, Any] = {}
    for index, block in enumerate(blocks):
        # Classes, shapes and values in the block, by the names that the message uses.
        facts: dict[str, Any] = {"the block": type(block).__name__}
        facts |= {name: tuple(parameter.shape) for name, parameter in block.named_parameters()}
        for name, part in block.named_modules() if settings else ():
            if isinstance(part, DropPath | nn.Identity):  # one may replace the other
                continue
            facts[name or "the block"] = type(part).__name__
            for key, value in vars(part).items():
                plain = isinstance(value, bool | int | float | str | tuple)
                if plain and not key.startswith("_"):
                    facts[f"{name}.{key}" if name else key] = value
        first = first or facts
        for what in [*first, *facts]:
            here, there = facts.get(what, "missing"), first.get(what, "missing")
            if here != there:
                return f"{what} is {here} in block {index}, but {there} in block 0"
    return None


def drop_path_rates(blocks: Sequence[nn.Module]) -> dict[str, list[float]]:
    """Return the probabilities of drop path in all of the alike ``blocks``, by the names of the
    last one's; 0 where another module takes its place."""
    return {
        name: [getattr(block.get_submodule(name), "drop_prob", 0.0) for block in blocks]
        for name, part in blocks[-1].named_modules()
        if isinstance(part, DropPath)
    }


# ------------------------------------------------------------------------------------------------
# The logical axes of a block's parameters, for tensor parallelism.


FOLDED = {"qkv": 3, "glu": 2}
"""Logical axes that timm folds into the one behind them, with their sizes: queries, keys and
values; the two factors of a gated MLP."""

_PROJECTIONS = ("attn.q_proj", "attn.k_proj", "attn.v_proj")
_WIDENING = ("mlp.fc1", "mlp.fc1_g", "mlp.fc1_x")

_LOGICAL_AXES: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("norm1.weight", "norm1.bias", "norm2.weight", "norm2.bias"), ("width",)),
    **dict.fromkeys(("ls1.gamma", "ls2.gamma", "gamma_1", "gamma_2"), ("width",)),
    "attn.qkv.weight": ("qkv", "heads", "width"),
    "attn.qkv.bias": ("qkv", "heads"),
    **{f"{name}.weight": ("heads", "width") for name in _PROJECTIONS},
    **{f"{name}.bias": ("heads",) for name in _PROJECTIONS},
    **dict.fromkeys(("attn.q_bias", "attn.v_bias"), ("heads",)),
    **dict.fromkeys(("attn.q_norm.weight", "attn.q_norm.bias"), ("head",)),
    **dict.fromkeys(("attn.k_norm.weight", "attn.k_norm.bias"), ("head",)),
    **dict.fromkeys(("attn.norm.weight", "attn.norm.bias"), ("heads",)),
    "attn.proj.weight": ("width", "heads"),
    "attn.proj.bias": ("width",),
    **{f"{name}.weight": ("hidden", "width") for name in _WIDENING},
    **{f"{name}.bias": ("hidden",) for name in _WIDENING},
    **dict.fromkeys(("mlp.norm.weight", "mlp.norm.bias"), ("hidden",)),
    "mlp.fc2.weight": ("width", "hidden"),
    "mlp.fc2.bias": ("width",),
}
_GATED: dict[str, tuple[str, ...]] = {
    "mlp.fc1.weight": ("glu", "hidden", "width"),
    "mlp.fc1.bias": ("glu", "hidden"),
}
"""The same where one layer computes both factors of the MLP."""


def logical_axes(block: nn.Module) -> dict[str, tuple[str, ...]]:
    """Return the logical axes of each parameter; none where ``why_no_tensor_parallel`` says why.

    "width" (of the model), "heads" (all heads side by side), "head" (one head), "hidden" (of the
    MLP): ``training.mesh.LOGICAL_AXIS_RULES`` says which mesh axes shard each. An axis of
    ``FOLDED`` is folded into the next one: the parameter has one dimension fewer than axes.
    """
    if why_no_tensor_parallel(block):
        return {}
    known = _LOGICAL_AXES | (_GATED if isinstance(block.mlp, GluMlp) else {})
    return {name: known[name] for name, _ in block.named_parameters()}


def packed_parts(dimensions: Mapping[str, Sequence[str]]) -> dict[str, int]:
    """Return the parameters whose logical axes are folded into one, (parts * rows, ...), with their
    parts."""
    return {name: FOLDED[kinds[0]] for name, kinds in dimensions.items() if kinds[0] in FOLDED}


def why_no_tensor_parallel(block: nn.Module) -> str | None:
    """Return why ``block`` has no heads and MLP columns to shard, in a line that starts with "its",
    or None."""
    if type(block) not in (Block, ResPostBlock, EvaBlock, EvaBlockPostNorm):
        return f"its blocks are of timm's {type(block).__name__}"
    attention, mlp = block.attn, block.mlp
    if type(attention) not in (Attention, AttentionRope, EvaAttention):
        return f"its attention is timm's {type(attention).__name__}"
    if getattr(attention, "gate", None) is not None:
        return "its attention has a gate"
    if getattr(attention, "num_kv_groups", 1) > 1:
        return "its attention has fewer key heads than query heads"
    if type(mlp) not in (Mlp, GluMlp, SwiGLU):
        return f"its MLP is timm's {type(mlp).__name__}"
    return None


# ------------------------------------------------------------------------------------------------
# Whether TransformerEngine's layer may take a block's place.


def why_no_transformer_engine(block: nn.Module) -> str | None:
    """Return why TransformerEngine's layer does not compute what ``block`` does; None if it does.
    GELU and its tanh approximation, which is all that it has, count as the same."""
    if type(block) is not Block:
        return f"its blocks are of timm's {type(block).__name__}, not Block"
    attention: Any = block.attn
    mlp: Any = block.mlp
    if type(attention) is not Attention:
        return f"its attention is timm's {type(attention).__name__}, not Attention"
    if attention.gate is not None:
        return "its attention has a gate"
    if type(mlp) is not Mlp:
        return f"its MLP is timm's {type(mlp).__name__}, not Mlp"
    activation = type(mlp.act).__name__.lower()
    unsupported = {
        "its norm is not LayerNorm": not isinstance(block.norm1, nn.LayerNorm),
        "its activation is not GELU": "gelu" not in activation or "quick" in activation,
        "it uses layer scale (<init_values>)": not isinstance(block.ls1, nn.Identity),
        "it has <scale_attn_norm>": not isinstance(attention.norm, nn.Identity),
        "it has <scale_mlp_norm>": not isinstance(mlp.norm, nn.Identity),
        "it has <proj_drop_rate>": mlp.drop1.p > 0,  # timm drops inside the MLP too
        "its <qkv_bias> differs from its <proj_bias>": (attention.qkv.bias is None)
        != (attention.proj.bias is None),
    }
    return next((reason for reason, applies in unsupported.items() if applies), None)


def why_no_linear_products(block: nn.Module) -> str | None:
    """Return why a product with weights is not a call of an ``nn.Linear`` in ``block``; or None."""
    attention = getattr(block, "attn", None)
    if not isinstance(attention, EvaAttention):
        return None
    if attention.q_bias is None or attention.qkv_bias_separate:
        return None
    return "its attention does not use nn.Linear for queries, keys and values (<qkv_bias>)"
