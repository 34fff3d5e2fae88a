"""A run's clock: its current activity, the seconds of each activity so far, and the time left.

Throughput, the time waiting for input and the training time in a checkpoint are read here. Each record of metrics.jsonl
holds the seconds by activity. The times are the host's. A GPU may be some steps behind; the host waits for it at each
log point.
"""

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager

ACTIVITIES = ("start", "compile", "train", "replay", "input", "validation", "test", "checkpoint")
LOOP = ("compile", "train", "replay", "input")  # the loop over training batches
WORK = (*LOOP, "validation", "checkpoint")  # training time: all but start-up and the test of held-out images


class Clock:
    """Counts from `age` seconds before its construction."""

    def __init__(self, age: float = 0.0) -> None:
        self.step = 0  # the last optimizer step of the run
        self.reached = 0  # the last step of all earlier starts: steps up to it are replays
        self._spent = dict.fromkeys(ACTIVITIES, 0.0)
        self._activity = "start"
        self._pace: tuple[float, float] | None = None  # time and position of the first forecast
        self._began = self._changed = time.perf_counter() - age

    def switch(self, activity: str) -> None:
        """Start another activity. Training up to the last step of earlier starts counts as a replay."""
        if activity == "train" and self.step < self.reached:
            activity = "replay"
        now = time.perf_counter()
        self._spent[self._activity] += now - self._changed
        self._activity, self._changed = activity, now

    @contextmanager
    def during(self, activity: str) -> Iterator[None]:
        """Switch to `activity` for the `with` block, then back."""
        before = self._activity
        self.switch(activity)
        try:
            yield
        finally:
            self.switch(before)

    def count_step(self, step: int) -> None:
        """Note that an optimizer step is done, as far as the host knows."""
        self.step = step
        if self._activity == "replay" and step >= self.reached:
            self.switch("train")

    def seconds(self, *activities: str) -> float:
        """Return the seconds so far of these activities together."""
        spent = self.by_activity()
        return sum(spent[activity] for activity in activities)

    def by_activity(self) -> dict[str, float]:
        """Return the seconds so far of each activity; they add up to `elapsed`."""
        return self._spent | {self._activity: self._spent[self._activity] + time.perf_counter() - self._changed}

    def elapsed(self) -> float:
        return time.perf_counter() - self._began

    def time_left(self, position: float, end: float) -> float | None:
        """Forecast the seconds from `position` to `end`, both in epochs, by the pace since the first call; None if it
        is not known yet. Call it at log points: the first one is after compilation and the start of workers."""
        now = self.elapsed()
        began, first = self._pace = self._pace or (now, position)
        return (end - position) * (now - began) / (position - first) if position > first else None


def process_age() -> float:
    """Return the seconds since this process started, from Linux's /proc to 0.01 s."""
    with open("/proc/self/stat", "rb") as file:
        started = int(file.read().rpartition(b")")[2].split()[19]) / os.sysconf("SC_CLK_TCK")
    return max(0.0, time.clock_gettime(time.CLOCK_BOOTTIME) - started)
