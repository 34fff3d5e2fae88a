"""examples/search.py: trials within the space, continued by the same call."""

from importlib import util
from unittest.mock import Mock

import pytest

from tests.conftest import ROOT, TINY
from utils.errors import ExpectedError


def test_a_search_continues_until_it_has_its_trials(tmp_path, monkeypatch):
    pytest.importorskip("optuna", reason="Optuna is not installed")
    specification = util.spec_from_file_location("search_example", ROOT / "examples/search.py")
    example = util.module_from_spec(specification)
    specification.loader.exec_module(example)
    short = {"max_epochs": 1, "limit_train_batches": 1, "holdout_images": 50, "width": 1, "test_time_views": 1}
    settings = TINY | short | {"log_to_screen": False}
    del settings["batch_size"]
    train = example.train
    monkeypatch.setattr(example, "train", Mock(side_effect=ExpectedError("broke down")))
    assert [trial.state.name for trial in example.search(tmp_path, 1, **settings).trials] == ["PRUNED"]
    monkeypatch.setattr(example, "train", Mock(side_effect=KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        example.search(tmp_path, 2, **settings)
    monkeypatch.setattr(example, "train", train)
    trials = example.search(tmp_path, 3, **settings).trials
    assert [trial.state.name for trial in trials] == ["PRUNED", "FAIL", "COMPLETE", "COMPLETE"]
    assert len({trial.params["lr"] for trial in trials}) == 4
    assert all(0.01 <= trial.params["lr"] <= 0.1 and trial.params["batch_size"] in (64, 128, 256) for trial in trials)
