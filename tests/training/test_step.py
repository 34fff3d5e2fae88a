"""The training step: all variants compute the same, and none waits for the device."""

import subprocess
import sys
from collections import Counter
from unittest.mock import MagicMock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.utils._python_dispatch import TorchDispatchMode

from tests.conftest import RECIPE, ROOT, Small, check_equal_training, is_fused, plan_on
from tools.bench.common import build_measured
from train import Trainer
from utils.distributed.ddp import wrap_in_ddp
from utils.errors import ConfigError
from utils.kernels import weight_products
from utils.kernels.stem import ChannelPaddedConv2d
from utils.kernels.weight_products import ProductConv2d
from utils.kernels.winograd import WinogradConv2d
from utils.program import missing_compiler
from utils.run.logger import RunLogger
from utils.training.batches import prefetch
from utils.training.metrics.flops import flops_per_image
from utils.training.optimizers.build import build_optimizer, set_learning_rate
from utils.training.step import GraphedUpdate

HAS_COMPILER = not missing_compiler(gpu=False)
COMPILED_KERNELS = {
    "fused norm": {"fuse_norm_relu": True, "enable_nhwc": True},
    "conv winograd": {"cpu_kernels": ["winograd"], "enable_nhwc": True},
}
# every speed switch that a CPU can use in eager steps, one at a time
SWITCHES = {
    "amp": {"enable_amp": True},
    "O2": {"opt_level": "O2"},
    "loss scale": {"enable_amp": True, "loss_scale": 128, "enable_extra_opts": ["fused_optimizer"]},
    "nhwc": {"enable_nhwc": True},
    "fused": {"enable_extra_opts": ["fused_optimizer"]},
    "set to none": {"enable_extra_opts": ["zero_grad_set_to_none"]},
    "cudnn benchmark": {"enable_extra_opts": ["cudnn_benchmark"]},
    "stem": {"stem_channels": 8},
    "conv products": {"cpu_kernels": ["weight_products"], "enable_nhwc": True},
    **(COMPILED_KERNELS if HAS_COMPILER else {}),
    "accumulation": {"micro_batch_size": 16},
}
OWN_LAYERS = {"stem": 1, "fused norm": 3, "conv products": 8, "conv winograd": 4}  # in resnet8, by switch


@pytest.fixture(autouse=True)
def kernels_in_small_networks(monkeypatch):
    for name in (torch.float32, torch.bfloat16):
        monkeypatch.setitem(weight_products.MIN_CHANNEL_PAIRS, name, 200)
    monkeypatch.setattr("utils.kernels.winograd.MIN_CHANNEL_PAIRS", 200)


@pytest.mark.parametrize(("name", "layers"), OWN_LAYERS.items())
def test_training_continues_with_and_without_our_own_layers(tiny, one_rank, name, layers):
    if name not in SWITCHES:
        pytest.skip("no C++ compiler")
    changes = {"lr": 0.02, "enable_nhwc": True}
    learners = [Trainer(tiny(**changes | others), one_rank).learner for others in ({}, SWITCHES[name])]
    own = (ChannelPaddedConv2d, ProductConv2d, WinogradConv2d)
    counts = [sum(isinstance(part, own) or is_fused(part) for part in one.model.modules()) for one in learners]
    assert counts == [0, layers]
    check_equal_training(learners)
    if name.startswith("conv "):  # FLOPs are the network's, whatever the method
        assert len({flops_per_image(one.model, (3, 32, 32)) for one in learners}) == 1


@pytest.mark.parametrize("kind", [ProductConv2d, *([WinogradConv2d] if HAS_COMPILER else [])])
def test_only_needed_gradients_are_computed(kind):
    layer, images = nn.Conv2d(32, 48, 3, padding=1), torch.randn(2, 32, 6, 6, requires_grad=True)
    layer.__class__ = kind
    with torch.no_grad():
        assert layer(images).grad_fn is None
    layer(images.detach()).sum().backward()  # a first layer: no gradient of the images
    assert layer.weight.grad.any()
    layer.weight.requires_grad_(False).grad = None
    layer(images).sum().backward()
    assert layer.weight.grad is None and layer.bias.grad.any() and images.grad.any()


