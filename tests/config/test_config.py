"""The blocks of config/*.yaml, reading of YAML 1.2, and the messages for wrong files."""

import json
from pathlib import Path

import pytest

from tests.conftest import BLOCKS, CIFAR100, ROOT
from tests.generated import PUBLISHED, blocks, schema, with_default_block
from utils.base_config import as_yaml, render
from utils.config import Config, list_blocks, load_config, override
from utils.errors import ConfigError


@pytest.mark.parametrize(("path", "name"), BLOCKS)
def test_every_block_loads_and_survives_being_printed(path, name, tmp_path):
    config, default = load_config(path, name), load_config(path, "default")
    for printed in (render(config), render(config, default)):
        copy = tmp_path / "copy.yaml"
        copy.write_text(f"{name}:\n" + "".join(f"  {line}\n" for line in printed.splitlines()), encoding="utf-8")
        assert load_config(copy, name) == config


def test_default_of_cifar100_equals_the_fields():
    text = CIFAR100.read_text(encoding="utf-8")
    assert text == with_default_block(text), "run: python -m tests.generated"
    assert load_config(CIFAR100, "default") == Config()


def test_schema_is_current():
    def without_enum(part):
        """Older pydantic writes {"const": x, "enum": [x]}."""
        return {key: value for key, value in part.items() if key != "enum" or "const" not in part}

    kept = json.loads((ROOT / "config/schema.json").read_text(encoding="utf-8"), object_hook=without_enum)
    assert kept == json.loads(json.dumps(schema()), object_hook=without_enum), "run: python -m tests.generated"


# The values of the SC20 tutorial's config/cifar100.yaml.
TUTORIAL_DEFAULT = {
    "lr": 0.1, "momentum": 0.9, "weight_decay": 0.0005, "lr_warmup_epochs": 0,
    "cifar100_mean": (0.5070751592371323, 0.48654887331495095, 0.4409178433670343),
    "cifar100_std": (0.2673342858792401, 0.2564384629170883, 0.27615047132568404),
    "data_path": "./data", "rnd_rotation_angle": 15, "num_data_workers": 6, "num_classes": 100,
    "max_epochs": 100, "batch_size": 128, "valid_batch_size_per_gpu": 128,
    "log_to_screen": True, "log_to_tensorboard": True, "save_checkpoint": True, "log_freq": 20,
    "enable_amp": False, "enable_nhwc": False, "enable_extra_opts": False,
    "enable_profiling": False, "profiling_epoch_start": 2, "profiling_iters_per_epoch": 100}  # fmt: skip
# block: (lr, batch size, epochs, warm-up epochs, AMP, NHWC, EXTRA, profiled and without checkpoints)
TUTORIAL_BLOCKS = {
    "default": (0.1, 128, 100, 0, False, False, False, False),
    "bs128": (0.1, 128, 100, 0, False, False, False, False),
    "bs256": (0.14, 256, 100, 0, False, False, False, False),
    "bs256-prof": (0.14, 256, 2, 0, False, False, False, True),
    "bs256-amp": (0.14, 256, 100, 0, True, False, False, False),
    "bs256-amp-prof": (0.14, 256, 2, 0, True, False, False, True),
    "bs256-amp-nhwc": (0.14, 256, 100, 0, True, True, False, False),
    "bs256-amp-nhwc-prof": (0.14, 256, 2, 0, True, True, False, True),
    "bs256-amp-nhwc-extra-opts": (0.14, 256, 100, 0, True, True, True, False),
    "bs256-amp-nhwc-extra-opts-prof": (0.14, 256, 2, 0, True, True, True, True),
    "bs128-opt": (0.1, 128, 100, 0, True, True, True, False),
    "bs512-opt": (0.2, 512, 120, 0, True, True, True, False),
    "bs1024-opt": (0.28, 1024, 120, 0, True, True, True, False),
    "bs2048-opt": (0.4, 2048, 120, 0, True, True, True, False),
    "bs1024-warmup-opt": (0.28, 1024, 120, 8, True, True, True, False),
    "bs2048-warmup-opt": (0.4, 2048, 120, 16, True, True, True, False),
}


