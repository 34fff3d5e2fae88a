"""Messages for a wrong key or value: one or two lines with the value, the allowed values and the remedy."""

import difflib
import re
from collections.abc import Iterable, Mapping
from functools import cache
from typing import Any, NamedTuple

from pydantic import ValidationError

from utils.base_config import as_yaml
from utils.config.config import Config


class Entry(NamedTuple):
    """One key of one block: its value and where it was set, for messages."""

    value: Any
    origin: str  # file, line and block, or --set


def explain(error: ValidationError, block: str, entries: Mapping[str, Entry]) -> str:
    """Describe the first problem in a line."""
    problem = error.errors(include_url=False)[0]
    if not problem["loc"]:  # a combination of keys: show where one of them was set, on the command line if there
        message = problem["msg"].removeprefix("Value error, ")
        named = [entry.origin for key, entry in entries.items() if re.search(rf"\b{re.escape(key)}\b", message)]
        on_command_line = [origin for origin in named if origin.startswith("--set")]
        return f"{(on_command_line or named or [block])[-1]}: {message}"
    key = str(problem["loc"][0])
    value, origin = entries[key]
    return wrong_value(key, f"is {shown(value)}", origin)


def wrong_value(key: str, what: str, origin: str) -> str:
    if key not in Config.model_fields:
        hint = did_you_mean(key, Config.model_fields) or "; --explain lists every key"
        return f"{origin}: unknown key {shortened(key)!r}{hint}"
    return f"{origin}: {key} {what}; allowed: {allowed(key)}"


@cache
def _properties() -> dict[str, Any]:
    return Config.model_json_schema()["properties"]


def allowed(key: str) -> str:
    """Describe the values that a key may have."""
    return _in_words(_properties()[key])


def takes_text(key: str, value: str) -> bool:
    """Whether `--set KEY=VALUE` means the text `value` itself: the setting is a text, and the value is not quoted."""
    part = _properties().get(key, {})
    kinds = {option.get("type") for option in part.get("anyOf", [part])}
    is_null = "null" in kinds and value.lower() in ("null", "~")
    return "string" in kinds and kinds <= {"string", "null"} and value[0] not in "'\"" and not is_null


def did_you_mean(word: str, names: Iterable[str]) -> str:
    near = difflib.get_close_matches(word, list(names), n=1)
    return f". Did you mean {near[0]!r}?" if near else ""


def shown(value: Any) -> str:
    return shortened(as_yaml(value))


def shortened(text: str, length: int = 60) -> str:
    """Return user input as printable text of at most `length` characters."""
    text = text if text.isprintable() else as_yaml(text)
    return text if len(text) <= length else text[: length - 3] + "..."


def _in_words(part: Mapping[str, Any]) -> str:
    """Describe the values that a JSON schema allows."""
    if "anyOf" in part:
        return " or ".join(_in_words(option) for option in part["anyOf"])
    if "enum" in part or "const" in part:
        options = part.get("enum", [part.get("const")])
        return ", ".join(option if isinstance(option, str) else as_yaml(option) for option in options)
    if "pattern" in part:
        return part["title"]
    if part["type"] == "array":
        count = f"{part['minItems']} values" if "minItems" in part else "values"
        items = part.get("prefixItems", [part.get("items")])
        return f"a list of {count}, {'each ' if 'items' in part else ''}{', '.join(map(_in_words, items))}"
    if part["type"] == "integer":
        return f"a whole number from {part['minimum']} to {part['maximum']}"
    names = {"number": "a number", "boolean": "true or false", "string": "a non-empty string", "null": "null"}
    bounds = {"exclusiveMinimum": "above", "minimum": "at least", "exclusiveMaximum": "below", "maximum": "at most"}
    limits = [f"{word} {part[bound]:g}" for bound, word in bounds.items() if bound in part]
    return " ".join([names[part["type"]], " and ".join(limits)]).strip()