def test_a_compiled_step_equals_the_eager_one_and_keeps_parameter_names(tiny, one_rank, monkeypatch):
    monkeypatch.setattr("tools.bench.common.build_model", lambda config, **_: Small())
    trainings = [build_measured(tiny(enable_compile=compiled), one_rank) for compiled in (False, True)]
    for seed in range(4):
        images = torch.randn(8, 3, 32, 32, generator=torch.Generator().manual_seed(seed))
        for training in trainings:
            training.train_step(images, torch.arange(8))
    eager, compiled = (training.model.state_dict() for training in trainings)
    assert list(eager) == list(compiled)
    for name, value in eager.items():
        torch.testing.assert_close(compiled[name], value, rtol=1e-4, atol=1e-5)
    assert trainings[1].update.compiled_shapes
    torch.testing.assert_close(trainings[0].sums.sums, trainings[1].sums.sums, rtol=1e-5, atol=0)


def test_compile_without_a_compiler_is_refused(tiny, monkeypatch):
    """auto compiles for CUDA where a compiler is found; a CPU gains nothing."""
    auto = tiny(enable_compile="auto")
    assert plan_on(auto, "cuda").compiled is (not missing_compiler(gpu=True)) and not plan_on(auto).compiled
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(ConfigError, match=r"enable_compile needs a C\+\+ compiler, but no-such-compiler is not found"):
        plan_on(tiny(enable_compile=True))
    assert not (plan := plan_on(auto, "cuda")).compiled and not plan.prefetched


def test_the_measured_step_is_the_training_step(tiny, one_rank):
    config = tiny(clip_grad_norm=0.01, label_smoothing=0.1, micro_batch_size=8, enable_amp=True)
    trainer, measured = (build(config, one_rank) for build in (Trainer, build_measured))
    trainer.loaders.train.set_epoch(0)
    for images, labels in trainer.loaders.train:
        trainer.learner.train_step(images, labels)
        measured.train_step(images, labels)
    for name, value in trainer.learner.model.state_dict().items():
        assert torch.equal(value, measured.model.state_dict()[name]), name


@pytest.mark.parametrize("graphed", [False, True])
def test_learning_rate_as_number_and_as_tensor(tiny, graphed, monkeypatch):
    optimizer = build_optimizer(tiny(lr=0.5, weight_decay_bn_bias=False), nn.Linear(1, 2).parameters(), graphed=graphed)
    before = optimizer.param_groups[0]["lr"]
    for factor in (0.5, 0.25):
        with monkeypatch.context() as patches, HostReads(patches) as reads:
            set_learning_rate(optimizer, factor)
        assert reads.count == 0, "a rate on the device is written without reading it"
        assert [float(group["lr"]) for group in optimizer.param_groups] == [0.5 * factor] * 2
    assert (optimizer.param_groups[0]["lr"] is before) is graphed  # a graph reads the tensor of its capture


class HostReads(TorchDispatchMode):
    """Counts the operations in which the host reads a tensor's value, for which it would wait for a GPU."""

    def __init__(self, monkeypatch):
        super().__init__()
        self.count = 0
        self.separate = Counter()
        for name in ("cpu", "tolist", "numpy", "item", "__bool__", "__float__", "__int__"):
            monkeypatch.setattr(Tensor, name, self._counted(getattr(Tensor, name)))

    def _counted(self, method):
        def call(*args, **kwargs):
            self.count += 1
            return method(*args, **kwargs)

        return call

    def counted_separately(self, method, name):
        """Wrap `method` so that its reads are counted under `name`."""

        def call(*args):
            before = self.count
            result = method(*args)
            self.separate[name] += self.count - before
            self.count = before
            return result

        return call

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        reads = (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.is_nonzero.default)
        self.count += function in (*reads, torch.ops.aten.nonzero.default, torch.ops.aten.masked_select.default)
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", ["recipe", "unfused scale", *SWITCHES])
def test_the_host_reads_values_only_at_log_points(tiny, one_rank, monkeypatch, tmp_path, name):
    """The one exception: without a fused optimizer, PyTorch's scaler reads whether to skip the step."""
    others = {"recipe": RECIPE, "unfused scale": {"enable_amp": True, "loss_scale": 128}}
    trainer = Trainer(tiny(log_freq=1000, **(SWITCHES | others)[name]), one_rank)
    logger = RunLogger(tmp_path, enabled=True, to_screen=False)
    with logger.open() as trainer.run.log, HostReads(monkeypatch) as reads:
        monkeypatch.setattr(trainer, "_log_point", reads.counted_separately(trainer._log_point, "log points"))
        # the flags of signals are always on the CPU
        monkeypatch.setattr(trainer.requests, "poll", reads.counted_separately(trainer.requests.poll, "polls"))
        trainer.train_one_epoch()
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 1
    assert (reads.count > 0) is (name == "unfused scale") and reads.separate["log points"] > 0


