"""tools.bench: the protocol, and each command from the command line to its JSON report."""

import argparse
import importlib.util
import json
import os
import sys
from functools import partial
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
from torch import nn

from tests.conftest import CIFAR100, as_options, plan_on
from tests.processes import run_job, torchrun_variables
from tools.bench import common, ladder, loaders, peers, scaling
from tools.bench.__main__ import main
from tools.bench.common import Trials, in_processes, measure
from tools.bench.ladder import COMPARABLE, compare_with_baseline, evaluate, per_image, read_baseline
from utils.config import Config
from utils.distributed.world import World
from utils.errors import ConfigError, DataError, ExpectedError
from utils.training.batches import prefetch
from utils.training.plan import GRAPH_WARMUP_STEPS, Plan

SHAPES = {"dataset": "shapes", "num_classes": 10, "model": "resnet8", "device": "cpu", "enable_compile": False}
SMALL = as_options(SHAPES | {"batch_size": 16, "num_data_workers": 1})
OTHERS = ("timm", "lightning", "plain PyTorch")  # rows of `bench peers`


def test_trials_are_interleaved_and_the_warm_up_is_dropped():
    order = []

    def case(name):
        order.append(name)
        return {"calls": float(order.count(name))}

    rounds = list(measure({name: partial(case, name) for name in "ab"}, 3))
    assert order == ["a", "b"] * 4
    for name in "ab":  # for a report after each trial
        assert [found[name]["calls"].values for found in rounds] == [(2,), (2, 3), (2, 3, 4)]
    assert f"{rounds[-1]['a']['calls']:.1f}" == "3.0 (2.0-4.0)"


def test_a_case_that_cannot_run_here_is_skipped_unless_it_is_the_only_one(capsys):
    def refuse():
        raise ConfigError("it does not start here")

    cases = {"dali": refuse, "device": lambda: {"images_per_sec": 1.0}}
    assert [list(found) for found in measure(cases, 2)] == [["device"]] * 2
    assert capsys.readouterr().err.startswith("dali: skipped: it does not start here\n")
    for chosen, skip in ({"dali": refuse}, True), (cases, False):
        with pytest.raises(ConfigError):
            list(measure(chosen, 2, skip=skip))


def test_a_case_in_its_own_process_is_built_once_and_answers_or_dies():
    calls = {"answers": partial(partial, os.getpid), "dies": partial(partial, os._exit, 1)}
    with in_processes(calls, {}) as cases:
        assert cases["answers"]() == cases["answers"]() != os.getpid()
        with pytest.raises(ExpectedError, match="a measuring process ended"):
            cases["dies"]()


def test_a_number_that_is_not_finite_is_null_in_a_report(tiny, one_rank, tmp_path):
    """Python would write NaN, which other readers of JSON refuse."""
    results = {"case": {"rate": Trials((1.0, float("nan")))}, "bins": [float("inf"), -float("inf"), 2.5]}
    common.write_report(tmp_path / "report.json", "bench", tiny(), one_rank, results)
    written = json.loads((tmp_path / "report.json").read_text(), parse_constant=pytest.fail)["results"]
    assert written["case"]["rate"]["values"] == [1.0, None] and written["bins"] == [None, None, 2.5]


@pytest.mark.parametrize(("arguments", "message"), [
    (["ladder", "--warmup=-1"], "--warmup: is '-1'; expected a whole number from 0 on"),
    (["scaling", "--nproc=1,0"], "--nproc: is '0'; expected a whole number from 1 on"),
])  # fmt: skip
def test_bad_usage_ends_with_status_2(arguments, message, capsys):
    with pytest.raises(SystemExit, match="2"):
        main(arguments)
    assert message in capsys.readouterr().err


def test_a_bench_of_one_process_refuses_a_launcher_of_several(monkeypatch, capsys):
    for name, value in torchrun_variables(1, 2, 29500).items():
        monkeypatch.setenv(name, value)
    assert main(["ladder"]) == 2
    assert "bench ladder is one process; start it without torchrun" in capsys.readouterr().err


@pytest.mark.parametrize("option", ["--json", "--plot"])
def test_an_unwritable_file_is_reported_before_measuring(option, tmp_path, monkeypatch, capsys):
    pytest.importorskip("matplotlib", reason='matplotlib is missing: pip install ".[plot]"')
    monkeypatch.setattr(ladder, "measure_limits", lambda *_, **__: pytest.fail("began to measure"))
    assert main(["ladder", f"{option}={tmp_path}/none/file"]) == 2
    assert f"error: {option} {tmp_path}/none/file: cannot be written; choose a file in" in capsys.readouterr().err
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert main(["ladder", f"--plot={tmp_path}/picture.png"]) == 2
    assert "matplotlib is missing" in capsys.readouterr().err


