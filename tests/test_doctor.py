"""tools.doctor: finds simulated faults, gives their remedy, and passes a healthy machine."""

import json
import os
import re
import shutil
import socket
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from PIL import Image

from tests.conftest import CIFAR100, ROOT
from tests.processes import make_command
from tools.doctor import __main__ as doctor
from tools.doctor import fingerprints, gpus, hardware, machine, measured
from tools.doctor.findings import LEVELS, Finding, render
from utils.config import load_config
from utils.data import workers
from utils.distributed.launch import torchrun_here
from utils.distributed.world import World
from utils.errors import ConfigError


@pytest.fixture
def small_disk(tmp_path):
    """small_disk(megabytes) -> a folder on its own file system of that size."""
    mounted = []

    def mount(megabytes: int) -> Path:
        folder = tmp_path / f"disk{len(mounted)}"
        folder.mkdir()
        command = ["mount", "-t", "tmpfs", "-o", f"size={megabytes}m", "none", str(folder)]
        try:
            done = subprocess.run(command, capture_output=True, text=True, check=False)
        except FileNotFoundError:
            pytest.skip("there is no mount command")
        if done.returncode:
            pytest.skip(f"cannot mount a small file system: {done.stderr.strip()}")
        mounted.append(folder)
        return folder

    yield mount
    for folder in mounted:
        subprocess.run(["umount", str(folder)], check=True)


@pytest.fixture(autouse=True)
def _train_only_twice(monkeypatch):
    monkeypatch.setattr(fingerprints, "SECONDS", 0)


def run_doctor(capsys, *arguments: str) -> tuple[int, dict[str, Finding]]:
    status = doctor.main(["--json", *arguments])
    document = json.loads(capsys.readouterr().out)
    return status, {entry["check"]: Finding(**entry) for entry in document["findings"]}


def test_a_healthy_machine_passes(capsys, tmp_path, monkeypatch):
    monkeypatch.setattr(hardware, "hardware_checks", list)  # depends on the machine: see test_hardware.py
    monkeypatch.setattr(gpus, "gpu_checks", list)
    status, findings = run_doctor(capsys, "--config", "quickstart", "--run-dir", str(tmp_path / "expts/not/yet/there"))
    assert status == max(LEVELS.index(finding.level) for finding in findings.values()) < 2, findings
    on_the_machine = "torch, gpu software, memory, shared memory, disk, data, host names, threads"
    assert ", ".join(findings) == f"{on_the_machine}, dcgm, limits, fingerprint"
    assert not list(tmp_path.iterdir()), "the disk check leaves nothing behind"


@pytest.mark.skipif(torch.cuda.is_available(), reason="has a GPU")
def test_a_configuration_for_a_gpu_fails_without_one(capsys, tmp_path):
    status, findings = run_doctor(capsys, "--config=quickstart", "--set=device=cuda", f"--run-dir={tmp_path}")
    assert (status, findings["gpu software"].level) == (2, "fail")


def test_missing_data_fails_with_the_command_that_downloads_it(capsys, tmp_path):
    status, findings = run_doctor(capsys, "--config=bs128", f"--set=data_path={tmp_path}", f"--run-dir={tmp_path}")
    assert status == 2
    assert findings["data"].level == "fail"
    fetch = f"python -m tools.prepare_data --dataset cifar100 --data_path {tmp_path}"
    assert findings["data"].remedy == f"{fetch} (without a network: --from ARCHIVE)"
    assert findings["data"].message == f"CIFAR-100 is not in {tmp_path}"


@pytest.mark.parametrize("dataset", ["imagefolder", "imagenet"])
def test_class_folders_are_opened_as_in_training(dataset, tmp_path):
    settings = [f"dataset={dataset}", f"data_path={tmp_path}"]
    finding, shape = machine.check_data(load_config(CIFAR100, "default", settings))
    assert finding.level == "fail" and f"{tmp_path}/train: cannot be read" in finding.message
    assert "data_path=DIR" in finding.remedy and "prepare_data" not in finding.remedy and shape == (3, 224, 224)
    for split in ("train", "val"):
        (tmp_path / split / "ant").mkdir(parents=True)
        Image.new("RGB", (40, 50)).save(tmp_path / split / "ant/0.png")
    finding, shape = machine.check_data(load_config(CIFAR100, "default", settings))
    assert (finding.level, finding.message) == ("ok", f"{dataset}: 1 + 1 images")
    assert shape == ((3, 40, 40) if dataset == "imagefolder" else (3, 224, 224))


