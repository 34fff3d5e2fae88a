"""Pack the project for a machine without network: its tree, the wheels that it lacks there, and data.

    python -m tools.pack --out pieces --data data/cifar-100-python
    python -m tools.pack --out pieces --data data/cifar-100-python --without dali

The wheels have the versions installed here (pip download), and fit the Python and platform of the target, which has
PyTorch, torchvision, numpy, matplotlib, rich and tensorboard. The pieces are in folders 01, 02 and so on of limited
size, for machines that take only so much in a call. Tree and wheels come first, so the printed commands work there once
these folders have arrived, without DALI only 01; they unpack the data once all folders have.
"""

import argparse
import errno
import hashlib
import importlib.metadata
import io
import itertools
import os
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import IO, Any

from tools.shared.command_line import at_least_one, new_parser, path_argument
from tools.shared.output import make_folder, write_file
from utils.errors import ConfigError, DataError, ExpectedError, exit_in_a_line
from utils.files import name_file_in_error
from utils.program import CODE

THERE = ("torch", "torchvision", "triton", "numpy", "matplotlib", "rich", "tensorboard", "pip", "setuptools")
# {group: packages}; their requirements come too, except those that the target has
GROUPS = {
    "required": ("ruamel.yaml", "pydantic", "filelock", "safetensors"),
    "page": ("plotly", "Jinja2"),
    "tests": ("pytest", "pytest-timeout", "pytest-xdist", "hypothesis"),
    "health": ("nvidia-ml-py",),
    "peers": ("timm", "lightning"),
    "dali": ("nvidia-dali-cuda130",),
}
CODE_ARCHIVE, DATA_ARCHIVE, SUMS = "bring_up.tar.gz", "data.tar.xz", "01/SHA256SUMS"
# the target may lack xz, but not Python's
UNPACK = (
    "import sys, tarfile; tarfile.open(fileobj=sys.stdin.buffer, mode='r|xz').extractall(sys.argv[1], filter='data')"
)
MEBIBYTE = 2**20


@exit_in_a_line
def main(argv: Sequence[str] | None = None) -> int:
    """Write the pieces; returns the exit status."""
    options = parser().parse_args(argv)
    names = [os.path.basename(os.path.abspath(path)) for path in options.data]
    if repeated := [name for name in names if names.count(name) > 1]:
        raise ConfigError(f"--data: two are named {repeated[0]}, and both would be data/{repeated[0]}; rename one")
    for path in options.data:
        if not path.exists():
            raise DataError(f"--data {path}: no such file or folder; python -m tools.prepare_data downloads CIFAR")
        if path.is_dir():  # links are followed, so that one may lead nowhere or to one of its parent folders
            with name_file_in_error(path, "cannot be packed", kind=DataError):
                list_files(path)
    make_folder(options.out)
    if any(options.out.iterdir()):
        raise ConfigError(f"--out {options.out}: is not empty; give a new folder")
    groups = [name for name in GROUPS if name not in options.without]
    with tempfile.TemporaryDirectory() as folder:
        python = options.python
        wheels = download(wanted(groups, python), Path(folder), python, options.platform) if groups else []
        code, data = Path(folder, CODE_ARCHIVE), Path(folder, DATA_ARCHIVE)
        with name_file_in_error(folder, "cannot be packed"):
            with tarfile.open(code, mode="w:gz") as archive:
                add_tree(archive)
                for wheel in wheels:
                    archive.add(wheel, f"wheels/{wheel.name}")
            # images: 13 % smaller than with gzip; links as what they lead to, which is not on the target
            with tarfile.open(data, mode="w:xz", preset=2, dereference=True) as archive:
                for path, name in zip(options.data, names, strict=True):
                    archive.add(path, f"project/data/{name}")
        sums = split([code, *([data] if options.data else [])], options.out, options.size * MEBIBYTE)
    write_file(options.out / SUMS, "".join(f"{sum_}  {name}\n" for name, sum_ in sums.items()).encode())
    total = sum((options.out / name).stat().st_size for name in sums)
    print(f"{options.out}: {len(sums)} piece(s), {total / MEBIBYTE:.1f} MiB; wheels: {len(wheels)}")
    print("\n".join(advice(bool(wheels), bool(options.data))))
    return 0


