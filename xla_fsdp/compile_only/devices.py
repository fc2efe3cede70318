"""The devices of libtpu's compile-only client: those of a TPU slice that is not there."""

from __future__ import annotations

import os
from typing import Any

from training.errors import UsageError
from xla_fsdp.compile_only.topologies import Topology

JAX_WITHOUT_TPU = {
    "TPU_SKIP_MDS_QUERY": "1",  # there is no metadata server to ask about a TPU
    "JAX_PLATFORMS": "cpu",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",  # no TPU is taken: nothing to lock
}
"""The environment that JAX is to read when it is imported: it must leave the TPU alone."""


def prepare_jax() -> None:
    """Set the environment for JAX, before its first import."""
    os.environ.update(JAX_WITHOUT_TPU)


def devices_of(topology: Topology) -> list[Any]:
    """Return the devices of libtpu's compile-only client. Raises UsageError."""
    from jax.experimental import topologies

    how: dict[str, Any] = {}
    if topology.slices > 1:
        how["num_slices"] = topology.slices
    if topology.slice_chips < 4:  # else it has hosts of 2 x 2 chips; two chips are half of one
        how["chips_per_host_bounds"] = (1, topology.slice_chips, 1)
    if topology.generation == 4:  # a run's libtpu reads the variable itself when it takes the chips
        how["chip_config_name"] = os.environ["TPU_MEGACORE"]
    try:
        devices = topologies.get_topology_desc(topology.name, "tpu", **how).devices
    except Exception as error:  # noqa: BLE001 - jaxlib's own type, of no public name
        raise UsageError(
            f"--tpu_topology {topology.name}: libtpu knows no such slice ({first_line(error)})"
        ) from None
    assert len(devices) == topology.devices, (len(devices), topology)
    return devices


def first_line(error: Exception) -> str:
    """Return what an error of jaxlib's says, without the stack of C++ below it."""
    return str(error).strip().splitlines()[0][:300]
