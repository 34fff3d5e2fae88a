"""What a run watches about itself, without making the host wait for the device outside log points.

Where does a step's time go: how long did the host wait for input, and how long did this rank need before it had to
wait for the others? DDP's all-reduce makes every rank's step equally long, so a slow rank only shows in the time taken
before it (https://github.com/pytorch/pytorch/issues/71303). A step captured as a CUDA graph replays without Python and
so without these times: with graphs no rank is named, and `tools.doctor` is what finds a slow one.
"""

import resource
import socket
import statistics
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from utils.distributed.world import World
from utils.program import command
from utils.timing.clock import LOOP, Clock

SLOW_RANK = 1.15  # times the median of the other ranks
WAITING_SHARE = 0.10  # of the time of an epoch
JUDGED_WINDOWS = 5  # a rank is slow when it was so in each of the last windows
SAMPLE_IMAGES = 64


@dataclass
class Window:
    """What one rank saw between two log points; seconds."""

    own: float  # per step, from asking for input to the last gradient, before any collective of the step
    waiting: float  # for input, in all
    total: float  # in the loop over training batches


class StepWatch:
    """Times input and the rank's own share of each step; judged once an epoch, over all ranks."""

    def __init__(self, model: nn.Module, world: World, clock: Clock) -> None:
        self.world, self.clock = world, clock
        self.own_share = _OwnShare(world.device)
        self._sample: Tensor | None = None
        self._windows: list[Window] = []
        self._history: list[list[Window]] = []  # [log point][rank], over epochs
        self._said: set[str] = set()
        self._first = True
        self._start_window()
        # The gradient of the first layer is the last to come; its hook runs before DDP waits for the other ranks.
        first = next(parameter for parameter in model.parameters() if parameter.requires_grad)
        first.register_post_accumulate_grad_hook(lambda parameter: self.own_share.last_gradient())

    def batches(self, loader: Iterable[tuple[Tensor, Tensor]]) -> Iterator[tuple[Tensor, Tensor]]:
        """`loader`'s batches, the wait for each of them timed."""
        self._start_window()
        self.own_share.clear()
        iterator = iter(loader)
        while True:
            self.own_share.start_step()
            with self.clock.during("input"):
                batch = next(iterator, None)
            if batch is None:
                return
            images, labels = batch
            if self._first and self._sample is None:
                self._sample = images[:SAMPLE_IMAGES].clone()
            yield images, labels

    def _start_window(self) -> None:
        self._waited, self._since = self.clock.seconds("input"), self.clock.seconds(*LOOP)

    def take_sample(self) -> Tensor | None:
        """Images of the process's first batch, once."""
        sample, self._sample = self._sample, None
        return sample

    def close_window(self) -> dict[str, float]:
        """{"data_wait" (share of the window), "memory_gb"}; begins the next. Call when the device has caught up."""
        waiting, total = self.clock.seconds("input") - self._waited, self.clock.seconds(*LOOP) - self._since
        window = Window(self.own_share.seconds_per_step(), waiting, total)
        self._start_window()
        if not self._first:  # the process's first window holds the start of workers and the choice of algorithms
            self._windows.append(window)
        self._first = False
        return {"data_wait": window.waiting / window.total, "memory_gb": peak_memory(self.world.device) / 1e9}

    def judge(self, remedy: str) -> list[str]:
        """Collective, at the end of an epoch: remarks for the log, each made once."""
        ranks = self.world.gather((socket.gethostname(), self._windows))
        self._windows = []
        remarks = self._judge_input([windows for _, windows in ranks], remedy)
        self._history += [list(row) for row in zip(*(windows for _, windows in ranks), strict=False)]
        self._history = self._history[-JUDGED_WINDOWS:]
        for rank, factor in slow_ranks([[window.own for window in row] for row in self._history]):
            if f"rank {rank}" not in self._said:
                self._said.add(f"rank {rank}")
                remarks.append(
                    f"Rank {rank} on {ranks[rank][0]} is slow: {factor:.2f} times the median of the others before they "
                    f"wait for each other; look at its node with: {' '.join(command('doctor'))} --nodes"
                )
        return remarks

    def _judge_input(self, ranks: list[list[Window]], remedy: str) -> list[str]:
        shares = [waiting_share(windows) for windows in ranks]
        worst = max(range(len(shares)), key=lambda rank: shares[rank])
        if shares[worst] <= WAITING_SHARE or "input" in self._said:
            return []
        self._said.add("input")
        of_rank = f" of rank {worst}" if len(ranks) > 1 else ""
        return [f"Waiting for input takes {shares[worst]:.0%} of the time{of_rank}; {remedy}"]


