"""A real Slurm cluster of a few nodes on one machine, and trainings on it, for the tests marked `slurm`.

Every node, and the controller, has its own network, UTS, mount and process namespaces. Cables (veth pairs) join them to
a bridge in the controller's network namespace. This machine's network, files and services stay unchanged. Killing a
host's `unshare` ends everything in it, and the kernel kills it with this process, so nothing is left behind. Needs root
and the packages of tests/system/slurm/install.sh.
"""

import contextlib
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from tests.processes import ROOT, wait_until
from utils.run.logger import read_records

PYTHON = Path(sys.executable).parent  # holds torchrun too
OPTIONS = ("--cpus-per-task=2", "--gpus-per-node=2")
NSENTER = shutil.which("nsenter") or "nsenter"  # independent of a PATH that a test has changed
CONTROLLER = "ctl"
SUBNET = "10.77.0."  # visible only inside the namespaces
CPUS_PER_NODE = 64  # configured, whatever this machine has
GPUS = ["/dev/null", "/dev/zero"]
FREEZER = Path("/sys/fs/cgroup/freezer")  # cgroup v1
FINAL_STATES = {"COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY", "PREEMPTED"}

# The first process of a host is bash, which reaps orphans. $1: folder, $2: address, $3: cgroup to mount or "".
# munged needs --force, because it rejects a folder closed to other users.
BOOT_CONTROLLER = """
ip link add br0 type bridge forward_delay 0 stp_state 0 && ip addr add "$2/24" dev br0 && ip link set br0 up
munged -F --force --key-file="$1/munge/key" --socket="$1/munge/socket" --pid-file="$1/munge/pid" \
    --log-file="$1/munge/log" --seed-file="$1/munge/seed" &
until [[ -S $1/munge/socket ]]; do sleep 0.02; done
slurmctld -D -f "$1/slurm.conf" &
wait
"""
BOOT_NODE = """
[[ -z $3 ]] || mount --bind "$3" /sys/fs/cgroup/freezer
until ip link show eth0; do sleep 0.02; done &>/dev/null
ip addr add "$2/24" dev eth0 && ip link set eth0 up
slurmd -D -N "$HOSTNAME" -f "$1/slurm.conf" &
wait
"""


@contextlib.contextmanager
def start_cluster(num_nodes, settings=""):
    """Give a SlurmCluster whose nodes node1..nodeN are idle; skip the test on a machine that cannot have one."""
    commands = ["slurmctld", "slurmd", "sbatch", "munged", "ip", "unshare", "nsenter", "setpriv"]
    missing = [command for command in commands if not shutil.which(command, path=os.environ["PATH"] + ":/usr/sbin")]
    if missing:
        pytest.skip(f"not installed: {' '.join(missing)} (tests/system/slurm/install.sh)")
    if subprocess.run(["unshare", "--net", "--pid", "--fork", "true"], capture_output=True, check=False).returncode:
        pytest.skip("namespaces are not allowed here, or this is not root")
    with tempfile.TemporaryDirectory(prefix="slurm-") as made:  # a short path: the path of a Unix socket is limited
        cluster = SlurmCluster(Path(made), num_nodes, settings)
        try:
            cluster.power_on()
            yield cluster
        finally:
            cluster.power_off()


