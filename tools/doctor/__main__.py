"""Check before a job whether this machine, or every node of a Slurm allocation, is fit for it.

    python -m tools.doctor                                          # this machine
    torchrun --nproc_per_node=8 -m tools.doctor                     # also all-reduce, clocks and the slowest rank
    srun --ntasks=16 --ntasks-per-node=8 python -m tools.doctor --sweep  # two nodes: collectives of all sizes, pairs
    torchrun --nproc_per_node=8 -m tools.doctor --burn-in 60        # train for an hour; watch results, rate and heat
    python -m tools.doctor --nodes                                  # in a Slurm allocation: one process on every node
    python -m tools.doctor --compare a.json b.json --html page.html # find the slow node in the --json of several nodes
    python -m tools.doctor --baseline DIR                           # the --json of many nodes and days

Each line is ok, warn or fail, with the remedy. The last line begins with the worst level.
Exit status: 0 all ok, 1 a check warns, 2 a check fails and the node should be drained, 130 interrupted.
Without that last line the doctor could not check: bad usage ends with 2 too, and an error of the doctor with 1.
"""

import argparse
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

from tools.doctor.findings import (
    LEVELS,
    Document,
    Finding,
    check_comparable,
    compare_documents,
    compare_with_baseline,
    read_document,
    render,
    worst_level,
)
from tools.shared.command_line import minutes, new_parser, path_argument, seconds
from tools.shared.output import check_writable, write_file
from utils.config import Config, load_config
from utils.config.command_line import add_config_arguments
from utils.distributed.launch import find_launch
from utils.errors import ConfigError, exit_in_a_line
from utils.program import module_command

if TYPE_CHECKING:
    from utils.distributed.world import World


COMPARISONS = ("comparison", "repeat offenders", "interruptions")  # findings that are of no single record


@exit_in_a_line
def main(argv: Sequence[str] | None = None) -> int:
    """Check, print, return the exit status."""
    options = parser().parse_args(argv)
    if options.nodes:
        return subprocess.run(_on_every_node(sys.argv[1:] if argv is None else list(argv)), check=False).returncode
    check_writable("--html", options.html)
    has_fleet = options.baseline is not None and options.baseline.is_dir()
    if options.compare or has_fleet:
        return compare(options)
    if options.runs or options.checkpoint_seconds:
        raise ConfigError("--runs and --checkpoint-seconds are for records; they need --baseline DIR, a folder")
    if options.sweep and find_launch(os.environ).world_size == 1:
        raise ConfigError("--sweep needs at least two ranks; start the doctor with torchrun or srun")
    baseline = None if options.baseline is None else read_document(options.baseline)
    config = load_config(options.yaml_config, options.config, options.set)
    from utils.distributed.ranks import run_ranks

    # Fingerprints need deterministic cuBLAS. PyTorch reads this variable once, at the first matrix product.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    started, failed = time.perf_counter(), 0

    def check(world: "World") -> None:
        nonlocal failed
        from tools.doctor.machine import software_versions
        from utils.run.logging.environment import describe_environment

        device = describe_environment(world.device, world.world_size)["device"]
        now = datetime.now(UTC).replace(microsecond=0)
        document = Document(worst="ok", device=device, software=software_versions(), time=now, findings=[])
        if baseline is not None:  # before measuring
            check_comparable(f"this machine and {options.baseline}", document, baseline)
        document.findings = examine(options, config, world, time.perf_counter() - started)
        if baseline is not None:
            document.findings += compare_with_baseline(document, baseline)
        failed = report(options, document, document.findings, say=world.is_main)

    # with `cuda`, an unusable GPU would end the doctor here instead of becoming a finding
    device = "auto" if config.device == "cuda" else config.device
    return run_ranks(check, device, config.rank_timeout_seconds) or failed


def compare(options: argparse.Namespace) -> int:
    """Compare the files of `--compare`, or those in the folder of `--baseline`; return the exit status."""
    option = "--compare" if options.compare else "--baseline DIR"
    if options.sweep or options.burn_in:
        raise ConfigError(f"{option} measures nothing; give --sweep and --burn-in to the runs that write the files")
    if options.compare:
        documents = {path: read_document(path) for path in options.compare}
        findings = compare_documents(documents)
    else:
        from tools.doctor.records.fleet import judge_fleet, read_fleet

        documents = read_fleet(options.baseline)
        findings = judge_fleet(documents, options.runs, options.checkpoint_seconds)
    document = next(iter(documents.values())).model_copy(update={"findings": findings})
    on_page = [finding for each in documents.values() for finding in each.findings]
    on_page += [finding for finding in findings if finding.check in COMPARISONS]
    return report(options, document, on_page, name_nodes=True)


def report(
    options: argparse.Namespace,
    document: Document,
    on_page: Sequence[Finding],
    *,
    say: bool = True,
    name_nodes: bool = False,
) -> int:
    """Print the report, write the page, return the exit status."""
    document.worst = worst_level(document.findings)
    if say:
        lines = render(document.findings, name_nodes=name_nodes)
        print(document.model_dump_json(indent=1) if options.json else "\n".join(lines))
    if say and options.html is not None:
        from tools.doctor.records.page import render_page

        page = render_page(document.model_copy(update={"findings": list(on_page)}))
        write_file(options.html, page.encode("utf-8", "backslashreplace"))
        print(f"page: {options.html}", file=sys.stderr)
    return LEVELS.index(document.worst)


