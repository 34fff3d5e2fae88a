"""Health of the hardware: error counters since boot of memory, PCIe and InfiniBand, GPU faults in the kernel's log, and
each GPU by NVIDIA's management library (NVML, package nvidia-ml-py, extra `nvml`) and own diagnostics (DCGM).

What cannot be read (no device, driver, package or permission) is reported, not failed.
"""

import re
import shutil
import subprocess
from collections import Counter
from pathlib import Path
from typing import Any

from tools.doctor.findings import Finding, judge, read_text

PCI_DEVICES = Path("/sys/bus/pci/devices")
NVIDIA, DISPLAY_CONTROLLER = "0x10de", "0x03"  # PCI vendor; first byte of the class
# On a healthy port these grow slowly or not at all (InfiniBand Architecture Specification 1.4, 16.1.3.5)
PORT_ERRORS = ("link_downed", "link_error_recovery", "symbol_error", "port_rcv_errors")
# NVIDIA's Xid catalog: errors of memory, bus, firmware and NVLink (since Blackwell 144 to 150, before it 74), and those
# after which the GPU needs a reset. The others may be faults of a program, or need no action, as a replaced row (63).
HARDWARE_XIDS = {46, 48, 62, 64, 74, 79, 92, 94, 95, 109, 110, 119, 120, 136, 140, 143, *range(144, 151), 158}
XID = re.compile(r"NVRM: Xid \(PCI:([\da-fA-F:.]+)\): (\d+)")
# NVML's reasons for a clock below its maximum that no program requested (nvml.h, nvmlClocksEventReasons)
SLOWING = {0x8: "hardware slowdown", 0x20: "heat", 0x40: "heat, by the hardware", 0x80: "power brake"}
# NVML's errors of a GPU that does not answer (nvml.h, nvmlReturn_t); others mean that a value cannot be read here
UNREACHABLE = {8, 11, 15, 16}  # insufficient power, interrupts, lost, needs a reset
# names of cards whose NVLinks need a bridge, which many nodes lack
NEEDS_BRIDGE = re.compile(r"pcie|\bnvl\b|rtx|geforce|quadro|titan", re.IGNORECASE)
# Time limits of DCGM in seconds by level. Level 2 takes about two minutes, but may hang
# (https://github.com/NVIDIA/DCGM/issues/247). The node's other ranks wait, for rank_timeout_seconds at most.
DCGM_SECONDS = {1: 120, 2: 480}


def hardware_checks() -> list[Finding]:
    memory, ports = Path("/sys/devices/system/edac/mc"), Path("/sys/class/infiniband")
    return [check_memory_errors(memory), check_pcie(PCI_DEVICES), check_infiniband(ports), check_kernel_log()]


def _count(file: Path) -> int:
    """Return the counter in a file; 0 if there is none."""
    found = re.match(r"\d+", read_text(file) or "")
    return int(found[0]) if found else 0


def check_memory_errors(controllers: Path) -> Finding:
    """Check for errors of the host's memory that ECC corrected (ce) or could not correct (ue)."""
    folders = sorted(controllers.glob("mc[0-9]*"))
    if not folders:
        return Finding("memory errors", "ok", f"not readable here: {controllers}")
    counts = {kind: sum(_count(folder / f"{kind}_count") for folder in folders) for kind in ("ue", "ce")}
    message = f"{counts['ue']} uncorrected, {counts['ce']} corrected in {len(folders)} memory controllers"
    remedy = "uncorrected: drain the node, its memory returns wrong data; corrected: have the memory module replaced"
    return judge("memory errors", message, remedy, warn=counts["ce"] > 0, fail=counts["ue"] > 0)


def find_gpus(devices: Path) -> list[Path]:
    """Return the folders of the NVIDIA GPUs among these PCI devices."""
    return [
        device
        for device in sorted(devices.glob("*"))
        if read_text(device / "vendor") == NVIDIA and (read_text(device / "class") or "").startswith(DISPLAY_CONTROLLER)
    ]


def check_pcie(devices: Path) -> Finding:
    """Check that each NVIDIA GPU uses all its PCIe lanes. An idle GPU lowers the link's speed, never its width."""
    gpus = find_gpus(devices)
    widths = [(gpu.name, _count(gpu / "current_link_width"), _count(gpu / "max_link_width")) for gpu in gpus]
    narrow = [f"{name}: {width} of {most} lanes" for name, width, most in widths if width < most]
    message = "; ".join(narrow) or f"{len(gpus)} NVIDIA GPU(s) at full width"
    return judge("pcie", message, "reseat the card; check riser and slot", warn=bool(narrow))


