"""PROF: named ranges on the timeline while `utils/run/profile.py` records one."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import torch


class Profiler:
    """Marks ranges while it is `running`: NVTX's on a GPU, for Nsight Systems, and torch.profiler's ranges."""

    def __init__(self, device: torch.device) -> None:
        self.cuda, self.running = device.type == "cuda", False

    @contextmanager
    def range(self, name: str) -> Iterator[None]:
        """Mark a `with` block as a named range; does nothing unless the profiler is running."""
        if not self.running:
            yield
            return
        with torch.cuda.nvtx.range(name) if self.cuda else nullcontext(), torch.profiler.record_function(name):
            yield
