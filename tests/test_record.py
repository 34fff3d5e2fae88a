"""tools.bench record: measurements, averages, errors, its logs and its table."""

import inspect
import json
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import ROOT, TINY_OPTIONS
from tools.bench import __main__ as bench
from tools.bench import record
from tools.shared.command_line import as_settings
from utils.config import Config
from utils.errors import ConfigError
from utils.run.logging import environment
from utils.run.logging.environment import git_commit

RESULTS = ROOT / "results"


def epochs(*accuracies: float) -> list[dict[str, Any]]:
    """Records of epochs of 10 steps and 2 seconds each."""
    return [
        {
            "kind": "epoch",
            "epoch": number,
            "step": 10 * number,
            "seconds": 5.0 + 2 * number,
            "images_per_sec": 100.0 * number,
            "acc1/valid": accuracy,
        }
        for number, accuracy in enumerate(accuracies, start=1)
    ]


def test_a_seed_is_measured_as_stated(tiny: Callable[..., Config]) -> None:
    trial = record.measure(epochs(0.2, 0.5, 0.4), 200.0, tiny(batch_size=32, seed=7, stop_at_accuracy=0.4), 30.0)
    assert trial == {
        "seed": 7,
        "epochs": 3,
        "reached": True,
        "last_acc1": 0.4,
        "best_acc1": 0.5,
        "best_epoch": 2,
        "seconds": {"command": 30.0, "run": 11.0, "training": 30 * 32 / 200.0},
        "images_per_sec": 200.0,
    }
    assert record.measure(epochs(0.2), 200.0, tiny(stop_at_accuracy=0.4), 1.0)["reached"] is False
    assert record.measure(epochs(0.2), 200.0, tiny(), 1.0)["reached"] is None
    first, *others = epochs(0.2, 0.5, 0.4)
    first.pop("acc1/valid")  # as with validate_every_epochs 2
    assert record.measure([first, *others], 200.0, tiny(), 30.0)["best_epoch"] == 2


@pytest.fixture
def folder(tmp_path: Path, tiny: Callable[..., Config]) -> Callable[..., Path]:
    """Return folder(accuracy of each seed, commits=...): a folder of results with a target of 40 %."""

    def make(*accuracies: float, commits: str = "aaaaaaaaaa") -> Path:
        out = tmp_path / "2030-01-02-tiny"
        for seed, accuracy in enumerate(accuracies):
            own = out / f"seed-{seed}"
            own.mkdir(parents=True)
            config = tiny(seed=seed, stop_at_accuracy=0.4)
            record.write_json(own / "trial.json", record.measure(epochs(accuracy), 200.0, config, 10.0 + seed))
            commit = commits[seed % len(commits)] * 40
            record.write_json(own / "environment.json", {"commit": commit, "device": "a device", "torch": "9"})
            lines = "\n".join(
                f"  {setting.replace('=', ': ', 1)}" for setting in as_settings(config.model_dump(mode="json"))
            )
            (own / "config.yaml").write_text(f"tiny:\n{lines}\n")
        return out

    return make


def test_mean_and_deviation_over_seeds(folder: Callable[..., Path], tiny: Callable[..., Config]) -> None:
    out = folder(0.4, 0.5, 0.6)
    summary = record.summarise(out, "tiny", tiny(stop_at_accuracy=0.4))
    assert (summary["reached"], summary["seeds"]) == (3, [0, 1, 2])
    assert summary["seconds"]["command"] == {"mean": 11.0, "sd": 1.0}
    assert summary["best_acc1"]["mean"] == pytest.approx(0.5)
    assert summary["best_acc1"]["sd"] == pytest.approx(0.1)
    columns, rows = record.table([(out, summary)])
    row = dict(zip(columns, rows[0], strict=True))
    assert row["command, s"] == "11.0 ± 1.0"
    assert row["best acc1, %"] == "50.00 ± 10.00"
    assert row["reached"] == "3 of 3"
    assert (row["device"], row["commit"], row["logs"]) == ("a device", "aaaaaaaa", "2030-01-02-tiny")


def test_a_missed_target_leaves_no_mean_time(folder: Callable[..., Path], tiny: Callable[..., Config]) -> None:
    out = folder(0.4, 0.3)
    summary = record.summarise(out, "tiny", tiny(stop_at_accuracy=0.4))
    assert summary["reached"] == 1
    assert record.table([(out, summary)])[1][0][3:9] == ["1 of 2", "1.0 ± 0.0", "35.00 ± 7.07", *["target missed"] * 3]


def test_seeds_of_two_commits_are_not_averaged(folder: Callable[..., Path], tiny: Callable[..., Config]) -> None:
    with pytest.raises(ConfigError, match=r"seed-1 cannot be averaged with the others: commit bbb.* and aaa"):
        record.summarise(folder(0.4, 0.5, commits="ab"), "tiny", tiny())


