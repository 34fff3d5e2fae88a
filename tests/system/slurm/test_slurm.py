"""The job scripts and deploy/*.sh: with fake Slurm commands."""

import re
import shlex
import shutil
import socket
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.conftest import CIFAR100, ROOT
from tests.processes import make_command
from utils.config.command_line import parse_arguments

SCRIPTS = ["submit.slr", "submit_multinode.slr"]
# All commands that the scripts may need on PATH, besides Slurm's and python.
TOOLS = ["bash", "cat", "dirname", "env", "find", "flock", "grep", "ls", "mkdir", "mktemp", "mv", "realpath", "rm"]
TOOLS += ["rmdir", "sed", "seq", "sleep", "touch"]

# What fake commands do after recording their arguments, in bash.
IN_STATE = '[[ $1 != --oneliner ]] || echo "JobId=4 JobState={} Reason=None"'
RUNNING, ENDING = IN_STATE.format("RUNNING"), IN_STATE.format("COMPLETING")
COMPONENTS = RUNNING.replace("JobId=4", "JobId=4 HetJobId=4") + f"; {RUNNING.replace('JobId=4', 'JobId=5 HetJobId=4')}"
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
NAMES = ("script", "ACTIVATE", "SRUN_OPTIONS", "STAGE_DATA", "TRAIN_CONFIG", "MASTER_PORT", "HOST_SUFFIX", "store")
ON_ONE_NODE = dict.fromkeys(NAMES, "of another program")  # a user's shell may export them
ON_ONE_NODE |= {"SLURM_JOB_ID": "4", "SLURM_JOB_NODELIST": "node1", "SLURM_JOB_NUM_NODES": "1"}
ON_ONE_NODE |= {"SLURM_GPUS_ON_NODE": "2", "SLURMD_NODENAME": "node1"}
HEADERS_CORES = {"SLURM_CPUS_PER_TASK": "8", "SLURM_TRES_PER_TASK": "cpu:8"}
ON_TWO_NODES = {"SLURM_JOB_NODELIST": "node[1-2]", "SLURM_JOB_NUM_NODES": "2", "SLURM_GPUS_ON_NODE": "8"}
IN_ARRAY = {"SLURM_ARRAY_JOB_ID": "3", "SLURM_ARRAY_TASK_ID": "1"}


class FakeJob:
    """A batch script run with fakes of every command except TOOLS. `given`: variables of its environment, in capitals,
    and what fake commands do; one that does None is not installed."""

    def __init__(self, folder, **given):
        self.folder, self.calls, commands = folder, folder / "calls", folder / "commands"
        self.calls.mkdir(parents=True)
        commands.mkdir()
        for name in TOOLS:
            (commands / name).symlink_to(shutil.which(name) or pytest.fail(f"{name} is not on PATH"))
        self.environment = {"PATH": str(commands)} | ON_ONE_NODE | HEADERS_CORES
        for name, value in (FAKE_COMMANDS | given).items():
            if name.isupper():
                self.environment[name] = value
            elif value is not None:
                make_command(commands, name, f'printf "%s\\0" "$@" >"{self.calls}/{name}.$EPOCHREALTIME.$$"\n{value}')
        for name in ["train.py", "deploy", "tools", *SCRIPTS]:
            (folder / name).symlink_to(ROOT / name)

    def run(self, script, *args, cwd=None):
        """Run to the end; return exit status and stderr."""
        command, how = ["bash", str(self.folder / script), *args], {"stderr": subprocess.PIPE, "text": True}
        done = subprocess.run(command, cwd=cwd or self.folder, env=self.environment, timeout=120, check=False, **how)
        return done.returncode, done.stderr

    def lines(self, file):
        return (self.folder / file).read_text().splitlines()

    def arguments(self, command):
        """Return the arguments of each call of the command."""
        return [call.read_text().split("\0")[:-1] for call in sorted(self.calls.glob(f"{command}.*"))]

    def torchrun(self):
        """Return the arguments of tools.torchrun on each node: its log and torchrun's."""
        return [words[2:] for words in self.arguments("python") if words[:2] == ["-m", "tools.torchrun"]]


