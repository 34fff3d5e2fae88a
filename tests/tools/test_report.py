"""tools.report and tools.runs: published curves, whole runs, and runs with damaged or missing files."""

import fcntl
import html
import json
import os
import re
import shutil
from pathlib import Path

import pytest

from tests.conftest import ROOT
from tools import runs as runs_tool
from tools.report import duration, goals, goals_table, main
from tools.runs import Run

pytest.importorskip("plotly", reason='plotly is missing: pip install ".[report]"')
PUBLISHED = ROOT / "results/reference/sc20_curves.json"


def tables_of(page):
    """{id: rows of cell texts} of the page's tables."""
    tables = {}
    for name, body in re.findall(r"<table id='(\w+)'>(.*?)</table>", page, re.DOTALL):
        rows = [re.findall("<td>(.*?)</td>", row, re.DOTALL) for row in body.split("</tr>")[:-1]]
        tables[name] = [[html.unescape(cell) for cell in row] for row in rows]
    return tables


def without_scripts(page):
    return re.sub(r"<script.*?</script>", "", page, flags=re.DOTALL)


def traces(page):
    start = re.search(r'Plotly\.newPlot\(\s*"curves",\s*', page).end()
    return json.JSONDecoder().raw_decode(page[start:])[0]


@pytest.fixture
def page(tmp_path, capsys):
    """page(RUN, ...) -> (HTML, its tables)."""

    def write(*paths):
        assert main([*map(str, paths), "--out", str(tmp_path / "out")]) == 0
        text = (tmp_path / "out/report.html").read_text()
        return text, tables_of(without_scripts(text))

    return write


@pytest.fixture
def run(finished, tmp_path):
    """run(name, setting="value") -> a copy of the finished run, with other settings in its config.yaml."""

    def copy(name, **changes):
        folder = Path(shutil.copytree(finished, tmp_path / "expts" / name))
        text = (folder / "config.yaml").read_text()
        for key, value in changes.items():
            text = re.sub(rf"(?m)^( +{key}): .*$", rf"\1: {value}", text)
        (folder / "config.yaml").write_text(text)
        return folder

    return copy


def test_published_curves_give_the_published_figures(page):
    _, tables = page(PUBLISHED)
    best = {row[0].split()[0]: (row[3], row[4]) for row in tables["results"][1:]}
    assert (best["bs128-opt"], best["bs1024-warmup-opt"]) == (("75.87%", "98"), ("76.53%", "103"))
    assert best["bs2048-warmup-opt"] == ("75.48%", "92") and best["bs2048-opt"][0] == "71.17%"
    assert tables["targets"][0] == ["run", "device", "70 %", "75 %"]
    reached = {row[0].split()[0]: row[3].partition(", ")[::2] for row in tables["targets"][1:]}
    assert reached == {
        "bs128-opt": ("epoch 77", "31.1 min"), "bs1024-warmup-opt": ("epoch 64", "4.8 min"),
        "bs2048-warmup-opt": ("epoch 77", "3.8 min"), "bs512-opt": ("-", ""), "bs1024-opt": ("-", ""),
        "bs2048-opt": ("-", "")}  # fmt: skip
    assert [duration(seconds) for seconds in (119.9, 120, 7199, 7200)] == ["119.9 s", "2.0 min", "120.0 min", "2.00 h"]


def test_the_page_is_one_file_with_the_curves(page, tmp_path):
    text, _ = page(PUBLISHED)
    assert [file.name for file in (tmp_path / "out").iterdir()] == ["report.html"]
    assert not re.search(r"\b(src|href)=", without_scripts(text)) and text.count("* plotly.js v") == 1
    curves = json.loads(PUBLISHED.read_text())["runs"]["bs128-opt"]
    ours = [trace for trace in traces(text) if trace["name"].startswith("bs128-opt")]
    timed = [trace for trace in ours if trace.get("xaxis") == "x2"]
    by_time = {trace["hovertemplate"].split("<br>")[1].split()[0]: trace for trace in timed}
    for tag, word in (("acc1/valid", "validation"), ("acc1/train", "training")):
        assert by_time[word]["y"] == pytest.approx([100 * share for share in curves[tag]])
    assert by_time["validation"]["customdata"] == curves["epoch"]
    minutes = [seconds / 60 for seconds in curves["wall_s_since_first_event"]]
    assert by_time["validation"]["x"] == pytest.approx(minutes)
    looks = {(trace["name"], trace["line"]["color"], trace["legendgroup"]) for trace in traces(text)}
    assert len(looks) == 6 == sum(trace["showlegend"] for trace in traces(text)), "each run has its own look"


