"""Read configuration files: named YAML blocks in, one checked `Config` out.

A file maps block names to flat mappings. A block may merge others of its file (`<<: *NAME`) and begin with one of
another file (`extends: FILE#BLOCK`); missing keys have the defaults of `Config`. Precedence: defaults < extended block
< merged blocks < the block itself < `--set KEY=VALUE`.

ruamel.yaml only parses, to nodes that know their line. Values are built here, by the core schema of YAML 1.2.
"""

import os
import re
import sys
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from pydantic import ValidationError
from ruamel.yaml import YAML
from ruamel.yaml.nodes import MappingNode, Node, ScalarNode, SequenceNode
from ruamel.yaml.reader import Reader
from ruamel.yaml.resolver import VersionedResolver
from ruamel.yaml.tag import Tag

from utils.config.config import Config
from utils.config.messages import Entry, did_you_mean, explain, shortened, shown, wrong_value
from utils.errors import ConfigError
from utils.files import open_regular
from utils.program import CODE

# A block's name becomes the folder expts/<name>/, so it can hold neither a separator nor a leading dot.
BLOCK_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+-]{0,99}")
MAX_BYTES = 300_000
MAX_CHAIN = 100  # depth of blocks that merge or extend one another
MAX_SHOWN = 200  # characters of a path in a message

TAG = "tag:yaml.org,2002:"
CORE_SCHEMA = {
    "null": re.compile("~|null|Null|NULL|"),
    "bool": re.compile("true|True|TRUE|false|False|FALSE"),
    "int": re.compile("[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+"),
    "float": re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)"),
    "str": re.compile(".*", re.DOTALL),
}

Value = TypeVar("Value")


def find_file(path: Path, folder: Path = Path()) -> Path:
    """Return the file `path` relative to `folder`; if it does not exist, the file of this name next to the code."""
    candidates = [folder / path, CODE / path, CODE / "config" / path]
    return next((candidate for candidate in candidates if os.path.exists(candidate)), folder / path)


def load_config(path: Path, name: str, overrides: Iterable[str] = ()) -> Config:
    """Return block `name` of the YAML file `path` with `KEY=VALUE` overrides. Raises `ConfigError`."""
    path = find_file(path)
    line, entries = _named(name, _read_blocks(path), f"--config={shortened(name)}: {_at(path)}")
    return _check(entries | dict(map(_parse_override, overrides)), {}, f"{_at(path, line)}: block {name!r}")


def override(config: Config, overrides: Iterable[str]) -> Config:
    """Return `config` with `KEY=VALUE` overrides. Raises `ConfigError`."""
    return _check(dict(map(_parse_override, overrides)), config.model_dump(), "the run's configuration")


def list_blocks(path: Path) -> dict[str, dict[str, Any]]:
    """Return every block of the file, in its order, with the values that differ from `default`. Unknown keys are
    included: only loading the block refuses them."""
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
        raise ConfigError(f"{origin} has no such block{hint} It has: {shortened(', '.join(blocks), 2000) or 'none'}")
    return blocks[name]


def _at(path: Path, line: int | None = None) -> str:
    """Return a place in a file for a message."""
    text = str(path)
    shown_path = text if len(text) <= MAX_SHOWN else f"...{text[-MAX_SHOWN:]}"
    return shown_path if line is None else f"{shown_path}:{line}"


def _read_blocks(path: Path) -> dict[str, tuple[int, dict[str, Entry]]]:
    """Return {name: (line, keys)} of the blocks of a file, in its order."""
    reader = _Reader()
    return {name: (line, reader.resolve(path, name, node)) for name, (line, node) in reader.nodes(path).items()}


