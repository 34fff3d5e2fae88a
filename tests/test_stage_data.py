"""tools.stage_data: one complete copy of a data folder on a local disk."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import ROOT
from tools import stage_data


@pytest.fixture
def source(tmp_path: Path) -> Path:
    folder = tmp_path / "shared/data"
    (folder / "train/cat").mkdir(parents=True)
    (folder / "train/cat/1.jpg").write_bytes(b"a picture")
    (folder / "labels.txt").write_text("cat\n")
    return folder


def content(folder: Path) -> dict[str, bytes]:
    files = (path for path in folder.rglob("*") if path.is_file() and path.name != stage_data.MARK)
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


def test_copy_is_complete_and_reused(source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = tmp_path / "local/data"
    (source / "train/cat").chmod(0o555)
    assert stage_data.main([str(source), str(target)]) == 0
    assert content(target) == content(source)
    assert (target / "train/cat").stat().st_mode & 0o200  # otherwise only root could replace the copy
    number = target.stat().st_ino
    assert stage_data.main([str(source), str(target)]) == 0
    assert target.stat().st_ino == number
    assert capsys.readouterr().out.splitlines()[1] == f"{target}: exists already, 2 files"


@pytest.mark.parametrize("change", ["more", "fewer", "other bytes", "newer"])
def test_copy_of_changed_data_is_replaced(source: Path, tmp_path: Path, change: str) -> None:
    target = tmp_path / "local"
    stage_data.stage(source, target)
    if change == "more":
        (source / "train/cat/2.jpg").write_bytes(b"another")
    elif change == "fewer":
        (source / "labels.txt").unlink()
    elif change == "other bytes":
        (target / "labels.txt").write_text("cut")
    else:
        (source / "labels.txt").write_text("dog\n")
        os.utime(source / "labels.txt", ns=(1, 1))
    stage_data.stage(source, target)
    assert content(target) == content(source)


def test_a_folder_that_is_no_copy_is_never_replaced(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    home, file, empty = tmp_path / "home", tmp_path / "file", tmp_path / "empty"
    home.mkdir()
    (home / "thesis.txt").write_text("the only copy")
    file.touch()
    for target in (home, file):
        assert stage_data.main([str(source), str(target)]) == 2
        assert f"{target}: exists, but is no copy by this program" in capsys.readouterr().err
    assert content(home) == {"thesis.txt": b"the only copy"} and file.is_file()
    empty.mkdir()
    assert stage_data.main([str(source), str(empty)]) == 0
    assert content(empty) == content(source)


def test_processes_that_start_at_once_copy_once(source: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tools.stage_data", str(source), str(tmp_path / "local")]
    started = [subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) for _ in range(3)]
    actions = sorted(process.communicate(timeout=60)[0].split(":")[1].split()[0] for process in started)
    assert [process.returncode for process in started] == [0, 0, 0]
    assert actions == ["copied", "exists", "exists"]


def test_the_remains_of_a_killed_copy_are_removed(source: Path, tmp_path: Path) -> None:
    (tmp_path / "near").mkdir()
    (tmp_path / "near/.local.0badf00d").mkdir()
    stage_data.stage(source, tmp_path / "near/local")
    assert sorted(path.name for path in (tmp_path / "near").iterdir()) == [".local.lock", "local"]


def test_links_are_followed_but_not_in_cycles(source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    elsewhere, target = tmp_path / "elsewhere", tmp_path / "local"
    elsewhere.mkdir()
    (elsewhere / "2.jpg").write_bytes(b"another")
    for name in ("dog", "wolf"):
        (source / "train" / name).symlink_to(elsewhere)
    assert stage_data.main([str(source), str(target)]) == 0
    assert (target / "train/wolf/2.jpg").read_bytes() == (target / "train/dog/2.jpg").read_bytes() == b"another"
    for name in ("back", "again"):  # two of them: without a check, 2 to the power of 40 folders
        (elsewhere / name).symlink_to(source)
    assert stage_data.main([str(source), str(target)]) == 3
    error = capsys.readouterr().err
    assert "a link to one of its parent folders" in error and error.count("\n") == 1, error


def test_failures_are_one_line_and_leave_no_copy(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    for origin, target, status, words in [
        (tmp_path / "nosuch", tmp_path / "local", 3, "nosuch: No such file or directory"),
        (tmp_path / "file", tmp_path / "local", 3, "file: Not a directory"),
        (source, tmp_path / "file/local", 3, "file: File exists"),
        (source, source / "copy", 2, "name a folder on a local disk"),
        (source, source, 2, "name a folder on a local disk"),
    ]:
        assert stage_data.main([str(origin), str(target)]) == status
        error = capsys.readouterr().err
        assert words in error and error.count("\n") == 1, error
    usage = type(stage_data.shutil.disk_usage("/"))
    monkeypatch.setattr(stage_data.shutil, "disk_usage", lambda _: usage(10, 10, 3))
    assert stage_data.main([str(source), str(tmp_path / "local")]) == 3
    assert "0.0 GB are free; expected 0.0 GB" in capsys.readouterr().err
    os.mkfifo(source / "pipe")
    monkeypatch.undo()
    assert stage_data.main([str(source), str(tmp_path / "local")]) == 3
    assert "is a named pipe" in capsys.readouterr().err
    assert not (tmp_path / "local").exists()
