"""tools.export: the exported network is the validated one, and can be used without this project's code."""

import json
import re
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from models import build_model
from tests.conftest import ROOT, read_records
from tools import export
from train import Trainer
from utils.config import Config
from utils.data.datasets.dataset import load_dataset, spread_over_classes
from utils.errors import ExpectedError
from utils.run.checkpoint import read_checkpoint

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # by torch.export


@pytest.fixture(scope="module")
def image_batch():
    """Pixels and labels of the two batches that the tiny run validates on."""
    valid = load_dataset("shapes", Path(), download=False).valid
    chosen = spread_over_classes(valid.labels, 200)
    return torch.from_numpy(valid.images[chosen]), torch.from_numpy(valid.labels[chosen])


@pytest.mark.parametrize("changes", [
    {"ema_decay": 0.8, "limit_train_batches": 80}, {"enable_nhwc": True, "opt_level": "O2", "loss_scale": 128.0},
], ids=["the average", "O2"])  # fmt: skip
def test_the_exported_program_classifies_as_validation_did(tiny, one_rank, tmp_path, image_batch, changes, capsys):
    Trainer(tiny(**{"limit_train_batches": 40} | changes), one_rank, tmp_path, "tiny", "auto").train()
    assert export.main([str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    pixels, labels = image_batch
    logits = torch.export.load(tmp_path / "export/model.pt2").module()(pixels)
    best = max(record["acc1/valid"] for record in read_records(tmp_path, "epoch"))
    found = (logits.argmax(1) == labels).float().mean().item()
    assert best > 0.15  # a guess: 0.1
    # O2 validates with half-precision weights, which may change a few of 200 predictions
    assert found == pytest.approx(best, abs=0.02 if "opt_level" in changes else 1e-6)
    assert f"best acc1 {100 * best:.2f} %" in printed


@pytest.fixture(scope="module")
def exported(tiny, one_rank, tmp_path_factory):
    """The exported files of a run under autocast that validates with two views of each image."""
    folder = tmp_path_factory.mktemp("exported")
    config = tiny(test_time_views=2, enable_amp=True, amp_dtype="bf16")
    Trainer(config, one_rank, folder / "run", "tiny", "auto").train()
    environment = {"version": "1.2", "commit": "c0ffee", "torch": "2", "command": ["train.py", "--config=tiny a"]}
    (folder / "run/environment.json").write_text(json.dumps(environment))
    assert export.main([str(folder / "run"), "--out", str(folder / "out")]) == 0
    return folder / "out"


def test_the_card_says_what_the_model_is_and_how_it_was_measured(exported):
    card = (exported / "MODEL_CARD.md").read_text()
    best = read_checkpoint(exported.parent / "run/checkpoints/best.pt")["best"]
    for fact in (
        "# resnet8 trained on shapes\n", "| classes | 10: disc, ", "uint8 pixels [N, 3, 32, 32]", "(pixels / 255 - (0.",
        f"best acc1 {100 * best['acc1']:.2f} % in epoch {best['epoch']}, on 200 validation images, validated with 2 v",
        f".pt, step {4 * best['epoch']} |", "version 1.2, commit c0ffee, torch 2: `train.py '--config=tiny a'`",
    ):  # fmt: skip
        assert fact in card


def test_the_documented_line_makes_an_onnx_model_with_the_same_logits(exported, image_batch, monkeypatch):
    runtime = pytest.importorskip("onnxruntime", reason="onnx, onnxscript and onnxruntime are not installed")
    monkeypatch.chdir(exported)
    (line,) = re.findall(r"^torch\.onnx\.export.*$", (ROOT / "docs/evaluation.md").read_text(), re.MULTILINE)
    exec(line)
    session, (pixels, _) = runtime.InferenceSession("model.onnx"), image_batch
    (logits,) = session.run(None, {session.get_inputs()[0].name: pixels.numpy()})
    torch.testing.assert_close(torch.from_numpy(logits), torch.export.load("model.pt2").module()(pixels))


def test_safetensors_suffice_to_rebuild_the_network(exported, image_batch):
    path = exported / "model.safetensors"
    with safe_open(path, framework="pt") as file:
        about = {key: json.loads(value) for key, value in file.metadata().items() if key != "format"}
    state = read_checkpoint(exported.parent / "run/checkpoints/best.pt")
    assert about == json.loads(json.dumps({key: state[key] for key in about})) and {"best", "versions"} < {*about}
    model = build_model(Config(**about["config"])).eval()
    model.load_state_dict(load_file(path))
    mean, std = (torch.tensor(about["data"][key]).view(1, 3, 1, 1) for key in ("mean", "std"))
    pixels, _ = image_batch
    logits = model((pixels / 255 - mean) / std)
    torch.testing.assert_close(logits, torch.export.load(exported / "model.pt2").module()(pixels))


class Means(torch.nn.Module):
    def forward(self, pixels):
        return pixels.float().mean((2, 3))


@pytest.mark.parametrize(("factor", "difference"), [(1.01, r"9\.9e-03"), (float("nan"), "nan")])
def test_a_program_that_differs_is_refused(factor, difference):
    with pytest.raises(ExpectedError, match=f"differs from the trained network by {difference} of the largest logit"):
        export.export_program(Means(), lambda pixels: factor * Means()(pixels), (3, 8, 8))


def test_the_program_is_compared_with_the_network_that_was_trained(tiny, one_rank, tmp_path, monkeypatch, capsys):
    """Our own layers replace the network's before training; here the replacement doubles the logits."""

    def replace_wrongly(model, *_):
        model.register_forward_hook(lambda module, images, logits: 2 * logits)
        return {}

    monkeypatch.setattr("utils.training.learner.use_kernels", replace_wrongly)
    Trainer(tiny(), one_rank, tmp_path, "tiny", "auto").train()
    assert export.main([str(tmp_path)]) == 1
    assert "differs from the trained network by 5.0e-01 of the largest logit" in capsys.readouterr().err
    assert not (tmp_path / "export").exists()


def test_a_folder_without_a_checkpoint_is_refused(tmp_path, capsys):
    assert export.main([str(tmp_path)]) == 4
    assert "checkpoints/best.pt: holds no checkpoint of a step; give the folder of a run" in capsys.readouterr().err
