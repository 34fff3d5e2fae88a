"""tools.doctor: finds simulated faults, names the node and the remedy, and passes a healthy machine."""

import itertools
import json
import os
import re
import socket
import subprocess
import sys
import tomllib
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
from PIL import Image

from tests.conftest import CIFAR100, ROOT
from tests.processes import make_command, run_job
from tools.doctor import __main__ as doctor
from tools.doctor import hardware, machine, measured
from tools.doctor.findings import LEVELS, Finding, Record, compare_fingerprints, compare_records, render
from utils.config import Config, load_config
from utils.distributed.world import World
from utils.errors import ConfigError


@pytest.fixture(autouse=True)
def _train_only_twice(monkeypatch):
    monkeypatch.setattr(measured, "SECONDS", 0)


def run_doctor(capsys, *arguments):
    """Return the exit status and {check: finding}."""
    status, printed = doctor.main(["--json", *arguments]), capsys.readouterr()
    assert re.search(rf"^{LEVELS[status]}: \d+ ok", printed.err, re.MULTILINE), "the lines, for people"
    return status, {entry["check"]: Finding(**entry) for entry in json.loads(printed.out)["findings"]}


def test_a_healthy_machine_passes(capsys, tmp_path, monkeypatch):
    for finding in (*hardware.hardware_checks(), *hardware.gpu_checks()):
        assert finding.message and (finding.level == "ok" or finding.remedy)
    monkeypatch.setattr(hardware, "hardware_checks", list)  # depend on the machine
    monkeypatch.setattr(hardware, "gpu_checks", list)
    status, found = run_doctor(capsys, "--config", "quickstart", "--run-dir", str(tmp_path / "expts/not/yet/there"))
    assert status == max(LEVELS.index(finding.level) for finding in found.values()) < 2, found
    checks = "torch, gpu software, memory, disk, data, host names, dcgm, limits, fingerprint"
    assert list(found) == checks.split(", ")
    assert not list(tmp_path.iterdir()), "the disk check leaves nothing behind"


def test_missing_data_fails_with_the_command_that_downloads_it(tmp_path):
    finding = machine.check_data(load_config(CIFAR100, "bs128", [f"data_path={tmp_path}"]))
    fetch = f"python -m tools.prepare_data --dataset cifar100 --data_path {tmp_path} (without"
    assert finding.remedy.startswith(fetch)
    assert (finding.level, finding.message) == ("fail", f"CIFAR-100 is not in {tmp_path}")
    config = load_config(CIFAR100, "default", ["dataset=imagefolder", f"data_path={tmp_path}"])
    assert "data_path=DIR" in machine.check_data(config).remedy
    for split in ("train", "val"):
        (tmp_path / split / "ant").mkdir(parents=True)
        Image.new("RGB", (40, 50)).save(tmp_path / split / "ant/0.png")
    assert machine.check_data(config) == Finding("data", "ok", "imagefolder: 1 + 1 images")


def test_host_name_that_does_not_resolve_fails():
    def resolve(name):
        if name == "gpu03":
            raise socket.gaierror(-2, "Name or service not known")

    good = machine.check_names({"MASTER_ADDR": "head"}, resolve)
    assert (good.level, good.message) == ("ok", f"{socket.gethostname()}, head resolve")
    bad = machine.check_names({"SLURM_JOB_NODELIST": "gpu[03-05]"}, resolve)
    assert bad.level == "fail" and bad.message.startswith("gpu03 does not resolve") and "MASTER_ADDR" in bad.remedy


def test_torch_and_driver_must_match(monkeypatch, tmp_path):
    check = machine.check_gpu_software
    assert check("13.0", False, None, False).level == "ok", "a CPU machine"
    assert check("13.0", True, "580.65.06", True).message == "driver 580.65.06, CUDA 13.0"
    for built_for, driver, wanted in (("13.0", "580", False), (None, "580", False), ("13.0", None, True)):
        assert check(built_for, False, driver, wanted).level == "fail"
    for installed, level in (("2.10.0a0+cu130", "fail"), ("2.11.0", "ok")):
        monkeypatch.setattr(torch, "__version__", installed)
        assert machine.check_installed_torch().level == level
    monkeypatch.setattr(machine.shutil, "which", {"nvidia-smi": "/bin/nvidia-smi"}.get)
    version = tmp_path / "version"
    for kind in ("Kernel Module ", "Open Kernel Module for x86_64 "):
        version.write_text(f"NVRM version: NVIDIA UNIX x86_64 {kind} 580.65.06  Tue Aug 5\nGCC 12.3\n")
        assert machine.driver_version(version) == "580.65.06"


