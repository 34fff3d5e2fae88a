"""tools.doctor's checks of hardware, with mocked /sys and NVML."""

import os
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tools.doctor import gpus, hardware
from tools.doctor.findings import Finding
from tools.doctor.gpus import GpuFacts, check_gpu, gpu_checks, read_gpus


def write_files(root: Path, files: dict[str, object]) -> None:
    for name, content in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{content}\n")


def seen(finding: Finding) -> tuple[str, str]:
    return finding.level, finding.message


def test_missing_counters_are_not_failed(tmp_path: Path) -> None:
    nothing = tmp_path / "nothing"
    for check in (hardware.check_governor, hardware.check_processor_heat, hardware.check_memory_errors,
                  hardware.check_numa):  # fmt: skip
        finding = check(nothing)
        assert finding.level == "ok" and "not readable here" in finding.message
    assert seen(hardware.check_pcie(nothing)) == ("ok", "no NVIDIA GPU")
    assert seen(hardware.check_infiniband(nothing)) == ("ok", "no port")
    assert "not readable here" in hardware.check_kernel_log(hardware.read_kernel_log(nothing)).message


def test_every_check_runs_on_this_machine() -> None:
    for finding in (*hardware.hardware_checks(), *gpus.gpu_checks()):
        assert finding.message and (finding.level == "ok" or finding.remedy)


@pytest.mark.parametrize(
    ("governors", "driver", "expected"),
    [
        (["performance", "performance"], "acpi-cpufreq", ("ok", "2 cores performance")),
        (["performance", "powersave"], "acpi-cpufreq", ("warn", "1 cores performance, 1 cores powersave")),
        (["powersave", "powersave"], "intel_pstate", ("ok", "2 cores powersave (chosen by the processor)")),
        (["powersave", "powersave"], "amd-pstate-epp", ("ok", "2 cores powersave (chosen by the processor)")),
        (["powersave", "powersave"], "amd-pstate", ("warn", "2 cores powersave")),  # holds the lowest clock
    ],
)
def test_governor(governors: list[str], driver: str, expected: tuple[str, str], tmp_path: Path) -> None:
    for number, governor in enumerate(governors):
        write_files(tmp_path / f"cpu{number}/cpufreq", {"scaling_governor": governor, "scaling_driver": driver})
    assert seen(hardware.check_governor(tmp_path)) == expected


def test_cores_throttled_by_heat(tmp_path: Path) -> None:
    for number, count in ((0, 0), (2, 5), (10, 70)):
        counts = {"core_throttle_count": count, "package_throttle_count": 3 if count else 0}
        write_files(tmp_path / f"cpu{number}/thermal_throttle", counts)
    message = "cpu10 was throttled 70 times for heat, its package 3 times"
    assert seen(hardware.check_processor_heat(tmp_path)) == ("warn", message)
    for number, package in ((2, 4), (10, 0)):
        counts = {"core_throttle_count": 0, "package_throttle_count": package}
        write_files(tmp_path / f"cpu{number}/thermal_throttle", counts)
    message = "cpu2 was throttled 0 times for heat, its package 4 times"
    assert seen(hardware.check_processor_heat(tmp_path)) == ("warn", message)
    write_files(tmp_path / "cpu2/thermal_throttle", {"package_throttle_count": 0})
    assert seen(hardware.check_processor_heat(tmp_path)) == ("ok", "none of 3 cores was throttled")


@pytest.mark.parametrize(
    ("corrected", "uncorrected", "expected"),
    [
        (0, 0, ("ok", "none in 2 memory controllers")),
        (12, 0, ("warn", "corrected: mc1 12")),
        (12, 2, ("fail", "uncorrected: mc1 2")),
    ],
)
def test_memory_errors(corrected: int, uncorrected: int, expected: tuple[str, str], tmp_path: Path) -> None:
    write_files(tmp_path / "mc0", {"ce_count": 0, "ue_count": 0})
    write_files(tmp_path / "mc1", {"ce_count": corrected, "ue_count": uncorrected})
    assert seen(hardware.check_memory_errors(tmp_path)) == expected


def test_a_socket_without_memory(tmp_path: Path) -> None:
    for number, memory in ((0, 1000), (1, 1000)):
        write_files(tmp_path / f"node{number}", {"meminfo": f"Node {number} MemTotal:  {memory} kB", "cpulist": "0-7"})
    assert seen(hardware.check_numa(tmp_path)) == ("ok", "2 node(s)")
    write_files(tmp_path / "node1", {"meminfo": "Node 1 MemTotal:       0 kB"})
    assert seen(hardware.check_numa(tmp_path)) == ("warn", "node1: cores without memory")
    write_files(tmp_path / "node1", {"cpulist": ""})  # for example a device's memory
    assert hardware.check_numa(tmp_path).level == "ok"


def gpu_on_the_bus(root: Path, name: str, width: int, speed: str) -> None:
    write_files(root / name, {
        "vendor": "0x10de", "class": "0x030200", "current_link_width": width, "max_link_width": 16,
        "current_link_speed": speed, "max_link_speed": "32.0 GT/s PCIe",
    })  # fmt: skip


