"""tools.bench record: measurements, averages, errors, comparisons on the same seeds, and its logs."""

import json
import subprocess
from unittest.mock import Mock

import pytest

from tests.conftest import CIFAR100, TINY_OPTIONS, read_records
from tools.bench import __main__ as bench
from tools.bench import record
from tools.common import as_settings
from utils.config import load_config
from utils.environment import describe_environment, git_commit
from utils.errors import ConfigError


def epochs(*accuracies):
    """Records of epochs of 10 steps and 2 seconds each."""
    return [
        {"kind": "epoch", "epoch": number, "step": 10 * number, "seconds": 5.0 + 2 * number, "acc1/valid": accuracy}
        for number, accuracy in enumerate(accuracies, start=1)
    ]


def test_a_seed_is_measured_as_stated(tiny):
    trial = record.measure(epochs(0.2, 0.5, 0.4), 200.0, tiny(batch_size=32, seed=7, stop_at_accuracy=0.4), 30.0)
    assert trial == {
        "seed": 7, "epochs": 3, "reached": True, "last_acc1": 0.4, "best_acc1": 0.5, "best_epoch": 2,
        "seconds": {"command": 30.0, "run": 11.0, "training": 30 * 32 / 200.0}, "images_per_sec": 200.0}  # fmt: skip
    assert record.measure(epochs(0.2), 200.0, tiny(stop_at_accuracy=0.4), 1.0)["reached"] is False
    first, *others = epochs(0.2, 0.5, 0.4)
    first.pop("acc1/valid")  # as with validate_every_epochs 2
    assert record.measure([first, *others], 200.0, tiny(), 30.0)["best_epoch"] == 2


def write_seed(out, config, accuracy, environment):
    own = out / f"seed-{config.seed}"
    own.mkdir(parents=True)
    trial = record.measure(epochs(accuracy + 0.1, accuracy), 200.0, config, 10.0 + config.seed)
    trial["seconds"]["run"] *= 10 * config.lr
    record.write_json(own / "trial.json", trial)
    record.write_json(own / "environment.json", environment)
    settings = (setting.replace("=", ": ", 1) for setting in as_settings(config.model_dump(mode="json")))
    (own / "config.yaml").write_text("tiny:\n  " + "\n  ".join(settings) + "\n")
    return trial


@pytest.fixture
def folder(tmp_path, tiny):
    """Return folder(accuracy of each seed, commits=...): a folder of results with a target of 40 %."""

    def make(*accuracies, commits="a"):
        out = tmp_path / f"2030-01-02-tiny-{len(accuracies)}-{commits}"
        for seed, accuracy in enumerate(accuracies):
            environment = {"commit": commits[seed % len(commits)] * 40, "device": "a device", "torch": "9"}
            write_seed(out, tiny(seed=seed, stop_at_accuracy=0.4), accuracy, environment)
        return out

    return make


def test_mean_and_deviation_over_seeds(folder, tiny):
    summary = record.summarise(folder(0.4, 0.5, 0.6), "tiny", tiny(stop_at_accuracy=0.4))
    assert (summary["reached"], summary["seeds"]) == (3, [0, 1, 2])
    assert summary["seconds"]["command"] == {"mean": 11.0, "sd": 1.0}
    assert record.row_of(summary)[:7] == ["tiny", "40%", "3", "3 of 3", "2.0 ± 0.0", "60.00 ± 10.00", "11.0 ± 1.0"]
    summary = record.summarise(folder(0.4, 0.3), "tiny", tiny(stop_at_accuracy=0.4))  # a missed target has no mean time
    assert record.row_of(summary)[3:] == ["1 of 2", "2.0 ± 0.0", "45.00 ± 7.07", *["target missed"] * 3]


def test_seeds_of_other_commits_or_settings_are_not_averaged(folder, tiny):
    out = folder(0.4, 0.5, commits="ab")
    with pytest.raises(ConfigError, match=r"seed-1 was run with commit b{40}, unlike tiny now"):
        record.summarise(out, "tiny", tiny(stop_at_accuracy=0.4))
    with pytest.raises(ConfigError, match=r"seed-0 was run with lr 0\.1, unlike tiny now; give another --out"):
        record.summarise(out, "tiny", tiny(stop_at_accuracy=0.4, lr=0.123))


