"""CONV: 3x3 convolutions on a CPU by Winograd's minimal filtering, in float32 or bf16.

A. Lavin and S. Gray, "Fast Algorithms for Convolutional Neural Networks" (arXiv:1509.09308): a tile of side x side
outputs is A'[(G w G') * (B'xB)]A, with x the (side + 2) x (side + 2) pixels that it sees, w one kernel, and * number by
number. Over all channels and tiles the middle is one product of matrices for each place of a tile: for sides of 2, 3,
4 and 6 with 2.25, 3.24, 4 and 5.06 times fewer multiplications than the convolution itself. Backward turns the same
steps round: gradients are made by the transposed transforms and products of the same size. winograd.cpp has the
transforms.

A 2x2 max-pool behind a convolution is taken where tiles become outputs, which are then never in memory.

In bf16 images and planes are bf16; weights become planes from float32, and their gradients are sums in float32.
"""

import ctypes
from collections import Counter
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.functional import conv2d, max_pool2d

from utils.training.config import SpeedConfig
from utils.training.kernels.compilers import build_kernels, has_compiler, replace_convolutions
from utils.training.precision import Precision, has_bf16_kernels

# By the number format of images. Roundings to bf16 move what a direct convolution makes by 0.3 % of its deviation, with
# sides of 2, 3 and 4 by 0.4, 1.5 and 1.2 %, but with 6 by 5 %.
SIDES = {torch.float32: (2, 3, 4, 6), torch.bfloat16: (2, 3, 4)}
# Figures of one machine with AVX2, and for bf16 of one with AVX-512 BF16, each with two threads
# for each thread at a time: products of good size, and planes that stay in the cache
TILES = {torch.float32: 128, torch.bfloat16: 256}
ENOUGH = 32 * 32  # input times output channels: with fewer the transforms cost what the products save
WORTH = 0.75  # share of the direct multiplications above which a direct convolution is as fast
DEARER = {6: 1.3}  # by side: its transforms of 8 x 8 numbers, counted as multiplications
CHANNELS = 16  # LANES of winograd.cpp: it takes multiples of so many channels
Pair = tuple[int, int]


