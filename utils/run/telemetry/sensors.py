"""What a GPU tells of itself while a run trains: power, temperature, clock, memory and energy, by NVML (the package
nvidia-ml-py, extra `nvml`). A thread asks once a second, so that no step waits for an answer.
"""

import threading
from contextlib import AbstractContextManager
from typing import Any

import torch

SECONDS = 1.0  # from one reading to the next


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


class Sensors(AbstractContextManager["Sensors"]):
    """Reads a GPU in a thread, within a `with` block; of None it tells nothing."""

    def __init__(self, gpu: Gpu | None) -> None:
        self.gpu = gpu
        self._began: float | None = None  # the counter of energy when the block began, in joules
        self._lock, self._closing = threading.Lock(), threading.Event()
        self._readings: list[dict[str, float]] = []
        self._thread: threading.Thread | None = None

    def close_window(self) -> dict[str, float]:
        """The mean of each value since the last call; without those that nothing tells."""
        with self._lock:
            readings, self._readings = self._readings, []
        names = dict.fromkeys(name for reading in readings for name in reading)
        values = {name: [reading[name] for reading in readings if name in reading] for name in names}
        return {name: sum(found) / len(found) for name, found in values.items()}

    def joules(self) -> float | None:
        """What was spent since the block began; None where it is not known."""
        if self.gpu is None or self._began is None:
            return None
        now = self.gpu.joules()
        return None if now is None else now - self._began

    def _measure(self) -> None:
        assert self.gpu is not None
        reading = self.gpu.read()  # which may take long: a log point does not wait for it
        with self._lock:
            self._readings.append(reading)

    def _read_on(self) -> None:
        while not self._closing.wait(SECONDS):
            self._measure()

    def __enter__(self) -> "Sensors":
        if self.gpu is not None:
            self._began = self.gpu.joules()
            self._thread = threading.Thread(target=self._read_on, name="sensors", daemon=True)
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._closing.set()
        if self._thread is not None:
            self._thread.join(SECONDS)  # a GPU that is gone may never answer


def find_sensors(device: torch.device) -> tuple[Gpu | None, list[str]]:
    """What there is to ask about `device`, and notes for the log."""
    if device.type != "cuda":
        return None, []
    try:
        import pynvml
    except ImportError:
        return None, ['power and energy of the GPU are not recorded; pip install ".[nvml]" brings what reads them']
    return find_gpu(pynvml, str(torch.cuda.get_device_properties(device).uuid))


def find_gpu(nvml: Any, uuid: str) -> tuple[Gpu | None, list[str]]:
    """The GPU with this UUID as PyTorch gives it, by the module pynvml; a note where it cannot be asked."""
    try:
        nvml.nvmlInit()
        return Gpu(nvml, nvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}")), []
    except nvml.NVMLError as error:
        return None, [f"power and energy of the GPU are not recorded: {error}"]