def parser() -> argparse.ArgumentParser:
    parser = new_parser("pack", __doc__, "0 done, 1 pip or git failed, 2 bad usage, 3 data missing")
    parser.add_argument("--out", type=path_argument, required=True, metavar="DIR", help="a new folder for the pieces")
    data = "packed as data/NAME of the project, such as data/cifar-100-python; repeatable"
    parser.add_argument("--data", type=path_argument, action="append", default=[], metavar="PATH", help=data)
    parser.add_argument("--without", action="append", default=[], choices=tuple(GROUPS), help="wheels to omit")
    parser.add_argument("--python", default="3.12", metavar="X.Y", help="version on the target (default: 3.12)")
    tags = "of the target's wheels; repeatable (default: manylinux_2_28_x86_64 and older)"
    parser.add_argument("--platform", action="append", metavar="TAG", help=tags)
    parser.add_argument("--size", type=at_least_one, default=60, metavar="MIB", help="limit of a folder (default: 60)")
    return parser


def split(archives: Sequence[Path], folder: Path, size: int) -> dict[str, str]:
    """Cut the archives, one after the other, into pieces NAME.000 and so on in folders 01, 02 and so on of at most
    `size` bytes. Returns the pieces' SHA-256 sums by their paths in `folder`."""
    sums: dict[str, str] = {}
    transfer = room = 0
    for path in archives:
        with path.open("rb") as file:
            for number in itertools.count():
                if not (content := file.read(room or size)):
                    break
                if not room:
                    transfer, room = transfer + 1, size
                    if transfer > 99:  # their names would sort in another order
                        raise ConfigError(f"--size {size // MEBIBYTE}: makes over 99 folders; give a larger one")
                    make_folder(folder / f"{transfer:02}")
                name = f"{transfer:02}/{path.name}.{number:03}"
                write_file(folder / name, content)
                sums[name], room = hashlib.sha256(content).hexdigest(), room - len(content)
    return sums


def pack_files(files: Sequence[Path], root: Path, target: Path, name: str, piece: int, max_pieces: int) -> list[str]:
    """Write `files` as NAME.1, NAME.2 and so on in `target`, of at most `piece` bytes each.

    Returns the paths, relative to `root`, for which there was no room."""
    buffer, room, no_room = io.BytesIO(), piece * max_pieces, []
    with tarfile.open(fileobj=buffer, mode="w:gz", compresslevel=6) as archive:
        for path in files:
            room -= path.stat().st_size + 2 * tarfile.BLOCKSIZE  # an upper bound: compressed it is smaller
            if room < 0:
                no_room.append(str(path.relative_to(root)))
            else:
                archive.add(path, str(path.relative_to(root)))
    for old in target.glob(f"{name}.*"):
        old.unlink()
    content = buffer.getvalue()
    for number, start in enumerate(range(0, len(content), piece), start=1):
        write_file(target / f"{name}.{number}", content[start : start + piece])
    return no_room


def wanted(groups: Iterable[str], python: str) -> dict[str, str]:
    """Return {package: version here} of the groups and their requirements for the target's `python`, without packages
    that it has."""
    has = closure(THERE, {}, python, optional=True)
    return closure([package for group in groups for package in GROUPS[group]], has, python)


