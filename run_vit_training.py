"""Train and use a Vision Transformer. ``--help`` lists the flags; start with README.md."""

import faulthandler
import functools
import gc
import getpass
import importlib.util
import os
import sys
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import check_python

if __name__ == "__main__":
    check_python.check("run_vit_training.py")

from data.utf8 import use_utf8
from gpu_fsdp.config import TorchConfig
from tools.plan.config import PlanConfig
from training import errors, extensions
from training.command_line import PROGRAM, parse, tell
from training.config import BackendChoice, RunConfig, UseConfig
from training.flags import check_foreign
from training.processes.output import (
    drop_unread_output,
    exit_quietly_on_broken_pipe,
    open_closed_streams,
)
from training.processes.parent import end_at_once, forward_torchrun_signals
from training.rules import check_declarations, check_rules
from xla_fsdp.config import XlaConfig

# -- flags -----------------------------------------------------------------------------------------

BACKEND_CONFIGS = {"xla": XlaConfig, "torch": TorchConfig}
"""The configuration class of each backend package; its ``backends`` lists the names of the backends
in that package. To add one, create a package with a configuration, ``resolve`` and ``launch``, and
register it here, in ``choose_backend`` and in ``run_on_backend``."""

CONFIGS = {"run": RunConfig, **BACKEND_CONFIGS, "plan": PlanConfig}
"""All configuration classes, keyed by the field names of ``Flags``."""

MODE_FLAGS = (
    "ckpt_dir_per_host",
    *(field.name for config in (UseConfig, PlanConfig) for field in fields(config)),
    *("resume_epoch", "init_from", "pretrained", "self_check", "plan", "print_config", "teacher"),
    *("tpu_topology", "explain", "hlo_dir"),
)
"""Fields of flags that select what the program does. Their rules are checked first."""


@dataclass(frozen=True)
class Flags:
    """The parsed command line, not yet resolved."""

    run: RunConfig
    xla: XlaConfig
    torch: TorchConfig
    plan: PlanConfig

    @property
    def backend_configs(self) -> list[Any]:
        return [getattr(self, name) for name in BACKEND_CONFIGS]


def read_flags(argv: Sequence[str] | None = None) -> Flags:
    """Parse a command line; exit with code 2 on an invalid one."""
    flags = Flags(**parse(argv, CONFIGS, _load_extensions))
    if flags.run.extension is None:
        return flags
    names = [extensions.pinned(name) for name in flags.run.extension]
    return replace(flags, run=replace(flags.run, extension=names))


def _load_extensions(words: list[str]) -> None:
    """Add the features of ``--extension``, whose flags are parsed like all others."""
    names = extensions.named_in(words)
    if names:
        import_torch()  # most of them import it
    extensions.use_extensions(names)
    if names:
        check_declarations(CONFIGS.values())


def check_mode_flags(flags: Flags) -> None:
    """Check the rules of the flags that select what the program does. Raises UsageError."""
    check_rules(flags.run, *flags.backend_configs, flags.plan, only=MODE_FLAGS)


# -- what the program does, one function per mode --------------------------------------------------
#
# Modes that run on devices pass ``run_on_backend`` a function ``prepare``, which checks everything
# that can be checked before a device starts, and returns the function to run in every process.


def train(flags: Flags) -> None:
    from training.prepare import plan_start, prepare_training

    config, start, weights = plan_start(flags.run)
    run_on_backend(flags, config, functools.partial(prepare_training, start, weights))


def print_config(flags: Flags) -> None:
    """``--print_config``: print the configuration of a training, and start nothing."""
    from training.prepare import plan_start
    from training.print_config import print_run

    config, _, _ = plan_start(flags.run)
    run_on_backend(flags, config, print_run)


def evaluate(flags: Flags) -> None:
    """``--eval_only``: print the loss and accuracy of trained weights."""
    from training.evaluation.predict import prepare_evaluation
    from training.evaluation.trained import find_trained

    init_from = flags.run.checkpoints.init_from
    if init_from:  # no :=, so that an old Python reads as far as its refusal
        given = f"--init_from {init_from}"
        raise errors.UsageError(f"{given} is incompatible with --eval_only: drop one of the two")
    config, weights = find_trained(flags.run)
    run_on_backend(flags, config, functools.partial(prepare_evaluation, weights))


