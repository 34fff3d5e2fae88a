"""Read configuration files: named YAML blocks in, one checked `Config` out.

A file maps block names to flat mappings. A block may merge others of its file (`<<: *NAME`) and begin with one of
another file (`extends: FILE#BLOCK`); missing keys have the defaults of `Config`. Precedence: defaults < extended block
< merged blocks < the block itself < `--set KEY=VALUE`. ruamel.yaml's round-trip loader gives the values of YAML 1.2,
their lines and merges.
"""

import os
import re
import warnings
from collections.abc import Iterable, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from ruamel.yaml import YAML
from ruamel.yaml.comments import CommentedMap
from ruamel.yaml.scalarbool import ScalarBoolean

from utils.config.config import Config
from utils.config.messages import Entry, did_you_mean, explain, shortened, shown, takes_text, wrong_value
from utils.errors import ConfigError
from utils.files import open_regular
from utils.program import CODE

# A block's name becomes the folder expts/<name>/, so it can hold neither a separator nor a leading dot.
BLOCK_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+-]{0,99}")


def find_file(path: Path, folder: Path = Path()) -> Path:
    """Return the file `path` relative to `folder`; if it does not exist, the file of this name next to the code."""
    candidates = [folder / path, CODE / path, CODE / "config" / path]
    return next((candidate for candidate in candidates if os.path.exists(candidate)), folder / path)


def load_config(path: Path, name: str, overrides: Iterable[str] = ()) -> Config:
    """Return block `name` of the YAML file `path` with `KEY=VALUE` overrides. Raises `ConfigError`."""
    path = find_file(path)
    entries = _block(path, name, f"--config={shortened(name)}: ")
    return _check(entries, overrides, {}, f"{path}: block {name!r}")


def override(config: Config, overrides: Iterable[str]) -> Config:
    """Return `config` with `KEY=VALUE` overrides. Raises `ConfigError`."""
    return _check({}, overrides, config.model_dump(), "the run's configuration")


def list_blocks(path: Path) -> dict[str, dict[str, Any]]:
    """Return every block of the file, in its order, with the values that differ from `default`. Unknown keys are
    included: only loading the block refuses them."""
    path, defaults = find_file(path), Config().model_dump(mode="json")
    full = dict[str, dict[str, Any]]()
    for name, block in _read_blocks(path).items():
        entries = _flatten(path, block, ((path.resolve(), name),))
        full[name] = defaults | {key: entry.value for key, entry in entries.items()}
    base = full.get("default", defaults).items()
    return {name: dict(item for item in values.items() if item not in base) for name, values in full.items()}


def _check(entries: dict[str, Entry], overrides: Iterable[str], base: Mapping[str, Any], origin: str) -> Config:
    entries |= dict(map(_parse_override, overrides))
    try:
        return Config(**{**base, **{key: entry.value for key, entry in entries.items()}})
    except ValidationError as error:
        raise ConfigError(explain(error, origin, entries)) from None


def _block(path: Path, name: str, origin: str, chain: tuple[tuple[Path, str], ...] = ()) -> dict[str, Entry]:
    """Return the keys of a block. `chain`: the (file, block) pairs that led here by `extends`."""
    blocks = _read_blocks(path)
    if name not in blocks:
        hint = did_you_mean(name, blocks) or "."
        raise ConfigError(f"{origin}{path} has no such block{hint} It has: {shortened(', '.join(blocks), 2000)}")
    if (path.resolve(), name) in chain:
        raise ConfigError(f"{origin}block {name!r} extends itself; remove the cyclic extends")
    return _flatten(path, blocks[name], (*chain, (path.resolve(), name)))


def _flatten(path: Path, block: CommentedMap, chain: tuple[tuple[Path, str], ...]) -> dict[str, Entry]:
    own = block.lc.data or {}  # {key: [line, ...] from 0} of the block's own keys
    origins = {key: f"{path}:{position[0] + 1}" for key, position in own.items()}
    entries = dict[str, Entry]()
    if "extends" in own:  # FILE#BLOCK; FILE is searched in the folder of `path`, then next to the code
        file, _, name = str(block["extends"]).rpartition("#")
        what = f"{origins['extends']}: extends {shown(block['extends'])}: "
        other = find_file(Path(file).expanduser(), path.parent)
        if not file or not name:
            raise ConfigError(f"{what}expected FILE#BLOCK without a space, such as cifar100.yaml#bs128-opt")
        if not other.is_file():
            raise ConfigError(f"{what}no such file; expected one in {path.parent.resolve()} or next to the code")
        entries |= _block(other, name, what, chain)
    for merged in reversed(list(block.merge)):  # of several merged blocks the first one wins
        entries |= _flatten(path, merged, chain)
    return entries | {str(key): Entry(_plain(block[key]), origins[key]) for key in own if key != "extends"}


def _read_blocks(path: Path) -> dict[str, CommentedMap]:
    """Return {name: block} of a file, in its order."""
    expected = "expected a YAML file of configuration blocks"
    try:
        with open_regular(path) as file:
            text = file.read().decode("utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        problem = error.strerror if isinstance(error, OSError) else "is not UTF-8 text"
        raise ConfigError(f"{path}: {expected}: {problem}") from None
    blocks = _parse_yaml(text, str(path), "is")
    if not isinstance(blocks, CommentedMap):
        raise ConfigError(f"{path}: {expected}: block names with keys below them")
    for name, block in blocks.items():
        origin = f"{path}:{blocks.lc.data[name][0] + 1}: block"
        if not BLOCK_NAME.fullmatch(str(name)):
            raise ConfigError(f"{origin} name {shown(name)} cannot name a folder; use letters, digits and . _ + -")
        if not isinstance(block, CommentedMap):
            raise ConfigError(f"{origin} {name!r} is {shown(block)}; expected keys below a name such as default:")
    return {str(name): block for name, block in blocks.items()}


@lru_cache(maxsize=32)  # several blocks of one file, and files that extend it
def _parse_yaml(text: str, origin: str, what: str) -> Any:
    """Parse a YAML text. Raises `ConfigError` for whatever ruamel.yaml raises, with the line in a file."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # for two anchors of one name, which YAML allows
            return YAML().load(text)
    except Exception as error:  # YAMLError, but for some texts also ValueError, IndexError and others
        mark = getattr(error, "problem_mark", None)
        line = f":{mark.line + 1}" if mark and what == "is" else ""
        problem = getattr(error, "problem", None) or str(error).partition("\n")[0] or type(error).__name__
        raise ConfigError(f"{origin}{line}: {what} not valid YAML 1.2: {shortened(problem, 100)}") from None


def _plain(value: Any) -> Any:
    """Return ruamel.yaml's value as a plain one: its numbers remember how they were written."""
    if isinstance(value, list):
        return [_plain(item) for item in value]
    if isinstance(value, bool | ScalarBoolean):
        return bool(value)
    if isinstance(value, int):
        return int(value)
    return float(value) if isinstance(value, float) else value


def _parse_override(text: str) -> tuple[str, Entry]:
    """Return the key and value of KEY=VALUE: literally for a text without quotes, else as YAML without comments."""
    origin = f"--set {shortened(text)}"
    key, equals, value = (part.strip() for part in text.partition("="))
    if not equals or not key:
        raise ConfigError(f"{origin}: expected KEY=VALUE, for example --set lr=0.2")
    if not value:
        raise ConfigError(wrong_value(key, "has no value", origin))
    if re.search(r"^[^'\"].*\s#", value) or takes_text(key, value):
        return key, Entry(value, origin)
    return key, Entry(_plain(_parse_yaml(value, origin, "the value is")), origin)
