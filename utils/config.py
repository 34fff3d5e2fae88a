"""Typed, checked, frozen configuration: named YAML blocks in, one `Config` out.

Values live in `config/*.yaml`, types and meanings in `Config`, and nowhere else. A file maps block names to flat
mappings; its block `default` lists every key, other blocks merge it (`<<: *DEFAULT`) and list differences.
Precedence: merged blocks < the block itself < `--set KEY=VALUE`.

`python -m utils.config` prints the JSON schema that editors use (kept in config/schema.json).
"""

import difflib
import json
import math
import re
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from ruamel.yaml import YAML
from ruamel.yaml.error import YAMLError
from ruamel.yaml.nodes import MappingNode, Node, ScalarNode, SequenceNode

from utils.errors import ConfigError

# A block's name becomes the folder expts/<name>/, so it can hold neither a separator nor a leading dot.
BLOCK_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+-]{0,99}")

# Whole numbers fit into 32 bits everywhere: PyTorch and NumPy meet larger ones with an overflow.
MAX_INT = 2**31 - 1
PositiveInt = Annotated[int, Field(ge=1, le=MAX_INT)]
NonNegativeInt = Annotated[int, Field(ge=0, le=MAX_INT)]
PerChannel = Field(strict=False, min_length=3, max_length=3)
Fraction = Annotated[float, Field(ge=0, lt=1)]


