"""Copy a data folder to a local disk, for fast reads and less load on a shared file system.

    python -m tools.stage_data /lustre/data /tmp/data

If several processes start at once, one copies and the others wait. An existing copy is kept if its files have the same
names, sizes and times as the original; else it is replaced. The copy appears in one rename. A folder that is not such a
copy is never replaced.
"""

import errno
import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

from tools.shared.command_line import new_parser, path_argument
from utils.errors import ConfigError, DataError, exit_in_a_line
from utils.files import partial_folder

MARK = ".staged_from"  # a file in each copy, which holds the path of the original


@exit_in_a_line
def main(argv: list[str] | None = None) -> int:
    """Stage the data; returns the exit status."""
    statuses = "0 copied or already there; 2 usage; 3 no such folder, not readable or disk full."
    parser = new_parser("stage_data", __doc__, statuses)
    parser.add_argument("source", type=path_argument, metavar="FROM", help="the data folder")
    parser.add_argument("target", type=path_argument, metavar="TO", help="the copy, which data_path then names")
    arguments = parser.parse_args(argv)
    print(stage(arguments.source.resolve(), arguments.target.resolve()))
    return 0


def stage(source: Path, target: Path) -> str:
    """Make the folder `target` a copy of the folder `source`; return a summary.

    `DataError` if `source` cannot be read or the disk is too small, `ConfigError` if one folder is inside the other, or
    if `target` is not a copy."""
    if source == target or source in target.parents or target in source.parents:
        raise ConfigError(f"{target}: cannot be a copy of {source}; name a folder on a local disk")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with partial_folder(target, target.with_name(f".{target.name}.lock")) as partial:
            files = list_files(source)
            if target.is_dir() and list_files(target) == files:
                return f"{target}: exists already, {len(files):,} files"
            if _is_foreign(target):
                raise ConfigError(f"{target}: exists, but is no copy by this program; move it or name another folder")
            needed = sum(size for size, _ in files.values())
            free = shutil.disk_usage(target.parent).free
            if needed > free:
                room = f"{free / 1e9:.1f} GB are free; expected {needed / 1e9:.1f} GB"
                raise DataError(f"{target}: {room}; free some space or name another folder")
            for name in files:  # not copytree, which also copies the modes of folders that nobody may write to
                (partial / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(source / name, partial / name)
            (partial / MARK).write_bytes(os.fsencode(source))
            shutil.rmtree(target, ignore_errors=True)
            partial.rename(target)
    except OSError as error:
        reason = f"{error.filename}: {error.strerror}" if error.filename else error
        raise DataError(f"{source}: cannot be copied to {target}: {reason}; name another folder") from None
    return f"{target}: copied {len(files):,} files, {needed / 1e9:.2f} GB, from {source}"


def _is_foreign(target: Path) -> bool:
    """Return whether `target` exists and is neither a copy nor an empty folder."""
    if not target.is_dir():
        return os.path.lexists(target)
    return any(target.iterdir()) and not (target / MARK).is_file()


def list_files(folder: Path) -> dict[str, tuple[int, int]]:
    """Return {relative path: (bytes, modification time in ns)} of the files below `folder`, without a copy's mark."""
    files = {}
    for path in _walk(os.fspath(folder), frozenset()):
        status = os.stat(path)
        files[os.path.relpath(path, folder)] = (status.st_size, status.st_mtime_ns)
    files.pop(MARK, None)
    return files


def _walk(folder: str, above: frozenset[tuple[int, int]]) -> Iterator[str]:
    """Yield the path of each file; follow links. `above`: device and inode of the parent folders."""
    status = os.stat(folder)
    here = (status.st_dev, status.st_ino)
    if here in above:
        raise OSError(errno.ELOOP, "a link to one of its parent folders, so the copy would be endless", folder)
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.is_dir():
                yield from _walk(entry.path, above | {here})
            else:
                yield entry.path


if __name__ == "__main__":
    sys.exit(main())
