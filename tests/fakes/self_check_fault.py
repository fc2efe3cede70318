"""run_vit_training.py with a fault in the backend or below it, as FAULT says.

Nothing in ``tools/self_check`` is touched. Virtual devices of one XLA process cannot fail one by
one: on XLA there are the faults of any backend alone.
"""

import os
import sys

import torch
import torch.distributed as dist

import run_vit_training
from tests.fakes.megatron_on_cpu import without_cuda


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

    def spoiled(self, batch, fields):
        batch = {name: part.clone() for name, part in batch.items()}
        if last_process(self):
            images = batch["image"]
            first = len(images) // 2 if self.batch_shards == 1 else 0
            spoil(images[first:])
        return put(self, batch, fields)

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


def scaled_gradient(backend_class):
    def scale(self):
        for part in self._locals.values():
            if part.grad is not None:
                part.grad.mul_(self.batch_shards)

    after(backend_class, "_collect_gradients", scale)


def dropped_all_reduce(backend_class):
    """What the others have for the last process does not arrive there."""
    reduce_scatter = dist.reduce_scatter_tensor

    def without_others(output, input, *args, group=None, **kwargs):
        if dist.get_rank(group) < dist.get_world_size(group) - 1:
            input.chunk(dist.get_world_size(group))[-1].zero_()
        return reduce_scatter(output, input, *args, group=group, **kwargs)

    dist.reduce_scatter_tensor = without_others


def stale_weight(backend_class):
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


def clipping_per_shard(backend_class):
    def clip_apart(self):
        self._sharded_alike = [(names, []) for names, _ in self._sharded_alike]

    after(backend_class, "shard", clip_apart)


ON_ANY = {
    "other data": other_data,
    "wrong row": wrong_row,
    "lost optimizer shard": lost_optimizer_shard,
    "teacher stands still": teacher_stands_still,
}
ON_GPUS = ON_ANY | {
    "scaled gradient": scaled_gradient,
    "dropped all-reduce": dropped_all_reduce,
    "stale weight": stale_weight,
    "clipping per shard": clipping_per_shard,
}


def main(argv: list[str]) -> int:
    fault = os.environ["FAULT"]
    if "cuda" not in argv:
        from xla_fsdp.nested import NestedBackend
        from xla_fsdp.spmd import SpmdBackend

        ON_ANY[fault](NestedBackend if "nested" in argv else SpmdBackend)
    elif "megatron" in argv:
        without_cuda()
        from gpu_fsdp.megatron import MegatronBackend

        ON_GPUS[fault](MegatronBackend)
    else:
        from torch_fsdp.fsdp2 import Fsdp2Backend

        ON_GPUS[fault](Fsdp2Backend)
    return run_vit_training.main(argv)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
