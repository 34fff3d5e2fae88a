"""Checkpoint files are written atomically, refused by name if damaged or unfit, and the newest good one is chosen."""

import errno
import fcntl
import io
import itertools
import json
import multiprocessing
import os
import random
import re
import shutil
import subprocess
import sys
import zipfile
from dataclasses import replace
from hashlib import sha256
from pathlib import Path

import numpy as np
import pytest
import torch

import train
from tests.conftest import CIFAR100, ROOT
from train import Trainer
from utils import seeds
from utils.config.command_line import parse_arguments
from utils.distributed.world import World
from utils.errors import CheckpointError, ConfigError, ExpectedError
from utils.run import folder as run_folder
from utils.run.checkpoint import io as checkpoint
from utils.run.checkpoint.fit import check_config_fits, check_same_run, check_tensors_fit
from utils.run.checkpoint.io import encode, list_checkpoints, newest_good, read_checkpoint, save_checkpoint
from utils.run.checkpoint.schema import CheckpointSchema
from utils.run.checkpoint.state import RunState


@pytest.fixture(scope="module")
def state():
    """The smallest valid state."""
    generator = torch.Generator().manual_seed(0)
    data = {"train_images": 64, "steps_per_epoch": 50, "class_names": ["a", "b"]}
    return {
        "format": checkpoint.FORMAT,
        "config": {},
        "config_name": "tiny",
        "data": data | {"shape": (3, 8, 8), "mean": (0.5, 0.5, 0.5), "std": (0.2, 0.2, 0.2)},
        "epoch": 0,
        "batch": 8,
        "step": 8,
        "model": {"weight": torch.randn(64, 8, generator=generator)},
        "average": None,
        "optimizer": {"state": {}, "param_groups": [{"params": [0], "lr": 0.1}]},
        "grad_scaler": {},
        "plateau": {"patience": 10, "best": 1.5, "bad_epochs": 0, "cuts": 0},
        "logged_sums": [0.0] * 4,
        "best": {"acc1": 0.5, "epoch": 1},
        "seconds": 1.5,
        "timing": [0.5, 64, 1.0],
        "ranks": [{"random": seeds.random_state(), "metric_sums": torch.zeros(4), "buffers": {}}],
        "versions": {},
    }


@pytest.fixture
def folder(tmp_path, state):
    """Checkpoints of steps 8 and 16."""
    for step in (8, 16):
        save_checkpoint(tmp_path, state | {"step": step, "batch": step}, 2, is_best=False)
    return tmp_path


def test_a_checkpoint_holds_exactly_the_keys_of_the_table(tiny, one_rank, tmp_path):
    trainer = Trainer(tiny(max_epochs=1), one_rank, tmp_path, "tiny", "auto")
    trainer.train()
    keys = read_checkpoint(list_checkpoints(tmp_path / "checkpoints")[0]).keys()
    assert keys == CheckpointSchema.model_fields.keys()


def test_a_checkpoint_is_read_as_it_was_written(tmp_path, state):
    save_checkpoint(tmp_path, state, 1, is_best=False)
    path = checkpoint.step_path(tmp_path, 8)
    read = read_checkpoint(path)
    assert torch.equal(read["model"]["weight"], state["model"]["weight"])
    random_before, random_after = state["ranks"][0]["random"], read["ranks"][0]["random"]
    assert random_after["python"] == random_before["python"]
    assert torch.equal(random_after["numpy"][1], random_before["numpy"][1])
    assert torch.equal(random_after["torch"], random_before["torch"])
    assert read["data"] == state["data"] and read["best"] == state["best"]
    assert torch.load(path, weights_only=True).keys() == state.keys()  # any PyTorch reads it
    content = path.read_bytes()
    assert content[-71:] == b"sha256:" + sha256(content[:-71]).hexdigest().encode()


def truncate(content, generator):
    return content[: generator.randrange(len(content))]


def flip_a_byte(content, generator):
    place = generator.randrange(len(content))
    return content[:place] + bytes([content[place] ^ generator.randrange(1, 256)]) + content[place + 1 :]


