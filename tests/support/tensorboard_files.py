"""Read TensorBoard's event files, as TensorBoard does."""

import struct
from collections.abc import Iterator
from pathlib import Path

from tensorboardX.proto.event_pb2 import Event, SessionLog


def events_in(folder: Path) -> Iterator[Event]:
    """All events of a folder, oldest file first; a file ends where a record is cut off."""
    for path in sorted(folder.iterdir()):
        content, at = path.read_bytes(), 0
        while at + 12 <= len(content):  # records: length, its checksum, event, its checksum
            (length,) = struct.unpack_from("<Q", content, at)
            if at + length + 16 > len(content):
                break
            yield Event.FromString(content[at + 12 : at + 12 + length])
            at += length + 16


def scalars_of(folder: Path, tag: str) -> list[tuple[int, float]]:
    """The points of a curve that TensorBoard shows: a start hides what was there of its steps."""
    points: list[tuple[int, float]] = []
    for event in events_in(folder):
        if event.session_log.status == SessionLog.START:
            points = [point for point in points if point[0] < event.step]
        found = (value.simple_value for value in event.summary.value if value.tag == tag)
        points += [(event.step, value) for value in found]
    return points
