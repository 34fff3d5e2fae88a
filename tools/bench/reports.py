"""Reads reports of tools.bench and the rates of their cases. No torch."""

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
        found = str(error)
    raise DataError(f"{path}: not a report of tools.bench --json ({found}); bench COMMAND --json FILE writes one")


def training_rates(report: dict[str, Any]) -> dict[str, tuple[float, dict[str, Any]]]:
    """Return {case: (training images/s, configuration)} of the cases on one rank of a report of `ladder`, `scaling` or
    `loaders`; empty for others."""
    ranks, results, found = report["environment"].get("world_size", 1), report["results"], {}
    configs = results.get("configs", {})
    for name, values in results.get("rungs", results).items():
        if not isinstance(values, dict) or report.get("bench") == "peers":
            continue
        scaling = "train_images_per_sec" in values  # its cases are named by mode and processes, as in "strong 2"
        rate = values.get("full") or values.get("train_images_per_sec") or values.get("training_images_per_sec")
        if rate and (name.endswith(" 1") if scaling else ranks == 1):
            found[name] = float(rate["median"]), configs.get(name, report["config"])
    return found
