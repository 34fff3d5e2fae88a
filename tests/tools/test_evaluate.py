"""tools.evaluate: reproduces the figures of a run exactly, and evaluates folders of images."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from PIL import Image

import api
import train
from tests.conftest import read_records, tiny_config
from tests.processes import complaints, run_job
from tools import evaluate
from tools.evaluate import Calibration, TopCounts, expected_calibration_error
from train import Trainer
from utils.config.command_line import Arguments
from utils.data import build
from utils.data.datasets.dataset import load_dataset, spread_over_classes
from utils.distributed.world import World
from utils.run.checkpoint import encode, read_checkpoint, step_path
from utils.training.metrics.confusion import worst_classes

BF16 = {"amp_dtype": "bf16", "batch_size": 8, "valid_batch_size_per_gpu": 12, "limit_train_batches": 2}  # bf16 is slow


def train_run(folder, **changes):
    config = tiny_config(**{"limit_train_batches": 10} | changes)
    Trainer(config, World(0, 0, 1, torch.device("cpu")), folder, "tiny", "auto").train()


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A finished run with all its checkpoints, validated on all 2,000 images."""
    folder = tmp_path_factory.mktemp("runs") / "tiny"
    train_run(folder, limit_valid_batches=None, checkpoint_every_steps=4, keep_checkpoints=100)
    return folder


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """The first 150 validation images in class folders, and one file that is not an image."""
    root = tmp_path_factory.mktemp("images")
    dataset = load_dataset("shapes", root, download=False)
    for number in spread_over_classes(dataset.valid.labels, 150):
        path = root / dataset.class_names[dataset.valid.labels[number]] / f"{number}.png"
        path.parent.mkdir(exist_ok=True)
        Image.fromarray(dataset.valid.images[number].transpose(1, 2, 0)).save(path)
    (root / dataset.class_names[0] / "no image.png").write_text("nothing")
    return root


def results(path, *arguments):
    file = (path.parent if path.is_file() else path) / "results.json"
    assert evaluate.main([*map(str, (path, *arguments)), "--json", str(file)]) == 0
    return json.loads(file.read_text())


@pytest.mark.parametrize("changes", [
    {"enable_amp": True, "enable_nhwc": True, "data_loader": "torchvision", **BF16},
    {"opt_level": "O2", **BF16}, {"ema_decay": 0.7, "test_time_views": 6},
    {"data_loader": "synthetic", "micro_batch_size": 8},
], ids=["bf16 autocast, NHWC", "bf16 weights", "average of weights", "synthetic"])  # fmt: skip
def test_evaluation_reproduces_the_figures_of_the_run(tmp_path, changes, capsys):
    train_run(tmp_path, **changes)
    (end,) = read_records(tmp_path, "end")
    capsys.readouterr()
    found = results(tmp_path)
    assert (found["acc1"], found["loss"]) == (end["last_acc1"], end["last_loss"])
    assert found["recorded"] == {"acc1": end["last_acc1"], "loss": end["last_loss"]}
    printed = capsys.readouterr().out
    assert "as recorded in training: equal to the last digit" in printed and f"{end['last_loss']!r}\n" in printed
    best = results(tmp_path / "checkpoints/best.pt")
    assert (best["acc1"], best["epoch"]) == (end["best_acc1"], end["best_epoch"])