def closure(names: Iterable[str], without: Any, python: str, *, optional: bool = False) -> dict[str, str]:
    """Return {package: version here} of these and their requirements under a `python` X.Y. `optional`: some may be
    missing."""
    from packaging.requirements import Requirement
    from packaging.utils import canonicalize_name

    target = {"extra": "", "python_version": python, "python_full_version": f"{python}.0"}
    found: dict[str, str] = {}
    waiting = list(names)
    while waiting:
        name = canonicalize_name(waiting.pop())
        if name in found or name in without:
            continue
        try:
            distribution = importlib.metadata.distribution(name)
        except importlib.metadata.PackageNotFoundError:
            if optional:
                continue
            raise ConfigError(
                f"{name} is not installed here, so its version is unknown\n"
                f'pip install -c constraints.txt "{name}", or omit its group (--without)'
            ) from None
        found[name] = distribution.version
        needs = [Requirement(text) for text in distribution.requires or ()]
        waiting += [need.name for need in needs if need.marker is None or need.marker.evaluate(target)]
    return found


def download(packages: dict[str, str], folder: Path, python: str, platforms: Sequence[str] | None) -> list[Path]:
    """Download the wheels for the target. Raises `ExpectedError` with pip's message if one is unavailable."""
    tags = platforms or [f"manylinux_2_{minor}_x86_64" for minor in (28, 27, 24, 17)] + ["manylinux2014_x86_64"]
    command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--only-binary=:all:", "-d", str(folder)]
    command += [f"--python-version={python}", "--implementation=cp", *(f"--platform={tag}" for tag in tags)]
    command += [f"{name}=={version}" for name, version in sorted(packages.items())]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if "ERROR" in line] or [f"pip: status {done.returncode}"]
        raise ExpectedError(f"{lines[-1]}\nomit its group with --without, or choose another --python or --platform")
    return sorted(folder.iterdir())


def add_tree(archive: tarfile.TarFile) -> None:
    """Add the committed files as project/, and the commit's hash, which a tree without .git lacks."""
    state = _git("status", "--porcelain", "--untracked-files=no").decode().strip()
    if state:
        print("note: uncommitted changes are not packed", file=sys.stderr)
    with tarfile.open(fileobj=io.BytesIO(_git("archive", "HEAD"))) as tree:
        for member in tree:
            content: IO[bytes] | None = tree.extractfile(member) if member.isfile() else None
            member.name = f"project/{member.name}"
            archive.addfile(member, content)
    commit = _git("log", "-1", "--format=%H", "--", ".", ":(exclude)results")
    member = tarfile.TarInfo("project/commit.txt")
    member.size = len(commit)
    archive.addfile(member, io.BytesIO(commit))


def _git(*arguments: str) -> bytes:
    try:
        return subprocess.run(["git", *arguments], cwd=CODE, capture_output=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError) as error:
        reason = getattr(error, "stderr", b"").decode(errors="replace").strip() or str(error)
        raise ExpectedError(f"git {arguments[0]}: {reason}; pack from a checkout") from None


def advice(wheels: bool, data: bool) -> list[str]:
    """Return the commands for the target, to be run in the folder with the folders 01, 02 and so on."""
    check = f"sha256sum --ignore-missing --quiet -c {SUMS}"
    install = 'python3 -m pip install -q --no-index --no-deps "$TO"/wheels/*.whl && '
    all_there = f"sha256sum --status -c {SUMS} 2>/dev/null"
    done = '"$TO/data.unpacked"'
    unpack = f'{all_there} && cat */{DATA_ARCHIVE}.* | python3 -c "{UNPACK}" "$TO" && touch {done}'
    lines = [
        f'TO=~/bring-up; mkdir -p "$TO"; {check} && cat */{CODE_ARCHIVE}.* | tar -xzf - -C "$TO"',
        *([f"[ -e {done} ] || {{ {unpack}; }}"] if data else []),
        f'{install if wheels else ""}cd "$TO/project" && python3 -m tools.bring_up --out ../bring-up --minutes 9',
    ]
    return ["on the target, in the folder of 01, 02 and so on, in each call:", *(f"    {line}" for line in lines)]


def list_files(folder: Path) -> dict[str, tuple[int, int]]:
    """Return {relative path: (bytes, modification time in ns)} of the files below `folder`."""
    files = {}
    for path in _walk(os.fspath(folder), frozenset()):
        status = os.stat(path)
        files[os.path.relpath(path, folder)] = (status.st_size, status.st_mtime_ns)
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
