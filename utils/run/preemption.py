"""Stop on request: a signal sets a flag, the ranks agree on it between two batches, and the Trainer saves and leaves.

Nothing is saved inside a signal handler: it may interrupt anything, a checkpoint being written included.

How soon: one process stops after the present batch. Several ranks compare their flags by one small message off the
device's queue, about once a second, and all stop after the same batch: within two seconds, or after the present batch
where a batch takes longer than half a second. The time is counted in batches, since that is what all ranks have in
common: as many as fit into a second, at the pace of the batches before.
"""

import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType

import torch
import torch.distributed as dist

from utils.distributed.world import World

POLL_SECONDS = 1.0  # ranks compare their flags this often
# seconds; a launcher passes Ctrl-C on to processes that the terminal has already sent it to: those two are one
ONE_KEYSTROKE = 1.0
SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)


class Requests:
    """What is asked of the run, polled by every rank after the same batch.

    With several ranks the message of one batch is answered after the next, when it has long arrived, so no rank waits.
    Where no two batches fit into `POLL_SECONDS` every batch has a message and waits for it, which is little beside it.
    """

    def __init__(self, world: World) -> None:
        self.world = world
        self.signal: int | None = None
        self.since_signal = 0.0
        self._pending: tuple[torch.Tensor, dist.Work] | None = None
        self.start_loop()

    def start_loop(self) -> None:
        """Batches of another kind follow, of training or validation: their pace is not known yet."""
        self._every = 1  # batches from one message to the next, the same on all ranks
        self._batches, self._since = 0, time.monotonic()

    def poll(self) -> bool:
        """Collective: whether to stop, true on every rank once any of them got a signal."""
        self._batches += 1
        if self.world.world_size == 1:
            return self.signal is not None
        if self._pending is None:
            if self._batches < self._every:
                return False
            self._pending = self._send()
            if self._every > 1:
                return False
        flags, work = self._pending
        work.wait()
        self._pending = None
        number, microseconds = flags.tolist()
        # at most twice as many as before: the host may run ahead of a GPU for some batches, which then seem short
        self._every = max(1, min(2 * self._every, int(1e6 * POLL_SECONDS / max(1, microseconds))))
        self._batches, self._since = 0, time.monotonic()
        self.signal = number or self.signal
        return bool(number)

    def name(self) -> str:
        return signal.Signals(self.signal).name if self.signal else "no signal"

    def _send(self) -> tuple[torch.Tensor, dist.Work]:
        """[signal or 0, microseconds of a batch], on the CPU: goes over gloo, not through the GPU's queue."""
        microseconds = int(1e6 * (time.monotonic() - self._since) / self._batches)
        flags = torch.tensor([self.signal or 0, microseconds])
        return flags, dist.all_reduce(flags, op=dist.ReduceOp.MAX, async_op=True)  # type: ignore[return-value]


@contextmanager
def listen(requests: Requests) -> Iterator[None]:
    """SIGTERM, SIGUSR1 and the first Ctrl-C ask to stop; a second Ctrl-C stops at once."""

    def remember(number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if number == signal.SIGINT and requests.signal is not None and now - requests.since_signal > ONE_KEYSTROKE:
            raise KeyboardInterrupt
        if requests.signal is None:
            requests.signal, requests.since_signal = number, now
            if requests.world.is_main:
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
