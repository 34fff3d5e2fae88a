"""README's "Measured" table equals results/runs.csv, and runs.csv equals the logs kept in results/."""

import csv
import hashlib
import itertools
import json
import re
import runpy
import statistics
from collections import defaultdict
from pathlib import Path

import pytest

from tests.conftest import ROOT

README = (ROOT / "README.md").read_text("utf-8")
ACCURACY = re.compile(r"\[(?P<percent>\d+\.(?P<decimals>\d+)) % after (?P<seconds>[\d,]+) s\]\((?P<page>[^)#]+)")
PUBLISHED = "the tutorial's own run, bs128-opt"
RATIOS = {  # {claim: (faster, slower ones), keys of the report}
    "fastest relative to timm, Lightning and plain PyTorch": ("this project", ("timm", "lightning", "plain PyTorch")),
    "fastest relative to bs256 in float32": ("fastest", ("bs256",)),
}


def read_rows():
    """{claim: its rows}."""
    rows = defaultdict(list)
    with (ROOT / "results/runs.csv").open(encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            rows[row["claim"]].append(row)
    return dict(rows)


def measured_tables():
    """README's two tables "Measured", accuracies and rates: {first column: {column: cell}} of each."""
    section = README.partition("\n## Measured\n")[2].partition("\n## ")[0].replace("`", "")
    for table in re.findall(r"(?:^\|.*\n)+", section, re.MULTILINE):
        header, _, *lines = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()]
        yield {cells[0]: dict(zip(header, cells, strict=True)) for cells in lines}


ACCURACIES, RATE_ROWS = measured_tables()


@pytest.mark.parametrize("claim", sorted(ACCURACIES.keys() - {PUBLISHED}))
def test_an_accuracy_of_the_readme_is_that_of_its_rows(claim):
    row, own = ACCURACIES[claim], read_rows()[claim.partition(", ")[0].partition(": CIFAR-10")[0]]
    assert all(row["device"] in one["device"] for one in own)
    assert {one["images"] for one in own} == {f"10,000 test images, {row['views']} view{'s' * (row['views'] != '1')}"}
    assert len({one["seed"] for one in own}) == len(own) == int(row["seeds"])
    shown = ACCURACY.match(row["result"])
    percents = [float(one["accuracy_one_view"] or one["accuracy_all_views"]) for one in own]
    assert f"{statistics.mean(percents):.{len(shown['decimals'])}f}" == shown["percent"]
    timed = [one for one in own if one["seconds"]]
    assert f"{statistics.mean(float(one['seconds']) for one in timed):,.0f}" == shown["seconds"]
    assert {row["seconds of"].partition(",")[0]} == {one["seconds_of"] for one in timed}
    assert re.findall(r"seed (\d)", row["seconds of"]) == ([] if timed == own else [one["seed"] for one in timed])
    assert all(Path(shown["page"]).parent in Path(one["log"]).parents for one in own)


def test_the_tutorials_time_is_that_of_its_log():
    curve = json.loads((ROOT / "results/reference/sc20_curves.json").read_text("utf-8"))["runs"]["bs128-opt"]
    times = zip(curve["acc1/valid"], curve["wall_s_since_first_event"], strict=True)
    reached = next(seconds for accuracy, seconds in times if accuracy >= 0.75)
    assert ACCURACIES[PUBLISHED]["result"].startswith(f"[75 % after {reached:,.0f} s]")


@pytest.mark.parametrize("claim", RATIOS)
def test_a_ratio_of_the_readme_is_that_of_its_report(claim):
    faster, slower = RATIOS[claim]
    (own,) = read_rows()[f"images/s of ResNet50, batch 128: {claim}"]
    assert RATE_ROWS[claim]["device"] in own["device"]
    results = json.loads((ROOT / own["log"]).read_text("utf-8"))["results"]
    rates = {name: sample["full"]["median"] for name, sample in results.get("rungs", results).items()}
    shown = re.findall(r"(\d+\.(\d+)) x", RATE_ROWS[claim]["result"])
    for name, (text, decimals) in zip(slower, shown, strict=True):
        assert text == f"{rates[faster] / rates[name]:.{len(decimals)}f}"


def test_the_readme_shows_accuracies_and_every_ratio():
    assert len(ACCURACIES) >= 5 and RATE_ROWS.keys() == RATIOS.keys()


def test_rows_equal_their_logs():
    named = {ROOT / row["log"] for row in itertools.chain.from_iterable(read_rows().values())}
    assert {*(ROOT / "results").glob("*/seed-*/train.log")} <= named, "a kept log has no row"
    for row in itertools.chain.from_iterable(read_rows().values()):
        log = ROOT / row["log"]
        assert re.fullmatch(r"[0-9a-f]{64}", row["log_sha256"])
        if row["log_commit"]:
            assert re.fullmatch(r"[0-9a-f]{40}", row["log_commit"]) and not log.exists(), row["log"]
            continue
        assert hashlib.sha256(log.read_bytes()).hexdigest() == row["log_sha256"], row["log"]
        if log.name != "train.log":  # a benchmark's report
            continue
        records = [json.loads(line) for line in (log.parent / "metrics.jsonl").read_text("utf-8").splitlines()]
        (end,) = (record for record in records if record["kind"] == "end")
        seconds = f"{end['seconds']:.0f}"
        if row["seconds_of"] == "command":
            seconds = f"{json.loads((log.parent / 'trial.json').read_text('utf-8'))['seconds']['command']:.0f}"
        if any(record["kind"] == "resume" for record in records):  # an interrupted run measures no time
            seconds = ""
        accuracy = row["accuracy_one_view"] or row["accuracy_all_views"]
        assert (accuracy, row["seconds"]) == (f"{100 * end['last_acc1']:.2f}", seconds), row["log"]


def test_every_picture_has_a_function_that_draws_it(tmp_path):
    pytest.importorskip("matplotlib", reason='matplotlib is missing: pip install ".[plot]"')
    figures = ROOT / "docs/figures"
    measured = runpy.run_path(str(figures / "measured.py"))
    measured["draw_ladder"](tmp_path / "ladder.png")
    measured["draw_features"](tmp_path / "cifar100_cpu.png")
    measured["draw_published"](tmp_path / "sc20_accuracy.png")
    measured["draw_resnet50"](tmp_path / "resnet50_two_cores.png")
    runpy.run_path(str(figures / "killed_and_resumed.py"))["draw"](tmp_path / "killed_and_resumed.png")
    screenshots = {"report.png", "tensorboard.png", "terminal.png"}
    drawn = {path.name for path in tmp_path.iterdir()} | screenshots
    # timelines are drawn from the traces of profiled runs, which are not stored
    pages = "".join(path.read_text("utf-8") for path in (ROOT / "docs").rglob("*.md"))
    timelines = set(re.findall(r"figures/(timeline_\w+\.png)", pages))
    assert drawn | timelines == {path.name for path in figures.glob("*.png")}
