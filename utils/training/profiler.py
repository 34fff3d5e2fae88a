"""PROF: named ranges on the timeline of any profiler: of `utils/run/profile.py`, Nsight Systems or the user's own."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import torch


@contextmanager
def mark(name: str) -> Iterator[None]:
    """Mark a `with` block as a range: NVTX's on a GPU, and torch.profiler's. Takes microseconds while none records."""
    nvtx = torch.cuda.nvtx.range(name) if torch.cuda.is_initialized() else nullcontext()
    with nvtx, torch.profiler.record_function(name):
        yield
