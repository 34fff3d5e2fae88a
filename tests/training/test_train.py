"""Whole runs through the Trainer: their results, files, messages and ends."""

import itertools
import json
import math
import os
import random
import re
import shutil
import signal
import subprocess
import sys
from functools import partial
from types import SimpleNamespace
from unittest.mock import Mock

import numpy
import pytest
import torch

import train as train_module
from tests.conftest import ROOT, TINY_OPTIONS, plan_on, read_records, run, stop, tiny_config
from tests.processes import complaints, run_job
from train import Trainer
from utils.config.command_line import Arguments
from utils.errors import CheckpointError, ConfigError, ExpectedError
from utils.run.checkpoint import encode, list_checkpoints, read_checkpoint
from utils.run.logger import RunLogger
from utils.run.run import Run
from utils.training import plan
from utils.training.plan import check_ranks_agree
from utils.training.validation import validate


@pytest.mark.parametrize("switch", ["enable_nhwc", "enable_extra_opts", "enable_amp"])
def test_switches_change_the_speed_and_not_the_training(tiny, one_rank, switch):
    """channels_last reaches model and images, AMP training and validation; enable_extra_opts may name one switch."""
    seen, losses, is_nhwc = set(), [], partial(torch.Tensor.is_contiguous, memory_format=torch.channels_last)
    for changes in ({}, {switch: ["fused_optimizer"] if switch == "enable_extra_opts" else True}):
        seen.clear()
        trainer = Trainer(tiny(max_epochs=1, lr=0.02, amp_dtype="bf16", **changes), one_rank)
        model = trainer.learner.model
        model.conv1.register_forward_pre_hook(lambda _, images: seen.add(is_nhwc(images[0])))
        model.fc.register_forward_hook(lambda module, _, output: seen.add((module.training, output.dtype)))
        trainer.train_one_epoch()
        losses.append(trainer.learner.sums.average(one_rank)["loss"])
        validate(trainer.learner, trainer.loaders.valid, one_rank)
    assert losses[1] == pytest.approx(losses[0], rel=0.02 if switch == "enable_amp" else 3e-3)  # roundings differ
    dtype, nhwc = torch.bfloat16 if switch == "enable_amp" else torch.float32, switch == "enable_nhwc"
    assert seen == {nhwc, (True, dtype), (False, dtype)}
    assert is_nhwc(model.layer1[0].conv1.weight) is nhwc
    assert bool(trainer.learner.optimizer.param_groups[0]["fused"]) is (switch == "enable_extra_opts")
    assert trainer.run.clock.images == 4 * 32  # also those after an epoch's last log point


def test_metrics_cover_the_whole_epoch_and_only_training_smooths_labels(tiny, one_rank, tmp_path):
    """With a learning rate near 0, the epoch's means must equal those of a separate pass over its batches."""
    config = tiny(lr=1e-12, momentum=0.0, limit_train_batches=5, label_smoothing=0.3)
    run(config, one_rank, tmp_path)
    learner, loaders = (trainer := Trainer(config, one_rank)).learner, trainer.loaders
    parts = ("train", loaders.train, 0.3), ("valid", loaders.valid, 0.0)
    for row, (part, loader, smoothing) in itertools.product(read_records(tmp_path, "epoch"), parts):
        loader.set_epoch(row["epoch"] - 1)
        learner.model.train(part == "train")
        loss = torch.nn.CrossEntropyLoss(label_smoothing=smoothing)
        with torch.no_grad():
            losses = [loss(learner.model(images), labels).item() for images, labels in loader]
        assert row[f"loss/{part}"] == pytest.approx(sum(losses) / len(losses), rel=1e-6)


