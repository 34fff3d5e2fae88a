"""Reads reports of tools.bench and the rates of their cases. No torch."""

from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError

from utils.errors import DataError

VERSIONS = ("python", "torch", "torchvision", "cuda", "cudnn", "device")  # equal in figures that may be compared


class Report(BaseModel):
    """The content of --json."""

    bench: str = ""
    environment: dict[str, Any] = {}
    config: dict[str, Any] = {}
    results: dict[str, Any]


def read_report(path: Path) -> Report:
    """Read a report. Raises `DataError` if the file cannot be read or is not a report."""
    try:
        return Report.model_validate_json(path.read_bytes())
    except (OSError, ValidationError) as error:
        found = getattr(error, "strerror", "it holds something else")
        remedy = "python -m tools.bench COMMAND --json FILE writes one"
        raise DataError(f"{path}: not a report of tools.bench --json ({found}); {remedy}") from None


def training_rates(report: Report) -> dict[str, tuple[float, dict[str, Any]]]:
    """Return {case: (training images/s, configuration)} of the cases on one rank of a report of `ladder`, `scaling` or
    `loaders`; empty for others."""
    if report.bench not in ("", "ladder", "scaling", "loaders"):  # "": an old report
        return {}
    ranks, found = report.environment.get("world_size", 1), {}
    rungs, configs = report.results.get("rungs", report.results), report.results.get("configs", {})
    for name, values in rungs.items():
        if not isinstance(values, dict):
            continue
        scaling = "train_images_per_sec" in values  # its cases are named by mode and processes, as in "strong 2"
        rate = values.get("full") or values.get("train_images_per_sec") or values.get("training_images_per_sec")
        if rate and (name.endswith(" 1") if scaling else ranks == 1):
            found[name] = float(rate["median"]), configs.get(name, report.config)
    return found
