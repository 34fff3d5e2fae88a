"""`Config`: all keys of a configuration block, composed of the groups that the components declare.

Types, defaults and meanings are on the fields of these groups and nowhere else.
"""

import inspect
from typing import Any

from pydantic import model_validator

from models.config import ModelConfig
from utils.base_config import BaseConfig, as_yaml
from utils.data.config import DataConfig
from utils.run.config import OutputConfig
from utils.training.config import TrainingConfig

COMMENT_COLUMN = 34  # of the default block
LINE_LENGTH = 120


class Config(OutputConfig, TrainingConfig, ModelConfig, DataConfig):
    """Every key of a configuration block."""

    @model_validator(mode="after")
    def _check_profiling(self) -> "Config":
        if self.enable_profiling and self.profiling_epoch_start > self.max_epochs:
            raise ValueError(
                f"enable_profiling would profile nothing: profiling_epoch_start {self.profiling_epoch_start} "
                f"exceeds max_epochs {self.max_epochs}"
            )
        return self


def schema() -> dict[str, Any]:
    """JSON schema of a configuration file: a mapping of block names to blocks, in which no key is required."""
    block = Config.model_json_schema()
    block["properties"]["<<"] = {"description": "merge of one block or of a list of blocks"}
    block["properties"]["extends"] = {
        "description": "FILE#BLOCK: begin with the keys of a block of another file, found beside this one or the code",
        "type": "string",
        "pattern": "^.+#[^#]+$",
    }
    block["title"] = "block"
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "configuration blocks of train.py",
        "type": "object",
        "additionalProperties": block,
    }


def default_block() -> str:
    """The block `default` of config/cifar100.yaml: every key with its default and the first sentence on it."""
    defaults = Config().model_dump(mode="json")
    lines, above = ["default: &DEFAULT"], ""
    for key, field in Config.model_fields.items():
        if (title := section(key)) != above:
            lines += [""] * bool(above) + [f"  # {title}"]
            above = title
        entry = f"  {key}: {_plain(defaults[key])}"
        first_sentence = " ".join((field.description or "").split()).partition(". ")[0].rstrip(".")
        comment = f"# {first_sentence}"
        beside = f"{entry:{COMMENT_COLUMN - 1}} {comment}"
        if len(beside) <= LINE_LENGTH and len(entry) < COMMENT_COLUMN:
            lines.append(beside)
        else:
            lines += [f"  {comment}", entry]
    return "\n".join(lines) + "\n"


def _plain(value: Any) -> str:
    """A default as a person would write it: texts without quotes, whole numbers without a point."""
    whole = isinstance(value, float) and value.is_integer() and value >= 1
    return as_yaml(int(value) if whole else value).strip('"')


def declaring_group(key: str) -> type[BaseConfig]:
    """The group that declares a key."""
    return next(
        group for group in Config.__mro__ if issubclass(group, BaseConfig) and key in inspect.get_annotations(group)
    )


def section(key: str) -> str:
    """The title of the group that declares a key: its class's docstring."""
    return inspect.cleandoc(declaring_group(key).__doc__ or "")
