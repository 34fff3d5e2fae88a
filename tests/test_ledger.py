"""utils/clock.py and tools/ledger.py: where the time of a run went, and what a kill leaves of it."""

import errno
import fcntl
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import IO

import pytest
from processes import ROOT, Job

from tools import report, runs
from tools.ledger import Ledger, find_ledger, show_ledger
from utils.clock import _SLOTS, ACTIVITIES, FILE, LOOP, Clock, Start, process_age, read_starts
from utils.errors import DataError


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Time stands still until a test moves it: now.seconds += 1."""
    now = SimpleNamespace(seconds=1000.0)
    clocks = SimpleNamespace(perf_counter=lambda: now.seconds, time=lambda: now.seconds)
    monkeypatch.setattr("utils.clock.time", clocks)
    return now


def test_all_time_belongs_to_one_activity(now: SimpleNamespace) -> None:
    clock = Clock(age=5.0)
    now.seconds += 1
    clock.switch("train")
    now.seconds += 10
    with clock.during("validation"):
        now.seconds += 20
        with clock.during("checkpoint"):
            now.seconds += 40
        now.seconds += 80
    now.seconds += 160
    assert clock.by_activity() == {
        "start": 6, "compile": 0, "train": 170, "replay": 0, "input": 0, "validation": 100, "test": 0, "checkpoint": 40
    }  # fmt: skip
    assert clock.seconds(*LOOP) == 170 and clock.seconds(*ACTIVITIES) == clock.elapsed() == 316


def test_steps_up_to_the_last_of_an_earlier_start_are_replays(now: SimpleNamespace, tmp_path: Path) -> None:
    first = train_to(tmp_path, now, 0, 7)  # killed: it never leaves the with block
    second = Clock()
    assert second.keep(tmp_path, 4) == []
    now.seconds += 3
    second.switch("train")
    for step in range(5, 10):
        now.seconds += 1
        second.count_step(step)
        if step == 5:
            with second.during("validation"):
                now.seconds += 2
    assert second.seconds("replay") == 3 and second.seconds("train") == 2 and second.seconds("validation") == 2
    with second:
        pass
    (one, two), damaged = read_starts(tmp_path / FILE)
    assert (damaged, one.first, one.step, one.replayed, one.ended) == (0, 0, 7, 0, 0)
    assert (two.first, two.reached, two.step, two.replayed, two.ended) == (4, 7, 9, 3, 1)
    assert one.seconds() == first.by_activity() | {"train": 7}, "of the seconds after its end nothing is known"
    assert two.seconds() == second.by_activity() and sum(two.seconds().values()) == two.alive == 10
    ledger = find_ledger(tmp_path)
    assert ledger is not None and (ledger.trained, ledger.replayed) == (12, 3)


def train_to(folder: Path, now: SimpleNamespace, first: int, last: int) -> Clock:
    """A start that trains a step a second and then does nothing more; its thread gives no sign of life."""
    clock = Clock()
    clock._show_life = lambda: None  # type: ignore[method-assign]
    folder.mkdir(exist_ok=True)
    clock.keep(folder, first)
    clock.switch("train")
    for step in range(first + 1, last + 1):
        now.seconds += 1
        clock.count_step(step)
    return clock


def test_a_record_of_which_a_part_was_being_written_has_the_state_before(now: SimpleNamespace, tmp_path: Path) -> None:
    train_to(tmp_path, now, 0, 7)
    path = tmp_path / FILE
    whole = path.read_bytes()
    steps = []
    for place in _SLOTS:
        path.write_bytes(whole[: place + 40] + b"\xff\xff" + whole[place + 42 :])
        [start], _ = read_starts(path)
        steps.append(start.step)
    assert sorted(steps) == [6, 7]
    path.write_bytes(whole + bytes(512) + whole[:100])
    starts, damaged = read_starts(path)
    assert [start.step for start in starts] == [7] and damaged == 2
    assert any("2 records cannot be read" in line for line in show_ledger(tmp_path))


def test_a_full_disk_costs_the_record_and_not_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", fail)
    clock = Clock()
    [note] = clock.keep(tmp_path, 0)
    assert "clock.bin: cannot be written (No space left on device)" in note
    with clock:
        clock.count_step(1)
    assert find_ledger(tmp_path) is None


LOOPING = """
import sys
from pathlib import Path
from utils.clock import Clock
clock = Clock()
clock.keep(Path(sys.argv[1]), 0)
clock.switch("train")
for step in range(1, 1000):
    clock.count_step(step)
    if step == 321:
        with clock.during("validation"):
            print("here", flush=True)
            sys.stdin.read()
