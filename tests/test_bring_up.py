"""tools.bring_up: its parts cut off in every way go on, its page and figures, the comparison; tools.pack."""

import json
import os
import re
import signal
import subprocess
import sys
import tarfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import ROOT
from tools import pack
from tools.bring_up import command, parts, run
from tools.bring_up.baseline import compare, missing, read_baseline
from tools.bring_up.estimates import Known, seconds_of
from tools.bring_up.figures import Figure, read_figures
from tools.bring_up.ledger import Entry, Ledger, check_same, read_ledger
from tools.bring_up.logs import pack_logs
from tools.bring_up.page import write_all
from tools.bring_up.parts import EAGER, PARTS, Part, Setting, words
from tools.bring_up.published import PUBLISHED, verdicts
from tools.bring_up.run import Clock, run_parts
from utils.errors import ConfigError, DataError, ExpectedError

MACHINE = {"device": "NVIDIA H200", "torch": "2.14.1", "cuda": "13.0", "host": "here", "type": "cuda"}
# Counts its starts in its folder; goes on from there if asked to, and takes a second to stop.
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
    """A part that ends at its start with this number and hangs at those before."""
    kind = rest.pop("kind", "polite")
    return Part(name, "a fake", f"{program} {{folder}} {starts} {kind}", rest.pop("seconds", 1.0), **rest)


def ledger_in(folder: Path) -> Ledger:
    folder.mkdir(parents=True, exist_ok=True)
    found = read_ledger(folder)
    found.machine = dict(MACHINE)
    return found


def call(table: list[Part], out: Path, seconds: float, clock: Clock | None = None) -> tuple[Ledger, list[str]]:
    """One call: reads the ledger, runs what there is time for."""
    ledger, said = ledger_in(out), []
    run_parts(
        table, Setting(out), ledger, Known(out), clock or Clock(time.monotonic() + seconds), lambda: None, said.append
    )
    ledger.write()
    return read_ledger(out), said


@pytest.fixture(autouse=True)
def _short_grace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "GRACE", 0.5)
    monkeypatch.setattr(run, "LEAST", 0.5)


def states(ledger: Ledger) -> list[str]:
    return [entry.state for entry in ledger.parts.values()]


def test_every_part_is_cut_off_by_the_time_and_goes_on_in_the_next_call(program: Path, tmp_path: Path) -> None:
    table = [fake(program, name, starts=2, goes_on=True) for name in ("a", "b", "c")]
    out = tmp_path / "out"
    for _ in range(20):  # a start that hangs ends its call; the next call ends that part and cuts off the next one
        ledger, _said = call(table, out, seconds=2.5)
        if states(ledger) == ["done"] * 3:
            break
    assert states(ledger) == ["done"] * 3
    assert all(entry.cut_offs >= 1 and entry.calls > entry.cut_offs for entry in ledger.parts.values())
    assert (out / "parts/a/log-1.txt").read_text() == "start 1\n" and (out / "parts/a/log-2.txt").exists()
    _ledger, said = call(table, out, seconds=2.5)
    assert said == []  # all is done: nothing runs again


def test_a_stopped_call_ends_the_part_at_hand_and_leaves_the_rest(program: Path, tmp_path: Path) -> None:
    clock = Clock(time.monotonic() + 60)
    table = [fake(program, "a"), fake(program, "b", starts=2, kind="deaf"), fake(program, "c")]
    ledger, said = ledger_in(tmp_path), []

    def say(line: str) -> None:
        said.append(line)
        if line.startswith("b: about"):
            signal.signal(signal.SIGALRM, clock.stop)
            signal.setitimer(signal.ITIMER_REAL, 0.7)

    run_parts(table, Setting(tmp_path), ledger, Known(tmp_path), clock, lambda: None, say)
    assert states(ledger) == ["done", "cut off", "waiting"] and ledger.entry("b").note == "on request"
    assert call(table, tmp_path, 60)[0].parts["c"].state == "done"
    assert (tmp_path / "parts/b/starts").read_text() == "xx"  # SIGTERM was ignored, so it was killed, and began again


