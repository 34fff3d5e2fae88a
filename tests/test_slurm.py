"""The job scripts and examples/slurm: with fake Slurm commands, and (marked slurm) on a real cluster."""

import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import CIFAR100, ROOT, TINY
from tests.processes import make_command, wait_until
from tests.slurm_cluster import SlurmCluster, why_not
from tools.shared.read_runs import read_records
from utils.config.command_line import parse_arguments

PYTHON = Path(sys.executable).parent  # holds torchrun too
SCRIPTS = ["submit.slr", "submit_multinode.slr"]
# All commands that the scripts may need on PATH, besides Slurm's and python.
TOOLS = [
    "bash",
    "cat",
    "dirname",
    "env",
    "flock",
    "grep",
    "ls",
    "mkdir",
    "mktemp",
    "mv",
    "realpath",
    "rm",
    "rmdir",
    "sed",
    "seq",
    "sleep",
    "touch",
]

# What each fake command does after recording its arguments, in bash.
FAKE_COMMANDS = {
    "srun": 'echo 0 >"$TRAIN_EXIT_STATUS_FILE"',
    "scontrol": '[[ $1 != --oneliner ]] || echo "JobId=4 JobState=RUNNING Reason=None"',
    "python": "",
}
# srun during training: on a signal it saves as train.py does, and torchrun turns its status 75 into 1.
# The file `signals` records the signals.
TRAINS = """
trap 'echo USR1 >>signals' USR1
trap 'echo TERM >>signals' TERM
echo $$ >starting && mv starting started
until [[ -s signals ]]; do ((SECONDS < 60)) && sleep 0.05 || exit; done
sleep 0.3
echo 75 >"$TRAIN_EXIT_STATUS_FILE"
exit 1
"""


def silent(times: int) -> str:
    """A scontrol that fails this many times and then answers."""
    return f'echo >>asked; (($(grep -c "" asked) > {times})) || exit 1\n{FAKE_COMMANDS["scontrol"]}'


# A sleep that skips the pauses between questions to Slurm.
NO_PAUSE = f'[[ $1 == 5 ]] || exec {shutil.which("sleep")} "$1"'
SRUN_ON_ONE_NODE = 'until [[ $1 == bash ]]; do shift; done; env >environment; SLURMD_NODENAME=node1 exec "$@"'
SRUN_ON_TWO_NODES = """
until [[ $1 == bash ]]; do shift; done
for node in node1 node2; do SLURMD_NODENAME=$node "$@"; done
"""
HOSTNAMES = f"""[[ $* != "show hostnames node[1-2]" ]] || printf "node%s\\n" 1 2; {FAKE_COMMANDS["scontrol"]}"""
ON_ONE_NODE = {
    "SLURM_JOB_ID": "4",
    "SLURM_JOB_NODELIST": "node1",
    "SLURM_JOB_NUM_NODES": "1",
    "SLURM_GPUS_ON_NODE": "2",
    "SLURMD_NODENAME": "node1",
}
ON_TWO_NODES = ON_ONE_NODE | {"SLURM_JOB_NODELIST": "node[1-2]", "SLURM_JOB_NUM_NODES": "2", "SLURM_GPUS_ON_NODE": "8"}


class FakeJob:
    """A batch script run with fakes of every command except TOOLS; `calls` holds the fakes' arguments."""

    def __init__(self, folder: Path, fake_commands: Mapping[str, str], environment: Mapping[str, str]) -> None:
        self.folder, self.calls, commands = folder, folder / "calls", folder / "commands"
        self.calls.mkdir()
        commands.mkdir()
        link_commands(commands, TOOLS)
        for name, action in fake_commands.items():
            record = f'printf "%s\\0" "$@" >"{self.calls}/{name}.$$"'
            make_command(commands, name, f"{record}\n{action}")
        for name in ["train.py", "tools", *SCRIPTS]:
            (folder / name).symlink_to(ROOT / name)
        self.environment = {"PATH": str(commands), **environment}

    def start(self, script: str, *args: str, cwd: Path | None = None) -> "subprocess.Popen[str]":
        return subprocess.Popen(
            ["bash", str(self.folder / script), *args],
            cwd=cwd or self.folder,
            env=self.environment,
            stderr=subprocess.PIPE,
            text=True,
        )

    def run(self, script: str, *args: str, cwd: Path | None = None) -> tuple[int, str]:
        """Run to the end; return exit status and stderr."""
        process = self.start(script, *args, cwd=cwd)
        _, output = process.communicate(timeout=120)
        return process.returncode, output

    def run_and_signal(self, number: signal.Signals, *args: str, to_step: bool = False) -> tuple[int, str]:
        """Like `run`, but signal the batch shell, and optionally the step, once the training runs."""
        process = self.start("submit.slr", *args)
        started = self.folder / "started"
        wait_until("start of the fake command", 60, started.exists, 0.02)
        if to_step:
            os.kill(int(started.read_text()), number)
        process.send_signal(number)
        _, output = process.communicate(timeout=120)
        return process.returncode, output

    def signals(self) -> str:
        """Return the signals that the step received."""
        return (self.folder / "signals").read_text().strip()

    def arguments(self, command: str) -> list[list[str]]:
        """Return the arguments of each call of the command."""
        calls = sorted(self.calls.glob(f"{command}.*"), key=lambda call: call.stat().st_mtime_ns)
        return [call.read_text().split("\0")[:-1] for call in calls]

    def torchrun(self) -> list[list[str]]:
        """Return torchrun's arguments on each node."""
        calls = self.arguments("python")
        return [arguments[3:] for arguments in calls if arguments[:2] == ["-m", "tools.torchrun"]]


def link_commands(folder: Path, names: list[str]) -> None:
    """Link these commands into the folder."""
    for name in names:
        target = shutil.which(name)
        assert target, f"{name} is not on PATH"
        (folder / name).symlink_to(target)


def fake_job(tmp_path: Path, fake_commands: Mapping[str, str] | None = None, /, **environment: str) -> FakeJob:
    return FakeJob(tmp_path, {**FAKE_COMMANDS, **(fake_commands or {})}, {**ON_ONE_NODE, **environment})


def headers(script: str) -> dict[str, str]:
    lines = re.findall(r"^#SBATCH --([a-z-]+)(?:=(\S+))?$", (ROOT / script).read_text(), re.MULTILINE)
    return dict(lines)


def test_headers_differ_only_in_requested_resources():
    one, many = (headers(script) for script in SCRIPTS)
    assert {key for key in one.keys() | many.keys() if one.get(key) != many.get(key)} == {
        *("nodes", "gpus-per-node", "cpus-per-task", "exclusive")
    }
    assert one["signal"] == "B:USR1@120"
    assert "/" not in one["output"]  # a folder would have to exist before sbatch
    for script in SCRIPTS:
        offered = re.findall(r"^##SBATCH --(\w+)=", (ROOT / script).read_text(), re.MULTILINE)
        assert offered == ["account", "partition", "qos", "constraint", "gres"]


