"""Health of each GPU, read from NVIDIA's management library (NVML).

Needs the package nvidia-ml-py (extra `nvml`). Without it, or without a driver, the finding is "ok, not readable".
"""

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from tools.doctor.findings import LEVELS, Finding

# NVML's reasons for a clock below its maximum that no program requested (nvml.h, nvmlClocksEventReasons)
SLOWING = {0x4: "power limit", 0x8: "hardware slowdown", 0x20: "heat", 0x40: "heat, by the hardware",
           0x80: "power brake"}  # fmt: skip
FAULTY = SLOWING.keys() - {0x4}  # a healthy GPU under load is at its power limit
# NVML's errors of a GPU that does not answer (nvml.h, nvmlReturn_t); others mean that a value cannot be read here
UNREACHABLE = {8, 11, 15, 16}  # insufficient power, interrupts, lost, needs a reset
# names of cards whose NVLinks need a bridge, which many nodes lack
NEEDS_BRIDGE = re.compile(r"pcie|\bnvl\b|rtx|geforce|quadro|titan", re.IGNORECASE)


@dataclass(frozen=True)
class GpuFacts:
    """One GPU; None if this GPU or driver does not report the value."""

    name: str  # with its number
    uuid: str
    uncorrected: int | None  # ECC errors since the driver was loaded
    corrected: int | None
    remapped_rows: tuple[int, int, bool, bool] | None  # corrected, uncorrected, pending until a reset, failed
    slowed: int | None  # current reasons, as bits
    power_limit: float | None  # W
    default_power_limit: float | None  # W
    temperature: int | None  # degrees Celsius
    nvlinks: tuple[bool, ...]  # True: up


def gpu_checks() -> list[Finding]:
    """Check every GPU of this machine."""
    try:
        import pynvml
    except ImportError:
        return [Finding("gpu health", "ok", 'not readable without nvidia-ml-py: pip install ".[nvml]"')]
    gpus = read_gpus(pynvml)
    if isinstance(gpus, str):
        return [Finding("gpu health", "ok", f"not readable here: {gpus}")]
    return [check_gpu(gpu) if isinstance(gpu, GpuFacts) else gpu for gpu in gpus]


def read_gpus(nvml: Any) -> list[GpuFacts | Finding] | str:
    """Read every GPU with the module pynvml; return the reason if that is impossible. A GPU that the driver cannot
    reach is a finding."""
    try:
        nvml.nvmlInit()
    except nvml.NVMLError as error:
        return str(error)

    def read(number: int) -> GpuFacts | Finding:
        try:
            return _read_gpu(nvml, number)
        except nvml.NVMLError as error:
            if error.value not in UNREACHABLE:
                raise
            remedy = "drain the node; reset or reboot it, and look for the Xid in the kernel's log"
            return Finding("gpu health", "fail", f"GPU {number}: {error}", remedy)

    try:
        return [read(number) for number in range(nvml.nvmlDeviceGetCount())]
    except nvml.NVMLError as error:
        return str(error)
    finally:
        nvml.nvmlShutdown()


