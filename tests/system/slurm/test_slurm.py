"""The job scripts and deploy/*.sh: with fake Slurm commands, and (marked slurm) on a real cluster."""

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
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.conftest import CIFAR100, ROOT, TINY
from tests.processes import make_command, wait_until
from tests.system.slurm.cluster import OPTIONS, SlurmCluster, SlurmRun, link_project, why_not
from utils.config.command_line import parse_arguments

SCRIPTS = ["submit.slr", "submit_multinode.slr"]
# All commands that the scripts may need on PATH, besides Slurm's and python.
TOOLS = ["bash", "cat", "dirname", "env", "flock", "grep", "ls", "mkdir", "mktemp", "mv", "realpath", "rm", "rmdir"]
TOOLS += ["sed", "seq", "sleep", "touch"]

# What fake commands do after recording their arguments, in bash.
IN_STATE = '[[ $1 != --oneliner ]] || echo "JobId=4 JobState={} Reason=None"'
RUNNING, ENDING = IN_STATE.format("RUNNING"), IN_STATE.format("COMPLETING")
COMPONENTS = RUNNING.replace("JobId=4", "JobId=4 HetJobId=4") + f"; {RUNNING.replace('JobId=4', 'JobId=5 HetJobId=4')}"
REFUSES = f"[[ $1 != requeue ]] || exit 1; {RUNNING}"
HOSTNAMES = f"""[[ $* != "show hostnames node[1-2]" ]] || printf "node%s\\n" 1 2; {RUNNING}"""
FAKE_COMMANDS = {
    "srun": 'echo 0 >"$TRAIN_EXIT_STATUS_FILE"',
    "scontrol": RUNNING,
    "python": "",
    "sleep": f'[[ $1 == 5 ]] || exec {shutil.which("sleep")} "$1"',  # not between questions to Slurm
}
# srun that runs slurm_node.sh on each node, one after another.
STARTS_NODES = """
env >environment
until [[ $1 == bash ]]; do shift; done
for node in $(seq "$SLURM_JOB_NUM_NODES"); do SLURMD_NODENAME=node$node "$@"; done
"""
ON_ONE_NODE = {"SLURM_JOB_ID": "4", "SLURM_JOB_NODELIST": "node1", "SLURM_JOB_NUM_NODES": "1"}
ON_ONE_NODE |= {"SLURM_GPUS_ON_NODE": "2", "SLURMD_NODENAME": "node1"}
ON_TWO_NODES = ON_ONE_NODE | {"SLURM_JOB_NODELIST": "node[1-2]", "SLURM_JOB_NUM_NODES": "2", "SLURM_GPUS_ON_NODE": "8"}
IN_ARRAY = {"SLURM_ARRAY_JOB_ID": "3", "SLURM_ARRAY_TASK_ID": "1"}


def silent(times, then=RUNNING):
    """A scontrol that fails this many times and then answers."""
    return f'echo >>asked; (($(grep -c "" asked) > {times})) || exit 1\n{then}'


def reports(status, after):
    """A srun whose train.py reports one status, and that exits with another."""
    return f'echo {status} >"$TRAIN_EXIT_STATUS_FILE"; exit {after}'


def stops(number, gets):
    """A srun during which the batch shell, and for TERM the step too, get a signal. It saves as train.py does if it
    `gets` these signals in total; torchrun turns its status 75 into 1."""
    return f"""
        trap 'echo USR1 >>signals' USR1
        trap 'echo TERM >>signals' TERM
        kill -{number} $PPID
        [[ {gets} != TERM ]] || kill -TERM $$
        until [[ -s signals ]]; do ((SECONDS < 60)) && sleep 0.05 || exit; done
        sleep 0.3
        [[ $(cat signals) != {gets} ]] || echo 75 >"$TRAIN_EXIT_STATUS_FILE"
        exit 1"""


class FakeJob:
    """A batch script run with fakes of every command except TOOLS; `calls` holds the fakes' arguments."""

    def __init__(self, folder, fakes=None, /, **environment):
        self.folder, self.calls, commands = folder, folder / "calls", folder / "commands"
        self.calls.mkdir(parents=True)
        commands.mkdir()
        link_commands(commands, TOOLS)
        for name, action in {**FAKE_COMMANDS, **(fakes or {})}.items():
            if action is not None:
                make_command(commands, name, f'printf "%s\\0" "$@" >"{self.calls}/{name}.$$"\n{action}')
        for name in ["train.py", "deploy", "tools", *SCRIPTS]:
            (folder / name).symlink_to(ROOT / name)
        self.environment = {"PATH": str(commands), **ON_ONE_NODE, **environment}

    def run(self, script, *args, cwd=None):
        """Run to the end; return exit status and stderr."""
        command, how = ["bash", str(self.folder / script), *args], {"stderr": subprocess.PIPE, "text": True}
        done = subprocess.run(command, cwd=cwd or self.folder, env=self.environment, timeout=120, check=False, **how)
        return done.returncode, done.stderr

    def lines(self, file):
        return (self.folder / file).read_text().splitlines()

    def arguments(self, command):
        """Return the arguments of each call of the command."""
        calls = sorted(self.calls.glob(f"{command}.*"), key=lambda call: call.stat().st_mtime_ns)
        return [call.read_text().split("\0")[:-1] for call in calls]

    def requeued(self):
        """Return the name of the job that the script has requeued, or an empty text."""
        return "".join(words[1] for words in self.arguments("scontrol") if words[0] == "requeue")

    def torchrun(self):
        """Return the arguments of tools.torchrun on each node: its log and torchrun's."""
        return [words[2:] for words in self.arguments("python") if words[:2] == ["-m", "tools.torchrun"]]


