"""CIFAR in the official binary version and in torchvision's, and the synthetic shapes."""

import hashlib
import re
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

import utils.data.build
from tests.conftest import CIFAR100, change_byte, run, tiny_config
from tests.tiny_cifar import make_tiny_cifar, serve
from tests.tiny_shards import make_folders, write_image
from tools import prepare_data
from utils.config import Config, load_config
from utils.data.datasets import dataset as datasets
from utils.data.datasets import folders, image_files
from utils.data.datasets.cifar import VERSIONS, fingerprint
from utils.data.datasets.dataset import channel_statistics, load_dataset, match_classes
from utils.distributed.world import World
from utils.errors import CheckpointError, DataError

NAMES = ("cifar10", "cifar100")


@pytest.fixture(params=NAMES)
def tiny(request, monkeypatch):
    return make_tiny_cifar(request.param, monkeypatch)


def load(tiny, data_path, *, download=False):
    return load_dataset(tiny.version.name, data_path, download=download)


def assert_holds(dataset, tiny):
    """Compare every record, in order: the last label byte, then three planes of 32 rows of 32 pixels."""
    assert (dataset.name, dataset.class_names) == (tiny.version.name, tiny.version.class_names)
    assert (dataset.mean, dataset.std) == (tiny.version.mean, tiny.version.std)
    for arrays, split in ((dataset.train, tiny.version.train), (dataset.valid, tiny.version.valid)):
        records = tiny.split(split)
        labels, pixels = records[:, tiny.version.label_bytes - 1], records[:, tiny.version.label_bytes :]
        assert arrays.labels.dtype == np.int64 and arrays.images.dtype == np.uint8
        np.testing.assert_array_equal(arrays.labels, labels)
        np.testing.assert_array_equal(arrays.images, pixels.reshape(-1, 3, 32, 32))


def test_binary_version_holds_every_record_in_any_order(tiny, tmp_path):
    folder = tiny.write_binary(tmp_path)
    assert_holds(load(tiny, tmp_path), tiny)
    assert sorted(path.name for path in folder.iterdir()) == sorted(tiny.records), "reading writes nothing"
    for name in tiny.records:
        tiny.records[name][:] = tiny.records[name][::-1].copy()
    tiny.write_binary(tmp_path / "reversed")
    assert_holds(load(tiny, tmp_path / "reversed"), tiny)


@pytest.mark.parametrize("damage", [lambda path: path.write_bytes(path.read_bytes()[:-1]), change_byte, Path.unlink])
@pytest.mark.parametrize("which", [0, -1])
def test_damage_and_missing_data_are_errors_with_the_remedy(tiny, tmp_path, damage, which):
    command = f"python -m tools.prepare_data --dataset {tiny.version.name} --data_path '{tmp_path / 'my data'}'"
    with pytest.raises(DataError, match=re.escape(f"\n{command} (without a network: --from ARCHIVE)")):
        load(tiny, tmp_path / "my data")
    folder = tiny.write_binary(tmp_path)
    path = folder / list(tiny.records)[which]
    damage(path)
    with pytest.raises(DataError) as caught:
        load(tiny, tmp_path)
    message = str(caught.value)
    assert str(path) in message and f"Move {folder} away; " in message and message.count("\n") == 1


def test_torchvision_version_is_read_and_an_altered_one_is_refused_unopened(tiny, tmp_path):
    folder, trap = tiny.write_python(tmp_path), tmp_path / "opened"
    dataset = load(tiny, tmp_path)
    assert_holds(dataset, tiny)
    assert dataset.train.images.flags.c_contiguous
    (folder / next(iter(tiny.pickles))).write_bytes(b"cos\nmkdir\n(V%s\ntR." % str(trap).encode())
    with pytest.raises(DataError, match=folder.name):
        load(tiny, tmp_path)
    assert not trap.exists()


def test_several_callers_download_once(tiny, tmp_path, monkeypatch):
    """A file lock excludes threads as it does processes: each opens the file itself."""
    data_path, fetched, dataset_class = tmp_path / "data", [], tiny.version.dataset_class
    (tmp_path / dataset_class.filename).write_bytes(tiny.archive)
    download = dataset_class.download
    monkeypatch.setattr(dataset_class, "download", lambda self: (fetched.append(self.url), download(self)))
    with serve(tmp_path, monkeypatch) as address, ThreadPoolExecutor(3) as pool:
        monkeypatch.setattr(dataset_class, "url", f"{address}/{dataset_class.filename}")
        for dataset in pool.map(lambda _: load(tiny, data_path, download=True), range(3)):
            assert_holds(dataset, tiny)
    assert len(fetched) == 1


@pytest.mark.parametrize("variable", ["SLURM_JOB_ID", "PBS_JOBID", "LSB_JOBID", "TORCHELASTIC_RUN_ID"])
def test_a_batch_job_does_not_download(one_rank, variable, monkeypatch):
    """torchrun's variable does not mean a batch job."""
    asked, shapes = [], load_dataset("shapes", Path(), download=False)
    monkeypatch.setattr(utils.data.build, "load_dataset", lambda *_, download: (asked.append(download), shapes)[1])
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    monkeypatch.setenv(variable, "17.server")
    for fetch in (True, False):
        utils.data.build.open_dataset(load_config(CIFAR100, "default"), one_rank, fetch=fetch)
    assert asked == [variable == "TORCHELASTIC_RUN_ID", False]


