"""Any content of a checkpoint, a configuration file or the command line is either read or an expected error."""

import math
from hashlib import sha256

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.conftest import CIFAR100
from train import Trainer
from utils.config import Config, load_config
from utils.errors import CheckpointError, ConfigError
from utils.run.checkpoint.io import encode, list_checkpoints, read_checkpoint

QUICK = settings(
    max_examples=150, derandomize=True, deadline=None, database=None, suppress_health_check=list(HealthCheck)
)
LONG = settings(QUICK, max_examples=3000)
BOTH = [
    pytest.param(QUICK, id="150"),
    pytest.param(LONG, id="3000", marks=[pytest.mark.slow, pytest.mark.timeout(900)]),
]

LINES = [line for line in CIFAR100.read_text(encoding="utf-8").splitlines() if line.strip()]
# Syntax of YAML, and extreme numbers, keys and paths.
WORDS = [
    "default:", "&DEFAULT", "*DEFAULT", "<<:", "<<: *DEFAULT", "- ", "[", "]", "{", "}", ": ", ", ", "# ", "|", ">",
    "\t", "\n", "\n  ", "---", "...", "!!python/object/apply:os.system", "!!binary", "!!set", "!x", "null", "~", "true",
    "1e999", ".nan", "-.inf", "0x_", "0o8", "0b2", "1_0", "+", "9" * 5000, "2026-02-30", "12:30:45", "'", '"', "\\x",
    "%YAML 1.1", "\ufeff", "\x85", "../..", "lr", "batch_size", "=", "[" * 400, '"\\U00110000"', '"\\ud800"', '"\\0"',
    "!!int ", "!!float ", "!!null ", "!!bool ", "!!str ", "''", "_", "%YAML 1." + "9" * 5000, "extends: ", "a" * 300,
    "&" + "a" * 300 + " ", "*" + "a" * 300, "cifar100.yaml#bs128",
]  # fmt: skip
FRAGMENTS = st.sampled_from(WORDS) | st.sampled_from(LINES) | st.text(max_size=8)
# Python represents bytes of an argument that are not UTF-8 as lone surrogates.
ANY_TEXT = st.text(st.characters(codec=None), max_size=20)
YAML_TEXT = st.lists(FRAGMENTS, max_size=12).map("".join) | st.lists(FRAGMENTS, max_size=12).map("\n".join)
VALUES = st.lists(st.sampled_from(WORDS) | ANY_TEXT, max_size=4).map("".join)
OVERRIDES = ANY_TEXT | VALUES | st.builds("{}={}".format, st.sampled_from(sorted(Config.model_fields)), VALUES)
MUTATIONS = st.lists(st.tuples(st.floats(0, 1, exclude_max=True), st.binary(max_size=8), st.integers(0, 8)), max_size=4)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("fuzz")


@pytest.fixture
def written(tiny, one_rank, tmp_path):
    """A checkpoint's bytes without its digest, and its state."""
    Trainer(tiny(max_epochs=1, limit_train_batches=1), one_rank, tmp_path, "tiny", "auto").train()
    path = list_checkpoints(tmp_path / "checkpoints")[0]
    return path.read_bytes()[:-71], read_checkpoint(path)


def read_or_refuse(path, content):
    path.write_bytes(content)
    try:
        assert isinstance(read_checkpoint(path), dict)
    except CheckpointError as error:
        assert str(path) in str(error)


@pytest.mark.parametrize("examples", BOTH)
def test_any_bytes_as_a_checkpoint(folder, examples):
    @examples
    @given(content=st.binary(max_size=500), signed=st.booleans())
    def check(content, signed):
        digest = b"sha256:" + sha256(content).hexdigest().encode() if signed else b""
        read_or_refuse(folder / "step-000000001.pt", content + digest)

    check()


@pytest.mark.parametrize("examples", BOTH)
def test_a_real_checkpoint_that_was_changed_and_signed_again(folder, written, examples):
    """The digest is right, so that torch.load reads the file. Half of the changes are in the archive's directory."""
    original, _ = written

    @examples
    @given(mutations=MUTATIONS, at_the_end=st.booleans())
    def check(mutations, at_the_end):
        content = bytearray(original)
        for where, new, replaced in mutations:
            place = int(where * len(content)) if not at_the_end else max(0, len(content) - 1 - int(where * 4000))
            content[place : place + replaced] = new
        read_or_refuse(folder / "step-000000001.pt", bytes(content) + b"sha256:" + sha256(content).hexdigest().encode())

    check()


