"""Model FLOP/s, MFU, and GPU sensors with a mocked NVML."""

import copy
import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from models import build_model
from tests.conftest import read_records
from train import Trainer
from utils.config import Config
from utils.distributed.world import World
from utils.errors import ConfigError
from utils.run.config import MEASURED
from utils.run.logging.environment import device_name
from utils.run.telemetry.meters import Meters, count_devices, read_peak
from utils.run.telemetry.sensors import Gpu, Sensors, find_gpu
from utils.training.kernels.stem import pad_stem
from utils.training.metrics.flops import flops_per_image, measured_peak, published_peak


class NVMLError(Exception):
    """Mocks pynvml's exception."""


def nvml(**answers: Any) -> SimpleNamespace:
    """Mock pynvml; a function whose answer is an error raises it."""

    def mock(value: Any) -> Callable[..., Any]:
        def function(*_: object) -> Any:
            if isinstance(value, NVMLError):
                raise value
            return value() if callable(value) else value

        return function

    usual = {
        "Init": None, "DeviceGetHandleByUUID": "GPU-1", "DeviceGetPowerUsage": 700_000, "DeviceGetTemperature": 60,
        "DeviceGetClockInfo": 1980, "DeviceGetMemoryInfo": SimpleNamespace(used=8_000_000_000),
        "DeviceGetTotalEnergyConsumption": 1_000_000,
    }  # fmt: skip
    functions = {f"nvml{name}": mock(value) for name, value in (usual | answers).items()}
    return SimpleNamespace(NVMLError=NVMLError, NVML_TEMPERATURE_GPU=0, NVML_CLOCK_SM=1, **functions)


def test_a_gpu_reports_power_temperature_clock_memory_and_energy() -> None:
    gpu, notes = find_gpu(nvml(), "1")
    assert gpu is not None and notes == [] and gpu.joules() == 1000
    assert gpu.read() == {
        "gpu_power_w": 700, "gpu_temperature_c": 60, "gpu_clock_mhz": 1980, "gpu_memory_gb": 8
    }  # fmt: skip


def test_values_that_a_gpu_does_not_report_are_omitted() -> None:
    silent = NVMLError("Not Supported")
    gpu = Gpu(nvml(DeviceGetPowerUsage=silent, DeviceGetMemoryInfo=silent, DeviceGetTotalEnergyConsumption=silent), "")
    assert gpu.read() == {"gpu_temperature_c": 60, "gpu_clock_mhz": 1980} and gpu.joules() is None
    found, [note] = find_gpu(nvml(Init=NVMLError("Driver Not Loaded")), "1")
    assert found is None and note == "power and energy of the GPU are not recorded: Driver Not Loaded"


def test_readings_are_averaged_between_log_points_and_energy_is_counted_within_the_block() -> None:
    energy, power = iter((5_000_000, 8_000_000)), iter((300_000, 500_000))
    mocked = nvml(DeviceGetTotalEnergyConsumption=lambda: next(energy), DeviceGetPowerUsage=lambda: next(power))
    with Sensors(Gpu(mocked, "")) as running:
        running._closing.set()  # stops the thread: only this test reads
        running._measure()
        running._measure()
        assert running.close_window()["gpu_power_w"] == 400
        assert running.close_window() == {}
        assert running.joules() == 3000
    assert Sensors(None).joules() is None and Sensors(None).close_window() == {}


def test_flops_are_counted_without_computing(tiny: Callable[..., Config]) -> None:
    """And without changing network, gradients or random state."""
    model = build_model(tiny(model="resnet50", num_classes=100, dataset="cifar100"), 32).train()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    random = torch.get_rng_state()
    assert flops_per_image(model, (3, 32, 32)) == pytest.approx(7.82e9, rel=0.005)
    padded = pad_stem(tiny(stem_channels=8), copy.deepcopy(model))
    assert flops_per_image(padded, (3, 32, 32)) == flops_per_image(model, (3, 32, 32))
    assert flops_per_image(model, (3, 16, 16)) == pytest.approx(7.82e9 / 4, rel=0.005)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())
    assert torch.equal(random, torch.get_rng_state())


@pytest.mark.parametrize(
    ("device", "number_format", "peak"),
    [
        ("NVIDIA H100 80GB HBM3", "bf16", 989),
        ("NVIDIA H100 PCIe", "fp16", 756),
        ("NVIDIA L40S", "bf16", 362),
        ("NVIDIA L40", "bf16", None),
        ("Tesla T4", "fp16", 65),
        ("AMD EPYC x 2", "float32", None),
    ],
)
def test_published_peaks(device: str, number_format: str, peak: float | None) -> None:
    assert published_peak(device, number_format) == peak