def _read_gpu(nvml: Any, number: int) -> GpuFacts:
    handle = nvml.nvmlDeviceGetHandleByIndex(number)

    def ask(question: Callable[..., Any], *arguments: Any) -> Any:
        try:
            return question(handle, *arguments)
        except nvml.NVMLError as error:
            if error.value in UNREACHABLE:
                raise
            return None  # not supported, or not permitted

    def count_errors(kind: int) -> int | None:
        return ask(nvml.nvmlDeviceGetTotalEccErrors, kind, nvml.NVML_VOLATILE_ECC)

    def in_watts(milliwatts: int | None) -> float | None:
        return None if milliwatts is None else milliwatts / 1000

    rows = ask(nvml.nvmlDeviceGetRemappedRows)
    links = [ask(nvml.nvmlDeviceGetNvLinkState, link) for link in range(nvml.NVML_NVLINK_MAX_LINKS)]
    return GpuFacts(
        name=f"{ask(nvml.nvmlDeviceGetName) or 'GPU'} {number}",
        uuid=ask(nvml.nvmlDeviceGetUUID) or "unknown",
        uncorrected=count_errors(nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED),
        corrected=count_errors(nvml.NVML_MEMORY_ERROR_TYPE_CORRECTED),
        remapped_rows=None if rows is None else (int(rows[0]), int(rows[1]), bool(rows[2]), bool(rows[3])),
        slowed=ask(nvml.nvmlDeviceGetCurrentClocksEventReasons),
        power_limit=in_watts(ask(nvml.nvmlDeviceGetPowerManagementLimit)),
        default_power_limit=in_watts(ask(nvml.nvmlDeviceGetPowerManagementDefaultLimit)),
        temperature=ask(nvml.nvmlDeviceGetTemperature, nvml.NVML_TEMPERATURE_GPU),
        nvlinks=tuple(bool(state) for state in links if state is not None),
    )


def check_gpu(gpu: GpuFacts) -> Finding:
    """List all faults of this GPU, with the level and remedy of the worst."""
    faults = list(_faults(gpu))
    where = f"{gpu.name} ({gpu.uuid})"
    if not faults:
        message = "" if gpu.temperature is None else f", {gpu.temperature} °C"
        message += "" if gpu.power_limit is None else f", at most {gpu.power_limit:.0f} W"
        return Finding("gpu health", "ok", f"{where}{message}")
    worst = max(faults, key=lambda fault: LEVELS.index(fault.level))
    return replace(worst, message=f"{where}: {'; '.join(fault.message for fault in faults)}")


def _faults(gpu: GpuFacts) -> Iterator[Finding]:
    def fault(level: str, message: str, remedy: str) -> Finding:
        return Finding("gpu health", level, message, remedy)

    if gpu.uncorrected:
        remedy = "drain the node and reset the GPU; its recent results may be wrong"
        yield fault("fail", f"{gpu.uncorrected} uncorrected memory errors", remedy)
    _, uncorrected, pending, failed = gpu.remapped_rows or (0, 0, False, False)
    if failed:
        yield fault("fail", "a faulty memory row cannot be replaced", "have the GPU replaced")
    if pending:
        yield fault("warn", "a faulty memory row is replaced at the next reset", "reset the GPU: nvidia-smi -r")
    elif uncorrected and not failed:
        yield fault("warn", f"{uncorrected} memory rows were replaced", "have the GPU replaced if the number grows")
    if gpu.corrected:
        yield fault("warn", f"{gpu.corrected} corrected memory errors", "watch whether the number grows")
    reasons = {reason for reason in SLOWING if (gpu.slowed or 0) & reason}
    if reasons & FAULTY:
        names = ", ".join(name for reason, name in SLOWING.items() if reason in reasons)
        at = "" if gpu.temperature is None else f" at {gpu.temperature} °C"
        yield fault("fail", f"slowed down ({names}){at}", "check the node's cooling and power")
    limit, usual = gpu.power_limit, gpu.default_power_limit
    if limit is not None and usual is not None and limit < usual:
        remedy = f"nvidia-smi -pl {usual:.0f}, unless the site set it"
        yield fault("warn", f"power limit {limit:.0f} W, default {usual:.0f} W", remedy)
    down = [str(link) for link, up in enumerate(gpu.nvlinks) if not up]
    if down and len(down) == len(gpu.nvlinks) and NEEDS_BRIDGE.search(gpu.name):
        remedy = "normal without an NVLink bridge; with one, see nvidia-smi nvlink -s"
        yield fault("warn", f"{len(down)} NVLinks, all down", remedy)
    elif down:
        remedy = "nvidia-smi nvlink -s; all-reduce is slower without them"
        yield fault("fail", f"{len(gpu.nvlinks)} NVLinks, down: {', '.join(down)}", remedy)
