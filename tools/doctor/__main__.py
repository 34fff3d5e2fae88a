"""Check before a job whether this machine, or every node of this allocation, is fit for it.

    python -m tools.doctor                                          # this machine
    torchrun --nproc_per_node=8 -m tools.doctor                     # its ranks too: all-reduce, clocks, the slow one
    srun --ntasks-per-node=8 python -m tools.doctor --sweep         # over nodes; collectives of all sizes, all pairs
    python -m tools.doctor --burn-in 60                             # train, and see whether it stays right and fast
    python -m tools.doctor --nodes                                  # in a Slurm allocation: one process on every node
    python -m tools.doctor --compare a.json b.json --html page.html # what --json printed on nodes: the slow one

Each line is ok, warn or fail, with the remedy. Exit status: 0 nothing failed, 1 something failed, 2 bad usage,
130 interrupted.
"""

import argparse
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING

from tools.doctor.compare import (
    Document,
    check_comparable,
    compare_documents,
    compare_with_baseline,
    read_document,
)
from tools.doctor.finding import Finding, render, render_json, worst_level
from tools.shared.command_line import add_config_arguments, minutes, new_parser
from tools.shared.output import check_writable
from utils.config import Config, load_config
from utils.distributed.launch import find_launch
from utils.errors import ConfigError, exit_in_a_line
from utils.files import write_atomically
from utils.program import module_command

if TYPE_CHECKING:
    from utils.distributed.world import World


@exit_in_a_line
def main(argv: Sequence[str] | None = None) -> int:
    """Check, print, return the exit status."""
    options = parser().parse_args(argv)
    if options.nodes:  # also in an interactive step of salloc; the processes of this srun are not given --nodes
        return subprocess.run(_on_every_node(sys.argv[1:] if argv is None else list(argv)), check=False).returncode
    check_writable("--html", options.html)
    if options.compare and (options.sweep or options.burn_in):
        raise ConfigError("--compare examines nothing: give --sweep and --burn-in where the documents are made")
    if options.compare:
        documents = [read_document(path) for path in options.compare]
        findings = compare_documents(dict(zip(options.compare, documents, strict=True)))
        if options.html is not None:
            compared = [finding for finding in findings if finding.check == "comparison"]
            everything = [finding for document in documents for finding in document.findings]
            write_page(options.html, documents[0].model_copy(update={"findings": everything + compared}))
        worst = worst_level(findings)
        document = render_json(findings, worst, documents[0].device, documents[0].software)
        print(document if options.json else "\n".join(render(findings, worst)))
        return int(worst in failing(options))
    if options.sweep and find_launch(os.environ).world_size == 1:
        raise ConfigError("--sweep: one process has nobody to talk to; start the doctor with torchrun or srun")
    check_writable("--save-baseline", options.save_baseline)
    baseline = None if options.baseline is None else read_document(options.baseline)
    config = load_config(options.yaml_config, options.config, options.set)
    from utils.distributed.ranks import run_ranks

    # cuBLAS is deterministic only with it, as fingerprints demand; PyTorch reads it at the first product, for good
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    worst = "ok"
    started = time.perf_counter()

    def look(world: "World") -> None:
        nonlocal worst
        from tools.doctor.machine import software_versions
        from utils.run.environment import describe_environment

        device, software = describe_environment(world.device, world.world_size)["device"], software_versions()
        if baseline is not None:  # refused before anything is measured
            now = Document(worst="ok", device=device, software=software, findings=[])
            check_comparable(f"this machine and {options.baseline}", now, baseline)
        seconds = time.perf_counter() - started
        findings = examine(config, options.run_dir, world, seconds, options.sweep, options.burn_in)
        if baseline is not None:
            now.findings = findings
            findings = [*findings, *compare_with_baseline(now, baseline)]
        worst = worst_level(findings)
        if world.is_main:
            document = render_json(findings, worst, device, software)
            print(document if options.json else "\n".join(render(findings, worst)))
            if options.save_baseline is not None:
                write_atomically(options.save_baseline, document.encode())
            if options.html is not None:
                write_page(options.html, Document.model_validate_json(document))

    # auto where cuda is asked for: what keeps it from use is a finding
    device = "auto" if config.device == "cuda" else config.device
    status = run_ranks(look, device, config.start_timeout_seconds, config.collective_timeout_seconds)
    return status or int(worst in failing(options))


def write_page(path: Path, document: Document) -> None:
    """`--html`."""
    from tools.doctor.page import render_page

    write_atomically(path, render_page(document).encode())
    print(f"page: {path}", file=sys.stderr)


