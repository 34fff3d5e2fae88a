"""`dataset: imagefolder` and `imagenet`: class folders through every loader."""

import errno
import itertools
import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torchvision.datasets import ImageFolder
from torchvision.transforms import functional

from tests.tiny_shards import CLASSES, IMAGENET, NUM_TRAIN, NUM_VALID, SETTINGS, write_image
from train import Trainer, main
from utils.config import Config
from utils.config.command_line import Arguments
from utils.data.build import Loaders, build_loaders, open_dataset
from utils.data.config import AugmentationConfig
from utils.data.datasets.folders import find_images
from utils.data.loader import report_unreadable
from utils.data.loaders import device as device_loader
from utils.data.loaders.dali import DaliFailure, DaliLoader
from utils.data.sampling import resized_crop_box, sample_augmentation
from utils.distributed.world import World
from utils.errors import ConfigError, DataError, Stopped
from utils.run.logging.environment import dali_version
from utils.training.metrics.sums import MetricSums

CPU = torch.device("cpu")
# of 255, maximum difference between DALI and PIL: of decoding and resizing, of the outermost pixels, of corners
INNER_LEVELS, EDGE_LEVELS, CORNER_LEVELS = 2, 32, 60

needs_dali = pytest.mark.skipif(dali_version() is None, reason="NVIDIA DALI is not installed")
DALI = pytest.param("dali", marks=[needs_dali, pytest.mark.dali])


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """small/ has PNG of 32 x 32, large/ has JPEG of many sizes."""
    root = tmp_path_factory.mktemp("folders")
    for label, name in enumerate(CLASSES):
        for split, count in (("train", NUM_TRAIN), ("val", NUM_VALID)):
            for number in range(count):
                seed = 1000 * label + 10 * number + (split == "val")
                write_image(root / "small" / split / name / f"{number}.png", seed, 32, 32)
                write_image(root / "large" / split / name / f"{number}.JPEG", seed, 70 + 9 * number, 110 - 5 * number)
                (root / "large" / split / name / "notes.txt").write_text("no image")
    return root


@pytest.fixture
def config(tiny: Callable[..., Config], made: Path) -> Callable[..., Config]:
    def make(dataset: str, **changes: Any) -> Config:
        is_imagenet = dataset == "imagenet"
        base = SETTINGS | {"dataset": dataset, "data_path": str(made / ("large" if is_imagenet else "small"))}
        base |= IMAGENET | {"model": "resnet18", "stem": "imagenet"} if is_imagenet else {}
        return tiny(**base | changes)

    return make


def pretend(rank: int = 0, world_size: int = 1) -> World:
    """Return a rank whose collectives assume that all ranks contribute the same value."""

    class Pretended(World):
        def all_gather(self, value: Any) -> list[Any]:
            return [value] * self.world_size

        def main_first(self, action: Callable[[], Any]) -> Any:
            return action()

    return Pretended(rank=rank, local_rank=rank, world_size=world_size, device=CPU)


def build(config: Config, rank: int = 0, world_size: int = 1) -> Loaders:
    world = pretend(rank, world_size)
    return build_loaders(config, open_dataset(config, world), world)