def test_a_synthetic_loader_needs_no_data(tmp_path):
    config = load_config(CIFAR100, "default", ["data_loader=synthetic", f"data_path={tmp_path}"])
    assert machine.check_data(config) == (Finding("data", "ok", "cifar100: 50,000 + 10,000 images"), (3, 32, 32))


def test_shared_memory_must_suffice_for_the_loader_workers(small_disk, monkeypatch):
    folder = small_disk(64)
    monkeypatch.setattr(workers, "SHARED_MEMORY", folder)
    finding = machine.check_shared_memory(10_000_000, workers=6)
    assert finding.level == "fail" and "--ipc=host" in finding.remedy and "has 67 MB free" in finding.message
    assert machine.check_shared_memory(10_000_000, workers=0).level == "ok", "unused"
    assert machine.check_shared_memory(1_000_000, workers=6).level == "ok"
    (folder / "taken").write_bytes(bytes(60_000_000))
    assert machine.check_shared_memory(1_000_000, workers=6).level == "fail"


def test_shared_memory_is_computed_from_the_datasets_image_size(one_rank, monkeypatch, tmp_path):
    calls = []
    monkeypatch.setattr(workers, "check_shared_memory", lambda *arguments: calls.append(arguments))
    monkeypatch.setattr(machine, "check_threads", lambda cores, ranks, *_: calls.append(ranks))
    monkeypatch.setattr("utils.data.workers.usable_cores", lambda: 4)
    settings = ["dataset=imagenet", "data_loader=torchvision", "num_data_workers=4", "batch_size=512"]
    machine.machine_checks(
        load_config(CIFAR100, "default", [*settings, f"data_path={tmp_path}"]), tmp_path, one_rank, 2, 1
    )
    assert calls == [(512 * 3 * 224 * 224, 2 * 4), 1]  # two ranks, each with four workers on its own four cores


def test_full_or_slow_disk(small_disk, monkeypatch):
    folder = small_disk(4)
    assert machine.check_disk(folder, needed=2**30).level == "fail"
    finding = machine.check_disk(folder / "expts", needed=2**20)  # free space suffices, but not for the probe
    assert finding.level == "fail" and "No space left" in finding.message and "--run-dir" in finding.remedy
    assert not list(folder.iterdir())
    folder = small_disk(100)
    assert machine.check_disk(folder, needed=2**20).level == "ok"
    monkeypatch.setattr(machine, "write_rate", lambda _: 49e6)
    assert machine.check_disk(folder, needed=2**20).level == "warn"


def test_host_name_that_does_not_resolve_fails():
    def resolve(name: str) -> str:
        if name == "node7":
            raise socket.gaierror(-2, "Name or service not known")
        return "10.0.0.1"

    assert machine.check_names(["login1"], resolve).level == "ok"
    finding = machine.check_names(["login1", "node7"], resolve)
    assert finding.level == "fail" and finding.message.startswith("node7 does not resolve")
    assert "MASTER_ADDR" in finding.remedy
    names = machine.names_to_resolve({"MASTER_ADDR": "head", "SLURM_JOB_NODELIST": "gpu[03-05]"})
    assert names == [socket.gethostname(), "head", "gpu03"]


def test_torch_and_torchvision_must_match():
    assert machine.check_torch("2.14.1+cu130", "0.29.1", ["numpy", "torch==2.14.1"]).level == "ok"
    finding = machine.check_torch("2.13.0", "0.29.1", ["numpy", "torch==2.14.1"])
    assert finding.level == "fail" and "torch==2.14.1" in finding.remedy
    assert machine.check_torch("2.10.0", "0.25.0", []).level == "fail"


def test_torch_driver_and_dali_must_match():
    check = machine.check_gpu_stack
    assert check("13.0", False, None, {}).level == "ok", "a CPU machine"
    seen = check("13.0", True, "580.65.06", {"nvidia-nccl-cu13": "2.30"}).message
    assert seen == "driver 580.65.06, CUDA 13.0, NCCL 2.30"
    assert "newer driver" in check("13.0", False, "580.65.06", {}).remedy
    assert check("13.0", True, None, {}).message == "CUDA 13.0", "nvidia-smi may be missing"
    assert "runs use the CPU" in check("13.0", False, None, {}).message
    assert check(None, False, "580.65.06", {}).level == "fail"
    absent = check("13.0", False, None, {}, wanted=True)
    assert (absent.level, absent.message) == ("fail", "CUDA 13.0; no NVIDIA driver, but device is cuda")
    assert "--set device=cpu" in absent.remedy
    assert check("13.0", True, None, {}, wanted=True).level == "ok"
    assert check("13.0", True, "580.65.06", {"nvidia-dali-cuda110": "1.34"}).level == "warn"


