"""Train a Vision Transformer; ``--help`` lists every flag, README.md the first commands."""

from __future__ import annotations

import argparse
import functools
import os
import sys
from collections.abc import Sequence

from training.arguments import build_parser, model_config
from training.backend_arguments import check_foreign_flags
from training.errors import UsageError


def choose_backend(choice: str) -> str:
    """ "xla" or "cuda": what was asked for; for auto TPU, else CUDA, else XLA on the CPU."""
    if choice != "auto":
        return choice
    import torch

    from xla_fsdp.options import device_type

    if device_type() == "CPU" and torch.cuda.is_available():
        return "cuda"
    return "xla"


def train_on_xla(args: argparse.Namespace) -> None:
    from training.run import prepare, run
    from xla_fsdp import options
    from xla_fsdp.launch import launch

    options.check(args)
    plan = prepare(args, options.device_count(args))
    launch(functools.partial(run, plan), args)


def train_on_gpus(args: argparse.Namespace) -> None:
    from gpu_fsdp import options
    from gpu_fsdp.launch import launch
    from training.run import prepare, run

    options.check(args, model_config(args))
    plan = prepare(args, options.world_size())
    launch(functools.partial(run, plan), args)


def main(argv: Sequence[str] | None = None) -> int:
    """Parse, check, choose the backend, run. Returns the exit code."""
    parser = build_parser()
    args = parser.parse_args(argv)
    try:
        backend = choose_backend(args.backend)
        check_foreign_flags(parser, args, backend)
        train = {"xla": train_on_xla, "cuda": train_on_gpus}[backend]
        train(args)
    except UsageError as error:
        if os.environ.get("RANK", "0") == "0":  # of all that torchrun started, one says it
            print(f"run_vit_training.py: error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("run_vit_training.py: interrupted", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
