"""torch_xla's runtime on a host of a TPU slice; file and line are those of torch_xla 2.9.0."""

import atexit
import itertools
import json
from math import prod
from typing import Any

import torch
import torch_xla
import torch_xla.core.xla_model as xm
import torch_xla.debug.metrics as met

from .exchange import Exchange
from .machine import Here

XLAC = torch_xla._XLAC


def stand_in(here: Here) -> None:
    exchange = Exchange(here)
    _steps()
    atexit.register(_note_programs, here)
    _devices(here, exchange)
    if here.slice.hosts > 1:
        _shards(here, exchange)
        _sends(here, exchange)
        _master_address(exchange)


def _steps() -> None:
    """A TPU runs one program after the other. XLA's CPU may begin the next one on the threads that
    the first one needs, and both wait for ever: so each is waited for."""
    real = XLAC._xla_step_marker

    def step_marker(device: str, devices: list[str], wait: bool = False, **how: Any) -> None:
        real(device, devices, wait=True, **how)

    XLAC._xla_step_marker = step_marker


def _note_programs(here: Here) -> None:
    """On a pod, hosts that do not run the same programs wait for each other for ever."""
    counts = {name: met.counter_value(name) or 0 for name in ("CachedCompile", "UncachedCompile")}
    if not any(counts.values()):
        return  # it has only started others
    with here.notes.open("a") as file:
        file.write(json.dumps(counts) + "\n")


def local_of(here: Here) -> list[int]:
    return [number for number, owner in enumerate(here.slice.owners()) if owner == here.worker]


def _devices(here: Here, exchange: Exchange) -> None:
    """Numbers and places, as torch_xla/runtime.py (lines 152 to 185) asks for them.

    The client comes into being with the first question, and not before all hosts have one.
    """
    local, started = local_of(here), False

    def start() -> None:
        nonlocal started
        if not started:
            started = True
            exchange.all_gather_object("started")

    def told(answer: Any) -> Any:
        def ask(*_: Any) -> Any:
            start()
            return answer

        return ask

    XLAC._xla_get_process_index = told(here.slice.process_of(here.worker))
    XLAC._xla_get_num_processes = told(here.slice.hosts)
    XLAC._xla_num_runtime_devices = told(len(local))
    XLAC._xla_get_runtime_devices = told([f"TPU:{number}" for number in local])
    XLAC._xla_get_all_device_attributes = told(here.slice.attributes())


def number_of(device: str) -> int:
    return int(device.rpartition(":")[2])


def _shards(here: Here, exchange: Exchange) -> None:
    """torch_xla/distributed/spmd/xla_sharded_tensor.py, lines 136 and 149, sees local ones only."""
    local = set(local_of(here))
    shards, places, load = (
        XLAC._get_local_shards,
        XLAC._get_local_shard_replica_and_indices,
        XLAC._load_local_shards,
    )

    def get_local_shards(tensors: list[torch.Tensor]) -> list:
        return [
            [one for one in of_tensor if number_of(one[1]) in local]
            for of_tensor in shards(tensors)
        ]

    def get_places(tensors: list[torch.Tensor]) -> list:
        return [
            [one for number, one in enumerate(of_tensor) if number in local]
            for of_tensor in places(tensors)
        ]

    def load_local_shards(tensor: torch.Tensor, data: list, devices: list[str]) -> None:
        if {number_of(device) for device in devices} != local:
            raise RuntimeError(f"{devices} are not this host's devices")
        every = [
            pair
            for pairs in exchange.all_gather_object((data, devices))
            for pair in zip(*pairs, strict=True)
        ]
        every.sort(key=lambda pair: number_of(pair[1]))
        load(tensor, *map(list, zip(*every, strict=True)))

    XLAC._get_local_shards = get_local_shards
    XLAC._get_local_shard_replica_and_indices = get_places
    XLAC._load_local_shards = load_local_shards


