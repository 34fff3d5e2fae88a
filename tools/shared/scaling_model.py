"""A model of data-parallel training on N GPUs: pure functions from a measured step to a forecast.

A step on N GPUs is the step of one GPU, plus the part of the gradients' all-reduce that backward cannot hide, plus the
wait for the slowest of N ranks; input may set a lower bound. Units: seconds, bytes, bytes/s, images.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

BACKWARD_SHARE = 2 / 3  # of a step: a backward pass multiplies twice for every multiplication of the forward pass
FIRST_BUCKET = 2**20  # bytes; DistributedDataParallel's first bucket is small, so that communication starts early


@dataclass(frozen=True)
class Cluster:
    """Assumptions about a cluster. Bandwidths are those that an all-reduce reaches, not the cable's peak."""

    gpus_per_node: int = 8
    intra: float = 120e9  # bytes/s of one GPU to its neighbours within a node
    inter: float = 10e9  # bytes/s of one node to the others, over all its network cards
    call_latency: float = 17e-6  # seconds to start an all-reduce; this and the next two: NCCL's src/graph/tuning.cc
    intra_latency: float = 3.6e-6  # seconds per hop over NVLink (5.7e-6 over PCIe)
    inter_latency: float = 14e-6  # seconds per hop over a network
    memory: float = 2e12  # bytes/s of a GPU's memory
    # passes over the gradients in addition to the all-reduce: 2 to divide them, 6 if DDP copies them into its buckets
    copies: float = 2
    interference: float = 0.189  # how much slower a GPU computes while it communicates (mean in arXiv:2507.03114)
    noise: float = 0.01  # standard deviation of one rank's step, as a fraction of the step measured on one GPU
    input_rate: float = math.inf  # images/s that one node's loaders can deliver
    floor: float = 0.010  # seconds; no step is shorter: about a thousand kernel launches of 10 us
    host: float = 0.0  # seconds that the GPU waits for the host's work for DDP; 0 if kernels are queued ahead


@dataclass(frozen=True)
class Bucket:
    """Gradients that are reduced together: their bytes, and the fraction of backward after which they are complete."""

    size: int
    ready: float


@dataclass(frozen=True)
class MeasuredStep:
    """A measured step on one GPU."""

    step: float  # seconds
    batch: int  # images
    buckets: tuple[Bucket, ...]


@dataclass(frozen=True)
class Forecast:
    """The forecast for N GPUs. `efficiency` is relative to N times one GPU."""

    gpus: int
    batch_per_gpu: float
    step: float
    images_per_sec: float
    efficiency: float
    limit: str  # the largest part of the step: compute, launches (the floor), communication, stragglers or input


def make_buckets(layers: Sequence[tuple[int, float]], cap: int = 25 * 2**20) -> tuple[Bucket, ...]:
    """Return DistributedDataParallel's buckets. `layers`: (bytes of gradients, cost of backward) in forward order.

    Gradients come in backward order; the layer that fills a bucket closes it.
    """
    total = sum(cost for _, cost in layers)
    buckets: list[Bucket] = []
    size, spent = 0, 0.0
    for layer_bytes, cost in reversed(layers):
        size, spent = size + layer_bytes, spent + cost
        if size >= (cap if buckets else min(cap, FIRST_BUCKET)):
            buckets.append(Bucket(size, spent / total))
            size = 0
    if size:
        buckets.append(Bucket(size, 1.0))
    return tuple(buckets)


def ring(size: float, members: int, bandwidth: float, latency: float) -> float:
    """Return the seconds of a ring all-reduce: 2(n-1) hops, each of size/n bytes (Patarasuk and Yuan, 2009)."""
    return 2 * (members - 1) * (size / members / bandwidth + latency)


def tree(size: float, members: int, bandwidth: float, latency: float) -> float:
    """Return the seconds of a double binary tree: all bytes up and down, log2 n hops each (Sanders et al., 2009)."""
    return 2 * (size / bandwidth + math.ceil(math.log2(members)) * latency) if members > 1 else 0.0


def all_reduce(size: float, gpus: int, machine: Cluster) -> float:
    """Return the seconds to sum `size` bytes over `gpus` GPUs, with the faster of ring and tree between nodes.

    With several nodes: a ring within each (reduce-scatter, all-gather) around an all-reduce between them. The stages
    are pipelined in chunks, so the slower bandwidth decides, and the latencies add up.
    """
    local = min(gpus, machine.gpus_per_node)
    nodes = math.ceil(gpus / machine.gpus_per_node)
    within = ring(size, local, machine.intra, 0.0)
    start = machine.call_latency + ring(0.0, local, machine.intra, machine.intra_latency)
    if nodes == 1:
        return within + start
    between = (algorithm(size, nodes, machine.inter, 0.0) for algorithm in (ring, tree))
    starts = (algorithm(0.0, nodes, machine.inter, machine.inter_latency) for algorithm in (ring, tree))
    return start + min(max(within, bytes_) + hops for bytes_, hops in zip(between, starts, strict=True))


