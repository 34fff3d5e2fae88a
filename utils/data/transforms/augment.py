"""The tutorial's augmentation: image by image with torchvision, or a whole batch in one gather.

Both take the same `Augmentation` parameters and give the same bits.
"""

import numpy as np
import torch
from torch import Tensor, nn

from utils.data.sampling import Augmentation

FIXED_POINT = 65536  # PIL rotates in 16.16 fixed-point arithmetic


class Normalise:
    """uint8 [N, 3, H, W] -> float32 (x / 255 - mean) / std, in `memory_format`."""

    def __init__(
        self, mean: tuple[float, ...], std: tuple[float, ...], device: torch.device, memory_format: torch.memory_format
    ) -> None:
        self.device, self.memory_format = device, memory_format
        self.set_statistics(mean, std)

    def set_statistics(self, mean: tuple[float, ...], std: tuple[float, ...]) -> None:
        self.mean, self.std = mean, std
        # one product and one sum: half the passes over the batch
        exact_mean, exact_std = (torch.tensor(values, dtype=torch.float64).view(1, 3, 1, 1) for values in (mean, std))
        self.scale = (1 / (255 * exact_std)).float().to(self.device)
        self.shift = (-exact_mean / exact_std).float().to(self.device)

    def __call__(self, images: Tensor) -> Tensor:
        # Arithmetic before the change of format: whole planes are contiguous, but channels_last has runs of three.
        normalised = images.float().mul_(self.scale).add_(self.shift)
        return normalised.contiguous(memory_format=self.memory_format)


def augment_each(images: np.ndarray, augmentation: Augmentation) -> np.ndarray:
    """Crop, flip and rotate each image with torchvision on PIL images; uint8 [N, 3, H, W] -> uint8 [N, 3, H, W]."""
    from PIL import Image
    from torchvision.transforms import functional

    height, width = images.shape[2:]
    result = np.empty_like(images)
    for row, pixels in enumerate(images):
        image = Image.fromarray(np.ascontiguousarray(pixels.transpose(1, 2, 0)))
        top, left = int(augmentation.shift_y[row]), int(augmentation.shift_x[row])
        if top or left:
            image = functional.crop(image, top, left, height, width)  # black outside
        if augmentation.flip[row]:
            image = functional.hflip(image)
        if augmentation.angle[row]:
            image = functional.rotate(image, float(augmentation.angle[row]))
        result[row] = np.asarray(image).transpose(2, 0, 1)
    return result


def pixel_maps(augmentation: Augmentation, height: int, width: int) -> np.ndarray:
    """Return `BatchAugmenter`'s parameters of each image, int32 [N, 9].

    They combine rotation, flip and crop: output pixel (row, column) shows the source pixel whose column is
    (a * column + b * row + c) >> 16, counted from the first visible column; black if that is negative or above `last`.
    Rows likewise. The nine values are (a, b, c, last) for the column, the same for the row, and one plus the index of
    the first visible pixel in the flattened image.
    """
    # as PIL.Image.rotate and affine_fixed in its Geometry.c: nearest neighbour about the image's centre
    angle = -np.radians(np.mod(augmentation.angle, 360))
    cos, sin = np.round(np.cos(angle), 15), np.round(np.sin(angle), 15)
    centre_x, centre_y = width / 2, height / 2
    column = [cos, sin, centre_x - cos * centre_x - sin * centre_y + 0.5 * (cos + sin)]
    row = [-sin, cos, centre_y + sin * centre_x - cos * centre_y + 0.5 * (cos - sin)]
    column, row = ([np.floor(part * FIXED_POINT + 0.5).astype(np.int64) for part in parts] for parts in (column, row))
    # width - 1 - floor(x) = floor(width - x) unless x is whole: one unit less in fixed point
    mirrored = [-column[0], -column[1], width * FIXED_POINT - 1 - column[2]]
    column = [np.where(augmentation.flip, there, here) for there, here in zip(mirrored, column, strict=True)]
    values, first = [], np.int64(1)
    for parts, shift, size, stride in (
        (column, augmentation.shift_x, width, 1),
        (row, augmentation.shift_y, height, width),
    ):
        low, high = np.maximum(0, -shift), np.minimum(size, size - shift)
        values += [parts[0], parts[1], parts[2] - low * FIXED_POINT, high - low - 1]
        first = first + (low + shift) * stride
    return np.stack([*values, first], axis=1).astype(np.int32)


class BatchAugmenter:
    """Crops, flips and rotates a whole batch on its device, as one gather of pixels.

    For few and cheap passes it uses int32 throughout, signs instead of comparisons (slow on a CPU), and permanent
    buffers (on a CPU, fresh memory costs as much as the arithmetic).
    """

    def __init__(self, height: int, width: int, device: torch.device) -> None:
        self.width = width
        rows, columns = torch.meshgrid(torch.arange(height), torch.arange(width), indexing="ij")
        self.rows = rows.reshape(1, -1).int().to(device)  # [1, H * W]
        self.columns = columns.reshape(1, -1).int().to(device)
        self.buffers = torch.empty(3, 0, height * width, dtype=torch.int32, device=device)

    def __call__(self, images: Tensor, maps: Tensor) -> Tensor:
        """uint8 [N, C, H, W] and `pixel_maps` [N, 9] on the same device -> uint8 [N, C, H, W]."""
        if len(images) != self.buffers.shape[1]:
            self.buffers = self.buffers.new_empty(3, len(images), self.buffers.shape[2])
        x, y, scratch = self.buffers.unbind()  # each [N, H * W]
        column, row, first = maps.t().unsqueeze(2).split([4, 4, 1])  # of [N, 1] values
        for position, (a, b, c, _) in ((x, column), (y, row)):
            torch.mul(self.columns, a, out=position)
            position.add_(torch.mul(self.rows, b, out=scratch)).add_(c).bitwise_right_shift_(16)
        # negative if the source lies outside on any of the four sides; the shift turns the sign into a mask
        outside = torch.sub(column[3], x, out=scratch).bitwise_or_(x).bitwise_or_(y)
        source = x.add_(y, alpha=self.width).add_(first[0])
        outside |= torch.sub(row[3], y, out=y)
        outside >>= 31
        source &= outside.bitwise_not_()
        # pixel 0 of the padded image is black
        padded = nn.functional.pad(images.flatten(2), (1, 0))
        return padded.gather(2, source.long().unsqueeze(1).expand(-1, images.shape[1], -1)).view(images.shape)
