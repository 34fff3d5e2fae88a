"""tools.doctor's finding `dcgm`: what `dcgmi diag --json` of DCGM 3 and 4 prints, and a fake dcgmi.

The outputs are real ones, shortened: fewer tests, no `info`. Sources on GitHub:
- 3.1: microsoft/VirtualClient, DCGMIDiag_r3_results.json in src/VirtualClient/VirtualClient.Actions.UnitTests
- 3.1, failing: NVIDIA/DCGM v3.1.8, testing/TestDiagManagerStrings.h, PER_GPU_JSON
- 4.2, 4.5: baldwinSPC/glimmer-burnin, runners/dcgm-diag/testdata/gb10-level2-{partial-skip,plugins-allowed}.json
The outputs of 3.3, and the failures of 4, are composed as dcgmi/Diag.cpp of NVIDIA/DCGM v3.3.9 and v4.6.0 writes them.
"""

import json
import os
from pathlib import Path
from typing import Any

import pytest

from tests.processes import make_command
from tools.doctor.dcgm import check_dcgm, read_diagnostic


def dcgm3(*tests: dict[str, Any] | None) -> str:
    return json.dumps({"DCGM GPU Diagnostic": {"test_categories": [{"category": "Hardware", "tests": tests}]}})


def dcgm4(*tests: dict[str, Any]) -> str:
    metadata = {"Driver Version Detected": "580.82.09", "version": "4.5.2"}
    categories = [{"category": "Hardware", "tests": tests}]
    return json.dumps({"DCGM Diagnostic": {"test_categories": categories}, "metadata": metadata})


def gpu(number: int, status: str, *warnings: dict[str, Any]) -> dict[str, Any]:
    """A result of DCGM 4."""
    entity = {"entity_group": "GPU", "entity_group_id": 1, "entity_id": number, "status": status}
    return entity | ({"warnings": list(warnings)} if warnings else {})


def stress(number: int, rate: float) -> dict[str, Any]:
    text = f"Max stress level of {rate} did not exceed desired stress level of 3000.0 for GPU {number}"
    return {"gpu_ids": str(number), "status": "FAIL", "warnings": [{"warning": text, "error_id": 50}]}


PASSED_3 = (
    {"name": "Denylist", "results": [{"status": "Pass"}]},
    {"name": "PCIe", "results": [{"gpu_ids": "0", "info": "GPU 0 GPU to Host latency", "status": "Pass"}]},
    {"name": "EUD Test", "results": [{"gpu_ids": "0", "status": "Skip"}]},
)  # fmt: skip
FAILED_3 = (
    {"name": "diagnostic", "results": [{"gpu_ids": "0,1,2,3", "status": "SKIP", "warnings": None}]},
    None,
    {"name": "sm_stress", "results": [stress(0, 2128.7), {"gpu_ids": "1", "status": "PASS"}, stress(2, 1096.5)]},
)
INFOROM = {"error_id": 9, "error_severity": 4, "warnings": "A corrupt InfoROM has been detected in GPU 2."}
FAILED_33 = {"name": "Inforom", "results": [{"gpu_id": 2, "status": "Fail", "warnings": [INFOROM]}]}
TEXT = 'Persistence Mode: Persistence mode for GPU 0 is disabled. Enable persistence mode by running "nvidia-smi -i <gpuId> -pm 1 " as root.'  # noqa: E501
PERSISTENCE = {"error_category": 8, "error_id": 29, "error_severity": 5, "warning": TEXT}
SOFTWARE_4 = {"name": "software", "results": [gpu(0, "Fail", PERSISTENCE)], "test_summary": {"status": "Fail"}}
MEMORY_4 = {"name": "memory", "results": [gpu(0, "Skip")], "test_summary": {"status": "Skip"}}
PCIE_4 = {"name": "pcie", "results": [gpu(0, "Pass")], "test_summary": {"status": "Pass"}}
# severity 2: isolate the GPU
ECC = {"error_category": 10, "error_id": 12, "error_severity": 2, "warning": "Uncorrectable ECC memory error detected"}
BAD_4 = {"name": "memory", "results": [gpu(0, "Pass"), gpu(3, "Fail", ECC)], "test_summary": {"status": "Fail"}}
ALONE_4 = {"name": "nvbandwidth", "results": [gpu(0, "Skip")], "test_summary": {"status": "Fail", "warnings": [ECC]}}


