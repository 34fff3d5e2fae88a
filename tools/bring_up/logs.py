"""The raw logs of a bring-up in few files, for machines that give back only so much: packed/ in its folder.

`tar -xzf logs-1.tar.gz -C DIR`, for each of them, makes a folder that another call can go on with; checkpoints are not
in them, so that a training that was cut off begins again there."""

import gzip
import io
import tarfile
from collections.abc import Sequence
from pathlib import Path

from utils.files import write_atomically

LARGEST = 16 * 2**20  # bytes of a file
FILES = 8  # with the page and the figures
VOLUMES = FILES - 2
ROOM = 64 * 2**10  # of a volume, for the headers
LEFT_OUT = (".pt", ".tmp", ".lock")


def pack_logs(out: Path, largest: int = LARGEST, volumes: int = VOLUMES) -> list[str]:
    """Write packed/logs-N.tar.gz; returns what did not fit, the smallest files first being packed."""
    target = out / "packed"
    target.mkdir(exist_ok=True)
    files = [path for path in (out / "state.json", *(out / "parts").rglob("*")) if path.is_file()]
    files = [path for path in files if path.suffix not in LEFT_OUT and "checkpoints" not in path.parts]
    sizes = {path: _packed_size(path) for path in files}
    files.sort(key=lambda path: (path.name != "state.json", sizes[path], path))
    held: list[list[Path]] = []
    used, left_out = largest, []
    for path in files:
        if used + sizes[path] > largest - ROOM:
            if len(held) == volumes or sizes[path] > largest - ROOM:
                left_out.append(str(path.relative_to(out)))
                continue
            held.append([])
            used = 0
        held[-1].append(path)
        used += sizes[path]
    for number, group in enumerate(held, start=1):
        write_atomically(target / f"logs-{number}.tar.gz", _archive(out, group))
    for old in target.glob("logs-*.tar.gz"):
        if int(old.name.split("-")[1].split(".")[0]) > len(held):
            old.unlink()
    return left_out


def _packed_size(path: Path) -> int:
    """Bytes that a file takes in an archive at most; it is packed alone here."""
    return len(gzip.compress(path.read_bytes(), 6)) + tarfile.BLOCKSIZE


def _archive(out: Path, files: Sequence[Path]) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz", compresslevel=6) as archive:
        for path in files:
            archive.add(path, str(path.relative_to(out)))
    return buffer.getvalue()