@pytest.mark.parametrize("name", TUTORIAL_BLOCKS)
def test_named_blocks_equal_the_tutorials(name):
    *values, profiled = TUTORIAL_BLOCKS[name]
    keys = ("lr", "batch_size", "max_epochs", "lr_warmup_epochs", "enable_amp", "enable_nhwc", "enable_extra_opts")
    own = dict(zip(keys, values, strict=True)) | {"enable_profiling": profiled, "save_checkpoint": not profiled}
    assert load_config(CIFAR100, name).model_dump(include=set(TUTORIAL_DEFAULT)) == TUTORIAL_DEFAULT | own


def test_the_blocks_of_published_results_are_unchanged():
    """A change of a block is seen here: results/ and docs/ name blocks by which others repeat a measurement."""
    assert blocks().splitlines() == PUBLISHED.read_text(encoding="utf-8").splitlines(), "run: python -m tests.generated"


@pytest.mark.parametrize(("key", "text", "value"), [
    ("weight_decay", "5e-4", 0.0005),  # a string to YAML 1.1 parsers
    ("lr", "1", 1.0), ("batch_size", "0x100", 256),
    ("enable_amp", "True", True), ("enable_amp", "auto", "auto"), ("pretrained", "null", None),
    ("data_path", "on", "on"),  # True to YAML 1.1 parsers
    ("data_path", "12:30", "12:30"),  # 750 to YAML 1.1 parsers
    ("data_path", "'/data/set #2'", "/data/set #2"),
])  # fmt: skip
def test_values_are_yaml_1_2_in_a_file_and_on_the_command_line(key, text, value, tmp_path):
    path = tmp_path / "c.yaml"
    path.write_text(f"x:\n  {key}: {text}\n", encoding="utf-8")
    from_file = getattr(load_config(path, "x"), key)
    from_override = getattr(override(Config(), [f"{key}={text}"]), key)
    assert from_file == from_override == value
    assert type(from_file) is type(from_override) is type(value)


@pytest.mark.parametrize("text", ["é", "😀", 'a "b" \\c', "/data/set #2", "a\x7f\x85\u2028b", "2024", "1e5", "null",
    "*a: [b"])  # fmt: skip
def test_any_text_survives_being_printed_and_is_taken_literally_on_the_command_line(text, tmp_path):
    path = tmp_path / "c.yaml"
    path.write_text(f"x:\n  data_path: {as_yaml(text)}\n", encoding="utf-8")
    for config in (load_config(path, "x"), override(Config(), [f"data_path={text}"])):
        assert config.data_path == text


def test_what_wins_where_blocks_merge(tmp_path):
    """Own keys, then earlier merges; a block that merges nothing takes the defaults, not the block `default`."""
    path = tmp_path / "c.yaml"
    text = "a: &A {lr: 2, seed: 2, log_freq: 2}\nb: &B {lr: 3, seed: 3}\nx:\n  <<: [*B, *A]\n  lr: 4\n"
    path.write_text(text, encoding="utf-8")
    for overrides, seed in (([], 3), (["seed=5", "seed=6"], 6)):
        assert load_config(path, "x", overrides) == Config(lr=4, seed=seed, log_freq=2)
    path.write_text("default:\n  seed: 3\nx:\n  lr: 1\n", encoding="utf-8")
    assert load_config(path, "x") == Config(lr=1) and list_blocks(path)["x"] == {"seed": 0, "lr": 1}


RATE = "allowed: a number above 0 and at most 1000"
COUNT = "allowed: a whole number from 1 to 2147483647"
MEAN = "allowed: a list of 3 values, each a number at least 0 and at most 1"


