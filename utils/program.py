"""The code's folder, the commands that start its programs, from a checkout or installed; a missing compiler."""

import ctypes
import os
import shutil
import sys
import sysconfig
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


def missing_compiler(*, gpu: bool) -> str:
    """Name the tool that torch.compile needs for a GPU or CPU and does not find, with the remedy; empty if none.

    Inductor's CPU kernels and Triton's launchers are built as Python modules.
    """
    cpp = os.environ.get("CXX", "g++")
    if shutil.which(cpp) is None:
        return f"a C++ compiler, but {cpp} is not found; install one, name yours in the environment variable CXX"
    header = Path(sysconfig.get_path("include", "posix_prefix"), "Python.h")
    if not header.exists():
        return f"Python's headers, but {header} is not found; install python3-dev"
    c_compilers = [os.environ["CC"]] if "CC" in os.environ else ["gcc", "clang"]
    if gpu and not any(map(shutil.which, c_compilers)):
        named = " or ".join(c_compilers)
        return f"a C compiler too, but {named} is not found; install one, name yours in the environment variable CC"
    return ""
