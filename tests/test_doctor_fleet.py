"""tools.doctor --baseline DIR: records of many nodes and days, and how often a job is interrupted."""

import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from tools.doctor import __main__ as doctor
from tools.doctor.findings import Document, Finding


def record(folder: Path, node: str, day: int, *rates: float, failed: str = "") -> None:
    """Store a record of a node whose devices have these rates."""
    folder.mkdir(exist_ok=True)
    findings = [Finding("limits", "ok", "", where=node, figures={"bf16 TFLOP/s": rate}) for rate in rates]
    findings += [Finding(failed, "fail", "broken", "repair the node", node)] if failed else []
    time = datetime(2026, 11, day, 23, tzinfo=UTC)
    document = Document(worst="ok", device="H200", software={"torch": "2"}, time=time, findings=findings)
    (folder / f"{node}-{day}.json").write_text(document.model_dump_json())


def judged(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, dict[str, list[str]]]:
    """Return the exit status and {check: messages}."""
    status, found = doctor.main(["--json", *map(str, arguments)]), dict[str, list[str]]()
    for finding in json.loads(capsys.readouterr().out)["findings"]:
        found.setdefault(finding["check"], []).append(finding["message"])
    return status, found


def test_outliers_and_repeat_offenders_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for day in (1, 2, 3):
        record(tmp_path / "dir", "good", day, 700, 710)
        record(tmp_path / "dir", "always", day, 700, 600)
        record(tmp_path / "dir", "once", day, 700, 600 if day == 2 else 700)
        record(tmp_path / "dir", "changing", day, 500 if day == 1 else 700, 700, failed="pcie" if day == 3 else "")
    status, found = judged(capsys, "--baseline", tmp_path / "dir")
    assert status == 2
    (figure,) = found["comparison"]
    assert figure.startswith("limits, bf16 TFLOP/s: median 700 (500 to 710, the middle half within 0.0%) over 24; ")
    assert "2026-11-02 once #2 600, 1.17 times slower than the median of the others" in figure
    assert found["repeat offenders"] == [
        "4 nodes on 3 days; slow or failed on several: always on 3 days (limits, bf16 TFLOP/s), "
        "changing on 2 days (limits, bf16 TFLOP/s, pcie)"
    ]
    assert found["pcie"] == ["broken"] and "--runs DIR" in found["interruptions"][0]


def test_days_without_faults_pass(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for day in (1, 2):
        record(tmp_path / "dir", "good", day, 700)
    status, found = judged(capsys, "--baseline", tmp_path / "dir")
    assert (status, found["repeat offenders"]) == (0, ["1 nodes on 2 days; slow or failed on several: none"])


def run(folder: Path, *records: dict[str, Any]) -> None:
    folder.mkdir(parents=True)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(one) + "\n" for one in records))


def start(began: float, kind: str = "start", step: int = 0) -> dict[str, Any]:
    return {"kind": kind, "time": began, "step": step, "world_size": 16, "clock_seconds": {"start": 0.0}}


def at(hours: float, kind: str = "step", **values: Any) -> dict[str, Any]:
    return {"kind": kind, "step": int(hours), **values, "clock_seconds": {"train": 3600 * hours}}


def test_runs_tell_how_often_a_job_is_interrupted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """16 ranks: killed after 30 h, an error after 10 h, stopped on request after 20 h, wrong usage, finished."""
    record(tmp_path / "dir", "node", 1, *[700.0] * 8)
    error, usage, saved = (at(hours, "stop", status=status) for hours, status in ((10, 1), (1, 2), (20, 75)))
    run(tmp_path / "runs/a", start(0), at(30), start(2e5, "resume", 30), error, start(3e5, "resume", 40), saved)
    run(tmp_path / "runs/b", start(0), usage, start(1e5), at(39, "end"))
    run(tmp_path / "runs/a.1", start(0), at(30))  # lost before its first checkpoint: the next run's ledger repeats it
    options = ["--baseline", tmp_path / "dir", "--runs", tmp_path / "runs"]
    status, found = judged(capsys, *options, "--checkpoint-seconds", 10)
    first, *jobs = found["interruptions"]
    assert status == 0 and first == (
        "2 in 1,600.0 rank-hours of 3 runs, killed or ended by an error: one in 800.0 rank-hours, standard error 71%"
    )
    # 800 rank-hours / 64 ranks = 12.5 h; sqrt(2 * 10 s * 45,000 s) = 949 s
    assert jobs[1] == "8 node(s) of 8 rank(s): one in 12.50 h; a checkpoint of 10 s every 15.8 min"
    assert len(jobs) == 4

    run(tmp_path / "calm/a", start(0), at(39, "end"))
    _, found = judged(capsys, *options[:3], tmp_path / "calm")
    assert found["interruptions"][0].endswith(": one in at least 208.0 rank-hours, 95 % confidence")
    assert found["interruptions"][1] == "1 node(s) of 8 rank(s): one in at least 26.00 h"


def test_folders_that_hold_nothing_and_missing_options_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert doctor.main(["--baseline", str(tmp_path)]) == 2
    assert f"--baseline {tmp_path}: holds no *.json" in capsys.readouterr().err
    assert doctor.main(["--runs", str(tmp_path)]) == 2
    assert "they need --baseline DIR" in capsys.readouterr().err
    record(tmp_path / "dir", "node", 1, 700)
    assert doctor.main(["--baseline", str(tmp_path / "dir"), "--runs", str(tmp_path)]) == 3
    assert f"--runs {tmp_path}: " in capsys.readouterr().err
