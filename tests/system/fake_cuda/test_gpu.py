"""Features of GPUs: graphs, streams, loss scaling on the device, NCCL, the profile. `python -m pytest -m gpu`."""

import itertools
import pickle

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.conftest import RECIPE
from tools.bench.common import build_measured
from tools.timeline import read_trace
from train import Trainer
from utils import seeds
from utils.distributed.ddp import wrap_in_ddp
from utils.distributed.world import World
from utils.run.logger import RunLogger
from utils.training.batches import prefetch, resize
from utils.training.optimizers.build import build_optimizer, set_learning_rate
from utils.training.optimizers.muon import ADAMW_RMS, orthogonalise
from utils.training.plan import GRAPH_WARMUP_STEPS
from utils.training.step import GraphedUpdate

pytestmark = pytest.mark.gpu

STEPS = GRAPH_WARMUP_STEPS + 20
MODES = {
    "float32": {},
    "fp16": {"enable_amp": True},
    "bf16": {"enable_amp": True, "amp_dtype": "bf16"},
    "O2": {"opt_level": "O2"},
    "O3": {"opt_level": "O3"},
    "constant scale": {"opt_level": "O2", "loss_scale": 128},
    "accumulation": {"enable_amp": True, "micro_batch_size": 8},
    "clipped": {"enable_amp": True, "clip_grad_norm": 1e3, "weight_decay_bn_bias": False},
    "zeroed gradients": {"enable_amp": True, "enable_extra_opts": ["fused_optimizer", "cudnn_benchmark"]},
    "compiled": {"enable_amp": True, "enable_compile": True},
    "stem": {"stem_channels": 8},
    "tf32": {"enable_tf32": True},
    "fused norm": {"enable_amp": True, "fuse_norm_relu": True},
    "adamw": {"enable_amp": True, "optimizer": "adamw", "lr": 0.0005},
    "muon": {"optimizer": "muon", "lr": 0.002},  # rounding to bf16 tells runs apart sooner at higher rates
}


@pytest.fixture(scope="module")
def gpu():
    return World(rank=0, local_rank=0, world_size=1, device=torch.device("cuda", 0))


def on_gpu(tiny, **changes):
    return tiny(**{"device": "cuda", "enable_nhwc": True, "enable_extra_opts": True, "lr": 0.02} | changes)


def losses(trainer, gpu, steps=STEPS):
    """Return each step's loss, with a learning rate that changes in every step."""
    trainer.learner.model.train()
    trainer.loaders.train.set_epoch(0)
    batches = list(trainer.loaders.train)
    history = []
    for number, (images, labels) in zip(range(steps), itertools.cycle(batches), strict=False):
        set_learning_rate(trainer.learner.optimizer, 1 + number % 3)
        trainer.learner.update(images, labels)
        history.append(trainer.learner.sums.average_since_last(gpu)["loss"])
    return torch.tensor(history)


COMPILED = pytest.param("compiled", marks=pytest.mark.real_gpu("compiled kernels compute nothing on the fake runtime"))
EAGER = [mode for mode in MODES if mode != "compiled"]


@pytest.fixture(scope="module")
def float32(tiny, gpu):
    """The losses of plain steps in float32."""
    return losses(Trainer(on_gpu(tiny, enable_extra_opts=False, enable_nhwc=False), gpu), gpu)


@pytest.mark.parametrize("mode", [*EAGER, COMPILED])
def test_a_mode_trains_like_float32_and_its_graph_like_its_eager_step(tiny, gpu, float32, mode):
    eager = Trainer(on_gpu(tiny, **MODES[mode]), gpu)
    graphed = Trainer(on_gpu(tiny, enable_cuda_graphs=True, **MODES[mode]), gpu)
    assert isinstance(graphed.learner.update, GraphedUpdate)
    expected = losses(eager, gpu)
    torch.testing.assert_close(losses(graphed, gpu), expected, rtol=0.05, atol=0.02)
    assert graphed.learner.update.captured
    assert graphed.learner.learning_rate == pytest.approx(eager.learner.learning_rate)
    assert graphed.learner.loss_scaler.metrics() == eager.learner.loss_scaler.metrics()
    if mode not in ("adamw", "muon"):  # they update differently
        tolerance = 0.2 if mode == "O3" else 0.1
        torch.testing.assert_close(expected[-10:].mean(), float32[-10:].mean(), rtol=tolerance, atol=0.05)


