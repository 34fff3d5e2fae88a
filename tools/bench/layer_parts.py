"""One operation of a network alone: its passes, each timed in each way in which it can be computed.

Forward and backward are apart; backward of convolutions and linear layers by input and by weight.
"""

import copy
import math
import resource
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from tools.bench import common
from tools.bench.layer_ways import BACKWARD, BY_INPUT, BY_WEIGHT, FORWARD, Backend, Machine, Way
from tools.bench.onednn import Kernel, kernels_of
from tools.bench.operations import ADDITION, ARITHMETIC, POOLING, RELU, Operation, Spec
from utils.training.step import capture_stream, on_capture_stream

TOO_SLOW = 10  # times the configuration's own way: not measured any further


@dataclass(frozen=True)
class Work:
    """Floating-point operations, a multiply-add counted as two, and bytes, each read or written once."""

    flops: float
    bytes: float


def rate(work: Work, milliseconds: float) -> tuple[float, str]:
    """TFLOP/s, or where there is no arithmetic to speak of GB/s."""
    return (work.flops / 1e9 / milliseconds, "TFLOP/s") if work.flops else (work.bytes / 1e6 / milliseconds, "GB/s")


@dataclass(frozen=True)
class Pass:
    """Something to time."""

    action: Callable[[], Tensor | tuple[Tensor, ...]]
    work: Work


@dataclass
class Row:
    """What was measured of one pass of an operation. The first way is the configuration's own."""

    operation: Operation
    which: str
    milliseconds: dict[str, common.Sample] = field(default_factory=dict)
    work: dict[str, Work] = field(default_factory=dict)
    system: float = 0.0  # milliseconds of processors in the kernel of the system, in the configuration's own way
    kernels: list[Kernel] = field(default_factory=list)  # of oneDNN, in the same

    @property
    def name(self) -> str:
        return f"{self.operation.name}, {self.which}"

    @property
    def own(self) -> str:
        """The configuration's way."""
        return next(iter(self.milliseconds))

    @property
    def best(self) -> str:
        """The way with the least median."""
        return min(self.milliseconds, key=lambda way: self.milliseconds[way].median)


def build_passes(operation: Operation, way: Way, device: torch.device) -> dict[str, Pass]:
    """{pass: what to time}, on random numbers that are the same in each way, so that the results of a pass are equal in
    all ways, up to rounding. Holds what backward needs."""
    function = way.function or operation.function
    made = _Made(operation, way, device)

    def forward() -> Tensor:
        with torch.no_grad():
            return function(*made.arguments, **made.keywords)

    if operation.of_backward:
        return {BACKWARD: Pass(forward, Work(0.0, made.feature_bytes + made.features[0].nbytes))}

    def output_for(wanted: list[Tensor]) -> Tensor:
        """With a graph for these alone: an autograd function in Python computes the gradients of all that ask for
        one, whichever is wanted."""

        def given(value: Any) -> Any:
            if not isinstance(value, Tensor):
                return value
            chosen = value if any(value is tensor for tensor in wanted) else value.detach()
            return chosen.clone() if operation.kind in (RELU, ADDITION) else chosen  # in place, which no leaf allows

        with torch.enable_grad():
            keywords = {name: given(value) for name, value in made.keywords.items()}
            return function(*map(given, made.arguments), **keywords)

    output = output_for([]).detach()
    gradient = torch.empty_like(output).copy_(made.draw(tuple(output.shape)))
    weight_bytes, map_bytes = made.weight_bytes, made.feature_bytes + output.nbytes
    flops = 2.0 * output.numel() * math.prod(operation.weight.sizes[1:]) if operation.kind in ARITHMETIC else 0.0
    passes = {FORWARD: Pass(forward, Work(flops, map_bytes + weight_bytes))}

    def add(which: str, wanted: list[Tensor], amount: float) -> None:
        wanted = [tensor for tensor in wanted if tensor.requires_grad]
        if wanted:
            grad = partial(torch.autograd.grad, output_for(wanted), wanted, gradient, retain_graph=True)
            passes[which] = Pass(grad, Work(flops, amount))

    if operation.kind in ARITHMETIC:
        add(BY_INPUT, made.features, map_bytes + weight_bytes)
        add(BY_WEIGHT, made.weights, map_bytes + weight_bytes)
    elif operation.kind != ADDITION:  # whose backward passes the gradient on as it is
        kept_bytes = 0 if operation.kind == POOLING else made.features[0].nbytes
        add(BACKWARD, made.features + made.weights, map_bytes + kept_bytes + 2 * weight_bytes)
    return passes


