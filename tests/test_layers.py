"""tools.bench layers: what a network is found to compute, its passes apart and in every way, and the tables."""

import json
import math
import os
import weakref
from collections import Counter
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torchvision.models.resnet import Bottleneck

from tools.bench import layer_parts, layers
from tools.bench.__main__ import main
from tools.bench.common import Sample
from tools.bench.layer_parts import Case, Row, Work, build_passes, measure_operation
from tools.bench.layer_summary import MEMORY, REST, STEP, UPDATE, summarise
from tools.bench.layer_ways import BY_WEIGHT, FORWARD, Machine, Way
from tools.bench.onednn import Kernel, kernels_of, name_kernels, read_verbose
from tools.bench.operations import ADDITION, CONVOLUTION, FUSED, LINEAR, NORM, POOLING, RELU, Operation, hear
from tools.bench.training import build_measured
from utils.config import Config
from utils.distributed.world import World
from utils.training import conv_products
from utils.training.compilers import has_compiler
from utils.training.precision import choose_precision
from utils.training.step import on_capture_stream

CPU = torch.device("cpu")


class Mixed(nn.Module):
    """One of each kind: convolutions 1x1, 3x3, with strides, groups and bias; a shortcut; pools; a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        shortcut = nn.Sequential(nn.Conv2d(8, 16, 1, 2, bias=False), nn.BatchNorm2d(16))
        block = Bottleneck(8, 4, stride=2, downsample=shortcut)
        self.body = nn.Sequential(
            nn.Conv2d(3, 8, 5, padding=2), nn.MaxPool2d(2), block, nn.Conv2d(16, 8, 3, padding=1, groups=2),
            nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(),
        )  # fmt: skip
        self.fc = nn.Linear(8, 10)

    def forward(self, images: Tensor) -> Tensor:
        return self.fc(self.body(images))


def listen(config: Config, model: nn.Module, batch: int = 16) -> list[Operation]:
    learner: Any = SimpleNamespace(model=model.train(), precision=choose_precision(config, CPU))
    return hear(learner, torch.zeros(batch, 3, 32, 32))


def heard_in(config: Config) -> list[Operation]:
    return hear(build_measured(config, World(0, 0, 1, CPU)), torch.zeros(2, 3, 32, 32))


def counts(config: Config) -> Counter[str]:
    found: Counter[str] = Counter()
    for operation in heard_in(config):
        found[f"{operation.kind} of backward" if operation.of_backward else operation.kind] += operation.count
    return found


def test_a_network_is_heard_whole_whatever_it_is(tiny) -> None:
    """ResNet50 has 53 convolutions, and 16 blocks, each with an addition and with a feature map used twice."""
    resnet50 = {CONVOLUTION: 53, NORM: 53, RELU: 49, ADDITION: 16, f"{ADDITION} of backward": 16, POOLING: 1, LINEAR: 1}
    assert counts(tiny(model="resnet50")) == resnet50
    fused = tiny(model="resnet50", fuse_norm_relu=True, enable_nhwc=True)
    assert counts(fused) == {name: count for name, count in resnet50.items() if name not in (RELU, ADDITION)} | {
        NORM: 4, FUSED: 49,
    }  # fmt: skip
    assert counts(tiny(model="resnet9")) == {
        CONVOLUTION: 8, NORM: 8, RELU: 8, ADDITION: 2, f"{ADDITION} of backward": 2, POOLING: 4, LINEAR: 1,
    }  # fmt: skip
    assert counts(tiny(model="vgg16"))[CONVOLUTION] == 13
    with_silu = heard_in(tiny(model="airbench96", fuse_norm_relu=True, enable_nhwc=True))
    assert sum(one.count for one in with_silu if one.name.startswith("BatchNorm and SiLU, ")) == 8


def results_of(operation: Operation, way: Way) -> dict[str, list[Tensor]]:
    with way.backend():
        passes = build_passes(operation, way, CPU)
        found = {which: part.action() for which, part in passes.items() if way.only in ("", which)}
    results = {which: [result] if isinstance(result, Tensor) else result for which, result in found.items()}
    return {which: [tensor.detach() for tensor in tensors] for which, tensors in results.items()}


def test_the_passes_are_those_of_autograd_over_the_whole_layer(tiny) -> None:
    config = tiny(enable_nhwc=True)
    operations = listen(config, Mixed())
    assert {operation.kind for operation in operations} == {CONVOLUTION, NORM, RELU, ADDITION, POOLING, LINEAR}
    first = operations[0]
    assert set(build_passes(first, Machine(config, CPU).own_way(first), CPU)) == {FORWARD, "by weight"}, "of images"
    for operation in operations:
        if operation.of_backward:
            continue
        way = Machine(config, CPU).own_way(operation)
        found = results_of(operation, way)
        made = layer_parts._Made(operation, way, CPU)
        leaves = [tensor for tensor in (*made.features, *made.weights) if tensor.requires_grad]
        output = operation.function(
            *(value.clone() if isinstance(value, Tensor) else value for value in made.arguments), **made.keywords
        )
        if operation.kind != ADDITION:
            output.backward(made.draw(tuple(output.shape)))
            apart = [gradient for which, results in found.items() if which != FORWARD for gradient in results]
            assert len(apart) == len(leaves) > 0
            for gradient, leaf in zip(apart, leaves, strict=True):
                torch.testing.assert_close(gradient, leaf.grad, rtol=1e-4, atol=1e-3)
        if operation.kind != RELU:  # done in place
            torch.testing.assert_close(results_of(operation, way)[FORWARD][0], output.detach())


def test_every_way_computes_the_same(tiny, monkeypatch) -> None:
    """Layouts, bf16, products in place of 1x1 convolutions, and what oneDNN leaves to NNPACK."""
    config = tiny()
    monkeypatch.setattr("tools.bench.layer_ways.has_bf16_kernels", lambda: True)
    machine = Machine(config, CPU)
    kinds = set()
    for operation in listen(config, Mixed()):
        own, *others = machine.ways(operation)
        assert own.name == ("float32" if operation.kind == LINEAR else "float32 NCHW")
        expected = results_of(operation, own)
        for way in others:
            kinds.add(way.name)
            rounding = 1e-4 if way.dtype == torch.float32 else 0.02  # of the largest number, in sums of many
            found = results_of(operation, way)
            if operation.name.startswith("max_pool2d") and way.dtype == torch.bfloat16:
                del found["backward"]  # of equal numbers another one may be the largest
            for which, results in found.items():
                for result, other in zip(results, expected[which], strict=True):
                    assert result.shape == other.shape
                    torch.testing.assert_close(result.float(), other, rtol=0, atol=rounding * other.abs().max().item())
    layouts = {"float32 NHWC", "bf16 NCHW", "bf16 NHWC", "bf16"}
    nnpack = {"NNPACK's Winograd", "NNPACK"} if torch.backends.nnpack.is_available() else set()
    products = {
        "float32 product",
        "bf16 product",
        "float32 NHWC, weights by products",
        "bf16 NHWC, weights by products",
    }
    assert kinds == layouts | products | nnpack


def check_own_way(config: Config, name: str, kernel: str) -> tuple[Operation, Way]:
    """An operation that the network computes by a kernel of this project, and that way. oneDNN's is another way, as is
    each in bf16, and all agree."""
    (operation,) = (one for one in heard_in(config) if one.name == name)
    own, *others = Machine(config, CPU).ways(operation)
    names = [way.name for way in others]
    assert own.name == f"float32 NHWC, {kernel}" and {"float32 NHWC", f"bf16 NHWC, {kernel}"} <= set(names)
    expected = results_of(operation, own)
    for way in others:
        rounding = 1e-4 if way.dtype == torch.float32 else 0.1  # of a few numbers where a tile's are many times larger
        for which, (result, *_) in results_of(operation, way).items():
            scale = expected[which][0].abs().max().item()
            assert result.dtype == way.dtype
            torch.testing.assert_close(result.float(), expected[which][0], rtol=0, atol=rounding * scale)
    return operation, own


def test_products_for_weights_are_a_way_of_their_own_and_plain_ones_beside_them(tiny, monkeypatch) -> None:
    """Heard as one convolution each; in a network that computes them so, oneDNN's are the other way."""
    monkeypatch.setattr("tools.bench.layer_ways.has_bf16_kernels", lambda: True)
    on = tiny(model="resnet9", width=4, enable_nhwc=True, conv_weight_products=True)
    assert counts(on) == counts(tiny(model="resnet9", width=4))
    operation, own = check_own_way(on, "convolution 3x3, 128x16x16 to 256", "weights by products")
    called = []
    gradient = conv_products.weight_gradient
    monkeypatch.setattr(conv_products, "weight_gradient", lambda *known: called.append(known) or gradient(*known))
    passes = build_passes(operation, own, CPU)
    passes["by input"].action()
    assert not called, "the other gradient is no part of this pass"
    passes[BY_WEIGHT].action()
    assert len(called) == 1
    plain = next(one for one in listen(tiny(), Mixed()) if one.name == "convolution 5x5, 3x32x32 to 8")
    (way,) = (way for way in Machine(tiny(), CPU).ways(plain) if way.name == "float32 NHWC, weights by products")
    assert way.only == BY_WEIGHT


