"""The base class of all groups of configuration keys, number types, key flags, and the shared keys.

Each component declares its keys next to its code as a subclass of `BaseConfig`, with types, defaults and docstrings
(models/config.py, utils/data/config.py, ...); `utils.config.Config` inherits from all of them. The first sentence of a
key's docstring is its comment in config/cifar100.yaml. Nothing here imports torch, so that `--help` answers at once.
"""

import json
import os
from enum import Enum
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

# PyTorch and NumPy overflow at integers over 32 bits.
MAX_INT = 2**31 - 1
PositiveInt = Annotated[int, Field(ge=1, le=MAX_INT)]
NonNegativeInt = Annotated[int, Field(ge=0, le=MAX_INT)]
PositiveFloat = Annotated[float, Field(gt=0)]
Fraction = Annotated[float, Field(ge=0, lt=1)]
PathText = Annotated[str, Field(min_length=1), AfterValidator(os.path.expanduser)]  # ~ is the home folder


class KeyFlag(Enum):
    """A property of a key beyond its type: `Annotated[TYPE, KeyFlag.NAME]`. A key without a flag is a training setting
    that only an explicit `--resume PATH` may change."""

    FIXED_ON_RESUME = "saved tensors or positions in the data depend on it: a run never resumes with another value"
    # a value that changes the data or the length of an epoch is refused too
    FREE_ON_RESUME = "no hyperparameter: not in TensorBoard's HParams, and a run resumes with another value"


class BaseConfig(BaseModel):
    """A group of configuration keys: typed, checked, frozen."""

    model_config = ConfigDict(
        strict=True, frozen=True, extra="forbid", allow_inf_nan=False, use_attribute_docstrings=True
    )

    @classmethod
    def keys_with(cls, flag: KeyFlag) -> list[str]:
        """Names of the keys that carry `flag`."""
        return [name for name, field in cls.model_fields.items() if flag in field.metadata]


class SharedConfig(BaseConfig):
    """shared by model, data and training"""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto: CUDA where there is a GPU, else the CPU."""
    seed: Annotated[NonNegativeInt, KeyFlag.FIXED_ON_RESUME] = 0
    """Determines weights, order of the images and augmentation."""
    deterministic: bool = False
    """Use only deterministic kernels: the same bits in every run, slower on a GPU."""
    num_classes: Annotated[int, Field(ge=2, le=MAX_INT), KeyFlag.FIXED_ON_RESUME] = 100
    """Outputs of the network; must equal the dataset's number of classes."""
    batch_size: Annotated[PositiveInt, KeyFlag.FIXED_ON_RESUME] = 128
    """Images in one optimizer step, over ALL ranks."""
    micro_batch_size: PositiveInt | None = None
    """Images in one forward pass of one rank, at most; null: all of the rank's images. Gradients are accumulated over
    the micro-batches. BatchNorm sees the micro-batch, so one rank that accumulates equals several that do not."""
    enable_nhwc: bool = False
    """NHWC: model and images in the channels_last memory format."""


def split_number(setting: str, default: int = 0) -> tuple[str, int]:
    """Split a setting of the form NAME/N into NAME and N; `default` for a NAME without a number."""
    name, _, number = setting.partition("/")
    return name, int(number or default)


def as_yaml(value: Any) -> str:
    """Return a value as one writes it in a block, on one line; a path, or another object, as its text."""
    text = json.dumps(value, ensure_ascii=False, default=str, skipkeys=True)
    return text if text.isprintable() else json.dumps(value, default=str, skipkeys=True)


def render(config: BaseConfig, default: BaseConfig | None = None) -> str:
    """Return the keys as the YAML body of a block; keys that differ from `default` come first."""
    values, base = (settings.model_dump(mode="json") for settings in (config, default or config))
    different = [key for key in values if values[key] != base[key]]
    lines = [f"{key}: {as_yaml(values[key])}  # default: {as_yaml(base[key])}" for key in different]
    if different:
        lines.append("# as in default:")
    lines += [f"{key}: {as_yaml(values[key])}" for key in values if key not in different]
    return "\n".join(lines) + "\n"
