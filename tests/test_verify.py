"""Steps that are trained twice: they change no result, detect every flipped bit that does, and name its rank."""

import itertools
import json
import math
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from models import build_model
from tests.conftest import RECIPE, TINY, as_options, tiny_config
from tests.faults import inject
from tests.faults.flip_campaign import Outcome, build_tiny, random_batches, run_campaign
from tests.faults.flips import KINDS, Flip, Flipper, flip_bit
from tests.processes import complaints, run_job
from utils.config import Config
from utils.distributed.ranks import run_ranks
from utils.distributed.world import World
from utils.errors import CorruptionError
from utils.run.checkpoint.io import newest_good
from utils.training.checks import verify_steps
from utils.training.checks.dry_run import describe, snapshot_bytes
from utils.training.checks.faulty_ranks import Evidence, describe_fault, find_fault, outlier_ranks
from utils.training.checks.fingerprints import (
    CHUNK,
    FIRST_STEPS,
    WORKING_BYTES,
    Fingerprints,
    describe_verification,
    find_layers,
    fingerprint,
    take_fingerprints,
)
from utils.training.checks.step_state import Snapshot, gradients, own_tensors, shared_tensors
from utils.training.checks.verify_steps import Cost, Verifier, is_due
from utils.training.learner import Learner

TYPES = (torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.bool)
MODES: dict[str, dict[str, Any]] = {
    "plain": {},
    "accumulation": {"micro_batch_size": 4, "clip_grad_norm": 1.0},
    "recipe": RECIPE,
    "fused, O2, scaled": {"opt_level": "O2", "loss_scale": 128, "fused_optimizer": True},
    "autocast": {"enable_amp": True, "amp_dtype": "bf16", "loss_scale": 128},
    "adamw": {"optimizer": "adamw", "lr": 0.001, "fused_optimizer": False},
    "lamb": {"optimizer": "lamb", "lr": 0.01},
}
COMPILED = pytest.param({"enable_compile": True}, id="compiled", marks=pytest.mark.slow)


def some_steps(learner: Learner, verifier: Verifier, number: int) -> dict[str, Tensor]:
    """Return a copy of the state after some steps, gradients included."""
    learner.model.train()
    for images, labels in itertools.islice(random_batches(learner, verifier.world), number):
        verifier.train_step(images, labels)
    everything = shared_tensors(learner) | own_tensors(learner) | gradients(learner)
    return {name: tensor.detach().clone() for name, tensor in everything.items()}


@pytest.mark.parametrize("dtype", TYPES)
def test_every_bit_and_position_changes_a_fingerprint(dtype: torch.dtype) -> None:
    tensor = (torch.randn(3, 2, 2) > 0.3).to(dtype)
    tensor[0, 0], tensor[2, 0] = 1, 0
    seen = {int(fingerprint(tensor)), int(fingerprint(tensor.flip(0)))}
    assert len(seen) == 2
    bits = range(8 * tensor.element_size()) if dtype != torch.bool else range(1)
    for number, bit in itertools.product(range(tensor.numel()), bits):
        flip_bit(tensor, number, bit)
        assert int(fingerprint(tensor)) not in seen
        seen.add(int(fingerprint(tensor)))
        flip_bit(tensor, number, bit)
    assert int(fingerprint(tensor)) in seen


def test_a_fingerprint_depends_on_the_numbers_not_on_the_memory_format() -> None:
    images = torch.randn(2, 3, 4, 5)
    assert fingerprint(images) == fingerprint(images.to(memory_format=torch.channels_last))
    large = torch.zeros(2 * CHUNK + 3)
    empty = fingerprint(large)
    seen = {int(empty)}
    for number in (0, CHUNK - 1, CHUNK, 2 * CHUNK + 2):  # in different chunks
        changed = large.clone()
        changed[number] = 1
        seen.add(int(fingerprint(changed)))
    assert len(seen) == 5


