"""Typed, checked, frozen configuration: named YAML blocks in, one `Config` out.

Values live in `config/*.yaml`, types and meanings in `Config`, and nowhere else. A file maps block names to flat
mappings; its block `default` lists every key, other blocks merge it (`<<: *DEFAULT`) and list differences.
Precedence: merged blocks < the block itself < `--set KEY=VALUE`.

`python -m utils.config` prints the JSON schema that editors use (kept in config/schema.json).
"""

import difflib
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from ruamel.yaml import YAML
from ruamel.yaml.error import YAMLError
from ruamel.yaml.nodes import MappingNode, Node, ScalarNode, SequenceNode

from utils.errors import ConfigError

# A block's name becomes the folder expts/<name>/, so it can hold neither a separator nor a leading dot.
BLOCK_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+-]{0,99}")

PerChannel = Annotated[tuple[float, float, float], Field(strict=False)]
PositiveInt = Annotated[int, Field(gt=0)]
NonNegativeInt = Annotated[int, Field(ge=0)]
Fraction = Annotated[float, Field(ge=0, lt=1)]


class Config(BaseModel):
    """Every key of a configuration block. The default values are in the block `default` of each YAML file."""

    model_config = ConfigDict(
        strict=True, frozen=True, extra="forbid", allow_inf_nan=False, use_attribute_docstrings=True
    )

    # ---- data
    dataset: Literal["cifar100", "cifar10", "shapes"]
    """What to learn: CIFAR-100, CIFAR-10, or the built-in drawn shapes that need no file."""
    data_path: Annotated[str, Field(min_length=1)]
    """Folder that holds the datasets, relative to the working directory."""
    download: Literal["auto", True, False]
    """Fetch a missing dataset; auto: yes, except inside a Slurm job (compute nodes often have no network)."""
    num_classes: Annotated[int, Field(ge=2)]
    """Outputs of the network; must be what the dataset has."""
    cifar100_mean: PerChannel
    """Per-channel mean of CIFAR-100's training images, in [0, 1]; other datasets bring their own."""
    cifar100_std: Annotated[tuple[Annotated[float, Field(gt=0)], ...], Field(strict=False, min_length=3, max_length=3)]
    """Per-channel standard deviation of CIFAR-100's training images."""
    data_loader: Literal["torchvision", "device"]
    """Who cuts, flips, rotates and normalises: torchvision in worker processes, or the device itself in batches."""
    num_data_workers: NonNegativeInt
    """Worker processes of the torchvision loader on each rank; 0 loads in the training process."""
    rnd_crop_padding: Annotated[int, Field(ge=0, le=32)]
    """Random crop after padding with this many black pixels on each side; 0: no crop."""
    rnd_horizontal_flip: bool
    """Mirror every second training image, at random."""
    rnd_rotation_angle: Annotated[float, Field(ge=0, le=180)]
    """Rotate training images by up to this many degrees either way; 0: no rotation."""

    # ---- model
    model: Literal["resnet18", "resnet34", "resnet50", "resnet101", "resnet152", "resnet8", "resnet20", "resnet56"]
    """torchvision's ResNet family with a CIFAR stem, or He's small CIFAR networks (8, 20, 56 layers)."""
    stem: Literal["7x7", "3x3"]
    """First convolution of the large ResNets: the tutorial's 7x7 or the usual CIFAR 3x3, stride 1, no max-pool."""

    # ---- optimisation
    lr: Annotated[float, Field(gt=0)]
    """Peak learning rate."""
    momentum: Fraction
    """SGD momentum."""
    nesterov: bool
    """Nesterov momentum."""
    weight_decay: Annotated[float, Field(ge=0)]
    """L2 penalty, on every parameter."""
    label_smoothing: Fraction
    """Share of the target spread over all classes in training; validation never smooths."""
    lr_schedule: Literal["plateau", "onecycle", "cosine", "step", "constant"]
    """What follows the warm-up: cut on a plateau of the validation loss (the tutorial's), or a function of the step."""
    lr_warmup_epochs: Annotated[float, Field(ge=0)]
    """Linear warm-up, step by step, over this many epochs; for onecycle the length of its rise."""
    lr_decay_factor: Annotated[float, Field(gt=0, lt=1)]
    """plateau and step: multiply the learning rate by this."""
    lr_plateau_patience: NonNegativeInt
    """plateau: epochs without a better validation loss that are tolerated before a cut."""
    lr_milestones: Annotated[tuple[PositiveInt, ...], Field(strict=False)]
    """step: epochs after which the learning rate is cut."""
    max_epochs: PositiveInt
    """Epochs to train."""
    batch_size: PositiveInt
    """Images in one optimizer step, over all ranks."""
    micro_batch_size: PositiveInt | None
    """At most this many images in one forward pass of one rank, the rest by gradient accumulation; null: the rank's
    whole share at once. BatchNorm sees the micro-batch, so one rank that accumulates equals several that do not."""
    valid_batch_size_per_gpu: PositiveInt
    """Validation images in one forward pass of one rank."""
    seed: NonNegativeInt
    """The one seed: weights, order and augmentation follow from it."""
    deterministic: bool
    """Only deterministic kernels: bitwise equal runs, slower on a GPU."""

    # ---- speed
    device: Literal["auto", "cpu", "cuda"]
    """auto: CUDA where there is a GPU, else the CPU."""
    enable_amp: bool
    """AMP: forward and loss under autocast."""
    amp_dtype: Literal["auto", "fp16", "bf16"]
    """AMP: auto is the tutorial's fp16 with loss scaling on CUDA and bf16 on a CPU."""
    enable_nhwc: bool
    """NHWC: model and images in the channels_last memory format."""
    enable_extra_opts: bool
    """EXTRA: the tutorial's group switch for the three keys below, each of which follows it where null."""
    fused_optimizer: bool | None
    """EXTRA: one fused kernel for the whole SGD update."""
    zero_grad_set_to_none: bool | None
    """EXTRA: drop gradients instead of writing zeros into them."""
    cudnn_benchmark: bool | None
    """EXTRA: let cuDNN time its convolution algorithms and keep the fastest."""

    # ---- output
    log_to_screen: bool
    """Progress and log lines on the terminal."""
    log_to_tensorboard: bool
    """Write TensorBoard event files."""
    save_checkpoint: bool
    """Write the last and the best checkpoint."""
    log_freq: PositiveInt
    """Steps between two log points; the only points where the host waits for the device."""
    checkpoint_every_steps: PositiveInt | None
    """Write a checkpoint every so many optimizer steps too, beside every epoch's; null: no."""
    checkpoint_every_minutes: Annotated[float, Field(gt=0)] | None
    """Write a checkpoint every so many minutes too, beside every epoch's; null: no."""
    checkpoint_async: bool
    """Write checkpoints from a copy in host memory while training goes on, instead of waiting for the disk."""
    keep_checkpoints: PositiveInt
    """How many of the last checkpoints are kept, beside the best."""
    limit_train_batches: PositiveInt | None
    """Train on this many batches of each epoch only; null: all."""
    limit_valid_batches: PositiveInt | None
    """Validate on this many batches of each rank only; null: all."""
    enable_profiling: bool
    """PROF: NVTX ranges for `nsys profile --capture-range=nvtx --nvtx-capture=PROFILE`."""
    profiling_epoch_start: PositiveInt
    """PROF: the epoch (counted from 1) that is profiled."""
    profiling_iters_per_epoch: PositiveInt
    """PROF: with profiling enabled, train on this many batches of each epoch."""

    @model_validator(mode="after")
    def _check_combinations(self) -> "Config":
        if self.lr_warmup_epochs > self.max_epochs:
            raise ValueError(f"lr_warmup_epochs {self.lr_warmup_epochs:g} must not exceed max_epochs {self.max_epochs}")
        if self.lr_schedule == "onecycle" and not 0 < self.lr_warmup_epochs < self.max_epochs:
            raise ValueError("lr_schedule onecycle needs lr_warmup_epochs, its rise, between 0 and max_epochs")
        if self.nesterov and self.momentum == 0:
            raise ValueError("nesterov needs a momentum above 0")
        if self.batch_size % min(self.micro_batch_size or self.batch_size, self.batch_size):
            raise ValueError(
                f"batch_size {self.batch_size} must be a multiple of micro_batch_size {self.micro_batch_size}"
            )
        return self

    def extra_opt(self, key: Literal["fused_optimizer", "zero_grad_set_to_none", "cudnn_benchmark"]) -> bool:
        """The member's own value, or the group's where the member is null."""
        value = getattr(self, key)
        return self.enable_extra_opts if value is None else value


