"""Two ranks on two GPUs of the fake CUDA runtime (tests/system/fake_cuda): DDP over NCCL equals DDP over gloo on the
CPU, and one process for both GPUs (DataParallel) equals one GPU.

Both sides compute with PyTorch's CPU kernels, and a sum of two numbers does not depend on their order. But vectorised
loops may start elsewhere at other addresses and so round differently, which float32 training amplifies to 2e-4 in 20
steps (tests/distributed/test_distributed.py). Here are 14: DDP needs 11 eager ones, the next is captured, the rest are
replayed."""

import itertools
import json
import os
import secrets
import signal
from typing import Any

import pytest
import torch

from tests.conftest import TINY, read_records, tiny_config
from tests.processes import complaints, run_job
from tests.system.fake_cuda import arithmetic, runtime
from train import Trainer
from utils.distributed.ranks import run_ranks
from utils.training.averages import RunningStatistics
from utils.training.step import GraphedUpdate

on_fake = pytest.mark.skipif(not runtime.is_active(), reason="compares the fake CUDA runtime with the CPU")
pytestmark = [pytest.mark.gpu, on_fake]

BATCH, TOLERANCE = 16, 1e-5
GRAPHS: dict[str, Any] = {"enable_cuda_graphs": True}
ACCUMULATION: dict[str, Any] = {"micro_batch_size": 4}
SWITCHES: dict[str, Any] = {"bucket_cap_mb": 0.02, "enable_prefetch": True, "ema_decay": 0.8}
SWITCHES |= {"verify_every_steps": 1, "deterministic": True}
RUNS = {"plain": {}, "switches": ACCUMULATION | SWITCHES}
ON_GPUS = {name: changes | GRAPHS for name, changes in RUNS.items()}
NOT_ON_A_CPU = dict.fromkeys(("enable_cuda_graphs", "enable_prefetch", "enable_sync_bn"), False)


def configuration(device, **changes):
    few = {"batch_size": BATCH, "limit_train_batches": 14, "max_epochs": 1, "lr": 0.01, "device": device}
    few["enable_extra_opts"] = ["fused_optimizer"]
    return tiny_config(**few | changes | (NOT_ON_A_CPU if device == "cpu" else {}))


def train_runs(folder, device, runs, who=-1, number=signal.SIGTERM):
    """Train whole runs; save each rank's weights and buffers in `folder`. Rank `who` sends itself a signal before its
    last step but one, which is replayed if the run uses a graph."""
    if device == "cuda":
        arithmetic.start()

    def action(world):
        for name, changes in runs.items():
            config = configuration(device, **changes)
            is_new = not (folder / name).exists()  # a resumed run may end before its capture
            trainer = Trainer(config, world, folder / name, name)
            if world.rank == who:
                interrupt(trainer, number)
            trainer.train()
            update = trainer.learner.update
            if is_new and config.enable_cuda_graphs:
                assert isinstance(update, GraphedUpdate) and update.captured
            state = {key: value.cpu() for key, value in trainer.learner.model.state_dict().items()}
            torch.save(state, folder / f"{name}-{world.rank}.pt")
        if device == "cuda":
            print(json.dumps(runtime.take_violations()), flush=True)

    return run_ranks(action, device, 300)


def interrupt(trainer, number):
    train_step, steps = trainer.learner.train_step, itertools.count(1)

    def train(images, labels):
        if next(steps) == 13:
            os.kill(os.getpid(), number)
        train_step(images, labels)

    trainer.learner.train_step = train


def lose_a_rank(folder):
    """Kill rank 1 while rank 0 waits for it in the replay of a graph."""
    return train_runs(folder, "cuda", {"lost": GRAPHS}, 1, signal.SIGKILL)


def train_in_halves(folder, device, runs):
    """Keep BatchNorm's statistics of the first of two micro-batches only, as DataParallel does."""

    def keep_the_first(statistics, last):
        first = statistics.buffers["statistics"], statistics.means["statistics"]
        torch._foreach_copy_(*(first if last else first[::-1]))

    RunningStatistics.collect = torch.no_grad()(keep_the_first)
    return train_runs(folder, device, runs)


def start(folder, program, *arguments, ranks=2):
    return run_job(folder / secrets.token_hex(4), ranks, program, *arguments, timeout=300, FAKE_CUDA_DEVICES="2")