def test_a_commit_of_results_does_not_change_the_code(tmp_path):
    """A commit of results between two seeds, and a rewritten table, leave both seeds at one commit."""

    def commit():
        for arguments in (["init"], ["add", "."], ["-c", "user.name=a", "-c", "user.email=a@b", "commit", "-m", "x"]):
            subprocess.run(["git", *arguments], cwd=tmp_path, check=True, capture_output=True)
        return git_commit(tmp_path)

    for name in ("utils", "results"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").write_text("one")
    before = commit()
    (tmp_path / "results/file").write_text("two")
    assert git_commit(tmp_path) == before == commit()
    (tmp_path / "utils/file").write_text("two")
    assert git_commit(tmp_path) == f"{before} with changes"


@pytest.fixture
def runs(monkeypatch):
    """Record trained seeds as (folder, seed) without starting processes; a higher lr gains 3, 1, -2 points."""
    done = []

    def run_seed(yaml_config, block, settings, out):
        config = load_config(yaml_config, block, settings)
        done.append((out.name, config.seed))
        accuracy = (0.50, 0.60, 0.55)[config.seed] + (config.lr > 0.1) * (0.03, 0.01, -0.02)[config.seed]
        return write_seed(out, config, accuracy, describe_environment(record.choose_device("cpu", 0), 1))

    monkeypatch.setattr(record, "run_seed", run_seed)
    return done


def command(out, seeds, *options):
    return ["record", "--config=bs128", *TINY_OPTIONS, "--set=lr=0.1", f"--seeds={seeds}", f"--out={out}", *options]


def test_seeds_are_paired_and_the_command_resumes(tmp_path, runs, capsys):
    other = "bs128+lr=0.2+nesterov=true"
    assert bench.main(command(tmp_path, 2, f"--against={other}")) == 0
    name = "bs128-lr=0.2-nesterov=true"
    assert runs == [("bs128", 0), (name, 0), ("bs128", 1), (name, 1)]
    assert bench.main(command(tmp_path, 1, f"--against={other}", "--first_seed=2")) == 0
    assert runs[4:] == [("bs128", 2), (name, 2)]
    summary, first = (json.loads((tmp_path / each / "summary.json").read_text()) for each in (name, "bs128"))
    against = summary["against"]
    assert against["gains"] == pytest.approx([3, 1, -2])
    assert against["gain"] == pytest.approx({"mean": 2 / 3, "sd": 2.5166}, rel=1e-4)
    assert against["time_ratio"]["mean"] == pytest.approx(2)
    assert "0.67 ± 2.52 points of last acc1 over bs128, by seed +3.00 +1.00 -2.00; 2.00" in capsys.readouterr().out
    common_seed = record.compare(summary["trials"][1:], first["trials"][:2])  # only seeds of both count
    assert common_seed["gain"] == {"mean": pytest.approx(1), "sd": None}
    for mistake in ([other, "--set=momentum=0.8"], ["bs128+no_such_key=1"], ["nothing"]):
        assert bench.main(command(tmp_path, 9, "--against", *mistake)) == 2
    assert len(runs) == 6, "a mistake is reported before the first run"


def test_a_seeds_run_begins_anew_keeps_its_logs_and_ends_with_its_status(tmp_path, monkeypatch):
    (tmp_path / ".seed-3.partial/checkpoints/of-an-interrupted-run").mkdir(parents=True)
    settings = [word.removeprefix("--set=") for word in TINY_OPTIONS] + ["save_checkpoint=false", "seed=3"]
    seconds = record.run_seed(CIFAR100, "bs128", [*settings, "stop_at_accuracy=0.01"], tmp_path)["seconds"]
    (end,) = read_records(tmp_path / "seed-3", "end")
    assert seconds["training"] == 4 * 32 / end["images_per_sec"] and 0 < seconds["run"] < seconds["command"]
    assert [path.name for path in tmp_path.iterdir()] == ["seed-3"]
    kept = {"config.yaml", "environment.json", "train.log", "metrics.jsonl", "trial.json"}
    assert {path.name for path in (tmp_path / "seed-3").iterdir()} == kept
    for returncode, status in ((2, "2"), (-9, "1")):  # the second: ended by a signal
        monkeypatch.setattr(subprocess, "run", Mock(return_value=Mock(returncode=returncode)))
        with pytest.raises(SystemExit, match=status):
            record.run_seed(CIFAR100, "bs128", settings, tmp_path)
