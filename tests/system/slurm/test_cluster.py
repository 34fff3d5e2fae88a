"""The job scripts and deploy/check_node.sh on a real Slurm cluster, whose nodes have two fake GPUs each."""

import os
import re
import signal
import sys
import time

import pytest

from tests.conftest import ROOT, TINY
from tests.processes import make_command, wait_until
from tests.system.slurm.cluster import OPTIONS, SlurmRun, link_project, start_cluster

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(600), pytest.mark.xdist_group("slurm")]  # they share one cluster

# Slurm's signals reach loader workers too.
SETTINGS = TINY | {"limit_train_batches": 30, "max_epochs": 3, "log_freq": 10, "data_loader": "torchvision"}
SETTINGS |= {"num_data_workers": 1, "rank_timeout_seconds": 25, "model": "held:network"}

# resnet8, which a job's first start slows down to 2 s a batch after HELD_AFTER batches, until it is asked to stop.
HELD = """
import itertools, os, signal, time
from models import ModelConfig, build_model

def network(num_classes):
    model, passes = build_model(ModelConfig(model="resnet8", num_classes=num_classes)), itertools.count()
    first, held_after = "SLURM_RESTART_COUNT" not in os.environ, int(os.environ.get("HELD_AFTER", 10**6))
    def hold(*_):
        for _ in range(40 * (first and next(passes) >= held_after)):
            time.sleep(0.05 * (not signal.getsignal(signal.SIGTERM).__self__.signal))
    model.register_forward_pre_hook(hold)
    return model
"""


@pytest.fixture(scope="module")
def shared_cluster():
    """Three nodes: two for the jobs, one spare."""
    with start_cluster(3) as running:
        yield running


@pytest.fixture
def cluster(shared_cluster):
    """The cluster; jobs left by a failed test are cancelled."""
    yield shared_cluster
    shared_cluster.client("scancel", "--user=root")


@pytest.fixture(scope="module")
def project(tmp_path_factory):
    folder = link_project(tmp_path_factory.mktemp("project"))
    (folder / "held.py").write_text(HELD)
    return folder


@pytest.fixture(scope="module")
def uninterrupted(shared_cluster, project):
    """A finished run on two nodes, one process each."""
    run = SlurmRun(shared_cluster, project, "uninterrupted", SETTINGS).submit()
    assert run.end("COMPLETED")["ExitCode"] == "0:0"
    return run


def test_two_nodes_complete_and_a_bare_srun_trains_like_the_script(cluster, project, uninterrupted):
    assert [row["epoch"] for row in uninterrupted.epochs()] == [1, 2, 3]
    assert not list(uninterrupted.folder.parent.glob(".slurm-*"))
    header = "#!/bin/bash\n#SBATCH --nodes=2 --ntasks-per-node=1\n"
    (project / "bare.slr").write_text(header + 'srun python train.py "$@"\n')
    bare = SlurmRun(cluster, project, "bare", SETTINGS).submit("bare.slr")
    assert bare.end("COMPLETED")["ExitCode"] == "0:0"
    assert all("batch 32 = 2 rank(s)" in run.log() for run in (bare, uninterrupted))
    assert bare.epochs() == uninterrupted.epochs()


def kill_torchrun(cluster, job):
    (torchrun,) = (pid for pid, command in cluster.pids("node2").items() if re.search(r"python\S* -m tools\.", command))
    os.kill(torchrun, signal.SIGKILL)


def reboot_node(cluster, job):
    cluster.kill_node("node2")
    cluster.boot_node("node2")


def cut_link(cluster, job):
    """The isolated rank ends without a signal. Its node is back when the job runs on another one."""
    cluster.client("ip", "link", "set", "v-node2", "down")
    wait_until("end of the rank", 120, lambda: "-u train.py" not in " ".join(cluster.pids("node2").values()))
    wait_until("restart", 120, lambda: (row := cluster.job(job))["Restarts"] + row["JobState"] == "1RUNNING")
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


