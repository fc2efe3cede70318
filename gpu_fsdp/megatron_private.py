"""What is used of megatron-fsdp beyond its documented interface, in one place."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

WRITTEN_FOR = {"megatron-fsdp": "0.6.1"}


def optimizer_parameters(model: Any) -> dict[str, DTensor]:
    """Return, by its name in the module, the DTensor that the optimizer is to update of each."""
    return dict(model.param_and_grad_buffer.optimizer_named_parameters)


def local_range(parameter: DTensor) -> slice:
    """Return which of a parameter's elements, flattened, this process updates."""
    return getattr(parameter, "megatron_fsdp_slice", slice(0, parameter.numel()))


def set_last_micro_batch(model: Any, is_last: bool) -> None:
    """Let the hooks know of the coming backward pass whether they are to reduce what is left."""
    model.is_last_microbatch = is_last


def remove_guards_of_casts(model: Any) -> None:
    """Give parameters back PyTorch's ``to`` and ``cpu``.

    The package's own look at the parameter's storage, which torch.compile cannot trace, only to
    warn of a use that this program has none of.
    """
    for parameter in model.raw_param.values():
        for method in ("to", "cpu"):
            vars(parameter).pop(method, None)


def remove_gradient_hooks(model: Any) -> None:
    """Remove the hooks in the parameters, which hold the model and would keep it alive."""
    for hook in model.grad_acc_hooks.values():
        hook.remove()
