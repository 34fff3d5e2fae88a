"""Class folders of a few small images, changes of their shards, and loaders as of one of several ranks."""

import io
import tarfile

import numpy as np
import pytest
import torch
from PIL import Image

from utils.data.build import build_loaders, open_dataset
from utils.distributed.world import World
from utils.environment import dali_version

needs_dali = pytest.mark.skipif(dali_version() is None, reason="NVIDIA DALI is not installed")
DALI = pytest.param("dali", marks=[needs_dali, pytest.mark.dali])

CLASSES = ("ant", "bée", "cat")
NUM_TRAIN, NUM_VALID = 8, 5  # of each class
SETTINGS = {
    "data_loader": "torchvision", "num_classes": len(CLASSES), "batch_size": 6, "valid_batch_size_per_gpu": 4,
    "limit_train_batches": None, "limit_valid_batches": None}  # fmt: skip
IMAGENET = {
    "dataset": "imagenet", "image_size": 48, "rnd_resized_crop": True, "rnd_crop_padding": 0, "rnd_rotation_angle": 0.0
}  # fmt: skip


def picture(seed=0, width=32, height=32):
    """An image with smooth colours, as in photographs: JPEG and resizing change them little."""
    coarse = np.random.default_rng(seed).integers(0, 256, (4, 4, 3), np.uint8)
    return Image.fromarray(coarse).resize((width, height), Image.Resampling.BICUBIC)


def encode(kind, image=None, **options):
    """Return the bytes of a file of this kind, such as "PNG"."""
    file = io.BytesIO()
    (image or picture()).save(file, kind, **options)
    return file.getvalue()


def write_image(path, seed, width, height):
    path.parent.mkdir(parents=True, exist_ok=True)
    picture(seed, width, height).save(path, quality=95)


def make_folders(root, classes=CLASSES, num_train=NUM_TRAIN, num_valid=NUM_VALID, size=None, extension=".JPEG"):
    """Write squares of `size`; without it images of many sizes, one of them a PNG in each class and split."""
    for label, name in enumerate(classes):
        for split, count in (("train", num_train), ("val", num_valid)):
            for number in range(count):
                kind = ".png" if number == 4 and size is None else extension
                width, height = (size, size) if size else (70 + 9 * number, 110 - 5 * number)
                seed = 1000 * label + 10 * number + (split == "val")
                write_image(root / split / name / f"{number}{kind}", seed, width, height)
    return root


class Pretended(World):
    """A rank whose collectives assume that all ranks contribute the same value."""

    def all_gather(self, value):
        return [value] * self.world_size

    def main_only(self, action):
        return action()


def pretend(rank=0, world_size=1):
    return Pretended(rank, rank, world_size, torch.device("cpu"))


def build(config, rank=0, world_size=1):
    world = pretend(rank, world_size)
    return build_loaders(config, open_dataset(config, world), world)


def everything(loader, epoch=0):
    """All images and labels of an epoch."""
    loader.set_epoch(epoch)
    images, labels = zip(*loader, strict=True)
    return torch.cat(images), torch.cat(labels)


def rewrite(path, change):
    """Rewrite a shard after `change` of the list of its members, (TarInfo, bytes) each."""
    with tarfile.open(path) as tar:
        rows = [(info, tar.extractfile(info).read()) for info in tar]
    change(rows)
    with tarfile.open(path, "w") as tar:
        for info, content in rows:
            info.size = len(content) if info.isreg() else 0
            tar.addfile(info, io.BytesIO(content))
