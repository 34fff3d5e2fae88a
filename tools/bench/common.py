"""The protocol of every measurement: interleaved trials, warm-up dropped, median and spread, and a JSON report."""

import argparse
import json
import statistics
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tools.follow import add_config_arguments, check_writable
from utils.config import Config, load_config
from utils.distributed.world import World
from utils.errors import ConfigError
from utils.run.environment import describe_environment

FILE_WIDTH = 160  # characters of a table that goes into a file or pipe


@dataclass(frozen=True)
class Sample:
    """What the trials of one case gave, in the order they ran."""

    values: tuple[float, ...]

    @property
    def median(self) -> float:
        return statistics.median(self.values)

    def as_json(self) -> dict[str, Any]:
        """Median, the whole spread, and every value."""
        return {"median": self.median, "min": min(self.values), "max": max(self.values), "values": list(self.values)}

    def __format__(self, spec: str) -> str:
        """`median (min-max)`, each number in the format `spec`."""
        return f"{self.median:{spec}} ({min(self.values):{spec}}-{max(self.values):{spec}})"


def measure(
    cases: Mapping[str, Callable[[], Mapping[str, float]]], trials: int, *, warm_up: int = 1
) -> dict[str, dict[str, Sample]]:
    """Run every case `warm_up` times unseen, then `trials` times; -> {case: {quantity: sample}}.

    Interleaved: one trial of each case after the other, so that a machine that grows slower or busier in between
    meets all of them alike.
    """
    seen: dict[str, list[Mapping[str, float]]] = {name: [] for name in cases}
    for trial in range(warm_up + trials):
        for name, run in cases.items():
            values = run()
            if trial >= warm_up:
                seen[name].append(values)
    return {
        name: {quantity: Sample(tuple(values[quantity] for values in rows)) for quantity in rows[0]}
        for name, rows in seen.items()
    }


def add_arguments(parser: argparse.ArgumentParser, *, config: str = "default", trials: int = 3) -> None:
    """The options that measurements share: which configuration, how many trials, where the report goes."""
    add_config_arguments(parser, config=config)
    parser.add_argument(
        "--trials", type=int, default=trials, metavar="N", help=f"trials that count (default: {trials})"
    )
    parser.add_argument("--json", type=Path, metavar="PATH", help="write figures, configuration and environment here")


def read_config(options: argparse.Namespace) -> Config:
    """The configuration that the shared options name; `ConfigError` where it, or they, cannot be used."""
    if options.trials < 1:
        raise ConfigError(f"--trials {options.trials}: at least 1")
    check_writable("--json", options.json)
    return load_config(options.yaml_config, options.config, options.set)


def write_report(path: Path | None, command: str, config: Config, world: World, results: Mapping[str, Any]) -> None:
    """`results` with what they were measured on, as JSON; `ConfigError` where the file cannot be written."""
    if path is None or not world.is_main:
        return
    report = {
        "bench": command,
        "environment": describe_environment(world.device, world.world_size),
        "config": config.model_dump(mode="json"),
        "results": results,
    }
    try:
        path.write_text(json.dumps(report, indent=1, default=as_json) + "\n", encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--json {path}: cannot be written: {error.strerror}") from None


def as_json(value: Any) -> Any:
    """For json.dumps: samples as median, range and values."""
    if isinstance(value, Sample):
        return value.as_json()
    raise TypeError(f"{value!r} has no JSON form")


def print_table(title: str, columns: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """A table for the terminal; plain where the output is a file. The first column is text, the others numbers."""
    from rich.console import Console
    from rich.table import Table

    table = Table(title=title, title_justify="left")
    for number, column in enumerate(columns):
        table.add_column(column, justify="right" if number else "left")
    for row in rows:
        table.add_row(*row)
    Console(width=None if sys.stdout.isatty() else FILE_WIDTH).print(table)


def synchronize(device: torch.device) -> None:
    """Wait until the device has done what it was given, so that a clock can be read."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
