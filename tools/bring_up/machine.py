"""This machine as JSON. In a process of its own, so that the caller holds no memory of the GPU while it measures."""

import json
import subprocess
import sys
from typing import Any

from utils.errors import ExpectedError
from utils.program import CODE

COMMIT = CODE / "commit.txt"  # of a tree that tools.pack made, which has no .git


def look() -> dict[str, Any]:
    """`describe` by another process; `ExpectedError` with what it says where it fails."""
    command = [sys.executable, "-m", "tools.bring_up.machine"]
    done = subprocess.run(command, cwd=CODE, capture_output=True, text=True, check=False)
    if done.returncode:
        reason = (done.stderr.strip().splitlines() or [f"status {done.returncode}"])[-1]
        raise ExpectedError(f"PyTorch does not start here: {reason}\npython -m tools.doctor may say more")
    return dict(json.loads(done.stdout.strip().splitlines()[-1]))


def describe() -> dict[str, Any]:
    """Versions, device, commit, memory of the device."""
    import torch

    from utils.distributed.world import choose_device
    from utils.run.environment import describe_environment

    device = choose_device("auto", 0)
    seen = describe_environment(device, 1)
    seen.pop("command")
    if seen["commit"] is None and COMMIT.exists():
        seen["commit"] = COMMIT.read_text("utf-8").strip()
    gigabytes = torch.cuda.mem_get_info(device)[1] / 1e9 if device.type == "cuda" else None
    return seen | {"type": device.type, "gigabytes": gigabytes}


if __name__ == "__main__":
    print(json.dumps(describe()))
