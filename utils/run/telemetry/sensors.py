"""Read a GPU's power, temperature, clock, memory and energy by NVML (package nvidia-ml-py, extra `nvml`) while a run
trains. A thread reads once a second, so that no step waits for it.
"""

import threading
from contextlib import AbstractContextManager
from typing import Any

import torch

SECONDS = 1.0  # from one reading to the next


class Gpu:
    """One GPU, read through the module pynvml. Values that GPU or driver do not report are omitted."""

    def __init__(self, nvml: Any, handle: Any) -> None:
        self.nvml, self.handle = nvml, handle

    def _query(self, function: str, *arguments: Any) -> Any:
        try:
            return getattr(self.nvml, function)(self.handle, *arguments)
        except self.nvml.NVMLError:  # not supported, or not permitted
            return None

    def read(self) -> dict[str, float]:
        nvml, memory = self.nvml, self._query("nvmlDeviceGetMemoryInfo")
        values = {
            "gpu_power_w": (self._query("nvmlDeviceGetPowerUsage"), 1e-3),
            "gpu_temperature_c": (self._query("nvmlDeviceGetTemperature", nvml.NVML_TEMPERATURE_GPU), 1.0),
            "gpu_clock_mhz": (self._query("nvmlDeviceGetClockInfo", nvml.NVML_CLOCK_SM), 1.0),
            "gpu_memory_gb": (None if memory is None else memory.used, 1e-9),
        }
        return {name: value * unit for name, (value, unit) in values.items() if value is not None}

    def joules(self) -> float | None:
        millijoules = self._query("nvmlDeviceGetTotalEnergyConsumption")
        return None if millijoules is None else millijoules / 1000


class Sensors(AbstractContextManager["Sensors"]):
    """Reads a GPU in a thread, within a `with` block; without a GPU it has no values."""

    def __init__(self, gpu: Gpu | None) -> None:
        self.gpu = gpu
        self._began: float | None = None  # the energy counter at the start of the block, in joules
        self._lock, self._closing = threading.Lock(), threading.Event()
        self._readings: list[dict[str, float]] = []
        self._thread: threading.Thread | None = None

    def close_window(self) -> dict[str, float]:
        """Return the mean of each value since the last call."""
        with self._lock:
            readings, self._readings = self._readings, []
        names = dict.fromkeys(name for reading in readings for name in reading)
        values = {name: [reading[name] for reading in readings if name in reading] for name in names}
        return {name: sum(found) / len(found) for name, found in values.items()}

    def joules(self) -> float | None:
        """Return the energy used since the block began; None if unknown."""
        if self.gpu is None or self._began is None:
            return None
        now = self.gpu.joules()
        return None if now is None else now - self._began

    def _measure(self) -> None:
        assert self.gpu is not None
        reading = self.gpu.read()  # without the lock: it may take long, and a log point must not wait for it
        with self._lock:
            self._readings.append(reading)

    def _keep_reading(self) -> None:
        while not self._closing.wait(SECONDS):
            self._measure()

    def __enter__(self) -> "Sensors":
        if self.gpu is not None:
            self._began = self.gpu.joules()
            self._thread = threading.Thread(target=self._keep_reading, name="sensors", daemon=True)
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._closing.set()
        if self._thread is not None:
            self._thread.join(SECONDS)  # a lost GPU may never answer


def find_sensors(device: torch.device) -> tuple[Gpu | None, list[str]]:
    """Return the GPU to read for `device`, if any, and notes for the log."""
    if device.type != "cuda":
        return None, []
    try:
        import pynvml
    except ImportError:
        return None, ['power and energy of the GPU are not recorded; to record them: pip install ".[nvml]"']
    return find_gpu(pynvml, str(torch.cuda.get_device_properties(device).uuid))


def find_gpu(nvml: Any, uuid: str) -> tuple[Gpu | None, list[str]]:
    """Return the GPU with PyTorch's UUID, read through the module pynvml; if it cannot be read, None and a note."""
    try:
        nvml.nvmlInit()
        return Gpu(nvml, nvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}")), []
    except nvml.NVMLError as error:
        return None, [f"power and energy of the GPU are not recorded: {error}"]
