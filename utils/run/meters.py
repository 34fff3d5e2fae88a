"""How well a run uses its devices: model FLOP/s, their fraction of the peak (MFU), power and energy per image."""

import socket
import time
from contextlib import suppress
from pathlib import Path

import torch

from utils.distributed.world import World
from utils.run.logging.environment import device_name
from utils.run.run import Run
from utils.training.batches import training_size
from utils.training.metrics.flops import NO_VALUES, flops_per_image, number_format, published_peak, read_peak

READ_SECONDS = 1.0  # between two readings of the GPU, at least
READINGS = (  # value in the records, torch.cuda's function, factor from its unit to the value's
    ("gpu_power_w", "power_draw", 1e-3), ("gpu_temperature_c", "temperature", 1.0),
    ("gpu_clock_mhz", "clock_rate", 1.0), ("gpu_memory_gb", "device_memory_used", 1e-9),
)  # fmt: skip


class Meters:
    """Values for a run's records: `window` at log points, `totals` at the end. The energy counts from here on."""

    def __init__(self, run: Run) -> None:
        self.config, self.world, say = run.config, run.world, run.log.say
        channels, *sides = run.data["shape"]
        self.flops = dict[int | None, float]()  # of an image, by its size in training
        try:  # before the first step, since it runs the network
            for size in {training_size(self.config, epoch) for epoch in range(self.config.max_epochs)}:
                self.flops[size] = flops_per_image(run.learner.model, (channels, *((size, size) if size else sides)))
        except Exception:  # a user's network may read values, which meta tensors lack, and raise anything
            say(f"no model FLOP/s, no MFU: the network {NO_VALUES}")
        format_, device = number_format(run.learner.precision, self.config), device_name(self.world.device)
        limits = self.config.limits_report
        self.peak = published_peak(device, format_) if limits is None else read_peak(Path(limits), device, format_)
        if self.peak is None:
            say(f"no MFU: the peak of {device} in {format_} is not known; see limits_report")
        self.devices = count_devices(self.config.parallel, self.world)
        self.read_at, self.joules = 0.0, read_joules(self.world.device)
        if self.joules is None and self.world.device.type == "cuda":
            say('the GPU reports no energy; its sensors need: pip install ".[nvml]"')

    def window(self, images_per_sec: float, epoch: int) -> dict[str, float]:
        """Return the values since the last log point that are known: {"model_tflops" of all devices together, "mfu"
        (fraction of their peak), "gpu_power_w", ...}. `epoch` counts from 0."""
        values, flops = dict[str, float](), self.flops.get(training_size(self.config, epoch))
        if flops is not None:
            values["model_tflops"] = images_per_sec * flops / 1e12
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
