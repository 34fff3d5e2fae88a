"""examples/notebook.ipynb: its cells run, in order, and it holds no outputs. Needs no Jupyter."""

import json
import subprocess
import sys
from functools import partial
from types import ModuleType

import pytest

import api
from tests.conftest import ROOT, contents, read_records
from tools.bench import common
from tools.bench.common import measure

CELLS = json.loads((ROOT / "examples/notebook.ipynb").read_text("utf-8"))["cells"]
CODE = [cell for cell in CELLS if cell["cell_type"] == "code"]
SMALL = {"max_epochs": 2, "limit_train_batches": 3, "limit_valid_batches": 2, "lr_warmup_epochs": 1}


@pytest.fixture
def run_cells(tmp_path, monkeypatch):
    """run_cells(): run the notebook in `tmp_path`; return its variables."""
    monkeypatch.setitem(sys.modules, "resnet50_at_scale", ModuleType("resnet50_at_scale"))
    monkeypatch.setitem(sys.modules, "resnet50_at_scale.api", api)
    monkeypatch.chdir(tmp_path)

    def run():
        pytest.importorskip("matplotlib").use("Agg")
        names = {}
        for cell in CODE:
            exec("".join(cell["source"]), names)
        assert [line.get_label() for line in names["axes"].get_lines()] == ["train", "valid"]
        assert set(names["speeds"]) == {"plain", "enable_nhwc", "enable_amp"}
        return names

    return run


def test_the_cells_run(run_cells, monkeypatch):
    monkeypatch.setattr(api, "train", partial(api.train, **SMALL))
    monkeypatch.setattr(common, "measure", lambda cases, trials: measure(cases, 1, warm_up=0))
    run_cells()


@pytest.mark.slow
def test_the_readmes_first_command_reaches_95_percent_and_the_cells_read_its_run(run_cells, tmp_path):
    command = (ROOT / "README.md").read_text("utf-8").partition("```bash\n")[2].partition("\n")[0]
    options = command.rpartition("/python train.py ")[2].split()
    assert options == ["--config=quickstart"]
    words = [sys.executable, ROOT / "train.py", *options]
    printed = subprocess.run(words, stdout=subprocess.PIPE, text=True, check=True).stdout
    assert "tensorboard --logdir expts" in printed
    (end,) = read_records(next((tmp_path / "expts").rglob("metrics.jsonl")).parent, "end")
    assert end["best_acc1"] >= 0.95
    trained, names = contents(tmp_path / "expts"), run_cells()
    assert contents(tmp_path / "expts") == trained
    assert names["run"].metrics["best_acc1"] == end["best_acc1"] and names["predicted"] == "disc"


def test_it_is_small_and_holds_no_outputs():
    assert len(CELLS) <= 10
    assert not any(cell["outputs"] or cell["execution_count"] for cell in CODE)
