"""Download CIFAR before a job, or unpack its archive without a network; pack class folders into tar shards; index them.

    python -m tools.prepare_data --dataset cifar100 --data_path data
    python -m tools.prepare_data --dataset cifar100 --data_path data --from cifar-100-python.tar.gz
    python -m tools.prepare_data --shards /shared/imagenet-shards --from /shared/imagenet
    python -m tools.prepare_data --shards /shared/imagenet-shards

Torchvision downloads and unpacks CIFAR. An archive must be the official one, with the published MD5; tar unpacks the
binary version, which is read too. Data and shards appear in one rename: an interrupted or failed run leaves no partial
data, and two runs at once do the work once. Without --from, --shards writes the index of DIR/train/*.tar and
DIR/val/*.tar, which hold KEY.jpg (or .png, ...) and KEY.cls for each image, as in the webdataset package.
"""

import io
import json
import os
import re
import sys
import tarfile
import zlib
from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.progress import Progress

from tools.common import add_count, new_parser, path_argument
from utils.data.datasets.cifar import VERSIONS, find_folder, read_cifar
from utils.data.datasets.dataset import match_classes
from utils.data.datasets.folders import EXTENSIONS, open_folders
from utils.data.datasets.image_files import ImageFiles, printable_name
from utils.data.datasets.shards import CLASSES_FILE, IMAGE_FIELDS, INDEX_FILE, SHARD_FIELDS, find_shards
from utils.data.sampling import IntArray
from utils.errors import DataError, exit_in_a_line
from utils.files import name_file_in_error, open_regular, partial_folder, sync_folder, write_atomically, write_new

THREADS = 8  # opening many small files is waiting, not computing
END_OF_TAR = 1024  # bytes of zeros at least
MAX_DIGITS = 6  # of a label
# As in the webdataset package: the key ends at the first dot of the last path component.
KEY_AND_EXTENSION = re.compile(r"((?:.*/|)[^./][^.]*)\.([^/]*)", re.DOTALL)


@exit_in_a_line
def main(argv: list[str] | None = None) -> int:
    statuses = "0 done or already there; 2 usage; 3 bad input, no network or no room; 130 interrupted."
    parser = new_parser("prepare_data", __doc__, statuses)
    parser.add_argument("--dataset", choices=VERSIONS, help="CIFAR: the version")
    parser.add_argument("--data_path", type=path_argument, metavar="DIR", help="CIFAR: the data folder")
    source = "CIFAR: unpack this official archive instead of a download; shards: pack its train/CLASS/ and val/CLASS/"
    parser.add_argument("--from", dest="source", type=path_argument, metavar="ARCHIVE_OR_FOLDER", help=source)
    parser.add_argument("--shards", type=path_argument, metavar="DIR", help="the folder of shards to create or index")
    add_count(parser, "--images_per_shard", 4096, "images of a new shard; ImageNet: 313 shards of 0.45 GB")
    options = parser.parse_args(argv)
    folder, source, cifar = options.shards, options.source, (options.dataset, options.data_path)
    if (folder is None and None in cifar) or (folder is not None and cifar != (None, None)):
        parser.error("expected either --dataset and --data_path, or --shards")
    if None in (folder, source) and options.images_per_shard != parser.get_default("images_per_shard"):
        parser.error("--images_per_shard needs --shards and --from; without --from, shards are only indexed")
    if folder is not None:
        made = make_shards(folder, source, options.images_per_shard) if source else index_shards(folder)
        print(f"{folder}: {made}")
        return 0
    version, data_path = VERSIONS[options.dataset], options.data_path
    existed = find_folder(version, data_path)
    read_cifar(version, data_path, download=True, archive=source)
    print(f"{find_folder(version, data_path)}: {version.title} {'is already' if existed else 'is now'} there, verified")
    return 0


