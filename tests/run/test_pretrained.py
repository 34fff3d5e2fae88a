"""`pretrained`: a new run starts from the weights of each kind of file, and a file that does not fit is refused."""

import json
from pathlib import Path

import pytest
import torch
import torchvision
from safetensors.torch import save_file

from models import build_model
from tests.conftest import tiny_config
from tests.processes import run_job
from tools import export
from train import Trainer
from utils.distributed.ranks import run_ranks
from utils.errors import CheckpointError
from utils.run.folder import open_run
from utils.run.pretrained import read_pretrained


def begin(config, one_rank, folder):
    """Return (the network's initial state, the notes) of a new run."""
    trainer = Trainer(config, one_rank, folder)
    trainer.run.log.waiting.clear()
    open_run(trainer.run, "auto").close()
    return trainer.learner.weights.state_dict(), trainer.run.log.waiting


def assert_equal(state, expected):
    assert state.keys() == expected.keys()
    assert [name for name, value in expected.items() if not torch.equal(state[name], value)] == []


@pytest.fixture
def other(tiny):
    """A random state of resnet8 with 10 classes, unlike any initialisation."""
    torch.manual_seed(99)
    state = build_model(tiny()).state_dict()
    return {name: torch.rand_like(value) if value.is_floating_point() else value + 7 for name, value in state.items()}


@pytest.mark.parametrize(("kind", "changes"), [("safetensors", {"enable_nhwc": True, "ema_decay": 0.9}), ("pth", {})])
def test_a_run_starts_from_a_file_that_a_resumed_run_does_not_need(tiny, one_rank, tmp_path, other, kind, changes):
    path = tmp_path / f"weights.{kind}"
    save_file(other, path) if kind == "safetensors" else torch.save(other, path)
    state, (note,) = begin(tiny(pretrained=str(path), **changes), one_rank, tmp_path / "run")
    assert_equal(state, other)
    assert note.startswith(f"Starting from {len(other)} tensors of {path} (SHA-256 ") and "newly" not in note
    folder, frozen = tmp_path / "frozen", {"lr": 1e-30, "weight_decay": 0.0}  # training does not change the weights
    keys = {"pretrained": str(path), "max_epochs": 1, **frozen, **changes}
    Trainer(tiny(**keys), one_rank, folder).train()
    path.unlink()
    Trainer(tiny(**keys | {"max_epochs": 2}), one_rank, folder, "tiny", resume=str(folder)).train()
    ended = torch.load(max((folder / "checkpoints").glob("step-*")), weights_only=True)["model"]
    assert torch.equal(ended["conv1.weight"], other["conv1.weight"])
    assert "Starting from" in (folder / "train.log").read_text()


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("changes", [{}, {"ema_decay": 0.5}], ids=["the model", "its average"])
def test_a_checkpoint_and_its_export_give_the_same_validated_weights(tiny, one_rank, tmp_path, changes, capsys):
    trainer = Trainer(tiny(max_epochs=1, **changes), one_rank, tmp_path / "earlier")
    trainer.train()
    assert export.main([str(tmp_path / "earlier")]) == 0
    expected = trainer.learner.validated.state_dict()
    for file in ("checkpoints/best.pt", "export/model.safetensors"):
        state, _ = begin(tiny(pretrained=str(tmp_path / "earlier" / file)), one_rank, tmp_path / file)
        assert_equal(state, expected)
    best = tmp_path / "earlier/checkpoints/best.pt"
    best.write_bytes(best.read_bytes()[:-1])  # torch.load would not notice it
    with pytest.raises(CheckpointError, match="is damaged"):
        read_pretrained(str(best), expected, [*"abcdefghij"])


