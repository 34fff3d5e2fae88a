"""Stop on request: a signal sets a flag, the ranks agree on it between two batches, and the Trainer saves and leaves.

Nothing is saved inside a signal handler, which may interrupt anything, such as the writing of a checkpoint.

One process stops after the current batch. Several ranks compare their flags by a small all-reduce on the CPU, about
once a second, and all stop after the same batch: within two seconds, or after the current batch if batches take longer
than half a second. The ranks count the interval in batches: as many as fit into a second at the pace of the last ones.
"""

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType

import torch
import torch.distributed as dist

from utils.distributed.world import World

POLL_SECONDS = 1.0  # between two comparisons of the flags
# seconds: a second Ctrl-C within this time counts as the first one, as terminal and launcher may both send it
ONE_KEYSTROKE = 1.0
SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT, signal.SIGHUP)
ASKED = b"\nasked to stop: stopping after this step; Ctrl-C again stops at once, without saving\n"


class StopRequests:
    """Requests to stop, polled by every rank after the same batch."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.signal, self.signal_time = 0, 0.0  # number, 0: none yet
        self.start_loop()

    def start_loop(self) -> None:
        """Start a loop of training or validation, in which the pace of batches is not known yet."""
        self._every = 1  # batches from one comparison to the next, the same on all ranks
        self._batches, self._since = 0, time.monotonic()

    def poll(self) -> bool:
        """Collective: return whether to stop, true on every rank once any of them got a signal."""
        self._batches += 1
        if self.world.world_size == 1:
            return bool(self.signal)
        if self._batches < self._every:
            return False
        number, microseconds = self._compare(int(1e6 * (time.monotonic() - self._since) / self._batches))
        # at most doubled: while the host runs ahead of a GPU, batches seem short
        self._every = max(1, min(2 * self._every, int(1e6 * POLL_SECONDS / max(1, microseconds))))
        self._batches, self._since = 0, time.monotonic()
        if number and not self.signal:  # this rank's own copy of one Ctrl-C may still come
            self.signal, self.signal_time = number, self._since
        return bool(number)

    def name(self) -> str:
        """Return the name of the signal, after `poll` has returned true."""
        return signal.Signals(self.signal).name

    def _compare(self, microseconds: int) -> list[int]:
        """Return the largest [signal or 0, microseconds per batch] of the ranks; through gloo, not the GPU's queue."""
        flags = torch.tensor([self.signal, microseconds])
        dist.all_reduce(flags, op=dist.ReduceOp.MAX)
        return flags.tolist()  # type: ignore[no-any-return]

    @contextmanager
    def listen(self) -> Iterator[None]:
        """The first of SIGNALS asks to stop; a second Ctrl-C stops at once. Restores the handlers. Only the main thread
        can listen; in another one this does nothing.

        Under nohup SIGHUP stays ignored, but not below torchrun, which ends in spite of nohup, and its ranks with it.
        """
        numbers = set(SIGNALS) if threading.current_thread() is threading.main_thread() else set()
        if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN and "TORCHELASTIC_RUN_ID" not in os.environ:
            numbers.discard(signal.SIGHUP)
        before = {number: signal.signal(number, self._remember) for number in numbers}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _remember(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if number == signal.SIGINT and self.signal and now - self.signal_time > ONE_KEYSTROKE:
            raise KeyboardInterrupt
        if not self.signal:
            self.signal, self.signal_time = number, now
            if self.world.is_main:
                with suppress(OSError):  # the terminal may be closed
                    os.write(2, ASKED)


def ignore_signals() -> None:
    """Ignore further signals, so that they do not change the exit status of a process that is about to end."""
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)
