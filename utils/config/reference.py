"""`--explain`: what a key means, which values it takes, and where it acts, from its declaration."""

import re
import textwrap
from collections.abc import Sequence
from itertools import groupby

from utils.config.config import Config, declaring_group, section
from utils.config.messages import allowed, wrong_value
from utils.errors import ConfigError
from utils.keys import as_yaml

WIDTH = 100


def explain_keys(names: Sequence[str], config: Config, block: str) -> str:
    """A paragraph for each key, with its value in `config`, the block `block`; without names, all keys by group."""
    if names:
        return "\n".join(_explain(name, config, block) for name in names)
    groups = groupby(Config.model_fields, key=section)
    lines = [
        textwrap.fill(", ".join(keys), WIDTH, initial_indent=f"{title}: ", subsequent_indent="  ")
        for title, keys in groups
    ]
    return "\n".join([*lines, "Of one or several: --explain KEY ..."]) + "\n"


def _explain(key: str, config: Config, block: str) -> str:
    if key not in Config.model_fields:
        raise ConfigError(wrong_value(key, "", "--explain"))
    meaning = " ".join((Config.model_fields[key].description or "").split())
    default, value = (as_yaml(keys.model_dump(mode="json")[key]) for keys in (Config(), config))
    here = "" if value == default else f"; in {block}: {value}"
    lines = [
        f"{key} ({section(key)})",
        textwrap.fill(meaning, WIDTH, initial_indent="  ", subsequent_indent="  "),
        f"  allowed: {allowed(key)}",
        f"  default: {default}{here}",
        f"  acts in: {_where(key, meaning)}",
    ]
    return "\n".join(lines) + "\n"


def _where(key: str, meaning: str) -> str:
    """The tag that the docstring begins with, else the package that declares the key."""
    tag = re.match(r"[A-Z]+(?=:)", meaning)
    if tag:
        return f'lines with the tag {tag[0]}: grep -rnI "\\b{tag[0]}:" train.py utils'
    package = declaring_group(key).__module__.rpartition(".")[0].replace(".", "/")
    places = "train.py utils models" if package == "utils" else f"train.py {package}"
    return f"{package}/: grep -rnwI {key} {places}"
