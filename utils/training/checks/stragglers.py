"""Find slow ranks and slow input; the host waits for the device only at log points.

DDP's all-reduce makes every rank's step equally long, so a slow rank shows only in the time before the first collective
(https://github.com/pytorch/pytorch/issues/71303). A CUDA graph replays without Python and so cannot be timed: with
graphs no rank is named, and `tools.doctor` finds slow ones.
"""

import resource
import socket
import statistics
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from utils.distributed.world import World
from utils.program import command
from utils.timing.clock import LOOP, Clock

SLOW_FACTOR = 1.15  # a rank is slow above this many times the median of the other ranks
MAX_INPUT_WAIT = 0.10  # fraction of an epoch's time
SLOW_WINDOWS = 5  # a rank is named if it was slow in each of the last windows
SAMPLE_IMAGES = 64


class StepWatch:
    """Times each step's input and its work before the first collective; compares the ranks once an epoch."""

    def __init__(self, model: nn.Module, world: World, clock: Clock) -> None:
        self.world, self.clock = world, clock
        self.step_timer = _StepTimer(world.device)
        self._sample: Tensor | None = None
        self._windows: list[float] = []  # seconds per step between two log points, up to the last gradient
        self._history: list[list[float]] = []  # [log point][rank], over epochs
        self._reported: set[str] = set()
        self._first = True
        self._window = self._epoch = self._times()  # at their beginning
        # The first layer's gradient comes last; its hook runs before DDP waits for the other ranks.
        first = next(parameter for parameter in model.parameters() if parameter.requires_grad)
        first.register_post_accumulate_grad_hook(lambda parameter: self.step_timer.last_gradient())

    def batches(self, loader: Iterable[tuple[Tensor, Tensor]]) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield the loader's batches, and time the wait for each."""
        self._window = self._epoch = self._times()
        self.step_timer.clear()
        iterator = iter(loader)
        while True:
            self.step_timer.start_step()
            with self.clock.during("input"):
                batch = next(iterator, None)
            if batch is None:
                return
            images, labels = batch
            if self._first and self._sample is None:
                self._sample = images[:SAMPLE_IMAGES].clone()
            yield images, labels

    def _times(self) -> tuple[float, float]:
        """Return the seconds so far of waiting for input, and of the loop over training batches."""
        return self.clock.seconds("input"), self.clock.seconds(*LOOP)

    def take_sample(self) -> Tensor | None:
        """Return images of the process's first batch at the first call, then None."""
        sample, self._sample = self._sample, None
        return sample

    def close_window(self) -> dict[str, float]:
        """Return {"data_wait" (fraction of the window), "memory_gb"} and start the next window. Call when the device
        has finished its work."""
        seconds_per_step, now = self.step_timer.seconds_per_step(), self._times()
        waited, self._window = fraction_waited(self._window, now), now
        if self._first:  # the process's first window includes the start of workers and the choice of algorithms
            self._epoch, self._first = now, False
        else:
            self._windows.append(seconds_per_step)
        return {"data_wait": waited, "memory_gb": peak_memory(self.world.device) / 1e9}

    def remarks(self, remedy: str) -> list[str]:
        """Collective, at the end of an epoch: return remarks for the log, each only once."""
        waited = 0.0 if self._first else fraction_waited(self._epoch, self._times())
        ranks = self.world.all_gather((socket.gethostname(), self._windows, waited))
        self._windows = []
        remarks = self._remark_on_input([waited for *_, waited in ranks], remedy)
        self._history += [list(row) for row in zip(*(windows for _, windows, _ in ranks), strict=False)]
        self._history = self._history[-SLOW_WINDOWS:]
        for rank, factor in slow_ranks(self._history):
            if f"rank {rank}" not in self._reported:
                self._reported.add(f"rank {rank}")
                remarks.append(
                    f"Rank {rank} on {ranks[rank][0]} is slow: it needs {factor:.2f} times the median of the others "
                    f"before each all-reduce; check its node with: {command('doctor')} --nodes"
                )
        return remarks

    def _remark_on_input(self, waits: list[float], remedy: str) -> list[str]:
        worst = max(range(len(waits)), key=lambda rank: waits[rank])
        if waits[worst] <= MAX_INPUT_WAIT or "input" in self._reported:
            return []
        self._reported.add("input")
        of_rank = f" of rank {worst}" if len(waits) > 1 else ""
        return [f"Waiting for input takes {waits[worst]:.0%} of the time{of_rank}; {remedy}"]


def fraction_waited(began: tuple[float, float], now: tuple[float, float]) -> float:
    """Return the fraction of the loop's time between two times in which the host waited for input."""
    total = now[1] - began[1]
    return (now[0] - began[0]) / total if total else 0.0


def slow_ranks(windows: list[list[float]]) -> list[tuple[int, float]]:
    """Ranks that took more than SLOW_FACTOR times the median of the other ranks in each of SLOW_WINDOWS windows, with
    the median of that factor. `windows[i][rank]`: seconds per step."""
    if len(windows) < SLOW_WINDOWS or len(windows[0]) < 2:
        return []
    factors = []
    for row in windows:
        others = medians_of_others(row)
        factors.append([seconds / other if other else 1.0 for seconds, other in zip(row, others, strict=True)])
    return [
        (rank, statistics.median(column))
        for rank, column in enumerate(zip(*factors, strict=True))
        if min(column) > SLOW_FACTOR
    ]


def medians_of_others(values: Sequence[float]) -> list[float]:
    """For each of at least two values, the median of the others. Two values are compared with each other; the median
    of both would hide half of their difference."""
    order = sorted(values)
    return [statistics.median(order[:rank] + order[rank + 1 :]) for rank in map(order.index, values)]


def input_remedy(data_loader: str, num_workers: int) -> str:
    """Return the remedy for a run that waits for its loader."""
    if data_loader == "torchvision":
        return f"try more num_data_workers (now {num_workers} per rank) or data_loader=device"
    return f"find the fastest data_loader here with: {command('bench')} loaders"


def peak_memory(device: torch.device) -> int:
    """Peak bytes of tensors on a GPU, or of this process on a CPU; does not wait for the device."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


class _StepTimer:
    """Time of steps from their start to their last gradient: the host's clock on a CPU, events on a GPU, which are read
    at the log point, when the device has finished its work."""

    def __init__(self, device: torch.device) -> None:
        self.cuda = device.type == "cuda"
        self.clear()

    def clear(self) -> None:
        self.steps: list[tuple[Any, Any]] = []  # start and end, in seconds or as events
        self.start, self.end = None, None

    def start_step(self) -> None:
        self._finish_step()
        self.start = self._now()

    def last_gradient(self) -> None:
        """Take the time of the last gradient; with several micro-batches the last call counts."""
        if self.cuda and torch.cuda.is_current_stream_capturing():
            return  # a captured step replays without Python: nothing to time
        self.end = self._now()

    def seconds_per_step(self) -> float:
        """Return the mean since the last call, 0 if nothing was timed."""
        self._finish_step()
        seconds = [start.elapsed_time(end) / 1e3 if self.cuda else end - start for start, end in self.steps]
        self.steps = []
        return sum(seconds) / len(seconds) if seconds else 0.0

    def _finish_step(self) -> None:
        if self.end is not None:
            self.steps.append((self.start, self.end))
        self.end = None

    def _now(self) -> Any:
        if not self.cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event
