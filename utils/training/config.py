"""The keys of the training step: optimizer, schedule, recipe, precision, speed."""

from typing import Annotated, Literal

from pydantic import Field, model_validator

from utils.base_config import Fraction, KeyFlag, NonNegativeInt, PositiveFloat, PositiveInt, SharedConfig
from utils.distributed.config import DistributedConfig

Auto = Literal["auto", True, False]
HAVE_FUSED_KERNEL = ("sgd", "adamw")


class OptimizerConfig(SharedConfig):
    """optimizer"""

    optimizer: Annotated[Literal["sgd", "adamw", "lars", "lamb", "muon"], KeyFlag.FIXED_ON_RESUME] = "sgd"
    """sgd with momentum, adamw, muon; for large batches lars (layer-wise SGD), lamb (layer-wise Adam). muon makes the
    steps of convolutions orthogonal and gives the rest to adamw. A usual lr for adamw is 0.001, for muon 0.03."""
    lr: Annotated[float, Field(gt=0, le=1000)] = 0.1
    """Peak learning rate, before lr_scale_rule."""
    lr_scale_rule: Literal["none", "sqrt", "linear"] = "none"
    """Multiply lr by (batch_size / lr_reference_batch_size), or by its square root."""
    lr_reference_batch_size: PositiveInt = 128
    """The global batch that lr is meant for, where lr_scale_rule is not none."""
    momentum: Fraction = 0.9
    """Momentum of sgd, lars and muon, beta1 of adamw and lamb."""
    nesterov: bool = False
    """Nesterov momentum, of sgd, lars and muon."""
    weight_decay: Annotated[float, Field(ge=0, le=1000)] = 5e-4
    """L2 penalty; for adamw, lamb and muon decoupled from the gradient."""
    weight_decay_bn_bias: Annotated[bool, KeyFlag.FIXED_ON_RESUME] = True
    """Decay BatchNorm's weights and biases too, as the tutorial does."""
    clip_grad_norm: PositiveFloat | None = None
    """Scale a longer gradient down to this Euclidean norm; null: never."""

    @model_validator(mode="after")
    def _check_optimizer(self) -> "OptimizerConfig":
        if self.nesterov and self.momentum == 0:
            raise ValueError("nesterov is true, which needs momentum above 0; momentum is 0")
        if self.nesterov and self.optimizer in ("adamw", "lamb"):
            raise ValueError(f"nesterov is true, which optimizer {self.optimizer} does not have; use nesterov=false")
        return self

    @property
    def peak_lr(self) -> float:
        """lr after `lr_scale_rule`."""
        exponent = {"none": 0.0, "sqrt": 0.5, "linear": 1.0}[self.lr_scale_rule]
        return self.lr * (self.batch_size / self.lr_reference_batch_size) ** exponent


class ScheduleConfig(SharedConfig):
    """schedule"""

    max_epochs: PositiveInt = 100
    """Epochs to train."""
    validate_every_epochs: PositiveInt = 1
    """Validate after every so many epochs, and after the last one."""
    lr_schedule: Literal["plateau", "onecycle", "cosine", "linear", "step", "constant"] = "plateau"
    """What follows the warm-up. plateau, the tutorial's, cuts where the validation loss stops falling; the others are
    functions of the step."""
    lr_warmup_epochs: Annotated[float, Field(ge=0)] = 0
    """Linear warm-up over this many epochs; for onecycle the length of its rise."""
    lr_warmup_by: Literal["step", "epoch"] = "step"
    """Whether the warm-up rises with every step, or with every epoch as the tutorial's does. With epoch, the whole of
    epoch e of N is trained at e/N of the peak."""
    lr_decay_factor: Annotated[float, Field(gt=0, lt=1)] = 0.2
    """plateau, step: each cut multiplies the learning rate by this."""
    lr_plateau_patience: NonNegativeInt = 10
    """plateau: epochs without a better validation loss that are tolerated before a cut."""
    lr_milestones: Annotated[tuple[PositiveInt, ...], Field(strict=False)] = ()
    """step: epochs after which the learning rate is cut."""

    @model_validator(mode="after")
    def _check_schedule(self) -> "ScheduleConfig":
        if self.lr_warmup_epochs > self.max_epochs:
            raise ValueError(f"lr_warmup_epochs {self.lr_warmup_epochs:g} must not exceed max_epochs {self.max_epochs}")
        if self.lr_schedule == "onecycle" and not 0 < self.lr_warmup_epochs < self.max_epochs:
            raise ValueError(
                f"lr_schedule onecycle rises over lr_warmup_epochs, which is {self.lr_warmup_epochs:g}; "
                f"allowed: above 0 and below max_epochs {self.max_epochs}"
            )
        if self.lr_warmup_by == "epoch" and self.lr_schedule == "onecycle":
            raise ValueError("lr_warmup_by is epoch, but lr_schedule onecycle rises with every step; use step")
        if self.lr_warmup_by == "epoch" and self.lr_warmup_epochs % 1:
            raise ValueError(
                f"lr_warmup_by epoch needs whole epochs, lr_warmup_epochs is {self.lr_warmup_epochs:g}; use step"
            )
        if self.lr_schedule == "plateau" and self.validate_every_epochs > 1:
            raise ValueError(
                "lr_schedule plateau follows the validation loss of every epoch; validate_every_epochs is "
                f"{self.validate_every_epochs}, which needs another schedule, such as cosine"
            )
        if self.lr_schedule == "step" and not self.lr_milestones:
            raise ValueError("lr_schedule step cuts at lr_milestones, which is []; list at least one epoch")
        return self


