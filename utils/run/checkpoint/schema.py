"""The content of a checkpoint, with types. A file is checked as a whole before any of it is used: the digest shows that
it is undamaged, not that this program wrote it.

The loaders' only state is (epoch, batch): order and augmentation are functions of seed, epoch and sample index.
"""

from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, FiniteFloat, ValidationError, model_validator
from torch import Tensor

from utils import seeds

Count = Annotated[int, Field(ge=0, le=999_999_999)]  # a checkpoint's name has nine digits of steps
Amount = Annotated[FiniteFloat, Field(ge=0)]
Tensors = dict[str, Tensor]  # fit.py compares them with the network's
Sums = Annotated[list[Amount], Field(min_length=4, max_length=4)]
Name = Annotated[str, Field(pattern=r"^[^\x00-\x1f\x7f-\x9f]*$")]  # no escape sequences for the terminal
Side = Annotated[int, Field(ge=1, le=2**15)]
Plain = str | int | float | bool | None
Nothing = Annotated[dict[str, Any], Field(max_length=0)]


def check_content(state: Any) -> dict[str, Any]:
    """Return `state`; raise `ValueError` that describes the first value in `state` of a wrong type or range."""
    try:
        CheckpointSchema.model_validate(state)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        place = ".".join(str(part) for part in first["loc"])
        raise ValueError(f"{place!r}: {first['msg']}" if place else first["msg"]) from None
    return state


class _Part(BaseModel):
    model_config = ConfigDict(strict=True, arbitrary_types_allowed=True)


class _Data(_Part):
    """The data; a user's own data have a fingerprint, too."""

    train_images: Count
    steps_per_epoch: Count
    class_names: list[Name] | tuple[Name, ...]
    shape: tuple[Side, Side, Side]  # channels, height, width
    mean: list[FiniteFloat] | tuple[FiniteFloat, ...]  # of pixels in [0, 1]; the same for std
    std: list[FiniteFloat] | tuple[FiniteFloat, ...]


class _Average(_Part):
    module: Tensors
    updates: Count


class _Optimizer(_Part):
    state: dict[int, dict[str, Tensor | Count]]
    param_groups: Annotated[list["_Group"], Field(min_length=1)]


class _Group(_Part):
    params: list[int]
    lr: Amount | Tensor


class _GradScaler(_Part):
    """The names are PyTorch's."""

    scale: Amount
    growth_factor: Amount
    backoff_factor: Amount
    growth_interval: Count
    growth_tracker: Annotated[Count, Field(alias="_growth_tracker")]
    skipped: Amount


class _Plateau(_Part):
    model_config = ConfigDict(extra="forbid")

    patience: Count
    best: Annotated[float, Field(ge=0)]  # infinite before the first validation
    bad_epochs: Count
    cuts: Count


class _Best(_Part):
    acc1: FiniteFloat
    epoch: Count


class _Rank(_Part):
    random: Annotated[dict[str, Any], AfterValidator(seeds.check_random_state)]  # states of the random generators
    metric_sums: Tensor  # of the epoch so far: loss, correct, images, batches with a finite loss
    buffers: Tensors  # BatchNorm's, if they differ between ranks


class CheckpointSchema(_Part):
    """A checkpoint. Other keys are ignored."""

    format: Annotated[int, Field(ge=1, le=1)]  # version of this table
    config: dict[str, Plain | list[Plain]]  # the resolved configuration, plain values
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
    logged_sums: Sums  # the epoch's sums over all ranks at the last log point
    best: _Best  # validation so far
    seconds: Amount  # training time so far, over all interruptions
    # training time when the epoch began; images and seconds from which images/s is computed
    timing: Annotated[list[Amount], Field(min_length=3, max_length=3)]
    ranks: Annotated[list[_Rank], Field(min_length=1)]
    versions: dict[str, str]  # Python and torch that wrote it

    @model_validator(mode="after")
    def _check_parts_against_each_other(self) -> "CheckpointSchema":
        length = self.data.steps_per_epoch
        if self.batch > length or self.step != self.epoch * length + self.batch:
            raise ValueError(f"step {self.step} is not batch {self.batch} of {length} after {self.epoch} epochs")
        if isinstance(size := self.config.get("batch_size"), int) and size % len(self.ranks):
            raise ValueError(f"batch_size {size} is not a multiple of {len(self.ranks)} ranks")
        return self
