"""FUSE: the CPU kernels (cpu.cpp) of module.py, compiled at their first use."""

import ctypes
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from utils.training.kernels.build import build_kernels, has_compiler

NAMES = {torch.float32: "float32", torch.bfloat16: "bfloat16"}


def fits(x: Tensor, *channels: Tensor) -> bool:
    """Whether the kernels support x [N, C, H, W] with these weights or statistics [C]: a compiler, NHWC memory, x in
    float32 or bf16, the others in float32."""
    nhwc = x.dim() == 4 and x.numel() > 0 and x.is_contiguous(memory_format=torch.channels_last)
    plain = all(value.dtype == torch.float32 and value.is_contiguous() for value in channels)
    return nhwc and x.dtype in NAMES and plain and has_compiler()


def forward(
    x: Tensor, shortcut: Tensor | None, weight: Tensor, bias: Tensor, running_mean: Tensor, running_var: Tensor,
    momentum: float, eps: float, silu: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """`norm_relu` of module.py."""
    out, shortcut = torch.empty_like(x), None if shortcut is None else _like(shortcut, x)
    mean, invstd = torch.empty_like(weight), torch.empty_like(weight)
    tensors = x, shortcut, weight, bias, running_mean, running_var, mean, invstd, out
    _call("forward", x, tensors, silu, ctypes.c_double(momentum), ctypes.c_double(eps))
    return out, mean, invstd


def backward(
    gradient: Tensor, x: Tensor, out: Tensor | None, weight: Tensor, bias: Tensor, mean: Tensor, invstd: Tensor,
    silu: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """`norm_relu_backward` of module.py."""
    inputs = _like(gradient, x), x, out, weight, bias, mean, invstd
    gradients = (
        torch.empty_like(x), x.new_empty(0) if out is None else torch.empty_like(x),
        torch.empty_like(weight), torch.empty_like(weight),
    )  # fmt: skip
    _call("backward", x, (*inputs, *gradients), silu)
    return gradients


def _like(images: Tensor, x: Tensor) -> Tensor:
    """Return `images` in the shape, number format and memory layout of x, as the kernels expect."""
    return images.expand(x.shape).to(x.dtype).contiguous(memory_format=torch.channels_last)


def _call(name: str, x: Tensor, tensors: tuple[Tensor | None, ...], silu: bool, *numbers: Any) -> None:
    channels = x.shape[1]
    addresses = [ctypes.c_void_p(None if tensor is None else tensor.data_ptr()) for tensor in tensors]
    sizes = (ctypes.c_int64(size) for size in (x.numel() // channels, channels, silu))
    kernel = ctypes.CFUNCTYPE(None).in_dll(build(), f"norm_relu_{name}_{NAMES[x.dtype]}")
    kernel(*addresses, *sizes, *numbers)


@cache
def build() -> Any:
    """Return the library of the kernels; `ConfigError` if the compiler fails."""
    return build_kernels(Path(__file__).with_suffix(".cpp"), "fuse_norm_relu")
