"""The clock of a run: what it does at present, the seconds of each activity so far, and how long it still needs.

Whatever needs a time of the run reads it here: throughput, the share of waiting for input, the training time in a
checkpoint. Each record of metrics.jsonl holds the seconds by activity; tools/shared/ledger.py adds up a run's starts.

The times are the host's. A GPU is some steps behind it, at most to the next log point, where the host waits for it.
"""

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

ACTIVITIES = ("start", "compile", "train", "replay", "input", "validation", "test", "checkpoint")
LOOP = ("compile", "train", "replay", "input")  # the loop over training batches
WORK = (*LOOP, "validation", "checkpoint")  # what counts as training time: no start, and no test of held out images


class Clock:
    """Counts from `age` seconds before its making."""

    def __init__(self, age: float = 0.0) -> None:
        self.step = 0  # the last optimizer step, since the beginning of the run
        self._reached = 0  # the last step of all earlier starts: up to there it trains again
        self._spent = dict.fromkeys(ACTIVITIES, 0.0)
        self._activity = "start"
        self._began = self._changed = time.perf_counter() - age

    def go_on(self, step: int, reached: int) -> None:
        """This start goes on from `step`; earlier ones have trained up to step `reached`."""
        self.step, self._reached = step, reached

    def switch(self, activity: str) -> None:
        """From now on the run does this. Training up to the last step of earlier starts is a replay."""
        if activity == "train" and self.step < self._reached:
            activity = "replay"
        now = time.perf_counter()
        self._spent[self._activity] += now - self._changed
        self._activity, self._changed = activity, now

    @contextmanager
    def during(self, activity: str) -> Iterator[None]:
        """The run does this in the `with` block, and goes on with what it did before."""
        before = self._activity
        self.switch(activity)
        try:
            yield
        finally:
            self.switch(before)

    def count_step(self, step: int) -> None:
        """This optimizer step is done, as far as the host knows."""
        self.step = step
        if self._activity == "replay" and step >= self._reached:
            self.switch("train")

    def seconds(self, *activities: str) -> float:
        """Seconds so far of these activities together."""
        spent = self.by_activity()
        return sum(spent[activity] for activity in activities)

    def by_activity(self) -> dict[str, float]:
        """Seconds so far of each activity; they add up to `elapsed`."""
        return self._spent | {self._activity: self._spent[self._activity] + time.perf_counter() - self._changed}

    def elapsed(self) -> float:
        """Seconds since the clock began."""
        return time.perf_counter() - self._began


def process_age() -> float:
    """Seconds since this process was started, from Linux's /proc to 0.01 s; 0 where there is none."""
    with suppress(OSError, ValueError, IndexError, AttributeError):
        with open("/proc/self/stat", "rb") as file:
            started = int(file.read().rpartition(b")")[2].split()[19]) / os.sysconf("SC_CLK_TCK")
        return max(0.0, time.clock_gettime(time.CLOCK_BOOTTIME) - started)
    return 0.0


class TimeLeft:
    """How long a run still needs, from the pace of this process. Told where epochs begin and end; gives a forecast at
    any log point, where the host has waited for the device."""

    def __init__(self, epochs: int, batches: int, clock: Clock) -> None:
        self.epochs, self.batches = epochs, batches  # of the whole run; of one epoch
        self.clock = clock
        self._epoch_seconds: float | None = None  # of the last whole epoch, with its validation
        self.start_epoch(0)

    def start_epoch(self, first_batch: int) -> None:
        """An epoch begins, or goes on with `first_batch` after a resume."""
        self._started, self._whole = self.clock.elapsed(), first_batch == 0
        self._first_point: tuple[float, int] | None = None

    def end_epoch(self) -> None:
        """Its validation is done."""
        if self._whole:
            self._epoch_seconds = self.clock.elapsed() - self._started

    def seconds(self, epoch: int, batch: int) -> float | None:
        """What `epoch` finished epochs and `batch` batches of the next leave to do; None where nothing tells the pace.

        Until an epoch is over it is that of the batches since the first log point: without the start of workers and
        compilation, and without validation.
        """
        epoch_seconds = self._epoch_seconds
        if epoch_seconds is None:
            now = self.clock.elapsed()
            since, first = self._first_point = self._first_point or (now, batch)
            if batch <= first:
                return None
            epoch_seconds = (now - since) / (batch - first) * self.batches
        return (self.epochs - epoch - batch / self.batches) * epoch_seconds
