"""run_vit_training.py on XLA, with steps that are not finite, as BAD_STEPS says.

``BAD_STEPS="2:loss 4:norm"``: the loss of step 2 is NaN and its gradients are right; the loss of
step 4 is right and its gradients' norm is infinite. All steps are the same graph. With
``BAD_STEPS_ARE=left_out`` these steps have no optimizer step, and nothing is spoiled. Prints each
step's counts of skipped steps.
"""

import os
import sys

import torch

import run_vit_training
from training import step as step_module
from xla_fsdp.xla_backend import XlaBackend

BAD = {
    int(step): what
    for step, what in (each.split(":") for each in os.environ.get("BAD_STEPS", "").split())
}
LEFT_OUT = os.environ.get("BAD_STEPS_ARE") == "left_out"


class Spoil(torch.autograd.Function):
    """Multiplies a value by one number, and its gradient by another."""

    @staticmethod
    def forward(ctx, x, on_value, on_gradient):
        ctx.on_gradient = on_gradient
        return x * on_value

    @staticmethod
    def backward(ctx, grad):
        return grad * ctx.on_gradient, None, None


def main(argv: list[str]) -> int:
    forward_backward, optimizer_step = step_module.forward_backward, XlaBackend.optimizer_step
    steps_done = [0]

    def spoiled(model, objective, backend, done, micro_batches):
        kind = None if LEFT_OUT else BAD.get(done + 1)
        steps_done[0] = done + 1
        factors = [float("nan") if kind == "loss" else 1.0, 1e30 if kind == "norm" else 1.0]
        on_value, on_gradient = backend.constant(torch.tensor(factors))  # 1.0 alone is compiled in
        loss = objective.loss
        objective.loss = lambda *args: Spoil.apply(loss(*args), on_value, on_gradient)
        try:
            return forward_backward(model, objective, backend, done, micro_batches)
        finally:
            objective.loss = loss

    def step_or_not(backend, lr, max_norm, loss):
        if LEFT_OUT and steps_done[0] in BAD:
            backend._clear_gradients()
            norm = loss * 1  # computed with the step: a thread will read it while the next is made
            backend.end_step()
            return norm, backend._skipped
        norm, skipped = optimizer_step(backend, lr, max_norm, loss)
        print(f"step {steps_done[0]} skipped", *map(int, skipped.tolist()), flush=True)
        return norm, skipped

    step_module.forward_backward, XlaBackend.optimizer_step = spoiled, step_or_not
    return run_vit_training.main(argv)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
