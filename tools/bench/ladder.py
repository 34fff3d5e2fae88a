"""The ladder: the speed of each configuration block (rung), by the protocol of DLPerf (github.com/Oneflow-Inc/DLPerf).

Each rung runs in its own process. Trials are interleaved, so that a busier machine affects all rungs alike. After a
warm-up each trial times the step on one batch, the loader by itself, and both together.

A rung is a block, or a block with settings, as in `fastest+enable_compile=false`. Such a rung is compared with its
block, and a line says which of the two is faster on this machine.
"""

import argparse
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

from torch import nn

from models import build_model
from tools.bench import common
from tools.bench.limits import measure_limits
from tools.bench.reports import VERSIONS, differences, read_report
from tools.bench.training import Rung, alone
from tools.bench.workers import Trial, process
from tools.shared.command_line import add_count, minutes, path_argument
from tools.shared.output import check_writable, print_table
from tools.shared.pages.png_plots import draw_bars, new_figure, save
from utils.config import Config, load_config
from utils.data.build import open_dataset
from utils.distributed.world import World
from utils.errors import ConfigError
from utils.run.logging.environment import describe_environment
from utils.training.checks.dry_run import activation_bytes_per_image
from utils.training.metrics.flops import NO_VALUES, flops_per_image, measured_peak, number_format
from utils.training.precision import choose_precision
from utils.user_code import user_code_errors

RUNGS = (
    "bs256,bs256-amp,bs256-amp-nhwc,bs256-amp-nhwc-extra-opts,bs256-amp-nhwc-extra-opts-bf16,"
    "bs256-amp-nhwc-extra-opts-compile,bs256-amp-nhwc-extra-opts-device,bs256-amp-nhwc-extra-opts-graphs,fastest,"
    "fastest+enable_compile=false"  # Inductor's layouts may be slower: pytorch/pytorch#189239
)
# Switches that stay off until they have been measured on a GPU, each next to the block that might use it.
CANDIDATES = (
    "fastest,fastest+enable_compile=false,fastest+amp_dtype=fp16,fastest+stem_channels=4,fastest+stem_channels=8,"
    "record-75,record-75+amp_dtype=fp16,record-75+opt_level=O2,record-75+stem_channels=8,"
    "record-75+cudnn_benchmark=false,record-75+fuse_norm_relu=true,"
    "accuracy,accuracy+amp_dtype=fp16,accuracy+enable_compile=false"
)
LISTS = {"ladder": RUNGS, "candidates": CANDIDATES}
COMPARABLE = (*VERSIONS, "threads", "world_size", "host")
TOLERANCE = 5  # percent; a rung that is slower by more is a regression
# A step moves at least this: each stored activation and its gradient is written once and read once.
TRAFFIC_PER_ACTIVATION = 4


def add_arguments(parser: argparse.ArgumentParser) -> None:
    common.add_arguments(parser, trials=5)
    parser.add_argument(
        "--configs", default="ladder", metavar="A,B,...",
        help=f"rungs, each BLOCK or BLOCK+KEY=VALUE, or a list: {', '.join(LISTS)} (default: ladder: {RUNGS})",
    )  # fmt: skip
    add_count(parser, "--iters", 120, "timed steps of a trial")
    add_count(parser, "--warmup", 20, "steps before them", least=0)
    parser.add_argument(
        "--budget-minutes", type=minutes, default=10.0, metavar="M",
        help="limit of the whole command, kept by fewer steps, then by fewer trials (default: 10)",
    )  # fmt: skip
    parser.add_argument(
        "--baseline", type=Path, metavar="PATH",
        help=f"an earlier report; exit status 1 if a rung is over {TOLERANCE} %% slower, beyond the spread",
    )  # fmt: skip
    parser.add_argument("--plot", type=path_argument, metavar="PATH", help="draw the ladder: .svg, else PNG")


def run(options: argparse.Namespace) -> int:
    """Measure every rung, print the table, write the report; returns 1 if the baseline was faster."""
    until = time.monotonic() + 60 * options.budget_minutes
    common.read_config(options)
    if options.plot:
        new_figure()  # fails now if matplotlib is missing, not after minutes of measuring
        check_writable("--plot", options.plot)
    rungs = LISTS.get(options.configs, options.configs).split(",")
    configs = {name: read_rung(options.yaml_config, name, options.set) for name in rungs}
    first = next(iter(configs.values()))
    world = alone(first)
    environment = describe_environment(world.device, 1)
    baseline = read_baseline(options.baseline, environment, configs) if options.baseline else {}
    limits = measure_limits(world, trials=3)
    with ExitStack() as stack:
        started = start(configs, stack)
        images = {name: per_image(configs[name], world, limits) for name in started}

        def evaluated(samples: common.Results) -> dict[str, dict[str, Any]]:
            """Evaluate the trials so far and write the report."""
            results = {name: evaluate(rows, images[name], limits) for name, rows in samples.items()}
            if options.json:
                saved = {name: configs[name].model_dump(mode="json") for name in results}
                report = {"limits": limits, "rungs": results, "configs": saved, "verdicts": compare_switches(results)}
                common.write_report(options.json, "ladder", first, world, report)
            return results

        results = evaluated(measure(started, options, until, evaluated))
    show(results, environment["device"])
    if options.plot:
        draw(options.plot, results, environment["device"])
    lines, regression = compare_with_baseline(results, baseline)
    lines = [*compare_switches(results).values(), *lines]
    print(*lines, sep="\n", end="\n" if lines else "")
    return int(regression)


