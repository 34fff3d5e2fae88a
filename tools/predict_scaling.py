"""Forecast throughput and efficiency on more GPUs from a step measured on one.

    python -m tools.predict_scaling --from BENCH.json --gpus 8,64,1024,4096 --gpus-per-node 8 --intra 240 --inter 100
    python -m tools.predict_scaling --published        # forecasts of published measurements, and their errors

A step on N GPUs is the step of one GPU, plus the part of the gradients' all-reduce that backward cannot hide, plus the
wait for the slowest of N ranks. docs/scaling.md has the assumptions and the errors. Units: seconds, bytes, images.
"""

import json
import math
import sys
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import NamedTuple

import torch
from torch.utils.flop_counter import FlopCounterMode

from models import build_model
from models.config import ModelConfig
from tools.common import above_zero, add_count, counts, new_parser, path_argument, read_report
from utils.config import Config
from utils.data.build import find_dataset
from utils.errors import DataError, exit_in_a_line

PUBLISHED = Path(__file__).with_suffix(".json")
IMAGENET = Config(dataset="imagenet", num_classes=1000, stem="imagenet")
BACKWARD = 2 / 3  # of a step: a backward pass multiplies twice for every multiplication of the forward pass
BUCKET, FIRST_BUCKET = 25 * 2**20, 2**20  # bytes; DDP's first bucket is small, so that communication starts early


class Cluster(NamedTuple):
    """Assumptions about a cluster. Bandwidths are those that an all-reduce reaches, not the cable's peak."""

    gpus_per_node: int = 8
    intra: float = 120e9  # bytes/s of one GPU to its neighbours within a node
    inter: float = 10e9  # bytes/s of one node to the others, over all its network cards
    call_latency: float = 17e-6  # seconds to start an all-reduce; this and the next two: NCCL's src/graph/tuning.cc
    intra_latency: float = 3.6e-6  # seconds per hop over NVLink (5.7e-6 over PCIe)
    inter_latency: float = 14e-6  # seconds per hop over a network
    memory: float = 2e12  # bytes/s of a GPU's memory
    copies: float = 2  # passes over the gradients, without the all-reduce: 2 divide them, 6 also fill DDP's buckets
    interference: float = 0.189  # how much slower a GPU computes while it communicates (mean in arXiv:2507.03114)
    noise: float = 0.01  # standard deviation of one rank's step, as a fraction of the step measured on one GPU
    floor: float = 0.010  # seconds; no step is shorter: about a thousand kernel launches of 10 us
    host: float = 0.0  # seconds that the GPU waits for the host's work for DDP; 0 if kernels are queued ahead

    def extremes(self) -> tuple["Cluster", "Cluster"]:
        """Return the cluster with each uncertain input at its worst and at its best; docs/scaling.md says why."""
        worst = self._replace(intra=self.intra / 2, inter=self.inter / 2, noise=2 * self.noise, interference=0.4)
        best = self._replace(intra=self.intra / 0.8, inter=self.inter / 0.8, noise=0.0, interference=0.0)
        return worst._replace(host=481 * 10e-6), best._replace(floor=0.0)  # ResNet50's DDP: 481 kernels of 10 us


def make_buckets(layers: Sequence[tuple[int, float]]) -> list[tuple[int, float]]:
    """Return DDP's buckets. `layers`: (bytes of gradients, cost of backward) in forward order; the gradients come in
    backward order, and the layer that fills a bucket closes it."""
    total = sum(cost for _, cost in layers)
    buckets, size, spent = list[tuple[int, float]](), 0, 0.0
    for layer_bytes, cost in reversed(layers):
        size, spent = size + layer_bytes, spent + cost
        if size >= (BUCKET if buckets else FIRST_BUCKET):
            buckets.append((size, spent / total))
            size = 0
    return [*buckets, (size, 1.0)] if size else buckets


