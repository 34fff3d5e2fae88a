"""Forecast throughput and efficiency beyond the machine at hand, from a step measured on one GPU.

    python -m tools.bench ladder --json BENCH.json
    python -m tools.predict_scaling --from BENCH.json --gpus 8,16,64,1024,4096 --gpus-per-node 8 --intra 240 --inter 100
    python -m tools.predict_scaling --published        # the same model against published measurements

The model is in tools/shared/scaling_model.py, its assumptions and its errors in docs/scaling.md.
"""

import argparse
import json
import math
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from tools.bench.reports import rates, read_report
from tools.shared.command_line import add_count, new_parser, path_argument, read_counts
from tools.shared.output import check_writable
from tools.shared.scaling_model import BACKWARD_SHARE, Cluster, Forecast, MeasuredStep, extremes, make_buckets, predict
from utils.config import Config, load_config
from utils.errors import ConfigError, DataError, ExpectedError, exit_in_a_line
from utils.program import CODE

PUBLISHED = CODE / "results/reference/published_scaling.json"
MAX_INTERVAL = 0.4  # of efficiency; a forecast with a wider interval says nothing
BYTES = 4  # of a gradient: DistributedDataParallel reduces float32, under autocast too


@dataclass(frozen=True)
class ForecastRow:
    """A forecast, and the interval of its efficiency when its uncertain inputs vary."""

    forecast: Forecast
    low: float
    high: float


@dataclass(frozen=True)
class PublishedCase:
    """A published efficiency and its forecast, both relative to the GPUs that the publication compares with."""

    name: str
    device: str
    published: float
    predicted: float
    low: float
    high: float
    seen: bool  # whether the model was compared with this figure while it was made

    @property
    def error(self) -> float:
        """Forecast minus published efficiency, in points."""
        return 100 * (self.predicted - self.published)

    @property
    def inside(self) -> bool:
        """True if the published figure, rounded to 0.1 %, lies within the forecast's interval."""
        return round(self.low, 3) <= round(self.published, 3) <= round(self.high, 3)


@exit_in_a_line
def main(argv: Sequence[str] | None = None) -> int:
    """Print the forecast; returns the exit status."""
    options = parser().parse_args(argv)
    if options.published:
        if not PUBLISHED.exists():
            raise ConfigError("--published: an installed program has no published figures; run it in a checkout")
        print(
            "\n".join(["used for the model:", published_table(seen=True), "", "not used:", published_table(seen=False)])
        )
        return 0
    if options.source is None:
        raise ConfigError("--from is missing; give a report of tools.bench, or --published")
    check_writable("--plot", options.plot)
    gpus = read_counts("--gpus", options.gpus)
    work, described = read_work(options.source)
    machine = read_machine(options)
    weak = [forecast_row(work, count, machine) for count in gpus]
    strong = [forecast_row(work, count, machine, work.batch / count) for count in gpus if count <= work.batch]
    print("\n".join([described, *assumptions(work, machine), "", *table("weak", weak), "", *table("strong", strong)]))
    if options.plot:
        plot(options.plot, weak, strong)
        print(f"\nplot: {options.plot}")
    return 0


def parser() -> argparse.ArgumentParser:
    default = Cluster()
    parser = new_parser("predict_scaling", __doc__)
    parser.add_argument(
        "--from", dest="source", type=Path, metavar="BENCH.json", help="a report of tools.bench, measured on one GPU"
    )
    parser.add_argument("--gpus", default="8,16,64,1024,4096", metavar="N,M", help="for how many GPUs")
    add_count(parser, "--gpus-per-node", default.gpus_per_node, "GPUs of each node")
    for option, value, unit, meaning in (
        ("--intra", default.intra / 1e9, "GB/s", "bandwidth of an all-reduce within a node"),
        ("--inter", default.inter / 1e9, "GB/s", "bandwidth of one node to the others, all network cards together"),
        ("--input", math.inf, "IMG/s", "what a node's loaders deliver"),
        ("--hop", default.intra_latency * 1e6, "us", "latency of a hop within a node; PCIe: 5.7"),
        ("--memory", default.memory / 1e12, "TB/s", "bandwidth of a GPU's memory"),
        ("--copies", default.copies, "N", "passes over the gradients; 6 if DDP copies them into its buckets"),
    ):
        parser.add_argument(option, type=float, default=value, metavar=unit, help=f"{meaning} (default: {value:g})")
    parser.add_argument("--plot", type=path_argument, metavar="FILE", help="draw both curves: .svg, else PNG")
    parser.add_argument("--published", action="store_true", help="only compare the model with published measurements")
    return parser


