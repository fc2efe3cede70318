"""For test_sharding: what lies on the first device after two steps, read off the device.

Takes the number of devices and model flags; prints one JSON line.
"""

import json
import sys

import torch

from tests.support.resolved import on_xla
from training.schedule import StepRates
from training.step import shard_and_optimize
from xla_fsdp.launch_xla import launch


def measure(run, backend) -> None:
    import torch_xla

    model = shard_and_optimize(run, backend)
    batch = {"image": torch.randn(8, 3, 16, 16), "target": torch.arange(8)}
    images, labels = backend.put(batch, {}).values()
    for _ in range(2):
        loss = torch.nn.functional.cross_entropy(model(images), labels)
        backend.backward(loss, is_last=True)
        backend.optimizer_step(StepRates(1e-3), 1.0, loss)
    backend.wait()

    def on_first_device(tensors) -> int:
        shards = torch_xla._XLAC._get_local_shards(list(tensors))
        return sum(per_device[0][0].nbytes for per_device in shards)

    state = backend._optimizer.state.values()
    measured = {
        "parameters": on_first_device(model.parameters()),
        "optimizer": on_first_device(t for entry in state for t in entry.values()),
    }
    print(json.dumps({"bytes": measured, "told": backend.state_bytes()}))


if __name__ == "__main__":
    launch(measure, on_xla(["--cpu_devices", sys.argv[1], *sys.argv[2:]]))