def all_reduce(size: float, gpus: int, machine: Cluster) -> float:
    """Return the seconds to sum `size` bytes over `gpus` GPUs: a ring within each node around the faster of ring
    (2(n-1) hops of 1/n of the bytes; Patarasuk and Yuan, 2009) and double tree between nodes (all bytes up and down,
    log2 n hops each; Sanders et al., 2009). The slower bandwidth decides, as in a pipeline; the latencies add up."""
    local, nodes = min(gpus, machine.gpus_per_node), math.ceil(gpus / machine.gpus_per_node)
    within, seconds = 2 * (local - 1) / local * size / machine.intra, size / machine.inter
    by_ring = max(within, 2 * (nodes - 1) / nodes * seconds) + 2 * (nodes - 1) * machine.inter_latency
    by_tree = max(within, 2 * seconds) + 2 * math.ceil(math.log2(nodes)) * machine.inter_latency
    return machine.call_latency + 2 * (local - 1) * machine.intra_latency + min(by_ring, by_tree)


def expected_maximum(count: int) -> float:
    """Return the mean of the largest of `count` standard normal numbers: the integral of 1 - F^n above 0, F^n below."""
    tails = [0.5 * math.erfc((number + 0.5) / 256 / math.sqrt(2)) for number in range(12 * 256)]  # 1 - F = F(-x)
    return sum(-math.expm1(count * math.log1p(-tail)) - tail**count for tail in tails) / 256


class Step(NamedTuple):
    """A step measured on one GPU."""

    seconds: float
    batch: int  # images
    buckets: list[tuple[int, float]]  # (bytes of gradients, fraction of backward after which they are complete)

    def predict(self, gpus: int, machine: Cluster, batch: float) -> float:
        """Return the seconds of a step with `batch` images on each GPU."""
        computing = max(self.seconds * batch / self.batch, min(machine.floor, self.seconds))
        if gpus == 1:
            return computing
        backward = BACKWARD * computing
        now = done = free = 0.0  # the clock, backward's work so far, when the network is free again
        for size, ready in [*self.buckets, (0, 1.0)]:  # one all-reduce at a time, which slows computing meanwhile
            work = ready * backward - done
            hindered = min(work, max(0.0, free - now) / (1 + machine.interference))  # work done during an all-reduce
            now += work + hindered * machine.interference
            done = ready * backward
            free = max(free, now) + (all_reduce(size, gpus, machine) if size else 0.0)
        copying = machine.copies * sum(size for size, _ in self.buckets) / machine.memory
        straggling = machine.noise * self.seconds * expected_maximum(gpus)
        return computing - backward + free + copying + machine.host + straggling

    def efficiency(self, gpus: int, machine: Cluster, batch: float, reference: int = 1) -> list[float]:
        """Return the forecast of images/s per GPU, relative to `reference` GPUs, and the ends of its interval."""
        ends = (machine, *machine.extremes())
        ratios = [(self.predict(reference, end, self.batch), self.predict(gpus, end, batch)) for end in ends]
        return [batch / self.batch * fewer / more for fewer, more in ratios]


@cache
def layer_costs(network: Config | str) -> list[tuple[int, float]]:
    """Return (bytes of float32 gradients, multiplications) of each layer in forward order. `network`: a configuration,
    or a published case's resnet50-cifar, resnet50-imagenet or unet3d."""
    if network == "unet3d":
        layers = json.loads(PUBLISHED.read_text("utf-8"))["unet3d"]["values"]
        return [(4 * (64 * given + 1) * made, 64.0 * given * made * side**3) for given, made, side in layers]
    if isinstance(network, str):
        network = IMAGENET if network.endswith("imagenet") else Config()
    no_images = network.model_copy(update={"data_loader": "synthetic", "holdout_images": 0})
    side = find_dataset(no_images, download=False).train.image_shape[-1]
    with torch.device("meta"), FlopCounterMode(display=False) as counter:  # shapes without memory
        model = build_model(network, side)
        model(torch.zeros(1, 3, side, side))
    flops, root = counter.get_flop_counts(), type(model).__name__
    sizes = [(name, sum(p.numel() for p in module.parameters(recurse=False))) for name, module in model.named_modules()]
    return [(4 * size, sum(flops.get(f"{root}.{name}", {}).values()) / 2) for name, size in sizes if size]