def test_winograds_method_is_a_way_of_its_own(tiny, monkeypatch) -> None:
    """For 3x3 convolutions of many channels; in a network that computes them so, oneDNN's are the other way."""
    if not has_compiler():
        pytest.skip("no C++ compiler")
    monkeypatch.setattr("tools.bench.layer_ways.has_bf16_kernels", lambda: True)
    on = tiny(model="resnet9", width=2, enable_nhwc=True, conv_winograd=True)
    assert counts(on) == counts(tiny(model="resnet9", width=2))
    operation, _ = check_own_way(on, "convolution 3x3, 32x32x32 to 64", "Winograd")
    pooled = [one.name for one in heard_in(on) if "pool" in one.name]
    assert pooled == [f"max_pool2d 2, {sizes}" for sizes in ("64x32x32", "128x16x16", "256x8x8")]
    (plain,) = (one for one in heard_in(tiny(model="resnet9", width=2)) if one.name == operation.name)
    assert "float32 NHWC, Winograd" in [way.name for way in Machine(tiny(), CPU).ways(plain)]
    first = heard_in(on)[0]
    assert not any("Winograd" in way.name for way in Machine(on, CPU).ways(first) if "NNPACK" not in way.name)


def test_formats_are_those_that_the_machine_has_kernels_for(tiny, monkeypatch) -> None:
    monkeypatch.setattr("tools.bench.layer_ways.has_bf16_kernels", lambda: False)
    assert Machine(tiny(), CPU).dtypes == [torch.float32]
    assert Machine(tiny(enable_amp=True, amp_dtype="bf16"), CPU).dtypes == [torch.float32, torch.bfloat16]


