"""tools.bench: the protocol, and each command from the command line to its JSON report."""

import json
import subprocess
import sys
from pathlib import Path

from tools.bench.common import Sample, measure


def test_trials_are_interleaved_and_the_warm_up_is_dropped() -> None:
    order: list[str] = []

    def case(name: str) -> dict[str, float]:
        order.append(name)
        return {"calls": float(order.count(name))}

    results = measure({"a": lambda: case("a"), "b": lambda: case("b")}, trials=3, warm_up=1)
    assert order == ["a", "b"] * 4
    assert results["a"]["calls"].values == results["b"]["calls"].values == (2, 3, 4)


def test_a_sample_tells_median_and_spread() -> None:
    sample = Sample((3.0, 1.0, 2.0))
    assert f"{sample:.1f}" == "2.0 (1.0-3.0)"
    assert sample.as_json() == {"median": 2.0, "min": 1.0, "max": 3.0, "values": [3.0, 1.0, 2.0]}


def bench(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "tools.bench", *arguments], capture_output=True, text=True, timeout=240, check=False
    )


def test_loaders_measures_every_loader_and_writes_the_report(tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    small = ["--set", "batch_size=32", "--set", "num_data_workers=1", "--batches=4", "--steps=2", "--trials=2"]
    finished = bench("loaders", "--config=quickstart", "--loaders=torchvision,device", f"--json={report}", *small)
    assert finished.returncode == 0, finished.stderr
    assert "torchvision" in finished.stdout and "waiting" in finished.stdout
    content = json.loads(report.read_text())
    assert content["config"]["batch_size"] == 32 and content["environment"]["torch"]
    assert set(content["results"]) == {"torchvision", "device"}
    for values in content["results"].values():
        assert len(values["images_per_sec"]["values"]) == 2
        assert values["images_per_sec"]["min"] > 0
        assert 0 <= values["waiting"]["median"] < 1


def test_bad_usage_ends_with_status_2() -> None:
    assert bench("loaders", "--trials=0").returncode == 2
    assert bench("nothing").returncode == 2
