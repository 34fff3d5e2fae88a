"""Hardware error counters since boot: processors, memory, PCIe, InfiniBand, and GPU faults in the kernel's log.

A counter that cannot be read (no device, driver or permission) is reported, not failed. Every check takes the folder or
text that it reads.
"""

import os
import re
from collections import Counter
from contextlib import suppress
from pathlib import Path

from tools.doctor.findings import Finding, judge, read_text

CPUS, NODES = Path("/sys/devices/system/cpu"), Path("/sys/devices/system/node")
MEMORY_CONTROLLERS = Path("/sys/devices/system/edac/mc")
PCI_DEVICES = Path("/sys/bus/pci/devices")
INFINIBAND = Path("/sys/class/infiniband")
KERNEL_LOG = Path("/dev/kmsg")
NOT_READABLE = "not readable here"
NVIDIA, DISPLAY_CONTROLLER = "0x10de", "0x03"  # PCI vendor; first byte of the class
# On a healthy port these grow slowly or not at all (InfiniBand Architecture Specification 1.4, 16.1.3.5)
PORT_ERRORS = ("link_downed", "link_error_recovery", "symbol_error", "port_rcv_errors")
# NVIDIA's Xid catalog: errors of memory, bus, firmware and NVLink (since Blackwell 144 to 150, before it 74), and those
# after which the GPU needs a reset. The others may be faults of a program, or need no action, as a replaced row (63).
HARDWARE_XIDS = {46, 48, 62, 64, 74, 79, 92, 94, 95, 109, 110, 119, 120, 136, 140, 143, *range(144, 151), 158}
XID = re.compile(r"NVRM: Xid \(PCI:([\da-fA-F:.]+)\): (\d+)")


def hardware_checks() -> list[Finding]:
    """Check this machine; one line lists the checks that found nothing to read."""
    findings = [
        check_governor(CPUS),
        check_processor_heat(CPUS),
        check_memory_errors(MEMORY_CONTROLLERS),
        check_numa(NODES),
        check_pcie(PCI_DEVICES),
        check_infiniband(INFINIBAND),
        check_kernel_log(read_kernel_log(KERNEL_LOG)),
    ]
    unread = [finding.check for finding in findings if finding.message.startswith(NOT_READABLE)]
    read = [finding for finding in findings if finding.check not in unread]
    return [*read, Finding("hardware", "ok", f"{NOT_READABLE}: {', '.join(unread)}")] if unread else read


def _count(file: Path) -> int:
    """Return the counter in a file; 0 if there is none."""
    found = re.match(r"\d+", read_text(file) or "")
    return int(found[0]) if found else 0


def _numbered(folder: Path, name: str) -> list[Path]:
    """Return the paths NAME0, NAME1, ... in numerical order."""
    found = ((re.fullmatch(rf"{name}(\d+)", path.name), path) for path in folder.glob(f"{name}*"))
    return [path for _, path in sorted((int(match[1]), path) for match, path in found if match)]


def _unreadable(check: str, where: Path) -> Finding:
    return Finding(check, "ok", f"{NOT_READABLE} ({where})")


def check_governor(cpus: Path) -> Finding:
    """Check that no core is restricted to a low clock."""
    governors = Counter[str]()
    for cpu in _numbered(cpus, "cpu"):
        governor = read_text(cpu / "cpufreq/scaling_governor")
        # the drivers intel_pstate and amd-pstate-epp choose the clock themselves, under either governor
        if governor == "powersave" and read_text(cpu / "cpufreq/scaling_driver") in ("intel_pstate", "amd-pstate-epp"):
            governor = "powersave (chosen by the processor)"
        if governor:
            governors[governor] += 1
    if not governors:
        return _unreadable("governor", cpus / "cpu0/cpufreq")
    message = ", ".join(f"{count} cores {name}" for name, count in sorted(governors.items()))
    return judge("governor", message, "cpupower frequency-set -g performance", warn="powersave" in governors)


def check_processor_heat(cpus: Path) -> Finding:
    """Check whether cores were throttled for heat."""
    counters = [cpu / "thermal_throttle" for cpu in _numbered(cpus, "cpu")]
    counters = [folder for folder in counters if folder.is_dir()]
    if not counters:
        return _unreadable("processor heat", cpus / "cpu0/thermal_throttle")
    counts = {
        folder: [_count(folder / f"{name}_throttle_count") for name in ("core", "package")] for folder in counters
    }
    most = max(counts, key=lambda folder: counts[folder])
    times, packages = counts[most]
    message = f"none of {len(counters)} cores was throttled"
    if times or packages:
        message = f"{most.parent.name} was throttled {times} times for heat, its package {packages} times"
    return judge("processor heat", message, "check the node's cooling and power", warn=bool(times or packages))