def waiting_share(windows: list[Window]) -> float:
    """Share of the windows' time in which the host waited for input."""
    total = sum(window.total for window in windows)
    return sum(window.waiting for window in windows) / total if total else 0.0


def slow_ranks(windows: list[list[float]]) -> list[tuple[int, float]]:
    """Ranks that took more than SLOW_RANK times the median of the other ranks in each of JUDGED_WINDOWS windows, with
    the median of that factor. `windows[i][rank]`: seconds per step."""
    if len(windows) < JUDGED_WINDOWS or len(windows[0]) < 2:
        return []
    factors = []
    for row in windows:
        others = medians_of_the_others(row)
        factors.append([seconds / other if other else 1.0 for seconds, other in zip(row, others, strict=True)])
    return [
        (rank, statistics.median(column))
        for rank, column in enumerate(zip(*factors, strict=True))
        if min(column) > SLOW_RANK
    ]


def medians_of_the_others(values: Sequence[float]) -> list[float]:
    """For each of at least two values the median of all the others: of two, each is held to the other one, where the
    median of both would hide half of the difference."""
    order = sorted(values)
    return [statistics.median(order[:rank] + order[rank + 1 :]) for rank in map(order.index, values)]


def input_remedy(data_loader: str, num_workers: int) -> str:
    """What to do when the loader is what a run waits for."""
    if data_loader == "torchvision":
        return f"more num_data_workers (now {num_workers} a rank) or data_loader=device shorten it"
    return f"{' '.join(command('bench'))} loaders tells which data_loader is fastest here"


def peak_memory(device: torch.device) -> int:
    """Bytes: the most that tensors held on a GPU, or the most memory that this process held; no synchronisation."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


@dataclass
class _OwnShare:
    """Time of steps from their start to their last gradient: the host's on a CPU, events in the queue of a GPU.

    On a GPU nothing is read until the log point, where the device has caught up.
    """

    device: torch.device
    steps: list[float] = field(default_factory=list)
    events: list[tuple[torch.cuda.Event, torch.cuda.Event]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.cuda = self.device.type == "cuda"
        self.started = 0.0
        self.ended: float | None = None
        self.pair: tuple[torch.cuda.Event, torch.cuda.Event] | None = None

    def clear(self) -> None:
        self.steps, self.events, self.ended, self.pair = [], [], None, None

    def start_step(self) -> None:
        self._keep_last()
        if self.cuda:
            self.pair = (torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True))
            self.pair[0].record()
        else:
            self.started = time.perf_counter()

    def last_gradient(self) -> None:
        """With several micro-batches it is called for each of them, and the last call stands."""
        if self.cuda and torch.cuda.is_current_stream_capturing():
            return  # a captured step replays without Python: nothing to time
        self.ended = time.perf_counter()
        if self.pair is not None:
            self.pair[1].record()

    def _keep_last(self) -> None:
        if self.ended is None:
            return
        if self.pair is not None:
            self.events.append(self.pair)
        else:
            self.steps.append(self.ended - self.started)
        self.ended, self.pair = None, None

    def seconds_per_step(self) -> float:
        """The mean since the last call, 0 where nothing was timed."""
        self._keep_last()
        self.steps += [start.elapsed_time(end) / 1e3 for start, end in self.events]
        mean = sum(self.steps) / len(self.steps) if self.steps else 0.0
        self.steps, self.events = [], []
        return mean
