"""tools.predict_scaling: the model against closed forms, the command, and the figures of docs/scaling.md."""

import json
import math
import subprocess
import sys
from dataclasses import replace

import pytest

from tests.conftest import CIFAR100, ROOT
from tools import predict_scaling
from tools.predict_scaling import layer_costs, main, published_cases, published_table, read_published
from tools.shared.scaling_model import (
    Bucket,
    Cluster,
    MeasuredStep,
    all_reduce,
    expected_maximum,
    extremes,
    make_buckets,
    overlap,
    predict,
    ring,
    tree,
)
from utils.config import load_config

FREE = Cluster(
    intra=math.inf, inter=math.inf, call_latency=0, intra_latency=0, inter_latency=0, memory=math.inf, noise=0, floor=0
)
WORK = MeasuredStep(step=0.3, batch=64, buckets=(Bucket(10_000_000, 0.5), Bucket(10_000_000, 1.0)))


def test_expected_maximum_of_normals():
    closed = {1: 0, 2: 1 / math.sqrt(math.pi), 3: 1.5 / math.sqrt(math.pi)}
    closed[4] = 6 / math.pi**1.5 * math.atan(math.sqrt(2))  # https://oeis.org/A243453
    for count, value in closed.items():
        assert expected_maximum(count) == pytest.approx(value, abs=1e-4)
    assert expected_maximum(1000) == pytest.approx(3.2414, abs=1e-3)  # tables of normal order statistics


def test_ring_and_tree_all_reduce():
    assert ring(8e6, 4, 1e9, 1e-6) == pytest.approx(2 * 3 / 4 * 8e6 / 1e9 + 6e-6)
    assert tree(8e6, 8, 1e9, 1e-6) == pytest.approx(2 * 8e6 / 1e9 + 6e-6)
    assert ring(8e6, 1, 1e9, 1e-6) == tree(8e6, 1, 1e9, 1e-6) == 0


def test_hierarchical_all_reduce_takes_the_slower_stage_and_the_better_algorithm():
    machine = Cluster(gpus_per_node=4, intra=100e9, inter=10e9, call_latency=0, intra_latency=1e-6, inter_latency=10e-6)
    assert all_reduce(1e8, 4, machine) == pytest.approx(ring(1e8, 4, 100e9, 1e-6))
    assert all_reduce(1e8, 8, machine) == pytest.approx(6e-6 + ring(1e8, 2, 10e9, 10e-6)), "network is the bottleneck"
    assert all_reduce(100, 4 * 256, machine) == pytest.approx(6e-6 + tree(100, 256, 10e9, 10e-6), rel=1e-3)
    fast_network = replace(machine, inter=1e12)
    assert all_reduce(1e9, 8, fast_network) == pytest.approx(6e-6 + 20e-6 + ring(1e9, 4, 100e9, 0))


def test_overlap_hides_all_but_the_last_bucket():
    assert overlap(1.0, [(0.1, 1.0)]) == pytest.approx(1.1)
    assert overlap(1.0, [(0.1, 0.5), (0.1, 1.0)]) == pytest.approx(1.1), "the first is hidden"
    assert overlap(1.0, [(5.0, 0.5), (0.1, 1.0)]) == pytest.approx(0.5 + 5.0 + 0.1), "bound by communication"
    assert overlap(1.0, []) == 1.0
    # computing beside an all-reduce: 0.2 s of it take what 0.1 s would
    assert overlap(1.0, [(0.2, 0.5)], interference=1.0) == pytest.approx(1.1)
    assert overlap(1.0, [(0.2, 0.5), (0.0, 1.0)], interference=1.0) == pytest.approx(1.1)
    assert overlap(1.0, [(9.0, 0.5)], interference=1.0) == pytest.approx(9.5), "hindered all along"


