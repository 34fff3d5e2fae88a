"""Whether a step is compiled, whether a compiler is here, and which steps use our own layers and CPU kernels."""

import logging
import os
import shutil
import sysconfig
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import torch

from utils.errors import ConfigError
from utils.training.config import Auto, SpeedConfig

HEADER = "cpu_kernels.h"
# Inductor disables both optimisations for its own kernels, which are vectorised explicitly. Without the first flag
# comparisons are not vectorised; it reorders no sum. The second is gcc's only: clang vectorises by default.
FLAGS = ("-fno-trapping-math", "-ftree-loop-vectorize")
Compiled = TypeVar("Compiled", bound=Callable[..., Any])


def compiles(config: SpeedConfig, device: torch.device) -> bool:
    """COMPILE: whether the step will be compiled."""
    wanted = config.enable_compile == "auto" and device.type == "cuda" and config.parallel != "dataparallel"
    return config.enable_compile is True or (wanted and not missing_compiler(device))


def compile_for_shapes(function: Compiled, number: int) -> Compiled:
    """COMPILE: return a function or module compiled at its first call with each of `number` shapes of images.

    Dynamo runs further shapes eagerly once a function's code has been compiled `recompile_limit` times, 8 by default,
    which all learners of the process share. So the limit is raised by as many as will be needed.
    """
    torch._dynamo.config.recompile_limit += number
    compiled: Any = torch.compile(function, dynamic=False)
    return compiled


def missing_compiler(device: torch.device) -> str:
    """Name the tool that torch.compile needs on this device and does not find, with the remedy; empty if none.

    Inductor's CPU kernels and Triton's launchers are built as Python modules.
    """
    cpp = os.environ.get("CXX", "g++")
    if shutil.which(cpp) is None:
        return f"a C++ compiler, but {cpp} is not found; install one, name yours in the environment variable CXX"
    header = Path(sysconfig.get_path("include", "posix_prefix"), "Python.h")
    if not header.exists():
        return f"Python's headers, but {header} is not found; install python3-dev"
    c_compilers = [os.environ["CC"]] if "CC" in os.environ else ["gcc", "clang"]
    if device.type == "cuda" and not any(map(shutil.which, c_compilers)):
        named = " or ".join(c_compilers)
        return f"a C compiler too, but {named} is not found; install one, name yours in the environment variable CC"
    return ""


@cache
def has_compiler() -> bool:
    """Whether CPU kernels can be built here."""
    return not missing_compiler(torch.device("cpu"))


def build_kernels(source: Path, key: str) -> Any:
    """Return the ctypes library built from a C++ file, the kernels of the setting `key`; `ConfigError` if there is no
    compiler or it fails. PyTorch's Inductor calls the compiler and caches the library, as for a compiled step."""
    if missing := missing_compiler(torch.device("cpu")):
        raise ConfigError(f"{key} needs {missing}")
    from torch._inductor.codecache import CppCodeCache

    # it warns about a CUDA toolkit without a GPU, which is irrelevant here
    logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)
    # as one text: Inductor decides by its hash whether to build it
    header = Path(__file__).with_name(HEADER)
    code = source.read_text().replace(f'#include "{HEADER}"', header.read_text())
    try:
        try:
            return CppCodeCache.load(code, extra_flags=FLAGS)
        except RuntimeError:
            return CppCodeCache.load(code, extra_flags=FLAGS[:1])
    except (RuntimeError, OSError) as error:
        lines = [line.strip() for line in str(error).splitlines() if "error" in line.lower()] or [str(error)]
        raise ConfigError(
            f"{key}: its kernels could not be built: {lines[-1]}; repair the compiler or the folder that "
            "TORCHINDUCTOR_CACHE_DIR names, or do without the setting"
        ) from error


def use_layers(asked: Auto, config: SpeedConfig, device: torch.device, replace: Callable[[], None]) -> list[str]:
    """Call `replace`, which puts our own layers into a network, if the value `asked` of a setting wants it: always if
    true; if auto, for eager steps over NHWC memory on a CPU. Return notes for the log.

    Where `replace` cannot, it raises `ConfigError` before it changes the network. Auto then leaves PyTorch's layers.
    """
    here = device.type == "cpu" and config.enable_nhwc and not compiles(config, device)
    if asked is False or (asked == "auto" and not here):
        return []
    try:
        replace()
    except ConfigError as error:
        if asked is True:
            raise
        return [f"skipped: {error}"]
    return []


def wants_graphs(config: SpeedConfig, device: torch.device) -> bool:
    """Whether the step will be a CUDA graph; a graph cannot span the GPUs of dataparallel."""
    return config.enable_cuda_graphs is not False and device.type == "cuda" and config.parallel != "dataparallel"
