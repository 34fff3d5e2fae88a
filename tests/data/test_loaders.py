"""The loader contract of utils.data, for every backend."""

import multiprocessing
import os
import re
import resource
import signal
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import utils.data.build
from tests.processes import wait_until
from tests.tiny_shards import DALI, everything, pretend
from tests.tiny_shards import build as build_data
from train import main
from utils.config import Config
from utils.config.command_line import Arguments
from utils.data import augment as mix
from utils.data import sampling
from utils.data.augment import BatchAugmenter, augment_each, pixel_maps
from utils.data.build import build_loaders
from utils.data.config import AugmentationConfig
from utils.data.datasets.dataset import Dataset, ImageArrays
from utils.data.loader import AugmentedImages, init_worker
from utils.data.sampling import sample_augmentation, uniform
from utils.distributed.world import World

WORLD_SIZES = (1, 2, 3, 8)
BATCH = 24  # divisible by each of them
NUM_TRAIN, NUM_VALID = 5 * BATCH + 7, 83  # neither divides

REAL = pytest.mark.parametrize("backend", ["torchvision", "device", DALI])
EVERY = pytest.mark.parametrize("backend", ["torchvision", "device", "synthetic", DALI])


@pytest.fixture(scope="module")
def dataset():
    """Noise: every image differs from all others, however it is cropped, and its label is its index."""
    shapes, rng = ((count, 3, 32, 28) for count in (NUM_TRAIN, NUM_VALID)), np.random.default_rng(1)
    train, valid = (ImageArrays(rng.integers(0, 256, shape, np.uint8), np.arange(shape[0])) for shape in shapes)
    return Dataset("noise", train, valid, tuple(map(str, range(NUM_TRAIN))), (0.5, 0.4, 0.3), (0.2, 0.3, 0.4))


@pytest.fixture
def build(tiny, dataset):
    whole = {"limit_train_batches": None, "limit_valid_batches": None}
    base = tiny(batch_size=BATCH, valid_batch_size_per_gpu=10, num_classes=NUM_TRAIN, **whole).model_dump()

    def build(backend, where=None, data=dataset, **changes):
        return build_loaders(Config(**base | {"data_loader": backend} | changes), data, where or pretend())

    return build


def images_of(loader, epoch, first_batch=0):
    """Count the epoch's augmented images as (label, pixels)."""
    loader.set_epoch(epoch, first_batch)
    return Counter(
        (int(label), image.contiguous().numpy().tobytes())
        for images, labels in loader
        for image, label in zip(images, labels, strict=True)
    )


