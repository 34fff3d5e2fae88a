"""User code, named in a configuration as `package.module:function`. Imports no torch.

Modules are searched on Python's path, then in the working directory. An exception in user
code becomes an error of two lines: the cause and the user's line.
"""

import hashlib
import importlib
import sys
import sysconfig
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from textwrap import shorten
from typing import Annotated, Any

from pydantic import Field

from utils.errors import ConfigError, ExpectedError, explain
from utils.program import CODE

TIMM = "timm:"
# values of settings; the title is the form as users write it
OwnCode = Annotated[str, Field(pattern=r"^[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*$", title="package.module:function")]
TimmName = Annotated[str, Field(pattern=r"^timm:[\w.-]+$", title="timm:NAME")]
OUR_NAMES = ("api", "config", "models", "tools", "train", "train_simple", "utils")


def is_user_code(name: str) -> bool:
    """Whether a key's value names code outside this project: `package.module:function` or another form with a colon."""
    return ":" in name


def call(key: str, name: str, error: type[ExpectedError], **arguments: Any) -> Any:
    """Call the user's function `name`, the value of `key`, and return its result.

    Raises `ConfigError` if there is no such function, and `error` if the call raises an exception."""
    what, here = f"{key} {name}", Path.cwd()
    module_name, _, function_name = name.partition(":")
    if str(here) not in sys.path:
        sys.path.append(str(here))  # last, so that no file there shadows a library
    with user_code_errors(
        f"{what} is not on Python's path or in {here}, comes after another module of its name, or cannot be imported",
        ConfigError,
    ):
        function = getattr(importlib.import_module(module_name), function_name)
    with user_code_errors(what, error):
        return function(**arguments)


@contextmanager
def user_code_errors(what: str, kind: type[ExpectedError]) -> Iterator[None]:
    """Turn an exception of the `with` block, in which user code runs, into an error of `kind` with the user's line."""
    try:
        yield
    except (Exception, SystemExit) as error:
        known = explain(error) if isinstance(error, Exception) else None
        if known is not None:
            raise known from None
        message = error.msg if isinstance(error, SyntaxError) else str(error)
        reason = shorten(f"{type(error).__name__}: {message}", 300, placeholder=" ...")
        raise kind(f"{what}: {reason}\n{_place(error)}".rstrip()) from error


def _place(error: BaseException) -> str:
    """Return the innermost line of user code in the traceback as `file:line: text`; empty if there is none."""
    if isinstance(error, SyntaxError) and error.filename:
        return f"{error.filename}:{error.lineno}: {(error.text or '').strip()}"
    users = [frame for frame in traceback.extract_tb(error.__traceback__) if _is_users(Path(frame.filename))]
    return f"{users[-1].filename}:{users[-1].lineno}: {users[-1].line}" if users else ""


def _is_users(path: Path) -> bool:
    ours = path.is_relative_to(CODE) and path.relative_to(CODE).parts[0].removesuffix(".py") in OUR_NAMES
    library = {"site-packages", "dist-packages"} & {*path.parts} or path.is_relative_to(sysconfig.get_path("stdlib"))
    return not (ours or library or str(path).startswith("<"))  # "<": code without a file, as of the import machinery


def user_file_digests(*names: str) -> dict[str, str]:
    """Return {file: SHA-256}, for the run's record, of the user code among these values: of the module's file, and of
    all modules of its package that have been imported."""
    tops = {name.partition(":")[0].partition(".")[0] for name in names if is_user_code(name)}
    modules = [module for name, module in sys.modules.items() if name.partition(".")[0] in tops]
    files = [Path(file) for module in modules if (file := getattr(module, "__file__", None))]
    return {str(file): hashlib.sha256(file.read_bytes()).hexdigest() for file in sorted(files) if _is_users(file)}
