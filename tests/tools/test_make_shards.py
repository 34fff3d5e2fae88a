"""tools.prepare_data --shards: pack class folders into tar shards, and index shards."""

import gzip
import os
import shutil
import tarfile
from collections import defaultdict
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tests.conftest import change_byte
from tests.tiny_shards import CLASSES, NUM_TRAIN, NUM_VALID, rewrite
from tools import prepare_data
from utils.data.datasets.shards import INDEX_FILE


def members(folder, split):
    """(bytes, label) of every image, in the order of the keys."""
    found = defaultdict(dict)
    for path in (folder / split).glob("*.tar"):
        with tarfile.open(path) as tar:
            for info in tar:
                key, _, extension = info.name.partition(".")
                found[key]["cls" if extension == "cls" else "image"] = tar.extractfile(info).read()
    return [(parts["image"], int(parts["cls"])) for _, parts in sorted(found.items())]


def test_shards_hold_every_file_once_and_unchanged(folders, packed):
    for split, count in (("train", NUM_TRAIN), ("val", NUM_VALID)):
        files = [(path.read_bytes(), CLASSES.index(path.parent.name)) for path in sorted((folders / split).glob("*/*"))]
        assert members(packed, split) == files and len(files) == 3 * count
    assert sorted(path.name for path in packed.iterdir()) == ["classes.json", INDEX_FILE, "train", "val"]
    assert [path.name for path in sorted((packed / "val").iterdir())] == [f"shard-{n:06d}.tar" for n in range(3)]
    with np.load(packed / INDEX_FILE) as index:
        assert tuple(index["class_names"]) == CLASSES
        images = index["train_images"]
    assert np.bincount(images["shard"]).tolist() == [5, 5, 5, 5, 4]
    assert all(len(set(images["label"][images["shard"] == shard])) > 1 for shard in range(5)), "classes are mixed"


def test_equal_folders_give_equal_shards(folders, packed, tmp_path, monkeypatch):
    """They are on the disk, whole, before the folder appears."""
    flushed, rename = [], Path.rename

    def describe(path):
        return path.name, path.is_file() and path.stat().st_size

    monkeypatch.setattr(os, "fsync", lambda file: flushed.append(describe(Path(f"/proc/self/fd/{file}").resolve())))
    monkeypatch.setattr(Path, "rename", lambda path, target: (flushed.append("renamed"), rename(path, target)))
    assert prepare_data.main([f"--shards={tmp_path / 'again'}", f"--from={folders}", "--images_per_shard=5"]) == 0
    expected, before = {describe(path) for path in packed.rglob("*")}, flushed[: flushed.index("renamed")]
    missing = {name for name, _ in expected - {*before}}
    assert missing == {INDEX_FILE} and any(INDEX_FILE in name for name, _ in before) and flushed[-1][0] == tmp_path.name
    for path in (packed / "train").iterdir():
        assert path.read_bytes() == (tmp_path / "again/train" / path.name).read_bytes()


def test_the_webdataset_package_reads_them(folders, packed):
    webdataset = pytest.importorskip("webdataset", reason="webdataset is not installed")
    paths = sorted(map(str, (packed / "val").glob("*.tar")))
    rows = list(webdataset.WebDataset(paths, shardshuffle=False).decode("pil").to_tuple("jpg;png", "cls"))
    assert sorted(label for _, label in rows) == [label for label in range(3) for _ in range(NUM_VALID)]
    images = [Image.open(path) for path in (folders / "val").glob("*/*")]
    assert sorted(np.asarray(image).tobytes() for image, _ in rows) == sorted(map(bytes, map(np.asarray, images)))


def test_a_failed_run_leaves_nothing(folders, tmp_path, monkeypatch, capsys):
    def fill_disk(folder, images, numbered):
        if numbered[0] == 3:
            raise OSError(28, "No space left on device")
        write(folder, images, numbered)

    write = prepare_data._write_shard
    monkeypatch.setattr(prepare_data, "_write_shard", fill_disk)
    arguments = [f"--shards={tmp_path / 'made/shards'}", f"--from={folders}", "--images_per_shard=5"]
    assert prepare_data.main(arguments) == 3 and "No space left on device" in capsys.readouterr().err
    assert [path.name for path in (tmp_path / "made").iterdir()] == [".shards-shards.lock"]
    (leftover := tmp_path / "made/.shards.partial").mkdir()  # from a killed process
    monkeypatch.undo()
    assert prepare_data.main(arguments) == 0 and not leftover.exists()
    assert prepare_data.main(arguments) == 3 and "exists already" in capsys.readouterr().err


