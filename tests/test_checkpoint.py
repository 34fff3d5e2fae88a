"""Checkpoint files are written atomically, refused by name if damaged or unfit, and the newest good one is chosen."""

import errno
import fcntl
import io
import itertools
import json
import multiprocessing
import os
import random
import shutil
from hashlib import sha256
from pathlib import Path

import numpy as np
import pytest
import torch

import train
from tests.conftest import CIFAR100
from tests.test_train import run
from utils import files, seeds
from utils.config.command_line import parse_arguments
from utils.errors import CheckpointError, ConfigError, ExpectedError
from utils.run import folder as run_folder
from utils.run.checkpoint import io as checkpoint
from utils.run.checkpoint.fit import check_settings
from utils.run.checkpoint.io import encode, list_checkpoints, newest_good, read_checkpoint, save_checkpoint


@pytest.fixture(scope="module")
def finished(tiny, one_rank, tmp_path_factory):
    """A run of three epochs with all its checkpoints."""
    folder = tmp_path_factory.mktemp("finished")
    run(tiny(max_epochs=3, keep_checkpoints=9), one_rank, folder)
    return folder


@pytest.fixture
def folder(finished, tmp_path):
    """A copy of the finished run."""
    return Path(shutil.copytree(finished, tmp_path / "run"))


@pytest.fixture
def saved(folder):
    return folder / "checkpoints"


@pytest.fixture(scope="module")
def state(finished):
    return read_checkpoint(finished / "checkpoints/step-000000012.pt")


def contents(folder):
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.name not in ("train.log", ".lock")
    }


def test_a_checkpoint_holds_exactly_the_keys_of_the_table_and_any_pytorch_reads_it(saved):
    path = list_checkpoints(saved)[0]
    assert torch.load(path, weights_only=True).keys() == checkpoint.CONTENT.keys()
    content = path.read_bytes()
    assert content[-71:] == b"sha256:" + sha256(content[:-71]).hexdigest().encode()


def truncate(content, generator):
    return content[: generator.randrange(len(content))]


def flip_a_byte(content, generator):
    place = generator.randrange(len(content))
    return content[:place] + bytes([content[place] ^ generator.randrange(1, 256)]) + content[place + 1 :]


@pytest.mark.parametrize("damage", [truncate, flip_a_byte])
def test_damaged_anywhere_it_is_skipped_and_reported(saved, damage):
    newest = list_checkpoints(saved)[0]
    whole = newest.read_bytes()
    for seed in range(10):
        damaged = damage(whole, random.Random(seed))
        newest.write_bytes(damaged)
        path, good, complaints = newest_good(saved)
        assert path.name == "step-000000008.pt" and good["step"] == 8
        assert complaints == [f"{newest}: is damaged or not a checkpoint of this program ({len(damaged)} bytes)"], seed


def test_the_log_names_skipped_checkpoints(tiny, one_rank, folder, saved):
    for path in (newest := list_checkpoints(saved)[0]), saved / "best.pt":
        path.write_bytes(path.read_bytes()[:-1])
    best = read_checkpoint(saved / "step-000000008.pt")["best"]["epoch"]
    trainer = run(tiny(max_epochs=3), one_rank, folder)
    log = (folder / "train.log").read_text(encoding="utf-8")
    assert f"Skipped: {newest}: is damaged" in log
    assert f"Skipped: {saved / 'best.pt'}: is damaged" in log
    assert f"The best weights so far, of epoch {best}, are lost: only later epochs count as best" in log
    assert trainer.progress.best["epoch"] == 3 == read_checkpoint(saved / "best.pt")["epoch"]


def test_no_good_one_is_an_error_of_status_4(tiny, one_rank, folder, saved):
    for path in list_checkpoints(saved):
        path.write_bytes(b"nothing")
    before = contents(folder)
    with pytest.raises(CheckpointError, match=r"step-000000012.pt: is damaged .*\n.*--resume never") as raised:
        run(tiny(), one_rank, folder)
    assert f"--resume {saved / 'best.pt'} resumes from the best one" in str(raised.value)
    assert raised.value.exit_status == 4
    assert contents(folder) == before


def test_the_last_few_are_kept(tmp_path, state):
    for step in (8, 16, 24, 32):
        save_checkpoint(tmp_path, state | {"step": step}, 3, is_best=False)
    assert [path.name[-5:] for path in list_checkpoints(tmp_path)] == ["32.pt", "24.pt", "16.pt"]


