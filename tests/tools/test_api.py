"""The Python API: its functions give what the commands give."""

import json
import signal
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from PIL import Image
from torchvision.transforms import functional

import api
import train
from tests.conftest import TINY, as_options, without_times
from tests.tiny_shards import IMAGENET, SETTINGS
from tools.predict import predict
from tools.trained import open_trained
from utils.config.command_line import parse_arguments
from utils.data.datasets.dataset import load_dataset, spread_over_classes
from utils.run.preemption import SIGNALS
from utils.training.learner import Learner

SHORT = TINY | {"limit_valid_batches": None, "log_to_screen": False}


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return api.train("quickstart", run_dir=tmp_path_factory.mktemp("runs") / "run", **SHORT)


def computed(run):
    return without_times([run.metrics, *run.epochs])


def test_train_gives_the_figures_of_the_command_line(run, tmp_path):
    """Also the second time in a process, and in another thread, where no signal can be handled."""
    command = ["--config=quickstart", f"--run-dir={tmp_path / 'command'}", *as_options(SHORT)]
    assert train.main(parse_arguments(command)) == 0
    handlers = [signal.getsignal(number) for number in SIGNALS]
    commanded = api.train("quickstart", run_dir=tmp_path / "command", **SHORT)  # it is finished, so this reads it
    with ThreadPoolExecutor(1) as pool:
        threaded = pool.submit(api.train, "quickstart", run_dir=tmp_path / "thread", **SHORT).result()
    assert computed(run) == computed(commanded) == computed(threaded)
    assert json.loads((run.folder / "environment.json").read_text())["version"] == api.__version__
    assert len(run.epochs) == 2 and run.metrics["last_acc1"] == run.epochs[-1]["acc1/valid"]
    assert handlers == [signal.getsignal(number) for number in SIGNALS]


def test_the_same_call_resumes_an_interrupted_run(run, tmp_path, monkeypatch):
    handlers, train_step = [signal.getsignal(number) for number in SIGNALS], Learner.train_step

    def interrupt(learner, *batch):
        if learner.steps == 5:
            signal.raise_signal(signal.SIGINT)
        train_step(learner, *batch)

    with monkeypatch.context() as patch, pytest.raises(api.Stopped):
        patch.setattr(Learner, "train_step", interrupt)
        api.train("quickstart", run_dir=tmp_path / "run", **SHORT)
    assert handlers == [signal.getsignal(number) for number in SIGNALS]
    assert computed(api.train("quickstart", run_dir=tmp_path / "run", **SHORT)) == computed(run)
    longer = api.train("quickstart", run_dir=tmp_path / "run", resume=tmp_path / "run", **SHORT | {"max_epochs": 3})
    assert longer.metrics["last_acc1"] == longer.epochs[-1]["acc1/valid"] and longer.epochs[-1]["epoch"] == 3


def test_a_wrong_setting_is_an_error_with_a_plain_message(tmp_path):
    with pytest.raises(api.ConfigError, match="unknown key 'batch_sise'"):
        api.train("quickstart", batch_sise=tmp_path)


def test_load_gives_the_predictions_of_the_command(run, one_rank, tmp_path):
    (run.folder / "checkpoints/step-999999999.pt").write_text("damaged")
    with pytest.warns(UserWarning, match="deterministic: the same bi"), pytest.warns(UserWarning, match="is damaged"):
        model, names, transform = api.load(run.folder, deterministic=True, test_time_views=2)
    dataset = load_dataset("shapes", tmp_path, download=False)
    chosen = spread_over_classes(np.arange(2_000), 100)
    pictures = [Image.fromarray(pixels.transpose(1, 2, 0)) for pixels in dataset.valid.images[chosen]]
    with torch.no_grad():
        probabilities = model(torch.stack([transform(picture) for picture in pictures])).double().softmax(1)
    settings = ["limit_valid_batches=1", "test_time_views=2"]  # 100 images
    (_, _, expected, _), _ = predict(open_trained(run.folder, settings), [], one_rank)
    assert not model.training and names == list(dataset.class_names)
    torch.testing.assert_close(probabilities, torch.from_numpy(expected), rtol=0, atol=0)
    assert transform(pictures[0].resize((80, 50)).convert("L")).shape == (3, 32, 32)


def test_load_prepares_a_picture_as_validation_does(folders, tmp_path):
    """For imagenet: resized, the central 7/8, and ImageNet's mean and deviation."""
    values = SHORT | SETTINGS | IMAGENET | {"data_path": str(folders), "max_epochs": 1}
    (tmp_path / "own.yaml").write_text("mine: {}\n")
    trained = api.train("mine", yaml_config=tmp_path / "own.yaml", run_dir=tmp_path / "run", **values)
    picture = Image.open(folders / "val/ant/0.JPEG")
    expected = functional.to_tensor(functional.center_crop(functional.resize(picture, 55), 48))  # 55 = 48 / 0.875
    expected = functional.normalize(expected, (0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
    torch.testing.assert_close(api.load(trained.folder).transform(picture), expected, rtol=0, atol=1e-5)
