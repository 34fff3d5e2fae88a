"""The one clock of a run: what it does at present, and the seconds of each activity so far.

Whatever needs a time of the run reads it here: throughput, the share of waiting for input, the time left, the training
time in a checkpoint. `keep` writes it through a memory map into the run's folder, where a SIGKILL loses nothing of it:
the kernel keeps what was stored, and no step makes a system call for it. tools/ledger.py adds up the starts of a run.

The times are the host's. A GPU is some steps behind it, at most to the next log point, where the host waits for it.
"""

import mmap
import os
import struct
import threading
import time
import zlib
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

ACTIVITIES = ("start", "compile", "train", "replay", "input", "validation", "test", "checkpoint")
LOOP = ("compile", "train", "replay", "input")  # the loop over training batches
WORK = (*LOOP, "validation", "checkpoint")  # what counts as training time: no start, and no test of held out images
FILE = "clock.bin"  # in the run's folder: a record for each start
ALIVE_SECONDS = 0.5  # how often a thread marks the record between two changes of activity

_VERSION = 1
_RECORD_BYTES = 512
_ALIVE = struct.Struct("<d")  # at the beginning of a record: seconds from its begin to the last sign of life
_SLOTS = (64, 256)  # written in turn, so that one of them is whole whenever a kill comes
_SLOT = struct.Struct(f"<IQdQQQQIId{len(ACTIVITIES)}d")  # the fields of `Start`, behind version and number of the write
_CHECKSUM = struct.Struct("<I")


@dataclass(frozen=True)
class Start:
    """One start of a run, as its record tells. Steps are optimizer steps since the beginning of the run."""

    began: float  # seconds since 1970
    first: int  # the step that it went on from
    reached: int  # the last step of all earlier starts: up to there it trains again
    step: int  # its last finished one
    replayed: int  # its steps up to `reached`
    ended: int  # 1: in order or by an error; 0: it was killed, or still goes on
    activity: int  # the last one, by its place in ACTIVITIES
    changed: float  # seconds from `began` to the begin of `activity`
    spent: tuple[float, ...]  # seconds of each activity up to there
    alive: float  # seconds from `began` to the last sign of life

    def seconds(self) -> dict[str, float]:
        """Seconds of each activity; their sum is `alive`."""
        spent = dict(zip(ACTIVITIES, self.spent, strict=True))
        spent[ACTIVITIES[self.activity]] += self.alive - self.changed
        return spent


