"""Stop on request: a signal sets a flag, the ranks agree on it between two steps, and the Trainer saves and leaves.

Nothing is saved inside a signal handler: it may interrupt anything, a checkpoint being written included.
"""

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

import torch
import torch.distributed as dist

from utils.distributed import Distributed

POLL_STEPS = 8  # ranks compare their flags this often, one small message off the device's queue


class StopRequest:
    """Whether to stop, asked once per step by every rank at the same step.

    With several ranks an answer is that of the poll before, which was sent 8 steps ago and has long arrived: no rank
    waits, and all get the same answer at the same step.
    """

    def __init__(self, place: Distributed) -> None:
        self.place = place
        self.signal: int | None = None
        self._asked = 0
        self._pending: tuple[torch.Tensor, dist.Work] | None = None

    def agreed(self) -> bool:
        """Collective: True on every rank once any of them was asked to stop."""
        if self.place.world_size == 1:
            return self.signal is not None
        self._asked += 1
        if self._asked % POLL_STEPS:
            return False
        stop = self.agreed_now() if self._pending is None else self._collect()
        flag = torch.tensor([self.signal or 0])  # on the CPU: goes over gloo, not through the GPU's queue
        self._pending = (flag, dist.all_reduce(flag, op=dist.ReduceOp.MAX, async_op=True))  # type: ignore[assignment]
        return stop

    def _collect(self) -> bool:
        assert self._pending is not None
        flag, work = self._pending
        work.wait()
        if flag.item():
            self.signal = int(flag.item())
        return bool(flag.item())

    def agreed_now(self) -> bool:
        """Collective: like `agreed`, but ask and wait."""
        if self.place.world_size > 1:
            flag = torch.tensor([self.signal or 0])
            dist.all_reduce(flag, op=dist.ReduceOp.MAX)
            self.signal = int(flag.item()) or None
        return self.signal is not None

    def name(self) -> str:
        """The signal's name, for the message."""
        return signal.Signals(self.signal).name if self.signal else "no signal"


@contextmanager
def listen(request: StopRequest) -> Iterator[None]:
    """SIGTERM, SIGUSR1 and the first Ctrl-C set the request's flag; a second Ctrl-C stops at once."""

    def remember(number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT and request.signal is not None:
            raise KeyboardInterrupt
        request.signal = number
        os.write(2, b"\nasked to stop: saving after this step; Ctrl-C again stops without saving\n")

    numbers = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)
    before = {number: signal.signal(number, remember) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
