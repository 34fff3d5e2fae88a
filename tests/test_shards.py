"""Tar shards: the same batches as class folders, what a rank reads, and damaged shards."""

import os
import shutil
import tarfile
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.conftest import change_byte, replace_by_fifo
from tests.test_folders import DALI, build, everything
from tests.tiny_shards import CLASSES, IMAGENET, SETTINGS
from tools import prepare_data
from train import main
from utils.config.command_line import Arguments
from utils.data import loader
from utils.data.datasets import shards
from utils.data.datasets.shards import INDEX_FILE, open_shards
from utils.errors import DataError


@pytest.fixture
def config(tiny):
    base = SETTINGS | IMAGENET | {"batch_size": 4, "model": "resnet8"}
    return lambda data_path, **changes: tiny(**base | {"data_path": str(data_path)} | changes)


# ---- the same as class folders


def test_shards_by_another_program_are_indexed_in_place(folders, config, tmp_path):
    """With other names, folders and more members for each image. Keys order the images."""
    for split in ("train", "val"):
        (tmp_path / split).mkdir()
        label = tmp_path / "label"
        for shard in range(2):
            with tarfile.open(tmp_path / split / f"some.{shard}.tar", "w") as tar:
                for path in sorted((folders / split).glob("*/*"), reverse=True)[shard::2]:
                    label.write_text(f"{CLASSES.index(path.parent.name)}\n")
                    key = f"some/folder/{path.parent.name}_{path.stem}"
                    for member, extension in ((label, ".json"), (path, path.suffix), (label, ".cls")):
                        tar.add(member, key + extension)
    assert prepare_data.main([f"--shards={tmp_path}"]) == 0
    assert open_shards("imagenet", tmp_path, 8).class_names == ("0", "1", "2")
    for part in ("train", "valid"):
        ours, theirs = (everything(getattr(build(config(path)), part), 1) for path in (folders, tmp_path))
        assert torch.equal(ours[0], theirs[0]) and torch.equal(ours[1], theirs[1])


@pytest.mark.parametrize("backend", ["torchvision", "device", DALI])
@pytest.mark.parametrize("dataset", ["imagenet", "imagefolder"])
def test_folders_and_shards_give_equal_batches(backend, dataset, folders, packed, config):
    """On each of two ranks; imagefolder takes its size and statistics from the images."""
    changes: dict[str, Any] = {"data_loader": backend, "dataset": dataset, "rnd_resized_crop": backend != "device"}
    if dataset == "imagefolder":
        changes["image_size"] = None
    for rank in range(2):
        ours, theirs = (build(config(path, **changes), rank, 2) for path in (folders, packed))
        for part in ("train", "valid"):
            for epoch in (0, 3):
                expected, found = (everything(getattr(built, part), epoch) for built in (theirs, ours))
                assert torch.equal(found[0], expected[0]) and torch.equal(found[1], expected[1])
                assert len(expected[1]) > 3


# ---- what a rank reads


@pytest.fixture
def reads(monkeypatch):
    """{path of an opened shard: [(offset, length) of each read]}"""
    found: dict[str, list[tuple[int, int]]] = defaultdict(list)
    pread, opened = os.pread, shards.open_regular

    def watch_open(path):
        if path.suffix == ".tar":
            found[str(path)] = found[str(path)]
        return opened(path)

    def watch_read(descriptor, length, offset):
        found[os.readlink(f"/proc/self/fd/{descriptor}")].append((offset, length))
        return pread(descriptor, length, offset)

    monkeypatch.setattr(shards, "open_regular", watch_open)
    monkeypatch.setattr(os, "pread", watch_read)
    return found


@pytest.mark.parametrize("backend", ["torchvision", DALI])
@pytest.mark.parametrize("part", ["train", "valid"])
def test_a_rank_reads_the_bytes_of_its_own_samples(backend, part, packed, config, reads):
    split = getattr(open_shards("imagenet", packed, 48), part)
    for rank in range(2):
        reads.clear()
        built = getattr(build(config(packed, data_loader=backend), rank, 2), part)
        assert not reads, "opened too early"
        everything(built, epoch=1)
        expected = defaultdict(list)
        for sample in np.concatenate(built.plan.batches(1)).tolist():
            image = split.images[sample]
            path = str(packed / split.shards["name"][image["shard"]])
            expected[path].append((int(image["offset"]), int(image["length"])))
        assert {path: sorted(found) for path, found in reads.items()} == {p: sorted(r) for p, r in expected.items()}


