"""The command line of train.py. Imports no torch, so that --help and the like answer at once."""

import argparse
import os
import re
import textwrap
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import NoReturn

from utils.base_config import as_yaml, render
from utils.config import Config, list_blocks, load_config
from utils.config.config import section
from utils.config.messages import allowed, wrong_value
from utils.distributed.launch import fill_in_job, find_launch
from utils.errors import ConfigError, ExpectedError, complete_output, print_error
from utils.program import VERSION, command

WIDTH = 100  # of explanations
DESCRIPTION = """\
Train a ResNet from a named configuration block.

  python train.py --config=bs256-amp-nhwc
  torchrun --nproc_per_node=8 train.py --config=bs2048-warmup-opt
  sbatch submit_multinode.slr"""

EXIT_STATUS = """\
exit status: 0 finished, 2 bad usage or configuration, 3 data missing or damaged, 4 no usable checkpoint,
5 wrong results (verify_every_steps), 75 stopped on request with everything saved (run the same command to resume),
1 any other error"""


@dataclass(frozen=True)
class Arguments:
    config: Config
    config_name: str
    run_dir: Path
    resume: str
    dry_run: bool


def parse_arguments(argv: Sequence[str] | None = None) -> Arguments:
    """Return the checked arguments. Raises SystemExit after --help, --list-configs and the like, and for errors."""
    try:
        with complete_output():
            return _parse(argv)
    except ExpectedError as error:
        raise SystemExit(report_error(error)) from None


def _parse(argv: Sequence[str] | None) -> Arguments:
    options = _parser().parse_args(argv)
    if options.list_configs:
        _print_and_exit(_describe_blocks(options.yaml_config))
    for name in ("config", "run_dir", "resume"):
        if text := getattr(options, name):
            setattr(options, name, fill_in_job(f"--{name.replace('_', '-')}", text, os.environ))
    options.set = [fill_in_job("--set", text, os.environ) for text in options.set]
    config = load_config(options.yaml_config, options.config, options.set)
    if options.explain is not None:
        _print_and_exit(_explain_keys(options.explain, config, options.config))
    if options.print_config:
        has_default = "default" in list_blocks(options.yaml_config)
        default = load_config(options.yaml_config, "default") if has_default else None
        _print_and_exit(f"# {options.config} in {options.yaml_config}\n{render(config, default)}")
    run_dir = Path(options.run_dir or Path("expts") / options.config)
    if run_dir.name in ("", ".."):  # only a folder with a name can be moved aside
        run_dir = run_dir.resolve()
    return Arguments(config, options.config, run_dir, options.resume, options.dry_run)


def report_error(error: ExpectedError) -> int:
    """Print the error, on one rank only, and return its exit status."""

    def fail(world: object) -> None:
        raise error

    with suppress(ConfigError):  # invalid variables of a launcher: treat this process as the only one
        if find_launch(os.environ).world_size > 1:
            from utils.distributed.ranks import run_ranks

            return run_ranks(fail, "cpu", timeout=60)
    print_error(f"error: {error}")
    return error.exit_status