def test_a_graph_is_captured_anew_for_each_image_size(tiny, gpu):
    def train(graphs):
        trainer = Trainer(on_gpu(tiny, enable_cuda_graphs=graphs, optimizer="muon", lr=0.002), gpu)
        images, labels = next(iter(trainer.loaders.train))
        history = []
        for size in [16] * STEPS + [24] * STEPS:
            trainer.learner.update(resize(images, size), labels)
            history.append(trainer.learner.sums.average_since_last(gpu)["loss"])
        return history, trainer

    graphed, trainer = train(graphs=True)
    assert trainer.learner.update.captured and trainer.learner.update.images.shape[2:] == (24, 24)
    torch.testing.assert_close(graphed, train(graphs=False)[0], rtol=0.05, atol=0.02)


def test_muon_orthogonalises_in_bf16():
    if not torch.cuda.is_bf16_supported(including_emulation=False):
        pytest.skip("no tensor cores for bf16")
    matrices = torch.randn(2, 8, 25, generator=torch.Generator().manual_seed(0))
    found = orthogonalise(matrices.cuda(), 5) / (ADAMW_RMS * 5)
    torch.testing.assert_close(found, found.bfloat16().float(), rtol=1e-6, atol=0)
    torch.testing.assert_close(found.cpu(), orthogonalise(matrices, 5) / (ADAMW_RMS * 5), rtol=0.1, atol=0.02)


@pytest.mark.real_gpu("the fake runtime computes the update by the CPU's kernel")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("nesterov", [False, True])
def test_the_fused_update_of_half_weights_is_right(tiny, gpu, nesterov, dtype):
    """For O3; PyTorch's CPU kernel was wrong up to 2.13. Of 67 weights: not a multiple of the kernel's vector width."""
    start, *gradients = torch.randn(4, 67, generator=torch.Generator().manual_seed(0)).to("cuda", dtype)
    plain, fused = nn.Parameter(start.clone()), nn.Parameter(start.clone())
    config = tiny(lr=0.1, momentum=0.9, nesterov=nesterov)
    for parameter in (plain, fused):
        optimizer = build_optimizer(config, [parameter], fused=parameter is fused)
        for gradient in gradients:
            parameter.grad = gradient.clone()
            optimizer.step()
    torch.testing.assert_close(fused, plain, rtol=6 * 2**-8, atol=6 * 2**-8)


@pytest.mark.parametrize("graphs", [False, True])
@pytest.mark.parametrize("changes", [*(pytest.param(MODES[mode], id=mode) for mode in EAGER), RECIPE])
def test_no_epoch_waits_for_the_device_outside_its_log_points(tiny, gpu, tmp_path, monkeypatch, changes, graphs):
    """In the second epoch; in the first, algorithms are chosen and steps captured."""
    few = {"log_freq": 1000, "limit_train_batches": GRAPH_WARMUP_STEPS + 4, "max_epochs": 4, "enable_prefetch": True}
    trainer = Trainer(on_gpu(tiny, enable_cuda_graphs=graphs, **few, **changes), gpu)
    log_point, log_points = trainer._log_point, []

    def wait_here(iteration, images):
        mode = torch.cuda.get_sync_debug_mode()
        torch.cuda.set_sync_debug_mode("default")
        log_point(iteration, images)
        log_points.append(trainer.run.epoch)
        torch.cuda.set_sync_debug_mode(mode)

    monkeypatch.setattr(trainer, "_log_point", wait_here)
    logger = RunLogger(tmp_path, enabled=True, to_screen=False)
    with logger.open() as trainer.run.log:
        trainer.train_one_epoch()
        trainer.run.epoch, trainer.run.batch = 1, 0
        torch.cuda.set_sync_debug_mode("error")
        try:
            trainer.train_one_epoch()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    assert log_points == [0, 1]


