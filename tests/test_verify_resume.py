"""tools.verify_resume: what it finds different, that it ends, and real runs that are killed."""

import json
import shutil

import pytest

from tests.conftest import ROOT, TINY
from tools import verify_resume
from tools.verify_resume import compare, main
from train import Trainer
from utils.checkpoint import encode, newest_good, read_checkpoint, save_last, write_atomically

SETTINGS = TINY | {"limit_train_batches": 16, "max_epochs": 3, "checkpoint_every_steps": 5, "deterministic": True}
ARGUMENTS = ["--config=default", *(f"--set={key}={json.dumps(value)}" for key, value in SETTINGS.items())]


@pytest.fixture
def two_runs(tiny, alone, tmp_path):
    """Folders of a finished run and of its copy."""
    Trainer(tiny(max_epochs=1), alone).train(tmp_path / "peace", "tiny", "auto")
    shutil.copytree(tmp_path / "peace", tmp_path / "killed")
    return tmp_path / "peace", tmp_path / "killed"


def change_metrics(folder, change):
    path = folder / "metrics.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    path.write_text("".join(json.dumps(row) + "\n" for row in change(rows)))


def test_comparison_finds_each_difference(two_runs):
    peace, killed = two_runs
    change_metrics(killed, lambda rows: [row | {key: 1.5 for key in row if "seconds" in key} for row in rows])
    assert compare(peace, killed) == []

    change_metrics(
        killed, lambda rows: [rows[0] | {"learning_rate": rows[0]["learning_rate"] * (1 + 1e-15)}, *rows[1:]]
    )
    found = compare(peace, killed)
    assert [line.split(":")[0] for line in found] == ["metrics.jsonl[0].learning_rate", "learning rates[0]"]
    shutil.copy(peace / "metrics.jsonl", killed)

    change_metrics(killed, lambda rows: rows[:-1])
    assert [line.split(":")[0] for line in compare(peace, killed)] == ["metrics.jsonl"]
    shutil.copy(peace / "metrics.jsonl", killed)

    _, state, _ = newest_good(killed / "checkpoints")
    state["model"]["fc.weight"][0, 0] += 1e-6
    state["optimizer"]["state"][0]["momentum_buffer"].view(-1)[0] += 1e-6
    save_last(killed / "checkpoints", encode(state), state["step"], keep=2)
    found = [line.split(":")[0] for line in compare(peace, killed)]
    assert found == ["model.fc.weight", "optimizer.state.0.momentum_buffer"]
    shutil.copytree(peace, killed, dirs_exist_ok=True)

    best = read_checkpoint(killed / "checkpoints/best.pt")
    best["model"]["fc.bias"][3] += 1e-6
    write_atomically(killed / "checkpoints/best.pt", encode(best))
    assert [line.split(":")[0] for line in compare(peace, killed)] == ["model of best.pt.fc.bias"]


def test_a_run_that_hangs_is_ended_and_reported(tmp_path, monkeypatch, capsys):
    script = tmp_path / "train.py"
    script.write_text(
        "import signal, time\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "print('Starting Training Loop...', flush=True)\ntime.sleep(600)\n"
    )
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(verify_resume, "TRAIN", script)
    assert main([*ARGUMENTS, "--timeout=1", "--seed=5", f"--work-dir={tmp_path}"]) == 1
    out = capsys.readouterr().out
    assert "verdict: FAILED" in out
    assert "so it may hang; its last words:\nStarting Training Loop..." in out
    assert "--seed 5" in out
    (work,) = tmp_path.glob("verify-resume-*")
    assert verify_resume._processes(work / "in-peace") == {}


def test_a_mistake_in_the_configuration_is_told_before_anything_starts(monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    assert main(["--config=default", "--set=no_such_key=1"]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("error: ") and "no_such_key" in err


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(("name", "nproc", "kills"), [("KILL", 1, 5), ("KILL", 2, 2), ("TERM", 2, 2), ("USR1", 1, 2)])
def test_killed_runs_equal_the_one_in_peace(name, nproc, kills, tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(ROOT)
    options = [f"--signal={name}", f"--nproc={nproc}", f"--kills={kills}", f"--work-dir={tmp_path}"]
    status = main([*ARGUMENTS, *options, "--seed=1", "--timeout=600", "--total-timeout=1700"])
    out = capfd.readouterr().out
    assert status == 0, out
    assert f"{kills} kills over" in out
    assert "verdict: EQUAL" in out
    assert list(tmp_path.iterdir()) == []
