"""A run's TensorBoard folder, read back from its event files."""

import html
import re
import threading
from itertools import pairwise
from unittest.mock import Mock

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tests.conftest import read_records
from train import Trainer
from utils.config import Config
from utils.run import tensorboard
from utils.run.clock import Clock
from utils.run.tensorboard import ALWAYS_SHOWN, CHANGES, RESULTS, TensorBoardWriter


def read(folder):
    events = EventAccumulator(str(folder), size_guidance={"tensors": 0, "images": 0, "scalars": 0})
    events.Reload()
    return events


def points_of(events, tag):
    return [(event.step, event.value) for event in events.Scalars(tag)]


def texts(events, tag):
    return events.Tensors(f"{tag}/text_summary")[-1].tensor_proto.string_val[0].decode()


@pytest.fixture
def run(tiny, one_rank, tmp_path):
    def train(**changes):
        folder = tmp_path / "run"
        resume = str(folder) if folder.exists() else "auto"
        Trainer(tiny(log_to_tensorboard=True, **changes), one_rank, folder, "tiny", resume, Clock(age=100.0)).train()
        return folder

    return train


def test_a_run_has_scalars_by_epoch_step_and_second_texts_and_pictures(run):
    folder = run()
    events = read(folder / "tb_logs")
    assert not [path for path in (folder / "tb_logs").iterdir() if path.is_dir()]  # TensorBoard's rows are folders
    epochs, steps = read_records(folder, "epoch"), read_records(folder, "step")
    tutorials = "loss/train", "loss/valid", "acc1/train", "acc1/valid", "learning_rate"
    expected = {tag: [(row["epoch"], row[tag]) for row in epochs] for tag in tutorials}
    for name in ("loss", "learning_rate", "images_per_sec", "data_wait", "memory_gb"):
        expected[f"step/{name}"] = [(row["step"], row[name]) for row in steps]
    expected["by_second/acc1_valid"] = [(round(row["seconds"]), row["acc1/valid"]) for row in epochs]
    for tag, points in expected.items():
        assert points_of(events, tag) == [(position, pytest.approx(value)) for position, value in points]
    assert "batch_size: 32" in texts(events, "run/config") and '"torch"' in texts(events, "run/environment")
    assert "| class | accuracy |" in texts(events, "run/worst classes")
    (grid,), (matrix,) = events.Images("augmented batch"), events.Images("confusion matrix")
    assert (grid.height, grid.width, matrix.width) == (3 * (4 * 33 + 1), 3 * (8 * 33 + 1), 600)
    image = tensorboard.draw_matrix(torch.tensor([[4, 0], [1, 3]]))  # white at 0, dark at 100 %, square root
    assert image.shape == (600, 600) and (image[0, 599], image[0, 0]) == (1, 0) and image[599, 0] == 0.5


def test_hparams_have_a_row_of_settings_and_results(run):
    from tensorboard.backend.event_processing.data_provider import MultiplexerDataProvider
    from tensorboard.backend.event_processing.plugin_event_multiplexer import EventMultiplexer
    from tensorboard.context import RequestContext
    from tensorboard.plugins.base_plugin import TBContext
    from tensorboard.plugins.hparams import api_pb2, backend_context, get_experiment

    changes = {"enable_nhwc": True, "log_freq": 7, "device": "cpu", "max_epochs": 3, "micro_batch_size": None}
    row = {CHANGES: "device=cpu, enable_nhwc=true", "batch_size": 128, "lr": 0.1, "max_epochs": 3, "model": "resnet50"}
    assert tensorboard.compared(Config(**Config().model_dump() | changes)) == row
    folder = run(max_epochs=1, weight_decay=0.1)
    multiplexer = EventMultiplexer().AddRunsFromDirectory(str(folder))
    multiplexer.Reload()
    context = backend_context.Context(TBContext(data_provider=MultiplexerDataProvider(multiplexer, str(folder))))
    experiment = get_experiment.Handler(RequestContext(), context, "", api_pb2.GetExperimentRequest()).run()
    assert [info.name for info in experiment.hparam_infos] == [CHANGES, *ALWAYS_SHOWN]
    assert not any(info.HasField("domain_discrete") for info in experiment.hparam_infos)  # an empty one hides all runs
    metrics = [info.name.tag for info in experiment.metric_infos]
    assert metrics[0] == "result/best_acc1" and len(metrics) == len(RESULTS)
    written = {tag for tag in read(folder / "tb_logs").Tags()["scalars"] if tag.startswith("result/")}
    assert set(metrics) - {"result/test_acc1", "result/test_loss"} == written


