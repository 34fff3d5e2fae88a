"""The ladder: the speed of each configuration block (rung), by the protocol of DLPerf (github.com/Oneflow-Inc/DLPerf).

Each rung runs in its own process. Trials are interleaved, so that a busier machine affects all rungs alike. After a
warm-up each trial times the step on one batch, the loader by itself, and both together.

A rung is a block, or a block with settings, as in `fastest+enable_compile=false`.
"""

import argparse
import re
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from torch import nn

from models import build_model
from tools.bench import common
from tools.bench.common import Rung, alone
from tools.bench.limits import measure_limits
from tools.common import COLOURS, VERSIONS, check_writable, new_figure, path_argument, print_table, read_report, save
from utils.config import Config, load_config
from utils.data.build import open_dataset
from utils.distributed.world import World
from utils.environment import describe_environment
from utils.errors import ConfigError
from utils.training.checks.dry_run import activation_bytes_per_image
from utils.training.metrics.flops import flops_per_image, measured_peak
from utils.training.plan import make_plan
from utils.user_code import user_code_errors

RUNGS = (
    "bs256,bs256-amp,bs256-amp-nhwc,bs256-amp-nhwc-extra-opts,bs256-amp-nhwc-extra-opts-bf16,"
    "bs256-amp-nhwc-extra-opts-compile,bs256-amp-nhwc-extra-opts-device,bs256-amp-nhwc-extra-opts-graphs,fastest,"
    "fastest+enable_compile=false"  # eager kernels may be faster
)
COMPARABLE = (*VERSIONS, "threads", "world_size", "host")
COLUMNS = ("rung", "full, images/s", "speed-up", "step only", "loader only", "TFLOP/s", "arithmetic", "memory", "GB")
TOLERANCE = 5  # percent; a rung that is slower by more is a regression
# A step moves at least this: each stored activation and its gradient is written once and read once.
TRAFFIC_PER_ACTIVATION = 4
Row = Mapping[str, common.Trials]  # {quantity or limit: its trials}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    common.add_arguments(parser, iters=60, warmup=10)
    rungs = "rungs, each BLOCK or BLOCK+KEY=VALUE (default: %(default)s)"
    parser.add_argument("--configs", default=RUNGS, metavar="A,B,...", help=rungs)
    earlier = f"an earlier report; exit status 1 if a rung is over {TOLERANCE} %% slower, beyond the spread"
    parser.add_argument("--baseline", type=path_argument, metavar="PATH", help=earlier)
    parser.add_argument("--plot", type=path_argument, metavar="PATH", help="draw the ladder: .svg, else PNG")


def run(options: argparse.Namespace) -> int:
    common.read_config(options)
    if options.plot:
        new_figure()  # fails now if matplotlib is missing, not after minutes of measuring
        check_writable("--plot", options.plot)
    names = re.split(r",(?![^\[]*\])", options.configs)  # not at the commas of a list [...]
    configs = {name: read_rung(options.yaml_config, name, options.set) for name in names}
    first = configs[names[0]]
    world = alone(first)
    environment = describe_environment(world.device, 1)
    baseline = read_baseline(options.baseline, environment, configs) if options.baseline else {}
    limits = measure_limits(world, trials=3)
    images, results, plans = dict[str, dict[str, float]](), dict[str, dict[str, Any]](), dict[str, Any]()
    builds = {name: partial(Rung, config, options.warmup, options.iters) for name, config in configs.items()}
    with common.in_processes(builds, plans) as cases:
        for samples in common.measure(cases, options.trials):
            for name, rows in samples.items():
                images[name] = images.get(name) or per_image(configs[name], world, limits)
                results[name] = evaluate(rows, images[name], limits)
            saved = {name: configs[name].model_dump(mode="json") for name in results}
            report = {"limits": limits, "rungs": results, "configs": saved}
            common.write_report(options.json, "ladder", first, world, report, plans)
    show(results, environment["device"])
    if options.plot:
        draw({name: values["full"] for name, values in results.items()}, environment["device"], options.plot)
    lines = compare_with_baseline(results, baseline)
    print(*lines, sep="\n", end="\n" if lines else "")
    return int(any(line.endswith("REGRESSION") for line in lines))


def read_rung(yaml_config: Path, name: str, settings: Sequence[str]) -> Config:
    """Return the configuration of a rung, `BLOCK` or `BLOCK+KEY=VALUE`."""
    block, *switches = name.split("+")
    return load_config(yaml_config, block, [*settings, *switches])


