"""Whether a step is compiled, whether what torch.compile calls is here, and our own kernels for CPUs, built with it."""

import logging
import os
import shutil
import sysconfig
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from utils.errors import ConfigError
from utils.training.config import SpeedConfig

# Inductor switches both off for its own kernels, which name their vectors. Without the first no comparison is
# vectorised; no sum changes its order. The second is gcc's: clang vectorises without.
HEADER = "cpu_kernels.h"
FLAGS = ("-fno-trapping-math", "-ftree-loop-vectorize")


SwitchKey = Literal["fuse_norm_relu", "conv_weight_products", "conv_winograd"]


def compiles(config: SpeedConfig, device: torch.device) -> bool:
    """COMPILE: whether the step will be compiled."""
    wanted = config.enable_compile == "auto" and device.type == "cuda" and not missing_compiler(device)
    return config.enable_compile is True or wanted


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


def read_header() -> str:
    """What the C++ files share."""
    return Path(__file__).with_name(HEADER).read_text()


def build_kernels(source: Path, key: str) -> Any:
    """The library of the functions in a C++ file, which `key` switches on, for ctypes. PyTorch's Inductor calls the
    compiler and keeps what it made in its cache, as for a compiled step. `ConfigError` where the compiler fails."""
    from torch._inductor.codecache import CppCodeCache

    # which warns of a CUDA toolkit beside no GPU, of which nothing is used here
    logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)
    # in one text: its hash is how Inductor knows whether it has been built
    code = source.read_text().replace(f'#include "{HEADER}"', read_header())
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


def wants_own_layers(config: SpeedConfig, key: SwitchKey, device: torch.device, *, auto: bool) -> bool:
    """Whether `key` puts our own layers in the place of PyTorch's: true always, auto on a CPU that steps eagerly over
    NHWC memory, where `auto` says so too."""
    asked = getattr(config, key)
    here = device.type == "cpu" and config.enable_nhwc and not compiles(config, device)
    return asked is True or (asked == "auto" and here and auto)


def replace_convolutions(
    config: SpeedConfig, key: SwitchKey, model: nn.Module, device: torch.device, fits: Callable[[nn.Conv2d], bool],
    kind: type[nn.Conv2d], *, auto: bool, missing: str, build: Callable[[], Any] | None = None,
) -> list[str]:  # fmt: skip
    """Make a `kind` of each Conv2d of `model` that `fits`, where `key` asks for it; returns notes for the log. `build`
    makes its kernels. `ConfigError` where it is asked for by name and the network is `missing` such convolutions."""
    asked = getattr(config, key)
    if device.type != "cpu":
        return [f"{key}: left out, it is for CPUs"] if asked is True else []
    if not wants_own_layers(config, key, device, auto=auto):
        return []
    compiler = missing_compiler(device) if build is not None else ""
    if compiler:
        raise ConfigError(f"{key} true needs {compiler}, or use {key} false")
    found = [module for module in model.modules() if type(module) is nn.Conv2d and fits(module)]
    if asked is True and not found:
        raise ConfigError(f"{key} true: the network has no {missing}; use false")
    if found and build is not None and (failure := failure_to_build(build, asked)):
        return [failure]
    for module in found:
        module.__class__ = kind
    return []


def failure_to_build(build: Callable[[], Any], asked: object) -> str:
    """Why kernels could not be built that a key asks for with auto; empty where they are. Raises where it is true."""
    try:
        build()
    except ConfigError as error:
        if asked is True:
            raise
        return f"left out: {error}"
    return ""
