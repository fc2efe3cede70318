"""Replacements of timm's blocks on NVIDIA GPUs: TransformerEngine's layers, or FP8 products.

Both hold the weights of timm's blocks, and checkpoints keep timm's names. With FP8, weights,
gradients and checkpoints keep their dtypes: only the operands of products are rounded.
"""

import ctypes
import functools
import importlib.util
import logging
import os
import re
from pathlib import Path
from typing import Any

import torch
from torch import nn

from gpu_fsdp.config import FP8_MULTIPLE
from models.blocks import why_no_linear_products, why_no_transformer_engine
from models.config import ModelError
from torch_fsdp import devices
from torch_fsdp.parallel_plan import DTYPES, TimmBlocks, TorchRun
from training.errors import UsageError
from training.resolve import model_flags

# -- TransformerEngine's TransformerLayer instead of timm's block: --block te -------------------
#
# Weights only need renaming: with fused, non-interleaved qkv, the rows of both are q of all heads,
# then k, then v. The only difference is GELU: TransformerEngine has only the tanh approximation
# (error up to 5e-4).


TE_NAME = {
    "norm1.weight": "self_attention.layernorm_qkv.layer_norm_weight",
    "norm1.bias": "self_attention.layernorm_qkv.layer_norm_bias",
    "attn.qkv.weight": "self_attention.layernorm_qkv.weight",
    "attn.qkv.bias": "self_attention.layernorm_qkv.bias",
    "attn.q_norm.weight": "self_attention.q_norm.weight",
    "attn.q_norm.bias": "self_attention.q_norm.bias",
    "attn.k_norm.weight": "self_attention.k_norm.weight",
    "attn.k_norm.bias": "self_attention.k_norm.bias",
    "attn.proj.weight": "self_attention.proj.weight",
    "attn.proj.bias": "self_attention.proj.bias",
    "norm2.weight": "layernorm_mlp.layer_norm_weight",
    "norm2.bias": "layernorm_mlp.layer_norm_bias",
    "mlp.fc1.weight": "layernorm_mlp.fc1_weight",
    "mlp.fc1.bias": "layernorm_mlp.fc1_bias",
    "mlp.fc2.weight": "layernorm_mlp.fc2_weight",
    "mlp.fc2.bias": "layernorm_mlp.fc2_bias",
}
"""Maps each parameter of timm's block to its name in TransformerEngine's layer."""
_TIMM_NAME = {te: timm for timm, te in TE_NAME.items()}
_IN_BLOCK = re.compile(r"(blocks\.\d+\.)(.+)")

_INSTALL = "run launch/install_transformer_engine.sh, or use --block timm"


