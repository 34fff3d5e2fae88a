"""The tutorial's smallest variants: each step has one, and (slow) each runs as printed on the page."""

import os
import re
import shlex
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from tests.conftest import ROOT
from tests.processes import PYTHON, without_launcher

PAGES = "".join(
    (ROOT / f"docs/tutorial{end}.md").read_text(encoding="utf-8") for end in ("", "_fastest", "_many_devices")
)
STEP = re.compile(r"^## (\d+)\. (.*?)(?=^## |\Z)", re.MULTILINE | re.DOTALL)
SMALLEST = re.compile(r"<!-- smallest variant -->\n```bash\n(.*?)```", re.DOTALL)
SETTING = re.compile(r'^[A-Z]+=".*"$', re.MULTILINE)
USED = ("train.py", "config", "models", "utils", "tools", "results")  # read-only parts of the project's folder

# Text in each step's output that shows its point
SHOWS = {
    0: "finished",
    1: "Finished: best acc1",
    2: "aten::convolution_backward",
    3: "layout transposes",
    4: "layout transposes",
    5: "optimizer.step",
    6: "bs256-amp-nhwc-extra-opts",
    7: "2 rank(s) x 4 accumulated x 128 images",
    8: "1 rank(s) x 16 accumulated x 128 images",
    9: "Finished: best acc1",
    10: "JUWELS Booster",
}


def smallest_variants() -> dict[int, list[str]]:
    """Return {step: blocks marked as its smallest variant}."""
    return {int(number): SMALLEST.findall(text) for number, text in STEP.findall(PAGES)}


def test_each_step_has_a_cost_and_one_smallest_variant():
    steps = {int(number): text for number, text in STEP.findall(PAGES)}
    assert list(steps) == list(SHOWS)
    assert {step: len(blocks) for step, blocks in smallest_variants().items()} == dict.fromkeys(steps, 1)
    assert [step for step, text in steps.items() if "**Cost**:" not in text.partition("<!--")[0]] == []


def test_smallest_variants_write_different_folders():
    text = "".join(block for blocks in smallest_variants().values() for block in blocks)
    commands = text.replace("\\\n", " ").splitlines()
    training = [shlex.split(line) for line in commands if "train.py" in line and "--dry-run" not in line]
    folders = Counter(words[words.index("--run-dir") + 1] for words in training)
    assert len(training) > 8
    assert set(folders.values()) == {1}, folders


@pytest.mark.slow
@pytest.mark.parametrize("step", SHOWS)
def test_the_smallest_variant_runs_as_printed(step: int, tmp_path: Path):
    [block] = smallest_variants()[step]
    if "tools.report" in block:
        pytest.importorskip("plotly", reason='plotly is missing: pip install ".[report]"')
    for name in USED:
        (tmp_path / name).symlink_to(ROOT / name)
    settings = "\n".join(SETTING.findall(PAGES))
    search = os.pathsep.join([*(str(Path(python).parent) for python in (sys.executable, PYTHON)), os.environ["PATH"]])
    ended = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", f"{settings}\n{block}"],
        cwd=tmp_path, env=without_launcher(os.environ) | {"PATH": search},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stdout[-3000:] + ended.stderr[-3000:]
    assert SHOWS[step] in ended.stdout, ended.stdout
