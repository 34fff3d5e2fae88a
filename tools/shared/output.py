"""What the commands write: tables for the terminal, and files that are written whole or not at all."""

import json
import sys
import tempfile
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from utils.errors import ConfigError
from utils.files import write_atomically

FILE_WIDTH = 160  # characters of a table that goes into a file or pipe


def print_table(title: str, columns: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """A table for the terminal; plain where the output is a file. The first column is text, the others numbers."""
    from rich.console import Console
    from rich.table import Table

    table = Table(title=title, title_justify="left")
    # a name such as [red] or :smile: is shown as it is
    console = Console(width=None if sys.stdout.isatty() else FILE_WIDTH, markup=False, emoji=False)
    for number, column in enumerate(columns):
        table.add_column(column, justify="right" if number else "left")
    for row in rows:
        table.add_row(*row)
    with console.capture() as capture:
        console.print(table)
    say(capture.get().removesuffix("\n"))


def say(text: str) -> None:
    """Print, whatever the names in it and the terminal's encoding."""
    print(printable(text, sys.stdout.encoding or "utf-8"), flush=True)


def printable(text: str, encoding: str = "utf-8") -> str:
    """The text, with backslash sequences for what cannot be encoded, such as a folder's name that is no UTF-8."""
    return text.encode(encoding, "backslashreplace").decode(encoding)


def make_folder(path: Path) -> None:
    """Create a folder for results; `ConfigError` where that is impossible."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"{path}: cannot hold results: {error.strerror}; choose another with --out") from None


def check_writable(option: str, path: Path | None) -> None:
    """`ConfigError` where the file that an option names could not be written; nothing changes."""
    if path is None:
        return
    if path.is_dir():
        raise ConfigError(f"{option} {path}: cannot be written: it is a folder")
    try:
        if path.exists() and not path.is_file():  # a pipe or a device
            path.open("ab").close()
        else:
            tempfile.TemporaryFile(dir=path.resolve().parent).close()
    except OSError as error:
        raise ConfigError(f"{option} {path}: cannot be written: {error.strerror}") from None


def write_file(path: Path, content: bytes) -> None:
    """Write the whole file or nothing. A pipe, a device such as /dev/stdout, and what a link leads to stay in place."""
    if path.is_symlink() or (path.exists() and not path.is_file()):
        path.write_bytes(content)
    else:
        write_atomically(path, content)


def write_json(path: Path, value: Any, default: Callable[[Any], Any] | None = None) -> None:
    """Plain JSON, readable; `default` converts what has no JSON form."""
    write_file(path, (json.dumps(value, indent=1, default=default) + "\n").encode())
