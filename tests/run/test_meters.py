"""Model FLOP/s, MFU, power and energy, with mocked sensors."""

import copy
import json
import sys
from types import SimpleNamespace

import pytest
import torch

from models import build_model
from tests.conftest import read_records
from train import Trainer
from utils.distributed.world import World
from utils.environment import device_name
from utils.errors import ConfigError
from utils.kernels.stem import pad_stem
from utils.run import meters
from utils.run.clock import Window
from utils.run.config import MEASURED
from utils.run.meters import count_devices, read_gpu, read_joules
from utils.training.metrics.flops import PEAKS, flops_per_image, published_peak, read_peak

GPU = torch.device("cuda", 0)


def test_a_gpu_reports_power_temperature_clock_and_memory_except_what_it_refuses(monkeypatch):
    assert read_gpu(torch.device("cpu")) == {}
    answers = {"power_draw": 700_000, "temperature": 65, "clock_rate": 1980, "device_memory_used": 8_000_000_000}
    for name, answer in answers.items():
        monkeypatch.setattr(torch.cuda, name, lambda device, answer=answer: answer)
    values = {"gpu_power_w": 700, "gpu_temperature_c": 65, "gpu_clock_mhz": 1980, "gpu_memory_gb": 8}
    assert read_gpu(GPU) == values and values.keys() <= MEASURED
    monkeypatch.setattr(torch.cuda, "temperature", lambda device: {}["Not Supported"])
    assert read_gpu(GPU).keys() == values.keys() - {"gpu_temperature_c"}


def test_the_energy_is_that_of_the_gpu_with_pytorchs_uuid(monkeypatch):
    started = []
    nvml = SimpleNamespace(
        nvmlInit=lambda: started.append(True),
        nvmlDeviceGetHandleByUUID=lambda uuid: uuid if started else {}["Uninitialized"],
        nvmlDeviceGetTotalEnergyConsumption=lambda handle: {"GPU-1": 5000, "GPU-2": 7000}[handle],
    )
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid="2"))
    assert read_joules(GPU) == 7
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert read_joules(GPU) is None and read_joules(torch.device("cpu")) is None


def test_flops_are_counted_without_computing_also_of_a_parameter_with_two_names(tiny):
    model = build_model(tiny(model="resnet50", num_classes=100, dataset="cifar100"), 32).train()
    before, random = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    assert flops_per_image(model, (3, 32, 32)) == pytest.approx(7.82e9, rel=0.005)
    pad_stem(padded := copy.deepcopy(model), 8)
    assert flops_per_image(padded, (3, 32, 32)) == flops_per_image(model, (3, 32, 32))
    assert flops_per_image(model, (3, 16, 16)) == pytest.approx(7.82e9 / 4, rel=0.005)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())
    assert torch.equal(random, torch.get_rng_state())

    class Layer(torch.nn.Linear):
        def forward(self, images):
            return torch.nn.functional.linear(images, self.again)

    layer = Layer(4, 4)
    layer.again = layer.weight
    assert flops_per_image(torch.nn.Sequential(torch.nn.Flatten(), layer), (1, 2, 2)) == 4 * 2 * 4 * 4 / 2
    layer.weight.requires_grad_(False)  # no gradients of its weight and of its images
    layers = torch.nn.Sequential(torch.nn.Flatten(), layer, torch.nn.Linear(4, 4))
    assert flops_per_image(layers, (1, 2, 2)) == 3 * 2 * 4 * 4


def test_published_peaks_are_those_of_nvidias_data_sheets():
    """Without sparsity: bf16, fp16, TF32, float32; for the last three, fp16 and float32."""
    assert {name: tuple(formats.values()) for name, formats in PEAKS.items()} == {
        "B200": (2250, 2250, 1125, 75), "H200 NVL": (835, 835, 417, 60), "H200": (989, 989, 494, 67),
        "H100 NVL": (835, 835, 417, 60), "H100 PCIe": (756, 756, 378, 51), "H100": (989, 989, 494, 67),
        "A100": (312, 312, 156, 19.5), "L40S": (362, 362, 183, 91.6), "L4": (121, 121, 60, 30.3),
        "A10": (125, 125, 62.5, 31.2), "V100-PCIE": (112, 14), "V100": (125, 15.7), "T4": (65, 8.1)}  # fmt: skip
    h100, pcie = ("NVIDIA H100 80GB HBM3", "bf16", 989), ("NVIDIA H100 PCIe", "fp16", 756)
    for device, number_format, peak in (h100, pcie, ("NVIDIA L40", "bf16", None), ("AMD EPYC x 2", "float32", None)):
        assert published_peak(device, number_format) == peak


