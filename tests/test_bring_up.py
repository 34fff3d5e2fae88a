"""tools.bring_up: parts cut off in every way resume; its page and figures, the comparison; tools.pack."""

import importlib.metadata
import io
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import sysconfig
import tarfile
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.conftest import ROOT
from tests.processes import PYTHON, wait_until
from tests.rehearse_calls import Transcript, bare_python
from tools import pack
from tools.bring_up import __main__ as command
from tools.bring_up import run
from tools.bring_up.figures import Baseline, Change, Figure, read_baseline, read_figures, read_published
from tools.bring_up.page import write_all
from tools.bring_up.parts import EAGER, PARTS, PYTEST, CallSettings, Part, build_command
from tools.bring_up.progress import BringUpProgress, PartProgress, check_same, read_progress
from tools.bring_up.run import eager_is_faster, estimate, plan, run_parts
from tools.shared import processes
from tools.shared.processes import Deadline
from utils.config import load_config
from utils.errors import ConfigError, DataError, ExpectedError

MACHINE = {"device": "NVIDIA H200", "torch": "2.14.1", "cuda": "13.0", "host": "here", "type": "cuda"}
# Counts its starts in its folder and ends at the start with the given number; hangs at those before.
PROGRAM = """
import pathlib, sys, time
folder, needed, stubborn = pathlib.Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
if stubborn == "deaf":
    import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN)
starts = folder / "starts"
count = len(starts.read_text()) + 1 if starts.exists() else 1
starts.write_text("x" * count)
print("start", count, flush=True)
if count < needed:
    time.sleep(600)
"""


@pytest.fixture
def program(tmp_path: Path) -> Path:
    path = tmp_path / "program.py"
    path.write_text(PROGRAM)
    return path


def fake(program: Path, name: str, starts: int = 1, **rest: Any) -> Part:
    kind = rest.pop("kind", "polite")
    return Part(name, "a fake", f"{program} {{folder}} {starts} {kind}", rest.pop("seconds", 1.0), **rest)


def progress_in(folder: Path) -> BringUpProgress:
    folder.mkdir(parents=True, exist_ok=True)
    found = read_progress(folder)
    found.machine = dict(MACHINE)
    return found


def call(table: list[Part], out: Path, seconds: float) -> tuple[BringUpProgress, list[str]]:
    """One call: reads the progress, runs the parts that there is time for."""
    progress, said = progress_in(out), []
    run_parts(table, CallSettings(out), progress, Deadline(time.monotonic() + seconds), lambda: None, said.append)
    progress.write()
    return read_progress(out), said


@pytest.fixture(autouse=True)
def _short_grace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "GRACE", 0.5)
    monkeypatch.setattr(processes, "GRACE", 0.5)
    monkeypatch.setattr(run, "MIN_SECONDS", 0.5)


def states(progress: BringUpProgress) -> list[str]:
    return [part.state for part in progress.parts.values()]


def test_a_part_cut_off_by_the_time_limit_resumes_in_the_next_call(program: Path, tmp_path: Path) -> None:
    table = [fake(program, name, starts=2, resumable=True) for name in ("a", "b", "c")]
    out = tmp_path / "out"
    for _ in range(20):  # each call ends one part and cuts off the next
        progress, _said = call(table, out, seconds=2.5)
        if states(progress) == ["done"] * 3:
            break
    assert states(progress) == ["done"] * 3
    assert all(part.cut_offs >= 1 and part.calls > part.cut_offs for part in progress.parts.values())
    assert (out / "parts/a/log-1.txt").exists() and (out / "parts/a/log-2.txt").exists()
    _progress, said = call(table, out, seconds=2.5)
    assert said == []  # all is done: nothing runs again


def test_a_stopped_call_ends_the_current_part_and_leaves_the_rest_waiting(program: Path, tmp_path: Path) -> None:
    clock = Deadline(time.monotonic() + 60)
    table = [fake(program, "a"), fake(program, "b", starts=2, kind="deaf"), fake(program, "c")]
    progress = progress_in(tmp_path)
    stop_after_start(clock, tmp_path / "parts/b/log-1.txt")
    run_parts(table, CallSettings(tmp_path), progress, clock, lambda: None, print)
    assert states(progress) == ["done", "cut off", "waiting"] and progress.of("b").note == "on request"
    assert call(table, tmp_path, 60)[0].parts["c"].state == "done"
    assert (tmp_path / "parts/b/starts").read_text() == "xx"  # it ignored SIGTERM, so it was killed, and started again


def test_a_killed_call_leaves_no_process_and_its_part_resumes(program: Path, tmp_path: Path) -> None:
    table = f"[Part('a', 'a fake', '{program} {{folder}} 2 deaf', 1.0)]"
    script = (
        "import time, sys; from pathlib import Path; from tests.test_bring_up import *\n"
        f"out = Path({str(tmp_path)!r}); progress = progress_in(out)\n"
        f"run_parts({table}, CallSettings(out), progress, Deadline(time.monotonic() + 60), lambda: None, print)"
    )
    process = subprocess.Popen([sys.executable, "-c", script], cwd=ROOT, stdout=subprocess.DEVNULL)
    log = tmp_path / "parts/a/log-1.txt"
    wait_until("start", 60, lambda: log.exists() and "start" in log.read_text())
    assert json.loads((tmp_path / "state.json").read_text())["parts"]["a"]["state"] == "running"
    process.kill()
    process.wait()
    wait_until("end", 60, lambda: not running(str(program)))
    assert states(read_progress(tmp_path)) == ["cut off"]
    assert states(call([fake(program, "a", starts=2)], tmp_path, 30)[0]) == ["done"]