@REAL
def test_every_world_size_renders_the_same_set_of_images(backend, build):
    one_rank = build(backend).train
    for epoch, first_batch in ((0, 0), (3, 0), (3, 2)):
        expected = images_of(one_rank, epoch, first_batch)
        assert expected.total() == len(expected) == (NUM_TRAIN // BATCH - first_batch) * BATCH
        for world_size in WORLD_SIZES[1:]:
            loaders_of_ranks = [build(backend, pretend(rank, world_size)).train for rank in range(world_size)]
            assert all(len(loader) == NUM_TRAIN // BATCH for loader in loaders_of_ranks)
            assert sum((images_of(loader, epoch, first_batch) for loader in loaders_of_ranks), Counter()) == expected


@EVERY
def test_an_epoch_resumed_in_the_middle_has_the_same_batches(backend, build):
    """Also after an epoch that was left early, when batches of it were prefetched."""
    loader = build(backend, num_data_workers=1).train
    loader.set_epoch(4)
    whole = list(loader)
    loader.set_epoch(6)
    next(iter(loader))
    loader.set_epoch(4, first_batch=3)
    rest = list(loader)
    assert len(whole) == len(loader) == 5 and len(rest) == 2
    for (images, labels), (images_again, labels_again) in zip(whole[3:], rest, strict=True):
        assert torch.equal(images, images_again) and torch.equal(labels, labels_again)


@EVERY
def test_validation_yields_every_image_once_at_every_world_size(backend, build):
    for world_size in WORLD_SIZES:
        labels = []
        for rank in range(world_size):
            loader = build(backend, pretend(rank, world_size)).valid
            for epoch in (0, 1):
                loader.set_epoch(epoch)
                batches = [batch_labels for _, batch_labels in loader]
                assert len(batches) == len(loader)
            labels += torch.cat(batches).tolist()
        assert len(labels) == NUM_VALID
        if backend != "synthetic":
            assert sorted(labels) == list(range(NUM_VALID))


@EVERY
@pytest.mark.parametrize("nhwc", [False, True])
def test_batches_have_the_shape_type_and_memory_format_of_the_contract(backend, nhwc, build):
    for loader, size in ((build(backend, enable_nhwc=nhwc).train, BATCH), (build(backend, enable_nhwc=nhwc).valid, 10)):
        images, labels = next(iter(loader))
        assert images.shape == (size, 3, 32, 28) and images.dtype is torch.float32
        assert labels.shape == (size,) and labels.dtype is torch.int64
        memory_format = torch.channels_last if nhwc else torch.contiguous_format
        assert images.is_contiguous(memory_format=memory_format)


def assert_agree(backend, expected, images):
    """Bit for bit; DALI's normalisation differs in the last place, and its rotation in one pixel of ten thousand."""
    differing = ((images - expected).abs() > (1e-6 if backend == "dali" else 0)).float().mean().item()
    assert differing < 1e-3 if backend == "dali" else differing == 0


@pytest.mark.parametrize("backend", ["device", DALI])
@pytest.mark.parametrize("part", ["train", "valid"])
@pytest.mark.parametrize("crop_flip_angle", [(0, False, 0), (4, True, 0), (4, True, 15)])
def test_backends_agree_with_torchvision(backend, part, crop_flip_angle, build):
    changes = dict(zip(("rnd_crop_padding", "rnd_horizontal_flip", "rnd_rotation_angle"), crop_flip_angle, strict=True))
    loaders = [getattr(build(name, **changes), part) for name in ("torchvision", backend)]
    (expected, labels), (images, others) = (everything(loader, epoch=2) for loader in loaders)
    assert torch.equal(labels, others)
    assert_agree(backend, expected, images)


@pytest.mark.parametrize(("height", "width", "padding", "angle"), [(32, 32, 4, 15), (31, 48, 5, 180), (24, 24, 30, 0),
    (8, 8, 0, 90)])  # fmt: skip
def test_one_gather_equals_torchvision(height, width, padding, angle):
    images = np.random.default_rng(0).integers(0, 256, (300, 3, height, width), np.uint8)
    config = AugmentationConfig(rnd_crop_padding=padding, rnd_rotation_angle=angle)
    sampled = sample_augmentation(config, 1, 2, np.arange(300))
    if angle == 90:  # PIL has shortcuts for right angles
        sampled = replace(sampled, angle=np.arange(300) % 5 * 90.0 - 90)
    maps = torch.from_numpy(pixel_maps(sampled, height, width))
    gathered = BatchAugmenter(height, width, torch.device("cpu"))(torch.from_numpy(images), maps)
    np.testing.assert_array_equal(gathered.numpy(), augment_each(images, sampled))


def test_seed_and_epoch_each_choose_the_order(build):
    """Also if their sum is the same. A resumed run needs the order that it had before."""
    orders = {at: build("synthetic", seed=at[0]).train.sampler.batches(at[1])[0] for at in np.ndindex(3, 3)}
    assert len({order.tobytes() for order in orders.values()}) == 9
    assert [orders[at][:3].tolist() for at in ((1, 2), (2, 1))] == [[122, 17, 53], [55, 53, 39]], "as in earlier runs"


def test_every_purpose_has_its_own_stream(monkeypatch):
    streams = []
    for module in (sampling, mix):
        monkeypatch.setattr(module, "uniform", lambda *place: (streams.append(place[-1]), uniform(*place))[1])
    config = AugmentationConfig(rnd_resized_crop=True, cutout_size=6, mixup_alpha=0.4, cutmix_alpha=1.0)
    sample_augmentation(config, 0, 0, np.arange(2))
    mix.sample_mixing(config, 0, 0, np.arange(2), 32, 32)
    assert len(streams) == len(set(streams)) == 4 + 4 * 10 + 7  # a crop has ten attempts


def test_seed_epoch_and_stream_each_change_the_samples():
    """Also if their sum is the same. The hash is SplitMix64, whose reference begins so from state 0."""
    assert sampling._splitmix64(np.zeros(1, np.uint64)).tolist() == [0xE220A8397B1DCDAF]
    sampled = np.stack([uniform(seed, epoch, np.arange(100), stream) for seed, epoch, stream in np.ndindex(3, 3, 3)])
    assert len(np.unique(sampled)) == sampled.size
    assert uniform(1, 2, np.arange(4), 3).round(4).tolist() == [0.1674, 0.2321, 0.2504, 0.7796], "as in earlier runs"


def test_samples_are_uniform():
    """10,000 samples; a chi-squared of k cells exceeds k + 5 sqrt(2 k) for one seed in millions."""
    number = 10_000
    sampled, again = (sample_augmentation(AugmentationConfig(), 0, epoch, np.arange(number)) for epoch in range(2))
    for cells, found in (
        (81, (sampled.shift_y + 4) * 9 + sampled.shift_x + 4),
        (2, sampled.flip.astype(np.int64)),
        (30, np.floor(sampled.angle + 15).astype(np.int64)),
        (18, (sampled.shift_y + 4) * 2 + sampled.flip),  # shift and flip are independent, and so are epochs
        (4, sampled.flip * 2 + again.flip),
    ):
        counts, expected = np.bincount(found, minlength=cells), number / cells
        assert len(counts) == cells
        assert ((counts - expected) ** 2 / expected).sum() < cells + 5 * (2 * cells) ** 0.5


def test_each_setting_limits_its_augmentation():
    config = AugmentationConfig(rnd_crop_padding=3, rnd_horizontal_flip=False, rnd_rotation_angle=7.0)
    sampled = sample_augmentation(config, 0, 0, np.arange(1000))
    for shift in (sampled.shift_y, sampled.shift_x):
        assert (shift.min(), shift.max()) == (-3, 3)
    assert 6.9 < sampled.angle.max() <= 7 and -7 <= sampled.angle.min() < -6.9
    assert not sampled.flip.any() and sampled.crop is None
    off = {"rnd_crop_padding": 0, "rnd_horizontal_flip": False, "rnd_rotation_angle": 0, "rnd_resized_crop": False}
    for key, value in zip([*off, "cutout_size"], (1, "alternating", 0.5, True, 8), strict=True):
        assert AugmentationConfig(**off | {key: value}).augments_images is (key in off), key


def test_alternating_flip_mirrors_the_other_images_in_the_next_epoch():
    config = AugmentationConfig(rnd_horizontal_flip="alternating")
    flips = [sample_augmentation(config, 5, epoch, np.arange(10_000)).flip for epoch in range(4)]
    assert 0.48 < flips[0].mean() < 0.52
    np.testing.assert_array_equal(flips, [flips[0], ~flips[0], flips[0], ~flips[0]])


def test_device_loader_uses_images_in_place_on_a_cpu(build, dataset):
    """Also read-only and with gaps between the images, as in CIFAR-100's file; all of many batches."""
    records = np.random.default_rng(0).integers(0, 256, (NUM_TRAIN, 2 + 3072), np.uint8)
    images = records[:, 2:].reshape(NUM_TRAIN, 3, 32, 32)
    records.flags.writeable = False
    data = replace(dataset, train=ImageArrays(images, np.arange(NUM_TRAIN)))
    loader = build("device", data=data, batch_size=1).train
    assert loader.images.data_ptr() == images.ctypes.data
    loader.normalise, loader.augment = torch.Tensor.clone, lambda images, maps: images
    shown, labels = everything(loader)
    assert sorted(labels.tolist()) == list(range(NUM_TRAIN))
    np.testing.assert_array_equal(shown.numpy(), images[labels.numpy()])


@pytest.mark.gpu
@REAL
def test_batches_on_a_gpu_equal_those_on_the_cpu(backend, build):
    """DALI without rotation: its GPU pipeline interpolates."""
    gpu = World(0, 0, 1, torch.device("cuda", 0))
    changes = {"rnd_rotation_angle": 0.0} if backend == "dali" else {}
    for part in ("train", "valid"):
        loaders_of_both = [getattr(build(backend, where, **changes), part) for where in (gpu, pretend())]
        for (images, labels), (expected, expected_labels) in zip(*loaders_of_both, strict=True):
            assert images.device == labels.device == gpu.device and torch.equal(labels.cpu(), expected_labels)
            assert_agree(backend, expected, images.cpu())


def test_a_worker_ignores_signals_except_sigterm_of_its_trainer():
    """The signals of a terminal, torchrun and Slurm reach all processes, and the trainer needs more batches to save."""
    context = multiprocessing.get_context("fork")
    ready, enough = context.Event(), context.Event()
    worker = context.Process(target=lambda: (init_worker(0), ready.set(), enough.wait(300)), daemon=True)
    worker.start()
    assert ready.wait(60)
    for number in (signal.SIGINT, signal.SIGUSR1, signal.SIGHUP):
        os.kill(worker.pid, number)
    subprocess.run(["kill", "-TERM", str(worker.pid)], check=True)  # of another process
    status = Path(f"/proc/{worker.pid}/status")  # a signal that is pending would swallow the next one
    wait_until("end of the wait for it", 60, lambda: f"ShdPnd:\t{0:016}\n" in status.read_text())
    worker.join(0.5)
    assert worker.is_alive()
    worker.terminate()
    worker.join(60)
    assert worker.exitcode == 0


@pytest.mark.parametrize(("cores", "workers"), [(3.5, 3), (0.5, 1)])
def test_workers_are_capped_to_a_ranks_cores(cores, workers, tiny):
    world = SimpleNamespace(count_cores=lambda: cores)
    config, notes = utils.data.build.cap_workers(tiny(data_loader="torchvision", num_data_workers=64), world)
    assert config.num_data_workers == workers and f"num_data_workers: {workers} instead of 64, for " in notes[0]
    for changes in ({"num_data_workers": 0}, {"data_loader": "device"}):
        given = tiny(**{"data_loader": "torchvision", "num_data_workers": 64} | changes)
        assert utils.data.build.cap_workers(given, world) == (given, [])


def use_up_the_files(dataset, index):
    """The worker opens a file for each tensor that it sends."""
    limit = os.dup(1)  # the lowest free number: none is left below
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))
    return torch.ones(5)