def test_goals():
    def reaching(*accuracies, **config):
        epochs = [{"epoch": n, "seconds": n, "acc1/valid": share} for n, share in enumerate(accuracies, 1)]
        return Run("name", Path(), config=config, epochs=epochs)

    assert goals([reaching(0.2, 0.55), reaching(0.4, 0.8)]) == [0.55, 0.75, 0.8]
    assert goals([reaching(0.93, dataset="cifar10")]) == [0.93]
    assert goals([reaching(0.93, dataset="cifar100")]) == [0.75, 0.93]
    assert goals_table([reaching(0.948, dataset="cifar10", stop_at_accuracy=0.945)])[0][2:] == ("94 %", "94.5 %")
    assert goals([reaching(0.01)]) == goals([]) == []


def test_a_run_named_twice_is_one_and_runs_of_one_name_have_their_paths(run, page, tmp_path):
    run("a")
    shutil.copytree(run("b", seed=2, lr=0.01), tmp_path / "other/b")
    _, tables = page(tmp_path / "expts", tmp_path / "expts/a")
    assert [row[0] for row in tables["results"][1:]] == ["a", "b"]
    assert tables["differences"] == [["setting", "a", "b"], ["seed", "0", "2"], ["lr", "0.1", "0.01"]]
    shutil.copy(PUBLISHED, tmp_path / "curves.json")
    _, tables = page(tmp_path / "expts", tmp_path / "other", PUBLISHED, tmp_path / "curves.json")
    names = [row[0] for row in tables["results"][1:]]
    assert len(set(names)) == 3 + 2 * 6 and names[1].endswith("expts/b") and names[2].endswith("other/b")


def test_names_are_escaped_and_the_longest_run_sets_the_unit(run, page, tmp_path):
    hostile = "<img src=x onerror=hurt()>'\"&amp;"
    shutil.move(run("plain"), tmp_path / "expts" / hostile)
    shutil.copytree(tmp_path / "expts" / hostile, tmp_path / "expts" / os.fsdecode(b"caf\xe9"))
    curves, points = tmp_path / "curves.json", {"epoch": [1, 2, 3, 4], "acc1/valid": [0.6, 0.6, 0.5, 0.5]}
    points |= {"wall_s_since_first_event": [3600, 7200] * 2, "wall_s_since_first_epoch_end": [0, 1, 2, 3]}
    points["loss/valid"] = [0.25, 0.25, 0.5, 9.0]
    curves.write_text(json.dumps({"runs": {"</script><b>bold": points}}))
    text, tables = page(curves)
    assert '"range":[0,0.75]' in text, "a spike of the loss"
    assert tables["results"][1][3:6] == ["60.00%", "1", "50.00%"], "best, its epoch, last"
    text, tables = page(tmp_path / "expts", curves)
    assert [1.0, 2.0, 1.0, 2.0] in [trace["x"] for trace in traces(text) if trace.get("xaxis") == "x2"], "hours"
    names = ["caf\\udce9", hostile, "</script><b>bold (published)"]
    assert sorted(row[0] for row in tables["results"][1:]) == sorted(names)
    assert not re.search("<img|<b>", without_scripts(text)) and not any("<" in trace["name"] for trace in traces(text))


@pytest.mark.parametrize(("name", "content", "problem"), [
    ("gone", None, "cannot be read: it is no run folder, folder of runs or file of curves"),
    ("text.json", "no JSON", "cannot be read: Expecting value"),
    ("words.json", '{"runs": {"a": {"epoch": [1], "acc1/valid": ["x"]}}}', "cannot be read: could not convert"),
])  # fmt: skip
def test_what_cannot_be_read_is_named_and_the_rest_is_shown(tmp_path, capsys, page, name, content, problem):
    if content:
        (tmp_path / name).write_text(content)
    assert main([str(tmp_path / name), "--out", str(tmp_path / "out")]) == 3
    error = capsys.readouterr().err
    assert error.startswith(f"error: {tmp_path / name}: {problem}") and error.count("\n") == 1
    assert not (tmp_path / "out").exists()
    text, tables = page(tmp_path / name, PUBLISHED)
    assert problem in text and len(tables["results"]) == 1 + 6