def test_shapes_are_the_same_bytes_everywhere(tmp_path):
    shapes = load_dataset("shapes", tmp_path, download=False)
    digest = hashlib.sha256(repr((shapes.mean, shapes.std)).encode())
    for arrays in (shapes.train, shapes.valid):
        digest.update(arrays.images.tobytes())
        digest.update(arrays.labels.astype("<i8").tobytes())
    assert digest.hexdigest() == "ee7612d4b1dade5fd1dfe24892c9aebe724121924268b1e8f998760888acce5f"


@pytest.mark.parametrize("name", NAMES)
def test_official_data(name, cifar_path):
    dataset, num_classes = load_dataset(name, cifar_path, download=False), len(VERSIONS[name].class_names)
    for arrays, count in ((dataset.train, 50_000), (dataset.valid, 10_000)):
        assert arrays.images.shape == (count, 3, 32, 32)
        assert np.bincount(arrays.labels).tolist() == [count // num_classes] * num_classes
    for found, computed in zip((dataset.mean, dataset.std), channel_statistics(dataset.train.images), strict=True):
        assert found == pytest.approx(computed, rel=1e-14)


def test_published_constants_are_those_verified_with_the_official_data():
    """`test_official_data` verifies them, but only where the data are: classes, files, fingerprints, statistics."""
    digest = "34e44b82abb7e2ba78be835803417a86e29ea0e05ceeee3ce09f131b635da3ce"
    assert hashlib.sha256(repr(VERSIONS).encode()).hexdigest() == digest
    records = np.arange(12, dtype=np.uint8).reshape(3, 4)
    digests = [int(hashlib.sha256(record).hexdigest(), 16) for record in records]
    assert int(fingerprint([records]), 16) == sum(digests) % 2**256


def test_mean_and_deviation_of_cifar100_are_settings_and_synthetic_data_have_the_real_sizes():
    assert (VERSIONS["cifar100"].mean, VERSIONS["cifar100"].std) == (Config().cifar100_mean, Config().cifar100_std)
    given = {"data_loader": "synthetic", "cifar100_mean": (0.1, 0.2, 0.3), "cifar100_std": (0.4, 0.5, 0.6)}
    for name, expected in {
        "cifar100": (given["cifar100_mean"], given["cifar100_std"], 50_000, 32, 10_000),
        "cifar10": (VERSIONS["cifar10"].mean, VERSIONS["cifar10"].std, 50_000, 32, 10_000),
        "imagenet": ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225), 1_281_167, 160, 50_000),
    }.items():
        config = Config(dataset=name, **given).model_copy(update={"image_size": 160})  # which CIFAR does not have
        found = utils.data.build.find_dataset(config, download=False)
        assert (found.mean, found.std, *found.train.images.shape[::3], len(found.valid.labels)) == expected


def test_classes_are_matched_by_name_and_other_and_doubled_names_are_refused():
    assert match_classes("data", ["cat", "ant", "bee"], ["ant", "bee", "cat"], "").tolist() == [2, 0, 1]
    for found, known, message in (
        (["ant", "cat"], ["ant", "bee"], "data: its 2 classes are not the 2 expected ones, for example 'bee'; rename"),
        (["be\u0301e"], ["b\u00e9e"], r"for example 'be\\u0301e'; some differ in their Unicode form only; rename"),
        (["be\u0301e", "b\u00e9e"], ["ant"], "class 'b\u00e9e' occurs twice, in two Unicode forms; give"),
        (["ant", "ant"], ["ant"], "data: class 'ant' occurs twice"),
    ):
        with pytest.raises(DataError, match=message):
            match_classes("data", found, known, "rename")


def test_statistics_are_exact_in_parts_and_a_constant_channel_has_deviation_1(monkeypatch):
    images = np.random.default_rng(0).integers(0, 256, (50, 3, 9, 7), np.uint8)
    images[:, 1] = 128
    images[0, 1, 0, 0] = 129
    images[:, 2] //= 50  # by more than one level
    monkeypatch.setattr(datasets, "LARGEST_PART", 1000)
    mean, std = channel_statistics(images)
    np.testing.assert_allclose(mean, images.mean((0, 2, 3)) / 255, rtol=1e-12)
    np.testing.assert_allclose(std, [images[:, 0].std() / 255, 1, images[:, 2].std() / 255], rtol=1e-12)


