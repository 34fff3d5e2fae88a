"""The content of a checkpoint, with types. A file is checked as a whole before any of it is used: the digest shows that
it is undamaged, not that this program wrote it.

The loaders' only state is (epoch, batch): order and augmentation are functions of seed, epoch and sample index.
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
    """Describe the first value in `state` of a wrong type or shape; None if there is none. All keys must be present."""
    try:
        CheckpointSchema.model_validate(state)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        place = ".".join(str(part) for part in first["loc"])
        return f"{place}: {first['msg']}" if place else first["msg"]
    return None


class _Part(BaseModel):
    model_config = ConfigDict(strict=True, arbitrary_types_allowed=True)


class _Data(_Part):
    """The data; a user's own data have a fingerprint, too."""

    train_images: Count
    steps_per_epoch: Count
    class_names: list[str] | tuple[str, ...]
    shape: tuple[int, int, int]  # channels, height, width
    mean: list[float] | tuple[float, ...]  # of pixels in [0, 1]; the same for std
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
    """The names are PyTorch's."""

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
    random: dict[str, Any]  # states of the random generators
    metric_sums: Tensor  # of the epoch so far: loss, correct, images, batches with a finite loss
    buffers: Tensors  # BatchNorm's, if they differ between ranks

    @model_validator(mode="after")
    def _check_values(self) -> "_Rank":
        if self.metric_sums.shape != (4,):
            raise ValueError(f"metric_sums has shape {list(self.metric_sums.shape)}, expected [4]")
        if (problem := seeds.explain_misfit(self.random)) is not None:
            raise ValueError(f"random: {problem}")
        return self


class CheckpointSchema(_Part):
    """A checkpoint. Other keys are ignored."""

    format: Literal[1]  # version of this table
    config: dict[str, Any]  # the resolved configuration, plain values
    config_name: str  # of its block
    data: _Data
    epoch: Count  # finished epochs
    batch: Count  # batches trained in the next epoch; if all, its validation is still to be done
    step: Count  # optimizer steps in total
    model: Tensors  # weights and buffers, keys without `module.`
    average: _Average | None  # moving average of the weights, if there is one: it is validated
    optimizer: _Optimizer  # the learning rate is a function of step and plateau
    grad_scaler: _GradScaler | Nothing
    plateau: _Plateau
    logged_sums: FourSums  # the epoch's sums over all ranks at the last log point
    best: _Best  # validation so far
    seconds: FiniteFloat  # training time so far, over all interruptions
    # training time when the epoch began; images and seconds behind the images/s; None in earlier versions' checkpoints
    timing: Annotated[list[FiniteFloat], Field(min_length=3, max_length=3)] | None = None
    ranks: Annotated[list[_Rank], Field(min_length=1)]
    versions: dict[str, str]  # Python and torch that wrote it

    @model_validator(mode="after")
    def _check_parts_against_each_other(self) -> "CheckpointSchema":
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
