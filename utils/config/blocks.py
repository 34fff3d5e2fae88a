"""Reading configuration files: named YAML blocks in, one checked `Config` out.

A file maps block names to flat mappings. A block may merge others of its file (`<<: *NAME`) and begin with one of
another file (`extends: FILE#BLOCK`); keys that it leaves out have the defaults of `Config`. Precedence: defaults <
extended block < merged blocks < the block itself < `--set KEY=VALUE`.
"""

import re
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from ruamel.yaml import YAML
from ruamel.yaml.error import YAMLError
from ruamel.yaml.nodes import MappingNode, Node, ScalarNode, SequenceNode

from utils.config.config import Config
from utils.config.messages import Entry, did_you_mean, explain, shortened, shown, wrong_value
from utils.errors import ConfigError
from utils.program import CODE

# A block's name becomes the folder expts/<name>/, so it can hold neither a separator nor a leading dot.
BLOCK_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+-]{0,99}")


_Place = tuple[Path, int]  # where a block stands: its file, and the position in it


@dataclass(frozen=True)
class _Block:
    line: int
    entries: dict[str, Entry]


def find_file(path: Path, folder: Path = Path()) -> Path:
    """A file of blocks: `path` from `folder` on, or where there is none, the one of this name beside the code."""
    candidates = [folder / path, CODE / path, CODE / "config" / path]
    return next((candidate for candidate in candidates if candidate.exists()), path)


def load_config(path: Path, name: str, overrides: Iterable[str] = ()) -> Config:
    """Block `name` of the YAML file `path` with `KEY=VALUE` overrides on top; `ConfigError` for anything wrong."""
    path = find_file(path)
    blocks = _read_blocks(path)
    if name not in blocks:
        raise ConfigError(
            f"--config={shortened(name)}: {path} has no such block{did_you_mean(name, blocks) or '.'}"
            f" It has: {', '.join(blocks) or 'none'}"
        )
    entries = blocks[name].entries | dict(_parse_override(override) for override in overrides)
    try:
        return Config(**{key: entry.value for key, entry in entries.items()})
    except ValidationError as error:
        raise ConfigError(explain(error, f"{path}:{blocks[name].line}: block {name!r}", entries)) from None


def override(config: Config, overrides: Iterable[str]) -> Config:
    """`config` with `KEY=VALUE` overrides on top; `ConfigError` for anything wrong."""
    entries = dict(_parse_override(text) for text in overrides)
    try:
        return Config(**config.model_dump() | {key: entry.value for key, entry in entries.items()})
    except ValidationError as error:
        raise ConfigError(explain(error, "the run's configuration", entries)) from None


def list_blocks(path: Path) -> dict[str, dict[str, Any]]:
    """Every block of the file with the values in which it differs from `default`, in the file's order; unknown keys
    too, since loading the block names them."""
    defaults = Config().model_dump(mode="json")
    full = {
        name: defaults | {key: entry.value for key, entry in block.entries.items()}
        for name, block in _read_blocks(find_file(path)).items()
    }
    base = full.get("default", defaults)
    return {
        name: {key: value for key, value in values.items() if key not in base or base[key] != value}
        for name, values in full.items()
    }


def _read_blocks(path: Path) -> dict[str, _Block]:
    nodes = _read_nodes(path)
    names = {id(node): name for name, (_, node) in reversed(nodes.items())}
    return {name: _Block(line, _flatten(path, name, node, names, parents=())) for name, (line, node) in nodes.items()}


def _read_nodes(path: Path) -> dict[str, tuple[int, MappingNode]]:
    """{block's name: (line, mapping)} of a file, in its order."""
    root = _compose(path)
    if not isinstance(root, MappingNode):
        raise ConfigError(f"{path}: holds no configuration blocks; expected block names with keys below them")
    blocks: dict[str, tuple[int, MappingNode]] = {}
    for key_node, node in root.value:
        name, line = _scalar_key(path, key_node), key_node.start_mark.line + 1
        origin = f"{path}:{line}: block {name!r}"
        if name in blocks:
            raise ConfigError(f"{origin} is defined twice, first on line {blocks[name][0]}; rename one")
        if not BLOCK_NAME.fullmatch(name):
            raise ConfigError(
                f"{path}:{line}: block name {shown(name)} cannot name a folder; "
                "allowed: up to 100 letters, digits and . _ + -, beginning with a letter or digit"
            )
        if not isinstance(node, MappingNode):
            raise ConfigError(f"{origin} is {_kind(node)}; expected keys below it, for example lr: 0.1")
        blocks[name] = (line, node)
    return blocks


def _compose(path: Path) -> Node | None:
    try:
        text = path.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise ConfigError(f"{path}: cannot read the configuration file: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{path}: is no UTF-8 text; expected a YAML file of configuration blocks") from None
    try:
        return YAML(typ="safe", pure=True).compose(text)
    except YAMLError as error:
        mark = getattr(error, "problem_mark", None) or getattr(error, "context_mark", None)
        line = f":{mark.line + 1}" if mark else ""
        raise ConfigError(f"{path}{line}: is not valid YAML 1.2: {_yaml_problem(error)}") from None
    except RecursionError:
        raise ConfigError(f"{path}: is nested too deeply; expected blocks of flat keys") from None


def _yaml_problem(error: YAMLError) -> str:
    """The parser's complaint on one line, with the remedy where it does not say."""
    problem = " ".join(str(getattr(error, "problem", None) or str(error).splitlines()[0]).split())
    remedies = {
        "undefined alias": "its anchor &NAME must stand above it",
        "'\\t'": "indent with spaces",
        "another document": "a file holds one document, without ---",
    }
    return "; ".join([problem] + [remedy for sign, remedy in remedies.items() if sign in problem])


