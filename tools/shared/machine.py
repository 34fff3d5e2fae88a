"""Describe this machine without importing torch into the current process."""

from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import Any

from utils.errors import ExpectedError
from utils.program import CODE


def describe_machine() -> dict[str, Any]:
    """Describe the machine in another process, so that this one holds no GPU memory while it measures."""
    try:
        with ProcessPoolExecutor(1, get_context("spawn")) as pool:
            return pool.submit(_describe).result()
    except (ImportError, RuntimeError, OSError) as error:
        raise ExpectedError(f"PyTorch does not start here: {error}\ntry python -m tools.doctor") from None


def _describe() -> dict[str, Any]:
    """Return versions, device, commit and the device's memory."""
    import torch

    from utils.distributed.world import choose_device
    from utils.run.logging.environment import describe_environment

    device, packed_commit = choose_device("auto", 0), CODE / "commit.txt"  # tools.pack writes it: a tree without .git
    found = describe_environment(device, 1)
    found.pop("command")
    if found["commit"] is None and packed_commit.exists():
        found["commit"] = packed_commit.read_text("utf-8").strip()
    gigabytes = torch.cuda.mem_get_info(device)[1] / 1e9 if device.type == "cuda" else None
    return found | {"type": device.type, "gigabytes": gigabytes}
