"""Flags of sharding, precision and devices: common ones, and each backend's own."""

from __future__ import annotations

import argparse
import os

from training.argument_types import bounded, count, positive, step_range, zero_strategy
from training.errors import UsageError

BACKEND_GROUPS = {"xla": "XLA", "cuda": "GPU"}
"""By the backend's name, the title its own flags' groups in ``--help`` begin with."""


def add_backend_groups(parser: argparse.ArgumentParser) -> None:
    _add_sharding(parser.add_argument_group("sharding and memory"))
    _add_xla(parser.add_argument_group("XLA (--backend xla)"))
    _add_gpu_sharding(parser.add_argument_group("GPU: sharding (--backend cuda)"))
    _add_gpu_step(parser.add_argument_group("GPU: the step (--backend cuda)"))


def check_foreign_flags(
    parser: argparse.ArgumentParser, args: argparse.Namespace, backend: str
) -> None:
    """Raises UsageError for a flag of another backend: here it would do nothing."""
    for group in parser._action_groups:
        owners = [name for name, title in BACKEND_GROUPS.items()
                  if (group.title or "").startswith(title)]  # fmt: skip
        if not owners or backend in owners:
            continue
        for action in group._group_actions:
            default = parser.get_default(action.dest)
            if isinstance(default, str):
                default = parser._get_value(action, default)
            if getattr(args, action.dest) != default:
                flag = action.option_strings[0]
                raise UsageError(f"{flag} needs --backend {owners[0]}, this is {backend}")


def _add_sharding(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--precision",
        "--param_dtype",
        choices=("fp32", "bf16", "fp16"),
        default="fp32",
        help="of computation, and on GPUs of gathered weights; stored weights and optimizer state "
        "stay fp32; fp16: GPUs with --fsdp fsdp2, with loss scaling",
    )
    group.add_argument(
        "--grad_ckpt",
        choices=("full", "selective", "none"),
        default="full",
        help="what of a block's activations is recomputed in the backward pass; selective: all "
        "but attention and every other matrix product (GPU)",
    )
    group.add_argument(
        "--no_grad_ckpt",
        action="store_const",
        const="none",
        dest="grad_ckpt",
        help="the same as --grad_ckpt none",
    )
    group.add_argument(
        "--run_without_fsdp",
        action="store_true",
        help="plain data parallel, for comparison; on GPUs the same as --zero_dp_strategy 0",
    )
    group.add_argument(
        "--no_reshard_after_forward",
        action="store_false",
        dest="reshard_after_forward",
        help="keep gathered weights from forward to backward (ZeRO-2) (default: ZeRO-3); on XLA "
        "with nested FSDP",
    )


def _add_xla(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--cpu_devices",
        type=bounded(int, 1, 1024),
        default=os.environ.get("CPU_NUM_DEVICES") or "1",
        help="virtual devices when XLA runs on the CPU "
        "(default: CPU_NUM_DEVICES of the environment, or 1)",
    )
    group.add_argument(
        "--xla_fsdp",
        choices=("auto", "spmd", "nested"),
        default="auto",
        help="spmd: one program over all devices; nested: XlaFullyShardedDataParallel, a process "
        "a device; auto: nested if one of the next three flags asks for it, else spmd",
    )
    group.add_argument(
        "--flatten_parameters", action="store_true", help="nested: one flat parameter per unit"
    )
    group.add_argument(
        "--shard_on_cpu",
        action="store_true",
        help="nested: cut each block into shards on the host, before it reaches the device",
    )
    group.add_argument(
        "--mesh_dcn",
        type=positive,
        default=1,
        metavar="N",
        help="SPMD: copies of the parameters, a slice each where there are several TPU slices; "
        "gradients are summed over them, the batch is cut over all",
    )
    group.add_argument(
        "--mesh_fsdp",
        type=positive,
        metavar="N",
        help="SPMD: devices a copy is sharded over (default: all / (--mesh_dcn x --mesh_tensor))",
    )
    group.add_argument(
        "--mesh_tensor",
        type=positive,
        default=1,
        metavar="N",
        help="SPMD: devices that attention heads and MLP columns of each block are cut over, for "
        "the same images (tensor parallel)",
    )
    group.add_argument(
        "--scan_blocks",
        action=argparse.BooleanOptionalAction,
        help="SPMD: all blocks as one loop in the graph, so that compile time does not grow with "
        "depth (default: where --grad_ckpt is full and the graph is not cut between blocks)",
    )
    group.add_argument(
        "--attention",
        choices=("auto", "sdpa", "flash"),
        default="auto",
        help="sdpa: PyTorch's product, every token's score for every other in memory; flash: "
        "Pallas kernels that hold a few at a time (TPU, without --att_dropout); auto: flash on "
        "TPU from 1024 tokens",
    )
    group.add_argument(
        "--mark_step_after_forward",
        action="store_true",
        help="cut the graph between forward and backward (TPU smem limit of very large models)",
    )
    group.add_argument(
        "--mark_step_every_n_blocks",
        type=count,
        default=0,
        help="cut the graph after every N blocks, forward and backward; 0: never",
    )
    group.add_argument(
        "--compile_cache_dir",
        help="folder that keeps compiled programs; torch_xla 2.9 writes but cannot read them, on "
        "TPU (its issue #9094) as on the CPU, so each run compiles anew, and says so "
        "(default: none)",
    )

    group.add_argument(
        "--compile_only",
        action="store_true",
        help="train nothing: compile the training step for --tpu_topology with the TPU compiler, "
        "on any machine, and tell whether it fits and how fast it could be (see --json); the exit "
        "code is 3 if it does not fit",
    )
    group.add_argument(
        "--tpu_topology",
        metavar="KIND:AxB[xC]",
        help="slice for --compile_only, chips along each side: v4:4x4x4 (64 chips), v5e:16x16 "
        "(256 chips), v5p:4x4x8 (128 chips), v6e:8x8 (64 chips), v6e:1x1, ...; default: none",
    )


