"""Runs each case in its own process, so that its switches, caches and memory cannot affect another."""

import signal
import traceback
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from functools import partial
from multiprocessing import get_context
from typing import Any

from utils.errors import ExpectedError
from utils.program import end_with_parent

Trial = Callable[..., Mapping[str, float]]
_built: list[Trial] = []  # in such a process: its case


@contextmanager
def process(build: Callable[..., Trial]) -> Iterator[Callable[..., Trial]]:
    """Start a process for one case, which imports what `build` needs meanwhile.

    Yields a function that calls `build` there with its arguments and returns a function that runs the case's trials.
    Both raise the case's errors, and `ExpectedError` if the process dies."""
    with ProcessPoolExecutor(1, get_context("spawn"), _begin) as pool:
        pool.submit(_import, build)

        def call(function: Callable[..., Any], *values: Any) -> Any:
            try:
                return pool.submit(function, *values).result()
            except BrokenProcessPool:
                raise ExpectedError(
                    "a measuring process ended: its output above says why, or it was killed, as if out of memory; "
                    "lower batch_size"
                ) from None

        def build_there(*arguments: Any) -> Trial:
            call(_build, build, *arguments)
            return partial(call, _run)

        yield build_there


def _begin() -> None:
    end_with_parent(signal.SIGKILL)
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # the parent reports an interruption


def _import(build: Callable[..., Trial]) -> None:
    """Import the module of `build`: a process does so when it receives the function."""


def _build(build: Callable[..., Trial], *arguments: Any) -> None:
    with _shown():
        _built.append(build(*arguments))


def _run(*arguments: Any) -> Mapping[str, float]:
    with _shown():
        return _built[0](*arguments)


@contextmanager
def _shown() -> Iterator[None]:
    """Print a bug's traceback here, since not every exception can be sent to the parent."""
    try:
        yield
    except ExpectedError:
        raise
    except Exception:
        traceback.print_exc()
        raise
