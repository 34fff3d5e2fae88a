"""Which changes of settings a run may resume with, and the remedies named if it may not; names from Slurm's jobs."""

import shlex
from pathlib import Path

import pytest

import train
from tests.test_checkpoint import contents
from tests.test_resume import stop
from tests.test_train import run
from utils.config import load_config
from utils.config.command_line import Arguments, parse_arguments
from utils.errors import ConfigError, Stopped
from utils.files import write_atomically
from utils.run import folder as run_folder
from utils.run.checkpoint.fit import check_settings

CHANGES = {"lr": 0.3, "weight_decay": 0.1}
SHOWN = "lr 0.1 -> 0.3, weight_decay 0.0005 -> 0.1"


def test_a_run_with_other_settings_is_not_resumed(tiny, one_rank, tmp_path, capsys):
    """The folder stays unchanged."""
    folder = tmp_path / "run"
    run(tiny(max_epochs=1), one_rank, folder)
    before = contents(folder)
    capsys.readouterr()
    assert train.main(Arguments(tiny(max_epochs=1, **CHANGES), "tiny", folder, "auto", dry_run=False)) == 2
    assert capsys.readouterr().err.splitlines() == [
        f"error: {folder}: holds a run with other settings: {SHOWN}",
        f"add to the command: --run-dir DIR for a separate run; or --resume {folder} to continue from its last "
        "checkpoint with the new values; or --resume never to move it aside and start again",
    ]
    assert contents(folder) == before


@pytest.mark.parametrize(("key", "value"), [("max_epochs", 3), ("ema_decay", 0.9), ("seed", 1)])
def test_training_settings_may_not_change(tiny, tmp_path, key, value):
    path = tmp_path / "checkpoints/step-000000004.pt"
    with pytest.raises(ConfigError) as refused:
        check_settings(path, tiny().model_dump(mode="json"), tiny(**{key: value}), automatic=True)
    assert f"holds a run with other settings: {key} " in str(refused.value)
    # with another seed the checkpoint would be in the middle of another order of the images
    assert (f"--resume {tmp_path} " in str(refused.value)) == (key != "seed")


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
    assert kept == starts
    assert not (tmp_path / "config.yaml.3").exists()


def test_an_earlier_configuration_is_copied_before_it_is_replaced(tiny, tmp_path, monkeypatch):
    """A kill between the two writes must not lose it."""
    run_folder.write_description(tmp_path, tiny(lr=0.1), "tiny", {})
    earlier = (tmp_path / "config.yaml").read_bytes()

    def write_or_die(path, content):
        if path.name == "config.yaml":
            raise KeyboardInterrupt
        write_atomically(path, content)

    monkeypatch.setattr(run_folder, "write_atomically", write_or_die)
    with pytest.raises(KeyboardInterrupt):
        run_folder.write_description(tmp_path, tiny(lr=0.2), "tiny", {})
    assert [(tmp_path / name).read_bytes() for name in ("config.yaml.1", "config.yaml")] == [earlier, earlier]


# ---- names from a job of Slurm

ARRAY = {"SLURM_JOB_ID": "77", "SLURM_ARRAY_JOB_ID": "70", "SLURM_ARRAY_TASK_ID": "3"}


def test_each_job_of_an_array_has_its_own_folder_and_settings(monkeypatch, tmp_path):
    for name, value in ARRAY.items():
        monkeypatch.setenv(name, value)
    own = tmp_path / "own.yaml"
    own.write_text("try-3:\n  lr: 0.2\n", encoding="utf-8")
    words = f"--yaml_config={own} --config=try-%a --run-dir=expts/x-%a-%A-%j-100%% --set seed=%a --set data_path=/a%b"
    arguments = parse_arguments(shlex.split(words))
    assert arguments.run_dir == Path("expts/x-3-70-77-100%")
    assert (arguments.config.lr, arguments.config.seed, arguments.config.data_path) == (0.2, 3, "/a%b")
    assert parse_arguments([f"--yaml_config={own}", "--config=try-%a"]).run_dir == Path("expts/try-3")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--run-dir=expts/x-%a"], "--run-dir expts/x-%a: %a is SLURM_ARRAY_TASK_ID, which is not set here"),
        (["--run-dir=expts/x-%j"], "--run-dir expts/x-%j: %j is SLURM_JOB_ID, which is not set here"),
        (["--set=seed=%a"], "--set seed=%a: %a is SLURM_ARRAY_TASK_ID"),
        (["--run-dir=x-%x"], "--run-dir x-%x: %x is not known; allowed: %a, %A, %j, %% for %"),
    ],
    ids=lambda part: part[0] if isinstance(part, list) else "",
)
def test_outside_of_an_array_placeholders_are_refused(refused, monkeypatch, arguments, message):
    for name in ARRAY:
        monkeypatch.delenv(name, raising=False)
    assert message in refused(*arguments)