def check_memory_errors(controllers: Path) -> Finding:
    """Check for errors of the host's memory that ECC corrected (ce) or could not correct (ue)."""
    folders = _numbered(controllers, "mc")
    if not folders:
        return _unreadable("memory errors", controllers)
    for name, level, remedy in (
        ("ue", "fail", "drain the node: its memory returns wrong data"),
        ("ce", "warn", "have the memory module replaced before its errors become uncorrectable"),
    ):
        if counts := [f"{mc.name} {_count(mc / f'{name}_count')}" for mc in folders if _count(mc / f"{name}_count")]:
            kind = "uncorrected" if name == "ue" else "corrected"
            return Finding("memory errors", level, f"{kind}: {', '.join(counts)}", remedy)
    return Finding("memory errors", "ok", f"none in {len(folders)} memory controllers")


def check_numa(nodes: Path) -> Finding:
    """Check that every NUMA node with cores has memory."""
    folders = _numbered(nodes, "node")
    if not folders:
        return _unreadable("numa", nodes)
    empty = []
    for folder in folders:
        found = re.search(r"MemTotal:\s+(\d+) kB", read_text(folder / "meminfo") or "")
        if found and not int(found[1]) and read_text(folder / "cpulist"):
            empty.append(folder.name)
    message = f"{', '.join(empty)}: cores without memory" if empty else f"{len(folders)} node(s)"
    remedy = "its cores use another NUMA node's memory: check the memory modules of that socket"
    return judge("numa", message, remedy, warn=bool(empty))


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
    if not gpus:
        return Finding("pcie", "ok", "no NVIDIA GPU")
    narrow, slow = [], []
    for gpu in gpus:
        width, most = (_count(gpu / f"{which}_link_width") for which in ("current", "max"))
        speed, fastest = (read_text(gpu / f"{which}_link_speed") for which in ("current", "max"))
        if width < most:
            narrow.append(f"{gpu.name}: {width} of {most} lanes")
        elif speed != fastest:
            slow.append(f"{gpu.name}: {speed} of {fastest}")
    if narrow:
        return Finding("pcie", "warn", "; ".join(narrow), "reseat the card; check riser and slot")
    if slow:
        return Finding("pcie", "ok", f"{'; '.join(slow)} while idle; `limits` shows the rate under load")
    return Finding("pcie", "ok", f"{len(gpus)} GPU(s) at full width and speed")


def check_infiniband(infiniband: Path) -> Finding:
    """Check that ports are up, and count their link errors."""
    ports = sorted(infiniband.glob("*/ports/*"))
    if not ports:
        return Finding("infiniband", "ok", "no port")
    down, errors, rates = [], [], set()
    for port in ports:
        name = f"{port.parent.parent.name}/{port.name}"
        state = (read_text(port / "state") or "unknown").partition(": ")[2] or "unknown"
        if state != "ACTIVE":
            down.append(f"{name} is {state}")
            continue
        rates.add(read_text(port / "rate") or "unknown rate")
        counts = ((error, _count(port / "counters" / error)) for error in PORT_ERRORS)
        if counted := [f"{error} {count}" for error, count in counts if count]:
            errors.append(f"{name}: {', '.join(counted)}")
    up = f"{len(ports) - len(down)} of {len(ports)} ports up at {', '.join(sorted(rates)) or 'no rate'}"
    if down and len(down) == len(ports):
        return Finding("infiniband", "fail", f"{up}: {'; '.join(down)}", "check cable, switch and subnet manager")
    remedy = "check this port's cable and switch; perfquery -R resets the counters"
    return judge("infiniband", "; ".join([up, *down, *errors]), remedy, warn=bool(errors or down or len(rates) > 1))


def read_kernel_log(log: Path) -> str | None:
    """Return the messages in the kernel's ring buffer; None if reading is not permitted."""
    try:
        descriptor = os.open(log, os.O_RDONLY | os.O_NONBLOCK)
    except OSError:
        return None
    records = []
    try:
        with suppress(BlockingIOError):  # end of the log
            while record := _next_record(descriptor):
                records.append(record)
    except OSError:
        return None
    finally:
        os.close(descriptor)
    return b"".join(records).decode(errors="replace")


def _next_record(descriptor: int) -> bytes:
    while True:
        with suppress(BrokenPipeError):  # the message was overwritten before it was read
            return os.read(descriptor, 8192)


def check_kernel_log(text: str | None) -> Finding:
    """Count NVIDIA's Xid errors by device."""
    if text is None:
        return _unreadable("gpu faults", KERNEL_LOG)
    found = Counter((device, int(number)) for device, number in XID.findall(text))
    if not found:
        return Finding("gpu faults", "ok", "no Xid in the kernel's log")
    message = "; ".join(f"Xid {number} of {device}, {count} times" for (device, number), count in sorted(found.items()))
    if not HARDWARE_XIDS.isdisjoint(number for _, number in found):
        remedy = "drain the node and run NVIDIA's field diagnostics; NVIDIA's Xid catalog names the fault"
        return Finding("gpu faults", "fail", message, remedy)
    return Finding("gpu faults", "warn", message, "usually a program's fault, if any; see NVIDIA's Xid catalog")
