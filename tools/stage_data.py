"""Copy a data folder to a disk of this machine, for fast reads and less load on a shared file system.

    python -m tools.stage_data /lustre/data /tmp/data

Processes that start at once copy it once, and the others wait. A copy that is there is used again if its files have the
names, sizes and times of the original's; else it is made anew. It appears under its name only when it is whole. A
folder that is not such a copy is never replaced.
"""

import argparse
import errno
import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

from tools.shared.command_line import new_parser
from utils.errors import ConfigError, DataError, exit_in_a_line
from utils.files import partial_folder

MARK = ".staged_from"  # in each copy, with the path of the original


@exit_in_a_line
def main(argv: list[str] | None = None) -> int:
    """Stage the data; returns the exit status."""
    arguments = _parse_arguments(argv)
    print(stage(arguments.source.resolve(), arguments.target.resolve()))
    return 0


def stage(source: Path, target: Path) -> str:
    """Make the folder `target` a copy of the folder `source`; returns what was done.

    `DataError` where it cannot be read or has no room, `ConfigError` where one folder is inside the other, or where
    `target` holds something else than a copy."""
    if source == target or source in target.parents or target in source.parents:
        raise ConfigError(f"{target}: cannot be a copy of {source}; name a folder on a disk of this machine")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with partial_folder(target, target.with_name(f".{target.name}.lock")) as partial:
            files = list_files(source)
            if target.is_dir() and list_files(target) == files:
                return f"{target}: there already, {len(files):,} files"
            if _holds_something_else(target):
                raise ConfigError(
                    f"{target}: is there and no copy by this program; move it away or name another folder"
                )
            needed = sum(size for size, _ in files.values())
            free = shutil.disk_usage(target.parent).free
            if needed > free:
                raise DataError(f"{target}: {needed / 1e9:.1f} GB do not fit into the {free / 1e9:.1f} GB free there")
            shutil.copytree(source, partial, dirs_exist_ok=True)
            (partial / MARK).write_bytes(os.fsencode(source))
            shutil.rmtree(target, ignore_errors=True)
            partial.rename(target)
    except (OSError, shutil.Error) as error:
        raise DataError(f"{source}: cannot be copied to {target}: {_reason(error)}") from None
    return f"{target}: copied {len(files):,} files, {needed / 1e9:.2f} GB, from {source}"


def _holds_something_else(target: Path) -> bool:
    """Whether something is lost when `target` is replaced: all but a copy, an empty folder, or nothing at all."""
    if not target.is_dir():
        return os.path.lexists(target)
    return any(target.iterdir()) and not (target / MARK).is_file()


def list_files(folder: Path) -> dict[str, tuple[int, int]]:
    """(bytes, time of change in ns) of each file below `folder`, by its path from there, without a copy's mark.
    `OSError` as from reading."""
    files = {}
    for path in _walk(os.fspath(folder), frozenset()):
        status = os.stat(path)
        files[os.path.relpath(path, folder)] = (status.st_size, status.st_mtime_ns)
    files.pop(MARK, None)
    return files


def _walk(folder: str, above: frozenset[tuple[int, int]]) -> Iterator[str]:
    """The path of each file; links are followed. `above` has device and inode of the folders that led here."""
    status = os.stat(folder)
    here = (status.st_dev, status.st_ino)
    if here in above:
        raise OSError(errno.ELOOP, "a link to a folder that it is in, so the copy would have no end", folder)
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.is_dir():
                yield from _walk(entry.path, above | {here})
            else:
                yield entry.path


def _reason(error: OSError) -> str:
    if isinstance(error, shutil.Error):  # copytree has collected several: (from, to, why)
        path, _, why = error.args[0][0]
        return f"{path}: {why}"
    return f"{error.filename}: {error.strerror}" if error.filename else str(error)


def _parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    statuses = "0 copied or already there; 2 usage; 3 no such folder, not readable or no room."
    parser = new_parser("stage_data", __doc__, statuses)
    parser.add_argument("source", type=Path, metavar="FROM", help="the data folder, as data_path would name it")
    parser.add_argument("target", type=Path, metavar="TO", help="the copy; submit.slr sets data_path to it")
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