def test_memory_for_each_rank_and_a_full_unwritable_or_slow_disk(tmp_path, monkeypatch):
    assert machine.check_disk(tmp_path, needed=2**62).level == "fail"
    unwritable = machine.check_disk(Path("/proc/not/there"))
    assert unwritable.level == "fail" and "/proc: cannot be written" in unwritable.message
    monkeypatch.setattr(machine, "time", clock := SimpleNamespace(now=0.0, perf_counter=lambda: clock.now))
    for seconds, level in ((1.3, "ok"), (1.4, "warn")):  # then 2^26 bytes are on the disk
        monkeypatch.setattr(os, "fsync", lambda _, seconds=seconds: vars(clock).update(now=clock.now + seconds))
        assert machine.check_disk(tmp_path).level == level
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/meminfo").write_text("MemTotal: 100 kB\nMemAvailable:   15700000 kB\n")
    assert [machine.check_memory(tmp_path, ranks).level for ranks in (8, 9)] == ["ok", "warn"]
    monkeypatch.setattr(machine, "memory_limit", lambda root: 1e9)  # the container's limit is smaller
    assert machine.check_memory(tmp_path, 1).message == "1.0 GB available for 1 rank(s)"


def at(folder, files):
    return {f"{folder}/{name}": content for name, content in files.items()}


COUNTED = {"mc0/ce_count": 0, "mc1/ce_count": 12, "mc1/ue_count": 0}
GPU = {"vendor": "0x10de", "class": "0x030200", "max_link_width": 16, "current_link_width": 16}
SOUND = GPU | {"class": "0x040300", "current_link_width": 0}
BUS = at("3b:00.0", GPU) | at("3b:00.1", SOUND) | at("3c:00.0", GPU | {"vendor": "0x8086"})
UP = {"state": "4: ACTIVE", "rate": "400 Gb/sec (4X NDR)", "counters/link_downed": 0}
PORTS = at("mlx5_0/ports/1", UP) | at("mlx5_1/ports/1", UP)


@pytest.mark.parametrize(("check", "files", "level", "words"), [
    ("memory_errors", {}, "ok", "not readable here"), ("memory_errors", COUNTED | {"mc1/ce_count": 0}, "ok", ""),
    ("memory_errors", COUNTED, "warn", ""), ("memory_errors", COUNTED | {"mc1/ue_count": 2}, "fail", ""),
    ("pcie", BUS, "ok", "1 NVIDIA GPU(s) at full width"),
    ("pcie", BUS | at("5e:00.0", GPU | {"current_link_width": 8}), "warn", "5e:00.0: 8 of 16 lanes"),
    ("infiniband", PORTS, "ok", "2 of 2 ports up; 400 Gb/sec (4X NDR)"),
    ("infiniband", {"another": 1}, "ok", "0 of 0 ports up"),
    *(("infiniband", PORTS | {f"mlx5_1/ports/1/counters/{error}": 3}, "warn", f"mlx5_1/1: {error} 3")
      for error in ("link_downed", "link_error_recovery", "symbol_error", "port_rcv_errors")),
    ("infiniband", PORTS | {"mlx5_1/ports/1/rate": "100 Gb/sec (1X NDR)"}, "warn",
     "100 Gb/sec (1X NDR); 400 Gb/sec (4X NDR)"),
    ("infiniband", PORTS | {"mlx5_1/ports/1/state": "1: DOWN"}, "warn",
     "1 of 2 ports up; 400 Gb/sec (4X NDR); mlx5_1/1 is 1: DOWN"),
    ("infiniband", PORTS | {f"mlx5_{n}/ports/1/state": "2: INIT" for n in (0, 1)}, "fail", "0 of 2 ports up"),
])  # fmt: skip
def test_what_the_kernel_counts(check, files, level, words, tmp_path):
    for name, content in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(f"{content}\n")
    finding = getattr(hardware, f"check_{check}")(tmp_path)
    assert finding.level == level and words in finding.message
    assert ("not readable here" in finding.message) == (not files)


