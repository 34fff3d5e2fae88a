"""The command line of train.py, answered without importing torch where no training is asked for."""

import argparse
import difflib
import os
import re
import sys
import textwrap
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import NoReturn

from utils.base_config import as_yaml, render
from utils.config import Config, list_blocks, load_config
from utils.config.config import declaring_group, section
from utils.config.messages import OTHER_NAMES, allowed, nearest_key, shortened, wrong_value
from utils.distributed.launch import SLURM_FIELDS, fill_in_job, find_launch
from utils.errors import ConfigError, ExpectedError
from utils.program import command

WIDTH = 100  # of explanations
DESCRIPTION = """\
Train a ResNet from a named configuration block.

  python train.py --config=bs256-amp-nhwc
  torchrun --nproc_per_node=8 train.py --config=bs2048-warmup-opt
  sbatch submit_multinode.slr"""

EXIT_STATUS = """\
exit status: 0 finished, 2 bad usage or configuration, 3 data missing or damaged, 4 no usable checkpoint,
75 stopped on request with everything saved (run the same command to go on), 1 anything else"""


@dataclass(frozen=True)
class Arguments:
    config: Config
    config_name: str
    run_dir: Path
    resume: str
    dry_run: bool


def parse_arguments(argv: Sequence[str] | None = None) -> Arguments:
    """The checked command line; leaves through SystemExit for --help, --list-configs, --print-config and errors."""
    try:
        parser = _parser()
        options, rest = parser.parse_known_args(argv)
        if rest:
            parser.refuse(rest, options.yaml_config)
        if options.list_configs:
            _leave_with(_describe_blocks(options.yaml_config))
        _fill_in_job(options)
        config = load_config(options.yaml_config, options.config, options.set)
        if options.explain is not None:
            _leave_with(explain_keys(options.explain, config, options.config))
        if options.print_config:
            has_default = "default" in list_blocks(options.yaml_config)
            default = load_config(options.yaml_config, "default") if has_default else None
            _leave_with(f"# {options.config} in {options.yaml_config}\n{render(config, default)}")
    except ConfigError as error:
        raise SystemExit(report_error(error)) from None
    run_dir = _folder(options.run_dir) if options.run_dir else Path("expts") / options.config
    return Arguments(config, options.config, run_dir, options.resume, options.dry_run)


def _fill_in_job(options: argparse.Namespace) -> None:
    """%a, %A and %j of Slurm, in --set only in values that have one of them: others may have any percent signs."""
    for name in ("config", "run_dir", "resume"):
        if text := getattr(options, name):
            setattr(options, name, fill_in_job(f"--{name.replace('_', '-')}", text, os.environ))
    options.set = [
        fill_in_job("--set", text, os.environ) if any(field in text for field in SLURM_FIELDS) else text
        for text in options.set
    ]


def report_error(error: ExpectedError) -> int:
    """Print the error, with several ranks on one of them only, and return its exit status."""

    def fail(world: object) -> None:
        raise error

    with suppress(ConfigError):  # of a launcher's variables that make no sense: then this process is on its own
        if find_launch(os.environ).world_size > 1:
            from utils.distributed.ranks import run_ranks

            return run_ranks(fail, "cpu", start_timeout=60, collective_timeout=60)
    print(f"error: {error}", file=sys.stderr)
    return error.exit_status


