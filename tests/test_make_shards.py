"""tools.prepare_data --shards: pack class folders into tar shards, and index shards."""

import gzip
import os
import shutil
import tarfile
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from tests.tiny_shards import CLASSES, NUM_TRAIN, NUM_VALID, rewrite
from tools import prepare_data
from tools.shared import make_shards
from utils.data.datasets.image_files import ImageFiles
from utils.data.datasets.shard_index import INDEX_FILE, read_index

Capture = pytest.CaptureFixture[str]


def members(folder: Path, split: str) -> list[tuple[str, bytes, int]]:
    """(key, bytes, label) of every image, in the order of the keys."""
    found: dict[str, dict[str, bytes]] = defaultdict(dict)
    for path in (folder / split).glob("*.tar"):
        with tarfile.open(path) as tar:
            for info in tar:
                key, _, extension = info.name.partition(".")
                found[key][extension] = tar.extractfile(info).read()
    return [
        (key, next(content for extension, content in parts.items() if extension != "cls"), int(parts["cls"]))
        for key, parts in sorted(found.items())
    ]


def test_shards_hold_every_file_once_and_unchanged(folders: Path, packed: Path) -> None:
    for split, count in (("train", NUM_TRAIN), ("val", NUM_VALID)):
        files = [(path.read_bytes(), CLASSES.index(path.parent.name)) for path in sorted((folders / split).glob("*/*"))]
        assert [(content, label) for _, content, label in members(packed, split)] == files
        assert len(files) == 3 * count
    assert sorted(path.name for path in packed.iterdir()) == ["classes.json", INDEX_FILE, "train", "val"]
    assert [path.name for path in sorted((packed / "val").iterdir())] == [f"shard-{n:06d}.tar" for n in range(3)]
    index = read_index(packed)
    assert index.class_names == CLASSES
    assert np.bincount(index.train.shard).tolist() == [5, 5, 5, 5, 4]
    assert all(len(set(index.train.labels[index.train.shard == shard])) > 1 for shard in range(5)), "classes are mixed"


def test_equal_folders_give_equal_shards(folders: Path, packed: Path, tmp_path: Path) -> None:
    assert prepare_data.main([f"--shards={tmp_path / 'again'}", f"--from={folders}", "--num_shards=5"]) == 0
    for path in sorted((packed / "train").iterdir()):
        assert path.read_bytes() == (tmp_path / "again/train" / path.name).read_bytes()
    assert len(list((tmp_path / "again/val").iterdir())) == 5


def test_the_webdataset_package_reads_them(folders: Path, packed: Path) -> None:
    webdataset = pytest.importorskip("webdataset", reason="webdataset is not installed")
    paths = sorted(map(str, (packed / "val").glob("*.tar")))
    rows = list(webdataset.WebDataset(paths, shardshuffle=False).decode("pil").to_tuple("jpg;png", "cls"))
    assert sorted(label for _, label in rows) == [label for label in range(3) for _ in range(NUM_VALID)]
    files = sorted((folders / "val").glob("*/*"))
    assert sorted(np.asarray(image).tobytes() for image, _ in rows) == sorted(
        np.asarray(Image.open(path)).tobytes() for path in files
    )


