"""tools.verify_resume: finds differences, ends hanging runs, and passes real runs that are killed."""

import json
import random
import re
from unittest.mock import Mock

import pytest
import torch

from tests.conftest import ROOT, TINY, as_options
from tools import verify_resume
from tools.verify_resume import RunCommand, compare, main, train_and_kill, verify
from utils.errors import ExpectedError
from utils.files import write_atomically
from utils.run.checkpoint import encode, newest_good, read_checkpoint, save_checkpoint

SETTINGS = TINY | {"limit_train_batches": 16, "max_epochs": 3, "checkpoint_every_steps": 5, "deterministic": True}
ARGUMENTS = ["--config=default", *as_options(SETTINGS)]
QUICK = ["--set=limit_train_batches=6", "--set=max_epochs=2", "--set=checkpoint_every_steps=1"]


def last_bits(folder, rows):
    _, state, _ = newest_good(folder / "checkpoints")
    for changed in (state["model"]["fc.weight"], state["optimizer"]["state"][0]["momentum_buffer"]):
        changed.view(-1).view(torch.int32)[0] ^= 1
    state["ranks"][0]["of_this_rank"] = 1
    save_checkpoint(folder / "checkpoints", state, 2, is_best=False)


def other_best(folder, rows):
    best = read_checkpoint(folder / "checkpoints/best.pt") | {"average": {"decay": 0.5}}
    best["model"]["fc.bias"][3] += 1e-6
    write_atomically(folder / "checkpoints/best.pt", encode(best))


@pytest.mark.parametrize(("change", "places"), [
    (lambda _, rows: [row.update(seconds=1.5, clock_seconds={"train": 1.5}) for row in rows], set()),
    (lambda _, rows: rows[1].update(learning_rate=rows[1]["learning_rate"] + 1e-15), {"metrics.jsonl.0.learning_rate"}),
    (last_bits, {"model.fc.weight", "optimizer.state.0.momentum_buffer", "ranks.0.of_this_rank"}),
    (other_best, {"model of best.pt.fc.bias", "average of best.pt.decay"}),
    (lambda _, rows: rows.pop(), {"metrics.jsonl"})])  # fmt: skip
def test_comparison_finds_each_difference(change, places, finished, folder):
    metrics = folder / "metrics.jsonl"
    rows = [json.loads(line) for line in metrics.read_text().splitlines()]
    change(folder, rows)
    metrics.write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = {line.split(":")[0] for line in compare(finished, folder)}
    assert found == places or {re.sub(r"\.\d+\..*", "", place) for place in found} == places


@pytest.fixture
def scripted(tmp_path, monkeypatch):
    """scripted(TEXT) makes this the train.py under test."""
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(verify_resume, "TRAIN", tmp_path / "train.py")
    return (tmp_path / "train.py").write_text


def test_a_run_that_hangs_is_ended_and_reported(tmp_path, scripted, capsys, monkeypatch):
    ignore = "import signal, time\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
    scripted(f"{ignore}print('going', flush=True)\ntime.sleep(600)\n")
    assert main([*ARGUMENTS, "--timeout=2", "--seed=5", f"--work-dir={tmp_path / 'new'}"]) == 1
    out = capsys.readouterr().out
    assert "verdict: NOT EQUAL" in out and "may hang; its output ends:\ngoing" in out and out.count("--seed=5") == 1
    (work,) = tmp_path.glob("new/verify-resume-*")
    assert verify_resume.find_processes(work / "uninterrupted") == []
    monkeypatch.setattr(verify_resume, "verify", equal := Mock(return_value=[]))
    assert main(["--config=quickstart", f"--work-dir={tmp_path}"]) == 0
    assert "--set=deterministic=true" in equal.call_args.args[0].train_arguments


# train.py that never finds its checkpoints: every start begins from scratch, and all end equal
FORGETFUL = f"""
import sys
sys.path.insert(0, {str(ROOT)!r})
import train
from utils.run import checkpoint
from utils.config.command_line import parse_arguments
checkpoint.newest_good = lambda folder: (None, None, [])
sys.exit(train.main(parse_arguments()))
"""


def test_a_start_that_does_not_resume_is_detected(folder, scripted):
    job = RunCommand([*ARGUMENTS, *QUICK], nproc=1, timeout=120)
    scripted(FORGETFUL)
    with pytest.raises(ExpectedError, match="a start did not resume from its good checkpoint"):
        train_and_kill(job, folder, (), random.Random(0))
    folder.with_name(f"{folder.name}.status").write_text("3")  # of the start before
    scripted("")
    assert train_and_kill(job, folder, (), random.Random(0)) == ""
    scripted("import time; time.sleep(600)")
    assert train_and_kill(job, folder.with_name("new"), (0.0, 0.0, 0.0), random.Random(0)) == "while starting"
    scripted("raise SystemExit(3)")
    with pytest.raises(ExpectedError, match="a start ended with status 3"):
        train_and_kill(job, folder, (), random.Random(0))


def test_a_run_is_killed_eight_times_at_most_and_a_difference_is_returned(tmp_path, monkeypatch):
    (tmp_path / "uninterrupted").mkdir()
    (tmp_path / "uninterrupted/metrics.jsonl").write_text('{"kind": "end", "seconds": 9}\n')
    monkeypatch.setattr(verify_resume, "train_and_kill", start := Mock(side_effect=lambda *a: a[2] and "in training"))
    monkeypatch.setattr(verify_resume, "compare", compared := Mock(side_effect=[[], ["lr"]]))
    monkeypatch.setattr(verify_resume.shutil, "rmtree", Mock())
    assert verify(RunCommand([], 1, 9.0), 10, random.Random(0), tmp_path) == ["lr"]
    started = [call.args[1].name for call in start.call_args_list]
    assert started == ["uninterrupted", *9 * ["killed-1"], *3 * ["killed-2"]]
    assert compared.call_args.args == (tmp_path / "uninterrupted", tmp_path / "killed-2")
    start.side_effect, compared.side_effect = ["", "while starting", ""], [[]]
    with pytest.raises(ExpectedError, match="no start resumed"):
        verify(RunCommand([], 1, 9.0), 1, random.Random(0), tmp_path)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(("nproc", "kills"), [(1, 5), (2, 2)])
def test_killed_runs_equal_the_uninterrupted_one(nproc, kills, tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(ROOT)
    status = main([*ARGUMENTS, f"--nproc={nproc}", f"--kills={kills}", f"--work-dir={tmp_path}", "--seed=7"])
    assert (status, list(tmp_path.iterdir())) == (0, []) and f"{kills} kills over" in capfd.readouterr().out