@pytest.mark.parametrize("examples", BOTH)
def test_checkpoints_with_keys_and_values_of_any_kind(folder, written, examples):
    state = written[1]
    plain = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5)
    values = st.recursive(
        plain, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(plain, inner, max_size=3), max_leaves=6
    )
    changes = st.dictionaries(st.sampled_from(sorted(state)) | plain, values, max_size=3)

    @examples
    @given(changes=changes, whole=values, alone=st.booleans())
    def check(changes, whole, alone):
        read_or_refuse(folder / "step-000000001.pt", encode(whole if alone else state | changes))

    check()


# Types, layouts, shapes and values that a learner does not write, and some that it does.
FORGERIES = [
    Tensor.to_sparse, Tensor.long, Tensor.bool, Tensor.half, Tensor.double, Tensor.cfloat, Tensor.neg, Tensor.flatten,
    lambda old: old.to("meta"), lambda old: old.new_zeros(()).expand(old.shape), lambda old: old[:0],
    lambda old: old.new_zeros(old.numel() + 1).as_strided(old.shape, [1] * old.ndim), lambda old: old * math.nan,
    lambda old: old / 0, lambda old: torch.nn.Parameter(old.float()), lambda old: torch.zeros(1).expand(10**9),
    lambda old: torch.nested.nested_tensor([old]), lambda old: -1, lambda old: "\x1b",
]  # fmt: skip


@pytest.mark.filterwarnings("ignore:.*(sparse|nested):UserWarning")
@pytest.mark.parametrize("examples", BOTH)
def test_a_run_resumes_from_tensors_of_any_kind_or_refuses_them(tiny, one_rank, tmp_path, written, examples):
    path = list_checkpoints(tmp_path / "checkpoints")[0]
    state = written[1]
    tables = [state["model"], *state["optimizer"]["state"].values(), state["ranks"][0]]
    trainer = Trainer(tiny(limit_train_batches=1), one_rank, tmp_path, "tiny", str(path))

    @examples
    @given(table=st.sampled_from(tables), which=st.integers(0, 9), forge=st.sampled_from(FORGERIES))
    def check(table, which, forge):
        names = [name for name, value in table.items() if isinstance(value, Tensor) and value.ndim]
        before = table[name := names[which % len(names)]]
        table[name] = forge(before)
        path.write_bytes(encode(state))
        table[name] = before
        try:
            trainer._open_folder()
        except CheckpointError as error:
            assert str(error).count("\n") <= 1 and str(error).replace("\n", "").isprintable()
        else:
            trainer.learner.train_step(torch.zeros(32, 3, 32, 32), torch.zeros(32, dtype=torch.long))

    check()


def load_or_refuse(path, name, overrides=()):
    try:
        assert isinstance(load_config(path, name, overrides), Config)
    except ConfigError as error:
        lines = str(error).splitlines()
        assert len(lines) <= 2 and all(len(line) < 800 for line in lines), str(error)


@pytest.mark.filterwarnings("ignore::ruamel.yaml.error.ReusedAnchorWarning")
@pytest.mark.parametrize("examples", BOTH)
def test_any_text_as_a_configuration_file(folder, examples):
    path = folder / "config.yaml"

    @examples
    @given(content=YAML_TEXT.map(str.encode) | st.binary(max_size=50), headed=st.booleans())
    def check(content, headed):
        path.write_bytes(b"default:\n  " * headed + content)
        load_or_refuse(path, "default")

    check()


@pytest.mark.parametrize("examples", BOTH)
def test_any_text_as_an_override(folder, examples):
    path = folder / "small.yaml"
    path.write_text("default: {lr: 0.1}\n", encoding="utf-8")

    @examples
    @given(overrides=st.lists(OVERRIDES, min_size=1, max_size=2))
    def check(overrides):
        load_or_refuse(path, "default", overrides)

    check()