def link_commands(folder, names):
    """Link these commands into the folder."""
    for name in names:
        target = shutil.which(name)
        assert target, f"{name} is not on PATH"
        (folder / name).symlink_to(target)


def test_headers_differ_only_in_requested_resources():
    pattern, texts = r"^{}SBATCH --([a-z-]+)(?:=(\S+))?$", [(ROOT / script).read_text() for script in SCRIPTS]
    one, many = (dict(re.findall(pattern.format("#"), text, re.MULTILINE)) for text in texts)
    differ = {key for key in one.keys() | many.keys() if one.get(key) != many.get(key)}
    assert differ == {"nodes", "gpus-per-node", "cpus-per-task", "exclusive"}
    assert one["signal"] == "B:USR1@120" and "/" not in one["output"]  # a folder would have to exist before sbatch
    for text in texts:
        off = dict(re.findall(pattern.format("##"), text, re.MULTILINE))
        assert list(off) == ["account", "partition", "qos", "constraint", "gres"]


SITE = {"TRAIN_CONFIG": "quickstart", "PROCESSES_PER_NODE": "3", "NETWORK_INTERFACE": "hsn0", "MAX_RESTARTS": "2"}
ONE_NODE = (
    "--nodes=1 --ntasks=1 --ntasks-per-node=1 --kill-on-bad-exit=0 --nnodes=1 --nproc_per_node=2 --max_restarts=0 "
    "--rdzv_backend=c10d --rdzv_id=4 --signals-to-handle=SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1 --config=bs128-opt"
)
TWO_NODES = (
    "--nodes=2 --ntasks=2 --ntasks-per-node=1 --kill-on-bad-exit=0 --nnodes=2 --nproc_per_node=8 --max_restarts=0 "
    "--rdzv_endpoint=node1:10004 --config=bs2048-warmup-opt"
)
AT_SITE = ON_TWO_NODES | SITE | {"ACTIVATE": "false; false | true; export ACTIVATED=$UNSET_VARIABLE,yes"}
AT_SITE_STEP = "ACTIVATED=,yes NCCL_SOCKET_IFNAME=hsn0 GLOO_SOCKET_IFNAME=hsn0 TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1"
NO_GPU = {"SLURM_GPUS_PER_NODE": "0", "SLURM_GPUS_ON_NODE": ""}
STARTS = {  # environment of the job; options of srun and torchrun; environment of the step
    "one node": ({}, ONE_NODE, "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1"),
    "two nodes": (ON_TWO_NODES, TWO_NODES, ""),
    "site": (AT_SITE, "--config=quickstart --nproc_per_node=3 --max_restarts=2", AT_SITE_STEP),
    # with sbatch --gres=gpu:2, srun would use the number in the #SBATCH line
    "two GPUs instead of one": ({"SLURM_GPUS_PER_NODE": "1"}, "--nproc_per_node=2", "SLURM_GPUS_PER_NODE=2"),
    "no GPU": (NO_GPU, "--nproc_per_node=1", "SLURM_GPUS_PER_NODE=0"),
    # ports of successive jobs differ and are below ephemeral ports
    "lowest port": (ON_TWO_NODES | {"SLURM_JOB_ID": "20000"}, "--rdzv_endpoint=node1:10000", ""),
    "container": ({"SRUN_OPTIONS": "--container-image=x --mpi=none"}, "--container-image=x --mpi=none", ""),
}


@pytest.mark.parametrize("name", STARTS)
def test_one_srun_starts_torchrun_on_all_nodes(tmp_path, name):
    environment, options, step = STARTS[name]
    job = FakeJob(tmp_path, {"srun": STARTS_NODES}, **environment, SLURM_CPUS_PER_TASK="8")
    script = SCRIPTS[environment.get("SLURM_JOB_NUM_NODES") == "2"]
    assert job.run(script, "--config=other", "--set", "a=b  c")[0] == 0
    (srun,) = job.arguments("srun")
    assert set(options.split()) <= set(srun)
    # the default comes first, so that a --config given to sbatch wins
    assert srun[-5:-4] == ["train.py"] and srun[-3:] == ["--config=other", "--set", "a=b  c"]
    assert len(job.torchrun()) == int(job.environment["SLURM_JOB_NUM_NODES"])
    assert all(words[-1] == "a=b  c" for words in job.torchrun())
    assert set(step.split()) <= set(job.lines("environment"))
    assert not any(line.startswith("SLURM_CPUS_PER_TASK=") for line in job.lines("environment"))


