"""What the devices of this machine can do, and which is slower than the others."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from tools.doctor.finding import GIGABYTE, Finding

if TYPE_CHECKING:
    import torch

TRIALS = 3
SLOW = 1.15  # times the median of the other devices or ranks


def device_checks(own: "torch.device", *, alone: bool) -> list[Finding]:
    """Ceilings of this rank's own device, or of all that it sees where it is alone on its node."""
    import torch

    from tools.bench.ceilings import host_to_device, memory

    if own.type != "cuda":
        rate, copied = arithmetic(own), memory(own, TRIALS).median
        seen = f"CPU: {1e3 * rate:,.0f} GFLOP/s in float32, memory {copied:.1f} GB/s"
        return [Finding("ceilings", "ok", seen, figures={"float32 TFLOP/s": rate, "memory GB/s": copied})]
    findings, rates = [], []
    for device in devices_of_a_rank(own, alone=alone):
        free, total = torch.cuda.mem_get_info(device)
        rate, copied = arithmetic(device), memory(device, TRIALS).median
        from_host = host_to_device(device, TRIALS).median
        name = f"{torch.cuda.get_device_name(device)} {device.index}"
        rates.append((name, rate))
        seen = (
            f"{name}: {rate:,.0f} TFLOP/s in bf16, memory {copied:,.0f} GB/s, from the host {from_host:.1f} GB/s, "
            f"{free / GIGABYTE:.0f} of {total / GIGABYTE:.0f} GB free"
        )
        busy = free < 0.8 * total
        remedy = "another process holds its memory: nvidia-smi shows which" if busy else ""
        figures = {"bf16 TFLOP/s": rate, "memory GB/s": copied, "from the host GB/s": from_host}
        findings.append(Finding("ceilings", "warn" if busy else "ok", seen, remedy, figures=figures))
    return findings + [finding for finding in check_rates(rates, "slow device") if finding.level != "ok"]


def devices_of_a_rank(own: "torch.device", *, alone: bool) -> list["torch.device"]:
    """Its own, or all that it sees where it is alone on its node."""
    import torch

    if own.type != "cuda" or not alone:
        return [own]
    return [torch.device("cuda", number) for number in range(torch.cuda.device_count())]


def arithmetic(device: "torch.device") -> float:
    """TFLOP/s in the number format that training on this device uses; the best of the trials, since others may use the
    machine for a moment."""
    import torch

    from tools.bench.ceilings import product

    return max(product(device, torch.bfloat16 if device.type == "cuda" else torch.float32, TRIALS).values)


def check_rates(rates: Sequence[tuple[str, float]], check: str) -> list[Finding]:
    """Names every one that is slower than the median of the others by 15 %: all wait for it. `rates`: (name, per
    second)."""
    from utils.training.watch import medians_of_the_others

    others = medians_of_the_others([rate for _, rate in rates]) if len(rates) > 1 else []
    remedy = "look for another process, heat or a power limit there (nvidia-smi -q -d PERFORMANCE); leave the node out"
    slow = [
        Finding(check, "fail", f"{name} takes {other / rate:.2f} times the median of the others", remedy)
        for (name, rate), other in zip(rates, others, strict=False)
        if rate * SLOW < other
    ]
    return slow or [Finding(check, "ok", f"none of {len(rates)} is 15 % slower than the others")]