def test_a_killed_call_leaves_no_process_and_its_part_goes_on(program: Path, tmp_path: Path) -> None:
    table = f"[Part('a', 'a fake', '{program} {{folder}} 2 deaf', 1.0)]"
    script = (
        "import time, sys; from pathlib import Path; from tests.test_bring_up import *\n"
        f"out = Path({str(tmp_path)!r}); ledger = ledger_in(out)\n"
        f"run_parts({table}, Setting(out), ledger, Known(out), Clock(time.monotonic() + 60), lambda: None)"
    )
    process = subprocess.Popen([sys.executable, "-c", script], cwd=ROOT, stdout=subprocess.DEVNULL)
    log = tmp_path / "parts/a/log-1.txt"
    wait_for(lambda: log.exists() and "start" in log.read_text())
    assert json.loads((tmp_path / "state.json").read_text())["parts"]["a"]["state"] == "running"
    process.kill()
    process.wait()
    wait_for(lambda: not running(str(program)))
    assert states(read_ledger(tmp_path)) == ["cut off"]
    assert states(call([fake(program, "a", starts=2)], tmp_path, 30)[0]) == ["done"]


def wait_for(condition: Any) -> None:
    limit = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < limit
        time.sleep(0.05)


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


def test_what_begins_again_is_given_up_when_a_whole_call_was_not_enough_twice(program: Path, tmp_path: Path) -> None:
    table = [fake(program, "a", starts=9), fake(program, "b")]
    assert states(call(table, tmp_path, 2)[0]) == ["cut off", "waiting"]
    ledger, _said = call(table, tmp_path, 2)
    assert states(ledger) == ["failed", "waiting"] and "--minutes" in ledger.entry("a").note
    assert states(call(table, tmp_path, 20)[0]) == ["failed", "done"]


def test_what_does_not_fit_waits_what_is_missing_is_named_what_fails_says_why(program: Path, tmp_path: Path) -> None:
    wrong = tmp_path / "wrong.py"
    wrong.write_text("print('error: no such block'); raise SystemExit(2)")
    table = [
        fake(program, "absent", needs=("cuda", "a_package_that_is_nowhere")),
        Part("wrong", "fails", str(wrong), 1.0),
        fake(program, "long", seconds=500.0),
        fake(program, "short"),
    ]
    ledger, said = call(table, tmp_path, 60)
    assert states(ledger) == ["left out", "failed", "waiting", "done"]
    assert "absent: left out: needs a_package_that_is_nowhere" in said
    assert ledger.entry("wrong").note == "status 2: error: no such block"
    assert "500 s" in ledger.entry("long").note


# ---- the table


def test_every_part_of_the_table_is_a_command_that_parses(tmp_path: Path) -> None:
    """Of training by train.py itself; of the tools their options; pytest's files exist."""
    from tools.bench.__main__ import COMMANDS
    from utils.config.command_line import parse_arguments

    names = [part.name for part in PARTS]
    assert len(set(names)) == len(names)
    order = ["doctor", "gpu-tests", "switches", "compile", "limits", "layers", "loaders", "ladder", "record-75"]
    assert names[: len(order)] == order
    assert names[len(order) : len(order) + 4] == ["bs128-opt", "accuracy", "peers", "record-75-bs2048"]
    for part in PARTS:
        for small in (False, True):
            found = words(part, Setting(tmp_path, ("lr=0.3",), small, eager_wins=True))
            assert "{" not in " ".join(found)
            if part.epochs:
                config = parse_arguments(found[2:]).config
                assert config.lr == 0.3 and (not small or config.limit_train_batches == 4)
                assert small or config.max_epochs == part.epochs, part.name
            elif "tools.bench" in found:
                assert found[3] in COMMANDS


def test_tests_that_passed_are_not_run_again(tmp_path: Path) -> None:
    part = next(part for part in PARTS if part.name == "gpu-tests")
    folder = tmp_path / "parts/gpu-tests"
    folder.mkdir(parents=True)
    (folder / "log-1.txt").write_text(
        "tests/test_gpu.py::test_a[one two] PASSED [ 3%]\ntests/test_gpu.py::test_b FAILED [ 4%]\n"
        "tests/test_gpu.py::test_c \n"
    )
    found = words(part, Setting(tmp_path))
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


def test_eager_replaces_compilation_where_it_is_faster(tmp_path: Path) -> None:
    accuracy = next(part for part in PARTS if part.name == "accuracy")
    for eager, word in ((900, False), (1100, True)):
        rungs = {"eager": rung(500), "compiled": rung(1500), "eager-graphs": rung(eager), "compiled-graphs": rung(1000)}
        report(tmp_path, "compile", {"rungs": rungs})
        wins = Known(tmp_path).eager_wins()
        assert wins is word
        assert ("--set=enable_compile=false" in words(accuracy, Setting(tmp_path, eager_wins=wins))) is word
    report(tmp_path, "compile", {"rungs": {"eager": rung(500), "compiled": rung(1500)}})  # no graphs on a CPU
    assert not Known(tmp_path).eager_wins()


