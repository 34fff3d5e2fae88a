"""Reading configuration files: named YAML blocks in, one checked `Config` out.

A file maps block names to flat mappings. A block may merge others of its file (`<<: *NAME`) and begin with one of
another file (`extends: FILE#BLOCK`); keys that it leaves out have the defaults of `Config`. Precedence: defaults <
extended block < merged blocks < the block itself < `--set KEY=VALUE`.

Files are read as ruamel.yaml's nodes, not as its mappings, which know the line of a key too: those end with a traceback
on a block that merges itself and on a wrong tag, read `2026-01-01` as a date, and take 15 times as long.
"""

import re
import sys
from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

from pydantic import ValidationError
from ruamel.yaml import YAML
from ruamel.yaml.error import YAMLError
from ruamel.yaml.nodes import MappingNode, Node, ScalarNode, SequenceNode

from utils.config.config import Config
from utils.config.messages import Entry, did_you_mean, explain, shortened, shown, wrong_value
from utils.errors import ConfigError
from utils.files import open_regular
from utils.program import CODE

# A block's name becomes the folder expts/<name>/, so it can hold neither a separator nor a leading dot.
BLOCK_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+-]{0,99}")
MAX_BYTES = 1_000_000
MAX_CHAIN = 50  # blocks that merge or extend one another

Value = TypeVar("Value")
_Resolved = tuple[dict[str, Entry], int]  # a block's keys, and the length of the longest chain that it begins


def find_file(path: Path, folder: Path = Path()) -> Path:
    """A file of blocks: `path` from `folder` on, or where there is none, the one of this name beside the code."""
    candidates = [folder / path, CODE / path, CODE / "config" / path]
    return next((candidate for candidate in candidates if candidate.exists()), path)


def load_config(path: Path, name: str, overrides: Iterable[str] = ()) -> Config:
    """Block `name` of the YAML file `path` with `KEY=VALUE` overrides on top; `ConfigError` for anything wrong."""
    path = find_file(path)
    line, entries = _named(name, _read_blocks(path), f"--config={shortened(name)}: {path}")
    return _check(entries | dict(map(_parse_override, overrides)), {}, f"{path}:{line}: block {name!r}")


def override(config: Config, overrides: Iterable[str]) -> Config:
    """`config` with `KEY=VALUE` overrides on top; `ConfigError` for anything wrong."""
    return _check(dict(map(_parse_override, overrides)), config.model_dump(), "the run's configuration")


def list_blocks(path: Path) -> dict[str, dict[str, Any]]:
    """Every block of the file with the values in which it differs from `default`, in the file's order; unknown keys
    too, since loading the block names them."""
    defaults = Config().model_dump(mode="json")
    full = {
        name: defaults | {key: entry.value for key, entry in entries.items()}
        for name, (_, entries) in _read_blocks(find_file(path)).items()
    }
    base = full.get("default", defaults)
    return {
        name: {key: value for key, value in values.items() if key not in base or base[key] != value}
        for name, values in full.items()
    }


def _check(entries: Mapping[str, Entry], base: Mapping[str, Any], origin: str) -> Config:
    try:
        return Config(**{**base, **{key: entry.value for key, entry in entries.items()}})
    except ValidationError as error:
        raise ConfigError(explain(error, origin, entries)) from None


def _named(name: str, blocks: Mapping[str, Value], origin: str) -> Value:
    if name not in blocks:
        hint = did_you_mean(name, blocks) or "."
        raise ConfigError(f"{origin} has no such block{hint} It has: {', '.join(blocks) or 'none'}")
    return blocks[name]


def _read_blocks(path: Path) -> dict[str, tuple[int, dict[str, Entry]]]:
    """{name: (line, keys)} of the blocks of a file, in its order."""
    reader = _Reader()
    return {name: (line, reader.resolve(path, name, node)[0]) for name, (line, node) in reader.nodes(path).items()}