class _Made:
    """What an operation's specs stand for, in a way's format and layout."""

    def __init__(self, operation: Operation, way: Way, device: torch.device) -> None:
        self.operation, self.way, self.device = operation, way, device
        torch.manual_seed(0)  # the same numbers in each way
        self.features: list[Tensor] = []
        self.weights: list[Tensor] = []
        self.arguments = [self._make(value) for value in operation.arguments]
        self.keywords = {name: self._make(value) for name, value in operation.keywords.items()}
        self.feature_bytes, self.weight_bytes = (
            sum(tensor.nbytes for tensor in tensors) for tensors in (self.features, self.weights)
        )

    def draw(self, sizes: tuple[int, ...]) -> Tensor:
        """float32, normally distributed."""
        return torch.randn(sizes, device=self.device)

    def _make(self, value: Any) -> Any:
        if isinstance(value, nn.Module):
            module = copy.deepcopy(value)
            self.weights += (module.float() if self.way.dtype == torch.float32 else module).parameters()
            return module
        if not isinstance(value, Spec):
            return value
        # else BatchNorm's running statistics
        is_drawn = value.is_feature or value.requires_grad or self.operation.kind in ARITHMETIC
        tensor = self.draw(value.sizes) if is_drawn else torch.ones(value.sizes, device=self.device)
        # BatchNorm's weights stay float32 beside half images, but in O3
        cast = value.is_feature or self.operation.kind in ARITHMETIC or self.way.dtype == torch.float32
        channels_last = self.way.channels_last and tensor.ndim == 4
        layout = torch.channels_last if channels_last else torch.contiguous_format
        tensor = tensor.to(self.way.dtype if cast else value.dtype).contiguous(memory_format=layout)
        if is_drawn:
            (self.features if value.is_feature else self.weights).append(tensor)
        return tensor.requires_grad_(value.requires_grad)


class Case:
    """Something to time; a call is one trial."""

    def __init__(self, action: Callable[[], object], machine: Machine, backend: Backend = nullcontext) -> None:
        self.action, self.backend = action, backend
        self.device, self.repeats = machine.device, 1
        self()
        self.captured = action  # kept: the graph reads its tensors where they lay at the capture
        if machine.graphed:
            self.action = _captured(action, machine.device)
        self.seconds = self()["milliseconds"] / 1e3
        self.repeats = max(1, min(100, int(0.02 / max(1e-6, self.seconds))))

    def __call__(self) -> Mapping[str, float]:
        """Milliseconds that it takes, and of them in the kernel of the system, summed over processors."""
        common.synchronize(self.device)
        in_system, started = system_seconds(), time.perf_counter()
        with self.backend():
            for _ in range(self.repeats):
                self.action()
            common.synchronize(self.device)
        seconds = time.perf_counter() - started, system_seconds() - in_system
        milliseconds, system = (1e3 * value / self.repeats for value in seconds)
        return {"milliseconds": milliseconds, "system": system}


def _captured(action: Callable[[], object], device: torch.device) -> Callable[[], object]:
    """GRAPHS: as a step that is captured computes it, without the host's time for each launch."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=capture_stream(device), capture_error_mode="thread_local"):
        action()
    return graph.replay


def system_seconds() -> float:
    """That this process's threads have spent in the kernel of the system."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_stime


def measure_operation(operation: Operation, machine: Machine, trials: int) -> list[Row]:
    """A row for each pass. All passes and ways take turns. A way that is too slow, or that this device refuses, is left
    out; the latter is said."""
    rows: dict[str, Row] = {}
    cases: dict[str, dict[str, Case]] = {}
    own, *others = machine.ways(operation)
    with on_capture_stream(machine.device, graphed=machine.graphed):
        for way in (own, *others):
            try:
                with way.backend():
                    passes = build_passes(operation, way, machine.device)
                for which, part in passes.items():
                    if way.only not in ("", which):
                        continue
                    case = Case(part.action, machine, way.backend)
                    found = cases.setdefault(which, {})
                    if way is own or case.seconds < TOO_SLOW * found[own.name].seconds:
                        found[way.name] = case
                        rows.setdefault(which, Row(operation, which)).work[way.name] = part.work
            except RuntimeError as error:
                if way is own:
                    raise
                print(f"{operation.name}, {way.name}: left out: {str(error).splitlines()[0]}", file=sys.stderr)
        named = {f"{which}/{way}": case for which, found in cases.items() for way, case in found.items()}
        samples = common.measure(named, trials, warm_up=0)
    for which, row in rows.items():
        row.milliseconds = {way: samples[f"{which}/{way}"]["milliseconds"] for way in row.work}
        row.system = samples[f"{which}/{own.name}"]["system"].median
        row.kernels = kernels_of(cases[which][own.name].action) if machine.device.type == "cpu" else []
    return list(rows.values())
