"""`holdout_images`: which images are held out, for every kind of data, and the single test at the end."""

import json
import signal

import numpy as np
import pytest

from tests.conftest import read_records, run, without_times
from tools import evaluate
from train import Trainer
from utils.data.build import build_loaders, find_dataset
from utils.data.datasets.dataset import ImageArrays, stratified_split
from utils.data.datasets.image_files import ImageFiles
from utils.data.datasets.shards import ShardedImages
from utils.data.sampling import Sampler
from utils.errors import ConfigError, Stopped


@pytest.mark.parametrize("sizes", [(50, 50, 50), (100, 10, 40), (97, 1, 0, 3)])
def test_the_split_is_stratified(sizes):
    labels = np.random.default_rng(1).permutation(np.repeat(np.arange(len(sizes)), sizes))
    for number in (1, 10, 30, 50):
        kept, held = stratified_split(labels, number)
        assert len(held) == number
        assert np.array_equal(np.sort(np.concatenate([kept, held])), np.arange(len(labels)))
        counts = np.bincount(labels[held], minlength=len(sizes))
        assert np.abs(counts - number * np.array(sizes) / len(labels)).max() <= 1
    smaller, larger = stratified_split(labels, 10)[1], stratified_split(labels, 30)[1]
    assert set(smaller) < set(larger)
    places = np.flatnonzero(np.isin(np.flatnonzero(labels == 0), larger))
    assert 0 < len(places) < places[-1] + 1 < sizes[0], "neither the first nor the last of a class"


@pytest.mark.parametrize("kind", [ImageArrays, ImageFiles, ShardedImages])
def test_no_image_is_lost(kind, folders, packed, tiny):
    """Runs with other seeds hold out the same images."""
    config = tiny()
    if kind is not ImageArrays:
        folder = folders if kind is ImageFiles else packed
        config = tiny(dataset="imagefolder", data_path=str(folder), image_size=16, num_classes=3, batch_size=4)
    whole = find_dataset(config, download=False)
    divided = find_dataset(config.model_copy(update={"holdout_images": 6, "seed": 3}), download=False)
    kept, held = stratified_split(whole.train.labels, 6)
    for part, indices in ((divided.train, kept), (divided.valid, held)):
        assert isinstance(part, kind) and part.labels.tolist() == whole.train.labels[indices].tolist()
        shown = part.read(np.arange(len(indices)), None, replace=False).samples
        assert np.array_equal(shown, whole.train.read(indices, None, replace=False).samples)
    assert np.array_equal(divided.test.labels, whole.valid.labels) and whole.test is None
    assert [getattr(divided, name) == getattr(whole, name) for name in ("mean", "std", "fingerprint")] == [True] * 3


@pytest.mark.parametrize(("number", "message"), [(10_000, "10000 training images; expected fewer"), (9_990, "exceeds")])
def test_too_many_are_refused(number, message, tiny, one_rank):
    config = tiny(holdout_images=number)
    with pytest.raises(ConfigError, match=message):
        build_loaders(config, find_dataset(config, download=False), one_rank)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("limit", [None, 2])
def test_shared_batches_are_the_batches_of_the_rank_with_the_fewest(training, limit):
    for num_samples in range(1, 40):
        plans = [Sampler(num_samples, 3, rank, 4, training, limit=limit) for rank in range(4)]
        assert {plan.shared_batches for plan in plans} == {min(map(len, plans))}
        assert not training or len(plans[0]) == min(num_samples // 12, limit or num_samples)


def last_records(folder):
    return {record["kind"]: record for record in read_records(folder)}


HELD = {"holdout_images": 500, "limit_valid_batches": 5, "ema_decay": 0.7}  # batches of 100 images; a test has all


def on_evaluation(monkeypatch, action):
    """Call `action` with the trainer and the name before each evaluation."""
    evaluate_one = Trainer._evaluate
    monkeypatch.setattr(Trainer, "_evaluate", lambda *args: (action(*args[:2]), evaluate_one(*args))[1])


def test_the_test_images_are_read_once_at_the_end_and_evaluate_reads_them_again(tiny, one_rank, tmp_path, monkeypatch):
    asked = []
    on_evaluation(monkeypatch, lambda trainer, name: asked.append(name))
    last = last_records(run(tiny(**HELD), one_rank, tmp_path / "run").run.folder)
    assert asked == ["validation", "validation", "test"]
    assert (last["epoch"]["images/valid"], last["end"]["test_images"]) == (500, 2_000)
    assert last["end"]["clock_seconds"]["test"] > 0  # which is no training time
    assert f"test acc1 {last['end']['test_acc1']:.2%}" in (tmp_path / "run/train.log").read_text()
    for arguments, record, accuracy in (([], "epoch", "acc1/valid"), (["--test"], "end", "test_acc1")):
        figures = tmp_path / "figures.json"
        assert evaluate.main([str(tmp_path / "run"), "--json", str(figures), *arguments]) == 0
        found = json.loads(figures.read_text())
        assert found["acc1"] == last[record][accuracy]
        assert found["recorded"] == {"acc1": found["acc1"], "loss": found["loss"]}


def test_without_held_out_images_nothing_is_tested(finished, capsys):
    assert "test_acc1" not in last_records(finished)["end"]
    assert evaluate.main([str(finished), "--test"]) == 2
    assert "the run held out no images" in capsys.readouterr().err


def test_a_run_stopped_in_the_test_resumes_to_the_same_figures(tiny, one_rank, tmp_path, monkeypatch):
    config = tiny(**HELD, stop_at_accuracy=0.01)  # reached in the first of two epochs
    whole = last_records(run(config, one_rank, tmp_path / "whole").run.folder)

    def stop_in_the_test(trainer, name):
        trainer.requests.signal = signal.SIGUSR1 if name == "test" else 0

    with monkeypatch.context() as patch, pytest.raises(Stopped, match="after its last batch"):
        on_evaluation(patch, stop_in_the_test)
        run(config, one_rank, tmp_path / "parts")
    assert "end" not in last_records(tmp_path / "parts")
    parts = last_records(run(config, one_rank, tmp_path / "parts").run.folder)
    for kind in ("epoch", "end"):
        assert without_times([parts[kind]]) == without_times([whole[kind]])
