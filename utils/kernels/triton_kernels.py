"""FUSE: the Triton kernels of norm_relu.py, over NHWC memory: rows are pixels, columns channels.

All sums are in float32, in an order that depends only on the sizes: every run gives the same bits.
"""

# mypy: allow-untyped-defs
# Triton kernels take addresses and numbers, for which Python has no types

import torch
import triton
import triton.language as tl
from torch import Tensor

from utils.kernels.build import in_nhwc

ROWS, COLUMNS = 64, 64  # of a tile
MAX_PARTS = 512  # programs that share the rows of a sum: a few per multiprocessor


@triton.jit
def _tile(first_row, last_row, channels, column, rows: tl.constexpr):
    """Return the addresses of a tile and the mask of those inside the matrix."""
    row = first_row + tl.arange(0, rows)
    address = row.to(tl.int64)[:, None] * channels + column[None, :]
    return address, (row < last_row)[:, None] & (column < channels)[None, :]


@triton.jit
def _normalised(x, address, mask, mean, invstd, weight, bias, column, valid):
    """Return (normalised x, the same with weight and bias) of a tile."""
    scaled = tl.load(x + address, mask, 0.0).to(tl.float32) - tl.load(mean + column, valid, 0.0)[None, :]
    scaled *= tl.load(invstd + column, valid, 0.0)[None, :]
    z = scaled * tl.load(weight + column, valid, 0.0).to(tl.float32)[None, :]
    return scaled, z + tl.load(bias + column, valid, 0.0).to(tl.float32)[None, :]


@triton.jit
def _sum_x(x, shift, parts, pixels, channels, part_pixels, rows: tl.constexpr, columns: tl.constexpr):
    """Write parts [part, 2, channels]: sums of x - shift and of its square. A shift near the mean keeps digits that the
    difference of two large sums would lose."""
    column, part = tl.program_id(0) * columns + tl.arange(0, columns), tl.program_id(1)
    valid = column < channels
    start = tl.load(shift + column, valid, 0.0).to(tl.float32)
    total, squares = tl.zeros([columns], tl.float32), tl.zeros([columns], tl.float32)
    end = tl.minimum((part + 1) * part_pixels, pixels)
    for first in range(part * part_pixels, end, rows):
        address, mask = _tile(first, end, channels, column, rows)
        centred = tl.where(mask, tl.load(x + address, mask, 0.0).to(tl.float32) - start[None, :], 0.0)
        total += tl.sum(centred, 0)
        squares += tl.sum(centred * centred, 0)
    tl.store(parts + 2 * part * channels + column, total, valid)
    tl.store(parts + (2 * part + 1) * channels + column, squares, valid)


@triton.jit
def _statistics(
    parts, running_mean, running_var, mean, invstd, pixels, channels, num_parts, momentum, eps, columns: tl.constexpr
):
    column = tl.program_id(0) * columns + tl.arange(0, columns)
    valid = column < channels
    total, squares = tl.zeros([columns], tl.float32), tl.zeros([columns], tl.float32)
    for part in range(num_parts):
        total += tl.load(parts + 2 * part * channels + column, valid, 0.0)
        squares += tl.load(parts + (2 * part + 1) * channels + column, valid, 0.0)
    old_mean = tl.load(running_mean + column, valid, 0.0).to(tl.float32)
    old_var = tl.load(running_var + column, valid, 0.0).to(tl.float32)
    offset = total / pixels
    centre = old_mean + offset
    var = tl.maximum(squares / pixels - offset * offset, 0.0)
    tl.store(mean + column, centre, valid)
    tl.store(invstd + column, 1.0 / tl.sqrt(var + eps), valid)
    unbiased = var * (pixels / tl.maximum(pixels - 1.0, 1.0))
    tl.store(running_mean + column, old_mean + momentum * (centre - old_mean), valid)
    tl.store(running_var + column, old_var + momentum * (unbiased - old_var), valid)


@triton.jit
def _apply(
    x, shortcut, weight, bias, mean, invstd, out, pixels, channels,
    added: tl.constexpr, rows: tl.constexpr, columns: tl.constexpr,
):  # fmt: skip
    column = tl.program_id(1) * columns + tl.arange(0, columns)
    address, mask = _tile(tl.program_id(0) * rows, pixels, channels, column, rows)
    _, z = _normalised(x, address, mask, mean, invstd, weight, bias, column, column < channels)
    if added:
        z += tl.load(shortcut + address, mask, 0.0).to(tl.float32)
    tl.store(out + address, tl.where(z <= 0, 0.0, z), mask)  # NaN stays