def test_a_rung_is_a_block_with_settings():
    rung = ladder.read_rung(CIFAR100, "fastest+enable_compile=false+lr=0.3", ["batch_size=64"])
    assert (rung.enable_compile, rung.lr, rung.batch_size) == (False, 0.3, 64)
    for name in ladder.RUNGS.split(","):
        block, _, switch = name.partition("+")
        changed = ladder.read_rung(CIFAR100, name, []) != ladder.read_rung(CIFAR100, block, [])
        assert changed is bool(switch), f"{name} changes nothing"


@pytest.mark.slow
def test_ladder_measures_compares_and_reports_a_regression(tmp_path, capfd):
    report, picture = tmp_path / "report.json", tmp_path / "ladder.png"
    rungs = "bs256,bs256-amp-nhwc-extra-opts-graphs,fastest"
    arguments = ["ladder", f"--configs={rungs}", "--trials=2", "--iters=2", "--warmup=1", *SMALL]
    assert main([*arguments, f"--json={report}", f"--plot={picture}"]) == 0
    printed = capfd.readouterr()
    assert "graphs: skipped: enable_cuda_graphs needs a CUDA device" in printed.err and "speed-up" in printed.out
    assert picture.read_bytes().startswith(b"\x89PNG")
    content = json.loads(report.read_text())
    assert content["config"]["batch_size"] == 16 and content["environment"]["torch"]
    assert set(content["results"]["rungs"]) == {"bs256", "fastest"}
    for values in content["results"]["rungs"].values():
        assert len(values["full"]["values"]) == 2 and values["memory"]["min"] > 1e7
        assert values["arithmetic_share"] > 0 and values["memory_share"] > 0
    full = content["results"]["rungs"]["bs256"]["full"]
    full |= {name: 1000 * full[name] for name in ("median", "min")}
    report.write_text(json.dumps(content))
    assert main([*arguments, f"--baseline={report}"]) == 1 and "REGRESSION" in capfd.readouterr().out


def test_a_baseline_of_other_versions_or_settings_is_refused(tiny, tmp_path):
    environment, config = dict.fromkeys(COMPARABLE, "same"), tiny()
    saved = {"configs": {"rung": config.model_dump(mode="json")}, "rungs": {"rung": {"full": {"median": 100.0}}}}
    path = tmp_path / "report.json"

    def read(rung="rung", before=environment, **changes):
        path.write_text(json.dumps({"bench": "ladder", "environment": before, "results": saved}))
        return read_baseline(path, environment, {rung: Config(**config.model_dump() | changes)})

    assert read() == {"rung": {"median": 100.0}}
    for options, message in (
        ({"rung": "another"}, "has none of these rungs; measure it again here"),
        ({"before": environment | {"torch": "1.7"}}, r"was measured with another torch 1\.7; measure it again here"),
        ({"lr": 0.7}, "was measured with another lr of rung; measure"),
    ):
        with pytest.raises(ConfigError, match=message):
            read(**options)
    path.write_text("{}")
    with pytest.raises(DataError, match=r"json: not a report of tools\.bench --json \(it holds something else\);"):
        read_baseline(path, environment, {})


@pytest.mark.parametrize(("now", "slower"), [
    ((94.0,), True), ((94.0, 94.0, 99.5), False), ((96.0,), False), ((200.0,), False), (None, True),
])  # fmt: skip
def test_a_slower_or_skipped_rung_of_the_baseline_is_a_regression(now, slower):
    """Slower: the median beyond the tolerance, and all trials slower than the baseline's slowest."""
    results = {} if now is None else {"rung": {"full": Trials(now)}}
    (line,) = compare_with_baseline(results, {"rung": {"median": 100.0, "min": 99.0}})
    assert line.endswith("REGRESSION") is slower
    assert ("skipped now" in line) is (now is None)


def evaluated(config, world, **faster):
    limits = {"product float32, TFLOP/s": 1.0, "convolution float32 NHWC, TFLOP/s": 1.0, "memory, GB/s": 1.0}
    trials = {name: Trials((faster.get(name.split()[0], rate),)) for name, rate in limits.items()}
    return evaluate({"full": Trials((100.0,))}, per_image(config, world, trials), trials)


