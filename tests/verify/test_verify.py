"""Steps that are trained twice: they change no result, detect every flipped bit that does, and name its rank."""

import itertools
import json
import re

import pytest
import torch

from tests.conftest import RECIPE, TINY, as_options, tiny_config
from tests.processes import complaints, run_job
from tests.system.faults import inject
from tests.system.faults.inject import Flip, build_tiny, flip_bit, plan_flip, random_batches, run_campaign
from utils.distributed.ranks import run_ranks
from utils.distributed.world import World
from utils.errors import CorruptionError
from utils.run.checkpoint import newest_good
from utils.verify.fingerprints import CHUNK, fingerprint
from utils.verify.verifier import FIRST_STEPS, Evidence, describe_fault, is_due, own_tensors, shared_tensors

MODES = {
    "plain": {},
    "accumulation, adamw": {"micro_batch_size": 4, "clip_grad_norm": 1.0, "optimizer": "adamw", "lr": 0.001},
    "recipe": RECIPE,
    "fused, O2, scaled": {"opt_level": "O2", "loss_scale": 128, "enable_extra_opts": ["fused_optimizer"]},
    "autocast": {"enable_amp": True, "amp_dtype": "bf16", "loss_scale": "dynamic"},
    "overflow": {"loss_scale": 3e38, "lr": 1000},  # steps are skipped
}
COMPILED = pytest.param({"enable_compile": True}, id="compiled", marks=pytest.mark.slow)


def some_steps(learner, trainer, number):
    """Return a copy of the state after some steps that `trainer`, the learner or its verifier, trains."""
    for images, labels in itertools.islice(random_batches(learner, World(0, 0, 1, torch.device("cpu"))), number):
        trainer.train_step(images, labels)
    everything = shared_tensors(learner) | own_tensors(learner) | learner.model.state_dict()
    everything["scaler"] = torch.tensor([*learner.loss_scaler.state_dict().values()])
    return {name: tensor.detach().clone() for name, tensor in everything.items()}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool])
def test_every_bit_and_position_changes_a_fingerprint(dtype):
    tensor = torch.eye(3, 4).to(dtype)
    seen = {int(fingerprint(tensor)), int(fingerprint(tensor.flip(0)))}
    assert len(seen) == 2
    bits = range(8 * tensor.element_size()) if dtype != torch.bool else range(1)
    for number, bit in itertools.product(range(tensor.numel()), bits):
        flip_bit(tensor, number, bit)
        assert int(fingerprint(tensor)) not in seen
        seen.add(int(fingerprint(tensor)))
        flip_bit(tensor, number, bit)
    assert int(fingerprint(tensor)) in seen


def test_a_fingerprint_depends_on_the_numbers_not_on_the_memory_format():
    images = torch.randn(2, 3, 4, 5)
    assert fingerprint(images) == fingerprint(images.to(memory_format=torch.channels_last))
    large = torch.zeros(2 * CHUNK + 3)
    seen = {int(fingerprint(large))}
    for number in (0, CHUNK - 1, CHUNK, 2 * CHUNK + 2):  # in different chunks
        changed = large.clone()
        changed[number] = 1
        seen.add(int(fingerprint(changed)))
    assert len(seen) == 5