class RecipeConfig(ScheduleConfig):
    """recipe"""

    label_smoothing: Fraction = 0.0
    """Share of the target spread over all classes, in training only."""
    ema_decay: Annotated[float, Field(gt=0, lt=1)] | None = None
    """Validate an exponential moving average of the weights with this decay per step; null: the weights."""
    test_time_flip: bool = False
    """Validate on the mean of the outputs for each image and its mirror image."""
    test_time_shift: Annotated[int, Field(ge=0, le=32)] = 0
    """Validate on shifted images too: by so many pixels, to the lower right and to the upper left. Pixels of the border
    are repeated where none come in; each of these is mirrored too with test_time_flip. 0: none."""
    stop_at_accuracy: Annotated[float, Field(gt=0, le=1)] | None = None
    """End the run at this validation accuracy, a share in [0, 1]; null: never."""
    progressive_image_sizes: Annotated[tuple[Annotated[int, Field(ge=8, le=1024)], ...], Field(strict=False)] = ()
    """Train on images of these sizes in pixels, one after the other, then on whole ones. Validation always sees whole
    ones; []: training too."""
    progressive_image_shares: Annotated[tuple[Annotated[float, Field(gt=0, le=1)], ...], Field(strict=False)] = ()
    """The share of max_epochs at which each of progressive_image_sizes ends, rising."""

    @model_validator(mode="after")
    def _check_sizes(self) -> "RecipeConfig":
        shares = self.progressive_image_shares
        if len(shares) != len(self.progressive_image_sizes) or list(shares) != sorted(set(shares)):
            raise ValueError(
                f"progressive_image_shares {list(shares)} must rise and be as many as progressive_image_sizes "
                f"{list(self.progressive_image_sizes)}"
            )
        return self


class PrecisionConfig(SharedConfig):
    """precision"""

    enable_amp: Auto = False
    """AMP: forward and loss under autocast; auto: not in bf16 on a CPU without kernels for it."""
    amp_dtype: Literal["auto", "fp16", "bf16"] = "auto"
    """AMP: auto is the tutorial's fp16 on CUDA, and bf16 on a CPU that has kernels for it. Where there are
    none (x86 without AVX-512), auto trains in float32, as bf16 would be ten times slower."""
    opt_level: Literal["O0", "O1", "O2", "O3"] | None = None
    """AMP: apex's levels; null: O1 with enable_amp, else O0. O0 float32, O1 autocast, O2 half weights with float32
    BatchNorm and master weights, O3 half throughout."""
    keep_batchnorm_fp32: bool | None = None
    """AMP: O2 and O3 leave BatchNorm in float32; null: O2 does, O3 does not."""
    loss_scale: Literal["dynamic"] | PositiveFloat | None = None
    """AMP: factor on the loss against fp16 underflow; null: dynamic for fp16 in O1 and O2, else none."""
    enable_tf32: bool = False
    """Float32 on NVIDIA's tensor cores with 10-bit mantissas. False, unlike PyTorch's own default for convolutions: the
    baseline is float32."""