@pytest.mark.parametrize(
    ("script", "job", "config"),
    [("submit.slr", ON_ONE_NODE, "bs128-opt"), ("submit_multinode.slr", ON_TWO_NODES, "bs2048-warmup-opt")],
)
def test_one_srun_starts_torchrun_on_all_nodes(tmp_path, script, job, config):
    status, _ = (fake := fake_job(tmp_path, **job)).run(script, "--config=other", "--set", "a=b  c")
    assert status == 0
    (srun,) = fake.arguments("srun")
    nodes, processes = job["SLURM_JOB_NUM_NODES"], job["SLURM_GPUS_ON_NODE"]
    assert {f"--nodes={nodes}", f"--ntasks={nodes}", "--ntasks-per-node=1", "--kill-on-bad-exit=0"} <= set(srun)
    torchrun = srun[srun.index("tools/shared/slurm_node.sh") + 1 :]
    assert {
        f"--nnodes={nodes}", f"--nproc_per_node={processes}", "--max_restarts=0", "--rdzv_backend=c10d", "--rdzv_id=4",
        "--signals-to-handle=SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1",
    } <= set(torchrun)  # fmt: skip
    (endpoint,) = (word.removeprefix("--rdzv_endpoint=") for word in torchrun if word.startswith("--rdzv_endpoint="))
    assert endpoint == "node1:10004" if nodes == "2" else Path(endpoint).is_absolute() and not Path(endpoint).exists()
    # the default comes first, so that a --config given to sbatch wins
    assert torchrun[torchrun.index("train.py") + 1 :] == [f"--config={config}", "--config=other", "--set", "a=b  c"]


def test_each_node_knows_its_address_and_the_head(tmp_path):
    job = fake_job(tmp_path, {"srun": SRUN_ON_TWO_NODES}, **ON_TWO_NODES, HOST_SUFFIX="-ib0", JOIN_TIMEOUT="7")
    assert job.run("submit_multinode.slr", "--set", "a=b  c")[0] == 0
    for node, is_host, arguments in zip(["node1", "node2"], ["true", "false"], job.torchrun(), strict=True):
        assert f"--local_addr={node}-ib0" in arguments
        assert f"--rdzv_conf=store_type=tcp,is_host={is_host},join_timeout=7,read_timeout=7" in arguments
        assert "--rdzv_endpoint=node1-ib0:10004" in arguments
        assert arguments[-1] == "a=b  c"


def test_on_one_node_the_workers_meet_in_a_file(tmp_path):
    job = fake_job(tmp_path, {"srun": SRUN_ON_ONE_NODE})
    assert job.run("submit.slr")[0] == 0
    (call,) = (call for call in job.arguments("python") if call[:2] == ["-m", "tools.torchrun"])
    assert call[2] == str(tmp_path / "expts/torchrun-4-node1.log")  # torchrun's log
    (arguments,) = job.torchrun()
    (conf,) = (word for word in arguments if word.startswith("--rdzv_conf="))
    assert conf.startswith("--rdzv_conf=store_type=file,keep_alive_interval=100000,is_host=true,")
    assert "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1" in (tmp_path / "environment").read_text().splitlines()


def test_site_settings_reach_the_nodes(tmp_path):
    settings = {
        "TRAIN_CONFIG": "quickstart",
        "PROCESSES_PER_NODE": "3",
        "ACTIVATE": "export ACTIVATED=$UNSET_VARIABLE,yes",
        "NETWORK_INTERFACE": "hsn0",
        "MAX_RESTARTS": "2",
        "SLURM_CPUS_PER_TASK": "8",
    }
    job = fake_job(tmp_path, {"srun": "env >environment"}, **ON_TWO_NODES, **settings)
    assert job.run("submit_multinode.slr")[0] == 0
    (srun,) = job.arguments("srun")
    assert {"--config=quickstart", "--nproc_per_node=3", "--max_restarts=2"} <= set(srun)
    environment = (tmp_path / "environment").read_text().splitlines()
    assert {
        "ACTIVATED=,yes", "NCCL_SOCKET_IFNAME=hsn0", "GLOO_SOCKET_IFNAME=hsn0", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1",
    } <= set(environment)  # fmt: skip
    assert not [line for line in environment if line.startswith("SLURM_CPUS_PER_TASK=")]


def test_a_node_that_cannot_stage_the_data_ends_the_job_and_is_named(tmp_path):
    copies = "[[ $SLURMD_NODENAME == node1 ]] || exit 11"
    fakes = {"srun": SRUN_ON_TWO_NODES, "scontrol": HOSTNAMES, "rsync": copies, "scancel": ""}
    stage = f"/lustre/data:{tmp_path}/data"
    job = fake_job(tmp_path, fakes, **ON_TWO_NODES, SLURM_STEP_ID="0", STAGE_DATA=stage)
    ended, output = job.run("submit_multinode.slr")
    assert ended == 3
    assert output.endswith(f"slurm_node.sh: node node2 cannot copy /lustre/data to {tmp_path}/data\n")
    assert job.arguments("scancel") == [["--signal=KILL", "4.0"]]
    assert len(job.torchrun()) == 1


@pytest.mark.parametrize(("given", "folder"), [("%j/100%%/", "4/100%"), ("%%j%%", "%j%")])
def test_data_is_staged_on_each_node_before_it_trains_from_there(tmp_path, monkeypatch, given, folder):
    at_once = SRUN_ON_TWO_NODES.replace('"$@";', '"$@" &') + "wait"  # here both nodes have the same disk
    fakes = {"srun": at_once, "rsync": "mkdir busy && sleep 0.3 && rmdir busy"}
    job = fake_job(tmp_path, fakes, **ON_TWO_NODES, STAGE_DATA=f"/lustre/%j:{tmp_path}/{given}")
    assert job.run("submit_multinode.slr", "--set", "data_path=/lustre/4")[0] == 0
    assert [call[-2:] for call in job.arguments("rsync")] == 2 * [["/lustre/4/", f"{tmp_path}/{folder}/"]]
    monkeypatch.setenv("SLURM_JOB_ID", "4")
    assert len(job.torchrun()) == 2
    for words in job.torchrun():
        assert "join_timeout=3600" in " ".join(words)
        arguments = parse_arguments([f"--yaml_config={CIFAR100}", "--config=bs128", *words[words.index("--set") :]])
        assert arguments.config.data_path == f"{tmp_path}/{folder}"  # of two values the last one counts


