"""Schedules against literal lists and PyTorch's schedulers; optimizers against PyTorch's."""

import json
import math
import random

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

from tests.conftest import CIFAR100, ROOT, plan_on, read_records, run
from utils.config import Config, load_config
from utils.training.optimizers.build import build_optimizer, load_optimizer
from utils.training.optimizers.schedule import Schedule


def factors(steps_per_epoch=1, **keys):
    schedule = Schedule(Config(**keys), steps_per_epoch)
    return [schedule.factor(step) for step in range(schedule.total_steps)]


FOUR = {"lr_schedule": "linear", "lr_warmup_epochs": 16, "max_epochs": 4}


@pytest.mark.parametrize(("keys", "expected"), [
    ({"lr_schedule": "constant", "lr_warmup_epochs": 1.8, "max_epochs": 3}, [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]),
    (FOUR, [step / 32 for step in range(1, 9)]),  # the run ends within the warm-up
    ({"lr_schedule": (1, 2), "max_epochs": 3}, [1, 1, 0.2, 0.2, 0.04, 0.04]),
])  # fmt: skip
def test_factors_of_each_step_with_two_steps_per_epoch(keys, expected):
    assert factors(2, **keys) == pytest.approx(expected)


def test_a_warmup_that_does_not_fit_into_the_run_is_noted(tiny):
    """The rise of onecycle then takes half of the run."""
    long, fitting = ({"lr_schedule": "onecycle", "lr_warmup_epochs": epochs, "max_epochs": 1} for epochs in (1, 0.5))
    assert factors(10, **long) == factors(10, **fitting)
    for keys, notes in (
        (FOUR, ["lr_warmup_epochs 16 does not fit into max_epochs 4: the learning rate rises to 0.25 of its peak"]),
        (long, ["lr_warmup_epochs 1 does not fit into max_epochs 1: onecycle peaks after 0.5 epochs"]),
        (fitting, []),
        (FOUR | {"lr_warmup_epochs": 4}, []),
    ):
        assert list(plan_on(tiny(**keys)).notes) == notes
        assert not plan_on(tiny(**keys), training=False).notes


# Two epochs longer than the rise; the tutorial's Trainer.train sets lr * (epoch + 1) / lr_warmup_epochs.
@pytest.mark.parametrize(("name", "epochs"), [("bs1024-warmup-opt", 10), ("bs2048-warmup-opt", 18)])
def test_the_warmup_rises_per_epoch_to_the_rates_in_the_tutorials_logs(name, epochs):
    curves = json.loads((ROOT / "results/reference/sc20_curves.json").read_text())["runs"]
    config, steps, rates = load_config(CIFAR100, name), 24, curves[name]["learning_rate"][:epochs]
    schedule = Schedule(config, steps)
    peak = 0.28 if name == "bs1024-warmup-opt" else 0.4
    exact = [min((epoch + 1) * peak / (epochs - 2), peak) for epoch in range(epochs)]
    assert exact == pytest.approx(rates)  # which the logs hold in float32
    expected = [rate for rate in exact for _ in range(steps)]
    assert [config.lr * schedule.factor(step) for step in range(len(expected))] == pytest.approx(expected, rel=1e-15)


def test_training_follows_the_schedule(tiny, one_rank, tmp_path):
    """Training warms up per epoch; then the plateau observes the validation losses."""
    changes = {"lr": 0.4, "lr_warmup_epochs": 2, "lr_warmup_by": "epoch", "lr_schedule": "plateau"}
    schedule = run(tiny(**changes, max_epochs=3, log_freq=1), one_rank, tmp_path).learner.schedule
    rates = {kind: [row["learning_rate"] for row in read_records(tmp_path, kind)] for kind in ("step", "epoch")}
    steps = len(rates["step"]) // 3
    assert steps > 1
    assert rates == {"step": [0.2] * steps + [0.4] * 2 * steps, "epoch": [0.2, 0.4, 0.4]}
    observed = {"best": read_records(tmp_path, "epoch")[2]["loss/valid"], "bad_epochs": 0, "cuts": 0}
    assert schedule.patience == 10 and schedule.state_dict() == observed


@pytest.mark.parametrize(("keys", "theirs", "options"), [
    ({"lr_schedule": "cosine", "lr_warmup_epochs": 10}, lr_scheduler.CosineAnnealingLR, {"T_max": 50}),
    ({"lr_schedule": "linear"}, lr_scheduler.LinearLR, {"start_factor": 1, "end_factor": 0, "total_iters": 50}),
    *(
        ({"lr_schedule": "onecycle", "lr_warmup_epochs": rise, "max_epochs": total}, lr_scheduler.OneCycleLR,
         {"max_lr": 1.0, "total_steps": total, "pct_start": rise / total, "cycle_momentum": False})
        for rise, total in ((10, 40), (2, 5), (7, 9))
    ),
])  # fmt: skip
def test_schedules_equal_pytorchs(keys, theirs, options):
    """With one step per epoch; PyTorch's schedules have no warm-up."""
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(()))], lr=1.0, momentum=0.9)
    reference, expected = theirs(optimizer, **options), []
    warmup = 0 if keys["lr_schedule"] == "onecycle" else keys.get("lr_warmup_epochs", 0)
    ours = factors(**{"max_epochs": 50 + warmup} | keys)[warmup:]
    for step in range(len(ours)):
        expected.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        if step < len(ours) - 1:
            reference.step()
    assert ours == pytest.approx(expected)


