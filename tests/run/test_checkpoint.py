"""Checkpoint files are written atomically, refused by name if damaged or unfit, and the newest good one is chosen."""

import errno
import io
import json
import os
import random
import shutil
from dataclasses import replace
from functools import partial
from hashlib import sha256
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
import torch

import train
from tests.conftest import contents, read_records, run
from utils import files, seeds
from utils.errors import CheckpointError, ExpectedError
from utils.run import checkpoint
from utils.run import folder as run_folder
from utils.run.checkpoint import check_settings, encode, list_checkpoints, newest_good, read_checkpoint, save_checkpoint
from utils.run.folder import open_folder


@pytest.fixture
def saved(folder):
    return folder / "checkpoints"


@pytest.fixture
def state(finished):
    return read_checkpoint(finished / "checkpoints/step-000000012.pt")


@pytest.fixture
def resume(tiny, one_rank, folder):
    """resume(path): open the copied run from `path` without training; return what is opened, and its lock is free."""
    opening = train.Trainer(tiny(max_epochs=3, keep_checkpoints=9), one_rank).run

    def open_from(path="auto", run_dir=folder):
        opening.folder, opening.log.waiting = run_dir, []
        lock, state, _ = open_folder(opening, str(path))
        lock.close()
        return state

    open_from.lines = lambda: opening.log.waiting

    return open_from


def test_a_checkpoint_holds_exactly_the_keys_of_the_table_and_any_pytorch_reads_it(saved):
    path = list_checkpoints(saved)[0]
    state = torch.load(path, weights_only=True)
    assert state.keys() == checkpoint.CONTENT.keys()
    assert state["timing"][1] == 11 * 32  # images of all windows but the first, of one batch
    content = path.read_bytes()
    assert content[-71:] == b"sha256:" + sha256(content[:-71]).hexdigest().encode()


@pytest.mark.parametrize("damage", ["truncate", "flip a byte"])
def test_damaged_anywhere_it_is_skipped_and_reported(saved, damage):
    newest = list_checkpoints(saved)[0]
    whole = newest.read_bytes()
    for seed in range(10):
        generator = random.Random(seed)
        place = generator.randrange(len(whole))
        flipped = bytes([whole[place] ^ generator.randrange(1, 256)])
        damaged = whole[:place] + (flipped + whole[place + 1 :] if damage == "flip a byte" else b"")
        newest.write_bytes(damaged)
        path, good, complaints = newest_good(saved)
        assert path.name == "step-000000008.pt" and good["step"] == 8
        assert complaints == [f"{newest}: is damaged or not a checkpoint of this program ({len(damaged)} bytes)"], seed


@pytest.mark.parametrize("failures", [3, 9])
def test_one_that_cannot_be_read_is_tried_again_before_an_older_one_is_used(saved, monkeypatch, failures):
    newest, older = list_checkpoints(saved)[:2]
    read, fails = Path.read_bytes, [True] * failures

    def read_bytes(path):
        if path == newest and fails:
            fails.pop()
            raise OSError(errno.ESTALE, "Stale file handle", str(path))
        return read(path)

    monkeypatch.setattr(Path, "read_bytes", read_bytes)
    monkeypatch.setattr(checkpoint.time, "sleep", lambda _: None)
    path, _, complaints = newest_good(saved)
    skipped = [f"{newest}: the checkpoint cannot be read: Stale file handle"]
    assert (path, complaints) == ((newest, []) if failures == 3 else (older, skipped))


def test_the_log_names_skipped_checkpoints_and_lost_best_weights(resume, saved):
    for path in (newest := list_checkpoints(saved)[0]), saved / "best.pt":
        path.write_bytes(path.read_bytes()[:-1])
    best = read_checkpoint(saved / "step-000000008.pt")["best"]["epoch"]
    opened = resume()
    assert [line.partition(" (")[0] for line in resume.lines()] == [
        f"Skipped: {newest}: is damaged or not a checkpoint of this program",
        f"Skipped: {saved / 'best.pt'}: is damaged or not a checkpoint of this program",
        f"Resuming from {saved / 'step-000000008.pt'}: epoch 3, batch 0, step 8",
        f"The best weights so far, of epoch {best}, are lost: only later epochs count as best",
    ]
    assert opened["best"] == checkpoint.NO_BEST and not (saved / "best.pt").exists()


