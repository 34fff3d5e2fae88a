"""tools.prepare_data: CIFAR from a download or an archive, damaged archives, and no partial data."""

import tarfile
from pathlib import Path

import pytest

from tests.conftest import change_byte, replace_by_fifo
from tests.tiny_cifar import make_tiny_cifar, serve
from tools import prepare_data
from utils.data.datasets.dataset import load_dataset


@pytest.fixture
def tiny100(monkeypatch):
    return make_tiny_cifar("cifar100", monkeypatch)


@pytest.fixture
def archive(tiny100, tmp_path):
    """CIFAR-100 as torchvision downloads it."""
    (tmp_path / "archive").write_bytes(tiny100.archive)
    return tmp_path / "archive"


def run(tiny, data_path, *more):
    return prepare_data.main(["--dataset", tiny.version.name, "--data_path", str(data_path), *map(str, more)])


def assert_prepared(tiny, data_path):
    """The folder has the whole data, the lock file and nothing else."""
    expected = [tiny.version.dataset_class.base_folder, f".{tiny.version.name}.lock"]
    assert sorted(path.name for path in data_path.iterdir()) == sorted(expected)
    dataset = load_dataset(tiny.version.name, data_path, download=False)
    for arrays, split in ((dataset.train, tiny.version.train), (dataset.valid, tiny.version.valid)):
        assert arrays.images.tobytes() == tiny.split(split)[:, tiny.version.label_bytes :].tobytes()


def assert_nothing_written(data_path):
    assert [path.name for path in data_path.glob("*") if path.name != ".cifar100.lock"] == []


@pytest.mark.parametrize("name", ["cifar10", "cifar100"])
def test_an_official_archive_is_unpacked_and_verified(name, tmp_path, monkeypatch, capsys):
    tiny = make_tiny_cifar(name, monkeypatch)
    version, source, data_path = tiny.version, tmp_path / "no ending", tmp_path / "new" / "data"
    source.write_bytes(tiny.archive)
    for when in ("now", "already"):
        assert run(tiny, data_path, "--from", source) == 0
        assert_prepared(tiny, data_path)
        folder = data_path / version.dataset_class.base_folder
        assert capsys.readouterr().out.endswith(f"{folder}: {version.title} is {when} there, verified\n")


def cut(path):
    path.write_bytes(path.read_bytes()[:-100])


def plant_link(path):
    with tarfile.open(path, "w:gz") as tar:
        info = tarfile.TarInfo("cifar-100-python")
        info.type, info.linkname = tarfile.SYMTYPE, "/tmp"
        tar.addfile(info)


@pytest.mark.parametrize("damage", [cut, change_byte, plant_link, Path.unlink, replace_by_fifo])
def test_a_bad_archive_is_not_opened(damage, tiny100, archive, tmp_path, capsys):
    damage(archive)
    assert run(tiny100, tmp_path / "data", "--from", archive) == 3
    error = capsys.readouterr().err
    problem = "missing, truncated, altered, or not the official cifar-100-python.tar.gz"
    assert error.startswith(f"error: {archive}: {problem}") and error.count("\n") == 2
    assert "python -m tools.prepare_data --dataset cifar100" in error
    assert_nothing_written(tmp_path / "data")


@pytest.mark.parametrize("fault", ["no server", "altered", ""])
def test_download(fault, tiny100, archive, tmp_path, monkeypatch, capsys):
    if fault == "altered":
        change_byte(archive)
    with serve(archive.parent, monkeypatch) as address:
        url = "http://127.0.0.1:1" if fault == "no server" else f"{address}/{archive.name}"
        monkeypatch.setattr(tiny100.version.dataset_class, "url", url)
        assert run(tiny100, tmp_path / "data") == (3 if fault else 0)
    if not fault:
        return assert_prepared(tiny100, tmp_path / "data")
    lines = capsys.readouterr().err.splitlines()
    assert lines[-2].startswith(f"error: CIFAR-100 cannot be downloaded to {tmp_path / 'data'}: ")
    assert lines[-1].endswith(f"--data_path {tmp_path / 'data'} (without a network: --from ARCHIVE)")
    return assert_nothing_written(tmp_path / "data")


def test_a_damaged_folder_is_not_replaced(tiny100, archive, tmp_path, capsys):
    folder = tiny100.write_binary(tmp_path / "data")
    (folder / "test.bin").write_bytes(b"damaged")
    assert run(tiny100, tmp_path / "data", "--from", archive) == 3
    assert f"Move {folder} away; to get good data:\n" in capsys.readouterr().err


def test_interruption_leaves_nothing(tiny100, archive, tmp_path, monkeypatch, capsys):
    def interrupt(source, target, *_):
        (Path(target) / "cifar-100-python").mkdir()
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr("torchvision.datasets.utils.extract_archive", interrupt)
        assert run(tiny100, tmp_path / "data", "--from", archive) == 130
    assert capsys.readouterr().err == "interrupted\n"
    assert_nothing_written(tmp_path / "data")
    (tmp_path / "data/.cifar-100-python.partial").mkdir()  # from a killed run
    assert run(tiny100, tmp_path / "data", "--from", archive) == 0
    assert_prepared(tiny100, tmp_path / "data")