def test_a_seed_that_could_not_be_averaged_is_not_run(
    folder: Callable[..., Path], capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(record, "run_seed", lambda *_: pytest.fail("ran a seed for nothing"))
    arguments = ["record", "--config=bs128", f"--out={folder(0.4)}", "--seeds=2", *TINY_OPTIONS]
    arguments += ["--target=0.4", "--set=save_checkpoint=true"]
    monkeypatch.setattr(record, "check_same_config", lambda *_: None)
    assert bench.main(arguments) == 2
    assert "seed-0 cannot be averaged with the others: commit aaa" in capsys.readouterr().err


def test_the_commit_covers_the_whole_repository() -> None:
    assert inspect.signature(environment.git_commit).parameters["root"].default == ROOT


def test_a_commit_of_results_does_not_change_the_code(tmp_path: Path) -> None:
    """A commit of results between two seeds, and a rewritten table, leave both seeds at one commit."""
    if shutil.which("git") is None:
        pytest.skip("git is not installed")

    def git(*arguments: str) -> None:
        identity = ("-c", "user.name=a", "-c", "user.email=a@b")
        subprocess.run(["git", *identity, *arguments], cwd=tmp_path, check=True, capture_output=True)

    def write(name: str, text: str) -> None:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)

    git("init")
    assert git_commit(tmp_path) is None
    write("utils/code.py", "one")
    write("results/README.md", "one")
    git("add", ".")
    git("commit", "-m", "one")
    before = git_commit(tmp_path)
    assert before is not None and len(before) == 40
    write("results/README.md", "two")
    assert git_commit(tmp_path) == before
    git("commit", "-am", "two")
    assert git_commit(tmp_path) == before
    write("utils/code.py", "two")
    assert git_commit(tmp_path) == f"{before} with changes"
    git("commit", "-am", "three")
    assert git_commit(tmp_path) not in (before, f"{before} with changes", None)


def test_seeds_of_another_configuration_are_refused(folder: Callable[..., Path], capsys: Any) -> None:
    out = folder(0.4)
    arguments = [
        "record",
        "--config=bs128",
        f"--out={out}",
        "--seeds=1",
        *TINY_OPTIONS,
        "--set=stop_at_accuracy=0.4",
        "--set=lr=0.123",
    ]
    assert bench.main(arguments) == 2
    assert "was run with lr 0.1, bs128 now has 0.123" in capsys.readouterr().err


def test_table_is_written_between_its_marks(folder: Callable[..., Path], tiny: Callable[..., Config]) -> None:
    out = folder(0.4)
    record.write_json(out / "summary.json", record.summarise(out, "tiny", tiny(stop_at_accuracy=0.4)))
    readme = out.parent / "README.md"
    readme.write_text(f"before\n{record.BEGIN}\nold\n{record.END}\nafter\n")
    for _ in range(2):  # and again, with the same result
        record.update_readme(out.parent)
        text = readme.read_text()
        assert text.startswith(f"before\n{record.BEGIN}\n| configuration |")
        assert text.endswith(f"|\n{record.END}\nafter\n")
        assert "| tiny | 40% | 1 | 1 of 1 |" in text
        assert "old" not in text


def test_results_of_this_repository_are_in_its_table() -> None:
    assert f"{record.BEGIN}\n{record.render_table(RESULTS)}\n{record.END}" in (RESULTS / "README.md").read_text()


@pytest.mark.slow
def test_record_runs_seeds_once_and_keeps_their_logs(tmp_path: Path, capsys: Any) -> None:
    out = tmp_path / "2030-01-02-tiny"
    arguments = [
        "record",
        "--config=bs128",
        "--target=0.01",
        f"--out={out}",
        "--seeds=2",
        "--first_seed=3",
        *TINY_OPTIONS,
    ]
    assert bench.main(arguments) == 0
    assert {path.name for path in out.iterdir()} == {"seed-3", "seed-4", "summary.json"}
    kept = {"config.yaml", "environment.json", "train.log", "metrics.jsonl", "trial.json"}
    assert {path.name for path in (out / "seed-3").iterdir()} == kept
    summary = json.loads((out / "summary.json").read_text())
    assert (summary["seeds"], summary["reached"], summary["epochs"]["mean"]) == ([3, 4], 2, 1)
    seconds = summary["trials"][0]["seconds"]
    assert 0 < seconds["training"] < seconds["run"] < seconds["command"]
    before = (out / "seed-3/metrics.jsonl").read_text()
    capsys.readouterr()
    assert bench.main(arguments) == 0
    assert "seed 3: already in" in capsys.readouterr().out
    assert (out / "seed-3/metrics.jsonl").read_text() == before
