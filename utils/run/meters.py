"""How well a run uses its devices: slow ranks, slow input, memory, model FLOP/s, MFU, power and energy."""

import resource
import socket
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

from utils.distributed.world import World
from utils.environment import device_name
from utils.program import command
from utils.run.clock import Clock, Window
from utils.run.run import Run
from utils.training.batches import training_size
from utils.training.metrics.flops import flops_per_image, published_peak, read_peak

SLOW_FACTOR = 1.15  # a rank is slow above this many times the median of the other ranks
FEWEST_STEPS = 10  # of an epoch from which a rank is called slow
MAX_INPUT_WAIT = 0.10  # fraction of an epoch's time
READ_SECONDS = 1.0  # between two readings of the GPU, at least
READINGS = (  # value in the records, torch.cuda's function, factor from its unit to the value's
    ("gpu_power_w", "power_draw", 1e-3), ("gpu_temperature_c", "temperature", 1.0),
    ("gpu_clock_mhz", "clock_rate", 1.0), ("gpu_memory_gb", "device_memory_used", 1e-9),
)  # fmt: skip


class StepWatch:
    """Times each step's input and its work before the first collective; compares the ranks once an epoch.

    DDP's all-reduce makes every rank's step equally long, so a slow rank shows only in the time before the first
    collective (https://github.com/pytorch/pytorch/issues/71303). CUDA graphs cannot be timed: with them no rank is
    named.
    """

    def __init__(self, model: nn.Module, world: World, clock: Clock) -> None:
        self.world, self.clock, self.cuda = world, clock, world.device.type == "cuda"
        self._spans: list[list[Any]] = []  # of each step of the epoch: start, last gradient
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
        """Return the time: the host's in seconds, or on a GPU an event in its queue, read after the epoch."""
        if not self.cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _end_span(self) -> None:
        """Take the time of the last gradient, of the last micro-batch. A captured step replays without Python."""
        if self._spans and not (self.cuda and torch.cuda.is_current_stream_capturing()):
            self._spans[-1] = [self._spans[-1][0], self._now()]

    def remarks(self) -> list[str]:
        """Collective, when the device has finished an epoch's steps: return remarks for the log, each only once."""
        spans = [span for span in self._spans if len(span) == 2]
        seconds = [start.elapsed_time(end) / 1e3 if self.cuda else end - start for start, end in spans]
        own = median(seconds) if len(seconds) >= FEWEST_STEPS else 0.0
        everyone = self.world.all_gather((socket.gethostname(), own, self.clock.epoch.data_wait))
        hosts, steps, waits = zip(*everyone, strict=True)
        found, most = dict[str, str](), max(waits)
        if most > MAX_INPUT_WAIT:
            of_rank = f" of rank {waits.index(most)}" if len(waits) > 1 else ""
            remedy = f"find the fastest data_loader here with: {command('bench')} loaders"
            waiting = f"Waiting for input takes {most:.0%} of the time{of_rank}"
            found["input"] = f"{waiting}; try more num_data_workers, or {remedy}"
        for rank, factor in slow_ranks(steps).items():
            slow = f"is slow: it needs {factor:.2f} times the median of the others before each all-reduce"
            remedy = f"check its node with: {command('doctor')} --nodes"
            found[f"rank {rank}"] = f"Rank {rank} on {hosts[rank]} {slow}; {remedy}"
        new = [remark for name, remark in found.items() if name not in self._reported]
        self._reported |= found.keys()
        return new


def slow_ranks(steps: Sequence[float]) -> dict[int, float]:
    """Return {rank: factor} of the ranks slower than SLOW_FACTOR times the median of the others. `steps`: seconds of a
    step before the first collective, of each rank; 0 if it was not timed."""
    # without the rank itself: the median of two would hide half of their difference
    others = [median([*steps[:rank], *steps[rank + 1 :]] or [own]) for rank, own in enumerate(steps)]
    return {
        rank: own / other
        for rank, (own, other) in enumerate(zip(steps, others, strict=True))
        if own > SLOW_FACTOR * other > 0
    }