class SlurmCluster:
    """The hosts of a cluster, and Slurm's commands on the controller's host."""

    def __init__(self, folder, num_nodes, settings=""):
        self.folder, self.settings = folder, settings  # further lines of slurm.conf
        self.addresses = {f"node{i}": f"{SUBNET}{i}" for i in range(1, num_nodes + 1)}
        self.hosts: dict[str, subprocess.Popen[bytes]] = {}
        # With a cgroup, as in production, a signal reaches only a task's own process; with linuxproc its whole tree.
        writable = os.access(FREEZER / "cgroup.procs", os.W_OK)
        self.cgroup = FREEZER / f"slurm-{secrets.token_hex(4)}" if writable else None
        self.conf = str(folder / "slurm.conf")
        self.env = os.environ | {"SLURM_CONF": self.conf}

    def power_on(self):
        self._write_files()
        if self.cgroup:
            self.cgroup.mkdir()
        self._boot(CONTROLLER, f"{SUBNET}254", BOOT_CONTROLLER)
        wait_until("munge", 60, (self.folder / "munge/socket").exists)
        for name in self.addresses:
            self.boot_node(name)
        self.wait_for_idle_nodes()

    def power_off(self):
        for name in [*self.hosts]:
            self._kill_host(name)
        if self.cgroup:  # can be removed shortly after its last process has ended
            remove = ["find", str(self.cgroup), "-depth", "-type", "d", "-delete"]
            wait_until(f"end of {self.cgroup}", 60, lambda: not subprocess.run(remove, check=False).returncode)

    def submit(self, script, *args, options=(), cwd, **env):
        """Run sbatch in folder cwd, with env added; return the job's id."""
        return int(self.client("sbatch", "--parsable", *options, str(script), *args, cwd=cwd, env=env))

    def job(self, job):
        words = self.client("scontrol", "-o", "show", "job", str(job)).split()
        return dict(word.split("=", 1) for word in words if "=" in word)

    def wait(self, job, timeout, state=None):
        """Wait for the state, or any final state; return the job's fields. AssertionError after timeout seconds."""

        def reached():
            fields = self.job(job)
            return fields if fields["JobState"] in (FINAL_STATES if state is None else {state}) else None

        return wait_until(f"{state or 'end'} of job {job}", timeout, reached)

    def wait_for_idle_nodes(self):
        def states():
            with contextlib.suppress(subprocess.CalledProcessError):  # Slurm does not answer yet
                return {*self.client("sinfo", "--noheader", "--Node", "--format=%T").split()}

        wait_until("idle nodes", 200, lambda: states() == {"idle"})

    def kill_node(self, name):
        """Power the node off; its peers do not see their connections close."""
        self.client("ip", "link", "delete", f"v-{name}")
        self._kill_host(name)

    def boot_node(self, name):
        self._boot(name, self.addresses[name], BOOT_NODE)
        # The card keeps its hardware address, as a real one does. Otherwise other nodes send to the old one for 20 s.
        card = f"02:00:00:00:00:{int(name.removeprefix('node')):02x}"
        peer = ["peer", "name", "eth0", "address", card, "netns", str(self.hosts[name].pid)]
        self.client("ip", "link", "add", f"v-{name}", "type", "veth", *peer)
        self.client("ip", "link", "set", f"v-{name}", "master", "br0", "up")

    def pids(self, name):
        """Return {process id on this machine: command line} of all processes on the node."""
        namespace = os.readlink(f"/proc/{self.hosts[name].pid}/ns/net")
        found = {}
        for process in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                if os.readlink(process / "ns/net") == namespace:
                    found[int(process.name)] = (process / "cmdline").read_bytes().replace(b"\0", b" ").decode()
        return found

    def client(self, *command, cwd=None, env=None):
        """Run a command on the controller's host and return its output; CalledProcessError if it fails."""
        enter = [NSENTER, "--target", str(self.hosts[CONTROLLER].pid), "--net", "--uts"]
        return subprocess.check_output([*enter, *command], cwd=cwd, env=self.env | (env or {}), text=True)

    def _boot(self, name, address, script):
        start = f'hostname "$0"; HOSTNAME=$0; mount --bind "$1/hosts" /etc/hosts; ip link set lo up; {script}'
        spaces = ["--net", "--uts", "--mount", "--propagation=slave", "--pid", "--fork", "--mount-proc"]
        # If this process is killed, the kernel kills unshare, and with it the host's first process.
        isolated = ["setpriv", "--pdeathsig=KILL", "unshare", "--kill-child=KILL", *spaces]
        arguments = [name, str(self.folder), address, str(self.cgroup or "")]
        daemons = {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "LANG": "C.UTF-8", "HOME": "/"}
        command, environment = [*isolated, "bash", "-c", start, *arguments], daemons | {"SLURM_CONF": self.conf}
        with open(self.folder / f"{name}.log", "ab") as log:
            streams = {"stdin": subprocess.DEVNULL, "stdout": log, "stderr": log}
            host = self.hosts[name] = subprocess.Popen(command, env=environment, start_new_session=True, **streams)
        ours = os.readlink("/proc/self/ns/net")
        wait_until(f"host {name}", 60, lambda: os.readlink(f"/proc/{host.pid}/ns/net") != ours, 0.01)

    def _kill_host(self, name):
        host = self.hosts.pop(name)
        # Its only child is the namespace's first process. Killing that makes the kernel kill, and wait for, all others.
        children = Path(f"/proc/{host.pid}/task/{host.pid}/children").read_text().split()
        for pid in children or [str(host.pid)]:
            os.kill(int(pid), signal.SIGKILL)
        host.wait(60)

    def _write_files(self):
        for name in ["munge", "state", *(f"spool/{node}" for node in self.addresses)]:
            (self.folder / name).mkdir(parents=True)
        (self.folder / "munge").chmod(0o700)
        key = self.folder / "munge/key"
        key.touch(0o600)
        key.write_bytes(secrets.token_bytes(128))
        # Any two devices serve as GPUs. no_gpu_env keeps the submitter's CUDA_VISIBLE_DEVICES.
        (self.folder / "gres.conf").write_text("".join(f"Name=gpu File={gpu} Flags=no_gpu_env\n" for gpu in GPUS))
        (self.folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\nCgroupAutomount=no\n")
        hosts = {"localhost": "127.0.0.1", CONTROLLER: f"{SUBNET}254"} | self.addresses
        (self.folder / "hosts").write_text("".join(f"{address} {name}\n" for name, address in hosts.items()))
        rest = f"CPUs={CPUS_PER_NODE} RealMemory=64000 Gres=gpu:{len(GPUS)}\n"
        nodes = "".join(f"NodeName={name} NodeAddr={address} {rest}" for name, address in self.addresses.items())
        (self.folder / "slurm.conf").write_text(f"""\
ClusterName=test
SlurmctldHost={CONTROLLER}({SUBNET}254)
SlurmUser=root
# A requeued job waits for cred_expire before it may start again (default 120 s).
AuthInfo=socket={self.folder}/munge/socket,cred_expire=5
StateSaveLocation={self.folder}/state
SlurmdSpoolDir={self.folder}/spool/%n
SlurmctldPidFile={self.folder}/slurmctld.pid
SlurmdPidFile={self.folder}/slurmd-%n.pid
SlurmctldLogFile={self.folder}/slurmctld.log
SlurmdLogFile={self.folder}/slurmd-%n.log
ProctrackType=proctrack/{"cgroup" if self.cgroup else "linuxproc"}
PropagateResourceLimits=NONE
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SlurmdParameters=config_overrides
GresTypes=gpu
ReturnToService=2
SchedulerParameters=sched_interval=2,bf_interval=2
MessageTimeout=5
SlurmdTimeout=30
MinJobAge=3600
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
{nodes}PartitionName=main Nodes=ALL Default=YES PriorityTier=2
# Jobs in main preempt jobs in the other partitions, at once or after a grace time.
PartitionName=low Nodes=ALL
PartitionName=low-grace Nodes=ALL GraceTime=60
{self.settings}
""")


def link_project(folder):
    """Link the project as jobs see it; their output stays out of the real folder."""
    for name in ["config", "deploy", "models", "tools", "utils", "train.py", "submit.slr", "submit_multinode.slr"]:
        (folder / name).symlink_to(ROOT / name)
    return folder


class SlurmRun:
    """One training over all its jobs: the last job's id, their output, the run's folder."""

    def __init__(self, cluster, project, name, settings):
        self.cluster, self.project, self.job = cluster, project, 0
        self.folder, self.output = project / "expts" / name, project / f"{name}.out"
        self.words = [f"--run-dir={self.folder}", *(f"--set={key}={value}" for key, value in settings.items())]

    def submit(self, script="submit_multinode.slr", words=("--config=bs128-opt",), options=OPTIONS, **environment):
        """Submit the training, or its next job; return the run."""
        base = {"OMP_NUM_THREADS": "1", "PATH": f"{PYTHON}:{os.environ['PATH']}", "SUBMIT_PROCESSES": "1"}
        base |= {"SLURM_WAIT": "60"} | environment
        options, words = (*options, f"--output={self.output}"), (*words, *self.words)
        self.job = self.cluster.submit(self.project / script, *words, options=options, cwd=self.project, **base)
        return self

    def log(self):
        return self.output.read_text(errors="replace") if self.output.exists() else ""

    def wait_for(self, text):
        wait_until(lambda: f"{text!r} in the log:\n{self.log()}", 300, lambda: text in self.log())

    def end(self, state):
        """Wait for the job's end, check its state, return its fields."""
        fields = self.cluster.wait(self.job, 300)
        assert fields["JobState"] == state, f"{fields['JobState']} {fields['ExitCode']}, not {state}:\n{self.log()}"
        return fields

    def epochs(self):
        """Return the records of the epochs without the measured times."""
        records = read_records(self.folder, "epoch")
        return [{key: value for key, value in record.items() if "sec" not in key} for record in records]
