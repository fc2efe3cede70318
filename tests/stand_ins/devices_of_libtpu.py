"""Prints, as JSON, where the devices of a slice are, in the order of each kind of mesh."""

import json
import sys

from tools.compile_only.compiler import device_ids, devices_of, prepare_jax
from xla_fsdp.tpu import parse_topology

if __name__ == "__main__":
    prepare_jax()
    devices = devices_of(parse_topology(sys.argv[1]))
    places = {device.id: device.coords for device in devices}
    orders = {by_host: device_ids(devices, by_host) for by_host in (False, True)}
    print(json.dumps({str(key): [places[each] for each in order] for key, order in orders.items()}))
