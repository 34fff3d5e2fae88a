"""Every kind of file that a class folder may hold, with each loader."""

import io
import os
import struct
import warnings

import numpy as np
import pytest
import torch
from PIL import Image
from torchvision.datasets.folder import pil_loader

from tests.tiny_shards import DALI, encode, picture
from utils.data.build import build_loaders, open_dataset
from utils.data.dali import encode_for_dali
from utils.data.datasets.image_files import decode_image

SIZE = 32

READ, UNREADABLE, IGNORED = "read", "unreadable", "ignored"
FORMATS = {".png": "PNG", ".bmp": "BMP", ".ppm": "PPM", ".tif": "TIFF", ".tiff": "TIFF", ".pgm": "PPM", ".webp": "WEBP"}


def animated(kind, **options):
    return encode(kind, save_all=True, append_images=[picture(1), picture(2)], **options)


def with_alpha(kind, **options):
    image = picture()
    image.putalpha(picture(1).convert("L"))
    return encode(kind, image, **options)


JPEG = encode("JPEG", quality=90)
MIDDLE = (JPEG.rfind(b"\xff\xda") + len(JPEG)) // 2  # of the compressed data
GREY, DEEP = (encode("TIFF", picture().convert("L").convert(mode)) for mode in ("L", "I;16"))
BLACK_IS_ZERO, WHITE_IS_ZERO = (struct.pack("<HHII", 262, 3, 1, value) for value in (1, 0))
ROTATED = Image.Exif()
ROTATED[0x0112] = 6
ROWS = [  # (name, content or function of the path, outcome)
    ("grey.jpg", encode("JPEG", picture().convert("L")), READ),
    ("colour.JPEG", JPEG, READ),
    ("progressive.jpeg", encode("JPEG", progressive=True), READ),
    ("rotated.jpg", encode("JPEG", exif=ROTATED), READ),  # it is not rotated
    ("cmyk.jpg", encode("JPEG", picture().convert("CMYK")), READ),
    *((f"x{extension}", encode(kind), READ) for extension, kind in FORMATS.items()),
    ("rgba.png", with_alpha("PNG"), READ),  # alpha is dropped
    ("palette.png", encode("PNG", picture().quantize(16), transparency=bytes(range(0, 256, 16))), READ),
    ("alpha.webp", with_alpha("WEBP", lossless=True), READ),
    ("deep.png", encode("PNG", Image.fromarray(np.arange(SIZE**2, dtype=np.uint16).reshape(SIZE, SIZE) * 64)), READ),
    ("uint16.tif", DEEP, READ),  # of 16 bits the upper eight, as in deep.png
    ("uint16.pgm", b"P5 32 32 65535\n" + np.arange(0, 2**16, 64, dtype=">u2").tobytes(), READ),
    ("8 bits, white is 0.tif", GREY.replace(BLACK_IS_ZERO, WHITE_IS_ZERO), READ),
    ("float.tif", encode("TIFF", picture().convert("F")), UNREADABLE),  # other depths, signed numbers
    ("white is 0.tif", DEEP.replace(BLACK_IS_ZERO, WHITE_IS_ZERO), UNREADABLE),
    ("int16.tif", encode("TIFF", picture().convert("L").convert("I;16"), tiffinfo={339: 2}), UNREADABLE),
    ("float.ppm", b"Pf 4 4 -1.0\n" + np.ones(16, np.float32).tobytes(), UNREADABLE),
    ("gif.png", animated("GIF"), READ),  # the first frame
    ("animated.png", animated("PNG"), READ),
    ("jpeg.png", JPEG, READ),  # another format's extension
    ("link.jpg", lambda path: os.symlink(b"../000/grey.jpg", path), READ),
    (b"\xff\xfe caf\xe9.jpg", JPEG, READ),
    ("damaged.jpg", JPEG[:MIDDLE] + b"\x12\x34\x56" + JPEG[MIDDLE + 3 :], READ),  # decoders continue
    ("cut.jpg", JPEG[: len(JPEG) * 2 // 3], UNREADABLE),
    ("cut.png", encode("PNG")[:-60], UNREADABLE),
    ("text.jpg", b"no image", UNREADABLE),
    ("empty.jpg", b"", UNREADABLE),
    ("bomb.png", lambda path: Image.new("1", (20_000, 20_000)).save(os.fsdecode(path)), UNREADABLE),
    ("fifo.jpg", os.mkfifo, UNREADABLE),  # not a regular file
    ("socket.jpg", lambda path: os.mknod(path, 0o140600), UNREADABLE),  # S_IFSOCK
    ("device.jpg", lambda path: os.symlink("/dev/zero", path), UNREADABLE),
    ("broken.jpg", lambda path: os.symlink("nowhere", path), UNREADABLE),
    ("loop.jpg", lambda path: os.symlink("loop.jpg", path), UNREADABLE),
    ("x.gif", animated("GIF"), IGNORED),  # another extension
]


@pytest.fixture(scope="module")
def kinds(tmp_path_factory):
    """One class for each file, the only one in val/CLASS, so that labels identify files."""
    root = tmp_path_factory.mktemp("kinds")
    for number, (name, content, outcome) in enumerate(ROWS):
        for split in ("train", "val"):
            folder = root / split / f"{number:03}"
            folder.mkdir(parents=True)
            if split == "train" or outcome == IGNORED:
                (folder / "good.png").write_bytes(encode("PNG", picture(3)))
        path = os.path.join(os.fsencode(folder), os.fsencode(name))
        if callable(content):
            content(path)
        else:
            with open(path, "wb") as file:
                file.write(content)
    return root


def expected_pixels(content, path):
    """Decode with torchvision.datasets.ImageFolder's loader, except 16-bit grey; uint8 [H, W, 3]."""
    with Image.open(io.BytesIO(content)) as image:
        if image.mode not in ("I", "I;16"):
            return np.asarray(pil_loader(path))
        return np.stack([(np.asarray(image).astype(np.int64) >> 8).astype(np.uint8)] * 3, axis=2)


@pytest.mark.parametrize("loader", ["torchvision", "device", DALI])
def test_every_kind_of_file(loader, tiny, kinds, one_rank):
    whole = {"limit_train_batches": None, "limit_valid_batches": None, "num_data_workers": 0, "image_size": SIZE}
    base = {"dataset": "imagefolder", "data_path": str(kinds), "num_classes": len(ROWS), "batch_size": 4}
    config = tiny(**base | whole, valid_batch_size_per_gpu=8, data_loader=loader)
    dataset = open_dataset(config, one_rank)
    valid = build_loaders(config, dataset, one_rank).valid
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Palette images with Transparency|.*decompression bomb")
        images, labels = (torch.cat(parts) for parts in zip(*valid, strict=True))
    assert labels.tolist() == [number for number, row in enumerate(ROWS) if row[2] != UNREADABLE]
    names = {os.path.basename(os.fsencode(path)) for path in valid.unreadable}
    assert names == {os.fsencode(name) for name, _, outcome in ROWS if outcome == UNREADABLE}
    mean, std = (np.array(values).reshape(3, 1, 1) for values in (dataset.mean, dataset.std))
    tolerance = 2 / 255 if loader == "dali" else 1e-6  # of a JPEG from PIL; seen on a CPU: 0
    for image, label in zip(images.numpy(), labels.tolist(), strict=True):
        name, _, outcome = ROWS[label]
        path = kinds / "val" / f"{label:03}" / (os.fsdecode(name) if outcome == READ else "good.png")
        pixels = expected_pixels(path.read_bytes(), path).transpose(2, 0, 1)
        np.testing.assert_allclose(image * std + mean, pixels / 255, atol=tolerance, err_msg=repr(name))


def test_of_an_elongated_image_the_centre_is_read():
    """20,000 pixels in a row or column would be resized to 5 million in 256 rows or columns."""
    strip = Image.new("RGB", (20_000, 1))
    strip.paste((255, 0, 0), (9_000, 0, 11_000, 1))
    for image, size in ((strip, (16, 1)), (strip.rotate(90, expand=True), (1, 16))):
        decoded = decode_image(encode("PNG", image))
        assert decoded.size == size and (np.asarray(decoded) == (255, 0, 0)).all()
        content, *shape = encode_for_dali(encode("PNG", image))
        assert shape == [*size[::-1]] and np.array_equal(decode_image(content.tobytes()), decoded)
    for side in (96, 98):  # 16 to 1 and a little more
        assert decode_image(encode("PNG", strip.resize((side, 6)))).size == (96, 6)


def test_dali_gets_a_whole_jpeg_unchanged_and_no_truncated_one():
    assert encode_for_dali(JPEG)[0].tobytes() == JPEG
    with pytest.raises(OSError, match="truncated"):
        encode_for_dali(JPEG[:MIDDLE])
