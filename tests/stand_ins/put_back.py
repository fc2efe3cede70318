"""``put_back.py NAME FLAGS``: run_vit_training.py with a fault that only hardware showed once.

Each was in the program, or would be an easy slip, and no test on a CPU alone can tell.
"""

import sys

import run_vit_training


def memory_asked_of_torch_xla():
    """At the first log line: under SPMD, torch_xla raises on a TPU."""
    import torch_xla.core.xla_model as xm

    from xla_fsdp.memory import DeviceMemory

    def read(self):
        if not self._is_known:
            return {}
        info = xm.get_memory_info(self._device)
        return {"used": info["bytes_used"], "limit": info["bytes_limit"]}

    DeviceMemory.read = read


def devices_in_the_order_of_their_numbers():
    """Those along "tensor" are then of different hosts, which have different images."""
    from xla_fsdp.layout import MeshLayout

    MeshLayout._device_order = lambda self: list(range(self.mesh.devices))


def share_taken_for_the_batch():
    """A host's share is sharded over all devices of the slice."""
    from xla_fsdp.spmd import SpmdBackend

    SpmdBackend.put = lambda self, batch: tuple(
        self._layout.send(share, self._layout.activation_spec(share.dim())) for share in batch
    )


def one_host_computes_more():
    """A program of the devices that only the first process runs: the others never come."""
    from training.logs.reports import Reports
    from xla_fsdp.spmd import SpmdBackend

    evaluation, backends = Reports.evaluation, []
    begin = SpmdBackend.__init__
    SpmdBackend.__init__ = lambda self, args: (begin(self, args), backends.append(self))[0]

    def with_a_norm(self, *values):
        if backends[0].is_main:
            sum(p.detach().abs().sum() for p in backends[0]._model.parameters()).item()
        evaluation(self, *values)

    Reports.evaluation = with_a_norm


def main(argv: list[str]) -> int:
    name, *flags = argv
    globals()[name]()
    return run_vit_training.main(flags)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