class TeBlocks(TimmBlocks):
    """TransformerEngine's layers instead of timm's blocks."""

    name = "te"

    def check(self, run: TorchRun) -> None:
        if run.mesh.domain > 1:
            raise UsageError(
                f"--mesh_domain {run.mesh.domain} is incompatible with --block te: use --block timm"
            )
        unsupported = {
            # Its layers opt out of tracing: nothing is compiled.
            "--compile": run.backend_config.compile,
            "--grad_ckpt selective": run.config.sharding.grad_ckpt == "selective",
        }
        for flag, is_set in unsupported.items():
            if is_set:
                raise UsageError(
                    f"--block te does not support {flag}: drop it, or use --block timm"
                )
        if reason := why_no_transformer_engine(run.model.block):
            reason = ModelError(reason).with_flag_names(model_flags())
            raise UsageError(f"--block te does not support this model: {reason}: use --block timm")
        te = import_te()
        check_fused_attention(te, run)
        if self.fp8 == "none":
            return
        if self.fp8 == "rowwise":
            raise UsageError("--fp8 rowwise requires --block timm: with te use current")
        kind = "mxfp8" if self.fp8 == "mxfp8" else "fp8"
        ok, reason = getattr(te, f"is_{kind}_available")(return_reason=True)
        if not ok:
            other = "--fp8 delayed" if kind == "mxfp8" else "--fp8 none"
            raise UsageError(f"--fp8 {self.fp8}: {reason.splitlines()[0]}: use {other}")
        check_sizes(run, self.fp8)

    def replace(self, block: nn.Module, device: str) -> nn.Module:
        """Return a TransformerLayer on ``device`` equivalent to timm's ``block``.

        Copies the weights, unless the block is on meta; then the layer is on meta, too.
        """
        te = import_te()
        timm: Any = block
        attention = timm.attn
        has_qk_norm = not isinstance(attention.q_norm, nn.Identity)
        weight = attention.qkv.weight
        layer = te.TransformerLayer(
            hidden_size=weight.shape[1],
            ffn_hidden_size=timm.mlp.fc1.weight.shape[0],
            num_attention_heads=attention.num_heads,
            layernorm_epsilon=timm.norm1.eps,
            hidden_dropout=0.0,
            attention_dropout=attention.attn_drop.p,
            drop_path_rate=getattr(timm.drop_path1, "drop_prob", 0.0),
            self_attn_mask_type="no_mask",
            attn_input_format="bshd",
            fuse_qkv_params=True,
            qkv_weight_interleaved=False,
            bias=attention.qkv.bias is not None,
            activation="gelu",
            normalization="LayerNorm",
            qk_norm_type="LayerNorm" if has_qk_norm else None,
            qk_norm_eps=attention.q_norm.eps if has_qk_norm else 1e-6,
            params_dtype=weight.dtype,
            device="meta" if weight.is_meta else device,
        )
        if not weight.is_meta:
            target = dict(layer.named_parameters())
            with torch.no_grad():
                for name, parameter in block.named_parameters():
                    target[TE_NAME[name]].copy_(parameter)
        return layer

    def recompute(self, block: nn.Module, mode: str) -> None:
        """Recompute the whole block in the backward pass, with the forward pass's FP8 scales."""
        te = import_te()
        block.forward = functools.partial(te.checkpoint, block.forward, use_reentrant=False)

    def wrap_model(self, model: nn.Module) -> None:
        """Compute the layers' matrix products in FP8 if ``--fp8`` is set."""
        if self.fp8 == "none":
            return
        te = import_te()
        from transformer_engine.common import recipe

        chosen = {
            "delayed": recipe.DelayedScaling,
            "current": recipe.Float8CurrentScaling,
            "mxfp8": recipe.MXFP8BlockScaling,
        }[self.fp8]()
        forward = model.forward

        def forward_in_fp8(*args: Any, **kwargs: Any) -> Any:
            with te.autocast(enabled=True, recipe=chosen):
                return forward(*args, **kwargs)

        model.forward = forward_in_fp8

    def timm_name(self, name: str) -> str:
        match = _IN_BLOCK.fullmatch(name)
        return match[1] + _TIMM_NAME.get(match[2], match[2]) if match else name


def check_fused_attention(te: Any, run: TorchRun) -> None:
    """Raise UsageError if TransformerEngine has no fused attention for the model's heads.

    It would silently fall back to unfused attention, which stores all scores and makes a step of
    ViT-L 1.5 times as long. Skipped in fp32, which has no fused attention, and if the user has set
    NVTE_UNFUSED_ATTN. The first process of each host checks this on its first device.
    """
    precision = run.config.sharding.precision
    is_first = os.environ.get("LOCAL_RANK", "0") == "0"
    if precision == "fp32" or "NVTE_UNFUSED_ATTN" in os.environ or not is_first:
        return
    timm: Any = run.model.block
    heads, width = timm.attn.num_heads, timm.attn.head_dim
    attention = te.DotProductAttention(
        heads,
        width,
        attention_dropout=timm.attn.attn_drop.p,
        attn_mask_type="no_mask",
        qkv_format="bshd",
    )
    q, k, v = torch.zeros(
        (3, 1, 64, heads, width), dtype=DTYPES[precision], device=devices.choose("cuda").where
    ).requires_grad_()
    os.environ["NVTE_UNFUSED_ATTN"] = "0"
    try:
        attention(q, k, v)
    except ValueError:
        raise UsageError(
            f"--block te: TransformerEngine has no fused attention for heads of width {width} in "
            f"{precision} on this GPU: use --block timm, or set NVTE_UNFUSED_ATTN=1 to train "
            "without it (NVTE_DEBUG=1 NVTE_DEBUG_LEVEL=2 logs the reason)"
        ) from None
    finally:
        del os.environ["NVTE_UNFUSED_ATTN"]


