"""Read the traces of XLA's profiler: the fields that are used of its protocol buffers.

The messages are those of xplane.proto and hlo.proto in github.com/openxla/xla, built here from
field numbers: the packages that contain them (tensorflow, xprof) weigh hundreds of megabytes.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.protobuf.message import DecodeError

_MESSAGES = {
    "Stat": {
        "metadata_id": (1, "INT64"),
        "uint64": (3, "UINT64"),
        "int64": (4, "INT64"),
        "text": (5, "BYTES"),
        "bytes": (6, "BYTES"),
        "ref": (7, "UINT64"),
    },
    "Event": {
        "metadata_id": (1, "INT64"),
        "offset_ps": (2, "INT64"),
        "duration_ps": (3, "INT64"),
        "stats": (4, "Stat"),
    },
    "Line": {"name": (2, "BYTES"), "timestamp_ns": (3, "INT64"), "events": (4, "Event")},
    "EventMetadata": {
        "name": (2, "BYTES"),
        "display_name": (4, "BYTES"),
        "stats": (5, "Stat"),
    },
    "StatMetadata": {"name": (2, "BYTES")},
    # The entries of maps.
    "EventEntry": {"key": (1, "INT64"), "value": (2, "EventMetadata")},
    "StatEntry": {"key": (1, "INT64"), "value": (2, "StatMetadata")},
    "Plane": {
        "name": (2, "BYTES"),
        "lines": (3, "Line"),
        "event_metadata": (4, "EventEntry"),
        "stat_metadata": (5, "StatEntry"),
    },
    "Space": {"planes": (1, "Plane")},
    "HloProto": {"hlo_module": (1, "BYTES")},
}
"""By message, the fields: number and type. Fields whose type is a message are repeated, except for
the values of maps. Text is read as bytes: it need not be UTF-8."""


@dataclass(frozen=True)
class Event:
    """Something that ran from ``start_s`` on, by the clock of its trace."""

    name: str
    start_s: float
    seconds: float
    stats: dict[str, Any]
    """Numbers as int, text and bytes as bytes."""


@dataclass(frozen=True)
class Line:
    """What one thread, or one part of a device, has done."""

    plane: str
    name: str
    events: list[Event]


class Space:
    """A trace. Raises OSError, or ValueError if the file is not one."""

    def __init__(self, path: Path) -> None:
        content = path.read_bytes()
        try:
            self._space = _messages()["Space"].FromString(content)
        except DecodeError:
            raise ValueError(f"{path} is not a trace of XLA's profiler") from None

    def lines(self) -> Iterator[Line]:
        """Yield all lines of all planes."""
        for plane in self._space.planes:
            stat_names = _names_of_stats(plane)
            kinds = {
                entry.key: (_text(entry.value), _stats(entry.value, stat_names))
                for entry in plane.event_metadata
            }
            for line in plane.lines:
                events = []
                for event in line.events:
                    name, stats = kinds.get(event.metadata_id, ("", {}))
                    start_s = line.timestamp_ns / 1e9 + event.offset_ps / 1e12
                    stats = stats | _stats(event, stat_names)
                    events.append(Event(name, start_s, event.duration_ps / 1e12, stats))
                yield Line(plane.name.decode(), line.name.decode(), events)

    def programs(self) -> Iterator[bytes]:
        """Yield the serialized HLO module of each program in the trace, as compiled."""
        for plane in self._space.planes:
            stat_names = _names_of_stats(plane)
            for entry in plane.event_metadata:
                if hlo := _stats(entry.value, stat_names).get("Hlo Proto"):
                    yield _messages()["HloProto"].FromString(hlo).hlo_module


def _text(about: Any) -> str:
    return (about.display_name or about.name).decode(errors="replace")


def _names_of_stats(plane: Any) -> dict[int, str]:
    return {entry.key: entry.value.name.decode() for entry in plane.stat_metadata}


def _stats(holder: Any, names: dict[int, str]) -> dict[str, Any]:
    """Return the stats of an event, or of all events of a kind, by name."""
    stats: dict[str, Any] = {}
    for stat in holder.stats:
        shared = names.get(stat.ref, "").encode()  # a text that the plane has once
        value = stat.text or stat.bytes or shared or stat.int64 or stat.uint64
        stats[names.get(stat.metadata_id, "")] = value
    return stats


@cache
def _messages() -> dict[str, Any]:
    """Return the classes of the messages."""
    file = descriptor_pb2.FileDescriptorProto(name="xspace.proto", package="xspace")
    types = descriptor_pb2.FieldDescriptorProto
    for name, fields in _MESSAGES.items():
        message = file.message_type.add(name=name)
        for field_name, (number, kind) in fields.items():
            field = message.field.add(name=field_name, number=number)
            field.label = types.LABEL_OPTIONAL
            if kind in _MESSAGES:
                field.type, field.type_name = types.TYPE_MESSAGE, f".xspace.{kind}"
                if field_name != "value":
                    field.label = types.LABEL_REPEATED
            else:
                field.type = types.Type.Value(f"TYPE_{kind}")
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return {
        name: message_factory.GetMessageClass(pool.FindMessageTypeByName(f"xspace.{name}"))
        for name in _MESSAGES
    }
