"""Weak and strong scaling over processes of one machine; each trial is a torchrun.

Strong: constant global batch; weak: the global batch grows with the processes. Protocol of DLPerf: the first steps do
not count, several interleaved trials, median. Speed-up: images/s relative to the fewest processes. Efficiency: speed-up
over the ratio of processes. Communication: the fraction of a step that disappears when gradients are not averaged.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import islice
from pathlib import Path
from statistics import median
from typing import Any

from torch import Tensor

from tools.bench import common
from tools.bench.reports import VERSIONS, read_report
from tools.bench.training import build_measured, capture_steps
from tools.shared.command_line import add_count, read_counts
from tools.shared.output import print_table, write_json
from utils.config import Config
from utils.data.build import Loaders, build_loaders, open_dataset
from utils.data.workers import usable_cores
from utils.distributed.global_batch import divide_batch
from utils.distributed.launch import torchrun_here
from utils.distributed.world import World
from utils.errors import ConfigError, ExpectedError
from utils.program import CODE
from utils.run.logging.environment import describe_environment
from utils.training.batches import prefetch
from utils.training.learner import Learner
from utils.training.validation import validate

MODES = ("strong", "weak")
ROUNDS = 3  # of alternating steps with and without communication
COMPARED = ("commit", *VERSIONS, "threads")

Records = defaultdict[tuple[str, int], defaultdict[str, list[float]]]  # {(mode, processes): {quantity: its trials}}
Conditions = tuple[dict[str, Any], dict[str, Any]]  # configuration and environment of a trial


def add_arguments(parser: argparse.ArgumentParser) -> None:
    common.add_arguments(parser, config="bs128-opt", trials=5)
    parser.add_argument("--nproc", default="1,2", metavar="N,M", help="numbers of processes (default: 1,2)")
    parser.add_argument("--mode", default=",".join(MODES), metavar="A,B", help=f"default: {','.join(MODES)}")
    add_count(parser, "--steps", 60, "steps of a trial that count")
    add_count(parser, "--dropped", 20, "steps before them", least=0)
    parser.add_argument(
        "--add", type=Path, action="append", default=[], metavar="PATH", help="add the trials of an earlier report"
    )


def run(options: argparse.Namespace) -> int:
    config = common.read_config(options)
    cases = cases_of(config, read_counts("--nproc", options.nproc), options.mode.split(","))
    most = max(number for _, number in cases)
    records: Records = defaultdict(lambda: defaultdict(list))
    conditions = [add_report(records, path) for path in options.add]
    for trial in range(options.trials):
        for (mode, processes), case in cases.items():
            values, environment = run_once(case, processes, most, options.steps, options.dropped)
            for quantity, value in values.items():
                records[mode, processes][quantity].append(value)
            conditions.append((config.model_dump(mode="json"), environment))
            check_comparable(conditions)
            speed = values["train_images_per_sec"]
            print(f"trial {trial + 1} of {options.trials}, {mode}, {processes}: {speed:.1f} images/s", file=sys.stderr)
    results = summarise(records)
    show(config, results)
    if options.json:
        common.write_results(options.json, "scaling", config, results, environment=environment)
    return 0


def cases_of(config: Config, processes: Sequence[int], modes: Sequence[str]) -> dict[tuple[str, int], Config]:
    """Return the configuration of every (mode, processes). Raises `ConfigError` if a batch cannot be split."""
    unknown = [mode for mode in modes if mode not in MODES]
    if unknown:
        raise ConfigError(f"--mode {unknown[0]}: allowed: {', '.join(MODES)}")
    cases = {}
    for mode in modes:
        for number in processes:
            batch_size = config.batch_size * (number if mode == "weak" else 1)
            divide_batch(batch_size, number, config.micro_batch_size)
            cases[mode, number] = Config(**config.model_dump() | {"batch_size": batch_size})
    return cases


def run_once(
    config: Config, processes: int, most: int, steps: int, dropped: int
) -> tuple[dict[str, float], dict[str, Any]]:
    """Run one trial under torchrun; return its values and its environment.

    On a CPU each process represents a device. It gets the cores that each has with `most` processes.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "record.json"
        command, rendezvous = torchrun_here(processes, Path(folder) / "rendezvous")
        command += [__file__, config.model_dump_json(), str(steps), str(dropped), str(path)]
        threads = str(max(1, usable_cores() // most))
        environment = {"OMP_NUM_THREADS": threads} | os.environ | rendezvous
        # the code comes before the working directory, whose files may have the names of our modules
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, [str(CODE), os.environ.get("PYTHONPATH")]))
        ended = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        if ended.returncode or not path.exists():
            errors = [line for line in ended.stderr.splitlines() if line.startswith("error: ")]
            reason = errors[0] if errors else ended.stderr[-2000:]
            raise ExpectedError(f"a run with {processes} processes failed: {reason}")
        return json.loads(path.read_text(encoding="utf-8"))


def check_comparable(conditions: Sequence[Conditions]) -> None:
    """Raise `ConfigError` with the first setting or version in which two runs differ."""
    first_config, first_environment = conditions[0]
    for config, environment in conditions[1:]:
        settings = sorted(first_config.keys() | config.keys())
        compared = [(key, first_config.get(key), config.get(key)) for key in settings]
        compared += [(key, first_environment.get(key), environment.get(key)) for key in COMPARED]
        for key, one, other in compared:
            if one != other:
                found = f"{key} is {one} in one and {other} in another"
                raise ConfigError(f"runs that differ cannot be compared: {found}; measure one of them again")


