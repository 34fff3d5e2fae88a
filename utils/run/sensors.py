"""What the machine tells of itself while a run trains: a GPU's power, temperature, clock and memory, and energy.

A thread asks once a second, so that no step waits for an answer. NVML (the package nvidia-ml-py, extra `nvml`) tells of
a GPU; the kernel's RAPL counters tell of the processor packages, where they may be read, with all that runs on them.
"""

import threading
from collections.abc import Sequence
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from typing import Any, Protocol

import torch

POWERCAP = Path("/sys/class/powercap")
SECONDS = 1.0  # from one reading to the next


class Sensor(Protocol):
    """Something that can be asked."""

    def read(self) -> dict[str, float]:
        """Values of this moment, by their names in metrics.jsonl."""

    def joules(self) -> float | None:
        """A counter that only grows; None where it cannot be read."""


class Gpu:
    """One GPU, by the module pynvml. What a GPU or driver does not tell is left out."""

    def __init__(self, nvml: Any, handle: Any) -> None:
        self.nvml, self.handle = nvml, handle

    def _ask(self, question: str, *arguments: Any) -> Any:
        try:
            return getattr(self.nvml, question)(self.handle, *arguments)
        except self.nvml.NVMLError:  # not supported, or not permitted
            return None

    def read(self) -> dict[str, float]:
        nvml, memory = self.nvml, self._ask("nvmlDeviceGetMemoryInfo")
        answers = {
            "gpu_power_w": (self._ask("nvmlDeviceGetPowerUsage"), 1e-3),
            "gpu_temperature_c": (self._ask("nvmlDeviceGetTemperature", nvml.NVML_TEMPERATURE_GPU), 1.0),
            "gpu_clock_mhz": (self._ask("nvmlDeviceGetClockInfo", nvml.NVML_CLOCK_SM), 1.0),
            "gpu_memory_gb": (None if memory is None else memory.used, 1e-9),
        }
        return {name: answer * unit for name, (answer, unit) in answers.items() if answer is not None}

    def joules(self) -> float | None:
        millijoules = self._ask("nvmlDeviceGetTotalEnergyConsumption")
        return None if millijoules is None else millijoules / 1000


class Processors:
    """The energy of all processor packages of this machine, by RAPL's counters, which begin again at their highest."""

    def __init__(self, packages: Sequence[Path]) -> None:
        self.packages = packages
        self.highest = [_number(package / "max_energy_range_uj") or 0 for package in packages]
        self.last = [_number(package / "energy_uj") for package in packages]
        self.total = 0.0

    def read(self) -> dict[str, float]:
        return {}

    def joules(self) -> float | None:
        now = [_number(package / "energy_uj") for package in self.packages]
        for before, after, highest in zip(self.last, now, self.highest, strict=True):
            if before is None or after is None:
                return None
            self.total += (after - before if after >= before else after + highest - before) / 1e6
        self.last = now
        return self.total


class Sensors(AbstractContextManager["Sensors"]):
    """Reads in a thread, within a `with` block."""

    def __init__(self, sensors: Sequence[Sensor]) -> None:
        self.sensors = sensors
        self.spent = 0.0 if sensors else None  # joules since the block began; None where nothing tells them
        self._asking, self._lock, self._closing = threading.Lock(), threading.Lock(), threading.Event()
        self._readings: list[dict[str, float]] = []
        self._counters: list[float | None] = []
        self._thread: threading.Thread | None = None

    def close_window(self) -> dict[str, float]:
        """The mean of each value since the last call; without those that nothing tells."""
        with self._lock:
            readings, self._readings = self._readings, []
        names = dict.fromkeys(name for reading in readings for name in reading)
        values = {name: [reading[name] for reading in readings if name in reading] for name in names}
        return {name: sum(found) / len(found) for name, found in values.items()}

    def joules(self) -> float | None:
        """What was spent since the block began, up to now."""
        self._measure()
        return self.spent

    def _measure(self) -> None:
        with self._asking:  # which may take long; a log point waits for the other lock alone
            counters = [sensor.joules() for sensor in self.sensors]
            for before, after in zip(self._counters, counters, strict=True):
                if self.spent is not None:
                    self.spent = None if before is None or after is None else self.spent + after - before
            self._counters = counters
            reading = {name: value for sensor in self.sensors for name, value in sensor.read().items()}
        if reading:
            with self._lock:
                self._readings.append(reading)

    def _read_on(self) -> None:
        while not self._closing.wait(SECONDS):
            self._measure()

    def __enter__(self) -> "Sensors":
        if self.sensors:
            self._counters = [sensor.joules() for sensor in self.sensors]
            self._thread = threading.Thread(target=self._read_on, name="sensors", daemon=True)
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._closing.set()
        if self._thread is not None:
            self._thread.join(SECONDS)  # a GPU that is gone may never answer


def find_sensors(device: torch.device, *, one_of_its_node: bool) -> tuple[list[Sensor], list[str]]:
    """What there is to ask about `device`, and notes for the log. Of the ranks of a node `one_of_its_node` reads what
    they share."""
    if device.type != "cuda":
        processors = find_processors(POWERCAP) if one_of_its_node else None
        return [processors] if processors else [], []
    try:
        import pynvml
    except ImportError:
        return [], ['power and energy of the GPU are not recorded; pip install ".[nvml]" brings what reads them']
    return find_gpu(pynvml, str(torch.cuda.get_device_properties(device).uuid))


def find_gpu(nvml: Any, uuid: str) -> tuple[list[Sensor], list[str]]:
    """The GPU with this UUID as PyTorch gives it, by the module pynvml; a note where it cannot be asked."""
    try:
        nvml.nvmlInit()
        return [Gpu(nvml, nvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}"))], []
    except nvml.NVMLError as error:
        return [], [f"power and energy of the GPU are not recorded: {error}"]


def find_processors(root: Path) -> Processors | None:
    """The packages below `root`, /sys/class/powercap; None where none of them may be read."""
    packages = [zone for zone in sorted(root.glob("intel-rapl:*")) if _text(zone / "name").startswith("package")]
    readable = [package for package in packages if _number(package / "energy_uj") is not None]
    return Processors(readable) if readable and len(readable) == len(packages) else None


def _number(path: Path) -> int | None:
    with suppress(ValueError):
        return int(_text(path))
    return None


def _text(path: Path) -> str:
    """Empty where it may not be read."""
    try:
        return path.read_text().strip()
    except OSError:
        return ""
