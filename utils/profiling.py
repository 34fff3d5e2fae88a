"""PROF: named ranges on the timeline of Nsight Systems and torch.profiler, free of cost when switched off."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch


class Profiler:
    """Marks ranges while it is running; the Trainer starts it for one epoch.

    GPU work is asynchronous: without a synchronisation at both ends, a range would hold only the launch of its work.
    """

    def __init__(self, device: torch.device) -> None:
        self.cuda = device.type == "cuda"
        self.running = False

    @contextmanager
    def range(self, name: str) -> Iterator[None]:
        """A named range around a `with` block; nothing at all unless the profiler is running."""
        if not self.running:
            yield
            return
        self._push(name)
        try:
            with torch.profiler.record_function(name):
                yield
        finally:
            self._pop()

    @contextmanager
    def capture(self, wanted: bool) -> Iterator[None]:
        """The range PROFILE that `nsys --capture-range=nvtx --nvtx-capture=PROFILE` waits for, where it is wanted."""
        self.running = wanted
        try:
            with self.range("PROFILE"):
                yield
        finally:
            self.running = False

    def _push(self, name: str) -> None:
        if self.cuda:
            torch.cuda.synchronize()
            torch.cuda.nvtx.range_push(name)

    def _pop(self) -> None:
        if self.cuda:
            torch.cuda.synchronize()
            torch.cuda.nvtx.range_pop()
