"""Prints, as JSON, where the devices of a slice are, in the order of each kind of mesh."""

import json
import os
import sys

from tools.compile_only.compiler import JAX_WITHOUT_TPU, device_ids, devices_of
from xla_fsdp.tpu import libtpu_environment, parse_topology, takes_newer_libtpu

if __name__ == "__main__":
    os.environ |= JAX_WITHOUT_TPU
    topology = parse_topology(sys.argv[1])
    if takes_newer_libtpu("auto", topology):
        os.environ |= libtpu_environment(topology, "", newer=True)
    devices = devices_of(topology)
    places = {device.id: device.coords for device in devices}
    orders = {by_host: device_ids(devices, by_host) for by_host in (False, True)}
    print(json.dumps({str(key): [places[each] for each in order] for key, order in orders.items()}))