def test_headers_differ_only_in_requested_resources():
    pattern, texts = r"^{}SBATCH --([a-z-]+)(?:=(\S+))?$", [(ROOT / script).read_text() for script in SCRIPTS]
    one, many = (dict(re.findall(pattern.format("#"), text, re.MULTILINE)) for text in texts)
    differ = {key for key in one.keys() | many.keys() if one.get(key) != many.get(key)}
    assert differ == {"nodes", "gpus-per-node", "cpus-per-task", "exclusive"}
    assert one["signal"] == "B:USR1@120" and "/" not in one["output"]  # a folder would have to exist before sbatch
    for text in texts:
        off = dict(re.findall(pattern.format("##"), text, re.MULTILINE))
        assert list(off) == ["account", "partition", "qos", "constraint", "gres"]


CHECKPOINT = "bs2048-warmup-opt/checkpoints/step-1.pt"


def case(status, says="", requeued="", options="", step="", words=(), **given):
    """A job that is `given` this (see FakeJob), with these words for train.py: its status, what it says after "start",
    and the job that is requeued; some options of srun and torchrun, None if it does not start; some of the step's
    environment. FOLDER is the project's, TAKEN a port in use."""
    return SimpleNamespace(**locals())


def starts(options, step="", **given):
    return case(0, "", "", options, step, ("--config=other", "--set", "a=b  c"), srun=STARTS_NODES, **given)


def refused(says, words=(), **given):
    return case(2, f"{says}\n", options=None, words=words, **given)


def reports(status):
    """A srun whose train.py reports this status, and whose torchrun fails."""
    return f'echo {status} >"$TRAIN_EXIT_STATUS_FILE"; exit 1'


def kept(why, words=""):
    """Return the message of a job that the script does not requeue."""
    says = f"this script does not requeue the job ({why}); if Slurm does not either,\n"
    return f"{says}to resume: sbatch SCRIPT{words}\n"


def stopped(number, gets, scontrol, requeued, why="", **given):
    """During srun the batch shell, and for TERM the step too, get a signal: TERM reaches the step itself only if Slurm
    is ending the job. It saves as train.py does if it `gets` this signal once; torchrun turns its status 75 into 1."""
    srun = f"""
        trap 'echo USR1 >>signals' USR1
        trap 'echo TERM >>signals' TERM
        kill -{number} $PPID
        [[ {gets} != TERM ]] || kill -TERM $$
        until [[ -s signals ]]; do ((SECONDS < 60)) && sleep 0.05 || exit; done
        sleep 0.3
        [[ $(cat signals) != {gets} ]] || echo 75 >"$TRAIN_EXIT_STATUS_FILE"
        exit 1"""
    then = kept(why, " --set a=b\\ c --resume never --resume auto") if why else f"requeued as job {requeued}\n"
    given |= {"words": ("--set", "a=b c", "--resume", "never"), "srun": srun, "scontrol": scontrol}
    return case(75, SAVED + then, requeued, **given)


def silent(times, then=RUNNING):
    """A scontrol that fails this many times and then answers."""
    return f'echo >>asked; (($(grep -c "" asked) > {times})) || exit 1\n{then}'