class Config(BaseModel):
    """Every key of a configuration block. The default values are in the block `default` of each YAML file."""

    model_config = ConfigDict(
        strict=True, frozen=True, extra="forbid", allow_inf_nan=False, use_attribute_docstrings=True
    )

    # ---- data
    dataset: Literal["cifar100", "cifar10", "shapes", "imagefolder", "imagenet"]
    """What to learn: CIFAR-100, CIFAR-10, the built-in drawn shapes that need no file, or images in class folders:
    data_path/train/CLASS/ and data_path/val/CLASS/, one's own or ImageNet's."""
    data_path: Annotated[str, Field(min_length=1)]
    """Folder that holds the datasets, relative to the working directory."""
    download: Literal["auto"] | bool
    """Fetch a missing dataset; auto: yes, except inside a job of Slurm, PBS or LSF (nodes often have no network)."""
    num_classes: Annotated[int, Field(ge=2, le=MAX_INT)]
    """Outputs of the network; must be what the dataset has."""
    cifar100_mean: Annotated[tuple[Annotated[float, Field(ge=0, le=1)], ...], PerChannel]
    """Per-channel mean of CIFAR-100's training images, in [0, 1]; other datasets bring their own."""
    cifar100_std: Annotated[tuple[Annotated[float, Field(gt=0, le=1)], ...], PerChannel]
    """Per-channel standard deviation of CIFAR-100's training images, whose values lie in [0, 1]."""
    data_loader: Literal["torchvision", "dali", "device", "synthetic"]
    """Who cuts, flips, rotates and normalises: torchvision in worker processes, NVIDIA DALI, or the device itself in
    batches from a dataset that lives there; synthetic: nobody, one random batch again and again, to time computing."""
    num_data_workers: NonNegativeInt
    """Worker processes (torchvision) or threads (dali) on each rank, at most its share of the cores; 0 loads in the
    training process."""
    rnd_crop_padding: Annotated[int, Field(ge=0, le=32)]
    """Random crop after padding with this many black pixels on each side; 0: no crop."""
    rnd_horizontal_flip: bool
    """Mirror every second training image, at random."""
    rnd_rotation_angle: Annotated[float, Field(ge=0, le=180)]
    """Rotate training images by up to this many degrees either way; 0: no rotation."""
    rnd_resized_crop: bool
    """imagefolder, imagenet: a random window of 8 to 100 % of the image, resized to image_size, as is usual for
    ImageNet."""
    enable_alternating_flip: bool
    """In place of rnd_horizontal_flip: each image is mirrored in every second epoch, half of them in even ones."""
    cutout_size: NonNegativeInt
    """Blank a square of this many pixels at a random place of each training image; 0: none."""
    mixup_alpha: Annotated[float, Field(ge=0)]
    """Blend pairs of training images and their targets, in shares from Beta(alpha, alpha); 0: none. Training accuracy
    then counts the class of the larger share."""
    cutmix_alpha: Annotated[float, Field(ge=0)]
    """Paste a rectangle of one training image into another, its area from Beta(alpha, alpha); 0: none. Beside mixup,
    each image draws one of the two."""
    image_size: PositiveInt | None
    """imagefolder, imagenet: images become squares of this many pixels; null: 224 for imagenet, the shorter side of the
    first training image for imagefolder."""
    centre_crop_share: Annotated[float, Field(gt=0, le=1)]
    """imagefolder, imagenet: the shorter side is resized to image_size / this, then the central square is cut;
    0.875 is usual for ImageNet. Training images too, unless rnd_resized_crop."""
    fail_on_unreadable: bool
    """imagefolder, imagenet: end the run at an image that cannot be read; false: name and count it, train on another in
    its place, leave it out of validation."""

    # ---- model
    model: Literal[
        "resnet18", "resnet34", "resnet50", "resnet101", "resnet152", "resnet8", "resnet20", "resnet56",
        "resnet9", "vgg16", "vgg16_bn", "alexnet",
    ]  # fmt: skip
    """torchvision's ResNet family, VGG16 (_bn: with BatchNorm) and AlexNet, He's small CIFAR ResNets (8, 20, 56
    layers), or Page's, made for few epochs (9)."""
    stem: Literal["7x7", "3x3", "imagenet"]
    """First convolution of the large ResNets: the tutorial's 7x7 or the usual CIFAR 3x3, stride 1, no max-pool, or for
    224-pixel images torchvision's own, 7x7 with stride 2 and a max-pool. VGG and AlexNet too are torchvision's own
    with imagenet."""
    width: Annotated[int, Field(ge=1, le=64)]
    """resnet8, 9, 20, 56: so many times 16 channels in the first stage; He's have 1, Page's has 4."""
    zero_init_residual: bool
    """ResNets: the last BatchNorm of each residual block starts at 0, so that the block starts as the identity."""

    # ---- optimisation
    lr: Annotated[float, Field(gt=0, le=1000)]
    """Peak learning rate; at a batch of `lr_reference_batch_size` where lr_scale_rule is not none."""
    lr_scale_rule: Literal["none", "sqrt", "linear"]
    """Multiply lr by (batch_size / lr_reference_batch_size), or by its square root."""
    lr_reference_batch_size: PositiveInt
    """The global batch for which lr is meant; only for lr_scale_rule."""
    optimizer: Literal["sgd", "lars", "lamb"]
    """SGD with momentum, or for large batches LARS (layer-wise SGD) or LAMB (layer-wise Adam with decoupled decay)."""
    lars_trust_coefficient: Annotated[float, Field(gt=0)]
    """lars: the size of a layer's step in proportion to its weights, at learning rate 1; 0.001 in the paper."""
    momentum: Fraction
    """Momentum of sgd and lars, beta1 of lamb."""
    nesterov: bool
    """Nesterov momentum, of sgd and lars."""
    weight_decay: Annotated[float, Field(ge=0, le=1000)]
    """L2 penalty; for lamb decoupled from the gradient."""
    weight_decay_bn_bias: bool
    """Apply weight_decay to BatchNorm's weights and to biases too, as the tutorial does."""
    clip_grad_norm: Annotated[float, Field(gt=0)] | None
    """Scale the whole gradient down to this Euclidean norm where it is longer; null: never."""
    ema_decay: Annotated[float, Field(gt=0, lt=1)] | None
    """Validate an exponential moving average of weights and BatchNorm statistics, updated every step with this decay;
    null: the weights themselves."""
    label_smoothing: Fraction
    """Share of the target spread over all classes in training; validation never smooths."""
    lr_schedule: Literal["plateau", "onecycle", "cosine", "step", "constant"]
    """What follows the warm-up: cut on a plateau of the validation loss (the tutorial's), or a function of the step."""
    lr_warmup_epochs: Annotated[float, Field(ge=0)]
    """Linear warm-up, step by step, over this many epochs; for onecycle the length of its rise."""
    lr_decay_factor: Annotated[float, Field(gt=0, lt=1)]
    """plateau and step: multiply the learning rate by this."""
    lr_plateau_patience: NonNegativeInt
    """plateau: epochs without a better validation loss that are tolerated before a cut."""
    lr_milestones: Annotated[tuple[PositiveInt, ...], Field(strict=False)]
    """step: epochs after which the learning rate is cut."""
    max_epochs: PositiveInt
    """Epochs to train."""
    stop_at_accuracy: Annotated[float, Field(gt=0, le=1)] | None
    """End the run after the first epoch with at least this validation accuracy, a share in [0, 1]; null: never."""
    test_time_flip: bool
    """Validate on the mean of the network's outputs for each image and its mirror image."""
    progressive_image_sizes: Annotated[tuple[Annotated[int, Field(ge=8, le=1024)], ...], Field(strict=False)]
    """Train on images of these sizes one after the other, in pixels, resized on the device, then on whole ones; []:
    whole ones throughout. Validation always sees whole ones."""
    progressive_image_shares: Annotated[tuple[Annotated[float, Field(gt=0, le=1)], ...], Field(strict=False)]
    """The share of max_epochs at which each of progressive_image_sizes ends, rising."""
    batch_size: PositiveInt
    """Images in one optimizer step, over all ranks."""
    micro_batch_size: PositiveInt | None
    """At most this many images in one forward pass of one rank, the rest by gradient accumulation; null: the rank's
    whole share at once. BatchNorm sees the micro-batch, so one rank that accumulates equals several that do not."""
    valid_batch_size_per_gpu: PositiveInt
    """Validation images in one forward pass of one rank."""
    seed: NonNegativeInt
    """The one seed: weights, order and augmentation follow from it."""
    deterministic: bool
    """Only deterministic kernels: bitwise equal runs, slower on a GPU, where AlexNet and stem imagenet's VGG16 have
    none."""

    # ---- speed
    device: Literal["auto", "cpu", "cuda"]
    """auto: CUDA where there is a GPU, else the CPU."""
    enable_amp: bool
    """AMP: forward and loss under autocast."""
    amp_dtype: Literal["auto", "fp16", "bf16"]
    """AMP: auto is the tutorial's fp16 with loss scaling on CUDA; on a CPU bf16 where it has kernels for it
    (x86: AVX-512), else float32, as bf16 would be ten times slower."""
    opt_level: Literal["O0", "O1", "O2", "O3"] | None
    """AMP: apex's levels. O0 float32, O1 autocast, O2 half weights with float32 BatchNorm and master weights, O3 half
    throughout; null: O1 with enable_amp, else O0."""
    keep_batchnorm_fp32: bool | None
    """AMP: O2 and O3 leave BatchNorm in float32; null: O2 does, O3 does not."""
    loss_scale: Literal["dynamic"] | Annotated[float, Field(gt=0)] | None
    """AMP: factor on the loss against fp16 underflow; null: dynamic for fp16 in O1 and O2, else none."""
    enable_tf32: bool
    """Float32 products and convolutions of an NVIDIA GPU with the 10-bit mantissas of its tensor cores. False, unlike
    PyTorch's own default for convolutions: the baseline is float32."""
    enable_nhwc: bool
    """NHWC: model and images in the channels_last memory format."""
    enable_extra_opts: bool
    """EXTRA: the tutorial's group switch for the three keys below, each of which follows it where null."""
    fused_optimizer: bool | None
    """EXTRA: one fused kernel for the whole update; optimizer sgd has one."""
    zero_grad_set_to_none: bool | None
    """EXTRA: drop gradients instead of writing zeros into them."""
    cudnn_benchmark: bool | None
    """EXTRA: let cuDNN time its convolution algorithms and keep the fastest."""
    enable_compile: Literal["auto", True, False]
    """COMPILE: forward, loss and backward through torch.compile; validation stays eager, as a second compilation would
    cost more than it saves. auto: where there are a C++ compiler and Python's headers, for CUDA a C compiler
    too."""
    compile_mode: Literal["default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"]
    """COMPILE: torch.compile's mode; reduce-overhead and max-autotune capture CUDA graphs of their own."""
    enable_cuda_graphs: Literal["auto", True, False]
    """GRAPHS: capture the whole training step once and replay it; needs CUDA and the fused optimizer. auto: on CUDA,
    except for dataparallel."""
    enable_prefetch: Literal["auto", True, False]
    """PREFETCH: prepare the next batch on a second CUDA stream during the step. auto: on CUDA."""
    keep_cpu_memory: Literal["auto", True, False]
    """ALLOC: training on a CPU, keep freed memory in the process instead of giving it back to the system, which has to
    clear and map it again in every step. auto: where the C library is glibc."""

    # ---- several processes
    start_timeout_seconds: Annotated[float, Field(gt=0)]
    """How long to wait at the start for all ranks; then the run ends and names those that are missing."""
    collective_timeout_seconds: Annotated[float, Field(gt=0)]
    """How long a rank waits in a collective for the others, rank 0's download of a dataset included."""
    parallel: Literal["ddp", "dataparallel", "no_communication"]
    """DDP: one process per device; or, only to compare with, one process for all GPUs (torch.nn.DataParallel), or DDP
    that never averages gradients, whose ranks train different networks."""
    bucket_cap_mb: Annotated[float, Field(gt=0)]
    """DDP: gradients are reduced in buckets of this many MiB, while backward still computes the others."""
    gradient_as_bucket_view: bool
    """DDP: gradients live inside the buckets: no copy, and one set of gradients less in memory."""
    static_graph: bool
    """DDP: promise that every step uses the same parameters in the same order, which saves looking."""
    broadcast_buffers: bool
    """DDP: copy rank 0's BatchNorm statistics to all in every step; else they are averaged once before validation."""
    enable_sync_bn: bool
    """DDP: BatchNorm over the whole global batch instead of each rank's micro-batch; CUDA only."""
    gradient_compression: Literal["none", "fp16", "bf16"]
    """DDP: send gradients in half the bytes, rounded."""
    enable_cpu_affinity: bool
    """Keep each process on the processor cores nearest its GPU; nothing happens with one process or without a GPU."""

    # ---- output
    log_to_screen: bool
    """Progress and log lines on the terminal."""
    log_to_tensorboard: bool
    """Write TensorBoard event files."""
    save_checkpoint: bool
    """Write the last and the best checkpoint."""
    log_freq: PositiveInt
    """Steps between two log points; the only points where the host waits for the device, unless fp16's loss is scaled
    without fused_optimizer: then PyTorch's scaler waits in every step."""
    checkpoint_every_steps: PositiveInt | None
    """Write a checkpoint every so many optimizer steps too, beside every epoch's; null: no."""
    checkpoint_every_minutes: Annotated[float, Field(gt=0)] | None
    """Write a checkpoint every so many minutes too, beside every epoch's; null: no."""
    checkpoint_async: bool
    """Write checkpoints from a copy in host memory while training goes on, instead of waiting for the disk."""
    keep_checkpoints: PositiveInt
    """How many of the last checkpoints are kept, beside the best."""
    limit_train_batches: PositiveInt | None
    """Train on this many batches of each epoch only; null: all."""
    limit_valid_batches: PositiveInt | None
    """Validate on this many batches of each rank only; null: all."""
    enable_profiling: bool
    """PROF: NVTX ranges where Nsight Systems listens, else a trace, a memory snapshot and a summary in words."""
    profiling_epoch_start: PositiveInt
    """PROF: the epoch (counted from 1) that is profiled."""
    profiling_iters_per_epoch: PositiveInt
    """PROF: with profiling enabled, train on this many batches of each epoch."""

    @model_validator(mode="after")
    def _check_combinations(self) -> "Config":
        # Each message names its keys, since the error is placed where the last of them was set.
        if self.lr_warmup_epochs > self.max_epochs:
            raise ValueError(f"lr_warmup_epochs {self.lr_warmup_epochs:g} must not exceed max_epochs {self.max_epochs}")
        if self.lr_schedule == "onecycle" and not 0 < self.lr_warmup_epochs < self.max_epochs:
            raise ValueError(
                f"lr_schedule onecycle rises over lr_warmup_epochs, which is {self.lr_warmup_epochs:g}; "
                f"allowed: above 0 and below max_epochs {self.max_epochs}"
            )
        if self.lr_schedule == "step" and not self.lr_milestones:
            raise ValueError("lr_schedule step cuts at lr_milestones, which is []; list at least one epoch")
        if self.nesterov and self.momentum == 0:
            raise ValueError("nesterov is true, which needs momentum above 0; momentum is 0")
        if self.nesterov and self.optimizer == "lamb":
            raise ValueError("nesterov is true, which optimizer lamb does not have; use nesterov=false")
        if self.fused_optimizer and self.optimizer != "sgd":
            raise ValueError(f"fused_optimizer is true, but optimizer {self.optimizer} has no fused kernel; use null")
        shares = self.progressive_image_shares
        if len(shares) != len(self.progressive_image_sizes) or list(shares) != sorted(set(shares)):
            raise ValueError(
                f"progressive_image_shares {list(shares)} must rise and be as many as progressive_image_sizes "
                f"{list(self.progressive_image_sizes)}"
            )
        if self.enable_profiling and self.profiling_epoch_start > self.max_epochs:
            raise ValueError(
                f"enable_profiling would profile nothing: profiling_epoch_start {self.profiling_epoch_start} "
                f"exceeds max_epochs {self.max_epochs}"
            )
        if self.batch_size % min(self.micro_batch_size or self.batch_size, self.batch_size):
            raise ValueError(
                f"batch_size {self.batch_size} must be a multiple of micro_batch_size {self.micro_batch_size}"
            )
        return self

    @model_validator(mode="after")
    def _check_model(self) -> "Config":
        small = ("resnet8", "resnet9", "resnet20", "resnet56")
        if self.width != 1 and self.model not in small:
            raise ValueError(f"width {self.width} is for {', '.join(small)}; model {self.model} needs 1")
        if self.zero_init_residual and not self.model.startswith("resnet"):
            raise ValueError(f"zero_init_residual is true, but model {self.model} has no residual blocks; use false")
        if self.model == "alexnet" and self.stem != "imagenet":
            raise ValueError(f"model alexnet is for large images: stem must be imagenet, not {self.stem}")
        if self.stem == "imagenet" and self.model in small:
            raise ValueError(f"model {self.model} is for small images; stem imagenet needs another model")
        if self.ema_decay is not None and self.opt_level in ("O2", "O3"):
            raise ValueError(
                f"ema_decay {self.ema_decay:g} needs float32 weights: opt_level O0 or O1, not {self.opt_level}"
            )
        return self

    @model_validator(mode="after")
    def _check_dataparallel(self) -> "Config":
        autocast = self.opt_level == "O1" or (self.enable_amp and self.opt_level is None)
        if self.parallel == "dataparallel" and autocast and self.amp_dtype == "bf16":
            raise ValueError(
                "parallel dataparallel computes in fp16 under autocast, as its threads are not told the number format; "
                "amp_dtype bf16 needs parallel ddp or opt_level O2"
            )
        return self

    @model_validator(mode="after")
    def _check_graphs(self) -> "Config":
        if self.enable_cuda_graphs is False:
            return self
        if self.enable_cuda_graphs is True and self.parallel == "dataparallel":
            raise ValueError(
                "enable_cuda_graphs is true, but no capture spans the GPUs of parallel dataparallel; use false or auto"
            )
        if self.progressive_image_sizes:
            raise ValueError(
                f"enable_cuda_graphs {str(self.enable_cuda_graphs).lower()} needs images of one size; "
                "progressive_image_sizes gives several, use []"
            )
        if self.optimizer != "sgd":
            raise ValueError(
                f"enable_cuda_graphs {str(self.enable_cuda_graphs).lower()} needs optimizer sgd; "
                f"{self.optimizer} reads the learning rate on the host"
            )
        if not self.extra_opt("fused_optimizer"):
            raise ValueError(
                f"enable_cuda_graphs {str(self.enable_cuda_graphs).lower()} needs fused_optimizer true (or "
                "enable_extra_opts): PyTorch's other SGDs read the learning rate on the host"
            )
        if self.compile_mode in ("reduce-overhead", "max-autotune"):
            raise ValueError(
                f"compile_mode {self.compile_mode} captures CUDA graphs itself; with enable_cuda_graphs use default or "
                "max-autotune-no-cudagraphs"
            )
        return self

    @property
    def peak_lr(self) -> float:
        """lr after `lr_scale_rule`."""
        exponent = {"none": 0.0, "sqrt": 0.5, "linear": 1.0}[self.lr_scale_rule]
        return self.lr * (self.batch_size / self.lr_reference_batch_size) ** exponent

    def extra_opt(self, key: Literal["fused_optimizer", "zero_grad_set_to_none", "cudnn_benchmark"]) -> bool:
        """The member's own value, or the group's where the member is null."""
        value = getattr(self, key)
        group = self.enable_extra_opts and (key != "fused_optimizer" or self.optimizer == "sgd")
        return group if value is None else value