@pytest.mark.parametrize("graphs", [False, True])
def test_an_overflow_in_the_first_fused_step_leaves_no_trace(tiny, gpu, graphs):
    """The scale is raised until the first gradients overflow; skipped steps must change nothing."""
    trainer = Trainer(on_gpu(tiny, enable_amp=True, enable_cuda_graphs=graphs), gpu)
    trainer.learner.loss_scaler._init_scale = 2.0**30
    assert torch.isfinite(losses(trainer, gpu)).all()
    assert trainer.learner.loss_scaler.metrics()["skipped_steps"] > 0
    assert all(torch.isfinite(parameter).all() for parameter in trainer.learner.model.parameters())


def test_prefetched_batches_are_the_same(tiny, gpu):
    config = on_gpu(tiny, enable_prefetch=True, limit_train_batches=20)
    trainer = Trainer(config, gpu)
    loader, plan = trainer.loaders.train, trainer.learner.plan
    loader.set_epoch(0)
    expected = [(images.clone(), labels.clone()) for images, labels in loader]
    for (images, labels), (seen, seen_labels) in zip(expected, prefetch(plan, iter(loader), gpu.device), strict=True):
        torch.mm(*torch.randn(2, 2048, 2048, device=gpu.device))  # the step during which the next batch is prepared
        assert torch.equal(images, seen) and torch.equal(labels, seen_labels)


def test_a_graph_with_ddp_over_nccl(tiny, gpu, tmp_path, monkeypatch):
    dist.init_process_group("cpu:gloo,cuda:nccl", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        config = on_gpu(tiny, enable_amp=True, enable_cuda_graphs=True)
        reference = Trainer(on_gpu(tiny, enable_amp=True), gpu)
        monkeypatch.setattr("utils.training.learner.distribute", wrap_in_ddp)
        training = build_measured(config, gpu)
        assert isinstance(training.update, GraphedUpdate)
        reference.loaders.train.set_epoch(0)
        images, labels = next(iter(reference.loaders.train))
        for _ in range(STEPS):
            training.update(images, labels)
            reference.learner.update(images, labels)
        torch.testing.assert_close(training.sums.sums, reference.learner.sums.sums, rtol=0.05, atol=1)
        del training  # NCCL would wait for its graph, which holds NCCL calls
    finally:
        dist.destroy_process_group()


def test_the_gpus_random_state_is_restored(gpu):
    torch.cuda.manual_seed(3)
    saved = seeds.random_state()
    expected = torch.rand(4, device="cuda")
    torch.rand(4, device="cuda")
    seeds.restore_random_state(saved)
    assert torch.equal(torch.rand(4, device="cuda"), expected)


@pytest.mark.real_gpu("the fake runtime computes in float32")
@pytest.mark.parametrize("enabled", [False, True])
def test_tf32_rounds_the_mantissa(tiny, gpu, enabled):
    build_measured(on_gpu(tiny, enable_tf32=enabled), gpu)
    for operation, *shapes in ((torch.mm, (512, 512), (512, 512)), (torch.conv2d, (8, 64, 16, 16), (64, 64, 3, 3))):
        values = [torch.randn(shape, generator=torch.Generator().manual_seed(len(shape))) for shape in shapes]
        exact = operation(*(value.double() for value in values))
        error = operation(*(value.cuda() for value in values)).cpu().double() - exact
        assert bool(error.abs().max() > 1.5e-3) is enabled


@pytest.mark.real_gpu("there is no CUPTI")
def test_the_profile_holds_kernels_and_memory(tiny, gpu, tmp_path):
    config = tiny("bs256-amp-prof", device="cuda", profiling_iters_per_epoch=3, limit_train_batches=None)
    Trainer(config, gpu, tmp_path, "prof", "auto").train()
    profile = tmp_path / "profile"
    events = read_trace(profile / "rank0.pt.trace.json.gz")
    assert [event.group for event in events].count("iteration") == 3
    assert any(event.on_gpu for event in events)
    summary = (profile / "summary.txt").read_text()
    assert "GPU work: " in summary and "top kernels:" in summary
    assert pickle.loads((profile / "memory.pickle").read_bytes())["segments"]
