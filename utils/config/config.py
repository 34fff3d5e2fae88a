"""`Config`: all keys of a configuration block, inherited from the groups that the components declare.

Types, defaults and meanings are declared in these groups only.
"""

import inspect
from typing import Any

from pydantic import model_validator

from models.config import ModelConfig
from utils.base_config import as_yaml
from utils.data.config import DataConfig
from utils.run.config import OutputConfig
from utils.training.config import TrainingConfig

COMMENT_COLUMN = 34  # in the default block
LINE_LENGTH = 120


class Config(OutputConfig, TrainingConfig, ModelConfig, DataConfig):
    """All keys of a configuration block."""

    @model_validator(mode="after")
    def _check_profiling(self) -> "Config":
        if self.enable_profiling and self.profiling_epoch_start > self.max_epochs:
            raise ValueError(
                f"enable_profiling would profile nothing: profiling_epoch_start {self.profiling_epoch_start} "
                f"exceeds max_epochs {self.max_epochs}; lower it"
            )
        return self


def schema() -> dict[str, Any]:
    """Return the JSON schema of a configuration file: a mapping of block names to blocks, without required keys."""
    block = Config.model_json_schema()
    block["properties"]["<<"] = {"description": "merge one block or a list of blocks"}
    block["properties"]["extends"] = {
        "description": "FILE#BLOCK: begin with a block of another file, found in this file's folder or the code's",
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
    """Return the block `default` of config/cifar100.yaml: each key, its default and its docstring's first sentence."""
    defaults = Config().model_dump(mode="json")
    lines, above = ["default: &DEFAULT"], ""
    for key, field in Config.model_fields.items():
        if (title := section(key)) != above:
            lines += [""] * bool(above) + [f"  # {title}"]
            above = title
        entry = f"  {key}: {_plain(defaults[key])}"
        first_sentence = " ".join((field.description or "").split()).partition(". ")[0].rstrip(".")
        comment = f"# {first_sentence}"
        one_line = f"{entry:{COMMENT_COLUMN - 1}} {comment}"
        if len(one_line) <= LINE_LENGTH and len(entry) < COMMENT_COLUMN:
            lines.append(one_line)
        else:
            lines += [f"  {comment}", entry]
    return "\n".join(lines) + "\n"


def _plain(value: Any) -> str:
    """Return a default as a person would write it: strings without quotes, integers without a decimal point."""
    whole = isinstance(value, float) and value.is_integer() and value >= 1
    return as_yaml(int(value) if whole else value).strip('"')


def section(key: str) -> str:
    """Return the title of the group that declares a key: the class's docstring."""
    groups = (group for group in Config.__mro__ if key in inspect.get_annotations(group))
    return inspect.cleandoc(next(groups).__doc__ or "")