@dataclass(frozen=True)
class _Entry:
    """One key of one block: its value and where it was set."""

    value: Any
    line: int  # sys.maxsize for --set, which is read last
    origin: str  # as the user knows it: file, line and block, or --set


@dataclass(frozen=True)
class _Block:
    """One block with its merges resolved."""

    line: int
    entries: dict[str, _Entry]


def load_config(path: Path, name: str, overrides: Iterable[str] = ()) -> Config:
    """Block `name` of the YAML file `path` with `KEY=VALUE` overrides on top; `ConfigError` for anything wrong."""
    blocks = _read_blocks(path)
    _check_block_name(path, name, blocks)
    entries = blocks[name].entries | dict(_parse_override(override) for override in overrides)
    try:
        return Config(**{key: entry.value for key, entry in entries.items()})
    except ValidationError as error:
        raise ConfigError(_explain(error, f"{path}:{blocks[name].line}: block {name!r}", entries)) from None


def list_blocks(path: Path) -> dict[str, dict[str, Any]]:
    """Every block of the file with the values in which it differs from `default`, in the file's order."""
    blocks = {
        name: {key: entry.value for key, entry in block.entries.items()} for name, block in _read_blocks(path).items()
    }
    base, missing = blocks.get("default", {}), object()
    return {
        name: {key: value for key, value in block.items() if base.get(key, missing) != value}
        for name, block in blocks.items()
    }


