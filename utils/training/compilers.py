"""Whether a step is compiled, whether what torch.compile calls is here, and our own kernels for CPUs, built with it."""

import logging
import os
import shutil
import sysconfig
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import torch

from utils.errors import ConfigError
from utils.training.keys import SpeedKeys

# Inductor switches both off for its own kernels, which name their vectors. Without the first no comparison is
# vectorised; no sum changes its order. The second is gcc's: clang vectorises without.
FLAGS = ("-fno-trapping-math", "-ftree-loop-vectorize")


def compiles(keys: SpeedKeys, device: torch.device) -> bool:
    """COMPILE: whether the step will be compiled."""
    wanted = keys.enable_compile == "auto" and device.type == "cuda" and not missing_compiler(device)
    return keys.enable_compile is True or wanted


def missing_compiler(device: torch.device) -> str:
    """What torch.compile would call on this device and does not find, with the remedy; empty where it works.

    Inductor's kernels for CPUs and what launches Triton's are modules of Python.
    """
    cpp = os.environ.get("CXX", "g++")
    if shutil.which(cpp) is None:
        return f"a C++ compiler, and {cpp} is not found; install one, name it in the environment variable CXX"
    header = Path(sysconfig.get_path("include", "posix_prefix"), "Python.h")
    if not header.exists():
        return f"Python's headers, and {header} is not found; install python3-dev"
    c_compilers = [os.environ["CC"]] if "CC" in os.environ else ["gcc", "clang"]
    if device.type == "cuda" and not any(map(shutil.which, c_compilers)):
        named = " or ".join(c_compilers)
        return f"a C compiler too, and {named} is not found; install one, name it in the environment variable CC"
    return ""


@cache
def has_compiler() -> bool:
    """Whether there is what builds kernels for CPUs."""
    return not missing_compiler(torch.device("cpu"))


def build_kernels(source: Path, key: str) -> Any:
    """The library of the functions in a C++ file, which `key` switches on, for ctypes. PyTorch's Inductor calls the
    compiler and keeps what it made in its cache, as for a compiled step. `ConfigError` where the compiler fails."""
    from torch._inductor.codecache import CppCodeCache

    # which warns of a CUDA toolkit beside no GPU, of which nothing is used here
    logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)
    code = source.read_text()
    try:
        try:
            return CppCodeCache.load(code, extra_flags=FLAGS)
        except RuntimeError:
            return CppCodeCache.load(code, extra_flags=FLAGS[:1])
    except (RuntimeError, OSError) as error:
        lines = [line.strip() for line in str(error).splitlines() if "error" in line.lower()] or [str(error)]
        raise ConfigError(
            f"{key}: its kernels could not be built: {lines[-1]}; use {key} false, or mend the "
            "compiler, or the folder that TORCHINDUCTOR_CACHE_DIR names"
        ) from error


def failure_to_build(build: Callable[[], Any], asked: object) -> str:
    """Why kernels could not be built that a key asks for with auto; empty where they are. Raises where it is true."""
    try:
        build()
    except ConfigError as error:
        if asked is True:
            raise
        return f"left out: {error}"
    return ""
