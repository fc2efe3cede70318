"""All uses of megatron-fsdp's undocumented interface."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

WRITTEN_FOR = {"megatron-fsdp": "0.6.1"}


def optimizer_parameters(model: Any) -> dict[str, DTensor]:
    """Return the DTensors that the optimizer updates, by the names of their parameters."""
    return dict(model.param_and_grad_buffer.optimizer_named_parameters)


def local_range(parameter: DTensor) -> slice:
    """Return the range of a parameter's flattened elements that this process updates."""
    return getattr(parameter, "megatron_fsdp_slice", slice(0, parameter.numel()))


def set_last_micro_batch(model: Any, is_last: bool) -> None:
    """Tell the hooks whether the next backward pass must reduce all remaining gradients."""
    model.is_last_microbatch = is_last


def remove_guards_of_casts(model: Any) -> None:
    """Restore PyTorch's ``to`` and ``cpu`` on parameters.

    The package's versions inspect the parameter's storage, which torch.compile cannot trace, only
    to warn about a use that does not occur here.
    """
    for parameter in model.raw_param.values():
        for method in ("to", "cpu"):
            vars(parameter).pop(method, None)


def remove_gradient_hooks(model: Any) -> None:
    """Remove the parameters' gradient hooks, whose references would keep the model alive."""
    for hook in model.grad_acc_hooks.values():
        hook.remove()
