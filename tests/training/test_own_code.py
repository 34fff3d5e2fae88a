"""A user's own network and dataset: they train like the project's; errors name the user's line."""

import json
import re
import sys
from dataclasses import replace
from importlib.util import find_spec
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import train
from models import build_model
from tests.conftest import ROOT, read_records, run, without_times
from tests.tiny_shards import DALI
from tools import export
from tools.doctor import machine
from train import Trainer
from utils.config.command_line import Arguments
from utils.data.build import build_loaders, find_dataset, open_dataset
from utils.data.datasets.custom import load_own
from utils.errors import CheckpointError, ConfigError, DataError, explain
from utils.training.checks.start import check_network

PRINTED = re.search(r"```python\n([^`]*class Frozen[^`]*)```", (ROOT / "docs/own_code.md").read_text("utf-8"))[1]
CODE = """
import numpy as np
import torch
from torch import nn
from PIL import Image

def network(num_classes):
    layers = [nn.Conv2d(3, 8, 3, stride=2), nn.BatchNorm2d(8), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten()]
    return nn.Sequential(*layers, nn.Linear(8, num_classes))

def with_buffer(model, name, value, persistent=False):
    model.register_buffer(name, value, persistent)
    return model

frozen = lambda num_classes: with_buffer(Frozen(num_classes), "constant", torch.tensor([0, torch.nan]))  # NaN != NaN
unsaved = lambda num_classes: with_buffer(counts(num_classes), "mean", torch.ones(()))
complex_buffer = lambda num_classes: with_buffer(network(num_classes), "phase", torch.tensor(1j), persistent=True)

class Counts(nn.Sequential):
    def __init__(self, mean, *layers):
        super().__init__(*layers)
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))
        self.register_buffer("mean", mean)

    def forward(self, images):
        if self.training:
            self.count += 1
            self.mean = 0.9 * (images.mean() if self.mean is None else self.mean) + 0.1 * images.mean()
        return super().forward(images / (1 + (0 if self.mean is None else self.mean.abs())))

def counts(num_classes):
    shared = nn.Linear(8, 8)
    shared.computed = shared.weight * 2  # as the weight of the old torch.nn.utils.weight_norm
    return Counts(torch.ones(()), *network(num_classes)[:-1], shared, shared, nn.Dropout(), nn.Linear(8, num_classes))

def unused(num_classes):
    model = network(num_classes)
    model[0].frozen = nn.Parameter(torch.ones(()), requires_grad=False)
    model[0].extra = nn.Linear(1, 1)
    return model

class Viewed(nn.Linear):
    def forward(self, images):
        return super().forward(images.view(len(images), -1)).squeeze()

class Branches(nn.Linear):
    def forward(self, images):
        return super().forward((images if images.sum() > 1e9 else -images).flatten(1))

branches = lambda num_classes: Branches(3072, num_classes)
viewed = lambda num_classes: Viewed(3072, num_classes)
few = lambda num_classes: nn.Sequential(*network(num_classes)[:-1], nn.BatchNorm1d(8), nn.Linear(8, num_classes))
leaves = lambda num_classes: exit(3)
pair = lambda num_classes: nn.Sequential(nn.Flatten(), nn.LSTM(3072, num_classes))
no_head = lambda num_classes: nn.Conv2d(3, 8, 3)
late = lambda num_classes: Counts(None, *network(num_classes))

def arrays(data_path, seed=0, count=400):
    rng = np.random.default_rng(seed)
    labels = rng.integers(0, 4, count)
    images = (rng.integers(0, 128, (count, 3, 16, 20)) + 30 * labels[:, None, None, None]).astype(np.uint8)
    return {
        "train": (images[:300, ::-1], labels[:300].astype(np.uint8)),
        "valid": (torch.from_numpy(images[300:]), labels[300:].tolist()),
        "class_names": ["a\\n", "b", "c", "d"], "std": (0.3, 0.3, 0.3),
    }

def files(data_path):
    given = arrays(data_path, count=320)
    lists = {}
    for name, folder in ("train", ""), ("valid", f"{data_path}/"):
        images, labels = given[name]
        for number, image in enumerate(np.asarray(images)):
            Image.fromarray(image.transpose(1, 2, 0)).save(data_path / f"{name}{number}.png")
        lists[name] = ([f"{folder}{name}{number}.png" for number in range(len(labels))], labels)
    return given | lists | {"mean": [0, 0.5, 0.5], "std": (0.2, 0.2, 0.2)}

no_data = lambda data_path: open(data_path / "nowhere.npy").read()

class Counted(torch.optim.RMSprop):
    def step(self, closure=None):
        for group in self.param_groups:
            group["count"] = group.get("count", 0) + 1
        return super().step(closure)

counted = lambda params, **values: Counted([group | {"count": 0} for group in params], **values)
no_optimizer = lambda params, lr, weight_decay, momentum: lr
"""
OWN = {"dataset": "of_mine:arrays", "num_classes": 4, "rnd_rotation_angle": 0, "limit_valid_batches": None}