def failing(options: argparse.Namespace) -> tuple[str, ...]:
    """The levels that make the exit status 1."""
    return ("warn", "fail") if options.strict else ("fail",)


def parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = new_parser("doctor", __doc__)
    add_config_arguments(parser, config="default")
    parser.add_argument("--run-dir", type=Path, default=Path("expts"), metavar="DIR", help="where runs will write")
    parser.add_argument("--nodes", action="store_true", help="look at every node of this Slurm allocation, by srun")
    parser.add_argument("--json", action="store_true", help="one JSON document instead of lines")
    parser.add_argument(
        "--compare",
        nargs="+",
        type=Path,
        metavar="FILE",
        help="examine nothing, but compare the figures in what --json printed on several nodes",
    )
    parser.add_argument(
        "--sweep",
        action="store_true",
        help="measure all-reduce, all-gather, reduce-scatter at all sizes, and all pairs",
    )
    parser.add_argument(
        "--burn-in", type=minutes, metavar="MINUTES", help="train for so long, and watch rate, bits, heat and faults"
    )
    parser.add_argument("--save-baseline", type=Path, metavar="FILE", help="keep this examination's figures")
    parser.add_argument("--baseline", type=Path, metavar="FILE", help="fail for what is 15 %% slower than it was then")
    parser.add_argument("--html", type=Path, metavar="FILE", help="also as a page: nodes by checks, in colours")
    parser.add_argument("--strict", action="store_true", help="a warning counts as a failure: exit status 1")
    return parser


def _on_every_node(arguments: list[str]) -> list[str]:
    if "SLURM_JOB_ID" not in os.environ or shutil.which("srun") is None:
        raise ConfigError("--nodes: this is no Slurm allocation; get one with salloc, or start the doctor by torchrun")
    rest = [word for word in arguments if word != "--nodes"]
    return ["srun", "--ntasks-per-node=1", *module_command("doctor"), *rest]


def examine(
    config: Config, run_dir: Path, world: "World", seconds_to_meet: float, sweep: bool, burn_in_minutes: float | None
) -> list[Finding]:
    """Collective: all checks of all ranks; `sweep` adds all sizes of all collectives, and every pair of nodes."""
    from tools.bench.ceilings import all_reduce
    from tools.doctor.burn_in import burn_in
    from tools.doctor.devices import TRIALS, arithmetic, check_rates, device_checks, devices_of_a_rank
    from tools.doctor.fingerprints import check_device, compare_devices, read_known, train_on
    from tools.doctor.gpus import gpu_checks
    from tools.doctor.hardware import hardware_checks
    from tools.doctor.machine import machine_checks, software_versions
    from tools.doctor.ranks import check_all_reduce, check_clocks, check_meeting, check_versions, clock_offsets
    from tools.doctor.sweep import find_expected_rate, sweep_checks

    host, first = socket.gethostname(), world.local_rank == 0
    findings = machine_checks(config, run_dir, world) + hardware_checks() if first else []
    alone = world.gather(host).count(host) == 1
    findings += device_checks(world.device, alone=alone)
    trained = train_on(devices_of_a_rank(world.device, alone=alone), f"rank {world.rank} on {host}")
    findings += [check_device(device, read_known()) for device in trained]
    findings += gpu_checks() if first else []  # while the measurements' heat shows
    where = f"{host}, rank {world.rank}" if world.world_size > 1 else host
    mine = [Finding(**asdict(finding) | {"where": where}) for finding in findings]
    everything = [finding for part in world.gather(mine) for finding in part]
    if burn_in_minutes is not None:
        everything += world.gather(replace(burn_in(config, world, burn_in_minutes), where=where))
    if len(everywhere := [device for part in world.gather(trained) for device in part]) > 1:
        everything.append(compare_devices(everywhere))
    if world.world_size > 1:
        rates = world.gather((f"rank {world.rank} on {host}", arithmetic(world.device)))
        everything += check_rates(rates, "slow rank")
        everything += [check_versions(world.gather((f"rank {world.rank} on {host}", software_versions())))]
        everything += [check_meeting(seconds_to_meet, world.world_size), check_clocks(clock_offsets(world))]
        expected = find_expected_rate(world)
        everything += [check_all_reduce(all_reduce(world.device, TRIALS).median, world, expected)]
        everything += sweep_checks(world, expected) if sweep else []
    return everything


if __name__ == "__main__":
    sys.exit(main())
