"""Class folders of a few small images, and changes of their shards."""

import io
import tarfile

import numpy as np
from PIL import Image

CLASSES = ("ant", "bée", "cat")
NUM_TRAIN, NUM_VALID = 8, 5  # of each class
SETTINGS = {
    "data_loader": "torchvision", "num_classes": len(CLASSES), "batch_size": 6, "valid_batch_size_per_gpu": 4,
    "limit_train_batches": None, "limit_valid_batches": None,
}  # fmt: skip
IMAGENET = {
    "dataset": "imagenet", "image_size": 48, "rnd_resized_crop": True, "rnd_crop_padding": 0, "rnd_rotation_angle": 0.0
}  # fmt: skip


def write_image(path, seed, width, height):
    """Write an image with smooth colours, as in photographs: JPEG and resizing change them little."""
    coarse = np.random.default_rng(seed).integers(0, 256, (4, 4, 3), np.uint8)
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(coarse).resize((width, height), Image.Resampling.BICUBIC).save(path, quality=95)


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


def rewrite(path, change):
    """Rewrite a shard after `change` of the list of its members, (TarInfo, bytes) each."""
    with tarfile.open(path) as tar:
        rows = [(info, tar.extractfile(info).read()) for info in tar]
    change(rows)
    with tarfile.open(path, "w") as tar:
        for info, content in rows:
            info.size = len(content) if info.isreg() else 0
            tar.addfile(info, io.BytesIO(content))
