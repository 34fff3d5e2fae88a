"""`dataset: imagefolder` and `imagenet`: class folders through every loader."""

import errno
import os
import shutil
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image
from torchvision.datasets import ImageFolder
from torchvision.transforms import functional

from tests import tiny_shards
from tests.tiny_shards import CLASSES, DALI, NUM_TRAIN, NUM_VALID, build, everything, make_folders
from train import main
from utils.config.command_line import Arguments
from utils.data import loader
from utils.data.build import open_dataset
from utils.data.config import AugmentationConfig
from utils.data.datasets import image_files
from utils.data.datasets.folders import find_images
from utils.data.datasets.image_files import ImageFiles, cut_centre, spaced
from utils.data.loader import gather_unreadable, report_unreadable
from utils.data.sampling import resized_crop_box, sample_augmentation
from utils.distributed.world import World
from utils.errors import ConfigError, DataError

DECODING = pytest.mark.parametrize("backend", ["torchvision", "device", DALI])
PNG = tiny_shards.encode("PNG", tiny_shards.picture(width=8, height=8))
# of 255, maximum difference between DALI and PIL: of decoding and resizing, of the outermost pixels, of corners
INNER_LEVELS, EDGE_LEVELS, CORNER_LEVELS = 2, 32, 60


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    return make_folders(tmp_path_factory.mktemp("small"), size=32, extension=".png")


@pytest.fixture
def copy(small, tmp_path):
    return Path(shutil.copytree(small, tmp_path / "data"))


@pytest.fixture
def config(tiny, small, folders):
    def make(dataset, **changes):
        base = tiny_shards.SETTINGS | {"dataset": dataset, "data_path": str(small)}
        if dataset == "imagenet":
            base |= tiny_shards.IMAGENET | {"model": "resnet18", "stem": "imagenet", "data_path": str(folders)}
        return tiny(**base | {name: str(value) if name == "data_path" else value for name, value in changes.items()})

    return make


def test_classes_sizes_and_statistics_come_from_the_data(config, one_rank, monkeypatch):
    """Mean and deviation from all images if they are few, else from evenly spaced ones, the first and the last too."""
    assert spaced(5).tolist() == [0, 1, 2, 3, 4] and len(spaced(10_000)) == 512 and spaced(10_000)[-1] == 9_999
    for most, indices in ((512, range(24)), (4, (0, 7, 15, 23))):
        monkeypatch.setattr(image_files, "SAMPLED_IMAGES", most)
        dataset = open_dataset(config("imagefolder"), one_rank)
        images = dataset.train.read(np.array(indices), None, replace=False).samples
        np.testing.assert_allclose(dataset.mean, images.mean((0, 2, 3)) / 255, rtol=1e-9)
        np.testing.assert_allclose(dataset.std, images.std((0, 2, 3)) / 255, rtol=1e-9)
    assert dataset.class_names == CLASSES
    assert dataset.train.image_shape == dataset.valid.image_shape == (3, 32, 32)
    assert np.bincount(dataset.train.labels).tolist() == [NUM_TRAIN] * 3
    imagenet = open_dataset(config("imagenet", image_size=None), one_rank)
    assert imagenet.train.image_shape == (3, 224, 224)
    assert (imagenet.mean, imagenet.std) == ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))


def test_folders_within_classes_are_read_as_by_imagefolder(config, copy, one_rank):
    for split in ("train", "val"):
        for name in ("a/deep/9.png", "a b/1.png", "folder.png/0.png", "linked/2.png"):
            tiny_shards.write_image(copy / split / "cat" / name, 0, 32, 32)
        (copy / split / "cat/again").symlink_to("linked")
        (copy / split / "cat/notes.txt").write_text("no image")
        tiny_shards.write_image(copy / split / ".thumbnails/0.png", 0, 32, 32)  # hidden: no class
    dataset = open_dataset(config("imagefolder", data_path=copy), one_rank)
    for ours, split in ((dataset.train, "train"), (dataset.valid, "val")):
        paths = [ours.path(index) for index in range(len(ours.labels))]
        is_ours = lambda path: path.endswith(".png") and "thumbnails" not in path  # noqa: E731
        reference = ImageFolder(copy / split, is_valid_file=is_ours, allow_empty=True)
        labels = [label - 1 for _, label in reference.samples]  # its first class is .thumbnails
        assert paths == [path for path, _ in reference.samples] and ours.labels.tolist() == labels
        assert find_images([copy / split], CLASSES, 32, 1.0).labels.tolist() == ours.labels.tolist()


