"""A real Slurm cluster of a few nodes on one machine, for the tests marked `slurm`.

Every node, and the controller, is a host of its own: network, UTS, mount and process namespaces, joined by cables
(veth pairs) to a bridge that lives in the controller's network namespace. Nothing is added to this machine's network,
files or services. Killing a host's `unshare` ends everything in it, and the kernel kills it with this process, so that
nothing is left behind. Needs root and the packages of tests/install_slurm.sh.
"""

import contextlib
import os
import secrets
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

NSENTER = shutil.which("nsenter") or "nsenter"  # also under a PATH that a test has changed
CONTROLLER = "ctl"
SUBNET = "10.77.0."  # seen only inside the namespaces
CPUS_PER_NODE = 64  # claimed, whatever this machine has
GPUS = ["/dev/null", "/dev/zero"]
FREEZER = Path("/sys/fs/cgroup/freezer")  # cgroup v1
FINAL_STATES = {"COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY", "PREEMPTED"}

# The first process of a host: bash, which reaps orphans. $1 folder, $2 address, $3 cgroup to show or "".
# munged is forced, as it objects to a folder closed to other users.
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


def why_not() -> str | None:
    """Why this machine cannot run the cluster, or None where it can."""
    if os.geteuid():
        return "a Slurm cluster in namespaces needs root"
    commands = ["slurmctld", "slurmd", "sbatch", "munged", "ip", "unshare", "nsenter", "setpriv"]
    missing = [command for command in commands if not shutil.which(command, path=os.environ["PATH"] + ":/usr/sbin")]
    if missing:
        return f"not installed: {' '.join(missing)} (tests/install_slurm.sh)"
    if subprocess.run(["unshare", "--net", "--pid", "--fork", "true"], capture_output=True, check=False).returncode:
        return "namespaces are not allowed here"
    return None


def wait_until(what: str, seconds: float, test: Callable[[], Any], step: float = 0.1) -> Any:
    """The first true value of test(); AssertionError naming `what` after so many seconds."""
    deadline = time.monotonic() + seconds
    while not (value := test()):
        assert time.monotonic() < deadline, f"no {what} within {seconds} s"
        time.sleep(step)
    return value


