"""The time of a training step by kind of operation: time, fraction of the step and achieved rate.

    python -m tools.bench layers --config=fastest

Operations are timed inside training steps on random images: forward where their function or layer is called, backward
where autograd computes their gradients. So any network can be measured. The table compares each rate with the measured
rate of products or convolutions, whichever is faster, or of memory if each feature map is read or written once.
"""

import argparse
import math
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node
from torch.overrides import TorchFunctionMode

from tools.bench import common
from tools.bench.limits import DTYPES, convolution, memory, product
from tools.bench.training import alone, build_measured, capture_steps
from tools.shared.output import print_table, say
from utils.config import Config
from utils.data.build import image_side
from utils.errors import ConfigError
from utils.run.logging.environment import device_name
from utils.training.kernels.compilers import compiles, wants_graphs
from utils.training.kernels.conv.weight_gradient import ProductConv2d
from utils.training.kernels.conv.winograd import PooledWinogradConv2d, WinogradConv2d
from utils.training.kernels.norm_relu.module import NormReLU
from utils.training.learner import Learner
from utils.training.metrics.flops import number_format

CONVOLUTION, LINEAR, NORM, RELU, ADDITION, POOLING, FUSED = (
    "convolution", "linear", "BatchNorm", "ReLU", "addition", "pooling", "BatchNorm and activation",
)  # fmt: skip
UPDATE, REST, STEP = "update of the weights", "everything else", "whole step"
# kind of operation by the name of PyTorch's function
FUNCTIONS = {
    "conv2d": CONVOLUTION,
    "linear": LINEAR,
    "batch_norm": NORM,
    **dict.fromkeys(("relu", "relu_"), RELU),
    **dict.fromkeys(("add", "add_"), ADDITION),
    **dict.fromkeys(
        ("max_pool2d", "avg_pool2d", "adaptive_max_pool2d", "adaptive_avg_pool2d", "amax", "mean"), POOLING
    ),
}
# this project's layers count as one operation each, whatever they call
LAYERS: dict[type[nn.Module], str] = {NormReLU: FUSED, ProductConv2d: CONVOLUTION, WinogradConv2d: CONVOLUTION}
WARM_UP_STEPS = 2
HEAD_START_CYCLES = 200_000_000  # of a GPU, about 0.1 s, in which the host queues operations


def add_arguments(parser: argparse.ArgumentParser) -> None:
    common.add_arguments(parser, config="fastest", trials=5)


def run(options: argparse.Namespace) -> int:
    config = common.read_config(options)
    world = alone(config)
    learner = eager = build_measured(config, world)
    if compiles(config, world.device) or wants_graphs(config, world.device):
        say(f"The step is compiled or captured; operations are timed in an eager one, so '{REST}' may be negative.")
        eager = build_measured(config.model_copy(update={"enable_compile": False, "enable_cuda_graphs": False}), world)
    images, labels = random_batch(config, world.device)
    timer = StepTimer(eager, world.device)
    results = common.measure(
        {
            "step": lambda: {STEP: 1e3 * common.time_action(world.device, lambda: learner.train_step(images, labels))},
            "kinds": lambda: timer.time_step(images, labels),
        },
        options.trials,
        warm_up=max(WARM_UP_STEPS, capture_steps(config, world.device)),
    )
    kinds, step = results["kinds"], results["step"][STEP]
    if set(kinds) <= {UPDATE}:
        raise ConfigError(f"model {config.model}: calls no function that is timed; expected {' or '.join(FUNCTIONS)}")
    limits = measure_limits(number_format(learner.precision, config), world.device)
    layers = {name: compare(sample, step, timer.work[name], limits) for name, sample in kinds.items()}
    show(config, device_name(world.device), layers, step)
    common.write_report(options.json, "layers", config, world, {"layers": layers, "step": step, "limits": limits})
    return 0


