"""run_vit_training.py with a fault in the backend or below it, as FAULT says.

One of ``GPU`` or ``XLA``. Nothing in ``tools/self_check`` is touched. Virtual devices of one XLA
process cannot fail one by one: there a fault does to the values what it would have done.
"""

import os
import sys

import torch
import torch.distributed as dist
import torch.nn.functional as F

import run_vit_training
from tests.stand_ins.megatron_on_cpu import without_cuda
from training.objectives.objective import dino, mae


def after(owner, name, also):
    """Have a method followed by another, which gets the object."""
    method = getattr(owner, name)

    def both(self, *args, **kwargs):
        result = method(self, *args, **kwargs)
        also(self)
        return result

    setattr(owner, name, both)


def last_process(backend) -> bool:
    return backend.batch_shard == backend.batch_shards - 1


# -- in any backend -------------------------------------------------------------------


def spoil_put(backend_class, spoil):
    """What the last process, or the last device of one process, is given."""
    put = backend_class.put

    def spoiled(self, batch):
        images, labels = (part.clone() for part in batch)
        if last_process(self):
            first = len(images) // 2 if self.batch_shards == 1 else 0
            spoil(images[first:])
        return put(self, (images, labels))

    backend_class.put = spoiled


def other_data(backend_class):
    generator = torch.Generator().manual_seed(1)
    spoil_put(backend_class, lambda images: images.random_(256, generator=generator))


def wrong_row(backend_class):
    """The last image takes the place of the first."""
    spoil_put(backend_class, lambda images: images[0].copy_(images[-1]))


def lost_optimizer_shard(backend_class):
    """A process, of XLA a parameter, does not get its moments back."""
    state, load_state = backend_class.state, backend_class.load_state
    kept = []

    def remembered(self, **kwargs):
        # What is read from a checkpoint goes into the state that was asked for last.
        kept.clear()
        if last_process(self):
            moments = [each["exp_avg"] for each in self._optimizer.state.values()]
            moments = moments[:1] if hasattr(self, "_named_parameters") else moments
            kept.extend((moment, moment.clone()) for moment in moments)
        return state(self, **kwargs)

    def load_in_part(self, loaded):
        load_state(self, loaded)
        for moment, before in kept:
            moment.copy_(before)

    backend_class.state, backend_class.load_state = remembered, load_in_part


def teacher_stands_still(backend_class):
    """A process, of XLA all of them, does not average its part of the weights."""

    def keep(self):
        if last_process(self):
            self._ema.update = lambda *args: None

    after(backend_class, "build_optimizer", keep)


# -- on GPUs, in several processes ----------------------------------------------------


def gpu_scaled_gradient(backend_class):
    def scale(self):
        for part in self._locals.values():
            if part.grad is not None:
                part.grad.mul_(self.batch_shards)

    after(backend_class, "_collect_gradients", scale)


def gpu_dropped_all_reduce(backend_class):
    """What the others have for the last process does not arrive there."""
    reduce_scatter = dist.reduce_scatter_tensor

    def without_others(output, input, *args, group=None, **kwargs):
        if dist.get_rank(group) < dist.get_world_size(group) - 1:
            input.chunk(dist.get_world_size(group))[-1].zero_()
        return reduce_scatter(output, input, *args, group=group, **kwargs)

    dist.reduce_scatter_tensor = without_others


def gpu_stale_weight(backend_class):
    """FSDP2: the first block stays gathered. Megatron-FSDP: its new weights are not installed."""
    if backend_class.__name__ == "Fsdp2Backend":
        after(
            backend_class,
            "backward",
            lambda self: self._model.blocks[0].set_reshard_after_backward(False),
        )
        return
    after_update = backend_class._after_update

    def without_installing(self):
        self._model.install_optimized_model_weights = lambda: None
        after_update(self)

    backend_class._after_update = without_installing


def gpu_clipping_per_shard(backend_class):
    def clip_apart(self):
        self._sharded_alike = [(names, []) for names, _ in self._sharded_alike]

    after(backend_class, "shard", clip_apart)