def _scalar_key(path: Path, node: Node) -> str:
    if not isinstance(node, ScalarNode):
        raise ConfigError(f"{path}:{node.start_mark.line + 1}: a key must be a plain word, not a list or mapping")
    return node.value


def _flatten(
    path: Path, name: str, node: MappingNode, names: Mapping[int, str], parents: tuple[_Place, ...]
) -> dict[str, Entry]:
    """The keys of a block with its merges (`<<`) and `extends` resolved; own keys win over merged, earlier merges over
    later, merged ones over extended ones."""
    place = (path.resolve(), node.start_mark.index)
    if place in parents:
        origin = f"{path}:{node.start_mark.line + 1}: block {name!r}"
        raise ConfigError(f"{origin} merges itself; remove the cyclic << or extends")
    extended: dict[str, Entry] = {}
    merged: dict[str, Entry] = {}
    own: dict[str, Entry] = {}
    lines: dict[str, int] = {}
    for key_node, value_node in node.value:
        key, line = _scalar_key(path, key_node), key_node.start_mark.line + 1
        origin = f"{path}:{line}: block {name!r}"
        if key in lines:
            remedy = "merge a list, <<: [*ONE, *OTHER]" if key == "<<" else "keep one"
            raise ConfigError(f"{origin}: key {key!r} is defined twice, first on line {lines[key]}; {remedy}")
        lines[key] = line
        if key == "extends":
            extended = _extend(path, origin, value_node, (*parents, place))
            continue
        if key != "<<":
            own[key] = Entry(_construct(value_node, key, origin), line, origin)
            continue
        sources = value_node.value if isinstance(value_node, SequenceNode) else [value_node]
        for source in reversed(sources):
            if not isinstance(source, MappingNode):
                remedy = "expected a block by its anchor, <<: *NAME where that block begins with &NAME"
                raise ConfigError(f"{origin}: << merges {_kind(source)}; {remedy}")
            merged |= _flatten(path, names.get(id(source), name), source, names, (*parents, place))
    return extended | merged | own


def _extend(path: Path, origin: str, node: Node, parents: tuple[_Place, ...]) -> dict[str, Entry]:
    """The keys of the block that `extends: FILE#BLOCK` names; FILE is found beside `path`, else beside the code."""
    text = str(node.value) if isinstance(node, ScalarNode) else ""
    file, sign, name = text.rpartition("#")
    if not file or not sign or not name:
        raise ConfigError(
            f"{origin}: extends is {_kind(node)}; expected FILE#BLOCK without a space, such as cifar100.yaml#bs128-opt"
        )
    other = find_file(Path(file), path.parent)
    if not other.is_file():
        raise ConfigError(
            f"{origin}: extends {shown(text)}: no such file in {path.parent.resolve()} or beside the code"
        )
    nodes = _read_nodes(other)
    if name not in nodes:
        raise ConfigError(
            f"{origin}: extends {shown(text)}: {other} has no such block{did_you_mean(name, nodes) or '.'}"
            f" It has: {', '.join(nodes) or 'none'}"
        )
    names = {id(block): other_name for other_name, (_, block) in reversed(nodes.items())}
    entries = _flatten(other, name, nodes[name][1], names, parents)
    # line 0: each of them was set before any line of this file
    return {key: replace(entry, line=0) for key, entry in entries.items()}


def _construct(node: Node, key: str, origin: str) -> Any:
    """A key's value, a scalar or a flat list of scalars, by the core schema of YAML 1.2."""
    kind = str(node.tag).removeprefix("tag:yaml.org,2002:")
    if isinstance(node, SequenceNode) and kind == "seq" and all(isinstance(item, ScalarNode) for item in node.value):
        return [_construct(item, key, origin) for item in node.value]
    if kind in ("map", "seq"):
        raise ConfigError(wrong_value(key, "holds " + ("a mapping" if kind == "map" else "a list in a list"), origin))
    if kind in ("timestamp", "merge", "value"):  # types of YAML 1.1, which 1.2 reads as text
        return node.value
    if kind not in ("str", "int", "float", "bool", "null"):
        tag = kind if kind.startswith("!") else f"!!{kind}"
        raise ConfigError(wrong_value(key, f"has the tag {tag}, which is not read here", origin))
    try:
        return _constructor().construct_object(node)
    except (YAMLError, ValueError, KeyError, TypeError):
        raise ConfigError(wrong_value(key, f"is {shown(node.value)}, which cannot be read as {kind}", origin)) from None


@cache
def _constructor() -> Any:
    """One for all values: every YAML() searches the disk for plug-ins."""
    return YAML(typ="safe", pure=True).constructor


def _kind(node: Node) -> str:
    if isinstance(node, ScalarNode):
        return shown(node.value) if node.value else "empty"
    return "a list" if isinstance(node, SequenceNode) else "a mapping"


def _parse_override(override: str) -> tuple[str, Entry]:
    origin = f"--set {shortened(override)}"
    key, equals, text = override.partition("=")
    key = key.strip()
    if not equals or not key:
        raise ConfigError(f"{origin}: expected KEY=VALUE, for example --set lr=0.2")
    if not text.strip():
        raise ConfigError(wrong_value(key, "has no value", origin))
    try:
        node = YAML(typ="safe", pure=True).compose(text)
    except YAMLError as error:
        raise ConfigError(f"{origin}: the value is not valid YAML 1.2: {_yaml_problem(error)}") from None
    except RecursionError:
        raise ConfigError(f"{origin}: the value is nested too deeply") from None
    return key, Entry(None if node is None else _construct(node, key, origin), sys.maxsize, origin)