class _Parser(argparse.ArgumentParser):
    """A parser that raises `ConfigError` for bad usage."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message}; --help lists the options")


def add_config_arguments(parser: argparse.ArgumentParser, *, config: str) -> None:
    """Add the options that choose a configuration. `config`: the default block."""
    parser.add_argument("--config", default=config, metavar="NAME", help=f"configuration block (default: {config})")
    parser.add_argument(
        "--yaml_config", type=lambda text: Path(not_empty(text)), default=Path("config/cifar100.yaml"), metavar="PATH",
        help="file of configuration blocks (default: config/cifar100.yaml)",
    )  # fmt: skip
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="override one key; repeatable")


def _parser() -> _Parser:
    parser = _Parser(
        prog=command("train"), description=DESCRIPTION, epilog=EXIT_STATUS,
        formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False,
    )  # fmt: skip
    add_config_arguments(parser, config="default")
    parser.add_argument(
        "--run-dir", type=not_empty, metavar="DIR",
        help="the run's folder (default: expts/NAME); in a Slurm job, %%a here, in NAME and in --set becomes the array "
        "index, %%A the array's job ID, %%j the job ID",
    )  # fmt: skip
    parser.add_argument(
        "--resume", type=not_empty, default="auto", metavar="auto|never|PATH",
        help="auto: resume from the newest good checkpoint of the run folder, if any; an error if the training "
        "settings differ; never: start a new run and move an earlier one to NAME.1; PATH: resume from this checkpoint "
        "file or run folder, also with other settings (default: auto)",
    )  # fmt: skip
    parser.add_argument("--version", action="version", version=f"resnet50-at-scale {VERSION}")
    parser.add_argument("--list-configs", action="store_true", help="list the blocks and what each changes, and exit")
    parser.add_argument("--print-config", action="store_true", help="print every key, differences first, and exit")
    parser.add_argument(
        "--explain", nargs="*", metavar="KEY",
        help="print what keys mean, their values and where they act, and exit; without KEY, list all keys",
    )  # fmt: skip
    parser.add_argument(
        "--dry-run", action="store_true",
        help="open the data, build the model, print steps, learning rates and a memory estimate, and exit; "
        "downloads and writes nothing",
    )  # fmt: skip
    # torch.distributed.launch still passes it; the environment variable LOCAL_RANK holds the same
    parser.add_argument("--local_rank", "--local-rank", type=int, help=argparse.SUPPRESS)
    return parser


def not_empty(text: str) -> str:
    """Return a path, as a `type` for argparse. ~ is the home folder, also after =, where a shell does not expand it."""
    if not text:  # from an unset shell variable; as a path it would mean the working directory
        raise argparse.ArgumentTypeError("is empty; is a variable of the command line not set?")
    return os.path.expanduser(text)


def _describe_blocks(path: Path) -> str:
    """Return one line for each block: its differences from default, written as for --set."""
    text, blocks = "", list_blocks(path)
    for name, differences in blocks.items():
        changes = ", ".join(f"{key}={as_yaml(value)}" for key, value in differences.items())
        text += f"{name:{max(map(len, blocks))}}  {changes or 'every key as in default'}\n"
    return text


def _explain_keys(names: Sequence[str], config: Config, block: str) -> str:
    """Return a paragraph for each key, with its value in `config`, the block `block`; without names, all keys."""
    if names:
        return "\n".join(_explain(name, config, block) for name in names)
    groups = [f"{title}: {', '.join(keys)}" for title, keys in groupby(Config.model_fields, key=section)]
    lines = [textwrap.fill(group, WIDTH, subsequent_indent="  ") for group in groups]
    return "\n".join([*lines, "For details: --explain KEY ..."]) + "\n"


def _explain(key: str, config: Config, block: str) -> str:
    if key not in Config.model_fields:
        raise ConfigError(wrong_value(key, "", "--explain"))
    meaning = " ".join((Config.model_fields[key].description or "").split())
    default, value = (as_yaml(keys.model_dump(mode="json")[key]) for keys in (Config(), config))
    in_block = "" if value == default else f"; in {block}: {value}"
    tag = re.match(r"[A-Z]+:", meaning)  # the tag of a speed-up, on the lines where it acts
    lines = [
        f"{key} ({section(key)})",
        textwrap.fill(meaning, WIDTH, initial_indent="  ", subsequent_indent="  "),
        f"  allowed: {allowed(key)}",
        f"  default: {default}{in_block}",
        f"  acts in: grep -rnwI '{tag[0] if tag else key}' train.py utils models",
    ]
    return "\n".join(lines) + "\n"


def _print_and_exit(text: str) -> NoReturn:
    print(text, end="")
    raise SystemExit(0)