# ---- refused: intact, but not for this run


class _Bomb:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return (Path.touch, (self.path,))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format": checkpoint.FORMAT + 1}, "is not a checkpoint of this version"),  # and no older one is used instead
        ({"best": "the best"}, "is not a checkpoint of this version"),
        ({"average": _Bomb(Path("sprung"))}, "holds more than tensors and plain values"),
    ],
)
def test_another_versions_or_programs_file_is_refused(saved, state, monkeypatch, change, message):
    """With the right digest. The pickle would run code."""
    monkeypatch.chdir(saved)
    newest = list_checkpoints(saved)[0]
    newest.write_bytes(encode(state | change))
    with pytest.raises(CheckpointError, match=f"{newest}: {message}"):
        newest_good(saved)
    assert not Path("sprung").exists()


def test_another_model_batch_or_order_is_refused_with_what_differs(tiny, one_rank, folder):
    before = contents(folder)
    for change, named in (
        ({"model": "resnet20"}, "model 'resnet8' -> 'resnet20'"),
        ({"batch_size": 16}, "batch_size 32 -> 16"),
        ({"seed": 5}, "seed 0 -> 5"),
        ({"optimizer": "adamw"}, "optimizer 'sgd' -> 'adamw'"),
    ):
        with pytest.raises(CheckpointError, match=f"does not fit this configuration: {named}\\n"):
            run(tiny(**change), one_rank, folder, resume=str(folder))
    assert contents(folder) == before


def test_a_checkpoint_older_than_a_setting_fits(tiny):
    saved = tiny().model_dump(mode="json")
    del saved["holdout_images"]
    assert check_settings(Path("file"), saved, tiny(), automatic=True) == []


def test_other_tensors_are_refused_by_name(tiny, one_rank, folder, saved):
    """Tensors of another network, and an optimizer with other groups of parameters."""
    before, trainer = contents(folder), train.Trainer(tiny(max_epochs=3), one_rank, folder)
    momentum = next(iter(trainer.learner.optimizer.param_groups))["params"]
    momentum[0], momentum[1] = momentum[1], momentum[0]
    trainer.learner.model.fc = torch.nn.Linear(64, 10, bias=False)
    trainer.learner.model.extra = torch.nn.Linear(1, 1, bias=False)
    problems = r"'extra.weight' missing -> float32 \[1, 1\], 'fc.bias' float32 \[10\] -> missing, "
    with pytest.raises(CheckpointError, match=problems + r"'optimizer.0.momentum_buffer' float32 \[16, 3, 3, 3\] -> "):
        trainer.train()
    momentum.pop()
    with pytest.raises(CheckpointError, match="the optimizer's groups of parameters"):
        trainer.train()
    assert contents(folder) == before


def test_what_may_change_is_logged_and_used(tiny, one_rank, folder):
    trainer = run(tiny(max_epochs=4, lr=0.05, data_path="/" + 80 * "x"), one_rank, folder, resume=str(folder))
    log = (folder / "train.log").read_text()
    assert "Resuming with another lr 0.1 -> 0.05" in log
    assert f"Resuming with another data_path './data' -> '/{55 * 'x'}...\n" in log
    assert trainer.learner.optimizer.param_groups[0]["lr"] == 0.05


# ---- random states


def test_random_states_are_restored():
    def sample():
        return [(random.random(), np.random.rand(), np.random.randn(), torch.rand(()).item()) for _ in range(2)]

    random.seed(1), np.random.seed(2), torch.manual_seed(3)
    saved = torch.load(io.BytesIO(encode({"random": seeds.random_state()})), weights_only=True)["random"]
    samples = sample()
    seeds.restore_random_state(saved)
    assert sample() == samples


def test_random_states_start_no_cuda_on_a_machine_with_a_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_rng_state", lambda: pytest.fail("would start CUDA"))
    monkeypatch.setattr(torch.cuda, "set_rng_state", lambda state: pytest.fail("would start CUDA later"))
    saved = seeds.random_state()
    assert saved["cuda"] is None
    seeds.restore_random_state(saved | {"cuda": torch.zeros(16, dtype=torch.uint8)})


def test_every_rank_and_step_draws_from_a_seed_of_its_own():
    places = [*itertools.product(range(3), repeat=3)]
    assert len({seeds.seed_of(*place) for place in places}) == len(places)


# ---- writing


