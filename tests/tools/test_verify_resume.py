"""tools.verify_resume: finds differences, ends hanging runs, and passes real runs that are killed."""

import json
import random
import re
import shutil

import pytest
import torch

from tests.conftest import ROOT, TINY, as_options
from tools import verify_resume
from tools.verify_resume import RunCommand, compare, main, train_and_kill
from train import Trainer
from utils.errors import ExpectedError
from utils.files import write_atomically
from utils.run.checkpoint import encode, newest_good, read_checkpoint, save_checkpoint

SETTINGS = TINY | {"limit_train_batches": 16, "max_epochs": 3, "checkpoint_every_steps": 5, "deterministic": True}
ARGUMENTS = ["--config=default", *as_options(SETTINGS)]
QUICK = ["--set=limit_train_batches=6", "--set=max_epochs=2", "--set=checkpoint_every_steps=1"]


@pytest.fixture
def two_runs(tiny, one_rank, tmp_path):
    """Folders of a finished run and of its copy."""
    Trainer(tiny(max_epochs=1), one_rank, tmp_path / "uninterrupted", "tiny", "auto").train()
    shutil.copytree(tmp_path / "uninterrupted", tmp_path / "killed")
    return tmp_path / "uninterrupted", tmp_path / "killed"


def change_metrics(folder, change):
    path = folder / "metrics.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    path.write_text("".join(json.dumps(row) + "\n" for row in change(rows)))


def test_comparison_finds_each_difference(two_runs):
    uninterrupted, killed = two_runs
    change_metrics(killed, lambda rows: [row | {"seconds": 1.5, "clock_seconds": {"train": 1.5}} for row in rows])
    assert compare(uninterrupted, killed) == []

    change_metrics(
        killed, lambda rows: [rows[0], rows[1] | {"learning_rate": rows[1]["learning_rate"] * (1 + 1e-15)}, *rows[2:]]
    )
    found = compare(uninterrupted, killed)
    assert [line.split(":")[0] for line in found] == ["metrics.jsonl.0.learning_rate"]
    shutil.copy(uninterrupted / "metrics.jsonl", killed)

    change_metrics(killed, lambda rows: rows[:-1])
    assert all(re.match(r"metrics\.jsonl\.\d+\..* None killed", line) for line in compare(uninterrupted, killed))
    shutil.copy(uninterrupted / "metrics.jsonl", killed)

    _, state, _ = newest_good(killed / "checkpoints")
    for changed in (state["model"]["fc.weight"], state["optimizer"]["state"][0]["momentum_buffer"]):
        changed.view(-1).view(torch.int32)[0] ^= 1  # the last bit
    save_checkpoint(killed / "checkpoints", state, 2, is_best=False)
    found = [line.split(":")[0] for line in compare(uninterrupted, killed)]
    assert found == ["model.fc.weight", "optimizer.state.0.momentum_buffer"]
    shutil.copytree(uninterrupted, killed, dirs_exist_ok=True)

    best = read_checkpoint(killed / "checkpoints/best.pt")
    best["model"]["fc.bias"][3] += 1e-6
    write_atomically(killed / "checkpoints/best.pt", encode(best))
    assert [line.split(":")[0] for line in compare(uninterrupted, killed)] == ["model of best.pt.fc.bias"]


@pytest.fixture
def scripted(tmp_path, monkeypatch):
    """scripted(TEXT) makes this the train.py under test."""
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(verify_resume, "TRAIN", tmp_path / "train.py")
    return (tmp_path / "train.py").write_text


def test_a_run_that_hangs_is_ended_and_reported(tmp_path, scripted, capsys):
    scripted(
        "import signal, time\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\nprint('going', flush=True)\n"
        "time.sleep(600)\n"
    )
    assert main([*ARGUMENTS, "--timeout=2", "--seed=5", f"--work-dir={tmp_path}"]) == 1
    out = capsys.readouterr().out
    assert "verdict: NOT EQUAL" in out and "may hang; its output ends:\ngoing" in out and out.count("--seed") == 1
    (work,) = tmp_path.glob("verify-resume-*")
    assert verify_resume.find_processes(work / "uninterrupted") == []


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


def test_a_start_that_does_not_resume_is_detected(tiny, one_rank, tmp_path, scripted):
    Trainer(tiny(max_epochs=1), one_rank, tmp_path / "run", "tiny", "auto").train()
    job = RunCommand([*ARGUMENTS, *QUICK], nproc=1, timeout=120)
    scripted(FORGETFUL)
    with pytest.raises(ExpectedError, match="a start did not resume from its good checkpoint"):
        train_and_kill(job, tmp_path / "run", None, random.Random(0))


def test_a_configuration_error_is_reported_before_anything_starts(monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    assert main(["--config=default", "--set=no_such_key=1"]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("error: ") and "no_such_key" in err


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(("nproc", "kills"), [(1, 5), (2, 2)])
def test_killed_runs_equal_the_uninterrupted_one(nproc, kills, tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(ROOT)
    status = main([*ARGUMENTS, f"--nproc={nproc}", f"--kills={kills}", f"--work-dir={tmp_path}", "--seed=1"])
    out = capfd.readouterr().out
    assert status == 0 and "verdict: EQUAL" in out and f"{kills} kills over" in out, out
    assert list(tmp_path.iterdir()) == []
    assert kills < 5 or re.search(r"; [1-9]\d* starts resumed from a checkpoint$", out, re.MULTILINE), out
