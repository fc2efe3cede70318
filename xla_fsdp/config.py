"""What a run on XLA is asked beside what every backend takes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from config_fields import bounded, count, flag


@dataclass(frozen=True)
class XlaConfig:
    """How PyTorch/XLA runs a training, on TPUs or on virtual devices of the CPU."""

    group: ClassVar[str] = "XLA (--backend xla)"

    cpu_devices: int = flag(
        1,
        "virtual devices when XLA runs on the CPU (default: CPU_NUM_DEVICES of the environment, "
        "or 1)",
        kind=bounded(int, 1, 1024),
        env="CPU_NUM_DEVICES",
        common=True,
    )
    xla_fsdp: Literal["auto", "spmd", "nested"] = flag(
        "auto",
        "spmd: one program over all devices; nested: XlaFullyShardedDataParallel, a process a "
        "device; auto: nested if --no_reshard_after_forward or one of the next two flags asks for "
        "it, else spmd",
    )
    flatten_parameters: bool = flag(
        False,
        "nested: one flat parameter per unit",
        needs=("xla_fsdp=nested",),
        conflicts=("run_without_fsdp",),
    )
    shard_on_cpu: bool = flag(
        False,
        "nested: shard each block on the host, before it reaches the device",
        needs=("xla_fsdp=nested",),
        conflicts=("run_without_fsdp",),
    )
    scan_blocks: bool | None = flag(
        None,
        "SPMD: all blocks as one loop in the graph, so that compile time does not grow with depth "
        "(default: where they are alike and the graph is not broken between them)",
    )
    attention: Literal["auto", "sdpa", "flash", "whole"] = flag(
        "auto",
        "sdpa: PyTorch's product, every token's score for every other in memory; flash: Pallas "
        "kernels that hold a few at a time (TPU, without --att_dropout); whole: the same of up to "
        "1024 tokens, all of an image's at once; auto: on TPU whole or, of more tokens, flash",
    )
    residual_dtype: Literal["fp32", "bf16"] = flag(
        "fp32",
        "numbers that blocks add their results to, with --precision bf16; fp32 is what autocast "
        "has; bf16 halves what is kept of each block and what its norms read",
        needs=("precision=bf16", "xla_fsdp=spmd"),
    )
    matmul: Literal["precision", "int8"] = flag(
        "precision",
        "products of the blocks' linear layers, forward, with --precision bf16: in that, or of "
        "int8 numbers with a factor for each row of a weight and of what it multiplies; v5e and "
        "v6e multiply these at twice the pace, and half as much is gathered",
        needs=("precision=bf16", "xla_fsdp=spmd"),
    )
    gather_dtype: Literal["auto", "fp8"] = flag(
        "auto",
        "numbers that the matrices of scanned blocks are gathered in; fp8: half the bytes of bf16, "
        "rounded to e4m3 with a factor a row, gradients are not; auto: those of --precision",
        needs=("xla_fsdp=spmd",),
        conflicts=("run_without_fsdp", "matmul"),
    )
    mark_step_after_forward: bool = flag(
        False,
        "break the graph between forward and backward (TPU smem limit of very large models)",
    )
    mark_step_every_n_blocks: int = flag(
        0,
        "break the graph after every N blocks, forward and backward; 0: never",
        kind=count,
    )
    compile_cache_dir: str | None = flag(
        None,
        "folder that keeps compiled programs; torch_xla 2.9 writes but cannot read them, on TPU "
        "(its issue #9094) as on the CPU, so each run compiles anew, and says so (default: none)",
    )
    compile_only: bool = flag(
        False,
        "train nothing: compile the step for --tpu_topology with the TPU compiler, on any machine, "
        "and tell whether it fits and how fast it could be (see --json); the exit code is 3 if it "
        "does not fit",
        common=True,
    )
    tpu_topology: str | None = flag(
        None,
        "slice for --compile_only, chips along each side: v4:4x4x4 (64 chips), v5e:16x16 (256), "
        "v5p:4x4x8 (128), v6e:1x1, ...; for --plan several, with commas (default: none)",
        metavar="KIND:AxB[xC]",
        needs=("compile_only|plan",),
        common=True,
    )

    explain: bool = flag(
        False,
        "with --compile_only: also print the 20 costliest instructions of the step, with the "
        "module of the model that each comes from and what bounds it; with --hlo_dir also draw the "
        "step's time by module, explain.png",
        needs=("compile_only",),
    )
    hlo_dir: str | None = flag(
        None,
        "folder that keeps the scheduled module of each graph of --compile_only as text (default: "
        "none)",
        metavar="DIR",
        needs=("compile_only",),
    )

    def shrunk(self) -> XlaConfig:
        """Return the same for a model of a few blocks."""
        from dataclasses import replace

        every = min(self.mark_step_every_n_blocks, 1)
        return replace(self, mark_step_every_n_blocks=every)

    product_multiple: ClassVar[int] = 1
    """Sizes of matrix products are multiples of this."""
    keeps_fp32_weights: ClassVar[bool] = True