def test_two_ranks_reproduce_their_run_and_one_rank_agrees_up_to_rounding(tmp_path):
    config = tiny_config(limit_valid_batches=None, ema_decay=0.9, max_epochs=1, limit_train_batches=6)
    arguments = Arguments(config, "tiny", tmp_path / "run", "auto", dry_run=False)
    assert [rank.status for rank in run_job(tmp_path / "training", 2, train.main, arguments)] == [0, 0]
    (end,) = read_records(tmp_path / "run", "end")
    command = [str(tmp_path / "run"), "--json", str(tmp_path / "two.json")]
    ended = run_job(tmp_path / "evaluation", 2, evaluate.main, command)
    assert [rank.status for rank in ended] == [0, 0] and complaints(ended) == []
    assert "equal to the last digit" in ended[0].output and not ended[1].output
    two, one = json.loads((tmp_path / "two.json").read_text()), results(tmp_path / "run")
    assert (two["acc1"], two["loss"], two["images"]) == (end["last_acc1"], end["last_loss"], 2000)
    assert all(one[name] == two[name] for name in ("acc1", "acc5", "confusion"))
    accuracies = {row["class"]: pytest.approx(row["accuracy"]) for row in two["classes"]}
    assert {row["class"]: row["accuracy"] for row in end["worst_classes"]} == accuracies
    for name in ("loss", "calibration_error"):
        assert one[name] == pytest.approx(two[name], rel=1e-6, abs=1e-6)


def test_within_an_epoch_the_ranks_batch_norm_statistics_are_averaged(run, tmp_path, capsys):
    path = run / "checkpoints/step-000000012.pt"
    state, expected = read_checkpoint(path), results(path)
    assert (expected["epoch"], expected["step"], expected["recorded"]) == (1, 12, None)
    before = results(path.with_name("step-000000010.pt"))["recorded"]
    assert before["loss"] == read_records(run, "epoch")[0]["loss/valid"]
    assert "after epoch 1, batch 2, step 12" in capsys.readouterr().out
    buffers = {name: value for name, value in state["model"].items() if name.endswith(("running_mean", "running_var"))}
    scaled = ({name: value * factor for name, value in buffers.items()} for factor in (0.5, 1.5))
    ranks = [state["ranks"][0] | {"buffers": values} for values in scaled]
    (tmp_path / "two.pt").write_bytes(encode(state | {"model": state["model"] | ranks[0]["buffers"], "ranks": ranks}))
    assert results(tmp_path / "two.pt")["loss"] == pytest.approx(expected["loss"], rel=1e-6)


def test_figures_match_the_confusion_matrix(run, capsys):
    found = results(run)
    printed = "".join(capsys.readouterr().out.split())
    assert api.evaluate(run) == found
    counts = np.array(found["confusion"])
    assert counts.sum() == found["images"] == 2000
    assert counts.trace() / 2000 == found["acc1"] <= found["acc5"] <= 1
    for row in found["classes"]:
        label = found["class_names"].index(row["class"])
        right, images, predicted = counts[label, label], counts[label].sum(), counts[:, label].sum()
        assert (row["images"], row["accuracy"]) == (images, right / images)
        assert row["precision"] == (right / predicted if predicted else None)
        precision = f"{right / predicted:.2%}" if predicted else "-"
        assert f"│{row['class']}│{images:,}│{right / images:.2%}│{precision}│" in printed
    wrong = counts - np.diag(counts.diagonal())
    number_of, rows = found["class_names"].index, found["mistakes"]
    assert all(counts[number_of(row["class"]), number_of(row["taken_for"])] == row["images"] for row in rows)
    assert [row["images"] for row in rows] == np.sort(wrong, axis=None)[::-1][:10].tolist()
    assert sum(part["images"] for part in found["bins"]) == 2000 and len(found["bins"]) == 15
    for part in (part for part in found["bins"] if part["images"]):
        assert f"{part['images']:,}│{part['confidence']:.2%}│{part['accuracy']:.2%}│" in printed
    worst = read_records(run, "end")[0]["worst_classes"][0]["class"]
    assert found["classes"][0]["class"] == worst and len(found["classes"]) == 10
    assert [row[0] for row in worst_classes(torch.eye(11), range(11))] == [*range(10)]


