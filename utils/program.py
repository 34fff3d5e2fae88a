"""The code's folder, the commands that start its programs, from a checkout or installed, and this process's end."""

import ctypes
import sys
from pathlib import Path

VERSION = "0.1.0"
CODE = Path(__file__).resolve().parent.parent  # holds train.py, config/, tools/ ...
TRAIN = CODE / "train.py"
INSTALLED = not (CODE / "pyproject.toml").exists()
PR_SET_PDEATHSIG = 1


def command(name: str) -> str:
    """Return the command that a user types for `train` or for the tool `name`."""
    if INSTALLED:
        return f"resnet50-at-scale {name}"
    return "python train.py" if name == "train" else f"python -m tools.{name}"


def module_command(name: str) -> list[str]:
    """Return the command that starts the tool `name` in another process with the same Python."""
    return [sys.executable, "-m", *(["resnet50_at_scale", name] if INSTALLED else [f"tools.{name}"])]


def end_with_parent(number: int) -> None:
    """Have the kernel send this process the signal `number` when its parent ends, even if that is killed."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, number)