def read_rung(yaml_config: Path, name: str, settings: Sequence[str]) -> Config:
    """Return the configuration of a rung, `BLOCK` or `BLOCK+KEY=VALUE`."""
    block, *switches = name.split("+")
    return load_config(yaml_config, block, [*settings, *switches])


def start(configs: Mapping[str, Config], stack: ExitStack) -> dict[str, Trial]:
    """Start a process for each rung; `stack` ends them. They import PyTorch at the same time, and build and compile one
    after the other. Skips rungs that cannot run here."""
    processes: dict[str, ExitStack] = {name: stack.enter_context(ExitStack()) for name in configs}
    builds = {name: own.enter_context(process(Rung)) for name, own in processes.items()}
    rungs: dict[str, Trial] = {}
    for name, config in configs.items():
        try:
            rungs[name] = builds[name](config)
        except ConfigError as error:
            print(f"{name}: skipped: {error}", file=sys.stderr)
            processes[name].close()
    if not rungs:
        raise ConfigError("--configs: none of these rungs can run here; the lines above say why")
    return rungs


def measure(
    rungs: Mapping[str, Trial],
    options: argparse.Namespace,
    until: float,
    after_round: Callable[[common.Results], object],
) -> common.Results:
    """Run the trials. A first short trial of each rung compiles, gives the estimate and does not count.

    `until`: when the budget ends (time.monotonic); `after_round` gets all results after each round of trials."""
    seconds = 0.0
    for name, rung in rungs.items():
        print(f"{name}: first steps", file=sys.stderr)
        rung(max(2, options.warmup), 1)
        seconds += rung(0, 2)["seconds"] / 2
    steps = options.trials * (options.warmup + options.iters)
    fraction = max(0.0, min(1.0, (until - time.monotonic()) / max(1e-9, seconds * steps)))
    warmup, iters = max(1, int(fraction * options.warmup)), max(2, int(fraction * options.iters))
    minutes = seconds * options.trials * (warmup + iters) / 60
    print(f"about {minutes:.1f} minutes: {options.trials} trials of {warmup} + {iters} steps", flush=True)
    began = time.monotonic()

    def another_round_fits(results: common.Results) -> bool:
        """Return whether a round as long as the last one fits into the budget."""
        nonlocal began
        after_round(results)
        now = time.monotonic()
        took, began = now - began, now
        done = len(next(iter(results.values()))["full"].values)
        print(f"trial {done} of {options.trials}: {took:.1f} s", file=sys.stderr)
        fits = now + took <= until
        if not fits and done < options.trials:
            print(f"the budget ends after {done} of {options.trials} trials")
        return fits

    cases = {name: partial(rung, warmup, iters) for name, rung in rungs.items()}
    return common.measure(cases, options.trials, warm_up=0, after_round=another_round_fits)


def per_image(config: Config, world: World, limits: Mapping[str, common.Trials]) -> dict[str, float]:
    """Return a training step's "flops" and "bytes" per image, and "limit", the measured TFLOP/s in its precision."""
    precision = choose_precision(config, world.device)
    shape = open_dataset(config, world).train.image_shape
    model = build_model(config, shape[-1]).to(world.device)
    precision.cast_weights(model)
    moved = TRAFFIC_PER_ACTIVATION * activation_bytes_per_image(model, nn.CrossEntropyLoss(), precision, shape)
    medians = {name: sample.median for name, sample in limits.items()}
    limit = measured_peak(medians, number_format(precision, config))
    assert limit is not None, "limits are measured in every number format of this device"
    with user_code_errors(f"model {config.model}: {NO_VALUES}", ConfigError):
        flops = flops_per_image(model, shape)
    return {"flops": flops, "bytes": moved, "limit": limit}


def evaluate(
    samples: Mapping[str, common.Trials], image: Mapping[str, float], limits: Mapping[str, common.Trials]
) -> dict[str, Any]:
    """Return the trials with TFLOP/s and the fractions of the hardware limits."""
    teraflops = samples["full"].median * image["flops"] / 1e12
    return {
        **samples,
        "tflops": teraflops,
        "arithmetic_share": teraflops / image["limit"],
        "memory_share": samples["full"].median * image["bytes"] / 1e9 / limits["memory, GB/s"].median,
    }