@pytest.mark.parametrize(
    ("printed", "level", "message"),
    [
        (dcgm3(*PASSED_3), "ok", "3 tests; skipped: EUD Test on GPU 0"),
        (
            f"WARNING: old driver\n{dcgm3(*FAILED_3)}", "fail",
            "2 tests; failed: sm_stress on GPU 0,2: Max stress level of 2128.7 did not exceed desired stress level of "
            "3000.0 for GPU 0 (and 1 more); skipped: diagnostic on GPU 0,1,2,3",
        ),
        (dcgm3(FAILED_33), "fail", "1 tests; failed: Inforom on GPU 2: A corrupt InfoROM has been detected in GPU 2."),
        (dcgm4(PCIE_4), "ok", "1 tests"),
        (dcgm4(SOFTWARE_4, MEMORY_4, PCIE_4), "warn",
         f"3 tests; warned: software on GPU 0: {TEXT}; skipped: memory on GPU 0"),
        (dcgm4(SOFTWARE_4, BAD_4), "fail",
         f"2 tests; failed: memory on GPU 3: {ECC['warning']}; warned: software on GPU 0: {TEXT}"),
        (dcgm4(ALONE_4), "fail", f"1 tests; failed: nvbandwidth: {ECC['warning']}; skipped: nvbandwidth on GPU 0"),
    ],
    ids=["3.1", "3.1 fails", "3.3 fails", "4.5", "4.2 warns", "4 fails", "4 fails without a GPU"],
)  # fmt: skip
def test_results_of_both_versions(printed: str, level: str, message: str) -> None:
    finding = read_diagnostic(2, printed)
    assert (finding.level, finding.message) == (level, f"dcgmi diag -r 2: {message}")
    assert bool(finding.remedy) == (level != "ok")


@pytest.mark.parametrize(
    ("printed", "reason"),
    [
        ("", "no output"),
        ("Error: unable to establish a connection to the specified host: localhost\n", "Error: unable to establish"),
        ('{"DCGM Diagnostic": {"runtime_error": "GPU is lost", "version": "4.5.2"}}', "GPU is lost"),
        ('{"DCGM Diagnostic": {"test_categories": 3}}', '{"DCGM Diagnostic": {"test_categories": 3}}'),
    ],
)
def test_a_dcgm_that_cannot_run_warns_with_its_reason(printed: str, reason: str) -> None:
    finding = read_diagnostic(1, printed)
    assert finding.level == "warn" and finding.message.startswith(f"dcgmi diag -r 1 gives no result: {reason}")


def test_dcgmi_runs_where_it_is_installed_and_the_job_has_all_gpus(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tools.doctor.dcgm.SECONDS", {1: 30, 2: 0.2})
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    assert check_dcgm(2, 8, 8).message == "not run: no dcgmi on PATH"
    (tmp_path / "answer").write_text(dcgm4(PCIE_4))
    make_command(tmp_path, "dcgmi", f'[ "$3" = 1 ] || sleep 20\necho "$@" >&2; cat {tmp_path}/answer')
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    assert check_dcgm(0, 8, 8).message == "not run: --dcgm 0"
    assert check_dcgm(1, 2, 8).message == "not run: it tests all 8 GPUs of the node, of which this job may use 2"
    assert check_dcgm(1, 8, 8).message == "dcgmi diag -r 1: 1 tests"
    late = check_dcgm(2, 8, 8)
    assert (late.level, late.message) == ("warn", "dcgmi diag -r 2 did not end within 0.2 s")