def test_what_goes_on_stays_compiled_or_eager_as_it_began(program: Path, tmp_path: Path) -> None:
    def table(seconds: float) -> list[Part]:
        command = f"{program} {{folder}} 2 polite {{compile}}"
        return [Part("on", "", command, seconds, goes_on=True), Part("anew", "", command, seconds)]

    rungs = {"eager": rung(900), "compiled": rung(1000)}
    report(tmp_path, "compile", {"rungs": rungs})
    call(table(1.0)[:1], tmp_path, seconds=2)
    call(table(1.0)[1:], tmp_path, seconds=2)
    report(tmp_path, "compile", {"rungs": rungs | {"eager": rung(1100)}})
    ledger, _ = call(table(1.0), tmp_path, seconds=60)
    assert states(ledger) == ["done"] * 2
    assert [EAGER in ledger.parts[name].command for name in ("on", "anew")] == [False, True]


def test_estimates_come_from_what_was_measured(tmp_path: Path) -> None:
    record, limits = (next(part for part in PARTS if part.name == name) for name in ("record-75", "limits"))
    setting, known = Setting(tmp_path), Known(tmp_path)
    assert seconds_of(record, setting, Entry(), known) == record.seconds
    report(tmp_path, "ladder", {"rungs": {"fastest": rung(10_000)}})
    assert seconds_of(record, setting, Entry(), known) == pytest.approx(25 + 18 * 53_333 / 10_000, rel=1e-3)
    run_folder = tmp_path / "parts/record-75/run"
    run_folder.mkdir(parents=True)
    lines = [{"kind": "epoch", "epoch": number, "seconds": 7.0 * number} for number in range(1, 9)]
    (run_folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert seconds_of(record, setting, Entry(), known) == 25 + 10 * 7.0
    before = Known(tmp_path, {"limits": Entry("done", seconds=12.0)})
    assert seconds_of(limits, setting, Entry(), before) == 12.0
    assert seconds_of(limits, setting, Entry("cut off", 40.0, calls=1, cut_offs=1), known) == 60.0


# ---- figures, page, baseline


def bring_up(folder: Path, fastest: float = 20_000, spread: float = 0.01, **machine: Any) -> Ledger:
    """A folder as a call leaves it: a ladder, limits, tests, a record."""
    rungs = {"bs256": rung(2_000), "bs256-amp": rung(5_000), "fastest": rung(fastest, spread)}
    report(folder, "ladder", {"limits": {}, "rungs": rungs})
    report(folder, "limits", {"product bf16, TFLOP/s": sample(700), "memory, GB/s": sample(4_000)})
    layer = {"milliseconds": sample(0.2), "count": 3, "at_least": 0.1, "bound": "memory", "share": 0.5}
    report(folder, "layers", {"layers": {"convolution 3x3, 64x32x32 to 64, forward": layer}})
    report(folder, "loaders", {"device": {"images_per_sec": sample(1e6), "training_images_per_sec": sample(19_000)}})
    report(folder, "peers", {"this project": {"full": sample(20_000)}, "timm": {"full": sample(15_000)}})
    tests = folder / "parts/gpu-tests"
    tests.mkdir(exist_ok=True)
    (tests / "log-1.txt").write_text("tests/test_gpu.py::test_a PASSED [50%]\ntests/test_gpu.py::test_b FAILED [99%]\n")
    record = folder / "parts/record-75/run"
    record.mkdir(parents=True, exist_ok=True)
    last = {"kind": "epoch", "epoch": 2, "seconds": 41.0, "acc1/valid": 0.76, "images_per_sec": 21_000.0}
    epochs = [last | {"epoch": 1, "seconds": 20.0, "acc1/valid": 0.7}, last]
    (record / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in epochs))
    (record / "config.yaml").write_text("record-75:\n  max_epochs: 2\n")
    (record / "checkpoints").mkdir(exist_ok=True)
    (record / "checkpoints/last.pt").write_bytes(b"large")
    ledger = ledger_in(folder)
    ledger.machine |= machine
    for name in ("ladder", "limits", "layers", "loaders", "peers", "record-75"):
        ledger.parts[name] = Entry("done", 30.0, 1)
    ledger.parts["gpu-tests"] = Entry("failed", 30.0, 1, note="status 1: 1 failed")
    ledger.write()
    return ledger


