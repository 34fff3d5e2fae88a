"""tools.prepare_data: every kind of source, everything that can be wrong with one, and nothing half-written."""

import errno
import fcntl
import gzip
import os
import pty
import re
import subprocess
import sys
import tarfile
import threading
import zipfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from processes import read_terminal
from tiny_cifar import MemberList, TinyCifar, make_archive, make_tiny_cifar, md5, serve

from tools import fetch_cifar as prepare
from tools import prepare_data
from utils.data.cifar import VERSIONS, remedy
from utils.data.datasets import load_dataset

Capture = pytest.CaptureFixture[str]


@pytest.fixture(params=("cifar10", "cifar100"))
def tiny(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> TinyCifar:
    return make_tiny_cifar(request.param, monkeypatch)


@pytest.fixture
def tiny100(monkeypatch: pytest.MonkeyPatch) -> TinyCifar:
    return make_tiny_cifar("cifar100", monkeypatch)


def run(tiny: TinyCifar, data_path: Path, *more: str | Path) -> int:
    return prepare_data.main(["--dataset", tiny.version.name, "--data_path", str(data_path), *map(str, more)])


def binary_members(tiny: TinyCifar) -> dict[str, bytes]:
    """What the official archive holds, with one text that is of no use here."""
    files = {f"{tiny.version.folder}/{name}": records.tobytes() for name, records in tiny.records.items()}
    return {f"{tiny.version.folder}/readme.html": b"<html>", **files}


def assert_prepared(tiny: TinyCifar, data_path: Path) -> None:
    folder = data_path / tiny.version.folder
    for name, records in tiny.records.items():
        assert (folder / name).read_bytes() == records.tobytes()
    assert (folder / tiny.version.names_file).read_text().split() == list(tiny.version.class_names)
    assert {path.name for path in folder.iterdir()} == {*tiny.records, tiny.version.names_file}
    left = sorted(path.name for path in data_path.iterdir() if not path.name.startswith("cifar-"))
    assert left == [f".{tiny.version.name}.lock"]
    dataset = load_dataset(tiny.version.name, data_path, download=False)
    assert dataset.train.images[0].tobytes() == tiny.split(tiny.version.train)[0, tiny.version.label_bytes :].tobytes()


def assert_nothing_written(tiny: TinyCifar, data_path: Path) -> None:
    assert [path.name for path in data_path.iterdir()] in ([], [f".{tiny.version.name}.lock"])


# ---- every kind of source


def packed_archive(tiny: TinyCifar, where: Path) -> Path:
    return make_archive(where / "cifar.tar.gz", binary_members(tiny))


def plain_archive(tiny: TinyCifar, where: Path) -> Path:
    return make_archive(where / "cifar.tar", {f"./{n}": c for n, c in binary_members(tiny).items()}, packed=False)


def binary_folder(tiny: TinyCifar, where: Path) -> Path:
    return tiny.write_binary(where)


def folder_above(tiny: TinyCifar, where: Path) -> Path:
    return tiny.write_binary(where).parent


def python_folder(tiny: TinyCifar, where: Path) -> Path:
    return tiny.write_python(where)


def python_archive(tiny: TinyCifar, where: Path) -> Path:
    folder = tiny.version.dataset_class.base_folder
    members: MemberList = [(tarfile.TarInfo(folder), b"")]
    members[0][0].type = tarfile.DIRTYPE
    files = {**tiny.meta_pickle(), **tiny.pickles()}
    return make_archive(
        where / "python.tar.gz", members + [(tarfile.TarInfo(f"{folder}/{n}"), c) for n, c in files.items()]
    )


SOURCES = [packed_archive, plain_archive, binary_folder, folder_above, python_folder, python_archive]


@pytest.mark.parametrize("make_source", SOURCES)
def test_every_source_gives_the_same_files(
    tiny: TinyCifar,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: Capture,
    make_source: Callable[[TinyCifar, Path], Path],
) -> None:
    tiny.publish_python(monkeypatch)
    (tmp_path / "source").mkdir()
    source, data_path = make_source(tiny, tmp_path / "source"), tmp_path / "new" / "data"
    assert run(tiny, data_path, "--from", source) == 0
    assert_prepared(tiny, data_path)
    target = data_path / tiny.version.folder
    assert capsys.readouterr().out == f"{target}: wrote {tiny.version.title} from {source}, verified\n"
    assert run(tiny, data_path, "--from", source) == 0
    assert capsys.readouterr().out == f"{target}: {tiny.version.title} is already there, verified\n"


def test_torchvision_folder_is_converted_in_place(
    tiny: TinyCifar, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny.publish_python(monkeypatch)
    tiny.write_python(tmp_path)
    assert run(tiny, tmp_path, "--from", tmp_path) == 0
    assert_prepared(tiny, tmp_path)


def test_a_terminal_gets_a_progress_bar(tiny100: TinyCifar, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    terminal, end = pty.openpty()
    with ThreadPoolExecutor() as reader:  # meanwhile, since a terminal that nobody reads makes its writer wait
        reading = reader.submit(read_terminal, terminal)
        with monkeypatch.context() as patched, open(end, "w") as stderr:
            patched.setenv("TERM", "xterm")
            patched.setenv("COLUMNS", "120")
            patched.setattr(sys, "stderr", stderr)
            assert run(tiny100, tmp_path / "data", "--from", packed_archive(tiny100, tmp_path)) == 0
        shown = reading.result()
    for name, records in tiny100.records.items():
        assert re.search(rf"{name} +━+ {records.nbytes / 1000:.1f}/{records.nbytes / 1000:.1f} kB ", shown), shown


def test_others_may_read_what_was_written(tiny100: TinyCifar, tmp_path: Path) -> None:
    before = os.umask(0o022)
    try:
        assert run(tiny100, tmp_path / "data", "--from", packed_archive(tiny100, tmp_path)) == 0
    finally:
        os.umask(before)
    folder = tmp_path / "data" / tiny100.version.folder
    assert folder.stat().st_mode & 0o777 == 0o755
    assert {path.stat().st_mode & 0o777 for path in folder.iterdir()} == {0o644}


def test_staging_copies_verified_files(tiny: TinyCifar, tmp_path: Path, capsys: Capture) -> None:
    stage = tmp_path / "local"
    assert run(tiny, tmp_path / "data", "--from", packed_archive(tiny, tmp_path), "--stage", stage) == 0
    assert_prepared(tiny, stage)
    source = tmp_path / "data" / tiny.version.folder
    last_line = capsys.readouterr().out.splitlines()[-1]
    assert last_line == f"{stage / tiny.version.folder}: wrote {tiny.version.title} from {source}, verified"
    assert run(tiny, tmp_path / "data", "--stage", stage) == 0
    assert "already there" in capsys.readouterr().out.splitlines()[-1]


@pytest.fixture
def server(tiny: TinyCifar, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that plays the home page, without its archive, whose MD5 is published."""
    folder = tmp_path / "server"
    folder.mkdir()
    archive = make_archive(folder / tiny.version.archive, binary_members(tiny))
    object.__setattr__(tiny.version, "archive_md5", md5(archive.read_bytes()))
    return folder


def test_download(
    tiny: TinyCifar, tmp_path: Path, server: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    monkeypatch.setenv("no_proxy", "*")
    with serve(server) as address:
        monkeypatch.setattr(prepare, "HOME_PAGE", address)
        assert run(tiny, tmp_path / "data") == 0
    assert_prepared(tiny, tmp_path / "data")
    assert f"from {address}/{tiny.version.archive}" in capsys.readouterr().out


@pytest.mark.parametrize("fault", ["no server", "no file", "truncated", "altered"])
def test_failed_download(
    tiny: TinyCifar, tmp_path: Path, server: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture, fault: str
) -> None:
    monkeypatch.setenv("no_proxy", "*")
    (archive,) = server.iterdir()
    content = archive.read_bytes()
    if fault == "no file":
        archive.unlink()
    elif fault == "truncated":
        archive.write_bytes(content[: len(content) // 2])
    elif fault == "altered":
        archive.write_bytes(b"<html>log in</html>")
    with serve(server) as address:
        monkeypatch.setattr(prepare, "HOME_PAGE", "http://127.0.0.1:1" if fault == "no server" else address)
        assert run(tiny, tmp_path / "data") == 3
    assert_nothing_written(tiny, tmp_path / "data")
    message = capsys.readouterr().err
    assert message.startswith("error: http://127.0.0.1:")
    assert remedy(tiny.version, tmp_path / "data") in message
    if fault in ("truncated", "altered"):
        assert f"published is {tiny.version.archive_md5}" in message


def test_a_download_that_does_not_end_is_refused(
    tiny: TinyCifar, tmp_path: Path, server: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    monkeypatch.setenv("no_proxy", "*")
    (server / tiny.version.archive).write_bytes(bytes(1 << 24))
    with serve(server) as address:
        monkeypatch.setattr(prepare, "HOME_PAGE", address)
        assert run(tiny, tmp_path / "data") == 3
    assert "gives or unpacks to more than the dataset can need" in capsys.readouterr().err
    assert_nothing_written(tiny, tmp_path / "data")


# ---- bad input


def link(kind: bytes) -> Callable[[TinyCifar, Path], Path]:
    def make(tiny: TinyCifar, where: Path) -> Path:
        members: MemberList = [(tarfile.TarInfo(name), content) for name, content in binary_members(tiny).items()]
        info = tarfile.TarInfo(f"{tiny.version.folder}/test.bin")
        info.type, info.linkname = kind, "/etc/passwd"
        return make_archive(where / "links.tar.gz", [*members[:-1], (info, b"")])

    return make


def renamed(name: str) -> Callable[[TinyCifar, Path], Path]:
    def make(tiny: TinyCifar, where: Path) -> Path:
        return make_archive(where / "outside.tar.gz", {**binary_members(tiny), name: b"gotcha"})

    return make


def cut_archive(share: float) -> Callable[[TinyCifar, Path], Path]:
    def make(tiny: TinyCifar, where: Path) -> Path:
        path = packed_archive(tiny, where)
        path.write_bytes(path.read_bytes()[: int(share * path.stat().st_size)])
        return path

    return make


def altered_archive(tiny: TinyCifar, where: Path) -> Path:
    members = binary_members(tiny)
    name = f"{tiny.version.folder}/test.bin"
    return make_archive(where / "altered.tar.gz", {**members, name: members[name][:-1] + b"\0"})


def short_member(tiny: TinyCifar, where: Path) -> Path:
    members = binary_members(tiny)
    name = f"{tiny.version.folder}/train.bin"
    return make_archive(where / "short.tar.gz", {**members, name: members[name][:-1]})


def member_twice(tiny: TinyCifar, where: Path) -> Path:
    return make_archive(
        where / "twice.tar.gz", {**binary_members(tiny), "again/test.bin": tiny.records["test.bin"].tobytes()}
    )


def member_missing(tiny: TinyCifar, where: Path) -> Path:
    members = binary_members(tiny)
    del members[f"{tiny.version.folder}/test.bin"]
    return make_archive(where / "half.tar.gz", members)


def zip_file(tiny: TinyCifar, where: Path) -> Path:
    with zipfile.ZipFile(where / "cifar.zip", "w") as file:
        for name, content in binary_members(tiny).items():
            file.writestr(name, content)
    return where / "cifar.zip"


def some_text(tiny: TinyCifar, where: Path) -> Path:
    (where / "text.tar.gz").write_text("no archive at all\n" * 100)
    return where / "text.tar.gz"


def packed_text(tiny: TinyCifar, where: Path) -> Path:
    (where / "text.tar.gz").write_bytes(gzip.compress(b"no archive at all\n" * 100))
    return where / "text.tar.gz"


def empty_file(tiny: TinyCifar, where: Path) -> Path:
    (where / "empty.tar.gz").touch()
    return where / "empty.tar.gz"


def empty_folder(tiny: TinyCifar, where: Path) -> Path:
    (where / "nothing").mkdir()
    return where / "nothing"


def bomb_beside_the_files(tiny: TinyCifar, where: Path) -> Path:
    return make_archive(where / "bomb.tar.gz", {"zeros": bytes(1 << 24), **binary_members(tiny)})


def bomb_in_place_of_a_file(tiny: TinyCifar, where: Path) -> Path:
    return make_archive(where / "bomb.tar.gz", {f"{tiny.version.folder}/train.bin": bytes(1 << 24)})


def bomb_in_a_header(tiny: TinyCifar, where: Path) -> Path:
    info = tarfile.TarInfo("header")
    info.type = tarfile.XHDTYPE  # an extended header, which tarfile reads into memory whole
    return make_archive(where / "bomb.tar.gz", [(info, bytes(1 << 24))])


def broken_sparse_header(tiny: TinyCifar, where: Path) -> Path:
    info = tarfile.TarInfo("sparse")
    info.pax_headers = {"GNU.sparse.map": "nothing"}
    return make_archive(where / "sparse.tar.gz", [(info, b"")])


def bomb_of_a_pickle(tiny: TinyCifar, where: Path) -> Path:
    return make_archive(where / "bomb.tar.gz", {f"{tiny.version.dataset_class.base_folder}/train": bytes(1 << 20)})


def altered_folder(tiny: TinyCifar, where: Path) -> Path:
    folder = tiny.write_binary(where / "altered")
    (folder / "test.bin").write_bytes(bytes((folder / "test.bin").stat().st_size))
    return folder


def half_a_folder(tiny: TinyCifar, where: Path) -> Path:
    folder = tiny.write_binary(where / "half")
    (folder / "train.bin").unlink()
    return folder


def device_in_a_folder(tiny: TinyCifar, where: Path) -> Path:
    folder = tiny.write_binary(where / "device")
    (folder / "test.bin").unlink()
    (folder / "test.bin").symlink_to("/dev/zero")
    return folder


def other_dataset(tiny: TinyCifar, where: Path) -> Path:
    return make_archive(where / "cifar-10-binary.tar.gz", {"cifar-10-batches-bin/data_batch_1.bin": bytes(3073)})


def absent(tiny: TinyCifar, where: Path) -> Path:
    return where / "absent.tar.gz"


BAD_SOURCES = [
    (link(tarfile.SYMTYPE), "'cifar-100-binary/test.bin' is a link or a device"),
    (link(tarfile.LNKTYPE), "'cifar-100-binary/test.bin' is a link or a device"),
    (link(tarfile.CHRTYPE), "'cifar-100-binary/test.bin' is a link or a device"),
    (link(tarfile.FIFOTYPE), "'cifar-100-binary/test.bin' is a link or a device"),
    (renamed("../../test.bin"), "'../../test.bin' points outside of the archive"),
    (renamed("cifar-100-binary/../../../escaped"), "points outside of the archive"),
    (renamed("/tmp/train.bin"), "'/tmp/train.bin' points outside of the archive"),
    (cut_archive(0.0), "truncated, damaged, or not a tar or tar.gz archive: empty file"),
    (cut_archive(0.001), "truncated, damaged, or not a tar or tar.gz archive"),
    (cut_archive(0.5), "truncated, damaged, or not a tar or tar.gz archive"),
    (cut_archive(0.99), "truncated, damaged, or not a tar or tar.gz archive"),
    (altered_archive, "the records of its test.bin are not those of CIFAR-100"),
    (short_member, "cifar-100-binary/train.bin: 18443 bytes, expected exactly 18444"),
    (member_twice, "holds test.bin twice"),
    (member_missing, "holds no test.bin"),
    (zip_file, "not a tar or tar.gz archive"),
    (some_text, "not a tar or tar.gz archive"),
    (packed_text, "not a tar or tar.gz archive"),
    (empty_file, "truncated, damaged, or not a tar or tar.gz archive: empty file"),
    (empty_folder, "holds no test.bin, train.bin: not an archive or folder of CIFAR-100"),
    (bomb_beside_the_files, "unpacks to more than the dataset can need"),
    (bomb_in_place_of_a_file, "16777216 bytes, expected exactly 18444"),
    (bomb_in_a_header, "unpacks to more than the dataset can need"),
    (broken_sparse_header, "truncated, damaged, or not a tar or tar.gz archive"),
    (bomb_of_a_pickle, "1048576 bytes, expected about 18444"),
    (altered_folder, "the records of its test.bin are not those of CIFAR-100"),
    (half_a_folder, "holds no train.bin"),
    (device_in_a_folder, "holds no test.bin"),
    (other_dataset, "holds no test.bin, train.bin: not an archive or folder of CIFAR-100"),
    (absent, "no such archive or folder"),
]


@pytest.mark.parametrize(("make_source", "expected"), BAD_SOURCES)
def test_bad_source_is_one_clear_line(
    tiny100: TinyCifar,
    tmp_path: Path,
    capsys: Capture,
    make_source: Callable[[TinyCifar, Path], Path],
    expected: str,
) -> None:
    source, data_path = make_source(tiny100, tmp_path), tmp_path / "room" / "data"
    before = sorted(tmp_path.rglob("*"))
    assert run(tiny100, data_path, "--from", source) == 3
    message = capsys.readouterr().err
    assert message.startswith(f"error: {source}") and expected in message
    assert message.count("\n") == 1
    assert_nothing_written(tiny100, data_path)
    beside = {data_path, data_path.parent, *data_path.iterdir()}
    assert sorted(set(tmp_path.rglob("*")) - beside) == before


@pytest.mark.parametrize("form", ["archive", "folder"])
def test_no_pickle_is_opened_whose_checksum_is_wrong(
    tiny: TinyCifar, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture, form: str
) -> None:
    tiny.publish_python(monkeypatch)
    trap = tmp_path / "opened"
    name = next(iter(tiny.pickles()))
    source = tmp_path / "source"
    if form == "archive":
        make_archive(source, {f"{tiny.version.dataset_class.base_folder}/{name}": mkdir_pickle(trap)})
    else:
        (tiny.write_python(source) / name).write_bytes(mkdir_pickle(trap))
    assert run(tiny, tmp_path / "data", "--from", source) == 3
    assert f"{source}: {name}: MD5 " in capsys.readouterr().err
    assert not trap.exists()
    assert_nothing_written(tiny, tmp_path / "data")


def mkdir_pickle(folder: Path) -> bytes:
    """A pickle that makes `folder` when it is opened."""
    return b"cos\nmkdir\n(V%s\ntR." % str(folder).encode()


def test_the_trap_would_spring(tmp_path: Path) -> None:
    import pickle

    pickle.loads(mkdir_pickle(tmp_path / "opened"))
    assert (tmp_path / "opened").exists()


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(share=st.floats(0, 1), flip=st.integers(0, 255), cut=st.booleans())
def test_a_damaged_archive_never_becomes_data(
    tiny100: TinyCifar, tmp_path_factory: pytest.TempPathFactory, share: float, flip: int, cut: bool
) -> None:
    """One byte changed or the rest cut off, anywhere: either the right files or status 3 and nothing."""
    where = tmp_path_factory.mktemp("fuzz")
    archive = packed_archive(tiny100, where)
    content = bytearray(archive.read_bytes())
    position = min(int(share * len(content)), len(content) - 1)
    content[position] ^= flip
    archive.write_bytes(content[:position] if cut else content)
    status = run(tiny100, where / "data", "--from", archive)
    if status == 0:
        assert_prepared(tiny100, where / "data")
    else:
        assert status == 3
        assert_nothing_written(tiny100, where / "data")


# ---- disks, interruptions, company


def test_full_disk(tiny: TinyCifar, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    def fail(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", fail)
    assert run(tiny, tmp_path / "data", "--from", packed_archive(tiny, tmp_path)) == 3
    assert "No space left on device" in capsys.readouterr().err
    assert_nothing_written(tiny, tmp_path / "data")


def test_really_full_disk(tiny100: TinyCifar, tmp_path: Path, capsys: Capture) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=16k", "tmpfs", disk], capture_output=True, check=False
    )
    if mounted.returncode != 0:
        pytest.skip("a small tmpfs cannot be mounted here: it needs root")
    try:
        assert run(tiny100, disk, "--from", packed_archive(tiny100, tmp_path)) == 3
        assert "No space left on device" in capsys.readouterr().err
        assert_nothing_written(tiny100, disk)
    finally:
        subprocess.run(["umount", disk], check=True)


@pytest.mark.parametrize("what", ["read-only", "file"])
def test_folder_that_cannot_be_written(tiny100: TinyCifar, tmp_path: Path, capsys: Capture, what: str) -> None:
    if what == "read-only":
        if not os.path.ismount("/sys"):
            pytest.skip("/sys, where not even root can make a folder, is not mounted")
        data_path = Path("/sys/cifar-data")
    else:
        data_path = tmp_path / "file"
        data_path.write_text("in the way")
    assert run(tiny100, data_path, "--from", packed_archive(tiny100, tmp_path)) == 3
    assert f"error: cannot write below {data_path}: " in capsys.readouterr().err


def test_prepared_folder_on_a_read_only_disk_is_accepted(
    tiny100: TinyCifar, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    tiny100.write_binary(tmp_path)

    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    for method in ("write_text", "mkdir", "rename"):
        monkeypatch.setattr(Path, method, refuse)
    monkeypatch.setattr(prepare, "partial_folder", refuse)
    assert run(tiny100, tmp_path) == 0
    assert "already there" in capsys.readouterr().out


def test_interruption_leaves_nothing(
    tiny: TinyCifar, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    synchronised: list[int] = []

    def interrupt_at_the_second_file(descriptor: int) -> None:
        synchronised.append(descriptor)
        if len(synchronised) == 2:
            raise KeyboardInterrupt

    monkeypatch.setattr(os, "fsync", interrupt_at_the_second_file)
    assert run(tiny, tmp_path / "data", "--from", packed_archive(tiny, tmp_path)) == 130
    assert "interrupted" in capsys.readouterr().err
    assert_nothing_written(tiny, tmp_path / "data")
    assert run(tiny, tmp_path / "data", "--from", packed_archive(tiny, tmp_path)) == 0


def test_what_a_killed_run_left_is_removed(tiny: TinyCifar, tmp_path: Path) -> None:
    leftover = tmp_path / "data" / f".{tiny.version.folder}.0badcafe"
    leftover.mkdir(parents=True)
    (leftover / "test.bin").write_bytes(b"half")
    assert run(tiny, tmp_path / "data", "--from", packed_archive(tiny, tmp_path)) == 0
    assert_prepared(tiny, tmp_path / "data")


def test_a_damaged_folder_is_replaced_and_kept(tiny: TinyCifar, tmp_path: Path, capsys: Capture) -> None:
    data_path = tmp_path / "data"
    folder = tiny.write_binary(data_path)
    (folder / next(iter(tiny.records))).write_bytes(b"damaged")
    assert run(tiny, data_path, "--from", packed_archive(tiny, tmp_path)) == 0
    assert_prepared(tiny, data_path)
    (kept,) = data_path.glob(f"{tiny.version.folder}.damaged.*")
    assert (kept / next(iter(tiny.records))).read_bytes() == b"damaged"
    assert capsys.readouterr().out.endswith(f"; what was there before is damaged, and was kept as {kept.name}\n")


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.EOPNOTSUPP])
def test_a_file_system_without_locks_will_do(tiny100: TinyCifar, tmp_path: Path, number: int) -> None:
    def refuse(file: object, operation: int) -> None:
        raise OSError(number, os.strerror(number))

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(fcntl, "flock", refuse)
        assert run(tiny100, tmp_path / "data", "--from", packed_archive(tiny100, tmp_path)) == 0
    assert_prepared(tiny100, tmp_path / "data")


def test_one_that_waits_says_for_what(tiny100: TinyCifar, tmp_path: Path, capsys: Capture) -> None:
    source, data_path = packed_archive(tiny100, tmp_path), tmp_path / "data"
    data_path.mkdir()
    with (data_path / ".cifar100.lock").open("a") as other, ThreadPoolExecutor() as pool:
        fcntl.flock(other, fcntl.LOCK_EX)
        waiting = pool.submit(run, tiny100, data_path, "--from", source)
        told = ""
        while "waiting for another process" not in told:
            told += capsys.readouterr().err
            assert not waiting.done()
        fcntl.flock(other, fcntl.LOCK_UN)
        assert waiting.result() == 0
    assert ".cifar100.lock" in told
    assert_prepared(tiny100, data_path)


def test_two_at_once_do_the_work_once(tiny: TinyCifar, tmp_path: Path, capsys: Capture) -> None:
    source, data_path = packed_archive(tiny, tmp_path), tmp_path / "data"
    statuses: list[int] = []
    threads = [
        threading.Thread(target=lambda: statuses.append(run(tiny, data_path, "--from", source))) for _ in range(4)
    ]  # a file lock keeps threads apart as it does processes: each opens the file for itself
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert statuses == [0] * 4
    assert_prepared(tiny, data_path)
    output = capsys.readouterr().out
    assert output.count(": wrote ") == 1 and output.count("already there") == 3


# ---- the command


def test_command_line_knows_every_dataset() -> None:
    assert sorted(VERSIONS) == list(prepare_data.DATASETS)


@pytest.mark.parametrize(
    "arguments", [[], ["--dataset", "mnist", "--data_path", "x"], ["--dataset", "cifar10"], ["--data", "x"]]
)
def test_wrong_usage_is_status_2(arguments: list[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        prepare_data.main(arguments)
    assert caught.value.code == 2


def test_help_answers_without_torch() -> None:
    script = (
        "import sys, tools.prepare_data\n"
        "try: tools.prepare_data.main(['--help'])\n"
        "except SystemExit as leave: sys.exit(leave.code or 10 * bool({'torch', 'numpy', 'rich'} & set(sys.modules)))"
    )
    root = Path(__file__).parent.parent
    done = subprocess.run([sys.executable, "-c", script], cwd=root, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "--from ARCHIVE_OR_FOLDER" in done.stdout


@pytest.mark.parametrize("name", prepare_data.DATASETS)
def test_official_data(name: str, tmp_path: Path) -> None:
    if "CIFAR_DATA" not in os.environ:
        pytest.skip("CIFAR_DATA names no folder with the official binary version")
    source = Path(os.environ["CIFAR_DATA"])
    assert prepare_data.main(["--dataset", name, "--data_path", str(tmp_path), "--from", str(source)]) == 0
    written, original = (load_dataset(name, path, download=False) for path in (tmp_path, source))
    assert (written.train.images == original.train.images).all()
    assert (written.valid.labels == original.valid.labels).all()
