"""tools.bench paired: its runs, resuming, and the comparison."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import TINY_OPTIONS
from tools.bench import __main__ as bench
from tools.bench import paired
from utils.config import load_config

# accuracy of each seed: (without, with the higher learning rate)
ACCURACY = {0: (0.50, 0.53), 1: (0.60, 0.61), 2: (0.55, 0.53)}


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """Record trained seeds as (folder, seed) without starting processes."""
    done: list[tuple[str, int]] = []

    def run_seed(yaml_config: Path, name: str, settings: Sequence[str], seed: int, out: Path) -> dict[str, Any]:
        config = load_config(yaml_config, name, [*settings, f"seed={seed}"])
        done.append((out.name, seed))
        folder = out / f"seed-{seed}"
        folder.mkdir()
        trial = {"seed": seed, "last_acc1": ACCURACY[seed][config.lr > 0.1], "seconds": {"run": 10 * config.lr}}
        (folder / "trial.json").write_text(json.dumps(trial))
        (folder / "environment.json").write_text(
            json.dumps(paired.describe_environment(paired.choose_device("cpu", 0), 1))
        )
        (folder / "config.yaml").write_text(f"default:\n  seed: {seed}\n" + as_yaml(config.model_dump(mode="json")))
        return trial

    monkeypatch.setattr(paired, "run_seed", run_seed)
    return done


def as_yaml(values: dict[str, Any]) -> str:
    return "".join(f"  {key}: {json.dumps(value)}\n" for key, value in values.items() if key != "seed")


def command(out: Path, seeds: int, *options: str) -> list[str]:
    return ["paired", "--config=default", *TINY_OPTIONS, f"--seeds={seeds}", f"--out={out}", *options]


def test_seeds_are_paired_and_the_command_resumes(
    tmp_path: Path, runs: list[tuple[str, int]], capsys: pytest.CaptureFixture[str]
) -> None:
    together = "--with=lr=0.2,nesterov=true"
    assert bench.main(command(tmp_path, 2, together)) == 0
    name = "lr=0.2-nesterov=true"
    assert runs == [("without", 0), (name, 0), ("without", 1), (name, 1)]
    assert bench.main(command(tmp_path, 3, together)) == 0
    assert runs[4:] == [("without", 2), (name, 2)]
    report = json.loads((tmp_path / "paired.json").read_text())
    arm = report["arms"]["lr=0.2,nesterov=true"]
    assert list(arm["gains"].values()) == pytest.approx([3, 1, -2])
    assert arm["gain"] == pytest.approx({"mean": 2 / 3, "sd": 2.5166}, rel=1e-4)
    assert arm["time_ratio"]["mean"] == pytest.approx(2)
    assert report["arms"]["without"]["gain"] == {"mean": 0, "sd": 0}
    assert "+0.67 ± 2.52" in capsys.readouterr().out


def test_other_settings_in_the_same_folder_are_refused(tmp_path: Path, runs: list[tuple[str, int]]) -> None:
    assert bench.main(command(tmp_path, 1, "--with=lr=0.2")) == 0
    assert bench.main(command(tmp_path, 1, "--with=lr=0.2", "--set=momentum=0.8")) == 2
    assert len(runs) == 2


@pytest.mark.parametrize("setting", ["lr=high", "no_such_key=1", "lr=0.2,momentum=7", "seed=0"])
def test_a_mistake_is_reported_before_the_first_run(setting: str, tmp_path: Path, runs: list[tuple[str, int]]) -> None:
    assert bench.main(command(tmp_path, 1, f"--with={setting}")) == 2
    assert runs == []


def test_only_seeds_of_both_arms_count() -> None:
    def trials(accuracies: dict[int, float]) -> dict[int, dict[str, Any]]:
        return {seed: {"seed": seed, "last_acc1": value, "seconds": {"run": 4.0}} for seed, value in accuracies.items()}

    compared = paired.compare({"without": trials({0: 0.5, 1: 0.6}), "a=1": trials({1: 0.7, 2: 0.9})})
    assert compared["arms"]["a=1"]["seeds"] == [1]
    assert compared["arms"]["a=1"]["gain"] == {"mean": pytest.approx(10), "sd": None}


def test_commas_inside_lists_do_not_split() -> None:
    assert paired.split_settings("a=[1,2],b=true,c=log") == ["a=[1,2]", "b=true", "c=log"]