def test_a_failed_write_leaves_the_old_file_only(tmp_path, monkeypatch):
    path = tmp_path / "file"
    files.write_atomically(path, b"old")
    monkeypatch.setattr(os, "fsync", _no_space)
    with pytest.raises(ExpectedError, match="file: cannot be written: No space left on device; an earlier version"):
        files.write_atomically(path, b"new")
    assert contents(tmp_path) == {"file": b"old"}


def _no_space(*_):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_weights_that_are_not_finite_are_never_saved(tmp_path, state):
    broken = {"fine": torch.ones(2), "bad": torch.tensor([1.0, float("inf")])}
    with pytest.raises(ExpectedError, match=r"after step 12, 1 of the network's 2 tensors .* first bad;.*\na lower lr"):
        save_checkpoint(tmp_path, state | {"model": broken}, 2, is_best=False)
    assert not list(tmp_path.iterdir())


def test_after_a_power_cut_the_records_reach_to_the_checkpoint(tiny, one_rank, tmp_path, monkeypatch):
    """A power cut keeps of a file only what was synced to the disk. The last checkpoint before an epoch's end is not
    written again by the validation."""
    metrics, durable, found = tmp_path / "metrics.jsonl", {}, []
    really = os.fsync

    def fsync(descriptor):
        really(descriptor)
        durable[os.fstat(descriptor).st_ino] = os.fstat(descriptor).st_size

    def save(folder, state, keep, *, is_best):
        save_checkpoint(folder, state, keep, is_best=is_best)
        lines = metrics.read_bytes()[: durable.get(metrics.stat().st_ino, 0)].splitlines()
        found.append((state["step"], [row["epoch"] for row in map(json.loads, lines) if row["kind"] == "epoch"]))

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(train, "save_checkpoint", save)
    run(tiny(checkpoint_every_steps=2), one_rank, tmp_path)
    assert found == [(2, []), (4, []), (4, [1]), (6, [1]), (8, [1]), (8, [1, 2])]


def test_a_kill_between_the_two_writes_loses_no_best_weights(tiny, one_rank, tmp_path, monkeypatch):
    """Otherwise the run would count as finished without its best weights. The next start removes temporary files."""

    written = []

    def write_and_die(path, content):
        """The checkpoints of steps 2 and 4 are before the validation; the third write is the first one after it."""
        files.write_atomically(path, content)
        written.append(path)
        if len(written) == 3:
            path.with_name(".step-000000008.pt.123.tmp").write_bytes(b"half")
            raise KeyboardInterrupt

    config = tiny(max_epochs=1, checkpoint_every_steps=2)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(checkpoint, "write_atomically", write_and_die)
        run(config, one_rank, tmp_path)
    trainer = run(config, one_rank, tmp_path)
    assert trainer.progress.best["epoch"] == 1 == read_checkpoint(tmp_path / "checkpoints/best.pt")["epoch"]
    assert not list((tmp_path / "checkpoints").glob(".*"))


# ---- run folders


def test_a_second_run_in_one_folder_is_refused(tiny, one_rank, tmp_path, monkeypatch):
    trainer, refused = train.Trainer(tiny(max_epochs=1), one_rank, tmp_path), []
    validate = trainer.validate_one_epoch

    def start_another():
        before = contents(tmp_path)
        for resume in ("auto", "never"):
            with pytest.raises(ConfigError, match=r"another run is writing here.*; wait for it or choose another"):
                run(tiny(max_epochs=1), one_rank, tmp_path, resume=resume)
        assert contents(tmp_path) == before
        refused.append(True)
        return validate()

    monkeypatch.setattr(trainer, "validate_one_epoch", start_another)
    trainer.train()
    assert refused == [True]


def wait_for(ready, enough):
    ready.set()
    enough.wait(60)


def test_loader_workers_of_a_killed_run_do_not_hold_its_folder(tmp_path):
    context = multiprocessing.get_context("fork")
    ready, enough = context.Event(), context.Event()
    lock = files.lock_folder(tmp_path / "run")
    worker = context.Process(target=wait_for, args=(ready, enough), daemon=True)
    worker.start()
    assert ready.wait(60)
    with pytest.raises(ConfigError, match="another run is writing here"):
        files.lock_folder(tmp_path / "run")  # and the worker's copy does not release it
    lock.close()
    files.lock_folder(tmp_path / "run").close()
    enough.set()
    worker.join()