def killed(says="", requeued="", status=137, reported="", log="joins", saved=CHECKPOINT, lines=(), kernel="", **given):
    """torchrun of node2 is gone, as after a node that rebooted before Slurm noticed. Its log ends with `log`, the job's
    output with `lines`; a checkpoint was saved since this start, or only before it."""
    # files of earlier starts and jobs do not count
    earlier = f"mkdir -p expts/{Path(CHECKPOINT).parent}; touch expts/{CHECKPOINT}; echo >expts/torchrun-4-node3.log"
    srun = f"""
        [[ -z "{reported}" ]] || echo {reported} >"$TRAIN_EXIT_STATUS_FILE"
        printf "%s\\n" ": start 1: " oom_kill ": start 3: " {shlex.join(lines)} >output
        cd "$PWD/expts" && touch -d tomorrow .slurm-4/nodes/{{node1,node2}} {saved}
        echo Traceback >torchrun-4-node1.log; echo {log} >torchrun-4-node2.log; exit 137"""
    given = ON_TWO_NODES | {"SUBMIT_ACTIVATE": earlier, "SLURM_RESTART_COUNT": "2"} | given
    scontrol = HOSTNAMES.replace("Reason=None", "StdErr=$PWD/output StdOut=x")
    return case(status, says, requeued, srun=srun, scontrol=scontrol, dmesg=f"echo '{kernel}'", **given)


