"""Each layer of a network alone, forward and backward, against what this machine can do: where a step's time must go.

    python -m tools.bench layers --config=fastest

A layer's bound is the larger of its arithmetic at the measured rate of products or convolutions, and of its bytes at
the measured memory bandwidth: images, weights and gradients are read and written once. Layers of one shape count once.
"""

import argparse
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from models import build_model
from tools.bench import common
from tools.bench.limits import measure_limits
from tools.bench.training import alone
from tools.output import print_table
from utils.config import Config
from utils.data.build import image_side
from utils.training.backends import prepare_backends
from utils.training.precision import NAMES, choose_precision

MEASURED = (nn.Conv2d, nn.Linear, nn.BatchNorm2d)
# Forward reads images and weights and writes outputs; backward reads both and the outputs' gradient, writes two more.
PASSES_IN, PASSES_OUT, PASSES_WEIGHT = 3, 2, 3


@dataclass(frozen=True)
class Layer:
    """A layer, the shape of what goes in for one batch, and how often the network has it."""

    module: nn.Module
    shape: tuple[int, ...]
    count: int


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `python -m tools.bench layers`."""
    common.add_arguments(parser, config="fastest", trials=5)


def run(options: argparse.Namespace) -> int:
    """Measure, print a table, write the report."""
    config = common.read_config(options)
    world = alone(config)
    prepare_backends(config, world.device)
    limits = measure_limits(world, trials=3)
    layers = distinct_layers(config)
    cases = {name: Case(config, layer, world.device) for name, layer in layers.items()}
    samples = common.measure(cases, options.trials)
    results = {name: cases[name].evaluate(samples[name]["milliseconds"], limits) for name in layers}
    show(config, layers, results)
    common.write_report(options.json, "layers", config, world, results)
    return 0


def distinct_layers(config: Config) -> dict[str, Layer]:
    """{name: layer} of what the configuration's network computes with, in the order of the forward pass."""
    side = image_side(config)
    model = build_model(config, side).eval()
    seen: dict[str, list[tuple[nn.Module, tuple[int, ...]]]] = {}

    def note(module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        seen.setdefault(describe(module, inputs[0], output), []).append((module, tuple(inputs[0].shape[1:])))

    for module in model.modules():
        if isinstance(module, MEASURED):
            module.register_forward_hook(note)
    with torch.no_grad():
        model(torch.zeros(1, 3, side, side))
    batch = config.micro_batch_size or config.batch_size
    return {name: Layer(found[0][0], (batch, *found[0][1]), len(found)) for name, found in seen.items()}


def describe(module: nn.Module, images: Tensor, output: Tensor) -> str:
    """A name that layers of equal work share."""
    shape = "x".join(map(str, images.shape[1:]))
    if isinstance(module, nn.Conv2d):
        stride = f" / {module.stride[0]}" if module.stride[0] > 1 else ""
        return f"convolution {module.kernel_size[0]}x{module.kernel_size[1]}{stride}, {shape} to {output.shape[1]}"
    return f"linear, {shape} to {output.shape[1]}" if isinstance(module, nn.Linear) else f"BatchNorm, {shape}"


class Case:
    """One layer in the configuration's number format and layout; a call is one timed trial."""

    def __init__(self, config: Config, layer: Layer, device: torch.device) -> None:
        precision = choose_precision(config, device)
        self.device, self.count = device, layer.count
        self.half = precision.level != "O0"
        self.format = NAMES[precision.half] if self.half else "tf32" if self._tf32(config) else "float32"
        # autocast leaves BatchNorm's weights in float32 and gives it half images
        dtype = precision.half if self.half else torch.float32
        layout = torch.channels_last if config.enable_nhwc and len(layer.shape) == 4 else torch.contiguous_format
        self.module = layer.module.to(device).train()
        if not isinstance(self.module, nn.BatchNorm2d):
            self.module.to(dtype)
        if len(layer.shape) == 4:
            self.module.to(memory_format=layout)
        images = torch.randn(layer.shape, device=device).to(dtype, memory_format=layout)
        self.images = images.requires_grad_()
        output = self.module(self.images)
        self.gradient = torch.ones_like(output)
        weights = sum(parameter.nbytes for parameter in self.module.parameters())
        self.bytes = PASSES_IN * images.nbytes + PASSES_OUT * output.nbytes + PASSES_WEIGHT * weights
        self.flops = 0 if isinstance(self.module, nn.BatchNorm2d) else 3 * 2 * _multiplications(self.module, output)
        self.repeats = 1
        self()
        self.repeats = max(1, min(100, int(0.02 / max(1e-6, self()["milliseconds"] / 1e3))))

    def _tf32(self, config: Config) -> bool:
        return config.enable_tf32 and self.device.type == "cuda"

    def __call__(self) -> Mapping[str, float]:
        """Milliseconds of forward and backward."""
        common.synchronize(self.device)
        started = time.perf_counter()
        for _ in range(self.repeats):
            self.module(self.images).backward(self.gradient)
            self.images.grad = None
            self.module.zero_grad()
        common.synchronize(self.device)
        return {"milliseconds": 1e3 * (time.perf_counter() - started) / self.repeats}

    def evaluate(self, sample: common.Sample, limits: Mapping[str, common.Sample]) -> dict[str, Any]:
        """The sample with its bound and what bounds it; `share` is the bound's share of the time it took."""
        kinds = (f"product {self.format}, TFLOP/s", f"convolution {self.format} NHWC, TFLOP/s")
        arithmetic = 1e3 * self.flops / 1e12 / max(limits[kind].median for kind in kinds)
        memory = 1e3 * self.bytes / 1e9 / limits["memory, GB/s"].median
        bound, name = max((arithmetic, "arithmetic"), (memory, "memory"))
        return {"milliseconds": sample, "count": self.count, "at_least": bound, "bound": name,
                "share": bound / sample.median}  # fmt: skip


def _multiplications(module: nn.Module, output: Tensor) -> int:
    weight: Tensor = module.weight  # type: ignore[assignment]
    return output.numel() * weight[0].numel()


def show(config: Config, layers: Mapping[str, Layer], results: Mapping[str, Mapping[str, Any]]) -> None:
    """The table, and what the layers take together."""
    rows = [
        (name, str(layers[name].count), f"{row['milliseconds']:.3f}", f"{row['at_least']:.3f}",
         f"{row['share']:.0%} of {row['bound']}")
        for name, row in results.items()
    ]  # fmt: skip
    took = sum(row["count"] * row["milliseconds"].median for row in results.values())
    bound = sum(row["count"] * row["at_least"] for row in results.values())
    rows.append(("all together", "", f"{took:.1f}", f"{bound:.1f}", f"{bound / took:.0%}"))
    title = f"{config.model}, forward and backward of each layer alone: median (min-max)"
    print_table(title, ("layer", "times", "ms", "at least, ms", "share of the ceiling"), rows)