def test_run_folder_holds_the_files_and_no_unlisted_environment_variable(tiny, one_rank, tmp_path, monkeypatch, capsys):
    """Unlisted variables may hold secrets."""
    recorded, secret = "TELLTALE-RECORDED", "TELLTALE-SECRET"
    for name, value in {"NCCL_DEBUG": recorded, "AWS_SECRET_ACCESS_KEY": secret, "SLURM_SECRET": secret}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 77)
    run(tiny(log_to_tensorboard=True, log_to_screen=False), one_rank, tmp_path)
    assert capsys.readouterr().out == ""
    contents = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    assert [path for path, content in contents.items() if secret.encode() in content] == []
    assert recorded.encode() in contents[tmp_path / "environment.json"]  # so this search finds values
    names = ".lock config.yaml environment.json train.log metrics.jsonl tb_logs checkpoints"
    assert {*os.listdir(tmp_path)} == {*names.split()}
    assert {*os.listdir(tmp_path / "checkpoints")} == {"best.pt", "step-000000004.pt", "step-000000008.pt"}
    facts = {"torch": str(torch.__version__), "threads": 77}
    assert json.loads((tmp_path / "environment.json").read_text()).items() >= facts.items()
    log = (tmp_path / "train.log").read_text()
    for words in ("Starting Training Loop...", "Epoch: 1, Iteration: 0, Avg img/sec: ", "Time taken for epoch 2 is "):
        assert words in log


def test_a_finished_run_says_so_trains_nothing_and_keeps_its_description(tiny, one_rank, folder, monkeypatch):
    before = {name: (folder / name).read_bytes() for name in ("config.yaml", "environment.json", "metrics.jsonl")}
    again = run(tiny(max_epochs=3, lr=0.5, log_freq=1), one_rank, folder, resume=str(folder))
    assert f"Already finished: best acc1 {100 * again.run.best['acc1']:.2f} %" in (folder / "train.log").read_text()
    assert before == {name: (folder / name).read_bytes() for name in before}
    (end,), rows = read_records(folder, "end"), read_records(folder, "epoch")
    assert [end["last_acc1"], end["last_loss"]] == [rows[-1]["acc1/valid"], rows[-1]["loss/valid"]]
    arguments = Arguments(tiny(max_epochs=3, rank_timeout_seconds=77), "tiny", folder, "auto", dry_run=False)
    monkeypatch.setattr(train_module, "run_ranks", ranks := Mock(wraps=train_module.run_ranks))
    assert train_module.main(arguments, saved := Mock()) == 0 and saved.called
    assert ranks.call_args.args[1:] == ("cpu", 77)
    (folder / "checkpoints/best.pt").unlink()
    assert "the best weights are lost" in run(tiny(max_epochs=3), one_rank, folder).run.summarise(True)


@pytest.mark.parametrize("saved", [False, True])
def test_run_killed_around_its_last_checkpoint_records_its_end_once(tiny, one_rank, tmp_path, monkeypatch, saved):
    """Killed before it, the run resumes from the checkpoint of the same step, written before the validation."""
    save = Run.save

    def die(self, *, is_best):
        if saved or not self.finished:
            save(self, is_best=is_best)
        if self.finished:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Run, "save", die)
        with pytest.raises(KeyboardInterrupt):
            run(tiny(checkpoint_every_steps=4), one_rank, tmp_path)
    run(tiny(checkpoint_every_steps=4), one_rank, tmp_path)
    assert [len(read_records(tmp_path, kind)) for kind in ("epoch", "end")] == [2, 1]


def test_every_random_generator_is_seeded(tiny, one_rank):
    numbers = []
    for seed in (0, 0, 1):
        random.seed(), numpy.random.seed(), torch.seed()
        Trainer(tiny(seed=seed), one_rank)
        numbers.append((random.random(), numpy.random.random(), torch.rand(1).item()))
    assert numbers[0] == numbers[1] and all(one != other for one, other in zip(numbers[0], numbers[2], strict=True))


def test_a_linked_run_folder_stays_a_link(tiny, one_rank, tmp_path):
    (tmp_path / "disk").mkdir()
    (tmp_path / "run").symlink_to(tmp_path / "disk")
    for _ in range(2):
        run(tiny(max_epochs=1), one_rank, tmp_path / "run", resume="never")
    assert (tmp_path / "run").is_symlink()
    assert (tmp_path / "disk/metrics.jsonl").exists() and (tmp_path / "disk.1/metrics.jsonl").exists()