"""


def test_sigkill_loses_neither_step_nor_seconds(tmp_path: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", LOOPING, str(tmp_path)], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert process.stdout is not None and process.stdout.readline() == b"here\n"
    time.sleep(1.2)  # signs of life come twice a second
    process.kill()
    process.communicate()
    [start], _ = read_starts(tmp_path / FILE)
    assert (start.step, ACTIVITIES[start.activity], start.ended) == (321, "validation", 0)
    assert start.seconds()["validation"] > 0.4


def start_of(began: float, alive: float, **values: int) -> Start:
    return Start(began, **{"first": 0, "reached": 0, "step": 5, "replayed": 0, "ended": 1, "activity": 2} | values,
                 changed=alive - 1, spent=(alive - 1, *[0.0] * 7), alive=alive)  # fmt: skip


def test_the_parts_add_up_to_the_wall_clock() -> None:
    ledger = Ledger([start_of(1000, 10), start_of(1040, 20, replayed=2), start_of(1100, 5)])
    assert ledger.wall == 105 and ledger.seconds["stopped"] == 30 + 40
    assert ledger.seconds["train"] == 3 and ledger.useful == pytest.approx(3 / 105) and ledger.replayed == 2
    set_back = Ledger([start_of(1000, 10), start_of(990, 20)])
    assert set_back.wall == 30 and set_back.gaps == [-20]


def test_the_command_shows_it(tmp_path: Path, now: SimpleNamespace, capsys: pytest.CaptureFixture[str]) -> None:
    train_to(tmp_path, now, 0, 7)
    (tmp_path / "metrics.jsonl").write_text(3 * (json.dumps({"kind": "resume"}) + "\n"))
    assert runs.main(["--ledger", str(tmp_path)]) == 0
    shown = capsys.readouterr().out
    for text in (
        "1 start, ",
        "training                    7.0 s  100.0%",
        "useful (ETTR): 100.0%",
        "tells of 3 starts",
    ):
        assert text in shown
    assert "steps: 7 done, 7 trained, 0 of them" in shown and "killed, its last activity: training" in shown
    with pytest.raises(DataError, match="no such folder"):
        show_ledger(tmp_path / "elsewhere")
    (tmp_path / "elsewhere").mkdir()
    with pytest.raises(DataError, match=r"no readable clock\.bin"):
        show_ledger(tmp_path / "elsewhere")


def test_the_report_draws_it(tmp_path: Path, now: SimpleNamespace) -> None:
    train_to(tmp_path / "run", now, 0, 7)
    (tmp_path / "run/metrics.jsonl").touch()
    train_to(tmp_path / "run", now, 4, 9)
    _, sections = report.sections_of(report.gather([tmp_path / "run"]))
    [section] = [section for section in sections if section.table == "ledger"]
    assert section.rows[0][:5] == ("run", 2, "12.0 s", "75.0%", 3) and len(section.rows[0]) == len(section.header)
    traces = section.plots[0].traces
    assert {trace["name"]: trace["x"] for trace in traces if trace["x"] != [0]} == {
        "training": [75], "replayed steps": [25]
    }  # fmt: skip


def test_the_process_is_older_than_this_test() -> None:
    assert 0 < process_age() < 86400


# ---- killed and stopped at random

KILLS, STOPS = 10, 2


def train_and_tell(folder: str, told: str, epochs: int, steps: int) -> int:
    """A run that writes each step into `told`, at the same moment as the clock: with the lock that a kill waits for."""
    from tests.conftest import TINY
    from train import main
    from utils.config.command_line import parse_arguments

    count = Clock.count_step

    def count_and_tell(self: Clock, step: int) -> None:
        with locked(Path(told)) as file:
            count(self, step)
            os.write(file.fileno(), b"%d\n" % step)
        time.sleep(0.01)

    Clock.count_step = count_and_tell  # type: ignore[method-assign]
    values = TINY | {"batch_size": 8, "max_epochs": epochs, "limit_train_batches": steps, "checkpoint_every_steps": 5}
    sets = [f"--set={key}={json.dumps(value)}" for key, value in (values | {"lr_warmup_epochs": 1}).items()]
    return main(parse_arguments(["--config=default", f"--run-dir={folder}", *sets]), clock=Clock(process_age()))


@contextmanager
def locked(path: Path) -> Iterator[IO[bytes]]:
    with path.open("ab") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield file


def interrupt(folder: Path, start: Callable[[int], Job], seed: int) -> list[str]:
    """Start a run until it is finished, kill and stop it on the way, and hold its ledger against what was seen."""
    draw = random.Random(seed)
    ends = [signal.SIGKILL] * KILLS + [signal.SIGUSR1] * STOPS
    draw.shuffle(ends)
    told, run, killed_at = folder / "told", folder / "run", []
    best, again, reached = 0, 0, []
    asked = begun = time.time()
    for number, end in enumerate([*ends, None]):
        told.write_bytes(b"")
        job = start(number)
        begun = time.time() if number == 0 else begun
        if end is not None:
            more = draw.randint(1, 8)  # steps: it trains, so that it has a record, and takes signals
            deadline = time.monotonic() + 200
            while told.read_bytes().count(b"\n") < more:
                assert time.monotonic() < deadline, f"start {number} does not train"
                time.sleep(0.002)
            time.sleep(draw.uniform(0, 0.03))
            with locked(told):
                os.kill(job.pid(0), end)
                if end == signal.SIGKILL:
                    killed_at.append((number, time.time()))
                    job.wait(300)
        assert job.wait(300)[0].status == {signal.SIGKILL: -9, signal.SIGUSR1: 75, None: 0}[end]
        steps = [int(line) for line in told.read_bytes().splitlines()]
        again += sum(step <= best for step in steps)
        best = max([best, *steps])
        reached.append(steps[-1])
    # on a busy machine seconds pass before a process has been made, and while it is taken apart
    shortest, longest = (run / "train.log").stat().st_mtime - begun, time.time() - asked
    ledger = find_ledger(run)
    assert ledger is not None and [start.step for start in ledger.starts] == reached
    late = [abs(at - (ledger.starts[number].began + ledger.starts[number].alive)) for number, at in killed_at]
    assert ledger.replayed == again > 0
    assert shortest - 1 < ledger.wall < longest + 1
    return [
        f"ledger {ledger.wall:.2f} s, wall clock {shortest:.2f} s from the first process to the last line of the log, "
        f"{longest:.2f} s with the making of the first and the end of the last process",
        f"replayed {ledger.replayed} steps in the ledger, {again} by the runs' own word at {KILLS} kills",
        f"last sign of life before a kill: at most {max(late):.2f} s away",
    ]


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_ten_kills_and_two_stops_at_random(tmp_path: Path) -> None:
    """The sum is the wall clock to a second, the replayed steps are exact."""

    def start(number: int) -> Job:
        arguments = (str(tmp_path / "run"), str(tmp_path / "told"), 2, 50)
        return Job(tmp_path / str(number), train_and_tell, arguments, [{}])

    Job(tmp_path / "server", int, (), [{}]).wait(120)  # it imports torch
    for line in interrupt(tmp_path, start, seed=1):
        print(line)