@dataclass(frozen=True)
class _Entry:
    """One key of one block: its value and where it stands."""

    value: Any
    line: int
    block: str


def load_config(path: Path, name: str, overrides: Iterable[str] = ()) -> Config:
    """Block `name` of the YAML file `path` with `KEY=VALUE` overrides on top; `ConfigError` for anything wrong."""
    blocks = _read_blocks(path)
    _check_block_name(path, name, blocks)
    entries = dict(blocks[name])
    where = {key: f"{path}:{entry.line}: block {entry.block!r}" for key, entry in entries.items()}
    values = {key: entry.value for key, entry in entries.items()}
    for override in overrides:
        key, value = _parse_override(override)
        values[key], where[key] = value, f"--set {override}"
    try:
        return Config(**values)
    except ValidationError as error:
        raise ConfigError(_explain(error, path, name, values, where)) from None


def list_blocks(path: Path) -> dict[str, dict[str, Any]]:
    """Every block of the file with the values in which it differs from `default`, in the file's order."""
    blocks = _read_blocks(path)
    base = {key: entry.value for key, entry in blocks.get("default", {}).items()}
    missing = object()
    return {
        name: {key: entry.value for key, entry in block.items() if base.get(key, missing) != entry.value}
        for name, block in blocks.items()
    }