def read_machine(options: argparse.Namespace) -> Cluster:
    """Return the cluster that the command line describes."""
    for name in ("intra", "inter", "input", "hop", "memory", "copies"):
        if not getattr(options, name) > 0:  # NaN too
            raise ConfigError(f"--{name.replace('_', '-')} {getattr(options, name)}: expected a number above 0")
    return Cluster(
        gpus_per_node=options.gpus_per_node,
        intra=options.intra * 1e9,
        inter=options.inter * 1e9,
        input_rate=options.input,
        intra_latency=options.hop / 1e6,
        memory=options.memory * 1e12,
        copies=options.copies,
    )


def read_work(path: Path) -> tuple[MeasuredStep, str]:
    """Return the fastest step in a report of tools.bench, and a line that describes it."""
    report = read_report(path)
    alone = {name: rate for name, rate in rates(report).items() if rate.ranks == 1 and rate.training}
    if not alone:
        raise DataError(f"{path}: a forecast needs images/s of training on one GPU; this report has none")
    chosen = max(alone, key=lambda name: alone[name].images_per_sec)
    try:
        measured = alone[chosen].config or {}
        # drop settings that only an earlier version had
        config = Config.model_validate({key: measured[key] for key in measured if key in Config.model_fields})
    except ValidationError as error:
        first = error.errors()[0]
        problem = ": ".join([*map(str, first["loc"][:1]), first["msg"]])
        found = f"the configuration of {chosen} does not fit this version: {problem}"
        raise DataError(f"{path}: {found}; measure it again") from None
    rate, batch = alone[chosen].images_per_sec, config.batch_size
    buckets = make_buckets(layer_costs(config))
    device = report.environment.get("device", "one device")
    described = f"measured: {chosen}, {rate:,.0f} images/s with batch {batch} on {device} ({path})"
    return MeasuredStep(batch / rate, batch, buckets), described


def layer_costs(config: Config | str) -> list[tuple[int, float]]:
    """Return (bytes of gradients, multiplications) of each layer in forward order.

    `config`: a configuration, or the network of a published case: resnet50-cifar, resnet50-imagenet, unet3d.
    """
    if config == "unet3d":
        layers = json.loads(PUBLISHED.read_text(encoding="utf-8"))["unet3d"]["values"]
        weights = [(given * made * 64, made, side) for given, made, side in layers]
        return [(BYTES * (size + made), float(size * side**3)) for size, made, side in weights]
    import torch
    import torchvision
    from torch.utils.flop_counter import FlopCounterMode

    from models import build_model
    from utils.data.build import image_side
    from utils.data.datasets.folders import IMAGENET_SIZE
    from utils.training.metrics.flops import NO_VALUES
    from utils.user_code import user_code_errors

    side = IMAGENET_SIZE  # also of data that are on another machine
    if isinstance(config, Config):
        with suppress(ExpectedError):
            side = image_side(config)
    with torch.device("meta"):  # shapes without memory
        if config == "resnet50-imagenet":
            model = torchvision.models.resnet50()
        elif config == "resnet50-cifar":
            model, side = build_model(load_config(CODE / "config/cifar100.yaml", "bs128")), 32
        else:
            assert isinstance(config, Config)
            model = build_model(config, side)
    reads_values = user_code_errors(f"the network {NO_VALUES}", ConfigError)
    with reads_values, FlopCounterMode(display=False) as counter:
        model(torch.zeros(1, 3, side, side, device="meta"))
    flops, root = counter.get_flop_counts(), type(model).__name__
    sizes = [(name, sum(p.numel() for p in m.parameters(recurse=False))) for name, m in model.named_modules()]
    return [(BYTES * size, sum(flops.get(f"{root}.{name}", {}).values()) / 2) for name, size in sizes if size]


def forecast_row(work: MeasuredStep, gpus: int, machine: Cluster, batch_per_gpu: float | None = None) -> ForecastRow:
    """Return a forecast with its interval."""
    low, high = (predict(work, gpus, end, batch_per_gpu=batch_per_gpu).efficiency for end in extremes(machine))
    return ForecastRow(predict(work, gpus, machine, batch_per_gpu=batch_per_gpu), low, high)