class _Reader:
    """Resolves the merges (`<<`) and `extends` of blocks. Reads each file once and resolves each block once."""

    def __init__(self) -> None:
        self._files: dict[Path, dict[str, tuple[int, MappingNode]]] = {}
        self._resolved: dict[int, dict[str, Entry]] = {}  # by id of the node, which `_files` keeps alive
        self._names: dict[int, str] = {}  # names of blocks, by id of the node
        self._open: list[MappingNode] = []  # the chain of blocks being resolved

    def nodes(self, path: Path) -> dict[str, tuple[int, MappingNode]]:
        """Return {name: (line, mapping)} of the blocks of a file, in its order."""
        if path.resolve() not in self._files:
            self._files[path.resolve()] = blocks = _read_nodes(path)
            self._names |= {id(node): name for name, (_, node) in reversed(blocks.items())}
        return self._files[path.resolve()]

    def resolve(self, path: Path, name: str, node: MappingNode) -> dict[str, Entry]:
        """Return the keys of block `name` of the file."""
        origin = f"{_at(path, node.start_mark.line + 1)}: block {name!r}"
        if any(node is other for other in self._open):
            raise ConfigError(f"{origin} merges itself; remove the cyclic << or extends")
        if len(self._open) == MAX_CHAIN:
            raise ConfigError(f"{origin} is in a chain of over {MAX_CHAIN} << and extends; make it shorter")
        if id(node) not in self._resolved:
            self._open.append(node)
            self._resolved[id(node)] = self._flatten(path, name, node)
            self._open.pop()
        return self._resolved[id(node)]

    def _flatten(self, path: Path, name: str, node: MappingNode) -> dict[str, Entry]:
        """Merge a block's keys: own keys win over merged keys, earlier merges over later ones, and merged keys over
        extended ones."""
        extended, merged, own, lines = dict[str, Entry](), dict[str, Entry](), dict[str, Entry](), dict[str, int]()
        for key_node, value_node in node.value:
            key, line = _scalar_key(path, key_node), key_node.start_mark.line + 1
            origin = f"{_at(path, line)}: block {name!r}"
            if key in lines:
                remedy = "merge a list, <<: [*ONE, *OTHER]" if key == "<<" else "keep one"
                what = f"key {shortened(key)!r} is defined twice, first on line {lines[key]}"
                raise ConfigError(f"{origin}: {what}; {remedy}")
            lines[key] = line
            if key == "extends":
                entries = self._extend(path, origin, value_node)
                extended = {key: replace(entry, line=0) for key, entry in entries.items()}  # before this file's lines
            elif key == "<<":
                sources = value_node.value if isinstance(value_node, SequenceNode) else [value_node]
                for source in reversed(sources):
                    merged |= self._merge(path, name, origin, source)
            else:
                own[key] = Entry(_construct(value_node, key, origin), line, origin)
        return extended | merged | own

    def _merge(self, path: Path, name: str, origin: str, source: Node) -> dict[str, Entry]:
        if not isinstance(source, MappingNode):
            remedy = "expected an alias, <<: *NAME, of a block that begins with &NAME"
            raise ConfigError(f"{origin}: << merges {_kind(source)}; {remedy}")
        return self.resolve(path, self._names.get(id(source), name), source)

    def _extend(self, path: Path, origin: str, node: Node) -> dict[str, Entry]:
        """Resolve the block of `extends: FILE#BLOCK`; FILE is searched in the folder of `path`, then the code's."""
        text = str(node.value) if isinstance(node, ScalarNode) else ""
        file, _, name = text.rpartition("#")
        if not file or not name:
            what = f"{origin}: extends is {_kind(node)}"
            raise ConfigError(f"{what}; expected FILE#BLOCK without a space, such as cifar100.yaml#bs128-opt")
        other = find_file(Path(file), path.parent)
        what = f"{origin}: extends {shown(text)}"
        if not os.path.isfile(other):
            raise ConfigError(f"{what}: no such file; expected one in {_at(path.parent.resolve())} or next to the code")
        return self.resolve(other, name, _named(name, self.nodes(other), f"{what}: {_at(other)}")[1])


def _read_nodes(path: Path) -> dict[str, tuple[int, MappingNode]]:
    root = _compose(_read(path), _at(path), "is")
    if not isinstance(root, MappingNode):
        raise ConfigError(f"{_at(path)}: holds no configuration blocks; expected block names with keys below them")
    blocks: dict[str, tuple[int, MappingNode]] = {}
    for key_node, node in root.value:
        name, line = _scalar_key(path, key_node), key_node.start_mark.line + 1
        origin = f"{_at(path, line)}: block {name!r}"
        if not BLOCK_NAME.fullmatch(name):
            raise ConfigError(
                f"{_at(path, line)}: block name {shown(name)} cannot name a folder; "
                "allowed: up to 100 letters, digits and . _ + -, beginning with a letter or digit"
            )
        if name in blocks:
            raise ConfigError(f"{origin} is defined twice, first on line {blocks[name][0]}; rename one")
        if not isinstance(node, MappingNode):
            raise ConfigError(f"{origin} is {_kind(node)}; expected keys below it, for example lr: 0.1")
        blocks[name] = (line, node)
    return blocks