def test_a_resumed_run_cuts_what_it_trains_again_and_loses_no_point(run):
    """It goes back to the middle of the second epoch. A kill has left half an event."""
    folder = run(max_epochs=2, log_freq=1, checkpoint_every_steps=1, keep_checkpoints=9)
    for step in (7, 8):
        (folder / f"checkpoints/step-{step:09d}.pt").unlink()
    first = read(folder / "tb_logs")
    (file,) = (folder / "tb_logs").iterdir()
    with file.open("ab") as half:
        half.write(b"half an event")
    run(max_epochs=3, log_freq=1)
    events = read(folder / "tb_logs")
    for tag, units, last in (("step/loss", 6, 12), ("acc1/valid", 1, 3), ("learning_rate", 1, 3)):
        found = events.Scalars(tag)
        assert points_of(events, tag)[:units] == points_of(first, tag)[:units]
        rows = [read_records(folder, kind)[0] for kind in ("start", "step" if units > 1 else "epoch")]
        began, spent = (sum(row["clock_seconds"].values()) for row in rows)
        assert found[0].wall_time == pytest.approx(rows[0]["time"] - began + spent, rel=0, abs=1e-3)
        assert [event.step for event in found] == list(range(1, last + 1)), tag
    assert len(events.Scalars("by_second/acc1_valid")) == 3


def test_any_class_name_is_shown_as_it_is_in_the_table_of_worst_classes(tmp_path):
    from tensorboard.plugin_util import markdown_to_safe_html

    board, names = TensorBoardWriter(tmp_path), ["a|b", "*e*", "_f_", "<b>g", "`h`", "[i](j)", "a\nb"]
    counts = torch.eye(400, dtype=torch.int32)
    counts[range(7), range(1, 8)] = 1  # half of each of the first seven is taken for the next one
    board.add_classes(counts, [*names, *(f"class {label}" for label in range(7, 400))], 1)
    board.close()
    events = read(tmp_path)
    table = markdown_to_safe_html(texts(events, "run/worst classes"))
    rows = [re.findall("<td>(.*?)</td>", row, re.S) for row in table.split("<tr>")[2:]]
    shown = [[html.unescape(cell) for cell in row] for row in rows]
    assert shown[:7] == [[name, "50.0%", other, "50.0%"] for name, other in pairwise([*names, "class 7"])]
    assert "images" not in events.Tags() or not events.Tags()["images"]  # no picture of 400 classes


def test_the_run_is_saved_before_the_picture_of_its_classes(run, tmp_path, monkeypatch):
    monkeypatch.setattr(TensorBoardWriter, "add_classes", Mock(side_effect=MemoryError))
    with pytest.raises(MemoryError):
        run()
    assert (tmp_path / "run/checkpoints/step-000000008.pt").exists()  # the last one, after two epochs


@pytest.mark.parametrize(("error", "lines"), [(OSError(28, "full"), 0), (ValueError("other"), 1)])
def test_a_full_disk_shows_no_traceback_of_tensorboards_threads(capsys, error, lines):
    class Thread(threading.Thread):
        __module__ = "tensorboard.summary.writer.event_file_writer"

    tensorboard._hide_write_errors(threading.ExceptHookArgs((type(error), error, None, Thread())))
    assert capsys.readouterr().err.count(f"{type(error).__name__}: ") == lines