@pytest.mark.parametrize(("arguments", "message"), [
    (["--shards=nowhere"], "nowhere/train: no images found; expected shards"),
    (["--shards=x", "--from=nowhere"], "nowhere/train: cannot be read: No such file")])  # fmt: skip
def test_wrong_folders_are_named(arguments, message, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert prepare_data.main(arguments) == 3
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1 and not (tmp_path / "x").exists()


@pytest.mark.parametrize(("arguments", "message"), [
    ([], "expected either --dataset and --data_path, or --shards"),
    (["--shards=x", "--dataset=cifar10"], "expected either"), (["--dataset=cifar10"], "expected either"),
    (["--shards=x", "--images_per_shard=5"], "--images_per_shard needs --shards and --from"),
    (["--dataset=cifar10", "--data_path=x", "--from=y", "--images_per_shard=5"], "--images_per_shard needs"),
])  # fmt: skip
def test_options_that_do_not_fit_are_refused(arguments, message, capsys):
    with pytest.raises(SystemExit, match="2"):
        prepare_data.main(arguments)
    assert message in capsys.readouterr().err


def third_member(path):
    with tarfile.open(path) as tar:
        return tar.getmembers()[2].offset


@pytest.mark.parametrize(("damage", "message"), [
    (lambda path: os.truncate(path, third_member(path)), "does not end as a tar file does"),
    (lambda path: change_byte(path, third_member(path)), "does not end as a tar file does"),  # its header
    (lambda path: path.write_bytes(gzip.compress(path.read_bytes())), "cannot be read as a tar file"),
    (lambda path: rewrite(path, lambda rows: rows.pop(1)), "has no cls"),
    (lambda path: rewrite(path, lambda rows: rows.pop(0)), "has no image"),
    (lambda path: rewrite(path, lambda rows: rows.append(rows[0])), "is a second image of its key"),
    (lambda path: shutil.copy(path, path.with_name("z.tar")), "is also in z.tar; remove the copy"),
    (lambda path: rewrite(path, lambda rows: rows.insert(1, (rows.pop(1)[0], b"-1"))), "holds b'-1'")])  # fmt: skip
def test_shards_that_cannot_be_indexed_are_named(damage, message, copied, capsys):
    before = (copied / INDEX_FILE).read_bytes()
    damage(copied / "train/shard-000002.tar")
    assert prepare_data.main([f"--shards={copied}"]) == 3
    error = capsys.readouterr().err
    assert "train/shard-000002.tar" in error and message in error and error.count("\n") == 1
    assert (copied / INDEX_FILE).read_bytes() == before


def test_files_and_members_that_are_not_used_are_counted_and_named(copied, capsys):
    def rename(rows):
        rows[0][0].name, rows[1][0].name, rows[2][0].name = "2.0_a.jpg", "2.0_a.cls", "note.txt"
        rows[3][0].name, rows[3][0].type = "folder", tarfile.DIRTYPE

    rewrite(copied / "train/shard-000002.tar", rename)
    for name in ("more.tar.gz", "._hidden.tar"):
        (copied / "train" / name).touch()
    assert prepare_data.main([f"--shards={copied}"]) == 0
    printed = capsys.readouterr().out
    for words in ("22 and 15 images", "5 files or members not used, such as shard-000002.tar:2.0_a.jpg"):
        assert words in printed


@pytest.mark.parametrize("split", ["train", "val"])
def test_a_class_without_training_images_is_refused(split, copied, capsys):
    """Labels from 1, as MATLAB has them, and a class in val/ only."""

    def shift(rows):
        rows[:] = [(info, b"%d" % (int(data) + 1) if info.name.endswith(".cls") else data) for info, data in rows]

    (copied / "classes.json").unlink()
    for path in (copied / split).glob("*.tar"):
        rewrite(path, shift)
    assert prepare_data.main([f"--shards={copied}"]) == 3
    missing = {"train": 0, "val": 3}[split]
    assert f"no training image has label {missing}, class '{missing}'; expected labels 0, 1" in capsys.readouterr().err


@pytest.mark.parametrize("content", ["no JSON", '["ant", "bee"]', '["ant", "bee", "ant"]'])
def test_unusable_class_names_are_refused(content, copied, capsys):
    (copied / "classes.json").write_text(content)
    assert prepare_data.main([f"--shards={copied}"]) == 3 and "classes.json" in capsys.readouterr().err