def _add_gpu_sharding(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--fsdp",
        choices=("auto", "megatron", "fsdp2"),
        default="auto",
        help="megatron: NVIDIA's Megatron-FSDP; fsdp2: PyTorch's fully_shard, a block a unit; "
        "auto: megatron on CUDA, fsdp2 on the CPU",
    )
    group.add_argument(
        "--zero_dp_strategy",
        type=zero_strategy,
        metavar="{0,1,2,3}",
        help="what is sharded: 0 no_shard, 1 optim (megatron), 2 optim_grads, 3 "
        "optim_grads_params; number or name (default: 3)",
    )
    group.add_argument(
        "--dp_outer",
        type=positive,
        default=1,
        metavar="N",
        help="HSDP: groups of processes that hold a whole copy each; the batch is cut over all",
    )
    group.add_argument(
        "--dp_shard",
        type=positive,
        metavar="N",
        help="processes a copy is sharded over (default: all processes / --dp_outer)",
    )
    group.add_argument(
        "--outer_dp_sharding_strategy",
        type=zero_strategy,
        default=0,
        metavar="{0,1}",
        help="megatron with --dp_outer: 0 no_shard; 1 optim, optimizer state is sharded over the "
        "outer groups too",
    )
    group.add_argument(
        "--meta_init",
        action=argparse.BooleanOptionalAction,
        default=None,
        help="fill the weights unit by unit, so that the model never stands whole on a device; "
        "fsdp2 always does (default: on if the model takes over a quarter of the device)",
    )
    group.add_argument(
        "--reduce_dtype",
        choices=("fp32", "bf16", "fp16"),
        default="fp32",
        help="of gradients while they are summed over the devices",
    )
    group.add_argument(
        "--grad_reduce_in_fp32",
        action="store_const",
        const="fp32",
        dest="reduce_dtype",
        help="the same as --reduce_dtype fp32",
    )
    group.add_argument(
        "--no_preserve_fp32_weights",
        action="store_false",
        dest="preserve_fp32_weights",
        help="megatron: keep weights in --precision only, no fp32 copy (default: fp32 kept)",
    )
    group.add_argument(
        "--overlap_grad_reduce",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="megatron: reduce gradients during the backward pass; strategies 2 and 3 always do",
    )
    group.add_argument(
        "--overlap_param_gather",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="megatron: gather the next weights during computation; strategy 3 always does",
    )
    group.add_argument(
        "--forward_prefetch",
        type=count,
        default=1,
        metavar="N",
        help="fsdp2: blocks to gather ahead of the one that computes; 0: none, in order",
    )
    group.add_argument(
        "--backward_prefetch",
        type=count,
        default=1,
        metavar="N",
        help="fsdp2: the same in the backward pass",
    )
    group.add_argument(
        "--cpu_offload",
        action="store_true",
        help="fsdp2: keep weights, gradients and optimizer in host memory, update on the CPU",
    )


def _add_gpu_step(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--block",
        choices=("timm", "te"),
        default="timm",
        help="te: NVIDIA TransformerEngine's TransformerLayer in place of timm's block",
    )
    group.add_argument(
        "--fp8",
        choices=("none", "delayed", "current", "mxfp8"),
        default="none",
        help="with --block te: recipe of FP8 matrix products",
    )
    group.add_argument("--compile", action="store_true", help="torch.compile each block")
    group.add_argument(
        "--channels_last",
        action="store_true",
        help="images and patch embedding in channels-last memory order",
    )
    group.add_argument(
        "--tf32",
        action="store_true",
        help="allow TF32 in fp32 matrix products and convolutions",
    )
    group.add_argument(
        "--profile",
        type=step_range,
        metavar="FIRST:LAST",
        help="write a torch profiler trace of these steps to --ckpt_dir/profile, and on CUDA a "
        "memory snapshot (default: none)",
    )
