"""`python -m tests.generated` writes config/schema.json, tests/config/blocks.json, and `default` in cifar100.yaml."""

import json

from tests.conftest import BLOCKS, CIFAR100, ROOT
from utils.base_config import as_yaml
from utils.config import Config, load_config
from utils.config.config import section

COMMENT_COLUMN = 34  # in the default block
LINE_LENGTH = 120
SCHEMA, PUBLISHED = ROOT / "config/schema.json", ROOT / "tests/config/blocks.json"


def schema():
    """Return the JSON schema of a configuration file: a mapping of block names to blocks, without required keys."""
    block = Config.model_json_schema()
    block["properties"]["<<"] = {"description": "merge one block or a list of blocks"}
    extends = "FILE#BLOCK: begin with a block of another file, found in this file's folder or the code's"
    block["properties"]["extends"] = {"description": extends, "type": "string", "pattern": "^.+#[^#]+$"}
    block["title"] = "block"
    file = {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": "configuration blocks of train.py"}
    return file | {"type": "object", "additionalProperties": block}


def default_block():
    """Return the block `default`: each key, its default and its docstring's first sentence."""
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


def _plain(value):
    """Return a default as a person would write it: strings without quotes, integers without a decimal point."""
    whole = isinstance(value, float) and value.is_integer() and value >= 1
    return as_yaml(int(value) if whole else value).strip('"')


def with_default_block(text):
    """Return the text of cifar100.yaml with its block `default` replaced."""
    before, _, rest = text.partition("default: &DEFAULT\n")
    return before + default_block() + rest[rest.index("\n# ---") :]


def blocks():
    """Return the blocks of config/ as lines of JSON, each with all of its values that are no defaults of `Config`."""
    text, defaults = "", Config().model_dump(mode="json").items()
    for path, name in (block.values for block in BLOCKS):
        values = load_config(path, name).model_dump(mode="json").items()
        text += json.dumps({f"{path.name}#{name}": dict(item for item in values if item not in defaults)}) + "\n"
    return text


if __name__ == "__main__":
    PUBLISHED.write_text(blocks(), encoding="utf-8")
    CIFAR100.write_text(with_default_block(CIFAR100.read_text(encoding="utf-8")), encoding="utf-8")
    SCHEMA.write_text(json.dumps(schema(), indent=1), encoding="utf-8")
