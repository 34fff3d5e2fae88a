"""The fake CUDA runtime itself: its arithmetic, counts and violations."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import ROOT
from tests.fake_cuda.build import Unavailable, build, variables
from tests.processes import make_command

PROGRAM = """
import json, sys, time
import torch
from torch import nn
from tests.fake_cuda import arithmetic, runtime

arithmetic.start()
seen = {}

def attempt(name, action):
    runtime.take_violations()
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            action()
        outcome = "captured"
    except Exception as error:
        outcome = str(error).splitlines()[0]
    seen[name] = [outcome, runtime.take_violations()]
    return graph

device, other = torch.device("cuda"), torch.cuda.Stream()
total, one = torch.zeros(4, device=device), torch.ones(4, device=device)

def escape():
    other.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(other):
        total.add_(one)

graph = attempt("legal", lambda: total.add_(one))
after_capture = total.tolist()
for _ in range(3):
    graph.replay()
seen["sums"] = [after_capture, total.tolist()]
attempt("wait", lambda: total.sum().item())
attempt("unjoined", escape)

def train(where):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(),
                          nn.Linear(8, 4)).to(where, memory_format=torch.channels_last)
    images = torch.randn(4, 3, 8, 8).to(where).contiguous(memory_format=torch.channels_last)
    nn.functional.cross_entropy(model(images), torch.arange(4, device=where)).backward()
    return [parameter.grad.cpu() for parameter in model.parameters()]

with runtime.record() as ledger:
    gradients = train("cuda")
seen["equal"] = all(torch.allclose(a, b, atol=1e-6) for a, b in zip(gradients, train("cpu")))
seen["convolutions"] = sum("convolution" in work.name for work in ledger.kernels)
seen["waits"] = len(ledger.waits)
seen["printed"] = str(torch.arange(3, device=device) / 2 + 0.25)
seen["to device"] = ledger.bytes_copied("to device")
print(json.dumps(seen))
sys.stdout.flush()
time.sleep(0.5)  # let autograd's threads finish, else they may abort while Python exits
"""


@pytest.fixture(scope="module")
def on_fake_cuda(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., str]:
    """on_fake_cuda(program, *arguments, PYTHONPATH=...): the output of a Python program run on it."""
    folder = tmp_path_factory.mktemp("fake_cuda")
    try:
        build(folder)
    except Unavailable as reason:
        pytest.skip(f"the fake CUDA runtime cannot be built: {reason}")

    def run(program: str, *arguments: str, **environment: str) -> str:
        done = subprocess.run(
            [sys.executable, "-c", program, *arguments], cwd=ROOT, env=os.environ | variables(folder) | environment,
            capture_output=True, text=True, timeout=120, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        return done.stdout

    return run


@pytest.fixture(scope="module")
def seen(on_fake_cuda: Callable[..., str]) -> dict[str, Any]:
    return json.loads(on_fake_cuda(PROGRAM, PYTHONPATH=str(ROOT)))


def test_a_capture_computes_nothing_and_each_replay_computes(seen: dict[str, Any]) -> None:
    assert seen["legal"] == ["captured", []]
    assert seen["sums"] == [[0.0] * 4, [3.0] * 4]


@pytest.mark.parametrize(
    ("name", "violation"), [("wait", "cudaStreamQuery during a capture"), ("unjoined", "unjoined work")]
)
def test_illegal_calls_in_a_capture_fail_and_are_recorded(seen: dict[str, Any], name: str, violation: str) -> None:
    outcome, violations = seen[name]
    assert outcome != "captured"
    assert any(violation in line for line in violations), violations


def test_results_equal_the_cpus(seen: dict[str, Any]) -> None:
    assert seen["equal"]
    assert seen["printed"] == "tensor([0.2500, 0.7500, 1.2500])"


def test_work_is_recorded(seen: dict[str, Any]) -> None:
    assert seen["convolutions"] == 2  # forward, and backward of the weights
    weights = 8 * 3 * 9 + 3 * 8 + 8 + 4 * 8 + 4  # convolution, BatchNorm, biases, linear layer
    assert seen["to device"] >= 4 * (weights + 4 * 3 * 64)
    assert seen["waits"] >= 1  # the gradients are read by the host


@pytest.mark.parametrize(("words", "total"), [([], "3.0"), (["-m", "tools.bench"], "0.0")])
def test_sitecustomize_starts_the_arithmetic_except_in_benches(
    on_fake_cuda: Callable[..., str], words: list[str], total: str
) -> None:
    path = f"{ROOT / 'tests/fake_cuda/site'}:{ROOT}"
    program = "import torch; print(torch.ones(3, device='cuda').sum().item())"
    assert on_fake_cuda(program, *words, PYTHONPATH=path).strip() == total


def test_a_build_failure_names_what_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def without(name: str) -> Callable[[str], str | None]:
        return lambda command: None if command == name else f"/usr/bin/{command}"

    for name, reason in (("g++", "no g\\+\\+"), ("nm", "no nm")):
        monkeypatch.setattr("tests.fake_cuda.build.shutil.which", without(name))
        with pytest.raises(Unavailable, match=reason):
            build(tmp_path)


@pytest.mark.parametrize(("compiler", "status"), [(None, 77), ("echo 'error: a bad source' >&2; exit 1", 1)])
def test_only_a_missing_compiler_gives_status_77(tmp_path: Path, compiler: str | None, status: int) -> None:
    for command in ("bash", "dirname", "mktemp", "rm", "nm"):
        (tmp_path / command).symlink_to(shutil.which(command) or pytest.skip(f"no {command}"))
    if compiler is not None:
        make_command(tmp_path, "g++", compiler)
    done = subprocess.run(
        ["bash", str(ROOT / "tests/fake_cuda/with.sh"), "true"], env={"PATH": str(tmp_path), "PYTHON": sys.executable},
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    if "no package nvidia" in done.stderr or "not a CUDA build" in done.stderr:
        pytest.skip(done.stderr)
    assert done.returncode == status, done.stderr
    assert ("no g++" if compiler is None else "a bad source") in done.stderr
