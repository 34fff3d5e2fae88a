"""tools.bench: the protocol, and each command from the command line to its JSON report."""

import argparse
import importlib.util
import json
import multiprocessing
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.conftest import CIFAR100
from tests.processes import torchrun_variables
from tools.bench import common, ladder, loaders, peers, training
from tools.bench.__main__ import main
from tools.bench.common import Trials, measure
from tools.bench.ladder import COMPARABLE, compare_with_baseline, evaluate, per_image, read_baseline
from tools.bench.workers import process
from tools.shared.output import check_writable
from utils.config import Config
from utils.data.build import build_loaders, open_dataset
from utils.distributed.world import World
from utils.errors import ConfigError, DataError, ExpectedError
from utils.training.batches import prefetch
from utils.training.step import GRAPH_WARMUP_STEPS


def test_trials_are_interleaved_and_the_warm_up_is_dropped() -> None:
    order: list[str] = []

    def case(name: str) -> dict[str, float]:
        order.append(name)
        return {"calls": float(order.count(name))}

    results = measure({"a": lambda: case("a"), "b": lambda: case("b")}, trials=3, warm_up=1)
    assert order == ["a", "b"] * 4
    assert results["a"]["calls"].values == results["b"]["calls"].values == (2, 3, 4)


def test_after_round_gets_the_results_so_far_and_may_end_the_measurement() -> None:
    rounds: list[tuple[float, ...]] = []

    def after_round(results: common.Results) -> bool:
        rounds.append(results["b"]["calls"].values)
        return len(rounds) < 2

    numbers = iter(range(100))
    cases = {name: lambda: {"calls": float(next(numbers))} for name in "ab"}
    results = measure(cases, trials=5, warm_up=1, after_round=after_round)
    assert rounds == [(3,), (3, 5)]
    assert results["a"]["calls"].values == (2, 4)