def test_fractions_count_the_datasets_own_images(tiny, one_rank):
    """ImageNet's images have 49 times the pixels of CIFAR's, and in a ResNet nearly 49 times the work."""
    options = {"num_classes": 10, "image_size": None, "data_loader": "synthetic"}
    small, large = (evaluated(tiny(dataset=name, **options), one_rank) for name in ("cifar10", "imagenet"))
    for share in ("arithmetic_share", "memory_share"):
        assert large[share] / small[share] == pytest.approx(49, rel=0.05)

    for faster in ("product", "convolution"):
        result = evaluated(tiny(), one_rank, **{faster: 4.0})
        assert result["arithmetic_share"] == pytest.approx(result["tflops"] / 4), "the faster one is the limit"


@pytest.mark.slow
def test_limits_measures_every_limit(tmp_path):
    report = tmp_path / "limits.json"
    ended = run_job(tmp_path, 2, main, ["limits", "--set", "device=cpu", "--trials=1", f"--json={report}"])
    assert [(rank.status, rank.errors) for rank in ended] == [(0, "")] * 2
    limits = [f"product {kind}, TFLOP/s" for kind in ("float32", "bf16")]
    limits += [f"convolution {kind} NHWC, TFLOP/s" for kind in ("float32", "bf16")]
    assert set(json.loads(report.read_text())["results"]) == {*limits, "memory, GB/s", "all-reduce of 100 MB, GB/s"}


def test_loaders_measures_every_loader_and_writes_the_report(tmp_path):
    report = tmp_path / "report.json"
    small = ["--set=batch_size=32", "--set=num_data_workers=1", "--batches=4", "--steps=2", "--trials=2"]
    command = ["loaders", "--config=quickstart", "--loaders=torchvision,device", f"--json={report}", *small]
    (ended,) = run_job(tmp_path, 1, main, command)
    assert ended.status == 0, ended.errors
    assert "torchvision" in ended.output and "waiting" in ended.output
    content = json.loads(report.read_text())
    assert content["config"]["batch_size"] == 32 and set(content["results"]) == {"torchvision", "device"}
    for values in content["results"].values():
        assert len(values["images_per_sec"]["values"]) == 2 and values["images_per_sec"]["min"] > 0
        assert 0 <= values["waiting"]["median"] < 1


def trial_of(config, world, step=None, **options):
    defaults = {"batches": 4, "steps": 2}
    return loaders.loader_trial(config, plan_on(config), world, step, argparse.Namespace(**defaults | options))


def test_nothing_is_timed_before_a_graph_is_captured(tiny, one_rank, monkeypatch):
    assert plan_on(tiny("fastest"), "cuda").capture_steps == GRAPH_WARMUP_STEPS + 1
    assert plan_on(tiny("fastest")).capture_steps == 0
    monkeypatch.setattr(Plan, "capture_steps", 5)
    steps = Mock()
    monkeypatch.setattr("utils.training.learner.Learner.train_step", steps)
    rung = common.Rung(tiny(), 0, 1)
    assert steps.call_count == 5
    trial_of(tiny(), one_rank, rung.learner.train_step, batches=1)()
    assert steps.call_count == 5 + 5 + 2


def test_measured_steps_get_their_batches_as_in_the_trainer(tiny, one_rank, monkeypatch):
    config, feed = tiny(enable_prefetch=True), Mock(side_effect=prefetch)
    for name in ("common", "loaders"):
        monkeypatch.setattr(f"tools.bench.{name}.prefetch", feed)
    step = common.OurStep(config, 0, 1)
    step()
    trial_of(config, one_rank, step.learner.train_step, batches=1, steps=1)()
    assert [(call.args[0], call.args[2]) for call in feed.call_args_list] == [(step.plan, one_rank.device)] * 2


def test_peers_run_with_and_without_the_switch_that_only_this_project_has(tiny):
    names = ["this project", *OTHERS]
    cpu, cuda = (peers.rows_of(tiny("fastest"), World(0, 0, 1, torch.device(kind))) for kind in ("cpu", "cuda"))
    assert list(cpu) == [*names, *(f"{name}, without keep_memory" for name in OTHERS)]
    assert sorted(cuda) == sorted([*names, "this project, without enable_cuda_graphs"])
    build, config = cuda["this project, without enable_cuda_graphs"]
    assert build is peers.OurStep and config.enable_cuda_graphs is False
    assert cuda["this project"] == (peers.OurStep, tiny("fastest"))