def test_without_a_good_one_it_is_an_error_of_status_4(folder, resume):
    saved = folder / "checkpoints"
    for path in list_checkpoints(saved):
        path.write_bytes(b"nothing")
    before = contents(folder)
    with pytest.raises(CheckpointError, match=r"step-000000012.pt: is damaged .*\n.*best.pt with --resume") as raised:
        resume()
    assert raised.value.exit_status == 4 and contents(folder) == before
    (saved / "best.pt").unlink()
    with pytest.raises(CheckpointError, match="is intact; start a new run"):
        resume()


@pytest.mark.parametrize(("change", "message"), [
    ({"format": checkpoint.FORMAT + 1}, "is not a checkpoint of this version"),  # and no older one is used instead
    ({"best": "the best"}, "is not a checkpoint of this version"),
    ({"average": Path("/")}, "is no file of torch.save with only tensors and plain values")])  # fmt: skip
def test_another_versions_or_programs_file_is_refused(saved, state, change, message):
    """With the right digest. The pickle of a path calls a function."""
    newest = list_checkpoints(saved)[0]
    newest.write_bytes(encode(state | change))
    with pytest.raises(CheckpointError, match=f"{newest}: {message}"):
        newest_good(saved)


def test_another_model_batch_or_order_is_refused_with_what_differs(tiny):
    """A setting that the saved run did not have yet differs from none."""
    saved = tiny().model_dump(mode="json")
    del saved["holdout_images"]
    assert check_settings(Path("file"), saved, tiny(), must_equal=True) == []
    named = 'seed 0 -> 5, batch_size 32 -> 16, model "resnet8" -> "resnet20"'
    with pytest.raises(CheckpointError, match=f"does not fit this configuration: {named}\n"):
        check_settings(Path("file"), saved, tiny(model="resnet20", batch_size=16, seed=5), must_equal=False)


def test_other_tensors_are_refused_by_name(tiny, one_rank, folder):
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


def test_an_average_or_moments_of_other_shapes_do_not_fit_but_half_precision_does(state):
    network = {name: value.bfloat16() if value.is_floating_point() else value for name, value in state["model"].items()}
    checkpoint.check_tensors_fit(Path("file"), state, network)
    optimizer, moments = torch.optim.AdamW([torch.ones(2)]), {"exp_avg": torch.ones(3), "exp_avg_sq": torch.ones(3)}
    saved = optimizer.state_dict() | {"state": {0: moments}}
    other = {"optimizer": saved, "average": {"module": network | {"a": moments}}}
    with pytest.raises(CheckpointError, match=r"'average.a' dict -> missing, ") as refused:
        checkpoint.check_tensors_fit(Path("file"), state | other, network, optimizer)
    assert all(f"'optimizer.0.{name}' float32 [3] -> float32 [2]" in str(refused.value) for name in moments)


def test_what_may_change_is_logged_and_used_also_after_damaged_lines_of_the_metrics(tiny, one_rank, folder):
    metrics = folder / "metrics.jsonl"
    metrics.write_bytes(metrics.read_bytes() + b'\0\0\n\xff\xfe\n{"kind')
    trainer = run(tiny(max_epochs=4, lr=0.05), one_rank, folder, resume=str(folder))
    log = (folder / "train.log").read_text()
    assert "Resuming with another lr 0.1 -> 0.05" in log and "bits" not in log
    assert trainer.learner.optimizer.param_groups[0]["lr"] == 0.05
    assert [json.loads(line)["step"] for line in metrics.read_text().splitlines()][-1] == 16


def test_a_resume_with_other_threads_versions_or_processors_says_that_the_bits_may_differ(resume, saved, state):
    """They add in another order. The stored versions are compared with the present ones."""
    other = {"torch": "2.0.0", "threads": 999, "instruction_set": "AVX", "device": "a GPU"}
    (saved / "step-000000012.pt").write_bytes(encode(state | {"versions": other}))
    resume()
    (note,) = [line for line in resume.lines() if "last bits" in line]
    assert all(f"{key} {json.dumps(value)} -> " in note for key, value in other.items()) and note.count("\n") == 0