@pytest.mark.parametrize("damage", [truncate, flip_a_byte])
def test_damaged_anywhere_it_is_skipped_and_reported(folder, damage):
    newest = list_checkpoints(folder)[0]
    whole = newest.read_bytes()
    for seed in range(20):
        damaged = damage(whole, random.Random(seed))
        newest.write_bytes(damaged)
        path, good, complaints = newest_good(folder)
        assert path.name == "step-000000008.pt" and good["step"] == 8
        complaint = f"{newest}: is damaged or not a checkpoint of this program ({len(damaged)} bytes, wrong digest)"
        assert complaints == [complaint], seed


def test_the_log_names_skipped_checkpoints(tiny, one_rank, tmp_path):
    Trainer(tiny(max_epochs=2, keep_checkpoints=2), one_rank, tmp_path, "tiny", "auto").train()
    own = tmp_path / "checkpoints"
    for path in (newest := list_checkpoints(own)[0]), own / "best.pt":
        path.write_bytes(path.read_bytes()[:-1])
    trainer = Trainer(tiny(max_epochs=2), one_rank, tmp_path, "tiny", "auto")
    trainer.train()
    log = (tmp_path / "train.log").read_text(encoding="utf-8")
    assert f"Skipped: {newest}: is damaged" in log
    assert f"Skipped: {own / 'best.pt'}: is damaged" in log
    assert "The best weights so far, of epoch 1, are lost: only later epochs count as best" in log
    assert trainer.progress.best["epoch"] == 2 and read_checkpoint(own / "best.pt")["epoch"] == 2


def test_no_good_one_is_an_error_of_status_4(tiny, one_rank, tmp_path):
    Trainer(tiny(max_epochs=1), one_rank, tmp_path, "tiny", "auto").train()
    damaged = list_checkpoints(tmp_path / "checkpoints")[0]
    damaged.write_bytes(b"nothing")
    before = contents(tmp_path)
    with pytest.raises(CheckpointError, match=r"step-000000004.pt: is damaged .*\n.*--resume never") as raised:
        Trainer(tiny(), one_rank, tmp_path, "tiny", "auto").train()
    assert f"--resume {tmp_path / 'checkpoints/best.pt'} resumes from the best one" in str(raised.value)
    assert raised.value.exit_status == 4
    assert contents(tmp_path) == before


def test_the_last_few_are_kept(tmp_path, state):
    for step in (8, 16, 24, 32):
        save_checkpoint(tmp_path, state | {"step": step}, 3, is_best=False)
    assert [path.name for path in list_checkpoints(tmp_path)] == [
        "step-000000032.pt", "step-000000024.pt", "step-000000016.pt"
    ]  # fmt: skip


# ---- refused: intact, but not for this run


def test_newer_format_is_refused_and_not_skipped(folder, state):
    save_checkpoint(folder, state | {"format": checkpoint.FORMAT + 1, "step": 24}, 3, is_best=False)
    with pytest.raises(CheckpointError, match=r"step-000000024.pt: has format 2, this program reads 1; use"):
        newest_good(folder)


def test_missing_keys_are_named(tmp_path, state):
    path = tmp_path / "step-000000001.pt"
    path.write_bytes(encode({key: value for key, value in state.items() if key not in ("ranks", "best")}))
    with pytest.raises(CheckpointError, match="'best': Field required"):
        read_checkpoint(path)


@pytest.mark.parametrize(
    ("place", "value"),
    [
        ("format", True),
        ("config", [1]),
        ("config", {"lr": {"of": 1}}),
        ("config_name", None),
        ("data", None),
        ("data.shape", (3, 8)),
        ("data.class_names", ["\x1b[2J"]),
        ("epoch", -1),
        ("batch", True),
        ("batch", 9),
        ("step", 9),
        ("step", 10**9),
        ("model.weight", [0.5]),
        ("average", {"module": {}}),
        ("optimizer.state", {0: {"momentum_buffer": "much"}}),
        ("optimizer.param_groups.0.lr", "fast"),
        ("grad_scaler", {"scale": 2.0}),
        ("plateau.unheard_of", 1),
        ("plateau.cuts", 10**10),
        ("logged_sums", [0.0] * 3),
        ("best.acc1", float("nan")),
        ("seconds", "long"),
        ("ranks.0.metric_sums", [0.0] * 4),
        ("ranks.0.random.python", (3, (1, 2), None)),
        ("ranks.0.random.torch", torch.zeros(3, dtype=torch.uint8)),
        ("ranks.0.buffers", {"weight": [0.0]}),
        ("versions", {"torch": 2.14}),
    ],
)  # fmt: skip
def test_a_value_of_a_wrong_type_is_refused_in_a_line_that_names_it(tmp_path, state, place, value):
    path = tmp_path / "step-000000008.pt"
    path.write_bytes(encode(_with_value(state, place.split("."), value)))
    named = re.escape(place.removesuffix(".python").removesuffix(".torch"))
    with pytest.raises(CheckpointError, match=rf"is not a checkpoint .*\b{named}\b") as raised:
        newest_good(tmp_path)
    assert "\n" not in str(raised.value) and raised.value.exit_status == 4


