"""1, 2, 3 and 4 processes, gradient accumulation and all options of DDP give the same numbers."""

import copy
import itertools
import os
import re
import shutil
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

import train
import utils.distributed.ranks
import utils.distributed.world
import utils.training.batches
from models import build_model
from tests.conftest import read_records, tiny_config
from tests.processes import complaints, run_job
from utils.config.command_line import Arguments
from utils.data.loader import AugmentedImages, DeviceLoader
from utils.data.sampling import Sampler
from utils.distributed.ddp import distribute, synchronise_batch_norm
from utils.distributed.world import World, divide_batch
from utils.errors import ConfigError
from utils.run.checkpoint import newest_good
from utils.run.logger import RunLogger
from utils.training.optimizers.build import build_optimizer

BATCH = 24  # 1, 2, 3 and 4 ranks share it evenly


def configuration(**changes):
    return tiny_config(**{"batch_size": BATCH, "limit_valid_batches": None} | changes)


def train_some_steps(world, num_steps=10, **changes):
    """Return the state after some steps, and the number of the gradients' storages.

    BatchNorm is in eval mode, which does not keep an untrained network's activations in range: in float32, rounding
    grows to 2e-4 within 20 steps, also with one process and another order of summation. So this is in float64."""
    torch.set_default_dtype(torch.float64)
    with mock.patch.object(train, "check_network", wraps=train.check_network) as check:
        trainer = train.Trainer(configuration(limit_train_batches=num_steps, **changes), world)
    trainer.learner.model.train()
    for module in trainer.learner.model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.eval()
    for images, labels in trainer.loaders.train:
        trainer.learner.update(images.double(), labels)
    parameters = list(trainer.learner.model.parameters())
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    return {
        "weights": torch.cat([parameter.detach().flatten() for parameter in parameters]),
        "gradients": torch.cat([gradient.flatten() for gradient in gradients]),
        "metrics": trainer.learner.sums.average(world),
        "sample": torch.rand(1).item(),
        "network checks": check.call_count,
        "storages": len({gradient.untyped_storage().data_ptr() for gradient in gradients}),
    }


VARIANTS: dict[str, dict[str, Any]] = {
    "small buckets": {"bucket_cap_mb": 0.02},
    "all at once": {"enable_extra_opts": True, "micro_batch_size": 6, "enable_nhwc": True},
    "accumulated, zeroed": {"micro_batch_size": 12},
    "no communication": {"parallel": "no_communication"},
}


def save_result(folder, function, *arguments):
    def action(world):
        torch.save(function(world, *arguments), folder / f"{world.rank}.pt")

    return utils.distributed.ranks.run_ranks(action, "cpu", 60)


def on_ranks(folder, world_size, function, *arguments):
    """Return what `function(world, *arguments)` returns on each rank. Only PyTorch warns on stderr."""
    own = folder / f"on-{world_size}"
    ended = run_job(own, world_size, save_result, own, function, *arguments)
    assert ([process.status for process in ended], complaints(ended)) == ([0] * world_size, [])
    return [torch.load(own / f"{rank}.pt") for rank in range(world_size)]


def validate(world):
    """Validate the first few images, also in fewer batches than there are ranks."""
    trainer = train.Trainer(configuration(), world)
    trainer.run.log = RunLogger(Path(), enabled=False, to_screen=False)
    whole, results = trainer.loaders.valid, {}
    for size in (2, 7, 100):
        sampler = Sampler(size, batch_size=5, rank=world.rank, world_size=world.world_size, training=False)
        loader = DeviceLoader.__new__(DeviceLoader)
        loader.__dict__.update(whole.__dict__ | {"sampler": sampler})
        trainer.loaders = replace(trainer.loaders, valid=loader)
        results[size], _ = trainer.validate_one_epoch()
    return results


def repeat_a_step(world):
    """Return the gradients of the same step, taken three times, and whether building DDP changed nothing."""
    torch.manual_seed(0)
    model = build_model(configuration())
    model.forward = forward = model.forward  # as in a user's network whose forward is its own attribute
    weights, generator = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    distributed = distribute(configuration(), model, world)
    unchanged = all(torch.equal(value, weights[name]) for name, value in model.state_dict().items())
    unchanged &= torch.equal(generator, torch.get_rng_state()) and model.forward is forward
    unchanged &= all(parameter.grad is None for parameter in model.parameters())
    torch.manual_seed(world.rank)
    images, gradients = torch.randn(8, 3, 32, 32), []
    for _ in range(3):
        distributed(images).square().sum().backward()
        gradients.append(torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]))
        model.zero_grad(set_to_none=True)
    return gradients, unchanged


def train_and_validate(world, variants):
    """Return the results of `validate` and `repeat_a_step`, and of steps with each of the variants."""
    results = {"validation": validate(world), "repeated": repeat_a_step(world)}
    return results | {name: train_some_steps(world, **changes) for name, changes in variants.items()}


def distance(a, b):
    """Distance in the Euclidean norm, relative to b."""
    return float((a.double() - b.double()).norm() / b.double().norm())


