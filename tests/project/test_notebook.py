"""examples/notebook.ipynb: its cells run, in order, and it holds no outputs. Needs no Jupyter."""

import json
import sys
from functools import partial
from types import ModuleType

import pytest

import api
from tests.conftest import ROOT
from tools.bench import common
from tools.bench.common import measure

CELLS = json.loads((ROOT / "examples/notebook.ipynb").read_text("utf-8"))["cells"]
CODE = [cell for cell in CELLS if cell["cell_type"] == "code"]
SMALL = {"max_epochs": 2, "limit_train_batches": 3, "limit_valid_batches": 2, "lr_warmup_epochs": 1}


@pytest.mark.parametrize("changes", [SMALL, pytest.param({}, marks=pytest.mark.slow)], ids=["small", "as it stands"])
def test_the_cells_run(changes, tmp_path, monkeypatch):
    pytest.importorskip("matplotlib").use("Agg")
    installed = ModuleType("resnet50_at_scale")
    if changes:
        monkeypatch.setattr(api, "train", partial(api.train, **changes))
        monkeypatch.setattr(common, "measure", lambda cases, trials: measure(cases, 1, warm_up=0))
    monkeypatch.setitem(sys.modules, "resnet50_at_scale", installed)
    monkeypatch.setitem(sys.modules, "resnet50_at_scale.api", api)
    monkeypatch.chdir(tmp_path)
    names = {}
    for cell in CODE:
        exec("".join(cell["source"]), names)
    assert [line.get_label() for line in names["axes"].get_lines()] == ["train", "valid"]
    assert set(names["speeds"]) == {"plain", "enable_nhwc", "enable_amp"}
    if not changes:
        assert names["run"].metrics["best_acc1"] > 0.9 and names["predicted"] == "disc"


def test_it_is_small_and_holds_no_outputs():
    assert len(CELLS) <= 10
    assert not any(cell["outputs"] or cell["execution_count"] for cell in CODE)