def render_config(config: Config, default: Config | None = None) -> str:
    """The configuration as the YAML body of a block; keys that differ from `default` come first."""
    values = config.model_dump(mode="json")
    base = values if default is None else default.model_dump(mode="json")
    different = [key for key in values if values[key] != base[key]]
    lines = [f"{key}: {json.dumps(values[key])}  # default: {json.dumps(base[key])}" for key in different]
    if different:
        lines.append("# as in default:")
    lines += [f"{key}: {json.dumps(values[key])}" for key in values if key not in different]
    return "\n".join(lines) + "\n"


def schema() -> dict[str, Any]:
    """JSON schema of a configuration file: a mapping of block names to blocks, in which no key is required."""
    block = Config.model_json_schema()
    block.pop("required", None)
    block["properties"]["<<"] = {"description": "merge of one block or of a list of blocks"}
    block["title"] = "block"
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "configuration blocks of train.py",
        "type": "object",
        "additionalProperties": block,
    }


def _read_blocks(path: Path) -> dict[str, dict[str, _Entry]]:
    root = _compose(path)
    if not isinstance(root, MappingNode):
        raise ConfigError(f"{path}: holds no configuration blocks; expected a mapping of block names to keys")
    blocks: dict[str, dict[str, _Entry]] = {}
    lines: dict[str, int] = {}
    for key_node, block_node in root.value:
        name, line = _scalar_key(path, key_node), key_node.start_mark.line + 1
        if name in lines:
            raise ConfigError(f"{path}:{line}: block {name!r} stands twice, first on line {lines[name]}; rename one")
        lines[name] = line
        if not BLOCK_NAME.fullmatch(name):
            raise ConfigError(
                f"{path}:{line}: block name {name!r} cannot name a folder; "
                "allowed: letters, digits and . _ + -, not starting with a sign"
            )
        blocks[name] = _flatten(path, name, block_node, parents=())
    return blocks


def _compose(path: Path) -> Node | None:
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path}: cannot read the configuration file: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{path}: is no UTF-8 text; expected a YAML file of configuration blocks") from None
    try:
        return YAML(typ="safe", pure=True).compose(text)
    except YAMLError as error:
        raise ConfigError(f"{path}{_where_yaml_broke(error)}") from None
    except RecursionError:
        raise ConfigError(f"{path}: is nested too deeply; expected blocks of flat keys") from None


def _where_yaml_broke(error: YAMLError) -> str:
    mark = getattr(error, "problem_mark", None) or getattr(error, "context_mark", None)
    problem = getattr(error, "problem", None) or str(error).splitlines()[0]
    line = f":{mark.line + 1}" if mark else ""
    return f"{line}: is not valid YAML 1.2: {' '.join(str(problem).split())}"


def _scalar_key(path: Path, node: Node) -> str:
    if not isinstance(node, ScalarNode):
        raise ConfigError(f"{path}:{node.start_mark.line + 1}: a key must be a plain word, not a list or mapping")
    return node.value


def _flatten(path: Path, block: str, node: Node, parents: tuple[int, ...]) -> dict[str, _Entry]:
    """The keys of a block with its merges (`<<`) resolved; own keys win over merged, earlier merges over later."""
    line = node.start_mark.line + 1
    if not isinstance(node, MappingNode):
        raise ConfigError(f"{path}:{line}: block {block!r} must be a mapping of keys to values")
    if id(node) in parents:
        raise ConfigError(f"{path}:{line}: block {block!r} merges itself; remove the cyclic <<")
    merged: dict[str, _Entry] = {}
    own: dict[str, _Entry] = {}
    for key_node, value_node in node.value:
        key, key_line = _scalar_key(path, key_node), key_node.start_mark.line + 1
        if key == "<<":
            sources = value_node.value if isinstance(value_node, SequenceNode) else [value_node]
            for source in reversed(sources):
                merged |= _flatten(path, block, source, (*parents, id(node)))
        elif key in own:
            raise ConfigError(
                f"{path}:{key_line}: block {block!r}: key {key!r} stands twice, first on line {own[key].line}; keep one"
            )
        else:
            own[key] = _Entry(_construct(path, value_node), key_line, block)
    return merged | own


