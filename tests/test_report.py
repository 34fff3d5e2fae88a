"""tools.report and tools.runs: published curves, whole runs, and runs with damaged or missing files."""

import fcntl
import html
import html.parser
import json
import os
import re
import shutil
import sys
from pathlib import Path

import pytest

from tests.conftest import ROOT
from tools import runs as runs_tool
from tools.report import duration, goals, main, same_but_seed
from tools.shared.pages.plots import style
from tools.shared.pages.png_plots import COLOURS
from tools.shared.read_runs import Run, differences, read, read_lines
from train import Trainer

plotly = pytest.importorskip("plotly.graph_objects", reason='plotly is missing: pip install ".[report]"')
PUBLISHED = ROOT / "results/reference/sc20_curves.json"


class Tables(html.parser.HTMLParser):
    """{id: rows of cell texts} of the page's tables."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tables: dict[str, list[list[str]]] = {}
        self.rows: list[list[str]] = []
        self.feed(page)

    def handle_starttag(self, tag, attrs):
        if tag == "table":
            self.rows = self.tables[dict(attrs)["id"]] = []
        elif tag == "tr":
            self.rows.append([])
        elif tag in ("td", "th"):
            self.rows[-1].append("")

    def handle_endtag(self, tag):
        if tag == "table":
            self.rows = []

    def handle_data(self, data):
        if self.rows and self.rows[-1]:
            self.rows[-1][-1] += data


def without_scripts(page: str) -> str:
    return re.sub(r"<script>.*?</script>", "", page, flags=re.DOTALL)


def plots(page: str) -> dict[str, dict]:
    """Return {name: plotly's arguments} of the page, checked against plotly's own schema."""
    descriptions = json.loads(re.search(r"const descriptions = (.*);\n", page)[1])
    for plot in descriptions:
        plotly.Figure({"data": plot["traces"], "layout": plot["layout"]})  # ValueError for an unknown property
    return {plot["name"]: plot for plot in descriptions}


@pytest.fixture
def page(tmp_path, capsys):
    """page(RUN, ...) -> (HTML, its tables)."""

    def write(*paths):
        assert main([*map(str, paths), "--out", str(tmp_path / "out")]) == 0
        text = (tmp_path / "out/report.html").read_text()
        return text, Tables(without_scripts(text)).tables

    return write


@pytest.fixture
def run(tiny, one_rank, tmp_path):
    """run(name, **changes) -> the folder of a small finished run."""

    def train(name, **changes):
        folder = tmp_path / "expts" / name
        Trainer(tiny(max_epochs=2, **changes), one_rank, folder, "tiny", "auto").train()
        return folder

    return train


def test_published_curves_give_the_published_figures(page):
    _, tables = page(PUBLISHED)
    best = {row[0]: (row[3], row[4]) for row in tables["results"][1:]}
    assert best["bs128-opt (published)"] == ("75.87%", "98")
    assert best["bs1024-warmup-opt (published)"] == ("76.53%", "103")
    assert best["bs2048-warmup-opt (published)"] == ("75.48%", "92")
    assert best["bs2048-opt (published)"][0] == "71.17%"
    assert tables["targets"][0] == ["run", "device", "70 %", "75 %"]
    reached = {row[0].split()[0]: row[3].split(",")[0] for row in tables["targets"][1:]}
    times = {row[0].split()[0]: row[3].partition(", ")[2] for row in tables["targets"][1:]}
    assert (times["bs128-opt"], times["bs1024-warmup-opt"]) == (duration(1867), duration(286))  # results/README.md
    assert reached == {
        "bs128-opt": "epoch 77", "bs1024-warmup-opt": "epoch 64", "bs2048-warmup-opt": "epoch 77",
        "bs512-opt": "-", "bs1024-opt": "-", "bs2048-opt": "-",
    }  # fmt: skip


def test_page_is_one_file_with_the_library_once(page, tmp_path):
    text, _ = page(PUBLISHED)
    assert [file.name for file in (tmp_path / "out").iterdir()] == ["report.html"]
    assert not re.search(r"\b(src|href)=", without_scripts(text)) and text.count("* plotly.js v") == 1
    assert set(plots(text)) == {"acc1-epoch", "acc1-seconds", "loss-epoch", "loss-seconds", "learning_rate"}
    for name in plots(text):
        assert f"id='{name}'" in text


def test_plots_have_the_curves(page):
    text, _ = page(PUBLISHED)
    curves = json.loads(PUBLISHED.read_text())["runs"]["bs128-opt"]
    ours = [trace for trace in plots(text)["acc1-seconds"]["traces"] if trace["name"].startswith("bs128-opt")]
    traces = {trace["hovertemplate"].split("<br>")[1].split()[0]: trace for trace in ours}
    assert set(traces) == {"training", "validation"} and traces["validation"]["customdata"] == curves["epoch"]
    for tag, words in (("acc1/valid", "validation"), ("acc1/train", "training")):
        assert traces[words]["y"] == pytest.approx([100 * share for share in curves[tag]], rel=1e-5)
    minutes = [seconds / 60 for seconds in curves["wall_s_since_first_event"]]
    assert traces["validation"]["x"] == pytest.approx(minutes, rel=1e-5)


def test_line_styles_are_unique_and_a_run_keeps_its_style(page):
    assert len({style(number) for number in range(200)}) == 200
    assert [style(number).colour for number in range(8)] == list(COLOURS) and style(7).dash == "" != style(8).dash
    text, _ = page(PUBLISHED)
    lines = {}
    for plot in plots(text).values():
        for trace in plot["traces"]:
            look = (trace["line"]["color"], trace["line"]["dash"], trace["legendgroup"])
            assert lines.setdefault(trace["name"], look) == look
    assert len(set(lines.values())) == 6
    for name, (colour, _, number) in lines.items():
        assert re.search(rf"value='{number}' [^\n]*stroke='{colour}'[^\n]*{re.escape(name)}", text)


def test_times_on_the_page_are_absolute(run, page):
    text, tables = page(run("kept"))
    moment = r"20\d\d-\d\d-\d\d \d\d:\d\d[+-]\d\d:\d\d"
    assert re.fullmatch(moment, tables["results"][1][-1]) and re.search(f"Written {moment}", text)
    assert not re.search(r"\bago\b", without_scripts(text))


def test_goals():
    def reaching(*accuracies, **config):
        epochs = [{"epoch": n, "seconds": n, "acc1/valid": share} for n, share in enumerate(accuracies, 1)]
        return Run("name", Path(), config=config, epochs=epochs)

    plain, better = reaching(0.2, 0.55), reaching(0.4, 0.7)
    assert goals([plain]) == [0.55] and goals([plain, better]) == [0.55, 0.7]
    assert goals([better, reaching(0.76)]) == [0.7, 0.75]
    assert goals([reaching(0.93, dataset="cifar10")]) == [0.93]
    assert goals([reaching(0.93, dataset="cifar100")]) == [0.75, 0.93]
    assert goals([reaching(0.948, dataset="cifar10", stop_at_accuracy=0.945)]) == [0.94, 0.945]
    assert goals([reaching(0.01)]) == goals([]) == []


def test_published_curves_state_the_start_of_their_times(page, tmp_path):
    curves = {"epoch": [1, 2], "acc1/valid": [0.1, 0.2]}
    for clock, said in (("wall_s_since_first_event", "since the first event"), ("", "not recorded")):
        path = tmp_path / "curves.json"
        path.write_text(json.dumps({"runs": {"a": curves | ({clock: [5, 9]} if clock else {})}}))
        (run,), _, _ = read(path)
        assert run.clock == said
        assert [row["seconds"] for row in run.epochs] == ([5, 9] if clock else [0, 0])
    assert "a cut of the learning rate one epoch before ours" in page(path)[0]


def test_seeds_and_differences(run, page):
    folders = [run("a", seed=1), run("b", seed=2), run("c", seed=1, lr=0.01)]
    _, tables = page(*folders, run("again", seed=1))
    assert [row[0:1] + row[2:4] for row in tables["seeds"][1:]] == [["again", "1, 2", "2"]], "of equal seeds the newest"
    _, tables = page(*folders)
    assert [row[0:1] + row[2:4] for row in tables["seeds"][1:]] == [["a", "1, 2", "2"]]
    assert " ± " in tables["seeds"][1][4]
    assert "seeds" not in page(folders[0], folders[2])[1], "one run of each configuration has no spread"
    assert tables["differences"] == [["run", "seed", "lr"], ["a", "1", "0.1"], ["b", "2", "0.1"], ["c", "1", "0.01"]]
    assert page(*folders[1:])[1]["differences"] == [["key", "b", "c"], ["seed", "2", "1"], ["lr", "0.1", "0.01"]]
    runs = [read(folder)[0][0] for folder in folders]
    assert set(differences(runs)) == {"lr", "seed"} and [len(group) for group in same_but_seed(runs)] == [2, 1]
    runs[1].environment["device"] = "another"
    assert [len(group) for group in same_but_seed(runs)] == [1, 1, 1]
    assert len(tables["worst"]) == 1 + 3 and re.fullmatch(r".+ \d+% \(.+ \d+%\)", tables["worst"][1][1])


def test_a_run_named_twice_is_shown_once(run, page, tmp_path):
    run("once")
    _, tables = page(tmp_path / "expts", tmp_path / "expts/once")
    assert [row[0] for row in tables["results"][1:]] == ["once"]


def test_reports_of_one_name_are_distinguished_by_their_paths(page, tmp_path):
    results = {
        f"weak {ranks}": {"train_images_per_sec": {"values": [100 * ranks], "median": 100 * ranks}} for ranks in (1, 2)
    }
    for device in ("A", "B"):
        (tmp_path / device).mkdir()
        content = {"bench": "scaling", "config": {}, "environment": {"device": device}, "results": results}
        (tmp_path / device / "scaling.json").write_text(json.dumps(content))
    rows = page(tmp_path / "A/scaling.json", tmp_path / "B/scaling.json")[1]["scaling"][1:]
    expected = [(f"{device}/scaling: weak, training only", device, ranks) for device in "AB" for ranks in "12"]
    assert [tuple(row[:3]) for row in rows] == expected


def test_runs_of_one_name_are_distinguished_by_their_paths(run, page, tmp_path):
    shutil.copytree(run("twin"), tmp_path / "other/twin")
    shutil.copy(PUBLISHED, tmp_path / "curves.json")
    _, tables = page(tmp_path / "expts", tmp_path / "other", PUBLISHED, tmp_path / "curves.json")
    names = [row[0] for row in tables["results"][1:]]
    assert len(set(names)) == 2 + 2 * 6 and names[0].endswith("expts/twin") and names[1].endswith("other/twin")
    assert names[-1].endswith("curves.json: bs512-opt (published)")
    assert [row[0] for row in page(tmp_path / "expts", tmp_path / "other")[1]["results"][1:]] == [
        "expts/twin", "other/twin",
    ]  # fmt: skip


def test_measurements_become_bars_and_scaling(page, tmp_path):
    ladder = tmp_path / "ladder.json"
    environment = {"world_size": 1, "device": "GPU"}
    rungs = {"rungs": {"fp32": {"full": {"median": 680.0}}, "amp": {"full": {"median": 1795.0}}}, "configs": {}}
    ladder.write_text(json.dumps({"bench": "ladder", "environment": environment, "config": {}, "results": rungs}))
    scaling = tmp_path / "h100:4.json"
    rows = {
        f"weak {ranks}": {"train_images_per_sec": {"median": rate}, "epoch_images_per_sec": {"median": whole}}
        for ranks, rate, whole in ((1, 100.0, 90.0), (4, 380.0, 270.0))
    }
    scaling.write_text(json.dumps({"bench": "scaling", "config": {}, "results": rows, "trials": []}))
    text, tables = page(ladder, scaling)
    assert set(plots(text)) == {"scaling-throughput", "scaling-efficiency", "bars-0"}
    assert plots(text)["bars-0"]["traces"][0]["x"] == [680, 1795]
    for name, unit in (("throughput", "images/s"), ("efficiency", "%")):
        assert f"%{{y:,.4g}} {unit}<" in plots(text)[f"scaling-{name}"]["traces"][0]["hovertemplate"]
    assert tables["speeds"][2] == ["ladder: ladder on GPU", "amp", "1,795", "2.64"]
    assert [row[2:] for row in tables["scaling"][1:]] == [
        ["1", "100", "100.0%"], ["4", "380", "95.0%"], ["1", "90.0", "100.0%"], ["4", "270", "75.0%"],
    ]  # fmt: skip


# ---- problems


def test_a_run_without_metrics_and_a_truncated_one(run, page, tmp_path):
    empty = run("empty")
    (empty / "metrics.jsonl").unlink()
    cut = run("cut")
    lines = (cut / "metrics.jsonl").read_text()
    (cut / "metrics.jsonl").write_text(lines[: lines.index('"kind": "epoch"') + 40])
    (cut / "config.yaml").write_text("][")
    (cut / "environment.json").unlink()
    text, tables = page(tmp_path / "expts", PUBLISHED)
    assert "metrics.jsonl is missing or empty" in text and "1 line(s) cannot be read" in text
    assert "config.yaml is missing or damaged" in text and "environment.json is missing" in text
    assert len(tables["results"]) == 1 + 2 + 6


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("gone", "no such file or folder"),
        ("void", "holds no run"),
        ("strange.json", "is neither a file of curves nor a report of tools.bench"),
        ("peers.json", "a report of tools.bench peers, which this page cannot draw"),
    ],
)
def test_nothing_to_show_is_an_error_and_writes_no_page(tmp_path, capsys, page, name, problem):
    (tmp_path / "void").mkdir()
    (tmp_path / "strange.json").write_text("[1, 2]")
    (tmp_path / "peers.json").write_text('{"bench": "peers", "results": {}}')
    assert main([str(tmp_path / name), "--out", str(tmp_path / "out")]) == 3
    assert capsys.readouterr().err == f"error: {tmp_path / name}: {problem}\n" and not (tmp_path / "out").exists()
    text, tables = page(tmp_path / name, PUBLISHED)
    assert problem in text and len(tables["results"]) == 1 + 6


def test_a_missing_library_is_reported(monkeypatch, capsys, tmp_path):
    monkeypatch.setitem(sys.modules, "plotly.offline", None)
    assert main([str(PUBLISHED), "--out", str(tmp_path / "out")]) == 2
    assert 'plotly.offline is missing; install it with: pip install ".[report]"' in capsys.readouterr().err


def test_names_are_escaped(run, page, tmp_path):
    hostile = "<img src=x onerror=hurt()>'\"&amp;"
    shutil.move(run("plain"), tmp_path / "expts" / hostile)
    shutil.copytree(tmp_path / "expts" / hostile, tmp_path / "expts" / os.fsdecode(b"caf\xe9"))
    curves = tmp_path / "curves.json"
    curves.write_text(json.dumps({"runs": {"</script><b>bold\ud800": {"epoch": [1, 2], "acc1/valid": [0.5, 0.6]}}}))
    text, tables = page(tmp_path / "expts", curves)
    names = ["caf\\udce9", hostile, "</script><b>bold\\ud800 (published)"]
    assert sorted(row[0] for row in tables["results"][1:]) == sorted(names)
    assert not re.search("<img|<b>", without_scripts(text))
    assert "<" not in re.search(r"const descriptions = (.*);\n", text)[1]
    drawn = {html.unescape(trace["name"]) for trace in plots(text)["acc1-epoch"]["traces"]}
    assert drawn == set(names) and not any("<" in trace["name"] for trace in plots(text)["acc1-epoch"]["traces"])


def test_a_value_that_is_not_finite_is_a_gap(page, tmp_path):
    curves = {"epoch": [1, 2, 3], "loss/valid": [4.0, float("nan"), float("inf")], "acc1/valid": [0.1, 0.2, 0.1]}
    (tmp_path / "diverged.json").write_text(json.dumps({"runs": {"diverged": curves}}))
    text, _ = page(tmp_path / "diverged.json")
    (trace,) = plots(text)["loss-epoch"]["traces"]
    assert trace["y"] == [4.0, None, None] and plots(text)["loss-epoch"]["layout"]["yaxis"]["range"] == [0, 4.2]


def test_a_record_with_a_name_that_is_not_utf_8_is_read(tmp_path):
    record = {"kind": "stop", "step": 3, "status": 75, "reason": os.fsdecode(b"in caf\xe9")}
    (tmp_path / "metrics.jsonl").write_text(f"{json.dumps(record)}\n" + "[" * 100_000)
    assert read_lines(tmp_path / "metrics.jsonl") == ([record], 1)


def test_the_rate_of_a_run_is_that_of_its_end(run):
    metrics = run("ended") / "metrics.jsonl"
    records, _ = read_lines(metrics)
    (ended,) = read(metrics.parent).runs
    assert ended.rate() == records[-1]["images_per_sec"] != ended.last("images_per_sec")
    later = {"kind": "epoch", "epoch": 99, "images_per_sec": 7.0}
    metrics.write_text("\n".join(json.dumps(record) for record in [*records, later]))
    assert read(metrics.parent).runs[0].rate() == 7.0
    metrics.write_text("\n".join(json.dumps(record) for record in records if record["kind"] != "end"))
    (stopped,) = read(metrics.parent).runs
    assert stopped.rate() == ended.last("images_per_sec")


def test_states(run, page, tmp_path, capsys):
    going, stopped, killed = (run(name) for name in ("going", "stopped", "killed"))
    run("done")
    for folder in (going, stopped, killed):
        lines = [line for line in (folder / "metrics.jsonl").read_text().splitlines() if '"epoch": 2' not in line]
        (folder / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    with (stopped / "metrics.jsonl").open("a") as records:
        records.write('{"kind": "stop", "status": 75, "reason": "Stopped: stopped on SIGTERM"}\n')
    with (going / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        _, tables = page(tmp_path / "expts")
        assert {row[0]: row[1] for row in tables["results"][1:]} == {
            "going": "running", "done": "finished", "stopped": "stopped", "killed": "failed",
        }  # fmt: skip
        capsys.readouterr()
        assert runs_tool.main([str(tmp_path / "expts")]) == 0
        printed = capsys.readouterr().out
    assert re.search(r"going +running +1/2", printed) and re.search(r"done +finished +2/2", printed)
    assert "no record of its end" in printed
    message = "error: rank 0: they wait\nrank 1 did not come to all_reduce number 4"
    (tmp_path / "expts" / "killed" / "collectives.json").write_text(json.dumps({"message": message}))
    assert runs_tool.main([str(tmp_path / "expts")]) == 0
    assert "rank 1 did not come to all_reduce number 4" in capsys.readouterr().out


def test_a_run_that_began_from_another_runs_checkpoint_has_that_runs_best(run, page):
    metrics = run("later") / "metrics.jsonl"
    records = [json.loads(line) for line in metrics.read_text().splitlines()]
    records = [record for record in records if record["kind"] != "epoch" or record["epoch"] > 1]
    records[-1] |= {"best_acc1": 0.99, "best_epoch": 1}
    assert records[-1]["kind"] == "end"
    metrics.write_text("".join(json.dumps(record) + "\n" for record in records))
    assert page(metrics.parent)[1]["results"][1][2:5] == ["2 of 2", "99.00%", "1"]


def test_a_run_that_ended_at_its_accuracy_is_finished(run, page):
    folder = run("enough", stop_at_accuracy=0.01)
    text, tables = page(folder)
    assert tables["results"][1][1:3] == ["finished", "1 of 2"] and "Problems and unfinished parts" not in text
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    (folder / "metrics.jsonl").write_text("\n".join(line for line in lines if '"kind": "end"' not in line) + "\n")
    assert page(folder)[1]["results"][1][1] == "failed", "the epoch ended, the run did not"
    not_saved = '{"kind": "stop", "status": 1, "reason": "No space left on device"}'
    (folder / "metrics.jsonl").write_text("\n".join([*lines, not_saved]) + "\n")
    assert page(folder)[1]["results"][1][1] == "failed", "the last checkpoint was not written"


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        ({"runs": {"a": 1}}, "a does not hold lists of numbers"),
        ({"runs": {"a": {"epoch": 1}}}, "a does not hold lists of numbers"),
        ({"runs": {"a": {"epoch": [1], "acc1/valid": ["x"]}}}, "a does not hold lists of numbers"),
        ({"bench": "ladder", "results": {}, "environment": 1}, "environment: Input should be a valid dictionary"),
        ({"bench": "ladder", "results": []}, "results: Input should be a valid dictionary"),
    ],
)
def test_json_of_the_wrong_structure_is_skipped(page, tmp_path, content, problem):
    path = tmp_path / "wrong.json"
    path.write_text(json.dumps(content))
    text, tables = page(path, PUBLISHED)
    assert f"{path}: {problem}" in text and len(tables["results"]) == 1 + 6


def test_curves_may_lack_the_accuracy(page, tmp_path):
    (tmp_path / "curves.json").write_text(json.dumps({"runs": {"a": {"epoch": [1], "acc1/valid": []}}}))
    _, tables = page(tmp_path / "curves.json")
    assert tables["results"][1][:4] == ["a (published)", "published", "1", "-"]


@pytest.mark.parametrize(
    ("file", "content", "problem"),
    [
        ("config.yaml", "a:\n  max_epochs: many\n", "config.yaml is missing or damaged"),
        ("config.yaml", "a:\n  stop_at_accuracy: high\n", "config.yaml is missing or damaged"),
        ("config.yaml", "- 1\n", "config.yaml is missing or damaged"),
        ("environment.json", "[]", "environment.json is missing or damaged"),
        ("environment.json", '{"world_size": "two"}', "environment.json is missing or damaged"),
        ("metrics.jsonl", '{"kind": "end", "worst_classes": [1]}\n', "1 line(s) cannot be read"),
        ("metrics.jsonl", '{"kind": "epoch", "epoch": "1"}\n', "1 line(s) cannot be read"),
    ],
)
def test_values_of_the_wrong_type_are_a_problem_of_their_run(page, tmp_path, capsys, file, content, problem):
    folder = tmp_path / "expts" / os.fsdecode(b"100 %d \xff")
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text("a:\n  max_epochs: 1\n")
    (folder / "environment.json").write_text("{}")
    (folder / "metrics.jsonl").write_text('{"kind": "epoch", "epoch": 1, "acc1/valid": 0.5, "loss/train": NaN}\n')
    with (folder / file).open("a" if file == "metrics.jsonl" else "w") as damaged:
        damaged.write(content)
    text, _ = page(tmp_path / "expts")
    assert problem in text and "50.00%" in text
    assert runs_tool.main([str(tmp_path / "expts")]) == 0
    printed = capsys.readouterr().out
    assert problem in printed and "100 %d \\udcff" in printed


def test_runs_diff(run, capsys):
    first, second = run("one"), run("two", lr=0.02, model="resnet20")
    assert runs_tool.main(["--diff", str(first), str(second)]) == 0
    printed = capsys.readouterr().out
    assert re.search(r"lr +0.1 +0.02", printed) and re.search(r"model +resnet8 +resnet20", printed)
    assert "best acc1" in printed and "batch_size" not in printed
    for name in ("config.yaml", "metrics.jsonl"):
        (second / name).unlink()
    (second / "tb_logs").mkdir(exist_ok=True)
    for arguments, result in ((["--diff", str(first), str(second)], "none yet"), ([str(second)], "0/?")):
        assert runs_tool.main(arguments) == 0  # of a folder with only TensorBoard's files
        printed = capsys.readouterr().out
        assert result in printed and "config.yaml is missing or damaged" in printed
    assert runs_tool.main(["--diff", str(first), str(first.parent)]) == 3
    assert "expts: holds 2 runs; name one of them" in capsys.readouterr().err
    shutil.rmtree(second)
    assert runs_tool.main(["--diff", str(first), str(second)]) == 3