def test_plateau_cuts_when_pytorch_does():
    generator = random.Random(0)
    for _ in range(20):
        patience = generator.randint(0, 4)
        optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(()))], lr=1.0)
        reference = lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=patience, eps=0)
        ours = Schedule(Config(lr_schedule=f"plateau/{patience}", lr_decay_factor=0.5), 1)
        span = generator.choice((1.0, 3e-4))  # improvements below a fraction of 1e-4 do not count
        for _ in range(40):
            loss = 1 - span * generator.random()
            reference.step(loss)
            ours.observe(loss, 1)
            assert ours.factor(0) == pytest.approx(optimizer.param_groups[0]["lr"])


def test_the_plateau_observes_no_epoch_of_the_warmup():
    schedule = Schedule(Config(lr_warmup_epochs=1), 4)
    for steps, best in ((4, math.inf), (5, 0.1)):
        schedule.observe(0.1, steps)
        assert schedule.best == best


def test_a_resumed_plateau_has_the_new_patience_and_the_saved_counts():
    before, after = (Schedule(Config(lr_schedule=f"plateau/{patience}"), 1) for patience in (5, 2))
    for loss in (1.0, 1.5, 1.5):
        before.observe(loss, 1)
    after.load_state_dict(before.state_dict())
    assert after.patience == 2 and after.state_dict() == {"best": 1.0, "bad_epochs": 2, "cuts": 0}
    after.observe(1.5, 1)
    assert after.cuts == 1


def train(optimizer, parameter, gradients, scaler=None):
    scaler = scaler or torch.amp.GradScaler("cpu", enabled=False)
    for gradient in gradients:
        parameter.grad = gradient.clone()
        scaler.step(optimizer)
        scaler.update()
    return parameter.detach().clone()


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("changes", [{}, {"nesterov": True}, {"optimizer": "adamw"},
    {"optimizer": "adamw", "weight_decay_bn_bias": False}])  # fmt: skip
def test_sgd_and_adamw_equal_pytorchs(tiny, changes, fused):
    config = tiny(lr=0.03, momentum=0.8, weight_decay=0.3, **changes)
    both = [[nn.Parameter(torch.ones(4, 5)), nn.Parameter(torch.ones(5))] for _ in range(2)]
    groups = [{"params": both[1][:1]}, {"params": both[1][1:], "weight_decay": 0.3 * config.weight_decay_bn_bias}]
    if config.optimizer == "adamw":
        reference = torch.optim.AdamW(groups, lr=0.03, betas=(0.8, 0.999), weight_decay=0.3)
    else:
        reference = torch.optim.SGD(groups, lr=0.03, momentum=0.8, weight_decay=0.3, nesterov=config.nesterov)
    optimizers = build_optimizer(config, both[0], fused=fused), reference
    for _ in range(5):
        for pair in zip(*both, strict=True):
            gradient = torch.randn(pair[0].shape)
            for parameter in pair:
                parameter.grad = gradient.clone()
        for optimizer in optimizers:
            optimizer.step()
    torch.testing.assert_close(*both, rtol=1e-6, atol=1e-7)


def test_half_weights_are_not_fused_on_a_cpu(tiny):
    """PyTorch's fused kernel before 2.14 does not update most of them."""
    for level, fused in (("O3", False), ("O2", True), (None, True)):
        plan = plan_on(tiny(enable_extra_opts=True, amp_dtype="bf16", opt_level=level))
        assert plan.fused_optimizer is fused
        assert plan.notes == (() if fused else ("fused_optimizer: no effect on half-precision weights on a CPU",))


def test_fused_sgd_survives_a_first_step_that_loss_scaling_skips(tiny):
    """PyTorch's fused kernel would leave the momentum unwritten; deterministic mode fills such memory with NaN."""
    parameter = nn.Parameter(torch.ones(50))
    optimizer = build_optimizer(tiny(), nn.ParameterList([parameter]), fused=True)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    scaler.scale(torch.zeros(()))  # creates the scaler's state
    overflow, gradient = torch.full((50,), math.inf), torch.full((50,), 2.0)
    torch.use_deterministic_algorithms(True)
    result = train(optimizer, parameter, [overflow, gradient, gradient], scaler)
    plain = nn.Parameter(torch.ones(50))
    reference = build_optimizer(tiny(), nn.ParameterList([plain]))
    # the scale is 1 after the overflow
    torch.testing.assert_close(result, train(reference, plain, [gradient, gradient]))


@pytest.mark.parametrize("changes", [{"momentum": 0.0}, {}, {"optimizer": "adamw"}, {"optimizer": "muon"}], ids=str)
def test_a_restored_optimizer_keeps_its_buffers_in_the_new_memory_format_but_not_its_options(tiny, changes):
    """enable_nhwc and momentum may change between two starts; the fused kernel ignores strides."""
    (first, second), results = torch.randn(2, 4, 3, 2, 2), []
    for fused in (False, True):
        old = nn.Parameter(torch.ones(4, 3, 2, 2))
        before = build_optimizer(tiny(**changes), [old])
        train(before, old, [first])
        new = nn.Parameter(old.detach().to(memory_format=torch.channels_last))
        after = build_optimizer(tiny(**changes | {"momentum": 0.8, "lr": 0.2}), [new], fused=fused)
        load_optimizer(after, before.state_dict())
        group, saved = after.param_groups[0], before.state[old]
        assert (group["lr"], group.get("betas", [group.get("momentum")])[0]) == (0.2, 0.8)
        for name, moment in after.state[new].items():
            if name != "step" and moment is not None:
                assert moment.is_contiguous(memory_format=torch.channels_last)
                assert torch.equal(moment, torch.zeros_like(new) if saved.get(name) is None else saved[name])
        results.append(train(after, new, [second.to(memory_format=torch.channels_last)]))
    torch.testing.assert_close(*results)