def _construct(path: Path, node: Node) -> Any:
    try:
        return YAML(typ="safe", pure=True).constructor.construct_object(node, deep=True)
    except (YAMLError, ValueError, TypeError, RecursionError) as error:
        problem = str(getattr(error, "problem", error)).splitlines()[0]
        raise ConfigError(f"{path}:{node.start_mark.line + 1}: cannot read the value: {problem}") from None


def _check_block_name(path: Path, name: str, blocks: Mapping[str, Any]) -> None:
    if name not in blocks:
        raise ConfigError(
            f"--config={name}: {path} has no such block.{_did_you_mean(name, blocks)}"
            f" It has: {', '.join(blocks) or 'none'}"
        )


def _parse_override(override: str) -> tuple[str, Any]:
    key, equals, text = override.partition("=")
    if not equals or not key.strip():
        raise ConfigError(f"--set {override}: expected KEY=VALUE, for example --set lr=0.2")
    try:
        return key.strip(), YAML(typ="safe", pure=True).load(text)
    except (YAMLError, ValueError, RecursionError) as error:
        raise ConfigError(f"--set {override}: the value{_where_yaml_broke(error)}") from None  # type: ignore[arg-type]


def _explain(error: ValidationError, path: Path, name: str, values: Mapping[str, Any], where: Mapping[str, str]) -> str:
    """Two lines at most: the first thing that is wrong, and how much else is."""
    problems = error.errors(include_url=False)
    absent = [problem for problem in problems if problem["type"] == "missing" and len(problem["loc"]) == 1]
    missing = [str(problem["loc"][0]) for problem in absent]
    others = [problem for problem in problems if problem not in absent]
    if others:
        message = _explain_one(others[0], path, name, values, where)
    else:
        message = (
            f"{path}: block {name!r} lacks {', '.join(missing[:4])}{' ...' if len(missing) > 4 else ''}; "
            "begin it with <<: *DEFAULT, or give a value"
        )
    more = len(others) - 1
    return message + (f"\nand {more} more wrong {'key' if more == 1 else 'keys'} after it" if more > 0 else "")


def _explain_one(problem: Any, path: Path, name: str, values: Mapping[str, Any], where: Mapping[str, str]) -> str:
    if not problem["loc"]:  # a combination of keys
        return f"{path}: block {name!r}: {problem['msg'].removeprefix('Value error, ')}"
    key = str(problem["loc"][0])
    place = where[key]
    if problem["type"] == "extra_forbidden":
        return f"{place}: unknown key {key!r}.{_did_you_mean(key, Config.model_fields)}"
    value = values[key]
    hint = "; write null for none" if value == "None" else ""
    return f"{place}: {key} is {_shown(value)}; allowed: {_allowed(key)}{hint}"


def _did_you_mean(word: str, names: Iterable[str]) -> str:
    near = difflib.get_close_matches(word, list(names), n=1, cutoff=0.5)
    return f" Did you mean {near[0]!r}?" if near else ""


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


@lru_cache(maxsize=1)
def _properties() -> dict[str, Any]:
    return Config.model_json_schema()["properties"]


def _allowed(key: str) -> str:
    """What a key may be, in words, from the JSON schema of its type."""
    return _in_words(_properties()[key])


def _in_words(part: Mapping[str, Any]) -> str:
    if "anyOf" in part:
        return " or ".join(_in_words(option) for option in part["anyOf"])
    if "enum" in part or "const" in part:
        return ", ".join(json.dumps(value).strip('"') for value in part.get("enum", [part.get("const")]))
    if part.get("type") == "array":
        item = _in_words(part["prefixItems"][0] if "prefixItems" in part else part["items"])
        count = f"{part['minItems']} values" if part.get("minItems") == part.get("maxItems") != None else "values"  # noqa: E711
        return f"a list of {count}, each {item}"
    names = {
        "integer": "a whole number",
        "number": "a number",
        "boolean": "true or false",
        "string": "a text that is not empty",
        "null": "null",
    }
    bounds = {"exclusiveMinimum": "above", "minimum": "at least", "exclusiveMaximum": "below", "maximum": "at most"}
    limits = [f"{word} {part[bound]:g}" for bound, word in bounds.items() if bound in part]
    return " ".join([names[part["type"]], " and ".join(limits)]).strip()


if __name__ == "__main__":
    print(json.dumps(schema(), indent=1))