@pytest.mark.skipif(not shutil.which("rsync"), reason="rsync is not installed")
def test_a_staged_copy_follows_the_original_and_replaces_nothing_else(tmp_path):
    original, copy = tmp_path / "original", tmp_path / "copy"
    (original / "train/cat").mkdir(parents=True)
    (original / "train/cat/1.jpg").write_bytes(b"a picture")
    (original / "labels.txt").write_text("cat\n")
    (original / "train/wolf").symlink_to(original / "train/cat")
    (original / "train/cat").chmod(0o555)
    job = fake_job(tmp_path, {"srun": SRUN_ON_ONE_NODE}, STAGE_DATA=f"{original}:{copy}")
    link_commands(tmp_path / "commands", ["rsync"])

    def write(file: Path, text: str) -> None:
        file.write_text(text)
        os.utime(file, (1, 1))

    for change in (
        lambda: None,
        lambda: write(original / "labels.txt", "dog\n"),
        (original / "labels.txt").unlink,
        lambda: write(copy / "train/cat/1.jpg", "half"),
    ):
        change()
        assert job.run("submit.slr")[0] == 0
        assert subprocess.run(["diff", "-r", "--exclude=.staged", original, copy], check=False).returncode == 0
    assert (copy / "train/wolf/1.jpg").read_bytes() == b"a picture" and not (copy / "train/wolf").is_symlink()
    assert (copy / "train/cat").stat().st_mode & 0o200
    (copy / ".staged").unlink()  # now it could be the user's
    (original / "train/cat").chmod(0o755)
    (original / "train/cat/1.jpg").unlink()
    status, output = job.run("submit.slr")
    assert status == 2 and f"{copy} exists, but is no copy by this script" in output
    assert (copy / "train/cat/1.jpg").exists()


PROFILES = re.findall(r"```bash\n(export .*?)```", (ROOT / "docs/slurm.md").read_text(), re.DOTALL)


@pytest.mark.parametrize("profile", PROFILES)
def test_site_profiles_reach_the_nodes(tmp_path, profile):
    listed = subprocess.run(["bash", "-ec", f"{profile}\nenv -0"], cwd=tmp_path, stdout=subprocess.PIPE, check=True)
    values = dict(pair.split("=", 1) for pair in listed.stdout.decode().split("\0") if pair)
    settings = {name: values[name] for name in re.findall(r"(\w+)=", profile) if name in values}
    assert settings
    known = re.findall(r"^\| `(\w+)` \|", (ROOT / "docs/slurm.md").read_text(), re.MULTILINE)
    assert all(name in known or name.startswith("SBATCH_") for name in settings)
    if "ACTIVATE" in settings:  # fake the site's own commands
        settings["ACTIVATE"] = "module() { :; }; source() { :; }; " + settings["ACTIVATE"]
    settings = {name: value.replace(":/tmp/", f":{tmp_path}/") for name, value in settings.items()}
    apptainer = 'until [[ $1 == python ]]; do shift; done; "$@"'
    job = fake_job(tmp_path, {"srun": SRUN_ON_ONE_NODE, "apptainer": apptainer, "rsync": ""}, **settings)
    status, output = job.run("submit.slr")
    assert status == 0, output
    assert len(job.torchrun()) == 1
    assert set(settings.get("SRUN_OPTIONS", "").split()) <= set(job.arguments("srun")[0])
    assert ("STAGE_DATA" in settings) == bool(job.arguments("rsync"))


def test_ports_of_successive_jobs_differ_and_are_below_ephemeral_ports(tmp_path):
    ports = set()
    for job_id in ["19999", "20000", "20001"]:
        folder = tmp_path / job_id
        folder.mkdir()
        job = fake_job(folder, **ON_TWO_NODES | {"SLURM_JOB_ID": job_id})
        assert job.run("submit_multinode.slr")[0] == 0
        (endpoint,) = (word for word in job.arguments("srun")[0] if word.startswith("--rdzv_endpoint="))
        ports.add(int(endpoint.split(":")[1]))
    assert ports == {29999, 10000, 10001}


@pytest.mark.parametrize(
    ("of_srun", "of_train", "expected"), [(0, "0", 0), (1, "2", 2), (1, "3", 3), (137, None, 137), (1, "0", 0)]
)
def test_exit_status_is_the_trainings_own(tmp_path, of_srun, of_train, expected):
    """Even if a signal ends torchrun after train.py has finished: train.py reports 0, torchrun returns 1."""
    report = f'echo {of_train} >"$TRAIN_EXIT_STATUS_FILE"; ' if of_train else ""
    job = fake_job(tmp_path, {"srun": f"{report}exit {of_srun}"})
    assert job.run("submit.slr")[0] == expected
    assert all(arguments[0] == "show" for arguments in job.arguments("scontrol"))
    assert not list((tmp_path / "expts").iterdir())


def test_mistake_in_the_command_line_is_reported_before_any_node_starts(tmp_path):
    job = fake_job(tmp_path, {"python": "echo 'error: no such key' >&2; exit 2"})
    assert job.run("submit.slr", "--set", "lear=1") == (2, "error: no such key\n")
    assert job.arguments("python") == [["train.py", "--config=bs128-opt", "--set", "lear=1", "--print-config"]]
    assert not job.arguments("srun")


# For a heterogeneous job, Slurm prints a line for each component.
COMPONENTS = '[[ $1 != --oneliner ]] || printf "JobId=%s HetJobId=4 JobState=RUNNING Reason=None\\n" 4 5'


REFUSES = f"[[ $1 != requeue ]] || exit 1; {FAKE_COMMANDS['scontrol']}"


@pytest.mark.parametrize(
    ("number", "scontrol", "array", "job_name"),
    [
        (signal.SIGUSR1, FAKE_COMMANDS["scontrol"], {}, "4"),
        (signal.SIGTERM, FAKE_COMMANDS["scontrol"], {}, "4"),
        (signal.SIGUSR1, COMPONENTS, {}, "4"),
        (signal.SIGUSR1, FAKE_COMMANDS["scontrol"], {"SLURM_ARRAY_JOB_ID": "3", "SLURM_ARRAY_TASK_ID": "1"}, "3_1"),
    ],
    ids=["SIGUSR1", "SIGTERM", "heterogeneous job", "array"],
)
def test_stopped_while_running_is_requeued(tmp_path, number, scontrol, array, job_name):
    job = fake_job(tmp_path, {"srun": TRAINS, "scontrol": scontrol}, **array)
    status, output = job.run_and_signal(number)
    assert status == 75
    assert ["requeue", job_name] in job.arguments("scontrol")
    assert "stopped with everything saved" in output and f"requeued as job {job_name}" in output
    assert job.signals() == "USR1"  # srun would kill its tasks on SIGTERM


def test_stopped_by_a_signal_to_the_steps_only(tmp_path):
    """As in the grace time before a preemption: Slurm does not requeue a job that exits within it."""
    job = fake_job(tmp_path, {"srun": 'echo 75 >"$TRAIN_EXIT_STATUS_FILE"; exit 1'})
    assert job.run("submit.slr")[0] == 75
    assert ["requeue", "4"] in job.arguments("scontrol")


