"""CONV: 3x3 convolutions on a CPU by Winograd's minimal filtering, in float32 or bf16.

A. Lavin and S. Gray, "Fast Algorithms for Convolutional Neural Networks" (arXiv:1509.09308): a tile of side x side
outputs is A'[(G w G') * (B'xB)]A, where x is its (side + 2) x (side + 2) input pixels, w one kernel, and * multiplies
elementwise. Over all channels and tiles the middle is one matrix product per position in a tile: for sides of 3, 4, 6
with 3.24, 4, 5.06 times fewer multiplications than a direct convolution. Backward reverses the steps: gradients need
the transposed transforms and products of the same size. winograd.cpp has the transforms.

In bf16, images and planes are bf16; weights are transformed from float32, and their gradients are summed in float32.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from utils.errors import ConfigError
from utils.kernels.build import build, in_nhwc, name_of, run

# By number format of the images. In bf16, the rounding error relative to the outputs' standard deviation is 0.3 % for a
# direct convolution, 1.5 and 1.2 % with sides of 3 and 4, but 5 % with 6.
SIDES = {torch.float32: (3, 4, 6), torch.bfloat16: (3, 4)}
# The next four were measured with two threads, float32 on a machine with AVX2, bf16 on one with AVX-512 BF16.
TILES = {torch.float32: 128, torch.bfloat16: 256}  # per thread at a time: fast products, and planes fit the cache
MIN_CHANNEL_PAIRS = 32 * 32  # input times output channels: with fewer the transforms cost as much as they save
MAX_WORK_RATIO = 0.75  # above this fraction of the direct multiplications a direct convolution is as fast
TRANSFORM_COST = {6: 1.3}  # by side: factor for the transforms of its 8 x 8 numbers
CHANNELS = 16  # LANES of winograd.cpp, which takes multiples of this number of channels


def best_side(images: Tensor) -> int | None:
    """Return the tile side with the least work for images [N, C, H, W]; None if a direct convolution is as fast."""
    sides = SIDES[images.dtype]
    work = {side: count_tiles(images, side) * (side + 2) ** 2 * TRANSFORM_COST.get(side, 1) for side in sides}
    side = min(sides, key=lambda side: work[side])
    return side if work[side] <= MAX_WORK_RATIO * 9 * images.shape[2] * images.shape[3] else None


def count_tiles(images: Tensor, side: int) -> int:
    """Tiles of one of the images [N, C, H, W]; those at the border reach beyond it."""
    return -(-images.shape[2] // side) * -(-images.shape[3] // side)


def _parts(images: Tensor, side: int) -> Iterator[tuple[slice, tuple[int, int]]]:
    """Yield slices of the images to process one after the other, with the sizes [position, tiles + 1] of their planes;
    the transforms fill the extra row with zeros."""
    per_image = count_tiles(images, side)
    at_once = max(1, TILES[images.dtype] * torch.get_num_threads() // per_image)
    for first in range(0, len(images), at_once):
        last = min(first + at_once, len(images))
        yield slice(first, last), ((side + 2) ** 2, (last - first) * per_image + 1)


def _transform(name: str, side: int, source: Tensor, target: Tensor) -> Tensor:
    """Run a transform between images or weights [N, C, H, W] and planes; return `target`."""
    count, channels, height, width = (source if source.dim() == 4 else target).shape
    sizes = (count, channels) if "weights" in name else (count, height, width, channels)
    run("winograd", f"{name}_{side}_{name_of(target.dtype)}", source, target, torch.tensor(sizes, device="cpu"))
    return target


def _new_images(sizes: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """New memory in NHWC for images or weights; on the CPU, whatever the default device is."""
    return torch.empty(sizes, dtype=dtype, device="cpu", memory_format=torch.channels_last)


class _WinogradConvolution(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, images: Tensor, weight: Tensor, bias: Tensor | None, side: int) -> Tensor:
        images, (outputs, channels) = in_nhwc(images), weight.shape[:2]
        weights = weight.new_empty((side + 2) ** 2, outputs, channels, dtype=images.dtype)
        _transform("weights_to_planes", side, in_nhwc(weight), weights)
        out = _new_images((len(images), outputs, *images.shape[2:]), images.dtype)
        for part, plane in _parts(images, side):
            pixels, products = (images.new_empty(*plane, number) for number in (channels, outputs))
            torch.bmm(_transform("images_to_planes", side, images[part], pixels), weights.mT, out=products)
            _transform("planes_to_outputs", side, products, out[part])
        ctx.save_for_backward(images, weights)  # `weights` takes up to seven times the memory of `weight`
        ctx.side = side
        return out if bias is None else out.add_(bias.view(1, -1, 1, 1))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        (images, weights), wanted, side = ctx.saved_tensors, ctx.needs_input_grad, ctx.side
        gradient, (_, outputs, channels) = in_nhwc(gradient), weights.shape
        image_gradient = torch.empty_like(images) if wanted[0] else None
        weight_planes: Tensor | None = None  # the gradient of `weights`
        for part, plane in _parts(images, side):
            output_planes, image_planes = (images.new_empty(*plane, size) for size in (outputs, channels))
            _transform("gradient_to_planes", side, gradient[part], output_planes)
            if wanted[1]:
                _transform("images_to_planes", side, images[part], image_planes)
                # with `out`: without it autocast changes the format, if backward runs within autocast
                if weight_planes is None:
                    weight_planes = torch.bmm(output_planes.mT, image_planes, out=torch.empty_like(weights)).float()
                elif weight_planes.dtype == image_planes.dtype:
                    torch.baddbmm(weight_planes, output_planes.mT, image_planes, out=weight_planes)
                else:  # sum in float32
                    weight_planes += torch.bmm(output_planes.mT, image_planes, out=torch.empty_like(weights))
            if image_gradient is not None:
                torch.bmm(output_planes, weights, out=image_planes)
                _transform("planes_to_gradient", side, image_planes, image_gradient[part])
        weight_gradient = None
        if weight_planes is not None:
            weight_gradient = _new_images((outputs, channels, 3, 3), weight_planes.dtype)
            _transform("planes_to_weights", side, weight_planes, weight_gradient)
        bias_gradient = gradient.sum((0, 2, 3), dtype=torch.float32) if wanted[2] else None
        return image_gradient, weight_gradient, bias_gradient, None


class WinogradConv2d(nn.Conv2d):
    """Conv2d with a 3x3 kernel, stride 1 and padding 1, by Winograd's method where that fits; equal up to rounding."""

    def forward(self, images: Tensor) -> Tensor:
        """Images [N, C, H, W] -> [N, out_channels, H, W]."""
        casts = torch.is_autocast_enabled("cpu") and images.is_cpu and images.dtype in TILES
        if casts:
            images = images.to(torch.get_autocast_dtype("cpu"))
        same = images.dtype == self.weight.dtype or (self.weight.dtype == torch.float32 and casts)
        whole = images.dim() == 4 and len(images) > 0 and images.shape[1] == self.in_channels
        # PyTorch reports what is wrong with other images
        side = best_side(images) if images.is_cpu and images.dtype in TILES and same and whole else None
        if side is None:
            return super().forward(images)
        # float32 weights, so that they are transformed and their gradients summed in float32
        return _WinogradConvolution.apply(images, self.weight.float(), self.bias, side)  # type: ignore[no-any-return]