def test_figures_have_spread_and_their_share_of_the_ceiling(tmp_path: Path) -> None:
    ledger = bring_up(tmp_path)
    found = {figure.key: figure for figure in read_figures(tmp_path, ledger.parts)}
    fastest = found["ladder: fastest, images/s"]
    assert (fastest.median, fastest.low, fastest.share) == (20_000, 19_800, 0.25)
    assert found["limits: memory, GB/s"].median == 4_000
    assert found["layers: convolution 3x3, 64x32x32 to 64, forward, ms"].share == 0.5
    assert found["record-75: time to 75%, s"].median == 41 and found["record-75: best accuracy, %"].median == 76
    # 1 GFLOP an image, by the ladder: 21,000 images/s are 21 of the 700 TFLOP/s that limits measured
    assert found["record-75: training, images/s"].share == pytest.approx(0.03)
    assert found["peers: timm, images/s"].share == pytest.approx(15 / 700)
    assert (found["gpu-tests: passed, tests"].median, found["gpu-tests: failed, tests"].median) == (1, 1)
    said = {verdict.goal: verdict.met for verdict in verdicts(found, "NVIDIA H200")}
    assert said["everything that only a GPU can show"] is False and said["each switch trains like float32"] is None
    assert said["ladder: 10 x its float32 start"] is True and said["ladder: 22,000 images/s"] is False
    assert said["75 % within 60 s"] is True and said["75 % within 30 s"] is False
    assert "75 % within 60 s" not in {verdict.goal for verdict in verdicts(found, "NVIDIA A100")}


def test_published_figures_are_those_of_the_sources() -> None:
    sources = (ROOT / "docs/sources.md").read_text("utf-8")
    assert [row for row in PUBLISHED if f"{row.value:,g}" not in sources] == []


def test_the_page_is_offline_and_whole_and_the_raw_logs_restore_the_folder(tmp_path: Path) -> None:
    ledger = bring_up(tmp_path / "one")
    before = replace(ledger, parts=dict(ledger.parts), path=tmp_path / "two/state.json")
    write_all(tmp_path / "one", ledger, regressions=["ladder: fastest: slower"])
    page = (tmp_path / "one/packed/bring_up.html").read_text("utf-8")
    for text in ("NVIDIA H200", "Verdicts", "Beside the published figures", "680", "REGRESSION ladder: fastest: slower",
                 "gpu-tests: failed: status 1: 1 failed", "25% of arithmetic"):  # fmt: skip
        assert text in page
    assert not re.search(r"<(script|link|img)[^>]+(src|href)=", page.partition("<script>")[0])
    content = json.loads((tmp_path / "one/packed/bring_up.json").read_text())
    assert content["rehearsal"] is False and len(content["figures"]) > 10 and len(content["parts"]) == len(PARTS)
    packed = sorted((tmp_path / "one/packed").iterdir())
    assert len(packed) == 3 and max(path.stat().st_size for path in packed) < 16 * 2**20
    with tarfile.open(tmp_path / "one/packed/logs-1.tar.gz") as archive:
        archive.extractall(tmp_path / "two", filter="data")
    assert read_ledger(tmp_path / "two") == before
    assert not list((tmp_path / "two").rglob("*.pt"))


def test_a_page_without_plotly_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ledger = bring_up(tmp_path)
    monkeypatch.setitem(sys.modules, "plotly", None)
    monkeypatch.setattr("tools.bring_up.page.importlib.util.find_spec", lambda name: None)
    write_all(tmp_path, ledger)
    assert "plotly is missing: tables without curves" in (tmp_path / "packed/bring_up.html").read_text("utf-8")


def test_logs_that_are_too_large_for_the_files_are_left_out_by_name(tmp_path: Path) -> None:
    folder = tmp_path / "parts/a"
    folder.mkdir(parents=True)
    for number in range(6):
        (folder / f"noise-{number}.txt").write_bytes(os.urandom(150_000 + number))
    (folder / "small.txt").write_text("kept")
    assert pack_logs(tmp_path, largest=400_000, volumes=2) == ["parts/a/noise-4.txt", "parts/a/noise-5.txt"]
    files = sorted((tmp_path / "packed").iterdir())
    assert [path.name for path in files] == ["logs-1.tar.gz", "logs-2.tar.gz"]
    assert max(path.stat().st_size for path in files) <= 400_000
    assert pack_logs(tmp_path, largest=2_000_000, volumes=2) == []
    assert [path.name for path in (tmp_path / "packed").iterdir()] == ["logs-1.tar.gz"]


