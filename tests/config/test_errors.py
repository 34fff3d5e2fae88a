"""The messages for failures of the machine: out of memory, and operations without a deterministic kernel."""

import errno
from unittest.mock import Mock

import pytest
import torch

from train import Trainer
from utils.distributed.ranks import run_ranks
from utils.errors import ConfigError, explain

REMEDY = "use less data, or more memory; "
OF_CUDA = "CUDA out of memory. Tried to allocate 2.50 GiB. GPU 0 has a total capacity of 79.10 GiB."


@pytest.mark.parametrize(("device", "message"), [
    ("cpu", "you tried to allocate 1125899906842624 by"),
    pytest.param("cuda", "1048576.00 GiB", marks=pytest.mark.gpu)])  # fmt: skip
def test_out_of_memory_ends_a_run_in_two_lines(device, message, capsys):
    assert run_ranks(lambda world: torch.empty(2**50, dtype=torch.uint8, device=device), "cpu", 20) == 1
    first, second = capsys.readouterr().err.splitlines()
    assert first.startswith("error: out of memory: ") and message in first and second.startswith(REMEDY)


def test_reports_of_memory():
    fork = OSError(errno.ENOMEM, "Cannot allocate memory")
    for error, line in (torch.OutOfMemoryError(f"{OF_CUDA}\nmore"), OF_CUDA), (fork, str(fork)), (MemoryError(), ""):
        explained = explain(error)
        assert explained.exit_status == 1 and str(explained).startswith(f"out of memory: {line}\n{REMEDY}")
        assert explain(ValueError(str(error))) is None


def test_a_smaller_micro_batch_is_the_remedy_in_the_step_only(tiny, one_rank, monkeypatch):
    trainer = Trainer(tiny(), one_rank)
    monkeypatch.setattr(trainer.learner.model, "forward", Mock(side_effect=torch.OutOfMemoryError))
    for pass_of_data, remedy in (
        (trainer.train_one_epoch, "use a smaller micro_batch_size, which keeps batch_size, "),
        (trainer.validate_one_epoch, "use a smaller valid_batch_size_per_gpu; "),
    ):
        with pytest.raises(torch.OutOfMemoryError) as raised:
            pass_of_data()
        assert str(explain(raised.value)).splitlines()[1].startswith(remedy)


def test_an_operation_without_a_deterministic_kernel_is_named():
    torch.use_deterministic_algorithms(True)
    with pytest.raises(RuntimeError) as raised:
        torch.zeros(3).put_(torch.tensor([0]), torch.ones(1))
    explained = explain(raised.value)
    first, second = str(explained).splitlines()
    assert first == "deterministic is true, but PyTorch has no deterministic kernel for put_ on this device"
    assert second.startswith("use deterministic: false") and isinstance(explained, ConfigError)