def test_nodes_know_their_address_and_the_head_and_workers_of_one_node_meet_in_a_file(tmp_path):
    job = FakeJob(tmp_path / "2", {"srun": STARTS_NODES}, **ON_TWO_NODES, HOST_SUFFIX="-ib0", JOIN_TIMEOUT="7")
    assert job.run("submit_multinode.slr")[0] == 0
    for node, is_host, words in zip(["node1", "node2"], ["true", "false"], job.torchrun(), strict=True):
        assert f"--local_addr={node}-ib0" in words
        assert f"--rdzv_conf=store_type=tcp,is_host={is_host},join_timeout=7,read_timeout=7" in words
        assert "--rdzv_endpoint=node1-ib0:10004" in words
    job = FakeJob(tmp_path / "1", {"srun": STARTS_NODES})
    assert job.run("submit.slr")[0] == 0
    ((log, *words),) = job.torchrun()
    assert log == str(tmp_path / "1/expts/torchrun-4-node1.log")
    values = dict(word.split("=", 1) for word in words if "=" in word)
    assert values["--rdzv_conf"].startswith("store_type=file,keep_alive_interval=100000,is_host=true,")
    endpoint = Path(values["--rdzv_endpoint"])
    assert endpoint.is_absolute() and not endpoint.exists()


def test_containers_started_by_a_prefix_or_by_srun(tmp_path):
    job = FakeJob(tmp_path / "1", {"srun": STARTS_NODES, "box": '"${@:3}"'}, LAUNCHER_PREFIX="box exec x.sif")
    assert job.run("submit.slr")[0] == 0
    check, torchrun = job.arguments("box")
    assert check[:4] == ["exec", "x.sif", "python", "train.py"] and check[-1] == "--print-config"
    assert torchrun[:5] == ["exec", "x.sif", "python", "-m", "tools.torchrun"]
    job = FakeJob(tmp_path / "2", {"python": None}, SRUN_OPTIONS="--container-image=x")  # python is in the container
    assert job.run("submit.slr")[0] == 0


@pytest.mark.parametrize(("given", "folder"), [("%j/100%%/", "4/100%"), ("%%j%%", "%j%")])
def test_data_is_staged_on_each_node_before_it_trains_from_there(tmp_path, monkeypatch, given, folder):
    at_once = STARTS_NODES.replace('"$@";', '"$@" &') + "wait"  # here both nodes have the same disk
    fakes = {"srun": at_once, "rsync": "mkdir busy && sleep 0.3 && rmdir busy"}
    job = FakeJob(tmp_path, fakes, **ON_TWO_NODES, STAGE_DATA=f"/lustre/%j:{tmp_path}/{given}")
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
    (labels := original / "labels.txt").write_text("cat\n")
    (original / "train/wolf").symlink_to(original / "train/cat")
    (original / "train/cat").chmod(0o555)
    job = FakeJob(tmp_path, {"srun": STARTS_NODES}, STAGE_DATA=f"{original}:{copy}")
    link_commands(tmp_path / "commands", ["rsync"])
    jpg, older = copy / "train/cat/1.jpg", "touch -d @1"
    for change in ("true", f"echo dog >{labels}; {older} {labels}", f"rm {labels}", f"echo half >{jpg}; {older} {jpg}"):
        subprocess.run(change, shell=True, check=True)
        assert job.run("submit.slr")[0] == 0
        assert subprocess.run(["diff", "-r", "--exclude=.staged", original, copy], check=False).returncode == 0
    assert (copy / "train/wolf/1.jpg").read_bytes() == b"a picture" and not (copy / "train/wolf").is_symlink()
    assert (copy / "train/cat").stat().st_mode & 0o200
    (copy / ".staged").unlink()  # now it could be the user's
    (original / "train/cat").chmod(0o755)
    (original / "train/cat/1.jpg").unlink()
    status, output = job.run("submit.slr")
    assert status == 2 and f"{copy} exists, but is no copy by this script" in output
    assert jpg.exists()


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
    job = FakeJob(tmp_path, {"srun": STARTS_NODES, "apptainer": apptainer, "rsync": ""}, **settings)
    status, output = job.run("submit.slr")
    assert status == 0, output
    assert len(job.torchrun()) == 1
    assert set(settings.get("SRUN_OPTIONS", "").split()) <= set(job.arguments("srun")[0])
    assert ("STAGE_DATA" in settings) == bool(job.arguments("rsync"))


class Case(NamedTuple):
    """How a job ends: exit status, a part of stderr, the job that is requeued, and whether srun starts."""

    status: int
    says: str = ""
    requeued: str = ""
    starts: bool = True
    fakes: Mapping[str, str | None] = {}
    environment: Mapping[str, str] = {}
    words: tuple[str, ...] = ()  # for train.py


def refused(says, words=(), **environment):
    return Case(2, says, starts=False, environment=environment, words=words)


def stopped(number, gets, scontrol, requeued, says="", **environment):
    """TERM goes to the step itself only if Slurm is ending the job: srun would kill its tasks on SIGTERM."""
    says = says or f"saved\nsubmit.slr: requeued as job {requeued}\n"
    fakes = {"srun": stops(number, gets), "scontrol": scontrol}
    return Case(75, says, requeued, True, fakes, environment, ("--set", "a=b c", "--resume", "never"))


