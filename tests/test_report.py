"""tools.report, tools.runs, tools.history: published curves, whole runs, and all that can be wrong with a run."""

import fcntl
import html.parser
import json
import re
import shutil

import pytest

from tests.conftest import ROOT
from tools import runs as runs_tool
from tools.history import differences, read, read_events, same_but_seed
from tools.report import duration, main
from train import Trainer

pytest.importorskip("matplotlib", reason='matplotlib is missing: pip install ".[report]"')
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


@pytest.fixture
def page(tmp_path, capsys):
    """page(RUN, ...) -> (HTML, its tables)."""

    def write(*paths):
        assert main([*map(str, paths), "--out", str(tmp_path / "out")]) == 0
        text = (tmp_path / "out/report.html").read_text()
        return text, Tables(text).tables

    return write


@pytest.fixture
def run(tiny, alone, tmp_path):
    """run(name, **changes) -> the folder of a small finished run."""

    def train(name, **changes):
        folder = tmp_path / "expts" / name
        Trainer(tiny(max_epochs=2, **changes), alone, folder, "tiny", "auto").train()
        return folder

    return train


def test_published_curves_give_the_published_figures(page):
    _, tables = page(PUBLISHED)
    best = {row[0]: (row[3], row[4]) for row in tables["results"][1:]}
    assert best["bs128-opt (published)"] == ("75.87%", "98")
    assert best["bs1024-warmup-opt (published)"] == ("76.53%", "103")
    assert best["bs2048-warmup-opt (published)"] == ("75.48%", "92")
    assert best["bs2048-opt (published)"][0] == "71.17%"
    column = tables["targets"][0].index("75%")
    reached = {row[0].split()[0]: row[column].split(",")[0] for row in tables["targets"][1:]}
    times = {row[0].split()[0]: row[column].partition(", ")[2] for row in tables["targets"][1:]}
    assert (times["bs128-opt"], times["bs1024-warmup-opt"]) == (duration(1867), duration(286))  # results/README.md
    assert reached == {
        "bs128-opt": "epoch 77", "bs1024-warmup-opt": "epoch 64", "bs2048-warmup-opt": "epoch 77",
        "bs512-opt": "-", "bs1024-opt": "-", "bs2048-opt": "-",
    }  # fmt: skip


def test_page_is_self_contained_and_its_figures_lie_beside_it(page, tmp_path):
    text, _ = page(PUBLISHED)
    assert not re.search(r"(src|href)=['\"](?!data:)", text) and "<script" not in text
    for name in ("accuracy", "loss", "speed"):
        assert (tmp_path / f"out/{name}.png").read_bytes().startswith(b"\x89PNG")
        assert f"id='figure-{name}'" in text


def test_our_run_reads_alike_from_its_folder_and_from_its_event_files(run):
    folder = run("both", log_to_tensorboard=True)
    (ours,), _, _ = read(folder)
    (events,), _, _ = read(folder / "tb_logs")
    assert ours.state == "finished" and not ours.problems and not events.problems
    for tag in ("loss/train", "loss/valid", "acc1/train", "acc1/valid", "learning_rate"):
        assert [row[tag] for row in events.epochs] == pytest.approx([row[tag] for row in ours.epochs])
    assert events.name == "both"


def test_time_counts_from_the_first_event(tmp_path):
    """The first epoch's own time is part of it."""
    from torch.utils.tensorboard import SummaryWriter

    with SummaryWriter(str(tmp_path / "old/tb_logs")) as writer:
        (file,) = (tmp_path / "old/tb_logs").iterdir()
        writer.flush()
        began = next(iter(read_events(file))).wall_time
        for epoch in (1, 2):
            writer.add_scalar("acc1/valid", 0.5, epoch, walltime=began + 20 * epoch + 5)
    (run,), _, _ = read(tmp_path)
    assert [row["seconds"] for row in run.epochs] == pytest.approx([25, 45])
    assert run.clock == "since the first event"


def test_published_curves_say_what_their_times_count_from(page, tmp_path):
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
    _, tables = page(*folders)
    assert [row[:3] for row in tables["seeds"][1:]] == [["a", "1, 2", "2"], ["c", "1", "1"]]
    assert " ± " in tables["seeds"][1][3] and " ± " not in tables["seeds"][2][3]
    assert tables["differences"] == [["key", "a", "b", "c"], ["seed", "1", "2", "1"], ["lr", "0.1", "0.1", "0.01"]]
    runs = [read(folder)[0][0] for folder in folders]
    assert set(differences(runs)) == {"lr", "seed"} and [len(group) for group in same_but_seed(runs)] == [2, 1]
    assert tables["worst"][0][1] == "class" and len(tables["worst"]) == 1 + 3 * 5