def as_yaml(value: Any) -> str:
    """A value as it is written in a block, on one line."""
    text = json.dumps(value, ensure_ascii=False)
    return text if text.isprintable() else json.dumps(value)


def render_config(config: Config, default: Config | None = None) -> str:
    """The configuration as the YAML body of a block; keys that differ from `default` come first."""
    values = config.model_dump(mode="json")
    base = values if default is None else default.model_dump(mode="json")
    different = [key for key in values if values[key] != base[key]]
    lines = [f"{key}: {as_yaml(values[key])}  # default: {as_yaml(base[key])}" for key in different]
    if different:
        lines.append("# as in default:")
    lines += [f"{key}: {as_yaml(values[key])}" for key in values if key not in different]
    return "\n".join(lines) + "\n"


def schema() -> dict[str, Any]:
    """JSON schema of a configuration file: a mapping of block names to blocks, in which no key is required."""
    block = Config.model_json_schema()
    block.pop("required", None)
    block["properties"]["<<"] = {"description": "merge of one block or of a list of blocks"}
    block["title"] = "block"
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "configuration blocks of train.py",
        "type": "object",
        "additionalProperties": block,
    }


def _read_blocks(path: Path) -> dict[str, _Block]:
    root = _compose(path)
    if not isinstance(root, MappingNode):
        raise ConfigError(f"{path}: holds no configuration blocks; expected block names with keys below them")
    names = {id(node): key_node.value for key_node, node in reversed(root.value)}
    blocks: dict[str, _Block] = {}
    for key_node, node in root.value:
        name, line = _scalar_key(path, key_node), key_node.start_mark.line + 1
        if name in blocks:
            raise ConfigError(
                f"{path}:{line}: block {name!r} stands twice, first on line {blocks[name].line}; rename one"
            )
        if not BLOCK_NAME.fullmatch(name):
            raise ConfigError(
                f"{path}:{line}: block name {_shown(name)} cannot name a folder; "
                "allowed: up to 100 letters, digits and . _ + -, beginning with a letter or digit"
            )
        if not isinstance(node, MappingNode):
            raise ConfigError(
                f"{path}:{line}: block {name!r} is {_kind(node)}; expected keys below it, for example <<: *DEFAULT"
            )
        blocks[name] = _Block(line, _flatten(path, name, node, names, parents=()))
    return blocks