def no_torchrun(log, reported, restarts, status, requeued, says="", save=True):
    """torchrun of node2 is gone, as after a node that rebooted before Slurm noticed. Its log ends with `log`; a
    checkpoint was saved since this start, or only before it."""
    report = f'echo {reported} >"$TRAIN_EXIT_STATUS_FILE"; ' if reported else ""
    srun = f"""
        {report} cd "$PWD/expts" && touch .slurm-4/nodes/{{node1,node2}} {SAVED if save else ""}
        echo Traceback >torchrun-4-node1.log; echo {log} >torchrun-4-node2.log; exit 137"""
    # files of earlier starts and jobs do not count
    earlier = f"mkdir -p expts/{SAVED.rpartition('/')[0]}; touch expts/{SAVED}; echo joins >expts/torchrun-4-node3.log"
    environment = ON_TWO_NODES | {"SLURM_RESTART_COUNT": restarts, "ACTIVATE": earlier}
    return Case(status, says, requeued, fakes={"srun": srun, "scontrol": HOSTNAMES}, environment=environment)


EARLIER = ("submit.slr: start 1: x", "oom_kill", "submit.slr: start 3: x")


def out_of_memory(line, status=137, reported="", kernel="", says="", before=EARLIER):
    """The job's output ends with `line`, after the lines `before`; torchrun's log has no traceback."""
    report = f'echo {reported} >"$TRAIN_EXIT_STATUS_FILE"; ' if reported else ""
    srun = f"""
        {report} touch "$PWD/expts/.slurm-4/nodes/node1"; echo joins >expts/torchrun-4-node1.log
        printf "%s\\n" {shlex.join(before)} "{line}" >output; exit 137"""
    scontrol = f"{RUNNING.replace('Reason=None', 'StdErr=$PWD/output StdOut=x')}; [[ $2 != hostnames ]] || echo node1"
    fakes = {"srun": srun, "scontrol": scontrol, "dmesg": f"echo '{kernel}'"}
    return Case(status, says or MEMORY, fakes=fakes, environment={"SLURM_RESTART_COUNT": "2"})


