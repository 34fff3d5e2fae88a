"""Build and call our own C++ kernels for CPUs."""

import ctypes
import logging
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from utils.errors import ConfigError
from utils.program import missing_compiler

HEADER = "cpu_kernels.h"
# Inductor disables both optimisations for its own kernels, which are vectorised explicitly. Without the first flag
# comparisons are not vectorised; it reorders no sum. The second is gcc's only: clang vectorises by default.
FLAGS = ("-fno-trapping-math", "-ftree-loop-vectorize")
SETTINGS = {"norm_relu": "fuse_norm_relu", "winograd": "cpu_kernels [winograd]"}  # of each library
Argument = Tensor | int | float | None


@cache
def build(name: str) -> Any:
    """Return the ctypes library built from NAME.cpp; `ConfigError` if there is no compiler or it fails. PyTorch's
    Inductor calls the compiler and caches the library, as for a compiled step."""
    key = SETTINGS[name]
    if missing := missing_compiler(gpu=False):
        raise ConfigError(f"{key} needs {missing}")
    from torch._inductor.codecache import CppCodeCache

    # it warns about a CUDA toolkit without a GPU, which is irrelevant here
    logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)
    # as one text: Inductor decides by its hash whether to build it
    folder = Path(__file__).parent
    code = (folder / f"{name}.cpp").read_text().replace(f'#include "{HEADER}"', (folder / HEADER).read_text())
    try:
        try:
            return CppCodeCache.load(code, extra_flags=FLAGS)
        except RuntimeError:
            return CppCodeCache.load(code, extra_flags=FLAGS[:1])
    except (RuntimeError, OSError) as error:
        lines = [line.strip() for line in str(error).splitlines() if "error" in line.lower()] or [str(error)]
        remedy = "repair the compiler or the folder in TORCHINDUCTOR_CACHE_DIR, or do without the setting"
        raise ConfigError(f"{key}: its kernels could not be built: {lines[-1]}; {remedy}") from error


def run(library: str, function: str, *arguments: Argument) -> None:
    """Call a function of a library with the addresses of tensors, integers of 64 bits and doubles."""
    ctypes.CFUNCTYPE(None).in_dll(build(library), function)(*map(_for_c, arguments))


def name_of(dtype: torch.dtype) -> str:
    """The number format's name in the C++ files."""
    return str(dtype).removeprefix("torch.")


def in_nhwc(tensor: Tensor) -> Tensor:
    """The same images [N, C, H, W] in NHWC memory."""
    return tensor.contiguous(memory_format=torch.channels_last)


def _for_c(argument: Argument) -> Any:
    if isinstance(argument, int):
        return ctypes.c_int64(argument)
    if isinstance(argument, float):
        return ctypes.c_double(argument)
    return ctypes.c_void_p(None if argument is None else argument.data_ptr())
