"""CONV: on a CPU, the gradient of a convolution's weights as matrix products.

Per channel and offset of the kernel this gradient is a sum over all pixels of a batch, a product of two tall matrices.
oneDNN's kernels for it are slower than those of the other two passes; where there are channels enough, products are
faster: for 1x1 kernels of the images as they are, else of their windows, gathered for some images at a time.

In bf16 oneDNN is slow, too, at the gradient of the images of a 1x1 convolution with a stride. It has the pixels alone
that the stride meets, and stride 1.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.functional import conv2d, pad

from utils.training.config import SpeedConfig
from utils.training.kernels.compilers import replace_convolutions
from utils.training.kernels.conv.winograd import WinogradConv2d
from utils.training.precision import Precision, has_bf16_kernels

ROWS = 512  # pixels whose windows are gathered at a time: a product of good size, and windows that stay in the cache
# Input times output channels. Measured with two threads; float32 with AVX2, bf16 with AVX-512 BF16
ENOUGH = {torch.float32: 128 * 128, torch.bfloat16: 256 * 256}
Pair = tuple[int, int]


def weight_gradient(images: Tensor, gradient: Tensor, kernel: Pair, stride: Pair, padding: Pair) -> Tensor:
    """Images [N, C, H, W], gradient of the output [N, O, h, w] -> gradient of the weights [O, C, *kernel], each in NHWC
    memory. Products over more than `ROWS` pixels are added in float32."""
    count, channels, (outputs, height, width) = len(images), images.shape[1], gradient.shape[1:]
    of_outputs, pixels = gradient.permute(0, 2, 3, 1), images.permute(0, 2, 3, 1)
    if kernel == (1, 1) and padding == (0, 0):
        met = pixels[:, :: stride[0], :: stride[1]].reshape(-1, channels)
        return (of_outputs.reshape(-1, outputs).t() @ met).view(outputs, 1, 1, channels).permute(0, 3, 1, 2)
    pixels = pad(pixels, (0, 0, padding[1], padding[1], padding[0], padding[0])).contiguous()
    steps = pixels.stride(0), pixels.stride(1) * stride[0], pixels.stride(2) * stride[1], pixels.stride(1), 1
    kept = torch.promote_types(images.dtype, torch.float32)
    total = torch.zeros(outputs, kernel[0] * kernel[1] * channels, dtype=kept)
    at_once = max(1, ROWS // (height * width))
    for first in range(0, count, at_once):
        some = pixels[first : first + at_once]
        shape = len(some), height, width, kernel[0], kernel[1] * channels  # a window's row is one piece of memory
        windows = some.as_strided(shape, steps).reshape(-1, total.shape[1])
        met = of_outputs[first : first + at_once].reshape(-1, outputs).t()
        if total.dtype == windows.dtype:
            total.addmm_(met, windows)
        else:
            total += met @ windows
    return total.to(images.dtype).view(outputs, *kernel, channels).permute(0, 3, 1, 2)


class _ProductConvolution(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, images: Tensor, weight: Tensor, bias: Tensor | None, stride: Pair, padding: Pair) -> Tensor:
        ctx.thinned = None
        if images.dtype == torch.bfloat16 and weight.shape[2:] == (1, 1) and padding == (0, 0) and stride != (1, 1):
            ctx.thinned, met = (images.shape, stride), images[:, :, :: stride[0], :: stride[1]]
            images, stride = met.contiguous(memory_format=torch.channels_last), (1, 1)
        ctx.save_for_backward(images, weight)
        ctx.stride, ctx.padding = stride, padding
        return conv2d(images, weight, bias, stride, padding)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        images, weight = ctx.saved_tensors
        wanted = ctx.needs_input_grad
        of_images = of_weight = of_bias = None
        if wanted[0]:
            of_images = torch.ops.aten.convolution_backward(
                gradient, images, weight, None, ctx.stride, ctx.padding, (1, 1), False, (0, 0), 1, (True, False, False)
            )[0]
            if ctx.thinned is not None:
                of_met, (sizes, (down, across)) = of_images, ctx.thinned
                of_images = torch.empty(sizes, dtype=of_met.dtype, memory_format=torch.channels_last).zero_()
                of_images[:, :, ::down, ::across] = of_met
        if wanted[1]:
            of_weight = weight_gradient(images, gradient, weight.shape[2:], ctx.stride, ctx.padding)
        if wanted[2]:
            of_bias = gradient.sum((0, 2, 3))
        return of_images, of_weight, of_bias, None, None


def convolve(images: Tensor, weight: Tensor, bias: Tensor | None, stride: Pair, padding: Pair) -> Tensor:
    """`conv2d` with one group and no dilation, whose weights' gradient is made of products."""
    return _ProductConvolution.apply(images, weight, bias, stride, padding)  # type: ignore[no-any-return]


class ProductConv2d(nn.Conv2d):
    """Conv2d with zeros around the images, one group and no dilation; its weights' gradient is made of products."""

    def forward(self, images: Tensor) -> Tensor:
        """Images [N, C, H, W] -> [N, out_channels, ...]."""
        if images.dim() != 4 or not (torch.is_grad_enabled() and self.weight.requires_grad):
            return super().forward(images)
        weight, bias = self.weight, self.bias
        if torch.is_autocast_enabled("cpu"):  # here, so that what backward keeps has one number format
            half = torch.get_autocast_dtype("cpu")
            images, weight, bias = images.to(half), weight.to(half), None if bias is None else bias.to(half)
        padding: Any = self.padding  # declared as a word, too
        return convolve(images, weight, bias, self.stride, padding)  # type: ignore[arg-type]


def use_products(config: SpeedConfig, model: nn.Module, precision: Precision, device: torch.device) -> list[str]:
    """Make `ProductConv2d` of the convolutions of `model`, as `conv_weight_products` asks; returns notes for the log.
    `ConfigError` where the network has none that fits."""
    enough = ENOUGH[torch.float32 if precision.level == "O0" else torch.bfloat16]
    convolutions = [module for module in model.modules() if isinstance(module, nn.Conv2d)]
    left = any(type(module) is nn.Conv2d and _fits(module, enough) for module in convolutions)
    if device.type == "cpu" and not left and any(isinstance(module, WinogradConv2d) for module in convolutions):
        note = "conv_weight_products: left out, conv_winograd has the convolutions"
        return [note] if config.conv_weight_products is True else []
    return replace_convolutions(
        config, "conv_weight_products", model, device, lambda module: _fits(module, enough), ProductConv2d,
        auto=precision.level == "O0" or has_bf16_kernels(),
        missing="convolution with one group, no dilation, zeros around the images and more than "
        f"{enough} pairs of input and output channels, where products are faster",
    )  # fmt: skip


def _fits(module: nn.Conv2d, enough: int) -> bool:
    plain = module.groups == 1 and set(module.dilation) == {1} and module.padding_mode == "zeros"
    return plain and not isinstance(module.padding, str) and module.in_channels * module.out_channels > enough