def parser() -> argparse.ArgumentParser:
    parser = new_parser("doctor", __doc__)
    add_config_arguments(parser, config="default")
    parser.add_argument(
        "--run-dir", type=path_argument, default=Path("expts"), metavar="DIR", help="where runs will write"
    )
    parser.add_argument("--nodes", action="store_true", help="check every node of this Slurm allocation, with srun")
    parser.add_argument("--json", action="store_true", help="print one JSON document instead of lines")
    help_text = "check nothing; compare the figures in the --json output of several nodes"
    parser.add_argument("--compare", nargs="+", type=path_argument, metavar="FILE", help=help_text)
    help_text = "level of NVIDIA's dcgmi diag, if installed: 2 takes minutes, 1 seconds, 0: none (default: 2)"
    parser.add_argument("--dcgm", type=int, choices=(0, 1, 2), default=2, metavar="LEVEL", help=help_text)
    help_text = "measure all-reduce, all-gather and reduce-scatter at all sizes, and every pair"
    parser.add_argument("--sweep", action="store_true", help=help_text)
    help_text = "train for MINUTES; watch rate, results, heat and faults"
    parser.add_argument("--burn-in", type=minutes, metavar="MINUTES", help=help_text)
    help_text = (
        "earlier --json output of this machine; fail if a figure is now 15 %% slower. DIR of such files, of many "
    )
    help_text += "nodes and days: check nothing; report the spread, outliers, and nodes with faults on several days"
    parser.add_argument("--baseline", type=path_argument, metavar="FILE|DIR", help=help_text)
    help_text = "with --baseline DIR: a folder of training runs, to say how often a job of N nodes is interrupted"
    parser.add_argument("--runs", type=path_argument, metavar="DIR", help=help_text)
    help_text = "with --runs: how long a checkpoint stops the training; prints how often to write one"
    parser.add_argument("--checkpoint-seconds", type=seconds, metavar="S", help=help_text)
    parser.add_argument(
        "--html", type=path_argument, metavar="FILE", help="also write a page: nodes by checks, in colours"
    )
    return parser


def _on_every_node(arguments: list[str]) -> list[str]:
    if "SLURM_JOB_ID" not in os.environ or shutil.which("srun") is None:
        raise ConfigError("--nodes: not in a Slurm allocation; get one with salloc, or start the doctor with torchrun")
    rest = [word for word in arguments if word != "--nodes"]
    return [
        "srun",
        f"--ntasks={os.environ['SLURM_JOB_NUM_NODES']}",
        "--ntasks-per-node=1",
        *module_command("doctor"),
        *rest,
    ]


def examine(options: argparse.Namespace, config: Config, world: "World", seconds_to_meet: float) -> list[Finding]:
    """Collective: run all checks on all ranks."""
    import torch

    from tools.bench.limits import all_reduce
    from tools.doctor import dcgm, fingerprints, gpus, hardware, machine, measured

    host, first = socket.gethostname(), world.local_rank == 0
    name = f"rank {world.rank} on {host}"
    hosts = world.all_gather(host)
    ranks_here = hosts.count(host)
    only_rank = ranks_here == 1
    seen = torch.cuda.device_count()
    if options.burn_in is not None and world.device.type == "cuda" and only_rank and seen > 1:
        raise ConfigError(
            f"--burn-in trains on one GPU of each process, {host} has {seen}; start it with torchrun "
            f"--nproc_per_node={seen} -m tools.doctor"
        )
    findings = []
    here = (host, sorted(os.sched_getaffinity(0)))
    sharing = world.all_gather(here).count(here)  # srun may bind each rank to cores of its own
    if first:
        findings += machine.machine_checks(config, options.run_dir, world, ranks_here, sharing)
        findings += hardware.hardware_checks()
        visible = max(seen, ranks_here) if seen else 0  # srun may show each rank only its own
        findings.append(dcgm.check_dcgm(options.dcgm, visible, len(hardware.find_gpus(hardware.PCI_DEVICES))))
    world.barrier()  # DCGM's tests need the GPUs for themselves
    findings += measured.device_checks(world.device, only_rank=only_rank)
    trained = fingerprints.train_on(measured.devices_of_a_rank(world.device, only_rank=only_rank), name)
    findings += [fingerprints.check_device(device, fingerprints.read_known()) for device in trained]
    findings += gpus.gpu_checks() if first else []  # last: the GPUs are warm from the measurements
    where = f"{host}, rank {world.rank}" if world.world_size > 1 else host
    gathered = world.all_gather([replace(finding, where=where) for finding in findings])
    all_findings = [finding for part in gathered for finding in part]
    if options.burn_in is not None:
        from tools.doctor.burn_in import burn_in

        all_findings += world.all_gather(replace(burn_in(config, world, options.burn_in), where=where))
    if len(all_trained := [device for part in world.all_gather(trained) for device in part]) > 1:
        all_findings.append(fingerprints.compare_devices(all_trained))
    if world.world_size > 1:
        from tools.doctor.sweep import sweep_checks

        all_findings += measured.check_rates(world.all_gather((name, measured.arithmetic(world.device))), "slow rank")
        all_findings.append(measured.check_versions(world.all_gather((name, machine.software_versions()))))
        all_findings.append(measured.check_meeting(seconds_to_meet, world.world_size))
        all_findings.append(measured.check_clocks(measured.clock_offsets(world)))
        all_findings.append(measured.check_all_reduce(all_reduce(world.device, measured.TRIALS).median, world))
        all_findings += sweep_checks(world) if options.sweep else []
    together = host if len(set(hosts)) == 1 else ""  # of findings over all ranks
    return [finding if finding.where else replace(finding, where=together) for finding in all_findings]


if __name__ == "__main__":
    sys.exit(main())