class Meters:
    """Values for a run's records: `at_log_point`, and `totals` at the end. The energy counts from here on."""

    def __init__(self, run: Run) -> None:
        self.config, self.world, say = run.config, run.world, run.log.say
        whole = run.data["shape"]
        self.flops = dict[int | None, float]()  # of an image, by its size in training
        try:  # before the first step, since it runs the network
            for size in {training_size(self.config, epoch) for epoch in range(self.config.max_epochs)}:
                self.flops[size] = flops_per_image(run.learner.model, (whole[0], size, size) if size else whole)
        except Exception:  # a user's network may read values, which meta tensors lack, and raise anything
            say("no model FLOP/s, no MFU: the network cannot be run on tensors without values")
        format_, device = run.learner.plan.precision.number_format, device_name(self.world.device)
        limits = self.config.limits_report
        self.peak = published_peak(device, format_) if limits is None else read_peak(Path(limits), device, format_)
        if self.peak is None:
            say(f"no MFU: the peak of {device} in {format_} is not known; see limits_report")
        self.devices = count_devices(self.config.parallel, self.world)
        self.read_at, self.joules = 0.0, read_joules(self.world.device)
        if self.joules is None and self.world.device.type == "cuda":
            say('the GPU reports no energy; its sensors need: pip install ".[nvml]"')

    def at_log_point(self, window: Window, epoch: int) -> dict[str, float]:
        """Return those values of the `window` that are known; model_tflops is of all devices together, mfu the fraction
        of their peak. `epoch` counts from 0."""
        values = {"images_per_sec": window.images_per_sec, "data_wait": window.data_wait}
        values["memory_gb"] = peak_memory(self.world.device) / 1e9
        flops = self.flops.get(training_size(self.config, epoch))
        if flops is not None:
            values["model_tflops"] = window.images_per_sec * flops / 1e12
            if self.peak is not None:
                values["mfu"] = values["model_tflops"] / (self.peak * self.devices)
        if time.monotonic() - self.read_at >= READ_SECONDS:
            values |= read_gpu(self.world.device)
            self.read_at = time.monotonic()
        return values

    def totals(self, images: int) -> dict[str, float]:
        """Collective: return {"joules", "joules_per_image"} of all devices in this start, which trained `images`; empty
        if a device does not report its energy."""
        now = read_joules(self.world.device)
        spent = self.world.all_gather(None if now is None or self.joules is None else now - self.joules)
        known = [joules for joules in spent if joules is not None]
        if not images or len(known) < self.devices:  # with DataParallel only the first GPU is known
            return {}
        return {"joules": sum(known), "joules_per_image": sum(known) / images}


def peak_memory(device: torch.device) -> int:
    """Peak bytes of tensors on a GPU, or of this process on a CPU; does not wait for the device."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def read_gpu(device: torch.device) -> dict[str, float]:
    """Return what a GPU reports now, of READINGS; {} on a CPU. Needs the package nvidia-ml-py."""
    values = dict[str, float]()
    for name, function, unit in READINGS if device.type == "cuda" else ():
        with suppress(Exception):  # NVML's errors: not supported or not permitted; its module may be missing
            values[name] = getattr(torch.cuda, function)(device) * unit
    return values


def read_joules(device: torch.device) -> float | None:
    """Return the energy that a GPU has used since its driver was loaded; None if it is not known."""
    if device.type != "cuda":
        return None
    with suppress(Exception):  # as above
        import pynvml

        pynvml.nvmlInit()  # torch does it only in its own readings
        handle = pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{torch.cuda.get_device_properties(device).uuid}")
        return float(pynvml.nvmlDeviceGetTotalEnergyConsumption(handle)) / 1e3
    return None


def count_devices(parallel: str, world: World) -> int:
    """Collective: count the GPUs that train; on CPUs the hosts, as the ranks of a host share its peak."""
    hosts = world.all_gather(socket.gethostname())
    if world.device.type == "cpu":
        return len(set(hosts))
    return torch.cuda.device_count() if parallel == "dataparallel" else world.world_size
