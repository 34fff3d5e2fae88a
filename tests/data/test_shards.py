"""Tar shards: the same batches as class folders, what a rank reads, and damaged shards."""

import os
import resource
import shutil
import tarfile
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.conftest import change_byte
from tests.tiny_shards import CLASSES, DALI, IMAGENET, SETTINGS, build, everything
from tools import prepare_data
from train import main
from utils.config.command_line import Arguments
from utils.data import loader
from utils.data.datasets.shards import INDEX_FILE, open_shards
from utils.errors import DataError


@pytest.fixture
def config(tiny):
    base = SETTINGS | IMAGENET | {"batch_size": 4, "model": "resnet8"}
    return lambda data_path, **changes: tiny(**base | {"data_path": str(data_path)} | changes)


def assert_equal_batches(ours, theirs, epoch=0):
    for loaders in ((ours.train, theirs.train), (ours.valid, theirs.valid)):
        (images, labels), (other_images, other_labels) = (everything(loader, epoch) for loader in loaders)
        assert torch.equal(images, other_images) and torch.equal(labels, other_labels) and len(labels) > 3


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
    assert_equal_batches(build(config(tmp_path)), build(config(folders)), epoch=1)


@pytest.mark.parametrize("backend", ["torchvision", "device", DALI])
@pytest.mark.parametrize("dataset", ["imagenet", "imagefolder"])
def test_folders_and_shards_give_equal_batches(backend, dataset, folders, packed, config):
    """On each of two ranks; imagefolder takes its size and statistics from the images."""
    changes = {"data_loader": backend, "dataset": dataset, "rnd_resized_crop": backend != "device"}
    changes["image_size"] = 48 if dataset == "imagenet" else None
    for rank in range(2):
        ours, theirs = (build(config(path, **changes), rank, 2) for path in (packed, folders))
        for epoch in (0, 3):
            assert_equal_batches(ours, theirs, epoch)


@pytest.mark.parametrize("backend", ["torchvision", DALI])
def test_a_rank_reads_the_bytes_of_its_own_samples(backend, packed, config, monkeypatch):
    pread, reads = os.pread, list[tuple[str, int, int]]()

    def watch(descriptor, length, offset):
        reads.append((os.readlink(f"/proc/self/fd/{descriptor}"), offset, length))
        return pread(descriptor, length, offset)

    monkeypatch.setattr(os, "pread", watch)
    split = open_shards("imagenet", packed, 48).train
    for rank in range(2):
        built = build(config(packed, data_loader=backend), rank, 2).train
        assert not reads, "read too early"
        everything(built, epoch=1)
        expected = []
        for image in split.images[np.concatenate(built.sampler.batches(1))]:
            path = str(packed / split.shards["name"][image["shard"]])
            expected += [(path, *map(int, (image[f"{of}offset"], image[f"{of}length"]))) for of in ("", "label_")]
        assert sorted(reads) == sorted(expected)
        reads.clear()


def test_a_process_may_open_every_shard(packed):
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (1000, most))
    open_shards("imagenet", packed, 48)
    assert resource.getrlimit(resource.RLIMIT_NOFILE) == (most, most)


SHARD = "train/shard-000001.tar"


def alter(folder, extension):
    """Change a byte of the first member of this kind."""
    with tarfile.open(folder / SHARD) as tar:
        place = next(info.offset_data for info in tar if info.name.endswith(extension))
    change_byte(folder / SHARD, place)


@pytest.mark.parametrize(("damage", "message"), [
    (lambda folder: (folder / INDEX_FILE).unlink(), "python -m tools.prepare_data --shards"),
    (lambda folder: os.truncate(folder / INDEX_FILE, 1500), "shards.index: damaged, or of"),
    (lambda folder: (folder / "classes.json").write_text("[]"), "classes.json has changed since"),
    (lambda folder: (folder / SHARD).unlink(), f"{SHARD}: is missing, expected"),
    (lambda folder: os.truncate(folder / SHARD, 9000), f"{SHARD}: 9000 bytes, expected"),
    (lambda folder: shutil.copy(folder / SHARD, folder / "val/x.tar"), "bytes, expected no bytes"),
    (lambda folder: alter(folder, ".cls"), "the bytes differ from the indexed ones"),
])  # fmt: skip
def test_damage_ends_the_run_in_one_line(damage, message, copied, config, tmp_path, capsys):
    damage(copied)
    chosen = config(copied, num_data_workers=1, batch_size=24, rnd_resized_crop=False, max_epochs=1)
    assert main(Arguments(chosen, "default", tmp_path / "run", "auto", dry_run=False)) == 3
    error = capsys.readouterr().err
    assert error.startswith("error: ") and error.count("\n") == 1 and message in error
    assert "python -m tools.prepare_data --shards" in error


@pytest.mark.parametrize("extension", [".jpg", ".cls"])
@pytest.mark.parametrize("backend", ["torchvision", "device", DALI])
def test_an_image_or_label_that_is_rewritten_in_place_is_named(extension, backend, copied, config):
    alter(copied, extension)
    with pytest.raises(DataError, match=r"shard-000001\.tar:\d+\.\w+: the bytes differ from the indexed ones"):
        everything(build(config(copied, data_loader=backend, rnd_resized_crop=False, batch_size=24)).train)


def test_an_unreadable_image_is_named_by_shard_and_member(folders, config, tmp_path, monkeypatch):
    monkeypatch.setattr(loader, "MOST_UNREADABLE", 0.5)
    source = Path(shutil.copytree(folders, tmp_path / "source"))
    (source / "train/ant/1.JPEG").write_bytes(b"no image")
    (source / "val/cat/0.JPEG").write_bytes(b"")
    assert prepare_data.main([f"--shards={tmp_path / 'x'}", f"--from={source}"]) == 0
    shards = build(config(tmp_path / "x"))
    assert_equal_batches(shards, build(config(source)))
    assert list(shards.train.unreadable) == [f"{tmp_path}/x/train/shard-000000.tar:01.jpg"]
    assert list(shards.valid.unreadable) == [f"{tmp_path}/x/val/shard-000000.tar:10.jpg"]
