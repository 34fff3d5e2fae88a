"""TensorBoard's event files: read, and cut back to where a run goes on. No torch, so that tools answer at once."""

import os
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any


def read_events(path: Path) -> Iterator[Any]:
    """The events of a file. `ValueError` where it breaks, where TensorBoard's own reader stops without a message."""
    for _, event in _read(path):
        yield event


def cut_back(folder: Path, outdated: Callable[[str, int], bool]) -> None:
    """Drop the events from the first one on that is `outdated` (its tag, its step), from each file in `folder`.

    A file holds the events of one process in their order, so what follows an outdated event is outdated too. What is
    behind a damage nobody can read: it stays."""
    for path in folder.glob("events.out.tfevents.*"):
        try:
            for position, event in _read(path):
                if any(outdated(value.tag, event.step) for value in event.summary.value):
                    os.truncate(path, position)
                    break
        except ValueError:
            continue


def _read(path: Path) -> Iterator[tuple[int, Any]]:
    """(position, event) of a file of TFRecords: length, its checksum, the event, its checksum."""
    from tensorboard.compat.proto.event_pb2 import Event

    content = path.read_bytes()
    position = 0
    while position < len(content):
        (length,) = struct.unpack("<Q", _checked(content, position, 8))
        yield position, Event.FromString(_checked(content, position + 12, length))
        position += 16 + length


def _checked(content: bytes, start: int, length: int) -> bytes:
    """`length` bytes from `start` on, which must be followed by their checksum."""
    from tensorboard.compat.tensorflow_stub.pywrap_tensorflow import masked_crc32c

    part, checksum = content[start : start + length], content[start + length : start + length + 4]
    if len(checksum) < 4:
        raise ValueError(f"damaged at byte {start} of {len(content)}: cut short")
    if struct.pack("<I", masked_crc32c(part)) != checksum:
        raise ValueError(f"damaged at byte {start} of {len(content)}: a checksum is wrong")
    return part
