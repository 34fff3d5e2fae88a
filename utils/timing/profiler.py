"""PROF: named ranges on the timeline, and a profile of one epoch; docs/performance.md describes its output.

Under Nsight Systems only the NVTX ranges are marked, since only one tool can listen to the driver:

    nsys profile --trace=cuda,nvtx --capture-range=nvtx --nvtx-capture=PROFILE \\
        --env-var=NSYS_NVTX_PROFILER_REGISTER_ONLY=0 python train.py --config=bs256-prof

The ranges do not wait for the GPU, which would change the timing: nsys shows each range's GPU time as the range's
projection, and the summary counts the kernels launched in a range.
"""

import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path

import torch

from utils.timing.trace import TRACE_FILE, describe_trace, read_trace

MEMORY_EVENTS = 100_000  # allocations in the snapshot, the newest


class Profiler:
    """Marks ranges while it is running; the Trainer starts it for the training iterations of one epoch."""

    def __init__(self, device: torch.device) -> None:
        self.cuda = device.type == "cuda"
        self.running = False

    def range(self, name: str) -> AbstractContextManager[None]:
        """Mark a `with` block as a named range; does nothing unless the profiler is running."""
        return self._range(name) if self.running else nullcontext()

    @contextmanager
    def _range(self, name: str) -> Iterator[None]:
        with torch.cuda.nvtx.range(name) if self.cuda else nullcontext(), torch.profiler.record_function(name):
            yield

    @contextmanager
    def capture(self, folder: Path | None, say: Callable[[str], None]) -> Iterator[None]:
        """Mark the range PROFILE, for which `nsys --nvtx-capture=PROFILE` waits. Without nsys, write a trace to
        `folder`/profile (None: none) and its summary to `say`."""
        records = folder is not None and "NSYS_PROFILING_SESSION_ID" not in os.environ
        self.running = True
        try:
            with self._record(folder / "profile", say) if folder and records else nullcontext(), self.range("PROFILE"):
                yield
        finally:
            self.running = False

    @contextmanager
    def _record(self, folder: Path, say: Callable[[str], None]) -> Iterator[None]:
        folder.mkdir(parents=True, exist_ok=True)
        activities = [torch.profiler.ProfilerActivity.CPU]
        if self.cuda:
            activities.append(torch.profiler.ProfilerActivity.CUDA)
            torch.cuda.memory._record_memory_history(max_entries=MEMORY_EVENTS)
        with torch.profiler.profile(activities=activities) as profile:
            yield
            if self.cuda:
                torch.cuda.synchronize()
        if self.cuda:
            torch.cuda.memory._dump_snapshot(str(folder / "memory.pickle"))
            torch.cuda.memory._record_memory_history(enabled=None)
        path = folder / TRACE_FILE
        profile.export_chrome_trace(str(path))
        own_times = {row.key: row.self_cpu_time_total for row in profile.key_averages() if not row.is_user_annotation}
        summary = describe_trace(read_trace(path), own_times)
        (folder / "summary.txt").write_text(summary + "\n", encoding="utf-8")
        for line in summary.splitlines():
            say(line)
        say(f"Trace for ui.perfetto.dev: {path}    this summary: {folder / 'summary.txt'}")