class Clock(AbstractContextManager["Clock"]):
    """Counts from `age` seconds before its making; a `with` block ends its record."""

    def __init__(self, age: float = 0.0) -> None:
        self._spent = [0.0] * len(ACTIVITIES)
        self._activity = ACTIVITIES.index("start")
        self._began = self._changed = time.perf_counter() - age
        self._wall = time.time() - age
        self._first = self._reached = self._step = self._replayed = self._writes = 0
        self._map: mmap.mmap | None = None
        self._place = 0  # of the record in the file, bytes
        self._closing = threading.Event()
        self._thread: threading.Thread | None = None

    # ---- what is told to it

    def switch(self, activity: str) -> None:
        """From now on the run does this. Training up to the last step of earlier starts is a replay."""
        if activity == "train" and self._step < self._reached:
            activity = "replay"
        now = time.perf_counter()
        self._spent[self._activity] += now - self._changed
        self._activity, self._changed = ACTIVITIES.index(activity), now
        self._write()

    @contextmanager
    def during(self, activity: str) -> Iterator[None]:
        """The run does this in the `with` block, and goes on with what it did before."""
        before = ACTIVITIES[self._activity]
        self.switch(activity)
        try:
            yield
        finally:
            self.switch(before)

    def count_step(self, step: int) -> None:
        """This optimizer step is done, as far as the host knows."""
        replayed = step <= self._reached
        self._step, self._replayed = step, self._replayed + replayed
        if replayed and step == self._reached and ACTIVITIES[self._activity] == "replay":
            self.switch("train")
        else:
            self._write()

    # ---- what is asked of it

    def seconds(self, *activities: str) -> float:
        """Seconds so far of these activities together."""
        return sum(self.by_activity()[activity] for activity in activities)

    def by_activity(self) -> dict[str, float]:
        """Seconds so far of each activity; they add up to `elapsed`."""
        spent = dict(zip(ACTIVITIES, self._spent, strict=True))
        spent[ACTIVITIES[self._activity]] += time.perf_counter() - self._changed
        return spent

    def elapsed(self) -> float:
        """Seconds since the clock began."""
        return time.perf_counter() - self._began

    # ---- the record

    def keep(self, folder: Path, step: int) -> list[str]:
        """Record this start, which goes on from `step`, behind the earlier ones of the run whose folder this process
        holds. A note for the log where the file system cannot do it."""
        path = folder / FILE
        self._first = self._step = step
        try:
            with path.open("a+b") as file:
                earlier, _ = read_starts(path)
                self._reached = max((start.step for start in earlier), default=0)
                self._place = os.fstat(file.fileno()).st_size // _RECORD_BYTES * _RECORD_BYTES
                # with room on the disk for it: a map of a file with holes ends the process when the disk is full
                if hasattr(os, "posix_fallocate"):
                    os.posix_fallocate(file.fileno(), self._place, _RECORD_BYTES)
                else:  # macOS
                    os.truncate(file.fileno(), self._place)
                    file.write(bytes(_RECORD_BYTES))
                    file.flush()
                self._map = mmap.mmap(file.fileno(), self._place + _RECORD_BYTES)
        except OSError as error:
            return [f"{path}: cannot be written ({error.strerror}): the ledger will lack this start"]
        self._write()
        self._thread = threading.Thread(target=self._show_life, name="clock", daemon=True)
        self._thread.start()
        return []

    def _write(self, *, ended: bool = False) -> None:
        if self._map is None:
            return
        state = (self._first, self._reached, self._step, self._replayed, ended, self._activity)
        self._writes += 1
        changed = self._changed - self._began
        content = _SLOT.pack(_VERSION, self._writes, self._wall, *state, changed, *self._spent)
        place = self._place + _SLOTS[self._writes % 2]
        content += _CHECKSUM.pack(zlib.crc32(content))
        self._map[place : place + len(content)] = content
        self._mark_alive()

    def _mark_alive(self) -> None:
        if self._map is not None:
            self._map[self._place : self._place + _ALIVE.size] = _ALIVE.pack(self.elapsed())

    def _show_life(self) -> None:
        """So that of a run that is killed in a long validation, or compiling, all but the last moment is known."""
        while not self._closing.wait(ALIVE_SECONDS):
            self._mark_alive()

    def __exit__(self, *_: object) -> None:
        if self._thread is not None:
            self._closing.set()
            self._thread.join()
        self._write(ended=True)
        if self._map is not None:
            self._map.close()
            self._map = None


def process_age() -> float:
    """Seconds since this process was started, from Linux's /proc to 0.01 s; 0 where there is none."""
    with suppress(OSError, ValueError, IndexError, AttributeError):
        with open("/proc/self/stat", "rb") as file:
            started = int(file.read().rpartition(b")")[2].split()[19]) / os.sysconf("SC_CLK_TCK")
        return max(0.0, time.clock_gettime(time.CLOCK_BOOTTIME) - started)
    return 0.0


def read_starts(path: Path) -> tuple[list[Start], int]:
    """(the starts of a run in their order, number of records that cannot be read) of a `clock.bin`.

    `OSError` where there is no such file. A record that was being made when its start was killed is one of the latter.
    """
    content = path.read_bytes()
    records = [content[place : place + _RECORD_BYTES] for place in range(0, len(content), _RECORD_BYTES)]
    starts = [start for record in records if (start := _read_record(record)) is not None]
    return starts, len(records) - len(starts)


def _read_record(record: bytes) -> Start | None:
    """The newer of its two slots that is whole."""
    newest, number = None, 0
    for place in _SLOTS:
        slot, checksum = record[place : place + _SLOT.size], record[place + _SLOT.size :][: _CHECKSUM.size]
        if len(slot) < _SLOT.size or checksum != _CHECKSUM.pack(zlib.crc32(slot)):
            continue
        version, writes, *state = _SLOT.unpack(slot)
        if version == _VERSION and writes > number:
            began, first, reached, step, replayed, ended, activity, changed, *spent = state
            alive = max(changed, _ALIVE.unpack(record[: _ALIVE.size])[0])
            newest = Start(began, first, reached, step, replayed, ended, activity, changed, tuple(spent), alive)
            number = writes
    return newest