@pytest.mark.parametrize("loader", ["device", "torchvision"])
def test_a_memory_map_whose_file_was_cut_is_named(loader, one_rank, tmp_path):
    np.save(tmp_path / "images.npy", np.zeros((100, 3, 8, 8), np.uint8))
    split = datasets.ImageArrays(np.load(tmp_path / "images.npy", mmap_mode="r")[10:], np.zeros(90, np.int64))
    config = Config(data_loader=loader, num_data_workers=0, valid_batch_size_per_gpu=30)
    built = utils.data.build.build_loader(config, ((0, 0, 0), (1, 1, 1)), one_rank, split, training=False)
    assert len(list(built)) == 3
    (tmp_path / "images.npy").write_bytes(b"")
    with pytest.raises(DataError, match=r"images.npy: has become shorter: 0 bytes, expected 19328; restore it"):
        list(built)


@pytest.mark.parametrize("labels", [np.arange(1000) // 100, np.arange(1000) % 10, np.arange(1000) // 2])
def test_a_limited_validation_sees_every_class_alike(labels):
    """Also if the classes are sorted, in turn, or more than the images."""
    seen = []
    for rank in range(2):
        config = tiny_config(valid_batch_size_per_gpu=10, limit_valid_batches=5)
        world = World(rank, rank, 2, torch.device("cpu"))
        plan = utils.data.build._build_sampler(config, labels, world, training=False)
        assert [len(batch) for batch in plan.batches(0)] == [10] * 5 and len(plan) == 5
        seen += np.concatenate(plan.batches(0)).tolist()
    counts = np.bincount(labels[seen], minlength=labels.max() + 1)
    assert len(set(seen)) == 100 and counts.max() - counts.min() <= 1


def swap(one, other):
    one.rename(one.with_name("aside"))
    other.rename(one)
    one.with_name("aside").rename(other)


CHANGES = {
    "classes swapped": lambda folder: swap(folder / "train/ant", folder / "train/bee"),
    "two images swapped": lambda folder: swap(folder / "train/ant/0.bmp", folder / "train/bee/3.bmp"),
    "renamed": lambda folder: (folder / "train/ant/3.bmp").rename(folder / "train/ant/9.bmp"),
    "val halved": lambda folder: [(folder / "val" / name / "3.bmp").unlink() for name in ("ant", "bee")],
    "rewritten": lambda folder: write_image(folder / "val/ant/1.bmp", 99, 17, 16),
}


@pytest.fixture
def other(tmp_path):
    folder = make_folders(tmp_path / "data", ("ant", "bee"), 4, 4, 16, ".bmp")
    keys = {"dataset": "imagefolder", "num_classes": 2, "image_size": 16, "batch_size": 4}
    return folder, partial(tiny_config, data_path=str(folder), **keys)


@pytest.mark.parametrize("shards", [False, True])
@pytest.mark.parametrize("change", CHANGES)
def test_other_data_have_another_fingerprint(change, shards, other, tmp_path, monkeypatch):
    """The bytes of half the images are part of it, and the names and sizes of all files."""
    monkeypatch.setattr(image_files, "SAMPLED_IMAGES", 4)
    folder, config = other

    def find(number):
        path = tmp_path / f"shards-{number}" if shards else folder
        assert not shards or prepare_data.main([f"--shards={path}", f"--from={folder}"]) == 0
        return utils.data.build.find_dataset(config(data_path=str(path)), download=False).fingerprint

    before = find(0)
    assert find(1) == before
    CHANGES[change](folder)
    assert (find(2) == before) is (shards and change == "renamed"), "shards keep the order of the names only"


def test_labels_and_every_split_are_part_of_the_fingerprint():
    images, labels = np.arange(600, dtype=np.uint8).repeat(3).reshape(600, 3, 1, 1), np.arange(600) % 2
    splits = datasets.ImageArrays(images, labels), datasets.ImageArrays(images, labels)
    last = np.concatenate([images[:-1], images[:1]])  # another image beyond the first 512
    altered = datasets.ImageArrays(images, labels[::-1]), datasets.ImageArrays(last, labels)
    found = {datasets.fingerprint(*pair) for part in altered for pair in (splits, (part, splits[1]), (splits[0], part))}
    assert len(found) == 5


def test_a_run_resumes_with_its_own_statistics_and_not_with_other_data(one_rank, tmp_path, monkeypatch, other):
    """Statistics differ with another version of Pillow."""
    folder, config = other
    trainer = run(config(max_epochs=1), one_rank, tmp_path / "run")
    monkeypatch.setattr(folders, "channel_statistics", lambda images: ((0.1,) * 3, (0.2,) * 3))
    again = run(config(max_epochs=2), one_rank, tmp_path / "run", resume=f"{tmp_path}/run")
    for name in ("mean", "std"):
        assert again.run.data[name] == trainer.run.data[name]
        assert {getattr(loader.normalise, name) for loader in again.loaders.every()} == {trainer.run.data[name]}
    assert torch.equal(again.loaders.valid.normalise.shift, trainer.loaders.valid.normalise.shift)
    assert "Normalising with the checkpoint's" in (tmp_path / "run/train.log").read_text()
    CHANGES["renamed"](folder)
    with pytest.raises(CheckpointError, match="was trained on other data"):
        run(config(max_epochs=2), one_rank, tmp_path / "run")