def test_driver_version(tmp_path, monkeypatch):
    file = tmp_path / "version"
    monkeypatch.setattr(shutil, "which", lambda name: None)
    assert machine.driver_version(file) is None
    monkeypatch.setattr(shutil, "which", lambda name: "/bin/nvidia-smi")
    assert machine.driver_version(file) == "of unknown version"
    for kind in ("Kernel Module ", "Open Kernel Module for x86_64 "):
        file.write_text(f"NVRM version: NVIDIA UNIX x86_64 {kind} 580.65.06  Tue Aug 5\nGCC version: gcc 12.3.0\n")
        assert machine.driver_version(file) == "580.65.06"


def test_memory_threads_clocks_and_rates(tmp_path):
    (tmp_path / "meminfo").write_text("MemTotal: 100 kB\nMemAvailable:   16000000 kB\n")
    assert machine.check_memory(tmp_path / "meminfo", 1).level == "ok"
    assert machine.check_memory(tmp_path / "meminfo", 16).level == "warn"
    assert machine.check_memory(tmp_path / "gone", 1).level == "warn"
    assert machine.check_threads(cores=40, ranks=8, threads=5, workers=6).level == "ok"
    assert "OMP_NUM_THREADS=5" in machine.check_threads(cores=40, ranks=8, threads=40, workers=6).remedy
    assert "num_data_workers" in machine.check_threads(cores=8, ranks=8, threads=1, workers=6).remedy
    assert measured.check_clocks([0.0, 0.1, -0.2]).message == "clocks differ by at most 0.300 s (ranks 2 and 1)"
    assert [measured.check_clocks([0.0, ahead, -0.6]).level for ahead in (0.3, 0.6)] == ["ok", "warn"]
    (finding,) = measured.check_rates([("gpu 0", 600.0), ("gpu 1", 610.0), ("gpu 2", 450.0)], "slow device")
    assert finding.level == "fail" and "gpu 2 is 1.34 times slower" in finding.message
    (finding,) = measured.check_rates([("gpu 0", 1800.0), ("gpu 1", 1500.0)], "slow device")
    assert finding.message == "gpu 1 is 1.20 times slower than the median of the others: 1,500 TFLOP/s"
    assert [finding.level for finding in measured.check_rates([("gpu 0", 600.0)], "slow device")] == ["ok"]
    assert [measured.check_meeting(seconds, 8).level for seconds in (59.0, 61.0)] == ["ok", "warn"]
    for kind, rate, level in (("cuda", 1.8, "ok"), ("cuda", 1.6, "warn"), ("cpu", 1.6, "ok")):  # bus: 1.75 times
        assert measured.check_all_reduce(rate, World(0, 0, 8, torch.device(kind))).level == level


def test_a_rank_with_different_software_is_named():
    same = {"torch": "2.14.1", "driver": "580"}
    assert measured.check_versions([("rank 0 on a", same), ("rank 1 on b", same)]).level == "ok"
    other = [("rank 0 on a", same), ("rank 1 on b", same), ("rank 2 on c", same | {"driver": "570"})]
    finding = measured.check_versions(other)
    assert (finding.level, finding.message) == ("fail", "driver 580, but 570 on rank 2 on c")


@pytest.mark.parametrize(("level", "status"), [("ok", 0), ("warn", 1), ("fail", 2)])
def test_the_exit_status_and_the_last_line_tell_the_worst_level(level, status, capsys, monkeypatch):
    monkeypatch.setattr(doctor, "examine", lambda *_: [Finding("numa", level, "node1", "look"), Finding("a", "ok", "")])
    assert doctor.main([]) == status
    assert re.match(rf"{level}: \d ok, \d warn, \d fail$", capsys.readouterr().out.splitlines()[-1])
    assert run_doctor(capsys)[0] == status