class SpeedConfig(OptimizerConfig, PrecisionConfig, DistributedConfig):
    """speed"""

    enable_extra_opts: bool = False
    """EXTRA: the tutorial's group switch for the three keys below where they are null."""
    fused_optimizer: bool | None = None
    """EXTRA: one fused kernel for the whole update; optimizers sgd and adamw have one. null leaves it out for half
    weights on a CPU (O3) before torch 2.14, whose kernel was wrong; true is refused there."""
    zero_grad_set_to_none: bool | None = None
    """EXTRA: drop gradients instead of writing zeros into them."""
    cudnn_benchmark: bool | None = None
    """EXTRA: let cuDNN time its convolution algorithms and keep the fastest."""
    stem_channels: Literal[3, 4, 8] = 3
    """STEM: compute the first convolution with this many channels, those above 3 zero; tensor cores take 4 or 8 at
    once. The network's parameters stay as they are."""
    fuse_norm_relu: Auto = False
    """FUSE: BatchNorm of training, shortcut and ReLU, or SiLU, as one function. Triton's kernels compute it on a GPU,
    some in C++ on a CPU. Needs enable_nhwc and an eager step; auto: on a CPU with a compiler, where the step is so."""
    conv_weight_products: Auto = False
    """CONV: on a CPU, the gradient of a convolution's weights as matrix products. Needs enable_nhwc and an eager step;
    auto: where the step is so, and in bf16 where the processor has kernels for it."""
    conv_winograd: Auto = False
    """CONV: on a CPU, 3x3 convolutions by Winograd's method, with 2.25 to 5 times fewer multiplications. Needs a C++
    compiler, enable_nhwc and an eager step; auto: where all that is so. A 2x2 max-pool behind one is taken with it."""
    enable_compile: Auto = False
    """COMPILE: forward, loss and backward through torch.compile; auto: on CUDA where there is a compiler. A CPU gains
    nothing by it. Validation stays eager, as a second compilation would cost more than it saves."""
    enable_cuda_graphs: Auto = False
    """GRAPHS: capture the training step once and replay it; auto: on CUDA, except for dataparallel. Needs the fused
    optimizer."""
    enable_prefetch: Auto = False
    """PREFETCH: prepare the next batch on a second CUDA stream during the step; auto: on CUDA."""
    keep_cpu_memory: Auto = False
    """ALLOC: on a CPU, keep freed memory in the process; auto: where the C library is glibc. Else the system clears and
    maps it again in every step."""

    def extra_opt(self, key: Literal["fused_optimizer", "zero_grad_set_to_none", "cudnn_benchmark"]) -> bool:
        """The member's own value, or the group's where the member is null."""
        value = getattr(self, key)
        group = self.enable_extra_opts and (key != "fused_optimizer" or self.optimizer in HAVE_FUSED_KERNEL)
        return group if value is None else value

    @model_validator(mode="after")
    def _check_speed(self) -> "SpeedConfig":
        if self.fused_optimizer and self.optimizer not in HAVE_FUSED_KERNEL:
            raise ValueError(f"fused_optimizer is true, but optimizer {self.optimizer} has no fused kernel; use null")
        for key, what in (
            ("fuse_norm_relu", "whose kernels walk NHWC memory"),
            ("conv_weight_products", "which reads images as rows of NHWC memory"),
            ("conv_winograd", "whose transforms walk NHWC memory"),
        ):
            if getattr(self, key) is True and not self.enable_nhwc:
                raise ValueError(f"{key} is true, {what}; it needs enable_nhwc true")
            if getattr(self, key) is True and self.enable_compile is True:
                raise ValueError(f"{key} is for eager steps; set it or enable_compile to false")
        if self.fuse_norm_relu is True and self.enable_sync_bn:
            raise ValueError(
                "fuse_norm_relu is true, which has no BatchNorm over all ranks; enable_sync_bn needs false"
            )
        autocast = self.opt_level == "O1" or (self.enable_amp and self.opt_level is None)
        if self.parallel == "dataparallel" and autocast and self.amp_dtype == "bf16":
            raise ValueError(
                "parallel dataparallel computes in fp16 under autocast, as its threads are not told the number format; "
                "amp_dtype bf16 needs parallel ddp or opt_level O2"
            )
        return self


class VerifyConfig(SharedConfig):
    """verification"""

    verify_every_steps: Annotated[PositiveInt | None, KeyFlag.FREE_ON_RESUME] = None
    """Train one of so many steps twice, and stop where the two differ; null: never. A device that computes wrong is
    named before anything of that step is saved; docs/reliability.md says what is found."""


class TrainingConfig(SpeedConfig, RecipeConfig, VerifyConfig):
    """All training keys."""

    @model_validator(mode="after")
    def _check_average(self) -> "TrainingConfig":
        if self.ema_decay is not None and self.opt_level in ("O2", "O3"):
            raise ValueError(
                f"ema_decay {self.ema_decay:g} needs float32 weights: opt_level O0 or O1, not {self.opt_level}"
            )
        return self

    @model_validator(mode="after")
    def _check_graphs(self) -> "TrainingConfig":
        if self.enable_cuda_graphs is False:
            return self
        if self.enable_cuda_graphs is True and self.parallel == "dataparallel":
            raise ValueError(
                "enable_cuda_graphs is true, but no capture spans the GPUs of parallel dataparallel; use false or auto"
            )
        asked = f"enable_cuda_graphs {str(self.enable_cuda_graphs).lower()}"
        if self.progressive_image_sizes:
            raise ValueError(f"{asked} needs images of one size; progressive_image_sizes gives several, use []")
        if self.optimizer not in HAVE_FUSED_KERNEL:
            raise ValueError(
                f"{asked} needs optimizer sgd or adamw; {self.optimizer} reads the learning rate on the host"
            )
        if not self.extra_opt("fused_optimizer"):
            raise ValueError(
                f"{asked} needs fused_optimizer true (or enable_extra_opts): without it PyTorch's {self.optimizer} "
                "reads the learning rate on the host"
            )
        return self