NUMBER = "expected a whole number above 0 (MASTER_PORT: below 65536; MAX_RESTARTS: also 0)"
SAVED = "bs2048-warmup-opt/checkpoints/step-1.pt"
MEMORY = (
    "submit.slr: memory ran out, and a process was killed: sbatch --mem=..., fewer num_data_workers, or fewer "
    "processes per node\n"
)
LOST = "torchrun was killed, or its node is gone; nothing saved since the last checkpoint. Its log: "
SIGNAL = "ended by a signal that train.py could not handle: nothing saved since the last checkpoint\n"
ELSE = "; if Slurm does not either,\n"
RESUMES = "submit.slr: to resume: sbatch submit.slr --set a=b\\ c --resume never --resume auto\n"
NO_PYTHON = "python cannot run train.py: set ACTIVATE or LAUNCHER_PREFIX"
ODD_NODES = {"SLURM_JOB_NODELIST": "gpu[007-009]-b,login1", "SLURM_JOB_NUM_NODES": "4", "SLURMD_NODENAME": "gpu007-b"}
ONE_STARTS = 'touch "$PWD/expts/.slurm-4/nodes/gpu008-b"; exit 1'
ODD_NAMES = '[[ $* == "show hostnames gpu[007-009]-b,login1" ]] && printf "%s\\n" gpu007-b gpu008-b gpu009-b login1'
NODES = {"srun": STARTS_NODES, "scontrol": HOSTNAMES, "scancel": ""}
CANNOT_TOUCH = f'[[ $1 != */node2 ]] || exit 1; exec {shutil.which("touch")} "$1"'
IN_A_STEP = ON_TWO_NODES | {"SLURM_STEP_ID": "0"}
COPY = {"STAGE_DATA": "/lustre/data:FOLDER/data"}
CASES = {
    # the exit status is the training's own, also if a signal ends torchrun after train.py has finished
    "finished, torchrun fails": Case(0, fakes={"srun": reports("0", 1)}),
    "bad configuration": Case(2, fakes={"srun": reports("2", 1)}),
    "killed": Case(137, "train.py failed, was killed or never started", fakes={"srun": "exit 137"}),
    # as in a container without the project's folder: 127 comes from srun itself, not from an interrupted `wait`
    "no bash": Case(127, "train.py failed, was killed or never started", fakes={"srun": "exit 127"}),
    # as in the grace time before a preemption: Slurm does not requeue a job that exits within it
    "steps are stopped": Case(75, "requeued as job 4", "4", fakes={"srun": reports("75", 1)}),
    "signal during activation": Case(143, SIGNAL, "4", False, environment={"ACTIVATE": "kill -USR1 $$"}),
    "nodes never start": Case(
        1, "Nodes where nothing started: gpu007-b gpu009-b login1\n",
        fakes={"srun": ONE_STARTS, "scontrol": ODD_NAMES}, environment=ODD_NODES,
    ),
    "unknown nodes never start": Case(
        1, "started: perhaps some of gpu[007-009]-b,login1\n",
        fakes={"srun": ONE_STARTS, "scontrol": "exit 1"}, environment=ODD_NODES,
    ),
    "all nodes start": Case(
        1, "started: none\nsubmit_multinode.slr: all nodes must reach node1:10004: check NETWORK_INTERFACE",
        fakes={"srun": """touch "$PWD/expts/.slurm-4/nodes/"{node1,node2}; exit 1""", "scontrol": HOSTNAMES},
        environment=ON_TWO_NODES,
    ),
    # without scancel the other nodes would wait for these until JOIN_TIMEOUT
    "a node cannot stage": Case(
        3, "slurm_node.sh: node node2 cannot copy /lustre/data to FOLDER/data\n",
        fakes=NODES | {"rsync": "[[ $SLURMD_NODENAME == node1 ]] || exit 11"}, environment=IN_A_STEP | COPY,
    ),
    "a node cannot write": Case(
        1, "slurm_node.sh: node node2 cannot write to FOLDER/expts/.slurm-4\n",
        fakes=NODES | {"touch": CANNOT_TOUCH}, environment=IN_A_STEP,
    ),
    "rank 0 lost the others": no_torchrun("joins", "1", "0", 1, "4", LOST),
    "no progress": no_torchrun(
        "joins", "", "0", 137, "", f"{LOST} ... (no checkpoint was saved since this start){ELSE}", save=False
    ),
    # 137: torchrun, or all of its ranks
    "out of memory": out_of_memory("slurmstepd: error: Detected 1 oom_kill event in StepId=4.0. Some of"),
    "the first line is the start's": out_of_memory("slurmstepd: error: Detected 1 oom_kill", before=EARLIER[2:]),
    "a step out of memory": out_of_memory("srun: error: node1: task 0: Out Of Memory", 1, "1"),
    "out of memory by the kernel's log": out_of_memory("", kernel="oom-kill:task_memcg=/slurm/job_4/step_0"),
    "another job out of memory": out_of_memory("", kernel="oom-kill:task_memcg=/slurm/job_44/step_0", says=LOST),
    "a GPU out of memory": out_of_memory("error: CUDA out of memory", 1, "1", says=LOST),
    "requeued ten times": no_torchrun("joins", "1", "10", 1, "", LOST),
    "a reason": no_torchrun("joins", "3", "0", 3, ""),
    "torchrun ended by itself": no_torchrun("Traceback", "1", "0", 1, ""),
    "no permission to write": Case(
        2, "node1 cannot write to FOLDER/expts: free the disk, or choose another --run-dir", starts=False,
        fakes={"mkdir": "exit 1"},
    ),
    "no job": refused(
        "this is not a Slurm job; start one: sbatch submit.slr --set seed=1\\ ", ("--set", "seed=1 "), SLURM_JOB_ID=""
    ),
    "no python": Case(2, NO_PYTHON, starts=False, fakes={"python": "exit 127"}),
    "a signal before the tenth start": Case(
        138, SIGNAL, "4", fakes={"srun": "kill -USR1 $PPID; exec sleep 30"}, environment={"SLURM_RESTART_COUNT": "9"}
    ),
    # with a short time limit, requeuing would never end
    "a signal before the last start": Case(
        138, "started 10 times before: is the time limit too short?", "",
        fakes={"srun": "kill -USR1 $PPID; exec sleep 30"}, environment={"SLURM_RESTART_COUNT": "10"},
    ),
    "USR1": stopped("USR1", "USR1", RUNNING, "4"),
    "TERM": stopped("TERM", "USR1", RUNNING, "4"),
    "heterogeneous job": stopped("USR1", "USR1", COMPONENTS, "4"),
    "array": stopped("USR1", "USR1", RUNNING, "3_1", **IN_ARRAY),
    "Slurm refuses": stopped("USR1", "USR1", REFUSES, "444", RESUMES),  # asked three times
    "Slurm never answers": stopped("USR1", "USR1", "exit 1", "", f"(Slurm does not answer){ELSE}{RESUMES}"),
    "Slurm answers later": stopped("TERM", "USR1", silent(2), "4"),
    # scancel, preemption, lost node: a cancelled job must stay cancelled, and no job may be queued twice. No SIGUSR1
    # as well: on a second signal torchrun abandons its workers
    "ending": stopped("TERM", "TERM", ENDING, "", f"(COMPLETING){ELSE}{RESUMES}"),
    "answers late that it ends": stopped("TERM", "TERM", silent(1, ENDING), "", f"(COMPLETING){ELSE}{RESUMES}"),
    # a preemption, after which Slurm requeues the job itself, cannot be distinguished from scancel
    "no scontrol": stopped("TERM", "TERM", None, "", f"(there is no scontrol){ELSE}{RESUMES}"),
    "failed activation": refused("ACTIVATE failed with status 1: false", ACTIVATE="false"),
    "stage nothing": refused("STAGE_DATA is ':/x'; expected FROM:TO, two folders", STAGE_DATA=":/x"),
    "stage by index": refused(
        "STAGE_DATA is '/x:/%a'; %a and %A need sbatch --array, %% is a percent sign", STAGE_DATA="/x:/%a"
    ),
    **{f"{name} {value}": refused(f"{name} is '{value}'; {NUMBER}", **{name: value}) for name, value in (
        ("PROCESSES_PER_NODE", "08"), ("PROCESSES_PER_NODE", "a[$(touch executed)]"), ("MASTER_PORT", "65536"),
        ("MAX_RESTARTS", "often"), ("JOIN_TIMEOUT", "0"),
    )},
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_a_job_ends_with_its_status_and_is_requeued_or_not(tmp_path, name):
    case = CASES[name]
    environment = {key: value.replace("FOLDER", str(tmp_path)) for key, value in case.environment.items()}
    job = FakeJob(tmp_path, case.fakes, **environment)
    script = SCRIPTS["SLURM_JOB_NUM_NODES" in environment]
    status, output = job.run(script, *case.words)
    says = case.says.replace("FOLDER", str(tmp_path))
    assert (status, job.requeued(), bool(job.arguments("srun"))) == (case.status, case.requeued, case.starts), output
    exact = status == 2 and not case.starts
    assert output == f"{script}: {says}\n" if exact else all(part in output for part in says.split(" ... ")), output
    assert ("requeued as job" in output) == bool(case.requeued and RESUMES not in says)
    assert all((text in output) == (text in case.says) for text in (LOST, "all nodes must reach"))
    assert (MEMORY in output) == (case.says == MEMORY) and (MEMORY not in output or output.endswith(MEMORY))
    assert not (tmp_path / "executed").exists() and not list(tmp_path.glob("expts/.slurm*"))
    if "SLURM_STEP_ID" in environment:  # the other nodes do not wait
        assert job.arguments("scancel") == [["--signal=KILL", "4.0"]] and len(job.torchrun()) == 1


def test_mistake_in_the_command_line_is_reported_before_any_node_starts(tmp_path):
    job = FakeJob(tmp_path, {"python": "echo 'error: no such key' >&2; exit 2"})
    assert job.run("submit.slr", "--set", "lear=1") == (2, "error: no such key\n")
    assert job.arguments("python") == [["train.py", "--config=bs128-opt", "--set", "lear=1", "--print-config"]]
    assert not job.arguments("srun")


@pytest.mark.parametrize(("option", "parent"), [("--run-dir runs/%A", "runs"), ("--run-dir=50%%/%%a%a/run", "50%/%a1")])
def test_status_folder_is_next_to_the_runs_folder(tmp_path, option, parent):
    """train.py gets the arguments unchanged and fills in the array's numbers itself."""
    job = FakeJob(tmp_path, {"srun": 'find "$PWD" -path "*.slurm*" >found'}, **IN_ARRAY)
    link_commands(tmp_path / "commands", ["find"])
    words = ["--config=try-%a", "--set", "seed=%a", *option.split()]
    assert job.run("submit.slr", *words)[0] == 0
    assert job.arguments("python")[0] == ["train.py", "--config=bs128-opt", *words, "--print-config"]
    assert job.arguments("srun")[0][-len(words) :] == words
    assert str(tmp_path / parent / ".slurm-4/nodes") in job.lines("found")
    assert not (tmp_path / "expts").exists() and not list(tmp_path.glob(f"{parent}/.slurm*"))


@pytest.mark.parametrize("script", SCRIPTS)
def test_submitted_from_another_folder(tmp_path, script):
    """Slurm starts a script in the current folder of sbatch, or in --chdir."""
    (elsewhere := tmp_path / "elsewhere").mkdir()
    job = FakeJob(tmp_path / "project", {"srun": "pwd >folder"})
    assert job.run(script)[0] == 0  # --chdir=project
    assert job.lines("folder") == [str(tmp_path / "project")]
    missing = "train.py" if script == "submit.slr" else "submit.slr"
    remedy = "run sbatch in the project's folder, or give it --chdir=FOLDER"
    assert job.run(script, cwd=elsewhere) == (2, f"{script}: no {missing} in {elsewhere}: {remedy}\n")


def test_port_in_use_is_reported_before_any_node_starts(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        job = FakeJob(tmp_path, **ON_TWO_NODES, MASTER_PORT=str(port))
        message = f"port {port} of node1 is in use, perhaps by another job; choose another with MASTER_PORT=..."
        assert job.run("submit_multinode.slr") == (2, f"submit_multinode.slr: {message}\n")
    assert not job.arguments("srun") and not list(tmp_path.glob("expts/.slurm*"))


CHECK_NODE = ROOT / "deploy/check_node.sh"
FAILS = """echo "fail  pcie           4 of 16 lanes
                     -> reseat the card
fail  gpu faults     Xid 79; Xid 48
fail: 0 ok, 0 warn, 2 fail"; exit 2"""
PASSES, WARNS = 'echo "ok: 2 ok, 0 warn, 0 fail"', 'echo "warn: 1 ok, 1 warn, 0 fail"; exit 1'
MISTYPED, CRASHES, HANGS = "echo usage: doctor >&2; exit 2", "echo Traceback >&2; exit 1", "sleep 20"
BY_A_HUMAN = "swap a fan [root@2026-11-25T10:00:00]"
OURS = "check_node.sh: pcie 4 of 16 lanes [root@2026-11-25T10:00:00]"
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
        *(("", doctor, "prolog_slurmd", 0, []) for doctor in (PASSES, MISTYPED, HANGS)),
        *((OURS, doctor, "mended", 0, []) for doctor in (FAILS, MISTYPED, CRASHES, HANGS)),
        *((reason, PASSES, "mended", 0, []) for reason in (BY_A_HUMAN, WRONG_RESULTS)),
        *((None, FAILS, role, status, []) for role, status in (("prolog_slurmd", 1), ("health", 0))),  # no scontrol
    ],
)
def test_the_doctor_drains_a_node_and_returns_only_its_own(tmp_path, drained, doctor, role, status, update):
    state = f"State=IDLE+DRAIN ThreadsPerCore=1 Reason={drained}" if drained else "State=IDLE ThreadsPerCore=1"
    make_command(tmp_path, "logger", f'echo "$*" >>{tmp_path}/said')
    make_command(tmp_path, "doctor", doctor)
    asked = "exit 127" if drained is None else f'[[ $1 != update ]] || printf "%s\\n" "${{@:2}}" >{tmp_path}/update'
    make_command(tmp_path, "scontrol", f'echo "NodeName=node1 CoresPerSocket=1 {state}"\n{asked}')
    limit = "0.5" if doctor == HANGS else "20"
    environment = {"PATH": f"{tmp_path}:/usr/bin:/bin", "SLURMD_NODENAME": "node1", "SLURM_SCRIPT_CONTEXT": role}
    environment |= {"DOCTOR": "doctor", "DOCTOR_SECONDS": limit}
    if drained is None:  # then `command` finds nothing
        environment["BASH_FUNC_command%%"] = "() { return 1; }"
    done = subprocess.run(["bash", CHECK_NODE], env=environment, check=False)
    assert done.returncode == status
    file, said = tmp_path / "update", tmp_path / "said"
    assert (file.read_text().splitlines() if file.exists() else []) == (["NodeName=node1", *update] if update else [])
    assert ("node1: there is no scontrol in " in (said.read_text() if said.exists() else "")) == (drained is None)


