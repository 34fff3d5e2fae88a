"""Reads reports of tools.bench and the rates of their cases. No torch."""

from dataclasses import dataclass
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


@dataclass(frozen=True)
class Rate:
    """The result of one case of a report."""

    images_per_sec: float
    config: dict[str, Any]
    ranks: int = 1
    training: bool = True  # False: of a loader without training
    mode: str = ""  # weak or strong, of a scaling report
    epoch_images_per_sec: float | None = None


def read_report(path: Path) -> Report:
    """Read a report. Raises `DataError` if the file cannot be read or is not a report."""
    try:
        return Report.model_validate_json(path.read_bytes())
    except (OSError, ValidationError) as error:
        found = getattr(error, "strerror", "it holds something else")
        remedy = "python -m tools.bench COMMAND --json FILE writes one"
        raise DataError(f"{path}: not a report of tools.bench --json ({found}); {remedy}") from None


def rates(report: Report) -> dict[str, Rate]:
    """Return {case: its rate} of a report of `ladder`, `scaling` or `loaders`; empty for others."""
    configs, ranks = report.results.get("configs", {}), report.environment.get("world_size", 1)
    found = {}
    rungs = report.results.get("rungs")
    for name, values in (rungs if isinstance(rungs, dict) else report.results).items():
        mode, _, number = name.rpartition(" ")
        if rate := _median(values, "full"):
            found[name] = Rate(rate, configs.get(name, report.config))
        elif rate := _median(values, "train_images_per_sec"):
            epoch_rate = _median(values, "epoch_images_per_sec")
            found[name] = Rate(rate, report.config, int(number), mode=mode, epoch_images_per_sec=epoch_rate)
        elif rate := _median(values, "training_images_per_sec"):
            found[name] = Rate(rate, report.config, ranks)
        elif rate := _median(values, "images_per_sec"):
            found[name] = Rate(rate, report.config, ranks, training=report.bench != "loaders")
    return found


def _median(values: Any, quantity: str) -> float | None:
    value = values.get(quantity) if isinstance(values, dict) else None
    value = value.get("median") if isinstance(value, dict) else value
    return float(value) if isinstance(value, int | float) else None