def _sends(here: Here, exchange: Exchange) -> None:
    """Of what a host sends, its devices get their parts; the others' come from their hosts.

    With ``minibatch`` (torch_xla/core/xla_model.py, line 1269) a host gives its own share, cut
    along dimension 0 over its devices in their order.
    """
    real = xm.send_cpu_data_to_device

    def send(datas: Any, device: Any, input_sharding: Any = None) -> list[torch.Tensor]:
        values = [datas] if isinstance(datas, torch.Tensor) else list(datas)
        if input_sharding is None:
            for each in zip(*exchange.all_gather_object(values), strict=True):
                _assert_equal(each, "a replicated tensor")
            return real(values, device)
        per_host = dict(
            zip(_workers_by_process(here), exchange.all_gather_object(values), strict=True)
        )
        whole = []
        for number in range(len(values)):
            of_hosts = {worker: given[number] for worker, given in per_host.items()}
            whole.append(_whole(here, of_hosts, input_sharding))
        plain = type(input_sharding)(input_sharding.mesh, input_sharding.partition_spec)
        return real(whole, device, plain)

    xm.send_cpu_data_to_device = send


def _workers_by_process(here: Here) -> list[int]:
    return sorted(range(here.slice.hosts), key=here.slice.process_of)


def _whole(here: Here, given: dict[int, torch.Tensor], sharding: Any) -> torch.Tensor:
    """The tensor whose parts on the devices are what their hosts gave them."""
    size = torch.Size(given[0].shape)
    locals_ = len(local_of(here))
    if sharding.minibatch:
        if any(value.size(0) % locals_ for value in given.values()):
            raise RuntimeError(  # as torch_xla/core/xla_model.py, line 1288
                "When minibatch is configured, the per-host batch size must be divisible by "
                f"local runtime device count. {size}, {locals_}"
            )
        size = torch.Size((size[0] * here.slice.hosts, *size[1:]))
    result = torch.empty(size, dtype=given[0].dtype)
    written = torch.zeros(size, dtype=torch.bool)
    owners = here.slice.owners()
    rank_in_host = [owners[:number].count(owner) for number, owner in enumerate(owners)]
    for number, place in places_of(sharding.mesh, sharding.partition_spec, size).items():
        value = given[owners[number]]
        if sharding.minibatch:
            each = value.size(0) // locals_
            part = value[rank_in_host[number] * each :][:each]
            part = part[(slice(None), *place[1:])]
        else:
            part = value[place]
        if written[place].any():
            _assert_equal([result[place], part], f"copies of {place}")
        result[place], written[place] = part, True
    assert written.all()
    return result


def places_of(mesh: Any, spec: tuple, size: torch.Size) -> dict[int, tuple[slice, ...]]:
    """By device number, which part of a tensor of this size lies there."""
    names, shape = list(mesh.axis_names), mesh.mesh_shape
    found = {}
    for position, at in enumerate(itertools.product(*map(range, shape))):
        slices = []
        for length, axes in zip(size, spec, strict=True):
            axes = () if axes is None else axes if isinstance(axes, tuple) else (axes,)
            numbers = [names.index(axis) for axis in axes]
            index = 0
            for number in numbers:
                index = index * shape[number] + at[number]
            each = length // prod(shape[number] for number in numbers)
            slices.append(slice(index * each, (index + 1) * each))
        found[int(mesh.device_ids[position])] = tuple(slices)
    return found


def _assert_equal(values: Any, what: str) -> None:
    first = values[0]
    if not all(torch.equal(first, other) for other in values):
        raise RuntimeError(f"rehearsal: hosts give different values for {what}")


def _master_address(exchange: Exchange) -> None:
    """torch_xla/_internal/tpu.py, line 345: each host gives shards for its devices."""
    real = XLAC._global_tensor_from_cpu_shards

    def from_shards(shards: list[torch.Tensor], sharding: Any) -> torch.Tensor:
        every = exchange.all_gather_object(shards)
        return real([one for shards in every for one in shards], sharding)

    XLAC._global_tensor_from_cpu_shards = from_shards