# (what is forged, its value before -> after, a part of the message)
FORGERIES = {
    "sparse": ("model/fc.weight", lambda old: old.to_sparse(), "'fc.weight' not dense -> float32"),
    "expanded": ("model/fc.weight", lambda old: torch.zeros(()).expand(old.shape), "'fc.weight' not dense"),
    "meta": ("model/fc.weight", lambda old: old.to("meta"), "'fc.weight' holds impossible numbers"),
    "integers": ("model/fc.weight", lambda old: old.long(), "'fc.weight' int64 [10, 64] -> float32 [10, 64]"),
    "complex": ("average/module/fc.bias", lambda old: old.cfloat(), "'average.fc.bias' complex64"),
    "NaN": ("average/module/fc.bias", lambda old: old * float("nan"), "'average.fc.bias' holds impossible"),
    "variance": ("model/bn1.running_var", lambda old: -old, "'bn1.running_var' holds impossible numbers"),
    "momentum": ("optimizer/state/0/momentum_buffer", lambda old: old[1:], "'optimizer.0.momentum_buffer' float32"),
    "renamed": ("optimizer/state/0", lambda old: {"velocity": old["momentum_buffer"]}, "'optimizer.0.momentum_b"),
    "nobody's": ("optimizer/state", lambda old: {99: old[0]}, "'optimizer.99.momentum_buffer' float32"),
    "grouped": ("optimizer/param_groups/0/params", lambda old: old[::-1], "'optimizer group 0 [0, 1,"),
    "repeated": ("optimizer/param_groups", lambda old: old * 2, "'optimizer group 1 [0, 1,"),
    "sums": ("ranks/0/metric_sums", lambda old: old[:3], "'ranks.0.metric_sums' float64 [3] -> float64 [4]"),
    "ranks": ("ranks", lambda old: old * 10_000, "batch_size 32 is not a multiple of 10000 ranks"),
    "bytes": ("seconds", lambda old: bytearray(9), "it holds more than uncompressed tensors and plain values"),
    "escapes": ("config/model", lambda old: "\x1b[2J", "model '\\x1b[2J' -> 'resnet8'"),
    "named": ("model", lambda old: old | {"\x1b": old["fc.bias"]}, "'\\x1b' float32"),
}


def test_what_this_learner_would_not_write_is_refused_in_a_line(tiny, one_rank, tmp_path):
    config = tiny(max_epochs=1, ema_decay=0.5)
    Trainer(config, one_rank, tmp_path, "tiny", "auto").train()
    newest, trainer = list_checkpoints(tmp_path / "checkpoints")[0], Trainer(config, one_rank, tmp_path, "tiny")
    trainer.resume = str(newest)
    state = read_checkpoint(newest)
    for name, (place, forge, expected) in FORGERIES.items():
        newest.write_bytes(encode(_with_value(state, place.split("/"), forge)))
        with pytest.raises(CheckpointError, match=re.escape(expected)) as raised:
            trainer._open_folder()
        assert str(raised.value).count("\n") <= 1 and str(raised.value).replace("\n", "").isprintable(), name
    newest.write_bytes(encode(state | {"config": state["config"] | {"lr": "\x1b[2J"}}))
    assert any(note.endswith("lr: '\\x1b[2J' -> 0.1") for note in trainer._open_folder().notes)


def test_a_small_file_that_unpacks_to_a_large_one_is_not_read(tmp_path, state):
    path, whole = tmp_path / "step-000000008.pt", encode(state | {"model": {"weight": torch.zeros(10**6)}})
    with zipfile.ZipFile(io.BytesIO(whole)) as old, zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as new:
        for name in old.namelist():
            new.writestr(name, old.read(name))
        new.comment = b"sha256:" + b"0" * 64
    content = path.read_bytes()[:-71]
    path.write_bytes(content + b"sha256:" + sha256(content).hexdigest().encode())
    with pytest.raises(CheckpointError, match="more than uncompressed tensors"):
        read_checkpoint(path)