GPU = {
    "scaled gradient": gpu_scaled_gradient,
    "dropped all-reduce": gpu_dropped_all_reduce,
    "other data": other_data,
    "stale weight": gpu_stale_weight,
    "clipping per shard": gpu_clipping_per_shard,
    "wrong row": wrong_row,
    "lost optimizer shard": lost_optimizer_shard,
    "teacher stands still": teacher_stands_still,
}


# -- on XLA, in one process -----------------------------------------------------------


def trained(backend) -> list:
    """The parameters that have gradients: not the fixed positions of a masked autoencoder."""
    return [p for p in backend._named_parameters().values() if p.grad is not None]


def xla_scaled_gradient(backend_class):
    clip = backend_class._clip_grad_norm

    def scaled(self, max_norm):
        for parameter in trained(self):
            parameter.grad = parameter.grad * max(2, self.device_count)
        return clip(self, max_norm)

    backend_class._clip_grad_norm = scaled


class OwnRows(torch.autograd.Function):
    """Leaves values (images, ...) as they are; gradients are those of the first device alone."""

    @staticmethod
    def forward(ctx, logits):
        return logits * 1.0

    @staticmethod
    def backward(ctx, grad):
        first = torch.arange(len(grad), device=grad.device) < len(grad) // 2
        return grad * first.view(-1, *[1] * (grad.dim() - 1)) * 2


def xla_dropped_all_reduce(backend_class):
    """Of each objective, where it compares what the model returned: (images, ...)."""
    on_xla = {True: OwnRows.apply, False: lambda found: found}

    def spoil(owner, name):
        compare = getattr(owner, name)

        def own(found, *args, **kwargs):
            return compare(on_xla[found.device.type == "xla"](found), *args, **kwargs)

        setattr(owner, name, own)

    spoil(F, "cross_entropy")
    spoil(dino, "class_loss")
    spoil(mae, "masked_errors")


def xla_stale_weight(backend_class):
    """In each forward and backward pass a weight of the blocks is what it was in the first one."""
    begin, clip = backend_class.begin_pass, backend_class._clip_grad_norm
    first: dict = {}

    def chosen(self):
        named = self._named_parameters().items()
        return next(parameter for name, parameter in named if name.endswith("mlp.fc1.weight"))

    def stale(self, pass_index):
        begin(self, pass_index)
        weight = chosen(self)
        with torch.no_grad():
            first.setdefault("value", weight.detach().cpu())
            first["new"] = weight.detach().cpu()
            weight.copy_(first["value"].to(weight.device))

    def restored(self, max_norm):
        weight = chosen(self)
        with torch.no_grad():
            weight.copy_(first["new"].to(weight.device))
        return clip(self, max_norm)

    backend_class.begin_pass, backend_class._clip_grad_norm = stale, restored


def xla_clipping_per_shard(backend_class):
    """Halves of each gradient are clipped apart; the norm that is told is right."""
    clip = backend_class._clip_grad_norm

    def apart(self, max_norm):
        gradients = [p.grad for p in trained(self)]
        halves = [gradient.flatten().chunk(2) for gradient in gradients]
        whole = clip(self, float("inf"))
        norms = [sum(h[i].square().sum() for h in halves).sqrt() for i in (0, 1)]
        for parameter, cut in zip(trained(self), halves, strict=True):
            parts = [p * (max_norm / n).clamp(max=1) for p, n in zip(cut, norms, strict=True)]
            parameter.grad = torch.cat(parts).view_as(parameter)
        return whole

    backend_class._clip_grad_norm = apart


XLA = GPU | {
    "scaled gradient": xla_scaled_gradient,
    "dropped all-reduce": xla_dropped_all_reduce,
    "stale weight": xla_stale_weight,
    "clipping per shard": xla_clipping_per_shard,
}


def main(argv: list[str]) -> int:
    fault = os.environ["FAULT"]
    if "cuda" not in argv:
        from xla_fsdp.nested import NestedBackend
        from xla_fsdp.spmd import SpmdBackend

        XLA[fault](NestedBackend if "nested" in argv else SpmdBackend)
    elif "megatron" in argv:
        without_cuda()
        from gpu_fsdp.megatron import MegatronBackend

        GPU[fault](MegatronBackend)
    else:
        from torch_fsdp.fsdp2 import Fsdp2Backend

        GPU[fault](Fsdp2Backend)
    return run_vit_training.main(argv)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