def make_shards(folder: Path, source: Path, images_per_shard: int) -> str:
    """Write shards of the class folders in `source` to `folder`, which appears in one rename with its index; return a
    summary. Images are assigned to shards at random, so that each shard has many classes, but by the number of images
    only: equal folders give equal shards, byte by byte."""
    dataset = open_folders("imagenet", source, image_size=1)  # with "imagenet" no image is read for statistics
    with name_file_in_error(folder.parent, "cannot be written", "; name another DIR", DataError):
        folder.parent.mkdir(parents=True, exist_ok=True)
        with partial_folder(folder, folder.with_name(f".{folder.name}-shards.lock")) as made:
            if os.path.lexists(folder):
                raise DataError(f"{folder}: exists already; move it away, or omit --from to index the shards in it")
            for name, split in (("train", dataset.train), ("val", dataset.valid)):
                assert isinstance(split, ImageFiles)
                (made / name).mkdir()
                count = len(split.labels)
                shuffled = np.random.Generator(np.random.Philox(key=[0, count])).permutation(count)
                shards = list(enumerate(np.array_split(shuffled, -(-count // images_per_shard))))
                _run_in_threads(partial(_write_shard, made / name, split), shards, name)
                sync_folder(made / name)
            write_new(made / CLASSES_FILE, (json.dumps(dataset.class_names) + "\n").encode())
            summary = index_shards(made)
            made.rename(folder)
            sync_folder(folder.parent)
    return summary


def _write_shard(folder: Path, images: ImageFiles, numbered: tuple[int, IntArray]) -> None:
    """Write one shard from its number and the indices of its images, and flush it to disk."""
    digits, (number, indices) = len(str(len(images.labels) - 1)), numbered
    with (folder / f"shard-{number:06d}.tar").open("xb") as file:
        with tarfile.open(fileobj=file, mode="w", format=tarfile.USTAR_FORMAT) as tar:
            for index in indices.tolist():
                name = images.path(index)
                with name_file_in_error(name, "cannot be read", "; repair or remove it", DataError):
                    content = images.content(index)
                extension = os.path.splitext(name)[1].lower().replace(".jpeg", ".jpg")
                for member, data in ((extension, content), (".cls", b"%d" % images.labels[index])):
                    info = tarfile.TarInfo(f"{index:0{digits}d}{member}")
                    info.size = len(data)
                    tar.addfile(info, io.BytesIO(data))
        file.flush()
        os.fsync(file.fileno())


def index_shards(folder: Path) -> str:
    """Write the index of the tar files in `folder`/train and `folder`/val in one rename; return a summary. Class names
    come from classes.json, else they are the label numbers. `DataError` for a class without training image."""
    unused = list[str]()
    train, train_shards = _index_split(folder, "train", unused)
    valid, valid_shards = _index_split(folder, "val", unused)
    class_names = _read_class_names(folder / CLASSES_FILE, 1 + int(max(train["label"].max(), valid["label"].max())))
    if gaps := sorted({*range(len(class_names))} - {*train["label"].tolist()}):
        missing = f"no training image has label {gaps[0]}, class {class_names[gaps[0]]!r}"
        raise DataError(f"{folder}: {missing}; expected labels 0, 1, 2, ... without a gap, and the same in val/")
    content = io.BytesIO()
    arrays = {"train_images": train, "train_shards": train_shards, "valid_images": valid, "valid_shards": valid_shards}
    np.savez(content, class_names=np.array(class_names), **arrays)  # type: ignore[arg-type]
    write_atomically(folder / INDEX_FILE, content.getvalue())
    shards, images = (f"{len(a):,} and {len(b):,}" for a, b in ((train_shards, valid_shards), (train, valid)))
    summary = f"{shards} shards for training and validation, with {images} images, indexed in {INDEX_FILE}"
    if unused:  # first a member that looks like an image or a label
        first = min(unused, key=lambda name: not name.lower().endswith((*EXTENSIONS, ".cls")))
        summary += f"; {len(unused)} files or members not used, such as {printable_name(first)}"
    return summary


def _index_split(folder: Path, split: str, unused: list[str]) -> tuple[np.ndarray, np.ndarray]:
    """Return the images and the shards as arrays of the index, see `utils.data.datasets.shards`. Adds to `unused`."""
    paths = [path for path in find_shards(folder) if path.parent.name == split]
    scanned = _run_in_threads(partial(_scan, unused), paths, f"index of {split}")
    images = [(key, number, *found) for number, shard in enumerate(scanned) for key, *found in shard]
    if not images:
        raise DataError(f"{folder / split}: no images found; expected shards, *.tar")
    unused += [f"{split}/{other.name}" for other in sorted((folder / split).iterdir()) if other not in paths]
    images.sort(key=lambda row: row[0])  # stable: equal keys keep the order of their shards
    for one, other in pairwise(images):
        if (one[0], one[-2]) == (other[0], other[-2]):  # key and checksum
            raise DataError(f"{paths[one[1]]}: {one[0]} is also in {paths[other[1]].name}; remove the copy")
    shards = [(os.path.join(split, path.name), path.stat().st_size) for path in paths]
    fields = [*IMAGE_FIELDS, ("member", f"S{max(len(row[-1]) for row in images)}")]
    return np.array([row[1:] for row in images], fields), np.array(shards, SHARD_FIELDS)


def _scan(unused: list[str], path: Path) -> list[tuple[Any, ...]]:
    """Return key, `IMAGE_FIELDS` from the label on, and member of each image of a shard, and add the other members to
    `unused`; `DataError` if it is no whole tar file with KEY.jpg (or .png, ...) and KEY.cls for each image."""
    parts: dict[str, dict[str, tarfile.TarInfo]] = defaultdict(dict)
    try:
        with open_regular(path) as file, tarfile.open(fileobj=file, mode="r:") as tar:
            for info in tar:
                named = KEY_AND_EXTENSION.fullmatch(info.name)
                extension = named[2].lower() if named else ""
                kind = "image" if f".{extension}" in EXTENSIONS else extension
                if named is None or kind not in ("image", "cls") or info.isdir():
                    unused += [] if info.isdir() else [f"{path.name}:{info.name}"]
                    continue
                if not info.isreg() or info.issparse() or kind in parts[named[1]]:
                    raise DataError(f"{path}: {info.name} is a second {kind} of its key, or no plain file")
                parts[named[1]][kind] = info
            # tarfile also stops at a damaged header, and where the file was cut
            rest = os.pread(file.fileno(), os.fstat(file.fileno()).st_size - tar.offset, tar.offset)
            if len(rest) < END_OF_TAR or rest.strip(b"\0"):
                raise DataError(f"{path}: does not end as a tar file does; restore it")
            found = list[tuple[Any, ...]]()
            for key, part in parts.items():
                if len(part) < 2:
                    missing = "cls" if "image" in part else "image"
                    raise DataError(f"{path}: {key} has no {missing}; expected KEY.jpg and KEY.cls for each image")
                image, cls = part["image"], part["cls"]
                content, label = (os.pread(file.fileno(), info.size, info.offset_data) for info in (image, cls))
                if not label.strip().isdigit() or len(label.strip()) > MAX_DIGITS:
                    raise DataError(f"{path}: {cls.name} holds {label[:20]!r}; expected the number of a class")
                places = image.offset_data, image.size, cls.offset_data, cls.size
                checksum = zlib.crc32(label, zlib.crc32(content))
                found.append((key, int(label), *places, checksum, os.fsencode(image.name)))
            return found
    except (tarfile.TarError, ValueError, OSError) as error:  # ValueError: from tarfile, for a broken header
        raise DataError(f"{path}: cannot be read as a tar file: {error}; restore it") from None


def _read_class_names(path: Path, num_classes: int) -> list[str]:
    if not os.path.lexists(path):
        return [str(number) for number in range(num_classes)]
    names = None
    with suppress(OSError, ValueError):
        names = json.loads(path.read_bytes())
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names) or len(names) < num_classes:
        raise DataError(f"{path}: expected a JSON list of {num_classes} class names; repair or remove it")
    match_classes(str(path), names, names, remedy="")  # none occurs twice
    return names


def _run_in_threads(work: Callable[[Any], Any], tasks: list[Any], title: str) -> list[Any]:
    """Return the results in the order of the tasks; show progress. After a failure or Ctrl-C no further task starts."""
    progress_bar = Progress(console=Console(stderr=True), disable=not sys.stderr.isatty())
    with progress_bar as progress, ThreadPoolExecutor(THREADS) as pool:
        return list(progress.track(pool.map(work, tasks), description=title, total=len(tasks)))


if __name__ == "__main__":
    sys.exit(main())
