"""The messages for failures of the machine: out of memory, and operations without a deterministic kernel."""

import errno

import pytest
import torch

from train import Trainer
from utils.distributed.ranks import run_ranks
from utils.errors import explain

MORE = "use less data, or a job or machine with more memory;"
OF_CUDA = "CUDA out of memory. Tried to allocate 2.50 GiB. GPU 0 has a total capacity of 79.10 GiB."


def allocate(device):
    return torch.empty(2**50, dtype=torch.uint8, device=device)


@pytest.mark.parametrize(
    ("device", "first_line"),
    [
        ("cpu", "out of host memory when allocating 1125899906842624 by"),
        pytest.param("cuda", "out of GPU memory when allocating 1048576.00 GiB", marks=pytest.mark.gpu),
    ],
)
def test_out_of_memory(device, first_line, capsys):
    assert run_ranks(lambda world: allocate(device), "cpu", 20) == 1
    first, second = capsys.readouterr().err.splitlines()
    assert first.startswith(f"error: {first_line}") and second.startswith(MORE)


@pytest.mark.parametrize(
    ("error", "first_line"),
    [
        (torch.OutOfMemoryError(OF_CUDA), "out of GPU memory when allocating 2.50 GiB"),
        (OSError(errno.ENOMEM, "Cannot allocate memory"), "out of host memory"),  # a fork
    ],
)
def test_reports_of_memory(error, first_line):
    explained = explain(error)
    assert explained.exit_status == 1
    first, second = str(explained).splitlines()
    assert first == first_line and second.startswith(MORE)


def test_a_smaller_micro_batch_is_the_remedy_in_the_step_only(tiny, one_rank, monkeypatch):
    def fails(images):
        raise torch.OutOfMemoryError("CUDA out of memory")

    trainer = Trainer(tiny(), one_rank)
    monkeypatch.setattr(trainer.learner.model, "forward", fails)
    for pass_of_data, remedy in (
        (trainer.train_one_epoch, "use a smaller micro_batch_size, which keeps batch_size, a smaller batch_size, or "),
        (trainer.validate_one_epoch, "use a smaller valid_batch_size_per_gpu; "),
    ):
        with pytest.raises(torch.OutOfMemoryError) as raised:
            pass_of_data()
        assert str(explain(raised.value)).splitlines()[1].startswith(remedy)


def test_an_operation_without_a_deterministic_kernel_is_named():
    torch.use_deterministic_algorithms(True)
    try:
        with pytest.raises(RuntimeError) as raised:
            torch.zeros(3).put_(torch.tensor([0]), torch.ones(1))
    finally:
        torch.use_deterministic_algorithms(False)
    explained = explain(raised.value)
    first, second = str(explained).splitlines()
    assert first == "deterministic is true, but PyTorch has no deterministic kernel for put_ on this device"
    assert second.startswith("use deterministic: false") and explained.exit_status == 2