@pytest.mark.parametrize("name", ["checkpoints/best.pt", "deep/best.pt"])
def test_a_run_can_resume_from_a_checkpoint_in_the_folder_that_is_moved_aside(tiny, one_rank, folder, name):
    (folder / name).parent.mkdir(exist_ok=True)
    if not (folder / name).exists():
        (folder / "checkpoints/best.pt").rename(folder / name)
    trainer = run(tiny(max_epochs=4, keep_checkpoints=9), one_rank, folder, resume=str(folder / name))
    best = int(trainer.progress.best["epoch"])
    assert trainer.progress.epoch == 4 and best > 0
    assert folder.with_name("run.1").exists() == name.startswith("deep")


def test_another_runs_checkpoint_of_the_same_step_overwrites_none(tiny, one_rank, folder, saved):
    run(tiny(max_epochs=1, num_data_workers=1), one_rank, folder.with_name("other"))
    before = (saved / "step-000000004.pt").read_bytes()
    shutil.copy(folder.with_name("other") / "checkpoints/step-000000004.pt", saved / "step-000000099.pt")
    run(tiny(max_epochs=1, keep_checkpoints=9), one_rank, folder, resume=str(folder))
    assert (saved / "step-000000004.pt.1").read_bytes() == before


def test_a_start_killed_while_it_goes_back_loses_nothing(tiny, one_rank, finished, tmp_path, monkeypatch):
    """Going back to step 4 of 12 moves two checkpoints and cuts the records; a kill comes before one of these."""
    config = tiny(max_epochs=3, keep_checkpoints=9)
    for event in (1, 2, 3):
        folder = shutil.copytree(finished, tmp_path / f"run-{event}")
        command = str(folder / "checkpoints/step-000000004.pt")
        with monkeypatch.context() as patch:
            remaining = iter(range(1, event))
            for function in ("_set_aside", "_cut_records"):
                patch.setattr(run_folder, function, _interrupted_after(remaining, getattr(run_folder, function)))
            with pytest.raises(KeyboardInterrupt):
                run(config, one_rank, folder, resume=command)
        steps = [json.loads(line)["step"] for line in (folder / "metrics.jsonl").read_text().splitlines()]
        assert max(steps) >= read_checkpoint(list_checkpoints(folder / "checkpoints")[0])["step"]
        run(config, one_rank, folder, resume=command)
        states = [read_checkpoint(path / "checkpoints/step-000000012.pt") for path in (folder, finished)]
        assert all(torch.equal(value, states[1]["model"][name]) for name, value in states[0]["model"].items()), event


def _interrupted_after(remaining, function):
    """Replace `function` by one that raises KeyboardInterrupt once the iterator `remaining` is exhausted."""

    def call_or_interrupt(*arguments):
        if next(remaining, None) is None:
            raise KeyboardInterrupt
        return function(*arguments)

    return call_or_interrupt


def test_damaged_lines_of_the_metrics_do_not_prevent_resuming(tiny, one_rank, folder):
    metrics = folder / "metrics.jsonl"
    metrics.write_bytes(metrics.read_bytes() + b'\0\0\n\xff\xfe\n{"kind')
    run(tiny(max_epochs=4), one_rank, folder, resume=str(folder))
    assert [json.loads(line)["step"] for line in metrics.read_text().splitlines()][-1] == 16


def test_a_start_that_fails_after_moving_the_earlier_run_aside_leaves_no_lock(tiny, one_rank, folder, monkeypatch):
    """Also while the error is kept, as in a notebook. The message names the folder."""
    monkeypatch.setattr(run_folder, "_records", _no_space)
    with pytest.raises(ExpectedError, match=f"{folder}: cannot be used: No space left") as kept:
        run(tiny(max_epochs=1), one_rank, folder, resume="never")
    assert folder.with_name("run.1").exists() and kept.value.__traceback__
    files.lock_folder(folder).close()


def test_a_file_system_without_locks_is_named(tmp_path, monkeypatch):
    def refuse(file, operation):
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", refuse)
    with pytest.raises(ConfigError, match=r"run: .*cannot lock a file \(No locks available\).*--run-dir.*-o flock"):
        files.lock_folder(tmp_path / "run")


def test_the_working_directory_can_be_the_run_folder(tiny, one_rank, folder, monkeypatch):
    monkeypatch.chdir(folder)
    run_dir = parse_arguments([f"--yaml_config={CIFAR100}", "--run-dir=tb_logs/.."]).run_dir
    run(tiny(max_epochs=1), one_rank, run_dir, resume="never")
    assert newest_good(folder.with_name("run.1") / "checkpoints")[1]["step"] == 12
