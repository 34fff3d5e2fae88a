"""train_simple.py: plain PyTorch, and on the same batches bitwise equal to train.py's block bs128."""

import re
import sys
from functools import partial

import pytest
import torch
from torchvision.datasets import FakeData

import train_simple
from models.config import ModelConfig
from tests.conftest import CIFAR100, ROOT
from train import Trainer
from utils.config import load_config
from utils.training.validation import validate


def test_on_the_same_batches_its_weights_equal_those_of_train_py(tiny, one_rank, monkeypatch, capsys):
    """Bitwise, over an epoch of training, its validation, and a cut of the learning rate."""
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", True)
    config = tiny("bs128", valid_batch_size_per_gpu=1100)  # and 900 images
    trainer = Trainer(config, one_rank)
    simple = train_simple.Trainer(ModelConfig(model=config.model, num_classes=10), one_rank.device, config.seed)
    assert not torch.backends.cudnn.allow_tf32
    learner, train, valid = trainer.learner, list(trainer.loaders.train), list(trainer.loaders.valid)
    # an epoch with its own loss, then 13 short ones of loss 2: after 11 without progress the rate is cut
    for fixed in (None, *[2.0] * 13):
        learner.model.train()
        for images, labels in train[:1] if fixed else train:
            learner.train_step(images, labels)
        found = simple.train_one_epoch(train[:1] if fixed else train)
        assert found == learner.sums.average_since_last(one_rank)["loss"]
        if fixed is None:
            theirs = validate(learner, valid, one_rank).average(one_rank)
            assert simple.validate_one_epoch(valid) == pytest.approx((theirs["loss"], theirs["acc1"]), abs=0)
        learner.schedule.observe(fixed or 2.0, learner.steps)
        simple.scheduler.step(fixed or 2.0)
    assert simple.optimizer.param_groups[0]["lr"] == learner.learning_rate == 0.1 * 0.2
    assert list(learner.model.state_dict()) == list(simple.model.state_dict())
    for name, value in learner.model.state_dict().items():
        assert torch.equal(value, simple.model.state_dict()[name]), name
    simple.train_one_epoch, simple.validate_one_epoch = lambda _: 1.0, lambda _: (1.5, 0.25)
    simple.train((), (), 1)  # the plateau observes the validation
    assert simple.scheduler.best == 1.5 and "train loss 1.0000, valid loss 1.5000" in capsys.readouterr().out


def test_its_settings_equal_those_of_the_block(monkeypatch):
    block = load_config(CIFAR100, "bs128")
    fake = partial(FakeData, 300, (3, 32, 32))
    monkeypatch.setattr(train_simple, "CIFAR100", lambda path, train, transform, download: fake(transform=transform))
    train, valid = (train_simple.build_loader("", training) for training in (True, False))
    assert [len(train), len(valid)] == [2, 3]  # a partial last batch is only validated
    assert [type(loader.sampler).__name__ for loader in (train, valid)] == ["RandomSampler", "SequentialSampler"]
    (crop, flip, turn, *plain), validated = (loader.dataset.transform.transforms for loader in (train, valid))
    assert (crop.padding, flip.p, turn.degrees[1]) == (block.rnd_crop_padding, 0.5, block.rnd_rotation_angle)
    assert [*map(str, plain)] == [*map(str, validated)]
    assert (train.batch_size, valid.batch_size) == (block.batch_size, block.valid_batch_size_per_gpu)
    assert pytest.approx(block.cifar100_mean) == train_simple.MEAN
    assert pytest.approx(block.cifar100_std) == train_simple.STD


def test_it_runs_and_needs_only_pytorch_torchvision_and_the_networks(monkeypatch, capsys):
    monkeypatch.setattr(train_simple, "CIFAR100", lambda _, transform, **__: FakeData(128, (3, 36, 36), 100, transform))
    small, usual = train_simple.build_model(ModelConfig(model="resnet8", num_classes=100)), ModelConfig(num_classes=100)
    monkeypatch.setattr(train_simple, "build_model", lambda config: small if config == usual else None)
    monkeypatch.setattr(sys, "argv", ["train_simple.py", "--epochs", "1"])
    train_simple.main()
    assert re.search(r"^Time taken for epoch 1 is [\d.]+ sec, valid acc1=0\.\d+$", capsys.readouterr().out, re.M)
    packages = re.findall(r"^ *(?:import|from) (\w+)", (ROOT / "train_simple.py").read_text(), re.M)
    assert {*packages} - sys.stdlib_module_names == {"torch", "torchvision", "models"}