@pytest.mark.parametrize(("action", "level", "message"), [
    ("echo 'usb 1-1'", "ok", "no Xid in the kernel's log"),
    ("echo 'dmesg: not permitted' >&2; exit 1", "ok", "not readable here: the kernel's log"),
    *((f"echo 'NVRM: Xid (PCI:0000:3b:00): {xid}, pid=1'", "fail", f"Xid {xid} of 0000:3b:00, 1 times")
      for xid in (46, 48, 62, 64, 74, 79, 92, 94, 95, 109, 110, 119, 120, 136, 140, 143, *range(144, 151), 158)),
    ("echo 'NVRM: Xid (PCI:0000:3b:00): 31, pid=1'", "warn", "Xid 31 of 0000:3b:00, 1 times")])  # fmt: skip
def test_gpu_errors_in_the_kernel_log(action, level, message, tmp_path, monkeypatch):
    make_command(tmp_path, "dmesg", action)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    finding = hardware.check_kernel_log()
    assert finding.level == level and finding.message.startswith(message)


class NvmlError(Exception):
    def __init__(self, message, value=3):  # 3: not supported
        super().__init__(message)
        self.value = value


def answer(value):
    """A function of NVML that answers, or raises an error."""
    return Mock(side_effect=value) if isinstance(value, Exception) else lambda *_: value


def mocked_nvml(links=(1, 1), corrected=0, uncorrected=0, **changes):
    """The module pynvml with one healthy GPU. Values that an older GPU does not report are errors in `changes`."""
    answers = {
        "Name": "NVIDIA H200", "UUID": "GPU-1", "RemappedRows": (0, 0, 0, 0), "CurrentClocksEventReasons": 0x117,
        "PowerManagementLimit": 700_000, "PowerManagementDefaultLimit": 700_000, "Temperature": 31, "Count": 1,
    }  # fmt: skip
    no_link = answer(NvmlError("Invalid Argument"))
    return SimpleNamespace(
        NVMLError=NvmlError, NVML_VOLATILE_ECC=0, NVML_MEMORY_ERROR_TYPE_CORRECTED=0, NVML_NVLINK_MAX_LINKS=18,
        NVML_MEMORY_ERROR_TYPE_UNCORRECTED=1, NVML_TEMPERATURE_GPU=0, nvmlInit=answer(None),
        nvmlDeviceGetHandleByIndex=lambda number: number,
        nvmlDeviceGetTotalEccErrors=lambda handle, kind, counter: (corrected, uncorrected)[kind],
        nvmlDeviceGetNvLinkState=lambda handle, link: links[link] if link < len(links) else no_link(),
        **{f"nvmlDeviceGet{name}": answer(value) for name, value in (answers | changes).items()})  # fmt: skip


NOT_SUPPORTED = ("Temperature", "RemappedRows", "PowerManagementLimit", "CurrentClocksEventReasons")


@pytest.mark.parametrize(("changes", "level", "words"), [
    ({}, "ok", "NVIDIA H200 0 (GPU-1), 31 °C"),
    (dict.fromkeys(NOT_SUPPORTED, NvmlError("Not Supported")), "ok", "NVIDIA H200 0 (GPU-1), None °C"),
    ({"uncorrected": 2}, "fail", "2 uncorrected memory errors"),
    ({"corrected": 9}, "warn", "9 corrected memory errors"),
    ({"RemappedRows": (0, 1, 1, 0)}, "warn", "replaced at the next reset"),
    ({"RemappedRows": (0, 3, 0, 0)}, "warn", "3 memory rows were replaced"),
    ({"RemappedRows": (0, 3, 0, 1)}, "fail", "a faulty memory row cannot be replaced"),
    ({"CurrentClocksEventReasons": 0xEC}, "fail", "hardware slowdown, heat, heat, by the hardware, power brake"),
    ({"PowerManagementLimit": 450_000}, "warn", "power limit 450 W, default 700 W"),
    ({"links": (1, 0, 1), "Name": "NVIDIA H100 NVL"}, "fail", "of 3 NVLinks down: 1"),
    ({"links": (0, 0)}, "fail", "of 2 NVLinks down: 0, 1"),
    ({"links": (0, 0), "Name": "NVIDIA A100 80GB PCIe"}, "warn", "of 2 NVLinks down: 0, 1"),
    *(({"RemappedRows": NvmlError("GPU is lost", n)}, "fail", "GPU 0: GPU is lost") for n in (8, 11, 15, 16)),
])  # fmt: skip
def test_health_of_a_gpu(changes, level, words):
    (finding,) = hardware.check_gpu(mocked_nvml(**changes), 0)
    assert finding.level == level and finding.message.endswith(words)
    assert bool(finding.remedy) == (level != "ok")