class SlurmCluster:
    """A context manager: nodes node1..nodeN are idle when it is entered, and gone when it is left."""

    def __init__(self, folder: Path, num_nodes: int) -> None:
        self.folder = folder
        self.addresses = {f"node{i}": f"{SUBNET}{i}" for i in range(1, num_nodes + 1)}
        self.hosts: dict[str, subprocess.Popen[bytes]] = {}
        # With a cgroup, as in production, a signal reaches a task's own process only; with linuxproc its whole tree.
        self.cgroup = (
            FREEZER / f"slurm-{secrets.token_hex(4)}" if os.access(FREEZER / "cgroup.procs", os.W_OK) else None
        )
        self.env = os.environ | {"SLURM_CONF": str(folder / "slurm.conf")}

    def __enter__(self) -> "SlurmCluster":
        self._write_files()
        try:
            if self.cgroup:
                self.cgroup.mkdir()
            self._boot(CONTROLLER, f"{SUBNET}254", BOOT_CONTROLLER)
            wait_until("munge", 10, (self.folder / "munge/socket").exists)
            for name in self.addresses:
                self.boot_node(name)
            wait_until("idle nodes", 60, lambda: set(self.node_states().values()) == {"idle"})
        except BaseException:
            self._power_off()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        self._power_off()

    # Jobs

    def submit(self, script: Path, *args: str, options: tuple[str, ...] = (), cwd: Path, **env: str) -> int:
        """sbatch from folder cwd, in this process's environment changed by env; returns the job's id."""
        return int(self.client("sbatch", "--parsable", *options, str(script), *args, cwd=cwd, env=env))

    def job(self, job: int) -> dict[str, str]:
        """The fields of `scontrol show job`."""
        words = self.client("scontrol", "-o", "show", "job", str(job)).split()
        return dict(word.split("=", 1) for word in words if "=" in word)

    def wait(self, job: int, timeout: float, state: str | None = None) -> dict[str, str]:
        """The job's fields once it is in that state, or in any final one; AssertionError after timeout seconds."""

        def reached() -> dict[str, str] | None:
            fields = self.job(job)
            return fields if fields["JobState"] in (FINAL_STATES if state is None else {state}) else None

        fields: dict[str, str] = wait_until(f"{state or 'end'} of job {job}", timeout, reached)
        return fields

    def cancel(self, job: int, *options: str) -> None:
        """scancel, which with `-s SIGNAL` signals the steps and with `-b -s SIGNAL` the batch shell."""
        self.client("scancel", *options, str(job))

    def said(self) -> str:
        """What the controller has logged."""
        return (self.folder / "slurmctld.log").read_text()

    # Nodes

    def node_states(self) -> dict[str, str]:
        """State of each node, as sinfo spells it."""
        try:
            lines = self.client("sinfo", "--noheader", "--Node", "--format=%N %T").splitlines()
        except subprocess.CalledProcessError:
            return {"": "no answer"}
        return dict(line.split(None, 1) for line in lines)

    def kill_node(self, name: str) -> None:
        """Power the node off. It says nothing more, so its peers do not see their connections close."""
        self.client("ip", "link", "delete", f"v-{name}")
        self._kill_host(name)

    def boot_node(self, name: str) -> None:
        """Power the node on and plug it in."""
        self._boot(name, self.addresses[name], BOOT_NODE)
        peer = ["peer", "name", "eth0", "netns", str(self.hosts[name].pid)]
        self.client("ip", "link", "add", f"v-{name}", "type", "veth", *peer)
        self.client("ip", "link", "set", f"v-{name}", "master", "br0", "up")

    def pids(self, name: str) -> dict[int, str]:
        """Process id, as this machine numbers it, and command line of everything on the node."""
        namespace = os.readlink(f"/proc/{self.hosts[name].pid}/ns/net")
        found = {}
        for process in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                if os.readlink(process / "ns/net") == namespace:
                    found[int(process.name)] = (process / "cmdline").read_bytes().replace(b"\0", b" ").decode()
        return found

    # Below

    def client(self, *command: str, cwd: Path | None = None, env: dict[str, str] | None = None) -> str:
        """Output of a command run on the controller's host; CalledProcessError where it fails."""
        enter = [NSENTER, "--target", str(self.hosts[CONTROLLER].pid), "--net", "--uts"]
        done = subprocess.run(
            [*enter, *command], cwd=cwd, env=self.env | (env or {}), capture_output=True, text=True, check=True
        )
        return done.stdout

    def _boot(self, name: str, address: str, script: str) -> None:
        start = f'hostname "$0"; HOSTNAME=$0; mount --bind "$1/hosts" /etc/hosts; ip link set lo up; {script}'
        spaces = ["--net", "--uts", "--mount", "--propagation=slave", "--pid", "--fork", "--mount-proc"]
        # Where this process is killed, the kernel kills unshare, and unshare's end the host's first process.
        host_of_its_own = ["setpriv", "--pdeathsig=KILL", "unshare", "--kill-child=KILL", *spaces]
        arguments = [name, str(self.folder), address, str(self.cgroup or "")]
        daemons = {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "LANG": "C.UTF-8", "HOME": "/"}
        with open(self.folder / f"{name}.log", "ab") as log:
            host = self.hosts[name] = subprocess.Popen(
                [*host_of_its_own, "bash", "-c", start, *arguments],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=daemons | {"SLURM_CONF": self.env["SLURM_CONF"]},
                start_new_session=True,
            )
        ours = os.readlink("/proc/self/ns/net")
        wait_until(f"host {name}", 10, lambda: os.readlink(f"/proc/{host.pid}/ns/net") != ours, 0.01)

    def _kill_host(self, name: str) -> None:
        host = self.hosts.pop(name)
        # Its one child is the first process of the namespace: with it the kernel ends, and awaits, all others.
        children = Path(f"/proc/{host.pid}/task/{host.pid}/children").read_text().split()
        for pid in children or [str(host.pid)]:
            os.kill(int(pid), signal.SIGKILL)
        host.wait(10)

    def _power_off(self) -> None:
        for name in [*self.hosts]:
            self._kill_host(name)
        if self.cgroup:
            wait_until(f"end of {self.cgroup}", 10, self._is_cgroup_removed)

    def _is_cgroup_removed(self) -> bool:
        """A cgroup can go a moment after its last process ended."""
        assert self.cgroup is not None
        with contextlib.suppress(OSError):
            for folder, _, _ in os.walk(self.cgroup, topdown=False):
                os.rmdir(folder)
        return not self.cgroup.exists()

    def _write_files(self) -> None:
        for name in ["munge", "state", *(f"spool/{node}" for node in self.addresses)]:
            (self.folder / name).mkdir(parents=True)
        (self.folder / "munge").chmod(0o700)
        key = self.folder / "munge/key"
        key.touch(0o600)
        key.write_bytes(secrets.token_bytes(128))
        # Any two devices play the GPUs. no_gpu_env: CUDA_VISIBLE_DEVICES stays the submitter's.
        (self.folder / "gres.conf").write_text("".join(f"Name=gpu File={gpu} Flags=no_gpu_env\n" for gpu in GPUS))
        (self.folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\nCgroupAutomount=no\n")
        hosts = {"localhost": "127.0.0.1", CONTROLLER: f"{SUBNET}254"} | self.addresses
        (self.folder / "hosts").write_text("".join(f"{address} {name}\n" for name, address in hosts.items()))
        nodes = "".join(
            f"NodeName={name} NodeAddr={address} CPUs={CPUS_PER_NODE} RealMemory=64000 Gres=gpu:{len(GPUS)}\n"
            for name, address in self.addresses.items()
        )
        (self.folder / "slurm.conf").write_text(f"""\
ClusterName=test
SlurmctldHost={CONTROLLER}({SUBNET}254)
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
CredType=cred/munge
# A requeued job waits for cred_expire before it may start again (default 120 s).
AuthInfo=socket={self.folder}/munge/socket,cred_expire=5
StateSaveLocation={self.folder}/state
SlurmdSpoolDir={self.folder}/spool/%n
SlurmctldPidFile={self.folder}/slurmctld.pid
SlurmdPidFile={self.folder}/slurmd-%n.pid
SlurmctldLogFile={self.folder}/slurmctld.log
SlurmdLogFile={self.folder}/slurmd-%n.log
ProctrackType=proctrack/{"cgroup" if self.cgroup else "linuxproc"}
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
SwitchType=switch/none
MpiDefault=none
MailProg=/bin/true
PropagateResourceLimits=NONE
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SlurmdParameters=config_overrides
GresTypes=gpu
ReturnToService=2
SchedulerParameters=sched_interval=2,bf_interval=2
MessageTimeout=5
KillWait=30
SlurmdTimeout=10
MinJobAge=3600
AccountingStorageType=accounting_storage/none
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
{nodes}PartitionName=main Nodes=ALL Default=YES PriorityTier=2
# Jobs of main push those of the others aside, at once or after a warning.
PartitionName=low Nodes=ALL
PartitionName=low-grace Nodes=ALL GraceTime=60
""")