def test_one_step_of_each_window_is_sampled_from_the_seed(tiny):
    configs = [tiny(verify_every_steps=10, seed=seed) for seed in (0, 1)]
    due, other = ([step for step in range(1000) if is_due(config, step)] for config in configs)
    assert [step // 10 for step in due] == list(range(100)) and due != other
    assert len({step % 10 for step in due}) == 10
    assert all(is_due(tiny(verify_every_steps=1), step) for step in range(10))


def test_the_first_steps_of_a_start_and_of_a_restored_checkpoint_are_checked_with_hooks(tiny, one_rank, monkeypatch):
    config = tiny(batch_size=8, verify_every_steps=1000)
    learner, verifier = build_tiny(config, one_rank)
    train_step, hooks = learner.train_step, []
    weight = learner.model[0].weight
    weight.register_hook(lambda gradient: -0.0 * gradient.abs())  # added to zeros it would be 0.0

    def train(images, labels):
        hooks.append(len(weight._post_accumulate_grad_hooks or ()))
        train_step(images, labels)

    monkeypatch.setattr(learner, "train_step", train)
    rate = learner.optimizer.param_groups[0]["lr"] = torch.tensor(0.1)
    monkeypatch.setattr("utils.verify.verifier.time.perf_counter", lambda: len(hooks))  # a step takes a second
    due = next(step for step in range(1000) if is_due(config, step))
    checkpoint = learner.state_dict() | {"step": due - 5}
    some_steps(learner, verifier, 5)
    assert hooks == [1, 1] * FIRST_STEPS + [0, 0]  # each checked step twice
    assert learner.optimizer.param_groups[0]["lr"] is rate, "a CUDA graph reads the tensor of its capture"
    assert [*verifier.remarks(), *verifier.remarks()] == ["Verified 3 step(s), none wrong, in 3.00 s"]
    hooks.clear()
    learner.load_state_dict(checkpoint)
    some_steps(learner, verifier, 7)
    assert hooks == [1, 1] * FIRST_STEPS + [0, 0, 1, 1, 0]


@pytest.mark.parametrize("changes", [*(pytest.param(mode, id=name) for name, mode in MODES.items()), COMPILED])
def test_checked_steps_give_the_same_result_as_unchecked_ones(tiny, one_rank, changes):
    """With dropout: a repetition repeats its random numbers."""
    learner, _ = build_tiny(tiny(batch_size=8, **changes), one_rank)
    unchecked = some_steps(learner, learner, 4)
    learner, verifier = build_tiny(tiny(batch_size=8, verify_every_steps=1, **changes), one_rank)
    checked = some_steps(learner, verifier, 4)
    assert checked.keys() == unchecked.keys()
    assert any(name.startswith("average ") for name in checked) is ("ema_decay" in changes)
    assert [name for name in checked if not torch.equal(checked[name], unchecked[name])] == []
    assert (verifier.checked, learner.steps, learner.loss_scaler.skipped > 0) == (4, 4, changes is MODES["overflow"])


@pytest.mark.parametrize("name", ["accumulation, adamw", "fused, O2, scaled"])
def test_flips_of_every_kind_are_caught(tiny, one_rank, name):
    counts, problems = run_campaign(tiny(verify_every_steps=1, batch_size=16, **MODES[name]), one_rank, 15, 2, seed=3)
    assert problems == []
    assert [found["flips"] for found in counts.values()] == [3] * 5
    assert sum(found["rank named"] for found in counts.values()) >= 7


def campaign_of_ranks(changes, flips):
    def act(world):
        config = tiny_config(batch_size=12, verify_every_steps=1, **changes)
        counts, problems = run_campaign(config, world, flips, 2, seed=3)
        if world.is_main:
            print(json.dumps([problems, sum(found["rank named"] for found in counts.values())]))

    return run_ranks(act, "cpu", 200)


@pytest.mark.parametrize(("ranks", "changes"), [(3, {"micro_batch_size": 2}),
    (2, {"parallel": "no_communication", "ema_decay": 0.9})])  # fmt: skip
def test_the_rank_of_a_flip_is_named_among_several(tmp_path, ranks, changes):
    ended = run_job(tmp_path / "job", ranks, campaign_of_ranks, changes, 7, timeout=280)
    assert [process.status for process in ended] == [0] * ranks, complaints(ended)
    problems, named = json.loads(ended[0].output)
    assert problems == [] and named > 3


def strike(folder, settings, *options):
    """Run in a process of its own, as train.py sets signal handlers."""
    short = {"batch_size": 12, "max_epochs": 1, "limit_train_batches": 8, "lr_schedule": "constant"}
    values = TINY | short | {"lr_warmup_epochs": 0} | settings
    return inject.main([f"--run-dir={folder}", *as_options(values), *options])


def test_a_weight_that_differed_earlier_is_found_by_the_majority(tmp_path):
    """The flip is in an unchecked step: in the next checked one, the repetitions are equal but the ranks differ."""
    step = next(step for step in range(FIRST_STEPS, 8) if not is_due(tiny_config(verify_every_steps=2), step))
    options = ("--strike=optimizer", f"--step={step + 1}", "--rank=2")
    settings = {"verify_every_steps": 2, "save_checkpoint": False}
    ended = run_job(tmp_path / "job", 3, strike, tmp_path / "run", settings, *options, timeout=280)
    assert [process.status for process in ended] == [CorruptionError.exit_status] * 3, complaints(ended)
    (line, remedy) = complaints(ended)
    assert re.search(r"silent corruption in step \d+ on rank 2 \(host .*, cpu\): .* other ranks", line), line
    assert remedy.startswith("nothing of this step was saved")


def test_a_run_stops_before_it_saves(tmp_path):
    run, settings = tmp_path / "run", {"verify_every_steps": 1, "checkpoint_every_steps": 1}
    options = ("--strike=activation", "--step=3", "--seed=2")
    (ended,) = run_job(tmp_path / "job", 1, strike, run, settings, *options, timeout=280)
    assert ended.status == CorruptionError.exit_status == 5
    assert "flipped bit" in ended.output
    assert re.search(r"^error: silent corruption in step 3 on rank 0 \(host .*\): gradient layer3.* diff", ended.errors)
    _, state, _ = newest_good(run / "checkpoints")
    assert state is not None and state["step"] == 2


@pytest.mark.parametrize("repetition", [1, 2])
def test_the_first_tensor_that_is_wrong_is_named(tiny, one_rank, repetition):
    for kind, seed in (("gradient", 0), ("gradient", 1), ("batch", 0)):
        learner, verifier = build_tiny(tiny(verify_every_steps=1, batch_size=16), one_rank)
        struck = plan_flip(learner, Flip(kind, 0, 0, f"{seed}", repetition), 0)
        with pytest.raises(CorruptionError, match=r"cpu\): (\S+ \S+|images) (\(and \d+ more\) )?differs") as raised:
            some_steps(learner, verifier, 1)
        assert f"cpu): {struck[0].rpartition(' of ')[2]} " in str(raised.value)


def test_a_gradient_is_named_that_is_wrong_in_the_second_micro_batch_only(tiny, one_rank):
    learner, verifier = build_tiny(tiny(verify_every_steps=1, batch_size=8, micro_batch_size=4), one_rank)
    passes = itertools.count(1)
    learner.model[3].weight.register_hook(lambda gradient: gradient + (next(passes) == 2))
    with pytest.raises(CorruptionError, match=r"cpu\): gradient 3\.weight differs between two repetitions"):
        some_steps(learner, verifier, 1)


GOOD = Evidence("host a, cpu", [], [], {"weight x": 1, "weight y": 2})
RESULT = GOOD._replace(result=["weight x"])
OWN = RESULT._replace(device="host b, H200 GPU-1", own=["gradient x", "loss"])
OTHER = GOOD._replace(state={"weight x": 1, "weight y": 3})


@pytest.mark.parametrize(("ranks", "message"), [
    ([RESULT, OWN, RESULT], "on rank 1 (host b, H200 GPU-1): gradient x (and 1 more) differs between"),
    ([GOOD, RESULT], "on rank 1 (host a, cpu): weight x differs between two repetitions of the step\n"),
    ([RESULT, RESULT], "on rank 0 (host a, cpu); rank 1 (host a, cpu): weight x differs between two repetitions of "
     "the step though no rank's own gradients do: the sum over the ranks went wrong"),
    ([GOOD, OTHER, GOOD], "on rank 1 (host a, cpu): weight y differs from the other ranks"),
    ([GOOD, OTHER], "on rank 0 (host a, cpu); rank 1 (host a, cpu): weight y differs from the other ranks"),
])  # fmt: skip
def test_faulty_ranks_are_found_from_the_evidence(ranks, message):
    assert describe_fault(7, ranks).startswith(f"silent corruption in step 7 {message}")
