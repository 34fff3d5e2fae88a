"""The code's folder, the commands that start its programs, from a checkout or installed, and this process."""

import ctypes
import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

CODE = Path(__file__).resolve().parent.parent  # holds train.py, config/, tools/ ...
INSTALLED = not (CODE / "pyproject.toml").exists()
PR_SET_PDEATHSIG = 1


def command(name: str) -> list[str]:
    """Return the command that a user types for `train` or for the tool `name`."""
    if INSTALLED:
        return ["resnet50-at-scale", name]
    return ["python", "train.py"] if name == "train" else ["python", "-m", f"tools.{name}"]


def module_command(name: str) -> list[str]:
    """Return the command that starts the tool `name` in another process with the same Python."""
    return [sys.executable, "-m", *(["resnet50_at_scale", name] if INSTALLED else [f"tools.{name}"])]


def end_with_parent(number: int) -> None:
    """Have the kernel send this process the signal `number` when its parent ends, even if that is killed."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, number)


@contextmanager
def frozen_objects() -> Iterator[None]:
    """Keep the objects that exist now from Python's garbage collection during the `with` block.

    A full collection visits every object, and those of the imports and the data are many, stay to the end and would
    stall a step for tenths of a second. Automatic collection of newer objects stays on. Otherwise reference cycles that
    a dataset makes would fill the memory, also in a loader's workers, which inherit the collector's settings.
    """
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