def test_a_node_with_other_images_is_refused(config, one_rank, monkeypatch):
    """Rank 1 has other images, then other statistics only."""
    monkeypatch.setattr(World, "all_gather", lambda world, found: [found, found | {"fingerprint": "other"}])
    message = "dataset imagefolder: has other data on rank 1 than on rank 0; copy the same files to each node"
    with pytest.raises(DataError, match=message):
        open_dataset(config("imagefolder"), one_rank)
    other = {"mean": (0.1, 0.2, 0.3), "std": (0.4, 0.5, 0.6)}
    monkeypatch.setattr(World, "all_gather", lambda world, found: [found | other, found])
    dataset = open_dataset(config("imagefolder"), one_rank)
    assert (dataset.mean, dataset.std) == (other["mean"], other["std"])


def test_images_are_resized_and_cut_as_by_torchvision(config):
    """A random window in training, the window and the flip of the plan; the central square in validation."""
    built = build(config("imagenet"))
    loader, indices = built.train, np.concatenate(built.train.sampler.batches(3))
    images, labels = everything(loader, epoch=3)
    sampled, split = loader.sampler.sample_augmentation(3, indices), loader.loader.dataset.split
    for row, index in enumerate(indices.tolist()):
        image = Image.open(split.path(index))
        top, left, height, width = resized_crop_box(sampled.crop[row], image.height, image.width)
        expected = functional.resized_crop(image, top, left, height, width, [48, 48])
        expected = functional.hflip(expected) if sampled.flip[row] else expected
        assert torch.equal(images[row : row + 1], loader.normalise(functional.pil_to_tensor(expected)[None]))
        assert labels[row] == index // NUM_TRAIN
    split = built.valid.loader.dataset.split
    for index, image in enumerate(everything(built.valid)[0]):
        expected = functional.center_crop(functional.resize(Image.open(split.path(index)), 55), 48)  # 48 / 0.875
        assert torch.equal(image[None], loader.normalise(functional.pil_to_tensor(expected)[None]))


@pytest.mark.parametrize("size", [(48, 768), (768, 48), (31, 200), (60, 50)])
def test_the_central_square_is_that_of_torchvision_also_of_tall_and_wide_images(size):
    image = Image.effect_noise(size, 90).convert("RGB")
    for side, fraction in ((48, 0.875), (32, 1.0)):
        expected = functional.center_crop(functional.resize(image, round(side / fraction)), side)
        assert np.array_equal(cut_centre(image, side, fraction), functional.pil_to_tensor(expected).numpy())


def test_windows_have_the_area_and_aspect_ratio_of_torchvision():
    number, height, width = 10_000, 300, 400
    crop = sample_augmentation(AugmentationConfig(rnd_resized_crop=True), 1, 2, np.arange(number)).crop
    boxes = np.array([resized_crop_box(sampled, height, width) for sampled in crop])
    bottom_right = boxes[:, :2] + boxes[:, 2:]
    assert (boxes[:, :2] >= 0).all() and tuple(bottom_right.max(0)) == (height, width)  # to the last row and column
    area, ratio = boxes[:, 2] * boxes[:, 3] / (height * width), boxes[:, 3] / boxes[:, 2]
    assert 0.079 < area.min() < 0.1 and 0.95 < area.max() <= 1
    assert 0.74 < ratio.min() < 0.76 and 1.32 < ratio.max() < 1.35
    # equally often wide and high, if both fit; the standard deviation of one sample is a sixth
    square = np.array([resized_crop_box(sampled, 1000, 1000)[2:] for sampled in crop])
    assert abs(np.log(square[:, 1] / square[:, 0]).mean()) < 6 / 6 / number**0.5
    # a window as wide as the image fits; if none fits, it is the largest central one
    fits = [resized_crop_box(np.array([[0.42 / 0.92, 0.5, 0.9, 0.9]]), *size) for size in ((200, 100), (100, 200))]
    assert fits == [(90, 0, 100, 100), (0, 90, 100, 100)]
    assert [resized_crop_box(crop[0], *size) for size in ((10, 400), (400, 9))] == [(0, 193, 10, 13), (194, 0, 12, 9)]


@tiny_shards.needs_dali
@pytest.mark.dali
@pytest.mark.parametrize(("part", "resized_crop"), [("train", False), ("train", True), ("valid", False)])
def test_dali_decodes_cuts_and_resizes_nearly_as_pil(part, resized_crop, config):
    """Whole images or random windows: order, labels, window and flip equal."""
    results = []
    for backend in ("torchvision", "dali"):
        loader = getattr(build(config("imagenet", data_loader=backend, rnd_resized_crop=resized_crop)), part)
        results.append(everything(loader, epoch=1))
    (expected, expected_labels), (images, labels) = results
    assert torch.equal(labels, expected_labels)
    allowed = torch.full((48, 48), float(INNER_LEVELS))
    if resized_crop:  # the window's edges are not the image's edges
        allowed[[0, -1]] = allowed[:, [0, -1]] = EDGE_LEVELS
        allowed[[0, 0, -1, -1], [0, -1, 0, -1]] = CORNER_LEVELS
    levels = (images - expected).abs() * 255 * torch.tensor(loader.normalise.std)[:, None, None]
    assert (levels <= allowed).all()


