"""Class folders of a few small images, and shards made of them."""

import io
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from test_folders import write_image

CLASSES = ("ant", "bée", "cat")
NUM_TRAIN, NUM_VALID = 8, 5  # of each class


def make_folders(root: Path) -> Path:
    """JPEG of many sizes, and a PNG in each class."""
    for label, name in enumerate(CLASSES):
        for split, count in (("train", NUM_TRAIN), ("val", NUM_VALID)):
            for number in range(count):
                kind = ".png" if number == 4 else ".JPEG"
                seed = 1000 * label + 10 * number + (split == "val")
                write_image(root / split / name / f"{number}{kind}", seed, 70 + 9 * number, 110 - 5 * number)
    return root


def rewrite(path: Path, change: Callable[[list[tuple[tarfile.TarInfo, bytes]]], Any]) -> None:
    """Write a shard anew with `change` made to the list of its members."""
    with tarfile.open(path) as tar:
        rows = [(info, tar.extractfile(info).read()) for info in tar]
    change(rows)
    with tarfile.open(path, "w") as tar:
        for info, content in rows:
            info.size = len(content) if info.isreg() else 0
            tar.addfile(info, io.BytesIO(content))
