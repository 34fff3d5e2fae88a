"""How well a run uses its devices: model FLOP/s, their share of the peak (MFU), power, energy for an image."""

import json
import socket
from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path

import torch

from utils.distributed.world import World
from utils.errors import ConfigError
from utils.run.config import OutputConfig
from utils.run.logging.environment import device_name
from utils.run.telemetry.sensors import Sensors, find_sensors
from utils.training.batches import training_size
from utils.training.learner import Learner
from utils.training.metrics.flops import flops_per_image, measured_peak, number_format, published_peak


class Meters(AbstractContextManager["Meters"]):
    """For the records of a run: `window` at log points, `totals` at the end. Reads sensors within a `with` block."""

    def __init__(self, config: OutputConfig, learner: Learner, world: World, image_shape: Sequence[int]) -> None:
        self.learner, self.world, self.image_shape = learner, world, tuple(image_shape)
        gpu, self.notes = find_sensors(world.device)
        self.sensors = Sensors(gpu)
        sizes = {training_size(learner.config, epoch) for epoch in range(learner.config.max_epochs)}
        self.flops = {size: self._flops(size) for size in sizes}  # now: hooks that come later do not see it
        format_, device = number_format(learner.precision, learner.config), device_name(world.device)
        limits = config.limits_report
        self.peak = published_peak(device, format_) if limits is None else read_peak(Path(limits), device, format_)
        if None in self.flops.values():
            self.notes.append("no model FLOP/s, no MFU: the network cannot be run on tensors without values")
        self.devices = count_devices(learner.config.parallel, world)
        if self.peak is None:
            self.notes.append(f"no MFU: the peak of {device} in {format_} is not known; see limits_report")

    def _flops(self, size: int | None) -> float | None:
        shape = self.image_shape if size is None else (self.image_shape[0], size, size)
        try:
            return flops_per_image(self.learner.model, shape)
        except Exception:  # a network of the user's own may look at values, which are not there, and raise anything
            return None

    def window(self, images_per_sec: float, epoch: int) -> dict[str, float]:
        """Since the last log point, in the epoch with this number from 0 on: {"model_tflops" of all devices together,
        "mfu" (share of their peak), "gpu_power_w", ...}, without what is not known."""
        flops = self.flops[training_size(self.learner.config, epoch)]
        values = {} if flops is None else {"model_tflops": images_per_sec * flops / 1e12}
        if flops is not None and self.peak is not None:
            values["mfu"] = values["model_tflops"] / (self.peak * self.devices)
        return values | self.sensors.close_window()

    def totals(self, images: int) -> dict[str, float]:
        """Collective: {"joules", "joules_per_image"} of all devices in this start, which trained so many images; empty
        where a device does not tell."""
        spent = self.world.gather(self.sensors.joules())
        known = [joules for joules in spent if joules is not None]
        if not images or len(known) < len(spent):
            return {}
        joules = sum(known)
        return {"joules": joules, "joules_per_image": joules / images}

    def __enter__(self) -> "Meters":
        self.sensors.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        self.sensors.__exit__()


def count_devices(parallel: str, world: World) -> int:
    """Collective: GPUs that train; on CPUs the hosts, whose ranks share what a host can do."""
    hosts = world.gather(socket.gethostname())
    if world.device.type != "cuda":
        return len(set(hosts))
    return torch.cuda.device_count() if parallel == "dataparallel" else world.world_size


def read_peak(path: Path, device: str, number_format: str) -> float | None:
    """TFLOP/s in a report of `tools.bench limits`; `ConfigError` where it is none, or of another device."""
    try:
        report = json.loads(path.read_text(encoding="utf-8"))
        measured_on = report["environment"]["device"]
        limits = {name: float(sample["median"]) for name, sample in report["results"].items()}
        if report["bench"] != "limits":
            raise ValueError
    except OSError as error:
        raise ConfigError(f"limits_report {path}: cannot be read: {error.strerror}") from None
    except (ValueError, KeyError, TypeError, AttributeError):
        raise ConfigError(f"limits_report {path}: is no report of tools.bench limits; its --json writes one") from None
    if measured_on != device:
        raise ConfigError(f"limits_report {path}: was measured on {measured_on}, this is {device}")
    return measured_peak(limits, number_format)