def overlap(backward: float, buckets: Sequence[tuple[float, float]], interference: float = 0.0) -> float:
    """Return the seconds from the start of backward to the last reduced gradient.

    `backward`: seconds without communication; `buckets`: (seconds of all-reduce, fraction of backward after which it
    can start), in order. One all-reduce runs at a time; while it runs, computing is slower by `interference`.
    """
    now = done = free = 0.0  # the clock, backward's work so far, when the network is free again
    for seconds, ready in buckets:
        work = ready * backward - done
        hindered = min(work, max(0.0, free - now) / (1 + interference))  # work done during an all-reduce
        now += work + hindered * interference
        done = ready * backward
        free = max(free, now) + seconds
    work = backward - done
    now += work + min(work, max(0.0, free - now) / (1 + interference)) * interference
    return max(now, free)


def expected_maximum(count: int) -> float:
    """Return the mean of the largest of `count` independent standard normal numbers: 0, 0.564, 0.846, ...

    Integrates 1 - F^n above 0 and F^n below, F being the normal distribution.
    """
    if count == 1:
        return 0.0
    step = 1 / 256
    tails = [0.5 * math.erfc((number + 0.5) * step / math.sqrt(2)) for number in range(12 * 256)]  # 1 - F = F(-x)
    return step * sum(-math.expm1(count * math.log1p(-tail)) - tail**count for tail in tails)


def extremes(machine: Cluster) -> tuple[Cluster, Cluster]:
    """Return the machine with every uncertain input unfavourable, and with every one favourable.

    - Bandwidth: half of the assumed one; the links' peak (80 % of it is assumed).
    - Noise: twice that of one GPU, as ranks of a node share its processors; none, as if all ranks were slow at the same
      time.
    - Interference: 40 %, the most in arXiv:2507.03114; none, as if the cards reduced and the GPU only computed.
    - Host's work for DDP: ResNet50 has 161 gradients, which a DDP copies into its buckets and back, and 159 buffers,
      which it broadcasts: 481 more kernels of 10 us, as in `floor`. Exposed if the loop waits for the GPU in every
      step; hidden if kernels are queued ahead.
    - Floor: unchanged; none, as if the step were captured in a CUDA graph.
    """
    worst = replace(
        machine,
        intra=machine.intra / 2,
        inter=machine.inter / 2,
        noise=2 * machine.noise,
        interference=max(0.40, machine.interference),
        host=machine.host + 481 * 10e-6,
    )
    best = replace(
        machine,
        intra=machine.intra / 0.8,
        inter=machine.inter / 0.8,
        noise=0.0,
        interference=0.0,
        host=0.0,
        floor=0.0,
    )
    return worst, best


def predict(work: MeasuredStep, gpus: int, machine: Cluster, *, batch_per_gpu: float | None = None) -> Forecast:
    """Return one point of a scaling curve: weak (`work.batch` images per GPU), or with `batch_per_gpu` images."""
    batch = float(work.batch) if batch_per_gpu is None else batch_per_gpu
    computing = max(work.step * batch / work.batch, min(machine.floor, work.step))
    backward = BACKWARD_SHARE * computing
    exposed = 0.0  # communication not hidden by backward, with interference, copies and the host's work
    if gpus > 1:
        copying = machine.copies * sum(bucket.size for bucket in work.buckets) / machine.memory
        reductions = [(all_reduce(bucket.size, gpus, machine), bucket.ready) for bucket in work.buckets]
        exposed = overlap(backward, reductions, machine.interference) - backward + copying + machine.host
    straggling = machine.noise * work.step * expected_maximum(gpus)
    computed = computing + exposed + straggling
    fed = batch * min(gpus, machine.gpus_per_node) / machine.input_rate
    at_floor = computing > work.step * batch / work.batch
    parts = {"launches" if at_floor else "compute": computing, "communication": exposed, "stragglers": straggling}
    step = max(computed, fed)
    return Forecast(
        gpus=gpus,
        batch_per_gpu=batch,
        step=step,
        images_per_sec=gpus * batch / step,
        efficiency=work.step * batch / (step * work.batch),
        limit="input" if fed > computed else max(parts, key=lambda part: parts[part]),
    )