def test_all_gpus_are_checked_and_a_missing_driver_is_reported(monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", mocked_nvml(Count=2, corrected=1, uncorrected=1))
    assert [finding.level for finding in hardware.gpu_checks()] == ["fail", "warn"] * 2
    absent = mocked_nvml()
    absent.nvmlInit = answer(NvmlError("NVML Shared Library Not Found"))
    monkeypatch.setitem(sys.modules, "pynvml", absent)
    assert hardware.gpu_checks() == [Finding("gpu health", "ok", "not readable here: NVML Shared Library Not Found")]


def test_pynvml_has_every_mocked_name():
    pynvml = pytest.importorskip("pynvml", reason='needs pip install ".[nvml]"')
    assert not [name for name in vars(mocked_nvml()) if not hasattr(pynvml, name)]


PERSISTENCE = "| Persistence Mode | Fail |\n| Warning  | Persistence mode for GPU 0 is off  |"
DENIED = f"| Denylist | Pass |\n{PERSISTENCE}\n| Memory  | Fail - GPU: 3  |"
QUOTED = "; Persistence Mode Fail; Memory Fail - GPU: 3; Warning Persistence mode for GPU 0 is off"


@pytest.mark.parametrize(("action", "arguments", "level", "message"), [
    ("echo '| Denylist | Pass |'; echo '| EUD Test | Skip - All |'; exit 7", (1, 8, 8), "ok", "dcgmi diag -r 1"),
    (f"printf '%s' '{DENIED}'; exit 7", (1, 8, 8), "fail", f"dcgmi diag -r 1{QUOTED}"),
    ("echo '| Denylist | Pass |'; echo '| Warning | low |'", (1, 8, 8), "warn", "dcgmi diag -r 1; Warning low"),
    ("echo Error: no connection; exit 7", (1, 8, 8), "warn", "dcgmi diag -r 1: no result, status 7 (124: time limit)"),
    ("sleep 20", (2, 8, 8), "warn", "dcgmi diag -r 2: no result, status 124 (124: time limit)"),
    ("", (0, 8, 8), "ok", "not run: --dcgm 0"),
    ("", (1, 2, 8), "ok", "not run: it tests all 8 GPUs of the node, of which this job may use 2"),
    (None, (2, 8, 8), "ok", "not run: no dcgmi on PATH")])  # fmt: skip
def test_failed_tests_of_dcgm_are_quoted(action, arguments, level, message, tmp_path, monkeypatch):
    if action is not None:
        make_command(tmp_path, "dcgmi", action)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    assert max(hardware.DCGM_SECONDS.values()) < Config().rank_timeout_seconds, "the other ranks wait"
    monkeypatch.setattr(hardware, "DCGM_SECONDS", {1: 100, 2: 0.2})
    finding = hardware.check_dcgm(*arguments)
    assert (finding.level, finding.message) == (level, message)


def test_a_single_process_checks_all_gpus_of_its_node(tiny, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (6.3e10 if device.index == 1 else 6.5e10, 8e10))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "GPU")
    rates = {0: 600.0, 1: 100.0}

    def measure(world, *_):
        other = {"memory, GB/s": SimpleNamespace(median=2.0), "host to device, GB/s": SimpleNamespace(median=1.0)}
        return other | {"product bf16, TFLOP/s": SimpleNamespace(values=[rates[world.device.index], 50.0])}

    monkeypatch.setattr(measured, "measure_limits", measure)
    monkeypatch.setattr(measured, "check_device", lambda device: Finding("fingerprint", "ok", "GPU: a"))
    monkeypatch.setattr(hardware, "check_dcgm", lambda _, usable, __: Finding("dcgm", "ok", "", figures={"": usable}))
    monkeypatch.setenv("SLURMD_NODENAME", "node7")
    options, world = doctor.parser().parse_args([]), World(0, 0, 1, torch.device("cuda", 0))
    found = doctor.examine(options, tiny(), world)
    figures = [(one.where, one.level, *one.figures.values()) for one in found if one.check in ("dcgm", "limits")]
    limits = ("node7, cuda:0", "ok", 600, 2, 1), ("node7, cuda:1", "warn", 100, 2, 1)  # 1: memory in use
    assert figures == [("node7", "ok", 2), *limits], "DCGM may test both GPUs"
    (slow,) = [finding for finding in found if finding.check == "comparison"]
    assert (slow.level, slow.where) == ("fail", "node7, cuda:1")
    assert slow.message == "limits, bf16 TFLOP/s 100, 17% of the median 600"
    assert {finding.where for finding in found if finding.check in ("disk", "pcie", "gpu health")} == {"node7"}
    options.burn_in = 1.0
    with pytest.raises(ConfigError, match="start it with torchrun --nproc_per_node=2 -m"):
        doctor.examine(options, tiny(), world)