def show(results: Mapping[str, Mapping[str, Any]], device: str) -> None:
    """Print images/s of loader, step and both, and the fractions of the hardware limits."""
    first = next(iter(results.values()))["full"].median
    columns = (
        "rung", "full, images/s", "speed-up", "step only", "loader only", "TFLOP/s", "arithmetic", "memory", "GB",
    )  # fmt: skip
    rows = [
        (
            name,
            f"{values['full']:,.1f}",
            f"{values['full'].median / first:.2f}",
            f"{values['compute'].median:,.1f}",
            f"{values['io'].median:,.0f}",
            f"{values['tflops']:.2f}",
            f"{values['arithmetic_share']:.0%}",
            f"{values['memory_share']:.0%}",
            f"{values['memory'].median / 1e9:.1f}",
        )
        for name, values in results.items()
    ]
    print_table(f"{device}: median (min-max); arithmetic and memory: fractions of the measured limits", columns, rows)


def read_baseline(
    path: Path, environment: Mapping[str, Any], configs: Mapping[str, Config]
) -> dict[str, dict[str, float]]:
    """Return {rung of `configs`: {"median", "min", "max"}} of an earlier report. Raises `ConfigError` if it is not
    comparable."""
    report = read_report(path)
    if report.bench != "ladder":
        raise ConfigError(f"--baseline {path}: a report of `bench {report.bench}`; expected one of `bench ladder`")
    before, rungs, saved = report.environment, report.results["rungs"], report.results["configs"]
    if different := differences(before, environment, COMPARABLE):
        raise ConfigError(f"--baseline {path}: was measured elsewhere: {', '.join(different)}; measure it again here")
    for name, config in configs.items():
        values, saved_values = config.model_dump(mode="json"), saved.get(name, {})
        changed = [key for key in values if saved_values.get(key) != values[key]]
        if saved_values and changed:
            raise ConfigError(f"--baseline {path}: {name} differs in {', '.join(changed)}; measure it again")
    found = {name: values["full"] for name, values in rungs.items() if name in configs}
    if not found:
        raise ConfigError(f"--baseline {path}: has none of these rungs, only {', '.join(rungs)}; choose with --configs")
    return found


def compare_switches(results: Mapping[str, Mapping[str, Any]]) -> dict[str, str]:
    """Return {rung with settings: a line}. The rung or its block wins if all its trials are faster than the other's."""
    verdicts = {}
    for name, values in results.items():
        block, *switches = name.split("+")
        if not switches or block not in results:
            continue
        ours, theirs = values["full"], results[block]["full"]
        ratio = f"{ours.median / theirs.median:.3f} x {block}"
        if len(ours.values) == 1:
            verdicts[name] = f"{name}: {ratio}: one trial does not decide, give more --budget-minutes"
        elif min(ours.values) > max(theirs.values):
            verdicts[name] = f"{name}: {ratio}: wins here, use {' '.join(f'--set {switch}' for switch in switches)}"
        elif max(ours.values) < min(theirs.values):
            verdicts[name] = f"{name}: {ratio}: loses here, leave {block} as it is"
        else:
            verdicts[name] = f"{name}: {ratio}: no difference beyond the spread"
    return verdicts


def compare_with_baseline(
    results: Mapping[str, Mapping[str, Any]], baseline: Mapping[str, Mapping[str, float]]
) -> tuple[list[str], bool]:
    """Return a line for each rung of the baseline, and whether one regressed: its median fell by more than TOLERANCE
    percent and all its trials are slower than all earlier ones, or it was skipped."""
    lines = []
    for name, before in baseline.items():
        if name not in results:
            lines.append(f"{name}: in the baseline, skipped now: REGRESSION")
            continue
        now = results[name]["full"]
        change = 100 * (now.median / before["median"] - 1)
        slower = change < -TOLERANCE and max(now.values) < before["min"]
        lines.append(f"{name}: {change:+.1f} % against the baseline{' REGRESSION' if slower else ''}")
    return lines, any(line.endswith("REGRESSION") for line in lines)


def draw(path: Path, results: Mapping[str, Mapping[str, Any]], device: str) -> None:
    """Draw a bar for each rung with the spread of its trials."""
    samples = {name: values["full"] for name, values in results.items()}
    spread = [
        [sample.median - min(sample.values) for sample in samples.values()],
        [max(sample.values) - sample.median for sample in samples.values()],
    ]
    figure, axes = new_figure(size=(8.5, 1.4 + 0.42 * len(samples)))
    draw_bars(axes, {name: sample.median for name, sample in samples.items()}, device, spread)
    save(figure, path)
