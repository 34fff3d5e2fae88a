"""tools.bench: the protocol, and each command from the command line to its JSON report."""

import argparse
import importlib.util
import json
import os
import re
import runpy
import sys
from contextlib import nullcontext
from functools import partial
from itertools import cycle
from types import SimpleNamespace
from unittest.mock import ANY, Mock

import pytest
import torch
from torch import nn

from tests.conftest import CIFAR100, as_options, plan_on
from tests.processes import torchrun_variables
from tools.bench import common, ladder, limits, loaders, peers, scaling
from tools.bench.__main__ import main
from tools.bench.common import Trials, in_processes, measure
from tools.bench.ladder import compare_with_baseline, evaluate, per_image, read_baseline
from utils.config import Config
from utils.distributed.world import World
from utils.errors import ConfigError, DataError, ExpectedError
from utils.training.batches import prefetch
from utils.training.plan import GRAPH_WARMUP_STEPS, Plan

SHAPES = {"dataset": "shapes", "num_classes": 10, "model": "resnet8", "device": "cpu", "enable_compile": False}
SMALL = as_options(SHAPES | {"batch_size": 16, "num_data_workers": 1})
OTHERS = ("timm", "lightning", "plain PyTorch")  # rows of `bench peers`
RUNGS = ("bs256", "bs256-amp-nhwc-extra-opts-graphs", "fastest")  # a CPU skips the second
LIMITS = [f"{op}, TFLOP/s" for kind in ("float32", "bf16") for op in (f"product {kind}", f"convolution {kind} NHWC")]


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
    assert Trials((2, 3, 7)).as_json() == {"median": 3, "min": 2, "max": 7, "values": [2, 3, 7]}


def test_a_case_that_cannot_run_here_is_skipped_unless_it_is_the_only_one(capsys):
    def refuse():
        raise ConfigError("it does not start here")

    cases = {"dali": refuse, "device": lambda: {"images_per_sec": 1.0}}
    assert [list(found) for found in measure(cases, 2)] == [["device"]] * 2
    assert capsys.readouterr().err.startswith("dali: skipped: it does not start here\n")
    later = {"later": Mock(side_effect=[{}, {}, ConfigError("no memory")])} | cases
    for chosen, skip in ({"dali": refuse}, True), (cases, False), (later, True):
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
    common.write_report(tmp_path / "report.json", "bench", tiny(), one_rank, results, threads=77)
    report = json.loads((tmp_path / "report.json").read_text(), parse_constant=pytest.fail)
    written, threads = report["results"], report["environment"]["threads"]
    assert written["case"]["rate"]["values"] == [1.0, None] and written["bins"] == [None, None, 2.5] and threads == 77


def test_bad_usage_or_a_launcher_for_a_bench_of_one_process_ends_with_status_2(monkeypatch, capsys):
    for name, value, least in (("ladder", "warmup=-1", 0), ("scaling", "nproc=0", 1)):
        with pytest.raises(SystemExit, match="2"):
            main([name, f"--{value}"])
        assert f"is '{value.partition('=')[2]}'; expected a whole number from {least} on" in capsys.readouterr().err
    for name, value in torchrun_variables(1, 2, 29500).items():
        monkeypatch.setenv(name, value)
    assert main(["ladder"]) == 2 and "bench ladder is one process; start it without torchrun" in capsys.readouterr().err
    for name in ("loaders", "limits"):  # measure all ranks
        monkeypatch.setattr(f"tools.bench.{name}.run", Mock(return_value=7))
        assert main([name]) == 7


@pytest.mark.parametrize("option", ["--json", "--plot"])
def test_an_unwritable_file_is_reported_before_measuring(option, tmp_path, monkeypatch, capsys):
    pytest.importorskip("matplotlib", reason='matplotlib is missing: pip install ".[plot]"')
    monkeypatch.setattr(ladder, "measure_limits", lambda *_, **__: pytest.fail("began to measure"))
    assert main(["ladder", f"{option}={tmp_path}/none/file"]) == 2
    assert f"error: {option} {tmp_path}/none/file: cannot be written; choose a file in" in capsys.readouterr().err
    assert main(["ladder", f"{option}={tmp_path}"]) == 2
    monkeypatch.setattr(ladder, "save", saved := Mock())
    ladder.draw({"a": Trials((2.0,)), "b": Trials((3.0,))}, "", tmp_path)
    assert [text.get_text() for text in saved.call_args.args[0].axes[0].texts] == ["2  (1.00x)", "3  (1.50x)"]
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert main(["ladder", f"--plot={tmp_path}/picture.png"]) == 2
    assert "matplotlib is missing" in capsys.readouterr().err