def stop_after_start(clock: Deadline, log: Path) -> None:
    """Stop the call once the part with this log has started."""

    def watch() -> None:
        wait_until("start", 60, lambda: log.exists() and "start" in log.read_text())
        clock.stop()

    threading.Thread(target=watch, daemon=True).start()


def running(word: str) -> bool:
    """Whether a process has this word on its command line."""
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            arguments = path.read_bytes().decode(errors="replace").split("\0")
        except OSError:
            continue
        if word in arguments and int(path.parent.name) != os.getpid():
            return True
    return False


def test_a_part_that_cannot_resume_fails_after_two_whole_calls(program: Path, tmp_path: Path) -> None:
    table = [fake(program, "a", starts=9), fake(program, "b")]
    assert states(call(table, tmp_path, 2)[0]) == ["cut off", "waiting"]
    progress, _said = call(table, tmp_path, 2)
    assert states(progress) == ["failed", "waiting"] and "--minutes" in progress.of("a").note
    assert states(call(table, tmp_path, 20)[0]) == ["failed", "done"]


def test_a_part_waits_for_time_reports_missing_packages_and_why_it_failed(program: Path, tmp_path: Path) -> None:
    wrong = tmp_path / "wrong.py"
    wrong.write_text("print('error: no such block'); raise SystemExit(2)")
    (warns := tmp_path / "warns.py").write_text("print('worst: warn'); raise SystemExit(1)")
    table = [
        fake(program, "absent", needs=("cuda", "a_package_that_is_nowhere")),
        Part("wrong", "fails", str(wrong), 1.0),
        Part("warns", "warns", str(warns), 1.0, warned="worst: warn"),
        Part("crashes", "ends with the status of a warning", str(warns), 1.0, warned="worst: other"),
        fake(program, "long", seconds=500.0),
        fake(program, "short"),
    ]
    progress, said = call(table, tmp_path, 60)
    assert states(progress) == ["left out", "failed", "done", "failed", "waiting", "done"]
    assert "absent: left out: needs a_package_that_is_nowhere" in said
    assert progress.of("wrong").note == "status 2: error: no such block"
    assert "500 s" in progress.of("long").note


# ---- the table


def test_every_part_of_the_table_is_a_command_that_parses(tmp_path: Path) -> None:
    from tools.bench.__main__ import COMMANDS
    from utils.config.command_line import parse_arguments

    names = [part.name for part in PARTS]
    assert len(set(names)) == len(names)
    for part in PARTS:
        for small in (False, True):
            found = build_command(part, CallSettings(tmp_path, ("lr=0.3",), small, eager_is_faster=True))
            assert "{" not in " ".join(found)
            if part.epochs:
                config = parse_arguments(found[2:]).config
                assert config.lr == 0.3 and (not small or config.limit_train_batches == 4)
                assert small or config.max_epochs == part.epochs, part.name
            elif "tools.bench" in found:
                assert found[3] in COMMANDS


def test_each_question_to_a_gpu_names_a_part_and_what_it_measures() -> None:
    page = (ROOT / "docs/benchmarking.md").read_text("utf-8").partition("## What a GPU must answer\n")[2]
    rows = [line.split("|")[1:-1] for line in page.partition("\n## ")[0].splitlines() if line.startswith("| ")]
    assert len(rows) == 1 + 5
    for _question, part, file, reading in rows[1:]:
        [name] = re.findall(r"--part ([\w-]+)", part)
        [words] = [re.split(r"[\s,=]", part.command) for part in PARTS if part.name == name]
        assert file.strip() == f"`{name}/report.json`" and "{folder}/report.json" in words
        assert set(re.findall(r"`([a-z0-9-]+)`", reading)) <= set(words)


def test_rungs_differ_in_what_their_names_say() -> None:
    rungs = [name for part in PARTS for found in re.findall(r"rungs\.yaml.*--configs=(\S+)", part.command)
             for name in found.split(",")]  # fmt: skip
    loaded = {name: load_config(ROOT / "tools/bring_up/rungs.yaml", name).model_dump() for name in rungs}

    def changes(one: str, other: str) -> dict[str, Any]:
        return {key: value for key, value in loaded[other].items() if loaded[one][key] != value}

    fused, compiled = {"fuse_norm_relu": True}, {"enable_compile": True}
    assert changes("eager", "compiled") == compiled == changes("eager-graphs", "compiled-graphs")
    assert changes("bf16", "fp16") == {"amp_dtype": "fp16"} == changes("bf16-fused", "fp16-fused")
    assert changes("bf16", "bf16-fused") == fused == changes("fp16", "fp16-fused")
    assert changes("eager", "eager-graphs") == {"enable_cuda_graphs": True} and not changes("eager-graphs", "bf16")