def use_winograd(model: nn.Module) -> None:
    """Turn convolutions of `model` into `WinogradConv2d`. `ConfigError` if none fits or the compiler fails."""
    found = [module for module in model.modules() if type(module) is nn.Conv2d and _fits(module)]
    if not found:
        kind = f"stride 1, padding 1 and at least {MIN_CHANNEL_PAIRS} pairs of channels in multiples of {CHANNELS}"
        raise ConfigError(f"cpu_kernels [winograd]: the network has no 3x3 convolution with {kind}")
    build("winograd")
    for module in found:
        module.__class__ = WinogradConv2d


def is_plain(module: nn.Conv2d) -> bool:
    """Whether a convolution has one group, no dilation, and pads by a number of zeros."""
    zeros = module.padding_mode == "zeros" and not isinstance(module.padding, str)
    return module.groups == 1 and set(module.dilation) == {1} and zeros


def _fits(module: nn.Conv2d) -> bool:
    size = (module.kernel_size, module.stride, module.padding) == ((3, 3), (1, 1), (1, 1))
    channels = module.in_channels, module.out_channels
    enough = channels[0] * channels[1] >= MIN_CHANNEL_PAIRS and not any(count % CHANNELS for count in channels)
    return is_plain(module) and size and enough and module.weight.dtype in TILES