def judge_features(flags: Flags) -> None:
    """``--eval_only`` with ``--knn``, ``--probe``, ``--rank`` or ``--segment_probe``: evaluate the
    features."""
    from training.evaluation.frozen import prepare_frozen
    from training.evaluation.trained import find_trained

    config, weights = find_trained(flags.run)
    run_on_backend(flags, config, functools.partial(prepare_frozen, weights))


def write_features(flags: Flags) -> None:
    """``--features``: write the features of images."""
    from training.evaluation.features import prepare_features
    from training.evaluation.trained import find_trained

    config, weights = find_trained(flags.run)
    run_on_backend(flags, config, functools.partial(prepare_features, weights))


def self_check(flags: Flags) -> None:
    """``--self_check``: compare a small run on these devices with plain PyTorch."""
    from tools.self_check.check import prepare_self_check

    run_on_backend(flags, _with_initial_model(flags.run), prepare_self_check)


def predict(flags: Flags) -> None:
    """``--predict``: print the most probable classes of images, without a backend."""
    from training.evaluation.predict import predict_images
    from training.evaluation.trained import find_trained

    config, weights = find_trained(flags.run)
    gc.enable()
    predict_images(config, weights)


def compile_only(flags: Flags) -> int:
    """``--compile_only``: compile the step for TPUs without having them."""
    from tools.compile_only import command, torchtpu

    _check_tpu_backend(flags, "--compile_only")
    if flags.run.backend == "torchtpu":
        return torchtpu.compile_step(_with_initial_model(flags.run), flags.torch, flags.xla)
    return command.compile_step(_with_initial_model(flags.run), flags.xla)


def plan(flags: Flags) -> int:
    """``--plan``: search for hardware and flags to train a model."""
    from tools.plan.stacks import stack_of
    from tools.plan.tpu import plan_slices

    _check_tpu_backend(flags, "--plan")
    stack = stack_of(flags.run, flags.xla, flags.torch)
    return plan_slices(_with_initial_model(flags.run), stack, flags.plan)


def list_models(pattern: str) -> int:
    """``--list_models``: print the models whose names match; return 1 if there is none."""
    from models.registry import list_models

    models = list_models(pattern)
    for model in models:
        about = f"{model.parameters:>18,} parameters" if model.parameters else model.refused or ""
        if model.no_tensor_parallel:
            about += f", no --mesh_tensor: {model.no_tensor_parallel}"
        print(f"{model.name:<60} {about}".rstrip())
    return 0 if models else 1


def _with_initial_model(config: RunConfig) -> RunConfig:
    """Return the configuration with the model of ``--init_from``, if it is set. Weights on the Hub
    do not change a model that is named, so they are not downloaded."""
    from training.files import is_on_hub
    from training.weights.describe import take_over_described
    from training.weights.find import find

    name = config.checkpoints.init_from
    if not name or (config.model.model and is_on_hub(name)):
        return config
    return take_over_described(config, find(name, "--init_from"), keeps_head=False)[0]


def _check_tpu_backend(flags: Flags, mode: str) -> None:
    if flags.run.backend == "cuda":
        raise errors.UsageError(f"{mode} requires --backend xla or torchtpu, not cuda")
    backend = "torchtpu" if flags.run.backend == "torchtpu" else "xla"
    check_foreign(flags.backend_configs, backend, flags.run.explicitly_set)


# -- on a backend ----------------------------------------------------------------------------------

Prepare = Callable[[Any], tuple[Any, Callable[[Any, Any], None] | None]]
"""Takes a resolved run and returns (run, body). The run is unchanged, except for --self_check,
which starts the backend for a small one. The body is called with the run and the backend in every
process; without one, no backend is started."""


def choose_backend(choice: BackendChoice) -> BackendChoice:
    """Return the backend to use. With auto: a TPU backend if there is a TPU, else CUDA if there is
    a GPU or torch_xla is not installed (PyTorch then runs on the CPU), else XLA on the CPU."""
    if choice != "auto":
        return choice
    from torch_fsdp.devices import Cuda, Tpu
    from xla_fsdp.environment import device_type

    backend: BackendChoice
    has_xla = importlib.util.find_spec("torch_xla") is not None
    if has_xla and device_type() == "TPU":
        backend, package = "xla", "torch_xla"
    elif Tpu().count():
        backend, package = "torchtpu", "torch_tpu"
    else:
        return "xla" if has_xla and not Cuda().count() else "cuda"
    if errors.is_first_of_torchrun():
        version = errors.installed_version(package)
        print(f"{PROGRAM}: --backend auto: using {backend} ({package} {version})", file=sys.stderr)
    return backend


