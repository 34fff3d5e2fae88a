"""Code that several commands share: options, tables, files that are written completely or not at all, and figures. It
imports no torch, so that --help is fast."""

import argparse
import io
import json
import math
import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from utils.base_config import as_yaml
from utils.config.command_line import not_empty
from utils.errors import ConfigError, DataError
from utils.files import strict_json, write_atomically
from utils.program import command

VERSIONS = ("python", "torch", "torchvision", "cuda", "cudnn", "device")  # equal in figures that may be compared
FILE_WIDTH = 160  # characters of a table that goes into a file or pipe
# Okabe and Ito's colours, which colour-blind readers can distinguish
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#8C564B")


def new_parser(name: str, documentation: str | None, exit_status: str = "") -> argparse.ArgumentParser:
    """Return the parser of `python -m tools.NAME`. Its --help shows the module's docstring and the exit statuses."""
    return argparse.ArgumentParser(
        prog=command(name), description=documentation, epilog=f"Exit status: {exit_status}" if exit_status else None,
        formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False,
    )  # fmt: skip


def add_count(parser: argparse.ArgumentParser, option: str, default: int, meaning: str, least: int = 1) -> None:
    """Add an option that takes a whole number from `least` on."""
    parse, help_text = partial(at_least, least=least), f"{meaning} (default: {default})"
    parser.add_argument(option, type=parse, default=default, metavar="N", help=help_text)


def at_least(text: str, least: int) -> int:
    if not text.isdecimal() or int(text) < least:
        raise argparse.ArgumentTypeError(f"is {text!r}; expected a whole number from {least} on")
    return int(text)


def path_argument(text: str) -> Path:
    return Path(not_empty(text))


def above_zero(text: str) -> float:
    if not 0 < (number := float(text)) < math.inf:
        raise argparse.ArgumentTypeError(f"is {text!r}; expected a number above 0")
    return number


def counts(text: str) -> list[int]:
    """Parse whole numbers from 1 on, separated by commas, for argparse."""
    return [at_least(part.strip(), 1) for part in text.split(",")]


def as_settings(values: Mapping[str, Any]) -> list[str]:
    """Return KEY=VALUE for each, for --set."""
    return [f"{key}={as_yaml(value)}" for key, value in values.items()]


def print_table(title: str, columns: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Print a table, plain if the output is a file. The first column is text, the others are numbers."""
    from rich.console import Console
    from rich.table import Table

    table = Table(title=title, title_justify="left")
    # print names such as [red] or :smile: unchanged
    console = Console(width=None if getattr(sys.stdout, "isatty", bool)() else FILE_WIDTH, markup=False, emoji=False)
    for number, column in enumerate(columns):
        table.add_column(column, justify="right" if number else "left")
    for row in rows:
        table.add_row(*row)
    with console.capture() as capture:
        console.print(table)
    print(capture.get().removesuffix("\n"))


def make_folder(path: Path, option: str = "--out") -> None:
    """Create a folder for results, which `option` names. Raises `ConfigError` if that is impossible."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"{path}: cannot hold results: {error.strerror}; choose another with {option}") from None


def check_writable(option: str, path: Path | None) -> None:
    """Raise `ConfigError` if the file that an option names cannot be written. Changes nothing."""
    if path and (path.is_dir() or not os.access(path if path.exists() else path.absolute().parent, os.W_OK)):
        raise ConfigError(f"{option} {path}: cannot be written; choose a file in an existing folder")


def write_file(path: Path, content: bytes) -> None:
    """Write the complete file or nothing. Pipes, devices such as /dev/stdout and links are written in place."""
    if path.is_symlink() or (path.exists() and not path.is_file()):
        path.write_bytes(content)
    else:
        write_atomically(path, content)


def write_json(path: Path, value: Any, default: Callable[[Any], Any] | None = None) -> None:
    """Write indented JSON; `default` converts values without a JSON form."""
    write_file(path, (strict_json(value, indent=1, default=default) + "\n").encode())


def read_report(path: Path) -> dict[str, Any]:
    """Return "bench", "environment", "config" and "results" of a report of tools.bench; `DataError` if it is none."""
    try:
        content: dict[str, Any] = {"bench": "", "environment": {}, "config": {}} | json.loads(path.read_bytes())
        if all(isinstance(content[key], dict) for key in ("results", "environment", "config")):
            return content
        found = "it holds something else"
    except (OSError, ValueError, KeyError, TypeError) as error:
        found = getattr(error, "strerror", "it holds something else")
    raise DataError(f"{path}: not a report of tools.bench --json ({found}); bench COMMAND --json FILE writes one")


def new_figure(size: tuple[float, float] = (5.6, 3.8)) -> tuple[Any, Any]:
    """Return a figure of `size` inches and its axes; needs no display."""
    try:
        from cycler import cycler
        from matplotlib import rc_context
        from matplotlib.figure import Figure
    except ImportError:
        raise ConfigError('matplotlib is missing; install it with: pip install ".[plot]"') from None
    style: Any = {
        "axes.prop_cycle": cycler(color=COLOURS), "axes.grid": True, "grid.alpha": 0.3, "axes.spines.top": False,
        "axes.spines.right": False, "axes.titlesize": 11, "font.size": 9,
    }  # fmt: skip
    with rc_context(style):
        figure = Figure(figsize=size, layout="constrained")
        return figure, figure.subplots()


def save(figure: Any, path: Path) -> None:
    """Write the figure, as SVG if the file's name ends in .svg, else as PNG."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="svg" if path.suffix == ".svg" else "png", dpi=110)
    write_file(path, buffer.getvalue())
