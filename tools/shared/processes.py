"""Run commands until a time limit or a signal, with their output in a log, and leave no process behind; describe the
machine from another process."""

import os
import signal
import subprocess
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from utils.errors import ExpectedError
from utils.program import CODE, end_with_parent

GRACE = 20.0  # seconds from SIGTERM to SIGKILL, in which a command saves and ends


@dataclass
class Deadline:
    """When to end (time.monotonic), and whether a signal asked to end now."""

    moment: float
    stopped: bool = False

    def left(self) -> float:
        return self.moment - time.monotonic()

    def stop(self, *_: object) -> None:
        """Handle a signal."""
        self.stopped = True


def run_limited(command: Sequence[str], log: Path, limit: float, deadline: Deadline) -> int | None:
    """Run a command and return its exit status, or None if it was ended after `limit` seconds or by
    `deadline.stop`."""
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, cwd=CODE, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT,
            start_new_session=True,
            # a command that keeps running would disturb later measurements
            preexec_fn=partial(end_with_parent, signal.SIGKILL),  # noqa: PLW1509 - there are no threads here
        )  # fmt: skip
        ends = time.monotonic() + limit
        try:
            while process.poll() is None and time.monotonic() < ends and not deadline.stopped:
                time.sleep(0.05)
            ended_itself = process.poll() is not None
            if not ended_itself:
                _signal_group(process, signal.SIGTERM)
                with suppress(subprocess.TimeoutExpired):
                    process.wait(GRACE)
        finally:
            _signal_group(process, signal.SIGKILL)
            process.wait()
    return process.returncode if ended_itself or process.returncode == 0 else None


def _signal_group(process: "subprocess.Popen[bytes]", number: int) -> None:
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, number)


def last_line(log: Path) -> str:
    """Return the last error in a log, or its last line."""
    lines = [line.strip() for line in log.read_text("utf-8", "replace").splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("error: ")]
    return (errors or lines or ["no output"])[-1][:300]


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

    device = choose_device("auto", 0)
    found = describe_environment(device, 1)
    found.pop("command")
    gigabytes = torch.cuda.mem_get_info(device)[1] / 1e9 if device.type == "cuda" else None
    return found | {"type": device.type, "gigabytes": gigabytes}
