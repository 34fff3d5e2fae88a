"""CONV: on a CPU, compute the gradient of a convolution's weights by matrix products.

For each channel and kernel offset this gradient is a sum over all pixels of a batch, a product of two tall matrices.
oneDNN's kernels for it are slower than its kernels for the forward pass and the images' gradient; with enough channels,
matrix products are faster: of the images themselves for 1x1 kernels, else of a few images' windows at a time.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.functional import conv2d, pad

from utils.errors import ConfigError
from utils.kernels.winograd import WinogradConv2d, is_plain

ROWS = 512  # pixels whose windows are gathered at a time: large enough for a fast product, small enough for the cache
# Products are faster for more pairs of input and output channels than this. Measured with two threads, float32 with
# AVX2, bf16 with AVX-512 BF16.
MIN_CHANNEL_PAIRS = {torch.float32: 128 * 128, torch.bfloat16: 256 * 256}
Pair = tuple[int, int]


def weight_gradient(images: Tensor, gradient: Tensor, kernel: Pair, stride: Pair, padding: Pair) -> Tensor:
    """Images [N, C, H, W], gradient of the output [N, O, h, w] -> gradient of the weights [O, C, *kernel], each in NHWC
    memory. Products over more than `ROWS` pixels are added in float32."""
    count, channels, (outputs, height, width) = len(images), images.shape[1], gradient.shape[1:]
    output_gradient, pixels = gradient.permute(0, 2, 3, 1), images.permute(0, 2, 3, 1)
    if kernel == (1, 1) and padding == (0, 0):
        used = pixels[:, :: stride[0], :: stride[1]].reshape(-1, channels)
        return (output_gradient.reshape(-1, outputs).t() @ used).view(outputs, 1, 1, channels).permute(0, 3, 1, 2)
    pixels = pad(pixels, (0, 0, padding[1], padding[1], padding[0], padding[0])).contiguous()
    steps = pixels.stride(0), pixels.stride(1) * stride[0], pixels.stride(2) * stride[1], pixels.stride(1), 1
    sum_dtype = torch.promote_types(images.dtype, torch.float32)
    total = torch.zeros(outputs, kernel[0] * kernel[1] * channels, dtype=sum_dtype)
    at_once = max(1, ROWS // (height * width))
    for first in range(0, count, at_once):
        part = slice(first, first + at_once)
        shape = len(pixels[part]), height, width, kernel[0], kernel[1] * channels  # a window's row is contiguous
        windows = pixels[part].as_strided(shape, steps).reshape(-1, total.shape[1])
        part_gradient = output_gradient[part].reshape(-1, outputs).t()
        if total.dtype == windows.dtype:
            total.addmm_(part_gradient, windows)
        else:
            total += part_gradient @ windows
    return total.to(images.dtype).view(outputs, *kernel, channels).permute(0, 3, 1, 2)


class _ProductConvolution(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, images: Tensor, weight: Tensor, bias: Tensor | None, stride: Pair, padding: Pair) -> Tensor:
        ctx.save_for_backward(images, weight)
        ctx.stride, ctx.padding = stride, padding
        return conv2d(images, weight, bias, stride, padding)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        images, weight = ctx.saved_tensors
        wanted = ctx.needs_input_grad
        image_gradient = gradient_of_weight = bias_gradient = None
        if wanted[0]:
            image_gradient = torch.ops.aten.convolution_backward(
                gradient, images, weight, None, ctx.stride, ctx.padding, (1, 1), False, (0, 0), 1, (True, False, False)
            )[0]
        if wanted[1]:
            gradient_of_weight = weight_gradient(images, gradient, weight.shape[2:], ctx.stride, ctx.padding)
        if wanted[2]:
            bias_gradient = gradient.sum((0, 2, 3))
        return image_gradient, gradient_of_weight, bias_gradient, None, None


class ProductConv2d(nn.Conv2d):
    """Conv2d with zero padding, one group and no dilation, whose weight gradient is computed by matrix products."""

    def forward(self, images: Tensor) -> Tensor:
        """Images [N, C, H, W] -> [N, out_channels, ...]."""
        trains = torch.is_grad_enabled() and self.weight.requires_grad
        if images.dim() != 4 or not images.is_cpu or not trains:  # not on a CPU: on `meta`, to count FLOP
            return super().forward(images)
        weight, bias = self.weight, self.bias
        if torch.is_autocast_enabled("cpu"):  # here, so that the tensors saved for backward have one number format
            half = torch.get_autocast_dtype("cpu")
            images, weight, bias = images.to(half), weight.to(half), None if bias is None else bias.to(half)
        return _ProductConvolution.apply(images, weight, bias, self.stride, self.padding)  # type: ignore[no-any-return]


def use_products(model: nn.Module, dtype: torch.dtype) -> None:
    """Turn convolutions that compute in `dtype` into `ProductConv2d`; `ConfigError` if none of our kernels fits."""
    min_pairs, found = MIN_CHANNEL_PAIRS[dtype], 0
    for module in list(model.modules()):
        if type(module) is nn.Conv2d and is_plain(module) and module.in_channels * module.out_channels > min_pairs:
            module.__class__ = ProductConv2d
            found += 1
    if not found and not any(isinstance(module, WinogradConv2d) for module in model.modules()):
        kind = f"no convolution with one group, no dilation, zero padding and over {min_pairs} pairs of channels"
        raise ConfigError(f"cpu_kernels [weight_products]: the network has {kind}, where products are faster")
