"""The loader contract of utils.data, for every backend."""

import multiprocessing
import multiprocessing.util
import os
import resource
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch import Tensor
from torch._C import _remove_worker_pids, _set_worker_pids
from torch.utils.data._utils.signal_handling import _set_SIGCHLD_handler

from tests.test_folders import DALI, needs_dali, pretend
from train import main
from utils.config import Config
from utils.config.command_line import Arguments
from utils.data import sampling, workers
from utils.data.build import Loader, Loaders, build_loaders, open_dataset
from utils.data.config import AugmentationConfig
from utils.data.datasets.dataset import Dataset, ImageArrays
from utils.data.loaders import torchvision as loaders
from utils.data.loaders.device import BATCHES_AT_ONCE, DeviceLoader
from utils.data.sampling import Augmentation, EpochPlan, ShardGroups, sample_augmentation, uniform
from utils.data.transforms import mix
from utils.data.transforms.augment import BatchAugmenter, Normalise, augment_each, pixel_maps
from utils.distributed.world import World
from utils.errors import ConfigError

WORLD_SIZES = (1, 2, 3, 8)
BATCH = 24  # divisible by each of them
NUM_TRAIN, NUM_VALID = 5 * BATCH + 7, 83  # neither divides
CPU = torch.device("cpu")

REAL = pytest.mark.parametrize("backend", ["torchvision", "device", DALI])
OTHERS = pytest.mark.parametrize("backend", ["device", DALI])
EVERY = pytest.mark.parametrize("backend", ["torchvision", "device", "synthetic", DALI])
NO_AUGMENTATION = {"rnd_crop_padding": 0, "rnd_horizontal_flip": False, "rnd_rotation_angle": 0.0}


@pytest.fixture(scope="module")
def dataset() -> Dataset:
    """Noise: every image differs from all others, however it is cropped, and its label is its index."""
    rng = np.random.default_rng(1)
    train, valid = (
        ImageArrays(rng.integers(0, 256, (count, 3, 32, 32), np.uint8), np.arange(count))
        for count in (NUM_TRAIN, NUM_VALID)
    )
    return Dataset("noise", train, valid, tuple(map(str, range(NUM_TRAIN))), (0.5, 0.4, 0.3), (0.2, 0.3, 0.4))


@pytest.fixture
def build(tiny: Callable[..., Config], dataset: Dataset) -> Callable[..., Loaders]:
    whole = {"limit_train_batches": None, "limit_valid_batches": None}
    base = tiny(batch_size=BATCH, valid_batch_size_per_gpu=10, num_classes=NUM_TRAIN, **whole).model_dump()

    def build(backend: str, where: World | None = None, **changes: Any) -> Loaders:
        return build_loaders(Config(**base | {"data_loader": backend} | changes), dataset, where or pretend())

    return build


def images_of(loader: Loader, epoch: int, first_batch: int = 0) -> Counter[tuple[int, bytes]]:
    """Count the epoch's augmented images as (label, pixels)."""
    loader.set_epoch(epoch, first_batch)
    return Counter(
        (int(label), image.contiguous().numpy().tobytes())
        for images, labels in loader
        for image, label in zip(images, labels, strict=True)
    )


# ---- order and augmentation are functions of (seed, epoch, index)