def test_a_forged_checkpoint_is_refused_before_anything_moves(tiny, one_rank, tmp_path):
    Trainer(tiny(max_epochs=1), one_rank, tmp_path, "tiny", "auto").train()
    newest = list_checkpoints(tmp_path / "checkpoints")[0]
    newest.write_bytes(encode(read_checkpoint(newest) | {"best": "the best"}))
    before = contents(tmp_path)
    for resume in ("auto", str(newest)):
        with pytest.raises(CheckpointError, match=r"not a checkpoint of this program: 'best': "):
            Trainer(tiny(), one_rank, tmp_path, "tiny", resume).train()
    assert contents(tmp_path) == before


def test_a_pipe_or_a_huge_file_with_a_checkpoints_name_is_skipped(tiny, one_rank, tmp_path):
    """Opening a pipe would wait forever for a writer; the file of zeros takes no space on the disk."""
    Trainer(tiny(max_epochs=1), one_rank, tmp_path, "tiny", "auto").train()
    own = tmp_path / "checkpoints"
    (own / "best.pt").unlink()
    os.mkfifo(own / "best.pt")
    os.mkfifo(own / "step-000000999.pt")
    (own / "step-000000998.pt").touch()
    os.truncate(own / "step-000000998.pt", 2**40)
    Trainer(tiny(max_epochs=2), one_rank, tmp_path, "tiny", str(tmp_path)).train()
    log = (tmp_path / "train.log").read_text(encoding="utf-8")
    assert f"Skipped: {own / 'step-000000999.pt'}: the checkpoint cannot be read: not a regular file" in log
    assert f"Skipped: {own / 'best.pt'}: the checkpoint cannot be read: not a regular file" in log
    assert f"Skipped: {own / 'step-000000998.pt'}: is damaged or not a checkpoint" in log
    assert read_checkpoint(own / "best.pt")["epoch"] == 2


def test_another_model_batch_or_order_is_refused_with_what_differs(tiny, one_rank, tmp_path):
    Trainer(tiny(max_epochs=1), one_rank, tmp_path, "tiny", "auto").train()
    before = contents(tmp_path)
    for change, named in (
        ({"model": "resnet20"}, "model 'resnet8' -> 'resnet20'"),
        ({"batch_size": 16}, "batch_size 32 -> 16"),
        ({"seed": 5}, "seed 0 -> 5"),
        ({"optimizer": "lars"}, "optimizer 'sgd' -> 'lars'"),
    ):
        with pytest.raises(CheckpointError, match=f"does not fit this configuration: {named}\\n"):
            Trainer(tiny(**change), one_rank, tmp_path, "tiny", str(tmp_path)).train()
    assert contents(tmp_path) == before


def test_a_checkpoint_older_than_a_setting_fits(tiny):
    saved = tiny().model_dump(mode="json")
    del saved["shard_groups"], saved["test_time_views"]
    assert check_config_fits(Path("file"), saved, tiny()) == []
    check_same_run(Path("run"), saved, tiny(), epochs_left=True)


def test_a_buffer_that_the_network_does_not_save_is_no_part_of_a_checkpoint_of_ranks(tiny, one_rank, tmp_path):
    class TwoRanks(World):
        def all_gather(self, value):
            return [value, value]

    trainer = Trainer(tiny(ema_decay=0.9), one_rank, tmp_path)
    for network in (trainer.learner.model, trainer.learner.ema.network):
        network.register_buffer("scratch", torch.zeros(2), persistent=False)
    trainer.progress.batch = 1
    state = replace(trainer.state, world=TwoRanks(0, 0, 2, torch.device("cpu"))).gather()
    assert "average.bn1.running_mean" in state["ranks"][0]["buffers"]
    check_tensors_fit(Path("file"), state, trainer.learner.model.state_dict())


