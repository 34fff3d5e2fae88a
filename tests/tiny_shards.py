"""Class folders of a few small images, and changes of their shards."""

import io
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

CLASSES = ("ant", "bée", "cat")
NUM_TRAIN, NUM_VALID = 8, 5  # of each class
SETTINGS: dict[str, Any] = {
    "data_loader": "torchvision", "num_classes": len(CLASSES), "batch_size": 6, "valid_batch_size_per_gpu": 4,
    "limit_train_batches": None, "limit_valid_batches": None,
}  # fmt: skip
IMAGENET = {
    "dataset": "imagenet", "image_size": 48, "rnd_resized_crop": True, "rnd_crop_padding": 0, "rnd_rotation_angle": 0.0
}  # fmt: skip


def write_image(path: Path, seed: int, width: int, height: int) -> None:
    """Write an image with smooth colours, as in photographs: JPEG and resizing change them little."""
    coarse = np.random.default_rng(seed).integers(0, 256, (4, 4, 3), np.uint8)
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(coarse).resize((width, height), Image.Resampling.BICUBIC).save(path, quality=95)


def make_folders(root: Path) -> Path:
    """Write JPEG of many sizes, and a PNG in each class and split."""
    for label, name in enumerate(CLASSES):
        for split, count in (("train", NUM_TRAIN), ("val", NUM_VALID)):
            for number in range(count):
                kind = ".png" if number == 4 else ".JPEG"
                seed = 1000 * label + 10 * number + (split == "val")
                write_image(root / split / name / f"{number}{kind}", seed, 70 + 9 * number, 110 - 5 * number)
    return root


def rewrite(path: Path, change: Callable[[list[tuple[tarfile.TarInfo, bytes]]], Any]) -> None:
    """Rewrite a shard after `change` of the list of its members."""
    with tarfile.open(path) as tar:
        rows = [(info, tar.extractfile(info).read()) for info in tar]
    change(rows)
    with tarfile.open(path, "w") as tar:
        for info, content in rows:
            info.size = len(content) if info.isreg() else 0
            tar.addfile(info, io.BytesIO(content))
