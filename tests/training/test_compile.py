"""What torch.compile compiles, how often, and where: training steps of each image size, validation, under DDP."""

from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch._dynamo.testing import CompileCounter
from torch._dynamo.utils import counters

from tests.conftest import Small
from tools.bench.common import build_measured
from train import Trainer
from utils.distributed.ddp import wrap_in_ddp
from utils.training import validation
from utils.training.validation import classify

BATCHES = [(torch.randn(count, 3, 32, 32), torch.randint(10, (count,))) for count in (8, 8, 5)]


@pytest.fixture(autouse=True)
def small_network(monkeypatch):
    for module in ("train", "tools.bench.common"):
        monkeypatch.setattr(f"{module}.build_model", lambda config, **_: Small())
    counters.clear()


@pytest.fixture
def compiled(monkeypatch):
    """Counts compilations, and leaves out Inductor, which would take a second for each."""
    counter = CompileCounter()
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=counter))
    with torch._dynamo.config.patch(recompile_limit=2):
        yield counter


def test_a_compiled_prediction_equals_the_eager_one(tiny, one_rank):
    """Of the moving average in NHWC with all views, before and after other weights are loaded. One graph is compiled,
    and none for the shorter last batch."""
    config = tiny(ema_decay=0.5, enable_nhwc=True, cpu_kernels=False, test_time_views=6)
    learners = [build_measured(config, one_rank) for _ in range(2)]
    learners[1].compile_prediction(8)
    nhwc = [(images.contiguous(memory_format=torch.channels_last), labels) for images, labels in BATCHES]
    for _ in range(2):
        for learner in learners:
            learner.model.train()
            learner.train_step(*nhwc[0])
            learner.load_state_dict(learner.state_dict())
        eager, compiled = ([outputs for outputs, _ in classify(learner, nhwc)] for learner in learners)
        torch.testing.assert_close(compiled, eager, rtol=1e-4, atol=1e-5)
    assert learners[1].validated is not learners[1].model
    assert (counters["stats"]["unique_graphs"], dict(counters["graph_break"])) == (1, {})


def test_validation_is_compiled_where_the_run_has_enough_of_it(tiny, one_rank, monkeypatch, compiled):
    """600 images: 200 in each validation, counted once for each view."""
    monkeypatch.setattr(validation, "MIN_COMPILED_IMAGES", 600)

    def compiles(**changes):
        settings = {"enable_compile": True, "lr_schedule": "constant"} | changes
        return Trainer(tiny(**settings), one_rank).learner.compiled_size > 0

    assert [compiles(max_epochs=epochs) for epochs in (2, 3)] == [False, True]
    assert [compiles(max_epochs=epochs, validate_every_epochs=2) for epochs in (4, 5)] == [False, True]
    assert [compiles(max_epochs=1, test_time_views=views) for views in (1, 6)] == [False, True]
    assert not compiles(max_epochs=3, enable_compile=False)


def test_a_run_compiles_once_for_each_image_size_and_for_validation(tiny, one_rank, monkeypatch, compiled, tmp_path):
    """At the first step of each of four sizes, two more than Dynamo's own limit here, and at the first validation."""
    monkeypatch.setattr(validation, "MIN_COMPILED_IMAGES", 0)
    progressive = {"progressive_image_sizes": [[8, 0.25], [9, 0.5], [10, 0.75]], "max_epochs": 4}
    trainer = Trainer(tiny(enable_compile=True, limit_train_batches=2, **progressive), one_rank, tmp_path)
    train_step, counts = trainer.learner.train_step, []

    def count(*batch):
        train_step(*batch)
        counts.append(compiled.frame_count)

    monkeypatch.setattr(trainer.learner, "train_step", count)
    trainer.train()
    assert counts == [1, 1, 3, 3, 4, 4, 5, 5]
    assert (compiled.frame_count, dict(counters["graph_break"])) == (5, {})
    assert trainer.run.clock.seconds("compile") > 0


def test_ddp_calls_the_compiled_network(tiny, one_rank, compiled, monkeypatch):
    """Compiled code that calls DDP breaks at DDP's own code, and compiles it again for steps without communication."""
    monkeypatch.setattr("utils.training.learner.distribute", wrap_in_ddp)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        config = tiny(enable_compile=True, micro_batch_size=2, batch_size=8, ema_decay=0.9)
        learner = build_measured(config, one_rank)
        for batch in BATCHES[:2]:
            learner.train_step(*batch)
    finally:
        dist.destroy_process_group()
    assert (compiled.frame_count, dict(counters["graph_break"])) == (2, {})  # network and loss