def test_a_failed_run_leaves_nothing(
    folders: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    def fill_disk(path: Path, *arguments: Any) -> None:
        if path.name == "shard-000003.tar":
            raise OSError(28, "No space left on device")
        write(path, *arguments)

    write = make_shards._write_shard
    monkeypatch.setattr(make_shards, "_write_shard", fill_disk)
    arguments = [f"--shards={tmp_path / 'made/shards'}", f"--from={folders}", "--images_per_shard=5"]
    assert prepare_data.main(arguments) == 3
    assert "No space left on device" in capsys.readouterr().err
    assert [path.name for path in (tmp_path / "made").iterdir()] == [".shards-shards.lock"]
    leftover = tmp_path / "made/.shards.0123abcd"  # from a killed process
    leftover.mkdir()
    monkeypatch.undo()
    assert prepare_data.main(arguments) == 0
    assert not leftover.exists()
    assert prepare_data.main(arguments) == 3
    assert "exists already" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        ([], 2, "expected --dataset and --data_path, or --shards"),
        (["--dataset=cifar10"], 2, "expected --dataset and --data_path, or --shards"),
        (["--dataset=cifar10", "--data_path=x", "--from=y", "--num_shards=2"], 2, "expected --dataset and --data_path"),
        (["--dataset=mnist", "--data_path=x"], 2, "invalid choice: 'mnist'"),
        (["--shards=x", "--dataset=cifar10"], 2, "no options of CIFAR"),
        (["--shards=x", "--num_shards=4"], 2, "need --from"),
        (["--shards=x", "--from=y", "--num_shards=0"], 2, "whole number from 1 on"),
        (["--shards=x", "--from=y", "--num_shards=4", "--images_per_shard=4"], 2, "not allowed with"),
        (["--shards=nowhere"], 3, "nowhere/train: cannot be read: No such file"),
        (["--shards=x", "--from=nowhere"], 3, "nowhere/train: cannot be read: No such file"),
        (["--shards=x", "--from={folders}", "--num_shards=16"], 3, "15 images cannot fill 16 shards"),
    ],
)
def test_wrong_arguments_are_named(
    arguments: list[str], status: int, message: str, folders: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: Capture,
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    try:
        found = prepare_data.main([argument.format(folders=folders) for argument in arguments])
    except SystemExit as usage:
        found = usage.code
    error = capsys.readouterr().err
    assert found == status and message in error
    assert status == 2 or error.count("\n") == 1
    assert not (tmp_path / "x").exists()


def test_all_files_that_cannot_be_opened_are_listed_and_nothing_is_left(
    folders: Path, tmp_path: Path, capsys: Capture
) -> None:
    shutil.copytree(folders, tmp_path / "from")
    os.mkfifo(tmp_path / "from/train/ant/fifo.png")
    (tmp_path / "from/val/cat/nowhere.jpg").symlink_to("nothing")
    assert prepare_data.main([f"--shards={tmp_path / 'to/x'}", f"--from={tmp_path / 'from'}"]) == 3
    assert capsys.readouterr().err.splitlines() == [
        "error: files that cannot be read; repair or remove them:",
        f"{tmp_path}/from/train/ant/fifo.png: not a regular file",
        f"{tmp_path}/from/val/cat/nowhere.jpg: No such file or directory",
    ]
    assert not (tmp_path / "to").exists()


def test_an_unreadable_file_ends_the_packing(
    folders: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    def fail(images: ImageFiles, index: int) -> bytes:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(ImageFiles, "content", fail)
    assert prepare_data.main([f"--shards={tmp_path / 'x'}", f"--from={folders}"]) == 3
    error = capsys.readouterr().err
    assert "train/" in error and "cannot be read: Input/output error; repair or remove it" in error
    assert not (tmp_path / "x").exists()


def test_a_short_read_is_an_error(copied: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    def read_less(descriptor: int, length: int, offset: int) -> bytes:
        return read(descriptor, length - (length > len(make_shards.END_OF_TAR)), offset)  # of images only

    read = os.pread
    monkeypatch.setattr(make_shards.os, "pread", read_less)
    assert prepare_data.main([f"--shards={copied}"]) == 3
    assert "a read ended early" in capsys.readouterr().err


def make_link(rows: list[tuple[tarfile.TarInfo, bytes]]) -> None:
    rows[0][0].type, rows[0][0].linkname = tarfile.SYMTYPE, "/etc/passwd"


TAR_DAMAGES: dict[str, tuple[Callable[[Path], Any], str]] = {
    "truncated": (lambda path: os.truncate(path, 5000), "does not end as a tar file does"),
    "empty": (lambda path: path.write_bytes(b""), "does not end as a tar file does"),
    "compressed": (lambda path: path.write_bytes(gzip.compress(path.read_bytes())), "does not end as a tar file does"),
    "noise": (lambda path: path.write_bytes(bytes(range(1, 256)) * 9 + bytes(2048)), "cannot be read as a tar file"),
    "a folder": (lambda path: (path.unlink(), path.mkdir()), "cannot be read as a tar file"),
    "no label": (lambda path: rewrite(path, lambda rows: rows.pop(1)), "has no cls"),
    "no image": (lambda path: rewrite(path, lambda rows: rows.pop(0)), "has no image"),
    "twice": (lambda path: rewrite(path, lambda rows: rows.append(rows[0])), "two members of the kind of"),
    "no number": (lambda path: rewrite(path, lambda rows: rows.insert(1, (rows.pop(1)[0], b"-1"))), "holds b'-1'"),
    "a link": (lambda path: rewrite(path, make_link), "is a link"),
}


@pytest.mark.parametrize("damage", TAR_DAMAGES)
def test_shards_that_cannot_be_indexed_are_named(damage: str, copied: Path, capsys: Capture) -> None:
    break_it, message = TAR_DAMAGES[damage]
    before = (copied / INDEX_FILE).read_bytes()
    break_it(copied / "train/shard-000002.tar")
    assert prepare_data.main([f"--shards={copied}"]) == 3
    error = capsys.readouterr().err
    assert "train/shard-000002.tar" in error and message in error and error.count("\n") == 1
    assert (copied / INDEX_FILE).read_bytes() == before


@pytest.mark.parametrize("content", ["no JSON", '{"ant": 0}', '["ant", "bee"]', '["ant", "bee", 3]'])
def test_unusable_class_names_are_refused(content: str, copied: Path, capsys: Capture) -> None:
    (copied / "classes.json").write_text(content)
    assert prepare_data.main([f"--shards={copied}"]) == 3
    assert "classes.json" in capsys.readouterr().err