def assumptions(work: MeasuredStep, machine: Cluster) -> list[str]:
    """Return the lines that state what the forecast assumes."""
    gradients = sum(bucket.size for bucket in work.buckets)
    limited = math.isfinite(machine.input_rate)
    feed = f"at most {machine.input_rate:,.0f} images/s per node" if limited else "no limit"
    return [
        "assumed:",
        f"  {gradients / 1e6:.1f} MB of float32 gradients in {len(work.buckets)} buckets; backward is "
        f"{BACKWARD_SHARE:.0%} of the step; a gradient is ready when its layer's multiplications are done",
        f"  {machine.gpus_per_node} GPUs per node; all-reduce {machine.intra / 1e9:g} GB/s and "
        f"{machine.intra_latency * 1e6:g} us per hop in a node, {machine.inter / 1e9:g} GB/s between nodes, "
        f"{machine.inter_latency * 1e6:g} us per network hop",
        f"  a GPU computes {machine.interference:.1%} slower while it communicates; {machine.copies:g} more passes "
        f"over the gradients at {machine.memory / 1e12:g} TB/s",
        f"  a rank's step varies by {machine.noise:.1%} of the measured step (standard deviation), independently; all "
        "wait for the slowest",
        f"  input: {feed}; no step is shorter than {machine.floor * 1e3:g} ms, the time to launch its kernels",
        "  interval: from all inputs unfavourable to all favourable: bandwidth 0.5 to 1.25 x, noise 2 to 0 x, "
        "interference 40 % to none, the host's work for DDP exposed (4.8 ms, as for ResNet50) or hidden, launches 10 "
        "ms or free",
    ]


def table(kind: str, rows: Sequence[ForecastRow]) -> list[str]:
    """Return the lines of a table with a row for each forecast."""
    held = {"weak": "constant batch per GPU", "strong": "constant global batch"}[kind]
    heading = "  GPUs  batch/GPU     step, ms      images/s  efficiency (interval)        limited by"
    lines = [f"{kind} scaling ({held})", heading]
    for row in rows:
        point = row.forecast
        limit = point.limit if row.high - row.low <= MAX_INTERVAL else "unknown: the model does not apply"
        lines.append(
            f"{point.gpus:6,}  {point.batch_per_gpu:9.4g}  {point.step * 1e3:11.2f}  {point.images_per_sec:12,.0f}"
            f"  {point.efficiency:10.1%} ({row.low:6.1%} to {row.high:6.1%})  {limit}"
        )
    return lines


@cache
def read_published() -> list[tuple[dict[str, Any], MeasuredStep, Cluster]]:
    """Return the published measurements, each with the inputs of its forecast."""
    return [
        (
            case,
            MeasuredStep(case["step_ms"] / 1e3, case["batch"], make_buckets(layer_costs(case["model"]))),
            replace(Cluster(), **case["machine"]),
        )
        for case in json.loads(PUBLISHED.read_text(encoding="utf-8"))["cases"]
    ]


@cache
def published_cases() -> list[PublishedCase]:
    """Return each published measurement with its forecast and the forecast's interval."""
    cases = []
    for case, work, machine in read_published():
        reference = case.get("reference", 1)  # GPUs that the published efficiency is relative to
        predicted, low, high = (
            predict(work, case["gpus"], variant, batch_per_gpu=case.get("batch_per_gpu")).efficiency
            / predict(work, reference, variant).efficiency
            for variant in (machine, *extremes(machine))
        )
        seen = case.get("seen", True)
        cases.append(PublishedCase(case["name"], case["device"], case["published"], predicted, low, high, seen))
    return cases


def published_table(seen: bool) -> str:
    """Return a Markdown table of published and predicted efficiencies. `seen`: of the figures used for the model."""
    lines = [
        "| measurement | device | published | predicted (interval) | error, points | within |",
        "|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {case.name} | {case.device} | {case.published:.1%} "
        f"| {case.predicted:.1%} ({case.low:.1%} to {case.high:.1%}) | {case.error:+.1f} "
        f"| {'yes' if case.inside else 'no'} |"
        for case in published_cases()
        if case.seen is seen
    ]
    return "\n".join(lines)


def plot(path: Path, weak: Sequence[ForecastRow], strong: Sequence[ForecastRow]) -> None:
    """Draw throughput and efficiency against GPUs. Raises `ConfigError` if matplotlib is missing."""
    from tools.shared.pages.png_plots import new_figure, save

    figure, (left, right) = new_figure(2)
    for name, rows in (("weak", weak), ("strong", strong)):
        gpus = [row.forecast.gpus for row in rows]
        left.plot(gpus, [row.forecast.images_per_sec for row in rows], marker="o", label=name)
        right.plot(gpus, [100 * row.forecast.efficiency for row in rows], marker="o", label=name)
        right.fill_between(gpus, [100 * row.low for row in rows], [100 * row.high for row in rows], alpha=0.2)
    ideal = weak[0].forecast.images_per_sec / weak[0].forecast.efficiency / weak[0].forecast.gpus
    gpus = [row.forecast.gpus for row in weak]
    left.plot(gpus, [ideal * count for count in gpus], linestyle="--", color="gray", label="ideal")
    left.set(xscale="log", yscale="log", xlabel="GPUs", ylabel="images/s", title="Forecast of throughput")
    right.set(xscale="log", xlabel="GPUs", ylabel="efficiency, %", ylim=(0, 105), title="Forecast of efficiency")
    for axes in (left, right):
        axes.legend(frameon=False)
    save(figure, path)


if __name__ == "__main__":
    sys.exit(main())