def test_another_networks_weights_are_refused_by_name(tiny, one_rank, tmp_path):
    Trainer(tiny(max_epochs=1), one_rank, tmp_path, "tiny", "auto").train()
    before = contents(tmp_path)
    trainer = Trainer(tiny(max_epochs=1), one_rank, tmp_path, "tiny", "auto")
    trainer.learner.model.fc = torch.nn.Linear(64, 10, bias=False)
    trainer.learner.model.extra = torch.nn.Linear(1, 1, bias=False)
    with pytest.raises(CheckpointError, match=r"'extra.weight' missing -> float32 \[1, 1\], 'fc.bias' float32 \[10\]"):
        trainer.train()
    assert contents(tmp_path) == before


def test_what_may_change_is_logged_and_used(tiny, one_rank, tmp_path):
    Trainer(tiny(max_epochs=1), one_rank, tmp_path, "tiny", "auto").train()
    trainer = Trainer(tiny(lr=0.05, data_path="/" + 80 * "x"), one_rank, tmp_path, "tiny", str(tmp_path))
    trainer.train()
    log = (tmp_path / "train.log").read_text()
    assert "Resuming with another lr: 0.1 -> 0.05" in log
    assert f"Resuming with another data_path: './data' -> '/{55 * 'x'}...\n" in log
    assert trainer.learner.optimizer.param_groups[0]["lr"] == 0.05


class _Bomb:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return (Path.touch, (self.path,))


def test_a_pickle_that_would_run_code_is_not_run(tmp_path, state):
    """It has the right digest, as whoever can write the file can compute it."""
    path = tmp_path / "step-000000001.pt"
    path.write_bytes(encode(state | {"best": _Bomb(tmp_path / "sprung")}))
    with pytest.raises(
        CheckpointError, match="is not a checkpoint of this program: it holds more than uncompressed tensors"
    ):
        read_checkpoint(path)
    assert not (tmp_path / "sprung").exists()
    torch.load(path, weights_only=False)
    assert (tmp_path / "sprung").exists()  # the pickle does run code


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
    checkpoint.write_atomically(path, b"old")
    monkeypatch.setattr(os, "fsync", _no_space)
    with pytest.raises(ExpectedError, match="file: cannot be written: No space left on device; an earlier version"):
        checkpoint.write_atomically(path, b"new")
    assert contents(tmp_path) == {"file": b"old"}


def _no_space(_descriptor):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def _run_on_own_disk(folder, size, script):
    """Run a Python script to its end, with `folder` mounted as a disk of this size."""
    mount = f'mount -t tmpfs -o size={size} none "{folder}" && exec "{sys.executable}" -c "$0"'
    command = ["unshare", "--mount", "sh", "-c", mount, script]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if "unshare failed" in result.stderr or "permission denied" in result.stderr.lower():
        pytest.skip(f"cannot mount here: {result.stderr.strip()}")
    return result


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to mount a disk")
def test_a_disk_that_becomes_read_only_in_mid_run(tmp_path, tiny):
    script = f"""
import subprocess, torch
from pathlib import Path
from train import Trainer
from utils.run.checkpoint.io import newest_good
from utils.config import Config
from utils.distributed.world import World
from utils.errors import ExpectedError
folder = Path({str(tmp_path)!r})
trainer = Trainer(Config(**{tiny(max_epochs=3).model_dump()!r}), World(0, 0, 1, torch.device("cpu")), folder / "run")
validate = trainer.validate_one_epoch
def fail_in_the_second_epoch():
    if trainer.progress.epoch == 1:
        for options in ("bind", "remount,bind,ro"):
            subprocess.run(["mount", "-o", options, "run/checkpoints", "run/checkpoints"], cwd=folder, check=True)
    return validate()
trainer.validate_one_epoch = fail_in_the_second_epoch
try:
    trainer.train()
except ExpectedError as error:
    print("error:", error, "; status", error.exit_status)
print(newest_good(folder / "run/checkpoints")[1]["epoch"])
"""
    result = _run_on_own_disk(tmp_path, "64m", script)
    *_, error, epoch = result.stdout.splitlines() or [result.stderr]
    assert error.startswith(f"error: {tmp_path}/run"), result.stderr
    assert "cannot be written: Read-only file system" in error and error.endswith("; status 1")
    assert epoch == "1"


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to mount a small disk")
def test_a_really_full_disk(tmp_path, state):
    """4 MB hold the first checkpoint but not the next: the first stays intact, and no partial file is left."""
    script = f"""
import torch
from pathlib import Path
from utils.run.checkpoint.io import newest_good, save_checkpoint
from utils.errors import ExpectedError
folder = Path({str(tmp_path)!r})
for step, megabytes in ((1, 2), (2, 3)):
    state = torch.load({str(tmp_path.parent / "state.pt")!r})
    state |= {{"step": step, "batch": step, "model": {{"weight": torch.zeros(megabytes, 250_000)}}}}
    try:
        save_checkpoint(folder, state, 1, is_best=False)
    except ExpectedError as error:
        print("error:", error, "; status", error.exit_status)
print(newest_good(folder)[0].name, sorted(path.name for path in folder.iterdir()))
"""
    torch.save(state, tmp_path.parent / "state.pt")
    result = _run_on_own_disk(tmp_path, "4m", script)
    assert result.stdout.splitlines() == [
        f"error: {tmp_path}/step-000000002.pt: cannot be written: No space left on device; an earlier "
        "version of the file is unchanged ; status 1",
        "step-000000001.pt ['step-000000001.pt']",
    ], result.stderr