class _Parser(argparse.ArgumentParser):
    """argparse with one line for bad usage, which names the nearest option."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(message)

    def refuse(self, words: Sequence[str], yaml_config: Path) -> NoReturn:
        """`ConfigError` for arguments that are no options, with what to write instead."""
        if not "".join(words).strip():
            raise ConfigError("an argument is empty; is a variable of the command line not set?")
        message = f"unrecognized arguments: {shortened(' '.join(words))}"
        raise ConfigError(f"{message}; {self._instead(words, yaml_config) or '--help lists the options'}")

    def _instead(self, words: Sequence[str], yaml_config: Path) -> str:
        first, equals, value = words[0].strip().partition("=")
        name = first.lstrip("-")
        if name == first and not equals:
            with suppress(ConfigError):  # of a file that cannot be read: then none of its blocks was meant
                if name in list_blocks(yaml_config):
                    return f"write --config={name}"
            return ""
        if not equals and len(words) > 1 and not words[1].startswith("--"):
            value = words[1]
        options = difflib.get_close_matches(first, self._option_string_actions, n=1)
        known = name.replace("-", "_") in {*Config.model_fields, *OTHER_NAMES}
        key = nearest_key(name) if known or not options else None
        if key:
            example = "true" if Config.model_fields[key].default is False else "VALUE"
            return f"write --set {key}={shortened(value) or example}"
        return f"did you mean {options[0]}?" if options else ""


def _parser() -> _Parser:
    parser = _Parser(
        prog=" ".join(command("train")),
        description=DESCRIPTION,
        epilog=EXIT_STATUS,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--config", default="default", metavar="NAME", help="configuration block (default: default)")
    parser.add_argument(
        "--yaml_config", type=Path, default=Path("config/cifar100.yaml"), metavar="PATH",
        help="file of configuration blocks (default: config/cifar100.yaml)",
    )  # fmt: skip
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="override one key; repeatable")
    parser.add_argument(
        "--run-dir", type=not_empty, metavar="DIR",
        help="where the run writes (default: expts/NAME); in a job of Slurm, %%a here, in NAME and in --set is its "
        "index in an array, %%A the number of the array, %%j that of the job",
    )  # fmt: skip
    parser.add_argument(
        "--resume", type=not_empty, default="auto", metavar="auto|never|PATH",
        help="auto: go on from the newest good checkpoint of the run folder, if any; a run with other values of keys "
        "that change the training is refused; never: start a new run, moving an earlier run aside; PATH: go on from "
        "this checkpoint file or run folder, also with other values (default: auto)",
    )  # fmt: skip
    parser.add_argument("--list-configs", action="store_true", help="list the blocks and what each changes, and leave")
    parser.add_argument("--print-config", action="store_true", help="print every key, differences first, and leave")
    parser.add_argument(
        "--explain", nargs="*", metavar="KEY",
        help="print what keys mean, their values and where they act, and leave; without a KEY list all",
    )  # fmt: skip
    parser.add_argument(
        "--dry-run", action="store_true",
        help="open the data, build the model, print what would happen and what memory it would take, and leave; "
        "fetches and writes nothing",
    )  # fmt: skip
    # torch.distributed.launch still passes it; the environment variable LOCAL_RANK says the same
    parser.add_argument("--local_rank", "--local-rank", type=int, help=argparse.SUPPRESS)
    return parser


def not_empty(text: str) -> str:
    """An argument that is given and not empty, for argparse."""
    if not text:  # as a path it would be the working directory, which an unset shell variable did not mean
        raise argparse.ArgumentTypeError("is empty; is a variable of the command line not set?")
    return text


def _folder(text: str) -> Path:
    path = Path(text)
    return path if path.name not in ("", "..") else path.resolve()  # a folder without a name cannot be moved aside


def _describe_blocks(path: Path) -> str:
    """A line for each block, with what it changes as --set would take it."""
    blocks = list_blocks(path)
    width, lines = max(map(len, blocks), default=0), []
    for name, differences in blocks.items():
        changes = ", ".join(f"{key}={as_yaml(value)}" for key, value in differences.items())
        lines.append(f"{name:{width}}  {changes or 'every key as in default'}\n")
    return "".join(lines)


def explain_keys(names: Sequence[str], config: Config, block: str) -> str:
    """A paragraph for each key, with its value in `config`, the block `block`; without names, all keys by group."""
    if names:
        return "\n".join(_explain(name, config, block) for name in names)
    groups = groupby(Config.model_fields, key=section)
    lines = [
        textwrap.fill(", ".join(keys), WIDTH, initial_indent=f"{title}: ", subsequent_indent="  ")
        for title, keys in groups
    ]
    return "\n".join([*lines, "Of one or several: --explain KEY ..."]) + "\n"


def _explain(key: str, config: Config, block: str) -> str:
    if key not in Config.model_fields:
        raise ConfigError(wrong_value(key, "", "--explain"))
    meaning = " ".join((Config.model_fields[key].description or "").split())
    default, value = (as_yaml(keys.model_dump(mode="json")[key]) for keys in (Config(), config))
    here = "" if value == default else f"; in {block}: {value}"
    lines = [
        f"{key} ({section(key)})",
        textwrap.fill(meaning, WIDTH, initial_indent="  ", subsequent_indent="  "),
        f"  allowed: {allowed(key)}",
        f"  default: {default}{here}",
        f"  acts in: {_where(key, meaning)}",
    ]
    return "\n".join(lines) + "\n"


def _where(key: str, meaning: str) -> str:
    """The tag that the docstring begins with, else the package that declares the key."""
    tag = re.match(r"[A-Z]+(?=:)", meaning)
    if tag:
        return f'lines with the tag {tag[0]}: grep -rnI "\\b{tag[0]}:" train.py utils'
    package = declaring_group(key).__module__.rpartition(".")[0].replace(".", "/")
    places = "train.py utils models" if package == "utils" else f"train.py {package}"
    return f"{package}/: grep -rnwI {key} {places}"


def _leave_with(text: str) -> NoReturn:
    try:
        print(text, end="", flush=True)
    except BrokenPipeError:  # the reader, `| head` for instance, has seen enough; nor may the flush at exit complain
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    raise SystemExit(0)