@pytest.fixture
def rates(monkeypatch):
    """{case: images/s} of a bench, whose cases answer at once and without processes."""
    rates, rest = {}, {"compute": 9.0, "io": 8.0, "memory": 2e9}
    cases = lambda builds, _: nullcontext({n: lambda n=n: rest | {"full": rates[n]} for n in builds})  # noqa: E731
    monkeypatch.setattr(common, "in_processes", cases)
    return rates


def test_a_ladders_speed_ups_and_its_regressions(rates, tmp_path, monkeypatch, capsys):
    rung = ladder.read_rung(CIFAR100, "fastest+enable_compile=false+lr=0.3", ["batch_size=64", "lr=0.7"])
    assert (rung.enable_compile, rung.lr, rung.batch_size) == (False, 0.3, 64)
    for name in ladder.RUNGS.split(","):
        block, _, switch = name.partition("+")
        changed = ladder.read_rung(CIFAR100, name, []) != ladder.read_rung(CIFAR100, block, [])
        assert changed is bool(switch), f"{name} changes nothing"
    monkeypatch.setattr(ladder, "measure_limits", lambda *_, **__: {"memory, GB/s": Trials((5e3,))})
    monkeypatch.setattr(ladder, "per_image", lambda *_: {"flops": 1e12, "bytes": 1e9, "limit": 400.0})
    arguments, report = ["ladder", "--configs=bs256,bs128", "--trials=1", *SMALL], tmp_path / "report.json"
    rates.update(bs256=100.0, bs128=200.0)
    assert main([*arguments, f"--json={report}"]) == 0
    row = " ".join(capsys.readouterr().out.replace("│", "").partition("bs128 ")[2].partition("\n")[0].split())
    assert row == "200.0 (200.0-200.0) 2.00 9.0 8 200.00 50% 4% 2.0"
    rates["bs128"] = 150.0
    assert main([*arguments, f"--baseline={report}"]) == 1
    assert "\nbs128: -25.0 % against the baseline: REGRESSION\nbs256: +0.0 %" in capsys.readouterr().out


def test_a_baseline_of_other_versions_or_settings_is_refused(tiny, tmp_path):
    known = ("python", "torch", "torchvision", "cuda", "cudnn", "device", "threads", "world_size", "host")
    environment, config = dict.fromkeys(known, "same"), tiny()
    saved = {"configs": {"rung": config.model_dump(mode="json")}, "rungs": {"rung": {"full": {"median": 100.0}}}}
    path = tmp_path / "report.json"

    def read(rung="rung", before=environment, **changes):
        path.write_text(json.dumps({"bench": "ladder", "environment": before, "results": saved}))
        return read_baseline(path, environment, {rung: Config(**config.model_dump() | changes)})

    assert read() == {"rung": {"median": 100.0}}
    for options, message in (
        ({"rung": "another"}, "has none of these rungs; measure it again here"),
        *(({"before": environment | {key: "1.7"}}, rf"was measured with another {key} 1\.7; measure") for key in known),
        ({"lr": 0.7}, "was measured with another lr of rung; measure"),
    ):
        with pytest.raises(ConfigError, match=message):
            read(**options)
    path.write_text("{}")
    with pytest.raises(DataError, match=r"json: not a report of tools\.bench --json \(it holds something else\);"):
        read_baseline(path, environment, {})


@pytest.mark.parametrize(("now", "slower"), [
    ((94.0,), True), ((94.0, 94.0, 99.5), False), ((96.0,), False), ((200.0,), False), (None, True)])  # fmt: skip
def test_a_slower_or_skipped_rung_of_the_baseline_is_a_regression(now, slower):
    """Slower: the median beyond the tolerance, and all trials slower than the baseline's slowest."""
    results = {} if now is None else {"rung": {"full": Trials(now)}}
    (line,) = compare_with_baseline(results, {"rung": {"median": 100.0, "min": 99.0}})
    assert line.endswith("REGRESSION") is slower
    assert line.startswith("rung: skipped now:" if now is None else f"rung: {now[len(now) // 2] - 100:+.1f} % against")