def test_a_burn_in_needs_a_process_for_each_gpu(tiny, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    options, world = doctor.parser().parse_args(["--burn-in=1"]), World(0, 0, 1, torch.device("cuda", 0))
    with pytest.raises(ConfigError, match="start it with torchrun --nproc_per_node=8 -m"):
        doctor.examine(options, tiny(), world, 0.0)


SLOWED = """
import os, sys
from tools.doctor import __main__ as doctor
from tools.doctor import measured

measured.arithmetic = lambda device: 0.4 if os.environ["RANK"] == "1" else 1.0
sys.exit(doctor.main(["--config", "quickstart", "--set", "device=cpu", "--run-dir", sys.argv[1]]))
"""


@pytest.mark.slow
def test_under_torchrun_the_slowed_rank_is_named(tmp_path):
    script = tmp_path / "slowed.py"
    script.write_text(SLOWED)
    start, rendezvous = torchrun_here(3, tmp_path / "rendezvous")
    environment = os.environ | rendezvous | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*start, str(script), str(tmp_path)], capture_output=True, text=True, env=environment, timeout=200, check=False
    )
    lines = done.stdout.splitlines()
    slow = [line for line in lines if "slow rank" in line]
    assert len(slow) == 1 and slow[0].startswith("fail") and "rank 1 on" in slow[0] and "2.50 times slower" in slow[0]
    for check in ("rendezvous", "clocks", "all-reduce"):  # with the name of the node, as there is only one
        assert any(line.startswith("ok") and check in line and line.endswith("]") for line in lines), done.stdout
    assert lines[-1].startswith("fail:") and done.returncode != 0


def test_nodes_starts_one_process_per_node_with_srun(tmp_path, monkeypatch, capfd):
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    assert doctor.main(["--nodes"]) == 2
    assert "not in a Slurm allocation" in capfd.readouterr().err
    make_command(tmp_path, "srun", 'echo "$@"\nexit 1')
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setenv("SLURM_JOB_ID", "17")
    monkeypatch.setenv("SLURM_JOB_NUM_NODES", "2")
    for step in (None, "0"):  # in the batch script, and in salloc's interactive step
        monkeypatch.delenv("SLURM_STEP_ID", raising=False)
        if step is not None:
            monkeypatch.setenv("SLURM_STEP_ID", step)
        assert doctor.main(["--nodes", "--config", "bs128"]) == 1
        command = f"--ntasks=2 --ntasks-per-node=1 {sys.executable} -m tools.doctor --config bs128"
        assert capfd.readouterr().out.strip() == command


def test_a_single_process_on_a_node_measures_all_its_gpus(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (6.3e10 if device.index == 1 else 6.5e10, 8e10))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "GPU")
    monkeypatch.setattr(measured, "arithmetic", lambda device: 100.0 if device.index == 2 else 600.0)
    for name in ("memory", "host_to_device"):
        monkeypatch.setattr(measured, name, lambda device, trials: SimpleNamespace(median=1.0))
    first = torch.device("cuda", 0)
    seen = measured.device_checks(first, only_rank=True)
    assert [finding.check for finding in seen] == ["limits"] * 3 + ["slow device"]
    assert [finding.level for finding in seen[:3]] == ["ok", "warn", "ok"]  # over 20 % of the memory is in use
    assert seen[-1].message == "GPU 2 is 6.00 times slower than the median of the others: 100 TFLOP/s"
    assert len(measured.device_checks(first, only_rank=False)) == 1


def python(code: str, folder: Path = ROOT) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], cwd=folder, capture_output=True, text=True, check=False)


@pytest.mark.slow
def test_container_recipes_require_the_same_torch_as_the_project(tmp_path):
    minimum = ".".join(map(str, machine.MINIMUM_TORCH))
    assert f'"torch>={minimum}"' in (ROOT / "pyproject.toml").read_text()
    recipes = [(ROOT / name).read_text() for name in ("Dockerfile", "apptainer.def")]
    assert len({base for recipe in recipes for base in re.findall(r"BASE=(\S+:\S+)", recipe)}) == 1
    files = re.findall(r"^    (\S+) /opt/check/\1$", recipes[1], re.MULTILINE)
    for name in files:
        (tmp_path / name).symlink_to(ROOT / name)
    for recipe in recipes:
        assert f"must have torch {minimum} or newer" in recipe and f"torch >= {minimum}: --build-arg BASE=" in recipe
        (check,) = re.findall(r'python -c "from tools[^"]*"', recipe)
        code = check.replace("\\\n", "").split('"')[1]
        done = python(code, tmp_path if recipe == recipes[1] else ROOT)
        assert done.returncode == 0 and done.stdout.startswith("torch "), done.stderr
        assert python(f"from tools.doctor import machine; machine.MINIMUM_TORCH = (99, 0); {code}").returncode == 1


