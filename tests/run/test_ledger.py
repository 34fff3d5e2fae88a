"""The clock of a run, and what tools.runs shows of it: how a run spent its time, over all of its starts."""

import json
import re
import time
from types import SimpleNamespace
from unittest.mock import Mock

import pytest

from tests.conftest import POLLS, interrupt, read_records, run
from tools import runs
from train import Trainer
from utils.run.clock import ACTIVITIES, LOOP, WORK, Clock
from utils.run.folder import _cut_records


@pytest.fixture
def now(monkeypatch):
    """A clock that only the test advances: now.seconds += 1."""
    now = SimpleNamespace(seconds=1000.0)
    monkeypatch.setattr("utils.run.clock.time", SimpleNamespace(perf_counter=lambda: now.seconds))
    return now


def test_all_time_belongs_to_one_activity(now):
    clock = Clock(age=5.0)
    now.seconds += 1
    clock.switch("train")
    now.seconds += 10
    with clock.during("validation"):
        now.seconds += 20
        with clock.during("checkpoint"):
            now.seconds += 40
        now.seconds += 80
    with clock.during("compile"):
        now.seconds += 160
    spent = {"start": 6, "train": 10, "compile": 160, "validation": 100, "checkpoint": 40}
    assert clock.by_activity() == dict.fromkeys(ACTIVITIES, 0) | spent
    assert [clock.seconds(*names) for names in (LOOP, WORK, ACTIVITIES)] == [170, 310, 316]


def test_steps_up_to_the_last_of_an_earlier_start_are_replays(now):
    clock = Clock()
    clock.step, clock.reached = 4, 7
    now.seconds += 3
    clock.switch("train")
    for step in range(5, 10):
        now.seconds += 1
        clock.count_step(step)
        if step == 5:
            with clock.during("validation"):
                now.seconds += 2
    assert clock.seconds("replay") == 3 and clock.seconds("train") == 2 and clock.seconds("validation") == 2


def test_images_per_second_leave_the_first_window_of_each_start_out(now):
    def window(images, seconds):
        now.seconds += seconds
        clock.count_step(0, images)
        return clock.close_window().images_per_sec

    clock = Clock()
    clock.switch("train")
    clock.start_epoch()
    assert window(100, 50.0) == 2 == clock.images_per_sec() == clock.whole.images_per_sec  # the only one
    window(600, 2.0), window(400, 2.0)
    assert clock.images_per_sec() == clock.whole.images_per_sec == 250
    now.seconds += 9  # between two epochs
    clock.start_epoch()
    window(300, 1.0), window(100, 1.0)
    assert clock.images_per_sec() == 200 and clock.images == 1500
    total, clock = clock.whole, Clock()
    clock.total = total
    clock.switch("train")
    clock.start_epoch()
    window(500, 100.0)
    assert clock.images_per_sec() == 1400 / 6


def begin(began, step=0):
    """Return the record of a start after four seconds."""
    return {"kind": "resume" if step else "start", "step": step, "time": began + 4, "clock_seconds": {"start": 4.0}}


def at(step, kind="step", **seconds):
    return {"kind": kind, "step": step, "clock_seconds": {"start": 4.0, **seconds}}


LOST_AND_RESUMED = (
    begin(1000), at(3, train=3), at(7, "lost", train=7), at(1, train=1),  # the last: of a start that recorded no begin
    begin(1030, 4), at(7, replay=3), at(9, "end", replay=3, train=0.5, input=0.5, validation=0.5, test=0.5),
)  # fmt: skip


def test_the_last_dropped_record_of_each_start_is_kept(tmp_path):
    rows = begin(1000), at(3), at(7), begin(1030, 2), at(3), at(5)
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row | {"epoch": 0}) + "\n" for row in rows))
    _cut_records(tmp_path, 2, 0)
    kept = [(record["kind"], record["step"]) for record in read_records(tmp_path)]
    assert kept == [("start", 0), ("lost", 7), ("resume", 2), ("lost", 5)]


def test_the_parts_add_up_to_the_wall_clock():
    starts, seconds = runs.find_ledger(LOST_AND_RESUMED)
    assert starts == 2 and sum(seconds.values()) == 1030 + 9 - 1000
    spent = {"start": 8, "train": 7.5, "input": 0.5, "validation": 0.5, "test": 0.5, "replay": 3, "stopped": 19}
    assert seconds == dict.fromkeys(seconds, 0) | spent
    assert runs.find_ledger([{"kind": "start"}]) == (0, {})
    # clocks that disagree add no time
    rows = [begin(1000), at(6, train=6), begin(990, 6), at(9, train=3), {"kind": "step", "step": 9}]
    assert sum(runs.find_ledger(rows)[1].values()) == 10 + 7


def test_the_command_shows_it(tmp_path, capsys):
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in LOST_AND_RESUMED))
    assert runs.main([str(tmp_path)]) == 0
    shown = re.sub(" +", " ", capsys.readouterr().out)
    for text in ("│ 2 │ 23.1% │", "│ train │ 7.5 │ 19.2% │", "│ stopped │ 19.0 │ 48.7% │", "│ wall clock │ 39.0 │"):
        assert text in shown


def test_a_killed_start_stays_in_the_ledger(tiny, one_rank, tmp_path):
    """Although its records are dropped: the run goes back to step 6."""
    began = time.time()
    config = tiny(max_epochs=2, log_freq=1, checkpoint_every_steps=3)
    trainer = Trainer(config, one_rank, tmp_path / "run", "tiny", "auto")
    interrupt(trainer, POLLS + 4, Mock(side_effect=KeyboardInterrupt))  # after step 8
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    assert re.search(r"step 2 .* left$", (tmp_path / "run/train.log").read_text(), re.M)  # a forecast within an epoch
    metrics = tmp_path / "run/metrics.jsonl"
    *kept, stop = metrics.read_text().splitlines()
    assert [json.loads(stop)[key] for key in ("kind", "status", "step")] == ["stop", 130, 8]
    assert began < json.loads(stop)["time"] < time.time()
    metrics.write_text("\n".join([*kept, ""]))  # a killed start writes no "stop"
    first, before = runs.find_ledger(read_records(tmp_path / "run"))
    time.sleep(0.5)  # stopped
    clock = run(config, one_rank, tmp_path / "run").run.clock
    *_, last, end = (read_records(tmp_path / "run", kind)[-1]["images_per_sec"] for kind in ("epoch", "end"))
    assert (last, end) == (clock.images_per_sec(), clock.whole.images_per_sec)  # of the epoch, of all starts
    second, seconds = runs.find_ledger(read_records(tmp_path / "run"))
    assert (first, second) == (1, 2) and seconds["stopped"] >= 0.49
    assert sum(before.values()) + 0.49 <= sum(seconds.values()) <= time.time() - began + 0.01  # rounded to 1 ms
    assert seconds["replay"] > 0 == before["replay"]
    assert [row["step"] for row in read_records(tmp_path / "run", "lost")] == [8]
