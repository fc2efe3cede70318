"""The stacks that ``--plan`` plans for: what each accepts and compiles, and how it is started."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from gpu_fsdp.config import TorchConfig
from models.spec import ModelSpec
from tools.compile_only import compiler, torchtpu
from training.config import RunConfig
from training.errors import UsageError
from xla_fsdp.config import XlaConfig
from xla_fsdp.estimates import POLICIES, SIMPLE_FSDP, SPMD, FsdpCost
from xla_fsdp.resolve_xla import resolve_for_slice
from xla_fsdp.tpu import CHIPS, Topology, takes_newer_libtpu

PROGRAM = "run_vit_training.py"


@dataclass(frozen=True)
class Stack(ABC):
    """A backend for TPUs, and its flags."""

    xla: XlaConfig
    """Of PyTorch/XLA all flags, of others those about the slice and its compiler."""

    choices: ClassVar[dict[str, tuple[Any, ...]]] = {
        "grad_ckpt": tuple(POLICIES),
        "grad_accum_steps": (1, 2, 4, 8, 16),
        "attention": ("sdpa", "whole", "flash"),
        "mesh_domain": (1, 2, 4, 8),
        "mesh_tensor": (1, 2, 4, 8),
    }
    """The values of each flag that are tried, by its field; one that the user gives stays as given.
    What the program refuses is no candidate."""

    program: ClassVar[Sequence[str]]
    """What starts the program on a host."""
    program_of_launchers: ClassVar[Sequence[str]]
    """The same where the environment is the one that launchers make."""
    launcher_flags: ClassVar[Sequence[str]] = ()
    """What launchers that get a slice are told."""

    @property
    @abstractmethod
    def fsdp(self) -> FsdpCost:
        """What its program of a step moves and holds."""

    @abstractmethod
    def check_installed(self) -> None:
        """Raise UsageError if something is missing that compiling a step needs."""

    @abstractmethod
    def check_compiler(self, topology: Topology) -> None:
        """Raise UsageError if no compiler here knows the chips of a slice."""

    @abstractmethod
    def check(self, config: RunConfig, topology: Topology, model: ModelSpec) -> None:
        """Raise UsageError if the program refuses to train on a slice."""

    @abstractmethod
    def configs(self, config: RunConfig) -> list[Any]:
        """Return the configurations of a run that trains."""

    @abstractmethod
    def configs_to_compile(self, step: RunConfig, topology: Topology) -> list[Any]:
        """Return the configurations with which ``--compile_only`` compiles a step."""

    def that_trains_on(self, topology: Topology) -> "Stack":
        """Return the stack that can train on a slice."""
        return self


@dataclass(frozen=True)
class PyTorchXla(Stack):
    program = ("python3", PROGRAM)
    program_of_launchers = (".venv/bin/python", "-u", PROGRAM)

    @property
    def fsdp(self) -> FsdpCost:
        return SPMD

    def check_installed(self) -> None:
        compiler.check_installed("--plan")

    def check_compiler(self, topology: Topology) -> None:
        takes_newer_libtpu(self.xla.tpu_compiler, topology)

    def check(self, config: RunConfig, topology: Topology, model: ModelSpec) -> None:
        run, xla = self.configs(config)
        resolve_for_slice(run, xla, topology, model)
        if (other := self.that_trains_on(topology)) is not self:
            other.check(config, topology, model)

    def configs(self, config: RunConfig) -> list[Any]:
        return [config, replace(self.xla, tpu_topology=None, tpu_compiler="auto")]

    def configs_to_compile(self, step: RunConfig, topology: Topology) -> list[Any]:
        return [step, replace(self.xla, compile_only=True, tpu_topology=topology.name)]

    def that_trains_on(self, topology: Topology) -> Stack:
        if topology.chip is CHIPS["tpu7x"]:  # torch_xla does not run there
            return TorchTpu(XlaConfig(), TorchConfig())
        return self


@dataclass(frozen=True)
class TorchTpu(Stack):
    """TorchTPU with SimpleFSDP."""

    torch: TorchConfig

    # With other values of --grad_ckpt blocks are no loop, and each takes the compiler minutes.
    choices = Stack.choices | {"grad_ckpt": ("full",), "attention": ("plain", "whole", "flash")}
    program = program_of_launchers = ("launch/torchrun.sh",)
    launcher_flags = ("--torchtpu", "--env", "PYTHON=.venv-torchtpu/bin/python")

    @property
    def fsdp(self) -> FsdpCost:
        return replace(SIMPLE_FSDP, reduce_bytes=2 if self.torch.reduce_dtype == "bf16" else 4)

    def check_installed(self) -> None:
        torchtpu.check_installed("--plan")

    def check_compiler(self, topology: Topology) -> None:
        torchtpu.check_compiler(topology)

    def check(self, config: RunConfig, topology: Topology, model: ModelSpec) -> None:
        run, torch = self.configs(config)
        torchtpu.resolve_for_slice(run, torch, topology)

    def configs(self, config: RunConfig) -> list[Any]:
        return [replace(config, backend="torchtpu"), self.torch]

    def configs_to_compile(self, step: RunConfig, topology: Topology) -> list[Any]:
        asked = XlaConfig(compile_only=True, tpu_topology=topology.name)
        return [*self.configs(step), asked]


def stack_of(config: RunConfig, xla: XlaConfig, torch: TorchConfig) -> Stack:
    """Return the stack that the flags choose. Raises UsageError."""
    if config.backend != "torchtpu":
        return PyTorchXla(xla)
    if torch.fsdp not in ("auto", "simple"):
        raise UsageError(f"--plan with --backend torchtpu requires --fsdp simple, not {torch.fsdp}")
    return TorchTpu(xla, replace(torch, fsdp="simple"))
