"""Measure how well a run uses its devices: model FLOP/s, their fraction of the peak (MFU), power, energy per image."""

import json
import socket
from collections.abc import Sequence
from pathlib import Path

import torch

from utils.distributed.world import World
from utils.errors import ConfigError
from utils.run.config import OutputConfig
from utils.run.logging.environment import device_name
from utils.run.telemetry.sensors import Sensors, find_sensors
from utils.training.batches import training_size
from utils.training.learner import Learner
from utils.training.metrics.flops import NO_VALUES, flops_per_image, measured_peak, number_format, published_peak


class Meters:
    """Gives values for a run's records: `window` at log points, `totals` at the end, while a `with` block of `sensors`
    reads them."""

    def __init__(self, config: OutputConfig, learner: Learner, world: World, image_shape: Sequence[int]) -> None:
        self.learner, self.world, self.image_shape = learner, world, tuple(image_shape)
        gpu, self.notes = find_sensors(world.device)
        self.sensors = Sensors(gpu)
        sizes = {None, *learner.config.progressive_image_sizes}
        self.flops = {size: self._flops(size) for size in sizes}  # before the first step, since it runs the network
        format_, device = number_format(learner.precision, learner.config), device_name(world.device)
        limits = config.limits_report
        self.peak = published_peak(device, format_) if limits is None else read_peak(Path(limits), device, format_)
        if None in self.flops.values():
            self.notes.append(f"no model FLOP/s, no MFU: the network {NO_VALUES}")
        self.devices = count_devices(learner.config.parallel, world)
        if self.peak is None:
            self.notes.append(f"no MFU: the peak of {device} in {format_} is not known; see limits_report")

    def _flops(self, size: int | None) -> float | None:
        shape = self.image_shape if size is None else (self.image_shape[0], size, size)
        try:
            return flops_per_image(self.learner.model, shape)
        except Exception:  # a user's network may read values, which meta tensors lack, and raise anything
            return None

    def window(self, images_per_sec: float, epoch: int) -> dict[str, float]:
        """Return values since the last log point, those that are known: {"model_tflops" of all devices together, "mfu"
        (fraction of their peak), "gpu_power_w", ...}. `epoch` counts from 0."""
        flops = self.flops[training_size(self.learner.config, epoch)]
        values = {} if flops is None else {"model_tflops": images_per_sec * flops / 1e12}
        if flops is not None and self.peak is not None:
            values["mfu"] = values["model_tflops"] / (self.peak * self.devices)
        return values | self.sensors.close_window()

    def totals(self, images: int) -> dict[str, float]:
        """Collective: return {"joules", "joules_per_image"} of all devices in this start, which trained `images`; empty
        if a device does not report its energy."""
        spent = self.world.all_gather(self.sensors.joules())
        known = [joules for joules in spent if joules is not None]
        if not images or len(known) < self.devices:  # with DataParallel only the first GPU is known
            return {}
        joules = sum(known)
        return {"joules": joules, "joules_per_image": joules / images}


def count_devices(parallel: str, world: World) -> int:
    """Collective: count the GPUs that train; on CPUs the hosts, as the ranks of a host share its peak."""
    hosts = world.all_gather(socket.gethostname())
    if world.device.type != "cuda":
        return len(set(hosts))
    return torch.cuda.device_count() if parallel == "dataparallel" else world.world_size


def read_peak(path: Path, device: str, number_format: str) -> float | None:
    """Return TFLOP/s from a report of `tools.bench limits`; raise `ConfigError` if it is none or of another device."""
    try:
        report = json.loads(path.read_text(encoding="utf-8"))
        measured_on = report["environment"]["device"]
        limits = {name: float(sample["median"]) for name, sample in report["results"].items()}
        if report["bench"] != "limits":
            raise ValueError
    except OSError as error:
        raise ConfigError(f"limits_report {path}: cannot be read: {error.strerror}; name a report") from None
    except (ValueError, KeyError, TypeError, AttributeError):
        raise ConfigError(f"limits_report {path}: not a report of tools.bench limits; write one with --json") from None
    if measured_on != device:
        raise ConfigError(f"limits_report {path}: was measured on {measured_on}, this is {device}; measure this device")
    return measured_peak(limits, number_format)