@pytest.fixture
def tolerant(monkeypatch):
    """A few images only: one of them is more than 1 %."""
    monkeypatch.setattr(loader, "MOST_UNREADABLE", 0.5)


@DECODING
def test_unreadable_images_are_named_listed_and_skipped(backend, config, folders, one_rank, tmp_path, tolerant):
    damaged = Path(shutil.copytree(folders, tmp_path / "damaged"))
    names = [str(damaged / name) for name in ("train/ant/1.JPEG", "train/cat/7.JPEG", "val/cat/0.JPEG")]
    for name in names:  # truncated
        os.truncate(name, 300)
    Path(names[1]).write_text("no image")
    chosen = {"data_path": damaged, "rnd_resized_crop": False}
    built = build(config("imagenet", data_loader=backend, num_data_workers=1, **chosen))
    _, labels = everything(built.train)
    assert np.bincount(labels.tolist()).tolist() == [NUM_TRAIN] * 3  # replaced within the class
    assert torch.equal(labels, everything(build(config("imagenet", **chosen)).train)[1])
    _, labels = everything(built.valid)
    assert np.bincount(labels.tolist()).tolist() == [NUM_VALID, NUM_VALID, NUM_VALID - 1]
    listed = tmp_path / "unreadable.txt"
    (line,) = report_unreadable(one_rank, built.every(), tmp_path)
    assert "train/ant/1.JPEG and 2 more" in line and str(listed) in line
    assert [row.split("\t")[0] for row in listed.read_text().splitlines()] == names
    assert report_unreadable(one_rank, built.every(), tmp_path) == []  # nothing new
    two = SimpleNamespace(all_gather=lambda found: [found, {"x": "cut"}])
    assert gather_unreadable(two, built.valid) == built.valid.unreadable | {"x": "cut"}


def many_files(count, bad, label_of=lambda index: 0):
    """Return a split in memory whose images `bad` are text, and the list of the indices that are read."""
    tried = []

    class Files(ImageFiles):
        def content(self, index):
            tried.append(index)
            return b"text" if index in bad else PNG

    labels = np.array([label_of(index) for index in range(count)])
    return Files(labels, 8, 1.0, Path("x"), np.array([b"%d" % index for index in range(count)])), tried


