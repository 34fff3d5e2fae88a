"""Find slow ranks and slow input; the host waits for the device only at log points.

DDP's all-reduce makes every rank's step equally long, so a slow rank shows only in the time before the first collective
(https://github.com/pytorch/pytorch/issues/71303). CUDA graphs cannot be timed: with them no rank is named.
"""

import resource
import socket
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

from utils.distributed.world import World
from utils.program import command
from utils.run.clock import Clock

SLOW_FACTOR = 1.15  # a rank is slow above this many times the median of the other ranks
MAX_INPUT_WAIT = 0.10  # fraction of an epoch's time
SLOW_WINDOWS = 5  # a rank is named if it was slow in each of the last windows


class StepWatch:
    """Times each step's input and its work before the first collective; compares the ranks once an epoch."""

    def __init__(self, model: nn.Module, world: World, clock: Clock) -> None:
        self.world, self.clock, self.cuda = world, clock, world.device.type == "cuda"
        self._spans: list[list[Any]] = []  # of each step since the last log point: start, last gradient
        self._windows: list[float] = []  # seconds per step between two log points, up to the last gradient
        self._history: deque[list[float]] = deque(maxlen=SLOW_WINDOWS)  # [log point][rank], over epochs
        self._reported: set[str] = set()
        # The first layer's gradient comes last; its hook runs before DDP waits for the other ranks.
        first = next(parameter for parameter in model.parameters() if parameter.requires_grad)
        first.register_post_accumulate_grad_hook(lambda parameter: self._end_span())

    def batches(self, loader: Iterable[tuple[Tensor, Tensor]]) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield the loader's batches, and time the wait for each."""
        self._spans, iterator = [], iter(loader)
        self.clock.start_epoch()
        while True:
            self._spans.append([self._now()])
            with self.clock.during("input"):
                batch = next(iterator, None)
            if batch is None:
                return
            yield batch

    def _now(self) -> Any:
        """Return the time: the host's in seconds, or on a GPU an event in its queue, read at the log point."""
        if not self.cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _end_span(self) -> None:
        """Take the time of the last gradient, of the last micro-batch. A captured step replays without Python."""
        if self._spans and not (self.cuda and torch.cuda.is_current_stream_capturing()):
            self._spans[-1][1:] = [self._now()]

    def close_window(self) -> dict[str, float]:
        """Return {"images_per_sec", "data_wait": fraction, "memory_gb"}, and start the next window. The device has
        finished its work."""
        spans, self._spans = [span for span in self._spans if span[1:]], []
        seconds = [start.elapsed_time(end) / 1e3 if self.cuda else end - start for start, end in spans]
        if self.clock.first.images:  # else this is the process's first window
            self._windows.append(sum(seconds) / max(1, len(seconds)))
        window, memory = self.clock.close_window(), peak_memory(self.world.device)
        return {"images_per_sec": window.images_per_sec, "data_wait": window.data_wait, "memory_gb": memory / 1e9}

    def remarks(self) -> list[str]:
        """Collective, at the end of an epoch: return remarks for the log, each only once."""
        mine = socket.gethostname(), self._windows, self.clock.epoch().data_wait
        hosts, windows, waits = zip(*self.world.all_gather(mine), strict=True)
        self._windows = []
        self._history += [list(row) for row in zip(*windows, strict=False)]
        found, most = dict[str, str](), max(waits)
        if most > MAX_INPUT_WAIT:
            of_rank = f" of rank {waits.index(most)}" if len(waits) > 1 else ""
            found["input"] = (
                f"Waiting for input takes {most:.0%} of the time{of_rank}; try more num_data_workers, or find the "
                f"fastest data_loader here with: {command('bench')} loaders"
            )
        for rank, factor in slow_ranks(self._history):
            found[f"rank {rank}"] = (
                f"Rank {rank} on {hosts[rank]} is slow: it needs {factor:.2f} times the median of the others before "
                f"each all-reduce; check its node with: {command('doctor')} --nodes"
            )
        new = found.keys() - self._reported
        self._reported |= new
        return [remark for name, remark in found.items() if name in new]


def slow_ranks(windows: Sequence[list[float]]) -> list[tuple[int, float]]:
    """Return the ranks slower than SLOW_FACTOR times the median of the others in each of SLOW_WINDOWS windows, with the
    median of that factor. `windows[i][rank]`: seconds per step."""
    if len(windows) < SLOW_WINDOWS or len(windows[0]) == 1:
        return []
    # without the rank itself: the median of two would hide half of their difference; 0: nothing was timed
    factors = [[own / (median(row[:i] + row[i + 1 :]) or own or 1) for i, own in enumerate(row)] for row in windows]
    of_ranks = enumerate(zip(*factors, strict=True))
    return [(rank, median(of_rank)) for rank, of_rank in of_ranks if min(of_rank) > SLOW_FACTOR]


def peak_memory(device: torch.device) -> int:
    """Peak bytes of tensors on a GPU, or of this process on a CPU; does not wait for the device."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
