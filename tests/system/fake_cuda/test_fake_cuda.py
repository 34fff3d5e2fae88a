"""The fake CUDA runtime itself: its arithmetic, counts and violations."""

import json
import os
import shutil
import subprocess
import sys

import pytest

from tests.conftest import ROOT
from tests.processes import make_command
from tests.system.fake_cuda.build import Unavailable, build, variables

PROGRAM = """
import json, os
import torch
from torch import nn
from tests.system.fake_cuda import arithmetic, runtime

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
print(json.dumps(seen), flush=True)
os._exit(0)  # autograd's threads may abort while Python exits
"""


@pytest.fixture(scope="module")
def on_fake_cuda(tmp_path_factory):
    """on_fake_cuda(program, *arguments, PYTHONPATH=...): the output of a Python program run on it."""
    folder = tmp_path_factory.mktemp("fake_cuda")
    try:
        build(folder)
    except Unavailable as reason:
        pytest.skip(f"the fake CUDA runtime cannot be built: {reason}")

    def run(program, *arguments, **environment):
        command, variables_here = [sys.executable, "-c", program, *arguments], os.environ | variables(folder)
        how = {"cwd": ROOT, "env": variables_here | environment, "stdout": subprocess.PIPE, "text": True}
        return subprocess.run(command, timeout=120, check=True, **how).stdout

    return run


@pytest.mark.slow
def test_captures_results_and_the_record(on_fake_cuda):
    """A capture computes nothing and each replay computes; illegal calls in a capture fail and are recorded."""
    seen = json.loads(on_fake_cuda(PROGRAM, PYTHONPATH=str(ROOT)))
    assert seen["legal"] == ["captured", []]
    assert seen["sums"] == [[0.0] * 4, [3.0] * 4]
    for name, violation in (("wait", "cudaStreamQuery during a capture"), ("unjoined", "unjoined work")):
        outcome, violations = seen[name]
        assert outcome != "captured" and any(violation in line for line in violations), violations
    assert seen["equal"]
    assert seen["printed"] == "tensor([0.2500, 0.7500, 1.2500])"
    assert seen["convolutions"] == 2  # forward, and backward of the weights
    weights = 8 * 3 * 9 + 3 * 8 + 8 + 4 * 8 + 4  # convolution, BatchNorm, biases, linear layer
    assert seen["to device"] >= 4 * (weights + 4 * 3 * 64)
    assert seen["waits"] >= 1  # the gradients are read by the host


@pytest.mark.slow
@pytest.mark.parametrize(("words", "total"), [([], "3.0"), (["-m", "tools.bench"], "0.0")])
def test_sitecustomize_starts_the_arithmetic_except_in_benches(on_fake_cuda, words, total):
    path = f"{ROOT / 'tests/system/fake_cuda/site'}:{ROOT}"
    program = "import torch; print(torch.ones(3, device='cuda').sum().item())"
    assert on_fake_cuda(program, *words, PYTHONPATH=path).strip() == total


@pytest.mark.parametrize(("compiler", "status"), [(None, 77), ("echo 'error: a bad source' >&2; exit 1", 1)])
def test_only_a_missing_compiler_gives_status_77(tmp_path, compiler, status):
    for command in ("bash", "dirname", "mktemp", "rm", "nm"):
        (tmp_path / command).symlink_to(shutil.which(command) or pytest.skip(f"no {command}"))
    if compiler is not None:
        make_command(tmp_path, "g++", compiler)
    command, how = ["bash", ROOT / "tests/system/fake_cuda/with.sh", "true"], {"stderr": subprocess.PIPE, "text": True}
    environment = {"PATH": str(tmp_path), "PYTHON": sys.executable}
    done = subprocess.run(command, env=environment, timeout=120, check=False, **how)
    if "no package nvidia" in done.stderr or "not a CUDA build" in done.stderr:
        pytest.skip(done.stderr)
    assert done.returncode == status, done.stderr
    assert ("no g++" if compiler is None else "a bad source") in done.stderr
