"""Train and use a Vision Transformer; ``--help`` lists the flags, README.md the first commands."""

import faulthandler
import functools
import gc
import getpass
import importlib.util
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from gpu_fsdp.config import TorchConfig
from training import errors
from training.config import BackendChoice, RunConfig
from training.flags import MODE_FLAGS, PROGRAM, check_foreign, check_rules, parse, tell
from training.processes.output import (
    drop_unread_output,
    exit_quietly_on_broken_pipe,
    open_closed_streams,
)
from training.processes.parent import end_at_once, end_with_torchrun
from xla_fsdp.config import XlaConfig

OWN = {"xla": XlaConfig, "torch": TorchConfig}
"""The configuration of each folder of backends; its ``backends`` are their names. A new one is a
folder with one of these, a function ``resolve`` and a function ``launch``, and its lines here, in
``choose_backend`` and in ``start``."""


@dataclass(frozen=True)
class Flags:
    """Holds the command line, read but not resolved."""

    run: RunConfig
    xla: XlaConfig
    torch: TorchConfig

    @property
    def own(self) -> list[Any]:
        return [getattr(self, name) for name in OWN]


def read_flags(argv: Sequence[str] | None = None) -> Flags:
    """Read the flags of a command line; end the program with exit code 2 on a wrong one."""
    return Flags(**parse(argv, {"run": RunConfig, **OWN}))


def choose_backend(choice: BackendChoice) -> BackendChoice:
    """Return the backend that was asked for; for auto a TPU's, else CUDA, else XLA on the CPU."""
    if choice != "auto":
        return choice
    from torch_fsdp.devices import Cuda, Tpu
    from xla_fsdp.environment import device_type

    found: BackendChoice
    has_xla = importlib.util.find_spec("torch_xla") is not None
    if has_xla and device_type() == "TPU":
        found, package = "xla", "torch_xla"
    elif Tpu.is_available():
        found, package = "torchtpu", "torch_tpu"
    else:
        return "xla" if has_xla and not Cuda.is_available() else "cuda"
    if errors.is_first_of_torchrun():
        version = errors.installed_version(package)
        print(f"{PROGRAM}: --backend auto: {found}, by {package} {version}", file=sys.stderr)
    return found


Prepare = Callable[[Any], tuple[Any, Callable[[Any, Any], None]]]
"""A function from a resolved run to the same with its data, and the body of every process: a
function of a run and a backend."""


def start(backend: BackendChoice, flags: Flags, config: RunConfig, prepare: Prepare) -> None:
    """Resolve the run on the backend, prepare it, and run its body in every process."""
    from training.processes.exchange import naming_itself

    launch: Callable[[Callable[[Any, Any], None], Any], None]
    if backend == "xla":
        from xla_fsdp import resolve_xla
        from xla_fsdp.launch_xla import forbid_autograd, launch

        with forbid_autograd():
            run, body = prepare(resolve_xla.resolve(config, flags.xla))
        resolve_xla.check_installed()
    else:
        from gpu_fsdp import resolve_gpu
        from torch_fsdp import resolve_torch
        from torch_fsdp.launch_torch import launch

        resolve = resolve_gpu.resolve if backend == "cuda" else resolve_torch.resolve
        run, body = prepare(resolve(replace(config, backend=backend), flags.torch))
    gc.freeze()  # what is there stays: it is never searched for garbage
    gc.enable()
    launch(functools.partial(naming_itself, body), run)


@exit_quietly_on_broken_pipe(PROGRAM)
def main(argv: Sequence[str] | None = None) -> int:
    """Read the flags, and do what they ask for; return the exit code."""
    end_with_torchrun()
    # PyTorch would import torch_tpu wherever that is installed. Without a TPU it starts its runtime
    # at the first backward pass all the same, which looks for Google's metadata server for minutes.
    os.environ.setdefault("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")
    # A user without a name, as a container's may be, gets one: PyTorch 2.9 ends with a traceback as
    # it looks for a folder of that name (torch/_inductor/runtime/cache_dir_utils.py).
    try:
        getpass.getuser()
    except (KeyError, OSError):
        os.environ["USER"] = f"user_{os.getuid()}"
    try:
        return _run(read_flags(argv))
    except errors.UsageError as error:
        tell(error)
        return 2
    except errors.RunFailed as failure:
        if errors.is_first_of_torchrun():
            print(f"{PROGRAM}: error: {failure}", file=sys.stderr)
        return failure.exit_code
    except (errors.SelfCheckFailed, errors.StoppedBySignal) as end:
        return end.exit_code
    except KeyboardInterrupt:
        print(f"{PROGRAM}: interrupted", file=sys.stderr)
        return 130
    finally:
        gc.enable()