def test_peers_refuses_what_the_other_trainers_lack(capsys):
    assert main(["peers", "--config=fastest", "--set=ema_decay=0.9"]) == 2
    assert "error: ema_decay 0.9: the other trainers here lack it; use null\n" in capsys.readouterr().err


@pytest.mark.slow
def test_peers_train_the_same_or_say_what_to_install(tmp_path, capfd):
    report = tmp_path / "peers.json"
    options = ["--iters=2", "--warmup=1", "--trials=1", "--set=cpu_kernels=auto"]
    assert main(["peers", f"--json={report}", *options, *SMALL]) == 0
    missing, errors = [name for name in OTHERS[:2] if importlib.util.find_spec(name) is None], capfd.readouterr().err
    assert all(f"{name}: skipped: No module named '{name}" in errors for name in missing)
    there = [f"{name}{switch}" for name in OTHERS if name not in missing for switch in ("", ", without keep_memory")]
    assert set(json.loads(report.read_text())["results"]) == {"this project", *there}


def test_the_plain_loop_trains_the_same(tiny, monkeypatch):
    cross_entropy, losses = nn.functional.cross_entropy, {}
    for build in (common.OurStep, peers.plain_case):
        found = losses[build] = []
        keep = lambda *a, found=found, **o: found.append(cross_entropy(*a, **o)) or found[-1]  # noqa: E731
        monkeypatch.setattr(nn.functional, "cross_entropy", keep)
        build(tiny(lr=0.05, enable_nhwc=True), 1, 3)()
    torch.testing.assert_close(torch.stack(losses[peers.plain_case]), torch.stack(losses[common.OurStep]))


@pytest.mark.slow
def test_lightnings_clock_stops_before_it_moves_the_network_to_the_cpu(tiny, monkeypatch):
    lightning = pytest.importorskip("lightning", reason='lightning is missing: pip install ".[peers]"')
    events, ticks = [], iter([10.0, 12.0])

    def recording(event, result):
        return lambda *_: (events.append(event), result() if callable(result) else result)[1]

    monkeypatch.setattr(peers, "time", SimpleNamespace(perf_counter=recording("clock", lambda: next(ticks))))
    monkeypatch.setattr(common, "synchronize", recording("wait", None))
    monkeypatch.setattr(lightning.LightningModule, "cpu", recording("to the CPU", None))
    assert peers.lightning_case(tiny(batch_size=8), 1, 3)() == {"full": 3 * 8 / 2.0}
    assert events == ["wait", "clock", "wait", "clock", "to the CPU"]


def test_speed_up_and_efficiency_are_of_medians():
    records = {"strong 1": (100, 90, 500), "strong 4": (300, 320, 1), "weak 2": (50.0,)}
    results = scaling.summarise({name: {"train_images_per_sec": Trials(speeds)} for name, speeds in records.items()})
    assert (results["strong 4"]["train_speed_up"], results["strong 4"]["train_efficiency"]) == (3.0, 0.75)
    assert results["weak 2"]["train_efficiency"] == 1.0, "the fewest processes are the reference"


def test_batches_are_checked_before_anything_runs(tiny):
    assert {key: case.batch_size for key, case in scaling.configs_of(tiny(), [1, 2], ["strong", "weak"]).items()} == {
        ("strong", 1): 32, ("strong", 2): 32, ("weak", 1): 32, ("weak", 2): 64,
    }  # fmt: skip
    with pytest.raises(ConfigError, match="batch_size 32 cannot be split evenly over 3 ranks; use a multiple of 3"):
        scaling.configs_of(tiny(), [1, 3], ["strong"])


@pytest.mark.slow
def test_a_run_of_scaling_and_its_report(tmp_path, capsys):
    report = tmp_path / "scaling.json"
    short = ["--mode=weak", "--iters=3", "--warmup=1", "--trials=1", "--set=data_loader=device", "--nproc=2"]
    assert main(["scaling", "--config=default", *SMALL, *short, f"--json={report}"]) == 0
    assert "weak 2" in capsys.readouterr().out
    found = json.loads(report.read_text())["results"]["weak 2"]
    assert found["train_images_per_sec"]["values"][0] > 0 and found["communication_share"]["values"][0] < 1