@triton.jit
def _sum_gradient(
    gradient, x, out, weight, bias, mean, invstd, parts, passed, pixels, channels, part_pixels,
    added: tl.constexpr, rows: tl.constexpr, columns: tl.constexpr,
):  # fmt: skip
    """Write parts [part, 2, channels]: sums of the gradient through ReLU, and of it times the normalised x.
    With a shortcut (`added`), write its gradient to `passed`."""
    column, part = tl.program_id(0) * columns + tl.arange(0, columns), tl.program_id(1)
    valid = column < channels
    grad_bias, grad_weight = tl.zeros([columns], tl.float32), tl.zeros([columns], tl.float32)
    end = tl.minimum((part + 1) * part_pixels, pixels)
    for first in range(part * part_pixels, end, rows):
        address, mask = _tile(first, end, channels, column, rows)
        scaled, z = _normalised(x, address, mask, mean, invstd, weight, bias, column, valid)
        if added:
            z = tl.load(out + address, mask, 0.0).to(tl.float32)
        passed_here = tl.where(z <= 0, 0.0, tl.load(gradient + address, mask, 0.0).to(tl.float32))  # NaN stays
        if added:
            tl.store(passed + address, passed_here, mask)
        grad_bias += tl.sum(passed_here, 0)
        grad_weight += tl.sum(passed_here * scaled, 0)  # 0 outside the matrix, like the gradient
    tl.store(parts + 2 * part * channels + column, grad_bias, valid)
    tl.store(parts + (2 * part + 1) * channels + column, grad_weight, valid)


@triton.jit
def _apply_gradient(
    gradient, x, weight, bias, mean, invstd, sums, grad_x, pixels, channels,
    masked: tl.constexpr, rows: tl.constexpr, columns: tl.constexpr,
):  # fmt: skip
    """Write the gradient of x; `masked`: `gradient` already contains ReLU's mask."""
    column = tl.program_id(1) * columns + tl.arange(0, columns)
    valid = column < channels
    address, mask = _tile(tl.program_id(0) * rows, pixels, channels, column, rows)
    scaled, z = _normalised(x, address, mask, mean, invstd, weight, bias, column, valid)
    passed = tl.load(gradient + address, mask, 0.0).to(tl.float32)
    if not masked:
        passed = tl.where(z <= 0, 0.0, passed)  # NaN stays
    grad_bias = tl.load(sums + column, valid, 0.0) / pixels
    grad_weight = tl.load(sums + channels + column, valid, 0.0) / pixels
    factor = tl.load(invstd + column, valid, 0.0) * tl.load(weight + column, valid, 0.0).to(tl.float32)
    tl.store(grad_x + address, (passed - grad_bias[None, :] - scaled * grad_weight[None, :]) * factor[None, :], mask)


def _sizes(x: Tensor) -> tuple[int, int, int, int]:
    """Return (pixels, channels, blocks of channels, parts of a sum over pixels)."""
    channels = x.shape[1]
    pixels = x.numel() // channels
    blocks = triton.cdiv(channels, COLUMNS)
    return pixels, channels, blocks, max(1, min(MAX_PARTS // blocks, triton.cdiv(pixels, 4 * ROWS)))


def forward(
    x: Tensor, shortcut: Tensor | None, weight: Tensor, bias: Tensor, running_mean: Tensor, running_var: Tensor,
    momentum: float, eps: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """`norm_relu` of x [N, C, H, W] in NHWC."""
    x, addend = in_nhwc(x), x if shortcut is None else in_nhwc(shortcut)
    pixels, channels, blocks, num_parts = _sizes(x)
    parts = torch.empty(num_parts, 2, channels, dtype=torch.float32, device=x.device)
    mean, invstd = (torch.empty(channels, dtype=torch.float32, device=x.device) for _ in range(2))
    part_pixels = triton.cdiv(pixels, num_parts)
    _sum_x[blocks, num_parts](x, running_mean, parts, pixels, channels, part_pixels, ROWS, COLUMNS)
    _statistics[(blocks,)](
        parts, running_mean, running_var, mean, invstd, pixels, channels, num_parts, momentum, eps, COLUMNS
    )
    out, grid = torch.empty_like(x), (triton.cdiv(pixels, ROWS), blocks)
    added = shortcut is not None
    _apply[grid](x, addend, weight, bias, mean, invstd, out, pixels, channels, added, ROWS, COLUMNS)
    return out, mean, invstd


def backward(
    gradient: Tensor, x: Tensor, out: Tensor | None, weight: Tensor, bias: Tensor, mean: Tensor, invstd: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """`norm_relu_backward` of x [N, C, H, W] in NHWC."""
    gradient, x = in_nhwc(gradient), in_nhwc(x)
    added = out is not None
    pixels, channels, blocks, num_parts = _sizes(x)
    parts = torch.empty(num_parts, 2, channels, dtype=torch.float32, device=x.device)
    grad_x, passed = torch.empty_like(x), torch.empty_like(x) if added else x.new_empty(0)
    scale, part_pixels = (weight, bias, mean, invstd), triton.cdiv(pixels, num_parts)
    _sum_gradient[blocks, num_parts](
        gradient, x, x if out is None else in_nhwc(out), *scale, parts, passed if added else x,
        pixels, channels, part_pixels, added, ROWS, COLUMNS,
    )  # fmt: skip
    sums, grid = parts.sum(0), (triton.cdiv(pixels, ROWS), blocks)
    masked = passed if added else gradient
    _apply_gradient[grid](masked, x, *scale, sums, grad_x, pixels, channels, added, ROWS, COLUMNS)
    return grad_x, passed, sums[1].to(weight.dtype, copy=True), sums[0].to(bias.dtype, copy=True)