def _run(flags: Flags) -> int:
    """Do what the flags ask for; return the exit code."""
    config, use = flags.run, flags.run.use
    if config.list_models is not None:
        from models.registry import list_models

        found = list_models(config.list_models)
        for model in found:
            told = f"{model.parameters:>18,} parameters" if model.parameters else ""
            told = told or model.refused or ""
            if model.no_tensor_parallel:
                told += f", no --mesh_tensor: {model.no_tensor_parallel}"
            print(f"{model.name:<60} {told}".rstrip())
        return 0 if found else 1
    check_rules(config, *flags.own, only=MODE_FLAGS)
    if config.checkpoints.init_from and use.eval_only and not (use.knn or use.probe):
        given = f"--init_from {config.checkpoints.init_from}"
        raise errors.UsageError(f"{given} is incompatible with --eval_only: drop one of the two")
    trains = not (use.predict or use.eval_only or use.features or config.self_check)
    if config.checkpoints.init_from and (flags.xla.compile_only or config.plan or not trains):
        from training.begin import with_model_of_weights

        config, _ = with_model_of_weights(config)
        flags = replace(flags, run=config)
    if config.plan and config.backend == "cuda":
        raise errors.UsageError("--plan compiles the step of --backend xla, this is cuda")
    if config.backend == "torchtpu" and (flags.xla.compile_only or config.plan):
        mode = "--compile_only" if flags.xla.compile_only else "--plan"
        raise errors.UsageError(f"{mode} compiles the step of --backend xla, this is torchtpu")
    if flags.xla.compile_only:
        from tools.compile_only.command import compile_only

        check_foreign(flags.own, "xla", config.given)
        return compile_only(config, flags.xla)
    if config.plan:
        check_foreign(flags.own, "xla", config.given)
        from tools.plan.tpu import plan_slices

        return plan_slices(config, flags.xla)

    # Imports make a million objects that stay. To search them for garbage again and again takes a
    # tenth of their time (docs/evidence/benchmarks.md).
    gc.disable()
    if use.predict:
        from training.initial_weights import find_trained
        from training.predict import predict

        config, weights = find_trained(config)
        gc.enable()
        predict(config, weights)
        return 0
    with drop_unread_output(PROGRAM):  # or launchers would restart a run that nobody watches
        _run_on_devices(flags)
    return 0


def _run_on_devices(flags: Flags) -> None:
    """Train, evaluate, write features or check, in all processes of the backend."""
    config, use = flags.run, flags.run.use
    prepare: Prepare
    if use.features or use.knn or use.probe:
        from training.features import prepare_features
        from training.frozen import prepare_frozen
        from training.initial_weights import find_trained

        config, weights = find_trained(config)
        prepare = functools.partial(prepare_features if use.features else prepare_frozen, weights)
    elif use.eval_only:
        from training.initial_weights import find_trained
        from training.predict import prepare_evaluation

        config, weights = find_trained(config)
        prepare = functools.partial(prepare_evaluation, weights)
    elif config.self_check:
        from tools.self_check.check import prepare_self_check

        prepare = prepare_self_check
    else:
        from training.begin import choose_start
        from training.train import prepare_training

        config, saved, initial = choose_start(config)
        prepare = functools.partial(prepare_training, saved, initial)
    backend = choose_backend(config.backend)
    check_foreign(flags.own, backend, config.given)
    start(backend, flags, config, prepare)


if __name__ == "__main__":
    open_closed_streams()
    faulthandler.enable()  # a crash in compiled code tells which line of Python called it
    try:
        exit_code = main()
    except Exception:  # noqa: BLE001 - as Python would, but at once: a restart waits for this end
        sys.excepthook(*sys.exc_info())
        end_at_once(1)
    sys.exit(exit_code)
