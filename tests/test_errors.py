"""The messages for failures of the machine: out of memory, and loader workers."""

import errno
import os
import subprocess

import pytest
import torch

from tests.conftest import ROOT, TINY, as_options
from tests.processes import PYTHON, without_launcher
from utils.distributed.ranks import run_ranks
from utils.errors import DataError, exit_in_a_line, explain

REMEDY = "use a smaller micro_batch_size, which keeps batch_size, a smaller batch_size, or enable_amp=true;"


@pytest.mark.parametrize(
    ("raised", "status", "line"),
    [(DataError("x: is damaged"), 3, "error: x: is damaged\n"), (KeyboardInterrupt(), 130, "interrupted\n")],
)
def test_a_command_ends_with_a_line_and_a_status(raised, status, line, capsys):
    @exit_in_a_line
    def main(options):
        raise options

    assert main(raised) == status
    assert capsys.readouterr().err == line


@pytest.mark.parametrize(
    ("allocate", "first_line"),
    [
        (lambda: torch.empty(2**50, dtype=torch.uint8), "out of host memory when allocating 1125899906842624 by"),
        pytest.param(
            lambda: torch.empty(2**50, dtype=torch.uint8, device="cuda"),
            "out of GPU memory when allocating 1048576.00 GiB",
            marks=pytest.mark.gpu,
        ),
    ],
)
def test_out_of_memory(allocate, first_line, capsys):
    assert run_ranks(lambda world: allocate(), "cpu", 20) == 1
    first, second = capsys.readouterr().err.splitlines()
    assert first.startswith(f"error: {first_line}")
    assert second.startswith(REMEDY)


@pytest.mark.parametrize(
    ("error", "first_line"),
    [
        (
            torch.OutOfMemoryError(
                "CUDA out of memory. Tried to allocate 2.50 GiB. GPU 0 has a total capacity of 79.10 GiB of which 1.2 "
                "GiB is free. If reserved but unallocated memory is large try setting PYTORCH_ALLOC_CONF=..."
            ),
            "out of GPU memory when allocating 2.50 GiB",
        ),
        (OSError(errno.ENOMEM, "Cannot allocate memory"), "out of host memory"),  # a fork
    ],
)
def test_reports_of_memory(error, first_line):
    explained = explain(error)
    assert explained is not None and explained.exit_status == 1
    assert str(explained).splitlines()[0] == first_line
    assert str(explained).splitlines()[1].startswith(REMEDY)


def test_an_operation_without_a_deterministic_kernel_is_named():
    torch.use_deterministic_algorithms(True)
    try:
        with pytest.raises(RuntimeError) as raised:
            torch.zeros(3).put_(torch.tensor([0]), torch.ones(1))
    finally:
        torch.use_deterministic_algorithms(False)
    explained = explain(raised.value)
    assert explained is not None and explained.exit_status == 2
    first, second = str(explained).splitlines()
    assert first == "deterministic is true, but PyTorch has no deterministic kernel for put_ on this device"
    assert second.startswith("use deterministic: false")


def test_a_reader_that_leaves_ends_the_output_and_not_the_training(tmp_path):
    """`train.py ... | head`"""
    options = as_options(TINY | {"log_freq": 1})
    command = [PYTHON, "train.py", "--config=default", f"--run-dir={tmp_path}", *options]
    run = start(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    run.stdout.readline()
    run.stdout.close()
    assert (run.wait(120), run.stderr.read()) == (0, "")
    assert "Finished" in (tmp_path / "train.log").read_text()


def test_a_reader_of_the_errors_that_leaves_does_not_change_the_status(tmp_path):
    """`train.py ... 2>&1 | tee FILE` and Ctrl-C, which ends tee, too."""
    options = as_options(TINY | {"dataset": "imagefolder", "data_path": f"{tmp_path}/nowhere"})
    command = [PYTHON, "train.py", "--config=default", f"--run-dir={tmp_path / 'run'}", *options]
    status = tmp_path / "status"
    run = start(command, {"TRAIN_EXIT_STATUS_FILE": str(status)}, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    run.stderr.close()
    assert (run.wait(120), status.read_text()) == (DataError.exit_status, f"{DataError.exit_status}\n")


def start(command, variables=None, **streams):
    environment = without_launcher(os.environ) | (variables or {})
    return subprocess.Popen(command, cwd=ROOT, env=environment, text=True, **streams)
