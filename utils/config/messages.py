"""Messages for a wrong key or value: one or two lines with the value, the allowed values and the remedy."""

import difflib
import json
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from utils.base_config import as_yaml
from utils.config.config import Config

# Other programs' names (timm, Lightning, Hugging Face, Keras, PyTorch's examples, apex, MLPerf) of our keys, where the
# spelling differs too much for difflib.
_NAMES = {
    "amp_dtype": "bf16 fp16 half precision",
    "batch_size": "b bs mini_batch_size per_device_train_batch_size",
    "checkpoint_every_steps": "save_every save_freq save_interval save_steps",
    "clip_grad_norm": "clip grad_clip gradient_clip gradient_clip_val",
    "data_path": "data data_dir dataset_dir root",
    "device": "accelerator",
    "ema_decay": "ema model_ema",
    "enable_amp": "amp autocast mixed_precision",
    "enable_compile": "compile torch_compile",
    "enable_nhwc": "channels_last memory_format nhwc",
    "enable_profiling": "prof profile profiler",
    "enable_sync_bn": "sync_batchnorm",
    "fused_optimizer": "fused",
    "image_size": "input_size resolution",
    "log_freq": "log_every_n_steps log_interval logging_steps",
    "lr": "base_lr learning_rate max_lr peak_lr",
    "lr_decay_factor": "gamma lr_gamma",
    "lr_plateau_patience": "patience_epochs",
    "lr_schedule": "sched",
    "lr_warmup_epochs": "lr_warmup warmup",
    "micro_batch_size": "accum_iter accumulate_grad_batches accumulation_steps grad_accum gradient_accumulation_steps",
    "model": "a arch architecture backbone net network",
    "num_data_workers": "j",
    "rnd_horizontal_flip": "flip hflip",
    "seed": "random_seed",
    "test_time_flip": "tta",
    "valid_batch_size_per_gpu": "eval_batch_size test_batch_size val_batch_size",
    "validate_every_epochs": "eval_freq eval_interval val_freq val_interval",
    "weight_decay": "l2 wd",
}
OTHER_NAMES = {name: key for key, names in _NAMES.items() for name in names.split()}


@dataclass(frozen=True)
class Entry:
    """One key of one block: its value and where it was set."""

    value: Any
    line: int  # sys.maxsize for --set
    origin: str  # for messages: file, line and block, or --set


def explain(error: ValidationError, block: str, entries: Mapping[str, Entry]) -> str:
    """Return a message of at most two lines: the first problem, and the names of other wrong keys."""
    problems: dict[str | None, Any] = {}  # the first problem of each key; None: of a combination of keys
    for problem in error.errors(include_url=False):
        problems.setdefault(str(problem["loc"][0]) if problem["loc"] else None, problem)
    wrong = list(problems)
    if wrong[0] is None:  # show the line of the key in the message that was set last
        message = problems[None]["msg"].removeprefix("Value error, ")
        named = [entries[word] for word in re.findall(r"\w+", message) if word in entries]
        return f"{max(named, key=lambda entry: entry.line).origin if named else block}: {message}"
    value, origin = entries[wrong[0]].value, entries[wrong[0]].origin
    message = wrong_value(wrong[0], f"is {shown(value)}", origin) + _hint(wrong[0], value)
    others = ", ".join(shortened(str(key)) for key in wrong[1:6])
    return message + (f"\nalso wrong: {others}{' ...' if len(wrong) > 6 else ''}" if others else "")


def wrong_value(key: str, what: str, origin: str) -> str:
    if key not in Config.model_fields:
        near = nearest_key(key)
        hint = f". Did you mean {near!r}?" if near else "; --explain lists every key"
        return f"{origin}: unknown key {shortened(key)!r}{hint}"
    return f"{origin}: {key} {what}; allowed: {allowed(key)}"


def allowed(key: str) -> str:
    """Describe the values that a key may have."""
    return _in_words(Config.model_json_schema()["properties"][key])


def _hint(key: str, value: Any) -> str:
    """Suggest the allowed value that the user of a wrong value probably meant."""
    if key not in Config.model_fields:
        return ""
    if isinstance(value, float) and not math.isfinite(value):
        return "; it must be finite"
    meant = value
    if isinstance(value, str):
        words = {"none": None, "yes": True, "on": True, "y": True, "no": False, "off": False, "n": False}
        try:
            meant = words[value.lower()] if value.lower() in words else json.loads(value.lower())
        except (ValueError, RecursionError):
            return ""
    elif isinstance(value, float) and value.is_integer():
        meant = int(value)
    elif value in (0, 1):
        meant = bool(value)
    try:
        Config(**{key: meant})  # type: ignore[arg-type]
    except ValidationError as error:
        # a problem without a key: the meant value does not go with the default of another key
        if any(problem["loc"][:1] in ((), (key,)) for problem in error.errors(include_url=False)):
            return ""
    return f"; write {as_yaml(meant)}" + (" without quotes" if as_yaml(meant) == value else "")


def nearest_key(word: str) -> str | None:
    """Return the key that was probably meant: by another program's name for it, or by similar spelling."""
    keys = {key: key for key in Config.model_fields} | OTHER_NAMES
    name = word.lower().replace("-", "_")
    near = [name] if name in keys else difflib.get_close_matches(name, keys, n=1)
    return keys[near[0]] if near else None


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
        return f"a list of {count}, each {_in_words(part['items'])}"
    if part["type"] == "integer":
        return f"a whole number from {part['minimum']} to {part['maximum']}"
    names = {"number": "a number", "boolean": "true or false", "string": "a non-empty string", "null": "null"}
    bounds = {"exclusiveMinimum": "above", "minimum": "at least", "exclusiveMaximum": "below", "maximum": "at most"}
    limits = [f"{word} {part[bound]:g}" for bound, word in bounds.items() if bound in part]
    return " ".join([names[part["type"]], " and ".join(limits)]).strip()