def test_other_data_or_other_epochs_are_refused(tiny, one_rank, folder):
    refused = r"was trained on other data, or with epochs of another length: "
    with pytest.raises(CheckpointError, match=refused + r"steps_per_epoch 4 -> 3\n"):
        shorter = tiny(max_epochs=4, enable_profiling=True, profiling_iters_per_epoch=3)
        run(shorter, one_rank, folder, resume=str(folder))
    trainer = Trainer(tiny(max_epochs=4), one_rank, folder, "tiny", str(folder))
    path, names = list_checkpoints(folder / "checkpoints")[0], trainer.run.data["class_names"]
    accent = "be\u0301e", "b\u00e9e", "; some differ in their Unicode form only"
    for saved, name, remark in ((names[0], "other", ""), accent):
        state = read_checkpoint(path)
        state["data"]["class_names"] = [saved, *names[1:]]
        (folder / "changed.pt").write_bytes(encode(state))
        trainer = Trainer(tiny(max_epochs=4), one_rank, folder, "tiny", str(folder / "changed.pt"))
        trainer.run.data["class_names"] = [name, *names[1:]]
        with pytest.raises(CheckpointError, match=rf'{refused}class_names \["{saved}".* -> \["{name}".*{remark}\n'):
            trainer.train()
    real = {"dataset": "cifar100", "num_classes": 100, "data_loader": "synthetic"}
    run(tiny(**real, max_epochs=1), one_rank, folder.parent / "real")
    unused = {"cifar100_mean": (0.5, 0.5, 0.5)}
    with pytest.raises(CheckpointError, match=f"{refused}mean "):
        run(tiny(**real | unused), one_rank, folder.parent / "real", resume=f"{folder.parent}/real")
    assert run(tiny(max_epochs=4, **unused), one_rank, folder, resume=str(folder)).run.epoch == 4


@pytest.mark.parametrize("resume", ["never", "other"])
def test_a_restarted_job_resumes_its_own_run_only(tiny, one_rank, folder, tmp_path, monkeypatch, resume):
    """The job applies --resume once, in its first start; its first start may end before it opens the folder."""
    if resume == "other":
        resume = shutil.copytree(folder, tmp_path / "other")
    checkpoints = []
    for job, restarts in (("7", "1"), ("7", "2"), ("8", "0")):
        monkeypatch.setenv("SLURM_JOB_ID", job)
        monkeypatch.setenv("SLURM_RESTART_COUNT", restarts)
        run(tiny(max_epochs=4), one_rank, folder, resume=str(resume))
        checkpoints.append(list_checkpoints(folder / "checkpoints")[0].read_bytes())
        assert (tmp_path / "run.1").exists() and (tmp_path / "run.2").exists() is (job == "8")
    assert checkpoints[0] == checkpoints[1]