@pytest.mark.parametrize(
    ("option", "parent"),
    [
        ("--run-dir=far/away/run", "far/away"),
        ("--run-dir far/away/run", "far/away"),
        ("--run-dir=runs/%A/%a", "runs/3"),
        ("--run-dir=50%%/%%a%a/run", "50%/%a1"),
    ],
)
def test_status_folder_is_next_to_the_runs_folder(tmp_path, option, parent):
    """train.py gets the arguments unchanged and fills in the array's numbers itself."""
    array = {"SLURM_ARRAY_JOB_ID": "3", "SLURM_ARRAY_TASK_ID": "1"}
    job = fake_job(tmp_path, {"srun": 'find "$PWD" -path "*.slurm*" >found'}, **array)
    link_commands(tmp_path / "commands", ["find"])
    words = ["--config=try-%a", "--set", "seed=%a", *option.split()]
    assert job.run("submit.slr", *words)[0] == 0
    assert job.arguments("python")[0] == ["train.py", "--config=bs128-opt", *words, "--print-config"]
    assert job.arguments("srun")[0][-len(words) :] == words
    assert str(tmp_path / parent / ".slurm-4/nodes") in (tmp_path / "found").read_text().splitlines()
    assert not (tmp_path / "expts").exists() and not list(tmp_path.glob(f"{parent}/.slurm*"))


def test_job_that_slurm_is_ending_is_left_alone(tmp_path):
    """scancel, preemption, lost node: a cancelled job must stay cancelled, and no job may be queued twice."""
    ending = 'echo "JobId=4 JobState=COMPLETING Reason=None"'
    job = fake_job(tmp_path, {"srun": TRAINS, "scontrol": ending})
    status, output = job.run_and_signal(signal.SIGTERM, "--set", "a=b c", to_step=True)
    assert status == 75
    assert job.signals() == "TERM"  # no SIGUSR1 as well: on a second signal torchrun abandons its workers
    assert all(arguments == ["--oneliner", "show", "job", "4"] for arguments in job.arguments("scontrol"))
    assert r"sbatch submit.slr --set a=b\ c" in output


def test_without_scontrol_sigterm_prints_the_command_that_resumes(tmp_path):
    """A preemption, after which Slurm requeues the job itself, cannot be distinguished from scancel."""
    job = fake_job(tmp_path, {"srun": TRAINS})
    (tmp_path / "commands/scontrol").unlink()
    status, output = job.run_and_signal(signal.SIGTERM, "--set", "a=b c", "--resume", "never", to_step=True)
    assert status == 75
    assert job.signals() == "TERM"
    assert "(there is no scontrol)" in output
    assert "to resume: sbatch submit.slr --set a=b\\ c --resume never --resume auto\n" in output


def test_a_command_that_is_not_found_is_a_failure(tmp_path):
    """As in a container without the project's folder: 127 comes from srun itself, not from an interrupted `wait`."""
    status, output = fake_job(tmp_path, {"srun": "exit 127"}).run("submit.slr")
    assert status == 127
    assert "train.py failed, was killed or never started" in output and "requeued" not in output


@pytest.mark.parametrize(
    ("number", "scontrol", "received", "said"),
    [
        (signal.SIGUSR1, REFUSES, "USR1", "to resume: sbatch submit.slr\n"),
        (signal.SIGUSR1, "exit 1", "USR1", "(Slurm does not answer)"),
        (signal.SIGTERM, silent(1), "USR1", "requeued as job 4"),
        (signal.SIGTERM, silent(2), "USR1", "requeued as job 4"),
        (signal.SIGTERM, silent(1).replace("RUNNING", "COMPLETING"), "TERM", ""),
    ],
    ids=["refuses", "never answers", "answers late", "answers later", "answers late that it ends the job"],
)
def test_the_script_requeues_if_slurm(number, scontrol, received, said, tmp_path):
    job = fake_job(tmp_path, {"srun": TRAINS, "scontrol": scontrol, "sleep": NO_PAUSE})
    status, output = job.run_and_signal(number, to_step=received == "TERM")
    assert (status, job.signals()) == (75, received)
    assert said in output and ("requeued" in output) == ("requeued" in said)
    if scontrol == "exit 1":
        assert len(job.arguments("scontrol")) == 12  # five seconds apart
        assert "to resume: sbatch submit.slr\n" in output


def test_signal_before_training_requeues_at_most_ten_times(tmp_path):
    """SIGUSR1 kills torchrun until it has set its handlers; with a short time limit, requeuing would never end."""
    job = fake_job(tmp_path, {"srun": "echo $$ >starting; mv starting started; exec sleep 30"})
    for restart, requeued in [("0", True), ("9", True), ("10", False)]:
        (tmp_path / "started").unlink(missing_ok=True)
        shutil.rmtree(job.calls)
        job.calls.mkdir()
        job.environment["SLURM_RESTART_COUNT"] = restart
        status, output = job.run_and_signal(signal.SIGUSR1)
        assert status == 128 + signal.SIGUSR1
        assert "nothing saved since the last checkpoint" in output
        assert (["requeue", "4"] in job.arguments("scontrol")) == requeued
    assert "is the time limit too short?" in output and "to resume: sbatch submit.slr\n" in output


def test_signal_during_activation_starts_nothing(tmp_path):
    job = fake_job(tmp_path, ACTIVATE="kill -USR1 $$")
    assert job.run("submit.slr")[0] == 143
    assert not job.arguments("srun")
    assert ["requeue", "4"] in job.arguments("scontrol")


def test_missing_nodes_are_named(tmp_path):
    one_starts = 'touch "$PWD/expts/.slurm-4/nodes/gpu008-b"; exit 1'
    names = '[[ $* == "show hostnames gpu[007-009]-b,login1" ]] && printf "%s\\n" gpu007-b gpu008-b gpu009-b login1'
    nodes = {"SLURM_JOB_NODELIST": "gpu[007-009]-b,login1", "SLURM_JOB_NUM_NODES": "4", "SLURMD_NODENAME": "gpu007-b"}
    job = fake_job(tmp_path, {"srun": one_starts, "scontrol": names}, **nodes)
    status, output = job.run("submit_multinode.slr")
    assert status == 1
    assert "Nodes where nothing started: gpu007-b gpu009-b login1\n" in output
    assert "all nodes must reach" not in output
    (tmp_path / "commands/scontrol").unlink()
    assert "started: perhaps some of gpu[007-009]-b,login1\n" in job.run("submit_multinode.slr")[1]


def test_network_advice_if_all_nodes_start(tmp_path):
    fails = """touch "$PWD/expts/.slurm-4/nodes/"{node1,node2}; exit 1"""
    job = fake_job(tmp_path, {"srun": fails, "scontrol": HOSTNAMES}, **ON_TWO_NODES)
    status, output = job.run("submit_multinode.slr")
    assert status == 1
    assert "Nodes where nothing started: none\n" in output
    assert "all nodes must reach node1:10004: check NETWORK_INTERFACE" in output


@pytest.mark.parametrize("script", SCRIPTS)
def test_outside_of_a_job_the_script_says_how_to_submit_it(tmp_path, script):
    status, output = fake_job(tmp_path, SLURM_JOB_ID="").run(script, "--set", "seed=1 ")
    assert status == 2
    assert output == f"{script}: this is not a Slurm job; start one: sbatch {script} --set seed=1\\ \n"


