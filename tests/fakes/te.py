"""What gpu_fsdp/blocks.py uses of TransformerEngine, in plain PyTorch, to run on a CPU.

Written after transformer_engine 2.20.2's sources: the names and shapes of parameters, the
defaults of arguments (a causal mask, sequence first, interleaved qkv: that file must set
them) and the order of rows in qkv. The real layer needs CUDA: tests/hardware/gpu has it.

As a program: run_vit_training.py with this in place of TransformerEngine.
"""

import contextlib
import os
import sys
from types import SimpleNamespace

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import run_vit_training
from gpu_fsdp import blocks
from tests.fakes.megatron_on_cpu import without_cuda


class LayerNormLinear(nn.Module):
    def __init__(self, width: int, out: int, bias: bool, **where) -> None:
        super().__init__()
        self.layer_norm_weight = nn.Parameter(torch.ones(width, **where))
        self.layer_norm_bias = nn.Parameter(torch.zeros(width, **where))
        self.weight = nn.Parameter(torch.empty(out, width, **where))
        self.bias = nn.Parameter(torch.empty(out, **where)) if bias else None

    def forward(self, x, eps):
        x = F.layer_norm(x, x.shape[-1:], self.layer_norm_weight, self.layer_norm_bias, eps)
        return F.linear(x, self.weight, self.bias)


class LayerNormMLP(nn.Module):
    def __init__(self, width: int, hidden: int, bias: bool, **where) -> None:
        super().__init__()
        self.layer_norm_weight = nn.Parameter(torch.ones(width, **where))
        self.layer_norm_bias = nn.Parameter(torch.zeros(width, **where))
        self.fc1_weight = nn.Parameter(torch.empty(hidden, width, **where))
        self.fc2_weight = nn.Parameter(torch.empty(width, hidden, **where))
        self.fc1_bias = nn.Parameter(torch.empty(hidden, **where)) if bias else None
        self.fc2_bias = nn.Parameter(torch.empty(width, **where)) if bias else None

    def forward(self, x, eps):
        x = F.layer_norm(x, x.shape[-1:], self.layer_norm_weight, self.layer_norm_bias, eps)
        x = F.gelu(F.linear(x, self.fc1_weight, self.fc1_bias), approximate="tanh")
        return F.linear(x, self.fc2_weight, self.fc2_bias)


class TransformerLayer(nn.Module):
    def __init__(
        self,
        hidden_size,
        ffn_hidden_size,
        num_attention_heads,
        *,
        layernorm_epsilon=1e-5,
        hidden_dropout=0.1,
        attention_dropout=0.1,
        drop_path_rate=0.0,
        self_attn_mask_type="causal",
        attn_input_format="sbhd",
        fuse_qkv_params=False,
        qkv_weight_interleaved=True,
        bias=True,
        activation="gelu",
        normalization="LayerNorm",
        qk_norm_type=None,
        qk_norm_eps=1e-6,
        params_dtype=None,
        device="cuda",
    ) -> None:
        super().__init__()
        assert fuse_qkv_params
        assert activation == "gelu"
        assert hidden_dropout == drop_path_rate == 0.0
        assert isinstance(device, str)
        assert normalization == "LayerNorm"
        where = {"device": device, "dtype": params_dtype}
        self.eps, self.heads = layernorm_epsilon, num_attention_heads
        self.dropout = attention_dropout
        self.causal, self.batch_first = self_attn_mask_type == "causal", attn_input_format == "bshd"
        self.interleaved = qkv_weight_interleaved
        attention = nn.Module()
        attention.layernorm_qkv = LayerNormLinear(hidden_size, 3 * hidden_size, bias, **where)
        attention.proj = nn.Linear(hidden_size, hidden_size, bias, **where)
        for name in ("q_norm", "k_norm") if qk_norm_type == "LayerNorm" else ():
            norm = nn.LayerNorm(hidden_size // num_attention_heads, qk_norm_eps, **where)
            setattr(attention, name, norm)
        self.self_attention = attention
        self.layernorm_mlp = LayerNormMLP(hidden_size, ffn_hidden_size, bias, **where)

    def forward(self, x):
        if not self.batch_first:
            x = x.transpose(0, 1)
        attention, size = self.self_attention, x.shape[-1] // self.heads
        qkv = attention.layernorm_qkv(x, self.eps)
        if self.interleaved:
            qkv = qkv.unflatten(-1, (self.heads, 3, size)).unbind(-2)
        else:
            qkv = qkv.unflatten(-1, (3, self.heads, size)).unbind(-3)
        q, k, v = (part.transpose(1, 2) for part in qkv)
        if hasattr(attention, "q_norm"):
            q, k = attention.q_norm(q), attention.k_norm(k)
        dropout = self.dropout if self.training else 0.0
        out = F.scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=self.causal)
        x = x + attention.proj(out.transpose(1, 2).flatten(2))
        x = x + self.layernorm_mlp(x, self.eps)
        return x if self.batch_first else x.transpose(0, 1)


class DotProductAttention:
    """The attention alone, which ``TeBlocks`` only tries out. ``fused``: what it is able to do."""

    fused = True

    def __init__(self, heads, width, **options) -> None:
        assert options.keys() == {"attention_dropout", "attn_mask_type", "qkv_format"}

    def __call__(self, q, k, v):
        if os.environ["NVTE_UNFUSED_ATTN"] == "0" and not self.fused:
            raise ValueError("No dot product attention backend is available")


@contextlib.contextmanager
def autocast(enabled=True, recipe=None):
    yield


STAND_IN = SimpleNamespace(
    TransformerLayer=TransformerLayer,
    DotProductAttention=DotProductAttention,
    checkpoint=checkpoint,
    autocast=autocast,
    is_fp8_available=lambda return_reason: (False, "compute capability 8.9 or higher required"),
    is_mxfp8_available=lambda return_reason: (False, "Device compute capability 10.0 or higher"),
)

if __name__ == "__main__":
    blocks.import_te = lambda: STAND_IN
    if "megatron" in sys.argv:
        without_cuda()
    sys.exit(run_vit_training.main())