@pytest.mark.parametrize(("text", "message"), [  # FILE: the path of the file
    ("x: {lr: fast}", 'FILE:1: lr is "fast"; ' + RATE), ('x:\n  lr: "0.1"', f'FILE:2: lr is "0.1"; {RATE}'),
    ("x: {lr: !!python/object/apply:os.getpid []}", "FILE:1: lr is []; " + RATE),
    ("x: {enable_nhwc: yes}", 'FILE:1: enable_nhwc is "yes"; allowed: true or false'),
    ("x: {micro_batch_size: None}", f'FILE:1: micro_batch_size is "None"; {COUNT} or null'),
    ("x: {cifar100_mean: [129.3, 124.1, 112.4]}", "FILE:1: cifar100_mean is [129.3, 124.1, 112.4]; " + MEAN),
    ("x: {clip_grad_norm: .inf}", "FILE:1: clip_grad_norm is Infinity; allowed: a number above 0 or null"),
    ("x: {bacth_size: 64}", "FILE:1: unknown key 'bacth_size'. Did you mean 'batch_size'?"),
    ("x:\n  lr: 1\n  lr: 2\n", 'FILE:3: is not valid YAML 1.2: found duplicate key "lr"'),
    ("x:\n  cifar100_mean: []\n  lr: -1\n", f"FILE:2: cifar100_mean is []; {MEAN}\n"),
    ("x:\n  nesterov: true\n  momentum: 0\n", "FILE:3: nesterov is true, but momentum is 0; it needs momentum above 0"),
    ("y: &Y\n  lr: -1\nx:\n  <<: *Y\n", "FILE:2: lr is -1; " + RATE),
    ("y: {}\n", "--config=x: FILE has no such block. It has: y"),
    ("x:\n  <<: *NOPE\n", "FILE:2: is not valid YAML 1.2: found undefined alias 'NOPE'"),
    ('"../x": {}\n', 'FILE:1: block name "../x" cannot name'),
    ("x: {extends: bs128}", 'FILE:1: extends "bs128": expected '),
    ("x: {extends: cifar100.yaml#bs129}", f'FILE:1: extends "cifar100.yaml#bs129": {CIFAR100} has no such block. '),
    ("x: {extends: c.yaml#y}\ny: {extends: c.yaml#x}", "FILE:2: extends \"c.yaml#x\": block 'x' extends itself"),
    ("x: {extends: c.yaml#y}\ny: {lr: fast}", 'FILE:2: lr is "fast"; '),
    ("\udcff", "FILE: expected a YAML file of configuration blocks: is not UTF-8 text\n"),
    (None, "FILE: expected a YAML file of configuration blocks: No such file or directory\n")])  # fmt: skip
def test_a_broken_or_missing_block_is_named_with_its_place(text, message, tmp_path, refused):
    path = tmp_path / "c.yaml"
    if text is not None:
        path.write_text(text, encoding="utf-8", errors="surrogateescape")
    assert refused(f"--yaml_config={path}", "--config=x").startswith("error: " + message.replace("FILE", str(path)))


def test_a_block_extends_one_of_another_file(tmp_path, monkeypatch):
    """The other file is searched next to the user's file, then next to the code; own keys and merged ones win."""
    monkeypatch.chdir(tmp_path)
    own = tmp_path / "deep/own.yaml"
    own.parent.mkdir()
    text = "mine:\n  extends: cifar100.yaml#bs512-opt\n  lr: 0.3\nbase: &BASE\n  lr: 0.4\n  momentum: 0.8\n"
    text += "both:\n  <<: *BASE\n  extends: config/cifar100.yaml#bs512-opt\n  momentum: 0.7\n"
    own.write_text(text + "again:\n  extends: own.yaml#mine\n  seed: 3\n", encoding="utf-8")
    start = load_config(Path("cifar100.yaml"), "bs512-opt")
    changed = {"mine": {"lr": 0.3}, "both": {"lr": 0.4, "momentum": 0.7}, "again": {"lr": 0.3, "seed": 3}}
    for name, changes in changed.items():
        assert load_config(own, name) == start.model_copy(update=changes)
    differences = {key: value for key, value in start.model_dump().items() if getattr(Config(), key) != value}
    assert list_blocks(own)["mine"] == differences | {"lr": 0.3}
    (tmp_path / "here.yaml").write_text("base:\n  lr: 0.7\n", encoding="utf-8")  # in the working directory only
    own.write_text("mine:\n  extends: here.yaml#base\n", encoding="utf-8")
    with pytest.raises(ConfigError, match=r"here\.yaml#base.: no such file"):
        load_config(own, "mine")
    own.write_text("again:\n  extends: cifar100.yaml#bs512-opt\n  seed: 3\n", encoding="utf-8")
    (own.parent / "cifar100.yaml").write_text("bs512-opt:\n  lr: 0.9\n", encoding="utf-8")
    assert load_config(own, "again") == Config(lr=0.9, seed=3)