@pytest.mark.parametrize("loader", ["device", "torchvision"])
def test_a_folder_gives_the_same_figures_as_its_images_in_the_validation_set(run, folders, loader, capsys, monkeypatch):
    monkeypatch.setattr(evaluate, "TOP", 1)  # counted apart from acc1, which it replaces
    in_folders = results(run, "--data", folders, "--set", f"data_loader={loader}")
    own = results(run, "--set", "limit_valid_batches=1", "--set", "valid_batch_size_per_gpu=150")
    assert in_folders["images"] == own["images"] == 150 and in_folders["recorded"] is None
    assert in_folders["loss"] == pytest.approx(own["loss"], rel=1e-5)
    assert in_folders["confusion"] == own["confusion"]
    assert in_folders["acc1"] == np.trace(own["confusion"]) / 150
    assert list(in_folders["unreadable"]) == [str(folders / "disc/no image.png")]
    assert "1 files cannot be read and are skipped" in capsys.readouterr().out


def test_top_counts_and_calibration_equal_their_definitions(one_rank):
    outputs, labels = torch.randn(500, 7, generator=torch.Generator().manual_seed(0)) * 3, torch.arange(500) % 7
    top, calibration = TopCounts(3, one_rank.device), Calibration(one_rank.device, num_bins=10)
    for part in torch.arange(500).split([200, 0, 299, 1]):
        top.add(outputs[part], labels[part])
        calibration.add(outputs[part], labels[part])
    ranks = (outputs >= outputs.gather(1, labels[:, None])).sum(1)
    assert top.collect(one_rank) == (ranks <= 3).sum()
    confidence, predicted = outputs.double().softmax(1).max(1)
    expected = 0.0
    bins = calibration.collect(one_rank)
    for number, part in enumerate(bins):
        chosen = (confidence > number / 10) & (confidence <= (number + 1) / 10)
        assert part["images"] == chosen.sum()
        if part["images"]:
            accuracy = (predicted == labels)[chosen].double().mean()
            assert part["accuracy"] == pytest.approx(accuracy.item())
            expected += chosen.sum().item() / 500 * abs(accuracy - confidence[chosen].mean()).item()
    assert expected_calibration_error(bins) == pytest.approx(expected)
    border = Calibration(one_rank.device, num_bins=4)
    border.add(torch.zeros(1, 2), torch.zeros(1, dtype=torch.int64))  # confidence 0.5 is in (0.25, 0.5]
    border.add(torch.eye(2) * 1000, torch.arange(2))  # confidence 1
    assert [part["images"] for part in border.collect(one_rank)] == [0, 1, 0, 2]


@pytest.fixture
def refuses(capsys):
    """refuses(status, message, *arguments): the command ends with this status and message of one or two lines."""

    def check(status, message, *arguments):
        assert evaluate.main([str(argument) for argument in arguments]) == status
        error = capsys.readouterr().err
        assert error.startswith("error: ") and error.count("\n") <= 2 and message in error, error

    return check


def test_a_damaged_checkpoint_is_skipped_and_reported(tmp_path, run, refuses, capsys):
    (tmp_path / "checkpoints").mkdir()
    good = (run / "checkpoints/step-000000008.pt").read_bytes()
    step_path(tmp_path / "checkpoints", 8).write_bytes(good)
    step_path(tmp_path / "checkpoints", 12).write_bytes(good[:-100])
    assert results(tmp_path, "--set", "limit_valid_batches=1")["step"] == 8
    assert "skipped: " in capsys.readouterr().err
    step_path(tmp_path / "checkpoints", 8).write_bytes(good[:5000])
    refuses(4, "is damaged", tmp_path)


@pytest.mark.parametrize(("arguments", "status", "message"), [
    (["tests"], 4, "tests: holds no checkpoint of a step; give the folder of a run"),
    (["{run}", "--set", "model=resnet20"], 2, "--set model: cannot be changed after training; it was 'resnet8'"),
    (["{run}", "--set", "ema_decay=0.9"], 2, "--set ema_decay: cannot be changed after training; it was None"),
    (["{run}", "--json", "/proc/none/file"], 2, "--json /proc/none/file: cannot be written"),
    (["{run}", "--data", "{photos}/disc"], 3, "has images outside class folders; expected"),
    (["{run}", "--data", "{own}/unknown"], 3, "folders that are no classes of this run: zebra"),
    (["{run}", "--data", "{own}/broken"], 3, "not one of 1 images can be read"),
    (["{run}", "--data", "{own}/broken", "--set=data_loader=torchvision"], 3, "not one of 1 images can be read"),
])  # fmt: skip
def test_bad_usage(run, folders, refuses, tmp_path, arguments, status, message):
    for place in ("unknown/zebra", "broken/ring"):
        (tmp_path / place).mkdir(parents=True)
    (tmp_path / "broken/ring/no image.png").write_text("nothing")
    refuses(status, message, *(argument.format(run=run, photos=folders, own=tmp_path) for argument in arguments))


