"""tools.predict_scaling: the model against closed forms, the command, and the figures of forecasts.md."""

import json
import math
import re

import pytest

from tests.conftest import CIFAR100, ROOT
from tools import predict_scaling
from tools.predict_scaling import Cluster, Step, all_reduce, main
from utils.config import load_config

FREE = Cluster(8, math.inf, math.inf, 0, 0, 0, memory=math.inf, interference=0, noise=0, floor=0)
STEP = Step(seconds=0.3, batch=64, buckets=[(10_000_000, 0.5), (10_000_000, 1.0)])
PAGE = (ROOT / "results/reference/forecasts.md").read_text("utf-8")


def test_all_reduce_takes_the_slower_stage_and_the_better_algorithm():
    machine = Cluster(4, 100e9, 10e9, call_latency=0, intra_latency=1e-6, inter_latency=10e-6)
    assert all_reduce(1e8, 4, machine) == pytest.approx(2 * 3 / 4 * 1e8 / 100e9 + 6e-6), "ring within a node"
    assert all_reduce(1e8, 8, machine) == pytest.approx(1e8 / 10e9 + 20e-6 + 6e-6), "ring between two nodes"
    assert all_reduce(100, 4 * 256, machine) == pytest.approx(2 * (100 / 10e9 + 8 * 10e-6) + 6e-6, rel=1e-3), "tree"
    assert all_reduce(1e9, 8, machine._replace(inter=1e12)) == pytest.approx(2 * 3 / 4 * 1e9 / 100e9 + 20e-6 + 6e-6)


def test_a_perfect_machine_scales_perfectly_and_each_cost_appears_by_itself():
    for gpus in (1, 8, 4096):
        assert STEP.efficiency(gpus, FREE, 64)[0] == pytest.approx(1.0)
        assert STEP.efficiency(gpus, FREE, 64 / gpus)[0] == pytest.approx(1.0)
    assert STEP.predict(2, FREE._replace(noise=0.1), 64) == pytest.approx(0.3 * (1 + 0.1 / math.sqrt(math.pi)))
    assert STEP.predict(2, FREE._replace(host=0.1), 64) == pytest.approx(0.4)
    assert STEP.predict(2, FREE._replace(memory=1e9, copies=6), 64) == pytest.approx(0.3 + 6 * 2e7 / 1e9)
    assert STEP.predict(64, FREE._replace(floor=0.01), 1) == 0.01, "strong scaling ends at the floor"
    assert STEP.predict(1, Cluster(), 64) == 0.3


def test_every_input_that_varies_widens_the_interval():
    machine = Cluster(noise=0.02)
    worst, best = machine.extremes()
    varied = [name for name in Cluster._fields if len({getattr(end, name) for end in (machine, worst, best)}) > 1]
    assert varied == ["intra", "inter", "interference", "noise", "floor", "host"], "docs/scaling.md lists what varies"
    for name in varied:
        gpus = 8 if name == "intra" else 64  # within one node: the links between nodes are slower
        ends = (machine._replace(**{name: getattr(end, name)}) for end in (worst, best))
        bad, good = (STEP.efficiency(gpus, end, 1)[0] for end in ends)
        middle, low, high = STEP.efficiency(gpus, machine, 1)
        assert low <= bad <= middle <= good <= high and bad < good, name


def test_docs_have_the_tables_that_the_command_prints_and_count_their_errors(capsys):
    assert main(["--published"]) == 0
    used, _, unused = capsys.readouterr().out.removeprefix("used for the model:\n").partition("\nnot used:\n")
    assert used in PAGE and unused in PAGE
    errors = [[float(row.split(" | ")[4]) for row in table.splitlines()[2:]] for table in (used, unused)]
    assert [[error for error in part if abs(error) > 5] for part in errors] == [[7.1, 11.4, 13.9], [-21.4, 13.1]]
    assert [*map(len, errors)] == [12, 6] and sum(error > 0 for part in errors for error in part) == 12
    for words in ("above 5 points: 7, 11 and 14.", "3,584 GPUs: -21.4 points", "JUWELS: +13.1 points"):
        assert words in PAGE
    assert "Of all eighteen errors twelve are positive" in PAGE


@pytest.fixture
def report(tmp_path):
    def write(**content):
        config = load_config(CIFAR100, "bs256").model_dump(mode="json") | {"learning_speed": 0.1}
        rungs = {name: {"full": {"median": rate}} for name, rate in (("slow", 1000.0), ("fast", 12800.0))}
        results = {"rungs": rungs, "configs": {"fast": config}}
        path = tmp_path / "bench.json"
        path.write_text(json.dumps({"bench": "ladder", "config": {}, "results": results} | content))
        return str(path)

    return write


def test_command_prints_both_curves_and_its_assumptions_from_a_ladder(report, capsys):
    """Also for a report with a setting that this version lacks."""
    assert main(["--from", report(), "--gpus", "1,8,256,257", "--gpus-per-node=4", "--intra=240"]) == 0
    printed = capsys.readouterr().out
    assert "fast, 12,800 images/s with batch 256" in printed and "e=4, intra=240000000000.0, inter=1000" in printed
    rows = [re.sub(r"[(),%]", "", line).split() for line in printed.splitlines()[-7:]]
    assert rows[0] == ["weak", "1", "256", "20.00", "12800", "100.0", "100.0", "to", "100.0"]
    gpus_and_batches = ["weak 8 256", "weak 256 256", "weak 257 256", "strong 1 256", "strong 8 32", "strong 256 1"]
    assert [" ".join(row[:3]) for row in rows[1:]] == gpus_and_batches
    for _, gpus, batch, milliseconds, rate, *_ in rows:
        assert float(rate) == pytest.approx(1e3 * int(gpus) * float(batch) / float(milliseconds), rel=0.01)
    assert printed.count("the model does not apply") == 2
    path = report(bench="loaders", results={"device": {"training_images_per_sec": {"median": 9e4}}})
    assert main(["--from", path]) == 3 and "not a report of tools.bench ladder" in capsys.readouterr().err


@pytest.mark.parametrize("path", sorted((ROOT / "results").glob("*/ladder*.json")), ids=lambda path: path.parent.name)
def test_reports_of_earlier_versions_can_be_read(path, capsys):
    assert main(["--from", str(path), "--gpus", "8"]) == 0
    assert predict_scaling.PUBLISHED.exists() and "intra=120000000000.0, inter=10000000000.0" in capsys.readouterr().out