@pytest.fixture(autouse=True)
def code(tmp_path, monkeypatch):
    """The working directory, with of_mine.py. Modules imported from it are removed from sys.modules at the end."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry != str(tmp_path)])
    before = set(sys.modules)
    (tmp_path / "of_mine.py").write_text(CODE + PRINTED)
    yield tmp_path
    for name in set(sys.modules) - before:
        if str(getattr(sys.modules[name], "__file__", "")).startswith(str(tmp_path)):
            del sys.modules[name]


def test_an_own_network_trains_like_a_built_in_one(tiny, one_rank, tmp_path, code):
    source = "from models import *\n"
    source += "network = lambda num_classes: build_model(ModelConfig(model='resnet8', num_classes=num_classes))"
    (code / "same").mkdir()
    (code / "same/net.py").write_text(source)
    names = "resnet8", "same.net:network"
    values = {"optimizer": "of_mine:counted", "max_epochs": 1}
    learners = [run(tiny(model=name, **values), one_rank, tmp_path / name).learner for name in names]
    assert all(map(torch.equal, *(learner.model.parameters() for learner in learners)))
    environment = json.loads((tmp_path / "same.net:network/environment.json").read_text())
    assert list(environment["own_code"]) == [str(code / "of_mine.py"), str(code / "same/net.py")]
    assert sys.path[-1] == str(code), "a file there would shadow a library"


@pytest.mark.parametrize("changes", [
    {"enable_extra_opts": ["fused_optimizer"], "clip_grad_norm": 1.0, "micro_batch_size": 16},
    {"opt_level": "O2", "optimizer": "adamw"},
    {"optimizer": "muon", "ema_decay": 0.5, "verify_every_steps": 1},
])  # fmt: skip
def test_frozen_layers_do_not_change(tiny, one_rank, tmp_path, changes):
    trainer = Trainer(tiny(model="of_mine:frozen", max_epochs=1, **changes), one_rank, tmp_path)
    before = {name: weight.clone() for name, weight in trainer.learner.weights.state_dict().items()}
    trainer.train()
    same = {name for name, weight in trainer.learner.state_dict()["model"].items() if torch.equal(weight, before[name])}
    assert same == {name for name in before if name.startswith(("conv1.", "bn1.", "layer1.", "layer2."))}


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_an_own_network_is_exported_without_its_code(tiny, one_rank, code, capsys):
    for name, status in (("network", 0), ("branches", 1)):
        run(tiny(model=f"of_mine:{name}", max_epochs=1), one_rank, code / name)
        assert export.main([str(code / name)]) == status
    program = torch.export.load(code / "network/export/model.pt2").module()
    assert program(torch.zeros(2, 3, 32, 32, dtype=torch.uint8)).shape == (2, 10)
    refused = r"torch\.export cannot follow the network; nothing was written: .*\n.*of_mine\.py:\d+: return super\(\)"
    assert re.search(refused, capsys.readouterr().err)


@pytest.mark.parametrize("changes", [{}, {"verify_every_steps": 1}], ids=["checked network", "verified steps"])
def test_checks_do_not_change_a_network_whose_buffer_is_assigned(tiny, one_rank, tmp_path, monkeypatch, changes):
    states = []
    for number, settings in enumerate((changes, {})):
        config = tiny(model="of_mine:counts", max_epochs=1, ema_decay=0.5, **settings)
        trainer = Trainer(config, one_rank, tmp_path / str(number))
        states.append([*trainer.learner.model.state_dict().values(), torch.get_rng_state()])
        trainer.train()
        states[-1] += [*trainer.learner.model.state_dict().values(), *trainer.learner.ema.network.buffers()]
        monkeypatch.setattr(train, "check_network", lambda *_: None)
    assert all(torch.equal(*pair) for pair in zip(*states, strict=True))


SMALL_FIRST = {"progressive_image_sizes": [[8, 0.5]]}
NO_TIMM = r'timm cannot be imported .*pip install "\.\[timm\]"'


@pytest.mark.parametrize(("model", "changes", "message"), [  # the model or the optimizer, other settings, the message
    ("of_mine:viewed", {"enable_nhwc": True}, r"\[2, 3, 32, 32\]: RuntimeError: view .*\n{file}:\d+: return super\(\)"),
    ("of_mine:viewed", SMALL_FIRST, r"\[2, 3, 8, 8\] in training: .*\n{file}:\d+: "),
    ("of_mine:viewed", {"valid_batch_size_per_gpu": 1999, "limit_valid_batches": None}, r"\[1, .*\] into \[10\]"),
    ("of_mine:few", {"micro_batch_size": 1}, r"\[1, 3, 32, 32\] in training: ValueError: "),
    ("vgg16", SMALL_FIRST, r"no logits for images \[2, 3, 8, 8\] in training: Runtime"),
    ("of_mine:complex_buffer", {}, "phase of its state is no tensor of real numbers"),
    ("of_mine:late", {}, r"its buffer mean is None at first and \[\] after training; give it its final shape"),
    ("of_mine:unsaved", {}, "its buffer mean is not saved, but changes; use no persistent=False"),
    ("of_mine:leaves", {}, r"SystemExit: 3\n{file}:\d+: leaves = lambda"),
    ("of_mine:pair", {}, r"no logits for images \[2, 3, 32, 32\]: AttributeError: 'tuple'"),
    ("of_mine:no_head", {}, r"turns images \[2, 3, 32, 32\] into \[2, 8, 30, 30\]; expected logits \[2, 10\]"),
    ("nowhere:network", {}, r"is not on Python's path or in {folder}, .*: No module named 'nowhere'"),
    ("broken:network", {}, r"cannot be imported: Syntax.*\n{folder}/broken.py:2: def network\(:"),
    ("timm:resnet18", {}, NO_TIMM),
    ("", {"optimizer": "of_mine:no_optimizer"}, "returned a float; expected a torch.optim.Optimizer"),
    ("", {"optimizer": "timm:lamb"}, NO_TIMM),
])  # fmt: skip
def test_what_fails_in_training_is_found_at_the_start(tiny, one_rank, code, monkeypatch, model, changes, message):
    """With the user's line, and before the folder is made."""
    for name in ("timm", "timm.optim"):
        monkeypatch.setitem(sys.modules, name, None)
    (code / "broken.py").write_text("\ndef network(:\n")
    settings = changes | ({"model": model} if model else {})
    with pytest.raises(ConfigError, match=message.format(file=code / "of_mine.py", folder=code)) as refused:
        Trainer(tiny(**settings), one_rank, code / "run")
    named = f"model {model}" if model else f"optimizer {changes['optimizer']}"
    assert str(refused.value).startswith(named) and str(refused.value).count("\n") <= 1
    assert not (code / "run").exists()