@pytest.mark.parametrize(("micro_batches", "every", "stopped"), [(1, None, 0), (2, None, 0), (1, 2, 0), (1, None, 2)])
def test_non_finite_loss_stops_and_leaves_the_last_checkpoint(tiny, one_rank, tmp_path, micro_batches, every, stopped):
    """Although the weights are finite, as after a step that loss scaling skips."""
    settings = {"micro_batch_size": tiny().batch_size // micro_batches, "checkpoint_every_steps": every}
    run(tiny(max_epochs=1, **settings), one_rank, tmp_path)
    good = {path: path.read_bytes() for path in (tmp_path / "checkpoints").iterdir()}
    trainer = Trainer(tiny(max_epochs=3, **settings), one_rank, tmp_path, "tiny", str(tmp_path))
    update, count, bad = trainer.learner.update, iter(range(100)), 2 * micro_batches - 1  # before or after a log point

    def break_a_batch(images, labels):
        trainer.learner.sums.sums[0] += math.nan if next(count) == bad else 0
        update(images, labels)

    trainer.learner.update = break_a_batch
    stop(trainer, stopped)
    with pytest.raises(ExpectedError, match=f"finite number in epoch 2, iteration {bad}, learning rate"):
        trainer.train()
    assert {path: path.read_bytes() for path in (tmp_path / "checkpoints").iterdir()} == good


def test_non_finite_outputs_in_validation_only_end_the_run_without_a_best(tiny, one_rank, tmp_path):
    """One batch has NaN outputs, as from broken BatchNorm statistics, which training does not read."""
    trainer = Trainer(tiny(stop_at_accuracy=0.01), one_rank, tmp_path)
    fc, passes = trainer.learner.model.fc, iter(range(100))
    fc.register_forward_hook(lambda _, images, outputs: outputs if fc.training or next(passes) else outputs * math.nan)
    with pytest.raises(ExpectedError, match="outputs for some images are not finite"):
        trainer.train()
    assert not (tmp_path / "checkpoints/best.pt").exists() and read_records(tmp_path, "epoch") == []


def train_differently(folder):
    """With a processor that lacks kernels for bf16. Workers and paths may differ between nodes."""
    rank = int(os.environ["RANK"])
    plan.has_bf16_kernels = lambda: rank == 0
    config = tiny_config(num_data_workers=rank, data_path=f"data-{rank}", enable_amp="auto")
    return train_module.main(Arguments(config, "tiny", folder, "never", dry_run=False))


def test_settings_that_differ_between_ranks_are_refused(tiny, tmp_path):
    """As from `--set seed=$RANDOM` under srun."""
    ended = run_job(tmp_path / "job", 2, train_differently, tmp_path / "run")
    assert [process.status for process in ended] == [2, 2]
    (error,) = complaints(ended)
    message = '"bf16 autocast" on rank 0, but "float32: .*" on rank 1; start every rank with the same settings'
    assert re.search(message, error) and not (tmp_path / "run").exists()
    world = SimpleNamespace(all_gather=lambda values: [values, values | {"seed": 1}])
    with pytest.raises(ConfigError, match="seed is 0 on rank 0, but 1 on rank 1"):
        check_ranks_agree(tiny(), plan_on(tiny()), world)


def test_command_line_run_ends_with_the_tutorials_lines(tmp_path):
    command = [sys.executable, "train.py", "--config=bs128-opt", f"--run-dir={tmp_path / 'run'}", *TINY_OPTIONS]
    environment = os.environ | {"TRAIN_EXIT_STATUS_FILE": str(tmp_path / "status")}
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=environment, check=True)
    assert "INFO - Epoch: 2, Iteration: 2, Avg img/sec: " in result.stdout
    rate = read_records(tmp_path / "run", "end")[0]["images_per_sec"]
    pattern = rf"Finished: best acc1 .* s, {rate:.1f} images/s \({1 / rate:.3g} seconds per image\)$"
    assert re.search(pattern, result.stdout.splitlines()[-1])
    assert (tmp_path / "status").read_text() == "0\n" and (tmp_path / "run/checkpoints/best.pt").exists()


def test_a_run_that_saves_nothing_says_so_when_it_is_stopped(tiny, one_rank, tmp_path):
    trainer = Trainer(tiny(save_checkpoint=False), one_rank, tmp_path, "tiny", "auto")
    trainer.requests.signal = signal.SIGTERM
    message = "stopped on SIGTERM in epoch 1 after 1 batches; save_checkpoint is false, so this run cannot be resumed"
    with pytest.raises(ExpectedError, match=message) as raised:
        trainer.train()
    assert raised.value.exit_status == 1 and not list(tmp_path.rglob("*.pt"))


@pytest.mark.parametrize(("error", "reason"), [
    (ZeroDivisionError("a bug"), "ZeroDivisionError: a bug\n"), (ExpectedError("no data"), "ExpectedError: no data\n"),
    (RuntimeError("[gloo/transport/tcp/pair.cc:545] Read"), "ExpectedError: another process of this run has ended"),
])  # fmt: skip
def test_the_log_says_how_the_run_ended_with_a_traceback_of_a_bug(tmp_path, error, reason):
    with pytest.raises(type(error)), RunLogger(tmp_path, enabled=True, to_screen=False) as log:
        log.open().trackers = [tracker := Mock()]
        raise error
    tracker.close.assert_called_once_with(failed=True)
    written = (tmp_path / "train.log").read_text()
    assert f"ended by {reason}" in written and read_records(tmp_path, "stop")[0]["status"] == 1
    assert ("Traceback" in written) is isinstance(error, ZeroDivisionError)