def test_a_folder_that_cannot_be_written_ends_the_job_before_it_starts(tmp_path):
    (tmp_path / "expts").touch()  # in place of the folder
    status, output = (job := fake_job(tmp_path)).run("submit.slr")
    assert (status, job.arguments("srun")) == (2, [])
    assert f"submit.slr: node1 cannot write to {tmp_path}/expts: free the disk, or choose another --run-dir\n" in output


def test_a_node_that_cannot_write_ends_the_job_and_is_named(tmp_path):
    """Without scancel the other nodes would wait for it until JOIN_TIMEOUT."""
    fakes = {
        "srun": SRUN_ON_TWO_NODES,
        "scontrol": HOSTNAMES,
        "touch": f'[[ $1 != */node2 ]] || exit 1; exec {shutil.which("touch")} "$1"',
        "scancel": "",
    }
    job = fake_job(tmp_path, fakes, **ON_TWO_NODES, SLURM_STEP_ID="0")
    status, output = job.run("submit_multinode.slr")
    assert status == 1
    assert f"slurm_node.sh: node node2 cannot write to {tmp_path}/expts/.slurm-4\n" in output
    assert output.endswith("Nodes where nothing started: node2\n")
    assert job.arguments("scancel") == [["--signal=KILL", "4.0"]]
    assert len(job.torchrun()) == 1


@pytest.mark.parametrize(
    ("log", "report", "restart", "requeued"),
    [
        ("joins", "1", "0", True),
        ("joins", "", "9", True),
        ("joins", "1", "10", False),
        ("joins", "3", "0", False),
        ("Traceback", "1", "0", False),
    ],
    ids=["rank 0 lost the others", "nothing reported", "bound", "a reason", "torchrun ended by itself"],
)
def test_lost_torchrun_requeues_if_no_rank_reports_a_reason(tmp_path, log, report, restart, requeued):
    """As after a node that rebooted before Slurm noticed. The log of an earlier start does not count."""
    starts = f"""
    cd "$PWD/expts" && touch .slurm-4/nodes/{{node1,node2}}
    echo Traceback >torchrun-4-node1.log; echo {log} >torchrun-4-node2.log
    [[ -z "{report}" ]] || echo {report} >"$TRAIN_EXIT_STATUS_FILE"
    exit 137
    """
    job = fake_job(tmp_path, {"srun": starts, "scontrol": HOSTNAMES}, **ON_TWO_NODES, SLURM_RESTART_COUNT=restart)
    (tmp_path / "expts").mkdir()
    (tmp_path / "expts/torchrun-4-node3.log").write_text("joins\n")
    status, output = job.run("submit_multinode.slr")
    assert status == int(report or 137)
    assert (["requeue", "4"] in job.arguments("scontrol")) == requeued
    assert ("torchrun was killed, or its node is gone" in output) == (requeued or restart == "10")


@pytest.mark.parametrize("script", SCRIPTS)
def test_submitted_from_another_folder(tmp_path, script):
    """Slurm starts a script in the current folder of sbatch, or in --chdir."""
    (project := tmp_path / "project").mkdir()
    (elsewhere := tmp_path / "elsewhere").mkdir()
    job = fake_job(project, {"srun": "pwd >folder"})
    assert job.run(script)[0] == 0  # --chdir=project
    assert Path((project / "folder").read_text().strip()) == project
    status, output = job.run(script, cwd=elsewhere)
    missing = "train.py" if script == "submit.slr" else "submit.slr"
    assert (status, output) == (
        2, f"{script}: no {missing} in {elsewhere}: run sbatch in the project's folder, or give it --chdir=FOLDER\n"
    )  # fmt: skip


@pytest.mark.parametrize("missing", ["python", "packages"])
def test_without_python_or_packages(tmp_path, missing):
    job = fake_job(tmp_path, {"python": "echo ModuleNotFoundError >&2; exit 1"})
    if missing == "python":
        (tmp_path / "commands/python").unlink()
    status, output = job.run("submit.slr")
    assert status == 2
    assert "submit.slr: python cannot run train.py: set ACTIVATE or LAUNCHER_PREFIX\n" in output
    assert not job.arguments("srun")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("PROCESSES_PER_NODE", value) for value in ["0", "-1", "2.5", "08", "1 2", "a[$(touch executed)]"]),
        *(("MASTER_PORT", value) for value in ["65536", "http"]),
        *[("MAX_RESTARTS", "often"), ("JOIN_TIMEOUT", "0")],
    ],
)
def test_invalid_number_is_reported_in_one_line(tmp_path, name, value):
    status, output = (job := fake_job(tmp_path, **{name: value})).run("submit.slr")
    assert status == 2
    assert output.startswith(f"submit.slr: {name} is '{value}'; expected a whole number above 0 ")
    assert output.count("\n") == 1
    assert not job.arguments("srun") and not (tmp_path / "executed").exists()


@pytest.mark.parametrize(
    ("value", "remedy"),
    [
        *((value, "expected FROM:TO, two folders") for value in ("/lustre/data", ":/tmp/data", "/lustre/data:")),
        ("/lustre/data:/tmp/%a", "%a and %A need sbatch --array, %% is a percent sign"),
    ],
)
def test_staging_needs_two_folders(tmp_path, value, remedy):
    status, output = (job := fake_job(tmp_path, STAGE_DATA=value)).run("submit.slr")
    assert (status, output) == (2, f"submit.slr: STAGE_DATA is '{value}'; {remedy}\n")
    assert not job.arguments("srun")


def test_activation_runs_without_strict_mode_and_its_failure_is_reported(tmp_path):
    (tmp_path / "activate").write_text("false\nfalse | true\necho $UNSET_VARIABLE >/dev/null\nexport ACTIVATED=yes\n")
    job = fake_job(tmp_path, {"srun": "env >environment"}, ACTIVATE="source ./activate")
    assert job.run("submit.slr")[0] == 0
    assert "ACTIVATED=yes" in (tmp_path / "environment").read_text().splitlines()
    job.environment["ACTIVATE"] = "source nowhere/activate"
    status, output = job.run("submit.slr")
    assert status == 2 and len(job.arguments("srun")) == 1
    assert output.endswith("submit.slr: ACTIVATE failed with status 1: source nowhere/activate\n")