# On a real cluster, whose nodes have two fake GPUs each. PROCESSES_PER_NODE=1 saves time.


def slurm(test):
    """Mark tests that share one cluster and run one after another (with --dist=loadgroup)."""
    return pytest.mark.xdist_group("slurm")(pytest.mark.timeout(600)(pytest.mark.slurm(test)))


# Long enough to be interrupted: about 5 s on two idle cores. Slurm's signals reach loader workers too.
SETTINGS = TINY | {"limit_train_batches": 30, "max_epochs": 3, "log_freq": 10, "data_loader": "torchvision"}
SETTINGS |= {"num_data_workers": 1, "rank_timeout_seconds": 25}


@pytest.fixture(scope="module")
def shared_cluster():
    """Three nodes: two for the jobs, one spare."""
    if reason := why_not():
        pytest.skip(reason)
    # a short path: the length of Unix socket paths is limited
    with tempfile.TemporaryDirectory(prefix="slurm-") as folder, SlurmCluster(Path(folder), 3) as running:
        yield running


@pytest.fixture
def cluster(shared_cluster):
    """The cluster; jobs left by a failed test are cancelled."""
    yield shared_cluster
    shared_cluster.client("scancel", "--user=root")


@pytest.fixture(scope="module")
def project(tmp_path_factory):
    folder = link_project(tmp_path_factory.mktemp("project"))
    (folder / "train.py").symlink_to(ROOT / "train.py")
    return folder