def train_on(folder, device, runs, ranks=2, program=train_runs):
    """Return for each run its epoch's record and each rank's state."""
    folder.mkdir(exist_ok=True)
    ended = start(folder, program, folder, device, runs, ranks=ranks)
    assert [process.status for process in ended] == [0] * ranks, [process.errors for process in ended]
    if device == "cuda":
        assert [json.loads(process.output.splitlines()[-1]) for process in ended] == [[]] * ranks
    found = {}
    for name in runs:
        (epoch,) = read_records(folder / name, "epoch")
        found[name] = epoch, [torch.load(folder / f"{name}-{rank}.pt") for rank in range(ranks)]
    return found


def assert_equal(here, there):
    """Ranks of a run must be bitwise equal; runs within `TOLERANCE`, relative, in the Euclidean norm."""
    (epoch, states), (other_epoch, (other, *_)) = here, there
    for state in states[1:]:
        assert all(torch.equal(value, states[0][key]) for key, value in state.items())
    for key in ("loss/train", "loss/valid"):
        assert epoch[key] == pytest.approx(other_epoch[key], rel=TOLERANCE), key
    for key in ("acc1/train", "acc1/valid", "images/valid"):
        assert epoch[key] == other_epoch[key], key
    flat = [torch.cat([state[key].double().flatten() for key in other]) for state in (states[0], other)]
    assert (flat[0] - flat[1]).norm() < TOLERANCE * flat[1].norm()


@pytest.fixture(scope="module")
def on_gpus(tmp_path_factory):
    return train_on(tmp_path_factory.mktemp("gpus"), "cuda", ON_GPUS)


def test_two_ranks_over_nccl_equal_two_over_gloo(tmp_path, on_gpus):
    on_cpu = train_on(tmp_path, "cpu", RUNS)
    for name in RUNS:
        assert_equal(on_gpus[name], on_cpu[name])


def test_batch_norm_over_two_ranks_equals_one_rank_with_the_whole_batch(tmp_path):
    """For one step, since sums in another order round differently, which grows; a graph equals eager steps."""
    one_step = {"limit_train_batches": 1}
    sync = {"enable_sync_bn": True, "limit_valid_batches": TINY["limit_valid_batches"] // 2}  # of each rank
    two = train_on(tmp_path / "two", "cuda", {"step": sync | one_step, "eager": sync, "graphs": sync | GRAPHS})
    (one_rank,) = train_on(tmp_path / "one", "cpu", {"step": one_step}, ranks=1).values()
    assert_equal(two["step"], one_rank)
    assert_equal(two["graphs"], two["eager"])


def test_one_process_for_two_gpus_equals_one_gpu_with_half_the_batch_at_a_time(tmp_path):
    """Both normalise each half of a batch by its own statistics."""
    few = {"limit_train_batches": 5}
    precisions = {"float32": few, "fp16": few | {"enable_amp": True}, "O2": few | {"opt_level": "O2"}}
    both = {f"{name}-both": changes | {"parallel": "dataparallel"} for name, changes in precisions.items()}
    halves = {f"{name}-halves": changes | {"micro_batch_size": BATCH // 2} for name, changes in precisions.items()}
    found = train_on(tmp_path, "cuda", both | halves, ranks=1, program=train_in_halves)
    for name, (_, (state,)) in found.items():
        counts = [state.pop(key).item() for key in list(state) if key.endswith("num_batches_tracked")]
        assert set(counts) == {5 if name in both else 10}
    for name in precisions:
        assert_equal(found[f"{name}-both"], found[f"{name}-halves"])


def test_two_ranks_stop_and_resume_in_mid_epoch(tmp_path, on_gpus):
    """After a signal to one of them, with a graph and prefetched batches."""
    runs = {"switches": ON_GPUS["switches"]}
    stopped = start(tmp_path, train_runs, tmp_path, "cuda", runs, 1)
    assert [process.status for process in stopped] == [75, 75], [process.errors for process in stopped]
    assert_equal(train_on(tmp_path, "cuda", runs)["switches"], on_gpus["switches"])


def test_a_rank_that_waits_in_a_replay_ends_when_another_is_killed(tmp_path):
    first, second = start(tmp_path, lose_a_rank, tmp_path)
    assert (first.status, second.status) == (1, -signal.SIGKILL)
    (line,) = [line for line in complaints([first]) if "error" in line.lower()]  # besides PyTorch's warnings
    assert line.startswith("error: rank 0: no answer from rank 1 (process "), line