def test_container_recipes_install_the_declared_dependencies():
    assert 'pip install --no-cache-dir ".[report]"' in (ROOT / "Dockerfile").read_text()
    (code,) = re.findall(r"python -c '([^']*)'", (ROOT / "apptainer.def").read_text())
    done = python(code.replace("\\\n", ""))
    declared = (ROOT / "pyproject.toml").read_text()
    assert "torch>=2.11" in done.stdout.split() and all(f'"{line}"' in declared for line in done.stdout.splitlines())
    assert len(done.stdout.splitlines()) >= 9, done.stderr
    assert not re.findall(r"(?:pydantic|rich|tensorboard)>=", (ROOT / "Dockerfile").read_text())


def test_an_image_contains_no_data_runs_or_history():
    ignored = (ROOT / ".dockerignore").read_text().splitlines()
    assert {".git", ".venv", "data", "**/expts", "**/__pycache__"} <= set(ignored)


def test_output_merges_equal_findings_and_gives_remedies():
    findings = [
        Finding("disk", "ok", "fine", where="a"),
        Finding("disk", "ok", "fine", where="b"),
        Finding("data", "fail", "missing", "fetch it", where="b"),
    ]
    assert render(findings) == [
        "ok    disk           fine  [2 alike]",
        "fail  data           missing  [b]",
        "                     -> fetch it",
        "fail: 1 ok, 0 warn, 1 fail",
    ]


def test_checks_that_could_not_look_are_counted_by_themselves():
    findings = [
        Finding("disk", "ok", "fine"),
        Finding("dcgm", "ok", "not run: no dcgmi on PATH"),
        Finding("hardware", "ok", "not readable here: pcie"),
    ]
    assert render(findings)[-1] == "ok: 1 ok, 0 warn, 0 fail, 2 not run"


def test_help_imports_no_torch_and_bad_usage_exits_with_2(capsys):
    code = "import sys; from tools.doctor.__main__ import parser; parser(); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == 0
    assert doctor.main(["--config", "nothing"]) == 2
    assert not capsys.readouterr().out, "no report, so no node is drained"


def test_fingerprints_repeat_and_leave_global_state_unchanged():
    random, threads = torch.get_rng_state(), torch.get_num_threads()
    device = torch.device("cpu")
    torch.set_num_threads(2)
    try:
        found = fingerprints.repeat(device, seconds=0)
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(threads)
    assert len(found) == 2 and len(set(found)) == 1 and re.fullmatch("[0-9a-f]{16}", found[0])
    assert torch.equal(torch.get_rng_state(), random)
    assert not torch.are_deterministic_algorithms_enabled()
    assert fingerprints.read_known().get(fingerprints.describe(device), found[0]) == found[0]


def test_a_device_that_computes_differently_fails():
    def trained(where: str, *found: str, kind: str = "H200, torch 2") -> fingerprints.DeviceFingerprints:
        return fingerprints.DeviceFingerprints(where, kind, list(found))

    good = fingerprints.check_device(trained("cuda:0 of rank 0 on n1", "a", "a"), {"H200, torch 2": "a"})
    assert (good.level, "as known" in good.message) == ("ok", True)
    assert "not in known" in fingerprints.check_device(trained("cuda:0 of rank 0 on n1", "a", "a"), {}).message
    other = fingerprints.check_device(trained("cuda:1 of rank 1 on n1", "b", "b"), {"H200, torch 2": "a"})
    assert (other.level, "the known fingerprint is a" in other.message) == ("fail", True)
    changing = fingerprints.check_device(trained("cuda:1 of rank 1 on n1", "a", "b", "a"), {})
    assert (changing.level, "1 of the fingerprints differ" in changing.message) == ("fail", True)

    alike = [trained("cuda:0", "a"), trained("cuda:1", "a"), trained("cpu", "c", kind="CPU")]
    assert fingerprints.compare_devices(alike).level == "ok"
    outlier = fingerprints.compare_devices([*alike, trained("cuda:2", "b")])
    assert outlier.level == "fail" and outlier.message.endswith(": cuda:2")
    both = fingerprints.compare_devices([trained("cuda:0", "a"), trained("cuda:1", "b")])
    assert both.message.endswith("cuda:0, cuda:1")


def test_a_flipped_bit_changes_the_fingerprint(monkeypatch):
    device, original = torch.device("cpu"), fingerprints.fingerprint
    expected = fingerprints.train_fixed_network(device)
    calls = 0

    def wrong_once(tensor: torch.Tensor) -> torch.Tensor:
        nonlocal calls
        calls += 1
        return original(tensor) + (calls == 5)

    monkeypatch.setattr(fingerprints, "fingerprint", wrong_once)
    assert fingerprints.train_fixed_network(device) != expected