# ---- damaged shards


SHARD = "train/shard-000001.tar"
DAMAGES = {
    "index gone": (lambda folder: (folder / INDEX_FILE).unlink(), "python -m tools.prepare_data --shards"),
    "index truncated": (lambda folder: os.truncate(folder / INDEX_FILE, 1500), "shards.index: damaged, or of"),
    "another index": (lambda folder: np.savez((folder / INDEX_FILE).open("wb"), x=1), "shards.index: damaged, or of"),
    "index a FIFO": (lambda folder: replace_by_fifo(folder / INDEX_FILE), "cannot be read: not a regular file"),
    "shard missing": (lambda folder: (folder / SHARD).unlink(), f"{SHARD}: no bytes, expected"),
    "shard truncated": (lambda folder: os.truncate(folder / SHARD, 9000), f"{SHARD}: 9000 bytes, expected"),
    "shard grown": (lambda folder: os.truncate(folder / SHARD, 10**6), f"{SHARD}: 1000000 bytes, expected"),
    "shard added": (lambda folder: shutil.copy(folder / SHARD, folder / "val/x.tar"), "bytes, expected no from"),
    "shard altered": (lambda folder: change_byte(folder / SHARD, 1000), "the bytes differ from the indexed ones"),
}  # fmt: skip


@pytest.mark.parametrize("damage", DAMAGES)
def test_damage_ends_the_run_in_one_line(damage, copied, config, tmp_path, capsys):
    break_it, message = DAMAGES[damage]
    break_it(copied)
    workers = int("shard" in damage)
    chosen = config(copied, num_data_workers=workers, batch_size=24, rnd_resized_crop=False, max_epochs=1)
    assert main(Arguments(chosen, "default", tmp_path / "run", "auto", dry_run=False)) == 3
    error = capsys.readouterr().err
    assert error.startswith("error: ") and error.count("\n") == 1 and message in error
    assert "python -m tools.prepare_data --shards" in error


@pytest.mark.parametrize("backend", ["device", DALI])
def test_other_loaders_name_an_altered_shard(backend, copied, config):
    change_byte(copied / SHARD, 1000)
    with pytest.raises(DataError, match=r"shard-000001\.tar:\d+\.\w+: the bytes differ from the indexed ones"):
        everything(build(config(copied, data_loader=backend, rnd_resized_crop=False, batch_size=24)).train)


def test_an_unreadable_image_is_named_by_shard_and_member(folders, config, tmp_path, monkeypatch):
    monkeypatch.setattr(loader, "MOST_UNREADABLE", 0.5)
    source = Path(shutil.copytree(folders, tmp_path / "source"))
    (source / "train/ant/1.JPEG").write_bytes(b"no image")
    (source / "val/cat/0.JPEG").write_bytes(b"")
    assert prepare_data.main([f"--shards={tmp_path / 'x'}", f"--from={source}"]) == 0
    results = [build(config(path)) for path in (source, tmp_path / "x")]
    for part in ("train", "valid"):
        ours, theirs = (everything(getattr(built, part)) for built in results)
        assert torch.equal(ours[0], theirs[0]) and torch.equal(ours[1], theirs[1])
    assert list(results[1].train.unreadable) == [f"{tmp_path}/x/train/shard-000000.tar:01.jpg"]
    assert list(results[1].valid.unreadable) == [f"{tmp_path}/x/val/shard-000000.tar:10.jpg"]


def test_open_shards_are_closed_with_the_loader(packed, config):
    before = len(os.listdir("/proc/self/fd"))
    built = build(config(packed))
    everything(built.train)
    assert len(os.listdir("/proc/self/fd")) == before + 5
    del built
    assert len(os.listdir("/proc/self/fd")) == before
