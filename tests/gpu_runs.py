"""Check that a run on a GPU stops in mid-epoch and resumes bitwise equal, for tests of many configurations."""

import os
import signal
from contextlib import nullcontext
from typing import Any

import pytest
import torch

from tests.conftest import read_records
from tests.fake_cuda import runtime
from train import Trainer
from utils.config import Config
from utils.distributed.world import World
from utils.errors import Stopped
from utils.training import step
from utils.training.precision import choose_precision
from utils.training.step import GraphedStep, wants_graphs

GPU = torch.device("cuda", 0)
STOP_AFTER, WARMUP = 3, 3  # steps; without DDP, 3 warm-up steps before a capture are enough
STEPS, GRAPHED_STEPS = 4, 10  # in one epoch or two; a graph is captured before and after the stop, and replayed last
RECORDED = ("loss/train", "acc1/train", "loss/valid", "acc1/valid", "images/valid", "learning_rate")


def train(config, folder, stop_after=None):
    """Train a whole run, or `stop_after` steps until SIGTERM; return the trainer and its last step's host waits."""
    trainer = Trainer(config, World(rank=0, local_rank=0, world_size=1, device=GPU), folder, "run", "auto")
    train_step, waits = trainer.learner.train_step, set()

    def watched(images, labels):
        with runtime.record() if runtime.is_active() else nullcontext() as ledger:
            train_step(images, labels)
        waits.clear()
        waits.update(ledger.waits if ledger else ())
        if trainer.learner.steps == stop_after:
            os.kill(os.getpid(), signal.SIGTERM)

    trainer.learner.train_step = watched
    with pytest.raises(Stopped, match=r"after \d+ batches") if stop_after else nullcontext():
        trainer.train()
    return trainer, waits


def read_epochs(folder):
    epochs = read_records(folder, "epoch")
    assert "loss/valid" in epochs[-1]  # earlier ones depend on validate_every_epochs
    return [{key: row[key] for key in RECORDED if key in row} for row in epochs]


def check_resume(config, folder, monkeypatch):
    """Train and validate with and without a stop; both must be bitwise equal. The host must wait in a step only for a
    scaled loss without the fused update."""
    monkeypatch.setattr(step, "GRAPH_WARMUP_STEPS", WARMUP)
    graphed = wants_graphs(config, GPU)
    changes: dict[str, Any] = {"limit_train_batches": (GRAPHED_STEPS if graphed else STEPS) // config.max_epochs}
    if not runtime.is_active():  # a GPU promises equal bits only with it
        changes["deterministic"] = True
    config = Config(**config.model_dump() | changes)
    whole, waits = train(config, folder / "whole")
    learner = whole.learner
    waiting = choose_precision(config, GPU).loss_scale is not None and not config.extra_opt("fused_optimizer")
    assert bool(waits) is (runtime.is_active() and waiting), waits
    train(config, folder / "stopped", STOP_AFTER)
    resumed, _ = train(config, folder / "stopped")
    for trainer in (whole, resumed):
        assert trainer.learner.steps == changes["limit_train_batches"] * config.max_epochs
        captured = isinstance(trainer.learner.step, GraphedStep) and trainer.learner.step.captured
        assert captured is graphed
    torch.testing.assert_close(resumed.learner.state_dict(), learner.state_dict(), rtol=0, atol=0)
    assert read_epochs(folder / "stopped") == read_epochs(folder / "whole")
    assert resumed.run.best == whole.run.best