def _compose(path: Path) -> Node | None:
    try:
        text = path.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise ConfigError(f"{path}: cannot read the configuration file: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{path}: is no UTF-8 text; expected a YAML file of configuration blocks") from None
    try:
        return YAML(typ="safe", pure=True).compose(text)
    except YAMLError as error:
        mark = getattr(error, "problem_mark", None) or getattr(error, "context_mark", None)
        line = f":{mark.line + 1}" if mark else ""
        raise ConfigError(f"{path}{line}: is not valid YAML 1.2: {_yaml_problem(error)}") from None
    except RecursionError:
        raise ConfigError(f"{path}: is nested too deeply; expected blocks of flat keys") from None


def _yaml_problem(error: YAMLError) -> str:
    """The parser's complaint on one line, with the remedy where it does not say."""
    problem = " ".join(str(getattr(error, "problem", None) or str(error).splitlines()[0]).split())
    remedies = {
        "undefined alias": "its anchor &NAME must stand above it",
        "'\\t'": "indent with spaces",
        "another document": "a file holds one document, without ---",
    }
    return "; ".join([problem] + [remedy for sign, remedy in remedies.items() if sign in problem])


def _scalar_key(path: Path, node: Node) -> str:
    if not isinstance(node, ScalarNode):
        raise ConfigError(f"{path}:{node.start_mark.line + 1}: a key must be a plain word, not a list or mapping")
    return node.value