def report(path: Path, device: str, bench: str = "limits") -> Path:
    results = {"product float32, TFLOP/s": {"median": 0.5}, "convolution float32 NHWC, TFLOP/s": {"median": 0.25}}
    path.write_text(json.dumps({"bench": bench, "environment": {"device": device}, "results": results}))
    return path


def test_the_measured_peak_must_be_of_this_device(tmp_path: Path, one_rank: World) -> None:
    here = device_name(one_rank.device)
    path = report(tmp_path / "limits.json", here)
    assert read_peak(path, here, "float32") == 0.5 and read_peak(path, here, "bf16") is None
    assert measured_peak({}, "float32") is None
    with pytest.raises(ConfigError, match=r"was measured on another one, this is "):
        read_peak(report(path, "another one"), here, "float32")
    with pytest.raises(ConfigError, match=r"not a report of tools\.bench limits"):
        read_peak(report(path, here, bench="ladder"), here, "float32")
    path.write_text("[]")
    with pytest.raises(ConfigError, match=r"not a report of tools\.bench limits"):
        read_peak(path, here, "float32")
    with pytest.raises(ConfigError, match="cannot be read: No such file"):
        read_peak(tmp_path / "absent", here, "float32")


def test_a_run_records_them(tiny: Callable[..., Config], one_rank: World, tmp_path: Path) -> None:
    limits = str(report(tmp_path / "limits.json", device_name(one_rank.device)))
    trainer = Trainer(tiny(limits_report=limits, max_epochs=1, enable_amp=False), one_rank, tmp_path / "run")
    trainer.meters.sensors.gpu = Gpu(nvml(DeviceGetTotalEnergyConsumption=iter((5000, 7000)).__next__), "")
    trainer.train()
    steps, [end] = read_records(tmp_path / "run", "step"), read_records(tmp_path / "run", "end")
    flops = flops_per_image(trainer.learner.model, (3, 32, 32))
    for row in steps:
        assert row["model_tflops"] == pytest.approx(row["images_per_sec"] * flops / 1e12)
        assert row["mfu"] == pytest.approx(row["model_tflops"] / 0.5)
    assert len(steps) == 2 and end["joules"] == 2 and end["joules_per_image"] == 2 / (4 * 32)


def test_mfu_is_relative_to_the_peak_of_all_devices_and_ranks_of_a_host_share_one(
    tiny: Callable[..., Config], one_rank: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Four(World):
        def all_gather(self, value: Any) -> list[Any]:
            return ["gpu01", "gpu01", "gpu02", "gpu02"]

    cpu, gpu = (Four(0, 0, 4, torch.device(kind)) for kind in ("cpu", "cuda"))
    assert (count_devices("ddp", cpu), count_devices("ddp", gpu)) == (2, 4)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    assert count_devices("dataparallel", gpu) == 8
    limits = str(report(tmp_path / "limits.json", device_name(one_rank.device)))
    meters = Trainer(tiny(limits_report=limits, enable_amp=False), one_rank, tmp_path).meters
    one = meters.window(100.0, 0)["mfu"]
    meters.devices = 2
    assert meters.window(100.0, 0)["mfu"] == pytest.approx(one / 2)


def test_energy_is_not_reported_if_only_the_first_of_several_gpus_is_known(
    tiny: Callable[..., Config], one_rank: World
) -> None:
    """As with DataParallel, where one process trains on all GPUs."""
    meters = Trainer(tiny(), one_rank).meters
    meters.sensors.gpu = Gpu(nvml(DeviceGetTotalEnergyConsumption=lambda: 7000), "")
    with meters.sensors:
        assert set(meters.totals(100)) == {"joules", "joules_per_image"}
        meters.devices = 8
        assert meters.totals(100) == {}


class ReadsValues(nn.Module):
    """A network that reads values of its input."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 10)

    def forward(self, images: Tensor) -> Tensor:
        return self.layer(images.mean((2, 3)) * float(images.sum()))


def test_unknown_flops_or_peak_are_omitted(tiny: Callable[..., Config], one_rank: World, tmp_path: Path) -> None:
    trainer = Trainer(tiny(), one_rank, tmp_path)
    assert [note for note in trainer.meters.notes if note.startswith("no MFU: the peak of ")]
    assert trainer.meters.window(100.0, 0).keys() == {"model_tflops"} and trainer.meters.totals(100) == {}
    trainer.learner.model = ReadsValues()
    without = Meters(trainer.config, trainer.learner, one_rank, (3, 32, 32))
    assert without.window(100.0, 0) == {}


def test_every_measured_name_is_known() -> None:
    assert {"model_tflops", "mfu", "joules", "joules_per_image", *Gpu(nvml(), "").read()} <= MEASURED