@pytest.mark.parametrize(("kind", "rate", "level"), [("cuda", 1.8, "ok"), ("cuda", 1.6, "warn"), ("cpu", 1.6, "ok")])
def test_a_slow_all_reduce_warns(kind, rate, level, monkeypatch):
    found = {measured.ALL_REDUCE: SimpleNamespace(median=rate)}
    monkeypatch.setattr(measured, "measure_limits", lambda *_: found)  # bus: 1.75 times the rate
    finding = measured.check_all_reduce(World(0, 0, 8, torch.device(kind)))
    assert (finding.level, finding.figures) == (level, {"GB/s": rate})
    assert finding.message.endswith(f" {rate:.2f} GB/s, bus bandwidth {1.75 * rate:.2f} GB/s")


def record(node, *rates, findings=(), device="H200", software=("torch", "2.14.1")):
    places = [(f"{node}, cuda:{number}", {"bf16 TFLOP/s": rate}) for number, rate in enumerate(rates)]
    limits = [Finding("limits", "ok", "", where=where, figures=figures) for where, figures in places]
    return Record(device=device, software=dict([software]), findings=[*limits, *findings])


def test_the_slow_node_is_named_with_its_value_and_one_with_fewer_devices():
    good = [record("a", 700.0, 705.0), record("b", 710.0, 708.0)]
    fine = Finding("comparison", "ok", "limits, bf16 TFLOP/s 700 to 710, the median 708, over 4")
    assert compare_records(good, good, "the median") == [fine]
    two = [record("a", *8 * [700.0]), record("b", *7 * [580.0], 690.0)]
    slow = compare_records(two, two, "the median")
    assert [finding.where for finding in slow] == [f"b, cuda:{number}" for number in range(7)]
    assert slow[0].level == "fail" and slow[0].message == "limits, bf16 TFLOP/s 580, 83% of the median 700"
    seven, eight = record("b", *7 * [700.0]), record("a", *8 * [700.0])
    lost = compare_records([seven, eight], [seven, eight], "the median")[-1]
    assert (lost.level, lost.message, lost.where) == ("fail", "7 of 8 devices", "b")
    assert compare_records([seven], [eight], "the baseline")[-1].level == "fail"
    assert compare_records([eight], [seven], "the baseline")[-1].level == "ok"


