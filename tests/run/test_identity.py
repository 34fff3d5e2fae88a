"""Which changes of settings a run may resume with, and the remedies named if it may not; names from Slurm's jobs."""

import shlex
from pathlib import Path

import pytest

import train
from tests.conftest import contents, stop
from utils.base_config import KeyFlag
from utils.config import Config, load_config
from utils.config.command_line import Arguments, parse_arguments
from utils.errors import Stopped


def test_a_run_with_other_settings_is_not_resumed(tiny, folder, capsys):
    before, changes = contents(folder), {"lr": 0.3, "weight_decay": 0.1}
    assert train.main(Arguments(tiny(max_epochs=3, **changes), "tiny", folder, "auto", dry_run=False)) == 2
    first, second = capsys.readouterr().err.splitlines()
    assert first == f"error: {folder}: holds a run with other settings: lr 0.1 -> 0.3, weight_decay 0.0005 -> 0.1"
    for words in ("--run-dir DIR ", f"--resume {folder} to continue ", "--resume never to move it aside "):
        assert words in second
    assert contents(folder) == before


def test_which_settings_may_change():
    """A run never resumes with another value of the first ones, and of the second ones without being asked to."""
    assert {*Config().keys_with(KeyFlag.FIXED_ON_RESUME)} == {
        "batch_size", "dataset", "holdout_images", "limit_train_batches", "model", "num_classes", "optimizer", "seed",
        "stem", "weight_decay_bn_bias", "width", "zero_init_residual"}  # fmt: skip
    assert {*Config().keys_with(KeyFlag.FREE_ON_RESUME)} == {
        "checkpoint_every_steps", "cifar100_mean", "cifar100_std", "data_path", "enable_profiling", "keep_checkpoints",
        "limits_report", "log_freq", "log_to", "log_to_screen", "log_to_tensorboard", "num_data_workers",
        "profiling_epoch_start", "profiling_iters_per_epoch", "rank_timeout_seconds", "save_checkpoint",
        "valid_batch_size_per_gpu", "verify_every_steps"}  # fmt: skip


def test_other_settings_may_change_and_every_configuration_is_kept(tiny, one_rank, tmp_path):
    starts = [
        tiny(max_epochs=3, log_freq=1),
        tiny(max_epochs=3, log_freq=3, num_data_workers=1, checkpoint_every_steps=2, log_to_screen=False),
        tiny(max_epochs=3, log_freq=3, rank_timeout_seconds=60, keep_checkpoints=5),
    ]
    for config in starts:
        trainer = train.Trainer(config, one_rank, tmp_path, "tiny", "auto")
        stop(trainer, poll=2)
        with pytest.raises(Stopped):
            trainer.train()
    assert (trainer.run.epoch, trainer.run.batch) == (0, 4)
    kept = [load_config(tmp_path / name, "tiny") for name in ("config.yaml.1", "config.yaml.2", "config.yaml")]
    assert kept == starts and not (tmp_path / "config.yaml.3").exists()


def test_each_job_of_an_array_has_its_own_folder_and_settings(monkeypatch, tmp_path, refused):
    own = tmp_path / "own.yaml"
    own.write_text("try-3:\n  lr: 0.2\n", encoding="utf-8")
    words = f"--yaml_config={own} --config=try-%a --run-dir=x-%a-%A-%j-100%% --resume=%j --set seed=%a"
    for name, value in {"SLURM_JOB_ID": "77", "SLURM_ARRAY_JOB_ID": "70", "SLURM_ARRAY_TASK_ID": "3"}.items():
        monkeypatch.setenv(name, value)
    arguments = parse_arguments([*shlex.split(words), "--set=data_path=/a%%b"])
    assert (arguments.run_dir, arguments.resume) == (Path("x-3-70-77-100%"), "77")
    assert (arguments.config.lr, arguments.config.seed, arguments.config.data_path) == (0.2, 3, "/a%%b")
    assert parse_arguments([f"--yaml_config={own}", "--config=try-%a"]).run_dir == Path("expts/try-3")
    assert "--run-dir x-%x: %x is not known; allowed: %a, %A, %j, %% for %" in refused("--run-dir=x-%x")
    monkeypatch.delenv("SLURM_ARRAY_TASK_ID")
    assert "--set seed=%a: %a is SLURM_ARRAY_TASK_ID, which is not set here" in refused("--set=seed=%a")