def everything(loader: Any, epoch: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    loader.set_epoch(epoch)
    batches = list(loader)
    return torch.cat([images for images, _ in batches]), torch.cat([labels for _, labels in batches])


def test_classes_sizes_and_statistics_come_from_the_data(config: Callable[..., Config], one_rank: World) -> None:
    dataset = open_dataset(config("imagefolder"), one_rank)
    assert dataset.class_names == CLASSES
    assert dataset.train.image_shape == dataset.valid.image_shape == (3, 32, 32)
    assert np.bincount(dataset.train.labels).tolist() == [NUM_TRAIN] * 3
    images = dataset.train.read(np.arange(3 * NUM_TRAIN), None, replace=False).samples  # fewer than the sample: all
    np.testing.assert_allclose(dataset.mean, images.mean((0, 2, 3)) / 255, rtol=1e-9)
    np.testing.assert_allclose(dataset.std, images.std((0, 2, 3)) / 255, rtol=1e-9)
    assert open_dataset(config("imagenet", image_size=None), one_rank).train.image_shape == (3, 224, 224)


def test_hidden_folders_are_not_classes(
    config: Callable[..., Config], made: Path, one_rank: World, tmp_path: Path
) -> None:
    for split in ("train", "val"):
        shutil.copytree(made / "small" / split, tmp_path / split)
        write_image(tmp_path / split / ".thumbnails/0.png", 0, 32, 32)
    dataset = open_dataset(config("imagefolder", data_path=str(tmp_path)), one_rank)
    assert dataset.class_names == CLASSES and len(dataset.train.labels) == 3 * NUM_TRAIN


def test_folders_within_classes_are_read_as_by_imagefolder(
    config: Callable[..., Config], made: Path, one_rank: World, tmp_path: Path
) -> None:
    for split in ("train", "val"):
        shutil.copytree(made / "small" / split, tmp_path / split)
        for name in ("a/deep/9.png", "a b/1.png", "folder.png/0.png", "linked/2.png"):
            write_image(tmp_path / split / "cat" / name, 0, 32, 32)
        (tmp_path / split / "cat/again").symlink_to("linked")
    dataset = open_dataset(config("imagefolder", data_path=str(tmp_path)), one_rank)
    for ours, split in ((dataset.train, "train"), (dataset.valid, "val")):
        paths = [ours.path(index) for index in range(len(ours.labels))]
        assert list(zip(paths, ours.labels.tolist(), strict=True)) == ImageFolder(tmp_path / split).samples
        assert find_images([tmp_path / split], CLASSES, 32, 1.0).labels.tolist() == ours.labels.tolist()
    for number, target in enumerate((".", "..", "../..")):  # ImageFolder reads these again and again
        (tmp_path / "train/cat/a/deep" / f"circle{number}").symlink_to(f"../../{target}")
    (tmp_path / "train/ant").rename(tmp_path / "elsewhere")
    (tmp_path / "train/ant").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "elsewhere/back").symlink_to(tmp_path / "train")
    circled = open_dataset(config("imagefolder", data_path=str(tmp_path)), one_rank).train
    assert len(circled.labels) == len(dataset.train.labels) + 4
    unreadable = circled.read(np.arange(len(circled.labels)), None, replace=False).unreadable
    assert set(unreadable.values()) == {"Is a directory"} and len(unreadable) == 4


