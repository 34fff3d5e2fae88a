"""Getting CIFAR onto a disk: from its home page, an archive or a folder to verified files, in one rename.

Whatever arrives is taken for hostile until it is verified: nothing is extracted by a name from an archive, and no
pickle is opened before its published MD5 is found right. Until then all of it is in memory, half a GB.
"""

import gzip
import hashlib
import http.client
import io
import os
import pickle
import sys
import tarfile
import urllib.request
import zlib
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import IO, cast

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

from utils.data.cifar import CifarSplit, CifarVersion, remedy, verify_split
from utils.errors import DataError
from utils.files import open_regular, partial_folder, sync_folder, write_new

HOME_PAGE = "https://www.cs.toronto.edu/~kriz"
TIMEOUT_SECONDS = 60  # of a silent connection
CHUNK_BYTES = 1 << 20
ARCHIVE_SLACK_BYTES = 1 << 20  # for the texts and the headers of an archive

Member = tuple[str, int, IO[bytes]]  # path, size in bytes, content


def prepare(version: CifarVersion, data_path: Path, source: Path | None) -> str:
    """Put the verified binary version below `data_path`, from `source` or the network; return what was done."""
    target = data_path / version.folder
    origin = source or f"{HOME_PAGE}/{version.archive}"
    if _unsound_split(target, version) is None:
        return f"{target}: {version.title} is already there, verified"
    try:
        data_path.mkdir(parents=True, exist_ok=True)
        with partial_folder(target, data_path / f".{version.name}.lock") as partial, _progress() as progress:
            if _unsound_split(target, version) is None:
                return f"{target}: {version.title} is already there: another process wrote it, verified"
            for name, content in _read_files(version, origin, progress, data_path).items():
                write_new(partial / name, content)
            if (split := _unsound_split(partial, version)) is not None:
                raise DataError(
                    f"{origin}: the records of its {' + '.join(split.files)} are not those of {version.title}: "
                    "altered. Nothing was written."
                )
            kept = _rename(partial, target)
    except OSError as error:  # those of reading are DataError by now
        raise DataError(f"cannot write below {data_path}: {error}") from error
    done = f"{target}: wrote {version.title} from {origin}, verified"
    return done if kept is None else f"{done}; what was there before is damaged, and was kept as {kept.name}"


def _unsound_split(folder: Path, version: CifarVersion) -> CifarSplit | None:
    """The first split that cannot be verified."""
    for split in version.splits:
        try:
            verify_split(folder, version, split)
        except (DataError, OSError):
            return split
    return None


def _rename(partial: Path, target: Path) -> Path | None:
    """Make `partial` the target at once; return where an older, damaged target was moved to, if there was one."""
    kept = None
    if os.path.lexists(target):
        kept = target.with_name(f"{target.name}.damaged.{partial.name.rpartition('.')[2]}")
        target.rename(kept)
    partial.rename(target)
    sync_folder(target)
    sync_folder(target.parent)
    return kept


def _progress() -> Progress:
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    return Progress(*columns, TimeRemainingColumn(), console=Console(stderr=True), disable=not sys.stderr.isatty())


def _read_files(version: CifarVersion, origin: Path | str, progress: Progress, data_path: Path) -> dict[str, bytes]:
    """The binary version's files and the class names, from an archive or a folder, or from the archive at a URL."""
    sizes = {name: version.file_bytes(split) for split in version.splits for name in split.files}
    limit, files = 2 * sum(sizes.values()) + ARCHIVE_SLACK_BYTES, dict[str, bytes]()
    try:
        if isinstance(origin, str):
            archive = io.BytesIO(_download(version, origin, limit, progress, data_path))
            members = _archive_members(origin, archive, sizes, limit)
        elif origin.is_dir():
            members = _folder_members(version, origin, sizes)
        elif origin.is_file():
            members = _archive_members(origin, open_regular(origin), sizes, limit)
        else:
            raise DataError(f"{origin}: no such archive or folder")
        for path, num_bytes, file in members:
            member = PurePosixPath(path).name
            name, pickled = _binary_name(member), not member.endswith(".bin")
            if name in files:
                raise DataError(f"{origin}: holds {name} twice")
            # a pickle holds some names and labels beside the same pixels
            if num_bytes > 2 * sizes[name] if pickled else num_bytes != sizes[name]:
                expected = f"{'about' if pickled else 'exactly'} {sizes[name]}"
                raise DataError(f"{origin}: {path}: {num_bytes} bytes, expected {expected}")
            content = _read(file, progress, name, num_bytes)
            files[name] = _records_of_pickle(version, origin, member, content) if pickled else content
    except (tarfile.TarError, gzip.BadGzipFile, zlib.error, EOFError, ValueError) as error:
        # ValueError: what tarfile lets out of a sparse file's broken header
        raise DataError(f"{origin}: truncated, damaged, or not a tar or tar.gz archive: {error}") from error
    except OSError as error:
        raise DataError(f"{origin}: cannot be read: {error}") from error
    if missing := sorted(sizes.keys() - files):
        raise DataError(f"{origin}: holds no {', '.join(missing)}: not an archive or folder of {version.title}")
    return {**files, version.names_file: ("\n".join(version.class_names) + "\n").encode()}