@REAL
def test_every_world_size_renders_the_same_set_of_images(backend: str, build: Callable[..., Loaders]) -> None:
    one_rank = build(backend).train
    for epoch, first_batch in ((0, 0), (3, 0), (3, 2)):
        expected = images_of(one_rank, epoch, first_batch)
        assert expected.total() == len(expected) == (NUM_TRAIN // BATCH - first_batch) * BATCH
        for world_size in WORLD_SIZES[1:]:
            loaders_of_ranks = [build(backend, pretend(rank, world_size)).train for rank in range(world_size)]
            assert all(len(loader) == NUM_TRAIN // BATCH for loader in loaders_of_ranks)
            assert sum((images_of(loader, epoch, first_batch) for loader in loaders_of_ranks), Counter()) == expected


@REAL
def test_an_epoch_resumed_in_the_middle_has_the_same_batches(backend: str, build: Callable[..., Loaders]) -> None:
    loader = build(backend).train
    loader.set_epoch(4)
    whole = list(loader)
    loader.set_epoch(4, first_batch=3)
    rest = list(loader)
    assert len(whole) == len(loader) == 5 and len(rest) == 2
    for (images, labels), (images_again, labels_again) in zip(whole[3:], rest, strict=True):
        assert torch.equal(images, images_again) and torch.equal(labels, labels_again)


@REAL
def test_an_epoch_left_early_does_not_leak_into_the_next(backend: str, build: Callable[..., Loaders]) -> None:
    loader = build(backend, num_data_workers=1).train
    fresh = images_of(build(backend).train, 7)
    for _ in range(2):
        loader.set_epoch(6)
        next(iter(loader))  # several batches are prefetched when it is dropped
        assert images_of(loader, 7) == fresh
    loader.set_epoch(6)
    left_open = iter(loader)
    next(left_open)
    assert images_of(loader, 7) == fresh


@REAL
@pytest.mark.parametrize("limit", [1, 2])
def test_an_epoch_of_fewer_batches_than_are_prefetched(backend: str, limit: int, build: Callable[..., Loaders]) -> None:
    loader = build(backend, limit_train_batches=limit).train
    assert images_of(loader, 1).total() == limit * BATCH
    assert images_of(loader, 2) == images_of(build(backend, limit_train_batches=limit).train, 2)


def test_workers_persist_and_are_started_after_a_delay(build, monkeypatch) -> None:
    started: list[int] = []
    monkeypatch.setattr(loaders, "time", SimpleNamespace(sleep=lambda seconds: started.append(workers())))

    def workers() -> int:
        return len(multiprocessing.active_children())

    before = workers()
    with_workers, without = (build("torchvision", num_data_workers=number).train for number in (1, 0))
    for epoch in range(2):
        images_of(with_workers, epoch)
        images_of(without, epoch)
    assert started == [before] and workers() == before + 1


@EVERY
def test_validation_yields_every_image_once_at_every_world_size(backend: str, build: Callable[..., Loaders]) -> None:
    for world_size in WORLD_SIZES:
        labels: list[int] = []
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
def test_batches_have_the_shape_type_and_memory_format_of_the_contract(
    backend: str, nhwc: bool, build: Callable[..., Loaders]
) -> None:
    for loader, size in ((build(backend, enable_nhwc=nhwc).train, BATCH), (build(backend, enable_nhwc=nhwc).valid, 10)):
        images, labels = next(iter(loader))
        assert images.shape == (size, 3, 32, 32) and images.dtype is torch.float32
        assert labels.shape == (size,) and labels.dtype is torch.int64
        memory_format = torch.channels_last if nhwc else torch.contiguous_format
        assert images.is_contiguous(memory_format=memory_format)


# ---- the backends agree


def both(build: Callable[..., Loaders], backend: str, part: str, **changes: Any) -> tuple[Tensor, Tensor]:
    """Return all images of one epoch from the torchvision loader and from `backend`, in order."""
    gathered = []
    for name in ("torchvision", backend):
        loader: Loader = getattr(build(name, **changes), part)
        loader.set_epoch(2)
        batches = list(loader)
        gathered.append((torch.cat([images for images, _ in batches]), torch.cat([labels for _, labels in batches])))
    (images, labels), (others, other_labels) = gathered
    assert torch.equal(labels, other_labels)
    return images, others


def assert_agree(backend: str, expected: Tensor, images: Tensor) -> None:
    """Bit for bit; DALI's normalisation differs in the last place."""
    if backend == "dali":
        torch.testing.assert_close(images, expected, rtol=0, atol=1e-6)
    else:
        assert torch.equal(images, expected)


@OTHERS
@pytest.mark.parametrize("part", ["train", "valid"])
def test_backends_agree_without_augmentation(backend: str, part: str, build: Callable[..., Loaders]) -> None:
    assert_agree(backend, *both(build, backend, part, **NO_AUGMENTATION))


@OTHERS
def test_backends_agree_on_crop_and_flip(backend: str, build: Callable[..., Loaders]) -> None:
    assert_agree(backend, *both(build, backend, "train", rnd_rotation_angle=0.0))


def test_device_agrees_with_torchvision_on_every_augmentation(build: Callable[..., Loaders]) -> None:
    assert_agree("device", *both(build, "device", "train"))


@needs_dali
@pytest.mark.dali
def test_dali_rotates_as_torchvision_except_for_a_few_pixels(
    build: Callable[..., Loaders],
) -> None:
    expected, images = both(build, "dali", "train")
    differing = ((images - expected).abs() > 1e-6).float().mean().item()
    assert 0 < differing < 1e-3  # about one pixel in ten thousand, whose source lies on a border


def test_the_images_are_normalised_by_the_training_statistics(dataset: Dataset, build: Callable[..., Loaders]) -> None:
    images, labels = next(iter(build("device", **NO_AUGMENTATION).train))
    mean, std = (np.array(values).reshape(3, 1, 1) for values in (dataset.mean, dataset.std))
    expected = (dataset.train.images[labels.numpy()] / 255 - mean) / std  # type: ignore[union-attr]
    np.testing.assert_allclose(images.numpy(), expected, atol=1e-6)


@pytest.mark.parametrize(("height", "width", "padding", "angle"), [(32, 32, 4, 15), (31, 48, 5, 180), (24, 24, 30, 0)])
def test_one_gather_equals_torchvision(height: int, width: int, padding: int, angle: float) -> None:
    images = np.random.default_rng(0).integers(0, 256, (300, 3, height, width), np.uint8)
    config = AugmentationConfig(rnd_crop_padding=padding, rnd_rotation_angle=angle)
    sampled = sample_augmentation(config, 1, 2, np.arange(300))
    gathered = BatchAugmenter(height, width, CPU)(
        torch.from_numpy(images), torch.from_numpy(pixel_maps(sampled, height, width))
    )
    np.testing.assert_array_equal(gathered.numpy(), augment_each(images, sampled))


def test_one_gather_rotates_by_right_angles_as_torchvision() -> None:
    """PIL has shortcuts for these angles."""
    images = np.random.default_rng(0).integers(0, 256, (5, 3, 8, 8), np.uint8)
    nothing = np.zeros(5, np.int64)
    turned = Augmentation(nothing, nothing, nothing.astype(bool), np.array([0.0, 90.0, 180.0, -90.0, 360.0]))
    gathered = BatchAugmenter(8, 8, CPU)(torch.from_numpy(images), torch.from_numpy(pixel_maps(turned, 8, 8)))
    np.testing.assert_array_equal(gathered.numpy(), augment_each(images, turned))


# ---- random numbers


@pytest.mark.parametrize("groups", [None, ShardGroups(np.arange(NUM_TRAIN) % 6, 2)])
def test_seed_and_epoch_each_choose_the_order(groups: ShardGroups | None, build: Callable[..., Loaders]) -> None:
    """Independently: seed 1 in epoch 0 differs from seed 0 in epoch 1."""
    orders = set()
    for seed in range(3):
        plan = replace(build("synthetic", seed=seed).train.plan, groups=groups)
        orders |= {np.concatenate(plan.batches(epoch)).tobytes() for epoch in range(3)}
    assert len(orders) == 9


def test_every_purpose_has_its_own_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    streams: list[int] = []

    def note(seed: int, epoch: int, indices: np.ndarray, stream: int) -> np.ndarray:
        streams.append(stream)
        return uniform(seed, epoch, indices, stream)

    for module in (sampling, mix):
        monkeypatch.setattr(module, "uniform", note)
    config = AugmentationConfig(rnd_resized_crop=True, cutout_size=6, mixup_alpha=0.4, cutmix_alpha=1.0)
    sample_augmentation(config, 0, 0, np.arange(2))
    mix.sample_mixing(config, 0, 0, np.arange(2), 32, 32)
    assert len(streams) == len(set(streams)) == 4 + 4 * sampling.CROP_ATTEMPTS + 7


def test_seed_epoch_and_stream_each_change_the_samples() -> None:
    """Also if their sum is the same."""
    places = [(0, 0, 0), (1, 0, 0), (0, 1, 0), (0, 0, 1), (2, 0, 0), (1, 1, 0), (0, 2, 0)]
    sampled = np.stack([uniform(seed, epoch, np.arange(100), stream) for seed, epoch, stream in places])
    assert len(np.unique(sampled)) == sampled.size


def test_samples_are_uniform() -> None:
    """10,000 samples; a chi-squared of k cells exceeds k + 5 sqrt(2 k) for one seed in millions."""
    number = 10_000
    sampled = sample_augmentation(AugmentationConfig(), 0, 0, np.arange(number))

    def chi_squared(counts: np.ndarray) -> float:
        expected = number / len(counts)
        return float(((counts - expected) ** 2 / expected).sum())

    def limit(cells: int) -> float:
        return cells + 5 * (2 * cells) ** 0.5

    assert chi_squared(np.bincount((sampled.shift_y + 4) * 9 + sampled.shift_x + 4, minlength=81)) < limit(81)
    assert chi_squared(np.bincount(sampled.flip.astype(np.int64), minlength=2)) < limit(2)
    angles, _ = np.histogram(sampled.angle, bins=30, range=(-15, 15))
    assert angles.sum() == number and chi_squared(angles) < limit(30)
    # shift and flip are independent, and so are epochs
    together = np.bincount((sampled.shift_y + 4) * 2 + sampled.flip, minlength=18)
    assert chi_squared(together) < limit(18)
    again = sample_augmentation(AugmentationConfig(), 0, 1, np.arange(number))
    assert chi_squared(np.bincount(sampled.flip * 2 + again.flip, minlength=4)) < limit(4)


def test_each_setting_limits_its_augmentation() -> None:
    config = AugmentationConfig(rnd_crop_padding=3, rnd_horizontal_flip=False, rnd_rotation_angle=7.0)
    sampled = sample_augmentation(config, 0, 0, np.arange(1000))
    for shift in (sampled.shift_y, sampled.shift_x):
        assert (shift.min(), shift.max()) == (-3, 3)
    assert 6.9 < sampled.angle.max() <= 7 and -7 <= sampled.angle.min() < -6.9
    assert not sampled.flip.any() and sampled.crop is None


AUGMENTATIONS = {
    "rnd_crop_padding": 1,
    "rnd_horizontal_flip": True,
    "rnd_rotation_angle": 1.0,
    "rnd_resized_crop": True,
}


@pytest.mark.parametrize("setting", AUGMENTATIONS)
def test_one_setting_is_enough_to_augment(setting: str, build: Callable[..., Loaders]) -> None:
    off = NO_AUGMENTATION | {"cutout_size": 4}
    assert build("synthetic", **off).train.plan.augmentation is None
    config = build("synthetic", **off | {setting: AUGMENTATIONS[setting]}).train.plan.augmentation
    assert config is not None and getattr(config, setting) == AUGMENTATIONS[setting]


def test_alternating_flip_mirrors_the_other_images_in_the_next_epoch() -> None:
    config = AugmentationConfig(rnd_horizontal_flip="alternating")
    flips = [sample_augmentation(config, 5, epoch, np.arange(10_000)).flip for epoch in range(4)]
    assert 0.48 < flips[0].mean() < 0.52
    np.testing.assert_array_equal(flips[0], ~flips[1])
    np.testing.assert_array_equal(flips[0], flips[2])
    np.testing.assert_array_equal(flips[1], flips[3])


# ---- resources


def test_device_loader_uses_images_in_place_on_a_cpu(tiny: Callable[..., Config], tmp_path: Path) -> None:
    """From a read-only memory map with gaps between the images, as for CIFAR-100's file."""
    records = np.random.default_rng(0).integers(0, 256, (50, 2 + 3072), np.uint8)
    (tmp_path / "records.bin").write_bytes(records.tobytes())
    mapped = np.memmap(tmp_path / "records.bin", np.uint8, "r").reshape(50, -1)[:, 2:].reshape(50, 3, 32, 32)
    plan = EpochPlan(50, 10, 0, 1, training=True)
    normalise = Normalise((0, 0, 0), (1 / 255,) * 3, CPU, torch.contiguous_format)
    loader = DeviceLoader(tiny(), ImageArrays(mapped, np.arange(50)), plan, normalise)
    assert loader.images.data_ptr() == mapped.ctypes.data
    for images, labels in loader:
        np.testing.assert_array_equal(images.round().numpy(), mapped[labels.numpy()])


def test_device_loader_yields_more_batches_than_it_prepares_at_once(
    tiny: Callable[..., Config], dataset: Dataset
) -> None:
    plan = EpochPlan(NUM_TRAIN, 1, 0, 1, training=True, augmentation=AugmentationConfig())
    assert NUM_TRAIN > BATCHES_AT_ONCE + 1
    assert isinstance(dataset.train, ImageArrays)
    normalise = Normalise(dataset.mean, dataset.std, CPU, torch.contiguous_format)
    labels = [label for _, label in DeviceLoader(tiny(), dataset.train, plan, normalise)]
    assert torch.cat(labels).tolist() == np.concatenate(plan.batches(0)).tolist()


@pytest.mark.gpu
@REAL
def test_batches_on_a_gpu_equal_those_on_the_cpu(backend: str, build: Callable[..., Loaders]) -> None:
    """DALI without rotation: its GPU pipeline interpolates."""
    gpu = World(0, 0, 1, torch.device("cuda", 0))
    changes = {"rnd_rotation_angle": 0.0} if backend == "dali" else {}
    for part in ("train", "valid"):
        loaders_of_both = [getattr(build(backend, where, **changes), part) for where in (gpu, pretend())]
        for (images, labels), (expected, expected_labels) in zip(*loaders_of_both, strict=True):
            assert images.device == labels.device == gpu.device and torch.equal(labels.cpu(), expected_labels)
            assert_agree(backend, expected, images.cpu())


@pytest.mark.parametrize(("cores", "ranks", "workers"), [(2, 1, 2), (8, 1, 8), (8, 3, 2), (2, 8, 1)])
def test_workers_are_capped_to_the_ranks_part_of_the_cores(
    cores: int, ranks: int, workers: int, build: Callable[..., Loaders], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(cores)))
    built = build("torchvision", pretend(0, ranks), num_data_workers=64)
    assert built.train.loader.num_workers == workers  # type: ignore[attr-defined]
    assert build("torchvision", num_data_workers=0).notes == []
    (note,) = built.notes
    assert note.startswith(f"num_data_workers: {workers} instead of 64, there are {cores} cores")


def test_a_full_shared_memory_is_an_error_that_names_the_remedy(
    build: Callable[..., Loaders], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Full:
        f_bavail, f_frsize = 10, 4096

    real = os.statvfs
    monkeypatch.setattr(workers, "SHARED_MEMORY", tmp_path)
    monkeypatch.setattr(os, "statvfs", lambda path: Full() if path == tmp_path else real(path))
    with pytest.raises(ConfigError, match=r"--ipc=host, or --shm-size.*num_data_workers=0"):
        build("torchvision", num_data_workers=1)
    build("torchvision", num_data_workers=0)
    build("device", num_data_workers=1)


def test_each_worker_needs_room_for_its_prefetched_batches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers, "SHARED_MEMORY", tmp_path)
    monkeypatch.setattr(os, "statvfs", lambda path: SimpleNamespace(f_bavail=6 * workers.PREFETCHED, f_frsize=100))
    workers.check_shared_memory(batch_bytes=200, num_workers=3)
    with pytest.raises(ConfigError, match="has 0 MB free; 3 data workers"):
        workers.check_shared_memory(batch_bytes=201, num_workers=3)


@pytest.mark.skipif(hasattr(multiprocessing.util, "_get_base_temp_dir"), reason="this Python finds a short path itself")
@pytest.mark.parametrize("too_long", [False, True])
def test_a_tmpdir_too_long_for_sockets_is_refused(too_long: bool) -> None:
    longest = 107 - len("/pymp-12345678/listener-12345678")
    program = "from utils.data.workers import check_sockets; check_sockets(0); check_sockets(1)"
    with tempfile.TemporaryDirectory(dir="/tmp") as base:
        folder = Path(base, "x" * (longest + too_long - len(base) - 1))
        folder.mkdir()
        command = [sys.executable, "-c", program]
        done = subprocess.run(
            command, env=os.environ | {"TMPDIR": str(folder)}, capture_output=True, text=True, check=False
        )
        assert list(folder.iterdir()) == []
    assert done.returncode == too_long
    assert ("TMPDIR: worker processes cannot make a socket" in done.stderr) == too_long, done.stderr


def test_workers_that_cannot_make_sockets_are_an_error(
    build: Callable[..., Loaders], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(family: str) -> None:
        raise OSError("AF_UNIX path too long")

    monkeypatch.setattr(workers, "Listener", refuse)
    with pytest.raises(ConfigError, match=r"TMPDIR: .* \(AF_UNIX path too long\).*\n.*such as /tmp"):
        build("torchvision", num_data_workers=1)
    build("torchvision", num_data_workers=0)
    build("device", num_data_workers=1)


@pytest.mark.parametrize(
    ("message", "kind", "shown"),
    [
        ("DataLoader worker (pid 7) is killed by signal: Bus error. ", ConfigError, "--ipc=host"),
        ("No space left on device (28)", ConfigError, "--ipc=host"),
        ("something else", RuntimeError, "something else"),
    ],
)
def test_of_a_workers_errors_full_shared_memory_is_explained(message: str, kind: type[Exception], shown: str) -> None:
    def batches() -> Any:
        raise RuntimeError(message)
        yield

    with pytest.raises(kind, match=shown):
        loaders.TorchvisionLoader._next(batches())


@pytest.mark.parametrize("error", [RuntimeError("exited unexpectedly"), EOFError(), ConnectionResetError(104, "reset")])
@pytest.mark.parametrize("with_handler", [False, True])
@pytest.mark.parametrize(
    ("number", "message"), [(signal.SIGKILL, "is killed by signal: Killed"), (signal.SIGBUS, "--ipc=host")]
)
def test_a_workers_death_is_described_whatever_is_noticed_first(
    error: Exception, with_handler: bool, number: signal.Signals, message: str
) -> None:

    class Batches:
        def __init__(self) -> None:
            worker = multiprocessing.get_context("fork").Process(target=die_of, args=(number,))
            worker.start()
            self._workers = [worker]
            if with_handler:
                _set_SIGCHLD_handler()
                _set_worker_pids(id(self), (worker.pid,))

        def __next__(self) -> Any:
            raise error

    batches = Batches()
    with pytest.raises((RuntimeError, ConfigError), match=message):
        loaders.TorchvisionLoader._next(cast(Any, batches))
    if with_handler:
        _remove_worker_pids(id(batches))


def die_of(number: int) -> None:
    """Die by a signal, shortly after the connection has ended."""
    time.sleep(0.1)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if number != signal.SIGKILL:
        signal.signal(number, signal.SIG_DFL)  # instead of pytest's handler
    os.kill(os.getpid(), number)


# ---- the whole command


def test_synthetic_needs_no_files_and_keeps_one_batch(tiny: Callable[..., Config], tmp_path: Path) -> None:
    config = tiny(dataset="cifar100", num_classes=100, data_loader="synthetic", data_path=str(tmp_path / "nothing"))
    config = config.model_copy(update={"limit_train_batches": None})
    built = build_loaders(config, open_dataset(config, pretend()), pretend())
    assert len(built.train) == 50_000 // config.batch_size
    batches = iter(built.train)
    (images, labels), (images_again, labels_again) = next(batches), next(batches)
    assert images.data_ptr() == images_again.data_ptr() and torch.equal(labels, labels_again)
    assert len(labels.unique()) > 10
    assert abs(images.mean()) < 0.5 and images.std() > 0.5


def test_missing_dali_is_an_error_with_the_command_that_installs_it(
    tiny: Callable[..., Config], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "nvidia.dali", None)
    assert main(Arguments(tiny(data_loader="dali"), "default", tmp_path, "auto", dry_run=False)) == 2
    assert 'pip install ".[dali]"' in capsys.readouterr().err


@needs_dali
@pytest.mark.dali
def test_dali_for_another_driver_is_an_error_with_the_remedy(
    tiny: Callable[..., Config], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from nvidia.dali import Pipeline

    def refuse(self: Pipeline) -> None:
        raise RuntimeError("CUDA runtime API error (36):\nAPI call is not supported in the installed CUDA driver")

    monkeypatch.setattr(Pipeline, "build", refuse)
    assert main(Arguments(tiny(data_loader="dali"), "default", tmp_path, "auto", dry_run=False)) == 2
    error = capsys.readouterr().err
    assert "DALI does not start here: CUDA runtime API error (36): API call is not supported" in error
    assert "Traceback" not in error and "--set data_loader=device" in error
