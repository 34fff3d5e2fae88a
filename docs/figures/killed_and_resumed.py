"""Switch off a node of a Slurm job in mid-epoch, let Slurm requeue the job, and draw its loss over an uninterrupted
run's loss.

PYTHONPATH=. python docs/figures/killed_and_resumed.py --train   # both jobs; needs root, tests/system/slurm/install.sh
PYTHONPATH=. python docs/figures/killed_and_resumed.py           # draw from results/2026-11-25-killed-and-resumed
"""

import json
import os
import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from tests.system.slurm.cluster import SlurmCluster
from tools.common import COLOURS, new_figure, save

ROOT = Path(__file__).resolve().parents[2]
RECORDS = ROOT / "results/2026-11-25-killed-and-resumed"
SETTINGS = ("checkpoint_every_steps=50", "log_freq=4")
KILLED_AFTER = 380  # steps, in the fifth epoch of 78 steps each


def train() -> None:
    """Train both jobs on two of three nodes; keep the losses, and the killed run's losses as they were at the kill."""
    with tempfile.TemporaryDirectory(prefix="slurm-") as folder, SlurmCluster(Path(folder, "slurm"), 3) as cluster:
        whole, killed = (Path(folder) / name for name in ("uninterrupted", "killed"))
        assert cluster.wait(submit(cluster, whole), 600)["JobState"] == "COMPLETED"
        job = submit(cluster, killed)
        while max(losses(killed), default=0) < KILLED_AFTER:
            time.sleep(0.02)
        cluster.kill_node("node2")
        until_the_kill = losses(killed)
        fields = cluster.wait(job, 900)
        assert fields["JobState"] == "COMPLETED" and fields["Restarts"] == "1", fields
        (resumed_from,) = (record["step"] for record in records(killed) if record["kind"] == "resume")
        found = {
            "resumed_from": resumed_from,
            "uninterrupted": losses(whole),
            "until_the_kill": until_the_kill,
            "resumed": losses(killed),
        }
        RECORDS.mkdir(exist_ok=True)
        (RECORDS / "losses.json").write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
        shutil.copy(whole / "environment.json", RECORDS)
        (log,) = Path(folder).glob(f"*-{job}.out")
        shutil.copy(log, RECORDS / "job.log")


def submit(cluster: SlurmCluster, run: Path) -> int:
    """Submit a job of two nodes with one process each; return its number."""
    settings = [word for setting in SETTINGS for word in ("--set", setting)]
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    return cluster.submit(
        ROOT / "submit_multinode.slr", "--config=quickstart", *settings, f"--run-dir={run}",
        options=("--cpus-per-task=2", "--gpus-per-node=2", f"--output={run.parent}/%x-%j.out"), cwd=ROOT,
        OMP_NUM_THREADS="1", PATH=path, SUBMIT_PROCESSES="1",
    )  # fmt: skip


def records(run: Path) -> list[dict[str, Any]]:
    """The records of a run so far, without a line that is half-written."""
    path = run / "metrics.jsonl"
    lines = path.read_text("utf-8").splitlines(keepends=True) if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]


def losses(run: Path) -> dict[int, float]:
    """{step: loss} of the training steps that the run has logged."""
    return {record["step"]: record["loss"] for record in records(run) if record["kind"] == "step"}


def draw(path: Path) -> None:
    """Draw the losses of both runs into one picture."""
    found = json.loads((RECORDS / "losses.json").read_text("utf-8"))
    whole, killed, resumed = (
        {int(step): loss for step, loss in found[name].items()}
        for name in ("uninterrupted", "until_the_kill", "resumed")
    )
    assert whole == resumed, "the resumed run's losses differ from the uninterrupted run's"
    start, kill = found["resumed_from"], max(killed)
    again = {step: loss for step, loss in resumed.items() if step > start}
    figure, axes = new_figure(size=(8.4, 4.2))
    axes.axvspan(start, kill, color="gray", alpha=0.2, linewidth=0)
    lines = (  # losses, colour, width, style, name, where the name stands
        (whole, COLOURS[5], 6, "-", "uninterrupted", (130, 3.0)),
        (killed, COLOURS[1], 1.8, "-", "killed", (265, 0.25)),
        (again, COLOURS[6], 1.2, "--", "resumed", (480, 0.06)),
    )
    for curve, colour, width, style, name, place in lines:
        axes.semilogy(curve.keys(), curve.values(), style, color=colour, linewidth=width, alpha=0.6 if width > 5 else 1)
        axes.text(*place, name, color=colour, weight="bold")
    for step, text, side in (
        (start, f"last checkpoint: step {start} ", "right"),
        (kill, f" node switched off after step {kill}", "left"),
    ):
        axes.axvline(step, color="black", linewidth=0.8, linestyle=":")
        axes.text(step, 0.9, text, ha=side)
    axes.set(xlabel="step", ylabel="loss of the step", xlim=(0, max(whole) + 5), ylim=(min(whole.values()) / 2, 5))
    axes.set_title(f"A Slurm job loses a node and resumes: the same loss in all {len(whole)} logged steps")
    save(figure, path)


if __name__ == "__main__":
    if "--train" in sys.argv[1:]:
        train()
    draw(Path(__file__).with_suffix(".png"))
