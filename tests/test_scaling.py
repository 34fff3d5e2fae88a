"""The scaling benchmark's arithmetic, what it refuses, and one run of it."""

import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

from tools.bench.__main__ import main
from tools.bench.scaling import Records, add_report, cases_of, check_comparable, summarise
from utils.errors import ConfigError, DataError


def trials(*speeds: float, **more: list[float]) -> dict[str, list[float]]:
    return {"train_images_per_sec": [*speeds], "epoch_images_per_sec": [speed / 2 for speed in speeds], **more}


def test_speed_up_and_efficiency_are_of_medians() -> None:
    records = {
        ("strong", 1): trials(100, 90, 500),
        ("strong", 4): trials(300, 320, 1, communication_share=[0.1, 0.1, 0.1]),
        ("weak", 2): trials(50.0),
    }
    results = summarise(records)
    assert results["strong 4"]["train_speed_up"] == 3.0
    assert results["strong 4"]["train_efficiency"] == 0.75
    assert results["strong 4"]["epoch_speed_up"] == 3.0
    assert results["strong 4"]["communication_share"].median == 0.1
    assert results["weak 2"]["train_efficiency"] == 1.0  # the fewest processes are the reference


def test_runs_that_differ_are_not_mixed() -> None:
    config, environment = {"model": "resnet8"}, {"torch": "2.14", "host": "a"}
    check_comparable([(config, environment), (config, environment | {"host": "b"})])
    with pytest.raises(ConfigError, match="cannot be compared: model is resnet8 in one and resnet50 in another"):
        check_comparable([(config, environment), ({"model": "resnet50"}, environment)])
    with pytest.raises(ConfigError, match=r"torch is 2\.14 in one and 2\.13 in another"):
        check_comparable([(config, environment), (config, environment | {"torch": "2.13"})])


def test_batches_are_checked_before_anything_runs(tiny: Any) -> None:
    assert {key: case.batch_size for key, case in cases_of(tiny(), [1, 2], ["strong", "weak"]).items()} == {
        ("strong", 1): 32, ("strong", 2): 32, ("weak", 1): 32, ("weak", 2): 64,
    }  # fmt: skip
    message = "batch_size 32 cannot be split evenly over 3 ranks; use a multiple of 3, for example 33"
    with pytest.raises(ConfigError, match=message):
        cases_of(tiny(), [1, 3], ["strong"])


@pytest.mark.slow
def test_a_run_and_its_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = tmp_path / "scaling.json"
    keys = ["dataset=shapes", "num_classes=10", "model=resnet8", "device=cpu", "data_loader=device",
            "enable_compile=false", "batch_size=8", "limit_valid_batches=1"]  # fmt: skip
    common = ["scaling", "--config=default", *(f"--set={key}" for key in keys)]
    common += ["--mode=weak", "--steps=3", "--dropped=1", "--trials=1"]
    assert main([*common, "--nproc", "2", "--json", str(report)]) == 0
    assert "weak 2" in capsys.readouterr().out
    content = json.loads(report.read_text())
    measured = {
        name: trials["values"] for name, trials in content["results"]["weak 2"].items() if isinstance(trials, dict)
    }
    assert set(measured) == {"step_seconds", "train_images_per_sec", "epoch_images_per_sec", "communication_share"}
    assert measured["train_images_per_sec"] == pytest.approx([16 / measured["step_seconds"][0]])
    added: Records = defaultdict(lambda: defaultdict(list))
    assert add_report(added, report) == (content["config"], content["environment"])
    assert added == {("weak", 2): measured}
    with pytest.raises(DataError, match=r"absent\.json: not a report of .*No such file"):
        add_report(added, tmp_path / "absent.json")
    report.write_text(json.dumps(content | {"bench": "ladder"}))
    with pytest.raises(ConfigError, match="a report of `bench ladder`; expected one of `bench scaling`"):
        add_report(added, report)