def test_outputs_must_depend_on_all_parameters_with_several_ranks(tiny, one_rank, code):
    learner = Trainer(tiny(model="of_mine:unused"), one_rank).learner
    learner.plan = replace(learner.plan, global_batch=replace(learner.plan.global_batch, world_size=2))
    with pytest.raises(ConfigError, match=r"do not depend on 0\.extra\.weight; with several ranks, remove it"):
        check_network(learner, "of_mine:unused", (3, 32, 32), [2])
    assert isinstance(explain(RuntimeError("parameters that were not used in producing loss")), ConfigError)  # of DDP


def test_timms_networks_are_built_for_the_datasets_size(tiny, one_rank):
    pytest.importorskip("timm", reason="timm is not installed")
    logits = Trainer(tiny(model="timm:test_vit"), one_rank).learner.model.eval()(torch.zeros(1, 3, 32, 32))
    assert logits.shape == (1, 10)
    with pytest.raises(ConfigError, match=r"model timm:test_vit_: RuntimeError: Unknown model \(test_vit_\)"):
        build_model(tiny(model="timm:test_vit_"))


@pytest.mark.parametrize("name", ["of_mine:counted", "timm:lamb"])
def test_own_and_timms_optimizers_train_and_resume(tiny, one_rank, tmp_path, monkeypatch, name):
    """Stopped and resumed bitwise equal to a whole run, with counts in the groups; verified steps count once."""
    if not find_spec("timm"):  # a mock: SGD with the given groups
        sgd = SimpleNamespace(create_optimizer_v2=lambda groups, opt, **values: torch.optim.SGD(groups, **values))
        monkeypatch.setitem(sys.modules, "timm.optim", sgd)
    values = {"optimizer": name, "weight_decay_bn_bias": False, "lr_schedule": "constant", "verify_every_steps": 1}
    learners, halves = [], tmp_path / "halves"
    for folder, epochs, resume in ((tmp_path / "whole", 2, "auto"), (halves, 1, "auto"), (halves, 2, str(halves))):
        learners.append(run(tiny(max_epochs=epochs, **values), one_rank, folder, resume).learner)
    whole, _, resumed = learners
    assert all(map(torch.equal, *(one.model.state_dict().values() for one in (whole, resumed))))
    assert (halves / "train.log").read_text().count("Verified 4 step(s), none wrong") == 2, "in each start's log"
    for kind in ("step", "epoch"):
        one, two = (without_times(read_records(folder, kind)) for folder in (tmp_path / "whole", halves))
        assert one == two and one, kind
    if name == "of_mine:counted":
        assert [learner.optimizer.param_groups[0]["count"] for learner in learners] == [8, 4, 8]
    other = Trainer(tiny(**values | (new := {"weight_decay": 0.1, "lr": 0.2, "momentum": 0.8})), one_rank).learner
    other.load_state_dict(whole.state_dict())  # LAMB has no momentum
    found = [[group.get(key, 0.8) for key in new] for group in other.optimizer.param_groups]
    assert found == [[0.1, 0.2, 0.8], [0.0, 0.2, 0.8]]