def test_buckets_close_when_full_in_backward_order():
    mega = 2**20
    layers = [(10 * mega, 1.0), (20 * mega, 1.0), (30 * mega, 1.0), (2 * mega, 1.0)]
    buckets = make_buckets(layers)
    assert [bucket.size // mega for bucket in buckets] == [2, 30, 30]
    assert [bucket.ready for bucket in buckets] == [0.25, 0.5, 1.0]
    assert make_buckets([(mega // 2, 1.0)]) == (Bucket(mega // 2, 1.0),)


def test_a_perfect_machine_scales_perfectly_and_each_cost_appears_by_itself():
    for gpus in (1, 8, 4096):
        assert predict(WORK, gpus, FREE).efficiency == pytest.approx(1.0)
        assert predict(WORK, gpus, FREE, batch_per_gpu=64 / gpus).efficiency == pytest.approx(1.0)
    noisy = predict(WORK, 2, replace(FREE, noise=0.1))
    assert noisy.step == pytest.approx(0.3 * (1 + 0.1 / math.sqrt(math.pi))) and noisy.limit == "compute"
    fed = predict(WORK, 8, replace(FREE, input_rate=640, gpus_per_node=8))
    assert (fed.step, fed.limit) == (pytest.approx(0.8), "input")
    wired = predict(WORK, 8, replace(FREE, intra=1e9, interference=0))
    assert wired.step == pytest.approx(0.3 + ring(1e7, 8, 1e9, 0)), "only the last bucket is exposed"
    assert predict(WORK, 1, Cluster()).step == 0.3


def test_strong_scaling_ends_at_the_floor():
    row = predict(WORK, 64, replace(FREE, floor=0.01), batch_per_gpu=1)
    assert (row.step, row.limit, row.batch_per_gpu) == (0.01, "launches", 1)


def test_costs_of_the_networks_are_as_published():
    layers = layer_costs("resnet50-imagenet")
    assert sum(size for size, _ in layers) == 4 * 25_557_032
    assert sum(cost for _, cost in layers) == pytest.approx(4.09e9, rel=0.01)  # multiplications for 224 pixels
    assert sum(size for size, _ in layer_costs("resnet50-cifar")) == 4 * 23_712_932


def test_the_hosts_work_adds_to_a_step_of_several_gpus():
    assert predict(WORK, 2, replace(FREE, host=0.1)).step == pytest.approx(0.4)
    assert predict(WORK, 1, replace(FREE, host=0.1)).step == 0.3


def test_every_input_that_varies_widens_the_interval():
    """Each input, varied by itself, moves the forecast to its side, within the interval of all."""
    machine = Cluster(noise=0.02)
    worst, best = extremes(machine)
    varied = {"intra", "inter", "noise", "interference", "host", "floor"}
    changed = {name for name in vars(machine) if len({getattr(end, name) for end in (machine, worst, best)}) > 1}
    assert changed == varied, "docs/scaling.md lists what varies"
    for name in varied:
        gpus = 8 if name == "intra" else 64  # within one node: the links between nodes are slower
        low, middle, high = (predict(WORK, gpus, end, batch_per_gpu=1).efficiency for end in (worst, machine, best))
        bad, good = (
            predict(WORK, gpus, replace(machine, **{name: getattr(end, name)}), batch_per_gpu=1).efficiency
            for end in (worst, best)
        )
        assert low <= bad <= middle <= good <= high and bad < good, name


def test_published_measurements_used_for_the_model():
    cases = [case for case in published_cases() if case.seen]
    assert len(cases) == 12
    assert {case.name: round(case.error) for case in cases if abs(case.error) > 5} == {
        "SC20 tutorial, 16 GPUs, training only": 7,
        "NVIDIA ResNet50 AMP, DGX-1, 8 GPUs": 11,
        "NVIDIA ResNet50 AMP, DGX A100, 8 GPUs": 14,
    }, "docs/scaling.md explains only these three"
    assert {case.name for case in cases if not case.inside} == {
        "NVIDIA ResNet50 AMP, DGX-1, 8 GPUs", "NVIDIA ResNet50 AMP, DGX A100, 8 GPUs"
    }  # fmt: skip
    page = (ROOT / "docs/scaling.md").read_text(encoding="utf-8")
    assert "Three errors are above 5 points: 7, 11 and 14." in page
    assert "Of all eighteen errors twelve are positive" in page
    assert sum(case.error > 0 for case in published_cases()) == 12


def test_published_measurements_not_used_for_the_model():
    cases = [case for case in published_cases() if not case.seen]
    assert len(cases) == 6
    assert {case.name: round(case.error, 1) for case in cases if abs(case.error) > 5} == {
        "MLPerf 3.0 NVIDIA ResNet50, 8 to 3,584 H100, global batch 57,344": -21.4,
        "JUWELS Booster ResNet50 with DALI, 4 to 1,024 A100": 13.1,
    }
    assert [case.name for case in cases if not case.inside] == ["JUWELS Booster ResNet50 with DALI, 4 to 1,024 A100"]
    page = " ".join((ROOT / "docs/scaling.md").read_text(encoding="utf-8").split())
    widths = [case.high - case.low for case in cases]
    wide = [round(100 * width) for width in widths if width > predict_scaling.MAX_INTERVAL]
    words = f"two of these intervals are wider than 40 points ({' and '.join(map(str, wide))}) and so say nothing."
    assert f"Four of the six errors are below 5 points. Five figures lie within their intervals, but {words}" in page
    assert "3,584 GPUs: -21.4 points" in page and "JUWELS: +13.1 points" in page


def test_docs_explain_the_tutorials_loss_by_the_hosts_work():
    case, work, machine = next(found for found in read_published() if found[0]["name"].startswith("SC20"))
    missing = work.step / case["published"] - predict(work, 16, machine).step
    exposed = predict(work, 16, replace(machine, host=extremes(machine)[0].host))
    page = " ".join((ROOT / "docs/scaling.md").read_text(encoding="utf-8").split())
    assert f"lasts {missing * 1e3:.1f} ms longer than forecast" in page
    assert f"With them the forecast is {exposed.efficiency * 100:.1f} %" in page


def test_docs_give_the_lost_milliseconds_of_nvidias_steps():
    cases = {case["name"]: (case, machine) for case, _, machine in read_published()}
    lost, reduced = [], []
    for precision, machine in (("AMP", "DGX-1"), ("AMP", "DGX A100"), ("FP32", "DGX-1"), ("TF32", "DGX A100")):
        case, links = cases[f"NVIDIA ResNet50 {precision}, {machine}, 8 GPUs"]
        lost.append(f"{case['step_ms'] / case['published'] - case['step_ms']:.1f}")
        size = sum(size for size, _ in layer_costs(case["model"]))
        reduced.append(f"{1e3 * all_reduce(size, 8, links):.1f}")
    page = " ".join((ROOT / "docs/scaling.md").read_text(encoding="utf-8").split())
    assert f"loses {lost[0]} ms on the DGX-1 and {lost[1]} ms on the DGX A100" in page
    assert f"with FP32 and TF32 it loses {lost[2]} and {lost[3]} ms" in page
    assert f"an all-reduce of all of them takes {reduced[0]} and {reduced[1]} ms" in page


def test_docs_have_the_tables_that_the_command_prints(capsys):
    assert main(["--published"]) == 0
    printed, page = capsys.readouterr().out, (ROOT / "docs/scaling.md").read_text(encoding="utf-8")
    for table in (published_table(seen=True), published_table(seen=False)):
        assert table in printed and table in page


@pytest.fixture
def report(tmp_path):
    def write(world_size=1, **rungs):
        config = load_config(CIFAR100, "bs256").model_dump(mode="json")
        content = {
            "bench": "ladder",
            "environment": {"world_size": 1, "device": "a GPU"},
            "config": config | {"batch_size": 1},
            "results": {
                "rungs": {name: {"full": {"median": rate}} for name, rate in rungs.items()},
                "configs": dict.fromkeys(rungs, config),
            },
        }
        if world_size > 1:
            values = {"train_images_per_sec": {"median": 100.0}}
            content |= {"bench": "scaling", "results": {f"weak {world_size}": values}}
        path = tmp_path / "bench.json"
        path.write_text(json.dumps(content))
        return path

    return write


def test_command_prints_both_curves_and_its_assumptions(report, capsys):
    path = report(slow=1000.0, fast=2560.0)
    assert main(["--from", str(path), "--gpus", "1,64", "--inter", "40"]) == 0
    printed = capsys.readouterr().out
    assert "measured: fast, 2,560 images/s" in printed and "94.9 MB of float32 gradients" in printed
    assert "40 GB/s between nodes" in printed and "weak scaling" in printed and "strong scaling" in printed
    one = next(line for line in printed.splitlines() if line.split()[:1] == ["1"])
    assert one.split()[2:9] == ["100.00", "2,560", "100.0%", "(100.0%", "to", "100.0%)", "compute"]
    assert "bandwidth 0.5 to 1.25 x" in printed


def test_an_installed_program_has_no_published_figures(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(predict_scaling, "PUBLISHED", tmp_path / "absent.json")
    assert main(["--published"]) == 2
    assert "an installed program has no published figures" in capsys.readouterr().err


def test_plot(report, tmp_path):
    pytest.importorskip("matplotlib", reason='matplotlib is missing: pip install ".[plot]"')
    assert main(["--from", str(report(fast=2560.0)), "--plot", str(tmp_path / "curve.png")]) == 0
    assert (tmp_path / "curve.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        (["--from", "missing.json"], 3, "not a report of tools.bench"),
        ([], 2, "--from is missing"),
        (["--from", "REPORT", "--gpus", "many"], 2, "--gpus many"),
        (["--from", "REPORT", "--gpus", "8,0"], 2, "--gpus 8,0: expected whole numbers of at least 1"),
        (["--from", "REPORT", "--gpus=-8"], 2, "--gpus -8: expected whole numbers of at least 1"),
        (["--from", "REPORT", "--inter", "0"], 2, "expected a number above 0"),
    ],
)
def test_bad_usage_is_one_line(report, capsys, arguments, status, message):
    path = str(report(fast=1000.0))
    assert main([path if word == "REPORT" else word for word in arguments]) == status
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1


def test_a_foreign_network_and_machine(tmp_path, capsys):
    """docs/scaling.md shows a report that was written by hand."""
    page = (ROOT / "docs/scaling.md").read_text(encoding="utf-8")
    path = tmp_path / "vgg16.json"
    path.write_text(page.partition("```json\n")[2].partition("```")[0])
    machine = ["--gpus-per-node=8", "--intra=12", "--inter=2.5", "--hop=5.7", "--memory=0.9", "--copies=6"]
    assert main(["--from", str(path), "--gpus", "2,16", *machine]) == 0
    printed = capsys.readouterr().out
    assert "553.4 MB of float32 gradients" in printed, "VGG16"
    assert "12 GB/s and 5.7 us per hop in a node" in printed and "6 more passes over the gradients at 0.9 TB" in printed
    two, sixteen = (row for row in printed.partition("strong")[0].splitlines() if row.split()[:1] in (["2"], ["16"]))
    assert two.endswith("compute") and sixteen.endswith("unknown: the model does not apply")


def test_a_report_of_many_ranks_is_refused(report, capsys):
    assert main(["--from", str(report(world_size=8))]) == 3
    assert "a forecast needs images/s of training on one GPU" in capsys.readouterr().err


def test_unknown_settings_of_an_earlier_version_are_ignored_and_bad_values_refused(report, capsys):
    path = report(fast=1000.0)
    content = json.loads(path.read_text())
    content["results"]["configs"]["fast"]["learning_speed"] = 0.1
    path.write_text(json.dumps(content))
    assert main(["--from", str(path), "--gpus", "8"]) == 0
    content["results"]["configs"]["fast"]["batch_size"] = -1
    path.write_text(json.dumps(content))
    assert main(["--from", str(path), "--gpus", "8"]) == 3
    assert "the configuration of fast does not fit this version: batch_size" in capsys.readouterr().err


def test_a_loaders_rate_is_not_a_training_step(report, capsys):
    path = report()
    content = json.loads(path.read_text())
    content |= {"bench": "loaders", "results": {"device": {"images_per_sec": {"median": 9e4}}}}
    path.write_text(json.dumps(content))
    assert main(["--from", str(path)]) == 3
    assert "this report has none" in capsys.readouterr().err
    content["results"]["device"]["training_images_per_sec"] = {"median": 1e3}
    content["config"]["batch_size"] = 100
    path.write_text(json.dumps(content))
    assert main(["--from", str(path)]) == 0
    assert "measured: device, 1,000 images/s" in capsys.readouterr().out


def test_layer_costs_are_for_the_size_of_the_datasets_images(tiny):
    imagenet = tiny(dataset="imagenet", num_classes=1000, model="resnet50", stem="imagenet", image_size=None)
    assert layer_costs(imagenet) == layer_costs("resnet50-imagenet")


def test_help_does_not_wait_for_torch():
    code = (
        "import sys; from tools.predict_scaling import parser; parser().format_help(); sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == 0


@pytest.mark.parametrize("path", sorted((ROOT / "results").glob("*/ladder*.json")), ids=lambda path: path.name)
def test_reports_of_earlier_versions_can_be_read(path, capsys):
    assert main(["--from", str(path), "--gpus", "8"]) == 0
    assert "efficiency" in capsys.readouterr().out