ONE_NODE = (
    "--nodes=1 --ntasks=1 --ntasks-per-node=1 --kill-on-bad-exit=0 --nnodes=1 --nproc_per_node=2 --max_restarts=0 "
    "--rdzv_backend=c10d --rdzv_id=4 --signals-to-handle=SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1 --config=bs128-opt"
)
TWO_NODES = (
    "--nodes=2 --ntasks=2 --ntasks-per-node=1 --kill-on-bad-exit=0 --nnodes=2 --nproc_per_node=8 --max_restarts=0 "
    "--cpu-bind=none --rdzv_endpoint=node1:10004 --config=bs2048-warmup-opt"
)
SITE = ON_TWO_NODES | {
    "SUBMIT_CONFIG": "quickstart", "SUBMIT_PROCESSES": "3", "SUBMIT_INTERFACE": "hsn0", "SUBMIT_RESTARTS": "2",
    "SUBMIT_ACTIVATE": "false; false | true; export ACTIVATED=$UNSET_VARIABLE,yes",
}  # fmt: skip
SITE_STEP = "ACTIVATED=,yes NCCL_SOCKET_IFNAME=hsn0 GLOO_SOCKET_IFNAME=hsn0 TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1"
NO_GPU = {"SLURM_GPUS_PER_NODE": "0", "SLURM_GPUS_ON_NODE": ""}
MEMORY = (
    "memory ran out, and a process was killed: sbatch --mem=..., fewer num_data_workers, or fewer processes per node\n"
)
NEVER_STARTED = "train.py failed, was killed or never started. Nodes where nothing started: "
REACH = "all nodes must reach node1:10004: check SUBMIT_INTERFACE, SUBMIT_HOST_SUFFIX\n"
SINCE = "nothing saved since the last checkpoint"
LOST = f"torchrun was killed, or its node is gone; {SINCE}. Its log: FOLDER/expts/torchrun-4-node2.log\n"
SIGNAL = f"ended by a signal that train.py could not handle: {SINCE}\n"
SAVED, REQUEUED = "stopped with everything saved\n", "requeued as job 4\n"
TEN_STARTS = "started 10 times before: is the time limit too short?"
NUMBER = "expected a whole number above 0 (SUBMIT_PORT: below 65536; SUBMIT_RESTARTS: also 0)"
EARLY = "kill -USR1 $PPID; exec sleep 100"
ODD_NODES = {
    "SLURM_JOB_NODELIST": "gpu[007-009]-b,login1", "SLURM_JOB_NUM_NODES": "4", "SLURMD_NODENAME": "gpu007-b",
    "srun": 'touch "$PWD/expts/.slurm-4/nodes/gpu008-b"; exit 1',
}  # fmt: skip
ODD_NAMES = '[[ $* == "show hostnames gpu[007-009]-b,login1" ]] && printf "%s\\n" gpu007-b gpu008-b gpu009-b login1'
IN_STEP = ON_TWO_NODES | {"SLURM_STEP_ID": "0", "srun": STARTS_NODES, "scontrol": HOSTNAMES, "scancel": ""}
CASES = {
    "one node": starts(ONE_NODE, "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 TORCH_ELASTIC_SHUTDOWN_TIMEOUT=110"),
    "two nodes": starts(TWO_NODES, **ON_TWO_NODES),
    "site": starts("--config=quickstart --nproc_per_node=3 --max_restarts=2", SITE_STEP, **SITE),
    # with sbatch --gres=gpu:2, srun would use the number in the #SBATCH line
    "two GPUs instead of one": starts("--nproc_per_node=2", "SLURM_GPUS_PER_NODE=2", SLURM_GPUS_PER_NODE="1"),
    "no GPU": starts("--nproc_per_node=1", "SLURM_GPUS_PER_NODE=0 SLURM_WAIT=360", **NO_GPU),
    # ports of successive jobs differ and are below ephemeral ports
    "lowest port": starts("--rdzv_endpoint=node1:10000", **ON_TWO_NODES, SLURM_JOB_ID="20000"),
    "container": starts("--container-image=x --mpi=none", SUBMIT_SRUN_OPTIONS="--container-image=x --mpi=none"),
    "python only in the container": case(0, python=None, SUBMIT_SRUN_OPTIONS="--container-image=x"),
    # the exit status is the training's own, also if a signal ends torchrun after train.py has finished
    "finished, torchrun fails": case(0, srun=reports(0)),
    "bad configuration": case(2, srun=reports(2)),
    # as in a container without the project's folder: 127 comes from srun itself, not from an interrupted `wait`
    "no bash": case(127, f"{NEVER_STARTED}none\n", srun="exit 127"),
    # as in the grace time before a preemption: Slurm does not requeue a job that exits within it
    "steps are stopped": case(75, SAVED + REQUEUED, "4", srun=reports(75), SLURM_RESTART_COUNT="30"),
    "signal during activation": case(143, SIGNAL + REQUEUED, "4", None, SUBMIT_ACTIVATE="kill -USR1 $$"),
    "nodes never start": case(1, f"{NEVER_STARTED}gpu007-b gpu009-b login1\n", scontrol=ODD_NAMES, **ODD_NODES),
    "unknown nodes never start": case(
        1, f"{NEVER_STARTED}perhaps some of gpu[007-009]-b,login1\n", scontrol="exit 1", **ODD_NODES),
    "all nodes start": case(1, f"{NEVER_STARTED}none\n{REACH}", **ON_TWO_NODES, scontrol=HOSTNAMES,
        srun="""touch "$PWD/expts/.slurm-4/nodes/"{node1,node2}; exit 1"""),
    # without scancel the other nodes would wait for these until SUBMIT_JOIN_TIMEOUT
    "a node cannot stage": case(3, "slurm_node.sh: node node2 cannot copy /lustre/data to FOLDER/data\n", **IN_STEP,
        rsync="[[ $SLURMD_NODENAME == node1 ]] || exit 11", SUBMIT_STAGE="/lustre/data:FOLDER/data"),
    "a node cannot write": case(
        1, f"slurm_node.sh: node node2 cannot write to FOLDER/expts/.slurm-4\n{NEVER_STARTED}node2\n", **IN_STEP,
        touch=f'[[ $1 != */node2 ]] || exit 1; exec {shutil.which("touch")} "$1"'),
    "rank 0 lost the others": killed(LOST + REQUEUED, "4", 1, "1"),
    "no progress": killed(LOST + kept("no checkpoint was saved since this start"), saved=""),
    "requeued ten times": killed(LOST + kept(TEN_STARTS), "", 1, "1", SLURM_RESTART_COUNT="10"),
    "a reason": killed("", "", 3, "3"),
    "torchrun ended by itself": killed("", "", 1, "1", "Traceback"),
    # 137: torchrun, or all of its ranks
    "out of memory": killed(MEMORY, lines=["slurmstepd: error: Detected 1 oom_kill event in StepId=4.0. Some of"]),
    "a step out of memory": killed(MEMORY, "", 1, "1", lines=["srun: error: node1: task 0: Out Of Memory"]),
    "out of memory by the kernel's log": killed(MEMORY, kernel="oom-kill:task_memcg=/slurm/job_4/step_0"),
    "another job out of memory": killed(LOST + REQUEUED, "4", kernel="oom-kill:task_memcg=/slurm/job_44/step_0"),
    "a GPU out of memory": killed(LOST + REQUEUED, "4", 1, "1", lines=["error: CUDA out of memory"]),
    "a signal before the tenth start": case(138, SIGNAL + REQUEUED, "4", srun=EARLY, SLURM_RESTART_COUNT="9"),
    # with a short time limit, requeuing would never end
    "a signal before the last start": case(138, SIGNAL + kept(TEN_STARTS), srun=EARLY, SLURM_RESTART_COUNT="10"),
    "USR1": stopped("USR1", "USR1", RUNNING, "4"),
    "TERM": stopped("TERM", "USR1", RUNNING, "4"),
    "heterogeneous job": stopped("USR1", "USR1", COMPONENTS, "4"),
    "array": stopped("USR1", "USR1", RUNNING, "3_1", **IN_ARRAY),
    "Slurm refuses three times": stopped("USR1", "USR1", f"[[ $1 != requeue ]] || exit 1; {RUNNING}", "444", "RUNNING"),
    "Slurm never answers": stopped("USR1", "USR1", "exit 1", "", "Slurm does not answer"),
    "Slurm answers later": stopped("TERM", "USR1", silent(2), "4"),
    # scancel, preemption, lost node: a cancelled job must stay cancelled, and no job may be queued twice. No SIGUSR1
    # as well: on a second signal torchrun abandons its workers
    "ending": stopped("TERM", "TERM", ENDING, "", "COMPLETING"),
    "answers late that it ends": stopped("TERM", "TERM", silent(1, ENDING), "", "COMPLETING"),
    # a preemption, after which Slurm requeues the job itself, cannot be distinguished from scancel
    "no scontrol": stopped("TERM", "TERM", None, "", "there is no scontrol"),
    "wrong command line": case(2, "error: no such key\n", options=None, python="echo error: no such key >&2; exit 2"),
    "no permission to write": refused(
        "node1 cannot write to FOLDER/expts: free the disk, or choose another --run-dir", mkdir="exit 1"),
    "no python": refused("python cannot run train.py: set SUBMIT_ACTIVATE or SUBMIT_PREFIX", python="exit 127"),
    "no job": refused(
        "this is not a Slurm job; start one: sbatch submit.slr --set seed=1\\ ", ("--set", "seed=1 "), SLURM_JOB_ID=""),
    "port in use": refused(
        "port TAKEN of node1 is in use, perhaps by another job; choose another with SUBMIT_PORT=...",
        **ON_TWO_NODES, SUBMIT_PORT="TAKEN"),
    "failed activation": refused("SUBMIT_ACTIVATE failed with status 1: false", SUBMIT_ACTIVATE="false"),
    "stage nothing": refused("SUBMIT_STAGE is ':/x'; expected FROM:TO", SUBMIT_STAGE=":/x"),
    "stage by index": refused(
        "SUBMIT_STAGE is '/x:/%a'; %a and %A need sbatch --array, %% is a percent sign", SUBMIT_STAGE="/x:/%a"),
    **{f"{name} {value}": refused(f"{name} is '{value}'; {NUMBER}", **{name: value}) for name, value in (
        ("SUBMIT_PROCESSES", "08"), ("SUBMIT_PROCESSES", "a[$(touch executed)]"), ("SUBMIT_PORT", "65536"),
        ("SUBMIT_RESTARTS", "often"), ("SUBMIT_JOIN_TIMEOUT", "0"),
    )},
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_a_job_ends_with_its_status_and_is_requeued_or_not(tmp_path, name):
    """And it is started by one srun."""
    case = CASES[name]
    script = SCRIPTS[case.given.get("SLURM_JOB_NUM_NODES", "1") != "1"]
    with socket.create_server(("127.0.0.1", 0)) as taken:
        names = {"FOLDER": str(tmp_path), "TAKEN": str(taken.getsockname()[1]), "SCRIPT": script}

        def fill_in(text):
            return text and re.sub(r"\b(FOLDER|TAKEN|SCRIPT)\b", lambda found: names[found[0]], text)

        job = FakeJob(tmp_path, **{key: fill_in(value) for key, value in case.given.items()})
        status, output = job.run(script, *case.words)
    says = re.sub(rf"^{script}: (start .*\n)?", "", output, flags=re.MULTILINE)
    requeued = "".join(words[1] for words in job.arguments("scontrol") if words[0] == "requeue")
    assert (status, says, requeued) == (case.status, fill_in(case.says), case.requeued)
    assert not (tmp_path / "executed").exists() and not list(tmp_path.glob("expts/.slurm*"))
    calls = job.arguments("srun")
    given = {word for words in calls for word in words}
    assert len(calls) == (case.options is not None) and set((case.options or "").split()) <= given
    if "SLURM_STEP_ID" in case.given:  # the other nodes do not wait
        assert job.arguments("scancel") == [["--signal=KILL", "4.0"]] and len(job.torchrun()) == 1
    elif case.given.get("srun") == STARTS_NODES:
        # the default comes first, so that a --config given to sbatch wins
        assert calls[0][-5] == "train.py" and calls[0][-3:] == [*case.words]
        assert [words[-1] for words in job.torchrun()] == int(job.environment["SLURM_JOB_NUM_NODES"]) * ["a=b  c"]
        environment = job.lines("environment")
        assert set(case.step.split()) <= set(environment)
        assert HEADERS_CORES.keys().isdisjoint(line.partition("=")[0] for line in environment)


def test_nodes_know_their_address_and_the_head(tmp_path):
    job = FakeJob(tmp_path, srun=STARTS_NODES, **ON_TWO_NODES, SUBMIT_HOST_SUFFIX="-ib0", SUBMIT_JOIN_TIMEOUT="7")
    assert job.run("submit_multinode.slr")[0] == 0
    for node, is_host, words in zip(["node1", "node2"], ["true", "false"], job.torchrun(), strict=True):
        conf = f"--rdzv_conf=store_type=tcp,is_host={is_host},join_timeout=7,read_timeout=7"
        assert {f"--local_addr={node}-ib0", conf, "--rdzv_endpoint=node1-ib0:10004"} <= {*words}


def test_in_a_container_workers_of_one_node_meet_in_a_file(tmp_path):
    job = FakeJob(tmp_path, srun=STARTS_NODES, box='"${@:3}"', SUBMIT_PREFIX="box exec x.sif")
    assert job.run("submit.slr")[0] == 0
    check, torchrun = job.arguments("box")
    assert check[:4] == ["exec", "x.sif", "python", "train.py"] and check[-1] == "--print-config"
    assert torchrun[:5] == ["exec", "x.sif", "python", "-m", "tools.torchrun"]
    assert torchrun[5] == f"{tmp_path}/expts/torchrun-4-node1.log"
    values = dict(word.split("=", 1) for word in torchrun if "=" in word)
    conf = "store_type=file,keep_alive_interval=100000,is_host=true,join_timeout=300,read_timeout=300"
    assert values["--rdzv_conf"] == conf
    endpoint = Path(values["--rdzv_endpoint"])
    assert endpoint.is_absolute() and not endpoint.exists()


@pytest.mark.parametrize(("given", "folder"), [("%j/100%%/", "4/100%"), ("%%j%%", "%j%")])
def test_data_is_staged_on_each_node_before_it_trains_from_there(tmp_path, monkeypatch, given, folder):
    at_once = STARTS_NODES.replace('"$@";', '"$@" &') + "wait"  # here both nodes have the same disk
    rsync, stage = "mkdir busy && sleep 0.3 && rmdir busy", f"/lustre/%j:{tmp_path}/{given}"
    job = FakeJob(tmp_path, srun=at_once, rsync=rsync, **ON_TWO_NODES, SUBMIT_STAGE=stage)
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
    rsync = f'exec {shutil.which("rsync")} "$@"'
    job = FakeJob(tmp_path, srun=STARTS_NODES, rsync=rsync, SUBMIT_STAGE=f"{original}:{copy}")
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
    assert status == 2 and f"{copy} exists, but is no copy by this script" in output and jpg.exists()


PAGE = (ROOT / "docs/slurm.md").read_text()


@pytest.mark.parametrize("profile", re.findall(r"```bash\n(export .*?)```", PAGE, re.DOTALL))
def test_site_profiles_reach_the_nodes(tmp_path, profile):
    listed = subprocess.check_output(["bash", "-ec", f"{profile}\nenv -0"], cwd=tmp_path, text=True)
    values = dict(pair.split("=", 1) for pair in listed.split("\0") if pair)
    names = [name for name in re.findall(r"(\w+)=", profile) if name in values]
    settings = {name: values[name].replace(":/tmp/", f":{tmp_path}/") for name in names}
    known = re.findall(r"^\| `(\w+)` \|", PAGE, re.MULTILINE)
    assert settings and all(name in known or name.startswith("SBATCH_") for name in settings)
    if "SUBMIT_ACTIVATE" in settings:  # fake the site's own commands
        settings["SUBMIT_ACTIVATE"] = "module() { :; }; source() { :; }; " + settings["SUBMIT_ACTIVATE"]
    apptainer = 'until [[ $1 == python ]]; do shift; done; "$@"'
    job = FakeJob(tmp_path, srun=STARTS_NODES, apptainer=apptainer, rsync="", **settings)
    status, output = job.run("submit.slr")
    assert status == 0, output
    assert len(job.torchrun()) == 1
    assert set(settings.get("SUBMIT_SRUN_OPTIONS", "").split()) <= set(job.arguments("srun")[0])
    assert ("SUBMIT_STAGE" in settings) == bool(job.arguments("rsync"))


@pytest.mark.parametrize(("option", "parent"), [("--run-dir runs/%A", "runs"), ("--run-dir=50%%/%%a%a/run", "50%/%a1")])
def test_status_folder_is_next_to_the_runs_folder(tmp_path, option, parent):
    """train.py gets the arguments unchanged and fills in the array's numbers itself."""
    job = FakeJob(tmp_path, srun='find "$PWD" -path "*.slurm*" >found', **IN_ARRAY)
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
    job = FakeJob(tmp_path / "project", srun="pwd >folder")
    assert job.run(script)[0] == 0  # --chdir=project
    assert job.lines("folder") == [str(tmp_path / "project")]
    missing = "train.py" if script == "submit.slr" else "submit.slr"
    remedy = "run sbatch in the project's folder, or give it --chdir=FOLDER"
    assert job.run(script, cwd=elsewhere) == (2, f"{script}: no {missing} in {elsewhere}: {remedy}\n")


FAILS = """echo "fail  pcie           4 of 16 lanes
                     -> reseat the card
fail  gpu faults     Xid 79; Xid 48
fail: 0 ok, 0 warn, 2 fail"; exit 2"""
PASSES, WARNS = 'echo "ok: 2 ok, 0 warn, 0 fail"', 'echo "warn: 1 ok, 1 warn, 0 fail"; exit 1'
MISTYPED, CRASHES, HANGS = "echo usage: doctor >&2; exit 2", "echo Traceback >&2; exit 1", "sleep 20"
SLOW = "slow device " + "slower than the others " * 20
DIFFERS = f'echo "fail  {SLOW}\nfail  fingerprint    1 of the others\nfail: 0 ok, 0 warn, 2 fail"; exit 2'
BY_A_HUMAN, OURS, WRONG_RESULTS = (
    f"{reason} [root@2026-11-25T10:00:00]"
    for reason in ("swap a fan", "check_node.sh: pcie 4 of 16 lanes", "check_node.sh: fingerprint 1 of the others")
)
DRAINS = ["State=DRAIN", "Reason=check_node.sh: pcie 4 of 16 lanes; gpu faults Xid 79; Xid 48"]
STAYS = ["State=DRAIN", f"Reason=check_node.sh: {f'fingerprint: {SLOW}'[:300]}"]
RESUMES = ["State=RESUME"]


@pytest.mark.parametrize(("drained", "doctor", "role", "status", "update"), [
    ("", FAILS, "prolog_slurmd", 1, DRAINS), ("", FAILS, "epilog_slurmd", 0, DRAINS),
    ("", DIFFERS, "epilog_slurmd", 0, STAYS), (OURS, DIFFERS, "mended", 0, STAYS),
    (BY_A_HUMAN, DIFFERS, "mended", 0, []), (WRONG_RESULTS, DIFFERS, "mended", 0, []),
    (BY_A_HUMAN, FAILS, "prolog_slurmd", 1, []),
    (OURS, PASSES, "mended", 0, RESUMES), (OURS, WARNS, "epilog_slurmd", 0, RESUMES),
    *(("", doctor, "prolog_slurmd", 0, []) for doctor in (PASSES, MISTYPED, HANGS)),
    *((OURS, doctor, "mended", 0, []) for doctor in (FAILS, MISTYPED, CRASHES, HANGS)),
    (BY_A_HUMAN, PASSES, "mended", 0, []), (WRONG_RESULTS, PASSES, "mended", 0, []),
    (OURS, PASSES, "health", 0, []), (BY_A_HUMAN, PASSES, "health", 0, []),
    (None, FAILS, "prolog_slurmd", 1, []), (None, FAILS, "health", 0, []),  # no scontrol
])  # fmt: skip
def test_the_doctor_drains_a_node_and_returns_only_its_own(tmp_path, drained, doctor, role, status, update):
    state = f"State=IDLE+DRAIN ThreadsPerCore=1 Reason={drained}" if drained else "State=IDLE ThreadsPerCore=1"
    make_command(tmp_path, "logger", f'echo "$*" >>{tmp_path}/said')
    make_command(tmp_path, "doctor", doctor)
    make_command(tmp_path, "setsid", f'echo "$*" >{tmp_path}/began')
    asked = "exit 127" if drained is None else f'[[ $1 != update ]] || printf "%s\\n" "${{@:2}}" >{tmp_path}/update'
    make_command(tmp_path, "scontrol", f'echo "NodeName=node1 CoresPerSocket=1 {state}"\n{asked}')
    environment = {"PATH": f"{tmp_path}:/usr/bin:/bin", "SLURMD_NODENAME": "node1", "SLURM_SCRIPT_CONTEXT": role}
    environment |= {"DOCTOR": "doctor"} | ({"DOCTOR_SECONDS": "0.5"} if doctor == HANGS else {})
    make_command(tmp_path, "timeout", f'echo "$*" >{tmp_path}/limit; exec /usr/bin/timeout "$@"')
    if drained is None:  # then `command` finds nothing
        environment["BASH_FUNC_command%%"] = "() { return 1; }"
    assert subprocess.run(["bash", ROOT / "deploy/check_node.sh"], env=environment, check=False).returncode == status
    updated, said, began = ("".join(f.read_text() for f in tmp_path.glob(name)) for name in ("update", "said", "began"))
    assert began.endswith("check_node.sh mended\n") == ((drained, role) == (OURS, "health"))
    assert updated.splitlines() == (["NodeName=node1", *update] if update else [])
    assert doctor == HANGS or role == "health" or (tmp_path / "limit").read_text() == "--kill-after=10 120 doctor\n"
    assert ("node1: there is no scontrol in " in said) == (drained is None)
