"""A run's clock: seconds by activity, images per second, waiting for input, and the time left.

Each record of metrics.jsonl holds the seconds by activity. The times are the host's. A GPU may be some steps behind;
the host waits for it at each log point.
"""

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

ACTIVITIES = ("start", "compile", "train", "replay", "input", "validation", "test", "checkpoint")
LOOP = ("compile", "train", "replay", "input")  # the loop over training batches
WORK = (*LOOP, "validation", "checkpoint")  # training time: all but start-up and the test of held-out images


class Window(NamedTuple):
    """A part of the loop over training batches, or a sum of parts."""

    images: int = 0  # of all ranks
    seconds: float = 0.0
    waited: float = 0.0  # seconds of these in which the host waited for input

    def plus(self, other: "Window", sign: int = 1) -> "Window":
        images, seconds, waited = (one + sign * two for one, two in zip(self, other, strict=True))
        return Window(int(images), seconds, waited)

    @property
    def images_per_sec(self) -> float:
        return self.images / self.seconds if self.images else 0.0

    @property
    def data_wait(self) -> float:
        """Fraction of the time in which the host waited for input."""
        return self.waited / (self.seconds or 1.0)


class Clock:
    """Counts from `age` seconds before its construction.

    The loop is divided into windows, which end at log points and with each epoch. The first window of a process
    includes the start of workers, cuDNN's choice of algorithms and compilation, so it is in neither `epoch` nor
    `total`; it gives the speed of a run that has no other window.
    """

    def __init__(self, age: float = 0.0) -> None:
        self.step = 0  # the last optimizer step of the run
        self.reached = 0  # the last step of all earlier starts: steps up to it are replays
        self.images = 0  # of all ranks, in this process
        self.first = self.epoch = self.total = Window()  # of this process; of the epoch; of all starts of the run
        self._opened = Window()  # the loop so far, when the current window began
        self._spent = dict.fromkeys(ACTIVITIES, 0.0) | {"start": age}
        self._activity, self._changed = "start", time.perf_counter()
        self._pace: tuple[float, float] | None = None  # time and position of the first forecast

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

    def count_step(self, step: int, images: int = 0) -> None:
        """Note that an optimizer step with `images` of all ranks is done, as far as the host knows."""
        self.step, self.images = step, self.images + images
        if self._activity == "replay" and step >= self.reached:
            self.switch("train")

    def start_epoch(self) -> None:
        """Start a window now, the epoch's first; the time since the last one does not count."""
        self._opened, self.epoch = self._loop(), Window()

    def close_window(self) -> Window:
        """Return the window that ends now, and start the next one. Call when the device has finished its work."""
        now = self._loop()
        window, self._opened = now.plus(self._opened, -1), now
        if not self.first.images:
            self.first = window
        elif window.images:
            self.epoch, self.total = self.epoch.plus(window), self.total.plus(window)
        return window

    @property
    def whole(self) -> Window:
        return self.total if self.total.images else self.first

    def images_per_sec(self) -> float:
        """Return the speed of the epoch's closed windows; of the run if there is none."""
        return (self.epoch if self.epoch.images else self.whole).images_per_sec

    def _loop(self) -> Window:
        return Window(self.images, self.seconds(*LOOP), self.seconds("input"))

    def seconds(self, *activities: str) -> float:
        spent = self.by_activity()
        return sum(spent[activity] for activity in activities)

    def by_activity(self) -> dict[str, float]:
        return self._spent | {self._activity: self._spent[self._activity] + time.perf_counter() - self._changed}

    def time_left(self, position: float, end: float) -> float | None:
        """Forecast the seconds from `position` to `end`, both in epochs, by the pace since the first call; None if it
        is not known yet. Call it at log points: the first one is after compilation and the start of workers."""
        now = self.seconds(*ACTIVITIES)
        self._pace = self._pace or (now, position)
        began, first = self._pace
        return (end - position) * (now - began) / (position - first) if position > first else None


def process_age() -> float:
    """Return the seconds since this process started, from Linux's /proc to 0.01 s."""
    with open("/proc/self/stat", "rb") as file:
        started = int(file.read().rpartition(b")")[2].split()[19]) / os.sysconf("SC_CLK_TCK")
    return max(0.0, time.clock_gettime(time.CLOCK_BOOTTIME) - started)
