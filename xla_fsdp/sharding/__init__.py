"""How tensors lie on a mesh of devices: specs, marks, hosts, tensor parallelism."""