def test_a_rank_with_different_results_is_named_and_one_with_different_software_also_refused():
    same = {"torch": "2.14.1", "driver": "580"}
    assert [one.level for one in measured.check_versions([("a", same), ("b", same)])] == ["ok"]
    (finding,) = measured.check_versions([("a", same), ("b", same), ("c", same | {"driver": "570"})])
    assert (finding.level, finding.where) == ("fail", "c") and "driver 570; most ranks: " in finding.message

    def trained(where, fingerprint, kind="H200, torch 2"):
        return Finding("fingerprint", "ok", f"{kind}: {fingerprint}", where=where)

    alike = [trained("n, cuda:0", "a"), trained("n, cuda:1", "a"), trained("n", "c", kind="CPU")]
    assert compare_fingerprints(alike) == []
    (outlier,) = compare_fingerprints([*alike, trained("n, cuda:2", "b")])
    assert (outlier.level, outlier.where) == ("fail", "n, cuda:2")
    now, before = (record("n", findings=[trained("n", fingerprint)]) for fingerprint in "ab")
    assert [finding.where for finding in compare_records([now], [before], "the baseline")] == ["n", "n"]
    other = record("m", findings=[trained("m", "b")])  # only this node is judged, not the baseline's
    assert {finding.where for finding in compare_records([now], [other], "the baseline")} == {"n"}
    cases = {"device A100 and H200": {"device": "A100"}, "torch 2.11.0 and 2.14.1": {"software": ("torch", "2.11.0")}}
    for message, changes in cases.items():
        both = [record("a", 1.0), record("b", 1.0, **changes)]
        with pytest.raises(ConfigError, match=f"the records of b and a cannot be compared: {message}"):
            compare_records(both, both, "the median")