def prefer_cudnn_of_pytorch() -> None:
    """Make TransformerEngine, imported after this call, use the cuDNN that PyTorch ships.

    It would look for the system's first. With two versions in one process, its import fails or it
    falls back to slow attention.
    """
    if "CUDNN_HOME" in os.environ:  # set by the user, or by an earlier call
        return
    spec = importlib.util.find_spec("nvidia")
    for folder in (spec and spec.submodule_search_locations) or ():
        for library in sorted(Path(folder).glob("cudnn/lib/libcudnn*.so.*")):
            os.environ["CUDNN_HOME"] = str(Path(folder) / "cudnn")
            ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)


def import_te() -> Any:
    """Return the package transformer_engine.pytorch. Raises UsageError if it cannot be used."""
    try:
        prefer_cudnn_of_pytorch()
        import transformer_engine.pytorch as te
    except ImportError:
        raise UsageError(f"--block te: TransformerEngine is not installed: {_INSTALL}") from None
    except (OSError, RuntimeError, AssertionError) as error:  # incomplete installation
        reason = str(error).splitlines()[0]
        raise UsageError(
            f"--block te: TransformerEngine cannot be imported ({reason}): {_INSTALL}"
        ) from None
    if not torch.cuda.is_available():
        raise UsageError("--block te requires a CUDA GPU: on the CPU use --block timm")
    return te


# -- timm's blocks with FP8 products by torchao: --fp8 without --block te ------------------------
#
# Scales come from the current values: one per tensor ("current") or per row ("rowwise"). Rounding
# is fused with the surrounding kernels only under torch.compile.


_TORCHAO_NAME = {"current": "tensorwise", "rowwise": "rowwise"}


class Float8Blocks(TimmBlocks):
    """timm's blocks with ``nn.Linear`` in FP8."""

    def check(self, run: TorchRun) -> None:
        if self.fp8 not in _TORCHAO_NAME:
            raise UsageError(
                f"--fp8 {self.fp8} requires --block te: with timm's blocks use "
                f"{' or '.join(_TORCHAO_NAME)}"
            )
        if not run.backend_config.compile:
            raise UsageError(
                f"--fp8 {self.fp8} with timm's blocks requires --compile: without it, rounding to "
                "FP8 takes more time than the products save"
            )
        if reason := devices.choose("cuda").lacks("fp8"):
            raise UsageError(reason)
        if reason := why_no_linear_products(run.model.block):
            reason = ModelError(reason).with_flag_names(model_flags())
            raise UsageError(
                f"--fp8 {self.fp8} is incompatible with --model {run.model.name}: {reason}"
            )
        check_sizes(run, self.fp8)
        import_float8()

    def replace(self, block: nn.Module, device: str) -> nn.Module:
        float8 = import_float8()
        return float8.convert_to_float8_training(block, config=config_of(self.fp8))


def config_of(fp8: str) -> Any:
    """Return torchao's configuration for the recipe "current" or "rowwise"."""
    return import_float8().Float8LinearConfig.from_recipe_name(_TORCHAO_NAME[fp8])


def import_float8() -> Any:
    """Return the package torchao.float8. Raises UsageError if it cannot be imported."""
    disabled = logging.root.manager.disable
    logging.disable(logging.WARNING)  # torchao and PyTorch warn about each other's versions
    try:
        import torchao.float8
    except ImportError:
        raise UsageError(
            "--fp8 with timm's blocks requires the package torchao and a PyTorch that it supports: "
            "python3 -m pip install -r requirements-gpu.txt"
        ) from None
    finally:
        logging.disable(disabled)
    return torchao.float8


def check_sizes(run: TorchRun, fp8: str) -> None:
    """Raise UsageError if FP8 kernels do not support a dimension of a product in the blocks."""
    multiple, sizes = FP8_MULTIPLE[fp8], run.model.sizes
    for name, size in (("--embed_dim", sizes.embed_dim), ("the MLP width", sizes.hidden)):
        if size % multiple:
            raise UsageError(f"--fp8 {fp8}: {name} {size} is not a multiple of {multiple}")
    images = run.config.data.global_micro_batch_size // run.mesh.batch_shards
    if images * sizes.num_tokens % multiple:
        raise UsageError(
            f"--fp8 {fp8}: {images} images per pass and GPU x {sizes.num_tokens} tokens is not a "
            f"multiple of {multiple}: set --batch_size so that each GPU gets a multiple of "
            f"{multiple} images per pass"
        )