@pytest.mark.parametrize(
    ("minutes_left", "trials", "said"),
    [(100.0, 5, ""), (2.0, 5, ""), (0.5, 3, "the budget ends after 3 of 5 trials"), (-1.0, 1, "ends after 1 of 5")],
)
def test_the_ladders_budget_is_for_the_whole_command(minutes_left, trials, said, monkeypatch, capsys) -> None:
    """Two rungs at one second per step: 10 seconds for the first short trials, at least 6 seconds per round."""
    clock = [0.0]

    def rung(warmup: int, iters: int) -> dict[str, float]:
        clock[0] += warmup + iters
        return {"seconds": warmup + iters, "full": 1.0}

    monkeypatch.setattr(ladder, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    parser = argparse.ArgumentParser()
    ladder.add_arguments(parser)
    options = parser.parse_args(["--trials=5", "--iters=8", "--warmup=2"])
    written: list[int] = []

    def after_round(results: common.Results) -> None:
        written.append(len(results["b"]["full"].values))

    results = ladder.measure(dict.fromkeys("ab", rung), options, 60 * minutes_left, after_round)
    assert written == list(range(1, trials + 1)), "a report after each trial"
    assert len(results["a"]["full"].values) == trials
    assert clock[0] <= max(60 * minutes_left, 10 + 6)
    assert said in capsys.readouterr().out


@pytest.mark.parametrize("budget", ["0", "-1", "nan"])
def test_a_ladder_without_time_is_refused(budget: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["ladder", f"--budget-minutes={budget}"])
    assert f"argument --budget-minutes: is '{budget}'; expected minutes, more than 0" in capsys.readouterr().err


def test_a_rung_with_settings_is_compared_with_its_block() -> None:
    rung = ladder.read_rung(CIFAR100, "fastest+enable_compile=false+lr=0.3", ["batch_size=64"])
    assert (rung.enable_compile, rung.lr, rung.batch_size) == (False, 0.3, 64)
    assert rung.amp_dtype == ladder.read_rung(CIFAR100, "fastest", []).amp_dtype
    assert "fastest,fastest+enable_compile=false" in ladder.RUNGS
    for name in ladder.CANDIDATES.split(","):
        block, _, switch = name.partition("+")
        changed = ladder.read_rung(CIFAR100, name, []) != ladder.read_rung(CIFAR100, block, [])
        assert changed is bool(switch), f"{name} changes nothing"
    samples = {"fastest": (10.0, 11.0), "other+d=1": (1.0,)}
    samples |= {"fastest+a=1": (12.0, 13.0), "fastest+b=1": (8.0, 9.0), "fastest+c=1": (9.0, 12.0)}
    verdicts = ladder.compare_switches({name: {"full": Trials(values)} for name, values in samples.items()})
    assert list(verdicts) == ["fastest+a=1", "fastest+b=1", "fastest+c=1"], "a rung without its block is not compared"
    assert verdicts["fastest+a=1"] == "fastest+a=1: 1.190 x fastest: wins here, use --set a=1"
    assert "loses here, leave fastest as it is" in verdicts["fastest+b=1"]
    assert "no difference beyond the spread" in verdicts["fastest+c=1"]
    both = {name: {"full": Trials((value, value))} for name, value in {"fastest": 1.0, "fastest+a=1+b=2": 2.0}.items()}
    assert "use --set a=1 --set b=2" in ladder.compare_switches(both)["fastest+a=1+b=2"]
    one = {name: {"full": Trials((value,))} for name, value in {"fastest": 1.0, "fastest+a=1": 2.0}.items()}
    assert "one trial does not decide" in ladder.compare_switches(one)["fastest+a=1"]


def test_a_case_in_its_own_process_answers_fails_or_dies() -> None:
    with process(partial) as build:
        trial = build(divmod)
        assert trial(7, 3) == (2, 1)
        with pytest.raises(ZeroDivisionError):
            trial(1, 0)
    with process(partial) as build, pytest.raises(ExpectedError, match="a measuring process ended"):
        build(os._exit)(1)
    with process(int) as build, pytest.raises(ValueError, match="invalid literal"):
        build("no number")


def begun(*_: int) -> dict[str, float]:
    """A trial: the time."""
    return {"begun": time.monotonic()}


def build_from_text(text: str) -> Callable[..., Mapping[str, float]]:
    """Mocks a rung's class; `text` replaces the configuration."""
    if text == "refused":
        raise ConfigError("no such rung")
    return begun


def test_a_rung_that_cannot_run_is_skipped_and_its_process_ends(monkeypatch, capsys) -> None:
    monkeypatch.setattr(ladder, "Rung", build_from_text)
    before = len(multiprocessing.active_children())
    with ExitStack() as stack:
        rungs = ladder.start({"a": "text", "b": "refused", "c": "text"}, stack)
        assert list(rungs) == ["a", "c"] and rungs["c"](0, 1)["begun"] > 0
        assert len(multiprocessing.active_children()) == before + 2
    assert len(multiprocessing.active_children()) == before
    assert capsys.readouterr().err == "b: skipped: no such rung\n"
    with ExitStack() as stack, pytest.raises(ConfigError, match="none of these rungs can run here"):
        ladder.start({"b": "refused"}, stack)


def test_all_processes_start_before_the_first_rung_is_built(monkeypatch) -> None:
    order: list[str] = []

    @contextmanager
    def process(_: object) -> Iterator[Callable[[str], str]]:
        order.append("start")
        yield order.append

    monkeypatch.setattr(ladder, "process", process)
    with ExitStack() as stack:
        ladder.start({"a": "build a", "b": "build b"}, stack)
    assert order == ["start", "start", "build a", "build b"]


def test_trials_show_median_and_spread() -> None:
    sample = Trials((3.0, 1.0, 2.0))
    assert f"{sample:.1f}" == "2.0 (1.0-3.0)"
    assert sample.as_json() == {"median": 2.0, "min": 1.0, "max": 3.0, "values": [3.0, 1.0, 2.0]}


def bench(*arguments: str, launcher: Sequence[str] = ()) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", *launcher, "tools.bench", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)


@pytest.mark.parametrize(
    ("command", "message"),
    [
        (["ladder", "--warmup=-1"], "--warmup: is '-1'; expected a whole number from 0 on"),
        (["peers", "--iters=0"], "--iters: is '0'; expected a whole number from 1 on"),
        (["loaders", "--steps=-1"], "--steps: is '-1'; expected a whole number from 0 on"),
    ],
)
def test_counts_below_their_minimum_are_refused(
    command: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as leaving:
        main(command)
    assert leaving.value.code == 2 and message in capsys.readouterr().err


def test_a_bench_of_one_process_refuses_a_launcher_of_several(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in torchrun_variables(1, 2, 29500).items():
        monkeypatch.setenv(name, value)
    assert main(["ladder"]) == 2
    assert "bench ladder is one process; start it without torchrun" in capsys.readouterr().err


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


def test_loaders_read_each_epoch_cold_and_then_cached(tiny, one_rank, monkeypatch) -> None:
    config = tiny(batch_size=8, limit_train_batches=5)
    loader = build_loaders(config, open_dataset(config, one_rank), one_rank).train
    events: list[object] = []
    set_epoch = loader.set_epoch
    monkeypatch.setattr(loader, "set_epoch", lambda epoch: (events.append(epoch), set_epoch(epoch)))
    monkeypatch.setattr(loaders, "drop_page_cache", lambda: events.append("dropped"))
    case = loaders.LoaderTrial(config, loader, None, one_rank, num_batches=4, num_steps=0, cold=True)
    assert case().keys() == case().keys() == {"cold_images_per_sec", "images_per_sec"}
    assert events == ["dropped", 0, 0, "dropped", 1, 1]
    with pytest.raises(ConfigError, match=r"a trial's 1 \+ 5 batches exceed an epoch's 5"):
        loaders.LoaderTrial(config, loader, None, one_rank, num_batches=5, num_steps=0, cold=True)


def test_loaders_compare_data_paths(one_rank, monkeypatch, tmp_path, capsys) -> None:
    monkeypatch.setattr(loaders, "drop_page_cache", lambda: None)
    monkeypatch.setattr(common, "on_all_ranks", lambda config, action: action(one_rank) or 0)
    parser = argparse.ArgumentParser()
    loaders.add_arguments(parser)
    options = ["--config=quickstart", "--set=batch_size=32", "--loaders=device,synthetic", f"--json={tmp_path}/report"]
    few = ["--steps=0", "--batches=4", "--trials=1", "--cold", "--data_paths=here,there"]
    assert loaders.run(parser.parse_args(options + few)) == 0
    names = ["device, here", "synthetic, here", "device, there", "synthetic, there"]
    results = json.loads((tmp_path / "report").read_text())["results"]
    assert list(results) == names
    assert all(values["cold_images_per_sec"]["median"] > 0 for values in results.values())
    table = capsys.readouterr().out
    assert "cold cache" in table and all(name in table for name in names)


def test_dropping_the_page_cache_without_permission_is_an_error(monkeypatch) -> None:
    def refuse(path: Path, text: str) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("os.sync", lambda: None)
    monkeypatch.setattr(Path, "write_text", refuse)
    with pytest.raises(ConfigError, match="--cold: the page cache cannot be dropped: Permission denied; run as root"):
        loaders.drop_page_cache()


SMALL = ["--set", "dataset=shapes", "--set", "num_classes=10", "--set", "model=resnet8", "--set", "device=cpu",
         "--set", "batch_size=16", "--set", "num_data_workers=1", "--set", "enable_compile=false"]  # fmt: skip


@pytest.mark.slow
def test_ladder_measures_compares_and_reports_a_regression(tmp_path: Path) -> None:
    report, picture = tmp_path / "report.json", tmp_path / "ladder.png"
    rungs = "bs256,bs256-amp-nhwc-extra-opts-graphs,fastest"
    arguments = ["ladder", f"--configs={rungs}", "--trials=2", "--iters=2", "--warmup=1", *SMALL]
    first = bench(*arguments, f"--json={report}", f"--plot={picture}")
    assert first.returncode == 0, first.stderr
    assert "graphs: skipped: enable_cuda_graphs needs a CUDA device" in first.stderr
    assert "about" in first.stdout and "speed-up" in first.stdout
    assert picture.read_bytes().startswith(b"\x89PNG")
    content = json.loads(report.read_text())
    assert set(content["results"]["rungs"]) == {"bs256", "fastest"}
    for values in content["results"]["rungs"].values():
        assert len(values["full"]["values"]) == 2
        assert values["full"]["min"] > 0 and values["memory"]["min"] > 1e7
        assert values["arithmetic_share"] > 0 and values["memory_share"] > 0

    full = content["results"]["rungs"]["bs256"]["full"]
    full |= {name: 1000 * full[name] for name in ("median", "min")}
    report.write_text(json.dumps(content))
    slower = bench(*arguments, f"--baseline={report}")
    assert slower.returncode == 1 and "REGRESSION" in slower.stdout, slower.stderr


def test_a_baseline_of_other_versions_or_settings_is_refused(tiny, tmp_path: Path) -> None:
    environment = dict.fromkeys(COMPARABLE, "same")
    config = tiny()
    saved = {"configs": {"rung": config.model_dump(mode="json")}, "rungs": {"rung": {"full": {"median": 100.0}}}}
    path = tmp_path / "report.json"

    def read(changed_environment: dict[str, str], **changes) -> dict[str, dict[str, float]]:
        content = {"bench": "ladder", "environment": environment | changed_environment, "results": saved}
        path.write_text(json.dumps(content))
        return read_baseline(path, environment, {"rung": Config(**config.model_dump() | changes)})

    assert read({}) == {"rung": {"median": 100.0}}
    with pytest.raises(ConfigError, match="has none of these rungs, only rung; choose with --configs"):
        read_baseline(path, environment, {"another": config})
    with pytest.raises(ConfigError, match=r"was measured elsewhere: torch 1\.7 -> same"):
        read({"torch": "1.7"})
    with pytest.raises(ConfigError, match="rung differs in lr; measure it again"):
        read({}, lr=0.7)
    for content, error in (
        ('{"bench": "peers", "results": {}}', "a report of `bench peers`"),
        ("[]", r"not a report of tools\.bench"),
    ):
        path.write_text(content)
        with pytest.raises((ConfigError, DataError), match=error):
            read_baseline(path, environment, {})


@pytest.mark.parametrize(
    ("now", "status"),
    [((94.0,), True), ((94.0, 94.0, 99.5), False), ((96.0,), False), ((200.0,), False), (None, True)],
)
def test_a_slower_or_skipped_rung_of_the_baseline_is_a_regression(now: tuple[float, ...] | None, status: bool) -> None:
    """Slower: the median beyond the tolerance, and all trials slower than the baseline's slowest."""
    results = {} if now is None else {"rung": {"full": Trials(now)}}
    (line,), regression = compare_with_baseline(results, {"rung": {"median": 100.0, "min": 99.0}})
    assert regression is status and line.endswith("REGRESSION") is status
    assert ("skipped now" in line) is (now is None)


def evaluated(config: Config, world: World, samples: dict[str, Trials], limits: dict[str, Trials]) -> dict[str, Any]:
    return evaluate(samples, per_image(config, world, limits), limits)


def test_fractions_count_the_datasets_own_images(tiny, one_rank) -> None:
    """ImageNet's images have 49 times the pixels of CIFAR's, and in a ResNet nearly 49 times the work."""
    samples = {"full": Trials((100.0,))}
    kinds = ("product float32, TFLOP/s", "convolution float32 NHWC, TFLOP/s")
    limits = dict.fromkeys((*kinds, "memory, GB/s"), Trials((1.0,)))
    small, large = (
        evaluated(
            tiny(dataset=name, num_classes=10, image_size=None, data_loader="synthetic"), one_rank, samples, limits
        )
        for name in ("cifar10", "imagenet")
    )
    for share in ("arithmetic_share", "memory_share"):
        assert large[share] / small[share] == pytest.approx(49, rel=0.05)


@pytest.mark.parametrize("faster", ["product", "convolution"])
def test_the_arithmetic_limit_is_the_faster_of_products_and_convolutions(faster, tiny, one_rank) -> None:
    limits = {"product float32, TFLOP/s": 1.0, "convolution float32 NHWC, TFLOP/s": 1.0, "memory, GB/s": 1.0}
    limits[next(name for name in limits if name.startswith(faster))] = 4.0
    trials = {name: Trials((value,)) for name, value in limits.items()}
    result = evaluated(tiny(), one_rank, {"full": Trials((100.0,))}, trials)
    assert result["arithmetic_share"] == pytest.approx(result["tflops"] / 4)


def test_a_network_whose_flops_cannot_be_counted_is_named(tiny, one_rank, monkeypatch) -> None:
    """It reads values, which tensors on the device meta lack."""
    monkeypatch.setattr(ladder, "flops_per_image", lambda *_: torch.empty(1, device="meta").item())
    kinds = ("product float32, TFLOP/s", "convolution float32 NHWC, TFLOP/s", "memory, GB/s")
    with pytest.raises(ConfigError, match="model resnet8: cannot be run on tensors without values: RuntimeError"):
        per_image(tiny(), one_rank, dict.fromkeys(kinds, Trials((1.0,))))


@pytest.mark.parametrize("option", ["--json", "--plot"])
def test_an_unwritable_file_is_reported_before_measuring(option, tmp_path, monkeypatch, capsys) -> None:
    pytest.importorskip("matplotlib", reason='matplotlib is missing: pip install ".[plot]"')
    monkeypatch.setattr(ladder, "measure_limits", lambda *_, **__: pytest.fail("began to measure"))
    assert main(["ladder", f"{option}={tmp_path}/none/file"]) == 2
    assert f"error: {option} {tmp_path}/none/file: cannot be written: No such file" in capsys.readouterr().err


def test_a_missing_matplotlib_is_reported_before_measuring(tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.setattr(ladder, "measure_limits", lambda *_, **__: pytest.fail("began to measure"))
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert main(["ladder", f"--plot={tmp_path}/picture.png"]) == 2
    assert "matplotlib is missing" in capsys.readouterr().err


def test_check_writable_leaves_the_file_unchanged(tmp_path) -> None:
    (tmp_path / "old").write_text("kept")
    for name in ("old", "new"):
        check_writable("--json", tmp_path / name)
    assert [path.name for path in tmp_path.iterdir()] == ["old"] and (tmp_path / "old").read_text() == "kept"


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
def test_limits_measures_every_limit(ranks: int, tmp_path: Path) -> None:
    report = tmp_path / "limits.json"
    launcher = ["torch.distributed.run", f"--nproc_per_node={ranks}", "-m"] if ranks > 1 else []
    finished = bench("limits", "--set", "device=cpu", "--trials=1", f"--json={report}", launcher=launcher)
    assert finished.returncode == 0, finished.stderr
    assert set(json.loads(report.read_text())["results"]) == {
        "product float32, TFLOP/s",
        "convolution float32 NHWC, TFLOP/s",
        "product bf16, TFLOP/s",
        "convolution bf16 NHWC, TFLOP/s",
        "memory, GB/s",
        "disk read, GB/s",
        "disk read from cache, GB/s",
        *(["all-reduce of 100 MB, GB/s"] if ranks > 1 else []),
    }


@pytest.mark.slow
def test_ddp_overhead_measures_each_way_against_the_plain_step(tmp_path: Path) -> None:
    report = tmp_path / "overhead.json"
    finished = bench("ddp_overhead", "--steps=2", "--trials=2", f"--json={report}", *SMALL)
    assert finished.returncode == 0, finished.stderr
    results = json.loads(report.read_text())["results"]
    assert {"plain", "as train.py does", "DDP, one rank"} < set(results)
    assert len(results["DDP, one rank"]["milliseconds"]["values"]) == 2
    assert results["plain: overhead, % of milliseconds"]["median"] == 0


OTHERS = ("timm", "lightning", "plain PyTorch")  # rows of `bench peers`


def test_peers_run_with_and_without_the_switch_that_only_this_project_has(tiny) -> None:
    names = ["this project", *OTHERS]
    cpu, cuda = (peers.rows_of(tiny("fastest"), torch.device(kind)) for kind in ("cpu", "cuda"))
    assert list(cpu) == [*names, *(f"{name}, without keep_cpu_memory" for name in OTHERS)]
    assert sorted(cuda) == sorted([*names, "this project, without enable_cuda_graphs"])
    build, config = cuda["this project, without enable_cuda_graphs"]
    assert build is peers.OurStep and config.enable_cuda_graphs is False
    assert cuda["this project"] == (peers.OurStep, tiny("fastest"))


@pytest.mark.parametrize("setting", ["optimizer=adamw", "ema_decay=0.9", "label_smoothing=0.1"])
def test_peers_refuses_what_the_other_trainers_lack(capsys: pytest.CaptureFixture[str], setting: str) -> None:
    assert main(["peers", "--config=fastest", f"--set={setting}"]) == 2
    key, value = setting.replace("adamw", '"adamw"').split("=")
    assert f"error: {key} {value}: the other trainers' steps here lack it; use " in capsys.readouterr().err


def counted(monkeypatch: pytest.MonkeyPatch, name: str, function: Callable[..., Any]) -> list[Any]:
    """Replace `name` by `function`; returns the list of its calls."""
    calls: list[Any] = []

    def call(*arguments: Any) -> Any:
        calls.append(arguments)
        return function(*arguments)

    monkeypatch.setattr(name, call)
    return calls


def test_nothing_is_timed_before_a_graph_is_captured(tiny, one_rank, monkeypatch) -> None:
    config = tiny("fastest")
    assert training.capture_steps(config, torch.device("cuda")) == GRAPH_WARMUP_STEPS + 1
    assert training.capture_steps(config, one_rank.device) == 0
    for module in (training, loaders):
        monkeypatch.setattr(module, "capture_steps", lambda config, device: 5)
    steps = counted(monkeypatch, "utils.training.learner.Learner.train_step", lambda *_: None)
    rung = training.Rung(tiny())
    assert len(steps) == 5
    case = loaders.LoaderTrial(tiny(), rung.loader, rung.learner.train_step, one_rank, num_batches=1, num_steps=2)
    case()
    assert len(steps) == 5 + 5 + 2


def test_a_loader_that_is_not_installed_is_skipped(capsys: pytest.CaptureFixture[str]) -> None:
    assert loaders.without_missing_dali(["torchvision", "dali", "device"], None) == ["torchvision", "device"]
    assert capsys.readouterr().err.startswith("dali: skipped: NVIDIA DALI is not installed; pip install")
    assert loaders.without_missing_dali(["dali", "device"], "nvidia-dali-cuda130 2.4.0") == ["dali", "device"]
    assert loaders.without_missing_dali(["dali"], None) == ["dali"], "the only one: an error when it is built"


def test_a_case_that_cannot_run_here_is_skipped_unless_it_is_the_only_one(capsys: pytest.CaptureFixture[str]) -> None:
    def refuse() -> dict[str, float]:
        raise ConfigError("it does not start here")

    cases = {"dali": refuse, "device": lambda: {"images_per_sec": 1.0}}
    assert list(common.measure(cases, 2, skip_unavailable=True)) == ["device"]
    assert capsys.readouterr().err == "dali: skipped: it does not start here\n"
    for chosen, skip in ({"dali": refuse}, True), (cases, False):
        with pytest.raises(ConfigError):
            common.measure(chosen, 2, skip_unavailable=skip)


def test_measured_steps_get_their_batches_as_in_the_trainer(tiny, one_rank, monkeypatch) -> None:
    config = tiny(enable_prefetch=True)
    feeding = [counted(monkeypatch, f"tools.bench.{name}.prefetch", prefetch) for name in ("training", "loaders")]
    step = peers.OurStep(config)
    step(0, 1)
    loaders.LoaderTrial(config, step.loader, step.learner.train_step, one_rank, num_batches=1, num_steps=1)()
    for calls in feeding:
        ((seen, _, device),) = calls
        assert (seen, device) == (config, one_rank.device)


@pytest.mark.slow
def test_peers_train_the_same_or_say_what_to_install(tmp_path: Path) -> None:
    report = tmp_path / "peers.json"
    settings = ("--set=keep_cpu_memory=auto", *SMALL)
    finished = bench("peers", "--iters=2", "--warmup=1", "--trials=1", f"--json={report}", *settings)
    if importlib.util.find_spec("timm") and importlib.util.find_spec("lightning"):
        assert finished.returncode == 0, finished.stderr
        peers = {f"{name}{switch}" for name in OTHERS for switch in ("", ", without keep_cpu_memory")}
        assert set(json.loads(report.read_text())["results"]) == {"this project"} | peers
    else:
        assert finished.returncode == 2 and 'pip install ".[peers]"' in finished.stderr


def test_the_plain_loop_trains_the_same(tiny, monkeypatch) -> None:
    cross_entropy, losses = nn.functional.cross_entropy, {}
    for build in (peers.OurStep, peers.plain_trial):
        found = losses[build] = []

        def record(*arguments: Any, found: list[Any] = found, **options: Any) -> Tensor:
            found.append(cross_entropy(*arguments, **options))
            return found[-1]

        monkeypatch.setattr(nn.functional, "cross_entropy", record)
        build(tiny(lr=0.05, enable_nhwc=True))(1, 3)
    torch.testing.assert_close(torch.stack(losses[peers.plain_trial]), torch.stack(losses[peers.OurStep]))


@pytest.mark.slow
def test_lightnings_clock_stops_before_it_moves_the_network_to_the_cpu(tiny, monkeypatch) -> None:
    lightning = pytest.importorskip("lightning", reason='lightning is missing: pip install ".[peers]"')
    events: list[str] = []

    def recording(event: str, result: Any) -> Callable[..., Any]:
        return lambda *_: (events.append(event), result)[1]

    ticks = iter([10.0, 12.0])
    clock = SimpleNamespace(perf_counter=lambda: (events.append("clock"), next(ticks))[1])
    monkeypatch.setattr(peers, "time", clock)
    monkeypatch.setattr(common, "synchronize", recording("wait", None))
    monkeypatch.setattr(lightning.LightningModule, "cpu", recording("to the CPU", None))
    assert peers.lightning_trial(tiny(batch_size=8))(1, 3) == {"full": 3 * 8 / 2.0}
    assert events == ["wait", "clock", "wait", "clock", "to the CPU"]


def test_bad_usage_ends_with_status_2(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in (["loaders", "--trials=0"], ["nothing"]):
        with pytest.raises(SystemExit) as leaving:
            main(arguments)
        assert leaving.value.code == 2
    assert main(["loaders", "--loaders=device,typo"]) == 2
    error = capsys.readouterr().err
    assert "data_loader=typo" in error and "allowed: " in error