def test_passed_tests_do_not_run_again(tmp_path: Path) -> None:
    part = next(part for part in PARTS if part.name == "gpu-tests")
    folder = tmp_path / "parts/gpu-tests"
    folder.mkdir(parents=True)
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests/test_gpu.py").write_text(
        "import pytest\n@pytest.mark.parametrize('name', ['one two'])\ndef test_a(name): pass\ndef test_b(): assert 0\n"
    )
    options = shlex.split(PYTEST.removesuffix(" -m"))
    done = subprocess.run(
        [sys.executable, *options, "tests"], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    (folder / "log-1.txt").write_text(done.stdout)
    figures = {figure.key: figure.median for figure in read_figures(tmp_path, {})}
    assert figures == {"gpu-tests: passed, tests": 1, "gpu-tests: failed, tests": 1}
    found = build_command(part, CallSettings(tmp_path))
    assert [word for word in found if word.startswith("--deselect")] == [
        "--deselect=tests/test_gpu.py::test_a[one two]"
    ]
    assert "tests/test_gpu.py" in found and "tests/test_config.py" not in found


def report(folder: Path, part: str, results: dict[str, Any]) -> None:
    path = folder / "parts" / part / "report.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"bench": "ladder", "results": results, "environment": MACHINE}))


def sample(median: float, spread: float = 0.01) -> dict[str, Any]:
    low, high = median * (1 - spread), median * (1 + spread)
    return {"median": median, "min": low, "max": high, "values": [low, median, high]}


def rung(median: float, spread: float = 0.01) -> dict[str, Any]:
    images = sample(median, spread)
    return {"full": images, "compute": images, "io": images, "memory": images, "tflops": median / 1e3,
            "arithmetic_share": 0.25, "memory_share": 0.5}  # fmt: skip


def test_the_share_of_memory_is_of_the_step_alone(tmp_path: Path) -> None:
    report(tmp_path, "ladder", {"rungs": {"bs256": rung(3000) | {"compute": sample(4500)}}})
    shares = {figure.name: figure.share for figure in read_figures(tmp_path, {})}
    assert shares == {"bs256": 0.25, "bs256, step alone": 0.75}


def test_eager_replaces_compilation_if_it_is_faster(tmp_path: Path) -> None:
    accuracy = next(part for part in PARTS if part.name == "accuracy")
    for eager, wins in ((900, False), (1100, True)):
        rungs = {"eager": rung(500), "compiled": rung(1500), "eager-graphs": rung(eager), "compiled-graphs": rung(1000)}
        report(tmp_path, "compile", {"rungs": rungs})
        assert eager_is_faster(tmp_path) is wins
        assert (EAGER in build_command(accuracy, CallSettings(tmp_path, eager_is_faster=wins))) is wins
    report(tmp_path, "compile", {"rungs": {"eager": rung(500), "compiled": rung(1500)}})  # a CPU has no graphs
    assert not eager_is_faster(tmp_path)


def test_a_resumed_part_stays_compiled_or_eager(program: Path, tmp_path: Path) -> None:
    def table(seconds: float) -> list[Part]:
        command = f"{program} {{folder}} 2 polite {{compile}}"
        return [Part("resumed", "", command, seconds, resumable=True), Part("restarted", "", command, seconds)]

    rungs = {"eager": rung(900), "compiled": rung(1000)}
    report(tmp_path, "compile", {"rungs": rungs})
    for part in table(1.0):
        clock = Deadline(time.monotonic() + 60)
        stop_after_start(clock, tmp_path / f"parts/{part.name}/log-1.txt")
        run_parts([part], CallSettings(tmp_path), progress_in(tmp_path), clock, lambda: None, print)
    report(tmp_path, "compile", {"rungs": rungs | {"eager": rung(1100)}})
    progress, _ = call(table(1.0), tmp_path, seconds=60)
    assert states(progress) == ["done"] * 2
    assert [EAGER in progress.parts[name].command for name in ("resumed", "restarted")] == [False, True]


def test_estimates_come_from_measurements(tmp_path: Path) -> None:
    record, limits = (next(part for part in PARTS if part.name == name) for name in ("record-75", "limits"))
    settings = CallSettings(tmp_path)
    assert estimate(record, settings, PartProgress()) == (record.seconds, "not measured")
    later = CallSettings(tmp_path, earlier={"record-75": 71.0})
    assert estimate(record, later, PartProgress()) == (71.0, "by the baseline")
    report(tmp_path, "ladder", {"rungs": {"fastest": rung(10_000)}})
    by_the_ladder = (pytest.approx(25 + 18 * 53_333 / 10_000, rel=1e-3), "by the ladder")
    assert estimate(record, settings, PartProgress()) == by_the_ladder == estimate(record, later, PartProgress())
    run_folder = tmp_path / "parts/record-75/run"
    run_folder.mkdir(parents=True)
    lines = [{"kind": "epoch", "epoch": number, "seconds": 7.0 * number} for number in range(1, 9)]
    (run_folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert estimate(record, settings, PartProgress()) == (25 + 10 * 7.0, "by its epochs")
    cut_off = PartProgress(state="cut off", seconds=40.0, calls=1, cut_offs=1)
    assert estimate(limits, settings, cut_off) == (60.0, "not measured")


def test_the_plan_is_what_the_calls_then_do(program: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One part waits for the next call, a shorter one takes its place, a resumable one is split, a long one fails."""
    monkeypatch.setattr(run, "CALL_SECONDS", 0.0)
    clock, number = [0.0], [0]
    lengths = {"first": 3.0, "waits": 8.0, "short": 2.0, "split": 12.0, "long": 99.0}
    table = [Part(name, "", "", seconds, resumable=name == "split") for name, seconds in lengths.items()]

    def run_limited(command: list[str], log: Path, limit: float, deadline: Deadline) -> int | None:
        name = log.parent.name
        took = min(limit, lengths[name] if name == "long" else max(0.0, lengths[name] - seconds.get(name, 0.0)))
        log.write_text("")
        clock[0] += took
        seconds[name] = seconds.get(name, 0.0) + took
        done[name].append(number[0])
        return 0 if seconds[name] >= lengths[name] and name != "long" else None

    monkeypatch.setattr(run, "run_limited", run_limited)
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    seconds: dict[str, float] = {}
    done: dict[str, list[int]] = {name: [] for name in lengths}
    progress = progress_in(tmp_path)
    planned = plan(table, CallSettings(tmp_path), progress, 10.0)
    for number[0] in range(1, 9):
        deadline = Deadline(clock[0] + 10.0)
        run_parts(table, CallSettings(tmp_path), progress, deadline, lambda: None, lambda _: None)
    assert planned == done == {"first": [1], "waits": [2], "short": [1], "split": [1, 2, 3], "long": [4, 5]}
    assert states(progress) == ["done"] * 4 + ["failed"]


def test_three_calls_suffice_for_the_questions_and_the_ladder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the estimates, with calls of nine minutes: with all data at once, and with data in the third call."""
    monkeypatch.setattr(run, "GRACE", 20.0)
    monkeypatch.setattr(run, "MIN_SECONDS", 40.0)
    early = ["doctor", "gpu-tests", "compile", "half-precision", "limits", "layers"]

    def calls(parts: list[Part]) -> dict[str, list[int]]:
        return plan(parts, CallSettings(tmp_path), BringUpProgress(path=tmp_path), 9 * 60)

    at_once = calls(list(PARTS))
    assert max(at_once[name][-1] for name in (*early, "record-75", "ladder")) == 3
    without_data = calls([part for part in PARTS if "data" not in part.needs])
    with_data = calls([part for part in PARTS if "data" in part.needs])
    assert max(without_data[name][-1] for name in early) == 2
    assert with_data["record-75"] == with_data["ladder"] == [1]


def test_parts_wait_for_their_data_without_a_start_each(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = "import pathlib, sys; sys.exit(0 if pathlib.Path(sys.argv[1], '../../data').exists() else 3)"
    (tmp_path / "program.py").write_text(program)
    table = [Part(name, "", f"{tmp_path}/program.py {{folder}}", 1.0, needs) for name, needs in
             (("a", ("data",)), ("b", ("data",)), ("c", ()), ("d", ("data",)))]  # fmt: skip
    monkeypatch.setattr(command, "PARTS", table[:2])
    monkeypatch.setattr(command, "describe_machine", lambda: dict(MACHINE))
    assert command.main(["--out", str(tmp_path)]) == DataError.exit_status
    found = call(table, tmp_path, 60)[0].parts
    assert [(found[name].state, found[name].calls) for name in "abcd"] == [
        ("no data", 2), ("no data", 0), ("failed", 1), ("no data", 0)]  # fmt: skip
    (tmp_path / "data").touch()
    found = call(table, tmp_path, 60)[0].parts
    assert [found[name].state for name in "abcd"] == ["done", "done", "failed", "done"]


# ---- figures, page, baseline


def bring_up(folder: Path, fastest: float = 20_000, **machine: Any) -> BringUpProgress:
    """Write a folder as a call leaves it: a ladder, limits, tests, a record."""
    rungs = {"bs256": rung(2_000), "bs256-amp": rung(5_000), "fastest": rung(fastest)}
    report(folder, "ladder", {"limits": {}, "rungs": rungs})
    report(folder, "limits", {"product bf16, TFLOP/s": sample(700), "memory, GB/s": sample(4_000)})
    layer = {"milliseconds": sample(0.2), "count": 3, "at_least": 0.1, "bound": "memory", "share": 0.5}
    report(folder, "layers", {"layers": {"convolution 3x3, 64x32x32 to 64, forward": layer}})
    report(folder, "loaders", {"device": {"images_per_sec": sample(1e6), "training_images_per_sec": sample(19_000)}})
    report(folder, "peers", {"this project": {"full": sample(20_000)}, "timm": {"full": sample(15_000)}})
    tests = folder / "parts/gpu-tests"
    tests.mkdir(exist_ok=True)
    (tests / "log-1.txt").write_text(
        "[gw0] [ 50%] PASSED tests/test_gpu.py::test_a \n[gw1] [ 99%] FAILED tests/test_gpu.py::test_b \n"
    )
    record = folder / "parts/record-75/run"
    record.mkdir(parents=True, exist_ok=True)
    last = {"kind": "epoch", "epoch": 2, "seconds": 41.0, "acc1/valid": 0.76, "images_per_sec": 21_000.0}
    epochs = [last | {"epoch": 1, "seconds": 20.0, "acc1/valid": 0.7}, last]
    (record / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in epochs))
    (record / "config.yaml").write_text("record-75:\n  max_epochs: 2\n")
    (record / "checkpoints").mkdir(exist_ok=True)
    (record / "checkpoints/last.pt").write_bytes(b"large")
    progress = progress_in(folder)
    progress.machine |= machine
    for name in ("ladder", "limits", "layers", "loaders", "peers", "record-75"):
        progress.parts[name] = PartProgress(state="done", seconds=30.0, calls=1)
    progress.parts["gpu-tests"] = PartProgress(state="failed", seconds=30.0, calls=1, note="status 1: 1 failed")
    progress.write()
    return progress


def test_figures_have_a_spread_and_their_fraction_of_the_limit(tmp_path: Path) -> None:
    progress = bring_up(tmp_path)
    found = {figure.key: figure for figure in read_figures(tmp_path, progress.parts)}
    fastest = found["ladder: fastest, images/s"]
    assert (fastest.median, fastest.low, fastest.share) == (20_000, 19_800, 0.25)
    assert found["limits: memory, GB/s"].median == 4_000
    assert found["layers: convolution 3x3, 64x32x32 to 64, forward, ms"].share == 0.5
    assert found["record-75: time to 75%, s"].median == 41 and found["record-75: best accuracy, %"].median == 76
    assert (found["gpu-tests: passed, tests"].median, found["gpu-tests: failed, tests"].median) == (1, 1)
    measured = [(one, found[one.key]) for one in read_published() if one.key in found]
    met = {one.what: (one.is_met(figure), one.relative(figure)) for one, figure in measured}
    assert met["failed tests that need a GPU"] == (False, "+1.00")
    assert "failed tests: each switch trains like float32" not in met
    assert met["the goal: the FLOP/s of MLPerf 3.1"] == (False, "0.90 x")
    assert met["good: the FLOP/s of NVIDIA's example"] == (True, "2.06 x")
    assert met["75 % within 60 s"][0] is True and met["75 % within 30 s"][0] is False
    assert met["mixed precision"] == (True, "2.79 x")


def test_published_figures_are_in_the_sources() -> None:
    sources = (ROOT / "results/reference/README.md").read_text("utf-8")
    rows = [row for row in read_published() if not row.where.startswith("goal")]
    assert len(rows) > 10 and [row for row in rows if f"{row.value:,g}" not in sources] == []


def test_every_figure_comes_from_a_file_of_its_part(tmp_path: Path) -> None:
    write_all(tmp_path, progress_in(tmp_path))
    assert json.loads((tmp_path / "packed/bring_up.json").read_text())["figures"] == []
    assert (tmp_path / "packed/bring_up.html").read_text("utf-8").count("not measured") == len(read_published())


def test_the_page_is_offline_and_complete_and_the_raw_logs_restore_the_folder(tmp_path: Path) -> None:
    progress = bring_up(tmp_path / "one")
    slower = Figure("ladder", "fastest", 30_000, 29_000, 31_000, "images/s")
    regressions = write_all(tmp_path / "one", progress, baseline_of([slower]))
    assert [line.partition(",")[0] for line in regressions] == ["ladder: fastest"]
    page = (tmp_path / "one/packed/bring_up.html").read_text("utf-8")
    for text in ("NVIDIA H200", "Compared with published figures and goals", "680", "on NVIDIA H200",
                 "REGRESSION ladder: fastest, images/s", "gpu-tests: failed: status 1: 1 failed", "25% of arithmetic",
                 "goal for an H200", "41.00 (one seed)"):  # fmt: skip
        assert text in page
    assert page.count("status 1: 1 failed") == 1  # not in a column, which would squeeze the others
    assert not re.search(r"overflow(-[xy])?: (hidden|scroll|auto)|text-overflow|nowrap", page.partition("<script>")[0])
    assert not re.search(r"<(script|link|img)[^>]+(src|href)=", page.partition("<script>")[0])
    content = json.loads((tmp_path / "one/packed/bring_up.json").read_text())
    assert content["rehearsal"] is False and len(content["figures"]) > 10 and len(content["parts"]) == len(PARTS)
    packed = sorted((tmp_path / "one/packed").iterdir())
    assert len(packed) == 3 and max(path.stat().st_size for path in packed) < 16 * 2**20
    with tarfile.open(tmp_path / "one/packed/logs.tar.gz.1") as archive:
        archive.extractall(tmp_path / "two", filter="data")
    assert read_progress(tmp_path / "two").parts == read_progress(tmp_path / "one").parts
    assert not list((tmp_path / "two").rglob("*.pt"))


def test_logs_come_in_pieces_and_files_without_room_are_listed(tmp_path: Path) -> None:
    (tmp_path / "packed").mkdir()
    (tmp_path / "small.txt").write_text("kept")
    for number in range(6):
        (tmp_path / f"noise-{number}.txt").write_bytes(os.urandom(150_000 + number))
    logs = [tmp_path / "small.txt", *sorted(tmp_path.glob("noise-*"))]
    packed = (logs, tmp_path, tmp_path / "packed", "logs.tar.gz")
    assert pack.pack_files(*packed, piece=350_000, max_pieces=2) == ["noise-4.txt", "noise-5.txt"]
    files = sorted((tmp_path / "packed").iterdir())
    assert [path.name for path in files] == ["logs.tar.gz.1", "logs.tar.gz.2"]
    with tarfile.open(fileobj=io.BytesIO(b"".join(path.read_bytes() for path in files))) as archive:
        assert len(archive.getnames()) == 5
    assert pack.pack_files(*packed, piece=2_000_000, max_pieces=2) == []
    assert [path.name for path in (tmp_path / "packed").iterdir()] == ["logs.tar.gz.1"]


def baseline_of(figures: list[Figure]) -> Baseline:
    return Baseline(machine=MACHINE, parts={"ladder": PartProgress(state="done")}, figures=figures)


def figure(median: float, low: float, high: float, unit: str = "images/s", better: str = "higher") -> Figure:
    return Figure("ladder", "fastest", median, low, high, unit, better)


@pytest.mark.parametrize(
    ("before", "now", "regressed"),
    [
        (figure(100, 98, 102), figure(90, 88, 92), True),
        (figure(100, 85, 102), figure(90, 88, 92), False),  # the trials overlap
        (figure(100, 99.9, 100.1), figure(97, 96.9, 97.1), False),  # within the difference of machines of one kind
        (figure(100, 98, 102), figure(120, 118, 122), False),
        (figure(1.0, 0.9, 1.1, "ms", "lower"), figure(1.3, 1.2, 1.4, "ms", "lower"), True),
        (figure(60, 60, 60, "s", "lower"), figure(70, 70, 70, "s", "lower"), False),  # a single run
        (figure(60, 60, 60, "s", "lower"), figure(80, 80, 80, "s", "lower"), True),
        (figure(76, 76, 76, "%"), figure(75.5, 75.5, 75.5, "%"), False),
        (figure(76, 76, 76, "%"), figure(74, 74, 74, "%"), True),
        (figure(0, 0, 0, "tests", "lower"), figure(1, 1, 1, "tests", "lower"), True),
    ],
)
def test_a_regression_is_more_than_the_spread_explains(before: Figure, now: Figure, regressed: bool) -> None:
    assert Change(before, now).regressed is regressed


def test_another_version_is_compared_another_device_and_a_rehearsal_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    write_all(tmp_path / "old", bring_up(tmp_path / "old", torch="2.11.0"))
    bring_up(tmp_path / "new", fastest=15_000)
    monkeypatch.setattr(command, "describe_machine", lambda: dict(MACHINE))
    arguments = ["--out", str(tmp_path / "new"), "--baseline", str(tmp_path / "old"), "--part", "ladder"]
    assert command.main(arguments) == 1
    said = capsys.readouterr().out
    assert "baseline: torch 2.11.0 -> 2.14.1" in said
    assert "REGRESSION ladder: fastest, images/s: 20,000 (19,800-20,200) -> 15,000 (14,850-15,150), -25.0 %" in said
    assert "bs256-amp" not in said
    assert "REGRESSION ladder: fastest" in (tmp_path / "new/packed/bring_up.html").read_text("utf-8")
    bring_up(tmp_path / "new")
    assert command.main(arguments) == 0 and "no regression" in capsys.readouterr().out
    monkeypatch.setattr(command, "INSTALLED", True)
    assert command.main(arguments) == 2 and "run it in a checkout" in capsys.readouterr().err
    with pytest.raises(ConfigError, match="was measured on NVIDIA H200; expected NVIDIA A100, as here"):
        read_baseline(tmp_path / "old", {"device": "NVIDIA A100"}, small=False)
    with pytest.raises(ConfigError, match="rehearsal"):
        read_baseline(tmp_path / "old", MACHINE, small=True)
    with pytest.raises(ConfigError, match="holds no bring-up"):
        read_baseline(tmp_path / "nothing", MACHINE, small=False)


def test_a_missing_rung_is_a_regression(tmp_path: Path) -> None:
    progress = bring_up(tmp_path)
    before = read_figures(tmp_path, progress.parts)
    now = [figure for figure in before if "bs256-amp" not in figure.name]
    gone = baseline_of(before).missing(now, progress.parts)
    assert gone == ["ladder: bs256-amp, images/s", "ladder: bs256-amp, step alone, images/s"]


def test_a_failed_part_runs_again_if_it_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bring_up(tmp_path)
    monkeypatch.setattr(command, "describe_machine", lambda: dict(MACHINE))
    monkeypatch.setattr(command, "run_parts", lambda *_: None)
    assert command.main(["--out", str(tmp_path), "--part", "gpu-tests", "--part", "limits"]) == command.UNFINISHED
    parts = read_progress(tmp_path).parts
    assert (parts["gpu-tests"].state, parts["limits"].state) == ("waiting", "done")
    assert (tmp_path / "parts/gpu-tests.1/log-1.txt").exists() and not (tmp_path / "parts/gpu-tests").exists()


def test_figures_of_two_kinds_of_machine_are_never_mixed(tmp_path: Path) -> None:
    progress = bring_up(tmp_path)
    check_same(progress, MACHINE | {"host": "another"}, False, [])
    with pytest.raises(ConfigError, match=r"begun differently: torch 2\.14\.1 -> 2\.11\.0"):
        check_same(progress, MACHINE | {"torch": "2.11.0"}, False, [])
    with pytest.raises(ConfigError, match="--small False -> True"):
        check_same(progress, MACHINE, True, [])
    (tmp_path / "state.json").write_text("{")
    with pytest.raises(ConfigError, match="not the state of a bring-up"):
        read_progress(tmp_path)


def test_the_list_runs_and_writes_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["--out", str(tmp_path / "out"), "--list"]) == 0
    said = capsys.readouterr().out
    assert all(f"{part.name} " in said for part in PARTS)
    assert re.search(r"^record-75 +waiting +call [\d, ]+: about 90\.0 s, not measured ", said, re.M)
    assert not (tmp_path / "out").exists()
    write_all(tmp_path / "old", bring_up(tmp_path / "old"))
    command.main(["--out", str(tmp_path / "out"), "--list", "--baseline", str(tmp_path / "old"), "--minutes", "5"])
    said = capsys.readouterr().out
    assert re.search(r"^ladder +waiting +call \d: about 30\.0 s, by the baseline ", said, re.M)
    assert re.search(r"^peers +waiting +call \d: about 30\.0 s, by the baseline ", said, re.M)
    assert re.search(r"^about .* in total, in \d+ call\(s\) of 5 minutes$", said, re.M)
    command.main(["--out", str(tmp_path / "out"), "--list", "--part", "ladder", "--minutes", "5"])
    assert "call 1, 2 (too short): about 7.0 min" in capsys.readouterr().out
    with pytest.raises(SystemExit, match="2"):
        command.main(["--out", str(tmp_path), "--part", "lader"])
    assert re.search("lader.*doctor.*gpu-tests", capsys.readouterr().err)


def test_a_missing_package_is_reported_before_anything_starts(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "plotly", None)
    assert command.main(["--out", "x"]) == 2
    assert "error: missing: plotly: pip install" in capsys.readouterr().err


@pytest.mark.slow
def test_a_real_part_is_cut_off_and_resumes(tmp_path: Path) -> None:
    name = "record-75"
    words = [sys.executable, "-m", "tools.bring_up", "--out", str(tmp_path), "--small", "--set=device=cpu"]
    process = subprocess.Popen([*words, "--part", name], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith(f"{name}: about"):  # now: the part may take less than a second
            process.send_signal(signal.SIGINT)
    assert process.wait() == 75
    assert read_progress(tmp_path).of(name).state == "cut off"
    done = subprocess.run([*words, "--part", name], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "REHEARSAL" in (tmp_path / "packed/bring_up.html").read_text("utf-8")
    assert [figure.name for figure in read_figures(tmp_path, {})] == ["training"]


# ---- tools.pack


def test_the_printed_commands_start_with_the_first_folder_and_unpack_data_after_the_last(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    if not (ROOT / ".git").exists():
        pytest.skip("no git checkout")
    data = tmp_path / "cifar-100-binary"
    data.mkdir()
    (data / "train.bin").write_bytes(os.urandom(5 * 2**20))
    wheel = tmp_path / "some-1.0-py3-none-any.whl"
    wheel.write_bytes(b"wheel")
    monkeypatch.setattr(pack, "download", lambda packages, *_: [wheel] if "pydantic" in packages else [])
    pieces, there = tmp_path / "pieces", tmp_path / "there"
    absent = ["--without", "peers", "--without", "health", "--without", "dali"]  # they may not be installed here
    assert pack.main(["--out", str(pieces), "--data", str(data), "--size", "4", *absent]) == 0
    folders = sorted(pieces.iterdir())
    assert [folder.name for folder in folders] == ["01", "02"]
    assert all(sum(path.stat().st_size for path in folder.glob("*.tar*")) <= 4 * 2**20 for folder in folders)
    said = capsys.readouterr().out.replace("TO=~/bring-up", f"TO='{tmp_path}/target here'")
    said = said.replace("python3 -c", f"{sys.executable} -c")
    unpack, unpack_data, start = [line.strip() for line in said.splitlines() if line.startswith("    ")]
    assert "--no-index" in start and "tools.bring_up" in start
    project = tmp_path / "target here/project"
    there.mkdir()
    for folder in folders:  # one in each call
        folder.rename(there / folder.name)
        subprocess.run(["bash", "-c", f"{unpack}\n{unpack_data}"], cwd=there, capture_output=True, check=False)
        assert (project / "train.py").exists() and len((project / "commit.txt").read_text().strip()) == 40
        assert (project.parent / "wheels" / wheel.name).exists()
        assert (project / "data/cifar-100-binary").exists() == (folder.name == "02")
        (project / "data").mkdir(exist_ok=True)  # as a part that looks for its data does
    assert (project / "data/cifar-100-binary/train.bin").read_bytes() == (data / "train.bin").read_bytes()
    first = there / f"01/{pack.CODE_ARCHIVE}.000"
    first.write_bytes(first.read_bytes()[:-1] + b"?")
    assert subprocess.run(["bash", "-c", unpack], cwd=there, capture_output=True, check=False).returncode != 0
    assert pack.main(["--out", str(there)]) == 2  # not empty
    assert pack.main([f"--out={tmp_path}/new", f"--data={tmp_path}/a/val", f"--data={tmp_path}/b/val"]) == 2
    assert "--data: two are named val, and both would be data/val; rename one" in capsys.readouterr().err


def test_packed_data_are_files_and_never_links(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "shared").mkdir()
    (tmp_path / "shared/train.bin").write_bytes(b"images")
    (tmp_path / "cifar-100-binary").symlink_to(tmp_path / "shared")
    monkeypatch.setattr(pack, "add_tree", lambda archive: None)
    without = [f"--without={name}" for name in pack.GROUPS]
    assert pack.main([f"--out={tmp_path}/out", f"--data={tmp_path}/cifar-100-binary", *without]) == 0
    with tarfile.open(tmp_path / f"out/01/{pack.DATA_ARCHIVE}.000") as archive:
        members = {member.name: member.isfile() or member.isdir() for member in archive}
    assert members == dict.fromkeys(("project/data/cifar-100-binary", "project/data/cifar-100-binary/train.bin"), True)


def test_wanted_packages_include_their_needs_but_not_those_of_the_target() -> None:
    found = pack.wanted(["required", "tests"], "3.12")
    assert {"pydantic", "pydantic-core", "ruamel-yaml", "pytest", "iniconfig"} <= set(found)
    assert not {"torch", "numpy", "rich", "tomli"} & set(found)
    needed = re.search(r"^dependencies = \[(.*?)\]", (ROOT / "pyproject.toml").read_text("utf-8"), re.M | re.S)
    assert needed and set(re.findall(r'"([\w.-]+)', needed[1])) <= {*pack.THERE, *pack.GROUPS["required"]}
    with pytest.raises(ConfigError, match="is not installed here"):
        pack.closure(["a-package-that-is-nowhere"], {}, "3.12")
    with pytest.raises(ExpectedError, match="--without"):
        pack.download({"pydantic": "0.0.0.nowhere"}, Path("/nonexistent"), "3.12", None)


def test_requirements_are_those_of_the_targets_python(monkeypatch: pytest.MonkeyPatch) -> None:
    installed = {"a": ['b; python_version < "3.12"'], "b": None}
    found = {name: SimpleNamespace(version="1", requires=requires) for name, requires in installed.items()}
    monkeypatch.setattr(importlib.metadata, "distribution", found.__getitem__)
    assert [set(pack.closure(["a"], {}, python)) for python in ("3.11", "3.12")] == [{"a", "b"}, {"a"}]


def test_a_link_that_leads_nowhere_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data/train.bin").symlink_to("gone")
    assert pack.main([f"--out={tmp_path}/out", f"--data={tmp_path}/data"]) == DataError.exit_status
    assert f"{tmp_path}/data/train.bin: cannot be packed: No such file or directory\n" in capsys.readouterr().err


def test_missing_data_is_an_error(tmp_path: Path) -> None:
    assert pack.main(["--out", str(tmp_path / "out"), "--data", str(tmp_path / "none")]) == DataError.exit_status
    assert not (tmp_path / "out").exists()


def test_the_rehearsal_has_a_python_with_only_what_the_target_has_and_hides_folders(tmp_path: Path) -> None:
    bare_python(PYTHON, Path(sysconfig.get_path("purelib")), tmp_path / "python")
    program = "import sys, importlib.util as by; print(*(by.find_spec(name) is not None for name in sys.argv[1:]))"
    names = ["torch", "torchvision", "tensorboard", "pip", "pydantic", "ruamel", "pytest", "tools"]
    command = [str(tmp_path / "python/bin/python"), "-I", "-c", program, *names]
    found = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True).stdout.split()
    assert found == ["True"] * 4 + ["False"] * 4
    Transcript(tmp_path / "new/transcript.txt", {str(tmp_path): "DIR"}).say(f"{tmp_path}/a and {tmp_path}/b", "c")
    assert (tmp_path / "new/transcript.txt").read_text() == "DIR/a and DIR/b\nc\n"
