"""The flags of PyTorch/XLA: TPUs, or virtual devices of the CPU."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, Literal

from config_fields import bounded, count, flag, path_or_url

_TPU = ("xla", "torchtpu")
"""The backends whose steps ``--compile_only`` compiles."""


@dataclass(frozen=True)
class XlaConfig:
    """How PyTorch/XLA runs a training, on TPUs or on virtual devices of the CPU."""

    group: ClassVar[str] = "XLA (--backend xla)"
    backends: ClassVar[tuple[str, ...]] = ("xla",)

    cpu_devices: int = flag(
        1,
        "number of virtual devices if XLA runs on the CPU (default: the environment variable "
        "CPU_NUM_DEVICES, or 1)",
        kind=bounded(int, 1, 1024),
        env="CPU_NUM_DEVICES",
        common=True,
    )
    xla_fsdp: Literal["auto", "spmd", "nested"] = flag(
        "auto",
        "FSDP implementation; spmd: one program for all devices; nested: "
        "XlaFullyShardedDataParallel, one process per device; auto: nested if "
        "--no_reshard_after_forward, --flatten_parameters or --shard_on_cpu is set, else spmd",
    )
    flatten_parameters: bool = flag(
        False,
        "flatten the parameters of each FSDP unit into one tensor (nested FSDP)",
        requires=("xla_fsdp=nested", "objective=classify"),
        incompatible_with=("run_without_fsdp",),
    )
    shard_on_cpu: bool = flag(
        False,
        "shard each block on the host before copying it to the device (nested FSDP)",
        requires=("xla_fsdp=nested",),
        incompatible_with=("run_without_fsdp",),
    )
    scan_blocks: bool | None = flag(
        None,
        "compile the blocks as one loop, so that compile time does not grow with depth (SPMD) "
        "(default: on if all blocks have the same structure and no graph break separates them)",
    )
    residual_dtype: Literal["fp32", "bf16"] = flag(
        "fp32",
        "dtype of the residual stream with --precision bf16; fp32: as with autocast; bf16: halves "
        "the bytes of each block's saved input and of what its norms read",
        requires=("precision=bf16", "xla_fsdp=spmd"),
    )
    mark_step_after_forward: bool = flag(
        False,
        "break the graph between the forward and backward pass, for very large models that exceed "
        "the TPU's scalar memory (SMEM)",
    )
    mark_step_every_n_blocks: int = flag(
        0,
        "break the graph after every N blocks, in the forward and backward pass; 0: never",
        kind=count,
    )
    compile_only: bool = flag(
        False,
        "compile the training step for --tpu_topology, on any machine, instead of training, and "
        "print whether it fits and how fast it could be (see --json); exit code 3 if it does not "
        "fit; with --backend torchtpu: all programs of a step",
        backends=_TPU,
    )
    tpu_topology: str | None = flag(
        None,
        "TPU slice for --compile_only, with the number of chips along each side: v4:4x4x4 (64 "
        "chips), v5e:16x16 (256), v5p:4x4x8 (128), v6e:1x1, tpu7x:2x2x1, ...; also Google's other "
        "names: v5litepod-8, v5p-128 (64 chips), ct6e-standard-8t; --plan accepts several, "
        "separated by commas (default: none)",
        metavar="KIND:AxB[xC]",
        backends=_TPU,
        requires=("compile_only|plan",),
    )
    tpu_compiler: Literal["auto", "installed", "0.0.52"] = flag(
        "auto",
        "libtpu version that compiles for --tpu_topology; installed: the one that torch_xla "
        "requires; 0.0.52: a newer one, as with TorchTPU, which `make tpu-compiler` downloads; "
        "auto: 0.0.52 for tpu7x, which the installed version does not support, else installed",
        requires=("compile_only|plan",),
    )
    explain: bool = flag(
        False,
        "also print the 20 slowest instructions of the step that --compile_only compiles, each "
        "with its module of the model and its bottleneck; with --hlo_dir, also plot the step's "
        "time by module (explain.png); with --backend torchtpu: not with --fsdp fsdp2",
        backends=_TPU,
        requires=("compile_only",),
    )
    hlo_dir: str | None = flag(
        None,
        "write the scheduled HLO module of each graph that --compile_only compiles to this folder, "
        "as text (default: none)",
        kind=path_or_url,
        metavar="FOLDER",
        backends=_TPU,
        requires=("compile_only",),
    )

    product_multiple: ClassVar[int] = 1
    """Dimensions of matrix products must be multiples of this."""
    keeps_fp32_weights: ClassVar[bool] = True
    """Whether weights are stored in fp32 for every ``--precision``."""

    def shrunk(self) -> XlaConfig:
        """Return this configuration for a model with a few blocks."""
        return replace(self, mark_step_every_n_blocks=min(self.mark_step_every_n_blocks, 1))