def test_damaged_files_are_problems_of_their_run(run, page, tmp_path, capsys):
    shutil.copytree(run("whole"), tmp_path / "expts/cut")
    (tmp_path / "expts/cut/config.yaml").write_text("][")
    empty, odd = (shutil.copytree(tmp_path / "expts/whole", tmp_path / "expts" / name) for name in ("empty", "odd"))
    (empty / "metrics.jsonl").write_text('{"kind": "stop"}\n[1]\n{"kind": "sta\n' + "[" * 100_000)
    (odd / "metrics.jsonl").write_text('{"kind": "epoch", "epoch": {}}\n{"kind": "epoch", "epoch": 1}\n{"kind": "st')
    text, tables = page(tmp_path / "expts")
    assert "cut: config.yaml or environment.json is missing or damaged" in text
    assert "empty: metrics.jsonl: 3 line(s) cannot be read; skipped" in text and "odd: cannot be read: " in text
    assert len(tables["results"]) == 1 + 3
    assert runs_tool.main([str(tmp_path / "expts")]) == 0
    assert "empty: metrics.jsonl has no finished epoch yet" in capsys.readouterr().out


def test_a_run_that_began_from_another_runs_checkpoint_has_that_runs_best(run, page):
    metrics = run("later") / "metrics.jsonl"
    records = [json.loads(line) for line in metrics.read_text().splitlines()]
    records = [row | {"seconds": 300} for row in records if row["kind"] != "epoch" or row["epoch"] > 1]
    records[-1] |= {"best_acc1": 0.99, "best_epoch": 1, "images_per_sec": 1234.4}
    metrics.write_text("".join(json.dumps(record) + "\n" for record in records))
    (metrics.parent / "environment.json").write_text('{"device": "GPU", "world_size": 2}')
    os.utime(metrics, (2e9 + 30_000,) * 2)  # at noon, UTC
    row = page(metrics.parent)[1]["results"][1]
    assert row[2:5] == ["3 of 3", "99.00%", "1"]
    assert [*row[6:9], row[9][:10]] == ["5.0 min", "1,234", "2 x GPU", "2033-05-18"]


def test_states_and_a_folder_without_a_run(run, page, tmp_path, capsys):
    folders = {name: run(name) for name in ("going", "stopped", "full", "killed")}
    run("done")
    stops = {"killed": '"status": 75}\n{"kind": "end", "epoch": 1, "best_acc1": 1, "best_epoch": 1}\n{"kind": "resume"'}
    stops |= {"stopped": '"status": 75', "full": '"status": 1, "reason": "No space left on device"'}
    for name, folder in folders.items():
        lines = [line for line in (folder / "metrics.jsonl").read_text().splitlines() if '"epoch": 3' not in line]
        lines += [f'{{"kind": "stop", {stops[name]}}}'] if name in stops else []
        (folder / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    with (folders["going"] / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        text, tables = page(tmp_path / "expts")
        assert {row[0]: row[1:3] for row in tables["results"][1:]} == {
            "going": ["running", "2 of 3"], "done": ["finished", "3 of 3"], "stopped": ["stopped", "2 of 3"],
            "killed": ["failed", "2 of 3"], "full": ["failed", "2 of 3"]}  # fmt: skip
        assert not any("100.00%" in row for row in tables["results"]), "that end was not the last"
        capsys.readouterr()
        assert runs_tool.main([str(tmp_path / "expts")]) == 0
        printed = capsys.readouterr().out
    assert re.search(r"going +│ +running │ +2 of 3", printed) and re.search(r"done +│ +finished │ +3 of 3", printed)
    for shown in (text, printed):
        assert "killed: no record of its end" in shown and "full: ended by No space left on device" in shown
    assert runs_tool.main([str(tmp_path / "nothing")]) == 3
    for name in ("tb_logs", ".lock"):  # a folder with only TensorBoard's files, and a lock that nobody can hold
        (tmp_path / "alone" / name).mkdir(parents=True)
    assert runs_tool.main([str(tmp_path / "alone")]) == 0
    assert re.search(r" failed +│ +0 │ +- │ +- │", capsys.readouterr().out)