def test_a_node_with_other_images_is_refused(
    config: Callable[..., Config], made: Path, one_rank: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    def gather(world: World, found: tuple[dict[str, Any], list[int]]) -> list[tuple[dict[str, Any], list[int]]]:
        return [found, (found[0], [*found[1][:-1], found[1][-1] - 1])]

    monkeypatch.setattr(World, "all_gather", gather)
    message = "dataset imagefolder: has other data on rank 1 than on rank 0; copy the same files to each node"
    for held_out in (0, 3):
        with pytest.raises(DataError, match=message):
            open_dataset(config("imagefolder", data_path=str(made / "small"), holdout_images=held_out), one_rank)


def test_a_link_to_itself_is_an_unreadable_image(config: Callable[..., Config], made: Path, tmp_path: Path) -> None:
    for split in ("train", "val"):
        shutil.copytree(made / "small" / split, tmp_path / split)
        for folder in (tmp_path / split, tmp_path / split / "ant"):
            (folder / "loop.png").symlink_to("loop.png")
    built = build(config("imagefolder", data_path=str(tmp_path)))
    assert len(everything(built.valid)[0]) == 3 * NUM_VALID
    found = find_images([tmp_path / "val/ant"], CLASSES, 32, 1.0)
    unreadable = found.read(np.arange(len(found.labels)), None, replace=False).unreadable
    reason = "Too many levels of symbolic links"
    assert built.valid.unreadable == unreadable == {str(tmp_path / "val/ant/loop.png"): reason}


def test_class_folders_are_found_by_their_escaped_names(tmp_path: Path) -> None:
    for name in (b"\xff", b"new\nline", b"cat"):
        (Path(os.fsdecode(os.path.join(os.fsencode(tmp_path), name)))).mkdir()
        Path(os.fsdecode(os.path.join(os.fsencode(tmp_path), name, b"1.png"))).touch()
    found = find_images([tmp_path], ["cat", r"\xff", r"new\nline"], 32, 1.0)
    assert found.labels.tolist() == [0, 2, 1]
    with pytest.raises(DataError, match=r"2 of its 3 folders are no classes of this run: new\\nline, \\xff\n"):
        find_images([tmp_path], ["cat"], 32, 1.0)


def test_validation_resizes_the_shorter_side_and_crops_the_centre(
    config: Callable[..., Config], made: Path, one_rank: World
) -> None:
    files = open_dataset(config("imagenet"), one_rank).valid
    image = Image.open(made / "large/val" / CLASSES[0] / "3.JPEG")
    expected = functional.center_crop(functional.resize(image, 55), 48)  # 48 / 0.875 = 54.9
    np.testing.assert_array_equal(
        files.read(np.array([3]), None, replace=False).samples[0], np.asarray(expected).transpose(2, 0, 1)
    )


def test_training_resizes_a_random_window(config: Callable[..., Config], made: Path) -> None:
    """Compare with torchvision, with the window and the flip of the plan."""
    built = build(config("imagenet"))
    images, labels = everything(built.train, epoch=3)
    indices = np.concatenate(built.train.plan.batches(3))
    sampled = built.train.plan.sample_augmentation(3, indices)
    assert sampled is not None and sampled.crop is not None
    normalise = built.train.normalise  # type: ignore[attr-defined]
    for row, index in enumerate(indices.tolist()):
        image = Image.open(made / "large/train" / CLASSES[index // NUM_TRAIN] / f"{index % NUM_TRAIN}.JPEG")
        top, left, height, width = resized_crop_box(sampled.crop[row], image.height, image.width)
        expected = functional.resized_crop(image, top, left, height, width, [48, 48])
        expected = functional.hflip(expected) if sampled.flip[row] else expected
        assert torch.equal(images[row : row + 1], normalise(functional.pil_to_tensor(expected)[None]))
        assert labels[row] == index // NUM_TRAIN


def test_windows_have_the_area_and_aspect_ratio_of_torchvision() -> None:
    number = 10_000
    crop = sample_augmentation(AugmentationConfig(rnd_resized_crop=True), 1, 2, np.arange(number)).crop
    assert crop is not None
    height, width = 300, 400
    boxes = np.array([resized_crop_box(sampled, height, width) for sampled in crop])
    assert (boxes[:, :2] >= 0).all()
    bottom_right = boxes[:, :2] + boxes[:, 2:]
    assert tuple(bottom_right.max(0)) == (height, width)  # windows reach the last row and column, and no further
    area, ratio = boxes[:, 2] * boxes[:, 3] / (height * width), boxes[:, 3] / boxes[:, 2]
    assert 0.079 < area.min() < 0.1 and 0.95 < area.max() <= 1
    assert 0.74 < ratio.min() < 0.76 and 1.32 < ratio.max() < 1.35

    from torchvision.transforms import RandomResizedCrop

    torch.manual_seed(0)
    blank = Image.new("L", (width, height))
    others = np.array([RandomResizedCrop.get_params(blank, [0.08, 1.0], [3 / 4, 4 / 3]) for _ in range(number)])
    # the standard deviation of one sample is at most a quarter of the sides
    np.testing.assert_allclose(boxes.mean(0), others.mean(0), atol=6 * 0.25 * width / number**0.5)
    # equally often wide and high, if both fit; the standard deviation of one sample is a sixth
    square = np.array([resized_crop_box(sampled, 1000, 1000)[2:] for sampled in crop])
    assert abs(np.log(square[:, 1] / square[:, 0]).mean()) < 6 / 6 / number**0.5
    # a window that never fits: the largest central one
    assert resized_crop_box(crop[0], 10, 400) == (0, 193, 10, 13)


@needs_dali
@pytest.mark.dali
@pytest.mark.parametrize(
    ("dataset", "part", "resized_crop", "has_edges"),
    [
        ("imagenet", "train", False, False), ("imagenet", "train", True, True), ("imagenet", "valid", False, False),
        ("imagefolder", "valid", False, True),
    ],
)  # fmt: skip
def test_dali_decodes_cuts_and_resizes_nearly_as_pil(
    dataset: str, part: str, resized_crop: bool, has_edges: bool, config: Callable[..., Config], photographs: Path
) -> None:
    """Whole images or random windows: order, labels, window and flip equal."""
    results, changes = [], {"rnd_resized_crop": resized_crop, "image_size": 48, "data_path": str(photographs)}
    for backend in ("torchvision", "dali"):
        loader = getattr(build(config(dataset, data_loader=backend, **changes)), part)
        results.append(everything(loader, epoch=1))
    (expected, expected_labels), (images, labels) = results
    assert torch.equal(labels, expected_labels)
    allowed = torch.full((48, 48), float(INNER_LEVELS))
    if has_edges:
        allowed[[0, -1]] = allowed[:, [0, -1]] = EDGE_LEVELS
        allowed[[0, 0, -1, -1], [0, -1, 0, -1]] = CORNER_LEVELS
    levels = (images - expected).abs() * 255 * torch.tensor(loader.normalise.std)[:, None, None]
    assert (levels <= allowed).all()
    assert bool(levels.max() > INNER_LEVELS) == has_edges


@pytest.fixture(scope="module")
def photographs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Images with the spectrum of photographs, 1/f, and full contrast, and a PNG of one bit in each class and split."""
    root, rng = tmp_path_factory.mktemp("photographs"), np.random.default_rng(0)
    for split, name, number in itertools.product(("train", "val"), CLASSES, range(NUM_TRAIN)):
        height, width = rng.integers(60, 400, 2)
        frequency = np.hypot(np.fft.fftfreq(height)[:, None], np.fft.fftfreq(width)) + 1 / 400
        spectrum = np.fft.fft2(rng.normal(size=(3, height, width))) / frequency
        pixels = np.fft.ifft2(spectrum).real
        pixels = np.clip(127 + 80 * pixels / pixels.std(), 0, 255).astype(np.uint8).transpose(1, 2, 0)
        image, folder = Image.fromarray(pixels), root / split / name
        folder.mkdir(parents=True, exist_ok=True)
        if number:
            image.save(folder / f"{number}.jpg", quality=90)
        else:
            image.convert("1").save(folder / "0.png")
    return root


# ---- damaged data


@pytest.fixture
def damaged(made: Path, tmp_path: Path) -> Path:
    """A truncated training image, a text file as a training image, and a truncated validation image."""
    folder = tmp_path / "damaged"
    shutil.copytree(made / "large", folder)
    for name in ("train/ant/1.JPEG", "val/cat/0.JPEG"):
        path = folder / name
        path.write_bytes(path.read_bytes()[:300])
    (folder / "train/cat/7.JPEG").write_text("no image")
    return folder


@needs_dali
@pytest.mark.dali
@pytest.mark.parametrize("failing", [1, 2])
def test_a_failure_that_dali_reports_one_batch_early_changes_nothing(
    failing: int, config: Callable[..., Config], monkeypatch: pytest.MonkeyPatch
) -> None:
    """DALI works ahead: the damage it reports may be in the batch after the requested one."""
    chosen = config("imagenet", data_loader="dali", rnd_resized_crop=False)
    expected = everything(build(chosen).train)
    receive, calls = DaliLoader._receive, 0

    def fail_once(self: DaliLoader, pipeline: Any) -> torch.Tensor:
        nonlocal calls
        calls += 1
        if calls == failing:
            raise DaliFailure("reported early")
        return receive(self, pipeline)

    monkeypatch.setattr(DaliLoader, "_receive", fail_once)
    images, labels = everything(build(chosen).train)
    assert calls > failing and torch.equal(labels, expected[1])
    levels = (images - expected[0]).abs() * 255 * 0.225
    assert levels.max() < INNER_LEVELS


@needs_dali
@pytest.mark.dali
def test_dali_that_fails_without_damaged_data_is_an_error(
    config: Callable[..., Config], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(self: DaliLoader, pipeline: Any) -> torch.Tensor:
        raise DaliFailure("out of memory")

    monkeypatch.setattr(DaliLoader, "_receive", fail)
    with pytest.raises(DataError, match=r"DALI failed: out of memory\nuse --set data_loader=torchvision"):
        everything(build(config("imagenet", data_loader="dali")).train)


@pytest.mark.parametrize("backend", ["torchvision", "device", DALI])
def test_unreadable_images_are_named_listed_and_skipped(
    backend: str, config: Callable[..., Config], damaged: Path, one_rank: World, tmp_path: Path
) -> None:
    chosen = config("imagenet", data_path=str(damaged), data_loader=backend, rnd_resized_crop=False, num_data_workers=1)
    built = build(chosen)
    images, labels = everything(built.train)
    assert len(images) == 3 * NUM_TRAIN  # batches stay whole: the next image replaces an unreadable one
    reference = build(config("imagenet", data_path=str(damaged), rnd_resized_crop=False))
    assert torch.equal(labels, everything(reference.train)[1])
    _, labels = everything(built.valid)
    assert np.bincount(labels.tolist()).tolist() == [NUM_VALID, NUM_VALID, NUM_VALID - 1]
    listed = tmp_path / "unreadable.txt"
    (line,) = report_unreadable(one_rank, built.every(), tmp_path)
    assert "train/ant/1.JPEG and 2 more" in line and str(listed) in line
    names = [row.split("\t")[0] for row in listed.read_text().splitlines()]
    assert names == [str(damaged / name) for name in ("train/ant/1.JPEG", "train/cat/7.JPEG", "val/cat/0.JPEG")]
    assert report_unreadable(one_rank, built.every(), tmp_path) == []  # nothing new


def test_a_stop_lists_the_images_that_were_unreadable_so_far(
    config: Callable[..., Config], damaged: Path, one_rank: World, tmp_path: Path
) -> None:
    """The next start does not read them again."""
    chosen = config("imagenet", data_path=str(damaged), batch_size=3 * NUM_TRAIN, num_data_workers=0)
    trainer = Trainer(chosen, one_rank, tmp_path, "damaged", "auto")
    trainer.requests.signal = signal.SIGTERM
    with pytest.raises(Stopped, match="after its last batch"):
        trainer.train()
    assert "train/ant/1.JPEG" in (tmp_path / "unreadable.txt").read_text()


def test_the_next_image_replaces_an_unreadable_one(
    config: Callable[..., Config], damaged: Path, one_rank: World
) -> None:
    train = open_dataset(config("imagenet", data_path=str(damaged)), one_rank).train
    shown = train.read(np.array([0, 1, 2, 3 * NUM_TRAIN - 1]), None, replace=True).indices
    assert shown.tolist() == [0, 2, 2, 0]


def test_the_list_keeps_entries_of_earlier_starts_and_the_bytes_of_names(
    config: Callable[..., Config], one_rank: World, tmp_path: Path
) -> None:
    (tmp_path / "unreadable.txt").write_bytes(b"/earlier\xff.jpg\tcut\n")
    built = build(config("imagefolder"))
    built.valid.unreadable = {os.fsdecode(b"/a\xe9\nb.jpg"): "cut"}
    (line,) = report_unreadable(one_rank, built.every(), tmp_path)
    assert line.isprintable() and "/a\\xe9" in line
    assert (tmp_path / "unreadable.txt").read_bytes() == b"/a\xe9\\nb.jpg\tcut\n/earlier\xff.jpg\tcut\n"


@pytest.mark.parametrize("backend", ["torchvision", "device", DALI])
def test_names_that_are_not_utf8(
    backend: str, config: Callable[..., Config], made: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Names of a class, an image and an unreadable image; also a validation batch without a readable image."""
    shutil.copytree(made / "small", tmp_path / "data")
    for split in ("train", "val"):
        folder = os.fsencode(tmp_path / "data" / split)
        os.rename(folder + b"/ant", folder + b"/\xe9")
        os.rename(folder + b"/\xe9/0.png", folder + b"/\xe9/\xff.png")
        Path(os.fsdecode(folder + b"/\xe9/\xfe.png")).write_text("no image")
    chosen = config(
        "imagefolder", data_path=str(tmp_path / "data"), data_loader=backend, max_epochs=1, valid_batch_size_per_gpu=1
    )
    assert main(Arguments(chosen, "default", tmp_path / "run", "auto", dry_run=False)) == 0
    assert "train/\\xe9/\\xfe.png and 1 more (not an image" in capsys.readouterr().out
    assert b"train/\xe9/\xfe.png\t" in (tmp_path / "run/unreadable.txt").read_bytes()


def test_the_size_is_the_median_of_a_sample(config: Callable[..., Config], made: Path, tmp_path: Path) -> None:
    shutil.copytree(made / "large", tmp_path / "data")
    write_image(tmp_path / "data/train/ant/!first.png", 0, 1, 1)
    (tmp_path / "data/train/ant/!second.png").write_text("no image")
    built = build(config("imagefolder", data_path=str(tmp_path / "data")))
    sides = sorted([1] + 3 * [min(70 + 9 * number, 110 - 5 * number) for number in range(NUM_TRAIN)])
    assert everything(built.valid)[0].shape[2:] == (sides[len(sides) // 2],) * 2
    assert (
        f"image_size: {sides[len(sides) // 2]}, the median of 25 training images' shorter sides, which are 1 to"
        in (built.notes[0])
    )


def test_a_tiny_size_must_be_set(config: Callable[..., Config], tmp_path: Path) -> None:
    for split in ("train", "val"):
        for name in CLASSES:
            write_image(tmp_path / split / name / "x.png", 0, 5, 7)
    with pytest.raises(DataError, match=r"5 pixels .* suspiciously small; if intended, set image_size"):
        build(config("imagefolder", data_path=str(tmp_path), batch_size=3))
    built = build(config("imagefolder", data_path=str(tmp_path), batch_size=3, image_size=5))
    assert everything(built.valid)[0].shape == (3, 3, 5, 5)


def test_a_validation_batch_without_a_readable_image_is_empty(config: Callable[..., Config], damaged: Path) -> None:
    built = build(config("imagenet", data_path=str(damaged), valid_batch_size_per_gpu=1))
    sizes = [len(labels) for _, labels in built.valid]
    assert sorted(sizes) == [0] + [1] * (3 * NUM_VALID - 1)


def empty_class(folder: Path) -> None:
    for path in (folder / "train/ant").iterdir():
        path.unlink()


DAMAGES: dict[str, tuple[Callable[[Path], None], str]] = {
    "class folder without images": (empty_class, "train/ant: class folder without images"),
    "no val": (lambda folder: shutil.rmtree(folder / "val"), "val: cannot be read: No such file"),
    "a class in train only": (
        lambda folder: shutil.rmtree(folder / "val/cat"),
        "different classes, for example 'cat'",
    ),
    "a class in val only": (
        lambda folder: shutil.rmtree(folder / "train/cat"),
        "different classes, for example 'cat'",
    ),
    "no classes": (lambda folder: [shutil.rmtree(path) for path in (folder / "train").iterdir()], "no class folders"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_wrong_folders_are_named(
    damage: str, config: Callable[..., Config], made: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    break_it, message = DAMAGES[damage]
    shutil.copytree(made / "small", tmp_path / "data")
    break_it(tmp_path / "data")
    chosen = config("imagefolder", data_path=str(tmp_path / "data"))
    assert main(Arguments(chosen, "default", tmp_path / "run", "auto", dry_run=False)) == 3
    assert message in capsys.readouterr().err


def test_an_unreadable_class_folder_is_named(
    config: Callable[..., Config], one_rank: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    scandir = os.scandir

    def refuse(folder: Path) -> Any:
        if Path(folder).name == "cat":
            raise PermissionError(errno.EACCES, "Permission denied", str(folder))
        return scandir(folder)

    monkeypatch.setattr(os, "scandir", refuse)
    with pytest.raises(DataError, match="train/cat: cannot be read: Permission denied"):
        open_dataset(config("imagefolder"), one_rank)


def test_validation_images_that_are_all_unreadable(
    config: Callable[..., Config], made: Path, one_rank: World, tmp_path: Path
) -> None:
    shutil.copytree(made / "small", tmp_path / "data")
    for path in (tmp_path / "data/val").rglob("*.png"):
        path.write_text("no image")
    sums = MetricSums(one_rank.device)
    for _, labels in build(config("imagenet", data_path=str(tmp_path / "data"))).valid:
        sums.add(torch.tensor(torch.nan), torch.zeros(len(labels), len(CLASSES)), labels)
    with pytest.raises(DataError, match="not one image can be read"):
        sums.average(one_rank)


def test_all_images_unreadable(config: Callable[..., Config], made: Path, tmp_path: Path) -> None:
    shutil.copytree(made / "small", tmp_path / "data")
    for path in (tmp_path / "data/train").rglob("*.png"):
        path.write_text("no image")
    with pytest.raises(DataError, match="not one of"):
        build(config("imagefolder", image_size=32, data_path=str(tmp_path / "data")))
    built = build(config("imagenet", data_path=str(tmp_path / "data")))
    with pytest.raises(DataError, match="not one training image can be read"):
        next(iter(built.train))
    with pytest.raises(DataError, match="not one of"):
        device_loader.decode_all(
            open_dataset(config("imagenet", data_path=str(tmp_path / "data")), pretend()).train, replace=True
        )


def test_folders_that_disappear_are_searched_once(
    config: Callable[..., Config], made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not once for each image of a batch: of ImageNet that would take hours."""
    shutil.copytree(made / "small", tmp_path / "data")
    train = open_dataset(config("imagenet", data_path=str(tmp_path / "data")), pretend()).train
    tried: list[int] = []
    monkeypatch.setattr(type(train), "content", lambda self, index: tried.append(index) or Path("gone").read_bytes())
    read = train.read(np.array([1, 2, 3]), None, replace=True)
    assert len(read.samples) == 0 and sorted(tried) == list(range(len(train.labels)))


def test_the_loader_device_refuses_to_train_on_a_part_of_the_images(
    config: Callable[..., Config], made: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The folders disappear while they are read."""
    train = open_dataset(config("imagenet", data_path=str(made / "small")), pretend()).train
    count, good = len(train.labels), Path(train.path(0)).read_bytes()
    left = [good, *[b""] * (count * count)]
    monkeypatch.setattr(type(train), "content", lambda self, index: left.pop(0))
    with pytest.raises(DataError, match=f"only 1 of {count} images can be read or replaced"):
        device_loader.decode_all(train, replace=True)


def test_data_that_do_not_fit_the_configuration(config: Callable[..., Config]) -> None:
    with pytest.raises(ConfigError, match="num_classes=3"):
        build(config("imagefolder", num_classes=10))
    with pytest.raises(ConfigError, match="rnd_resized_crop needs"):
        build(config("imagenet", data_loader="device"))


# ---- 224 pixels


@pytest.mark.parametrize("backend", ["torchvision", "synthetic", DALI])
def test_train_on_imagenets_layout(backend: str, config: Callable[..., Config], tmp_path: Path) -> None:
    changes = {"num_classes": 3} if backend != "synthetic" else {"limit_train_batches": 2, "limit_valid_batches": 1}
    chosen = config("imagenet", data_loader=backend, max_epochs=1, **changes)
    assert main(Arguments(chosen, "default", tmp_path, "auto", dry_run=False)) == 0
    assert main(Arguments(chosen, "default", tmp_path, "auto", dry_run=True)) == 0
