"""tools.bench layers: the operations it times in a network, and the report."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from models import build_model
from tools.bench import layers
from tools.bench.__main__ import main
from tools.bench.layers import ADDITION, FUSED, NORM, POOLING, RELU, UPDATE, StepTimer
from tools.bench.training import build_measured
from utils.config import Config
from utils.distributed.world import World
from utils.training.kernels.compilers import has_compiler
from utils.training.metrics.flops import flops_per_image

IMAGES = 2
OWN_LAYERS = {"enable_nhwc": True, "fuse_norm_relu": True, "conv_weight_products": True, "conv_winograd": True}


def timed(config: Config, device: torch.device) -> StepTimer:
    """Time one step of the configuration's network."""
    timer = StepTimer(build_measured(config, World(0, 0, 1, device)), device)
    images, labels = torch.randn(IMAGES, 3, 32, 32, device=device), torch.zeros(IMAGES, dtype=torch.long, device=device)
    found = timer.time_step(images, labels)
    assert set(found) == set(timer.work) and all(milliseconds > 0 for milliseconds in found.values())
    return timer


def count(timer: StepTimer, kind: str) -> int:
    return sum(name.startswith(kind) for name, _, _ in timer.spans)


def test_each_operation_of_a_step_is_timed_forward_and_backward(tiny) -> None:
    timer = timed(tiny(model="resnet50"), torch.device("cpu"))
    calls = {
        "convolution 1x1": 36,
        "convolution 3x3": 16,
        "convolution other": 1,
        NORM: 53,
        RELU: 49,
        ADDITION: 16,
        POOLING: 1,
    }
    assert {kind: count(timer, kind) for kind in calls} == {kind: 2 * number for kind, number in calls.items()}
    assert count(timer, UPDATE) == 1


@pytest.mark.parametrize(
    "settings",
    [
        {"model": "resnet9", "width": 2},
        {"model": "resnet9", "width": 2, "micro_batch_size": 1},
        {"model": "resnet9", "width": 2, **OWN_LAYERS},
        {"model": "resnet9", "width": 2, "enable_amp": True, "amp_dtype": "bf16", **OWN_LAYERS},
    ],
)
def test_flops_of_the_operations_add_up_to_the_networks(tiny, settings: dict[str, Any]) -> None:
    """Also with this project's own layers, each of which is one operation."""
    if "conv_winograd" in settings and not has_compiler():
        pytest.skip("no C++ compiler")
    config = tiny(batch_size=IMAGES, **settings)
    timer = timed(config, torch.device("cpu"))
    arithmetic = sum(amount for amount, unit in timer.work.values() if unit == "FLOPs")
    assert arithmetic == pytest.approx(IMAGES * flops_per_image(build_model(config, 32), (3, 32, 32)))
    activations = (16, 0) if config.fuse_norm_relu is True else (0, 16 * IMAGES // (config.micro_batch_size or IMAGES))
    assert (count(timer, FUSED), count(timer, RELU)) == activations


def test_the_command_compares_each_kind_with_the_best_rate(tmp_path: Path, monkeypatch, capsys) -> None:
    report = tmp_path / "report.json"
    limits = {"product bf16, TFLOP/s": 0.2, "convolution bf16 NHWC, TFLOP/s": 0.5, "memory, GB/s": 10.0}
    samples = {name: layers.common.Trials((value,)) for name, value in limits.items()}
    monkeypatch.setattr(layers, "measure_limits", lambda *_: samples)
    small = ["dataset=shapes", "num_classes=10", "model=resnet8", "device=cpu", "batch_size=16", "amp_dtype=auto",
             "enable_compile=false", "keep_cpu_memory=false"]  # fmt: skip
    assert main(["layers", "--trials=2", f"--json={report}", *(f"--set={setting}" for setting in small)]) == 0
    shown = capsys.readouterr().out
    results = json.loads(report.read_text())["results"]
    for name, layer in results["layers"].items():
        assert name in shown
        assert layer["best"] == (0.5 if layer["unit"] == "TFLOP/s" else 10.0)
        assert layer["share"] == pytest.approx(layer["rate"] / layer["best"])
        assert layer["share_of_step"] == layer["milliseconds"]["median"] / results["step"]["median"]
    assert {"convolution 3x3, forward", "convolution 3x3, backward", UPDATE} < set(results["layers"])
    assert layers.REST in shown and layers.STEP in shown


def test_a_network_without_such_operations_is_an_error(tmp_path: Path, monkeypatch, capsys) -> None:
    (tmp_path / "strange.py").write_text(
        "import torch\nclass Net(torch.nn.Module):\n    def __init__(self, num_classes):\n        super().__init__()\n"
        "        self.weight = torch.nn.Parameter(torch.zeros(3, num_classes))\n"
        "    def forward(self, images):\n        return images.sum((2, 3)) @ self.weight\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    settings = ["model=strange:Net", "device=cpu", "batch_size=4", "enable_compile=false", "amp_dtype=auto"]
    assert main(["layers", "--trials=1", *(f"--set={setting}" for setting in settings)]) == 2
    assert "model strange:Net: calls no function that is timed; expected conv2d" in capsys.readouterr().err


@pytest.mark.gpu
def test_on_a_gpu_cuda_events_give_the_times(tiny) -> None:
    timer = timed(
        tiny("fastest", device="cuda", enable_compile=False, enable_cuda_graphs=False), torch.device("cuda", 0)
    )
    assert all(isinstance(start, torch.cuda.Event) for _, start, _ in timer.spans)