def _binary_name(member: str) -> str:
    """`train` of the python version holds the records of `train.bin`; so do all files of both datasets."""
    return member.removesuffix(".bin") + ".bin"


def _read(stream: "IO[bytes] | _Limited", progress: Progress, name: str, total: int | None) -> bytes:
    """All of a stream, its progress shown."""
    task, chunks = progress.add_task(name, total=total), []
    while chunk := stream.read(CHUNK_BYTES):
        chunks.append(chunk)
        progress.advance(task, len(chunk))
    return b"".join(chunks)


def _download(version: CifarVersion, url: str, limit: int, progress: Progress, data_path: Path) -> bytes:
    """The official archive, its MD5 compared with the published one before anything looks inside."""
    try:
        with urllib.request.urlopen(url, timeout=TIMEOUT_SECONDS) as response:
            content = _read(_Limited(response, limit, url), progress, version.archive, response.length)
    except (OSError, http.client.HTTPException) as error:
        raise DataError(f"{url}: cannot be downloaded: {error}\n{remedy(version, data_path)}") from error
    _check_md5(url, content, version.archive_md5, f" on the way.\n{remedy(version, data_path)}")
    return content


def _check_md5(name: str, content: bytes, published: str, advice: str = "") -> None:
    actual = hashlib.md5(content, usedforsecurity=False).hexdigest()
    if actual != published:
        raise DataError(f"{name}: MD5 {actual}, published is {published}: truncated or altered{advice}")


def _folder_members(version: CifarVersion, source: Path, sizes: dict[str, int]) -> Iterator[Member]:
    """The files in the folder or its usual sub-folder, of the binary version or, without it, the python one."""
    for name in sizes:
        folders = (source / version.folder, source, source / version.dataset_class.base_folder, source)
        names = (name, name, name.removesuffix(".bin"), name.removesuffix(".bin"))
        for path in filter(Path.is_file, map(Path.joinpath, folders, names)):
            with open_regular(path) as file:
                yield path.name, path.stat().st_size, file
            break


def _archive_members(origin: Path | str, file: IO[bytes], sizes: dict[str, int], limit: int) -> Iterator[Member]:
    """The wanted members of a tar or tar.gz, in its order. Nothing is extracted: names and links of an archive are
    only compared, never followed, and no more is unpacked than sound data can need.
    """
    packed = file.read(2) == b"\x1f\x8b"
    file.seek(0)
    stream = _Limited(gzip.GzipFile(fileobj=file) if packed else file, limit, origin)
    with file, tarfile.open(fileobj=cast("IO[bytes]", stream), mode="r|") as tar:
        for member in tar:
            path = PurePosixPath(member.name)
            if path.is_absolute() or ".." in path.parts:
                raise DataError(f"{origin}: member {member.name!r} points outside of the archive: refused")
            if _binary_name(path.name) not in sizes or member.isdir():
                continue
            content = tar.extractfile(member) if member.isreg() else None
            if content is None:
                raise DataError(f"{origin}: member {member.name!r} is a link or a device, not a file: refused")
            yield member.name, member.size, content


class _Limited:
    """A stream that refuses to go on past `limit` bytes: a server may never end, and an archive may unpack to far more
    than it weighs."""

    def __init__(self, stream: IO[bytes] | gzip.GzipFile, limit: int, origin: Path | str) -> None:
        self.stream, self.remaining, self.origin = stream, limit, origin

    def read(self, size: int) -> bytes:
        chunk = self.stream.read(min(size, self.remaining + 1))
        self.remaining -= len(chunk)
        if self.remaining < 0:
            raise DataError(f"{self.origin}: gives or unpacks to more than the dataset can need: refused")
        return chunk


def _records_of_pickle(version: CifarVersion, origin: Path | str, member: str, content: bytes) -> bytes:
    """The binary version's records of one file of the python version, opened only if its MD5 is the published one."""
    published = dict(version.dataset_class.train_list + version.dataset_class.test_list)
    _check_md5(f"{origin}: {member}", content, published[member])
    batch = pickle.loads(content, encoding="latin1")
    keys = ("coarse_labels", "fine_labels") if version.label_bytes == 2 else ("labels",)
    return np.column_stack([*(np.asarray(batch[key], np.uint8) for key in keys), batch["data"]]).tobytes()