def _flatten(
    path: Path, name: str, node: MappingNode, names: Mapping[int, str], parents: tuple[int, ...]
) -> dict[str, _Entry]:
    """The keys of a block with its merges (`<<`) resolved; own keys win over merged, earlier merges over later."""
    if id(node) in parents:
        line = node.start_mark.line + 1
        raise ConfigError(f"{path}:{line}: block {name!r} merges itself; remove the cyclic <<")
    merged: dict[str, _Entry] = {}
    own: dict[str, _Entry] = {}
    lines: dict[str, int] = {}
    for key_node, value_node in node.value:
        key, line = _scalar_key(path, key_node), key_node.start_mark.line + 1
        origin = f"{path}:{line}: block {name!r}"
        if key in lines:
            remedy = "merge a list, <<: [*ONE, *OTHER]" if key == "<<" else "keep one"
            raise ConfigError(f"{origin}: key {key!r} stands twice, first on line {lines[key]}; {remedy}")
        lines[key] = line
        if key != "<<":
            own[key] = _Entry(_construct(value_node, key, origin), line, origin)
            continue
        sources = value_node.value if isinstance(value_node, SequenceNode) else [value_node]
        for source in reversed(sources):
            if not isinstance(source, MappingNode):
                raise ConfigError(
                    f"{origin}: << merges {_kind(source)}; expected a block by its anchor, for example <<: *DEFAULT"
                )
            merged |= _flatten(path, names.get(id(source), name), source, names, (*parents, id(node)))
    return merged | own


