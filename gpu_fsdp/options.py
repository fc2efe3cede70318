"""Which form of FSDP, which mesh, which device; decided and checked before any device starts."""

from __future__ import annotations

import argparse
import os
import warnings
from dataclasses import dataclass

import torch
import torch.distributed as dist

from gpu_fsdp import te_block
from models.config import VitConfig
from training.errors import UsageError

ZERO_NAMES = ("no sharding", "ZeRO-1", "ZeRO-2", "ZeRO-3")
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class Mesh:
    """The device mesh: ``outer`` copies, each cut over ``shard`` processes."""

    outer: int
    shard: int


def world_size() -> int:
    """Processes of the run, as torchrun tells."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def device_type() -> str:
    """ "cuda", or "cpu" (with gloo) where there is no GPU."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def fsdp_form(args: argparse.Namespace) -> str:
    """The form of ``--fsdp``, with ``auto`` resolved: "megatron" or "fsdp2"."""
    if args.fsdp == "auto":
        return "megatron" if device_type() == "cuda" else "fsdp2"
    return args.fsdp


def zero_dp_strategy(args: argparse.Namespace) -> int:
    """0 to 3, from ``--zero_dp_strategy`` or system A's two flags for 0 and 2."""
    if args.run_without_fsdp:
        return 0
    if not args.reshard_after_forward:
        return 2
    return 3 if args.zero_dp_strategy is None else args.zero_dp_strategy