def test_frozen_layers_have_rates_and_no_gradient_of_weights(tiny) -> None:
    model = Mixed()
    for module in model.modules():
        if isinstance(module, nn.Conv2d | nn.Linear):
            module.requires_grad_(False)
    machine = Machine(tiny(), CPU)
    for operation in listen(tiny(), model):
        passes = build_passes(operation, machine.own_way(operation), CPU)
        assert BY_WEIGHT not in passes
        assert (passes[FORWARD].work.flops > 0) == (operation.kind in (CONVOLUTION, LINEAR)) or operation.of_backward


def test_a_way_that_is_slow_or_refused_is_left_out(tiny, monkeypatch, capsys) -> None:
    monkeypatch.setattr("tools.bench.layer_ways.has_bf16_kernels", lambda: False)
    operation = next(operation for operation in listen(tiny(), Mixed()) if operation.kind == NORM)
    machine = Machine(tiny(), CPU)

    def refuse(*_: Any, **__: Any) -> Tensor:
        raise RuntimeError("no such kernel\nand more words")

    ways = machine.ways(operation)
    monkeypatch.setattr(machine, "ways", lambda _: [*ways, Way("other", torch.float32, True, function=refuse)])
    monkeypatch.setattr(layer_parts, "TOO_SLOW", math.inf)
    for row in measure_operation(operation, machine, trials=1):
        assert set(row.milliseconds) == {"float32 NCHW", "float32 NHWC"}
    assert capsys.readouterr().err == f"{operation.name}, other: left out: no such kernel\n"
    monkeypatch.setattr(layer_parts, "TOO_SLOW", 0)
    for row in measure_operation(operation, machine, trials=1):
        assert list(row.milliseconds) == [row.own] == [row.best] == ["float32 NCHW"]
    monkeypatch.setattr(machine, "ways", lambda _: [Way("own", torch.float32, True, function=refuse)])
    with pytest.raises(RuntimeError):
        measure_operation(operation, machine, trials=1)


