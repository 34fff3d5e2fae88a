"""What a recipe adds around the training step: image size by epoch, averaged weights, validation with mirror images."""

from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from utils.config import Config
from utils.precision import Precision


def training_size(config: Config, epoch: int) -> int | None:
    """The side in pixels that images are resized to in `epoch` (counted from 0); None: as they are."""
    for size, share in zip(config.progressive_image_sizes, config.progressive_image_shares, strict=True):
        if epoch < round(share * config.max_epochs):
            return size
    return None


def resize(images: Tensor, size: int | None) -> Tensor:
    """Images [N, 3, H, W] -> [N, 3, size, size], smoothed as far as they shrink, in the same memory format."""
    if size is None:
        return images
    return nn.functional.interpolate(images, size=(size, size), mode="bilinear", antialias=True)


def build_average(config: Config, model: nn.Module) -> AveragedModel | None:
    """The exponential moving average of weights and BatchNorm statistics that `ema_decay` asks for.

    Each rank averages its own: weights are the same on all of them, statistics are averaged before validation.
    """
    if config.ema_decay is None:
        return None
    return AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(config.ema_decay), use_buffers=True)


def predict(precision: Precision, model: nn.Module, images: Tensor, *, mirrored: bool) -> Tensor:
    """Images [N, 3, H, W] -> float32 logits [N, classes]; `mirrored`: the mean over each image and its mirror image."""
    outputs = precision.forward(model, images)
    return (outputs + precision.forward(model, images.flip(-1))) / 2 if mirrored else outputs