ACCUMULATIONS = {f"accumulated {number}": {"micro_batch_size": BATCH // number} for number in (2, 3, 4)}


@pytest.fixture(scope="module")
def one_process(tmp_path_factory):
    """Results of one process: the references `plain` and `short`, and with accumulation."""
    variants = {"plain": {}, "short": {"num_steps": 3}} | ACCUMULATIONS
    return on_ranks(tmp_path_factory.mktemp("one"), 1, train_and_validate, variants)[0]


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_ranks_equal_one_process(tmp_path, one_process, world_size):
    """In training, and in validation, which counts each image once."""
    results, expected = on_ranks(tmp_path, world_size, train_and_validate, {"plain": {}}), one_process["plain"]
    assert len({result["plain"]["sample"] for result in results}) == world_size  # ranks have different dropout
    for result in results:
        assert result["plain"]["network checks"] == 1
        for name in ("weights", "gradients"):
            assert distance(result["plain"][name], expected[name]) < 1e-6, name
        metrics = result["plain"]["metrics"]
        assert (metrics["images"], metrics["acc1"]) == (10 * BATCH, expected["metrics"]["acc1"])
        assert metrics["loss"] == pytest.approx(expected["metrics"]["loss"], rel=1e-6)
        for size, alone in one_process["validation"].items():
            found = result["validation"][size]
            assert (found["images"], found["acc1"]) == (size, alone["acc1"])
            assert found["loss"] == pytest.approx(alone["loss"], rel=1e-6)
        # otherwise a resumed run of three ranks would differ in the last bit
        (first, *others), unchanged = result["repeated"]
        assert unchanged and first.norm() > 0 and all(torch.equal(first, other) for other in others)


@pytest.mark.parametrize("accumulation", ACCUMULATIONS)
def test_accumulation_equals_one_process(one_process, accumulation):
    for name in ("weights", "gradients"):
        assert distance(one_process[accumulation][name], one_process["plain"][name]) < 1e-6, name


def test_all_options_of_ddp_give_the_same(tmp_path, one_process):
    variants = {name: {"num_steps": 3} | changes for name, changes in VARIANTS.items()}
    first, second = on_ranks(tmp_path, 2, train_and_validate, variants)
    for name in VARIANTS:
        if name != "no communication":
            assert distance(first[name]["weights"], one_process["short"]["weights"]) < 1e-6, name
            assert torch.equal(first[name]["weights"], second[name]["weights"]), name
    assert distance(first["no communication"]["weights"], second["no communication"]["weights"]) > 1e-3
    # gradients stay in the single bucket, however they are cleared
    for name in ("all at once", "accumulated, zeroed"):
        assert first[name]["storages"] == 1, name
    assert first["small buckets"]["storages"] > 3


def run_program(folder, changes, resume="auto"):
    torch.use_deterministic_algorithms(True)
    return train.main(Arguments(configuration(**changes), "test", folder, resume, dry_run=False))


def epochs_of(run, world_size, *resume):
    """Return the epoch records of a whole run on `world_size` ranks."""
    changes = {"ema_decay": 0.8, "checkpoint_every_steps": 1, "keep_checkpoints": 9, "micro_batch_size": BATCH // 2}
    ended = run_job(run.with_name(f"{run.name} on {world_size}"), world_size, run_program, run, changes, *resume)
    assert [process.status for process in ended] == [0] * world_size, ended[0].errors
    return read_records(run, "epoch")


@pytest.fixture(scope="module")
def straight(tmp_path_factory):
    """The folder of runs on one rank, which accumulates, and on two, and their epochs."""
    folder = tmp_path_factory.mktemp("straight")
    return folder, {world_size: epochs_of(folder / str(world_size), world_size) for world_size in (1, 2)}


def test_epoch_metrics_of_two_ranks_equal_accumulation(straight):
    """With BatchNorm in train mode: both see the same micro-batches, so weights and their average are bitwise equal."""
    accumulated, ranks = straight[1].values()
    assert [read_records(straight[0] / name, "start")[0]["world_size"] for name in ("1", "2")] == [1, 2]
    assert len(ranks) == 2
    for here, there in zip(ranks, accumulated, strict=True):
        for key in ("loss/train", "acc1/train", "learning_rate"):
            assert here[key] == there[key], key
        # running statistics are averaged once per epoch over ranks, every step with accumulation
        assert here["loss/valid"] == pytest.approx(there["loss/valid"], rel=1e-5)
        assert here["acc1/valid"] == there["acc1/valid"]


@pytest.mark.parametrize(("before", "after"), [(2, 2), (2, 1), (1, 2)])
def test_runs_resume_in_mid_epoch_with_an_average_at_any_world_size(tmp_path, straight, before, after):
    """After batch 2 of 4, neither the epoch's sums nor BatchNorm's statistics, which differ between ranks, are lost."""
    moved = Path(shutil.copytree(straight[0] / str(before), tmp_path / "moved"))
    for path in sorted((moved / "checkpoints").glob("step-*.pt"))[2:]:
        path.unlink()
    _, middle, _ = newest_good(moved / "checkpoints")
    assert middle is not None and (middle["epoch"], middle["batch"], len(middle["ranks"])) == (0, 2, before)
    assert middle["timing"][1] == BATCH  # counted so far, up to the first log point
    found = epochs_of(moved, after, str(moved))
    assert [row["epoch"] for row in found] == [1, 2]
    for here, there in zip(found, straight[1][after], strict=True):
        for key in ("loss/train", "loss/valid"):
            assert here[key] == (there[key] if before == after else pytest.approx(there[key], rel=1e-5)), key
        for key in ("acc1/train", "acc1/valid", "images/valid", "learning_rate"):
            assert here[key] == there[key], key


def run_with_nan(folder):
    """Run the program; the third batch of rank 1 is NaN."""
    really, batches = utils.training.batches.resize, itertools.count(1)

    def resize(images, size):
        is_nan = next(batches) == 3 and os.environ["RANK"] == "1"
        return really(images, size) * (float("nan") if is_nan else 1)

    utils.training.batches.resize = resize
    return run_program(folder, {"log_freq": 2, "checkpoint_every_steps": 1})


def run_with_a_faulty_worker(folder, killed):
    """Run the program; the loader worker of rank 1 fails at its sixth batch, the second of the second epoch."""
    really, batches = AugmentedImages.__getitem__, itertools.count(1)

    def faulty(self, batch):
        if next(batches) == 6 and os.environ["RANK"] == "1":
            if killed:
                os.kill(os.getpid(), signal.SIGKILL)
            raise ZeroDivisionError("the sixth batch")
        return really(self, batch)

    AugmentedImages.__getitem__ = faulty
    return run_program(folder, {"data_loader": "torchvision", "num_data_workers": 1, "limit_valid_batches": 1})


NAN = "error: .*the loss stopped being a finite number in epoch 1, iteration 2,.*\n.*usual remedies.*"
RAISED = r"error: rank 1: a loader worker failed: ZeroDivisionError: the sixth batch \(File .*"
KILLED = r"error: rank 1: a loader worker was killed, as the kernel does when host memory or /dev/shm runs out.*\n"


@pytest.mark.parametrize(("name", "failure"), {  # status, all lines on stderr, the place of the newest checkpoint
    "nan": (run_with_nan, (), 1, NAN, {"batch": 2}),
    "failed worker": (run_with_a_faulty_worker, (False,), 1, RAISED, {"epoch": 1}),
    "killed worker": (run_with_a_faulty_worker, (True,), 1, f"{KILLED}.*fewer num_data_workers.*", {"epoch": 1}),
}.items())  # fmt: skip
def test_a_failure_on_one_rank_ends_both_and_is_printed_once(tmp_path, name, failure):
    function, arguments, status, lines, place = failure
    ended = run_job(tmp_path / "job", 2, function, tmp_path / "run", *arguments)
    assert [process.status for process in ended] == [status, status]
    found = "\n".join(complaints(ended))
    assert re.fullmatch(lines, found), found
    path, state, _ = newest_good(tmp_path / "run/checkpoints")
    assert path is not None and place.items() <= state.items()


def test_a_micro_batch_is_no_larger_than_the_ranks_share():
    assert str(divide_batch(BATCH, 4, 100)) == "24 = 4 rank(s) x 1 accumulated x 6 images"
    assert str(divide_batch(BATCH, 4, 3)) == "24 = 4 rank(s) x 2 accumulated x 3 images"
    with pytest.raises(ConfigError, match="micro_batch_size 4 does not divide the 6 images of each of 4 ranks"):
        divide_batch(BATCH, 4, 4)


@pytest.mark.parametrize(("ranks", "enabled", "kind"), [(2, False, nn.BatchNorm2d), (1, True, nn.BatchNorm2d),
    (2, True, nn.SyncBatchNorm)])  # fmt: skip
def test_batch_norm_is_synchronised_over_several_ranks_only(ranks, enabled, kind):
    model = nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4))
    keys = model.state_dict().keys()
    world = World(rank=0, local_rank=0, world_size=ranks, device=torch.device("cuda", 0))
    converted = synchronise_batch_norm(configuration(enable_sync_bn=enabled), model, world)
    assert type(converted[1]) is kind and converted.state_dict().keys() == keys  # checkpoints fit either way


@pytest.mark.parametrize(("rule", "peak"), [("none", 0.1), (f"sqrt/{BATCH // 4}", 0.2), (f"linear/{BATCH // 4}", 0.4)])
def test_learning_rate_follows_the_batch(rule, peak):
    """With four times the reference batch."""
    config = configuration(lr=0.1, lr_scale_rule=rule)
    (group,) = build_optimizer(config, [nn.Parameter(torch.ones(2))]).param_groups
    assert group["lr"] == group["initial_lr"] == config.peak_lr == pytest.approx(peak)
