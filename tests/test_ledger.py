"""The clock of a run, and the ledger: how a run spent its time, over all of its starts."""

import json
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.test_resume import POLLS
from tests.test_resume import interrupt as interrupt_at
from tests.test_train import run as train_run
from tools import runs
from tools.shared.ledger import find_ledger, show_ledger
from train import Trainer
from utils.config import Config
from utils.distributed.world import World
from utils.errors import DataError
from utils.timing.clock import ACTIVITIES, LOOP, Clock, process_age


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A clock that only the test advances: now.seconds += 1."""
    now = SimpleNamespace(seconds=1000.0)
    monkeypatch.setattr("utils.timing.clock.time", SimpleNamespace(perf_counter=lambda: now.seconds))
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


def test_steps_up_to_the_last_of_an_earlier_start_are_replays(now: SimpleNamespace) -> None:
    clock = Clock()
    clock.resume(4, reached=7)
    now.seconds += 3
    clock.switch("train")
    for step in range(5, 10):
        now.seconds += 1
        clock.count_step(step)
        if step == 5:
            with clock.during("validation"):
                now.seconds += 2
    assert clock.seconds("replay") == 3 and clock.seconds("train") == 2 and clock.seconds("validation") == 2


def write(folder: Path, *records: dict[str, Any]) -> Path:
    """Write a run folder with this metrics.jsonl."""
    folder.mkdir(exist_ok=True)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    return folder


def begin(began: float, step: int = 0) -> dict[str, Any]:
    """Return the record of a start after four seconds."""
    return {"kind": "resume" if step else "start", "step": step, "time": began + 4, "clock_seconds": {"start": 4.0}}


def at(step: int, kind: str = "step", **seconds: float) -> dict[str, Any]:
    return {"kind": kind, "step": step, "clock_seconds": {"start": 4.0, **seconds}}


LOST_AND_RESUMED = (
    begin(1000), at(3, train=3), at(7, "lost", train=7),
    begin(1030, 4), at(7, replay=3), at(9, "end", replay=3, train=2),
)  # fmt: skip


def test_the_parts_add_up_to_the_wall_clock(tmp_path: Path) -> None:
    ledger = find_ledger(write(tmp_path, *LOST_AND_RESUMED))
    assert ledger is not None and ledger.wall == 1030 + 9 - 1000
    assert ledger.seconds == dict.fromkeys(ledger.seconds, 0) | {"train": 9, "replay": 3, "start": 8, "stopped": 19}
    assert ledger.useful == pytest.approx(9 / 39) and (ledger.trained, ledger.replayed) == (12, 3)
    assert [(start.first, start.step, start.ended) for start in ledger.starts] == [(0, 7, False), (4, 9, True)]


def test_clocks_that_disagree_and_unreadable_lines_are_reported(tmp_path: Path) -> None:
    write(tmp_path, begin(1000), at(6, train=6), begin(990, 6), at(9, train=3), {"kind": "step", "step": 9})
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"kind": "st')
    ledger = find_ledger(tmp_path)
    assert ledger is not None and ledger.wall == 10 + 7 and ledger.gaps == [-20]
    shown = "\n".join(show_ledger(tmp_path))
    assert "1 line of metrics.jsonl cannot be read" in shown and "starts overlap by 20.0 s" in shown


def test_the_command_shows_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path, *LOST_AND_RESUMED)
    assert runs.main(["--ledger", str(tmp_path)]) == 0
    shown = capsys.readouterr().out
    for text in (
        "2 starts, ", "training                    9.0 s   23.1%", "useful (ETTR): 23.1%", "finished",
        "steps: 9 done, 12 trained, 3 of them", "killed: no record of its last seconds",
    ):  # fmt: skip
        assert text in shown
    with pytest.raises(DataError, match="no such folder"):
        show_ledger(tmp_path / "elsewhere")
    with pytest.raises(DataError, match=r"holds no metrics\.jsonl with clock_seconds"):
        show_ledger(write(tmp_path / "elsewhere", {"kind": "start"}))


def test_a_start_that_stopped_on_request_shows_its_exit_status(tmp_path: Path) -> None:
    stop = at(3, "stop", train=3) | {"status": 75}
    assert show_ledger(write(tmp_path, begin(1000), stop))[-1].endswith("exit status 75")


def test_process_age_counts_seconds() -> None:
    earliest, first, latest = time.monotonic(), process_age(), time.monotonic()
    time.sleep(0.3)
    shortest, second, longest = time.monotonic() - latest, process_age(), time.monotonic() - earliest
    tick = 0.02  # the kernel counts 100 ticks per second
    assert shortest - tick <= second - first <= longest + tick


def test_a_finished_run_without_checkpoints_is_not_in_the_next_ones_ledger(
    tiny: Callable[..., Config], one_rank: World, tmp_path: Path
) -> None:
    for _ in range(2):
        train_run(tiny(max_epochs=1, save_checkpoint=False), one_rank, tmp_path / "run")
    ledger = find_ledger(tmp_path / "run")
    assert (tmp_path / "run.1").exists() and ledger is not None and len(ledger.starts) == 1


@pytest.mark.parametrize("saves", [True, False], ids=["from a checkpoint", "before the first checkpoint"])
def test_a_killed_start_stays_in_the_ledger(
    tiny: Callable[..., Config], one_rank: World, tmp_path: Path, saves: bool
) -> None:
    """Although its records are dropped: the run goes back to step 6, or starts again in a new folder."""
    began = time.time()
    config = tiny(max_epochs=2, log_freq=1, save_checkpoint=saves, checkpoint_every_steps=3)
    trainer = Trainer(config, one_rank, tmp_path / "run", "tiny", "auto")

    def die() -> None:
        raise KeyboardInterrupt

    interrupt_at(trainer, POLLS + 4, die)  # after step 8
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    metrics = tmp_path / "run/metrics.jsonl"
    *kept, stop = metrics.read_text().splitlines()
    assert json.loads(stop)["kind"] == "stop" and json.loads(stop)["status"] == 130
    metrics.write_text("\n".join([*kept, ""]))  # a killed start writes no "stop"
    before = find_ledger(tmp_path / "run")
    time.sleep(0.5)  # stopped
    train_run(config, one_rank, tmp_path / "run")
    assert (tmp_path / "run.1").exists() is not saves  # without a checkpoint, the earlier run is moved
    ledger = find_ledger(tmp_path / "run")
    assert before is not None and ledger is not None
    lost, second = ledger.starts
    first_step = 6 if saves else 0
    assert lost == before.starts[0] and (second.first, second.step, second.replayed) == (first_step, 8, 8 - first_step)
    assert ledger.seconds["stopped"] >= 0.49 and ledger.wall <= time.time() - began
    assert second.seconds["replay"] > 0 and (lost.ended, second.ended) == (False, True)
