"""Train a Vision Transformer; ``--help`` lists every flag, README.md the first commands."""

from __future__ import annotations

import functools
import sys
from collections.abc import Sequence

from training.arguments import parse_arguments
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


def main(argv: Sequence[str] | None = None) -> int:
    """Parse, check, choose the backend, run. Returns the exit code."""
    args = parse_arguments(argv)
    try:
        if choose_backend(args.backend) == "cuda":
            raise UsageError("there is no CUDA backend in this version yet: use --backend xla")
        from training.run import prepare, run
        from xla_fsdp import options
        from xla_fsdp.launch import launch

        options.check(args)
        plan = prepare(args, options.device_count(args))
        launch(functools.partial(run, plan), args)
    except UsageError as error:
        print(f"run_vit_training.py: error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("run_vit_training.py: interrupted", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
