"""Dense matrix FLOP/s of NVIDIA's GPUs, from NVIDIA's data sheets (without sparsity)."""

from __future__ import annotations

# By a part of the name that CUDA gives: FLOP/s in bf16 and fp16, in TF32, in fp32, in FP8.
_CHIPS: tuple[tuple[str, dict[str, float]], ...] = (
    ("B200", {"bf16": 2250e12, "tf32": 1125e12, "fp32": 75e12, "fp8": 4500e12}),
    ("GH200", {"bf16": 989e12, "tf32": 494e12, "fp32": 67e12, "fp8": 1979e12}),
    ("H200 NVL", {"bf16": 835e12, "tf32": 417e12, "fp32": 60e12, "fp8": 1671e12}),
    ("H200", {"bf16": 989e12, "tf32": 494e12, "fp32": 67e12, "fp8": 1979e12}),
    ("H100 PCIe", {"bf16": 756e12, "tf32": 378e12, "fp32": 51e12, "fp8": 1513e12}),
    ("H100 NVL", {"bf16": 835e12, "tf32": 417e12, "fp32": 60e12, "fp8": 1671e12}),
    ("H100", {"bf16": 989e12, "tf32": 494e12, "fp32": 67e12, "fp8": 1979e12}),
    ("L40S", {"bf16": 362e12, "tf32": 183e12, "fp32": 91.6e12, "fp8": 733e12}),
    ("L4", {"bf16": 121e12, "tf32": 60e12, "fp32": 30.3e12, "fp8": 242e12}),
    ("A100", {"bf16": 312e12, "tf32": 156e12, "fp32": 19.5e12}),
    ("A10", {"bf16": 125e12, "tf32": 62.5e12, "fp32": 31.2e12}),
)


def peak_of(name: str, kind: str) -> float | None:
    """Return the FLOP/s of a GPU in "bf16", "fp16", "tf32", "fp32" or "fp8"; None if unknown.

    ``name`` is the one that CUDA gives it.
    """
    for part, flops in _CHIPS:
        if part in name:
            return flops.get("bf16" if kind == "fp16" else kind)
    return None