def test_gradients_are_averaged_once_per_step(tiny, one_rank, monkeypatch):
    """With the last of four micro-batches, in one bucket."""
    buckets = []

    def reduce(state, bucket):
        buckets.append(bucket)
        return default_hooks.allreduce_hook(None, bucket)

    monkeypatch.setattr("utils.training.learner.distribute", wrap_in_ddp)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        learner = build_measured(tiny(micro_batch_size=2, batch_size=8), one_rank)
        learner.update.distributed.register_comm_hook(None, reduce)
        learner.train_step(torch.randn(8, 3, 32, 32), torch.randint(10, (8,)))
    finally:
        dist.destroy_process_group()
    assert learner.update.accumulation == 4 and len(buckets) == 1


def test_a_graph_is_captured_after_11_steps_of_each_image_size_and_replays_on_the_batch(monkeypatch):
    update, cuda, replayed = MagicMock(), MagicMock(), []  # a graph replays without the update
    monkeypatch.setattr(torch, "cuda", cuda)
    graphed = GraphedUpdate(update, torch.device("meta"))
    cuda.CUDAGraph.return_value.replay = lambda: replayed.append(graphed.images.mean() + graphed.labels.mean())
    for size in (8, 4):
        for number in range(14):
            images, labels = torch.full((2, 3, size, size), float(number)), torch.full((2,), 100.0 * number)
            assert graphed.replays(images) is (number > 11)
            graphed(images, labels)
    assert replayed == [1111, 1212, 1313] * 2 and update.call_count == 2 * 12 and cuda.CUDAGraph.call_count == 2
    assert cuda.Stream().wait_stream.call_count == cuda.current_stream().wait_stream.call_count == 2 * 11


def test_prefetched_batches_are_waited_for_and_keep_their_memory(monkeypatch):
    monkeypatch.setattr(torch, "cuda", cuda := MagicMock())
    batches = [(MagicMock(), MagicMock()) for _ in range(3)]
    for number, batch in enumerate(prefetch(MagicMock(), iter(batches), torch.device("meta"))):
        assert batch is batches[number] and cuda.current_stream().wait_stream.call_count == number + 1
        assert all(tensor.record_stream.called for tensor in batch)


@pytest.mark.slow
def test_kept_memory_is_not_faulted_in_again():
    """Page faults of ten allocations of 64 MB, in a process of its own, as the setting cannot be undone."""
    program = """
import resource, sys, torch
from tests.conftest import plan_on, tiny_config
from utils.training.learner import prepare_backends
config = tiny_config(cpu_kernels=sys.argv[1:] or False)
prepare_backends(config, plan_on(config))
torch.ones(16_000_000)
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(10):
    torch.ones(16_000_000)
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""
    kept, freed = (
        int(subprocess.run([sys.executable, "-c", program, *names], cwd=ROOT, capture_output=True, check=True).stdout)
        for names in (["keep_memory"], [])
    )
    # seldom 0, since the kernel may reclaim idle pages; without the setting's effect both are equal
    assert kept * 2 < freed