def test_a_gpu_that_has_lost_lanes_is_named(tmp_path: Path) -> None:
    write_files(tmp_path / "0000:00:01.0", {"vendor": "0x8086", "class": "0x060400", "current_link_width": 4})
    write_files(tmp_path / "0000:3b:00.1", {"vendor": "0x10de", "class": "0x040300", "current_link_width": 0})  # audio
    gpu_on_the_bus(tmp_path, "0000:3b:00.0", 16, "32.0 GT/s PCIe")
    assert seen(hardware.check_pcie(tmp_path)) == ("ok", "1 GPU(s) at full width and speed")
    gpu_on_the_bus(tmp_path, "0000:3c:00.0", 16, "2.5 GT/s PCIe")
    finding = hardware.check_pcie(tmp_path)
    assert finding.level == "ok" and "0000:3c:00.0: 2.5 GT/s PCIe of 32.0 GT/s PCIe while idle" in finding.message
    gpu_on_the_bus(tmp_path, "0000:5e:00.0", 8, "32.0 GT/s PCIe")
    assert seen(hardware.check_pcie(tmp_path)) == ("warn", "0000:5e:00.0: 8 of 16 lanes")


def port(root: Path, device: str, **changes: object) -> None:
    files = {"state": "4: ACTIVE", "rate": "400 Gb/sec (4X NDR)", "counters/link_downed": 0, "counters/symbol_error": 0}
    write_files(root / device / "ports/1", files | changes)


def test_infiniband_ports_that_are_down_slow_or_have_errors(tmp_path: Path) -> None:
    port(tmp_path, "mlx5_0")
    port(tmp_path, "mlx5_1")
    assert seen(hardware.check_infiniband(tmp_path)) == ("ok", "2 of 2 ports up at 400 Gb/sec (4X NDR)")
    port(tmp_path, "mlx5_1", **{"counters/link_downed": 3})
    finding = hardware.check_infiniband(tmp_path)
    assert finding.level == "warn" and finding.message.endswith("; mlx5_1/1: link_downed 3")
    port(tmp_path, "mlx5_1", rate="100 Gb/sec (1X NDR)")
    finding = hardware.check_infiniband(tmp_path)
    assert finding.level == "warn" and "100 Gb/sec (1X NDR), 400 Gb/sec" in finding.message
    port(tmp_path, "mlx5_1", state="1: DOWN")
    finding = hardware.check_infiniband(tmp_path)
    assert (finding.level, finding.message.split("; ")[1]) == ("warn", "mlx5_1/1 is DOWN")
    port(tmp_path, "mlx5_0", state="2: INIT")
    assert hardware.check_infiniband(tmp_path).level == "fail"


@pytest.mark.parametrize(
    ("number", "level"),
    [(79, "fail"), (48, "fail"), (94, "fail"), (149, "fail"), (31, "warn"), (63, "warn")],
)
def test_gpu_errors_in_the_kernel_log(number: int, level: str) -> None:
    line = f"3,1044,88,-;NVRM: Xid (PCI:0000:3b:00): {number}, pid=1234, GPU has fallen off the bus.\n"
    assert seen(hardware.check_kernel_log("6,1,2,-;usb 1-1\n")) == ("ok", "no Xid in the kernel's log")
    assert seen(hardware.check_kernel_log(2 * line)) == (level, f"Xid {number} of 0000:3b:00, 2 times")


def test_the_kernel_log_is_read_without_waiting_for_more(tmp_path: Path) -> None:
    log = tmp_path / "log"
    os.mkfifo(log)
    writer = os.open(log, os.O_RDWR)
    os.write(writer, b"NVRM: Xid (PCI:0000:3b:00): 79, x\n")
    assert "Xid 79" in hardware.check_kernel_log(hardware.read_kernel_log(log)).message
    os.close(writer)