def test_one_step_of_each_window_is_sampled_from_the_seed(tiny) -> None:
    config, other, never, always = (
        tiny(verify_every_steps=every, seed=seed) for every, seed in ((10, 0), (10, 1), (None, 0), (1, 0))
    )
    due = [step for step in range(1000) if is_due(config, step)]
    assert [step // 10 for step in due] == list(range(100))
    assert len({step % 10 for step in due}) == 10
    assert due != [step for step in range(1000) if is_due(other, step)]
    assert not any(is_due(never, step) for step in range(1000))
    assert all(is_due(always, step) for step in range(10))


def checked(learner: Learner, verifier: Verifier, number: int) -> list[int]:
    """Train some steps; return the numbers of those that were checked."""
    found = []
    for _ in range(number):
        step, checks = learner.steps, verifier.cost.checks
        some_steps(learner, verifier, 1)
        found += [step] * (verifier.cost.checks - checks)
    return found


def test_the_first_steps_of_a_start_and_of_a_restored_checkpoint_are_checked(tiny, one_rank) -> None:
    config = tiny(batch_size=8, verify_every_steps=1000)
    learner, verifier = build_tiny(config, one_rank)
    checkpoint = learner.state_dict() | {"step": next(step for step in range(1000) if is_due(config, step)) - 5}
    assert checked(learner, verifier, 5) == list(range(FIRST_STEPS))
    learner.load_state_dict(checkpoint)
    first = checkpoint["step"]
    assert checked(learner, verifier, 7) == [first, first + 1, first + 2, first + 5]


def test_where_rounding_varies_the_first_steps_are_not_checked(tiny, one_rank, monkeypatch) -> None:
    """A fault there would be measured as rounding."""
    monkeypatch.setattr("utils.training.checks.verify_steps.rounding_varies", lambda config, device: True)
    config = tiny(batch_size=8, verify_every_steps=1000)
    learner, verifier = build_tiny(config, one_rank)
    assert checked(learner, verifier, 5) == [step for step in range(5) if is_due(config, step)]


def test_the_cost_is_that_beyond_the_first_repetition_over_all_steps(tiny, one_rank, monkeypatch) -> None:
    """The first repetition is the step itself, which may compile: no cost of its check."""
    learner, verifier = build_tiny(tiny(batch_size=8, verify_every_steps=1000), one_rank)
    train_step, clock, calls = learner.train_step, [0], itertools.count()

    def train(images: Tensor, labels: Tensor) -> None:
        clock[0] += 1 if next(calls) else 100
        train_step(images, labels)

    monkeypatch.setattr(learner, "train_step", train)
    monkeypatch.setattr(verify_steps, "time", SimpleNamespace(perf_counter=lambda: clock[0]))
    assert checked(learner, verifier, 5) == list(range(FIRST_STEPS))
    assert (verifier.cost.extra, verifier.cost.steps, verifier.cost.trained) == (FIRST_STEPS, FIRST_STEPS, 5)
    verifier.cost = Cost(checks=4, extra=1.0, steps=2.0, trained=40)  # 0.5 s per step
    assert verifier.remarks() == ["Verified 4 step(s), none wrong, in 1.00 s: 5.00% of the training"]


@pytest.mark.parametrize("changes", [*(pytest.param(mode, id=name) for name, mode in MODES.items()), COMPILED])
def test_checked_steps_give_the_same_result_as_unchecked_ones(tiny, one_rank, changes) -> None:
    """With dropout: a repetition repeats its random numbers."""
    unchecked = some_steps(*build_tiny(tiny(batch_size=8, **changes), one_rank), 4)
    learner, verifier = build_tiny(tiny(batch_size=8, verify_every_steps=1, **changes), one_rank)
    checked = some_steps(learner, verifier, 4)
    assert checked.keys() == unchecked.keys()
    assert [name for name in checked if not torch.equal(checked[name], unchecked[name])] == []
    assert verifier.cost.checks == learner.steps == 4


def campaign(config: Config, world: World, flips: int) -> Outcome:
    learner, verifier = build_tiny(config, world)
    return run_campaign(learner, verifier, random_batches(learner, world), flips=flips, clean=2, seed=3)


def flips_of(outcome: Outcome) -> tuple[int, int]:
    return sum(t.flips for t in outcome.flips.values()), sum(t.changed for t in outcome.flips.values())


@pytest.mark.parametrize("name", ["plain", "accumulation", "fused, O2, scaled", "adamw"])
def test_flips_of_every_kind_are_caught(tiny, one_rank, name) -> None:
    outcome = campaign(tiny(verify_every_steps=1, batch_size=16, **MODES[name]), one_rank, 2 * len(KINDS))
    assert (outcome.missed, outcome.misnamed, outcome.alarms) == ([], [], [])
    assert flips_of(outcome)[0] == 2 * len(KINDS) and flips_of(outcome)[1] >= len(KINDS)
    assert outcome.clean_steps == 2 + 2 * len(KINDS)


def test_a_campaign_counts_flips_that_are_missed(tiny, one_rank, monkeypatch) -> None:
    monkeypatch.setattr(Verifier, "_is_due", lambda verifier, images: False)
    outcome = campaign(tiny(verify_every_steps=1, batch_size=16), one_rank, 14)
    assert len(outcome.missed) == flips_of(outcome)[1] > 0
    assert all("step" in line and "rank 0" in line for line in outcome.missed)


def configuration(**changes: Any) -> Config:
    return tiny_config(**{"batch_size": 12, "verify_every_steps": 1} | changes)


def campaign_of_ranks(changes: dict[str, Any], flips: int) -> int:
    def act(world: World) -> None:
        outcome = campaign(configuration(**changes), world, flips)
        wrong = (outcome.missed, outcome.misnamed, outcome.alarms)
        if world.is_main:
            print(json.dumps([*wrong, flips_of(outcome)[1]]))

    return run_ranks(act, "cpu", 200)


@pytest.mark.parametrize(("ranks", "changes"), [(3, {}), (2, {"micro_batch_size": 3, "ema_decay": 0.9})])
def test_the_rank_of_a_flip_is_named_among_several(tmp_path, ranks, changes) -> None:
    ended = run_job(tmp_path / "job", ranks, campaign_of_ranks, changes, len(KINDS), timeout=280)
    assert [process.status for process in ended] == [0] * ranks, complaints(ended)
    missed, misnamed, alarms, changed = json.loads(ended[0].output)
    assert (missed, misnamed, alarms) == ([], [], []) and changed > 3


def strike(folder: Path, settings: dict[str, Any], *options: str) -> int:
    """Run in a process of its own, as train.py sets signal handlers."""
    short = {"batch_size": 12, "max_epochs": 1, "limit_train_batches": 8, "lr_schedule": "constant"}
    values = TINY | short | {"lr_warmup_epochs": 0} | settings
    return inject.main([f"--run-dir={folder}", *as_options(values), *options])


def test_a_weight_that_differed_earlier_is_found_by_the_majority(tmp_path) -> None:
    """The flip is in an unchecked step: in the next checked one, the repetitions are equal but the ranks differ."""
    config = configuration(verify_every_steps=2)
    step = next(step for step in range(FIRST_STEPS, 8) if not is_due(config, step))
    options = ("--strike=optimizer", f"--step={step + 1}", "--rank=2")
    settings = {"verify_every_steps": 2, "save_checkpoint": False}
    ended = run_job(tmp_path / "job", 3, strike, tmp_path / "run", settings, *options, timeout=280)
    assert [process.status for process in ended] == [CorruptionError.exit_status] * 3, complaints(ended)
    (line, remedy) = complaints(ended)
    assert re.search(r"silent corruption in step \d+ on rank 2 \(host .*, cpu\): .* other ranks", line), line
    assert remedy.startswith("nothing of this step was saved")


def test_a_run_stops_before_it_saves(tmp_path) -> None:
    run, settings = tmp_path / "run", {"verify_every_steps": 1, "checkpoint_every_steps": 1}
    (ended,) = run_job(
        tmp_path / "job", 1, strike, run, settings, "--strike=activation", "--step=3", "--seed=2", timeout=280
    )
    assert ended.status == CorruptionError.exit_status == 5
    assert "flipped bit" in ended.output
    assert re.search(r"^error: silent corruption in step 3 on rank 0 \(host .*first of three", ended.errors)
    assert ended.errors.count("\n") == 2
    _, state, _ = newest_good(run / "checkpoints")
    assert state is not None and state["step"] == 2


class WorldWithANoisierRank(World):
    def all_gather(self, value: Any) -> list[Any]:
        """Add another rank's measurement."""
        return [value, {"of another rank": 0.5}] if isinstance(value, dict) else [value]


def test_varying_rounding_is_measured_first(tiny, one_rank) -> None:
    learner, verifier = build_tiny(tiny(verify_every_steps=1, batch_size=16), one_rank)
    verifier.rounding_varies, verifier.noise_measured = True, False
    verifier.world = WorldWithANoisierRank(0, 0, 1, one_rank.device)
    generator = torch.Generator().manual_seed(0)
    for parameter in learner.model.parameters():  # imitate the varying order of a GPU's atomic additions
        parameter.register_hook(
            lambda gradient: gradient * (1 + 1e-6 * torch.randn(gradient.shape, generator=generator))
        )
    some_steps(learner, verifier, 20)
    (measured, verified) = verifier.remarks()
    assert re.search(r"6 repetitions of one step differ.*gradient \d", measured)
    assert re.search(r"Verified 20 step\(s\), none wrong, in .* s: .*% of the training", verified)
    assert 0 < verifier.noise["gradient"] < 1e-5
    assert verifier.noise["of another rank"] == 0.5
    assert verifier.remarks() == []
    with Flipper(verifier, Flip("weight", 0, learner.steps, "1"), 0) as flipper:
        flipper._strike = lambda chosen: flip_bit(chosen[1], 0, 30)  # type: ignore[method-assign]
        with pytest.raises(CorruptionError, match="rank 0"):
            some_steps(learner, verifier, 1)


def test_the_log_describes_verification(tiny, one_rank) -> None:
    promise = (
        "verify_every_steps 3: one step in 3, and the first 3 of each start, are trained twice; all bits must be equal"
    )
    learner, _ = build_tiny(tiny(verify_every_steps=3), one_rank)
    assert learner.notes == [promise]
    cuda = torch.device("cuda", 0)
    assert "deterministic: true" in describe_verification(tiny(verify_every_steps=3), cuda)[0]
    assert describe_verification(tiny(verify_every_steps=3, deterministic=True), cuda) == [promise]
    assert describe_verification(tiny(), cuda) == []


def test_the_memory_estimate_counts_the_snapshot(tiny, one_rank) -> None:
    for changes in ({}, {"ema_decay": 0.9}, {"opt_level": "O2"}, {"optimizer": "adamw", "lr": 0.001}):
        learner, verifier = build_tiny(tiny(verify_every_steps=1, batch_size=8, **changes), one_rank)
        some_steps(learner, verifier, 1)
        batch = next(random_batches(learner, one_rank))
        kept = sum(copy.nbytes for _, copy in Snapshot(learner, batch).pairs)
        counted = snapshot_bytes(learner.config, learner.weights, len(batch[0]), tuple(batch[0].shape[1:]))
        # loss scale, metric sums and AdamW's step counts are not in the estimate
        assert abs(counted - WORKING_BYTES - kept) < 200
        assert snapshot_bytes(tiny(), learner.weights, 8, (3, 16, 16)) == 0
    assert "snapshot for verify_every_steps" in describe(learner, (3, 16, 16), network="tiny", dataset="none")


@pytest.mark.parametrize("repetition", [1, 2])
def test_the_first_layer_whose_output_differs_is_named(tiny, one_rank, repetition: int) -> None:
    learner, verifier = build_tiny(tiny(verify_every_steps=1, batch_size=16), one_rank)
    for seed in range(4):
        flip = Flip("activation", 0, learner.steps, f"{seed}", repetition)
        with Flipper(verifier, flip, 0) as flipper, pytest.raises(CorruptionError) as raised:
            some_steps(learner, verifier, 1)
        layer = flipper.struck.rpartition(" of ")[2]
        assert f"cpu): output {layer} (and " in str(raised.value)
        assert "and no earlier layer's output does (the" in str(raised.value)


def test_a_layer_is_named_in_the_second_micro_batch(tiny, one_rank) -> None:
    learner, verifier = build_tiny(tiny(verify_every_steps=1, batch_size=8, micro_batch_size=4), one_rank)
    passes = itertools.count(1)

    def spoil(layer: torch.nn.Module, inputs: object, output: Tensor) -> Tensor:
        return output + 1 if next(passes) == 2 else output

    dict(learner.model.named_modules())["3"].register_forward_hook(spoil)
    with pytest.raises(CorruptionError, match=r"output 3 .*no earlier layer's output does \(the first of three"):
        some_steps(learner, verifier, 1)


def test_a_wrong_gradient_is_told_from_a_wrong_layer(tiny, one_rank) -> None:
    learner, verifier = build_tiny(tiny(verify_every_steps=1, batch_size=16), one_rank)
    with (
        Flipper(verifier, Flip("gradient", 0, learner.steps, "0"), 0),
        pytest.raises(CorruptionError, match=r"weight \S+ .*though the outputs of all layers agree: .*first of three"),
    ):
        some_steps(learner, verifier, 1)


def test_only_checked_steps_run_hooks(tiny, one_rank, monkeypatch) -> None:
    learner, verifier = build_tiny(tiny(verify_every_steps=1000, batch_size=8), one_rank)
    train_step, hooks = learner.train_step, list[int]()

    def count() -> int:
        return sum(len(layer._forward_hooks) for layer in learner.model.children())

    def train(images: Tensor, labels: Tensor) -> None:
        hooks.append(count() - others)
        train_step(images, labels)

    others = count()
    monkeypatch.setattr(learner, "train_step", train)
    some_steps(learner, verifier, FIRST_STEPS + 2)
    assert hooks == [len(list(learner.model.children()))] * 2 * FIRST_STEPS + [0, 0]


def test_a_compiled_step_has_no_hooks_and_the_message_says_so(tiny, one_rank) -> None:
    _, verifier = build_tiny(tiny(verify_every_steps=1, batch_size=8, enable_compile=True), one_rank)
    assert verifier.outputs.layers == {}
    message = describe_fault(1, [replace(SEEN, own=["loss"], layers=False)])
    assert "the step; in which layer is unknown: the step is compiled or captured" in message


def test_the_layers_of_a_resnet_are_its_blocks() -> None:
    layers = list(find_layers(build_model(tiny_config(model="resnet8"))))
    assert layers == ["conv1", "bn1", "relu", "layer1.0", "layer2.0", "layer3.0", "avgpool", "fc"]


SEEN = Evidence("host a, cpu", [], [], [], [], "", {"weight x": 1, "weight y": 2}, True)


def test_faulty_ranks_are_found_from_the_evidence() -> None:
    assert find_fault([SEEN] * 3) is None
    other = replace(SEEN, state={"weight x": 1, "weight y": 3})
    assert outlier_ranks([SEEN.state, other.state, SEEN.state]) == ([1], ["weight y"])
    assert outlier_ranks([SEEN.state, other.state]) == ([0, 1], ["weight y"])
    result = replace(SEEN, result=["gradient x"], outlier="the first of three repetitions differs")
    own = replace(result, own=["own gradient x", "loss"])
    fault = find_fault([result, own, result])
    assert fault is not None and (fault.ranks, fault.tensors) == ([1], ["own gradient x", "loss"])
    fault = find_fault([result, SEEN, SEEN])
    assert fault is not None and fault.ranks == [0]
    fault = find_fault([result, result])
    assert fault is not None and "sum over the ranks" in fault.how
    fault = find_fault([own, replace(SEEN, changed_at_rest=["weight x"])])
    assert fault is not None and (fault.ranks, fault.how) == ([1], "changed in memory since the step before")
    message = describe_fault(7, [SEEN, replace(own, device="host b, H200 GPU-1")])
    assert "step 7 on rank 1 (host b, H200 GPU-1): own gradient x (and 1 more) differs" in message


def test_a_nan_distance_differs(tiny, one_rank) -> None:
    _, verifier = build_tiny(tiny(verify_every_steps=1, batch_size=8), one_rank)
    verifier.noise = {"gradient": 0.5}
    right, *others = (
        Fingerprints({"gradient x": bits}, {"gradient x": (total, 4.0)})
        for bits, total in enumerate((1.0, 2.0, math.nan))
    )
    assert [verifier._beyond_rounding(right.distances(other)) for other in others] == [[], ["gradient x"]]


def test_a_missing_tensor_differs() -> None:
    one, two = (take_fingerprints({name: torch.ones(2)}, sketched=False) for name in "ab")
    assert set(one.distances(two)) == {"a", "b"}


@pytest.mark.parametrize("number", [1, 2])
def test_the_outlier_of_three_repetitions_is_named(tiny, one_rank, monkeypatch, number: int) -> None:
    learner, verifier = build_tiny(tiny(verify_every_steps=1, batch_size=8), one_rank)
    train_step, repetitions = learner.train_step, itertools.count(1)

    def spoil(images: Tensor, labels: Tensor) -> None:
        train_step(images, labels)
        if next(repetitions) == number:
            with torch.no_grad():
                next(learner.model.parameters()).view(-1)[0] += 1

    monkeypatch.setattr(learner, "train_step", spoil)
    outlier = ("first", "second")[number - 1]
    with pytest.raises(CorruptionError, match=f"the {outlier} of three repetitions differs"):
        some_steps(learner, verifier, 1)