def per_image(config: Config, world: World, limits: Row) -> dict[str, float]:
    """Return a training step's "flops" and "bytes" per image, and "limit", the measured TFLOP/s in its precision."""
    precision = make_plan(config, world).precision
    shape = open_dataset(config, world).train.image_shape
    model = build_model(config, shape[-1]).to(world.device)
    precision.cast_weights(model)
    moved = TRAFFIC_PER_ACTIVATION * activation_bytes_per_image(model, nn.CrossEntropyLoss(), precision, shape)
    medians = {name: sample.median for name, sample in limits.items()}
    limit = measured_peak(medians, precision.number_format)
    assert limit is not None, "limits are measured in every number format of this device"
    with user_code_errors(f"model {config.model}: cannot be run on tensors without values", ConfigError):
        flops = flops_per_image(model, shape)
    return {"flops": flops, "bytes": moved, "limit": limit}


def evaluate(samples: Row, image: Mapping[str, float], limits: Row) -> dict[str, Any]:
    """Return the trials with TFLOP/s and the fractions of the hardware limits."""
    tflops, gigabytes = (samples["full"].median * amount for amount in (image["flops"] / 1e12, image["bytes"] / 1e9))
    shares = tflops / image["limit"], gigabytes / limits["memory, GB/s"].median
    return {**samples, "tflops": tflops, "arithmetic_share": shares[0], "memory_share": shares[1]}


def show(results: Mapping[str, Mapping[str, Any]], device: str) -> None:
    """Print images/s of loader, step and both, and the fractions of the hardware limits."""
    first = next(iter(results.values()))["full"].median
    rows = [
        (name, f"{values['full']:,.1f}", f"{values['full'].median / first:.2f}", f"{values['compute'].median:,.1f}",
         f"{values['io'].median:,.0f}", f"{values['tflops']:.2f}", f"{values['arithmetic_share']:.0%}",
         f"{values['memory_share']:.0%}", f"{values['memory'].median / 1e9:.1f}")
        for name, values in results.items()
    ]  # fmt: skip
    print_table(f"{device}: median (min-max); arithmetic, memory: fractions of the measured limits", COLUMNS, rows)


def draw(rates: Row, title: str, path: Path) -> None:
    """Draw a bar of each rung's median images/s, with its spread and its speed relative to the first."""
    figure, axes = new_figure(size=(8.5, 1.4 + 0.42 * len(rates)))
    medians = [trials.median for trials in rates.values()]
    spread = [[abs(choose(t.values) - t.median) for t in rates.values()] for choose in (min, max)]
    bars = axes.barh(list(rates), medians, xerr=spread, color=COLOURS[0], height=0.65, capsize=3)
    axes.bar_label(bars, [f"{rate:,.0f}  ({rate / medians[0]:.2f}x)" for rate in medians], padding=4, fontsize=9)
    axes.invert_yaxis()
    axes.grid(axis="y", visible=False)
    axes.set(xlabel="images/s", title=title, xlim=(0, 1.25 * max(medians)))
    save(figure, path)


def read_baseline(path: Path, environment: dict[str, Any], configs: dict[str, Config]) -> dict[str, dict[str, float]]:
    """Return {rung: {"median", "min", "max"}} of an earlier report; `ConfigError` if it is not comparable."""
    report = read_report(path)
    before, (rungs, saved) = report["environment"], (report["results"].get(key, {}) for key in ("rungs", "configs"))
    found = {name: rungs[name]["full"] for name in configs if name in rungs}
    differing = [f"{key} {before.get(key)}" for key in COMPARABLE if before.get(key) != environment.get(key)]
    for name in found:
        settings = configs[name].model_dump(mode="json").items()
        differing += [f"{key} of {name}" for key, value in settings if saved[name].get(key) != value]
    if differing or not found:
        problem = f"was measured with another {', '.join(differing)}" if differing else "has none of these rungs"
        raise ConfigError(f"--baseline {path}: {problem}; measure it again here")
    return found


def compare_with_baseline(results: dict[str, dict[str, Any]], baseline: dict[str, dict[str, float]]) -> list[str]:
    """Return a line for each rung of the baseline, with REGRESSION at its end if its median fell by more than TOLERANCE
    percent and all its trials are slower than all earlier ones, or it was skipped."""
    lines = [f"{name}: skipped now: REGRESSION" for name in baseline if name not in results]
    for name in baseline.keys() & results.keys():
        now, before = results[name]["full"], baseline[name]
        percent = 100 * (now.median / before["median"] - 1)
        slower = percent < -TOLERANCE and max(now.values) < before["min"]
        lines.append(f"{name}: {percent:+.1f} % against the baseline{': REGRESSION' if slower else ''}")
    return sorted(lines)
