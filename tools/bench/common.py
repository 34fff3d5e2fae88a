"""The protocol of every measurement: a warm-up, interleaved trials, median and spread, and a JSON report."""

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tools.shared.command_line import add_count
from tools.shared.output import check_writable, write_json
from utils.config import Config, load_config
from utils.config.command_line import add_config_arguments
from utils.distributed.ranks import run_ranks
from utils.distributed.world import World
from utils.errors import ConfigError
from utils.run.logging.environment import describe_environment


@dataclass(frozen=True)
class Trials:
    """The values of one quantity in the trials of one case, in the order they ran."""

    values: tuple[float, ...]

    @property
    def median(self) -> float:
        return statistics.median(self.values)

    def as_json(self) -> dict[str, Any]:
        """Return median, spread and every value."""
        return {"median": self.median, "min": min(self.values), "max": max(self.values), "values": list(self.values)}

    def __format__(self, spec: str) -> str:
        """Return `median (min-max)`, each number in the format `spec`."""
        return f"{self.median:{spec}} ({min(self.values):{spec}}-{max(self.values):{spec}})"


Results = dict[str, dict[str, Trials]]  # {case: {quantity: trials}}


def measure(
    cases: Mapping[str, Callable[[], Mapping[str, float]]],
    trials: int,
    *,
    warm_up: int = 1,
    after_round: Callable[[Results], bool] = lambda results: True,
    skip_unavailable: bool = False,
) -> Results:
    """Run every case `warm_up` times, then `trials` times that count.

    Trials are interleaved, one of each case after the other, so that a machine that becomes slower affects all cases
    alike. After each round `after_round` gets all results so far; it returns False to end the measurement.
    `skip_unavailable`: report and skip a case whose first trial raises `ConfigError`, unless no other is left.
    """
    seen: dict[str, list[Mapping[str, float]]] = {name: [] for name in cases}
    for trial in range(warm_up + trials):
        for name in list(seen):
            try:
                values = cases[name]()
            except ConfigError as error:
                if not skip_unavailable or trial or len(seen) == 1:
                    raise
                print(f"{name}: skipped: {error}", file=sys.stderr)
                del seen[name]
                continue
            if trial >= warm_up:
                seen[name].append(values)
        if trial >= warm_up and not after_round(_samples(seen)):
            break
    return _samples(seen)


def _samples(seen: Mapping[str, list[Mapping[str, float]]]) -> Results:
    return {
        name: {quantity: Trials(tuple(values[quantity] for values in rows)) for quantity in rows[0]}
        for name, rows in seen.items()
    }


def add_arguments(parser: argparse.ArgumentParser, *, config: str = "default", trials: int = 3) -> None:
    """Add the options that measurements share: configuration, number of trials, report."""
    add_config_arguments(parser, config=config)
    add_count(parser, "--trials", trials, "trials that count")
    parser.add_argument("--json", type=Path, metavar="PATH", help="write figures, configuration and environment here")


def read_config(options: argparse.Namespace) -> Config:
    """Return the configuration that the options name. Raises `ConfigError` if it, or the report's file, is unusable."""
    check_writable("--json", options.json)
    return load_config(options.yaml_config, options.config, options.set)


def on_all_ranks(config: Config, action: Callable[[World], None]) -> int:
    """Run `action` on this rank of the launcher's; returns the exit status."""
    return run_ranks(action, config.device, config.rank_timeout_seconds)


def write_report(path: Path | None, command: str, config: Config, world: World, results: Mapping[str, Any]) -> None:
    """Write `results` and their environment as JSON; only on the main rank, and if there is a path."""
    if path is not None and world.is_main:
        environment = describe_environment(world.device, world.world_size)
        write_results(path, command, config, results, environment=environment)


def write_results(path: Path, command: str, config: Config, results: Mapping[str, Any], **more: Any) -> None:
    """Write a report that `tools.bench.reports` can read."""
    report = {"bench": command, "config": config.model_dump(mode="json"), "results": results, **more}
    write_json(path, report, default=Trials.as_json)


def synchronize(device: torch.device) -> None:
    """Wait until the device has finished its work, so that a clock can be read."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def time_action(device: torch.device, action: Callable[[], object]) -> float:
    """Return the seconds until the action and its work on the device are done. The device must be idle before."""
    synchronize(device)
    started = time.perf_counter()
    action()
    synchronize(device)
    return time.perf_counter() - started
