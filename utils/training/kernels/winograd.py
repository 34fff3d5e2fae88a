"""CONV: 3x3 convolutions on a CPU by Winograd's minimal filtering, in float32 or bf16.

A. Lavin and S. Gray, "Fast Algorithms for Convolutional Neural Networks" (arXiv:1509.09308): a tile of side x side
outputs is A'[(G w G') * (B'xB)]A, where x is its (side + 2) x (side + 2) input pixels, w one kernel, and * multiplies
elementwise. Over all channels and tiles the middle is one matrix product per position in a tile: for sides of 2, 3, 4
and 6 with 2.25, 3.24, 4 and 5.06 times fewer multiplications than a direct convolution. Backward reverses the steps:
gradients need the transposed transforms and products of the same size. winograd.cpp has the transforms.

In bf16, images and planes are bf16; weights are transformed from float32, and their gradients are summed in float32.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.functional import conv2d

from utils.errors import ConfigError
from utils.training.kernels.build import build, name_of, run

# By number format of the images. In bf16, the rounding error relative to the outputs' standard deviation is 0.3 % for a
# direct convolution, 0.4, 1.5 and 1.2 % with sides of 2, 3 and 4, but 5 % with 6.
SIDES = {torch.float32: (2, 3, 4, 6), torch.bfloat16: (2, 3, 4)}
# The next four were measured with two threads, float32 on a machine with AVX2, bf16 on one with AVX-512 BF16.
TILES = {torch.float32: 128, torch.bfloat16: 256}  # per thread at a time: fast products, and planes fit the cache
MIN_CHANNEL_PAIRS = 32 * 32  # input times output channels: with fewer the transforms cost as much as they save
MAX_WORK_RATIO = 0.75  # above this fraction of the direct multiplications a direct convolution is as fast
TRANSFORM_COST = {6: 1.3}  # by side: factor for the transforms of its 8 x 8 numbers
CHANNELS = 16  # LANES of winograd.cpp, which takes multiples of this number of channels
Pair = tuple[int, int]


def best_side(height: int, width: int, dtype: torch.dtype = torch.float32) -> int | None:
    """Return the tile side with the least work for images of this size; None if the work exceeds `MAX_WORK_RATIO` of a
    direct convolution's."""
    tiles = {side: -(-height // side) * -(-width // side) for side in SIDES[dtype]}
    work = {side: count * (side + 2) ** 2 * TRANSFORM_COST.get(side, 1) for side, count in tiles.items()}
    side = min(work, key=lambda side: work[side])
    return side if work[side] <= MAX_WORK_RATIO * 9 * height * width else None


class _Tiles:
    """Planes [position, tiles, channels] of images of one size, and their transforms, for a part of the images at a
    time."""

    def __init__(self, side: int, images: Tensor) -> None:
        self.side, (self.count, _, self.height, self.width) = side, images.shape
        self.per_image = -(-self.height // side) * -(-self.width // side)
        self.dtype = images.dtype
        self.at_once = max(1, TILES[self.dtype] * torch.get_num_threads() // self.per_image)

    def parts(self) -> list[slice]:
        """Slices of the images to process one after the other."""
        return [slice(first, min(first + self.at_once, self.count)) for first in range(0, self.count, self.at_once)]

    def empty_planes(self, part: slice, channels: int) -> Tensor:
        """Uninitialised planes for these images, with one extra row, which the transforms fill with zeros."""
        tiles = (part.stop - part.start) * self.per_image
        return torch.empty((self.side + 2) ** 2, tiles + 1, channels, dtype=self.dtype, device="cpu")

    def weights_to_planes(self, weight: Tensor) -> Tensor:
        """Float32 weights [O, C, 3, 3] -> [position, O, C]."""
        outputs, channels = weight.shape[:2]
        planes = torch.empty((self.side + 2) ** 2, outputs, channels, dtype=self.dtype, device="cpu")
        weight = weight.contiguous(memory_format=torch.channels_last)
        return self._run("weights_to_planes", self.dtype, (weight, planes), outputs, channels)

    def planes_to_weights(self, planes: Tensor) -> Tensor:
        """Gradient of the planes [position, O, C] -> of the weights [O, C, 3, 3], both float32."""
        _, outputs, channels = planes.shape
        sizes = outputs, channels, 3, 3
        gradient = torch.empty(sizes, dtype=torch.float32, device="cpu", memory_format=torch.channels_last)
        return self._run("planes_to_weights", torch.float32, (planes, gradient), outputs, channels)

    def call(self, name: str, *tensors: Tensor, channels: int) -> Tensor:
        """Run a transform of images in winograd.cpp; return the last tensor."""
        images = next(len(tensor) for tensor in tensors if tensor.dim() == 4)
        return self._run(name, self.dtype, tensors, images, self.height, self.width, channels)

    def _run(self, name: str, dtype: torch.dtype, tensors: tuple[Tensor, ...], *sizes: int) -> Tensor:
        run("winograd", f"{name}_{self.side}_{name_of(dtype)}", *tensors, torch.tensor(sizes))
        return tensors[-1]


class _WinogradConvolution(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, images: Tensor, weight: Tensor, bias: Tensor | None, side: int) -> Tensor:
        images = images.contiguous(memory_format=torch.channels_last)
        tiles = _Tiles(side, images)
        weights = tiles.weights_to_planes(weight)
        outputs, channels = weight.shape[:2]
        sizes = len(images), outputs, *images.shape[2:]
        out = torch.empty(sizes, dtype=images.dtype, device="cpu", memory_format=torch.channels_last)
        for part in tiles.parts():
            pixels = tiles.empty_planes(part, channels)
            tiles.call("images_to_planes", images[part], pixels, channels=channels)
            products = torch.bmm(pixels, weights.mT, out=tiles.empty_planes(part, outputs))
            tiles.call("planes_to_outputs", products, out[part], channels=outputs)
        ctx.save_for_backward(images, weights)  # `weights` takes up to seven times the memory of `weight`
        ctx.tiles = tiles
        return out if bias is None else out.add_(bias.view(1, -1, 1, 1))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        images, weights = ctx.saved_tensors
        tiles, wanted, (_, outputs, channels) = ctx.tiles, ctx.needs_input_grad, weights.shape
        gradient = gradient.contiguous(memory_format=torch.channels_last)
        image_gradient = torch.empty_like(images) if wanted[0] else None
        weight_planes: Tensor | None = None  # the gradient of `weights`
        for part in tiles.parts():
            output_planes = tiles.empty_planes(part, outputs)
            tiles.call("gradient_to_planes", gradient[part], output_planes, channels=outputs)
            image_planes = tiles.empty_planes(part, channels)
            if wanted[1]:
                tiles.call("images_to_planes", images[part], image_planes, channels=channels)
                # with `out`: without it autocast changes the format, if backward runs within autocast
                if weight_planes is None:
                    weight_planes = torch.bmm(output_planes.mT, image_planes, out=torch.empty_like(weights)).float()
                elif weight_planes.dtype == image_planes.dtype:
                    torch.baddbmm(weight_planes, output_planes.mT, image_planes, out=weight_planes)
                else:  # sum in float32
                    weight_planes += torch.bmm(output_planes.mT, image_planes, out=torch.empty_like(weights))
            if image_gradient is not None:
                image_planes = torch.bmm(output_planes, weights, out=image_planes)
                tiles.call("planes_to_gradient", image_planes, image_gradient[part], channels=channels)
        weight_gradient = tiles.planes_to_weights(weight_planes) if weight_planes is not None else None
        bias_gradient = gradient.sum((0, 2, 3), dtype=torch.float32) if wanted[2] else None
        return image_gradient, weight_gradient, bias_gradient, None


def convolve(images: Tensor, weight: Tensor, bias: Tensor | None, stride: Pair, padding: Pair) -> Tensor:
    """`conv2d` with one group and no dilation, by Winograd's method where that fits; equal up to rounding."""
    if torch.is_autocast_enabled("cpu") and images.is_cpu and images.dtype in SIDES:
        images = images.to(torch.get_autocast_dtype("cpu"))
    side = choose_side(images, weight, stride, padding)
    if side is None:
        return conv2d(images, weight, bias, stride, padding)
    if side == 1:
        return conv2d(images, weight[:, :, 1:2, 1:2], bias)
    # float32 weights, so that they are transformed and their gradients summed in float32
    return _WinogradConvolution.apply(images, weight.float(), bias, side)  # type: ignore[no-any-return]


def choose_side(images: Tensor, weight: Tensor, stride: Pair, padding: Pair) -> int | None:
    """Return the tile side that `convolve` takes for images [N, C, H, W] and weights [O, C, kernel]; 1 for 1x1 images,
    where only the kernel's centre matters.

    None for a direct convolution: Winograd's method here needs float32 or bf16 on a CPU, a 3x3 kernel, stride 1,
    padding 1, and C and O multiples of `CHANNELS`. None also if the two C or number formats differ, an error that
    PyTorch reports.
    """
    same = images.dtype == weight.dtype or (weight.dtype == torch.float32 and torch.is_autocast_enabled("cpu"))
    here = images.is_cpu and images.dtype in SIDES and same
    fits = images.dim() == 4 and len(images) and images.shape[1] == weight.shape[1]
    whole = not any(count % CHANNELS for count in weight.shape[:2])
    if not (here and fits and whole and (*weight.shape[2:], *stride, *padding) == (3, 3, 1, 1, 1, 1)):
        return None
    height, width = images.shape[2:]
    return 1 if (height, width) == (1, 1) else best_side(height, width, images.dtype)


class WinogradConv2d(nn.Conv2d):
    """Conv2d with one group, no dilation and zero padding, by Winograd's method where that fits."""

    def forward(self, images: Tensor) -> Tensor:
        """Images [N, C, H, W] -> [N, out_channels, ...]."""
        padding: Any = self.padding  # may be declared as a word
        return convolve(images, self.weight, self.bias, self.stride, padding)  # type: ignore[arg-type]


def use_winograd(model: nn.Module) -> None:
    """Turn convolutions of `model` into `WinogradConv2d`. `ConfigError` if none fits or the compiler fails."""
    found = [module for module in model.modules() if type(module) is nn.Conv2d and _fits(module)]
    if not found:
        raise ConfigError(
            "cpu_kernels [winograd]: the network has no 3x3 convolution with stride 1, padding 1, one group and at "
            f"least {MIN_CHANNEL_PAIRS} pairs of input and output channels, both multiples of {CHANNELS}"
        )
    build("winograd")
    for module in found:
        module.__class__ = WinogradConv2d


def _fits(module: nn.Conv2d) -> bool:
    plain = module.groups == 1 and set(module.dilation) == {1} and module.padding_mode == "zeros"
    size = module.kernel_size == (3, 3) and module.stride == (1, 1) and module.padding == (1, 1)
    channels = module.in_channels, module.out_channels
    enough = channels[0] * channels[1] >= MIN_CHANNEL_PAIRS and not any(count % CHANNELS for count in channels)
    return plain and size and enough and module.weight.dtype in SIDES