class _Reader:
    """Blocks with their merges (`<<`) and `extends` resolved; each file is read once, and each block resolved once."""

    def __init__(self) -> None:
        self._files: dict[Path, dict[str, tuple[int, MappingNode]]] = {}
        self._resolved: dict[int, _Resolved] = {}  # by the id of the node, which `_files` keeps alive
        self._names: dict[int, str] = {}  # of blocks, by the id of the node
        self._open: list[MappingNode] = []  # being resolved, each for the one before it

    def nodes(self, path: Path) -> dict[str, tuple[int, MappingNode]]:
        """{name: (line, mapping)} of the blocks of a file, in its order."""
        if path.resolve() not in self._files:
            self._files[path.resolve()] = blocks = _read_nodes(path)
            self._names |= {id(node): name for name, (_, node) in reversed(blocks.items())}
        return self._files[path.resolve()]

    def resolve(self, path: Path, name: str, node: MappingNode) -> _Resolved:
        """The block `name` of the file."""
        origin = f"{path}:{node.start_mark.line + 1}: block {name!r}"
        if any(node is other for other in self._open):
            raise ConfigError(f"{origin} merges itself; remove the cyclic << or extends")
        if len(self._open) + self._resolved.get(id(node), ({}, 1))[1] > MAX_CHAIN:
            raise ConfigError(f"{origin} stands in a chain of over {MAX_CHAIN} << and extends; make it shorter")
        if id(node) not in self._resolved:
            self._open.append(node)
            self._resolved[id(node)] = self._flatten(path, name, node)
            self._open.pop()
        return self._resolved[id(node)]

    def _flatten(self, path: Path, name: str, node: MappingNode) -> _Resolved:
        """Own keys win over merged, earlier merges over later, merged ones over extended ones."""
        extended, merged, own, lines = dict[str, Entry](), dict[str, Entry](), dict[str, Entry](), dict[str, int]()
        chains = [0]
        for key_node, value_node in node.value:
            key, line = _scalar_key(path, key_node), key_node.start_mark.line + 1
            origin = f"{path}:{line}: block {name!r}"
            if key in lines:
                remedy = "merge a list, <<: [*ONE, *OTHER]" if key == "<<" else "keep one"
                raise ConfigError(f"{origin}: key {key!r} is defined twice, first on line {lines[key]}; {remedy}")
            lines[key] = line
            if key == "extends":
                entries, chain = self._extend(path, origin, value_node)
                chains.append(chain)
                # line 0: each of them was set before any line of this file
                extended = {key: replace(entry, line=0) for key, entry in entries.items()}
            elif key == "<<":
                sources = value_node.value if isinstance(value_node, SequenceNode) else [value_node]
                for source in reversed(sources):
                    entries, chain = self._merge(path, name, origin, source)
                    chains.append(chain)
                    merged |= entries
            else:
                own[key] = Entry(_construct(value_node, key, origin), line, origin)
        return extended | merged | own, 1 + max(chains)

    def _merge(self, path: Path, name: str, origin: str, source: Node) -> _Resolved:
        if not isinstance(source, MappingNode):
            remedy = "expected a block by its anchor, <<: *NAME where that block begins with &NAME"
            raise ConfigError(f"{origin}: << merges {_kind(source)}; {remedy}")
        return self.resolve(path, self._names.get(id(source), name), source)

    def _extend(self, path: Path, origin: str, node: Node) -> _Resolved:
        """The block that `extends: FILE#BLOCK` names; FILE is found beside `path`, else beside the code."""
        text = str(node.value) if isinstance(node, ScalarNode) else ""
        file, _, name = text.rpartition("#")
        if not file or not name:
            what = f"{origin}: extends is {_kind(node)}"
            raise ConfigError(f"{what}; expected FILE#BLOCK without a space, such as cifar100.yaml#bs128-opt")
        other = find_file(Path(file), path.parent)
        what = f"{origin}: extends {shown(text)}"
        if not other.is_file():
            raise ConfigError(f"{what}: no such file in {path.parent.resolve()} or beside the code")
        return self.resolve(other, name, _named(name, self.nodes(other), f"{what}: {other}")[1])


def _read_nodes(path: Path) -> dict[str, tuple[int, MappingNode]]:
    root = _compose(_read(path), f"{path}", "is")
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


def _read(path: Path) -> str:
    try:
        with open_regular(path) as file:
            content = file.read(MAX_BYTES + 1)
        if len(content) > MAX_BYTES:
            raise ConfigError(f"{path}: has over {MAX_BYTES:,} bytes; expected a YAML file of configuration blocks")
        return content.decode("utf-8-sig")
    except OSError as error:
        raise ConfigError(f"{path}: cannot read the configuration file: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{path}: is no UTF-8 text; expected a YAML file of configuration blocks") from None


def _compose(text: str, origin: str, what: str) -> Node | None:
    try:
        return YAML(typ="safe", pure=True).compose(text)
    except YAMLError as error:
        mark = getattr(error, "problem_mark", None) or getattr(error, "context_mark", None)
        line = f":{mark.line + 1}" if mark and what == "is" else ""
        problem = " ".join(str(getattr(error, "problem", None) or str(error).splitlines()[0]).split())
        remedies = {
            "undefined alias": "; its anchor &NAME must stand above it",
            "'\\t'": "; indent with spaces",
            "another document": "; a file holds one document, without ---",
        }
        remedy = "".join(remedy for sign, remedy in remedies.items() if sign in problem)
        raise ConfigError(f"{origin}{line}: {what} not valid YAML 1.2: {problem}{remedy}") from None
    except RecursionError:
        raise ConfigError(f"{origin}: {what} nested too deeply; expected flat keys") from None


def _scalar_key(path: Path, node: Node) -> str:
    if not isinstance(node, ScalarNode):
        raise ConfigError(f"{path}:{node.start_mark.line + 1}: a key must be a plain word, not a list or mapping")
    return node.value


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
    node = _compose(text, origin, "the value is")
    return key, Entry(None if node is None else _construct(node, key, origin), sys.maxsize, origin)