def test_a_best_accuracy_over_another_validation_set_is_no_longer_the_best(tiny, one_rank, tmp_path):
    """All 100 % of 30 images would stay the best for ever."""
    few, all_images = tiny(max_epochs=1, limit_valid_batches=1, valid_batch_size_per_gpu=30), tiny(max_epochs=2)
    run(few, one_rank, tmp_path)
    (path,) = list_checkpoints(tmp_path / "checkpoints")
    state = read_checkpoint(path)
    measures = {"images": 30, "test_time_views": 1, "ema_decay": None}
    assert (state["best"]["images"], state["best"]["measures"]) == (30, measures)
    for name in (path.name, "best.pt"):
        (path.parent / name).write_bytes(encode(state | {"best": state["best"] | {"acc1": 1.0}}))
    trainer = run(all_images, one_rank, tmp_path, resume=str(tmp_path))
    assert trainer.run.best["epoch"] == 2 and trainer.run.best["acc1"] < 1
    assert read_checkpoint(path.with_name("best.pt"))["epoch"] == 2
    line = "Validation has changed (images 30 -> 200): 100.00% of epoch 1 cannot be compared"
    assert line in (tmp_path / "train.log").read_text()
    for epochs in (2, 1):  # nothing is left to train: the best stays
        run(few.model_copy(update={"max_epochs": epochs}), one_rank, tmp_path, resume=str(tmp_path))
    assert read_checkpoint(path.with_name("best.pt"))["epoch"] == 2


def test_random_states_are_restored():
    def sample():
        return [(random.random(), np.random.rand(), np.random.randn(), torch.rand(()).item()) for _ in range(2)]

    assert len({seeds.seed_of(*place) for place in np.ndindex(3, 3, 3)}) == 27  # (seed, rank, step)
    random.seed(1), np.random.seed(2), torch.manual_seed(3), np.random.randn()  # which draws two numbers at once
    saved = torch.load(io.BytesIO(encode({"random": seeds.random_state()})), weights_only=True)["random"]
    samples = sample()
    seeds.restore_random_state(saved)
    assert sample() == samples


def test_at_another_world_size_each_rank_and_step_has_a_new_random_stream(tiny, one_rank, tmp_path):
    of_rank, samples = train.Trainer(tiny(micro_batch_size=16), one_rank, tmp_path).run, set()
    state = of_rank.gather() | {"batch": 3}
    for rank, step in ((0, 0), (1, 0), (1, 4)):
        of_rank.world = replace(one_rank, rank=rank)
        of_rank.restore(state | {"step": step, "ranks": state["ranks"] * 2})
        samples.add(torch.rand(()).item())
        assert of_rank.learner.sums.finite_micro_batches() == 3 * 2
    assert len(samples) == 3
    of_rank.world = one_rank
    of_rank.restore(state)
    assert torch.equal(torch.get_rng_state(), state["ranks"][0]["random"]["torch"]), "at the same, its own stream"


def test_a_failed_write_leaves_the_old_file_only(tmp_path, monkeypatch):
    path, synced = tmp_path / "file", []
    monkeypatch.setattr(os, "fsync", lambda file: synced.append(os.fstat(file).st_size))
    files.write_atomically(path, b"old")
    monkeypatch.setattr(os, "fsync", Mock(side_effect=OSError(errno.ENOSPC, "No space left on device")))
    with pytest.raises(ExpectedError, match=r"file: cannot be written: No space .*; an earlier version .*, if any"):
        files.write_atomically(path, b"new")
    assert contents(tmp_path) == {"file": b"old"} and synced[0] == 3  # bytes


def test_the_last_few_are_kept_and_weights_that_are_not_finite_never_saved(tmp_path, state):
    for step in (8, 16, 24, 32):
        save_checkpoint(tmp_path, state | {"step": step}, 3, is_best=False)
    kept = ["step-000000016.pt", "step-000000024.pt", "step-000000032.pt"]
    assert names(tmp_path) == kept
    broken = {"fine": torch.ones(2), "bad": torch.tensor([1.0, float("inf")])}
    with pytest.raises(ExpectedError, match=r"after step 12, 1 of the network's 2 tensors .* first bad;.*\na lower lr"):
        save_checkpoint(tmp_path, state | {"model": broken}, 2, is_best=False)
    assert names(tmp_path) == kept


