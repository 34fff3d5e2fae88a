"""Hardware error counters since boot: memory, PCIe, InfiniBand, and GPU faults in the kernel's log.

A counter that cannot be read (no device, driver or permission) is reported, not failed.
"""

import re
import subprocess
from collections import Counter
from pathlib import Path

from tools.doctor.findings import Finding, judge, read_text

PCI_DEVICES = Path("/sys/bus/pci/devices")
NVIDIA, DISPLAY_CONTROLLER = "0x10de", "0x03"  # PCI vendor; first byte of the class
# On a healthy port these grow slowly or not at all (InfiniBand Architecture Specification 1.4, 16.1.3.5)
PORT_ERRORS = ("link_downed", "link_error_recovery", "symbol_error", "port_rcv_errors")
# NVIDIA's Xid catalog: errors of memory, bus, firmware and NVLink (since Blackwell 144 to 150, before it 74), and those
# after which the GPU needs a reset. The others may be faults of a program, or need no action, as a replaced row (63).
HARDWARE_XIDS = {46, 48, 62, 64, 74, 79, 92, 94, 95, 109, 110, 119, 120, 136, 140, 143, *range(144, 151), 158}
XID = re.compile(r"NVRM: Xid \(PCI:([\da-fA-F:.]+)\): (\d+)")


def hardware_checks() -> list[Finding]:
    """Check this machine."""
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
