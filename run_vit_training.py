"""Train and use a Vision Transformer; ``--help`` lists every flag, README.md the first commands."""

from __future__ import annotations

import argparse
import faulthandler
import functools
import sys
from collections.abc import Callable, Sequence
from typing import Any

from training.arguments import DEFAULT_MODEL, build_parser, model_config
from training.backend_arguments import check_foreign_flags
from training.errors import (
    RunFailed,
    SelfCheckFailed,
    StoppedBySignal,
    UsageError,
    is_first_of_torchrun,
    tells,
)
from training.parent import end_with_torchrun


def choose_backend(choice: str) -> str:
    """ "xla" or "cuda": what was asked for; for auto TPU, else CUDA, else XLA on the CPU."""
    if choice != "auto":
        return choice
    import torch

    from xla_fsdp.options import device_type

    if device_type() == "CPU" and torch.cuda.is_available():
        return "cuda"
    return "xla"


Prepare = Callable[[argparse.Namespace, int], Any]
"""From the arguments and the number of devices to the body of every process."""


def prepare_training(args: argparse.Namespace, device_count: int) -> Any:
    from training.run import prepare, run

    return functools.partial(run, prepare(args, device_count))


def prepare_self_check(args: argparse.Namespace, device_count: int) -> Any:
    from training.self_check.run import prepare_self_check

    return prepare_self_check(args, device_count)


def run_on_xla(args: argparse.Namespace, prepare: Prepare) -> None:
    from xla_fsdp import options
    from xla_fsdp.attention.choice import attention_form, check_attention
    from xla_fsdp.launch import launch

    options.check(args)
    check_attention(args)
    if args.self_check:  # with few tokens, auto would choose otherwise
        args.attention = attention_form(args)
    devices = options.device_count(args)
    options.check_devices(args, model_config(args), devices)
    options.check_libtpu()
    launch(_naming_itself(prepare(args, devices)), args)


def run_on_gpus(args: argparse.Namespace, prepare: Prepare) -> None:
    from gpu_fsdp import options
    from gpu_fsdp.launch import launch

    options.check(args, model_config(args))
    launch(_naming_itself(prepare(args, options.world_size())), args)


def _naming_itself(body: Callable[..., None]) -> Callable[..., None]:
    from training.processes import naming_itself

    return functools.partial(naming_itself, body)


def main(argv: Sequence[str] | None = None) -> int:
    """Parse, check, choose the backend, run. Returns the exit code."""
    end_with_torchrun()
    parser = build_parser()
    args = parser.parse_args(argv, argparse.Namespace(model=None))  # None: a checkpoint's own
    try:
        return _run(parser, args)
    except UsageError as error:
        if tells(error):
            where = f"{error.process}: " if error.process else ""
            print(f"run_vit_training.py: error: {where}{error}", file=sys.stderr)
        return 2
    except RunFailed as failure:
        if is_first_of_torchrun():
            print(f"run_vit_training.py: error: {failure}", file=sys.stderr)
        return failure.exit_code
    except (SelfCheckFailed, StoppedBySignal) as end:
        return end.exit_code
    except KeyboardInterrupt:
        print("run_vit_training.py: interrupted", file=sys.stderr)
        return 130


def _run(parser: argparse.ArgumentParser, args: argparse.Namespace) -> int:
    """What the flags ask for: train, compile, predict or evaluate. Returns the exit code."""
    prepare: Prepare = prepare_training
    if args.eval_batches is None:
        args.eval_batches = args.max_steps or 0 if args.fake_data else 0
    if args.json and not (args.predict or args.eval_only or args.compile_only):
        raise UsageError("--json needs --predict, --eval_only or --compile_only")
    if args.tpu_topology and not args.compile_only:
        raise UsageError("--tpu_topology needs --compile_only")
    if args.self_check:
        for flag in ("predict", "eval_only", "compile_only"):
            if getattr(args, flag):
                raise UsageError(f"--self_check is of a training run: drop it, or --{flag}")
        prepare = prepare_self_check
    if args.predict or args.eval_only:
        from training.inference import open_trained, predict, prepare_evaluation

        weights = open_trained(args)
        if args.predict:
            predict(args, weights)
            return 0
        prepare = functools.partial(prepare_evaluation, weights)
    else:
        args.model = args.model or DEFAULT_MODEL
    if args.compile_only:
        from xla_fsdp.compile_only.run import compile_only

        check_foreign_flags(parser, args, "xla")
        return compile_only(args)
    backend = choose_backend(args.backend)
    check_foreign_flags(parser, args, backend)
    {"xla": run_on_xla, "cuda": run_on_gpus}[backend](args, prepare)
    return 0


if __name__ == "__main__":
    faulthandler.enable()  # a crash in compiled code tells which line of Python called it
    sys.exit(main())
