"""Health of each GPU by NVIDIA's management library (NVML), and NVIDIA's own diagnostics (DCGM), where installed.

NVML needs the package nvidia-ml-py (extra `nvml`). Without it, or without a driver, the finding is "ok, not readable".
"""

import re
import shutil
import subprocess
from collections.abc import Callable, Iterator
from typing import Any

from tools.doctor.findings import Finding, judge

# NVML's reasons for a clock below its maximum that no program requested (nvml.h, nvmlClocksEventReasons)
SLOWING = {0x8: "hardware slowdown", 0x20: "heat", 0x40: "heat, by the hardware", 0x80: "power brake"}
# NVML's errors of a GPU that does not answer (nvml.h, nvmlReturn_t); others mean that a value cannot be read here
UNREACHABLE = {8, 11, 15, 16}  # insufficient power, interrupts, lost, needs a reset
# names of cards whose NVLinks need a bridge, which many nodes lack
NEEDS_BRIDGE = re.compile(r"pcie|\bnvl\b|rtx|geforce|quadro|titan", re.IGNORECASE)
# Time limits of DCGM in seconds by level. Level 2 takes about two minutes, but may hang
# (https://github.com/NVIDIA/DCGM/issues/247). The node's other ranks wait, for rank_timeout_seconds at most.
DCGM_SECONDS = {1: 120, 2: 480}


def gpu_checks() -> list[Finding]:
    """Check every GPU of this machine."""
    try:
        import pynvml
    except ImportError:
        return [Finding("gpu health", "ok", 'not readable without nvidia-ml-py: pip install ".[nvml]"')]
    try:
        pynvml.nvmlInit()
        return [found for number in range(pynvml.nvmlDeviceGetCount()) for found in check_gpu(pynvml, number)]
    except pynvml.NVMLError as error:
        return [Finding("gpu health", "ok", f"not readable here: {error}")]


def check_gpu(nvml: Any, number: int) -> list[Finding]:
    """Return all faults of a GPU, read with the module pynvml, or one `ok`."""

    def ask(question: Callable[..., Any], *arguments: Any) -> Any:
        """Return NVML's answer; None if this GPU or driver does not support it, or does not permit it."""
        try:
            return question(handle, *arguments)
        except nvml.NVMLError as error:
            if error.value in UNREACHABLE:
                raise
            return None

    try:
        handle = nvml.nvmlDeviceGetHandleByIndex(number)
        name = f"{ask(nvml.nvmlDeviceGetName) or 'GPU'} {number}"
        temperature = ask(nvml.nvmlDeviceGetTemperature, nvml.NVML_TEMPERATURE_GPU)
        identity = f"{name} ({ask(nvml.nvmlDeviceGetUUID)}), {temperature} °C"
        faults = [
            Finding("gpu health", level, f"{identity}: {message}", remedy)
            for level, message, remedy in _find_faults(nvml, ask, name)
        ]
    except nvml.NVMLError as error:
        remedy = "drain the node; reset or reboot it, and look for the Xid in the kernel's log"
        return [Finding("gpu health", "fail", f"GPU {number}: {error}", remedy)]
    return faults or [Finding("gpu health", "ok", identity)]


def _find_faults(nvml: Any, ask: Callable[..., Any], name: str) -> Iterator[tuple[str, str, str]]:
    """Yield (level, message, remedy)."""
    # since the driver was loaded
    if count := ask(nvml.nvmlDeviceGetTotalEccErrors, nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, nvml.NVML_VOLATILE_ECC):
        remedy = "drain the node and reset the GPU; its recent results may be wrong"
        yield "fail", f"{count} uncorrected memory errors", remedy
    if count := ask(nvml.nvmlDeviceGetTotalEccErrors, nvml.NVML_MEMORY_ERROR_TYPE_CORRECTED, nvml.NVML_VOLATILE_ECC):
        yield "warn", f"{count} corrected memory errors", "watch whether the number grows"
    _, uncorrected, pending, failed = ask(nvml.nvmlDeviceGetRemappedRows) or (0, 0, False, False)
    if failed:
        yield "fail", "a faulty memory row cannot be replaced", "have the GPU replaced"
    elif pending:
        yield "warn", "a faulty memory row is replaced at the next reset", "reset the GPU: nvidia-smi -r"
    elif uncorrected:
        yield "warn", f"{uncorrected} memory rows were replaced", "have the GPU replaced if the number grows"
    reasons = ask(nvml.nvmlDeviceGetCurrentClocksEventReasons) or 0
    if names := [reason for bit, reason in SLOWING.items() if reasons & bit]:
        yield "fail", f"slowed down: {', '.join(names)}", "check the node's cooling and power"
    limit, usual = ask(nvml.nvmlDeviceGetPowerManagementLimit), ask(nvml.nvmlDeviceGetPowerManagementDefaultLimit)
    if limit is not None and usual is not None and limit < usual:  # milliwatts
        remedy = f"nvidia-smi -pl {usual / 1000:.0f}, unless the site set it"
        yield "warn", f"power limit {limit / 1000:.0f} W, default {usual / 1000:.0f} W", remedy
    states = [ask(nvml.nvmlDeviceGetNvLinkState, link) for link in range(nvml.NVML_NVLINK_MAX_LINKS)]
    links = [state for state in states if state is not None]
    if down := [str(link) for link, up in enumerate(links) if not up]:
        unbridged = len(down) == len(links) and NEEDS_BRIDGE.search(name)
        remedy = "nvidia-smi nvlink -s; all-reduce is slower without them; normal for cards without a bridge"
        yield ("warn" if unbridged else "fail"), f"of {len(links)} NVLinks down: {', '.join(down)}", remedy


def check_dcgm(level: int, visible: int, installed: int) -> Finding:
    """Run `dcgmi diag` at this level; 0: not. `visible`: the GPUs that the node's ranks may use, of `installed`."""
    program = shutil.which("dcgmi")
    if program is None or level == 0:
        return Finding("dcgm", "ok", "not run: " + ("no dcgmi on PATH" if program is None else "--dcgm 0"))
    if visible < installed:
        message = f"not run: it tests all {installed} GPUs of the node, of which this job may use {visible}"
        return Finding("dcgm", "ok", message)
    # on SIGTERM dcgmi also stops the diagnostics, which run in another process
    command = ["timeout", "--kill-after=30", str(DCGM_SECONDS[level]), program, "diag", "--run", str(level)]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    lines = [" ".join(line.replace("|", " ").split()) for line in done.stdout.splitlines()]
    passed, warned, failed = (
        [line for line in lines if re.search(rf"\b{word}", line, re.IGNORECASE)] for word in ("pass", "warn", "fail")
    )
    if not passed and not failed:
        message = f"dcgmi diag -r {level}: no result, status {done.returncode} (124: time limit)"
        remedy = "is nv-hostengine running (systemctl start nvidia-dcgm)? Run dcgmi by hand, or --dcgm 0"
        return Finding("dcgm", "warn", message, remedy)
    remedy = "run it by hand for the details; change the setting that it names, or drain the node"
    message = "; ".join([f"dcgmi diag -r {level}", *failed, *warned])
    return judge("dcgm", message, remedy, warn=bool(warned), fail=bool(failed))