def summarise(records: Records) -> dict[str, dict[str, Any]]:
    """Return {"strong 2": {quantity: trials, and its speed-up and efficiency by medians}}."""
    results: dict[str, dict[str, Any]] = {}
    for (mode, processes), trials in sorted(records.items()):
        fewest = min(number for other, number in records if other == mode)
        values: dict[str, Any] = {name: common.Trials(tuple(found)) for name, found in trials.items()}
        for what in ("train", "epoch"):
            name = f"{what}_images_per_sec"
            values[f"{what}_speed_up"] = values[name].median / median(records[mode, fewest][name])
            values[f"{what}_efficiency"] = values[f"{what}_speed_up"] * fewest / processes
        results[f"{mode} {processes}"] = values
    return results


def show(config: Config, results: Mapping[str, Mapping[str, Any]]) -> None:
    """Print the tables."""
    for what, description in (("train", "training steps only"), ("epoch", "whole epoch: loader, metrics, validation")):
        rows = []
        for name, values in results.items():
            share = values.get("communication_share")
            row = [name, f"{values[f'{what}_images_per_sec']:.0f}", f"{values[f'{what}_speed_up']:.2f}"]
            row.append(f"{100 * values[f'{what}_efficiency']:.0f} %")
            rows.append([*row, f"{100 * share.median:.1f} %" if share and what == "train" else "-"])
        title = f"{config.model}, batch {config.batch_size} (weak: of each process), {description}"
        print_table(title, ("processes", "images/s", "speed-up", "efficiency", "communication"), rows)


def add_report(records: Records, path: Path) -> Conditions:
    """Add the trials of an earlier report to the records; return the conditions of its runs."""
    report = read_report(path)
    if report.bench != "scaling":
        raise ConfigError(f"--add {path}: a report of `bench {report.bench}`; expected one of `bench scaling`")
    for name, values in report.results.items():
        mode, processes = name.split()
        for quantity, trials in values.items():
            if isinstance(trials, dict):  # no speed-up or efficiency
                records[mode, int(processes)][quantity] += trials["values"]
    return report.config, report.environment


# ---- one rank of a trial, under torchrun


def measure_rank(config: Config, world: World, steps: int, dropped: int) -> dict[str, float]:
    """Collective: measure a training step with and without communication, and images/s of a whole epoch."""
    loaders = build_loaders(config, open_dataset(config, world), world)
    images, labels = next(iter(loaders.train))
    cases = {"ddp": build_measured(config, world)}
    if world.world_size > 1:
        silent = Config(**config.model_dump() | {"parallel": "no_communication"})
        cases["no_communication"] = build_measured(silent, world)
    for learner in cases.values():
        _time_steps(learner, images, labels, world, max(dropped, capture_steps(config, world.device)))
    seconds: dict[str, list[float]] = {name: [] for name in cases}
    for _ in range(ROUNDS):
        for name, learner in cases.items():
            seconds[name].append(_time_steps(learner, images, labels, world, -(-steps // ROUNDS)))
    medians = {name: median(values) for name, values in seconds.items()}
    record = {
        "step_seconds": medians["ddp"],
        "train_images_per_sec": config.batch_size / medians["ddp"],
        "epoch_images_per_sec": _time_epoch(cases["ddp"], loaders, config, world, steps),
    }
    if world.world_size > 1:
        record["communication_share"] = 1 - medians["no_communication"] / medians["ddp"]
    return record


def _time_steps(learner: Learner, images: Tensor, labels: Tensor, world: World, steps: int) -> float:
    """Return the seconds per step of the slowest rank."""
    world.barrier()
    started = time.perf_counter()
    for _ in range(steps):
        learner.train_step(images, labels)
    common.synchronize(world.device)
    world.barrier()
    return max(world.all_gather((time.perf_counter() - started) / max(1, steps)))


def _time_epoch(learner: Learner, loaders: Loaders, config: Config, world: World, steps: int) -> float:
    """Return training images/s over at most `steps` batches of the loader, including metrics and validation."""
    world.barrier()
    started = time.perf_counter()
    loaders.train.set_epoch(0)
    batches = 0
    for images, labels in prefetch(config, iter(loaders.train), world.device):
        learner.train_step(images, labels)
        batches += 1
        if batches == steps:
            break
    learner.sums.average(world)
    learner.average_buffers(world)
    loaders.valid.set_epoch(0)
    number = max(1, len(loaders.valid) * batches // len(loaders.train))  # the same fraction as was trained
    validate(learner, islice(loaders.valid, number), world).average(world)
    return batches * config.batch_size / max(world.all_gather(time.perf_counter() - started))


def main(arguments: Sequence[str]) -> int:
    """Measure as one of the ranks that `run_once` started; returns the exit status.

    `arguments`: the configuration as JSON, steps, steps that do not count, the record's path."""
    config, steps, dropped = Config(**json.loads(arguments[0])), int(arguments[1]), int(arguments[2])

    def action(world: World) -> None:
        values = measure_rank(config, world, steps, dropped)
        environment = describe_environment(world.device, world.world_size)
        if world.is_main:
            write_json(Path(arguments[3]), [values, environment])

    return common.on_all_ranks(config, action)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