@pytest.mark.timeout(60)
def test_too_few_file_descriptors_end_the_run_in_a_line(tiny, tmp_path, monkeypatch, capfd):
    monkeypatch.setattr(AugmentedImages, "__getitem__", use_up_the_files)
    config = tiny(data_loader="torchvision", num_data_workers=1)
    assert main(Arguments(config, "default", tmp_path, "auto", dry_run=False)) == 1
    error = "".join(line for line in capfd.readouterr().err.splitlines(True) if "cannot send a batch" not in line)
    assert re.match(r"error: too many open files: .* \(ulimit -n 65536\).*\n$", error) and "Traceback" not in error


def test_synthetic_needs_no_files_and_keeps_one_batch(tiny, tmp_path):
    config = tiny(dataset="cifar100", num_classes=100, data_loader="synthetic", data_path=str(tmp_path / "nothing"))
    loader = build_data(config.model_copy(update={"limit_train_batches": None})).train
    (images, labels), (images_again, labels_again) = next(batches := iter(loader)), next(batches)
    assert len(loader) == 50_000 // config.batch_size and images.data_ptr() == images_again.data_ptr()
    assert torch.equal(labels, labels_again) and len(labels.unique()) > 10
    assert abs(images.mean()) < 0.5 and images.std() > 0.5
    limits = {"limit_train_batches": 7, "profiling_iters_per_epoch": 5, "enable_profiling": True}
    assert len(build_data(config.model_copy(update=limits)).train) == 5


def test_missing_dali_is_an_error_with_the_command_that_installs_it(tiny, tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "nvidia.dali", None)
    assert main(Arguments(tiny(data_loader="dali"), "default", tmp_path, "auto", dry_run=False)) == 2
    assert 'pip install ".[dali]"' in capsys.readouterr().err
