"""Every kind of file that a class folder may hold, with each loader."""

import io
import os
import struct
import warnings
import zlib

import numpy as np
import pytest
import torch
from PIL import Image
from torchvision.datasets.folder import pil_loader

from tests.test_folders import DALI
from utils.data.build import build_loaders, open_dataset
from utils.data.datasets.image_files import decode_image

SIZE = 32
LEVELS_OF_DALI = 2  # of 255, maximum difference of a JPEG from PIL; seen on a CPU: 0

READ, UNREADABLE, IGNORED = "read", "unreadable", "ignored"
FORMATS = {".png": "PNG", ".bmp": "BMP", ".ppm": "PPM", ".tif": "TIFF", ".webp": "WEBP"}


def picture(seed=0, size=SIZE):
    """Return an image with smooth colours that differs from its rotations."""
    coarse = np.random.default_rng(seed).integers(0, 256, (4, 4, 3), np.uint8)
    return Image.fromarray(coarse).resize((size, size), Image.Resampling.BICUBIC)


def encode(kind, image=None, **options):
    file = io.BytesIO()
    (image or picture()).save(file, kind, **options)
    return file.getvalue()


def oriented(orientation):
    exif = Image.Exif()
    exif[0x0112] = orientation
    return encode("JPEG", exif=exif)


def animated(kind, **options):
    return encode(kind, save_all=True, append_images=[picture(1), picture(2)], **options)


def with_alpha(kind, **options):
    image = picture()
    image.putalpha(picture(1).convert("L"))
    return encode(kind, image, **options)


def damage_middle(content):
    """Damage the compressed data: decoders continue, and the picture is wrong from there on."""
    middle = (content.rfind(b"\xff\xda") + len(content)) // 2
    return content[:middle] + b"\x12\x34\x56" + content[middle + 3 :]


def damage_codes(content):
    """Damage the Huffman table, which is read only for decoding: PIL and DALI refuse it."""
    start = content.find(b"\xff\xc4")
    return content[: start + 6] + b"\xff\xff" + content[start + 8 :]


def bomb():
    """Return a PNG whose header claims 20,000 x 20,000 pixels."""
    body = struct.pack(">IIBBBBB", 20_000, 20_000, 8, 2, 0, 0, 0)
    header = struct.pack(">I", 13) + b"IHDR" + body + struct.pack(">I", zlib.crc32(b"IHDR" + body))
    return b"\x89PNG\r\n\x1a\n" + header


def link_to_an_image(path):
    with open(path + b".target", "wb") as file:
        file.write(encode("JPEG"))
    os.symlink(path + b".target", path)