@pytest.mark.parametrize("name", DISTURBANCES)
def test_a_disturbed_job_ends_like_an_uninterrupted_one(cluster, project, uninterrupted, name):
    disturb, options, patience, requeued_by = DISTURBANCES[name]
    run = SlurmRun(cluster, project, name.replace(" ", "-"), SETTINGS)
    run.submit(options=(*OPTIONS, *options), SLURM_WAIT=patience, HELD_AFTER="45").wait_for("Epoch: 2, Iteration: ")
    assert cluster.job(run.job)["NodeList"] == "node[1-2]"
    disturb(cluster, str(run.job))
    fields = run.end("COMPLETED")
    assert fields["Restarts"] == "1" and fields["ExitCode"] == "0:0" and "Resuming from" in run.log()
    if cluster.cgroup or name != "torchrun killed":  # without a cgroup Slurm first finds its ranks at srun's SIGTERM
        assert ("with everything saved" in run.log()) == name.startswith(("SIGUSR1", "preempted"))
    assert (f"requeued as job {run.job}" in run.log()) == (requeued_by == "script")
    assert run.epochs() == uninterrupted.epochs()
    assert not list(run.folder.parent.glob(f"*-{run.job}*"))  # neither logs of torchrun nor the status folder
    if name in ("node lost", "link cut"):
        assert fields["NodeList"] == "node[1,3]"
    if name == "node lost":
        cluster.boot_node("node2")
    cluster.wait_for_idle_nodes()


def test_cancelled_saves_and_stays_cancelled(cluster, project):
    run = SlurmRun(cluster, project, "cancelled", SETTINGS).submit(HELD_AFTER="15")
    run.wait_for("Epoch: 1, Iteration: ")
    cluster.client("scancel", str(run.job))
    run.wait_for("with everything saved; run the same command again to resume")
    if cluster.cgroup:  # otherwise the signal also reaches srun, which does not return before the script is killed
        run.wait_for("this script does not requeue the job (COMPLETING); if Slurm does not either,\n")
    time.sleep(8)  # longer than a requeued job would wait
    assert run.end("CANCELLED")["Restarts"] == "0"


TWO_GPUS = ["--nodes=2 --gres=gpu:2", "--exclusive", "--gpus-per-task=2 --gpus=2 --gpus-per-node=2"]


@pytest.mark.parametrize("options", TWO_GPUS)
def test_step_sees_all_gpus_of_the_job(cluster, project, tmp_path, options):
    """Whatever option asks sbatch for two GPUs; the #SBATCH line asks for one."""
    make_command(tmp_path, "python", '[[ $1 == train.py ]] || echo "$SLURMD_NODENAME has GPUs $SLURM_STEP_GPUS: $*"')
    path, log = f"{tmp_path}:{os.environ['PATH']}", tmp_path / "log"
    all_options = (*options.split(), "--cpus-per-task=2", f"--output={log}")
    job = cluster.submit(project / "submit.slr", options=all_options, cwd=project, PATH=path)
    assert cluster.wait(job, 300)["JobState"] == "COMPLETED", log.read_text()
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


def test_a_failed_check_drains_the_node_until_it_is_mended(tmp_path):
    (tmp_path / "one_check.py").write_text(ONE_CHECK)
    (broken := tmp_path / "broken-node1").touch()
    check, log = tmp_path / "check", tmp_path / "log"
    settings = f"Prolog={check}\nEpilog={check}\nHealthCheckProgram={check}\n"
    with start_cluster(1, f"{settings}HealthCheckInterval=2\nHealthCheckNodeState=IDLE") as cluster:

        def node():
            return cluster.client("sinfo", "--noheader", "--partition=main", "--format=%T %E").strip()

        make_command(tmp_path, "check", f"""
            export SLURM_CONF={cluster.conf} PYTHONPATH={ROOT} OMP_NUM_THREADS=1
            export DOCTOR="{sys.executable} {tmp_path}/one_check.py {broken}"
            exec {ROOT}/deploy/check_node.sh "$@"
        """)  # fmt: skip
        make_command(tmp_path, "job", "echo ran")
        job = cluster.submit(tmp_path / "job", options=[f"--output={log}"], cwd=tmp_path)
        wait_until("drained node1", 200, lambda: node() == "drained check_node.sh: pcie 16 lanes")
        assert cluster.wait(job, 100, "PENDING")["Restarts"] == "1"
        assert "ran" not in log.read_text().splitlines()
        broken.unlink()
        wait_until("idle node1", 200, lambda: node().startswith("idle"))
        cluster.client("scontrol", "release", str(job))
        assert cluster.wait(job, 200)["JobState"] == "COMPLETED"
        assert "ran" in log.read_text().splitlines()