def epochs(run):
    """Return the records of the epochs without the measured times."""
    return [{key: value for key, value in record.items() if "sec" not in key} for record in run.records("epoch")]


@pytest.fixture(scope="module")
def uninterrupted(shared_cluster, project):
    """A finished run on two nodes, one process each."""
    run = SlurmRun(shared_cluster, project, "uninterrupted", SETTINGS).submit()
    assert run.end("COMPLETED")["ExitCode"] == "0:0"
    return run


@slurm
def test_two_nodes_complete_and_a_bare_srun_trains_like_the_script(cluster, project, uninterrupted):
    assert [row["epoch"] for row in epochs(uninterrupted)] == [1, 2, 3]
    assert not list(uninterrupted.folder.parent.glob(".slurm-*"))
    header = "#!/bin/bash\n#SBATCH --nodes=2 --ntasks-per-node=1\n"
    (project / "bare.slr").write_text(header + 'srun python train.py "$@"\n')
    bare = SlurmRun(cluster, project, "bare", SETTINGS).submit("bare.slr")
    assert bare.end("COMPLETED")["ExitCode"] == "0:0"
    assert all("batch 32 = 2 rank(s)" in run.log() for run in (bare, uninterrupted))
    assert epochs(bare) == epochs(uninterrupted)


def kill_torchrun(cluster, job):
    (torchrun,) = (pid for pid, command in cluster.pids("node2").items() if re.search(r"python\S* -m tools\.", command))
    os.kill(torchrun, signal.SIGKILL)


def reboot_node(cluster, job):
    cluster.kill_node("node2")
    cluster.boot_node("node2")


def cut_link(cluster, job):
    """The isolated rank ends without a signal."""
    cluster.client("ip", "link", "set", "v-node2", "down")
    wait_until("end of the rank", 120, lambda: "-u train.py" not in " ".join(cluster.pids("node2").values()))
    cluster.client("ip", "link", "set", "v-node2", "up")


def preempt(cluster, job):
    cluster.client("sbatch", "--nodes=3", "--exclusive", "--output=/dev/null", "--wrap=true")


