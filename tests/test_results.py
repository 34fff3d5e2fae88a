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
WHERE_MEASURED = re.compile(r"(?P<claim>.+?)(?:, mean of (?P<seeds>\d+) seeds|, one seed)?")
ACCURACY = re.compile(r"\[(?P<percent>\d+\.(?P<decimals>\d+)) % after (?P<seconds>[\d,]+) s\]\((?P<page>[^)#]+)")
PEERS = ("this project", ("timm", "lightning", "plain PyTorch"))
RATIOS = {  # {claim: (faster, slower ones), keys of the report}
    "ResNet50, batch 128: images/s of fastest relative to timm, Lightning and plain PyTorch": PEERS,
    "ResNet50, batch 128: images/s of fastest relative to bs128": ("fastest", ("bs128",)),
}


def read_rows():
    """{claim: its rows}."""
    rows = defaultdict(list)
    with (ROOT / "results/runs.csv").open(encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            rows[row["claim"]].append(row)
    return dict(rows)


def measured_table(readme):
    """The cells (what, device, result) of each row of README's "Measured" table."""
    section = readme.partition("\n## Measured\n")[2].partition("\n## ")[0]
    lines = [line.strip("|").split("|") for line in section.splitlines() if line.startswith("|")]
    return [(what.strip().replace("`", ""), device.strip(), result.strip()) for what, device, result in lines[2:]]


def check(what, device, result, rows):
    """Fail unless the result is what the rows of the claim, or the report that they name, say."""
    match = WHERE_MEASURED.fullmatch(what)
    assert match and match["claim"] in rows, f"no row of results/runs.csv has the claim {what!r}"
    own = rows[match["claim"]]
    assert all(device in row["device"] for row in own)
    if match["claim"] in RATIOS:
        faster, slower = RATIOS[match["claim"]]
        (row,) = own
        results = json.loads((ROOT / row["log"]).read_text("utf-8"))["results"]
        rates = {name: sample["full"]["median"] for name, sample in results.get("rungs", results).items()}
        shown = re.findall(r"(\d+\.(\d+)) x", result)
        for name, (text, decimals) in zip(slower, shown, strict=True):
            assert text == f"{rates[faster] / rates[name]:.{len(decimals)}f}"
        return
    assert len(own) == int(match["seeds"] or 1)
    assert len({row["seed"] for row in own}) == len(own)
    columns = {"10,000 test images, 6 views": "accuracy_all_views", "10,000 test images, 1 view": "accuracy_one_view"}
    (images,) = {row["images"] for row in own}
    shown = ACCURACY.match(result)
    assert shown, f"{result!r} is no accuracy with its seconds"
    percent = statistics.mean(float(row[columns[images]]) for row in own)
    assert f"{percent:.{len(shown['decimals'])}f}" == shown["percent"]
    times = [float(row["seconds"]) for row in own if row["seconds"]]
    assert f"{statistics.mean(times):,.0f}" == shown["seconds"]
    folder = Path(shown["page"]).parent
    assert all(folder in Path(row["log"]).parents for row in own)


@pytest.mark.parametrize(("what", "device", "result"), measured_table(README))
def test_measured_table_of_the_readme_equals_its_rows(what, device, result):
    check(what, device, result, read_rows())


def test_measured_table_has_accuracies_and_ratios():
    claims = [what for what, _, _ in measured_table(README)]
    assert len(claims) >= 5 and set(RATIOS) <= set(claims)


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
    measured["draw_ladder"](tmp_path / "ladder_two_cores.png")
    measured["draw_features"](tmp_path / "cifar100_cpu.png")
    measured["draw_published"](tmp_path / "sc20_accuracy.png")
    measured["draw_resnet50"](tmp_path / "resnet50_two_cores.png")
    runpy.run_path(str(figures / "killed_and_resumed.py"))["draw"](tmp_path / "killed_and_resumed.png")
    drawn = {path.name for path in tmp_path.iterdir()} | {"report.png"}  # a screenshot
    # timelines are drawn from the traces of profiled runs, which are not stored
    pages = "".join(path.read_text("utf-8") for path in (ROOT / "docs").rglob("*.md"))
    timelines = set(re.findall(r"figures/(timeline_\w+\.png)", pages))
    assert drawn | timelines == {path.name for path in figures.glob("*.png")}