@pytest.mark.parametrize(
    ("bad", "cause"),
    [
        ("weight", "the update caused it, at"),
        ("bn.running_var", "all are BatchNorm's statistics, so activations grew too large, at"),
    ],
)
def test_weights_that_are_not_finite_are_never_saved(tmp_path, state, bad, cause):
    broken = {"fine": torch.ones(2), bad: torch.tensor([1.0, float("inf")])}
    message = (
        f"after step 8, 1 of the network's 2 tensors .* first {bad};.*\n.* finite: {cause} learning rate 0.1; a lower"
    )
    with pytest.raises(ExpectedError, match=message):
        save_checkpoint(tmp_path, state | {"model": broken}, 2, is_best=False)
    assert not list(tmp_path.iterdir())


def test_after_a_power_cut_the_records_reach_to_the_checkpoint(tiny, one_rank, tmp_path, monkeypatch):
    """A power cut keeps of a file only what was synced to the disk."""
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
    Trainer(tiny(), one_rank, tmp_path, "tiny", "auto").train()
    assert found == [(4, [1]), (8, [1, 2])]


def test_a_kill_between_the_two_writes_loses_no_best_weights(tiny, one_rank, tmp_path, monkeypatch):
    """Otherwise the run would count as finished without its best weights."""
    really = checkpoint.write_atomically

    def write_and_die(path, content):
        really(path, content)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "write_atomically", write_and_die)
        with pytest.raises(KeyboardInterrupt):
            Trainer(tiny(max_epochs=1), one_rank, tmp_path, "tiny", "auto").train()
    trainer = Trainer(tiny(max_epochs=1), one_rank, tmp_path, "tiny", "auto")
    trainer.train()
    assert trainer.progress.best["epoch"] == 1 == read_checkpoint(tmp_path / "checkpoints/best.pt")["epoch"]


def test_validation_does_not_save_again_what_was_saved_before_it(tiny, one_rank, tmp_path, monkeypatch):
    saved = []

    def save(folder, state, keep, *, is_best):
        saved.append(state["step"])
        save_checkpoint(folder, state, keep, is_best=is_best)

    monkeypatch.setattr(train, "save_checkpoint", save)
    Trainer(tiny(max_epochs=1, checkpoint_every_steps=2), one_rank, tmp_path, "tiny", "auto").train()
    assert saved == [2, 4, 4]  # the last one has the result of the validation


def test_temporary_files_of_a_killed_writer_are_removed(tiny, one_rank, tmp_path):
    Trainer(tiny(max_epochs=1), one_rank, tmp_path, "tiny", "auto").train()
    leftover = tmp_path / "checkpoints" / ".step-000000008.pt.123.tmp"
    leftover.write_bytes(b"half")
    Trainer(tiny(max_epochs=1), one_rank, tmp_path, "tiny", "auto").train()
    assert not leftover.exists()


# ---- run folders


