"""--dry-run: its memory estimate, several ranks, and that it leaves no files."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import train
from tests.conftest import tiny_config
from tests.processes import run_job
from utils.config.command_line import Arguments
from utils.data.datasets.cifar import VERSIONS
from utils.training.checks.dry_run import activation_bytes_per_image, state_bytes


@pytest.mark.parametrize("changes", [{}, {"momentum": 0}, {"optimizer": "adamw", "ema_decay": 0.9},
    {"opt_level": "O2"}])  # fmt: skip
def test_the_memory_estimate_counts_all_tensors_after_a_step(tiny, one_rank, changes):
    def size(tensors):
        return sum(tensor.nbytes for tensor in tensors if isinstance(tensor, torch.Tensor))

    config = tiny(**changes)
    trainer = train.Trainer(config, one_rank)
    trainer.learner.update(*next(iter(trainer.loaders.train)))
    ema, optimizer = trainer.learner.ema, trainer.learner.optimizer
    weights = {*trainer.learner.model.parameters(), *trainer.learner.weights.parameters()}
    moments = [value for state in optimizer.state.values() for name, value in state.items() if name != "step"]
    average = [] if ema is None else ema.network.state_dict().values()
    assert state_bytes(config, trainer.learner.weights) == 2 * size(weights) + size(moments) + size(average)
    assert "then x 0.2 after 11 epochs without" in trainer.describe()


def test_the_memory_estimate_counts_the_activations_that_autograd_keeps(tiny, one_rank):
    learner = train.Trainer(tiny(), one_rank).learner
    before = {name: value.clone() for name, value in learner.model.state_dict().items()}
    per_image = activation_bytes_per_image(learner.model, learner.criterion, learner.plan.precision, (3, 32, 32))
    first_stage = 16 * 32 * 32 * 4  # one feature map of the first stage, which keeps 7
    assert 7 * first_stage < per_image < 14 * first_stage
    assert all(torch.equal(value, before[name]) for name, value in learner.model.state_dict().items())


def test_a_dry_run_describes_and_writes_nothing(tiny, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("utils.training.checks.dry_run.activation_bytes_per_image", lambda *_: 10**9)
    schedule = {"lr": 0.1, "lr_schedule": [2], "lr_decay_factor": 0.1, "max_epochs": 3, "lr_scale_rule": "linear/8"}
    config = tiny("bs2048-warmup-opt", batch_size=32, micro_batch_size=8, **schedule)
    assert train.main(Arguments(config, "tiny", tmp_path / "run", "auto", dry_run=True)) == 0
    said = capsys.readouterr().out
    for words in ("78,042 parameters", "128 in 4 steps per epoch", " 8.00 GB per rank", "activations 8.00 GB"):
        assert words in said
    rates = said.partition("learning rate    schedule [2]\n")[2].splitlines()
    corners = [(int(line.split()[1]), float(line.split()[2])) for line in rates]
    assert corners == [(0, 0.4), (3, 0.4), (4, 0.4), (7, 0.4), (8, 0.04), (11, 0.04)]  # 4 steps an epoch
    assert not (tmp_path / "run").exists()


def dry_run_with_a_collective_in_the_forward_pass(folder):
    """Imitate enable_sync_bn, which needs CUDA."""
    build_model = train.build_model

    def build(config, **options):
        model = build_model(config, **options)
        model.register_forward_hook(lambda *_: dist.barrier() if model.training else None)
        return model

    train.build_model = build
    return train.main(Arguments(tiny_config(rank_timeout_seconds=100), "tiny", folder, "auto", dry_run=True))


def test_a_dry_run_describes_on_every_rank_and_prints_on_one(tmp_path):
    ended = run_job(tmp_path / "job", 2, dry_run_with_a_collective_in_the_forward_pass, tmp_path / "run")
    assert [process.status for process in ended] == [0, 0], ended[0].errors
    assert ended[0].output.count("memory estimate") == 1 and ended[1].output == ""


def test_a_dry_run_without_data_downloads_nothing_and_leaves_no_file(tiny, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(VERSIONS["cifar100"].dataset_class, "download", lambda _: pytest.fail("a download"))
    config = tiny(dataset="cifar100", num_classes=100, data_path="deep/data")
    assert train.main(Arguments(config, "tiny", Path("expts/tiny"), "auto", dry_run=True)) == 3
    said = capsys.readouterr()
    assert said.out == "" and list(tmp_path.iterdir()) == []
    assert "CIFAR-100 is not in deep/data" in said.err
    assert "tools.prepare_data --dataset cifar100 --data_path deep/data" in said.err
