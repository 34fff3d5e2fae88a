"""The messages for failures of the machine: out of memory, and operations without a deterministic kernel."""

import errno

import pytest
import torch

from utils.distributed.ranks import run_ranks
from utils.errors import explain

REMEDY = "use a smaller micro_batch_size, which keeps batch_size, a smaller batch_size, or enable_amp=true;"
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
    assert first.startswith(f"error: {first_line}") and second.startswith(REMEDY)


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
    assert first == first_line and second.startswith(REMEDY)


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