def test_all_images_of_a_folder_are_evaluated_and_classes_may_be_missing(tmp_path, folders):
    train_run(tmp_path / "run", limit_valid_batches=1, valid_batch_size_per_gpu=4, max_epochs=1)
    shutil.copytree(folders / "ring", tmp_path / "photos/ring")
    found = results(tmp_path / "run", "--data", tmp_path / "photos")
    assert found["images"] == len([*(folders / "ring").iterdir()]) > 4
    assert [row["class"] for row in found["classes"]] == ["ring"]
    assert api.evaluate(tmp_path / "run", tmp_path / "photos") == found
    limited = results(tmp_path / "run", "--data", tmp_path / "photos", "--set", "limit_valid_batches=1")
    assert limited["images"] == 4
    assert api.evaluate(tmp_path / "run", tmp_path / "photos", limit_valid_batches=1) == limited


def test_a_checkpoint_that_does_not_match_data_or_network(run, tmp_path, refuses):
    state = read_checkpoint(run / "checkpoints/best.pt")
    names, path = state["data"]["class_names"], tmp_path / "other.pt"
    twice = [*names[:-1], names[0]]
    for changes, status, message in (
        ({"data": state["data"] | {"class_names": names[:-1]}}, 3, "its 10 classes are not the 9 expected ones"),
        ({"data": state["data"] | {"class_names": twice}}, 3, f"class {names[0]!r} occurs twice"),
        ({"data": state["data"] | {"shape": (3, 64, 64)}}, 3, "its images are (3, 32, 32), the run's (3, 64, 64)"),
        ({"config": state["config"] | {"colour": 1}}, 4, "its configuration is of another version: 'colour"),
        ({"config": state["config"] | {"num_classes": 9}}, 4, "its tensors do not fit this network"),
    ):
        path.write_bytes(encode(state | changes))
        refuses(status, message, path)


def test_classes_in_another_order_are_matched_by_name(run, monkeypatch):
    """As in shards whose classes.json was rewritten."""
    expected, dataset = results(run), load_dataset("shapes", Path(), download=False)
    order = np.random.default_rng(0).permutation(10)
    names, valid = tuple(dataset.class_names[label] for label in order), dataset.valid
    reordered = replace(dataset, class_names=names, valid=replace(valid, labels=np.argsort(order)[valid.labels]))
    monkeypatch.setattr(build, "load_dataset", lambda *_, **__: reordered)
    found = results(run)
    assert (found["acc1"], found["confusion"]) == (expected["acc1"], expected["confusion"])


def test_outputs_that_are_not_finite_are_no_result(run, tmp_path, refuses):
    state = read_checkpoint(run / "checkpoints/best.pt")
    state["model"]["fc.bias"][0] = float("nan")
    (tmp_path / "bad.pt").write_bytes(encode(state))
    refuses(1, "not finite", tmp_path / "bad.pt", "--json", tmp_path / "bad.json")
    assert not (tmp_path / "bad.json").exists()


def test_ranks_wait_for_the_timeout_of_the_settings(run, monkeypatch):
    monkeypatch.setattr("tools.trained.run_ranks", ranks := Mock(return_value=7))
    assert evaluate.main([str(run), "--set=rank_timeout_seconds=77"]) == 7 and ranks.call_args.args[1:] == ("cpu", 77)
