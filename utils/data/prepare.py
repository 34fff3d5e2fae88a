"""Getting CIFAR onto a disk: from its home page, an archive or a folder to verified files, in one rename.

Whatever arrives is taken for hostile until it is verified: nothing is extracted by a name from an archive, and no
pickle is opened before its published MD5 is found right.
"""

import contextlib
import gzip
import hashlib
import http.client
import os
import pickle
import sys
import tarfile
import urllib.request
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path, PurePosixPath
from typing import IO, Protocol, cast

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

from utils.data.cifar import CifarVersion, remedy, verify_split
from utils.errors import DataError
from utils.files import exclusive_lock, partial_folder

HOME_PAGE = "https://www.cs.toronto.edu/~kriz"
TIMEOUT_SECONDS = 60  # of a silent connection
CHUNK_BYTES = 1 << 20
ARCHIVE_SLACK_BYTES = 1 << 20  # for the texts and the headers of an archive


def prepare(version: CifarVersion, data_path: Path, source: Path | None) -> str:
    """Put the verified binary version below `data_path`, from `source` or the network; return what was done."""
    target = data_path / version.folder
    if _is_sound(target, version):
        return f"{target}: {version.title} is already there, verified"
    try:
        data_path.mkdir(parents=True, exist_ok=True)
        with exclusive_lock(data_path / f".{version.name}.lock") as locked:
            if _is_sound(target, version):
                return f"{target}: {version.title} is already there: another process wrote it, verified"
            with partial_folder(target, alone=locked) as partial, _progress() as progress:
                if source is None:
                    archive = partial / version.archive
                    _download(version, archive, progress, data_path)
                    _write_files(version, archive, partial, progress)
                    archive.unlink()
                else:
                    _write_files(version, source, partial, progress)
                origin = source or f"{HOME_PAGE}/{version.archive}"
                _verify(version, partial, origin)
                kept = _rename(partial, target)
    except OSError as error:  # those of reading are DataError by now
        raise DataError(f"cannot write below {data_path}: {error}") from error
    done = f"{target}: wrote {version.title} from {origin}, verified"
    return done if kept is None else f"{done}; what was there before is damaged, and was kept as {kept.name}"


def _is_sound(folder: Path, version: CifarVersion) -> bool:
    try:
        for split in version.splits:
            verify_split(folder, version, split)
    except DataError:
        return False
    return True


def _verify(version: CifarVersion, folder: Path, origin: Path | str) -> None:
    for split in version.splits:
        try:
            verify_split(folder, version, split)
        except DataError as error:
            raise DataError(
                f"{origin}: the records of its {' + '.join(split.files)} are not those of {version.title}: altered. "
                "Nothing was written."
            ) from error


def _rename(partial: Path, target: Path) -> Path | None:
    """Make `partial` the target at once; return where an older, damaged target was moved to, if there was one."""
    kept = None
    if os.path.lexists(target):
        kept = target.with_name(f"{target.name}.damaged.{partial.name.rpartition('.')[2]}")
        target.rename(kept)
    partial.rename(target)
    _sync_folder(target)
    _sync_folder(target.parent)
    return kept


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _progress() -> Progress:
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
        console=Console(stderr=True),
        disable=not sys.stderr.isatty(),
    )


def _download(version: CifarVersion, archive: Path, progress: Progress, data_path: Path) -> None:
    """Fetch the official archive and compare its MD5 with the published one, before anything looks inside."""
    url = f"{HOME_PAGE}/{version.archive}"
    digest = hashlib.md5(usedforsecurity=False)

    def chunks() -> Iterator[bytes]:
        try:
            with urllib.request.urlopen(url, timeout=TIMEOUT_SECONDS) as response:
                length = response.headers.get("Content-Length")
                task = progress.add_task(version.archive, total=int(length) if length else None)
                while chunk := response.read(CHUNK_BYTES):
                    digest.update(chunk)
                    progress.advance(task, len(chunk))
                    yield chunk
        except (OSError, http.client.HTTPException) as error:
            raise DataError(f"{url}: cannot be downloaded: {error}\n{remedy(version, data_path)}") from error

    _write(archive, chunks())
    if digest.hexdigest() != version.archive_md5:
        raise DataError(
            f"{url}: MD5 {digest.hexdigest()}, published is {version.archive_md5}: the download is incomplete, or "
            f"something between altered it.\n{remedy(version, data_path)}"
        )


def _write_files(version: CifarVersion, source: Path, folder: Path, progress: Progress) -> None:
    """Write the binary version's files and the class names into `folder`, from an archive or a folder `source`."""
    sizes = {name: version.file_bytes(split) for split in version.splits for name in split.files}
    if source.is_dir():
        members = _folder_members(version, source, sizes)
    elif source.is_file():
        members = _archive_members(source, sizes)
    else:
        raise DataError(f"{source}: no such archive or folder")
    written: set[str] = set()
    for member, chunks in members:
        name = _binary_name(member)
        if name in written:
            raise DataError(f"{source}: holds {name} twice")
        counted = _count(chunks, progress, name, sizes[name])
        content = counted if member == name else _records_of_pickle(version, source, member, b"".join(counted))
        num_bytes = _write(folder / name, content)
        if num_bytes != sizes[name]:
            raise DataError(f"{source}: {member}: gives {num_bytes} bytes of records, expected {sizes[name]}")
        written.add(name)
    if missing := sorted(sizes.keys() - written):
        raise DataError(f"{source}: holds no {', '.join(missing)}: not an archive or folder of {version.title}")
    _write(folder / version.names_file, ["\n".join(version.class_names).encode() + b"\n"])


