"""`Config`: all keys of a block, inherited from the components' groups, which declare types, defaults and meanings."""

import inspect

from pydantic import model_validator

from models.config import ModelConfig
from utils.data.config import DataConfig
from utils.run.config import OutputConfig
from utils.training.config import TrainingConfig


class Config(OutputConfig, TrainingConfig, ModelConfig, DataConfig):
    """All keys of a configuration block."""

    @model_validator(mode="after")
    def _check_profiling(self) -> "Config":
        if self.enable_profiling and self.profiling_epoch_start > self.max_epochs:
            starts = f"profiling_epoch_start {self.profiling_epoch_start}"
            raise ValueError(f"enable_profiling: {starts} exceeds max_epochs {self.max_epochs}; lower it")
        return self


def section(key: str) -> str:
    """Return the title of the group that declares a key: the class's docstring."""
    groups = (group for group in Config.__mro__ if key in inspect.get_annotations(group))
    return inspect.cleandoc(next(groups).__doc__ or "")