def test_unreadable_images_are_replaced_within_the_class_by_many_others_and_tried_once():
    split, tried = many_files(400, range(100), lambda index: index // 200)
    for _ in range(2):
        shown = split.read(np.arange(400), None, replace=True).indices
    assert shown[100:].tolist() == list(range(100, 400))
    assert all(100 <= index < 200 for index in shown[:100]) and np.bincount(shown[:100]).max() < 8
    assert all(tried.count(index) == 1 for index in range(100))
    arrays = loader.decode_all(many_files(600, (1, 599), lambda index: index)[0], replace=False)  # in two parts
    assert list(arrays.unreadable) == ["x/1", "x/599"] and arrays.labels.tolist() == [0, *range(2, 599)]
    with pytest.raises(DataError, match=r"a class without a readable training image: cannot .* x/0 and 99 more"):
        many_files(300, range(100), lambda index: index // 100)[0].read(np.array([5]), None, replace=True)


@pytest.mark.parametrize(("bad", "stops"), [(3, False), (4, True)])
@pytest.mark.parametrize("damaged", ["train", "val"])
def test_more_than_one_percent_of_unreadable_images_ends_the_run(bad, stops, damaged, config, one_rank, tmp_path):
    for split in ("train", "val"):
        for number in range(300):
            path = tmp_path / split / CLASSES[number % 3] / f"{number}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(b"text" if number < bad and split == damaged else PNG)
    built = build(config("imagefolder", data_path=tmp_path))
    with pytest.raises(DataError, match=r"more than 1%: cannot .*; all: ") if stops else nullcontext():
        everything(built.train)
        everything(built.valid)
        assert len(report_unreadable(one_rank, built.every(), tmp_path)) == 1
    assert (tmp_path / "unreadable.txt").read_text().count("\tnot an image") == bad


@pytest.mark.parametrize("passing", [OSError(errno.EIO, "x"), OSError("out of memory"), MemoryError(), TimeoutError()])
def test_a_passing_error_is_no_damage(passing, monkeypatch):
    """It is tried again; if it stays, the run ends with the file and the reason."""
    left, slept, (split, _) = [passing] * 2, [], many_files(3, ())
    monkeypatch.setattr(image_files.time, "sleep", slept.append)

    def content(self, index):
        if index == 1 and left:
            raise left.pop()
        return PNG

    monkeypatch.setattr(type(split), "content", content)
    assert split.read(np.arange(3), None, replace=True).indices.tolist() == [0, 1, 2] and slept == [0.5, 1]
    left += [passing] * 100
    with pytest.raises(DataError, match=r"x/1: cannot be read in 4 attempts: .*; "):
        split.read(np.arange(3), None, replace=True)
    assert not split.unreadable


@DECODING
def test_names_that_are_not_utf8(backend, config, copy, tmp_path, capsys, tolerant):
    """A class, an image, and an unreadable image that joins an earlier list; one validation batch holds only that."""
    for split in ("train", "val"):
        folder = os.fsencode(copy / split)
        os.rename(folder + b"/ant", folder + b"/\xe9")
        os.rename(folder + b"/\xe9/0.png", folder + b"/\xe9/\xff.png")
        Path(os.fsdecode(folder + b"/\xe9/\xfe\n.png")).write_text("no image")
    (tmp_path / "run").mkdir()
    (tmp_path / "run/unreadable.txt").write_bytes(b"/earlier\xff.jpg\tcut\n")
    chosen = config("imagefolder", data_path=copy, data_loader=backend, max_epochs=1, valid_batch_size_per_gpu=1)
    assert main(Arguments(chosen, "default", tmp_path / "run", "auto", dry_run=False)) == 0
    assert "train/\\xe9/\\xfe\\n.png and 1 more (not an image" in capsys.readouterr().out
    lines = (tmp_path / "run/unreadable.txt").read_bytes().split(b"\n")
    assert b"/earlier\xff.jpg\tcut" in lines and any(b"train/\xe9/\xfe\\n.png\t" in line for line in lines)


def test_the_size_is_the_median_of_a_sample(config, folders, tmp_path):
    data = Path(shutil.copytree(folders, tmp_path / "data"))
    tiny_shards.write_image(data / "train/ant/!first.png", 0, 1, 1)
    (data / "train/ant/!second.png").write_text("no image")
    built = build(config("imagefolder", data_path=data))
    median = sorted([1] + 3 * [min(70 + 9 * number, 110 - 5 * number) for number in range(NUM_TRAIN)])[12]
    assert everything(built.valid)[0].shape[2:] == (median, median)
    assert f"image_size: {median}, the median of 25 training images' shorter sides, which are 1 to" in built.notes[0]


@pytest.mark.parametrize(("damage", "message"), [
    (lambda data: [path.unlink() for path in (data / "train/ant").iterdir()], "train/ant: class folder without images"),
    (lambda data: shutil.rmtree(data / "val"), "val: cannot be read: No such file"),
    (lambda data: shutil.rmtree(data / "val/cat"), "expected ones, for example 'cat'"),
    (lambda data: shutil.rmtree(data / "train/cat"), "expected ones, for example 'cat'"),
    (lambda data: [(data / f"train/{a}/x").symlink_to(f"../{b}") for a, b in (("ant", "cat"), ("cat", "ant"))],
     "train/ant/x/x: links back to"),
    (lambda data: [path.write_text("no image") for path in data.glob("val/*/*")], "not one image can be read"),
])  # fmt: skip
def test_wrong_folders_are_named(damage, message, config, copy, tmp_path, capsys):
    damage(copy)
    chosen = config("imagefolder", data_path=copy)
    assert main(Arguments(chosen, "default", tmp_path / "run", "auto", dry_run=False)) == 3
    assert message in capsys.readouterr().err


def test_a_class_folder_in_another_unicode_form_is_refused_as_such(tmp_path):
    (tmp_path / "be\u0301e").mkdir()
    with pytest.raises(DataError, match="some differ in their Unicode form only\nits classes are: ant, b\u00e9e"):
        find_images([tmp_path], ["ant", "b\u00e9e"], 8, 1.0)


def test_data_that_do_not_fit_the_configuration(config):
    build(config("imagefolder", batch_size=24))
    for problem, dataset, changes in (
        ("num_classes=3", "imagefolder", {"num_classes": 10}),
        ("exceeds the 24 training", "imagefolder", {"batch_size": 25}),
        ("rnd_resized_crop needs", "imagenet", {"data_loader": "device"}),
        ("rnd_resized_crop needs", "shapes", {"num_classes": 10, "rnd_resized_crop": True}),
    ):
        with pytest.raises(ConfigError, match=problem):
            build(config(dataset, **changes))


@pytest.mark.parametrize("backend", ["torchvision", "synthetic", DALI])
def test_train_on_imagenets_layout(backend, config, tmp_path):
    chosen = config("imagenet", data_loader=backend, max_epochs=1, limit_train_batches=2, limit_valid_batches=1)
    for dry_run in (False, True):
        assert main(Arguments(chosen, "default", tmp_path, "auto", dry_run=dry_run)) == 0