def read_step(path: Path) -> tuple[Step, str]:
    """Return the fastest step in a report of `tools.bench ladder`, and a line that describes it."""
    report = read_report(path)
    rungs, configs = (report["results"].get(key, {}) for key in ("rungs", "configs"))
    if not rungs:
        raise DataError(f"{path}: not a report of tools.bench ladder, from which a forecast takes the fastest step")
    rate, name = max((float(values["full"]["median"]), name) for name, values in rungs.items())
    settings = configs.get(name, report["config"])
    needed = {*ModelConfig.model_fields, "dataset", "data_path", "image_size", "batch_size"}
    config = Config(**{key: value for key, value in settings.items() if key in needed})
    batch, device = config.batch_size, report["environment"].get("device", "one device")
    described = f"measured: {name}, {rate:,.0f} images/s with batch {batch} on {device} ({path})"
    return Step(batch / rate, batch, make_buckets(layer_costs(config))), described


def published_table(seen: bool) -> Iterator[str]:
    """Yield the lines of a Markdown table of published and predicted efficiencies; `seen`: used for the model."""
    yield "| measurement | device | published | predicted (interval) | error, points | within |"
    yield "|---|---|---|---|---|---|"
    for case in json.loads(PUBLISHED.read_text("utf-8"))["cases"]:
        if case.get("seen", True) is seen:
            step = Step(case["step_ms"] / 1e3, case["batch"], make_buckets(layer_costs(case["model"])))
            batch, reference = case.get("batch_per_gpu", step.batch), case.get("reference", 1)
            middle, low, high = step.efficiency(case["gpus"], Cluster(**case["machine"]), batch, reference)
            found, error = case["published"], 100 * (middle - case["published"])
            inside = "yes" if round(low, 3) <= round(found, 3) <= round(high, 3) else "no"
            row = (case["name"], case["device"], f"{found:.1%}", f"{middle:.1%} ({low:.1%} to {high:.1%})")
            yield f"| {' | '.join([*row, f'{error:+.1f}', inside])} |"


@exit_in_a_line
def main(argv: Sequence[str] | None = None) -> int:
    parser = new_parser("predict_scaling", __doc__)
    source, report = parser.add_mutually_exclusive_group(required=True), "a report of tools.bench ladder"
    source.add_argument("--from", dest="path", type=path_argument, metavar="BENCH.json", help=report)
    source.add_argument("--published", action="store_true", help="compare forecasts with published measurements")
    parser.add_argument("--gpus", type=counts, default="8,16,64,1024,4096", metavar="N,M", help="for how many GPUs")
    add_count(parser, "--gpus-per-node", 8, "GPUs of each node")
    parser.add_argument("--intra", type=above_zero, default=120, help="GB/s of an all-reduce within a node")
    parser.add_argument("--inter", type=above_zero, default=10, help="GB/s of a node to others, over all its cards")
    options = parser.parse_args(argv)
    if options.published:
        print("used for the model:", *published_table(seen=True), "\nnot used:", *published_table(seen=False), sep="\n")
        return 0
    step, described = read_step(options.path)
    machine = Cluster(options.gpus_per_node, options.intra * 1e9, options.inter * 1e9)
    print(described, f"assumed: {len(step.buckets)} buckets of gradients, {machine}", sep="\n")
    print("\nscaling    GPUs  batch/GPU     step, ms      images/s  efficiency (interval)")
    weak = [("weak", gpus, float(step.batch)) for gpus in options.gpus]
    strong = [("strong", gpus, step.batch / gpus) for gpus in options.gpus if gpus <= step.batch]
    for kind, gpus, batch in [*weak, *strong]:
        seconds, (efficiency, low, high) = step.predict(gpus, machine, batch), step.efficiency(gpus, machine, batch)
        row = f"{kind:8} {gpus:6,}  {batch:9.4g}  {seconds * 1e3:11.2f}  {gpus * batch / seconds:12,.0f}"
        note = "  the model does not apply" if high - low > 0.4 else ""  # too wide to say anything
        print(f"{row}  {efficiency:10.1%} ({low:6.1%} to {high:6.1%}){note}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
