"""Stop or save on request: a signal or the clock sets a flag, the ranks agree on it between two batches, and the
Trainer saves and, where asked to, leaves.

Nothing is saved inside a signal handler: it may interrupt anything, a checkpoint being written included.
"""

import math
import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Literal

import torch
import torch.distributed as dist

from utils.distributed.world import World

POLL_BATCHES = 8  # ranks compare their flags this often, by one small message off the device's queue
# seconds; a launcher passes Ctrl-C on to processes that the terminal has already sent it to: those two are one
ONE_KEYSTROKE = 1.0
SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)

Asked = Literal["stop", "save"] | None


class Requests:
    """What is asked of the run, polled by every rank after the same batch.

    With several ranks an answer is that of the poll before, which was sent 8 batches ago and has long arrived: no rank
    waits, and all get the same answer at the same batch.
    """

    def __init__(self, world: World, save_every_minutes: float | None) -> None:
        self.world = world
        self.signal: int | None = None
        self.since_signal = 0.0
        self._interval = math.inf if save_every_minutes is None else 60 * save_every_minutes
        self._saved_at = time.monotonic()
        self._polls = 0
        self._pending: tuple[torch.Tensor, dist.Work] | None = None

    def poll(self) -> Asked:
        """Collective: "stop" on every rank once any of them got a signal, "save" once the interval has passed."""
        if self.world.world_size == 1:
            return self._answer(self._flags())
        self._polls += 1
        if self._polls % POLL_BATCHES:
            return None
        flags, work = self._pending or self._send()  # the first time there is none under way: ask and wait
        work.wait()
        asked = self._answer(flags)
        self._pending = self._send()
        return asked

    def name(self) -> str:
        return signal.Signals(self.signal).name if self.signal else "no signal"

    def _flags(self) -> torch.Tensor:
        """[signal or 0, whether a save is due by the main process's clock], on the CPU: goes over gloo, not through
        the GPU's queue."""
        due = self.world.is_main and time.monotonic() - self._saved_at >= self._interval
        return torch.tensor([self.signal or 0, int(due)])

    def _send(self) -> tuple[torch.Tensor, dist.Work]:
        flags = self._flags()
        return flags, dist.all_reduce(flags, op=dist.ReduceOp.MAX, async_op=True)  # type: ignore[return-value]

    def _answer(self, flags: torch.Tensor) -> Asked:
        number, save = flags.tolist()
        if number:
            self.signal = number
            return "stop"
        if save:
            self._saved_at = time.monotonic()
            return "save"
        return None


@contextmanager
def listen(requests: Requests) -> Iterator[None]:
    """SIGTERM, SIGUSR1 and the first Ctrl-C ask to stop; a second Ctrl-C stops at once."""

    def remember(number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if number == signal.SIGINT and requests.signal is not None and now - requests.since_signal > ONE_KEYSTROKE:
            raise KeyboardInterrupt
        if requests.signal is None:
            requests.signal, requests.since_signal = number, now
            with suppress(OSError):  # the terminal may be gone
                os.write(2, b"\nasked to stop: saving after this step; Ctrl-C again stops without saving\n")

    before = {number: signal.signal(number, remember) for number in SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def ignore_signals() -> None:
    """For a process that has nothing left to do but to end: a further signal must not change its exit status."""
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)