@pytest.mark.parametrize("loader", ["torchvision", "device", "synthetic", DALI])
@pytest.mark.parametrize("function", ["arrays", "files"])
def test_every_loader_takes_own_data(tiny, one_rank, code, loader, function):
    changes = {"dataset": f"of_mine:{function}", "data_path": str(code), "data_loader": loader}
    config = tiny(**OWN | changes, rnd_crop_padding=0, rnd_horizontal_flip=False, limit_train_batches=None)
    loaders = build_loaders(config, dataset := open_dataset(config, one_rank), one_rank)
    assert function == "arrays" or dataset.valid.names[0] == b"valid0.png", "not relative: the folder could not move"
    assert next(iter(loaders.train))[0].shape[1:] == (3, 16, 20 if function == "arrays" else 16)
    assert loaders.valid.normalise.std == ((0.3,) * 3 if function == "arrays" else (0.2,) * 3)
    labels = torch.cat([batch for _, batch in loaders.valid])
    expected = np.asarray(sys.modules["of_mine"].arrays(code, count=400 if function == "arrays" else 320)["valid"][1])
    assert loader == "synthetic" or labels.tolist() == expected.tolist()


def test_a_run_resumes_with_the_same_data_only(tiny, one_rank, tmp_path):
    config, folder = {"model": "of_mine:network", **OWN}, tmp_path / "run"
    assert run(tiny(**config | {"max_epochs": 1}), one_rank, folder).run.data["class_names"][0] == "a\\n"  # printable
    run(tiny(**config), one_rank, folder, resume=str(folder))
    sys.modules["of_mine"].arrays.__defaults__ = (1, 400)  # another seed: other images
    with pytest.raises(CheckpointError, match=r"was trained on other data.*fingerprint"):
        run(tiny(**config), one_rank, folder)


