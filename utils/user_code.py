"""User code, named in a configuration as `package.module:function`. Imports no torch.

Modules are searched on Python's path, then in the working directory; a module there must not have the name of another
module that Python finds first. An exception in user code becomes an error of two lines: the cause and the user's line.
"""

import difflib
import hashlib
import importlib
import importlib.util
import inspect
import linecache
import os
import sys
import sysconfig
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from textwrap import shorten
from typing import Any

from utils.errors import ConfigError, ExpectedError, explain
from utils.program import CODE

OWN_FORM = "package.module:function"
OWN_PATTERN = r"^[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*$"
OUR_NAMES = ("api", "config", "models", "tools", "train", "train_simple", "utils")
LIBRARIES = ("site-packages", "dist-packages")


def is_user_code(name: str) -> bool:
    """Whether a key's value names code outside this project: `package.module:function` or another form with a colon."""
    return ":" in name


def call(key: str, name: str, error: type[ExpectedError], **arguments: Any) -> Any:
    """Call the user's function `name`, the value of `key`, and return its result.

    Raises `ConfigError` if there is no such function or it does not take the arguments, and `error` if it raises."""
    function = find_function(key, name)
    try:
        inspect.signature(function).bind(**arguments)
    except TypeError as refusal:
        given = ", ".join(f"{argument}=..." for argument in arguments)
        raise ConfigError(f"{key} {name}: is called with {given}: {refusal}\n{_definition(function)}") from None
    except ValueError:  # a function that is not written in Python may have no signature
        pass
    with user_code_errors(f"{key} {name}", error):
        return function(**arguments)


def find_function(key: str, name: str) -> Callable[..., Any]:
    """Import the module of the function `name`, the value of `key`, and return the function. Raises `ConfigError`."""
    what, (module_name, _, function_name) = f"{key} {name}", name.partition(":")
    here = os.getcwd()
    if here not in sys.path:
        sys.path.append(here)  # last, so that no file there shadows a library
    _refuse_shadowed(what, module_name.partition(".")[0], Path(here))
    with user_code_errors(f"{what} cannot be imported", ConfigError):
        try:
            module = importlib.import_module(module_name)
        except ModuleNotFoundError as error:
            if f"{module_name}.".startswith(f"{error.name}."):
                raise ConfigError(
                    f"{what}: there is no module {error.name}\n"
                    f"modules are searched on Python's path, then in the working directory {here}"
                ) from None
            raise
    function = getattr(module, function_name, None)
    if callable(function):
        return function
    others = [other for other, value in vars(module).items() if callable(value)]
    near = difflib.get_close_matches(function_name, others, n=1, cutoff=0.5)
    problem = "no function of this name" if function is None else f"{function_name} of type {type(function).__name__}"
    remedy = f"did you mean {near[0]!r}?" if near else "expected the name of a function"
    raise ConfigError(f"{what}: {getattr(module, '__file__', None) or module} has {problem}; {remedy}")


def _refuse_shadowed(what: str, top: str, here: Path) -> None:
    """Raise `ConfigError` if Python would import another module than the one in the working directory."""
    if top in OUR_NAMES:
        raise ConfigError(
            f"{what}: {top} is a module of this program; rename yours to something other than {', '.join(OUR_NAMES)}"
        )
    candidates = [path for path in (here / top / "__init__.py", here / f"{top}.py") if path.is_file()]
    try:
        specification = importlib.util.find_spec(top)
    except ValueError:  # the module runs as __main__
        return
    origin = specification.origin if specification is not None else None
    if candidates and origin is not None and not any(os.path.realpath(origin) == str(p.resolve()) for p in candidates):
        raise ConfigError(f"{what}: Python finds another module {top} ({origin}) before {candidates[0]}; rename yours")


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
    synthetic = str(path).startswith("<")  # code without a file, such as the import machinery
    return not (ours or synthetic or {*LIBRARIES} & {*path.parts} or path.is_relative_to(sysconfig.get_path("stdlib")))


def _definition(function: Callable[..., Any]) -> str:
    code = getattr(inspect.unwrap(function), "__code__", None) or getattr(function.__init__, "__code__", None)  # type: ignore[misc]
    if code is None:
        return "it is not written in Python"
    line = linecache.getline(code.co_filename, code.co_firstlineno).strip()
    return f"{code.co_filename}:{code.co_firstlineno}: {line}"


def user_file_digests(*names: str) -> dict[str, str]:
    """Return {file: SHA-256}, for the run's record, of the user code among these values: of the module's file, or of
    all Python files of its package."""
    digests: dict[str, str] = {}
    for name in filter(is_user_code, names):
        module, package = (sys.modules.get(name.partition(end)[0].partition(":")[0]) for end in ":.")
        folders = [folder for folder in getattr(package, "__path__", []) if _is_users(Path(folder))]
        files = [file for folder in folders for file in _python_files(folder)]
        if not files and module is not None and module.__file__:
            files = [module.__file__]
        digests |= {file: _digest(file) for file in files}
    return digests


def _python_files(folder: str) -> Iterator[str]:
    """Yield the Python files of a package, except those in hidden folders and in a virtual environment's libraries."""
    for parent, folders, files in os.walk(folder):
        folders[:] = sorted(name for name in folders if not name.startswith(".") and name not in LIBRARIES)
        yield from (os.path.join(parent, name) for name in sorted(files) if name.endswith(".py"))


def _digest(file: str) -> str:
    try:
        return hashlib.sha256(Path(file).read_bytes()).hexdigest()
    except OSError as error:  # a file that nothing imports may be a broken link
        return f"not recorded: {error.strerror}"
