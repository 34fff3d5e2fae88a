"""Where a step's time goes: each operation of the network alone, forward and backward, in the configuration's way and
in the best way that this machine has, and their shares of the whole step.

    python -m tools.bench layers --config=fastest         # the same: python -m tools.bench limits --layers

The network is asked what it computes, so that any of them can be measured. Operations of one shape count once. The
bound ("at least") is the larger of the arithmetic at the measured rate of products or convolutions, and of the bytes
at the measured memory bandwidth, each feature map read or written once.
"""

import argparse
import resource
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from tools.bench import common
from tools.bench.ceilings import DTYPES, convolution, memory, product
from tools.bench.layer_parts import Case, Row, measure_operation, rate, system_seconds
from tools.bench.layer_summary import as_results, show_summary, summarise
from tools.bench.layer_ways import Machine
from tools.bench.onednn import name_kernels
from tools.bench.operations import KINDS, NORM, hear
from tools.bench.training import alone, build_measured, capture_steps
from tools.shared.output import print_table, say
from utils.config import Config
from utils.data.build import image_side
from utils.distributed.world import World
from utils.errors import ConfigError
from utils.training.flops import measured_peak
from utils.training.optimizer import set_learning_rate
from utils.training.step import compiles, on_capture_stream

STEPS_TO_WARM_UP = 2


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `python -m tools.bench layers`."""
    common.add_arguments(parser, config="fastest", trials=5)


def run(options: argparse.Namespace) -> int:
    """Measure, print both tables, write the report."""
    config = common.read_config(options)
    world = alone(config)
    machine = Machine(config, world.device)
    step = WholeStep(config, world, machine)
    limits = measure_ceilings(machine)
    operations = hear(step.learner, step.images[: step.learner.batch.micro_batch_size])
    if not operations:
        raise ConfigError(
            f"model {config.model}: calls none of the functions that this bench times: {', '.join(KINDS)}"
        )
    # a trial of the whole step before every so many operations, so that other load on the machine meets both
    due = [number * len(operations) // options.trials for number in range(options.trials)]
    rows: list[Row] = []
    trials: list[Mapping[str, float]] = []
    for number, operation in enumerate(operations):
        trials += [step() for _ in range(due.count(number))]
        rows += measure_operation(operation, machine, options.trials)
    whole = {quantity: common.Sample(tuple(trial[quantity] for trial in trials)) for quantity in trials[0]}
    kinds = summarise(rows, whole, step.learner.batch.accumulation, step.update_bytes)
    layers = {row.name: as_result(row, limits, machine) for row in rows}
    show(config, rows, layers)
    if world.device.type == "cuda":
        show_norms(config, rows)
    show_summary(config, kinds, whole)
    if compiles(config, world.device):
        say(
            "The step is compiled, which fuses operations; what that saves makes 'everything else' less, even negative."
        )
    results = {"layers": layers, "summary": as_results(kinds), "step": whole, "limits": limits}
    common.write_report(options.json, "layers", config, world, results)
    return 0


class WholeStep:
    """The configuration's training step on random images; a call is one timed step, and the update alone."""

    def __init__(self, config: Config, world: World, machine: Machine) -> None:
        self.device = world.device
        self.learner = build_measured(config, world)
        side = image_side(config)
        layout = torch.channels_last if config.enable_nhwc else torch.contiguous_format
        images = torch.randn(config.batch_size, 3, side, side, device=self.device)
        self.images = images.contiguous(memory_format=layout)
        self.labels = torch.randint(config.num_classes, (config.batch_size,), device=self.device)
        for _ in range(STEPS_TO_WARM_UP + capture_steps(config, self.device)):
            self._train()
        with on_capture_stream(self.device, graphed=machine.graphed):
            self.update = Case(self.learner.optimizer.step, machine)  # with the last step's gradients

    def __call__(self) -> Mapping[str, float]:
        """Milliseconds of a step ("step") and of the update alone ("update"); on a CPU also those that the step's
        processors were in the kernel of the system ("system"), and its page faults ("faults")."""
        in_system, faults = system_seconds(), page_faults()
        step = common.time_action(self.device, self._train)
        in_system, faults = system_seconds() - in_system, page_faults() - faults
        set_learning_rate(self.learner.optimizer, 0.0)  # so that the weights stay
        found = {"step": 1e3 * step, "update": self.update()["milliseconds"]}
        return found | ({"system": 1e3 * in_system, "faults": faults} if self.device.type == "cpu" else {})

    def _train(self) -> None:
        self.learner.train(self.images, self.labels)

    @property
    def update_bytes(self) -> float:
        """Weights and what the optimizer keeps of them read and written, gradients read."""
        optimizer, total = self.learner.optimizer, 0
        for parameter in (parameter for group in optimizer.param_groups for parameter in group["params"]):
            kept = [value for value in optimizer.state[parameter].values() if isinstance(value, torch.Tensor)]
            total += 3 * parameter.nbytes + sum(2 * value.nbytes for value in kept)
        return total