def _binary_name(member: str) -> str:
    """`train` of the python version holds the records of `train.bin`; so do all files of both datasets."""
    return member.removesuffix(".bin") + ".bin"


def _count(chunks: Iterable[bytes], progress: Progress, name: str, expected_bytes: int) -> Iterator[bytes]:
    task = progress.add_task(name, total=expected_bytes)
    for chunk in chunks:
        progress.advance(task, len(chunk))
        yield chunk


def _write(path: Path, chunks: Iterable[bytes]) -> int:
    """Write a new file through to the disk; return its size in bytes."""
    with path.open("xb") as file:
        for chunk in chunks:
            file.write(chunk)
        file.flush()
        os.fsync(file.fileno())
        return file.tell()


def _folder_members(
    version: CifarVersion, source: Path, sizes: dict[str, int]
) -> Iterator[tuple[str, Iterator[bytes]]]:
    """The wanted files in `source` or its usual sub-folder, of the binary version or, without it, the python one."""
    for name in sizes:
        for path in (
            source / version.folder / name,
            source / name,
            source / version.python_folder / name.removesuffix(".bin"),
            source / name.removesuffix(".bin"),
        ):
            if path.is_file():
                with _reading(path), path.open("rb") as file:
                    _check_size(source, path.name, path.stat().st_size, sizes)
                    yield path.name, _read_chunks(path, file)
                break


def _archive_members(source: Path, sizes: dict[str, int]) -> Iterator[tuple[str, Iterator[bytes]]]:
    """The wanted members of a tar or tar.gz, in its order. Nothing is extracted: names and links of an archive are
    only compared, never followed, and no more is unpacked than sound data can need.
    """
    limit = 2 * sum(sizes.values()) + ARCHIVE_SLACK_BYTES
    with _reading(source), source.open("rb") as file:
        packed = file.read(2) == b"\x1f\x8b"
        file.seek(0)
        limited = _Limited(gzip.GzipFile(fileobj=file) if packed else file, limit, source)
        with tarfile.open(fileobj=cast("IO[bytes]", limited), mode="r|") as tar:
            for member in tar:
                path = PurePosixPath(member.name)
                if path.is_absolute() or ".." in path.parts:
                    raise DataError(f"{source}: member {member.name!r} points outside of the archive: refused")
                if _binary_name(path.name) not in sizes or member.isdir():
                    continue
                if not member.isreg():
                    raise DataError(f"{source}: member {member.name!r} is a link or a device, not a file: refused")
                _check_size(source, member.name, member.size, sizes)
                content = tar.extractfile(member)
                assert content is not None  # it is a regular file
                yield path.name, _read_chunks(source, content)


class _Readable(Protocol):
    def read(self, size: int, /) -> bytes: ...


class _Limited:
    """A stream that refuses to go on past `limit` bytes: an archive may unpack to far more than it weighs."""

    def __init__(self, stream: _Readable, limit: int, source: Path) -> None:
        self.stream, self.remaining, self.source = stream, limit, source

    def read(self, size: int) -> bytes:
        chunk = self.stream.read(min(size, self.remaining + 1))
        self.remaining -= len(chunk)
        if self.remaining < 0:
            raise DataError(f"{self.source}: unpacks to more than the dataset can need: refused")
        return chunk


def _check_size(source: Path, member: str, num_bytes: int, sizes: dict[str, int]) -> None:
    """A binary file has exactly one size; a pickle some names and labels beside the same pixels, not twice as much."""
    name = PurePosixPath(member).name
    expected_bytes = sizes[_binary_name(name)]
    if name in sizes and num_bytes != expected_bytes:
        raise DataError(f"{source}: {member}: {num_bytes} bytes, expected exactly {expected_bytes}")
    if num_bytes > 2 * expected_bytes:
        raise DataError(f"{source}: {member}: {num_bytes} bytes, expected about {expected_bytes}")


@contextlib.contextmanager
def _reading(source: Path) -> Iterator[None]:
    """Turn what reading a damaged file raises into DataError. Errors of writing pass by: they arise elsewhere."""
    try:
        yield
    except (tarfile.TarError, gzip.BadGzipFile, zlib.error, EOFError, ValueError) as error:
        # ValueError: what tarfile lets out of a sparse file's broken header
        raise DataError(f"{source}: truncated, damaged, or not a tar or tar.gz archive: {error}") from error
    except OSError as error:
        raise DataError(f"{source}: cannot be read: {error}") from error


def _read_chunks(source: Path, file: IO[bytes]) -> Iterator[bytes]:
    with _reading(source):
        while chunk := file.read(CHUNK_BYTES):
            yield chunk


def _records_of_pickle(version: CifarVersion, source: Path, member: str, content: bytes) -> list[bytes]:
    """The binary version's records of one file of the python version, opened only if its MD5 is the published one."""
    import torchvision

    dataset_class = getattr(torchvision.datasets, version.torchvision_class)
    published = dict(dataset_class.train_list + dataset_class.test_list)[member]
    actual = hashlib.md5(content, usedforsecurity=False).hexdigest()
    if actual != published:
        raise DataError(f"{source}: {member}: MD5 {actual}, published is {published}: truncated or altered")
    batch = pickle.loads(content, encoding="latin1")
    keys = ("coarse_labels", "fine_labels") if version.label_bytes == 2 else ("labels",)
    labels = np.stack([np.asarray(batch[key], np.uint8) for key in keys], axis=1)  # [N, label_bytes]
    return [np.concatenate([labels, batch["data"]], axis=1).tobytes()]