def test_a_second_run_in_one_folder_is_refused(tiny, one_rank, tmp_path, monkeypatch):
    refused = []
    trainer = Trainer(tiny(max_epochs=1), one_rank, tmp_path)
    validate = trainer.validate_one_epoch

    def start_another():
        before = contents(tmp_path)
        for resume in ("auto", "never"):
            with pytest.raises(ConfigError, match="another run is writing here; wait for it or choose another"):
                Trainer(tiny(max_epochs=1), one_rank, tmp_path, "tiny", resume).train()
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
    lock = run_folder.lock_folder(tmp_path / "run")
    worker = context.Process(target=wait_for, args=(ready, enough), daemon=True)
    worker.start()
    assert ready.wait(60)
    with pytest.raises(ConfigError, match="another run is writing here"):
        run_folder.lock_folder(tmp_path / "run")  # and the worker's copy does not release it
    lock.close()
    run_folder.lock_folder(tmp_path / "run").close()
    enough.set()
    worker.join()


@pytest.mark.parametrize("name", ["checkpoints/best.pt", "deep/best.pt"])
def test_a_run_can_resume_from_a_checkpoint_in_the_folder_that_is_moved_aside(tiny, one_rank, tmp_path, name):
    folder = tmp_path / "run"
    Trainer(tiny(max_epochs=1), one_rank, folder, "tiny", "auto").train()
    (folder / name).parent.mkdir(exist_ok=True)
    if not (folder / name).exists():
        (folder / "checkpoints/best.pt").rename(folder / name)
    trainer = Trainer(tiny(max_epochs=2), one_rank, folder, "tiny", str(folder / name))
    trainer.train()
    assert trainer.progress.epoch == 2 and len(list_checkpoints(folder / "checkpoints")) == 2


def test_another_runs_checkpoint_of_the_same_step_overwrites_none(tiny, one_rank, tmp_path):
    for name, workers in (("run", 0), ("other", 1)):
        config = tiny(max_epochs=1, num_data_workers=workers)
        Trainer(config, one_rank, tmp_path / name, "tiny", "auto").train()
    own = tmp_path / "run/checkpoints"
    before = (own / "step-000000004.pt").read_bytes()
    shutil.copy(tmp_path / "other/checkpoints/step-000000004.pt", own / "step-000000099.pt")
    Trainer(tiny(max_epochs=1, keep_checkpoints=9), one_rank, tmp_path / "run", "tiny", "auto").train()
    assert (own / "step-000000004.pt.superseded").read_bytes() == before


def test_a_start_killed_while_it_goes_back_loses_nothing(tiny, one_rank, tmp_path, monkeypatch):
    """Going back to step 4 of 12 moves two checkpoints and cuts the records; a kill comes before one of these."""
    config, whole = tiny(max_epochs=3, keep_checkpoints=9), tmp_path / "whole"
    Trainer(config, one_rank, whole, "tiny", "auto").train()
    for event in (1, 2, 3):
        folder = shutil.copytree(whole, tmp_path / f"run-{event}")
        command = str(folder / "checkpoints/step-000000004.pt")
        with monkeypatch.context() as patch:
            remaining = iter(range(1, event))
            for function in ("_set_aside", "_cut_records"):
                patch.setattr(run_folder, function, _interrupted_after(remaining, getattr(run_folder, function)))
            with pytest.raises(KeyboardInterrupt):
                Trainer(config, one_rank, folder, "tiny", command).train()
        steps = [json.loads(line)["step"] for line in (folder / "metrics.jsonl").read_text().splitlines()]
        assert max(steps) >= read_checkpoint(list_checkpoints(folder / "checkpoints")[0])["step"]
        Trainer(config, one_rank, folder, "tiny", command).train()
        states = [read_checkpoint(path / "checkpoints/step-000000012.pt") for path in (folder, whole)]
        assert all(torch.equal(value, states[1]["model"][name]) for name, value in states[0]["model"].items()), event


def _interrupted_after(remaining, function):
    """Replace `function` by one that raises KeyboardInterrupt once the iterator `remaining` is exhausted."""

    def call_or_interrupt(*arguments):
        if next(remaining, None) is None:
            raise KeyboardInterrupt
        return function(*arguments)

    return call_or_interrupt


def _with_value(state, place, value):
    """Return a copy of nested tables and lists with `value`, or what it makes of the old value, at `place`."""
    if not place:
        return value(state) if callable(value) else value
    if isinstance(state, list):
        return [_with_value(item, place[1:], value) if str(n) == place[0] else item for n, item in enumerate(state)]
    key = int(place[0]) if place[0].isdigit() else place[0]
    return state | {key: _with_value(state.get(key), place[1:], value)}