def test_after_a_power_cut_the_records_reach_to_the_checkpoint(tiny, one_rank, tmp_path, monkeypatch):
    """A power cut keeps of a file only what was synced to the disk. The last checkpoint before an epoch's end is not
    written again by the validation."""
    metrics, durable, found, really = tmp_path / "metrics.jsonl", {}, [], os.fsync

    def fsync(descriptor):
        really(descriptor)
        durable[os.fstat(descriptor).st_ino] = os.fstat(descriptor).st_size

    def save(folder, state, keep, *, is_best):
        save_checkpoint(folder, state, keep, is_best=is_best)
        assert folder.stat().st_ino in durable, "the new name would be lost"
        assert all(durable.get(path.stat().st_ino) == path.stat().st_size for path in folder.glob("*.pt"))
        lines = metrics.read_bytes()[: durable.get(metrics.stat().st_ino, 0)].splitlines()
        found.append((state["step"], [row["epoch"] for row in map(json.loads, lines) if row["kind"] == "epoch"]))

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(checkpoint, "save_checkpoint", save)
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
            (tmp_path / "checkpoints/.step-000000008.pt.123.tmp").write_bytes(b"half")
            (tmp_path / ".config.yaml.123.0a.tmp").write_bytes(b"half")
            raise KeyboardInterrupt

    config = tiny(max_epochs=1, checkpoint_every_steps=2)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(checkpoint, "write_atomically", write_and_die)
        run(config, one_rank, tmp_path)
    trainer = run(config, one_rank, tmp_path)
    assert trainer.run.best["epoch"] == 1 == read_checkpoint(tmp_path / "checkpoints/best.pt")["epoch"]
    assert not [*tmp_path.rglob(".*.tmp")]


def names(folder):
    return [path.name for path in sorted(folder.iterdir())]


def test_resume_path_copies_the_checkpoints_into_the_run(resume, saved, tmp_path):
    """So a kill before the next save loses nothing, and the best weights are never missing."""
    best, copies = resume(tmp_path / "run", tmp_path / "second")["best"]["epoch"], tmp_path / "second/checkpoints"
    steps = {name: read_checkpoint(copies / name)["step"] for name in names(copies)}
    assert steps == {"best.pt": 4 * best, "step-000000012.pt": 12} and best > 0
    (saved / "best.pt").unlink()
    assert resume(tmp_path / "run", tmp_path / "third")["best"]["epoch"] == 0


def test_going_back_sets_aside_later_checkpoints_and_of_each_name_only_the_last(resume, saved, state):
    later = encode(state | {"best": {"acc1": 0.9, "epoch": 3}})  # as if the accuracy had risen
    for step, kept, best in ((8, [4, 8], 0), (4, [4], 0), (4, [4], 0)):
        (saved / "best.pt").write_bytes(later)
        assert resume(saved / f"step-00000000{step}.pt")["best"]["epoch"] == best
        assert sorted(read_checkpoint(path)["step"] for path in list_checkpoints(saved)) == kept
        assert (saved / "best.pt.1").read_bytes() == later and not (saved / "best.pt").exists()
    assert names(saved) == ["best.pt.1", "step-000000004.pt", "step-000000008.pt.1", "step-000000012.pt.1"]


def test_a_start_killed_while_it_goes_back_loses_nothing(resume, finished, tmp_path, monkeypatch):
    """Going back to step 4 of 12 moves two checkpoints and cuts the records; a kill comes before one of these."""

    def interrupted(function, *arguments):
        if next(remaining, None) is None:
            raise KeyboardInterrupt
        return function(*arguments)

    for event in (1, 2, 3):
        folder = shutil.copytree(finished, tmp_path / f"run-{event}")
        step_4 = folder / "checkpoints/step-000000004.pt"
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            remaining = iter(range(1, event))
            for function in ("_set_aside", "_cut_records"):
                patch.setattr(run_folder, function, partial(interrupted, getattr(run_folder, function)))
            resume(step_4, folder)
        steps = [record["step"] for record in read_records(folder, "epoch")]
        assert max(steps) >= read_checkpoint(list_checkpoints(folder / "checkpoints")[0])["step"]
        assert resume(step_4, folder)["step"] == 4 and list_checkpoints(folder / "checkpoints") == [step_4]


def test_another_runs_checkpoint_of_the_same_step_overwrites_none(resume, saved, state):
    before, other = (saved / "step-000000004.pt").read_bytes(), encode(state | {"step": 4, "seconds": 1.5})
    (saved / "step-000000099.pt").write_bytes(other)
    resume(saved / "step-000000099.pt")
    assert [(saved / f"step-000000004.pt{end}").read_bytes() for end in ("", ".1")] == [other, before]
