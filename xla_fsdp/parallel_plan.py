"""How the model is parallelized on XLA: the plan that ``resolve_xla`` makes before XLA starts.

``xla_fsdp/parallelize.py`` follows it; ``xla_fsdp/layout.py`` holds what only devices can tell.
"""

from __future__ import annotations

from dataclasses import dataclass

from training.resolve import Run
from xla_fsdp.config import XlaConfig


@dataclass(frozen=True)
class XlaPlan:
    """How the plain model becomes a parallel one (see ``parallelize.py`` for the order).

    Options of only one form of FSDP, and graph breaks, are in ``XlaRun.backend_config``.
    """

    fsdp: bool
    """Whether parameters are sharded; if not, they are replicated."""
    scan: bool
    """Whether all blocks are compiled as one loop."""
    attention: str
    """What computes attention: "sdpa", "flash" or "whole"."""
    domain_attention: str | None
    """How attention sees the tokens of all devices that share an image: "ring" or "gather"; None if
    no devices share one, or if the partitioner chooses (with "tensor", or dropout in attention)."""
    grad_ckpt: str
    """Which activations of a block are recomputed: "none", "selective", "full" or "offload"."""
    bf16: bool
    """Whether products are computed in bf16."""
    residual_bf16: bool
    """Whether the residual stream is bf16, too."""
    int8: bool
    """Whether the blocks' products are computed in int8 in the forward pass."""
    gather_fp8: bool
    """Whether the blocks' matrices are gathered in fp8."""


XlaRun = Run[XlaConfig, XlaPlan]
