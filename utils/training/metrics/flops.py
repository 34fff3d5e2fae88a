"""FLOPs of a training step per image, and the peak FLOP/s of a device: their quotient gives the MFU."""

import json
import re
from collections.abc import Mapping
from itertools import chain
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from utils import seeds
from utils.errors import ConfigError

# TFLOP/s of dense matrix products from NVIDIA's data sheets (https://www.nvidia.com/en-us/data-center/):
# {words of the device name, the longer name first: {number format: TFLOP/s}}
PEAKS: Mapping[str, Mapping[str, float]] = {
    "B200": {"bf16": 2250, "fp16": 2250, "tf32": 1125, "float32": 75},
    "H200 NVL": {"bf16": 835, "fp16": 835, "tf32": 417, "float32": 60},
    "H200": {"bf16": 989, "fp16": 989, "tf32": 494, "float32": 67},
    "H100 NVL": {"bf16": 835, "fp16": 835, "tf32": 417, "float32": 60},
    "H100 PCIe": {"bf16": 756, "fp16": 756, "tf32": 378, "float32": 51},
    "H100": {"bf16": 989, "fp16": 989, "tf32": 494, "float32": 67},
    "A100": {"bf16": 312, "fp16": 312, "tf32": 156, "float32": 19.5},
    "L40S": {"bf16": 362, "fp16": 362, "tf32": 183, "float32": 91.6},
    "L4": {"bf16": 121, "fp16": 121, "tf32": 60, "float32": 30.3},
    "A10": {"bf16": 125, "fp16": 125, "tf32": 62.5, "float32": 31.2},
    "V100-PCIE": {"fp16": 112, "float32": 14},
    "V100": {"fp16": 125, "float32": 15.7},
    "T4": {"fp16": 65, "float32": 8.1},
}


def flops_per_image(model: nn.Module, image_shape: tuple[int, ...]) -> float:
    """Count the floating-point operations of forward and backward pass for one image [C, H, W]; a multiply-add is two.

    Runs on tensors without values (device meta); a network that reads values raises its own error."""
    empty = dict[str, Tensor]()
    for prefix, layer in model.named_modules():  # all names of a tensor, one of a layer: PyTorch restores only one
        tensors = layer.named_parameters(prefix, False, False), layer.named_buffers(prefix, False, False)
        for name, tensor in chain(*tensors):
            dtype = torch.float32 if tensor.is_floating_point() else tensor.dtype
            empty[name] = torch.empty_like(tensor, device="meta", dtype=dtype).requires_grad_(tensor.requires_grad)
    random = seeds.random_state()
    try:
        with FlopCounterMode(display=False) as counter:
            images = torch.empty(2, *image_shape, device="meta")
            outputs: Tensor = torch.func.functional_call(model, empty, (images,), tie_weights=False)
            outputs.sum().backward()
    finally:
        seeds.restore_random_state(random)
    return counter.get_total_flops() / 2


def measured_peak(limits: Mapping[str, float], number_format: str) -> float | None:
    """Peak TFLOP/s in a report of `tools.bench limits`: the faster of matrix products and convolutions. On AMD CPUs,
    MKL's float32 products are slower than oneDNN's convolutions."""
    kinds = (f"product {number_format}, TFLOP/s", f"convolution {number_format} NHWC, TFLOP/s")
    return max((limits[kind] for kind in kinds if kind in limits), default=None)


def published_peak(device_name: str, number_format: str) -> float | None:
    """Peak TFLOP/s of a GPU by its name; None if the table has no entry."""
    known = (formats for name, formats in PEAKS.items() if re.search(rf"\b{name}\b", device_name))
    return next(known, {}).get(number_format)


def read_peak(path: Path, device: str, number_format: str) -> float | None:
    """Return TFLOP/s from a report of `tools.bench limits`; raise `ConfigError` if it is none or of another device."""
    try:
        report = json.loads(path.read_text(encoding="utf-8"))
        subject = f"{report['bench']} on {report['environment']['device']}"
        medians = {name: float(sample["median"]) for name, sample in report["results"].items()}
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise ConfigError(f"limits_report {path}: cannot be read as a report of tools.bench: {error}") from None
    if subject != f"limits on {device}":
        raise ConfigError(f"limits_report {path}: is a report of {subject}; expected limits on {device}")
    return measured_peak(medians, number_format)
