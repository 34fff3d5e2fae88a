"""Output of the commands: tables for the terminal, and files that are written completely or not at all."""

import sys
import tempfile
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from utils.errors import ConfigError
from utils.files import strict_json, write_atomically

FILE_WIDTH = 160  # characters of a table that goes into a file or pipe


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


def printable(text: str, encoding: str = "utf-8") -> str:
    """Replace characters that cannot be encoded, as in a folder's name that is not UTF-8, by backslash sequences."""
    return text.encode(encoding, "backslashreplace").decode(encoding)


def make_folder(path: Path) -> None:
    """Create a folder for results. Raises `ConfigError` if that is impossible."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"{path}: cannot hold results: {error.strerror}; choose another with --out") from None


def check_writable(option: str, path: Path | None) -> None:
    """Raise `ConfigError` if the file that an option names cannot be written. Changes nothing."""
    if path is None:
        return
    if path.is_dir():
        raise ConfigError(f"{option} {path}: is a folder; expected a file")
    try:
        if path.exists() and not path.is_file():  # a pipe or a device
            path.open("ab").close()
        else:
            tempfile.TemporaryFile(dir=path.resolve().parent).close()
    except OSError as error:
        raise ConfigError(f"{option} {path}: cannot be written: {error.strerror}; choose another file") from None


def write_file(path: Path, content: bytes) -> None:
    """Write the complete file or nothing. Pipes, devices such as /dev/stdout and links are written in place."""
    if path.is_symlink() or (path.exists() and not path.is_file()):
        path.write_bytes(content)
    else:
        write_atomically(path, content)


def write_json(path: Path, value: Any, default: Callable[[Any], Any] | None = None) -> None:
    """Write indented JSON; `default` converts values without a JSON form."""
    write_file(path, (strict_json(value, indent=1, default=default) + "\n").encode())