def check_infiniband(infiniband: Path) -> Finding:
    """Check that ports are up at one rate, and count their link errors."""
    ports = {f"{port.parent.parent.name}/{port.name}": port for port in sorted(infiniband.glob("*/ports/*"))}
    states = {name: read_text(port / "state") or "unknown" for name, port in ports.items()}
    down = [f"{name} is {state}" for name, state in states.items() if not state.endswith("ACTIVE")]
    rates = {read_text(port / "rate") or "no rate" for name, port in ports.items() if states[name].endswith("ACTIVE")}
    counters = [(name, error, port / "counters" / error) for name, port in ports.items() for error in PORT_ERRORS]
    errors = [f"{name}: {error} {_count(file)}" for name, error, file in counters if _count(file)]
    message = "; ".join([f"{len(ports) - len(down)} of {len(ports)} ports up", *sorted(rates), *down, *errors])
    remedy = "check cable, switch and subnet manager; perfquery -R resets the counters"
    warn = bool(down or errors or len(rates) > 1)
    return judge("infiniband", message, remedy, warn=warn, fail=bool(ports) and not rates)


def check_kernel_log() -> Finding:
    """Count NVIDIA's Xid errors by device in the kernel's ring buffer."""
    try:
        log = subprocess.run(["dmesg"], capture_output=True, text=True, errors="replace", check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return Finding("gpu faults", "ok", "not readable here: the kernel's log; run the doctor as root")
    found = Counter((device, int(number)) for device, number in XID.findall(log))
    message = "; ".join(f"Xid {number} of {device}, {count} times" for (device, number), count in sorted(found.items()))
    faulty = not HARDWARE_XIDS.isdisjoint(number for _, number in found)
    remedy = "drain the node and run NVIDIA's field diagnostics" if faulty else "usually a program's fault, if any"
    remedy += "; NVIDIA's Xid catalog names the fault"
    return judge("gpu faults", message or "no Xid in the kernel's log", remedy, warn=bool(found), fail=faulty)


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

    def ask(what: str, *arguments: Any) -> Any:
        """Return NVML's answer; None if this GPU or driver does not support it, or does not permit it."""
        try:
            return getattr(nvml, f"nvmlDeviceGet{what}")(handle, *arguments)
        except nvml.NVMLError as error:
            if error.value in UNREACHABLE:
                raise
            return None

    def fault(level: str, message: str, remedy: str) -> None:
        faults.append(Finding("gpu health", level, f"{identity}: {message}", remedy))

    try:
        handle, faults = nvml.nvmlDeviceGetHandleByIndex(number), list[Finding]()
        name = f"{ask('Name') or 'GPU'} {number}"
        identity = f"{name} ({ask('UUID')}), {ask('Temperature', nvml.NVML_TEMPERATURE_GPU)} °C"
        # since the driver was loaded
        if count := ask("TotalEccErrors", nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, nvml.NVML_VOLATILE_ECC):
            remedy = "drain the node and reset the GPU; its recent results may be wrong"
            fault("fail", f"{count} uncorrected memory errors", remedy)
        if count := ask("TotalEccErrors", nvml.NVML_MEMORY_ERROR_TYPE_CORRECTED, nvml.NVML_VOLATILE_ECC):
            fault("warn", f"{count} corrected memory errors", "watch whether the number grows")
        _, uncorrected, pending, failed = ask("RemappedRows") or (0, 0, False, False)
        if failed:
            fault("fail", "a faulty memory row cannot be replaced", "have the GPU replaced")
        elif pending:
            fault("warn", "a faulty memory row is replaced at the next reset", "reset the GPU: nvidia-smi -r")
        elif uncorrected:
            fault("warn", f"{uncorrected} memory rows were replaced", "have the GPU replaced if the number grows")
        reasons = ask("CurrentClocksEventReasons") or 0
        if names := [reason for bit, reason in SLOWING.items() if reasons & bit]:
            fault("fail", f"slowed down: {', '.join(names)}", "check the node's cooling and power")
        limit, usual = ask("PowerManagementLimit"), ask("PowerManagementDefaultLimit")
        if limit is not None and usual is not None and limit < usual:  # milliwatts
            remedy = f"nvidia-smi -pl {usual / 1000:.0f}, unless the site set it"
            fault("warn", f"power limit {limit / 1000:.0f} W, default {usual / 1000:.0f} W", remedy)
        states = [ask("NvLinkState", link) for link in range(nvml.NVML_NVLINK_MAX_LINKS)]
        links = [state for state in states if state is not None]
        if down := [str(link) for link, up in enumerate(links) if not up]:
            unbridged = len(down) == len(links) and NEEDS_BRIDGE.search(name)
            remedy = "nvidia-smi nvlink -s; all-reduce is slower without them; normal for cards without a bridge"
            fault("warn" if unbridged else "fail", f"of {len(links)} NVLinks down: {', '.join(down)}", remedy)
    except nvml.NVMLError as error:
        remedy = "drain the node; reset or reboot it, and look for the Xid in the kernel's log"
        return [Finding("gpu health", "fail", f"GPU {number}: {error}", remedy)]
    return faults or [Finding("gpu health", "ok", identity)]


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