def evaluated(config, world, **faster):
    limits = (*LIMITS, "memory, GB/s")  # of bf16 twice as fast
    trials = {name: Trials(((1 + ("bf16" in name)) * faster.get(re.split(r"\W", name)[0], 1.0),)) for name in limits}
    return evaluate({"full": Trials((100.0,))}, per_image(config, world, trials), trials)


def test_fractions_count_the_datasets_own_images(tiny, one_rank, monkeypatch):
    """ImageNet's images have 49 times the pixels of CIFAR's, and in a ResNet nearly 49 times the work."""
    options = {"num_classes": 10, "image_size": None, "data_loader": "synthetic"}
    small, large = (evaluated(tiny(dataset=name, **options), one_rank) for name in ("cifar10", "imagenet"))
    for share in ("arithmetic_share", "memory_share"):
        assert large[share] / small[share] == pytest.approx(49, rel=0.05)

    monkeypatch.setattr(ladder, "flops_per_image", lambda *_: 3e9)
    monkeypatch.setattr(ladder, "activation_bytes_per_image", lambda *_: 5e7)  # each moved four times
    for faster, enable_amp, limit in (("product", True, 8), ("convolution", False, 4)):
        result = evaluated(tiny(enable_amp=enable_amp, amp_dtype="bf16"), one_rank, **{faster: 4.0}, memory=50.0)
        shares = {"tflops": 100 * 3e9 / 1e12, "arithmetic_share": 0.3 / limit, "memory_share": 100 * 4 * 5e7 / 1e9 / 50}
        assert {name: result[name] for name in shares} == pytest.approx(shares)


def test_limits_count_multiply_adds_as_two_and_a_copy_as_reading_and_writing(monkeypatch):
    tf32, seconds = set(), cycle([0.02, 0.1])  # then three times in a trial
    allowed = partial(getattr, torch.backends.cuda.matmul, "allow_tf32")
    monkeypatch.setattr(common, "time_action", lambda *_: tf32.add(allowed()) or next(seconds))
    monkeypatch.setattr(limits, "dist", Mock())
    found = limits.measure_limits(World(0, 0, 2, torch.device("cpu")), 1)
    product, convolution = 30 * 2 * 1024**3 / 1e12, 30 * 2 * 32 * (8 * 8) * 256 * 256 * (3 * 3) / 1e12
    rates = [product, convolution] * 2 + [30 * 2 * 2**28 / 1e9, 10 * 0.1]  # float32, bf16; memory, all-reduce
    assert [trials.median for trials in found.values()] == pytest.approx(rates)
    assert tf32 == {False}


def test_rates_are_of_timed_batches_on_a_finished_device(tiny, one_rank, monkeypatch, capsys):
    """Loading a batch takes 1 second, the first one 11. The host does not wait for a step's 3 seconds on its device."""
    clock = SimpleNamespace(now=0, queued=0, perf_counter=lambda: clock.now)
    step = Mock(side_effect=lambda *_: vars(clock).update(queued=clock.queued + 3))

    def load(_):
        clock.now += 10
        while True:
            clock.now += 1
            yield torch.zeros(32, 3, 4, 4), torch.zeros(32)

    feed, loader = Mock(side_effect=prefetch), SimpleNamespace(train=Mock(__iter__=load), notes=[])
    for module in (common, loaders):
        monkeypatch.setattr(module, "time", clock)
        monkeypatch.setattr(module, "build_loaders", lambda *_: loader)
        monkeypatch.setattr(module, "prefetch", feed)
    monkeypatch.setattr(torch.cpu, "synchronize", lambda _: vars(clock).update(now=clock.now + clock.queued, queued=0))
    assert plan_on(tiny("fastest"), "cuda").capture_steps == GRAPH_WARMUP_STEPS + 1  # they are not timed
    monkeypatch.setattr(Plan, "capture_steps", 5)
    monkeypatch.setattr("utils.training.learner.Learner.train_step", step)
    found = loaders.loader_trial(tiny(), plan_on(tiny()), one_rank, step, argparse.Namespace(batches=4, steps=2))()
    assert found == {"images_per_sec": 32, "training_images_per_sec": 32 / 4, "waiting": 0.25}
    rung = common.Rung(tiny(), 1, 2)
    assert step.call_count == (5 + 2) + 5
    assert rung() == {"compute": 32 / 3, "io": 32, "full": 32 / 4, "memory": ANY}
    assert [call.args[::2] for call in feed.call_args_list] == [(rung.plan, one_rank.device)] * 2
    case = {name: Trials((value,)) for name, value in found.items()}
    loaders.show(tiny(), one_rank, {"device": case, "synthetic": case | {"training_images_per_sec": Trials((10.0,))}})
    assert re.search(r"device +│ 32 \(32-32\) +│ +8 \(8-8\) │ 25.0% .*│ +20.0% │", capsys.readouterr().out)


