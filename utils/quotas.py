"""CPU and memory limits of this process's cgroups, version 1 or 2: of a container, a pod or a batch job.

The limits of the parents hold too. A file that is missing or malformed is no limit.
"""

import math
import os
import re
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

ROOT = Path("/")


def usable_cores() -> int:
    """Return the number of cores that this process may use, at least 1."""
    return max(1, int(min(len(os.sched_getaffinity(0)), cpu_quota())))


def cpu_quota(root: Path = ROOT) -> float:
    """Return the CPU time per second that the cgroups allow, such as 1.5; infinite without a limit."""
    found = [*_read("cpu", ["cpu.max"], root), *_read("cpu", ["cpu.cfs_quota_us", "cpu.cfs_period_us"], root)]
    pairs = [pair for pair in found if len(pair) == 2 and min(pair) > 0]  # (quota, period); a quota of -1 is none
    return min((quota / period for quota, period in pairs), default=math.inf)


def memory_limit(root: Path = ROOT) -> float:
    """Return the bytes of memory that the cgroups allow; infinite without a limit."""
    found = [*_read("memory", ["memory.max"], root), *_read("memory", ["memory.limit_in_bytes"], root)]
    return min((number for numbers in found for number in numbers), default=math.inf)


def _read(controller: str, names: list[str], root: Path) -> Iterator[list[int]]:
    """Yield the numbers in these files of this process's cgroup (in a container the root) and of all above it."""
    with suppress(OSError):
        lines = (root / "proc/self/cgroup").read_text(errors="replace")
        for controllers, path in re.findall(r"^\d+:([^:]*):/(.*)$", lines, re.MULTILINE):  # version 2: no controllers
            if not controllers or controller in controllers.split(","):
                tree = root / "sys/fs/cgroup" / (controller if controllers else "")
                for cgroup in (tree / path, *(tree / path).parents):
                    with suppress(OSError, ValueError):  # ValueError: "max", or no number
                        yield [int(word) for name in names for word in (cgroup / name).read_text().split()]