def split(name, images=lambda x: x, labels=lambda y: y):
    return lambda data: data | {name: (images(np.asarray(data[name][0])), labels(np.asarray(data[name][1])))}


@pytest.mark.parametrize(("spoil", "message"), [
    (lambda _: None, "returned None; expected a dict with the keys train, valid, class_names"),
    (lambda data: data | {"sdt": (1, 1, 1)}, "returned .*; expected a dict with the keys train, valid, class_names"),
    (lambda data: data | {"class_names": list("aacd")}, "class 'a' occurs twice; give each class another name"),
    (split("train", images=lambda x: x / 255), r"train: images are float64 \[300, 3, 16, 20\]; expected uint8"),
    (split("valid", images=lambda x: x[:, :, :8]), "train and valid differ; expected"),
    (split("train", images=lambda x: x.transpose(0, 2, 3, 1)), r"train: images are uint8 \[300, 16, 20, 3\]; expected"),
    (split("train", labels=lambda y: y / 1), r"train: labels are float64 \[300\] for 300 images; expected one integer"),
    (lambda data: data | {"mean": (125, 120, 110)}, "mean: is .*; expected three numbers from 0 to 1"),
    (split("train", labels=lambda y: y[1:]), r"train: labels are uint8 \[299\] for 300 images; expected one integer"),
    (split("train", labels=lambda y: y.astype(int) - 1), "train: labels range from -1 to 2; class_names has 4 names"),
    (lambda data: data | {"train": ({"a.png", "b.png"}, [0, 1])}, "train: is .*; expected the pair .* in an order"),
    (split("train", labels=lambda y: y + 1), "train: labels range from 1 to 4; class_names has 4 names"),
    (split("train", labels=lambda y: y % 3), "class 'd' has validation images only"),
    (lambda data: data | {"std": (0, 0.5, 0.5)}, "std: is .*; expected three numbers from 0 to 1, above 0 for std"),
])  # fmt: skip
def test_data_that_cannot_be_trained_on_is_named(tiny, monkeypatch, code, spoil, message):
    config = tiny(**OWN)
    good = find_dataset(config, download=False) and sys.modules["of_mine"].arrays(code)
    monkeypatch.setattr(sys.modules["of_mine"], "arrays", lambda data_path: spoil(good))
    with pytest.raises(DataError, match=message) as refused:
        load_own(config)
    assert str(refused.value).startswith("dataset of_mine:arrays")
    assert str(refused.value).count("\n") <= 1


def test_an_exception_in_the_users_function_is_missing_data_with_its_line(tiny, code, capsys):
    config = tiny(**OWN | {"dataset": "of_mine:no_data", "data_path": str(code)})
    assert train.main(Arguments(config, "tiny", code / "run", "auto", dry_run=True)) == 3
    error = capsys.readouterr().err
    assert "dataset of_mine:no_data: FileNotFoundError: " in error
    line = CODE[: CODE.index("nowhere.npy")].count("\n") + 1
    assert error.endswith(f'of_mine.py:{line}: no_data = lambda data_path: open(data_path / "nowhere.npy").read()\n')
    finding = machine.check_data(config)
    assert finding.level == "fail" and "of_mine.py" in finding.remedy


def test_an_image_size_is_for_image_files(tiny, one_rank):
    with pytest.raises(ConfigError, match="image_size is 32, for image files only"):
        Trainer(tiny(**OWN | {"image_size": 32}), one_rank)