def mesh(args: argparse.Namespace) -> Mesh:
    """The mesh of a run. Without sharding FSDP2 has one of copies: it all-reduces gradients."""
    if zero_dp_strategy(args) == 0 and fsdp_form(args) == "fsdp2":
        return Mesh(world_size(), 1)
    return Mesh(args.dp_outer, args.dp_shard or max(1, world_size() // args.dp_outer))


def check(args: argparse.Namespace, config: VitConfig) -> None:
    """Raises UsageError for flags that cannot go together, or not on this machine."""
    _check_devices(args)
    _check_strategy(args)
    _check_form(args)
    _check_precision(args)
    te_block.check(args, config)
    te_block.check_batch(args, config, world_size())


def _check_devices(args: argparse.Namespace) -> None:
    if device_type() == "cpu" and not dist.is_gloo_available():
        raise UsageError("--backend cuda: no CUDA device here, nor PyTorch with gloo for the CPU")
    if device_type() == "cuda":
        here = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        if here > torch.cuda.device_count():
            raise UsageError(
                f"torchrun started {here} processes on this node, which has "
                f"{torch.cuda.device_count()} GPUs: a process a GPU, --nproc-per-node "
                f"{torch.cuda.device_count()} or fewer"
            )
    size, shape = world_size(), mesh(args)
    if shape.outer * shape.shard != size:
        raise UsageError(
            f"--dp_outer {shape.outer} x --dp_shard {shape.shard} is not the {size} process(es) of "
            "this run: change them, or torchrun's --nproc-per-node and --nnodes"
        )


def _check_strategy(args: argparse.Namespace) -> None:
    asked = args.zero_dp_strategy
    shortcuts = {"--run_without_fsdp": (args.run_without_fsdp, 0),
                 "--no_reshard_after_forward": (not args.reshard_after_forward, 2)}  # fmt: skip
    for flag, (given, strategy) in shortcuts.items():
        if given and asked not in (None, strategy):
            raise UsageError(f"{flag} means --zero_dp_strategy {strategy}, not {asked}: drop one")
    if args.run_without_fsdp and not args.reshard_after_forward:
        raise UsageError("--no_reshard_after_forward shapes FSDP: drop it or --run_without_fsdp")
    strategy, outer = zero_dp_strategy(args), args.outer_dp_sharding_strategy
    if outer > 1:
        raise UsageError(f"--outer_dp_sharding_strategy is 0 (no_shard) or 1 (optim), not {outer}")
    if outer and fsdp_form(args) != "megatron":
        raise UsageError("--outer_dp_sharding_strategy 1 needs --fsdp megatron")
    if outer and args.dp_outer == 1:
        raise UsageError("--outer_dp_sharding_strategy 1 needs --dp_outer of 2 or more")
    if outer and strategy != 3:
        raise UsageError(
            f"--outer_dp_sharding_strategy 1 needs --zero_dp_strategy 3, not {strategy}"
        )
    if strategy == 1 and fsdp_form(args) == "fsdp2":
        raise UsageError("--fsdp fsdp2 has no --zero_dp_strategy 1: use 2 or 3, or --fsdp megatron")
    if strategy == 0 and args.dp_outer > 1:
        raise UsageError("--dp_outer shapes sharding, --zero_dp_strategy 0 has none: drop one")


def _check_form(args: argparse.Namespace) -> None:
    """Flags of one form of FSDP that the other would ignore."""
    form = fsdp_form(args)
    others = {
        "fsdp2": {
            "--no_preserve_fp32_weights": not args.preserve_fp32_weights,
            "--no-overlap_grad_reduce": not args.overlap_grad_reduce,
            "--no-overlap_param_gather": not args.overlap_param_gather,
            "--no-meta_init": args.meta_init is False,
        },
        "megatron": {
            "--forward_prefetch": args.forward_prefetch != 1,
            "--backward_prefetch": args.backward_prefetch != 1,
            "--cpu_offload": args.cpu_offload,
        },
    }
    for flag, given in others[form].items():
        if given:
            owner = "megatron" if form == "fsdp2" else "fsdp2"
            raise UsageError(f"{flag} needs --fsdp {owner}, this is {form}")
    if form == "fsdp2":
        if args.cpu_offload and device_type() == "cpu":
            raise UsageError("--cpu_offload needs CUDA: here everything is in host memory anyway")
        return
    check_megatron_runs_here()
    strategy = zero_dp_strategy(args)
    if strategy == 0 and args.meta_init:
        raise UsageError("--meta_init needs --zero_dp_strategy 1, 2 or 3: Megatron-FSDP refuses 0")
    if strategy >= 2 and not args.overlap_grad_reduce:
        raise UsageError(f"--zero_dp_strategy {strategy} always overlaps: drop "
                         "--no-overlap_grad_reduce, or use strategy 0 or 1")  # fmt: skip
    if args.dp_outer > 1 and not args.overlap_grad_reduce:
        raise UsageError("--no-overlap_grad_reduce goes without --dp_outer: drop one")
    if strategy == 3 and not args.overlap_param_gather:
        raise UsageError("--zero_dp_strategy 3 always overlaps: drop --no-overlap_param_gather, "
                         "or use strategy 0, 1 or 2")  # fmt: skip


def check_megatron_runs_here() -> None:
    """Raises UsageError where Megatron-FSDP cannot run."""
    if device_type() != "cuda":
        raise UsageError("--fsdp megatron needs CUDA: on the CPU use --fsdp fsdp2")
    try:
        with warnings.catch_warnings():  # that it does without TransformerEngine and Apex
            warnings.simplefilter("ignore")
            import megatron_fsdp  # noqa: F401
    except ImportError:
        raise UsageError("--fsdp megatron needs the package megatron-fsdp: python3 -m pip install "
                         "-r requirements-gpu.txt, or use --fsdp fsdp2") from None  # fmt: skip
    except (OSError, RuntimeError, AssertionError) as error:  # it imports TransformerEngine
        reason = str(error).splitlines()[0]
        raise UsageError("--fsdp megatron: TransformerEngine is installed but broken "
                         f"({reason}): repair or uninstall it") from None  # fmt: skip


def _check_precision(args: argparse.Namespace) -> None:
    cuda = device_type() == "cuda"
    if args.precision == "fp16":
        if not cuda:
            raise UsageError("--precision fp16 needs CUDA: on the CPU use bf16 or fp32")
        if fsdp_form(args) == "megatron":
            raise UsageError("--precision fp16 needs --fsdp fsdp2: with megatron use bf16")
    if "bf16" in (args.precision, args.reduce_dtype) and cuda:
        supported = torch.cuda.is_bf16_supported(including_emulation=False)
        if not supported:
            name = torch.cuda.get_device_name()
            raise UsageError(f"{name} has no bf16: use --precision fp16 or fp32")
    if not args.preserve_fp32_weights and args.precision == "fp32":
        raise UsageError("--no_preserve_fp32_weights needs --precision bf16: fp32 is asked for")
    if not args.preserve_fp32_weights and args.reduce_dtype != "bf16":
        raise UsageError("--no_preserve_fp32_weights needs --reduce_dtype bf16: gradients have the "
                         "weights' precision")  # fmt: skip
    if fsdp_form(args) == "megatron" and args.reduce_dtype != "fp32" and mesh(args).shard == 1:
        raise UsageError(f"--reduce_dtype {args.reduce_dtype} needs --dp_shard of 2 or more with "
                         "--fsdp megatron")  # fmt: skip
    if args.tf32 and not cuda:
        raise UsageError("--tf32 needs CUDA")
    if args.reduce_dtype == "fp16" and args.precision != "fp16":
        raise UsageError("--reduce_dtype fp16 needs --precision fp16, whose loss is scaled")
