"""Class folders to measure shards with, from CIFAR-100's binary version.

python results/2026-11-22-shards/make_folders.py data/cifar-100-binary OUT 32   # 50,000 PNG as they are
python results/2026-11-22-shards/make_folders.py data/cifar-100-binary OUT 256  # 10,000 JPEG, with noise
"""

import sys
from pathlib import Path

import numpy as np
from PIL import Image


def main(source: Path, target: Path, side: int) -> None:
    """Write the training images and 1,000 test images; only the time to read them is measured."""
    generator = np.random.default_rng(0)
    for split, file, number in (("train", "train.bin", 50_000 if side == 32 else 10_000), ("val", "test.bin", 1_000)):
        records = np.fromfile(source / file, np.uint8).reshape(-1, 3074)[:number]
        for index, record in enumerate(records):
            image = Image.fromarray(record[2:].reshape(3, 32, 32).transpose(1, 2, 0))
            folder = target / split / f"class-{record[1]:03d}"
            folder.mkdir(parents=True, exist_ok=True)
            if side == 32:
                image.save(folder / f"{index:05d}.png")
            else:
                pixels = np.asarray(image.resize((side, side), Image.Resampling.BICUBIC)).astype(np.int16)
                noisy = np.clip(pixels + generator.integers(-20, 21, pixels.shape, np.int16), 0, 255).astype(np.uint8)
                Image.fromarray(noisy).save(folder / f"{index:05d}.jpg", quality=90)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]))
