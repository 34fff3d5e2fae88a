"""TensorBoard's event files: read, and cut back to where a run goes on. No torch, so that tools answer at once."""

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any


def read_events(path: Path) -> Iterator[Any]:
    """The events of a file. `ValueError` where it breaks, where TensorBoard itself stops without a message."""
    for _, event in _read(path):
        yield event


def cut_back(folder: Path, outdated: Callable[[str, int], bool]) -> None:
    """Drop the events from the first one on that is `outdated` (its tag, its step), from each file in `folder`.

    SummaryWriter(purge_step=...) cannot do this: it hides all tags from one step on, and here some count optimizer
    steps, some epochs and some seconds. A file holds the events of one process in their order, so what follows an
    outdated event is outdated too. What is behind a damage nobody can read: it stays."""
    for path in folder.glob("events.out.tfevents.*"):
        try:
            for position, event in _read(path):
                if any(outdated(value.tag, event.step) for value in event.summary.value):
                    os.truncate(path, position)
                    break
        except ValueError:
            continue


def _read(path: Path) -> Iterator[tuple[int, Any]]:
    """(position in bytes, event) of a file of TFRecords."""
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.compat.tensorflow_stub.errors import DataLossError, OutOfRangeError
    from tensorboard.compat.tensorflow_stub.pywrap_tensorflow import PyRecordReader_New

    reader, position = PyRecordReader_New(str(path)), 0
    while True:
        try:
            reader.GetNext()
        except OutOfRangeError:
            return
        except DataLossError as error:
            reason = "cut short" if "truncated" in error.message else "a checksum is wrong"
            raise ValueError(f"damaged at byte {position}: {reason}") from None
        content = reader.record()
        yield position, Event.FromString(content)
        position += 16 + len(content)  # with the length, its checksum, and that of the content