def test_torchvisions_file_gives_all_but_the_head(tiny, one_rank, tmp_path):
    """In the older format, which lacks BatchNorm's counters. O2: master weights, too."""
    torch.manual_seed(5)
    published = torchvision.models.resnet18(num_classes=1000).state_dict()
    older = {name: value for name, value in published.items() if not name.endswith("num_batches_tracked")}
    torch.save(older, tmp_path / "resnet18.pth", _use_new_zipfile_serialization=False)
    config = tiny(model="resnet18", pretrained=str(tmp_path / "resnet18.pth"), opt_level="O2", amp_dtype="bf16")
    fresh = Trainer(tiny(model="resnet18"), one_rank).learner.model.state_dict()
    state, (note,) = begin(config, one_rank, tmp_path / "run")
    assert_equal(state, published | {name: fresh[name] for name in ("fc.weight", "fc.bias")})
    assert note.endswith("; fc.weight, fc.bias newly initialised, for 10 classes instead of 1000")


@pytest.mark.parametrize(("make", "message"), [
    (lambda good: {name: value for name, value in good.items() if not name.startswith("layer3")},
     r"does not fit this network: 'layer3.0.conv1.weight' missing -> float32 .* and \d+ more\nchoose the net"),
    (lambda good: good | {"fc.weight": torch.ones(7, 64), "fc.bias": torch.ones(7), "bn1.bias": torch.ones(7)},
     r"'bn1.bias' float32 \[7\] -> float32 \[16\], 'fc.weight' float32 \[7, 64\] -> "),
    (lambda good: Path("/"), "is no file of torch.save with only tensors and plain values"),  # it would run code
    (None, "cannot be read: No such file or directory"),
], ids=["missing", "head and more", "code", "nowhere"])  # fmt: skip
def test_a_file_that_does_not_fit_is_refused_with_the_differences(tiny, one_rank, tmp_path, other, make, message):
    """In at most two lines, and an earlier run is not moved."""
    path = tmp_path / "weights.pth"
    if make:
        torch.save(make(other), path)
    (tmp_path / "run/checkpoints").mkdir(parents=True)
    with pytest.raises(CheckpointError, match=message) as refused:
        Trainer(tiny(pretrained=str(path)), one_rank, tmp_path / "run", "tiny", "never").train()
    assert str(refused.value).startswith((f"pretrained {path}: ", f"{path}: weights "))
    assert str(refused.value).count("\n") <= 1 and not (tmp_path / "run.1").exists()


@pytest.mark.parametrize("there", [[*"badcefghij"], [*"abcdefghi", "z"], [*"abcdefgh", "i", "e\u0301"]])
def test_a_head_of_other_classes_or_another_order_is_refused(tmp_path, other, there):
    """Also of a name that differs only in its Unicode form, as of a folder that was copied from a Mac."""
    here = [*"abcdefghi", "\u00e9" if there[-1] == "e\u0301" else "j"]
    path = tmp_path / "weights.safetensors"
    save_file(other, path, {"data": json.dumps({"class_names": there})})
    with pytest.raises(CheckpointError, match=f"its head is for other classes .*\ngive .* names {there[0]}, "):
        read_pretrained(str(path), other, here)
    assert_equal(read_pretrained(str(path), other, there)[0], other)


def save_each_ranks_initial_weights(folder):
    def act(world):
        trainer = Trainer(tiny_config(pretrained=str(folder / "weights.pth")), world, folder / "run")
        with open_run(trainer.run, "auto"):
            torch.save(trainer.learner.model.state_dict()["conv1.weight"], folder / f"rank-{world.rank}.pt")

    return run_ranks(act, "cpu", 60)


def test_two_ranks_start_from_the_file_that_one_of_them_reads(tmp_path, other):
    torch.save(other, tmp_path / "weights.pth")
    ended = run_job(tmp_path / "job", 2, save_each_ranks_initial_weights, tmp_path)
    assert [process.status for process in ended] == [0, 0], ended[0].errors
    for rank in (0, 1):
        assert torch.equal(torch.load(tmp_path / f"rank-{rank}.pt", weights_only=True), other["conv1.weight"])