def test_damaged_lines_of_the_metrics_do_not_prevent_resuming(tiny, one_rank, tmp_path):
    Trainer(tiny(max_epochs=1), one_rank, tmp_path, "tiny", "auto").train()
    metrics = tmp_path / "metrics.jsonl"
    record = b'{"kind": "epoch", "step": %s, "epocj": 1, "clock_seconds": {}}\n'
    damaged = [b"[" * 100_000 + b"\n", record % b"4", record % b'"4"', b'\xff\xfe{"kind']
    metrics.write_bytes(metrics.read_bytes() + b"".join(damaged))
    Trainer(tiny(max_epochs=2), one_rank, tmp_path, "tiny", str(tmp_path)).train()
    assert [json.loads(line)["step"] for line in metrics.read_text().splitlines()][-1] == 8


def test_a_folder_that_cannot_be_used_is_named(tiny, one_rank, tmp_path):
    Trainer(tiny(max_epochs=1), one_rank, tmp_path, "tiny", "auto").train()
    (tmp_path / "checkpoints/.step.tmp").mkdir()  # a start removes temporary files, but cannot remove a folder
    with pytest.raises(ExpectedError, match=r"\.step\.tmp: cannot be used: "):
        Trainer(tiny(max_epochs=1), one_rank, tmp_path, "tiny", "auto").train()


def test_the_lock_of_a_folder_that_is_moved_aside_does_not_lock_the_new_one(tmp_path, monkeypatch):
    """After the second process has opened the lock file and before it locks it, the first one moves the folder aside,
    starts again and releases the old lock."""
    really, held = fcntl.flock, []

    def meanwhile(file, operation):
        if not held:
            held.append(None)
            (tmp_path / "run").rename(tmp_path / "run.1")
            held.append(run_folder.lock_folder(tmp_path / "run"))
        really(file, operation)

    monkeypatch.setattr(fcntl, "flock", meanwhile)
    with pytest.raises(ConfigError, match="another run is writing here"):
        run_folder.lock_folder(tmp_path / "run")
    held[1].close()
    run_folder.lock_folder(tmp_path / "run").close()


def test_a_start_that_fails_after_moving_the_earlier_run_aside_leaves_no_lock(tiny, one_rank, tmp_path, monkeypatch):
    """Also while the error is kept, as in a notebook."""
    Trainer(tiny(max_epochs=1), one_rank, tmp_path / "run", "tiny", "auto").train()

    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(run_folder, "_records", full)
    with pytest.raises(ExpectedError, match="No space left") as kept:
        Trainer(tiny(max_epochs=1), one_rank, tmp_path / "run", "tiny", "never").train()
    assert (tmp_path / "run.1").exists() and kept.value.__traceback__
    run_folder.lock_folder(tmp_path / "run").close()


def test_checkpoint_every_steps_costs_nothing_without_checkpoints(tiny, one_rank, tmp_path, monkeypatch):
    really, checked = RunState.check_finite, []

    def check_finite(state, average):
        checked.append(state.learner.steps)
        return really(state, average)

    monkeypatch.setattr(RunState, "check_finite", check_finite)
    for every in (None, 1):
        Trainer(tiny(save_checkpoint=False, checkpoint_every_steps=every), one_rank, tmp_path / str(every)).train()
    assert checked[: len(checked) // 2] == checked[len(checked) // 2 :]


def test_a_file_system_without_locks_is_named(tmp_path, monkeypatch):
    def refuse(file, operation):
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", refuse)
    with pytest.raises(ConfigError, match=r"run: .*cannot lock a file \(No locks available\).*--run-dir.*-o flock"):
        run_folder.lock_folder(tmp_path / "run")


def test_the_working_directory_can_be_the_run_folder(tiny, one_rank, tmp_path, monkeypatch):
    (tmp_path / "run/deep").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "run")
    folder = parse_arguments([f"--yaml_config={CIFAR100}", "--run-dir=deep/.."]).run_dir
    for _ in range(2):
        Trainer(tiny(max_epochs=1), one_rank, folder, "tiny", "never").train()
    for run in ("run", "run.1"):
        assert newest_good(tmp_path / run / "checkpoints")[0] is not None


def contents(folder):
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.name != "train.log"
    }
