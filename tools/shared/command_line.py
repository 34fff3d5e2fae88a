"""Command-line options that several commands share. No torch, so that --help is fast."""

import argparse
import math
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from utils.base_config import as_yaml
from utils.config.command_line import not_empty
from utils.errors import ConfigError
from utils.program import Parser, command


def new_parser(name: str, documentation: str | None, exit_status: str = "") -> argparse.ArgumentParser:
    """Return the parser of `python -m tools.NAME`. Its --help shows the module's docstring and the exit statuses."""
    return Parser(
        prog=command(name), description=documentation, epilog=exit_status and f"Exit status: {exit_status}",
        formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False,
    )  # fmt: skip


def add_count(parser: argparse.ArgumentParser, option: str, default: int, meaning: str, least: int = 1) -> None:
    """Add an option that takes a whole number from `least` on."""
    parse, help_text = partial(at_least, least=least), f"{meaning} (default: {default})"
    parser.add_argument(option, type=parse, default=default, metavar="N", help=help_text)


def at_least(text: str, least: int) -> int:
    """Parse a whole number from `least` on, for argparse."""
    if not text.isdecimal() or int(text) < least:
        raise argparse.ArgumentTypeError(f"is {text!r}; expected a whole number from {least} on")
    return int(text)


at_least_one = partial(at_least, least=1)


def path_argument(text: str) -> Path:
    """Parse a path that is not empty, for argparse."""
    return Path(not_empty(text))


def above_zero(text: str, unit: str) -> float:
    """Parse a finite number above 0, for argparse."""
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not 0 < number < math.inf:
        raise argparse.ArgumentTypeError(f"is {text!r}; expected {unit}, more than 0")
    return number


seconds, minutes = partial(above_zero, unit="seconds"), partial(above_zero, unit="minutes")


def read_counts(option: str, text: str) -> list[int]:
    """Parse whole numbers above 0, separated by commas."""
    parts = text.split(",")
    if not all(part.strip().isdecimal() and int(part) > 0 for part in parts):
        raise ConfigError(f"{option} {text}: expected whole numbers of at least 1, such as 1,2,4")
    return [int(part) for part in parts]


def as_settings(values: Mapping[str, Any]) -> list[str]:
    """Return KEY=VALUE for each, for --set."""
    return [f"{key}={as_yaml(value)}" for key, value in values.items()]
