"""run_vit_training.py on the GPU backend, with steps that are not finite, as BAD_STEPS says.

``BAD_STEPS="2:loss 4:norm"``: the loss of step 2 is NaN, and with it all its gradients; in step 4
one element of the last process's gradients is infinite, and in no other copy. With
``BAD_STEPS_ARE=left_out`` these steps have no optimizer step, and nothing is spoiled. Prints each
step's counts of skipped steps. Megatron-FSDP and fp16 run on the CPU, too.
"""

import os
import sys

import run_vit_training
from tests.fakes.megatron_on_cpu import without_cuda
from torch_fsdp import devices
from torch_fsdp.torch_backend import TorchBackend
from training import step as step_module

BAD = {
    int(step): what for step, what in (each.split(":") for each in os.environ["BAD_STEPS"].split())
}
LEFT_OUT = os.environ.get("BAD_STEPS_ARE") == "left_out"


def main(argv: list[str]) -> int:
    forward_backward = step_module.forward_backward
    clip, optimizer_step = TorchBackend._clip_grad_norm, TorchBackend.optimizer_step
    now = [0, ""]

    def spoiled(model, objective, backend, done, micro_batches):
        now[:] = done + 1, BAD.get(done + 1, "")
        loss = objective.loss
        if now[1] == "loss" and not LEFT_OUT:
            objective.loss = lambda *args: loss(*args) * float("nan")
        try:
            return forward_backward(model, objective, backend, done, micro_batches)
        finally:
            objective.loss = loss

    def clip_spoiled(backend, max_norm):
        if now[1] == "norm" and backend.batch_shard == backend.batch_shards - 1:
            grads = (part.grad for part in backend._locals.values())
            next(g for g in grads if g is not None and g.numel()).view(-1)[0] = float("inf")
        return clip(backend, max_norm)

    def step_or_not(backend, lr, max_norm, loss):
        if LEFT_OUT and now[1]:
            backend._collect_gradients()
            backend._after_update()
            return loss * 1, backend._skipped
        norm, skipped = optimizer_step(backend, lr, max_norm, loss)
        if backend.is_main:
            print(f"step {now[0]} skipped", *map(int, skipped.tolist()), flush=True)
        return norm, skipped

    step_module.forward_backward, TorchBackend.optimizer_step = spoiled, step_or_not
    TorchBackend._clip_grad_norm = clip_spoiled
    if devices.choose("cuda").is_host:
        devices.Cpu.lacks = lambda self, precision: None
    if devices.choose("cuda").is_host and "megatron" in argv:
        without_cuda()
    return run_vit_training.main(argv)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