def test_measurements_become_bars_and_scaling(page, tmp_path):
    ladder = tmp_path / "ladder.json"
    environment = {"world_size": 1, "device": "GPU"}
    rungs = {"rungs": {"fp32": {"full": {"median": 680.0}}, "amp": {"full": {"median": 1795.0}}}, "configs": {}}
    ladder.write_text(json.dumps({"bench": "ladder", "environment": environment, "config": {}, "results": rungs}))
    scaling = tmp_path / "scaling.json"
    rows = {
        f"weak {ranks}": {"train_images_per_sec": {"median": rate}, "epoch_images_per_sec": {"median": whole}}
        for ranks, rate, whole in ((1, 100.0, 90.0), (4, 380.0, 270.0))
    }
    scaling.write_text(json.dumps({"bench": "scaling", "config": {}, "results": rows, "trials": []}))
    text, tables = page(ladder, scaling)
    assert "figure-ladder" in text and "figure-scaling" in text
    assert [row[1:] for row in tables["scaling"][1:]] == [
        ["1", "100", "100.0%"], ["4", "380", "95.0%"], ["1", "90", "100.0%"], ["4", "270", "75.0%"],
    ]  # fmt: skip


# ---- what can be wrong


def test_a_damaged_event_file_is_told_and_read_up_to_the_damage(run, page):
    folder = run("hurt", log_to_tensorboard=True) / "tb_logs"
    whole = len(read(folder)[0][0].epochs)
    file = min(folder.glob("events.out.tfevents.*"))
    content = bytearray(file.read_bytes())
    content[-100] ^= 255
    file.write_bytes(content)
    with pytest.raises(ValueError, match="damaged at byte"):
        list(read_events(file))
    text, _ = page(folder)
    assert "a checksum is wrong; what came before it is shown" in text and whole == 2
    file.write_bytes(content[: len(content) // 2])
    assert "cut short" in page(folder)[0]
    file.write_bytes(b"")
    for other in folder.glob("events.out.tfevents.*"):
        other.write_bytes(b"nonsense")
    text, tables = page(folder)
    assert "nothing could be read" in text and tables["results"][1][2] == "0"


def test_a_run_without_metrics_and_one_that_was_cut_short(run, page, tmp_path):
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


def test_an_empty_folder_and_a_missing_one_are_told(page, tmp_path, capsys):
    (tmp_path / "void").mkdir()
    text, tables = page(tmp_path / "void", tmp_path / "gone")
    assert "holds neither a run nor TensorBoard event files" in text and "there is no such file or folder" in text
    assert "Nothing to show" in text and "figure-" not in text
    assert "results" not in tables
    strange = tmp_path / "strange.json"
    strange.write_text("[1, 2]")
    assert "is neither a file of curves nor" in page(strange)[0]


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
    assert "it did not record how it ended" in printed


def test_a_run_that_ended_at_its_accuracy_is_finished(run, page):
    folder = run("enough", stop_at_accuracy=0.01)
    text, tables = page(folder)
    assert tables["results"][1][1:3] == ["finished", "1 of 2"] and "What could not be read" not in text
    assert tables["seeds"][1][0] == "enough"
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    (folder / "metrics.jsonl").write_text("\n".join(line for line in lines if '"kind": "end"' not in line) + "\n")
    assert page(folder)[1]["results"][1][1] == "failed", "the epoch ended, the run did not"


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        ({"runs": {"a": 1}}, "a does not hold lists of numbers"),
        ({"runs": {"a": {"epoch": 1}}}, "a does not hold lists of numbers"),
        ({"runs": {"a": {"epoch": [1], "acc1/valid": ["x"]}}}, "a does not hold lists of numbers"),
        ({"bench": "ladder", "results": {}, "environment": 1}, "its environment is no mapping"),
        ({"bench": "ladder", "results": []}, "its results is no mapping"),
    ],
)
def test_json_of_the_wrong_make_is_passed_over(page, tmp_path, content, problem):
    path = tmp_path / "wrong.json"
    path.write_text(json.dumps(content))
    text, tables = page(path, PUBLISHED)
    assert f"{path}: {problem}" in text and len(tables["results"]) == 1 + 6


def test_curves_may_lack_the_accuracy(page, tmp_path):
    (tmp_path / "curves.json").write_text(json.dumps({"runs": {"a": {"epoch": [1], "acc1/valid": []}}}))
    _, tables = page(tmp_path / "curves.json")
    assert tables["results"][1][:4] == ["a (published)", "published", "1", "-"]


def test_a_run_folder_with_json_of_the_wrong_make(run, page):
    folder = run("odd")
    (folder / "environment.json").write_text("[]")
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"kind": "epoch", "epoch": null}\n')
    text, tables = page(folder)
    assert "environment.json is missing or damaged" in text and tables["results"][1][1] == "finished"


def test_runs_diff(run, capsys):
    first, second = run("one"), run("two", lr=0.02, stem="3x3")
    assert runs_tool.main(["--diff", str(first), str(second)]) == 0
    printed = capsys.readouterr().out
    assert re.search(r"lr +0.1 +0.02", printed) and re.search(r"stem +7x7 +3x3", printed)
    assert "best acc1" in printed and "batch_size" not in printed
    shutil.rmtree(second)
    assert runs_tool.main(["--diff", str(first), str(second)]) == 3