def figure(median: float, low: float, high: float, unit: str = "images/s", better: str = "higher") -> Figure:
    return Figure("ladder", "fastest", median, low, high, unit, better)


@pytest.mark.parametrize(
    ("before", "now", "regressed"),
    [
        (figure(100, 98, 102), figure(90, 88, 92), True),
        (figure(100, 85, 102), figure(90, 88, 92), False),  # within what the trials differed
        (figure(100, 99.9, 100.1), figure(97, 96.9, 97.1), False),  # less than machines of one kind differ
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
    [change] = compare([before], [now])
    assert change.regressed is regressed


def test_another_version_is_compared_another_device_and_a_rehearsal_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    bring_up(tmp_path / "old", torch="2.11.0")
    bring_up(tmp_path / "new", fastest=15_000)
    monkeypatch.setattr(command, "look", lambda: dict(MACHINE))
    arguments = ["--out", str(tmp_path / "new"), "--baseline", str(tmp_path / "old"), "--part", "ladder"]
    assert command.main(arguments) == 1
    said = capsys.readouterr().out
    assert "baseline: torch 2.11.0 -> 2.14.1" in said
    assert "REGRESSION ladder: fastest, images/s: 20,000 (19,800-20,200) -> 15,000 (14,850-15,150), -25.0 %" in said
    assert "bs256-amp" not in said
    assert "REGRESSION ladder: fastest" in (tmp_path / "new/packed/bring_up.html").read_text("utf-8")
    bring_up(tmp_path / "new")
    assert command.main(arguments) == 0 and "REGRESSION none" in capsys.readouterr().out
    with pytest.raises(ConfigError, match="was another device: NVIDIA H200, this is NVIDIA A100"):
        read_baseline(tmp_path / "old", {"device": "NVIDIA A100"}, small=False, other_device=False)
    assert read_baseline(tmp_path / "old", {"device": "NVIDIA A100"}, small=False, other_device=True).parts
    with pytest.raises(ConfigError, match="rehearsal"):
        read_baseline(tmp_path / "old", MACHINE, small=True, other_device=False)
    with pytest.raises(ConfigError, match="no bring-up"):
        read_baseline(tmp_path / "nothing", MACHINE, small=False, other_device=False)


def test_a_rung_that_is_gone_is_a_regression(tmp_path: Path) -> None:
    old, new = bring_up(tmp_path / "old"), bring_up(tmp_path / "new")
    before = read_figures(tmp_path / "old", old.parts)
    now = [figure for figure in read_figures(tmp_path / "new", new.parts) if "bs256-amp" not in figure.name]
    gone = missing(old, new.parts, now, before)
    assert gone == ["ladder: bs256-amp, images/s", "ladder: bs256-amp, step alone, images/s"]


def test_figures_of_two_kinds_of_machine_are_never_mixed(tmp_path: Path) -> None:
    ledger = bring_up(tmp_path)
    check_same(ledger, MACHINE | {"host": "another"}, False, [])
    with pytest.raises(ConfigError, match=r"torch 2\.14\.1 -> 2\.11\.0"):
        check_same(ledger, MACHINE | {"torch": "2.11.0"}, False, [])
    with pytest.raises(ConfigError, match="--small"):
        check_same(ledger, MACHINE, True, [])
    (tmp_path / "state.json").write_text("{")
    with pytest.raises(ConfigError, match="is no state"):
        read_ledger(tmp_path)


def test_the_list_runs_and_writes_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["--out", str(tmp_path / "out"), "--list"]) == 0
    said = capsys.readouterr().out
    assert all(f"{part.name} " in said for part in PARTS) and "about 90.0 s" in said
    assert not (tmp_path / "out").exists()
    assert command.main(["--out", str(tmp_path), "--part", "lader"]) == 2
    assert "expected one of: doctor, gpu-tests" in capsys.readouterr().err


def test_what_is_missing_is_named_before_anything_is_imported() -> None:
    """Without ruamel.yaml and pydantic, which a machine with PyTorch need not have."""
    script = (
        "import importlib.util as u, sys; find = u.find_spec\n"
        "u.find_spec = lambda name, *rest: None if name in ('ruamel.yaml', 'pydantic') else find(name, *rest)\n"
        "from tools.bring_up.__main__ import main; status = main(['--out', 'x'])\n"
        "sys.exit(10 * ('pydantic' in sys.modules) + status)"
    )
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("error: missing: ruamel.yaml, pydantic\n")


@pytest.mark.slow
def test_a_real_part_is_cut_off_and_goes_on(tmp_path: Path) -> None:
    """Of a rehearsal: by a signal to the command, which reports 75; then to its end, with the page."""
    name = "record-75"
    words = [sys.executable, "-m", "tools.bring_up", "--out", str(tmp_path), "--small", "--set=device=cpu"]
    process = subprocess.Popen([*words, "--part", name], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith(f"{name}: about"):
            time.sleep(1)
            process.send_signal(signal.SIGINT)
    assert process.wait() == 75
    assert read_ledger(tmp_path).entry(name).state == "cut off"
    done = subprocess.run([*words, "--part", name], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "REHEARSAL" in (tmp_path / "packed/bring_up.html").read_text("utf-8")
    assert [figure.name for figure in read_figures(tmp_path, {})] == ["training"]


# ---- tools.pack


def test_pieces_are_small_and_one_line_of_shell_restores_tree_and_data(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    if not (ROOT / ".git").exists():
        pytest.skip("no git checkout")
    data = tmp_path / "cifar-100-binary"
    data.mkdir()
    (data / "train.bin").write_bytes(os.urandom(2 * 2**20))
    wheel = tmp_path / "some-1.0-py3-none-any.whl"
    wheel.write_bytes(b"wheel")
    monkeypatch.setattr(pack, "download", lambda packages, *_: [wheel] if "pydantic" in packages else [])
    pieces = tmp_path / "pieces"
    absent = ["--without", "peers", "--without", "dali"]  # they may not be installed here
    assert pack.main(["--out", str(pieces), "--data", str(data), "--size", "1", *absent]) == 0
    said = capsys.readouterr().out
    assert "--no-index" in said and f"cat {pack.NAME}.* | tar" in said
    sizes = [path.stat().st_size for path in pieces.glob(f"{pack.NAME}.*")]
    assert len(sizes) >= 3 and max(sizes) == 2**20
    [line] = [line.strip() for line in said.splitlines() if "sha256sum" in line]
    line = line.replace("TO=~/bring-up", f"TO='{tmp_path}/target here'")
    assert subprocess.run(["bash", "-c", line], cwd=pieces, capture_output=True, check=False).returncode == 0
    project = tmp_path / "target here/project"
    assert (project / "data/cifar-100-binary/train.bin").read_bytes() == (data / "train.bin").read_bytes()
    assert (project / "train.py").exists() and len((project / "commit.txt").read_text().strip()) == 40
    assert (project.parent / "wheels" / wheel.name).exists()
    first = pieces / f"{pack.NAME}.000"
    first.write_bytes(first.read_bytes()[:-1] + b"?")
    assert subprocess.run(["bash", "-c", line], cwd=pieces, capture_output=True, check=False).returncode != 0
    assert pack.main(["--out", str(pieces)]) == 2  # not empty


def test_what_is_wanted_are_the_packages_with_their_needs_without_those_of_the_target() -> None:
    found = pack.wanted(["required", "tests"])
    assert {"pydantic", "pydantic-core", "ruamel-yaml", "pytest", "iniconfig"} <= set(found)
    assert not {"torch", "numpy", "rich"} & set(found)
    with pytest.raises(ConfigError, match="is not installed here"):
        pack.closure(["a-package-that-is-nowhere"], {})
    with pytest.raises(ExpectedError, match="--without"):
        pack.download({"pydantic": "0.0.0.nowhere"}, Path("/nonexistent"), "3.12", None)


def test_pack_refuses_data_that_is_not_there(tmp_path: Path) -> None:
    assert pack.main(["--out", str(tmp_path / "out"), "--data", str(tmp_path / "none")]) == DataError.exit_status
    assert not (tmp_path / "out").exists()


def test_words_of_a_command_keep_what_is_quoted() -> None:
    assert parts._split("-m 'gpu and not slow' -v") == ["-m", "gpu and not slow", "-v"]