def _construct(node: Node, key: str, origin: str) -> Any:
    """A key's value, a scalar or a flat list of scalars, by the core schema of YAML 1.2."""
    kind = str(node.tag).removeprefix("tag:yaml.org,2002:")
    if isinstance(node, SequenceNode) and kind == "seq" and all(isinstance(item, ScalarNode) for item in node.value):
        return [_construct(item, key, origin) for item in node.value]
    if kind in ("map", "seq"):
        raise ConfigError(_wrong_value(key, "holds " + ("a mapping" if kind == "map" else "a list in a list"), origin))
    if kind in ("timestamp", "merge", "value"):  # types of YAML 1.1, which 1.2 reads as text
        return node.value
    if kind not in ("str", "int", "float", "bool", "null"):
        tag = kind if kind.startswith("!") else f"!!{kind}"
        raise ConfigError(_wrong_value(key, f"has the tag {tag}, which is not read here", origin))
    try:
        return _constructor().construct_object(node)
    except (YAMLError, ValueError, KeyError, TypeError):
        raise ConfigError(
            _wrong_value(key, f"is {_shown(node.value)}, which cannot be read as {kind}", origin)
        ) from None


@lru_cache(maxsize=1)
def _constructor() -> Any:
    """One for all values: every YAML() searches the disk for plug-ins."""
    return YAML(typ="safe", pure=True).constructor


def _kind(node: Node) -> str:
    if isinstance(node, ScalarNode):
        return _shown(node.value) if node.value else "empty"
    return "a list" if isinstance(node, SequenceNode) else "a mapping"


def _check_block_name(path: Path, name: str, blocks: Mapping[str, Any]) -> None:
    if name not in blocks:
        raise ConfigError(
            f"--config={_shortened(name)}: {path} has no such block{_did_you_mean(name, blocks) or '.'}"
            f" It has: {', '.join(blocks) or 'none'}"
        )


def _parse_override(override: str) -> tuple[str, _Entry]:
    origin = f"--set {_shortened(override)}"
    key, equals, text = override.partition("=")
    key = key.strip()
    if not equals or not key:
        raise ConfigError(f"{origin}: expected KEY=VALUE, for example --set lr=0.2")
    if not text.strip():
        raise ConfigError(_wrong_value(key, "has no value", origin))
    try:
        node = YAML(typ="safe", pure=True).compose(text)
    except YAMLError as error:
        raise ConfigError(f"{origin}: the value is not valid YAML 1.2: {_yaml_problem(error)}") from None
    except RecursionError:
        raise ConfigError(f"{origin}: the value is nested too deeply") from None
    return key, _Entry(None if node is None else _construct(node, key, origin), sys.maxsize, origin)


