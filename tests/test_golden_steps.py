"""A step of every block has the launches, waits and copies of fake_cuda/golden_steps.txt, on the fake CUDA runtime."""

import os
import subprocess
import sys

import pytest

from tests.conftest import ROOT
from tests.fake_cuda import golden_steps, runtime

GROUPS = [
    pytest.param(group, marks=pytest.mark.slow if group == golden_steps.COMPILED else (), id=group)
    for group in golden_steps.groups()
]
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not runtime.is_active(), reason="counts on the fake CUDA runtime")]


def waits(line):
    return int(line.split()[4])


@pytest.mark.timeout(600)
@pytest.mark.parametrize("group", GROUPS)
def test_counts_of_every_blocks_step_are_as_recorded(group):
    blocks = dict(golden_steps.groups()[group])
    command = [sys.executable, "-m", golden_steps.__name__, group]
    environment = os.environ | {"FAKE_CUDA_DEVICES": "2"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    counted = {line.split()[0]: line for line in done.stdout.splitlines()}
    assert {*counted} == {*blocks}
    # without the fused update, PyTorch's GradScaler waits in each step to learn whether gradients overflowed
    assert {block: waits(line) for block, line in counted.items()} == {
        block: int(golden_steps.scales_loss(config) and not config.extra_opt("fused_optimizer"))
        for block, config in blocks.items()
    }
    versions, recorded = golden_steps.recorded()
    if versions != golden_steps.versions():
        pytest.skip(f"recorded with {versions}, this is {golden_steps.versions()}")
    remedy = "if intended: python -m tests.fake_cuda.golden_steps"
    assert counted == {block: recorded.get(block) for block in blocks}, remedy