def run_on_backend(flags: Flags, config: RunConfig, prepare: Prepare) -> None:
    """Resolve the run for its backend, prepare it, and run its body, if any, in every process."""
    backend = choose_backend(config.backend)
    check_foreign(flags.backend_configs, backend, config.explicitly_set)
    launch: Callable[[Callable[[Any, Any], None], Any], None]
    if backend == "xla":
        from xla_fsdp import resolve_xla
        from xla_fsdp.launch_xla import forbid_autograd, launch

        with forbid_autograd():
            run, body = prepare(resolve_xla.resolve(config, flags.xla))
        resolve_xla.check_installed()
    else:
        from gpu_fsdp import resolve_gpu
        from torch_fsdp.launch_torch import launch

        run, body = prepare(resolve_gpu.resolve(replace(config, backend=backend), flags.torch))
    if body is None:
        return
    from training.processes.exchange import tag_errors_with_rank

    gc.freeze()  # objects that exist by now stay alive: never scan them for garbage
    gc.enable()
    launch(functools.partial(tag_errors_with_rank, body), run)


# -- the program -----------------------------------------------------------------------------------


@exit_quietly_on_broken_pipe(PROGRAM)
def main(argv: Sequence[str] | None = None) -> int:
    """Parse the flags and do what they ask for; return the exit code."""
    forward_torchrun_signals()
    # A checkpoint that another user can replace is resumed, whatever the umask: never allow it.
    os.umask(os.umask(0o002) | 0o002)
    # PyTorch would import torch_tpu wherever it is installed. Even without a TPU, torch_tpu starts
    # its runtime at the first backward pass and spends minutes looking for Google's metadata
    # server.
    os.environ.setdefault("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")
    # Set USER when the uid has no passwd entry (common in containers): else PyTorch 2.9 fails in
    # torch/_inductor/runtime/cache_dir_utils.py, which names a folder after the user.
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
    except Exception as error:
        extensions.explain(error)
        raise
    finally:
        gc.enable()
        # The traceback of a failure holds process groups, whose threads may abort Python's end, and
        # loaders that could not start, whose __del__ fails.
        hook, sys.unraisablehook = sys.unraisablehook, lambda unraisable: None
        gc.collect()
        sys.unraisablehook = hook


def import_torch() -> None:
    """Import PyTorch. Raises UsageError for an environment variable that it refuses on import, as
    TORCH_LOGS and TORCH_DISTRIBUTED_DEBUG."""
    gc.disable()
    try:
        import torch  # noqa: F401
    except (ValueError, OSError) as error:
        reason = textwrap.shorten(str(error), 160)
        raise errors.UsageError(
            f"PyTorch cannot be imported ({reason}): correct its environment variables, TORCH_*"
        ) from None
    finally:
        gc.enable()


def _run(flags: Flags) -> int:
    """Select the mode that the flags ask for and run it; return the exit code."""
    config, use = flags.run, flags.run.use
    if config.list_models is None:
        check_mode_flags(flags)
    import_torch()
    if config.list_models is not None:
        return list_models(config.list_models)
    if flags.xla.compile_only:
        return compile_only(flags)
    if config.plan:
        return plan(flags)

    # Imports create a million objects that stay alive. Scanning them for garbage repeatedly takes a
    # tenth of the import time (docs/evidence/benchmarks.md).
    gc.disable()
    if use.predict:
        predict(flags)
        return 0
    mode = train
    if use.features:
        mode = write_features
    elif use.judges_features:
        mode = judge_features
    elif use.eval_only:
        mode = evaluate
    elif config.self_check:
        mode = self_check
    elif config.print_config:
        mode = print_config
    with drop_unread_output(PROGRAM):  # else launchers restart a run that nobody watches
        mode(flags)
    return 0


if __name__ == "__main__":
    use_utf8()
    open_closed_streams()
    faulthandler.enable()  # print the Python stack on a crash in compiled code
    try:
        exit_code = main()
    except Exception:  # noqa: BLE001 - as Python does, but exit at once: a restart waits
        sys.excepthook(*sys.exc_info())
        end_at_once(1)
    sys.exit(exit_code)
