"""The data settings. No torch."""

from typing import Annotated, Literal

from pydantic import Field, model_validator

from utils.base_config import KeyFlag, NonNegativeInt, PathText, PositiveInt, SharedConfig
from utils.user_code import OwnCode

PerChannel = Field(strict=False, min_length=3, max_length=3)

LOADERS_WITH_WORKERS = ("torchvision", "dali")  # num_data_workers applies
Dataset = Literal["cifar100", "cifar10", "shapes", "imagefolder", "imagenet"] | OwnCode


class DatasetConfig(SharedConfig):
    """dataset"""

    dataset: Annotated[Dataset, KeyFlag.FIXED_ON_RESUME] = "cifar100"
    """cifar100, cifar10, shapes (built in, needs no file), imagefolder, imagenet. The last two are images in class
    folders, data_path/train/CLASS/ and data_path/val/CLASS/, or shards packed by tools.prepare_data. Or your own
    package.module:function, which is called with data_path; docs/own_code.md describes its return value."""
    data_path: Annotated[PathText, KeyFlag.FREE_ON_RESUME] = "./data"
    """The folder that holds CIFAR's folder (binary or torchvision's), or train/ and val/, or shards.index."""
    cifar100_mean: Annotated[
        tuple[Annotated[float, Field(ge=0, le=1)], ...], PerChannel, KeyFlag.FREE_ON_RESUME
    ] = (0.5070751592371323, 0.48654887331495095, 0.4409178433670343)  # fmt: skip
    """Per-channel mean of CIFAR-100's training images, in [0, 1]; other datasets have their own."""
    cifar100_std: Annotated[
        tuple[Annotated[float, Field(gt=0, le=1)], ...], PerChannel, KeyFlag.FREE_ON_RESUME
    ] = (0.2673342858792401, 0.2564384629170883, 0.27615047132568404)  # fmt: skip
    """Per-channel standard deviation of CIFAR-100's training images, in [0, 1]."""
    holdout_images: Annotated[NonNegativeInt, KeyFlag.FIXED_ON_RESUME] = 0
    """Hold out N training images for validation; the test images are then read once, at the end. The same fraction of
    each class is held out. 0: validate on the test images, as the tutorial does; then whatever validation selects (the
    best epoch, stop_at_accuracy, a search) looks better than it is on unseen images."""
    image_size: PositiveInt | None = None
    """Image files: resize to this many pixels; null: 224 for imagenet, else the median shorter side."""


class AugmentationConfig(SharedConfig):
    """augmentation"""

    rnd_crop_padding: Annotated[int, Field(ge=0, le=32)] = 4
    """Crop at random after padding with this many black pixels on each side; 0: no crop."""
    rnd_horizontal_flip: Literal[True, False, "alternating"] = True
    """Flip training images horizontally with probability 0.5. alternating: mirror each image in every second epoch."""
    rnd_rotation_angle: Annotated[float, Field(ge=0, le=180)] = 15
    """Rotate training images by up to this many degrees either way; 0: no rotation."""
    rnd_resized_crop: bool = False
    """Class folders: crop 8 to 100 % of the image at random, and resize it to image_size."""
    cutout_size: NonNegativeInt = 0
    """Blank a square of this many pixels at a random position; 0: none."""
    mixup_alpha: Annotated[float, Field(ge=0)] = 0.0
    """Blend pairs of training images, with weights from Beta(alpha, alpha); 0: none. Training accuracy then counts the
    class with the larger weight."""
    cutmix_alpha: Annotated[float, Field(ge=0)] = 0.0
    """Paste a rectangle of one image into another, its area from Beta(alpha, alpha); 0: none. With mixup too, each
    image gets one of the two at random."""

    @property
    def augments_images(self) -> bool:
        """Whether the loader augments; cutout, mixup and cutmix come after it."""
        crops = self.rnd_crop_padding or self.rnd_resized_crop
        return bool(crops or self.rnd_horizontal_flip or self.rnd_rotation_angle)


class LoaderConfig(SharedConfig):
    """loader"""

    data_loader: Literal["torchvision", "dali", "device", "synthetic"] = "torchvision"
    """torchvision (worker processes), dali, device (dataset on the device), synthetic (no input). synthetic repeats one
    random batch, to time training without input."""
    num_data_workers: Annotated[NonNegativeInt, KeyFlag.FREE_ON_RESUME] = 6
    """Workers (torchvision) or threads (dali) of each rank, at most its cores; 0: none."""
    valid_batch_size_per_gpu: Annotated[PositiveInt, KeyFlag.FREE_ON_RESUME] = 128
    """Validation batch size of each rank, on a GPU or a CPU."""
    limit_train_batches: Annotated[PositiveInt | None, KeyFlag.FIXED_ON_RESUME] = None
    """Train on this many batches of each epoch only; null: all."""
    limit_valid_batches: PositiveInt | None = None
    """Validate on this many batches of each rank only; null: all."""
    enable_profiling: Annotated[bool, KeyFlag.FREE_ON_RESUME] = False
    """PROF: NVTX ranges for Nsight Systems, else a trace with a summary."""
    profiling_epoch_start: Annotated[PositiveInt, KeyFlag.FREE_ON_RESUME] = 2
    """PROF: the epoch to profile, counted from 1."""
    profiling_iters_per_epoch: Annotated[PositiveInt, KeyFlag.FREE_ON_RESUME] = 100
    """PROF: training batches per epoch while profiling is enabled."""


class DataConfig(LoaderConfig, AugmentationConfig, DatasetConfig):
    """All data settings."""

    @model_validator(mode="after")
    def _check_use(self) -> "DataConfig":
        if self.image_size is not None and self.dataset in ("cifar100", "cifar10", "shapes"):
            raise ValueError(f"image_size is for image files; the images of {self.dataset} have 32 pixels, so use null")
        if self.holdout_images and self.data_loader == "synthetic":
            raise ValueError(f"data_loader {self.data_loader} reads no images to hold out; set holdout_images to 0")
        return self