ON_1_AND_2 = "--nodelist=node[1-2]"
DISTURBANCES = {  # what happens; further options of sbatch; seconds that srun waits; who requeues the job
    "SIGUSR1": (lambda cluster, job: cluster.client("scancel", "-b", "-s", "USR1", job), (), "60", "script"),
    "preempted": (preempt, ("--partition=low",), "60", "slurm"),
    "preempted with grace": (preempt, ("--partition=low-grace",), "60", "script"),
    "torchrun killed": (kill_torchrun, (ON_1_AND_2,), "5", "script"),
    "node lost": (lambda cluster, job: cluster.kill_node("node2"), (), "60", "slurm"),
    "node rebooted": (reboot_node, (ON_1_AND_2,), "5", "script"),  # before Slurm notices
    "link cut": (cut_link, (), "60", "slurm"),
}


@slurm
@pytest.mark.parametrize("name", DISTURBANCES)
def test_a_disturbed_job_ends_like_an_uninterrupted_one(cluster, project, uninterrupted, name):
    disturb, options, patience, requeued_by = DISTURBANCES[name]
    run = SlurmRun(cluster, project, name.replace(" ", "-"), SETTINGS)
    run.submit(options=(*OPTIONS, *options), SLURM_WAIT=patience).wait_for("Epoch: 2, Iteration: ")
    assert run.fields()["NodeList"] == "node[1-2]"
    disturb(cluster, str(run.job))
    fields = run.end("COMPLETED")
    assert fields["Restarts"] == "1" and fields["ExitCode"] == "0:0" and "Resuming from" in run.log()
    assert ("with everything saved" in run.log()) == name.startswith(("SIGUSR1", "preempted"))
    assert (f"requeued as job {run.job}" in run.log()) == (requeued_by == "script")
    assert epochs(run) == epochs(uninterrupted)
    assert not list(run.folder.parent.glob(f"*-{run.job}*"))  # neither logs of torchrun nor the status folder
    if name in ("node lost", "link cut"):
        assert fields["NodeList"] == "node[1,3]"
    if name == "node lost":
        cluster.boot_node("node2")
    wait_until("idle nodes", 60, lambda: set(cluster.node_states().values()) == {"idle"})


@slurm
def test_cancelled_saves_and_stays_cancelled(cluster, project):
    run = SlurmRun(cluster, project, "cancelled", SETTINGS).submit()
    run.wait_for("Epoch: 1, Iteration: ")
    cluster.client("scancel", str(run.job))
    run.wait_for("with everything saved; run the same command again to resume")
    if cluster.cgroup:  # otherwise the signal also reaches srun, which does not return before the script is killed
        run.wait_for("this script does not requeue the job (COMPLETING); if Slurm does not either,\n")
        run.wait_for("to resume: sbatch submit_multinode.slr ")
    time.sleep(8)  # longer than a requeued job would wait
    assert run.end("CANCELLED")["Restarts"] == "0"


@slurm
@pytest.mark.parametrize(
    "options", ["--nodes=2 --gres=gpu:2", "--exclusive", "--gpus-per-task=2 --gpus=2 --gpus-per-node=2"]
)
def test_step_sees_all_gpus_of_the_job(cluster, project, tmp_path, options):
    """Whatever option asks sbatch for two GPUs; the #SBATCH line asks for one."""
    make_command(tmp_path, "python", '[[ $1 == train.py ]] || echo "$SLURMD_NODENAME has GPUs $SLURM_STEP_GPUS: $*"')
    path, log = f"{tmp_path}:{os.environ['PATH']}", tmp_path / "log"
    all_options = (*options.split(), "--cpus-per-task=2", f"--output={log}")
    job = cluster.submit(project / "submit.slr", options=all_options, cwd=project, PATH=path)
    assert cluster.wait(job, 60)["JobState"] == "COMPLETED", log.read_text()
    nodes = re.findall(r"^node\d has GPUs 0,1: -m tools.torchrun .*--nproc_per_node=2 ", log.read_text(), re.M)
    assert len(nodes) == (2 if "--nodes=2" in options else 1), log.read_text()


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
    check, log = tmp_path / "check", tmp_path / "log"
    settings = f"Prolog={check}\nEpilog={check}\nHealthCheckProgram={check}\nHealthCheckInterval=2\n"
    settings += "HealthCheckNodeState=IDLE"
    with tempfile.TemporaryDirectory(prefix="slurm-") as folder, SlurmCluster(Path(folder), 1, settings) as cluster:

        def node():
            return cluster.client("sinfo", "--noheader", "--partition=main", "--format=%T %E").strip()

        make_command(tmp_path, "check", f"""
            export SLURM_CONF={cluster.conf} PYTHONPATH={ROOT} OMP_NUM_THREADS=1
            export DOCTOR="{sys.executable} {tmp_path}/one_check.py {broken}"
            exec {CHECK_NODE} "$@"
        """)  # fmt: skip
        make_command(tmp_path, "job", "echo ran")
        job = cluster.submit(tmp_path / "job", options=[f"--output={log}"], cwd=tmp_path)
        wait_until("drained node1", 60, lambda: node() == "drained check_node.sh: pcie 16 lanes")
        assert cluster.wait(job, 60, "PENDING")["Restarts"] == "1"
        assert "ran" not in log.read_text().splitlines()
        broken.unlink()
        wait_until("idle node1", 60, lambda: node().startswith("idle"))
        cluster.client("scontrol", "release", str(job))
        assert cluster.wait(job, 120)["JobState"] == "COMPLETED"
        assert "ran" in log.read_text().splitlines()