JPEG = encode("JPEG", quality=90)
FLOATS = encode("TIFF", picture().convert("F"))
SIGNED = encode("TIFF", picture().convert("L").convert("I;16"), tiffinfo={339: 2})
DEEP = encode("TIFF", picture().convert("L").convert("I;16"))
NEGATIVE = DEEP.replace(struct.pack("<HHII", 262, 3, 1, 1), struct.pack("<HHII", 262, 3, 1, 0))
PGM = b"P5 %d %d 65535\n" % (SIZE, SIZE) + (np.arange(SIZE**2) * 64).astype(">u2").tobytes()
PALETTE = encode("PNG", picture().quantize(16), transparency=bytes(range(0, 256, 16)))
ROWS = [  # (name, content or function of the path, outcome)
    ("grey.jpg", encode("JPEG", picture().convert("L")), READ),
    ("colour.JPEG", JPEG, READ),
    ("progressive.jpeg", encode("JPEG", progressive=True), READ),
    ("restart.jpg", encode("JPEG", restart_marker_blocks=2), READ),
    ("rgb.jpg", encode("JPEG", keep_rgb=True), READ),
    *((f"{orientation}.jpg", oriented(orientation), READ) for orientation in range(1, 9)),  # not rotated
    ("cmyk.jpg", encode("JPEG", picture().convert("CMYK")), READ),
    ("bytes after the end.jpg", JPEG + bytes(100), READ),
    ("bilevel.png", encode("PNG", picture().convert("1")), READ),
    *((f"x{extension}", encode(kind), READ) for extension, kind in FORMATS.items()),
    # alpha: dropped
    ("rgba.png", with_alpha("PNG"), READ),
    ("palette.png", PALETTE, READ),
    ("alpha.webp", with_alpha("WEBP", lossless=True), READ),
    # 16 bits per channel: the upper eight
    ("deep.png", encode("PNG", Image.fromarray(np.arange(SIZE**2, dtype=np.uint16).reshape(SIZE, SIZE) * 64)), READ),
    ("deep.pgm", PGM, READ),
    ("uint16.tif", DEEP, READ),
    # other depths, signed numbers
    ("float.tif", FLOATS, UNREADABLE),
    ("int32.tif", encode("TIFF", picture().convert("I")), UNREADABLE),
    ("int16.tif", SIGNED, UNREADABLE),
    ("white is 0.tif", NEGATIVE, UNREADABLE),
    ("float.ppm", b"Pf 4 4 -1.0\n" + np.ones(16, np.float32).tobytes(), UNREADABLE),
    # animated: the first frame
    ("gif.png", animated("GIF"), READ),
    ("animated.webp", animated("WEBP", lossless=True), READ),
    ("animated.png", animated("PNG"), READ),
    # another format's extension, a link, a name that is not UTF-8
    ("png.jpg", encode("PNG"), READ),
    ("jpeg.png", JPEG, READ),
    ("link.jpg", link_to_an_image, READ),
    (b"\xff\xfe caf\xe9.jpg", JPEG, READ),
    # damaged
    ("damaged.jpg", damage_middle(JPEG), READ),
    ("codes.jpg", damage_codes(JPEG), UNREADABLE),
    ("cut.jpg", JPEG[: len(JPEG) * 2 // 3], UNREADABLE),
    ("cut-header.jpg", JPEG[:300], UNREADABLE),
    ("cut.png", encode("PNG")[:-60], UNREADABLE),
    ("cut.webp", encode("WEBP")[:-30], UNREADABLE),
    ("text.jpg", b"no image", UNREADABLE),
    ("empty.jpg", b"", UNREADABLE),
    ("bomb.png", bomb(), UNREADABLE),
    # not a regular file
    ("fifo.jpg", os.mkfifo, UNREADABLE),
    ("device.jpg", lambda path: os.symlink("/dev/zero", path), UNREADABLE),
    ("broken.jpg", lambda path: os.symlink("nowhere", path), UNREADABLE),
    ("loop.jpg", lambda path: os.symlink("loop.jpg", path), UNREADABLE),
    # another extension
    ("x.gif", animated("GIF"), IGNORED),
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
    tolerance = LEVELS_OF_DALI / 255 if loader == "dali" else 1e-6
    for image, label in zip(images.numpy(), labels.tolist(), strict=True):
        name, _, outcome = ROWS[label]
        path = kinds / "val" / f"{label:03}" / (os.fsdecode(name) if outcome == READ else "good.png")
        pixels = expected_pixels(path.read_bytes(), path).transpose(2, 0, 1)
        np.testing.assert_allclose(image * std + mean, pixels / 255, atol=tolerance, err_msg=repr(name))


def test_of_an_elongated_image_the_centre_is_read():
    """20,000 pixels in a row would be resized to 5 million in 256 rows."""
    strip = Image.new("RGB", (20_000, 1))
    strip.paste((255, 0, 0), (9_000, 0, 11_000, 1))
    assert (np.asarray(decode_image(encode("PNG", strip))) == (255, 0, 0)).all()
    assert decode_image(encode("PNG", strip.rotate(90, expand=True))).size == (1, 16)
    assert decode_image(encode("PNG", strip.crop((0, 0, 16, 1)))).size == (16, 1)
