"""Check before a job whether this machine, or every node of a Slurm allocation, is fit for it.

    python -m tools.doctor                                          # this machine
    torchrun --nproc_per_node=8 -m tools.doctor                     # also all-reduce and slow ranks
    torchrun --nproc_per_node=8 -m tools.doctor --burn-in 60        # train for an hour; watch results, rate and heat
    python -m tools.doctor --nodes --failing-nodes FILE             # every node of a Slurm allocation, with srun
    python -m tools.doctor --compare a.json b.json                  # find the slow node in the --json of several nodes

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
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from tools.common import above_zero, check_writable, new_parser, path_argument, write_file
from tools.doctor.findings import LEVELS, Finding, Record, compare_records, read_record, render, worst_level
from utils.config import Config, load_config
from utils.config.command_line import add_config_arguments
from utils.errors import ConfigError, exit_in_a_line
from utils.program import module_command

if TYPE_CHECKING:
    from utils.distributed.world import World


@exit_in_a_line
def main(argv: Sequence[str] | None = None) -> int:
    options = parser().parse_args(argv)
    check_writable("--failing-nodes", options.failing_nodes)
    if options.nodes:
        if "SLURM_JOB_ID" not in os.environ or shutil.which("srun") is None:
            raise ConfigError("--nodes: not in a Slurm allocation; get one with salloc, or use torchrun")
        own = [word for word in (sys.argv[1:] if argv is None else argv) if word != "--nodes"]
        tasks = [f"--ntasks={os.environ['SLURM_JOB_NUM_NODES']}", "--ntasks-per-node=1"]
        return subprocess.run(["srun", *tasks, *module_command("doctor"), *own], check=False).returncode
    if options.compare:
        return compare(options)
    baseline = None if options.baseline is None else read_record(options.baseline)
    config = load_config(options.yaml_config, options.config, options.set)
    from utils.distributed.ranks import run_ranks

    # Fingerprints need deterministic cuBLAS. PyTorch reads this variable once, at the first matrix product.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    failed = 0

    def check(world: "World") -> None:
        nonlocal failed
        from tools.doctor.machine import software_versions
        from utils.environment import device_name

        record = Record(device=device_name(world.device), software=software_versions(), time=datetime.now(UTC))
        record.findings = examine(options, config, world)
        record.findings += compare_records([record], [baseline], "the baseline") if baseline else []
        failed = report(options, record, say=world.is_main)

    # with `cuda`, an unusable GPU would end the doctor here instead of becoming a finding
    device = "auto" if config.device == "cuda" else config.device
    return run_ranks(check, device, config.rank_timeout_seconds) or failed


def compare(options: argparse.Namespace) -> int:
    records = [read_record(path) for path in options.compare]
    found = [finding for record in records for finding in record.findings]
    if len(records) == 1 and len({finding.node for finding in found if finding.where}) < 2:
        raise ConfigError(f"--compare: {options.compare[0]} is the record of one node; name at least two records")
    # each record's own comparison with its median is replaced by one with the median of all records
    findings = [finding for finding in found if finding.level == "fail" and "of the median" not in finding.message]
    findings += compare_records(records, records, "the median")
    return report(options, records[0].model_copy(update={"findings": findings}), say=True)


def report(options: argparse.Namespace, record: Record, *, say: bool) -> int:
    """Print the report, write the names of failing nodes, return the exit status."""
    record.worst = worst_level(record.findings)
    if say:
        lines = render(record.findings, name_nodes=options.compare is not None)
        print(*lines, sep="\n", file=sys.stderr if options.json else sys.stdout)
        if options.json:
            print(record.model_dump_json(indent=1))
    if say and options.failing_nodes is not None:
        names = sorted({finding.node for finding in record.findings if finding.level == "fail" and finding.where})
        write_file(options.failing_nodes, f"{','.join(names)}\n".encode())
    return LEVELS.index(record.worst)


def parser() -> argparse.ArgumentParser:
    parser = new_parser("doctor", __doc__)
    add_config_arguments(parser, config="default")
    parser.add_argument("--run-dir", type=path_argument, default="expts", metavar="DIR", help="where runs will write")
    parser.add_argument("--nodes", action="store_true", help="check every node of this Slurm allocation, with srun")
    parser.add_argument("--failing-nodes", type=path_argument, metavar="FILE", help="write names for srun --exclude")
    parser.add_argument("--json", action="store_true", help="print a record, one JSON document; the lines go to stderr")
    parser.add_argument("--compare", nargs="+", type=path_argument, metavar="FILE", help="only compare several records")
    parser.add_argument("--baseline", type=path_argument, metavar="FILE", help="fail below 0.87 of this record")
    help_text = "level of NVIDIA's dcgmi diag, if installed: 2 takes minutes, 1 seconds, 0: none (default: 2)"
    parser.add_argument("--dcgm", type=int, choices=(0, 1, 2), default=2, metavar="LEVEL", help=help_text)
    parser.add_argument("--burn-in", type=above_zero, metavar="MINUTES", help="train; watch rate, results and heat")
    return parser


def examine(options: argparse.Namespace, config: Config, world: "World") -> list[Finding]:
    """Collective: run all checks on all ranks."""
    import torch

    from tools.doctor import hardware, machine, measured

    node = os.environ.get("SLURMD_NODENAME") or socket.gethostname()
    nodes = world.all_gather(node)
    ranks_here, visible = nodes.count(node), torch.cuda.device_count()
    name = node if ranks_here == 1 else f"{node}, rank {world.rank}"
    places = {name: world.device}
    if ranks_here == 1 and world.device.type == "cuda" and visible > 1:  # the only rank checks all GPUs
        places = {f"{name}, cuda:{number}": torch.device("cuda", number) for number in range(visible)}
    if options.burn_in is not None and len(places) > 1:
        remedy = f"start it with torchrun --nproc_per_node={visible} {' '.join(module_command('doctor')[1:])}"
        raise ConfigError(f"--burn-in trains on one GPU of each process, {node} has {visible}; {remedy}")
    findings = []
    if world.local_rank == 0:
        findings += machine.machine_checks(config, options.run_dir, ranks_here) + hardware.hardware_checks()
        usable = max(visible, ranks_here) if visible else 0  # srun may show each rank only its own GPU
        findings.append(hardware.check_dcgm(options.dcgm, usable, len(hardware.find_gpus(hardware.PCI_DEVICES))))
    world.barrier()  # DCGM's tests need the GPUs for themselves
    findings += [replace(measured.check_limits(device), where=place) for place, device in places.items()]
    findings += [replace(measured.check_device(device), where=place) for place, device in places.items()]
    if options.burn_in is not None:
        findings.append(replace(measured.burn_in(config, world, options.burn_in), where=name))
    if world.local_rank == 0:
        findings += hardware.gpu_checks()  # last: the GPUs are hot
    findings = [finding if finding.where else replace(finding, where=node) for finding in findings]
    findings = [finding for part in world.all_gather(findings) for finding in part]
    findings += measured.compare_devices(findings)
    if world.world_size > 1:
        findings += measured.check_versions(world.all_gather((name, machine.software_versions())))
        findings.append(replace(measured.check_all_reduce(world), where=node if len(set(nodes)) == 1 else ""))
    return findings


if __name__ == "__main__":
    sys.exit(main())