def random_batch(config: Config, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return random images of the configuration's size and layout, and labels."""
    side = image_side(config)
    layout = torch.channels_last if config.enable_nhwc else torch.contiguous_format
    images = torch.randn(config.batch_size, 3, side, side, device=device).contiguous(memory_format=layout)
    return images, torch.randint(config.num_classes, (config.batch_size,), device=device)


class StepTimer(TorchFunctionMode):
    """Trains steps of an eager learner and times each call of FUNCTIONS and LAYERS, its backward pass and the update.

    `work`: {kind: (amount, unit)}: FLOPs computed or bytes moved in the last step.
    """

    def __init__(self, learner: Learner, device: torch.device) -> None:
        super().__init__()
        self.learner, self.device = learner, device
        self.spans: list[tuple[str, Any, Any]] = []
        self.work: dict[str, tuple[float, str]] = {}
        self.called: list[tuple[Any, set[Node | None]]] = []  # layers of LAYERS that have not returned yet
        for module in learner.model.modules():
            if isinstance(module, tuple(LAYERS)):
                module.register_forward_pre_hook(self._enter)
                module.register_forward_hook(self._leave)
        started: list[Any] = []
        learner.optimizer.register_step_pre_hook(lambda *_: started.append(self._now()))
        learner.optimizer.register_step_post_hook(lambda *_: self._add(UPDATE, started.pop(), _update_bytes(learner)))

    def time_step(self, images: Tensor, labels: Tensor) -> dict[str, float]:
        """Train one step and return the milliseconds of each kind of operation."""
        self.spans, self.work = [], {}
        if self.device.type == "cuda":
            torch.cuda._sleep(HEAD_START_CYCLES)  # so that the device does not wait for the host between two marks
        with self:
            self.learner.train_step(images, labels)
        common.synchronize(self.device)
        found: Counter[str] = Counter()
        for kind, start, end in self.spans:
            found[kind] += start.elapsed_time(end) if self.device.type == "cuda" else 1e3 * (end - start)
        return dict(found)

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kind, kwargs = FUNCTIONS.get(getattr(function, "__name__", "")), kwargs or {}
        tensors = [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)]
        # without gradients: the optimizer, an average of weights, and calls inside autograd functions
        if kind is None or self.called or not torch.is_grad_enabled() or not _are_features(kind, tensors):
            return function(*args, **kwargs)
        features = tensors if kind in (ADDITION, POOLING) else tensors[:1]
        before, start = {tensor.grad_fn for tensor in features}, self._now()
        output = function(*args, **kwargs)
        weight = tensors[1] if kind in (CONVOLUTION, LINEAR) else None
        self._record(kind, start, before, features, weight, output, output.numel())
        return output

    def _enter(self, module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        self.called.append((self._now(), {tensor.grad_fn for tensor in inputs}))

    def _leave(self, module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        start, before = self.called.pop()
        kind = next(kind for layer, kind in LAYERS.items() if isinstance(module, layer))
        numbers = output.numel()
        if isinstance(module, PooledWinogradConv2d):
            numbers = len(output) * output.shape[1] * inputs[0].shape[2:].numel()  # before its pooling
        weight: Any = module.weight if kind == CONVOLUTION else None
        self._record(kind, start, before, inputs, weight, output, numbers)

    def _record(
        self, kind: str, start: Any, before: set[Node | None], features: Sequence[Tensor], weight: Tensor | None,
        output: Tensor, numbers: int,
    ) -> None:  # fmt: skip
        """Record a forward pass that ends now, and its backward pass when autograd runs it.

        `before`: the nodes of the inputs; `numbers`: how many numbers a convolution or product computes."""
        forward = backward = kind
        if kind == CONVOLUTION:
            assert weight is not None
            height, width = weight.shape[2:]
            size = f"{height}x{width}" if height == width and height in (1, 3) else "other"
            forward, backward = (f"{kind} {size}, {which}" for which in ("forward", "backward"))
        moved = sum(tensor.nbytes for tensor in features) + output.nbytes
        work: tuple[float, str] = (moved, "bytes")
        # gradients of output and input, and stored tensors; an addition passes its gradient on unchanged
        moved_backward = {ADDITION: 0, POOLING: moved}.get(kind, moved + features[0].nbytes)
        work_of_backward: tuple[float, str] = (moved_backward, "bytes")
        if weight is not None:
            flops = 2.0 * numbers * math.prod(weight.shape[1:])
            work = (flops, "FLOPs")
            work_of_backward = (flops * (features[0].requires_grad + weight.requires_grad), "FLOPs")
        self._add(forward, start, work)
        for number, node in enumerate(_nodes(output.grad_fn, before)):
            started: list[Any] = []
            node.register_prehook(lambda *_, started=started: started.append(self._now()))
            amount = work_of_backward if not number else (0.0, work_of_backward[1])
            node.register_hook(lambda *_, started=started, amount=amount: self._add(backward, started.pop(), amount))

    def _add(self, kind: str, start: Any, work: tuple[float, str]) -> None:
        self.spans.append((kind, start, self._now()))
        amount, unit = work
        self.work[kind] = (self.work.get(kind, (0.0, unit))[0] + amount, unit)

    def _now(self) -> Any:
        """Return the time in seconds, or on a GPU an event in its queue."""
        if self.device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event


def _are_features(kind: str, tensors: Sequence[Tensor]) -> bool:
    """Return whether a call computes feature maps, not a loss or a counter."""
    if not tensors or tensors[0].ndim < 2 or not tensors[0].is_floating_point():
        return False
    return kind != ADDITION or (len(tensors) == 2 and tensors[0].shape == tensors[1].shape)


def _nodes(last: Node | None, before: set[Node | None]) -> Iterator[Node]:
    """Yield the nodes of the graph from `last` back to the nodes `before` and the leaves, without these."""
    waiting, seen = [last], set(before)
    while waiting:
        node = waiting.pop()
        if node is None or node in seen or hasattr(node, "variable"):  # an accumulation node of a leaf
            continue
        seen.add(node)
        yield node
        waiting += [following for following, _ in node.next_functions]


def _update_bytes(learner: Learner) -> tuple[float, str]:
    """Return the bytes of an update: weights and optimizer state read and written, gradients read."""
    optimizer, total = learner.optimizer, 0
    for parameter in (parameter for group in optimizer.param_groups for parameter in group["params"]):
        kept = [value for value in optimizer.state[parameter].values() if isinstance(value, Tensor)]
        total += 3 * parameter.nbytes + sum(2 * value.nbytes for value in kept)
    return total, "bytes"


def measure_limits(name: str, device: torch.device) -> dict[str, common.Trials]:
    """Measure the limits in this number format, by the names of `limits`."""
    dtype = DTYPES[name]  # tf32 as configured
    return {
        f"product {name}, TFLOP/s": product(device, dtype, 3),
        f"convolution {name} NHWC, TFLOP/s": convolution(device, dtype, 3),
        "memory, GB/s": memory(device, 3),
    }


def compare(
    sample: common.Trials,
    step: common.Trials,
    work: tuple[float, str],
    limits: Mapping[str, common.Trials],
) -> dict[str, Any]:
    """Return a kind of operation for table and report: its rate and the best one; `share` is their quotient."""
    amount, what = work
    unit, scale, bound = ("TFLOP/s", 1e12, "arithmetic") if what == "FLOPs" else ("GB/s", 1e9, "memory")
    rate = amount / scale / (sample.median / 1e3)
    best = max(limit.median for name, limit in limits.items() if name.endswith(unit))
    return {
        "milliseconds": sample, "share_of_step": sample.median / step.median, "rate": rate, "unit": unit,
        "best": best, "share": rate / best, "bound": bound,
    }  # fmt: skip


def show(config: Config, device: str, layers: Mapping[str, Mapping[str, Any]], step: common.Trials) -> None:
    """Print the table, the longest kind first."""
    rest = step.median - sum(layer["milliseconds"].median for layer in layers.values())
    rows = [
        (name, f"{layer['milliseconds']:.3g}", f"{layer['share_of_step']:.1%}", f"{layer['rate']:.3g} {layer['unit']}",
         f"{layer['best']:.3g}")
        for name, layer in sorted(layers.items(), key=lambda item: -item[1]["milliseconds"].median)
    ]  # fmt: skip
    rows += [(REST, f"{rest:.3g}", f"{rest / step.median:.1%}", "-", "-"), (STEP, f"{step:.4g}", "100.0%", "-", "-")]
    title = f"{config.model}, batch {config.batch_size}, a training step on {device}: median (min-max)"
    print_table(title, ("kind of operation", "ms", "share", "rate", "best measured rate"), rows)