@pytest.mark.parametrize("content", ['{"device": "H200", "software": {}}', '{"worst": "ok", "findings": 3}', None])
def test_a_missing_damaged_or_single_record_is_an_error_in_one_line(content, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("utils.program.INSTALLED", True)  # a message names the command as this user types it
    option = "--baseline" if content is None else "--compare"
    if content is not None:
        (tmp_path / "a.json").write_text(content)
    assert doctor.main([option, str(tmp_path / "a.json")]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert str(tmp_path / "a.json") in line
    assert ("resnet50-at-scale doctor --json" in line) == ("H200" not in str(content))  # which is whole, but one


def test_a_figure_15_percent_below_the_baseline_fails(tmp_path, monkeypatch, capsys):
    baseline, printed = tmp_path / "baseline.json", ""
    compare = f"--baseline={baseline}"
    for rate, status, option in ((1.0, 0, "--json"), (0.88, 0, compare), (0.86, 2, compare)):
        monkeypatch.setattr(doctor, "examine", lambda *_, rate=rate: record("a", rate).findings)
        assert doctor.main(["--config=quickstart", option]) == status
        printed = capsys.readouterr().out
        if option == "--json":
            baseline.write_text(printed)
    assert "0.86, 86% of the baseline 1" in printed


@pytest.mark.parametrize(("level", "status"), [("ok", 0), ("warn", 1), ("fail", 2)])
def test_exit_status_and_last_line_give_the_worst_level(level, status, capsys, monkeypatch, tmp_path):
    found = [Finding("pcie", level, "x", "look", "n"), Finding("a", "ok", "")]
    monkeypatch.setattr(doctor, "examine", lambda *_: found)
    assert doctor.main(["--set=device=cuda", f"--failing-nodes={tmp_path}/failing"]) == status
    assert (tmp_path / "failing").read_text() == ("n\n" if level == "fail" else "\n")
    assert re.match(rf"{level}: \d ok, \d warn, \d fail$", capsys.readouterr().out.splitlines()[-1])
    assert run_doctor(capsys)[0] == status


def test_output_merges_equal_findings_names_places_and_counts_what_did_not_run():
    findings = [Finding("disk", "ok", "fine", where=where) for where in "ab"]
    findings += [Finding("data", "fail", "missing", "fetch it", where) for where in ("a", "b, rank 3")]
    assert render([*findings, Finding("dcgm", "ok", "not run: no dcgmi on PATH")]) == [
        "ok    disk           fine  [2 alike]",
        "fail  data           missing  [a; b rank 3]",
        "                     -> fetch it",
        "ok    dcgm           not run: no dcgmi on PATH",
        "fail: 1 ok, 0 warn, 1 fail, 1 not run",
    ]
    assert render([Finding("limits", "ok", "slow", where="a, rank 1")])[0].endswith("slow  [rank 1]")


def test_the_names_of_failing_nodes_are_written_for_srun(tmp_path, capsys):
    bad = [Finding("pcie", "fail", "x4", "look", where) for where in ("c, rank 1", "b")]
    own = [Finding("comparison", "fail", "TFLOP/s 5, 50% of the median 10", "look", "a, rank 1")]  # within its record
    written, records = tmp_path / "failing", [str(tmp_path / name) for name in "ab"]
    Path(records[0]).write_text(record("a", findings=own).model_dump_json())
    for findings, status, names, place in (([], 0, "", ""), (bad, 2, "b,c", "c rank 1; b"), (bad[1:], 2, "b", "b")):
        Path(records[1]).write_text(record("b", findings=findings * 2).model_dump_json())
        assert doctor.main(["--compare", *records, "--failing-nodes", str(written)]) == status
        assert written.read_text() == f"{names}\n" and (f"x4  [{place}]" in capsys.readouterr().out) == bool(place)
    Path(records[0]).write_text(record("a", 1.0, findings=record("c", 0.8).findings).model_dump_json())
    assert doctor.main(["--compare", records[0], "--failing-nodes", str(written)]) == 2 and written.read_text() == "c\n"
    assert doctor.main(["--failing-nodes", str(tmp_path / "absent/file")]) == 2
    assert "--failing-nodes" in capsys.readouterr().err


def test_nodes_starts_one_process_per_node_with_srun(tmp_path, monkeypatch, capfd):
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    assert doctor.main(["--nodes"]) == 2 and "not in a Slurm allocation" in capfd.readouterr().err
    make_command(tmp_path, "srun", 'echo "$@"\nexit 1')
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setenv("SLURM_JOB_ID", "17")
    monkeypatch.setenv("SLURM_JOB_NUM_NODES", "2")
    assert doctor.main(["--nodes", "--config", "bs128", "--failing-nodes=f"]) == 1
    command = f"--ntasks=2 --ntasks-per-node=1 {sys.executable} -m tools.doctor --config bs128 --failing-nodes=f"
    assert capfd.readouterr().out.strip() == command


def check_with_a_slow_rank(folder):
    """Check as a rank of which the second is slow; its other measurements are its own."""
    os.environ["SLURMD_NODENAME"] = "other" if os.environ["RANK"] == "2" else "node"
    measure, rate = measured.measure_limits, 0.4 if os.environ["RANK"] == "1" else 1.0
    measured.measure_limits = lambda *a: measure(*a) | {"product float32, TFLOP/s": SimpleNamespace(values=[rate])}
    return doctor.main(["--config", "quickstart", "--set", "device=cpu", "--run-dir", folder])


def test_of_several_ranks_the_slow_one_is_named(tmp_path):
    first, *others = run_job(tmp_path / "job", 3, check_with_a_slow_rank, str(tmp_path))
    assert re.search(r"^fail  comparison .* 0\.4, 40% of the median 1  \[node rank 1\]$", first.output, re.MULTILINE)
    words = "\nok    versions", "\nok    all-reduce", "GB available for 2 rank(s)  [node]"
    assert all(word in first.output for word in words)
    assert first.output.splitlines()[-1].startswith("fail:") and [rank.status for rank in others] == [2, 2]


def test_help_imports_no_torch_and_bad_usage_exits_with_2(capsys):
    code = "import sys, tools.doctor.__main__ as tool, tools.timeline; tool.parser(); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == 0
    assert doctor.main(["--config", "nothing"]) == 2
    assert not capsys.readouterr().out, "no report, so no node is drained"


def test_fingerprints_repeat_leave_global_state_unchanged_and_find_a_flipped_bit(monkeypatch):
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", True)  # a run in this process may have set it
    random, threads = torch.get_rng_state(), torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        finding, after = measured.check_device(torch.device("cpu")), torch.get_num_threads()
    finally:
        torch.set_num_threads(threads)
    assert finding.level == "ok" and re.search(": [0-9a-f]{16}$", finding.message) and after == 2
    assert (measured.STEPS, measured.IMAGES, measured.SIDE, measured.CLASSES) == (12, 32, 16, 10), "as in older records"
    assert torch.equal(torch.get_rng_state(), random)
    assert not torch.are_deterministic_algorithms_enabled() and torch.backends.cudnn.allow_tf32
    really, calls = measured.fingerprint, itertools.count(1)
    monkeypatch.setattr(measured, "fingerprint", lambda tensor: really(tensor) + (next(calls) == 5))
    finding = measured.check_device(torch.device("cpu"))
    assert finding.level == "fail" and "1 of 2 differ" in finding.message


@pytest.mark.parametrize(("rates", "prints", "level", "words"), [
    ([101, 100, 99, 100], "aaaa", "ok", "10.0 min, 4 rounds: 100.0 images/s, standard deviation 0.7%, -1.0% from "
     "the first quarter to the last; 4 equal fingerprints; at most 71 °C; at most 700 W; at least 1797 MHz"),
    ([100] * 6 + [88] * 4, "a" * 10, "warn", "-12.0% from the first quarter to the last"),
    ([100] * 6 + [91] * 4, "a" * 10, "ok", "-9.0% from"), ([100] * 4, "aaba", "fail", "1 of 4 fingerprints differ"),
])  # fmt: skip
def test_burn_in_fails_on_a_changed_fingerprint_and_warns_on_a_falling_rate(rates, prints, level, words):
    most = {"gpu_temperature_c": 71.4, "gpu_clock_mhz": 1800.0, "gpu_power_w": 700.0}
    readings = [{name: value - i for name, value in most.items()} for i in range(len(rates))]
    finding = measured.judge_rounds(10, rates, prints, readings)
    assert finding.level == level and words in finding.message and finding.figures == {"images/s": 100.0}


def test_a_short_burn_in_on_this_machine(tiny, one_rank, monkeypatch):
    monkeypatch.setattr(measured, "ROUND_SECONDS", 0.1)
    monkeypatch.setattr(measured, "time_action", lambda _, action: action() or 0.05)
    monkeypatch.setattr(measured, "time", Mock(monotonic=itertools.count(0, 20).__next__))
    monkeypatch.setattr(World, "broadcast", asked := Mock(side_effect=lambda value: value))
    finding = measured.burn_in(tiny(), one_rank, 1)
    assert finding.figures == {"images/s": 2 * 32 / 0.05} and finding.message.startswith("1.3 min, 4 rounds")
    assert finding.level == "ok" and "4 equal fingerprints" in finding.message
    assert asked.call_args.args == (False,), "the ranks end together"


def test_container_recipes_install_what_the_project_needs(monkeypatch, capsys):
    docker, apptainer = ((ROOT / "deploy" / name).read_text() for name in ("Dockerfile", "apptainer.def"))
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    monkeypatch.chdir(ROOT)
    exec(*re.findall(r"python -c '([^']*)' >requirements.txt", apptainer.replace("\\\n", "")))
    packages = [*project["dependencies"], *project["optional-dependencies"]["report"]]
    assert capsys.readouterr().out.splitlines() == packages and 'pip install --no-cache-dir ".[report]"' in docker


@pytest.mark.slow
def test_container_recipes_check_torch_and_take_no_data_runs_or_history(tmp_path):
    minimum = ".".join(map(str, machine.MINIMUM_TORCH))
    recipes = [(ROOT / name).read_text() for name in ("deploy/Dockerfile", "deploy/apptainer.def")]
    assert len({base for recipe in recipes for base in re.findall(r"BASE=(\S+:\S+)", recipe)}) == 1
    for name in re.findall(r"^    (\S+) /opt/check/\1$", recipes[1], re.MULTILINE):
        (tmp_path / name).symlink_to(ROOT / name)
    for recipe, folder in zip(recipes, (ROOT, tmp_path), strict=True):
        assert f"must have torch {minimum} or newer" in recipe and f"torch >= {minimum}: --build-arg BASE=" in recipe
        (code,) = re.findall(r'python -c "(from tools[^"]*)"', recipe.replace("\\\n", ""))
        for change, status in (("", 0), ("from tools.doctor import machine; machine.MINIMUM_TORCH = (99, 0); ", 1)):
            command = [sys.executable, "-c", change + code]
            done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
            assert done.returncode == status and (status or done.stdout.startswith("torch ")), done.stderr
    assert f'"torch>={minimum}"' in (ROOT / "pyproject.toml").read_text()
    ignored = {".git", ".venv", "data", "**/expts", "**/__pycache__"}
    assert ignored <= {*(ROOT / ".dockerignore").read_text().splitlines()}
