"""deploy/gpu_questions.py on a CPU and, here, without a compiler: it answers what can be answered."""

import importlib
import json
import os
import sys

from tests.conftest import ROOT
from tests.processes import fork

SMALL = ("model=resnet8", "zero_init_residual=false", "batch_size=2", "device=cpu", "enable_amp=false")


def ask(out):
    os.environ["CXX"] = "/no/compiler"
    sys.argv = ["gpu_questions", "step", str(out), "--steps=1", *(f"--set={setting}" for setting in SMALL)]
    sys.path.insert(0, str(ROOT / "deploy"))
    script = importlib.import_module("gpu_questions")
    script.WARM_UP, script.PROFILED = 0, 1
    script.main()


def test_the_step_is_asked_about_every_switch(tmp_path):
    process = fork(ask, tmp_path)
    process.join(100)
    assert process.exitcode == 0
    answers = [json.loads(line) for line in (tmp_path / "answers.jsonl").read_text().splitlines()]
    assert {row["name"] for row in answers if "error" in row} == {"FUSE", "compiled", "compiled, forced layout"}
    rates = {row["name"]: row for row in answers if "ratio" in row}
    assert rates.keys() >= {"base", "STEM", "muon/3", "cudnn_benchmark/3", "winner", "goal", "winner, 16 pixels"}
    assert len(rates["base"]["values"]) == 3 and rates["base"]["plan"]["graphed"] is False