HEALTHY = GpuFacts(
    name="NVIDIA H200 0", uuid="GPU-1", uncorrected=0, corrected=0, remapped_rows=(0, 0, False, False), slowed=0x1,
    power_limit=700.0, default_power_limit=700.0, temperature=31, nvlinks=(True,) * 18,
)  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "level", "words"),
    [
        ({}, "ok", "NVIDIA H200 0 (GPU-1), 31 °C, at most 700 W"),
        ({"slowed": 0x4}, "ok", "700 W"),  # at its power limit under load
        ({"uncorrected": 2}, "fail", "2 uncorrected memory errors"),
        ({"corrected": 9}, "warn", "9 corrected memory errors"),
        ({"remapped_rows": (0, 1, True, False)}, "warn", "replaced at the next reset"),
        ({"remapped_rows": (0, 3, False, False)}, "warn", "3 memory rows were replaced"),
        ({"remapped_rows": (0, 3, False, True)}, "fail", "a faulty memory row cannot be replaced"),
        ({"slowed": 0x20, "temperature": 88}, "fail", "slowed down (heat) at 88 °C"),
        ({"power_limit": 450.0}, "warn", "power limit 450 W, default 700 W"),
        ({"nvlinks": (True, False, True)}, "fail", "3 NVLinks, down: 1"),
        ({"nvlinks": (False, False)}, "fail", "2 NVLinks, down: 0, 1"),
        ({"nvlinks": (False, False), "name": "NVIDIA A100 80GB PCIe"}, "warn", "2 NVLinks, all down"),
        ({"nvlinks": (True, False), "name": "NVIDIA A100 80GB PCIe"}, "fail", "2 NVLinks, down: 1"),
        ({"nvlinks": ()}, "ok", "700 W"),
        ({"corrected": 9, "uncorrected": 2}, "fail", "2 uncorrected memory errors; 9 corrected memory errors"),
        (dict.fromkeys(("uncorrected", "corrected", "remapped_rows", "slowed", "power_limit", "default_power_limit",
                        "temperature")), "ok", "NVIDIA H200 0 (GPU-1)"),
    ],
)  # fmt: skip
def test_health_of_a_gpu(changes: dict[str, Any], level: str, words: str) -> None:
    finding = check_gpu(replace(HEALTHY, **changes))
    assert finding.level == level and finding.message.endswith(words)
    assert bool(finding.remedy) == (level != "ok")


class NvmlError(Exception):
    def __init__(self, message: str, value: int = 3) -> None:  # 3: not supported
        super().__init__(message)
        self.value = value


def mocked_nvml(**changes: Any) -> SimpleNamespace:
    """Mock the module pynvml with one GPU of three NVLinks."""

    def refuse(*_: Any) -> None:
        raise NvmlError("Not Supported")

    def link_state(handle: object, link: int) -> int:
        if link > 2:
            raise NvmlError("Invalid Argument")
        return int(link != 1)

    given = {
        "NVMLError": NvmlError, "NVML_VOLATILE_ECC": 0, "NVML_MEMORY_ERROR_TYPE_CORRECTED": 0,
        "NVML_MEMORY_ERROR_TYPE_UNCORRECTED": 1, "NVML_NVLINK_MAX_LINKS": 36, "NVML_TEMPERATURE_GPU": 0,
        "nvmlInit": lambda: None, "nvmlShutdown": lambda: None, "nvmlDeviceGetCount": lambda: 1,
        "nvmlDeviceGetHandleByIndex": lambda number: number, "nvmlDeviceGetName": lambda handle: "NVIDIA H200",
        "nvmlDeviceGetUUID": lambda handle: "GPU-1",
        "nvmlDeviceGetTotalEccErrors": lambda handle, kind, counter: 7 if kind else 1,
        "nvmlDeviceGetRemappedRows": lambda handle: [1, 2, 0, 1],
        "nvmlDeviceGetCurrentClocksEventReasons": lambda handle: 0x40,
        "nvmlDeviceGetPowerManagementLimit": lambda handle: 450_000, "nvmlDeviceGetPowerManagementDefaultLimit": refuse,
        "nvmlDeviceGetTemperature": lambda handle, sensor: 40, "nvmlDeviceGetNvLinkState": link_state,
    }  # fmt: skip
    return SimpleNamespace(**given | changes)


def test_values_that_nvml_does_not_support_are_omitted() -> None:
    expected = GpuFacts(
        "NVIDIA H200 0", "GPU-1", uncorrected=7, corrected=1, remapped_rows=(1, 2, False, True), slowed=0x40,
        power_limit=450.0, default_power_limit=None, temperature=40, nvlinks=(True, False, True),
    )  # fmt: skip
    assert read_gpus(mocked_nvml()) == [expected]


@pytest.mark.parametrize("call", ["nvmlDeviceGetHandleByIndex", "nvmlDeviceGetRemappedRows"])
def test_a_lost_gpu_fails_and_the_others_are_still_checked(call: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def answer(number: int) -> Any:
        if number == 1:
            raise NvmlError("GPU is lost", 15)
        return number if call == "nvmlDeviceGetHandleByIndex" else [0, 0, 0, 0]

    monkeypatch.setitem(sys.modules, "pynvml", mocked_nvml(**{"nvmlDeviceGetCount": lambda: 3, call: answer}))
    first, lost, last = gpu_checks()
    assert (lost.level, lost.message) == ("fail", "GPU 1: GPU is lost")
    assert "H200 0" in first.message and "H200 2" in last.message


def test_a_missing_driver_is_reported() -> None:
    def absent() -> None:
        raise NvmlError("NVML Shared Library Not Found")

    assert read_gpus(mocked_nvml(nvmlInit=absent)) == "NVML Shared Library Not Found"


def test_pynvml_has_every_mocked_name() -> None:
    pynvml = pytest.importorskip("pynvml", reason='needs pip install ".[nvml]"')
    assert not [name for name in vars(mocked_nvml()) if not hasattr(pynvml, name)]