def best_side(height: int, width: int, dtype: torch.dtype = torch.float32) -> int | None:
    """The side of tiles with which images of this size need the least work; None where that is more than `WORTH` of a
    direct convolution's."""
    tiles = {side: -(-height // side) * -(-width // side) for side in SIDES[dtype]}
    work = {side: count * (side + 2) ** 2 * DEARER.get(side, 1) for side, count in tiles.items()}
    side = min(work, key=lambda side: work[side])
    return side if work[side] <= WORTH * 9 * height * width else None


class _Tiles:
    """Planes [place, tiles, channels] of images of one size, and their transforms, for some images at a time."""

    def __init__(self, side: int, images: Tensor) -> None:
        self.side, (self.count, _, self.height, self.width) = side, images.shape
        self.each = -(-self.height // side) * -(-self.width // side)
        self.dtype = images.dtype
        self.at_once = max(1, TILES[self.dtype] * torch.get_num_threads() // self.each)

    def parts(self) -> list[slice]:
        """Which images are taken at a time."""
        return [slice(first, min(first + self.at_once, self.count)) for first in range(0, self.count, self.at_once)]

    def planes(self, part: slice, channels: int) -> Tensor:
        """Empty ones. They have a row more than there are tiles, which the transforms fill with zeros."""
        tiles = (part.stop - part.start) * self.each
        return torch.empty((self.side + 2) ** 2, tiles + 1, channels, dtype=self.dtype, device="cpu")

    def weights_to_planes(self, weight: Tensor) -> Tensor:
        """Float32 weights [O, C, 3, 3] -> [place, O, C]."""
        outputs, channels = weight.shape[:2]
        planes = torch.empty((self.side + 2) ** 2, outputs, channels, dtype=self.dtype, device="cpu")
        weight = weight.contiguous(memory_format=torch.channels_last)
        return self._run(self._name("weights_to_planes"), (weight, planes), outputs, channels)

    def planes_to_weights(self, planes: Tensor) -> Tensor:
        """Their gradient, the other way, both in float32."""
        _, outputs, channels = planes.shape
        sizes = outputs, channels, 3, 3
        gradient = torch.empty(sizes, dtype=torch.float32, device="cpu", memory_format=torch.channels_last)
        return self._run(f"planes_to_weights_{self.side}", (planes, gradient), outputs, channels)

    def call(self, name: str, *tensors: Tensor, channels: int) -> Tensor:
        """A transform of images in winograd.cpp; returns the last tensor."""
        images = next(len(tensor) for tensor in tensors if tensor.dim() == 4)
        return self._run(self._name(name), tensors, images, self.height, self.width, channels)

    def _name(self, name: str) -> str:
        return f"{name}_{self.side}_{str(self.dtype).removeprefix('torch.')}"

    def _run(self, name: str, tensors: tuple[Tensor, ...], *sizes: int) -> Tensor:
        addresses = (ctypes.c_void_p(tensor.data_ptr()) for tensor in tensors)
        build()[name](*addresses, *map(ctypes.c_int64, sizes))
        return tensors[-1]


class _WinogradConvolution(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, images: Tensor, weight: Tensor, bias: Tensor | None, side: int, pool: bool) -> Tensor:
        images = images.contiguous(memory_format=torch.channels_last)
        tiles = _Tiles(side, images)
        weights = tiles.weights_to_planes(weight)
        outputs, channels = weight.shape[:2]
        sizes = len(images), outputs, *(size // 2 if pool else size for size in images.shape[2:])
        out = torch.empty(sizes, dtype=images.dtype, device="cpu", memory_format=torch.channels_last)
        places = torch.empty_like(out, dtype=torch.uint8) if pool else None  # of the largest, in each 2 x 2
        for part in tiles.parts():
            seen = tiles.call("images_to_planes", images[part], tiles.planes(part, channels), channels=channels)
            made = torch.bmm(seen, weights.mT, out=tiles.planes(part, outputs))
            if places is None:
                tiles.call("planes_to_outputs", made, out[part], channels=outputs)
            else:
                tiles.call("planes_to_pooled", made, out[part], places[part], channels=outputs)
        ctx.save_for_backward(images, weights, places)  # the weights' planes: up to seven times the memory of `weight`
        ctx.tiles = tiles
        return out if bias is None else out.add_(bias.view(1, -1, 1, 1))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        images, weights, places = ctx.saved_tensors
        tiles, wanted, (_, outputs, channels) = ctx.tiles, ctx.needs_input_grad, weights.shape
        gradient = gradient.contiguous(memory_format=torch.channels_last)
        of_images = torch.empty_like(images) if wanted[0] else None
        of_weights: Tensor | None = None
        for part in tiles.parts():
            met = tiles.planes(part, outputs)
            if places is None:
                tiles.call("gradient_to_planes", gradient[part], met, channels=outputs)
            else:
                tiles.call("pooled_to_planes", gradient[part], places[part], met, channels=outputs)
            planes = tiles.planes(part, channels)
            if wanted[1]:
                tiles.call("images_to_planes", images[part], planes, channels=channels)
                # `out`, as autocast changes the format of what has none, for those who go backward within it
                if of_weights is None:
                    of_weights = torch.bmm(met.mT, planes, out=torch.empty_like(weights)).float()
                elif of_weights.dtype == planes.dtype:
                    torch.baddbmm(of_weights, met.mT, planes, out=of_weights)
                else:  # a sum in float32
                    of_weights += torch.bmm(met.mT, planes, out=torch.empty_like(weights))
            if of_images is not None:
                planes = torch.bmm(met, weights, out=planes)
                tiles.call("planes_to_gradient", planes, of_images[part], channels=channels)
        of_weight = tiles.planes_to_weights(of_weights) if of_weights is not None else None
        of_bias = gradient.sum((0, 2, 3), dtype=torch.float32) if wanted[2] else None
        return of_images, of_weight, of_bias, None, None


def convolve(
    images: Tensor, weight: Tensor, bias: Tensor | None, stride: Pair, padding: Pair, *, pool: bool = False
) -> Tensor:
    """`conv2d` with one group and no dilation, by Winograd's method where it has one; the same up to rounding. `pool`:
    and `max_pool2d` of 2 x 2 behind it."""
    if torch.is_autocast_enabled("cpu") and images.is_cpu and images.dtype in SIDES:
        images = images.to(torch.get_autocast_dtype("cpu"))
    side = choose_side(images, weight, stride, padding)
    if side is None:
        out = conv2d(images, weight, bias, stride, padding)
    elif side == 1:
        out = conv2d(images, weight[:, :, 1:2, 1:2], bias)
    else:
        whole = pool and not side % 2 and min(images.shape[2:]) > 1  # tiles are whole squares of 2 x 2
        # weights become planes from float32, and their gradients are sums in it
        out = _WinogradConvolution.apply(images, weight.float(), bias, side, whole)
        pool = pool and not whole
    return max_pool2d(out, 2) if pool else out


def choose_side(images: Tensor, weight: Tensor, stride: Pair, padding: Pair) -> int | None:
    """The side of the tiles that `convolve` takes for images [N, C, H, W] and weights [O, C, kernel]; 1 where images
    are one pixel, which meets the kernel's centre alone. None where it is direct, as Winograd's method here needs
    float32 or bf16 on a CPU, a 3x3 kernel, stride 1, padding 1, and C and O multiples of `CHANNELS`; also where the two
    C, or the number formats, differ, which PyTorch then refuses.
    """
    alike = images.dtype == weight.dtype or (weight.dtype == torch.float32 and torch.is_autocast_enabled("cpu"))
    here = images.is_cpu and images.dtype in SIDES and alike
    fits = images.dim() == 4 and len(images) and images.shape[1] == weight.shape[1]
    whole = not any(count % CHANNELS for count in weight.shape[:2])
    if not (here and fits and whole and (*weight.shape[2:], *stride, *padding) == (3, 3, 1, 1, 1, 1)):
        return None
    height, width = images.shape[2:]
    return 1 if (height, width) == (1, 1) else best_side(height, width, images.dtype)


class WinogradConv2d(nn.Conv2d):
    """Conv2d with one group, no dilation and zeros around the images, by Winograd's method where it has one."""

    def forward(self, images: Tensor) -> Tensor:
        """Images [N, C, H, W] -> [N, out_channels, ...]."""
        padding: Any = self.padding  # declared as a word, too
        return convolve(images, self.weight, self.bias, self.stride, padding)  # type: ignore[arg-type]


class PooledWinogradConv2d(WinogradConv2d):
    """With the 2x2 max-pool behind it; no bias."""

    def forward(self, images: Tensor) -> Tensor:
        """Images [N, C, H, W] -> [N, out_channels, H / 2, W / 2]."""
        padding: Any = self.padding
        return convolve(images, self.weight, None, self.stride, padding, pool=True)  # type: ignore[arg-type]


def use_winograd(config: SpeedConfig, model: nn.Module, precision: Precision, device: torch.device) -> list[str]:
    """Make `WinogradConv2d` of the convolutions of `model`, as `conv_winograd` asks; returns notes for the log.
    `ConfigError` where it cannot be had, or the network has none that fits."""
    quick = precision.level == "O0" or has_bf16_kernels()
    missing = (
        f"3x3 convolution with stride 1, padding 1, one group and at least {ENOUGH} pairs of input and output "
        f"channels, both multiples of {CHANNELS}"
    )
    notes = replace_convolutions(
        config, "conv_winograd", model, device, _fits, WinogradConv2d,
        auto=quick and has_compiler(), missing=missing, build=build,
    )  # fmt: skip
    _take_pools(model)
    return notes


@cache
def build() -> Any:
    """The library of the transforms. `ConfigError` where the compiler fails."""
    return build_kernels(Path(__file__).with_suffix(".cpp"), "conv_winograd")


def _take_pools(model: nn.Module) -> None:
    """Make one of each of our convolutions and the 2x2 max-pool behind it in a Sequential, unless the convolution is in
    a second place too."""
    places = Counter(module for _, module in model.named_modules(remove_duplicate=False))
    for layers in model.modules():
        if type(layers) is not nn.Sequential:
            continue
        for place in range(len(layers) - 1):
            convolution, pool = layers[place], layers[place + 1]
            ours = type(convolution) is WinogradConv2d and convolution.bias is None and places[convolution] == 1
            if ours and type(pool) is nn.MaxPool2d and _halves(pool):
                convolution.__class__, layers[place + 1] = PooledWinogradConv2d, nn.Identity()


def _halves(pool: nn.MaxPool2d) -> bool:
    sizes = (pool.kernel_size, pool.stride, pool.padding, pool.dilation)
    return sizes == (2, 2, 0, 1) and not pool.ceil_mode and not pool.return_indices


def _fits(module: nn.Conv2d) -> bool:
    plain = module.groups == 1 and set(module.dilation) == {1} and module.padding_mode == "zeros"
    around = module.kernel_size == (3, 3) and module.stride == (1, 1) and module.padding == (1, 1)
    channels = module.in_channels, module.out_channels
    enough = channels[0] * channels[1] >= ENOUGH and not any(count % CHANNELS for count in channels)
    return plain and around and enough and module.weight.dtype in SIDES
