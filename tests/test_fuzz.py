"""Any content of a configuration file or the command line is either read or an expected error."""

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.conftest import CIFAR100
from utils.config import Config, load_config
from utils.errors import ConfigError

QUICK = settings(
    max_examples=150, derandomize=True, deadline=None, database=None, suppress_health_check=list(HealthCheck)
)

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


def load_or_refuse(path, name, overrides=()):
    try:
        assert isinstance(load_config(path, name, overrides), Config)
    except ConfigError as error:
        lines = str(error).splitlines()
        assert len(lines) <= 2 and all(len(line) < 800 for line in lines), str(error)


@pytest.mark.filterwarnings("ignore::ruamel.yaml.error.ReusedAnchorWarning")
@QUICK
@given(content=YAML_TEXT.map(str.encode) | st.binary(max_size=50), headed=st.booleans())
def test_any_text_as_a_configuration_file(tmp_path_factory, content, headed):
    path = tmp_path_factory.getbasetemp() / "config.yaml"
    path.write_bytes(b"default:\n  " * headed + content)
    load_or_refuse(path, "default")


@QUICK
@given(overrides=st.lists(OVERRIDES, min_size=1, max_size=2))
def test_any_text_as_an_override(tmp_path_factory, overrides):
    path = tmp_path_factory.getbasetemp() / "small.yaml"
    path.write_text("default: {lr: 0.1}\n", encoding="utf-8")
    load_or_refuse(path, "default", overrides)