def test_peers_run_with_and_without_the_switch_that_only_this_project_has(tiny):
    names = ["this project", *OTHERS]
    cpu, cuda = (peers.rows_of(tiny("fastest"), World(0, 0, 1, torch.device(kind))) for kind in ("cpu", "cuda"))
    assert list(cpu) == [*names, *(f"{name}, without keep_memory" for name in OTHERS)]
    assert sorted(cuda) == sorted([*names, "this project, without enable_cuda_graphs"])
    build, config = cuda["this project, without enable_cuda_graphs"]
    assert build is peers.OurStep and config.enable_cuda_graphs is False
    assert cuda["this project"] == (peers.OurStep, tiny("fastest"))


def test_peers_refuses_what_the_other_trainers_lack_and_compares_the_rest(rates, capsys):
    options = ["ema_decay=0.9", "optimizer=adamw", "clip_grad_norm=1.0", "label_smoothing=0.1", "micro_batch_size=8"]
    for setting in (*options, "opt_level=O2"):
        assert main(["peers", "--config=fastest", *SMALL, f"--set={setting}"]) == 2
        assert f"{setting.partition('=')[2]}: the other trainers" in capsys.readouterr().err.replace('"', "")
    rates |= dict.fromkeys(OTHERS, 50.0) | {"this project": 100.0}
    assert main(["peers", "--trials=1", *SMALL, "--set=cpu_kernels=false"]) == 0
    assert capsys.readouterr().out.count("50.0 (50.0-50.0) │                         2.000 │") == 3


def test_the_plain_loop_trains_the_same(tiny, monkeypatch):
    network = peers._prepare(tiny(enable_nhwc=True))[1]
    assert network.conv1.weight.is_contiguous(memory_format=torch.channels_last)
    cross_entropy, losses = nn.functional.cross_entropy, {}
    for build in (common.OurStep, peers.plain_case):
        found = losses[build] = []
        keep = lambda *a, found=found, **o: found.append(cross_entropy(*a, **o)) or found[-1]  # noqa: E731
        monkeypatch.setattr(nn.functional, "cross_entropy", keep)
        build(tiny(lr=0.05, enable_nhwc=True, seed=3), 1, 3)()
    torch.testing.assert_close(torch.stack(losses[peers.plain_case]), torch.stack(losses[common.OurStep]))


@pytest.mark.slow
def test_lightnings_clock_stops_before_it_moves_the_network_to_the_cpu(tiny, monkeypatch):
    lightning = pytest.importorskip("lightning", reason='lightning is missing: pip install ".[peers]"')
    calls = Mock(clock=Mock(side_effect=[10.0, 12.0]))
    monkeypatch.setattr(peers, "time", SimpleNamespace(perf_counter=calls.clock))
    monkeypatch.setattr(torch.cpu, "synchronize", calls.wait)
    monkeypatch.setattr(lightning.LightningModule, "cpu", calls.cpu)
    assert peers.lightning_case(tiny(batch_size=8), 1, 3)() == {"full": 3 * 8 / 2.0}
    assert [name for name, *_ in calls.mock_calls] == ["wait", "clock", "wait", "clock", "cpu"]


