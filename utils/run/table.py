"""The types of what a checkpoint holds, so that a file is refused whole before anything is done with it.

The digest shows that a file is what was written, not that this program wrote it. utils/run/checkpoint.py has the table
in words.
"""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, FiniteFloat, ValidationError, model_validator
from torch import Tensor

from utils import seeds

Count = Annotated[int, Field(ge=0, le=999_999_999)]  # a checkpoint's name has nine digits of steps
Tensors = dict[str, Tensor]
FourSums = Annotated[list[FiniteFloat], Field(min_length=4, max_length=4)]
Nothing = Annotated[dict[str, Any], Field(max_length=0)]


def explain_misfit(state: dict[str, Any]) -> str | None:
    """The first place in `state`, a table with every key, that holds something of another kind; None where all fits."""
    try:
        Table.model_validate(state)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        place = ".".join(str(part) for part in first["loc"])
        return f"{place}: {first['msg']}" if place else first["msg"]
    return None


class _Part(BaseModel):
    model_config = ConfigDict(strict=True, arbitrary_types_allowed=True)


class _Data(_Part):
    train_images: Count
    steps_per_epoch: Count
    class_names: list[str] | tuple[str, ...]
    shape: tuple[int, int, int]
    mean: list[float] | tuple[float, ...]
    std: list[float] | tuple[float, ...]


class _Average(_Part):
    module: Tensors
    updates: Count


class _Optimizer(_Part):
    state: dict[int, dict[str, Tensor | float | bool | None]]
    param_groups: Annotated[list["_Group"], Field(min_length=1)]


class _Group(_Part):
    params: list[int]


class _GradScaler(_Part):
    """PyTorch's own names."""

    scale: FiniteFloat
    growth_factor: FiniteFloat
    backoff_factor: FiniteFloat
    growth_interval: int
    growth_tracker: Annotated[int, Field(alias="_growth_tracker")]
    skipped: FiniteFloat


class _Plateau(_Part):
    model_config = ConfigDict(extra="forbid")

    patience: int
    best: float
    bad_epochs: int
    cuts: int


class _Best(_Part):
    acc1: FiniteFloat
    epoch: Count


class _Rank(_Part):
    random: dict[str, Any]
    metric_sums: Tensor
    buffers: Tensors

    @model_validator(mode="after")
    def _check_values(self) -> "_Rank":
        if self.metric_sums.shape != (4,):
            raise ValueError(f"metric_sums has shape {list(self.metric_sums.shape)}, expected [4]")
        if (problem := seeds.explain_misfit(self.random)) is not None:
            raise ValueError(f"random: {problem}")
        return self


class Table(_Part):
    """A checkpoint. A key beside these is not looked at."""

    format: Literal[1]
    config: dict[str, Any]
    config_name: str
    config_digest: str
    data: _Data
    epoch: Count
    batch: Count
    step: Count
    model: Tensors
    average: _Average | None
    optimizer: _Optimizer
    grad_scaler: _GradScaler | Nothing
    plateau: _Plateau
    logged_sums: FourSums
    best: _Best
    seconds: FiniteFloat
    ranks: Annotated[list[_Rank], Field(min_length=1)]
    versions: dict[str, str]

    @model_validator(mode="after")
    def _check_parts_against_each_other(self) -> "Table":
        if self.batch > self.data.steps_per_epoch:
            raise ValueError(f"batch is {self.batch} of {self.data.steps_per_epoch} in an epoch")
        shapes = {name: weight.shape for name, weight in self.model.items()}
        if self.average is not None and {name: own.shape for name, own in self.average.module.items()} != shapes:
            raise ValueError("average holds other names or shapes than model")
        for rank in self.ranks:
            for name, buffer in rank.buffers.items():
                if (expected := shapes.get(name.removeprefix("average."))) != buffer.shape:
                    raise ValueError(f"ranks: {name} has shape {list(buffer.shape)}, in model {expected}")
        return self