def page_faults() -> int:
    """Of this process, those that needed no disk."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt


def measure_ceilings(machine: Machine) -> dict[str, common.Sample]:
    """Those that bound the configuration's operations, by the names of `limits`."""
    name, device = machine.format, machine.device
    dtype = DTYPES.get(name, torch.float32)  # tf32 as the configuration has set it
    return {
        f"product {name}, TFLOP/s": product(device, dtype, 3),
        f"convolution {name} NHWC, TFLOP/s": convolution(device, dtype, 3),
        "memory, GB/s": memory(device, 3),
    }


def as_result(row: Row, limits: Mapping[str, common.Sample], machine: Machine) -> dict[str, Any]:
    """A row for the report; `share` is the bound's share of the time that the configuration's way took."""
    work, sample = row.work[row.own], row.milliseconds[row.own]
    peak = measured_peak({name: value.median for name, value in limits.items()}, machine.format)
    assert peak is not None
    arithmetic, moved = work.flops / 1e9 / peak, work.bytes / 1e6 / limits["memory, GB/s"].median
    bound, name = max((arithmetic, "arithmetic"), (moved, "memory"))
    achieved, unit = rate(work, sample.median)
    best = row.milliseconds[row.best]
    return {
        "milliseconds": sample, "count": row.operation.count, "way": row.own, "rate": achieved, "unit": unit,
        "best": {"way": row.best, "milliseconds": best, "rate": rate(row.work[row.best], best.median)[0]},
        "ways": dict(row.milliseconds), "at_least": bound, "bound": name, "share": bound / sample.median,
        "kernels": name_kernels(row.kernels), "is_reference": any(kernel.is_reference for kernel in row.kernels),
    }  # fmt: skip


def show(config: Config, rows: Sequence[Row], layers: Mapping[str, Mapping[str, Any]]) -> None:
    """The table of operations, and the names of what oneDNN computes with its reference kernels."""
    on_onednn = any(row.kernels for row in rows)
    lines = []
    for row in rows:
        result = layers[row.name]
        best = "=" if row.best == row.own else f"{result['best']['rate']:.3g} {row.best}"
        kernels = f"{result['kernels'] or '-'}{' REFERENCE' if result['is_reference'] else ''}"
        lines.append(
            (row.name, str(row.operation.count), f"{result['milliseconds']:.3g}", f"{result['rate']:.3g}", best,
             f"{result['at_least']:.3g}", *([kernels] if on_onednn else []))
        )  # fmt: skip
    print_table(
        f"{config.model}, each operation alone: median (min-max) in ms; TFLOP/s, or GB/s where there is no arithmetic",
        (rows[0].own, "times", "ms", "rate", "best rate alone", "at least, ms",
         *(["oneDNN's kernel"] if on_onednn else [])),
        lines,
    )  # fmt: skip
    if slow := [row.name for row in rows if layers[row.name]["is_reference"]]:
        say(f"oneDNN computes with a reference kernel: {'; '.join(slow)}")


def show_norms(config: Config, rows: Sequence[Row]) -> None:
    """BatchNorm on a GPU: its kernels beside each other, in the configuration's layout."""
    norms, layout = [row for row in rows if row.operation.kind == NORM], "NHWC" if config.enable_nhwc else "NCHW"
    if not norms:
        return
    kernels = [way for way in norms[0].milliseconds if f"{layout}, " in way]
    ways = [norms[0].own, *kernels]
    lines = [
        (row.name, *(f"{row.milliseconds[way].median:.3g}" if way in row.milliseconds else "-" for way in ways))
        for row in norms
    ]
    columns = ["as configured", *(way.replace(f" {layout}", "") for way in kernels)]
    print_table(f"BatchNorm's kernels, {layout}: median in ms", (norms[0].own, *columns), lines)