def test_batches_are_checked_and_speed_ups_are_of_medians_of_the_slowest_rank(tiny, tmp_path, monkeypatch, capsys):
    speeds = 100, 300, 50, 120, 90, 320, 50, 120, 500, 1, 50, 120  # strong 2, strong 8, weak 2, weak 8
    values = ({"train_images_per_sec": speed, "communication_share": 0.4} for speed in speeds)
    monkeypatch.setattr(scaling, "run_once", lambda *_: next(values))
    assert main(["scaling", "--nproc=2,8", "--trials=3", *SMALL]) == 0  # the fewest processes are the reference
    printed = re.sub(r"[ │]+", " ", capsys.readouterr().out)
    assert " strong 8 300 (1-320) 3.00 75% 40.0% " in printed and " weak 8 120 (120-120) 2.40 60% 40.0% " in printed
    # measured in three rounds of three steps; the other rank has half of this rank's images/s
    rates = {"ddp": iter((9, 60, 70, 10)), "no_communication": iter((9, 80, 10, 100))}  # the first: warm-up
    world = Mock(world_size=2, is_main=True, all_gather=lambda value: [value, value / 2])
    plan, path = Mock(capture_steps=5, describe=dict), tmp_path / "values"
    monkeypatch.setattr(scaling, "open_dataset", Mock())
    monkeypatch.setattr(scaling, "build_loaders", lambda *_: Mock(train=[(torch.zeros(1), None)]))
    monkeypatch.setattr(scaling, "build_measured", lambda case, *_, **__: Mock(train_step=case.parallel, plan=plan))
    monkeypatch.setattr(scaling, "images_per_sec", measured := Mock(side_effect=lambda *a: next(rates[a[5]])))
    scaling.measure_rank(tiny(), 2, 7, path, world)
    assert json.loads(path.read_text()) == {"train_images_per_sec": 30, "plan": {}, "communication_share": 0.25}
    assert [call.args[2:4] for call in measured.call_args_list] == [(0, 5)] * 2 + [(0, 3)] * 6
    assert {key: case.batch_size for key, case in scaling.configs_of(tiny(), [1, 2], ["strong", "weak"]).items()} == {
        ("strong", 1): 32, ("strong", 2): 32, ("weak", 1): 32, ("weak", 2): 64}  # fmt: skip
    with pytest.raises(ConfigError, match="batch_size 32 cannot be split evenly over 3 ranks; use a multiple of 3"):
        scaling.configs_of(tiny(), [1, 3], ["strong"])


def test_scaling_starts_ranks_with_their_part_of_the_cores_and_their_steps(monkeypatch):
    def start(command, env, **_):
        assert env["OMP_NUM_THREADS"] == "4"
        monkeypatch.setattr(sys, "argv", command[command.index(scaling.__file__) :])
        with pytest.raises(SystemExit, match="7"):
            runpy.run_path(scaling.__file__, run_name="__main__")
        return SimpleNamespace(returncode=7)

    monkeypatch.delenv("OMP_NUM_THREADS")
    monkeypatch.setattr(scaling, "usable_cores", lambda: 9)
    monkeypatch.setattr("utils.distributed.ranks.run_ranks", ranks := Mock(return_value=7))
    monkeypatch.setattr(scaling.subprocess, "run", start)
    assert main(["scaling", "--nproc=1,2", "--iters=7", "--warmup=2", *SMALL]) == 1
    steps, *others = ranks.call_args.args
    assert [*steps.args[1:3], *others] == [2, 7, "cpu", 600]


@pytest.mark.parametrize(("arguments", "cases"), [
    pytest.param(["scaling", "--mode=weak", "--nproc=2", "--iters=3"], ["weak 2"], marks=pytest.mark.slow),
    pytest.param(["peers", "--iters=2"], ["this project", *OTHERS], marks=pytest.mark.slow),
    pytest.param(["limits"], [*LIMITS, "memory, GB/s"], marks=pytest.mark.slow),
    pytest.param(["ladder", f"--configs={','.join(RUNGS)}", "--iters=2"], RUNGS[::2], marks=pytest.mark.slow),
    (["loaders", "--loaders=torchvision,device", "--batches=4", "--steps=2"], ["torchvision", "device"])])  # fmt: skip
def test_a_bench_measures_and_reports(arguments, cases, tmp_path, capfd, monkeypatch):
    monkeypatch.setattr(loaders, "loader_trial", trial := Mock(wraps=loaders.loader_trial))
    assert main([*arguments, *SMALL, "--trials=1", "--set=cpu_kernels=false", f"--json={tmp_path}/report"]) == 0
    missing = {name for name in OTHERS[:2] if name in cases and not importlib.util.find_spec(name)}
    reasons = [f"{name}: skipped: No module named '{name}" for name in missing]
    reasons += [f"{RUNGS[1]}: skipped: enable_cuda_graphs needs a CUDA device"] * (cases == RUNGS[::2])
    errors = capfd.readouterr().err
    assert all(reason in errors for reason in reasons), errors
    results = json.loads((tmp_path / "report").read_text())["results"]
    assert results.get("rungs", results).keys() == {*cases} - missing
    assert [call.args[0].data_loader for call in trial.call_args_list] == [*cases] * (arguments[0] == "loaders")