VERBOSE = """onednn_verbose,v1,info,cpu,isa:Intel AVX2
onednn_verbose,v1,primitive,info,template:operation,engine,primitive,implementation,prop_kind,exec_time
onednn_verbose,v1,primitive,create:cache_miss,cpu,convolution,ref:any,forward_training,src:f32,,alg:direct,mb1,0.1
onednn_verbose,v1,primitive,exec,cpu,reorder,jit:uni,undef,src:f32::blocked:abcd::f0,,,64x64x3x3,0.09
onednn_verbose,v1,primitive,exec,cpu,convolution,brg_conv_bwd:avx2+brg_conv_fwd:avx2,backward_data,src:f32,,mb32,29.5
some other line
onednn_verbose,primitive,exec,cpu,convolution,ref:any,backward_weights,src:f32,,alg:convolution_direct,mb1,0.1
dnnl_verbose,exec,cpu,convolution,jit:avx2,forward_training,src_f32,,alg:convolution_direct,mb1,0.1
"""


def test_onednns_lines_are_read() -> None:
    """Of oneDNN 3, 2 and 1."""
    kernels = read_verbose(VERBOSE)
    assert [(kernel.purpose, kernel.implementation) for kernel in kernels] == [
        ("reorder", "jit:uni"),
        ("convolution", "brg_conv_bwd:avx2+brg_conv_fwd:avx2"),
        ("convolution", "ref:any"),
        ("convolution", "jit:avx2"),
    ]
    assert [kernel.is_reference for kernel in kernels] == [False, False, True, False]
    assert name_kernels(kernels[:2]) == "brg_conv_bwd:avx2+brg_conv_fwd:avx2" and name_kernels([]) == ""
    assert name_kernels([kernels[0]] * 2 + kernels[3:]) == "jit:avx2, 2 reorders"
    reference = ("simple:any", "ref_int8:any", "jit:avx2+ref:any")
    assert all(Kernel("convolution", name).is_reference for name in reference)
    assert not Kernel("convolution", "gemm:jit").is_reference


@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="PyTorch was built without oneDNN")
def test_onednn_names_the_kernel_of_a_convolution_and_standard_output_stays_clean(capfd) -> None:
    images, weight = torch.zeros(16, 8, 8, 8), torch.zeros(8, 8, 3, 3)
    (kernel,) = (kernel for kernel in kernels_of(lambda: torch.conv2d(images, weight)) if kernel.purpose != "reorder")
    assert kernel.purpose == "convolution" and ":" in kernel.implementation
    torch.conv2d(images, weight)
    os.write(1, b"after\n")
    assert capfd.readouterr().out == "after\n"


def staged_row(operation: Operation, which: str, own: float, best: float) -> Row:
    milliseconds = {"own": Sample((own,)), "best": Sample((best,))}
    return Row(operation, which, milliseconds, dict.fromkeys(milliseconds, Work(2e9, 1e6)), system=0.5)


def test_the_kinds_of_a_step_add_up_to_it(tiny, monkeypatch) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    operations = listen(tiny(), Mixed())
    rows = [staged_row(operation, which, 4.0, 2.0) for operation in operations for which in (FORWARD, "by weight")]
    times = {"step": 500.0, "update": 7.0, "system": 100.0, "faults": 3.0}
    kinds = summarise(rows, {name: Sample((value,)) for name, value in times.items()}, 2, 1e6)
    assert list(kinds)[-4:] == [UPDATE, MEMORY, REST, STEP]
    assert sum(kind.share for name, kind in kinds.items() if name != STEP) == pytest.approx(1)
    parts = 2 * sum(row.operation.count for row in rows)
    assert kinds[MEMORY].milliseconds == (100 - 0.5 * parts) / 2
    assert kinds[STEP].milliseconds == 500 and kinds[STEP].best == pytest.approx(500 - 2 * parts)
    assert kinds["convolution 1x1, forward"].rates() == (0.5, 1.0, "TFLOP/s")
    assert {"convolution 3x3, by weight", "convolution other, forward"} < set(kinds)
    on_gpu = summarise(rows, {name: Sample((times[name],)) for name in ("step", "update")}, 1, 1e6)
    assert MEMORY not in on_gpu