def _read(path: Path) -> str:
    try:
        with open_regular(path) as file:
            content = file.read(MAX_BYTES + 1)
        if len(content) > MAX_BYTES:
            raise ConfigError(
                f"{_at(path)}: has over {MAX_BYTES:,} bytes; expected a YAML file of configuration blocks"
            )
        return content.decode("utf-8-sig")
    except OSError as error:
        raise ConfigError(f"{_at(path)}: expected a YAML file of configuration blocks: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{_at(path)}: is not UTF-8 text; expected a YAML file of configuration blocks") from None


class _CoreResolver(VersionedResolver):
    """Gives scalars the types of YAML 1.2's core schema. ruamel.yaml's own rules also take 0b11 and 1_0 as numbers."""

    def resolve(self, kind: Any, value: Any, implicit: Any) -> Any:
        if kind is ScalarNode and implicit[0]:  # plain, without a tag
            return Tag(suffix=TAG + next(name for name, form in CORE_SCHEMA.items() if form.fullmatch(value)))
        return super().resolve(kind, value, implicit)


class _LineReader(Reader):
    """A reader that still knows how many lines it had read after ruamel.yaml resets it."""

    last_line = 0

    def reset_reader(self) -> None:
        self.last_line = getattr(self, "line", 0)
        super().reset_reader()


def _compose(text: str, origin: str, what: str) -> Node | None:
    """Parse a YAML text. Raises `ConfigError` for whatever ruamel.yaml raises."""
    yaml = YAML(typ="safe", pure=True)
    yaml.Resolver, yaml.Reader = _CoreResolver, _LineReader
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # for two anchors of one name, which YAML allows
            return yaml.compose(text)
    except RecursionError:
        raise ConfigError(f"{origin}: {what} nested too deeply; expected flat keys") from None
    except Exception as error:  # YAMLError, but for some texts also ValueError, IndexError and others
        mark = getattr(error, "problem_mark", None) or getattr(error, "context_mark", None)
        number = mark.line if mark else max(yaml.reader.last_line, text.count("\n", 0, getattr(error, "position", 0)))
        line = f":{number + 1}" if what == "is" else ""
        first_line = (str(error) or type(error).__name__).splitlines()[0]
        problem = " ".join(str(getattr(error, "problem", None) or first_line).split())
        remedies = {
            "undefined alias": "; its anchor &NAME must come before it",
            "'\\t'": "; indent with spaces",
            "another document": "; a file holds one document, without ---",
        }
        remedy = "".join(remedy for sign, remedy in remedies.items() if sign in problem)
        problem = shortened(problem, 100)
        raise ConfigError(f"{origin}{line}: {what} not valid YAML 1.2: {problem}{remedy}") from None


def _scalar_key(path: Path, node: Node) -> str:
    if not isinstance(node, ScalarNode):
        raise ConfigError(f"{_at(path, node.start_mark.line + 1)}: a key is {_kind(node)}; expected a plain word")
    return node.value


def _construct(node: Node, key: str, origin: str) -> Any:
    """Return a key's value: a scalar or a flat list of scalars."""
    kind = str(node.tag).removeprefix(TAG)
    if isinstance(node, SequenceNode) and kind == "seq" and all(isinstance(item, ScalarNode) for item in node.value):
        return [_construct(item, key, origin) for item in node.value]
    if kind in ("map", "seq"):
        raise ConfigError(wrong_value(key, "holds " + ("a mapping" if kind == "map" else "a list in a list"), origin))
    if kind not in CORE_SCHEMA:
        tag = shortened(kind if kind.startswith("!") else f"!!{kind}")
        raise ConfigError(wrong_value(key, f"has the tag {tag}, which is not supported", origin))
    if isinstance(node, ScalarNode) and CORE_SCHEMA[kind].fullmatch(node.value):
        try:
            return _read_scalar(kind, node.value)
        except ValueError:  # such as an integer of over 4,300 digits
            pass
    problem = "holds a character that no path can have" if kind == "str" else f"cannot be read as {kind}"
    raise ConfigError(wrong_value(key, f"is {_kind(node)}, which {problem}", origin))


def _read_scalar(kind: str, text: str) -> Any:
    """Convert a text that matches `CORE_SCHEMA[kind]`."""
    if kind == "null":
        return None
    if kind == "bool":
        return text.lower() == "true"
    if kind == "int":
        return int(text, {"0o": 8, "0x": 16}.get(text[:2], 10))
    if kind == "float":
        return float(re.sub(r"\.(?=inf|nan)", "", text.lower()))
    if "\0" in text:
        raise ValueError("NUL")
    os.fsencode(text)  # raises UnicodeEncodeError, a ValueError, for lone surrogates that are no byte of a file name
    return text


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