def _explain(error: ValidationError, block: str, entries: Mapping[str, _Entry]) -> str:
    """Two lines at most: the first thing that is wrong, and which other keys are."""
    problems: dict[str | None, Any] = {}  # the first of each key; None: of a combination of keys
    for problem in error.errors(include_url=False):
        problems.setdefault(str(problem["loc"][0]) if problem["loc"] else None, problem)
    missing = [key for key in problems if key is not None and key not in entries]
    wrong = [key for key in problems if key not in missing]
    if not wrong:
        return (
            f"{block} lacks {', '.join(missing[:4])}{' ...' if len(missing) > 4 else ''}; "
            "begin it with <<: *DEFAULT, or give each a value"
        )
    if wrong[0] is None:
        return _explain_combination(problems[None]["msg"].removeprefix("Value error, "), block, entries)
    value, origin = entries[wrong[0]].value, entries[wrong[0]].origin
    message = _wrong_value(wrong[0], f"is {_shown(value)}", origin) + _hint(wrong[0], value)
    others = ", ".join(_shortened(str(key)) for key in wrong[1:6])
    return message + (f"\nwrong as well: {others}{' ...' if len(wrong) > 6 else ''}" if others else "")


def _explain_combination(message: str, block: str, entries: Mapping[str, _Entry]) -> str:
    """A rule over several keys, placed where the last of the keys that it names was set."""
    named = [entries[word] for word in re.findall(r"\w+", message) if word in entries]
    origin = max(named, key=lambda entry: entry.line).origin if named else block
    return f"{origin}: {message}"


def _wrong_value(key: str, what: str, origin: str) -> str:
    if key not in Config.model_fields:
        near = _did_you_mean(key, Config.model_fields)
        return f"{origin}: unknown key {_shortened(key)!r}{near or '; --print-config shows every key'}"
    return f"{origin}: {key} {what}; allowed: {_allowed(key)}"


def _hint(key: str, value: Any) -> str:
    """What the writer of a wrong value probably meant, where that would be allowed."""
    if key not in Config.model_fields:
        return ""
    if isinstance(value, float) and not math.isfinite(value):
        return "; it must be finite"
    meant = value
    if isinstance(value, str):
        words = {"none": None, "yes": True, "on": True, "y": True, "no": False, "off": False, "n": False}
        try:
            meant = words[value.lower()] if value.lower() in words else json.loads(value.lower())
        except (ValueError, RecursionError):
            return ""
    elif isinstance(value, float) and value.is_integer():
        meant = int(value)
    elif value in (0, 1):
        meant = bool(value)
    try:
        Config(**{key: meant})  # type: ignore[arg-type]
    except ValidationError as error:
        if any(problem["loc"][0] == key for problem in error.errors(include_url=False)):
            return ""
    return f"; write {as_yaml(meant)}" + (" without quotes" if as_yaml(meant) == value else "")


def _did_you_mean(word: str, names: Iterable[str]) -> str:
    near = difflib.get_close_matches(word, list(names), n=1, cutoff=0.5)
    return f". Did you mean {near[0]!r}?" if near else ""


def _shown(value: Any) -> str:
    return _shortened(as_yaml(value))


def _shortened(text: str) -> str:
    """Text from outside, fit for one line of a message."""
    text = text if text.isprintable() else as_yaml(text)
    return text if len(text) <= 60 else text[:57] + "..."


@lru_cache(maxsize=1)
def _properties() -> dict[str, Any]:
    return Config.model_json_schema()["properties"]


def _allowed(key: str) -> str:
    """What a key may be, in words, from the JSON schema of its type."""
    return _in_words(_properties()[key])


def _in_words(part: Mapping[str, Any]) -> str:
    if "anyOf" in part:
        return " or ".join(_in_words(option) for option in part["anyOf"])
    if "enum" in part or "const" in part:
        options = part.get("enum", [part.get("const")])
        return ", ".join(option if isinstance(option, str) else as_yaml(option) for option in options)
    if part["type"] == "array":
        count = f"{part['minItems']} values" if "minItems" in part else "values"
        return f"a list of {count}, each {_in_words(part['items'])}"
    if part["type"] == "integer":
        return f"a whole number from {part['minimum']} to {part['maximum']}"
    names = {"number": "a number", "boolean": "true or false", "string": "a text that is not empty", "null": "null"}
    bounds = {"exclusiveMinimum": "above", "minimum": "at least", "exclusiveMaximum": "below", "maximum": "at most"}
    limits = [f"{word} {part[bound]:g}" for bound, word in bounds.items() if bound in part]
    return " ".join([names[part["type"]], " and ".join(limits)]).strip()


if __name__ == "__main__":
    print(json.dumps(schema(), indent=1))