def test_the_command_reports_rows_and_summary(tmp_path: Path, capsys) -> None:
    report = tmp_path / "report.json"
    small = ["dataset=shapes", "num_classes=10", "model=resnet8", "device=cpu", "batch_size=16", "amp_dtype=auto",
             "enable_compile=false", "micro_batch_size=8", "keep_cpu_memory=false"]  # fmt: skip
    assert main(["layers", "--trials=1", f"--json={report}", *(f"--set={setting}" for setting in small)]) == 0
    shown = capsys.readouterr().out
    results = json.loads(report.read_text())["results"]
    for name, row in results["layers"].items():
        assert name.split(", ")[0] in shown
        assert row["best"]["milliseconds"]["median"] <= row["milliseconds"]["median"]
        assert row["best"]["milliseconds"] == row["ways"][row["best"]["way"]] and row["rate"] > 0
        assert row["share"] == pytest.approx(row["at_least"] / row["milliseconds"]["median"])
    summary = results["summary"]
    assert sum(kind["share"] for name, kind in summary.items() if name != STEP) == pytest.approx(1)
    assert summary[STEP]["milliseconds"] == results["step"]["step"]["median"]
    if torch.backends.mkldnn.is_available():
        assert any(row["kernels"] for row in results["layers"].values())


@pytest.mark.gpu
def test_on_a_gpu_rows_are_captured_and_batch_norms_kernels_compared(tiny, capsys) -> None:
    config = tiny("fastest", device="cuda", enable_compile=False, enable_amp=True)  # heard on a CPU
    machine = Machine(config, torch.device("cuda", 0))
    assert machine.graphed
    operations = [operation for operation in listen(config, Mixed()) if operation.kind in (NORM, CONVOLUTION)]
    ((conv, *_), (norm, *_)) = (
        [operation for operation in operations if operation.kind == kind] for kind in (CONVOLUTION, NORM)
    )
    rows = [*measure_operation(conv, machine, trials=1), *measure_operation(norm, machine, trials=1)]
    assert [row.own for row in rows] == ["bf16 NHWC"] * 4
    kernels = {"bf16 NHWC, native", "fp16 NHWC, native", "fp16 NHWC, cuDNN", "fp16 NCHW, cuDNN"}
    assert all(kernels < set(row.milliseconds) for row in rows[2:])
    layers.show_norms(config, rows)
    output = capsys.readouterr()
    assert "left out" not in output.err and "fp16, cuDNN" in output.out


@pytest.mark.gpu
def test_what_a_graph_reads_outlives_its_capture(tiny) -> None:
    machine = Machine(tiny("fastest", device="cuda", enable_compile=False), torch.device("cuda", 0))
    numbers = torch.ones(8 << 20, device="cuda")  # a segment of the allocator's own, which empty_cache gives back
    read = weakref.ref(numbers)
    with on_capture_stream(machine.device, graphed=machine.graphed):
        case = Case(partial(torch.neg, numbers), machine)
        del numbers
        torch.cuda.empty_cache()
        assert read() is not None
        case()


def test_limits_with_layers_is_the_same_command(monkeypatch) -> None:
    calls = []
    monkeypatch.setattr(layers, "run", lambda options: calls.append(vars(options)) or 0)
    assert main(["layers", "--trials=2"]) == main(["limits", "--layers", "--trials=2"]) == 0
    plain, by_limits = calls
    assert by_limits == plain | {"command": "limits", "layers": True}
    with pytest.raises(SystemExit) as leaving:
        main(["layers", "--fastest"])
    assert leaving.value.code == 2


def test_a_network_without_such_operations_is_refused(tmp_path: Path, monkeypatch, capsys) -> None:
    (tmp_path / "strange.py").write_text(
        "import torch\nclass Net(torch.nn.Module):\n    def __init__(self, num_classes):\n        super().__init__()\n"
        "        self.weight = torch.nn.Parameter(torch.zeros(3, num_classes))\n"
        "    def forward(self, images):\n        return images.sum((2, 3)) @ self.weight\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    settings = ["model=strange:Net", "device=cpu", "batch_size=4", "enable_compile=false", "amp_dtype=auto"]
    assert main(["layers", *(f"--set={setting}" for setting in settings)]) == 2
    assert "model strange:Net: calls none of the functions that this bench times: conv2d" in capsys.readouterr().err