def test_port_in_use_is_reported_before_any_node_starts(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        job = fake_job(tmp_path, **ON_TWO_NODES, MASTER_PORT=str(port))
        status, output = job.run("submit_multinode.slr")
    assert status == 2 and not job.arguments("srun")
    assert output == (
        f"submit_multinode.slr: port {port} of node1 is in use, perhaps by another job; choose another with "
        "MASTER_PORT=...\n"
    )
    assert not list(tmp_path.glob("expts/.slurm*"))


@pytest.mark.parametrize(("asked", "given", "processes"), [("1", "2", "2"), ("0", None, "1")])
def test_step_gets_all_gpus_of_the_job(tmp_path, asked, given, processes):
    """With sbatch --gres=gpu:2, srun would use the number in the #SBATCH line. --gpus-per-node=0: one process."""
    job = fake_job(tmp_path, {"srun": "env >environment"}, SLURM_GPUS_PER_NODE=asked)
    job.environment = {name: value for name, value in job.environment.items() if name != "SLURM_GPUS_ON_NODE"}
    job.environment |= {"SLURM_GPUS_ON_NODE": given} if given else {}
    assert job.run("submit.slr")[0] == 0
    assert f"SLURM_GPUS_PER_NODE={given or asked}" in (tmp_path / "environment").read_text().splitlines()
    assert f"--nproc_per_node={processes}" in job.arguments("srun")[0]


def test_containers_started_by_a_prefix_or_by_srun(tmp_path):
    (tmp_path / "prefix").mkdir()
    job = fake_job(tmp_path / "prefix", {"srun": SRUN_ON_ONE_NODE, "box": '"${@:3}"'}, LAUNCHER_PREFIX="box exec x.sif")
    assert job.run("submit.slr")[0] == 0
    check, torchrun = job.arguments("box")
    assert check[:4] == ["exec", "x.sif", "python", "train.py"] and check[-1] == "--print-config"
    assert torchrun[:5] == ["exec", "x.sif", "python", "-m", "tools.torchrun"]

    (tmp_path / "srun").mkdir()
    job = fake_job(tmp_path / "srun", SRUN_OPTIONS="--container-image=x --mpi=none")
    (tmp_path / "srun/commands/python").unlink()  # only in the container
    assert job.run("submit.slr")[0] == 0
    (srun,) = job.arguments("srun")
    assert srun.index("--container-image=x") < srun.index("--mpi=none") < srun.index("bash")


CHECK_NODE = ROOT / "examples/slurm/check_node.sh"
FAILS = """echo "fail  pcie           4 of 16 lanes
                     -> reseat the card
fail  gpu faults     Xid 79; Xid 48
fail: 0 ok, 0 warn, 2 fail"; exit 2"""
PASSES, WARNS = 'echo "ok: 2 ok, 0 warn, 0 fail"', 'echo "warn: 1 ok, 1 warn, 0 fail"; exit 1'
MISTYPED, CRASHES, HANGS = "echo usage: doctor >&2; exit 2", "echo Traceback >&2; exit 1", "sleep 20"
OURS, BY_A_HUMAN = (
    "check_node.sh: pcie 4 of 16 lanes [root@2026-11-25T10:00:00]",
    "swap a fan [root@2026-11-25T10:00:00]",
)
WRONG_RESULTS = "check_node.sh: fingerprint 1 of the fingerprints differ [root@2026-11-25T10:00:00]"
DIFFERS = """for gpu in 0 1 2 3 4 5; do
echo "fail  slow device    GPU $gpu is slower than the median of the others"; done
echo "fail  fingerprint    1 of the fingerprints differ
fail: 0 ok, 0 warn, 7 fail"; exit 2"""
SLOW = "; ".join(f"slow device GPU {gpu} is slower than the median of the others" for gpu in range(6))
STAYS = ["State=DRAIN", f"Reason=check_node.sh: {f'fingerprint: {SLOW}'[:300]}"]
DRAINS = ["State=DRAIN", "Reason=check_node.sh: pcie 4 of 16 lanes; gpu faults Xid 79; Xid 48"]


@pytest.mark.parametrize(
    ("drained", "doctor", "role", "status", "update"),
    [
        ("", FAILS, "prolog_slurmd", 1, DRAINS),
        ("", FAILS, "epilog_slurmd", 0, DRAINS),
        ("", DIFFERS, "epilog_slurmd", 0, STAYS),
        (OURS, DIFFERS, "mended", 0, STAYS),
        *((reason, DIFFERS, "mended", 0, []) for reason in (BY_A_HUMAN, WRONG_RESULTS)),
        (BY_A_HUMAN, FAILS, "prolog_slurmd", 1, []),
        (OURS, PASSES, "mended", 0, ["State=RESUME"]),
        (OURS, WARNS, "epilog_slurmd", 0, ["State=RESUME"]),
        *(("", doctor, "prolog_slurmd", 0, []) for doctor in (PASSES, WARNS, MISTYPED, CRASHES, HANGS)),
        *((OURS, doctor, "mended", 0, []) for doctor in (FAILS, MISTYPED, CRASHES, HANGS)),
        *((reason, PASSES, "mended", 0, []) for reason in (BY_A_HUMAN, WRONG_RESULTS)),
    ],
)
def test_the_doctor_drains_a_node_and_returns_only_its_own(tmp_path, drained, doctor, role, status, update):
    state = f"State=IDLE+DRAIN ThreadsPerCore=1 Reason={drained}" if drained else "State=IDLE ThreadsPerCore=1"
    make_command(tmp_path, "logger", "")
    make_command(tmp_path, "doctor", doctor)
    asked = f'[[ $1 != update ]] || printf "%s\\n" "${{@:2}}" >{tmp_path}/update'
    make_command(tmp_path, "scontrol", f'echo "NodeName=node1 CoresPerSocket=1 {state}"\n{asked}')
    limit = "0.5" if doctor == HANGS else "20"
    environment = {"PATH": f"{tmp_path}:/usr/bin:/bin", "SLURMD_NODENAME": "node1", "SLURM_SCRIPT_CONTEXT": role}
    settings = {"DOCTOR": "doctor", "DOCTOR_SECONDS": limit}
    done = subprocess.run(["bash", CHECK_NODE], env=environment | settings, check=False)
    assert done.returncode == status
    file = tmp_path / "update"
    assert (file.read_text().splitlines() if file.exists() else []) == (["NodeName=node1", *update] if update else [])


@pytest.mark.parametrize(("role", "status"), [("prolog_slurmd", 1), ("epilog_slurmd", 0), ("health", 0)])
def test_without_scontrol_a_node_check_says_so_and_a_prolog_still_checks(tmp_path, role, status):
    make_command(tmp_path, "logger", f'echo "$*" >>{tmp_path}/said')
    make_command(tmp_path, "doctor", FAILS)
    make_command(tmp_path, "scontrol", "exit 127")
    no_command = {"BASH_FUNC_command%%": "() { return 1; }"}  # a function of this name, so that none is found
    environment = {"PATH": f"{tmp_path}:/usr/bin:/bin", "SLURMD_NODENAME": "node1", "SLURM_SCRIPT_CONTEXT": role}
    done = subprocess.run(["bash", CHECK_NODE], env=environment | {"DOCTOR": "doctor"} | no_command, check=False)
    assert done.returncode == status
    assert "node1: there is no scontrol in " in (tmp_path / "said").read_text()


# On a real cluster, whose nodes have two fake GPUs each. PROCESSES_PER_NODE=1 saves time.


def slurm(test: Callable[..., None]) -> Callable[..., None]:
    """Mark tests that share one cluster and run one after another (with --dist=loadgroup)."""
    return pytest.mark.xdist_group("slurm")(pytest.mark.timeout(600)(pytest.mark.slurm(test)))


# Long enough to be interrupted: about 5 s on two idle cores.
EPOCHS, BATCHES = 3, 30
OPTIONS = ("--cpus-per-task=2", "--gpus-per-node=2")


@pytest.fixture(scope="module")
def shared_cluster() -> Iterator[SlurmCluster]:
    """Three nodes: two for the jobs, one spare."""
    reason = why_not()
    if reason:
        pytest.skip(reason)
    # a short path: the length of Unix socket paths is limited
    with tempfile.TemporaryDirectory(prefix="slurm-") as folder, SlurmCluster(Path(folder), 3) as running:
        yield running


@pytest.fixture
def cluster(shared_cluster: SlurmCluster) -> Iterator[SlurmCluster]:
    """The cluster; jobs left by a failed test are cancelled."""
    yield shared_cluster
    shared_cluster.client("scancel", "--user=root")


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The project's folder as jobs see it; their output stays out of the real one."""
    folder = tmp_path_factory.mktemp("project")
    for name in ["train.py", "config", "models", "tools", "utils", *SCRIPTS]:
        (folder / name).symlink_to(ROOT / name)
    return folder


class Run:
    """One submitted training: its job, its log, its run folder."""

    def __init__(
        self,
        cluster: SlurmCluster,
        project: Path,
        name: str,
        script: str = "submit_multinode.slr",
        options: tuple[str, ...] = OPTIONS,
        settings: Mapping[str, object] | None = None,
        **environment: str,
    ) -> None:
        self.cluster, self.project, self.folder = cluster, project, project / "expts" / name
        long = {"limit_train_batches": BATCHES, "max_epochs": EPOCHS, "log_freq": 10}
        workers = {"data_loader": "torchvision", "num_data_workers": 1}  # Slurm's signals reach loader workers too
        values = {**TINY, **long, **workers, **(settings or {})}
        arguments = [f"--run-dir={self.folder}", *(f"--set={key}={value}" for key, value in values.items())]
        base = {
            "OMP_NUM_THREADS": "1",
            "PATH": f"{PYTHON}:{os.environ['PATH']}",
            "PROCESSES_PER_NODE": "1",
            "SLURM_WAIT": "60",
        }
        self.job = cluster.submit(
            project / script, "--config=bs128-opt", *arguments, options=options, cwd=project, **(base | environment)
        )

    def log(self, job: int | None = None) -> str:
        return "".join(path.read_text() for path in self.project.glob(f"*-{job or self.job}.out"))

    def wait_for(self, text: str, seconds: float = 120) -> None:
        try:
            wait_until(repr(text), seconds, lambda: text in self.log())
        except AssertionError as error:
            raise AssertionError(f"{error} in the log:\n{self.log()}") from None

    def end(self, state: str) -> dict[str, str]:
        """Wait for the job's end, check its state, return its fields."""
        fields = self.cluster.wait(self.job, 300)
        assert fields["JobState"] == state, f"{fields['JobState']} {fields['ExitCode']}, not {state}:\n{self.log()}"
        return fields

    def epochs(self) -> list[dict[str, Any]]:
        """Return the records of the epochs without the measured times."""
        records = read_records(self.folder / "metrics.jsonl", "epoch")
        return [{key: value for key, value in record.items() if "sec" not in key} for record in records]


@pytest.fixture(scope="module")
def uninterrupted(shared_cluster: SlurmCluster, project: Path) -> Run:
    """A finished run on two nodes, one process each."""
    run = Run(shared_cluster, project, "uninterrupted")
    assert run.end("COMPLETED")["ExitCode"] == "0:0"
    return run


@slurm
def test_two_nodes_complete(uninterrupted):
    assert "batch 32 = 2 rank(s)" in uninterrupted.log()
    assert [row["epoch"] for row in uninterrupted.epochs()] == [1, 2, 3]
    assert not list(uninterrupted.folder.parent.glob(".slurm-*"))


@slurm
def test_a_bare_srun_trains_like_the_script(cluster, project, uninterrupted):
    header = "#!/bin/bash\n#SBATCH --nodes=2 --ntasks-per-node=1 --output=%x-%j.out\n"
    (project / "bare.slr").write_text(header + 'srun python train.py "$@"\n')
    run = Run(cluster, project, "bare", "bare.slr")
    assert run.end("COMPLETED")["ExitCode"] == "0:0"
    assert "batch 32 = 2 rank(s)" in run.log()
    assert run.epochs() == uninterrupted.epochs()


@slurm
@pytest.mark.parametrize(
    ("partition", "requeued_by"), [("main", "script"), ("low", "slurm"), ("low-grace", "script")],
    ids=["SIGUSR1", "preempted", "preempted-with-grace"],
)  # fmt: skip
def test_stopped_training_resumes_to_the_same_end(cluster, project, uninterrupted, tmp_path, partition, requeued_by):
    run = Run(cluster, project, f"stopped-{partition}", options=(*OPTIONS, f"--partition={partition}"))
    run.wait_for("Epoch: 1, Iteration: ")
    if partition == "main":
        cluster.cancel(run.job, "-b", "-s", "USR1")  # as before the time limit
    else:
        make_command(tmp_path, "urgent", "true")
        cluster.submit(tmp_path / "urgent", options=("--nodes=3", "--exclusive", "--output=/dev/null"), cwd=tmp_path)
    fields = run.end("COMPLETED")
    assert fields["Restarts"] == "1" and fields["ExitCode"] == "0:0"
    assert "with everything saved" in run.log() and "Resuming from" in run.log()
    assert (f"requeued as job {run.job}" in run.log()) == (requeued_by == "script")
    assert run.epochs() == uninterrupted.epochs()


@slurm
def test_cancelled_saves_and_stays_cancelled(cluster, project):
    run = Run(cluster, project, "cancelled")
    run.wait_for("Epoch: 1, Iteration: ")
    cluster.cancel(run.job)
    run.wait_for("with everything saved; run the same command again to resume")
    if cluster.cgroup:  # otherwise the signal also reaches srun, which does not return before the script is killed
        run.wait_for("this script does not requeue the job (COMPLETING); if Slurm does not either,\n")
        run.wait_for("to resume: sbatch submit_multinode.slr ")
    time.sleep(8)  # longer than a requeued job would wait
    fields = run.end("CANCELLED")
    assert fields["Restarts"] == "0"


@slurm
def test_two_jobs_share_a_node(cluster, project):
    settings = {"limit_train_batches": 4, "max_epochs": 1}
    options = ("--cpus-per-task=2", "--gpus-per-node=1", "--nodelist=node1")
    runs = [
        Run(cluster, project, name, "submit.slr", options, settings, PROCESSES_PER_NODE="2")
        for name in ["left", "right"]
    ]
    for run in runs:
        assert run.end("COMPLETED")["ExitCode"] == "0:0"
        assert "batch 32 = 2 rank(s)" in run.log()
    left, right = (cluster.job(run.job) for run in runs)
    assert left["NodeList"] == right["NodeList"] == "node1"
    assert left["StartTime"] < right["EndTime"] and right["StartTime"] < left["EndTime"]


@slurm
def test_node_that_never_starts_is_named(cluster, project, tmp_path):
    # srun starts bash; on one node it hangs, as with a lost file system
    make_command(tmp_path, "bash", '[[ $SLURMD_NODENAME != node2 ]] || sleep 100\nexec /bin/bash "$@"')
    path = f"{tmp_path}:{PYTHON}:{os.environ['PATH']}"
    options = (*OPTIONS, "--nodelist=node[1-2]")
    run = Run(cluster, project, "never", options=options, PATH=path, JOIN_TIMEOUT="5", SLURM_WAIT="2")
    run.end("FAILED")
    assert "Nodes where nothing started: node2\n" in run.log() and "all nodes must reach" not in run.log()


@slurm
def test_without_scontrol_the_printed_command_resumes(cluster, project, tmp_path):
    link_commands(tmp_path, [*TOOLS, "srun", "sbatch", "hostname", "uname"])
    make_command(tmp_path, "python", f'exec {PYTHON}/python "$@"')
    run = Run(cluster, project, "command", "submit.slr", PATH=str(tmp_path))
    run.wait_for("Epoch: 1, Iteration: ")
    cluster.cancel(run.job, "-b", "-s", "USR1")
    assert run.end("FAILED")["ExitCode"] == "75:0"
    (command,) = re.findall(r"to resume: sbatch (submit\.slr .*)", run.log())
    script, *arguments = shlex.split(command)
    environment = {"PATH": str(tmp_path), "PROCESSES_PER_NODE": "1"}
    again = cluster.submit(project / script, *arguments, options=OPTIONS, cwd=project, **environment)
    assert cluster.wait(again, 300)["JobState"] == "COMPLETED", run.log(again)
    assert "Resuming from" in run.log(again)


@slurm
@pytest.mark.parametrize(
    "options",
    [
        *(["--nodes=2", "--gres=gpu:2"], ["--exclusive"]),
        ["--gpus-per-task=2", "--gpus=2", "--gpus-per-node=2"],
    ],
    ids=" ".join,
)
def test_step_sees_all_gpus_of_the_job(cluster, project, tmp_path, options):
    """Whatever option asks sbatch for two GPUs; the #SBATCH line asks for one."""
    make_command(tmp_path, "python", '[[ $1 == train.py ]] || echo "$SLURMD_NODENAME has GPUs $SLURM_STEP_GPUS: $*"')
    path = f"{tmp_path}:{os.environ['PATH']}"
    log = tmp_path / "log"
    all_options = (*options, "--cpus-per-task=2", f"--output={log}")
    job = cluster.submit(project / "submit.slr", options=all_options, cwd=project, PATH=path)
    assert cluster.wait(job, 60)["JobState"] == "COMPLETED", log.read_text()
    nodes = re.findall(r"^node\d has GPUs 0,1: -m tools.torchrun .*--nproc_per_node=2 ", log.read_text(), re.M)
    assert len(nodes) == (2 if "--nodes=2" in options else 1), log.read_text()


@slurm
def test_lost_node_is_replaced(cluster, project, uninterrupted):
    run = Run(cluster, project, "lost-node")
    run.wait_for("Epoch: 2, Iteration: ")
    assert cluster.job(run.job)["NodeList"] == "node[1-2]"
    cluster.kill_node("node2")
    fields = run.end("COMPLETED")
    assert fields["Restarts"] == "1" and fields["NodeList"] == "node[1,3]"
    assert run.epochs() == uninterrupted.epochs()
    cluster.boot_node("node2")
    wait_until("idle node2", 60, lambda: cluster.node_states()["node2"] == "idle")


@slurm
def test_node_that_reboots_before_slurm_notices_is_requeued(cluster, project, uninterrupted):
    run = Run(cluster, project, "rebooted", options=(*OPTIONS, "--nodelist=node[1-2]"), SLURM_WAIT="5")
    run.wait_for("Epoch: 2, Iteration: ")
    cluster.kill_node("node2")
    cluster.boot_node("node2")
    fields = run.end("COMPLETED")
    assert fields["Restarts"] == "1" and f"requeued as job {run.job}" in run.log()
    assert run.epochs() == uninterrupted.epochs()
    assert not list(run.folder.parent.glob(f"*-{run.job}*"))  # neither logs of torchrun nor the status folder


# The doctor with one check, which fails as long as a file exists.
ONE_CHECK = """
import pathlib, sys
from tools.doctor import __main__ as doctor
from tools.doctor.findings import judge

broken = pathlib.Path(sys.argv[1])
doctor.examine = lambda *_: [judge("pcie", "16 lanes", "reseat the card", fail=broken.exists())]
sys.exit(doctor.main(["--config=quickstart", "--set=device=cpu"]))
"""


@slurm
def test_a_failed_check_drains_the_node_until_it_is_mended(tmp_path):
    if reason := why_not():
        pytest.skip(reason)
    (tmp_path / "one_check.py").write_text(ONE_CHECK)
    (broken := tmp_path / "broken-node1").touch()
    check = tmp_path / "check"
    settings = f"Prolog={check}\nEpilog={check}\nHealthCheckProgram={check}\nHealthCheckInterval=2\n"
    with (
        tempfile.TemporaryDirectory(prefix="slurm-") as folder,
        SlurmCluster(Path(folder), 2, f"{settings}HealthCheckNodeState=IDLE") as cluster,
    ):

        def node(name: str) -> tuple[str, str]:
            shown = cluster.client("sinfo", "--noheader", f"--nodes={name}", "--partition=main", "--format=%T %E")
            state, _, reason = shown.strip().partition(" ")
            return state, reason

        make_command(tmp_path, "check", f"""
            export SLURM_CONF={cluster.env["SLURM_CONF"]} PYTHONPATH={ROOT} OMP_NUM_THREADS=1
            broken={tmp_path}/broken-${{SLURMD_NODENAME:-$(hostname -s)}}
            export DOCTOR="{sys.executable} {tmp_path}/one_check.py $broken"
            exec {CHECK_NODE} "$@"
        """)  # fmt: skip
        make_command(tmp_path, "job", "echo ran")
        options = ("--nodelist=node1", f"--output={tmp_path}/log")
        job = cluster.submit(tmp_path / "job", options=options, cwd=tmp_path)
        wait_until("drained node1", 60, lambda: node("node1")[0] == "drained")
        assert node("node1")[1] == "check_node.sh: pcie 16 lanes"
        assert cluster.wait(job, 60, "PENDING")["Restarts"] == "1"
        assert "ran" not in (tmp_path / "log").read_text().splitlines()

        cluster.client("scontrol", "update", "NodeName=node2", "State=DRAIN", "Reason=swap a fan")
        broken.unlink()
        wait_until("idle node1", 60, lambda: node("node1")[0] == "idle")
        cluster.client("scontrol", "release", str(job))
        assert cluster.wait(job, 120)["JobState"] == "COMPLETED"
        assert "ran" in (tmp_path / "log").read_text().splitlines()
        assert node("node2") == ("drained", "swap a fan")
