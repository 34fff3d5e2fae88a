"""How the tutorial's augmentation is done: image by image with torchvision, or a whole batch in one gather.

Both take the same `Augmentation` parameters and agree: exactly for crop and flip, and for the rotation but for pixels
whose source lies on the border between two (nearest neighbour, fixed-point against floating-point arithmetic).
"""

import math

import numpy as np
import torch
from torch import Tensor

from utils.data.sampling import Augmentation


class Normalise:
    """uint8 [N, 3, H, W] -> float32 (x / 255 - mean) / std, in the memory format that is asked for."""

    def __init__(
        self, mean: tuple[float, ...], std: tuple[float, ...], device: torch.device, memory_format: torch.memory_format
    ) -> None:
        self.mean = torch.tensor(mean, device=device).view(1, 3, 1, 1)
        self.std = torch.tensor(std, device=device).view(1, 3, 1, 1)
        self.memory_format = memory_format

    def __call__(self, images: Tensor) -> Tensor:
        return images.contiguous(memory_format=self.memory_format).float().div_(255).sub_(self.mean).div_(self.std)


def augment_each(images: np.ndarray, augmentation: Augmentation, crop_padding: int) -> np.ndarray:
    """uint8 [N, 3, H, W] -> the same, each image cropped, flipped and rotated by torchvision on PIL images."""
    from PIL import Image
    from torchvision.transforms import functional

    height, width = images.shape[2:]
    result = np.empty_like(images)
    for row, pixels in enumerate(images):
        image = Image.fromarray(np.ascontiguousarray(pixels.transpose(1, 2, 0)))
        if crop_padding:
            image = functional.pad(image, [crop_padding])
            image = functional.crop(
                image, int(augmentation.shift_y[row]), int(augmentation.shift_x[row]), height, width
            )
        if augmentation.flip[row]:
            image = functional.hflip(image)
        if augmentation.angle[row]:
            image = functional.rotate(image, float(augmentation.angle[row]))
        result[row] = np.asarray(image).transpose(2, 0, 1)
    return result


class BatchAugmenter:
    """Crop, flip and rotation of a whole batch on its device as one gather of pixels: each output pixel is traced back
    through the rotation, the flip and the crop to its source; what falls outside is black."""

    def __init__(self, height: int, width: int, crop_padding: int, device: torch.device) -> None:
        self.height, self.width, self.crop_padding = height, width, crop_padding
        self.rows = torch.arange(height, device=device).view(1, height, 1)
        self.columns = torch.arange(width, device=device).view(1, 1, width)

    def __call__(self, images: Tensor, shift_y: Tensor, shift_x: Tensor, flip: Tensor, angle: Tensor | None) -> Tensor:
        """uint8 [N, 3, H, W] with parameters [N] on the same device -> uint8 [N, 3, H, W]; angle None: no rotation."""
        num_images, channels = images.shape[:2]
        if angle is None:
            y, x = self.rows, self.columns
            inside = None
        else:
            y, x, inside = self._rotate(angle.view(-1, 1, 1))
        x = torch.where(flip.view(-1, 1, 1), self.width - 1 - x, x)
        y = y + (shift_y - self.crop_padding).view(-1, 1, 1)
        x = x + (shift_x - self.crop_padding).view(-1, 1, 1)
        visible = (y >= 0) & (y < self.height) & (x >= 0) & (x < self.width)
        if inside is not None:
            visible &= inside
        source = (y.clamp(0, self.height - 1) * self.width + x.clamp(0, self.width - 1)).view(num_images, 1, -1)
        pixels = images.flatten(2).gather(2, source.expand(-1, channels, -1)).view(images.shape)
        return pixels * visible.unsqueeze(1)

    def _rotate(self, angle: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Source row and column of each output pixel of a rotation about the image's centre by `angle` degrees
        counter-clockwise, nearest neighbour with pixel centres at +0.5 as in PIL, and which lie inside the image."""
        radians = angle * (math.pi / 180)
        cos, sin = radians.cos(), radians.sin()
        down, right = self.rows + 0.5 - self.height / 2, self.columns + 0.5 - self.width / 2
        x = (cos * right - sin * down + self.width / 2).floor().long()
        y = (sin * right + cos * down + self.height / 2).floor().long()
        return y, x, (y >= 0) & (y < self.height) & (x >= 0) & (x < self.width)
