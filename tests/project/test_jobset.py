"""deploy/jobset.yaml: matches the published schema, and its script runs as two pods on this machine."""

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from ruamel.yaml import YAML

from tests.conftest import ROOT, TINY, as_options
from tests.processes import free_port, make_command, wait_until, without_launcher

MANIFEST: dict[str, Any] = YAML(typ="safe").load(ROOT / "deploy/jobset.yaml")
JOB = MANIFEST["spec"]["replicatedJobs"][0]["template"]["spec"]
(CONTAINER,) = JOB["template"]["spec"]["containers"]
ENVIRONMENT = {variable["name"]: variable["value"] for variable in CONTAINER["env"]}


class Pods:
    """The container's command in `count` processes, as Kubernetes would start it in `count` pods."""

    def __init__(self, folder, count, ranks, *arguments):
        self.processes, port = [], free_port()
        for index in range(count):
            variables = ENVIRONMENT | {"NODES": str(count), "LOCAL_WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1"}
            variables |= {"JOB_COMPLETION_INDEX": str(index), "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"}
            variables["PATH"] = f"{folder}:{Path(sys.executable).parent}:{os.environ['PATH']}"
            with (folder / f"pod{index}.log").open("a") as log:
                command = [*CONTAINER["command"], *arguments]
                environment = without_launcher(os.environ) | variables
                self.processes.append(subprocess.Popen(command, cwd=ROOT, env=environment, stdout=log, stderr=log))

    def wait(self):
        return [process.wait(timeout=120) for process in self.processes]


def fake_command(folder, action):
    """Write a `python` that records its rank and arguments and then runs `action`, in bash."""
    make_command(folder, "python", f'echo "$RANK $LOCAL_RANK $WORLD_SIZE $*" >"{folder}/rank.$RANK"\n{action}')


def test_manifest_matches_the_published_schema():
    models = pytest.importorskip("kubeflow_trainer_api.models.jobset_v1alpha2_job_set", reason="the package is absent")
    # fields unknown to the schema would be lost in the round trip
    assert models.JobsetV1alpha2JobSet.from_dict(MANIFEST).to_dict() == MANIFEST


def test_numbers_of_nodes_and_gpus_agree_and_exit_statuses_lead_to_the_documented_actions():
    assert JOB["parallelism"] == JOB["completions"] == int(ENVIRONMENT["NODES"])
    assert CONTAINER["resources"]["limits"]["nvidia.com/gpu"] == int(ENVIRONMENT["LOCAL_WORLD_SIZE"])
    name, job = MANIFEST["metadata"]["name"], MANIFEST["spec"]["replicatedJobs"][0]["name"]
    assert ENVIRONMENT["MASTER_ADDR"] == f"{name}-{job}-0-0.{name}"
    # Kubernetes' message: Container NAME for pod POD failed with exit code N matching FailJob rule at index I
    saved, mistake = MANIFEST["spec"]["failurePolicy"]["rules"]
    reported = [dict(rule["onExitCodes"]) for rule in JOB["podFailurePolicy"]["rules"]]
    assert [rule.pop("values") for rule in reported] == [[75], [2, 3, 4, 5]]  # say more than "failed": utils/errors.py
    assert reported == [{"containerName": CONTAINER["name"], "operator": "In"}] * 2
    pod = JOB["template"]["spec"]
    assert (JOB["backoffLimit"], pod["restartPolicy"], pod["terminationGracePeriodSeconds"]) == (0, "Never", 120)
    assert MANIFEST["spec"]["failurePolicy"]["maxRestarts"] == 10
    assert saved["onJobFailureMessagePatterns"] == ["exit code 75 "]
    assert (saved["action"], mistake["action"]) == ("RestartJobSetAndIgnoreMaxRestarts", "FailJobSet")
    assert saved["onJobFailureReasons"] == mistake["onJobFailureReasons"] == ["PodFailurePolicy"]


def test_each_pod_starts_its_ranks(tmp_path):
    fake_command(tmp_path, "")
    assert Pods(tmp_path, 2, 2, "--config=a", "--set", "b=c  d").wait() == [0, 0]
    started = [(tmp_path / f"rank.{rank}").read_text() for rank in range(4)]
    assert started == [f"{rank} {rank % 2} 4 train.py --config=a --set b=c  d\n" for rank in range(4)]


@pytest.mark.parametrize(("action", "status"), [("exit 2", 2), ("((RANK < 1)) || exit 3", 3), ("kill -9 $$", 137),
    ("exit $((1 + 2 * RANK))", 3)])  # fmt: skip
def test_pod_exits_with_the_trainings_status(tmp_path, action, status):
    fake_command(tmp_path, action)
    assert Pods(tmp_path, 1, 2).wait() == [status]


def test_eviction_signals_every_rank_and_waits_for_it(tmp_path):
    save = f'trap "sleep 0.5; touch {tmp_path}/saved.$RANK; exit 75" TERM\n'
    fake_command(tmp_path, f'{save}touch "{tmp_path}/ready.$RANK"\nwhile ((SECONDS < 60)); do sleep 0.05; done')
    pods = Pods(tmp_path, 1, 2)
    wait_until("start of the ranks", 100, lambda: len(list(tmp_path.glob("ready.*"))) == 2, 0.05)
    pods.processes[0].send_signal(signal.SIGTERM)
    assert pods.wait() == [75]
    assert len(list(tmp_path.glob("saved.*"))) == 2


@pytest.mark.slow
def test_evicted_training_resumes(tmp_path):
    arguments = [f"--run-dir={tmp_path}/run", *as_options(TINY | {"max_epochs": 2000})]
    pods = Pods(tmp_path, 2, 1, *arguments)
    log = tmp_path / "run/train.log"
    wait_until("first epoch", 100, lambda: log.exists() and "Starting Training Loop" in log.read_text(), 0.2)
    pods.processes[1].send_signal(signal.SIGTERM)
    assert pods.wait() == [75, 75]
    pods = Pods(tmp_path, 2, 1, *arguments)
    wait_until("second start", 100, lambda: log.read_text().count("Starting Training Loop") == 2, 0.2)
    pods.processes[0].send_signal(signal.SIGTERM)
    assert pods.wait() == [75, 75]