def report(path, device, bench="limits"):
    results = {"product float32, TFLOP/s": {"median": 0.25}, "convolution float32 NHWC, TFLOP/s": {"median": 0.5}}
    path.write_text(json.dumps({"bench": bench, "environment": {"device": device}, "results": results}))
    return path


def test_the_measured_peak_must_be_of_this_device(tmp_path):
    path = report(tmp_path / "limits.json", "here")
    assert read_peak(path, "here", "float32") == 0.5 and read_peak(path, "here", "bf16") is None
    for device, bench in (("another", "limits"), ("here", "ladder")):
        with pytest.raises(ConfigError, match=f"is a report of {bench} on {device}; expected limits on here"):
            read_peak(report(path, device, bench), "here", "float32")
    with pytest.raises(ConfigError, match=r"cannot be read as a report of tools\.bench"):
        read_peak(tmp_path / "absent", "here", "float32")


def test_a_run_records_them(tiny, one_rank, tmp_path, monkeypatch):
    monkeypatch.setattr(meters, "read_joules", lambda device: next(energy))
    monkeypatch.setattr(meters, "read_gpu", lambda device: {"gpu_power_w": 700.0})
    monkeypatch.setattr(meters.resource, "getrusage", lambda who: SimpleNamespace(ru_maxrss=1_000_000))  # KiB
    monkeypatch.setattr(meters.time, "monotonic", lambda: 100.0)
    monkeypatch.setattr("utils.environment.read_processors", lambda: [{"model name": "A"}] * 3)
    limits = str(report(tmp_path / "limits.json", "A x 3"))
    small_first, energy = {"progressive_image_sizes": [[16, 0.5]], "log_freq": 3}, iter((5.0, 7.0))
    trainer = Trainer(tiny(limits_report=limits, enable_amp=False, **small_first), one_rank, tmp_path / "run")
    trainer.train()
    steps, [end] = read_records(tmp_path / "run", "step"), read_records(tmp_path / "run", "end")
    flops = [flops_per_image(trainer.learner.model, (3, side, side)) for side in (16, 32)]
    for row in steps:
        assert row["model_tflops"] == pytest.approx(row["images_per_sec"] * flops[row["epoch"] - 1] / 1e12)
        assert row["mfu"] == pytest.approx(row["model_tflops"] / 0.5) and row["memory_gb"] == 1.024
    assert len(steps) == 4 and end["joules"] == 2 and end["joules_per_image"] == 2 / (8 * 32)
    assert steps[0]["gpu_power_w"] == 700 and "gpu_power_w" not in steps[1], "read once a second at most"
    trainer.meters.read_at -= 1  # a second later
    assert "gpu_power_w" in trainer.meters.at_log_point(Window(), 0)
    assert {"model_tflops", "mfu", "joules", "joules_per_image"} <= MEASURED


def test_mfu_counts_all_devices_and_ranks_of_a_host_share_one(tiny, one_rank, tmp_path, monkeypatch):
    four = {"world_size": 4, "all_gather": lambda _: ["gpu01", "gpu01", "gpu02", "gpu02"]}
    cpu, gpu = (SimpleNamespace(device=torch.device(kind), **four) for kind in ("cpu", "cuda"))
    assert (count_devices("ddp", cpu), count_devices("ddp", gpu)) == (2, 4)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    assert count_devices("dataparallel", gpu) == 8
    monkeypatch.setattr(meters, "read_joules", lambda device: 7.0)
    limits = str(report(tmp_path / "limits.json", device_name(one_rank.device)))
    found = Trainer(tiny(limits_report=limits, enable_amp=False), one_rank, tmp_path).meters
    one = found.at_log_point(Window(100, 1.0), 0)["mfu"]
    assert found.totals(100) == {"joules": 0, "joules_per_image": 0} and found.totals(0) == {}
    half = tiny(limits_report=limits, enable_amp=True, amp_dtype="bf16")
    assert Trainer(half, one_rank, tmp_path).meters.peak is None, "the report has no bf16"
    found.devices = 2
    assert found.at_log_point(Window(100, 1.0), 0)["mfu"] == pytest.approx(one / 2)
    assert found.totals(100) == {}, "as with DataParallel, only one of the GPUs is known"
    monkeypatch.setattr(World, "all_gather", lambda _, mine: [mine, 5.0])
    assert found.totals(100) == {"joules": 5, "joules_per_image": 0.05}
