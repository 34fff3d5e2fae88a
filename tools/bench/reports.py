"""Reads reports of tools.bench. No torch."""

import json
from pathlib import Path
from typing import Any

from utils.errors import DataError

VERSIONS = ("python", "torch", "torchvision", "cuda", "cudnn", "device")  # equal in figures that may be compared


def read_report(path: Path) -> dict[str, Any]:
    """Return "bench", "environment", "config" and "results". Raises `DataError` if the file is not a report."""
    try:
        content: dict[str, Any] = {"bench": "", "environment": {}, "config": {}} | json.loads(path.read_bytes())
        if all(isinstance(content[key], dict) for key in ("results", "environment", "config")):
            return content
        found = "it holds something else"
    except (OSError, ValueError, KeyError, TypeError) as error:
        found = getattr(error, "strerror", "it holds something else")
    raise DataError(f"{path}: not a report of tools.bench --json ({found}); bench COMMAND --json FILE writes one")
